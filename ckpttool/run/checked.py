"""A plan, and everything that could stand in its way, before the first byte is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import NamedTuple

from ckpttool.errors import CkptToolError, CombinedError, PlanError, raise_all
from ckpttool.model.aside import set_aside
from ckpttool.model.catalog import Catalog, MergedCatalog
from ckpttool.model.findings import plan_error
from ckpttool.model.headers import find_lacking
from ckpttool.model.notes import Note
from ckpttool.model.plan import Plan, Target
from ckpttool.model.planning import make_plan, plan_from
from ckpttool.model.sources import Sources, find_sources
from ckpttool.model.states import full_metas
from ckpttool.model.strategy import Strategy
from ckpttool.model.undivided import why_not_full
from ckpttool.model.unlisted import Unlisted
from ckpttool.run.asked import note_asked
from ckpttool.run.engines import InlineExecutor
from ckpttool.run.gather import Trust, compare_contents, find_running, settle, why_no_shard
from ckpttool.run.integrity import check_files
from ckpttool.run.numbered import Numbered
from ckpttool.run.outputs import content_problems
from ckpttool.run.places import blocked_places, place_problems, stale_files
from ckpttool.run.replicas import replica_problems
from ckpttool.run.strategies import Told
from ckpttool.transaction.manifest import changed_sources
from ckpttool.transaction.resume import Destination, DestinationPolicy, inspect_previous_run


class Care(NamedTuple):
    """How a source is looked at before it is copied."""

    trust: Trust
    strict: bool
    check_replicas: bool


def make_checked_plan(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Target,
    unlisted: Unlisted | None,
    executor: Executor | None,
    care: Care,
    policy: DestinationPolicy,
    more: Numbered | Told | None = None,
) -> tuple[Plan, Destination]:
    """Plan how to carry a source over to a target, and look what lies there.

    Parameters
    ----------
    catalog, strategy
        The source, and its layouts; None if it holds everything undivided.
    target
        What is to be written.
    unlisted
        See `ckpttool.model.sources.find_sources`.
    executor
        Reads contents where they decide; by default the caller's own thread.
    care, policy
        How the source is looked at, and what becomes of what is there.
    more
        What is to be written beside the outputs.

    Raises
    ------
    FormatError, StrategyError, PlanError
        Everything that is in the way, in one error.
    """
    executor = executor or InlineExecutor()
    known = [one for one in (strategy, target.strategy) if one is not None]
    strategies = tuple(path for one in known for path in one.files)
    inputs = [*_files(catalog), *strategies]
    damage, notes = check_files(catalog, executor, "crc_num" in target.attrs)
    errors: list[CkptToolError] = [*damage]
    problems: list[str] = []
    if strategy is None or isinstance(catalog, MergedCatalog):
        problems += filter(None, [why_not_full(catalog)])
    plan = None
    try:
        strategy, target = _resolve(catalog, strategy, target)
        catalog = note_asked(set_aside(catalog, strategy), strategy)
        plan, doubts, found = _settled_plan(catalog, strategy, target, unlisted, executor, care)
        notes += found
        problems += doubts
        if more is not None:
            plan = more.complete(plan)
            problems += more.problems(plan)
        plan = replace(plan, strategies=strategies, notes=(*plan.notes, *notes))
        target = plan.target
        problems += _strict_problems(plan.notes, care)
    except CkptToolError as error:
        errors.append(error)
    documents = [] if more is None else more.documents
    whole = None if errors[len(damage) :] else plan
    destination, places, failures = preflight(
        catalog, target, whole, inputs, documents, policy, executor
    )
    errors += failures
    problems += [*places, *_strict_problems(destination.notes, care)]
    if problems:
        errors.append(PlanError(problems))
    if catalog.problems:  # first, since what else is wrong may follow from them
        errors.insert(0, PlanError(catalog.problems))
    if errors and (changed := changed_sources(catalog)):
        errors = [PlanError([*changed, *places])]  # which what else is wrong may come of
    raise_all(errors)
    assert plan is not None, "else there is an error"
    return plan, destination


def _strict_problems(notes: Iterable[Note], care: Care) -> list[str]:
    """Return the warnings as problems if warnings are refused."""
    warnings = [note.text for note in notes if note.is_warning and care.strict]
    return [f"--strict: {text}; mend it, or leave --strict away" for text in warnings]


def _files(catalog: Catalog) -> list[str]:
    """All files of a source that are there, whole or damaged."""
    damaged = (error.path for error in catalog.damaged.values())
    return [*catalog.paths, *(path for path in damaged if os.access(path, os.F_OK))]


def preflight(
    source: Catalog,
    target: Target,
    plan: Plan | None,
    inputs: Sequence[str],
    documents: Sequence[str],
    policy: DestinationPolicy,
    executor: Executor,
) -> tuple[Destination, list[str], list[CkptToolError]]:
    """Look what lies at the destination, and find everything that keeps a run from writing there.

    Parameters
    ----------
    source
        What is read.
    target
        What is to be written.
    plan
        How; None if the source has problems that keep it from being planned.
    inputs
        Every file that is read.
    documents
        Small files that are written with the outputs.
    policy
        What becomes of files that are there, and which outputs this run writes.
    executor
        Reads outputs of an earlier run where their contents decide.

    Returns
    -------
    destination, problems, errors
        What lies there; what is in the way; files that cannot be read.
    """
    problems: list[str] = []
    errors: list[CkptToolError] = []
    found = Destination(tuple(target.paths) if policy.part is None else ())
    if plan is not None:  # else nobody knows which outputs fall to a part
        found = Destination.of(plan, policy)
    target = target.limited_to(found.ranks)
    own_documents = documents if policy.part is None else ()
    if plan is not None and not any(blocked_places(target, inputs, own_documents)):
        notes: list[Note] = []
        try:
            found = inspect_previous_run(plan, found, policy, executor, problems)
            kept = found.replaceable if policy.resume else ()
            problems += content_problems(plan.limited_to(found.ranks), notes, kept)
        except CkptToolError as error:
            errors.append(error)
        if policy.overwrite and (stale := stale_files(target)) is not None:
            text = f"{stale}; it stays, and is taken for a part of this set: move it away"
            notes.append(Note("passed over", text, is_warning=True))
        found = replace(found, notes=(*found.notes, *notes))
    problems += place_problems(
        source, target, inputs, policy.overwrite, documents, found.replaceable
    )
    return found, problems, errors


def _settled_plan(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Target,
    unlisted: Unlisted | None,
    executor: Executor,
    care: Care,
) -> tuple[Plan, list[str], list[Note]]:
    """The plan, what contents say against it, and notes."""
    if strategy is None:
        why = why_no_shard(None, care.trust)
        plan = make_plan(catalog, None, target, {}, unlisted)
        return plan, [] if why is None else [why], []
    notes: list[Note] = []
    agreement = compare_contents(catalog, strategy, executor, notes)
    unequal = (name for name, groups in agreement.items() if len(groups) > 1)
    running = find_running(catalog, strategy, unequal, executor)

    def find(strategy: Strategy) -> Sources:
        return find_sources(catalog, strategy, agreement, unlisted, running)

    sources = find(strategy)
    if sources.problems or sources.damage:  # which contents could follow from
        return plan_from(catalog, strategy, target, sources), [], notes
    settled = settle(find, sources, catalog, strategy, executor, care.trust)
    found = settled.problems
    try:
        plan = plan_from(catalog, settled.strategy, target, settled.sources)
    except CkptToolError as error:
        if found:
            raise CombinedError([error, plan_error(found)]) from error
        raise
    differing = []
    if care.check_replicas:
        known = [transfer.source for transfer in plan.transfers]
        differing = replica_problems(catalog, settled.strategy, known, executor)
    if differing:  # what samples show of it is not told once more
        found = [problem for problem in found if problem.kind != "replica"]
    problems = [problem.text for problem in found]
    if not settled.sources.is_deduplicated:
        notes += (
            Note("replica", f"{one.text}; these are read", one.ranks, is_warning=True)
            for one in find_lacking(catalog, settled.sources.found, [])
        )
    return plan, problems + differing, [*notes, *settled.notes]


def _resolve(
    catalog: Catalog, strategy: Strategy | None, target: Target
) -> tuple[Strategy | None, Target]:
    """Source strategy and target, with the names that the checkpoint has."""
    metas = catalog.metas
    problems: list[str] = []
    if strategy is not None:
        strategy, reasons = strategy.resolve(metas)
        problems += reasons
    found = target.strategy
    if found is not None:
        full = metas
        if found.rules is not None and strategy is not None:
            full = full_metas(catalog, strategy)
        found, reasons = found.resolve(full, target.not_in_target != "follow")
        problems += reasons
    if problems:
        raise_all([*catalog.damaged.values(), PlanError(problems)])
    return strategy, replace(target, strategy=found)
