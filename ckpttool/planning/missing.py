"""Missing and damaged files: which slices are missing, and which ranks replace them.

A slice that another rank holds is read from there.  The strategy shows which slices a file held.
The other ranks of its stage show which unlisted parameters it held, since all run the same program.
A damaged file is not replaced if these ranks hold different parameters (saved without redundancy).
It may have held something that no other rank has.

``remove_redundancy=True`` assigns the parameters of a replica group to its ranks in turn, so a rank
may hold nothing.  Safetensors files record it, unless they hold nothing.  ``.ckpt`` files do not
record it, and have 0 bytes if they hold nothing.  Every rank stores the parameters without a
layout.  If there are no layouts at all, they are assigned in turn as well.

The manifest of an output folder names the ranks that it was written for, if not for all (--rank).

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
from pathlib import Path

from ckpttool.errors import AuthenticityError, FormatError, UnsupportedError
from ckpttool.formats.local import is_file
from ckpttool.model.catalog import Catalog, RankCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.layout import Layout
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Merged, Sharding, Strategy
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.planning.optimizer_state import followed_parameter, match_states_by_name
from ckpttool.transaction.manifest import ManifestFile


def find_incomplete_files(catalog: Catalog, found: Iterable[Source]) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each file that lacks slices that its replicas hold.

    If every slice is in the file of one rank, yield one diagnostic for the whole checkpoint.
    """
    missing: dict[int, list[str]] = defaultdict(list)
    replicas: dict[int, set[int]] = defaultdict(set)
    is_held_twice = False
    sharded = [source for source in found if source.has_layout and source.meta.text is None]
    holders = catalog.holders
    slicings = {source.slicing.distribution_key: source.slicing for source in sharded}
    expected = {
        key: catalog.files.keys() & {*chain(*slicing.owners())} for key, slicing in slicings.items()
    }
    if all(
        expected[source.slicing.distribution_key] <= {*holders[source.meta.name]}
        for source in sharded
    ):
        return  # nearly every checkpoint is complete, and the loop over all slices is slow
    for source in sharded:
        for holding, owners in zip(source.slicing.replicas(), source.slicing.owners(), strict=True):
            is_held_twice = is_held_twice or len(holding) > 1
            for rank in owners:
                if rank in catalog.files and rank not in holding:
                    missing[rank].append(source.meta.name)
                    replicas[rank].update(sorted(holding)[:1])
    if missing and not is_held_twice:
        text = "saved without redundancy: every slice is in the file of one rank only"
        yield Diagnostic("deduplicated", text)
        return
    for rank, names in sorted(missing.items()):
        file = catalog.files[rank]
        state = "is empty (0 bytes)" if file.nbytes == 0 else "was perhaps cut short"
        text = (
            f"rank {rank}: {file.path} lacks {count(len(names), 'parameter')} of which others hold "
            f"replicas ({shorten(names)}; on {format_ranks(sorted(replicas[rank]))}), so it {state}"
        )
        yield Diagnostic("lacking", text, ranks=(rank,))


# An unsupported file is intact, and another may be forged: replicas must not hide that.
_NEVER_REPLACED = (UnsupportedError, AuthenticityError)

_NO_FILE = "no checkpoint file found in"

MissingNames = Mapping[tuple[int, ...], Sequence[str]]  # owners of missing slices to parameters


@dataclass(frozen=True, slots=True)
class MissingSlices:
    """Effects of missing and damaged files.

    Attributes
    ----------
    problems
        Slices that no file holds.
    notes
        Ranks whose slices are read from replicas: the reason, and the other ranks.
    damage
        Errors of the damaged files that replicas do not replace.
    """

    problems: tuple[Diagnostic, ...]
    notes: tuple[Diagnostic, ...]
    damage: tuple[FormatError, ...]


def find_missing_slices(
    catalog: Catalog,
    sharding: Sharding,
    missing: MissingNames,
    per_rank: Collection[str],
    is_deduplicated: bool,
) -> MissingSlices:
    """Find the slices that no file holds, and the damaged files that replicas replace.

    Parameters
    ----------
    catalog, sharding
        The files, and how the tensors are spread over them.
    missing
        Parameters with slices that no rank has, by the owners of these slices.
    per_rank
        Unlisted parameters that are taken from every rank.
    is_deduplicated
        Whether the checkpoint was saved without redundancy.
    """
    if isinstance(catalog, SelfDescribedCatalog):
        return _described_missing_slices(catalog.damaged.values(), catalog.description.broken)
    missing = _keep_expected_ranks(catalog, missing)
    unreplaced = {rank for owners in missing for rank in owners}
    problems = [
        _missing_problem(catalog, owners, names, is_deduplicated)
        for owners, names in _group_missing(catalog, missing)
    ]
    damage: list[FormatError] = []
    notes: list[Diagnostic] = []
    without_file = tuple(
        rank for rank in ranks_without_file(catalog, sharding) if rank not in unreplaced
    )
    parameters = _holders_and_layouts(catalog, sharding) if catalog.damaged or without_file else []
    for rank, error in catalog.damaged.items():
        reason: str | None = ""
        if rank not in unreplaced:
            reason = _unknown_contents_reason(catalog, sharding, rank, is_deduplicated)
        if reason is None:
            others = format_ranks(_replacement_ranks(parameters, [rank], catalog))
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
    if without_file and catalog.files:
        others = format_ranks(_replacement_ranks(parameters, without_file, catalog))
        text = f"{format_ranks(without_file)}: {_NO_FILE} {catalog.root}; all slices "
        text += f"are read from replicas: {others}"
        notes.append(Diagnostic("missing_replica", text, ranks=without_file))
    damaged = tuple(rank for rank in catalog.damaged if rank not in unreplaced)
    text = f"{shorten(per_rank)}: not in the strategy, each rank has its own, and that of "
    if per_rank and damaged:
        text += f"{format_ranks(damaged)} is lost"
        hint = "decide with --unlisted first or drop"
        problems.append(Diagnostic("missing", text, hint, ("--unlisted",), ranks=damaged))
    elif per_rank and without_file:
        text += f"{format_ranks(without_file)}, if there was one, is lost"
        notes.append(Diagnostic("missing_own", text, ranks=without_file))
    return MissingSlices(tuple(problems), tuple(notes), tuple(damage))


def _described_missing_slices(
    damaged: Iterable[FormatError], broken: Collection[str]
) -> MissingSlices:
    """Return the effects of damaged files of a checkpoint that describes itself.

    Its description lists files by name, not by rank.
    """
    errors = tuple(damaged)
    if broken or any(isinstance(error, _NEVER_REPLACED) for error in errors):
        return MissingSlices((), (), errors)
    texts = (f"{error}; other files have all of its slices" for error in errors)
    return MissingSlices((), tuple(Diagnostic("faulty_replica", text) for text in texts), ())


def scan_notes(catalog: Catalog, sharding: Sharding) -> Iterator[Diagnostic]:
    """Yield the diagnostics of a catalog that are not errors of a conversion.

    With a strategy, `find_missing_slices` reports the missing ranks in more detail.
    """
    errors = catalog.errors()
    for one in catalog.diagnostics:
        if one.code != "missing_rank":
            yield from () if one in errors else (one,)
        elif isinstance(sharding, Merged) and (
            ranks := tuple(filter(catalog.is_expected, one.ranks))
        ):
            text = f"{format_ranks(ranks)}: {_NO_FILE} {catalog.root}"
            yield replace(one, message=text, ranks=ranks)


def hold_same_parameters(catalog: Catalog, ranks: Collection[int]) -> bool:
    """Return whether the files of ``ranks``, at least one, hold the same parameters."""
    held = [catalog.files[rank].header.keys() for rank in ranks if rank in catalog.files]
    return bool(held) and all(names == held[0] for names in held)


def ranks_without_file(catalog: Catalog, sharding: Sharding) -> list[int]:
    """Return the ranks without a file, not even a damaged one, that should have one."""
    known = {*catalog.files, *catalog.damaged}
    missing = catalog.missing_ranks if isinstance(catalog, RankCatalog) else ()
    expected = sharding.ranks if isinstance(sharding, Strategy) else missing
    return [rank for rank in expected if rank not in known and catalog.is_expected(rank)]


def _keep_expected_ranks(catalog: Catalog, missing: MissingNames) -> MissingNames:
    """Keep only the missing slices of ranks that this checkpoint was written for."""
    found: dict[tuple[int, ...], list[str]] = {}
    for owners, names in missing.items():
        expected = tuple(filter(catalog.is_expected, owners))
        if expected:
            found.setdefault(expected, []).extend(names)
    return found


def _unknown_contents_reason(
    catalog: Catalog, sharding: Sharding, rank: int, is_deduplicated: bool
) -> str | None:
    """Return why it is unknown what a damaged file held.

    Return None if it is known, and "" if another message gives the reason.
    """
    peers: Collection[int] = catalog.files
    if isinstance(catalog.damaged[rank], _NEVER_REPLACED):
        return ""  # the error says what to do
    if isinstance(sharding, Strategy):
        if rank not in sharding.ranks:
            return ""  # `check_presence` reports ranks outside the strategy
        first = rank - rank % sharding.stage_ranks
        peers = range(first, first + sharding.stage_ranks)
    if hold_same_parameters(catalog, peers) and not is_deduplicated:
        return None
    if not any(peer in catalog.files for peer in peers):
        return ""
    return (
        "what its file held besides is not known, since the other ranks do not all hold the same "
        "parameters (saved without redundancy?), so replicas do not replace it"
    )


_HoldersAndLayouts = Sequence[tuple[Collection[int], Sequence[Layout]]]


def _holders_and_layouts(catalog: Catalog, sharding: Sharding) -> _HoldersAndLayouts:
    """Return the ranks that hold each parameter, and its layouts if it has any."""
    found = []
    parameter_of_state = match_states_by_name(sharding.layouts, catalog.metas)
    for name, ranks in catalog.holders.items():
        parameter = followed_parameter(catalog, sharding, name, ranks, parameter_of_state) or name
        found.append((frozenset(ranks), sharding.layouts.get(parameter, ())))
    return found


def _replacement_ranks(
    parameters: _HoldersAndLayouts, ranks: Sequence[int], catalog: Catalog
) -> list[int]:
    """Return the ranks from which the slices of ``ranks`` are read."""
    used: set[int] = set()
    for holding, layouts in parameters:
        for layout in layouts:
            for rank in ranks:
                owners = layout.owners(layout.slice_index(rank)) if rank in layout.ranks else ()
                used.update([owner for owner in owners if owner in holding][:1])
    return sorted(used or {min(catalog.files)})  # without layouts every rank holds everything


def _group_missing(
    catalog: Catalog, missing: MissingNames
) -> Iterator[tuple[Sequence[int], Sequence[str]]]:
    """Join the missing slices of ranks without a file if their parameters are equal.

    There may be thousands of such ranks, and each group becomes one message.
    """
    groups: dict[tuple[tuple[int, ...], tuple[str, ...]], set[int]] = {}
    for owners, names in missing.items():
        have_files = all(rank in catalog.files for rank in owners)
        groups.setdefault((owners if have_files else (), tuple(names)), set()).update(owners)
    for (_, names), ranks in groups.items():
        yield sorted(ranks), names


def _missing_problem(
    catalog: Catalog, owners: Sequence[int], names: Sequence[str], is_deduplicated: bool
) -> Diagnostic:
    """Return the problem of slices that no rank has."""
    damaged = [rank for rank in owners if rank in catalog.damaged]
    without_file = [rank for rank in owners if rank not in catalog.files and rank not in damaged]
    reasons = []
    notes = []
    if without_file:
        codes = ("leftover", "absent", "part")
        notes = [note for note in catalog.diagnostics if note.code in codes]
        remarks = "; ".join(
            (replace(note, where="") if note.where == catalog.root else note).fact for note in notes
        )
        reasons.append(f"{format_ranks(without_file)}: {_NO_FILE} {catalog.root}")
        reasons[-1] += f" ({remarks})" if remarks else ""
    if damaged:
        reasons.append(f"{format_ranks(damaged)}: not read")
    incomplete = [catalog.files[rank].path for rank in owners if rank in catalog.files]
    if reasons and incomplete and not is_deduplicated:
        reasons.append(f"lacking in {shorten(incomplete, 3)} (perhaps cut short)")
    if not reasons:
        file = catalog.files[owners[0]]
        state = "is empty (0 bytes)" if file.nbytes == 0 else "was perhaps cut short"
        remark = f" ({file.path} {state})"
        if is_deduplicated:
            remark = _empty_files_message(catalog, owners)
        reasons = [f"{format_ranks(owners)}: slices are missing{remark}"]
    reason = f" (saved without redundancy, {REDUNDANCY_KEY})" if is_deduplicated else ""
    parameters = f"parameter {names[0]}"
    if len(names) > 1:
        parameters = f"{count(len(names), 'parameter')} ({shorten(names)})"
    text = f"{', '.join(reasons)}; no other rank has them{reason}: {parameters}"
    hint = ""
    if any(note.code == "part" for note in notes):
        hint = "write all ranks, without --rank, or put back what is lost"
    elif (without_file or damaged) and not catalog.errors():  # these name the cause
        hint = "put back what is lost, or take another step (--step)"
    tensor = names[0] if len(names) == 1 else None
    return Diagnostic("missing", text, hint, tensor=tensor, ranks=tuple(owners))


def _empty_files_message(catalog: Catalog, owners: Sequence[int]) -> str:
    """Return a remark on the empty files of ``owners``; "" if there are none."""
    empty = [catalog.files[rank].path for rank in owners if catalog.files[rank].nbytes == 0]
    return f" ({shorten(empty)}: 0 bytes; emptied?)" if empty else ""


REDUNDANCY_KEY = "remove_redundancy"


def has_redundancy_mark(catalog: Catalog) -> bool:
    """Return whether a file records that the checkpoint was saved without redundancy."""
    return any(file.attrs.get(REDUNDANCY_KEY) == "True" for file in catalog.files.values())


def is_deduplicated(catalog: Catalog, sharding: Sharding) -> bool:
    """Return whether a checkpoint was saved without redundancy.

    Its files may record it.  Otherwise they show it if each slice is in one file only, and some
    owner of a slice lacks it.  Without layouts every rank owns everything.
    """
    if isinstance(catalog, SelfDescribedCatalog):
        return False  # its description lists the slices of every file
    if has_redundancy_mark(catalog):
        return True
    if any(REDUNDANCY_KEY in file.attrs for file in catalog.files.values()):
        return False
    files = catalog.files
    if not sharding.layouts:
        counts = Counter(name for file in files.values() for name in file.header)
        return len(files) > 1 and bool(counts) and max(counts.values()) == 1
    is_incomplete = False
    for name, layouts in sharding.layouts.items():
        for layout in layouts:
            if math.prod(layout.slice_counts) == len(layout.ranks):
                continue  # every slice has one owner, so counting would only take time
            owners = [rank for rank in layout.ranks if rank in files]
            expected = Counter(layout.slice_index(rank) for rank in owners)
            found = Counter(
                layout.slice_index(rank) for rank in owners if name in files[rank].header
            )
            if any(number > 1 for number in found.values()):
                return False
            is_incomplete = is_incomplete or any(expected[index] > 1 for index in found)
    return is_incomplete


def redundancy_note(catalog: Catalog, is_deduplicated: bool | None) -> Diagnostic | None:
    """Return the note on a checkpoint without redundancy, or on ranks that hold nothing.

    ``is_deduplicated`` is None without a strategy, which could show it.
    """
    empty = [rank for rank, file in catalog.files.items() if not file.tensors]
    nothing = f"{format_ranks(empty)} hold{'s' if len(empty) == 1 else ''} nothing"
    if is_deduplicated or (is_deduplicated is None and has_redundancy_mark(catalog)):
        text = f"{catalog.root}: saved without redundancy ({REDUNDANCY_KEY}): of ranks with equal "
        text += "slices one alone has each" + (f"; {nothing}" if empty else "")
        return Diagnostic("deduplicated", text)
    if not empty:
        return None
    file = catalog.files[empty[0]]
    text = f"{nothing} ({file.path} has {file.nbytes} bytes)"
    if is_deduplicated is None:
        text += ": cut short, or saved without redundancy (a strategy, -s, tells)"
        return Diagnostic("empty", text)
    text += ", though the checkpoint was not saved without redundancy: was it cut short?"
    return Diagnostic("emptied", text)


def missing_rank_problems(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield the problem of ranks without a file in a deduplicated checkpoint without layouts.

    No other rank has their parameters, and nothing shows which these are.
    """
    known = {*catalog.files, *catalog.damaged}
    missing = [rank for rank in range(max(known)) if rank not in known]
    if missing:
        text = f"{format_ranks(missing)}: {_NO_FILE} {catalog.root}, which was saved without "
        text += f"redundancy ({REDUNDANCY_KEY}): what they had no other rank has"
        yield Diagnostic("missing", text)


def quarantine_damaged(catalog: Catalog, sharding: Sharding) -> Catalog:
    """Return the catalog with empty files among the damaged ones, so that replicas replace them."""
    if isinstance(catalog, SelfDescribedCatalog):
        return catalog
    return _with_damaged(catalog, _find_empty(catalog, sharding))


def _with_damaged(catalog: Catalog, reasons: Mapping[int, str]) -> Catalog:
    """Return the catalog with the files of ``reasons`` among the damaged ones."""
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
    """Find the empty files that should hold something, with the reason for each rank.

    A rank may hold nothing if its stage has no layouts, or if the checkpoint has no redundancy.
    Files of ranks without a strategy are found only if all of them are empty.
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


def limit_to_written_ranks(
    catalog: Catalog, sharding: Sharding | None
) -> tuple[Catalog, list[Diagnostic]]:
    """Limit a catalog to the ranks that its manifest lists (--rank), with a note on the others.

    For inspect and verify, which expect no files of other ranks.
    """
    written, reason = _written_ranks(catalog, sharding)
    if written is None:
        return catalog, []
    others = format_ranks(sorted(_expected_ranks(catalog, sharding) - written))
    text = f"{others}: not looked for, since {reason}"
    assert isinstance(catalog, RankCatalog)
    return replace(catalog, expected_ranks=written), [Diagnostic("part", text)]


def note_written_ranks(catalog: Catalog, sharding: Sharding) -> Catalog:
    """Add a note on the ranks that the manifest lists (--rank), if these are not all.

    For conversions, which need all ranks and report those that are missing.
    """
    written, reason = _written_ranks(catalog, sharding)
    if written is None:
        return catalog
    note = Diagnostic("part", reason)
    return replace(catalog, diagnostics=(*catalog.diagnostics, note))


def _expected_ranks(catalog: Catalog, sharding: Sharding | None) -> set[int]:
    """Return the ranks of the strategy, and those that the scan found missing."""
    missing = catalog.missing_ranks if isinstance(catalog, RankCatalog) else ()
    return {*(sharding.ranks if isinstance(sharding, Strategy) else ()), *missing}


def _written_ranks(
    catalog: Catalog, sharding: Sharding | None
) -> tuple[frozenset[int] | None, str]:
    """Return the ranks that a manifest lists and the evidence for a message; None for all ranks.

    `check_manifest` reports a manifest that cannot be read.
    """
    path = Path(catalog.root) / MANIFEST
    found = catalog.files.keys() | catalog.damaged.keys()
    expected = _expected_ranks(catalog, sharding)
    if not isinstance(catalog, RankCatalog) or catalog.expected_ranks is not None:
        return None, ""
    if expected <= found or not is_file(path):
        return None, ""
    try:
        outputs = ManifestFile.read(path).manifest().outputs
    except FormatError:
        return None, ""
    ranks = frozenset({*found, *(output.rank for output in outputs)})
    if expected <= ranks or any(Path(o.path).parent != Path(f"rank_{o.rank}") for o in outputs):
        return None, ""
    written = format_ranks([output.rank for output in outputs])
    return ranks, f"{path} says that this was written for {written} alone (--rank)"
