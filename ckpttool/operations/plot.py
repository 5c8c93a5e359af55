"""A picture of a checkpoint: one HTML page that shows which rank holds which slice.

The page is ``plot.html``, beside this module, with the answer of inspect as data in it.  It needs
no network, and its own script is the only one that a browser runs.  Names are data, which the
script shows as text.

Thousands of tensors have few distributions, so each is stored once.  Its regions are numbers of
spans along each axis, and its ranks are texts of runs: ``0-56/8`` is 0, 8, 16 and so on.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ckpttool.checks import run_checks
from ckpttool.formats.local import describe_os_error, read_file
from ckpttool.model.joining import join_alike
from ckpttool.model.region import Region
from ckpttool.model.slicing import BrokenTensor, Holding
from ckpttool.operations.describe import Inspected, refuses_layouts
from ckpttool.operations.distribution import (
    Distribution,
    Known,
    distribute,
    full_meta,
)
from ckpttool.operations.inspected import Answered, InspectedCheckpoint
from ckpttool.operations.summary import Entry, Placement, Summary, fold_rows, sharded_text
from ckpttool.planning.preflight import document_problem, inside_problem, is_inside
from ckpttool.problems import Diagnostic, Diagnostics, ExecutionError, StrategyError
from ckpttool.storage.files import write_document
from ckpttool.wording import printable

if TYPE_CHECKING:
    from ckpttool.model.tensors import StoredFile
    from ckpttool.operations.answer import Json

TEMPLATE = Path(__file__).with_name("plot.html")
# A name may hold "</script>"; JSON spells the letters of it otherwise, and all but ASCII besides.
_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&"}


def refusals(answer: Answered, path: str, overwrite: bool) -> Iterator[Diagnostic]:
    """Yield why no page is written: there is nothing to draw, or it cannot go there."""
    if reason := _why_not(answer):
        hint = "`ckpttool help --plot`"
        yield Diagnostic("not_written", f"no picture: {reason}", hint=hint, where=path)
    parts = answer.parts if isinstance(answer, InspectedCheckpoint) else None
    inputs = () if parts is None else _inputs(parts)
    if parts is not None and is_inside(str(Path(path).parent), parts.catalog.root):
        yield inside_problem(path, parts.catalog, "--plot")
    problem = document_problem(path, "--plot", inputs, overwrite)
    if problem is not None:
        yield problem


def _inputs(inspected: Inspected) -> tuple[str, ...]:
    catalog = inspected.catalog
    documents = (file.path for file in catalog.documents)
    damaged = (error.path for error in catalog.damaged.values())
    return (*catalog.paths, *documents, *damaged, *inspected.checkpoint.strategy.files)


def _why_not(answer: Answered) -> str:
    """Return why a checkpoint cannot be drawn; "" if it can, even with lost slices."""
    if not isinstance(answer, InspectedCheckpoint):
        return "no step was chosen"
    inspected = answer.parts
    if any(isinstance(error, StrategyError) for error in inspected.found.failures):
        return "the strategy cannot be read"
    if refuses_layouts(inspected.found):
        return "the strategy does not fit the checkpoint"
    if not (inspected.summary.entries or inspected.completeness.missing_tensors):
        return "no tensor was found"
    return ""


def write(inspected: Inspected, facts: Mapping[str, Iterable[str]], path: str) -> int:
    """Write the page of a checkpoint, completely or not at all; return its bytes.

    Raises
    ------
    ExecutionError
        It cannot be written.
    """
    page = draw(inspected, facts).encode()
    try:
        write_document(path, page)
    except OSError as error:
        reason = describe_os_error(error)
        raise ExecutionError(path, reason, hint="--plot with another path") from error
    return len(page)


def draw(inspected: Inspected, facts: Mapping[str, Iterable[str]]) -> str:
    """Return the page of a checkpoint.

    Parameters
    ----------
    inspected
        What was inspected.
    facts
        Label to lines: what the screen of inspect says first.
    """
    page = read_file(TEMPLATE).decode("utf-8")
    data = json.dumps(_describe(inspected, facts), separators=(",", ":")).translate(_ESCAPES)
    allowed = {f"{{{{{tag}}}}}": _hash_inline(page, tag) for tag in ("script", "style")}
    title = {"{{title}}": html.escape(printable(inspected.catalog.root))}
    values = {**allowed, **title, "{{data}}": data}
    return re.sub("|".join(values), lambda match: values[match[0]], page)


def _hash_inline(page: str, tag: str) -> str:
    match = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert match is not None, f"{TEMPLATE} has one <{tag}>"
    return f"'sha256-{b64encode(hashlib.sha256(match[1].encode()).digest()).decode()}'"


def _describe(inspected: Inspected, facts: Mapping[str, Iterable[str]]) -> Json:
    """Return the data of the page."""
    catalog = inspected.catalog
    done = inspected.completeness
    distributions = _Distributions(inspected)
    rows: list[Json] = []
    tensors: list[list[object]] = []
    for row in (*fold_rows(_incomplete(inspected)), *inspected.summary.rows):
        numbers = range(len(tensors), len(tensors) + len(row.entries))
        states = [*map(printable, row.prefixes)]
        rows.append({"name": printable(row.pattern), "states": states, "tensors": _runs(numbers)})
        tensors += (
            [printable(entry.name), entry.dtype, entry.nbytes, distributions.find(entry)]
            for entry in row.entries
        )
    root, said = catalog.root, _found_by_merge(inspected)
    failed = (problem for error in said.failures for problem in error.diagnostics)
    notes = [("error", problem) for problem in join_alike((*failed, *said.errors))]
    for severity in ("warning", "note"):
        notes += [(severity, note) for note in join_alike(said.of(severity))]
    of_tensors: dict[str, list[list[str]]] = {}
    for diagnostic in said:
        if diagnostic.tensor is not None and said.severity_of[diagnostic.code] != "note":
            of_tensors.setdefault(printable(diagnostic.tensor), []).append(
                [*map(printable, diagnostic.lines)]
            )
    return {
        "facts": [[label, [*map(printable, texts)]] for label, texts in facts.items()],
        "said": f"What {'merge' if inspected.has_full_tensors else 'inspect'} reports",
        "notes": [
            [severity, [*map(printable, diagnostic.lines)]] for severity, diagnostic in notes
        ],
        "problems": of_tensors,
        "word": "file" if inspected.is_merged else "rank",
        "stages": [*_stages(inspected)],
        "missing": _runs(done.missing_ranks),
        "damaged": _runs(done.unreadable_ranks),
        "files": [
            [rank, _names_below(root, file.files), file.nbytes, *_device(inspected, rank)]
            for rank, file in catalog.files.items()
        ],
        "rows": rows,
        "tensors": tensors,
        "distributions": distributions.described,
    }


def _found_by_merge(inspected: Inspected) -> Diagnostics:
    said = Diagnostics("convert")
    if inspected.has_full_tensors:  # else merge reports only that a strategy is missing
        checkpoint, choices = inspected.checkpoint, inspected.checkpoint.options
        as_merged = replace(checkpoint, options=replace(choices, unlisted=None))
        said.add(*run_checks(as_merged, inspected.contents, "convert"))
    said.extend(inspected.found)
    return said


def _names_below(root: str, files: Iterable[StoredFile]) -> str:
    paths = (file.path for file in files)
    return ", ".join(printable(path.removeprefix(root).lstrip("/") or path) for path in paths)


def _device(inspected: Inspected, rank: int) -> Iterator[str]:
    if (device := inspected.devices.get(rank)) is not None:
        yield printable(f"{device.server}, device {device.device}")


def _stages(inspected: Inspected) -> Iterator[Json]:
    """Yield the pipeline stages with their ranks; all ranks together if nothing says stages."""
    rest = set(inspected.expected_ranks)
    parallelism = inspected.summary.parallelism
    for number, stage in enumerate(parallelism.stages if parallelism else ()):
        rest.difference_update(stage.ranks)
        matrices = [*map(list, stage.device_matrices)]
        ranks = _runs(stage.ranks)
        yield {"name": f"stage {number}", "ranks": ranks, "matrices": matrices, "isStage": True}
    if rest:
        several = parallelism is not None and bool(parallelism.stages)
        name = "not in the strategy" if several else ""
        yield {"name": name, "ranks": _runs(sorted(rest)), "matrices": [], "isStage": False}


def _incomplete(inspected: Inspected) -> Summary:
    """Return the tensors whose slices make no full tensor."""
    joined = inspected.checkpoint.records if inspected.checkpoint.are_joined else ()
    broken = {tensor.name: tensor for tensor in joined if isinstance(tensor, BrokenTensor)}
    entries = []
    for name in inspected.completeness.missing_tensors:
        tensor = broken.get(name)
        placement = Placement("stored", None, (inspected.catalog.holders.get(name, ()),))
        if tensor is None or not tensor.stages:
            entries.append(
                Entry(name, "" if tensor is None else tensor.meta.dtype, None, placement)
            )
        else:
            meta = full_meta(tensor)
            entries.append(Entry(name, meta.dtype, meta.shape, placement, meta.nbytes))
    return Summary(tuple(entries), inspected.checkpoint.belongings)


class _Distributions:
    """The distributions of tensors on the page, once for those that show the same.

    Attributes
    ----------
    described
        The data of each distribution; `find` returns the number of one.
    """

    def __init__(self, inspected: Inspected) -> None:
        self.described: list[Json] = []
        self._found = inspected
        self._numbers: dict[object, int] = {}
        self._others: dict[object, Distribution] = {}
        equal = {name: samples.ranks for name, samples in inspected.summary.equal_ranks.items()}
        self._of = (
            distribute(inspected.checkpoint, None, equal) if inspected.has_full_tensors else {}
        )

    def find(self, entry: Entry) -> int:
        """Return the number of the distribution of a tensor."""
        how = self._of.get(entry.name)
        if how is None or not how.slices:
            how = self._without_layout(entry)
        equality, is_same = self._equality(entry.name, how) if how.is_of_values else ("", True)
        key = how, entry.shape, equality, is_same
        if key not in self._numbers:
            self._numbers[key] = len(self.described)
            slices = _slices_of(how, entry.shape)
            lost = (not any(part.holders for part in parts) for _, parts in slices)
            kind = "broken" if any(lost) else "slices"
            kind = "values" if how.is_of_values else kind
            kind = {"stored": "stored", "broken": "unjoined"}.get(how.known_by, kind)
            ranks = [[*chain(*(part.owners for part in parts))] for _, parts in slices]
            holders = chain(*(part.holders for _, parts in slices for part in parts))
            self.described.append(
                {
                    "kind": kind,
                    "known": self._known(how, kind),
                    "shape": entry.shape,
                    "equality": equality,
                    "same": is_same and kind != "unjoined",
                    "once": self._found.checkpoint.is_deduplicated,
                    **_spans([regions for regions, _ in slices]),
                    "owners": [_runs(sorted({*each})) for each in ranks],
                    "absent": _runs(sorted({*chain(*ranks)}.difference(holders))),
                    **_sharding(entry),
                }
            )
        return self._numbers[key]

    def _without_layout(self, entry: Entry) -> Distribution:
        """Return who holds a tensor if nothing says how its slices fit together."""
        known: Known = "broken" if self._found.has_full_tensors else "stored"
        holders = self._found.catalog.holders.get(entry.name, ())
        if known == "stored":
            having, equal = entry.placement.owners[0], self._found.summary.equal_ranks
            ways = equal[entry.name].ranks if entry.name in equal else (having,)
            groups = (tuple(filter(having.__contains__, ranks)) for ranks in ways)
            slices = [Holding(ranks, ranks) for ranks in groups]
        else:
            layouts = self._found.checkpoint.strategy.layouts.get(entry.name, ())
            expected = chain(*(layout.ranks for layout in layouts))
            lost = tuple(rank for rank in expected if rank not in holders)
            slices = [Holding(holders, holders), Holding(lost)]
        key = entry.shape, known, tuple(part for part in slices if part.owners)
        if key not in self._others:
            self._others[key] = Distribution(entry.shape or (), *key[1:])
        return self._others[key]

    def _known(self, how: Distribution, kind: str) -> str:
        """Return in words how a distribution is known."""
        is_described = self._found.catalog.description is not None
        if kind in ("broken", "unjoined"):
            return "its slices make no full tensor"
        if self._found.is_merged:
            return "a full tensor"
        if how.known_by == "listed":
            words = f"listed in the strategy{', which its slices correct' * how.is_corrected}"
            return "described by the checkpoint" if is_described else words
        return {
            "follows": "optimizer state that is sharded like its parameter",
            "whole": "each rank holds it in full",
            "unlisted": "not described" if is_described else "not in the strategy",
            "stored": "as it is stored: nothing says how it is sharded",
        }[how.known_by]

    def _equality(self, name: str, how: Distribution) -> tuple[str, bool]:
        """Return in words whether the ranks of a tensor without a layout hold the same.

        Return as well whether the ranks of each group do.
        """
        equal, groups = self._found.summary.equal_ranks.get(name), how.slices
        if len(groups) > 1:
            return "different between ranks", equal is not None
        if not groups or len(groups[0].owners) < 2 or self._found.is_merged:
            return "", False
        if equal is None:
            return "not compared (inspect --all samples every tensor)", False
        word = "the sampled pages are" if equal.sampled else "all bytes are"
        return f"{word} {'one value' if equal.one_value else 'equal on these ranks'}", True


def _slices_of(
    how: Distribution, shape: Sequence[int] | None
) -> Sequence[tuple[tuple[Region, ...], Sequence[Holding]]]:
    """Return the elements of each slice, and all that have them: a slice of each stage."""
    if how.is_of_values or how.known_by == "broken":
        whole = () if shape is None else (Region.whole(tuple(shape)),)
        return [(whole, (part,)) for part in how.slices]
    slices: dict[tuple[Region, ...], list[Holding]] = {}
    for part in how.slices:
        slices.setdefault(part.regions, []).append(part)
    return [*slices.items()]


def _sharding(entry: Entry) -> Json:
    layout = entry.placement.layout
    how: Json = {}
    if entry.placement.is_listed:
        how["sharded"] = sharded_text(entry.placement)
    if layout is None:
        return how
    return {**how, "matrix": layout.device_matrix, "map": layout.tensor_map}


def _spans(slices: Sequence[tuple[Region, ...]]) -> Json:
    """Describe regions by numbers of spans along each axis; a grid of slices needs no numbers."""
    regions = [*chain(*slices)]
    axes = [
        sorted(set(zip(starts, stops, strict=True)))
        for starts, stops in zip(
            zip(*(region.start for region in regions), strict=True),
            zip(*(region.stop for region in regions), strict=True),
            strict=True,
        )
    ]
    places = [{span: number for number, span in enumerate(axis)} for axis in axes]
    boxes = [
        [
            [
                place[span]
                for place, span in zip(
                    places, zip(region.start, region.stop, strict=True), strict=True
                )
            ]
            for region in of_slice
        ]
        for of_slice in slices
    ]
    spans = [[_runs([a for a, _ in axis]), _runs([b for _, b in axis])] for axis in axes]
    is_grid = boxes == [[[*index]] for index in product(*(range(len(axis)) for axis in axes))]
    return {"spans": spans} if is_grid else {"spans": spans, "boxes": boxes}


def _runs(numbers: Sequence[int]) -> str:
    """Return numbers as runs, in their order.

    Examples
    --------
    >>> _runs([0, 1, 2, 3]), _runs([0, 8, 16, 24, 5]), _runs([4, 4])
    ('0-3', '0-24/8,5', '4,4')
    """
    texts, i = [], 0
    while i < len(numbers):
        stop = i + 1
        step = numbers[stop] - numbers[i] if stop < len(numbers) else 0
        while step > 0 and stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        if stop - i < 3:
            stop = i + 1
            texts.append(str(numbers[i]))
        else:
            texts.append(f"{numbers[i]}-{numbers[stop - 1]}" + (f"/{step}" if step > 1 else ""))
        i = stop
    return ",".join(texts)
