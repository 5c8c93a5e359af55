"""Folders with files of several training runs: which files are of one run."""

import json
import math
import os
from pathlib import Path

import pytest

from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import Strategy
from ckpttool.strategy_files.reader import read_strategy
from tests.support.file_bytes import record as tensor_record
from tests.support.scans import fails, found, notes_of


def record(src, rank, name):
    """Write the meta.json of a rank."""
    epoch, step = name.rsplit("-", 1)[1].removesuffix(".ckpt").split("_")
    entries = {"last_epoch": int(epoch), "last_step": int(step), "last_ckpt_file": name}
    Path(src, f"rank_{rank}", "meta.json").write_text(json.dumps(entries))


def take(*names):
    """Return rank to path, for the names of the files of ranks 0, 1, ..."""
    return {rank: f"rank_{rank}/{name}" for rank, name in enumerate(names)}


OLD, NEW = "gpt-3_8.ckpt", "gpt_1-3_8.ckpt"


def replaced_node(make_run):
    """Return a folder in which rank 1 has no file of the first of two runs."""
    return make_run(f"rank_0/{OLD}", f"rank_0/{NEW}", f"rank_1/{OLD}")


# --------------------------------------------------------------------------------------- records


def test_records_that_name_one_step_choose_whatever_the_counters(make_run):
    src = replaced_node(make_run)
    record(src, 0, NEW)
    record(src, 1, OLD)
    assert found(src) == take(NEW, OLD)
    assert found(src, step="3_8") == take(NEW, OLD)
    assert found(src, step=NEW) == take(NEW, OLD)


@pytest.mark.parametrize("named", [OLD, "gpt-3_8"])
def test_a_name_that_contradicts_the_record_of_its_step_is_refused(make_run, named):
    src = replaced_node(make_run)
    record(src, 0, NEW)
    record(src, 1, OLD)
    text = f"rank 0: meta.json names another file of step 3_8\n  it names {NEW}"
    fails(src, text, "Try: --step 3_8", step=named)


@pytest.mark.parametrize("later", ["gpt_1-4_8.ckpt", "gpt_2-1_8.ckpt"])
def test_a_later_run_than_the_record_of_its_rank_is_refused(make_run, later):
    src = make_run(f"rank_0/{OLD}", f"rank_0/{later}", f"rank_1/{OLD}")
    record(src, 0, OLD)
    record(src, 1, OLD)
    fails(src, "rank 0: files of a later run than meta.json records", later, "Try: --step 3_8")
    assert found(src, step="3_8") == take(OLD, OLD)


@pytest.mark.parametrize("without", [0, 1])
def test_a_rank_without_a_record_makes_the_step_a_question(make_run, without):
    src = make_run(f"rank_0/{OLD}", f"rank_1/{OLD}")
    record(src, 1 - without, OLD)
    text = f"rank {without}: no meta.json says which run saved step 3_8"
    fails(src, text, "Try: --step 3_8")
    assert found(src, step="3_8") == take(OLD, OLD)


def test_records_of_several_steps_choose_among_files_of_their_runs(make_run):
    """A rank whose record is of an earlier run did not take part in the last one."""
    src = make_run(*(f"rank_0/gpt-{step}_8.ckpt" for step in (3, 4)))
    make_run(*(f"rank_1/gpt-{step}_8.ckpt" for step in (3, 4)), f"rank_1/{NEW}")
    record(src, 0, "gpt-4_8.ckpt")
    record(src, 1, NEW)
    fails(src, "rank 0: nothing shows which run saved step 3_8\n  rank 1 has gpt_1-3_8.ckpt, gpt-3")


# ------------------------------------------------------------------------------- without records


@pytest.mark.parametrize("counters", [("", "_1"), ("_1", "_2", "_10")])
def test_the_highest_counter_is_read_if_every_rank_has_as_many_files(make_run, counters):
    names = [f"gpt{counter}-3_8.ckpt" for counter in ("", *counters[1:])]
    src = make_run(*(f"rank_{rank}/{name}" for rank in range(3) for name in names))
    assert found(src) == take(*[names[-1]] * 3)
    assert found(src, step="gpt-3_8.ckpt") == take(*["gpt-3_8.ckpt"] * 3)
    (note,) = notes_of(src, "skipped")
    assert "of an earlier run" in note


@pytest.mark.parametrize("named", [None, "3_8", OLD, NEW])
def test_a_file_is_of_any_run_where_only_other_ranks_have_several(make_run, named):
    src = replaced_node(make_run)
    for name in (OLD, NEW):
        os.utime(f"{src}/rank_0/{name}", ns=(0, 0))
    fails(
        src,
        "rank 1: nothing shows which run saved step 3_8",
        f"rank 0 has {NEW}, {OLD}",
        "Try: name the file of each rank",
        step=named,
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_times_that_set_the_files_of_a_save_apart_order_the_proposal(make_run, is_first):
    src = replaced_node(make_run)
    times = {(0, OLD): 1000, (0, NEW): 2000, (1, OLD): 1001 if is_first else 2001}
    for (rank, name), seconds in times.items():
        os.utime(f"{src}/rank_{rank}/{name}", (seconds, seconds))
    hint = "name the file" if is_first else "--step 0:gpt_1-3_8.ckpt/1:gpt-3_8.ckpt, if the dates"
    fails(src, f"Try: {hint}")


def test_times_propose_the_ranks_that_hold_all_slices(tmp_path):
    """The second run was killed before rank 2 had saved; ranks 0 and 2 hold the same."""
    src = str(tmp_path)
    write_run(src, "", "3_8", [{"w": (4, 4)}] * 4)
    write_run(src, "_1", "3_8", [{"w": (4, 4)}] * 4)
    (tmp_path / "rank_2" / NEW.replace("gpt", "net")).unlink()
    for path in tmp_path.glob("*/net*"):
        seconds = (2000 if "_1-" in path.name else 1000) + int(path.parent.name[-1])
        os.utime(path, (seconds, seconds))
    strategy = Strategy({"w": (Layout((2, 2), ((0,), ())),)}, 1, 4)
    step = "0-1:net_1-3_8.ckpt/3:net_1-3_8.ckpt"
    fails(src, f"Try: --step {step}, if the dates", strategy=strategy)
    assert sorted(scan(src, SourceOptions(step=step), strategy).files) == [0, 1, 3]


@pytest.mark.parametrize("is_copied", [True, False])
def test_times_order_the_runs_of_several_prefixes_unless_a_copy_made_them_equal(
    make_run, is_copied
):
    names = ("base-4_2.ckpt", "tuned-2_2.ckpt")
    src = make_run(*(f"rank_{rank}/{name}" for rank in (0, 1) for name in names))
    for path in Path(src).glob("*/*"):
        seconds = 2000 if path.name == names[1] and not is_copied else 1000
        os.utime(path, (seconds, seconds))
    hint = "Try: name the file" if is_copied else "Try: --step 2_2, or --step 4_2"
    fails(src, hint)
    fails(src, "found 2_2, 4_2\n  Try: --step 4_2" if is_copied else "--step 2_2", step="9_9")


def test_a_step_takes_a_file_for_each_rank(make_run):
    src = make_run(*(f"rank_{r}/net_rank_{r}{c}-1_2.ckpt" for r in range(4) for c in ("", "_1")))
    names = [f"net_rank_{rank}-1_2.ckpt" for rank in range(4)]
    names[1:3] = [f"net_rank_{rank}_1-1_2.ckpt" for rank in (1, 2)]
    assert found(src, step="0,3:net_rank_3-1_2/1-2:net_rank_1_1-1_2.ckpt") == take(*names)
    fails(src, "several files of ranks 0-3", "files of rank 0: net_rank_0-1_2", step="0-3:1_2")
    fails(src, "no file of rank 4\n  files of rank 4: none", step="0-4:net_rank_0-1_2")
    make_run("rank_0/net_rank_0-2_2.ckpt")
    wanted = "0:net_rank_0-2_2/1-3:net_rank_1-1_2"
    fails(src, "--step names files of several steps", step=wanted)


@pytest.mark.parametrize("trace", ["rank_0/gpt_1-3_8.ckpt", "rank_2/gpt_1-3_8.tmp"])
def test_a_trace_of_a_later_save_of_the_step_makes_it_a_question(make_run, trace):
    src = make_run(*(f"rank_{rank}/{OLD}" for rank in (1, 2)), f"rank_0/{OLD}", trace)
    if trace.endswith(".ckpt"):
        Path(src, "rank_0", OLD).unlink()
    fails(src, "files of step 3_8 may be of two runs", "gpt_1-3_8", "Try: --step 3_8")
    assert len(found(src, step="3_8")) == 3


def test_an_older_step_of_a_later_run_is_refused_and_proposed_first(make_run):
    src = make_run(*(f"rank_{r}/{n}" for r in range(2) for n in ("gpt-9_8.ckpt", NEW)))
    fails(src, "several checkpoints in the folders of ranks 0, 1", "--step 3_8, or --step 9_8")
    assert found(src, step="9_8") == take("gpt-9_8.ckpt", "gpt-9_8.ckpt")


def test_an_older_step_that_was_written_last_is_a_warning(make_run):
    src = make_run("rank_0/gpt-3_8.ckpt", "rank_1/gpt-3_8.ckpt", "rank_1/gpt-4_8.ckpt")
    os.utime(f"{src}/rank_1/gpt-4_8.ckpt", (1000, 1000))
    (text,) = notes_of(src, "mixed_times")
    assert text.startswith(f"{src}: rank 0: step 3_8 was written after a later step\n")


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
    (warning,) = (one for one in catalog.diagnostics if one.code == "older_ranks")
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
    (text,) = fails(src, "Try: --step 5_1", strategy=strategy_of(w=2))
    assert "ranks 2, 3: not in the strategy, and with later steps" in text
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
    (text,) = fails(src, strategy=strategy)
    assert f"Try: --step {step}, if the dates of these files agree" in text
    assert sorted(scan(src, SourceOptions(step=step), strategy).files) == [*recorded]
    sharded = Strategy({"w": (Layout((4,), ((0,), ())),)}, 1, 4)
    fails(src, "--step names no file of ranks", strategy=sharded, step=step)


# ------------------------------------------------------------------ several runs and a step by name


def test_a_step_by_name_is_of_the_recorded_runs_of_all_ranks_or_of_none(make_run):
    """Ranks 0 and 1 went on with a second run; 2 and 3 still have the first run of others."""
    names = {0: ("g-2_2", "g_1-4_2"), 1: ("g-2_2", "g_1-4_2"), 2: ("g-2_2",), 3: ("g-2_2",)}
    src = make_run(*(f"rank_{rank}/{name}.ckpt" for rank in names for name in names[rank]))
    for rank, of_rank in names.items():
        record(src, rank, f"{of_rank[-1]}.ckpt")
    fails(src, "the files of all ranks are not of one run", step="2_2")
    for rank in (2, 3):
        make_run(f"rank_{rank}/g_1-4_2.ckpt")
        record(src, rank, "g_1-4_2.ckpt")
    assert found(src, step="2_2") == take(*["g-2_2.ckpt"] * 4)  # all leave their recorded run


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


@pytest.mark.parametrize("named", ["3_2", "g-3_2.ckpt"])
def test_a_step_of_an_earlier_run_on_some_ranks_only_is_refused(make_run, named):
    old = [f"rank_{rank}/g-{step}_2.ckpt" for rank in (0, 1) for step in (1, 2, 3)]
    new = [f"rank_{rank}/g-{step}_2.ckpt" for rank in (2, 3) for step in (2, 3)]
    src = make_run(*old, *new, *(f"rank_{rank}/g_1-2_2.ckpt" for rank in (0, 1)))
    fails(src, "ranks 0, 1: a later run than that of step 3_2 left files", step=named)


def test_a_step_of_all_ranks_is_read_whatever_their_names(make_run):
    """The names have the number of the device on its host."""
    src = make_run(*(f"rank_{r}/net_{r % 2}-{step}_2.ckpt" for r in range(4) for step in (1, 2)))
    assert found(src, step="0-3:2_2") == take(*(f"net_{rank % 2}-2_2.ckpt" for rank in range(4)))


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


def test_what_inspect_shows_names_the_files_of_ranks(make_run):
    src = make_run(*(f"rank_{r}/net_rank_{r}{c}-1_2.ckpt" for r in range(2) for c in ("", "_1")))
    step = "0:net_rank_{rank}_1-1_2.ckpt/1:net_rank_{rank}-1_2"
    assert found(src, step=step) == take("net_rank_0_1-1_2.ckpt", "net_rank_1-1_2.ckpt")
    (text,) = fails(src, "no file of ranks 0, 1", step="0-1:nett-1_2")
    assert text.count("no file of") == 1
