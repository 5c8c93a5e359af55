"""Rows in another order or number: fused weights that each rank fused, and vocabularies."""

from __future__ import annotations

import json
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

import ckpttool
from tests.support.checkpoints import cut, noise, write_file, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.families import option, to_mindformers, write_model
from tests.support.readers import Entry, read, read_ranks

PARTS = {"linear_fc1=2": (1, 1), "w_qkv=q:4,k:2,v:2": (4, 2, 2), "*.w_qkv.*=q:1,k:1,v:2": (1, 1, 2)}


def fused_by(ranks, parts, whole):
    """Return a weight as so many ranks fuse their own parts of it, one after another."""
    sizes = np.cumsum([0, *parts]) * (len(whole) // sum(parts))
    blocks = [np.split(whole[a:b], ranks) for a, b in pairwise(sizes)]
    return np.concatenate([block[rank] for rank in range(ranks) for block in blocks])


def strategy_of(path, ranks, names, columns=1):
    maps = {name: [1, 0] if name.endswith("weight") else [1] for name in names}
    matrix = [ranks // columns, columns]
    items = {name: {"dev_matrix": matrix, "tensor_map": of} for name, of in maps.items()}
    path.write_text(json.dumps({"parallel_layout_item": items}))
    return path


@pytest.mark.parametrize("after", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("before", [1, 2, 4, 6])
@pytest.mark.parametrize("typed", PARTS)
def test_what_each_rank_fused_is_regrouped(tmp_path, typed, before, after):
    component = "linear_fc1" if typed.startswith("linear") else "w_qkv"
    names = [f"layers.0.{component}.weight", f"adam_m.layers.0.{component}.weight", "other.weight"]
    full = {name: noise(name, "Float16", (96, 5)) for name in names}

    def stored(ranks):
        shown = {name: fused_by(ranks, PARTS[typed], full[name].array()) for name in names[:2]}
        rows = {name: full[name]._replace(data=array.tobytes()) for name, array in shown.items()}
        return full | rows

    src, dst = (strategy_of(tmp_path / f"{n}.json", n, names) for n in (before, after))
    source = cut(stored(before), ckpttool.read_strategy(src))
    write_ranks(tmp_path / "src", source, "ckpt")
    options = {"fused": [typed], "format": "ckpt"}
    done = ckpttool.reshard(tmp_path / "src", src, dst, tmp_path / "dst", **options)
    is_idle = any(note.message.startswith("--fused changes nothing") for note in done.notes)
    assert is_idle == (before == after)
    assert read_ranks(tmp_path / "dst") == cut(stored(after), ckpttool.read_strategy(dst))
    ckpttool.merge(tmp_path / "src", src, tmp_path / "m.ckpt", fused=[typed])
    assert read(tmp_path / "m.ckpt") == full


def test_rows_that_parts_do_not_divide_are_told_with_the_option(tmp_path):
    write_file(tmp_path / "m.ckpt", {"w_qkv.weight": noise("w", "Float16", (96, 5))}, "ckpt")
    strategy = strategy_of(tmp_path / "s.json", 4, ["w_qkv.weight"])
    words = ["-o", tmp_path / "ranks", "--fused", "w_qkv=q:3,k:1,v:1"]
    said = message(run("split", tmp_path / "m.ckpt", "-d", strategy, *words))
    assert "96 rows are not divisible by 1 x 5, for slices of 3:1:1" in said
    assert said.endswith("Try: --fused with the parts of this weight")


@pytest.mark.parametrize(
    ("name", "shape", "tensor_map"),
    [
        ("experts.w13_weight", (4, 6, 5), [0, -1, -1]),
        ("moe.stacked_fc1", (4, 6, 5), [0, -1, -1]),
        ("linear_fc1.weight", (6, 8), [-1, 0]),
    ],
)
def test_slices_along_another_axis_than_the_fused_one_leave_the_order(
    tmp_path, name, shape, tensor_map
):
    entry = noise(name, "Float32", shape)
    write_file(tmp_path / "m.ckpt", {name: entry}, "ckpt")
    strategy = tmp_path / "s.json"
    items = {name: {"dev_matrix": [2], "tensor_map": tensor_map}}
    strategy.write_text(json.dumps({"parallel_layout_item": items}))
    words = ["-o", tmp_path / "ranks", "--format", "ckpt", "--fused", f"{name}=2"]
    run_well("split", tmp_path / "m.ckpt", "-d", strategy, *words)
    expected = cut({name: entry}, ckpttool.read_strategy(strategy))
    assert read_ranks(tmp_path / "ranks") == expected


MODEL = {"model.embed_tokens.weight": (61, 6), "lm_head.weight": (61, 6), "norm.weight": (6,)}
CHANGES = {  # what is typed, the rows that come of it
    ("--pad-vocab", "64"): 64,
    ("--pad-vocab", "multiple:8"): 64,
    ("--pad-vocab", "multiple:61"): 61,
    ("--pad-vocab", "128"): 128,
    ("--cut-vocab", "40"): 40,
}


def resized(entry, rows):
    array = np.zeros((rows, *entry.shape[1:]), entry.array().dtype)
    kept = min(rows, entry.shape[0])
    array[:kept] = entry.array()[:kept]
    return entry._replace(shape=array.shape, data=array.tobytes())


@pytest.mark.parametrize(("typed", "rows"), CHANGES.items())
def test_a_vocabulary_gets_other_rows(tmp_path, typed, rows):
    full = {name: noise(name, "Float32", shape) for name, shape in MODEL.items()}
    full["adam_m.lm_head.weight"] = noise("adam", "Float32", (61, 6))
    write_file(tmp_path / "m.ckpt", full, "ckpt")
    wanted = {n: it if n == "norm.weight" else resized(it, rows) for n, it in full.items()}
    run_well("merge", tmp_path / "m.ckpt", "-o", tmp_path / "out.ckpt", *typed)
    assert read(tmp_path / "out.ckpt") == wanted
    ranks = 4 if rows % 4 == 0 else 1
    names = [name for name in full if name != "norm.weight"]
    strategy = strategy_of(tmp_path / "s.json", ranks, names)
    words = (
        "-d",
        strategy,
        "-o",
        tmp_path / "ranks",
        "--format",
        "ckpt",
        "--not-in-target",
        "full",
    )
    run_well("split", tmp_path / "m.ckpt", *words, *typed)
    assert read_ranks(tmp_path / "ranks") == cut(wanted, ckpttool.read_strategy(strategy))
    back = ("-s", strategy, "-o", tmp_path / "back.ckpt", "--cut-vocab", str(min(rows, 61)))
    run_well("merge", tmp_path / "ranks", *back)
    kept = {n: it if n == "norm.weight" else resized(it, min(rows, 61)) for n, it in full.items()}
    assert read(tmp_path / "back.ckpt") == kept


def test_a_vocabulary_is_known_by_the_name_that_a_recipe_gives_it(tmp_path):
    _, full = write_model(tmp_path / "hf", "deepseek-v4-mtp")
    names = {
        "embed.weight": "embedding.word_embeddings.weight",
        "head.weight": "output_layer.weight",
    }
    table = "layers.0.ffn.gate.tid2eid"  # the experts of each word
    names[table] = "decoder.layers.0.mlp.router.tid2eid"
    recipe = ("--recipe", "deepseek-v4:fc1=interleaved")
    words = ("merge", tmp_path / "hf", *recipe, "--pad-vocab")
    run_well(*words, "multiple:48", "-o", tmp_path / "ms.ckpt")
    made = read(tmp_path / "ms.ckpt")
    for name, new in names.items():
        rows = -(-full[name].shape[0] // 48) * 48
        assert rows > full[name].shape[0]
        assert made[new] == resized(full[name], rows)
    said = message(run(*words, "multiple:48", "--pad-with", "mean", "-o", tmp_path / "no.ckpt"))
    assert "rows in Int64 have no mean" in said
    back = ("-o", tmp_path / "back", "--hf-config", tmp_path / "hf", "--cut-vocab", "64")
    run_well("merge", tmp_path / "ms.ckpt", *recipe, *back)
    assert read(tmp_path / "back" / "model.safetensors") == full


@pytest.mark.parametrize("vocab", [(), ("--vocab", "output_layer.*", "--vocab", "*embed*.*")])
def test_a_copy_that_a_recipe_writes_has_the_rows_of_what_it_copies(tmp_path, vocab):
    config, full = write_model(tmp_path / "hf", "deepseek-v3-mtp")
    choices = {"fc1": "interleaved", "mla": "separate", "mode": "graph"}
    made = to_mindformers(config, full, "deepseek-v3", choices)
    write_file(tmp_path / "m.ckpt", made, "ckpt")
    words = ["merge", tmp_path / "m.ckpt", "-o", tmp_path / "out", "--hf-config", tmp_path / "hf"]
    run_well(*words, "--recipe", option("deepseek-v3", choices), "--cut-vocab", "40", *vocab)
    got = read(tmp_path / "out" / "model.safetensors")
    copied = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    names = [(f"model.layers.3.{copy}.weight", f"{of}.weight") for copy, of in copied.items()]
    assert got == full | {n: resized(full[of], 40) for copy, of in names for n in (copy, of)}


def test_slices_that_do_not_divide_the_vocabulary_are_named_with_more_rows(tmp_path):
    shapes = {"embed_tokens.weight": (61, 6), "other.weight": (61, 6)}
    full = {name: noise(name, "Float32", shape) for name, shape in shapes.items()}
    write_file(tmp_path / "m.ckpt", full, "ckpt")
    target = tmp_path / "t.yaml"
    target.write_text(
        "ckpttool_strategy: 1\nranks: 8\nparameters:\n"
        "  embed_tokens.weight: [8, 1]\notherwise: replicated\n"
    )
    words = ["split", tmp_path / "m.ckpt", "-d", target, "-o", tmp_path / "o"]
    assert "Try: --pad-vocab multiple:8" in message(run(*words))
    said = message(run(*words, "--pad-vocab", "8"))
    assert "61 rows, and 8 are wanted" in said
    assert "cannot shard" not in said
    run_well(*words, "--pad-vocab", "multiple:8")


def test_state_of_a_named_tensor_follows_and_others_are_told(tmp_path):
    shapes = {"wte.weight": (61, 6), "adam_m.wte.weight": (61, 6), "output.weight": (61, 6)}
    full = {name: noise(name, "Float32", shape) for name, shape in shapes.items()}
    write_file(tmp_path / "m.ckpt", full, "ckpt")
    words = ["merge", tmp_path / "m.ckpt", "-o", tmp_path / "out.ckpt", "--pad-vocab", "64"]
    result = run(*words, "--vocab", "wte.weight")
    assert result.exit_code == 0
    assert "1 other tensor has 61 rows, too" in message(result)
    kept = {n: it if n == "output.weight" else resized(it, 64) for n, it in full.items()}
    assert read(tmp_path / "out.ckpt") == kept
    assert run(*words, "--vocab", "wte.weight", "--strict", "--overwrite").exit_code == 5


TYPES = {"Float64": "f8", "Float32": "f4", "Float16": "f2", "BFloat16": ml_dtypes.bfloat16}


def entry(dtype, array):
    return Entry(dtype, array.shape, array.tobytes())


def normal(name, dtype, shape):
    """Return a tensor of usual numbers, the same in every run."""
    numbers = np.random.default_rng(list(name.encode())).standard_normal(shape)
    return entry(dtype, numbers.astype(TYPES[dtype]))


def with_means(stored, rows):
    """Return an entry whose new rows are the mean of the others, added in order in Float64."""
    array, total = np.frombuffer(stored.data, TYPES[stored.dtype]).reshape(stored.shape), 0.0
    for row in array:
        total = total + row.astype(np.float64)
    mean = total / len(array)
    if stored.dtype == "BFloat16":  # by way of Float32 it would be rounded twice
        exponent = np.frexp(mean)[1] - 8
        mean = np.ldexp(np.rint(np.ldexp(mean, -exponent)), exponent)
    more = np.broadcast_to(mean.astype(array.dtype), (rows - len(array), *array.shape[1:]))
    return entry(stored.dtype, np.concatenate([array, more]))


WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight", "main_param.lm_head.weight")


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("dtype", TYPES)
def test_new_rows_are_the_mean_of_the_others(tmp_path, monkeypatch, dtype, ranks):
    monkeypatch.setattr("ckpttool.storage.region_io.SUM_SIZE", 60)  # several bands of rows
    full = {name: normal(name, dtype, (60, 6)) for name in WEIGHTS}
    full["lm_head.bias"] = normal("bias", dtype, (60,))
    states = {"adam_m.lm_head.weight": normal("adam", "Float32", (60, 6))}
    wanted = {name: with_means(stored, 132) for name, stored in full.items()}
    wanted |= {name: resized(stored, 132) for name, stored in states.items()}
    src = strategy_of(tmp_path / "3.json", 3, wanted)
    dst = strategy_of(tmp_path / f"{ranks}.json", ranks, wanted, columns=-(-ranks // 3))
    write_ranks(tmp_path / "src", cut(full | states, ckpttool.read_strategy(src)), "ckpt")
    words = [tmp_path / "src", "-s", src, "--pad-vocab", "132", "--pad-with", "mean"]
    done = run_well("merge", *words, "-o", tmp_path / "m.safetensors")
    assert "new rows are means in" in message(done)
    assert read(tmp_path / "m.safetensors") == wanted
    (made,) = ckpttool.scan(tmp_path / "m.safetensors").files.values()
    assert made.attrs["ckpttool.pad_with"] == "mean"
    manifest = (tmp_path / "m.safetensors.ckpttool.json").read_text()
    assert '"made": {"pad_vocab": "132", "pad_with": "mean"}' in manifest
    words += ["-d", dst, "-o", tmp_path / "dst", "--format", "ckpt"]
    run_well("reshard", *words, "--engine", "processes:2")
    assert read_ranks(tmp_path / "dst") == cut(wanted, ckpttool.read_strategy(dst))
    for rank in range(ranks):  # each by itself reads all rows
        run_well("reshard", *words, "--overwrite", "--rank", rank)
    assert read_ranks(tmp_path / "dst") == cut(wanted, ckpttool.read_strategy(dst))


def test_new_rows_are_the_mean_of_rows_as_they_are_written(tmp_path):
    full = {name: normal(name, "Float32", (61, 6)) for name in WEIGHTS[:2]}
    write_file(tmp_path / "m.ckpt", full, "ckpt")
    words = ["--pad-vocab", "64", "--pad-with", "mean"]
    cast = ["--dtype", "bf16"]
    run_well("merge", tmp_path / "m.ckpt", "-o", tmp_path / "once.ckpt", *words, *cast)
    run_well("merge", tmp_path / "m.ckpt", "-o", tmp_path / "cast.ckpt", *cast)
    run_well("merge", tmp_path / "cast.ckpt", "-o", tmp_path / "twice.ckpt", *words)
    assert read(tmp_path / "once.ckpt") == read(tmp_path / "twice.ckpt")
    counted = [
        ckpttool.merge(tmp_path / "m.ckpt", None, tmp_path / "no.ckpt", dry_run=True, **more)
        for more in ({}, {"pad_vocab": 64, "pad_with": "mean"})
    ]
    less, more = (one.dry_run.reads.nbytes for one in counted)
    assert more - less == sum(len(stored.data) for stored in full.values())


MISTAKES = {
    ("--pad-vocab", "40"): "has 61 rows, and 40 are wanted",
    ("--cut-vocab", "64"): "has 61 rows, and 64 are wanted",
    ("--pad-vocab", "64", "--vocab", "*.weight"): "several sizes",
    ("--pad-vocab", "64", "--vocab", "wte.*"): "no tensor matches 'wte.*'",
    ("--pad-vocab", "64", "--pad-with", "mean", "--vocab", "count"): "rows in Int32 have no mean",
    ("--fused", "*.weight=2", "--fused", "lm_head=2"): "several --fused are about it",
    ("--fused", "linear_fc1=2"): "no tensor matches 'linear_fc1'",
}


@pytest.mark.parametrize(("typed", "said"), MISTAKES.items())
def test_what_cannot_be_is_said_before_the_first_byte(tmp_path, typed, said):
    full = {name: noise(name, "Float32", shape) for name, shape in MODEL.items()}
    full["count"] = noise("count", "Int32", (61, 6))
    write_file(tmp_path / "m.ckpt", full, "ckpt")
    result = run("merge", tmp_path / "m.ckpt", "-o", tmp_path / "out.ckpt", *typed)
    assert (result.exit_code, (tmp_path / "out.ckpt").exists()) == (5, False)
    assert said in message(result)
