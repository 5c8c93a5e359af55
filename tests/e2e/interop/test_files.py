"""Files with every type that MindSpore saves, and the documented recipes for loading them."""

from __future__ import annotations

import math
import random

import pytest

import ckpttool
from ckpttool.model.names import map_component_names
from tests.e2e.interop.cases import SEED
from tests.e2e.interop.client import MindSporeError
from tests.e2e.interop.saved import as_digests
from tests.support.checkpoints import write_file
from tests.support.commands import run_well
from tests.support.pages import DOCS, python_block
from tests.support.readers import read

LOADING = DOCS / "guides" / "loading.md"

# Bytes per element of the types that MindSpore saves and loads, by their names in Python ...
LOADED = dict.fromkeys(("bool_", "int8", "uint8", "qint4x2"), 1)
LOADED |= dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2)
LOADED |= dict.fromkeys(("int32", "uint32", "float32"), 4)
LOADED |= dict.fromkeys(("int64", "uint64", "float64"), 8)
# ... and of those that it saves only.
SAVED_ONLY = dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "hifloat8"), 1)
SAVED_ONLY |= {"complex64": 8, "complex128": 16}
SHAPES = ((), (1,), (7,), (3, 5), (2, 3, 4))


def tensors(types):
    """Tensors of random bits, NaNs of every kind among them: name -> [dtype, shape, bytes]."""
    rng = random.Random(SEED)
    made = {}
    for dtype, itemsize in types.items():
        for number, shape in enumerate(SHAPES):
            size = itemsize * math.prod(shape)
            data = (
                bytes(b & 1 for b in rng.randbytes(size))
                if dtype == "bool_"
                else rng.randbytes(size)
            )
            made[f"layer/{number}.{dtype}"] = [dtype, shape, data.hex()]
    return made


APPENDED = {"epoch_num": 3, "scale": 0.1, "done": True, "note": "step 10 → 12, \N{ROCKET}"}


def test_ckpt_with_every_type_is_written_again_byte_for_byte(mindspore, tmp_path):
    saved, again = tmp_path / "saved.ckpt", tmp_path / "again.ckpt"
    every = tensors(LOADED | SAVED_ONLY)
    mindspore.ask("save_values", tensors=every, out=saved, append=APPENDED)
    run_well("merge", saved, "-o", again)
    assert again.read_bytes() == saved.read_bytes()


def test_safetensors_with_every_type_is_written_again_byte_for_byte(mindspore, tmp_path):
    saved, again = tmp_path / "saved.safetensors", tmp_path / "again.safetensors"
    mindspore.ask("save_values", tensors=tensors(LOADED), out=saved)
    run_well("merge", saved, "-o", again)
    assert read(again) == read(saved)
    assert as_digests(mindspore.ask("load", path=again)) == as_digests(
        mindspore.ask("load", path=saved)
    )


def test_provenance_is_metadata_and_never_the_type_of_a_tensor(mindspore, tmp_path):
    names = ("ckpttool.source", "format", "w")
    tensors = {name: ["int8", (2,), f"010{n}"] for n, name in enumerate(names)}
    saved, out = tmp_path / "saved.ckpt", tmp_path / "merged.safetensors"
    mindspore.ask("save_values", tensors=tensors, out=saved)
    run_well("merge", saved, "-o", out)
    assert mindspore.ask("load", path=out) == mindspore.ask("load", path=saved)
    assert mindspore.ask("metadata", path=out) == {"ckpttool.version": ckpttool.__version__}
    write_file(out, read(saved), "safetensors", {"ckpttool.source": "saved"})
    assert mindspore.ask("load", path=out) == mindspore.ask("load", path=saved)
    entry = next(iter(read(saved).values()))
    write_file(out, {"v": entry}, "safetensors", {"u": "saved"})
    out.write_bytes(out.read_bytes().replace(b'"u":"saved"', b'"v":"saved"'))
    with pytest.raises(MindSporeError, match="KeyError: 'saved'"):
        mindspore.ask("load", path=out)


@pytest.mark.parametrize("between", ["merged.h5", "merged.safetensors"])
def test_types_survive_the_way_through_another_format(between, mindspore, tmp_path):
    saved, again = tmp_path / "saved.ckpt", tmp_path / "again.ckpt"
    mindspore.ask("save_values", tensors=tensors(LOADED), out=saved)
    run_well("merge", saved, "-o", tmp_path / between)
    run_well("merge", tmp_path / between, "-o", again)
    assert mindspore.ask("load", path=again) == mindspore.ask("load", path=saved)


def test_map_parameters_are_read_and_written_as_mindspore_does(mindspore, tmp_path):
    numbers = iter(range(1000))
    blocks = [
        [
            ["int32", [next(numbers) for _ in range(n)]],
            ["float16", [[next(numbers) / 8 for _ in range(5)] for _ in range(n)]],
            ["int32", [next(numbers) for _ in range(n)]],
        ]
        for n in (3, 1, 4)
    ]
    saved, name = tmp_path / "saved.ckpt", "table.__param_key__2"
    mindspore.ask("save_map", name=name, blocks=blocks, out=saved)
    run_well("merge", saved, "-o", tmp_path / "full.h5")
    run_well("merge", tmp_path / "full.h5", "-o", tmp_path / "again.ckpt")
    # MindSpore takes the key of its cache off the name when it loads.
    want = mindspore.ask("load_map", path=saved, name="table")
    assert mindspore.ask("load_map", path=tmp_path / "again.ckpt", name="table") == want
    parts = read(tmp_path / "full.h5")
    for part, (kind, shape, data) in zip(map_component_names(name), want, strict=True):
        entry = parts[part]
        assert (entry.dtype.lower(), list(entry.shape), entry.data.hex()) == (kind, shape, data)


@pytest.mark.parametrize("dtype", SAVED_ONLY)
def test_mindspore_does_not_load_what_the_documentation_says_it_does_not(
    dtype, mindspore, tmp_path
):
    path = tmp_path / "saved.ckpt"
    mindspore.ask("save_values", tensors=tensors({dtype: SAVED_ONLY[dtype]}), out=path)
    with pytest.raises(MindSporeError, match="failed to load the checkpoint file"):
        mindspore.ask("load", path=path)


@pytest.mark.parametrize(("family", "name"), [("types", "axes_2x4"), ("adamw", "shard_all_4x2")])
def test_recipe_loads_hdf5_into_a_network(family, name, saved, mindspore, tmp_path):
    cut = saved(family, name)
    run_well("merge", cut.folder / "ckpt", "-s", cut.strategy, "-o", tmp_path / "weights.h5")
    code = python_block(LOADING, "h5py.File(", "visititems")
    network, _ = mindspore.ask("run_code", code=code, folder=tmp_path, recipe=cut.recipe)
    found = as_digests(network)
    want = {name: entry.digest for name, entry in cut.full.items()}
    assert {name: found[name] for name in want} == want


def test_recipe_makes_bfloat16_again(saved, mindspore, tmp_path):
    cut = saved("adamw", "tensor_2x4")
    want = {name: entry.digest for name, entry in cut.full.items() if entry.dtype == "BFloat16"}
    assert want
    run_well("merge", cut.folder / "ckpt", "-s", cut.strategy, "-o", tmp_path / "weights.h5")
    plain, cast = "ms.Tensor(node[()])", "ms.Tensor(node[()], ms.bfloat16)"
    assert cast in LOADING.read_text(encoding="utf-8")
    code = python_block(LOADING, "h5py.File(", plain)
    code = code.replace(plain, f"({cast} if name in {list(want)} else {plain})")
    _, parameters = mindspore.ask("run_code", code=code, folder=tmp_path, recipe=cut.recipe)
    found = as_digests(parameters)
    assert {name: found[name] for name in want} == want


def test_recipe_loads_ckpt_rank_by_rank(saved, mindspore, tmp_path):
    cut = saved("adamw", "data_4")
    run_well("merge", cut.folder / "ckpt", "-s", cut.strategy, "-o", tmp_path / "merged.ckpt")
    words = ["-d", cut.strategy, "-o", tmp_path / "new", "--format", "ckpt"]
    run_well("split", tmp_path / "merged.ckpt", *words)
    code = python_block(LOADING, 'ms.load_checkpoint("merged.ckpt")', "rank_{rank}")
    network, _ = mindspore.ask("run_code", code=code, folder=tmp_path, recipe=cut.recipe, rank=3)
    found = as_digests(network)
    want = {name: entry.digest for name, entry in cut.full.items()}
    assert {name: found[name] for name in want} == want


def test_recipe_reads_all_parts_before_it_loads(saved, mindspore, tmp_path):
    cut = saved("adamw", "data_4")
    parts = ["-o", tmp_path / "parts", "--max-shard-size", "16KiB", "--format", "ckpt"]
    run_well("merge", cut.folder / "ckpt", "-s", cut.strategy, *parts)
    code = python_block(LOADING, "load_segmented_checkpoints")
    network, _ = mindspore.ask("run_code", code=code, folder=tmp_path, recipe=cut.recipe)
    found = as_digests(network)
    want = {name: entry.digest for name, entry in cut.full.items()}
    assert {name: found[name] for name in want} == want
