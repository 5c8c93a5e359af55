"""What a command found: notes for people, findings of `verify`, and its report."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ckpttool.errors import CkptToolError, PlanError, raise_all


@dataclass(frozen=True, slots=True)
class Note:
    """One fact, with a kind that programs can rely on.

    Attributes
    ----------
    kind
        One of ``"absent"``, ``"checksum"``, ``"corrected"``, ``"doubt"``, ``"dropped"``,
        ``"encryption"``, ``"follows"``, ``"format"``, ``"ignored"``, ``"older_step"``,
        ``"part"``, ``"skipped"``, ``"replica"``, ``"step"``, ``"strategy"``,
        ``"undivided"``, ``"unfinished"``, ``"unlisted"``, ``"zero"``.
    text
        A sentence for people.
    ranks
        Ranks that have no file, or a damaged one, if that is what it says.
    is_warning
        Whether something is not as it should be, or was decided that a person should look at.
    """

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    is_warning: bool = False


def describe_notes(notes: Iterable[Note]) -> list[dict[str, object]]:
    """Return the notes of a JSON document."""
    return [{"kind": note.kind, "text": note.text} for note in notes]


Severity = Literal["error", "warning"]

KINDS: Mapping[str, tuple[Severity, ...]] = {  # what `verify` finds, and how grave each may be
    "damaged": ("error",),
    "unreadable": ("error",),
    "unsupported": ("error",),
    "missing": ("error", "warning"),
    "dtype": ("error",),
    "shape": ("error",),
    "strategy": ("error", "warning"),
    "step": ("error", "warning"),
    "unfinished": ("error",),
    "lacking": ("warning",),
    "unlisted": ("warning",),
    "checksum": ("error",),
    "replica": ("error",),
    "manifest": ("error",),
    "nan": ("warning",),
    "infinite": ("warning",),
    "zero": ("warning",),
}
OF_PLANS: Mapping[str, Severity] = {  # and stop a plan alone
    "unlisted": "error",
    "target": "error",
    "destination": "error",
    "strict": "error",
}


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
        ``"zero"`` (values), ``"target"`` (does not fit a target's layout), ``"destination"``
        (cannot be written there) and ``"strict"`` (a warning that is refused); see `KINDS`.
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

    def __post_init__(self) -> None:
        if self.severity not in (*KINDS.get(self.kind, ()), OF_PLANS.get(self.kind)):
            raise ValueError(f"a finding of the kind {self.kind} is no {self.severity}")


@dataclass(frozen=True, slots=True)
class Report:
    """What `ckpttool.verify` found.

    Attributes
    ----------
    path, step
        As of `Catalog`.
    ranks
        Ranks whose file was read.
    tensors
        Number of parameters.
    nbytes
        Bytes of all files.
    findings
        What is wrong; none if nothing is.
    notes
        What else is to be known.
    is_whole
        Whether it is known how the ranks' slices fit together, or there is but one.
    """

    path: str
    step: str | None = None
    ranks: tuple[int, ...] = ()
    tensors: int = 0
    nbytes: int = 0
    findings: tuple[Finding, ...] = ()
    notes: tuple[Note, ...] = ()
    is_whole: bool = True

    def ignoring(self, kinds: Collection[str]) -> Report:
        """The same, with warnings of these kinds as notes; an error is never ignored."""
        kept: list[Finding] = []
        ignored: list[Finding] = []
        for finding in self.findings:
            is_ignored = finding.severity == "warning" and finding.kind in kinds
            (ignored if is_ignored else kept).append(finding)
        notes = (Note("ignored", finding.text) for finding in ignored)
        return replace(self, findings=tuple(kept), notes=(*self.notes, *notes))


def plan_error(findings: Iterable[Finding]) -> PlanError:
    """The error of a plan that these findings stop."""
    return PlanError([finding.text for finding in findings])


@dataclass(slots=True)
class Diagnostics:
    """Everything that the stages of a run find; each stage adds to it.

    Attributes
    ----------
    notes
        What people should know.
    findings
        What is wrong.
    errors
        What could not be read.

    Examples
    --------
    >>> found = Diagnostics()
    >>> found.add_problems("target", ["rank 7: not in the target"])
    >>> found.has_problems
    True
    >>> found.raise_if_errors()
    Traceback (most recent call last):
    ckpttool.errors.PlanError: rank 7: not in the target
    """

    notes: list[Note] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    errors: list[CkptToolError] = field(default_factory=list)

    @property
    def has_problems(self) -> bool:
        """Whether anything stops a plan."""
        return bool(self.errors or self.findings)

    def extend(self, other: Diagnostics) -> None:
        """Add all that another stage found."""
        self.notes += other.notes
        self.findings += other.findings
        self.errors += other.errors

    def add_problems(self, kind: str, texts: Iterable[str]) -> None:
        """Add a finding of one kind for each text."""
        self.findings += (Finding(kind, text) for text in texts)

    def raise_if_errors(self) -> None:
        """Raise everything that is wrong as one error.

        Raises
        ------
        FormatError, StrategyError, PlanError, CombinedError
            What was found; the errors of files first.
        """
        wrong = [plan_error(self.findings)] if self.findings else []
        raise_all([*self.errors, *wrong])
