"""The sources of a run: which files they are, and that they stay as they are."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path

from ckpttool._version import __version__
from ckpttool.formats.base import PROVENANCE
from ckpttool.formats.local import is_file, read_file, stat_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.manifest import (
    AveragedInput,
    InputFile,
    LayoutTable,
    LeftOut,
    Provenance,
    Role,
    StrategyFile,
)
from ckpttool.model.plan import Plan, Term
from ckpttool.model.slicing import BoxSlicing, RearrangedSlicing
from ckpttool.model.tensors import FileStamp
from ckpttool.problems import CkptToolError, Diagnostic, PlanError, UnreadableError

# Other options have entries of their own, or show in types and hashes.
_MADE = ("recipe", "lora", "pad_vocab", "cut_vocab", "pad_with")

AGAIN = "the same command, when the source is complete"  # hint


def provenance_of(plan: Plan, command: str) -> Provenance:
    """Return the provenance of a plan, which all its parts have in common but for the command.

    Raises
    ------
    OSError
        A source or strategy file cannot be read.
    """
    roots = [Path(catalog.root).absolute() for catalog in plan.inputs]
    base, folder = os.path.commonpath([root.parent for root in roots]), plan.target.output_folder
    files = []
    for catalog in plan.inputs:
        stamps = catalog.stamps
        files += [(path, stamps[path] or stat_file(path), True) for path in catalog.paths]
        files += ((path, stamp, False) for path, stamp in _unread(catalog).values())
    targets = () if plan.target.strategy is None else plan.target.strategy.files
    strategies = {path: read_file(path) for path in plan.strategies}
    written = plan.written_strategy
    made = {key.removeprefix(PROVENANCE): text for key, text in plan.provenance.items()}
    return Provenance(
        __version__,
        plan_digest(plan),
        plan.checkpoints[-1].step,  # of what is not averaged
        tuple(
            InputFile(os.path.relpath(path, base), stamp.nbytes, stamp, is_read)
            for path, stamp, is_read in files
        ),
        tuple(
            _describe_strategy(os.path.relpath(path, folder), data, "target")
            if path in targets
            else _describe_strategy(Path(path).name, data, "source")
            for path, data in strategies.items()
        ),
        tuple(
            _describe_strategy(os.path.relpath(document.path, folder), document.data)
            for document in plan.documents
            if document.kind == "strategy"
        ),
        "crc_num" in plan.target.attrs,
        command,
        plan.renamed,
        tuple(
            AveragedInput(os.path.relpath(root, base), catalog.step, weight)
            for root, catalog, weight in zip(roots, plan.inputs, plan.weights, strict=True)
        )
        if plan.weights
        else (),
        LeftOut.of(plan.left_out),
        None if written is None else LayoutTable.of(written),
        plan.written_names,
        plan.weight_block,
        {key: made[key] for key in _MADE if key in made},
    )


def _unread(catalog: Catalog) -> Mapping[int, tuple[str, FileStamp]]:
    # Replicas are read in place of these.  A file whose stamp cannot be read either is left out.
    unread = {}
    for number, error in catalog.damaged.items():
        if isinstance(error, UnreadableError):
            with suppress(OSError):  # `error` is of the same kind, and was reported
                if is_file(error.path):
                    unread[number] = error.path, stat_file(error.path)
    return unread


def _names_of_files(catalog: Catalog) -> Iterator[tuple[int | None, list[str]]]:
    paths = {rank: list(file.paths) for rank, file in catalog.files.items()}
    unread = {rank: [path] for rank, (path, _) in _unread(catalog).items()}
    if catalog.description is not None:
        all_paths = chain(*paths.values(), *unread.values())
        yield None, sorted(os.path.relpath(path, catalog.root) for path in all_paths)
        return
    for rank, names in sorted({**paths, **unread}.items()):
        yield rank, [os.path.relpath(name, catalog.root) for name in names]


def plan_digest(plan: Plan) -> str:
    """Return a hash that is equal for equal plans of files with equal names.

    The folders of source and outputs do not count: hosts may mount them in different places.
    Neither does which of several replicas can be read.
    """
    state = hashlib.sha256()
    for line in _decisive_lines(plan):
        state.update(f"{line!r}\n".encode())
    return f"sha256:{state.hexdigest()}"


def _decisive_lines(plan: Plan) -> Iterator[object]:
    """Yield everything that decides what a plan writes."""
    target, folder = plan.target, plan.target.output_folder
    yield target.format, target.ranks, sorted(target.attrs.items())
    for rank, path in target.paths.items():
        yield rank, os.path.relpath(path, folder)
    yield from chain(*map(_names_of_files, plan.inputs))
    for transfer in plan.transfers:
        layouts = tuple(map(_show_layout, transfer.layouts))
        yield transfer.name, transfer.dtype, *map(_decisive_parts, transfer.terms), layouts
    if known := plan.kept.strategy:
        yield [(name, *map(_show_layout, of)) for name, of in known.layouts.items()]
    elif plan.written_names:
        yield sorted(plan.written_names.items())
    for document in plan.documents:
        yield document.kind, os.path.relpath(document.path, folder)
    if any(transfer.is_cast for transfer in plan.transfers):
        yield plan.tensors.on_overflow


def _decisive_parts(term: Term) -> tuple[object, ...]:
    """Return everything that decides what a term reads, but not who holds a slice.

    Records are shown in the words of earlier versions, whose runs go on.
    """
    source, slicing = term.source, term.source.slicing
    if isinstance(slicing, RearrangedSlicing):
        how: object = slicing.key, source.stored_names
    elif isinstance(slicing, BoxSlicing):
        how = slicing.slice_counts
    else:
        how = _show_layout(source.layout)
    rare: list[object] = [source.own_ranks] if source.own_ranks else []
    rare += [term.role] if term.role else []
    meta = source.meta
    shown = f"name={meta.name!r}, dtype={meta.dtype!r}, shape={meta.shape!r}, text={meta.text!r}"
    shown = _Shown(f"TensorMeta({shown}, whole_shape={meta.whole_shape!r})")
    return term.input, term.weight, shown, how, source.parameter, source.only_for, *rare


class _Shown(str):
    """A text that is its own `repr`."""

    __slots__ = ()
    __repr__ = str.__str__


def _show_layout(layout: Layout) -> _Shown:
    return _show(layout, layout.full_shape)


@lru_cache(maxsize=1 << 12)  # a model has few layouts; equal ones may differ in the full shape
def _show(layout: Layout, full_shape: tuple[int, ...] | None) -> _Shown:
    names = (name for name in layout.__struct_fields__ if name != "split_shape")
    return _Shown(f"Layout({', '.join(f'{name}={getattr(layout, name)!r}' for name in names)})")


def changed_sources(*catalogs: Catalog) -> list[Diagnostic]:
    """Return the problem of each file that has changed since its header was read."""
    stamps = chain.from_iterable(catalog.stamps.items() for catalog in catalogs)
    return [_changed(path, how) for path, stamp in stamps if (how := _change(path, stamp))]


def _changed(path: str, how: str) -> Diagnostic:
    return Diagnostic("changed", how, hint=AGAIN, where=path, path=path)


def _change(path: str, stamp: FileStamp | None) -> str:
    try:
        now = stat_file(path)
    except FileNotFoundError:
        return "removed since its header was read"
    if stamp is None or now == stamp:
        return ""
    return f"{'changed' if now.inode == stamp.inode else 'replaced'} since its header was read"


@contextmanager
def require_unmodified_sources(*catalogs: Catalog) -> Iterator[None]:
    """Raise `PlanError` at the end if source files have changed.

    Raises
    ------
    PlanError
        Source files were changed or removed.  It replaces an error of the work, which that change
        may have caused.
    """
    try:
        yield
    except (CkptToolError, OSError) as error:
        changed = changed_sources(*catalogs)
        if not changed and isinstance(error, FileNotFoundError):
            changed = [_changed(str(error.filename), "removed since this command began")]
        if changed:
            raise PlanError(changed) from error
        raise
    if changed := changed_sources(*catalogs):
        raise PlanError(changed)


def _describe_strategy(path: str, data: bytes, role: Role | None = None) -> StrategyFile:
    return StrategyFile(path, len(data), hashlib.sha256(data).hexdigest(), role)
