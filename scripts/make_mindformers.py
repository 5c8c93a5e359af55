"""Makes the folders in tests/golden/mindformers with MindFormers' own saving functions.

    pip download --no-deps mindformers==1.8.0    # and 1.9.0, 2.0.0, 2.1.0
    python scripts/make_mindformers.py WHEEL OUT [--balanced] [--stages N] [--own-names]

Needs Python 3.11 with ``mindspore==2.10.0 numpy==1.26.4 safetensors==0.5.3``.  MindFormers itself
needs devices and much more, so only ``mindformers/checkpoint`` of the wheel is imported, and what
it asks of the rest (the rank, barriers, the layouts that MindSpore's compiler would give) is
answered here; ``save_checkpoint`` runs once for every pretended rank.  Layouts, metadata and files
are made by MindSpore and MindFormers, slices by ``tests/oracle.py``.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.oracle import OracleLayout, take  # noqa: E402

TENSORS = {  # of each stage: shape, and the device axes that cut each axis of it
    "wq": ((4, 6), ((0,), ())),
    "wo": ((4, 4), ((), (0,))),
    "norm": ((6,), ((),)),
    "adam_m.wq": ((4, 6), ((0,), ())),
}
SQUARE = {  # for one stage of 2 x 2 ranks
    "wq": ((4, 6), ((1,), (0,))),
    "wo": ((8, 2), ((0, 1), ())),
    "norm": ((6,), ((),)),
    "bias": ((4,), ((1,),)),
    "adam_m.wq": ((4, 6), ((1, 0), ())),
    "adam_m.norm": ((6,), ((),)),
}
RANK, RANKS = [0], [0]
STRATEGY: dict[int, dict[str, list[object]]] = {}


def pretend(package: Path) -> types.ModuleType:
    """Import ``mindformers.checkpoint.checkpoint`` with answers for what it asks of the rest."""

    def stub(name: str, path: str | None = None, **answers: object) -> None:
        module = types.ModuleType(name)
        module.__dict__.update(answers)
        if path is not None:
            module.__path__ = [path]
        sys.modules[name] = module

    def nothing(*args: object, **named: object) -> None:
        return None

    stub("mindformers", str(package))
    stub("mindformers.checkpoint", str(package / "checkpoint"))
    stub("mindformers.tools", "", get_output_root_path=nothing)
    stub("mindformers.tools.logger", logger=logging.getLogger("mindformers"))
    stub(
        "mindformers.tools.utils",
        set_safe_mode_for_file_or_dir=nothing,
        get_real_rank=lambda: RANK[0],
        get_real_group_size=lambda: RANKS[0],
        get_output_subpath=nothing,
        barrier_world=nothing,
        is_publicly_accessible_path=lambda path: True,
    )
    for name in ("core", "core.context", "utils"):
        stub(f"mindformers.{name}", "")
    stub("mindformers.core.context.build_context", get_context=lambda key: 0)  # graph mode
    stub("mindformers.utils.file_utils", is_publicly_accessible_path=lambda path: True)
    stub("mindformers.utils.parallel_utils", barrier_world=nothing)
    stub("mindformers.checkpoint.broadcast", single_parameter_broadcast=nothing)
    loading = dict.fromkeys(("ReshardHandler", "ReshardLoader", "smart_slice"))
    stub("mindformers.checkpoint.reshard", **loading)

    import mindspore.communication as communication
    import mindspore.communication.management as management
    import mindspore.parallel.strategy as strategy

    for module in (communication, management):
        module.get_rank = lambda *args: RANK[0]
        module.get_group_size = lambda *args: RANKS[0]
    strategy.get_strategy_metadata = lambda network: STRATEGY
    strategy.get_current_strategy_metadata = lambda network: {0: STRATEGY[RANK[0]]}
    return importlib.import_module("mindformers.checkpoint.checkpoint")


def spell(layout: OracleLayout) -> object:
    """The layout as MindSpore has it."""
    from mindspore.parallel import Layout

    names = [f"d{i}" for i in range(len(layout.device_matrix))]
    axes = [[names[-1 - axis] for axis in cut] for cut in layout.tensor_map]
    spelled = [tuple(cut) if len(cut) > 1 else (*cut, "None")[0] for cut in axes]
    return Layout(layout.device_matrix, tuple(names), list(layout.ranks))(*spelled)


def cell(held: dict[str, np.ndarray], all_names: list[str], own_names: bool) -> object:
    """A network with these parameters.

    In graph mode every rank has the names of all stages; with ``own_names`` it has but its own.
    """
    from mindspore import Parameter, Tensor, nn

    class Network(nn.Cell):
        def parameters_dict(self, recurse: bool = True) -> dict[str, object]:
            own = super().parameters_dict(recurse)
            asks = sys._getframe(1).f_globals["__name__"].split(".")[0]
            everything = asks == "mindformers" and not own_names
            return dict.fromkeys(all_names) | own if everything else own

    network = Network()
    for i, (name, array) in enumerate(held.items()):
        parameter = Parameter(Tensor(np.ascontiguousarray(array)), name=name)
        network.insert_param_to_cell(f"p{i}", parameter)
    return network


def main() -> None:
    """Write one folder, and ``expected.npz`` with the full tensors beside it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--balanced", action="store_true", help="remove redundancy")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--own-names", action="store_true", help="a rank knows only its stage")
    options = parser.parse_args()
    matrix, tensors = ((2, 2), SQUARE) if options.stages == 1 else ((2,), TENSORS)
    unpacked = tempfile.mkdtemp()
    zipfile.ZipFile(options.wheel).extractall(unpacked)
    checkpoint = pretend(Path(unpacked, "mindformers"))
    sharded_tensor = importlib.import_module("mindformers.checkpoint.sharded_tensor")

    import mindspore

    layouts, full = {}, {}
    for stage in range(options.stages):
        for name, (shape, tensor_map) in tensors.items():
            state, _, base = name.rpartition(".")
            unique = f"{state}.{stage}.{base}".lstrip(".")
            layouts[unique] = OracleLayout(matrix, tensor_map, 0, stage * int(np.prod(matrix)))
            values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
            full[unique] = values + 100 * len(full)
    RANKS[0] = options.stages * int(np.prod(matrix))
    for rank in range(RANKS[0]):
        STRATEGY[rank] = {
            name: [spell(layout), mindspore.float32, full[name].shape]
            for name, layout in layouts.items()
            if rank in layout.ranks
        }
    names = {kind: [n for n in layouts if n.startswith("adam") == kind] for kind in (False, True)}
    for rank in range(RANKS[0]):
        RANK[0] = rank
        cells = [
            cell(
                {n: take(full[n], layouts[n], rank) for n in held if rank in layouts[n].ranks},
                held,
                options.own_names,
            )
            for held in names.values()
        ]
        checkpoint.save_checkpoint(
            3,
            *cells,
            common_info=checkpoint.CommonInfo(1, 3, 3, 1.0, 4),
            save_checkpoint_path=str(options.out.resolve()),
            sharded_tensor_metas=sharded_tensor.get_all_sharded_tensor(cells[0]),
            remove_redundancy=options.balanced,
        )
    np.savez_compressed(options.out / "expected.npz", **full)


if __name__ == "__main__":
    main()
