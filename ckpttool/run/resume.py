"""What an earlier run has left where a plan is to write, and whether it can be gone on from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from pathlib import Path

from ckpttool.errors import CkptToolError, ExecutionError, FormatError
from ckpttool.model.catalog import Stamp
from ckpttool.model.manifest import JOURNAL, Listed, differences
from ckpttool.model.notes import Note
from ckpttool.model.plan import Document, Plan
from ckpttool.model.strategy import count, shorten
from ckpttool.run.batch import place_of
from ckpttool.run.journal import Unfinished, listed_in, read_journal, resume_problems
from ckpttool.run.listed import find_intact
from ckpttool.run.manifest import Listing, output_problems
from ckpttool.run.origin import changed_inputs
from ckpttool.run.partial import stamp_of
from ckpttool.run.sets import (
    Place,
    busy_problem,
    find_records,
    holder_of,
    journal_of,
)

MIXTURE = "what was made of it may be a mixture, so write all of it anew"


def find_remains(
    plan: Plan,
    executor: Executor,
    problems: list[str],
    notes: list[Note],
    may_replace: bool = False,
) -> tuple[frozenset[str], Mapping[str, Stamp]]:
    """Files that may be replaced, since a run that did not end wrote them and nobody touched them.

    Parameters
    ----------
    plan
        What is to be written.
    executor
        Reads outputs of which nothing but their contents tells that they are what a run wrote.
    problems, notes
        What stands in the way is added to these, and what is to be known.
    may_replace
        Whether everything else may be replaced, too.

    Returns
    -------
    ours, proven
        The files; and `Plan.proven`.
    """
    place = place_of(plan)
    folder = place.manifest.parent
    if not folder.is_dir():
        return frozenset(), {}
    own = journal_of(place.listing)
    names = {os.path.relpath(path, folder) for path in plan.target.paths.values()}
    found: set[str] = set()
    proven: dict[str, Stamp] = {}
    for path in {own, journal_of(place.manifest), *find_records(place.manifest, JOURNAL)}:
        try:
            before = read_journal(path)
        except FormatError as error:
            problems += [str(error)] if path == own else []
            continue
        if before is None:
            continue
        unclear = names & before.complete.keys() - before.untouched(folder, {}).keys()
        if (plan.is_resumed or not may_replace) and holder_of(path) is None:
            lines = (before.lines[before.complete[name]] for name in sorted(unclear))
            proven |= find_intact(folder, listed_in(path, lines), executor)
        found |= {str(folder / name) for name in before.untouched(folder, proven)}
        if path == own:
            found |= {str(Path(one.path)) for one in plan.documents if _is_written(one)}
            _tell(plan, place, before, len(before.kept(folder, proven)), problems, notes)
    if plan.is_resumed:
        listed, intact = _find_listed(plan, place, executor, problems)
        proven |= intact
        found |= listed
    if _describes_nothing(place.manifest):
        found.add(str(place.manifest))
    return frozenset(found), proven


def _tell(
    plan: Plan,
    place: Place,
    before: Unfinished,
    kept: int,
    problems: list[str],
    notes: list[Note],
) -> None:
    """Say what stands in the way of going on from a journal, or that it is gone on from."""
    path = journal_of(place.listing)
    by = holder_of(path)
    if by is not None:
        problems.append(busy_problem(path, by))
        return
    if plan.is_resumed:
        changes = list(differences(place.origin, before.origin))
        problems += resume_problems(path, changes) if changes else []
    if kept:
        what = f"{kept} of {count(len(plan.target.paths), 'output')}"
        then = "are kept" if plan.is_resumed else "are written anew (--resume keeps them)"
        text = f"{place.listing}: a run did not end, {what} that it left complete {then}"
        notes.append(Note("unfinished", text))


def _describes_nothing(manifest: Path) -> bool:
    """Whether this is a manifest of outputs that somebody has removed, all of them."""
    try:
        outputs = Listing.read(manifest).manifest().outputs
    except (FileNotFoundError, CkptToolError):
        return False
    return not any(os.path.lexists(manifest.parent / output.path) for output in outputs)


def is_complete(plan: Plan) -> bool:
    """Whether all that a plan is to write is there, as its manifest or record says."""
    place = place_of(plan)
    if journal_of(place.listing).exists():
        return False
    listing = _listing_of(plan, place)
    return listing is not None and all(
        plan.proven.get(output.path) == stamp_of(place.manifest.parent / output.path)
        for output in _changed_since(plan, listing)
    )


def _find_listed(
    plan: Plan, place: Place, executor: Executor, problems: list[str]
) -> tuple[set[str], dict[str, Stamp]]:
    """The files of a set that is complete, and which of them its hashes prove; none if changed.

    What was changed since is added to ``problems``.
    """
    listing, folder = _listing_of(plan, place), place.manifest.parent
    if listing is None:
        return set(), {}
    proven = find_intact(folder, _changed_since(plan, listing), executor)
    wrong = [one.path for one in _changed_since(plan, listing) if one.path not in proven]
    if wrong:
        named = shorten((str(folder / name) for name in wrong), 3)
        problems.append(f"{named}: not what {listing.path} says was written; has it been changed?")
        return set(), {}
    documents = [document.path for document in plan.documents]
    files = (*plan.target.paths.values(), *documents, str(place.manifest))
    return {str(Path(path)) for path in files}, proven


def _listing_of(plan: Plan, place: Place) -> Listing | None:
    """The manifest or record of this plan, if all outputs are there, of the right size."""
    if not all(_is_written(document) for document in plan.documents):
        return None
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
            return listing
    return None


def _is_written(document: Document) -> bool:
    try:
        return Path(document.path).read_bytes() == document.data
    except OSError:
        return False


def _changed_since(plan: Plan, listing: Listing) -> Iterator[Listed]:
    """Outputs of a plan that were written to, or moved here, after they were listed."""
    folder, listed = listing.path.parent, listing.path.stat().st_mtime_ns
    wanted = {str(Path(path)) for path in plan.target.paths.values()}
    for output in listing.outputs():
        stamp = stamp_of(folder / output.path)
        if str(folder / output.path) in wanted and (stamp is None or stamp.ctime_ns > listed):
            yield output


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


def tell_changes(plan: Plan) -> str:
    """The same for a run that has failed already: what to add to its message, if anything."""
    try:
        changed = list(changed_inputs(plan))
    except OSError:  # which is the failure, or goes with it
        return ""
    return f"; {shorten(changed, 3)}; {MIXTURE}" if changed else ""
