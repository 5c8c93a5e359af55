"""Files that no format objects to and that are damaged all the same: a name with a wrong letter."""

from __future__ import annotations

import shutil

import pytest

from ckpttool.model.aside import set_aside
from ckpttool.model.strategy import Strategy
from tests.checkpoints import ROWS, WHOLE, catalog_of, strategy_of, with_names
from tests.commands import message, run, run_well
from tests.corpus import GOLDEN
from tests.readers import read

CASE = GOLDEN / "tutorial_8_to_8_retrain"  # every slice is on two or four ranks
LISTED = strategy_of({"layer1.weight": ROWS})
NAMES = {"layer1.weight": (4, 3), "global_step": ()}


def renamed(old, new, rank=3, names=NAMES, ranks=range(4), shape=None):
    """A catalog whose ``rank`` has the name ``new`` where the others have ``old``."""
    held = {one: dict(names) for one in ranks}
    held[rank] = {new if name == old else name: size for name, size in names.items()}
    if shape is not None:
        held[rank][new] = shape
    return catalog_of(held)


def damaged(catalog, strategy=LISTED):
    return {rank: str(error) for rank, error in set_aside(catalog, strategy).damaged.items()}


@pytest.mark.parametrize(
    ("old", "new"), [("layer1.weight", "layer1.weighv"), ("global_step", "Global_step")]
)
def test_a_name_with_a_wrong_letter_on_one_rank_is_damage_of_its_file(old, new):
    (text,) = damaged(renamed(old, new)).values()
    assert text == (
        f"run/rank_3/net.ckpt: damaged: a parameter {new!r}, which no other rank has, in the place "
        f"of {old!r}, which ranks 0-2 have; put an intact copy there, or, if the name is right, "
        "list it in a strategy by hand (-s MORE.yaml)"
    )


def test_of_two_ranks_the_one_whose_name_the_strategy_does_not_list_is_wrong():
    pair = strategy_of({"layer1.weight": WHOLE, "bias": WHOLE})
    names = {**NAMES, "bias": (3,)}
    catalog = renamed("layer1.weight", "layer1.weighv", 1, names, range(2))
    assert list(damaged(catalog, pair)) == [1]
    assert not damaged(renamed("global_step", "global_stef", 1, names, range(2)), pair)


def test_of_a_stage_that_is_one_rank_the_strategy_tells():
    of_one = Strategy({"layer1.weight": LISTED.layouts["layer1.weight"]}, 1, 4)
    (text,) = damaged(renamed("layer1.weight", "layer1.weighv", ranks=[3]), of_one).values()
    assert "in the place of 'layer1.weight', which the strategy lists" in text


def test_each_stage_is_looked_at_by_itself():
    stages = strategy_of({"layer1.weight": ROWS}, {"layer2.weight": ROWS})
    names = [{f"layer{stage}.weight": (4, 3)} for stage in (1, 2)]
    ranks = {rank: names[rank // 4] for rank in range(8)}
    assert not damaged(catalog_of(ranks), stages)
    assert not damaged(catalog_of({rank: ranks[rank] for rank in (0, 4, 5)}), stages)
    ranks[6] = {"layer0.weight": (4, 3)}
    assert list(damaged(catalog_of(ranks), stages)) == [6]


def test_where_every_rank_holds_everything_all_ranks_are_one_stage():
    everything = Strategy({}, 1, 4)
    assert list(damaged(renamed("layer1.weight", "layer1.Weight", 2), everything)) == [2]


@pytest.mark.parametrize(
    "catalog",
    [
        with_names(NAMES),
        catalog_of({r: {**NAMES, f"rng_state.{r}": (5,)} for r in range(4)}),
        catalog_of({r: {**NAMES, "expert_of_0" if r else "expert_of_1": ()} for r in range(2)}),
        catalog_of({0: {**NAMES, "global_stet": ()}, **dict.fromkeys(range(1, 4), NAMES)}),
        renamed("w1", "w2", 1, {**NAMES, "w1": (4, 3)}, range(2)),
        renamed("global_step", "global_step2"),
        renamed("global_step", "global_stef", shape=(1,)),
        renamed("layer1.weight", "layer1.weighv", shape=("Float16", (4, 3))),
    ],
    ids=[
        "equal",
        "own of each",
        "two ranks",
        "both",
        "short",
        "longer",
        "shape",
        "dtype",
    ],
)
def test_names_that_may_be_right_are_left_alone(catalog):
    assert not damaged(catalog)


def test_a_name_that_a_strategy_lists_is_right():
    assert not damaged(
        renamed("layer1.weight", "layer2.weight"),
        strategy_of({"layer1.weight": ROWS, "layer2.weight": ROWS}),
    )


def test_saved_without_redundancy_a_rank_has_names_alone():
    strategy = strategy_of({"layer1.weight": WHOLE})
    ranks = {0: {"layer1.weight": (4, 3)}, 1: {"layer2.weight": (4, 3)}}
    assert not damaged(catalog_of(ranks), strategy)
    for rank in range(4):
        ranks.setdefault(rank, {})["global_stef" if rank == 2 else "global_step"] = ()
    assert list(damaged(catalog_of(ranks), strategy)) == [2]


def flipped(tmp_path, rank=3, old=b"layer1.weight", new=b"layer1.weighv"):
    """The folder of the case with one byte of the first name in a rank's file changed."""
    folder = tmp_path / "src"
    shutil.copytree(CASE / "src", folder)
    (path,) = (folder / f"rank_{rank}").glob("*.ckpt")
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    return folder, ("-s", CASE / "src_strategy.ckpt")


def test_replicas_replace_a_file_with_a_damaged_name_and_no_junk_is_written(tmp_path):
    folder, strategy = flipped(tmp_path)
    result = run_well("merge", folder, *strategy, "-o", tmp_path / "out.ckpt")
    assert "warning: rank 3: " in message(result)
    assert "all its slices are read from replicas: ranks 0, 2" in message(result)
    run_well("merge", CASE / "src", *strategy, "-o", tmp_path / "whole.ckpt")
    assert read(tmp_path / "out.ckpt") == read(tmp_path / "whole.ckpt")
    strict = run("merge", folder, *strategy, "-o", tmp_path / "no.ckpt", "--strict")
    assert strict.exit_code == 5
    verified = run("verify", folder, *strategy)
    assert verified.exit_code == 1
    assert "error damaged rank 3: " in message(verified)


def test_without_replicas_it_is_an_error(tmp_path):
    folder, strategy = flipped(tmp_path)
    for rank in (2, 6, 7):
        shutil.rmtree(folder / f"rank_{rank}")
    for words in (["merge", "-o", tmp_path / "out.h5"], ["inspect"]):
        result = run(words[0], folder, *strategy, *words[1:])
        assert result.exit_code == 3
        assert "a parameter 'layer1.weighv', which no other rank has" in message(result)
    assert not (tmp_path / "out.h5").exists()
