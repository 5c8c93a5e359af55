"""Files and folders that belong to another user, with a process that may not do what root may."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import pytest

from ckpttool.formats.local import describe_os_error
from tests.support.commands import files_below, mentions, run_well
from tests.support.permissions import ROOT_ONLY, SOMEBODY_ELSE, give_away, run_without_rights

GOLDEN = Path(__file__).parents[1] / "golden/tutorial_8_to_8_retrain"
RESHARD = "reshard src -s old.ckpt -d new.ckpt --format ckpt -o out"
MERGE = "merge src -s old.ckpt -o out/merged.ckpt"
DENIED = r"Permission denied \((src[^:]*: )?owner nobody, mode \d{3}; this user is root\)"


@pytest.fixture
def place(tmp_path):
    shutil.copytree(GOLDEN / "src", tmp_path / "src")
    shutil.copy(GOLDEN / "src_strategy.ckpt", tmp_path / "old.ckpt")
    shutil.copy(GOLDEN / "dst_strategy.ckpt", tmp_path / "new.ckpt")
    yield tmp_path
    for folder, names, _ in os.walk(tmp_path):
        for name in names:
            Path(folder, name).chmod(0o755)


@pytest.mark.interpreter
@ROOT_ONLY
@pytest.mark.parametrize(
    ("closed", "mode", "command", "exit_code"),
    [
        ("src/rank_3", 0o700, "inspect src", 3),
        ("src/rank_3", 0o700, f"{MERGE} --strict", 5),
        ("src/rank_3/checkpoint-2_10.ckpt", 0o600, "inspect {}", 3),
        ("src/rank_3/checkpoint-2_10.ckpt", 0o600, f"{MERGE} --strict", 5),
        ("src", 0o700, MERGE, 3),
        ("src", 0o700, "inspect src/rank_3", 3),
        ("old.ckpt", 0o600, MERGE, 3),
        ("old.ckpt", 0, MERGE, 3),
        ("old.ckpt", 0o600, "verify src -s old.ckpt", 3),
        ("old.ckpt", 0o600, "diff src src -s old.ckpt", 3),
        ("new.ckpt", 0o600, RESHARD, 3),
    ],
)
def test_what_may_not_be_read_is_named(place, closed, mode, command, exit_code):
    give_away(place / closed, mode)
    result = run_without_rights(command.format(closed), place)
    said = result.stderr
    assert not mentions(said, DENIED, f"src/rank_3: {DENIED}" if "/rank_3" in command else closed)
    assert "Traceback" not in said
    assert result.returncode == exit_code
    assert not (place / "out").exists()


@pytest.mark.interpreter
@ROOT_ONLY
@pytest.mark.parametrize("how", ["", "--pattern rank_{rank}/*"])
@pytest.mark.parametrize(
    ("closed", "mode"),
    [("/checkpoint-2_10.ckpt", 0o600), ("", 0o700), ("", 0o744)],
    ids=["file", "folder", "folder that can be listed"],
)
def test_a_rank_that_may_not_be_read_is_replaced_by_its_replicas_with_a_warning(
    place, closed, mode, how
):
    give_away(place / f"src/rank_3{closed}", mode)
    result = run_without_rights(f"{MERGE} {how}", place)
    assert result.returncode == 0, result.stderr
    text = "\n  all slices are read from replicas: "
    said = rf"warning\[damaged_replica\]: src/rank_3{closed}: {DENIED}{text}"
    assert not mentions(result.stderr, said)
    run_well("verify", place / "out" / "merged.ckpt", "--deep")


@pytest.mark.interpreter
@ROOT_ONLY
def test_rank_folders_that_may_not_be_read_are_told_by_verify_and_all_at_once(place):
    give_away(place / "src/rank_3", 0o700)
    result = run_without_rights("verify src -s old.ckpt", place)
    assert result.returncode == 1
    assert not mentions(
        result.stdout, rf"error\[damaged_replica\]: src/rank_3: {DENIED}\n  all slices "
    )
    for rank in range(8):
        give_away(place / f"src/rank_{rank}", 0o700)
    result = run_without_rights(MERGE, place)
    assert result.returncode == 3
    said = (
        rf"src/rank_0 and 7 more: {DENIED}\n"
        "  also src/rank_1, src/rank_2, src/rank_3 and 4 more; --json lists each\n"
    )
    assert not mentions(result.stderr, said)


@pytest.mark.interpreter
@ROOT_ONLY
@pytest.mark.parametrize(
    ("theirs", "mode", "text", "command"),
    [
        ("out", 0o755, None, RESHARD),
        ("out", 0o755, None, MERGE),
        ("out", 0o700, None, MERGE),
        ("out", 0o666, None, MERGE),
        ("out/rank_3", 0o755, None, RESHARD),
        ("up", 0o700, None, MERGE.replace("out", "up/out")),
        ("up", 0o700, None, RESHARD.replace("out", "up/out")),
        ("out/.ckpttool", 0o755, None, RESHARD),
        ("out/.ckpttool", 0o755, None, f"{RESHARD} --resume"),
        ("out/.ckpttool", 0o700, None, f"{RESHARD} --part 1/2"),
        ("out/.merged.ckpt.ckpttool", 0o755, None, MERGE),
        ("out/.ckpttool/lock", 0o644, "", RESHARD),
        ("out/.ckpttool/lock", 0o600, "", f"{RESHARD} --part 1/2"),
        ("out/.ckpttool/plan.json", 0o600, "x", RESHARD),
        ("out/.ckpttool/whole.log", 0o600, "x", RESHARD),
        ("out/.ckpttool/whole.log", 0o644, "", f"{RESHARD} --resume"),
        ("out/.ckpttool/1-of-2.log", 0o600, "", f"{RESHARD} --part 1/2"),
        ("out/merged.ckpt.partial", 0o600, "x", MERGE),
        ("out/merged.ckpt.partial", 0o600, "x", f"{MERGE} --resume"),
        ("out/merged.ckpt.partial", 0o644, "x", MERGE),
        ("out/ckpttool.json.partial", 0o644, "x", RESHARD),
        ("out/rank_3/checkpoint_3.ckpt.partial", 0o644, "x", RESHARD),
    ],
)
def test_what_may_not_be_written_is_named_before_the_first_byte(place, theirs, mode, text, command):
    if text is None:
        (place / theirs).mkdir(parents=True)
    give_away(place / theirs, mode, text)
    before = files_below(place, manifests=True)
    result = run_without_rights(command if "--" in command else f"{command} --overwrite", place)
    assert not mentions(result.stderr, rf"{theirs}: {DENIED}\n  Try: -o with another path")
    assert result.returncode == 5
    assert files_below(place, manifests=True) == before


@pytest.mark.interpreter
@ROOT_ONLY
def test_what_only_its_owner_may_replace_in_a_sticky_folder_is_named(place):
    give_away(place / "out/merged.ckpt", 0o666, "theirs")
    os.chown(place / "out", SOMEBODY_ELSE, SOMEBODY_ELSE)
    (place / "out").chmod(0o1777)
    result = run_without_rights(f"{MERGE} --overwrite", place)
    assert "out/merged.ckpt: not written: Operation not permitted" in result.stderr
    assert result.returncode == 6
    assert (place / "out/merged.ckpt").read_text() == "theirs"


@pytest.mark.interpreter
@ROOT_ONLY
def test_logs_of_parts_of_another_user_are_named_by_finalize(place):
    for part in ("1/2", "2/2"):
        assert run_without_rights(f"{RESHARD} --part {part}", place).returncode == 0
    give_away(place / "out/.ckpttool/1-of-2.log", 0o600)
    result = run_without_rights("finalize out", place)
    assert not mentions(result.stderr, f"out/.ckpttool/1-of-2.log: {DENIED}")
    assert result.returncode == 5
    assert not (place / "out/ckpttool.json").exists()


def test_a_name_for_which_there_is_no_room_is_named_by_its_output(tmp_path, monkeypatch):
    from tests.support.commands import message, run

    monkeypatch.chdir(GOLDEN)
    name = "n" * 240 + ".h5"
    folder = tmp_path / ("m" * 260)
    merge = ("merge", "src", "-s", "src_strategy.ckpt", "-o")
    for output, in_message in [(tmp_path / name, name), (folder / "a.h5", "a.h5")]:
        result = run(*merge, output)
        said = f"{in_message}: the name is too long: 255 bytes at most"
        assert said in message(result)
        assert "1 problems" not in message(result)
        assert result.exit_code == 5
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", [-1, 0])
def test_a_file_system_that_tells_no_longest_name_is_written_to(tmp_path, monkeypatch, answer):
    monkeypatch.setattr(os, "pathconf", lambda path, name: answer)
    strategy = GOLDEN / "src_strategy.ckpt"
    run_well("merge", GOLDEN / "src", "-s", strategy, "-o", tmp_path / "m.h5")


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_an_error_may_name_its_file_in_every_way_that_python_does(kind):
    error = PermissionError(errno.EACCES, "Permission denied", kind("/proc/none/file"))
    assert re.fullmatch(r"Permission denied \(/proc: owner root, .*\)", describe_os_error(error))
