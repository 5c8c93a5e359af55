"""The jobs of merge, split and reshard: the formats and names of their outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckpttool
from ckpttool.operations.jobs import choose_format
from tests.support.checkpoints import noise, write_file
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.plans import plan_merge
from tests.support.readers import read

SOURCE = SAMPLES / "files" / "crc.ckpt"
CASE = GOLDEN / "safetensors_pipeline"
SRC = [CASE / "src", "-s", CASE / "src_strategy.ckpt"]


@pytest.mark.parametrize("name", ["m.ckpt", "m.safetensors", "m.h5"])
def test_a_file_has_the_format_that_its_ending_promises(name, tmp_path):
    path = str(tmp_path / name)
    ckpttool.execute(*plan_merge(ckpttool.scan(str(SOURCE)), None, path))
    read_back = ckpttool.scan(path)
    assert read_back.files[0].format == {"h5": "hdf5"}.get(name[2:], name[2:])
    assert read(Path(path)).keys() == read(SOURCE).keys()


@pytest.mark.parametrize(
    ("path", "asked", "chosen"),
    [
        ("m.ckpt", "ckpt", "ckpt"),
        ("m", None, "hdf5"),
        ("m", "safetensors", "safetensors"),
        ("step_1.5", None, "hdf5"),
        ("m.weights", "hdf5", "hdf5"),
    ],
)
def test_what_is_asked_for_counts_where_the_name_promises_nothing(path, asked, chosen):
    assert choose_format(path, ckpttool.OutputOptions(asked)) == chosen


@pytest.mark.parametrize(
    ("path", "how", "reason"),
    [
        (
            "m.ckpt",
            {"format": "hdf5"},
            r"is that of ckpt, but the format is hdf5\n.*m\.h5, or no --format",
        ),
        ("m.pth", {}, r"the suffix is not that of a format\n  Try: a name that ends in"),
        (
            "m.safetensors",
            {"max_shard_bytes": 1000},
            r"the name is that of a file\n  Try: -o .*/m$",
        ),
    ],
)
def test_a_name_that_promises_another_format_is_refused(path, how, reason, tmp_path):
    with pytest.raises(ckpttool.PlanError, match=reason):
        plan_merge(
            ckpttool.scan(str(SOURCE)),
            None,
            str(tmp_path / path),
            output_options=ckpttool.OutputOptions(**how),
        )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ([], {}),
        (["--dtype", "fp32"], {"dtype": "float32", "torch_dtype": "float32"}),
        (["--pad-vocab", "multiple:48"], {"vocab_size": 96}),
        (["--cut-vocab", "10"], {"vocab_size": 10}),
        (["--max-shard-size", "1KB"], {}),
    ],
)
def test_a_folder_of_hugging_face_keeps_what_lies_beside_the_weights(words, changed, tmp_path):
    config = {"dtype": "bfloat16", "torch_dtype": "bfloat16", "vocab_size": 64, "é": [1]}
    source, out = tmp_path / "hf", tmp_path / "out"
    write_file(
        source / "model.safetensors",
        {"model.embed_tokens.weight": noise("w", "BFloat16", (64, 8))},
        "safetensors",
    )
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (source / "tokenizer.json").write_bytes(b"as it is")
    (source / "notes.txt").write_bytes(b"of somebody")
    for command in ("merge", "convert"):
        run_well(command, source, "-o", out, "--overwrite", *words)
        assert json.loads((out / "config.json").read_bytes()) == config | changed
        assert (out / "tokenizer.json").read_bytes() == b"as it is"
        assert not (out / "notes.txt").exists()
    run_well("merge", source, "-o", tmp_path / "one.safetensors")
    assert not (tmp_path / "config.json").exists()


def test_a_configuration_that_is_no_json_is_named(tmp_path):
    write_file(tmp_path / "model.safetensors", {"w": noise("w", "BFloat16", (4,))}, "safetensors")
    (tmp_path / "config.json").write_bytes(b"{")
    result = run("merge", tmp_path, "-o", tmp_path.parent / "out")
    assert result.exit_code == 3
    assert "config.json" in message(result)
