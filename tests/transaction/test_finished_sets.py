"""What is called finished: by which proof a set is kept, and what a run looks at before its end."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckpttool
from ckpttool.transaction import resume
from ckpttool.transaction import sealed_files as manifest
from tests.support.commands import message, run, run_well
from tests.support.damage import cut_short, flip_byte, flip_unnoticed
from tests.support.manifests import MANIFEST
from tests.support.small_sets import Other, SmallSet, execute_split, filled_outputs, while_filling

pytestmark = pytest.mark.usefixtures("quick")


def replace_by_another(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    other.replace(path)


DAMAGES = [flip_byte, flip_unnoticed, cut_short, Path.unlink, replace_by_another]
TOUCHES = [os.utime, lambda path: path.chmod(0o600), lambda path: os.utime(path, ns=(1, 1))]


@pytest.mark.parametrize("part", [(), ("--part", "1/1")])
@pytest.mark.parametrize("damage", DAMAGES)
def test_an_output_that_is_damaged_before_the_end_of_the_run_is_not_listed(tmp_path, damage, part):
    small = SmallSet(tmp_path)
    first, last = small.outputs[0], small.outputs[3]
    with while_filling(last, lambda: (small.wait_for(0), damage(first))) as seen:
        result = small.run(*part)
    assert len(seen) == 1
    assert result.exit_code == (0 if part else 6), message(result)
    assert part or str(first) in message(result)
    assert not small.manifest.exists()
    result = run("finalize", small.out)
    assert result.exit_code == (7 if part else 5), message(result)
    assert not part or "rank_0/checkpoint_0.ckpt" in message(result)
    assert not small.manifest.exists()
    left = first.read_bytes() if first.exists() else None
    result = small.run("--resume")
    assert result.exit_code == (5 if left else 0), message(result)
    assert left is None or first.read_bytes() == left
    small.run_well("--overwrite") if left else None
    assert small.read() == small.wanted()


@pytest.mark.parametrize("part", [(), ("--part", "1/1")])
@pytest.mark.parametrize("touch", TOUCHES)
def test_an_output_that_is_only_touched_before_the_end_of_the_run_is_good(tmp_path, touch, part):
    small = SmallSet(tmp_path)
    first, last = small.outputs[0], small.outputs[3]
    with while_filling(last, lambda: (small.wait_for(0), touch(first))) as seen:
        small.run_well(*part)
    assert len(seen) == 1
    assert run("finalize", small.out).exit_code == 0
    assert small.read() == small.wanted()
    with filled_outputs() as filled:
        small.run_well("--resume")
    assert filled == []


FORMATS = ("ckpt", "hdf5", "safetensors")


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("command", ["split", "numbered", "file"])
def test_a_complete_set_that_was_copied_is_kept(tmp_path, command, output_format):
    small = SmallSet(tmp_path, "a", command, output_format)
    small.run_well()
    shutil.copytree(small.out, tmp_path / "copy", copy_function=shutil.copyfile)
    small.out = tmp_path / "copy"
    before = small.read()
    with filled_outputs() as filled:
        for _ in range(2):
            small.run_well("--resume")
    assert filled == []
    assert small.read() == before
    flip_unnoticed(small.outputs[0])
    result = small.run("--resume")
    assert result.exit_code == 5, message(result)
    assert str(small.outputs[0]) in message(result)


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_stopped_set_that_was_copied_is_gone_on_from(tmp_path, output_format):
    small = SmallSet(tmp_path, "a", "numbered", output_format)
    small.stop()
    shutil.copytree(small.out, tmp_path / "copy", copy_function=shutil.copyfile)
    small.out = tmp_path / "copy"
    with filled_outputs() as filled:
        small.run_well("--resume")
    assert filled == [path.name for path in small.outputs[2:]]
    assert small.read() == small.wanted()


# ---------------------------------------------------------------------------- files of a TiB

TIB = 1 << 40
LIMIT = 100_000  # bytes of the longest line that is ours, in place of 100 MB, which take seconds
READ_BYTES = 20_000_000  # some lines, and the program itself


def bytes_read() -> int:
    words = Path("/proc/self/io").read_text().split()
    return int(words[words.index("rchar:") + 1])


@contextmanager
def little_is_read():
    """Fail if much is read; end with an error before much memory or time is spent."""

    def end(number, frame):
        raise TimeoutError("a file of ours is read without a limit")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before, handler = bytes_read(), signal.signal(signal.SIGALRM, end)
    resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 30), limits[1]))
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGALRM, handler)
    assert bytes_read() - before < READ_BYTES


def finish(small: SmallSet) -> None:
    small.run_well()


def stop(small: SmallSet) -> None:
    small.stop()


def stop_part(small: SmallSet) -> None:
    small.run_well("--part", "2/2")
    small.stop("--part", "1/2")


def end_parts(small: SmallSet) -> None:
    for part in ("1/2", "2/2"):
        small.run_well("--part", part)


NAMED = {"inspect": 0, "verify": 1, "finalize": 3, "resume": 5}
SPARSE = [  # the state, the file, and the exit code of each command that has to name it
    (finish, MANIFEST, {"verify": 1, "finalize": 3, "resume": 5}),
    (finish, ".ckpttool/stamps.json", {"inspect": 0, "verify": 0, "resume": 5}),
    (stop, ".ckpttool/plan.json", NAMED),
    (stop, ".ckpttool/whole.log", NAMED),
    (stop_part, ".ckpttool/1-of-2.log", NAMED),
    (end_parts, ".ckpttool/1-of-2.log", NAMED),
    (end_parts, ".ckpttool/plan.json", NAMED),
]


@pytest.mark.parametrize("is_emptied", [True, False])
@pytest.mark.parametrize(("leave", "name", "codes"), SPARSE)
def test_a_sparse_file_of_ours_is_named_and_not_read(
    tmp_path, monkeypatch, leave, name, codes, is_emptied
):
    monkeypatch.setattr(manifest, "MAX_LINE_BYTES", LIMIT)
    small = SmallSet(tmp_path)
    leave(small)
    before = small.read()
    path = small.out / name
    os.truncate(path, 0) if is_emptied else None
    os.truncate(path, TIB)
    commands = {
        "inspect": ["inspect", small.out],
        "verify": ["verify", small.out, "-s", small.strategy],
        "finalize": ["finalize", small.out],
        "resume": small.words("--resume"),
    }
    for command, words in commands.items():
        with little_is_read():
            result = run(*words)
        assert result.exit_code == codes.get(command, 0), (command, message(result))
        assert command not in codes or str(path) in message(result), (command, message(result))
    assert small.read() == before
    with little_is_read():
        small.run_well("--overwrite")
    assert small.read() == small.wanted()
    assert run("verify", small.out, "-s", small.strategy).exit_code == 0


@pytest.mark.parametrize("command", ["split", "numbered"])
def test_a_half_written_file_that_was_renamed_is_no_source(tmp_path, command):
    small = SmallSet(tmp_path, command=command)
    small.stop()
    complete, half = small.outputs[1], small.outputs[2]
    shutil.copy(complete, half)
    said = f"{half}: a run has not completed it {small.record / 'plan.json'} lists it, and no log "
    said += "there lists it as complete Try: the command that writes it, with --resume"
    verified = run("verify", half)
    assert verified.exit_code == 1
    assert f"error[unfinished]: {said}" in " ".join(message(verified).split())
    assert said in message(run("merge", half, "-o", tmp_path / "m.h5"))
    assert not (tmp_path / "m.h5").exists()
    assert f"warning[unfinished]: {said}" in message(run_well("inspect", half))
    assert run("verify", complete).exit_code == 0
    half.unlink()
    small.run_well("--resume")
    assert run("verify", half).exit_code == 0


def test_an_output_that_was_moved_and_linked_is_known_by_the_file(tmp_path):
    small, other = SmallSet(tmp_path), SmallSet(tmp_path, "b")
    small.stop()
    moved = tmp_path / "another disk"
    small.outputs[1].rename(moved)
    small.outputs[1].symlink_to(moved)
    assert "2 kept, 2 written" in message(small.run_well("--resume"))
    moved.write_bytes(other.wanted()[1])
    assert small.run("--resume").exit_code == 5
    assert run("finalize", small.out).exit_code == 7


def test_a_plan_that_was_put_back_makes_no_mixture(tmp_path):
    small, other = SmallSet(tmp_path), SmallSet(tmp_path, "b")
    small.stop(output=3)
    plan = (small.record / "plan.json").read_bytes()
    other.stop(output=2)
    (small.record / "plan.json").write_bytes(plan)
    small.run("--resume", "--overwrite")
    assert small.read() == small.wanted()


def test_a_command_of_another_plan_that_ends_at_once_costs_nothing(tmp_path):
    small, other = SmallSet(tmp_path), SmallSet(tmp_path, "b")
    small.stop(output=3)
    with filled_outputs(small.outputs[0]):
        assert other.run().exit_code == 6
    assert "3 kept, 1 written" in message(small.run_well("--resume"))
    assert small.read() == small.wanted()


def test_a_document_as_large_as_a_disk_is_not_read(tmp_path):
    small = SmallSet(tmp_path, command="numbered")
    small.stop()
    with (small.out / "param_name_map.json").open("wb") as file:
        file.truncate(1 << 40)
    assert small.run("--resume").exit_code == 5
    small.run_well("--resume", "--overwrite")


@pytest.mark.parametrize("more", [(), ("--resume",), ("--overwrite",), ("--resume", "--overwrite")])
@pytest.mark.parametrize(("command", "output"), [("file", 0), ("split", 2), ("numbered", 1)])
def test_a_complete_output_is_never_removed_as_half_written(tmp_path, command, output, more):
    small = SmallSet(tmp_path, command=command)
    small.stop(output=output)
    partial = Path(f"{small.outputs[output]}.partial")
    kept = tmp_path / "kept.ckpt"
    run_well("merge", small.source, "-o", kept)
    before = kept.read_bytes()
    kept.rename(partial)
    Path(f"{kept}.{MANIFEST}").rename(f"{partial}.{MANIFEST}")
    result = small.run(*more)
    assert result.exit_code == 5
    text = f"{partial} is a complete output and has the name of the temporary file Try: rename it"
    assert text in message(result)
    other = SmallSet(tmp_path, "other", command)
    assert other.run(*more).exit_code == 5
    assert partial.read_bytes() == before


def test_a_plan_that_is_given_up_removes_no_complete_output(tmp_path):
    small = SmallSet(tmp_path)
    small.stop(output=3)
    partial = Path(f"{small.outputs[3]}.partial")
    Path(f"{partial}.{MANIFEST}").write_text("of a complete output")
    before = partial.read_bytes()
    others = ("merge", small.source, "-o", small.out, "--max-shard-size", "900B")
    run_well(*others, "--format", "ckpt", "--overwrite")
    assert partial.read_bytes() == before


def begins_after_the_look(small, monkeypatch, other):
    """Let another run begin when this one has seen that nobody writes; it is writing then."""
    look = resume.look

    def look_once(record):
        found = look(record)
        if not other.is_this():
            monkeypatch.setattr(resume, "look", look)
            other.start()
        return found

    other.patch(monkeypatch)
    monkeypatch.setattr(resume, "look", look_once)


@pytest.mark.parametrize("is_left", [False, True])
@pytest.mark.parametrize("name", ["a", "other"])
def test_beside_a_run_that_has_just_begun_another_is_told_to_wait(
    tmp_path, monkeypatch, is_left, name
):
    small, other = SmallSet(tmp_path), Other(SmallSet(tmp_path, name))
    small.out.mkdir()
    if is_left:
        SmallSet(tmp_path, name).stop()
    begins_after_the_look(small, monkeypatch, other)
    try:
        with pytest.raises(ckpttool.PlanError, match="another run is writing it") as caught:
            execute_split(small)
    finally:
        other.end()
    assert {one.code for one in caught.value.diagnostics} == {"busy"}
    assert "another part" not in str(caught.value)  # there are none
    assert other.error is None


def test_a_run_that_has_just_ended_is_seen_by_the_same_command_again(tmp_path, monkeypatch):
    small, look = SmallSet(tmp_path), resume.look
    small.out.mkdir()

    def look_once(record):
        found = look(record)
        monkeypatch.setattr(resume, "look", look)
        small.run_well()
        return found

    monkeypatch.setattr(resume, "look", look_once)
    result = small.run("--resume")
    assert result.exit_code == 9
    assert "another run has written it since this one began Try: the same command" in message(
        result
    )
    assert "4 kept, 0 written" in message(small.run_well("--resume"))
