"""Names of tensors tell whose state they are."""

import sys
from collections import Counter

import pytest

from ckpttool.model import names
from ckpttool.model.names import STATE_PREFIXES, map_component_names, map_of_component, parse_name
from tests.support.commands import run_well
from tests.support.corpus import GOLDEN


@pytest.mark.parametrize("prefix", STATE_PREFIXES)
def test_optimizer_state_is_known_by_its_prefix(prefix):
    for parameter in ("layer.weight", "accum.weight"):
        name = parse_name(prefix + parameter)
        assert (name.prefix, name.parameter) == (prefix, parameter)
        assert name.same_shape_parameter == parameter


OTHER_NAMES = [  # of which some are a prefix and nothing else
    "",
    "w",
    "layer.adam_m.w",
    "adam_mw",
    "Moments.w",
    "exp_avg",
    "moment3.w",
    "linear.weight",
    "moments.",
    "exp_avg_sq_row_",
    "x.exp_avg_sq_row_w",
]


@pytest.mark.parametrize("text", OTHER_NAMES)
def test_a_name_without_a_known_prefix_is_no_state(text):
    name = parse_name(text)
    assert (name.prefix, name.parameter, name.reduced_axis) == ("", None, None)


def test_names_of_statistics_tell_the_parameter_and_the_reduced_axis():
    name = parse_name("exp_avg_insta_row_a.b")
    assert (name.parameter, name.reduced_axis, name.same_shape_parameter) == ("a.b", -1, None)
    for text in ("exp_avg_sq_w", "exp_avg.row_w"):
        assert parse_name(text).reduced_axis is None
    moments = ("exp_avg_sq_w", "exp_avg_sq_col_w", "exp_avg.w", "exp_avg_sq.w")
    assert [parse_name(moment).is_second_moment for moment in moments] == [True, True, False, False]


def test_a_state_may_be_a_component_of_a_map_parameter():
    keys = map_component_names("adam_m.emb")[0]
    assert map_of_component(keys) == "adam_m.emb"
    assert parse_name(keys).parameter == keys.removeprefix("adam_m.")


def test_a_name_has_a_layer_and_a_last_component():
    name = parse_name("net.bn.moving_mean")
    assert (name.layer, name.last) == ("net.bn", "moving_mean")
    assert (parse_name("mean").layer, parse_name("mean").last) == ("", "mean")


def test_a_plan_parses_each_name_once_and_matches_the_same_names_once(tmp_path, monkeypatch):
    parsed, matched = Counter(), Counter()

    def count_name(text, *args, **kwargs):
        parsed[text] += 1
        return name_of(text, *args, **kwargs)

    def count_match(listed, metas):
        matched[tuple(listed), tuple(metas.values())] += 1
        return match(listed, metas)

    case = GOLDEN / "optshard_full_adamw"
    words = ["merge", case / "src", "-s", case / "src_strategy.ckpt", "-o"]
    run_well(*words, tmp_path / "first.ckpt")  # imports all modules that it needs
    name_of, match = names.Name, names.match_states
    names._KNOWN.clear()
    monkeypatch.setattr(names, "Name", count_name)
    for name, module in sys.modules.items():
        if name.startswith("ckpttool.") and vars(module).get("match_states") is match:
            monkeypatch.setattr(module, "match_states", count_match)
    run_well(*words, tmp_path / "full.ckpt", "--dry-run")
    assert len(parsed) > 30
    assert {*parsed.values()} == {*matched.values()} == {1}
