"""Resolve a source and run the checks of a command on it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial

from ckpttool.checkpoint import resolve as steps
from ckpttool.checkpoint.checkpoint import Checkpoint, NeededSlices, ResolveOptions
from ckpttool.checkpoint.interpret import Files
from ckpttool.checks import is_refused, run_checks
from ckpttool.concurrency import InlineExecutor, OpenProgress, no_progress
from ckpttool.model.catalog import Catalog
from ckpttool.model.strategy import Strategy
from ckpttool.problems import CkptToolError, Diagnostics


def resolve(
    catalog: Catalog,
    strategy: Strategy | None = None,
    options: ResolveOptions = ResolveOptions(),
    executor: Executor | None = None,
    diagnostics: Diagnostics | None = None,
    *,
    files: Files = "joined",
    open_progress: OpenProgress = no_progress,
    find_needed: Callable[[Checkpoint], NeededSlices] | None = None,
) -> Checkpoint:
    """Resolve a checkpoint to full tensors: shapes, layouts and owners of every parameter.

    Parameters
    ----------
    catalog
        The files on disk, from `scan`.
    strategy
        The layouts; None for a checkpoint that holds full tensors or describes itself, and for
        replicated ranks.
    options
        Choices where the strategy does not decide.
    executor
        Reads contents; by default the caller's own thread.
    diagnostics
        Collects problems and notes; without it all problems are raised as one error.
    files
        ``"full"``: read each file by itself, as one of full tensors.  ``"kept"``: read each by
        itself, whatever its tensors are slices of, since they stay in files of their own.
    open_progress
        Shows the phases that read contents.
    find_needed
        Returns the slices that are needed, if these are not all; other slices may be missing.

    Raises
    ------
    FormatError, PlanError
        The checkpoint needs a strategy and has none, or needs none and has one.

    Examples
    --------
    See "Python" in the guides (docs/guides/from-python.md).
    """
    found = Diagnostics(strict=options.strict) if diagnostics is None else diagnostics
    executor = executor or InlineExecutor()
    with open_progress(0, "sampling"):
        checkpoint = steps.resolve(
            catalog,
            strategy,
            options,
            executor,
            is_refused=partial(is_refused, command=found.command),
            files=files,
            purpose=steps.Purpose(found.strategy_option, find_needed),
        )
    failures: list[CkptToolError] = [*catalog.damaged.values()]
    if not checkpoint.misfits:
        failures = [one for one in [checkpoint.unread] if one is not None]
        failures += map(checkpoint.with_remedy, checkpoint.damage)
    found.failures += failures
    checkpoint = _compare_replicas(checkpoint, executor, found, open_progress)
    found.add(*run_checks(checkpoint, found.command))
    if diagnostics is None:
        found.raise_if_errors()
    return checkpoint


def _compare_replicas(
    checkpoint: Checkpoint, executor: Executor, found: Diagnostics, open_progress: OpenProgress
) -> Checkpoint:
    """Return the checkpoint with all replicas compared, if the user wants that."""
    is_read = checkpoint.are_joined and not checkpoint.is_refused and checkpoint.unread is None
    if not checkpoint.options.check_replicas or not is_read:
        return checkpoint
    from ckpttool.checks.replicas import replica_problems

    nbytes = sum(file.nbytes for file in checkpoint.catalog.files.values())
    try:
        with open_progress(nbytes, "comparing replicas") as on_progress:
            differing = replica_problems(checkpoint.tensors, executor, on_progress)
            return checkpoint.knowing(read={"contents": differing})
    except CkptToolError as error:
        found.failures.append(error)
        return checkpoint
