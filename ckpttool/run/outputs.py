"""Outputs: names, headers, and what stands in the way: their format, and room on the disk."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

from ckpttool.errors import PlanError
from ckpttool.formats import format_of_suffix, get_format, suffix_of
from ckpttool.formats.reading import is_there, why_not_a_path
from ckpttool.model.dtypes import NOT_LOADED_FROM_SAFETENSORS
from ckpttool.model.notes import Note
from ckpttool.model.plan import NotInTarget, Plan, Target
from ckpttool.model.strategy import Strategy
from ckpttool.run.partial import PARTIAL


def choose_format(path: str, format: str | None, is_folder: bool = False) -> str:
    """The format of an output file: as asked for, else by its ending, else HDF5.

    Parameters
    ----------
    path, format
        The file, and the format that was asked for, if any.
    is_folder
        Whether ``path`` is a folder of numbered files: safetensors if nothing is asked for.

    Raises
    ------
    PlanError
        The ending promises another format, or one that nobody knows.
    """
    _refuse_url(path)
    by_name = format_of_suffix(path)
    if is_folder:
        if by_name is not None:
            reason = "ends like a file; --max-shard-size writes a folder, name that"
            raise PlanError([f"{path} {reason} ({path.removesuffix(Path(path).suffix)})"])
        return format or "safetensors"
    if format is not None and by_name not in (None, format):
        reason = f"ends like {by_name}, but --format says {format}; leave --format away, or name"
        raise PlanError([f"{path} {reason} {Path(path).with_suffix(suffix_of(format))}"])
    if format is None and by_name is None and re.search(r"\.[A-Za-z]\w*$", Path(path).name):
        reason = "no format has this ending; name a file that ends in .h5, .ckpt or .safetensors, "
        raise PlanError([f"{path}: {reason}or give --format"])
    return format or by_name or "hdf5"


def rank_files(
    strategy: Strategy,
    folder: str,
    format: str,
    prefix: str,
    ranks: Collection[int] | None,
    crc: bool,
    not_in_target: NotInTarget = "follow",
) -> Target:
    """The target that writes a file for each rank, or each of ``ranks``, of a strategy.

    Raises
    ------
    PlanError
        The folder is no path.
    """
    _refuse_url(folder)
    paths = {
        rank: str(Path(folder, f"rank_{rank}", f"{prefix}{rank}{suffix_of(format)}"))
        for rank in (strategy.ranks if ranks is None else sorted(ranks))
    }
    return Target(
        *(format, paths, len(strategy.ranks), strategy, header_attrs(crc)),
        not_in_target=not_in_target,
    )


def _refuse_url(path: str) -> None:
    url = why_not_a_path(path)
    if url is not None:
        raise PlanError([f"{path}: {url}"])


def header_attrs(crc: bool) -> dict[str, str]:
    """What the header of every output is to have: a place for a checksum, if wanted."""
    return {"crc_num": ""} if crc else {}


def content_problems(plan: Plan, notes: list[Note], kept: Collection[str] = ()) -> Iterator[str]:
    """What the output format cannot hold, and whether the disk can take all that is not kept."""
    format = get_format(plan.target.format)
    refused: dict[str, None] = {}
    dtypes: set[str] = set()
    need: dict[Path, int] = defaultdict(int)
    sizes: dict[int, int] = {}
    replaced = 0
    for ranks, metas in plan.headers.items():
        refusals = list(format.refusals(metas, plan.target.attrs))
        refused |= dict.fromkeys(refusals)
        dtypes |= {meta.dtype for meta in metas}
        nbytes = 0 if refusals else format.file_bytes(metas, plan.target.attrs)
        sizes |= dict.fromkeys(ranks, nbytes)
    for rank, path in plan.target.paths.items():
        folder = Path(path).absolute()
        while not folder.exists():
            folder = folder.parent
        if str(Path(path)) not in kept:
            replaced += is_there(path)
            need[folder if folder.is_dir() else folder.parent] += sizes[rank] - _left_over(path)
    yield from refused
    if plan.target.format == "safetensors" and dtypes & NOT_LOADED_FROM_SAFETENSORS:
        words = ", ".join(sorted(dtypes & NOT_LOADED_FROM_SAFETENSORS))
        notes.append(Note("format", f"MindSpore 2.10 does not load {words} from safetensors"))
    has_sum = "crc_num" in plan.target.attrs
    if plan.target.format == "safetensors" and has_sum and "BFloat16" in dtypes:
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
            also = ", and what is replaced stays until then" if replaced else ""
            text = f"{nbytes:,} bytes are to be written, {free:,} are free on this disk"
            yield f"{folder}: {text}{also}"


def _left_over(path: str) -> int:
    """Bytes of the disk that are free again when the temporary file of a killed run goes."""
    try:
        return Path(path + PARTIAL).lstat().st_blocks * 512
    except OSError:
        return 0
