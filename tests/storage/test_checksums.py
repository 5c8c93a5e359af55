"""Checksums, against MindSpore's own files and zlib on whole ones."""

from __future__ import annotations

import json
import os
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.concurrency import InlineExecutor
from ckpttool.formats import get_format, read_index
from ckpttool.formats.base import PROVENANCE
from ckpttool.model.tensors import StoredFile, TensorMeta
from ckpttool.problems import FormatError, PlanError
from ckpttool.storage import checksums
from ckpttool.storage.checksums import add_zeros, check_files, compute_checksum, verify_checksum
from tests.support.checkpoints import create_file, seal_file
from tests.support.commands import message as told
from tests.support.commands import run, run_well
from tests.support.corpus import BROKEN, GOLDEN, SAMPLES
from tests.support.file_bytes import content, entry, map_record, record, safetensors, write_contents
from tests.support.plans import plan_merge
from tests.support.readers import read, split_safetensors

SAVED_WITH_CHECKSUM = [
    SAMPLES / "files" / "crc.ckpt",
    SAMPLES / "files" / "crc.safetensors",
    *sorted((GOLDEN / "crc_check" / "src").rglob("*.ckpt")),
    *sorted((GOLDEN / "safetensors_crc" / "src").rglob("*.safetensors")),
]
FORMS = ("ckpt", "safetensors")


def make(path, metas, with_checksum=True):
    format = get_format(path.suffix[1:])
    index = create_file(format, str(path), metas, {"crc_num": ""} if with_checksum else {})
    write_contents(index, {name: content(tensor) for name, tensor in index.tensors.items()})
    seal_file(format, path, compute_checksum(index) if with_checksum else None)
    return read_index(str(path))


METAS = [
    TensorMeta("z", "Float32", (3, 5)),
    TensorMeta("größe", "BFloat16", (7,)),
    TensorMeta("a/b", "UInt8", ()),
    TensorMeta("empty", "Int64", (0, 2)),
    TensorMeta("B", "Int64", (1,)),
]


# ------------------------------------------------------------------------ the number


@pytest.mark.parametrize("path", SAVED_WITH_CHECKSUM, ids=lambda path: path.name)
@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20])
def test_the_checksum_of_a_file_by_mindspore_is_the_stored_one(path, buffer_bytes, monkeypatch):
    monkeypatch.setattr(checksums, "BUFFER_BYTES", buffer_bytes)
    index = read_index(str(path))
    assert str(compute_checksum(index)) == index.attrs["crc_num"]
    assert verify_checksum(index) is None


@given(st.binary(max_size=50), st.integers(0, 5000))
def test_zeros_are_added_as_if_they_were_there(data, count):
    assert add_zeros(zlib.crc32(data), count) == zlib.crc32(data + bytes(count))


def test_zeros_beyond_all_memory_take_no_time():
    assert add_zeros(add_zeros(1, 2**62), 2**62) == add_zeros(1, 2**63)


@pytest.mark.parametrize(
    ("dtype", "data", "counted"),
    [
        ("I64", (5).to_bytes(8, "little"), bytes(5)),
        ("I64", bytes(8), b""),
        ("I8", b"\x7f", bytes(127)),
        ("U8", b"\xff", bytes(255)),
        ("I64", b"\xfe" + b"\xff" * 7, b"\xfe" + b"\xff" * 7),
        ("F32", b"\x05\0\0\0", b"\x05\0\0\0"),
        ("BOOL", b"\x01", b"\x01"),
    ],
)
def test_an_integer_without_axes_counts_as_zeros_as_in_mindspore(dtype, data, counted, tmp_path):
    path = tmp_path / "net.safetensors"
    header = {"w": entry(dtype, [], 0, len(data)), "a": entry("U8", [3], len(data), len(data) + 3)}
    path.write_bytes(safetensors(header, data + b"abc"))
    assert compute_checksum(read_index(str(path))) == zlib.crc32(b"aabcw" + counted)


TABLE = map_record("table")
RECORDS = [record("v"), record("w", "Int8", (3,), b"abc")]


@pytest.mark.parametrize(
    "parts",
    [[TABLE, *RECORDS], [RECORDS[0], TABLE, map_record("m"), RECORDS[1]], [*RECORDS, TABLE]],
)
def test_map_parameters_count_as_mindspore_saves_them_or_as_it_loads_them(parts, tmp_path):
    path = tmp_path / "net.ckpt"
    data = b"".join(parts)
    sums = {zlib.crc32(b"".join(RECORDS)), zlib.crc32(data)}
    assert len(sums) == 2
    for crc in (*sums, 5):
        path.write_bytes(data + b"crc_num" + crc.to_bytes(10, "big"))
        index = read_index(str(path))
        assert {compute_checksum(index), compute_checksum(index, as_saved=True)} == sums
        assert (verify_checksum(index) is None) == (crc in sums)
    run_well("merge", path, "-o", tmp_path / "out.ckpt", "--unlisted", "first")
    out = tmp_path / "crc.ckpt"
    run_well("merge", tmp_path / "out.ckpt", "-o", out, "--crc")
    assert out.read_bytes()[-4:] == zlib.crc32(out.read_bytes()[:-17]).to_bytes(4, "big")


def test_a_file_that_has_become_shorter_is_an_error(tmp_path):
    index = make(tmp_path / "net.safetensors", [TensorMeta("w", "Int8", (1000,))])
    os.truncate(index.path, 500)
    with pytest.raises(PlanError, match=r"was written to, or the path leads to another file"):
        compute_checksum(index)
    with pytest.raises(FormatError, match=r"byte 500: the file ends here; it changed while"):
        compute_checksum(replace(index, files=(StoredFile(index.path),)))


@pytest.mark.parametrize("stored", ["", "x", "-1", " 5", "٣", "5", str(2**40), "1" * 5000])
def test_whatever_is_stored_but_the_number_is_wrong(stored, tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(safetensors({"__metadata__": {"crc_num": stored}}))
    error = verify_checksum(read_index(str(path)))
    assert f"(crc_num) is {stored}, that of the contents 0" in error.reason


# ------------------------------------------------------------------------ files with one


@pytest.mark.parametrize("path", SAVED_WITH_CHECKSUM, ids=lambda path: path.name)
def test_a_file_by_mindspore_is_written_again_with_its_checksum(path, tmp_path):
    out = tmp_path / f"out{path.suffix}"
    run_well("merge", path, "--replicated", "-o", out, "--crc")
    if path.suffix == ".ckpt":
        assert out.read_bytes() == path.read_bytes()
    else:
        ours, *rest = split_safetensors(out)
        theirs, *rest_of_theirs = split_safetensors(path)
        assert rest == rest_of_theirs
        ours = {key: text for key, text in ours.items() if not key.startswith(PROVENANCE)}
        assert ours | {"format": "ms"} == theirs  # a merged file is marked for PyTorch


@pytest.mark.parametrize("form", FORMS)
def test_a_sealed_file_holds_the_checksum_of_its_contents(form, tmp_path):
    index = make(tmp_path / f"net.{form}", METAS)
    found = {name: entry.data for name, entry in read(tmp_path / f"net.{form}").items()}
    assert found == {meta.name: content(index.tensors[meta.name]) for meta in METAS}
    data = (tmp_path / f"net.{form}").read_bytes()
    if form == "ckpt":
        assert data[-17:] == b"crc_num" + zlib.crc32(data[:-17]).to_bytes(10, "big")
    else:
        counted = dict(found, **{"a/b": bytes(found["a/b"][0])})
        want = b"".join(name.encode() + counted[name] for name in sorted(counted))
        assert index.attrs["crc_num"] == str(zlib.crc32(want))
        assert int.from_bytes(data[:8], "little") % 8 == 0
    assert index.nbytes == len(data)


@pytest.mark.parametrize("crc", [0, 7, 2**32 - 1])
@pytest.mark.parametrize("form", FORMS)
def test_every_number_finds_room(form, crc, tmp_path):
    path = str(tmp_path / f"net.{form}")
    created = create_file(get_format(form), path, METAS, {"crc_num": ""})
    seal_file(get_format(form), path, crc)
    index = read_index(path)
    assert index.attrs["crc_num"] == str(crc)
    assert dict(index.tensors) == dict(created.tensors)
    assert index.nbytes == created.nbytes == os.path.getsize(path)  # noqa: PTH202


@pytest.mark.parametrize("form", FORMS)
def test_a_file_without_one_stays_without_one(form, tmp_path):
    assert "crc_num" not in make(tmp_path / f"net.{form}", METAS, with_checksum=False).attrs


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("left_out", [set(), {0}, {1, 3}])
def test_what_was_summed_while_it_was_written_is_not_read(form, left_out, tmp_path):
    metas = [*METAS, TensorMeta("long", "Int8", (1000,))]
    index = make(tmp_path / f"net.{form}", metas)
    index = replace(index, files=(StoredFile(index.path),))
    sums = checksums.RunningCrc()
    data = bytearray(Path(index.path).read_bytes())
    for tensor in sorted(index.tensors.values(), key=lambda tensor: tensor.meta.shape):
        for extent in tensor.extents:
            edges = sorted({0, extent.nbytes // 3, extent.nbytes // 2, extent.nbytes})
            stretches = [(extent.offset + a, extent.offset + b) for a, b in pairwise(edges)]
            for number, (start, stop) in enumerate(reversed(stretches)):  # in any order
                if number not in left_out and tensor.meta.shape:  # MindSpore counts a number's sign
                    sums.add(index.path, tensor.meta.name, start, memoryview(data)[start:stop])
                    data[start:stop] = bytes(stop - start)
    Path(index.path).write_bytes(data)
    assert verify_checksum(index) is not None
    assert str(compute_checksum(index, known=sums.extents())) == index.attrs["crc_num"]


def test_of_a_file_that_is_written_only_the_header_is_read_again(tmp_path, monkeypatch):
    source = tmp_path / "src"
    for rank in range(2):
        (source / f"rank_{rank}").mkdir(parents=True)
        meta = TensorMeta("w", "Float32", (3 << 10, 1 << 10))
        create_file(get_format("ckpt"), str(source / f"rank_{rank}" / "n-1_1.ckpt"), [meta], {})
    item = {"w": {"dev_matrix": [2], "tensor_map": [-1, 0]}}
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": item}))
    read, add_extent = [], checksums._add_extent

    def noted(crc, file, path, extent, buffer):
        read.append(extent.nbytes)
        return add_extent(crc, file, path, extent, buffer)

    monkeypatch.setattr(checksums, "_add_extent", noted)
    words = ["merge", source, "-s", tmp_path / "s.json", "-o", tmp_path / "m.ckpt", "--crc"]
    run_well(*words)
    assert 0 < sum(read) < 1000
    monkeypatch.undo()
    assert verify_checksum(read_index(str(tmp_path / "m.ckpt"))) is None


# ------------------------------------------------------------------------ --crc


def test_a_checksum_is_not_that_of_several_files_together():
    source = BROKEN / "crc_damaged" / "src" / "rank_1" / "checkpoint-2_10.ckpt"
    catalog = ckpttool.scan(str(source))
    joined = replace(
        catalog,
        files={0: replace(catalog.files[0], files=(catalog.files[0].file, StoredFile("another")))},
    )
    assert [check_files(one, InlineExecutor(), crc=True)[0] == [] for one in (catalog, joined)] == [
        False,
        True,
    ]


# ------------------------------------------------------------------------ what cannot be


def test_hdf5_has_no_place_for_a_checksum():
    catalog = ckpttool.scan(str(SAMPLES / "files" / "crc.ckpt"))
    options = ckpttool.OutputOptions(crc=True)
    with pytest.raises(ckpttool.PlanError, match="HDF5 has no place"):
        plan_merge(catalog, None, "out.h5", output_options=options)


def test_a_parameter_that_takes_the_place_of_the_checksum_is_refused(tmp_path):
    (tmp_path / "net.ckpt").write_bytes(record("crc_num") + record("w"))
    words = ["merge", tmp_path / "net.ckpt", "--crc", "-o"]
    result = run(*words, tmp_path / "out.safetensors")
    assert result.exit_code == 5
    assert "crc_num: safetensors reserves this name" in told(result)
    run_well(*words, tmp_path / "out.ckpt")
    run_well(*words[:2], "-o", tmp_path / "out.safetensors")
    attrs = read_index(str(tmp_path / "out.safetensors")).attrs
    assert (attrs["format"], "crc_num" in attrs) == ("pt", False)


def test_memory_does_not_grow_with_the_file(tmp_path):
    import tracemalloc

    path = tmp_path / "net.ckpt"
    metas = [TensorMeta("w", "Int8", (32 << 20,))]
    index = create_file(get_format("ckpt"), str(path), metas, {"crc_num": ""})
    tracemalloc.start()
    try:
        compute_checksum(index)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * checksums.BUFFER_BYTES
