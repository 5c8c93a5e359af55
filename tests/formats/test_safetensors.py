"""Safetensors, against files that MindSpore wrote and headers spelled by hand."""

import json
from pathlib import Path

import pytest

from ckpttool.formats import safetensors as module
from ckpttool.formats.safetensors import Safetensors
from ckpttool.model.dtypes import DTYPES
from ckpttool.model.tensors import Extent, StoredFile, TensorMeta
from ckpttool.problems import FormatError
from tests.support.checkpoints import create_file
from tests.support.corpus import GOLDEN
from tests.support.file_bytes import entry, metas, read_contents, safetensors, write_contents

FORMAT = Safetensors()
OTHERWISE = {"crc_num", "remove_redundancy"}  # see the tests; without them metadata has one entry


@pytest.fixture
def write(tmp_path):
    def written(header, data=b"", length=None):
        path = tmp_path / "net.safetensors"
        path.write_bytes(safetensors(header, data, length))
        return str(path)

    return written


def read(path):
    return FORMAT.read_index(StoredFile(str(path)))


def create(tmp_path, tensors):
    return create_file(FORMAT, str(tmp_path / "net.safetensors"), tensors, {})


def header_of(path):
    data = Path(path).read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


# -------------------------------------------------------------- byte for byte as MindSpore


def test_every_golden_file_is_written_again_byte_for_byte(tmp_path):
    same = otherwise = 0
    for path in sorted(GOLDEN.rglob("*.safetensors")):
        index = read(path)
        again = create(tmp_path, [tensor.meta for tensor in index.tensors.values()])
        write_contents(again, read_contents(index))
        is_of_others = "hyper_parallel" in path.parts  # its own writer orders tensors otherwise
        if OTHERWISE & index.attrs.keys() or is_of_others:
            assert header_of(again.path).keys() - {"__metadata__"} == index.tensors.keys()
            otherwise += 1
        else:
            assert Path(again.path).read_bytes() == path.read_bytes(), path
            same += 1
    assert same > 80
    assert otherwise > 5


def test_int4_is_int8_with_a_note(tmp_path):
    index = create(tmp_path, [TensorMeta("b", "Int4", (3,)), TensorMeta("a", "Int8", (2,))])
    assert header_of(index.path) == {
        "__metadata__": {"b": "Int4", "format": "ms"},
        "a": entry("I8", [2], 0, 2),
        "b": entry("I8", [3], 2, 5),
    }
    assert read(index.path).tensors["b"].meta.dtype == "Int4"
    assert read(index.path).tensors["a"].meta.dtype == "Int8"
    assert read(index.path).attrs == {"format": "ms"}


def test_contents_begin_at_a_multiple_of_eight(tmp_path):
    for length in range(1, 20):
        index = create(tmp_path, [TensorMeta("n" * length, "Int8", (1,))])
        (extent,) = index.tensors["n" * length].extents
        assert extent.offset % 8 == 0


def test_large_elements_come_first_and_names_in_order(tmp_path):
    tensors = metas("safetensors")
    index = create(tmp_path, tensors)
    sizes = [tensor.meta.itemsize for tensor in index.tensors.values()]
    assert sizes == sorted(sizes, reverse=True)
    assert list(header_of(index.path)) == ["__metadata__", *index.tensors]
    for dtype in DTYPES:
        names = [name for name, t in index.tensors.items() if t.meta.dtype == dtype]
        assert names == sorted(names)
    spans = [e["data_offsets"] for n, e in header_of(index.path).items() if n != "__metadata__"]
    ends = [0, *(end for _, end in spans)]
    assert [begin for begin, _ in spans] == ends[:-1]


def test_names_in_the_header_are_spelled_as_the_safetensors_library_spells_them(tmp_path):
    names = ["重み", 'a"b\\c', "a\n\t\x01\x7f"]
    index = create(tmp_path, [TensorMeta(name, "Int8", (1,)) for name in names])
    text = Path(index.path).read_bytes()
    assert '"重み":{"dtype":"I8","shape":[1],"data_offsets":'.encode() in text
    assert rb'"a\"b\\c":{' in text
    assert b'"a\\n\\t\\u0001\x7f":{' in text


def test_a_tensor_called_format_displaces_the_mark(tmp_path):
    index = create(tmp_path, [TensorMeta("format", "Float32", (1,))])
    assert header_of(index.path)["__metadata__"] == {}
    assert list(read(index.path).tensors) == ["format"]


def test_an_attribute_with_the_name_of_a_tensor_is_not_written(tmp_path):
    tensors = [TensorMeta("ckpttool.step", "Int4", (2,)), TensorMeta("ckpttool.source", "Int8", ())]
    attrs = {f"ckpttool.{key}": "x" for key in ("step", "source", "version")}
    index = create_file(FORMAT, str(tmp_path / "net.safetensors"), tensors, attrs)
    assert header_of(index.path)["__metadata__"] == {
        "ckpttool.step": "Int4",
        "ckpttool.version": "x",
        "format": "ms",
    }
    assert index.nbytes == FORMAT.file_bytes(tensors, attrs)
    assert read(index.path).attrs == {"ckpttool.version": "x", "format": "ms"}


@pytest.mark.parametrize("dtype", ["Complex128", "HiFloat8", "random_op"])
def test_types_without_a_word_are_refused(dtype):
    (refusal,) = FORMAT.refusals([TensorMeta("w", dtype, (1,)), TensorMeta("v", "Int8", (1,))])
    assert refusal.fact == f"w: safetensors cannot hold {dtype}"


def test_strings_and_the_name_of_the_metadata_are_refused():
    text = TensorMeta("s", "str", (), "a")
    assert next(FORMAT.refusals([text])).fact == "s: safetensors cannot hold str"
    name = TensorMeta("__metadata__", "Int8", (1,))
    assert "safetensors reserves this name" in next(FORMAT.refusals([name])).message


@pytest.mark.parametrize("name", ["tensor_{}", "重\n{}"])
def test_the_largest_header_that_is_written_is_read_and_a_larger_one_is_refused(
    tmp_path, monkeypatch, name
):
    tensors = [TensorMeta(name.format(i), "Int8", (1,)) for i in range(10)]
    index = create(tmp_path, tensors)
    limit = int.from_bytes(Path(index.path).read_bytes()[:8], "little")
    monkeypatch.setattr(module, "MAX_HEADER_BYTES", limit)
    assert not list(FORMAT.refusals(tensors))
    assert list(read(create(tmp_path, tensors).path).tensors) == [meta.name for meta in tensors]
    (refusal,) = FORMAT.refusals([*tensors, TensorMeta("one_more", "Int8", (1,))])
    assert refusal.message == "too many tensors for one safetensors file"
    assert refusal.facts.endswith(f"at most {limit} are read")


# ------------------------------------------------------------------------ what is read


def test_tensors_may_be_listed_in_any_order(write):
    index = read(write({"b": entry("U8", [2], 4, 6), "a": entry("F32", [], 0, 4)}, b"abcdef"))
    assert index.tensors["b"].meta == TensorMeta("b", "UInt8", (2,))
    assert index.tensors["a"].meta.shape == ()
    assert read_contents(index) == {"b": b"ef", "a": b"abcd"}
    assert list(index.tensors) == ["b", "a"]


def test_empty_tensors_are_read_wherever_they_are_said_to_be(write):
    header = {
        "e": entry("F32", [0, 3], 0, 0),
        "a": entry("I8", [2], 0, 2),
        "z": entry("I8", [0], 2, 2),
    }
    index = read(write(header, b"ab"))
    assert [tensor.extents for tensor in index.tensors.values()] == [
        (),
        (Extent(index.nbytes - 2, 2),),
        (),
    ]


def test_a_file_that_holds_nothing_is_read(write):
    assert not read(write(b"{}      ")).tensors  # a rank that keeps nothing, from MindSpore
    assert not read(write({"__metadata__": {"format": "ms"}})).tensors
    assert not read(write({"__metadata__": None})).attrs


def test_metadata_is_kept(write):
    index = read(write({"__metadata__": {"format": "pt", "crc_num": "5", "x": ""}}))
    assert index.attrs == {"format": "pt", "crc_num": "5", "x": ""}
    path = GOLDEN / "safetensors_remove_redundancy" / "src" / "rank_0"
    assert read(next(path.iterdir())).attrs["remove_redundancy"] == "True"


def test_unknown_keys_of_an_entry_are_no_harm(write):
    assert read(write({"a": entry("I8", [1], 0, 1) | {"more": [1.5, None]}}, b"a")).tensors


# ------------------------------------------------------------------------ what is refused

A = entry("F32", [2], 0, 8)
REFUSED = {
    "overlap": ({"a": A, "b": entry("F32", [2], 4, 12)}, 12, "b: its bytes overlap others"),
    "the same bytes": ({"a": A, "b": A}, 8, "b: its bytes overlap"),
    "gap": ({"a": A, "b": entry("F32", [1], 12, 16)}, 16, "b: a gap lies before its bytes"),
    "gap at the start": ({"a": entry("F32", [1], 4, 8)}, 8, "a: a gap lies before"),
    "bytes behind": ({"a": A}, 9, "the file is longer than its header says"),
    "bytes behind nothing": ({}, 1, "longer .*; 10 bytes by the header, 11 in the file"),
    "cut short": ({"a": A}, 7, "shorter than its header says"),
    "far away": ({"a": entry("F32", [2], 2**63, 2**63 + 8)}, 8, "a: a gap lies before"),
    "larger than its span": ({"a": entry("F32", [3], 0, 8)}, 8, "needs 12 bytes"),
    "bool of two bytes": ({"a": entry("BOOL", [4], 0, 8)}, 8, r"\[4\] of BOOL needs 4 bytes"),
    "turned round": ({"a": entry("F32", [2], 8, 0)}, 8, "are not a begin and an end"),
    "one offset": ({"a": A | {"data_offsets": [0]}}, 8, "are not a begin and an end"),
    "fractions": ({"a": A | {"data_offsets": [0, 8.0]}}, 8, "are not a begin and an end"),
    "infinity": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,1e999]}}', 8, "not a begin"),
    "negative offset": ({"a": A | {"data_offsets": [-8, 0]}}, 8, "are not a begin and an end"),
    "truth as a number": ({"a": A | {"shape": [True, 2]}}, 8, "not a list of sizes"),
    "negative size": ({"a": A | {"shape": [-2]}}, 8, "not a list of sizes"),
    "size of 64 bits": ({"a": entry("F32", [2**63, 0], 0, 0)}, 8, "not a list of sizes"),
    "no shape": (
        {"a": {"dtype": "F32", "data_offsets": [0, 8]}},
        8,
        "shape is not a list of sizes; None",
    ),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, 8, "data_offsets are not .*; None"),
    "no type": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, 8, "unknown dtype None"),
    "unknown type": ({"a": A | {"dtype": "F7"}}, 8, "unknown dtype 'F7'"),
    "type a list": ({"a": A | {"dtype": ["F32"]}}, 8, "unknown dtype"),
    "entry a list": ({"a": [1, 2]}, 8, "a: its header entry is not a JSON object"),
    "metadata a list": ({"__metadata__": ["format"]}, 0, "does not map strings to strings"),
    "metadata of objects": ({"__metadata__": {"a": {}}}, 0, "does not map strings"),
    "metadata of null": ({"__metadata__": {"a": None}}, 0, "does not map strings"),
    "half a byte": ({"w": entry("F4", [3, 3], 0, 5)}, 5, "w: its elements do not fill whole bytes"),
    "quarters": ({"w": entry("F6_E3M2", [6], 0, 5)}, 5, "do not fill whole bytes"),
    "short": ({"w": entry("F6_E3M2", [8], 0, 8)}, 8, r"\[8\] of F6_E3M2 needs 6 bytes"),
    "as bytes": ({"w": entry("F4", [8], 0, 8)}, 8, r"\[8\] of F4 needs 4 bytes"),
    "wide": ({"w": entry("F8_E5M2FNUZ", [8], 0, 16)}, 16, "needs 8 bytes"),
    "metadata of numbers": ({"__metadata__": {"crc_num": 5}}, 0, "does not map strings"),
    "no object": (b"[]", 0, "not a JSON object"),
    "no JSON": (b'{"a":', 0, "not valid JSON"),
    "not UTF-8": (b'{"\xff": 1}', 0, "not valid JSON"),
    "byte order mark": (b"\xef\xbb\xbf{}", 0, "not valid JSON"),
    "half a character": (rb'{"\ud800": 1}', 0, "not valid JSON"),
    "stored twice": (b'{"a": 1, "a": 2}', 0, "a: stored twice; nothing shows which one"),
    "deep": (b'{"a":' + b"[" * 200_000, 0, "nested too deep"),
    "many digits": (b'{"a":' + b"9" * 5000 + b"}", 0, "digits"),
}


@pytest.mark.parametrize(("header", "nbytes", "reason"), REFUSED.values(), ids=REFUSED)
def test_headers_that_make_no_sense_are_errors(write, header, nbytes, reason):
    with pytest.raises(FormatError, match=reason):
        read(write(header, bytes(nbytes)))


@pytest.mark.parametrize("length", [3, 1000, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
def test_header_lengths_beyond_the_file_lead_to_no_allocation(write, length):
    with pytest.raises(FormatError, match=rf"header.* {length}\b"):
        read(write(b"{}", length=length))


@pytest.mark.parametrize("nbytes", range(8))
def test_files_without_room_for_a_header_length_are_errors(tmp_path, nbytes):
    path = tmp_path / "net.safetensors"
    path.write_bytes(bytes(nbytes))
    with pytest.raises(FormatError, match=f"not a safetensors file: .*file of {nbytes} bytes"):
        read(path)
