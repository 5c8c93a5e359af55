"""Checkpoints that a text describes, in the words of `tests/checkpoint/test_records.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy, join_stages
from tests.support.checkpoints import noise
from tests.support.readers import NUMPY_TYPES, Entry

OPTION_VALUES = {"True": True, "False": False}


def numbers(text: str, by: str) -> tuple[int, ...]:
    """Return the numbers in a text."""
    return tuple(int(one) for one in text.split(by)) if text else ()


def ranks_of(text: str) -> list[int]:
    """Return the ranks that ``0-3,5`` names."""
    ends = (numbers(part, "-") for part in text.split(","))
    return [rank for first, *last in ends for rank in range(first, (last or [first])[0] + 1)]


def layout_of(text: str) -> Layout:
    """Return the layout that a text describes."""
    matrix, _, rest = text.partition(":")
    axes, *more = rest.split(";")
    axes, _, shard = axes.partition("/")
    tensor_map = [() if one == "-" else numbers(one, "+") for one in axes.split(",") if one]
    options = dict(one.split("=") for one in more)
    return Layout(
        numbers(matrix, "x"),
        tuple(tensor_map),
        int(shard or 1),
        rows=numbers(options.get("rows", ""), "+"),
        fields=int(options.get("fields", 1)),
        full_shape=numbers(options["full"], "x") if "full" in options else None,
    )


def joined(stages: list[dict[str, Layout] | int], name: str) -> Strategy | None:
    """Return the strategy of stages; a number is that of ranks without layouts."""
    if len(stages) == 1 and isinstance(stages[0], int):
        return Strategy.without_layouts(stages[0])
    return join_stages(dict(enumerate(stages)), (name,)) if stages else None


def filled(kind: str, shape: tuple[int, ...], number: int | None = None) -> Entry:
    """Return a tensor of one number, or of numbers that all differ."""
    array = np.arange(1, np.prod(shape, dtype=int) + 1)
    array = array if number is None else np.full_like(array, number)
    return Entry(kind, shape, array.astype(NUMPY_TYPES[kind]).tobytes())


def entries_of(text: str, rank: int) -> dict[str, Entry]:
    """Return the tensors of a rank: noise by its letter; ``Z`` is zero, other capitals are one.

    Without letters all elements differ.
    """
    found = {}
    for name, dtype, shape, letters, _ in TENSOR.findall(text):
        kind = dtype or "Float32", numbers(shape, ",")
        letter = letters[rank : rank + 1]
        entry = noise(f"{name} {letter}", *kind) if letter.islower() else None
        found[name] = entry or filled(*kind, {"": None, "Z": 0}.get(letter, 1))
    return found


class Described:
    """What the lines of a case have said so far."""

    def __init__(self):
        self.stages, self.target, self.tensors, self.letters = [], [], {}, {}

    def read(self, line: str) -> Iterator[str]:
        """Read a line; yield what comes of it."""
        kind, *words = line.split()
        if kind in ("strategy", "stage", "target"):
            stages = self.target if kind == "target" else self.stages
            stages.clear() if kind == "strategy" else None
            layouts = dict(word.split("=", 1) for word in words if "=" in word)
            layouts = {name: layout_of(text) for name, text in layouts.items()}
            stages.append(layouts or int(words[0]))
        elif kind[0] in "0123456789":
            self.hold(ranks_of(kind), line.partition(" ")[2])
        else:
            options = dict(word.split("=") for word in words if "=" in word)
            options = {key: OPTION_VALUES.get(one, one) for key, one in options.items()}
            if "optimizer_shard" in options:
                options["optimizer_shard"] = int(options["optimizer_shard"])
            yield from self.act(kind, words, options) or ()

    def act(self, kind: str, words: list[str], options: dict[str, object]) -> Iterable[str] | None:
        """Do what any other line says; return what comes of it."""
        raise NotImplementedError

    def hold(self, ranks: Iterable[int], text: str) -> None:
        """Let ranks hold tensors."""
        for rank in ranks:
            self.tensors.setdefault(rank, {})
        for name, dtype, shape, letters, value in TENSOR.findall(text):
            what = value or (dtype or "Float32", numbers(shape, ","))
            for rank in ranks:
                self.tensors[rank][name] = what
            if letters:
                self.letters[name] = letters


TENSOR = re.compile(r'([^\s:(=]+)(?::(\w+))?(?:\(([\d,]*)\)(?:=(\w+))?|="(\w*)")')
