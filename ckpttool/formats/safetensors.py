"""``.safetensors``, as MindSpore writes and accepts it.

Headers are read, checked and made here; contents are left to `ckpttool.storage`.  The checks are
those of the standard, because MindSpore's reader and the library refuse different files.

Bytes
-----
::

    8 bytes      length N of the header, unsigned, little endian
    N bytes      JSON object, UTF-8, may be padded with spaces
    the rest     contents, C order, little endian

The header maps each name to ``{"dtype": ..., "shape": [...], "data_offsets": [begin, end]}``, byte
offsets from the end of the header.  ``__metadata__`` maps strings to strings.

* Contents MUST lie back to back, without gaps, overlaps or bytes behind the last (the standard).
* MindSpore's own reader also wants the header to list the tensors in the order of their offsets.
  Written files do: larger element types first, then by name, as the safetensors library sorts.
* ``"format"`` of the metadata is a mark.  It is ``"ms"`` unless ``attrs`` has another: MindSpore
  marks all its files so.  Its loaders ignore the mark, and ``unified_safetensors`` copies it, with
  all metadata, from the files of ranks into its own.  Merged files are marked ``"pt"``: Hugging
  Face's loaders refuse ``"ms"``, and metadata without a mark.
* Names that begin with ``ckpttool.`` say how the file was made; see `ckpttool.operations.plans`.
* An ``Int4`` tensor is ``I8`` with a metadata entry ``"<name>": "Int4"``.  MindSpore takes every
  entry with the name of a tensor for that tensor's type.  So an entry of ``attrs`` with the name
  of a tensor is not written.
* ``crc_num`` of the metadata is a checksum, in decimal: the CRC-32 of the names (UTF-8) in sorted
  order, each with its contents behind it.  An integer without axes counts as that many zero bytes,
  by an oversight in MindSpore (``bytes(5)``).  MindSpore cannot save a negative one; here its bytes
  count.
* ``attrs`` of a file that is read is its metadata without the types of tensors.
* F8_E4M3, F8_E5M2 and C64 are read and written; MindSpore 2.10 does neither.
* The types of `SAFETENSORS_DTYPES` are read and written, too.  Elements of F4 have 4 bits and those
  of F6 have 6; all elements of a tensor MUST fill whole bytes.
* ``"__metadata__": null`` is read as no metadata, as the library does.

Two programs write files whose tensors are not what their names say.  Both are refused:

* cryptotensors encrypts contents in place and stores the wrapped keys as ``__encryption__``.
* torch's distributed checkpoint lists the offsets of each tensor in ``DCP_SHARDING_INFO``.  With
  ``save_distributed=True`` it writes slices to ``shard-NNNNN-model-NNNNN-of-NNNNN.safetensors``.
  A file of full tensors has another name, and all its offsets are 0; it is read.

Limits: a header of at most `MAX_HEADER_BYTES`, as in the safetensors library; names are unique.

Source
------
The safetensors README, section "Format", and ``tensor.rs`` of 0.8 (``prepare``, ``validate``);
MindSpore 2.10 ``train/serialization.py`` (``_exec_save``, ``_load_into_param_dict``); cryptotensors
0.2.3; torch 2.13 ``distributed/checkpoint/_hf_utils.py`` and ``filesystem.py``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from sys import intern
from typing import cast

from msgspec.structs import replace

from ckpttool.formats.base import ChecksumInput, Format, Header, lay_out, refusal
from ckpttool.formats.local import open_source
from ckpttool.formats.strict_json import parse_json
from ckpttool.lazy import compile_late
from ckpttool.model.dtypes import ALL_DTYPES, DTYPES, NOT_LOADED_FROM_SAFETENSORS, TEXT
from ckpttool.model.tensors import (
    MAX_AXES,
    CutShortError,
    Extent,
    FileIndex,
    Remains,
    StoredFile,
    StoredTensor,
    TensorMeta,
)
from ckpttool.problems import Diagnostic, FormatError, UnsupportedError
from ckpttool.wording import shorten

MAX_HEADER_BYTES = 100_000_000  # as safetensors; stops hostile headers
METADATA = "__metadata__"
_NO_HEADER = "not a safetensors file: it has no valid header"
_MOST = 10**15  # an offset of more digits than files have
_MAX_CRC = str(2**32 - 1)  # the longest; reserves the place of the checksum

_SLICES_OF_TORCH = compile_late(r"shard-\d+-model-")  # begins the name of a file of one rank
_OFFSETS_OF_ZERO = compile_late(r'"saved_offsets"\s*:\s*\[[0,\s]*\]')  # of a full tensor

# The order of contents in a file: the library sorts by its enumeration of types (tensor.rs, Dtype),
# the last type first.
_ORDER = (
    *("BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8"),
    *("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    *("I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64"),
)

_BY_WORD = {
    dtype.safetensors: dtype
    for dtype in ALL_DTYPES.values()
    if dtype.safetensors is not None and dtype.name != "Int4"
}


class Safetensors(Format):
    """The `Format` of safetensors files."""

    name = word = "safetensors"
    has_checksum = True
    max_header_bytes = MAX_HEADER_BYTES

    def refusals(
        self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}
    ) -> Iterator[Diagnostic]:
        """Yield a diagnostic for tensors that the format cannot hold, or a header too large."""
        refused = [*_refusals(tensors, attrs)]
        yield from refused
        if not refused and self.header_bytes(tensors, attrs) > MAX_HEADER_BYTES:
            nbytes = len(_make_header(_ordered(tensors), attrs))
            if nbytes > MAX_HEADER_BYTES:
                message = "too many tensors for one safetensors file"
                facts = f"a header of {nbytes} bytes; at most {MAX_HEADER_BYTES} are read"
                yield Diagnostic("destination", message, facts=facts)

    def notes(self, dtypes: Collection[str], attrs: Mapping[str, str]) -> Iterator[Diagnostic]:
        """Yield a diagnostic for types that MindSpore does not load, and does not verify."""
        if not_loaded := NOT_LOADED_FROM_SAFETENSORS.intersection(dtypes):
            words = ", ".join(sorted(not_loaded))
            yield Diagnostic("format", f"MindSpore 2.10 does not load {words} from safetensors")
        if "crc_num" in attrs and "BFloat16" in dtypes:
            message = "MindSpore 2.10 does not verify checksums of safetensors files with BFloat16"
            yield Diagnostic("format", message, hint="load these without crc_check")

    def read_index(self, file: StoredFile) -> FileIndex:
        """Return the header of the file; contents are not read."""
        path = file.path
        with BufferedReader(open_source(file)) as opened:
            size = os.fstat(opened.fileno()).st_size
            length = opened.read(8)
            nbytes = int.from_bytes(length, "little")
            if len(length) < 8 or nbytes > min(size - 8, MAX_HEADER_BYTES):
                is_possible = len(length) == 8 and nbytes <= MAX_HEADER_BYTES
                reason = "the file is shorter than its header" if is_possible else _NO_HEADER
                facts = f"header of {nbytes} bytes, file of {size} bytes"
                raise FormatError(path, 0, reason, facts=facts)
            document = opened.read(nbytes)
            header = _parse_header(path, document)
        attrs = _parse_metadata(path, header.pop(METADATA, None))
        _refuse_disguised(path, attrs, len(header))
        tensors = {
            name: _parse_entry(file, name, entry, 8 + nbytes, attrs)
            for name, entry in header.items()
        }
        attrs = {
            key: word for key, word in attrs.items() if not (key in tensors and word in ALL_DTYPES)
        }
        index = FileIndex((file,), self.name, size, tensors, attrs)
        entries = cast("Mapping[str, Mapping[str, Sequence[int]]]", header)
        starts = {name: 8 + nbytes + entry["data_offsets"][0] for name, entry in entries.items()}
        bare_bytes = len(document.rstrip())
        is_usual = len(document) == bare_bytes + -bare_bytes % 8
        _check_coverage(index, 8 + nbytes, starts, are_offsets_proven=is_usual)
        return index

    def header_bytes(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> int:
        """Return the bytes of the length and of the JSON, for offsets of any number of digits."""
        return 15 + len(_make_header((), attrs)) + sum(map(_entry_bytes, tensors))

    def index(self, tensors: Sequence[TensorMeta], attrs: Mapping[str, str] = {}) -> Header:
        """Return the length and the JSON, with the place of a checksum."""
        ordered = _ordered(tensors)
        document = _make_header(ordered, attrs)
        assert len(document) <= MAX_HEADER_BYTES, "the caller has called refusals()"
        head = len(document).to_bytes(8, "little") + document
        parts = [(head, "", 0), *((b"", meta.name, meta.nbytes) for meta in ordered)]
        written = {"crc_num": _MAX_CRC} if "crc_num" in attrs else {}
        return lay_out(self.name, ordered, written, parts)

    def checksum_inputs(self, index: FileIndex, as_saved: bool = False) -> Iterator[ChecksumInput]:
        """Yield the names in sorted order, and behind each the bytes of its tensor."""
        with open_source(index.file) as file:
            for name, tensor in sorted(index.tensors.items()):
                yield name.encode()
                number = _unsigned_scalar(file, tensor)
                if number is None:
                    yield from tensor.extents
                else:
                    yield number

    def seal(self, fd: int, crc: int | None = None) -> None:
        """Write the checksum into the header, which has room for it."""
        if crc is None:
            return
        with os.fdopen(fd, "r+b", closefd=False) as file:
            file.seek(0)
            nbytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(nbytes))
            header[METADATA]["crc_num"] = str(crc)
            file.seek(8)
            file.write(_to_json(header).ljust(nbytes))


def _refusals(tensors: Sequence[TensorMeta], attrs: Collection[str]) -> Iterator[Diagnostic]:
    for meta in tensors:
        if meta.name == METADATA or (meta.name == "crc_num" and "crc_num" in attrs):
            yield refusal(meta, "safetensors reserves this name")
        elif meta.dtype == TEXT or ALL_DTYPES[meta.dtype].safetensors is None:
            yield refusal(meta, f"safetensors cannot hold {meta.dtype}")


def _ordered(tensors: Sequence[TensorMeta]) -> list[TensorMeta]:
    return sorted(tensors, key=lambda meta: (-_ORDER.index(_type_name(meta)), meta.name))


def _make_header(ordered: Sequence[TensorMeta], attrs: Mapping[str, str]) -> bytes:
    """Return the JSON of a header, padded so that contents begin at a multiple of 8."""
    metadata = {"format": "ms", **attrs}
    metadata |= {"crc_num": _MAX_CRC} if "crc_num" in attrs else {}
    for meta in ordered:
        metadata.pop(meta.name, None)
    metadata |= {meta.name: "Int4" for meta in ordered if meta.dtype == "Int4"}
    header: dict[str, object] = {METADATA: dict(sorted(metadata.items()))}
    at = 0
    for meta in ordered:
        header[meta.name] = {
            "dtype": _type_name(meta),
            "shape": list(meta.header_shape),
            "data_offsets": [at, at + meta.nbytes],
        }
        at += meta.nbytes
    document = _to_json(header)
    return document + b" " * (-len(document) % 8)


def _entry_bytes(meta: TensorMeta) -> int:
    # MindSpore's words are the longest.
    entry = {"dtype": meta.dtype, "shape": list(meta.header_shape), "data_offsets": [_MOST] * 2}
    note = {meta.name: meta.dtype} if meta.dtype == "Int4" else {}
    return len(_to_json({meta.name: entry})) + (len(_to_json(note)) if note else 0)


def _to_json(header: Mapping[str, object]) -> bytes:
    return json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()


def _unsigned_scalar(file: FileIO, tensor: StoredTensor) -> int | None:
    if tensor.meta.shape or not tensor.meta.dtype.startswith(("Int", "UInt")):
        return None
    file.seek(tensor.extents[0].offset)
    is_signed = tensor.meta.dtype.startswith("Int")
    number = int.from_bytes(file.read(tensor.meta.itemsize), "little", signed=is_signed)
    return number if number >= 0 else None


def _type_name(meta: TensorMeta) -> str:
    word = ALL_DTYPES[meta.dtype].safetensors
    assert word is not None, "the caller has called refusals()"
    return word


def _parse_header(path: str, document: bytes) -> dict[str, object]:
    try:
        header = parse_json(document)
    except ValueError as error:
        raise FormatError(path, 8, "the header cannot be parsed", facts=str(error)) from error
    if not isinstance(header, dict):
        raise FormatError(path, 8, "the header is not a JSON object")
    return header


def _parse_metadata(path: str, metadata: object) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FormatError(path, 8, f"{METADATA} does not map strings to strings")
    return metadata


def _refuse_disguised(path: str, attrs: Mapping[str, str], tensors: int) -> None:
    if "__encryption__" in attrs:
        hint = "load it with cryptotensors and save it with safetensors.torch.save_file"
        raise UnsupportedError(path, None, "encrypted by cryptotensors", hint)
    offsets = attrs.get("DCP_SHARDING_INFO")
    if offsets is not None and (
        _SLICES_OF_TORCH.match(Path(path).name) or len(_OFFSETS_OF_ZERO.findall(offsets)) < tensors
    ):
        reason = "slices of one rank, written by torch's distributed checkpoint"
        hint = "load the folder with torch's HuggingFaceStorageReader and save full tensors"
        raise UnsupportedError(path, None, reason, hint)


def _parse_entry(
    file: StoredFile, name: str, entry: object, data_start: int, attrs: Mapping[str, str]
) -> StoredTensor:
    """Return the tensor of a header entry; contents begin at byte ``data_start``."""

    def bad(reason: str, facts: str = "") -> FormatError:
        return FormatError(file.path, 8, f"{name}: {reason}", facts=facts)

    if not isinstance(entry, dict):
        raise bad("its header entry is not a JSON object")
    word = entry.get("dtype")
    dtype = _BY_WORD.get(word) if isinstance(word, str) else None
    if dtype is None:
        raise bad(f"unknown dtype {word!r}")
    if attrs.get(name) == "Int4" and dtype.name == "Int8":
        dtype = DTYPES["Int4"]
    shape, span = _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if shape is None or any(size >> 63 for size in shape):
        raise bad("shape is not a list of sizes", f"{entry.get('shape')!r:.80}")
    if span is None or len(span) != 2 or span[0] > span[1]:
        raise bad("data_offsets are not a begin and an end", f"{entry.get('data_offsets')!r:.80}")
    nbits = math.prod(shape) * (dtype.packed_bits or 8 * dtype.itemsize)
    described = f"{list(shape)!s:.80} of {word}"
    if nbits % 8:
        raise bad("its elements do not fill whole bytes", described)
    need = nbits // 8
    if span[1] - span[0] != need:
        needed = "more than 2**63" if need >> 63 else need
        facts = f"{described} needs {needed} bytes, data_offsets are {list(span)}"
        raise bad("its shape does not fit its data_offsets", facts)
    extents = (Extent(data_start + span[0], need),) if need else ()
    whole = shape if dtype.packed_bits is not None or len(shape) > MAX_AXES else None
    flat = shape if whole is None else (need // dtype.itemsize,)
    meta = TensorMeta(intern(name), dtype.name, flat, whole_shape=whole)
    return StoredTensor(meta, file, extents)


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        return None
    return tuple(value)


def _check_coverage(
    index: FileIndex, data_start: int, starts: Mapping[str, int], *, are_offsets_proven: bool
) -> None:
    """Raise FormatError unless the contents lie back to back and fill the file.

    ``starts`` has the first byte of each tensor, also of those that have no bytes.
    If ``are_offsets_proven``, a file that ends too early is a `CutShortError`.
    """
    path, at, size = index.path, data_start, index.nbytes
    spans = [(starts[name], tensor.meta.nbytes, name) for name, tensor in index.tensors.items()]
    for offset, nbytes, name in sorted(spans):
        if offset != at:
            problem = "its bytes overlap others" if offset < at else "a gap lies before its bytes"
            raise FormatError(path, offset, f"{name}: {problem}")
        at += nbytes
    if at == size:
        return
    reason = f"the file is {'shorter' if at > size else 'longer'} than its header says"
    facts = f"{at} bytes by the header, {size} in the file"
    if at < size or not are_offsets_proven:
        raise FormatError(path, min(at, size), reason, facts=facts)
    lost = {
        name: tensor.meta
        for name, tensor in index.tensors.items()
        if any(extent.offset + extent.nbytes > size for extent in tensor.extents)
    }
    whole = {name: tensor for name, tensor in index.tensors.items() if name not in lost}
    attrs = {key: value for key, value in index.attrs.items() if key != "crc_num"}
    remains = Remains(replace(index, tensors=whole, attrs=attrs), lost, are_all_known=True)
    facts = f"{facts}; cut: {shorten(lost, 3)}"
    raise CutShortError(path, size, reason, "", facts, remains)
