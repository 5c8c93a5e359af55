"""Files that other programs wrote in ways of their own: names, types and places of tensors."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

import ckpttool
from ckpttool.problems import FormatError, UnsupportedError
from tests.support.checkpoints import noise, write_file
from tests.support.commands import message, run, run_well
from tests.support.readers import Entry, entry_of, read, write_ckpt


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
@pytest.mark.parametrize("command", ["merge", "convert"])
def test_the_empty_name_is_kept_or_refused(command, format, tmp_path):
    tensors = {"": noise("", "Float32", (2, 2)), "other": noise("other", "Float32", (3,))}
    source = tmp_path / f"one.{format}"
    write_file(source, tensors, format)
    for suffix in ("ckpt", "safetensors"):
        out = tmp_path / f"out.{suffix}"
        run_well(command, source, "-o", out, "--rename", "other=new")
        assert read(out) == {"": tensors[""], "new": tensors["other"]}
    refused = run(command, source, "-o", tmp_path / "out.h5")
    assert "'': HDF5 cannot keep this name exactly" in message(refused)
    refused = run(command, source, "-o", tmp_path / "no.ckpt", "--rename", "other=")
    assert "1 tensor would have no name" in message(refused)


@pytest.mark.parametrize("word", ["mindspore.float16", "float16", "mindspore.bfloat16", "int32"])
def test_a_type_in_another_spelling_is_read_as_the_type(word, tmp_path):
    nbytes = 4 if word == "int32" else 2
    data = bytes(range(6 * nbytes))
    write_ckpt(tmp_path / "a.ckpt", {"w": Entry(word, (2, 3), data)})
    names = {"float16": "Float16", "bfloat16": "BFloat16", "int32": "Int32"}
    run_well("verify", tmp_path / "a.ckpt")
    run_well("convert", tmp_path / "a.ckpt", "-o", tmp_path / "b.ckpt")
    expected = Entry(names[word.rpartition(".")[2]], (2, 3), data)
    assert read(tmp_path / "b.ckpt") == {"w": expected}


@pytest.mark.parametrize("word", ["mindspore.float7", "Float7", "torch.float16", "Mindspore.Int8"])
def test_an_unknown_type_is_unsupported(word, tmp_path):
    write_ckpt(tmp_path / "a.ckpt", {"w": Entry(word, (2,), bytes(2))})
    refused = run("verify", tmp_path / "a.ckpt")
    assert f"error[unsupported]: {tmp_path / 'a.ckpt'}: w: unknown tensor_type" in refused.stdout
    with pytest.raises(UnsupportedError, match=word):
        ckpttool.open(tmp_path / "a.ckpt")


def write_spans(path, **spans):
    header = {
        name: {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}
        for name, (start, stop) in spans.items()
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))


@pytest.mark.parametrize("at", [0, 4, 8])
def test_a_tensor_without_elements_lies_between_others(at, tmp_path):
    write_spans(tmp_path / "a.safetensors", z=(at, at), x=(0, 4), y=(4, 8))
    assert {*ckpttool.open(tmp_path / "a.safetensors")} == {*"xyz"}


@pytest.mark.parametrize(
    ("at", "reason"), [(2, "overlap"), (7, "overlap"), (9, "gap"), (99, "gap")]
)
def test_a_tensor_without_elements_inside_of_another_is_refused(at, reason, tmp_path):
    write_spans(tmp_path / "a.safetensors", z=(at, at), x=(0, 4), y=(4, 8))
    with pytest.raises(FormatError, match=f"z: .*{reason}"):
        ckpttool.open(tmp_path / "a.safetensors")


@pytest.mark.parametrize(("dtype", "word"), [("<f4", "<u4"), ("<f2", "<u2")])
def test_a_signalling_nan_makes_no_warning(dtype, word, tmp_path):
    bits = {"<f4": 0x7F800001, "<f2": 0x7C01}[dtype]
    numbers = np.array([bits, 0, 0], word).view(dtype)
    folder = tmp_path / {"<f4": "single", "<f2": "half"}[dtype]  # not one of several ranks
    a, b = folder / "a.ckpt", folder / "b.ckpt"
    write_file(a, {"w": entry_of(numbers)}, "ckpt")
    write_file(b, {"w": entry_of(np.ones(3, dtype))}, "ckpt")
    assert "w: NaN at [0]" in message(run("average", a, b, "-o", tmp_path / "m.ckpt"))
    assert run("diff", a, b, "--atol", "1", "--stats").exit_code == 1
    run_well("inspect", a, "--values", "w")
    run_well("merge", a, "-o", tmp_path / "c.ckpt", "--dtype", "bf16")
    assert run("verify", a, "--deep").exit_code == 1
