"""Write an output that shows the tensors of the source where they lie.

It is an HDF5 file with a few hundred bytes for each slice.  Its attribute ``ckpttool.files`` lists
the files with the bytes, each with its size and its time of modification, as JSON: ``{path:
[nbytes, mtime_ns]}``.  libhdf5 would show other bytes if these files changed, and zeros where one
became shorter, so `ckpttool.discovery.shown_files` compares them.  No manifest is written, since
the bytes were not read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpttool.formats.hdf5 import VIRTUAL, absolute, write_virtual
from ckpttool.model.plan import Plan
from ckpttool.model.shown_extents import as_recorded
from ckpttool.storage.files import remove_document, write_document
from ckpttool.system import open_scratch
from ckpttool.transaction.sealed_files import Written

_CHUNK_BYTES = 1 << 20


def write_virtual_output(plan: Plan) -> tuple[Written, ...]:
    """Write the only output of a plan without the bytes of its tensors, and return it.

    The file is read-only, since who writes into it would write into the files of the source.

    Raises
    ------
    OSError
        It cannot be written.
    """
    (output,) = plan
    with _made(plan) as (fd, nbytes):
        remove_document(plan.target.manifest_path)
        write_document(output.path, _chunks(fd, nbytes))
    path = Path(output.path)
    path.chmod(path.stat().st_mode & ~0o222)
    return (Written(output.rank, output.path, output.format, nbytes, len(output.tensors)),)


def count_virtual(plan: Plan) -> int:
    """Return the bytes of the file that `write_virtual_output` writes."""
    with _made(plan) as (_, nbytes):
        return nbytes


@contextmanager
def _made(plan: Plan) -> Iterator[tuple[int, int]]:
    """Make the file in memory; yield its descriptor and its size."""
    (output,) = plan
    shown = [plan.shown[meta.name][0] for meta in output.metas]
    used = {box.tensor.file: None for boxes in shown for box in boxes}
    files = {absolute(file.path): as_recorded(file.stamp) for file in used}
    attrs = {**output.attrs, VIRTUAL: json.dumps(files)}
    with open_scratch() as (fd, path):
        write_virtual(path, zip(output.metas, shown, strict=True), attrs)
        yield fd, os.fstat(fd).st_size


def _chunks(fd: int, nbytes: int) -> Iterator[bytes]:
    for start in range(0, nbytes, _CHUNK_BYTES):
        yield os.pread(fd, _CHUNK_BYTES, start)
