"""Output folders of MindFormers runs: which files are found in them, and which strategy."""

from __future__ import annotations

import json
import shutil

import pytest

from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.problems import CombinedError, PlanError
from ckpttool.strategy_files.reader import read_strategy
from tests.support import corpus
from tests.support.commands import SUFFIXES, mentions, message, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES, assert_merged
from tests.support.file_bytes import layout, operator, strategy
from tests.support.mindformers_output import (
    RANKS,
    is_weight,
    keep_merged,
    keep_strategies,
    record,
    save,
)
from tests.support.readers import read, read_ranks
from tests.support.scans import notes_of

OTHER = "llama_7b_rank_{rank}_1"  # after a name clash
STRATEGY_OF_NOBODY = strategy(operator(0), layout("0-0-nobody", (2, 4), (1, -1)))


@pytest.fixture
def output(tmp_path):
    """The output folder of a run in two stages: three steps, all recorded, strategies of ranks."""
    folder = tmp_path / "output"
    for step in ("1_5", "1_10", "2_3"):
        save(folder, "pp2_opt", step, is_other=step != "2_3")
    record(folder, "2_3")
    keep_strategies(folder, "pp2_opt")
    (folder / "log" / "rank_0").mkdir(parents=True)
    (folder / "log" / "rank_0" / "info.log").write_text("step 3\n")
    return folder


# ------------------------------------------------------------------------------- the commands


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize("strategies", [".ckpt", ".json"])
@pytest.mark.parametrize("sample", ["mp2_dp4", "mp2_dp4_opt_all", "pp2", "pp2_opt", "pp2_shared"])
def test_merge_needs_nothing_but_the_output_folder(sample, strategies, suffix, tmp_path):
    save(tmp_path / "output", sample, "3_7", suffix=suffix)
    keep_strategies(tmp_path / "output", sample, suffix=strategies)
    out = tmp_path / "full.h5"
    result = run_well("merge", tmp_path / "output", "-o", out)
    assert_merged(out, sample)
    assert not mentions(
        message(result), "step 3_7", "strategy from .*output/strategy/.* and 7 more"
    )


def test_merge_takes_the_step_that_was_recorded_last(output, tmp_path):
    run_well("merge", output, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "pp2_opt")


def test_inspect_shows_ranks_step_layouts_and_what_was_taken(output):
    document = json.loads(run_well("inspect", output, "--json").stdout)
    assert [entry["rank"] for entry in document["ranks"]] == list(RANKS)
    assert document["step"] == "2_3"
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert tensors["blocks.0.w"]["shape"] == [16, 16]
    assert {"strategy_file", "step"} <= {note["code"] for note in document["notes"]}
    table = run_well("inspect", output, "--all", "--ranks").stdout
    assert not mentions(table, r"rank_7/llama_7b_rank_7-2_3\.ckpt", r"moment1\.blocks\.1\.w")


@pytest.mark.parametrize("output_format", SUFFIXES)
def test_reshard_needs_no_source_strategy(output_format, tmp_path):
    case = corpus.conversion("pipeline_2x4_to_8", "reshard")
    folder = tmp_path / "output"
    shutil.copytree(case.folder / "src", folder / "checkpoint")
    shutil.copytree(case.folder / "src_stage_strategies", folder / "strategy")
    for i, path in enumerate(sorted((folder / "strategy").iterdir())):
        path.rename(path.with_name(f"ckpt_strategy_rank_{4 * i}.ckpt"))
    words = ["-d", case.folder / "dst_strategy.ckpt", "-o", tmp_path / "new"]
    run_well("reshard", folder, *words, "--format", output_format)
    got = corpus.digests(read_ranks(tmp_path / "new"))
    assert not corpus.differences(case.ranks, got, case.undefined)


def test_the_folder_of_the_rank_folders_is_as_good(output, tmp_path, monkeypatch):
    run_well("merge", output / "checkpoint", "-o", tmp_path / "a.h5")
    monkeypatch.chdir(output / "checkpoint")
    run_well("merge", ".", "-o", tmp_path / "b.h5")
    monkeypatch.chdir(output)
    run_well("merge", "checkpoint", "-o", tmp_path / "c.h5")
    monkeypatch.chdir(output / "checkpoint" / "rank_0")
    run_well("merge", "..", "-o", tmp_path / "d.h5")
    for name in "abcd":
        assert_merged(tmp_path / f"{name}.h5", "pp2_opt")


def test_outputs_do_not_go_among_the_inputs(output):
    words = ["-d", output / "strategy", "-o", output / "checkpoint"]
    result = run("reshard", output, *words)
    assert result.exit_code == 5
    assert not mentions(
        message(result), "checkpoint is the source folder Try: -o with another path$"
    )


@pytest.mark.parametrize("named", [".", "checkpoint"])
def test_outputs_do_not_go_where_they_hide_the_inputs(output, named):
    words = ["-d", output / "strategy", "-o", output]
    for more in (("reshard", output / named, *words), ("merge", output, "-o", output)):
        size = ["--max-shard-size", "1GB"] if more[0] == "merge" else []
        result = run(*more, *size, "--overwrite")
        assert result.exit_code == 5
        said = f"{output}: outputs in this folder hide the source it is in {output}/checkpoint"
        assert f"{said} Try: -o with another path" in message(result)
    run_well("reshard", output, *words[:-1], output / "next")
    assert scan(str(output)).root == str(output / "checkpoint")


# ------------------------------------------------------------------------------ which folder


def test_weights_alone_are_taken_when_named_and_never_mixed(output, tmp_path):
    save(output, "pp2_opt", "2_3", folder="checkpoint_network", prefix=OTHER + "-network")
    out = tmp_path / "full.ckpt"
    result = run_well("merge", output / "checkpoint_network", "-o", out)
    assert read(out).keys() == {"blocks.0.w", "blocks.1.w"}
    assert not mentions(message(result), "strategy from .* and 7 more")
    result = run_well("merge", output, "-o", tmp_path / "all.h5")
    assert_merged(tmp_path / "all.h5", "pp2_opt")
    phrase = "the folder checkpoint is read, not checkpoint_network checkpoint_network: weights"
    assert not mentions(message(result), phrase)


@pytest.mark.parametrize("folder", ["checkpoint_network", "checkpoint_trainable"])
def test_another_folder_is_taken_if_it_is_the_only_one(folder, tmp_path):
    output = tmp_path / "output"
    save(output, "pp2_opt", "2_3", folder=folder)
    (output / "checkpoint").mkdir()
    keep_strategies(output, "pp2_opt")
    run_well("merge", output, "-o", tmp_path / "full.ckpt")
    assert all(is_weight(name) for name in read(tmp_path / "full.ckpt"))
    assert notes_of(output, "skipped") == []


def test_other_checkpoints_beside_it_are_named_and_not_taken(output, tmp_path):
    assert not notes_of(output, "skipped")
    for folder in ("old", "ttp_saved_checkpoints-step_3"):
        shutil.copytree(output / "checkpoint" / "rank_0", output / folder / "rank_0")
    said = f"the folder checkpoint is read, not old Try: {output / 'old'} as SRC, to read that one"
    assert f"note: {output}: {said}" in message(run_well("inspect", output))


def test_a_folder_called_checkpoint_beside_others_is_a_question_if_no_run_made_it(tmp_path):
    save(tmp_path, "pp2_opt", "2_3")
    assert scan(str(tmp_path)).root == str(tmp_path / "checkpoint")
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "new")
    for name in ("inspect", "verify"):
        result = run(name, tmp_path)
        assert result.exit_code == 5
        said = "not a checkpoint, but a folder of 2 checkpoints checkpoint, new Try: "
        assert f"{said}{tmp_path / 'checkpoint'} as SRC" in message(result)


def test_two_folders_without_the_first_are_a_question(tmp_path):
    for folder in ("checkpoint_trainable", "checkpoint_network"):
        save(tmp_path, "pp2_opt", "2_3", folder=folder)
    with pytest.raises(
        PlanError, match=r"network: weights alone; [\s\S]*Try: .*network as SRC, or .*trainable"
    ):
        scan(str(tmp_path))


def test_rank_folders_in_the_folder_itself_come_first(output):
    save(output, "mp2_dp4", "1_1", folder=".")
    assert scan(str(output)).root == str(output)


# ---------------------------------------------------------------------------- which strategy


def test_a_merged_strategy_among_those_of_all_ranks_is_not_read(output, tmp_path):
    """MindSpore merges a merged file again, under names such as ``0-0-w``."""
    keep_merged(output, "pp2_opt")
    (output / "strategy" / "merged_ckpt_strategy.ckpt").write_bytes(STRATEGY_OF_NOBODY)
    run_well("merge", output, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "pp2_opt")


@pytest.mark.parametrize("words", [(), ("-s", "strategy")])
def test_a_merged_strategy_that_is_not_needed_may_be_broken(words, output, tmp_path, monkeypatch):
    monkeypatch.chdir(output)
    (output / "strategy" / "merged_ckpt_strategy.ckpt").touch()
    said = r"merged_ckpt_strategy.ckpt: ignored, .* are read: the strategy file is empty"
    result = run_well("merge", ".", *words, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "pp2_opt")
    assert not mentions(message(result), said)
    for rank in range(4, 8):
        (output / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt").unlink()
    result = run("merge", ".", *words, "-o", tmp_path / "again.h5")
    assert result.exit_code == 5
    assert not mentions(message(result), "ranks 4-7 are not in the strategy", said)


def test_the_ranks_own_json_comes_before_a_merged_protobuf_file(output):
    """Otherwise protobuf comes first, since it says more."""
    shutil.rmtree(output / "strategy")
    keep_strategies(output, "pp2_opt", suffix=".json")
    other = strategy(operator(0), layout("0-other", (2, 2), (-1, -1)))
    (output / "strategy" / "merged_ckpt_strategy.ckpt").write_bytes(other)
    layouts = read_strategy(str(output / "strategy")).layouts
    assert "blocks.0.w" in layouts
    assert "other" not in layouts


def test_a_strategy_that_was_merged_twice_gives_only_stages_that_no_rank_tells(output, tmp_path):
    names = [("0-0-blocks.0.w", (2, 2)), ("1-blocks.1.w", (4, 1))]
    twice = strategy(operator(0), operator(1), *(layout(n, m, (-1, -1)) for n, m in names))
    (output / "strategy" / "merged_ckpt_strategy.ckpt").write_bytes(twice)
    words = ["merge", output / "checkpoint", "-s", output / "strategy", "-o", tmp_path / "full.h5"]
    run_well(*words)
    assert_merged(tmp_path / "full.h5", "pp2_opt")
    for rank in range(4, 8):  # now only the merged file has stage 1, and another stage 0
        (output / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt").unlink()
    found = read_strategy(str(output / "strategy"))
    assert found.stages == 1
    assert "blocks.0.w" in found.layouts


@pytest.mark.parametrize(("cut", "is_stale"), [((-1, 0), True), ((0, -1), False)])
def test_a_merged_strategy_of_another_run_does_not_stand_in(tmp_path, cut, is_stale):
    folder = tmp_path / "strategy"
    folder.mkdir()
    own = strategy(operator(0), layout("a", (2,), (0, -1)))
    (folder / "ckpt_strategy_rank_0.ckpt").write_bytes(own)
    both = (layout("0-a", (2,), cut), layout("1-b", (2,), (0, -1)))
    (folder / "merged_ckpt_strategy.ckpt").write_bytes(strategy(operator(0), operator(1), *both))
    found = read_strategy(str(folder))
    (note,) = found.notes
    assert note.code == "strategy_file"
    if is_stale:
        fact = (
            r"merged_ckpt_strategy.ckpt: ignored, .*: stage 0 has other layouts in .*_rank_0.ckpt"
        )
        assert set(found.layouts) == {"a"}
        assert found.files == (str(folder / "ckpt_strategy_rank_0.ckpt"),)
    else:
        fact = "merged_ckpt_strategy.ckpt: read for stage 1, which no other file lists"
        assert set(found.layouts) == {"a", "b"}
    assert not mentions(note.text, fact)


def test_a_stale_merged_strategy_is_named_where_a_stage_is_missing(tmp_path):
    own = strategy(operator(1), layout("b", (2,), (0, -1)))
    (tmp_path / "strategy_2.ckpt").write_bytes(own)
    both = (layout("0-a", (2,), (0,)), layout("1-b", (2,), (-1, -1)))
    (tmp_path / "merged.ckpt").write_bytes(strategy(operator(0), operator(1), *both))
    words = r"layouts of stage 1 but not of stage 0[\s\S]*merged.ckpt: stage 1 has other layouts"
    with pytest.raises(CombinedError, match=words):
        read_strategy(str(tmp_path))


@pytest.mark.parametrize("ranks", [(), (0,), (0, 1, 5)])
@pytest.mark.parametrize("name", ["merged_ckpt_strategy.ckpt", "merged_ckpt_strategy.json"])
def test_a_merged_strategy_stands_in_for_missing_ones(name, ranks, tmp_path):
    save(tmp_path, "pp2_opt", "2_3")
    keep_strategies(tmp_path, "pp2_opt", ranks=ranks)
    keep_merged(tmp_path, "pp2_opt", name)
    result = run_well("merge", tmp_path, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "pp2_opt")
    assert (name in message(result)) == (ranks in ((), (0,)))


@pytest.mark.parametrize("words", [(), ("-s", "strategy")])
def test_several_merged_strategies_must_agree(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path, "pp2_opt", "2_3")
    keep_merged(tmp_path, "pp2_opt")
    keep_merged(tmp_path, "pp2_opt", "merged_ckpt_strategy_by_rank_4.ckpt")
    run_well("merge", ".", *words, "-o", "full.h5")
    assert_merged(tmp_path / "full.h5", "pp2_opt")
    (tmp_path / "strategy" / "merged_ckpt_strategy_by_rank_4.ckpt").write_bytes(STRATEGY_OF_NOBODY)
    result = run("merge", ".", *words, "-o", "again.h5")
    said = "by_rank_4.ckpt: stage 0 has other parameters in strategy/merged_ckpt_strategy.ckpt"
    assert result.exit_code == 4
    assert said in message(result)


def test_one_strategy_of_a_single_stage_will_do(tmp_path):
    save(tmp_path, "mp2_dp4", "2_3")
    keep_strategies(tmp_path, "mp2_dp4", ranks=[3])
    run_well("merge", tmp_path, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "mp2_dp4")


def test_strategies_of_some_stages_are_not_enough(output):
    for rank in range(4, 8):
        (output / "strategy" / f"ckpt_strategy_rank_{rank}.ckpt").unlink()
    result = run("merge", output, "-o", output / "full.h5")
    assert result.exit_code == 5
    assert not mentions(message(result), "ranks 4-7 are not", "are for ranks 0-3")


def test_strategies_of_another_run_are_an_error(output):
    for path in (output / "strategy").iterdir():
        path.unlink()
    keep_strategies(output, "mp2_dp4")
    result = run("merge", output, "-o", output / "full.h5")
    assert result.exit_code == 5
    assert "no parameter in common" in message(result)


def test_a_strategy_on_the_command_line_comes_first(output, tmp_path):
    given = tmp_path / "given"
    (output / "strategy").rename(given)
    keep_strategies(output, "mp2_dp4")
    result = run_well("merge", output, "-s", given, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "pp2_opt")
    assert "strategy:" not in message(result)


def test_the_strategies_of_a_conversion_are_named_and_not_taken(output, tmp_path):
    (output / "strategy").rename(output / "merged_strategy")
    for command in (["merge", output], ["reshard", output, "-d", output / "merged_strategy"]):
        result = run(*command, "-o", tmp_path / "out")
        assert result.exit_code == 2
        words = (
            "no strategy for 8 ranks",
            r"Try: -s .*/merged_strategy/ckpt_strategy_rank_0\.ckpt",
            r"output/merged_strategy/ckpt_strategy_rank_0\.ckpt and 7 more: perhaps of another",
        )
        assert not mentions(message(result), *words)
    assert scan(str(output)).strategy_files == ()
    (output / "strategy").mkdir()
    keep_strategies(output, "pp2_opt")
    assert notes_of(output, "strategy_file") == []


def test_strategies_of_other_names_are_named_and_not_taken(output):
    for path in (output / "strategy").iterdir():
        path.unlink()
    shutil.copyfile(
        SAMPLES / "pp2_opt" / "strategy" / "merged.ckpt", output / "strategy" / "s.ckpt"
    )
    result = run("merge", output, "-o", output / "full.h5")
    assert result.exit_code == 2
    assert not mentions(
        message(result), r"no strategy.*output/strategy/s\.ckpt: perhaps of another"
    )


def test_inspect_shows_the_ranks_though_the_strategy_is_broken(output):
    (output / "strategy" / "ckpt_strategy_rank_3.ckpt").write_bytes(b"")
    result = run("inspect", output, "--json")
    assert result.exit_code == 4
    document = json.loads(result.stdout)
    assert len(document["ranks"]) == 8
    assert not any("device_matrix" in tensor for tensor in document["tensors"])
    assert len(document["problems"]) == 1
    assert "ckpt_strategy_rank_3.ckpt" in document["problems"][0]["text"]
    assert run("merge", output, "-o", output / "full.h5").exit_code == 4


def test_replicated_and_split_take_no_strategy_unasked(tmp_path):
    case = GOLDEN / "replicated_only"
    output = tmp_path / "output"
    shutil.copytree(case / "src", output / "checkpoint")
    (output / "strategy").mkdir()
    (output / "strategy" / "ckpt_strategy_rank_0.ckpt").write_bytes(b"broken")
    run_well("merge", output, "--replicated", "-o", tmp_path / "full.ckpt")
    full = tmp_path / "one" / "checkpoint" / "rank_0" / "full.ckpt"
    full.parent.mkdir(parents=True)
    (tmp_path / "full.ckpt").rename(full)
    shutil.copytree(output / "strategy", tmp_path / "one" / "strategy")
    words = ["-d", case / "src_strategy.ckpt", "-o", tmp_path / "new"]
    run_well("split", tmp_path / "one", *words)


def test_a_folder_of_another_name_has_no_strategy_beside_it(output):
    (output / "checkpoint").rename(output / "ckpt")
    assert scan(str(output / "ckpt")).strategy_files == ()


# --------------------------------------------------------------------------------- which step


def test_the_oldest_record_of_all_ranks_counts(output):
    record(output, "1_10", ranks=[5])
    record(output, "1_5", ranks=[2])
    assert scan(str(output)).step == "1_5"
    assert notes_of(output, "step") == [
        "step 1_5 is read\n  the newest of 3 steps that meta.json records and every rank has"
    ]
    (text,) = notes_of(output, "leftover")
    assert "step 1_10, 2_3 is newer than meta.json records: ignored" in text


def test_steps_of_records_are_compared_as_numbers(output):
    record(output, "1_10")
    assert scan(str(output)).step == "1_10"


def test_a_newer_step_that_no_record_knows_is_passed_over_with_a_note(output, tmp_path):
    save(output, "pp2_opt", "3_1", is_other=True)
    run_well("merge", output, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "pp2_opt")
    (text,) = notes_of(output, "leftover")
    assert text.startswith("step 3_1 is newer than meta.json records: ignored")
    assert scan(str(output), SourceOptions(step="3_1")).step == "3_1"


def test_a_recorded_step_that_a_rank_lost_makes_way_for_the_one_before(output):
    (output / "checkpoint" / "rank_6" / "llama_7b_rank_6-2_3.ckpt").unlink()
    assert scan(str(output)).step == "1_10"
    (text,) = notes_of(output, "step")
    assert text.startswith("step 1_10 is read\n  the newest of 3 steps")
    assert text.endswith("; meta.json records 2_3")


def test_a_step_newer_than_all_records_is_taken_if_it_is_all_there_is(output):
    record(output, "1_2")
    assert scan(str(output)).step == "2_3"
    (text,) = notes_of(output, "leftover")
    assert text == "not every rank has step 1_2, which meta.json records\n  step 2_3 is read"


def test_after_a_name_clash_the_recorded_series_is_taken(output, tmp_path):
    save(output, "pp2_opt", "1_1", prefix=OTHER, is_other=True)
    with pytest.raises(PlanError, match=r"ranks 0-7: files of a later run than meta\.json"):
        scan(str(output))
    record(output, "1_1", prefix=OTHER)
    catalog = scan(str(output))
    assert catalog.files[3].path.endswith("rank_3/llama_7b_rank_3_1-1_1.ckpt")
    (text,) = notes_of(output, "skipped")
    names = [f"llama_7b_rank_0-{step}.ckpt" for step in ("1_5", "1_10", "2_3")]
    assert text.startswith(f"{', '.join(names)}: of another run than meta.json records")


def test_a_recorded_step_that_is_lost_does_not_lead_into_another_series(output):
    for step in ("1_10", "2_1"):
        save(output, "pp2_opt", step, prefix=OTHER)
    record(output, "2_1", prefix=OTHER)
    (output / "checkpoint" / "rank_6" / "llama_7b_rank_6_1-2_1.ckpt").unlink()
    assert scan(str(output)).files[6].path.endswith("llama_7b_rank_6_1-1_10.ckpt")


def test_without_records_series_are_not_compared(output):
    save(output, "pp2_opt", "1_1", prefix=OTHER)
    for path in output.rglob("meta.json"):
        path.unlink()
    with pytest.raises(PlanError, match="several checkpoints in the folders of ranks 0-7"):
        scan(str(output))


def test_a_save_on_a_breakdown_is_not_recorded_and_passed_over(output):
    save(output, "pp2_opt", "2_3_breakpoint", is_other=True)
    assert scan(str(output)).step == "2_3"
    assert "2_3_breakpoint" in notes_of(output, "leftover")[0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "expected the numbers last_epoch, last_step and"),
        (
            '{"last_epoch": true, "last_step": 3, "last_ckpt_file": "a_rank_4-2_3.ckpt"}',
            "expected the numbers",
        ),
        (
            '{"last_epoch": "2", "last_step": 3, "last_ckpt_file": "a_rank_4-2_3.ckpt"}',
            "expected the numbers",
        ),
        (
            '{"last_epoch": 2, "last_step": 3, "last_ckpt_file": "a_rank_4-2_4.ckpt"}',
            "lists step 2_3 and the file a_rank_4-2_4.ckpt",
        ),
        ('{"last_epoch": 2, "last_epoch": 3}', "stored twice"),
        (" " * (1 << 17), "at most 65536 bytes"),
    ],
)
def test_a_broken_record_is_a_note_and_the_step_has_to_be_named(text, reason, output):
    (output / "checkpoint" / "rank_4" / "meta.json").write_text(text)
    record(output, "1_10", ranks=[1])
    with pytest.raises(PlanError, match=r"rank 4: no meta\.json says which run"):
        scan(str(output))
    assert scan(str(output), SourceOptions(step="1_10")).step == "1_10"
    (note,) = notes_of(output, "doubt", step="1_10")
    assert note.startswith("rank 4: meta.json does not say which step was saved last\n")
    assert f"{output}/checkpoint/rank_4/meta.json" in note
    assert reason in note


def test_if_all_records_are_broken_the_names_tell(output):
    save(output, "pp2_opt", "3_1")
    for path in output.rglob("meta.json"):
        path.write_text("?")
    assert scan(str(output)).step == "3_1"
    assert notes_of(output, "doubt")[0].startswith("ranks 0-7: meta.json does not say")


def test_records_of_one_format_choose_among_two(output):
    save(output, "pp2_opt", "2_3", suffix=".safetensors")
    assert scan(str(output)).files[0].format == "ckpt"
    (text,) = notes_of(output, "skipped")
    assert text.startswith("llama_7b_rank_0-2_3.safetensors: of another run")
    for rank in RANKS:
        name = f"llama_7b_rank_{rank}-2_3.safetensors"
        record(output, "2_3", ranks=[rank], last_ckpt_file=name)
    assert scan(str(output)).files[0].format == "safetensors"


def test_a_chosen_step_needs_no_record(output):
    for path in output.rglob("meta.json"):
        path.write_text("?")
    assert scan(str(output), SourceOptions(step="1_5")).step == "1_5"
    assert len(notes_of(output, "doubt", step="1_5")) == 1  # it might have named another file


# --------------------------------------------------------------------- what else lies in trees


def test_links_are_followed_and_those_that_lead_nowhere_named(output, tmp_path):
    linked = tmp_path / "linked"
    for rank in RANKS:
        (linked / "checkpoint" / f"rank_{rank}").mkdir(parents=True)
        name = f"llama_7b_rank_{rank}-2_3.ckpt"
        (linked / "checkpoint" / f"rank_{rank}" / name).symlink_to(
            output / "checkpoint" / f"rank_{rank}" / name
        )
    (linked / "strategy").symlink_to(output / "strategy")
    run_well("merge", linked, "-o", tmp_path / "full.h5")
    assert_merged(tmp_path / "full.h5", "pp2_opt")
    (output / "checkpoint" / "rank_3" / "llama_7b_rank_3-2_3.ckpt").unlink()
    catalog = scan(str(linked))
    assert catalog.missing_ranks == (3,)
    (text,) = (note.text for note in catalog.diagnostics if "broken link" in note.text)
    assert text.endswith("broken links: rank_3/llama_7b_rank_3-2_3.ckpt")
    shutil.rmtree(output)
    with pytest.raises(PlanError, match=r"broken links: rank_0/llama_7b_rank_0-2_3\.ckpt, rank_1"):
        scan(str(linked))


def test_checkpoints_further_down_are_pointed_out(output):
    below = output / "transformed_checkpoint"
    below.mkdir()
    (output / "checkpoint").rename(below / "llama_7b")
    with pytest.raises(PlanError, match=r"Try: .*/transformed_checkpoint/llama_7b as SRC"):
        scan(str(below))
    (output / "unified_checkpoint").mkdir()
    (output / "unified_checkpoint" / "param_name_map.json").touch()
    with pytest.raises(PlanError, match=r"Try: [^ ]*/unified_checkpoint as SRC"):
        scan(str(output))


def test_strategies_given_as_a_checkpoint_are_called_that(output, tmp_path):
    result = run("merge", output / "strategy", "-o", tmp_path / "full.h5")
    assert result.exit_code == 2
    assert (
        "ckpt_strategy_rank_0.ckpt and 7 more: a strategy file, not a MindSpore checkpoint"
        in message(result)
    )
