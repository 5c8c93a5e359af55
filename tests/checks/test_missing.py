"""Files that a disk does not give; those that are missing or damaged are in e2e/sessions."""

import os
import shutil
import time

import pytest

import ckpttool
from ckpttool.checks import run_checks
from ckpttool.model.layout import Layout
from ckpttool.problems import (
    UnreadableError,
)
from ckpttool.wording import format_ranks
from tests.support.checkpoints import catalog_of, strategy_of
from tests.support.commands import message, run
from tests.support.corpus import GOLDEN
from tests.support.damage import cut_short
from tests.support.in_memory import resolve_in_memory
from tests.support.readers import rank_file

CASE = GOLDEN / "tutorial_8_to_8_retrain"  # every slice is on two or four ranks


@pytest.fixture
def source(tmp_path):
    """A checkpoint of which every slice is on several ranks."""
    return shutil.copytree(CASE / "src", tmp_path / "src")


def merge(source, out, *words):
    return run("merge", source, "-s", CASE / "src_strategy.ckpt", "-o", out, *words)


def make_unreadable(monkeypatch, broken):
    """Reading one file's header fails as on a broken disk."""
    import ckpttool.formats as module

    find = module.format_of_content

    def fail(path):
        if path == str(broken):
            raise OSError(5, os.strerror(5), path)
        return find(path)

    monkeypatch.setattr(module, "format_of_content", fail)


def test_a_file_on_a_broken_disk_is_replaced_with_a_warning(source, tmp_path, monkeypatch):
    assert merge(source, tmp_path / "whole.ckpt").exit_code == 0
    make_unreadable(monkeypatch, rank_file(source, 2))
    result = merge(source, tmp_path / "m.ckpt", "-q")
    assert (tmp_path / "m.ckpt").read_bytes() == (tmp_path / "whole.ckpt").read_bytes()
    said = f"warning[damaged_replica]: {rank_file(source, 2)}: Input/output error"
    assert message(result).startswith(said)


def test_an_unreadable_file_that_nobody_replaces_has_the_exit_code_of_a_damaged_one(
    source, tmp_path, monkeypatch
):
    for rank in (0, 1, 4, 5):
        cut_short(rank_file(source, rank))
    make_unreadable(monkeypatch, rank_file(source, 0))
    result = merge(source, tmp_path / "m.h5")
    assert result.exit_code == 3
    assert "rank_0/checkpoint-2_10.ckpt: Input/output error" in message(result)
    with pytest.raises(UnreadableError):
        raise ckpttool.scan(str(source)).damaged[0]


@pytest.mark.parametrize("layout", [Layout((15_000,), ((), ())), Layout((2, 7_500), ((1,), ()))])
def test_thousands_of_ranks_without_a_file_take_seconds(layout):
    strategy = strategy_of(dict.fromkeys("wvu", layout))
    there = [0, 3, 7_501, 14_999]
    catalog = catalog_of(dict.fromkeys(there, dict.fromkeys("wvu", (8, 4))))
    letters = {name: {r: str(layout.slice_index(r)) for r in there} for name in "wvu"}
    began = time.process_time()
    found = run_checks(*resolve_in_memory(catalog, strategy, letters), "convert")
    (one,) = (one for one in found if one.code == "missing_replica")
    assert time.process_time() - began < 10  # the square of the ranks took minutes
    assert len(one.ranks) == 14_996
    named = [0] if layout.slice_counts[0] == 1 else [0, 7_501]
    assert one.facts.endswith(format_ranks(named))
