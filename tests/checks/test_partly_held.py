"""Parameters that no strategy lists, and that only some ranks of their stage have."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.checkpoints import (
    ROWS,
    WHOLE,
    catalog_of,
    noise,
    strategy_of,
    with_names,
    write_ranks,
)
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.in_memory import checkpoint_in_memory, find
from tests.support.readers import read, read_ranks

CASE = GOLDEN / "tutorial_8_to_8_retrain"  # every slice is on two or four ranks
STAGED = GOLDEN / "pipeline_2x4_to_8"
LISTED = strategy_of({"w": ROWS})
NAMES = {"w": (4, 3), "global_step": (), "table": (5, 2)}


def lacking(name, *ranks):
    """A catalog of four ranks, of which ``ranks`` lack a name that the others have."""
    fewer = {one: shape for one, shape in NAMES.items() if one != name}
    return catalog_of({rank: fewer if rank in ranks else NAMES for rank in range(4)})


def partly(catalog, strategy=LISTED):
    found = checkpoint_in_memory(catalog, strategy)
    return [(one.names, one.ranks, one.missing) for one in found.partly_held]


@pytest.mark.parametrize("name", ["global_step", "table"])
def test_a_name_that_some_ranks_lack_is_a_warning(name):
    for missing in ((3,), (0, 1)):
        catalog = lacking(name, *missing)
        held = tuple(rank for rank in range(4) if rank not in missing)
        assert partly(catalog) == [((name,), held, missing)]
        sources, problems, notes = find(catalog, content_groups={name: (held,)})
        assert name in sources
        assert not problems
        (text,) = notes["partly_held"]
        assert f"{name}: not in the strategy, and not on rank" in text
        assert f"run/rank_{missing[0]}/net.ckpt" in text


def test_a_name_on_one_rank_alone_is_a_question_that_says_what_stands_in_its_place():
    others = dict.fromkeys(range(3), NAMES)
    more = catalog_of({**others, 3: {**NAMES, "tabel": (5, 2)}})
    renamed = catalog_of({**others, 3: {"w": (4, 3), "global_step": (), "tabel": (5, 2)}})
    for catalog, words in ((more, ""), (renamed, ": table, on all other ranks, is missing\n")):
        sources, problems, _ = find(catalog)
        assert "tabel" not in sources
        (text,) = problems
        start = "tabel: not in the strategy, and only on rank 3\n  run/rank_3/net.ckpt"
        assert text.startswith(start + words)
        assert "--unlisted first, rank or drop" in text


@pytest.mark.parametrize(("unlisted", "is_there"), [("first", True), ("rank", True), ("drop", 0)])
def test_a_person_decides_of_a_name_on_one_rank(unlisted, is_there):
    catalog = catalog_of({**dict.fromkeys(range(3), NAMES), 3: {**NAMES, "own": (5, 2)}})
    sources, problems, notes = find(catalog, unlisted=unlisted)
    assert not problems
    assert ("own" in sources) == is_there
    (text,) = notes["decided" if is_there else "dropped"]
    assert "not in the strategy; only on rank 3" in text


def test_each_stage_is_looked_at_by_itself():
    stages = strategy_of({"w": ROWS}, {"v": ROWS})
    names = [{"w": (4, 3), "bn1": (4,)}, {"v": (4, 3), "bn2": (4,)}]
    ranks = {rank: names[rank // 4] for rank in range(8)}
    assert not partly(catalog_of(ranks), stages)
    assert not partly(catalog_of({rank: ranks[rank] for rank in (0, 4, 5)}), stages)
    ranks[6] = {"v": (4, 3)}
    assert partly(catalog_of(ranks), stages) == [(("bn2",), (4, 5, 7), (6,))]


def test_state_that_follows_its_parameter_is_not_meant():
    names = {"w": (4, 3), "adam_m.w": (4, 3)}
    assert not partly(catalog_of({**dict.fromkeys(range(3), names), 3: {"w": (4, 3)}}))


def test_saved_without_redundancy_each_may_be_on_one_rank():
    strategy = strategy_of({"a": WHOLE, "b": WHOLE, "c": WHOLE, "d": WHOLE})
    ranks = {rank: {"abcd"[rank]: (4, 3), "efgh"[rank]: (2, 2)} for rank in range(4)}
    assert checkpoint_in_memory(catalog_of(ranks), strategy).is_deduplicated
    assert not partly(catalog_of(ranks), strategy)
    for rank in range(3):  # what is on three of four was not handed out
        ranks[rank]["global_step"] = ()
    ranks[3]["global_stef"] = ()
    found = partly(catalog_of(ranks), strategy)
    assert (("global_step",), (0, 1, 2), (3,)) in found
    assert any("global_stef" in names and held == (3,) for names, held, _ in found)


def test_a_rank_that_holds_nothing_is_told_of_elsewhere():
    assert not partly(catalog_of({**dict.fromkeys(range(3), NAMES), 3: {}}))


def test_what_the_strategy_lists_and_no_rank_has_may_be_there_under_another_name():
    alone = strategy_of({"w": ROWS, "layer1.weight": ROWS})
    catalog = with_names({"w": (4, 3), "layer1.weighv": (4, 3)})
    _, _, notes = find(catalog, alone, {"layer1.weighv": ((0, 1, 2, 3),)})
    (text,) = notes["renamed"]
    assert "only in the strategy: layer1.weight; only in files: layer1.weighv\n" in text


# --------------------------------------------------------------------------- at the command line


def changed(case, tmp_path, rank, old, new):
    """The folder of a case with one name in a rank's file changed."""
    folder = shutil.copytree(case / "src", tmp_path / "src")
    (path,) = (folder / f"rank_{rank}").glob("*.ckpt")
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return folder, ("-s", case / "src_strategy.ckpt")


@pytest.mark.parametrize(
    ("case", "rank", "old", "new"),
    [
        (CASE, 3, b"global_step", b"globol_stef"),
        (CASE, 3, b"layer1.weight", b"layer9.weighv"),
        (STAGED, 6, b"global_step", b"globol_stef"),
    ],
)
def test_a_renamed_parameter_is_an_error_that_names_unlisted(case, rank, old, new, tmp_path):
    folder, strategy = changed(case, tmp_path, rank, old, new)
    words = ["merge", folder, *strategy, "-o", tmp_path / "out.ckpt"]
    result = run(*words)
    assert result.exit_code == 5
    said = f"{new.decode()}: not in the strategy, and only on rank {rank}"
    assert said in message(result)
    assert f": {old.decode()}, on all other ranks, is missing" in message(result)
    assert "--unlisted first, rank or drop" in message(result)
    assert not (tmp_path / "out.ckpt").exists()
    for more in ((), ("--deep",)):
        verified = run("verify", folder, *strategy, "--json", *more)
        assert verified.exit_code == 1
        kinds = {(f["code"], tuple(f["ranks"])) for f in json.loads(verified.stdout)["findings"]}
        assert kinds == {("unlisted", (rank,)), ("lacking", (rank,))}
    told = run_well(*words, "--unlisted", "drop")
    assert "warning" in told.stderr
    run_well("merge", case / "src", *strategy, "-o", tmp_path / "whole.ckpt")
    assert read(tmp_path / "out.ckpt") == read(tmp_path / "whole.ckpt")


def test_a_parameter_that_one_of_eight_ranks_lacks_is_a_warning(tmp_path):
    ranks = read_ranks(CASE / "src")
    del ranks[5]["global_step"]
    folder, strategy = write_ranks(tmp_path / "src", ranks, "ckpt"), CASE / "src_strategy.ckpt"
    result = run_well("merge", folder, "-s", strategy, "-o", tmp_path / "out.h5", "-q")
    said = f"global_step: not in the strategy, and not on rank 5 {folder}/rank_5/net.ckpt: "
    assert f"warning[partly_held]: {said}" in message(result)
    verified = run("verify", folder, "-s", strategy, "--deep")
    assert (verified.exit_code, said in message(verified)) == (1, True)


def test_what_each_rank_has_of_its_own_name_is_a_question(tmp_path):
    ranks = read_ranks(CASE / "src")
    for rank, entries in ranks.items():
        entries[f"rng_state.{rank}"] = noise(f"rng{rank}", "Int32", (5,))
    folder, strategy = write_ranks(tmp_path / "src", ranks, "ckpt"), CASE / "src_strategy.ckpt"
    words = ["merge", folder, "-s", strategy, "-o", tmp_path / "out.ckpt"]
    assert run(*words).exit_code == 5
    run_well(*words, "--unlisted", "first")
    assert read(tmp_path / "out.ckpt")["rng_state.7"] == ranks[7]["rng_state.7"]
