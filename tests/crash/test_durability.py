"""In which order a run puts things on disk: after a power loss nothing speaks of what is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpttool.execution import execute as execute_module
from tests.support.commands import run_well
from tests.support.executors import CASE, FORMATS, reshard_words
from tests.support.manifests import MANIFEST


@pytest.fixture
def events(monkeypatch):
    """What was done to names and files, in order: (what, path)."""
    seen = []
    fsync, replace, unlink, mkdir = os.fsync, Path.replace, Path.unlink, Path.mkdir
    fill = execute_module.fill

    def note(what, path):
        seen.append((what, str(path)))

    def filled(task):
        done = fill(task)
        note("fill", task.units[0].tensor.file.path)
        return done

    def synced(fd):
        fsync(fd)
        note("sync", Path(f"/proc/self/fd/{fd}").readlink())

    def replaced(self, target):
        note("rename", target)
        return replace(self, target)

    def unlinked(self, missing_ok=False):
        if self.exists():
            note("unlink", self)
        return unlink(self, missing_ok)

    def made(self, *arguments, **more):
        if not self.exists():
            note("mkdir", self)
        return mkdir(self, *arguments, **more)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(execute_module, "fill", filled)
    for name, fake in (("replace", replaced), ("unlink", unlinked), ("mkdir", made)):
        monkeypatch.setattr(Path, name, fake)
    return seen


def in_order(events, *wanted):
    """Whether these are among the events one after the other, each the first behind the last."""
    at = 0
    for one in wanted:
        assert one in events[at:], f"{one} not behind {events[:at][-1:]}"
        at = events.index(one, at) + 1
    return True


@pytest.mark.parametrize("output_format", FORMATS)
def test_contents_then_journal_then_name_then_folder_and_the_manifest_last(
    tmp_path, events, output_format
):
    out = tmp_path / "new" / "out"
    run_well(*reshard_words(out, output_format), "-j", "2")
    names = [path for what, path in events if what == "rename"]
    assert len(names) == 5
    journal = f"{out}/{MANIFEST}.journal"
    for name in names[:-1]:
        folder = str(Path(name).parent)
        at = events.index(("rename", name))
        fills = [i for i, event in enumerate(events) if event == ("fill", f"{name}.partial")]
        before = events[max(fills) : at]
        assert in_order(before, ("sync", f"{name}.partial"), ("sync", journal))
        assert [event for event in before if event[0] != "fill"][-1] == ("sync", journal)
        behind = [event for event in events[at:] if event[0] != "fill"]  # of other threads
        assert behind[1] == ("sync", folder)
        assert in_order(events[:at], ("mkdir", folder), ("sync", str(out)))
    assert in_order(events, ("mkdir", str(out)), ("sync", str(tmp_path)), ("sync", str(out.parent)))
    assert events[-5:] == [
        ("sync", f"{out}/{MANIFEST}.partial"),
        ("rename", f"{out}/{MANIFEST}"),
        ("sync", str(out)),
        ("unlink", journal),
        ("sync", str(out)),
    ]


def test_an_old_manifest_is_gone_for_good_before_the_first_output_is_replaced(tmp_path, events):
    run_well(*reshard_words(tmp_path, "ckpt"))
    events.clear()
    run_well(*reshard_words(tmp_path, "ckpt"), "--overwrite")
    first = next(i for i, event in enumerate(events) if event[0] == "rename")
    assert in_order(events[:first], ("unlink", f"{tmp_path}/{MANIFEST}"), ("sync", str(tmp_path)))


def test_old_indexes_are_gone_for_good_before_the_first_file_is_replaced(tmp_path, events):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "--max-shard-size", "10KB"]
    run_well(*words, "-o", tmp_path / "out")
    events.clear()
    run_well(*words, "-o", tmp_path / "out", "--overwrite")
    renames = [path for what, path in events if what == "rename"]
    first = events.index(("rename", renames[0]))
    indexes = [f"{tmp_path}/out/{n}.json" for n in ("param_name_map", "model.safetensors.index")]
    for index in indexes:
        assert in_order(events[:first], ("unlink", index), ("sync", f"{tmp_path}/out"))
    assert sorted(renames[-3:-1]) == sorted(indexes)
    assert renames[-1] == f"{tmp_path}/out/{MANIFEST}"


def test_a_journal_is_on_disk_before_the_first_output_is_begun(tmp_path, events):
    run_well(*reshard_words(tmp_path / "out", "ckpt"), "-j", "1")
    first = next(i for i, event in enumerate(events) if event[0] == "fill")
    assert ("sync", f"{tmp_path}/out/{MANIFEST}.journal") in events[:first]
    assert ("sync", f"{tmp_path}/out") in events[:first]
