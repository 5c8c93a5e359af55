"""Checkpoints for tests: in memory, as catalogs of headers, and as real files on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import ckpttool
from ckpttool.formats import format_of_suffix, get_format, suffix_of
from ckpttool.formats.base import Format
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy, join_stages
from ckpttool.model.tensors import Extent, FileIndex, StoredFile, StoredTensor, TensorMeta
from ckpttool.storage.files import write_header
from tests.oracle import OracleLayout, take
from tests.support.readers import NUMPY_TYPES, Entry, entry_of

Shape = tuple[int, ...]

ROWS = Layout((2, 2), ((1,), ()))  # two slices of rows, on ranks 0, 1 and on ranks 2, 3
SHARDED = Layout((2, 2), ((1,), ()), 2)
WHOLE = Layout((2, 2), ((), ()))


def stored(meta: TensorMeta, path: str = "net.ckpt") -> StoredTensor:
    """Return a tensor whose bytes lie somewhere in its file."""
    extents = (Extent(64, meta.nbytes),) if meta.text is None and meta.nbytes else ()
    return StoredTensor(meta, StoredFile(path), extents)


def catalog_of(
    ranks: Mapping[int, Mapping[str, Shape | tuple[str, Shape] | str]], root: str = "run"
) -> Catalog:
    """Return a catalog of headers: rank to name to shape, dtype and shape, or text."""
    files = {}
    for rank, tensors in sorted(ranks.items()):
        metas = []
        for name, what in tensors.items():
            if isinstance(what, str):
                metas.append(TensorMeta(name, "str", (), what))
            elif what and isinstance(what[0], str):
                metas.append(TensorMeta(name, what[0], what[1]))
            else:
                metas.append(TensorMeta(name, "Float32", what))
        path = f"{root}/rank_{rank}/net.ckpt"
        index = {meta.name: stored(meta, path) for meta in metas}
        files[rank] = FileIndex((StoredFile(path),), "ckpt", 1000 if metas else 0, index)
    return Catalog(root, files)


def strategy_of(*stages: Mapping[str, Layout]) -> Strategy:
    """Return a strategy of these stages, in order."""
    return join_stages(dict(enumerate(stages)), ("src.ckpt",))


def slice_catalog(strategy: Strategy, shapes: Mapping[str, Shape]) -> Catalog:
    """Return the catalog of a checkpoint that a strategy describes, given the full shapes."""
    ranks: dict[int, dict[str, Shape]] = {rank: {} for rank in strategy.ranks}
    for name, layouts in strategy.layouts.items():
        for layout in layouts:
            for rank in layout.ranks:
                ranks[rank][name] = layout.slice_shape(rank, shapes[name])
    return catalog_of(ranks)


def oracle(layout: Layout) -> OracleLayout:
    """Return the same layout for the oracle."""
    shard = layout.optimizer_shard
    return OracleLayout(
        layout.device_matrix,
        layout.tensor_map,
        0 if shard == 1 else shard,
        layout.first_rank,
        layout.rows,
        layout.fields,
    )


def layouts_of(strategy: Strategy, name: str) -> tuple[Layout, ...] | None:
    """Return the layouts of a parameter, or of the parameter whose unlisted state it is."""
    parameter = name.removeprefix("adam_m.").removeprefix("accu_grads.")
    return strategy.layouts.get(name) or strategy.layouts.get(parameter)


def cut(entries: Mapping[str, Entry], strategy: Strategy) -> dict[int, dict[str, Entry]]:
    """Shard full tensors with the oracle; what the strategy does not list is on every rank."""
    ranks: dict[int, dict[str, Entry]] = {rank: {} for rank in strategy.ranks}
    for name, entry in entries.items():
        layouts = layouts_of(strategy, name)
        if layouts is None:
            for tensors in ranks.values():
                tensors[name] = entry
            continue
        for layout in layouts:
            for rank in layout.ranks:
                part = take(entry.array(), oracle(layout), rank)
                ranks[rank][name] = entry_of(part, entry.dtype)
    return ranks


def noise(name: str, dtype: str, shape: Shape) -> Entry:
    """Return a tensor of bytes that differ from element to element, the same in every run."""
    nbytes = np.dtype(NUMPY_TYPES[dtype]).itemsize * int(np.prod(shape, dtype=np.int64))
    return Entry(dtype, shape, np.random.default_rng(list(name.encode())).bytes(nbytes))


def create_file(
    format: Format, path: str | Path, metas: Sequence[TensorMeta], attrs: Mapping[str, str]
) -> FileIndex:
    """Write a file with a header by the package, over what is there."""
    with Path(path).open("w+b") as file:
        header = format.index(metas, attrs)
        write_header(file.fileno(), header)
    return header.of_file(StoredFile(str(path)))


def seal_file(format: Format, path: str | Path, crc: int | None = None) -> None:
    """Write the checksum into a file that `create_file` wrote."""
    with Path(path).open("r+b") as file:
        format.seal(file.fileno(), crc)


def write_file(
    path: Path, entries: Mapping[str, Entry], format: str, attrs: Mapping[str, str] | None = None
) -> None:
    """Write a file with a header by the package, and contents where the header says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    metas = [TensorMeta(name, entry.dtype, entry.shape) for name, entry in entries.items()]
    index = create_file(get_format(format), path, metas, attrs or {})
    with path.open("r+b") as file:
        for name, tensor in index.tensors.items():
            at = 0
            for extent in tensor.extents:
                file.seek(extent.offset)
                file.write(entries[name].data[at : at + extent.nbytes])
                at += extent.nbytes
    seal_file(get_format(format), path)


def write_holes(path: Path, *shapes: Shape) -> None:
    """Write a ``.ckpt`` of Float32 tensors ``w``, ``w1``, ``w2`` ... whose contents are holes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = ["w", *(f"w{number}" for number in range(1, len(shapes)))]
    metas = [TensorMeta(name, "Float32", shape) for name, shape in zip(names, shapes, strict=True)]
    create_file(get_format("ckpt"), path, metas, {})


def write_indexed(
    folder: Path,
    files: Mapping[str, Mapping[str, Entry]],
    index: str = "param_name_map.json",
    rest: Mapping[str, Entry] | None = None,
) -> Path:
    """Write files by name and an index of all but ``rest``, which goes to every rank."""
    for name, entries in files.items():
        write_file(folder / name, entries, str(format_of_suffix(name)))
    if rest is not None:
        write_file(folder / "hyper_param.safetensors", rest, "safetensors")
    document = {
        "metadata": {
            "total_size": sum(len(e.data) for entries in files.values() for e in entries.values())
        },
        "weight_map": {name: file for file, entries in files.items() for name in entries},
    }
    (folder / index).write_text(json.dumps(document, indent=4), encoding="utf-8")
    return folder


def write_ranks(folder: Path, ranks: Mapping[int, Mapping[str, Entry]], format: str) -> Path:
    """Write rank folders with one file each."""
    for rank, entries in ranks.items():
        write_file(folder / f"rank_{rank}" / f"net{suffix_of(format)}", entries, format)
    return folder


# ----------------------------------------------------------- sources, for tests that judge them


def catalog_on_disk(
    folder: Path, ranks: Mapping[int, Mapping[str, Entry]], format: str = "ckpt"
) -> Catalog:
    """Write rank folders, and return the catalog of what is on disk."""
    return ckpttool.scan(str(write_ranks(folder, ranks, format)))


ONE_STAGE = strategy_of({"w": ROWS})


def with_names(shapes, ranks=range(4)):
    """Return a catalog with the same names and shapes on every rank."""
    return catalog_of(dict.fromkeys(ranks, shapes))


def the_one(problems, *words):
    """Check that there is one problem, with these words in it."""
    assert len(problems) == 1, problems
    assert not [word for word in words if word not in problems[0]], problems[0]
