"""MindSpore's per-rank files of seven small training runs, and single files of every kind."""

from __future__ import annotations

import shutil

import pytest

from tests.support import corpus
from tests.support.commands import SUFFIXES, mentions, message, run, run_well
from tests.support.corpus import SAMPLES, assert_merged
from tests.support.readers import read

RUNS = ["mp2_dp4", "mp2_dp4_opt_all", "multiaxis", "pp2", "pp2_opt", "pp2_shared"]
PIPELINES = ["pp2", "pp2_opt", "pp2_shared"]


def strategies(name, form, folder):
    """The words that give the strategy of a run in one of its forms."""
    files = SAMPLES / name / "strategy"
    if form.startswith("merged"):
        return ["-s", files / form]
    if form == "folder":  # of every rank
        folder.mkdir()
        for path in files.glob("strategy_*.ckpt"):
            shutil.copyfile(path, folder / path.name)
        return ["-s", folder]
    stages = ["strategy_0"] + ["strategy_4"] * (name in PIPELINES)
    return [word for one in stages for word in ("-s", files / f"{one}.{form}")]


FORMS = [(name, form) for name in RUNS for form in ("ckpt", "folder")]
FORMS += [(name, "json") for name in RUNS if name != "multiaxis"]
FORMS += [(name, form) for name in PIPELINES for form in ("merged.ckpt", "merged.json")]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_merge_gives_the_full_tensors_of_a_run_by_each_form_of_its_strategy(name, form, tmp_path):
    out = tmp_path / "full.ckpt"
    source = SAMPLES / name / ("safetensors" if form == "folder" else "ckpt")
    run_well("merge", source, "-o", out, *strategies(name, form, tmp_path / "strategy"))
    assert_merged(out, name)


@pytest.mark.parametrize("strategy", ["strategy_0.ckpt", "strategy_0.json"])
@pytest.mark.parametrize("source", ["ckpt", "safetensors"])
def test_merge_finds_the_optimizer_shard_the_strategy_hides(source, strategy, tmp_path):
    out = tmp_path / "full.ckpt"
    run = SAMPLES / "opt_aggregated"
    result = run_well("merge", run / source, "-o", out, "-s", run / "strategy" / strategy)
    assert_merged(out, "opt_aggregated")
    assert not mentions(message(result), "6 parameters", "strategy")


# ------------------------------------------------------------------------------- single files

READABLE = [
    *("append.ckpt", "complex_mindspore_cannot_load.ckpt", "crc.ckpt", "crc.safetensors"),
    *("dtypes.ckpt", "dtypes.safetensors", "legacy_1.0.0.ckpt", "legacy_2.0.0.ckpt", "plain.ckpt"),
]


@pytest.mark.parametrize("output_format", SUFFIXES)
@pytest.mark.parametrize("name", READABLE)
def test_a_single_file_of_full_tensors_goes_into_every_format(name, output_format, tmp_path):
    source = SAMPLES / "files" / name
    want = {tensor: corpus.modern_scalar(entry) for tensor, entry in read(source).items()}
    out = tmp_path / f"full{SUFFIXES[output_format]}"
    result = run("merge", source, "-o", out, "--format", output_format)
    if output_format == "safetensors" and any(entry.dtype == "str" for entry in want.values()):
        assert result.exit_code == 5, result.output
        assert not mentions(message(result), "note", "str")
    else:
        assert result.exit_code == 0, result.output
        assert read(out) == want
