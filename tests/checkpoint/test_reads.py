"""What is read before the copy: no more than needed, nothing twice, and nothing by itself."""

from contextlib import suppress

import numpy as np
import pytest

import ckpttool
from ckpttool.checkpoint.contents import find_running_statistics
from ckpttool.checkpoint.evidence import Evidence, answer
from ckpttool.checkpoint.hidden_shards import infer_strategy
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from ckpttool.operations.inspection import inspect_catalog
from ckpttool.operations.look import Subject
from ckpttool.operations.verification import verify
from ckpttool.problems import Diagnostics
from ckpttool.storage.sampling import Sample, digest, find_least, nearness, sample
from tests.support import corpus
from tests.support.checkpoints import catalog_on_disk, cut, noise, with_names
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.evidence import MadeUp, Recorder
from tests.support.in_memory import checkpoint_in_memory
from tests.support.readers import Entry, entry_of


def whole(*names):
    """Return the strategy of a training run whose four ranks hold all in full."""
    return join_stages({0: dict.fromkeys([*names, "moments.w"], Layout((4,), ((), ())))})


def golden(case, **options):
    """A golden case with the strategy that it is merged with."""
    conversion = corpus.conversion(case, "merge")
    strategy = ckpttool.read_strategy([str(conversion.folder / conversion.src_strategy)])
    return ckpttool.scan(str(conversion.folder / conversion.source)), strategy, options


def sampled(name, *files):
    """A run of the samples."""
    paths = [str(SAMPLES / name / "strategy" / file) for file in files]
    return ckpttool.scan(str(SAMPLES / name / "ckpt")), ckpttool.read_strategy(paths), {}


def cut_by_rows(folder, tensors, **options):
    """Four ranks with slices of rows that the strategy does not list; name to rows and slices."""
    held = {rank: {} for rank in range(4)}
    for name, (rows, slices) in tensors.items():
        parts = np.split(noise(name, "Float32", (rows, 3)).array(), slices)
        for rank, entries in held.items():
            entries[name] = entry_of(parts[rank % slices])
    return catalog_on_disk(folder, held), whole(*tensors), options


def stale(folder):
    """One rank of four holds other values of two tensors."""
    shapes = {"w": (4000, 3), "v": (9, 3)}
    held = {
        rank: {
            name: noise(name + "!" * (rank == 2), "Float32", shape)
            for name, shape in shapes.items()
        }
        for rank in range(4)
    }
    return catalog_on_disk(folder, held), whole("w", "v"), {}


def drifted(folder):
    """Every rank has nearly the same numbers."""
    numbers = np.random.default_rng(1).standard_normal((16, 8), np.float32)
    held = {rank: {"v": entry_of(numbers * np.float32(1 + rank * 1e-3))} for rank in range(4)}
    return catalog_on_disk(folder, held), whole("v"), {}


def joined(folder):
    """Files whose optimizer shards were joined, with the strategy from before."""
    names, layout = ("w", "adam_m.w"), Layout((2, 4), ((0,), ()))
    entries = {name: noise(name, "Float32", (16, 3)) for name in names}
    held = cut(entries, join_stages({0: dict.fromkeys(names, layout)}))
    layout = Layout((2, 4), ((0,), ()), 2)
    strategy = join_stages({0: dict.fromkeys(names, layout)})
    return catalog_on_disk(folder, held), strategy, {"optimizer_shard": 1}


def stages(folder):
    """Two stages with different values of a tensor that they share."""
    rows = Layout((2,), ((0,), ()))
    held = {rank: {"e": noise(f"e{rank}", "Int32", (20, 40))} for rank in range(4)}
    return catalog_on_disk(folder, held), join_stages({0: {"e": rows}, 1: {"e": rows}}), {}


def state(folder):
    """Unlisted tensors: a state by name and shape, an equal one and one of equal elements."""
    held = {
        rank: {
            "w": noise(f"w{rank}", "Float32", (4, 3)),
            "own.w": noise(f"own{rank}", "Float32", (4, 3)),
            "same": noise("same", "Float32", (5,)),
            "zero": Entry("Float32", (5,), bytes(20)),
            "differ": noise(f"b{rank}", "Float32", (5,)),
        }
        for rank in range(4)
    }
    return catalog_on_disk(folder, held), join_stages({0: {"w": Layout((4,), ((0,), ()))}}), {}


CASES = {
    "params_outside_strategy": lambda _: golden("params_outside_strategy", unlisted="rank"),
    "pipeline_shared_embedding": lambda _: golden("pipeline_shared_embedding"),
    "pipeline_tied_llama": lambda _: golden("pipeline_tied_llama"),
    "optshard_size2_adam_8_to_4": lambda _: golden("optshard_size2_adam_8_to_4"),
    "optshard_excluded_params": lambda _: golden("optshard_excluded_params"),
    "safetensors_remove_redundancy": lambda _: golden("safetensors_remove_redundancy"),
    "uneven_manual_split": lambda _: golden("uneven_manual_split"),
    "moe_ep4_mp2": lambda _: golden("moe_ep4_mp2"),
    "batchnorm": lambda _: (ckpttool.scan(str(GOLDEN / "batchnorm")), None, {"replicated": True}),
    "hyper_parallel": lambda _: (
        ckpttool.scan(str(GOLDEN / "hyper_parallel/ms_mixed/ckpt")),
        None,
        {},
    ),
    "opt_aggregated": lambda _: sampled("opt_aggregated", "strategy_0.ckpt"),
    "opt_aggregated, JSON": lambda _: sampled("opt_aggregated", "strategy_0.json"),
    "pp2_shared": lambda _: sampled("pp2_shared", "strategy_0.ckpt", "strategy_4.ckpt"),
    "hidden shard": lambda at: cut_by_rows(at, {"w": (8, 4), "v": (4000, 4), "u": (4, 4)}),
    "a shard of two": lambda at: cut_by_rows(at, {"w": (8, 2), "v": (4000, 2), "u": (4, 1)}),
    "requested": lambda at: cut_by_rows(at, {"w": (8, 4), "v": (40, 4)}, optimizer_shard=4),
    "stale": stale,
    "drifted": drifted,
    "joined": joined,
    "stages": stages,
    "states": state,
}


def run(command, catalog, strategy, options, recorder):
    """Run a command as far as it reads before the copy."""
    options = ckpttool.ResolveOptions(**options)
    with suppress(ckpttool.CkptToolError):
        if command == "merge":
            ckpttool.resolve(catalog, strategy, options, recorder)
        elif command == "inspect":
            inspect_catalog(catalog, strategy, executor=recorder)
        else:
            deep = command == "verify --deep"
            verify(Subject(catalog, strategy, options), deep=deep, executor=recorder)


COMMANDS = "merge", "verify", "verify --deep", "inspect"

# Tensors and bytes that each command read when every function read for itself.
BEFORE = {
    "params_outside_strategy": ((32, 1744), (12, 1088), (8, 512), (32, 1744)),
    "pipeline_shared_embedding": ((108, 64512), (76, 64384), (76, 64384), (108, 64512)),
    "pipeline_tied_llama": ((172, 91840), (156, 91776), (156, 91776), (172, 91840)),
    "optshard_size2_adam_8_to_4": ((200, 38720), (168, 38592), (168, 38592), (200, 38720)),
    "optshard_excluded_params": ((112, 74560), (96, 74496), (96, 74496), (112, 74560)),
    # 24 more: the slices of the tensors that are cut by columns, without a row, twice
    "safetensors_remove_redundancy": ((82, 45056), (66, 44992), (66, 44992), (82, 45056)),
    "uneven_manual_split": ((4, 2560), (4, 2560), (4, 2560), (4, 2560)),
    "moe_ep4_mp2": ((88, 95296), (72, 95232), (72, 95232), (88, 95296)),
    "batchnorm": ((68, 2128), (0, 0), (8, 96), (60, 2032)),
    "hyper_parallel": ((32, 1056), (32, 1056), (32, 1056), (32, 1056)),
    "opt_aggregated": ((242, 7040), (145, 5024), (194, 6784), (193, 5280)),
    "opt_aggregated, JSON": ((96, 1888), (48, 1632), (48, 1632), (96, 1888)),
    "pp2_shared": ((90, 28928), (42, 28672), (42, 28672), (90, 28928)),
    "hidden shard": ((54, 217296), (39, 156792), (54, 217296), (39, 156792)),
    "a shard of two": ((52, 269760), (38, 160992), (52, 269760), (38, 160992)),
    "requested": ((24, 1728), (24, 1728), (24, 1728), (26, 2016)),
    "stale": ((20, 99600), (16, 99168), (20, 99600), (16, 99168)),
    "drifted": ((9, 5120), (9, 5120), (9, 5120), (9, 5120)),
    "joined": ((32, 1536), (32, 1536), (32, 1536), (16, 768)),
    "stages": ((4, 19200), (4, 19200), (4, 19200), (4, 19200)),
    "states": ((16, 432), (18, 696), (12, 576), (24, 816)),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_read_twice_and_no_more_than_before(case, tmp_path):
    catalog, strategy, options = CASES[case](tmp_path / "src")
    for command, before in zip(COMMANDS, BEFORE[case], strict=True):
        recorder = Recorder()
        run(command, catalog, strategy, options, recorder)
        assert len(recorder.read) == len({*recorder.read})
        assert all(now <= then for now, then in zip(recorder.cost, before, strict=True)), command


def rank_of(tensor):
    """The rank that has a tensor, by the path of its file."""
    return int(tensor.file.path.partition("rank_")[2].partition("/")[0])


def test_a_checkpoint_is_resolved_on_evidence_alone():
    """No file is there: four ranks with a slice each, which the strategy does not list."""

    def contents(read, subject):
        if read in (sample, digest):
            return Sample(f"{subject.meta.name} of {rank_of(subject)}".encode(), False)
        return None if read is nearness else {}  # and no index lies beside the files

    catalog = with_names({"w": (2, 3), "v": (4, 3)})
    found, executor = Diagnostics(), MadeUp(contents)
    resolved = ckpttool.resolve(catalog, whole("w", "v"), executor=executor, diagnostics=found)
    assert {one.meta.name: one.meta.shape for one in resolved.tensors} == {
        "w": (8, 3),
        "v": (16, 3),
    }
    assert "inferred" in [one.code for one in found]


def test_the_smallest_tensor_is_enough_to_refuse_a_shard():
    """Rank 2 is stale; of the larger tensor no digest is asked for, or this would fail."""
    catalog, strategy = with_names({"w": (400, 3), "v": (4, 3)}), whole("w", "v")
    tensors = [one for file in catalog.files.values() for one in file.tensors.values()]
    made_up = {one: Sample(bytes([rank_of(one) == 2]), False) for one in tensors}
    digests = {one: held for one, held in made_up.items() if one.meta.name == "v"}
    evidence = Evidence({sample: made_up, digest: digests})
    tensors = checkpoint_in_memory(catalog, strategy).tensors
    assert answer(infer_strategy(strategy, tensors, None), MadeUp(None), evidence) is None


def test_statistics_of_a_layer_are_told_by_their_least_values():
    catalog = with_names({"1.moving_mean": (4,), "1.moving_variance": (4,), "w": (2, 3)})
    least = {
        one: -1.0 if one.meta.name.endswith("mean") else 0.5
        for file in catalog.files.values()
        for name, one in file.tensors.items()
        if name != "w"
    }
    steps = find_running_statistics(catalog, whole("w"), catalog.metas)
    found = answer(steps, MadeUp(None), Evidence({find_least: least}))
    assert found == {"1.moving_mean", "1.moving_variance"}
