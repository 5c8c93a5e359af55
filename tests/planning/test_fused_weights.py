"""Weights that each rank fused for itself are pointed out when their slices are joined or cut."""

import pytest
from msgspec.structs import replace

from ckpttool.model.choices import fused_axes
from ckpttool.model.layout import Layout
from ckpttool.model.plan import Target
from tests.support.checkpoints import catalog_of, strategy_of
from tests.support.in_memory import plan_in_memory

FUSED = ["layers.0.attention.w_qkv.weight", "mlp.linear_fc1.bias", "model.mlp.experts.weight1"]


def layout_of(name, ranks, shard=1):
    axis = 1 if name.endswith("weight1") else 0
    cut = tuple((0,) if one == axis else () for one in range(2))
    return Layout((shard, ranks), cut, shard)


def notes_of(name, src, dst):
    ranks = {rank: {name: (24, 24)} for rank in ([0] if src is None else src.ranks)}
    number = len(dst.ranks) if dst is not None else 1
    paths = {rank: f"out/{rank}" for rank in range(number)}
    made = plan_in_memory(catalog_of(ranks), src, Target("ckpt", paths, number, dst), {})
    return [note for note in made.notes if "fused" in note.message]


def by_hand(name, ranks):
    return replace(inference(name, ranks), handwritten={name: "more.yaml, line 3"})


def inference(name, ranks):
    return strategy_of({name: layout_of(name, ranks)})


def training(name, ranks, shard=1):
    layout = layout_of(name, ranks, shard)
    return strategy_of({name: layout, f"adam_m.{name}": layout})


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("make", [by_hand, inference])
def test_fused_weights_that_change_their_slices_are_noted_once(name, make):
    for src, dst in ((make(name, 2), None), (None, make(name, 2)), (make(name, 4), make(name, 2))):
        (note,) = notes_of(name, src, dst)
        assert note.message == "1 fused weight changes its number of slices"
        assert note.facts == f"{name}; wrong if each rank fused its own parts"


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("model.layers.0.attention.wqkv.weight", [0]),
        ("model.layers.0.self_attn.W_pack.weight", [0]),
        ("layers.0.w_qkv.weight_scale", [0]),
        ("layers.0.w_qkv._layer.matmul.weight", [0]),
        ("adam_v.encoder.self_attn.in_proj_weight", [0]),
        ("blocks.0.attn.to_qkv.weight", [0]),
        ("layers.0.mlp.experts.3.linear_fc1.weight", [0]),
        ("decoder.layernorm_mlp.fc1_weight", [0]),
        ("transformer.h.0.attn.c_attn.weight", [0, 1]),
        ("layers.0.mlp.experts.gate_up_proj", [0, 1]),
        ("layers.0.mlp.experts.w13_weight", [0, 1]),
        ("layers.0.attention.wo.weight", []),
        ("layers.0.mlp.fc1.weight", []),
        ("layers.0.linear_kv_up_proj.weight", []),
    ],
)
def test_a_word_in_any_part_of_a_name_shows_a_fused_weight(name, axes):
    found = []
    for axis in range(2):
        cut = Layout((2,), tuple((0,) if one == axis else () for one in range(2)))
        found += [axis] * len(notes_of(name, strategy_of({name: cut}), None))
    assert found == axes


def test_experts_may_be_spread_over_another_number_of_ranks():
    assert fused_axes("layers.0.experts.gate_up_proj", 3) == (1, 2)


def test_several_weights_have_their_numbers():
    names = [FUSED[0], FUSED[1]]
    src = strategy_of({name: layout_of(name, 2) for name in names})
    ranks = {rank: dict.fromkeys(names, (24, 24)) for rank in src.ranks}
    made = plan_in_memory(catalog_of(ranks), src, Target("ckpt", {0: "out/0"}), {})
    assert "2 fused weights change their number of slices" in [note.message for note in made.notes]


@pytest.mark.parametrize("name", FUSED)
def test_one_side_of_training_does_not_vouch_for_the_other(name):
    assert notes_of(name, training(name, 2), inference(name, 4))
    assert notes_of(name, by_hand(name, 2), training(name, 4))


@pytest.mark.parametrize("name", FUSED)
def test_slices_of_a_full_tensor_are_not_noted(name):
    assert not notes_of(name, training(name, 2), training(name, 4))
    assert not notes_of(name, training(name, 2), None)
    assert not notes_of(name, inference(name, 2), by_hand(name, 2))  # the same number
    assert not notes_of("layers.0.wo.weight", by_hand("layers.0.wo.weight", 2), None)


def test_an_optimizer_shard_joins_what_one_rank_fused():
    name = FUSED[0]
    shard = strategy_of({name: layout_of(name, 2, shard=2)})
    assert not notes_of(name, shard, inference(name, 2))
