"""The files whose bytes a virtual HDF5 file shows; see `ckpttool.execution.virtual`."""

from __future__ import annotations

import json
from collections import defaultdict

from msgspec.structs import replace

from ckpttool.formats import format_of_content
from ckpttool.formats.local import identify_file, stat_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.region import Region
from ckpttool.model.slicing import (
    Box,
    BoxSlicing,
    Description,
    FullTensor,
    Listed,
    fill_with_boxes,
)
from ckpttool.model.tensors import (
    Extent,
    FileIndex,
    FileStamp,
    StoredFile,
    StoredTensor,
)
from ckpttool.model.virtual import Shard, as_recorded
from ckpttool.problems import Diagnostic, FormatError
from ckpttool.wording import shorten


def scan_virtual(path: str) -> Catalog | None:
    """Return the catalog of the files that a virtual file shows; None if it is another file.

    Files that are gone, or have changed since, are in ``Catalog.diagnostics``.
    """
    if format_of_content(path) != "hdf5":
        return None
    from ckpttool.formats.hdf5 import VIRTUAL, read_virtual  # loads h5py

    own = identify_file(path)
    read = read_virtual(own)
    if read is None:
        return None
    attrs, tensors = read
    recorded = json.loads(attrs.get(VIRTUAL, "{}"))
    stamps = {name: _stamp_of(name) for name in recorded}
    files = {name: StoredFile(name, stamp) for name, stamp in stamps.items()}
    numbers = {name: number for number, name in enumerate(files)}
    placed: dict[str, FullTensor] = {}
    stored: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for meta, shards in tensors:
        boxes = []
        for region, segments in shards or [Shard(Region.whole(meta.shape), ())]:
            file = files[segments[0].path] if segments else own
            extents = tuple(Extent(offset, nbytes) for _, offset, nbytes in segments)
            tensor = StoredTensor(replace(meta, shape=region.shape), file, extents)
            stored[file.path].setdefault(meta.name, tensor)
            boxes.append(Box(region, numbers.setdefault(file.path, len(numbers)), tensor))
        filled = fill_with_boxes(meta, boxes)
        if not isinstance(filled, BoxSlicing):
            raise FormatError(path, None, filled[0].message)
        placed[meta.name] = FullTensor(meta, filled, Listed())
    indexes = {
        number: FileIndex(
            (files.get(name, own),), "hdf5", recorded.get(name, [0])[0], stored[name], attrs
        )
        for name, number in numbers.items()
    }
    gone = [name for name, stamp in stamps.items() if stamp is None]
    changed = [
        name
        for name, stamp in stamps.items()
        if stamp is not None and as_recorded(stamp) != recorded[name]
    ]
    problems = []
    for names, what in ((gone, "are gone"), (changed, "have changed")):
        if names:
            message = f"files with its bytes {what}: {len(names)} of {len(files)}"
            hint = "put the files back, or merge --virtual --overwrite again"
            problems.append(
                Diagnostic("changed", message, hint=hint, facts=shorten(names, 3), where=path)
            )
    return Catalog(
        path,
        indexes,
        diagnostics=tuple(problems),
        documents=(own,),
        description=Description((path,), placed),
    )


def _stamp_of(path: str) -> FileStamp | None:
    try:
        return stat_file(path)
    except FileNotFoundError:
        return None
