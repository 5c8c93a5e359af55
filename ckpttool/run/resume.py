"""What an earlier run has left where a plan is to write, and whether it can be gone on from."""

from __future__ import annotations

import os
from pathlib import Path

from ckpttool.errors import CkptToolError, ExecutionError, FormatError
from ckpttool.model.manifest import JOURNAL, differences
from ckpttool.model.notes import Note
from ckpttool.model.plan import Plan
from ckpttool.model.strategy import count, shorten
from ckpttool.run.batch import place_of
from ckpttool.run.journal import read_journal, resume_problems
from ckpttool.run.manifest import Listing, output_problems
from ckpttool.run.origin import changed_inputs
from ckpttool.run.sets import (
    Place,
    busy_problem,
    find_records,
    holder_of,
    journal_of,
)

MIXTURE = "what was made of it may be a mixture, so write all of it anew"


def find_remains(plan: Plan, problems: list[str], notes: list[Note]) -> frozenset[str]:
    """Files that may be replaced, since a run that did not end wrote them and nobody touched them.

    What stands in the way is added to ``problems``, what is to be known to ``notes``.
    """
    place = place_of(plan)
    if not place.manifest.parent.is_dir():
        return frozenset()
    own, folder = journal_of(place.listing), place.manifest.parent
    found: set[str] = set()
    for path in {own, journal_of(place.manifest), *find_records(place.manifest, JOURNAL)}:
        try:
            before = read_journal(path)
        except FormatError as error:
            problems += [str(error)] if path == own else []
            continue
        if before is None:
            continue
        kept = before.still_complete(folder)
        found |= {str(folder / name) for name in before.untouched(folder)}
        if path != own:
            continue
        by = holder_of(path)
        if by is not None:
            problems.append(busy_problem(path, by))
        elif plan.is_resumed:
            changes = list(differences(place.origin, before.origin))
            problems += resume_problems(path, changes) if changes else []
        if kept and by is None:
            what = f"{len(kept)} of {count(len(plan.target.paths), 'output')}"
            then = "are kept" if plan.is_resumed else "are written anew (--resume keeps them)"
            text = f"{place.listing}: a run did not end, {what} that it left complete {then}"
            notes.append(Note("unfinished", text))
    if plan.is_resumed and _is_listed(plan, place):
        documents = [document.path for document in plan.documents]
        found |= {str(Path(path)) for path in (*plan.target.paths.values(), *documents)}
        found.add(str(place.manifest))
    if _describes_nothing(place.manifest):
        found.add(str(place.manifest))
    return frozenset(found)


def _describes_nothing(manifest: Path) -> bool:
    """Whether this is a manifest of outputs that somebody has removed, all of them."""
    try:
        outputs = Listing.read(manifest).manifest().outputs
    except (FileNotFoundError, CkptToolError):
        return False
    return not any(os.path.lexists(manifest.parent / output.path) for output in outputs)


def is_complete(plan: Plan) -> bool:
    """Whether all that a plan is to write is there, as its manifest or record says."""
    return not journal_of(place_of(plan).listing).exists() and _is_listed(plan, place_of(plan))


def _is_listed(plan: Plan, place: Place) -> bool:
    wanted = {str(Path(path)) for path in plan.target.paths.values()}
    for path in (place.listing, place.manifest):
        try:
            listing = Listing.read(path)
            head = place.head if path == place.listing else place.origin.head()
            said = {**listing.head.entries, "outputs": None}
            if said != {**head, "outputs": None}:
                continue
            outputs = [
                output
                for output in listing.manifest().outputs
                if str(path.parent / output.path) in wanted
            ]
        except (FileNotFoundError, CkptToolError):
            continue  # it says nothing, and is replaced only if that is asked for
        is_all = {str(path.parent / output.path) for output in outputs} == wanted
        if is_all and not any(output_problems(path.parent, outputs)):
            return True
    return False


def check_inputs(plan: Plan) -> None:
    """Look whether the source is as it was when its headers were read.

    Raises
    ------
    ExecutionError
        A file of it was written to or is gone, so the outputs may hold a mixture.
    """
    changed = list(changed_inputs(plan))
    if changed:
        raise ExecutionError(str(place_of(plan).listing), f"{shorten(changed, 3)}; {MIXTURE}")
