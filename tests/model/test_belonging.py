"""Names, types and shapes tell to what a tensor belongs."""

import pytest

from ckpttool.model.belonging import (
    WEIGHT,
    Belonging,
    count_roles,
    find_belongings,
    format_roles,
    may_count,
    owners_of,
)
from ckpttool.model.choices import TensorOptions
from ckpttool.model.tensors import TensorMeta


def metas_of(**shapes):
    return {name: TensorMeta(name, "Float32", shape) for name, shape in shapes.items()}


def find(tensors, listed=(), counting=()):
    metas = {name: TensorMeta(name, *what) for name, what in tensors.items()}
    found = find_belongings(listed, metas, counting)
    return {name: (one.role, one.of) for name, one in found.items()}


W, ONE = ("Float32", (4, 3)), ("Float32", ())


@pytest.mark.parametrize("prefix", ["adam_m.", "moments.", "main_param.", "accu_grads."])
def test_state_belongs_to_its_parameter(prefix):
    assert find({"a.w": W, f"{prefix}a.w": W}) == {f"{prefix}a.w": ("state", "a.w")}


@pytest.mark.parametrize("name", ["adam_v.gone.w", "exp_avg_sq_row_gone.w"])
def test_state_whose_parameter_is_absent_belongs_to_it_all_the_same(name):
    tensors = {"w": W, "adam_v.w": W, "exp_avg_sq_row_w": ("Float32", (4,)), name: W}
    assert find(tensors)[name] == ("state", "gone.w")


@pytest.mark.parametrize("prefix", ["ema.", "swap."])
def test_a_copy_has_the_shape_and_the_type_of_its_parameter(prefix):
    assert find({"w": W, f"{prefix}w": W}) == {f"{prefix}w": ("copy", "w")}
    for other in (("Float16", (4, 3)), ("Float32", (3, 4))):
        assert find({"w": W, f"{prefix}w": other}).get(f"{prefix}w", ("weight",))[0] == "weight"
    assert find({"v": W, f"{prefix}w": W}) == {}


@pytest.mark.parametrize("prefix", ["mine.", "teacher."])
def test_an_unknown_prefix_is_that_of_a_weight_which_belongs_to_another(prefix):
    assert find({"w": W, f"{prefix}w": W}) == {f"{prefix}w": ("weight", "w")}


@pytest.mark.parametrize(
    "name", ["global_step", "updates", "fake_lr", "beta1_power", "mu_product_w", "eta_w"]
)
def test_numbers_of_training_are_counters(name):
    owner = "w" if name.endswith("_w") else None
    assert find({"w": W, name: ONE}, listed=["w"]) == {name: ("counter", owner)}


@pytest.mark.parametrize("dtype", ["Int32", "Bool"])
def test_a_single_value_that_is_no_float_counts_outside_of_layers_only(dtype):
    tensors = {"w": W, "steps": (dtype, (1,)), "bn.number": (dtype, (1,))}
    assert find(tensors) == {"steps": ("counter", None)}


def test_a_rate_of_several_steps_is_a_counter_and_matrices_of_thor_are_state():
    tensors = {"w": W, "learning_rate": ("Float32", (9,)), "matrix_a_inv_0": W, "updates": W}
    assert find(tensors) == {"learning_rate": ("counter", None), "matrix_a_inv_0": ("state", None)}


def test_a_single_float_is_a_weight_unless_its_value_counts():
    tensors = {"w": W, "logit_scale": ONE, "seen": ONE}
    assert find(tensors) == {}
    assert find(tensors, counting=["seen"]) == {"seen": ("counter", None)}
    metas = {n: TensorMeta(n, *one) for n, one in tensors.items()}
    assert find_belongings((), metas, ["seen"])["seen"].is_model


@pytest.mark.parametrize("name", ["momentum", "loss_scale"])
def test_a_matrix_with_the_name_of_a_counter_is_a_weight(name):
    assert find({"v": W, name: W}) == {}


@pytest.mark.parametrize("more", [{"adam_m.seen": ONE}, {"seen": ("Int32", ())}])
def test_a_number_with_state_or_of_a_known_kind_needs_no_value(more):
    metas = {n: TensorMeta(n, *one) for n, one in ({"w": W, "seen": ONE} | more).items()}
    assert may_count(["w"], metas) == frozenset()


def test_a_number_that_no_strategy_lists_may_count():
    metas = {n: TensorMeta(n, *one) for n, one in {"w": W, "a": ONE, "b.c": ONE}.items()}
    assert may_count(["w", "a"], metas) == {"b.c"}
    assert may_count([], metas) == {"a", "b.c"}


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_a_scale_belongs_to_a_weight_in_float8(suffix):
    scale = {f"a.weight{suffix}": ("Float32", (1, 1))}
    metas = {n: TensorMeta(n, *one) for n, one in scale.items()}
    metas["a.weight"] = TensorMeta("a.weight", "Float8E4M3FN", (4, 3))
    assert find_belongings((), metas) == {
        "a.weight": Belonging("weight", scale=f"a.weight{suffix}"),
        f"a.weight{suffix}": Belonging("scale", "a.weight"),
    }
    assert find({"a.weight": ("BFloat16", (4, 3))} | scale) == {}


def test_a_state_of_a_copy_goes_with_the_copy_and_its_parameter():
    found = find_belongings([], metas_of(**{"w": (2,), "ema.w": (2,), "adam_m.ema.w": (2,)}))
    assert [*owners_of("adam_m.ema.w", found)] == ["ema.w", "w"]
    assert [*owners_of("w", found)] == []
    assert [*owners_of("mine.w", {"mine.w": Belonging("weight", "w")})] == []


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"exclude": ["w"]}, "v adam_m.v ema.v mine.w"),
        ({"exclude": ["adam_m.w"]}, "w v adam_m.v ema.w ema.v mine.w"),
        ({"include": ["w"]}, "w"),
        ({"include": ["adam_*", "v"], "exclude": ["w"]}, "v adam_m.w adam_m.v"),
        ({"include": ["*w"], "exclude": ["ema.*"]}, "w adam_m.w mine.w"),
        ({"weights_only": True}, "w v mine.w"),
        ({"weights_only": True, "exclude": ["v"]}, "w mine.w"),
    ],
)
def test_what_belongs_to_an_excluded_parameter_goes_with_it(options, wanted):
    names = ["w", "v", "adam_m.w", "adam_m.v", "ema.w", "ema.v", "mine.w"]
    belongings = find_belongings([], metas_of(**dict.fromkeys(names, (4, 3))))
    assert TensorOptions(**options).choose(names, belongings) == {*wanted.split()}


@pytest.mark.parametrize("text", ["bf16", "bf16:*"])
def test_a_counter_is_never_cast(text):
    options, meta = TensorOptions(dtype=[text]), TensorMeta("updates", "Float32", ())
    assert options.dtype_of(meta, Belonging("counter")) == "Float32"
    assert options.dtype_of(meta, WEIGHT) == "BFloat16"


def test_a_cast_without_a_pattern_is_for_weights_and_copies():
    options, meta = TensorOptions(dtype=["bf16"]), TensorMeta("w", "Float32", (4, 3))
    roles = {role: options.dtype_of(meta, Belonging(role)) for role in ("copy", "state", "scale")}
    assert roles == {"copy": "BFloat16", "state": "Float32", "scale": "Float32"}


def test_roles_are_counted_for_people():
    belongings = {"adam_m.w": Belonging("state", "w"), "ema.w": Belonging("copy", "w")}
    roles = count_roles(["w", "adam_m.w", "ema.w", "ema.w"], belongings)
    assert format_roles(roles) == "1 weight, 1 state, 2 copies"
