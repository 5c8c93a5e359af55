"""The answers of commands: structs whose fields are the keys of JSON documents.

One object is what Python returns, what ``--json`` prints and what the screen shows.  So a key is
declared once, with its type and its line in the docstring.  The tests write the JSON Schema of a
document from these (`tests.support.schemas`).  A field with a default is left out of the document
where it has that; a key that is always there has none.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, cast, overload

import msgspec

from ckpttool._version import SCHEMA
from ckpttool.model.layout import Layout
from ckpttool.model.slicing import FullTensor
from ckpttool.model.strategy import Strategy
from ckpttool.problems import CODES, Diagnostic, Diagnostics, Severity, SeverityOf
from ckpttool.wording import Brief, as_typed, count, encodable

Json = dict[str, object]
Count = Annotated[int, msgspec.Meta(ge=0)]
Some = Annotated[int, msgspec.Meta(ge=1)]  # where 0 cannot occur
Shape = tuple[Count, ...]
Magnitude = Annotated[float, msgspec.Meta(ge=0)]
# Numbers that may be infinite, or NaN; JSON lacks these, so their names stand in quotes (`plain`).
Unbounded = Annotated[float, msgspec.Meta(ge=0, extra_json_schema={"spelled": ["Infinity"]})]
Indefinite = Annotated[
    float, msgspec.Meta(ge=0, extra_json_schema={"spelled": ["Infinity", "NaN"]})
]
Code = Annotated[str, msgspec.Meta(pattern="^[a-z][a-z_]*$")]
Digest = Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
_PLAIN = str | int | float | None  # what stands in a cell of a table
S = TypeVar("S")
T = TypeVar("T")
_ERRORS: SeverityOf = dict.fromkeys(CODES, "error")


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a document: its fields are the keys."""


class DiagnosticAnswer(Answer, frozen=True):
    """One note, finding or problem of any document.

    Attributes
    ----------
    severity
        How grave the fact is for this command.
    code
        What kind of fact it is; docs/reference/messages.md lists the codes.
    text
        The fact in words: where, and what.
    facts
        What was expected and found: ranks, names, numbers.
    hint
        What to do about it.
    tensor
        Parameter that the fact is about.
    ranks
        Ranks that the fact is about, ascending.
    path
        File or folder that the fact is about.
    offset
        Byte in that file.
    count
        Number of elements, if elements were counted.
    first
        Index of the first of these elements in the full tensor.
    """

    severity: Severity
    code: Code
    text: str
    facts: str | None
    hint: str | None
    tensor: str | None
    ranks: tuple[Count, ...]
    path: str | None = None
    offset: Count | None = None
    count: Count | None = None
    first: tuple[Count, ...] | None = None


class Reported(Sequence[Diagnostic]):
    """Diagnostics with the severities that the command gives them: those of errors by default."""

    def __init__(
        self, diagnostics: Iterable[Diagnostic], severity_of: SeverityOf = _ERRORS
    ) -> None:
        self._diagnostics = tuple(diagnostics)
        self.severity_of = severity_of

    @overload
    def __getitem__(self, at: int) -> Diagnostic: ...
    @overload
    def __getitem__(self, at: slice) -> Reported: ...
    def __getitem__(self, at: int | slice) -> Diagnostic | Reported:
        if isinstance(at, slice):
            return Reported(self._diagnostics[at], self.severity_of)
        return self._diagnostics[at]

    def __len__(self) -> int:
        return len(self._diagnostics)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple | Reported) and self._diagnostics == tuple(other)

    def __hash__(self) -> int:
        return hash(self._diagnostics)

    def __repr__(self) -> str:
        return repr(self._diagnostics)

    def to_builtins(self) -> list[Json]:
        """Return the diagnostics of a document."""
        return [
            plain(
                msgspec.to_builtins(
                    DiagnosticAnswer(
                        cast(Severity, self.severity_of[diagnostic.code]),
                        diagnostic.code,
                        diagnostic.fact,
                        diagnostic.facts or None,
                        as_typed(diagnostic.hint) or None,
                        diagnostic.tensor,
                        diagnostic.ranks,
                        diagnostic.path,
                        diagnostic.offset,
                        diagnostic.count,
                        diagnostic.first,
                    )
                )
            )
            for diagnostic in self._diagnostics
        ]


class Each(Sequence[T]):
    """Parts of a document that are made when they are read, since a screen needs few of many."""

    def __init__(self, make: Callable[[S], T], sources: Sequence[S]) -> None:
        self._make = make
        self._sources = sources

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Each[T]: ...
    def __getitem__(self, at: int | slice) -> T | Each[T]:
        if isinstance(at, slice):
            return Each(self._make, self._sources[at])
        return self._make(self._sources[at])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, self._sources)

    def __len__(self) -> int:
        return len(self._sources)


class Document(Brief, Answer, frozen=True):
    """A whole document; a key whose default is None is left out where it is None.

    Attributes
    ----------
    schema
        The version of the document; a change that breaks readers increments it.
    aside
        Fields for the screen, which are not keys of the document.
    """

    schema: ClassVar[int] = SCHEMA
    aside: ClassVar[frozenset[str]] = frozenset()

    def _texts(self) -> Iterator[str]:
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, _PLAIN) and value is not None:
                yield f"{name} {value}"

    def _rows(self) -> Iterator[Sequence[str]]:
        """Yield the first of its lists of records, with what can stand in a cell."""
        for value in msgspec.structs.asdict(self).values():
            if isinstance(value, Sequence) and value and isinstance(value[0], msgspec.Struct):
                rows = [msgspec.structs.asdict(row) for row in value]
                names = [
                    name for name in rows[0] if all(isinstance(it[name], _PLAIN) for it in rows)
                ]
                yield names
                yield from ([str(row[name]) for name in names] for row in rows)
                return

    def _remarks(self) -> Iterator[str]:
        """Yield what is wrong, which the table of what could be read does not say."""
        yield from map(str, getattr(self, "problems", ()))

    def to_dict(self) -> Json:
        """Return the document that ``--json`` prints."""
        document: Json = {"schema": self.schema}
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            is_given = value is not msgspec.UNSET and (value is not None or field.required)
            if is_given and field.name not in self.aside:
                document[field.name] = plain(msgspec.to_builtins(value, enc_hook=_to_builtin))
        return document


def notes_and_problems(diagnostics: Diagnostics) -> dict[str, Reported]:
    """Return what is noted and what is wrong, for the keys of these names."""
    of_files = (diagnostic for error in diagnostics.failures for diagnostic in error.diagnostics)
    return {
        "notes": Reported(diagnostics.of("note", "warning"), diagnostics.severity_of),
        "problems": Reported((*of_files, *diagnostics.errors)),
    }


def plain(value: object) -> Any:
    """Return a value of a document: lists in place of other sequences, and no other float."""
    if isinstance(value, Reported):
        return value.to_builtins()
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list | range):
        is_plain = bool(value) and isinstance(value[0], int)  # perhaps a million ranks
        return list(value) if is_plain else [*map(plain, value)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def to_text(document: Json) -> str:
    r"""Return a document as JSON in ASCII, which every locale can print, and strict parsers read.

    Python represents bytes of a path that is not UTF-8 by surrogates, which JSON cannot hold:
    ``\xff`` stands for such a byte.
    """
    printed = json.dumps(document)
    return json.dumps(_encodable(document)) if "\\ud" in printed else printed


def _encodable(value: object) -> object:
    match value:
        case str():
            return encodable(value)
        case dict():
            return {encodable(key): _encodable(inner) for key, inner in value.items()}
        case list() | tuple():
            return [*map(_encodable, value)]
        case _:
            return value


class FileOfSet(Answer, frozen=True):
    """A file of a set.

    Attributes
    ----------
    rank
        Rank that the file is for; of numbered files the number, from 0.
    path
        The file.
    format
        Its format.
    nbytes
        Its size.
    tensors
        Number of tensors in it.
    """

    rank: Count
    path: str
    format: str
    nbytes: Count
    tensors: Count


class Cast(Answer, frozen=True):
    """Tensors that were cast from one type to another.

    Attributes
    ----------
    from
        Stored type, by MindSpore's name.
    to
        Type in the outputs, or of the comparison.
    tensors
        Their number.
    """

    from_: str = msgspec.field(name="from")
    to: str
    tensors: Some

    def __str__(self) -> str:
        return f"{count(self.tensors, 'tensor')} from {self.from_} to {self.to}"


def count_casts(types: Iterable[tuple[str, str]]) -> tuple[Cast, ...]:
    """Return how many tensors have another new type than their old one, by both."""
    numbers = sorted(Counter(pair for pair in types if pair[0] != pair[1]).items())
    return tuple(Cast(*pair, number) for pair, number in numbers)


class SizedTensor(Answer, frozen=True, kw_only=True):
    """A full tensor, and the shapes of its slices.

    Attributes
    ----------
    name
        Name of the tensor.
    dtype
        Element type, by MindSpore's name.
    shape
        Full shape.
    slice_shape
        Shape of the first slice.
    slice_shapes
        All shapes of slices, if there are several.
    """

    name: str
    dtype: str
    shape: Shape
    slice_shape: Shape
    slice_shapes: tuple[Shape, ...] | None = None


def sized_keys(source: FullTensor) -> dict[str, Any]:
    """Return the keys of a `SizedTensor`."""
    meta, shapes = source.meta, source.slice_shapes
    return {
        "name": meta.name,
        "dtype": meta.dtype,
        "shape": meta.shape,
        "slice_shape": shapes[0],
        "slice_shapes": shapes if len(shapes) > 1 else None,
    }


class Sharding(Answer, frozen=True, kw_only=True):
    """How tensors are sharded; `layout_keys` returns these keys.

    Attributes
    ----------
    device_matrix
        Sizes of the device grid, outermost axis first.
    tensor_map
        For each tensor axis the device axes that shard it, outermost split first; axis 0 is the
        last of the matrix.
    optimizer_shard
        Slices into which ranks with equal slices split axis 0; 1 for none.
    rows
        Rows of each slice, if a manual split makes them unequal.
    fields
        Number of fields, if slices hold their share of each field.
    """

    device_matrix: tuple[Some, ...]
    tensor_map: tuple[tuple[Count, ...], ...]
    optimizer_shard: Some
    rows: tuple[Count, ...] | None = None
    fields: Some | None = None


def layout_keys(layout: Layout | None) -> dict[str, Any]:
    """Return the keys of a layout, as all documents have them: null if nothing lists the tensor."""
    if layout is None:
        return dict.fromkeys(("device_matrix", "tensor_map", "optimizer_shard"))
    return {
        "device_matrix": layout.device_matrix,
        "tensor_map": layout.tensor_map,
        "optimizer_shard": layout.optimizer_shard,
        "rows": layout.rows or None,
        "fields": layout.fields if layout.fields > 1 else None,
    }


class DescribedLayout(Sharding, frozen=True):
    """How the tensors of a stage are sharded.

    Attributes
    ----------
    stage
        The pipeline stage.
    """

    stage: Count


class Box(Answer, frozen=True):
    """A box of elements of a full tensor.

    Attributes
    ----------
    start
        Its first index along each axis.
    shape
        Its elements along each axis.
    """

    start: tuple[Count, ...]
    shape: tuple[Count, ...]


class StageLayout(DescribedLayout, frozen=True):
    """A layout in one stage.

    Attributes
    ----------
    shape
        The full shape; null if the file does not have it.
    """

    shape: tuple[Count, ...] | None


def describe_layouts(layouts: Iterable[Layout]) -> tuple[StageLayout, ...]:
    """Return layouts as answers have them, one for each stage."""
    return tuple(
        StageLayout(layout.stage, layout.full_shape, **layout_keys(layout)) for layout in layouts
    )


class StrategySize(Answer, frozen=True):
    """A strategy.

    Attributes
    ----------
    files
        The files that were read.
    ranks
        Number of ranks of all stages.
    stages
        Number of pipeline stages.
    """

    files: tuple[str, ...]
    ranks: Some
    stages: Some

    @classmethod
    def of(cls, strategy: Strategy) -> StrategySize:
        """Return the size of a strategy."""
        return cls(strategy.files, len(strategy.ranks), strategy.stages)


def _to_builtin(value: object) -> object:
    match value:
        case Reported():
            return value.to_builtins()
        case range() | Each():
            return [*value]
    raise TypeError(f"{type(value).__name__} has no place in a document")


class ErrorAnswer(Answer, frozen=True):
    """Why a command could not do what was requested.

    Attributes
    ----------
    exit_code
        The exit code; see docs/reference/exit-codes.md.
    retry
        Whether only another run is in the way (exit code 9): the same command may succeed when that
        has ended.
    diagnostics
        What stopped the command, all of it.
    """

    exit_code: Count
    retry: bool
    diagnostics: Reported


class Failure(Document, frozen=True):
    """The JSON document of any command that cannot do what was requested.

    Attributes
    ----------
    ckpttool
        Version of ckpttool.
    command
        The command line.
    error
        Why it could not.
    """

    ckpttool: str
    command: str
    error: ErrorAnswer
