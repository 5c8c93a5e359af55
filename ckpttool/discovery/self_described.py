"""Common parts of self-described checkpoints: numbered saves, and the files in their metadata.

``iteration_00000012`` and ``global_step_12`` lie in a root, a folder for each save.  When a save is
complete, the trainer writes its number into a file beside them, the tracker.  Numbers are compared
as numbers.  Each kind decides which saves are complete, and which one is read by default.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from msgspec import Struct

from ckpttool.discovery.file_names import NUMBER
from ckpttool.discovery.saves import FoundStep
from ckpttool.formats import read_index, read_indexes
from ckpttool.formats.local import is_file, is_folder, list_folder, open_file
from ckpttool.lazy import compile_late
from ckpttool.model.tensors import CutShortError, FileIndex, StoredTensor
from ckpttool.problems import COPY_AGAIN, Diagnostic, Diagnostics, FormatError, PlanError
from ckpttool.secret import Secret
from ckpttool.wording import count, shorten

BARE_NAME = compile_late(r"(?!\.\.?$)[^/\0]+")  # in the same folder

FilesByName = Mapping[str, FileIndex | FormatError]


class NumberedSaves(Struct, frozen=True):
    """The names that a trainer gives its saves.

    ``noun`` is what the number counts, and group 1 of ``folder_name`` is the number.  ``tracker``
    is the file with the number of the last complete save.
    """

    noun: str
    folder_name: re.Pattern[str]
    tracker: str

    def number(self, folder: Path) -> int | None:
        """Return the number in a folder's name, or None."""
        name = folder.name if folder.name not in ("", "..") else folder.absolute().name
        match = self.folder_name.fullmatch(name)
        return None if match is None else int(match[1])

    def find_folders(self, root: Path) -> dict[Path, int]:
        """Return the folders of saves in ``root``, and their numbers."""
        numbers = {path: self.number(path) for path in list_folder(root)}
        return {path: n for path, n in numbers.items() if n is not None and is_folder(path)}

    def list_steps(
        self,
        root: Path,
        chosen: Path | None,
        describe: Callable[[Path, str | None, bool], FoundStep],
    ) -> list[tuple[int, FoundStep]]:
        """Return each save in ``root`` with its number, the first one first.

        ``describe`` gets its folder, what ``--step`` takes for it, and whether it is ``chosen``.
        """
        folders = self.find_folders(root)
        times = Counter(folders.values())
        return [
            (
                number,
                describe(path, path.name if times[number] > 1 else str(number), path == chosen),
            )
            for path, number in sorted(folders.items(), key=lambda item: (item[1], item[0]))
        ]

    def label(self, folder: Path) -> str | None:
        """Return the number in a folder's name as ``--step`` takes it, or None."""
        number = self.number(folder)
        return None if number is None else str(number)

    def is_wanted(self, folder: Path, wanted: str) -> bool:
        """Return whether ``--step`` means this folder, by its number or name."""
        is_number = NUMBER.fullmatch(wanted) is not None and int(wanted) == self.number(folder)
        return is_number or wanted == folder.absolute().name

    def require_wanted(self, folder: Path, wanted: str | None) -> None:
        """Raise `PlanError` if ``folder`` is another save than ``--step`` means."""
        if wanted is not None and not self.is_wanted(folder, wanted):
            hint = f"{quote(str(folder.absolute().parent))} as SRC, or omit --step"
            message = f"not {self.noun} {wanted}"
            raise PlanError([Diagnostic("source", message, hint=hint, where=str(folder))])

    def read_tracker(self, root: Path) -> int | None:
        """Return the number of the last complete save, or None if no file names it.

        A file that holds something else is a FormatError.
        """
        path = root / self.tracker
        if not is_file(path):
            return None
        with open_file(path) as file:
            number = file.read(100).strip()
        if not number.isdigit():
            reason = f"expected the number of a complete {self.noun}, found {number!r}"
            raise FormatError(str(path), None, reason)
        return int(number)

    def choose(self, root: Path, wanted: str, complete: Collection[Path] | None = None) -> Path:
        """Return the folder that ``--step`` means; PlanError if none or several have the name.

        ``complete`` has the folders of complete saves, for a hint; None if nothing shows it.
        """
        folders = self.find_folders(root)
        chosen = [path for path in folders if self.is_wanted(path, wanted)]
        if len(chosen) == 1:
            return chosen[0]
        if not chosen:
            raise self.problem(root, f"no folder of {self.noun} {wanted}", complete)
        message = f"{len(chosen)} folders of {self.noun} {folders[chosen[0]]}"
        facts, hint = shorten((path.name for path in chosen), 3), f"{chosen[0]} as SRC"
        raise PlanError([Diagnostic("source", message, hint=hint, facts=facts, where=str(root))])

    def problem(
        self, root: Path, message: str, complete: Collection[Path] | None = None
    ) -> PlanError:
        """Return the error of a save that cannot be chosen, with the saves that can."""
        folders = self.find_folders(root)
        numbers = sorted(set(folders.values()), reverse=True)
        facts = f"found {shorten(map(str, numbers), 3) or 'none'}"
        usable = [folders[path] for path in folders if complete is None or path in complete]
        hint = f"--step {max(usable)}" if usable else ""
        return PlanError([Diagnostic("source", message, hint=hint, facts=facts, where=str(root))])

    def note_choice(
        self,
        folders: Mapping[Path, int],
        number: int,
        unfinished: Collection[Path],
        diagnostics: Diagnostics,
        further: Iterable[str] = (),
    ) -> None:
        """Note which of several saves is read, which were not finished, and ``further`` facts."""
        if len(folders) > 1:
            message = f"{self.noun} {number} is read, of {count(len(folders), self.noun)}"
            names = shorten((path.name for path in sorted(unfinished, key=folders.__getitem__)), 3)
            facts = "; ".join([*([f"not finished: {names}"] if names else []), *further])
            diagnostics.add(Diagnostic("step", message, facts=facts))


# ---------------------------------------------------------------------- the headers of the files


def read_files(
    paths: Mapping[int, str],
    key: Secret | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[dict[int, FileIndex], dict[int, FormatError]]:
    """Return the headers of files by their number, and the errors of the others."""
    read = dict(zip(paths, read_indexes(paths.values(), key, on_progress), strict=True))
    files = {n: file for n, file in read.items() if isinstance(file, FileIndex)}
    return files, {n: error for n, error in read.items() if isinstance(error, FormatError)}


def read_single(
    path: str, key: Secret | None
) -> tuple[dict[int, FileIndex], dict[int, FormatError]]:
    """Return the header of a single file, or the error if it is cut short; others are raised."""
    try:
        return {0: read_index(path, key)}, {}
    except CutShortError as error:
        return {}, {0: error}


def read_existing_files(folder: Path, names: Iterable[str]) -> FilesByName:
    """Return the headers of those files that exist, or their errors."""
    there = [name for name in names if is_file(folder / name)]
    return dict(zip(there, read_indexes(str(folder / name) for name in there), strict=True))


def errors_of(files: FilesByName) -> dict[int, FormatError]:
    """Return the errors of damaged files for a catalog: a rank may have two, so not by rank."""
    return dict(enumerate(file for file in files.values() if isinstance(file, FormatError)))


def left_of(file: FileIndex | FormatError | None) -> FileIndex | None:
    """Return the header of a file, or what is left of one that is cut short; None for others."""
    if isinstance(file, CutShortError):
        return file.remains.index
    return file if isinstance(file, FileIndex) else None


def damages(files: FilesByName) -> Iterator[str]:
    """Yield what is wrong with the headers of files, equal reasons together."""
    of_reason: dict[str, list[str]] = defaultdict(list)
    for name, file in files.items():
        if isinstance(file, FormatError):
            of_reason[file.reason].append(name)
    yield from (f"{shorten(names, 1)}: {reason}" for reason, names in of_reason.items())


class Fault(NamedTuple):
    """A fault of a file; ``reason`` is "" if the file has an error of its own."""

    path: str
    reason: str = ""


def find_tensor(
    folder: Path, files: FilesByName, file: str, name: str, document: str
) -> StoredTensor | Fault:
    """Return the tensor ``name`` in a file that ``document`` lists, or why it is not there."""
    index, path = files.get(file), str(folder / file)
    if index is None:
        return Fault(path, "file not found")
    reason = "" if isinstance(index, FormatError) else f"lacks tensors that {document} lists"
    left = left_of(index)
    return (left and left.tensors.get(name)) or Fault(path, reason)


def describe_faults(
    faults: Iterable[tuple[Fault, str]], *, are_harmless: bool
) -> Iterator[Diagnostic]:
    """Yield a problem for every fault that makes slices missing, or notes on the other faults.

    Each fault comes with the tensor that it leaves without slices, or "" if other files have these.
    """
    lacking: dict[Fault, dict[str, None]] = {}
    for fault, name in sorted(faults, key=lambda item: not item[1]):  # harm first, else in order
        lacking.setdefault(fault, {}).update({name: None} if name else {})
    for (path, reason), names in lacking.items():
        if not reason or bool(names) is are_harmless:
            continue
        code, hint, facts = "faulty_replica", "", "other files have the slices"
        if names:
            facts = f"{count(len(names), 'parameter')} ({shorten(names, 3)})"
            code, hint, facts = "missing", COPY_AGAIN, f"no other file has these slices of {facts}"
        yield Diagnostic(code, reason, hint=hint, facts=facts, path=path, where=path)
