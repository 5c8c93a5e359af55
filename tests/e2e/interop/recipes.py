"""Random models, and the cuts in which each is compiled and saved.

A family is one model: the names, shapes and types of its parameters.  Its cuts are ways to lay it
out on devices; whatever two cuts of a family save must be convertible into each other.  A recipe is
a cut in the words of ``mindspore_side/networks.py``.
"""

from __future__ import annotations

import random

FLOATS = ("float16", "float32", "bfloat16")
TYPES = (*FLOATS, "float64", "bool_")
TYPES += ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def stack(seed: int, types: tuple[str, ...], optimizer: str) -> dict[str, dict]:
    """Three dense layers, trained: by data, by columns and rows, by stages, and combined."""
    rng = random.Random(seed)
    sizes = [rng.choice((16, 24, 32, 48)) for _ in range(4)]
    dtypes = rng.sample((types * 3)[:3], 3)
    layers = [
        {
            "n_in": sizes[i],
            "n_out": sizes[i + 1],
            "dtype": dtypes[i],
            "transposed": rng.random() < 0.5,
            "cut": ("columns", "rows")[i % 2],
        }
        for i in range(3)
    ]

    def cut(data: int, model: int, optimizer_shard: int = 0, stages: int = 1) -> dict:
        stage_of = sorted(rng.randrange(stages) for _ in layers)
        stage_of[0], stage_of[-1] = 0, stages - 1
        return {
            "kind": "stack",
            "seed": seed,
            "ranks": data * model * stages,
            "stages": stages,
            "stage_of": stage_of,
            "data": data,
            "model": model,
            "optimizer": optimizer,
            "optimizer_shard": optimizer_shard,
            "layers": layers,
        }

    return {
        "data_4": cut(4, 1),
        "tensor_2": cut(1, 2),
        "tensor_2x4": cut(2, 4),
        "shard_all_4x2": cut(4, 2, -1),
        "shard_2_4x2": cut(4, 2, 2),
        "stages_2_of_2": cut(1, 2, stages=2),
        "stages_2_of_4_shard_all": cut(4, 1, -1, stages=2),
    }


def grid(seed: int, types: tuple[str, ...], optimizer: str | None) -> dict[str, dict]:
    """Parameters of up to three axes in arbitrary layouts, each of its own."""
    rng = random.Random(seed)
    items = []
    for number, dtype in enumerate(types):
        shape = [rng.choice((8, 16, 24)) for _ in range(rng.randint(1, 3))]
        items.append({"name": f"block.{number}.{dtype}", "shape": shape, "dtype": dtype})

    def recipe(ranks: int, cuts: list, mesh: dict | None, shard: int = 0) -> dict:
        return {
            "kind": "grid",
            "seed": seed,
            "ranks": ranks,
            "stages": 1,
            "mesh": mesh,
            "optimizer": optimizer,
            "optimizer_shard": shard,
            "items": [{**item, "cut": cut} for item, cut in zip(items, cuts, strict=True)],
        }

    def by_numbers(ranks: int) -> dict:
        cuts = []
        for item in items:
            cut, left = [], ranks
            for _ in item["shape"]:
                cut.append(rng.choice([n for n in (1, 2, 4, 8) if left % n == 0]))
                left //= cut[-1]
            cuts.append(cut)
        return recipe(ranks, cuts, None)

    def by_axes(matrix: list[int], shard: int = 0, beside: tuple[str, ...] = ()) -> dict:
        names = ["a", "b", "c"][: len(matrix)]
        cuts = []
        for item in items:
            axes = rng.sample(names, rng.randint(shard == 0, len(names) - (shard != 0)))
            lists: list[list[str]] = [[] for _ in item["shape"]]
            for axis in axes:
                lists[rng.randrange(len(lists))].append(axis)
            # MindSpore's own transform fails where "None" stands first.
            lists = [[*one, *beside] if one else one for one in lists]
            cuts.append([one if len(one) > 1 else (one or ["None"])[0] for one in lists])
        ranks = 1
        for size in matrix:
            ranks *= size
        return recipe(ranks, cuts, {"matrix": matrix, "axes": names}, shard)

    return {
        "numbers_2": by_numbers(2),
        "numbers_4": by_numbers(4),
        "axes_2x2x2": by_axes([2, 2, 2]),
        "axes_2x4": by_axes([2, 4]),
        "axes_4x2_none_beside": by_axes([4, 2], beside=("None",)),
        **(
            {"axes_2x2x2_shard_all": by_axes([2, 2, 2], -1), "axes_4x2_shard_2": by_axes([4, 2], 2)}
            if optimizer
            else {}
        ),
    }


def hidden(seed: int) -> dict[str, dict]:
    """Parameters with 8, 4, 2 and 1 replicas, cut by an optimizer shard that no strategy lists."""
    cuts = {
        "all": ["None", "None"],
        "four": ["a", "None"],
        "two": ["b", "None"],
        "columns": ["None", "b"],
        "one": [["a", "b"], "None"],
        "odd": ["a", "None"],  # five rows of each slice are not cut
    }
    rng = random.Random(seed)
    items = [
        {"name": name, "dtype": rng.choice(("float16", "float32")), "cut": cut}
        | {"shape": [10 if name == "odd" else rng.choice((32, 64)), rng.choice((8, 24))]}
        for name, cut in cuts.items()
    ]

    def recipe(shard: int) -> dict:
        return {
            "kind": "grid",
            "seed": seed,
            "ranks": 8,
            "stages": 1,
            "mesh": {"matrix": [2, 4], "axes": ["a", "b"]},
            "optimizer": "adamw",
            "optimizer_shard": shard,
            "aggregated": True,
            "items": items,
        }

    few = [item for item in items if item["name"] in ("two", "four")]
    return {"all": recipe(-1), "four": recipe(4), "more": {**recipe(8), "items": few}}


def families(seed: int) -> dict[str, dict[str, dict]]:
    """Family to cut to recipe."""
    optimizer = random.Random(seed).choice(("sgd", "momentum", "adam", "lamb"))
    other = stack(seed + 1, ("float16", "float32"), optimizer)
    for same in ("data_4", "tensor_2", "shard_all_4x2"):
        del other[same]  # not for another optimizer's sake
    statistics = stack(seed + 4, ("float32",), "adafactor")
    return {
        "adafactor": {name: statistics[name] for name in ("tensor_2x4", "shard_all_4x2")},
        "adafactor_stages": {"stages_2_of_4_shard_all": statistics["stages_2_of_4_shard_all"]},
        "hidden": hidden(seed + 5),
        "adamw": stack(seed, FLOATS, "adamw"),  # of the optimizers, the one that takes bfloat16
        "other": other,
        "types": grid(seed + 2, TYPES, None),
        "axes": grid(seed + 3, (*FLOATS, "float32"), "adamw"),
    }
