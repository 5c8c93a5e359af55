"""Logs: what a line proves, what is not believed, and what a writer appends."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from zlib import crc32

import pytest
from msgspec.structs import astuple

from ckpttool.model.manifest import CastStats, OutputEntry, TensorEntry
from ckpttool.problems import FormatError
from ckpttool.storage.files import stamp_at
from ckpttool.transaction import sealed_files as manifest_module
from ckpttool.transaction.log import Log, LogWriter, UnitGroup, _seal
from ckpttool.transaction.sealed_files import ManifestFile, entry_text
from ckpttool.transaction.states import FinishedStamps, RecordedPlan

PLAN = "4b1c"
TENSORS = (TensorEntry("w\n", "Int8", (4,), ("ab",)),)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "whole.log"


def entry_of(name, rank=0):
    return OutputEntry(rank, name, "ckpt", 4, TENSORS)


def line_of(name, rank=0):
    return b"".join(entry_text(entry_of(name, rank), TENSORS))


def sealed(line):
    data = line if isinstance(line, bytes) else line.encode()
    return data + _seal(crc32(data))


def open_log(path):
    kept = Log.read(path).nbytes if path.exists() else 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
    return LogWriter(path, fd, kept, PLAN, "")


def write(path, *names, is_done=False):
    log = open_log(path)
    for rank, name in enumerate(names):
        log.add([line_of(name, rank)])
        (path.parent / name).write_text("data")
        log.add_stamp(name, stamp_at(path.parent / name))
    if is_done:
        log.end(names)
    os.close(log._fd)


def test_the_lines_are_those_that_the_documentation_shows(path):
    write(path, "a", is_done=True)
    lines = [line.rpartition(" ")[0] for line in path.read_text().splitlines()]
    run, output, stamp, done = map(json.loads, lines)
    assert run.keys() == {"process", "host", "time", "record", "plan", "command"}
    assert lines[1].encode() == line_of("a")
    assert output["path"] == "a"
    assert stamp == {"path": "a", "stamp": [*stamp_at(path.parent / "a")]}
    assert done == {"done": ["a"]}
    assert Log.read(path).done == ("a",)


def test_a_log_cut_at_any_byte_tells_of_the_lines_before(path):
    write(path, "a", "b", is_done=True)
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    assert len(ends) == 6
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        lines = sum(end <= size for end in ends)
        if 0 < size < ends[0]:
            with suppress(FormatError):  # no run has begun, so it is of no use
                assert Log.read(path).outputs == {}
            continue
        log = Log.read(path)
        assert (log.writer is None) == (lines == 0)
        assert list(log.outputs) == ["a", "b"][: lines // 2]
        stamped = [name for name, output in log.outputs.items() if output.stamp is not None]
        assert stamped == ["a", "b"][: max(0, lines - 1) // 2]
        assert log.is_done == (lines == 6)
        assert log.nbytes == max((end for end in ends if end <= size), default=0)


@pytest.mark.slow
def test_no_byte_of_a_log_is_changed_unnoticed(path):
    write(path, "a", "b", is_done=True)
    data = path.read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    for at in range(len(data)):
        for bits in (1, 0x20):
            path.write_bytes(data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :])
            if at < last - 1:
                with pytest.raises(FormatError, match="a line has changed since it was written"):
                    Log.read(path)
                continue
            with suppress(FormatError):  # as what a power loss leaves of it
                log = Log.read(path)
                assert log.nbytes <= last
                assert not log.is_done


def units_of(*numbers, is_first=False):
    hashes = tuple((0, number, f"{number:02x}") for number in numbers)
    return UnitGroup("a", is_first, hashes, {"w": CastStats(elements=len(numbers))})


def numbers_in(path, plan=PLAN):
    groups = Log.read(path).units[plan].get("a", ())
    return [number for group in groups for _, number, _ in group.read_units().hashes]


def test_groups_of_units_add_up_until_their_file_is_made_anew_or_complete(path):
    log = open_log(path)
    log.add_units(*astuple(units_of(0, 1, is_first=True)))
    log.add_units(*astuple(units_of(2)))
    assert numbers_in(path) == [0, 1, 2]
    os.close(log._fd)
    log = open_log(path)  # another run, which has not begun the file
    assert numbers_in(path) == [0, 1, 2]
    log.add_units(*astuple(units_of(3, is_first=True)))
    assert numbers_in(path) == [3]
    (group,) = Log.read(path).units[PLAN]["a"]
    assert group.read_units() == units_of(3, is_first=True)
    log.add([line_of("a")])
    assert numbers_in(path) == []
    os.close(log._fd)


def test_an_output_is_durable_and_its_stamp_need_not_be(path, monkeypatch):
    log, synced = open_log(path), []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    log.add([line_of("a")])
    assert synced == [path.stat().st_size]
    log.add_stamp("a", stamp_at(path))
    log.add([line_of("b")], is_durable=False)
    assert len(synced) == 1
    log.sync()
    assert synced[1:] == [path.stat().st_size]
    log.end([])
    assert synced[2:] == [path.stat().st_size]
    os.close(log._fd)


def test_a_disk_that_takes_few_bytes_at_a_time_gets_whole_lines(path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:7]))
    write(path, "a", is_done=True)
    monkeypatch.undo()
    assert list(Log.read(path).outputs) == ["a"]
    assert Log.read(path).is_done


RUN = '{"process": 1, "host": "h", "time": "t", "record": 2, "plan": "p", "command": "c"}'
OLD = RUN.replace(', "record": 2', "")
UNITS = '{"units": "a", "is_first": true, "hashes": []'
STAMP = '"stamp": [1, 1, 1, 1]'
BEFORE = "path: expected the output in the line before"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["no json"], "not a log of ckpttool"),
        (['{"process": '], "not valid JSON from line 1, column 13 on"),
        (["[]"], "not a log of ckpttool"),
        (["{}"], "not a log of ckpttool"),
        (['{"done": []}'], "not a log of ckpttool"),
        (['{"rank": 0, "path": "a"}'], "not a log of ckpttool"),
        (['{"process": "1"}'], "process: expected int, got str"),
        (['{"process": 1, "host": 2, "time": "t"}'], "host: expected str, got int"),
        ([OLD], "written by another version of ckpttool; record: expected 2, got 1"),
        ([RUN.replace("2", "3", 1)], "written by another version .* expected 2, got 3"),
        ([RUN, UNITS.replace("true", "1") + "}"], "is_first: expected bool, got int"),
        ([RUN, UNITS.replace('"a"', '"../a"') + "}"], "expected a path below the folder"),
        ([RUN, '{"rank": "1", "path": "a"}'], "rank: expected int, got str"),
        ([RUN, '{"rank": 0, "path": "../x"}'], "path: expected a path below the folder"),
        ([RUN, '{"rank": 0, "path": "/etc/x"}'], "path: expected a path below the folder"),
        (
            [RUN, line_of("a"), f'{{"path": "../a", {STAMP}}}'],
            "path: expected a path below the folder",
        ),
        ([RUN, line_of("a"), f'{{"path": "b", {STAMP}}}'], BEFORE),
        ([RUN, f'{{"path": "a", {STAMP}}}'], BEFORE),
        ([RUN, line_of("a"), '{"path": "a"}'], "missing required field stamp"),
        ([RUN.replace("h", "x", 1) + RUN], "not valid JSON"),
        ([RUN, '{"done": true}'], "done: expected array, got bool"),
        ([RUN[:-1] + ', "plan": "q"}'], "plan: stored twice"),
    ],
)
def test_another_file_of_that_name_is_named_and_not_believed(path, lines, reason):
    path.write_bytes(b"".join(map(sealed, lines)))
    with pytest.raises(FormatError, match=reason) as caught:
        Log.read(path)
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    "reader", [Log.read, RecordedPlan.read, FinishedStamps.read, ManifestFile.read]
)
@pytest.mark.parametrize("start", [b"{", b"{\n", b'{"rank": ', sealed(RUN)])
def test_of_another_file_no_more_is_read_than_a_line_may_have(path, reader, start, monkeypatch):
    path.write_bytes(start)
    os.truncate(path, 1 << 40)  # a hole: to read all of it would take a TiB
    monkeypatch.setattr(manifest_module, "MAX_LINE_BYTES", 1000)
    with pytest.raises(
        FormatError, match=r"whole\.log: .*(1000 bytes|no JSON|has changed|ckpttool)"
    ):
        reader(path)


@pytest.mark.parametrize("change", ["cut", "other"])
def test_an_entry_that_is_not_there_any_more_when_it_is_read_is_damage(path, change):
    write(path, "a")
    output = Log.read(path).outputs["a"]
    size = path.stat().st_size
    path.write_bytes(b"" if change == "cut" else b"x" * size)
    with pytest.raises(FormatError, match=r"whole\.log: "):
        output.read_entry()
