"""Tests against a real MindSpore: run by ``scripts/interop`` only, which names its Python."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.e2e.interop.cases import FAMILIES, SEED
from tests.e2e.interop.client import MindSpore
from tests.e2e.interop.saved import Saved

PYTHON = os.environ.get("CKPTTOOL_INTEROP_PYTHON")
collect_ignore_glob = ["mindspore_side/*"] if PYTHON else ["*"]


def pytest_report_header() -> str:
    return f"interop: {PYTHON or 'not collected, see scripts/interop'}, models of seed {SEED}"


@pytest.fixture(scope="session")
def mindspore(tmp_path_factory):
    running = MindSpore(PYTHON, tmp_path_factory.mktemp("mindspore") / "log")
    yield running
    running.close()


@pytest.fixture(scope="session")
def saved(mindspore, tmp_path_factory):
    made = {}

    def get(family, name):
        if (family, name) not in made:
            folder = tmp_path_factory.mktemp("saved") / family / name
            made[family, name] = make(mindspore, FAMILIES[family][name], folder)
        return made[family, name]

    return get


def make(mindspore, recipe, folder):
    """Compiles and saves all ranks of a cut."""
    for name in ("strategies", "stages"):
        (folder / name).mkdir(parents=True)
    files = [folder / "strategies" / f"rank_{rank}.ckpt" for rank in range(recipe["ranks"])]
    mindspore.ask_all(
        [
            {"do": "compile_and_save", "recipe": recipe, "rank": rank}
            | {"folder": folder, "strategy_file": file}
            for rank, file in enumerate(files)
        ]
    )
    stage_ranks = recipe["ranks"] // recipe["stages"]
    for stage, file in enumerate(files[::stage_ranks]):
        shutil.copy(file, folder / "stages" / f"stage_{stage}.ckpt")
    if recipe["stages"] > 1:
        out = folder / "strategy.ckpt"
        mindspore.ask("merge_stages", folder=folder / "stages", out=out)
    else:
        shutil.copy(files[0], folder / "strategy.ckpt")
    return Saved(recipe, folder)


@pytest.fixture
def cut(request, saved):
    return saved(*request.param)


@pytest.fixture
def src(request, saved):
    return saved(*request.param)


@pytest.fixture
def dst(request, saved):
    return saved(*request.param)
