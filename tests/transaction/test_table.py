"""The table of states in the documentation, cell by cell, so that it and the code cannot part."""

from __future__ import annotations

import errno
import json
import os
import re
from functools import partial
from inspect import signature
from pathlib import Path
from zlib import crc32

import h5py
import pytest

from ckpttool.execution import execute as execute_module
from ckpttool.transaction import outputs
from tests.support.commands import message, run
from tests.support.damage import cut_short, flip_byte
from tests.support.manifests import reseal
from tests.support.permissions import ROOT_ONLY, give_away, run_without_rights
from tests.support.small_sets import (
    SmallSet,
    filled_outputs,
    in_parts,
    in_record,
    then,
    to_output,
    to_outputs,
    while_filling,
    without_record,
)

PAGE = Path(__file__).parents[2] / "docs/development/states.md"

pytestmark = pytest.mark.usefixtures("quick")


# --------------------------------------------------- how each row of the table comes to be


OUTPUTS_OF = {"1/1": (0, 1, 2), "1/2": (0, 2), "2/2": (1, 3)}  # the last is in work


def running(*more, name="a"):
    """Return what calls a function while a run is writing an output."""

    def act(small, command):
        other = SmallSet(small.folder, name, small.command)
        *first, output = OUTPUTS_OF[more[1] if more else "1/1"]

        def wait_and_act():
            other.wait_for(*first)
            return command()

        with while_filling(other.outputs[output], wait_and_act) as seen:
            other.run_well(*more)
        assert more or other.read() == other.wanted()
        return seen[0]

    return act


def running_removed(small, command):
    """Remove the record of a run that is writing, and call a function."""

    def remove_and_act():
        small.wait_for(0)
        small.wait_for(1)
        without_record(small)
        return command()

    with while_filling(small.outputs[2], remove_and_act) as seen:
        result = small.run()
    assert result.exit_code == 6
    assert "its record was removed or replaced nothing proves the outputs" in message(result)
    return seen[0]


def running_over(small, command):
    small.run_well()
    with while_filling(small.outputs[0], command) as seen:
        small.run_well("--overwrite")
    assert small.read() == small.wanted()
    return seen[0]


def fail(task):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def failed_at_once(small):
    small.out.mkdir()  # else the run would remove it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute_module, "fill", fail)
        assert small.run().exit_code == 6
    assert not small.record.exists()


def torn(log):
    """Leave an entry without its stamp, and a line of which only the beginning came to the disk."""
    lines = log.read_bytes().splitlines(keepends=True)
    assert lines[-1].startswith(b'{"path"')
    log.write_bytes(b"".join(lines[:-1]) + b'{"rank": 2, "path": "rank_2/ch')


def of_the_version_before(small):
    """Leave a plan and a log as they were before the record had a version."""
    reseal(small.record / "plan.json", ('"record": 2, ', ""))
    log = small.record / "whole.log"
    begin, *lines = log.read_bytes().splitlines(keepends=True)
    line = begin.rpartition(b" ")[0].replace(b'"record": 2, ', b"")
    log.write_bytes(b"".join([line, b" %08x\n" % crc32(line), *lines]))


def killed_over_finished(small):
    SmallSet(small.folder, "other").run_well()
    small.stop("--overwrite")
    assert not small.manifest.exists()


def older(small):
    """Write a set with other names."""
    small.run_well("--prefix", "older_")


def killed_as(prefix, *more):
    """Return what stops a run that gives other names."""

    def act(small):
        one = SmallSet(small.folder)
        one.prefix = prefix
        one.stop(*more)

    return act


def killed_before_removal(small):
    """Leave both sets, as a crash does when the manifest of the new one is written."""
    older(small)
    manifest, left = small.manifest.read_bytes(), contents(small)
    small.run_well("--overwrite")
    for path, data in left.items():
        path.write_bytes(data) if path.name.startswith("older_") else None
    digest = json.loads(manifest)["sha256"]
    (small.record / f"replaced-{digest}.json").write_bytes(manifest)


def killed_at_the_end(small):
    """Leave logs and plan beside the manifest, as a crash does before they are removed."""
    in_parts(small)
    left = {path: path.read_bytes() for path in small.record.iterdir()}
    assert run("finalize", small.out).exit_code == 0
    for path, data in left.items():
        path.write_bytes(data)


def closed(small):
    """Give the record to another user, who keeps it closed."""
    give_away(small.record, 0o700)


def written_anew(path):
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)


def remove(path):
    path.unlink(missing_ok=True)


def other(act):
    """Return what does something with the set of another checkpoint."""
    return lambda small: act(SmallSet(small.folder, "other"))


def part(words):
    """Return what stops a run of a part, or lets it end."""
    number, end = words.split()
    how = SmallSet.stop if end == "killed" else SmallSet.run_well
    return lambda small: how(small, "--part", number)


finished, killed = SmallSet.run_well, SmallSet.stop
STATES = {
    "empty folder": lambda small: small.out.mkdir(),
    "a run failed, nothing complete": failed_at_once,
    "outputs, no record": then(finished, lambda small: small.manifest.unlink(), without_record),
    "half-written file, no record": then(killed, without_record, to_outputs(remove)),
    "a run was killed, `.ckpttool` removed": then(killed, without_record),
    "`.ckpttool` removed while a run writes": running_removed,
    "a whole run": running(),
    "part 1/2": running("--part", "1/2"),
    "part 2/2": running("--part", "2/2"),
    "part 1/1 of the same plan": running("--part", "1/1"),
    "part 2/2 of another plan": running("--part", "2/2", name="other"),
    "killed, half-written file left": killed,
    "killed, nothing complete": lambda small: small.stop(output=0),
    "killed inside an output": SmallSet.stop_inside,
    "killed, entry without stamp, last line torn": then(killed, in_record("whole.log", torn)),
    "a record of the version before": then(killed, of_the_version_before),
    "killed, another plan": other(killed),
    "an output changed since": then(killed, to_output(flip_byte)),
    "killed with `--overwrite`, 2 old outputs left": killed_over_finished,
    "killed with `--overwrite` and another `--name`": then(
        older, lambda small: small.stop("--overwrite")
    ),
    "all parts done, with `--overwrite` and another `--name`": then(
        older, lambda small: in_parts(small, "--overwrite")
    ),
    "killed with another `--name`": killed_as("older_"),
    "killed with `--overwrite` and a third `--name`": then(
        older, killed_as("older_k", "--overwrite")
    ),
    "killed before the older set was removed": killed_before_removal,
    "this command, another `--name`": older,
    "`plan.json` damaged": then(killed, in_record("plan.json", cut_short)),
    "`whole.log` damaged": then(killed, in_record("whole.log", partial(flip_byte, at=100))),
    "part 1/2 killed": part("1/2 killed"),
    "part 2/2 done": part("2/2 done"),
    "part 2/2 done, 1/2 killed": then(part("2/2 done"), part("1/2 killed")),
    "all parts done": in_parts,
    "all parts done, an output changed": then(in_parts, to_output(flip_byte)),
    "all parts done, another plan": other(in_parts),
    "this command": finished,
    "killed, plan and logs left": killed_at_the_end,
    "a run with `--overwrite` has begun": running_over,
    "copied with `cp -r`": then(finished, to_outputs(written_anew)),
    "`.ckpttool` removed": then(finished, without_record),
    "an output gone": then(finished, to_output(remove)),
    "an output changed": then(finished, to_output(flip_byte)),
    "all outputs gone": then(finished, to_outputs(remove)),
    "another command": other(finished),
    "a finished set": then(finished, closed),
    "parts that are done": then(in_parts, closed),
    "a run that was killed": then(killed, closed),
}


# ------------------------------------------------------------------------ the table itself


def read_tables():
    """Return the cells by state and command, and the words of messages by name."""
    cells, words, columns = {}, {}, []
    for line in PAGE.read_text().splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or row[0].startswith("---"):
            columns = columns if line.startswith("|") else []
        elif not columns:
            columns = [cell.strip("`") for cell in row[1:]]
        elif len(columns) > 1:
            cells |= {(row[0], name): cell for name, cell in zip(columns, row[1:], strict=True)}
        elif columns == ["words of the message"]:
            words[row[0]] = row[1]
    return cells, words


CELLS, WORDS = read_tables()


CLOSED = {state for state, column in CELLS if column == "merge"}
WRITING = ("plain", "--resume", "--overwrite", "--part 1/2", "--part 1/2 --overwrite")


def words_of(small, column):
    if column in ("finalize", "inspect"):
        return [column, small.out]
    if column == "verify":
        return ["verify", small.out, "-s", small.strategy, "--deep"]
    if column == "merge":
        return ["merge", small.out, "-s", small.strategy, "-o", small.folder / "merged.h5"]
    return small.words(*([] if column == "plain" else column.split()))


def contents(small):
    return {path: path.read_bytes() for path in small.out.rglob("*") if path.is_file()}


def test_every_state_of_the_table_is_built():
    assert {state for state, _ in CELLS} == set(STATES)
    assert WORDS.keys() == {cell[2:] for cell in CELLS.values() if "writes" not in cell}


SOME = {"a whole run", "killed, half-written file left", "part 2/2 done", "all parts done",
        "this command", "an output gone"}  # fmt: skip
CASES = [
    *((*cell, "split") for cell in CELLS if cell[0] not in CLOSED),
    *((*cell, other) for cell in CELLS if cell[0] in SOME and cell[1] in WRITING
      for other in ("numbered", "reshard")),
]  # fmt: skip


@pytest.mark.parametrize(("state", "column", "kind"), CASES)
def test_a_command_does_in_a_state_what_the_table_says(tmp_path, state, column, kind):
    small = SmallSet(tmp_path, command=kind)
    code, _, what = CELLS[state, column].partition(" ")

    def command():
        before = contents(small)
        with filled_outputs() as filled:
            result = run(*words_of(small, column))
        return result, len(filled), contents(small) == before

    build = STATES[state]
    is_running = "command" in signature(build).parameters
    if is_running:
        result, filled, is_unchanged = build(small, command)
    else:
        build(small)
        result, filled, is_unchanged = command()
    printed = message(result)
    assert str(result.exit_code) == code, printed
    numbers = re.search(r"(goes on in (\d), )?writes (\d)", what)
    goes_on, written = (int(number or 0) for number in numbers.groups()[1:]) if numbers else (0, 0)
    written += goes_on
    assert filled == written
    assert (f"goes on inside {goes_on} half-written output" in printed) == (goes_on > 0)
    if "keeps" in what:
        assert f", {what[6]} kept, {written} written, " in printed
    elif "writes" not in what:
        assert re.search(".*".join(map(re.escape, WORDS[what].split(" ... "))), printed), printed
        assert is_unchanged or is_running or (code == "0" and column == "finalize")
    if is_running and "writing" in what:
        assert not re.search("left over|half-written", printed)  # or somebody removes it
    if code == "0" and not is_running and column in ("plain", "--resume", "--overwrite"):
        assert small.read() == small.wanted()
        assert not [*small.out.rglob("older_*")]


def change(path):
    with h5py.File(path, "r+") as file:
        file["w3"][0] ^= 1  # another tensor tells it from the other ranks


OLDER_LEFT = {  # what happens to older_0, with what more it is replaced, what is left of 4
    "nothing": (lambda path: None, (), []),
    "times": (os.utime, (), [0]),  # its contents are not compared here
    "an element": (change, (), [0]),
    "ranks": (lambda path: None, ("--rank", "0,1"), [0, 1, 2, 3]),
}


@pytest.mark.parametrize("case", OLDER_LEFT)
@pytest.mark.parametrize("compared", [True, False])
def test_an_older_output_goes_if_it_is_as_a_record_lists_it(tmp_path, case, compared, monkeypatch):
    act, more, left = OLDER_LEFT[case]
    small = SmallSet(tmp_path, output_format="hdf5")
    older(small)
    act(small.out / "rank_0/older_0.h5")
    if not compared:
        monkeypatch.setattr(outputs, "_has_contents", lambda *given: False)
    left = [] if compared and case == "times" else left
    printed = message(small.run_well("--overwrite", *more))
    assert {*small.out.rglob("older_*")} == {small.out / f"rank_{n}/older_{n}.h5" for n in left}
    assert all((f"older_{n}.h5" in printed.partition("warning[stale]")[2]) == (n in left)
               for n in (0, 1))  # fmt: skip


KEPT = {"killed with `--overwrite`, 2 old outputs left": 2, "an output changed since": 1,
        "all parts done, an output changed": 3, "an output changed": 3,
        "killed, another plan": 0, "another command": 0, "`plan.json` damaged": 2}  # fmt: skip


@pytest.mark.parametrize("state", KEPT)
def test_resume_and_overwrite_keep_what_is_as_it_was_recorded(tmp_path, state):
    small = SmallSet(tmp_path)
    STATES[state](small)
    with filled_outputs() as filled:
        small.run_well("--resume", "--overwrite")
    assert len(filled) == 4 - KEPT[state]
    assert small.read() == small.wanted()


@ROOT_ONLY
@pytest.mark.interpreter
@pytest.mark.parametrize(("state", "column"), [cell for cell in CELLS if cell[0] in CLOSED])
def test_a_command_does_what_the_table_says_with_a_record_that_is_closed(tmp_path, state, column):
    small = SmallSet(tmp_path)
    STATES[state](small)
    before = contents(small)
    done = run_without_rights(" ".join(map(str, words_of(small, column))), tmp_path)
    printed = " ".join((done.stdout + done.stderr).split())
    code, _, what = CELLS[state, column].partition(" ")
    assert str(done.returncode) == code, printed
    assert printed.count("Permission denied") <= 1 or state != "a finished set", printed
    assert re.search(".*".join(map(re.escape, WORDS[what].split(" ... "))), printed), printed
    assert contents(small) == before


def test_without_deep_verify_looks_at_sizes_and_headers(tmp_path):
    small = SmallSet(tmp_path)
    STATES["an output changed"](small)
    words = ["verify", small.out, "-s", small.strategy]
    assert "the headers and samples are right" in message(run(*words))
    assert run(*words, "--deep").exit_code == 1
    cut_short(small.outputs[0])
    assert run(*words).exit_code == 1


@pytest.mark.parametrize("state", ["part 1/2 killed", "killed, half-written file left"])
def test_a_resumed_part_keeps_what_any_log_lists(tmp_path, state):
    small = SmallSet(tmp_path)
    STATES[state](small)
    for number, kept in ((1, 1), (2, 0 if "part" in state else 1)):
        with filled_outputs() as filled:
            small.run_well("--part", f"{number}/2", "--resume")
        assert len(filled) == 2 - kept


@pytest.mark.parametrize("touch", [None, os.utime])
@pytest.mark.parametrize(
    ("state", "more", "kept"),
    [
        ("killed, half-written file left", (), 2),
        ("killed, half-written file left", ("--overwrite",), 2),
        ("killed, half-written file left", ("--part", "1/2"), 2),
        ("part 1/2 killed", (), 1),
        ("part 1/2 killed", ("--part", "1/2"), 1),
        ("all parts done", ("--overwrite",), 4),
        ("this command", ("--overwrite",), 4),
    ],
)
def test_a_run_that_ends_before_it_replaces_anything_costs_nothing(
    tmp_path, state, more, kept, touch
):
    small = SmallSet(tmp_path)
    STATES[state](small)
    touch(small.outputs[0]) if touch else None
    with while_filling(small.outputs[0], lambda: fail(None)):
        assert small.run(*more).exit_code == 6
    with filled_outputs() as filled:
        small.run_well("--resume")
    assert len(filled) == 4 - kept
    assert small.read() == small.wanted()
