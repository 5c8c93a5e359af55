"""What is measured: commands, each with the place it writes to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmark.files import strategy_path, write_checkpoint, write_strategy
from benchmark.model import (
    Mesh,
    Model,
    dense_model,
    expert_model,
    many_tensors,
    mixed_tensors,
    wide_model,
)
from ckpttool.model.manifest import MANIFEST

CKPTTOOL = (sys.executable, "-m", "ckpttool")
FORMATS = {"hdf5": ".h5", "ckpt": ".ckpt"}
BUDGET = "64MiB"
AVERAGED = 4  # checkpoints
LOOK = """
import sys
from pathlib import Path
from ckpttool.transaction.states import Record, read_destination
read_destination(Record.of(Path(sys.argv[1])))
"""
# What the others are compared with.
COPY, CLICK, NUMPY, LIBRARIES = "cp -r", "import click", "import numpy", "import numpy, h5py"
SAFE_OPEN, MERGEKIT = "safe_open and NumPy, of two", "mergekit linear, of two"

MINDSPORE = """
import sys
import mindspore
src, src_strategy, dst, dst_strategy = sys.argv[1:]
mindspore.transform_checkpoints(src, dst, "bench", src_strategy, dst_strategy or None)
"""

LOOP = """
import sys
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
first, second, out = sys.argv[1:]
with safe_open(first, "np") as a, safe_open(second, "np") as b:
    half = np.float32(0.5)
    save_file({name: (a.get_tensor(name) + b.get_tensor(name)) * half for name in a.keys()}, out)
"""

PLAN = """
import json, sys, time
import ckpttool
from ckpttool.model.region import Region
from ckpttool.operations.jobs import Order
from ckpttool.operations.load import Source
from ckpttool.operations.run import make_plan
src, src_strategy, dst_strategy = sys.argv[1:]
times = [time.perf_counter()]
def lap(name, seconds={}):
    times.append(time.perf_counter())
    seconds[name] = round(times[-1] - times[-2], 2)
    return seconds
catalog = ckpttool.scan(src)
strategies = [ckpttool.read_strategy([path]) for path in (src_strategy, dst_strategy)]
lap("scan")
options = ckpttool.OutputOptions("ckpt")
source, target = Source.of(catalog, strategies[0]), strategies[1]
plan, _ = make_plan(Order("reshard", [source], src + ".new", target, output=options))
lap("plan")
tensors = sum(len(ranks) * len(metas) for ranks, metas in plan.headers.items())
lap("headers")
# As in a run: ranks with equal tensors are planned once, and so are tensors of one kind.
ranks = {first: 1 + len(others) for first, *others in plan.alike}
kinds = {name: len(transfers) for name, transfers in plan.kinds.items()}
pieces = sum(
    ranks[output.rank] * kinds[tensor.meta.name] * tensor.count_pieces(whole)
    for output in plan.of_kinds.outputs(ranks)
    for tensor in output.tensors
    for whole in [Region.whole(tensor.meta.shape)]
)
print(json.dumps({"tensors": tensors, "pieces": pieces, "seconds": lap("pieces")}))
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to measure.

    Attributes
    ----------
    name
        As in the tables.
    command
        Program and arguments.
    output
        The file or folder that it writes; None if it writes none.
    yardstick
        The case that it is compared with, if any.
    read_bytes
        Bytes of the sources that it needs, if that is what counts.
    python
        The Python whose installation of ckpttool runs it.
    """

    name: str
    command: tuple[str, ...]
    output: Path | None = None
    yardstick: str | None = None
    read_bytes: int = 0
    python: str = sys.executable

    def run_by(self, python: str) -> Case:
        """The same with the ckpttool that this Python has installed."""
        name = f"{self.name}, other"
        return replace(self, name=name, command=(python, *self.command[1:]), python=python)


def beside_other(cases: list[Case], python: str) -> Iterator[Case]:
    """The cases, and each that runs ckpttool once more with another installation, in turn."""
    for case in cases:
        yield case
        program, _, code, *_ = (*case.command, "", "")
        if program == sys.executable and "ckpttool" in code:
            yield case.run_by(python)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A way from one mesh to another; to one file if there is no other."""

    name: str
    source: Mesh
    target: Mesh | None


def scenarios(mesh: Mesh) -> Iterator[Scenario]:
    """The ways that are measured from a checkpoint that is cut like ``mesh``."""
    ranks = mesh.ranks
    yield Scenario("merge", mesh, None)
    if ranks % 4 == 0:
        fewer = Mesh(ranks // 4 * 3, axis=mesh.axis)
        yield Scenario(f"reshard {ranks} -> {fewer.ranks}", mesh, fewer)
    yield Scenario(f"reshard {ranks} -> {ranks} transposed", mesh, mesh.transposed)
    if ranks % 2 == 0:
        stages = mesh if mesh.pipeline > 1 else Mesh(ranks // 2, pipeline=2, axis=mesh.axis)
        name = f"reshard {stages.pipeline}x{ranks // stages.pipeline} -> {ranks}"
        yield Scenario(name, stages, Mesh(ranks, axis=mesh.axis))


def prepare_copies(work: Path, model: Model, mesh: Mesh, mindspore: str | None) -> list[Case]:
    """Write the checkpoints and strategies of all scenarios; the cases that use them."""
    sources: dict[Mesh, Path] = {}
    cases: list[Case] = []
    for number, scenario in enumerate(scenarios(mesh)):
        src = sources.get(scenario.source)
        if src is None:
            src = sources[scenario.source] = work / f"src_{len(sources)}"
            write_checkpoint(src, model, scenario.source)
        if not cases:
            cases.append(Case(COPY, ("cp", "-r", str(src), str(work / "copy")), work / "copy"))
        target = None
        if scenario.target is not None:
            target = work / f"dst_{number}.strategy.ckpt"
            write_strategy(target, model, scenario.target)
        cases += _conversions(scenario.name, src, target, work / "out")
        if target is None:
            cases.append(_frugal(cases[-1]))
        if mindspore is not None:
            out = work / "transformed"
            words = (str(src), str(strategy_path(src)), str(out), str(target or ""))
            command = (mindspore, "-c", MINDSPORE, *words)
            cases.append(Case(f"MindSpore {scenario.name}", command, out, COPY))
    first = next(iter(sources.values()))
    inspect = (*CKPTTOOL, "inspect", str(first), "-s", str(strategy_path(first)))
    return [*cases, Case("inspect", inspect)]


def _conversions(name: str, src: Path, target: Path | None, out: Path) -> Iterator[Case]:
    common = (str(src), "-s", str(strategy_path(src)), "-q")
    for format, suffix in FORMATS.items():
        path = out.with_suffix(suffix) if target is None else out
        words = ("merge",) if target is None else ("reshard", "-d", str(target))
        command = (*CKPTTOOL, *words, *common, "-o", str(path), "--format", format)
        yield Case(f"{name}, {suffix}", command, path, COPY)


def _frugal(case: Case) -> Case:
    """The same within a budget that is smaller than the largest tensors."""
    command = (*case.command, "--max-memory", BUDGET)
    return Case(f"{case.name}, --max-memory {BUDGET}", command, case.output, case.yardstick)


READ = """
import sys
import h5py
with h5py.File(sys.argv[1]) as file:
    names = []
    file.visititems(lambda name, it: names.append(name) if isinstance(it, h5py.Dataset) else None)
    for name in names:
        if not name.startswith(".shards/"):
            file[name][()]
"""


def prepare_virtual(work: Path, model: Model, tp: int) -> list[Case]:
    """Write checkpoints, merged ones and views of them, and the cases that make and read these."""
    cases: list[Case] = []
    for axis, words in (("0", "rows"), ("last", "columns")):
        src = work / f"virtual_{axis}"
        mesh = Mesh(tp, axis=axis)
        write_checkpoint(src, model, mesh)
        merge = (*CKPTTOOL, "merge", str(src), "-s", str(strategy_path(src)), "-q", "-o")
        kept = [work / f"{axis}_{name}.h5" for name in ("merged", "virtual")]
        ways = ((), ("--virtual",))
        for path, more in zip(kept, ways, strict=True):
            subprocess.run([*merge, str(path), *more], check=True)
        for out, more in zip(("merged.h5", "virtual.h5"), ways, strict=True):
            name, path = f"merge of {words}{' --virtual' if more else ''}", work / out
            yardstick = f"merge of {words}" if more else None
            cases.append(Case(name, (*merge, str(path), *more), path, yardstick))
        for path, name in zip(kept, ("merged", "virtual"), strict=True):
            yardstick = f"h5py reads {words}, merged" if name == "virtual" else None
            command = (sys.executable, "-c", READ, str(path))
            cases.append(Case(f"h5py reads {words}, {name}", command, None, yardstick))
    return cases


def prepare_start(work: Path) -> list[Case]:
    """Write a checkpoint of a few KiB, and the cases: how long it takes until anything happens."""
    src = work / "tiny"
    write_checkpoint(src, many_tensors(4, (16, 16)), Mesh(4))
    merge = (*CKPTTOOL, "merge", str(src), "-s", str(strategy_path(src)), "-q", "-o")
    outputs = [work / f"tiny{suffix}" for suffix in FORMATS.values()]
    return [
        Case(CLICK, (sys.executable, "-c", "import click")),
        Case("ckpttool --version", (*CKPTTOOL, "--version"), None, CLICK),
        Case("ckpttool --help", (*CKPTTOOL, "--help"), None, CLICK),
        *(Case(name, (sys.executable, "-c", name)) for name in (NUMPY, LIBRARIES)),
        *(
            Case(f"merge of a few KiB, {out.suffix}", (*merge, str(out)), out, yardstick)
            for out, yardstick in zip(outputs, (LIBRARIES, NUMPY), strict=True)
        ),
    ]


def prepare_index(work: Path, ranks: int, tensors: int) -> list[Case]:
    """Write headers of many tensors on many ranks, and the cases that read them."""
    few, many = work / "few", work / "many"
    small = many_tensors(1000, (768, 64))
    write_checkpoint(few, small, Mesh(8), sparse=True)
    # 7 * 1,024 rows can be cut into 1,024 parts and into 896.
    large = many_tensors(tensors, (7 * 1024, 1024))
    ways = [Mesh(8, n // 8, optimizer_shard=True) for n in (ranks, ranks // 8 * 7)]
    write_checkpoint(many, large, ways[0], sparse=True)
    fewer = work / "fewer.strategy.ckpt"
    write_strategy(fewer, large, ways[1])
    plan = (str(many), str(strategy_path(many)), str(fewer))
    return [
        Case("inspect, 8 ranks x 1000 tensors", (*CKPTTOOL, "inspect", str(few))),
        Case(
            f"inspect, {ranks} ranks x {tensors} tensors",
            (*CKPTTOOL, "inspect", str(many), "-s", str(strategy_path(many))),
        ),
        Case(
            f"plan, {ranks} -> {ranks // 8 * 7} ranks x {tensors} tensors",
            (sys.executable, "-c", PLAN, *plan),
        ),
    ]


def prepare_ranks(work: Path, ranks: int, tensors: int) -> list[Case]:
    """Write headers of so many ranks, and the cases that read them and count a reshard to 3/4."""
    src = work / f"ranks_{ranks}"
    model = wide_model(tensors, ranks, 64)
    ways = [Mesh(8, n // 8, axis="mixed", optimizer_shard=True) for n in (ranks, ranks // 4 * 3)]
    write_checkpoint(src, model, ways[0], sparse=True, format="safetensors")
    fewer = work / f"fewer_{ranks}.strategy.ckpt"
    write_strategy(fewer, model, ways[1])
    common = (str(src), "-s", str(strategy_path(src)))
    reshard = ("reshard", *common, "-d", str(fewer), "-o", str(work / "none"), "--dry-run")
    size = f"ranks x {tensors} tensors"
    return [
        Case(f"inspect, {ranks} {size}", (*CKPTTOOL, "inspect", *common)),
        Case(f"dry run, {ranks} -> {ways[1].ranks} {size}", (*CKPTTOOL, *reshard)),
    ]


def prepare_casts(work: Path, model: Model, mesh: Mesh) -> list[Case]:
    """Write a checkpoint with its Adam states, and one without; the merges that choose and cast.

    Each is compared with the merge of the same source bytes without these options.
    """
    folder, out = work / "cast", work / "cast_out.ckpt"
    alone = Model(model.weights, model.layers)
    write_checkpoint(folder / "all", model, mesh)
    write_checkpoint(folder / "weights", alone, mesh)

    def merge(of: str, *words: str) -> tuple[str, ...]:
        strategy = str(strategy_path(folder / of))
        return (*CKPTTOOL, "merge", str(folder / of), "-s", strategy, "-o", str(out), "-q", *words)

    few = Case("merge of weights alone", merge("weights"), out, None, alone.nbytes)
    plain = Case("merge with states", merge("all"), out, None, model.nbytes)
    options = (
        (few, ("--weights-only",)),
        (few, ("--weights-only", "--dtype", "bf16")),
        *((plain, ("--dtype", word)) for word in ("bf16", "bf16:*", "fp16:*")),
    )
    cases = [
        Case(f"merge {' '.join(words)}", merge("all", *words), out, one.name, one.read_bytes)
        for one, words in options
    ]
    return [few, plain, *cases]


def prepare_averages(work: Path, model: Model, mesh: Mesh) -> list[Case]:
    """Write four checkpoints with their Adam states; the averages of them.

    They are compared with the merge of one for each byte that is read: all weights of all four, and
    the states of the last.
    """
    folder, out = work / "average", work / "average_out.ckpt"
    inputs = [folder / f"run_{number}" for number in range(AVERAGED)]
    for number, path in enumerate(inputs):
        write_checkpoint(path, model, mesh, seed=number)
    common = ("-s", str(strategy_path(inputs[0])), "-o", str(out), "-q")
    merge = (*CKPTTOOL, "merge", str(inputs[0]), *common)
    average = (*CKPTTOOL, "average", *map(str, inputs), *common)
    of_weights, of_one = sum(one.nbytes for one in model.weights), model.nbytes
    weights = ("--weights-only",)
    one = Case("merge of one", merge, out, None, of_one)
    few = Case("merge of one --weights-only", (*merge, *weights), out, None, of_weights)
    all_of_four = of_one + (AVERAGED - 1) * of_weights
    words = (*average, *weights)
    return [
        one,
        Case(f"average of {AVERAGED}", average, out, one.name, all_of_four),
        few,
        Case(f"average of {AVERAGED} --weights-only", words, out, few.name, AVERAGED * of_weights),
    ]


def prepare_two(work: Path, nbytes: int, mergekit: str) -> list[Case]:
    """Write two models as Hugging Face has them, of Float32; their averages by whoever makes them.

    ``mergekit`` is a Python that has it, and so safetensors and NumPy for a loop over tensors.
    """
    folder = work / "two"
    config, model = dense_model(nbytes // 2)  # which is of bfloat16
    folder.mkdir()
    like_llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps({**config, **like_llama}))
    files = []
    for seed, name in enumerate(("first", "second")):
        write_checkpoint(folder / "ranks", model, Mesh(1), seed=seed)
        files.append(folder / name / "model.safetensors")
        files[-1].parent.mkdir()
        source = (str(folder / "ranks"), "-s", str(strategy_path(folder / "ranks")))
        words = (*CKPTTOOL, "merge", *source, "-o", str(files[-1]), "-q")
        names = ("--recipe", "llama", "--hf-config", str(folder), "--dtype", "fp32:*")
        subprocess.run((*words, *names), check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder / "ranks")
        files[-1].with_name(f"{files[-1].name}.{MANIFEST}").unlink()  # others make none
    models = [{"model": str(one.parent), "parameters": {"weight": 0.5}} for one in files]
    linear_of = {"merge_method": "linear", "dtype": "float32", "models": models}
    (folder / "linear.yaml").write_text(json.dumps(linear_of))
    linear = (str(Path(mergekit).with_name("mergekit-yaml")), str(folder / "linear.yaml"))
    paths, out, home = list(map(str, files)), folder / "out.safetensors", folder / "out"
    average = (*CKPTTOOL, "average", *paths, "-o", str(out), "-q")
    return [
        Case(SAFE_OPEN, (mergekit, "-c", LOOP, *paths, str(out)), out),
        Case(MERGEKIT, (*linear, str(home), "--no-copy-tokenizer", "--quiet"), home),
        Case("average of two", average, out, MERGEKIT),
    ]


# Models of MindFormers by name, each with a recipe for the names of Hugging Face.  One needs names
# alone.  Two have fused attention and transposed, fused experts, those of the second as large as
# DeepSeek-V3's.
_OF_EXPERTS = "qwen3-moe:fc1=interleaved,attention=grouped,mode=graph"
EXPORTED = {
    "llama": ("llama", dense_model),
    "qwen3-moe": (_OF_EXPERTS, expert_model),
    "large experts": (_OF_EXPERTS, partial(expert_model, width=7168, wide=2048, experts=8)),
}


def prepare_exports(work: Path, name: str, nbytes: int, mesh: Mesh) -> list[Case]:
    """Write a model as ranks, as one file and as a folder of Hugging Face, and the cases.

    Ranks are merged and the file is split, with the names that it has and with those of a recipe.
    """
    recipe, make = EXPORTED[name]
    config, model = make(nbytes)
    folder = work / "export"
    ranks, one, home = folder / "ranks", folder / "one.safetensors", folder / "hf"
    write_checkpoint(ranks, model, mesh)
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(config))
    strategy, out, cut_out = str(strategy_path(ranks)), folder / "out.safetensors", folder / "out"
    merge = (*CKPTTOOL, "merge", str(ranks), "-s", strategy, "-q")
    by_names = ("--recipe", recipe.removesuffix(",mode=graph"), "--hf-config", str(home))
    for words in (
        (*merge, "-o", str(one)),
        (*merge, *by_names, "-o", str(home / "model.safetensors")),
    ):
        subprocess.run(words, check=True)
    for manifest in folder.rglob("*.ckpttool.json"):  # a model that was downloaded has none
        manifest.unlink()
    merge, cut = (*merge, "-o", str(out)), (*CKPTTOOL, "split", "-d", strategy, "-o", str(cut_out))
    return [
        Case(f"merge of {name}", merge, out, None, model.nbytes),
        Case(f"export of {name}", (*merge, *by_names), out, f"merge of {name}", model.nbytes),
        Case(f"split of {name}", (*cut, "-q", str(one)), cut_out, None, model.nbytes),
        Case(
            f"import of {name}",
            (*cut, "-q", str(home), "--recipe", recipe),
            cut_out,
            f"split of {name}",
            model.nbytes,
        ),
    ]


def prepare_many(work: Path, tensors: int, outputs: int) -> list[Case]:
    """Write a checkpoint of many small tensors and one that is cut for many ranks, and the cases.

    Their bytes are few: what is measured is what a tensor costs, and what an output file costs.
    """
    small, fifth, wide = work / "small", work / "fifth", work / "wide"
    write_checkpoint(small, mixed_tensors(tensors), Mesh(4, data=2))
    few = mixed_tensors(tensors // 5)
    write_checkpoint(fifth, few, Mesh(4, data=2))
    six = work / "six.strategy.ckpt"
    write_strategy(six, few, Mesh(3, data=2, axis="last"))
    across = (*CKPTTOOL, "reshard", str(fifth), "-s", str(strategy_path(fifth)), "-d", str(six))
    model = many_tensors(64, (outputs, 16))
    write_checkpoint(wide, model, Mesh(8))
    target = work / "outputs.strategy.ckpt"
    write_strategy(target, model, Mesh(outputs))
    merged, out = work / "merged.ckpt", work / "outputs"
    merge = (*CKPTTOOL, "merge", str(small), "-s", str(strategy_path(small)), "-o", str(merged))
    ways = ("-s", str(strategy_path(wide)), "-d", str(target), "--format", "ckpt", "-q")
    write = (*CKPTTOOL, "reshard", str(wide), *ways)
    reshard = (*write, "-o", str(out))
    finished, stopped = work / "finished", work / "stopped"
    for path, more in ((finished, ()), (stopped, ("--part", "1/1"))):  # which waits for finalize
        subprocess.run((*write, *more, "-o", str(path)), check=True, capture_output=True)
    look = (sys.executable, "-c", LOOK)
    return [
        Case(COPY, ("cp", "-r", str(small), str(work / "copy")), work / "copy"),
        Case(f"merge, 8 ranks x {tensors} tensors", (*merge, "-q"), merged, COPY),
        Case(
            f"reshard, 8 -> 6 ranks x {tensors // 5} tensors",
            (*across, "--format", "ckpt", "-q", "-o", str(work / "resharded")),
            work / "resharded",
            COPY,
        ),
        Case(f"reshard, 8 -> {outputs} ranks", reshard, out),
        Case(f"look, finished set of {outputs}", (*look, str(finished))),
        Case(f"look, stopped set of {outputs}", (*look, str(stopped))),
        Case(f"resume, finished set of {outputs}", (*write, "-o", str(finished), "--resume")),
    ]
