"""The value of a single number tells whether it counts something."""

import struct

import pytest

from tests.support.checkpoints import write_file
from tests.support.commands import message, run, run_well
from tests.support.readers import Entry, read

CODES = {"Float16": "<e", "Float32": "<f", "Float64": "<d"}


def number(value, dtype="Float32"):
    """A single number as a tensor of a file."""
    if dtype == "BFloat16":
        return Entry(dtype, (), struct.pack("<f", value)[2:])
    return Entry(dtype, (), struct.pack(CODES[dtype], value))


def weights():
    return {"w": Entry("Float32", (2, 2), struct.pack("<4f", 1, 2, 3, 1000))}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", [*CODES, "BFloat16"])
@pytest.mark.parametrize(("value", "counts"), [(260, True), (256, False), (260.5, False)])
def test_a_whole_number_above_256_is_kept_and_named(here, dtype, value, counts):
    if dtype == "BFloat16" and value == 260.5:
        value = 2.5
    if dtype == "BFloat16" and value == 260:
        value = 512
    entry = number(value, dtype)
    write_file(here / "in.ckpt", weights() | {"net.seen": entry}, "ckpt")
    word = "fp32" if dtype == "BFloat16" else "bf16"
    done = run_well("convert", "in.ckpt", "-o", "out.ckpt", "--dtype", word)
    assert (read(here / "out.ckpt")["net.seen"] == entry) is counts
    assert ("not cast: net.seen" in done.stderr) is counts


@pytest.mark.parametrize(
    ("more", "words"), [({"adam_m.seen": number(0)}, []), ({}, ["-s", "s.yaml"])]
)
def test_a_number_with_state_or_in_the_strategy_is_a_weight(here, more, words):
    write_file(here / "in/rank_0/a.ckpt", weights() | {"seen": number(300)} | more, "ckpt")
    rules = 'parameters:\n  "seen": replicated\n  "*": replicated\n'
    (here / "s.yaml").write_text(f"ckpttool_strategy: 1\nranks: 1\n{rules}")
    run_well("merge", "in", *(words or ["--replicated"]), "-o", "out.ckpt", "--dtype", "bf16")
    assert read(here / "out.ckpt")["seen"].dtype == "BFloat16"


@pytest.mark.parametrize("name", ["theta", "rope.base"])
def test_weights_only_keeps_a_number_that_only_its_value_calls_a_counter(here, name):
    tensors = weights() | {name: number(10000), "updates": number(10000)}
    write_file(here / "in.ckpt", tensors, "ckpt")
    run_well("convert", "in.ckpt", "-o", "out.ckpt", "--weights-only")
    assert read(here / "out.ckpt").keys() == {"w", name}


@pytest.mark.parametrize("name", ["updates", "seen"])
def test_an_average_takes_a_counter_from_the_last_input(here, name):
    for value in (300, 500):
        tensors = weights() | {name: number(value), "logit_scale": number(value / 1000)}
        write_file(here / f"{value}.ckpt", tensors, "ckpt")
    done = run_well("average", "300.ckpt", "500.ckpt", "-o", "out.ckpt")
    found = read(here / "out.ckpt")
    assert (found[name], found["logit_scale"]) == (number(500), number(0.4))
    assert f"counters, as in the last input: {name}" in done.stderr


@pytest.mark.parametrize("pattern", ["updates", "up*"])
def test_a_pattern_of_counters_alone_is_an_error(here, pattern):
    write_file(here / "in.ckpt", weights() | {"updates": number(300)}, "ckpt")
    refused = run("convert", "in.ckpt", "-o", "out.ckpt", "--dtype", f"bf16:{pattern}")
    assert "a counter is not cast by itself: updates" in message(refused)
