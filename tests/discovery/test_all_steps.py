"""Every step of a folder: what is listed is what a scan finds, in every folder of folders.txt."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.discovery.scan import SourceOptions, Steps, find_steps, list_rank_steps, scan
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.problems import CkptToolError
from tests.discovery.test_folders import CASES, TEXT, lay, write
from tests.strategies import examples
from tests.support.transcripts import read_cases


def steps_of(src, strategy=None, **options):
    """The steps of a folder."""
    source = find_steps(str(src), SourceOptions(**options))
    return source if isinstance(source, Steps) else list_rank_steps(source, strategy)


def scanned(src, **options):
    """The catalog of a folder; None if it is refused."""
    try:
        return scan(str(src), SourceOptions(**options))
    except CkptToolError:
        return None


def check(src, options):
    """Check the steps of a folder against scans of each."""
    catalog = scanned(src, **options)
    try:
        steps = steps_of(src, **options).steps
    except CkptToolError:
        assert catalog is None or not catalog.needs_strategy
        return
    chosen = [step for step in steps if step.is_chosen]
    assert len(chosen) == (catalog is not None and bool(catalog.files or catalog.damaged))
    for step in chosen:
        assert step.step == catalog.step
        if step.ranks is not None:
            ranks = {*catalog.files, *(catalog.damaged if catalog.needs_strategy else ())}
            assert {*step.ranks} <= ranks
            assert {*catalog.missing_ranks} == {*step.missing_ranks}
    for step in steps:
        named = scanned(src, **options, step=step.name)
        if step.complete:
            assert named is not None
            assert named.step == step.step
            assert step.ranks is None or {*step.ranks} == {*named.files, *named.damaged}
        elif step.complete is False and named is not None and step.name is not None:
            assert named.missing_ranks or named.damaged or named.description is not None
    names = [step.name for step in steps if step.name is not None]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("title", CASES)
def test_the_steps_of_a_folder_are_those_that_scans_find(title, tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    lines = read_cases(TEXT)[title].splitlines()
    for line in (line for line in lines if line and not line.startswith(" ")):
        if line.startswith(">"):
            words = [word for word in shlex.split(line[1:]) if not word.startswith("step=")]
            at = [word for word in words if "=" not in word]
            options = dict(word.split("=", 1) for word in words if "=" in word)
            if root.joinpath(*at).is_dir():
                check(root.joinpath(*at), options)
            continue
        lay(root, line)


def rows(src, strategy=None):
    """Name, completeness and ranks of each step, and which is read without ``--step``."""
    return [
        (step.name, step.complete, step.ranks, step.is_chosen)
        for step in steps_of(src, strategy).steps
    ]


def test_with_a_strategy_only_its_ranks_count(make_run):
    src = make_run(
        *(f"rank_{rank}/net-1_10.ckpt" for rank in range(8)),
        *(f"rank_{rank}/net-2_10.ckpt" for rank in range(4)),
    )
    first = (*range(4),)
    strategy = Strategy({"w": (Layout((4,), ((0,),)),)}, 1, 4)
    assert rows(src) == [("1_10", None, (*range(8),), True), ("2_10", False, first, False)]
    assert steps_of(src).steps[0].reason == "only a strategy shows whether ranks follow 7"
    assert rows(src, strategy) == [("1_10", True, first, False), ("2_10", True, first, True)]


def test_a_step_that_no_record_names_yet_is_perhaps_unfinished(tmp_path):
    for rank in (0, 1):
        write(tmp_path, f"rank_{rank}/net-1_10.ckpt")
        write(tmp_path, f"rank_{rank}/net-2_10.ckpt")
        write(tmp_path, f"rank_{rank}/meta.json=net-1_10.ckpt")
    assert rows(tmp_path) == [("1_10", None, (0, 1), True), ("2_10", None, (0, 1), False)]
    assert steps_of(tmp_path).steps[1].reason == "newer than meta.json records"


def test_damaged_and_empty_files_are_not_complete(tmp_path):
    for rank in (0, 1):
        for step in ("1_10", "2_10", "3_10"):
            write(tmp_path, f"rank_{rank}/net-{step}.ckpt")
    write(tmp_path, "rank_1/net-2_10.ckpt=damage")
    (tmp_path / "rank_0" / "net-3_10.ckpt").write_bytes(b"")
    both = (0, 1)
    sharded, replicated = (Strategy({"w": (Layout((2,), (axes,)),)}, 1, 2) for axes in ((0,), ()))
    expected = ((None, None, False, None), (sharded, True, False, False), (replicated, *3 * [True]))
    for strategy, *complete in expected:
        listing = rows(tmp_path, strategy)
        assert listing == [
            ("1_10", complete[0], both, False),
            ("2_10", complete[1], both, False),
            ("3_10", complete[2], both, True),
        ]
    damaged, empty = (step.reason for step in steps_of(tmp_path).steps[1:])
    assert damaged == "rank 1: a number is not valid"
    assert empty == "rank 0: a file without a tensor"
    of_replicas = steps_of(tmp_path, replicated).steps
    assert [step.damaged_ranks for step in of_replicas] == [(), (1,), ()]
    assert [step.is_by_replicas for step in of_replicas] == [False, True, False]


def test_two_folders_of_one_number_have_the_names_of_the_folders(tmp_path):
    for name in ("iter_0000003", "iteration_00000003"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model-0000000-0000001.safetensors").write_bytes(b"x")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    assert rows(tmp_path) == [
        ("iter_0000003", False, (), False),
        ("iteration_00000003", False, (), False),
    ]


@examples(150)
@given(
    st.sets(
        st.tuples(st.integers(0, 2), st.sampled_from(["", "_1", "_2"]), st.integers(1, 3)),
        min_size=1,
        max_size=12,
    ),
    st.sets(st.tuples(st.integers(0, 2), st.integers(1, 3)), max_size=2),
    st.dictionaries(
        st.integers(0, 2), st.tuples(st.sampled_from(["", "_1"]), st.integers(1, 3)), max_size=3
    ),
)
def test_whatever_runs_left_is_listed_as_scans_find_it(
    tmp_path_factory, files, unfinished, records
):
    root = tmp_path_factory.mktemp("run")
    for rank, counter, step in files:
        write(root, f"rank_{rank}/net{counter}-{step}_2.ckpt")
    for rank, step in unfinished:
        write(root, f"rank_{rank}/net-{step}_2.tmp")
    for rank, (counter, step) in records.items():
        write(root, f"rank_{rank}/meta.json=net{counter}-{step}_2.ckpt")
    check(root, {})
