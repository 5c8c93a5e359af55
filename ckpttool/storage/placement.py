"""Which stored tensor holds which slice, as ``metadata.json`` says, and held against the headers.

MindFormers of one commit put the number of the parameter where that of the rank belongs, in the
names of files as well, so that all slices of a parameter seem to be in one file.  Such metadata is
recognised; if every rank's file is there and has every tensor that its layout says, then ranks and
files are taken from the layouts and the numbers in the files' names.

Up to 2.0 the parameters of other pipeline stages could be said to be in ``opt`` files, and are in
the ``model`` files of the same ranks.

Source
------
MindFormers ``mindformers/checkpoint/metadata.py``: commit e2661fcd for the wrong numbers, 1.7 to
2.0 for the wrong kind (``get_total_params_file_mapping_info``).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckpttool.formats.metadata_json import Parameter, Place
from ckpttool.model.catalog import FileIndex, StoredTensor
from ckpttool.model.described import Box, BoxSlicing, fill_with_boxes, misfits
from ckpttool.model.region import Region
from ckpttool.model.source import Listed, Source
from ckpttool.storage.named import Faults, Files

FILE = re.compile(
    r"(?:(?P<prefix>.*)-)?(?P<kind>model|opt)-(?P<number>\d{7,18})-(?P<total>\d{7,18})\.safetensors"
)


@dataclass(slots=True)
class Placement:
    """What was made of the parameters of ``metadata.json``.

    Attributes
    ----------
    tensors
        Those of which every slice is there.
    absent
        Names of those that no file is said to hold.
    faults
        What is wrong with files.
    elsewhere
        Names of those that are in the other file of the same rank.
    problems
        What is missing or wrong.
    """

    tensors: dict[str, Source] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    elsewhere: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def place_slices(parameters: Mapping[str, Parameter], folder: str, files: Files) -> Placement:
    """The slices of all parameters, where ``metadata.json`` says they are.

    Parameters
    ----------
    parameters
        What it says.
    folder
        The files' folder, for messages.
    files
        Name to header, of the files that are there; None for one that is damaged, which has a
        message of its own.
    """
    placement = Placement()
    held = _Held(folder, files, writers(parameters))
    for name, parameter in parameters.items():
        if not parameter.stored:
            placement.absent.append(name)
            continue
        boxes: list[Box] = []
        missing: list[str] = []
        for number in range(math.prod(parameter.parts)):
            here, faults = _boxes(parameter, number, held)
            boxes += here
            if here:
                placement.faults.excuse(faults)
            else:
                missing += faults
        if missing:
            placement.faults.blame(missing, name)
            placement.problems += misfits(parameter.meta, boxes)
        else:
            _add(placement, parameter, boxes)
    placement.problems += placement.faults.problems()
    return placement


def _add(placement: Placement, parameter: Parameter, boxes: list[Box]) -> None:
    """Add a parameter that is stored completely, or what speaks against it."""
    named = {place.file for places in parameter.stored.values() for place in places}
    if any(box.tensor.file.path.rpartition("/")[2] not in named for box in boxes):
        placement.elsewhere.append(parameter.meta.name)
    wrong = list(_contradictions(parameter, boxes))
    filled = wrong or fill_with_boxes(parameter.meta, boxes)
    if isinstance(filled, BoxSlicing):
        placement.tensors[parameter.meta.name] = Source(parameter.meta, filled, Listed())
    else:
        placement.problems += filled


def writers(parameters: Mapping[str, Parameter]) -> dict[str, set[int]]:
    """The ranks that are said to have written each file."""
    found: dict[str, set[int]] = defaultdict(set)
    for parameter in parameters.values():
        for places in parameter.stored.values():
            for place in places:
                found[place.file].add(place.rank)
    return found


def has_parameter_numbers(parameters: Mapping[str, Parameter]) -> bool:
    """Whether what should be numbers of ranks are numbers of parameters.

    Then every slice of a parameter is said to be in the same file, as often as there are ranks that
    have it, and the file has the number that the rank is said to have.
    """
    most = 0
    for parameter in parameters.values():
        places = [place for held in parameter.stored.values() for place in held]
        match = FILE.fullmatch(places[0].file) if places else None
        if len(set(places)) > 1 or (match is not None and int(match["number"]) != places[0].rank):
            return False
        most = max(most, len(places))
    return most > 1


def place_by_file_numbers(
    parameters: Mapping[str, Parameter], files: Files
) -> dict[str, Parameter] | None:
    """The parameters, with the places that layouts and files' numbers give; None if these do not.

    They do if files of one number of ranks are there, of all of them, and of each rank that a
    layout names exactly one file has the tensor.
    """
    by_rank: dict[int, dict[str, FileIndex]] = defaultdict(dict)
    sets = set()
    for name, file in files.items():
        match = FILE.fullmatch(name)
        if match is None or file is None:
            return None
        by_rank[int(match["number"])][name] = file
        sets.add(match.group("prefix", "total"))
    if len(sets) != 1 or int(next(iter(sets))[1]) != len(by_rank) or max(by_rank) >= len(by_rank):
        return None
    placed = {}
    for name, parameter in parameters.items():
        if parameter.number_of is None and math.prod(parameter.parts) > 1:
            return None
        stored: dict[int, tuple[Place, ...]] = {}
        for rank in sorted(by_rank if parameter.number_of is None else parameter.number_of):
            if rank not in by_rank:
                return None
            held = [file for file, index in by_rank[rank].items() if name in index.tensors]
            if len(held) > 1 or (not held and parameter.number_of is not None):
                return None
            number = 0 if parameter.number_of is None else parameter.number_of[rank]
            stored[number] = (*stored.get(number, ()), *(Place(file, rank) for file in held))
        placed[name] = replace(parameter, stored=stored)
    return placed


class _Held(NamedTuple):
    """The files of a folder, and which rank is said to have written which."""

    folder: str
    files: Files
    writers: Mapping[str, set[int]]

    def find(self, name: str, place: Place) -> StoredTensor | None:
        """The tensor in the file of a place, or in the other one of the same rank."""
        file = self.files[place.file]
        match = FILE.fullmatch(place.file)
        if file is not None and name not in file.tensors and match is not None:
            start, stop = match.span("kind")
            kind = "opt" if match["kind"] == "model" else "model"
            other = place.file[:start] + kind + place.file[stop:]
            if int(match["number"]) == place.rank and self.writers[other] <= {place.rank}:
                file = self.files.get(other)
        return None if file is None else file.tensors.get(name)


def _boxes(parameter: Parameter, number: int, held: _Held) -> tuple[list[Box], list[str]]:
    """What is stored of a slice, and what should be and is not; "" for what has been said."""
    region = _region(parameter, number)
    boxes, faults = [], []
    for place in parameter.stored.get(number, ()):
        if place.file not in held.files:
            faults.append(f"{held.folder}/{place.file} is not there")
        elif held.files[place.file] is None:
            faults.append("")
        elif (tensor := held.find(parameter.meta.name, place)) is not None:
            boxes.append(Box(region, place.rank, tensor))
        else:
            faults.append(f"{held.folder}/{place.file} does not hold what metadata.json says")
    if not boxes and not faults:
        faults.append(f"{held.folder}/metadata.json names no file for some slices")
    return boxes, faults


def _contradictions(parameter: Parameter, boxes: list[Box]) -> Iterator[str]:
    """Boxes that a rank cannot have by its layout."""
    number_of = parameter.number_of or {}
    regions = {number: _region(parameter, number) for number in set(number_of.values())}
    for box in boxes:
        own = regions[number_of[box.rank]] if box.rank in number_of else box.region
        if own != box.region:
            yield (
                f"{parameter.meta.name}: metadata.json says that rank {box.rank} "
                f"({box.tensor.file.path}) holds elements {box.region}, and by its layout there it "
                f"holds {own}; which is right cannot be known"
            )


def _region(parameter: Parameter, number: int) -> Region:
    """The elements of a slice, which has its number in C order."""
    index: list[int] = []
    for n in reversed(parameter.parts):
        number, i = divmod(number, n)
        index.insert(0, i)
    sizes = [size // n for size, n in zip(parameter.meta.shape, parameter.parts, strict=True)]
    return Region(
        tuple(i * size for i, size in zip(index, sizes, strict=True)),
        tuple((i + 1) * size for i, size in zip(index, sizes, strict=True)),
    )
