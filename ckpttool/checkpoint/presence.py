"""The missing slices of ranks, and the missing files that replicas replace.

The records say who should hold a slice and who does (`ckpttool.model.slicing.holdings`).  A slice
that another rank holds is read from there.  The strategy shows which slices a file held.  The other
ranks of its stage show which unlisted parameters it held, since all run the same program.  A
damaged file is not replaced if these ranks hold different parameters (saved without redundancy).
It may have held something that no other rank has.

``remove_redundancy=True`` assigns the parameters of a replica group to its ranks in turn, so a rank
may hold nothing.  Safetensors files record it, unless they hold nothing.  ``.ckpt`` files do not
record it, and have 0 bytes if they hold nothing.  Every rank stores the parameters without a
layout.  Without any layouts, it assigns all parameters in turn.

Source
------
MindSpore 2.10 ``train/callback/_checkpoint.py`` (``_save_ckpt``), ``train/_utils.py``
(``remove_param_redundancy``).
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from itertools import chain, combinations
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.discovery.rank_folders import find_manifests
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import TEXT
from ckpttool.model.layout import Layout, divisors
from ckpttool.model.names import map_of_component
from ckpttool.model.slicing import BrokenTensor, Tensor, Unlisted
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import (
    CutShortError,
    FileIndex,
    PartlyReadError,
    StoredTensor,
    TensorMeta,
)
from ckpttool.problems import (
    AuthenticityError,
    Diagnostic,
    FormatError,
    UnsupportedError,
    join_clauses,
)
from ckpttool.transaction.sealed_files import ManifestFile
from ckpttool.wording import count

REDUNDANCY_KEY = "remove_redundancy"

# An unsupported file is intact, and another may be forged: replicas must not hide that.
NEVER_REPLACED = (UnsupportedError, AuthenticityError)


def has_redundancy_mark(catalog: Catalog) -> bool:
    """Return whether a file records that the checkpoint was saved without redundancy."""
    return any(file.attrs.get(REDUNDANCY_KEY) == "True" for file in catalog.files.values())


def is_deduplicated(catalog: Catalog, strategy: Strategy) -> bool:
    """Return whether a checkpoint was saved without redundancy.

    Its files may record it.  Otherwise they show it if each slice is in one file only, and some
    owner of a slice lacks it.  Without layouts every rank owns everything.
    """
    if catalog.description is not None:
        return False  # it lists the slices of every file
    if has_redundancy_mark(catalog):
        return True
    if any(REDUNDANCY_KEY in file.attrs for file in catalog.files.values()):
        return False
    return shows_deduplication(catalog, strategy)


def shows_deduplication(catalog: Catalog, strategy: Strategy) -> bool:
    """Return whether each slice is in one file only, and some rank with a file lacks its slice."""
    files = catalog.whole_files
    if _lacks_slices_of_empty_files(catalog, strategy):
        return False
    if not strategy.layouts:
        counts = Counter(name for file in files.values() for name in file.header)
        return len(files) > 1 and bool(counts) and max(counts.values()) == 1
    is_incomplete = False
    for name, layouts in strategy.layouts.items():
        for layout in layouts:
            if math.prod(layout.slice_counts) == len(layout.ranks):
                continue  # every slice has one owner, so counting would only take time
            for owners in layout.slice_owners():
                are_holders = [name in files[rank].header for rank in owners if rank in files]
                if sum(are_holders) > 1:
                    return False
                is_incomplete |= any(are_holders) and len(are_holders) > 1
    return is_incomplete


def _lacks_slices_of_empty_files(catalog: Catalog, strategy: Strategy) -> bool:
    empty = {rank for rank, file in catalog.files.items() if not file.nbytes}
    return bool(empty) and any(
        {*owners} <= empty
        for name, ranks in catalog.holders.items()
        for layout in strategy.layouts.get(name, ())
        for owners in layout.gaps(tuple(rank for rank in ranks if rank in layout.ranks))
    )


def quarantine_empty(catalog: Catalog, strategy: Strategy | None) -> Catalog:
    """Return the catalog with empty files among the damaged ones, so that replicas replace them.

    A rank may hold nothing if its stage lacks layouts, or if redundancy was removed.  Without a
    strategy, ranks may hold nothing unless all do.
    """
    empty = {rank: file for rank, file in catalog.files.items() if not file.nbytes}
    if strategy is None:
        may_be_empty = bool(catalog.metas) and not catalog.is_merged
    else:
        may_be_empty = catalog.description is not None or is_deduplicated(catalog, strategy)
    if not empty or may_be_empty:
        return catalog
    if strategy is not None and strategy.layouts:
        layouts = {layout for named in strategy.layouts.values() for layout in named}
        ranks = {rank for layout in layouts for rank in layout.ranks}
        empty = {rank: file for rank, file in empty.items() if rank in ranks}
    message, facts = "empty (0 bytes)", "a full disk or a crash leaves such files"
    damaged = {
        rank: FormatError(file.path, None, message, facts=facts) for rank, file in empty.items()
    }
    if not damaged:
        return catalog
    return replace(
        catalog,
        files={rank: file for rank, file in catalog.files.items() if rank not in damaged},
        damaged=dict(sorted({**catalog.damaged, **damaged}.items())),
    )


def count_stages(catalog: Catalog) -> int:
    """Return the number of pipeline stages that the names in the files of all ranks show.

    The ranks of a stage hold the same names.  Two stages share fewer names than each has alone, so
    a file that is cut short does not count as a stage.  Every rank must be there: nothing else
    shows what a missing one held.
    """
    if catalog.damaged or catalog.missing_ranks or not catalog.files:
        return 1
    names_of = {
        rank: frozenset(header) for ranks, header in catalog.headers.items() for rank in ranks
    }
    ranks = max(names_of, default=0) + 1
    for size in reversed(divisors(ranks)):
        stages = [
            {names_of.get(rank) for rank in range(at, at + size)} for at in range(0, ranks, size)
        ]
        if all(len(names) == 1 for names in stages):
            distinct = [names for of_stage in stages for names in of_stage if names]
            is_each_own = hold_other_names(distinct) and len(distinct) == len(stages)
            return len(stages) if is_each_own else 1
    return 1


def hold_other_names(kinds: Iterable[frozenset[str]]) -> bool:
    """Return whether any two of the sets of names share fewer than each has for itself."""
    return all(len(a & b) < min(len(a - b), len(b - a)) for a, b in combinations(kinds, 2))


# ----------------------------------------------------------------------- files that are cut short


def with_lost_tensors(catalog: Catalog, strategy: Strategy) -> Catalog:
    """Return the catalog with all that is known of what files that are cut short have lost.

    The header of a ``.ckpt`` does not list its tensors.  A manifest may.  The ranks of a stage run
    the same program, so a file that begins with the same tensors shows those that follow.
    """
    if not catalog.cut_short:
        return catalog  # with the tables that it has made
    damaged = dict(catalog.damaged)
    for rank, error in catalog.cut_short.items():
        remains = error.remains
        if remains.are_all_known:
            continue
        begin = [*map(_key, remains.index.tensors.values())]
        sources = chain(_of_manifests(catalog, error.path), _of_stage(catalog, strategy, rank))
        rests = [names[len(begin) :] for names in sources if begin and names[: len(begin)] == begin]
        names = {name for name, *_ in rests[0]} if rests else {*strategy.layouts}
        if rests and all({name for name, *_ in rest} == names for rest in rests):
            lost = {
                name: TensorMeta(name, dtype, shape, "" if dtype == TEXT else None)
                for name, dtype, shape in rests[0]
            }
            known = replace(remains, lost=lost, are_all_known=names >= remains.lost.keys())
        else:
            of_strategy = dict.fromkeys(_find_listed(catalog, strategy, rank, remains.index))
            known = replace(remains, lost={**of_strategy, **remains.lost})
        damaged[rank] = error.knowing(known)
    return replace(catalog, damaged=damaged)


_Listed: TypeAlias = tuple[str, str, tuple[int, ...]]  # name, element type and shape of a tensor


def _key(tensor: StoredTensor) -> _Listed:
    return tensor.meta.name, tensor.meta.dtype, tensor.meta.shape


def _of_manifests(catalog: Catalog, path: str) -> Iterator[list[_Listed]]:
    for manifest in find_manifests(catalog):
        try:
            outputs = ManifestFile.read(manifest).outputs()
        except FormatError:
            continue  # `ckpttool.checks.manifest_hashes.check_source` reports it
        for output in outputs:
            if os.path.abspath(manifest.parent / output.path) == os.path.abspath(path):  # noqa: PTH100
                yield [(t.name, t.dtype, t.shape) for t in output.tensors]


def _of_stage(catalog: Catalog, strategy: Strategy, rank: int) -> Iterator[list[_Listed]]:
    ranks_of_stage = strategy.stage_ranks if strategy.layouts else len(strategy.ranks)
    for ranks, header in catalog.headers.items():
        stages = {r // ranks_of_stage for r in ranks if r not in catalog.damaged}
        if rank // ranks_of_stage in stages:
            yield [*map(_key, header.values())]


def _find_listed(catalog: Catalog, strategy: Strategy, rank: int, left: FileIndex) -> Iterator[str]:
    for name, layouts in strategy.layouts.items():
        for layout in layouts if name not in left.tensors else ():
            if rank in layout.ranks:
                owners = layout.owners(layout.slice_index(rank))
                if not {*owners} & {*catalog.holders.get(name, ())}:
                    yield name


def is_rest_known(catalog: Catalog, strategy: Strategy, error: CutShortError) -> bool:
    """Return whether nothing but what is known to be lost may have followed in a file.

    So it is if a strategy lists all that the other files hold, which are those of the same run.
    """
    names = {*chain.from_iterable(file.header for file in catalog.whole_files.values())}
    is_listed = bool(strategy.layouts) and bool(names) and names <= strategy.layouts.keys()
    return error.remains.are_all_known or is_listed


def without_harmless(
    catalog: Catalog, strategy: Strategy, wanted: Set[str], *, are_named: bool
) -> Catalog:
    """Return the catalog without the damage of files that are cut short behind what is wanted.

    The catalog has only the ``wanted`` tensors; ``are_named`` if the user named each of them.
    """
    damaged, notes = dict(catalog.damaged), list[Diagnostic]()
    for number, error in catalog.cut_short.items():
        lost = error.remains.lost
        is_left = number in catalog.files or catalog.description is not None
        is_known = are_named or is_rest_known(catalog, strategy, error)
        if is_left and is_known and wanted.isdisjoint(lost):
            del damaged[number]
            (problem,) = error.diagnostics
            facts = join_clauses(problem.facts, f"{count(len(lost), 'lost tensor')}, not wanted")
            note = replace(problem, code="cut_short", hint="", facts=facts)
            is_cut = not isinstance(error, PartlyReadError)
            notes.append(note if is_cut else replace(note, code="skipped"))
        else:
            of_wanted = {name: meta for name, meta in lost.items() if name in wanted}
            damaged[number] = error.knowing(replace(error.remains, lost=of_wanted))
    diagnostics = (*catalog.diagnostics, *notes)
    return replace(catalog, damaged=damaged, diagnostics=diagnostics)


# ------------------------------------------------------------------------------- missing slices

MissingNames = dict[tuple[int, ...], list[str]]  # owners of missing slices to names


class Presence(Struct, frozen=True):
    """The missing slices and files of a checkpoint."""

    missing: MissingNames  # slices that no rank has
    unsaved: tuple[str, ...]  # listed names that were not saved
    without_file: tuple[int, ...]  # ranks that miss nothing, since replicas hold it
    # Damaged ranks, and whether other files hold all of theirs; None if another message says it.
    replaced: dict[int, bool | None]


def find_missing(
    catalog: Catalog,
    strategy: Strategy,
    tensors: Iterable[Tensor],
    deduplicated: bool,
    needed: Mapping[str, Collection[tuple[int, ...]]] | None = None,
    wanted: Collection[str] | None = None,
) -> Presence:
    """Find the slices that no file holds, and the damaged files that replicas replace.

    ``needed`` has the owners of the slices that are needed, by name; None if all are.  ``wanted``
    are the names that count; None if all do.
    """
    if catalog.description is not None:
        is_replaced = not catalog.description.broken and not any(
            isinstance(error, NEVER_REPLACED) for error in catalog.damaged.values()
        )
        is_replaced &= bool(catalog.documents)  # else only the file says what is in it
        return Presence({}, (), (), dict.fromkeys(catalog.damaged, is_replaced))
    missing: MissingNames = defaultdict(list)
    listed_strategy = strategy if wanted is None else strategy.with_only(wanted)
    unsaved = _find_absent(catalog, listed_strategy, deduplicated, missing, needed)
    for tensor in tensors:
        for owners in tensor.gaps if isinstance(tensor, BrokenTensor) else ():
            expected = tuple(filter(catalog.is_expected, owners))
            if expected:
                missing[expected].append(tensor.name)
    lost = {*chain(*missing)}
    replaced = {
        rank: None if rank in lost else _is_replaced(catalog, strategy, rank, deduplicated)
        for rank in catalog.damaged
    }
    without_file = (rank for rank in ranks_without_file(catalog, strategy) if rank not in lost)
    return Presence(missing, unsaved, tuple(without_file), replaced)


def ranks_without_file(catalog: Catalog, strategy: Strategy) -> list[int]:
    """Return the ranks without a file, not even a damaged one, that should have one."""
    known = {*catalog.files, *catalog.damaged}
    expected = strategy.ranks if strategy.layouts else catalog.missing_ranks
    return [rank for rank in expected if rank not in known and catalog.is_expected(rank)]


def hold_same_parameters(catalog: Catalog, ranks: Collection[int]) -> bool:
    """Return whether the files of ``ranks``, at least one, hold the same parameters."""
    files = catalog.whole_files
    names_of = [files[rank].header.keys() for rank in ranks if rank in files]
    return bool(names_of) and all(names == names_of[0] for names in names_of)


def _is_replaced(
    catalog: Catalog, strategy: Strategy, rank: int, deduplicated: bool
) -> bool | None:
    """Return whether other files hold all that a damaged file held; see `Presence`."""
    error = catalog.damaged[rank]
    if isinstance(error, NEVER_REPLACED):
        return None  # the error says what to do
    if isinstance(error, CutShortError) and error.remains.are_all_known:
        return all(name in catalog.holders for name in error.remains.lost)
    peers: Collection[int] = catalog.files
    if strategy.layouts:
        if rank not in strategy.ranks:
            return None  # ranks outside the strategy are a problem of their own
        peers = strategy.ranks_of(rank // strategy.stage_ranks)
    if hold_same_parameters(catalog, peers) and not deduplicated:
        return True
    return False if any(peer in catalog.files for peer in peers) else None


def _find_absent(
    catalog: Catalog,
    strategy: Strategy,
    deduplicated: bool,
    missing: MissingNames,
    needed: Mapping[str, Collection[tuple[int, ...]]] | None,
) -> tuple[str, ...]:
    """Return the listed parameters on no rank that were not saved; add the others to ``missing``.

    A parameter was not saved if its owners have files without it.  It is missing if these files are
    missing.  If redundancy was removed, absent state is missing as well, and if any file is empty,
    so is every absent parameter: that file may have held it.  Optimizer state was not saved if no
    rank holds state with its prefix, since many checkpoints contain only weights.
    """
    holders = catalog.holders
    if not any(name in strategy.layouts for name in holders):
        return ()  # the strategy is of another checkpoint
    states = catalog.match_states(strategy.layouts)
    saved_prefixes = {name.removesuffix(states.get(name, "")) for name in holders}
    are_filled = all(file.nbytes for file in catalog.files.values())
    unsaved = []
    for name in (name for name in strategy.layouts if name not in holders):
        parameter, layouts = states.get(name, ""), strategy.layouts[name]
        slices = None if needed is None else needed.get(name, ())
        if slices is not None:
            if not slices:
                continue
            at_hand = {rank // strategy.stage_ranks for rank in catalog.files}
            layouts = tuple(layout for layout in layouts if layout.stage in at_hand) or layouts
        is_weight = parameter not in strategy.layouts
        is_conclusive = not deduplicated or (is_weight and are_filled)
        is_conclusive &= all(_is_conclusive(catalog, layout, slices) for layout in layouts)
        if is_conclusive or not (is_weight or name.removesuffix(parameter) in saved_prefixes):
            unsaved.append(name)
            continue
        ranks = chain(*(layout.ranks for layout in layouts) if slices is None else slices)
        if expected := tuple(filter(catalog.is_expected, dict.fromkeys(ranks))):
            missing[expected].append(name)
    return tuple(unsaved)


def _is_conclusive(
    catalog: Catalog, layout: Layout, needed: Iterable[tuple[int, ...]] | None
) -> bool:
    if all(rank in catalog.whole_files for rank in layout.ranks):
        return True
    slices = layout.slice_owners() if needed is None else needed
    return hold_same_parameters(catalog, layout.ranks) and all(
        any(rank in catalog.files for rank in owners)
        for owners in slices
        if owners[0] in layout.ranks
    )


# --------------------------------------------------------------------- tensors without a layout


class PartlyHeld(Struct, frozen=True):
    """Parameters without a layout that some ranks of a stage hold and others do not."""

    names: tuple[str, ...]
    ranks: tuple[int, ...]  # they hold all of the names, in any stage
    missing: tuple[int, ...]  # ranks of these stages that have a file without them
    instead: tuple[str, ...] = ()  # what all other ranks hold, if only one rank holds these

    @property
    def is_on_one_rank(self) -> bool:
        """Whether only one rank holds them."""
        return len(self.ranks) == 1


def find_partly_held(
    catalog: Catalog, strategy: Strategy, tensors: Iterable[Tensor], deduplicated: bool
) -> tuple[PartlyHeld, ...]:
    """Find the unlisted parameters that only some ranks of their stage hold.

    The ranks of a stage run the same program and save the same names.  If a rank lacks a name, its
    file is damaged or the parameter was renamed.  A checkpoint without redundancy may store each
    parameter on one rank of a stage.  Nothing is found if it does so for all of them.  Ranks that
    hold nothing and map parameters are checked elsewhere.
    """
    if not strategy.layouts:
        return ()
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, ranks in catalog.holders.items():
        names[ranks].append(name)
    stages: dict[int, set[int]] = defaultdict(set)
    for rank in (rank for rank, file in catalog.whole_files.items() if file.tensors):
        stages[rank // strategy.stage_ranks].add(rank)
    missing: dict[tuple[int, ...], tuple[int, ...]] = {}
    for ranks in names:
        stages_of = {rank // strategy.stage_ranks for rank in ranks}
        members = {*chain(*(stages[stage] for stage in stages_of))}
        missing[ranks] = tuple(sorted(members.difference(ranks)))
    if not any(missing.values()):
        return ()
    unlisted = {
        tensor.name
        for tensor in tensors
        if isinstance(tensor.known_by, Unlisted) and map_of_component(tensor.name) is None
    }
    partly = []
    for ranks, lacking in missing.items():
        of_ranks = tuple(name for name in names[ranks] if name in unlisted)
        if lacking and of_ranks:
            same = (names[holders] for holders, without in missing.items() if without == ranks)
            instead = tuple(chain(*same)) if len(ranks) == 1 else ()
            partly.append(PartlyHeld(of_ranks, ranks, lacking, instead))
    if deduplicated and all(
        len(part.ranks) == len({rank // strategy.stage_ranks for rank in part.ranks})
        for part in partly
    ):
        return ()
    return tuple(partly)
