"""merge --max-shard-size: numbered files and the indexes that two kinds of loaders follow."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.execution import execute as execute_module
from ckpttool.execution.copy import fill
from ckpttool.formats import get_format, safetensors, weight_index
from ckpttool.model.catalog import Catalog
from ckpttool.model.tensors import StoredFile
from ckpttool.planning import targets
from ckpttool.planning.targets import number_files
from ckpttool.transaction import record
from tests.support.checkpoints import ONE_STAGE, catalog_of, noise, slice_catalog, with_names
from tests.support.commands import SUFFIXES, files_below, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.in_memory import full_tensors, merge_in_memory
from tests.support.manifests import UNFINISHED
from tests.support.plans import plan_merge
from tests.support.readers import read, read_indexed, write_ckpt

CASE = GOLDEN / "safetensors_pipeline"
SRC = [CASE / "src", "-s", CASE / "src_strategy.ckpt"]
PARTS = [f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)]
INDEXES = ["model.safetensors.index.json", "param_name_map.json"]
FILES = sorted([*PARTS, *INDEXES, "hyper_param.safetensors"])


def merge(out, *words, size="10KB"):
    return run("merge", *SRC, "-o", out, "--max-shard-size", size, *words)


def plan(out, limit=10_000, **how):
    return plan_merge(
        ckpttool.scan(str(CASE / "src")),
        ckpttool.read_strategy([str(CASE / "src_strategy.ckpt")]),
        str(out),
        output_options=ckpttool.OutputOptions("safetensors", max_shard_bytes=limit, **how),
    )


@pytest.fixture
def full(tmp_path):
    run_well("merge", *SRC, "-o", tmp_path / "full.ckpt")
    return read(tmp_path / "full.ckpt")


@pytest.mark.parametrize("format", SUFFIXES)
@pytest.mark.parametrize("size", ["1KB", "10KB", "1GB"])
def test_either_index_leads_to_every_tensor(tmp_path, full, format, size):
    out = tmp_path / "out"
    assert merge(out, "--format", format, size=size).exit_code == 0
    for index in ("param_name_map.json", f"model{SUFFIXES[format]}.index.json"):
        assert read_indexed(out, index) == full
    run_well("merge", out, "-o", tmp_path / "again.ckpt")
    assert read(tmp_path / "again.ckpt") == full


@pytest.mark.parametrize("format", SUFFIXES)
@pytest.mark.parametrize("size", [11_000, 14_500, 29_000])
def test_no_file_is_larger_than_was_asked_for_with_its_header(tmp_path, format, size):
    assert merge(tmp_path, "--format", format, size=f"{size}B").exit_code == 0
    sizes = [path.stat().st_size for path in tmp_path.glob("model-*-of-*")]
    assert max(sizes) <= size
    assert len(sizes) < 20


@pytest.mark.parametrize("format", SUFFIXES)
@pytest.mark.parametrize("name", ["w{}", "a/b{}/c", "n" * 200 + "{}", "重{}"])
def test_many_small_tensors_fill_files_up_to_the_limit(tmp_path, format, name):
    entries = {name.format(i): noise(str(i), "Float32", (64,)) for i in range(300)}
    write_ckpt(tmp_path / "in.ckpt", entries)
    words = ["--max-shard-size", "50KB", "--format", format]
    run_well("merge", tmp_path / "in.ckpt", "-o", tmp_path / "out", *words)
    sizes = [path.stat().st_size for path in (tmp_path / "out").glob("model-*-of-*")]
    assert max(sizes) <= 50_000
    assert len(sizes) <= 3 * (1 + sum(sizes) // 50_000)
    run_well("diff", tmp_path / "in.ckpt", tmp_path / "out")


@pytest.mark.parametrize("largest", [2_000, 5_000])
def test_a_header_too_large_for_one_file_is_spread_over_several(tmp_path, monkeypatch, largest):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", largest)
    monkeypatch.setattr(safetensors.Safetensors, "max_header_bytes", largest)
    entries = {f"weight.{i}": noise(str(i), "Float32", (2,)) for i in range(100)}
    write_ckpt(Path("in.ckpt"), entries)
    result = run("merge", "in.ckpt", "-o", "one.safetensors")
    assert result.exit_code == 5
    assert f"at most {largest} are read" in message(result)
    advice = "-o one --max-shard-size 10GB"
    assert message(result).endswith(f"Try: {advice}, or -o one.h5, or -o one.ckpt")
    assert files_below(Path()) == ["in.ckpt"]
    run_well("merge", "in.ckpt", *advice.split())
    run_well("verify", "one", "--deep")
    run_well("diff", "in.ckpt", "one")


def test_a_size_is_not_advised_where_the_common_file_is_too_large(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 1000)
    entries = {f"step.{i}": noise(str(i), "Int32", ()) for i in range(100)}
    write_ckpt(Path("in.ckpt"), entries)
    result = run("merge", "in.ckpt", "-o", "one.safetensors")
    assert message(result).endswith("Try: -o one.h5, or -o one.ckpt")
    result = run("merge", "in.ckpt", "-o", "one", "--max-shard-size", "10GB")
    assert message(result).endswith("Try: --format hdf5, or --format ckpt")
    run_well("merge", "in.ckpt", "-o", "one", "--max-shard-size", "10GB", "--format", "ckpt")


@pytest.mark.parametrize("format", ["safetensors", "ckpt"])
def test_the_largest_index_that_is_written_is_read_and_a_larger_one_is_refused(
    tmp_path, monkeypatch, format
):
    monkeypatch.chdir(tmp_path)
    write_ckpt(Path("in.ckpt"), {"重" * 30 + str(i): noise("w", "Int8", (2,)) for i in range(20)})
    words = ["merge", "in.ckpt", "--max-shard-size", "10GB", "--format", format, "-o"]
    run_well(*words, "a")
    limit = Path("a/param_name_map.json").stat().st_size
    for module in (weight_index, targets):
        monkeypatch.setattr(module, "MAX_INDEX_BYTES", limit)
    run_well(*words, "b")
    for source in ("b", "b/param_name_map.json"):
        run_well("verify", source)
    for module in (weight_index, targets):
        monkeypatch.setattr(module, "MAX_INDEX_BYTES", limit - 1)
    result = run(*words, "c")
    assert result.exit_code == 5
    assert message(result).endswith("Try: -o c.ckpt without --max-shard-size")
    assert not Path("c").exists()
    run_well("merge", "in.ckpt", "-o", "c.ckpt")


def test_the_scalars_go_where_mindspore_looks_for_them(tmp_path, full):
    assert merge(tmp_path).exit_code == 0
    golden = read(CASE / "golden" / "unified" / "hyper_param.safetensors")
    assert read(tmp_path / "hyper_param.safetensors") == golden
    assert not [name for part in PARTS for name in read(tmp_path / part) if name in golden]


# --------------------------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_fails_leaves_no_index(tmp_path, monkeypatch, overwrite):
    if overwrite:
        assert merge(tmp_path).exit_code == 0

    def fail_on_the_third(task):
        if "00003" in task.units[0].tensor.file.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), task.units[0].tensor.file.path)
        return fill(task)

    work, destination = plan(tmp_path, overwrite=overwrite)
    monkeypatch.setattr(execute_module, "fill", fail_on_the_third)
    with pytest.raises(ckpttool.ExecutionError) as caught:
        ckpttool.execute(work, destination)
    assert caught.value.committed == tuple(str(tmp_path / name) for name in PARTS[:2])
    left = {*files_below(tmp_path)} - {*UNFINISHED}
    left = {name for name in left if "/replaced-" not in name}  # the manifest of the older set
    assert not [name for name in left if name.endswith((".json", ".partial"))]


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_cannot_be_written_is_the_error(tmp_path, monkeypatch, name):
    work, destination = plan(tmp_path)
    write = record.write_document

    def refuse(path, text):
        if path.endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        write(path, text)

    monkeypatch.setattr(record, "write_document", refuse)
    with pytest.raises(ckpttool.ExecutionError, match="No space left") as caught:
        ckpttool.execute(work, destination)
    assert caught.value.output == str(tmp_path / name)
    assert set(PARTS) <= set(files_below(tmp_path))


def test_indexes_come_last(tmp_path):
    seen = []
    ckpttool.execute(*plan(tmp_path), on_progress=lambda _: seen.append(files_below(tmp_path)))
    known = {"model.safetensors.index.json", "param_name_map.json"}
    assert seen
    assert not [names for names in seen if known & {*names}]
    assert files_below(tmp_path) == FILES


def names_by_file(plan, limit):
    numbered = number_files(plan, limit, lambda number, count: f"{number}/{count}")
    assert numbered.target.ranks == len(numbered.target.paths)
    return {output.path: tuple(meta.name for meta in output.metas) for output in numbered}


@pytest.mark.parametrize(
    ("fits", "less", "files"),
    [
        ("abcd", 0, ["abcd"]),
        ("abcd", 1, ["abc", "d"]),
        ("bc", 0, ["a", "bc", "d"]),  # b and c are as large as the limit
        ("bc", 1, ["a", "b", "cd"]),
        ("", 0, ["a", "b", "c", "d"]),
    ],
)
def test_tensors_go_into_files_in_order_and_none_is_too_large(fits, less, files):
    plan = merge_in_memory(
        full_tensors(a=(7,), b=(10,), c=(2,), d=(5,))
    )  # of 28, 40, 8 and 20 bytes
    metas = [transfer.meta for transfer in plan.transfers if transfer.name in fits]
    limit = get_format(plan.target.format).file_bytes(metas, plan.attrs) - less
    want = {f"{i}/{len(files)}": tuple(names) for i, names in enumerate(files)}
    assert names_by_file(plan, limit) == want


def test_a_tensor_larger_than_the_limit_has_a_file_of_its_own():
    plan = merge_in_memory(full_tensors(a=(2,), b=(100,), c=(2,)))
    assert list(names_by_file(plan, 20).values()) == [("a",), ("b",), ("c",)]


def test_tensors_without_elements_take_room_for_their_names():
    plan = merge_in_memory(full_tensors(a=(0, 3), b=(5,), c=(0,)))
    limit = get_format("ckpt").file_bytes([transfer.meta for transfer in plan.transfers])
    assert list(names_by_file(plan, limit).values()) == [("a", "b", "c")]


def test_what_the_strategy_does_not_list_goes_apart():
    catalog = with_names({"w": (2, 4), "step": (), "table": (3, 3), "adam_m.w": (2, 4)})
    agreement = dict.fromkeys(("step", "table"), ((0, 1, 2, 3),))
    plan = merge_in_memory(catalog, ONE_STAGE, agreement)
    assert names_by_file(plan, 1000) == {"0/1": ("w", "adam_m.w"), "None/1": ("step", "table")}


def test_without_a_strategy_single_elements_go_apart_and_text():
    plan = merge_in_memory(full_tensors(w=(2, 4), step=(), rate=(1,), note="text", none=(0,)))
    assert names_by_file(plan, 1000) == {"0/1": ("w", "none"), "None/1": ("step", "rate", "note")}


def test_components_of_a_map_parameter_stay_together():
    names = [f"e.__map_{what}__" for what in ("keys", "values", "statuses")]
    plan = merge_in_memory(
        full_tensors(w=(8,), **dict(zip(names, [(2,), (2, 9), (2,)], strict=True)), v=(8,))
    )
    assert names_by_file(plan, 20) == {"0/2": ("w",), "1/2": ("v",), "None/2": tuple(names)}


def test_what_the_source_keeps_apart_stays_apart():
    catalog = replace(full_tensors(w=(2, 4), table=(3, 3)), common_tensors={"table": True})
    assert names_by_file(merge_in_memory(catalog), 1000) == {"0/1": ("w",), "None/1": ("table",)}


def test_nothing_but_what_goes_apart_is_one_file():
    assert names_by_file(merge_in_memory(full_tensors(step=())), 1000) == {"None/0": ("step",)}


def test_a_source_of_several_files_is_read_from_each():
    files = catalog_of({0: {"a": (4,)}, 1: {"b": (4,)}}).files
    plan = merge_in_memory(Catalog("m", files, documents=(StoredFile("i"),), is_merged=True))
    (output,) = number_files(plan, 1000, lambda number, count: f"{number}")
    pieces = [piece for tensor in output.tensors for piece in tensor.pieces(tensor.region)]
    assert [piece.tensor.file.path for piece in pieces] == [
        "run/rank_0/net.ckpt",
        "run/rank_1/net.ckpt",
    ]


def test_slices_are_joined_in_their_file():
    catalog = slice_catalog(ONE_STAGE, {"w": (4, 2)})
    (output,) = number_files(merge_in_memory(catalog, ONE_STAGE), 8, lambda number, count: "p")
    assert [meta.shape for meta in output.metas] == [(4, 2)]
