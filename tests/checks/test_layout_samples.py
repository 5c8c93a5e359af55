"""Samples of contents, held against what a strategy says of them."""

import shlex

import numpy as np
import pytest

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from ckpttool.operations.look import Subject
from ckpttool.operations.verification import verify
from ckpttool.strategy_files.handwritten import parse_handwritten
from tests.support.checkpoints import catalog_on_disk, cut, noise, write_ranks
from tests.support.commands import run
from tests.support.diagnostics import is_warning
from tests.support.plans import plan_merge
from tests.support.readers import Entry


def held_by(folder, text):
    """A checkpoint of as many ranks as there are letters, each with what its letter says."""
    held = {rank: {"w": noise(letter, "Int32", (4, 3))} for rank, letter in enumerate(text)}
    return catalog_on_disk(folder / "src", held)


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
    found = verify(Subject(catalog, ckpttool.read_strategy([str(path)])), deep=True).findings
    codes = [
        ("contradicted", "w"),
        ("equal_slices", "u"),
    ]  # of two that line 5 matches, one is right
    assert [(one.code, one.tensor) for one in found] == codes
    assert found[0].where == f"{path}, line 4"
    assert f"strategy draft {catalog.root} -o draft.yaml`" in found[1].hint
    assert f"correct {path}, line 5; " in found[1].hint
    assert {one.facts for one in found} == {"all ranks hold the same"}


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
    return plan_merge(catalog, strategy, str(folder / "m.h5"), resolve_options)


@pytest.mark.parametrize(
    ("true", "line", "code"),
    [
        (MESH, "{axis: 0}", "contradicted"),
        (INNER, "{axis: 1}", "contradicted"),
        (COLUMNS_OF_8, "[2, 4]", "contradicted"),
        (COLUMNS_OF_8, "{axis: 0}", "contradicted"),
        (Layout((2, 2, 2), ((1,), (0,))), "{axis: 0}", "contradicted"),
        (Layout((2, 2, 2), ((0,), (2,))), "{axis: 1}", "contradicted"),
        (Layout((8,), ((), ())), "{axis: 0}", "contradicted"),
        (MESH, "replicated", "replica"),
        (MESH, "{axis: 0, parts: 4}", "replica"),
    ],
)
def test_the_draft_that_a_refused_line_names_has_the_true_layout(tmp_path, true, line, code):
    with pytest.raises(ckpttool.PlanError) as caught:
        plan_by_hand(tmp_path, true, line)
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.tensor) == (code, "w")
    assert problem.hint.endswith("explains")
    assert f"{tmp_path}/more.yaml, line 3" in problem.hint
    _, command, *_ = problem.hint.split("`")
    words = [word.replace("draft.yaml", f"{tmp_path}/d.yaml") for word in shlex.split(command)]
    assert run(*words[1:]).exit_code == 0
    text = (tmp_path / "d.yaml").read_text()
    values = [line.partition(":" if "replicated" in line else "#")[2] for line in text.split("\n")]
    drafted = []
    for value in filter(None, map(str.strip, values)):
        if value.startswith(("{", "replicated")):
            data = f"ckpttool_strategy: 1\nranks: 8\nparameters:\n  w: {value}\n".encode()
            rules = parse_handwritten(data, "d.yaml", None).rules
            drafted += rules.rules[0].layouts(2)
    assert any(true.has_same_slices(layout) for layout in drafted)
    assert all(sorted(a.slice_owners()) == sorted(true.slice_owners()) for a in drafted)


def test_a_hand_written_line_that_no_layout_fits_may_be_trusted(tmp_path):
    catalog = held_by(tmp_path, "aaab")
    (tmp_path / "hand.yaml").write_text(
        "ckpttool_strategy: 1\nranks: 4\nparameters:\n  w: replicated\n"
    )
    strategy = ckpttool.read_strategy([str(tmp_path / "hand.yaml")])
    with pytest.raises(ckpttool.PlanError, match="or --trust-strategy"):
        plan_merge(catalog, strategy, str(tmp_path / "m.ckpt"))


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
        plan, _ = plan_merge(catalog, strategy, place)
        assert {note.code for note in plan.notes if is_warning(note)} == {"equal_slices"}
        return
    with pytest.raises(ckpttool.PlanError) as caught:
        plan_merge(catalog, strategy, place)
    assert {one.code for one in caught.value.diagnostics} == {"contradicted"}
    for one in caught.value.diagnostics:
        assert one.message.endswith("in 2 of 3 sampled tensors")
        assert one.facts == "all ranks hold the same"
        assert "or --trust-strategy if slices repeat by design" in one.hint
    plan_merge(catalog, strategy, place, ckpttool.ResolveOptions(trust_strategy=True))


@pytest.mark.parametrize("layout", [Layout((2,), ((0,), ())), Layout((2,), ((), (0,)))])
def test_stages_that_cut_what_they_share_in_other_ways_are_compared(tmp_path, layout):
    full = noise("e", "Int32", (40, 40))
    rows, array = Layout((2,), ((0,), ())), full.array()

    def take(one, rank, change=0):
        part = array[one.region(rank, array.shape).start[0] :][: one.slice_shape(rank, (40, 40))[0]]
        start = one.region(rank, array.shape).start[1]
        stop = one.region(rank, array.shape).stop[1]
        part = part[:, start:stop] + change
        return type(full)("Int32", part.shape, part.tobytes())

    def plan(change):
        held = {rank: {"e": take(rows, rank)} for rank in (0, 1)}
        held |= {rank + 2: {"e": take(layout, rank, change)} for rank in (0, 1)}
        src = write_ranks(tmp_path / f"src{change}", held, "ckpt")
        strategy = join_stages({0: {"e": rows}, 1: {"e": layout}})
        out = str(tmp_path / "m.ckpt")
        return plan_merge(
            ckpttool.scan(str(src)), strategy, out, output_options=ckpttool.OutputOptions("ckpt")
        )

    plan(0)
    fact = r"e: different between stages that share it\n  ranks 0, 1 differ from ranks 2, 3"
    with pytest.raises(ckpttool.PlanError, match=fact):
        plan(1)
