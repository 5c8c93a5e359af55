"""Before the first byte is written: plans, and everything that could stand in their way.

merge and split are reshard: merge reshards to the undivided layout, split from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckpttool.errors import CkptToolError, PlanError, raise_all
from ckpttool.model.catalog import Catalog, TensorMeta, format_ranks
from ckpttool.model.notes import Note
from ckpttool.model.plan import Plan, Target, make_plan
from ckpttool.model.sources import Agreement, names_to_compare
from ckpttool.model.strategy import Strategy, count, shorten
from ckpttool.model.unlisted import Unlisted
from ckpttool.run.batch import take_part
from ckpttool.run.doubts import find_doubts
from ckpttool.run.engines import InlineExecutor
from ckpttool.run.integrity import check_files
from ckpttool.run.manifest import NAME
from ckpttool.run.numbered import Numbered
from ckpttool.run.outputs import content_problems, header_attrs, rank_files
from ckpttool.run.places import output_folder, place_problems
from ckpttool.run.shards import find_shards
from ckpttool.storage.digest import Sample, digest

BUFFER_BYTES = 4 << 20  # held by each worker while contents are compared


def plan_merge(
    catalog: Catalog,
    strategy: Strategy | None,
    path: str,
    format: str = "hdf5",
    *,
    replicated: bool = False,
    unlisted: Unlisted | None = None,
    trust_strategy: bool = False,
    optimizer_shard: int | None = None,
    max_part_bytes: int | None = None,
    crc: bool = False,
    overwrite: bool = False,
    executor: Executor | None = None,
    part: tuple[int, int] | None = None,
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
        The file to be written and its format.
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
        The optimizer shard of tensors whose contents do not tell it, where the strategy hides it.
    max_part_bytes
        Write a folder ``path`` of numbered files with at most so many bytes of tensors each, and
        the index files of MindSpore and of Hugging Face.
    crc
        Verify the checksums of the source, and store one in the output.
    executor
        Reads contents where they decide; by default the caller's own thread.
    part
        ``(k, n)``: of the output files only those that fall to the ``k``-th, from 1 on, of ``n``
        runs of the same plan; see `ckpttool.commit`.

    Raises
    ------
    FormatError, PlanError
        Everything that is in the way, in one error.
    """
    if replicated and catalog.description is None:
        strategy = strategy or Strategy({}, 1, len(catalog.files) + len(catalog.damaged))
    if not catalog.is_undivided or strategy is not None:
        other = "or say --replicated if every rank holds everything (data parallel, or "
        other += "integrated_save=True), or name one rank's file as SRC"
        strategy = source_layouts(catalog, strategy, other, replicated)
    trust = _Trust(trust_strategy, optimizer_shard)
    if max_part_bytes is None:
        target = Target(format, {0: path}, attrs=header_attrs(crc))
        return _plan(catalog, strategy, target, unlisted, overwrite, executor, trust, part=part)
    numbered = Numbered(path, format, max_part_bytes, header_attrs(crc))
    target = numbered.target()
    return _plan(catalog, strategy, target, unlisted, overwrite, executor, trust, numbered, part)


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
    crc, executor, part
        As for `plan_merge`.
    overwrite
        Whether existing outputs may be replaced; an input never is.

    Raises
    ------
    FormatError, PlanError
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
        )
    if not catalog.is_undivided and len(catalog.files) + len(catalog.damaged) > 1:
        raise PlanError(
            [
                (
                    f"{catalog.root}: {format_ranks(sorted({*catalog.files, *catalog.damaged}))} "
                    "found; split takes one undivided checkpoint: name its file, or use reshard "
                    "with the strategy of these ranks (-s STRATEGY)"
                )
            ]
        )
    target = rank_files(strategy, folder, format, prefix, ranks, crc)
    return _plan(catalog, None, target, unlisted, overwrite, executor, part=part)


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
    crc: bool = False,
    overwrite: bool = False,
    executor: Executor | None = None,
    part: tuple[int, int] | None = None,
) -> Plan:
    """The plan that cuts a checkpoint anew, for the ranks of ``dst_strategy``.

    Parameters
    ----------
    catalog, src_strategy
        The source, from `scan`, and its layouts; None for a checkpoint that describes itself.
    dst_strategy
        Layouts of the target.
    folder, format, prefix, ranks, overwrite
        As for `plan_split`.
    unlisted, trust_strategy, optimizer_shard, crc, executor, part
        As for `plan_merge`.

    Raises
    ------
    FormatError, PlanError
        Everything that is in the way, in one error.
    """
    other = "or use split if it holds everything undivided" if catalog.is_undivided else ""
    src_strategy = source_layouts(catalog, src_strategy, other)
    if catalog.is_undivided and len(src_strategy.ranks) > 1:
        raise PlanError(
            [
                (
                    f"{catalog.root}: one file, and {src_strategy.origin} is for "
                    f"{len(src_strategy.ranks)} ranks; if it holds everything undivided, use "
                    "split; else name the folder with the files of all ranks"
                )
            ]
        )
    target = rank_files(dst_strategy, folder, format, prefix, ranks, crc)
    trust = _Trust(trust_strategy, optimizer_shard)
    return _plan(catalog, src_strategy, target, unlisted, overwrite, executor, trust, part=part)


def source_layouts(
    catalog: Catalog, strategy: Strategy | None, other: str = "", replicated: bool = False
) -> Strategy:
    """The layouts of the source: those that are given, none for one that describes itself.

    Parameters
    ----------
    catalog, strategy
        The source, and what was given for its layouts.
    other
        What else can be done where there are none, for the message.
    replicated
        Whether it was said that every rank holds everything.

    Raises
    ------
    PlanError
        There are none, or a source that needs none was given some.
    """
    description = catalog.description
    if description is not None and (strategy is not None or replicated):
        given = "--replicated" if strategy is None else f"-s {strategy.origin}"
        reason = f"describes itself ({shorten(description.files, 2)}); leave {given} away"
        raise PlanError([f"{catalog.root}: {reason}"])
    if catalog.indexes:
        reason = f"holds everything undivided, as {catalog.indexes[0]} says, so it is merged "
        reason += "without a source strategy (-s, --replicated), and cut with split"
        raise PlanError([f"{catalog.root}: {reason}"])
    if description is not None:
        return Strategy({}, 1, max(catalog.files, default=0) + 1, description.files)
    if strategy is None:
        ranks = count(len(catalog.files) + len(catalog.damaged), "rank")
        text = f"{catalog.root}: {ranks} and no strategy: nothing says how their tensors fit "
        text += "together; give the strategy file of the training run (-s STRATEGY)"
        seen = [note.text for note in catalog.notes if note.kind == "strategy"]
        raise PlanError(["; ".join([f"{text}, {other}" if other else text, *seen])])
    return strategy


class _Trust(NamedTuple):
    """How far the source strategy is believed where the contents contradict it."""

    blindly: bool
    optimizer_shard: int | None


def _plan(
    catalog: Catalog,
    strategy: Strategy | None,
    target: Target,
    unlisted: Unlisted | None,
    overwrite: bool,
    executor: Executor | None,
    trust: _Trust | None = None,
    numbered: Numbered | None = None,
    part: tuple[int, int] | None = None,
) -> Plan:
    executor = executor or InlineExecutor()
    inputs = [*catalog.indexes, *(path for file in catalog.files.values() for path in file.paths)]
    for known in (strategy, target.strategy):
        inputs += [] if known is None else known.files
    damage, notes = check_files(catalog, executor, "crc_num" in target.attrs)
    errors: list[CkptToolError] = [*damage]
    problems = list(catalog.problems)
    try:
        strategy, target = _resolve(catalog, strategy, target)
        agreement: Agreement = {}
        if strategy is not None:
            agreement = _compare(catalog, strategy, executor, notes)
        plan = make_plan(catalog, strategy, target, agreement, unlisted)
        if strategy is not None and trust is not None and not trust.blindly:
            doubts, doubtful = find_doubts(plan, executor, strategy.by_hand)
            sources = [transfer.source for transfer in plan.transfers]
            shards = (
                find_shards(strategy, sources, executor, trust.optimizer_shard)
                if doubts and strategy.layouts
                else None
            )
            if shards is not None:
                notes += shards.notes
                doubts = list(shards.problems)
            if shards is not None and not doubts:  # look again, with the strategy corrected
                plan = make_plan(catalog, shards.strategy, target, agreement, unlisted)
                doubts, doubtful = find_doubts(plan, executor, strategy.by_hand)
            problems += doubts
            notes += doubtful
        if numbered is not None:
            plan = numbered.spread(plan)
            problems += numbered.stale_problems(plan.target)
        if part is not None:
            plan = take_part(plan, *part)
        target = plan.target
        problems += content_problems(plan, notes)
        plan = replace(plan, notes=(*plan.notes, *notes))
    except CkptToolError as error:
        errors.append(error)
        if part is not None:  # nobody knows which outputs are its own
            target = replace(target, paths={})
    documents = [] if numbered is None else numbered.documents
    if part is not None and target.paths:
        documents.append(str(Path(output_folder(target), NAME)))
    problems = [*place_problems(catalog.root, target, inputs, overwrite, documents), *problems]
    if problems:
        errors.append(PlanError(problems))
    raise_all(errors)
    return plan


def _resolve(
    catalog: Catalog, strategy: Strategy | None, target: Target
) -> tuple[Strategy | None, Target]:
    """Source strategy and target, with the names that the checkpoint has."""
    errors: list[CkptToolError] = []
    resolved: list[Strategy | None] = []
    for known in (strategy, target.strategy):
        try:
            resolved.append(known.resolve(catalog.metas) if known is not None else None)
        except CkptToolError as error:
            errors.append(error)
    if errors:
        errors = [*catalog.damaged.values(), *errors]
    raise_all(errors)
    return resolved[0], replace(target, strategy=resolved[1])


def _compare(
    catalog: Catalog, strategy: Strategy, executor: Executor, notes: list[Note]
) -> Agreement:
    """Ranks grouped by equal content, for every parameter of which the contents decide.

    A note is added on those of which contents tell nothing: one rank's slice may look like all.
    """
    futures = {}
    for name in names_to_compare(catalog, strategy):
        for rank, file in catalog.files.items():
            if name in file.tensors:
                futures[name, rank] = executor.submit(digest, file.tensors[name], BUFFER_BYTES)
    groups: dict[str, dict[Sample, list[int]]] = defaultdict(dict)
    for (name, rank), future in futures.items():
        groups[name].setdefault(future.result(), []).append(rank)
    metas = catalog.metas
    mute = [name for name, found in groups.items() if _is_mute(metas[name], found)]
    if mute and strategy.layouts:
        text = "not in the strategy, and all elements of all ranks are the same; taken for whole, "
        text += f"if they are slices say so in a strategy by hand (-s MORE.yaml): {shorten(mute)}"
        notes.append(Note("doubt", text))
    return {
        name: tuple(tuple(ranks) for ranks in by_content.values())
        for name, by_content in groups.items()
    }


def _is_mute(meta: TensorMeta, contents: Collection[Sample]) -> bool:
    is_constant = len(contents) == 1 and next(iter(contents)).is_constant
    return is_constant and meta.nbytes > meta.itemsize
