"""The golden corpus: what lies in ``tests/golden``, what must come out, and how it is compared.

``PROVENANCE.md`` in that folder says where the files come from and what the fields mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.oracle import OracleLayout, join, take
from tests.support.readers import (
    Entry,
    entry_of,
    read,
    read_ckpt,
    read_safetensors,
)

GOLDEN = Path(__file__).parents[1] / "golden"
SAMPLES = GOLDEN / "samples"
BROKEN = GOLDEN / "broken_inputs"

Digest = tuple[str, tuple[int, ...], str]
Ranks = dict[int, dict[str, Digest]]


class Conversion(NamedTuple):
    """One conversion of a case: its inputs, and what every destination rank must hold."""

    case: str
    kind: str  # merge, reshard, split, unified or split_unified
    source: str
    src_strategy: str | None
    dst_strategy: str | None
    origin: str
    ranks: Ranks
    undefined: Ranks  # prescribed by nobody: what MindSpore happened to write

    @property
    def folder(self) -> Path:
        """Return the folder of the case."""
        return GOLDEN / self.case

    @property
    def dtypes(self) -> set[str]:
        """Return the dtypes that must come out."""
        return {dtype for tensors in self.ranks.values() for dtype, _, _ in tensors.values()}


def case_names() -> list[str]:
    """Return the cases with an expectation, without ``broken_inputs`` and ``samples``."""
    return sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))


def a_third(keys: Iterable[str], number: int = 0) -> list[object]:
    """Return parameters of a test, two thirds of them for the exhaustive run."""
    return [
        pytest.param(key, marks=[pytest.mark.exhaustive] if at % 3 != number else [])
        for at, key in enumerate(keys)
    ]


@cache
def expected(case: str) -> dict:
    """Return ``expected.json`` of a case."""
    return json.loads((GOLDEN / case / "expected.json").read_text(encoding="utf-8"))


@cache
def case_facts(case: str) -> dict:
    """Return ``case.json`` of a case."""
    return json.loads((GOLDEN / case / "case.json").read_text(encoding="utf-8"))


def conversion(case: str, kind: str) -> Conversion:
    """Return one conversion of a case."""
    entries = expected(case)["conversions"]
    entry = entries[kind]
    ranks = entry["ranks"]
    if isinstance(ranks, str):  # the same outcome as the conversion named
        ranks = entries[ranks]["ranks"]
    return Conversion(
        case,
        kind,
        entry["source"],
        entry["src_strategy"],
        entry["dst_strategy"],
        entry["origin"],
        unfold(ranks, entry["dst_ranks"]),
        unfold(entry.get("undefined", {}), entry["dst_ranks"]),
    )


def conversions(*kinds: str) -> list[Conversion]:
    """Return all conversions of these kinds, in the order of the cases."""
    return [
        conversion(case, kind)
        for case in case_names()
        for kind in kinds
        if kind in expected(case)["conversions"]
    ]


def unfold(names: dict[str, list], nranks: int) -> Ranks:
    """Turn name -> (content, its ranks) into rank -> name -> content."""
    ranks: Ranks = {rank: {} for rank in range(nranks)}
    for name, contents in names.items():
        for dtype, shape, digest, owners in contents:
            for rank in owners:
                ranks[rank][name] = dtype, tuple(shape), digest
    return ranks


def oracle_layouts(case: str, side: str) -> dict[str, list[OracleLayout]]:
    """Return the layouts of the ``src`` or ``dst`` strategy, one for each stage with the name."""
    strategy = expected(case)["strategies"][side]
    nranks = strategy["devices"] // len(strategy["stages"])
    layouts: dict[str, list[OracleLayout]] = {}
    for stage, names in strategy["stages"].items():
        for name, entry in names.items():
            layout = OracleLayout(
                tuple(entry["dev_matrix"]),
                tuple(tuple(axes) for axes in entry["axes"]),
                entry["opt_size"],
                int(stage) * nranks,
                tuple(entry.get("param_split_shape", ())),
            )
            layouts.setdefault(name, []).append(layout)
    return layouts


def source_ranks(case: str, source: str = "src") -> dict[int, dict[str, Entry]]:
    """Read the files that ``case.json`` names, with the readers of the tests."""
    facts = case_facts(case)["source_files"]
    ranks = {}
    for folder in (GOLDEN / case / source).glob("rank_*"):
        path = folder / facts["file_name"] if source == "src" else next(folder.iterdir())
        read = read_safetensors if path.suffix == ".safetensors" else read_ckpt
        ranks[int(folder.name.removeprefix("rank_"))] = {
            name: modern_scalar(entry) for name, entry in read(path).items()
        }
    return ranks


def modern_scalar(entry: Entry) -> Entry:
    """Remove the dims ``[0]`` that MindSpore 1 and 2.0 give a scalar."""
    if entry.shape == (0,) and entry.data and entry.dtype != "str":
        return entry._replace(shape=())
    return entry


def merged_by_oracle(case: str) -> dict[str, Entry]:
    """Join the full checkpoint with the oracle; an unlisted name is the lowest rank's."""
    ranks = source_ranks(case)
    layouts = oracle_layouts(case, "src")
    merged: dict[str, Entry] = {}
    for rank in sorted(ranks):
        for name, entry in ranks[rank].items():
            if name in merged:
                continue
            if name not in layouts:
                merged[name] = entry
                continue
            layout = layouts[name][0]
            parts = {r: ranks[r][name].array() for r in layout.ranks if name in ranks[r]}
            full = join(parts, layout)
            merged[name] = entry_of(full, entry.dtype)
    return merged


def split_by_oracle(case: str, merged: dict[str, Entry]) -> dict[int, dict[str, Entry]]:
    """Shard the full checkpoint for the destination ranks with the oracle."""
    layouts = oracle_layouts(case, "dst")
    ranks: dict[int, dict[str, Entry]] = {
        rank: {} for rank in range(expected(case)["strategies"]["dst"]["devices"])
    }
    for name, entry in merged.items():
        if name not in layouts:
            for tensors in ranks.values():
                tensors[name] = entry
        for layout in layouts.get(name, []):
            for rank in layout.ranks:
                part = take(entry.array(), layout, rank)
                ranks[rank][name] = entry_of(part, entry.dtype)
    return ranks


def digests(ranks: dict[int, dict[str, Entry]]) -> Ranks:
    """Return what came out, in the form of an expectation."""
    return {
        rank: {name: entry.digest for name, entry in tensors.items()}
        for rank, tensors in ranks.items()
    }


def differences(want: Ranks, got: Ranks, free: Ranks | None = None) -> list[str]:
    """Return a line for everything unexpected; names in ``free`` may hold anything."""
    found = []
    for rank in sorted(want.keys() | got.keys()):
        expected_here, got_here = want.get(rank), got.get(rank)
        if expected_here is None or got_here is None:
            found.append(f"rank {rank}: {'unexpected' if expected_here is None else 'missing'}")
            continue
        names = expected_here.keys() | got_here.keys()
        for name in sorted(names - (free or {}).get(rank, {}).keys()):
            before, after = expected_here.get(name), got_here.get(name)
            if before != after:
                found.append(f"rank {rank}, {name}: expected {before}, got {after}")
    return found


def assert_merged(path, name):
    """Check that a file holds the full tensors of a run, and nothing else."""
    got = read(path)
    with np.load(SAMPLES / name / "expected.npz") as full:
        stored = {
            tensor
            for folder in (SAMPLES / name / "ckpt").iterdir()
            for tensor in read(folder / "net-1_1.ckpt")
        }
        assert got.keys() == stored
        for tensor in stored - {"epoch_num", "step_num"}:
            assert got[tensor].shape == full[tensor].shape, tensor
            assert got[tensor].data == full[tensor].tobytes(), tensor
    assert got["epoch_num"].digest[:2] == ("Int64", ())


# Cases that need a word from the user: several steps in one folder; ranks that disagree about a
# parameter without a layout.
WORDS = {
    "several_files_per_rank": ["--step", "2_10"],
    "params_outside_strategy": ["--unlisted", "rank"],
}
