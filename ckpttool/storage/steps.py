"""Chooses one step of a checkpoint: a file for each rank, all saved together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ckpttool.errors import PlanError
from ckpttool.model.catalog import format_ranks
from ckpttool.model.notes import Note
from ckpttool.model.strategy import shorten
from ckpttool.storage.names import Found, is_wanted, label_of, run_of, step_of


def choose_step(
    src: str, found: list[Found], wanted: str | None, notes: list[Note]
) -> tuple[dict[int, Path], str | None]:
    """One file for each rank, all of one step, and the step's label."""
    ranks = sorted({item.rank for item in found})
    groups = _group_by_name(found, len(ranks))
    keys = [key for key in groups if wanted is None or is_wanted(key, groups[key], wanted)]
    if not keys:
        have = shorten(sorted({label_of(key) or key for key in groups}), 8)
        raise PlanError([f"{src}: no file of step {wanted}; there are {have}"])
    steps = {key: step_of(key) for key in keys}
    if wanted is not None and wanted.isdecimal() and len(keys) > 1:
        have = shorten(sorted({label_of(key) or key for key in keys}), 8)
        raise PlanError([f"{src}: --step {wanted} may be any of {have}; give epoch and step"])
    complete = [key for key in keys if len(groups[key]) == len(ranks)]
    if not complete:
        absent = [
            f"{key} is not in {format_ranks([rank for rank in ranks if rank not in groups[key]])}"
            for key in keys
        ]
        everywhere = [key for key in groups if len(groups[key]) == len(ranks)]
        have = f"every rank has {shorten(everywhere)}" if everywhere else "no step is in every rank"
        raise PlanError([f"{src}: {shorten(absent)}; {have}"])
    best = max(complete, key=lambda key: steps[key] or (-1, -1, False))
    rivals = [
        key
        for key in keys
        if key != best
        and (steps[key] == steps[best] or None in steps.values() or run_of(key) != run_of(best))
    ]
    if rivals:
        named = [groups[key][min(groups[key])].name for key in (best, *rivals)]
        raise PlanError(
            [
                (
                    f"{src}: several files for {format_ranks(sorted(groups[rivals[0]]))}, and "
                    f"nothing says which is meant: {shorten(named)}; choose with --pattern or "
                    "--step"
                )
            ]
        )
    label = label_of(best)
    if len(keys) > 1:
        newest = max(keys, key=lambda key: steps[key] or ())
        text = f"step {label}, the newest of {len(keys)}"
        if newest != best:
            without = [rank for rank in ranks if rank not in groups[newest]]
            text += (
                f" that every rank has (step {label_of(newest)} is not in {format_ranks(without)})"
            )
        notes.append(Note("step", text))
    return groups[best], label


def _group_by_name(found: list[Found], count: int) -> Mapping[str, dict[int, Path]]:
    """Files of all ranks that were saved together, by their common name.

    A number at the end of a name, or before its step, may be the rank (``checkpoint_3.h5``) or
    just part of the name; if a name is the same on every rank, it is part of the name.
    """
    groups: dict[str, dict[int, Path]] = {}
    plain: dict[str, dict[int, Path]] = {}
    problems = []
    for item in found:
        plain.setdefault(item.path.name, {})[item.rank] = item.path
    for item in found:
        shared = len(plain[item.path.name]) == count
        group = groups.setdefault(item.path.name if shared else item.key, {})
        if item.rank in group:
            problems.append(f"rank {item.rank}: two files, {group[item.rank]} and {item.path}")
        group[item.rank] = item.path
    if problems:
        raise PlanError(problems)
    return groups
