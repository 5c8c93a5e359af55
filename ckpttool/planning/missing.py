"""Missing and damaged files: which slices are lost, and which ranks replace them.

A slice that another rank holds is read from there.  The strategy tells what a file held; for
parameters that it does not list, the other ranks of the stage tell, since they run the same
program.  If these hold different parameters (saved without redundancy), a damaged file may have
held something that nobody else has; then it is not replaced.

``remove_redundancy=True`` deals the parameters of a replica group out in turn, so a rank may hold
nothing.  Safetensors files are marked, unless they hold nothing; ``.ckpt`` files are not, and those
that hold nothing have 0 bytes.  Parameters without a layout are on every rank, or, if there are no
layouts at all, dealt out like the others.

Source
------
MindSpore 2.10 ``train/callback/_checkpoint.py`` (``_save_ckpt``), ``train/_utils.py``
(``remove_param_redundancy``).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ckpttool.errors import AuthenticityError, FormatError, UnsupportedError
from ckpttool.model.catalog import Catalog, RankCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.layout import Layout
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Merged, Sharding, Strategy
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.planning.optimizer_state import find_owners, followed_parameter


def find_lacking(catalog: Catalog, found: Iterable[Source]) -> Iterator[Diagnostic]:
    """Yield files that lack what their replicas hold, or that no slice is held twice."""
    lacks: dict[int, list[str]] = defaultdict(list)
    others: dict[int, set[int]] = defaultdict(set)
    is_held_twice = False
    cut = [source for source in found if source.has_layout and source.meta.text is None]
    holders = catalog.holders
    different = {source.slicing.distribution_key: source.slicing for source in cut}
    expected = {
        key: catalog.files.keys() & {*chain(*slicing.owners())}
        for key, slicing in different.items()
    }
    if all(
        expected[source.slicing.distribution_key] <= {*holders[source.meta.name]} for source in cut
    ):
        return  # as nearly always; going through all slices takes time
    for source in cut:
        for held, owners in zip(source.slicing.replicas(), source.slicing.owners(), strict=True):
            is_held_twice = is_held_twice or len(held) > 1
            for rank in owners:
                if rank in catalog.files and rank not in held:
                    lacks[rank].append(source.meta.name)
                    others[rank].update(sorted(held)[:1])
    if lacks and not is_held_twice:
        text = "saved without redundancy: every slice is in the file of one rank only"
        yield Diagnostic("deduplicated", text)
        return
    for rank, names in sorted(lacks.items()):
        file = catalog.files[rank]
        state = "is empty (0 bytes)" if file.nbytes == 0 else "was perhaps cut short"
        text = (
            f"rank {rank}: {file.path} lacks {count(len(names), 'parameter')} of which others hold "
            f"replicas ({shorten(names)}; on {format_ranks(sorted(others[rank]))}), so it {state}"
        )
        yield Diagnostic("lacking", text, ranks=(rank,))


# A file that is whole, and one that somebody may have put there: neither is to be passed over.
_NEVER_REPLACED = (UnsupportedError, AuthenticityError)

NO_FILE = "no checkpoint file found in"

Lacking = Mapping[tuple[int, ...], Sequence[str]]  # parameters, by the owners that should have them


@dataclass(frozen=True, slots=True)
class MissingSlices:
    """What files that are not there, or cannot be read, take with them.

    Attributes
    ----------
    problems
        What is lost.
    notes
        Of each rank whose slices are all read from others, why, and from which.
    damage
        Of the damaged files those that nothing replaces.
    """

    problems: tuple[Diagnostic, ...]
    notes: tuple[Diagnostic, ...]
    damage: tuple[FormatError, ...]


def find_missing_slices(
    catalog: Catalog,
    sharding: Sharding,
    lacking: Lacking,
    own: Collection[str],
    is_deduplicated: bool,
) -> MissingSlices:
    """What is lost with files that are missing or damaged, and what is replaced.

    Parameters
    ----------
    catalog, strategy
        What is on disk, and how it is cut.
    lacking
        Slices that nobody has: the ranks that should have them, with the parameters.
    own
        Parameters that the strategy does not list and of which each rank's is wanted.
    is_deduplicated
        Whether it was saved without redundancy.
    """
    if isinstance(catalog, SelfDescribedCatalog):
        return _described_missing(catalog.damaged.values(), catalog.description.broken)
    lacking = _of_expected(catalog, lacking)
    lost = {rank for owners in lacking for rank in owners}
    problems = [
        _missing_problem(catalog, owners, names, is_deduplicated)
        for owners, names in _in_groups(catalog, lacking)
    ]
    damage: list[FormatError] = []
    notes: list[Diagnostic] = []
    absent = tuple(rank for rank in _absent(catalog, sharding) if rank not in lost)
    owned = _holders_and_layouts(catalog, sharding) if catalog.damaged or absent else []
    for rank, error in catalog.damaged.items():
        reason = "" if rank in lost else _why_unknown(catalog, sharding, rank, is_deduplicated)
        if reason is None:
            others = format_ranks(_replacements(owned, [rank], catalog))
            notes.append(
                Diagnostic(
                    "damaged_replica",
                    f"rank {rank}: {error}",
                    f"all its slices are read from replicas: {others}",
                    ranks=(rank,),
                    path=error.path,
                )
            )
            continue
        damage.append(error)
        if reason:
            problems.append(Diagnostic("missing", f"rank {rank}: {reason}", ranks=(rank,)))
    if absent and catalog.files:
        text = f"{format_ranks(absent)}: {NO_FILE} {catalog.root}; all slices "
        text += f"are read from replicas: {format_ranks(_replacements(owned, absent, catalog))}"
        notes.append(Diagnostic("missing_replica", text, ranks=absent))
    gone = tuple(rank for rank in catalog.damaged if rank not in lost)
    text = f"{shorten(own)}: not in the strategy, each rank has its own, and that of "
    if own and gone:
        text += f"{format_ranks(gone)} is lost; decide with --unlisted first or drop"
        problems.append(Diagnostic("missing", text, ranks=gone))
    elif own and absent:
        text += f"{format_ranks(absent)}, if there was one, is lost"
        notes.append(Diagnostic("missing_own", text, ranks=absent))
    return MissingSlices(tuple(problems), tuple(notes), tuple(damage))


def _described_missing(damaged: Iterable[FormatError], broken: Collection[str]) -> MissingSlices:
    """Of a checkpoint that describes itself, which knows its files by name and not by rank."""
    errors = tuple(damaged)
    if broken or any(isinstance(error, _NEVER_REPLACED) for error in errors):
        return MissingSlices((), (), errors)
    texts = (f"{error}; other files have all of its slices" for error in errors)
    return MissingSlices((), tuple(Diagnostic("faulty_replica", text) for text in texts), ())


def notes_of_scan(catalog: Catalog, sharding: Sharding) -> Iterator[Diagnostic]:
    """Yield the diagnostics of a catalog that are no errors for a conversion.

    With a strategy those on missing ranks are left out: `find_missing_slices` says more.
    """
    errors = catalog.errors()
    for one in catalog.diagnostics:
        if one.code != "missing_rank":
            yield from () if one in errors else (one,)
        elif isinstance(sharding, Merged) and (
            ranks := tuple(filter(catalog.is_expected, one.ranks))
        ):
            text = f"{format_ranks(ranks)}: {NO_FILE} {catalog.root}"
            yield replace(one, message=text, ranks=ranks)


def hold_alike(catalog: Catalog, ranks: Collection[int]) -> bool:
    """Whether those of ``ranks`` that have a file, at least one, hold the same parameters."""
    held = [catalog.files[rank].header.keys() for rank in ranks if rank in catalog.files]
    return bool(held) and all(names == held[0] for names in held)


def _absent(catalog: Catalog, sharding: Sharding) -> list[int]:
    """Ranks that should have a file and have none, not even a damaged one."""
    known = {*catalog.files, *catalog.damaged}
    missing = catalog.missing_ranks if isinstance(catalog, RankCatalog) else ()
    expected = sharding.ranks if isinstance(sharding, Strategy) else missing
    return [rank for rank in expected if rank not in known and catalog.is_expected(rank)]


def _of_expected(catalog: Catalog, lacking: Lacking) -> Lacking:
    """Keep only the missing slices of ranks that this set was written for."""
    found: dict[tuple[int, ...], list[str]] = {}
    for owners, names in lacking.items():
        expected = tuple(filter(catalog.is_expected, owners))
        if expected:
            found.setdefault(expected, []).extend(names)
    return found


def _why_unknown(
    catalog: Catalog, sharding: Sharding, rank: int, is_deduplicated: bool
) -> str | None:
    """Why it cannot be known what a damaged file held; None if it can, "" if that needs no word."""
    fellows: Collection[int] = catalog.files
    if isinstance(catalog.damaged[rank], _NEVER_REPLACED):
        return ""  # the message says what to do
    if isinstance(sharding, Strategy):
        if rank not in sharding.ranks:
            return ""  # that it does not belong there is told elsewhere
        first = rank - rank % sharding.stage_ranks
        fellows = range(first, first + sharding.stage_ranks)
    if hold_alike(catalog, fellows) and not is_deduplicated:
        return None
    if not any(fellow in catalog.files for fellow in fellows):
        return ""
    return (
        "what its file held besides is not known, since the other ranks do not all hold the same "
        "parameters (saved without redundancy?), so replicas do not replace it"
    )


_Owned = Sequence[tuple[Collection[int], Sequence[Layout]]]


def _holders_and_layouts(catalog: Catalog, sharding: Sharding) -> _Owned:
    """For every parameter that has layouts, the ranks that have a slice of it, and the layouts."""
    found = []
    owners = find_owners(sharding.layouts, catalog.metas)
    for name, ranks in catalog.holders.items():
        base = followed_parameter(catalog, sharding, name, ranks, owners) or name
        found.append((frozenset(ranks), sharding.layouts.get(base, ())))
    return found


def _replacements(owned: _Owned, ranks: Sequence[int], catalog: Catalog) -> list[int]:
    """The ranks that slices of ``ranks`` are read from."""
    used: set[int] = set()
    for holders, layouts in owned:
        for layout in layouts:
            for rank in ranks:
                owners = layout.owners(layout.slice_index(rank)) if rank in layout.ranks else ()
                used.update([owner for owner in owners if owner in holders][:1])
    return sorted(used or {min(catalog.files)})  # all of them hold everything, if none is used


def _in_groups(catalog: Catalog, lacking: Lacking) -> Iterator[tuple[Sequence[int], Sequence[str]]]:
    """The same, with ranks together that have no file and lack the same: they may be thousands."""
    groups: dict[tuple[tuple[int, ...], tuple[str, ...]], set[int]] = {}
    for owners, names in lacking.items():
        is_there = all(rank in catalog.files for rank in owners)
        groups.setdefault((owners if is_there else (), tuple(names)), set()).update(owners)
    for (_, names), ranks in groups.items():
        yield sorted(ranks), names


def _missing_problem(
    catalog: Catalog, owners: Sequence[int], names: Sequence[str], is_deduplicated: bool
) -> Diagnostic:
    """The problem of slices that nobody has."""
    damaged = [rank for rank in owners if rank in catalog.damaged]
    gone = [rank for rank in owners if rank not in catalog.files and rank not in damaged]
    reasons = []
    told = []
    if gone:
        codes = ("leftover", "absent", "part")
        told = [note for note in catalog.diagnostics if note.code in codes]
        left = "; ".join(note.message if note.where == catalog.root else note.text for note in told)
        reasons.append(f"{format_ranks(gone)}: {NO_FILE} {catalog.root}")
        reasons[-1] += f" ({left})" if left else ""
    if damaged:
        reasons.append(f"{format_ranks(damaged)}: not read")
    there = [catalog.files[rank].path for rank in owners if rank in catalog.files]
    if reasons and there and not is_deduplicated:
        reasons.append(f"lacking in {shorten(there, 3)} (perhaps cut short)")
    if not reasons:
        file = catalog.files[owners[0]]
        state = "is empty (0 bytes)" if file.nbytes == 0 else "was perhaps cut short"
        of_file = f" ({file.path} {state})"
        if is_deduplicated:
            of_file = _empty_files(catalog, owners)
        reasons = [f"{format_ranks(owners)}: slices are missing{of_file}"]
    why = f" (saved without redundancy, {MARK})" if is_deduplicated else ""
    many = f"parameter {names[0]}"
    if len(names) > 1:
        many = f"{count(len(names), 'parameter')} ({shorten(names)})"
    text = f"{', '.join(reasons)}; no other rank has them{why}: {many}"
    if any(note.code == "part" for note in told):
        text += "; write all ranks, without --rank, or put back what is lost"
    elif (gone or damaged) and not catalog.errors():  # which tell more of the cause
        text += "; put back what is lost, or take another step (--step)"
    tensor = names[0] if len(names) == 1 else None
    return Diagnostic("missing", text, tensor=tensor, ranks=tuple(owners))


def _empty_files(catalog: Catalog, owners: Sequence[int]) -> str:
    """Says which files of these ranks are empty; without redundancy some may be, by right."""
    empty = [catalog.files[rank].path for rank in owners if catalog.files[rank].nbytes == 0]
    return f" ({shorten(empty)}: 0 bytes; emptied?)" if empty else ""


MARK = "remove_redundancy"


def is_marked(catalog: Catalog) -> bool:
    """Whether a file says that the checkpoint was saved without redundancy."""
    return any(file.attrs.get(MARK) == "True" for file in catalog.files.values())


def is_deduplicated(catalog: Catalog, sharding: Sharding) -> bool:
    """Whether a checkpoint was saved without redundancy, as its files say or show.

    They show it if no slice is held twice, and one is held by one rank and not by another that
    has a file and should hold it, too.  A strategy without layouts says that all should hold all.
    """
    if isinstance(catalog, SelfDescribedCatalog):
        return False  # it tells itself who has what
    if is_marked(catalog):
        return True
    if any(MARK in file.attrs for file in catalog.files.values()):
        return False
    files = catalog.files
    if not sharding.layouts:
        held = Counter(name for file in files.values() for name in file.header)
        return len(files) > 1 and bool(held) and max(held.values()) == 1
    is_short = False
    for name, layouts in sharding.layouts.items():
        for layout in layouts:
            if math.prod(layout.parts) == len(layout.ranks):
                continue  # no two ranks share a slice, which need not be counted
            owners = [rank for rank in layout.ranks if rank in files]
            expected = Counter(layout.slice_index(rank) for rank in owners)
            found = Counter(
                layout.slice_index(rank) for rank in owners if name in files[rank].header
            )
            if any(number > 1 for number in found.values()):
                return False
            is_short = is_short or any(expected[index] > 1 for index in found)
    return is_short


def note_redundancy(catalog: Catalog, is_deduplicated: bool | None) -> Diagnostic | None:
    """What should be known of a checkpoint without redundancy, and of ranks that hold nothing.

    None for ``is_deduplicated`` says that there is no strategy that could tell.
    """
    idle = [rank for rank, file in catalog.files.items() if not file.tensors]
    nothing = f"{format_ranks(idle)} hold{'s' if len(idle) == 1 else ''} nothing"
    if is_deduplicated or (is_deduplicated is None and is_marked(catalog)):
        text = f"{catalog.root}: saved without redundancy ({MARK}): of ranks with equal slices "
        text += "one alone has each" + (f"; {nothing}" if idle else "")
        return Diagnostic("deduplicated", text)
    if not idle:
        return None
    file = catalog.files[idle[0]]
    text = f"{nothing} ({file.path} has {file.nbytes} bytes)"
    if is_deduplicated is None:
        text += ": cut short, or saved without redundancy (a strategy, -s, tells)"
        return Diagnostic("empty", text)
    text += ", though the checkpoint was not saved without redundancy: was it cut short?"
    return Diagnostic("emptied", text)


def absent_ranks(catalog: Catalog) -> Iterator[str]:
    """Ranks without a file, where no other rank has what they had and nothing tells what it was."""
    known = {*catalog.files, *catalog.damaged}
    absent = [rank for rank in range(max(known)) if rank not in known]
    if absent:
        yield (
            f"{format_ranks(absent)}: no checkpoint file found in {catalog.root}, which was saved "
            f"without redundancy ({MARK}): what they had no other rank has"
        )


def quarantine_damaged(catalog: Catalog, sharding: Sharding) -> Catalog:
    """Return the catalog with empty files among the damaged ones, so that replicas replace them."""
    if isinstance(catalog, SelfDescribedCatalog):
        return catalog
    return _with_damaged(catalog, _find_empty(catalog, sharding))


def _with_damaged(catalog: Catalog, reasons: Mapping[int, str]) -> Catalog:
    """The catalog with files that are damaged for some reason; itself if there are none."""
    if not reasons:
        return catalog
    files = catalog.files
    damaged = {rank: FormatError(files[rank].path, None, why) for rank, why in reasons.items()}
    return replace(
        catalog,
        files={rank: file for rank, file in files.items() if rank not in damaged},
        damaged=dict(sorted({**catalog.damaged, **damaged}.items())),
    )


def _find_empty(catalog: Catalog, sharding: Sharding) -> dict[int, str]:
    """Files of 0 bytes, where each should hold something.

    Only without redundancy may a rank hold nothing, or if its stage has no layouts at all.  Without
    a strategy that is not known, unless no file holds anything.
    """
    empty = {rank for rank, file in catalog.files.items() if not file.nbytes}
    if not empty:
        return {}
    if isinstance(sharding, Merged):
        if isinstance(catalog, RankCatalog) and catalog.metas:
            return {}
    elif is_deduplicated(catalog, sharding):
        return {}
    elif isinstance(sharding, Strategy):
        layouts = {layout for named in sharding.layouts.values() for layout in named}
        empty &= {rank for layout in layouts for rank in layout.ranks}
    return dict.fromkeys(empty, "empty (0 bytes), as a full disk or a crash leaves it")
