"""``ckpttool strategy ranks``: what it prints, and the files that it names."""

import json
import shutil

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.model.layout import Layout
from tests.support.checkpoints import cut, noise, strategy_of, write_ranks
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN

CASE = GOLDEN / "reshard_8_to_4"
SRC = ["-s", CASE / "src_strategy.ckpt"]
BOTH = [*SRC, "-d", CASE / "dst_strategy.ckpt"]
FILES = "rank_{rank}/checkpoint-2_10.ckpt"


def ranks(*words):
    return run_well("strategy", "ranks", *words).stdout


def test_each_target_rank_has_a_line_with_all_alternatives():
    assert ranks(*BOTH).splitlines() == [
        "rank 0: 0 (one of 0-6/2); also: 1, 2",
        "rank 1: 0 (one of 0-6/2); also: 1, 2",
        "rank 2: 3 (one of 1-7/2); also: 0, 1",
        "rank 3: 3 (one of 1-7/2); also: 0, 1",
        "together: 0, 1; also: 2",
    ]


def test_one_target_rank_needs_no_summary():
    assert ranks(*BOTH, "--rank", "2") == "rank 2: 3 (one of 1-7/2); also: 0, 1\n"


def test_a_merge_is_one_line():
    expected = "merge: 0, 1 (one of 0-6/2; one of 1-7/2); also: 2\n"
    assert ranks(*SRC) == expected


def test_the_document_has_what_the_lines_say():
    document = json.loads(ranks(*BOTH, "--rank", "2,3", "--json", "--files", FILES))
    assert document["ranks"][0] == {
        "rank": 2,
        "groups": [[1, 3, 5, 7]],
        "fetch": [3],
        "also": [0, 1],
    }
    assert (document["fetch"], document["also"]) == ([3], [0, 1])
    assert document["files"] == [FILES.replace("{rank}", str(rank)) for rank in (0, 1, 3)]
    (of_merge,) = json.loads(ranks(*SRC, "--json"))["ranks"]
    assert of_merge["rank"] is None


def test_files_are_lines_or_end_with_a_nul_byte():
    files = [f"obs://b/net/rank_{rank}/c.ckpt" for rank in (0, 1, 2)]
    pattern = "obs://b/net/rank_{rank}/c.ckpt"
    assert ranks(*BOTH, "--files", pattern, "-q").splitlines() == files
    assert ranks(*BOTH, "--files", pattern, "-0").split("\0") == [*files, ""]


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [
        ("obs://b/net/rank_{rank}/c", "obs://b/net"),
        ("/ckpt/net/rank_{rank}/c", "/ckpt/net/"),
        ("net/rank_{rank}/c", "net"),
        ("./rank_{rank}/c", "."),
    ],
)
def test_files_are_relative_to_a_folder(pattern, folder):
    lines = ranks(*BOTH, "--rank", "0", "--files", pattern, "--relative-to", folder)
    assert lines.splitlines() == ["rank_0/c", "rank_1/c", "rank_2/c"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-d", CASE / "dst_strategy.ckpt"], 2, "strategy ranks needs -s"),
        ([*SRC, "--rank", "0"], 2, "--rank is of the target A merge needs one set. Try: -d"),
        ([*SRC, "-0"], 2, "-0 is about the files to fetch Try: --files PATTERN"),
        ([*SRC, "--relative-to", "x"], 2, "--relative-to is about the files to fetch"),
        ([*SRC, "--files", "x"], 2, "'x' does not have {rank} in it Try: --files "),
        ([*BOTH, "--rank", "3-5"], 5, "ranks 4, 5 are not in the target, which has 4 ranks"),
        (
            [*SRC, "--files", "a/{rank}", "--relative-to", "b"],
            5,
            "the files are not below b a/0 Try: --relative-to with the folder above them",
        ),
    ],
)
def test_what_cannot_be_is_explained(words, code, said):
    result = run("strategy", "ranks", *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert said in message(result)


def test_a_run_with_the_named_files_alone_warns_of_nothing(tmp_path):
    """The outputs are those of all ranks; without the ranks of `also` there is a warning."""
    for file in ranks(*BOTH, "--rank", "2-3", "--files", FILES).splitlines():
        (tmp_path / "some" / file).parent.mkdir(parents=True)
        shutil.copy(CASE / "src" / file, tmp_path / "some" / file)
    words = [*BOTH, "--rank", "2-3", "--format", "ckpt", "-o"]
    run_well("reshard", CASE / "src", *words, tmp_path / "full")
    result = run_well("reshard", tmp_path / "some", *words, tmp_path / "part", "--strict")
    assert "warning" not in result.stderr
    for rank in (2, 3):
        name = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "full" / name).read_bytes()
    for rank in (0, 1):
        shutil.rmtree(tmp_path / "some" / f"rank_{rank}")
    result = run_well("reshard", tmp_path / "some", *words, tmp_path / "alone")
    assert "warning[hidden_shard]" in result.stderr
    assert "2 more ranks would show it: 0, 1" in result.stderr


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("src -s s.ckpt", "takes no path 1 path was given: src", "ckpttool strategy ranks --help"),
        ("src", "strategy ranks needs -s FILE", "ckpttool strategy ranks -s strategy.ckpt"),
        ("-s s.ckpt src x", "takes no path 2 paths were given: src, x", "ckpttool strategy ranks"),
        ("-d s.ckpt -s", "Option '-s' requires an argument", "ckpttool strategy ranks --help"),
        ("-s s.ckpt --ran 1", "strategy ranks has no --ran Did you mean --rank", "ckpttool"),
    ],
)
def test_paths_without_an_option_are_explained(tmp_path, monkeypatch, words, said, hint):
    monkeypatch.chdir(tmp_path)
    for name, there in (("s.ckpt", "src_strategy.ckpt"), ("d.ckpt", "dst_strategy.ckpt")):
        shutil.copy(CASE / there, name)
    (tmp_path / "src").symlink_to(CASE / "src")
    result = run("strategy", "ranks", *words.split())
    assert result.exit_code == 2
    assert said in message(result)
    assert f"Try: {hint}" in message(result)


@pytest.mark.parametrize("side", ["-s", "-d"])
def test_a_pattern_that_matches_nothing_has_a_note(tmp_path, side):
    text = 'ckpttool_strategy: 1\nranks: 8\nparameters:\n  "*.weight": {axis: 0}\n'
    text += '  "*.weigth": {axis: 1}\notherwise: replicated\n'
    (tmp_path / "hand.yaml").write_text(text, encoding="utf-8")
    given = {"-s": CASE / "src_strategy.ckpt", "-d": CASE / "dst_strategy.ckpt"}
    words = [word for both in {**given, side: tmp_path / "hand.yaml"}.items() for word in both]
    result = run_well("strategy", "ranks", *words)
    assert "note: " in result.stderr
    assert "*.weigth: no parameter matches" in message(result)
    (note,) = json.loads(ranks(*words, "--json"))["notes"]
    assert "*.weigth" in note["text"]


def test_any_rank_does_where_no_pattern_matches_and_the_rest_is_replicated(tmp_path):
    text = 'ckpttool_strategy: 1\nranks: 4\nparameters:\n  "nothing.*": {axis: 0}\n'
    (tmp_path / "hand.yaml").write_text(text + "otherwise: replicated\n", encoding="utf-8")
    words = ["-s", tmp_path / "hand.yaml", "-d", CASE / "dst_strategy.ckpt", "--rank", "1"]
    assert ranks(*words) == "rank 1: any rank\n"
    (tmp_path / "hand.yaml").write_text(text, encoding="utf-8")
    assert "no parameter in common" in message(run("strategy", "ranks", *words))


def test_a_run_that_lacks_ranks_names_the_command_that_lists_enough(tmp_path):
    (tmp_path / "one" / "rank_0").mkdir(parents=True)
    shutil.copy(CASE / "src" / "rank_0" / "checkpoint-2_10.ckpt", tmp_path / "one" / "rank_0")
    words = ["reshard", tmp_path / "one", *BOTH, "--format", "ckpt", "-o", tmp_path / "out"]
    result = run(*words, "--rank", "2")
    assert "some slices are on no rank" in message(result)
    assert message(result).endswith("which `ckpttool strategy ranks` lists")
    assert "strategy ranks" not in message(run(*words))  # all ranks are needed


W = Layout((4,), ((), ()))
NAMES = ("w", "adam_m.w", "adam_v.w")
HALVES = strategy_of(dict.fromkeys(NAMES, Layout((2,), ((0,), ()))))


@pytest.fixture
def hidden(tmp_path):
    """Four ranks whose strategy calls slices of an optimizer shard replicas, and a target."""
    entries = {name: noise(name, "Float32", (16, 8)) for name in NAMES}
    sharded = strategy_of(dict.fromkeys(NAMES, replace(W, optimizer_shard=4)))
    write_ranks(tmp_path / "run", cut(entries, sharded), "ckpt")
    ckpttool.write_strategy(strategy_of(dict.fromkeys(NAMES, W)), tmp_path / "s.ckpt")
    ckpttool.write_strategy(HALVES, tmp_path / "d.ckpt")
    return tmp_path


def reshard(folder, there, *words):
    """Reshard to target rank 0 with some ranks of ``folder``."""
    some = folder.with_name(f"only_{'_'.join(map(str, there))}")
    for rank in there:
        shutil.copytree(folder / f"rank_{rank}", some / f"rank_{rank}")
    strategies = ["-s", folder.with_name("s.ckpt"), "-d", folder.with_name("d.ckpt")]
    out = some.with_name(f"{some.name}_out")
    return run("reshard", some, *strategies, "--rank", "0", "-o", out, "--format", "ckpt", *words)


def test_a_hidden_optimizer_shard_is_never_silent(hidden):
    words = ["-s", hidden / "s.ckpt", "-d", hidden / "d.ckpt", "--rank", "0"]
    assert ranks(*words) == "rank 0: 0 (one of 0-3); also: 1\n"
    alone = reshard(hidden / "run", [0])
    assert alone.exit_code == 0
    assert "warning[hidden_shard]" in alone.stderr
    assert "one more rank would show it: 1" in alone.stderr
    assert reshard(hidden / "run", [3], "--strict").exit_code == 5
    both = reshard(hidden / "run", [0, 1])
    assert both.exit_code == 5
    assert "error[undecided_shard]" in both.stderr
    assert "error[missing]" in reshard(hidden / "run", [0, 2]).stderr  # it can only be a shard of 4


def test_a_set_that_ckpttool_wrote_with_this_strategy_hides_none(tmp_path):
    write_ranks(tmp_path / "whole", {0: {n: noise(n, "Float32", (16, 8)) for n in NAMES}}, "ckpt")
    ckpttool.write_strategy(strategy_of(dict.fromkeys(NAMES, W)), tmp_path / "s.ckpt")
    ckpttool.write_strategy(HALVES, tmp_path / "d.ckpt")
    words = ["-d", tmp_path / "s.ckpt", "-o", tmp_path / "run", "--format", "ckpt"]
    run_well("split", tmp_path / "whole", *words)
    assert "warning[hidden_shard]" in reshard(tmp_path / "run", [0]).stderr
    (tmp_path / "only_1").mkdir()
    shutil.copy(tmp_path / "run" / "ckpttool.json", tmp_path / "only_1")
    result = reshard(tmp_path / "run", [1])
    assert (result.exit_code, "warning" in result.stderr) == (0, False), result.stderr
