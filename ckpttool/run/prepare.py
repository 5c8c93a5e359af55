"""Before the first byte is written: plans, and everything that could stand in their way.

merge and split are reshard: merge reshards to the undivided layout, split from it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckpttool.errors import CkptToolError, PlanError, raise_all
from ckpttool.formats import get_format, suffix_of
from ckpttool.model.catalog import Catalog, TensorMeta, format_ranks
from ckpttool.model.dtypes import NOT_LOADED_FROM_SAFETENSORS
from ckpttool.model.notes import Note
from ckpttool.model.plan import Plan, Target, make_plan
from ckpttool.model.sources import Agreement, names_to_compare
from ckpttool.model.strategy import Strategy, count, shorten
from ckpttool.model.unlisted import Unlisted
from ckpttool.run.doubts import find_doubts
from ckpttool.run.engines import InlineExecutor
from ckpttool.run.integrity import check_files
from ckpttool.run.places import place_problems
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
    crc: bool = False,
    overwrite: bool = False,
    executor: Executor | None = None,
) -> Plan:
    """The plan that merges a checkpoint into one file.

    Parameters
    ----------
    catalog
        The source, from `scan`.
    strategy
        Its layouts.  None for a single file that holds everything undivided, for a checkpoint
        that describes itself, and with ``replicated``.
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
    crc
        Verify the checksums of the source, and store one in the output.
    executor
        Reads contents where they decide; by default the caller's own thread.

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
    target = Target(format, {0: path}, attrs=_attrs(crc))
    trust = _Trust(trust_strategy, optimizer_shard)
    return _plan(catalog, strategy, target, unlisted, overwrite, executor, trust)


def plan_split(
    catalog: Catalog,
    strategy: Strategy,
    folder: str,
    format: str = "hdf5",
    *,
    prefix: str = "checkpoint_",
    ranks: Collection[int] | None = None,
    crc: bool = False,
    overwrite: bool = False,
    executor: Executor | None = None,
) -> Plan:
    """The plan that cuts an undivided checkpoint for the ranks of ``strategy``.

    Parameters
    ----------
    catalog
        The source, from `scan`: one file, or a folder with the file of one rank, or a checkpoint
        that describes itself.
    strategy
        Layouts of the target.
    folder, format, prefix
        Files ``folder/rank_R/{prefix}R`` with the ending of the format are written.
    ranks
        Only these target ranks.
    crc, executor
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
            catalog, None, strategy, folder, format, prefix=prefix, ranks=ranks, overwrite=overwrite
        )
    if len(catalog.files) + len(catalog.damaged) > 1:
        raise PlanError(
            [
                (
                    f"{catalog.root}: {format_ranks(sorted({*catalog.files, *catalog.damaged}))} "
                    "found; split takes one undivided checkpoint: name its file, or use reshard "
                    "with the strategy of these ranks (-s STRATEGY)"
                )
            ]
        )
    target = _rank_files(strategy, folder, format, prefix, ranks, crc)
    return _plan(catalog, None, target, None, overwrite, executor)


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
    unlisted, trust_strategy, optimizer_shard, crc, executor
        As for `plan_merge`.

    Raises
    ------
    FormatError, PlanError
        Everything that is in the way, in one error.
    """
    src_strategy = source_layouts(catalog, src_strategy, "or use split for one undivided file")
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
    target = _rank_files(dst_strategy, folder, format, prefix, ranks, crc)
    trust = _Trust(trust_strategy, optimizer_shard)
    return _plan(catalog, src_strategy, target, unlisted, overwrite, executor, trust)


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
        There are none, or a source that describes itself was given some.
    """
    description = catalog.description
    if description is not None and (strategy is not None or replicated):
        given = "--replicated" if strategy is None else f"-s {strategy.origin}"
        reason = f"describes itself ({shorten(description.files, 2)}); leave {given} away"
        raise PlanError([f"{catalog.root}: {reason}"])
    if description is not None:
        return Strategy({}, 1, max(catalog.files, default=0) + 1, description.files)
    if strategy is None:
        raise PlanError(
            [
                (
                    f"{catalog.root}: {count(len(catalog.files), 'rank')} and no strategy: nothing "
                    "says how their tensors fit together; give the strategy file of the training "
                    f"run (-s STRATEGY), {other}"
                )
            ]
        )
    return strategy


def _rank_files(
    strategy: Strategy,
    folder: str,
    format: str,
    prefix: str,
    ranks: Collection[int] | None,
    crc: bool,
) -> Target:
    paths = {
        rank: str(Path(folder, f"rank_{rank}", f"{prefix}{rank}{suffix_of(format)}"))
        for rank in (strategy.ranks if ranks is None else sorted(ranks))
    }
    return Target(format, paths, len(strategy.ranks), strategy, _attrs(crc))


def _attrs(crc: bool) -> dict[str, str]:
    """What the header of every output is to have: a place for a checksum, if wanted."""
    return {"crc_num": ""} if crc else {}


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
) -> Plan:
    executor = executor or InlineExecutor()
    inputs = [path for file in catalog.files.values() for path in file.paths]
    for known in (strategy, target.strategy):
        inputs += [] if known is None else known.files
    damage, notes = check_files(catalog, executor, "crc_num" in target.attrs)
    errors: list[CkptToolError] = [*damage]
    problems = list(place_problems(catalog.root, target, inputs, overwrite))
    try:
        strategy, target = _resolve(catalog, strategy, target)
        agreement: Agreement = {}
        if strategy is not None:
            agreement = _compare(catalog, strategy, executor, notes)
        plan = make_plan(catalog, strategy, target, agreement, unlisted)
        problems += _content_problems(plan, notes)
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
        plan = replace(plan, notes=(*plan.notes, *notes))
    except CkptToolError as error:
        errors.append(error)
    if problems:
        errors.append(PlanError(problems))
    raise_all(errors)
    return plan


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


def _content_problems(plan: Plan, notes: list[Note]) -> Iterator[str]:
    """What the output format cannot hold, and whether the disk can take the rest."""
    format = get_format(plan.target.format)
    refused: dict[str, int] = {}
    dtypes: set[str] = set()
    need: dict[Path, int] = defaultdict(int)
    for output in plan:
        for refusal in format.refusals(output.metas, output.attrs):
            refused.setdefault(refusal, output.rank)
        dtypes |= {meta.dtype for meta in output.metas}
        folder = Path(output.path).absolute()
        while not folder.exists():
            folder = folder.parent
        need[folder if folder.is_dir() else folder.parent] += sum(m.nbytes for m in output.metas)
    yield from refused
    if plan.target.format == "safetensors" and dtypes & NOT_LOADED_FROM_SAFETENSORS:
        words = ", ".join(sorted(dtypes & NOT_LOADED_FROM_SAFETENSORS))
        notes.append(Note("format", f"MindSpore 2.10 does not load {words} from safetensors"))
    if plan.target.format == "safetensors" and plan.target.attrs and "BFloat16" in dtypes:
        text = "MindSpore 2.10 does not verify checksums of safetensors with BFloat16 in them: it "
        notes.append(Note("checksum", f"{text}fails; load these without crc_check"))
    by_device: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in need.items():
        first, total = by_device.get(folder.stat().st_dev, (folder, 0))
        by_device[folder.stat().st_dev] = (first, total + nbytes)
    for folder, nbytes in by_device.values():
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if nbytes > free:
            yield f"{folder}: {nbytes} bytes are to be written, {free} are free on this disk"
