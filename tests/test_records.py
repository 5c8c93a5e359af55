"""Records behave as dataclasses do."""

from __future__ import annotations

import pickle
from functools import cached_property

import pytest

from ckpttool.records import defaults, field, is_record, record, replace, set_field


@record
class Box:
    name: str
    sides: tuple[int, ...] = ()
    note: str = field(default="", compare=False)
    parts: dict[str, int] = field(default_factory=dict, hash=False, repr=False)
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_field(self, "size", sum(self.sides))

    @cached_property
    def label(self) -> list[str]:
        return [self.name]


def test_fields_are_left_out_of_comparison_hash_and_text():
    box = Box("a", (1, 2), "b", {"c": 1})
    assert box == Box("a", (1, 2), "other", {"c": 1}) != Box("a", (1, 2), "b")
    assert hash(box) == hash(Box("a", (1, 2)))
    assert repr(box) == "Box(name='a', sides=(1, 2), note='b')"


def test_what_is_computed_follows_the_fields():
    box = Box("a", (1, 2))
    assert box.label is box.label
    changed = replace(box, sides=(5,))
    assert (changed.size, changed.label is box.label) == (5, False)
    assert pickle.loads(pickle.dumps(changed)) == changed
    assert Box("a").parts is not Box("a").parts


def test_a_record_is_frozen_and_knows_its_fields():
    with pytest.raises(AttributeError):
        Box("a").name = "b"
    assert is_record(Box("a"))
    assert not is_record("a")
    assert defaults(Box) == {"name": None, "sides": (), "note": "", "parts": {}}
