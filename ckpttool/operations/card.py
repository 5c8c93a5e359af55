"""The card of a checkpoint: what is in it, in a file of JSON, and a page of HTML beside that.

A line for each full tensor has the SHA-256 of its bytes, elements in C order.  So a sharded
checkpoint and its merge have equal lines, and equal digests of all lines.  A card omits times and
hosts, so equal inputs give equal cards.  It is a reference of `verify`, too.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from html import escape
from operator import attrgetter
from pathlib import Path

import msgspec
import numpy as np

from ckpttool._version import SCHEMA, __version__
from ckpttool.concurrency import OpenProgress, map_in_order
from ckpttool.formats.base import PROVENANCE
from ckpttool.formats.local import describe_os_error
from ckpttool.formats.strict_json import convert_as
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import TEXT
from ckpttool.model.plan import OutputTensor
from ckpttool.model.region import Region
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations.answer import Answer, Count, Digest, Some, plain
from ckpttool.planning.preflight import document_problem
from ckpttool.problems import Diagnostic, ExecutionError, FormatError, PlanError, join_first
from ckpttool.storage.files import write_document
from ckpttool.storage.region_io import FlatFiles, read_band
from ckpttool.wording import count, encodable, format_bytes, format_sizes, printable

BAND_BYTES = 4 << 20  # that a worker reads at a time
MOST_WAITING = 64  # tensors that are hashed, or wait for it
STYLE = (
    "body{font:14px sans-serif}td,th{text-align:left;padding:2px 12px 2px 0}code{font-size:12px}"
)


class CardTensor(Answer, frozen=True):
    """A full tensor: ``sha256`` is that of its bytes, elements in C order; of a string in UTF-8."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    nbytes: Count
    sha256: str

    @property
    def meta(self) -> TensorMeta | None:
        """The tensor; None for a string, whose text only the digest shows."""
        return None if self.dtype == TEXT else TensorMeta(self.name, self.dtype, self.shape)

    @property
    def line(self) -> bytes:
        """The bytes that the digest of a card covers."""
        return msgspec.json.encode((self.name, self.dtype, self.shape, self.sha256)) + b"\n"


class CardType(Answer, frozen=True):
    """How many tensors have an element type, and their bytes."""

    tensors: Some
    nbytes: Count


class Card(Answer, frozen=True, kw_only=True):
    """The contents of a card.

    Attributes
    ----------
    schema, ckpttool
        The number of the document, and the version that wrote it.
    command, source, step
        The command, the checkpoint, and its step.
    made
        How ckpttool made the files, as their headers say: version, source, strategies,
        types, recipe, rows of the vocabulary.
    digest
        The SHA-256 of the lines: equal for a sharded checkpoint and its merge.
    tensors, elements, nbytes, types
        Their numbers, by element type as well.
    contents
        The full tensors, by name.
    """

    schema: int
    ckpttool: str
    command: str
    source: str
    step: str | None
    made: Mapping[str, str]
    digest: Digest
    tensors: Count
    elements: Count
    nbytes: Count
    types: Mapping[str, CardType]
    contents: tuple[CardTensor, ...]


def hash_tensors(
    tensors: Sequence[OutputTensor], executor: Executor, open_progress: OpenProgress
) -> dict[str, str]:
    """Return name to SHA-256 of full tensors; memory is that of a band for each worker.

    Raises
    ------
    PlanError
        Numbers are too large for the type to which tensors are cast, so merge would not write them.
    """
    given = ((tensor.meta, tensor) for tensor in tensors)
    digests, lost = {}, dict[str, int]()
    with open_progress(sum(tensor.meta.nbytes for tensor in tensors), "hashing") as on_progress:
        for meta, (digest, infinities) in map_in_order(executor, hash_tensor, given, MOST_WAITING):
            digests[meta.name] = digest
            lost |= {f"{meta.name}: {infinities} beyond {meta.dtype}": infinities}
            on_progress(meta.nbytes)
    if number := sum(lost.values()):
        message, hint = f"{count(number, 'number')} too large for the new type", "--dtype for them"
        facts = join_first(text for text, infinities in lost.items() if infinities)
        raise PlanError([Diagnostic("options", message, hint, facts=facts)])
    return digests


def hash_tensor(tensor: OutputTensor) -> tuple[str, int]:
    """Return the SHA-256 of a full tensor, and how many numbers became Inf; runs on a worker."""
    meta, state = tensor.meta, hashlib.sha256()
    if meta.text is not None:
        return hashlib.sha256(meta.text.encode()).hexdigest(), 0
    with FlatFiles(BAND_BYTES) as files:
        for band in Region.whole(meta.shape).bands(max(1, BAND_BYTES // meta.itemsize)):
            data = np.empty((*band.shape, meta.itemsize), np.uint8)
            read_band(files, tensor, band, data)
            state.update(data.data)
        infinities = 0 if files.caster is None else files.caster.take_stats().infinities
    return state.hexdigest(), infinities


def describe(
    catalog: Catalog, metas: Iterable[TensorMeta], digests: Mapping[str, str], command: str
) -> Card:
    """Return the card of full tensors with these digests, which are made of a catalog."""
    contents = tuple(
        CardTensor(meta.name, meta.dtype, meta.header_shape, meta.nbytes, digests[meta.name])
        for meta in sorted(metas, key=attrgetter("name"))
    )
    by_type: dict[str, list[int]] = {}
    for tensor in contents:
        by_type.setdefault(tensor.dtype, []).append(tensor.nbytes)
    made = catalog.common_attrs.items()
    return Card(
        schema=SCHEMA,
        ckpttool=__version__,
        command=command,
        source=catalog.root,
        step=catalog.step,
        made={n.removeprefix(PROVENANCE): word for n, word in made if n.startswith(PROVENANCE)},
        digest=_digest(contents),
        tensors=len(contents),
        elements=sum(math.prod(tensor.shape) for tensor in contents),
        nbytes=sum(tensor.nbytes for tensor in contents),
        types={name: CardType(len(each), sum(each)) for name, each in sorted(by_type.items())},
        contents=contents,
    )


def _digest(contents: Iterable[CardTensor]) -> str:
    return f"sha256:{hashlib.sha256(b''.join(tensor.line for tensor in contents)).hexdigest()}"


def card_of(path: str, document: Mapping[str, object]) -> Card:
    """Return the card that the JSON of a file is.

    Raises
    ------
    FormatError
        The file is not a card, or its lines are not those of its digest.
    """
    try:
        card = convert_as(Card, document)
        _ = [tensor.meta for tensor in card.contents]  # which refuses impossible ones
    except ValueError as error:
        hint = "--like with a checkpoint, its index or its card"
        raise FormatError(path, None, "neither an index nor a card", hint, str(error)) from error
    if card.digest != (digest := _digest(card.contents)):
        facts = f"expected {card.digest}, found {digest}"
        raise FormatError(path, None, "the lines of the card have another digest", facts=facts)
    return card


def page_of(path: str) -> str:
    """Return the path of the page beside a card."""
    return str(Path(path).with_suffix(".html"))


def destination_problems(path: str, inputs: Sequence[str], overwrite: bool) -> Iterator[Diagnostic]:
    """Yield what prevents writing a card and its page."""
    if Path(path).suffix != ".json":
        yield Diagnostic("destination", "a card is JSON", hint="--card card.json", where=path)
        return
    for output in (path, page_of(path)):
        if problem := document_problem(output, "--card", inputs, overwrite):
            yield problem


def write(card: Card, path: str) -> None:
    """Write a card, and the page beside it.

    Raises
    ------
    ExecutionError
        One of them cannot be written.
    """
    for output, text in ((path, _document(card)), (page_of(path), _page(card))):
        try:
            write_document(output, encodable(text).encode())
        except OSError as error:
            hint = "--card with another path"
            raise ExecutionError(output, describe_os_error(error), hint=hint) from error


def _document(card: Card) -> str:
    """Return the JSON of a card, in which each tensor is a line."""
    document = plain(msgspec.to_builtins(card))
    lines = ",\n".join(f"  {json.dumps(tensor)}" for tensor in document.pop("contents"))
    head = json.dumps(document, indent=1).removesuffix("\n}")
    return f'{head},\n "contents": [\n{lines}\n ]\n}}\n'


def _page(card: Card) -> str:
    """Return a page of two tables, without a script."""
    types = (
        f"{each.tensors} {name} ({format_bytes(each.nbytes)})" for name, each in card.types.items()
    )
    facts = {
        "command": card.command,
        "step": card.step or "",
        "made": ", ".join(map(" ".join, card.made.items())),
        "contents": f"{card.tensors} tensors, {card.elements} elements: {', '.join(types)}",
        "digest": card.digest,
        "written by": f"ckpttool {card.ckpttool}",
    }
    rows = (
        (it.name, it.dtype, format_sizes(it.shape), str(it.nbytes), it.sha256)
        for it in card.contents
    )
    title = escape(printable(card.source))
    of_facts = (_row(fact, "th") for fact in facts.items() if fact[1])
    head = _row(("name", "type", "shape", "bytes", "SHA-256"), "th", "th")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="generator" content="ckpttool card"><title>{title}</title>'
        f"<style>{STYLE}</style><h1>{title}</h1><table>{''.join(of_facts)}</table>"
        f"<h2>Tensors</h2><table>{head}{''.join(map(_row, rows))}</table></html>\n"
    )


def _row(cells: Sequence[str], first: str = "td", rest: str = "td") -> str:
    tags = (first, *(rest for _ in cells[1:]))
    shown = zip(tags, map(escape, map(printable, cells)), strict=True)
    return f"<tr>{''.join(f'<{tag}>{cell}</{tag}>' for tag, cell in shown)}</tr>"
