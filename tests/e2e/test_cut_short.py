"""Files that are cut short: what is whole and chosen is used, whatever kind of source it is."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path

import pytest

import ckpttool
from ckpttool.formats import read_index
from tests.e2e.test_choosing import CONVERSIONS, TRAINING, written
from tests.e2e.test_golden import GOLDEN
from tests.oracle import OracleLayout
from tests.support.checkpoint2 import Save
from tests.support.checkpoints import noise, write_file
from tests.support.commands import message, run, run_well
from tests.support.corpus import a_third
from tests.support.damage import flipped
from tests.support.hyper_parallel import HyperSave
from tests.support.readers import rank_file, read, read_ranks

CASE = "optshard_full_adamw"  # each rank holds slices that no other rank has


def is_weight(name):
    return not TRAINING.fullmatch(name)


def places(path, key, most):
    extents = [extent for t in read_index(str(path)).tensors.values() for extent in t.extents]
    ends = [
        (extent.offset + extent.nbytes, extent.offset + extent.nbytes - 1) for extent in extents
    ]
    more = [(extent.offset + extent.nbytes // 2, extent.offset - 3) for extent in extents]
    offsets = sorted({at for pair in (*ends, *more) for at in pair if 0 < at < path.stat().st_size})
    return random.Random(key).sample(offsets, min(most, len(offsets)))


def lost_of(whole, size):
    return {
        name
        for name, tensor in whole.tensors.items()
        if any(extent.offset + extent.nbytes > size for extent in tensor.extents)
    }


def is_whole(path):
    try:
        return bool(read_index(str(path)))
    except ckpttool.FormatError:
        return False


def check_cuts(path, key, convert, most=4):
    """Cut a file at some places; the weights come out right, or some of the file are lost."""
    data, whole, expected = path.read_bytes(), read_index(str(path)), convert()[0]
    for size in places(path, key, most):
        path.write_bytes(data[:size])
        if is_whole(path):  # a .ckpt between two records; nothing shows that it was cut
            continue
        weights, said = convert()
        lost = {name for name in lost_of(whole, size) if is_weight(name)}
        assert weights == expected or (weights is None and lost), (path, size, said)
    path.write_bytes(data)


def copied(case):
    shutil.copytree(GOLDEN / case, f"golden/{case}", copy_function=shutil.copyfile)
    return Path("golden", case, "src")


@pytest.mark.parametrize("key", a_third([key for key in CONVERSIONS if "merge" in key], 1))
def test_weights_of_a_cut_file_come_out_whole_or_not_at_all(key):
    src = copied(CONVERSIONS[key].case)
    files = [file for file in src.rglob("*") if file.suffix in (".ckpt", ".safetensors")]
    path = random.Random(key).choice(
        [file for file in sorted(files) if "strategy" not in file.name]
    )
    if "encrypted" not in key:
        check_cuts(path, key, lambda: written(CONVERSIONS[key], "--weights-only"), most=3)


def outcome(*words):
    result = run(*words, "--weights-only", "--overwrite")
    if result.exit_code:
        return None, message(result)
    out = Path(words[words.index("-o") + 1])
    return (read_ranks(out) if out.is_dir() else read(out)), ""


MERGED = {"ckpt": ".ckpt", "safetensors": ".safetensors"}


@pytest.mark.parametrize("format", MERGED)
@pytest.mark.parametrize("command", ["merge", "split", "convert"])
def test_a_cut_merged_file_gives_its_weights(command, format):
    src, strategy = copied(CASE), f"golden/{CASE}/src_strategy.ckpt"
    run_well("merge", src, "-s", strategy, "-o", f"m{MERGED[format]}")
    path = Path(f"m{MERGED[format]}")  # its manifest lists what a .ckpt has lost
    more = ["-d", strategy] if command == "split" else []
    out = "out" if command == "split" else "out.h5"
    check_cuts(path, command + format, lambda: outcome(command, path, *more, "-o", out), most=6)


@pytest.mark.parametrize("format", MERGED)
def test_a_cut_part_of_numbered_files_gives_its_weights(format):
    src, strategy = copied(CASE), f"golden/{CASE}/src_strategy.ckpt"
    words = ["--max-shard-size", "20KiB", "--format", format]
    run_well("merge", src, "-s", strategy, "-o", "parts", *words)
    files = sorted(Path("parts").glob(f"model-*{MERGED[format]}"))
    assert len(files) > 1
    for path in files[:2]:
        check_cuts(path, path.name, lambda: outcome("merge", "parts", "-o", "out.h5"))


@pytest.mark.parametrize("command", ["convert", "reshard"])
def test_the_other_commands_take_the_weights_of_a_cut_rank_file(command):
    src, strategy = copied(CASE), f"golden/{CASE}/src_strategy.ckpt"
    more = ["-s", strategy, "-d", strategy] if command == "reshard" else []
    path = rank_file(src, 1)
    check_cuts(path, command, lambda: outcome(command, src, *more, "-o", "out"), most=5)


def described(folder, kind):
    """A folder that describes itself; a file of it has weights and states, which are cut."""
    entries = {name: noise(name, "Float32", (8, 6)) for name in ("w", "adam_m.w", "b", "adam_m.b")}
    if kind == "hyper":
        halves = {((0, 0), (4, 6)): [0], ((4, 0), (4, 6)): [1]}
        HyperSave(entries, dict.fromkeys(entries, halves)).write(folder)
        return folder / "_rank1_.safetensors"
    layout = OracleLayout((2,), ((0,), ()))
    layouts = dict.fromkeys(entries, (layout,))
    save = Save(entries, layouts, 2, is_optimizer=lambda name: False)
    save.write(folder)
    return folder / "model-0000001-0000002.safetensors"


@pytest.mark.parametrize("kind", ["hyper", "checkpoint2"])
def test_a_cut_file_of_a_folder_that_describes_itself_gives_what_is_whole(kind):
    path = described(Path("src"), kind)
    data, index = path.read_bytes(), read_index(str(path))
    order = sorted(index.tensors, key=lambda name: index.tensors[name].extents[0].offset)
    assert order == ["adam_m.b", "adam_m.w", "b", "w"]
    run_well("merge", "src", "-o", "all.h5")
    path.write_bytes(data[:-1])
    weights, said = outcome("merge", "src", "-o", "out.h5")
    assert weights is None
    assert "cut: w" in said
    result = run_well("merge", "src", "-o", "out.h5", "--exclude", "w")
    whole = read(Path("all.h5"))
    rest = {name: tensor for name, tensor in whole.items() if name not in ("w", "adam_m.w")}
    assert read(Path("out.h5")) == rest  # state goes with its parameter
    assert f"note: {path}: the file is shorter than its header says" in result.stderr
    assert "1 lost tensor, not wanted" in result.stderr


@pytest.fixture
def cut_rank():
    src = copied(CASE)
    path = rank_file(src, 1)
    path.write_bytes(path.read_bytes()[:-5])
    return ["merge", src, "-s", f"golden/{CASE}/src_strategy.ckpt"]


def test_without_a_choice_a_cut_file_is_an_error_that_proposes_one(cut_rank):
    result = run(*cut_rank, "-o", "m.h5")
    assert result.exit_code == 3
    said = message(result)
    assert "the file is cut short" in said
    assert "adam_v.lm_head.weight: expected 557 bytes from there, found 552" in said
    assert "from where it was saved, or --weights-only" in said
    result = run_well(*cut_rank, "-o", "m.h5", "--weights-only", "--strict", "--json")
    (note,) = (note for note in json.loads(result.stdout)["notes"] if note["code"] == "cut_short")
    assert note["ranks"] == [1]
    run_well(*cut_rank, "-o", "n.h5", "--exclude", "adam_v.lm_head.weight")


def test_a_pattern_may_match_only_what_was_lost(cut_rank):
    run_well(*cut_rank, "-o", "m.h5", "--exclude", "adam_v.lm_head.*")
    result = run(*cut_rank, "-o", "n.h5", "--include", "adam_v.lm_head.*")
    assert result.exit_code == 3
    assert "adam_v.lm_head.weight: expected 557 bytes" in message(result)


def test_no_checksum_vouches_for_a_file_that_is_cut_short(cut_rank):
    result = run(*cut_rank, "-o", "m.ckpt", "--weights-only", "--crc")
    assert result.exit_code == 3
    assert "the same command without --crc" in message(result)


def test_what_is_left_of_a_file_is_compared_with_its_manifest():
    src, strategy = copied(CASE), f"golden/{CASE}/src_strategy.ckpt"
    run_well("reshard", src, "-s", strategy, "-d", strategy, "-o", "set", "--format", "ckpt")
    path = rank_file(Path("set"), 1)
    data = path.read_bytes()[:-5]
    path.write_bytes(data)
    words = ["set", "-s", strategy, "--weights-only"]
    run_well("verify", *words, "--deep")
    run_well("merge", *words, "-o", "m.h5")
    weight = read_index(str(rank_file(src, 1))).tensors["model.layers.0.attention.wq.weight"]
    path.write_bytes(flipped(data, weight.extents[0].offset + 9))
    assert run("verify", *words, "--deep").exit_code == 1
    assert run("merge", *words, "-o", "n.h5").exit_code == 7


def test_a_ckpt_alone_does_not_show_what_it_lost():
    entries = {name: noise(name, "Float32", (8, 6)) for name in ("w", "adam_m.w", "b")}
    path = Path("m.ckpt")
    write_file(path, entries, "ckpt")
    data, state = path.read_bytes(), read_index(str(path)).tensors["adam_m.w"]
    path.write_bytes(data[: state.extents[0].offset + 7])
    result = run("merge", path, "-o", "m.h5", "--weights-only")
    assert result.exit_code == 3
    assert "nothing shows which tensors followed" in message(result)
    run_well("merge", path, "-o", "m.h5", "--include", "w")
    assert read(Path("m.h5")) == {"w": entries["w"]}


def test_a_cut_checkpoint_is_opened_for_its_weights(cut_rank):
    *_, src, _, strategy = cut_rank
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened = ckpttool.open(src, strategy, weights_only=True)
    assert all(is_weight(name) for name in opened)
    assert opened["lm_head.weight"][...].shape == (64, 16)
    with pytest.raises(ckpttool.CkptToolError, match="or --weights-only"):
        ckpttool.open(src, strategy)
