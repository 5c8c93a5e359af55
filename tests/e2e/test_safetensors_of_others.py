"""Safetensors that other programs wrote: what is not what it looks like, and their metadata."""

from __future__ import annotations

import json
import shutil

import pytest

from ckpttool.planning.metadata import names_tensor
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.file_bytes import entry, safetensors

HEADER = {"w": entry("F32", [2, 3], 0, 24), "b": entry("F32", [3], 24, 36)}
SLICE = "slices of one rank, written by torch's distributed checkpoint"
ENCRYPTED = "encrypted by cryptotensors"


def offsets(w, b, separators=None):
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


# ----------------------------------------------------------------------------- metadata

OF_TENSORS = {  # of torchao, which stores 0.w as 0._w_qdata; of ComfyUI, which names modules
    "0.w": '{"_type": "Int8Tensor", "_tensor_data_names": ["qdata", "scale"]}',
    "tensor_names": '["0.w"]',
    "_quantization_metadata": '{"layers": {"net.1": {"format": "float8_e4m3fn"}}}',
}
OF_MODEL = {"license": "Apache-2.0", "modelspec.author": "w, b", "ss_epoch": "0", "empty": ""}
NEVER = dict.fromkeys(
    ("format", "remove_redundancy", "crc_of", "DCP_VERSION", "__policy__", "ckpttool.step"), "1.0"
)
QUANTIZED = {
    "0._w_scale": entry("F32", [2], 0, 8),
    "net.1.weight": entry("F32", [2], 8, 16),
    "0._w_qdata": entry("I8", [4], 16, 20),
}


def quantized(path, metadata):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors({**QUANTIZED, "__metadata__": metadata}, bytes(20)))
    return path


def metadata_of(path):
    data = path.read_bytes()
    found = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return {
        key: text
        for key, text in found.items()
        if key != "format" and not key.startswith("ckpttool.")
    }


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convert", ["-o", "out.safetensors"]),
        ("merge", ["-o", "out.safetensors"]),
        ("merge", ["-o", "out.safetensors", "--crc"]),
        ("merge", ["-o", "out", "--max-shard-size", "10B"]),
    ],
)
def test_metadata_is_carried_from_safetensors_to_safetensors(tmp_path, command, words):
    path = quantized(tmp_path / "in.safetensors", {**OF_TENSORS, **OF_MODEL, **NEVER})
    result = run_well(command, path, *words)
    assert "metadata is" not in message(result)
    files = [*tmp_path.glob("out*.safetensors"), *tmp_path.glob("out/*.safetensors")]
    assert len(files) == (3 if "10B" in words else 1)
    for file in files:
        found = metadata_of(file)
        assert ("crc_num" in found) == ("--crc" in words)
        found.pop("crc_num", None)
        assert found == {**OF_TENSORS, **OF_MODEL}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("convert", ["--rename", "0.*=1.*"]),
        ("merge", ["--exclude", "0.*"]),
        ("convert", ["--include", "0.*"]),
        ("merge", ["--dtype", "bf16"]),
        ("average", []),
    ],
)
def test_entries_that_name_a_tensor_are_left_out_if_a_tensor_changes(tmp_path, command, words):
    path = quantized(tmp_path / "in.safetensors", {**OF_TENSORS, **OF_MODEL, **NEVER})
    out = tmp_path / "out.safetensors"
    result = run_well(command, path, *([path] if command == "average" else []), *words, "-o", out)
    assert "metadata is left out: it names tensors, and some are written otherwise" in message(
        result
    )
    assert "0.w, _quantization_metadata, tensor_names" in message(result)
    assert metadata_of(out) == OF_MODEL


NAMES, MODULES = {"0._w", "net.1.weight", "b"}, {"0", "net.1"}


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("b", ""), ("net.1.weight", ""), ("net.1", ""), ("x", "b"), ("x", "a b, c")),
        *(("x", '["net.1.weight"]'), ("x", '{"net.1": 8}'), ("x", r"{\"a\": \"0.w\"}")),
        *(("x", "fp8:net.1.bias"), ("0.w", "{}"), ("x", "see net.1.weight.")),
    ],
)
def test_an_entry_names_a_tensor_by_its_name_its_module_or_a_name_beside_it(key, text):
    assert names_tensor(key, text, NAMES, MODULES)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        *(("bb", ""), ("x", "bb b1"), ("x", "0"), ("x", "[0, 1]"), ("x", "0.5"), ("net", "net")),
        *(("x", '["net.11.weight"]'), ("x", '{"other.1": 8}'), ("x", "net.safetensors")),
    ],
)
def test_numbers_and_other_words_name_no_tensor(key, text):
    assert not names_tensor(key, text, NAMES, MODULES)


@pytest.mark.parametrize("suffix", [".ckpt", ".h5"])
def test_metadata_that_a_format_cannot_hold_is_named(tmp_path, suffix):
    path = quantized(tmp_path / "in.safetensors", {**OF_MODEL, **NEVER})
    result = run_well("convert", path, "-o", tmp_path / f"out{suffix}")
    assert "has no place for it empty, license, modelspec.author and 1 more" in message(result)
    path = quantized(tmp_path / "without.safetensors", NEVER)
    result = run_well("convert", path, "-o", tmp_path / f"without{suffix}")
    assert "metadata is" not in message(result)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"net.1.weight": '{"_type": "torch.Tensor"}'}, []),
        ({"q": "a"}, ["--rename", "0._w_qdata=q"]),
    ],
)
def test_an_entry_with_the_name_of_a_tensor_is_never_carried(tmp_path, metadata, words):
    path = quantized(tmp_path / "in.safetensors", {**metadata, "license": "MIT"})
    result = run_well("convert", path, *words, "-o", tmp_path / "out.safetensors")
    assert f"the name of a tensor for its type {next(iter(metadata))}" in message(result)
    assert metadata_of(tmp_path / "out.safetensors") == {"license": "MIT"}


# What every rank has, what differs, what names a tensor, and what one rank alone has.
OF_RANKS = {"license": "MIT", "layers": '["model.norm_out.weight"]'}


@pytest.fixture
def ranks(tmp_path):
    source = tmp_path / "src"
    run_well("convert", GOLDEN / "reshard_8_to_4" / "src", "-o", source, "--format", "safetensors")
    for number, path in enumerate(sorted(source.glob("rank_*/*.safetensors"))):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        alone = {"by": "rank 2"} if number == 2 else {}
        own = {"format": "ms", "number": str(number), **OF_RANKS, **alone}
        path.write_bytes(safetensors({**header, "__metadata__": own}, data[start:]))
    for manifest in source.glob("ckpttool.json"):
        manifest.unlink()
    shutil.rmtree(source / ".ckpttool", ignore_errors=True)
    return source


@pytest.mark.parametrize("command", ["merge", "reshard", "convert"])
def test_what_all_ranks_say_that_say_it_is_carried(ranks, tmp_path, command):
    case, out = GOLDEN / "reshard_8_to_4", tmp_path / "out"
    words = {
        "merge": ["-s", case / "src_strategy.ckpt", "-o", out / "m.safetensors"],
        "reshard": [
            *("-s", case / "src_strategy.ckpt", "-d", case / "dst_strategy.ckpt"),
            *("-o", out, "--format", "safetensors"),
        ],
        "convert": ["-o", out, "--format", "safetensors"],
    }
    result = run_well(command, ranks, *words[command])
    assert "metadata is left out: it differs between the files number" in message(result)
    is_joined = command != "convert"
    assert ("some are written otherwise layers" in message(result)) == is_joined
    files = [*out.rglob("*.safetensors")]
    assert len(files) == {"merge": 1, "reshard": 4, "convert": 8}[command]
    wanted = {"by": "rank 2", **OF_RANKS}
    if is_joined:
        del wanted["layers"]
    assert all(metadata_of(file) == wanted for file in files)


def test_inspect_shows_the_metadata(tmp_path, ranks):
    path = quantized(tmp_path / "in.safetensors", {"license": "MIT", "a": 61 * "x", **NEVER})
    said = message(run_well("inspect", path))
    assert f"metadata DCP_VERSION 1.0, __policy__ 1.0, a {57 * 'x'}... and 3 more" in said
    assert 'metadata layers ["model.norm_out.weight"], license MIT' in message(
        run_well("inspect", ranks)
    )
    crc = sorted((GOLDEN / "safetensors_crc" / "src").rglob("*.safetensors"))[0]
    assert "metadata crc_num " in message(run_well("inspect", crc))
    assert "format pt" not in message(run_well("inspect", quantized(path, {"format": "pt"})))


@pytest.mark.parametrize(
    ("nbytes", "limit", "code"), [(70_000, "10B", 5), (70_000, "72KB", 0), (60_000, "10B", 0)]
)
def test_large_metadata_is_not_written_again_for_every_tensor(tmp_path, nbytes, limit, code):
    path = quantized(tmp_path / "in.safetensors", {"recipe": nbytes * "x"})
    words = ["-o", tmp_path / "out", "--max-shard-size", limit]
    result = run("merge", path, *words)
    assert result.exit_code == code
    assert ("metadata takes 68.5 KiB in each, 10 B allowed" in message(result)) == (code == 5)
