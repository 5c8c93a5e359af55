"""What lies beside the files of a checkpoint: told as what it is, and never merged unseen."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest

from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.problems import UnsupportedError
from tests.support.checkpoints import ROWS, cut, noise, strategy_of, write_ranks
from tests.support.commands import mentions, message, run, run_well
from tests.support.corpus import SAMPLES, assert_merged
from tests.support.file_bytes import record
from tests.support.mindformers_output import keep_strategies, save
from tests.support.readers import read
from tests.support.scans import notes_of, problems_of

RUN = SAMPLES / "mp2_dp4"
STRATEGY = ["-s", RUN / "strategy" / "strategy_0.ckpt"]


@pytest.fixture
def ranks(tmp_path):
    """The rank folders of a real run with one step."""
    shutil.copytree(RUN / "ckpt", tmp_path / "ckpt")
    return tmp_path / "ckpt"


def emergency(folder, name, ranks=range(8)):
    """An emergency save of fault-tolerant training."""
    for rank in ranks:
        path = folder / name / f"rank_{rank}" / f"ttp_rank_{rank}-2_7.ckpt"
        path.parent.mkdir(parents=True)
        data = (RUN / "ckpt" / f"rank_{rank}" / "net-1_1.ckpt").read_bytes()
        path.write_bytes(data + record("cur_rank", "Int64", (), rank.to_bytes(8, "little")))
    return folder / name


# ------------------------------------------------------------------- saves that did not finish


def test_what_is_left_of_a_save_is_named_and_not_taken(ranks, tmp_path):
    for name in ("rank_3/net-2_1.tmp", "rank_6/net-2_1.tmp", "rank_0/net-2_1.h5.partial"):
        (ranks / name).write_bytes(record())
    assert scan(str(ranks)).step == "1_1"
    (text,) = notes_of(ranks, "leftover")
    left = "rank_0/net-2_1.h5.partial, rank_3/net-2_1.tmp, rank_6/net-2_1.tmp"
    assert text == f"{ranks}: files of a save that did not finish: {left}"
    result = run_well("merge", ranks, *STRATEGY, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "mp2_dp4")
    assert "did not finish" in message(result)


def test_a_rank_with_nothing_but_a_leftover_is_explained(ranks):
    (ranks / "rank_3" / "net-1_1.ckpt").rename(ranks / "rank_3" / "net-1_1.tmp")
    left, absent = notes_of(ranks, "leftover", "missing_rank")
    assert left.endswith("files of a save that did not finish: rank_3/net-1_1.tmp")
    assert absent == f"rank 3: no checkpoint file found in {ranks}"


def test_a_step_that_a_rank_did_not_finish_is_explained(ranks):
    (ranks / "rank_3" / "net-1_1.ckpt").rename(ranks / "rank_3" / "net-2_1.ckpt")
    (ranks / "rank_3" / "net-1_1.tmp").touch()
    first, second = problems_of(ranks)
    assert "no step is on every rank" in first
    assert "rank_3/net-1_1.tmp" in second


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("net-1_1.tmp", ("a save that did not finish", "Try: rename it to .ckpt, if")),
        (
            "net.ckpt.partial",
            ("a temporary file of a run of ckpttool", "with --resume"),
        ),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "merge"])
def test_a_file_that_is_not_all_there_is_refused(command, name, said, tmp_path):
    (tmp_path / name).write_bytes(record())
    out = ["-o", tmp_path / "out.h5"] if command == "merge" else []
    result = run(command, tmp_path / name, *out)
    assert result.exit_code == 3
    assert not mentions(message(result), f"{name}: ", *said)
    assert ("rename it" in message(result)) == (name == "net-1_1.tmp")
    with pytest.raises(UnsupportedError):
        scan(str(tmp_path / name))


def test_a_pattern_does_not_lead_to_files_that_are_not_all_there(ranks):
    for rank in (2, 5):
        shutil.copyfile(ranks / "rank_0" / "net-1_1.ckpt", ranks / f"rank_{rank}" / "net-2_1.tmp")
    result = run("inspect", ranks, "--pattern", "rank_{rank}/net-2_1.tmp")
    assert result.exit_code == 3
    told = r"rank_2/net-2_1\.tmp and 1 more: a file of a save that did not finish also .*rank_5/net"
    assert not mentions(message(result), told)


# --------------------------------------------------------------------------- emergency saves


def test_an_emergency_save_is_merged_when_it_is_named(tmp_path):
    folder = emergency(tmp_path, "ttp_saved_checkpoints-step_7")
    result = run_well("merge", folder, *STRATEGY, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "mp2_dp4")
    phrase = "ttp_saved_checkpoints-step_7: an emergency save of fault-tolerant training"
    assert not mentions(
        message(result), phrase, "step 2_7", "cur_rank: dropped not in the strategy"
    )


def test_the_number_of_each_rank_is_kept_if_it_is_asked_for(tmp_path):
    folder = emergency(tmp_path, "ttp_saved_checkpoints-step_7")
    words = ["-d", STRATEGY[1], "-o", tmp_path / "new", "--format", "ckpt", "--unlisted", "rank"]
    run_well("reshard", folder, *STRATEGY, *words)
    for rank in (0, 5):
        entries = read(tmp_path / "new" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt")
        assert entries["cur_rank"].data == rank.to_bytes(8, "little")


def test_an_emergency_save_of_some_ranks_is_merged_from_replicas(tmp_path):
    folder = emergency(tmp_path, "ttp_saved_checkpoints-step_7", ranks=(0, 2))
    run_well("merge", folder, *STRATEGY, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "mp2_dp4")


def test_an_unfinished_emergency_save_is_shown_and_not_converted(tmp_path):
    folder = emergency(tmp_path, "ttp_saved_checkpoints-step_7_tmp")
    phrase = "an emergency save that did not finish"
    for words in ([folder], [folder, *STRATEGY]):
        assert (
            message(run_well("inspect", *words)).count(f"warning[unfinished]: {folder}: {phrase}")
            == 1
        )
        result = run_well("inspect", *words)
        assert result.stderr.count("did not finish") == 1
        assert not mentions(result.stdout, r"complete +(no|not known).*did not finish")
        document = json.loads(run_well("inspect", *words, "--json").stdout)
        assert sum(phrase in note["text"] for note in document["notes"]) == 1
    result = run("verify", folder, *STRATEGY)
    assert message(result).count("did not finish") == 1
    for command in (["merge", folder], ["reshard", folder, "-d", STRATEGY[1]]):
        result = run(*command, *STRATEGY, "-o", tmp_path / "out")
        assert result.exit_code == 5
        assert not mentions(message(result), "save that did not finish", f"Try: mv {folder} ")
    assert not (tmp_path / "out").exists()


def test_a_file_in_an_unfinished_emergency_save_is_not_converted_either(tmp_path):
    folder = emergency(tmp_path, "ttp_saved_checkpoints-step_7_tmp")
    path = folder / "rank_3" / "ttp_rank_3-2_7.ckpt"
    run_well("inspect", path)
    result = run("merge", path, "-o", tmp_path / "out.h5")
    assert result.exit_code == 5
    assert not mentions(message(result), "save that did not finish", f"Try: mv {folder} ")


@pytest.mark.parametrize("below", ["", "rank_3"])
def test_a_pattern_does_not_lead_into_an_unfinished_emergency_save(below, tmp_path):
    folder = emergency(tmp_path, "ttp_saved_checkpoints-step_7_tmp")
    words = [tmp_path, "--pattern", f"{folder.name}/rank_{{rank}}/*"]
    if below:
        words = [folder / below, "--pattern", "ttp_rank_{rank}-*"]
    result = run("merge", *words, *STRATEGY, "-o", tmp_path / "out.h5")
    assert result.exit_code == 5
    told = f"{folder}: an emergency save that did not finish"
    assert not mentions(message(result), told, f"Try: mv {folder} ")


def test_an_unfinished_emergency_save_is_never_offered(tmp_path):
    unfinished = emergency(tmp_path, "ttp_saved_checkpoints-step_9_tmp")
    told = f"{unfinished}: an emergency save that did not finish: ignored"
    for command in ("inspect", "merge"):
        out = ["-o", tmp_path / "out.h5"] if command == "merge" else []
        result = run(command, tmp_path, *STRATEGY, *out)
        assert result.exit_code == 5
        assert not mentions(message(result), "no rank folders", told)
        assert not re.search("step_9_tmp as SRC", message(result))
    emergency(tmp_path, "ttp_saved_checkpoints-step_7")
    first, second = problems_of(tmp_path)
    assert first.endswith(f"Try: {tmp_path}/ttp_saved_checkpoints-step_7 as SRC")
    assert not mentions(second, told)


def test_emergency_saves_beside_flat_files_are_named_as_well(tmp_path):
    for rank in range(2):
        (tmp_path / f"net_rank_{rank}-1_1.ckpt").write_bytes(record())
    emergency(tmp_path, "ttp_saved_checkpoints-step_7", [0])
    emergency(tmp_path, "ttp_saved_checkpoints-step_9_tmp", [0])
    assert "step_7: an emergency save" in notes_of(tmp_path, "skipped")[0]
    assert "step_9_tmp: an emergency save" in notes_of(tmp_path, "leftover")[0]


def test_emergency_saves_beside_the_ranks_are_named_and_not_taken(ranks):
    emergency(ranks, "ttp_saved_checkpoints-step_7")
    emergency(ranks, "ttp_saved_checkpoints-step_9_tmp")
    assert scan(str(ranks)).step == "1_1"
    (text,) = notes_of(ranks, "skipped")
    assert text == (
        f"{ranks}/ttp_saved_checkpoints-step_7: an emergency save: ignored\n"
        f"  Try: {ranks}/ttp_saved_checkpoints-step_7 as SRC"
    )
    assert "step_9_tmp: an emergency save" in notes_of(ranks, "leftover")[0]


def test_if_there_is_nothing_but_an_emergency_save_the_error_names_it(tmp_path):
    folder = emergency(tmp_path, "ttp_saved_checkpoints-step_7")
    (problem,) = problems_of(tmp_path)
    assert "an emergency save of fault-tolerant training" in problem
    assert problem.endswith(f"Try: {folder} as SRC")


def test_emergency_saves_in_the_output_of_a_run_are_named(tmp_path):
    save(tmp_path, "mp2_dp4", "1_5")
    keep_strategies(tmp_path, "mp2_dp4")
    emergency(tmp_path, "ttp_saved_checkpoints-step_7")
    emergency(tmp_path / "checkpoint", "ttp_saved_checkpoints-step_9")
    texts = notes_of(tmp_path, "skipped")
    assert not mentions("; ".join(texts), "step_7: an emergency", "step_9: an emergency")
    assert len(texts) == 2


# ------------------------------------------------------------------- backups and breakdowns


def test_a_backup_is_passed_over_unless_it_is_asked_for(ranks):
    for rank in range(8):
        (ranks / f"rank_{rank}" / "backup.ckpt").write_bytes(record("backup"))
    assert scan(str(ranks)).step == "1_1"
    (text,) = notes_of(ranks, "skipped")
    told = "ranks 0-7: backup.ckpt, a backup for a restart, is ignored"
    assert text == f"{told}\n  Try: --step backup"
    assert list(scan(str(ranks), SourceOptions(step="backup")).files[5].tensors) == ["backup"]


def test_a_save_on_a_breakdown_is_called_so(ranks):
    for folder in ranks.iterdir():
        shutil.copyfile(folder / "net-1_1.ckpt", folder / "net-2_4_breakpoint.ckpt")
    assert scan(str(ranks)).step == "2_4_breakpoint"
    told = "step 2_4_breakpoint was saved when training broke off"
    assert notes_of(ranks, "step") == ["step 2_4_breakpoint is read, the newest of 2", told]
    assert notes_of(ranks / "rank_2" / "net-2_4_breakpoint.ckpt", "step") == [told]


# ------------------------------------------------------------------------ markers and others


def test_markers_of_success_are_passed_over_quietly(ranks):
    (ranks / "merge_succeed.txt").touch()
    for rank in range(8):
        (ranks / f"transform_succeed_rank_{rank}.txt").touch()
    assert scan(str(ranks)).diagnostics == ()


@pytest.mark.parametrize("folder", [".", "rank_4"])
def test_a_conversion_that_failed_is_pointed_out_with_its_reason(folder, ranks):
    reason = "For 'transform_checkpoints',\n the checkpoint of rank_3 is missing"
    (ranks / folder / "transform_failed_rank_4.txt").write_text(reason)
    (text,) = notes_of(ranks, "leftover")
    assert text.startswith(f"{ranks}: MindFormers could not convert files here\n")
    assert text.endswith(
        "transform_failed_rank_4.txt: For 'transform_checkpoints', the checkpoint of rank_3 is "
        "missing"
    )
    (ranks / folder / "transform_failed_rank_4.txt").write_bytes(b"\xff" * 1000)
    assert len(notes_of(ranks, "leftover")[0]) < 500
    (ranks / folder / "transform_failed_rank_4.txt").write_text("")
    assert notes_of(ranks, "leftover")[0].endswith("rank_4.txt: no reason is given")


def test_a_folder_called_like_the_marker_of_a_failure_is_none(ranks):
    (ranks / "transform_failed_rank_4.txt").mkdir()
    assert notes_of(ranks, "leftover") == []


def test_files_of_known_kinds_beside_the_ranks_are_called_what_they_are(ranks):
    for name in ("group_info.pb", "net-graph.meta"):
        shutil.copyfile(SAMPLES / "files" / name, ranks / name)
    (ranks / "notes.txt").touch()
    (ranks / "other.json").write_text("{}")
    (text,) = notes_of(ranks, "skipped")
    assert text == (
        f"{ranks}: other files or folders among the ranks: ignored\n"
        "  group_info.pb (group information), net-graph.meta (a graph that MindSpore dumped), "
        "notes.txt and 1 more"
    )


def test_the_notes_are_in_the_document(ranks):
    (ranks / "rank_3" / "net-2_1.tmp").touch()
    document = json.loads(run_well("inspect", ranks, "--json").stdout)
    assert [note["code"] for note in document["notes"]] == ["leftover"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("link", "broken links: rank_1/net.ckpt"),
        ("pipe", "pipes or devices, which are not read: rank_1/net.ckpt"),
        ("device", "pipes or devices, which are not read: rank_1/net.ckpt"),
    ],
)
def test_a_rank_with_what_is_no_file_is_explained(tmp_path, what, said):
    entries = cut({"w": noise("w", "Float32", (4, 2))}, strategy_of({"w": ROWS}))
    write_ranks(tmp_path, entries, "ckpt")
    for rank in (0, 1):  # that hold the same
        (tmp_path / f"rank_{rank}" / "net.ckpt").unlink()
    path = tmp_path / "rank_1" / "net.ckpt"
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if what == "device" else "gone")
    item = {"w": {"dev_matrix": [2, 2], "tensor_map": [1, -1]}}
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": item}))
    result = run("merge", tmp_path, "-s", tmp_path / "s.json", "-o", tmp_path / "m.h5")
    assert result.exit_code == 5
    text = message(result)
    assert f"ranks 0, 1: no checkpoint file found in {tmp_path}" in text
    assert f"; {said} Try: restore the files" in text
