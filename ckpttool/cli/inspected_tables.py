"""The tables of ``inspect``, made from its documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from ckpttool.cli.report import Json, format_bytes
from ckpttool.cli.tables import print_table
from ckpttool.cli.text import format_shape, format_shapes
from ckpttool.model.catalog import MergedCatalog, SelfDescribedCatalog, format_ranks
from ckpttool.model.strategy import count

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog

MOST_SLICES = 8  # of a tensor, in a table
LAYOUT = ("slice", "device matrix", "tensor map", "shard>")  # columns


def print_undivided(catalog: MergedCatalog, document: Json) -> None:
    """Print the table of a file, or of several with an index."""
    stored = [tensor for file in catalog.files.values() for tensor in file.tensors.values()]
    several = bool(catalog.indexes or catalog.findings)
    of_files = f"{len(catalog.files)} files, " if several else ""
    print_table(
        f"{document['path']}: {of_files}{document['format']}, "
        f"{format_bytes(sum(file.nbytes for file in catalog.files.values()))}, "
        f"{len(stored)} tensors",
        ("name", "dtype", "shape", "size>", *(["file"] if several else [])),
        (
            (meta.name, meta.dtype, format_shape(meta.shape), format_bytes(meta.nbytes), *where)
            for meta, where in (
                (tensor.meta, [PurePath(tensor.file.path).name] if several else [])
                for tensor in stored
            )
        ),
    )


def print_checkpoint(catalog: Catalog, document: Json) -> None:
    """Print the tables of rank folders."""
    total = sum(file.nbytes for file in catalog.files.values())
    of_step = f", step {catalog.step}" if catalog.step else ""
    ranks: Any = document["ranks"]
    places = [key for entry in ranks[:1] for key in ("server", "device") if key in entry]
    print_table(
        f"{catalog.root}: {count(len(catalog.files), 'rank')}{of_step}, {format_bytes(total)}",
        ("rank>", *places, "path", "format", "tensors>", "size>"),
        (
            (
                str(entry["rank"]),
                *("" if entry[key] is None else str(entry[key]) for key in places),
                ", ".join(
                    path.removeprefix(catalog.root).lstrip("/")
                    for path in (entry["path"], *entry.get("beside", ()))
                ),
                entry["format"],
                str(entry["tensors"]),
                format_bytes(entry["nbytes"]),
            )
            for entry in ranks
        ),
    )
    is_described = isinstance(catalog, SelfDescribedCatalog)
    if isinstance(catalog, SelfDescribedCatalog) and catalog.description.values:
        values = catalog.description.values.items()
        print_table("the checkpoint says", ("name", "value"), values)
    tensors = document.get("tensors")
    if isinstance(tensors, list) and is_described:
        print_table(
            f"{len(tensors)} tensors",
            ("name", "dtype", "shape", "slice", "parts", "ranks of each slice"),
            (_described_row(tensor) for tensor in tensors),
        )
    elif isinstance(tensors, list):
        total = len(catalog.metas)
        rest = f" of {total} tensors; slices of the others are missing, or do not fit: see below"
        print_table(
            f"{len(tensors)}{' tensors' if len(tensors) == total else rest}",
            ("name", "dtype", "shape", *LAYOUT, "stages"),
            ((*_row(tensor), ", ".join(map(str, tensor["stages"]))) for tensor in tensors),
        )


def print_largest(tensors: Sequence[Json]) -> None:
    """Print the largest sharded tensors of a source, if any is sharded."""
    if tensors:
        print_table(
            "largest sharded tensors: check that these are the shapes of the model",
            ("name", "dtype", "shape", *LAYOUT),
            (_row(tensor) for tensor in tensors),
        )


def _row(tensor: Mapping[str, Any]) -> Sequence[str]:
    listed = tensor["device_matrix"] is not None
    return (
        tensor["name"],
        tensor["dtype"],
        format_shape(tensor["shape"]),
        format_shapes(tensor.get("slice_shapes", [tensor["slice_shape"]])),
        format_shape(tensor["device_matrix"]) if listed else "not listed",
        " ".join(format_shape(axes) if axes else "-" for axes in tensor["tensor_map"])
        if listed
        else "",
        str(tensor["optimizer_shard"]) if listed and tensor["optimizer_shard"] > 1 else "",
    )


def _described_row(tensor: Mapping[str, Any]) -> Sequence[str]:
    slices = tensor.get("slices")
    if slices is None:
        return (
            tensor["name"],
            tensor["dtype"],
            format_shape(tensor["shape"]),
            "",
            "not described",
            "",
        )
    ranks = [format_ranks(held["ranks"]).partition(" ")[2] for held in slices[:MOST_SLICES]]
    more = len(slices) - MOST_SLICES
    return (
        tensor["name"],
        tensor["dtype"],
        format_shape(tensor["shape"]),
        format_shapes(tensor.get("slice_shapes", [tensor["slice_shape"]])),
        f"{len(slices)} boxes" if tensor["parts"] is None else format_shape(tensor["parts"]),
        " | ".join([*ranks, f"and {more} more"] if more > 0 else ranks),
    )
