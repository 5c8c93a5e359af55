"""What every command answers with: a struct whose fields are the keys of its JSON document.

One object is what Python returns, what ``--json`` prints and what the screen shows.  So a key is
declared once, with its type and its line in the docstring.  The tests write the JSON Schema of a
document from these (`tests.support.schemas`).  A field with a default is left out of the document
where it has that; a key that is always there has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, overload

import msgspec

from ckpttool._version import SCHEMA
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic, SeverityOf, describe_diagnostics

Json = dict[str, object]
Count = Annotated[int, msgspec.Meta(ge=0)]
Some = Annotated[int, msgspec.Meta(ge=1)]  # where none is no answer


class Reported(Sequence[Diagnostic]):
    """Diagnostics with the severities that the command gives them."""

    def __init__(self, found: Iterable[Diagnostic], severity_of: SeverityOf) -> None:
        self._found = tuple(found)
        self.severity_of = severity_of

    @overload
    def __getitem__(self, at: int) -> Diagnostic: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Diagnostic, ...]: ...
    def __getitem__(self, at: int | slice) -> Diagnostic | tuple[Diagnostic, ...]:
        return self._found[at]

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return repr(self._found)


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """A part of a document: its fields are the keys."""


class Document(Answer, frozen=True):
    """A whole document; a key whose default is None is left out where it is None.

    Attributes
    ----------
    schema
        The number of the document; a change that breaks readers counts it up.
    aside
        Fields that are no keys: what the screen needs beside the document.
    """

    schema: ClassVar[int] = SCHEMA
    aside: ClassVar[frozenset[str]] = frozenset()

    def to_dict(self) -> Json:
        """Return the document that ``--json`` prints."""
        document: Json = {"schema": self.schema}
        for field in msgspec.structs.fields(type(self)):
            value = getattr(self, field.name)
            if field.name not in self.aside and (value is not None or field.required):
                document[field.name] = msgspec.to_builtins(value, enc_hook=_to_builtin)
        return document


class StageLayout(Answer, frozen=True, kw_only=True):
    """A layout in one stage.

    Attributes
    ----------
    stage
        The pipeline stage.
    shape
        The full shape; null if the file does not have it.
    device_matrix
        Sizes of the device grid.
    tensor_map
        For each tensor axis the device axes that shard it, counted from the right.
    optimizer_shard
        Parts of axis 0 among ranks with equal slices; 1 for none.
    rows
        Rows of each slice, if a manual split makes them unequal.
    fields
        Number of fields, if slices hold their share of each field.
    """

    stage: Count
    shape: tuple[Count, ...] | None
    device_matrix: tuple[Some, ...]
    tensor_map: tuple[tuple[Count, ...], ...]
    optimizer_shard: Some
    rows: tuple[Count, ...] | None = None
    fields: Some | None = None


def describe_layouts(layouts: Iterable[Layout]) -> tuple[StageLayout, ...]:
    """Return layouts as answers have them, one for each stage."""
    return tuple(
        StageLayout(
            stage=layout.stage,
            shape=layout.full_shape,
            device_matrix=layout.device_matrix,
            tensor_map=layout.tensor_map,
            optimizer_shard=layout.optimizer_shard,
            rows=layout.rows or None,
            fields=layout.fields if layout.fields > 1 else None,
        )
        for layout in layouts
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
            return describe_diagnostics(value, value.severity_of)
        case range():
            return [*value]
    raise TypeError(f"{type(value).__name__} has no place in a document")
