"""What a checkpoint holds, as a document for programs: the same for Python and for the shell."""

import json

import pytest

import ckpttool
from ckpttool.model.diagnostics import Diagnostics
from tests.support.commands import run
from tests.support.corpus import GOLDEN

CASES = {
    "strategy": ("tutorial_8_to_8_retrain/src", "tutorial_8_to_8_retrain/src_strategy.ckpt"),
    "no strategy": ("tutorial_8_to_8_retrain/src", None),
    "one file": ("tutorial_8_to_8_retrain/src/rank_0/checkpoint-2_10.ckpt", None),
    "another strategy": ("tutorial_8_to_8_retrain/src", "safetensors_pipeline/src_strategy.ckpt"),
}


@pytest.mark.parametrize(("src", "strategy"), CASES.values(), ids=CASES)
def test_python_users_get_the_document_of_inspect(src, strategy):
    path, words = GOLDEN / src, [] if strategy is None else ["-s", GOLDEN / strategy]
    printed = json.loads(run("inspect", path, *words, "--json").stdout)
    layouts = strategy and ckpttool.read_strategy([str(GOLDEN / strategy)])
    found = Diagnostics("inspect")
    document = ckpttool.describe(ckpttool.scan(str(path)), layouts, diagnostics=found)
    assert json.loads(json.dumps(document)) == printed
    assert [note["text"] for note in printed["notes"]] == [
        note.text for note in found.of("note", "warning")
    ]
    assert len(printed.get("problems", ())) == len(found.errors) + len(found.failures)
