"""The record of a run: the four states of a destination, and what passes from one to the next."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

import ckpttool
from ckpttool.model.manifest import UnitHashes, count_units
from ckpttool.transaction.record import Transaction
from tests.support.commands import files_below
from tests.support.corpus import GOLDEN
from tests.support.plans import plan_reshard

CASE = GOLDEN / "safetensors_pipeline"


def plan_to(folder, **options):
    catalog = ckpttool.scan(str(CASE / "src"))
    sides = [
        ckpttool.read_strategy([str(CASE / f"{side}_strategy.ckpt")]) for side in ("src", "dst")
    ]
    return plan_reshard(
        catalog, *sides, str(folder), output_options=ckpttool.OutputOptions("ckpt", **options)
    )


def kill(transaction):
    transaction.release()


def hashes_of(output):
    hashes = UnitHashes(output.metas)
    for place, meta in enumerate(output.metas):
        for number in range(count_units(meta)):
            hashes.add(place, number, bytes(32))
    return hashes


def complete_first(transaction, plan):
    output = next(iter(plan))
    partial = Path(f"{output.path}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(b"data")
    transaction.record_complete(output, 4, hashes_of(output))
    partial.replace(output.path)
    transaction.record_placed(output)


def test_parts_of_two_plans_that_begin_at_once_do_not_write_side_by_side(tmp_path):
    out = tmp_path / "out"
    mine, other = plan_to(out, part=(1, 2)), plan_to(out, part=(2, 2), prefix="other_")
    first = Transaction(*mine)
    with pytest.raises(ckpttool.PlanError, match="a part of another run is"):
        Transaction(*other)
    first.abandon()
    assert files_below(tmp_path) == []


def test_an_output_that_is_not_what_the_same_run_wrote_before_is_refused(tmp_path):
    out = tmp_path / "out"
    plan, assignment = plan_to(out)
    transaction = Transaction(plan, assignment)
    complete_first(transaction, plan)
    transaction.abandon()
    output = next(iter(plan))
    Path(output.path).unlink()
    plan, assignment = plan_to(out, resume=True)
    transaction = Transaction(plan, assignment)
    with pytest.raises(
        ckpttool.VerifyError, match="differs from what the same command wrote before"
    ):
        transaction.record_complete(output, 5, hashes_of(output))
    transaction.record_complete(output, 4, hashes_of(output))
    with pytest.raises(AssertionError, match="units without a hash"):
        transaction.record_complete(output, 4, UnitHashes(output.metas))
    transaction.abandon()


def test_temporary_files_of_a_killed_run_are_removed_and_no_others(tmp_path):
    out = tmp_path / "out"
    kill(Transaction(*plan_to(out)))
    (out / "rank_0").mkdir()
    (out / "rank_1").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    names = [f"rank_{rank}/checkpoint_{rank}.ckpt.partial" for rank in (0, 1)]
    attempt = f"{names[0]}.0123456789abcdef"
    for name in (*names, attempt, f"{names[1]}.0123456789abcdef", "rank_0/other.partial"):
        (out / name).touch()
    Transaction(*plan_to(out)).abandon()
    assert files_below(out / "rank_0") == ["other.partial"]
    assert len(files_below(tmp_path / "elsewhere")) == 2  # a link leads out of the folder


def test_a_temporary_file_that_another_run_writes_is_not_removed(tmp_path):
    out = tmp_path / "out"
    kill(Transaction(*plan_to(out)))
    planned = plan_to(out)
    path = out / "rank_0" / "checkpoint_0.ckpt.partial"
    path.parent.mkdir()
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ckpttool.PlanError, match="another run is writing it"):
            plan_to(out)
        transaction = Transaction(*planned)
        assert path.exists()
        transaction.abandon()
    assert path.exists()
