"""Names of tensors and problems of several of them as one text, for people.

The names of weights come first, folded as tables fold them.  The prefixes of MindSpore's optimizers
decide what is state, not the other names in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from msgspec.structs import replace

from ckpttool.model.names import parse_name
from ckpttool.problems import MOST, Diagnostic, join_clauses
from ckpttool.wording import format_ranks, shorten, shorten_folded


def format_names(names: Iterable[str], most: int = 3) -> str:
    """Return names of tensors for a message: weights first, and no states of these.

    Examples
    --------
    >>> format_names(["adam_m.layers.0.w", "layers.0.w", "layers.1.w", "b", "c", "d"])
    'layers.{0,1}.w, b, c and 1 more, with their states'
    >>> format_names(["adam_m.b", "weight", "head.weight"])
    'weight, head.weight, adam_m.b'
    """
    parameters = {name: parse_name(name).parameter for name in names}
    others = [name for name, parameter in parameters.items() if parameter not in parameters]
    others.sort(key=lambda name: parameters[name] is not None)
    states = ", with their states" if len(others) < len(parameters) else ""
    return f"{shorten_folded(others, most)}{states}"


def format_states(parameters: Mapping[str, str]) -> str:
    """Return states, which ``parameters`` maps to their parameters, for a message.

    Examples
    --------
    >>> format_states({"adam_m.l.0.w": "l.0.w", "adam_v.l.0.w": "l.0.w", "adam_m.l.1.w": "l.1.w"})
    'of l.{0,1}.w: adam_m., adam_v.'
    """
    kinds = dict.fromkeys(name.removesuffix(of) for name, of in parameters.items())
    return f"of {format_names(dict.fromkeys(parameters.values()))}: {shorten(kinds, 3)}"


def join_alike(diagnostics: Iterable[Diagnostic], document: str = "--json") -> list[Diagnostic]:
    """Join the same problem of several files, tensors or ranks, for the text that people read.

    The text has how many tensors there are, three of their names or one file, and the ``document``
    that lists them.  Facts that differ stand by the names that they are about.

    Examples
    --------
    >>> one = Diagnostic("shape", "the slices do not fit", facts="(2, 3)", tensor="w")
    >>> [one.lines for one in join_alike([one, replace(one, tensor="b", facts="(4,)")])]
    [('the slices do not fit: 2 tensors', 'w, b; w: (2, 3); --json lists each')]
    >>> one = Diagnostic("unsupported", "a gzip archive", where="a", path="a", ranks=(0,))
    >>> [one.lines for one in join_alike([one, replace(one, where="b", path="b", ranks=(1,))])]
    [('a and 1 more: a gzip archive', 'ranks 0, 1')]
    """
    groups: dict[object, list[Diagnostic]] = {}
    for diagnostic in diagnostics:
        key = (diagnostic.code, diagnostic.message, diagnostic.hint, diagnostic.side)
        groups.setdefault(key, []).append(diagnostic)
    return [alike[0] if len(alike) == 1 else _join(alike, document) for alike in groups.values()]


def _join(alike: Sequence[Diagnostic], document: str) -> Diagnostic:
    """Join diagnostics that differ at most in place, tensor, ranks and facts."""
    places = [*dict.fromkeys(diagnostic.where for diagnostic in alike if diagnostic.where)]
    tensors = [*dict.fromkeys(diagnostic.name for diagnostic in alike if diagnostic.name)]
    ranks = {diagnostic.ranks: None for diagnostic in alike if diagnostic.ranks}
    names: dict[str, dict[str, None]] = {}  # of what each of the facts is about
    for diagnostic in alike:
        where = diagnostic.where if len(places) > 1 else ""
        subject = diagnostic.name if len(tensors) > 1 else where
        names.setdefault(diagnostic.facts, {})[subject] = None
    are_equal = len(names) == 1
    clauses = [
        facts if are_equal or not any(about) else f"{shorten(about, 1)}: {facts}"
        for facts, about in names.items()
        if facts
    ]
    united = tuple(sorted(set(chain.from_iterable(ranks))))
    is_of_all = are_equal or len(places) > 1  # else each of the facts has ranks of its own
    more_places = places[1:] if len(places) > len(ranks) else []  # that ranks do not identify
    several = tensors if len(tensors) > 1 else []
    shown = join_clauses(*clauses[: 1 if several or len(clauses) > MOST else MOST])
    is_short = max(map(len, (tensors, clauses, more_places))) > MOST or len(several) > 1 < len(
        clauses
    )
    return replace(
        alike[0],
        message=alike[0].message + (f": {len(several)} tensors" if several else ""),
        where=shorten(places, 1),
        tensor=None if several else alike[0].tensor,
        facts=join_clauses(
            format_names(several),
            format_ranks(united) if len(ranks) > 1 and is_of_all else "",
            f"also {shorten(more_places, MOST)}" if more_places and are_equal else "",
            shown,
            f"{document} lists each" if is_short else "",
        ),
        ranks=united,
    )
