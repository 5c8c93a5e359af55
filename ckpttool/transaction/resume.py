"""What an earlier run left at a destination, and which of its outputs can be kept."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ckpttool.errors import CkptToolError, ExecutionError, FormatError
from ckpttool.formats import read_index
from ckpttool.formats.reading import is_there, read_file
from ckpttool.formats.stopping import OnProgress, OpenProgress, no_progress, result_of
from ckpttool.model.catalog import FileIndex, Stamp, StoredTensor
from ckpttool.model.manifest import JOURNAL, MANIFEST, Hashed, Listed, Origin, differences, hashed
from ckpttool.model.notes import Note
from ckpttool.model.plan import Document, Plan
from ckpttool.model.strategy import count, shorten
from ckpttool.run.partial import PARTIAL, access_problem, stamp_of
from ckpttool.storage.checksum import verify_checksum
from ckpttool.storage.digest import unit_digests
from ckpttool.storage.locks import holder_of
from ckpttool.transaction.journal import (
    Place,
    Unfinished,
    busy_problem,
    find_records,
    journal_of,
    journal_that_tells_of,
    listed_in,
    read_journal,
    record_of,
    resume_problems,
)
from ckpttool.transaction.manifest import (
    Listing,
    changed_inputs,
    manifest_of,
    options_told,
    output_problems,
)
from ckpttool.transaction.parts import place_of

BUFFER_BYTES = 8 << 20


def find_intact(
    folder: Path,
    outputs: Iterable[Listed],
    attrs: Collection[str],
    executor: Executor,
    on_progress: OnProgress,
) -> dict[str, Stamp]:
    """Outputs that hold what is listed and these attributes, every byte read; as they were then.

    Of a checksum no listing tells, so it is verified.
    """
    found = {}
    for output in outputs:
        name, stamp = str(folder / output.path), stamp_of(folder / output.path)
        if stamp is None or any(content_problems_of(folder / MANIFEST, output, None, name)):
            continue
        index = read_index(name)
        stored = index.tensors
        looks = [(one, executor.submit(hash_tensor, stored[one.name])) for one in output.tensors]
        is_equal = True
        for one, hashes in looks:
            is_equal &= result_of(hashes) == one.sha256
            on_progress(stored[one.name].meta.nbytes)
        is_equal &= index.attrs.keys() >= set(attrs)
        if is_equal and "crc_num" in index.attrs:
            is_equal = result_of(executor.submit(verify_checksum, index)) is None
        if is_equal and stamp_of(folder / output.path) == stamp:
            found[output.path] = stamp
    return found


def content_problems_of(
    path: Path, output: Listed, index: FileIndex | None, name: str
) -> Iterator[str]:
    """What is wrong with an output, by its size and its header."""
    yield from (wrong := list(output_problems(path.parent, [output])))
    if wrong:
        return
    try:
        index = index or read_index(name)
    except FormatError as error:
        yield f"{output.path}: {error.reason}"
        return
    found = {one.meta.name: hashed(one.meta, {}) for one in index.tensors.values()}
    wanted = {one.name: one for one in output.tensors}
    for tensor in sorted({*found, *wanted}):
        mine, said = found.get(tensor), wanted.get(tensor)
        if _describe_tensor(mine) != _describe_tensor(said):
            expected = f"expected {_describe_tensor(said)}, found {_describe_tensor(mine)}"
            yield f"{output.path}: {tensor}: {expected}"


def _describe_tensor(one: Hashed | None) -> str:
    return "nothing" if one is None else f"{one.dtype} {one.shape}"


def hash_tensor(tensor: StoredTensor) -> tuple[str, ...]:
    """The hashes of a stored tensor's units; runs on a worker."""
    return hashed(tensor.meta, dict(enumerate(unit_digests(tensor, BUFFER_BYTES)))).sha256


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


MIXTURE = "what was made of it may be a mixture, so write all of it anew"


def find_remains(
    plan: Plan,
    executor: Executor,
    problems: list[str],
    notes: list[Note],
    may_replace: bool = False,
    open_progress: OpenProgress = no_progress,
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
    open_progress
        Is told how many bytes are to be read, and shows how many were.

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
    begun: set[str] = set()
    proven: dict[str, Stamp] = {}
    for path, before in _journals(place, problems):
        begun |= before.begun | before.complete.keys()
        if (plan.is_resumed or not may_replace) and holder_of(path) is None:
            unclear = names & before.complete.keys() - before.untouched(folder, {}).keys()
            proven |= _prove(plan, path, before, sorted(unclear), executor, open_progress)
        found |= {str(folder / name) for name in before.untouched(folder, proven)}
        if path == own:
            found |= {str(Path(one.path)) for one in plan.documents if is_written(one)}
            _tell(plan, place, before, len(before.kept(folder, proven)), problems, notes)
    partials = [Path(str(folder / name) + PARTIAL) for name in sorted(names - begun)]
    problems += _others(partials, may_replace)
    if not may_replace:
        told = list(_about_set(plan, place, proven))
        problems += told
        documents = (str(Path(document.path)) for document in plan.documents)
        found |= {str(place.manifest), *paths_of(plan), *documents} if told else set()
    if plan.is_resumed:
        listed, intact = find_listed(
            plan, place, executor, problems, notes, may_replace, open_progress
        )
        proven |= intact
        found |= listed
    if describes_nothing(place.manifest):
        found.add(str(place.manifest))
    return frozenset(found), proven


def _journals(place: Place, problems: list[str]) -> Iterator[tuple[Path, Unfinished]]:
    """What runs left that did not end; what cannot be read of a set's own is a problem."""
    own = journal_of(place.listing)
    held = {own, journal_of(place.manifest)}
    for path in sorted(held.union(find_records(place.manifest, JOURNAL))):
        if closed := access_problem(path, os.R_OK | os.W_OK):
            problems += [closed] if path in held or not place.is_part else []
            continue
        try:
            before = read_journal(path)
        except FormatError as error:
            problems += [str(error)] if path == own else []
            continue
        if before is not None:
            yield path, before


def _prove(
    plan: Plan,
    journal: Path,
    before: Unfinished,
    names: Sequence[str],
    executor: Executor,
    open_progress: OpenProgress,
) -> dict[str, Stamp]:
    """Of outputs that were touched since, those whose contents are as a journal tells."""
    folder = manifest_of(plan).parent
    lines = (before.lines[before.complete[name]] for name in names)
    nbytes = sum(stamp.nbytes for name in names if (stamp := stamp_of(folder / name)))
    with open_progress(nbytes) if nbytes else no_progress(0) as on_progress:
        listed = listed_in(journal, lines)
        return find_intact(folder, listed, plan.target.attrs, executor, on_progress)


def look_at_places(plan: Plan) -> dict[str, Stamp]:
    """What lies where a plan is to write, for `Plan.seen`."""
    documents = (document.path for document in plan.documents)
    paths = (*plan.target.paths.values(), *documents, str(manifest_of(plan)))
    return {path: stamp for path in paths if (stamp := stamp_of(Path(path))) is not None}


def new_at_places(plan: Plan) -> Iterator[str]:
    """The problem that since a plan was made another run has written where it is to write."""
    if plan.seen is None:
        return
    new = [path for path, stamp in look_at_places(plan).items() if plan.seen.get(path) != stamp]
    if new:
        text = "written by another run since this one began; --overwrite replaces what is there"
        yield f"{shorten(new, 3)}: {text}"


def _others(partials: Iterable[Path], may_replace: bool) -> Iterator[str]:
    """Messages for temporary files that no journal of this set knows of."""
    left: dict[Path | None, list[str]] = {}
    for path in filter(_is_file, partials):
        journal = journal_that_tells_of(path)
        if holder_of(path) is not None:
            yield busy_problem(
                path, "a run of another set" if journal is None else f"see {journal}"
            )
        elif not may_replace:
            left.setdefault(journal, []).append(str(path))
    for journal, paths in left.items():
        text = "the name of a temporary file, and no run of ckpttool that did not end tells of it"
        remedy = "move it away, or --overwrite replaces it"
        if journal is not None:
            text = f"left half-written by a run that did not end, of which {journal} tells"
            remedy = "finish that with its own command and --resume, or --overwrite replaces it"
        yield f"{shorten(paths, 3)}: {text}; {remedy}"


def _about_set(plan: Plan, place: Place, proven: Mapping[str, Stamp]) -> Iterator[str]:
    """What there is to say of a set that is there, besides that its files are."""
    if plan.part is not None:
        ending = f"-of-{plan.part.count}.json"
        others = [str(one) for one in find_records(place.manifest) if not one.name.endswith(ending)]
        if others:
            text = f"another number of parts than --part {plan.part.number}/{plan.part.count}"
            text += " says; take that for all of them, or remove the records that are not wanted"
            yield f"{shorten(others, 3)}: {text}"
            return
    if describes_nothing(place.listing):
        return  # all of it was removed, so nothing stands in the way
    if not plan.is_resumed:
        listing = complete_listing(plan, place, proven) if plan.target.paths else None
        if listing is not None:
            text = f"{listing.path} says that this very command has written all of it "
            text += f"({count(len(plan.target.paths), 'output')})"
            yield f"{text}; --resume keeps it, --overwrite writes it anew"
        return
    for path in dict.fromkeys((place.listing, place.manifest)):
        with suppress(FileNotFoundError):
            try:
                listing = Listing.read(path)
                origin = _origin_in(listing)
            except FormatError as error:
                yield f"{error}; --resume cannot do without it, --overwrite writes all anew"
                continue
            mine = place.origin if place.is_part else place.origin.as_told_at(listing.mtime_ns)
            for change in differences(mine, origin) if path == place.listing else ():
                text = f"{path}: --resume: what is there is of another run: {change}"
                yield f"{text}; write to another place, or --overwrite writes all anew"


def _origin_in(listing: Listing) -> Origin:
    """The run that a listing is of; what a manifest does not tell of it, its outputs do."""
    origin, outputs = listing.head.origin(), listing.manifest().outputs
    if origin.options or not outputs:
        return origin
    paths = [(output.rank, output.path) for output in outputs]
    return replace(origin, options=tuple(options_told(outputs[0].format, paths)))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


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
        if not changes and not kept:
            text = f"{place.listing}: a run did not end, and nothing of it could be kept; "
            notes.append(Note("unfinished", f"{text}this one begins anew"))
    if kept:
        what = f"{kept} of {count(len(plan.target.paths), 'output')}"
        then = "are kept" if plan.is_resumed else "are written anew (--resume keeps them)"
        text = f"{place.listing}: a run did not end, {what} that it left complete {then}"
        notes.append(Note("unfinished", text))


def count_kept(plan: Plan) -> int:
    """How many outputs of a run that was ended ``--resume`` keeps; the run holds nothing more."""
    listing = manifest = manifest_of(plan)
    if plan.part is not None:
        listing = record_of(manifest, plan.part.number, plan.part.count)
    before = read_journal(journal_of(listing))
    return 0 if before is None else len(before.kept(manifest.parent, {}))


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
