"""The lists of the documentation are complete, and its examples give what they say.

`tests.e2e.test_pages` runs what README and documentation show.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import click
import pytest

from ckpttool.cli.verify import verify
from ckpttool.problems import severities
from tests.support.checkpoints import write_file
from tests.support.commands import commands, everything, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.examples import hybrid_parallel
from tests.support.families import write_model
from tests.support.pages import DOCS, ROOT, blocks_of
from tests.support.readers import read, read_ranks


@pytest.fixture
def workplace():
    case = GOLDEN / "tutorial_8_to_8_retrain"
    for name in ("checkpoint", "runs/a", "runs/b"):
        shutil.copytree(case / "src", name)
    shutil.copy(case / "src_strategy.ckpt", "strategy.ckpt")
    shutil.copy(case / "dst_strategy.ckpt", "new_strategy.ckpt")
    shutil.copytree(GOLDEN / "pipeline_2x4_to_8" / "src_stage_strategies", "stage_strategies")
    write_model(Path("qwen3"), "qwen3")


def test_the_tutorial_on_hybrid_parallel_is_two_commands():
    full, ranks = hybrid_parallel()
    for rank, entries in ranks.items():
        write_file(Path("nodes", f"node{rank}", "CKP_1-4_32.ckpt"), entries, "ckpt")
    blocks = list(blocks_of(DOCS / "guides" / "hand-written-strategies.md"))
    for block in blocks:
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
    (text,) = (
        block.text for block in blocks if block.language == "sh" and "two.yaml" in block.text
    )
    merge, split, reshard = (shlex.split(line)[1:] for line in text.splitlines())
    assert (merge[0], split[0], reshard[0]) == ("merge", "split", "reshard")
    run_well(*merge)
    assert read(Path("integrated.ckpt")) == full
    run_well(*split)
    for rank, entries in read_ranks(Path("two")).items():
        assert entries["weight"].shape == entries["moments.weight"].shape == (4, 8)
        rows = slice(4 * rank, 4 * rank + 4)
        assert (entries["weight"].array() == full["weight"].array()[rows]).all()
        assert entries["learning_rate"] == full["learning_rate"]
    run_well(*reshard)
    assert read_ranks(Path("same")) == read_ranks(Path("two"))


def test_the_examples_of_every_help_run(workplace):
    # and finalize, in tests/transaction/test_parts.py
    examples = [name for name in commands() if name not in ("finalize", "completion")]
    for command in examples:
        example = run_well(*command.split(), "-h").stdout.split("\n\n")[1].strip()
        result = run(*shlex.split(example.replace("\\\n", " "))[1:])
        assert result.exit_code == (command == "strategy diff"), everything(result)


def test_every_option_is_explained_in_the_help():
    for command in commands().values():
        for parameter in command.params:
            is_explained = isinstance(parameter, click.Argument) or getattr(parameter, "help", None)
            assert is_explained, parameter.name


@pytest.mark.source
def test_the_demo_tells_the_story_of_the_readme():
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("scripts/demo", "README.md")]
    demo, readme = (" ".join(text.replace("\\\n", " ").split()) for text in texts)
    *story, mistake = re.findall(r"run '(ckpttool [^']*)'", demo)
    assert len(story) == 5
    assert [command for command in story if command not in readme] == []
    assert f"run '{mistake}' && exit 1" in demo


def test_the_codes_on_the_page_about_verify_are_its_findings():
    page = (DOCS / "guides" / "verifying.md").read_text(encoding="utf-8")
    text = page.split("## What needs `--deep`")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", text))
    column = severities("verify")
    assert {column.get(code) for code in named} == {"warning", "error"}
    (ignore,) = (one for one in verify.params if one.name == "ignore")
    assert {*ignore.type.choices} == {code for code in column if column[code] == "warning"}
