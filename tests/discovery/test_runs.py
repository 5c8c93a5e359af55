"""Folders with files of several training runs: which files are of one run."""

import json
import math
from pathlib import Path

import pytest

from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.strategy_files.reader import read_strategy
from tests.support.file_bytes import record as tensor_record
from tests.support.scans import fails


def record(src, rank, name):
    """Write the meta.json of a rank."""
    epoch, step = name.rsplit("-", 1)[1].removesuffix(".ckpt").split("_")
    entries = {"last_epoch": int(epoch), "last_step": int(step), "last_ckpt_file": name}
    Path(src, f"rank_{rank}", "meta.json").write_text(json.dumps(entries))


# ------------------------------------------------------------------------------ with a strategy


def write_run(src, counter, step, slices):
    """Write a tensor of some shape for each rank."""
    for rank, tensors in enumerate(slices):
        path = Path(src, f"rank_{rank}", f"net{counter}-{step}.ckpt")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(
            b"".join(
                tensor_record(name, dims=shape, content=bytes(4 * math.prod(shape)))
                for name, shape in tensors.items()
            )
        )


def strategy_of(**shards):
    """Return a strategy of one stage for as many ranks as axis 0 has slices."""
    ranks = max(shards.values())
    layouts = {
        name: (Layout((ranks // n, n), ((0,) if n > 1 else (), ())),) for name, n in shards.items()
    }
    return Strategy(layouts, 1, ranks)


def test_files_of_other_slices_are_no_candidates(tmp_path):
    src = str(tmp_path)
    write_run(src, "", "5_1", [{"w": (2, 4), "v": (8, 8)}] * 4)
    write_run(src, "_1", "3_1", [{"w": (4, 4), "v": (8, 8)}] * 2)
    four = scan(src, strategy=strategy_of(w=4, v=1))
    assert (len(four.files), four.step) == (4, "5_1")


def test_files_of_another_stage_are_no_candidates(tmp_path):
    src = str(tmp_path)
    write_run(src, "", "5_1", [{"a": (2, 2)}, {"b": (2, 2)}])
    write_run(src, "_1", "6_1", [{"b": (2, 2)}, {"a": (2, 2)}])
    layouts = {"a": (Layout((1,), ((), ())),), "b": (Layout((1,), ((), ()), 1, 1),)}
    catalog = scan(src, strategy=Strategy(layouts, 2, 1))
    assert (sorted(catalog.metas), catalog.step) == (["a", "b"], "5_1")


@pytest.mark.parametrize("counter", ["", "_1"])
def test_older_files_of_ranks_beyond_the_strategy_are_ignored_with_a_warning(tmp_path, counter):
    src = str(tmp_path)
    write_run(src, "", "5_1", [{"w": (2, 4)}] * 4)
    write_run(src, counter, "7_1", [{"w": (4, 4)}] * 2)
    catalog = scan(src, strategy=strategy_of(w=2))
    assert (sorted(catalog.files), catalog.step, catalog.missing_ranks) == ([0, 1], "7_1", ())
    (warning,) = (warning for warning in catalog.diagnostics if warning.code == "older_ranks")
    assert (warning.ranks, "step 5_1" in warning.facts) == ((2, 3), True)


@pytest.mark.parametrize(
    ("step", "tensors"), [("5_1", {"of_another_stage": (2, 4)}), ("8_1", {"w": (2, 4)})]
)
def test_ranks_beyond_the_strategy_count_if_they_may_be_of_the_checkpoint(tmp_path, step, tensors):
    src = str(tmp_path)
    write_run(src, "", step, [{"w": (2, 4)}] * 2 + [tensors] * 2)
    write_run(src, "", "7_1", [{"w": (4, 4)}] * 2)
    assert sorted(scan(src, strategy=strategy_of(w=2)).files) == [0, 1, 2, 3]


def test_later_steps_of_ranks_beyond_the_strategy_are_refused_until_the_step_is_named(tmp_path):
    src = str(tmp_path)
    write_run(src, "", "5_1", [{"w": (4, 4)}] * 2)
    write_run(src, "_1", "7_1", [{"w": (2, 4)}] * 4)
    for rank in (2, 3):
        (tmp_path / f"rank_{rank}" / "net_1-7_1.ckpt").rename(
            tmp_path / f"rank_{rank}" / "net-7_1.ckpt"
        )
    for rank in (0, 1):  # the run of more ranks lost its files here
        (tmp_path / f"rank_{rank}" / "net_1-7_1.ckpt").unlink()
    (message,) = fails(src, "Try: --step 5_1", strategy=strategy_of(w=2))
    assert "ranks 2, 3: not in the strategy, and with later steps" in message
    catalog = scan(src, SourceOptions(step="5_1"), strategy_of(w=2))
    assert sorted(catalog.files) == [0, 1]


@pytest.mark.parametrize("recorded", [(0, 1), (2, 3)])
def test_recorded_files_that_hold_all_slices_are_proposed(tmp_path, recorded):
    """Two replicas of each slice; the others were killed in the first save of their run."""
    src = str(tmp_path)
    for counter, step in (("", "3_8"), ("", "5_8"), ("_1", "3_8")):
        write_run(src, counter, step, [{"w": (4, 4)}] * 4)
    for rank in range(4):
        if rank in recorded:
            record(src, rank, "net_1-3_8.ckpt")
        else:
            record(src, rank, "net-5_8.ckpt")
            Path(src, f"rank_{rank}", "net_1-3_8.ckpt").unlink()
    strategy = Strategy({"w": (Layout((2, 2), ((0,), ())),)}, 1, 4)
    first, last = recorded
    step = f"{first}-{last}:net_1-3_8.ckpt"
    (message,) = fails(src, strategy=strategy)
    assert f"Try: --step {step}" in message
    assert sorted(scan(src, SourceOptions(step=step), strategy).files) == [*recorded]
    sharded = Strategy({"w": (Layout((4,), ((0,), ())),)}, 1, 4)
    fails(src, "no file was chosen for ranks", strategy=sharded, step=step)


# ------------------------------------------------------------------ several runs and a step by name


def test_a_rank_without_the_step_may_be_of_another_run_if_others_have_two(tmp_path):
    src = str(tmp_path)
    write_run(src, "", "10_2", [{"w": (4, 4)}] * 4)
    write_run(src, "_1", "10_2", [{"w": (4, 4)}] * 4)
    for rank in (1, 3):
        for path in Path(src, f"rank_{rank}").iterdir():
            path.rename(path.with_name("net-9_2.ckpt"))
    strategy = Strategy({"w": (Layout((2, 2), ((1,), ())),)}, 1, 4)
    for step in ("10_2", "net-10_2.ckpt", "net_1-10_2.ckpt"):
        fails(src, "ranks 1, 3: nothing shows which run", strategy=strategy, step=step)


@pytest.mark.parametrize("counter", ["", "_1"])
def test_a_hand_written_strategy_drops_files_of_other_slices(tmp_path, counter):
    src = str(tmp_path)
    write_run(src, "", "5_1", [{"w": (2, 4)}] * 4)
    write_run(src, counter, "7_1", [{"w": (4, 4)}] * 2)
    Path(src, "s.yaml").write_text("ckpttool_strategy: 1\nranks: 4\nparameters:\n  w: {axis: 0}\n")
    assert scan(src, strategy=read_strategy([str(tmp_path / "s.yaml")])).step == "5_1"


def test_other_ranks_with_other_slices_of_the_step_are_of_another_run(tmp_path):
    """Fewer ranks repeat the last step of a run on more ranks."""
    src = str(tmp_path)
    write_run(src, "", "12_2", [{"w": (2, 4)}] * 4)
    write_run(src, "_1", "12_2", [{"w": (4, 4)}] * 2)
    catalog = scan(src, strategy=strategy_of(w=2))
    assert {rank: Path(file.path).name for rank, file in catalog.files.items()} == {
        0: "net_1-12_2.ckpt",
        1: "net_1-12_2.ckpt",
    }
    write_run(src, "_1", "12_2", [{"w": (2, 4)}] * 2)
    assert sorted(scan(src, strategy=strategy_of(w=2)).files) == [0, 1, 2, 3]


def test_other_ranks_that_have_the_named_step_belong_to_the_checkpoint(tmp_path):
    """A later run on fewer ranks took the same name."""
    src = str(tmp_path)
    for step in ("1_2", "2_2"):
        write_run(src, "", step, [{"w": (2, 4)}] * 4)
    write_run(src, "", "3_2", [{"w": (4, 4)}] * 2)
    strategy = strategy_of(w=2)
    assert sorted(scan(src, SourceOptions(step="2_2"), strategy).files) == [0, 1, 2, 3]
    assert sorted(scan(src, strategy=strategy).files) == [0, 1]
