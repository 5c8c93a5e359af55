"""What is said of a pattern, or of a rule, that matches nothing."""

from __future__ import annotations

import pytest

from ckpttool.model.patterns import Pattern, unmatched_problems
from ckpttool.model.renames import Rename, rename_problems

NAMES = (
    "layers.0.self_attn.qkv_proj.weight",
    "layers.0.mlp.gate_up_proj.weight",
    "lm_head.weight",
    "adam_m.lm_head.weight",
)
TYPED = ("*.self_attn.q_proj.*", "*.mlp.gate_proj.*", "lm_haed", "re:^lm_haed", "zzz*")


@pytest.mark.parametrize("typed", TYPED)
def test_the_first_names_are_shown_for_a_pattern_that_matches_nothing(typed):
    (one,) = unmatched_problems([Pattern(typed)], NAMES, "C")
    assert one.message == f"no tensor matches {typed!r}"
    assert one.facts == f"4 tensors: {', '.join(NAMES[:3])} and 1 more"
    assert one.hint == "`ckpttool inspect --all C` lists the names"


@pytest.mark.parametrize("typed", TYPED)
def test_no_rule_is_proposed_for_one_that_matches_nothing(typed):
    (one,) = rename_problems([Rename(typed, "new")], NAMES, {}, "C", NAMES, {})
    (same,) = unmatched_problems([Pattern(typed)], NAMES, "C")
    assert one == same


def test_names_of_the_strategy_may_match_and_do_not_count_as_tensors():
    patterns = [Pattern("accu_grads.*"), Pattern("zzz")]
    (one,) = unmatched_problems(patterns, NAMES, "C", absent=["accu_grads.w"])
    assert one.message == "no tensor matches 'zzz'"
    assert one.facts.startswith("4 tensors: ")
