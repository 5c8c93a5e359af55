"""What the tests ask of MindSpore.  Each function is one operation of ``server.py``.

``Contents`` is how an answer tells what a checkpoint holds: name -> [dtype, shape, SHA-256 of the
bytes], as ``Entry.digest`` of ``tests/support/readers.py`` does.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import safetensors
from mindspore import context
from mindspore.common.api import _cell_graph_executor
from mindspore.parallel import transform_safetensors
from mindspore.train import serialization
from mindspore.train._utils import get_parameter_redundancy, remove_param_redundancy

from tests.e2e.interop.mindspore_side import networks, pretended

FILE_NAME = "net-1_4"


def digest(tensor):
    return [str(tensor.dtype), list(tensor.shape), hashlib.sha256(tensor.get_bytes()).hexdigest()]


def contents(parameters):
    return {
        name: value if isinstance(value, str) else digest(value)
        for name, value in parameters.items()
    }


def values(name, shape, dtype, seed):
    """Random numbers for a tensor, the same wherever the name, the shape and the seed are.

    Floats have signed zeros, infinities and the smallest numbers among them, integers every bit.
    """
    rng = np.random.default_rng([seed, *name.encode()])
    if dtype == ms.bool_:
        return ms.Tensor(rng.integers(0, 2, shape), dtype)
    kind = np.dtype("f4") if dtype == ms.bfloat16 else np.dtype(ms.dtype_to_nptype(dtype))
    if kind.kind in "iu":
        return ms.Tensor(
            np.frombuffer(rng.bytes(count(shape) * kind.itemsize), kind).reshape(shape)
        )
    numbers = np.array(rng.normal(size=shape)).astype(kind)
    special = np.array([-0.0, np.inf, -np.inf, np.finfo(kind).tiny], kind)
    chosen = rng.random(shape) < 0.1
    numbers[chosen] = rng.choice(special, int(chosen.sum()))
    return ms.Tensor(numbers, dtype)


def count(shape):
    return int(np.prod(shape, dtype=np.int64))


def prepare(recipe, rank, strategy_file=None):
    """Joins the cluster of a recipe and builds its network, not compiled yet."""
    pretended.join(recipe["ranks"], rank)
    settings = {
        "parallel_mode": "semi_auto_parallel",
        "device_num": recipe["ranks"],
        "global_rank": rank,
        "dataset_strategy": "full_batch",
    }
    if strategy_file:
        config = {"save_file": strategy_file, "only_trainable_params": False}
        settings["strategy_ckpt_config"] = config
    if recipe["stages"] > 1:
        settings["pipeline_stages"] = recipe["stages"]
    if recipe["optimizer_shard"]:
        config = {"parallel_optimizer_threshold": 0}
        if recipe["optimizer_shard"] > 0:
            config["optimizer_weight_shard_size"] = recipe["optimizer_shard"]
        settings |= {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}
        settings["optimizer_weight_shard_aggregated_save"] = recipe.get("aggregated", False)
    context.set_auto_parallel_context(**settings)
    return networks.build(recipe)


def finish(network, inputs, trained):
    network.set_train(bool(trained))
    _cell_graph_executor.compile(network, *inputs, phase="train" if trained else "predict")


def compile_and_save(recipe, rank, folder, strategy_file):
    """Fills a network, compiles it for one rank and saves what the rank then holds.

    Writes ``ckpt/rank_N`` and ``safetensors/rank_N`` below ``folder``, and on rank 0 ``full.ckpt``,
    which holds all parameters as they were before they were cut.
    """
    network, inputs = prepare(recipe, rank, strategy_file)
    parameters = list(network.get_parameters())
    for one in parameters:
        one.set_data(values(one.name, one.shape, one.dtype, recipe["seed"]))
    if rank == 0:
        ms.save_checkpoint(parameters_list(parameters), str(Path(folder) / "full.ckpt"))
    finish(network, inputs, recipe["optimizer"])
    for form in ("ckpt", "safetensors"):
        path = Path(folder) / form / f"rank_{rank}" / f"{FILE_NAME}.{form}"
        path.parent.mkdir(parents=True)
        ms.save_checkpoint(network, str(path), integrated_save=False, format=form)
    Path(strategy_file).chmod(0o644)


def save_without_redundancy(recipe, rank, folder):
    """Saves what one rank keeps with ``remove_redundancy``, as ``ModelCheckpoint`` does it.

    Writes ``ckpt/rank_N`` and ``safetensors/rank_N`` below ``folder``; gives the number of
    parameters that the rank holds and keeps.
    """
    network, inputs = prepare(recipe, rank)
    for one in network.get_parameters():
        one.set_data(values(one.name, one.shape, one.dtype, recipe["seed"]))
    finish(network, inputs, recipe["optimizer"])
    layout = network.parameter_layout_dict
    kept = remove_param_redundancy(get_parameter_redundancy(layout)).get(rank)

    def choose(name):
        return name not in layout or (kept is not None and name in kept)

    for form in ("ckpt", "safetensors"):
        path = Path(folder) / form / f"rank_{rank}" / f"{FILE_NAME}.{form}"
        path.parent.mkdir(parents=True)
        ms.save_checkpoint(
            *(network, str(path), False),
            format=form,
            choice_func=choose,
            remove_redundancy=True,
        )
    names = [one.name for one in network.get_parameters()]
    return [len(names), sum(map(choose, names))]


def unify(source, strategy, out, with_redundancy=True):
    wait_for_no_memory()
    ms.parallel.unified_safetensors(source, strategy, out, with_redundancy)


def wait_for_no_memory():
    transform_safetensors.psutil = SimpleNamespace(
        virtual_memory=lambda: SimpleNamespace(percent=0)
    )


def load_unified(folder, strategy, out, rank, form):
    """Cuts a unified folder for a rank with ``load_distributed_checkpoint``."""
    ms.load_distributed_checkpoint(
        None,
        predict_strategy=strategy,
        format="safetensors",
        unified_safetensors_dir=folder,
        dst_safetensors_dir=out,
        rank_id=rank,
        output_format=form,
    )


def open_as_hugging_face(folder):
    """What a folder with ``model.safetensors.index.json`` holds, as Transformers opens it.

    It takes the files that the index names, refuses a mark that it does not know, and opens each
    with the safetensors library.
    """
    index = json.loads((Path(folder) / "model.safetensors.index.json").read_bytes())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        with safetensors.safe_open(str(Path(folder) / file), framework="np") as opened:
            mark = (opened.metadata() or {}).get("format")
            if mark not in ("pt", "tf", "flax", "mlx"):
                raise ValueError(f"{file}: not a valid mark: {mark}")
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                array = opened.get_tensor(name)
                found[name] = [list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()]
    if found.keys() != index["weight_map"].keys():
        raise ValueError("the index and the files name different tensors")
    return found


def metadata(path):
    with safetensors.safe_open(path, framework="np") as opened:
        return opened.metadata()


def parameters_list(parameters):
    return [{"name": one.name, "data": one} for one in parameters]


def optimizer_states():
    """The parameters of every optimizer for a matrix `w` and a vector `b`: names and shapes."""
    found = {}
    options = [{}, {"use_amsgrad": True}, {"amsgrad": True}, {"centered": True}]
    options += [{"learning_rate": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1}]
    for module in (ms.nn.optim, ms.mint.optim, ms.experimental.optim):
        for name in module.__all__:
            kind = getattr(module, name)
            is_optimizer = isinstance(kind, type) and issubclass(
                kind, (ms.nn.Optimizer, ms.experimental.optim.Optimizer)
            )
            if not is_optimizer or name in ("LARS", "FusedAdamW"):  # no state; wants a real device
                continue
            for words in options:
                given = [
                    networks.parameter(*one, "float32") for one in (("w", (4, 3)), ("b", (3,)))
                ]
                try:
                    made = kind(given, **words)
                except (KeyError, TypeError, ValueError):  # it has not these options
                    continue
                known = found.setdefault(f"{module.__name__}.{name}", {})
                known |= {one.name: list(one.shape) for one in made.get_parameters()}
    return found


def load_into_network(recipe, rank, path):
    """Loads a file into the network of one rank, compiled as in training; what it then holds.

    Returns
    -------
    list
        Names that were not loaded, and contents of the network's own parameters.
    """
    network, inputs = prepare(recipe, rank)
    finish(network, inputs, recipe["optimizer"])
    own = [one for one in network.get_parameters() if one.sliced and not one.has_init]
    form = Path(path).suffix[1:]
    loaded = ms.load_checkpoint(path, format=form)
    missed, _ = ms.load_param_into_net(network, loaded, strict_load=True)
    names = {one.name for one in own}
    return [sorted(names & set(missed)), {one.name: digest(one) for one in own}]


def load_distributed(recipe, rank, files, train_strategy, compiled):
    """Loads the files of all ranks with ``load_distributed_checkpoint``; what the network holds.

    The network is that of rank ``rank`` if it is to be ``compiled``, else one as on one device.
    """
    if compiled:
        network, inputs = prepare(recipe, rank)
        finish(network, inputs, recipe["optimizer"])
        wanted = dict(network.parameter_layout_dict)
    else:
        network, _ = networks.build(recipe)
        wanted = None
    for one in network.get_parameters():
        one.set_data(ms.Tensor(np.zeros(one.shape), one.dtype))
    ms.load_distributed_checkpoint(network, files, wanted, train_strategy)
    return {one.name: digest(one) for one in network.get_parameters()}


def load(path, crc_check=False, key=None, mode="AES-GCM"):
    words = {} if key is None else {"dec_key": bytes.fromhex(key), "dec_mode": mode}
    form = Path(path).suffix[1:]
    return contents(ms.load_checkpoint(path, format=form, crc_check=crc_check, **words))


def save_again(path, out):
    form = Path(out).suffix[1:]
    loaded = ms.load_checkpoint(path, format=Path(path).suffix[1:])
    data = [{"name": name, "data": one} for name, one in loaded.items()]
    ms.save_checkpoint(data, out, format=form)


def save_values(tensors, out, append=None, crc_check=False, key=None, mode="AES-GCM"):
    """Saves tensors of given bytes: name -> [dtype, shape, bytes as hexadecimal digits].

    ``append`` is the ``append_dict``: numbers and strings; ``key`` in hexadecimal digits.
    """
    words = {"append_dict": append, "crc_check": crc_check}
    words |= {} if key is None else {"enc_key": bytes.fromhex(key), "enc_mode": mode}
    data = []
    for name, (dtype, shape, raw) in tensors.items():
        kind = getattr(ms, dtype, None) or getattr(ms.common.dtype, dtype)
        tensor = ms.Tensor.convert_bytes_to_tensor(bytes.fromhex(raw), tuple(shape), kind)
        data.append({"name": name, "data": ms.Tensor(tensor)})
    ms.save_checkpoint(data, out, format=Path(out).suffix[1:], **words)


def save_noise(nbytes, out, key, mode):
    noise = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    data = [{"name": "noise", "data": ms.Tensor(noise)}]
    ms.save_checkpoint(data, str(Path(out).with_name("plain.ckpt")))
    ms.save_checkpoint(data, out, enc_key=bytes.fromhex(key), enc_mode=mode)


class MapBlocks:
    """A map parameter for MindSpore's writer; the real one exists on Ascend only."""

    def __init__(self, blocks):
        self._blocks = [[np.array(data, kind) for kind, data in block] for block in blocks]

    def export_slice_data(self, incremental):
        return (*self._blocks.pop(0), not self._blocks)


def save_map(name, blocks, out, crc_check=False, key=None, with_tensor=False):
    """Saves a map parameter: for each block three times [NumPy type, numbers].

    ``key`` is in hexadecimal digits; behind it is a tensor ``w`` of three integers if wanted.
    """
    data = {name: ["mapparameter", MapBlocks(blocks)]}
    data |= {"w": [[3], "Int32", ms.Tensor([1, 2, 3], ms.int32)]} if with_tensor else {}
    secret = None if key is None else bytes.fromhex(key)
    serialization._exec_save(out, data, enc_key=secret, crc_check=crc_check)


def load_map(path, name, crc_check=False):
    arrays = ms.load_checkpoint(path, crc_check=crc_check)[name]
    return [[str(one.dtype), list(one.shape), one.tobytes().hex()] for one in arrays]


def layouts(strategy_file):
    """What MindSpore reads: name to device matrix, axes per tensor axis and optimizer shard."""
    found = {}
    for name, item in ms.build_searched_strategy(strategy_file).items():
        maps = [list(one.dim) for one in item.tensor_map]
        if len(maps) == 1:
            maps = [[axis] for axis in maps[0]]
        elif not maps[-1]:
            maps.pop()  # marks the map of a vector that is cut by several device axes
        found[name] = {
            "device_matrix": list(item.dev_matrix[0].dim),
            "tensor_map": [[axis for axis in axes if axis >= 0] for axes in maps],
            "opt_size": item.opt_weight_shard_size,
        }
    return found


def merge_stages(folder, out):
    ms.merge_pipeline_strategys(folder, out)
    Path(out).chmod(0o644)


def transform(source, out, src_strategy, dst_strategy, form):
    ms.transform_checkpoints(
        source, out, "checkpoint_", src_strategy, dst_strategy, output_format=form
    )


def run_code(code, folder, recipe, rank=0):
    """Run Python of a page in ``folder``; return what its ``network`` and ``parameters`` then hold.

    The code finds the names ``ms``, ``network`` (not compiled) and ``rank``.
    """
    os.chdir(folder)
    network, _ = networks.build(recipe)
    scope = {"ms": ms, "network": network, "rank": rank}
    exec(compile(code, "a page", "exec"), scope)
    return [
        {one.name: digest(one) for one in network.get_parameters()},
        contents(scope.get("parameters", {})),
    ]


def run_calls(code, folder):
    """Run MindSpore's calls of a page in ``folder``; return the lists and tensors that they make.

    Returns
    -------
    dict
        Lists by the names of their variables, `digest` of tensors, and names of layouts.
    """
    os.chdir(folder)
    wait_for_no_memory()
    scope = {"ms": ms}
    exec(compile(code, "a page", "exec"), scope)
    found = {name: [*map(int, scope[name])] for name in ("ranks",) if name in scope}
    found |= {"layouts": sorted(scope["layouts"])} if "layouts" in scope else {}
    return found | ({"full": digest(scope["full"])} if "full" in scope else {})
