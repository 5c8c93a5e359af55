"""Split information of mindone: which parameters ZeRO sharded, in data parallel.

It makes a `Strategy` of one group of ranks.  Only the checkpoint shows how many groups there are.

MindSpore writes no strategy file in data parallel.  mindone's ``ZeroHelper`` writes a JSON file for
each rank of the optimizer's group, ``params_info/params_split_info_{rank}.json``::

    {"blocks.0.weight": {"split": true, "group_size": 4, "rank_id": 1}, ...}

All parameters have the same ``group_size`` and ``rank_id``.  Each rank of the group holds an equal
slice of axis 0, in the order of ``rank_id``, of what is ``split``: with ZeRO 3 of the parameter and
its states, with ZeRO 1 and 2 of the states only.  Otherwise all hold the full tensor.  All ranks
write the same but for ``rank_id``, so that one file says everything.  Parameters that are not
listed are treated as beside a strategy file that does not list them.

The group is the innermost axis of the ranks: ranks 0 to ``group_size - 1`` are one, and there may
be any number of groups with replicas.  The checkpoint shows how many.

The files of ranks are those of one group, from ``rank_id`` 0.

Source
------
mindone ``mindone/trainers/zero.py`` (``dump_params_split_info``, ``transform_checkpoints``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from ckpttool.formats.foreign import is_split_info
from ckpttool.formats.local import read_file
from ckpttool.formats.strict_json import convert_as, parse_json
from ckpttool.model.layout import MAX_RANKS, Layout
from ckpttool.model.strategy import Strategy
from ckpttool.problems import StrategyError, raise_all
from ckpttool.wording import shorten


def holds_split_info(path: str) -> bool:
    """Return whether a file is split information, by its content."""
    if not path.endswith(".json"):
        return False
    data = read_file(path)
    try:
        return b'"group_size"' in data and is_split_info(parse_json(data))
    except ValueError:
        return False


def read_split_info(paths: Sequence[str]) -> Strategy:
    """Return the strategy in the split information of one rank or of several.

    Raises
    ------
    StrategyError
        A file is impossible, or two files disagree.  Several mistakes are a `CombinedError`.
    """
    infos = {path: _read(path) for path in paths}
    first = infos[paths[0]]
    errors = []
    for path, info in infos.items():
        differing = {name for name, _ in first.splits.items() ^ info.splits.items()}
        if differing or info.group_size != first.group_size:
            message = f"not of the run of {paths[0]}: other parameters, splits or group size"
            facts = shorten(sorted(differing), 3)
            errors.append(StrategyError(path, message, "the files of one run", facts))
    raise_all(errors)
    ranks = first.group_size
    ways = {True: (Layout((ranks,), ((0,),)),), False: (Layout((ranks,), ()),)}
    layouts = {name: ways[is_split] for name, is_split in first.splits.items()}
    return Strategy(layouts, 1, ranks, tuple(paths), is_of_group=True)


class _SplitInfo(NamedTuple):
    """The content of one file: name to whether it is split."""

    group_size: int
    splits: Mapping[str, bool]


class _Entry(Struct, frozen=True):
    split: bool
    group_size: int
    rank_id: int


def _read(path: str) -> _SplitInfo:
    entries: dict[str, _Entry] = {}
    document = parse_json(read_file(path))
    assert isinstance(document, dict), "checked by the caller"
    for name, entry in document.items():
        try:
            entries[name] = convert_as(_Entry, entry)
        except ValueError as error:
            raise StrategyError(f"{path}: {name}", str(error)) from error
    (size, rank), *more = sorted({(entry.group_size, entry.rank_id) for entry in entries.values()})
    problem = ""
    if more:
        problem = f"rank {rank} of {size} and rank {more[0][1]} of {more[0][0]}, expected one rank"
    elif not 0 <= rank < size <= MAX_RANKS:
        problem = f"rank_id {rank} in a group of {size}, expected 0 to {size - 1}"
    if problem:
        raise StrategyError(path, problem, "the file as mindone wrote it")
    return _SplitInfo(size, {name: entry.split for name, entry in entries.items()})
