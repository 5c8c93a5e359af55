"""Parts of a plan that several runs carry out, each on its own, and the commit of all of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.execution.execute import execute
from ckpttool.model.layout import Layout
from ckpttool.transaction.parts import balance
from tests.support.checkpoints import noise, strategy_of, write_file
from tests.support.commands import files_below, message, run, run_well
from tests.support.executors import (
    CASE,
    FORMATS,
    Threads,
    contents,
    make_plan,
    reshard_words,
)
from tests.support.manifests import LOG, PLAN, RECORD, listing_of, reseal

PART_LOG = f"{RECORD}/{{}}-of-{{}}.log"


def run_parts(folder, numbers, count, output_format="ckpt", *more):
    for number in numbers:
        part = f"{number}/{count}"
        run_well(*reshard_words(folder, output_format), "--part", part, *more)


def outputs_of(folder):
    return {name: digest for name, digest in contents(folder).items() if name[:5] == "rank_"}


@pytest.mark.parametrize(
    ("output_format", "count"),
    [("ckpt", 3), ("safetensors", 6), ("hdf5", 2)]
    + [
        pytest.param(*pair, marks=pytest.mark.exhaustive)
        for pair in product(FORMATS, [1, 2, 3, 6])
        if pair not in {("ckpt", 3), ("safetensors", 6), ("hdf5", 2)}
    ],
)
def test_all_parts_are_together_what_one_run_writes(tmp_path, output_format, count):
    run_well(*reshard_words(tmp_path / "whole", output_format))
    run_parts(tmp_path / "parts", range(count, 0, -1), count, output_format)
    assert outputs_of(tmp_path / "parts") == contents(tmp_path / "whole")
    result = run_well("finalize", tmp_path / "parts")
    assert result.stdout.startswith(f"{tmp_path / 'parts'}: complete: 4 files, ")
    assert result.stdout.endswith("KiB, step 2_10\n")
    there = files_below(tmp_path / "parts", manifests=True)
    assert there == ["ckpttool.json", *files_below(tmp_path / "whole")]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    manifests = [(tmp_path / name / "ckpttool.json").read_bytes() for name in ("parts", "whole")]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("value", ["5/4", "0/4", "a/b", "1", "1/0", "-1/2", "1/2/3", "½/1", "1 /2"])
def test_a_part_that_is_none_is_a_usage_error(tmp_path, value):
    result = run(*reshard_words(tmp_path, "ckpt"), "--part", value)
    assert result.exit_code == 2
    assert "is not a part K/N with K from 1 to N Try: --part 2/8" in message(result)
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_parts_are_balanced_and_always_the_same(sizes, count):
    dealt = balance(sizes, count)
    assert dealt == balance(sizes, count)
    assert len(dealt) == len(sizes)
    held = [sum(s for s, part in zip(sizes, dealt, strict=True) if part == n) for n in range(count)]
    assert max(held) - min(held) <= max(sizes, default=0)


def test_parts_have_about_as_many_bytes_even_if_the_files_have_not(tmp_path):
    """Pipeline stages of different sizes: 3 ranks of 1 MB and 3 of 3 MB, in 3 parts."""
    entries = {"a": noise("a", "Int8", (3, 1 << 20)), "b": noise("b", "Int8", (3, 3 << 20))}
    write_file(tmp_path / "m.ckpt", entries, "ckpt")
    rows = ((0,), ())
    strategy = strategy_of({"a": Layout((3,), rows)}, {"b": Layout((3,), rows, first_rank=3)})
    strategy = replace(strategy, files=())
    catalog = ckpttool.scan(str(tmp_path / "m.ckpt"))
    plans = [
        ckpttool.plan_split(
            catalog,
            strategy,
            str(tmp_path / "out"),
            output_options=ckpttool.OutputOptions("ckpt", part=(number, 3)),
        )
        for number in (1, 2, 3)
    ]
    sizes = [sum(plan.sizes[rank] for rank in destination.ranks) for plan, destination in plans]
    assert sizes == [4 << 20] * 3
    ranks = [rank for _, destination in plans for rank in destination.ranks]
    assert sorted(ranks) == [0, 1, 2, 3, 4, 5]


def test_parts_of_a_merge_into_numbered_files_leave_the_indexes_to_commit(tmp_path):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "--max-shard-size", "10KB"]
    run_well(*words, "-o", tmp_path / "whole")
    for number in (3, 1, 2):
        run_well(*words, "-o", tmp_path / "parts", "--part", f"{number}/3")
    names = files_below(tmp_path / "whole")
    indexes = {name for name in names if name.endswith(".json")}
    assert indexes
    assert len(names) > 5
    assert not indexes & set(files_below(tmp_path / "parts"))
    run_well("finalize", tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    manifests = [(tmp_path / name / "ckpttool.json").read_bytes() for name in ("parts", "whole")]
    assert manifests[0] == manifests[1]
    result = run(*words, "-o", tmp_path / "parts", "--part", "1/3")
    assert result.exit_code == 5
    assert "is already complete" in message(result)
    run_well(*words, "-o", tmp_path / "parts", "--part", "1/3", "--resume")
    run_well(*words, "-o", tmp_path / "parts", "--part", "1/3", "--overwrite")
    left = files_below(tmp_path / "parts", manifests=True)
    assert not {*indexes, "ckpttool.json"} & set(left)


DOCUMENTS = {
    "indexes": (
        ("merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "--max-shard-size", "10KB"),
        ("param_name_map.json",),
    ),
    "one of the indexes of .ckpt files": (
        (
            *("merge", CASE / "src", "-s", CASE / "src_strategy.ckpt"),
            *("--max-shard-size", "10KB", "--format", "ckpt"),
        ),
        ("model.ckpt.index.json",),
    ),
    "a strategy": (
        (
            *("reshard", CASE / "src", "-s", CASE / "src_strategy.ckpt"),
            *("-d", CASE / "dst_strategy.ckpt", "--write-strategy", "b/strategies/s.ckpt"),
        ),
        ("strategies/s.ckpt",),
    ),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_part_removes_no_document_that_no_run_of_its_plan_wrote(tmp_path, monkeypatch, kind):
    words, names = DOCUMENTS[kind]
    monkeypatch.chdir(tmp_path)
    command = [str(word) for word in words] + ["-o", "b", "--part", "1/2"]
    for name in names:
        (tmp_path / "b" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "b" / name).write_text("of a person")
    result = run(*command)
    assert result.exit_code == 5
    assert f"b/{names[0]} exists already Try: --overwrite" in message(result)
    assert files_below(tmp_path / "b") == sorted(names)
    run_well(*command, "--overwrite")
    assert not {*names} & {*files_below(tmp_path / "b")}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_part_that_is_queued_again_finds_the_documents_of_its_own_plan(
    tmp_path, monkeypatch, kind
):
    words, names = DOCUMENTS[kind]
    for folder in ("whole", "parts"):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        command = [str(word) for word in words] + ["-o", "b"]
        run_well(*command, *(("--part", "1/2") if folder == "parts" else ()))
    for name in names:  # finalize was killed before its last line
        Path("b", name).parent.mkdir(exist_ok=True)
        shutil.copy(tmp_path / "whole" / "b" / name, Path("b", name))
    run_well(*command, "--part", "1/2", "--resume")
    run_well(*command, "--part", "2/2")
    run_well("finalize", "b")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_no_document_is_written_where_a_link_leads_to(tmp_path):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "--max-shard-size", "10KB"]
    run_well(*words, "-o", tmp_path / "out", "--part", "1/1")
    plan = tmp_path / "out" / PLAN
    names = ("param_name_map.json", "model.safetensors.index.json")
    reseal(plan, *((f'"path": "{name}"', f'"path": "link/{name}"') for name in names))
    (tmp_path / "other").mkdir()
    (tmp_path / "out" / "link").symlink_to("../other")
    result = run("finalize", tmp_path / "out")
    assert result.exit_code == 5
    said = "a link leads out of the folder of the set link/param_name_map.json, link/model."
    assert f"{plan}: {said}" in message(result)
    assert files_below(tmp_path / "other") == []
    assert not (tmp_path / "out" / "ckpttool.json").exists()


def test_a_part_without_outputs_says_so_and_counts(tmp_path):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", tmp_path / "m.ckpt"]
    run_well(*words, "--part", "1/2")
    result = run_well(*words, "--part", "2/2")
    note = "note: part 2/2 has nothing to write 1 output file for 2 parts"
    assert note in message(result)
    assert result.stdout.splitlines()[-1].startswith("Wrote part 2/2: nothing in ")
    result = run("finalize", tmp_path)
    assert result.exit_code == 5
    said = f"the parts in it are of single files Try: ckpttool finalize {tmp_path / 'm.ckpt'}"
    assert said in message(result)
    run_well("finalize", tmp_path / "m.ckpt")
    assert files_below(tmp_path, manifests=True) == ["m.ckpt", "m.ckpt.ckpttool.json"]
    parts = (tmp_path / "m.ckpt.ckpttool.json").read_bytes()
    run_well(*words, "--overwrite")
    assert (tmp_path / "m.ckpt.ckpttool.json").read_bytes() == parts


def test_a_plan_that_does_not_work_out_says_nothing_of_the_outputs_of_other_parts(tmp_path):
    run_parts(tmp_path, (1,), 2)
    result = run(*reshard_words(tmp_path, "ckpt"), "--rank", "0-3,9", "--part", "2/2")
    assert result.exit_code == 5
    assert "rank 9 is not in the target" in message(result)
    assert "exist" not in message(result)


def test_a_part_on_a_cluster_is_the_same(tmp_path, threads):
    assert isinstance(threads, Threads)
    for number in (1, 2, 3, 4, 5):
        execute(*make_plan(tmp_path / "there", part=(number, 5)), threads)
    execute(*make_plan(tmp_path / "here"))
    assert ckpttool.finalize(str(tmp_path / "there")).step == "2_10"
    assert outputs_of(tmp_path / "there") == contents(tmp_path / "here")


# ------------------------------------------------------------------------ what commit refuses


def commit_fails(folder, code):
    result = run("finalize", folder)
    assert result.exit_code == code, message(result)
    assert not (folder / "ckpttool.json").exists()
    return message(result)


def test_a_source_and_a_folder_that_are_mounted_elsewhere_are_the_same_plan(tmp_path):
    shutil.copytree(CASE / "src", tmp_path / "one" / "src", copy_function=shutil.copy2)
    for number, place in ((1, "one"), (2, "other")):
        base = tmp_path / place
        strategies = ["-s", CASE / "src_strategy.ckpt", "-d", CASE / "dst_strategy.ckpt"]
        run_well("reshard", base / "src", *strategies, "-o", base / "out", "--part", f"{number}/2")
        (tmp_path / "one").rename(tmp_path / "other") if number == 1 else None
    run_well("finalize", tmp_path / "other" / "out")


@pytest.mark.parametrize("number", [1, 2])
def test_outputs_are_named_by_rank_in_whichever_order_threads_completed_them(tmp_path, number):
    run_parts(tmp_path, (1, 2), 2)
    log = tmp_path / PART_LOG.format(number, 2)
    begin, one, its_stamp, other, other_stamp, done = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join((begin, other, other_stamp, one, its_stamp, done)))
    names = [f"rank_{rank}/checkpoint_{rank}.ckpt" for rank in (number - 1, number + 1)]
    for name in names:
        (tmp_path / name).unlink()
    text = commit_fails(tmp_path, 7)
    assert f"{names[0]} and 1 more: missing also {tmp_path / names[1]}" in text


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_file_that_was_renamed_is_told_so_and_not_taken_for_complete(tmp_path, is_copy):
    words = ["merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", tmp_path / "m.ckpt"]
    run_well(*words)
    for end in ("", ".ckpttool.json"):
        shutil.copy(tmp_path / f"m.ckpt{end}", tmp_path / f"b.ckpt{end}")
        is_copy or (tmp_path / f"m.ckpt{end}").unlink()
    result = run("finalize", tmp_path / "b.ckpt")
    assert result.exit_code == 7
    said = f"{tmp_path}/b.ckpt: b.ckpt.ckpttool.json lists m.ckpt in place of it Try: rename the "
    assert f"{said}output and its manifest back" in message(result)


def test_a_commit_points_out_files_that_are_not_of_its_set(tmp_path):
    for rank in (9, 10):
        (tmp_path / f"rank_{rank}").mkdir()
        (tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.ckpt").touch()
        (tmp_path / f"rank_{rank}" / f"other_{rank}.ckpt").touch()
    run_parts(tmp_path, (1, 2), 2, "ckpt", "--overwrite")
    stale = ", ".join(f"{tmp_path}/rank_{rank}/checkpoint_{rank}.ckpt" for rank in (10, 9))
    said = f"{stale}; loaders would take them for this set Try: move them away"
    said = f"warning[stale]: {tmp_path}: 2 files of another run {said}"
    for _ in range(2):
        assert said in message(run_well("finalize", tmp_path, "-q"))
    (note,) = json.loads(run_well("finalize", tmp_path, "--json").stdout)["notes"]
    assert note["code"] == "stale"
    for rank in (9, 10):
        (tmp_path / f"rank_{rank}" / f"checkpoint_{rank}.ckpt").unlink()
    assert json.loads(run_well("finalize", tmp_path, "--json").stdout)["notes"] == []


@pytest.mark.parametrize("again", ["finalize", "--resume"])
def test_an_empty_log_of_a_run_that_was_killed_says_nothing(tmp_path, failing, again):
    run_parts(tmp_path, (1, 2), 2)
    log = tmp_path / LOG
    log.touch()
    result = run("merge", tmp_path, "-s", CASE / "dst_strategy.ckpt", "-o", tmp_path / "m.ckpt")
    assert "not finalized files may be missing Try: ckpttool finalize" in message(result)
    run_well("finalize", tmp_path)
    before = contents(tmp_path)
    log.touch()
    filled = failing(None)
    run_well(
        *["finalize", tmp_path]
        if again == "finalize"
        else [*reshard_words(tmp_path, "ckpt"), again]
    )
    assert contents(tmp_path) == before
    assert not log.exists()
    assert not filled


def test_parts_that_lie_beside_a_finished_set_of_another_plan_are_not_of_it(tmp_path):
    run_parts(tmp_path, (1,), 2)
    names = (PLAN, PART_LOG.format(1, 2))
    kept = {name: (tmp_path / name).read_bytes() for name in names}
    run_well(*reshard_words(tmp_path, "ckpt"), "--rank", "0-2", "--overwrite")
    manifest = (tmp_path / "ckpttool.json").read_bytes()
    for name, data in kept.items():
        (tmp_path / name).write_bytes(data)
    run_well("finalize", tmp_path)
    assert (tmp_path / "ckpttool.json").read_bytes() == manifest
    assert not any((tmp_path / name).exists() for name in names)


def test_a_commit_removes_plans_that_killed_runs_have_half_written(tmp_path):
    run_parts(tmp_path, (1, 2), 2)
    for name in ("plan.json.partial", "plan.json.0123456789abcdef.partial"):
        (tmp_path / RECORD / name).write_text('{"schema"')
    run_well("finalize", tmp_path)
    assert {path.name for path in (tmp_path / RECORD).iterdir()} == {"lock", "stamps.json"}


def test_a_folder_of_anything_else_is_not_committed(tmp_path):
    assert run("finalize", tmp_path / "nowhere").exit_code == 2
    assert "no parts in it a run with --part K/N leaves a log here" in commit_fails(tmp_path, 5)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A part of one that is done, and its plan as JSON."""
    folder = tmp_path_factory.mktemp("recorded")
    run_parts(folder, (1,), 1)
    return folder, json.loads((folder / PLAN).read_text())


def changed(document, **more):
    return {**document, **more}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: changed(r, schema=2), "schema: expected 1, got 2"),
        (lambda r: changed(r, plan=None), "plan: expected str, got null"),
        (lambda r: changed(r, step=2), r"step: expected str \| null, got int"),
        (lambda r: changed(r, host=None), "host: expected str, got null"),
        (lambda r: changed(r, process=True), "process: expected int, got bool"),
        (lambda r: changed(r, outputs=[1]), "expected object, got int"),
        (lambda r: changed(r, outputs=[{"path": "a"}]), "missing required field rank"),
        (lambda r: changed(r, documents=None), "documents: expected array, got null"),
        (
            lambda r: changed(r, documents=[{"path": "x", "data": "a b"}]),
            r"documents\[0\].data: invalid base64",
        ),
        *(
            (
                lambda r, path=path, key=key: changed(
                    r, **{key: [{"path": path, "data": "", "rank": 0}]}
                ),
                "path: expected a path below the folder",
            )
            for path in ("../x", "/etc/x", "a/../../x", "", "a\0b")
            for key in ("documents", "outputs")
        ),
    ],
)
def test_a_plan_that_is_none_is_a_format_error(recorded, tmp_path, change, reason):
    folder, document = recorded
    shutil.copytree(folder, tmp_path / "out")
    path = tmp_path / "out" / PLAN
    path.write_bytes(listing_of(change(document)))
    with pytest.raises(ckpttool.FormatError, match=reason) as caught:
        ckpttool.finalize(str(tmp_path / "out"))
    assert caught.value.path == str(path)
    assert commit_fails(tmp_path / "out", 3)


@pytest.mark.parametrize("name", [PLAN, PART_LOG.format(1, 1)])
def test_a_record_cut_anywhere_is_never_committed(recorded, tmp_path, name):
    folder, _ = recorded
    shutil.copytree(folder, tmp_path / "out")
    path = tmp_path / "out" / name
    data = path.read_bytes()
    ends = [i + step for i, byte in enumerate(data) if byte == 10 for step in (-1, 0, 1)]
    kind = ckpttool.FormatError if name == PLAN else ckpttool.PlanError
    for stop in sorted({*range(0, len(data), 199), *ends} - {len(data)}):
        path.write_bytes(data[:stop])
        with pytest.raises(kind):
            ckpttool.finalize(str(tmp_path / "out"))
    path.write_bytes(data)
    assert len(ckpttool.finalize(str(tmp_path / "out")).outputs) == 4


def test_logs_that_do_not_tell_of_all_outputs_are_refused(recorded, tmp_path):
    folder, _ = recorded
    shutil.copytree(folder, tmp_path / "out")
    path = tmp_path / "out" / PART_LOG.format(1, 1)
    lines = path.read_bytes().splitlines(keepends=True)
    name = json.loads(lines[1].rpartition(b" ")[0])["path"]
    path.write_bytes(b"".join([lines[0], *lines[3:]]))  # without an output and its stamp
    text = commit_fails(tmp_path / "out", 5)
    assert f"1 output in no log {name} Try: run all parts again, with --resume" in text
