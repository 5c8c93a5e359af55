"""Averages of checkpoints under all layouts and formats, against NumPy in Float64."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import ckpttool
from tests.support import corpus
from tests.support.checkpoints import write_file, write_holes
from tests.support.commands import SUFFIXES, files_below, message, peak_mib, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.encryption import KEY, encrypt
from tests.support.executors import average_words, write_rounded
from tests.support.readers import Entry, entry_of, read, read_ranks

# What has no mean, and a text, which the writer of the tests lacks.
NOT_AVERAGED = {"Complex64", "Complex128", "Float8E4M3FN", "Float8E5M2", "HiFloat8", "str"}
FLOATS = {"Float64", "Float32", "Float16", "BFloat16"}
CASE = GOLDEN / "reshard_8_to_4"
SRC, STRATEGY, TARGET = (CASE / name for name in ("src", "src_strategy.ckpt", "dst_strategy.ckpt"))
CASES = [
    conversion.case
    for conversion in corpus.conversions("merge")
    if conversion.src_strategy is not None and "enc_key" not in corpus.case_facts(conversion.case)
    # NaN and Inf have no mean; parameters outside of the strategy need --unlisted.
    if conversion.case not in ("special_float_bits", "params_outside_strategy")
]


def numbers(entry):
    if entry.dtype == "BFloat16":
        words = np.left_shift(entry.array().reshape(-1), 16, dtype="<u4")
        return words.view("<f4").astype("<f8").reshape(entry.shape)
    return entry.array().astype("<f8")


def rounded(values, dtype):
    """Float64 rounded once, to the nearest number and the even one of two."""
    if dtype != "BFloat16":
        return entry_of(values.astype(f"<f{int(dtype[5:]) // 8}"), dtype)
    near = np.asarray(values, "<f8").astype("<f4")
    words = near.view("<u4")
    is_inexact = near.astype("<f8") != values
    words = words - (is_inexact & (np.abs(near.astype("<f8")) > np.abs(values)))  # towards zero
    words = words | is_inexact  # an odd word is no half, so the second rounding is that of all
    words = (words + 0x7FFF + (words >> 16 & 1)) >> 16
    return Entry("BFloat16", values.shape, words.astype("<u2").tobytes())


def mean(entries, weights):
    total = np.full(entries[0].shape, -0.0)
    for entry, weight in zip(entries, weights, strict=True):
        total = total + weight * numbers(entry)
    return rounded(total, entries[0].dtype)


def changed(name, entry, seed):
    rng = np.random.default_rng([seed, *name.encode()])
    if entry.dtype in FLOATS:
        return rounded(rng.normal(size=entry.shape), entry.dtype)
    return entry


def weights_of(path):
    left = path.with_name("weights.h5")
    run_well("merge", path, "-o", left, "--weights-only", "-q")
    return read(left).keys()


@pytest.mark.parametrize("case", corpus.a_third(CASES, 1))
def test_a_case_and_two_merged_files_are_averaged_as_numpy_does(case, tmp_path):
    folder, conversion = GOLDEN / case, corpus.conversion(case, "merge")
    strategy = folder / conversion.src_strategy
    run_well("merge", folder / "src", "-s", strategy, "-o", tmp_path / "m.ckpt", "-q")
    first = read(tmp_path / "m.ckpt")
    left = [name for name, tensor in first.items() if tensor.dtype in NOT_AVERAGED]
    first = {name: tensor for name, tensor in first.items() if name not in left}
    words, inputs = [f"{folder / 'src'},strategy={strategy}:0.25"], [first]
    for format, weight in (("ckpt", 0.6), ("hdf5", 0.15)):
        inputs.append({name: changed(name, tensor, len(inputs)) for name, tensor in first.items()})
        path = tmp_path / "merged" / f"in{SUFFIXES[format]}"
        write_file(path, inputs[-1], format)
        words.append(f"{path}:{weight}")
    words.append("--replicated")  # the folders of these tests look like those of ranks
    words += [word for name in left for word in ("--exclude", f"re:{re.escape(name)}")]
    run_well("average", *words, "-o", tmp_path / "out.ckpt", "-q")
    written, averaged = read(tmp_path / "out.ckpt"), weights_of(tmp_path / "m.ckpt")
    assert written.keys() == first.keys()
    for name, entry in written.items():
        entries = [tensors[name] for tensors in inputs]
        if name in averaged and entry.dtype in FLOATS:
            assert entry == mean(entries, [0.25, 0.6, 0.15]), name
        else:
            assert entry == entries[-1], name


@pytest.mark.parametrize("dtype", sorted(FLOATS))
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3), (2, 3, 4), (2, 3, 4, 5)])
def test_every_type_and_shape_is_rounded_once(dtype, shape, tmp_path):
    inputs = [{"w": changed("w", Entry(dtype, shape, b""), seed)} for seed in range(4)]
    paths = [tmp_path / "merged" / f"{name}.safetensors" for name in "abcd"]
    for path, entries in zip(paths, inputs, strict=True):
        write_file(path, entries, "safetensors")
    run_well("average", *paths, "--replicated", "-o", tmp_path / "out.safetensors", "-q")
    (tensor,) = read(tmp_path / "out.safetensors").values()
    assert tensor == mean([tensors["w"] for tensors in inputs], [0.25] * 4)


@pytest.mark.parametrize("dtype", ["Float32", "Float16", "BFloat16"])
def test_three_equal_checkpoints_have_the_same_mean(dtype, tmp_path):
    rng = np.random.default_rng(3)
    values = rng.normal(size=100_000) * 2.0 ** rng.integers(-30, 10, 100_000)
    path = tmp_path / "merged" / "a.ckpt"
    write_file(path, {"w": rounded(values, dtype)}, "ckpt")
    words = ("--replicated", "-o", tmp_path / "out.ckpt", "-q")
    run_well("average", path, path, path, *words)
    assert read(tmp_path / "out.ckpt") == read(path)


def two_runs(tmp_path, shape=(1024, 3001)):
    folder = tmp_path / "merged"
    for name, seed in (("a", 1), ("b", 2)):
        entries = {
            key: changed(key, Entry("Float32", size, b""), seed)
            for key, size in (("w", shape), ("bias", (3,)))
        }
        write_file(folder / f"{name}.safetensors", entries, "safetensors")
    return folder / "a.safetensors", folder / "b.safetensors"


def test_engines_and_numbers_of_workers_do_not_count(tmp_path):
    a, b = two_runs(tmp_path)
    words = ("average", f"{a}:0.3", f"{b}:0.7")
    run_well(*words, "-o", tmp_path / "1.ckpt", "-j", "1", "-q")
    run_well(*words, "-o", tmp_path / "16.ckpt", "-j", "16", "-q")
    run_well(*words, "-o", tmp_path / "p.ckpt", "--engine", "processes:2", "-q")
    run_well(*words, "-o", tmp_path / "small.ckpt", "--max-memory", "2GiB", "-j", "2", "-q")
    single = (tmp_path / "1.ckpt").read_bytes()
    assert [(tmp_path / f"{n}.ckpt").read_bytes() == single for n in ("16", "p", "small")] == [
        True
    ] * 3
    entries = [read(path)["w"] for path in (a, b)]
    assert read(tmp_path / "1.ckpt")["w"] == mean(entries, [0.3, 0.7])


def test_rank_files_are_those_of_the_merged_mean_sharded(tmp_path):
    run_well("merge", SRC, "-s", STRATEGY, "-o", tmp_path / "m.ckpt", "-q")
    merged = read(tmp_path / "m.ckpt")
    other = {name: changed(name, tensor, 5) for name, tensor in merged.items()}
    write_file(tmp_path / "other.ckpt", other, "ckpt")
    words = ("average", f"{tmp_path / 'other.ckpt'}:0.4", f"{SRC}:0.6", "-s", STRATEGY)
    run_well(*words, "-o", tmp_path / "mean.ckpt", "-q")
    run_well("split", tmp_path / "mean.ckpt", "-d", TARGET, "-o", tmp_path / "split", "-q")
    ranks = (*words, "-d", TARGET, "-o", tmp_path / "ranks")
    run_well(*ranks, "-q")
    assert read_ranks(tmp_path / "ranks") == read_ranks(tmp_path / "split")
    # some ranks, and the same with parts
    run_well(*ranks[:-1], tmp_path / "some", "--rank", "1,3", "-q")
    assert read_ranks(tmp_path / "some").items() <= read_ranks(tmp_path / "split").items()
    for part in ("1/2", "2/2"):
        run_well(*ranks[:-1], tmp_path / "parts", "--part", part, "-q")
    run_well("finalize", tmp_path / "parts")
    assert read_ranks(tmp_path / "parts") == read_ranks(tmp_path / "split")


def test_a_resumed_run_knows_inputs_and_weights(tmp_path):
    a, b = two_runs(tmp_path, (4, 4))
    words = ("average", f"{a}:0.3", f"{b}:0.7", "-o", tmp_path / "out.ckpt", "--json")
    document = json.loads(run_well(*words).stdout)
    assert document["averaged"]["tensors"] == 2
    assert [source["weight"] for source in document["averaged"]["inputs"]] == [0.3, 0.7]
    again = json.loads(run_well(*words, "--resume").stdout)
    assert [output["kept"] for output in again["outputs"]] == [True]
    manifest = (tmp_path / "out.ckpt.ckpttool.json").read_text()
    head = json.loads(manifest.partition(',\n"outputs"')[0].partition(', "outputs"')[0] + "}")
    assert [(source["path"], source["weight"]) for source in head["averaged"]] == [
        ("a.safetensors", 0.3),
        ("b.safetensors", 0.7),
    ]
    changed_words = ("average", f"{a}:0.4", f"{b}:0.6", "-o", tmp_path / "out.ckpt", "--resume")
    assert "written by another run" in message(run(*changed_words))


@pytest.mark.parametrize(("number", "word"), [(np.nan, "NaN"), (-np.inf, "Inf")])
def test_a_number_that_is_not_finite_is_named_and_nothing_is_left(number, word, tmp_path):
    folder = tmp_path / "run"
    ckpttool.reshard(SRC, STRATEGY, STRATEGY, folder, format="safetensors")
    path = folder / "rank_0" / "checkpoint_0.safetensors"
    entries = read(path)
    name = "model.layers.0.attention.wo.weight"
    array = entries[name].array().copy()
    array[1, 2] = number
    entries[name] = entry_of(array)
    write_file(path, entries, "safetensors")
    words = (f"{SRC}:0.5", f"{folder}:0.5", "-s", STRATEGY, "--ignore-manifest")
    for out in (("-o", tmp_path / "m.ckpt"), ("-d", TARGET, "-o", tmp_path / "ranks")):
        refused = run("average", *words, *out, "--trust-strategy")
        assert refused.exit_code == 7, message(refused)
        for part in (str(path), name, f"{word} at [1, 2]", "rank 0"):
            assert part in refused.stderr.replace("\n  ", " "), part
        assert not [file for file in files_below(tmp_path) if file.endswith((".ckpt", ".h5"))]
    # what is not averaged may be anything
    run_well("average", *words, "-o", tmp_path / "m.ckpt", "--exclude", name, "-q")


@pytest.mark.parametrize("mode", ["AES-GCM", "AES-CBC"])
def test_encrypted_inputs_are_averaged_with_their_key(mode, tmp_path):
    (tmp_path / "key").write_bytes(KEY)
    other = write_rounded(tmp_path)
    words = [*average_words(other, tmp_path / "plain", "ckpt")]
    run_well(*words)
    for path in sorted(other.rglob("*.ckpt")):
        path.write_bytes(encrypt(path.read_bytes(), mode, KEY, 200))
    (other / "ckpttool.json").unlink()
    out = [*average_words(other, tmp_path / "out", "ckpt")]
    assert run(*out).exit_code != 0
    run_well(*out, "--dec-key-file", tmp_path / "key")
    assert read_ranks(tmp_path / "out") == read_ranks(tmp_path / "plain")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((f"{SRC},step=1_3", SRC), "no file of step 1_3 found 2_10"),
        ((f"{SRC}/rank_0/checkpoint-2_10.ckpt,step=4", SRC), "of step 2_10 by its name, not of"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(words, said, tmp_path):
    result = run("average", *words, "-s", STRATEGY, "-o", tmp_path / "out")
    assert said in message(result)
    assert not [*tmp_path.iterdir()]


def make_steps(folder, steps):
    for rank in range(2):
        for step in steps:
            entries = {"w": entry_of(np.full((2, 3), step, "<f4"))}
            write_file(folder / f"rank_{rank}" / f"net-1_{step}.ckpt", entries, "ckpt")


def test_steps_of_a_run_are_averaged(tmp_path):
    make_steps(tmp_path / "run", (8000, 8500, 9000, 9100))
    words = ("average", tmp_path / "run", "--replicated", "-o", tmp_path / "out.ckpt")
    done = json.loads(run_well(*words, "--steps", "8000..9000:500", "--json").stdout)
    assert [source["step"] for source in done["averaged"]["inputs"]] == [
        "1_8000",
        "1_8500",
        "1_9000",
    ]
    assert (read(tmp_path / "out.ckpt")["w"].array() == 8500).all()
    refused = run(*words[:-1], tmp_path / "no.ckpt", "--steps", "8000..10000:1000")
    assert refused.exit_code == 5
    assert "1 step not in the folder: 10000" in message(refused)
    assert "1_8000, 1_8500, 1_9000" in message(refused)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (
            "8..999999999998:10",
            "99999999997 steps not in the folder: 38, 48, 58 and 99999999994 more",
        ),
        ("7..999999999999:4", "249999999999 steps not in the folder: 7, 11, 15 and 249999999996"),
    ],
)
def test_a_billion_steps_are_not_listed(steps, said, tmp_path):
    make_steps(tmp_path / "run", (8, 18, 28))
    words = ("average", tmp_path / "run", "--replicated", "-o", tmp_path / "out.ckpt")
    assert said in message(run(*words, "--steps", steps))


def test_a_manifest_goes_before_the_strategy_of_all(tmp_path):
    folder, out = tmp_path / "set", tmp_path / "out.ckpt"
    ckpttool.reshard(SRC, STRATEGY, TARGET, folder, format="ckpt")
    run_well("average", folder, SRC, "-s", STRATEGY, "-o", out, "-q")
    run_well("diff", SRC, out, "-s", STRATEGY)
    run_well("average", folder, folder, "-s", TARGET, "-o", out, "-q", "--overwrite")
    refused = message(run("average", folder, folder, "-s", STRATEGY, "-o", tmp_path / "x.ckpt"))
    assert "no input needs this strategy" in refused


def test_options_of_tensors_compose(tmp_path):
    run_well("merge", SRC, "-s", STRATEGY, "-o", tmp_path / "m.ckpt", "-q")
    merged = read(tmp_path / "m.ckpt")
    other = {name: changed(name, tensor, 6) for name, tensor in merged.items()}
    write_file(tmp_path / "other.ckpt", other, "ckpt")
    words = ("average", SRC, tmp_path / "other.ckpt", "-s", STRATEGY, "-o", tmp_path / "o.ckpt")
    more = ("--weights-only", "--dtype", "bf16", "--rename", "model.*=net.*", "--json")
    document = json.loads(run_well(*words, *more).stdout)
    names = weights_of(tmp_path / "m.ckpt")
    written = read(tmp_path / "o.ckpt")
    assert document["averaged"] | {"inputs": []} == {
        "inputs": [],
        "tensors": len(names),
        "of_last": 0,
    }
    assert len(written) == len(names)
    for name in names:
        total = 0.5 * numbers(merged[name]) + 0.5 * numbers(other[name])
        new = "net." + name.removeprefix("model.") if name.startswith("model.") else name
        assert written[new] == rounded(total, "BFloat16"), name


def test_a_dry_run_says_which_ranks_of_which_input_are_needed(tmp_path):
    run_well("merge", SRC, "-s", STRATEGY, "-o", tmp_path / "m.ckpt", "-q")
    words = ("average", SRC, tmp_path / "m.ckpt", "-s", STRATEGY, "-o", tmp_path / "out.ckpt", "-n")
    said = run_well(*words, "--include", "model.norm_out.weight").stdout
    assert "rank 0 of input 1; file 0 of input 2" in " ".join(said.split())
    document = json.loads(run_well(*words, "--include", "model.norm_out.weight", "--json").stdout)
    nbytes = read(tmp_path / "m.ckpt")["model.norm_out.weight"].array().nbytes
    (source,) = document["dry_run"]["sources"]
    assert source["needs"] == [
        {"ranks": [0], "input": number, "nbytes": nbytes} for number in (0, 1)
    ]


@pytest.mark.big
def test_memory_is_that_of_bands(tmp_path):
    for name in ("a", "b", "c"):
        write_holes(tmp_path / f"{name}.ckpt", (3 << 14, 2048))  # 384 MiB
    inputs = [tmp_path / f"{name}.ckpt" for name in ("a", "b", "c")]
    assert peak_mib("average", *inputs, "-o", tmp_path / "out.ckpt", "-j", "4") < 160
    for path in tmp_path.glob("*.ckpt"):
        path.unlink()


def test_python_takes_paths_weights_and_strategies(tmp_path):
    a, b = two_runs(tmp_path, (4, 4))
    wanted = mean([read(path)["w"] for path in (a, b)], [0.25, 0.75])
    forms = (
        {a: 0.25, b: 0.75},
        [(a, 0.25), (b, 0.75)],
        [(ckpttool.scan(a), 0.25, None), (b, 0.75)],
        [
            ckpttool.AverageInput(path, weight=w, strategy=None)
            for path, w in ((a, 0.25), (b, 0.75))
        ],
    )
    for number, inputs in enumerate(forms):
        done = ckpttool.average(inputs, tmp_path / f"{number}.ckpt")
        assert [one.weight for one in done.averaged.inputs] == [0.25, 0.75]
        assert read(tmp_path / f"{number}.ckpt")["w"] == wanted
    estimate = ckpttool.average([a, b], tmp_path / "n.ckpt", dry_run=True)
    assert estimate.planned.weights == (0.5, 0.5)
    make_steps(tmp_path / "run", (2, 4))
    for number, steps in enumerate((range(2, 5, 2), "2..4:2")):
        out = tmp_path / f"s{number}.ckpt"
        ckpttool.average(tmp_path / "run", out, steps=steps, replicated=True)
        assert (read(out)["w"].array() == 3).all()
