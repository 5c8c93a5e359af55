"""What a checkpoint or a strategy is at a glance, from headers and layouts in memory."""

from __future__ import annotations

import pytest

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
from ckpttool.checks import run_checks
from ckpttool.model.belonging import find_belongings
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.operations.describe import Completeness, assess, group_ranks, summarize
from ckpttool.operations.summary import (
    Amount,
    OptimizerShard,
    Split,
    Summary,
    entries_of_files,
    entries_of_layouts,
    find_parallelism,
)
from ckpttool.problems import Diagnostic, Diagnostics, FormatError
from tests.support.checkpoints import catalog_of, slice_catalog, strategy_of
from tests.support.in_memory import checkpoint_in_memory

ROWS = Layout((4, 2), ((0,), ()))  # two slices of rows, each on four of eight ranks
COLUMNS = Layout((4, 2), ((), (0,)))
WHOLE = Layout((8,), ((),))
SHARDED = Layout((4, 2), ((0,), ()), 4)


def checkpoint_of(strategy: Strategy, shapes, lost=()) -> Checkpoint:
    catalog = slice_catalog(strategy, shapes)
    files = {rank: file for rank, file in catalog.files.items() if rank not in lost}
    return checkpoint_in_memory(Catalog("run", files), strategy, unlisted="first")


def summary_of(strategy: Strategy, shapes, lost=()) -> Summary:
    return summarize(checkpoint_of(strategy, shapes, lost))


def completeness_of(checkpoint: Checkpoint, found=None) -> Completeness:
    found = Diagnostics("inspect") if found is None else found
    found.add(*run_checks(checkpoint, Contents(is_refused=True), "inspect"))
    return assess(checkpoint, summarize(checkpoint), found)


def patterns(summary: Summary) -> list[tuple[str, tuple[str, ...], int]]:
    return [(row.pattern, row.prefixes, len(row.parameters)) for row in summary.rows]


# --------------------------------------------------------------------------------------------- rows


def test_equal_layers_and_their_states_are_one_row():
    names = [f"{p}model.layers.{i}.wq.weight" for p in ("", "adam_m.") for i in range(12)]
    summary = summary_of(strategy_of(dict.fromkeys(names, ROWS)), dict.fromkeys(names, (8, 4)))
    assert patterns(summary) == [("model.layers.{0-11}.wq.weight", ("", "adam_m."), 12)]
    found = tuple(entry.name for entry in summary.rows[0].entries)
    assert found == tuple(n for i in range(12) for n in (names[i], names[12 + i]))


def test_layers_of_another_shape_or_layout_are_rows_of_their_own():
    layouts = dict.fromkeys((f"l.{i}.w" for i in range(6)), ROWS) | {"l.2.w": COLUMNS}
    shapes = dict.fromkeys(layouts, (8, 4)) | {"l.4.w": (16, 4)}
    assert patterns(summary_of(strategy_of(layouts), shapes)) == [
        ("l.{0,1,3,5}.w", ("",), 4),
        ("l.2.w", ("",), 1),
        ("l.4.w", ("",), 1),
    ]


def test_two_numbers_fold_only_where_every_pair_is_there():
    names = [f"layers.{i}.experts.{j}.w" for i in range(3) for j in range(4)]
    names.remove("layers.2.experts.3.w")
    summary = summary_of(strategy_of(dict.fromkeys(names, WHOLE)), dict.fromkeys(names, (8,)))
    assert patterns(summary) == [
        ("layers.{0,1}.experts.{0-3}.w", ("",), 8),
        ("layers.2.experts.{0-2}.w", ("",), 3),
    ]


@pytest.mark.parametrize("digits", ["01", "2147483648000", "9" * 5000])
def test_digits_that_are_no_number_of_a_layer_stay_in_the_name(digits):
    names = [f"l.{digits}.w", "l.1.w", "l.2.w"]
    summary = summary_of(strategy_of(dict.fromkeys(names, WHOLE)), dict.fromkeys(names, (8,)))
    assert [row.pattern for row in summary.rows] == [names[0], "l.{1,2}.w"]


def test_a_state_that_is_sharded_otherwise_is_a_row_of_its_own():
    layouts = {"w": ROWS, "adam_m.w": SHARDED, "adam_v.w": SHARDED}
    summary = summary_of(strategy_of(layouts), dict.fromkeys(layouts, (8, 4)))
    assert patterns(summary) == [("w", ("",), 1), ("w", ("adam_m.", "adam_v."), 1)]


def test_equal_layers_of_several_stages_are_one_row_with_the_ranks_of_each():
    stage = Layout((2, 2), ((0,), ()))
    strategy = strategy_of({"l.0.w": stage}, {"l.1.w": stage})
    (row,) = summary_of(strategy, {"l.0.w": (8, 4), "l.1.w": (8, 4)}).rows
    assert row.pattern == "l.{0,1}.w"
    assert [one.owners for one in row.placements] == [((0, 2), (1, 3)), ((4, 6), (5, 7))]


def test_the_ranks_of_a_row_are_those_that_have_a_file():
    (row,) = summary_of(strategy_of({"w": ROWS}), {"w": (8, 4)}, lost=(0, 3)).rows
    assert row.first.placement.owners == ((2, 4, 6), (1, 5, 7))


def test_ten_thousand_names_without_a_pattern_are_ten_thousand_rows():
    names = [f"{chr(97 + i % 26)}{'x' * (i // 26)}" for i in range(10_000)]
    catalog = catalog_of({0: dict.fromkeys(names, (2,))})
    assert len(Summary(tuple(entries_of_files(catalog)), {}).rows) == 10_000


# ------------------------------------------------------------------------------------------ amounts


def test_weights_optimizer_state_and_single_values_are_counted_apart():
    layouts = {"w": ROWS, "adam_m.w": ROWS, "b": WHOLE}
    catalog = slice_catalog(strategy_of(layouts), {"w": (8, 4), "adam_m.w": (8, 4), "b": (8,)})
    files = {
        rank: next(
            iter(
                catalog_of({rank: {**shapes(file), "step_num": (1,), "scale": (1,)}}).files.values()
            )
        )
        for rank, file in catalog.files.items()
    }
    catalog = Catalog("run", files)
    amounts = summarize(checkpoint_in_memory(catalog, strategy_of(layouts))).amounts
    assert amounts.weights == Amount(3, 41, 164, {"Float32": 41})
    assert amounts.optimizer_state == Amount(1, 32, 128, {"Float32": 32})
    assert (amounts.other.tensors, amounts.other.parameters) == (1, 1)


def shapes(file):
    return {name: tensor.meta.shape for name, tensor in file.tensors.items()}


def test_without_layouts_everything_that_is_stored_is_counted():
    catalog = catalog_of({rank: {"w": (4, 4), "moments.w": (4, 4)} for rank in range(3)})
    entries = tuple(entries_of_files(catalog))
    summary = Summary(entries, find_belongings((), catalog.metas))
    amounts = summary.amounts
    assert (amounts.weights.parameters, amounts.optimizer_state.nbytes) == (48, 192)


# -------------------------------------------------------------------------------------- parallelism


def test_rows_and_columns_in_as_many_slices_are_tensor_parallel():
    parallelism = parallelism_of({"up": ROWS, "down": COLUMNS, "norm": WHOLE})
    assert parallelism.tensor_parallel == 2
    assert parallelism.splits == (Split(2, 4, 2), Split(1, 8, 1))


@pytest.mark.parametrize(
    "layouts",
    [
        {"a": ROWS, "b": ROWS},  # perhaps an embedding table that is not tensor parallel
        {"experts": Layout((4, 2), ((0,), (), ())), "up": ROWS, "down": COLUMNS},
        {"up": ROWS, "down": COLUMNS, "other": Layout((2, 4), ((0,), ()))},
        {"both": Layout((2, 2, 2), ((1,), (0,)))},
        {"up": ROWS, "down": Layout((2, 2, 2), ((), (2,)))},
        {"norm": WHOLE},
    ],
    ids=["rows alone", "experts", "two numbers", "both axes", "two groupings", "nothing"],
)
def test_no_layout_is_called_tensor_parallel_that_may_be_another_kind(layouts):
    assert parallelism_of(layouts).tensor_parallel is None


def test_optimizer_shards_are_counted_over_parameters_and_states():
    parallelism = parallelism_of({"w": ROWS, "adam_m.w": SHARDED, "adam_v.w": SHARDED})
    assert (parallelism.optimizer_shards, parallelism.tensors) == ((OptimizerShard(4, 2),), 3)
    assert parallelism.splits == (Split(2, 4, 1),)


def test_a_stage_has_its_ranks_and_device_matrices_the_most_frequent_first():
    stage = Layout((2, 2), ((0,), ()))
    strategy = strategy_of({"a": stage, "b": Layout((4,), ((),)), "c": stage}, {"d": stage})
    entries = entries_of_layouts(strategy.layouts)
    first, last = find_parallelism(entries, {}, strategy).stages
    assert (first.ranks, first.device_matrices) == (range(4), ((2, 2), (4,)))
    assert (last.ranks, last.device_matrices) == (range(4, 8), ((2, 2),))


def parallelism_of(layouts):
    strategy = strategy_of(layouts)
    entries = entries_of_layouts(strategy.layouts)
    return find_parallelism(entries, find_belongings(strategy.layouts, {}), strategy)


# ------------------------------------------------------------------------------------- completeness


def test_a_checkpoint_with_every_slice_is_complete():
    strategy = strategy_of({"w": ROWS, "b": WHOLE})
    done = completeness_of(checkpoint_of(strategy, {"w": (8, 4), "b": (8,)}))
    assert (done.complete, done.replicas, done.missing_ranks) == (True, (4, 8), ())


def test_a_lost_rank_with_replicas_is_named_and_nothing_is_missing():
    done = completeness_of(checkpoint_of(strategy_of({"w": ROWS}), {"w": (8, 4)}, lost=(3,)))
    assert (done.complete, done.missing_ranks, done.replicas) == (True, (3,), (3, 4))


def test_lost_slices_make_it_incomplete():
    strategy = strategy_of({"w": ROWS, "b": WHOLE})
    lost = (1, 3, 5, 7)
    done = completeness_of(checkpoint_of(strategy, {"w": (8, 4), "b": (8,)}, lost))
    assert (done.complete, done.missing_tensors) == (False, ("w",))
    assert done.missing_ranks == lost


@pytest.mark.parametrize(
    ("code", "expected"),
    [("contradicted", None), ("strategy", None), ("unfinished", False), ("older_step", True)],
)
def test_what_was_found_decides_whether_it_is_complete(code, expected):
    found = Diagnostics("inspect")
    found.add(Diagnostic(code, "found elsewhere"))
    done = completeness_of(checkpoint_of(strategy_of({"w": ROWS}), {"w": (8, 4)}), found)
    assert (done.complete, code in done.complete_codes) == (expected, expected is not True)


def test_without_a_strategy_nothing_is_said_of_slices():
    catalog = catalog_of({0: {"w": (4, 4)}, 1: {"w": (4, 4)}})
    done = completeness_of(checkpoint_in_memory(catalog, None))
    assert (done.complete, done.replicas) == (None, None)


def test_a_damaged_file_without_replicas_is_an_error():
    files = catalog_of({0: {"w": (4, 4)}}).files
    damaged = {1: FormatError("b.ckpt", 0, "damaged")}
    catalog = Catalog("model", files, damaged=damaged, is_merged=True)
    done = completeness_of(checkpoint_in_memory(catalog, None))
    assert (done.complete, done.unreadable_ranks) == (False, (1,))


def test_ranks_with_files_of_other_tensors_are_groups():
    catalog = catalog_of(
        {0: {"a": (1,)}, 1: {"a": (2,)}, 2: {"a": (1,), "b": (1,)}, 3: {"a": (3,)}}
    )
    assert group_ranks(catalog) == [(0, 1, 3), (2,)]
