"""Parts of a plan that several runs carry out, each on its own, and the commit of all of them."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.execution.execute import execute
from ckpttool.model.layout import Layout
from ckpttool.transaction.parts import balance
from tests.support.checkpoints import noise, strategy_of, write_file
from tests.support.commands import files_below, message, run, run_well
from tests.support.executors import CASE, Threads, contents, make_plan, reshard_words
from tests.support.manifests import PLAN, listing_of, reseal
from tests.support.plans import plan_split


def run_parts(folder, numbers, count, output_format="ckpt", *more):
    for number in numbers:
        part = f"{number}/{count}"
        run_well(*reshard_words(folder, output_format), "--part", part, *more)


def outputs_of(folder):
    return {name: digest for name, digest in contents(folder).items() if name[:5] == "rank_"}


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_parts_are_balanced_and_always_the_same(sizes, count):
    dealt = balance(sizes, count)
    assert dealt == balance(sizes, count)
    assert len(dealt) == len(sizes)
    sums = [sum(s for s, part in zip(sizes, dealt, strict=True) if part == n) for n in range(count)]
    assert max(sums) - min(sums) <= max(sizes, default=0)


def test_parts_have_about_as_many_bytes_even_if_the_files_have_not(tmp_path):
    entries = {"a": noise("a", "Int8", (3, 1 << 20)), "b": noise("b", "Int8", (3, 3 << 20))}
    write_file(tmp_path / "m.ckpt", entries, "ckpt")
    rows = ((0,), ())
    strategy = strategy_of({"a": Layout((3,), rows)}, {"b": Layout((3,), rows, first_rank=3)})
    strategy = replace(strategy, files=())
    catalog = ckpttool.scan(str(tmp_path / "m.ckpt"))
    plans = [
        plan_split(
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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
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
