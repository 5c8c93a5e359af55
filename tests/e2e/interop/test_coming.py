"""The page "Coming from MindSpore": each call that it names, and the command below the call."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil

import pytest

from tests.support.commands import run_well
from tests.support.corpus import GOLDEN
from tests.support.pages import DOCS, blocks_of, python_block
from tests.support.readers import Entry, read, read_ranks

PAGE = DOCS / "guides" / "coming-from-mindspore.md"
# Outputs of the commands, and where the calls write the same tensors.
WRITTEN = {
    "new": "new",
    "merged.ckpt": "merged/rank_0/full_0.ckpt",
    "one/rank_1/checkpoint_1.ckpt": "checkpoint_1.ckpt",
    "sf": "sf",
    "back": "back",
    "unified": "unified",
    "split": "split",
}


def lines_of_page() -> list[str]:
    texts = [block.text for block in blocks_of(PAGE)]
    return [line for text in texts for line in text.replace(" \\\n", " ").splitlines()]


def calls() -> str:
    comments = [line[2:] for line in lines_of_page() if line.startswith("# ")]
    return "\n".join(comments).partition("python mindformers/")[0]


@pytest.fixture(scope="module")
def both(mindspore, tmp_path_factory):
    folder = tmp_path_factory.mktemp("coming")
    case = GOLDEN / "reshard_8_to_4"
    for side in ("ours", "theirs"):
        shutil.copytree(case / "src", folder / side / "checkpoint")
        shutil.copy(case / "src_strategy.ckpt", folder / side / "strategy.ckpt")
        shutil.copy(case / "dst_strategy.ckpt", folder / side / "new_strategy.ckpt")
        stages = GOLDEN / "pipeline_2x4_to_8" / "src_stage_strategies"
        shutil.copytree(stages, folder / side / "stage_strategies")
    returned = mindspore.ask("run_calls", code=calls(), folder=folder / "theirs")
    return folder / "ours", folder / "theirs", returned


@pytest.fixture(scope="module")
def printed(both):
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(both[0])
        for line in lines_of_page():
            if line.startswith("ckpttool ") and "output/" not in line:
                words = shlex.split(line)[1:]
                found[" ".join(words[:2])] = run_well(*words).stdout
    return found


def tensors(path):
    if path.is_file():
        return {0: read(path)}
    if (path / "rank_0").is_dir():
        return read_ranks(path)
    files = map(read, path.glob("*.safetensors"))
    return {0: {name: entry for one in files for name, entry in one.items()}}


def test_every_function_that_is_called_has_a_row():
    found = ast.walk(ast.parse(calls()))
    called = {node.attr for node in found if isinstance(node, ast.Attribute)}
    rows = re.findall(r"^\| (`.*?`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert called - {"load_checkpoint"} == named - {"restore_group_info_list"}  # needs no command


@pytest.mark.parametrize("ours", WRITTEN)
def test_a_command_writes_the_tensors_of_the_call(ours, both, printed):
    found, want = tensors(both[0] / ours), tensors(both[1] / WRITTEN[ours])
    assert all(want.values())
    assert found == want


def test_the_merged_strategy_has_the_same_bytes(both, printed):
    one, other = ((side / "all_stages.ckpt").read_bytes() for side in both[:2])
    assert one == other


def test_what_a_command_prints_is_what_the_call_returns(both, printed):
    returned = both[2]
    ranks = re.findall(r"\d+", printed["strategy ranks"].partition(":")[2].partition(" (")[0])
    assert {*map(int, ranks)} <= {*returned["ranks"]}
    shown = json.loads(printed["strategy show"])["tensors"]
    assert sorted(one["name"] for one in shown) == returned["layouts"]


def test_an_opened_checkpoint_has_the_tensor_that_is_merged_of_slices(both, monkeypatch):
    monkeypatch.chdir(both[0])
    scope: dict = {}
    exec(compile(python_block(PAGE, "merge_sliced_parameter"), "a page", "exec"), scope)
    entry = Entry("Float32", scope["full"].shape, scope["full"].tobytes())
    assert list(entry.digest) == [
        *both[2]["full"][:1],
        tuple(both[2]["full"][1]),
        both[2]["full"][2],
    ]


def test_what_a_choice_leaves_out_is_written_as_slices(both, mindspore, tmp_path):
    code = """ms.unified_safetensors("sf", "strategy.ckpt", out, file_suffix="2_10",
        choice_func=lambda name: not name.startswith("adam_"))"""
    source = both[1]
    mindspore.ask("run_calls", code=code.replace("out", repr(str(tmp_path)), 1), folder=source)
    run_well(
        "merge",
        source / "sf",
        "-s",
        source / "strategy.ckpt",
        "--step",
        "2_10",
        "--weights-only",
        "-o",
        tmp_path / "full.safetensors",
    )
    want = read(tmp_path / "full.safetensors")
    assert read(tmp_path / "part0.safetensors") == want
    rest = read(tmp_path / "hyper_param.safetensors")
    assert any(name.startswith("adam_m.") for name in rest)
    rank = read(source / "sf" / "rank_0" / "checkpoint-2_10.safetensors")
    assert rest == {name: rank[name] for name in rest}
