"""Files that are whole by their format, and damaged all the same: they have lost all bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckpttool.errors import FormatError
from ckpttool.model.catalog import Catalog, MergedCatalog, SelfDescribedCatalog
from ckpttool.model.redundancy import is_deduplicated
from ckpttool.model.strategy import Strategy


def set_aside(catalog: Catalog, strategy: Strategy | None) -> Catalog:
    """The catalog with such files among the damaged ones, so that replicas may replace them.

    ``strategy`` is None for a source that holds everything undivided, or of which nothing is known.
    """
    if isinstance(catalog, SelfDescribedCatalog):
        return catalog
    return _with_damaged(catalog, _find_empty(catalog, strategy))


def _with_damaged(catalog: Catalog, reasons: Mapping[int, str]) -> Catalog:
    """The catalog with files that are damaged for some reason; itself if there are none."""
    if not reasons:
        return catalog
    files = catalog.files
    damaged = {rank: FormatError(files[rank].path, None, why) for rank, why in reasons.items()}
    return replace(
        catalog,
        files={rank: file for rank, file in files.items() if rank not in damaged},
        damaged=dict(sorted({**catalog.damaged, **damaged}.items())),
    )


def _find_empty(catalog: Catalog, strategy: Strategy | None) -> dict[int, str]:
    """Files of 0 bytes, where each should hold something.

    Only without redundancy may a rank hold nothing, or if its stage has no layouts at all.  Without
    a strategy that is not known, unless no file holds anything.
    """
    empty = {rank for rank, file in catalog.files.items() if not file.nbytes}
    if not empty or (strategy is not None and is_deduplicated(catalog, strategy)):
        return {}
    if strategy is None:
        empty &= set(
            catalog.files if isinstance(catalog, MergedCatalog) or not catalog.metas else ()
        )
    elif strategy.layouts:
        layouts = {layout for named in strategy.layouts.values() for layout in named}
        empty &= {rank for layout in layouts for rank in layout.ranks}
    return dict.fromkeys(empty, "empty (0 bytes), as a full disk or a crash leaves it")
