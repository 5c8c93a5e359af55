"""The plans of merge, split and reshard.

merge and split are reshard: merge reshards to the undivided layout, split from it.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Executor
from dataclasses import replace

from ckpttool.errors import PlanError
from ckpttool.formats.stopping import OpenProgress, no_progress
from ckpttool.model.catalog import Catalog, MergedCatalog, SelfDescribedCatalog, format_ranks
from ckpttool.model.plan import NotInTarget, Plan, Target
from ckpttool.model.strategy import Strategy
from ckpttool.model.unlisted import Unlisted
from ckpttool.run.checked import Care, make_checked_plan
from ckpttool.run.gather import Trust, known_strategy, source_layouts
from ckpttool.run.numbered import Numbered
from ckpttool.run.outputs import choose_format, header_attrs, rank_files
from ckpttool.run.strategies import Told
from ckpttool.transaction.resume import Destination, DestinationPolicy


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
) -> tuple[Plan, Destination]:
    """Plan a merge into one file, or into numbered files with an index; for `execute`.

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
        Every rank holds everything: take that, after comparing all replicas.  A file that looks
        like one rank's of several is a full checkpoint.
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
        Refuse on every warning, as where replicas replace a missing or damaged rank.
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

    Returns
    -------
    plan, destination
        What to write, and what lies there now.

    Raises
    ------
    FormatError, PlanError
        Everything that is in the way, in one error.
    """
    format = choose_format(path, format, is_folder=max_part_bytes is not None)
    strategy = known_strategy(catalog, strategy, replicated)
    catalog = replace(catalog, one_of_several="") if replicated else catalog
    care = Care(Trust(trust_strategy, optimizer_shard), strict, check_replicas)
    policy = DestinationPolicy(overwrite, resume, part, open_progress)
    if max_part_bytes is None:
        target = Target(format, {0: path}, attrs=header_attrs(crc))
        return make_checked_plan(catalog, strategy, target, unlisted, executor, care, policy)
    numbered = Numbered(path, format, max_part_bytes, header_attrs(crc))
    target = numbered.target()
    return make_checked_plan(catalog, strategy, target, unlisted, executor, care, policy, numbered)


def plan_split(
    catalog: Catalog,
    strategy: Strategy,
    folder: str,
    format: str = "hdf5",
    *,
    prefix: str = "checkpoint_",
    ranks: Collection[int] | None = None,
    replicated: bool = False,
    unlisted: Unlisted | None = None,
    strict: bool = False,
    not_in_target: NotInTarget = "follow",
    crc: bool = False,
    overwrite: bool = False,
    executor: Executor | None = None,
    part: tuple[int, int] | None = None,
    resume: bool = False,
    open_progress: OpenProgress = no_progress,
    strategy_path: str | None = None,
) -> tuple[Plan, Destination]:
    """Plan to shard a full checkpoint for the ranks of ``strategy``; for `execute`.

    Parameters
    ----------
    catalog
        The source, from `scan`: one file, several with an index, a folder with the file of one
        rank, with ``replicated`` of several, or a checkpoint that describes itself.
    strategy
        Layouts of the target.
    folder, format, prefix
        Files ``folder/rank_R/{prefix}R`` with the ending of the format are written.
    ranks
        Only these target ranks.
    replicated
        As for `plan_merge`.
    unlisted
        What to do with tensors of which the source may hold one rank's slice only.
    not_in_target
        What to do with parameters that ``strategy`` does not list: see
        `ckpttool.model.plan.Target`.
    strict, crc, executor, part, resume, open_progress
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
    src_strategy = known_strategy(catalog, None, replicated) if replicated else None
    if isinstance(catalog, SelfDescribedCatalog):
        return plan_reshard(
            *(catalog, None, strategy, folder, format),
            prefix=prefix,
            ranks=ranks,
            unlisted=unlisted,
            strict=strict,
            not_in_target=not_in_target,
            crc=crc,
            overwrite=overwrite,
            executor=executor,
            part=part,
            resume=resume,
            open_progress=open_progress,
            strategy_path=strategy_path,
        )
    found = sorted({*catalog.files, *catalog.damaged})
    if not isinstance(catalog, MergedCatalog) and not replicated and len(found) > 1:
        text = f"{catalog.root}: {format_ranks(found)} found; split takes one full checkpoint: use "
        text += "reshard with the strategy of these ranks (-s STRATEGY), or say --replicated if "
        raise PlanError([f"{text}every rank holds everything"])
    catalog = replace(catalog, one_of_several="") if replicated else catalog
    target = rank_files(strategy, folder, format, prefix, ranks, crc, not_in_target)
    care = Care(Trust(), strict, check_replicas=False)  # replicas are compared anyway
    policy = DestinationPolicy(overwrite, resume, part, open_progress)
    told = None if strategy_path is None else Told(strategy_path, part is not None)
    return make_checked_plan(catalog, src_strategy, target, unlisted, executor, care, policy, told)


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
    not_in_target: NotInTarget = "follow",
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
) -> tuple[Plan, Destination]:
    """Plan to shard a checkpoint for the ranks of ``dst_strategy``; for `execute`.

    Parameters
    ----------
    catalog, src_strategy
        The source, from `scan`, and its layouts; None for a checkpoint that describes itself.
    dst_strategy
        Layouts of the target.
    folder, format, prefix, ranks, not_in_target, overwrite, strategy_path
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
    other = (
        "or use split if it holds everything undivided"
        if isinstance(catalog, MergedCatalog)
        else ""
    )
    src_strategy = source_layouts(catalog, src_strategy, other)
    target = rank_files(dst_strategy, folder, format, prefix, ranks, crc, not_in_target)
    care = Care(Trust(trust_strategy, optimizer_shard), strict, check_replicas)
    policy = DestinationPolicy(overwrite, resume, part, open_progress)
    told = None if strategy_path is None else Told(strategy_path, part is not None)
    return make_checked_plan(catalog, src_strategy, target, unlisted, executor, care, policy, told)
