"""Every case of the golden corpus in other formats, file by file, and back."""

from __future__ import annotations

import filecmp

import pytest

from tests.support import corpus
from tests.support.commands import SUFFIXES, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.readers import read, read_indexed

CASES = [case for case in corpus.case_names() if "enc_key" not in corpus.case_facts(case)]
# Files that no MindSpore of today writes, or with a checksum, which only --crc stores.
OTHERWISE_WRITTEN = {"chunked_by_rows", "chunked_values", "crc_check", "legacy_scalar_dims"}
NOT_IN_SAFETENSORS = {"str", "Complex128", "HiFloat8"}


def formats_for(src):
    dtypes = {one.dtype for path in files_of(src).values() for one in read(path).values()}
    return [one for one in SUFFIXES if one != "safetensors" or not dtypes & NOT_IN_SAFETENSORS]


def files_of(folder):
    paths = (path for path in folder.rglob("*") if path.suffix in SUFFIXES.values())
    return {str(path.relative_to(folder).with_suffix("")): path for path in paths}


def check_same(src, out, suffix):
    before, after = files_of(src), files_of(out)
    assert after
    assert {path.suffix for path in after.values()} == {suffix}
    for name, path in after.items():
        assert read(path) == {key: of_today(one) for key, one in read(before[name]).items()}
    return before, after


def of_today(entry):
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
