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
from itertools import chain, groupby, permutations
from pathlib import Path

from ckpttool.formats.local import is_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Merged, Sharding, Strategy
from ckpttool.planning.optimizer_state import followed_parameter
from ckpttool.problems import (
    AuthenticityError,
    Diagnostic,
    FormatError,
    UnsupportedError,
    join_clauses,
)
from ckpttool.transaction.manifest import ManifestFile
from ckpttool.wording import count, format_ranks, shorten


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
    alike: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = defaultdict(list)
    for rank, names in sorted(missing.items()):
        alike[tuple(names), tuple(sorted(replicas[rank]))].append(rank)
    for (lost, others), ranks in alike.items():
        yield from lacking_problems(catalog, "lacking", ranks, lost, format_ranks(others))


def lacking_problems(
    catalog: Catalog, code: str, ranks: Sequence[int], names: Iterable[str], holding: str
) -> Iterator[Diagnostic]:
    """Yield the problem of each parameter that files lack, and that ``holding`` have."""
    files = [catalog.files[rank] for rank in ranks]
    state = "" if any(file.nbytes for file in files) else " (0 bytes)"
    for name in names:
        yield Diagnostic(
            code,
            f"not on {format_ranks(ranks)}, but on others",
            hint=f"copy the file again if it was cut short; `ckpttool help {code}` explains",
            facts=f"{shorten((file.path for file in files), 1)}{state}; on {holding}",
            tensor=name,
            ranks=tuple(ranks),
            path=files[0].path if len(files) == 1 else None,
        )


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
    if catalog.description is not None:
        return _described_missing_slices(catalog.damaged.values(), catalog.description.broken)
    missing = _keep_expected_ranks(catalog, missing)
    unreplaced = {rank for owners in missing for rank in owners}
    problems = list(_missing_problems(catalog, sharding, missing, is_deduplicated))
    notes: list[Diagnostic] = []
    without_file = tuple(
        rank for rank in ranks_without_file(catalog, sharding) if rank not in unreplaced
    )
    parameters = _holders_and_layouts(catalog, sharding) if catalog.damaged or without_file else []
    replaced = {
        rank: None if rank in unreplaced else _is_replaced(catalog, sharding, rank, is_deduplicated)
        for rank in catalog.damaged
    }
    if with_replicas := [rank for rank, is_known in replaced.items() if is_known]:
        text = _replacement_text(parameters, with_replicas, catalog)
        notes += [
            _damaged_replica(catalog.damaged[rank], text, (rank,), code="damaged_replica")
            for rank in with_replicas
        ]
    if unknown := tuple(rank for rank, known in replaced.items() if known is False):
        text = f"{format_ranks(unknown)}: replicas do not replace what is damaged"
        facts = "the other ranks hold different parameters (saved without redundancy?)"
        hint = "copy the file again; `ckpttool help missing` explains"
        problems.append(Diagnostic("missing", text, hint=hint, facts=facts, ranks=unknown))
    if without_file and catalog.files:
        text = f"{format_ranks(without_file)}: {_NO_FILE} {catalog.root}"
        facts = _replacement_text(parameters, without_file, catalog)
        notes.append(Diagnostic("missing_replica", text, facts=facts, ranks=without_file))
    damaged = tuple(rank for rank in catalog.damaged if rank not in unreplaced)
    if per_rank and (lost := damaged or without_file):
        problem = Diagnostic(
            "missing" if damaged else "missing_own",
            f"{format_ranks(lost)}: own values of {count(len(per_rank), 'parameter')} are lost",
            hint="--unlisted first, or --unlisted drop",
            options=("--unlisted",),
            facts=f"{shorten(per_rank, 3)}: not in the strategy, a value for each rank",
            ranks=lost,
        )
        (problems if damaged else notes).append(problem)
    damage = tuple(error for rank, error in catalog.damaged.items() if not replaced[rank])
    return MissingSlices(tuple(problems), tuple(notes), damage)


def _damaged_replica(
    error: FormatError, facts: str, ranks: tuple[int, ...] = (), *, code: str
) -> Diagnostic:
    """Return the diagnostic of a damaged file that replicas replace."""
    (one,) = error.diagnostics
    return replace(one, code=code, facts=join_clauses(one.facts, facts), ranks=ranks)


def _described_missing_slices(
    damaged: Iterable[FormatError], broken: Collection[str]
) -> MissingSlices:
    """Return the effects of damaged files of a checkpoint that describes itself.

    Its description lists files by name, not by rank.
    """
    errors = tuple(damaged)
    if broken or any(isinstance(error, _NEVER_REPLACED) for error in errors):
        return MissingSlices((), (), errors)
    text = "other files hold all of its slices"
    notes = tuple(_damaged_replica(error, text, code="faulty_replica") for error in errors)
    return MissingSlices((), notes, ())


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
    missing = catalog.missing_ranks
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


def _is_replaced(
    catalog: Catalog, sharding: Sharding, rank: int, is_deduplicated: bool
) -> bool | None:
    """Return whether other files hold all that a damaged file held.

    Return None if another message tells what is wrong.
    """
    peers: Collection[int] = catalog.files
    if isinstance(catalog.damaged[rank], _NEVER_REPLACED):
        return None  # the error says what to do
    if isinstance(sharding, Strategy):
        if rank not in sharding.ranks:
            return None  # `check_presence` reports ranks outside the strategy
        first = rank - rank % sharding.stage_ranks
        peers = range(first, first + sharding.stage_ranks)
    if hold_same_parameters(catalog, peers) and not is_deduplicated:
        return True
    return False if any(peer in catalog.files for peer in peers) else None


_HoldersAndLayouts = Sequence[tuple[Collection[int], Sequence[Layout]]]


def _holders_and_layouts(catalog: Catalog, sharding: Sharding) -> _HoldersAndLayouts:
    """Return the ranks that hold each parameter, and its layouts if it has any."""
    found = []
    parameter_of_state = catalog.match_states(sharding.layouts)
    for name, ranks in catalog.holders.items():
        parameter = followed_parameter(catalog, sharding, name, ranks, parameter_of_state) or name
        found.append((frozenset(ranks), sharding.layouts.get(parameter, ())))
    return found


def _replacement_text(
    parameters: _HoldersAndLayouts, ranks: Sequence[int], catalog: Catalog
) -> str:
    """Say from which ranks the slices of ``ranks`` are read."""
    used: set[int] = set()
    for holding, layouts in parameters:
        for layout in layouts:
            for rank in ranks:
                owners = layout.owners(layout.slice_index(rank)) if rank in layout.ranks else ()
                used.update([owner for owner in owners if owner in holding][:1])
    others = sorted(used or {min(catalog.files)})  # without layouts every rank holds everything
    return f"all slices are read from replicas: {format_ranks(others)}"


def _missing_problems(
    catalog: Catalog, sharding: Sharding, missing: MissingNames, is_deduplicated: bool
) -> Iterator[Diagnostic]:
    """Yield the problem of each parameter with slices that no rank has."""
    lacking = [*dict.fromkeys(chain(*missing.values()))]
    joined = ""
    if not is_deduplicated and all(_has_each_slice_once(catalog, sharding, one) for one in lacking):
        joined = _joined_hint(catalog, sharding, lacking)
    owners_of: dict[str, set[int]] = defaultdict(set)
    for owners, names in missing.items():
        for name in names:
            owners_of[name].update(owners)
    groups: dict[frozenset[int], list[str]] = defaultdict(list)
    for name, ranks in owners_of.items():
        groups[frozenset(ranks)].append(name)
    for lost, names in groups.items():
        one = _missing_problem(catalog, sorted(lost), is_deduplicated)
        if joined and one.hint:
            one = replace(one, hint=f"{one.hint}, or {joined}", options=("--optimizer-shard",))
        yield from (replace(one, tensor=name) for name in names)


def _joined_hint(catalog: Catalog, sharding: Sharding, names: Sequence[str]) -> str:
    """Return the hint for joined optimizer shards, with the shapes of one tensor; "" for none."""
    for name in names:
        shape, layout = catalog.metas[name].shape, sharding.layouts[name][0]
        if layout.is_even and len(layout.tensor_map) == len(shape):
            joined = replace(layout, optimizer_shard=1).implied_shape(shape)
            shapes = f"{name} is {joined} then, and not {layout.implied_shape(shape)}"
            return f"--optimizer-shard 1 if the optimizer shards were joined before ({shapes})"
    return ""


def _has_each_slice_once(catalog: Catalog, sharding: Sharding, name: str) -> bool:
    """Return whether each slice is on one rank, without the optimizer shard in the strategy.

    With several, contents would show whether these are replicas or slices of the shard.
    """
    layouts = sharding.layouts.get(name, ())
    bare = [replace(layout, optimizer_shard=1) for layout in layouts]
    held = frozenset(catalog.holders.get(name, ()))
    is_listed = any(layout.optimizer_shard > 1 for layout in layouts)
    return is_listed and all(
        len(held.intersection(ranks)) == 1 for layout in bare for ranks in layout.slice_owners()
    )


def _missing_problem(catalog: Catalog, owners: Sequence[int], is_deduplicated: bool) -> Diagnostic:
    """Return the problem of any parameter whose slices on all of ``owners`` are lost."""
    damaged = [rank for rank in owners if rank in catalog.damaged]
    held = [rank for rank in owners if rank in catalog.files]
    without_file = [rank for rank in owners if rank not in catalog.files and rank not in damaged]
    files = [catalog.files[rank] for rank in held]
    empty = [file.path for file in files if not file.nbytes]
    lack = "not in the files"
    if not is_deduplicated:
        state = " (0 bytes)" if len(empty) == len(files) else ""
        lack = f"not in {shorten((file.path for file in files), 1)}{state}"
    states = ((without_file, f"{_NO_FILE} {catalog.root}"), (damaged, "not read"), (held, lack))
    remarks = [f"{format_ranks(ranks)}: {state}" for ranks, state in states if ranks]
    codes = ("leftover", "absent", "part") if without_file else ()
    notes = [note for note in catalog.diagnostics if note.code in codes]
    remarks += [note.message if note.where == catalog.root else note.fact for note in notes]
    if is_deduplicated:
        remarks += [f"{shorten(empty, 1)}: 0 bytes"] if empty and not without_file else []
        remarks.append(f"saved without redundancy ({REDUNDANCY_KEY})")
    hint = "copy the files again; `ckpttool help missing` explains"
    if any(note.code == "part" for note in notes):
        hint = "write all ranks, without --rank, or restore the files"
    elif without_file or damaged:
        hint = "restore the files, or --step for another step"
    if len(damaged) == len(owners) or catalog.errors():
        hint = ""  # other errors name the cause
    return Diagnostic(
        "missing",
        "some slices are on no rank",
        hint=hint,
        facts="; ".join(remarks),
        ranks=tuple(owners),
    )


def propose_stages(
    catalog: Catalog, sharding: Sharding, problems: Sequence[Diagnostic]
) -> list[Diagnostic]:
    """Return the problems; the hint of hand-written lines without pipeline stages is the stages.

    Consecutive ranks with the same parameters are a stage, if all stages are of equal length and
    each holds something of its own.
    """
    by_hand = [
        one for one in problems if one.code == "missing" and one.tensor in sharding.handwritten
    ]
    if not by_hand or not isinstance(sharding, Strategy) or {*sharding.ranks} - {*catalog.files}:
        return [*problems]
    names = [catalog.files[rank].header.keys() for rank in sharding.ranks]
    stages = [(held, len([*ranks])) for held, ranks in groupby(names)]
    number, length = len(stages), len(names) // len(stages)
    has_own = all(not held <= other for (held, _), (other, _) in permutations(stages, 2))
    if number == 1 or number % sharding.stages or {n for _, n in stages} != {length} or not has_own:
        return [*problems]
    lines: dict[str, list[str]] = defaultdict(list)
    for name in (str(one.tensor) for one in by_hand):
        (layout, *_), held_by = sharding.layouts[name], [name in held for held, _ in stages]
        axis = next((axis for axis, n in enumerate(layout.slice_counts) if n > 1), 0)
        slices = math.prod(layout.slice_counts)
        cut = f"axis: {axis}" if length % slices else f"parts: {list(layout.slice_counts)}"
        on = [stage for stage, is_held in enumerate(held_by) if is_held]
        lines[f"{{{cut}, stages: {on}}}"].append(name)
    fitting = "; ".join(f"{shorten(named, 2)}: {line}" for line, named in lines.items())
    place = sharding.handwritten[str(by_hand[0].tensor)]
    hint = f"`stages: {number}` at the top of that file, and these lines above: {fitting}"
    text = f"each {length} ranks hold other parameters: {count(number, 'pipeline stage')}?"
    return [
        replace(one, hint=hint, facts=f"{one.facts}; {text}", where=place, options=())
        if one in by_hand
        else one
        for one in problems
    ]


REDUNDANCY_KEY = "remove_redundancy"


def has_redundancy_mark(catalog: Catalog) -> bool:
    """Return whether a file records that the checkpoint was saved without redundancy."""
    return any(file.attrs.get(REDUNDANCY_KEY) == "True" for file in catalog.files.values())


def is_deduplicated(catalog: Catalog, sharding: Sharding) -> bool:
    """Return whether a checkpoint was saved without redundancy.

    Its files may record it.  Otherwise they show it if each slice is in one file only, and some
    owner of a slice lacks it.  Without layouts every rank owns everything.
    """
    if catalog.description is not None:
        return False  # its description lists the slices of every file
    if has_redundancy_mark(catalog):
        return True
    if any(REDUNDANCY_KEY in file.attrs for file in catalog.files.values()):
        return False
    files = catalog.files
    if _lacks_slices_of_empty_files(catalog, sharding):
        return False
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


def _lacks_slices_of_empty_files(catalog: Catalog, sharding: Sharding) -> bool:
    """Return whether empty files should hold slices that no other file holds.

    Then they were cut short: a save without redundancy leaves no slice out.
    """
    empty = {rank for rank, file in catalog.files.items() if not file.nbytes}
    if not empty:
        return False
    for name, ranks in catalog.holders.items():
        for layout in sharding.layouts.get(name, ()):
            holding = tuple(rank for rank in ranks if rank in layout.ranks)
            if any({*owners} <= empty for owners in layout.gaps(holding)):
                return True
    return False


def redundancy_note(catalog: Catalog, is_deduplicated: bool | None) -> Diagnostic | None:
    """Return the note on a checkpoint without redundancy, or on ranks that hold nothing.

    ``is_deduplicated`` is None without a strategy, which could show it.
    """
    empty = [rank for rank, file in catalog.files.items() if not file.tensors]
    nothing = f"{format_ranks(empty)} hold{'s' if len(empty) == 1 else ''} nothing"
    if is_deduplicated or (is_deduplicated is None and has_redundancy_mark(catalog)):
        text = f"saved without redundancy ({REDUNDANCY_KEY})"
        facts = "each slice is in one file only" + (f"; {nothing}" if empty else "")
        return Diagnostic("deduplicated", text, facts=facts, where=catalog.root)
    if not empty:
        return None
    ranks, file = tuple(empty), catalog.files[empty[0]]
    facts = f"{file.path}: {file.nbytes} bytes; "
    if is_deduplicated is None:
        facts += "cut short, or saved without redundancy"
        hint = "-s STRATEGY, which shows which it is"
        return Diagnostic("empty", nothing, hint=hint, facts=facts, ranks=ranks)
    facts += "the checkpoint was not saved without redundancy"
    hint = "copy the file again; `ckpttool help emptied` explains"
    return Diagnostic("emptied", nothing, hint=hint, facts=facts, ranks=ranks)


def find_nothing(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield the problem of a checkpoint in which there is nothing to examine.

    Every command asks it where its result is summed up: a count of zero is no pass.  Other
    diagnostics say why files that are damaged or contradict each other were not read.
    """
    if not catalog.metas and not catalog.damaged and not catalog.errors():
        files = catalog.files.values()
        text = f"{count(len(files), 'file')}, {sum(file.nbytes for file in files)} bytes"
        ignored = (one for one in catalog.diagnostics if one.code == "skipped")
        facts = join_clauses(text, *(join_clauses(one.fact, one.facts) for one in ignored))
        hint = "copy the files again; `ckpttool help nothing` explains"
        yield Diagnostic(
            "nothing", "no tensor was found", hint=hint, facts=facts, where=catalog.root
        )
    shapes = (one.meta.shape for header in catalog.headers.values() for one in header.values())
    if catalog.metas and not any(map(math.prod, shapes)):
        text = f"{count(len(catalog.metas), 'tensor')} without an element, and no other"
        hint = "save it again; `ckpttool help no_elements` explains"
        facts = shorten((f"{meta.name} {meta.shape}" for meta in catalog.metas.values()), 3)
        yield Diagnostic("no_elements", text, hint=hint, facts=facts, where=catalog.root)


def missing_rank_problems(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield the problem of ranks without a file in a deduplicated checkpoint without layouts.

    No other rank has their parameters, and nothing shows which these are.
    """
    known = {*catalog.files, *catalog.damaged}
    missing = tuple(rank for rank in range(max(known)) if rank not in known)
    if missing:
        yield Diagnostic(
            "missing",
            f"{format_ranks(missing)}: {_NO_FILE} {catalog.root}",
            hint="restore the files, or --step for another step",
            facts=f"saved without redundancy ({REDUNDANCY_KEY}): no other rank has what they had",
            ranks=missing,
        )


def quarantine_damaged(catalog: Catalog, sharding: Sharding) -> Catalog:
    """Return the catalog with empty files among the damaged ones, so that replicas replace them."""
    if catalog.description is not None:
        return catalog
    empty = _find_empty(catalog, sharding)
    if not empty:
        return catalog
    text, facts = "empty (0 bytes)", "a full disk or a crash leaves such files"
    damaged = {
        rank: FormatError(catalog.files[rank].path, None, text, facts=facts) for rank in empty
    }
    return replace(
        catalog,
        files={rank: file for rank, file in catalog.files.items() if rank not in damaged},
        damaged=dict(sorted({**catalog.damaged, **damaged}.items())),
    )


def _find_empty(catalog: Catalog, sharding: Sharding) -> set[int]:
    """Find the ranks whose empty files should hold something.

    A rank may hold nothing if its stage has no layouts, or if the checkpoint has no redundancy.
    Files of ranks without a strategy are found only if all of them are empty.
    """
    empty = {rank for rank, file in catalog.files.items() if not file.nbytes}
    if not empty:
        return empty
    if isinstance(sharding, Merged):
        if catalog.needs_strategy and catalog.metas:
            return set()
    elif is_deduplicated(catalog, sharding):
        return set()
    elif isinstance(sharding, Strategy):
        layouts = {layout for named in sharding.layouts.values() for layout in named}
        empty &= {rank for layout in layouts for rank in layout.ranks}
    return empty


def limit_to_written_ranks(
    catalog: Catalog, sharding: Sharding | None
) -> tuple[Catalog, list[Diagnostic]]:
    """Limit a catalog to the ranks that its manifest lists (--rank), with a note on the others.

    For inspect and verify, which expect no files of other ranks.
    """
    written = _written_ranks(catalog, sharding)
    if written is None:
        return catalog, []
    ranks, note = written
    others = sorted(_expected_ranks(catalog, sharding) - ranks)
    facts = f"{format_ranks(others)}: not expected"
    return replace(catalog, expected_ranks=ranks), [replace(note, facts=facts)]


def note_written_ranks(catalog: Catalog, sharding: Sharding) -> Catalog:
    """Add a note on the ranks that the manifest lists (--rank), if these are not all.

    For conversions, which need all ranks and report those that are missing.
    """
    written = _written_ranks(catalog, sharding)
    if written is None:
        return catalog
    return replace(catalog, diagnostics=(*catalog.diagnostics, written[1]))


def _expected_ranks(catalog: Catalog, sharding: Sharding | None) -> set[int]:
    """Return the ranks of the strategy, and those that the scan found missing."""
    missing = catalog.missing_ranks
    return {*(sharding.ranks if isinstance(sharding, Strategy) else ()), *missing}


def _written_ranks(
    catalog: Catalog, sharding: Sharding | None
) -> tuple[frozenset[int], Diagnostic] | None:
    """Return the ranks that a manifest lists and a note on them; None for all ranks.

    `check_set` reports a manifest that cannot be read.
    """
    path = Path(catalog.root) / MANIFEST
    found = catalog.files.keys() | catalog.damaged.keys()
    expected = _expected_ranks(catalog, sharding)
    if catalog.expected_ranks is not None:
        return None
    if expected <= found or not is_file(path):
        return None
    try:
        outputs = ManifestFile.read(path).manifest().outputs
    except FormatError:
        return None
    ranks = frozenset({*found, *(output.rank for output in outputs)})
    if expected <= ranks or any(Path(o.path).parent != Path(f"rank_{o.rank}") for o in outputs):
        return None
    text = f"written only for {format_ranks([output.rank for output in outputs])} (--rank)"
    return ranks, Diagnostic("part", text, where=str(path))
