"""HDF5 files that others wrote with plain h5py: what is read, and what is refused with a remedy."""

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z

from ckpttool.formats import read_index
from ckpttool.formats.hdf5 import _TYPES, Hdf5
from ckpttool.model.tensors import PartlyReadError, StoredFile, TensorMeta
from ckpttool.problems import FormatError, UnsupportedError
from tests.support.commands import message, run, run_well
from tests.support.file_bytes import read_contents
from tests.support.pages import DOCS, python_block

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def read(tmp_path):
    def reader(fill, **how):
        path = tmp_path / "net.h5"
        with h5py.File(path, "w", **how) as file:
            fill(file)
        return Hdf5().read_index(StoredFile(str(path)))

    return reader


def put(**values):
    def fill(file):
        for name, value in values.items():
            file[name] = value

    return fill


# ------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("libver", ["earliest", "v108", "v110", "latest"])
def test_plain_datasets_are_read_in_every_version_of_the_file_format(read, libver):
    values = {"w": VALUES, "s": np.int64(5), "e": np.zeros((0, 3)), "b": np.array([True, False])}
    index = read(put(**values, text="Größe", c=np.array([1 + 2j])), libver=libver)
    assert {tensor.meta for tensor in index.tensors.values()} == {
        TensorMeta("w", "Float32", (3, 4)),
        TensorMeta("s", "Int64", ()),
        TensorMeta("e", "Float64", (0, 3)),
        TensorMeta("b", "Bool", (2,)),
        TensorMeta("text", "str", (), "Größe"),
        TensorMeta("c", "Complex128", (1,)),
    }
    contents = read_contents(index)
    for name, value in values.items():
        assert contents[name] == value.tobytes()


def test_groups_are_paths_and_empty_groups_nothing(read):
    def fill(file):
        file["a/b/c"] = VALUES
        file.create_group("empty/inside")

    assert list(read(fill).tensors) == ["a/b/c"]


def test_without_an_order_of_creation_names_come_in_order(read):
    assert list(read(put(b=VALUES, a=VALUES, c=VALUES)).tensors) == ["a", "b", "c"]
    assert list(read(put(b=VALUES, a=VALUES, c=VALUES), track_order=True).tensors) == [*"bac"]


def test_deep_groups_are_walked_without_recursion(read):
    name = "/".join("g" * 3000)
    assert list(read(put(**{name: VALUES})).tensors) == [name]


@pytest.mark.parametrize(
    "value",
    ["text", np.bytes_(b"text"), np.array("text", h5py.string_dtype("ascii", 10))],
    ids=["variable length", "fixed length", "fixed length, padded"],
)
def test_strings_of_every_kind_are_read(read, value):
    assert read(put(s=value)).tensors["s"].meta == TensorMeta("s", "str", (), "text")


def test_types_under_a_name_are_passed_over(read):
    assert list(read(put(t=np.dtype("f4"), w=VALUES)).tensors) == ["w"]


@pytest.mark.parametrize(
    ("stored", "value", "dtype"),
    [
        *(("u1", value, "UInt8") for value in ("Float32", 5, [1, 2], h5py.Empty("S3"), b"int4")),
        ("u1", np.bytes_(b"\xff"), "UInt8"),
        ("u1", np.bytes_(b"Int4"), "Int4"),
        ("i1", "Int4", "Int8"),
    ],
)
def test_an_attribute_names_the_type_of_bytes_if_there_is_such_a_type(read, stored, value, dtype):
    def fill(file):
        file["w"] = np.zeros(3, stored)
        file["w"].attrs["dtype"] = value

    assert read(fill).tensors["w"].meta.dtype == dtype


@pytest.mark.parametrize("value", [5, [1, 2], h5py.Empty("S3"), [b"a", b"b"]])
def test_attributes_of_the_file_are_no_harm(read, value):
    def fill(file):
        file["w"] = VALUES
        file.attrs["ckpttool.source"] = value
        file.attrs["crc_num"] = np.bytes_(b"5")
        file.attrs["ckpttool.step"] = np.bytes_(b"2_10")

    assert read(fill).attrs == {"ckpttool.step": "2_10"}


def test_attributes_may_be_of_any_length(read):
    def fill(file):
        file["w"] = VALUES
        file.attrs["ckpttool.source"] = "é" * 5000
        file.attrs["ckpttool.step"] = np.bytes_(b"2_10")

    assert read(fill).attrs == {"ckpttool.source": "é" * 5000, "ckpttool.step": "2_10"}


@pytest.mark.parametrize("at", [8, 24, 25])
def test_a_damaged_heap_of_strings_is_not_read(at, tmp_path):
    path = tmp_path / "net.h5"
    with h5py.File(path, "w") as file:
        file.attrs["ckpttool.step"] = "2_10"
        file["w"] = VALUES
    data = bytearray(path.read_bytes())
    data[data.index(b"GCOL") + at] ^= 0x81
    path.write_bytes(data)
    assert read_index(str(path)).attrs == {}


def test_an_empty_dataset_may_be_chunked(read):
    index = read(
        lambda file: file.create_dataset("w", shape=(0, 3), dtype="f8", maxshape=(None, 3))
    )
    assert index.tensors["w"].meta.shape == (0, 3)


# ------------------------------------------------------------------------ what is refused


def compact(file):
    options = h5p.create(h5p.DATASET_CREATE)
    options.set_layout(h5d.COMPACT)
    dataset = h5d.create(file.id, b"w", h5t.IEEE_F32LE, h5s.create_simple((3, 4)), options)
    dataset.write(h5s.ALL, h5s.ALL, VALUES)


def virtual(file):
    layout = h5py.VirtualLayout((3, 4), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "w", (3, 4))
    file.create_virtual_dataset("w", layout)


def raw(kind):
    return lambda file: h5d.create(file.id, b"w", kind, h5s.create_simple((3,)))


REPACK = "h5repack -l CONTI"
H5PY = "((?!h5repack -l).)*has lines of h5py; compare the number of tensors"


def filtered(code, data=VALUES, kind=h5t.IEEE_F32LE, name=b"w"):
    """A function that puts a dataset with a filter of this number, which may be unknown."""

    def fill(file):
        options = h5p.create(h5p.DATASET_CREATE)
        options.set_chunk(data.shape)
        options.set_filter(code, h5z.FLAG_OPTIONAL)
        dataset = h5d.create(file.id, name, kind, h5s.create_simple(data.shape), options)
        dataset.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(data), kind)

    return fill


def both(*fills):
    return lambda file: [fill(file) for fill in fills]


REFUSED = {
    "chunked": (lambda f: f.create_dataset("w", data=VALUES, chunks=(1, 4)), REPACK),
    "compressed": (lambda f: f.create_dataset("w", data=VALUES, compression="gzip"), REPACK),
    "checked sums": (lambda f: f.create_dataset("w", data=VALUES, fletcher32=True), REPACK),
    "fewer bits": (filtered(h5z.FILTER_NBIT), REPACK),
    "lzf": (lambda f: f.create_dataset("w", data=VALUES, compression="lzf"), f"lzf .32000.*{H5PY}"),
    "blosc": (filtered(32001), f"32001.*{H5PY}"),
    "unknown filter": (filtered(399), f"399.*{H5PY}"),
    "lzf of another dataset": (
        both(
            lambda f: f.create_dataset("w", data=VALUES, compression="gzip"),
            lambda f: f.create_dataset("x/y", data=VALUES, compression="lzf"),
        ),
        f"x/y has the filter lzf.*{H5PY}",
    ),
    "growing": (lambda f: f.create_dataset("w", data=VALUES, maxshape=(None, 4)), REPACK),
    "compact": (compact, REPACK),
    "virtual": (virtual, f"other.h5; {REPACK} FILE NEW.h5, if these files are there"),
    "virtual and lzf": (both(virtual, filtered(32000, name=b"x")), f"x has the filter .*{H5PY}"),
    "external": (
        lambda f: f.create_dataset("w", (4,), "f4", external=[("raw.bin", 0, 16)]),
        f"external file; {REPACK}",
    ),
    "never written": (lambda f: f.create_dataset("w", (4,), "f4"), "never written; .*; write"),
    "string never written": (lambda f: f.create_dataset("w", (), "S4"), "never written"),
    "big-endian": (put(w=VALUES.astype(">f4")), "big-endian; write .* in little-endian order"),
    "big-endian bytes": (raw(h5t.STD_I8BE), "big-endian"),
    "array of strings": (put(w=[b"a", b"b"]), "array of strings; write each string"),
    "one string in an array": (put(w=[b"a"]), "array of strings"),
    "nothing": (put(w=h5py.Empty("f4")), "H5S_NULL.*; write the dataset again"),
    "no string": (put(w=h5py.Empty(h5py.string_dtype())), "H5S_NULL"),
    "soft link": (put(v=VALUES, w=h5py.SoftLink("/v")), "soft or external link; h5repack --merge"),
    "external link": (put(w=h5py.ExternalLink("other.h5", "/w")), "soft or external link"),
    "long double": (
        put(w=np.zeros(3, np.longdouble)),
        "no such element type; HDF5 float of 16 bytes",
    ),
    "compound": (put(w=np.zeros(3, [("a", "i4"), ("b", "f4")])), "compound of 8 bytes"),
    "opaque": (put(w=np.zeros(3, "V5")), "no such element type; HDF5 opaque type of 5 bytes"),
    "time": (raw(h5t.UNIX_D32LE), "MindSpore has no such element type; .* of 4 bytes"),
    "bit field": (raw(h5t.STD_B8LE), "no such element type; HDF5 bit field of 1 bytes"),
    "lists": (lambda f: f.create_dataset("w", (2,), h5py.vlen_dtype("i4")), "no such element type"),
    "references": (lambda f: f.create_dataset("w", (2,), h5py.ref_dtype), "no such element type"),
    "enumeration": (
        lambda f: f.create_dataset("w", data=[1, 2], dtype=h5py.enum_dtype({"A": 1, "B": 2})),
        "enumeration of 1 bytes.*; write the dataset again",
    ),
}


@pytest.mark.parametrize(("fill", "reason"), REFUSED.values(), ids=REFUSED)
def test_legal_datasets_that_are_not_read_are_refused_with_the_remedy(read, fill, reason):
    with pytest.raises(UnsupportedError, match=rf"net\.h5: w: .*{reason}"):
        read(fill)


def test_what_else_a_file_holds_that_cannot_be_read_is_left_out_by_exclude(read, tmp_path):
    values = put(w=VALUES, mask=np.zeros(2, "V2"), more=np.zeros(2, "V2"))
    with pytest.raises(PartlyReadError, match=r"mask: .*; more: MindSpore has no"):
        read(values)
    words = "merge", tmp_path / "net.h5", "-o", tmp_path / "out.h5"
    assert "--exclude mask --exclude more" in message(refused := run(*words))
    assert refused.exit_code == 3
    refused = run(*words, "--exclude", "more")
    assert "or --exclude mask" in message(refused)
    left_out = run_well(*words, "--exclude", "m*")
    assert "HDF5 opaque type of 2 bytes" in message(left_out)
    assert list(read_index(str(tmp_path / "out.h5")).tensors) == ["w"]


def test_dimensions_of_netcdf_are_skipped_with_a_note(read, tmp_path):
    def fill(file):
        file["w"] = VALUES
        axis = file.create_dataset("axis", (3,), ">f4")
        text = b"This is a netCDF dimension but not a netCDF variable.         3"
        axis.attrs["NAME"] = np.bytes_(text)

    assert read(fill).skipped == ("axis",)
    inspected = message(run_well("inspect", tmp_path / "net.h5"))
    assert "1 netCDF dimension without values: ignored axis" in inspected


@pytest.mark.skipif(not hasattr(h5t, "COMPLEX_IEEE_F32LE"), reason="libhdf5 before 2.0")
def test_native_complex_numbers_of_hdf5_2_are_read(read):
    def fill(file):
        space = h5s.create_simple((2,))
        dataset = h5d.create(file.id, b"w", h5t.COMPLEX_IEEE_F32LE, space)
        dataset.write(h5s.ALL, h5s.ALL, data, h5t.COMPLEX_IEEE_F32LE)

    data = np.array([1 + 2j, 3 - 4j], np.complex64)
    index = read(fill, libver="latest")
    assert index.tensors["w"].meta == TensorMeta("w", "Complex64", (2,))
    assert read_contents(index)["w"] == data.tobytes()


def test_a_group_under_two_names_is_refused(read):
    def fill(file):
        file.create_group("g")["again"] = file["/"]

    with pytest.raises(UnsupportedError, match="g/again/: the same group has two names"):
        read(fill)


def test_names_and_strings_that_are_no_text_are_errors(read):
    with pytest.raises(FormatError, match="not UTF-8"):
        read(lambda file: file.create_dataset(b"\xff", data=VALUES))
    with pytest.raises(FormatError, match="decode"):
        read(put(s=np.bytes_(b"\xff")))


# ------------------------------------------------------------------- what the hint leads to


def every_bit_pattern(dtype, kind):
    data = np.arange(1 << 8 * np.dtype(dtype).itemsize).astype(dtype)
    return filtered(32000, data, _TYPES[kind], name=kind.encode())


def int4(file):
    file.create_dataset("i", data=np.arange(8, dtype="u1"), compression="lzf")
    file["i"].attrs["dtype"] = np.bytes_(b"Int4")


@pytest.mark.source
@pytest.mark.parametrize(
    "fill",
    [
        both(put(text="Größe", b=VALUES), filtered(32000)),
        lambda f: f.create_dataset("a/b/w", data=VALUES, compression="lzf", shuffle=True),
        every_bit_pattern("u1", "float8_e4m3"),
        both(every_bit_pattern("u2", "bfloat16"), every_bit_pattern("u1", "float8_e5m2"), int4),
    ],
)
def test_the_lines_of_h5py_keep_every_tensor_and_byte(tmp_path, monkeypatch, fill):
    lines = python_block(DOCS / "reference" / "messages.md", "h5py")
    monkeypatch.chdir(tmp_path)
    with h5py.File("chunked.h5", "w") as file:
        fill(file)
    exec(lines, {})
    index = read_index("NEW.h5")
    contents = read_contents(index)
    with h5py.File("chunked.h5") as file:
        names = list[str]()
        file.visititems(lambda n, one: names.append(n) if isinstance(one, h5py.Dataset) else None)
        assert index.tensors.keys() == {*names}
        for name, tensor in index.tensors.items():
            if tensor.meta.text is None:
                kind = file[name].id.get_type()
                data = np.empty(file[name].shape, f"V{kind.get_size()}")
                file[name].id.read(h5s.ALL, h5s.ALL, data, kind)
                assert contents[name] == data.tobytes()
    assert "UInt8" not in {tensor.meta.dtype for tensor in index.tensors.values()}
