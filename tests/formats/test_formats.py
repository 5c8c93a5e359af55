"""What all formats have in common: created headers, and finding out which format a file has."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ckpttool.formats import (
    FORMATS,
    ckpt,
    format_of_content,
    format_of_suffix,
    get_format,
    read_index,
    suffix_of,
)
from ckpttool.formats.strict_json import parse_json, to_json
from ckpttool.model.dtypes import DTYPES
from ckpttool.model.manifest import TensorEntry
from ckpttool.model.tensors import MAX_AXES, StoredFile, TensorMeta
from ckpttool.problems import FormatError, UnsupportedError
from ckpttool.storage.region_io import FlatFiles
from tests.strategies import examples
from tests.support.checkpoints import create_file
from tests.support.file_bytes import (
    content,
    entry,
    map_record,
    metas,
    read_contents,
    record,
    safetensors,
    strategy,
    write_contents,
)
from tests.support.readers import read

NAMES = (
    "w",
    "backbone.layers.0.attention.weight",
    "group/sub.group/weight",
    "1-x-2",
    "重み.ω",
    " leading and trailing ",
    "..",
    "a\nb\t\x7f",
    '"quoted" \\ {name}',
    "n" * 4000,
    "format",
)


def create(format, tmp_path, tensors):
    path = tmp_path / f"file{suffix_of(format)}"
    return create_file(get_format(format), str(path), tensors, {})


def assert_same_header(read_back, created):
    assert dict(read_back.tensors) == dict(created.tensors)
    assert list(read_back.tensors) == list(created.tensors)
    assert (read_back.format, read_back.nbytes) == (created.format, created.nbytes)


@pytest.mark.parametrize("format", FORMATS)
def test_every_name_is_read_back_as_created(format, tmp_path):
    tensors = [TensorMeta(name, "Float32", (i + 1,)) for i, name in enumerate(NAMES)]
    assert not list(get_format(format).refusals(tensors))
    created = create(format, tmp_path, tensors)
    assert set(created.tensors) == set(NAMES)
    assert_same_header(read_index(created.path), created)


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_written_are_the_bytes_read_by_anyone(format, tmp_path):
    index = create(format, tmp_path, metas(format))
    expected = {name: content(tensor) for name, tensor in index.tensors.items()}
    with FlatFiles(1 << 20) as files:
        for name, tensor in index.tensors.items():
            if tensor.extents:
                data = np.frombuffer(expected[name], np.uint8)
                files.write_bytes(tensor, 0, data.data)
        for name, tensor in index.tensors.items():
            out = np.empty(tensor.meta.nbytes, np.uint8)
            if tensor.extents:
                files.read_bytes(tensor, 0, out.data)
                assert out.tobytes() == expected[name]
    path = tmp_path / f"file{suffix_of(format)}"
    assert path.stat().st_size == index.nbytes
    by_others = read(path)
    assert set(by_others) == set(index.tensors)
    for name, tensor in index.tensors.items():
        entry, meta = by_others[name], tensor.meta
        if meta.text is not None:
            assert (entry.dtype, entry.data.decode("utf-32-le").rstrip("\0")) == ("str", meta.text)
        else:
            assert (entry.dtype, entry.shape, entry.data) == (
                meta.dtype,
                meta.shape,
                expected[name],
            )


@pytest.mark.parametrize("format", FORMATS)
def test_creating_replaces_a_longer_file(format, tmp_path):
    long = create(format, tmp_path, [TensorMeta("long", "Int8", (100_000,))])
    write_contents(long, {"long": b"\xff" * 100_000})
    short = create(format, tmp_path, [TensorMeta("s", "Int8", (10,))])
    assert read_contents(read_index(short.path)) == {"s": bytes(10)}


@pytest.mark.parametrize("format", FORMATS)
def test_contents_are_not_read(format, tmp_path):
    tensors = [TensorMeta(f"layer_{i}.w", "Float32", (1 << 14, 1 << 14)) for i in range(20)]
    created = create(format, tmp_path, tensors)
    assert created.nbytes > 20 << 30
    file = StoredFile(created.path)
    before = Path("/proc/self/io").read_text().split()
    index = get_format(format).read_index(file)
    after = Path("/proc/self/io").read_text().split()
    assert dict(index.tensors) == dict(created.tensors)
    assert int(after[1]) - int(before[1]) < 1 << 18  # in two records each of a .ckpt
    assert Path(created.path).stat().st_blocks * 512 < 1 << 20


TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=30).filter(
        lambda name: name not in (".", "__metadata__")
    ),
    st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=5)),
    max_size=8,
)


@pytest.mark.parametrize("format", FORMATS)
@settings(examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TENSORS)
def test_any_tensors_are_read_back_as_created(format, tmp_path, tensors):
    given = [TensorMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()]
    given = [meta for meta in given if not list(get_format(format).refusals([meta]))]
    created = create(format, tmp_path, given)
    assert_same_header(read_index(created.path), created)


# ------------------------------------------------------------------- which format a file has


@pytest.mark.parametrize("format", ["hdf5", "safetensors"])
def test_content_decides_before_the_name(format, tmp_path):
    index = create(format, tmp_path, metas(format))
    for name in ("net.ckpt", "net.h5", "net.safetensors", "net"):
        path = tmp_path / name
        path.write_bytes((tmp_path / f"file{suffix_of(format)}").read_bytes())
        assert read_index(str(path)).format == format
        assert format_of_content(str(path)) == format
        found = read_index(str(path)).tensors
        assert {
            name: replace(one, file=replace(one.file, path=index.path))
            for name, one in found.items()
        } == index.tensors


def test_a_ckpt_is_known_by_its_name_or_its_first_byte(tmp_path):
    for name in ("net.ckpt", "net.CKPT", "net", "net.bin"):
        (tmp_path / name).write_bytes(record())
        assert read_index(str(tmp_path / name)).format == "ckpt"
        assert format_of_content(str(tmp_path / name)) is None


@pytest.mark.parametrize("offset", [512, 1024, 2048, 65536])
def test_hdf5_behind_a_user_block_is_found(offset, tmp_path):

    path = tmp_path / "net.ckpt"
    with h5py.File(path, "w", userblock_size=offset) as file:
        file["w"] = [1.5, 2.5]
    path.write_bytes(b"\n" * offset + path.read_bytes()[offset:])
    index = read_index(str(path))
    assert index.format == "hdf5"
    assert read_contents(index)["w"] == bytes.fromhex("000000000000f83f0000000000000440")


def test_suffixes_name_formats():
    assert {suffix_of(name) for name in FORMATS} == {".h5", ".ckpt", ".safetensors"}
    assert format_of_suffix("a/b.hdf5") == format_of_suffix("b.H5") == "hdf5"
    assert format_of_suffix("a.ckpt.tmp") is None
    assert format_of_suffix("net.h5.partial") is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"some text\n", "a text file, not a MindSpore checkpoint"),
        (b"{}", "a JSON document, not a MindSpore checkpoint"),
        (b'{"digest": "sha256:00"}', "a card, not a MindSpore checkpoint"),
        (bytes(100), r"not a \.ckpt, \.safetensors or HDF5 file"),
    ],
)
def test_other_files_are_no_checkpoint(data, reason, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=reason):
        read_index(str(path))


def test_weights_that_keras_saved_are_read(tmp_path):
    with h5py.File(tmp_path / "keras.h5", "w") as file:
        file["model_weights/dense/kernel:0"] = np.zeros(3, "<f4")
        file.attrs["keras_version"] = "2.4.0"
    assert list(read_index(str(tmp_path / "keras.h5")).tensors) == ["model_weights/dense/kernel:0"]


@pytest.mark.parametrize("name", ["net.h5", "net.safetensors"])
@pytest.mark.parametrize("data", [b"", b"\n", record(), b"\x89HDF", strategy(), bytes(1000)])
def test_a_name_that_promises_too_much_is_an_error(name, data, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(FormatError):
        read_index(str(tmp_path / name))


def test_a_strategy_file_is_no_checkpoint_and_is_told_to_be_one(tmp_path):
    (tmp_path / "s.ckpt").write_bytes(strategy())
    with pytest.raises(FormatError, match=r"not a .ckpt file; expected a record, found the number"):
        read_index(str(tmp_path / "s.ckpt"))


# ------------------------------------------------------------------------------ strict JSON


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b"1" * 5000, "^a number of more than 4300 digits$"),
        (rb'{"\ud800": 1}', "half of a character"),
        (rb'{"a": "\uDFFF"}', "half of a character"),
        (b'{"a": {"b": 1, "b": 2}}', "b: stored twice"),
        (rb'{"a": 1, "\u0061": 2}', "a: stored twice"),
    ],
)
def test_json_with_a_second_meaning_is_refused(data, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(data)


def test_json_characters_beyond_the_first_plane_are_text():
    assert parse_json(rb'{"\ud834\udd1e": "\ud834\udd1e"}') == {"𝄞": "𝄞"}


@pytest.mark.parametrize("name", ["", *map(chr, range(128)), "ü", "\u2028", "𝄞", ', ": {}[]\\'])
def test_json_of_records_is_that_of_the_standard_library(name):
    entries = [
        TensorEntry(name, "Int8", shape, ("ab",) * len(shape)) for shape in ((), (0, 1 << 62))
    ]
    named = [
        {one: getattr(entry, one) for one in TensorEntry.__struct_fields__} for entry in entries
    ]
    assert to_json(entries) == json.dumps(named).encode()


def test_many_names_in_json_are_compared_in_no_time():
    names = ",".join(f'"{i}": 0' for i in range(200_000))
    with pytest.raises(ValueError, match="199999: stored twice"):
        parse_json(f'{{{names}, "199999": 0}}'.encode())


def test_the_ckpt_format_has_the_slice_size_of_mindspore():
    assert ckpt.MAX_RECORD_BYTES == 536_870_912


@pytest.mark.parametrize("size", [1, 1 << 62])
@pytest.mark.parametrize("axes", [MAX_AXES + 1, 1000])
def test_a_tensor_of_more_axes_than_arrays_have_is_unsupported_or_kept_whole(tmp_path, axes, size):
    dims = (size,) * axes
    tensor = ("int32", dims, bytes(4))
    files = {
        "record.ckpt": record("w", "Float32", dims, bytes(4)),
        "map.ckpt": map_record("w", tensor, tensor, tensor),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(UnsupportedError, match=f"w.*: more than {MAX_AXES} axes; {axes} axes"):
            read_index(str(tmp_path / name))
    path = tmp_path / "plain.safetensors"
    path.write_bytes(safetensors({"w": entry("F32", list(dims), 0, 4)}, bytes(4)))
    if size == 1:
        meta = read_index(str(path)).tensors["w"].meta
        assert (meta.shape, meta.header_shape) == ((1,), dims)
    else:
        with pytest.raises(FormatError, match="needs more than 2\\*\\*63 bytes"):
            read_index(str(path))


def test_as_many_axes_as_arrays_have_are_read(tmp_path):
    for name, data in {
        "a.ckpt": record("w", "Float32", (1,) * MAX_AXES, bytes(4)),
        "a.safetensors": safetensors({"w": entry("F32", [1] * MAX_AXES, 0, 4)}, bytes(4)),
    }.items():
        (tmp_path / name).write_bytes(data)
        index = read_index(str(tmp_path / name))
        assert index.tensors["w"].meta.shape == (1,) * MAX_AXES
