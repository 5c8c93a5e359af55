"""Makes golden cases with a real MindSpore, and holds the corpus against one.

    python scripts/make_golden.py new OUT [CASE ...]      write cases of CASES into OUT
    python scripts/make_golden.py check GOLDEN [CASE ...] run the conversions of a corpus again

Needs Python 3.11 with ``mindspore==2.10.0 numpy==1.26.4 safetensors==0.5.3`` (a newer NumPy lacks
MindSpore's bfloat16, a newer safetensors writes wrong bytes: see tests/golden/PROVENANCE.md), and
neither h5py nor the package. Everything of a new case goes through MindSpore: checkpoints through
``save_checkpoint``, strategies through the protobuf classes it reads them with, conversions
through ``transform_checkpoints``. What must come out is computed by ``tests/oracle.py``; where
MindSpore says otherwise, the case records that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.oracle import OracleLayout, take  # noqa: E402
from tests.support import corpus  # noqa: E402
from tests.support.readers import Entry, read_ranks, write_ckpt  # noqa: E402

FILE_NAME = "checkpoint-2_10.ckpt"
COMMANDS = {
    "merge": ("src", "src_strategy.ckpt", None),
    "reshard": ("src", "src_strategy.ckpt", "dst_strategy.ckpt"),
    "split": ("golden/merge", None, "dst_strategy.ckpt"),
}


@dataclass(frozen=True)
class Cut:
    """Layout of a parameter on one side; ``axes`` as in a strategy file, -1 for uncut."""

    device_matrix: tuple[int, ...]
    axes: tuple
    opt_size: int = 0
    stage: int = 0

    def nested(self) -> tuple[tuple[int, ...], ...]:
        """Device axes per tensor axis, without the -1 entries."""
        lists = (axes if isinstance(axes, tuple) else (axes,) for axes in self.axes)
        return tuple(tuple(axis for axis in axes if axis >= 0) for axes in lists)

    def oracle(self) -> OracleLayout:
        """The same for the oracle."""
        first = self.stage * int(np.prod(self.device_matrix))
        return OracleLayout(self.device_matrix, self.nested(), self.opt_size, first)

    def opt_step(self) -> int:
        """The distance of ranks MindSpore notes of an optimizer shard, and wants to read back."""
        if not self.opt_size:
            return 0
        devices = np.arange(np.prod(self.device_matrix)).reshape(self.device_matrix)
        used = {axis for axes in self.nested() for axis in axes}
        ndim = devices.ndim
        group = devices[tuple(0 if ndim - 1 - i in used else slice(None) for i in range(ndim))]
        return int(group.max() - group.min()) // (group.size - 1)


@dataclass(frozen=True)
class Case:
    """Full shapes and the cuts before and after; scalars without a layout are added to all."""

    title: str
    shapes: dict[str, tuple[int, ...]]
    src: dict[str, Cut]
    dst: dict[str, Cut]
    seed: int = 0
    scalars: dict[str, np.generic] = field(
        default_factory=lambda: {"global_step": np.int32(7), "learning_rate": np.float32(0.01)}
    )

    def ranks(self, cuts: dict[str, Cut]) -> int:
        """Number of ranks of one side."""
        stages = 1 + max(cut.stage for cut in cuts.values())
        return stages * int(np.prod(next(iter(cuts.values())).device_matrix))


CASES = {
    "tensor_parallel_4_to_2": Case(
        "rows over 4 devices to columns over 2",
        {"w": (8, 4), "moments.w": (8, 4), "b": (4,)},
        {"w": Cut((4,), (0, -1)), "moments.w": Cut((4,), (0, -1)), "b": Cut((4,), (-1,))},
        {"w": Cut((2,), (-1, 0)), "moments.w": Cut((2,), (-1, 0)), "b": Cut((2,), (-1,))},
    ),
    "optimizer_shard_8_to_4": Case(
        "optimizer shard over the whole replica group, to one of 2",
        {"w": (16, 4), "v": (4, 16)},
        {"w": Cut((2, 2, 2), (1, -1), -1), "v": Cut((2, 4), (-1, 0), 2)},
        {"w": Cut((2, 2), (0, -1), 2), "v": Cut((2, 2), (-1, -1))},
    ),
    "two_axes_on_one_8_to_8": Case(
        "a tensor axis cut by two device axes, in either order",
        {"w": (16, 4), "v": (8, 8)},
        {"w": Cut((2, 2, 2), ((0, 1), (-1,))), "v": Cut((2, 2, 2), ((1,), (2, 0)))},
        {"w": Cut((2, 2, 2), ((1, 0), (-1,))), "v": Cut((2, 2, 2), ((-1,), (1, 2)))},
    ),
    "pipeline_2x2_to_4": Case(
        "two stages of two devices to four devices",
        {"first.w": (8, 4), "last.w": (4, 8)},
        {"first.w": Cut((2,), (0, -1)), "last.w": Cut((2,), (-1, 0), stage=1)},
        {"first.w": Cut((4,), (0, -1)), "last.w": Cut((2, 2), (0, 1))},
    ),
}


def write_strategy(path: Path, cuts: dict[str, Cut]) -> None:
    """A strategy file as MindSpore writes it, merged if there are several stages."""
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap()
    message.current_stage = 1
    stages = {cut.stage for cut in cuts.values()}
    for name, cut in cuts.items():
        node = message.parallel_strategy_item.add()
        node.node_name = f"MatMul_{name}"
        node.parallel_strategys.stage = cut.stage
        item = message.parallel_layout_item.add()
        item.param_name = f"{cut.stage}-{name}" if len(stages) > 1 else name
        layouts = item.parallel_layouts
        layouts.dev_matrix.add().dim.extend(cut.device_matrix)
        if any(isinstance(axes, tuple) for axes in cut.axes):
            for axes in cut.axes:
                layouts.tensor_map.add().dim.extend(axes)
        else:
            layouts.tensor_map.add().dim.extend(cut.axes)
        layouts.param_split_shape.add()
        layouts.indices_offset.add()
        layouts.field = 0
        layouts.opt_weight_shard_step = cut.opt_step()
        layouts.opt_weight_shard_size = cut.opt_size
    path.write_bytes(message.SerializeToString())


def sliced(case: Case, cuts: dict[str, Cut], full: dict[str, np.ndarray]):
    """What every rank of one side holds, by the oracle."""
    ranks: dict[int, dict[str, np.ndarray]] = {r: {} for r in range(case.ranks(cuts))}
    for name, cut in cuts.items():
        for rank in cut.oracle().ranks:
            ranks[rank][name] = take(full[name], cut.oracle(), rank)
    for tensors in ranks.values():
        tensors.update({name: np.asarray(value) for name, value in case.scalars.items()})
    return ranks


def write_source(folder: Path, ranks: dict[int, dict[str, np.ndarray]]) -> None:
    """The per-rank checkpoints, through ``save_checkpoint``."""
    import mindspore

    for rank, tensors in ranks.items():
        path = folder / f"rank_{rank}" / FILE_NAME
        path.parent.mkdir(parents=True)
        data = [{"name": name, "data": mindspore.Tensor(a)} for name, a in tensors.items()]
        mindspore.save_checkpoint(data, str(path))
        path.chmod(0o644)


def transform(folder: Path, kind: str, out: Path, words: tuple) -> str | None:
    """Runs MindSpore's conversion; returns its error, if any."""
    import mindspore

    here = Path.cwd()
    os.chdir(folder)  # MindSpore's messages then name relative paths
    try:
        source, src_strategy, dst_strategy = words
        suffix = {p.suffix for p in Path(source).rglob("*") if p.is_file()}.pop()[1:]
        mindspore.transform_checkpoints(
            source, str(out), kind, src_strategy, dst_strategy, output_format=suffix
        )
    except Exception as error:  # whatever it is, it is what MindSpore says of this input
        return f"{type(error).__name__}: {error}"
    finally:
        os.chdir(here)
    return None


def results(out: Path) -> corpus.Ranks:
    """What MindSpore wrote."""
    return corpus.digests(read_ranks(out)) if out.is_dir() else {}


def fold(ranks: corpus.Ranks) -> dict[str, list]:
    """The opposite of ``corpus.unfold``: name -> [[dtype, shape, sha256, ranks], ...]."""
    names: dict[str, dict[tuple, list[int]]] = {}
    for rank, tensors in sorted(ranks.items()):
        for name, digest in tensors.items():
            names.setdefault(name, {}).setdefault(digest, []).append(rank)
    return {
        name: [[*digest, owners] for digest, owners in contents.items()]
        for name, contents in sorted(names.items())
    }


def make(name: str, case: Case, folder: Path) -> None:
    """Writes one case."""
    from mindspore import __version__

    rng = np.random.default_rng(case.seed)
    full = {n: rng.standard_normal(shape).astype("f4") for n, shape in case.shapes.items()}
    folder.mkdir(parents=True)
    write_source(folder / "src", sliced(case, case.src, full))
    for side, cuts in (("src", case.src), ("dst", case.dst)):
        write_strategy(folder / f"{side}_strategy.ckpt", cuts)
    scalars = {n: np.asarray(value) for n, value in case.scalars.items()}
    wanted = {"merge": {0: full | scalars}}
    wanted["reshard"] = wanted["split"] = sliced(case, case.dst, full)
    conversions = {}
    for kind, words in COMMANDS.items():
        ranks = {rank: digests_of(tensors) for rank, tensors in wanted[kind].items()}
        entry = dict(zip(("source", "src_strategy", "dst_strategy"), words, strict=True))
        entry |= {"dst_ranks": len(ranks), "origin": "mindspore"}
        out = folder / "golden" / kind
        error = transform(folder, kind, out, words)
        different = [] if error else corpus.differences(ranks, results(out))
        if error or different:
            entry["origin"] = "reference"
            entry["mindspore_error" if error else "mindspore_differs"] = error or different
        if kind != "merge":
            shutil.rmtree(out, ignore_errors=True)  # expected.json pins it
        for path in out.rglob("*.ckpt"):
            path.chmod(0o644)
        conversions[kind] = entry | {"ranks": fold(ranks)}
    write_json(
        folder / "case.json",
        {
            "name": name,
            "title": case.title,
            "mindspore_version": __version__,
            "numpy_version": np.__version__,
            "seed": case.seed,
            "source_files": {"format": "ckpt", "ranks": case.ranks(case.src)}
            | {"file_name": FILE_NAME},
        },
    )
    strategies = {side: strategy_facts(case, getattr(case, side)) for side in ("src", "dst")}
    write_json(
        folder / "expected.json",
        {"format": 1, "strategies": strategies, "conversions": conversions},
    )


def digests_of(tensors: dict[str, np.ndarray]) -> dict[str, corpus.Digest]:
    """Arrays as ``expected.json`` records them; the types here have NumPy's names in MindSpore."""
    return {
        name: Entry(array.dtype.name.capitalize(), array.shape, array.tobytes()).digest
        for name, array in tensors.items()
    }


def strategy_facts(case: Case, cuts: dict[str, Cut]) -> dict:
    """The strategy as ``expected.json`` tells it."""
    stages: dict[str, dict] = {}
    for name, cut in cuts.items():
        facts = {"dev_matrix": cut.device_matrix, "axes": cut.nested(), "opt_size": cut.opt_size}
        stages.setdefault(str(cut.stage), {})[name] = facts
    return {"devices": case.ranks(cuts), "stages": stages}


def write_json(path: Path, document: dict) -> None:
    """JSON with one line for every parameter."""

    def text(value: object, depth: int) -> str:
        if not isinstance(value, dict) or depth > 5 or "dev_matrix" in value:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        pad = " " * depth
        lines = [
            f"{pad} {json.dumps(key, ensure_ascii=False)}: {text(item, depth + 1)}"
            for key, item in value.items()
        ]
        return "{\n" + ",\n".join(lines) + f"\n{pad}}}" if lines else "{}"

    path.write_text(text(document, 0) + "\n", encoding="utf-8")


def check(golden: Path, names: list[str]) -> bool:
    """Runs the conversions of a corpus again; True if MindSpore says what the corpus says."""
    corpus.GOLDEN = golden.resolve()
    good = True
    for name in names or corpus.case_names():
        for kind in COMMANDS:
            if kind not in corpus.expected(name)["conversions"]:
                continue
            found = check_one(corpus.conversion(name, kind))
            good &= not found
            print(f"{name} {kind}: {found or 'as recorded'}", flush=True)
    return good


def check_one(conversion: corpus.Conversion) -> str:
    """What differs from the record, if anything."""
    entry = corpus.expected(conversion.case)["conversions"][conversion.kind]
    with tempfile.TemporaryDirectory() as scratch:
        case = Path(scratch) / "case"
        shutil.copytree(conversion.folder, case)
        facts = corpus.case_facts(conversion.case)["source_files"]
        if conversion.source == "src":
            for path in (case / "src").glob("rank_*/*"):
                if path.name != facts["file_name"]:
                    path.unlink()
        if not (case / conversion.source).is_dir():  # trimmed: the oracle joins it again
            full = case / conversion.source / "rank_0" / "full.ckpt"
            write_ckpt(full, corpus.merged_by_oracle(conversion.case))
        words = (conversion.source, conversion.src_strategy, conversion.dst_strategy)
        out = Path(scratch) / "out"
        error = transform(case, conversion.kind, out, words)
        if error:
            told = entry.get("mindspore_error", "")
            return "" if told.split("\n")[0][:60] == error.split("\n")[0][:60] else error
        found = corpus.differences(conversion.ranks, results(out), conversion.undefined)
    if bool(found) != ("mindspore_differs" in entry):
        return "; ".join(found[:3]) or "equal, though recorded as different"
    return ""


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=["new", "check"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", nargs="*")
    words = parser.parse_args()
    if words.action == "check":
        return 0 if check(words.folder, words.cases) else 1
    for name in words.cases or CASES:
        make(name, CASES[name], words.folder / name)
        print(f"{words.folder / name}: written", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
