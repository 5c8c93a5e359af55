"""What commands print for people and for programs: lines on stderr, one JSON document on stdout.

Every document has ``"schema": 1``; a change that breaks a reader of it counts that up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpttool.cli.text import echo, printable
from ckpttool.model.notes import Note
from ckpttool.model.source import LayoutSlicing, Source
from ckpttool.model.strategy import parameter_of

if TYPE_CHECKING:
    from ckpttool.model.plan import Document, Plan
    from ckpttool.transaction.manifest import Manifest, Written
    from ckpttool.transaction.resume import Destination


SCHEMA = 1
LARGEST = 3  # sharded tensors that a result shows
Json = Mapping[str, object]


def print_json(document: Json) -> None:
    """Print one JSON document."""
    import json

    echo(json.dumps({"schema": SCHEMA, **document}))  # ASCII: right in every locale


def print_notes(notes: Iterable[Note], quiet: bool) -> None:
    """Print notes on stderr, a line each; ``quiet`` leaves only the warnings."""
    for note in notes:
        if note.is_warning:
            click.echo(f"warning: {printable(note.text)}", err=True)
        elif not quiet:
            click.echo(f"note: {printable(note.text)}", err=True)


def describe_notes(notes: Iterable[Note]) -> Sequence[Json]:
    """Return the notes of a document."""
    return [{"kind": note.kind, "text": note.text} for note in notes]


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes for people.

    Examples
    --------
    >>> format_bytes(999), format_bytes(5 * 1024**3 // 2)
    ('999 B', '2.5 GiB')
    """
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def describe_run(
    plan: Plan, destination: Destination, written: Sequence[Written], seconds: float
) -> Json:
    """Return the JSON document of merge, split and reshard."""
    documents = documents_of(plan, destination)
    indexes = [document.path for document in documents if document.kind == "index"]
    strategies = [document.path for document in documents if document.kind == "strategy"]
    manifest, part = str(Path(plan.target.manifest_path)), destination.part
    return {
        "outputs": [{**_describe_written(one), "kept": one.is_kept} for one in written],
        "step": plan.catalog.step,
        "src_bytes": sum(file.nbytes for file in plan.catalog.files.values()),
        "dst_bytes": sum(output.nbytes for output in written),
        "seconds": round(seconds, 6),
        **({"largest_sharded": sharded} if (sharded := describe_largest(plan)) else {}),
        **({"not_in_target": _describe_not_listed(plan)} if plan.target.strategy else {}),
        "notes": describe_notes((*plan.notes, *destination.notes)),
        **({"indexes": indexes} if indexes else {}),
        **({"strategy": strategies[0]} if strategies else {}),
        **({"part": f"{part.number}/{part.count}"} if part else {"manifest": manifest}),
    }


def documents_of(plan: Plan, destination: Destination) -> tuple[Document, ...]:
    """Return the documents that a run has written; those of a set in parts come at the end."""
    return plan.documents if destination.part is None else ()


def describe_largest(plan: Plan) -> Sequence[Json]:
    """Describe the largest sharded tensors and the layouts that they were read by.

    A strategy file holds no shapes, and one of another run may fit, so a person should see these.
    Parameters come before their states; of equal shapes and layouts one is shown.
    """
    sharded = {
        source.slicing.key: source
        for source in sorted(
            (transfer.source for transfer in plan.transfers),
            key=lambda one: (parameter_of(one.meta.name) is None, one.meta.nbytes),
        )
        if isinstance(source.slicing, LayoutSlicing) and math.prod(source.layout.parts) > 1
    }
    return [describe_layout(source) for source in [*reversed(sharded.values())][:LARGEST]]


def describe_layout(source: Source) -> Json:
    """Describe the full tensor, its slices and its layout."""
    shape, layout = source.meta.shape, source.layout
    return {
        "name": source.meta.name,
        "dtype": source.meta.dtype,
        "shape": list(shape),
        **describe_shapes(layout.slice_shapes(shape)),
        "device_matrix": list(layout.device_matrix),
        "tensor_map": [list(axes) for axes in layout.tensor_map],
        "optimizer_shard": layout.optimizer_shard,
        **({"rows": list(layout.rows)} if layout.rows else {}),
        **({"fields": layout.fields} if layout.fields > 1 else {}),
    }


def describe_shapes(shapes: Iterable[tuple[int, ...]]) -> Json:
    """Describe the shape of the first slice, and all shapes where slices are not alike."""
    different = list(map(list, dict.fromkeys(shapes)))
    more = {"slice_shapes": different} if len(different) > 1 else {}
    return {"slice_shape": different[0], **more}


def describe_manifest(folder: str, manifest: Manifest) -> Json:
    """Return the JSON document of commit."""
    outputs = [_describe_written(output) for output in manifest.outputs]
    more = {"step": manifest.step, "plan": manifest.plan, "notes": describe_notes(manifest.notes)}
    return {"path": folder, "outputs": outputs, **more}


def _describe_not_listed(plan: Plan) -> Json:
    """Describe the parameters that the target strategy does not list."""
    return {
        "choice": plan.target.not_in_target,
        **{
            kind: {"tensors": tensors, "nbytes": nbytes}
            for kind, (tensors, nbytes) in plan.not_listed.sizes.items()
        },
    }


def _describe_written(output: Written) -> Json:
    return {
        "rank": output.rank,
        "path": output.path,
        "format": output.format,
        "nbytes": output.nbytes,
        "tensors": output.tensors,
    }
