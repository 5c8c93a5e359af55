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
    ({"version": "2.0"}, "ckpttool 1.0 wrote that, this is 2.0"),
    (first_input(nbytes=11), "src/a.ckpt: was of another size"),
    (first_input(mtime_ns=7), "src/a.ckpt: was written to since"),
    (first_input(ctime_ns=7), "src/a.ckpt: was written to since"),
    (first_input(inode=7), "src/a.ckpt: was written to since"),
    ({"inputs": INPUTS[:1]}, "src/b.ckpt: was an input, and is not any more"),
    ({"inputs": (*INPUTS, InputFile("c", 1, STAMP))}, "c: was not an input"),
    ({"strategies": (StrategyFile("s.ckpt", 7, "13"),)}, "s.ckpt: the strategy has changed"),
    ({"strategies": ()}, "s.ckpt: the strategy was given, and is not any more"),
    (
        {"strategies": (*ORIGIN.strategies, StrategyFile("t", 1, "1"))},
        "t: the strategy was not given",
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
    assert list(differences(replace(before, inputs=tuple(moved)), before)) == [
        "newsrc/0, newsrc/1, newsrc/2 and 2 more: were not inputs",
        "src/0, src/1, src/2 and 2 more: were inputs, and are not any more",
    ]
    (found,) = differences(replace(before, inputs=tuple(saved)), before)
    assert found == "src/0, src/1, src/2 and 2 more: were written to since"


def test_options_do_not_make_another_run_but_say_which_is_another():
    asked = replace(ORIGIN, options=(("format", "--format ckpt"), ("crc", "--crc")))
    assert asked == ORIGIN
    assert asked.head() == ORIGIN.head()
    assert not list(differences(asked, ORIGIN))
    rest = "what decides the contents, such as --unlisted, --not-in-target or --optimizer-shard"
    other = replace(asked, plan="other")
    assert list(differences(other, asked)) == [f"other options were given: {rest}"]
    other = replace(other, options=(("crc", "no --crc"),))
    (found,) = differences(other, asked)
    assert found == "other options were given: no --crc in place of --crc"


def test_units_are_cuts_that_do_not_depend_on_options():
    """Else two runs with other sizes of tasks list other hashes of the same bytes."""
    meta = TensorMeta("w", "Float64", (3, 5 << 17))
    assert [unit.shape for unit in units(meta)] == [(1, 5 << 17)] * 3
    assert [unit.shape for unit in units(TensorMeta("s", "Int8", ()))] == [()]
    assert not list(units(TensorMeta("e", "Int8", (0, 3))))
    assert not list(units(TensorMeta("t", "str", (), "text")))
