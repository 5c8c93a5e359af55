"""Strategy files written by hand: how parameters are cut where MindSpore keeps no record of it.

In hybrid parallel training by hand (``layerwise_parallel``) each rank saves its own tensors and
nothing else.  A file of this kind says what they are slices of.  Beside MindSpore's own strategy
file it speaks of the parameters that are not in that one.

Text
----
YAML, of which only what JSON has is read (`strict_yaml`), in a file whose name ends in ``.yaml`` or
``.yml``; or the same in JSON, in a file whose name ends in ``.json``::

    ckpttool_strategy: 1          MUST be there: the version of this form
    ranks: 8                      of all stages together; MAY be absent beside a file of MindSpore's
    stages: 2                     pipeline stages, of equally many ranks each; 1 if absent
    parameters:                   pattern: cut; the first pattern that matches a name decides
      embedding: {axis: 0, stages: [0]}
      "*.weight": [4, 1]
      "*.bias": replicated
    otherwise: replicated         what no pattern matches is the same on all ranks, which is checked

Without ``otherwise``, names that no pattern matches are an error.  Beside a file of MindSpore's,
they may be in that one, or in none: then the same is done with them as without this file.

In a pattern ``*`` stands for any characters (dots, too), ``?`` for one, ``[ab]`` for one of these.
A cut is one of

- ``replicated``: every rank holds all of it.
- ``[4, 1]``: parts along each tensor axis, as in MindSpore's ``shard``.  If that makes fewer slices
  than a stage has ranks, neighbours hold the same: of two slices on four ranks, ranks 0 and 1 the
  first.  More slices than ranks, or a number that does not divide theirs, are an error.
- ``{axis: 0, parts: 4}``: the same for a tensor of any number of axes; without ``parts`` as many as
  a stage has ranks, each its own.
- ``{parts: [4, 1]}``: as ``[4, 1]``, for what may stand beside it.
- ``{device_matrix: [2, 4], tensor_map: [1, -1]}``: as in a strategy file.  The device axes that cut
  a tensor axis are counted from the right, -1 is none; ``[[1, 0], []]`` has several.

All but ``replicated`` may have beside them

- ``optimizer_shard: 2``: parts into which axis 0 of the slice is cut once more, among its replicas.
- ``rows: [6, 4]``: the rows of each part of axis 0, if they are not equal.
- ``stages: [0]``: the stages that hold it; all of them if absent.

Any other key is an error, and so is a key that comes twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpttool.errors import CkptToolError, StrategyError, raise_all
from ckpttool.formats.strict_yaml import MAX_BYTES, Node, nodes_of_json, parse_yaml
from ckpttool.model.layout import Layout
from ckpttool.model.rules import Rule, Rules
from ckpttool.model.strategy import Strategy, count

KEY = "ckpttool_strategy"
VERSION = 1
YAML_SUFFIXES = (".yaml", ".yml")
MAX_RANKS = 1 << 20  # as of MindSpore's files
MAX_AXES = 64  # of a tensor; as NumPy 2
TOP_KEYS = (KEY, "ranks", "stages", "parameters", "otherwise")
CUT_KEYS = ("axis", "parts", "device_matrix", "tensor_map", "optimizer_shard", "rows", "stages")


def is_by_hand(path: str) -> bool:
    """Whether a strategy file is one of this kind, by its name, or by its key if it is JSON."""
    if path.endswith(YAML_SUFFIXES):
        return True
    return path.endswith(".json") and f'"{KEY}"'.encode() in Path(path).read_bytes()


def read_by_hand(path: str, listed: Strategy | None) -> Strategy:
    """A strategy that is written by hand, to be resolved when the names are known.

    Parameters
    ----------
    path
        The file.
    listed
        What MindSpore's own files say, if they are given as well; it is part of the result.

    Raises
    ------
    StrategyError
        The file is malformed, speaks of other ranks than ``listed``, or a cut in it is impossible;
        every such cut is named.
    OSError
        The file cannot be read.
    """
    try:
        top = _top(path)
        stages, stage_ranks = _sizes(top, listed)
        otherwise = top.get("otherwise")
        if otherwise is not None and otherwise.value != "replicated":
            raise _wrong(otherwise, "otherwise", "the word replicated")
        cuts = _mapping(top.get("parameters", Node({})), "parameters")
    except ValueError as error:
        raise StrategyError(path, str(error)) from error
    errors: list[CkptToolError] = []
    rules: list[Rule] = []
    for pattern, node in cuts.items():
        try:
            rules.append(_rule(path, pattern, node, stages, stage_ranks))
        except ValueError as error:
            errors.append(StrategyError(path, str(error)))
    raise_all(errors)
    known = listed or Strategy({}, stages, stage_ranks)
    said = Rules(path, tuple(rules), otherwise is not None)
    return replace(known, files=(*known.files, path), rules=said)


def _top(path: str) -> Mapping[str, Node]:
    """The document's own keys, checked to be of this form and version."""
    size = Path(path).stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"{size} bytes; a strategy by hand has {MAX_BYTES} at most")
    data = Path(path).read_bytes()
    root = nodes_of_json(data) if path.endswith(".json") else parse_yaml(data)
    if not isinstance(root.value, dict) or KEY not in root.value:
        raise ValueError(f"no strategy by hand: it has no key {KEY}")
    if root.value[KEY].value != VERSION:
        raise _wrong(root.value[KEY], KEY, f"{VERSION}, the version that this program reads")
    return _mapping(root, "", TOP_KEYS)


def _sizes(top: Mapping[str, Node], listed: Strategy | None) -> tuple[int, int]:
    """Stages, and ranks of each."""
    default = Node(listed.stages if listed else 1), Node(len(listed.ranks) if listed else None)
    stages = _number(top.get("stages", default[0]), "stages")
    ranks = _number(top.get("ranks", default[1]), "ranks")
    if listed is not None and (stages, ranks) != (listed.stages, len(listed.ranks)):
        raise ValueError(
            f"{ranks} ranks in {count(stages, 'stage')}, but {listed.origin} is for "
            f"{len(listed.ranks)} in {listed.stages}"
        )
    if not 0 < stages <= ranks <= MAX_RANKS or ranks % stages:
        raise ValueError(
            f"{ranks} ranks in {count(stages, 'stage')}, expected equally many in each, and at "
            f"most {MAX_RANKS}"
        )
    return stages, ranks // stages


def _rule(path: str, pattern: str, node: Node, stages: int, ranks: int) -> Rule:
    """The rule for a pattern, of ``ranks`` ranks in each of ``stages`` stages."""
    place = f"{path}, {node.place.split(',')[0]}" if node.place else path
    everywhere = tuple(range(stages))
    if node.value == "replicated":
        return Rule(pattern, Layout((ranks,), ()), True, everywhere, place)
    if isinstance(node.value, tuple):
        node = Node({"parts": node}, node.place)
    if not isinstance(node.value, dict):
        raise _wrong(node, pattern, "replicated, a list of parts such as [4, 1], or a mapping")
    cut = _mapping(node, pattern, CUT_KEYS)
    chosen = everywhere
    if "stages" in cut:
        chosen = tuple(sorted(set(_numbers(cut["stages"], f"{pattern}: stages"))))
        if not chosen or chosen[-1] >= stages:
            raise _wrong(cut["stages"], f"{pattern}: stages", f"some of 0 to {stages - 1}")
    rows = _numbers(cut["rows"], f"{pattern}: rows") if "rows" in cut else ()
    shard = _number(cut.get("optimizer_shard", Node(1)), f"{pattern}: optimizer_shard")
    matrix, tensor_map = _grid(pattern, node, cut, len(rows) or ranks, ranks)
    try:
        layout = Layout(matrix, tensor_map, shard, rows=rows)
    except ValueError as error:
        raise ValueError(f"{node.place}{pattern}: {error}") from error
    return Rule(pattern, layout, "axis" in cut, chosen, place)


def _grid(
    pattern: str, node: Node, cut: Mapping[str, Node], most_parts: int, ranks: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Device matrix and tensor map of a cut."""
    ways = cut.keys() - {"optimizer_shard", "rows", "stages"}
    if ways == {"device_matrix", "tensor_map"}:
        matrix = _numbers(cut["device_matrix"], f"{pattern}: device_matrix")
        if math.prod(matrix) != ranks:
            raise _wrong(
                cut["device_matrix"], f"{pattern}: device_matrix", f"{ranks} ranks, as a stage has"
            )
        return matrix, _tensor_map(cut["tensor_map"], f"{pattern}: tensor_map")
    if ways == {"parts"}:
        parts = _numbers(cut["parts"], f"{pattern}: parts")
    elif ways in ({"axis"}, {"axis", "parts"}):
        axis = _number(cut["axis"], f"{pattern}: axis")
        if axis >= MAX_AXES:
            raise _wrong(cut["axis"], f"{pattern}: axis", f"less than {MAX_AXES}")
        number = _number(cut["parts"], f"{pattern}: parts") if "parts" in cut else most_parts
        parts = (1,) * axis + (number,)
    else:
        raise ValueError(
            f"{node.place}{pattern}: {' and '.join(sorted(ways)) or 'no cut'}, expected axis (and "
            "parts), or parts, or device_matrix and tensor_map"
        )
    if 0 in parts or ranks % math.prod(parts):
        raise ValueError(
            f"{node.place}{pattern}: cut into {list(parts)}, {math.prod(parts)} slices, which "
            f"{count(ranks, 'rank')} of a stage cannot hold in equal shares"
        )
    # As MindSpore has it: axes of size 1 are left out, and replicas are the innermost axis.
    sizes = [n for n in (*parts, ranks // math.prod(parts)) if n > 1] or [1]
    axes = iter(range(len(sizes) - 1, -1, -1))
    return tuple(sizes), tuple((next(axes),) if n > 1 else () for n in parts)


def _tensor_map(node: Node, what: str) -> tuple[tuple[int, ...], ...]:
    if not isinstance(node.value, tuple):
        raise _wrong(node, what, "a list of device axes, or of such lists")
    lists = [item.value if isinstance(item.value, tuple) else (item,) for item in node.value]
    return tuple(
        () if [axis.value for axis in axes] == [-1] else _numbers(Node(axes), what)
        for axes in lists
    )


def _mapping(node: Node, what: str, keys: Sequence[str] = ()) -> dict[str, Node]:
    """The entries of a mapping; if ``keys`` are given, no others."""
    if not isinstance(node.value, dict):
        raise _wrong(node, what, "a mapping")
    unknown = [key for key in node.value if key not in keys] if keys else []
    if unknown:
        place = node.value[unknown[0]].place
        raise ValueError(
            f"{place}{what}{what and ': '}unknown key {unknown[0]}; known are {', '.join(keys)}"
        )
    return node.value


def _numbers(node: Node, what: str) -> tuple[int, ...]:
    if not isinstance(node.value, tuple):
        raise _wrong(node, what, "a list of numbers")
    return tuple(_number(item, what) for item in node.value)


def _number(node: Node, what: str) -> int:
    if not isinstance(node.value, int) or node.value < 0:
        raise _wrong(node, what, "a whole number, 0 or more")
    return node.value


def _wrong(node: Node, what: str, expected: str) -> ValueError:
    return ValueError(f"{node.place}{what}: {_shown(node)}, expected {expected}")


def _shown(node: Node) -> str:
    """A value for a message, not too long."""
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, tuple):
        return f"[{', '.join(_shown(item) for item in node.value[:8])}]"
    return "nothing" if node.value is None else repr(node.value)[:80]
