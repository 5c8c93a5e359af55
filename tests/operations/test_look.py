"""The one way in: what still runs when a stage stops, and when another step is proposed."""

from __future__ import annotations

import pytest

import ckpttool
from ckpttool.concurrency import InlineExecutor
from ckpttool.operations.look import Subject, look
from ckpttool.problems import Diagnostics
from tests.support.checkpoints import ONE_STAGE, noise, write_file

RANKS = range(4)


def look_at(folder, strategy=ONE_STAGE, command="convert", **how):
    catalog = ckpttool.scan(str(folder), command=command)
    return look(Subject(catalog, strategy), Diagnostics(command), InlineExecutor(), **how)


@pytest.fixture
def folder(tmp_path):
    for rank in RANKS:
        for step in (1, 2):
            entries = {"w": noise(f"w{rank // 2}", "Float32", (4, 3))}
            write_file(tmp_path / f"rank_{rank}" / f"net-{step}_10.ckpt", entries, "ckpt")
    return tmp_path


def damage(folder, *ranks):
    for rank in ranks:
        (folder / f"rank_{rank}" / "net-2_10.ckpt").write_bytes(b"not a checkpoint")


def test_another_step_is_proposed_where_no_replica_replaces_what_is_damaged(folder):
    damage(folder, 2, 3)
    sight = look_at(folder)
    assert sight.contents.complete_step == "1_10"
    hints = [one.hint for error in sight.found.failures for one in error.diagnostics]
    assert hints == ["--step 1_10, which is complete by its headers"] * 2


@pytest.mark.parametrize("ranks", [(), (3,)])
def test_the_headers_of_other_steps_are_not_read_where_nothing_is_missing(
    folder, ranks, monkeypatch
):
    damage(folder, *ranks)
    monkeypatch.setattr("ckpttool.operations.look.read_indexes", None)
    assert look_at(folder).contents.complete_step == ""


def test_a_step_with_a_damaged_file_is_not_proposed(folder):
    damage(folder, 2, 3)
    (folder / "rank_0" / "net-1_10.ckpt").write_bytes(b"")
    assert look_at(folder).contents.complete_step == ""


@pytest.mark.parametrize("command", ["convert", "diff"])
def test_checksums_are_verified_though_the_tensors_cannot_be_resolved(folder, command):
    sight = look_at(folder, strategy=None, command=command, crc=True)
    assert sight.checkpoint is None
    assert sight.found.failures == [sight.error]
    assert [one.code for one in sight.error.diagnostics] == ["no_strategy"]
    assert [one.code for one in sight.of_files] == ["no_checksum"]


def test_the_checks_run_though_contents_cannot_be_read(folder):
    def fail(*_):
        raise ckpttool.FormatError("rank_0/net.ckpt", 7, "the file ends here")

    sight = look_at(folder, command="verify", read_more=fail)
    assert sight.error in sight.found.failures
    assert "step" in [one.code for one in sight.found]
