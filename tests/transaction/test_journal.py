"""The journal: what it proves, what it does not believe, and the manifest that it becomes."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from ckpttool.errors import FormatError, PlanError, VerifyError
from ckpttool.model.manifest import (
    InputFile,
    OutputEntry,
    Provenance,
    StrategyFile,
    TensorEntry,
    differences,
    units,
)
from ckpttool.model.tensors import TensorMeta
from ckpttool.storage.files import stamp_at
from ckpttool.transaction.journal import (
    Journal,
    OutputSet,
    acquire_lock,
    find_unfinished_run,
    part_record_path,
    read_journal,
    seal_line,
)
from ckpttool.transaction.manifest import ManifestFile
from tests.support.commands import files_below
from tests.support.manifests import JOURNAL

INPUTS = (InputFile("src/a.ckpt", 10, 5, 5), InputFile("src/b.ckpt", 20, 6, 6))
ORIGIN = Provenance("1.0", "plan", "2_10", INPUTS, (StrategyFile("s.ckpt", 7, "12"),))


def place_of(folder, part=None):
    """Where a run writes its manifest, or the record of a part."""
    manifest = folder / "ckpttool.json"
    if part is None:
        return OutputSet(manifest, manifest, ORIGIN, ORIGIN.head())
    return OutputSet(
        manifest, part_record_path(manifest, part, 2), ORIGIN, ORIGIN.head_with_times()
    )


def open_journal(folder, is_resumed=False, part=None):
    return Journal(place_of(folder, part), is_resumed)


def journal_path(folder):
    return folder / JOURNAL


def journal_of_part(folder, part):
    return folder / f".ckpttool-part-{part}-of-2.json.journal"


def add(journal, name, rank=0, text="data"):
    """Write an output as a run does: the journal knows of it before it has its name."""
    path = journal.folder / name
    partial = Path(f"{path}.partial")
    journal.begin(str(path))
    partial.write_text(text)
    tensors = (TensorEntry("w\n", "Int8", (4,), ("ab",)),)
    journal.add(OutputEntry(rank, name, "ckpt", len(text), tensors))
    partial.replace(path)
    journal.place(str(path))


def kill(journal):
    """End a run without another word; its locks go."""
    for fd in journal._fds.values():
        os.close(fd)


def killed(folder, *names, begun=(), part=None):
    """What is left of a run that completed these outputs, began others, and was killed."""
    journal = open_journal(folder, part=part)
    for rank, name in enumerate(names):
        add(journal, name, rank)
    for name in begun:
        journal.begin(str(folder / name))
        (folder / f"{name}.partial").write_text("half")
    kill(journal)


def test_what_is_complete_is_proven_by_size_and_times_of_change(tmp_path):
    killed(tmp_path, "a", "b", "c", "d", begun=["e"])
    (tmp_path / "b").write_text("more data")
    os.utime(tmp_path / "c", ns=(1, 1))
    (tmp_path / "d").unlink()
    found = read_journal(journal_path(tmp_path))
    assert found.kept(tmp_path, {}) == {"a": stamp_at(tmp_path / "a")}
    assert found.begun == {"a", "b", "c", "d", "e"}
    assert found.provenance == ORIGIN
    assert list(found.complete) == ["a", "b", "c", "d"]
    journal = open_journal(tmp_path, is_resumed=True)
    assert list(journal.kept) == ["a"]
    assert not (tmp_path / "e.partial").exists()
    journal.leave()


def test_an_output_that_was_noted_and_did_not_get_its_name_is_not_complete(tmp_path):
    (tmp_path / "a").write_text("old data of another size")
    journal = open_journal(tmp_path)
    (tmp_path / "a.partial").write_text("data")
    journal.add(OutputEntry(0, "a", "ckpt", 4, ()))
    kill(journal)
    assert read_journal(journal_path(tmp_path)).kept(tmp_path, {}) == {}
    journal = open_journal(tmp_path, is_resumed=True)
    assert not journal.kept
    assert not (tmp_path / "a.partial").exists()
    journal.leave()


def test_a_journal_cut_at_any_byte_proves_the_lines_before(tmp_path):
    killed(tmp_path, "a", "b")
    data = journal_path(tmp_path).read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    for size in range(len(data) + 1):
        journal_path(tmp_path).write_bytes(data[:size])
        found = read_journal(journal_path(tmp_path))
        lines = sum(end <= size for end in ends)
        assert (found is None) == (lines == 0)
        if found is not None:
            assert list(found.complete) == ["a", "b"][: lines // 3]
            assert list(found.kept(tmp_path, {})) == ["a", "b"][: (lines - 1) // 3]
            assert found.end == max(end for end in ends if end <= size)


@pytest.mark.parametrize("reader", [read_journal, ManifestFile.read])
def test_of_a_file_that_is_none_no_more_is_read_than_a_line_may_have(tmp_path, reader, monkeypatch):
    path = tmp_path / "ckpttool.json"
    for text in (b"{", b"{\n"):
        path.write_bytes(text)
        os.truncate(path, 1 << 40)  # a hole: to read all of it would take a TiB
        monkeypatch.setattr("ckpttool.transaction.manifest.MAX_LINE_BYTES", 1000)
        with pytest.raises(FormatError, match=r"ckpttool\.json: .*(1000 bytes|no JSON|as it was)"):
            reader(path)


def test_a_resumed_journal_goes_on_behind_the_last_whole_line(tmp_path):
    killed(tmp_path, "a")
    with journal_path(tmp_path).open("ab") as file:
        file.write(b'{"complete": {"path": "tor')
    journal = open_journal(tmp_path, is_resumed=True)
    add(journal, "b", 1)
    journal.finish()
    assert [out.path for out in ManifestFile.read(tmp_path / "ckpttool.json").outputs()] == [
        "a",
        "b",
    ]


def test_an_output_that_was_written_again_is_listed_once(tmp_path):
    killed(tmp_path, "a", "b")
    (tmp_path / "a").unlink()
    journal = open_journal(tmp_path, is_resumed=True)
    with pytest.raises(VerifyError, match="is not what the same run wrote there before"):
        add(journal, "a", 0, "longer data")
    add(journal, "a")
    journal.finish()
    found = list(ManifestFile.read(tmp_path / "ckpttool.json").outputs())
    assert [(out.path, out.nbytes) for out in found] == [("a", 4), ("b", 4)]


def test_what_is_begun_is_told_on_disk_before_it_is_made(tmp_path, monkeypatch):
    journal, real, synced = open_journal(tmp_path), os.fsync, []

    def sync(fd):
        synced.append(os.pread(fd, 1 << 20, 0).count(b"begun"))
        real(fd)

    monkeypatch.setattr(os, "fsync", sync)
    journal.begin(str(tmp_path / "a"), str(tmp_path / "b"))
    monkeypatch.undo()
    assert synced == [2]
    journal.leave()


def test_a_journal_begun_anew_forgets_and_removes_what_was_half_written(tmp_path):
    killed(tmp_path, "a", begun=["b"])
    (tmp_path / "b.partial.0123456789abcdef").write_text("of a worker")
    (tmp_path / "other.partial").write_text("of somebody else")
    journal = open_journal(tmp_path)
    assert files_below(tmp_path) == ["a", JOURNAL, "other.partial"]
    assert read_journal(journal_path(tmp_path)).complete == {}
    (tmp_path / "a").unlink()
    journal.leave()
    open_journal(tmp_path).leave()
    assert not journal_path(tmp_path).exists()


def test_what_a_run_left_is_known_to_the_next_that_does_not_end_either(tmp_path):
    killed(tmp_path, "a", begun=["b"])
    for is_resumed in (False, True):
        open_journal(tmp_path, is_resumed).leave()
        found = read_journal(journal_path(tmp_path))
        assert found.untouched(tmp_path, {}) == {"a": stamp_at(tmp_path / "a")}
        assert found.kept(tmp_path, {}) == {}
    journal = open_journal(tmp_path)
    add(journal, "a", 0, "anew")
    journal.leave()
    assert list(read_journal(journal_path(tmp_path)).kept(tmp_path, {})) == ["a"]
    os.utime(tmp_path / "a", ns=(1, 1))
    assert read_journal(journal_path(tmp_path)).untouched(tmp_path, {}) == {}


@pytest.mark.parametrize("part", [None, 1])
def test_outputs_of_a_killed_run_that_were_touched_stay_marked(tmp_path, part):
    """Else what a second run that ends early leaves, a mixture, would pass for a whole set."""
    killed(tmp_path, "a", part=part)
    os.utime(tmp_path / "a", ns=(1, 1))
    for _ in range(2):
        open_journal(tmp_path).leave()
        assert read_journal(journal_path(tmp_path)).untouched(tmp_path, {}) == {}
    (tmp_path / "a").unlink()
    open_journal(tmp_path).leave()
    assert not journal_path(tmp_path).exists()


@pytest.mark.parametrize("words", ["pwrite", "ftruncate"])
@pytest.mark.parametrize("part", [None, 1])
def test_at_no_moment_is_what_a_killed_run_left_unmarked(tmp_path, monkeypatch, words, part):
    killed(tmp_path, "a", "b", part=part)
    real = getattr(os, words)
    said = []

    def look(*given, **named):
        said.append(find_unfinished_run(tmp_path))
        answer = real(*given, **named)
        said.append(find_unfinished_run(tmp_path))
        return answer

    monkeypatch.setattr(os, words, look)
    journal = open_journal(tmp_path)
    monkeypatch.undo()
    journal.leave()
    assert None not in said
    assert said


def test_what_is_proven_otherwise_is_kept_and_known_from_then_on(tmp_path):
    killed(tmp_path, "a", "b")
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("data")  # of the same size, at another time
    proven = {name: stamp_at(tmp_path / name) for name in ("a", "b", "c")}
    (tmp_path / "b").write_text("date")  # after it was proven
    kill(journal := Journal(place_of(tmp_path), True, proven))
    assert list(journal.kept) == ["a"]  # c is none of its outputs
    assert list(read_journal(journal_path(tmp_path)).kept(tmp_path, {})) == ["a"]


def test_an_output_is_known_by_its_change_even_if_its_time_was_set_back(tmp_path):
    killed(tmp_path, "a")
    before = (tmp_path / "a").stat()
    (tmp_path / "a").write_text("date")
    os.utime(tmp_path / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert read_journal(journal_path(tmp_path)).untouched(tmp_path, {}) == {}


def test_what_another_run_is_writing_is_not_removed(tmp_path):
    killed(tmp_path, begun=["b"])
    with (tmp_path / "b.partial").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        open_journal(tmp_path).leave()
    assert (tmp_path / "b.partial").exists()


def test_a_journal_removes_nothing_that_a_link_leads_to(tmp_path):
    out, other = tmp_path / "out", tmp_path / "other"
    for folder in (out, other):
        folder.mkdir()
    (out / "rank_0").symlink_to("../other")
    (out / "rank_1").mkdir()
    (out / "same").symlink_to("rank_1")
    killed(out, begun=["rank_0/a", "same/b"])
    (other / "a.partial.0123456789abcdef").touch()
    open_journal(out).leave()
    assert files_below(other) == ["a.partial", "a.partial.0123456789abcdef"]
    assert files_below(out / "rank_1") == []


def test_two_runs_do_not_write_one_set_and_the_second_names_the_first(tmp_path):
    journal = open_journal(tmp_path)
    words = rf"ckpttool\.json: another run is writing it \(process {os.getpid()} on "
    for part in (None, 1):
        with pytest.raises(PlanError, match=words):
            open_journal(tmp_path, part=part)
    assert read_journal(journal_path(tmp_path)).provenance == ORIGIN
    journal.leave()
    open_journal(tmp_path).leave()


def test_parts_write_side_by_side_and_no_whole_run_with_them(tmp_path):
    first, second = open_journal(tmp_path, part=1), open_journal(tmp_path, part=2)
    with pytest.raises(PlanError, match=r"part-1-of-2\.json: another run is writing it"):
        open_journal(tmp_path, part=1)
    first.leave()
    with pytest.raises(PlanError, match=r"ckpttool\.json: another run .* \(with --part"):
        open_journal(tmp_path)
    second.leave()
    assert files_below(tmp_path) == []
    open_journal(tmp_path).leave()


def test_parts_of_two_plans_do_not_write_side_by_side(tmp_path):
    """One would replace what the other has replaced, and its record tells of."""
    first = open_journal(tmp_path, part=1)
    place = replace(place_of(tmp_path, part=2), provenance=replace(ORIGIN, plan="other"))
    words = rf"part-1-of-2\.json\.journal: a part of another plan .* \(process {os.getpid()} on "
    with pytest.raises(PlanError, match=f"{words}.*: other options were given.*; wait until"):
        Journal(place, is_resumed=False)
    assert not journal_of_part(tmp_path, 2).exists()
    kill(first)
    Journal(place, is_resumed=False).leave()  # of a run that is none any more nothing is minded
    assert journal_of_part(tmp_path, 1).exists()


def test_a_part_waits_for_one_that_has_not_said_yet_of_what_plan_it_is(tmp_path, monkeypatch):
    killed(tmp_path, "a", part=1)
    place = replace(place_of(tmp_path, part=1), provenance=replace(ORIGIN, plan="other"))
    starting = acquire_lock(journal_of_part(tmp_path, 1))
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        os.close(starting)
        Journal(place, is_resumed=False)

    monkeypatch.setattr("ckpttool.transaction.journal.time.sleep", pause)
    Journal(replace(place, record=place_of(tmp_path, part=2).record), is_resumed=False).leave()
    assert len(pauses) == 1


def test_a_run_that_ends_early_leaves_its_journal_if_something_is_complete(tmp_path):
    journal = open_journal(tmp_path)
    journal.begin(str(tmp_path / "a"))
    journal.leave()
    assert not list(tmp_path.iterdir())
    journal = open_journal(tmp_path)
    add(journal, "a")
    journal.leave()
    assert list(read_journal(journal_path(tmp_path)).kept(tmp_path, {})) == ["a"]


def test_the_manifest_lists_outputs_by_rank_and_has_no_times(tmp_path):
    journal = open_journal(tmp_path)
    add(journal, "b", 1)
    add(journal, "a", 0)
    journal.finish()
    assert files_below(tmp_path, manifests=True) == ["a", "b", "ckpttool.json"]
    document = json.loads((tmp_path / "ckpttool.json").read_text())
    *lines, _ = (tmp_path / "ckpttool.json").read_bytes().splitlines(keepends=True)
    assert document.pop("sha256") == sha256(b"".join(lines)).hexdigest()
    assert document == {
        "schema": 1,
        "ckpttool": "1.0",
        "plan": "plan",
        "step": "2_10",
        "inputs": [{"path": "src/a.ckpt", "nbytes": 10}, {"path": "src/b.ckpt", "nbytes": 20}],
        "strategies": [{"path": "s.ckpt", "nbytes": 7, "sha256": "12"}],
        "outputs": [
            {
                "rank": rank,
                "path": name,
                "format": "ckpt",
                "nbytes": 4,
                "tensors": [{"name": "w\n", "dtype": "Int8", "shape": [4], "sha256": ["ab"]}],
            }
            for rank, name in enumerate("ab")
        ],
    }


def test_a_manifest_goes_with_the_first_output_that_is_replaced_and_not_before(tmp_path):
    (tmp_path / "ckpttool.json").write_text("old")
    record = part_record_path(tmp_path / "ckpttool.json", 1, 2)
    record.write_text("old")
    journal = open_journal(tmp_path)
    journal.begin(str(tmp_path / "a"))
    assert (tmp_path / "ckpttool.json").exists()
    assert record.exists()
    add(journal, "a")
    assert not (tmp_path / "ckpttool.json").exists()
    assert not record.exists()
    journal.leave()


def test_a_whole_run_takes_over_what_killed_parts_left(tmp_path):
    killed(tmp_path, "a", begun=["b"], part=1)
    killed(tmp_path, begun=["c"], part=2)
    journal = open_journal(tmp_path)
    assert files_below(tmp_path) == ["a", JOURNAL]
    journal.leave()


def test_a_whole_run_removes_records_that_killed_parts_have_half_written(tmp_path):
    (tmp_path / ".ckpttool-part-1-of-3.json.partial").write_text('{"schema"')
    journal = open_journal(tmp_path)
    assert files_below(tmp_path) == [JOURNAL]
    journal.leave()


def test_a_part_takes_over_what_a_killed_whole_run_left(tmp_path):
    killed(tmp_path, "a", begun=["b"])
    journal = open_journal(tmp_path, part=1)
    assert journal_path(tmp_path).read_bytes() == b""
    journal.finish()
    assert not journal_path(tmp_path).exists()
    (left,) = tmp_path.glob(".*.journal")
    assert list(read_journal(left).untouched(tmp_path, {})) == ["a"]
    open_journal(tmp_path, part=2).leave()
    assert list(read_journal(left).untouched(tmp_path, {})) == ["a"]
    open_journal(tmp_path).leave()
    assert not left.exists()


@pytest.mark.parametrize(
    "text",
    [
        "no json\n",
        "[]\n",
        "{}\n",
        '{"run": 1}\n',
        '{"run": []}\n',
        "HEAD" + '{"begun": "../x"}\n',
        "HEAD" + '{"begun": "/etc/x"}\n',
        "HEAD" + '{"complete": [{"path": "a", "rank": "1"}]}\n',
        "HEAD" + '{"complete": []}\n',
        "HEAD" + '{"placed": "a", "nbytes": 1, "mtime_ns": 1, "ctime_ns": 1}\n',
        "HEAD" + '{"placed": "../a", "nbytes": 1, "mtime_ns": 1, "ctime_ns": 1, "inode": 1}\n',
    ],
)
def test_another_file_of_that_name_is_not_touched(tmp_path, text):
    head = json.dumps({"by": "x", "run": [ORIGIN.head_with_times()]}) + "\n"
    text = "".join(map(seal_line, text.replace("HEAD", head).splitlines()))
    journal_path(tmp_path).write_text(text)
    with pytest.raises(FormatError, match="not a journal of ckpttool"):
        read_journal(journal_path(tmp_path))
    with pytest.raises(FormatError, match="not a journal of ckpttool"):
        open_journal(tmp_path)
    assert journal_path(tmp_path).read_text() == text


@pytest.mark.slow
def test_no_byte_of_a_journal_is_changed_unnoticed(tmp_path):
    killed(tmp_path, "a", "b", begun=["c"])
    data = journal_path(tmp_path).read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    for at in range(len(data)):
        for bits in (1, 0x20):
            changed = data[:at] + bytes([data[at] ^ bits]) + data[at + 1 :]
            journal_path(tmp_path).write_bytes(changed)
            if at < last - 1:
                with pytest.raises(FormatError, match=r"line is not as it was written\); move it"):
                    read_journal(journal_path(tmp_path))
                continue
            with suppress(FormatError):  # as what a power loss leaves of it
                found = read_journal(journal_path(tmp_path))
                assert found.end <= last
                assert "c" not in found.begun


def test_no_journal_is_no_unfinished_run(tmp_path):
    assert read_journal(journal_path(tmp_path)) is None


CHANGES = [
    ({"version": "2.0"}, "ckpttool 1.0 wrote that, this is 2.0"),
    ({"inputs": (InputFile("src/a.ckpt", 11, 5, 5), INPUTS[1])}, "had 10 bytes, has 11"),
    ({"inputs": (InputFile("src/a.ckpt", 10, 7, 7), INPUTS[1])}, "was written to since"),
    ({"inputs": (InputFile("src/a.ckpt", 10, 5, 7), INPUTS[1])}, "was written to since"),
    ({"inputs": INPUTS[:1]}, "src/b.ckpt: was an input, and is none any more"),
    ({"inputs": (*INPUTS, InputFile("c", 1, 1, 1))}, "c: was not an input"),
    ({"strategies": (StrategyFile("s.ckpt", 7, "13"),)}, "s.ckpt: the strategy has changed"),
    ({"strategies": ()}, "s.ckpt: the strategy was given, and is not any more"),
    ({"strategies": (*ORIGIN.strategies, StrategyFile("t", 1, "1"))}, "t: the strategy was not"),
    ({"plan": "other"}, "other options"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_has_changed_is_named(change, words):
    assert not list(differences(ORIGIN, ORIGIN))
    (found,) = differences(replace(ORIGIN, **change), ORIGIN)
    assert words in found


def test_what_is_told_of_options_does_not_make_another_run(tmp_path):
    asked = replace(ORIGIN, options=(("format", "--format ckpt"), ("crc", "--crc")))
    assert asked == ORIGIN
    assert asked.head() == ORIGIN.head()
    assert not list(differences(asked, ORIGIN))
    Journal(replace(place_of(tmp_path), provenance=asked), is_resumed=False)._append("")
    assert read_journal(journal_path(tmp_path)).provenance.options == asked.options
    (found,) = differences(replace(asked, plan="other"), asked)
    assert found == (
        "other options were given: what decides the contents, such as --unlisted, "
        "--not-in-target or --optimizer-shard"
    )
    (found,) = differences(replace(asked, plan="other", options=(("crc", "no --crc"),)), asked)
    assert found == "other options were given: no --crc in place of --crc"


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_has_changed_is_refused_and_the_journal_stays(tmp_path, change, words):
    killed(tmp_path, "a")
    before = journal_path(tmp_path).read_bytes()
    place = replace(place_of(tmp_path), provenance=replace(ORIGIN, **change))
    with pytest.raises(PlanError, match=words):
        Journal(place, is_resumed=True)
    assert journal_path(tmp_path).read_bytes() == before
    assert (tmp_path / "a").exists()


def test_units_are_cuts_that_do_not_depend_on_options():
    meta = TensorMeta("w", "Float64", (3, 5 << 17))
    assert [unit.shape for unit in units(meta)] == [(1, 5 << 17)] * 3
    assert [unit.shape for unit in units(TensorMeta("s", "Int8", ()))] == [()]
    assert not list(units(TensorMeta("e", "Int8", (0, 3))))
    assert not list(units(TensorMeta("t", "str", (), "text")))
