"""Write strategies: in another form, or those of the stages as one file; name files to fetch."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator

from ckpttool.model.layout import may_be_expanded
from ckpttool.model.strategy import Strategy
from ckpttool.operations.answer import Answer, Count, Document, Reported, Some
from ckpttool.planning.needs import Needs
from ckpttool.planning.preflight import document_problem
from ckpttool.problems import Diagnostic, PlanError, StrategyError, raise_all, severities
from ckpttool.storage.files import write_document
from ckpttool.strategy_files.reader import Layouts, Paths, read_strategy
from ckpttool.strategy_files.stages import merge_stages
from ckpttool.strategy_files.writer import Word, encode_strategy, form_of
from ckpttool.typed import parse_rank_files
from ckpttool.wording import count, shorten


class WrittenStrategy(Document, frozen=True):
    """The JSON document of strategy convert and strategy merge.

    Attributes
    ----------
    path
        The file that was written.
    form
        Its form.
    nbytes
        Its size.
    files
        The files that were read.
    ranks
        Number of ranks of all stages.
    stages
        Number of pipeline stages.
    tensors
        Number of tensors that the strategy lists by their names.
    notes
        Facts that do not stop the command: notes and warnings.
    strategy
        What the file says.
    """

    aside = frozenset({"strategy"})

    path: str
    form: Word
    nbytes: Count
    files: tuple[str, ...]
    ranks: Some
    stages: Some
    tensors: Count
    notes: Reported
    strategy: Strategy


class RanksOfTarget(Answer, frozen=True):
    """The source ranks that a target rank needs.

    Attributes
    ----------
    rank
        The target rank; null of a merge.
    groups
        Source ranks that hold the same; one of each group is needed.
    fetch
        Few ranks that are enough.
    also
        Ranks that would show an optimizer shard that the strategy hides.
    """

    rank: int | None
    groups: tuple[tuple[Count, ...], ...]
    fetch: tuple[Count, ...]
    also: tuple[Count, ...]


class RanksToFetch(Document, frozen=True, kw_only=True):
    """The JSON document of strategy ranks.

    Attributes
    ----------
    ranks
        What each target rank needs; of a merge, its one entry.
    fetch
        Few ranks that are enough for all of these target ranks.
    also
        Ranks to fetch with them, which would show a hidden optimizer shard.
    files
        The files of both, with --files.
    notes
        Facts that do not stop the command: notes and warnings.
    """

    ranks: tuple[RanksOfTarget, ...]
    fetch: tuple[Count, ...]
    also: tuple[Count, ...]
    files: tuple[str, ...] | None = None
    notes: Reported

    @classmethod
    def of(cls, needs: Needs, files: tuple[str, ...] | None = None) -> RanksToFetch:
        """Return the document of what a target needs, and of the ``files`` to fetch."""
        return cls(
            ranks=tuple(
                RanksOfTarget(need.rank, need.groups, need.fetch, need.also) for need in needs.ranks
            ),
            fetch=needs.together.fetch,
            also=needs.together.also,
            files=files,
            notes=Reported(needs.notes, severities("convert")),
        )


def convert_strategy(
    paths: Layouts, path: str | os.PathLike[str], *, overwrite: bool = False
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
        message = f"the files are not below {folder}"
        hint = "--relative-to with the folder above them"
        raise PlanError([Diagnostic("options", message, hint=hint, facts=paths[0])])
    return tuple(relative)


def _write(
    strategy: Strategy, data: bytes, path: str, overwrite: bool, notes: tuple[Diagnostic, ...]
) -> WrittenStrategy:
    problem = document_problem(path, "-o", strategy.files, overwrite)
    if problem is not None:
        raise PlanError([problem])
    write_document(path, data)
    spelled, _ = strategy.expand_rules()
    return WrittenStrategy(
        *(path, form_of(path).word, len(data), spelled.files),
        *(len(spelled.ranks), spelled.stages, len(spelled.layouts)),
        Reported((*strategy.notes, *notes), severities("convert")),
        spelled,
    )


def _refuse_expanded(strategy: Strategy, path: str) -> Iterator[StrategyError]:
    expanded = [name for name, of in strategy.layouts.items() if any(map(may_be_expanded, of))]
    if expanded and not form_of(path).has_shapes:
        message = (
            f"{count(len(expanded), 'parameter')} may have more axes in JSON than in files, and "
        )
        message += "only JSON has the full shapes (tensor_shape) that tell"
        hint = "-o with a name that ends in .json, or split or reshard with --write-strategy"
        yield StrategyError(shorten(map(repr, expanded), 3), message, hint)


def _lost(strategy: Strategy, path: str) -> tuple[Diagnostic, ...]:
    known = [name for name, of in strategy.layouts.items() if of[0].full_shape is not None]
    if not known or form_of(path).has_shapes:
        return ()
    message = f"full shapes (tensor_shape) of {count(len(known), 'parameter')} are left out"
    facts = f"{shorten(known, 3)}; only JSON has a place for them, and the slices have them too"
    return (Diagnostic("strategy_file", message, facts=facts, where=path),)
