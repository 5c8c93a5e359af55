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
from ckpttool.model.catalog import Catalog, format_ranks
from ckpttool.model.dtypes import NOT_LOADED_FROM_SAFETENSORS
from ckpttool.model.notes import Note
from ckpttool.model.plan import Plan, Target, make_plan
from ckpttool.model.sources import Agreement, names_to_compare
from ckpttool.model.strategy import Strategy, count
from ckpttool.model.unlisted import Unlisted
from ckpttool.run.doubts import find_doubts
from ckpttool.run.engines import InlineExecutor
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
    overwrite: bool = False,
    executor: Executor | None = None,
) -> Plan:
    """The plan that merges a checkpoint into one file.

    Parameters
    ----------
    catalog
        The source, from `scan`.
    strategy
        Its layouts.  None for a single file that holds everything undivided, and with
        ``replicated``.
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
    executor
        Compares contents where they decide; by default the caller's own thread.

    Raises
    ------
    FormatError, PlanError
        Everything that is in the way, in one error.
    """
    if strategy is None and replicated:
        strategy = Strategy({}, 1, len(catalog.files) + len(catalog.damaged))
    if strategy is None and not catalog.is_undivided:
        ways = (
            ", or say --replicated if every rank holds everything (data parallel, or "
            "integrated_save=True), or name one rank's file as SRC"
        )
        raise PlanError([_no_strategy(catalog, ways)])
    target = Target(format, {0: path})
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
    overwrite: bool = False,
) -> Plan:
    """The plan that cuts an undivided checkpoint for the ranks of ``strategy``.

    Parameters
    ----------
    catalog
        The source, from `scan`: one file, or a folder with the file of one rank.
    strategy
        Layouts of the target.
    folder, format, prefix
        Files ``folder/rank_R/{prefix}R`` with the ending of the format are written.
    ranks
        Only these target ranks.
    overwrite
        Whether existing outputs may be replaced; an input never is.

    Raises
    ------
    FormatError, PlanError
        Everything that is in the way, in one error.
    """
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
    target = _rank_files(strategy, folder, format, prefix, ranks)
    return _plan(catalog, None, target, None, overwrite, None)


def _no_strategy(catalog: Catalog, ways: str) -> str:
    """That there has to be one, or something else, and which files may be it."""
    ranks = count(len(catalog.files) + len(catalog.damaged), "rank")
    text = (
        f"{catalog.root}: {ranks} and no strategy: nothing says how their tensors fit together; "
        f"give the strategy file of the training run (-s STRATEGY){ways}"
    )
    return "; ".join([text, *(note.text for note in catalog.notes if note.kind == "strategy")])


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
    overwrite: bool = False,
    executor: Executor | None = None,
) -> Plan:
    """The plan that cuts a checkpoint anew, for the ranks of ``dst_strategy``.

    Parameters
    ----------
    catalog, src_strategy
        The source, from `scan`, and its layouts; without layouts there is an error.
    dst_strategy
        Layouts of the target.
    folder, format, prefix, ranks, overwrite
        As for `plan_split`.
    unlisted, trust_strategy, optimizer_shard, executor
        As for `plan_merge`.

    Raises
    ------
    FormatError, PlanError
        Everything that is in the way, in one error.
    """
    if src_strategy is None:
        ways = ", or use split if it holds everything undivided" if catalog.is_undivided else ""
        raise PlanError([_no_strategy(catalog, ways)])
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
    target = _rank_files(dst_strategy, folder, format, prefix, ranks)
    trust = _Trust(trust_strategy, optimizer_shard)
    return _plan(catalog, src_strategy, target, unlisted, overwrite, executor, trust)


def _rank_files(
    strategy: Strategy, folder: str, format: str, prefix: str, ranks: Collection[int] | None
) -> Target:
    paths = {
        rank: str(Path(folder, f"rank_{rank}", f"{prefix}{rank}{suffix_of(format)}"))
        for rank in (strategy.ranks if ranks is None else sorted(ranks))
    }
    return Target(format, paths, len(strategy.ranks), strategy)


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
    inputs = [file.path for file in catalog.files.values()]
    for known in (strategy, target.strategy):
        inputs += [] if known is None else known.files
    errors: list[CkptToolError] = []
    problems = [*catalog.problems, *place_problems(catalog.root, target, inputs, overwrite)]
    try:
        agreement: Agreement = {}
        if strategy is not None:
            agreement = _compare(catalog, strategy, executor)
        plan = make_plan(catalog, strategy, target, agreement, unlisted)
        notes = list(_unverified(catalog))
        problems += _content_problems(plan, notes)
        if strategy is not None and trust is not None and not trust.blindly:
            doubts, doubtful = find_doubts(plan, executor)
            sources = [transfer.source for transfer in plan.transfers]
            shards = (
                find_shards(strategy, sources, executor, trust.optimizer_shard) if doubts else None
            )
            if shards is not None:
                notes += shards.notes
                doubts = list(shards.problems)
            if shards is not None and not doubts:  # look again, with the strategy corrected
                plan = make_plan(catalog, shards.strategy, target, agreement, unlisted)
                doubts, doubtful = find_doubts(plan, executor)
            problems += doubts
            notes += doubtful
        plan = replace(plan, notes=(*plan.notes, *notes))
    except CkptToolError as error:
        errors.append(error)
    if problems:
        errors.append(PlanError(problems))
    raise_all(errors)
    return plan


def _unverified(catalog: Catalog) -> Iterator[Note]:
    ranks = [rank for rank, file in catalog.files.items() if "crc_num" in file.attrs]
    if ranks:
        text = f"{format_ranks(ranks)}: saved with a checksum (crc_check), which is not verified"
        yield Note("format", text)


def _compare(catalog: Catalog, strategy: Strategy, executor: Executor) -> Agreement:
    """Ranks grouped by equal content, for every parameter of which the contents decide."""
    futures = {}
    for name in names_to_compare(catalog, strategy):
        for rank, file in catalog.files.items():
            if name in file.tensors:
                futures[name, rank] = executor.submit(digest, file.tensors[name], BUFFER_BYTES)
    groups: dict[str, dict[Sample, list[int]]] = defaultdict(dict)
    for (name, rank), future in futures.items():
        groups[name].setdefault(future.result(), []).append(rank)
    return {
        name: tuple(tuple(ranks) for ranks in by_content.values())
        for name, by_content in groups.items()
    }


def _content_problems(plan: Plan, notes: list[Note]) -> Iterator[str]:
    """What the output format cannot hold, and whether the disk can take the rest."""
    format = get_format(plan.target.format)
    refused: dict[str, int] = {}
    unloadable: set[str] = set()
    need: dict[Path, int] = defaultdict(int)
    for output in plan:
        for refusal in format.refusals(output.metas):
            refused.setdefault(refusal, output.rank)
        unloadable |= {meta.dtype for meta in output.metas} & NOT_LOADED_FROM_SAFETENSORS
        folder = Path(output.path).absolute()
        while not folder.exists():
            folder = folder.parent
        need[folder if folder.is_dir() else folder.parent] += sum(m.nbytes for m in output.metas)
    yield from refused
    if plan.target.format == "safetensors" and unloadable:
        words = ", ".join(sorted(unloadable))
        notes.append(Note("format", f"MindSpore 2.10 does not load {words} from safetensors"))
    by_device: dict[int, tuple[Path, int]] = {}
    for folder, nbytes in need.items():
        first, total = by_device.get(folder.stat().st_dev, (folder, 0))
        by_device[folder.stat().st_dev] = (first, total + nbytes)
    for folder, nbytes in by_device.values():
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if nbytes > free:
            yield f"{folder}: {nbytes} bytes are to be written, {free} are free on this disk"
