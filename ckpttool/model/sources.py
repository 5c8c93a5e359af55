"""Where every parameter comes from: catalog and source strategy -> sources, problems and notes.

A source is a full tensor, the layout of its slices and the files that hold them.  Parameters that
the strategy lists have its layout; optimizer state that it forgot follows its parameter; anything
else is one undivided tensor if all ranks hold the same bytes, and a question to the user if not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttool.errors import FormatError
from ckpttool.model.catalog import Catalog, TensorMeta, format_ranks
from ckpttool.model.described import follow, odd_state
from ckpttool.model.findings import Finding
from ckpttool.model.layout import Layout
from ckpttool.model.losses import Losses, find_losses, hold_alike
from ckpttool.model.maps import map_of, part_names
from ckpttool.model.notes import Note
from ckpttool.model.redundancy import absent_ranks, is_deduplicated, note_redundancy
from ckpttool.model.remarks import on_contradictions, on_layouts, on_strays
from ckpttool.model.slices import disagreement, group_metas, group_ranks, join_slices
from ckpttool.model.source import Source
from ckpttool.model.states import followed_parameter, odd_shape, state_layouts, true_layouts
from ckpttool.model.strategy import Strategy, count, parameter_of, shorten
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


def names_to_compare(catalog: Catalog, strategy: Strategy) -> tuple[str, ...]:
    """Parameters of which the contents decide: not listed, on several ranks, alike by header."""
    names = []
    for name, ranks in catalog.holders.items():
        if (
            name in strategy.layouts
            or followed_parameter(catalog, strategy, name, ranks) is not None
            or _described_source(catalog, name, ranks) is not None
        ):
            continue
        metas = {header[name].meta for header in catalog.headers.values() if name in header}
        if len(ranks) > 1 and len(metas) == 1 and next(iter(metas)).text is None:
            names.append(name)
    return tuple(names)


def find_sources(
    catalog: Catalog,
    strategy: Strategy,
    agreement: Agreement,
    unlisted: Unlisted | None,
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
    """
    assert strategy.rules is None, "Strategy.resolve() comes first"
    sources = Sources(is_deduplicated=is_deduplicated(catalog, strategy))
    holders = catalog.holders
    lacking: dict[tuple[int, ...], list[str]] = defaultdict(list)
    if catalog.description is not None:
        sources.problems += [Finding("missing", text) for text in catalog.description.problems]
    else:
        _check_ranks(catalog, strategy, holders, lacking, sources)
    follows_from_these = bool(sources.problems)
    corrected: list[str] = []
    differing: dict[Groups, list[str]] = {}
    for name, ranks in holders.items():
        described = _described_source(catalog, name, ranks)
        if described is not None:
            sources.found.append(described)
        if described is not None or _is_broken(catalog, name):
            continue
        followed = followed_parameter(catalog, strategy, name, ranks)
        if name in strategy.layouts or followed is not None:
            layouts = state_layouts(strategy, name)
            if followed is None:
                layouts = true_layouts(catalog, strategy, name)
                corrected += [name] if layouts != strategy.layouts[name] else []
            source = _cut_source(catalog, layouts, name, ranks, lacking, sources)
            if source is not None:
                is_listed = followed is None
                sources.found.append(replace(source, is_listed=is_listed, follows=followed))
            continue
        groups = _group_by_content(catalog, agreement, name, ranks)
        odd = _odd_shape(catalog, strategy, catalog.files[ranks[0]].header[name].meta)
        if _may_be_parts(catalog, name, groups) or (odd is not None and unlisted is not None):
            differing.setdefault(groups, []).append(name)
        elif odd is not None:
            sources.problems.append(Finding("unlisted", odd, tensor=name, ranks=ranks))
        else:
            sources.found.append(whole_source(catalog, name, ranks[0]))
    where = "the strategy" if catalog.description is None else "the description"
    if unlisted is not None:
        _settle_unlisted(catalog, strategy, differing, unlisted, where, sources)
    elif not follows_from_these:
        own, rest = set_apart(differing)
        _settle_unlisted(catalog, strategy, own, "drop", where, sources)
        told_by = where if strategy.layouts or catalog.description is not None else None
        asked = questions(told_by, rest, len(holders), bool(strategy.layouts)) if rest else []
        sources.problems += [Finding("unlisted", question) for question in asked]
    sources.problems += on_contradictions(strategy, sources.found)
    each = [name for names in differing.values() for name in names if unlisted == "rank"]
    sources.add(find_losses(catalog, strategy, lacking, each, sources.is_deduplicated))
    sources.notes += on_layouts(sources.found, corrected, where)
    sources.notes += on_strays(strategy, holders)
    if catalog.description is None:
        note = note_redundancy(catalog, sources.is_deduplicated)
        sources.notes += [] if note is None else [note]
    return sources


def _described_source(catalog: Catalog, name: str, ranks: Sequence[int]) -> Source | None:
    """The source of a tensor that the checkpoint describes, or of state of it; None if of none."""
    if catalog.description is None:
        return None
    follows, tensors = None, catalog.description.tensors
    described = tensors.get(name)
    base = tensors.get(parameter_of(name) or "")
    if described is None and base is not None:
        stored = {rank: catalog.files[rank].tensors[name] for rank in ranks}
        described, follows = follow(base, name, stored), base.meta.name
    if described is None:
        return None
    layout = Layout.undivided(len(described.meta.shape))
    is_listed = follows is None
    return Source(described.meta, layout, catalog, is_listed, follows, described=described)


def _is_broken(catalog: Catalog, name: str) -> bool:
    return catalog.description is not None and name in catalog.description.broken


def _odd_shape(catalog: Catalog, strategy: Strategy, meta: TensorMeta) -> str | None:
    """Why optimizer state without a layout is not taken as it is, or None if nothing speaks so."""
    if catalog.description is None:
        return odd_shape(catalog, strategy, meta)
    base = catalog.description.tensors.get(parameter_of(meta.name) or "")
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


def whole_source(catalog: Catalog, name: str, rank: int) -> Source:
    """A tensor that one file holds whole, the one of ``rank``."""
    meta = catalog.files[rank].tensors[name].meta
    return Source(meta, Layout.undivided(len(meta.shape), 1, rank), catalog)


def _check_ranks(
    catalog: Catalog,
    strategy: Strategy,
    holders: Mapping[str, Sequence[int]],
    lacking: dict[tuple[int, ...], list[str]],
    sources: Sources,
) -> None:
    if not strategy.layouts:
        if sources.is_deduplicated:
            sources.problems += [Finding("missing", text) for text in absent_ranks(catalog)]
        else:
            sources.problems += _incomplete_replicas(catalog, holders)
        return
    found = sorted({*catalog.files, *catalog.damaged})
    extra = tuple(rank for rank in found if rank not in strategy.ranks)
    if extra:
        text = (
            f"{catalog.root}: {format_ranks(extra)} found, but {strategy.origin} is for "
            f"{len(strategy.ranks)} ranks (0-{strategy.ranks[-1]}); give the strategy of this "
            "checkpoint (of all pipeline stages), or move a leftover folder away"
        )
        sources.problems.append(Finding("strategy", text, ranks=extra))
    if holders and not any(name in strategy.layouts for name in holders):
        text = (
            f"{strategy.origin}: no parameter in common with {catalog.root}: the strategy lists "
            f"{shorten(strategy.layouts, 3)}, the files hold {shorten(holders, 3)}; "
            "is it the strategy of this checkpoint?"
        )
        sources.problems.append(Finding("strategy", text))
    elif holders:
        _check_absent(catalog, strategy, holders, lacking, sources)


def _incomplete_replicas(
    catalog: Catalog, holders: Mapping[str, Sequence[int]]
) -> Iterator[Finding]:
    """Ranks that do not hold everything, where every rank should."""
    for rank, file in catalog.files.items():
        lacks = [name for name in holders if name not in file.tensors]
        if lacks:
            state = "is empty (0 bytes)" if file.nbytes == 0 else "was perhaps cut short"
            text = (
                f"rank {rank}: {file.path} lacks {count(len(lacks), 'parameter')} that other ranks "
                f"have ({shorten(lacks)}), so it {state}, or the ranks do not all hold everything"
            )
            yield Finding("missing", text, ranks=(rank,))


def _check_absent(
    catalog: Catalog,
    strategy: Strategy,
    holders: Mapping[str, Sequence[int]],
    lacking: dict[tuple[int, ...], list[str]],
    sources: Sources,
) -> None:
    """Listed parameters that no rank holds: never saved, or lost with the files of some ranks.

    With files missing, or without redundancy, a parameter counts as lost, unless other ranks that
    should hold its slices are there and do not.  And optimizer state of a kind that no rank holds
    anything of was not saved: many keep the weights alone.
    """
    saved = {name.removesuffix(parameter_of(name) or "") for name in holders}
    absent = [name for name in strategy.layouts if name not in holders]
    unsaved = []
    for name in absent:
        base = parameter_of(name)
        is_weight = base is None or base not in strategy.layouts
        ranks = tuple(rank for layout in strategy.layouts[name] for rank in layout.ranks)
        is_complete = all(_is_answered(catalog, layout) for layout in strategy.layouts[name])
        if (is_complete and not sources.is_deduplicated) or not (
            is_weight or name.removesuffix(base or "") in saved
        ):
            unsaved.append(name)
        else:
            lacking[ranks].append(name)
    if unsaved:
        text = f"in the strategy but on no rank: {count(len(unsaved), 'parameter')}"
        text += f": {shorten(unsaved)}"
        sources.notes.append(Note("absent", text))


def _is_answered(catalog: Catalog, layout: Layout) -> bool:
    """Whether the files that are there tell for every slice if it was saved."""
    if all(rank in catalog.files for rank in layout.ranks):
        return True
    groups = (layout.owners(index) for index in layout.slice_indices())
    return hold_alike(catalog, layout.ranks) and all(
        any(rank in catalog.files for rank in owners) for owners in groups
    )


def _cut_source(
    catalog: Catalog,
    layouts: Sequence[Layout],
    name: str,
    ranks: Sequence[int],
    lacking: dict[tuple[int, ...], list[str]],
    sources: Sources,
) -> Source | None:
    """The source of a parameter that has layouts; problems are recorded and give None.

    A parameter shared by stages is taken from the lowest stage that holds all of it.
    """
    files = catalog.files
    metas = catalog.held(name)
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
            chosen = Source(meta, layout, catalog)
        elif not gaps and chosen is not None and chosen.meta.shape != meta.shape:
            text = f"{name}: full shape {chosen.meta.shape} in {format_ranks(chosen.layout.ranks)}"
            text += f", {meta.shape} in {format_ranks(layout.ranks)} ({files[present[0]].path}); "
            text += "stages hold the same of what they share: is it the strategy of this run?"
            sources.problems.append(Finding("shape", text, tensor=name, ranks=tuple(ranks)))
        missing = missing or gaps
    if chosen is None:
        for owners in missing or [tuple(layouts[0].ranks)]:
            lacking[owners].append(name)
    return chosen


def _settle_unlisted(
    catalog: Catalog,
    strategy: Strategy,
    differing: Differing,
    unlisted: Unlisted,
    where: str,
    sources: Sources,
) -> None:
    """Parameters without a layout that differ between ranks, as the user decided."""
    cycle = max(len(strategy.ranks), max(catalog.files, default=0) + 1)
    for groups, names in differing.items():
        ranks = sorted(rank for group in groups for rank in group)
        if unlisted == "first":
            sources.found += [whole_source(catalog, name, ranks[0]) for name in names]
        elif unlisted == "rank":
            sources.found += [
                replace(whole_source(catalog, name, rank), turn=(rank % cycle, cycle))
                for name in names
                for rank in ranks
            ]
        sources.notes.append(decision(names, groups, unlisted, cycle, where))
