"""A finished set as a source: exchanged and changed files are found by its manifest."""

import json
import shutil

import pytest

import ckpttool
from ckpttool.formats import read_index
from ckpttool.model.manifest import OutputEntry, TensorEntry, list_outputs
from tests.support.checkpoints import noise, write_file
from tests.support.commands import SUFFIXES, message, run, run_well
from tests.support.damage import flip_byte
from tests.support.executors import FORMATS
from tests.support.manifests import MANIFEST
from tests.support.permissions import ROOT_ONLY, give_away, run_without_rights
from tests.support.plans import plan_merge

# Four ranks: axis 0 of ``w`` and axis 1 of ``v`` are sharded, so no tensor tells all ranks apart.
LAYOUTS = {
    "w": {"dev_matrix": [2, 2], "tensor_map": [0, -1]},
    "v": {"dev_matrix": [2, 2], "tensor_map": [-1, 1]},
    "b": {"dev_matrix": [2, 2], "tensor_map": [-1]},
}


@pytest.fixture
def model(tmp_path):
    shapes = {"w": (4, 6), "v": (2, 8), "b": (40,)}
    tensors = {name: noise(name, "Int32", shape) for name, shape in shapes.items()}
    write_file(tmp_path / "model.safetensors", tensors, "safetensors")
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": LAYOUTS}))
    return tmp_path


def split(folder, output_format):
    words = ["split", folder / "model.safetensors", "-d", folder / "s.json", "-o", folder / "set"]
    run_well(*words, "--format", output_format)
    suffix = SUFFIXES[output_format]
    return [folder / "set" / f"rank_{r}" / f"checkpoint_{r}{suffix}" for r in range(4)]


def exchange(a, b):
    (held, other), (a_path, b_path) = (a.read_bytes(), b.read_bytes()), (a, b)
    a_path.write_bytes(other)
    b_path.write_bytes(held)


def commands_on(folder, name="set"):
    source, strategy = folder / name, ["-s", folder / "s.json"]
    return {
        "merge": ["merge", source, *strategy, "-o", folder / "m.h5"],
        "reshard": ["reshard", source, *strategy, "-d", folder / "s.json", "-o", folder / "new"],
        "diff": ["diff", folder / "model.safetensors", source, "--b-strategy", folder / "s.json"],
        "inspect": ["inspect", source, *strategy],
        "verify": ["verify", source],
        "check": ["verify", source, "--check-manifest"],
        "deep": ["verify", source, *strategy, "--deep"],
    }


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (1, 2)])
def test_exchanged_files_of_a_set_are_named_by_every_command(model, output_format, ranks):
    paths = split(model, output_format)
    shutil.copytree(model / "set", model / "copy")
    a, b = (paths[rank] for rank in ranks)
    assert a.stat().st_size == b.stat().st_size
    exchange(a, b)
    for name, words in commands_on(model).items():
        result = run(*words)
        text = message(result)
        assert result.exit_code == (1 if words[0] == "verify" else 5), (name, text)
        assert "not the file that its manifest lists" in text
        for here, there in ((a, b), (b, a)):
            assert f"{here}: its contents are those of {there.relative_to(model / 'set')}" in text
        assert ("--ignore-manifest" in text) == (words[0] != "verify")
        if words[0] != "verify":
            assert "error[manifest]" not in message(run(*words, "--ignore-manifest"))
    for words in commands_on(model, "copy").values():
        run_well(*words, *(["--overwrite"] if words[0] in ("merge", "reshard") else []))


@pytest.mark.parametrize("renamed", ["net.ckpt", "other_0.ckpt"])
def test_a_file_in_place_of_a_listed_one_is_an_error(model, renamed):
    paths = split(model, "ckpt")
    for path in paths:
        path.rename(path.with_name(renamed))
    words = ["merge", model / "set", "-s", model / "s.json", "-o", model / "m.h5"]
    result = run(*words)
    assert result.exit_code == 5
    assert "not the file that the manifest lists in this folder" in message(result)
    run_well(*words, "--ignore-manifest")


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_merged_set_of_numbered_files_is_compared_too(model, output_format):
    words = ["merge", model / "model.safetensors", "-o", model / "out", "--format", output_format]
    run_well(*words, "--max-shard-size", "120B")
    first, second, *_ = sorted((model / "out").glob(f"*{SUFFIXES[output_format]}"))
    run_well("verify", model / "out", "--check-manifest")
    exchange(first, second)
    text = message(run("verify", model / "out", "--check-manifest"))
    assert "not what its manifest lists" in text
    assert f"its contents are those of {first.name}" in text


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize("command", ["merge", "reshard"])
@pytest.mark.parametrize("tensor", ["w", "v", "b"])
def test_a_changed_unit_that_is_read_as_a_whole_ends_the_run(model, output_format, command, tensor):
    paths = split(model, output_format)
    stored = read_index(str(paths[0])).tensors[tensor]
    flip_byte(paths[0], stored.extents[0].offset)
    words = [*commands_on(model)[command], "--trust-strategy"]
    result = run(*words)
    assert result.exit_code in (5, 7)  # 5 for the unit that tells the files apart
    assert result.exit_code == 7 or tensor in "wv"
    assert f"{paths[0]}: {tensor}: changed since" in message(result)
    outputs = [model / "m.h5", *(model / "new").rglob("checkpoint_*")]
    assert not [path for path in outputs if path.exists()]
    run_well(*words, "--ignore-manifest")


@pytest.mark.parametrize("engine", ["inline", "processes:2"])
def test_every_unit_of_a_large_tensor_is_compared_by_every_engine(tmp_path, monkeypatch, engine):
    write_file(tmp_path / "m.ckpt", {"w": noise("w", "Int32", (1100, 1 << 11))}, "ckpt")
    run_well("merge", tmp_path / "m.ckpt", "-o", tmp_path / "o.safetensors")
    flip_byte(tmp_path / "o.safetensors", -1)
    words = ["merge", tmp_path / "o.safetensors", "-o", tmp_path / "x.h5", "--engine", engine]
    result = run(*words)
    assert result.exit_code == 7
    assert "w: changed since the file was written" in message(result)
    assert not (tmp_path / "x.h5").exists()


def test_a_note_says_of_how_many_files_hashes_were_compared(model, monkeypatch):
    split(model, "ckpt")
    monkeypatch.setattr("ckpttool.checks.manifest_hashes.SAMPLED_BYTES", 100)
    text = message(run_well("inspect", model / "set", "-s", model / "s.json"))
    assert "hashes of 1 of 4 files compared" in text
    monkeypatch.undo()
    assert "hashes of" not in message(run_well("inspect", model / "set", "-s", model / "s.json"))


def test_files_that_the_manifest_does_not_list_are_not_compared(model):
    paths = split(model, "ckpt")
    for path in paths:
        path.with_name("later-1_9.ckpt").write_bytes(path.read_bytes())
        flip_byte(path.with_name("later-1_9.ckpt"), -30)
    words = [model / "set", "-s", model / "s.json", "--step", "1_9", "--trust-strategy"]
    run_well("merge", *words, "-o", model / "m.h5")


def test_a_check_of_a_manifest_that_is_not_there_finds_that(model):
    result = run("verify", model / "model.safetensors", "--check-manifest")
    assert result.exit_code == 1
    assert "no manifest lists these files" in message(result)


@pytest.mark.parametrize("text", ["{}", "[" * 100_000], ids=["empty", "nested too deep"])
def test_a_manifest_that_cannot_be_read_is_a_warning_of_what_was_not_compared(model, text):
    split(model, "ckpt")
    (model / "set" / MANIFEST).write_text(text)
    words = ["merge", model / "set", "-s", model / "s.json", "-o", model / "m.h5"]
    assert "warning[not_compared]" in message(run_well(*words))


def test_the_units_of_each_output_tell_it_from_all_others():
    digits = {name: name * 64 for name in "0123456789abcdef"}
    outputs = [
        OutputEntry(
            rank,
            f"rank_{rank}",
            "ckpt",
            8,
            tuple(
                TensorEntry(name, "Float32", shape, (digits[value],))
                for name, shape, value in zip("abc", [(9,), (2,), (1,)], values, strict=True)
            ),
        )
        for rank, values in enumerate(["000", "110", "020", "120", "120"])
    ]
    listed = list_outputs(outputs)
    units = [{*one.alike.distinguishing_units(one)} for one in listed]
    assert units[0] == {("b", 0)}  # no other has this one
    assert units[2] == units[3] == units[4] == {("b", 0), ("a", 0)}
    assert sum(listed[3].alike.distinguishing_units(listed[3]).values()) == 11 * 4
    (one,) = list_outputs(outputs[:1])
    assert {*one.alike.distinguishing_units(one)} == {("a", 0)}  # the largest


@ROOT_ONLY
def test_the_folder_that_links_lead_to_is_named_if_it_cannot_be_searched(model):
    paths = split(model, "ckpt")
    closed = model / "closed"
    closed.mkdir()
    for path in paths:
        path.rename(closed / path.name)
        path.symlink_to(closed / path.name)
    give_away(closed, 0o700)
    model.chmod(0o755)
    found = run_without_rights("verify set", model)
    assert found.returncode in (1, 3), found.stderr
    text = " ".join((found.stdout + found.stderr).split())
    assert f"{closed}: owner nobody, mode 700" in text
    assert "Traceback" not in text


def test_a_python_program_reads_a_changed_set_if_it_says_so(model):
    paths = split(model, "safetensors")
    exchange(paths[0], paths[1])
    catalog = ckpttool.scan(str(model / "set"))
    strategy = ckpttool.read_strategy([str(model / "s.json")])
    with pytest.raises(ckpttool.PlanError, match="not the file"):
        plan_merge(catalog, strategy, str(model / "m.h5"))
    options = ckpttool.ResolveOptions(manifest="ignore", trust_strategy=True)
    plan_merge(catalog, strategy, str(model / "m.h5"), options)
