"""Merge real checkpoints with strategies that are wrong, and count what comes of it.

Two sweeps.  *edits*: one parameter of the right strategy is given another layout, each parameter in
turn.  *swaps*: the whole strategy is one that was written for another checkpoint.  Every merge is
compared with the one by the right strategy:

refused   an error
same      the same tensors: the edit changes nothing that matters
warned    other tensors, with a warning that the right strategy does not give
noted     other tensors, with no more than a note
silent    other tensors, without a word
open      as silent or noted, but nothing in the files and the strategy can tell: see below
crashed   an internal error

``noted``, ``silent`` and ``crashed`` are defects; they are listed, one a line.

An outcome is open if a second checkpoint, legal under the wrong strategy, has the same files.  The
proof is that checkpoint: what the merge wrote.  Every rank's slice of it by the wrong strategy is
compared with the rank's file, byte for byte, and optimizer state has the shape of its parameter,
and its layout if the strategy does not list it.

    python scripts/sweep_strategies.py                           # every golden case
    python scripts/sweep_strategies.py --cases tp_conv_4d -v     # one of them, with all messages
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec.structs import replace

import ckpttool
from ckpttool.checkpoint.optimizer_state import state_layouts
from ckpttool.model.layout import Layout
from ckpttool.model.names import drop_unlike_shapes, match_states, parse_name
from ckpttool.model.strategy import Strategy
from ckpttool.operations.jobs import Order
from ckpttool.operations.load import Source
from ckpttool.operations.run import make_plan
from ckpttool.problems import severities
from ckpttool.storage.region_io import FlatFiles

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckpttool.model.catalog import Catalog
    from ckpttool.model.tensors import StoredTensor
    from ckpttool.typed import UnlistedChoice


ROOT = Path(__file__).parent.parent
WRONG = ("crashed", "noted", "silent")
INTERNAL = "internal error: "
MERGED = "merged.ckpt"
SWEEPS = ("edit", "swap")

Content = dict[str, tuple[str, list[int], list[str]]]  # dtype, shape, hashes


class Outcome(NamedTuple):
    """What a merge gave: tensors, or none and the error; its warnings and its notes."""

    content: Content | None
    warnings: frozenset[str]
    notes: frozenset[str]
    error: str = ""


def merge(
    catalog: Catalog,
    strategy: Strategy,
    folder: Path,
    executor: Executor,
    unlisted: UnlistedChoice | None = None,
) -> Outcome:
    """Merge by ``strategy`` and hash what comes of it."""
    path = folder / MERGED
    try:
        options = ckpttool.ResolveOptions(unlisted=unlisted), ckpttool.OutputOptions(overwrite=True)
        plan, destination = make_plan(
            Order("merge", [Source.of(catalog, strategy)], str(path), (), *options)
        )
    except ckpttool.CkptToolError as error:
        return Outcome(None, frozenset(), frozenset(), str(error))
    except Exception as error:  # a bug, which the sweep reports and goes on
        return Outcome(None, frozenset(), frozenset(), f"{INTERNAL}{error!r}")
    ckpttool.execute(plan, destination, executor)
    manifest = json.loads(Path(f"{path}.ckpttool.json").read_bytes())
    tensors = manifest["outputs"][0]["tensors"]
    column = severities("convert")
    warnings = frozenset(one.text for one in plan.notes if column[one.code] == "warning")
    notes = frozenset(one.text for one in plan.notes if column[one.code] == "note")
    return Outcome(
        {one["name"]: (one["dtype"], one["shape"], one["sha256"]) for one in tensors},
        warnings,
        notes,
    )


def is_legal(catalog: Catalog, strategy: Strategy, path: Path) -> bool:
    """Return whether the ranks' files are those of the merged checkpoint under ``strategy``."""
    full = ckpttool.read_index(str(path)).tensors
    content = {name: _read(tensor) for name, tensor in full.items()}
    metas = {name: one.meta for name, one in full.items()}
    owners = drop_unlike_shapes(match_states(strategy.layouts, metas), metas)
    for rank, file in catalog.files.items():
        for name, tensor in file.tensors.items():
            if name not in content:
                return False
            expected = content[name]
            layouts = strategy.layouts.get(name, ())
            if not layouts and tensor.meta.shape != expected.shape[:-1]:  # an unlisted state
                layouts = state_layouts(strategy, name, owners)
            held = [layout for layout in layouts if rank in layout.ranks]
            if len(held) != min(len(layouts), 1):
                return False
            if held and held[0].why_not(expected.shape[:-1]) is not None:
                return False  # it was corrected
            if held:
                box = held[0].region(rank, expected.shape[:-1])
                expected = expected[tuple(map(slice, box.start, box.stop))]
            if not np.array_equal(expected, _read(tensor)):
                return False
    return all(
        base not in full or full[base].meta.shape == tensor.meta.shape
        for name, tensor in full.items()
        if (base := parse_name(name).same_shape_parameter) is not None
    )


def _read(tensor: StoredTensor) -> np.ndarray:
    """The bytes of a tensor, with one more axis for those of an element."""
    data = np.empty(tensor.meta.nbytes, np.uint8)
    if data.size:
        with FlatFiles(data.size) as files:
            files.read_bytes(tensor, 0, data.data)
    return data.reshape(*tensor.meta.shape, tensor.meta.itemsize)


def judge(right: Outcome, other: Outcome) -> str:
    """Return what became of a merge by a wrong strategy."""
    if other.content is None:
        return "crashed" if other.error.startswith(INTERNAL) else "refused"
    if other.content == right.content:
        return "same"
    if other.warnings - right.warnings:
        return "warned"
    return "noted" if other.notes - right.notes else "silent"


def edits(strategy: Strategy) -> Iterator[tuple[str, str, Strategy]]:
    """Yield the name of a parameter, an edit, and the strategy with that edit alone."""
    for name, layouts in strategy.layouts.items():
        seen = {layouts}
        for edit in dict.fromkeys(kind for layout in layouts for kind, _ in _edited(layout)):
            changed = tuple(dict(_edited(layout)).get(edit, layout) for layout in layouts)
            if changed in seen:
                continue
            seen.add(changed)
            yield name, edit, replace(strategy, layouts={**strategy.layouts, name: changed})


def _edited(layout: Layout) -> Iterator[tuple[str, Layout]]:
    shard, maps = layout.optimizer_shard, layout.tensor_map
    if any(maps):
        yield from _try("not sharded", layout, tensor_map=((),) * len(maps))
    for i, axes in enumerate(maps):
        for j in range(len(maps)):
            if axes and i != j:
                moved = [*maps]
                moved[i], moved[j] = (), (*maps[j], *axes)
                yield from _try(f"axis {i} to {j}", layout, tensor_map=tuple(moved))
            if i < j and maps[i] != maps[j]:
                exchanged = [*maps]
                exchanged[i], exchanged[j] = maps[j], maps[i]
                yield from _try(f"axes {i} and {j} exchanged", layout, tensor_map=tuple(exchanged))
        used = {axis for of in maps for axis in of}
        for axis in range(len(layout.device_matrix)):
            if axis not in used and layout.device_matrix[-1 - axis] > 1:
                other = (*maps[:i], (axis,), *maps[i + 1 :])
                what = "other device axis" if axes else "sharded"
                yield from _try(f"{what} {axis} on {i}", layout, tensor_map=other)
    if shard > 1 and shard % 2 == 0 and shard > 2:
        yield from _try("half of the shard", layout, optimizer_shard=shard // 2)
    if shard > 1:
        yield from _try("no shard", layout, optimizer_shard=1)
    if shard == 1 and layout.replicas > 1 and maps:
        yield from _try("optimizer shard added", layout, optimizer_shard=layout.replicas)


def _try(edit: str, layout: Layout, **changes) -> Iterator[tuple[str, Layout]]:
    """The edited layout, without rows and optimizer shard that no longer fit, unless impossible."""
    for rest in ({}, {"optimizer_shard": 1}, {"rows": ()}, {"rows": (), "optimizer_shard": 1}):
        try:
            yield edit, replace(layout, **{**changes, **rest})
        except ValueError:
            continue
        return


def strategy_of(case: Path, side: str) -> Strategy | None:
    """The strategy of one side of a golden case; None if it has none."""
    for name in (f"{side}_strategy.ckpt", f"{side}_strategy.json"):
        if (case / name).is_file():
            return ckpttool.read_strategy([str(case / name)])
    return None


def all_cases(folder: Path) -> list[Path]:
    """The golden cases with a source and a strategy that need no key."""
    return [
        case
        for case in sorted(folder.iterdir())
        if (case / "src").is_dir()
        and strategy_of(case, "src") is not None
        and not case.name.startswith("encrypted")
    ]


def wrong_strategies(
    strategy: Strategy, others: Mapping[str, Strategy], sweeps: Collection[str]
) -> Iterator[tuple[str, Strategy]]:
    """Yield what is wrong with a strategy and that strategy: edits of the right one, and others."""
    if "edit" in sweeps:
        yield from ((f"edit {name}: {edit}", one) for name, edit, one in edits(strategy))
    names = set(strategy.layouts)
    for label, other in others.items() if "swap" in sweeps else ():
        is_related = len(names & set(other.layouts)) * 2 > len(names)
        is_other = other.layouts != strategy.layouts
        if is_related and is_other and len(other.ranks) == len(strategy.ranks):
            yield f"swap {label}", other


def sweep(
    folder: Path,
    cases: Collection[str] = (),
    sweeps: Collection[str] = SWEEPS,
    is_verbose: bool = False,
) -> Counter[str]:
    """Merge by wrong strategies, print what went wrong, and return the counts.

    Parameters
    ----------
    folder
        Golden cases.
    cases
        Names of those to be merged; all by default.  Strategies of the others are swapped in.
    sweeps
        ``"edit"``, ``"swap"`` or both.
    is_verbose
        Print every outcome with its new messages.
    """
    counts: Counter[str] = Counter()
    strategies = {
        f"{case.name}/{side}": strategy
        for case in all_cases(folder)
        for side in ("src", "dst")
        if (strategy := strategy_of(case, side)) is not None
    }
    with tempfile.TemporaryDirectory() as temporary, ckpttool.open_engine("inline") as executor:
        for case in all_cases(folder):
            if cases and case.name not in cases:
                continue
            catalog = ckpttool.scan(str(case / "src"))
            strategy = strategies[f"{case.name}/src"]
            for unlisted in (None, "first"):  # some cases have parameters that need a decision
                run = partial(merge, catalog, folder=Path(temporary), executor=executor)
                right = run(strategy, unlisted=unlisted)
                if right.content is not None:
                    break
            assert right.content is not None, f"{case.name}: {right.error}"
            for label, wrong in wrong_strategies(strategy, strategies, sweeps):
                outcome = run(wrong, unlisted=unlisted)
                verdict = judge(right, outcome)
                if verdict in WRONG[1:] and is_legal(catalog, wrong, Path(temporary, MERGED)):
                    verdict = "open"
                counts[f"{label.split()[0]} {verdict}"] += 1
                if verdict in WRONG or is_verbose:
                    news = (outcome.warnings | outcome.notes) - (right.warnings | right.notes)
                    texts = [outcome.error, *sorted(news)] if is_verbose else []
                    print(
                        "\n         ".join(
                            [f"{verdict:8} {case.name}: {label}", *filter(None, texts)]
                        )
                    )
    return counts


def main() -> None:
    """Parse the command line, sweep, and exit with 1 if a result is wrong without a warning."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "tests" / "golden")
    parser.add_argument("--cases", nargs="*", default=(), help="names of cases; all by default")
    parser.add_argument("--sweeps", nargs="*", default=SWEEPS, choices=SWEEPS)
    parser.add_argument("-v", "--verbose", action="store_true", help="print every outcome")
    args = parser.parse_args()
    counts = sweep(args.folder, args.cases, args.sweeps, args.verbose)
    for what, number in sorted(counts.items()):
        print(f"{number:6} {what}")
    sys.exit(any(what.endswith(WRONG) for what in counts))


if __name__ == "__main__":
    main()
