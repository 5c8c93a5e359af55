"""Checkpoints saved without redundancy: of ranks with equal slices one alone has each.

``remove_redundancy=True`` hands the parameters of a replica group out in turn, so a rank may hold
nothing.  Files in safetensors are marked, unless they hold nothing; ``.ckpt`` files are not, and
those that hold nothing have 0 bytes.  Parameters without a layout are on every rank, or, if there
are no layouts at all, handed out like the others.

Source
------
MindSpore 2.10 ``train/callback/_checkpoint.py`` (``_save_ckpt``), ``train/_utils.py``
(``remove_param_redundancy``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from ckpttool.model.catalog import Catalog, SelfDescribedCatalog, format_ranks
from ckpttool.model.notes import Note
from ckpttool.model.strategy import Strategy

MARK = "remove_redundancy"


def is_marked(catalog: Catalog) -> bool:
    """Whether a file says that the checkpoint was saved without redundancy."""
    return any(file.attrs.get(MARK) == "True" for file in catalog.files.values())


def is_deduplicated(catalog: Catalog, strategy: Strategy) -> bool:
    """Whether a checkpoint was saved without redundancy, as its files say or show.

    They show it if no slice is held twice, and one is held by one rank and not by another that
    has a file and should hold it, too.  A strategy without layouts says that all should hold all.
    """
    if isinstance(catalog, SelfDescribedCatalog):
        return False  # it tells itself who has what
    if is_marked(catalog):
        return True
    if any(MARK in file.attrs for file in catalog.files.values()):
        return False
    files = catalog.files
    if not strategy.layouts:
        held = Counter(name for file in files.values() for name in file.header)
        return len(files) > 1 and bool(held) and max(held.values()) == 1
    is_short = False
    for name, layouts in strategy.layouts.items():
        for layout in layouts:
            if math.prod(layout.parts) == len(layout.ranks):
                continue  # no two ranks share a slice, which need not be counted
            owners = [rank for rank in layout.ranks if rank in files]
            expected = Counter(layout.slice_index(rank) for rank in owners)
            found = Counter(
                layout.slice_index(rank) for rank in owners if name in files[rank].header
            )
            if any(number > 1 for number in found.values()):
                return False
            is_short = is_short or any(expected[index] > 1 for index in found)
    return is_short


def note_redundancy(catalog: Catalog, is_deduplicated: bool | None) -> Note | None:
    """What should be known of a checkpoint without redundancy, and of ranks that hold nothing.

    None for ``is_deduplicated`` says that there is no strategy that could tell.
    """
    idle = [rank for rank, file in catalog.files.items() if not file.tensors]
    nothing = f"{format_ranks(idle)} hold{'s' if len(idle) == 1 else ''} nothing"
    if is_deduplicated or (is_deduplicated is None and is_marked(catalog)):
        text = f"{catalog.root}: saved without redundancy ({MARK}): of ranks with equal slices "
        text += "one alone has each" + (f"; {nothing}" if idle else "")
        return Note("replica", text)
    if not idle:
        return None
    file = catalog.files[idle[0]]
    text = f"{nothing} ({file.path} has {file.nbytes} bytes)"
    if is_deduplicated is None:
        text += ": cut short, or saved without redundancy (a strategy, -s, tells)"
        return Note("replica", text)
    text += ", though the checkpoint was not saved without redundancy: was it cut short?"
    return Note("replica", text, is_warning=True)


def absent_ranks(catalog: Catalog) -> Iterator[str]:
    """Ranks without a file, where no other rank has what they had and nothing tells what it was."""
    known = {*catalog.files, *catalog.damaged}
    absent = [rank for rank in range(max(known)) if rank not in known]
    if absent:
        yield (
            f"{format_ranks(absent)}: no checkpoint file found in {catalog.root}, which was saved "
            f"without redundancy ({MARK}): what they had no other rank has"
        )
