"""Headers in bulk: the usual record is understood at once, many files are read at a time."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpttool import system
from ckpttool.discovery.scan import scan
from ckpttool.formats import (
    FILES_AHEAD,
    READERS,
    ckpt,
    get_format,
    read_index,
    read_indexes,
    suffix_of,
)
from ckpttool.formats.base import HeaderDigest
from ckpttool.formats.ckpt import Ckpt
from ckpttool.formats.header_cache import HeaderCache
from ckpttool.formats.local import ReadFile
from ckpttool.formats.sandbox import Sandbox
from ckpttool.formats.wire import WINDOW_BYTES
from ckpttool.model.tensors import SharedHeader, StoredFile, TensorMeta
from ckpttool.problems import FormatError, UnreadableError
from ckpttool.storage.files import write_header
from tests.support.checkpoints import create_file
from tests.support.file_bytes import record

RECORDS = [
    record("layers.0.wq", "Float32", (300, 2), bytes(2400)),
    record("scalar", "Int64", (), bytes(8)),
    record("empty", "BFloat16", (0, 3), b""),
    record("重み", "Uint8", (3,), b"abc"),
    record("part", "Float16", (4,), bytes(4)) + record("part", "Float16", (4,), bytes(4)),
    record("text", "str", (0,), "hi".encode("utf-32-le")),
    record("old scalar", "Float32", (0,), bytes(4)),
]


def outcome(path, cache=None):
    try:
        return list(Ckpt(cache).read_index(StoredFile(path)).tensors.items())
    except FormatError as error:
        return type(error), str(error)


def walked(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckpt, "_read_usual", lambda *_: None)
        return outcome(path)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.sampled_from(RECORDS), max_size=4, unique=True),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=2),
    st.floats(0, 1),
)
def test_a_usual_header_means_what_its_fields_say(tmp_path, records, changes, kept):
    data = bytearray(b"".join(records))
    for place, value in changes if data else ():
        data[int(place * len(data))] = value
    path = tmp_path / "net.ckpt"
    path.write_bytes(data[: round(kept * len(data))] if kept < 0.5 else data)
    assert outcome(str(path)) == walked(str(path))


@pytest.mark.parametrize("at", range(len(RECORDS)))
def test_every_byte_of_a_header_counts(tmp_path, at):
    path = tmp_path / "net.ckpt"
    for i in range(min(60, len(RECORDS[at]))):
        for mask in (0x01, 0x08, 0x80, 0xFF):
            data = bytearray(RECORDS[at])
            data[i] ^= mask
            path.write_bytes(RECORDS[0] + data + record("last"))
            assert outcome(str(path)) == walked(str(path))


@pytest.mark.parametrize("size", [-1, -(2**63), 2**63 - 1, 1 << 62])
def test_sizes_of_64_bits_are_numbers_with_a_sign(tmp_path, size):
    path = tmp_path / "m.ckpt"
    path.write_bytes(record(dims=(size, 0), content=b""))
    assert outcome(str(path)) == walked(str(path))
    if size < 0:
        with pytest.raises(FormatError, match=rf"a size in dims \[{size}, 0\] is negative"):
            read_index(str(path))


@pytest.mark.parametrize(
    "at",  # every byte of the record before it is changed: of the first, 2,400
    [pytest.param(at, marks=pytest.mark.slow if at == 1 else ()) for at in range(len(RECORDS))],
)
def test_a_file_that_is_nearly_as_another_is_read_as_it_is(tmp_path, at):
    first, path = tmp_path / "first.ckpt", tmp_path / "net.ckpt"
    data = RECORDS[at] + record("between", "Int8", (2,), b"ab") + RECORDS[at - 1]
    first.write_bytes(data)
    cache = HeaderCache()
    assert outcome(str(first), cache) == outcome(str(first))
    for i in [*range(min(60, len(data))), *range(len(RECORDS[at]), len(data))]:
        for mask in (0x01, 0x08, 0x80, 0xFF):
            changed = bytearray(data)
            changed[i] ^= mask
            path.write_bytes(changed)
            assert outcome(str(path), cache) == outcome(str(path))


@pytest.mark.parametrize("format", ["ckpt", "safetensors", "hdf5"])
def test_any_other_byte_of_a_header_or_size_of_a_file_shows_in_its_digest(tmp_path, format):
    header = get_format(format).index([TensorMeta("w", "Int8", (3,)), TensorMeta("e", "Int8", ())])
    digest, path = HeaderDigest.of(header), tmp_path / "net"
    with path.open("w+b") as file:
        write_header(file.fileno(), header)
    data = path.read_bytes()
    contents = {
        extent.offset + i
        for tensor in header.index.tensors.values()
        for extent in tensor.extents
        for i in range(extent.nbytes)
    }
    assert len(contents) == 4
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with ReadFile(path) as file:
            assert digest.is_in(file) == (i in contents)
    for other in (data[:-1], data + b"\0"):
        path.write_bytes(other)
        with ReadFile(path) as file:
            assert not digest.is_in(file)


def test_a_rank_that_has_the_headers_of_another_is_only_compared(tmp_path, monkeypatch):
    for rank in range(3):
        records = (record(f"w{i}", "Int8", (9000,), bytes([rank]) * 9000) for i in range(50))
        (tmp_path / f"{rank}.ckpt").write_bytes(b"".join(records))
    cache = HeaderCache()
    first = outcome(str(tmp_path / "0.ckpt"), cache)
    nbytes = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *given: nbytes.append(given[1]) or pread(*given))
    monkeypatch.setattr(ckpt, "_read_usual", None)  # a call would fail
    for rank in (1, 2):
        path = str(tmp_path / f"{rank}.ckpt")
        found = outcome(path, cache)
        assert [(name, tensor.meta, tensor.extents) for name, tensor in found] == [
            (name, tensor.meta, tensor.extents) for name, tensor in first
        ]
        assert {tensor.file.path for _, tensor in found} == {path}
    assert len(nbytes) <= 2 * (50 + 3)
    assert sum(nbytes) <= 2 * (50 * 40 + 2 * WINDOW_BYTES)


METAS = [
    TensorMeta("layers/w", "Float32", (300, 2)),
    TensorMeta("scalar", "Int64", ()),
    TensorMeta("empty", "BFloat16", (0, 3)),
]


def headers_of(format, cache=None):
    """What reading a file of a format leads to, by comparison with others or not."""
    with Sandbox() as sandbox:
        read = (sandbox if format == "hdf5" else get_format(format)).read_index

        def found(path):
            try:
                file = StoredFile(path)
                index = read(file) if cache is None else cache.read_index(file, format, read)
            except FormatError as error:
                return type(error), str(error)
            return index, list(index.tensors)

        yield found


@pytest.mark.parametrize("format", ["safetensors", "hdf5"])
def test_so_is_a_file_of_another_format(tmp_path, format):
    path = str(tmp_path / "a.x")
    index = create_file(get_format(format), path, METAS, {"remove_redundancy": "True"})
    data = (tmp_path / "a.x").read_bytes()
    contents = [extent for tensor in index.tensors.values() for extent in tensor.extents]
    header = [
        at for at in range(len(data)) if not any(0 <= at - e.offset < e.nbytes for e in contents)
    ]
    for plain, compared in zip(headers_of(format), headers_of(format, HeaderCache()), strict=True):
        assert compared(path) == plain(path)
        for at in [*header[:: 1 + len(header) // 60], *(extent.offset for extent in contents)]:
            changed = bytearray(data)
            changed[at] ^= 0x08
            (tmp_path / "a.x").write_bytes(changed)
            assert compared(path) == plain(path), at


@pytest.mark.parametrize("format", ["safetensors", "hdf5"])
def test_a_header_of_another_format_is_understood_once_for_all_ranks(tmp_path, format):
    paths = []
    for rank in range(READERS + FILES_AHEAD + 4):
        path = tmp_path / f"{rank}{suffix_of(format)}"
        paths.append(str(path))
        index = create_file(get_format(format), str(path), METAS, {})
        with path.open("r+b") as file:
            file.seek(index.tensors["layers/w"].extents[0].offset)
            file.write(bytes([rank]) * 2400)
    first, *others = read_indexes(paths)
    understood = {id(index.tensors["scalar"].meta) for index in (first, *others)}
    assert len(understood) == 1
    for path, index in zip(paths, [first, *others], strict=True):
        assert index == read_index(path)


def test_the_disk_is_told_of_each_header_before_it_is_compared(tmp_path, monkeypatch):
    paths = [str(tmp_path / f"{rank}.ckpt") for rank in range(FILES_AHEAD + 8)]
    for path in paths:
        Path(path).write_bytes(
            b"".join(record(f"w{i}", "Int8", (9000,), bytes(9000)) for i in range(5))
        )
    told = defaultdict(list)
    monkeypatch.setattr(system, "_peek", None)  # which says that memory has them
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda fd, at, nbytes, how: told[str(Path(f"/proc/self/fd/{fd}").readlink())].append(
            (at, nbytes)
        ),
    )
    first, *others = read_indexes(paths)
    assert set(told) == set(paths[1:])
    extents = [extent.offset for tensor in first.tensors.values() for extent in tensor.extents]
    for places in told.values():  # a file that is read while its turn comes is asked for twice
        assert [at + nbytes for at, nbytes in [*dict.fromkeys(places)][: len(extents)]] == extents
    assert [[*index.tensors] for index in others] == [[*first.tensors]] * len(others)


def test_the_disk_is_not_asked_for_what_memory_has(tmp_path, monkeypatch):
    paths = [str(tmp_path / f"{rank}.ckpt") for rank in range(3)]
    for path in paths:
        Path(path).write_bytes(
            b"".join(record(f"w{i}", "Int8", (9000,), bytes(9000)) for i in range(5))
        )
    monkeypatch.setattr(system, "_peek", lambda fd, parts, at, flags: len(parts[0]))
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: pytest.fail("it was asked"))
    assert [len(index.tensors) for index in read_indexes(paths)] == [5, 5, 5]


def test_headers_are_remembered_within_limits(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpttool.formats.header_cache.MAX_HEADERS", 2)
    monkeypatch.setattr("ckpttool.formats.header_cache.MAX_BYTES", 200)
    cache = HeaderCache()
    for names in (1, 2, 9, 3):  # 9 are too long, and 3 one too many
        path = tmp_path / f"{names}.ckpt"
        path.write_bytes(b"".join(record(f"{i}", "Int8", (1,), b"x") for i in range(names)))
        for _ in range(2):
            assert len(outcome(str(path), cache)) == names
    assert len(cache._by_end) == 2


def test_a_header_that_takes_the_place_of_another_takes_its_room(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpttool.formats.header_cache.MAX_BYTES", 100)
    cache = HeaderCache()
    for stage in range(9):
        path = tmp_path / f"{stage}.ckpt"
        path.write_bytes(record(f"layers.{stage}", "Int8", (1,), b"x"))
        assert not isinstance(Ckpt(cache).read_index(StoredFile(str(path))).tensors, SharedHeader)
        assert isinstance(Ckpt(cache).read_index(StoredFile(str(path))).tensors, SharedHeader)


def test_an_index_takes_one_read_for_each_large_tensor(tmp_path, monkeypatch):
    path = tmp_path / "net.ckpt"
    path.write_bytes(b"".join(record(f"w{i}", "Int8", (9000,), bytes(9000)) for i in range(50)))
    reads = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *given: reads.append(given) or pread(*given))
    assert len(Ckpt().read_index(StoredFile(str(path))).tensors) == 50
    assert len(reads) <= 50 + 3  # the first bytes, the trailer


def test_ranks_with_unequal_headers_share_what_describes_equal_slices(tmp_path):
    for rank in range(2):
        metas = [TensorMeta("w", "Int8", (2, 3)), TensorMeta("b", "Int8", (rank + 1,))]
        create_file(Ckpt(), str(tmp_path / f"{rank}"), metas, {})
    cache = HeaderCache()
    first, second = (
        Ckpt(cache).read_index(StoredFile(str(tmp_path / f"{rank}"))).tensors for rank in range(2)
    )
    assert first["w"].meta is second["w"].meta
    assert first["b"].meta != second["b"].meta


def test_many_headers_are_read_in_their_order_with_their_damage(tmp_path):
    paths = [str(tmp_path / f"{number}.{'ckpt' if number % 3 else 'h5'}") for number in range(40)]
    for number, path in enumerate(paths):
        format = get_format("ckpt" if number % 3 else "hdf5")
        create_file(format, path, [TensorMeta(f"of_{number}", "Int8", (number,))], {})
    os.truncate(paths[5], 10)
    found = list(read_indexes(paths))
    assert isinstance(found.pop(5), FormatError)
    assert [list(index.tensors) for index in found] == [
        [f"of_{number}"] for number in range(40) if number != 5
    ]


def test_what_cannot_be_read_is_said_of_each_file(tmp_path):
    path = tmp_path / "0.ckpt"
    create_file(Ckpt(), str(path), [], {})
    none = str(tmp_path / "none.ckpt")
    first, *others = read_indexes([str(path), *[none] * 30])
    assert first.path == str(path)
    assert {type(error) for error in others} == {UnreadableError}
    assert {error.path for error in others} == {none}


def test_progress_counts_the_files_of_the_ranks(tmp_path):
    for rank in range(5):
        (tmp_path / f"rank_{rank}").mkdir()
        create_file(Ckpt(), str(tmp_path / f"rank_{rank}" / "net.ckpt"), [], {})
    os.truncate(tmp_path / "rank_3" / "net.ckpt", 5)
    seen = []
    scan(str(tmp_path), on_progress=lambda *progress: seen.append(progress))
    assert seen == [(done, 5) for done in range(1, 6)]
