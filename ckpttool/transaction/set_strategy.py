"""The strategy of a set of outputs: what its manifest says of it, and where its files are now.

Where layouts are known the manifest has them, so that no file is needed.  For other sets, and for
messages, it names files.  A manifest has the SHA-256 of each strategy file.  Any file with that
hash is the strategy, whatever it is called.  It is looked for where the manifest says, then beside
the outputs, beside their folder, and one folder above that.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path, PurePath

from msgspec import Struct

from ckpttool.formats.local import is_file, list_readable, read_file, stat_file
from ckpttool.model.manifest import MANIFEST, Provenance, StrategyFile
from ckpttool.model.strategy import Strategy
from ckpttool.problems import Diagnostic, FormatError
from ckpttool.transaction.sealed_files import ManifestFile
from ckpttool.wording import shorten


class RecordedStrategy(Struct, frozen=True):
    """The strategy of the rank files of a set, as its manifest names it.

    Attributes
    ----------
    manifest
        The manifest.
    targets
        The strategy files of the target.
    written
        The strategy file that was written with the outputs, if any.
    unclear
        The strategy files of an old manifest, which does not say which are of the target.
    """

    manifest: Path
    targets: tuple[StrategyFile, ...]
    written: tuple[StrategyFile, ...]
    unclear: tuple[StrategyFile, ...]

    @classmethod
    def of(cls, manifest: Path, provenance: Provenance) -> RecordedStrategy | None:
        """Return the strategy that a manifest names; None if it names no strategy."""
        files = provenance.strategies
        if not files:
            return None
        targets = tuple(file for file in files if file.role == "target")
        unclear: tuple[StrategyFile, ...] = ()
        if all(file.role is None for file in files):  # of the target are the last
            targets, unclear = (files, ()) if len(files) == 1 else ((), files)
        written = provenance.dst_strategies
        return cls(manifest, targets, written, unclear)

    def __str__(self) -> str:
        files = self.targets or self.unclear[-1:] or self.written
        return shorten((PurePath(file.path).name for file in files), 1)

    def is_of(self, paths: Collection[str]) -> bool:
        """Return whether these files are the strategy, by their SHA-256.

        Those of the target are the last that an old manifest names.
        """
        hashes = {sha256(read_file(path)).hexdigest() for path in paths}
        either = (self.written, self.targets, self.unclear[-len(hashes) :])
        return any(hashes == {file.sha256 for file in files} for files in either)

    def find(self) -> tuple[str, ...]:
        """Return the paths of the strategy files; none if one of them is not there."""
        folder = self.manifest.parent
        for files in (self.written, self.targets):
            paths = [_find(folder, file) for file in files]
            if paths and None not in paths:
                return tuple(dict.fromkeys(path for path in paths if path is not None))
        return ()

    @property
    def why_not_found(self) -> str:
        """Why `find` returns no paths, for people."""
        if not (self.targets or self.written):
            return f"{self.manifest} does not say which of its strategies is that of the outputs"
        return "no file beside the outputs, or one folder up, has its SHA-256"


class RecordedSet(Struct, frozen=True):
    """The facts in a manifest that say how its set is read."""

    manifest: ManifestFile
    provenance: Provenance
    written: Strategy | None
    named: RecordedStrategy | None

    @classmethod
    def read(cls, folder: str | Path) -> RecordedSet | None:
        """Read the manifest in a folder; None if there is none.

        Raises
        ------
        FormatError
            It is damaged or cannot be read.
        """
        path = Path(folder, MANIFEST)
        if not is_file(path):
            return None
        manifest = ManifestFile.read(path)
        provenance = manifest.provenance()
        named = RecordedStrategy.of(path, provenance)
        written = provenance.layouts.strategy(str(path)) if provenance.layouts else None
        return cls(manifest, provenance, written, named)

    def lists(self, paths: Iterable[str]) -> bool:
        """Return whether the manifest lists all these files."""
        folder = self.manifest.path.parent
        outputs = {os.path.normpath(folder / output.path) for output in self.manifest.planned()}
        return outputs.issuperset(map(os.path.normpath, paths))

    def find_files(self) -> tuple[str, ...]:
        """Return the files of the strategy that it names; none if one is not there.

        The result is also empty if nothing shows which name each tensor has in them.
        """
        if self.named is None or self.provenance.has_unknown_names:
            return ()
        return self.named.find()

    def other_than(self, strategy: Strategy) -> RecordedStrategy | None:
        """Return the strategy that the manifest names, if it is another than the given one."""
        is_given = bool(strategy.files) and not strategy.is_as_written
        if self.named is None or not is_given or self.named.is_of(strategy.files):
            return None
        return self.named

    def unknown_names(self, renamed: Mapping[str, str], hint: str) -> Diagnostic:
        """Return the problem of a set that was renamed before manifests had layouts or names."""
        path = self.manifest.path
        message = "renamed by an older ckpttool, so old and new names may be mistaken"
        facts = f"{path} has {shorten((f'{new} for {old}' for new, old in renamed.items()), 2)}"
        return Diagnostic("strategy", message, hint=hint, facts=facts, where=str(path.parent))


def read_recorded(folder: str | Path) -> RecordedSet | None:
    """Return what the manifest in a folder says; None without one that can be read.

    `ckpttool.checks.manifest_hashes` reports a manifest that cannot be read.
    """
    try:
        return RecordedSet.read(folder)
    except FormatError:
        return None


def _find(folder: Path, file: StrategyFile) -> str | None:
    tried = set()
    for path in _places(folder, file):
        if path not in tried and is_file(path) and _is_the_file(path, file):
            return str(path)
        tried.add(path)
    return None


def _places(folder: Path, file: StrategyFile) -> Iterator[Path]:
    yield Path(os.path.normpath(folder / file.path))  # links above do not count, as when written
    yield folder / file.path
    ups = ("", os.pardir, os.path.join(os.pardir, os.pardir))  # noqa: PTH118
    bases = [Path(os.path.normpath(folder / up)) for up in ups]
    below = [part for part in PurePath(file.path).parts if part not in (os.pardir, os.sep)]
    yield from (Path(base, *below) for base in bases)
    for base in bases:
        yield from list_readable(base)


def _is_the_file(path: Path, file: StrategyFile) -> bool:
    try:
        is_of_size = stat_file(path).nbytes == file.nbytes
        return is_of_size and sha256(read_file(path)).hexdigest() == file.sha256
    except OSError:
        return False  # not one that can be taken
