"""Checkpoints as other programs save them, what happens to them, and what commands say then.

The texts in ``saves/`` have cases of these lines:

- ``save NAME PATH`` writes one of `SAVES`;
- ``FUNCTION PATH WORDS`` calls one of `WRITERS`;
- ``$ COMMAND`` is for the shell;
- ``FILE| TEXT`` adds a line to a file;
- ``FILE: PLACE = VALUE`` sets a value of a JSON document, and ``FILE: PLACE =`` removes it;
- ``FILE put NAME DTYPE SHAPE`` replaces a tensor by noise, ``FILE drop NAME ...`` removes some,
  ``FILE flip OFFSET`` changes a byte;
- ``> COMMAND`` is for ckpttool.  What ``merge`` writes is compared with what was saved; of
  ``inspect --json`` there is a line for each tensor.

``SNAPSHOT_UPDATE=1`` writes what comes of them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from ckpttool.model.layout import Layout
from ckpttool.wording import format_ranks
from tests.oracle import OracleLayout
from tests.support import file_bytes
from tests.support.checkpoint2 import FsdpSave, Save, write_safetensors
from tests.support.checkpoints import cut, noise, strategy_of, write_indexed, write_ranks
from tests.support.commands import run
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.damage import flip_byte
from tests.support.hyper_parallel import HyperSave
from tests.support.mindformers_output import RANKS, keep_merged, keep_strategies, record, save
from tests.support.readers import Entry, entry_of, read
from tests.support.snapshots import Transcript
from tests.support.transcripts import check_case, read_cases

TEXTS = sorted(Path(__file__).with_name("saves").glob("*.txt"))
CASES = [
    pytest.param(text, title, id=f"{text.stem}: {title}")
    for text in TEXTS
    for title in read_cases(text)
]

# ------------------------------------------------------------------- MindFormers' Checkpoint 2.0

SQUARE = (2, 2)
ROWS = OracleLayout(SQUARE, ((1,), ()))  # ranks 0 and 1 have the upper half, 2 and 3 the lower
BOTH = OracleLayout(SQUARE, ((1,), (0,)))
FOLDED = OracleLayout(SQUARE, ((1, 0), ()))  # an optimizer shard, as the layout has it
WHOLE = OracleLayout(SQUARE, ((),))
LATE = OracleLayout((2,), ((0,), ()), 0, 2)  # of ranks 2 and 3
LATE_WHOLE = OracleLayout((2,), ((),), 0, 2)
SECOND = OracleLayout(SQUARE, ((0,), (1,)), 0, 4)


def noises(**shapes: str | tuple[int, ...]) -> dict[str, Entry]:
    names = {name.replace("__", "."): shape for name, shape in shapes.items()}
    return {name: noise(name, "Float32", shape) for name, shape in names.items()}


FOUR = noises(w=(8, 6), adam_m__w=(8, 6), norm=(6,)) | {"embed": noise("embed", "BFloat16", (4, 4))}
FOUR = {name: FOUR[name] for name in ("w", "adam_m.w", "embed", "norm")}
LAYOUTS = {"w": (ROWS,), "adam_m.w": (FOLDED,), "embed": (BOTH,), "norm": (WHOLE,)}
STAGES = {name: (one, one._replace(first_rank=4)) for name, (one,) in LAYOUTS.items()}
WIDE = {"q_down": noise("q_down", "Float32", (12, 4)), "norm": noise("norm", "BFloat16", (6,))}
COUNTER = {"global_step": noise("global_step", "Int32", ())}


def is_state(name: str) -> bool:
    return name.startswith(("adam", "muon", "accu"))


def four(entries=FOUR, layouts=None, ranks=4, **more) -> Save:
    return Save(entries, layouts or LAYOUTS, ranks, **{"is_optimizer": is_state, **more})


GRADIENTS = noises(accu_grads__w=(8, 6), accu_grads__norm=(6,))
WITH_GRADIENTS = LAYOUTS | {"accu_grads.w": (ROWS,), "accu_grads.norm": (WHOLE,)}


def with_statistic(name: str, layouts=None) -> Save:
    return four(FOUR | noises(**{name: (6,)}), LAYOUTS | (layouts or {}), uncut=frozenset({name}))


# ------------------------------------------------------------------- output folders of MindFormers


RUNS = ("mp2_dp4", "mp2_dp4_opt_all", "pp2", "pp2_opt", "pp2_shared")


@dataclass(frozen=True)
class Run:
    """The rank folders of a run of the corpus, or an output folder with steps of it."""

    name: str
    steps: tuple[str, ...] = ()

    @property
    def entries(self) -> dict[str, Entry]:
        ranks = sorted((SAMPLES / self.name / "ckpt").iterdir())
        stored = {name: e for path in ranks for name, e in read(path / "net-1_1.ckpt").items()}
        with np.load(SAMPLES / self.name / "expected.npz") as full:
            return {
                name: entry_of(full[name], entry.dtype) if name in full else entry
                for name, entry in stored.items()
            }

    def write(self, folder: Path) -> None:
        """Write the rank folders, or an output folder with strategies and records of the last step.

        Files of the steps before it hold zeros.
        """
        if not self.steps:
            shutil.copytree(SAMPLES / self.name / "ckpt", folder)
            return
        for step in self.steps:
            save(folder, self.name, step, is_other=step != self.steps[-1])
        record(folder, self.steps[-1])
        keep_strategies(folder, self.name)


def zeros_of(name: str) -> dict[str, Entry]:
    return {n: one._replace(data=bytes(len(one.data))) for n, one in Run(name).entries.items()}


def write_emergency(folder: Path, ranks: Iterable[int] = RANKS) -> None:
    for rank in ranks:
        path = folder / f"rank_{rank}" / f"ttp_rank_{rank}-2_7.ckpt"
        path.parent.mkdir(parents=True)
        data = (SAMPLES / "mp2_dp4" / "ckpt" / f"rank_{rank}" / "net-1_1.ckpt").read_bytes()
        own = file_bytes.record("cur_rank", "Int64", (), rank.to_bytes(8, "little"))
        path.write_bytes(data + own)


def write_layouts(path: Path, stages: str, *layouts: str) -> None:
    items = [file_bytes.operator(int(stage)) for stage in stages.split(",")]
    for name, _, one in (text.partition("=") for text in layouts):
        matrix, axes = (tuple(map(int, numbers.split(","))) for numbers in one.split("/"))
        items.append(file_bytes.layout(name, matrix, axes))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_bytes.strategy(*items))


# ---------------------------------------------------------------------------- folders of ranks


@dataclass(frozen=True)
class Ranks:
    """Rank folders of tensors that a strategy shards; what it does not list is on every rank."""

    full: Mapping[str, Entry]
    layouts: Mapping[str, Layout]
    more: Mapping[int, Mapping[str, Entry]] = field(default_factory=dict)

    @property
    def entries(self) -> dict[str, Entry]:
        return {**self.full, **self.more.get(0, {})}

    def write(self, folder: Path) -> None:
        ranks = cut(self.full, strategy_of(self.layouts))
        held = {rank: {**ranks[rank], **self.more.get(rank, {})} for rank in ranks}
        write_ranks(folder, held, "safetensors")


def rows(ranks: int, axes: int = 2) -> Layout:
    return Layout((ranks,), ((0,), *((),) * (axes - 1)))


HYBRID = Ranks(
    noises(weight=(8, 8), moments__weight=(8, 8), bias=(8, 8), rate=(1,))
    | {"columns": noise("columns", "Float16", (2, 8))},
    {
        "weight": rows(4),
        "moments.weight": rows(4),
        "columns": Layout((2, 2), ((), (1,))),
    },
)
STEPS = {rank: {"global_step": Entry("Int32", (1,), bytes([6, 0, 0, 0]))} for rank in range(4)}
OTHER_STEP = STEPS | {2: {"global_step": Entry("Int32", (1,), bytes([7, 0, 0, 0]))}}
MOMENTUM = noises(w=(8, 4), moments__w=(8, 4), momentum=())
INFO = {"blocks.0.weight": (12, 5), "blocks[1].bias": (6,), "norm.weight": (7,)}
WITH_STATES = {
    name: noise(name, "Int32", INFO[name.removeprefix("adam_m.")])
    for name in (*INFO, *(f"adam_m.{name}" for name in INFO))
}


def info_ranks(ranks: int) -> Ranks:
    layouts = {"blocks.0.weight": rows(ranks), "blocks[1].bias": rows(ranks, 1)}
    layouts["norm.weight"] = Layout((ranks,), ((),))
    return Ranks(WITH_STATES | {"global_step": noise("g", "Int32", (1,))}, layouts)


def zero_ranks(group: int, ranks: int, zero: int) -> Ranks:
    shape = (ranks // group, group)
    whole, split = Layout(shape, ((), ())), Layout(shape, ((0,), ()))
    layouts = {"w": split if zero == 3 else whole, "adam_m.w": split, "adam_v.w": split}
    full = {name: noise(name, "Int32", (12, 5)) for name in ("w", "adam_m.w", "adam_v.w")}
    full["n"] = noise("n", "Int32", (7,))
    return Ranks(full, {**layouts, "n": Layout(shape, ((),))})


def write_maps(folder: Path, *keys: str) -> None:
    for rank, (numbers, _, seed) in enumerate(one.partition(":") for one in keys):
        path = folder / f"rank_{rank}" / "net.ckpt"
        path.parent.mkdir(parents=True)
        data = file_bytes.map_block([*map(int, numbers.split(","))], int(seed))
        path.write_bytes(file_bytes.record("w") + data + file_bytes.record("v"))


def write_info(folder: Path, ranks: str, *splits: str) -> None:
    folder.mkdir(exist_ok=True)
    size = int(ranks)
    for rank in range(size):
        entries = {
            name: {"split": text == "true", "group_size": size, "rank_id": rank}
            for name, _, text in (split.partition("=") for split in splits)
        }
        (folder / f"params_split_info_{rank}.json").write_text(json.dumps(entries))


def write_strategies(path: Path, run: str) -> None:
    for rank in RANKS:
        of_rank = Path(str(path).replace("N", str(rank)))
        of_rank.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SAMPLES / run / "strategy" / f"strategy_{rank}.ckpt", of_rank)


WRITERS = {
    "step": save,
    "record": record,
    "strategies": keep_strategies,
    "merged-strategy": keep_merged,
    "layouts": write_layouts,
    "emergency": write_emergency,
    "split-info": write_info,
    "maps": write_maps,
    "strategy-of-ranks": write_strategies,
}

# ------------------------------------------------------------------- files that an index lists


@dataclass(frozen=True)
class Indexed:
    """Files, an index of them, and tensors that go to every rank."""

    files: Mapping[str, Mapping[str, Entry]]
    index: str = "param_name_map.json"
    rest: Mapping[str, Entry] | None = None

    @property
    def entries(self) -> dict[str, Entry]:
        parts = (*self.files.values(), self.rest or {})
        return {name: entry for part in parts for name, entry in part.items()}

    def write(self, folder: Path) -> None:
        write_indexed(folder, self.files, self.index, self.rest)


PARTS = {
    "part0.safetensors": noises(w=(8, 4)) | {"b": noise("b", "Float16", (4,))},
    "part1.safetensors": {"v": noise("v", "BFloat16", (4, 4))},
}
NUMBERED = {f"model-0000{n + 1}-of-00002.safetensors": e for n, e in enumerate(PARTS.values())}
REST = noises(scale=()) | {"global_step": noise("s", "Int32", (1,))}
SLICES = noises(accu_grads__w=(4, 4), moments__dropped=(2, 2), dropped=(2, 2))
SLICES |= {"accu_grads.b": noise("h", "Float16", (1,))}  # b is sharded into single elements
FULL = noises(moments__scale=(), moments__other=(1, 1))
FULL |= {"accu_grads.v": noise("n", "BFloat16", (4, 4))}

# -------------------------------------------------------------------------------- hyper-parallel

LAYER = {
    **noises(layer__w=(8, 6)),
    "layer.b": noise("layer.b", "BFloat16", (6,)),
    "step": noise("step", "Int64", ()),
}
BOXES = {
    "layer.w": {((0, 0), (4, 6)): (0, 1), ((4, 0), (4, 6)): (2, 3)},
    "layer.b": {((0,), (6,)): (0, 1, 2, 3)},
    "step": {((), ()): (0, 1, 2, 3)},
}
KEYS = ({((n, 0), (1, 6)): (n % 2,) for n in range(4)}, {((0,), (3,)): (2,)})
RAGGED = {  # rows 0, 1 and half of row 2 on one rank, the rest on the other
    ((0, 0), (2, 4)): (0,),
    ((2, 0), (1, 2)): (0,),
    ((2, 2), (1, 2)): (1,),
    ((3, 0), (1, 4)): (1,),
}
SEEDS = {rank: {"seed": noise(f"seed {rank}", "Int64", ())} for rank in range(4)}

SAVES = {
    "hybrid": HYBRID,
    "steps": Ranks(MOMENTUM, {"w": rows(4), "moments.w": rows(4)}, STEPS),
    "steps-differ": Ranks(MOMENTUM, {"w": rows(4), "moments.w": rows(4)}, OTHER_STEP),
    "elements": Ranks(noises(w=(4, 2), bias=(4,)), {"w": rows(4), "bias": rows(4, 1)}),
    "ab": Ranks(noises(a=(8, 8), b=(8, 8)), {"a": rows(2), "b": rows(2)}),
    "uneven": Ranks(
        noises(table=(10, 3), head=(10, 3)),
        {name: Layout((2,), ((0,), ()), rows=(6, 4)) for name in ("table", "head")},
    ),
    "info-2": info_ranks(2),
    "info-3": info_ranks(3),
    **{
        f"zero-{zero}-{group}-{ranks}": zero_ranks(group, ranks, zero)
        for group, ranks in ((4, 8), (2, 6), (3, 3))
        for zero in (1, 3)
    },
    "twice": Ranks(
        noises(w=(8, 3), more=(8, 3)), dict.fromkeys(("w", "more"), Layout((2, 2), ((0,), ())))
    ),
    "twice-whole": Ranks(
        noises(w=(8, 3), more=(8, 3)),
        {"w": Layout((2, 2), ((0,), ())), "more": Layout((2, 2), ((), ()))},
    ),
    "many": Ranks(
        noises(**{f"w{n}": (64 - n,) for n in range(8)}),
        {f"w{n}": Layout((2,), ((),)) for n in range(8)},
        {rank: {"small": noise(f"small{rank}", "Float32", (2,))} for rank in range(2)},
    ),
    # ------------------------------------------------------------------------------------------
    "parts": Indexed(PARTS, rest=REST),
    "parts-slices": Indexed(PARTS, rest=REST | SLICES | FULL),
    "parts-below": Indexed({"sub/a.safetensors": noises(w=(2,))}),
    "one-part": Indexed({"part0.safetensors": REST}),
    "hugging-face": Indexed(NUMBERED, "model.safetensors.index.json"),
    "hugging-face-ms": Indexed(NUMBERED, "ms-model.safetensors.index.json"),
    # ------------------------------------------------------------------------------------------
    "three-steps": Run("pp2_opt", ("1_5", "1_10", "2_3")),
    **{name: Run(name) for name in RUNS},
    # ------------------------------------------------------------------------------------------
    "boxes": HyperSave(LAYER, BOXES),
    "boxes-of-ranks": HyperSave(LAYER, BOXES, collectives=False),
    "boxes-of-ranks-early": HyperSave(LAYER, BOXES, "checkpoint", collectives=False),
    "boxes-other": HyperSave(noises(layer__w=(4, 6)), {"layer.w": {((0, 0), (4, 6)): (0, 1)}}),
    "boxes-clash": HyperSave(
        {"step": noise("step", "Int32", ())}, {"step": {((), ()): (1,)}}, collectives=False
    ),
    "boxes-keys": HyperSave(
        noises(w=(4, 6)) | {"w.__dcp_chunk_0": noise("other", "Float32", (3,))},
        {"w": KEYS[0], "w.__dcp_chunk_0": KEYS[1]},
    ),
    "boxes-ragged": HyperSave(noises(w=(4, 4)), {"w": RAGGED}),
    "boxes-objects": HyperSave(LAYER, BOXES, objects=("lr_scheduler", "rng")),
    "boxes-seed": HyperSave(LAYER, BOXES, extra=SEEDS),
    # ------------------------------------------------------------------------------------------
    "four": four(),
    "four-alone": four(remove_redundancy=True),
    "four-prefixed": four(prefix="my-opt-7b"),
    "four-prefixed-alone": four(prefix="my-opt-7b", remove_redundancy=True),
    "other": Save(noises(w=(2, 2)), {"w": (ROWS,)}, 4),
    "numbers-of-parameters": four(has_parameter_numbers=True),
    "late": Save(
        noises(big=(64,), w=(8, 6)), {"big": (LATE_WHOLE,), "w": (LATE,)}, 4, remove_redundancy=True
    ),
    "late-state": Save(
        noises(b=(4, 2), w=(8, 6)),
        {"b": (LATE,), "w": (LATE,)},
        4,
        lambda name: name == "w",
        remove_redundancy=True,
    ),
    "late-adam": four(
        noises(b=(4, 2), adam_m__b=(4, 2)),
        {"b": (LATE,), "adam_m.b": (LATE,)},
        remove_redundancy=True,
    ),
    "stages": four(
        FOUR | {"late": noise("late", "Float16", (6, 4))}, LAYOUTS | {"late": (SECOND,)}, 8
    ),
    "stages-shared": four(layouts=STAGES, ranks=8),
    "stages-one": Save(noises(w=(8, 6)), {"w": STAGES["w"]}, 8),
    "stages-one-alone": Save(noises(w=(8, 6)), {"w": STAGES["w"]}, 8, remove_redundancy=True),
    "without-layouts": four(layouts={"w": (ROWS,)}, uncut=frozenset(FOUR) - {"w"}),
    "unlisted": four(FOUR | COUNTER | noises(muon_m__w=(8, 6)), like={"muon_m.w": "w"}),
    "odd-state": four(FOUR | noises(adam_v__w=(5, 6))),
    "gradients": four(FOUR | GRADIENTS, WITH_GRADIENTS),
    "gradients-alone": four(FOUR | GRADIENTS, WITH_GRADIENTS, remove_redundancy=True),
    "one": four(
        layouts={n: (OracleLayout((1,), ((),) * len(e.shape)),) for n, e in FOUR.items()}, ranks=1
    ),
    "statistic": with_statistic("layers.1.mlp.global_tokens_per_expert"),
    "statistic-listed": with_statistic("attn.max_logits_val", {"attn.max_logits_val": (WHOLE,)}),
    "bias": with_statistic("mlp.router.expert_bias"),
    "tid2eid": with_statistic("mlp.tid2eid"),
    "tokens-weight": with_statistic("tokens_per_expert.w"),
    **{
        f"fsdp-{fsdp}x{tp}": FsdpSave(WIDE, fsdp, tp)
        for fsdp, tp in ((2, 3), (3, 2), (6, 4), (2, 1), (1, 4))
    },
    "fsdp-2x3-norm": FsdpSave(WIDE, 2, 3, frozenset({"norm"})),
}


SPELLED = ("layouts", "split-info")  # writers whose words have the sign "="
OUT = "out.safetensors"


class Case:
    """A folder, what was saved in it, and what comes of the lines of a case."""

    def __init__(self, folder: Path) -> None:
        self.transcript = Transcript(folder)
        self.saved: dict[str, dict[str, Entry]] = {}

    def act(self, line: str) -> Iterator[str]:
        """Yield what comes of a line."""
        if line.startswith("$ "):
            subprocess.run(line[2:], shell=True, check=True, env=os.environ | {"GOLDEN": GOLDEN})
        elif (text := re.fullmatch(r"(\S+)\| (.*)", line)) is not None:
            with Path(text[1]).open("a", encoding="utf-8") as file:
                file.write(f"{text[2]}\n")
        elif line.split()[0] in WRITERS:
            self.write(*line.split())
        elif line.startswith("save "):
            _, name, path, *held = line.split()
            saved_by = {one: map(int, of.split(",")) for one, of in (h.split("=") for h in held)}
            SAVES[name].write(Path(path), *([saved_by] if held else []))
            make_old(Path(path))
            self.saved[name] = dict(SAVES[name].entries)
            if name == "three-steps":
                self.saved["zeros"] = zeros_of(SAVES[name].name)
        elif line.startswith("> "):
            yield from self.command(shlex.split(line[2:].replace(" golden/", f" {GOLDEN}/")))
        elif (value := re.fullmatch(r"(\S+): (.*) =(.*)", line)) is not None:
            change_value(*value.groups())
        else:
            change_tensors(*line.split())

    def write(self, how: str, path: str, *words: str) -> None:
        """Call one of `WRITERS`, and of a step of a run note what was saved."""
        given = [word for word in words if "=" not in word or how in SPELLED]
        options: dict[str, object] = dict(
            word.split("=") for word in words if "=" in word and how not in SPELLED
        )
        if "ranks" in options:
            options["ranks"] = [int(rank) for rank in str(options["ranks"]).split(",") if rank]
        WRITERS[how](Path(path), *given, **options)
        make_old(Path(path))
        if how == "step":
            name = "zeros" if "is_other" in options else given[0]
            self.saved[name] = zeros_of(given[0]) if name == "zeros" else Run(given[0]).entries

    def command(self, words: list[str]) -> Iterator[str]:
        """Yield what ckpttool prints, and of a merge what it wrote."""
        writes = words[0] == "merge" and "-o" not in words
        result = run(*words, *(["-o", OUT] if writes else []))
        if result.exit_code:
            yield f"exit {result.exit_code}"
        if words[-1] == "--json":
            yield from tensors_of(json.loads(result.stdout))
            return
        yield from self.transcript.normalise(result.stdout + result.stderr).splitlines()
        assert Path(OUT).exists() == (writes and result.exit_code == 0)
        if Path(OUT).exists():
            yield self.compare(read(Path(OUT)))
            for path in Path().glob(f"*{OUT}*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def compare(self, got: dict[str, Entry]) -> str:
        """Return which save these tensors are, and how they differ from it."""

        def unlike(save: str) -> list[str]:
            wanted = self.saved[save]
            names = dict.fromkeys([*wanted, *got])
            return [name for name in names if wanted.get(name) != got.get(name)]

        if not self.saved:
            return f"all of {next((path for path in files() if read(path) == got), 'nobody')}"
        save = min(self.saved, key=lambda save: len(unlike(save)))
        held = {name: holder(name, got[name]) for name in unlike(save) if name in got}
        lacks = [f"without {name}" for name in unlike(save) if name not in got]
        return "; ".join(
            [f"all of {save}", *lacks, *(f"{n} of {path}" for n, path in held.items())]
        )


def make_old(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (10**9, 10**9))


def holder(name: str, entry: Entry) -> str:
    return next((str(path) for path in files() if read(path).get(name) == entry), "nobody")


def files() -> Iterator[Path]:
    for path in sorted(Path().rglob("*.*")):
        if path.suffix in (".ckpt", ".safetensors") and path.name != OUT and path.stat().st_size:
            yield path


def tensors_of(document: dict) -> Iterator[str]:
    yield f"ranks {[one['rank'] for one in document.get('ranks', ())]}, step {document.get('step')}"
    for one in document["tensors"]:
        facts = [one["name"], one["dtype"], one["shape"]]
        facts += [
            one[key] for key in ("parts", "device_matrix", "tensor_map", "file") if one.get(key)
        ]
        facts += [f"{of['start']} {format_ranks(of['ranks'])}" for of in one.get("slices", ())]
        yield "; ".join(map(str, facts))


def change_value(file: str, place: str, value: str) -> None:
    """Set or remove a value of a JSON document; one behind the end of a list is added."""
    document = json.loads(Path(file).read_text(encoding="utf-8"))
    *above, last = place.split("/")
    inside = document
    for key in above:
        inside = inside[int(key) if isinstance(inside, list) else key]
    if isinstance(inside, list):
        last = slice(int(last), int(last) + 1)
        inside[last] = [json.loads(value)] if value else []
    elif value:
        inside[last] = json.loads(value)
    else:
        del inside[last]
    Path(file).write_text(json.dumps(document), encoding="utf-8")


def change_tensors(file: str, how: str, *words: str) -> None:
    """Put noise into files of a pattern, drop tensors, or change a byte."""
    for path in sorted(Path().glob(file)):
        if how == "flip":
            flip_byte(path, int(*words))
            continue
        tensors = read(path)
        if how == "put":
            name, dtype, *shape = words
            tensors[name] = noise(f"{name} {path.name}", dtype, tuple(map(int, shape)))
        else:
            tensors = {name: entry for name, entry in tensors.items() if name not in words}
        write_safetensors(path, tensors)


@pytest.mark.parametrize(("text", "title"), CASES)
def test_what_is_saved_is_read_or_refused(text, title, tmp_path, monkeypatch):
    folder = tmp_path / "a" / "folder" / "below"  # folders of tests have numbers, as those of ranks
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    check_case(text, title, Case(folder).act)
