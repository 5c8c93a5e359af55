"""Plan the outputs of a target, and the documents that are written with them.

All problems of the target are reported together.  Documents are the strategy file of rank files,
and the indexes of numbered files.  They are written last, and old ones are removed first, so that
an index never lists files of a different run.

Each numbered file has a limit of bytes, its header included.  Parameters fill the files in the
order of the plan.  A parameter that does not fit begins the next file; so does one whose entry
exceeds the largest header.  A tensor larger than the limit has its own file.  Tensors without a
layout go to a common file, which loaders give to every rank.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
from ckpttool.checkpoint.fit_strategy import fit_to_full_tensors
from ckpttool.checkpoint.optimizer_state import (
    GradientShards,
    has_expected_full_shape,
    state_layouts,
    target_layouts,
)
from ckpttool.checks.missing import check_nothing
from ckpttool.formats import format_of_suffix, get_format
from ckpttool.formats.local import url_problem
from ckpttool.formats.weight_index import (
    MAX_INDEX_BYTES,
    index_names,
    index_text,
    is_index_name,
    shard_file_name,
)
from ckpttool.model.belonging import WEIGHT, count_roles, find_belongings
from ckpttool.model.joining import format_names, format_states
from ckpttool.model.layout import Layout, fold_layout
from ckpttool.model.manifest import MANIFEST, RECORD
from ckpttool.model.names import (
    ParameterOfState,
    drop_unlike_shapes,
    map_of_component,
    match_states,
    parse_name,
)
from ckpttool.model.plan import Document, NotListed, Plan, Target, Transfer
from ckpttool.model.slicing import FullTensor, why_not_sliced
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.planning.fused_weights import fused_notes
from ckpttool.planning.naming import ResumeRecords
from ckpttool.problems import Diagnostic, Diagnostics, StrategyError
from ckpttool.storage.files import is_within
from ckpttool.transaction.resume import OutputOptions
from ckpttool.wording import count, find_runs, format_bytes, format_ranks, shorten

if TYPE_CHECKING:
    from ckpttool.checkpoint.rows import RowChanges

_MOST_METADATA = 64 << 10  # of files that it makes larger than their limit; each file has all of it


def plan(
    checkpoint: Checkpoint,
    contents: Contents,
    target: Target,
    options: OutputOptions,
    diagnostics: Diagnostics,
) -> Plan | None:
    """Plan the transfer of a checkpoint to a target, without reading files.

    Returns
    -------
    Plan or None
        None if the checkpoint is incomplete, or does not fit the target.
    """
    catalog = checkpoint.catalog
    target, transfers, not_listed = find_transfers(
        checkpoint, target, options, diagnostics, compares_names=not contents.is_incomplete
    )
    if options.not_in_target is None and not (contents.is_incomplete or diagnostics.has_errors):
        diagnostics.add(*_unfit_problem(checkpoint, target, transfers, not_listed.full))
    diagnostics.add(*check_nothing(checkpoint))
    is_incomplete = contents.is_incomplete or bool(checkpoint.presence.missing)
    if not transfers and not (is_incomplete or diagnostics.has_errors or checkpoint.left_out):
        diagnostics.add(Diagnostic("nothing", "no tensor to write", where=catalog.root))
    if is_incomplete or diagnostics.has_errors:
        return None
    # No file has two tensors of one name, or one without; a check says so.
    olds = Counter(checkpoint.renamed.get(name, name) for name in catalog.metas)
    transfers = [of for of in transfers if (of.name or not of.source.name) and olds[of.name] < 2]
    if target.format:
        transfers = _parameters_first(transfers, checkpoint, target, diagnostics)
    strategies = (checkpoint.strategy, *filter(None, [target.strategy]))
    files = tuple(name for strategy in strategies for name in strategy.files)
    return Plan(
        # Without what was computed of it, which takes memory.
        (replace(catalog), *(it.catalog for it in checkpoint.options.tensors.lora)),
        target,
        tuple(transfers),
        not_listed=not_listed,
        left_out=checkpoint.left_out,
        weight_block=checkpoint.weight_block,
        roles=count_roles((tensor.name for tensor in checkpoint.tensors), checkpoint.belongings),
        strategies=files,
        confirmed=checkpoint.whole.confirmed_by(contents.readable_indexes),
        tensors=checkpoint.options.tensors,
    )


def _parameters_first(
    transfers: list[Transfer], checkpoint: Checkpoint, target: Target, diagnostics: Diagnostics
) -> list[Transfer]:
    """Return the transfers, in an order in which no state comes before its parameter.

    Where no name fits the network, MindSpore 2.10 drops a prefix: that of the first name that then
    fits (``_load_dismatch_prefix_params``).  That may be a state.  ``load_checkpoint`` sorts the
    names of safetensors files, and h5py visits those of HDF5 files sorted.  So a note says it of
    merged files of these, unless somebody chose the names.
    """
    kinds = {of.name: checkpoint.belonging(of.source.name) for of in transfers}
    new_names = {of.source.name: of.name for of in transfers}
    owners = {
        name: new_names.get(kind.of or "", "")
        for name, kind in kinds.items()
        if kind.role in ("state", "copy")
    }
    is_ordered = get_format(target.format).is_loaded_in_order
    places = {name: place for place, name in enumerate(kinds if is_ordered else sorted(kinds))}
    early = [
        (state, of) for state, of in owners.items() if "." in of and places[state] < places[of]
    ]
    if early and is_ordered:
        return sorted(transfers, key=lambda of: not kinds[of.name].is_model)
    if early and target.is_merged and not checkpoint.renamed:
        prefixes = shorten(dict.fromkeys(state.removesuffix(of) for state, of in early), 2)
        modules = {of.partition(".")[0] if of.count(".") > 1 else "" for _, of in early}
        rename = f", or --rename '{min(modules)}.*=*'" if len(modules) == 1 and min(modules) else ""
        message = f"MindSpore may load {prefixes} as weights where no name fits the network"
        diagnostics.add(Diagnostic("format", message, hint=f"--weights-only{rename}"))
    return transfers


def find_transfers(
    checkpoint: Checkpoint,
    target: Target,
    options: OutputOptions,
    diagnostics: Diagnostics,
    *,
    compares_names: bool = True,
) -> tuple[Target, list[Transfer], NotListed]:
    """Return a transfer for each tensor to write, and those that the target does not list.

    The target is returned with its rules resolved.  ``diagnostics`` collects all problems.  Names
    on one side only are not problems of an incomplete checkpoint.
    """
    target, problems = _resolve_names(target, checkpoint, options)
    diagnostics.add(*(replace(problem, code="target") for problem in problems))
    transfers: list[Transfer] = []
    not_listed = NotListed()
    if not problems:
        diagnostics.add(*(() if target.strategy is None else target.strategy.notes))
        transfers, not_listed = _find_transfers(
            checkpoint, target, options, diagnostics, compares_names
        )
    outside = [rank for rank in target.paths if not 0 <= rank < target.ranks]
    if outside:
        verb = "is" if len(outside) == 1 else "are"
        has = f"which has {target.ranks} ranks"
        message = f"{format_ranks(outside)} {verb} not in the target, {has}"
        hint = f"--rank with some of 0-{target.ranks - 1}"
        diagnostics.add(Diagnostic("target", message, hint=hint, ranks=tuple(outside)))
    return target, transfers, not_listed


def layouts_in_target(
    checkpoint: Checkpoint, target: Target, options: OutputOptions
) -> Iterator[tuple[FullTensor, tuple[Layout, ...]]]:
    """Yield each tensor and its layouts in a target, whether or not these can shard its shape.

    Yield nothing if the names do not fit the rules of a hand-written target.
    """
    target, problems = _resolve_names(target, checkpoint, options)
    chooser = _LayoutChooser(checkpoint, target, options)
    for tensor in () if problems else checkpoint.tensors:
        yield tensor, chooser.fit(tensor)[0]


def _resolve_names(
    target: Target, checkpoint: Checkpoint, options: OutputOptions
) -> tuple[Target, Sequence[Diagnostic]]:
    """Resolve the rules of a target strategy with the names of the checkpoint; see `Strategy`.

    Tensors that are left out have layouts, too, since others may follow them; nobody has to say
    how they are sharded.
    """
    if target.strategy is None:
        return target, ()
    whole = checkpoint.whole
    full = {tensor.name: tensor.meta for tensor in whole.tensors}
    is_made = whole.rearranged is not None  # then the names on disk are those of the other side
    metas = full if is_made else {**whole.metas, **full}
    new_names = target.strategy.new_names_in(checkpoint.renamed)
    called = {name: new_names.get(name, name) for name in metas}
    strategy, problems = fit_to_full_tensors(
        target.strategy,
        {called[name]: meta for name, meta in full.items()},
        {called[name]: meta for name, meta in metas.items()},
        options.not_in_target not in (None, "follow"),
        whole.catalog.root,
        [called[name] for name in metas if name not in checkpoint.left_out],
    )
    has_old = any(name not in new_names and name in strategy.layouts for name in checkpoint.renamed)
    if has_old and options.strategy_path is None:
        message, hint = "the strategy has the old names", "--write-strategy new_names.ckpt"
        note = Diagnostic("new_names", message, hint=hint, where=strategy.origin)
        strategy = replace(strategy, notes=(*strategy.notes, note))
    if new_names:
        strategy = strategy.with_names(called)
    return replace(target, strategy=strategy), problems


def _find_transfers(
    checkpoint: Checkpoint,
    target: Target,
    options: OutputOptions,
    diagnostics: Diagnostics,
    compares_names: bool,
) -> tuple[list[Transfer], NotListed]:
    """Return a transfer for each tensor to write, and those that the target does not list."""
    transfers: list[Transfer] = []
    unwritten = set[str]()
    tensors = checkpoint.tensors
    chooser = _LayoutChooser(checkpoint, target, options)
    rows = _row_changes(checkpoint)
    for stored in tensors:
        tensor = stored if rows is None else rows.resized(stored)
        if not (terms := checkpoint.terms_of(tensor)):
            continue  # a scale that is multiplied into its weight
        layouts, reasons = chooser.fit(tensor)
        if reasons:
            if rows is None or not rows.refuses(tensor.name):  # else it is reported below
                problem = _mismatch_problem(checkpoint, tensor.meta, reasons, target, layouts)
                diagnostics.add(problem)
        elif layouts:
            name = checkpoint.renamed.get(tensor.name, tensor.name)
            dtype = checkpoint.wanted_dtype(tensor.meta)
            if rows is not None and (moved := rows.regrouped(tensor, layouts)) is not tensor:
                terms = checkpoint.terms_of(moved)
            transfers.append(Transfer(name, dtype, terms, layouts))
        elif tensor.name not in chooser.not_listed.dropped:
            unwritten.add(tensor.name)
    if target.strategy is not None:
        if compares_names:
            _compare_names(checkpoint, target.strategy, diagnostics)
        diagnostics.add(*chooser.notes(), *chooser.gradients.notes())
    diagnostics.add(*(() if rows is None else rows.found()))
    if checkpoint.options.tensors.lora:
        from ckpttool.planning.adapting import adapt

        listed = () if target.strategy is None else target.strategy.layouts
        transfers, of_adapters = adapt(checkpoint, transfers, listed)
        diagnostics.add(*of_adapters)
    if not checkpoint.is_recorded:  # else ckpttool cut these slices from full tensors
        diagnostics.add(*fused_notes(transfers, checkpoint.strategy, target.strategy))
    written = {transfer.source.name for transfer in transfers}  # of that name on other ranks
    if unwritten := unwritten - written:
        names = _name(sorted(unwritten))
        message = f"left out, as no target rank takes the value of their ranks: {names}"
        diagnostics.add(Diagnostic("dropped", message))
    return transfers, chooser.not_listed


def _row_changes(checkpoint: Checkpoint) -> RowChanges | None:
    """Return what the user wants of rows; None for nothing."""
    options = checkpoint.options.tensors
    of_recipe = options.recipe and options.recipe.recipe.fused
    if not (options.fusions or of_recipe) and options.vocabulary_rows is None:
        return None
    from ckpttool.checkpoint.rows import RowChanges

    return RowChanges(checkpoint)


class _LayoutChooser:
    """Chooses the layouts of full tensors in a target.

    Names and full shapes decide on tensors that the target strategy does not list, and whether they
    are states.  A merged and a sharded checkpoint have the same result, unless only the sharded one
    shows that a tensor is not a state (`_stays_in_full`).
    """

    def __init__(self, checkpoint: Checkpoint, target: Target, options: OutputOptions) -> None:
        self.target = target
        self.not_in_target = options.not_in_target or "follow"
        self.src_strategy = checkpoint.strategy
        whole = checkpoint.whole.tensors  # a state follows its parameter also without it
        self.metas = {tensor.name: tensor.meta for tensor in whole}
        self.sharded = {tensor.name for tensor in whole if tensor.is_sharded}
        self.owners: ParameterOfState = {}
        in_target: Collection[str] = ()
        if target.strategy is not None:
            in_target = target.strategy.layouts
            self.owners = drop_unlike_shapes(match_states(in_target, self.metas), self.metas)
        self.with_listed_states = {
            parameter
            for name, parameter in self.owners.items()
            if name in in_target and not parse_name(name).is_gradient
        }
        self.corrected: list[str] = []
        self.gradients = GradientShards()
        self.not_listed = NotListed()
        self._fitted: dict[Hashable, tuple[tuple[Layout, ...], list[str]]] = {}

    def fit(self, tensor: FullTensor) -> tuple[tuple[Layout, ...], list[str]]:
        """Return the layouts of a tensor in the target, and why they cannot shard it.

        Expanded ones are folded if possible.
        """
        layouts, meta = self.layouts(tensor), tensor.meta
        full_shapes = tuple(layout.full_shape for layout in layouts)  # equal layouts may differ
        key = layouts, full_shapes, meta.dtype, meta.shape, meta.whole_shape
        if key not in self._fitted:
            folded = tuple(_fold(layout, meta.shape) for layout in layouts)
            reasons = {_why_not(of, meta.shape) or why_not_sliced(meta, of) for of in folded}
            self._fitted[key] = folded, sorted(reason for reason in reasons if reason is not None)
        return self._fitted[key]

    def layouts(self, tensor: FullTensor) -> tuple[Layout, ...]:
        """Return the layouts of a tensor in the target; none if no rank takes it."""
        strategy, name = self.target.strategy, tensor.name
        if strategy is None or tensor.meta.text is not None or tensor.own_ranks:
            return self._full(tensor)
        if name in strategy.layouts and tensor.only_for is None:
            return self._listed(tensor, strategy)
        if strategy.replicates_rest or name in strategy.layouts:
            return self._full(tensor)
        is_state = tensor.only_for is None and has_expected_full_shape(
            name, self.owners, self.metas
        )
        is_followed = is_state and not self._stays_in_full(tensor)
        layouts = state_layouts(strategy, name, self.owners) if is_followed else ()
        if layouts and self.not_in_target == "follow":
            self.not_listed.followed[name] = tensor.meta
            return layouts
        if tensor.meta.is_single and map_of_component(name) is None:
            return self._full(tensor)
        if self.not_in_target == "drop":
            self.not_listed.dropped[name] = tensor.meta
            return ()
        self.not_listed.full[name] = tensor.meta
        return self._full(tensor)

    def _full(self, tensor: FullTensor) -> tuple[Layout, ...]:
        ndim, ranks = len(tensor.meta.shape), self.target.ranks
        if tensor.own_ranks:
            runs = find_runs(tensor.own_ranks)
            return tuple(Layout.unsharded(ndim, len(run), run.start) for run in runs)
        if tensor.only_for is None:
            return (Layout.unsharded(ndim, ranks),)
        first, step = tensor.only_for
        return tuple(Layout.unsharded(ndim, 1, rank) for rank in range(first, ranks, step))

    def _stays_in_full(self, tensor: FullTensor) -> bool:
        # A tensor with the name of a state is not a state if all source ranks hold it in full,
        # unlike its parameter.  If the source does not show it, the target does: one that lists
        # other states of the parameter would list this one too.  Accumulated gradients always
        # follow their parameter.
        name, parameter = tensor.name, self.owners[tensor.name]
        if parse_name(name).is_gradient:
            return False
        if parameter in self.sharded:
            return not tensor.has_layout
        return parameter in self.with_listed_states

    def _listed(self, tensor: FullTensor, strategy: Strategy) -> tuple[Layout, ...]:
        name = tensor.name
        layouts = target_layouts(strategy, name, self.owners)
        if [layout.slice_counts for layout in strategy.layouts[name]] != [
            layout.slice_counts for layout in layouts
        ]:
            self.corrected.append(name)
        return self.gradients.drop_unproven_shard(tensor, self.src_strategy, layouts)

    def notes(self) -> Iterator[Diagnostic]:
        """Yield notes on corrected layouts, and on tensors that the target does not list."""
        if self.corrected:
            message = "the target strategy lacks their optimizer shard; sharded like the parameters"
            yield Diagnostic("corrected", f"{message}: {_name(self.corrected, 'optimizer state')}")
        followed = self.not_listed.followed
        full = self.not_listed.full
        dropped = self.not_listed.dropped
        states = format_states({name: self.owners[name] for name in followed})
        kinds = (
            ("follows", "sharded like their parameters", states, "optimizer state"),
            ("undivided", "written in full to every rank", format_names(full), "parameter"),
            ("dropped", "left out", format_names(dropped), "parameter"),
        )
        sizes = self.not_listed.sizes.values()
        for (code, verb, names, noun), (number, nbytes) in zip(kinds, sizes, strict=True):
            if number:
                size = f"{count(number, noun)}, {format_bytes(nbytes)}"
                message = f"not in the target strategy, {verb}: {size} ({names})"
                yield Diagnostic(code, message)


def _fold(layout: Layout, shape: tuple[int, ...]) -> Layout:
    folded = fold_layout(layout, len(shape), lambda folded: folded.full_shape == shape)
    return folded[0] if len(folded) == 1 else layout


def _why_not(layout: Layout, shape: tuple[int, ...]) -> str | None:
    if not layout.has_boxes:
        return f"field-sliced ({layout.fields} fields), which can be merged but not sharded"
    return layout.why_not(shape)


def _mismatch_problem(
    checkpoint: Checkpoint,
    meta: TensorMeta,
    reasons: Sequence[str],
    target: Target,
    layouts: Sequence[Layout],
) -> Diagnostic:
    """Return the problem of a shape; more rows of a vocabulary can be the remedy."""
    alike = [it for it in layouts if len(it.tensor_map) == len(meta.shape)]
    hint = "a target with slices that divide the axes; `ckpttool help target` explains"
    if checkpoint.is_of_vocabulary(meta.name):
        cuts = [it.slices for of in alike for it in of.uneven_axes(meta.shape) if it.axis == 0]
        hint = f"--pad-vocab multiple:{math.lcm(*cuts)}" if cuts else hint
    if len(alike) < len(layouts):
        hint = "a target of this model"
        hint += ", or another answer behind --recipe" if checkpoint.rearranged else ""
    return Diagnostic(
        "target",
        "the target cannot shard this shape",
        hint=hint,
        facts="; ".join(reasons),
        tensor=meta.name,
        where="" if target.strategy is None else target.strategy.origin,
    )


def _name(names: Collection[str], noun: str = "parameter") -> str:
    return f"{count(len(names), noun)} ({format_names(names)})"


def _compare_names(checkpoint: Checkpoint, strategy: Strategy, diagnostics: Diagnostics) -> None:
    """Add notes on names that only the target lists, and a problem if no name is in common."""
    names = {*checkpoint.left_out, *(tensor.name for tensor in checkpoint.tensors)}
    has_other = bool(strategy.layouts) and names.isdisjoint(strategy.layouts)
    if names and has_other and not diagnostics.has_errors:
        facts = f"the strategy lists {format_names(strategy.layouts, 2)}; the source holds "
        facts += format_names(sorted(names), 2)
        message = "no parameter in common with the source"
        hint = "-d with a strategy of this model"
        hint += ", or --recipe NAME" if checkpoint.rearranged is None else ""
        problem = Diagnostic("target", message, hint=hint, facts=facts, where=strategy.origin)
        diagnostics.add(problem)
        return
    absent = [name for name in strategy.layouts if name not in names]
    if not absent:
        return
    # States have parameters there.
    called = dict.fromkeys((*strategy.layouts, *checkpoint.renamed.values()))
    belongings = find_belongings(called, checkpoint.whole.metas)
    weights = {name for name in absent if belongings.get(name, WEIGHT) == WEIGHT}
    lost = checkpoint.options.tensors.choose(weights, belongings)  # the user left out the others
    if lost:
        message = f"in the target strategy and not in the source: {count(len(lost), 'weight')}"
        facts = format_names(name for name in absent if name in lost)
        hint = "a source that has them; `ckpttool help not_in_source` explains"
        if checkpoint.rearranged is not None and lost <= checkpoint.stored.metas.keys():
            hint = "a target strategy with the names that the recipe makes, or no --recipe"
        diagnostics.add(Diagnostic("not_in_source", message, hint=hint, facts=facts))
    if rest := [name for name in absent if name not in lost]:
        diagnostics.add(Diagnostic("absent", f"in the target strategy only: {_name(rest)}"))


def _unfit_problem(
    checkpoint: Checkpoint,
    target: Target,
    transfers: Sequence[Transfer],
    full: Mapping[str, TensorMeta],
) -> Iterator[Diagnostic]:
    """Yield a problem if the target lists too few weights, by bytes: it is of another model.

    A state counts as its parameter.  Copies that take no more than the source do no harm.
    """
    names = {} if target.strategy is None else target.strategy.layouts
    if not names and target.strategy and any(it.code == "absent" for it in target.strategy.notes):
        # No pattern of a hand-written strategy matches, and ``otherwise`` is about all tensors.
        full = {transfer.source.name: transfer.source.meta for transfer in transfers}
    weights = [transfer.source.meta for transfer in transfers if transfer.source.meta.shape[1:]]
    states = checkpoint.states if full else {}
    outside = (
        meta
        for meta in weights
        if meta.name in full and states.get(meta.name, meta.name) not in names
    )
    nbytes = sum(file.nbytes for file in checkpoint.catalog.files.values())
    copies = target.ranks * sum(meta.nbytes for meta in full.values())
    are_few = 10 * sum(it.nbytes for it in outside) > sum(it.nbytes for it in weights)
    if target.strategy is not None and are_few and copies > nbytes:
        message = f"{len(full)} of {count(len(transfers), 'tensor')} are not in the target strategy"
        facts = f"in full on {count(target.ranks, 'rank')} they take {format_bytes(copies)}, the "
        facts += f"source {format_bytes(nbytes)}: {shorten(full, 3)}"
        hint = "-d with a strategy of this model, or --not-in-target follow to write them in full"
        where = target.strategy.origin
        yield Diagnostic("target_unfit", message, hint=hint, facts=facts, where=where)


def written_strategy(plan: Plan) -> Strategy:
    """Return the strategy of the outputs of ``plan`` as a file that MindSpore reads.

    Rules are resolved, expanded tensor maps are folded, and states that follow a parameter are
    listed by name.  Tensors that the target does not list are listed as full tensors in each stage:
    for a parameter that only one of two strategies lists, MindSpore's transform takes the slice of
    one rank for all.  Single values that the target does not list have no layouts: MindSpore's own
    files have those of the network, but not ``global_step`` or ``learning_rate``.

    Unsharded names with a ``-`` are not listed, since MindSpore cannot read such names.
    """
    strategy = plan.written_strategy
    assert strategy is not None, "rank files are sharded by one"
    return strategy.with_only(
        {
            name
            for name, layouts in strategy.layouts.items()
            if "-" not in name or any(math.prod(layout.slice_counts) > 1 for layout in layouts)
        }
    )


class StrategySidecar(Struct, frozen=True):
    """The strategy file that is written with rank files."""

    path: str
    is_part: bool

    @property
    def documents(self) -> list[str]:
        """The strategy file."""
        return [self.path]

    def complete(self, plan: Plan, diagnostics: Diagnostics) -> Plan | None:
        """Return the plan with the strategy of its outputs as a document.

        The result is None, with an error in ``diagnostics``, if MindSpore's format cannot hold that
        strategy.
        """
        from ckpttool.strategy_files.writer import encode_strategy

        try:
            data = encode_strategy(written_strategy(plan), self.path)
        except StrategyError as error:
            diagnostics.failures.append(error)
            return None
        return replace(plan, documents=(*plan.documents, Document(self.path, data, "strategy")))

    def problems(self, plan: Plan) -> Iterator[Diagnostic]:
        """Yield the problems if the strategy cannot have its path.

        `ckpttool.planning.preflight` checks for an existing file.
        """

        def problem(message: str, hint: str, facts: str = "") -> Diagnostic:
            at = self.path
            return Diagnostic("destination", message, hint=hint, facts=facts, where=at, path=at)

        if (unwritable := url_problem(self.path)) is not None:
            yield problem(*unwritable)
        folder, name = Path(plan.target.output_folder), Path(self.path).name
        parent = Path(self.path).parent.resolve()
        homes = {Path(path).parent for path in plan.target.paths.values()}
        if parent in {home.resolve() for home in homes}:
            yield problem(
                "a strategy among the files of ranks would be read as a checkpoint",
                f"--write-strategy {quote(str(folder / name))}",
            )
        place = parent / name
        for output in map(Path, plan.target.paths.values()):
            if output.resolve().is_relative_to(place) or place.is_relative_to(output.resolve()):
                yield problem(
                    "one of two files would have to be a folder",
                    f"--write-strategy {quote(str(folder / 'strategy.ckpt'))}",
                    f"the other is the output {output}",
                )
                break
        if os.path.relpath(place, folder.resolve()).startswith((MANIFEST, RECORD)):
            yield problem("ckpttool itself uses this name", "--write-strategy with another name")
        inside = os.path.relpath(self.path, folder)  # the record of the run has this path
        if self.is_part and (inside.startswith("../") or not is_within(folder, inside)):
            yield problem(
                "`ckpttool finalize` writes the strategy of parts, inside the output folder",
                f"--write-strategy {quote(str(folder / name))}",
            )


class ShardedOutput(Struct, frozen=True):
    """A merged checkpoint in numbered files, with their indexes.

    Attributes
    ----------
    folder, format
        The output folder, and the format of the files.
    limit
        Maximum bytes of each file; None for the files of the source.
    is_kept
        Whether tensors that the index of the source does not name stay unnamed.
    """

    folder: str
    format: str
    limit: int | None
    is_kept: bool = False

    @property
    def documents(self) -> list[str]:
        """The index files."""
        return [str(Path(self.folder, name)) for name in index_names(self.format)]

    def complete(self, plan: Plan, diagnostics: Diagnostics) -> Plan | None:
        """Return the plan of a `numbered_target` spread over numbered files, with their indexes.

        If no reader takes such an index, or if metadata would be written a thousand times,
        ``diagnostics`` gets an error, and the result is None.
        """
        every = get_format(self.format).header_bytes((), plan.attrs)
        if self.limit is not None and every > max(self.limit, _MOST_METADATA):
            message, hint = "each file would be larger than the limit", "--max-shard-size with more"
            facts = (
                f"metadata takes {format_bytes(every)} in each, {format_bytes(self.limit)} allowed"
            )
            problem = Diagnostic("options", message, hint=hint, facts=facts, where=self.folder)
            diagnostics.add(problem)
            return None
        plan = number_files(plan, self.limit, self._path)
        files = {meta.name: Path(output.path).name for output in plan for meta in output.metas}
        sizes = {transfer.name: transfer.meta.nbytes for transfer in plan.transfers}
        for transfer in plan.transfers if self.is_kept else ():
            name = transfer.source.name
            if not all(catalog.common_tensors.get(name, True) for catalog in plan.inputs):
                del files[transfer.name], sizes[transfer.name]
        data = index_text(files, sum(sizes.values())).encode()
        if len(data) > MAX_INDEX_BYTES:
            message = "too many tensors for one index"
            hint = f"-o {quote(f'{self.folder}.ckpt')} without --max-shard-size"
            facts = f"an index of {len(data)} bytes; at most {MAX_INDEX_BYTES} are read"
            problem = Diagnostic("destination", message, hint=hint, facts=facts, where=self.folder)
            diagnostics.add(problem)
            return None
        documents = tuple(Document(path, data) for path in self.documents)
        if self.limit is not None and (large := [*self._too_large(plan, self.limit)]):
            message = f"larger than the limit, in files of their own: {_name(large, 'tensor')}"
            diagnostics.add(Diagnostic("part", message))
        return replace(plan, documents=documents)

    def _too_large(self, plan: Plan, limit: int) -> Iterator[str]:
        format, common = get_format(self.format), self._path(None, 0)
        for output in plan:
            if output.path != common and len(output.metas) == 1:
                (meta,) = output.metas
                if format.header_bytes((meta,), plan.attrs) + meta.nbytes > limit:
                    yield meta.name

    def problems(self, plan: Plan) -> Iterator[Diagnostic]:
        """Yield a problem if the folder has files that a loader may read with this checkpoint."""
        folder = Path(self.folder)
        outputs = {Path(path).name for path in (*plan.target.paths.values(), *self.documents)}
        stale = [
            path.name
            for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
            if path.name not in outputs
            and (format_of_suffix(path.name) == self.format or is_index_name(path.name))
        ]
        if stale:
            yield Diagnostic(
                "destination",
                "the folder holds files of another checkpoint, which loaders would read, too",
                hint="another folder, or these files moved away",
                facts=shorten(stale, 3),
                where=str(folder),
                path=str(folder),
            )

    def _path(self, number: int | None, count: int) -> str:
        return str(Path(self.folder, shard_file_name(number, count, self.format)))


class ModelFiles(Struct, frozen=True):
    """The configuration and the tokenizer of a model, which go beside its weights."""

    files: tuple[Document, ...]

    @property
    def documents(self) -> list[str]:
        """Their paths."""
        return [file.path for file in self.files]

    def complete(self, plan: Plan, diagnostics: Diagnostics) -> Plan:
        """Return the plan with these files."""
        return replace(plan, documents=(*plan.documents, *self.files))

    def problems(self, plan: Plan) -> Iterator[Diagnostic]:
        """Yield nothing: they may have any name."""
        return iter(())


Extension: TypeAlias = ShardedOutput | StrategySidecar | ResumeRecords | ModelFiles


def extensions(
    target: Target, options: OutputOptions, is_kept: bool = False
) -> tuple[Extension, ...]:
    """Return what completes the plan of a target with files beside its tensors.

    ``is_kept`` is that of `ShardedOutput`.
    """
    there: list[Extension] = []
    if target.is_numbered:
        folder, limit = target.output_folder, options.max_shard_bytes
        there.append(ShardedOutput(folder, target.format, limit, is_kept))
    if options.strategy_path is not None:
        there.append(StrategySidecar(options.strategy_path, options.part is not None))
    if options.mindformers:
        there.append(ResumeRecords(target.paths))
    if target.model_files:
        there.append(ModelFiles(target.model_files))
    return tuple(there)


def numbered_target(folder: str, format: str, attrs: Mapping[str, str]) -> Target:
    """Return a target of one file, which `ShardedOutput` spreads over numbered files."""
    paths = {0: str(Path(folder, shard_file_name(None, 0, format)))}
    return Target(format, paths, attrs=attrs, is_numbered=True)


def number_files(plan: Plan, limit: int | None, path: Callable[[int | None, int], str]) -> Plan:
    """Return the plan of a merge with its one output spread over numbered files.

    Parameters
    ----------
    plan
        A plan whose one output holds everything.
    limit
        Maximum bytes of a numbered file; None to keep the tensors of each file of the source
        together.
    path
        Returns the path for a number, from 0, and the count of numbered files.  The number is None
        for the common file.
    """
    numbers = _numbers_in_source(plan) if limit is None else _numbers_by_size(plan, limit)
    total = max((number + 1 for number in numbers if number is not None), default=0)
    transfers = []
    for transfer, number in zip(plan.transfers, numbers, strict=True):
        ndim, at = len(transfer.meta.shape), total if number is None else number
        transfers.append(replace(transfer, layouts=(Layout.unsharded(ndim, 1, at),)))
    paths = {number: path(number, total) for number in range(total)}
    if None in numbers:
        paths[total] = path(None, total)
    target = replace(plan.target, paths=paths, ranks=len(paths))
    return replace(plan, target=target, transfers=tuple(transfers))


def _numbers_in_source(plan: Plan) -> list[int | None]:
    (catalog,) = plan.checkpoints
    files = [
        None if transfer.source.name in catalog.common_tensors else transfer.source.layout.ranks[0]
        for transfer in plan.transfers
    ]
    kept = sorted({file for file in files if file is not None})
    number_of = {file: number for number, file in enumerate(kept)}
    return [None if file is None else number_of[file] for file in files]


def _numbers_by_size(plan: Plan, limit: int) -> list[int | None]:
    """Return the number of the file of each transfer by their sizes; None if it is common."""
    numbers: list[int | None] = []
    total = 0
    format = get_format(plan.target.format)
    every, none = format.header_bytes((), plan.attrs), format.header_bytes(())
    most = format.max_header_bytes
    header = contents = 0
    for transfer, is_common in zip(plan.transfers, _are_common(plan), strict=True):
        if is_common:
            numbers.append(None)
            continue
        nbytes, entry = transfer.meta.nbytes, format.header_bytes((transfer.meta,)) - none
        is_large = most is not None and header + entry > most
        if not total or (
            header > every and (is_large or header + entry + contents + nbytes > limit)
        ):
            total, header, contents = total + 1, every, 0
        header, contents = header + entry, contents + nbytes
        numbers.append(total - 1)
    return numbers


def _are_common(plan: Plan) -> Sequence[bool]:
    """Return for each transfer whether it goes to the common file.

    With a source strategy these are the tensors without a layout.  Without one they are the common
    tensors of the source, and tensors that are never sharded: single elements and map parameters.
    """
    tensors = [transfer.source for transfer in plan.transfers]
    if any(tensor.is_listed for tensor in tensors):
        return [not tensor.has_layout for tensor in tensors]
    common = {name for catalog in plan.inputs for name in catalog.common_tensors}
    return [
        tensor.name in common
        or math.prod(tensor.meta.shape) == 1
        or map_of_component(tensor.name) is not None
        for tensor in tensors
    ]
