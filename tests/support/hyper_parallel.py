"""Writes folders as hyper-parallel's checkpoints are, with neither the package nor hyper-parallel.

Classes with the names and attributes of its own stand in for them, so that Python's ``pickle``
writes of them what it would write of the real ones.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tests.support.checkpoint2 import write_safetensors
from tests.support.readers import Entry

Box = tuple[tuple[int, ...], tuple[int, ...]]  # first elements and sizes

ATTRIBUTES = {
    "metadata": {
        "Metadata": ("state_dict_metadata", "planner_data", "storage_data", "version"),
        "TensorStorageMetadata": ("properties", "size", "chunks"),
        "BytesStorageMetadata": (),
        "TensorProperties": ("dtype", "requires_grad", "memory_format"),
        "ChunkStorageMetadata": ("offsets", "sizes"),
        "MetadataIndex": ("fqn", "offset", "index"),
    },
    "storage": {"StorageInfo": ("relative_path", "offset", "length", "tensor_key")},
}


@cache
def classes(package: str) -> types.SimpleNamespace:
    """Return stand-ins for the classes of ``hyper_parallel.core.PACKAGE``."""
    made = {}
    for module, names in ATTRIBUTES.items():
        for name, attributes in names.items():
            made[name] = _class(f"hyper_parallel.core.{package}.{module}", name, attributes)
    return types.SimpleNamespace(**made)


def _class(module: str, name: str, attributes: tuple[str, ...]) -> type:
    def init(self: Any, *values: object) -> None:
        self.__dict__.update(zip(attributes, values, strict=False))

    cls = type(name, (), {"__module__": module, "__init__": init})
    parts = module.split(".")
    for i in range(len(parts)):
        name_above = ".".join(parts[: i + 1])
        sys.modules.setdefault(name_above, types.ModuleType(name_above))
    setattr(sys.modules[module], name, cls)
    return cls


@dataclass
class HyperSave:
    """What is to be saved, and how; `write` writes it.

    ``boxes`` has for every tensor its boxes, and for each of them the ranks that have it.
    """

    entries: Mapping[str, Entry]
    boxes: Mapping[str, Mapping[Box, Iterable[int]]]
    package: str = "distributed_checkpoint"
    remove_redundancy: bool = False
    collectives: bool = True
    protocol: int = 4
    version: str | None = "1.0"
    objects: tuple[str, ...] = ()
    spell_dtype: Any = str
    extra: Mapping[int, Mapping[str, Entry]] = field(
        default_factory=dict
    )  # in files, not described

    def write(self, folder: Path) -> Path:
        """Write the files."""
        folder.mkdir(parents=True, exist_ok=True)
        kind = classes(self.package)
        ranks: dict[int, list[tuple[str, Box]]] = {}
        for name in self.entries:
            for box, owners in self.boxes[name].items():
                for rank in sorted(owners)[: 1 if self.remove_redundancy else None]:
                    ranks.setdefault(rank, []).append((name, box))
        documents = {}
        for rank, held in ranks.items():
            count = Counter(name for name, _ in held)
            tensors, places, seen = {}, [], Counter()
            for name, box in held:
                key = name
                if count[name] > 1:
                    key = f"{name}.__dcp_chunk_{seen[name]}"
                    seen[name] += 1
                tensors[key] = self.part(name, box)
                places.append((name, box, f"_rank{rank}_.safetensors", key))
            tensors |= self.extra.get(rank, {})
            write_safetensors(folder / f"_rank{rank}_.safetensors", tensors)
            documents[rank] = places
        if self.collectives:
            everything = [place for rank in sorted(documents) for place in documents[rank]]
            self.dump(folder / ".metadata", kind, everything)
        for rank, places in documents.items() if not self.collectives else ():
            early = self.package == "checkpoint"
            name = f".rank{rank}_metadata" if early else f"{rank}.metadata"
            self.dump(folder / name, kind, places)
        return folder

    def part(self, name: str, box: Box) -> Entry:
        """Return the elements of a box."""
        start, sizes = box
        array = self.entries[name].array()
        spans = tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))
        cut = array[spans] if spans else array
        return Entry(self.entries[name].dtype, cut.shape, cut.tobytes())

    def dump(
        self, path: Path, kind: types.SimpleNamespace, places: list[tuple[str, Box, str, str]]
    ) -> None:
        """Write one metadata file."""
        tensors: dict[str, Any] = {name: kind.BytesStorageMetadata() for name in self.objects}
        storage: dict[Any, Any] = {}
        for name in self.objects:
            info = (f"{name}_rank0.bytes", 0, 17, None)
            storage[kind.MetadataIndex(name, (), None)] = kind.StorageInfo(*info)
        for name, (start, sizes), file, key in places:
            entry = self.entries[name]
            if name not in tensors:
                properties = kind.TensorProperties(self.spell_dtype(entry.dtype), False, None)
                tensors[name] = kind.TensorStorageMetadata(properties, entry.shape, [])
            chunks = tensors[name].chunks
            index = kind.MetadataIndex(name, start, len(chunks))
            storage[index] = kind.StorageInfo(file, 0, -1, key)
            chunks.append(kind.ChunkStorageMetadata(start, sizes))
        planner = {name: ("model", *name.split(".")) for name in self.entries}
        metadata = kind.Metadata(tensors, planner, storage, self.version)
        if self.version is None:
            del metadata.version
        path.write_bytes(pickle.dumps(metadata, self.protocol))
