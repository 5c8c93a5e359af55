"""``--resume``: what an interrupted run has left complete is kept, and nothing else is believed."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
import sys
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest

from ckpttool.discovery.scan import scan
from ckpttool.execution import execute as execute_module
from ckpttool.execution.copy import fill
from ckpttool.formats import read_index
from ckpttool.storage.files import write_document
from ckpttool.transaction import record as record_module
from tests.support.commands import files_below, message, run, run_well
from tests.support.executors import (
    CASE,
    contents,
    everything_in,
    finish,
    ordered_words,
    run_with_signal,
    start,
    with_options,
)
from tests.support.manifests import LOG, MANIFEST, PLAN, RECORD, STAMPS, log_line, reseal
from tests.support.small_sets import SmallSet


def test_an_output_with_the_stamp_that_it_had_is_not_read(tmp_path, monkeypatch):
    run_well(*ordered_words(tmp_path))
    read = []
    look = "ckpttool.transaction.outputs.read_index"
    monkeypatch.setattr(look, lambda name: (read.append(name), read_index(name))[1])
    run_well(*ordered_words(tmp_path), "--resume")
    assert read == []
    touched = tmp_path / "rank_2" / "checkpoint_2.ckpt"
    os.utime(touched)
    assert "4 kept" in message(run_well(*ordered_words(tmp_path), "--resume"))
    assert set(read) == {str(touched)}


def test_a_signal_is_heard_while_what_is_kept_is_read(tmp_path):
    run_well(*ordered_words(tmp_path))
    before = everything_in(tmp_path)
    os.utime(tmp_path / "rank_0" / "checkpoint_0.ckpt")
    code = (  # one thread gets one signal, so the main thread does not wake by itself
        "import signal, sys, threading\n"
        "from ckpttool.cli.main import main\n"
        "from ckpttool.concurrency import check_cancelled\n"
        "from ckpttool.storage import sampling\n"
        "turn = threading.Lock()\n"
        "def read_for_ever(tensor, spans, buffer_bytes):\n"
        "    if turn.acquire(blocking=False):\n"
        "        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)\n"
        "    while True:\n"
        "        check_cancelled()\n"
        "sampling._hash_spans = read_for_ever\n"
        "main(sys.argv[1:])"
    )
    words = [*ordered_words(tmp_path), "--resume"]
    code, errors = finish(start(sys.executable, "-c", code, *words))
    assert (code, "ended by SIGTERM" in errors) == (143, True)
    assert everything_in(tmp_path) == before


def test_a_source_with_a_time_before_1970_is_known_again(tmp_path, failing):
    source, out = tmp_path / "src", tmp_path / "out"
    shutil.copytree(CASE / "src", source)
    for path in source.rglob("*.ckpt"):
        os.utime(path, ns=(-(10**11), -(10**11)))
    failing("rank_2")
    assert run(*ordered_words(out, source=source)).exit_code == 6
    failing(None)
    run_well(*ordered_words(out, source=source), "--resume")
    assert "4 kept" in message(run_well(*ordered_words(out, source=source), "--resume"))


def test_what_a_changed_source_would_give_is_not_mixed_with_what_is_kept(tmp_path, failing):
    source, out = tmp_path / "src", tmp_path / "out"
    shutil.copytree(CASE / "src", source)
    words = ordered_words(out, source=source)
    run_well(*words)
    gone = out / "rank_0" / "checkpoint_0.ckpt"
    gone.unlink()
    before, times = everything_in(out), []
    for path in source.rglob("*.ckpt"):
        data = bytearray(path.read_bytes())
        for tensor in read_index(str(path)).tensors.values():
            data[tensor.extents[0].offset] ^= 1
        saved = path.stat()
        path.write_bytes(data)
        os.utime(path, ns=(saved.st_atime_ns, saved.st_mtime_ns))
        times.append((str(saved.st_ctime_ns), str(path.stat().st_ctime_ns)))
    result = run(*words, "--resume")
    assert result.exit_code == 5
    assert "files that differ: src/rank_0/checkpoint-2_10.ckpt, " in message(result)
    assert " and 5 more; before: `ckpttool " in message(result)
    assert everything_in(out) == before
    reseal(out / STAMPS, *times)
    for _ in range(2):
        result = run(*words, "--resume")
        assert result.exit_code == 7
        said = f"{gone}: differs from what the same command wrote before: a source file has chan"
        assert said in message(result)
        assert everything_in(out) == before
    for path in out.rglob("*.ckpt"):
        path.unlink()
    result = run_well(*words, "--resume")  # with nothing to keep
    assert "gone" not in message(result)
    assert everything_in(out).keys() == {*before, str(gone.relative_to(out))}
    assert all(everything_in(out)[name] != content for name, content in before.items())


@pytest.mark.parametrize("is_left", [True, False])
def test_a_checksum_that_was_changed_is_not_believed(tmp_path, failing, is_left):
    words = with_options(ordered_words(tmp_path / "out", "safetensors"), "--crc", "-j", "2")
    file = tmp_path / "out" / "rank_0" / "checkpoint_0.safetensors"
    failing("rank_3" if is_left else None, after=file)
    assert run(*words).exit_code == (6 if is_left else 0)
    failing(None)
    whole = file.read_bytes()
    start = whole.index(b'"crc_num":"') + len(b'"crc_num":"')
    for damaged in (
        whole[: start + 1] + bytes([whole[start + 1] ^ 1]) + whole[start + 2 :],
        whole.replace(b"crc_num", b"crb_num"),
    ):
        file.write_bytes(damaged)
        result = run(*words, "--resume")
        assert result.exit_code == 5
        assert str(file) in message(result)
    assert file.read_bytes() == damaged
    run_well(*words, "--overwrite")
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space"), "Try: free some space, then the same command"),
        (BrokenExecutor("gone"), "Try: fewer workers (-j 2), or less memory (--max-memory 1GiB)"),
    ],
)
def test_a_failure_before_anything_is_complete_says_what_to_do(tmp_path, monkeypatch, error, said):
    def fail(task):
        raise error

    monkeypatch.setattr(execute_module, "fill", fail)
    result = run(*ordered_words(tmp_path))
    assert result.exit_code == 6
    assert message(result).endswith(said)
    assert files_below(tmp_path) == []


def test_a_dry_run_counts_no_units_that_a_resumed_run_keeps(tmp_path):
    small = SmallSet(tmp_path)  # of four outputs of 400 bytes
    small.stop_inside()
    takes = json.loads(small.run_well("--resume", "-n", "--json").stdout)["dry_run"]
    assert takes["writes"]["data"] == 2 * 400 - 200
    assert takes["reads"]["data"]["nbytes"] == 2 * 400 - 200


def test_what_a_killed_run_of_another_set_left_half_written_is_called_so(tmp_path):
    part = tmp_path / "rank_1" / "checkpoint_1.h5"
    merge = ("merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", part)
    assert run_with_signal(signal.SIGKILL, *merge)[0] == -signal.SIGKILL
    result = run(*ordered_words(tmp_path, "hdf5"))
    said = f"{part}.partial: left half-written by a run that did not end "
    said += f"{part.parent}/.{part.name}.ckpttool/plan.json lists it Try: the command that writes "
    said += "it, with --resume, or --overwrite"
    assert said in message(result)
    assert result.exit_code == 5
    run_well(*merge, "--resume")
    run_well(*ordered_words(tmp_path, "hdf5"), "--overwrite")
    assert files_below(tmp_path) == [f"rank_{r}/checkpoint_{r}.h5" for r in range(4)]


def test_what_a_run_of_another_set_is_writing_is_not_begun(tmp_path, monkeypatch):
    part, seen = tmp_path / "rank_1" / "checkpoint_1.ckpt", []

    def look(task):
        seen.append(run(*ordered_words(tmp_path), "--overwrite"))
        return fill(task)

    monkeypatch.setattr(execute_module, "fill", look)
    run_well("merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", part)
    assert seen[0].exit_code == 9
    plan = part.parent / f".{part.name}.ckpttool" / "plan.json"
    said = f"{part}.partial: another run is writing it see {plan} Try: --wait 10m"
    assert said in message(seen[0])
    assert files_below(tmp_path) == ["rank_1/checkpoint_1.ckpt"]


def test_what_could_not_be_removed_is_known_to_the_next_run(tmp_path, failing, monkeypatch):
    real = Path.unlink

    def refuse(self, **more):
        if self.name.endswith(".partial"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        real(self, **more)

    failing("rank_0")
    monkeypatch.setattr(Path, "unlink", refuse)
    assert "could not be removed, which the next run does" in message(run(*ordered_words(tmp_path)))
    monkeypatch.setattr(Path, "unlink", real)
    failing(None)
    run_well(*ordered_words(tmp_path))
    assert len(files_below(tmp_path)) == 4


def told(note):
    return f"{note['text']} {note['facts']} Try: {note['hint']}"


@pytest.mark.parametrize("part", [(), ("--part", "1/2")])
def test_of_a_set_that_is_being_written_all_commands_say_to_wait(tmp_path, monkeypatch, part):
    out, seen = tmp_path / "out", []
    strategy = ("-s", CASE / "dst_strategy.ckpt")
    commands = {
        "inspect": (),
        "verify": strategy,
        "merge": (*strategy, "-o", tmp_path / "m.h5"),
        "reshard": (*strategy, "-d", CASE / "src_strategy.ckpt", "-o", tmp_path / "new"),
        "diff": (CASE / "src", *strategy, "--b-strategy", CASE / "src_strategy.ckpt"),
        "finalize": (),
    }

    def look(task):
        if not seen:
            seen.extend(message(run(name, out, *more)) for name, more in commands.items())
        return fill(task)

    monkeypatch.setattr(execute_module, "fill", look)
    run_well(*ordered_words(out), *part)
    assert len(seen) == len(commands)
    for printed in seen:
        assert "writing" in printed
        assert f"process {os.getpid()} on " in printed
        assert "wait until it ends" in printed or "Try: --wait 10m" in printed
        assert "--resume" not in printed


def test_a_file_of_a_run_that_did_not_end_well_is_no_checkpoint(tmp_path, monkeypatch):
    source = shutil.copytree(CASE / "src", tmp_path / "src")
    words = ["merge", source, "-s", CASE / "src_strategy.ckpt", "-o", tmp_path / "m[1].ckpt"]

    def touch(task):
        done = fill(task)
        os.utime(next((source / "rank_0").iterdir()), ns=(1, 1))
        return done

    with monkeypatch.context() as patch:
        patch.setattr(execute_module, "fill", touch)
        assert run(*words, "-j", "1").exit_code == 6
    file = tmp_path / "m[1].ckpt"
    said = f"{file}: a run of ckpttool did not end here files may be missing, or of another "
    said += "run Try: the command that writes it, with --resume"
    result = run_well("inspect", file)
    assert f"warning[unfinished]: {said}" in message(result)
    document = json.loads(run_well("inspect", file, "--json").stdout)
    unfinished, leftover = document["notes"]
    assert (unfinished["severity"], unfinished["code"]) == ("warning", "unfinished")
    assert told(unfinished) == said
    assert leftover["text"].startswith(f"{tmp_path}/.m[1].ckpt.ckpttool/whole.log: log of a run")
    command = shlex.join(["ckpttool", *map(str, words), "-j", "1"])
    assert leftover["facts"].startswith(f"`{command}`; complete: m[1].ckpt; process ")
    strategy = ["-d", CASE / "dst_strategy.ckpt"]
    for more in (["-o", tmp_path / "m.h5"], [*strategy, "-o", tmp_path / "out"]):
        result = run("merge" if len(more) == 2 else "split", file, *more)
        assert result.exit_code == 5
        assert said in message(result)
    result = run("diff", file, file)
    assert result.exit_code == 5
    assert said.replace(f"{file}", f"A ({file})") in message(result)
    result = run("verify", file, "--json")
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    assert said in map(told, findings)
    run_well(*words)
    run_well("merge", file, "-o", tmp_path / "m.h5")
    assert run("verify", file).exit_code == 0


NAME, PLACE = '"rank_0/checkpoint_0.ckpt"', "path: expected a path below the folder"
BEGIN = '{"process": 1, "host": "a", "time": "now", "plan": "p"}'
HALF = "not valid JSON: half of a character"
CHANGES = {  # readers of other damage are in test_log.py and test_parts.py
    "log: deep": (LOG, ('"a"', "[" * 60000), "not valid JSON: nested too deep"),
    "log: control": (LOG, ('"a"', '"\x1b[2J"'), "not valid JSON from line 1, column 25 on"),
    "log: no text": (LOG, ('"a"', '["\\u001b[2J"]'), "host: expected str, got"),
    "log: half": (LOG, ('"a"', '"\\ud800\\u0007"'), HALF),
    "plan: no text": (
        PLAN,
        ('"host": "', '"host": 1, "x": "\\u001b[2J'),
        "host: expected str, got",
    ),
    "plan: half": (PLAN, ('"step": "2_10"', '"step": "\\ud800\\u0007"'), HALF),
    "plan: a name of a half": (PLAN, (NAME, '"\\ud800"'), HALF),
    "plan: a name above": (PLAN, (NAME, '"../x"'), PLACE),
    "plan: a long name": (PLAN, (NAME, f'"{5000 * "a"}"'), PLACE),
}


def assert_is_unfinished(folder):
    for command in ("inspect", "verify"):
        result = run(command, folder)
        assert "did not end here" in message(result)
        assert "\x1b" not in result.stdout + result.stderr
        assert "\x07" not in result.stdout + result.stderr


@pytest.mark.parametrize(("name", "change", "reason"), CHANGES.values(), ids=CHANGES)
def test_a_record_of_strange_entries_does_no_harm(tmp_path, failing, name, change, reason):
    failing("rank_2")
    assert run(*ordered_words(tmp_path)).exit_code == 6
    failing(None)
    path, record = tmp_path / name, tmp_path / RECORD
    path.write_bytes(log_line(BEGIN.replace(*change))) if name == LOG else reseal(path, change)
    before = contents(tmp_path)
    assert_is_unfinished(tmp_path)
    for more in ([], ["--resume"]):
        result = run(*ordered_words(tmp_path), *more)
        assert result.exit_code == 5
        assert f"{path}: {reason}" in message(result)
    assert contents(tmp_path) == before
    shutil.copytree(record, tmp_path / "copy")
    run_well(*ordered_words(tmp_path), "--overwrite")
    assert len(files_below(tmp_path / "rank_0")) == 1
    for left in (tmp_path / "copy").iterdir():
        shutil.move(left, record / left.name)
    (tmp_path / "copy").rmdir()
    assert scan(str(tmp_path)).errors() == ()  # the manifest is there
    assert scan(str(tmp_path / "rank_0" / "checkpoint_0.ckpt")).errors() == ()


def test_numbered_files_of_a_run_that_did_not_end_are_no_checkpoint(tmp_path, monkeypatch):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "--max-shard-size", "10KB"]

    def refuse(path, content):
        if path.endswith(MANIFEST):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        write_document(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(record_module, "write_document", refuse)
        assert run(*words, "-o", tmp_path / "model").exit_code == 6
    for src in ("model", "model/model.safetensors.index.json"):
        result = run("merge", tmp_path / src, "-o", tmp_path / "m.ckpt")
        assert result.exit_code == 5
        said = f"{tmp_path / 'model'}: a run of ckpttool did not end here"
        assert said in message(result)
        assert f"warning[unfinished]: {said}" in message(run_well("inspect", tmp_path / src))


@pytest.mark.parametrize("part", [(), ("--part", "1/1")])
def test_what_a_killed_run_left_of_one_file_of_a_set_is_explained(tmp_path, part):
    run_with_signal(signal.SIGKILL, *ordered_words(tmp_path), *part)
    for rank in (0, 9):
        path = tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        result = run("verify", path)
        assert result.exit_code == 2
        said = f"'{path}' does not exist {tmp_path}: a run of ckpttool did not end here"
        assert said in message(result)
