"""Parameters that a strategy does not list and that differ between ranks: what is said of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from ckpttool.model.catalog import format_ranks
from ckpttool.model.maps import map_of
from ckpttool.model.notes import Note
from ckpttool.model.presence import PartlyHeld
from ckpttool.model.strategy import count, shorten

Unlisted = Literal["rank", "first", "drop"]
Groups = tuple[tuple[int, ...], ...]  # ranks that hold the same, group by group
Differing = Mapping[Groups, Sequence[str]]  # the parameters that differ in each way

# What each rank saves of itself, and means nothing elsewhere: its number, in emergency saves.
# Source: MindSpore 2.10 train/callback/_train_fault_tolerance.py (_save_checkpoint_on_failure).
OF_ONE_RANK = frozenset({"cur_rank"})

CHOICES = (
    "--unlisted rank (each target rank takes that of source rank modulo source ranks), first "
    "(the lowest rank's for all) or drop"
)


def set_apart(
    differing: Differing, own_names: Collection[str] = OF_ONE_RANK
) -> tuple[Differing, Differing]:
    """What differs between ranks by its meaning, and all else."""
    own: dict[Groups, list[str]] = {}
    rest: dict[Groups, list[str]] = {}
    for groups, names in differing.items():
        for name in names:
            (own if name in own_names else rest).setdefault(groups, []).append(name)
    return own, rest


def questions(
    where: str | None,
    differing: Differing,
    total: int,
    alone: Mapping[str, PartlyHeld],
    may_add: bool = False,
    running: Collection[str] = (),
) -> list[str]:
    """What has to be asked: a problem for each way in which parameters differ.

    Parameters
    ----------
    where
        What does not list them; None if every rank should hold everything: then there is one
        problem.
    differing
        Names by the way they differ.
    total
        Number of parameters in all.
    alone
        Names that one rank alone has, and what is said of them.
    may_add
        Whether a strategy by hand may be given as well.
    running
        Those that are running statistics; all of these make one problem.
    """
    apart, differing = set_apart(differing, running)
    found = [_on_running(apart)] if apart else []
    if not differing:
        return found
    ask = "Say how slices are cut in a strategy by hand, given as well (-s MORE.yaml), or decide"
    ask = ask if may_add else "Decide"
    if where is not None:
        found += [
            f"{what} {ask} with {CHOICES}"
            for groups, names in differing.items()
            for what in _differences(where, groups, names, alone)
        ]
        return found
    number = sum(len(names) for names in differing.values())
    ways = shorten((f"{names[0]}: {_show(groups)}" for groups, names in differing.items()), 3)
    question = (
        f"not every rank holds everything: {number} of {count(total, 'parameter')} "
        f"differ{'s' if number == 1 else ''} between ranks ({ways}); if they are slices, give the "
        "strategy (-s STRATEGY); if a file is damaged, move it away; if each rank has its own, as "
        f"a random state is, decide with {CHOICES}"
    )
    return [*found, question]


def _on_running(apart: Differing) -> str:
    """Return the question that running statistics raise if they differ between ranks."""
    ranks = sorted({rank for groups in apart for group in groups for rank in group})
    names = [name for found in apart.values() for name in found]
    return (
        f"{say_running(names, ranks)}; --unlisted first takes rank {ranks[0]}'s for all, "
        "--unlisted rank gives each target rank its own, --unlisted drop leaves them out"
    )


def say_running(names: Sequence[str], ranks: Sequence[int]) -> str:
    """Return what running statistics are, and that ranks differ in them."""
    verb = "differs" if len(names) == 1 else "differ"
    return (
        f"{format_ranks(ranks)}: {count(len(names), 'running statistic')} {verb} "
        f"({shorten(names, 3)}), as each device keeps its own in data parallel (BatchNorm)"
    )


def _differences(
    where: str, groups: Groups, names: Sequence[str], alone: Mapping[str, PartlyHeld]
) -> Iterator[str]:
    yield from (
        f"{one.text}: is the name damaged, or the file? Then move the file away."
        for one in dict.fromkeys(alone[name] for name in names if name in alone)
    )
    tensors = [name for name in names if map_of(name) is None and name not in alone]
    maps = dict.fromkeys(tag for name in names if (tag := map_of(name)) is not None)
    if tensors:
        yield (
            f"{shorten(tensors)}: not in {where}, and different between ranks "
            f"({_show(groups)}): slices that {where} omits, or does each rank have its own?"
        )
    if maps:
        held = f"on {_show(groups)} only"
        if len(groups) > 1:
            held = f"different between ranks ({_show(groups)})"
        yield (
            f"{shorten(maps)}: a map parameter (hash table), {held}: nothing says whose entries "
            "count, so they are not joined."
        )


def decision(
    names: Sequence[str], groups: Groups, unlisted: Unlisted, cycle: int, where: str
) -> Note:
    """What the user's decision makes of parameters that differ in one way.

    ``cycle`` is the number of source ranks for ``"rank"``.
    """
    lowest = min(rank for group in groups for rank in group)
    done = {
        "drop": "dropped",
        "first": f"taken from rank {lowest}",
        "rank": f"target rank r takes that of source rank r modulo {cycle}, and what no target "
        "rank takes is left out",
    }
    how = f"different between ranks ({_show(groups)})"
    how = f"on {_show(groups)} alone" if len(groups) == 1 else how
    text = f"{shorten(names)}: not in {where}, {how}: {done[unlisted]}"
    return Note("dropped", text) if unlisted == "drop" else Note("unlisted", text)


def _show(groups: Groups) -> str:
    shown = " | ".join(format_ranks(group) for group in groups[:8])
    return shown + (f" | and {len(groups) - 8} more" if len(groups) > 8 else "")
