"""One rank's file is never taken for a full checkpoint, unless a person says that it is one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.checkpoints import noise, write_file
from tests.support.commands import mentions, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.readers import read, read_ranks

CASE = GOLDEN / "tutorial_8_to_8_retrain"
DST = CASE / "dst_strategy.ckpt"
FILE = "checkpoint-2_10.ckpt"
SECOND = GOLDEN / "safetensors_reshard"


def in_rank_folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CASE / "src", tmp_path / "run")) / "rank_0" / FILE


def of_other_words(tmp_path: Path) -> Path:
    for rank in (0, 1):
        shutil.copytree(CASE / "src" / f"rank_{rank}", tmp_path / f"device{rank}")
    return tmp_path / "device1" / FILE


def named_by_rank(tmp_path: Path) -> Path:
    return Path(shutil.copy(CASE / "src" / "rank_3" / FILE, tmp_path / "net_rank_3-2_10.ckpt"))


def linked(tmp_path: Path) -> Path:
    path = tmp_path / "model.ckpt"
    path.symlink_to(in_rank_folder(tmp_path))
    return path


def of_a_rank_that_is_not_the_first(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CASE / "src" / "rank_3", tmp_path / "rank_3")) / FILE


def numbered(tmp_path: Path) -> Path:
    path = tmp_path / "model-0000003-0000008.safetensors"
    return Path(shutil.copy(next((SECOND / "src" / "rank_3").iterdir()), path))


def in_nested_folders(tmp_path: Path) -> Path:
    for rank in (0, 1):
        folder = tmp_path / "run [1]" / f"device{rank}" / f"ckpt_{rank}"
        shutil.copytree(CASE / "src" / f"rank_{rank}", folder)
    return tmp_path / "run [1]" / "device0" / "ckpt_0" / FILE


def folder_of_one_rank(tmp_path: Path) -> Path:
    shutil.copytree(CASE / "src" / "rank_3", tmp_path / "one" / "rank_3")
    return tmp_path / "one"


def folder_of_one_named_file(tmp_path: Path) -> Path:
    (tmp_path / "flat").mkdir()
    shutil.copy(CASE / "src" / "rank_0" / FILE, tmp_path / "flat" / "net_rank_0-2_10.ckpt")
    return tmp_path / "flat"


def of_process_folders(tmp_path: Path) -> Path:
    for rank in range(8):
        shutil.copytree(CASE / "src" / f"rank_{rank}", tmp_path / f"LOG{rank}" / f"out_{rank}")
    return tmp_path / "LOG5" / "out_5" / FILE


def of_another_hosts_rank(tmp_path: Path) -> Path:
    for rank in (0, 1):
        folder = tmp_path / f"10.1.0.{rank + 7}" / f"rank_{rank}"
        shutil.copytree(CASE / "src" / f"rank_{rank}", folder)
    return tmp_path / "10.1.0.7" / "rank_0" / FILE


def numbered_beside_others(tmp_path: Path) -> Path:
    for rank in range(8):
        shutil.copy(CASE / "src" / f"rank_{rank}" / FILE, tmp_path / f"net2B6_{rank}-2_10.ckpt")
    return tmp_path / "net2B6_0-2_10.ckpt"


def of_unlike_counters(tmp_path: Path) -> Path:
    for rank, name in enumerate(["w_0_2-1_9.ckpt", "w_1-1_9.ckpt", "w_2_1-1_9.ckpt"]):
        shutil.copy(CASE / "src" / f"rank_{rank}" / FILE, tmp_path / name)
    return tmp_path / "w_1-1_9.ckpt"


def of_process_folders_with_unlike_counters(tmp_path: Path) -> Path:
    for rank, name in enumerate(["w_3-1_9.ckpt", "w-1_9.ckpt"]):
        (tmp_path / f"gpu{rank}").mkdir()
        shutil.copy(CASE / "src" / f"rank_{2 * rank}" / FILE, tmp_path / f"gpu{rank}" / name)
    return tmp_path / "gpu0" / "w_3-1_9.ckpt"


def in_nested_folders_with_unlike_counters(tmp_path: Path) -> Path:
    for rank, name in enumerate(["w-1_9.ckpt", "w_1-1_9.ckpt"]):
        folder = tmp_path / f"device{rank}" / "out"
        folder.mkdir(parents=True)
        shutil.copy(CASE / "src" / f"rank_{rank}" / FILE, folder / name)
    return tmp_path / "device0" / "out" / "w-1_9.ckpt"


SINGLE = {
    in_rank_folder: "rank_0 lies beside rank_1, rank_2, rank_3 and 4 more",
    of_other_words: "device1 lies beside device0",
    named_by_rank: "net_rank_3-2_10.ckpt is a name of rank 3",
    linked: "rank_0 lies beside rank_1",
    of_a_rank_that_is_not_the_first: "rank_3 is a name of rank 3",
    in_nested_folders: "device0 lies beside device1",
    of_process_folders: "LOG5 lies beside LOG0, LOG1, LOG2 and 4 more, with the same",
    of_another_hosts_rank: "10.1.0.7/rank_0 lies beside 10.1.0.8/rank_1",
    numbered_beside_others: "net2B6_0-2_10.ckpt lies beside net2B6_1-2_10.ckpt, net2B6_2-2_10.ckpt",
    of_unlike_counters: "w_1-1_9.ckpt lies beside w_0_2-1_9.ckpt, w_2_1-1_9.ckpt",
    of_process_folders_with_unlike_counters: "gpu0 lies beside gpu1, with the same",
    in_nested_folders_with_unlike_counters: "device0 lies beside device1",
    numbered: "model-0000003-0000008.safetensors is a name of one of 8 files",
}
FOLDERS = {
    folder_of_one_rank: "it is of rank 3; ranks 0-2 are expected, too",
    folder_of_one_named_file: "net_rank_0-2_10.ckpt is a name of rank 0",
}


def test_a_folder_of_another_kind_is_no_sibling(tmp_path):
    shutil.copytree(CASE / "src" / "rank_0", tmp_path / "ckpt_1")
    (tmp_path / "node2").mkdir()
    run_well("merge", tmp_path / "ckpt_1" / FILE, "-o", tmp_path / "full.h5")
    (tmp_path / "ckpt_2").mkdir()
    words = ["merge", tmp_path / "ckpt_1" / FILE, "-o", tmp_path / "again.h5"]
    assert "ckpt_1 lies beside ckpt_2" in message(run(*words))


@pytest.mark.parametrize(("make", "why"), SINGLE.items())
def test_merge_of_it_is_refused(make, why, tmp_path):
    path = make(tmp_path)
    result = run("merge", path, "-o", tmp_path / "full.h5")
    assert result.exit_code == 5
    assert not mentions(message(result), f"the file of one rank of several.* {re.escape(why)}")
    assert not (tmp_path / "full.h5").exists()
    run_well("merge", path, "--replicated", "-o", tmp_path / f"full{path.suffix}")
    assert read(tmp_path / f"full{path.suffix}") == read(path)


@pytest.mark.parametrize(("make", "why"), {**SINGLE, **FOLDERS}.items())
def test_split_of_it_is_refused(make, why, tmp_path):
    path = make(tmp_path)
    dst = SECOND / "dst_strategy.ckpt" if make is numbered else DST
    words = ["split", path, "-d", dst, "-o", tmp_path / "new", "--format", "ckpt"]
    result = run(*words)
    assert result.exit_code == 5
    assert not mentions(message(result), f"the file of one rank of several.* {re.escape(why)}")
    assert not (tmp_path / "new").exists()


def test_reshard_of_it_without_a_strategy_is_refused_with_the_same_exit_code(tmp_path):
    (tmp_path / "net.ckpt").write_bytes(in_rank_folder(tmp_path).read_bytes())
    for path in (named_by_rank(tmp_path), tmp_path / "net.ckpt"):
        for words in ([], ["-s", DST]):
            result = run("reshard", path, *words, "-d", DST, "-o", tmp_path / "new")
            assert (result.exit_code, "error[strategy]" in message(result)) == (5, True)


def test_reshard_of_it_with_a_strategy_of_one_rank_is_refused(tmp_path):
    (tmp_path / "one.yaml").write_text(
        "ckpttool_strategy: 1\nranks: 1\nparameters:\n  '*': replicated\n"
    )
    for path in (in_rank_folder(tmp_path), named_by_rank(tmp_path)):
        words = ["-s", tmp_path / "one.yaml", "-d", DST, "-o", tmp_path / "new"]
        result = run("reshard", path, *words)
        assert (result.exit_code, "one rank of several" in message(result)) == (5, True)


@pytest.mark.parametrize(("make", "why"), SINGLE.items())
def test_verify_and_inspect_say_that_it_is_one_rank(make, why, tmp_path):
    path = make(tmp_path)
    for command, label in (("verify", "note"), ("inspect", "warning[one_of_several]")):
        result = run_well(command, path)
        assert f"{label}: {path}: the file of one rank of several" in result.stderr
        assert why in message(result)
        notes = json.loads(run_well(command, path, "--json").stdout)["notes"]
        assert [note for note in notes if "one rank of several" in note["text"]]
    assert ": the headers are right (" not in run_well("verify", path).stdout
    assert ": the headers are right (" in run_well("verify", path, "--replicated").stdout


def test_everything_else_that_is_wrong_is_told_at_once(tmp_path):
    (tmp_path / "full.h5").touch()
    told = message(run("merge", in_rank_folder(tmp_path), "-o", tmp_path / "full.h5"))
    assert "one rank of several" in told
    assert "exists" in told


def test_rank_folders_that_hold_everything_are_split_with_replicated(tmp_path):
    case = GOLDEN / "replicated_only"
    words = ["-d", case / "dst_strategy.ckpt", "--format", "ckpt", "--replicated", "-o"]
    run_well("split", case / "src", *words, tmp_path / "all")
    run_well("split", case / "src" / "rank_1" / FILE, *words, tmp_path / "one")
    assert read_ranks(tmp_path / "all") == read_ranks(tmp_path / "one")
    result = run("split", CASE / "src", "-d", DST, "--replicated", "-o", tmp_path / "slices")
    assert result.exit_code == 5
    assert "not every rank holds the full model" in message(result)


def test_files_that_nothing_shows_to_be_a_ranks_are_taken(tmp_path):
    shutil.copytree(CASE / "src" / "rank_0", tmp_path / "run" / "rank_0")
    words = ["-d", DST, "-o"]
    run_well("split", tmp_path / "run", *words, tmp_path / "a")
    run_well("split", tmp_path / "run" / "rank_0" / FILE, *words, tmp_path / "b")
    shutil.copy(tmp_path / "run" / "rank_0" / FILE, tmp_path / "model.ckpt")
    (tmp_path / "node0" / "me").mkdir(parents=True)
    (tmp_path / "node1" / "you").mkdir(parents=True)
    shutil.copy(tmp_path / "model.ckpt", tmp_path / "node0" / "me")
    run_well("split", tmp_path / "node0" / "me" / "model.ckpt", *words, tmp_path / "d")
    run_well("split", tmp_path / "model.ckpt", *words, tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("epoch_1.ckpt", ["epoch_0.ckpt", "epoch_2.ckpt"]),
        ("net_epoch0.ckpt", ["net_epoch1.ckpt"]),
        ("fold_0.ckpt", ["fold_1.ckpt"]),
        ("Fold0/best.ckpt", ["Fold1/best.ckpt"]),
        ("net-0_2.ckpt", ["net-1_2.ckpt"]),
        ("net-1_0.ckpt", ["net-1_1.ckpt"]),
        ("net_1-1_2.ckpt", ["net-1_2.ckpt", "net_2-1_2.ckpt"]),
        ("net_1.ckpt", ["net_2.ckpt"]),
        ("net_0.ckpt", ["net_2.ckpt"]),
        ("a0/net_1.ckpt", ["a1/net_0.ckpt"]),
        ("a0/net_1-1_2.ckpt", ["a1/net-1_3.ckpt"]),
        ("net_1_1-1_2.ckpt", ["net_1-1_2.ckpt", "net_2-1_2.ckpt"]),
        ("a0/net.ckpt", ["a1/other.ckpt"]),
    ],
)
def test_a_number_that_is_not_a_ranks_is_no_evidence(name, others, tmp_path):
    for rank, path in enumerate(tmp_path / one for one in (name, *others)):
        path.parent.mkdir(exist_ok=True)
        shutil.copy(CASE / "src" / f"rank_{rank}" / FILE, path)
    run_well("merge", tmp_path / name, "-o", tmp_path / "full.h5")


def test_the_replicas_of_a_rank_do_not_hide_the_others(tmp_path):
    for rank, place in enumerate((0, 0, 2, 2)):
        shutil.copy(CASE / "src" / f"rank_{place}" / FILE, tmp_path / f"net{rank}.ckpt")
    told = message(run("merge", tmp_path / "net0.ckpt", "-o", tmp_path / "full.h5"))
    assert "net0.ckpt lies beside net1.ckpt, net2.ckpt, net3.ckpt, with the same names" in told


def test_copies_and_merged_files_are_no_ranks(tmp_path):
    for number in (0, 1):
        shutil.copy(CASE / "src" / "rank_0" / FILE, tmp_path / f"copy{number}.ckpt")
        entries = {"w": noise(f"w{number}", "Float32", (4, 4))}
        write_file(tmp_path / f"step-{number}_1.ckpt", entries, "ckpt")
        run_well("merge", tmp_path / f"step-{number}_1.ckpt", "-o", tmp_path / f"m{number}.ckpt")
    for name in ("copy0.ckpt", "m1.ckpt"):
        run_well("merge", tmp_path / name, "-o", tmp_path / f"{name}.h5")


def test_files_of_other_tensors_are_no_ranks(tmp_path):
    for number, shape in enumerate([(4, 4), (4, 8), (2, 4)]):
        entries = {"w": noise("w", "Float32", shape)}
        write_file(tmp_path / f"net_{number}.safetensors", entries, "safetensors")
    run_well("merge", tmp_path / "net_1.safetensors", "-o", tmp_path / "full.h5")
    shutil.copy(tmp_path / "net_1.safetensors", tmp_path / "net_3.safetensors")
    run_well("merge", tmp_path / "net_1.safetensors", "-o", tmp_path / "full.h5", "--overwrite")
    (tmp_path / "net_2.safetensors").write_bytes(b"broken")
    run_well("merge", tmp_path / "net_1.safetensors", "-o", tmp_path / "full.h5", "--overwrite")


def test_a_rank_folder_that_looks_like_a_full_checkpoint_is_none(tmp_path):
    entries = {"w": noise("w", "Float32", (4, 4))}
    for rank in (0, 1):
        write_file(tmp_path / f"rank_{rank}" / "model.safetensors", entries, "safetensors")
    result = run("split", tmp_path / "rank_1", "-d", DST, "-o", tmp_path / "new")
    assert (result.exit_code, "rank_1 lies beside rank_0" in message(result)) == (5, True)
