"""Write strategies: in another form, or those of the stages as one file; name files to fetch."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator

from msgspec import Struct

from ckpttool.model.layout import may_be_expanded
from ckpttool.model.strategy import Strategy
from ckpttool.planning.needs import Needs
from ckpttool.planning.preflight import document_problem
from ckpttool.problems import Diagnostic, PlanError, StrategyError, raise_all
from ckpttool.storage.files import write_document
from ckpttool.strategy_files.reader import Paths, read_strategy
from ckpttool.strategy_files.stages import merge_stages
from ckpttool.strategy_files.writer import encode_strategy, form_of
from ckpttool.typed import parse_rank_files
from ckpttool.wording import count, shorten


class WrittenStrategy(Struct, frozen=True):
    """A strategy file that was written.

    Attributes
    ----------
    path, form, nbytes
        The file, its form in a word, and its size.
    strategy
        What it says; its ``files`` are those that were read.
    notes
        Notes of reading, and what the form has no place for.
    """

    path: str
    form: str
    nbytes: int
    strategy: Strategy
    notes: tuple[Diagnostic, ...]


def convert_strategy(
    paths: Paths, path: str | os.PathLike[str], *, overwrite: bool = False
) -> WrittenStrategy:
    """Write the strategy of some files in the form of another suffix.

    Raises
    ------
    StrategyError
        A file cannot be read as a strategy, or the form cannot express it.
    PlanError
        The output exists, or is an input.
    OSError
        A file cannot be read or written.
    """
    strategy, path = read_strategy(paths), os.fspath(path)
    raise_all(_refuse_expanded(strategy, path))
    return _write(strategy, encode_strategy(strategy, path), path, overwrite, _lost(strategy, path))


def merge_strategies(
    paths: Paths, path: str | os.PathLike[str], *, overwrite: bool = False
) -> WrittenStrategy:
    """Write the strategy files of pipeline stages as one, their items as they are.

    It raises what `convert_strategy` raises.
    """
    path = os.fspath(path)
    strategy, data = merge_stages(paths, path)
    return _write(strategy, data, path, overwrite, ())


def files_to_fetch(
    needs: Needs, pattern: str | os.PathLike[str], folder: str | os.PathLike[str] | None = None
) -> tuple[str, ...]:
    """Return the files of the ranks that target ranks need together, and of those to fetch also.

    Parameters
    ----------
    needs
        What `find_needs` returned.
    pattern
        The path of a rank's file, perhaps a URL, with ``{rank}`` for the rank.
    folder
        The folder to which the paths are relative; None for the paths as they are.

    Raises
    ------
    TypedError
        A `ValueError`: the pattern does not have ``{rank}`` in it.
    PlanError
        A file is not below the folder.
    """
    path_of_all = parse_rank_files(os.fspath(pattern))
    ranks = sorted({*needs.together.fetch, *needs.together.also})
    paths = [path_of_all.replace("{rank}", str(rank)) for rank in ranks]
    if folder is None:
        return tuple(paths)
    folder = os.fspath(folder)
    relative = [posixpath.relpath(path, folder or ".") for path in paths]
    if any(path.startswith("../") for path in relative):
        text, hint = f"the files are not below {folder}", "--relative-to with the folder above them"
        raise PlanError([Diagnostic("options", text, hint=hint, facts=paths[0])])
    return tuple(relative)


def _write(
    strategy: Strategy, data: bytes, path: str, overwrite: bool, notes: tuple[Diagnostic, ...]
) -> WrittenStrategy:
    problem = document_problem(path, "-o", strategy.files, overwrite)
    if problem is not None:
        raise PlanError([problem])
    write_document(path, data)
    spelled, _ = strategy.spell_out()
    return WrittenStrategy(path, form_of(path).word, len(data), spelled, (*strategy.notes, *notes))


def _refuse_expanded(strategy: Strategy, path: str) -> Iterator[StrategyError]:
    """Yield an error of layouts that nobody could read without the full shapes beside them."""
    expanded = [name for name, of in strategy.layouts.items() if any(map(may_be_expanded, of))]
    if expanded and not form_of(path).has_shapes:
        text = f"{count(len(expanded), 'parameter')} may have more axes in JSON than in files, and "
        text += "only JSON has the full shapes (tensor_shape) that tell"
        hint = "-o with a name that ends in .json, or split or reshard with --write-strategy"
        yield StrategyError(shorten(map(repr, expanded), 3), text, hint)


def _lost(strategy: Strategy, path: str) -> tuple[Diagnostic, ...]:
    """Return a note on full shapes that a form has no place for."""
    known = [name for name, of in strategy.layouts.items() if of[0].full_shape is not None]
    if not known or form_of(path).has_shapes:
        return ()
    text = f"full shapes (tensor_shape) of {count(len(known), 'parameter')} are left out"
    facts = f"{shorten(known, 3)}; only JSON has a place for them, and the slices have them too"
    return (Diagnostic("strategy_file", text, facts=facts, where=path),)
