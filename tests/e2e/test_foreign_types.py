"""Types of safetensors that MindSpore lacks: shown, checked, and copied from file to file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import mentions, message, run, run_well, verify_document
from tests.support.file_bytes import entry, safetensors

# Two inputs: type, shape and bytes of the odd tensor, and how `inspect` shows the shape.
FOREIGN = {
    "rows that end inside a byte": ("F4", [3, 2], 3, "3 x 2"),
    "elements over bytes": ("F6_E3M2", [2, 2], 3, "2 x 2"),
    "another zero": ("F8_E5M2FNUZ", [5], 5, "5"),
    "no elements": ("F4", [0, 3], 0, "0 x 3"),
}


@pytest.fixture(params=FOREIGN)
def foreign(request, tmp_path):
    dtype, shape, nbytes, shown = FOREIGN[request.param]
    header = {
        "odd": entry(dtype, shape, 4, 4 + nbytes),
        "w": entry("BF16", [2], 0, 4),
        "__metadata__": None,
    }
    path = tmp_path / "in.safetensors"
    path.write_bytes(safetensors(header, bytes(range(4 + nbytes))))
    return path, dtype, shape, shown


def tensors_of(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return {
        name: (one["dtype"], one["shape"], data[start:][slice(*one["data_offsets"])])
        for name, one in json.loads(data[8:start]).items()
        if name != "__metadata__"
    }


def test_a_file_with_a_type_that_mindspore_lacks_is_shown_and_not_called_damaged(foreign):
    path, dtype, shape, shown = foreign
    result = run_well("inspect", path)
    assert f"safetensors' {dtype} has no counterpart in MindSpore" in message(result)
    assert shown in message(result)
    (odd,) = [
        one
        for one in json.loads(run_well("inspect", path, "--json").stdout)["tensors"]
        if one["name"] == "odd"
    ]
    assert (odd["dtype"], odd["shape"]) == (dtype, shape)
    codes = [one["code"] for one in verify_document(path, "--deep")["findings"]]
    assert codes == ["unsupported_type"]


def test_its_bytes_are_kept_from_safetensors_to_safetensors(foreign, tmp_path):
    path, *_ = foreign
    out, folder = tmp_path / "out.safetensors", tmp_path / "folder"
    run_well("merge", path, "-o", out)
    assert tensors_of(out) == tensors_of(path)
    run_well("diff", path, out)
    run_well("merge", path, "-o", folder, "--max-shard-size", "1B")
    found = [tensors_of(file) for file in folder.glob("*.safetensors")]
    assert {name: one for file in found for name, one in file.items()} == tensors_of(path)


@pytest.mark.parametrize("name", ["out.ckpt", "out.h5"])
def test_other_formats_refuse_it_and_the_advice_works(foreign, name):
    path, dtype, *_ = foreign
    result = run("merge", path, "-o", name)
    assert result.exit_code == 5
    assert f"odd: safetensors' {dtype} has no counterpart in" in message(result)
    assert message(result).endswith("Try: -o out.safetensors")
    assert not Path(name).exists()
    run_well("merge", path, "-o", "out.safetensors")


def test_a_tensor_whose_elements_share_bytes_is_never_sharded(foreign, tmp_path):
    path, dtype, *_ = foreign
    target, out = tmp_path / "target.yaml", tmp_path / "out"
    target.write_text("ckpttool_strategy: 1\nranks: 2\nparameters:\n  odd: {axis: 0}\n")
    words = ("-d", target, "-o", out, "--format", "safetensors", "--not-in-target", "full")
    if dtype in ("F4", "F6_E2M3"):
        result = run("split", path, *words)
        assert result.exit_code == 5
        assert mentions(message(result), "only copied whole|shard this shape") == []
    target.write_text("ckpttool_strategy: 1\nranks: 2\nparameters:\n  w: {axis: 0}\n")
    run_well("split", path, *words)
    assert tensors_of(out / "rank_1/checkpoint_1.safetensors")["odd"] == tensors_of(path)["odd"]


def test_shapes_of_equal_bytes_differ(tmp_path):
    for name, shape in (("a", [2, 4]), ("b", [4, 2])):
        header = {"odd": entry("F4", shape, 0, 4)}
        (tmp_path / f"{name}.safetensors").write_bytes(safetensors(header, bytes(4)))
    result = run("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert result.exit_code == 1
    assert "of another shape" in message(result)


def test_many_axes_are_kept_whole(tmp_path):
    path, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    header = {"w": entry("I16", [2] + [1] * 71, 0, 4), "v": entry("I8", [1], 4, 5)}
    path.write_bytes(safetensors(header, bytes(range(5))))
    run_well("inspect", path)
    run_well("verify", path, "--deep")
    run_well("merge", path, "-o", out)
    assert tensors_of(out) == tensors_of(path)
    result = run("merge", path, "-o", tmp_path / "out.ckpt")
    assert "w: 72 axes; only safetensors keeps more than 63" in message(result)
