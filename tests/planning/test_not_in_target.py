"""What becomes of parameters that the target strategy does not list: one rule on every way."""

import json

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.checkpoint.interpret import decided_by_contents
from ckpttool.model.layout import Layout
from ckpttool.model.names import match_states
from ckpttool.model.plan import Target
from ckpttool.model.strategy import Strategy
from ckpttool.problems import PlanError
from tests.strategies import Move, examples, layouts, moves
from tests.support.checkpoints import cut, noise, strategy_of, write_file, write_ranks
from tests.support.commands import everything, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.in_memory import (
    carry_out,
    catalog_of_entries,
    checkpoint_in_memory,
    plan_in_memory,
)
from tests.support.readers import Entry, read_ranks

CHOICES = ("follow", "full", "drop")
TWO_ROWS = Layout((2,), ((0,), ()))
CASE = GOLDEN / "dst_without_optimizer"
WORDS = ["-s", CASE / "src_strategy.ckpt", "-d", CASE / "dst_strategy.ckpt", "--format", "ckpt"]


def plan_of(catalog, strategy, target, choice, content_groups=None):
    ranks = 1 if target is None else len(target.ranks)
    paths = {rank: f"out/rank_{rank}" for rank in range(ranks)}
    made = Target("ckpt", paths, ranks, target)
    return plan_in_memory(catalog, strategy, made, content_groups or {}, not_in_target=choice)


# ----------------------------------------------------------------------- on the command line


@pytest.mark.parametrize("choice", [*CHOICES, None])
def test_reshard_and_split_do_the_same_and_count_it(tmp_path, choice):
    words = [*WORDS[2:], *([] if choice is None else ["--not-in-target", choice]), "--json"]
    run_well("merge", CASE / "src", *WORDS[:2], "-o", tmp_path / "m.ckpt")
    split = run_well("split", tmp_path / "m.ckpt", *words, "-o", tmp_path / "split")
    words += WORDS[:2]
    reshard = run_well("reshard", CASE / "src", *words, "-o", tmp_path / "reshard")
    ranks = read_ranks(tmp_path / "split")
    assert ranks == read_ranks(tmp_path / "reshard")
    for result in (split, reshard):
        found = json.loads(result.stdout)["not_in_target"]
        assert found.pop("choice") == (choice or "follow")
        kind = {"full": "full", "drop": "dropped"}.get(choice, "followed")
        assert found.pop(kind) == {"tensors": 24, "nbytes": 29056}
        assert all(other == {"tensors": 0, "nbytes": 0} for other in found.values())
    for name, entry in ranks[0].items():
        base = ranks[0][name.removeprefix("adam_m.").removeprefix("adam_v.")]
        assert choice in ("full", "drop") or entry.shape == base.shape
    assert (choice == "drop") == ("adam_m" not in {name.partition(".")[0] for name in ranks[0]})


@pytest.mark.parametrize(
    ("listed", "ranks", "choice", "is_refused"),
    [
        ("w", 8, None, True),  # half of the weights; a state counts as its parameter
        ("w", 8, "follow", False),
        ("w", 8, "full", False),
        ("w", 2, None, False),  # copies as large as the source
        ("wv", 8, None, False),  # b has one axis
        ("v", 8, None, True),
    ],
)
def test_a_target_that_lists_too_few_weights_is_refused(
    tmp_path, listed, ranks, choice, is_refused
):
    shapes = {"w": (8, 4), "v": (8, 4), "adam_m.w": (8, 4), "adam_m.v": (8, 4), "b": (4,)}
    entries = {name: noise(name, "Float32", shape) for name, shape in shapes.items()}
    of_src = strategy_of(dict.fromkeys(shapes.keys() - {"b"}, Layout((1, 2), ((), ()))))
    src = write_ranks(tmp_path / "src", cut(entries, of_src), "ckpt")
    target = strategy_of(dict.fromkeys(listed, Layout((ranks,), ((0,), ()))))
    ckpttool.write_strategy(of_src, str(tmp_path / "s.ckpt"))
    ckpttool.write_strategy(target, str(tmp_path / "d.ckpt"))
    words = ["-s", tmp_path / "s.ckpt", "-d", tmp_path / "d.ckpt", "-o", tmp_path / "o"]
    words += [] if choice is None else ["--not-in-target", choice]
    result = run("reshard", src, *words, "--dry-run")
    assert result.exit_code == (5 if is_refused else 0)
    assert ("target_unfit" in everything(result)) == is_refused


@pytest.mark.parametrize(("pattern", "code"), [("typo.*", 5), ("w", 0)])
def test_a_target_none_of_whose_patterns_matches_is_refused(tmp_path, pattern, code):
    entries = {name: noise(name, "Float32", (8, 4)) for name in ("w", "v")}
    write_file(tmp_path / "m.ckpt", entries, "ckpt")
    target = tmp_path / "t.yaml"
    target.write_text(
        f"ckpttool_strategy: 1\nranks: 4\nparameters:\n  {pattern}: [4, 1]\notherwise: replicated\n"
    )
    words = ["split", tmp_path / "m.ckpt", "-d", target, "-o", tmp_path / "o", "--dry-run"]
    result = run(*words)
    assert result.exit_code == code
    assert ("target_unfit" in everything(result)) == bool(code)
    run_well(*words, "--not-in-target", "follow")


# --------------------------------------------------------------- split(merge(x)) = reshard(x)

PREFIXES = ("adam_m.", "accu_grads.", "mine.", "adam_v.mine.")


@st.composite
def moves_with_states(draw) -> Move:
    """A checkpoint with states of which either strategy lists some, not always cut like `w`.

    The target lists all states of a parameter or none: one that it alone omits is no state to it.
    """
    move = draw(moves())
    entries, sides = dict(move.entries), [dict(move.src.layouts), dict(move.dst.layouts)]
    for base in move.src.layouts:
        shape = move.entries[base].shape
        lists_all = draw(st.booleans())
        prefixes = draw(st.sets(st.sampled_from(PREFIXES)))
        if "adam_v.mine." in prefixes:  # of a state that is there: else `adam_v` is a module
            prefixes.add("mine.")
        for prefix in sorted(prefixes):
            name = prefix + base
            entries[name] = noise(name, "Float32", shape)
            in_target = draw(st.booleans()) if prefix == "accu_grads." else lists_all
            for side, is_listed in zip(sides, (draw(st.booleans()), in_target), strict=True):
                if is_listed:
                    side[name] = tuple(
                        draw(st.sampled_from([one, draw(fitting(one, shape))]))
                        for one in side[base]
                    )
    src, dst = (
        replace(strategy, layouts=side)
        for strategy, side in zip((move.src, move.dst), sides, strict=True)
    )
    return Move(entries, src, dst)


@st.composite
def fitting(draw, like, shape):
    found = draw(layouts(len(shape), len(like.ranks)))
    found = replace(found, first_rank=like.first_rank)
    return like if found.why_not(shape) else found


def true_slices(move):
    owners = match_states(move.src.layouts, catalog_of_entries({0: move.entries}).metas)
    more = {name: move.src.layouts[owners[name]] for name in owners if name not in move.src.layouts}
    return cut(move.entries, replace(move.src, layouts={**move.src.layouts, **more}))


def content_groups_of(catalog, strategy, ranks):
    """Ranks by equal content, as `compare_contents` finds them."""
    found = {}
    records = checkpoint_in_memory(catalog, strategy).records
    for name, follows in decided_by_contents(catalog, records).items():
        groups = {}
        for rank, held in ranks.items():
            if name in held:
                groups.setdefault(held[name].data, []).append(rank)
        if len(groups) > 1 or follows is None or len(set(next(iter(groups)))) > 1:
            found[name] = tuple(map(tuple, groups.values()))
    return found


def gradients_of_two_stages() -> Move:
    name, by_rows = "accu_grads.w", Layout((2,), ((0,),))
    by_shard = Layout((2,), ((),), optimizer_shard=2)
    stages = (by_rows, replace(by_shard, first_rank=2))
    src = Strategy({"w": stages, name: stages}, 2, 2)
    dst = Strategy({"w": (by_shard,), name: (by_shard,)}, 1, 2)
    entries = {one: noise(one, "Float32", (2,)) for one in ("w", name)}
    return Move(entries, src, dst)


@examples(300)
@example(gradients_of_two_stages(), "follow")
@given(moves_with_states(), st.sampled_from(CHOICES))
def test_merge_and_split_give_what_reshard_gives(move, choice):
    ranks = true_slices(move)
    catalog = catalog_of_entries(ranks)
    content_groups = content_groups_of(catalog, move.src, ranks)
    try:
        merge = plan_of(catalog, move.src, None, "follow", content_groups)
    except PlanError:  # noise of one byte that is the same on two ranks by chance
        assume(False)
    merged = carry_out(merge, ranks)
    split = plan_of(catalog_of_entries(merged), None, move.dst, choice)
    reshard = plan_of(catalog, move.src, move.dst, choice, content_groups)
    assert carry_out(split, merged) == carry_out(reshard, ranks)
    assert split.not_listed == reshard.not_listed


def test_a_merged_statistic_follows_like_one_that_is_spread_over_ranks(tmp_path):
    strategy = strategy_of({"w": Layout((4, 2), ((1,), (0,)))})
    full = {
        "w": noise("w", "Float32", (8, 6)),
        "exp_avg_sq_row_w": noise("r", "Float32", (8,)),
        "exp_avg_sq_col_w": noise("c", "Float32", (6,)),
    }
    rows, columns = Layout((4, 2), ((1,),)), Layout((4, 2), ((0,),))
    listed = {"exp_avg_sq_row_w": rows, "exp_avg_sq_col_w": columns}
    everything = strategy_of({"w": strategy.layouts["w"][0], **listed})
    write_ranks(tmp_path / "src", cut(full, everything), "ckpt")
    ckpttool.write_strategy(strategy, str(tmp_path / "s.ckpt"))
    ckpttool.write_strategy(strategy_of({"w": TWO_ROWS}), str(tmp_path / "d.ckpt"))
    source, words = ["-s", tmp_path / "s.ckpt"], ["-d", tmp_path / "d.ckpt", "--format", "ckpt"]
    run_well("merge", tmp_path / "src", *source, "-o", tmp_path / "m.ckpt")
    run_well("split", tmp_path / "m.ckpt", *words, "-o", tmp_path / "a")
    run_well("reshard", tmp_path / "src", *source, *words, "-o", tmp_path / "b")
    held = read_ranks(tmp_path / "a")
    assert held == read_ranks(tmp_path / "b")
    assert held[1]["exp_avg_sq_row_w"] == Entry("Float32", (4,), full["exp_avg_sq_row_w"].data[16:])
    assert held[1]["exp_avg_sq_col_w"].shape == (6,)
