"""The provenance of outputs: the document ``ckpttool.json`` beside them.

These records say what a run read and wrote, and the hashes by which it can be verified.  Reading,
writing and comparing them is left to `ckpttool.transaction` and `ckpttool.checks`: they know
files.  What other programs rely on is the document, so it has its own specification here.

The document
------------
``DIR/ckpttool.json`` for a folder of files, ``FILE.ckpttool.json`` for a single file.  It is JSON
in ASCII.  Every output has its own line, so that writing and reading take little memory::

    {"schema": 1, "ckpttool": "0.2.0", "plan": "sha256:...", "step": "2_10",
     "inputs": [{"path": "checkpoint/rank_0/net-2_10.ckpt", "nbytes": 50312}, ...],
     "strategies": [{"path": "../strategy.ckpt", "nbytes": 812, "sha256": "...",
                     "role": "target"}, ...],
     "outputs": [
    {"rank": 0, "path": "rank_0/checkpoint_0.ckpt", "format": "ckpt", "nbytes": 50321, "tensors":
     [{"name": "w", "dtype": "Float32", "shape": [4, 8], "sha256": ["..."]}, ...]},
    ...
    ], "sha256": "..."}

The last line holds the SHA-256 of all lines before it (``head -n -1 ckpttool.json | sha256sum``).
A document that does not match it, byte for byte, is damaged.

``plan``
    Digest of the plan: equal for runs that do the same with the same files.
``step``
    Step of the source, or null.
``inputs``, ``strategies``
    What the run read.  Inputs are named from the folder that holds SRC.  A strategy with the role
    ``source`` has the name of its file.  One with ``target``, that of the outputs, has its path
    from the document's folder.  Old documents have no roles, and names alone.
``renamed``
    Name in the outputs to name in the source, where they differ; left out if none does.  It is for
    people: no names are taken from it.
``layouts``
    How the outputs are sharded, where that is known: a `LayoutTable`.  Strings, values that differ
    between ranks, and single values that the target does not list are not in it.
``source_names``
    For outputs without known layouts: name in the outputs to the name that the strategy of the
    first source uses, where they differ.  It is composed over all runs.  A document with neither
    this nor ``layouts`` is older than both, or its source had a damaged document.
``averaged``
    The checkpoints in a weighted mean, each with its path, like those of inputs, its step and its
    weight; left out for one source.  ``step`` is then that of the last.
``left_out``
    How many tensors of the source were not wanted, and their bytes; left out if all were.
``dst_strategies``
    The strategy file that was written with the outputs; left out if none was.
``made``
    The recipe, the adapters, and how rows of the vocabulary changed, as the headers of outputs that
    have attributes say it; left out if there was none of these.
``outputs``
    Paths, like those of ``dst_strategies``, are relative to the document's folder.  A tensor has
    the SHA-256 of each of its `units`, in order.  A tensor of up to 8 MiB has one unit, an empty
    one has none.  The hash of a string is that of its UTF-8 bytes.

``cast``
    For an output with tensors that were cast to another type, or averaged: `CastStats` of the
    slices that no output of a lower rank has.  So the sum over all outputs is that of the full
    tensors.

The document holds no times, hosts or keys, so equal inputs give equal documents.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, chain, islice, pairwise
from typing import Literal, TypeAlias

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from ckpttool.model.dtypes import TEXT
from ckpttool.model.layout import MAX_LAYOUT_AXES, MAX_RANKS, Layout
from ckpttool.model.region import Region
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import FileStamp, TensorMeta
from ckpttool.wording import count

MANIFEST_SCHEMA = 1  # of the document; incremented by a change that breaks readers
MANIFEST = "ckpttool.json"  # also the suffix for a single file
RECORD = ".ckpttool"  # the folder that records a run; also the suffix for a single file
_OF_LAYOUT = ("device_matrix", "tensor_map", "optimizer_shard", "first_rank", "rows", "fields")
DIGEST_BYTES = 32  # of SHA-256
UNIT_BYTES = 8 << 20  # a task holds whole units of all outputs that it writes at a time
Role: TypeAlias = Literal["source", "target"]


class InputFile(Struct, frozen=True):
    """A file of the source, with its size, and its stamp unless a manifest lists it.

    If the system could not read it, replicas were read in place of it, and no manifest lists it.  A
    run that can read the same file is nevertheless the same run.
    """

    path: str
    nbytes: int
    stamp: FileStamp | None = None
    is_read: bool = True


class StrategyFile(Struct, frozen=True):
    """A strategy file, the SHA-256 of its bytes, and whose strategy it is, if that is known."""

    path: str
    nbytes: int
    sha256: str
    role: Role | None = None

    @property
    def name(self) -> str:
        """The name of the file; hosts may have it in other folders."""
        return self.path.rpartition("/")[2]

    def entry(self) -> Mapping[str, object]:
        """Return the JSON object of the document."""
        return {key: value for key, value in to_builtins(self).items() if value is not None}


class LeftOut(Struct, frozen=True):
    """The tensors that the user did not want.

    Attributes
    ----------
    tensors
        Their number.
    nbytes
        Bytes of their full tensors; of convert in all files.
    """

    tensors: int
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, int]) -> LeftOut | None:
        """Return the number and the bytes of tensors; None for no tensor."""
        return cls(len(tensors), sum(tensors.values())) if tensors else None


class AveragedInput(Struct, frozen=True):
    """A checkpoint in a weighted mean.

    Attributes
    ----------
    path
        The checkpoint.
    step
        The step, as in the file names; null if they have none.
    weight
        Its weight.
    """

    path: str
    step: str | None
    weight: float


class LayoutTable(Struct, frozen=True):
    """The layouts of the tensors of a set, each kind once.

    Raises
    ------
    ValueError
        A layout is not of one of these stages, or a number is that of no kind.
    """

    stages: int
    stage_ranks: int
    kinds: tuple[tuple[Layout, ...], ...]  # the layouts of a tensor, one for each stage that has it
    tensors: Mapping[str, int]  # name in the outputs to the number of the kind

    def __post_init__(self) -> None:
        firsts = range(0, self.stages * self.stage_ranks, max(1, self.stage_ranks))
        if firsts.stop > MAX_RANKS or not {*range(len(self.kinds))}.issuperset(
            self.tensors.values()
        ):
            raise ValueError("a table of layouts that ckpttool does not write")
        for layout in chain(*self.kinds):
            is_small = max(len(layout.device_matrix), len(layout.tensor_map)) <= MAX_LAYOUT_AXES
            has_stage = layout.first_rank in firsts
            if not is_small or not has_stage or len(layout.ranks) != self.stage_ranks:
                raise ValueError(f"a layout that is not of a stage of {self.stage_ranks} ranks")

    @classmethod
    def of(cls, strategy: Strategy) -> LayoutTable:
        """Return the layouts of a strategy."""
        numbers: dict[tuple[Layout, ...], int] = {}
        tensors = {n: numbers.setdefault(of, len(numbers)) for n, of in strategy.layouts.items()}
        return cls(strategy.stages, strategy.stage_ranks, tuple(numbers), tensors)

    def strategy(self, path: str) -> Strategy:
        """Return the strategy of the set whose manifest has a path."""
        layouts = {name: self.kinds[number] for name, number in self.tensors.items()}
        sizes = self.stages, self.stage_ranks
        return Strategy(layouts, *sizes, (path,), is_recorded=True, is_as_written=True)

    def entry(self) -> Mapping[str, object]:
        """Return the JSON object of the document."""
        kinds = [
            [{key: getattr(way, key) for key in _OF_LAYOUT} for way in of] for of in self.kinds
        ]
        sizes = {"stages": self.stages, "stage_ranks": self.stage_ranks}
        return {**sizes, "kinds": kinds, "tensors": self.tensors}


class Provenance(Struct, frozen=True):
    """The inputs and options of a run; equal provenance gives equal outputs.

    The names are those of the document at the top of this module.  ``crc``, whether the outputs
    store a checksum, is None if only a manifest records the run.  ``weight_block`` are the rows and
    columns of Float8 weights that share a scale, as a config.json of the source says.
    """

    ckpttool: str
    plan: str
    step: str | None
    inputs: tuple[InputFile, ...]
    strategies: tuple[StrategyFile, ...]
    dst_strategies: tuple[StrategyFile, ...] = ()
    crc: bool | None = None
    command: str = ""  # the command line, for the user; empty if only a manifest records the run
    renamed: Mapping[str, str] = {}
    averaged: tuple[AveragedInput, ...] = ()
    left_out: LeftOut | None = None
    layouts: LayoutTable | None = None
    source_names: Mapping[str, str] | None = None
    weight_block: tuple[int, int] | None = None
    made: Mapping[str, str] = {}

    @property
    def has_unknown_names(self) -> bool:
        """Whether tensors were renamed, and nothing shows the names that strategies use."""
        return bool(self.renamed) and self.layouts is None and self.source_names is None

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the outputs."""
        inputs = sorted((file.path, file.nbytes, file.stamp or ()) for file in self.inputs)
        strategies = sorted({(file.name, file.sha256) for file in self.strategies})
        document = json.dumps([self.ckpttool, self.plan, inputs, strategies])
        return hashlib.sha256(document.encode()).hexdigest()

    def head(self) -> Mapping[str, object]:
        """Return the first lines of a manifest as a JSON object, without times."""
        strategies = [file.entry() for file in self.dst_strategies]
        return {
            "schema": MANIFEST_SCHEMA,
            "ckpttool": self.ckpttool,
            "plan": self.plan,
            "step": self.step,
            "inputs": [
                {"path": file.path, "nbytes": file.nbytes} for file in self.inputs if file.is_read
            ],
            "strategies": [file.entry() for file in self.strategies],
            **({"dst_strategies": strategies} if strategies else {}),
            **({"renamed": self.renamed} if self.renamed else {}),
            **({"averaged": [*map(to_builtins, self.averaged)]} if self.averaged else {}),
            **({"left_out": to_builtins(self.left_out)} if self.left_out else {}),
            **({"layouts": self.layouts.entry()} if self.layouts else {}),
            **({} if self.source_names is None else {"source_names": self.source_names}),
            **({"weight_block": self.weight_block} if self.weight_block else {}),
            **({"made": self.made} if self.made else {}),
        }

    def head_with_stamps(self) -> Mapping[str, object]:
        """Return the entries of the record of a run; a resumed run compares itself with them."""
        inputs = [to_builtins(file) for file in self.inputs]
        return {**self.head(), "inputs": inputs, "crc": self.crc, "command": self.command}


class TensorEntry(Struct, frozen=True):
    """A tensor, and the SHA-256 of each of its units in hexadecimal digits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: tuple[str, ...]


class CastStats(Struct, frozen=True):
    """Statistics of a cast of some elements to another floating-point type.

    ``largest`` is the largest magnitude of those finite ones that became Inf (``infinities``).
    ``max_abs`` is the largest ``|x - y|``, ``max_rel`` the largest ``|x - y| / |x|``, where both
    are finite.
    """

    elements: int = 0  # their number
    infinities: int = 0
    largest: float = 0.0
    zeros: int = 0  # how many became 0 that were not
    max_abs: float = 0.0
    max_rel: float = 0.0

    def merged(self, other: CastStats) -> CastStats:
        """Return the statistics of both together."""
        return CastStats(
            self.elements + other.elements,
            self.infinities + other.infinities,
            max(self.largest, other.largest),
            self.zeros + other.zeros,
            max(self.max_abs, other.max_abs),
            max(self.max_rel, other.max_rel),
        )

    @classmethod
    def sum(cls, parts: Iterable[CastStats | None]) -> CastStats | None:
        """Return the statistics of all parts together; None if there were no casts."""
        casts = [stats for stats in parts if stats is not None]
        return reduce(cls.merged, casts) if casts else None

    def __str__(self) -> str:
        losses = []
        if self.max_abs:
            losses = [f"largest error {self.max_abs:.3g}, relative {self.max_rel:.3g}"]
        losses += [f"{count(self.zeros, 'number')} became 0"] if self.zeros else []
        losses += [f"{count(self.infinities, 'number')} became Inf"] if self.infinities else []
        return ", ".join(losses) or "nothing was lost"


class OutputEntry(Struct, frozen=True, omit_defaults=True):
    """A complete output, as a manifest lists it; ``path`` is relative to the manifest's folder.

    ``cast`` is what casts did to the slices that no output of a lower rank has; None without casts.
    """

    rank: int
    path: str
    format: str
    nbytes: int
    tensors: tuple[TensorEntry, ...]
    cast: CastStats | None = None

    def __post_init__(self) -> None:
        require_below(self.path)


def require_below(path: str) -> None:
    """Raise ValueError if a path is not that of a file in a folder, or below."""
    parts = path.encode(errors="surrogateescape").split(b"/")
    is_long = len(path) > 4095 or max(map(len, parts)) > 255
    is_within = not (path.startswith("/") or b".." in parts or "\0" in path or is_long)
    if not is_within or not {*parts} - {b"", b"."}:
        raise ValueError(f"path: expected a path below the folder, got {path:.80}")


Unit: TypeAlias = "tuple[str, int]"  # name of a tensor, and the number of a unit of it


class AlikeOutputs(Struct, eq=False):
    """The outputs of a manifest whose tensors have the same names, element types and shapes.

    ``numbers`` has the units of each tensor, as numbers of hashes in `ListedOutput.digests`.
    """

    tensors: tuple[TensorEntry, ...]  # the tensors, without hashes
    numbers: Mapping[str, range]
    outputs: list[ListedOutput] = []  # the outputs, in the order of the manifest
    _distinguishing: dict[bytes, dict[Unit, int]] = {}  # by digests

    def distinguishing_units(self, output: ListedOutput) -> Mapping[Unit, int]:
        """Return units that together distinguish an output from all others alike, with their bytes.

        The smallest unit that differs between the outputs is mostly enough.  If all outputs are
        equal, it is the largest unit, which says most of the file.
        """
        if not self._distinguishing:
            nbytes = {
                (entry.name, number): size
                for entry in self.tensors
                for number, size in enumerate(islice(_sizes(entry), len(self.numbers[entry.name])))
            }
            in_order = sorted(nbytes, key=lambda unit: nbytes[unit])
            distinct = {output.digests: output for output in self.outputs}
            self._distinguishing = {digests: {} for digests in distinct}
            for unit, member in _distinguish(list(distinct.values()), in_order):
                self._distinguishing[member.digests][unit] = nbytes[unit]
            if len(distinct) == 1:
                self._distinguishing = {
                    output.digests: {unit: nbytes[unit] for unit in in_order[-1:]}
                }
        return self._distinguishing[output.digests]

    def find_holders(self, hashes: Mapping[Unit, bytes]) -> Iterator[ListedOutput]:
        """Yield the outputs that list all these hashes."""
        for output in self.outputs:
            if all(output.digest(unit) == digest for unit, digest in hashes.items()):
                yield output


def _distinguish(
    outputs: list[ListedOutput], in_order: Iterable[Unit]
) -> Iterator[tuple[Unit, ListedOutput]]:
    """Yield the units that split outputs into ever smaller groups, until each is by itself."""
    groups = [outputs]
    for unit in in_order:
        left = []
        for group in groups:
            by_digest: dict[bytes, list[ListedOutput]] = {}
            for output in group:
                by_digest.setdefault(output.digest(unit), []).append(output)
            if len(by_digest) > 1:
                yield from ((unit, output) for output in group)
            left += [alike for alike in by_digest.values() if len(alike) > 1]
        groups = left


class ListedOutput(Struct, frozen=True, eq=False):
    """A complete output as a manifest lists it, with its hashes in few bytes."""

    entry: OutputEntry  # its entry, without hashes
    alike: AlikeOutputs  # the outputs with the same tensors, this one among them
    digests: bytes  # the SHA-256 of all units, 32 bytes each

    def digest(self, unit: Unit) -> bytes:
        """Return the SHA-256 of a unit; empty if it is not listed."""
        name, number = unit
        numbers = self.alike.numbers.get(name, range(0))
        at = DIGEST_BYTES * numbers[number] if number < len(numbers) else len(self.digests)
        return self.digests[at : at + DIGEST_BYTES]

    def sha256(self, name: str) -> tuple[str, ...]:
        """Return the hashes of a tensor in hexadecimal digits."""
        of_tensor = range(len(self.alike.numbers[name]))
        return tuple(self.digest((name, number)).hex() for number in of_tensor)


def list_outputs(entries: Iterable[OutputEntry]) -> list[ListedOutput]:
    """Return the outputs of a manifest.

    Raises
    ------
    ValueError
        A hash does not have 64 hexadecimal digits.
    """
    outputs: list[ListedOutput] = []
    groups: dict[object, AlikeOutputs] = {}
    for entry in entries:
        key = tuple((t.name, t.dtype, t.shape, len(t.sha256)) for t in entry.tensors)
        if key not in groups:
            tensors = tuple(replace(tensor, sha256=()) for tensor in entry.tensors)
            ends = accumulate((len(tensor.sha256) for tensor in entry.tensors), initial=0)
            ranges = (range(*pair) for pair in pairwise(ends))
            names = (tensor.name for tensor in entry.tensors)
            groups[key] = AlikeOutputs(tensors, dict(zip(names, ranges, strict=True)))
        hashes = [sha256 for tensor in entry.tensors for sha256 in tensor.sha256]
        digests = bytes.fromhex("".join(hashes))
        if any(len(digest) != 2 * DIGEST_BYTES for digest in hashes):
            raise ValueError("a hash does not have 64 digits")
        alike = groups[key]
        output = ListedOutput(replace(entry, tensors=alike.tensors), alike, digests)
        alike.outputs.append(output)
        outputs.append(output)
    return outputs


def _sizes(tensor: TensorEntry) -> Iterator[int]:
    if tensor.dtype == TEXT:
        yield 0
        return
    meta = TensorMeta(tensor.name, tensor.dtype, tensor.shape)
    yield from (unit.size * meta.itemsize for unit in units(meta))


def units(meta: TensorMeta) -> Iterator[Region]:
    """Yield the regions of a tensor that are hashed separately, in C order.

    Element type and shape alone determine them.

    >>> [unit.shape for unit in units(TensorMeta("w", "Float32", (3, 1 << 20)))]
    [(2, 1048576), (1, 1048576)]
    """
    if meta.text is None:
        yield from Region.whole(meta.shape).bands(UNIT_BYTES // meta.itemsize)


def unit_starts(meta: TensorMeta) -> Iterator[int]:
    """Yield the bytes of a tensor before each unit, and those of all units."""
    return accumulate((unit.size * meta.itemsize for unit in units(meta)), initial=0)


def count_units(meta: TensorMeta) -> int:
    """Return the number of `units` of a tensor."""
    if meta.nbytes <= UNIT_BYTES:  # most tensors; spares the regions
        return int(meta.text is None and meta.nbytes > 0)
    return sum(1 for _ in units(meta))


def hash_text(value: str) -> str:
    """Return the hash of a string entry."""
    return hashlib.sha256(value.encode()).hexdigest()


class UnitHashes:
    """The SHA-256 of all units of an output, which come in any order; 32 bytes each."""

    def __init__(self, metas: Sequence[TensorMeta]) -> None:
        self._metas = metas
        self._first = array("q", accumulate(map(count_units, metas), initial=0))
        self._missing = self._first[-1]
        self._digests = bytearray(DIGEST_BYTES * self._missing)

    def add(self, place: int, number: int, digest: bytes) -> None:
        """Add the hash of a unit of the tensor at a place among ``metas``."""
        at = DIGEST_BYTES * (self._first[place] + number)
        name = self._metas[place].name
        assert self._digests.startswith(bytes(DIGEST_BYTES), at), f"{name}: unit {number} twice"
        self._digests[at : at + DIGEST_BYTES] = digest
        self._missing -= 1

    def entries(self) -> Iterator[TensorEntry]:
        """Yield the tensors with all hashes; those of strings are computed."""
        assert not self._missing, f"{self._missing} units without a hash"
        digits, size = self._digests.hex(), 2 * DIGEST_BYTES
        for meta, ends in zip(self._metas, pairwise(self._first), strict=True):
            hashes = [digits[size * number : size * (number + 1)] for number in range(*ends)]
            if meta.text is not None:
                hashes = [hash_text(meta.text)]
            yield TensorEntry(meta.name, meta.dtype, meta.shape, tuple(hashes))


def find_unequal_reads(mine: Provenance, other: Provenance) -> Iterator[str]:
    """Yield the files of the source that only one of two runs could read, with which it was."""
    was_read = {file.path: file.is_read for file in other.inputs}
    for file in mine.inputs:
        if was_read.get(file.path, file.is_read) != file.is_read:
            yield f"{file.path} could {'not be read before' if file.is_read else 'be read before'}"
