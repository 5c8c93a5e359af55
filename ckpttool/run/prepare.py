"""Before the first byte is written: plans, and everything that could stand in their way.

merge and split are reshard: merge reshards to the undivided layout, split from it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import Executor
from dataclasses import replace
from typing import NamedTuple

from ckpttool.errors import CkptToolError, CombinedError, PlanError, raise_all
from ckpttool.model.aside import set_aside
from ckpttool.model.catalog import Catalog, format_ranks
from ckpttool.model.findings import plan_error
from ckpttool.model.headers import find_lacking
from ckpttool.model.notes import Note
from ckpttool.model.plan import Plan, Target
from ckpttool.model.planning import make_plan, plan_from
from ckpttool.model.sources import Sources, find_sources
from ckpttool.model.strategy import Strategy
from ckpttool.model.unlisted import Unlisted
from ckpttool.run.batch import take_part
from ckpttool.run.engines import InlineExecutor
from ckpttool.run.gather import (
    Trust,
    compare_contents,
    known_strategy,
    settle,
    source_layouts,
    why_no_shard,
)
from ckpttool.run.integrity import check_files
from ckpttool.run.listed import OpenProgress, no_progress, note_asked
from ckpttool.run.numbered import Numbered
from ckpttool.run.origin import changed_files
from ckpttool.run.outputs import choose_format, content_problems, header_attrs, rank_files
from ckpttool.run.places import blocked_places, place_problems, stale_files
from ckpttool.run.replicas import replica_problems
from ckpttool.run.resume import find_remains, look_at_places
from ckpttool.run.strategies import Told


def plan_merge(
    catalog: Catalog,
    strategy: Strategy | None,
    path: str,
    format: str | None = None,
    *,
    replicated: bool = False,
    unlisted: Unlisted | None = None,
    trust_strategy: bool = False,
    optimizer_shard: int | None = None,
    strict: bool = False,
    check_replicas: bool = False,
    max_part_bytes: int | None = None,
    crc: bool = False,
    overwrite: bool = False,
    executor: Executor | None = None,
    part: tuple[int, int] | None = None,
    resume: bool = False,
    open_progress: OpenProgress = no_progress,
) -> Plan:
    """The plan that merges a checkpoint into one file, or into numbered files with an index.

    Parameters
    ----------
    catalog
        The source, from `scan`.
    strategy
        Its layouts.  None for a source that holds everything undivided, for a checkpoint that
        describes itself, and with ``replicated``.
    path, format
        The file to be written and its format, by default that of its ending, else HDF5.
    replicated
        Every rank holds everything: take that, after comparing all replicas.
    unlisted
        What to do with parameters that are not in the strategy and differ between ranks: see
        `ckpttool.model.sources.find_sources`.
    overwrite
        Whether an existing output may be replaced; an input never is.
    trust_strategy
        Skip the samples that show whether the strategy belongs to these files.
    optimizer_shard
        The optimizer shard of tensors whose contents do not tell it, where the strategy hides it;
        1 for none.  It is a problem if contents show another.
    strict
        Refuse to read slices of a missing or damaged rank from its replicas.
    check_replicas
        Compare all replicas byte for byte, too; any difference is a problem.
    max_part_bytes
        Write a folder ``path`` of numbered files, by default safetensors, with at most so many
        bytes of tensors each, and the index files of MindSpore and of Hugging Face.
    crc
        Verify the checksums of the source, and store one in the output.
    executor
        Reads contents where they decide; by default the caller's own thread.
    part
        ``(k, n)``: of the output files only those that fall to the ``k``-th, from 1 on, of ``n``
        runs of the same plan; see `ckpttool.commit`.
    resume
        Keep what an interrupted run of the same plan has left complete.  What it left may be
        replaced in any case.
    open_progress
        Called with a number of bytes that are to be read to prove what an earlier run left; gives a
        context manager of a function that is called with the bytes read since the last call.

    Raises
    ------
    FormatError, PlanError
        Everything that is in the way, in one error.
    """
    format = choose_format(path, format, is_folder=max_part_bytes is not None)
    strategy = known_strategy(catalog, strategy, replicated)
    care = _Care(Trust(trust_strategy, optimizer_shard), strict, check_replicas)
    way = _Way(overwrite, resume, part, open_progress)
    if max_part_bytes is None:
        target = Target(format, {0: path}, attrs=header_attrs(crc))
        return _plan(catalog, strategy, target, unlisted, executor, care, way)
    numbered = Numbered(path, format, max_part_bytes, header_attrs(crc))
    target = numbered.target()
    return _plan(catalog, strategy, target, unlisted, executor, care, way, numbered)


def plan_split(
    catalog: Catalog,
    strategy: Strategy,
    folder: str,
    format: str = "hdf5",
    *,
    prefix: str = "checkpoint_",
    ranks: Collection[int] | None = None,
    unlisted: Unlisted | None = None,
    crc: bool = False,
    overwrite: bool = False,
    executor: Executor | None = None,
    part: tuple[int, int] | None = None,
    resume: bool = False,
    open_progress: OpenProgress = no_progress,
    strategy_path: str | None = None,
) -> Plan:
    """The plan that cuts an undivided checkpoint for the ranks of ``strategy``.

    Parameters
    ----------
    catalog
        The source, from `scan`: one file, several with an index, a folder with the file of one
        rank, or a checkpoint that describes itself.
    strategy
        Layouts of the target.
    folder, format, prefix
        Files ``folder/rank_R/{prefix}R`` with the ending of the format are written.
    ranks
        Only these target ranks.
    unlisted
        What to do with tensors of which the source may hold one rank's slice only.
    crc, executor, part, resume, open_progress
        As for `plan_merge`.
    overwrite
        Whether existing outputs may be replaced; an input never is.
    strategy_path
        Write the strategy of the outputs, too, as a file of MindSpore's: how they are cut in truth,
        see `ckpttool.model.outcome`.

    Raises
    ------
    FormatError, StrategyError, PlanError
        Everything that is in the way, in one error.
    """
    if catalog.description is not None:
        return plan_reshard(
            *(catalog, None, strategy, folder, format),
            prefix=prefix,
            ranks=ranks,
            unlisted=unlisted,
            crc=crc,
            overwrite=overwrite,
            executor=executor,
            part=part,
            resume=resume,
            open_progress=open_progress,
            strategy_path=strategy_path,
        )
    if not catalog.is_undivided and len(catalog.files) + len(catalog.damaged) > 1:
        paths = [file.path for file in catalog.files.values()]
        of_rank = f" (one rank's, if all hold everything: {paths[0]})" if paths else ""
        raise PlanError(
            [
                (
                    f"{catalog.root}: {format_ranks(sorted({*catalog.files, *catalog.damaged}))} "
                    f"found; split takes one undivided checkpoint: name its file{of_rank}, or use "
                    "reshard with the strategy of these ranks (-s STRATEGY)"
                )
            ]
        )
    target = rank_files(strategy, folder, format, prefix, ranks, crc)
    care = _Care(Trust(), strict=False, check_replicas=False)  # one file has no replicas
    way = _Way(overwrite, resume, part, open_progress)
    told = None if strategy_path is None else Told(strategy_path, part is not None)
    return _plan(catalog, None, target, unlisted, executor, care, way, told)


def plan_reshard(
    catalog: Catalog,
    src_strategy: Strategy | None,
    dst_strategy: Strategy,
    folder: str,
    format: str = "hdf5",
    *,
    prefix: str = "checkpoint_",
    ranks: Collection[int] | None = None,
    unlisted: Unlisted | None = None,
    trust_strategy: bool = False,
    optimizer_shard: int | None = None,
    strict: bool = False,
    check_replicas: bool = False,
    crc: bool = False,
    overwrite: bool = False,
    executor: Executor | None = None,
    part: tuple[int, int] | None = None,
    resume: bool = False,
    open_progress: OpenProgress = no_progress,
    strategy_path: str | None = None,
) -> Plan:
    """The plan that cuts a checkpoint anew, for the ranks of ``dst_strategy``.

    Parameters
    ----------
    catalog, src_strategy
        The source, from `scan`, and its layouts; None for a checkpoint that describes itself.
    dst_strategy
        Layouts of the target.
    folder, format, prefix, ranks, overwrite, strategy_path
        As for `plan_split`.
    unlisted, trust_strategy, optimizer_shard, strict, check_replicas
        As for `plan_merge`.
    crc, executor, part, resume, open_progress
        As for `plan_merge`.

    Raises
    ------
    FormatError, StrategyError, PlanError
        Everything that is in the way, in one error.
    """
    other = "or use split if it holds everything undivided" if catalog.is_undivided else ""
    src_strategy = source_layouts(catalog, src_strategy, other)
    target = rank_files(dst_strategy, folder, format, prefix, ranks, crc)
    care = _Care(Trust(trust_strategy, optimizer_shard), strict, check_replicas)
    way = _Way(overwrite, resume, part, open_progress)
    told = None if strategy_path is None else Told(strategy_path, part is not None)
    return _plan(catalog, src_strategy, target, unlisted, executor, care, way, told)


class _Care(NamedTuple):
    """How a source is looked at before it is copied."""

    trust: Trust
    strict: bool
    check_replicas: bool


class _Way(NamedTuple):
    """What becomes of what is there, and which outputs are written."""

    overwrite: bool
    resume: bool
    part: tuple[int, int] | None
    open_progress: OpenProgress


def _plan(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Target,
    unlisted: Unlisted | None,
    executor: Executor | None,
    care: _Care,
    way: _Way,
    more: Numbered | Told | None = None,
) -> Plan:
    executor = executor or InlineExecutor()
    inputs = [*catalog.indexes, *(path for file in catalog.files.values() for path in file.paths)]
    inputs += [error.path for error in catalog.damaged.values() if os.access(error.path, os.F_OK)]
    strategies = [
        path for known in (strategy, target.strategy) if known is not None for path in known.files
    ]
    inputs += strategies
    damage, notes = check_files(catalog, executor, "crc_num" in target.attrs)
    errors: list[CkptToolError] = [*damage]
    problems: list[str] = []
    ours: frozenset[str] = frozenset()
    try:
        strategy, target = _resolve(catalog, strategy, target)
        catalog = note_asked(set_aside(catalog, strategy), strategy)
        plan, doubts, found = _settled_plan(catalog, strategy, target, unlisted, executor, care)
        notes += found
        problems += doubts
        if more is not None:
            plan = more.complete(plan)
            problems += more.problems(plan)
        if way.part is not None:
            plan = take_part(plan, *way.part)
        target = plan.target
        plan = replace(plan, strategies=tuple(strategies), is_resumed=way.resume)
        if not any(blocked_places(target, inputs, [one.path for one in plan.documents])):
            seen = None if way.overwrite else look_at_places(plan)
            ours, proven = find_remains(
                plan, executor, problems, notes, way.overwrite, way.open_progress
            )
            plan = replace(plan, proven=proven, seen=seen)
            problems += content_problems(plan, notes, ours if way.resume else ())
            if way.overwrite and (stale := stale_files(target)) is not None:
                text = f"{stale}; it stays, and is taken for a part of this set: move it away"
                notes.append(Note("passed over", text, is_warning=True))
        plan = replace(plan, notes=(*plan.notes, *notes))
    except CkptToolError as error:
        errors.append(error)
        if way.part is not None:  # nobody knows which outputs are its own
            target = replace(target, paths={})
    documents = [] if more is None else more.documents
    places = list(place_problems(catalog, target, inputs, way.overwrite, documents, ours))
    problems += places
    if problems:
        errors.append(PlanError(problems))
    if catalog.problems:  # first, since what else is wrong may follow from them
        errors.insert(0, PlanError(catalog.problems))
    if errors and (changed := changed_files(catalog)):
        errors = [PlanError([*changed, *places])]  # which what else is wrong may come of
    raise_all(errors)
    return plan


def _settled_plan(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Target,
    unlisted: Unlisted | None,
    executor: Executor,
    care: _Care,
) -> tuple[Plan, list[str], list[Note]]:
    """The plan, what contents say against it, and notes."""
    if strategy is None:
        why = why_no_shard(None, care.trust)
        plan = make_plan(catalog, None, target, {}, unlisted)
        return plan, [] if why is None else [why], []
    notes: list[Note] = []
    agreement = compare_contents(catalog, strategy, executor, notes)

    def find(strategy: Strategy) -> Sources:
        return find_sources(catalog, strategy, agreement, unlisted)

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
    if care.strict:
        told = (one for one in (*plan.notes, *notes) if one.is_warning and one.kind == "replica")
        remedy = "put back what is lost, or leave --strict away to read the replicas"
        problems += [f"--strict: {note.text}; {remedy}" for note in told]
    return plan, problems + differing, [*notes, *settled.notes]


def _resolve(
    catalog: Catalog, strategy: Strategy | None, target: Target
) -> tuple[Strategy | None, Target]:
    """Source strategy and target, with the names that the checkpoint has."""
    metas = catalog.metas
    resolved: list[Strategy | None] = []
    problems: list[str] = []
    for known in (strategy, target.strategy):
        one, reasons = (None, ()) if known is None else known.resolve(metas)
        resolved.append(one)
        problems += reasons
    if problems:
        raise_all([*catalog.damaged.values(), PlanError(problems)])
    return resolved[0], replace(target, strategy=resolved[1])
