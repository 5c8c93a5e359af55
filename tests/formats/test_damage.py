"""Damaged files: cut at every byte, and every byte of a header flipped.

What may come of it is an error of ours, or an index of which every extent lies inside the file:
damage to a number in a header cannot always be told from another number.
"""

import math
from functools import partial
from itertools import pairwise

import pytest

from ckpttool.formats import ckpt, get_format, read_index
from ckpttool.formats.sandbox import Sandbox
from ckpttool.model.tensors import CutShortError, StoredFile, TensorMeta
from ckpttool.problems import CkptToolError, FormatError
from ckpttool.strategy_files.reader import read_strategy
from tests.support.checkpoints import create_file
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.damage import flipped
from tests.support.file_bytes import layout, operator, record, strategy

FILES = SAMPLES / "files"
EVERY_BIT = (*(1 << bit for bit in range(8)), 0xFF)


def assert_sound(index, size):
    """Every tensor has as many bytes as it needs, all inside the file, and of its own."""
    assert index.nbytes == size
    places = sorted(
        {
            (one.file.cipher is None, e.offset, e.nbytes)
            for one in index.tensors.values()
            for e in one.extents
        }
    )  # equal ones are of links
    for (kind, at, nbytes), (other, behind, _) in pairwise(places):
        assert kind != other or at + nbytes <= behind
    for name, tensor in index.tensors.items():
        assert tensor.meta.name == name
        held = sum(extent.nbytes for extent in tensor.extents)
        assert tensor.meta.text is not None or held == tensor.meta.nbytes
        for extent in tensor.extents:
            assert 0 <= extent.offset <= extent.offset + extent.nbytes <= size


def read_with(sandbox, path):
    return sandbox.read_index(StoredFile(path))


def index_of(path, data, read=read_index):
    """The index of a file of these bytes, or None if it is refused as it should be."""
    path.write_bytes(data)
    try:
        index = read(str(path))
    except FormatError as error:
        problem = str(error)
    else:
        assert_sound(index, len(data))
        return index
    assert problem.startswith(str(path))
    return None


def small_hdf5(folder):
    """An HDF5 file of less than 3 KiB with tensors, a string, attributes and a group."""
    tensors = [
        TensorMeta("a/w", "Float32", (2, 3)),
        TensorMeta("b", "BFloat16", (4,)),
        TensorMeta("s", "str", (), "text"),
        TensorMeta("q", "Int4", (3,)),
    ]
    attrs = {"ckpttool.source": "checkpoint"}
    create_file(get_format("hdf5"), folder / "small.h5", tensors, attrs)
    return (folder / "small.h5").read_bytes()


CHECKPOINTS = [
    FILES / "plain.ckpt",
    FILES / "dtypes.ckpt",
    FILES / "append.ckpt",
    FILES / "crc.ckpt",
    FILES / "legacy_1.0.0.ckpt",
    FILES / "map_parameter.ckpt",
    FILES / "aes_gcm128.ckpt",
    FILES / "dtypes.safetensors",
    FILES / "crc.safetensors",
]


# ------------------------------------------------------------------------ cut short


@pytest.mark.parametrize("source", CHECKPOINTS, ids=lambda path: path.name)
def test_checkpoints_cut_at_every_byte_are_refused_or_hold_the_first_tensors(source, tmp_path):
    data = source.read_bytes()
    whole = index_of(tmp_path / source.name, data)
    for size in range(len(data)):
        index = index_of(tmp_path / source.name, data[:size])
        if index is None or whole is None:
            continue
        assert source.suffix == ".ckpt"
        if source.name == "map_parameter.ckpt" and index.tensors:  # nothing tells its last record
            assert all(tensor.meta.shape[0] == 2 for tensor in index.tensors.values())
            continue
        assert list(index.tensors.items()) == list(whole.tensors.items())[: len(index.tensors)]


def test_a_ckpt_cut_between_records_is_whole_and_elsewhere_damaged(tmp_path):
    records = [record("a"), record("b", "Int64", (2,), bytes(16)), record("c", "Int8", (), b"\1")]
    data = b"".join(records)
    borders = {0, len(records[0]), len(records[0] + records[1]), len(data)}
    for size in range(len(data) + 1):
        index = index_of(tmp_path / "net.ckpt", data[:size])
        assert (index is not None) == (size in borders)


def error_of(path):
    try:
        read_index(str(path))
    except FormatError as error:
        return error
    return None


@pytest.mark.parametrize("source", CHECKPOINTS, ids=lambda path: path.name)
def test_what_is_left_of_a_cut_file_is_as_it_was(source, tmp_path):
    data, whole = source.read_bytes(), index_of(tmp_path / source.name, source.read_bytes())
    path, found = tmp_path / source.name, 0
    for size in range(len(data) if whole is not None else 0):
        path.write_bytes(data[:size])
        error = error_of(path)
        if isinstance(error, CutShortError):
            left, lost = error.remains.index, error.remains.lost
            assert_sound(left, size)
            for name, tensor in left.tensors.items():
                known = whole.tensors[name]
                assert (tensor.meta, tensor.extents) == (known.meta, known.extents)
            assert lost.keys() <= whole.tensors.keys() - left.tensors.keys()
            are_all = {*left.tensors, *lost} == {*whole.tensors}
            assert are_all or not error.remains.are_all_known
            found += 1
    assert (found > 20) == (whole is not None)


@pytest.mark.parametrize("source", CHECKPOINTS[:1] + CHECKPOINTS[3:4], ids=lambda path: path.name)
def test_a_file_with_a_bit_flipped_is_not_taken_for_a_cut_one(source, tmp_path):
    data, path = source.read_bytes(), tmp_path / source.name
    for at in range(len(data)):
        path.write_bytes(flipped(data, at, 1 << at % 8))
        assert not isinstance(error_of(path), CutShortError), at


def test_a_tensor_of_which_records_are_missing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(ckpt, "MAX_RECORD_BYTES", 16)
    path = tmp_path / "net.ckpt"
    tensors = [TensorMeta("a", "Float32", (2,)), TensorMeta("b", "Float32", (10,))]
    create_file(get_format("ckpt"), path, tensors, {})
    data = path.read_bytes()
    starts = [one.offset for one in read_index(str(path)).tensors["b"].extents]
    for size in (starts[1] - 12, starts[1] - 3, starts[1] + 2, starts[2] + 2):
        path.write_bytes(data[:size])
        with pytest.raises(CutShortError) as caught:
            read_index(str(path))
        assert [*caught.value.remains.index.tensors] == ["a"]
        assert "b" in caught.value.remains.lost


def test_an_hdf5_file_cut_at_every_byte_is_refused(tmp_path):
    data = small_hdf5(tmp_path)
    with Sandbox() as sandbox:
        read = partial(read_with, sandbox)
        assert index_of(tmp_path / "net.h5", data, read) is not None
        for size in range(len(data)):
            assert index_of(tmp_path / "net.h5", data[:size], read) is None


# ------------------------------------------------------------------------ flipped


@pytest.mark.slow
@pytest.mark.parametrize("source", CHECKPOINTS, ids=lambda path: path.name)
def test_checkpoints_with_any_bit_flipped_are_refused_or_sound(source, tmp_path):
    data = source.read_bytes()
    refused = 0
    for at in range(len(data)):
        for mask in EVERY_BIT:
            refused += index_of(tmp_path / source.name, flipped(data, at, mask)) is None
    assert refused > len(data)


@pytest.mark.slow
def test_an_hdf5_file_with_any_byte_flipped_is_refused_or_sound(tmp_path):
    data = small_hdf5(tmp_path)
    path, refused = tmp_path / "net.h5", 0
    with Sandbox() as sandbox:
        read = partial(read_with, sandbox)
        for at in range(len(data)):
            for mask in (0xFF, 1 << at % 8):
                refused += index_of(path, flipped(data, at, mask), read) is None
    assert refused > 300


# ------------------------------------------------------------------------ strategies


STRATEGIES = {
    "golden": (GOLDEN / "broken_inputs" / "truncated" / "src_strategy.ckpt").read_bytes(),
    "multi-axis": strategy(operator(0), layout("w", (2, 2, 2), (2, 0), (), size=-1)),
    "merged": strategy(operator(0), layout("0-w", (2,), (0,)), layout("1-v", (2,), (-1,))),
}


def strategy_of(path, data):
    """The strategy in these bytes, or None if it is refused as it should be."""
    path.write_bytes(data)
    try:
        strategy = read_strategy([str(path)])
    except CkptToolError as error:
        problem, exit_code = str(error), error.exit_code
    else:
        for layouts in strategy.layouts.values():
            for layout in layouts:
                assert math.prod(layout.slice_counts) <= len(layout.ranks) <= len(strategy.ranks)
        return strategy
    assert str(path) in problem
    assert exit_code == 4
    return None


@pytest.mark.parametrize("data", STRATEGIES.values(), ids=STRATEGIES)
def test_strategies_cut_at_every_byte_are_refused_or_hold_fewer_layouts(data, tmp_path):
    path = tmp_path / "s.ckpt"
    whole = strategy_of(path, data)
    for size in range(len(data)):
        found = strategy_of(path, data[:size])
        assert found is None or found.layouts.keys() < whole.layouts.keys()


@pytest.mark.slow
@pytest.mark.parametrize("data", STRATEGIES.values(), ids=STRATEGIES)
def test_strategies_with_any_bit_flipped_are_refused_or_possible(data, tmp_path):
    refused = 0
    for at in range(len(data)):
        for mask in EVERY_BIT:
            refused += strategy_of(tmp_path / "s.ckpt", flipped(data, at, mask)) is None
    assert refused > len(data)


def test_a_json_strategy_cut_or_flipped_anywhere_is_refused_or_possible(tmp_path):
    data = b'{"parallel_layout_item":{"w":{"dev_matrix":[2,2],"tensor_map":[-1,0]}}}'
    path = tmp_path / "s.json"
    assert strategy_of(path, data) is not None
    for size in range(len(data)):
        assert strategy_of(path, data[:size]) is None
    for at in range(len(data)):
        for mask in EVERY_BIT:
            strategy_of(path, flipped(data, at, mask))
