"""What a checkpoint holds, as a document for programs: the same for Python and for the shell."""

import json
import shutil

import pytest

import ckpttool
from ckpttool.checkpoint import fit_strategy
from ckpttool.operations.inspection import inspect_catalog
from tests.support.commands import run
from tests.support.corpus import GOLDEN
from tests.support.damage import cut_short
from tests.support.readers import rank_file

CASES = {
    "strategy": ("tutorial_8_to_8_retrain/src", "tutorial_8_to_8_retrain/src_strategy.ckpt"),
    "no strategy": ("tutorial_8_to_8_retrain/src", None),
    "one file": ("tutorial_8_to_8_retrain/src/rank_0/checkpoint-2_10.ckpt", None),
    "another strategy": ("tutorial_8_to_8_retrain/src", "safetensors_pipeline/src_strategy.ckpt"),
}


@pytest.mark.filterwarnings("ignore::ckpttool.CkptToolWarning")  # the notes of the document
@pytest.mark.parametrize(("src", "strategy"), CASES.values(), ids=CASES)
def test_python_users_get_the_document_of_inspect(src, strategy):
    path, words = GOLDEN / src, [] if strategy is None else ["-s", GOLDEN / strategy]
    printed = json.loads(run("inspect", path, *words, "--json").stdout)
    document = ckpttool.inspect(path, strategy and GOLDEN / strategy).to_dict()
    assert json.loads(json.dumps(document)) == printed


def test_the_note_on_a_damaged_file_says_which_replicas_are_read(tmp_path):
    case = GOLDEN / "tutorial_8_to_8_retrain"
    shutil.copytree(case / "src", tmp_path / "src")
    path = cut_short(rank_file(tmp_path / "src", 5))
    result = run("inspect", tmp_path / "src", "-s", case / "src_strategy.ckpt", "--json")
    assert result.stderr.startswith(f"error[damaged]: {path}: the file is cut short\n")
    document = json.loads(result.stdout)
    (problem,) = document["problems"]
    assert problem["facts"].startswith(f"byte {problem['offset']}: ")
    assert (problem["code"], problem["path"]) == ("damaged", str(path))
    assert "replicas" not in str(problem), "a note says it"
    (note,) = (note for note in document["notes"] if note["code"] == "damaged_replica")
    assert (note["text"], note["ranks"]) == (problem["text"], [5])
    assert note["facts"].endswith("all slices are read from replicas: rank 0")


def test_a_strategy_that_fits_is_fitted_once(monkeypatch):
    case, fitted = GOLDEN / "tutorial_8_to_8_retrain", []

    def count(*given, original=fit_strategy.fit_to_slices):
        fitted.append(given)
        return original(*given)

    monkeypatch.setattr(fit_strategy, "fit_to_slices", count)
    strategy = ckpttool.read_strategy([str(case / "src_strategy.ckpt")])
    inspect_catalog(ckpttool.scan(str(case / "src")), strategy)
    assert len(fitted) == 1
