"""The answer of finalize: the set that is complete now, as its manifest says.

`ckpttool.transaction.finishing` decides and writes; here stands only the document.
"""

from __future__ import annotations

from ckpttool._version import __version__
from ckpttool.model.manifest import CastStats, LeftOut
from ckpttool.operations.answer import (
    Answer,
    Count,
    Digest,
    Document,
    FileOfSet,
    Magnitude,
    Reported,
    Some,
)
from ckpttool.problems import severities
from ckpttool.transaction.sealed_files import Manifest


class CastOfSet(Answer, frozen=True):
    """Statistics of casts.

    Attributes
    ----------
    elements
        Elements of their full tensors.
    zeros
        Numbers that became 0 and were not.
    infinities
        Finite numbers that became Inf (--on-overflow inf).
    max_abs
        Largest |x - y| of x that is cast to y, of finite numbers.
    max_rel
        Largest |x - y| / |x|; 1 if a number became 0.
    """

    elements: Count
    zeros: Count
    infinities: Count
    max_abs: Magnitude
    max_rel: Magnitude

    @classmethod
    def of(cls, stats: CastStats) -> CastOfSet:
        """Return what casts did, as answers have it."""
        return cls(stats.elements, stats.zeros, stats.infinities, stats.max_abs, stats.max_rel)


class Finalized(Document, frozen=True, kw_only=True):
    """The JSON document of finalize.

    Attributes
    ----------
    ckpttool
        Version of ckpttool.
    command
        The command line.
    path
        The argument of the command.
    outputs
        The files of the set, by rank.
    step
        Step, as in the file names: epoch_step; null if no name has one.
    plan
        Digest of the plan of the runs that wrote the set.
    left_out
        Tensors that --include, --exclude or --weights-only left out, if any.
    renamed
        Number of tensors with other names than in the source, if any.
    cast
        What --dtype did to the tensors of the set, if any were cast.
    notes
        Facts that do not stop the command: notes and warnings.
    """

    ckpttool: str
    command: str
    path: str
    outputs: tuple[FileOfSet, ...]
    step: str | None
    plan: Digest
    left_out: LeftOut | None = None
    renamed: Some | None = None
    cast: CastOfSet | None = None
    notes: Reported

    @classmethod
    def of(cls, folder: str, manifest: Manifest, command: str) -> Finalized:
        """Return the document of a set that is complete in ``folder``."""
        stats = manifest.cast
        return cls(
            ckpttool=__version__,
            command=command,
            path=folder,
            outputs=tuple(
                FileOfSet(entry.rank, entry.path, entry.format, entry.nbytes, entry.tensors)
                for entry in manifest.outputs
            ),
            step=manifest.step,
            plan=manifest.plan,
            left_out=manifest.left_out,
            renamed=manifest.renamed or None,
            cast=None if stats is None else CastOfSet.of(stats),
            notes=Reported(manifest.notes, severities("convert")),
        )
