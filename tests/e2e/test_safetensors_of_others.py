"""Safetensors that other programs wrote: what is not what it looks like, and their metadata."""

from __future__ import annotations

import json

import pytest

from tests.support.commands import message, run, run_well
from tests.support.file_bytes import entry, safetensors

HEADER = {"w": entry("F32", [2, 3], 0, 24), "b": entry("F32", [3], 24, 36)}
SLICE = "slices of one rank, written by torch's distributed checkpoint"
ENCRYPTED = "encrypted by cryptotensors"


def offsets(w, b, separators=None):
    """Return the metadata of torch's distributed checkpoint."""
    places = {"w": {"saved_offsets": w}, "b": {"saved_offsets": b}}
    text = json.dumps(places, separators=separators)
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": text}


def write(path, metadata):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors({**HEADER, "__metadata__": metadata}, bytes(range(36))))
    return path


REFUSED = {  # name of the file, metadata, what is said
    "encrypted": ("ct.safetensors", {"__encryption__": '{"w":{}}', "__policy__": "{}"}, ENCRYPTED),
    "encrypted and marked": ("m.safetensors", {"__encryption__": "", "format": "pt"}, ENCRYPTED),
    "first rank": ("shard-00001-model-00001-of-00001.safetensors", offsets([0, 0], [0]), SLICE),
    "second rank": (
        "shard-00002-model-00001-of-00001.safetensors",
        offsets([2, 0], [0]),
        SLICE,
    ),
    "renamed": ("net.safetensors", offsets([0, 0], [10], separators=(",", ":")), SLICE),
    "columns": ("model-00001-of-00002.safetensors", offsets([0, 20], [0]), SLICE),
    "of another kind": ("net.safetensors", {"DCP_SHARDING_INFO": "[]"}, SLICE),
}


@pytest.mark.parametrize(("name", "metadata", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_what_it_looks_like_is_refused_by_every_command(tmp_path, name, metadata, said):
    path, out = write(tmp_path / name, metadata), tmp_path / "out.ckpt"
    for words in (
        ("inspect", path),
        ("inspect", path, "--values", "*"),
        ("verify", path, "--deep"),
        ("merge", path, "-o", out),
        ("convert", path, "-o", out),
        ("average", path, path, "-o", out),
        ("diff", path, path),
        ("explain", path),
    ):
        result = run(*words)
        assert result.exit_code == (1 if words[0] == "verify" else 3), words
        assert "error[unsupported]" in message(result), words
        assert said in message(result), words
        assert not out.exists(), words


def test_a_folder_of_slices_is_not_said_to_lack_an_index(tmp_path):
    folder = tmp_path / "dcp"
    for rank in (1, 2):
        name = f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        write(folder / name, offsets([2 * rank - 2, 0], [0]))
    for command in ("inspect", "verify"):
        said = message(run(command, folder))
        assert SLICE in said
        assert "index" not in said
        assert "full tensors" not in said.split("Try:")[0]


@pytest.mark.parametrize(
    "metadata", [offsets([0, 0], [0]), offsets([0, 0], [0], separators=(",", ":"))]
)
@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "model.safetensors"])
def test_full_tensors_of_torchs_distributed_checkpoint_are_read(tmp_path, name, metadata):
    path, out = write(tmp_path / "in" / name, metadata), tmp_path / "out.safetensors"
    run_well("convert", path, "-o", out)
    run_well("diff", path, out)


def test_files_that_are_only_signed_by_cryptotensors_are_read(tmp_path):
    path = write(tmp_path / "in.safetensors", {"__signature__": "c2ln", "__crypto_keys__": "{}"})
    run_well("verify", path, "--deep")
