"""The plan of the outputs, made from the sources, and all that is wrong with it.

`plan_outputs` plans a job: it pairs the tensors of each source with the target, makes a mean of
several plans, and adds what is written beside the tensors.  `plan_reading` plans one source for
callers that only read.  Nothing is written.  Problems are collected, so that `raise_problems` can
report them in one error with those of the destination.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckpttool._version import __version__
from ckpttool.checkpoint.checkpoint import Checkpoint, ResolveOptions
from ckpttool.checkpoint.evidence import Evidence
from ckpttool.checkpoint.from_manifest import with_names_of_files
from ckpttool.checkpoint.interpret import Files
from ckpttool.concurrency import OpenProgress, no_progress
from ckpttool.formats.base import PROVENANCE
from ckpttool.formats.local import is_visible, open_file, read_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.plan import Kept, Plan, Target
from ckpttool.model.strategy import Strategy
from ckpttool.operations.jobs import Job, reshard_source, slices_of_ranks, split_source
from ckpttool.operations.look import Sight, Subject, look
from ckpttool.planning import targets
from ckpttool.planning.metadata import carry_metadata
from ckpttool.problems import CkptToolError, Diagnostic, Diagnostics, PlanError
from ckpttool.transaction.resume import OutputOptions
from ckpttool.transaction.sources import changed_sources
from ckpttool.typed import NotInTarget

if TYPE_CHECKING:
    from ckpttool.model.recipes import UsedRecipe

_ADAPTERS = f"{PROVENANCE}lora"  # the attribute that lists them
_HASHED_BYTES = 1 << 20  # of an adapter at a time
_LOOK_BYTES = 16 << 10  # of a set are compared with its manifest if it is only read


class PlannedSource(Struct, frozen=True):
    """A source, the target with the names of its files, and the plan, if nothing is wrong."""

    sight: Sight
    target: Target
    plan: Plan | None

    def require(self) -> tuple[Plan, Diagnostics]:
        """Return the plan, and what is noted; raise all problems as one error."""
        self.sight.found.raise_if_errors()
        assert self.plan is not None, "else there is an error"
        return self.plan, self.sight.found


def plan_outputs(
    job: Job, sights: Sequence[Sight], open_progress: OpenProgress
) -> tuple[Plan | None, Diagnostics]:
    """Plan the outputs of a job, and find all that is wrong with its sources and its target.

    The plan is None if something is wrong.
    """
    parts = [
        plan_source(sight, job.target, job.output, job.kept, open_progress) for sight in sights
    ]
    diagnostics = _join(sights)
    plan = _average(parts, job.weights, diagnostics) if job.weights else parts[0].plan
    plan = plan and carry_metadata(plan, diagnostics)
    extensions = targets.extensions(job.target, job.output, job.sources[0].files == "kept")
    for extension in extensions:
        plan = plan and extension.complete(plan, diagnostics)
    if plan is None:
        return None, diagnostics
    for extension in extensions:
        diagnostics.add(*extension.problems(plan))
    return replace(plan, notes=diagnostics.of("note", "warning")), diagnostics


def plan_source(
    sight: Sight,
    target: Target,
    options: OutputOptions,
    kept: Kept = Kept(),
    open_progress: OpenProgress = no_progress,
) -> PlannedSource:
    """Plan the transfer of a source to a target; what is wrong is added to ``sight.found``."""
    diagnostics = sight.found
    of_target = Diagnostics(strict=sight.source.options.strict)
    plan = None
    if sight.checkpoint is not None:
        checkpoint = sight.checkpoint
        # Samples take as much memory as the checkpoint, and only checks need them.
        left = replace(sight.contents, sampled=(), sampled_copies=(), evidence=Evidence())
        sight = replace(sight, contents=left)
        try:
            if target.strategy is not None:
                of_files = with_names_of_files(sight.catalog, target.strategy)
                target = replace(target, strategy=of_files)
            with open_progress(0, "planning"):
                plan = targets.plan(checkpoint, sight.contents, target, options, of_target)
            diagnostics.extend(of_target)
            if plan is not None:
                provenance = _provenance_of(
                    *(sight.catalog, checkpoint, target.strategy, sight.source.files)
                )
                before = sight.catalog.common_attrs.get(_ADAPTERS)
                if adapters := _name_adapters(plan, [before] if before else [], diagnostics):
                    provenance[_ADAPTERS] = adapters
                plan = replace(plan, provenance=provenance, listed=sight.listed, kept=kept)
        except CkptToolError as error:
            diagnostics.failures.append(error)
    diagnostics.add(*sight.of_files)
    return PlannedSource(sight, target, plan)


def _provenance_of(
    catalog: Catalog, checkpoint: Checkpoint, dst: Strategy | None, files: Files
) -> dict[str, str]:
    """Return the attributes that say how the outputs of a run are made.

    They name no folder above the source, no host and no time, so equal inputs give equal outputs.
    A strategy is the SHA-256 of its files, one behind the other (``cat FILES | sha256sum``).
    Outputs of a checkpoint that ckpttool wrote keep its step and its strategy.  Files that are
    written again keep the strategy of their ranks.
    """
    kept = catalog.common_attrs
    src = checkpoint.strategy if checkpoint.strategy.layouts else None
    name = os.fsencode(Path(os.path.abspath(catalog.root)).name)  # noqa: PTH100, it resolves ".."
    attrs = {
        "version": __version__,
        "source": name.decode(errors="replace"),
        "step": catalog.step or kept.get(f"{PROVENANCE}step"),
        "src_strategy": _hash_strategy(src) or kept.get(f"{PROVENANCE}src_strategy"),
        "dst_strategy": _hash_strategy(dst),
    }
    options = checkpoint.options.tensors
    changes = {
        "dtype": " ".join(sorted(cast.text for cast in options.casts)),
        "recipe": "" if options.recipe is None else _name_recipe(options.recipe),
        "pad_vocab": str(options.pad_vocab or ""),
        "cut_vocab": str(options.cut_vocab or ""),
        "pad_with": options.pad_with if options.pad_with != "zero" else "",
    }
    if files == "kept":
        attrs |= {key: kept.get(f"{PROVENANCE}{key}") for key in ("dst_strategy", *changes)}
    attrs |= {key: text for key, text in changes.items() if text}
    return {f"{PROVENANCE}{key}": value for key, value in attrs.items() if value}


def _name_adapters(plan: Plan, texts: list[str], diagnostics: Diagnostics) -> str:
    """Return the name, the SHA-256 and the scales of each adapter, behind those of the source.

    An adapter that is added twice is noted.
    """
    for number, adapter in enumerate(plan.tensors.lora, 1):
        state = hashlib.sha256()
        for path in adapter.catalog.paths:
            with open_file(path) as file:
                for data in iter(partial(file.read, _HASHED_BYTES), b""):
                    state.update(data)
        digest = f"sha256:{state.hexdigest()}"
        if any(digest in text for text in texts):
            message = "this adapter was added before, and is added again"
            where = adapter.catalog.root
            diagnostics.add(Diagnostic("lora_used", message, where=where))
        terms = chain.from_iterable(transfer.terms for transfer in plan.transfers)
        scales = {it.weight for it in terms if it.input == number and it.role != "rows"}
        name = Path(os.path.abspath(adapter.catalog.root)).name  # noqa: PTH100, it resolves ".."
        texts.append(f"{name} {digest} times {', '.join(map(repr, sorted(scales)))}")
    return "; ".join(texts)


def _name_recipe(used: UsedRecipe) -> str:
    given = (f"{key}={value}" for key, value in sorted(used.given.items()))
    return " ".join((used.recipe.recipe, str(used.recipe.version), *given))


def _hash_strategy(strategy: Strategy | None) -> str | None:
    if strategy is None or not strategy.files:
        return None
    state = hashlib.sha256()
    for path in dict.fromkeys(strategy.files):
        state.update(read_file(path))
    return f"sha256:{state.hexdigest()}"


def _join(sights: Sequence[Sight]) -> Diagnostics:
    joined = Diagnostics(strict=sights[0].source.options.strict)
    is_of_all = set.intersection(*(set(sight.found) for sight in sights))
    for number, of_source in enumerate((sight.found for sight in sights), 1):
        side = f"input {number}" if len(sights) > 1 else ""
        joined.add(*(it if it in is_of_all or not side else it.on_side(side) for it in of_source))
        joined.failures += [it.on_side(side) if side else it for it in of_source.failures]
    return joined


def _average(
    parts: Sequence[PlannedSource], weights: Sequence[float], diagnostics: Diagnostics
) -> Plan | None:
    # With the strategy of another set, names and shapes are not those of the input.
    if any(diagnostic.code == "strategy" for part in parts for diagnostic in part.sight.found):
        return None
    from ckpttool.planning.averaging import average

    sights = [part.sight for part in parts]
    known = [None if it.contents.is_incomplete else it.checkpoint for it in sights]
    plans = [part.plan for part in parts]
    return average([*zip(known, plans, strict=True)], weights, diagnostics)


def files_to_read(job: Job, sights: Sequence[Sight]) -> Iterator[str]:
    """Yield the files that are read, which no output may replace; also damaged ones."""
    strategies = [job.target.strategy]
    for sight in sights:
        catalog, checkpoint = sight.source.catalog, sight.checkpoint
        damaged = (error.path for error in catalog.damaged.values())
        yield from (*catalog.paths, *(path for path in damaged if is_visible(path)))
        yield from chain(*(of.catalog.paths for of in sight.source.options.tensors.lora))
        strategies.append(sight.source.strategy if checkpoint is None else checkpoint.strategy)
    for strategy in strategies:
        yield from strategy.files if strategy is not None else ()


def raise_problems(
    sights: Sequence[Sight], diagnostics: Diagnostics, of_target: Diagnostics
) -> None:
    """Raise all problems of a run as one error, if there are any.

    Files come first, since what else is wrong may follow from them.  If files of a source have
    changed meanwhile, nothing else that was found of it counts.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems: those of the files, of the tensors, of the destination.
    """
    diagnostics.extend(of_target)
    diagnostics.failures[:0] = chain(*(sight.file_errors for sight in sights))
    has_errors = bool(diagnostics.failures or diagnostics.errors)
    if has_errors and (changed := changed_sources(*(sight.source.catalog for sight in sights))):
        raise PlanError([*changed, *of_target.errors])
    diagnostics.raise_if_errors()


def plan_reading(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Strategy | None,
    rank: int | None,
    options: ResolveOptions,
    executor: Executor,
    not_in_target: NotInTarget | None = None,
) -> PlannedSource:
    """Plan what a merge, or a reshard to a rank of ``target``, would write, in order to read it."""
    ranks = None if rank is None else (rank,)
    source = Subject(catalog, strategy, options)
    if target is not None:
        is_one = catalog.is_merged or len(catalog.files) == 1
        is_split = strategy is None and is_one and catalog.description is None
        source = reshard_source(catalog, strategy, options)
        source = split_source(catalog, options) if is_split else source
    target_of_rank = Target.unwritten(target, ranks)
    output = OutputOptions(ranks=ranks, not_in_target=not_in_target)
    sight = look(
        *(replace(source, sampled_bytes=_LOOK_BYTES), Diagnostics(strict=options.strict), executor),
        find_needed=slices_of_ranks(target_of_rank, output, options.tensors),
    )
    planned = plan_source(sight, target_of_rank, output)
    sight.found.failures[:0] = sight.file_errors
    return planned
