"""What lies at a destination: the four states, who writes, and what of a record is damaged."""

from __future__ import annotations

import os
from contextlib import closing

import pytest

import ckpttool
from ckpttool.model.plan import Document
from ckpttool.storage.files import stamp_at, write_document
from ckpttool.transaction import locks
from ckpttool.transaction.locks import FileLock, HeldError, is_held
from ckpttool.transaction.log import LogWriter, Writer
from ckpttool.transaction.states import Record, RecordedPlan, State, read_destination
from tests.support.executors import make_plan
from tests.support.manifests import MANIFEST, PLAN, RECORD


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def record_of(out):
    return Record(out / MANIFEST)


def write_parts(out, *parts):
    for part in parts:
        ckpttool.execute(*make_plan(out, "ckpt", part=part))


# ----------------------------------------------------------------------------- the four states


def test_who_has_a_lock_and_wrote_no_line_yet_is_told(out):
    record = record_of(out)
    with closing(os.fdopen(FileLock(record.lock).fd)):
        assert read_destination(record).state is State.NONE  # who begins writes nothing yet
    with closing(os.fdopen(FileLock(record.log((1, 2))).fd)):
        assert read_destination(record).running == {record.log((1, 2)): "it has just begun"}
    assert read_destination(record).state is State.NONE


# ----------------------------------------------------------------------------- damaged files


def test_every_damaged_file_is_named(out):
    write_parts(out, (1, 2), (2, 2))
    paths = [out / PLAN, *sorted((out / RECORD).glob("*.log"))]
    for path in paths:
        path.write_bytes(b"\0" * 100 + b"\n")
    assert [error.path for error in read_destination(record_of(out)).damaged.values()] == [
        str(path) for path in paths
    ]


# ----------------------------------------------------------------------------- locks


def test_a_lock_is_held_by_one(out, monkeypatch):
    monkeypatch.setattr(locks, "PAUSE_SECONDS", 0)
    path = out / RECORD / "lock"
    assert is_held(path) is False
    lock = FileLock(path)
    assert is_held(path) is True
    with pytest.raises(HeldError):
        FileLock(path, 0)
    lock.release()
    assert is_held(path) is False


def test_a_lock_that_was_removed_meanwhile_is_none(out, monkeypatch):
    path = out / RECORD / "lock"
    first = FileLock(path)
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        path.unlink()
        path.parent.rmdir()
        first.release()

    monkeypatch.setattr("time.sleep", pause)
    second = FileLock(path)
    assert len(pauses) == 1
    assert is_held(path) is True
    second.release()


# ----------------------------------------------------------------------------- paths and documents


def test_the_record_of_a_folder_and_of_a_file_lie_beside_their_manifests(tmp_path):
    folder, file = Record.of(tmp_path), Record.of(tmp_path / "m.ckpt")
    assert folder.manifest == tmp_path / "ckpttool.json"
    assert folder.home == tmp_path / ".ckpttool"
    assert folder.output == tmp_path
    assert file.manifest == tmp_path / "m.ckpt.ckpttool.json"
    assert file.home == tmp_path / ".m.ckpt.ckpttool"
    assert file.output == tmp_path / "m.ckpt"
    assert folder.log(None).name == "whole.log"


def test_a_plan_and_stamps_are_read_as_they_were_written(out):
    ckpttool.execute(*make_plan(out, "ckpt"))
    stamps = read_destination(record_of(out)).stamps
    documents = (Document("x.json", b"\0{}", "index"),)
    outputs = {"rank_1/b": 1, "rank_0/a": 0, "rank_2/\udcff": 2}
    recorded = RecordedPlan(Writer.this(), stamps.provenance, outputs, documents)
    for value in (recorded, stamps):
        write_document(str(out / "file"), value.text())
        assert type(value).read(out / "file") == value
        assert type(value).read(out / "file").provenance.command == stamps.provenance.command


# ----------------------------------------------------------------------------- descriptions


def test_of_several_entries_of_an_output_that_with_its_stamp_counts(out):
    write_parts(out, (1, 2))
    (name, entry), *_ = read_destination(record_of(out)).logged().items()
    other = record_of(out).log((3, 3))
    writer = LogWriter(other, os.open(other, os.O_RDWR | os.O_CREAT), 0, entry.plan, "")
    writer.add(entry.read_line())
    assert read_destination(record_of(out)).logged()[name].log == entry.log
    writer.add_stamp(name, stamp_at(out / PLAN))
    assert read_destination(record_of(out)).logged()[name].log == entry.log
    writer.add(entry.read_line())
    os.utime(out / name)
    writer.add_stamp(name, stamp_at(out / name))
    assert read_destination(record_of(out)).logged()[name].log == other
