"""Where every parameter comes from: what follows from headers, problems and notes."""

import pytest

from ckpttool.checkpoint.interpret import decided_by_contents
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.problems import FormatError
from tests.support.checkpoints import (
    ONE_STAGE,
    ROWS,
    WHOLE,
    catalog_of,
    slice_catalog,
    strategy_of,
    the_one,
    with_names,
)
from tests.support.in_memory import check_in_memory, checkpoint_in_memory, find

# ------------------------------------------------------------------------------ listed names


def test_a_listed_parameter_has_its_layout_and_its_full_shape():
    found, problems, notes = find(with_names({"w": (4, 3)}))
    (source,) = found["w"]
    assert not problems
    assert not notes
    assert (source.meta.shape, source.layout) == ((8, 3), ROWS)
    assert source.is_listed
    assert source.parameter is source.only_for is None


def test_a_slice_is_taken_from_the_lowest_owner_that_has_it():
    catalog = catalog_of({0: {}, 1: {"w": (4, 3)}, 3: {"w": (4, 3)}})
    (source,) = find(catalog)[0]["w"]
    assert source.slicing.find_slice((0, 0))[1].file.path == "run/rank_1/net.ckpt"
    assert source.slicing.find_slice((1, 0))[1].file.path == "run/rank_3/net.ckpt"


def test_a_missing_file_does_no_harm_if_replicas_are_there_and_a_note_says_so():
    catalog = catalog_of({0: {"w": (4, 3)}, 3: {"w": (4, 3)}})
    found, problems, notes = find(catalog)
    assert not problems
    assert found["w"][0].slicing.find_slice((1, 0))[1].file.path == "run/rank_3/net.ckpt"
    the_one(notes["missing_replica"], "ranks 1, 2: no checkpoint file found in run")


def test_a_missing_rank_is_named_if_no_other_has_its_slice():
    catalog = catalog_of({0: {"w": (4, 3)}, 1: {"w": (4, 3)}})
    _, problems, _ = find(catalog)
    the_one(problems, "ranks 2, 3", "no checkpoint file found in run", "w: some slices")


def test_slices_that_are_nowhere_although_all_files_are_there_are_named_with_a_file():
    catalog = catalog_of({0: {"w": (4, 3)}, 1: {"w": (4, 3)}, 2: {"b": ()}, 3: {"b": ()}})
    _, problems, _ = find(catalog, content_groups={"b": ((2, 3),)})
    the_one(problems, "ranks 2, 3", "not in run/rank_2/net.ckpt and 1 more\n", "w: some slices")
    catalog = catalog_of({0: {"w": (4, 3)}, 1: {"w": (4, 3)}, 2: {}, 3: {}})
    the_one(find(catalog)[1], "rank_2/net.ckpt and 1 more (0 bytes)", "w: some slices")


def test_many_parameters_that_one_rank_lacks_are_one_problem():
    strategy = strategy_of({f"w{i}": Layout((2,), ((0,),)) for i in range(9)})
    full = slice_catalog(strategy, {f"w{i}": (4,) for i in range(9)})
    _, problems, _ = find(Catalog("run", {0: full.files[0]}), strategy)
    the_one(problems, "rank 1:", "w0, w1, w2 and 6 more: some slices")


def test_a_damaged_file_that_nobody_replaces_is_an_error_and_what_is_lost_is_named():
    catalog = catalog_of({0: {"w": (4, 3)}, 1: {"w": (4, 3)}, 3: {}})
    damaged = {2: FormatError("run/rank_2/net.ckpt", 7, "cut short")}
    catalog = Catalog("run", catalog.files, damaged=damaged)
    found = check_in_memory(checkpoint_in_memory(catalog, ONE_STAGE))
    assert found.failures == [damaged[2]]
    the_one([problem.text for problem in found.errors], "rank 2: not read", "w: some slices")


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ((5, 3), ["slice shape", "rank 2 (run/rank_2/net.ckpt) has (5, 3)", "have (4, 3)"]),
        (("Float16", (4, 3)), ["element type", "rank 2 (run/rank_2/net.ckpt) has Float16"]),
        ((4, 3, 1), ["slice shape", "has (4, 3, 1)", "ranks 0, 1, 3 have (4, 3)"]),
    ],
)
def test_a_rank_that_disagrees_is_named_with_its_file_and_both_values(odd, words):
    ranks = {rank: {"w": (4, 3)} for rank in range(4)} | {2: {"w": odd}}
    the_one(find(catalog_of(ranks))[1], "w: the ", "differs between ranks", *words)


def test_the_few_that_disagree_are_named_before_the_many_and_of_equals_the_higher():
    ranks = {rank: {"w": (5, 3) if rank == 0 else (4, 3)} for rank in range(4)}
    the_one(find(catalog_of(ranks))[1], "rank 0 (run/rank_0/net.ckpt) has (5, 3); ranks 1-3 have")
    ranks = {rank: {"w": (5, 3) if rank < 2 else (4, 3)} for rank in range(4)}
    the_one(find(catalog_of(ranks))[1], "2, 3 (run/rank_2/net.ckpt) have (4, 3); ranks 0, 1 have")


def test_slices_of_the_wrong_number_of_axes_are_told():
    the_one(find(with_names({"w": (4,)}))[1], "w: the slices", "ranks 0-3", "(4,)", "2 axes")


def test_slices_that_do_not_give_the_shape_of_the_strategy_are_told():
    strategy = strategy_of({"w": Layout((2, 2), ((1,), ()), full_shape=(4, 3))})
    _, problems, _ = find(with_names({"w": (4, 3)}), strategy)
    the_one(problems, "the strategy lists full shape (4, 3), the slices form (8, 3)")


# -------------------------------------------------------------------------- embedding tables

BY_HAND = strategy_of({"w": Layout((2, 2), ((1,), ()), rows=(6, 4))})
TABLE = {0: (6, 3), 1: (6, 3), 2: (4, 3), 3: (4, 3)}


def test_slices_of_a_manual_split_may_have_different_rows():
    found, problems, notes = find(catalog_of({r: {"w": s} for r, s in TABLE.items()}), BY_HAND)
    assert not problems
    assert not notes
    assert found["w"][0].meta.shape == (10, 3)
    assert found["w"][0].slicing.find_slice((1, 0))[1].file.path == "run/rank_2/net.ckpt"


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({2: (5, 3)}, ["rank 2 (run/rank_2/net.ckpt) has (5, 3), expected (4, 3)"]),
        ({0: (5, 3)}, ["rank 0 (run/rank_0/net.ckpt) has (5, 3), expected (6, 3)"]),
        ({3: (4, 5)}, ["rank 3 (run/rank_3/net.ckpt) has (4, 5), expected (4, 3)"]),
        ({3: (4,)}, ["rank 3 (run/rank_3/net.ckpt) has (4,), expected (4, 3)"]),
        ({0: (6,)}, ["rank 0 (run/rank_0/net.ckpt) has (6,), expected (6, 3)"]),
        ({1: (4, 3), 2: (6, 3)}, ["rank 1 (run/", "has (4, 3), expected (6, 3), rank 2 (run/"]),
    ],
)
def test_a_slice_that_does_not_have_the_rows_of_a_manual_split_is_named(odd, words):
    catalog = catalog_of({rank: {"w": shape} for rank, shape in (TABLE | odd).items()})
    found, problems, _ = find(catalog, BY_HAND)
    the_one(problems, "w: the slices do not fit", "manual split of [6, 4] rows; ", *words)
    assert problems[0].count("expected") == len(odd)
    assert not found


def test_all_slices_of_a_manual_split_with_other_axes_are_told():
    the_one(find(with_names({"w": (4,)}), BY_HAND)[1], "w: the", "ranks 0-3", "(4,)", "2 axes")


def test_a_manual_split_must_make_the_shape_of_the_strategy():
    strategy = strategy_of({"w": Layout((2, 2), ((1,), ()), full_shape=(12, 3), rows=(6, 4))})
    catalog = catalog_of({rank: {"w": shape} for rank, shape in TABLE.items()})
    the_one(find(catalog, strategy)[1], "full shape (12, 3), the slices form (10, 3)")


def test_a_missing_rank_of_a_manual_split_is_named():
    catalog = catalog_of({rank: {"w": TABLE[rank]} for rank in (0, 1)})
    the_one(find(catalog, BY_HAND)[1], "ranks 2, 3: no checkpoint file found", "w: some slices")


def test_slices_of_a_field_sliced_table_are_of_one_shape_and_have_rows_for_every_field():
    strategy = strategy_of({"w": Layout((2, 2), ((1,), ()), fields=3)})
    found, problems, _ = find(with_names({"w": (6, 3)}), strategy)
    assert not problems
    assert found["w"][0].meta.shape == (12, 3)
    problems = find(with_names({"w": (4, 3)}), strategy)[1]
    the_one(problems, "w: the slices do not fit", "ranks 0-3 hold slices of (4, 3)", "not by 6")
    catalog = catalog_of({rank: {"w": shape} for rank, shape in TABLE.items()})
    the_one(find(catalog, strategy)[1], "w: the slice shape differs between ranks")


# ------------------------------------------------------------------------- ranks and stages


def test_ranks_beyond_the_strategy_are_a_problem():
    _, problems, _ = find(with_names({"w": (4, 3)}, range(7)))
    the_one(problems, "ranks 4-6 are not in", "is for ranks 0-3", "of all 7 ranks", "of all stages")
    assert "away" not in problems[0]
    _, (problem,), _ = find(with_names({"w": (4, 3)}, [0, 1, 2, 3, 9]))
    assert problem.endswith("Try: move the folder of rank 9 away, if it is of another run")


def test_a_strategy_of_another_model_is_a_problem():
    _, problems, _ = find(with_names({"x": ()}), content_groups={"x": ((0, 1, 2, 3),)})
    the_one(problems, "src.ckpt: no parameter in common with run", "lists w", "hold x")


def test_a_strategy_without_layouts_says_that_all_ranks_hold_everything():
    empty = Strategy.without_layouts(2)
    found, problems, _ = find(with_names({"w": (8, 3)}, [0, 4]), empty, {"w": ((0, 4),)})
    assert not problems
    assert found["w"][0].meta.shape == (8, 3)


@pytest.mark.parametrize(
    ("listed", "held", "code"),
    [
        (["w", "adam_m.w", "adam_v.w"], ["w"], "absent"),
        (["w", "accu_grads.w", "moments.w"], ["w", "moments.w"], "absent"),
        (["w", "frozen", "adam_m.w"], ["w"], "unsaved"),
        (["w", "b", "moments.w", "moments.b"], ["w", "moments.w", "moments.b"], "unsaved"),
    ],
)
def test_a_weight_that_nobody_saved_is_a_warning_and_optimizer_state_a_note(listed, held, code):
    strategy = strategy_of(dict.fromkeys(listed, ROWS))
    _, problems, notes = find(with_names(dict.fromkeys(held, (4, 3))), strategy)
    assert not problems
    names = [name for name in listed if name not in held]
    of, verb = ("parameter", "is") if len(names) == 1 else ("parameters", "are")
    text = f"{len(names)} {of} {verb} in the strategy and in no file\n  {', '.join(names)}"
    assert notes.keys() == {code}
    assert notes[code][0].startswith(text)


TWO_STAGES = strategy_of(
    {"a": ROWS, "adam_m.a": ROWS}, {"b": ROWS, "adam_m.b": ROWS, "c": ROWS, "adam_m.c": ROWS}
)


def test_a_whole_stage_without_files_is_a_problem():
    catalog = with_names({"a": (4, 3), "adam_m.a": (4, 3)})
    _, problems, notes = find(catalog, TWO_STAGES)
    the_one(problems, "ranks 4-7: no checkpoint file found", "b, adam_m.b, c and 1 more: some")
    assert "absent" not in notes


def test_a_whole_stage_without_files_is_a_problem_of_weights_if_no_state_was_saved():
    _, problems, notes = find(with_names({"a": (4, 3)}), TWO_STAGES)
    the_one(problems, "ranks 4-7: no checkpoint file found", "b, c: some slices")
    (text,) = notes["absent"]
    assert text.endswith(" in the strategy and in no file\n  adam_m.a, adam_m.b, adam_m.c")


def test_what_only_the_missing_rank_of_a_group_kept_is_a_problem():
    """Saved without redundancy, every slice is on one rank: that of ``b`` was on rank 3."""
    strategy = strategy_of({"a": WHOLE, "b": WHOLE})
    catalog = catalog_of({0: {"a": (8, 3)}, 1: {}, 2: {}})
    the_one(find(catalog, strategy)[1], "rank 3: no checkpoint file found", "b: some slices")


def test_a_shared_parameter_is_taken_from_the_lowest_stage_that_is_complete():
    strategy = strategy_of({"e": ROWS}, {"e": Layout((4,), ((0,), ()))})
    ranks = {rank: {"e": (4, 3) if rank < 4 else (2, 3)} for rank in (0, 1, 4, 5, 6, 7)}
    catalog = catalog_of(ranks)
    found, problems, _ = find(catalog, strategy)
    assert not problems
    assert found["e"][0].layout.ranks == range(4, 8)
    both = slice_catalog(strategy, {"e": (8, 3)})
    assert find(both, strategy)[0]["e"][0].layout.ranks == range(4)


def test_a_shared_parameter_of_another_shape_in_another_stage_is_a_problem():
    strategy = strategy_of({"e": ROWS}, {"e": ROWS})
    ranks = {rank: {"e": (4, 3) if rank < 4 else (4, 5)} for rank in range(8)}
    told = ["(8, 3) in ranks 0-3", "(8, 5) in ranks 4-7", "strategy of this run"]
    the_one(find(catalog_of(ranks), strategy)[1], *told)


def test_a_shared_parameter_that_no_stage_has_whole_is_a_problem():
    strategy = strategy_of({"e": ROWS}, {"e": ROWS})
    catalog = catalog_of({0: {"e": (4, 3)}, 4: {"e": (4, 3)}})
    the_one(find(catalog, strategy)[1], "ranks 2, 3", "e: some slices")


# ---------------------------------------------------------------------------- unlisted names


def test_only_unlisted_names_that_are_alike_on_several_ranks_are_compared():
    catalog = catalog_of(
        {
            0: {"w": (4, 3), "adam_m.w": (4, 3), "step": (), "odd": (1,), "text": "x", "one": ()},
            1: {"w": (4, 3), "adam_m.w": (4, 3), "step": (), "odd": (2,), "text": "y"},
        }
    )
    records = checkpoint_in_memory(catalog, ONE_STAGE).records
    assert decided_by_contents(catalog, records) == {"step": None}


def test_an_unlisted_name_that_is_equal_everywhere_is_one_undivided_tensor():
    content_groups = {"step": ((0, 1, 2, 3),)}
    found, problems, notes = find(
        with_names({"w": (4, 3), "step": (2,)}), content_groups=content_groups
    )
    (source,) = found["step"]
    assert not problems
    assert not notes
    assert (source.meta.shape, source.only_for, source.is_listed) == ((2,), None, False)
    assert source.slicing.find_slice((0,))[1].file.path == "run/rank_0/net.ckpt"


DIFFERENT = with_names({"w": (4, 3), "rng": (2,)})
GROUPS = {"rng": ((0, 2), (1, 3))}


def test_an_unlisted_name_that_differs_is_a_question_to_the_user():
    found, problems, _ = find(DIFFERENT, content_groups=GROUPS)
    the_one(problems, "rng: not in the strategy", "ranks 0, 2 differ from ranks 1, 3", "--unlis")
    assert "rng" not in found


def test_an_unlisted_name_that_differs_in_shape_needs_no_comparison():
    catalog = catalog_of({0: {"w": (4, 3), "s": (1,)}, 2: {"w": (4, 3), "s": (2,)}})
    the_one(find(catalog)[1], "s: not in the strategy", "rank 0 differs from rank 2")


def test_strings_are_compared_as_values():
    catalog = catalog_of({0: {"w": (4, 3), "s": "x"}, 2: {"w": (4, 3), "s": "x"}})
    assert find(catalog)[0]["s"][0].meta.text == "x"
    catalog = catalog_of({0: {"w": (4, 3), "s": "x"}, 2: {"w": (4, 3), "s": "y"}})
    the_one(find(catalog)[1], "s: not in the strategy")


def test_unlisted_first_takes_the_lowest_rank_for_all():
    catalog = catalog_of({r: {"w": (4, 3)} | ({"rng": (2,)} if r else {}) for r in range(4)})
    found, problems, notes = find(catalog, content_groups={"rng": ((3,), (1, 2))}, unlisted="first")
    assert not problems
    assert [source.layout.first_rank for source in found["rng"]] == [1]
    assert "taken from rank 1" in notes["decided"][0]


def test_unlisted_drop_leaves_it_out():
    found, problems, notes = find(DIFFERENT, content_groups=GROUPS, unlisted="drop")
    assert not problems
    assert set(found) == {"w"}
    assert "rng" in notes["dropped"][0]


def test_unlisted_rank_gives_every_rank_its_own():
    found, problems, notes = find(DIFFERENT, content_groups=GROUPS, unlisted="rank")
    assert not problems
    assert [source.only_for for source in found["rng"]] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert [source.layout.first_rank for source in found["rng"]] == [0, 1, 2, 3]
    assert "rng: target rank r takes that of source rank r modulo 4" in notes["decided"][0]


def test_unlisted_rank_never_gives_two_ranks_the_same_turn():
    empty = Strategy.without_layouts(2)
    catalog = with_names({"rng": (2,)}, [0, 4])
    found, _, _ = find(catalog, empty, {"rng": ((0,), (4,))}, "rank")
    assert [source.only_for for source in found["rng"]] == [(0, 5), (4, 5)]


def test_many_groups_are_not_all_listed():
    catalog = with_names({"w": (1, 3), "rng": ()}, range(64))
    strategy = strategy_of({"w": Layout((64,), ((0,), ()))})
    content_groups = {"rng": tuple((rank, rank + 32) for rank in range(32))}
    the_one(find(catalog, strategy, content_groups)[1], "| 28 more differ from each other")


def test_an_undivided_checkpoint_has_every_parameter_whole():
    tensors = checkpoint_in_memory(catalog_of({3: {"w": (4, 3), "s": "x"}}), None).tensors
    assert [one.name for one in tensors] == ["w", "s"]
    assert tensors[0].slicing.find_slice((0, 0))[1].file.path == "run/rank_3/net.ckpt"
    assert not checkpoint_in_memory(Catalog("run", {}), None).tensors
