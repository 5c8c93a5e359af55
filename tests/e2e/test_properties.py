"""What holds for every checkpoint and every pair of layouts, tried on many."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpttool
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.execute import execute
from ckpttool.problems import PlanError
from tests.strategies import (
    DTYPES,
    Move,
    as_stored,
    examples,
    features,
    layout_features,
    moves,
    regions,
    shapes,
    table_moves,
)
from tests.support.checkpoints import cut, layouts_of, write_ranks
from tests.support.in_memory import carry_out, catalog_of_entries, make, slices
from tests.support.plans import plan_merge, plan_reshard, plan_split
from tests.support.readers import read, read_ranks

SMALL = CopyOptions(band_bytes=24, task_bytes=100, max_in_flight=3)


# ---------------------------------------------------------------------------------- in memory


@examples(200)
@given(moves(has_state=True))
def test_pieces_fill_every_output_exactly_and_with_what_the_oracle_says(move):
    src = cut(move.entries, move.src)
    plan = make(catalog_of_entries(src), move.src, move.dst)
    assert carry_out(plan, src) == cut(move.entries, move.dst)


@examples(200)
@given(table_moves())
def test_tables_that_are_cut_unevenly_become_what_the_oracle_says(move):
    src = cut(move.entries, move.src)
    for target, wanted in ((move.dst, cut(move.entries, move.dst)), (None, {0: move.entries})):
        stored = None if target is None else as_stored(target)
        plan = make(catalog_of_entries(src), as_stored(move.src), stored)
        assert carry_out(plan, src) == wanted


@examples(100)
@given(moves(has_state=True), st.data())
def test_replicas_may_be_missing_as_long_as_one_owner_of_every_slice_is_left(move, data):
    src = cut(move.entries, move.src)
    for name in move.entries:
        for owners in groups(move.src, name):
            # What no strategy lists, and one rank alone has, is a question.
            kept = 1 if name in move.src.layouts else min(2, len(owners))
            for rank in data.draw(st.sets(st.sampled_from(owners), max_size=len(owners) - kept)):
                del src[rank][name]
    gone = {rank for rank, held in src.items() if not held and data.draw(st.booleans())}
    src = {rank: held for rank, held in src.items() if rank not in gone}
    plan = make(catalog_of_entries(src), move.src, move.dst)
    assert carry_out(plan, src) == cut(move.entries, move.dst)


def groups(strategy, name):
    held = layouts_of(strategy, name)
    if held is None:
        return [list(strategy.ranks)]
    layout = held[0]
    return [list(layout.owners(index)) for index in layout.slice_indices()]


@examples(100)
@given(moves(most_stages=1), st.data())
def test_the_last_owner_of_a_slice_is_named_when_it_is_missing(move, data):
    src = cut(move.entries, move.src)
    name = data.draw(st.sampled_from(sorted(move.src.layouts)))
    owners = data.draw(st.sampled_from(groups(move.src, name)))
    whole_files = data.draw(st.booleans()) and len(owners) < len(src)
    for rank in owners:
        if whole_files:
            del src[rank]
        else:
            del src[rank][name]
    if not whole_files and not any(name in held for held in src.values()):
        left = {key: entry for key, entry in move.entries.items() if key != name}
        if left.keys() & move.src.layouts.keys():  # nobody saved it, and no file is missing
            with pytest.raises(PlanError, match="1 weight is in the strategy and in no file"):
                make(catalog_of_entries(src), move.src, None)
            plan = make(catalog_of_entries(src), move.src.with_only(left), None)
            assert carry_out(plan, src) == {0: left}
        return
    with pytest.raises(PlanError) as caught:
        make(catalog_of_entries(src), move.src, move.dst)
    told = {problem.tensor: list(problem.ranks) for problem in caught.value.diagnostics}
    assert told[name] == list(owners)
    if not whole_files:
        assert set(told) == {name}


@examples(100)
@given(moves(most_stages=1), st.data())
def test_all_problems_of_a_plan_are_in_one_error(move, data):
    src = cut(move.entries, move.src)
    broken = data.draw(st.sets(st.sampled_from(sorted(move.src.layouts)), min_size=1))
    expected = set()
    for name in broken:
        entry = src[len(src) - 1][name]
        other = "UInt8" if entry.dtype != "UInt8" else "Int16"
        if len(src) > 1:
            src[len(src) - 1][name] = entry._replace(dtype=other)
            expected.add(name)
    if not expected:
        return
    with pytest.raises(PlanError) as caught:
        make(catalog_of_entries(src), move.src, move.dst)
    assert {problem.tensor for problem in caught.value.diagnostics} == expected
    assert {problem.code for problem in caught.value.diagnostics} == {"dtype"}


@examples(100)
@given(st.data())
def test_bands_of_any_region_partition_it(data):
    shape = data.draw(shapes())
    region = data.draw(regions(shape))
    count = np.zeros(shape, int)
    for band in region.bands(data.draw(st.integers(1, 9))):
        count[slices(band)] += 1
    assert (count[slices(region)] == 1).all()
    assert count.sum() == region.size


# ------------------------------------------------------------------------------------ on disk


def formats_for(move: Move) -> list[str]:
    wide = any(entry.dtype == "Complex128" for entry in move.entries.values())
    return ["ckpt", "hdf5"] if wide else ["ckpt", "safetensors", "hdf5"]


def reshard(source, src, dst, folder, format, engine="inline", options=None):
    """The folder with the outcome of resharding."""
    plan, destination = plan_reshard(
        ckpttool.scan(str(source)),
        src,
        dst,
        str(folder),
        output_options=ckpttool.OutputOptions(format, not_in_target="follow"),
    )
    with ckpttool.open_engine(engine) as executor:
        execute(plan, destination, executor, options=options)
    return folder


@examples(80)
@given(moves(has_state=True), st.data())
def test_resharding_gives_the_slices_of_the_oracle_and_back_again(new_folder, move, data):
    folder, format = new_folder(), st.sampled_from(formats_for(move))
    source = write_ranks(folder / "src", cut(move.entries, move.src), data.draw(format))
    there = reshard(source, move.src, move.dst, folder / "dst", data.draw(format), options=SMALL)
    assert read_ranks(there) == cut(move.entries, move.dst)
    back = reshard(there, move.dst, move.src, folder / "back", data.draw(format))
    assert read_ranks(back) == cut(move.entries, move.src)


@examples(60)
@given(moves(), st.data())
def test_merging_what_was_split_gives_what_there_was(new_folder, move, data):
    folder, format = new_folder(), st.sampled_from(formats_for(move))
    full, end = folder / "full", data.draw(format)
    write_ranks(full, {0: move.entries}, end)
    plan, destination = plan_split(
        ckpttool.scan(str(full)),
        move.dst,
        str(folder / "ranks"),
        output_options=ckpttool.OutputOptions(end, not_in_target="follow"),
    )
    execute(plan, destination, options=SMALL)
    assert read_ranks(folder / "ranks") == cut(move.entries, move.dst)
    catalog = ckpttool.scan(str(folder / "ranks"))
    plan, destination = plan_merge(
        catalog,
        move.dst,
        str(folder / "merged.ckpt"),
        output_options=ckpttool.OutputOptions("ckpt"),
    )
    execute(plan, destination)
    assert read(folder / "merged.ckpt") == move.entries


@examples(40)
@given(moves(has_state=True), st.sampled_from(["ckpt", "hdf5"]))
def test_every_engine_and_every_size_of_bands_writes_the_same_bytes(new_folder, move, format):
    folder = new_folder()
    source = write_ranks(folder / "src", cut(move.entries, move.src), format)
    outcomes = []
    for engine, options in [
        ("inline", None),
        ("inline", CopyOptions(1, 1, 1)),
        ("threads:1", SMALL),
        ("threads:3", SMALL),
        ("threads:3", CopyOptions(7, 1000, 2)),
    ]:
        out = reshard(
            source, move.src, move.dst, folder / f"{len(outcomes)}", format, engine, options
        )
        files = (path for path in out.rglob("*.*") if path.is_file())
        outcomes.append(
            {
                path.relative_to(out): path.read_bytes()
                for path in files
                if path.name != "stamps.json"
            }
        )
    assert len(outcomes[0]) == len(move.dst.ranks) + 1  # and the manifest
    assert all(outcome == outcomes[0] for outcome in outcomes[1:])


@pytest.mark.slow
def test_the_examples_are_as_wide_as_they_should_be():
    seen = set()

    @settings(max_examples=200)  # as many as the tests that they stand for take in full
    @given(moves(has_state=True))
    def look(move):
        seen.update(features(move))

    look()
    wanted = {f"{n} stages" for n in (1, 2, 3)} | {f"{n} axes" for n in range(5)} | set(DTYPES)
    wanted |= {"adam_m.w", "unlisted1", "shared", "empty", "shard", "shard that does not align"}
    wanted |= {"one axis cut by several", "outermost axis not the first"}
    assert not wanted - seen


@pytest.mark.slow
def test_the_examples_of_tables_are_as_wide_as_they_should_be():
    seen = set()

    @settings(max_examples=200)
    @given(table_moves())
    def look(move):
        for side, strategy in (("src", move.src), ("dst", move.dst)):
            layout = strategy.layouts["table"][0]
            seen.update(layout_features(layout))
            seen.add(f"{strategy.stages} stages")
            if layout.fields > 1:
                seen.update(("fields", f"fields and {len(layout.tensor_map)} axes"))
            if len(set(layout.rows)) > 1:
                seen.update((f"uneven {side}", "a part without rows" if 0 in layout.rows else ""))
                seen.add(f"uneven, shard {layout.optimizer_shard > 1}")
        if 0 in move.entries["table"].shape:
            seen.add("empty")

    look()
    wanted = {"fields", "fields and 2 axes", "uneven src", "uneven dst", "a part without rows"}
    wanted |= {"uneven, shard True", "uneven, shard False", "1 stages", "2 stages", "empty"}
    wanted |= {"one axis cut by several", "outermost axis not the first"}
    assert not wanted - seen
