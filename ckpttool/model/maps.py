"""Map parameters (hash tables): three tensors whose names say that they belong together.

A map parameter ``emb`` is the tensors ``emb.__map_keys__``, ``emb.__map_values__`` and
``emb.__map_statuses__``, with as many entries along axis 0.  So every format can hold one, and a
``.ckpt`` that gets all three makes a map parameter of them again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttool.model.catalog import TensorMeta

ENDINGS = (".__map_keys__", ".__map_values__", ".__map_statuses__")


def map_of(name: str) -> str | None:
    """The map parameter that a tensor is a part of, or None.

    Examples
    --------
    >>> map_of("emb.__map_keys__"), map_of("emb")
    ('emb', None)
    """
    for ending in ENDINGS:
        if name.endswith(ending):
            return name[: -len(ending)]
    return None


def part_names(tag: str) -> tuple[str, ...]:
    """Names of the keys, values and statuses of a map parameter."""
    return tuple(tag + ending for ending in ENDINGS)


def find_maps(tensors: Sequence[TensorMeta]) -> Mapping[str, Mapping[str, TensorMeta]]:
    """The parts of every map parameter among tensors, by its name and theirs."""
    maps: dict[str, dict[str, TensorMeta]] = {}
    for meta in tensors:
        tag = map_of(meta.name)
        if tag is not None:
            maps.setdefault(tag, {})[meta.name] = meta
    return maps


def map_problems(tensors: Sequence[TensorMeta]) -> Iterator[str]:
    """Why the parts of map parameters do not belong together, a message for each."""
    for tag, parts in find_maps(tensors).items():
        missing = [name for name in part_names(tag) if name not in parts]
        counts = [meta.shape[:1] for meta in parts.values()]
        if missing:
            yield f"{tag}: a map parameter without {' and '.join(missing)}"
        elif (
            () in counts or len(set(counts)) > 1 or any(m.text is not None for m in parts.values())
        ):
            shapes = ", ".join(f"{name} {parts[name].shape}" for name in part_names(tag))
            yield f"{tag}: parts of a map parameter that do not belong together: {shapes}"
