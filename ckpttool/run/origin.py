"""What a run is: the files that it reads and what it does with them, to know it again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckpttool import __version__
from ckpttool.errors import CkptToolError, PlanError
from ckpttool.formats.reading import as_stamp, read_file
from ckpttool.model.catalog import Catalog, SourceStamp, format_ranks
from ckpttool.model.manifest import InputFile, Origin, StrategyFile
from ckpttool.model.plan import Plan
from ckpttool.model.strategy import count
from ckpttool.run.places import manifest_path, output_folder


def origin_of(plan: Plan) -> Origin:
    """The origin of all that is written by a plan, and of a part by the whole of it.

    Raises
    ------
    OSError
        A source or strategy file is gone.
    """
    base, folder = Path(plan.catalog.root).absolute().parent, manifest_of(plan).parent
    return Origin(
        __version__,
        plan_digest(plan) if plan.part is None else plan.part.digest,
        plan.catalog.step,
        tuple(
            InputFile(os.path.relpath(path, base), *(stamp or _look_at(path))[:3])
            for path, stamp in _inputs(plan.catalog).items()
        ),
        tuple(read_strategy_file(path) for path in dict.fromkeys(plan.strategies)),
        tuple(
            _describe_strategy(os.path.relpath(one.path, folder), one.data)
            for one in (plan.documents if plan.part is None else plan.part.documents)
            if one.kind == "strategy"
        ),
        options_of(plan) if plan.part is None else plan.part.options,
    )


def plan_digest(plan: Plan) -> str:
    """Equal for plans that do the same with files of the same names.

    Where source and output folder are is left out: hosts may have mounted them elsewhere.
    """
    catalog, target = plan.catalog, plan.target
    folder = output_folder(target)
    state = hashlib.sha256()
    for line in (
        (target.format, target.ranks, sorted(target.attrs.items())),
        *((rank, os.path.relpath(path, folder)) for rank, path in target.paths.items()),
        *(
            (r, [os.path.relpath(p, catalog.root) for p in f.paths])
            for r, f in catalog.files.items()
        ),
        *(
            (
                source.meta,
                source.slicing.distribution_key,
                source.parameter,
                source.rank_cycle,
                transfer.layouts,
            )
            for transfer in plan.transfers
            for source in [transfer.source]
        ),
        *((one.kind, os.path.relpath(one.path, folder)) for one in plan.documents),
    ):
        state.update(f"{line!r}\n".encode())
    return f"sha256:{state.hexdigest()}"


def options_of(plan: Plan) -> tuple[tuple[str, str], ...]:
    """What was asked for, of what the digest tells only that it is another; see `Origin`."""
    target, folder = plan.target, output_folder(plan.target)
    outputs = [(rank, os.path.relpath(path, folder)) for rank, path in target.paths.items()]
    told = [os.path.relpath(one.path, folder) for one in plan.documents if one.kind == "strategy"]
    options = dict(options_told(target.format, outputs))
    options["crc"] = "--crc" if "crc_num" in target.attrs else "no --crc"
    options["told"] = f"--write-strategy {told[0]}" if told else "no --write-strategy"
    if target.strategy is not None:
        choice = target.not_in_target
        is_asked = choice != "follow"
        options["not listed"] = f"--not-in-target {choice}" if is_asked else "no --not-in-target"
    return tuple(options.items())


def options_told(format: str, outputs: Sequence[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    """The same, as far as the paths of outputs tell, counted from their folder."""
    yield "format", f"--format {format}"
    rank, path = outputs[0]
    if Path(path).parent.name == f"rank_{rank}":
        yield "ranks", format_ranks([rank for rank, _ in outputs])
        yield "prefix", f"--prefix {Path(path).stem.removesuffix(str(rank))}"
    else:
        yield "files", count(len(outputs), "file")


def manifest_of(plan: Plan) -> Path:
    """Where the manifest of a plan is, or of the plan that it is a part of."""
    return Path(manifest_path(plan.target) if plan.part is None else plan.part.manifest)


def changed_inputs(plan: Plan) -> Iterator[str]:
    """What has become of each source file that is not as it was when its header was read."""
    yield from _changes(_inputs(plan.catalog))


def _changes(files: Mapping[str, SourceStamp | None]) -> Iterator[str]:
    for path, stamp in files.items():
        try:
            now = _look_at(path)
        except FileNotFoundError:
            yield f"{path}: is gone"
            continue
        if stamp is not None and now != stamp:
            what = "was written to after its header was read"
            if now.inode != stamp.inode:
                what = "is another file than when its header was read"
            yield f"{path}: {what}"


@contextmanager
def unchanged(*catalogs: Catalog) -> Iterator[None]:
    """Refuse what is found in files that are not the same at the end.

    Raises
    ------
    PlanError
        Files were written to or are gone; what failed meanwhile may come of that.
    """
    try:
        yield
    except (CkptToolError, OSError) as error:
        raise_changed(*catalogs, cause=error)
        if isinstance(error, FileNotFoundError):
            raise PlanError([f"{error.filename}: is gone since this began; run again"]) from error
        raise
    raise_changed(*catalogs)


def changed_files(*catalogs: Catalog) -> list[str]:
    """Messages for files that are not as they were when their headers were read."""
    known = {path: stamp for one in catalogs for path, stamp in _inputs(one).items() if stamp}
    return [f"{text}; run again" for text in _changes(known)]


def raise_changed(*catalogs: Catalog, cause: Exception | None = None) -> None:
    """Raise `PlanError` if files are not as they were when their headers were read."""
    changed = changed_files(*catalogs)
    if changed:
        raise PlanError(changed) from cause


def _inputs(catalog: Catalog) -> dict[str, SourceStamp | None]:
    """All files of a catalog, as they were when their headers were read."""
    files = catalog.files.values()
    known = {path: stamp for file in files for path, stamp in file.stamps.items()}
    return {path: known.get(path) for path in catalog.paths}


def _look_at(path: str) -> SourceStamp:
    return as_stamp(Path(path).stat())


def read_strategy_file(path: str) -> StrategyFile:
    """A strategy file as a manifest names it.

    Raises
    ------
    OSError
        It is gone.
    """
    return _describe_strategy(Path(path).name, read_file(path))


def _describe_strategy(path: str, data: bytes) -> StrategyFile:
    return StrategyFile(path, len(data), hashlib.sha256(data).hexdigest())
