"""Sources + target -> plan, and the files that are written beside the outputs.

What does not fit the target is one error.  Beside the outputs there may be their strategy, and the
indexes of numbered files.  The indexes are written last and, where they are replaced, removed
first: an index never speaks of files of another run.

Each numbered file has a limit of bytes.  Parameters fill the files in the order of the plan.  A
parameter that does not fit begins the next file.  A tensor larger than the limit has its own file.
Tensors without a layout go to a common file, which loaders give to every rank.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.errors import StrategyError
from ckpttool.formats import format_of_suffix
from ckpttool.formats.weight_index import (
    PART_ATTRS,
    index_names,
    index_text,
    is_index_name,
    part_name,
)
from ckpttool.model.catalog import MergedCatalog
from ckpttool.model.diagnostics import Diagnostic, Diagnostics
from ckpttool.model.layout import Layout, fold_layout
from ckpttool.model.manifest import MANIFEST, PART_RECORD
from ckpttool.model.plan import Document, NotListed, Plan, Target, Transfer
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Merged, Strategy
from ckpttool.model.tensors import map_of
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.planning.optimizer_state import (
    GradientShards,
    ParameterOfState,
    has_expected_full_shape,
    match_states_by_shape,
    state_layouts,
    target_layouts,
)
from ckpttool.planning.resolve import ResolvedSources
from ckpttool.storage.files import is_within
from ckpttool.strategy_files.writer import encode_strategy, name_problem


def plan(resolved: ResolvedSources, target: Target, diagnostics: Diagnostics) -> Plan | None:
    """Plan how sources are brought into the target's layout; nothing is read for it.

    Parameters
    ----------
    resolved
        The sources.
    target
        What is to be written.
    diagnostics
        Gets what does not fit the target, all of it.

    Returns
    -------
    Plan or None
        None if anything is wrong with the sources, or with how they fit the target.
    """
    catalog = resolved.catalog
    target, reasons = _with_names(target, resolved)
    diagnostics.add(*Diagnostic.each("target", reasons))
    transfers: list[Transfer] = []
    not_listed = NotListed()
    if not reasons:
        diagnostics.add(*target.sharding.notes)
        transfers, not_listed = _find_transfers(resolved, target, diagnostics)
    outside = [rank for rank in target.paths if not 0 <= rank < target.ranks]
    if outside:
        text = f"{format_ranks(outside)}: not in the target, which has "
        text += f"{target.ranks} ranks (0-{target.ranks - 1})"
        diagnostics.add(Diagnostic("target", text, ranks=tuple(outside)))
    if not transfers and not diagnostics.has_errors:
        text = f"{catalog.root}: nothing in it that could be written"
        diagnostics.add(Diagnostic("missing", text))
    if diagnostics.has_errors:
        return None
    files = (*resolved.sharding.files, *target.sharding.files)
    return Plan(catalog, target, tuple(transfers), (), not_listed, strategies=files)


def _with_names(target: Target, resolved: ResolvedSources) -> tuple[Target, Sequence[str]]:
    """Return the target with the names of the checkpoint in its strategy, and what has no name."""
    if isinstance(target.sharding, Merged):
        return target, ()
    metas = {**resolved.catalog.metas}
    metas |= {source.meta.name: source.meta for source in resolved.sources}
    strategy, reasons = target.sharding.resolve(metas, target.not_in_target != "follow")
    return replace(target, sharding=strategy), reasons


def _find_transfers(
    resolved: ResolvedSources, target: Target, diagnostics: Diagnostics
) -> tuple[list[Transfer], NotListed]:
    """Return a transfer for every source that is written, and what the target does not list."""
    transfers: list[Transfer] = []
    sources = resolved.sources
    fitting = _Fitting(resolved, target)
    for source in sources:
        name, shape = source.meta.name, source.meta.shape
        layouts = fitting.layouts(source)
        if layouts:
            layouts = tuple(_folded(layout, shape) for layout in layouts)
            reasons = {_why_not_target(layout, shape) for layout in layouts} - {None}
            where = target.sharding.origin
            for reason in sorted(map(str, reasons)):
                text = f"{name}: target {where}: {reason}"
                diagnostics.add(Diagnostic("target", text, tensor=name))
            if reasons:
                continue
        elif layouts is not None:
            layouts = _everywhere(source, target.ranks)
        if layouts:
            transfers.append(Transfer.copy_of(source, layouts))
    if isinstance(target.sharding, Strategy):
        _compare_names(sources, target.sharding, diagnostics)
        diagnostics.add(*fitting.notes(), *fitting.gradients.notes())
    turned = {source.meta.name for source in sources if source.rank_cycle is not None}
    turned -= fitting.not_listed.dropped.keys()
    nowhere = sorted(turned - {transfer.source.meta.name for transfer in transfers})
    if nowhere:
        text = "dropped, being only on source ranks whose turn does not come"
        names = f"{count(len(nowhere), 'parameter')}: {shorten(nowhere)}"
        diagnostics.add(Diagnostic("dropped", f"{text}: {names}"))
    return transfers, fitting.not_listed


class _Fitting:
    """The layouts that sources get in a target.

    What its strategy does not list is decided by names and full shapes alone, so that it does not
    matter whether the source is merged or spread over ranks.
    """

    def __init__(self, resolved: ResolvedSources, target: Target) -> None:
        self.target = target
        self.src_sharding = resolved.sharding
        self.metas = {source.meta.name: source.meta for source in resolved.sources}
        self.owners: ParameterOfState = {}
        if isinstance(target.sharding, Strategy):
            self.owners = match_states_by_shape(target.sharding.layouts, self.metas)
        self.recut: list[str] = []
        self.gradients = GradientShards()
        self.not_listed = NotListed()

    def layouts(self, source: Source) -> tuple[Layout, ...] | None:
        """Return the layouts of a source in the target; () for a full tensor, None to drop it."""
        target, strategy, name = self.target, self.target.sharding, source.meta.name
        if isinstance(strategy, Merged) or source.meta.text is not None:
            return ()
        if name in strategy.layouts:
            return () if source.rank_cycle is not None else self._listed(source, strategy)
        if strategy.replicates_rest:
            return ()
        is_state = source.rank_cycle is None and has_expected_full_shape(
            name, self.owners, self.metas
        )
        layouts = state_layouts(strategy, name, self.owners) if is_state else ()
        if layouts and target.not_in_target == "follow":
            self.not_listed.followed[name] = source.meta
            return layouts
        if source.meta.is_single and map_of(name) is None:
            return ()
        if target.not_in_target == "drop":
            self.not_listed.dropped[name] = source.meta
            return None
        self.not_listed.full[name] = source.meta
        return ()

    def _listed(self, source: Source, strategy: Strategy) -> tuple[Layout, ...]:
        """Return the corrected layouts of a source that the strategy lists."""
        name = source.meta.name
        layouts = target_layouts(strategy, name, self.owners)
        if [layout.parts for layout in strategy.layouts[name]] != [one.parts for one in layouts]:
            self.recut.append(name)
        return self.gradients.drop_unproven_shard(source, self.src_sharding, layouts)

    def notes(self) -> Iterator[Diagnostic]:
        """Yield notes on what is not as the target strategy says."""
        if self.recut:
            text = "cut for the target like their parameters, whose optimizer shard their own "
            text += f"entries lack: {count(len(self.recut), 'optimizer state')}"
            yield Diagnostic("corrected", f"{text}: {shorten(self.recut)}")
        names = [f"{name} (as {self.owners[name]})" for name in self.not_listed.followed]
        if names:
            text = "not in the target strategy, cut like the parameter: "
            text += f"{count(len(names), 'optimizer state')}: {shorten(names)}"
            yield Diagnostic("follows", text)
        for kind, text, found in (
            ("undivided", "written undivided to every rank", self.not_listed.full),
            ("dropped", "left out", self.not_listed.dropped),
        ):
            if found:
                text = f"not in the target strategy, {text}: {count(len(found), 'parameter')}"
                yield Diagnostic(kind, f"{text}: {shorten(found)}")


def _folded(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout for a full tensor of ``shape``, folded if it was expanded."""
    ways = fold_layout(layout, len(shape), lambda way: way.full_shape == shape)
    return ways[0] if len(ways) == 1 else layout


def _why_not_target(layout: Layout, shape: tuple[int, ...]) -> str | None:
    """Return why a full tensor of ``shape`` cannot be sharded for a target; None if it can."""
    if not layout.has_boxes:
        return f"field-sliced ({layout.fields} fields), which can be merged but not be cut"
    return layout.why_not(shape)


def _everywhere(source: Source, ranks: int) -> tuple[Layout, ...]:
    """Return layouts that give the full tensor to every target rank, or to those of its cycle."""
    ndim = len(source.meta.shape)
    if source.rank_cycle is None:
        return (Layout.unsharded(ndim, ranks),)
    first, step = source.rank_cycle
    return tuple(Layout.unsharded(ndim, 1, rank) for rank in range(first, ranks, step))


def _compare_names(sources: Sequence[Source], strategy: Strategy, diagnostics: Diagnostics) -> None:
    """Add a note on what only the target lists; that nothing is in common is a problem."""
    names = {source.meta.name for source in sources}
    has_other = bool(strategy.layouts) and not names & set(strategy.layouts)
    if names and has_other and not diagnostics.has_errors:
        text = (
            f"{strategy.origin}: no parameter in common with the source: the strategy lists "
            f"{shorten(strategy.layouts, 3)}, the source holds {shorten(sorted(names), 3)}; "
            "is it the strategy of this model?"
        )
        diagnostics.add(Diagnostic("target", text))
    absent = [name for name in strategy.layouts if name not in names]
    if absent:
        text = f"in the target strategy only: {count(len(absent), 'parameter')}"
        diagnostics.add(Diagnostic("absent", f"{text}: {shorten(absent)}"))


def written_strategy(plan: Plan, target: Strategy) -> Strategy:
    """Return the layouts of all parameters in the outputs of ``plan``, whose target is ``target``.

    They are those of the transfers: patterns of names resolved, expanded maps folded, states that
    follow their parameter in their own names, corrections made.  What every rank gets undivided,
    since ``target`` does not list it, is listed as undivided in each stage: of a parameter that one
    strategy does not list and another cuts MindSpore's transform takes one rank's slice for all.

    Not listed are strings, what each rank has of its own, single values beside the network, and
    what is undivided and has a ``-`` in its name: MindSpore cannot read such names there, so it has
    no other layout for them either.  Files that MindSpore compiles list single parameters of the
    network and states of them; ``global_step``, ``learning_rate`` and the like they leave out.
    """
    layouts: dict[str, tuple[Layout, ...]] = {}
    for transfer in plan.transfers:
        name = transfer.name
        if _is_told(transfer, name in target.layouts or name in plan.not_listed.followed):
            placed = (*layouts.get(name, ()), *_by_stage(transfer, target))
            layouts[name] = tuple(sorted(placed, key=lambda layout: layout.first_rank))
    return replace(target, layouts=layouts, rules=None)


def _is_told(transfer: Transfer, is_listed: bool) -> bool:
    meta = transfer.meta
    if transfer.source.rank_cycle is not None or meta.text is not None:
        return False
    if "-" in meta.name:
        return any(math.prod(layout.parts) > 1 for layout in transfer.layouts)
    return is_listed or math.prod(meta.shape) != 1


def _by_stage(transfer: Transfer, target: Strategy) -> Iterator[Layout]:
    """Yield the layouts of a transfer, one for each stage."""
    for layout in transfer.layouts:
        if len(layout.ranks) == target.stage_ranks:
            yield layout
            continue
        for first in range(layout.ranks.start, layout.ranks.stop, target.stage_ranks):
            yield Layout.unsharded(len(layout.tensor_map), target.stage_ranks, first)


@dataclass(frozen=True, slots=True)
class StrategySidecar:
    """The strategy file that is written beside rank files.

    Attributes
    ----------
    path
        Where it goes.
    is_part
        Whether the run is one of several, and `finalize` the one that writes it.
    """

    path: str
    is_part: bool

    @property
    def documents(self) -> list[str]:
        """The strategy file."""
        return [self.path]

    def complete(self, plan: Plan, diagnostics: Diagnostics) -> Plan | None:
        """Return the plan that also writes the strategy of its outputs.

        None, and an error among ``diagnostics``, if MindSpore's form cannot say that strategy.
        """
        assert isinstance(plan.target.sharding, Strategy), "rank files are sharded by one"
        try:
            data = encode_strategy(written_strategy(plan, plan.target.sharding))
        except StrategyError as error:
            diagnostics.failures.append(error)
            return None
        return replace(plan, documents=(*plan.documents, Document(self.path, data, "strategy")))

    def problems(self, plan: Plan) -> Iterator[str]:
        """Yield what keeps the strategy from getting its name.

        Whether something is there already `ckpttool.planning.preflight` finds.
        """
        reason = name_problem(self.path)
        if reason is not None:
            yield f"{self.path}: {reason}"
        folder, name = Path(plan.target.output_folder), Path(self.path).name
        parent = Path(self.path).parent.resolve()
        ranks = [*plan.target.paths.values()]
        if not isinstance(plan.catalog, MergedCatalog):
            ranks += [path for file in plan.catalog.files.values() for path in file.paths]
        if parent in {folder.resolve() for folder in {Path(path).parent for path in ranks}}:
            yield (
                f"{self.path}: among the files of ranks, where it would be taken for a checkpoint; "
                f"write it to {folder} or elsewhere"
            )
        if parent == folder.resolve() and name.startswith((MANIFEST, f".{PART_RECORD}")):
            yield f"{self.path}: is a name that ckpttool itself uses there; choose another"
        inside = os.path.relpath(self.path, folder)  # as a record of a part has it
        if self.is_part and (inside.startswith("../") or not is_within(folder, inside)):
            yield (
                f"{self.path}: with --part it is `ckpttool finalize` that writes it, and that "
                f"writes below {folder} only; name a file there"
            )


@dataclass(frozen=True, slots=True)
class ShardedOutput:
    """A merged checkpoint in numbered files, with their indexes.

    Attributes
    ----------
    folder, format
        Where the files go, and their format.
    limit
        Bytes of tensors in each, at most.
    attrs
        What else the headers say.
    """

    folder: str
    format: str
    limit: int
    attrs: Mapping[str, str]

    @property
    def documents(self) -> list[str]:
        """The index files."""
        return [str(Path(self.folder, name)) for name in index_names(self.format)]

    def target(self) -> Target:
        """Return a target of one file; `complete` spreads it over as many as it takes."""
        attrs = {**PART_ATTRS, **self.attrs}
        return Target(self.format, {0: self._path(None, 0)}, attrs=attrs, is_numbered=True)

    def complete(self, plan: Plan, diagnostics: Diagnostics) -> Plan | None:
        """Return the plan for that one file, spread over numbered ones with their indexes."""
        plan = number_files(plan, self.limit, self._path)
        files = {meta.name: Path(output.path).name for output in plan for meta in output.metas}
        metas = [transfer.meta for transfer in plan.transfers]
        text = index_text(files, sum(meta.nbytes for meta in metas))
        documents = tuple(Document(path, text.encode()) for path in self.documents)
        large = [meta.name for meta in metas if meta.nbytes > self.limit]
        more = "larger than --max-shard-size by themselves, and written whole all the same"
        if large:
            diagnostics.add(Diagnostic("part", f"{more}: {shorten(large)}"))
        return replace(plan, documents=documents)

    def problems(self, plan: Plan) -> Iterator[str]:
        """Yield a message if a loader might take other files for parts of this checkpoint."""
        folder = Path(self.folder)
        ours = {Path(path).name for path in (*plan.target.paths.values(), *self.documents)}
        stale = [
            path.name
            for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
            if path.name not in ours
            and (format_of_suffix(path.name) == self.format or is_index_name(path.name))
        ]
        if stale:
            yield (
                f"{folder}: {shorten(stale, 3)}: of another checkpoint, and a loader might mix it "
                "with this one; move it away or write to another folder"
            )

    def _path(self, number: int | None, count: int) -> str:
        return str(Path(self.folder, part_name(number, count, self.format)))


def number_files(plan: Plan, limit: int, path: Callable[[int | None, int], str]) -> Plan:
    """Return the plan of a merge with its one output spread over numbered files.

    Parameters
    ----------
    plan
        A plan whose one output holds everything.
    limit
        Maximum bytes of tensors in a numbered file.
    path
        Returns the path for a number, from 0, and the count of numbered files.  The number is None
        for the common file.
    """
    are_common = _are_common(plan)
    numbers: list[int] = []
    number = filled = 0
    for transfer, is_common in zip(plan.transfers, are_common, strict=True):
        if not is_common:
            nbytes = transfer.meta.nbytes
            if filled and filled + nbytes > limit:
                number, filled = number + 1, 0
            filled += nbytes
        numbers.append(number)
    total = 0 if all(are_common) else number + 1
    transfers = tuple(
        replace(transfer, layouts=(_layout_in_file(transfer, total if is_common else number),))
        for transfer, is_common, number in zip(plan.transfers, are_common, numbers, strict=True)
    )
    paths = {number: path(number, total) for number in range(total)}
    if any(are_common):
        paths[total] = path(None, total)
    target = replace(plan.target, paths=paths, ranks=len(paths))
    return replace(plan, target=target, transfers=transfers)


def _layout_in_file(transfer: Transfer, number: int) -> Layout:
    """Return the layout of a full tensor in the file with a number."""
    return Layout.unsharded(len(transfer.meta.shape), 1, number)


def _are_common(plan: Plan) -> Sequence[bool]:
    """Return for each transfer whether it goes to the common file.

    With a source strategy these are the tensors without a layout.  Without one they are the common
    tensors of the source, and tensors that are never sharded: single elements and map parameters.
    """
    sources = [transfer.source for transfer in plan.transfers]
    if any(source.is_listed for source in sources):
        return [not source.has_layout for source in sources]
    catalog = plan.catalog
    common = catalog.common_tensors if isinstance(catalog, MergedCatalog) else {}
    return [
        source.meta.name in common
        or math.prod(source.meta.shape) == 1
        or map_of(source.meta.name) is not None
        for source in sources
    ]
