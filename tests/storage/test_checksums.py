"""Checksums, against MindSpore's own files and zlib on whole ones."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.concurrency import InlineExecutor
from ckpttool.formats import get_format, read_index
from ckpttool.formats.base import PROVENANCE
from ckpttool.model.tensors import StoredFile, TensorMeta
from ckpttool.problems import FormatError, PlanError
from ckpttool.storage import checksums
from ckpttool.storage.checksums import add_zeros, check_files, compute_checksum, verify_checksum
from tests.support.checkpoints import create_file, seal_file
from tests.support.commands import files_below, mentions, run, run_well
from tests.support.commands import message as told
from tests.support.corpus import BROKEN, GOLDEN, SAMPLES, conversion, differences, digests
from tests.support.damage import flip_byte
from tests.support.file_bytes import content, entry, map_record, record, safetensors, write_contents
from tests.support.readers import rank_file, read, read_ranks, split_safetensors

SAVED_WITH_CHECKSUM = [
    SAMPLES / "files" / "crc.ckpt",
    SAMPLES / "files" / "crc.safetensors",
    *sorted((GOLDEN / "crc_check" / "src").rglob("*.ckpt")),
    *sorted((GOLDEN / "safetensors_crc" / "src").rglob("*.safetensors")),
]
FORMS = ("ckpt", "safetensors")


def make(path, metas, with_checksum=True):
    """A file by the package, with contents, sealed."""
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
    """The contents are taken out of the file again, but for what was not summed."""
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


def damage(case, folder, ranks):
    """A copy of the source of a case, the last byte of contents of some ranks changed."""
    shutil.copytree(GOLDEN / case / "src", folder)
    for rank in ranks:
        path = rank_file(folder, rank)
        flip_byte(path, -1 if path.suffix == ".safetensors" else -18)
    return folder


@pytest.mark.parametrize("command", ["merge", "reshard", "inspect"])
@pytest.mark.parametrize("case", ["crc_check", "safetensors_crc"])
def test_every_damaged_file_is_reported_and_nothing_is_written(case, command, tmp_path):
    source = damage(case, tmp_path / "src", (1, 3))
    words = [command, source, "-s", GOLDEN / case / "src_strategy.ckpt", "--crc"]
    words += {
        "inspect": [],
        "merge": ["-o", tmp_path / "out.ckpt"],
        "reshard": ["-o", tmp_path / "out.ckpt", "--format", "ckpt"],
    }[command]
    words += ["-d", GOLDEN / case / "dst_strategy.ckpt"] if command == "reshard" else []
    words += [] if command == "inspect" else ["--trust-strategy"]
    result = run(*words)
    assert result.exit_code == 3
    assert not (tmp_path / "out.ckpt").exists()
    for rank in range(4):
        (path,) = (source / f"rank_{rank}").iterdir()
        line = f"{path}: the checksum (crc_num) is"
        assert (line in told(result)) == (rank in (1, 3))
    stored = read_index(str(path)).attrs["crc_num"]
    found = compute_checksum(read_index(str(path)))
    assert f"{stored}, that of the contents {found} Try: copy the file again" in told(result)


def test_without_it_damage_goes_unnoticed_and_a_note_says_so(tmp_path):
    source = damage("crc_check", tmp_path / "src", (3,))
    words = ["merge", source, "-s", GOLDEN / "crc_check" / "src_strategy.ckpt"]
    result = run_well(*words, "-o", tmp_path / "out.h5", "--trust-strategy")
    assert "ranks 0-3: the checksum (crc_check) is not verified" in result.stderr
    assert f"Try: ckpttool verify {source} --crc" in result.stderr


def test_the_corpus_file_with_a_wrong_checksum_is_noticed(tmp_path):
    folder = BROKEN / "crc_damaged"
    words = ["-s", folder / "src_strategy.ckpt", "-o", tmp_path / "out.ckpt", "--crc"]
    result = run("merge", folder / "src", *words)
    assert result.exit_code == 3
    assert "rank_1/checkpoint-2_10.ckpt: the checksum (crc_num) is" in told(result)
    assert not files_below(tmp_path)


def test_split_verifies_and_stores_too(tmp_path):
    case = GOLDEN / "crc_check"
    full = tmp_path / "full.ckpt"
    run_well("merge", case / "src", "-s", case / "src_strategy.ckpt", "-o", full, "--crc")
    words = ["-d", case / "dst_strategy.ckpt", "--format", "safetensors", "--crc"]
    run_well("split", full, "-o", tmp_path / "out", *words)
    for path in (tmp_path / "out").rglob("*.safetensors"):
        assert verify_checksum(read_index(str(path))) is None
    want = conversion("crc_check", "split").ranks
    assert not differences(want, digests(read_ranks(tmp_path / "out")))
    flip_byte(full, -18)
    assert run("split", full, "-o", tmp_path / "other", *words).exit_code == 3
    assert not (tmp_path / "other").exists()


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


def test_files_with_and_without_a_checksum_are_told_apart(tmp_path):
    source = damage("crc_check", tmp_path / "src", ())
    for rank in (0, 2):
        (path,) = (source / f"rank_{rank}").iterdir()
        path.write_bytes(path.read_bytes()[:-17])
    strategy = GOLDEN / "crc_check" / "src_strategy.ckpt"
    words = ["merge", source, "-s", strategy, "-o", tmp_path / "out.ckpt", "--crc"]
    notes = run_well(*words).stderr.splitlines()
    assert "note: ranks 1, 3: the checksum is right" in notes
    assert "note: ranks 0, 2: saved without a checksum" in notes


@pytest.mark.parametrize("form", FORMS)
def test_every_engine_seals_with_the_same_checksum(form, tmp_path):
    case = GOLDEN / "reshard_8_to_4"
    contents = []
    for engine in ("inline", "threads:1", "threads:4", "processes:2"):
        folder = tmp_path / engine.replace(":", "")
        plan, destination = ckpttool.plan_reshard(
            ckpttool.scan(str(case / "src")),
            ckpttool.read_strategy([str(case / "src_strategy.ckpt")]),
            ckpttool.read_strategy([str(case / "dst_strategy.ckpt")]),
            str(folder),
            output_options=ckpttool.OutputOptions(form, crc=True),
        )
        moved = []
        with ckpttool.open_engine(engine) as executor:
            options = ckpttool.CopyOptions(task_bytes=1, max_in_flight=2)
            ckpttool.execute(plan, destination, executor, options=options, on_progress=moved.append)
        assert sum(moved) == sum(meta.nbytes for output in plan for meta in output.metas)
        contents.append([(folder / path).read_bytes() for path in files_below(folder)])
        for path in folder.rglob(f"*.{form}"):
            assert verify_checksum(read_index(str(path))) is None
    assert contents == [contents[0]] * 4
    assert len(contents[0]) == 4


def test_a_checksum_that_cannot_be_computed_leaves_no_output(tmp_path, monkeypatch):
    from ckpttool.execution import execute

    def fail(index, known):
        raise OSError(5, "Input/output error", index.path)

    monkeypatch.setattr(execute, "compute_checksum", fail)
    source = SAMPLES / "files" / "plain.ckpt"
    result = run("merge", source, "-o", tmp_path / "out.ckpt", "--crc")
    assert result.exit_code == 6
    assert not files_below(tmp_path)


# ------------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize("name", ["llama-3.1", "v2.0-final"])
def test_a_dot_in_a_name_is_no_suffix_to_exchange_for_a_checksum(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["merge", SAMPLES / "files" / "crc.ckpt", "-o", name, "--crc"]
    result = run(*words, "--format", "hdf5")
    assert told(result).rstrip().endswith("Try: --format ckpt, or --format safetensors")
    run_well(*words, "--format", "ckpt")
    assert name in files_below(tmp_path)


@pytest.mark.parametrize("words", [["-o", "out.h5"], ["-o", "out", "--format", "hdf5"]])
def test_hdf5_has_no_place_for_a_checksum(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = SAMPLES / "files" / "crc.ckpt"
    result = run("merge", source, *words, "--crc")
    assert result.exit_code == 2
    assert "HDF5 has no place for a checksum" in told(result)
    assert mentions(told(result), "Try: (--format|-o out.)") == []
    catalog = ckpttool.scan(str(source))
    with pytest.raises(ckpttool.PlanError, match="HDF5 has no place"):
        ckpttool.plan_merge(
            catalog, None, "out.h5", output_options=ckpttool.OutputOptions(crc=True)
        )
    assert not files_below(tmp_path)


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


def test_a_part_of_unified_safetensors_carries_the_checksum_of_another_file():
    path = GOLDEN / "safetensors_crc" / "golden" / "unified" / "part0.safetensors"
    result = run("inspect", path, "--crc")
    assert result.exit_code == 3
    assert "unified_safetensors copies the checksum of a rank" in told(result)


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
