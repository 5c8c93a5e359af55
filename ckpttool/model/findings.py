"""What is wrong with a checkpoint, as data: one record for each thing that was found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckpttool.errors import PlanError

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, with a kind that programs can rely on.

    Attributes
    ----------
    kind
        One of ``"damaged"`` (a file is not what its format says), ``"unreadable"`` (the system
        cannot read it), ``"unsupported"`` (ckpttool cannot), ``"checksum"`` (a checksum or a tag
        is wrong), ``"unfinished"`` (a save that did not finish), ``"step"`` (ranks of different
        steps), ``"missing"`` (a rank has no file, or nobody has a slice), ``"lacking"`` (a file
        lacks what its replicas hold), ``"dtype"``, ``"shape"`` (they do not agree over ranks, or
        with the strategy), ``"strategy"`` (it is not that of these files), ``"unlisted"`` (not in
        the strategy, and different between ranks), ``"manifest"`` (not what was written),
        ``"replica"`` (ranks that should hold the same do not), ``"nan"``, ``"infinite"``,
        ``"zero"`` (values) and ``"target"`` (does not fit a target's layout).
    text
        A sentence for people that names all of it.
    severity
        ``"error"``: data is lost, or it is not known which is right.  ``"warning"``: somebody
        should look.
    tensor
        The parameter, if it is one.
    ranks
        Ranks that are meant, ascending.
    count
        Number of elements, where elements were counted.
    first
        Index of the first of them in the full tensor.
    """

    kind: str
    text: str
    severity: Severity = "error"
    tensor: str | None = None
    ranks: tuple[int, ...] = ()
    count: int | None = None
    first: tuple[int, ...] | None = None


def plan_error(findings: Iterable[Finding]) -> PlanError:
    """The error of a plan that these findings stop."""
    return PlanError([finding.text for finding in findings])
