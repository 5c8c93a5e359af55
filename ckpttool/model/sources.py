"""Where every parameter comes from: catalog and source strategy -> sources, problems and notes.

A source is a full tensor, the layout of its slices and the files that hold them.  Parameters that
the strategy lists have its layout; optimizer state that it forgot follows its parameter; anything
else is one undivided tensor if all ranks hold the same bytes, and a question to the user if not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.errors import FormatError
from ckpttool.model.catalog import Catalog, SelfDescribedCatalog, TensorMeta, format_ranks
from ckpttool.model.described import follow, odd_state
from ckpttool.model.findings import Finding
from ckpttool.model.layout import Layout
from ckpttool.model.losses import Losses, find_losses
from ckpttool.model.maps import map_of, part_names
from ckpttool.model.notes import Note
from ckpttool.model.presence import PartlyHeld, check_presence, find_partly_held
from ckpttool.model.reduced import reduced_from
from ckpttool.model.redundancy import note_redundancy
from ckpttool.model.remarks import on_contradictions, on_guesses, on_layouts, on_strays
from ckpttool.model.slices import disagreement, group_metas, group_ranks, join_slices
from ckpttool.model.source import (
    FollowsParameter,
    LayoutSlicing,
    Listed,
    NotInStrategy,
    Origin,
    Source,
)
from ckpttool.model.states import (
    Owners,
    find_owners,
    followed_parameter,
    odd_shape,
    owner_of,
    state_layouts,
    true_layouts,
)
from ckpttool.model.strategy import Strategy
from ckpttool.model.unlisted import Differing, Groups, Unlisted, decision, questions, set_apart

Agreement = Mapping[str, Groups]  # of the content of a parameter


@dataclass(slots=True)
class Sources:
    """What `find_sources` found: sources in the order of the files, all problems, all notes.

    ``is_deduplicated`` says that of ranks with equal slices one alone has each.
    ``damage`` are the errors of damaged files that nothing replaces.
    """

    found: list[Source] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    is_deduplicated: bool = False
    damage: list[FormatError] = field(default_factory=list)

    def add(self, losses: Losses) -> None:
        """Take over what is lost, and what is replaced."""
        self.problems += losses.problems
        self.notes += losses.notes
        self.damage += losses.damage


def names_to_compare(catalog: Catalog, strategy: Strategy) -> dict[str, str | None]:
    """Parameters of which the contents decide: not listed, on several ranks, alike by header.

    Returns
    -------
    dict
        Of each that may be state, as names and shapes show, the parameter; contents may contradict.
        A state of one of MindSpore's optimizers needs no contents.
    """
    found = {}
    owners = _owners_in(catalog, strategy)
    for name, ranks in catalog.holders.items():
        if name in strategy.layouts:
            continue
        follows = followed_parameter(catalog, strategy, name, ranks, owners)
        described = _described_source(catalog, name, ranks, owners)
        if described is not None:
            if described.parameter is None:
                continue
            follows = described.parameter
        if follows is not None and owner_of(name) is not None:
            continue
        metas = {header[name].meta for header in catalog.headers.values() if name in header}
        if len(ranks) > 1 and len(metas) == 1 and next(iter(metas)).text is None:
            found[name] = follows
    return found


def _listed_names(catalog: Catalog, strategy: Strategy) -> Collection[str]:
    """Return the names of which the strategy, or the checkpoint itself, gives the slices."""
    if isinstance(catalog, SelfDescribedCatalog):
        return catalog.description.tensors.keys()
    return strategy.layouts.keys()


def _owners_in(catalog: Catalog, strategy: Strategy) -> dict[str, str]:
    """Return the parameter of every optimizer state, as far as names tell."""
    return find_owners(_listed_names(catalog, strategy), catalog.metas)


def find_sources(
    catalog: Catalog,
    strategy: Strategy,
    agreement: Agreement,
    unlisted: Unlisted | None,
    running: Collection[str] = (),
) -> Sources:
    """Sources of all parameters of a checkpoint that is spread over ranks.

    Parameters
    ----------
    catalog
        What is on disk.
    strategy
        The layouts; one without layouts says that every rank holds everything, unless the
        checkpoint describes itself.
    agreement
        For each of `names_to_compare`, the ranks grouped by equal content.
    unlisted
        What to do with a parameter that is not listed and differs between ranks: target rank ``r``
        takes what source rank ``r`` modulo the number of source ranks holds (``"rank"``), the
        lowest rank's for all (``"first"``), none (``"drop"``).  None makes it a problem.
    running
        Parameters that are running statistics, so that they differ by design.
    """
    assert strategy.rules is None, "Strategy.resolve() comes first"
    presence = check_presence(catalog, strategy)
    sources = Sources(
        problems=presence.problems,
        notes=presence.notes,
        is_deduplicated=presence.is_deduplicated,
    )
    is_complete = not sources.problems
    owners = _owners_in(catalog, strategy)
    partly = find_partly_held(catalog, strategy, sources.is_deduplicated)
    alone = {name: one for one in partly if one.is_alone for name in one.names}
    search = _Search(
        catalog, strategy, agreement, unlisted, running, sources, presence.lacking, owners, alone
    )
    for name, ranks in catalog.holders.items():
        search.take(name, ranks)
    search.settle(is_complete)
    asked = {name for names in search.differing.values() for name in names}
    sources.notes += (
        Note("unlisted", f"{one.text}; taken from {format_ranks(one.ranks[:1])}", is_warning=True)
        for one in partly
        if not asked.issuperset(one.names)
    )
    sources.problems += on_contradictions(strategy, sources.found)
    each = [name for of in search.differing.values() for name in of if unlisted == "rank"]
    lacking = presence.lacking
    sources.add(find_losses(catalog, strategy, lacking, each, sources.is_deduplicated))
    sources.notes += on_layouts(sources.found, search.corrected, search.where)
    listed = _listed_names(catalog, strategy)
    sources.notes += on_guesses(sources.found, listed, owners)
    sources.notes += on_strays(strategy, catalog.holders)
    if not isinstance(catalog, SelfDescribedCatalog):
        note = note_redundancy(catalog, sources.is_deduplicated)
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
        See `find_owners`.
    alone
        Names without a layout that one rank alone has, though its stage has others.
    corrected
        Names whose layouts are not as the strategy says.
    differing
        Names without a layout that differ between ranks, by the ranks that hold the same.
    """

    catalog: Catalog
    strategy: Strategy
    agreement: Agreement
    unlisted: Unlisted | None
    running: Collection[str]
    sources: Sources
    lacking: dict[tuple[int, ...], list[str]]
    owners: Owners
    alone: Mapping[str, PartlyHeld]
    corrected: list[str] = field(default_factory=list)
    differing: dict[Groups, list[str]] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """What says how tensors are cut."""
        is_described = isinstance(self.catalog, SelfDescribedCatalog)
        return "the description" if is_described else "the strategy"

    def take(self, name: str, ranks: Sequence[int]) -> None:
        """Find the source of one parameter, which ``ranks`` hold."""
        catalog, strategy = self.catalog, self.strategy
        described = _described_source(catalog, name, ranks, self.owners)
        if described is not None and described.parameter is not None:
            is_contradicted = self._is_contradicted(name, described.slicing.owners())
            described = None if is_contradicted else described
        if described is not None:
            self.sources.found.append(described)
        if described is not None or _is_broken(catalog, name):
            return
        followed = followed_parameter(catalog, strategy, name, ranks, self.owners)
        layouts = state_layouts(strategy, name, self.owners)
        if followed is not None and self._is_contradicted(name, _shares(layouts)):
            followed = None
        if name not in strategy.layouts and followed is None:
            self._take_unlisted(name, ranks)
            return
        if followed is None:
            layouts = true_layouts(catalog, strategy, name, self.owners)
            self.corrected += [name] if layouts != strategy.layouts[name] else []
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
        if owner_of(name) is not None:
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
        odd = _odd_shape(catalog, self.strategy, meta, self.owners)
        is_decided = odd is not None and self.unlisted is not None
        if _may_be_parts(catalog, name, groups) or name in self.alone or is_decided:
            self.differing.setdefault(groups, []).append(name)
        elif odd is not None:
            self.sources.problems.append(Finding("unlisted", odd, tensor=name, ranks=tuple(ranks)))
        else:
            self.sources.found.append(full_source(catalog, name, ranks[0]))

    def settle(self, is_complete: bool) -> None:
        """What becomes of those that differ: as the user decided, or a question.

        Where ranks are missing, or the strategy is of another run, it would only follow from that.
        """
        if self.unlisted is not None:
            self._settle(self.differing, self.unlisted)
        elif is_complete:
            own, rest = set_apart(self.differing)
            self._settle(own, "drop")
            is_cut = bool(self.strategy.layouts)
            is_described = isinstance(self.catalog, SelfDescribedCatalog)
            told_by = self.where if is_cut or is_described else None
            number = len(self.catalog.holders)
            asked = questions(told_by, rest, number, self.alone, is_cut, self.running)
            self.sources.problems += [Finding("unlisted", question) for question in asked]

    def _settle(self, differing: Differing, unlisted: Unlisted) -> None:
        catalog, sources = self.catalog, self.sources
        cycle = max(len(self.strategy.ranks), max(catalog.files, default=0) + 1)
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
            sources.notes.append(decision(names, groups, unlisted, cycle, self.where))


def _shares(layouts: Iterable[Layout]) -> Iterator[Sequence[int]]:
    """The ranks that hold equal slices, slice by slice."""
    for layout in layouts:
        yield from layout.slice_owners()


def _described_source(
    catalog: Catalog, name: str, ranks: Sequence[int], owners: Owners
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


def _shaped_owner(name: str, owners: Owners) -> str:
    """The parameter of a state that has its shape; none of a statistic, which has not."""
    return owners.get(name, "") if reduced_from(name) is None else ""


def _odd_shape(
    catalog: Catalog, strategy: Strategy, meta: TensorMeta, owners: Owners
) -> str | None:
    """Why optimizer state without a layout is not taken as it is, or None if nothing speaks so."""
    if not isinstance(catalog, SelfDescribedCatalog):
        return odd_shape(catalog, strategy, meta, owners)
    if owner_of(meta.name) is None:
        return None
    base = catalog.description.tensors.get(_shaped_owner(meta.name, owners))
    return None if base is None else odd_state(base, meta)


def _may_be_parts(catalog: Catalog, name: str, groups: Groups) -> bool:
    """Whether ranks hold different things, or only some of them a map parameter."""
    holders = sum(len(group) for group in groups)
    return len(groups) > 1 or (map_of(name) is not None and holders < len(catalog.files))


def _group_by_content(
    catalog: Catalog, agreement: Agreement, name: str, ranks: Sequence[int]
) -> Groups:
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
    layout = Layout.undivided(len(meta.shape), 1, rank)
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
        sources.problems.append(Finding("dtype", text, tensor=name, ranks=tuple(ranks)))
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
            odd = Finding("shape", joined, tensor=name, ranks=present)
            sources.problems.append(odd)
            return None
        layout, meta = joined
        gaps = layout.gaps(present)
        if not gaps and chosen is None:
            chosen = Source(meta, LayoutSlicing(layout, meta.shape, tensors), origin)
        elif not gaps and chosen is not None and chosen.meta.shape != meta.shape:
            text = _on_stages(chosen, meta, layout, files[present[0]].path)
            sources.problems.append(Finding("shape", text, tensor=name, ranks=tuple(ranks)))
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
