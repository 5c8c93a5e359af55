"""The README keeps its word: its commands run, and its lists are complete."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.by_hand import layout, strategy
from tests.commands import run_well
from tests.corpus import GOLDEN

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands():
    """The ``ckpttool`` lines of the README's shell blocks, continuation lines joined."""
    found = []
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.split(" | ")[0], comments=True)
            if words[:1] == ["ckpttool"]:
                found.append(words[1:])
    return found


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder as the README's examples assume it."""
    monkeypatch.chdir(tmp_path)

    def provide(case):
        shutil.copytree(GOLDEN / case / "src", "checkpoint", dirs_exist_ok=True)
        for path in list(Path("checkpoint").rglob("*.ckpt")):
            path.rename(path.with_name("net-2_10.ckpt"))
        shutil.copytree("checkpoint", "output/checkpoint", dirs_exist_ok=True)
        shutil.copy(GOLDEN / case / "src_strategy.ckpt", "strategy.ckpt")
        Path("output/strategy").mkdir(exist_ok=True)
        shutil.copy("strategy.ckpt", "output/strategy/ckpt_strategy_rank_0.ckpt")
        shutil.copy(GOLDEN / case / "dst_strategy.ckpt", "new_strategy.ckpt")
        Path("key.bin").write_bytes(bytes(16))

    return provide


def provide_mindformers():
    """A checkpoint that describes itself, and a strategy of other ranks for it."""
    shutil.copytree(
        GOLDEN / "mindformers" / "1.9.0_stages", "output/checkpoint", dirs_exist_ok=True
    )
    Path("new_strategy.ckpt").write_bytes(strategy(layout("0.wq", (2,), (-1,), (0,))))


def test_every_command_of_the_readme_runs(workplace):
    assert len(commands()) >= 9
    for words in commands():
        shutil.rmtree("new", ignore_errors=True)
        workplace("replicated_only" if "--replicated" in words else "tutorial_8_to_8_retrain")
        if "output/checkpoint" in words:
            provide_mindformers()
        run_well(*words, *([] if words[0] == "inspect" else ["--overwrite"]))


def test_the_examples_of_every_help_run(workplace):
    workplace("tutorial_8_to_8_retrain")
    for command in ("merge", "inspect", "reshard", "split"):
        example = run_well(command, "-h").stdout.split("\n\n")[1].strip()
        run_well(*shlex.split(example)[1:])


def test_the_python_example_of_the_readme_runs(workplace):
    workplace("tutorial_8_to_8_retrain")
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "scan(" in b)
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Path("merged.h5").stat().st_size > 0


def test_every_option_is_explained_in_the_help_and_every_exit_code_in_the_readme():
    import ckpttool.errors
    from ckpttool.cli.main import main

    for command in main.commands.values():
        for parameter in command.params:
            assert parameter.name == "src" or getattr(parameter, "help", None), parameter.name
    codes = {
        error.exit_code
        for error in vars(ckpttool.errors).values()
        if isinstance(error, type) and issubclass(error, ckpttool.errors.CkptToolError)
    }
    for code in {*codes, 0, 2, 130}:
        assert f"\n| {code} | " in README


def test_every_module_is_in_the_readmes_picture_of_the_house():
    picture = README.split("## How it is built")[1]
    for path in (ROOT / "ckpttool").rglob("*.py"):
        if path.name.startswith("__") or path.parent.name == "cli":
            continue
        assert path.name in picture, path
