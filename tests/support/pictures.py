"""The data of a page that `ckpttool.operations.plot` drew, read without the script of the page."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
from ckpttool.operations import plot
from ckpttool.operations.describe import Inspected, assess, summarize
from ckpttool.problems import Diagnostics

Box = tuple[tuple[int, int], ...]  # the first element of each axis, and the one behind the last


def read_page(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    (text,) = found
    return json.loads(text)


def read_runs(text: str) -> list[int]:
    numbers: list[int] = []
    for run in filter(None, text.split(",")):
        ends, _, step = run.partition("/")
        first, _, last = ends.partition("-")
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return numbers


def distribution_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    (number,) = {how for one, _, _, how in data["tensors"] if one == name}
    return data["distributions"][number]


def boxes_of(how: dict[str, Any]) -> list[list[Box]]:
    spans = [
        [*zip(read_runs(starts), read_runs(stops), strict=True)] for starts, stops in how["spans"]
    ]
    grid = [[[*index]] for index in product(*map(range, map(len, spans)))]
    return [
        [tuple(axis[place] for axis, place in zip(spans, box, strict=True)) for box in boxes]
        for boxes in how.get("boxes", grid)
    ]


def held_boxes(how: dict[str, Any]) -> dict[int, list[Box]]:
    held: dict[int, list[Box]] = {}
    for boxes, ranks in zip(boxes_of(how), how["owners"], strict=True):
        for rank in read_runs(ranks):
            held.setdefault(rank, []).extend(boxes)
    return held


def inspection_of(checkpoint: Checkpoint) -> Inspected:
    summary, found = summarize(checkpoint), Diagnostics("inspect")
    done = assess(checkpoint, summary, found)
    return Inspected(checkpoint.catalog, checkpoint, Contents(), summary, done, found)


def draw_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return read_page(plot.draw(inspection_of(checkpoint), {}))
