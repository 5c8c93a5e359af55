"""Folders with a history: copied, moved, cut, half deleted, another user's, of another time.

Else what a user does to a folder in a year makes a command replace bytes that nothing else holds,
call a set whole that is not, or leave no way out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.commands import message, run
from tests.support.damage import cut_short, flip_byte, flip_unnoticed
from tests.support.permissions import ROOT_ONLY, give_away, run_without_rights
from tests.support.small_sets import (
    SmallSet,
    in_parts,
    in_record,
    to_output,
    to_outputs,
    without_record,
)

finished, stopped = SmallSet.run_well, SmallSet.stop
PAST, FUTURE = 1, 4_000_000_000  # seconds


# -------------------------------------------------------------------- what is left of a run


def half_in_parts(small):
    small.run_well("--part", "1/2")


# ---------------------------------------------------------------------- what is done to it


def finished_file(small):
    small.command = "file"
    small.run_well()


def copy_to(small, name, **how):
    small.out = Path(shutil.copytree(small.out, small.folder / name, **how))


def copied(small):
    copy_to(small, "copy", copy_function=shutil.copyfile)


def copied_with_times(small):
    copy_to(small, "copy", symlinks=True)


def hard_linked(small):
    copy_to(small, "copy", copy_function=os.link)


def copied_without_record(small):
    copy_to(small, "copy", ignore=shutil.ignore_patterns(".ckpttool"))


def copied_without_manifest(small):
    copy_to(small, "copy", ignore=shutil.ignore_patterns("ckpttool.json"))


def only_record_copied(small):
    copy_to(small, "copy", ignore=shutil.ignore_patterns("rank_*", "ckpttool.json"))


def only_manifest_copied(small):
    copy_to(small, "copy", ignore=shutil.ignore_patterns("rank_*", ".ckpttool"))


def copied_and_damaged(small):
    copied(small)
    flip_byte(small.outputs[0])


def moved(small):
    small.out = small.out.rename(small.folder / "moved")


def to_manifest(act):
    return lambda small: act(small.manifest)


def half_deleted(small):
    for path in small.outputs[:2]:
        path.unlink()


def set_times(seconds, *names):
    def act(small):
        for path in small.outputs if names == ("outputs",) else small.record.iterdir():
            os.utime(path, (seconds, seconds)) if path.exists() else None

    return act


def source_saved_again(small):
    small.source.write_bytes(small.source.read_bytes())


def backup_of_outputs_restored(small):
    shutil.copytree(small.out, small.folder / "backup")
    SmallSet(small.folder, "other").run_well("--overwrite")
    for path in (small.folder / "backup").glob("rank_*/*"):
        shutil.copy2(path, small.out / path.relative_to(small.folder / "backup"))


def backup_of_record_restored(small):
    shutil.copytree(small.out, small.folder / "backup")
    SmallSet(small.folder, "other").run_well("--overwrite")
    for path in (
        *(small.folder / "backup").glob("*.json"),
        *(small.folder / "backup").glob(".*/*"),
    ):
        shutil.copy2(path, small.out / path.relative_to(small.folder / "backup"))


def backup_restored(small):
    out, small.out = small.out, small.folder / "backup"
    other = SmallSet(small.folder, "other")
    other.out = small.out
    other.run_well()
    small.out = out
    shutil.copytree(other.out, out, dirs_exist_ok=True)


def finished_other(small):
    other = SmallSet(small.folder, "other")
    other.out = small.folder / "elsewhere"
    other.run_well()
    return other


def another_copied_over_it(small):
    other = finished_other(small)
    for path in (other.manifest, *other.outputs):
        shutil.copyfile(path, small.out / path.relative_to(other.out))


def manifest_of_another(small):
    shutil.copyfile(finished_other(small).manifest, small.manifest)


def changed_and_manifest_put_back(small):
    flip_byte(small.outputs[0])
    data = small.manifest.read_bytes()
    small.manifest.unlink()
    small.manifest.write_bytes(data)


def killed_before_a_rename(small):
    log = small.record / "whole.log"
    lines = log.read_bytes().splitlines(keepends=True)
    assert lines[-1].startswith(b'{"path": "rank_1/')
    log.write_bytes(b"".join(lines[:-1]))
    shutil.copyfile(finished_other(small).outputs[1], small.outputs[1])


def record_of_another(*names):
    """Return what replaces files of the record by those of another checkpoint's set."""

    def act(small):
        other = SmallSet(small.folder, "other")
        other.out = small.folder / "elsewhere"
        other.stop() if "plan.json" in names else other.run_well()
        for name in names:
            shutil.copy2(other.record / name, small.record / name)

    return act


def records_exchanged(small):
    out, small.out = small.out, small.folder / "elsewhere"
    small.run_well("--prefix", "x")
    other, small.out = small.record, out
    shutil.rmtree(small.record)
    other.rename(small.record)


def logs_beside_manifest(small):
    out, small.out = small.out, small.folder / "elsewhere"
    small.stop()
    other, small.out = small.record, out
    shutil.copytree(other, small.record, dirs_exist_ok=True)


def in_its_place(make):
    def act(path):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        make(path)

    return act


def link_to_folder(path):
    target = path.parent.parent / "somewhere"
    target.mkdir()
    path.symlink_to(target)


def to_record(make):
    return lambda small: in_its_place(make)(small.record)


def renamed(*ends, stem="b"):
    def act(small):
        for before, after in ends:
            (small.out / before).rename(small.out / after)
        small.stem = stem

    return act


FILE = ("m.ckpt", "b.ckpt")
LISTING = ("m.ckpt.ckpttool.json", "b.ckpt.ckpttool.json")
FOLDER = (".m.ckpt.ckpttool", ".b.ckpt.ckpttool")


def record_of_another_file(small):
    other = SmallSet(small.folder, "other", "file")
    other.stem = "b"
    other.run_well()
    shutil.rmtree(small.record)
    other.record.rename(small.record)


def zeros_behind(path):
    with path.open("ab") as file:
        file.write(bytes(4096))


def flip_in_the_middle(path):
    flip_byte(path, at=path.stat().st_size // 2)


# --------------------------------------------------------------- what is said, of each history


def nothing(small):
    pass


def remove(path):
    path.unlink(missing_ok=True)


class History(NamedTuple):
    """What is left, what is done to it, and what commands say: an exit code and words.

    A cell that is empty is as that of the finished or stopped set that nothing was done to.
    """

    left: Callable[[SmallSet], None]
    done: Callable[[SmallSet], None]
    inspect: str = ""
    verify: str = ""
    merge: str = ""
    finalize: str = ""
    rerun: str = ""
    resume: str = ""
    overwrite: str = "0"


UNTOUCHED = {
    finished: History(finished, nothing, "0", "0 files are whole", "0", "0 complete: 4 files",
                      "5 is already complete",
                      "0 4 kept, 0 written"),
    stopped: History(stopped, nothing, "0 did not end here", "1 did not end here",
                     "5 did not end here", "5 did not end here",
                     "0 written again Try: --resume keeps them", "0 2 kept, 2 written"),
    in_parts: History(in_parts, nothing, "0 ckpttool finalize", "1 ckpttool finalize",
                      "5 ckpttool finalize", "0 complete: 4 files",
                      "5 exist", "0 4 kept, 0 written"),
    half_in_parts: History(half_in_parts, nothing, "0 finalize", "1 finalize",
                           "5 finalize", "5 2 of 4 outputs", "5 exist", "0 2 kept, 2 written"),
    finished_file: History(finished_file, nothing, "0", "0 files are whole", "0",
                           "0 complete: 1 file", "5 is already complete",
                           "0 Kept "),
}  # fmt: skip

EXIST = "5 4 outputs exist already"
ANOTHER = "5 written by another run files that differ: + --overwrite"
ANOTHER_PREFIX = "5 written by another run before: + --prefix x + --overwrite"
OTHER_STAMPS = "5 stamps.json is of another set than + --overwrite"
NO_STAMPS = "5 its source files are not known no + stamps.json Try: --overwrite"
OTHER_BYTES = "1 : changed since it was written: 4 tensors w{0-3}; ranks 0-3; w0: expected SHA-256 "
DAMAGED = {"verify": "1 checkpoint_0", "finalize": "7 checkpoint_0", "rerun": "5 exist",
           "resume": "5 checkpoint_0"}  # fmt: skip
CHANGED = {**DAMAGED, "merge": "7 checkpoint_0 + --ignore-manifest"}
ANOTHER_SET = {"inspect": "5 --ignore-manifest", "merge": "5 --ignore-manifest"}
NO_MANIFEST = {"verify": "1 ckpttool.json", "finalize": "3 ckpttool.json", "rerun": EXIST,
               "resume": "5 ckpttool.json + --overwrite"}  # fmt: skip
NO_PLAN = {"rerun": "5 plan.json + --overwrite", "resume": "5 plan.json + --overwrite",
           "inspect": "0 plan.json", "verify": "1 plan.json", "merge": "5",
           "finalize": "3 plan.json + --overwrite"}  # fmt: skip
NO_LOG = {"rerun": "5 whole.log + --overwrite", "resume": "5 whole.log + --overwrite",
          "finalize": "3 whole.log + --overwrite"}  # fmt: skip


def in_the_way(name, **cells):
    refused = f"5 {name} + move it away"
    return {"rerun": refused, "resume": refused, "overwrite": refused, **cells}


HISTORIES = {
    "finished": History(finished, nothing),
    "copied with cp -r": History(finished, copied, rerun=EXIST),
    "copied with cp -a": History(finished, copied_with_times, rerun=EXIST),
    "copied with cp -al": History(finished, hard_linked, rerun=EXIST),
    "copied and damaged": History(finished, copied_and_damaged, **CHANGED),
    "copied without .ckpttool": History(
        finished, copied_without_record, rerun=NO_STAMPS, resume=NO_STAMPS
    ),
    "copied without ckpttool.json": History(
        finished, copied_without_manifest, finalize="5", rerun=EXIST, resume=EXIST
    ),
    "only .ckpttool copied": History(
        finished, only_record_copied, "5", "5", "5", "5", "0", "0"
    ),
    "only ckpttool.json copied": History(
        finished, only_manifest_copied, "5", "5", "5", "7 missing", "0", "0"
    ),
    "moved": History(finished, moved),
    "an output cut": History(
        finished, to_output(cut_short), inspect="3", merge="3", **DAMAGED
    ),
    "an output changed": History(finished, to_output(flip_byte), **CHANGED),
    "an output changed, its time put back": History(
        finished, to_output(flip_unnoticed), **CHANGED
    ),
    "half of the outputs deleted": History(
        finished, half_deleted, "5 some slices", "1 missing", "5", finalize="7 missing",
        rerun="5 2 outputs exist already", resume="0 2 kept, 2 written",
    ),
    "all outputs deleted": History(
        finished, to_outputs(remove), "5", "5", "5", "7 missing", "0", "0"
    ),
    "ckpttool.json deleted": History(
        finished, to_manifest(Path.unlink), finalize="5", rerun=EXIST, resume=EXIST
    ),
    "ckpttool.json cut": History(finished, to_manifest(cut_short), **NO_MANIFEST),
    "ckpttool.json changed": History(
        finished, to_manifest(lambda path: flip_byte(path, at=20)), **NO_MANIFEST
    ),
    "ckpttool.json a pipe": History(
        finished, to_manifest(in_its_place(os.mkfifo)), verify="0", finalize="3 a pipe or a device",
        **in_the_way("ckpttool.json is a device or a pipe"),
    ),
    ".ckpttool deleted": History(finished, without_record, rerun=NO_STAMPS, resume=NO_STAMPS),
    "stamps.json deleted": History(
        finished, in_record("stamps.json", Path.unlink), rerun=NO_STAMPS, resume=NO_STAMPS
    ),
    "stamps.json cut": History(
        finished, in_record("stamps.json", cut_short),
        rerun="5 stamps.json + --overwrite", resume="5 stamps.json + --overwrite",
    ),
    "stamps.json a folder": History(
        finished, in_record("stamps.json", in_its_place(Path.mkdir)), **in_the_way("stamps.json")
    ),
    "stamps.json a pipe": History(
        finished, in_record("stamps.json", in_its_place(os.mkfifo)), **in_the_way("stamps.json")
    ),
    "lock deleted": History(finished, in_record("lock", Path.unlink)),
    "outputs of the past": History(finished, set_times(PAST, "outputs"), rerun=EXIST),
    "outputs of the future": History(finished, set_times(FUTURE, "outputs"), rerun=EXIST),
    "record of the past": History(finished, set_times(PAST)),
    "record of the future": History(finished, set_times(FUTURE)),
    "source saved again": History(
        finished, source_saved_again, rerun=ANOTHER, resume=ANOTHER
    ),
    "outputs restored from a backup": History(
        finished, backup_of_outputs_restored, verify=OTHER_BYTES,
        finalize="7", rerun=ANOTHER, resume="5 --overwrite", **ANOTHER_SET,
    ),
    "record restored from a backup": History(
        finished, backup_of_record_restored, verify=OTHER_BYTES,
        finalize="7", rerun=EXIST, resume="5 --overwrite", **ANOTHER_SET,
    ),
    "another set restored over it": History(
        finished, backup_restored, rerun=ANOTHER, resume=ANOTHER
    ),
    "another set copied over it with cp -r": History(
        finished, another_copied_over_it, rerun=OTHER_STAMPS, resume=OTHER_STAMPS,
    ),
    "ckpttool.json of another checkpoint": History(
        finished, manifest_of_another, verify=OTHER_BYTES, finalize="7",
        rerun=OTHER_STAMPS, resume=OTHER_STAMPS, **ANOTHER_SET,
    ),
    "an output changed, ckpttool.json put back": History(
        finished, changed_and_manifest_put_back, **CHANGED
    ),
    "stamps.json of another checkpoint": History(
        finished, record_of_another("stamps.json"), rerun=ANOTHER, resume=ANOTHER
    ),
    "record of another run": History(
        finished, records_exchanged, rerun=ANOTHER_PREFIX, resume=ANOTHER_PREFIX
    ),
    "logs beside ckpttool.json": History(finished, logs_beside_manifest),
    ".ckpttool a file": History(finished, to_record(Path.touch), **in_the_way(".ckpttool")),
    ".ckpttool a link": History(finished, to_record(link_to_folder), **in_the_way(".ckpttool")),
    ".ckpttool a broken link": History(
        finished, to_record(lambda path: path.symlink_to("nowhere")), **in_the_way(".ckpttool")
    ),
    ".ckpttool a pipe": History(finished, to_record(os.mkfifo), **in_the_way(".ckpttool")),
    "stopped": History(stopped, nothing),
    "stopped, copied with cp -r": History(stopped, copied),
    "stopped, copied with cp -al": History(stopped, hard_linked),
    "stopped, moved": History(stopped, moved),
    "stopped, lock a folder": History(
        stopped, in_record("lock", in_its_place(Path.mkdir)),
        **in_the_way("lock", finalize="5 lock + move it away"),
    ),
    "stopped, lock a link": History(
        stopped, in_record("lock", in_its_place(link_to_folder)),
        **in_the_way("lock", finalize="5 lock + move it away"),
    ),
    "stopped, plan.json deleted": History(
        stopped, in_record("plan.json", Path.unlink),
    ),
    "stopped, .ckpttool deleted": History(
        stopped, without_record, "0", "1", "5", "5",
        "5 2 outputs exist already", "5 2 outputs exist already",
    ),
    "stopped, plan.json cut": History(stopped, in_record("plan.json", cut_short), **NO_PLAN),
    "stopped, plan.json changed": History(
        stopped, in_record("plan.json", flip_in_the_middle), **NO_PLAN
    ),
    "stopped, plan.json a folder": History(
        stopped, in_record("plan.json", in_its_place(Path.mkdir)),
        **{**NO_PLAN, **in_the_way("plan.json", finalize="5 plan.json + move it away")},
    ),
    "stopped, plan.json.partial a folder": History(
        stopped, in_record("plan.json.partial", in_its_place(Path.mkdir)),
        **in_the_way("plan.json.partial", finalize="5 plan.json.partial: in the way"),
    ),
    "stopped, stamps.json.partial a link": History(
        stopped, in_record("stamps.json.partial", in_its_place(link_to_folder)),
        **in_the_way("stamps.json.partial", finalize="5 stamps.json.partial: in the way"),
    ),
    "stopped, plan.json a pipe": History(
        stopped, in_record("plan.json", in_its_place(os.mkfifo)),
        **{**NO_PLAN, **in_the_way("plan.json", finalize="5 plan.json + move it away")},
    ),
    "stopped, whole.log cut": History(stopped, in_record("whole.log", cut_short)),
    "stopped, zeros behind whole.log": History(stopped, in_record("whole.log", zeros_behind)),
    "stopped, whole.log changed": History(
        stopped, in_record("whole.log", flip_in_the_middle), **NO_LOG
    ),
    "stopped, whole.log a folder": History(
        stopped, in_record("whole.log", in_its_place(Path.mkdir)),
        **in_the_way("whole.log", finalize="5 whole.log + move it away"),
    ),
    "stopped, whole.log a pipe": History(
        stopped, in_record("whole.log", in_its_place(os.mkfifo)),
        **in_the_way("whole.log", finalize="5 whole.log + move it away"),
    ),
    "stopped, whole.log deleted": History(
        stopped, in_record("whole.log", Path.unlink),
        rerun="5 2 outputs exist already", resume="5 2 outputs exist already",
    ),
    "stopped, an output changed": History(
        stopped, to_output(flip_byte), rerun="5 checkpoint_0", resume="5 checkpoint_0"
    ),
    "stopped, an output changed, its time put back": History(
        stopped, to_output(flip_unnoticed), rerun="5 checkpoint_0", resume="5 checkpoint_0"
    ),
    "stopped, an output cut": History(
        stopped, to_output(cut_short), merge="3", inspect="3", rerun="5 checkpoint_0",
        resume="5 checkpoint_0",
    ),
    "stopped, killed before a rename": History(
        stopped, killed_before_a_rename, rerun="5 checkpoint_1", resume="5 checkpoint_1"
    ),
    "stopped, outputs deleted": History(
        stopped, to_outputs(remove), "5 did not end here", rerun="0", resume="0"
    ),
    "stopped, outputs of the past": History(stopped, set_times(PAST, "outputs")),
    "stopped, record of the future": History(stopped, set_times(FUTURE)),
    "stopped, source saved again": History(
        stopped, source_saved_again, rerun="0", resume="5 files that differ:"
    ),
    "stopped, plan.json of another checkpoint": History(
        stopped, record_of_another("plan.json")
    ),
    "stopped, whole.log of another checkpoint": History(
        stopped, record_of_another("plan.json", "whole.log"),
        rerun="5 2 outputs exist already", resume="5 files that differ:",
    ),
    "parts": History(in_parts, nothing),
    "parts, copied with cp -r": History(in_parts, copied),
    "parts, an output changed": History(
        in_parts, to_output(flip_byte), finalize="7 checkpoint_0", rerun="5 exist",
        resume="5 checkpoint_0",
    ),
    "parts, a log deleted": History(
        in_parts, in_record("2-of-2.log", Path.unlink), finalize="5 2 of 4 outputs",
        rerun="5 exist", resume="5 exist",
    ),
    "parts, a log changed": History(
        in_parts, in_record("1-of-2.log", flip_in_the_middle), rerun="5 1-of-2.log + --overwrite",
        resume="5 1-of-2.log + --overwrite", finalize="3 1-of-2.log + --overwrite",
    ),
    "parts, plan.json changed": History(
        in_parts, in_record("plan.json", flip_in_the_middle), **NO_PLAN
    ),
    "parts, a log a pipe": History(
        in_parts, in_record("1-of-2.log", in_its_place(os.mkfifo)),
        **in_the_way("1-of-2.log", finalize="5 1-of-2.log + move it away"),
    ),
    "half of the parts": History(half_in_parts, nothing),
    "file": History(finished_file, nothing),
    "file copied with cp -r": History(finished_file, copied, rerun="5 exists already"),
    "file renamed": History(
        finished_file, renamed(FILE), finalize="5", rerun="5 b.ckpt exists already",
        resume="5 b.ckpt exists already",
    ),
    "file renamed, written again": History(
        finished_file, renamed(FILE, stem="m"), "2", "2", "2", "2", "0", "0"
    ),
    "file and manifest renamed": History(
        finished_file, renamed(FILE, LISTING), verify="1 m.ckpt",
        finalize="7 lists m.ckpt", rerun="5 exist", resume="5 --overwrite",
    ),
    "file, manifest and record renamed": History(
        finished_file, renamed(FILE, LISTING, FOLDER), verify="1 m.ckpt",
        finalize="7 lists m.ckpt", rerun="5 exist", resume="5 --overwrite",
    ),
    "file with the record of another": History(
        finished_file, record_of_another_file, rerun=ANOTHER, resume=ANOTHER
    ),
}  # fmt: skip

COMMANDS = ("inspect", "verify", "merge", "finalize", "rerun", "resume", "overwrite")


def words_of(command, small):
    """Return the command line of a column of the table."""
    strategy = [] if small.command == "file" else ["-s", small.strategy]
    return {
        "inspect": ["inspect", small.target],
        "verify": ["verify", small.target, *strategy, "--deep"],
        "merge": ["merge", small.target, *strategy, "-o", f"{small.folder}.h5"],
        "finalize": ["finalize", small.target],
        "rerun": small.words(),
        "resume": small.words("--resume"),
        "overwrite": small.words("--overwrite"),
    }[command]


def everything_below(folder):
    paths = sorted(folder.rglob("*"))
    return {path: path.read_bytes() if path.is_file() else path.lstat().st_mode for path in paths}


def elsewhere(files, small):
    return {
        path: data
        for path, data in files.items()
        if small.out not in path.parents and path.suffix != ".log" and path.is_file()
    }


def foreign(small):
    wanted = small.wanted()
    return {number: data for number, data in small.read().items() if data != wanted[number]}


def broken_rules(command, small, exit_code, before, foreign_before, had_manifest):
    """Yield what a command must not do to a folder, whatever its history is."""
    after = everything_below(small.folder)
    if command in ("inspect", "verify", "merge"):
        if after != before:
            yield "changes what it reads"
        return
    if elsewhere(after, small) != elsewhere(before, small):
        yield "changes another set"
    if command != "overwrite" and not foreign_before.items() <= foreign(small).items():
        yield "replaces bytes that nothing else holds"
    if exit_code:
        if small.manifest.exists() != had_manifest:
            yield "fails and leaves another manifest"
        return
    if run(*words_of("verify", small)).exit_code:
        yield "calls a set whole that verify does not"
    if command != "finalize" and small.read() != small.wanted():
        yield "ends well with other outputs"
    if command != "finalize" and "Kept " not in message(small.run("--resume")):
        yield "does not keep what it has written"


@pytest.mark.parametrize("name", HISTORIES)
def test_a_folder_with_a_history_is_neither_believed_nor_lost(tmp_path, quick, name):
    history, small, before, problems = HISTORIES[name], None, {}, []
    for number, command in enumerate(COMMANDS):
        if small is None or everything_below(small.folder) != before:
            small = SmallSet(tmp_path / f"made-for-{number}")
            history.left(small)
            history.done(small)
            foreign_before, had_manifest = foreign(small), small.manifest.exists()
            before = everything_below(small.folder)
        result = run(*words_of(command, small))
        expected = getattr(history, command) or getattr(UNTOUCHED[history.left], command)
        code, _, words = expected.partition(" ")
        printed = message(result)
        missing = [part for part in words.split(" + ") if part not in printed]
        if str(result.exit_code) != code or missing:
            problems.append(f"{command}: expected {expected}, found {result.exit_code} {printed}")
        rules = broken_rules(command, small, result.exit_code, before, foreign_before, had_manifest)
        problems += (f"{command}: {rule}" for rule in rules)
    assert not problems, "\n".join(problems)


@pytest.fixture
def small(tmp_path):
    return SmallSet(tmp_path / "small")


def test_copies_of_a_stopped_set_that_share_their_files_do_not_spoil_each_other(small):
    small.stop()
    out, _ = small.out, hard_linked(small)
    small.run_well("--resume")
    copy, small.out = small.out, out
    small.run_well("--resume")
    assert small.read() == small.wanted()
    small.out = copy
    assert "4 kept, 0 written" in message(small.run_well("--resume"))


def all_of_somebody(small):
    for path in (small.out, *small.out.rglob("*")):
        give_away(path, 0o755 if path.is_dir() else 0o644)


def record_of_somebody(small):
    give_away(small.record, 0o700)


def files_of_somebody(small):
    for path in small.record.iterdir():
        give_away(path, 0o600)


OTHERS = {
    "all": (all_of_somebody, 5, 5),
    "the folder of the record": (record_of_somebody, 5, 5),
    "the files of the record": (files_of_somebody, 5, 5),
}


@ROOT_ONLY
@pytest.mark.interpreter
@pytest.mark.parametrize("name", OTHERS)
def test_a_finished_set_of_another_user_is_read_and_stays(small, name):
    give, resume, overwrite = OTHERS[name]
    small.run_well()
    before = small.read()
    give(small)
    expected = {"inspect": 0, "verify": 0, "finalize": 0, "resume": resume}
    for command, code in {**expected, "overwrite": overwrite}.items():
        words = [str(word) for word in words_of(command, small)]
        done = run_without_rights(" ".join(words), small.folder)
        assert done.returncode == code, (command, done.stderr)
        assert "Traceback" not in done.stderr
        assert done.returncode == 0 or str(small.out) in done.stderr
        assert small.read() == before
