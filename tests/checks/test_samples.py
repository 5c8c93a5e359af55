"""Samples of contents, held against what a strategy says of them."""

import numpy as np
import pytest

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from tests.support.checkpoints import catalog_on_disk, cut, noise, write_ranks
from tests.support.diagnostics import graded, is_warning
from tests.support.readers import Entry, entry_of, read

COLUMNS = Layout((4,), ((), (0,)))  # four slices, one on each rank


def held_by(folder, text):
    """A checkpoint of as many ranks as there are letters, each with what its letter says."""
    held = {rank: {"w": noise(letter, "Int32", (4, 3))} for rank, letter in enumerate(text)}
    return catalog_on_disk(folder / "src", held)


def warnings(folder, catalog, layout):
    strategy = join_stages({0: {"w": layout}})
    plan, _ = ckpttool.plan_merge(
        catalog, strategy, str(folder / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
    )
    return [note.text for note in plan.notes if is_warning(note)]


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ("abcd", None),
        ("abab", "ranks 0, 2 | ranks 1, 3 hold the same\n  Try: the strategy of this run;"),
        ("abcb", "ranks 1, 3 hold the same"),
        ("aaaa", "all ranks hold the same\n  Try: merge or split with --replicated if"),
    ],
)
def test_slices_that_are_the_same_in_any_pair_are_pointed_out(tmp_path, held, said):
    found = warnings(tmp_path, held_by(tmp_path, held), COLUMNS)
    assert len(found) == (said is not None)
    assert not found or said in found[0]
    text = "w: slices that should differ are equal\n  "
    assert not found or found[0].startswith(text)


def all_the_same(folder, **others):
    """Four ranks that hold the same of w, more than a page of it, and others as they are made."""
    held = {
        rank: {"w": noise("w", "Int32", (32, 32))}
        | {name: made(rank) for name, made in others.items()}
        for rank in range(4)
    }
    catalog = catalog_on_disk(folder / "src", held)
    return catalog, join_stages({0: dict.fromkeys(held[0], COLUMNS)})


def test_ranks_that_all_hold_the_same_wherever_the_strategy_cuts_are_refused(tmp_path):
    zeros = Entry("Int32", (9, 9), bytes(324))  # tell nothing
    catalog, strategy = all_the_same(tmp_path, z=lambda rank: zeros)
    place = str(tmp_path / "m.ckpt")
    said = r"^w: sharded in the strategy, and in full on all ranks\n"
    said += r"  \(32, 32\) would become \(32, 128\)\n  Try: merge or split with --replicated"
    with pytest.raises(ckpttool.PlanError, match=said):
        ckpttool.plan_merge(catalog, strategy, place, output_options=ckpttool.OutputOptions("ckpt"))
    ckpttool.plan_merge(
        catalog,
        strategy,
        place,
        resolve_options=ckpttool.ResolveOptions(trust_strategy=True),
        output_options=ckpttool.OutputOptions("ckpt"),
    )


def test_one_tensor_of_which_slices_differ_speaks_for_the_strategy(tmp_path):
    catalog, strategy = all_the_same(tmp_path, u=lambda rank: noise(f"u{rank}", "Int32", (4, 3)))
    plan, _ = ckpttool.plan_merge(
        catalog, strategy, str(tmp_path / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
    )
    (warning,) = [note.text for note in plan.notes if is_warning(note)]
    assert warning.startswith("w: slices")
    assert "\n  all ranks hold the same\n  Try: merge or split with --replicated" in warning


def test_where_ranks_are_missing_as_well_it_is_an_error(tmp_path):
    halves = Layout((2, 2), ((), (0,)))
    catalog = held_by(tmp_path, "aa")
    with pytest.raises(
        ckpttool.PlanError, match=r"\n  ranks 2, 3 without a file; all ranks hold the same"
    ):
        warnings(tmp_path, catalog, halves)
    strategy = join_stages({0: {"w": halves}})
    plan, _ = ckpttool.plan_merge(
        catalog,
        strategy,
        str(tmp_path / "m.ckpt"),
        resolve_options=ckpttool.ResolveOptions(trust_strategy=True),
        output_options=ckpttool.OutputOptions("ckpt"),
    )
    assert any("replicas were not compared (--trust-strategy)" in note.text for note in plan.notes)


def test_one_such_tensor_among_others_is_enough(tmp_path):
    held = {
        rank: {
            "w": noise(f"w{rank}", "Int32", (4, 3)),
            "u": noise(f"u{rank}", "Int32", (4, 3)),
            "v": noise("v", "Int32", (4, 3)),
        }
        for rank in range(4)
    }
    catalog = catalog_on_disk(tmp_path / "src", held)
    strategy = join_stages({0: dict.fromkeys(held[0], COLUMNS)})
    plan, _ = ckpttool.plan_merge(
        catalog, strategy, str(tmp_path / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
    )
    (warning,) = [note.text for note in plan.notes if is_warning(note)]
    assert warning.startswith("v: slices")
    assert "\n  all ranks hold the same\n  Try: merge or split with --replicated" in warning


def test_slices_that_are_the_same_are_a_finding_of_verify(tmp_path):
    strategy = join_stages({0: {"w": COLUMNS}})
    (found,) = ckpttool.verify(held_by(tmp_path, "abab"), strategy, deep=True).findings
    assert graded(found) == ("warning", "equal_slices")
    found = ckpttool.verify(*all_the_same(tmp_path / "all"), deep=True).findings[0]
    assert graded(found) == ("error", "contradicted")


@pytest.mark.parametrize(("text", "odd"), [("aaba", (2,)), ("aabb", (0, 1, 2, 3))])
def test_samples_name_the_odd_ranks_as_deep_does(tmp_path, text, odd):
    strategy = join_stages({0: {"w": Layout((4,), ((), ()))}})
    catalog = held_by(tmp_path, text)
    for deep in (False, True):
        (found,) = ckpttool.verify(catalog, strategy, deep=deep).findings
        assert (found.code, found.ranks) == ("replica", odd)


def test_each_tensor_with_equal_slices_names_its_own_line(tmp_path):
    held = {
        rank: {name: noise(name, "Int32", (4, 3)) for name in ("w", "u")}
        | {"v": noise(f"v{rank}", "Int32", (4, 3))}
        for rank in range(4)
    }
    path = tmp_path / "hand.yaml"
    lines = [
        "ckpttool_strategy: 1",
        "ranks: 4",
        "parameters:",
        "  w: {axis: 0}",
        "  '*': {axis: 0}",
    ]
    path.write_text("\n".join(lines))
    catalog = catalog_on_disk(tmp_path / "src", held)
    found = ckpttool.verify(catalog, ckpttool.read_strategy([str(path)]), deep=True).findings
    codes = [
        ("contradicted", "w"),
        ("equal_slices", "u"),
    ]  # of two that line 5 matches, one is right
    assert [(one.code, one.tensor) for one in found] == codes
    assert found[0].where == f"{path}, line 4"
    assert found[1].hint.startswith(f"correct {path}, line 5, or add a line above it")
    assert {one.facts for one in found} == {"all ranks hold the same; what fits: replicated"}


MESH = Layout((2, 4), ((0,), ()))  # four slices, two replicas of each
INNER = Layout((4, 2), ((), (1,)))
COLUMNS_OF_8 = Layout((2, 4), ((), (0,)))


def plan_by_hand(folder, true, line, shape=(16, 8), **options):
    """Merge what a strategy file omits, and a hand-written line describes."""
    layouts = {"v": Layout((8,), ((0,), ())), "u": Layout((8,), ((0,), ()))}
    entries = {name: noise(name, "Float32", shape) for name in ("v", "u", "w")}
    catalog = catalog_on_disk(
        folder / "src", cut(entries, join_stages({0: {**layouts, "w": true}}))
    )
    path = folder / "more.yaml"
    path.write_text(f"ckpttool_strategy: 1\nparameters:\n  w: {line}\n")
    ckpttool.write_strategy(join_stages({0: layouts}), str(folder / "s.ckpt"))
    strategy = ckpttool.read_strategy([str(folder / "s.ckpt"), str(path)])
    resolve_options = ckpttool.ResolveOptions(**options)
    return ckpttool.plan_merge(catalog, strategy, str(folder / "m.h5"), resolve_options)


@pytest.mark.parametrize(
    ("true", "line", "code", "fits"),
    [
        (MESH, "{axis: 0}", "contradicted", "{device_matrix: [2, 4], tensor_map: [0, -1]}"),
        (INNER, "{axis: 1}", "contradicted", "{device_matrix: [4, 2], tensor_map: [-1, 1]}"),
        (COLUMNS_OF_8, "[2, 4]", "contradicted", "{device_matrix: [2, 4], tensor_map: [-1, 0]}"),
        (Layout((8,), ((), ())), "{axis: 0}", "contradicted", "replicated"),
        (MESH, "replicated", "replica", "{device_matrix: [2, 4], tensor_map: [0, -1]}"),
        (MESH, "{axis: 0, parts: 4}", "replica", "{device_matrix: [2, 4], tensor_map: [0, -1]}"),
    ],
)
def test_a_hand_written_line_is_refused_with_the_one_that_fits(tmp_path, true, line, code, fits):
    with pytest.raises(ckpttool.PlanError) as caught:
        plan_by_hand(tmp_path, true, line)
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.tensor) == (code, "w")
    right = fits if fits == "replicated" else f"{fits} makes (16, 8)"
    assert right in problem.facts.partition("what fits: ")[2]
    assert "more.yaml, line 3" in problem.hint
    assert ("replicated" in problem.facts) == (fits == "replicated")
    plan_by_hand(tmp_path / "again", true, fits)


@pytest.mark.parametrize(
    ("true", "line"),
    [
        (COLUMNS_OF_8, "{axis: 0}"),  # another axis than the line says
        (Layout((2, 2, 2), ((1,), (0,))), "{axis: 0}"),  # both axes
        (Layout((2, 2, 2), ((0,), (2,))), "{axis: 1}"),  # with the replicas between
        (Layout((2, 2, 2), ((1,), (0,))), "{device_matrix: [2, 2, 2], tensor_map: [2, 1]}"),
    ],
)
def test_lines_that_fit_are_named_for_all_axes_with_their_shapes(tmp_path, true, line):
    """Contents show which ranks are equal, and not which axis is sharded."""
    with pytest.raises(ckpttool.PlanError) as caught:
        plan_by_hand(tmp_path, true, line)
    (problem,) = caught.value.diagnostics
    listed = problem.facts.partition("what fits: ")[2].partition("; contents do not show")[0]
    lines = [one.partition(" makes ")[::2] for one in listed.split(" or ")]
    assert len(lines) > 1
    of_model = [text for text, shape in lines if shape == "(16, 8)"]
    whole = noise("w", "Float32", (16, 8))
    merged = []
    for number, text in enumerate(of_model):
        plan, destination = plan_by_hand(tmp_path / str(number), true, text)
        ckpttool.execute(plan, destination)
        merged.append(read(tmp_path / str(number) / "m.h5")["w"])
    assert whole in merged


def test_a_hand_written_line_that_no_layout_fits_may_be_trusted(tmp_path):
    catalog = held_by(tmp_path, "aaab")
    (tmp_path / "hand.yaml").write_text(
        "ckpttool_strategy: 1\nranks: 4\nparameters:\n  w: replicated\n"
    )
    strategy = ckpttool.read_strategy([str(tmp_path / "hand.yaml")])
    with pytest.raises(ckpttool.PlanError, match="or --trust-strategy") as caught:
        ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"))
    (problem,) = caught.value.diagnostics
    assert "what fits" not in problem.facts


def test_ranks_that_are_missing_in_another_stage_show_nothing(tmp_path):
    """Two slices of a few Bool that are equal, and a rank of the other stage that is lost."""
    first, second = Layout((2,), ((0,),)), Layout((2,), ((), ()))
    held = {rank: {"a": noise("a", "Bool", (4,))} for rank in (0, 1)} | {
        2: {"b": noise("b", "Float32", (4, 3))}
    }
    catalog = catalog_on_disk(tmp_path / "src", held)
    strategy = join_stages({0: {"a": first}, 1: {"b": second}})
    plan, _ = ckpttool.plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"))
    codes = [note.code for note in plan.notes if is_warning(note)]
    assert codes == ["missing_replica", "equal_slices"]


@pytest.mark.parametrize(
    ("dtype", "values", "is_refused"),
    [("Bool", 2, False), ("Float32", 2, False), ("Float32", 1000, True)],
)
def test_slices_are_weighed_by_the_values_that_they_could_have(tmp_path, dtype, values, is_refused):
    """Tables of signs repeat on all ranks by design; so may experts, and only the user knows."""
    made = np.random.default_rng(1).integers(0, values, (2, 64, 32))
    kind = {"Bool": "u1", "Float32": "f4"}[dtype]
    tables = [Entry(dtype, (64, 32), table.astype(kind).tobytes()) for table in made]
    held = {
        rank: {"a": tables[0], "b": tables[1], "w": noise(f"w{rank}", "Float32", (4, 3))}
        for rank in range(2)
    }
    catalog = catalog_on_disk(tmp_path / "src", held)
    strategy = join_stages({0: dict.fromkeys(held[0], Layout((2,), ((0,), ())))})
    place = str(tmp_path / "m.ckpt")
    if not is_refused:
        plan, _ = ckpttool.plan_merge(catalog, strategy, place)
        assert {note.code for note in plan.notes if is_warning(note)} == {"equal_slices"}
        return
    with pytest.raises(ckpttool.PlanError) as caught:
        ckpttool.plan_merge(catalog, strategy, place)
    assert {one.code for one in caught.value.diagnostics} == {"contradicted"}
    for one in caught.value.diagnostics:
        assert one.message.endswith("in 2 of 3 sampled tensors")
        assert one.facts == "all ranks hold the same"
        assert "or --trust-strategy if slices repeat by design" in one.hint
    ckpttool.plan_merge(catalog, strategy, place, ckpttool.ResolveOptions(trust_strategy=True))


@pytest.mark.parametrize("shard", [1, 2])
@pytest.mark.parametrize("experts", [4, 8])
def test_experts_that_are_copies_of_one_layer_may_be_trusted(tmp_path, experts, shard):
    layout = Layout((shard, 4), ((0,), (), ()), shard)
    one = noise("w", "Float32", (1, 32, 16)).array()
    full = entry_of(np.concatenate([one] * experts * shard))
    strategy = join_stages({0: {"w": layout}})
    catalog = catalog_on_disk(tmp_path / "src", cut({"w": full}, strategy))
    place = str(tmp_path / "m.ckpt")
    with pytest.raises(ckpttool.PlanError, match="--trust-strategy if slices repeat") as caught:
        ckpttool.plan_merge(catalog, strategy, place)
    (problem,) = caught.value.diagnostics
    assert problem.code == "contradicted"
    assert problem.facts  # what was seen: shapes, or the ranks
    options = ckpttool.ResolveOptions(trust_strategy=True)
    plan, destination = ckpttool.plan_merge(catalog, strategy, place, options)
    ckpttool.execute(plan, destination)
    assert read(tmp_path / "m.ckpt") == {"w": full}


def test_slices_of_an_optimizer_shard_that_are_no_slices_are_a_finding_of_verify(tmp_path):
    strategy = join_stages({0: {"w": Layout((4,), ((), ()), 4)}})
    found = ckpttool.verify(held_by(tmp_path, "aaaa"), strategy, deep=True).findings
    said = "sharded further in the strategy than in the files"
    assert [(one.message, one.tensor, one.ranks) for one in found] == [(said, "w", (0, 1, 2, 3))]


@pytest.mark.parametrize("layout", [Layout((2,), ((0,), ())), Layout((2,), ((), (0,)))])
def test_stages_that_cut_what_they_share_in_other_ways_are_compared(tmp_path, layout):
    full = noise("e", "Int32", (40, 40))
    rows, array = Layout((2,), ((0,), ())), full.array()

    def take(one, rank, change=0):
        part = array[one.region(rank, array.shape).start[0] :][: one.slice_shape(rank, (40, 40))[0]]
        start, stop = (
            one.region(rank, array.shape).start[1],
            one.region(rank, array.shape).stop[1],
        )
        part = part[:, start:stop] + change
        return type(full)("Int32", part.shape, part.tobytes())

    def plan(change):
        held = {rank: {"e": take(rows, rank)} for rank in (0, 1)}
        held |= {rank + 2: {"e": take(layout, rank, change)} for rank in (0, 1)}
        src = write_ranks(tmp_path / f"src{change}", held, "ckpt")
        strategy = join_stages({0: {"e": rows}, 1: {"e": layout}})
        out = str(tmp_path / "m.ckpt")
        return ckpttool.plan_merge(
            ckpttool.scan(str(src)), strategy, out, output_options=ckpttool.OutputOptions("ckpt")
        )

    plan(0)
    fact = r"e: different between stages that share it\n  ranks 0, 1 differ from ranks 2, 3"
    with pytest.raises(ckpttool.PlanError, match=fact):
        plan(1)


def test_gradients_of_stages_are_each_its_own(tmp_path):
    held = {rank: {"accu_grads.e": noise(f"g{rank}", "Int32", (4,))} for rank in (0, 1)}
    catalog = catalog_on_disk(tmp_path / "src", held)
    layouts = {"accu_grads.e": Layout((1,), ((),))}
    strategy = join_stages({0: layouts, 1: layouts})
    ckpttool.plan_merge(
        catalog, strategy, str(tmp_path / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
    )
