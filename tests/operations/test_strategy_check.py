"""Which strategy fits a checkpoint: every strategy of the corpus against every checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.checkpoint.samples import TENSORS_PER_LAYOUT
from ckpttool.concurrency import InlineExecutor
from ckpttool.model.layout import Layout
from ckpttool.operations.strategy_check import check_strategies
from ckpttool.storage import sampling
from ckpttool.strategy_files.reader import read_strategy
from tests.support.checkpoints import ROWS, SHARDED, WHOLE, cut, noise, strategy_of, write_ranks
from tests.support.corpus import GOLDEN
from tests.support.readers import entry_of


def sources():
    for folder in sorted(GOLDEN.glob("*/src")):
        if strategies := sorted(folder.parent.glob("src_strategy.*")):
            yield pytest.param(folder, strategies[0], id=folder.parent.name)


def checked(folder, *strategies):
    catalog = ckpttool.scan(str(folder))
    return check_strategies(catalog, [*map(str, strategies)], InlineExecutor())


@pytest.fixture
def halves(tmp_path):
    names = [f"layers.{i}.w" for i in range(20)]
    full = {name: noise(name, "Float32", (64, 64)) for name in names}
    ranks = {
        r: {n: one.excerpt(slice(32 * (r // 2), 32 * (r // 2) + 32)) for n, one in full.items()}
        for r in range(4)
    }
    write_ranks(tmp_path / "run", ranks, "ckpt")
    return tmp_path / "run", names


def write(path, names, layout):
    if layout.full_shape is None:
        layout = replace(layout, full_shape=(64, 64))
    ckpttool.write_strategy(strategy_of(dict.fromkeys(names, layout)), str(path))
    return path


def test_samples_are_read_once_for_all_strategies(halves, tmp_path, monkeypatch):
    folder, names = halves
    right = write(tmp_path / "a.json", names, Layout((2, 2), ((1,), ())))
    read = []
    take = sampling.take_samples
    monkeypatch.setattr(sampling, "take_samples", lambda found: read.extend(found) or take(found))
    checked(folder, right)
    alone = len(read)
    assert alone > TENSORS_PER_LAYOUT * 4
    read.clear()
    others = [write(tmp_path / f"{i}.json", names, Layout((2, 2), ((1,), ()))) for i in range(3)]
    found = checked(folder, right, *others)
    assert len(read) == alone
    assert [one.verdict for one in found] == ["proven"] * 4
    read.clear()
    checked(folder, right, write(tmp_path / "c.ckpt", names, Layout((2, 2), ((), (1,)))))
    assert len(read) == alone  # the same ranks hold the same


def test_a_strategy_that_covers_all_names_does_not_fit_if_contents_contradict(halves, tmp_path):
    folder, names = halves
    wrong = {
        "swapped": Layout((2, 2), ((0,), ())),
        "each": Layout((4,), ((0,), ())),
        "shard": Layout((2, 2), ((1,), ()), optimizer_shard=2),
    }
    paths = [write(tmp_path / f"{name}.ckpt", names, one) for name, one in wrong.items()]
    right = write(tmp_path / "right.json", names, Layout((2, 2), ((1,), ())))
    found = checked(folder, *paths, right)
    assert [Path(found[0].path).name, found[0].verdict] == ["right.json", "proven"]
    assert {one.verdict for one in found[1:]} == {"no"}
    assert all(one.findings for one in found[1:])
    assert {one.listed for one in found} == {20}


def test_equal_layouts_of_other_device_matrices_fit_alike(halves, tmp_path):
    folder, names = halves
    paths = [
        write(tmp_path / "a.json", names, Layout((2, 2), ((1,), ()))),
        write(tmp_path / "b.json", names, Layout((2, 1, 2), ((2,), ()))),
        write(tmp_path / "c.json", names[:4], Layout((2, 2), ((1,), ()))),
    ]
    found = checked(folder, *paths)
    assert [one.verdict for one in found[:2]] == ["proven", "proven"]
    assert found[2].verdict == "possible"  # 16 tensors differ between ranks, and it lists none
    assert {one.code for one in found[2].findings} == {"unlisted"}


def test_full_shapes_that_a_strategy_lists_are_evidence(tmp_path):
    full = noise("w", "Float32", (8, 4))
    ranks = {r: {"w": full.excerpt(slice(4 * r, 4 * r + 4))} for r in (0, 1)}
    write_ranks(tmp_path / "run", ranks, "ckpt")
    rows, columns = Layout((2,), ((0,), ())), Layout((2,), ((), (0,)))
    listed = {"rows.json": rows, "columns.json": columns, "rows.ckpt": rows}
    paths = [
        write(tmp_path / name, ["w"], replace(one, full_shape=(8, 4)))
        for name, one in listed.items()
    ]
    found = {Path(one.path).name: one for one in checked(tmp_path / "run", *paths)}
    assert {name: one.verdict for name, one in found.items()} == {
        "rows.json": "proven",
        "columns.json": "no",
        "rows.ckpt": "possible",
    }
    assert found["rows.json"].shaped == 1


def test_missing_files_leave_a_strategy_in_doubt(halves, tmp_path):
    folder, names = halves
    right = write(tmp_path / "a.json", names, Layout((2, 2), ((1,), ())))
    for rank, code, verdict in ((3, "missing_replica", "possible"), (2, "strategy", "no")):
        (path,) = (folder / f"rank_{rank}").iterdir()
        path.unlink()
        (found,) = checked(folder, right)
        assert (found.verdict, found.is_open) == (verdict, verdict == "possible")
        assert code in {one.code for one in found.findings}


def test_a_strategy_fits_only_if_something_could_have_contradicted_each_tensor(tmp_path):
    norm = noise("n", "Float32", (4,))
    ranks = {r: {"w": noise(f"w{r}", "Float32", (4, 4)), "n": norm} for r in range(4)}
    write_ranks(tmp_path / "grid", ranks, "ckpt")
    n = Layout((2, 2), ((),), full_shape=(4,))
    for tensor_map in (((0,), (1,)), ((1,), (0,))):  # the first swaps ranks 1 and 2
        for form in ("json", "ckpt"):
            path = tmp_path / f"s.{form}"
            w = Layout((2, 2), tensor_map, full_shape=(8, 8))
            ckpttool.write_strategy(strategy_of({"w": w, "n": n}), str(path), overwrite=True)
            (found,) = checked(tmp_path / "grid", path)
            assert (found.verdict, found.is_open) == ("possible", True)
            assert found.unproven == {
                **({"axis": ("w",)} if form == "ckpt" else {}),
                "order": ("w",),
            }


def test_equal_elements_show_nothing(tmp_path):
    full = noise("w", "Float32", (8, 4))
    bias = entry_of(np.ones(4, np.float32))
    ranks = {r: {"w": full.excerpt(slice(4 * r, 4 * r + 4)), "b": bias} for r in (0, 1)}
    write_ranks(tmp_path / "run", ranks, "ckpt")
    w = Layout((2,), ((0,), ()), full_shape=(8, 4))
    path = tmp_path / "s.json"
    for shape, unproven in ((None, {"owners": ("b",)}), ((4,), {})):
        b = Layout((2,), ((),), full_shape=shape)
        ckpttool.write_strategy(strategy_of({"w": w, "b": b}), str(path), overwrite=True)
        (found,) = checked(tmp_path / "run", path)
        assert found.unproven == unproven
        assert found.verdict == ("possible" if unproven else "proven")


def test_files_of_two_stages_are_not_of_a_strategy_of_one():
    folder = GOLDEN / "pipeline_2x4_to_8"
    right, wrong = checked(
        folder / "src", folder / "dst_strategy.ckpt", folder / "src_strategy.ckpt"
    )
    assert (Path(right.path).name, right.is_open) == ("src_strategy.ckpt", True)
    assert (wrong.verdict, wrong.is_open) == ("no", False)
    (problem,) = wrong.findings
    assert problem.message.endswith(
        "has one stage of 8 ranks, the files have 2: ranks 0-3 and 4-7 hold other parameters"
    )


def test_files_that_nobody_can_read_are_an_error_of_the_source():
    folder = GOLDEN / "encrypted_cbc"
    with pytest.raises(ckpttool.CkptToolError, match="there is no key"):
        checked(folder / "src", folder / "src_strategy.ckpt")


@pytest.mark.parametrize(("folder", "path"), [*sources()])
def test_the_strategy_of_the_run_is_never_refused(folder, path):
    options = ckpttool.SourceOptions()
    if folder.parent.name.startswith("encrypted"):
        key = (folder.parent / "case.json").read_text(encoding="utf-8")
        options = replace(options, key=key.partition('"enc_key": "')[2].partition('"')[0].encode())
    catalog = ckpttool.scan(str(folder), options)
    (found,) = check_strategies(catalog, [str(path)], InlineExecutor())
    assert found.verdict != "no", found.findings


def test_every_other_strategy_of_the_corpus_is_judged():
    folder = GOLDEN / "reshard_8_to_4" / "src"
    own = read_strategy(str(GOLDEN / "reshard_8_to_4" / "src_strategy.ckpt"))
    paths = sorted(GOLDEN.glob("*/*_strategy.*"))
    found = checked(folder, *paths)
    possible = [one for one in found if one.is_open and not one.findings]
    assert found[: len(possible)] == (*possible,)
    for one in possible:
        layouts = read_strategy(one.path).layouts
        common = layouts.keys() & own.layouts.keys()
        assert common
        assert all(layouts[name] == own.layouts[name] for name in common), one.path
    assert len(possible) >= 3


@pytest.mark.parametrize(
    ("case", "options"), [("reshard_8_to_4", {}), ("pipeline_8_to_2x4", {"format": "ckpt"})]
)
def test_the_strategy_that_a_manifest_names_fits_and_so_does_its_equal(case, options, tmp_path):
    golden = GOLDEN / case
    (named,) = golden.glob("dst_strategy.*")
    own, equal = tmp_path / f"own{named.suffix}", tmp_path / "equal.json"
    shutil.copy(named, own)
    ckpttool.reshard(golden / "src", golden / "src_strategy.ckpt", own, tmp_path / "new", **options)
    ckpttool.write_strategy(read_strategy(str(own)), str(equal))
    found = checked(tmp_path / "new", own, equal)
    assert [(one.verdict, one.recorded, one.unproven) for one in found] == [
        ("proven", True, {}),
        ("proven", True, {}),
    ]
    (tmp_path / "new" / "ckpttool.json").unlink()
    (found,) = checked(tmp_path / "new", own)
    assert (found.verdict, found.recorded) == ("possible", False)


@pytest.mark.parametrize(
    ("mine", "other"), [(ROWS, SHARDED), (replace(WHOLE, optimizer_shard=4), WHOLE)]
)
def test_a_strategy_of_another_optimizer_shard_does_not_fit_a_set(mine, other, tmp_path):
    full = {"w": noise("w", "Float32", (16, 16))}
    write_ranks(tmp_path / "src", cut(full, strategy_of({"w": mine})), "ckpt")
    paths = [str(tmp_path / f"{name}.ckpt") for name in ("own", "other")]
    for path, layout in zip(paths, (mine, other), strict=True):
        ckpttool.write_strategy(strategy_of({"w": layout}), path)
    ckpttool.reshard(tmp_path / "src", paths[0], paths[0], tmp_path / "new", format="ckpt")
    found = checked(tmp_path / "new", *paths)
    assert [(one.path, one.verdict) for one in found] == [(paths[0], "proven"), (paths[1], "no")]
