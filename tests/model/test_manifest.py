"""What runs read and do: in which words two of them differ, and what of a tensor is hashed."""

from __future__ import annotations

from hashlib import sha256

import pytest
from msgspec.structs import replace

from ckpttool.model.manifest import (
    InputFile,
    Provenance,
    StrategyFile,
    UnitHashes,
    count_units,
    units,
)
from ckpttool.model.tensors import FileStamp, TensorMeta

STAMP = FileStamp(10, 5, 5, 1)
INPUTS = (
    InputFile("src/a.ckpt", 10, STAMP),
    InputFile("src/b.ckpt", 20, STAMP._replace(nbytes=20)),
)
ORIGIN = Provenance("1.0", "plan", "2_10", INPUTS, (StrategyFile("s.ckpt", 7, "12"),))


CHANGES = [
    {"ckpttool": "2.0"},
    {"plan": "other"},
    {"inputs": (replace(INPUTS[0], nbytes=11), INPUTS[1])},
    {"inputs": (replace(INPUTS[0], stamp=STAMP._replace(mtime_ns=7)), INPUTS[1])},
    {"inputs": (replace(INPUTS[0], stamp=STAMP._replace(ctime_ns=7)), INPUTS[1])},
    {"inputs": (replace(INPUTS[0], stamp=STAMP._replace(inode=7)), INPUTS[1])},
    {"inputs": INPUTS[1:]},
    {"inputs": (*INPUTS, InputFile("src/c", 1, STAMP))},
    {"strategies": (StrategyFile("s.ckpt", 7, "13"),)},
    {"strategies": ()},
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_the_outputs_makes_another_run(change):
    assert replace(ORIGIN, **change).digest != ORIGIN.digest


def test_a_command_line_does_not_make_another_run():
    other = replace(ORIGIN, command="ckpttool merge", crc=True)
    assert (other.digest, other.head()) == (ORIGIN.digest, ORIGIN.head())


def test_units_are_cuts_that_do_not_depend_on_options():
    meta = TensorMeta("w", "Float64", (3, 5 << 17))
    assert [unit.shape for unit in units(meta)] == [(1, 5 << 17)] * 3
    assert [unit.shape for unit in units(TensorMeta("s", "Int8", ()))] == [()]
    assert not list(units(TensorMeta("e", "Int8", (0, 3))))
    assert not list(units(TensorMeta("t", "str", (), "text")))


def test_hashes_come_in_any_order_and_leave_in_that_of_the_tensors():
    metas = [
        TensorMeta("w", "Float32", (3, 5 << 18)),
        TensorMeta("e", "Int8", (0, 3)),
        TensorMeta("s", "Int8", ()),
        TensorMeta("t", "str", (), "text"),
        TensorMeta("u", "Int8", (8 << 20,)),
    ]
    assert [*map(count_units, metas)] == [3, 0, 1, 0, 1]
    for meta in metas:
        assert count_units(meta) == len([*units(meta)])
    hashes = UnitHashes(metas)
    for place, number in [(4, 0), (0, 2), (2, 0), (0, 0), (0, 1)]:
        hashes.add(place, number, sha256(f"{metas[place].name}{number}".encode()).digest())
    with pytest.raises(AssertionError, match="w: unit 2 twice"):
        hashes.add(0, 2, sha256(b"").digest())
    found = {entry.name: entry.sha256 for entry in hashes.entries()}
    expected = {"w": ["w0", "w1", "w2"], "e": [], "s": ["s0"], "t": ["text"], "u": ["u0"]}
    assert [*found] == [*expected]
    for name, texts in expected.items():
        assert found[name] == tuple(sha256(text.encode()).hexdigest() for text in texts)
