"""Full shape, layout and owners of every parameter: catalog + source strategy -> sources.

A source is a full tensor, the layout of its slices and the files that hold them.  Parameters that
the strategy lists have its layout.  Optimizer state that it omits follows its parameter.  Any other
parameter is one full tensor if all ranks hold the same bytes, and a question to the user if not.

A merged checkpoint holds full tensors, in one file or several.  Of several, one may hold the
tensors that go to every rank as they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ckpttool.errors import FormatError
from ckpttool.model.catalog import Catalog, MergedCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.layout import Layout, ambiguity, fold_layout
from ckpttool.model.optimizer_names import parameter_of, reduced_from
from ckpttool.model.slicing import (
    FollowsParameter,
    LayoutSlicing,
    Listed,
    NotInStrategy,
    Origin,
    Source,
    follow,
    odd_state,
)
from ckpttool.model.strategy import Merged, Replicated, SelfDescribed, Sharding, Strategy
from ckpttool.model.tensors import TensorMeta, map_of, part_names
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.planning.missing import (
    MissingSlices,
    find_missing_slices,
    hold_same_parameters,
    is_deduplicated,
    missing_rank_problems,
    redundancy_note,
)
from ckpttool.planning.optimizer_state import (
    ParameterOfState,
    correct_layouts,
    followed_parameter,
    match_states_by_name,
    parameter_by_prefix,
    state_layouts,
    state_shape_message,
)
from ckpttool.planning.unlisted import (
    RANK_SPECIFIC_NAMES,
    DifferingNames,
    PartlyHeld,
    RankGroups,
    UnlistedChoice,
    decision_note,
    find_partly_held,
    guessed_state_notes,
    handwritten_shape_problems,
    layout_notes,
    misplaced_notes,
    split_names,
    unlisted_problems,
)

_T = TypeVar("_T", bound=Hashable)


def join_slices(
    catalog: Catalog, layout: Layout, metas: Mapping[int, TensorMeta]
) -> tuple[Layout, TensorMeta] | str:
    """The layout, folded if it was expanded, and the full tensor; or what is wrong, in words.

    Parameters
    ----------
    catalog
        The files, for messages.
    layout
        As the strategy has it.
    metas
        Rank to slice, of the ranks of the stage that have one; ascending, at least one.
    """
    ranks = list(metas)
    shapes = group_metas(metas, lambda meta: meta.shape)
    name = metas[ranks[0]].name
    if len(shapes) > 1 and layout.has_equal_slices:
        return disagreement(catalog, name, "slice shape", shapes)
    piece = metas[ranks[0]].shape
    ways = fold_layout(layout, len(piece), lambda way: way.fills(piece))
    if len(ways) > 1:
        return f"{name}: {ambiguity(layout, ways)}"
    layout = ways[0] if ways else layout
    # Of a manual split one slice may have other axes than the rest; that one is to be named.
    axes = len(layout.tensor_map)
    meta = next((metas[rank] for rank in ranks if len(metas[rank].shape) == axes), metas[ranks[0]])
    full = meta
    if len(meta.shape) == axes:
        full = meta.of_shape(layout.implied_shape(meta.shape))
    reason = layout.why_not(full.shape)
    if reason is not None:
        return f"{name}: {format_ranks(ranks)}, slice shape {meta.shape}: {reason}"
    wrong = [
        f"rank {rank} ({catalog.files[rank].path}) has {metas[rank].shape}, expected {shape}"
        for rank in (() if layout.has_equal_slices else ranks)
        if metas[rank].shape != (shape := layout.slice_shape(rank, full.shape))
    ]
    if wrong:
        split = f"the manual split of {list(layout.rows)} rows"
        return f"{name}: slice shapes are not those of {split}: {shorten(wrong)}"
    return layout, full


def disagreement(
    catalog: Catalog, name: str, what: str, groups: Mapping[_T, tuple[int, ...]]
) -> str:
    """Who holds what, the few before the many, with a file of each of the few; for a message."""
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))
    parts = []
    for value, ranks in ordered[:-1]:
        parts.append(f"{format_ranks(ranks)} ({catalog.files[ranks[0]].path}) has {value}")
    value, ranks = ordered[-1]
    parts.append(f"{format_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}")
    return f"{name}: the {what} differs between ranks: {', '.join(parts)}"


def group_metas(
    metas: Mapping[int, TensorMeta], key: Callable[[TensorMeta], _T]
) -> dict[_T, tuple[int, ...]]:
    """The ranks with equal ``key`` of what they hold, as of `group_ranks`.

    Ranks whose headers are alike share what these say, so the few different objects are looked at,
    not the many ranks.
    """
    different = dict(zip(map(id, metas.values()), metas.values(), strict=True))
    keys = {at: key(meta) for at, meta in different.items()}
    if len(set(keys.values())) == 1:
        return {next(iter(keys.values())): tuple(metas)}
    return group_ranks(tuple(metas), lambda rank: keys[id(metas[rank])])


def group_ranks(ranks: Sequence[int], key: Callable[[int], _T]) -> dict[_T, tuple[int, ...]]:
    """The ranks with equal ``key``, by key, in the order of the first of each."""
    groups: dict[_T, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return {value: tuple(members) for value, members in groups.items()}


Agreement = Mapping[str, RankGroups]  # of the content of a parameter


@dataclass(slots=True)
class Sources:
    """What `find_sources` found: sources in the order of the files, all problems, all notes.

    ``is_deduplicated`` says that of ranks with equal slices one alone has each.
    ``damage`` are the errors of damaged files that nothing replaces.
    """

    found: list[Source] = field(default_factory=list)
    problems: list[Diagnostic] = field(default_factory=list)
    notes: list[Diagnostic] = field(default_factory=list)
    is_deduplicated: bool = False
    damage: list[FormatError] = field(default_factory=list)

    def add(self, losses: MissingSlices) -> None:
        """Take over what is lost, and what is replaced."""
        self.problems += losses.problems
        self.notes += losses.notes
        self.damage += losses.damage


def content_decided_names(catalog: Catalog, sharding: Sharding) -> dict[str, str | None]:
    """Parameters of which the contents decide: not listed, on several ranks, alike by header.

    Returns
    -------
    dict
        Of each that may be state, as names and shapes show, the parameter; contents may contradict.
        A state of one of MindSpore's optimizers needs no contents.
    """
    found: dict[str, str | None] = {}
    if isinstance(sharding, Merged):
        return found
    owners = _owners_in(catalog, sharding)
    for name, ranks in catalog.holders.items():
        if name in sharding.layouts:
            continue
        follows = followed_parameter(catalog, sharding, name, ranks, owners)
        described = _described_source(catalog, name, ranks, owners)
        if described is not None:
            if described.parameter is None:
                continue
            follows = described.parameter
        if follows is not None and parameter_by_prefix(name) is not None:
            continue
        metas = {header[name].meta for header in catalog.headers.values() if name in header}
        if len(ranks) > 1 and len(metas) == 1 and next(iter(metas)).text is None:
            found[name] = follows
    return found


def _listed_names(catalog: Catalog, sharding: Sharding) -> Collection[str]:
    """Return the names of which the strategy, or the checkpoint itself, gives the slices."""
    if isinstance(catalog, SelfDescribedCatalog):
        return catalog.description.tensors.keys()
    return sharding.layouts.keys()


def _owners_in(catalog: Catalog, sharding: Sharding) -> dict[str, str]:
    """Return the parameter of every optimizer state, as far as names tell."""
    return match_states_by_name(_listed_names(catalog, sharding), catalog.metas)


def find_sources(
    catalog: Catalog,
    sharding: Sharding,
    agreement: Agreement,
    unlisted: UnlistedChoice | None,
    running: Collection[str] = (),
) -> Sources:
    """Find the sources of all parameters of a checkpoint.

    Parameters
    ----------
    catalog
        What is on disk.
    sharding
        How the tensors are spread over its files; a strategy has no rules any more.
    agreement
        For each of `content_decided_names`, the ranks grouped by equal content.
    unlisted
        What to do with a parameter that is not listed and differs between ranks: target rank ``r``
        takes what source rank ``r`` modulo the number of source ranks holds (``"rank"``), the
        lowest rank's for all (``"first"``), none (``"drop"``).  None makes it a problem.
    running
        Parameters that are running statistics, so that they differ by design.
    """
    if isinstance(sharding, Merged):
        return _full_sources(catalog, unlisted)
    presence = check_presence(catalog, sharding)
    sources = Sources(
        problems=presence.problems,
        notes=presence.notes,
        is_deduplicated=presence.is_deduplicated,
    )
    is_complete = not sources.problems
    owners = _owners_in(catalog, sharding)
    partly = find_partly_held(catalog, sharding, sources.is_deduplicated)
    alone = {name: one for one in partly if one.is_on_one_rank for name in one.names}
    search = _Search(
        catalog, sharding, agreement, unlisted, running, sources, presence.lacking, owners, alone
    )
    for name, ranks in catalog.holders.items():
        search.take(name, ranks)
    search.settle(is_complete)
    asked = {name for names in search.differing.values() for name in names}
    sources.notes += (
        Diagnostic("partly_held", f"{one.message}; taken from {format_ranks(one.ranks[:1])}")
        for one in partly
        if not asked.issuperset(one.names)
    )
    sources.problems += handwritten_shape_problems(sharding, sources.found)
    each = [name for of in search.differing.values() for name in of if unlisted == "rank"]
    lacking = presence.lacking
    sources.add(find_missing_slices(catalog, sharding, lacking, each, sources.is_deduplicated))
    sources.notes += layout_notes(sources.found, search.corrected, search.where)
    listed = _listed_names(catalog, sharding)
    sources.notes += guessed_state_notes(sources.found, listed, owners)
    sources.notes += misplaced_notes(sharding, catalog.holders)
    if not isinstance(sharding, SelfDescribed):
        note = redundancy_note(catalog, sources.is_deduplicated)
        sources.notes += [] if note is None else [note]
    return sources


@dataclass(slots=True)
class _Search:
    """What `find_sources` goes by, and what it has found so far.

    Attributes
    ----------
    sources, lacking
        Where what is found goes, and what is lost, by the ranks that should have it.
    owners
        See `match_states_by_name`.
    alone
        Names without a layout that one rank alone has, though its stage has others.
    corrected
        Names whose layouts are not as the strategy says.
    differing
        Names without a layout that differ between ranks, by the ranks that hold the same.
    """

    catalog: Catalog
    sharding: Sharding
    agreement: Agreement
    unlisted: UnlistedChoice | None
    running: Collection[str]
    sources: Sources
    lacking: dict[tuple[int, ...], list[str]]
    owners: ParameterOfState
    alone: Mapping[str, PartlyHeld]
    corrected: list[str] = field(default_factory=list)
    differing: dict[RankGroups, list[str]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """What says how tensors are cut."""
        is_described = isinstance(self.sharding, SelfDescribed)
        return "the description" if is_described else "the strategy"

    def take(self, name: str, ranks: Sequence[int]) -> None:
        """Find the source of one parameter, which ``ranks`` hold."""
        catalog, sharding = self.catalog, self.sharding
        described = _described_source(catalog, name, ranks, self.owners)
        if described is not None and described.parameter is not None:
            is_contradicted = self._is_contradicted(name, described.slicing.owners())
            described = None if is_contradicted else described
        if described is not None:
            self.sources.found.append(described)
        if described is not None or _is_broken(catalog, name):
            return
        followed = followed_parameter(catalog, sharding, name, ranks, self.owners)
        layouts = state_layouts(sharding, name, self.owners)
        if followed is not None and self._is_contradicted(name, _shares(layouts)):
            followed = None
        if name not in sharding.layouts and followed is None:
            self._take_unlisted(name, ranks)
            return
        if followed is None:
            layouts = correct_layouts(catalog, sharding, name, self.owners)
            self.corrected += [name] if layouts != sharding.layouts[name] else []
        origin = Listed() if followed is None else FollowsParameter(followed)
        source = _sharded_source(catalog, layouts, name, ranks, origin, self.lacking, self.sources)
        if source is not None:
            self.sources.found.append(source)

    def _is_contradicted(self, name: str, shares: Iterable[Sequence[int]]) -> bool:
        """Whether contents show that a tensor is not shared by ranks as a state of it would be.

        ``shares`` are the ranks that would hold the same.  Ranks that all hold the same, where a
        state would differ, hold a parameter that is whole.  The prefixes of MindSpore's optimizers
        need no such proof.
        """
        if parameter_by_prefix(name) is not None:
            return False
        groups = self.agreement.get(name, ())
        place = {rank: number for number, group in enumerate(groups) for rank in group}
        found = [held for ranks in shares if (held := {place[r] for r in ranks if r in place})]
        if any(len(held) > 1 for held in found):
            return True
        return len(groups) == 1 and len(found) > 1

    def _take_unlisted(self, name: str, ranks: Sequence[int]) -> None:
        catalog = self.catalog
        groups = _group_by_content(catalog, self.agreement, name, ranks)
        meta = catalog.files[ranks[0]].header[name].meta
        odd = _odd_shape(catalog, self.sharding, meta, self.owners)
        is_decided = odd is not None and self.unlisted is not None
        if _may_be_parts(catalog, name, groups) or name in self.alone or is_decided:
            self.differing.setdefault(groups, []).append(name)
        elif odd is not None:
            self.sources.problems.append(
                Diagnostic("unlisted", odd, tensor=name, ranks=tuple(ranks))
            )
        else:
            self.sources.found.append(full_source(catalog, name, ranks[0]))

    def settle(self, is_complete: bool) -> None:
        """What becomes of those that differ: as the user decided, or a question.

        Where ranks are missing, or the strategy is of another run, it would only follow from that.
        """
        if self.unlisted is not None:
            self._settle(self.differing, self.unlisted)
        elif is_complete:
            own, rest = split_names(self.differing, RANK_SPECIFIC_NAMES)
            self._settle(own, "drop")
            told_by = None if isinstance(self.sharding, Replicated) else self.where
            number = len(self.catalog.holders)
            is_cut = isinstance(self.sharding, Strategy)
            self.sources.problems += unlisted_problems(
                told_by, rest, number, self.alone, is_cut, self.running
            )

    def _settle(self, differing: DifferingNames, unlisted: UnlistedChoice) -> None:
        catalog, sources = self.catalog, self.sources
        cycle = max(len(self.sharding.ranks), max(catalog.files, default=0) + 1)
        for groups, names in differing.items():
            ranks = sorted(rank for group in groups for rank in group)
            if unlisted == "first":
                sources.found += [full_source(catalog, name, ranks[0]) for name in names]
            elif unlisted == "rank":
                sources.found += [
                    full_source(catalog, name, rank, (rank % cycle, cycle))
                    for name in names
                    for rank in ranks
                ]
            sources.notes.append(decision_note(names, groups, unlisted, cycle, self.where))


def _shares(layouts: Iterable[Layout]) -> Iterator[Sequence[int]]:
    """The ranks that hold equal slices, slice by slice."""
    for layout in layouts:
        yield from layout.slice_owners()


def _described_source(
    catalog: Catalog, name: str, ranks: Sequence[int], owners: ParameterOfState
) -> Source | None:
    """Return the source of a described tensor, or of its state; None if nothing describes it."""
    if not isinstance(catalog, SelfDescribedCatalog):
        return None
    tensors = catalog.description.tensors
    base = tensors.get(_shaped_owner(name, owners))
    if name in tensors or base is None:
        return tensors.get(name)
    return follow(base, name, {rank: catalog.files[rank].tensors[name] for rank in ranks})


def _is_broken(catalog: Catalog, name: str) -> bool:
    return isinstance(catalog, SelfDescribedCatalog) and name in catalog.description.broken


def _shaped_owner(name: str, owners: ParameterOfState) -> str:
    """The parameter of a state that has its shape; none of a statistic, which has not."""
    return owners.get(name, "") if reduced_from(name) is None else ""


def _odd_shape(
    catalog: Catalog, sharding: Sharding, meta: TensorMeta, owners: ParameterOfState
) -> str | None:
    """Why optimizer state without a layout is not taken as it is, or None if nothing speaks so."""
    if not isinstance(catalog, SelfDescribedCatalog):
        return state_shape_message(catalog, sharding, meta, owners)
    if parameter_by_prefix(meta.name) is None:
        return None
    base = catalog.description.tensors.get(_shaped_owner(meta.name, owners))
    return None if base is None else odd_state(base, meta)


def _may_be_parts(catalog: Catalog, name: str, groups: RankGroups) -> bool:
    """Whether ranks hold different things, or only some of them a map parameter."""
    holders = sum(len(group) for group in groups)
    return len(groups) > 1 or (map_of(name) is not None and holders < len(catalog.files))


def _group_by_content(
    catalog: Catalog, agreement: Agreement, name: str, ranks: Sequence[int]
) -> RankGroups:
    """Ranks grouped by equal bytes, as far as is known; of a map parameter by all of its parts."""
    tag = map_of(name)
    parts = (name,) if tag is None else part_names(tag)

    def content(rank: int) -> tuple[object, ...]:
        tensors = [catalog.files[rank].header.get(part) for part in parts]
        groups = [agreement.get(part, ()) for part in parts]
        which = [next((g for g in known if rank in g), None) for known in groups]
        return (*(tensor and tensor.meta for tensor in tensors), *which)

    return tuple(group_ranks(ranks, content).values())


def full_source(
    catalog: Catalog, name: str, rank: int, rank_cycle: tuple[int, int] | None = None
) -> Source:
    """Return the source of a full tensor that the file of ``rank`` holds."""
    meta = catalog.files[rank].header[name].meta
    layout = Layout.unsharded(len(meta.shape), 1, rank)
    slicing = LayoutSlicing(layout, meta.shape, catalog.tensors_of(name))
    return Source(meta, slicing, NotInStrategy(rank_cycle))


def _sharded_source(
    catalog: Catalog,
    layouts: Sequence[Layout],
    name: str,
    ranks: Sequence[int],
    origin: Origin,
    lacking: dict[tuple[int, ...], list[str]],
    sources: Sources,
) -> Source | None:
    """Return the source of a parameter that has layouts; None if there are problems.

    A parameter shared by stages is taken from the lowest stage that holds all of it.
    """
    files = catalog.files
    metas, tensors = catalog.metas_of(name), catalog.tensors_of(name)
    dtypes = group_metas(metas, lambda meta: meta.dtype)
    if len(dtypes) > 1:
        text = disagreement(catalog, name, "element type", dtypes)
        sources.problems.append(Diagnostic("dtype", text, tensor=name, ranks=tuple(ranks)))
        return None
    chosen: Source | None = None
    missing: tuple[tuple[int, ...], ...] = ()
    for spelled in layouts:
        of_stage = spelled.ranks
        held = {rank: meta for rank, meta in metas.items() if rank in of_stage}
        present = tuple(held)
        if not present:
            continue
        joined = join_slices(catalog, spelled, held)
        if isinstance(joined, str):
            odd = Diagnostic("shape", joined, tensor=name, ranks=present)
            sources.problems.append(odd)
            return None
        layout, meta = joined
        gaps = layout.gaps(present)
        if not gaps and chosen is None:
            chosen = Source(meta, LayoutSlicing(layout, meta.shape, tensors), origin)
        elif not gaps and chosen is not None and chosen.meta.shape != meta.shape:
            text = _on_stages(chosen, meta, layout, files[present[0]].path)
            sources.problems.append(Diagnostic("shape", text, tensor=name, ranks=tuple(ranks)))
        missing = missing or gaps
    if chosen is None:
        for owners in missing or [tuple(layouts[0].ranks)]:
            lacking[owners].append(name)
    return chosen


def _on_stages(chosen: Source, meta: TensorMeta, layout: Layout, path: str) -> str:
    """What is said of a tensor whose full shape is another in another stage."""
    text = f"{meta.name}: full shape {chosen.meta.shape} in {format_ranks(chosen.layout.ranks)}"
    text += f", {meta.shape} in {format_ranks(layout.ranks)} ({path}); "
    return f"{text}stages hold the same of what they share: is it the strategy of this run?"


def _full_sources(catalog: Catalog, unlisted: UnlistedChoice | None) -> Sources:
    """Return the sources of a checkpoint whose files hold full tensors.

    ``unlisted`` decides what becomes of tensors of which it may hold only one rank's slice.
    """
    sources = Sources(damage=list(catalog.damaged.values()))
    sources.notes += on_one_of_several(catalog)
    slices = suspected_rank_slices(catalog)
    if slices:
        question, note = _settle_slices(catalog, slices, unlisted)
        sources.problems += [Diagnostic("unlisted", question)] if question else []
        sources.notes += [note] if note else []
    for rank, file in catalog.files.items():
        kept = (name for name in file.tensors if unlisted != "drop" or name not in slices)
        sources.found += [full_source(catalog, name, rank) for name in kept]
    return sources


def on_one_of_several(catalog: Catalog) -> Iterator[Diagnostic]:
    """A warning if a source is one rank's file of several."""
    if isinstance(catalog, MergedCatalog) and catalog.one_of_several:
        text = f"{catalog.root}: one rank of several ({catalog.one_of_several}); its tensors may "
        yield Diagnostic("one_of_several", text + "be slices")


def why_not_full(catalog: Catalog) -> str | None:
    """Why a source is not taken for a full checkpoint, and what to do; None if it is taken."""
    if not catalog.one_of_several:
        return None
    return (
        f"{catalog.root}: one rank of several ({catalog.one_of_several}), so its tensors may be "
        "slices, and it is not taken for a full checkpoint; name the folder of all ranks, and "
        "their strategy (merge or reshard with -s STRATEGY), or say --replicated if this file "
        "alone holds everything in full"
    )


def suspected_rank_slices(catalog: Catalog) -> Mapping[str, str]:
    """What an undivided checkpoint keeps apart and what may be rank 0's slice of it all.

    MindSpore puts there what it did not merge: what the strategy does not list, but also
    ``accu_grads.*`` and parameters that were not chosen.  Whole for certain is what an index names,
    a tensor without axes, one with a single element, and a state that has its parameter's shape.
    A state that has not is none, even of a single element.

    Returns
    -------
    Mapping
        Name to what is known of it, for a message.
    """
    if not isinstance(catalog, MergedCatalog):
        return {}
    metas = catalog.metas
    owners = match_states_by_name((), metas)
    found = {}
    for name, is_named in catalog.common_tensors.items():
        meta, base = metas[name], metas.get(_owner(metas, owners, name))
        if is_named or not meta.shape:
            continue
        if base is not None and base.name not in catalog.common_tensors:
            if meta.shape != base.shape:
                found[name] = f"{name} {meta.shape}, of {base.name} {base.shape}"
        elif math.prod(meta.shape) != 1:
            found[name] = f"{name} {meta.shape}"
    return found


def _owner(metas: Mapping[str, TensorMeta], owners: ParameterOfState, name: str) -> str:
    """The parameter whose state ``name`` is, by its prefix or by its shape; itself if of none."""
    base = owners.get(name, name)
    is_alike = metas[base].shape == metas[name].shape
    return base if is_alike else parameter_of(name) or name


def _settle_slices(
    catalog: Catalog, slices: Mapping[str, str], unlisted: UnlistedChoice | None
) -> tuple[str | None, Diagnostic | None]:
    """The question that `suspected_rank_slices` raise, or a note of how the user decided it."""
    listed = f"{catalog.root}: {shorten(slices.values())}"
    if unlisted == "drop":
        return None, Diagnostic("dropped", f"{listed}: perhaps rank 0's slices only: dropped")
    if unlisted == "first":
        return None, Diagnostic(
            "decided", f"{listed}: perhaps rank 0's slices only: taken as they are"
        )
    text = f"{listed}: not in the index, so only rank 0's, of which it may have a slice; "
    text += "leave out what is one with --unlisted drop, or take all as it is with --unlisted first"
    return text, None


@dataclass(slots=True)
class Presence:
    """What `check_presence` found.

    Attributes
    ----------
    is_deduplicated
        Of ranks with equal slices one alone has each.
    problems, notes
        What is wrong, and what else is to be known.
    lacking
        Parameters that are lost, by the ranks that should have a slice.
    """

    is_deduplicated: bool
    problems: list[Diagnostic] = field(default_factory=list)
    notes: list[Diagnostic] = field(default_factory=list)
    lacking: dict[tuple[int, ...], list[str]] = field(default_factory=lambda: defaultdict(list))


def check_presence(catalog: Catalog, sharding: Sharding) -> Presence:
    """Hold the ranks and names that are on disk against those of the strategy, or description."""
    presence = Presence(is_deduplicated(catalog, sharding))
    if isinstance(catalog, SelfDescribedCatalog):
        presence.problems += [Diagnostic("missing", text) for text in catalog.description.problems]
    elif isinstance(sharding, Strategy):
        _check_strategy(catalog, sharding, presence)
    elif presence.is_deduplicated:
        presence.problems += missing_rank_problems(catalog)
    else:
        presence.problems += _incomplete_replicas(catalog)
    return presence


def _check_strategy(catalog: Catalog, strategy: Strategy, presence: Presence) -> None:
    """Whether it is of this checkpoint, and which of its parameters are not there."""
    holders = catalog.holders
    found = sorted({*catalog.files, *catalog.damaged})
    extra = tuple(rank for rank in found if rank not in strategy.ranks)
    if extra:
        text = (
            f"{catalog.root}: {format_ranks(extra)} found, but {strategy.origin} is for "
            f"{len(strategy.ranks)} ranks (0-{strategy.ranks[-1]}); give the strategy of this "
            "checkpoint (of all pipeline stages), or move a leftover folder away"
        )
        presence.problems.append(Diagnostic("strategy", text, ranks=extra))
    if holders and not any(name in strategy.layouts for name in holders):
        text = (
            f"{strategy.origin}: no parameter in common with {catalog.root}: the strategy lists "
            f"{shorten(strategy.layouts, 3)}, the files hold {shorten(holders, 3)}; "
            "is it the strategy of this checkpoint?"
        )
        presence.problems.append(Diagnostic("strategy", text))
    elif holders and (absent := [name for name in strategy.layouts if name not in holders]):
        _check_absent(catalog, strategy, absent, holders, presence)


def _incomplete_replicas(catalog: Catalog) -> Iterator[Diagnostic]:
    """Ranks that do not hold everything, where every rank should."""
    holders = catalog.holders
    for rank, file in catalog.files.items():
        lacks = [name for name in holders if name not in file.tensors]
        if lacks:
            state = "is empty (0 bytes)" if file.nbytes == 0 else "was perhaps cut short"
            text = (
                f"rank {rank}: {file.path} lacks {count(len(lacks), 'parameter')} that other ranks "
                f"have ({shorten(lacks)}), so it {state}, or the ranks do not all hold everything"
            )
            yield Diagnostic("missing", text, ranks=(rank,))


def _check_absent(
    catalog: Catalog,
    strategy: Strategy,
    absent: Sequence[str],
    holders: Mapping[str, Sequence[int]],
    presence: Presence,
) -> None:
    """Listed parameters that no rank holds: never saved, or lost with the files of some ranks.

    With files missing, or without redundancy, a parameter counts as lost, unless other ranks that
    should hold its slices are there and do not.  And optimizer state of a kind that no rank holds
    anything of was not saved: many keep the weights alone.
    """
    owners = match_states_by_name(strategy.layouts, catalog.metas)
    saved = {name.removesuffix(owners.get(name, "")) for name in holders}
    unsaved = []
    for name in absent:
        base = owners.get(name, "")
        is_weight = base not in strategy.layouts
        ranks = tuple(rank for layout in strategy.layouts[name] for rank in layout.ranks)
        is_complete = all(_is_answered(catalog, layout) for layout in strategy.layouts[name])
        if (is_complete and not presence.is_deduplicated) or not (
            is_weight or name.removesuffix(base) in saved
        ):
            unsaved.append(name)
        else:
            presence.lacking[ranks].append(name)
    if unsaved:
        text = f"in the strategy but on no rank: {count(len(unsaved), 'parameter')}"
        text += f": {shorten(unsaved)}"
        weights = {name for name in unsaved if owners.get(name) not in strategy.layouts}
        others = _unlisted_weights(catalog, strategy, owners) if weights else []
        if others:
            text += f"; on ranks but not in the strategy: {shorten(others)}; was one renamed?"
        presence.notes.append(Diagnostic("renamed" if others else "absent", text))


def _unlisted_weights(catalog: Catalog, strategy: Strategy, owners: ParameterOfState) -> list[str]:
    """Names that the strategy does not list and that are no single values and no states."""
    metas = catalog.metas
    return [
        name
        for name, meta in metas.items()
        if name not in strategy.layouts
        and meta.nbytes > meta.itemsize
        and owners.get(name) not in metas
    ]


def _is_answered(catalog: Catalog, layout: Layout) -> bool:
    """Whether the files that are there tell for every slice if it was saved."""
    if all(rank in catalog.files for rank in layout.ranks):
        return True
    groups = (layout.owners(index) for index in layout.slice_indices())
    return hold_same_parameters(catalog, layout.ranks) and all(
        any(rank in catalog.files for rank in owners) for owners in groups
    )
