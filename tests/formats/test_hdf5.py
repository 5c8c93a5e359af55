"""HDF5 as written: judged by h5py's high-level interface and by h5dump, byte by byte."""

import fcntl
import subprocess
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from ckpttool.formats.hdf5 import MAX_PATH_COMPONENT_BYTES, Hdf5, new_file
from ckpttool.formats.sandbox import Sandbox
from ckpttool.model.joining import join_alike
from ckpttool.model.tensors import TensorMeta
from tests.support.checkpoints import create_file
from tests.support.file_bytes import metas, write_contents
from tests.support.programs import need

FORMAT = Hdf5()


def create(tmp_path, tensors, name="net.h5"):
    return create_file(FORMAT, str(tmp_path / name), tensors, {})


def filled(tmp_path, contents):
    """A file with these contents: name -> dtype, shape, bytes, or a string."""
    tensors = [
        TensorMeta(name, "str", (), what)
        if isinstance(what, str)
        else TensorMeta(name, what[0], what[1])
        for name, what in contents.items()
    ]
    index = create(tmp_path, tensors)
    write_contents(index, {n: what[2] for n, what in contents.items() if not isinstance(what, str)})
    return index.path


def one(tmp_path, dtype, shape, data):
    with h5py.File(filled(tmp_path, {"w": (dtype, shape, data)})) as file:
        return file["w"][()]


# ------------------------------------------------------------------------ by h5py


def test_all_bfloat16_values_are_right(tmp_path):
    bits = np.arange(1 << 16, dtype="<u2")
    expected = (bits.astype("<u4") << 16).view("<f4")
    read = one(tmp_path, "BFloat16", (len(bits),), bits.tobytes())
    assert read.dtype == np.float32
    assert np.array_equal(read, expected, equal_nan=True)
    assert np.array_equal(np.signbit(read[expected == 0]), [False, True])


@pytest.mark.parametrize(("dtype", "exponent", "mantissa"), [
    ("Float8E4M3FN", 4, 3),
    ("Float8E5M2", 5, 2),
])  # fmt: skip
def test_float8_values_are_right_up_to_the_largest_exponent(dtype, exponent, mantissa, tmp_path):
    bits = np.arange(256, dtype=np.uint8)
    bits = bits[(bits >> mantissa) % (1 << exponent) != (1 << exponent) - 1]
    sign = np.where(bits >> 7, -1.0, 1.0)
    power = ((bits >> mantissa) % (1 << exponent)).astype(int)
    fraction = (bits % (1 << mantissa)) / (1 << mantissa)
    bias = (1 << (exponent - 1)) - 1
    expected = sign * np.where(
        power == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (power - bias)
    )
    read = one(tmp_path, dtype, (len(bits),), bits.tobytes())
    assert np.array_equal(read.astype(np.float64), expected)


def test_bool_is_numpys_bool(tmp_path):
    read = one(tmp_path, "Bool", (3,), b"\x01\x00\x01")
    assert read.dtype == np.bool_
    assert read.tolist() == [True, False, True]


@pytest.mark.parametrize("text", ["", "a", "Größe 𝄞", "line\nline", "x" * 70_000])
def test_strings_are_read_as_text(text, tmp_path):
    with h5py.File(filled(tmp_path, {"s": text})) as file:
        assert file["s"].asstr()[()] == text
        assert h5py.check_string_dtype(file["s"].dtype).encoding == "utf-8"


@pytest.mark.parametrize("dtype", ["HiFloat8", "Int4", "random_op"])
def test_types_unknown_to_hdf5_are_bytes_and_an_attribute(dtype, tmp_path):
    with h5py.File(filled(tmp_path, {"w": (dtype, (3,), b"\x01\x80\xff")})) as file:
        assert file["w"][()].tolist() == [1, 128, 255]
        assert file["w"].dtype == np.uint8
        assert file["w"].attrs["dtype"] in (dtype, dtype.encode())


def test_no_other_tensor_has_an_attribute(tmp_path):
    index = create(tmp_path, metas("hdf5"))
    with h5py.File(index.path) as file:
        named = {index.tensors[name].meta.dtype for name in index.tensors if file[name].attrs}
    assert named == {"HiFloat8", "Int4", "random_op"}


def test_parameters_come_back_in_the_order_given(tmp_path):
    names = ["z", "b/z", "b/a", "a", *(f"layer_{i}" for i in range(200))]
    created = create(tmp_path, [TensorMeta(name, "Int8", (2,)) for name in names])
    assert list(created.tensors) == names
    assert list(FORMAT.read_index(created.file).tensors) == names


def test_very_long_names_are_read_back_up_to_the_limit(tmp_path):
    for name in ("é" * (MAX_PATH_COMPONENT_BYTES // 2), "/".join(["n" * 50_000] * 5)):
        meta = TensorMeta(name, "Int8", (2,))
        assert not list(FORMAT.refusals([meta]))
        created = create(tmp_path, [meta, TensorMeta("other", "Int8", (3,))])
        assert dict(FORMAT.read_index(created.file).tensors) == dict(created.tensors)


# ------------------------------------------------------------------------ by h5dump


@pytest.fixture(scope="module")
def h5dump():
    need("h5dump")

    def dumped(*words):
        return subprocess.run(
            ["h5dump", *words], capture_output=True, check=True, encoding="utf-8"
        ).stdout

    return dumped


def test_h5dump_reads_every_type_and_shape(h5dump, tmp_path):
    tensors = metas("hdf5")
    text = h5dump("-H", create(tmp_path, tensors).path)
    assert text.count("DATASET ") == len(tensors)


@pytest.mark.parametrize(("dtype", "data", "printed"), [
    ("BFloat16", "803f20c0493f", "1, -2.5, 0.785156"),
    ("Float8E4M3FN", "38b844", "1, -1, 3"),
    ("Float8E5M2", "3cbc42", "1, -1, 3"),
    ("Float16", "003c00c10000", "1, -2.5, 0"),
    ("Float32", "0000803f000020c000000000", "1, -2.5, 0"),
    ("Int64", "0100000000000000ffffffffffffffff0500000000000000", "1, -1, 5"),
    ("UInt16", "0100ffff0500", "1, 65535, 5"),
    ("Bool", "010001", "TRUE, FALSE, TRUE"),
    ("HiFloat8", "0180ff", "1, 128, 255"),
])  # fmt: skip
def test_h5dump_prints_the_values(h5dump, dtype, data, printed, tmp_path):
    path = filled(tmp_path, {"w": (dtype, (3,), bytes.fromhex(data))})
    assert printed in h5dump("-d", "/w", "-y", path)


def test_h5dump_and_h5py_read_how_the_file_was_made(h5dump, tmp_path):
    attrs = {"ckpttool.source": "Ränge", "ckpttool.version": "0.1.0", "format": "pt"}
    created = create_file(FORMAT, str(tmp_path / "net.h5"), [TensorMeta("w", "Int8", (2,))], attrs)
    del attrs["format"]  # it is of safetensors
    text = h5dump("-A", created.path)
    assert text.count("ATTRIBUTE") == 2
    assert 'ATTRIBUTE "ckpttool.source"' in text
    assert '(0): "0.1.0"' in text
    with h5py.File(created.path) as file:
        assert dict(file.attrs) == attrs
    assert FORMAT.read_index(created.file).attrs == attrs
    with Sandbox() as sandbox:
        assert sandbox.read_index(created.file).attrs == attrs


# ------------------------------------------------------------------------ same bytes, few reads


def test_the_same_tensors_give_the_same_bytes_at_another_time(tmp_path):
    tensors = [*metas("hdf5"), TensorMeta("group/sub/w", "Int8", (2,))]
    first = Path(create(tmp_path, tensors, "a.h5").path).read_bytes()
    now = time.time()
    while int(time.time()) == int(now):  # HDF5 keeps times in whole seconds
        time.sleep(0.05)
    assert Path(create(tmp_path, tensors, "b.h5").path).read_bytes() == first


def test_creating_writes_headers_only(tmp_path):
    index = create(tmp_path, [TensorMeta("w", "Float32", (1 << 14, 1 << 14))])
    assert index.nbytes > 1 << 30
    assert Path(index.path).stat().st_blocks * 512 < 1 << 20


def test_libhdf5_locks_no_new_file_as_some_systems_have_no_locks(tmp_path):
    path = tmp_path / "a.h5"
    with path.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert new_file(str(path)).valid  # a lock would end here: somebody else has it


# ------------------------------------------------------------------------ what cannot be written


@pytest.mark.parametrize("name", ["", "/", "/a", "a/", "a//b", ".", "a/./b", "a\0b"])
def test_names_that_are_no_path_are_refused(name):
    (refusal,) = FORMAT.refusals([TensorMeta(name, "Int8", (1,))])
    assert refusal.fact == f"{name or repr('')}: HDF5 cannot keep this name exactly"
    assert refusal.tensor == name


def test_names_beyond_the_limit_are_refused():
    name = "n" * (MAX_PATH_COMPONENT_BYTES + 1)
    assert len(list(FORMAT.refusals([TensorMeta(name, "Int8", (1,))]))) == 1


def test_a_name_inside_another_is_refused():
    tensors = [TensorMeta(name, "Int8", (1,)) for name in ("a/b/c", "a/b", "a.b")]
    (refusal,) = FORMAT.refusals(tensors)
    assert refusal.fact == "a/b/c: HDF5 cannot hold it beside a tensor a/b"


def test_strings_with_nul_and_tensors_of_many_axes_are_refused():
    (refusal,) = FORMAT.refusals([TensorMeta("s", "str", (), "a\0b")])
    assert "cannot hold NUL" in refusal.message
    assert not list(FORMAT.refusals([TensorMeta("w", "Int8", (1,) * 32)]))
    (refusal,) = FORMAT.refusals([TensorMeta("w", "Int8", (1,) * 33)])
    assert refusal.fact == "w: 33 axes; HDF5 has at most 32"


def test_many_tensors_with_the_same_problem_are_one_refusal():
    metas = [TensorMeta(f"w{i}", "Int8", (1,) * 33) for i in range(100)]
    refusals = list(FORMAT.refusals(metas))
    assert [refusal.tensor for refusal in refusals] == [meta.name for meta in metas]
    (joined,) = join_alike(refusals)
    assert joined.fact == "33 axes; HDF5 has at most 32: 100 tensors"
