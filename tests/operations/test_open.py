"""A checkpoint opened like one file: what it reads is what merge and reshard write."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import ModuleType

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import basic_indices
from msgspec.structs import replace

import ckpttool
from ckpttool.model.layout import Layout
from tests.strategies import examples
from tests.support.checkpoints import cut, noise, strategy_of, write_file, write_ranks
from tests.support.commands import run_well
from tests.support.corpus import GOLDEN
from tests.support.damage import flip_byte
from tests.support.readers import Entry, rank_file, read, read_ranks

CASE = GOLDEN / "tutorial_8_to_8_retrain"
SRC, STRATEGY, TARGET = (CASE / name for name in ("src", "src_strategy.ckpt", "dst_strategy.ckpt"))
CASES = ["bfloat16_model", "pipeline_8_to_2x4", "optshard_size2_adam_8_to_4", "moe_ep4_mp2"]
COLUMNS = Layout((4,), ((), (0,)))


def whole(entry):
    array = entry.array()
    if entry.dtype == "BFloat16":
        return (array.astype("u4") << 16).view("f4")
    return array


@pytest.fixture
def columns(tmp_path):
    def make(dtype="Float32", shape=(6, 8), **options):
        full = {"w": noise("w", dtype, shape)}
        strategy = replace(strategy_of({"w": COLUMNS}), files=())
        write_ranks(tmp_path / "src", cut(full, strategy), "ckpt")
        return full["w"], ckpttool.open(tmp_path / "src", strategy, **options)

    return make


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_is_what_merge_writes(case, tmp_path):
    folder = GOLDEN / case
    words = [folder / "src", "-s", folder / "src_strategy.ckpt"]
    run_well("merge", *words, "-o", tmp_path / "m.ckpt")
    merged = read(tmp_path / "m.ckpt")
    with ckpttool.open(words[0], words[2]) as opened:
        assert [*opened] == [*merged]
        for name, entry in merged.items():
            assert opened[name].shape == entry.shape
            assert opened[name].stored_dtype == entry.dtype
            np.testing.assert_array_equal(np.asarray(opened[name]), whole(entry))


def test_with_a_target_it_is_the_slices_that_reshard_writes(tmp_path):
    words = [SRC, "-s", STRATEGY, "-d", TARGET, "--format", "ckpt"]
    run_well("reshard", *words, "-o", tmp_path / "out")
    for rank, written in read_ranks(tmp_path / "out").items():
        opened = ckpttool.open(SRC, STRATEGY, target=TARGET, rank=rank)
        assert [*opened] == [*written]
        for name, entry in written.items():
            np.testing.assert_array_equal(opened.get_tensor(name), entry.array())


@cache
def of_shape(folder, shape):
    entries = {name: noise(name, "Int16", size) for name, size in (("w", shape), ("b", (1,)))}
    path = folder / f"{'x'.join(map(str, shape)) or 'scalar'}.safetensors"
    write_file(path, entries, "safetensors")
    return ckpttool.open(path)["w"], entries["w"].array()


@examples(300)
@given(st.data(), st.sampled_from([(), (7,), (5, 0, 2), (6, 4), (3, 5, 4), (2, 3, 2, 5)]))
def test_it_is_indexed_as_numpy_indexes(tmp_path_factory, data, shape):
    tensor, array = of_shape(tmp_path_factory.getbasetemp(), shape)
    index = data.draw(basic_indices(shape, allow_newaxis=True))
    got, expected = tensor[index], array[index]
    assert got.shape == np.shape(expected)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("index", [9, -7, (0, 8), (0, 0, 0), (..., ...), True])
def test_an_index_out_of_range_is_an_index_error(columns, index):
    with pytest.raises(IndexError):
        columns()[1]["w"][index]


@pytest.mark.parametrize("index", ["w", 1.5, np.bool_(True), (0, {})])
def test_what_is_no_index_is_an_index_error(columns, index):
    with pytest.raises(IndexError, match="an index is an integer, a slice, a list, a mask"):
        columns()[1]["w"][index]


LISTS = [([0, 1], [0]), [0, 99], [-100], [[0]], [0.5], [True], (0, [True, False])]


@pytest.mark.parametrize("index", LISTS, ids=str)
def test_a_list_that_fits_no_axis_is_an_index_error(columns, index):
    with pytest.raises(IndexError, match=r"expected|out of bounds"):
        columns()[1]["w"][index]


@examples(100)
@given(st.data(), st.sampled_from([(7,), (6, 4), (3, 5, 4), (3, 700), (5, 3000)]))
def test_lists_and_masks_are_taken_along_one_axis(tmp_path_factory, data, shape):
    tensor, array = of_shape(tmp_path_factory.getbasetemp(), shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    size = shape[axis]
    few = st.lists(st.integers(-size, size - 1), max_size=12)
    chosen = data.draw(few | st.lists(st.booleans(), min_size=size, max_size=size))
    index = [data.draw(basic_indices((n,), allow_ellipsis=False, max_dims=1)) for n in shape]
    index = [part[0] if isinstance(part, tuple) and part else part for part in index]
    index = [slice(None) if part == () else part for part in index]
    taken = np.flatnonzero(chosen) if [*map(type, chosen)][:1] == [bool] else np.array(chosen, int)
    expected = array.take(taken, axis)[(*index[:axis], slice(None), *index[axis + 1 :])]
    index[axis] = chosen if data.draw(st.booleans()) or not chosen else np.array(chosen)
    np.testing.assert_array_equal(tensor[tuple(index)], expected)


def test_a_mask_is_taken_as_h5py_takes_it(tmp_path):
    entry = noise("w", "Int16", (64, 9))
    write_file(tmp_path / "w.h5", {"w": entry}, "hdf5")
    mask = entry.array()[:, 0] > 0
    with h5py.File(tmp_path / "w.h5") as file:
        for index in (mask, (mask, 3), (mask, slice(2, 5)), ([1, 5, 60], slice(None, None, 2))):
            got = ckpttool.open(tmp_path / "w.h5")["w"][index]
            np.testing.assert_array_equal(got, file["w"][index])


def test_metadata_has_step_ranks_and_strategy():
    said = ckpttool.open(SRC, STRATEGY).metadata()
    assert (said["step"], said["ranks"], said["strategy"]) == ("2_10", "0-7", str(STRATEGY))


def test_other_libraries_take_all_elements_at_once(columns):
    _, opened = columns()
    np.testing.assert_array_equal(np.from_dlpack(opened["w"]), opened["w"][...])


class Torch(ModuleType):
    """As much of PyTorch as is called: arrays that say as what they are viewed."""

    bfloat16 = "bfloat16"

    class from_numpy:  # noqa: N801
        def __init__(self, array):
            self.array, self.dtype = array, str(array.dtype)

        def view(self, dtype):
            self.dtype = dtype
            return self


@pytest.mark.parametrize(("dtype", "named"), [("BFloat16", "bfloat16"), ("Int8", "int8")])
def test_with_pytorch_stored_bytes_are_its_types(columns, monkeypatch, dtype, named):
    monkeypatch.setitem(sys.modules, "torch", Torch("torch"))
    entry, opened = columns(dtype, framework="pt")
    for tensor in (opened["w"][...], opened.get_tensor("w")):
        assert (tensor.dtype, tensor.array.tobytes()) == (named, entry.data)


@pytest.mark.parametrize("name", [5, None, ("w",)])
def test_what_is_no_name_is_not_in_it(columns, name):
    opened = columns()[1]
    assert name not in opened
    assert opened.get(name) is None


@pytest.mark.parametrize(
    ("dtype", "read_as"),
    [
        ("BFloat16", "f4"),
        ("Float8E4M3FN", "f4"),
        ("Float8E5M2", "f4"),
        ("Bool", "?"),
        ("Int8", "i1"),
    ],
)
def test_types_that_numpy_lacks_are_read_as_float32(columns, dtype, read_as):
    entry, opened = columns(dtype)
    tensor = opened["w"]
    assert tensor.dtype == np.dtype(read_as) == tensor[0].dtype
    assert (tensor.nbytes, tensor.stored_dtype) == (len(entry.data), dtype)


def test_a_package_for_such_types_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="ml_dtypes"):
        ckpttool.open(SRC, STRATEGY, dtypes="ml_dtypes")


@pytest.mark.parametrize(
    ("index", "rows"), [((700,), 1), (slice(0, 1024, 512), 2), ((slice(3, 5), slice(0, 300)), 2)]
)
def test_only_the_bytes_of_the_index_are_read(columns, monkeypatch, index, rows):
    entry, opened = columns("Float32", (1024, 4096))
    sizes, preadv = [], os.preadv

    def counted(fd, parts, at):
        got = preadv(fd, parts, at)
        sizes.append(got)
        return got

    monkeypatch.setattr(os, "preadv", counted)
    got = opened["w"][index]
    monkeypatch.undo()
    np.testing.assert_array_equal(got, entry.array()[index])
    assert got.nbytes <= sum(sizes) <= rows * 4 * (4096 + (128 << 10))


def test_threads_read_together(columns):
    entry, opened = columns("Float32", (64, 64))
    with ThreadPoolExecutor(8) as pool:
        rows = [*pool.map(lambda row: opened["w"][row], [*range(64)] * 4)]
    np.testing.assert_array_equal(np.stack(rows), np.concatenate([entry.array()] * 4))


def test_a_source_that_changes_is_an_error_at_the_read(columns, tmp_path):
    _, opened = columns()
    os.utime(next((tmp_path / "src" / "rank_2").iterdir()), ns=(1, 1))
    np.testing.assert_array_equal(opened["w"][:, 0], opened["w"][:, 0])  # another file
    with pytest.raises(ckpttool.PlanError, match=r"rank_2.*the file changed"):
        opened["w"][:, 4]


def test_a_forged_block_of_an_encrypted_file_is_refused_before_it_is_read(tmp_path):
    case = GOLDEN / "encrypted_gcm"
    source = shutil.copytree(case / "src", tmp_path / "src")
    words = {"key": b"0123456789ABCDEF"}
    strategy = case / "src_strategy.ckpt"
    assert len(ckpttool.open(source, strategy, **words))
    flip_byte(rank_file(source, 1))
    with pytest.raises(ckpttool.FormatError, match="does not match its tag"):
        ckpttool.open(source, strategy, **words)


def test_nothing_is_read_after_it_is_closed(columns):
    with columns()[1] as opened:
        pass
    with pytest.raises(ValueError, match="is closed"):
        opened["w"][0]


def test_it_is_a_mapping_with_what_loaders_expect():
    opened = ckpttool.open(SRC, STRATEGY)
    tensor = opened["layer1.weight"]
    assert len(opened) == 21
    assert "layer1.weight" in opened
    assert (tensor.shape, tensor.ndim, tensor.size, len(tensor)) == ((64, 32), 2, 2048, 64)
    assert tensor.chunks == (64, 32)
    assert tensor.layout.device_matrix == (2, 2, 2)
    assert opened.get_slice("layer1.weight") is tensor
    assert repr(opened) == f"<OpenCheckpoint {SRC}: 21 tensors, 40.6 KiB>"
    assert repr(tensor) == "<ckpttool tensor layer1.weight: Float32 (64, 32)>"
    with pytest.raises(KeyError, match=r"21 tensors: \S+, \S+, \S+ and 18 more"):
        opened["layer1.wieght"]


def test_what_the_command_line_warns_of_is_a_warning_and_strict_makes_it_an_error(tmp_path):
    words = {"strategy": STRATEGY}
    source = tmp_path / "src"
    source.mkdir()
    for rank in (0, 1, 2, 4, 5, 6, 7):
        (source / f"rank_{rank}").symlink_to(SRC / f"rank_{rank}")
    with pytest.warns(ckpttool.CkptToolWarning, match="rank 3: no checkpoint file found"):
        opened = ckpttool.open(source, **words)
    np.testing.assert_array_equal(
        opened["layer1.weight"][...], ckpttool.open(SRC, **words)["layer1.weight"][...]
    )
    with pytest.raises(ckpttool.PlanError, match="rank 3"):
        ckpttool.open(source, **words, strict=True)


def test_all_that_is_wrong_is_one_error():
    with pytest.raises(ckpttool.PlanError, match="no strategy for 8 ranks"):
        ckpttool.open(SRC)
    with pytest.raises(ValueError, match="go together"):
        ckpttool.open(SRC, STRATEGY, target=TARGET)
    with pytest.raises(IndexError, match="rank=8: the target has ranks 0-7"):
        ckpttool.open(SRC, STRATEGY, target=TARGET, rank=8)


def read_bytes():
    (line,) = (one for one in Path("/proc/self/io").read_text().splitlines() if "rchar" in one)
    return int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count")
def test_a_row_of_256_mib_reads_the_row(tmp_path):
    strategy = replace(strategy_of({"w": COLUMNS}), files=())
    begin = {"w": Entry("Float32", (8192, 8192), bytes(256 << 20))}
    write_ranks(tmp_path, cut(begin, strategy), "safetensors")
    for rank in range(4):  # slices that differ, or there would be a warning
        path = rank_file(tmp_path, rank)
        with path.open("r+b") as file:
            for at in (1 << 10, 32 << 20, 63 << 20):
                file.seek(at)
                file.write(noise(f"{rank}", "UInt8", (1 << 20,)).data)
    ckpttool.open(tmp_path, strategy)["w"][0]  # so that no module is read later
    before = read_bytes()
    opened = ckpttool.open(tmp_path, strategy)
    middle = read_bytes()
    row = opened["w"][4000]
    assert row.nbytes == 32 << 10
    assert read_bytes() - middle <= row.nbytes + (1 << 10)
    assert middle - before <= 4 * (128 << 10)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel does not count")
def test_a_manifest_beside_the_files_is_not_a_reason_to_read_them(tmp_path):
    strategy = replace(strategy_of({"w": COLUMNS}), files=())
    full = {"w": noise("w", "Float32", (1024, 8192))}
    write_ranks(tmp_path / "src", cut(full, strategy), "safetensors")
    ckpttool.reshard(tmp_path / "src", strategy, strategy, tmp_path / "new")
    ckpttool.open(tmp_path / "new", strategy)
    before = read_bytes()
    ckpttool.open(tmp_path / "new", strategy)
    assert read_bytes() - before <= 4 * (128 << 10)


def test_the_gaps_of_a_narrow_step_are_not_kept(tmp_path, monkeypatch):
    strategy = replace(strategy_of({"w": COLUMNS}), files=())
    full = {"w": noise("w", "Float32", (300, 64))}
    write_ranks(tmp_path, cut(full, strategy), "ckpt")
    opened = ckpttool.open(tmp_path, strategy)
    monkeypatch.setattr(ckpttool.operations.open, "BAND_BYTES", 1 << 10)
    sizes, real = [], ckpttool.operations.open.read_band

    def spy(files, tensor, band, out):
        sizes.append(out.nbytes)
        real(files, tensor, band, out)

    monkeypatch.setattr(ckpttool.operations.open, "read_band", spy)
    array = full["w"].array()
    for index in (np.s_[:, ::5], np.s_[::3], np.s_[::-7, 60:2:-9], np.s_[10:290:2, 3]):
        np.testing.assert_array_equal(opened["w"][index], array[index])
    assert max(sizes) <= 1 << 10


def test_a_tensor_without_axes_is_an_array(tmp_path):
    full = {"step": noise("step", "Int64", ())}
    write_ranks(tmp_path, {0: full}, "ckpt")
    opened = ckpttool.open(rank_file(tmp_path, 0))
    assert isinstance(opened.get_tensor("step"), np.ndarray)
    assert opened["step"][...].shape == ()
    assert opened["step"][()] == full["step"].array()


@pytest.mark.parametrize("dtypes", ["float32", "ml_dtypes"])
@pytest.mark.parametrize("dtype", ["Float32", "BFloat16", "Bool", "Int4"])
def test_what_is_open_can_be_pickled(dtype, dtypes, tmp_path):
    data = bytes([0, 1, 1, 0, 1] * 10)[:48] if dtype == "Bool" else noise("w", dtype, (6, 8)).data
    full = {"w": Entry(dtype, (6, 8), data)}
    strategy = replace(strategy_of({"w": COLUMNS}), files=())
    write_ranks(tmp_path / "src", cut(full, strategy), "ckpt")
    with ckpttool.open(tmp_path / "src", strategy, dtypes=dtypes) as opened:
        copied = pickle.loads(pickle.dumps(opened))
        tensor = pickle.loads(pickle.dumps(opened["w"]))
        for one in (copied["w"], tensor):
            assert one.dtype == opened["w"].dtype
            assert one[1:3].tobytes() == opened["w"][1:3].tobytes()
