"""The cuts of this run, and the marks that put a test on them."""

from __future__ import annotations

import os

import pytest

from tests.e2e.interop import recipes

SEED = int(os.environ.get("CKPTTOOL_INTEROP_SEED", "1"))
FAMILIES = recipes.families(SEED)
# A stage holds AdaFactor's statistics of other stages' parameters as well, whole and as they were
# at the start; what comes out is not what MindSpore saves then, and need not be.  Of a shard that
# the strategy hides a target does not know.
CUTS = [
    (family, cut)
    for family, cuts in FAMILIES.items()
    for cut in cuts
    if family not in ("adafactor_stages", "hidden")
]
PAIRS = [(a, b) for a in CUTS for b in CUTS if a[0] == b[0] and a != b]


def on(name: str, cuts: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, cuts, indirect=True, ids="-".join)


every_cut = on("cut", CUTS)
every_pair = pytest.mark.parametrize(
    ("src", "dst"), PAIRS, indirect=True, ids=[f"{a[0]}-{a[1]}-to-{b[1]}" for a, b in PAIRS]
)


def next_to(cut: tuple[str, str]) -> tuple[str, str]:
    names = list(FAMILIES[cut[0]])
    return cut[0], names[(names.index(cut[1]) + 1) % len(names)]


every_cut_and_the_next = pytest.mark.parametrize(
    ("dst", "src"), [(cut, next_to(cut)) for cut in CUTS], indirect=True, ids=map("-".join, CUTS)
)
