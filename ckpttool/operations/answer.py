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
    """A whole document; ``schema`` is its number, which a change that breaks readers counts up."""

    schema: ClassVar[int] = SCHEMA

    def to_dict(self) -> Json:
        """Return the document that ``--json`` prints."""
        return {"schema": self.schema, **msgspec.to_builtins(self, enc_hook=_to_builtin)}


def _to_builtin(value: object) -> object:
    match value:
        case Reported():
            return describe_diagnostics(value, value.severity_of)
        case range():
            return [*value]
    raise TypeError(f"{type(value).__name__} has no place in a document")
