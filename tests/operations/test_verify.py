"""``verify``: every kind of trouble is found, named and located, and what is ordinary is not."""

import json
import os
import shutil
import struct

import numpy as np
import pytest

from ckpttool.model.layout import Layout
from ckpttool.model.slicing import LayoutSlicing
from ckpttool.problems import PlanError
from ckpttool.storage.numbers import decode
from tests.support.checkpoints import cut, noise, strategy_of, write_file, write_ranks
from tests.support.commands import mentions, message, run, run_well, stay_small
from tests.support.corpus import GOLDEN, SAMPLES, case_facts
from tests.support.damage import cut_short
from tests.support.readers import Entry, entry_of, rank_file
from tests.support.reports import STATES, check, ranks_of, the_finding, verify, whole

CASE = GOLDEN / "tutorial_8_to_8_retrain"
ODD = ["dtypes_saved_not_loaded", "encrypted_cbc", "encrypted_gcm", "params_outside_strategy",
       "special_float_bits"]  # fmt: skip


def numbers(shape, values, fill=1.0):
    """A Float32 tensor of one number, but for some places."""
    array = np.full(shape, fill, "<f4")
    for place, value in values.items():
        array[place] = value
    return entry_of(array)


# ------------------------------------------------------------------------------- what is ordinary


@pytest.mark.parametrize("format", ["ckpt", "safetensors", "hdf5"])
@pytest.mark.parametrize("deep", [False, True])
def test_nothing_is_wrong_with_a_whole_checkpoint(tmp_path, format, deep):
    report = check(tmp_path, ranks_of(whole()), format=format, deep=deep)
    assert not report.findings
    assert not report.notes
    assert (report.ranks, report.tensors) == ((0, 1, 2, 3), 4)


CASES = [path.name for path in sorted(GOLDEN.iterdir()) if list(path.glob("src_strategy*"))]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ODD])
def test_nothing_is_wrong_with_what_mindspore_saved(name):
    strategy = min(GOLDEN.joinpath(name).glob("src_strategy*"))
    run_well("verify", GOLDEN / name / "src", "-s", strategy, "--deep")


@pytest.mark.parametrize("name", [name for name in CASES if name != "params_outside_strategy"])
def test_samples_find_nothing_wrong_with_what_mindspore_saved(tmp_path, name):
    words = [GOLDEN / name / "src", "-s", min(GOLDEN.joinpath(name).glob("src_strategy*"))]
    if key := case_facts(name).get("enc_key"):
        pytest.importorskip("cryptography")
        (tmp_path / "key").write_text(key, encoding="ascii")
        words += ["--dec-key-file", tmp_path / "key"]
    assert ": the headers and samples are right (" in run_well("verify", *words).stdout


@pytest.mark.parametrize("deep", [False, True])
def test_slices_of_one_value_are_no_evidence_against_a_handwritten_strategy(tmp_path, deep):
    """A LoRA checkpoint of step 0: the matrix B is all zero, and a bias all one."""
    held = {
        rank: {
            "lora_a": noise(f"a{rank}", "Float32", (4, 8)),
            "lora_b": entry_of(np.zeros((4, 8), "<f4")),
            "bias": numbers((4,), {}),
        }
        for rank in range(4)
    }
    write_ranks(tmp_path / "run", held, "ckpt")
    path = tmp_path / "hand.yaml"
    path.write_text("ckpttool_strategy: 1\nranks: 4\nparameters:\n  '*': {axis: 0}\n")
    result = run("verify", tmp_path / "run", "-s", path, *["--deep"] * deep)
    assert "equal_slices" not in message(result)
    assert result.exit_code == deep  # every byte of lora_b is read, and found to be zero
    assert ("warning[zero]: lora_b" in message(result)) == deep


def test_slices_of_a_hidden_optimizer_shard_are_no_replicas_that_differ():
    words = [SAMPLES / "opt_aggregated" / "ckpt", "-s", SAMPLES / "opt_aggregated" / "strategy"]
    result = run_well("verify", *words, "--deep")
    assert "note: 6 parameters are sharded as shapes show, not as in the" in result.stderr


def test_advice_that_is_for_other_commands_is_left_out(tmp_path):
    words = ["-s", CASE / "src_strategy.ckpt"]
    out = tmp_path / "new"
    run_well("reshard", CASE / "src", *words, "-d", CASE / "dst_strategy.ckpt", "-o", out)
    advice = "Try: --optimizer-shard 1 if replicas diverged"
    assert advice in message(run("merge", out, *words, "-o", tmp_path / "m.ckpt"))
    for command in (["inspect"], ["verify", "--deep"]):
        told = message(run(*command, out, *words))
        assert "that the strategy does not list" in told
        assert advice not in told


# --------------------------------------------------------------------------------- from headers


def test_ranks_without_a_common_step_are_told_by_their_names(tmp_path):
    for rank, step in ((0, 1), (1, 2)):
        write_file(tmp_path / f"rank_{rank}" / f"net-{step}_1.ckpt", whole(), "ckpt")
    found = the_finding(verify(tmp_path, STATES), "mixed_steps")
    assert "step 1_1 is not on rank 1" in found.text


def test_a_newer_step_that_some_ranks_lack_is_a_warning(tmp_path):
    for step in (9, 10):
        for rank, entries in ranks_of(whole()).items():
            if step == 9 or rank:
                write_file(tmp_path / f"rank_{rank}" / f"net-1_{step}.ckpt", entries, "ckpt")
    report = verify(tmp_path, STATES)
    assert report.step == "1_9"
    found = the_finding(report, "older_step", "warning")
    assert "step 1_10 is not on rank 0" in found.text


# ----------------------------------------------------------------------------------- from the data


def test_samples_find_the_strategy_of_another_run_as_merge_does(tmp_path):
    strategy = CASE / "dst_strategy.ckpt"
    result = run("verify", CASE / "src", "-s", strategy)
    assert result.exit_code == 1
    text = rf"error\[contradicted\]: {strategy}: layer1.weight, .* and 9 more: sharded further in"
    assert not mentions(message(result), text)
    merged = run("merge", CASE / "src", "-s", strategy, "-o", tmp_path / "m.h5")
    assert not mentions(message(merged), text)


def test_to_locate_nan_in_every_slice_takes_no_look_at_all_the_others(tmp_path, monkeypatch):
    ranks = 32
    strategy = strategy_of({"w": Layout((ranks,), ((0,),))})
    entries = {"w": numbers((ranks,), {rank: float("nan") for rank in range(ranks)})}
    write_ranks(tmp_path, cut(entries, strategy), "ckpt")
    looks = []
    find_slice = LayoutSlicing.find_slice
    monkeypatch.setattr(
        LayoutSlicing,
        "find_slice",
        lambda mine, index: looks.append(index) or find_slice(mine, index),
    )
    (finding,) = verify(tmp_path, strategy, deep=True).findings
    assert (finding.code, finding.count, finding.first) == ("nan", ranks, (0,))
    assert len(looks) < 10 * ranks


@pytest.mark.parametrize(
    ("dtype", "word", "kind"),
    [
        ("Float16", b"\x01\x7c", "nan"),
        ("Float16", b"\x00\xfc", "infinite"),
        ("BFloat16", b"\x81\xff", "nan"),
        ("BFloat16", b"\x80\x7f", "infinite"),
        ("Float32", b"\x01\x00\x80\x7f", "nan"),  # signals
        ("Float64", b"\0\0\0\0\0\0\xf0\xff", "infinite"),
        ("Float8E4M3FN", b"\xff", "nan"),
        ("Float8E5M2", b"\x7d", "nan"),
        ("Float8E5M2", b"\xfc", "infinite"),
        ("HiFloat8", b"\x80", "nan"),
        ("HiFloat8", b"\xef", "infinite"),
        ("Complex64", struct.pack("<ff", 1, float("nan")), "nan"),
        ("Complex128", struct.pack("<dd", float("inf"), 0), "infinite"),
    ],
)
def test_every_type_has_its_own_nan_and_infinity(tmp_path, dtype, word, kind):
    one = {1: b"\x38", 2: b"\x00\x3c", 4: b"\0\0\x80\x3f", 8: bytes(8), 16: bytes(16)}[len(word)]
    data = one * 5 + word + one * 6
    assert np.isfinite(decode(np.frombuffer(one, np.uint8), dtype)).all()
    write_file(tmp_path / "m.ckpt", {"w": Entry(dtype, (3, 4), data)}, "ckpt")
    found = the_finding(verify(str(tmp_path / "m.ckpt"), deep=True), kind, "warning")
    assert (found.tensor, found.count, found.first) == ("w", 1, (1, 1))


@pytest.mark.parametrize("dtype", ["Int64", "UInt8", "Bool", "Int4", "random_op"])
def test_bits_of_integers_are_never_nan(tmp_path, dtype):
    entry = Entry(dtype, (2, 4), b"\xff" * (64 if dtype == "Int64" else 8))
    write_file(tmp_path / "m.ckpt", {"w": entry}, "ckpt")
    assert not verify(str(tmp_path / "m.ckpt"), deep=True).findings


# ------------------------------------------------------------------------ without a strategy


def test_a_strategy_for_several_ranks_is_not_that_of_one_file(tmp_path):
    write_file(tmp_path / "m.ckpt", whole(), "ckpt")
    with pytest.raises(PlanError, match=r"merged, but src\.ckpt is for 4 ranks\n.*without -s"):
        verify(str(tmp_path / "m.ckpt"), STATES)


# ------------------------------------------------------------------------------ the command line


@pytest.fixture
def source(tmp_path):
    return shutil.copytree(CASE / "src", tmp_path / "src")


def words(source, *more):
    return ["verify", source, "-s", CASE / "src_strategy.ckpt", *more]


def test_a_clean_checkpoint_is_one_line_and_exit_code_0(source):
    result = run(*words(source))
    assert result.exit_code == 0
    assert result.stdout == (
        f"OK: {source}: the headers and samples are right (8 ranks, step 2_10, 21 tensors, "
        "220.0 KiB; --deep reads all data)\n"
    )
    assert result.stderr == ""
    assert "all data read" in run(*words(source, "--deep")).stdout


def test_findings_are_a_summary_and_a_line_each_and_exit_code_1(source):
    path = cut_short(rank_file(source, 2))
    result = run(*words(source))
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"error: {source}: 1 error (7 ranks, step 2_10, 21 tensors, ")
    facts = "byte 28091: expected 73 bytes from there, found 68"
    assert lines[1:] == [
        f"error[damaged_replica]: {path}: the file is cut short or damaged",
        f"  {facts}; all slices are read from replicas: ranks 0, 3",
        "  Try: copy the file again from where it was saved",
    ]
    assert result.stderr == ""


def test_quiet_prints_what_is_wrong_and_nothing_else(source):
    result = run(*words(source, "--deep", "-q"))
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 0)
    cut_short(rank_file(source, 2))
    loud, result = run(*words(source)), run(*words(source, "-q"))
    assert (result.stdout, result.exit_code) == (loud.stdout, 1)


def test_the_document_of_verify(source):
    cut_short(rank_file(source, 2))
    shutil.rmtree(source / "rank_7")
    result = run(*words(source, "--json", "--deep"))
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["schema"] == 1
    assert (document["clean"], document["deep"]) == (False, True)
    assert (document["errors"], document["warnings"]) == (1, 1)
    assert document["ranks"] == [0, 1, 3, 4, 5, 6]
    keys = ["severity", "code", "text", "facts", "hint", "tensor", "ranks"]
    assert [list(finding) for finding in document["findings"]] == [[*keys, "path", "offset"], keys]
    clean = json.loads(run(*words(CASE / "src", "--json")).stdout)
    assert (clean["clean"], clean["findings"], clean["notes"]) == (True, [], [])


def test_a_long_list_is_cut_and_says_so(tmp_path):
    entries = {f"w{i:02}": numbers((2,), {0: float("inf")}) for i in range(60)}
    entries["v"] = numbers((2,), {0: float("nan")})
    write_file(tmp_path / "m.ckpt", entries, "ckpt")
    text = run("verify", tmp_path / "m.ckpt", "--deep", "--limit", "1").stdout
    assert text.splitlines()[1:] == [
        "warning[infinite]: w00, w01, w02 and 57 more: elements are infinite",
        "  1 of 2 elements; rank 0; first at (0,); --json lists each",
        "and 1 more (--limit N shows N, --json all)",
    ]
    text = run("verify", tmp_path / "m.ckpt", "--deep", "--limit", "0").stdout
    assert text.splitlines()[0].startswith(
        f"warning: {tmp_path}/m.ckpt: 61 warnings (1 file, 61 tensors"
    )
    assert text.splitlines()[1] == "and 2 more (--limit N shows N, --json all)"
    document = json.loads(run("verify", tmp_path / "m.ckpt", "--deep", "--json").stdout)
    assert [one["tensor"] for one in document["findings"]] == [*entries]


def test_ignored_warnings_are_notes_and_exit_code_0(tmp_path):
    write_file(tmp_path / "m.ckpt", {"w": numbers((2,), {0: float("inf")})}, "ckpt")
    assert run("verify", tmp_path / "m.ckpt", "--deep").exit_code == 1
    result = run("verify", tmp_path / "m.ckpt", "--deep", "--ignore", "infinite")
    assert result.exit_code == 0
    assert (
        result.stderr
        == "note: w: elements are infinite\n  1 of 2 elements; rank 0; first at (0,)\n"
    )
    assert run("verify", tmp_path / "m.ckpt", "--ignore", "damaged").exit_code == 2


def test_warnings_can_be_ignored_and_errors_cannot(source):
    cut_short(rank_file(source, 2))
    shutil.rmtree(source / "rank_7")
    result = run(*words(source, "--json", "--ignore", "missing_replica", "--ignore", "nan"))
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [finding["code"] for finding in document["findings"]] == ["damaged_replica"]
    assert (document["errors"], document["warnings"], document["clean"]) == (1, 0, False)
    (note,) = document["notes"]
    assert note["code"] == "missing_replica"
    assert note["text"].startswith("rank 7: no checkpoint file found")
    result = run(*words(source, "--ignore", "damaged_replica"))
    assert result.exit_code == 2
    assert mentions(message(result), "'damaged_replica' is not one of .*missing_replica") == []


def test_what_stops_verify_has_another_exit_code_than_1(source, tmp_path, monkeypatch):
    assert run("verify", tmp_path / "nothing").exit_code == 2
    assert run(*words(source, "--replicated")).exit_code == 2
    assert run("verify", source, "-s", GOLDEN / "PROVENANCE.md").exit_code == 4
    (tmp_path / "empty").mkdir()
    assert run("verify", tmp_path / "empty").exit_code == 5

    import ckpttool.discovery.scan as module

    def fail(*_, **__):
        raise PermissionError(13, os.strerror(13), "src")

    monkeypatch.setattr(module, "_find", fail)
    result = run("verify", source)
    assert result.exit_code == 3
    assert message(result).startswith("error[unreadable]: src: Permission denied")


def test_names_with_escape_sequences_are_not_printed_raw(tmp_path):
    write_file(tmp_path / "m.ckpt", {"a\x1b[2J": numbers((2,), {0: float("nan")})}, "ckpt")
    result = run("verify", tmp_path / "m.ckpt", "--deep")
    assert "\x1b" not in result.output
    assert r"a\x1b[2J: elements are NaN" in result.stdout


@pytest.mark.big
def test_memory_of_a_deep_look_does_not_grow_with_the_tensor(tmp_path):
    stay_small(tmp_path, "verify", str(tmp_path / "src"), "--deep")
