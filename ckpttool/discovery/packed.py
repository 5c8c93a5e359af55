"""Files of ranks that somebody has compressed or archived: which these are, and how to unpack them.

Only names of checkpoints and of ranks count: ``net-1_1.ckpt.gz``, ``rank_3.tar.gz``.  Other packed
files in a folder, such as logs, are left alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from msgspec.structs import replace

from ckpttool.discovery.file_names import RANK_FOLDER, RANK_IN_NAME
from ckpttool.formats import format_of_suffix
from ckpttool.formats.foreign import FOREIGN_KINDS
from ckpttool.formats.local import find_paths, is_file, list_readable
from ckpttool.problems import ForeignError


class _Packing(NamedTuple):
    """A way of packing: the ends of names, the kind of file, and the command that unpacks.

    ``command`` has FILE, and for an archive FOLDER; a command without FOLDER takes many files.
    """

    end: str
    kind: str
    command: str


_PACKINGS = tuple(
    _Packing(*one)
    for one in (
        (".tar.gz", "gzip", "tar xzf FILE -C FOLDER"),
        (".tgz", "gzip", "tar xzf FILE -C FOLDER"),
        (".tar.bz2", "bzip2", "tar xjf FILE -C FOLDER"),
        (".tar.xz", "xz", "tar xJf FILE -C FOLDER"),
        (".tar.zst", "zstd", "tar --zstd -xf FILE -C FOLDER"),
        (".tar", "tar", "tar xf FILE -C FOLDER"),
        (".zip", "zip", "unzip FILE -d FOLDER"),
        (".gz", "gzip", "gunzip FILE"),
        (".bz2", "bzip2", "bunzip2 FILE"),
        (".xz", "xz", "unxz FILE"),
        (".zst", "zstd", "unzstd FILE"),
    )
)


def _packing_of(name: str) -> _Packing | None:
    """Return how a file is packed that has the name of a checkpoint or of a rank; else None."""
    found = next((one for one in _PACKINGS if name.endswith(one.end)), None)
    if found is None:
        return None
    stem = name.removesuffix(found.end)
    is_of_rank = RANK_FOLDER.fullmatch(stem) or RANK_IN_NAME.search(stem)
    return found if is_of_rank or format_of_suffix(stem) is not None else None


def find_packed(root: Path) -> tuple[list[Path], str]:
    """Return packed files of one kind in a folder or one level below, and how to unpack them."""
    for pattern in ("*", "*/*"):
        packed = [one for one in sorted(find_paths(root, pattern)) if _is_packed(one)]
        if packed:
            end = _packing_of(packed[0].name)
            same = [one for one in packed if _packing_of(one.name) == end]
            return same, _unpack(root, same)
    return [], ""


def packed_ranks(
    root: Path, homes: Mapping[int, Path], known: Collection[int]
) -> dict[int, ForeignError]:
    """Return the error of each rank whose only file is packed.

    Parameters
    ----------
    root
        The folder of all ranks.
    homes
        The folders of ranks in which no file was found.
    known
        All ranks that have files or folders.
    """
    found: dict[int, Path] = {}
    for rank, folder in homes.items():
        found.update((rank, path) for path in filter(_is_packed, list_readable(folder)))
    found |= {rank: path for rank, path in _ranks_in_names(root) if rank not in known}
    hint = _unpack(root, sorted(found.values())) if found else ""
    errors = {}
    for rank, path in sorted(found.items()):
        packing = _packing_of(path.name)
        assert packing is not None, "it is packed"
        errors[rank] = replace(FOREIGN_KINDS[packing.kind], hint=hint).error(str(path))
    return errors


def _is_packed(path: Path) -> bool:
    return _packing_of(path.name) is not None and is_file(path)


def _ranks_in_names(root: Path) -> Iterator[tuple[int, Path]]:
    for path in filter(_is_packed, list_readable(root)):
        stem = path.name.partition(".")[0]
        if match := RANK_FOLDER.fullmatch(stem) or RANK_IN_NAME.search(stem):
            yield int(match.groups()[-1]), path


def _unpack(root: Path, paths: list[Path]) -> str:
    """Return the command that unpacks files: all of them by one pattern, or else the first."""
    packing = _packing_of(paths[0].name)
    assert packing is not None, "it is packed"
    first, folder = paths[0], quote(str(paths[0].parent))
    depth = len(first.relative_to(root).parts)
    suffix = Path(first.name.removesuffix(packing.end)).suffix + packing.end
    if packing.kind == "zip" or "FOLDER" in packing.command:
        suffix = packing.end
    pattern = "*/" * (depth - 1) + f"*{suffix}"
    if len(paths) == 1 or sorted(find_paths(root, pattern)) != paths:
        return packing.command.replace("FILE", quote(str(first))).replace("FOLDER", folder)
    named = f"{quote(str(root))}/{pattern}"
    if "FOLDER" not in packing.command:
        return packing.command.replace("FILE", named)
    each = packing.command.replace("FILE", '"$f"').replace("FOLDER", '"$(dirname "$f")"')
    return f"for f in {named}; do {each}; done"
