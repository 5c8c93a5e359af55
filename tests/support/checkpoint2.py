"""Writes folders as MindFormers' "Checkpoint 2.0" does, without the package.

Written down from what MindFormers 1.7 to 2.1 do when they save: the slice number is counted
through the flattened tensor map, replicas are counted in the order of ranks, redundancy is removed
by giving each slice to the least loaded rank that has it (few candidates first, then large ones,
then by the text of their key), and files are numbered over the ranks that hold something.  Slices
are cut by the oracle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.oracle import OracleLayout, take
from tests.support.file_bytes import safetensors
from tests.support.readers import SAFETENSORS_TYPES, Entry, entry_of

WORDS = {name: word for word, name in SAFETENSORS_TYPES.items()}
COMMON = {
    "epoch_num": 1,
    "step_num": 7,
    "global_step": 7,
    "loss_scale": 1.5,
    "global_batch_size": 8,
}


def write_safetensors(path: Path, tensors: Mapping[str, Entry]) -> None:
    """Write a file with these tensors, contents in the order of the names."""
    header, data = {"__metadata__": {"format": "ms"}}, b""
    for name, entry in sorted(tensors.items()):
        span = [len(data), len(data) + len(entry.data)]
        spelled = {"dtype": WORDS[entry.dtype], "shape": list(entry.shape), "data_offsets": span}
        header[name] = spelled
        data += entry.data
    text = json.dumps(header).encode()
    path.write_bytes(safetensors(text + b" " * (-len(text) % 8), data))  # as the library pads it


def slice_number(layout: OracleLayout, rank: int) -> int:
    """Return the number of the slice of a rank, counted through the flattened tensor map."""
    matrix = layout.device_matrix
    coords = np.unravel_index(rank - layout.first_rank, matrix) if matrix else ()
    number = 0
    for axes in layout.tensor_map:
        for axis in axes:
            number = number * matrix[-1 - axis] + int(coords[-1 - axis])
    return number


def spell(layout: OracleLayout) -> dict[str, object]:
    """Return a layout as ``mindspore.parallel.Layout.to_dict`` gives it."""
    spelled = {0: lambda axes: -1, 1: lambda axes: axes[0]}
    return {
        "device_matrix": list(layout.device_matrix),
        "tensor_map": [spelled.get(len(axes), list)(axes) for axes in layout.tensor_map],
        "interleaved_parallel": False,
        "alias_name": [f"d{i}" for i in range(len(layout.device_matrix))],
        "rank_list": list(layout.ranks),
    }


@dataclass
class Save:
    """What is to be saved, and how; `write` writes it.

    ``layouts`` has for each parameter one layout for every stage that has it; what has none is on
    every rank and no part of the metadata, as MindFormers has it for what has no strategy.
    """

    entries: Mapping[str, Entry]
    layouts: Mapping[str, tuple[OracleLayout, ...]]
    ranks: int
    is_optimizer: Callable[[str], bool] = lambda name: name.startswith("adam_m.")
    remove_redundancy: bool = False
    prefix: str | None = None
    spell_dtype: Callable[[str], str] = str
    uncut: frozenset[str] = frozenset()  # what has no layout in the metadata, and is on every rank
    like: Mapping[str, str] = field(default_factory=dict)  # unlisted, and cut like another
    has_parameter_numbers: bool = False  # as the commit e2661fcd wrote them
    has_rank_groups: bool = True  # since 1.9

    def held(self, rank: int) -> dict[str, int]:
        """Return the listed parameters that a rank has, and the numbers of its slices."""
        held = dict.fromkeys(self.uncut, 0)
        for name, layouts in self.layouts.items():
            for layout in layouts:
                if rank in layout.ranks:
                    held[name] = slice_number(layout, rank)
        return {name: held[name] for name in self.entries if name in held}

    def slice_of(self, name: str, rank: int) -> Entry | None:
        """Return what a rank has of a tensor."""
        entry = self.entries[name]
        for layout in self.layouts.get(self.like.get(name, name), ()):
            if rank in layout.ranks:
                part = take(entry.array(), layout, rank)
                return entry_of(part, entry.dtype)
        is_everywhere = name not in self.layouts and name not in self.like
        return entry if is_everywhere else None

    def write(self, folder: Path) -> dict[str, object]:
        """Write the files, ``metadata.json`` and ``common.json``; return the metadata."""
        folder.mkdir(parents=True, exist_ok=True)
        places = self._balanced() if self.remove_redundancy else self._everywhere()
        contents: dict[str, dict[str, Entry]] = {}
        for name, _, rank, file in places:
            contents.setdefault(file, {})[name] = self.slice_of(name, rank)
        if not self.remove_redundancy:
            for rank in range(self.ranks):
                for name in self.entries:
                    part = self.slice_of(name, rank)
                    if part is not None:
                        contents.setdefault(self._file(name, rank, self.ranks), {})[name] = part
                contents.setdefault(self._file("", rank, self.ranks), {})
        for file, tensors in contents.items():
            write_safetensors(folder / file, tensors)
        metadata = {
            "state_dict_metadata": self._tensors(),
            "storage_data": self._storage(places),
        }
        text = json.dumps(metadata, ensure_ascii=False, indent=4)
        (folder / "metadata.json").write_text(text, encoding="utf-8")
        (folder / "common.json").write_text(json.dumps(COMMON, indent=4))
        return metadata

    def write_root(self, root: Path, iteration: int = 1, word: str = "iteration") -> Path:
        """Write the same in a folder of its iteration, which is then the last complete one."""
        folder = root / f"{word}_{iteration:08d}"
        self.write(folder)
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        return folder

    def _file(self, name: str, number: int, total: int) -> str:
        kind = "opt" if self.is_optimizer(name) else "model"
        prefix = f"{self.prefix}-" if self.prefix else ""
        return f"{prefix}{kind}-{number:07d}-{total:07d}.safetensors"

    def _tensors(self) -> dict[str, object]:
        tensors: dict[str, dict[str, object]] = {}
        for rank in range(self.ranks):
            for name, number in self.held(rank).items():
                layout = next((one for one in self.layouts.get(name, ())), None)
                entry = self.entries[name]
                parts = parts_of(layout, len(entry.shape))
                local = [size // n for size, n in zip(entry.shape, parts, strict=True)]
                tensor = tensors.setdefault(name, self._tensor(entry, layout, parts))
                chunk = {"global_offset": [number], "local_shape": local}
                if chunk not in tensor["chunk"]:
                    tensor["chunk"].append(chunk)
        return tensors

    def _tensor(
        self, entry: Entry, layout: OracleLayout | None, parts: list[int]
    ) -> dict[str, object]:
        replicas: list[int] = []
        seen: dict[int, int] = {}
        for rank in () if layout is None else layout.ranks:
            number = slice_number(layout, rank)
            replicas.append(seen.get(number, 0))
            seen[number] = replicas[-1] + 1
        return {
            "properties": {
                "dtype": self.spell_dtype(entry.dtype),
                "replica_id": replicas if layout is not None else 0,
                "allow_shape_mismatch": False,
                "allow_to_save": True,
            },
            "global_shape": list(entry.shape),
            "axis_fragmentations": parts,
            "layout": None if layout is None else spell(layout),
            "chunk": [],
        }

    def _everywhere(self) -> list[tuple[str, int, int, str]]:
        """Yield name, slice number, rank and file of all slices; each rank saves all it has."""
        return [
            (name, number, rank, self._file(name, rank, self.ranks))
            for rank in range(self.ranks)
            for name, number in self.held(rank).items()
        ]

    def _balanced(self) -> list[tuple[str, int, int, str]]:
        """Yield the same; one rank saves each slice."""
        places = []
        for is_optimizer in (False, True):
            ranks_of: dict[str, list[int]] = {}
            keys: dict[str, tuple[str, int, int]] = {}
            for rank in range(self.ranks):
                for name, number in self.held(rank).items():
                    if self.is_optimizer(name) == is_optimizer:
                        ranks_of.setdefault(str((name, (number,))), []).append(rank)
                        nbytes = len(self.slice_of(name, rank).data)
                        keys[str((name, (number,)))] = (name, number, nbytes)
            loads = dict.fromkeys(range(self.ranks), 0)
            chosen: dict[int, list[tuple[str, int]]] = {}
            for key in sorted(ranks_of, key=lambda k: (len(ranks_of[k]), -keys[k][2], k)):
                rank = min(ranks_of[key], key=lambda rank: loads[rank])
                loads[rank] += keys[key][2]
                chosen.setdefault(rank, []).append(keys[key][:2])
            for file, rank in enumerate(sorted(chosen)):
                places += [
                    (name, number, rank, self._file(name, file, len(chosen)))
                    for name, number in chosen[rank]
                ]
        return places

    def _storage(self, places: Iterable[tuple[str, int, int, str]]) -> dict[str, object]:
        storage: dict[str, list[dict[str, object]]] = {}
        for name, number, rank, file in places:
            if self.has_parameter_numbers:
                rank = list(self.held(rank)).index(name)
                file = self._file(name, rank, self.ranks)
            entry = {"file_name": file, "storage_rank": rank}
            if self.has_rank_groups:
                ranks = [r for r in range(self.ranks) if self.held(r).get(name) == number]
                entry["rank_group"] = ranks
            storage.setdefault(str((name, (number,))), []).append(entry)
        return storage


def parts_of(layout: OracleLayout | None, ndim: int) -> list[int]:
    """Return the number of slices along each axis."""
    if layout is None:
        return [1] * ndim
    return [math.prod(layout.device_matrix[-1 - a] for a in axes) for axes in layout.tensor_map]


def change(folder: Path, edit: Callable[[dict], object]) -> None:
    """Change a ``metadata.json``."""
    path = folder / "metadata.json"
    metadata = json.loads(path.read_text(encoding="utf-8"))
    edit(metadata)
    path.write_text(json.dumps(metadata), encoding="utf-8")


@dataclass(frozen=True)
class FsdpSave:
    """Tensors cut by rows on the fsdp mesh alone, as MindFormers saves them in PyNative.

    Rank ``r`` of ``fsdp * tp`` ranks has place ``r // tp`` in the list of the ranks that have the
    same ``r % tp``.  MindFormers lists these ranks for the lowest rank only, and numbers the slice
    of rank ``r`` by ``r % fsdp``.
    """

    entries: Mapping[str, Entry]
    fsdp: int
    tp: int
    uncut: frozenset[str] = frozenset()

    def write(self, folder: Path, saved_by: Mapping[str, Iterable[int]] | None = None) -> None:
        """Write a folder; ``saved_by`` has the ranks that saved a tensor, by default all."""
        folder.mkdir(parents=True)
        ranks = range(self.fsdp * self.tp)
        files: dict[int, dict[str, Entry]] = {rank: {} for rank in ranks}
        tensors, storage = {}, {}
        for name, entry in self.entries.items():
            number_of_slices = 1 if name in self.uncut else self.fsdp
            parts = np.split(entry.array(), number_of_slices)
            tensors[name] = self._tensor(entry, number_of_slices)
            for rank in (saved_by or {}).get(name, ranks):
                part = parts[rank // self.tp % number_of_slices]
                files[rank][name] = entry_of(part, entry.dtype)
                number = rank % number_of_slices
                place = {
                    "file_name": self._file(rank),
                    "storage_rank": rank,
                    "rank_group": [r for r in ranks if r % number_of_slices == number],
                }
                storage.setdefault(str((name, (number,))), []).append(place)
        for rank, held in files.items():
            write_safetensors(folder / self._file(rank), held)
        metadata = {"state_dict_metadata": tensors, "storage_data": storage}
        (folder / "metadata.json").write_text(json.dumps(metadata))

    def _file(self, rank: int) -> str:
        return f"checkpoint-model-{rank:07d}-{self.fsdp * self.tp:07d}.safetensors"

    def _tensor(self, entry: Entry, number_of_slices: int) -> dict[str, object]:
        rows, *others = entry.shape
        local = [rows // number_of_slices, *others]
        return {
            "properties": {"dtype": entry.dtype, "replica_id": [0] * self.fsdp},
            "global_shape": list(entry.shape),
            "axis_fragmentations": [number_of_slices, *[1] * len(others)],
            "layout": {
                "device_matrix": [self.fsdp],
                "tensor_map": [0 if number_of_slices > 1 else -1, *[-1] * len(others)],
                "rank_list": list(range(0, self.fsdp * self.tp, self.tp)),
            },
            "chunk": [
                {"global_offset": [n], "local_shape": local} for n in range(number_of_slices)
            ],
        }
