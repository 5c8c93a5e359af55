"""Files compared with the manifest of their set: sizes, headers, and hashes of contents.

Every command compares the files that it reads.  It hashes the units that distinguish a file from
all others of the set: mostly one unit a file, up to `SAMPLED_BYTES` in all.  So it finds an
exchanged file, and a changed one if the change is in these units.  verify reads all units with
``--deep`` or ``--check-manifest``, and a conversion compares the units that it reads as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, Future
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from ckpttool.concurrency import OnProgress, map_in_order, wait_result
from ckpttool.discovery.rank_folders import find_manifests, is_single_file, list_paths
from ckpttool.formats import read_index
from ckpttool.formats.local import is_file
from ckpttool.model.catalog import Catalog
from ckpttool.model.manifest import MANIFEST, AlikeOutputs, ListedOutput, Unit, list_outputs
from ckpttool.model.tensors import FileIndex, StoredTensor
from ckpttool.problems import Diagnostic, Diagnostics, FormatError, join_clauses
from ckpttool.storage.sampling import hash_unit, hash_units
from ckpttool.transaction.outputs import output_problems
from ckpttool.transaction.sealed_files import ManifestFile, remedy_for

SAMPLED_BYTES = 64 << 20  # of a set; a disk reads them in less than a second
MAX_IN_FLIGHT = 32
_WRITE_AGAIN = "the command that wrote the set, with --resume --overwrite"
_IGNORE = "put the file back, or --ignore-manifest to read it as it is"


class _File(Struct, frozen=True):
    """A file of a set: its path as it was given, its header, and its entry in the manifest."""

    path: str
    index: FileIndex
    output: ListedOutput


def _files_to_check(catalog: Catalog, path: Path) -> set[str] | None:
    if path.name != MANIFEST:
        return {_absolute(str(path).removesuffix(f".{MANIFEST}"))}
    return {_absolute(name) for name in list_paths(catalog)} if is_single_file(catalog) else None


def _absolute(name: str | Path) -> str:
    return os.path.abspath(name)  # noqa: PTH100 - a link keeps its name


def fingerprint(tensor: StoredTensor, hashes: Sequence[str]) -> bytes:
    """Return a digest that identifies a stored tensor together with its hashes."""
    return sha256(repr((tensor.file.path, tensor.meta.name, *hashes)).encode()).digest()[:16]


def check_source(
    catalog: Catalog, executor: Executor, diagnostics: Diagnostics, sampled_bytes: int | None = None
) -> Mapping[str, ListedOutput]:
    """Compare the files of a source with their manifest, and return the entries of those alike.

    At most ``sampled_bytes`` of contents are read of a set, else `SAMPLED_BYTES`.  Files that no
    manifest lists do not matter, unless one of them lies where a listed one should.  Listed files
    that the source does not have do not matter either: replicas may replace them.
    """
    given = {
        _absolute(name): (name, file) for file in catalog.files.values() for name in file.paths
    }
    entries: dict[str, ListedOutput] = {}
    for path in find_manifests(catalog):
        try:
            outputs = _list_outputs(ManifestFile.read(path))
        except FormatError as error:
            message, facts = "no file was compared with this manifest", error.reason
            hint = remedy_for(error)
            problem = Diagnostic("not_compared", message, hint=hint, facts=facts, where=str(path))
            diagnostics.add(problem)
            continue
        cut_short = {error.path for error in catalog.cut_short.values()}
        comparison = _Comparison(path.parent, outputs, executor, cut_short)
        files = [
            _File(*given[name], output)
            for output in outputs
            if (name := _absolute(path.parent / output.entry.path)) in given
        ]
        names = {file.path for file in files}
        diagnostics.add(*_in_place_of_listed(path, outputs, given.values(), names))
        right = []
        for file in files:
            wrong = list(comparison.check_header(file))
            diagnostics.add(*wrong)
            right += [] if wrong else [file]
        diagnostics.add(*comparison.check_samples(right, sampled_bytes))
        entries |= {file.path: file.output for file in right}
    return entries


def _in_place_of_listed(
    manifest: Path,
    outputs: Iterable[ListedOutput],
    given: Iterable[tuple[str, FileIndex]],
    compared: Collection[str],
) -> Iterator[Diagnostic]:
    """Yield a problem for each file in the folder of a rank whose listed file is not there."""
    unlisted = {Path(_absolute(name)).parent: name for name, _ in given if name not in compared}
    for output in outputs:
        missing = Path(_absolute(manifest.parent / output.entry.path))
        if (
            missing.parent in unlisted
            and missing.parent != manifest.parent
            and not is_file(missing)
        ):
            message = "not the file that the manifest lists in this folder"
            facts = f"{manifest} lists {output.entry.path}, which is missing"
            hint = "put the listed file back, or --ignore-manifest"
            name = unlisted[missing.parent]
            yield Diagnostic("manifest", message, hint=hint, facts=facts, path=name, where=name)


def _list_outputs(manifest: ManifestFile) -> list[ListedOutput]:
    try:
        return list_outputs(manifest.outputs())
    except ValueError as error:
        raise FormatError(str(manifest.path), None, f"sha256: {error}") from error


def check_set(
    catalog: Catalog,
    path: Path,
    executor: Executor,
    reads_all: bool,
    on_progress: OnProgress = lambda nbytes: None,
    verified: AbstractSet[bytes] = frozenset(),
    partial: Collection[str] = (),
) -> Iterator[Diagnostic]:
    """Yield the differences between a folder or a file and its manifest, for verify.

    Tensors whose `fingerprint` is in ``verified`` were read before, and are not read again.  The
    catalog lists only some tensors of the paths in ``partial``; only these are compared.
    """
    given = {_absolute(name): file for file in catalog.files.values() for name in file.paths}
    to_check: AbstractSet[str] | None = _files_to_check(catalog, path)
    as_given = {_absolute(name): name for name in list_paths(catalog)}
    try:
        manifest = ManifestFile.read(path)
        outputs = _list_outputs(manifest)
        wrong_strategies = list(manifest.strategy_problems())
    except FormatError as error:
        message = "the manifest cannot be read"
        yield _finding(path, message, remedy_for(error), facts=error.reason)
        return
    comparison = _Comparison(path.parent, outputs, executor, partial, is_verify=True)
    right, names = [], set()
    for output in outputs:
        name = _absolute(path.parent / output.entry.path)
        names.add(name)
        if to_check is not None and name not in to_check:
            continue
        shown = as_given.get(name) or str(path.parent / output.entry.path)
        if not is_file(name):
            hint = "the command that wrote the set, with --resume"
            ranks = (output.entry.rank,)
            yield _finding(shown, "listed in the manifest, and missing", hint, ranks)
            continue
        index = given.get(name)
        if index is None and (problem := next(output_problems(path.parent, output.entry), "")):
            message, ranks = "not what its manifest lists", (output.entry.rank,)
            yield _finding(shown, message, _WRITE_AGAIN, ranks, problem)
            continue
        file = _File(shown, index or read_index(shown), output)
        wrong = list(comparison.check_header(file))
        yield from wrong
        right += [] if wrong else [file]
    if reads_all:
        yield from comparison.check_all(right, on_progress, verified)
    else:
        yield from comparison.check_samples(right)
    for problem in wrong_strategies if to_check is None else ():
        yield _finding(path, problem)
    if to_check is None:
        to_check = given.keys()
    elif path.name == MANIFEST:  # its folder may hold other files
        return
    for name in sorted(to_check - names):
        hint = "its old name, if it was renamed"
        yield _finding(as_given[name], "not listed in the manifest", hint)
    for name in sorted(names - to_check) if path.name != MANIFEST else ():
        yield _finding(path, f"lists {os.path.relpath(name, path.parent)}, which is another file")


class _Comparison(Struct):
    """The comparison of files with the manifest in ``folder``; verify gives other hints.

    ``partial`` files are compared only in the tensors that their index lists.
    """

    folder: Path
    outputs: Sequence[ListedOutput]
    executor: Executor
    partial: Collection[str]
    is_verify: bool = False
    _sound: set[tuple[int, int]] = field(default_factory=set)  # equal headers, by their identities

    def _differs(
        self, file: _File, message: str, facts: str, tensor: str | None = None
    ) -> Diagnostic:
        ranks = (file.output.entry.rank,)
        problem = _finding(file.path, message, _WRITE_AGAIN, ranks, facts, tensor)
        if self.is_verify:
            return problem
        return replace(problem, hint=_IGNORE, options=("--ignore-manifest",))

    def check_header(self, file: _File) -> Iterator[Diagnostic]:
        """Yield the finding that the size or the tensors of a file are not as listed."""
        entry, key = file.output.entry, (id(file.index.header), id(file.output.alike))
        if key in self._sound and file.index.nbytes == entry.nbytes:
            return
        if file.index.path in self.partial:
            yield from self._check_some(file)
            return
        problems = list(output_problems(self.folder, entry, file.index))
        if not problems:
            self._sound.add(key)
            return
        names = {
            (tensor.meta.name, tensor.meta.dtype, tensor.meta.shape)
            for tensor in file.index.tensors.values()
        }
        groups = {id(output.alike): output.alike for output in self.outputs}.values()
        alike = (
            group
            for group in groups
            if names == {(t.name, t.dtype, t.shape) for t in group.tensors}
        )
        holder = self._name_holder(file, next(alike, None), {})
        message = "not what its manifest lists"
        for problem in [join_clauses(*problems[:1], holder)] if holder else problems:
            yield self._differs(file, message, problem)

    def _check_some(self, file: _File) -> Iterator[Diagnostic]:
        expected = {entry.name: (entry.dtype, entry.shape) for entry in file.output.entry.tensors}
        for name, tensor in file.index.tensors.items():
            meta = tensor.meta
            if expected.get(name) != (meta.dtype, meta.shape):
                facts = f"expected {expected.get(name, 'nothing')}, found {meta.dtype} {meta.shape}"
                yield self._differs(file, "not what its manifest lists", facts, name)

    def check_samples(
        self, files: Sequence[_File], sampled_bytes: int | None = None
    ) -> Iterator[Diagnostic]:
        """Yield what the distinguishing units show, and how many files were compared."""
        left = SAMPLED_BYTES if sampled_bytes is None else sampled_bytes
        pending: list[tuple[_File, dict[Unit, Future[str]]]] = []
        for file in files:
            telling = {
                unit: nbytes
                for unit, nbytes in file.output.alike.distinguishing_units(file.output).items()
                if unit[0] in file.index.tensors  # a partial file lacks some
            }
            if sum(telling.values()) <= left:
                left -= sum(telling.values())
                pending.append((file, self._submit(file, telling)))
        for file, futures in pending:
            hashes = {unit: bytes.fromhex(wait_result(future)) for unit, future in futures.items()}
            yield from self._check_units(file, hashes)
        if len(pending) < len(files) and sampled_bytes is None:
            message = f"hashes of {len(pending):,} of {len(files):,} files compared"
            facts = "of the others sizes and names; `ckpttool verify --check-manifest` compares all"
            yield Diagnostic("verified", message, facts=facts, where=str(self.folder / MANIFEST))

    def _submit(self, file: _File, units: Iterable[Unit]) -> dict[Unit, Future[str]]:
        tensors = file.index.tensors
        return {
            (name, number): self.executor.submit(hash_unit, tensors[name], number)
            for name, number in units
        }

    def check_all(
        self, files: Iterable[_File], on_progress: OnProgress, verified: AbstractSet[bytes]
    ) -> Iterator[Diagnostic]:
        """Yield what the hashes of all tensors show that are not ``verified``."""
        wrong: dict[str, tuple[_File, dict[Unit, bytes]]] = {}
        tensors = (
            ((file, tensor.meta), tensor)
            for file in files
            for tensor in file.index.tensors.values()
            if fingerprint(tensor, file.output.sha256(tensor.meta.name)) not in verified
        )
        hashed = map_in_order(self.executor, hash_units, tensors, MAX_IN_FLIGHT)
        for (file, meta), hashes in hashed:
            on_progress(meta.nbytes)
            if hashes != (expected := file.output.sha256(meta.name)):
                of_file = wrong.setdefault(file.path, (file, {}))[1]
                for number, (digest, _) in enumerate(zip_longest(hashes, expected, fillvalue="")):
                    of_file[meta.name, number] = bytes.fromhex(digest)
        for file, of_file in wrong.values():
            yield from self._check_units(file, of_file)

    def _check_units(self, file: _File, hashes: Mapping[Unit, bytes]) -> Iterator[Diagnostic]:
        """Yield what hashes of a file show: it is another file of its set, or was changed."""
        wrong = [unit for unit in hashes if hashes[unit] != file.output.digest(unit)]
        if wrong and (holder := self._name_holder(file, file.output.alike, hashes)):
            yield self._differs(file, "not the file that its manifest lists", holder)
            return
        for name in dict.fromkeys(name for name, _ in wrong):
            first = next(unit for unit in wrong if unit[0] == name)
            expected, most = file.output.digest(first).hex(), len(file.output.alike.numbers[name])
            where = f" (of stretch {first[1] + 1} of {most})" if most > 1 else ""
            facts = f"expected SHA-256 {expected}, found {hashes[first].hex()}{where}"
            yield self._differs(file, "changed since it was written", facts, name)

    def _name_holder(
        self, file: _File, alike: AlikeOutputs | None, hashes: Mapping[Unit, bytes]
    ) -> str:
        """Return which other file of ``alike`` has the contents of a file, or ""."""
        if alike is None:
            return ""
        known = dict(hashes)
        for output in alike.find_holders(hashes):
            telling = alike.distinguishing_units(output)
            unknown = self._submit(file, [unit for unit in telling if unit not in known])
            known |= {unit: bytes.fromhex(wait_result(sha)) for unit, sha in unknown.items()}
            is_same = all(known[unit] == output.digest(unit) for unit in telling)
            if telling and is_same and output is not file.output:
                return f"its contents are those of {output.entry.path}"
        return ""


def _finding(
    path: str | Path,
    problem: str,
    hint: str = "",
    ranks: tuple[int, ...] = (),
    facts: str = "",
    tensor: str | None = None,
) -> Diagnostic:
    """Return the finding that an output, or a set, is not what its manifest lists."""
    path = str(path)
    return Diagnostic(
        "manifest",
        problem,
        hint=hint,
        facts=facts,
        tensor=tensor,
        ranks=ranks,
        path=path,
        where=path,
    )
