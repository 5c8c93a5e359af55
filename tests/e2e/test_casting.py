"""--dtype on every command that takes it: against NumPy and ml_dtypes, and what is said of it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ckpttool
from ckpttool.execution import execute as execute_module
from ckpttool.model.layout import Layout
from tests.support.checkpoints import cut, strategy_of, write_file, write_holes, write_ranks
from tests.support.commands import SUFFIXES, message, peak_mib, run, run_well
from tests.support.readers import Entry, read, read_ranks

NUMPY = {
    "Float64": np.dtype("<f8"),
    "Float32": np.dtype("<f4"),
    "Float16": np.dtype("<f2"),
    "BFloat16": np.dtype(ml_dtypes.bfloat16),
}
WORDS = {"fp32": "Float32", "fp16": "Float16", "bf16": "BFloat16"}
SHAPES = {"w": (64, 48), "v": (16, 32), "n": (8, 2, 3), "b": (8,), "k": (2, 4, 3, 2), "s": ()}
DST = Layout((2, 4), ((1,), ()))  # eight ranks, of which each second has a replica of a slice


def values(name, shape, dtype):
    random = np.random.default_rng([*name.encode()])
    numbers = random.standard_normal(shape) * (1e-6 if name.startswith("adam") else 0.02)
    flat = np.asarray(numbers).reshape(-1)
    if flat.size > 10:
        flat[3], flat[5], flat[7] = np.nan, 0, -1e-30
    return flat.reshape(shape).astype(NUMPY[dtype])


def entry(array, dtype):
    return Entry(dtype, array.shape, array.tobytes())


def tensors(dtype="Float32"):
    arrays = {name: values(name, shape, dtype) for name, shape in SHAPES.items()}
    arrays["adam_v.w"] = values("adam_v.w", SHAPES["w"], dtype)
    entries = {name: entry(array, dtype) for name, array in arrays.items()}
    step = np.array([7], "<i4")
    return entries | {"global_step": entry(step, "Int32")}


def write_source(entries, format="ckpt"):
    """Write ranks of a strategy; return the words that name them."""
    rows, columns = Layout((4,), ((0,), ())), Layout((4,), ((), (0,)))
    layouts = {"w": rows, "v": columns, "adam_v.w": rows, "b": Layout((4,), ((0,),))}
    strategy = strategy_of(layouts)
    write_ranks(Path("src"), cut(entries, strategy), format)
    ckpttool.write_strategy(strategy, "s.ckpt")
    unsharded = {n: layout for n, layout in layouts.items() if n != "b"}
    dst = {n: DST if n != "v" else Layout((2, 4), ((), (0,)), 2) for n in unsharded}
    ckpttool.write_strategy(strategy_of(dst), "d.ckpt")
    return ["src", "-s", "s.ckpt"]


def expected(tensor, dtype):
    array = np.frombuffer(tensor.data, NUMPY[tensor.dtype]).reshape(tensor.shape)
    with np.errstate(all="ignore"):
        if tensor.dtype == "Float64":  # no case has a number that is rounded twice
            array = array.astype("<f4")
        cast = array.astype(NUMPY[dtype])
    return entry(cast, dtype)


def assert_same(tensors, wanted):
    """Compare tensors; NaN equals NaN."""
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name][:2] == tensor[:2], name
        if tensor.dtype not in NUMPY:
            assert tensors[name].data == tensor.data
            continue
        sides = (np.frombuffer(side.data, NUMPY[tensor.dtype]) for side in (tensors[name], tensor))
        with np.errstate(all="ignore"):  # a signalling NaN
            a, b = (side.astype("<f8") for side in sides)
        np.testing.assert_array_equal(a, b, err_msg=name)


def cast_entries(entries, dtype, names):
    return {n: expected(tensor, dtype) if n in names else tensor for n, tensor in entries.items()}


def cast_of(*words):
    return json.loads(run_well(*words, "--json").stdout)["cast"]


@pytest.mark.parametrize("format", SUFFIXES)
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("dtype", ["Float32", "Float16", "BFloat16"])
def test_weights_are_cast_and_states_and_counters_kept(dtype, word, format):
    entries = tensors(dtype)
    out = Path(f"out/m{SUFFIXES[format]}")
    cast = cast_of("merge", *write_source(entries), "-o", out, "--dtype", word)
    wanted = cast_entries(entries, WORDS[word], SHAPES)
    assert_same(read(out), wanted)
    if dtype == WORDS[word]:
        assert cast == {"tensors": [], "kept": 8, "saved_bytes": 0}
        return
    before, after = (sum(len(tensor.data) for tensor in of.values()) for of in (entries, wanted))
    assert cast.pop("tensors") == [{"from": dtype, "to": WORDS[word], "tensors": len(SHAPES)}]
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    x, y = (
        np.concatenate(
            [np.frombuffer(of[n].data, NUMPY[of[n].dtype]).astype("<f8") for n in SHAPES]
        )
        for of in (entries, wanted)
    )
    errors = np.abs(x - y)
    with np.errstate(all="ignore"):
        relative = np.nanmax(errors / np.abs(x))
    assert cast.pop("max_rel") == pytest.approx(relative, rel=1e-6)
    assert cast == {
        "kept": 2,
        "saved_bytes": before - after,
        "elements": elements,
        "zeros": int(((x != 0) & (y == 0)).sum()),
        "infinities": 0,
        "max_abs": np.nanmax(errors),
    }


@pytest.mark.parametrize("engine", ["inline", "threads:2", "processes:2"])
def test_ranks_get_the_same_numbers_as_a_merge_and_replicas_count_once(engine):
    source = write_source(tensors())
    of_merge = cast_of("merge", *source, "-o", "m.safetensors", "--dtype", "bf16")
    words = ["-d", "d.ckpt", "-o", "out", "--dtype", "bf16", "--engine", engine]
    of_reshard = cast_of("reshard", *source, *words, "--format", "ckpt")
    saved = {cast.pop("saved_bytes") for cast in (of_merge, of_reshard)}
    assert len(saved) == 2  # replicas are smaller, too
    assert of_merge == of_reshard
    run_well("diff", "m.safetensors", "out", "--b-strategy", "d.ckpt")
    run_well("split", "m.safetensors", "-d", "d.ckpt", "-o", "split", "--format", "ckpt")
    assert read_ranks(Path("split")) == read_ranks(Path("out"))
    run_well("verify", "out", "--check-manifest")


def test_convert_casts_the_files_of_ranks_and_counts_all():
    source = tensors()
    write_source(source)
    cast = cast_of("convert", "src", "-o", "out", "--dtype", "bf16")
    written, stored = read_ranks(Path("out")), read_ranks(Path("src"))
    for rank, entries in written.items():
        assert_same(entries, cast_entries(stored[rank], "BFloat16", SHAPES))
    sizes = (math.prod(stored[rank][n].shape) for rank in stored for n in SHAPES)
    assert cast["elements"] == sum(sizes)
    run_well("diff", "src", "out", "-s", "s.ckpt", "--dtype", "bf16")
    write_file(Path("src/rank_0/net.ckpt"), overflowing(), "ckpt")
    assert run("convert", "src", "-o", "b", "--dtype", "fp16").exit_code == 6
    assert not list(Path("b").rglob("*.ckpt"))


def test_bands_of_a_large_tensor_join():
    entries = {"w": entry(values("w", (1032, 1024), "Float32"), "Float32")}
    words = ["merge", *write_source({**tensors(), **entries}), "--include", "w", "--dtype", "bf16"]
    cast = cast_of(*words, "-o", "m.ckpt")
    assert cast["elements"] == 1032 * 1024
    assert_same(read(Path("m.ckpt")), cast_entries(entries, "BFloat16", ["w"]))


def test_a_pattern_names_any_tensor_and_goes_before_a_type_for_all():
    entries = tensors()
    words = ["merge", *write_source(entries), "-o", "m.ckpt"]
    run_well(*words, "--dtype", "bf16", "--dtype", "fp16:adam_*", "--dtype", "fp32:re:^[vn]$")
    wanted = cast_entries(entries, "BFloat16", ["w", "b", "k", "s"])
    wanted = cast_entries(wanted, "Float16", ["adam_v.w"])
    assert_same(read(Path("m.ckpt")), wanted)


def overflowing():
    entries = tensors()
    for name, numbers in {"w": [1e5, -3e6, np.inf], "v": [65520]}.items():
        array = values(name, SHAPES[name], "Float32")
        array.reshape(-1)[100 : 100 + len(numbers)] = numbers
        entries[name] = entry(array, "Float32")
    return entries


@pytest.mark.parametrize("command", ["merge", "reshard"])
def test_an_overflow_is_refused_by_name_and_leaves_nothing(command):
    words = [command, *write_source(overflowing())]
    words += ["-d", "d.ckpt", "-o", "out"] if command == "reshard" else ["-o", "out/m.ckpt"]
    result = run(*words, "--dtype", "fp16", "--engine", "inline")
    assert result.exit_code == 6
    said = message(result)
    assert "3 numbers too large" in said
    assert "w: 2 beyond Float16, the largest 3e+06" in said
    assert "v: 1 beyond Float16, the largest 65520" in said
    assert "--on-overflow inf" in said
    assert not [path for path in Path("out").rglob("*") if path.is_file()]
    cast = cast_of(*words, "--dtype", "fp16", "--on-overflow", "inf")
    assert cast["infinities"] == 3
    assert "--dtype with another type" in message(run(*words, "--dtype", "fp16", "--overwrite"))
    run_well(*words, "--dtype", "fp16:b", "--overwrite")


def test_an_overflow_in_replicas_of_another_part_is_refused():
    words = ["reshard", *write_source(overflowing()), "-d", "d.ckpt", "-o", "out"]
    for part in ("1/8", "2/8", "4/8"):  # of w ranks 1 and 3 hold replicas only
        result = run(*words, "--dtype", "fp16", "--part", part)
        assert result.exit_code == 6, message(result)
        assert not list(Path("out").rglob("*.h5"))


def test_outputs_that_a_resumed_run_keeps_count(monkeypatch):
    words = ["reshard", *write_source(tensors()), "-d", "d.ckpt", "--dtype", "bf16"]
    words += ["--engine", "inline"]
    whole = cast_of(*words, "-o", "a")
    real = execute_module.fill

    def failing(task):
        if any("rank_5" in unit.tensor.file.path for unit in task.units):
            raise OSError(5, "an error of the disk", task.units[0].tensor.file.path)
        return real(task)

    monkeypatch.setattr(execute_module, "fill", failing)
    assert run(*words, "-o", "b").exit_code == 6
    monkeypatch.setattr(execute_module, "fill", real)
    assert cast_of(*words, "-o", "b", "--resume") == whole
    assert cast_of(*words, "-o", "b", "--resume") == whole  # nothing is written
    other = run(*words, "--on-overflow", "inf", "-o", "b", "--resume")
    assert "written by another run" in message(other)


def test_python_takes_a_type_and_reads_in_it():
    write_source(tensors())
    done = ckpttool.merge("src", "s.ckpt", out="m.ckpt", dtype="bf16", progress=False)
    assert [*map(str, done.cast.tensors)] == ["6 tensors from Float32 to BFloat16"]
    with ckpttool.open("src", "s.ckpt", dtype=["bf16", "fp16:adam_*"]) as opened:
        assert opened["w"].stored_dtype == "BFloat16"
        assert opened["adam_v.w"].dtype == np.float16
        wanted = values("w", SHAPES["w"], "Float32").astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(opened["w"][...], wanted.astype("f4"))
        np.testing.assert_array_equal(opened["w"][3::7, 5:9], wanted.astype("f4")[3::7, 5:9])
    with pytest.raises(ValueError, match="not a type to cast to"):
        ckpttool.open("src", "s.ckpt", dtype="int8")
    with pytest.raises(ValueError, match="on_overflow"):
        ckpttool.open("src", "s.ckpt", dtype="fp16", on_overflow="clip")
    for function in (ckpttool.verify, ckpttool.inspect):  # nothing is made
        with pytest.raises(ValueError, match=r"dtype= .*recipe="):
            function("src", "s.ckpt", dtype="bf16")
    with pytest.raises(TypeError, match="dtype"):
        ckpttool.explain("src", "s.ckpt", dtype="bf16")


def test_python_reads_no_number_that_is_too_large():
    write_source(overflowing())
    opened = ckpttool.open("src", "s.ckpt", dtype="fp16")
    with pytest.raises(OverflowError, match=r"v: .*1 number became Inf in Float16"):
        opened["v"][...]
    with ckpttool.open("src", "s.ckpt", dtype="fp16", on_overflow="inf") as opened:
        assert np.isinf(opened["v"][...]).sum() == 1


def test_the_manifest_says_how_outputs_were_cast():
    words = ["merge", *write_source(tensors()), "-o", "m.safetensors"]
    run_well(*words, "--dtype", "bf16")
    document = json.loads(Path("m.safetensors.ckpttool.json").read_text())
    (output,) = document["outputs"]
    assert output["cast"]["elements"] == sum(math.prod(shape) for shape in SHAPES.values())
    assert {tensor["dtype"] for tensor in output["tensors"]} == {"BFloat16", "Float32", "Int32"}
    other = run(*words, "--dtype", "fp16", "--resume")
    assert "written by another run" in message(other)
    with ckpttool.open("m.safetensors") as opened:
        assert opened.metadata()["ckpttool.dtype"] == "bf16"


@pytest.mark.big
@pytest.mark.parametrize("dst", [[], ["-d", "d.json"]])
def test_a_tensor_of_two_gib_takes_little_memory(dst):
    write_holes(Path("src/net.ckpt"), (1 << 15, 1 << 14))
    layout = {"dev_matrix": [4], "tensor_map": [-1, 0]}  # columns: every row is read in parts
    Path("d.json").write_text(json.dumps({"parallel_layout_item": {"w": layout}}))
    out = ["-o", "out" if dst else "out/m.ckpt"]
    words = ["split", *dst] if dst else ["merge"]
    words += ["src/net.ckpt", *out, "--dtype", "bf16", "-q", "-j", "4"]
    assert peak_mib(*words) < 200
    assert sum(path.stat().st_size for path in Path("out").rglob("*.*")) > 1 << 30
    shutil.rmtree("out")
