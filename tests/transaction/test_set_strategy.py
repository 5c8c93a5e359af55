"""Sets whose manifest says which strategy they were written for; nobody has to name it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.model.manifest import StrategyFile
from ckpttool.transaction.set_strategy import read_recorded
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.damage import flip_byte
from tests.support.manifests import MANIFEST, listing_of

CASES = {  # the target is one file, and a folder of a file for each stage
    "one file": ("tutorial_8_to_4_infer", "src_strategy.ckpt", "dst_strategy.ckpt"),
    "stages": ("samples/pp2", "strategy", "strategy"),
}


@pytest.fixture(params=CASES)
def made(request, tmp_path, monkeypatch):
    """A set ``runs/n`` that was written for ``runs/T``; with the source and its strategy."""
    case, src, dst = CASES[request.param]
    monkeypatch.chdir(tmp_path)
    place = GOLDEN / case
    checkpoint = place / ("ckpt" if request.param == "stages" else "src")
    runs = tmp_path / "runs"
    runs.mkdir()
    copy = shutil.copytree if (place / dst).is_dir() else shutil.copyfile
    copy(place / dst, runs / "T")
    run_well("merge", checkpoint, "-s", place / src, "-o", "m.ckpt", "-q")
    run_well("split", "m.ckpt", "-d", "runs/T", "-o", "runs/n", "-q")
    return tmp_path


def source_of(case: str) -> Path:
    return GOLDEN / case / "src_strategy.ckpt"


def edit(manifest: Path, change) -> None:
    document = json.loads(manifest.read_text())
    change(document)
    manifest.write_bytes(listing_of(document))


def forget_layouts(document) -> None:
    del document["layouts"]


def make_old(document) -> None:
    forget_layouts(document)
    for file in document["strategies"]:
        file["path"] = Path(file["path"]).name
        del file["role"]


def test_no_command_that_reads_a_set_asks_for_its_strategy(made):
    noted = "note: layouts from runs/n/ckpttool.json"
    assert noted in message(run_well("verify", "runs/n"))
    assert noted in message(run_well("inspect", "runs/n"))
    assert noted in message(run_well("explain", "runs/n"))
    assert noted in message(run_well("inspect", "runs/n", "--steps"))
    result = run_well("diff", "m.ckpt", "runs/n")
    assert "equal: A m.ckpt" in result.stdout
    assert "note: B: layouts from runs/n/ckpttool.json" in message(result)
    assert noted in message(run_well("merge", "runs/n", "-o", "again.ckpt"))
    run_well("diff", "m.ckpt", "again.ckpt")
    assert noted in message(run_well("reshard", "runs/n", "-d", "runs/T", "-o", "n2"))
    run_well("average", "runs/n", "n2", "-o", "mean.ckpt")
    with ckpttool.open("runs/n") as first, ckpttool.open(ckpttool.scan("n2")) as two:
        assert first.keys() == two.keys()


def test_a_strategy_is_known_by_its_contents_wherever_it_is(made):
    runs = made / "runs"
    edit(runs / "n" / MANIFEST, forget_layouts)
    for files in sorted(runs.glob("T/*")) or [runs / "T"]:  # beside the set, with other names
        files.rename(runs / f"of-the-run-{files.name}")
    assert read_recorded(runs / "n").named.find() == tuple(
        str(path) for path in sorted(runs.glob("of-the-run-*"))
    )
    run_well("verify", "runs/n")
    (made / "elsewhere" / "deep").mkdir(parents=True)  # one folder up
    (runs / "n").rename(made / "elsewhere" / "deep" / "n")
    for path in runs.glob("of-the-run-*"):
        path.rename(made / "elsewhere" / path.name)
    run_well("verify", "elsewhere/deep/n")
    for path in (made / "elsewhere").glob("of-the-run-*"):  # among the rank folders
        path.rename(made / "elsewhere" / "deep" / "n" / f"x{path.name}")
    run_well("verify", "elsewhere/deep/n")


def test_a_file_of_the_right_name_and_other_contents_is_not_taken(made):
    edit(made / "runs" / "n" / MANIFEST, forget_layouts)
    for path in sorted((made / "runs").glob("T/*")) or [made / "runs" / "T"]:
        flip_byte(path, path.stat().st_size // 2)
    result = run("merge", "runs/n", "-o", "x.h5")
    assert result.exit_code == 2
    names = {path.name for path in (made / "runs").glob("T/*")} or {"T"}
    said = message(result)
    assert any(f"written for {name}" in said for name in names)
    assert "which was not found" in said
    assert "-s STRATEGY" in said.partition("Try: ")[2]
    assert "without a strategy" in message(run_well("verify", "runs/n"))


def test_an_old_manifest_is_read_and_asks_if_the_role_is_not_certain(made):
    edit(made / "runs" / "n" / MANIFEST, make_old)
    files = json.loads((made / "runs" / "n" / MANIFEST).read_text())["strategies"]
    named = read_recorded(made / "runs" / "n").named
    assert named.unclear == (() if len(files) == 1 else tuple(StrategyFile(**s) for s in files))
    if len(files) == 1:
        run_well("merge", "runs/n", "-o", "x.h5")
        return
    result = run("merge", "runs/n", "-o", "x.h5")
    assert result.exit_code == 2
    assert "does not say which of its strategies is that of the outputs" in message(result)
    run_well("merge", "runs/n", "-s", "runs/T", "-o", "x.h5")


@pytest.mark.parametrize(
    ("case", "other"),
    [("tutorial_8_to_4_infer", "src_strategy.ckpt"), ("reshard_8_to_6", "src_strategy.ckpt")],
)
def test_another_strategy_is_one_error_that_says_so(tmp_path, monkeypatch, case, other):
    monkeypatch.chdir(tmp_path)
    for name in ("src_strategy.ckpt", "dst_strategy.ckpt"):
        shutil.copyfile(GOLDEN / case / name, name)
    src = GOLDEN / case / "src"
    run_well("reshard", src, "-s", other, "-d", "dst_strategy.ckpt", "-o", "set")
    said = f"{other} is not the strategy of set, which was written for dst_strategy.ckpt"
    for words in (["merge", "set", "-o", "x.h5"], ["explain", "set"], ["inspect", "set"]):
        result = run(*words, "-s", other)
        assert result.exit_code == 5
        assert f"error[strategy]: {said}" in message(result)
        assert message(result).count("error[") == 1
        assert "Try: the same command without -s" in message(result)
    result = run("verify", "set", "-s", other)
    assert (result.exit_code, result.stdout.count("error[")) == (1, 1)
    assert said in " ".join(result.stdout.split())
    result = run("diff", src, "set", "-s", other, "--b-strategy", other)
    assert f"error[strategy]: B: {said}" in message(result)
    assert "Try: the same command without --b-strategy" in message(result)
    edit(Path("set", MANIFEST), forget_layouts)
    assert "Try: -s dst_strategy.ckpt" in message(run("merge", "set", "-s", other, "-o", "x.h5"))
    Path("dst_strategy.ckpt").unlink()  # nothing to propose but another one
    assert "Try: -s STRATEGY; " in message(run("merge", "set", "-s", other, "-o", "x.h5"))
    result = run("diff", src, "set", "-s", other)
    assert "Try: --b-strategy STRATEGY; " in message(result)


@pytest.mark.parametrize("case", ["reshard_4_to_8", "seed001_fc_4_to_2"])
def test_another_strategy_that_shards_otherwise_is_an_error(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(GOLDEN / case / "dst_strategy.ckpt", "D.ckpt")
    run_well("reshard", GOLDEN / case / "src", "-s", source_of(case), "-d", "D.ckpt", "-o", "set")
    known = ckpttool.read_strategy("D.ckpt")
    layouts = {
        name: (replace(layout, tensor_map=layout.tensor_map[::-1]),)
        for name, (layout,) in known.layouts.items()
    }
    changed = replace(known, layouts=layouts)
    ckpttool.write_strategy(changed, "other.ckpt")
    for words in (["merge", "set", "-o", "x.h5"], ["explain", "set"], ["inspect", "set"]):
        result = run(*words, "-s", "other.ckpt")
        assert result.exit_code == 5, words
        assert "error[strategy]: other.ckpt is not the strategy of set, which was" in message(
            result
        )
        assert "it shards" in message(result)
    assert run("verify", "set", "-s", "other.ckpt").exit_code == 1
    with pytest.raises(ckpttool.PlanError, match="not the strategy of set"):
        ckpttool.open("set", "other.ckpt")
    merge = ["merge", "set", "-s", "other.ckpt", "-o", "x.h5"]
    assert "error[strategy]: other.ckpt" not in message(run(*merge, "--ignore-manifest"))
    Path("D.ckpt").unlink()
    assert "it shards" in message(run(*merge))
    edit(Path("set", MANIFEST), forget_layouts)  # nothing to compare it with
    assert "it shards" not in message(run(*merge))


@pytest.mark.parametrize("case", ["tutorial_8_to_4_infer", "reshard_8_to_6"])
def test_a_strategy_of_source_and_target_is_not_missed_as_that_of_the_source(
    tmp_path, monkeypatch, case
):
    monkeypatch.chdir(tmp_path)
    place = GOLDEN / case
    words = ["reshard", place / "src", "-s", source_of(case), "-o", "n", "-d"]
    run_well(*words, source_of(case))
    said = message(run(*words, place / "dst_strategy.ckpt"))
    assert "target dst_strategy.ckpt in place of src_strategy.ckpt" in said
    assert "no strategy" not in said
