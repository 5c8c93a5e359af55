"""Two strategies, parameter by parameter."""

from __future__ import annotations

import pytest
from hypothesis import given
from msgspec.structs import replace

from ckpttool.model.layout import Layout
from ckpttool.operations.strategy_diff import diff_strategies
from ckpttool.strategy_files.reader import read_strategy
from tests.strategies import examples, moves
from tests.support.checkpoints import ROWS, strategy_of
from tests.support.corpus import GOLDEN

LATE = replace(ROWS, first_rank=4)
EXPANDED = Layout((2, 2), ((1,), (0,)), full_shape=(2, 4))  # as JSON writes ((1, 0),)


def kinds(a, b):
    return {one.name: one.kind for one in diff_strategies(a, b).differences}


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        (ROWS, Layout((2, 2), ((0,), ())), "slices"),
        (ROWS, Layout((2, 2), ((), (1,))), "slices"),
        (ROWS, replace(ROWS, rows=(3, 5)), "slices"),
        (ROWS, replace(ROWS, optimizer_shard=2), "optimizer shard"),
        (Layout((4,), ((0,), ()), fields=3), Layout((4,), ((0,), ())), "slices"),
        (replace(ROWS, full_shape=(8, 4)), replace(ROWS, full_shape=(4, 4)), "shape"),
        (replace(ROWS, full_shape=(8, 4)), ROWS, None),
        (ROWS, Layout((2, 1, 2), ((2,), ())), None),
        (EXPANDED, Layout((2, 2), ((1, 0),)), None),
    ],
)
def test_layouts_differ_if_some_rank_holds_another_slice(a, b, kind):
    for one, other in ((a, b), (b, a)):
        found = diff_strategies(strategy_of({"w": one}), strategy_of({"w": other}))
        assert [(one.name, one.kind) for one in found.differences] == (
            [("w", kind)] if kind else []
        )
        assert found.equal == (kind is None)
        assert found.respelled == (("w",) if kind is None and one != other else ())


def test_names_and_stages_are_compared():
    a = strategy_of({"w": ROWS, "v": ROWS}, {"w": LATE, "u": LATE})
    b = strategy_of({"w": ROWS, "u": ROWS}, {"x": LATE})
    assert kinds(a, b) == {"v": "only in A", "x": "only in B", "u": "stages", "w": "stages"}
    assert kinds(a, a) == {}


def test_other_numbers_of_ranks_are_never_equal():
    a, b = strategy_of({"w": ROWS}), strategy_of({"w": Layout((4, 2), ((0,), ()))})
    assert kinds(a, b) == {"w": "slices"}
    assert not diff_strategies(a, b).equal


@examples(100)
@given(moves())
def test_a_strategy_equals_itself_alone(move):
    assert diff_strategies(move.src, move.src).equal
    found, back = diff_strategies(move.src, move.dst), diff_strategies(move.dst, move.src)
    assert found.equal == back.equal
    assert found.layouts.keys() == back.layouts.keys()
    assert found.tensors == back.tensors
    grids = [
        {n: [(o.ranks, o._grid, o.rows, o.fields) for o in of] for n, of in s.layouts.items()}
        for s in (move.src, move.dst)
    ]
    if grids[0] == grids[1]:
        assert not found.differences


def test_layers_and_states_that_differ_alike_are_one_row():
    shard = replace(ROWS, optimizer_shard=2)
    names = [f"{state}layers.{i}.w" for i in range(8) for state in ("", "adam_m.", "adam_v.")]
    a = strategy_of(dict.fromkeys(names, ROWS) | {"head": ROWS})
    b = strategy_of(dict.fromkeys(names, shard) | {"head": ROWS, "adam_m.layers.3.w": ROWS})
    rows = [(row.pattern, row.prefixes) for row in diff_strategies(a, b).rows]
    assert rows == [
        ("layers.{0-2,4-7}.w", ("", "adam_m.", "adam_v.")),
        ("layers.3.w", ("", "adam_v.")),
    ]
    found = diff_strategies(a, b)
    assert len(found.differences) == 23


def test_patterns_take_the_names_of_the_other_strategy(tmp_path):
    (tmp_path / "hand.yaml").write_text(
        "ckpttool_strategy: 1\nranks: 4\nparameters: {'*.w': [2, 1], v: {axis: 0}}\n"
    )
    hand = read_strategy(str(tmp_path / "hand.yaml"))
    listed = strategy_of(
        {"a.w": ROWS, "b.w": Layout((2, 2), ((0,), ())), "v": Layout((4,), ((0,),))}
    )
    assert kinds(hand, listed) == {"b.w": "slices"}
    assert kinds(listed, hand) == {"b.w": "slices"}
    assert kinds(hand, strategy_of({"a.w": ROWS, "bias": Layout((4,), ((),))})) == {
        "bias": "only in B",
        "v": "only in A",
    }
    rest = (tmp_path / "hand.yaml").read_text() + "otherwise: replicated\n"
    (tmp_path / "rest.yaml").write_text(rest)
    assert kinds(read_strategy(str(tmp_path / "rest.yaml")), listed) == {"b.w": "slices"}
    bias = strategy_of({"bias": Layout((4,), ((),)), "odd": Layout((4,), ((0,),))})
    assert kinds(read_strategy(str(tmp_path / "rest.yaml")), bias) == {
        "odd": "slices",
        "v": "only in A",
    }
    assert kinds(hand, hand) == {}


def test_the_forms_of_one_strategy_are_equal():
    for path in sorted(GOLDEN.glob("samples/*/strategy/strategy_0.json")):
        twin = path.with_suffix(".ckpt")
        if twin.exists() and "pp2" not in str(path):
            found = diff_strategies(read_strategy(str(path)), read_strategy(str(twin)))
            assert found.equal, path


ROW = "{axis: 0}"


@pytest.mark.parametrize(
    ("a", "b", "differences"),
    [
        ("{'l.0.*': replicated, 'l.*': R}", "{'l.*': R, 'l.0.*': replicated}", {"l.*": "order"}),
        ("{'l.*': R}\notherwise: replicated", "{'l.*': R}", {"otherwise": "only in A"}),
        ("{w: [4, 1]}\notherwise: replicated", "{w: [4, 1]}", {"otherwise": "only in A"}),
        ("{w: [4, 1], v: R}", "{v: R, w: [4, 1]}", {}),
        ("{w: [4, 1], 'l.*': R}", "{'l.*': R, w: [4, 1]}", {}),
        ("{l.w: replicated, 'l.*': R}", "{'l.*': R}", {"l.w": "slices"}),
        ("{l.w: R, 'l.*': R}", "{'l.*': R}", {}),
        ("{'l.*': R, l.w: replicated}", "{'l.*': R}", {}),
        ("{w: R}\notherwise: replicated", "{}\notherwise: replicated", {"w": "slices"}),
        ("{w: replicated}\notherwise: replicated", "{v: replicated}\notherwise: replicated", {}),
        ("{'*.w': R}", "{'*.v': R}", {"*.w": "only in A", "*.v": "only in B"}),
    ],
)
def test_the_first_rule_decides_and_otherwise_the_rest(tmp_path, a, b, differences):
    def read(text):
        path = tmp_path / "hand.yaml"
        text = text.replace("R}", ROW + "}").replace("R,", ROW + ",")
        path.write_text(f"ckpttool_strategy: 1\nranks: 4\nparameters: {text}\n")
        return read_strategy(str(path))

    found = kinds(read(a), read(b))
    assert differences.items() <= found.items()
    assert bool(found) == bool(differences)
    mirrored = kinds(read(b), read(a))
    assert found.keys() == mirrored.keys()
