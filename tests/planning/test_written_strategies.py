"""split and reshard --write-strategy: the strategy of the outputs, as a file of MindSpore's."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import replace

import pytest

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.storage.files import write_document
from ckpttool.strategy_files.reader import read_strategy
from tests.support.checkpoints import cut, noise, strategy_of, write_file, write_ranks
from tests.support.commands import files_below, message, run, run_well, verify_document
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.damage import flip_byte
from tests.support.executors import CASE, contents, ordered_words, reshard_words
from tests.support.manifests import LOG, MANIFEST, RECORD
from tests.support.readers import read, read_ranks


def words_of(folder, *more):
    return [*ordered_words(folder), "--write-strategy", folder / "s.ckpt", *more]


# ------------------------------------------------------------------------------ what it says


def test_it_is_the_strategy_of_the_target(tmp_path):
    result = run_well(*words_of(tmp_path))
    target = read_strategy(str(CASE / "dst_strategy.ckpt"))
    told = read_strategy(str(tmp_path / "s.ckpt"))
    assert {name: told.layouts[name] for name in target.layouts} == target.layouts
    assert {*told.layouts} - {*target.layouts} == set()
    assert (told.stages, told.stage_ranks) == (target.stages, target.stage_ranks)
    assert f"{tmp_path / 's.ckpt'}" in message(result)
    assert " strategy " in message(result)


def test_files_of_many_stages_become_one(tmp_path):
    folder = SAMPLES / "pp2" / "strategy"
    run_well("merge", SAMPLES / "pp2" / "ckpt", "-s", folder, "-o", tmp_path / "m.ckpt")
    words = ["-d", folder / "strategy_4.ckpt", "-d", folder / "strategy_0.ckpt", "-q"]
    words += ["--format", "ckpt", "-o", tmp_path / "out", "--write-strategy", tmp_path / "s.ckpt"]
    run_well("split", tmp_path / "m.ckpt", *words)
    told = read_strategy(str(tmp_path / "s.ckpt"))
    assert (told.stages, told.stage_ranks) == (2, 4)
    assert told.layouts == read_strategy(str(folder / "merged.ckpt")).layouts
    again = [tmp_path / "out", "-s", tmp_path / "s.ckpt", "-o", tmp_path / "again.ckpt"]
    run_well("merge", *again)
    assert read(tmp_path / "again.ckpt") == read(tmp_path / "m.ckpt")


def make_source(folder):
    """A checkpoint of one file: a weight with state, and what nobody cuts."""
    entries = {
        "w": noise("w", "Float32", (8, 8)),
        "moments.w": noise("moments.w", "Float32", (8, 8)),
        "frozen": noise("frozen", "Float16", (4, 5)),
        "step": noise("step", "Int32", (1,)),
        "scale": noise("scale", "Float32", ()),
        "an-odd-one": noise("an-odd-one", "Float32", (4,)),
    }
    write_file(folder / "m.ckpt", entries, "ckpt")
    return entries


HAND = """\
ckpttool_strategy: 1
ranks: 8
stages: 2
parameters:
  "*w": {axis: 1, stages: [1]}
  frozen: {device_matrix: [2, 2], tensor_map: [[0, 1], []]}
otherwise: replicated
"""


def test_rules_by_hand_become_layouts(tmp_path):
    entries = make_source(tmp_path)
    (tmp_path / "hand.yaml").write_text(HAND)
    words = ["-d", tmp_path / "hand.yaml", "-o", tmp_path / "out", "--format", "ckpt"]
    run_well("split", tmp_path / "m.ckpt", *words, "--write-strategy", tmp_path / "s.ckpt")
    told = read_strategy(str(tmp_path / "s.ckpt")).layouts
    assert told == {
        "w": (Layout((4,), ((), (0,)), 1, 4),),
        "moments.w": (Layout((4,), ((), (0,)), 1, 4),),
        "frozen": tuple(Layout((2, 2), ((0, 1), ()), 1, first) for first in (0, 4)),
    }
    words = ["-s", tmp_path / "s.ckpt", "-o", tmp_path / "n.ckpt"]
    run_well("merge", tmp_path / "out", *words)
    assert read(tmp_path / "n.ckpt") == entries


def test_names_that_mindspore_cannot_read_are_refused_if_they_are_cut(tmp_path):
    make_source(tmp_path)
    (tmp_path / "hand.yaml").write_text(HAND.replace("frozen: ", '"an-*": ').replace(", []]", "]"))
    words = ["-d", tmp_path / "hand.yaml", "-o", tmp_path / "out", "--format", "ckpt"]
    told = ["--write-strategy", tmp_path / "s.ckpt"]
    result = run("split", tmp_path / "m.ckpt", *words, *told)
    assert result.exit_code == 4
    assert "'an-odd-one': 1 parameter with a name that MindSpore cannot read" in message(result)
    assert sorted(files_below(tmp_path)) == ["hand.yaml", "m.ckpt"]


def test_what_the_target_does_not_list_is_undivided_in_each_stage(tmp_path):
    entries = make_source(tmp_path)
    cut_in_stage_1 = Layout((4,), ((), (0,)), 1, 4)
    ckpttool.write_strategy(
        strategy_of({"other": Layout((4,), ((0,),))}, {"w": cut_in_stage_1}),
        str(tmp_path / "d.ckpt"),
    )
    words = ["-d", tmp_path / "d.ckpt", "-o", tmp_path / "out", "--format", "ckpt", "-q"]
    run_well("split", tmp_path / "m.ckpt", *words, "--write-strategy", tmp_path / "s.ckpt")
    whole = tuple(Layout.unsharded(2, 4, first) for first in (0, 4))
    told = read_strategy(str(tmp_path / "s.ckpt"))
    assert told.layouts == {
        "w": (cut_in_stage_1,),
        "moments.w": (cut_in_stage_1,),
        "frozen": whole,
    }
    run_well("merge", tmp_path / "out", "-s", tmp_path / "s.ckpt", "-o", tmp_path / "n.ckpt")
    assert read(tmp_path / "n.ckpt") == entries


def test_single_values_are_listed_as_in_files_that_mindspore_compiles(tmp_path):
    """Those of the network and states of them are; those of the optimizer are not."""
    entries = {"w": noise("w", "Float32", (8, 4)), "gain": noise("g", "Float32", (1,))}
    entries |= {f"moments.{name}": entry for name, entry in entries.items()}
    values = ("global_step", "learning_rate", "momentum", "scale_sense", "moments.gone")
    entries |= {name: noise(name, "Float32", (1,)) for name in values}
    write_file(tmp_path / "m.ckpt", entries, "ckpt")
    compiled = {"w": Layout((4,), ((0,), ())), "gain": Layout((4,), ((),))}
    compiled |= {f"moments.{name}": layout for name, layout in compiled.items()}
    words = ["-o", tmp_path / "out", "--format", "ckpt", "--write-strategy", tmp_path / "s.ckpt"]
    for names in (["w", "gain"], [*compiled]):
        strategy = strategy_of({name: compiled[name] for name in names})
        ckpttool.write_strategy(strategy, str(tmp_path / "d.ckpt"), overwrite=True)
        run_well("split", tmp_path / "m.ckpt", "-d", tmp_path / "d.ckpt", *words, "--overwrite")
        told = read_strategy(str(tmp_path / "s.ckpt")).layouts
        assert told == {name: (layout,) for name, layout in compiled.items()}


def test_a_map_that_json_expands_is_folded(tmp_path):
    layout = Layout((2, 2, 4), ((2, 1, 0), ()))
    entries = {"w": noise("w", "Float32", (32, 8))}
    write_file(tmp_path / "m.ckpt", entries, "ckpt")
    item = {"dev_matrix": [2, 2, 4], "tensor_map": [2, 1, 0, -1], "tensor_shape": [2, 2, 8, 8]}
    (tmp_path / "d.json").write_text(json.dumps({"parallel_layout_item": {"w": item}}))
    words = ["-d", tmp_path / "d.json", "-o", tmp_path / "out", "--format", "ckpt"]
    run_well("split", tmp_path / "m.ckpt", *words, "--write-strategy", tmp_path / "s.ckpt")
    assert read_strategy(str(tmp_path / "s.ckpt")).layouts == {"w": (layout,)}


def test_a_shard_that_gradients_do_not_have_is_not_told_of(tmp_path):
    folder = SAMPLES / "pp2_opt"
    strategy = folder / "strategy" / "merged.ckpt"
    words = ["-s", strategy, "-d", strategy, "-o", tmp_path / "out", "--format", "ckpt", "-q"]
    run_well("reshard", folder / "ckpt", *words, "--write-strategy", tmp_path / "s.ckpt")
    said, told = (read_strategy(str(path)).layouts for path in (strategy, tmp_path / "s.ckpt"))
    corrected = {name for name in said if said[name] != told.get(name)}
    assert corrected
    assert all(name.startswith("accu_grads.") for name in corrected)
    assert all(one.optimizer_shard == 1 for name in corrected for one in told[name])


def test_what_each_rank_has_of_its_own_is_not_told_of(tmp_path):
    entries = {"w": noise("w", "Float32", (8, 8))}
    strategy = strategy_of({"w": Layout((2,), ((0,), ()))})
    ranks = cut(entries, strategy)
    for rank, held in ranks.items():
        held["seed"] = noise(f"seed{rank}", "Int32", (4,))
    write_ranks(tmp_path / "src", ranks, "ckpt")
    ckpttool.write_strategy(strategy, str(tmp_path / "d.ckpt"))
    words = ["-s", tmp_path / "d.ckpt", "-d", tmp_path / "d.ckpt", "--unlisted", "rank", "-q"]
    words += ["-o", tmp_path / "out", "--format", "ckpt", "--write-strategy", tmp_path / "s.ckpt"]
    run_well("reshard", tmp_path / "src", *words)
    assert {*read_ranks(tmp_path / "out")[0]} == {"w", "seed"}
    assert {*read_strategy(str(tmp_path / "s.ckpt")).layouts} == {"w"}


def test_what_is_said_of_all_others_is_no_doubt(tmp_path):
    """``otherwise: replicated`` says of a strategy without one layout what every tensor is."""
    entries = {"w": noise("w", "Float32", (8, 8))}
    write_ranks(tmp_path / "src", dict.fromkeys(range(2), entries), "ckpt")
    (tmp_path / "d.yaml").write_text("ckpttool_strategy: 1\nranks: 2\notherwise: replicated\n")
    words = [tmp_path / "src", "-s", tmp_path / "d.yaml"]
    told = json.loads(run_well("inspect", *words, "--json").stdout)
    assert (told["summary"]["replicas"], told["notes"]) == ([2, 2], [])
    assert "not in the strategy" not in run_well("inspect", *words).stdout
    run_well("merge", *words, "-o", tmp_path / "m.ckpt", "--strict")
    assert read(tmp_path / "m.ckpt") == entries


@pytest.mark.parametrize(
    ("lost", "code"),
    [
        pytest.param(None, "note: seed: target rank r", id="none lost"),
        pytest.param(0, "error[nothing]", id="the first lost"),
        pytest.param(1, "warning[missing_own]", id="another lost"),
    ],
)
def test_ranks_of_their_own_need_no_strategy(tmp_path, lost, code):
    """With ``--replicated`` there are as many as have a file, whatever their numbers are."""
    own = {r: {"seed": noise(f"seed{r}", "Int32", (4,))} for r in range(3) if r != lost}
    write_ranks(tmp_path / "src", own, "ckpt")
    words = ["--replicated", "--unlisted", "rank", "-o", tmp_path / "m.ckpt"]
    assert code in message(run("merge", tmp_path / "src", *words))


# ----------------------------------------------------------------- how it goes with a run


def test_json_names_it(tmp_path):
    document = json.loads(run_well(*words_of(tmp_path), "--json").stdout)
    assert document["strategy"] == str(tmp_path / "s.ckpt")
    assert "indexes" not in document


def test_the_folder_is_read_with_it_in_it(tmp_path):
    run_well(*words_of(tmp_path / "out"))
    told = tmp_path / "out" / "s.ckpt"
    run_well("merge", tmp_path / "out", "-s", told, "-o", tmp_path / "a.ckpt")
    run_well("merge", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", tmp_path / "b.ckpt")
    assert read(tmp_path / "a.ckpt") == read(tmp_path / "b.ckpt")
    result = run_well("verify", tmp_path / "out", "-s", told, "--deep")
    assert "not the strategy that the manifest names" not in message(result)
    listed = json.loads((tmp_path / "out" / MANIFEST).read_text())["dst_strategies"]
    data = told.read_bytes()
    want = {"path": "s.ckpt", "nbytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert listed == [want]
    told.write_bytes((CASE / "src_strategy.ckpt").read_bytes())
    assert "not the strategy that the manifest names" in message(
        run("inspect", tmp_path / "out", "-s", told)
    )


def test_one_that_is_there_is_replaced_only_if_that_is_asked_for(tmp_path):
    (tmp_path / "s.ckpt").write_bytes(b"of somebody")
    result = run(*words_of(tmp_path))
    assert result.exit_code == 5
    assert f"{tmp_path / 's.ckpt'} exists already Try: --overwrite" in message(result)
    assert contents(tmp_path).keys() == {"s.ckpt"}
    run_well(*words_of(tmp_path), "--overwrite")
    assert read_strategy(str(tmp_path / "s.ckpt")).stage_ranks == 4


def test_an_input_is_never_replaced(tmp_path):
    words = ["reshard", CASE / "src", "-s", CASE / "src_strategy.ckpt", "-o", tmp_path / "out"]
    (tmp_path / "d.ckpt").write_bytes((CASE / "dst_strategy.ckpt").read_bytes())
    words += ["-d", tmp_path / "d.ckpt", "--write-strategy", tmp_path / "d.ckpt", "--overwrite"]
    result = run(*words)
    assert result.exit_code == 5
    assert f"{tmp_path / 'd.ckpt'} is an input of this run" in message(result)


OWN_NAMES = [RECORD, LOG, *(f"{RECORD}/{name}" for name in ("lock", "1-of-2.log", "other"))]


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("s.json", 2, "the suffix is for JSON, and the strategy is written as protobuf"),
        ("s.yaml", 2, "the suffix is for hand-written strategies, and"),
        ("rank_0/checkpoint_0.ckpt", 5, "a strategy among the files of ranks would be read as"),
        ("rank_3/s.ckpt", 5, "a strategy among the files of ranks would be read as"),
        ("rank_3/../rank_2/s.ckpt", 5, "a strategy among the files of ranks would be read as"),
        *((name, 5, "ckpttool itself uses this name") for name in OWN_NAMES),
        ("rank_1", 5, "one of two files would have to be a folder the other is the output"),
        (".", 5, "one of two files would have to be a folder the other is the output"),
        ("rank_0/checkpoint_0.ckpt/s.ckpt", 5, "one of two files would have to be a folder"),
        ("s.ckpt.partial", 5, "the name of a temporary file a run that writes s.ckpt removes it"),
    ],
)
def test_a_name_that_means_something_else_is_refused(tmp_path, name, code, said):
    (tmp_path / "rank_3").mkdir()
    words = [*reshard_words(tmp_path, "ckpt"), "--write-strategy", tmp_path / name]
    result = run(*words)
    assert result.exit_code == code
    assert said in message(result)
    assert files_below(tmp_path, manifests=True) == []


def test_it_does_not_go_to_standard_output_or_among_the_source(tmp_path):
    result = run(*reshard_words(tmp_path, "ckpt"), "--write-strategy", "-")
    assert result.exit_code == 2
    assert "--write-strategy: outputs do not go to standard output Try: " in message(result)
    place = CASE / "src" / "rank_0" / "s.ckpt"
    result = run(*reshard_words(tmp_path, "ckpt"), "--write-strategy", place)
    assert result.exit_code == 5
    assert "a strategy among the files of ranks would be read as" in message(result)


def test_it_may_lie_elsewhere_in_a_folder_that_is_not_there(tmp_path):
    place = tmp_path / "strategies" / "new" / "s.ckpt"
    run_well(*reshard_words(tmp_path / "out", "ckpt"), "--write-strategy", place)
    assert read_strategy(str(place)).stage_ranks == 4


def test_it_may_lie_below_the_source_where_no_rank_is(tmp_path):
    shutil.copytree(CASE / "src", tmp_path / "src")
    place = tmp_path / "src" / "strategies" / "s.ckpt"
    words = ["-s", CASE / "src_strategy.ckpt", "-d", CASE / "dst_strategy.ckpt", "-o"]
    told = ["--write-strategy", place]
    run_well("reshard", tmp_path / "src", *words, tmp_path / "out", *told)
    run_well("merge", tmp_path / "src", *words[:2], "-o", tmp_path / "merged.h5")
    assert read_strategy(str(place)).stage_ranks == 4


def test_it_is_not_there_if_the_run_fails_and_an_old_one_is_gone(tmp_path, failing):
    run_well(*words_of(tmp_path))
    whole = contents(tmp_path)
    failing("rank_2")
    assert run(*words_of(tmp_path), "--overwrite").exit_code == 6
    assert "s.ckpt" not in files_below(tmp_path)
    failing(None)
    run_well(*words_of(tmp_path), "--resume", "--overwrite")
    assert contents(tmp_path) == whole


def test_a_run_that_ended_between_it_and_the_manifest_is_continued(tmp_path, monkeypatch):
    run_well(*words_of(tmp_path / "whole"))

    def refuse(path, content):
        if path.endswith(MANIFEST):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        write_document(path, content)

    with monkeypatch.context() as patch:
        patch.setattr("ckpttool.transaction.record.write_document", refuse)
        assert run(*words_of(tmp_path / "out")).exit_code == 6
    assert "s.ckpt" in files_below(tmp_path / "out")
    run_well(*words_of(tmp_path / "out"), "--resume")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    run_well(*words_of(tmp_path / "out"), "--resume")
    (tmp_path / "out" / "s.ckpt").write_bytes(b"of somebody")
    assert run(*words_of(tmp_path / "out"), "--resume").exit_code == 5


def test_a_run_that_is_resumed_writes_it_to_the_place_that_was_named_at_first(tmp_path, failing):
    failing("rank_2")
    assert run(*words_of(tmp_path)).exit_code == 6
    failing(None)
    result = run(*reshard_words(tmp_path, "ckpt"), "--resume")
    assert result.exit_code == 5
    assert "another run did not end here before: `ckpttool " in message(result)
    run_well(*words_of(tmp_path), "--resume")
    assert "s.ckpt" in files_below(tmp_path)


def test_of_runs_in_parts_commit_writes_it(tmp_path):
    run_well(*words_of(tmp_path / "whole"))
    for number in (2, 1):
        run_well(*words_of(tmp_path / "parts", "--part", f"{number}/2"))
    assert "s.ckpt" not in files_below(tmp_path / "parts")
    run_well("finalize", tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    manifests = [(tmp_path / name / MANIFEST).read_bytes() for name in ("parts", "whole")]
    assert manifests[0] == manifests[1]
    run_well(*words_of(tmp_path / "parts", "--part", "1/2", "--overwrite"))
    assert not {"s.ckpt", MANIFEST} & {*files_below(tmp_path / "parts", manifests=True)}


def test_a_part_that_does_not_agree_about_it_is_refused(tmp_path):
    run_well(*words_of(tmp_path, "--part", "1/2"))
    before = contents(tmp_path)
    for more in ((), ("--resume",)):
        result = run(*reshard_words(tmp_path, "ckpt"), "--part", "2/2", *more)
        assert result.exit_code == 5
        assert "part 1/2 was written by another run before: `ckpttool " in message(result)
    assert contents(tmp_path) == before
    result = run("finalize", tmp_path)
    assert result.exit_code == 5
    assert "part 2 of 2 missing Try: the same command with --part 2/2, then ckpttool" in message(
        result
    )


def test_runs_in_parts_write_it_below_their_folder_only(tmp_path):
    words = [*reshard_words(tmp_path / "out", "ckpt"), "--write-strategy", tmp_path / "s.ckpt"]
    result = run(*words, "--part", "1/2")
    assert result.exit_code == 5
    text = f"inside the output folder Try: --write-strategy {tmp_path / 'out' / 's.ckpt'}"
    assert text in message(result)


def test_it_is_the_same_whichever_ranks_are_written(tmp_path):
    run_well(*words_of(tmp_path / "all"))
    run_well(*words_of(tmp_path / "one", "--rank", "2"))
    one, all_ = ((tmp_path / name / "s.ckpt").read_bytes() for name in ("one", "all"))
    assert one == all_


def test_names_that_mindspore_cannot_read_are_told_before_anything_is_written(tmp_path):
    case = GOLDEN / "dash_in_name"
    words = ["reshard", case / "src", "-s", case / "src_strategy.ckpt"]
    words += ["-d", case / "dst_strategy.ckpt", "-o", tmp_path / "out"]
    result = run(*words, "--write-strategy", tmp_path / "s.ckpt")
    assert result.exit_code == 4
    assert "MindSpore splits names at every -" in message(result)
    assert files_below(tmp_path) == []


def test_plans_of_the_library_write_it_too(tmp_path):
    catalog = ckpttool.scan(str(CASE / "src"))
    src, dst = (read_strategy(str(CASE / f"{side}_strategy.ckpt")) for side in ("src", "dst"))
    place = str(tmp_path / "s.ckpt")
    plan, destination = ckpttool.plan_reshard(
        catalog,
        src,
        dst,
        str(tmp_path / "out"),
        output_options=ckpttool.OutputOptions(strategy_path=place),
    )
    assert [document.path for document in plan.documents] == [place]
    assert not os.path.lexists(place)
    ckpttool.execute(plan, destination)
    assert read_strategy(place).layouts == dst.layouts
    with pytest.raises(ckpttool.PlanError, match=r"s\.json: the suffix is for JSON"):
        ckpttool.plan_reshard(
            catalog,
            src,
            dst,
            str(tmp_path / "new"),
            output_options=ckpttool.OutputOptions(strategy_path="s.json"),
        )
    odd = replace(dst, stages=2)
    with pytest.raises(ckpttool.StrategyError, match="no parameter of stage 1"):
        ckpttool.plan_reshard(
            catalog,
            src,
            odd,
            str(tmp_path / "new"),
            output_options=ckpttool.OutputOptions(strategy_path=place + "2"),
        )


# ------------------------------------------------------------------------------ verify


def findings_of(folder, *more):
    """Return the texts of the findings of kind manifest, and the names that were ignored."""
    document = verify_document(folder, *more)
    assert {one["code"] for one in document["findings"]} <= {"manifest"}
    skipped = [one for one in document["notes"] if one["code"] == "skipped"]
    text = f"{folder}: other files or folders among the ranks: ignored"
    assert {one["text"] for one in skipped} <= {text}
    return [one["text"] for one in document["findings"]], [one["facts"] for one in skipped]


@pytest.mark.parametrize("way", ["whole", "parts"])
def test_verify_looks_at_the_strategy_that_was_written_with_a_set(tmp_path, way):
    for more in [()] if way == "whole" else [("--part", "1/2"), ("--part", "2/2")]:
        run_well(*words_of(tmp_path / "out", *more))
    if way == "parts":
        run_well("finalize", tmp_path / "out")
    folder = (tmp_path / "out").rename(tmp_path / "moved")
    told, manifest = folder / "s.ckpt", folder / MANIFEST
    assert findings_of(folder) == ([], [])
    data = told.read_bytes()
    said = f"{manifest}: s.ckpt: is not the strategy that was written: expected"
    flip_byte(told)
    hashes = [hashlib.sha256(one).hexdigest() for one in (data, told.read_bytes())]
    assert findings_of(folder) == ([f"{said} SHA-256 {hashes[0]}, found {hashes[1]}"], [])
    told.write_bytes(data[:-1])
    assert findings_of(folder)[0] == [f"{said} {len(data)} bytes, found {len(data) - 1}"]
    told.unlink()
    gone = f"{manifest}: s.ckpt: the strategy that was written with it is missing"
    assert findings_of(folder)[0] == [gone]
    assert run("verify", folder).exit_code == 1
    assert findings_of(folder / "rank_0" / "checkpoint_0.ckpt")[0] == []
    told.mkdir()
    assert findings_of(folder)[0] == [f"{manifest}: s.ckpt: Is a directory"]
    manifest.write_bytes(manifest.read_bytes().replace(b'"s.ckpt"', b'"s.ckp\\x"'))
    ((text,), skipped) = findings_of(folder)
    assert "the manifest cannot be read" in text
    assert skipped == ["s.ckpt"]


def test_verify_looks_for_the_strategy_where_it_was_written(tmp_path):
    words = [*reshard_words(tmp_path / "a" / "out", "ckpt"), "--write-strategy"]
    run_well(*words, tmp_path / "a" / "out" / "more" / "s.ckpt")
    (tmp_path / "a" / "out" / "s.ckpt").write_bytes(b"of somebody")
    found = findings_of(tmp_path / "a" / "out")
    assert found == ([], ["more, s.ckpt"])
    (tmp_path / "a" / "out" / "more" / "s.ckpt").unlink()
    ((text,), _) = findings_of(tmp_path / "a" / "out")
    assert ": more/s.ckpt: the strategy that was written with it is missing" in text


def test_verify_says_nothing_of_a_strategy_that_was_written_elsewhere(tmp_path):
    words = reshard_words(tmp_path / "out", "ckpt")
    run_well(*words, "--write-strategy", tmp_path / "s.ckpt")
    listed = json.loads((tmp_path / "out" / MANIFEST).read_text())["dst_strategies"]
    assert [one["path"] for one in listed] == ["../s.ckpt"]
    (tmp_path / "s.ckpt").unlink()
    (tmp_path / "out" / "s.ckpt").write_bytes(b"of somebody")
    assert findings_of(tmp_path / "out") == ([], ["s.ckpt"])
