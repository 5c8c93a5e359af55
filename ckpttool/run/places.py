"""The places that are to be written to, and what is wrong with them."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from ckpttool.formats import format_of_suffix
from ckpttool.formats.reading import is_there
from ckpttool.model.catalog import Catalog, RankCatalog
from ckpttool.model.manifest import JOURNAL, MANIFEST
from ckpttool.model.plan import Target
from ckpttool.model.strategy import shorten
from ckpttool.run.partial import PARTIAL, access_problem
from ckpttool.storage.folders import is_of_a_rank
from ckpttool.storage.names import RANK_IN_NAME
from ckpttool.storage.trees import CHECKPOINTS, is_tree
from ckpttool.transaction.parts import files_of_others

IS_INPUT = "is an input of this run"

FileId = tuple[int, int]  # device and inode


def place_problems(
    source: Catalog,
    target: Target,
    inputs: Collection[str],
    overwrite: bool,
    documents: Collection[str] = (),
    ours: Collection[str] = (),
) -> Iterator[str]:
    """Messages for everything that stands in the way of the outputs' names.

    Parameters
    ----------
    source
        What is read.
    target
        What is to be written.
    inputs
        Every file that is read; none is ever replaced, whatever name it is given by.
    overwrite
        Whether another file may be replaced.
    documents
        Small files that are written with the outputs.
    ours
        Outputs that may be replaced in any case; see `ckpttool.transaction.resume.find_remains`.
    """
    blocked = _blocked(target, inputs, documents)
    yield from dict.fromkeys(blocked.values())
    paths = [*target.paths.values(), *documents]
    manifest = [target.manifest_path] if target.paths else []
    files = [path for path in paths if is_there(path) and path not in blocked]
    existing = [path for path in files if str(Path(path)) not in ours]
    if not existing and not blocked:
        existing = [path for path in manifest if is_there(path) and path not in ours]
    if existing and not overwrite:
        have = f"{existing[0]} exists already"
        if len(existing) > 1:
            have = f"{len(existing)} outputs exist already ({shorten(existing, 3)})"
        yield f"{have}; --overwrite replaces what is there"
    yield from _mixtures(source, target)
    if target.strategy is None:
        return
    stale = None if overwrite or blocked else stale_files(target)
    if stale:
        yield f"{stale}; move it away, write to another folder, or keep it with --overwrite"


def blocked_places(
    target: Target, inputs: Collection[str], documents: Collection[str] = ()
) -> Iterator[str]:
    """Messages for outputs that cannot be written whatever may be replaced.

    If there are any, what is there cannot be looked at either.
    """
    yield from dict.fromkeys(_blocked(target, inputs, documents).values())


def _blocked(target: Target, inputs: Collection[str], documents: Collection[str]) -> dict[str, str]:
    """Outputs that cannot be written, with the messages; what has the same trouble has the same."""
    taken = {_file_id(Path(path)) for path in inputs}
    paths = [*target.paths.values(), *documents, *([target.manifest_path] if target.paths else [])]
    found = {path: text for path in paths for text in _problems_of(path, taken)}
    inputs = [path for path, text in found.items() if text == IS_INPUT]
    have = f"{len(inputs)} outputs are inputs of this run ({shorten(inputs, 3)})"
    have = f"{Path(inputs[0])}: {IS_INPUT}" if len(inputs) == 1 else have
    return found | dict.fromkeys(inputs, f"{have}; write somewhere else")


def _mixtures(source: Catalog, target: Target) -> Iterator[str]:
    """Messages for outputs that whoever reads the source the next time takes for files of it."""
    root, files = os.path.realpath(source.root), source.files.values()
    has_folder = target.paths and (target.strategy is not None or target.is_numbered)
    if has_folder and os.path.realpath(target.output_folder) == root:
        yield f"{source.root}: is the source folder; write to another"
        return
    is_above = has_folder and Path(os.path.realpath(target.output_folder)) == Path(root).parent
    if is_above and Path(root).name in CHECKPOINTS and is_tree(Path(root).parent):
        text = "what is written there would be taken for the checkpoint of that run, in the place"
        yield f"{target.output_folder}: {text} of {source.root}; write to another folder"
    if not isinstance(source, RankCatalog):
        return  # its files are those that are named
    homes = {os.path.realpath(Path(path).parent) for file in files for path in file.paths}
    homes |= {os.path.realpath(Path(error.path).parent) for error in source.damaged.values()}
    mixed: dict[str, list[str]] = {}
    outputs = map(Path, target.paths.values())
    for path in (path for path in outputs if format_of_suffix(path.name) is not None):
        folder = os.path.realpath(path.parent)
        is_home = folder in homes and (folder != root or RANK_IN_NAME.search(path.name))
        if is_home or is_of_a_rank(root, folder):
            mixed.setdefault(str(path.parent), []).append(str(path))
    for name, found in mixed.items():
        text = f"{shorten(found, 3)}: would be taken for a file of the source, which is read from"
        yield f"{text} {name}; write to a folder outside of it"


def _problems_of(name: str, taken: Collection[FileId]) -> Iterator[str]:
    """What is wrong with one output; the same message for all that have the same trouble."""
    path, partial = Path(name), Path(name + PARTIAL)
    folder = next(p for p in path.absolute().parents if os.path.lexists(p))
    if not folder.is_dir():
        what = "a file" if os.path.exists(folder) else "a link that leads nowhere"  # noqa: PTH110
        yield f"{folder}: is {what}; name a folder to write to"
    elif closed := access_problem(folder, os.W_OK | os.X_OK) or _long_name(path, folder):
        yield closed
    elif name.endswith("/") or path.is_dir():
        what = "is" if path.is_dir() else "ends like that of"
        yield f"{name}: {what} a folder; name the file to be written"
    elif path.exists() and not path.is_file():
        yield f"{path}: is a device or a pipe; name a file to be written"
    elif path.exists() and _file_id(path) in taken:
        yield IS_INPUT  # as all files of a folder may be, which are told together
    else:
        yield from _problems_of_partial(partial, taken)


def _long_name(path: Path, folder: Path) -> str | None:
    """The message that the file system has no room for a name, or for that of what lies beside."""
    limit = os.pathconf(folder, "PC_NAME_MAX")  # -1 or 0 where none is known
    *folders, name = path.absolute().relative_to(folder).parts
    longest = max(len(os.fsencode(part)) for part in (*folders, name + PARTIAL, name + JOURNAL))
    if limit <= 0 or longest <= limit:
        return None
    output = str(path).removesuffix(f".{MANIFEST}")
    text = f"names may have {limit} bytes there, and that of a file beside it would have more"
    return f"{output}: {text}; give it a shorter one"


def _problems_of_partial(partial: Path, taken: Collection[FileId]) -> Iterator[str]:
    try:
        found = partial.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        yield f"{partial}: is in the way of the temporary file; move it away"
    elif (found.st_dev, found.st_ino) in taken:
        yield f"{partial}: an input of this run has the name of the temporary file; rename it"
    elif closed := access_problem(partial, os.R_OK | os.W_OK):
        yield closed


def _file_id(path: Path) -> FileId:
    found = path.stat()
    return found.st_dev, found.st_ino


def stale_files(target: Target) -> str | None:
    """What is there of ranks or formats that the target does not have; None if nothing is."""
    samples = [] if target.strategy is None else list(target.paths.items())[:1]
    stale = [path for one in samples for path in files_of_others(*one, range(target.ranks))]
    beyond = f"not of the {target.ranks} ranks of the target in its format, so left from another"
    return f"{shorten(stale, 3)}: {beyond} run" if stale else None
