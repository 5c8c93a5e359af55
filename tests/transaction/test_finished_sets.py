"""What is called finished: by which proof a set is kept, and what a run looks at before its end."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ckpttool
from ckpttool.transaction import resume
from ckpttool.transaction.sealed_files import ManifestFile
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


def test_overwriting_a_set_parses_no_tensor_of_its_manifest(tmp_path, monkeypatch):
    small = SmallSet(tmp_path)
    small.run_well()
    monkeypatch.delattr(ManifestFile, "outputs")
    small.run_well("--overwrite")
    assert small.read() == small.wanted()


# ---------------------------------------------------------------------------- files of a TiB


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
    advice = f"{partial} is a complete output and has the name of the temporary file Try: rename it"
    assert advice in message(result)
    other = SmallSet(tmp_path, "other", command)
    assert other.run(*more).exit_code == 5
    assert partial.read_bytes() == before


def test_a_plan_that_is_given_up_removes_no_complete_output(tmp_path):
    small = SmallSet(tmp_path)
    small.stop(output=3)
    partial = Path(f"{small.outputs[3]}.partial")
    Path(f"{partial}.{MANIFEST}").write_text("of a complete output")
    before = partial.read_bytes()
    command = ("merge", small.source, "-o", small.out, "--max-shard-size", "900B")
    run_well(*command, "--format", "ckpt", "--overwrite")
    assert partial.read_bytes() == before


def begins_after_the_look(small, monkeypatch, other):
    """Let another run begin when this one has seen that nobody writes; it is writing then."""
    look = resume.read_destination

    def look_once(record):
        destination = look(record)
        if not other.is_this():
            monkeypatch.setattr(resume, "read_destination", look)
            other.start()
        return destination

    other.patch(monkeypatch)
    monkeypatch.setattr(resume, "read_destination", look_once)


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
    assert {diagnostic.code for diagnostic in caught.value.diagnostics} == {"busy"}
    assert "another part" not in str(caught.value)  # there are none
    assert other.error is None
