"""Folders of numbered saves, and the file that names the last complete one.

``iteration_00000012`` and ``global_step_12`` lie in a root, a folder for each save.  When a save is
complete, the trainer writes its number into a file beside them.  Numbers are compared as numbers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpttool.discovery.file_names import NUMBER
from ckpttool.formats.local import is_file, is_folder, list_folder, open_file
from ckpttool.problems import Diagnostic, Diagnostics, FormatError, PlanError
from ckpttool.wording import count, shorten


@dataclass(frozen=True, slots=True)
class NumberedSaves:
    """How a trainer names its saves.

    Attributes
    ----------
    noun
        What the number counts.
    folder_name
        The name of a save's folder; group 1 is the number.
    tracker
        The name of the file with the number of the last complete save.
    """

    noun: str
    folder_name: re.Pattern[str]
    tracker: str

    def number(self, folder: Path) -> int | None:
        """Return the number in a folder's name, or None."""
        match = self.folder_name.fullmatch(folder.absolute().name)
        return None if match is None else int(match[1])

    def find_folders(self, root: Path) -> dict[Path, int]:
        """Return the folders of saves in ``root``, and their numbers."""
        numbers = {path: self.number(path) for path in list_folder(root)}
        return {path: n for path, n in numbers.items() if n is not None and is_folder(path)}

    def is_wanted(self, folder: Path, wanted: str) -> bool:
        """Return whether ``--step`` means this folder, by its number or name."""
        is_number = NUMBER.fullmatch(wanted) is not None and int(wanted) == self.number(folder)
        return is_number or wanted == folder.absolute().name

    def require_wanted(self, folder: Path, wanted: str | None) -> None:
        """Raise `PlanError` if ``folder`` is another save than ``--step`` means."""
        if wanted is not None and not self.is_wanted(folder, wanted):
            hint = f"{folder.absolute().parent} as SRC, or omit --step"
            text = f"not {self.noun} {wanted}"
            raise PlanError([Diagnostic("source", text, hint=hint, where=str(folder))])

    def read_tracker(self, root: Path) -> int | None:
        """Return the number of the last complete save, or None if no file names it.

        Raises
        ------
        FormatError
            The file holds something else.
        """
        path = root / self.tracker
        if not is_file(path):
            return None
        with open_file(path) as file:
            text = file.read(100).strip()
        if not text.isdigit():
            reason = f"expected the number of a complete {self.noun}, found {text!r}"
            raise FormatError(str(path), None, reason)
        return int(text)

    def choose(
        self,
        root: Path,
        folders: Mapping[Path, int],
        wanted: str,
        complete: Collection[Path] | None = None,
    ) -> Path:
        """Return the folder that ``--step`` means.

        Parameters
        ----------
        root, folders
            The folder above, and what `find_folders` found there.
        wanted
            ``--step``.
        complete
            The folders of complete saves, for a hint; None if nothing shows it.

        Raises
        ------
        PlanError
            No folder has this number or name, or several have.
        """
        chosen = [path for path in folders if self.is_wanted(path, wanted)]
        if len(chosen) == 1:
            return chosen[0]
        if not chosen:
            raise self.problem(root, folders, f"no folder of {self.noun} {wanted}", complete)
        text = f"{len(chosen)} folders of {self.noun} {folders[chosen[0]]}"
        facts, hint = shorten((path.name for path in chosen), 3), f"{chosen[0]} as SRC"
        raise PlanError([Diagnostic("source", text, hint=hint, facts=facts, where=str(root))])

    def problem(
        self,
        root: Path,
        folders: Mapping[Path, int],
        text: str,
        complete: Collection[Path] | None = None,
    ) -> PlanError:
        """Return the error of a save that cannot be chosen, with the saves that can."""
        numbers = map(str, sorted(set(folders.values()), reverse=True))
        facts = f"found {shorten(numbers, 3) or 'none'}"
        newest = max(
            (folders[path] for path in folders if complete is None or path in complete),
            default=None,
        )
        hint = "" if newest is None else f"--step {newest}"
        return PlanError([Diagnostic("source", text, hint=hint, facts=facts, where=str(root))])

    def note_choice(
        self,
        folders: Mapping[Path, int],
        taken: int,
        unfinished: Collection[Path],
        diagnostics: Diagnostics,
        others: Iterable[str] = (),
    ) -> None:
        """Note which of several saves is read, which were not finished, and ``others``."""
        if len(folders) > 1:
            text = f"{self.noun} {taken} is read, of {count(len(folders), self.noun)}"
            names = shorten((one.name for one in sorted(unfinished, key=folders.__getitem__)), 3)
            facts = "; ".join([*([f"not finished: {names}"] if names else []), *others])
            diagnostics.add(Diagnostic("step", text, facts=facts))
