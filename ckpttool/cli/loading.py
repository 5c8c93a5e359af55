"""Read the catalog and the strategies that the options of a command name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import click

import ckpttool
from ckpttool.cli.progress import show_count
from ckpttool.errors import CkptToolError, raise_all
from ckpttool.formats.reading import why_not_a_path

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.ciphertext import Secret
    from ckpttool.model.notes import Note
    from ckpttool.model.strategy import Strategy

T = TypeVar("T")


class Scan(Protocol):
    """A function like `ckpttool.scan`."""

    def __call__(
        self,
        src: str,
        pattern: str | None,
        step: str | None,
        *,
        key: Secret | None,
        on_progress: Callable[[int, int], None],
    ) -> Catalog:
        """Return the catalog of a checkpoint."""
        ...


def attempt(call: Callable[[], T], errors: list[CkptToolError]) -> T | None:
    """Return the result of ``call``, or add its error to ``errors`` and return None.

    So one run reports a bad strategy and a bad checkpoint at once; end with `raise_all`.
    """
    try:
        return call()
    except CkptToolError as error:
        errors.append(error)
        return None


def load(
    src: str,
    pattern: str | None,
    step: str | None,
    src_strategy: tuple[str, ...],
    dst_strategy: tuple[str, ...] = (),
    *,
    key: Secret | None = None,
    find_strategy: bool = True,
    tolerated: list[CkptToolError] | None = None,
    scan: Scan | None = None,
) -> tuple[Catalog, Strategy | None, Strategy | None]:
    """Read the catalog and the strategies, and raise all their problems at once.

    Without ``src_strategy`` the strategy in the output folder of a MindFormers run is taken, with a
    note, unless ``find_strategy`` is False.  If ``tolerated`` is given, errors of a strategy are
    added to it, and the strategy is None.  ``scan`` may replace `ckpttool.scan`.
    """
    if pattern is not None and (reason := why_not_a_path(pattern)) is not None:
        raise click.UsageError(f"--pattern {pattern!r} is {reason}.")
    if pattern is not None and "{rank}" not in pattern:
        raise click.UsageError(
            "--pattern does not say where {rank} is in the path, such as 'node{rank}/*.ckpt'."
        )
    errors: list[CkptToolError] = []
    given = click.get_current_context().params
    look = scan or ckpttool.scan
    with show_count("reading headers", given["quiet"] or given["as_json"]) as on_progress:
        catalog = attempt(
            lambda: look(src, pattern, step, key=key, on_progress=on_progress), errors
        )
    if find_strategy and not src_strategy and catalog is not None and catalog.strategy_files:
        src_strategy = catalog.strategy_files
        catalog = replace(catalog, notes=(*catalog.notes, _on_strategy(src_strategy)))
    strategies = [
        attempt(partial(ckpttool.read_strategy, paths), errors) if paths else None
        for paths in (src_strategy, dst_strategy)
    ]
    if tolerated is not None and catalog is not None:
        tolerated += errors
    else:
        raise_all([*catalog.damaged.values(), *errors] if errors and catalog else errors)
    assert catalog is not None, "raise_all() returned, so scan() did not fail"
    return catalog, strategies[0], strategies[1]


def _on_strategy(files: tuple[str, ...]) -> Note:
    """Return the note on strategy files that were found and not named."""
    from ckpttool.model.notes import Note
    from ckpttool.model.strategy import count, shorten

    names = shorten((Path(path).name for path in files), 3)
    text = f"strategy: {count(len(files), 'file')} in {Path(files[0]).parent} ({names})"
    return Note("strategy", f"{text}; -s takes another")
