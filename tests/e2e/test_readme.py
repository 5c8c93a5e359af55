"""The README keeps its word: its commands run, and its lists are complete."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from ckpttool.cli.verify import verify
from ckpttool.model.diagnostics import severities
from tests.support.checkpoints import noise, write_file
from tests.support.commands import run_well
from tests.support.corpus import GOLDEN
from tests.support.executors import contents, environment
from tests.support.file_bytes import layout, strategy
from tests.support.readers import read, read_ranks

ROOT = Path(__file__).parents[2]
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


def script(word: str) -> str:
    """The one bash script of the README that has this word in it."""
    (text,) = (b for b in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if word in b)
    return text


def run_script(text: str, **more: str) -> None:
    """Run a script that finds the commands of this Python, in the current folder."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(
        command, env=environment(PATH=path, **more), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def hybrid_parallel():
    """What the four devices of MindSpore's tutorial on hybrid parallel save: full and by rank."""
    full = {name: noise(name, "Float32", (8, 8)) for name in ("weight", "moments.weight")}
    same = {name: noise(name, "Float32", ()) for name in ("learning_rate", "momentum")}
    same["global_step"] = noise("global_step", "Int32", (1,))
    ranks = {}
    for rank in range(4):
        rows = slice(2 * rank, 2 * rank + 2)
        ranks[rank] = same | {name: entry.excerpt(rows) for name, entry in full.items()}
    return full | same, ranks


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder as the README's examples assume it."""
    monkeypatch.chdir(tmp_path)
    for rank, entries in hybrid_parallel()[1].items():
        write_file(Path("nodes", f"node{rank}", "CKP_1-4_32.ckpt"), entries, "ckpt")
    shutil.copytree(GOLDEN / "replicated_only" / "src", "replicas")
    (text,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    Path("four.yaml").write_text(text, encoding="utf-8")
    Path("two.yaml").write_text(text.replace("ranks: 4", "ranks: 2"), encoding="utf-8")

    def provide(case):
        shutil.copytree(GOLDEN / case / "src", "checkpoint", dirs_exist_ok=True)
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
        workplace("tutorial_8_to_8_retrain")
        if "output/checkpoint" in words:
            provide_mindformers()
        writes = words[0] not in ("inspect", "verify", "diff")
        run_well(*words, *(["--overwrite"] if writes else []))


def test_a_newcomer_runs_the_first_examples_one_after_the_other(tmp_path, monkeypatch):
    """With the lines that provide the files, in a folder where the repository lies."""
    monkeypatch.chdir(tmp_path)
    Path("tests").symlink_to(ROOT / "tests")
    (setup,) = (b for b in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) if "cp -r" in b)
    run_script(setup)
    first = commands()[: 1 + [words[0] for words in commands()].index("diff")]
    assert {words[0] for words in first} == {
        *["inspect", "merge", "split", "reshard", "verify", "diff"]
    }
    for words in first:
        run_well(*words)


def test_the_links_of_the_contents_lead_to_headings():
    contents_list = README.split("## Try it")[0]
    headings = re.findall(r"^##+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}
    links = re.findall(r"\]\(#([^)]*)\)", contents_list)
    assert len(links) > 10
    assert not {*links} - anchors


def test_the_tutorial_on_hybrid_parallel_is_two_commands(workplace):
    merge, split = (words for words in commands() if {"four.yaml", "two.yaml"} & set(words))
    full, _ = hybrid_parallel()
    run_well(*merge)
    assert read(Path("integrated.ckpt")) == full
    run_well(*split)
    for rank, entries in read_ranks(Path("two")).items():
        assert entries["weight"].shape == entries["moments.weight"].shape == (4, 8)
        rows = slice(4 * rank, 4 * rank + 4)
        assert (entries["weight"].array() == full["weight"].array()[rows]).all()
        assert entries["learning_rate"] == full["learning_rate"]
    run_well("reshard", "nodes", "-s", "four.yaml", "-d", "two.yaml", "-o", "same")
    assert read_ranks(Path("same")) == read_ranks(Path("two"))


def test_the_examples_of_every_help_run(workplace):
    workplace("tutorial_8_to_8_retrain")
    # and finalize, in tests/transaction/test_parts.py
    for command in ("merge", "inspect", "reshard", "split", "verify", "diff"):
        example = run_well(command, "-h").stdout.split("\n\n")[1].strip()
        run_well(*shlex.split(example.replace("\\\n", " "))[1:])


def test_the_python_example_of_the_readme_runs(workplace):
    workplace("tutorial_8_to_8_retrain")
    (code,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "scan(" in b)
    subprocess.run([sys.executable, "-c", code], check=True)
    assert Path("merged.h5").stat().st_size > 0


@pytest.fixture
def retrained(workplace):
    """The folder of the scripts, and what a run of one process makes of it."""
    workplace("tutorial_8_to_8_retrain")
    words = ["checkpoint/", "-s", "strategy.ckpt", "-d", "new_strategy.ckpt", "-o", "expected"]
    run_well("reshard", *words, "--format", "ckpt")
    return contents(Path("expected"))


@pytest.mark.dask
@pytest.mark.xdist_group("dask")
def test_the_dask_script_of_the_readme_runs(retrained):
    pytest.importorskip("distributed", reason="the extra ckpttool[dask] is not installed")
    wait = "until [ $(cat log | grep -c 'Registered to') = 2 ]; do sleep 0.1; done"
    text = script("dask scheduler").replace("sleep 5", wait)
    text = text.replace(" --no-nanny &", " --no-nanny 2>>log &").replace(
        "json &", "json 2>/dev/null &", 1
    )
    # A worker that stays would have the script wait for ever.
    until = "for i in $(seq 60); do jobs -r > left; test -s left || break; sleep 0.5; done"
    text = text.replace("\nwait\n", f"\n{until}; ! test -s left\n")
    assert "! test -s left" in text
    run_script(f"trap 'kill -9 $(jobs -p) || true' EXIT\ntouch log\n{text}")
    assert contents(Path("on_dask")) == retrained


@pytest.mark.mpi
@pytest.mark.xdist_group("mpi")
@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="mpiexec is not installed")
def test_the_mpi_script_of_the_readme_runs(retrained):
    pytest.importorskip("mpi4py", reason="the extra ckpttool[mpi] is not installed")
    allowed = ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM", "MCA_rmaps_base_oversubscribe")
    run_script(script("mpiexec"), **{f"OMPI_{name}": "1" for name in allowed})
    assert contents(Path("on_mpi")) == retrained


def test_the_job_array_of_the_readme_runs_and_is_finalized(retrained):
    text = script("#SBATCH")
    (array,) = re.findall(r"--array=1-(\d+)", text)
    for task in range(1, int(array) + 1):
        run_script(text, SLURM_ARRAY_TASK_ID=str(task), SLURM_ARRAY_TASK_COUNT=array)
    assert "`ckpttool finalize array/`" in README
    run_well("finalize", "array/")
    assert contents(Path("array")) == retrained
    manifests = [Path(folder, "ckpttool.json").read_bytes() for folder in ("array", "expected")]
    assert manifests[0] == manifests[1]


def test_every_option_is_explained_in_the_help():
    from ckpttool.cli.main import main

    context = click.Context(main)
    for name in main.list_commands(context):
        for parameter in main.get_command(context, name).params:
            is_explained = isinstance(parameter, click.Argument) or getattr(parameter, "help", None)
            assert is_explained, parameter.name


def test_the_codes_that_the_readme_names_are_findings_of_verify():
    text = README.split("### What `verify` finds")[1].split("\n\n")[1]
    named = set(re.findall(r"`([a-z_]+)`", text)) - {"code", "verify"}
    column = severities("verify")
    assert len(named) > 5
    assert {column.get(code) for code in named} == {"warning", "error"}
    (ignore,) = (one for one in verify.params if one.name == "ignore")
    assert {*ignore.type.choices} == {code for code in column if column[code] == "warning"}


def test_the_files_that_the_readme_links_to_are_there():
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link}
    assert "docs/reference/messages.md" in links
    assert [link for link in links if not (ROOT / link).is_file()] == []
