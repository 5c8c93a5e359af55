"""The folders and files that the pages of the documentation name: ``ckpttool help --examples DIR``.

The tests of the pages (``tests/e2e/test_pages.py``) run their commands in the same folders.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np

import ckpttool
from ckpttool.cli.help import EXAMPLES
from tests.support.checkpoints import cut, noise, write_file
from tests.support.families import load_model, to_mindformers, write_strategy
from tests.support.readers import Entry, entry_of, zeros

GOLDEN = Path(__file__).parents[1] / "golden"

# Golden cases, by the names that pages give to their folders and to NAME_strategy.ckpt.
CASES = {
    "": "reshard_8_to_4",
    "encrypted": "encrypted_gcm",
    "rng": "params_outside_strategy",
    "summed": "crc_check",
}
# The folders of the story that README and tutorial tell.
OF_TUTORIAL = ("checkpoint", "strategy.ckpt", "new_strategy.ckpt")


def lay_out(folder: Path) -> None:
    """Write every folder and file that a page names, into a folder that is empty or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        shutil.copytree(GOLDEN / case / "src", folder / (name or "checkpoint"))
        strategy = f"{name}_strategy.ckpt".lstrip("_")
        shutil.copy(GOLDEN / case / "src_strategy.ckpt", folder / strategy)
    shutil.copy(GOLDEN / "reshard_8_to_4" / "dst_strategy.ckpt", folder / "new_strategy.ckpt")
    facts = json.loads((GOLDEN / "encrypted_gcm" / "case.json").read_text(encoding="utf-8"))
    (folder / "key.bin").write_text(facts["enc_key"], encoding="ascii")

    shutil.copytree(GOLDEN / "replicated_only" / "src", folder / "replicas")
    stages = GOLDEN / "pipeline_2x4_to_8"
    shutil.copytree(stages / "src", folder / "stages")
    shutil.copytree(stages / "src_stage_strategies", folder / "stage_strategies")
    # The output folders of two runs of MindFormers.
    shutil.copytree(folder / "checkpoint", folder / "output" / "checkpoint")
    (folder / "output" / "strategy").mkdir()
    shutil.copy(folder / "strategy.ckpt", folder / "output/strategy/ckpt_strategy_rank_0.ckpt")
    shutil.copytree(GOLDEN / "mindformers" / "1.9.0_stages", folder / "output_2" / "checkpoint")
    shutil.copytree(GOLDEN / "hyper_parallel" / "torch_two_axes" / "ckpt", folder / "hyper")
    merged = folder / "hub" / "model.safetensors"
    ckpttool.merge(folder / "checkpoint", folder / "strategy.ckpt", merged)
    shutil.rmtree(merged.with_name(f".{merged.name}.ckpttool"))  # the record of this run
    for name in ("run_a", "run_b"):
        shutil.copytree(folder / "checkpoint", folder / name)
    for path in (folder / "checkpoint").glob("rank_*/*.ckpt"):  # a run with three steps
        rank = folder / "long_run" / path.parent.name
        rank.mkdir(parents=True)
        for step in ("1_8000", "1_8500", "1_9000"):
            shutil.copy(path, rank / f"net-{step}.ckpt")
    for number, entries in hybrid_parallel()[1].items():
        write_file(folder / "nodes" / f"node{number}" / "CKP_1-4_32.ckpt", entries, "ckpt")
    _write_qwen3(folder)


def _write_qwen3(folder: Path) -> None:
    """Write a model of Hugging Face, and a run of MindFormers that trained it."""
    config, tensors = load_model("qwen3")
    for name, entry in tensors.items():  # without the bit that NaN and large numbers have
        tensors[name] = entry_of(entry.array() & 0xBFFF, entry.dtype)
    write_file(folder / "qwen3" / "model.safetensors", tensors, "safetensors")
    (folder / "qwen3" / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "qwen3" / "generation_config.json").write_text('{"do_sample": true}\n')
    adapter: dict[str, Entry] = {}
    for layer, part in product(range(3), "qv"):
        module = f"model.layers.{layer}.self_attn.{part}_proj"
        rows, columns = tensors[f"{module}.weight"].shape
        random = np.random.default_rng([*module.encode()])
        for side, shape in (("A", (4, columns)), ("B", (rows, 4))):
            numbers = random.standard_normal(shape).astype("<f4")
            adapter[f"base_model.model.{module}.lora_{side}.weight"] = entry_of(numbers)
    write_file(folder / "qwen3_lora" / "adapter_model.safetensors", adapter, "safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "qwen3_lora" / "adapter_config.json").write_text(json.dumps(said) + "\n")
    choices = {"fc1": "interleaved", "attention": "grouped"}
    weights = to_mindformers(config, tensors, "qwen3", choices)
    layouts = ckpttool.read_strategy(write_strategy(folder / "qwen3_strategy.json", weights, 4))
    for rank, entries in cut(weights, layouts).items():
        path = folder / "qwen3_run" / f"rank_{rank}" / f"qwen3_rank_{rank}-1_40.ckpt"
        states = product(("adam_m", "adam_v"), entries.items())
        of_adam = {f"{state}.{name}": zeros(entry.shape) for state, (name, entry) in states}
        write_file(path, {**entries, **of_adam}, "ckpt")


def hybrid_parallel() -> tuple[Mapping[str, Entry], Mapping[int, Mapping[str, Entry]]]:
    full = {name: noise(name, "Float32", (8, 8)) for name in ("weight", "moments.weight")}
    same = {name: noise(name, "Float32", ()) for name in ("learning_rate", "momentum")}
    same["global_step"] = noise("global_step", "Int32", (1,))
    ranks = {}
    for rank in range(4):
        rows = slice(2 * rank, 2 * rank + 2)
        ranks[rank] = same | {name: entry.excerpt(rows) for name, entry in full.items()}
    return full | same, ranks


def write_archive(folder: Path) -> None:
    """Write the archive of the package, from a folder with what the pages name."""
    with tarfile.open(EXAMPLES, "w:xz", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size = path.stat().st_size
            with path.open("rb") as file:
                archive.addfile(member, file)
