"""The record of a run: the four states of a destination, and what passes from one to the next."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ckpttool
from ckpttool.transaction.journal import OutputSet
from ckpttool.transaction.record import Transaction
from ckpttool.transaction.resume import State, look
from tests.support.commands import files_below
from tests.support.corpus import GOLDEN

CASE = GOLDEN / "safetensors_pipeline"


def plan_to(folder, **options):
    catalog = ckpttool.scan(str(CASE / "src"))
    sides = [
        ckpttool.read_strategy([str(CASE / f"{side}_strategy.ckpt")]) for side in ("src", "dst")
    ]
    return ckpttool.plan_reshard(
        catalog, *sides, str(folder), output_options=ckpttool.OutputOptions("ckpt", **options)
    )


def state_of(plan, destination):
    return look(OutputSet.of(plan, destination.ranks, destination.part))


def complete_first(transaction, plan):
    """Complete the first output, whatever is in it."""
    output = next(iter(plan))
    transaction.begin([output])
    partial = Path(f"{output.path}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(b"data")
    transaction.record_complete(output, 4, {meta.name: {} for meta in output.metas})
    partial.replace(output.path)
    transaction.record_placed(output)


@pytest.mark.parametrize("part", [None, (1, 2)])
def test_a_run_passes_from_none_over_running_to_complete(tmp_path, part):
    plan, destination = plan_to(tmp_path / "out", part=part)
    assert destination.state is State.NONE
    transaction = Transaction.open(plan, destination)
    assert state_of(plan, destination) is State.RUNNING
    transaction.abandon()
    assert state_of(plan, destination) is State.NONE
    ckpttool.execute(plan, destination)
    assert state_of(plan, destination) is State.COMPLETE


@pytest.mark.parametrize("part", [None, (1, 2)])
def test_a_run_that_ends_early_is_stopped_and_keeps_what_is_complete(tmp_path, part):
    plan, destination = plan_to(tmp_path / "out", part=part)
    transaction = Transaction.open(plan, destination)
    complete_first(transaction, plan.limited_to(destination.ranks))
    transaction.abandon()
    assert state_of(plan, destination) is State.STOPPED
    assert destination.count_kept(plan) == 1
    plan, destination = plan_to(tmp_path / "out", part=part, resume=True)
    assert destination.state is State.STOPPED
    assert len(destination.kept) == 1
    transaction = Transaction.open(plan, destination)
    assert transaction.kept == {destination.ranks[0]}
    transaction.abandon()


def test_a_complete_set_is_kept_whole_and_neither_locked_nor_touched(tmp_path):
    ckpttool.execute(*plan_to(tmp_path / "out"))
    before = files_below(tmp_path, manifests=True)
    plan, destination = plan_to(tmp_path / "out", resume=True)
    assert destination.state is State.COMPLETE
    assert len(destination.kept) == len(destination.ranks)
    transaction = Transaction.open(plan, destination)
    assert transaction.kept == {*destination.ranks}
    assert state_of(plan, destination) is State.COMPLETE
    transaction.finish()
    assert files_below(tmp_path, manifests=True) == before


def test_what_changes_after_preflight_is_refused_under_the_lock(tmp_path):
    plan, destination = plan_to(tmp_path / "out")
    path = plan.target.paths[0]
    Path(path).parent.mkdir(parents=True)
    Path(path).write_text("of another run")
    with pytest.raises(ckpttool.PlanError, match="written by another run since this one began"):
        Transaction.open(plan, destination)
    assert os.listdir(tmp_path / "out") == ["rank_0"]  # noqa: PTH208
