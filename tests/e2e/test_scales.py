"""Float8 weights with scales are multiplied by a cast; blocks are those of the full tensor."""

import json
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ckpttool
from ckpttool.model.layout import Layout
from tests.support.checkpoints import cut, strategy_of, write_file, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.readers import Entry, read, read_ranks

TYPES = {
    "Float8E4M3FN": ml_dtypes.float8_e4m3fn,
    "Float8E5M2": ml_dtypes.float8_e5m2,
    "Float32": np.float32,
    "BFloat16": ml_dtypes.bfloat16,
    "F8_E8M0": np.uint8,
}
# Name to the type and shape of the weight, and those of its scale.
WEIGHTS = {
    "a.weight": ("Float8E4M3FN", (300, 150), "Float32", (3, 2)),  # last blocks are partial
    "b.weight": ("Float8E5M2", (130, 8), "Float32", (130, 1)),
    "c.weight": ("Float8E4M3FN", (2, 200, 130), "BFloat16", (2, 2, 2)),
    "d.weight": ("Float8E4M3FN", (64, 6), "Float32", ()),
    "e.weight": ("Float8E5M2", (64, 6), "Float32", (1,)),
    "f.weight": ("Float8E4M3FN", (256, 130), "F8_E8M0", (2, 2)),
}
ROWS, COLUMNS, BOTH = ((0,), ()), ((), (0,)), ((1,), (0,))


def entry(dtype, array):
    return Entry(dtype, array.shape, array.tobytes())


def quantized(names=WEIGHTS, block=128):
    """Return the tensors, and the number that each weight stands for, in Float64."""
    random, tensors, numbers = np.random.default_rng(1), {}, {}
    for name in names:
        dtype, shape, of_scale, scales = WEIGHTS[name]
        weight = (random.standard_normal(shape) * 5).astype(TYPES[dtype])
        scale = (random.random(scales) * 0.1 + 0.01).astype(np.float32)
        found = np.asarray(scale).astype(TYPES[of_scale])
        exact = found.astype(np.float64)
        if of_scale == "F8_E8M0":
            found = random.integers(110, 140, scales).astype(np.uint8)
            exact = 2.0 ** (found.astype(np.float64) - 127)
        suffix = "_scale_inv" if name < "c" else "_scale"
        tensors |= {name: entry(dtype, weight), f"{name}{suffix}": entry(of_scale, found)}
        numbers[name] = weight.astype(np.float64)
        for index in np.ndindex(shape):  # the definition, an element at a time
            places = zip(index, shape, exact.shape, strict=False)
            at = tuple(0 if n == 1 else i if n == size else i // block for i, size, n in places)
            numbers[name][index] *= exact[at]
    return tensors, numbers


def rounded(numbers, dtype):
    if dtype != "BFloat16":
        return numbers.astype(np.float16 if dtype == "Float16" else np.float32)
    exponent = np.frexp(numbers)[1] - 8
    return np.ldexp(np.rint(np.ldexp(numbers, -exponent)), exponent).astype(ml_dtypes.bfloat16)


def assert_numbers(found, numbers, dtype):
    assert {*found} >= {*numbers}
    assert not [name for name in found if "scale" in name]
    for name, exact in numbers.items():
        wanted = rounded(exact, dtype)
        assert found[name] == Entry(dtype, wanted.shape, wanted.tobytes()), name


def write_quantized(names=WEIGHTS, **changed):
    tensors, numbers = quantized(names)
    write_file(Path("in.safetensors"), tensors | changed, "safetensors")
    return numbers


WORDS = {"bf16": "BFloat16", "fp16": "Float16", "fp32": "Float32"}


@pytest.mark.parametrize(("word", "suffix"), [*product(WORDS, ["ckpt", "safetensors"])])
def test_a_cast_multiplies_by_the_scale_and_drops_it(word, suffix):
    numbers = write_quantized()
    done = run_well("convert", "in.safetensors", "-o", f"out.{suffix}", "--dtype", word)
    assert_numbers(read(Path(f"out.{suffix}")), numbers, WORDS[word])
    assert "multiplied into their weights: 6 scales" in done.stderr


@pytest.mark.parametrize("extra", [["-n"], ["--max-memory", "2G"], ["-j", "2"]])
def test_memory_and_threads_change_nothing(extra):
    numbers = write_quantized()
    words = ["convert", "in.safetensors", "-o", "out.h5", "--dtype", "bf16"]
    done = run_well(*words, *extra)
    if extra == ["-n"]:
        assert "6 weights, 6 scales" in done.stdout
    else:
        assert_numbers(read(Path("out.h5")), numbers, "BFloat16")


@pytest.mark.parametrize("maps", [(ROWS, BOTH), (COLUMNS, ROWS), (BOTH, COLUMNS)])
def test_the_blocks_of_cut_weights_are_those_of_the_full_tensor(maps):
    names = ("a.weight", "b.weight", "d.weight")  # half of 300 rows is no block
    tensors, numbers = quantized(names)
    src, dst = (Layout((2, 2), one) for one in maps)
    layouts = dict.fromkeys(names, src) | {"b.weight_scale_inv": Layout((2, 2), ROWS)}
    whole = {n: Layout((2, 2), ((),) * len(one.shape)) for n, one in tensors.items()}
    strategy = strategy_of(whole | layouts)
    write_ranks(Path("src"), cut(tensors, strategy), "safetensors")
    ckpttool.write_strategy(strategy, "s.ckpt")
    words = ["src", "-s", "s.ckpt", "--dtype", "bf16", "--trust-strategy"]
    run_well("merge", *words, "-o", "out.ckpt")
    assert_numbers(read(Path("out.ckpt")), numbers, "BFloat16")
    target = strategy_of(dict.fromkeys(names, dst))
    ckpttool.write_strategy(target, "d.ckpt")
    run_well("reshard", *words, "-d", "d.ckpt", "-o", "new", "--format", "ckpt")
    run_well("merge", "new", "-s", "d.ckpt", "-o", "again.ckpt", "--trust-strategy")
    assert read(Path("again.ckpt")) == read(Path("out.ckpt"))
    found = {rank: one.keys() for rank, one in read_ranks(Path("new")).items()}
    assert found == {rank: {*names} for rank in range(4)}
    same = ["diff", "src", "out.ckpt", "-s", "s.ckpt", "--dtype", "bf16", "--trust-strategy"]
    assert "equal" in run_well(*same).stdout
    assert run("convert", "src", "-o", "files", "--dtype", "bf16").exit_code == 5


@pytest.mark.parametrize("block", [[64, 64], [32, 128]])
def test_the_size_of_a_block_is_that_of_the_config_beside_the_file(block):
    rows, columns = block
    random = np.random.default_rng(2)
    weight = random.standard_normal((100, 130)).astype(ml_dtypes.float8_e4m3fn)
    scale = random.random((-(-100 // rows), -(-130 // columns))).astype(np.float32)
    tensors = {"w": entry("Float8E4M3FN", weight), "w_scale_inv": entry("Float32", scale)}
    Path("model").mkdir()
    write_file(Path("model/m.safetensors"), tensors, "safetensors")
    words = ["convert", "model/m.safetensors", "-o", "out.ckpt", "--dtype", "fp32"]
    assert "does not fit the weight" in message(run(*words))
    config = {"quantization_config": {"weight_block_size": block}}
    Path("model/config.json").write_text(json.dumps(config))
    run_well(*words)
    exact = np.kron(scale.astype(np.float64), np.ones(block))[:100, :130]
    assert_numbers(read(Path("out.ckpt")), {"w": weight.astype(np.float64) * exact}, "Float32")


@pytest.mark.parametrize("block", [[120, 120], [96, 64]])
@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_a_set_knows_the_size_of_its_blocks(block, suffix):
    random = np.random.default_rng(3)
    shape = (576, 240)  # in blocks of 120 as many as in blocks of 128
    weight = random.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn)
    counts = [-(-size // of) for size, of in zip(shape, block, strict=True)]
    scale = random.random(counts).astype(np.float32)
    tensors = {"w": entry("Float8E4M3FN", weight), "w_scale_inv": entry("Float32", scale)}
    write_file(Path("model/m.safetensors"), tensors, "safetensors")
    config = {"quantization_config": {"weight_block_size": block}}
    Path("model/config.json").write_text(json.dumps(config))
    ckpttool.write_strategy(strategy_of({"w": Layout((2,), ROWS)}), "s.ckpt")
    run_well("split", "model/m.safetensors", "-d", "s.ckpt", "-o", "new", "--format", suffix)
    run_well("merge", "new", "-o", f"again.{suffix}")
    exact = weight.astype(np.float64)
    exact *= np.kron(scale.astype(np.float64), np.ones(block))[: shape[0], : shape[1]]
    for source in ("new", f"again.{suffix}"):
        run_well("merge", source, "-o", "out.ckpt", "--dtype", "fp32", "--overwrite")
        assert_numbers(read(Path("out.ckpt")), {"w": exact}, "Float32")


def test_a_product_is_one_of_float32_before_it_is_rounded():
    random = np.random.default_rng(4)
    weight = (random.standard_normal((1 << 19, 1)) * 5).astype(ml_dtypes.float8_e4m3fn)
    scale = random.random(weight.shape, np.float32)
    tensors = {"w": entry("Float8E4M3FN", weight), "w_scale": entry("Float32", scale)}
    write_file(Path("in.safetensors"), tensors, "safetensors")
    run_well("convert", "in.safetensors", "-o", "out.ckpt", "--dtype", "bf16")
    product = (weight.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
    assert read(Path("out.ckpt"))["w"] == entry("BFloat16", product)
    exact = rounded(weight.astype(np.float64) * scale, "BFloat16")
    assert np.count_nonzero(exact != product)  # some numbers show the difference


ONES = entry("Float32", np.ones((2, 3), np.float32))
REFUSED = {
    "transposed": ({"a.weight_scale_inv": ONES}, "a.weight: the scale does not fit the weight"),
    "of integers": (
        {"d.weight_scale": entry("Int32", np.array(3, np.int32))},
        "d.weight: the scale is no floating-point number",
    ),
    "of an activation": ({"d.input_scale": ONES}, "d.weight: the scale of an activation"),
    "missing": (
        {"g.weight": entry("Float8E5M2", np.zeros((4, 4), ml_dtypes.float8_e5m2))},
        "g.weight: the Float8 weight has no scale",
    ),
}


@pytest.mark.parametrize(("changed", "text"), REFUSED.values(), ids=[*REFUSED])
def test_what_cannot_be_multiplied_is_an_error_by_name(changed, text):
    write_quantized(**changed)
    words = ["in.safetensors", "-o", "out.safetensors"]
    refused = run("convert", *words, "--dtype", "bf16")
    assert (refused.exit_code, text in message(refused)) == (5, True), message(refused)
    assert not Path("out.safetensors").exists()
    name = text.partition(":")[0]
    others = ["--exclude", name, "--exclude", "*.input_scale"]
    run_well(
        "convert", *words, "--dtype", "bf16", *others[: 2 if "input" not in str(changed) else 4]
    )
    assert name not in read(Path("out.safetensors"))
    run_well("convert", *words, "--overwrite")  # as stored, everything is copied


@pytest.mark.parametrize("pattern", ["*_scale", "d.weight_scale"])
def test_a_scale_is_never_cast_by_itself(pattern):
    write_quantized(["c.weight", "d.weight"])
    refused = run("convert", "in.safetensors", "-o", "o.ckpt", "--dtype", f"bf16:{pattern}")
    assert "a scale is not cast by itself" in message(refused)


@pytest.mark.parametrize("name", ["a.weight", "d.weight"])
def test_a_pattern_casts_one_weight_and_the_others_keep_their_scales(name):
    numbers = write_quantized(["a.weight", "d.weight"])
    run_well("convert", "in.safetensors", "-o", "o.safetensors", "--dtype", f"fp32:{name}")
    found, stored = read(Path("o.safetensors")), read(Path("in.safetensors"))
    other = "d.weight" if name == "a.weight" else "a.weight"
    kept = {n: one for n, one in stored.items() if n.startswith(other)}
    assert {n: one for n, one in found.items() if n.startswith(other)} == kept
    assert_numbers({name: found[name]}, {name: numbers[name]}, "Float32")


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_a_scale_goes_with_its_weight_that_is_left_out_or_renamed(suffix):
    tensors = {"a.w": entry("Float8E4M3FN", np.zeros((4, 4), ml_dtypes.float8_e4m3fn))}
    tensors |= {f"a.w{suffix}": entry("Float32", np.ones((), np.float32))}
    tensors |= {"n": entry("Float32", np.ones(3, np.float32))}
    write_file(Path("in.safetensors"), tensors, "safetensors")
    words = ["convert", "in.safetensors", "-o", "o.safetensors", "--overwrite"]
    run_well(*words, "--exclude", "a.w")
    assert {*read(Path("o.safetensors"))} == {"n"}
    run_well(*words, "--rename", "a.*=b.*")
    assert {*read(Path("o.safetensors"))} == {"n", "b.w", f"b.w{suffix}"}
    run_well(*words, "--weights-only")
    assert {*read(Path("o.safetensors"))} == {*tensors}


def test_float8_without_any_scale_is_copied_as_it_is():
    weight = entry("Float8E4M3FN", np.ones((4, 4), ml_dtypes.float8_e4m3fn))
    tensors = {"w": weight, "v": entry("Float32", np.ones(3, np.float32))}
    write_file(Path("in.safetensors"), tensors, "safetensors")
    done = run_well("convert", "in.safetensors", "-o", "o.safetensors", "--dtype", "bf16")
    found = read(Path("o.safetensors"))
    assert (found["w"], found["v"].dtype) == (weight, "BFloat16")
    assert "Float8 without scales, copied as stored: w" in done.stderr


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_stays_one(byte):
    weight = np.array([[byte, 0x38]], np.uint8)  # NaN and 1
    tensors = {"w": entry("Float8E4M3FN", weight), "w_scale": entry("Float32", np.float32([2]))}
    write_file(Path("in.safetensors"), tensors, "safetensors")
    run_well("convert", "in.safetensors", "-o", "o.safetensors", "--dtype", "fp32")
    numbers = np.frombuffer(read(Path("o.safetensors"))["w"].data, np.float32)
    assert np.isnan(numbers[0])
    assert numbers[1] == 2
