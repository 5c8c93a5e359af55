"""MindSpore's per-rank files of seven small training runs, and single files of every kind."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support import corpus
from tests.support.commands import SUFFIXES, files_below, mentions, message, run, run_well
from tests.support.corpus import SAMPLES, assert_merged
from tests.support.readers import read

RUNS = ["mp2_dp4", "mp2_dp4_opt_all", "multiaxis", "pp2", "pp2_opt", "pp2_shared"]
PIPELINES = ["pp2", "pp2_opt", "pp2_shared"]


@pytest.mark.parametrize("source", ["ckpt", "safetensors"])
@pytest.mark.parametrize("name", RUNS)
def test_merge_gives_the_full_tensors_of_a_run(name, source, tmp_path):
    stages = ["strategy_0.ckpt"] + ["strategy_4.ckpt"] * (name in PIPELINES)
    words = [word for file in stages for word in ("-s", SAMPLES / name / "strategy" / file)]
    out = tmp_path / "full.h5"
    run_well("merge", SAMPLES / name / source, "-o", out, *words)
    assert_merged(out, name)


@pytest.mark.parametrize("name", PIPELINES)
def test_merge_takes_the_merged_strategy_of_a_pipeline(name, tmp_path):
    out = tmp_path / "full.ckpt"
    path = SAMPLES / name / "strategy" / "merged.ckpt"
    run_well("merge", SAMPLES / name / "ckpt", "-o", out, "-s", path, "--format", "ckpt")
    assert_merged(out, name)


@pytest.mark.parametrize("name", PIPELINES)
def test_merge_takes_the_merged_json_strategy_of_a_pipeline(name, tmp_path):
    out = tmp_path / "full.ckpt"
    path = SAMPLES / name / "strategy" / "merged.json"
    run_well("merge", SAMPLES / name / "ckpt", "-o", out, "-s", path, "--format", "ckpt")
    assert_merged(out, name)


@pytest.mark.parametrize("name", RUNS)
def test_merge_takes_a_folder_with_the_strategy_of_every_rank(name, tmp_path):
    folder = tmp_path / "strategy"
    folder.mkdir()
    for path in (SAMPLES / name / "strategy").glob("strategy_*.ckpt"):
        shutil.copyfile(path, folder / path.name)
    out = tmp_path / "full.ckpt"
    run_well("merge", SAMPLES / name / "ckpt", "-o", out, "-s", folder, "--format", "ckpt")
    assert_merged(out, name)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "multiaxis"])
def test_merge_takes_json_strategies(name, tmp_path):
    files = sorted((SAMPLES / name / "strategy").glob("strategy_*.json"))
    words = [word for path in files for word in ("-s", path)]
    out = tmp_path / "full.ckpt"
    run_well("merge", SAMPLES / name / "ckpt", "-o", out, "--format", "ckpt", *words)
    assert_merged(out, name)


@pytest.mark.parametrize("strategy", ["strategy_0.ckpt", "strategy_0.json"])
@pytest.mark.parametrize("source", ["ckpt", "safetensors"])
def test_merge_finds_the_optimizer_shard_the_strategy_hides(source, strategy, tmp_path):
    """The JSON form tells by its full shapes, the protobuf form by replicas that are none."""
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
ENCRYPTED = [
    *("aes_cbc128.ckpt", "aes_gcm128.ckpt", "aes_gcm256.ckpt", "sm4_cbc.ckpt"),
    *("legacy_2.0.0_gcm.ckpt", "enc_and_crc_unreadable.ckpt"),
]
UNREADABLE = {
    "truncated.ckpt": ("truncated.ckpt", "cut short|ends|past the end|truncated"),
}
OTHERS = {
    "net-graph.meta": (
        "graph",
        (
            "net-graph.meta: a graph that MindSpore dumped, not a MindSpore checkpoint "
            "Try: the checkpoint as SRC: a folder, or a .ckpt, .safetensors or .h5 file"
        ),
    ),
    "group_info.pb": (
        "group_info",
        (
            "group_info.pb: group information, not a MindSpore checkpoint "
            "Try: the checkpoint as SRC; `ckpttool inspect .*group_info.pb` shows this file"
        ),
    ),
}


def tensors_of(document):
    """``{name: (dtype, shape)}`` of an inspect document of a single file."""
    return {
        tensor["name"]: (tensor["dtype"], tuple(tensor["shape"])) for tensor in document["tensors"]
    }


@pytest.mark.parametrize("name", READABLE)
def test_inspect_lists_the_tensors_of_a_file(name):
    result = run_well("inspect", SAMPLES / "files" / name, "--json")
    want = {}
    for tensor, entry in read(SAMPLES / "files" / name).items():
        shape = () if entry.dtype == "str" else corpus.modern_scalar(entry).shape
        want[tensor] = entry.dtype, shape
    assert tensors_of(json.loads(result.output)) == want


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


@pytest.mark.parametrize("name", ENCRYPTED)
@pytest.mark.parametrize("command", ["inspect", "merge"])
def test_an_encrypted_file_is_called_encrypted(command, name, tmp_path):
    out = ["-o", tmp_path / "out.h5"] if command == "merge" else []
    result = run(command, SAMPLES / "files" / name, *out)
    assert result.exit_code == 3, result.output
    assert not mentions(message(result), name, "encrypted")
    assert not files_below(tmp_path)


@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("command", ["inspect", "merge"])
def test_a_file_that_is_no_whole_checkpoint_is_refused(command, name, tmp_path):
    out = ["-o", tmp_path / "out.h5"] if command == "merge" else []
    result = run(command, SAMPLES / "files" / name, *out)
    assert result.exit_code == 3, result.output
    assert not mentions(message(result), *UNREADABLE[name])
    assert not files_below(tmp_path)


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_of_another_kind_is_shown_and_never_merged(name, tmp_path):
    kind, reason = OTHERS[name]
    document = json.loads(run_well("inspect", SAMPLES / "files" / name, "--json").stdout)
    assert (document["kind"], document["schema"]) == (kind, 1)
    for path in (name, "a.ckpt"):  # whatever it is called
        shutil.copyfile(SAMPLES / "files" / name, tmp_path / path)
        result = run("merge", tmp_path / path, "-o", tmp_path / "out.h5")
        assert result.exit_code == 3, result.output
        assert not mentions(message(result), reason.replace(name, path))


def test_a_file_of_no_bytes_is_an_empty_listing_or_an_error():
    result = run("inspect", SAMPLES / "files" / "empty.ckpt", "--json")
    if result.exit_code == 0:
        assert tensors_of(json.loads(result.output)) == {}
    else:
        assert result.exit_code == 3
        assert not mentions(message(result), "empty")
