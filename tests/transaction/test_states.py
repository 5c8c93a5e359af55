"""What lies at a destination: the four states, who writes, and what of a record is damaged."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from contextlib import closing, contextmanager

import pytest

import ckpttool
from ckpttool.model.plan import Document
from ckpttool.storage.files import stamp_at, write_document
from ckpttool.transaction import locks
from ckpttool.transaction.locks import FileLock, HeldError, is_held
from ckpttool.transaction.log import LogWriter, Writer
from ckpttool.transaction.record import Transaction
from ckpttool.transaction.states import (
    Record,
    RecordedPlan,
    State,
    describe_record,
    find_unfinished_run,
    look,
)
from tests.support.commands import files_below
from tests.support.executors import make_plan
from tests.support.manifests import LOG, MANIFEST, PLAN, RECORD, STAMPS

THIS = f"process {os.getpid()} on {Writer.this().host}"


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def record_of(out):
    return Record(out / MANIFEST)


def state_of(out):
    return look(record_of(out)).state


@contextmanager
def running(out, part=None, **options):
    transaction = Transaction(*make_plan(out, part=part, **options))
    try:
        yield transaction
    finally:
        transaction.abandon()


def stop(out, outputs=1, **options):
    """Leave a run that failed when so many outputs were complete."""

    class StopError(Exception):
        pass

    def check():
        if len([*out.glob("rank_*/*.ckpt")]) >= outputs:
            raise StopError

    with pytest.raises(StopError):
        ckpttool.execute(
            *make_plan(out, "ckpt", **options),
            check=check,
            options=ckpttool.CopyOptions(group_tensors=1),
        )


def write_parts(out, *parts):
    for part in parts:
        ckpttool.execute(*make_plan(out, "ckpt", part=part))


# ----------------------------------------------------------------------------- the four states


def test_nothing_is_claimed_of_a_folder_that_nobody_wrote_to(tmp_path, out):
    for folder in (out, tmp_path / "absent"):
        destination = look(record_of(folder))
        assert destination == look(record_of(folder))
        assert destination.state is State.NONE
        assert (destination.plan, destination.logs) == (None, ())
        assert find_unfinished_run(folder) is None
    (out / "rank_0").mkdir()
    (out / "rank_0" / "checkpoint_0.ckpt").touch()
    assert state_of(out) is State.NONE


def test_to_look_changes_nothing(out):
    write_parts(out, (1, 2))
    before = {path: stamp_at(path) for path in out.rglob("*")}
    look(record_of(out))
    list(describe_record(out))
    assert {path: stamp_at(path) for path in out.rglob("*")} == before
    shutil.rmtree(out)
    look(record_of(out))
    assert not out.exists()


@pytest.mark.parametrize("part", [None, (1, 2)])
def test_while_a_run_writes_its_process_is_named(out, part):
    log = record_of(out).log(part)
    with running(out, part):
        destination = look(record_of(out))
        assert destination.state is State.RUNNING
        assert destination.running == {log: THIS}
        assert list(destination.plan.outputs.values()) == [0, 1, 2, 3]
        found = find_unfinished_run(out)
        assert found.fact == f"{out}: a run of ckpttool is writing here"
        assert found.facts == f"{THIS}; files may be missing, or of another run"
    assert state_of(out) is State.NONE
    assert not (out / RECORD).exists()


def test_two_parts_that_write_are_both_named(out):
    with running(out, (1, 2)), running(out, (2, 2)):
        logs = [record_of(out).log((number, 2)) for number in (1, 2)]
        assert look(record_of(out)).running == dict.fromkeys(logs, THIS)
    assert state_of(out) is State.NONE


def test_who_has_a_lock_and_wrote_no_line_yet_is_told(out):
    record = record_of(out)
    with closing(os.fdopen(FileLock(record.lock).fd)):
        assert look(record).state is State.NONE  # who begins writes nothing yet
    with closing(os.fdopen(FileLock(record.log((1, 2))).fd)):
        assert look(record).running == {record.log((1, 2)): "it has just begun"}
    assert look(record).state is State.NONE


def test_a_run_that_failed_is_stopped_and_what_it_completed_is_known(out):
    stop(out, 2)
    destination = look(record_of(out))
    assert destination.state is State.STOPPED
    assert destination.running == {}
    assert len(destination.logs) == 1
    assert destination.damaged == {}
    names = {name for name in files_below(out) if name.startswith("rank_")}
    assert destination.logged().keys() == names
    for name, output in destination.logged().items():
        assert output.stamp == stamp_at(out / name)
    assert find_unfinished_run(out).fact == f"{out}: a run of ckpttool did not end here"


def test_parts_that_are_done_are_stopped_until_they_are_finalized(out):
    write_parts(out, (1, 3))
    destination = look(record_of(out))
    assert destination.state is State.STOPPED
    others = {*destination.plan.outputs} - destination.finished
    assert destination.missing == sorted(others)
    assert len(others) == 2
    problem = find_unfinished_run(out)
    assert "its parts are not finalized" in problem.text
    again = "the command that writes them, with --resume, then"
    assert problem.hint == f"{again} ckpttool finalize {out}"
    write_parts(out, (2, 3), (3, 3))
    assert look(record_of(out)).missing == []
    assert find_unfinished_run(out).hint == f"ckpttool finalize {out}"
    ckpttool.finalize(str(out))
    assert state_of(out) is State.COMPLETE
    assert find_unfinished_run(out) is None


# ----------------------------------------------------------------------------- damaged files


@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "pipe", "folder", "other"])
@pytest.mark.parametrize("name", [PLAN, f"{RECORD}/1-of-2.log", STAMPS])
def test_a_damaged_file_of_a_record_is_named_and_not_used(out, name, damage):
    write_parts(out, (1, 2), (2, 2))
    if name == STAMPS:
        ckpttool.finalize(str(out))
    path = out / name
    data = path.read_bytes()
    if damage in ("pipe", "folder"):
        path.unlink()
        os.mkfifo(path) if damage == "pipe" else path.mkdir()
    else:
        middle = len(data) // 2
        changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        texts = {"changed": changed, "cut": data[:-9], "empty": b"", "other": b"{}\n{}\n"}
        path.write_bytes(texts[damage])
    destination = look(record_of(out))
    state = State.COMPLETE if name == STAMPS else State.STOPPED
    assert destination.state is state
    if path.suffix == ".log" and damage in ("cut", "empty"):
        assert destination.damaged == {}  # as after a power loss
        assert len(destination.missing) == 2
        return
    (error,) = destination.damaged.values()
    assert error.path == str(path)
    if name == PLAN:
        assert destination.plan is None
    elif name == STAMPS:
        assert destination.stamps is None
    else:
        assert [log.path.name for log in destination.runs] == ["2-of-2.log"]
    note, *_ = describe_record(out)
    assert note.text.startswith(f"{path}: ")
    assert note.hint == "the command that writes it, with --overwrite"


def test_every_damaged_file_is_named(out):
    write_parts(out, (1, 2), (2, 2))
    paths = [out / PLAN, *sorted((out / RECORD).glob("*.log"))]
    for path in paths:
        path.write_bytes(b"\0" * 100 + b"\n")
    assert [error.path for error in look(record_of(out)).damaged.values()] == [
        str(path) for path in paths
    ]


# ----------------------------------------------------------------------------- without locks


@pytest.fixture
def no_locks(monkeypatch):
    def flock(fd, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)


def test_without_locks_nobody_is_known_to_write(out, no_locks):
    stop(out, 1)
    assert is_held(record_of(out).lock) is None
    assert state_of(out) is State.STOPPED


# ----------------------------------------------------------------------------- locks


def test_a_lock_is_held_by_one(out, monkeypatch):
    monkeypatch.setattr(locks, "PAUSE_SECONDS", 0)
    path = out / RECORD / "lock"
    assert is_held(path) is False
    one = FileLock(path)
    assert is_held(path) is True
    with pytest.raises(HeldError):
        FileLock(path, 0)
    one.release()
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
    stamps = look(record_of(out)).stamps
    documents = (Document("x.json", b"\0{}", "index"),)
    outputs = {"rank_1/b": 1, "rank_0/a": 0, "rank_2/\udcff": 2}
    recorded = RecordedPlan(Writer.this(), stamps.provenance, outputs, documents)
    for value in (recorded, stamps):
        write_document(str(out / "file"), value.text())
        assert type(value).read(out / "file") == value
        assert type(value).read(out / "file").provenance.command == stamps.provenance.command


# ----------------------------------------------------------------------------- descriptions


def test_runs_that_have_not_ended_are_described_with_what_they_write(out):
    stop(out, 2)
    (out / "rank_3").mkdir(exist_ok=True)
    (out / "rank_3" / "checkpoint_3.ckpt.partial").touch()
    first, second = describe_record(out)
    names = ", ".join(sorted(look(record_of(out)).logged()))
    told = f"log of a run that stopped\n  `python`; complete: {names}; {THIS} since "
    assert first.text.startswith(f"{out / LOG}: {told}")
    assert second.text == f"{out}: 1 half-written file\n  rank_3/checkpoint_3.ckpt"


def test_of_many_logs_few_are_described(out):
    write_parts(out, *((number, 5) for number in range(1, 6)))
    *described, rest = describe_record(out)
    assert len(described) == 3
    assert "2 more logs of runs" in rest.text


def test_of_several_entries_of_an_output_that_with_its_stamp_counts(out):
    write_parts(out, (1, 2))
    (name, entry), *_ = look(record_of(out)).logged().items()
    other = record_of(out).log((3, 3))
    writer = LogWriter(other, os.open(other, os.O_RDWR | os.O_CREAT), 0, entry.plan, "")
    writer.add(entry.read_line())
    assert look(record_of(out)).logged()[name].log == entry.log
    writer.add_stamp(name, stamp_at(out / PLAN))
    assert look(record_of(out)).logged()[name].log == entry.log
    writer.add(entry.read_line())
    os.utime(out / name)
    writer.add_stamp(name, stamp_at(out / name))
    assert look(record_of(out)).logged()[name].log == other
