"""Every situation in which a checkpoint or a strategy is not as it should be, and what is said.

``situations.txt`` names, for each that a tool for MindSpore's checkpoints must detect, the tests
that hold it: of this module, or of others, where it was tested before.  "silent" are those that
MindSpore 2.10 takes without a word, with a wrong or unchecked result; "accepted" those that it
refuses and that are no trouble here.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path

import pytest

LINES = Path(__file__).with_name("situations.txt").read_text(encoding="utf-8").splitlines()
SITUATIONS = [line for line in LINES if line[0] != " "]
TESTS = [line.strip() for line in LINES if line[0] == " "]


def exists(name: str) -> bool:
    """Whether there is a test of this name, and if it is for one parameter set, that as well."""
    place, _, wanted = name.partition("[")
    module, _, function = place.rpartition("::")
    test = getattr(importlib.import_module(f"tests.{module}"), function)
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    identifiers = [""]
    for mark in marks:  # the one next to the function comes first
        values, given = list(mark.args[1]), mark.kwargs.get("ids")
        if given is not None:
            own = list(map(given, values)) if callable(given) else list(given)
        else:
            own = [str(getattr(value, "id", None) or value) for value in values]
        identifiers = [f"{a}-{b}" if a else b for b in own for a in identifiers]
    return not wanted or wanted.removesuffix("]") in identifiers


@pytest.mark.parametrize("name", TESTS)
def test_every_situation_has_a_test(name):
    assert exists(name)


def test_a_test_or_a_situation_that_is_not_there_would_be_noticed():
    broken = "e2e.test_broken_inputs::test_a_broken_input_is_answered_as_was_agreed"
    assert not exists(f"{broken}[no_such_variant]")
    with pytest.raises(AttributeError):
        exists("e2e.test_broken_inputs::test_no_such_thing")
    assert not [one for one, more in pairwise(LINES) if one in SITUATIONS and more in SITUATIONS]
    assert LINES[-1] not in SITUATIONS
