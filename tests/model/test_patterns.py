"""What is proposed in the place of a pattern, or of a rule, that matches nothing."""

from __future__ import annotations

import pytest

from ckpttool.model.patterns import Pattern, nearest_pattern, unmatched_problems
from ckpttool.model.renames import Rename, rename_problems

NAMES = ("lm_head.weight", "layers.0.attention.w", "layers.1.attention.w", "adam_m.lm_head.weight")


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("re:lm_haed", "re:lm_head"),
        (r"re:^lm_haed\.", r"re:^lm_head\."),
        ("re:layrs[.][01]", "re:layers[.][01]"),
        ("layrs.*", "layers.*"),
        ("lm_haed", "*lm_head*"),
        ("attention", "*attention*"),
        ("^lm_", "re:^lm_"),
        ("re:zzz[.]q", ""),
        ("zzz*", ""),
    ],
)
def test_a_near_pattern_is_of_the_same_kind_and_matches(typed, near):
    assert nearest_pattern(Pattern(typed), NAMES) == near
    assert not near or any(map(Pattern(near).matches, NAMES))


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        (Rename("a.*", "b.*"), "`ckpttool inspect"),  # re:a.*=b.* would write a star
        (Rename("^lm_", "x."), "--rename 're:^lm_=x.'"),
        (Rename(r"re:^lm_haed(\.)", r"x\1"), r"--rename 're:^lm_head(\.)=x\1'"),
        (Rename("layrs.*", "blocks.*"), "--rename 'layers.*=blocks.*'"),
        (Rename("lm_haed", "out"), "--rename '*lm_head*=*out*'"),
    ],
)
def test_a_near_rule_means_the_same(rule, hint):
    (one,) = rename_problems([rule], NAMES, {}, "C", NAMES, {})
    assert one.hint.startswith(hint)


def test_names_of_the_strategy_may_match_and_do_not_count_as_tensors():
    patterns = [Pattern("accu_grads.*"), Pattern("zzz")]
    (one,) = unmatched_problems("--include", patterns, NAMES, "C", absent=["accu_grads.w"])
    assert one.message == "no tensor matches 'zzz'"
    assert one.facts.startswith("4 tensors: ")
