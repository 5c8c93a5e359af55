"""The files whose bytes a virtual HDF5 file shows; see `ckpttool.execution.virtual`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from msgspec.structs import replace

from ckpttool.formats.base import PROVENANCE
from ckpttool.formats.local import identify_file
from ckpttool.formats.sandbox import Sandbox, read_virtual_hdf5
from ckpttool.formats.strict_json import parse_as
from ckpttool.model.catalog import Catalog
from ckpttool.model.region import Region
from ckpttool.model.shown_extents import as_recorded
from ckpttool.model.slicing import (
    Box,
    BoxSlicing,
    Description,
    FullTensor,
    Listed,
    fill_with_boxes,
)
from ckpttool.model.tensors import FileIndex, StoredFile, StoredTensor
from ckpttool.problems import Diagnostic, FormatError, PlanError
from ckpttool.storage.files import stamp_at
from ckpttool.wording import shorten


def scan_virtual(path: str) -> Catalog:
    """Return the catalog of the files that a virtual file shows.

    Raises
    ------
    FormatError
        It is damaged.
    PlanError
        Files that it shows are gone, or have changed since it was written.
    """
    own = identify_file(path)
    with Sandbox() as sandbox:
        attrs, tensors = sandbox.run(read_virtual_hdf5, own, "libhdf5")
    used = {shard.tensor.file.path for _, shards in tensors for shard in shards}
    try:
        text = attrs.get(f"{PROVENANCE}files", "").encode()
        recorded = parse_as(dict[str, list[int]], text, "surrogateescape")
    except ValueError as error:
        raise FormatError(path, None, "its list of files is damaged", facts=str(error)) from error
    if unlisted := used - recorded.keys():
        facts = shorten(sorted(unlisted), 3)
        raise FormatError(path, None, "it shows files that it does not list", facts=facts)
    stamps = {name: stamp_at(Path(name)) for name in recorded}
    gone = [name for name, stamp in stamps.items() if stamp is None]
    changed = [it for it in stamps if it not in gone and as_recorded(stamps[it]) != recorded[it]]
    problems = [
        Diagnostic(
            "changed",
            f"files with its bytes {what}: {len(names)} of {len(recorded)}",
            hint="put the files back with their times, or merge --virtual --overwrite again",
            facts=shorten(names, 3),
            where=path,
        )
        for names, what in ((gone, "are gone"), (changed, "have changed"))
        if names
    ]
    if problems:
        raise PlanError(problems) from None  # not: while another error was handled
    files = {name: StoredFile(name, stamp) for name, stamp in stamps.items()} or {path: own}
    numbers = {name: number for number, name in enumerate(files)}
    first = next(iter(files.values()))
    placed: dict[str, FullTensor] = {}
    stored: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for meta, shards in tensors:
        boxes = []
        for box in shards or [Box(Region.whole(meta.shape), 0, StoredTensor(meta, first, ()))]:
            name = box.tensor.file.path
            tensor = replace(box.tensor, file=files[name])
            stored[name].setdefault(meta.name, tensor)
            boxes.append(Box(box.region, numbers[name], tensor))
        filled = fill_with_boxes(meta, boxes)
        if not isinstance(filled, BoxSlicing):
            raise FormatError(path, None, filled[0].message)
        placed[meta.name] = FullTensor(meta, filled, Listed())
    indexes = {
        numbers[name]: FileIndex((file,), "hdf5", recorded.get(name, [0])[0], stored[name], attrs)
        for name, file in files.items()
    }
    return Catalog(path, indexes, documents=(own,), description=Description((path,), placed))
