"""Names of rank files (``--name``), and what MindFormers resumes from (``--mindformers``)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.support.checkpoints import noise, write_file
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.executors import files_below

CASE = GOLDEN / "reshard_8_to_4"
TARGET = ["-d", CASE / "dst_strategy.ckpt", "-o", "out"]
RESHARD = ["reshard", CASE / "src", "-s", CASE / "src_strategy.ckpt", *TARGET]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def resumed(folder: Path) -> list[str]:
    """Return the file of each rank as MindFormers 1.x looks it up; see `planning.naming`."""
    ranks = range(len([*folder.glob("rank_*")]))
    found = [json.loads((folder / f"rank_{r}" / "meta.json").read_bytes()) for r in ranks]
    epoch, step = min((one["last_epoch"], one["last_step"]) for one in found)
    name = next(one["last_ckpt_file"] for one in found if one["last_step"] == step)
    number = re.search(r"_rank_(\d+)", name)[1]
    prefix, suffix = name[: name.rindex("-")], name.rpartition(".")[2]
    return [
        f"rank_{r}/{prefix.replace(f'_rank_{number}', f'_rank_{r}')}-{epoch}_{step}.{suffix}"
        for r in ranks
    ]


def source(names: str, ranks: int = 2, step: str = "") -> Path:
    """Write a checkpoint of rows whose files have such names."""
    whole = noise("w", "Float32", (4, 2))
    rows = 4 // ranks
    for rank in range(ranks):
        entries = {"w": whole.excerpt(slice(rank * rows, rank * rows + rows))}
        path = Path("src", f"rank_{rank}", names.format(rank=rank))
        write_file(path, entries, path.suffix.lstrip("."))
    strategy = {"ckpttool_strategy": 1, "ranks": ranks, "parameters": {"w": {"axis": 0}}}
    Path("s.yaml").write_text(json.dumps(strategy))
    return Path("src")


@pytest.mark.parametrize(
    ("names", "model", "step"),
    [
        ("llama_7b_rank_{rank}-3_10.ckpt", "llama_7b", "3_10"),
        ("net_{rank}-1_2.safetensors", "net", "1_2"),
        ("pangu-rank-{rank}-12_7.ckpt", "pangu", "12_7"),
        ("checkpoint-2_10.ckpt", "checkpoint", "2_10"),
        ("gpt_2_rank_{rank}_1-3_10.ckpt", "gpt_2", "3_10"),
    ],
)
@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_mindformers_finds_a_file_of_each_rank(names, model, step, format):
    words = [source(names), "-s", "s.yaml", "-d", "s.yaml", "-o", "out", "--format", format]
    document = json.loads(run_well("reshard", *words, "--mindformers", "--json").stdout)
    wanted = [f"rank_{rank}/{model}_rank_{rank}-{step}.{format}" for rank in range(2)]
    assert resumed(Path("out")) == wanted
    assert document["meta"] == [f"out/rank_{rank}/meta.json" for rank in range(2)]
    assert [one["path"] for one in document["outputs"]] == [f"out/{path}" for path in wanted]
    manifest = json.loads(Path("out/ckpttool.json").read_text())
    assert [one["path"] for one in manifest["outputs"]] == wanted
    run_well("verify", "out", "-s", "s.yaml", "--deep", "--check-manifest")
    run_well("diff", "src", "out", "-s", "s.yaml", "--b-strategy", "s.yaml")


@pytest.mark.parametrize("merged", ["llama.h5", "a b-rank.safetensors"])
def test_a_merged_checkpoint_of_ours_keeps_its_step(merged):
    run_well("merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", merged)
    run_well("split", merged, *TARGET, "--name", "{model}_of_{rank}-{step}", "--format", "ckpt")
    stem = Path(merged).stem
    assert f"rank_3/{stem}_of_3-2_10.ckpt" in files_below(Path("out"))
    # The folder is a source like any other.
    run_well("merge", "out", "-s", CASE / "dst_strategy.ckpt", "-o", "again.h5")
    run_well("diff", merged, "again.h5")


@pytest.mark.parametrize("name", ["net_rank_{rank}-7_70", "{rank}", "x.{rank}.y", "{model}{rank}z"])
def test_parts_resuming_and_finalize_know_the_names(name):
    words = [*RESHARD, "--format", "ckpt", "--name", name]
    words += ["--mindformers"] * ("-7_70" in name)
    run_well(*words, "--part", "1/2")
    assert not [*Path("out").rglob("meta.json")]
    run_well(*words, "--part", "2/2")
    assert "complete: 4 files" in message(run_well("finalize", "out"))
    before = files_below(Path("out"))
    assert "4 kept, 0 written" in message(run_well(*words, "--resume"))
    Path("out", next(path for path in before if path.startswith("rank_1"))).unlink()
    run_well(*words, "--resume")
    assert files_below(Path("out")) == before
    assert len([*Path("out").rglob("meta.json")]) == 4 * ("-7_70" in name)
    run_well("verify", "out", "-s", CASE / "dst_strategy.ckpt", "--deep")
    assert run(*RESHARD, "--format", "ckpt", "--resume").exit_code == 5  # of other names


@pytest.mark.parametrize(
    ("words", "code", "said", "remedy"),
    [
        (["--name", "{modle}_{rank}"], 2, "unknown field {modle}", ["--name", "{model}_{rank}"]),
        (["--name", "{epoch}-{rank}"], 2, "Fields: {model}, {rank}, {step}", None),
        (["--name", "{rank!r}"], 2, "formats {rank}", None),
        (["--name", "{rank:03}"], 2, "formats {rank}", None),
        (["--name", "a}{rank}"], 2, "a brace too many", None),
        (["--name", "net-{step}"], 2, "gives all ranks one name", None),
        (["--name", "{{rank}}"], 2, "gives all ranks one name", None),
        (["--name", "a/{rank}"], 2, "has a / in it", ["--name", "{rank}"]),
        (["--name", "../{rank}/x"], 2, "has a / in it", None),
        (["--name", ".{rank}"], 2, "begins with a dot", ["--name", "{rank}"]),
        (["--name", "n{rank}.h5"], 5, "ends like a file of hdf5", ["--name", "n{rank}"]),
        (["--name", "n{rank}.ckpt"], 5, "ends like a file of ckpt", ["--name", "n{rank}"]),
        (["--name", "a-{step}{rank}"], 5, "ranks are of different steps", None),
        (["--name", "{rank}", "--prefix", "b_"], 2, "--prefix does not go with --name", []),
        (["--mindformers", "--format", "hdf5"], 5, "does not read hdf5", ["--mindformers"]),
        (["--mindformers", "--prefix", "b_", "--format", "ckpt"], 2, "not go with --mindf", []),
        *(
            (["--mindformers", "--format", "ckpt", "--name", name], 5, "does not find files", None)
            for name in ("{model}_{rank}-{step}", "m_rank_1_rank_{rank}-{step}", "m_rank_{rank}")
        ),
    ],
)
def test_a_name_that_cannot_be_is_refused_before_the_first_byte(words, code, said, remedy):
    result = run(*RESHARD, *words)
    assert (result.exit_code, said in message(result)) == (code, True), message(result)
    assert not Path("out").exists()
    if remedy is not None:
        run_well(*RESHARD, *remedy)


@pytest.mark.parametrize(
    ("names", "more", "unknown", "hint"),
    [
        ("net.ckpt", [], "{step}", "--name 'net_rank_{rank}-1_1000'"),
        ("{rank}-1_5.ckpt", [], "{model}", "--name 'llama_rank_{rank}-1_5'"),
        ("{rank}.ckpt", ["--name", "{model}.{rank}"], "{model}", "--name 'llama.{rank}'"),
    ],
)
def test_what_the_source_does_not_tell_is_typed_in_place_of_the_field(names, more, unknown, hint):
    words = ["reshard", source(names), "-s", "s.yaml", "-d", "s.yaml", "-o", "out"]
    words += ["--format", "ckpt", "--mindformers"]
    result = run(*words, *more)
    assert result.exit_code == 5
    said = f"src: the source does not tell {unknown} Try: {hint}, if these are the values"
    assert said in message(result)
    if not more:
        run_well(*words, *re.sub("'", "", hint).split())
        assert len(resumed(Path("out"))) == 2


@pytest.mark.parametrize("name", ["net_rank_{rank}-7_70", "{rank}of4-1_1"])
def test_files_of_ranks_that_a_smaller_set_lacks_are_named(name):
    run_well(*RESHARD, "--format", "ckpt", "--name", name)
    two = ["--rank", "0-1", "--overwrite", "--format", "ckpt", "--name", name]
    shutil.rmtree("out/.ckpttool")
    assert "2 files of another run out/rank_2/" in message(run_well(*RESHARD, *two))
