"""The yardstick itself: every case of it runs, in every round."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "scripts" / "bench.py"
pytestmark = pytest.mark.big


def bench(folder, *words):
    """Return the document of a run on small models."""
    words = [*words, "--warm", "--work", folder, "--json", folder / "bench.json"]
    command = [sys.executable, BENCH, *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "bench.json").read_text())


def test_every_case_runs_in_every_round(tmp_path):
    words = ["--sizes", "0.01", "--rounds", "2", "--groups", "copy"]
    document = bench(tmp_path, *words, "--svg", tmp_path / "bench.svg")
    cases = [summary["case"] for summary in document["summaries"]]
    assert {"cp -r", "merge, .h5", "merge, .ckpt", "inspect"} < set(cases)
    assert len(document["runs"]) == 2 * len(cases)
    assert all(run["seconds"] > 0 and run["peak_bytes"] > 0 for run in document["runs"])
    assert (tmp_path / "bench.svg").read_text().startswith("<svg")


def test_the_cases_of_casts_run_and_are_compared_with_the_merge(tmp_path):
    summaries = bench(tmp_path, "--sizes", "0.01", "--rounds", "1", "--groups", "cast")["summaries"]
    few, plain, *casts = (summary["case"] for summary in summaries)
    assert (few, plain) == ("merge of weights alone", "merge with states")
    assert "merge --weights-only --dtype bf16" in casts
    assert all(summary["ratio"] > 0 and summary["read_ratio"] > 0 for summary in summaries[2:])


def test_the_average_of_four_is_compared_with_the_merge_of_one(tmp_path):
    document = bench(tmp_path, "--sizes", "0.01", "--rounds", "1", "--groups", "average")
    ratios = {summary["case"]: summary["read_ratio"] for summary in document["summaries"]}
    assert ratios.pop("merge of one") is ratios.pop("merge of one --weights-only") is None
    assert [*ratios] == ["average of 4", "average of 4 --weights-only"]
    assert all(ratio > 0 for ratio in ratios.values())


def test_another_installation_runs_each_case_of_many_small_things_in_turn(tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nPYTHONPATH={BENCH.parent.parent} exec {sys.executable} "$@"\n')
    other.chmod(0o755)
    words = ["--groups", "many", "--rounds", "2", "--many-tensors", "20", "--many-outputs", "8"]
    document = bench(tmp_path, *words, "--other", other)
    ratios = {summary["case"]: summary["other_ratio"] for summary in document["summaries"]}
    cases = [name for name in ratios if not name.endswith(", other")]
    assert cases == [
        "cp -r",
        "merge, 8 ranks x 20 tensors",
        "reshard, 8 -> 6 ranks x 4 tensors",
        "reshard, 8 -> 8 ranks",
        "look, finished set of 8",
        "look, stopped set of 8",
        "resume, finished set of 8",
    ]
    twins = [name for name in ratios if name not in cases]
    assert {*twins} == {f"{name}, other" for name in cases[1:]}
    assert all(ratios[name] is None for name in ("cp -r", *twins))
    assert all(ratios[name.removesuffix(", other")] > 0 for name in twins)
    assert [run["case"] for run in document["runs"]] == [*ratios] * 2
