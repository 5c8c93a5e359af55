"""The yardstick itself: every case of it runs, in every round."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench.py"
pytestmark = pytest.mark.big


def test_every_case_runs_in_every_round(tmp_path):
    words = ["--sizes", "0.01", "--rounds", "2", "--groups", "copy", "--warm", "--work", tmp_path]
    words += ["--json", tmp_path / "bench.json", "--svg", tmp_path / "bench.svg"]
    command = [sys.executable, BENCH, *words]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "bench.json").read_text())
    cases = [summary["case"] for summary in document["summaries"]]
    assert {"cp -r", "merge, .h5", "merge, .ckpt", "inspect"} < set(cases)
    assert len(document["runs"]) == 2 * len(cases)
    assert all(run["seconds"] > 0 and run["peak_bytes"] > 0 for run in document["runs"])
    assert (tmp_path / "bench.svg").read_text().startswith("<svg")


def test_the_cases_of_casts_run_and_are_compared_with_the_merge(tmp_path):
    words = ["--sizes", "0.01", "--rounds", "1", "--groups", "cast", "--warm", "--work", tmp_path]
    command = [sys.executable, BENCH, *words, "--json", tmp_path / "bench.json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = json.loads((tmp_path / "bench.json").read_text())["summaries"]
    few, plain, *others = (one["case"] for one in summaries)
    assert (few, plain) == ("merge of weights alone", "merge with states")
    assert "merge --weights-only --dtype bf16" in others
    assert all(one["ratio"] > 0 and one["read_ratio"] > 0 for one in summaries[2:])


def test_the_average_of_four_is_compared_with_the_merge_of_one(tmp_path):
    words = ["--sizes", "0.01", "--rounds", "1", "--groups", "average", "--warm"]
    command = [sys.executable, BENCH, *words, "--work", tmp_path, "--json", tmp_path / "bench.json"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = json.loads((tmp_path / "bench.json").read_text())["summaries"]
    ratios = {one["case"]: one["read_ratio"] for one in summaries}
    assert ratios.pop("merge of one") is ratios.pop("merge of one --weights-only") is None
    assert [*ratios] == ["average of 4", "average of 4 --weights-only"]
    assert all(ratio > 0 for ratio in ratios.values())


def test_the_cases_of_many_small_things_run(tmp_path):
    words = ["--groups", "many", "--rounds", "1", "--many-tensors", "20", "--many-outputs", "16"]
    words += ["--warm", "--work", str(tmp_path), "--json", str(tmp_path / "bench.json")]
    done = subprocess.run([sys.executable, str(BENCH), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [one["case"] for one in json.loads((tmp_path / "bench.json").read_text())["summaries"]]
    assert cases == [
        "cp -r",
        "merge, 8 ranks x 20 tensors",
        "reshard, 8 -> 6 ranks x 4 tensors",
        "reshard, 8 -> 16 ranks",
        "look, finished set of 16",
        "look, stopped set of 16",
        "resume, finished set of 16",
    ]


def test_another_installation_runs_each_case_in_turn(tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nPYTHONPATH={BENCH.parent.parent} exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    words = ["--groups", "many", "--rounds", "2", "--many-tensors", "20", "--many-outputs", "8"]
    words += ["--warm", "--work", str(tmp_path), "--other", str(other)]
    words += ["--json", str(tmp_path / "bench.json")]
    done = subprocess.run([sys.executable, str(BENCH), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "bench.json").read_text())
    ratios = {one["case"]: one["other_ratio"] for one in document["summaries"]}
    twins = [name for name in ratios if name.endswith(", other")]
    assert len(twins) == len(ratios) - len(twins) - 1 == 6
    assert all(ratios[name] is None for name in ("cp -r", *twins))
    assert all(ratios[name.removesuffix(", other")] > 0 for name in twins)
    assert [run["case"] for run in document["runs"]] == [*ratios] * 2
