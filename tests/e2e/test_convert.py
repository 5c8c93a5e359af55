"""Every case of the golden corpus in other formats, file by file, and back."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import corpus
from tests.support.checkpoints import write_file
from tests.support.commands import SUFFIXES, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.readers import entry_of, read, read_indexed, read_ranks

CASES = [case for case in corpus.case_names() if "enc_key" not in corpus.case_facts(case)]
RUNS = sorted(path.parent for path in SAMPLES.glob("*/ckpt"))
# Files that no MindSpore of today writes, or with a checksum, which only --crc stores.
OTHERWISE_WRITTEN = {"chunked_by_rows", "chunked_values", "crc_check", "legacy_scalar_dims"}
NOT_IN_SAFETENSORS = {"str", "Complex128", "HiFloat8"}


def formats_for(src):
    """The formats that hold all tensors of files of ranks."""
    dtypes = {one.dtype for path in files_of(src).values() for one in read(path).values()}
    return [one for one in SUFFIXES if one != "safetensors" or not dtypes & NOT_IN_SAFETENSORS]


def files_of(folder):
    """Return the files of ranks by their names without a suffix."""
    paths = (path for path in folder.rglob("*") if path.suffix in SUFFIXES.values())
    return {str(path.relative_to(folder).with_suffix("")): path for path in paths}


def check_same(src, out, suffix):
    """Compare the files of an output with those of the source: names and all tensors."""
    before, after = files_of(src), files_of(out)
    assert after
    assert {path.suffix for path in after.values()} == {suffix}
    for name, path in after.items():
        assert read(path) == {key: of_today(one) for key, one in read(before[name]).items()}
    return before, after


def of_today(entry):
    """A single value as MindSpore has written it since 2.1: without the dims ``[0]``."""
    is_single = entry.shape == (0,) and entry.data and entry.dtype != "str"
    return entry._replace(shape=()) if is_single else entry


@pytest.mark.parametrize("case", corpus.a_third(CASES, 2))
def test_a_case_is_the_same_in_another_format_and_back(case, tmp_path):
    src = GOLDEN / case / "src"
    formats = formats_for(src)
    other, own = formats[CASES.index(case) % len(formats)], next(iter(files_of(src).values()))
    back = next(name for name, suffix in SUFFIXES.items() if suffix == own.suffix)
    run_well("convert", src, "-o", tmp_path / "other", "--format", other)
    run_well("convert", tmp_path / "other", "-o", tmp_path / "back", "--format", back, "--json")
    check_same(src, tmp_path / "other", SUFFIXES[other])
    before, after = check_same(src, tmp_path / "back", own.suffix)
    if own.suffix == ".ckpt" and case not in OTHERWISE_WRITTEN:  # nothing but the order differs
        for name, path in after.items():
            assert path.stat().st_size == before[name].stat().st_size
    if "safetensors" not in formats:
        refused = run("convert", src, "-o", tmp_path / "no", "--format", "safetensors")
        assert refused.exit_code == 5, refused.stderr
        assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "case", ["crc_check", "dtypes_all", "bfloat16_model", "append_dict_string"]
)
def test_files_of_mindspore_in_its_own_format_are_the_same_byte_for_byte(case, tmp_path):
    crc = ["--crc"] if case == "crc_check" else []
    run_well("convert", GOLDEN / case / "src", "-o", tmp_path / "out", *crc)
    before, after = check_same(GOLDEN / case / "src", tmp_path / "out", ".ckpt")
    for name, path in after.items():
        assert filecmp.cmp(before[name], path, shallow=False), name


@pytest.mark.parametrize("case", ["encrypted_cbc", "encrypted_gcm"])
def test_encrypted_files_are_written_in_plain(case, tmp_path):
    key = tmp_path / "key.bin"
    key.write_text(corpus.case_facts(case)["enc_key"], encoding="ascii")
    for output_format in SUFFIXES:
        words = ["--format", output_format, "--dec-key-file", key]
        run_well("convert", GOLDEN / case / "src", "-o", tmp_path / output_format, *words)
        got = corpus.digests(read_ranks(tmp_path / output_format))
        want = corpus.unfold(corpus.expected(case)["after_decryption"], 2)
        assert not corpus.differences(want, got)


@pytest.mark.parametrize("folder", RUNS, ids=lambda folder: folder.name)
def test_files_of_a_training_run_are_the_same_in_another_format(folder, tmp_path):
    for kind, other in (("ckpt", "safetensors"), ("safetensors", "hdf5")):
        run_well("convert", folder / kind, "-o", tmp_path / kind, "--format", other)
        check_same(folder / kind, tmp_path / kind, SUFFIXES[other])


def test_a_map_parameter_is_the_same_in_the_formats_that_hold_it(tmp_path):
    src = SAMPLES / "files" / "map_parameter.ckpt"
    for suffix in (".h5", ".safetensors", ".ckpt"):
        run_well("convert", src, "-o", tmp_path / f"m{suffix}")
        run_well("convert", tmp_path / f"m{suffix}", "-o", tmp_path / f"back{suffix}.ckpt")
        run_well("diff", src, tmp_path / f"back{suffix}.ckpt")


@pytest.mark.parametrize("output_format", SUFFIXES)
def test_numbered_files_keep_their_tensors(output_format, tmp_path):
    src = GOLDEN / "safetensors_remove_redundancy" / "golden" / "unified"
    run_well("convert", src, "-o", tmp_path / "out", "--format", output_format)
    names = {"model-00001-of-00001": "part0", "hyper_param": "hyper_param"}
    files = files_of(tmp_path / "out")
    assert files.keys() == names.keys()
    for name, path in files.items():
        assert read(path) == read(src / f"{names[name]}.safetensors")
    index = "param_name_map.json"
    assert read_indexed(tmp_path / "out", index) == read_indexed(src, index)


@pytest.mark.parametrize("engine", ["threads:1", "processes:2"])
def test_every_engine_writes_the_same(engine, tmp_path):
    src = GOLDEN / "pipeline_2x4_to_8" / "src"
    words = ["--format", "safetensors", "--engine", engine]
    run_well("convert", src, "-o", tmp_path / "out", *words)
    check_same(src, tmp_path / "out", ".safetensors")


def test_what_is_chosen_is_what_each_rank_has_of_it(tmp_path):
    src = GOLDEN / "reshard_8_to_4" / "src"
    words = ["--include", "*attention*", "--exclude", "adam_*", "--format", "hdf5"]
    run_well("convert", src, "-o", tmp_path / "out", *words)
    for rank, tensors in read_ranks(tmp_path / "out").items():
        (path,) = Path(src, f"rank_{rank}").iterdir()
        assert tensors == {
            name: one
            for name, one in read(path).items()
            if "attention" in name and not name.startswith("adam_")
        }


def test_what_is_cast_is_counted_on_every_rank(tmp_path):
    for rank in range(2):
        values = entry_of(np.array([1 + 2**-9, rank + 1, 1e-9], "<f4"))
        write_file(tmp_path / "src" / f"rank_{rank}" / "net.ckpt", {"w": values}, "ckpt")
    words = ["--format", "safetensors", "--dtype", "fp16", "--rename", "w=v", "--json"]
    done = json.loads(run_well("convert", tmp_path / "src", "-o", tmp_path / "out", *words).stdout)
    assert done["cast"]["elements"] == 6
    assert done["cast"]["saved_bytes"] == 12
    assert done["cast"]["tensors"] == [{"from": "Float32", "to": "Float16", "tensors": 1}]
    for rank, tensors in read_ranks(tmp_path / "out").items():
        before = read(tmp_path / "src" / f"rank_{rank}" / "net.ckpt")["w"].array()
        assert tensors == {"v": entry_of(before.astype("<f2"))}
