"""In which order a run puts things on disk: after a power loss nothing speaks of what is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpttool.execution import execute as execute_module
from ckpttool.transaction.states import REPLACED
from tests.support.commands import run_well
from tests.support.executors import CASE, FORMATS, reshard_words
from tests.support.manifests import LOG, MANIFEST, PLAN, RECORD, STAMPS


@pytest.fixture
def events(monkeypatch):
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
    at = 0
    for one in wanted:
        assert one in events[at:], f"{one} not behind {events[:at][-1:]}"
        at = events.index(one, at) + 1
    return True


def first_output(events):
    names = (i for i, (what, path) in enumerate(events) if what == "rename")
    return next(i for i in names if not events[i][1].endswith((".json", ".stamps")))


@pytest.mark.parametrize("output_format", FORMATS)
def test_contents_then_log_then_name_then_folder_and_the_manifest_last(
    tmp_path, events, output_format
):
    out = tmp_path / "new" / "out"
    run_well(*reshard_words(out, output_format), "-j", "2")
    names = [path for what, path in events if what == "rename"]
    plan, *outputs, stamps, manifest = names
    assert (plan, stamps, manifest) == (f"{out}/{PLAN}", f"{out}/{STAMPS}", f"{out}/{MANIFEST}")
    assert len(outputs) == 4
    log = f"{out}/{LOG}"
    for name in outputs:
        folder = str(Path(name).parent)
        at = events.index(("rename", name))
        fills = [i for i, event in enumerate(events) if event == ("fill", f"{name}.partial")]
        before = events[max(fills) : at]
        assert in_order(before, ("sync", f"{name}.partial"), ("sync", log))
        assert [event for event in before if event[0] != "fill"][-1] == ("sync", log)
        behind = [event for event in events[at:] if event[0] != "fill"]  # of other threads
        assert behind[1] == ("sync", folder)
        assert in_order(events[:at], ("mkdir", folder), ("sync", str(out)))
    assert in_order(events, ("mkdir", str(out)), ("sync", str(tmp_path)), ("sync", str(out.parent)))
    assert events[-9:] == [
        ("sync", f"{stamps}.partial"),
        ("rename", stamps),
        ("sync", f"{out}/{RECORD}"),
        ("sync", f"{manifest}.partial"),
        ("rename", manifest),
        ("sync", str(out)),
        ("unlink", plan),
        ("unlink", log),
        ("sync", f"{out}/{RECORD}"),
    ]


@pytest.mark.parametrize("parts", [1, 2])
def test_finalize_removes_the_logs_when_the_manifest_is_there_for_good(tmp_path, events, parts):
    for number in range(1, parts + 1):
        events.clear()
        run_well(*reshard_words(tmp_path, "ckpt"), "--part", f"{number}/{parts}")
        assert [event for event in events if event[0] != "fill"][-1] == (
            "sync",
            f"{tmp_path}/{RECORD}/{number}-of-{parts}.log",
        )
    events.clear()
    run_well("finalize", tmp_path)
    assert events == [
        ("sync", f"{tmp_path}/{STAMPS}.partial"),
        ("rename", f"{tmp_path}/{STAMPS}"),
        ("sync", f"{tmp_path}/{RECORD}"),
        ("sync", f"{tmp_path}/{MANIFEST}.partial"),
        ("rename", f"{tmp_path}/{MANIFEST}"),
        ("sync", str(tmp_path)),
        *(
            ("unlink", f"{tmp_path}/{RECORD}/{number}-of-{parts}.log")
            for number in range(1, parts + 1)
        ),
        ("unlink", f"{tmp_path}/{PLAN}"),
        ("sync", f"{tmp_path}/{RECORD}"),
    ]


def test_an_old_manifest_is_gone_for_good_before_the_first_output_is_replaced(tmp_path, events):
    run_well(*reshard_words(tmp_path, "ckpt"))
    events.clear()
    run_well(*reshard_words(tmp_path, "ckpt"), "--overwrite")
    record, before = f"{tmp_path}/{RECORD}", events[: first_output(events)]
    [aside] = [of for of in before if of[0] == "rename" and f"{RECORD}/{REPLACED}" in of[1]][:1]
    plan = ("rename", f"{tmp_path}/{PLAN}")
    assert in_order(before, plan, aside, ("sync", record), ("sync", str(tmp_path)))
    assert in_order(before, plan, aside, ("rename", aside[1].replace(".json", ".stamps")))
    assert ("unlink", aside[1]) in events[events.index(("rename", f"{tmp_path}/{MANIFEST}")) :]


def test_old_indexes_are_gone_for_good_before_the_first_file_is_replaced(tmp_path, events):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "--max-shard-size", "10KB"]
    run_well(*words, "-o", tmp_path / "out")
    events.clear()
    run_well(*words, "-o", tmp_path / "out", "--overwrite")
    renames = [path for what, path in events if what == "rename"]
    first = first_output(events)
    indexes = [f"{tmp_path}/out/{n}.json" for n in ("param_name_map", "model.safetensors.index")]
    for index in indexes:
        assert in_order(events[:first], ("unlink", index), ("sync", f"{tmp_path}/out"))
    assert sorted(renames[-3:-1]) == sorted(indexes)
    assert renames[-1] == f"{tmp_path}/out/{MANIFEST}"


def test_plan_and_log_are_on_disk_before_the_first_output_is_begun(tmp_path, events):
    out = tmp_path / "out"
    run_well(*reshard_words(out, "ckpt"), "-j", "1")
    before = events[: next(i for i, event in enumerate(events) if event[0] == "fill")]
    record, plan = f"{out}/{RECORD}", f"{out}/{PLAN}"
    assert in_order(before, ("mkdir", record), ("sync", str(out)))
    assert in_order(before, ("sync", f"{plan}.partial"), ("rename", plan), ("sync", record))
    assert in_order(before, ("rename", plan), ("sync", f"{out}/{LOG}"), ("sync", record))
