"""A set that was complete where a plan is to write: what its manifest or record says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

from ckpttool.errors import CkptToolError, FormatError
from ckpttool.formats.reading import is_there, read_file
from ckpttool.model.catalog import Stamp
from ckpttool.model.manifest import Listed
from ckpttool.model.notes import Note
from ckpttool.model.plan import Document, Plan
from ckpttool.model.strategy import count, shorten
from ckpttool.run.batch import place_of
from ckpttool.run.listed import OpenProgress, find_intact
from ckpttool.run.manifest import Listing
from ckpttool.run.partial import stamp_of
from ckpttool.run.sets import Place, journal_of


def is_complete(plan: Plan) -> bool:
    """Whether all that a plan is to write is there, as its manifest or record says."""
    place = place_of(plan)
    has_left = journal_of(place.listing).exists()  # which is to be looked through, and to go
    return not has_left and complete_listing(plan, place, plan.proven) is not None


def complete_listing(plan: Plan, place: Place, proven: Mapping[str, Stamp]) -> Listing | None:
    """The manifest or record that says that all of a plan is written, if all is there."""
    listing = _listing_of(plan, place) if all(map(is_written, plan.documents)) else None
    is_so = listing is not None and all(
        stamp is not None and (listing.knows(output, stamp) or proven.get(path) == stamp)
        for path, output, stamp in _outputs(plan, listing)
    )
    return listing if is_so else None


def find_listed(
    plan: Plan,
    place: Place,
    executor: Executor,
    problems: list[str],
    notes: list[Note],
    may_replace: bool,
    open_progress: OpenProgress,
) -> tuple[set[str], dict[str, Stamp]]:
    """The files of a set that was complete, and which of them its hashes prove; none if changed.

    What is gone is to be written again, as a note says.  What was changed since is added to
    ``problems``, unless it may be replaced.
    """
    listing, folder = _listing_of(plan, place), place.manifest.parent
    if listing is None:
        return set(), {}
    gone, there, unclear = [], [], {}
    for path, output, stamp in _outputs(plan, listing):
        if stamp is None:
            gone.append(str(folder / path))
        elif listing.knows(output, stamp):
            there.append(str(folder / path))
        else:  # written to, or moved here, after it was listed
            unclear[path] = stamp.nbytes
    proven: dict[str, Stamp] = {}
    if unclear:
        outputs = (output for path, output, _ in _outputs(plan, listing) if path in unclear)
        with open_progress(sum(unclear.values())) as on_progress:
            proven = find_intact(folder, outputs, plan.target.attrs, executor, on_progress)
    there += [str(folder / path) for path in proven]
    wrong = [str(folder / path) for path in unclear if path not in proven]
    for path in (document.path for document in plan.documents if not is_written(document)):
        (wrong if is_there(path) else gone).append(path)
    if gone and listing.path != place.listing:
        text = f"{listing.path}: {_are_gone(gone)}; the same command without --part writes what is "
        problems.append(f"{text}gone of a set that is committed")
    elif wrong and not may_replace:
        text = f"not what {listing.path} says was written; has it been changed?"
        problems.append(f"{shorten(wrong, 3)}: {text}")
    else:
        if gone and there:
            text = f"{listing.path}: {_are_gone(gone)}, written again; the others are kept"
            notes.append(Note("unfinished", text))
        documents = [document.path for document in plan.documents]
        return {str(Path(path)) for path in (*there, *documents, str(place.manifest))}, proven
    return set(), {}


def _are_gone(paths: Sequence[str]) -> str:
    is_one = len(paths) == 1
    return f"{count(len(paths), 'output')} {'is' if is_one else 'are'} gone ({shorten(paths, 3)})"


def _listing_of(plan: Plan, place: Place) -> Listing | None:
    """The manifest or record of this plan, there or not what it lists."""
    wanted = paths_of(plan)
    for path in dict.fromkeys((place.listing, place.manifest)):
        listing = place.find_listing(path)
        if listing is None:
            continue
        try:
            outputs = listing.manifest().outputs
        except (FileNotFoundError, FormatError):
            continue  # cut short
        if wanted <= {str(path.parent / output.path) for output in outputs}:
            return listing
    return None


def _outputs(plan: Plan, listing: Listing) -> Iterator[tuple[str, Listed, Stamp | None]]:
    """The outputs of a plan: the path and what a listing says of each, and what is there now."""
    folder, wanted = listing.path.parent, paths_of(plan)
    for output in listing.outputs():
        if str(folder / output.path) in wanted:
            yield output.path, output, stamp_of(folder / output.path)


def paths_of(plan: Plan) -> set[str]:
    """The paths of its outputs."""
    return {str(Path(path)) for path in plan.target.paths.values()}


def is_written(document: Document) -> bool:
    """Whether it is there, as it is to be."""
    try:
        return read_file(document.path) == document.data
    except OSError:
        return False


def describes_nothing(manifest: Path) -> bool:
    """Whether this is a manifest of outputs that somebody has removed, all of them."""
    try:
        outputs = Listing.read(manifest).manifest().outputs
    except (FileNotFoundError, CkptToolError):
        return False
    return not any(is_there(manifest.parent / output.path) for output in outputs)
