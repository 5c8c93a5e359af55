"""What runs read and do: in which words two of them differ, and what of a tensor is hashed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpttool.model.manifest import InputFile, Provenance, StrategyFile, differences, units
from ckpttool.model.tensors import FileStamp, TensorMeta

STAMP = FileStamp(10, 5, 5, 1)
INPUTS = (
    InputFile("src/a.ckpt", 10, STAMP),
    InputFile("src/b.ckpt", 20, STAMP._replace(nbytes=20)),
)
ORIGIN = Provenance("1.0", "plan", "2_10", INPUTS, (StrategyFile("s.ckpt", 7, "12"),))


def first_input(nbytes=10, **changes):
    """Return a change of the first input."""
    stamp = STAMP._replace(nbytes=nbytes, **changes)
    return {"inputs": (InputFile("src/a.ckpt", nbytes, stamp), INPUTS[1])}


CHANGES = [
    ({"version": "2.0"}, "ckpttool 2.0 in place of 1.0"),
    (first_input(nbytes=11), "source files of another size: src/a.ckpt"),
    (first_input(mtime_ns=7), "source files changed: src/a.ckpt"),
    (first_input(ctime_ns=7), "source files changed: src/a.ckpt"),
    (first_input(inode=7), "source files changed: src/a.ckpt"),
    ({"inputs": INPUTS[1:]}, "source src/b.ckpt in place of src"),
    ({"inputs": (*INPUTS, InputFile("src/c", 1, STAMP))}, "source files added: src/c"),
    ({"strategies": (StrategyFile("s.ckpt", 7, "13"),)}, "strategy files changed: s.ckpt"),
    ({"strategies": ()}, "strategy none in place of s.ckpt"),
    (
        {"strategies": (*ORIGIN.strategies, StrategyFile("t", 1, "1"))},
        "strategy t in place of none",
    ),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_has_changed_is_named(change, words):
    """With or without a plan that differs for that reason."""
    assert not list(differences(ORIGIN, ORIGIN))
    for plan in ("plan",) if "version" in change else ("plan", "other"):
        assert list(differences(replace(ORIGIN, **change, plan=plan), ORIGIN)) == [words]


def test_a_source_that_was_moved_or_saved_again_is_named_in_one_line():
    """Else 1,024 ranks make 2,048 lines of one fact."""
    inputs = [InputFile(f"src/{n}", 10, STAMP) for n in range(5)]
    moved = [replace(one, path=f"new{one.path}") for one in inputs]
    saved = [replace(one, stamp=STAMP._replace(inode=2)) for one in inputs]
    before = replace(ORIGIN, inputs=tuple(inputs))
    (found,) = differences(replace(before, inputs=tuple(moved)), before)
    assert found == "source newsrc in place of src"
    (found,) = differences(replace(before, inputs=tuple(saved)), before)
    assert found == "source files changed: src/0, src/1, src/2 and 2 more"
    fewer = replace(before, inputs=tuple(inputs[:3]))
    assert list(differences(fewer, before)) == ["source files left out: src/3, src/4"]
    (found,) = differences(replace(fewer, step="3_10"), before)
    assert found == "step 3_10 in place of 2_10"
    assert fewer.differs_in_source_only(before)
    for change in ({}, {"step": "3_10"}, {"version": "2.0"}, {"strategies": ()}):
        assert not replace(before, **change).differs_in_source_only(before)
        assert not replace(before, inputs=tuple(moved), **change).differs_in_source_only(before)


def test_options_do_not_make_another_run_but_say_which_is_another():
    asked = replace(ORIGIN, options=(("format", "--format ckpt"), ("crc", "--crc")))
    assert asked == ORIGIN
    assert asked.head() == ORIGIN.head()
    assert not list(differences(asked, ORIGIN))
    rest = "--unlisted, --not-in-target or --optimizer-shard"
    other = replace(asked, plan="other")
    assert list(differences(other, asked)) == [f"another {rest}"]
    other = replace(other, options=(("crc", "no --crc"),))
    (found,) = differences(other, asked)
    assert found == "no --crc in place of --crc"


def test_units_are_cuts_that_do_not_depend_on_options():
    """Else two runs with other sizes of tasks list other hashes of the same bytes."""
    meta = TensorMeta("w", "Float64", (3, 5 << 17))
    assert [unit.shape for unit in units(meta)] == [(1, 5 << 17)] * 3
    assert [unit.shape for unit in units(TensorMeta("s", "Int8", ()))] == [()]
    assert not list(units(TensorMeta("e", "Int8", (0, 3))))
    assert not list(units(TensorMeta("t", "str", (), "text")))
