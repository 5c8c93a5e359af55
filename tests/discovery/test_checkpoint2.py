"""MindFormers' "Checkpoint 2.0": folders that say themselves what is cut how, and where it is."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.discovery.checkpoint2 import parse_key
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.execute import execute
from ckpttool.wording import count
from tests.oracle import OracleLayout
from tests.strategies import examples, moves
from tests.support.checkpoint2 import (
    COMMON,
    FsdpSave,
    Save,
    change,
    slice_number,
    write_safetensors,
)
from tests.support.checkpoints import cut, noise, oracle, write_file
from tests.support.commands import mentions, merged, message, refused, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.errors import texts_of
from tests.support.file_bytes import layout, strategy
from tests.support.readers import Entry, entry_of, read, read_ranks

SMALL = CopyOptions(band_bytes=24, task_bytes=100, max_in_flight=3)
SQUARE = (2, 2)
ROWS = OracleLayout(SQUARE, ((1,), ()))  # ranks 0 and 1 have the upper half, 2 and 3 the lower
BOTH = OracleLayout(SQUARE, ((1,), (0,)))
FOLDED = OracleLayout(SQUARE, ((1, 0), ()))  # an optimizer shard, as the layout has it
WHOLE = OracleLayout(SQUARE, ((),))

ENTRIES = {
    "w": noise("w", "Float32", (8, 6)),
    "adam_m.w": noise("adam_m.w", "Float32", (8, 6)),
    "embed": noise("embed", "BFloat16", (4, 4)),
    "norm": noise("norm", "Float32", (6,)),
}
LAYOUTS = {"w": (ROWS,), "adam_m.w": (FOLDED,), "embed": (BOTH,), "norm": (WHOLE,)}
SAVE = Save(ENTRIES, LAYOUTS, 4)


@pytest.fixture
def folder(tmp_path):
    """The root of a checkpoint of four ranks, of which every rank saved all that it has."""
    SAVE.write_root(tmp_path / "checkpoint", 5)
    return tmp_path / "checkpoint"


def iteration(root):
    """The folder of the one iteration."""
    (path,) = (path for path in root.iterdir() if path.is_dir())
    return path


# ------------------------------------------------------------------------------ whatever is saved


def as_saved(move, draw):
    """The source of a move as MindFormers saves it: element types, layouts, and how it is told.

    An optimizer shard is an axis of the device matrix here, so there is none beside it; of what
    stages share the metadata has one layout, so all have the same.
    """
    safe = {
        name: noise(name, "Float32" if entry.dtype == "Complex128" else entry.dtype, entry.shape)
        for name, entry in move.entries.items()
    }
    layouts = {
        name: tuple(
            oracle(replace(held[0], optimizer_shard=1, first_rank=one.first_rank)) for one in held
        )
        for name, held in move.src.layouts.items()
    }
    remove_redundancy = draw(st.booleans())
    states = {"adam_m.w": "w"} if "adam_m.w" in safe else {}
    unlisted = [name for name in safe if name.startswith("unlisted")]
    if remove_redundancy:  # MindFormers saves nothing then that its metadata does not list
        safe = {name: entry for name, entry in safe.items() if name in layouts}
    return Save(
        safe,
        layouts,
        len(move.src.ranks),
        is_optimizer=draw(
            st.sampled_from([lambda name: name.startswith("adam"), lambda name: name > "l"])
        ),
        remove_redundancy=remove_redundancy,
        prefix=draw(st.sampled_from([None, "net", "a-model"])),
        spell_dtype=draw(st.sampled_from([str, str.lower, str.upper])),
        uncut=frozenset(unlisted[:1]) & safe.keys(),
        like=states,
        has_rank_groups=draw(st.booleans()),
    )


@examples(80)
@given(moves(has_state=True), st.data())
def test_whatever_is_saved_is_merged_and_resharded_as_the_oracle_says(new_folder, move, data):
    folder, save = new_folder(), as_saved(move, data.draw)
    save.write(folder / "src")
    plan, destination = ckpttool.plan_merge(
        ckpttool.scan(str(folder / "src")),
        None,
        str(folder / "m.ckpt"),
        output_options=ckpttool.OutputOptions("ckpt"),
    )
    execute(plan, destination, options=SMALL)
    assert read(folder / "m.ckpt") == save.entries
    dst = replace(
        move.dst, layouts={n: held for n, held in move.dst.layouts.items() if n in save.entries}
    )
    plan, destination = ckpttool.plan_reshard(
        ckpttool.scan(str(folder / "src")),
        None,
        dst,
        str(folder / "dst"),
        output_options=ckpttool.OutputOptions("safetensors"),
    )
    execute(plan, destination, options=SMALL)
    assert read_ranks(folder / "dst") == cut(save.entries, dst)


@pytest.mark.slow
@examples(40)
@given(moves(has_state=True), st.data())
def test_a_lost_replica_does_no_harm_and_the_last_one_is_named(new_folder, move, data):
    folder, save = new_folder(), as_saved(move, data.draw)
    metadata = save.write(folder / "src")
    files = sorted(path.name for path in (folder / "src").glob("*.safetensors"))
    lost = data.draw(st.sampled_from(files))
    (folder / "src" / lost).unlink()
    holders = {
        key: {place["file_name"] for place in places}
        for key, places in metadata["storage_data"].items()
    }
    gone = {parse_key(key)[0] for key, held in holders.items() if held == {lost}}
    catalog = ckpttool.scan(str(folder / "src"))
    if gone:
        with pytest.raises(ckpttool.PlanError) as caught:
            ckpttool.plan_merge(
                catalog, None, str(folder / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
            )
        (problem,) = (text for text in texts_of(caught.value) if f"{lost}: file not found" in text)
        assert f"no other file has these slices of {count(len(gone), 'parameter')} (" in problem
        assert sum(name in problem for name in gone) >= min(len(gone), 3)
    elif save.ranks > 1 and not any(name.startswith("unlisted") for name in save.entries):
        execute(
            *ckpttool.plan_merge(
                catalog, None, str(folder / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
            )
        )
        assert (
            read(folder / "m.ckpt").items()
            >= {name: entry for name, entry in save.entries.items() if name in save.layouts}.items()
        )


def test_the_numbers_of_slices_are_those_of_the_sources():
    """MindFormers' own functions gave these for ranks 0 to 7 of a 2 x 2 x 2 matrix."""
    of = [
        ([(2,), (0,)], [0, 1, 0, 1, 2, 3, 2, 3]),
        ([(0, 2), ()], [0, 2, 0, 2, 1, 3, 1, 3]),
        ([(1,), (2, 0)], [0, 1, 4, 5, 2, 3, 6, 7]),
    ]
    for tensor_map, numbers in of:
        layout = OracleLayout((2, 2, 2), tuple(tensor_map))
        assert [slice_number(layout, rank) for rank in range(8)] == numbers


# ------------------------------------------------------------------ what MindFormers itself wrote

ROW_PAIR, COLUMN_PAIR = (((0,), ()), ((), (0,)))
GOLDEN_LAYOUTS = {
    "stages": {"wq": ROW_PAIR, "wo": COLUMN_PAIR, "norm": ((),), "adam_m.wq": ROW_PAIR},
    "balanced": {
        "wq": ((1,), (0,)),
        "wo": ((0, 1), ()),
        "norm": ((),),
        "bias": ((1,),),
        "adam_m.wq": ((1, 0), ()),
        "adam_m.norm": ((),),
    },
}


WRITTEN = ["1.8.0_balanced", "1.9.0_stages", "2.0.0_balanced", "2.1.0_stages"]


def golden_save(full, **more):
    """What was given to MindFormers, by the names of the full tensors."""
    stages = {name.rpartition(".")[0][-1] for name in full}
    kind = "stages" if len(stages) == 2 else "balanced"
    matrix = (2,) if kind == "stages" else (2, 2)
    layouts = {}
    for stage in sorted(stages):
        for name, tensor_map in GOLDEN_LAYOUTS[kind].items():
            state, _, base = name.rpartition(".")
            unique = f"{state}.{stage}.{base}".lstrip(".")
            layouts[unique] = (OracleLayout(matrix, tensor_map, 0, int(stage) * 2),)
    entries = {name: entry_of(full[name]) for name in layouts}
    return Save(entries, layouts, 4, remove_redundancy=kind == "balanced", **more)


@pytest.mark.parametrize("name", [*WRITTEN, "2.0.0_own_names"])
def test_what_mindformers_wrote_is_merged_byte_for_byte(name, tmp_path):
    source = GOLDEN / "mindformers" / name
    out = tmp_path / "m.ckpt"
    text = message(run_well("merge", source, "-o", out))
    with np.load(source / "expected.npz") as full:
        assert read(out) == {name: entry_of(full[name]) for name in full}
    assert ("3 parameters listed in the wrong one of a rank's two files" in text) == ("own" in name)


@pytest.mark.parametrize("name", WRITTEN)
def test_the_writer_of_these_tests_writes_what_mindformers_does(name, tmp_path):
    source = GOLDEN / "mindformers" / name
    with np.load(source / "expected.npz") as full:
        save = golden_save(full, has_rank_groups=not name.startswith("1.8"))
    save.write(tmp_path)
    theirs = iteration(source)
    assert json.loads((tmp_path / "metadata.json").read_text()) == json.loads(
        (theirs / "metadata.json").read_text()
    )
    files = {path.name for path in theirs.glob("*.safetensors")}
    assert files == {path.name for path in tmp_path.glob("*.safetensors")}
    for file in files:
        assert read(theirs / file) == read(tmp_path / file)


# ---------------------------------------------------------------------------------- the iteration


def test_the_last_complete_iteration_is_taken_and_a_newer_one_named_as_unfinished(folder):
    newer = folder / "iteration_00000006"
    newer.mkdir()
    (newer / "model-0000000-0000004.safetensors").write_bytes(b"half")
    shutil.copytree(iteration_of(folder, 5), folder / "iteration_00000001")
    got, text = merged(folder)
    assert got == ENTRIES
    assert not mentions(
        text, "iteration 5 is read, of 3", "not finished: iteration_00000006", "step 5"
    )


def iteration_of(root, number):
    """The folder of an iteration."""
    return root / f"iteration_{number:08d}"


def test_step_chooses_an_iteration_by_number_or_name(folder):
    other = Save({"w": noise("other", "Float32", (8, 6))}, {"w": (ROWS,)}, 4)
    other.write(iteration_of(folder, 2))
    for step in ("2", "02", "iteration_00000002"):
        assert merged(folder, "--step", step)[0] == other.entries
    result = run("merge", folder, "-o", folder / "m.h5", "--step", "3")
    assert result.exit_code == 5
    assert not mentions(message(result), "no folder of iteration 3 found 5, 2 Try: --step 5")
    assert merged(iteration_of(folder, 2), "--step", "2")[0] == other.entries
    for step in ("5", "5" * 5000):
        result = run("merge", iteration_of(folder, 2), "-o", folder / "m.h5", "--step", step)
    assert result.exit_code == 5
    assert "not iteration 5" in message(result)


def test_an_unfinished_iteration_that_is_asked_for_is_read_with_a_note(folder):
    SAVE.write(iteration_of(folder, 9))
    got, text = merged(folder, "--step", "9")
    assert got == ENTRIES
    assert "iteration 9 was perhaps not finished" in text


def test_without_the_file_that_names_the_last_iteration_one_has_to_be_chosen(folder):
    (folder / "latest_checkpointed_iteration.txt").unlink()
    refused(folder, 5, "latest_checkpointed_iteration.txt", "found 5 Try: --step 5")
    assert merged(folder, "--step", "5")[0] == ENTRIES


def test_what_names_the_last_iteration_is_read_strictly(folder):
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("release")
    refused(folder, 3, "latest_checkpointed_iteration.txt", "release")
    tracker.write_text("7\n")
    refused(folder, 5, "no folder of iteration 7", "complete: 5 Try: --step 5")


def test_if_the_last_iteration_is_gone_the_complete_ones_are_offered(folder):
    SAVE.write(iteration_of(folder, 3))
    SAVE.write(iteration_of(folder, 9))
    iteration_of(folder, 6).mkdir()
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("7")
    told = "no folder of iteration 7, which latest_checkpointed_iteration.txt names complete: "
    refused(folder, 5, f"{told}5, 3; perhaps not finished: 9 Try: --step 5")
    assert merged(folder, "--step", "5")[0] == ENTRIES
    tracker.write_text("1")
    refused(folder, 5, "complete: none; perhaps not finished: 3, 5, 9")


def test_folders_of_the_development_versions_are_read_and_two_of_a_number_are_not(tmp_path):
    SAVE.write_root(tmp_path / "new_checkpoint", 3, "iter")
    assert merged(tmp_path / "new_checkpoint")[0] == ENTRIES
    SAVE.write(iteration_of(tmp_path / "new_checkpoint", 3))
    refused(
        tmp_path / "new_checkpoint",
        5,
        "2 folders of iteration 3 iter_00000003, iteration_00000003 Try: ",
    )


def test_a_folder_of_other_iterations_is_no_checkpoint(tmp_path):
    (tmp_path / "run" / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    refused(tmp_path / "run", 5, "no metadata.json and no model-\\*.safetensors")


def test_the_output_folder_of_a_run_is_understood_as_it_stands(tmp_path):
    SAVE.write_root(tmp_path / "output" / "checkpoint", 5)
    (tmp_path / "output" / "log").mkdir()
    (tmp_path / "output" / "strategy").mkdir()
    got, text = merged(tmp_path / "output")
    assert got == ENTRIES
    assert "step 5" in text
    (tmp_path / "output" / "checkpoint_network").mkdir()
    (tmp_path / "output" / "checkpoint_network" / "rank_0").mkdir()
    got, text = merged(tmp_path / "output")
    assert got == ENTRIES
    assert not mentions(
        text, "the folder checkpoint is read, not checkpoint_network", "common.json"
    )


def test_an_iteration_folder_may_have_any_name(folder):
    iteration(folder).rename(folder.parent / "best")
    assert merged(folder.parent / "best")[0] == ENTRIES


def test_what_lies_beside_an_iteration_or_in_it_is_passed_over_with_a_note(folder):
    write_file(iteration(folder) / "other.ckpt", ENTRIES, "ckpt")
    (iteration(folder) / "model-0000004-0000004.tmp").touch()
    write_file(folder / "rank_0" / "llama_rank_0-3_1.ckpt", ENTRIES, "ckpt")
    got, text = merged(folder)
    assert got == ENTRIES
    words = [
        "1 folder of ranks, of another checkpoint: ignored rank_0 Try: --pattern 'rank_{rank}/*'"
    ]
    words = [re.escape(words[0])]
    words += [
        r"1 file with other names than MindFormers gives: ignored other\.ckpt",
        r"did not finish: model-0000004-0000004.tmp",
    ]
    assert not mentions(text, *words)
    document = json.loads(
        run_well("inspect", folder, "--pattern", "rank_{rank}/*", "--json").stdout
    )
    assert document["step"] == "3_1"


# --------------------------------------------------------------------------------------- the traps


def test_redundancy_that_was_removed_makes_file_numbers_differ_from_ranks(tmp_path):
    """Of ranks 0 to 3 the last two hold something only because the first two are full."""
    tensors = {"big": noise("big", "Float32", (64,)), "w": noise("w", "Float32", (8, 6))}
    late = OracleLayout((2,), ((0,), ()), 0, 2)
    save = Save(
        tensors, {"big": (OracleLayout((2,), ((),), 0, 2),), "w": (late,)}, 4,
        remove_redundancy=True,
    )  # fmt: skip
    metadata = save.write(tmp_path / "src")
    places = [place for held in metadata["storage_data"].values() for place in held]
    assert {(p["file_name"][:13], p["storage_rank"]) for p in places} == {
        ("model-0000000", 2),
        ("model-0000001", 3),
    }
    assert merged(tmp_path / "src")[0] == tensors
    document = json.loads(run_well("inspect", tmp_path / "src", "--json").stdout)
    assert [rank["rank"] for rank in document["ranks"]] == [2, 3]


def test_stages_have_the_global_ranks_of_their_own(tmp_path):
    second = OracleLayout(SQUARE, ((0,), (1,)), 0, 4)
    tensors = ENTRIES | {"late": noise("late", "Float16", (6, 4))}
    Save(tensors, LAYOUTS | {"late": (second,)}, 8).write(tmp_path / "src")
    assert merged(tmp_path / "src")[0] == tensors
    document = json.loads(run_well("inspect", tmp_path / "src", "--json").stdout)
    (late,) = (tensor for tensor in document["tensors"] if tensor["name"] == "late")
    assert [held["ranks"] for held in late["slices"]] == [[4], [6], [5], [7]]


def test_a_stage_that_cuts_a_shared_parameter_otherwise_is_refused(folder):
    def edit(metadata):
        chunk = metadata["state_dict_metadata"]["w"]["chunk"]
        chunk.append({"global_offset": [0], "local_shape": [2, 6]})

    change(iteration(folder), edit)
    refused(folder, 3, "metadata.json: w: slice 0: local_shape \\(2, 6\\), expected \\(4, 6\\)")


def test_a_tensor_without_a_layout_is_whole_on_every_rank(tmp_path):
    for layout_key in ("null", "absent"):
        source = tmp_path / layout_key
        Save(ENTRIES, {"w": (ROWS,)}, 4, uncut=frozenset(ENTRIES) - {"w"}).write(source)
        if layout_key == "absent":
            change(source, lambda m: m["state_dict_metadata"]["norm"].pop("layout"))
        assert merged(source)[0] == ENTRIES


def test_replicas_are_read_from_the_lowest_rank_and_compared(folder):
    """Rank 1 has what rank 0 has, and rank 3 what rank 2 has."""
    path = iteration(folder) / "model-0000003-0000004.safetensors"
    tensors = read(path)
    tensors["w"] = Entry("Float32", (4, 6), bytes(96))
    write_safetensors(path, tensors)
    refused(folder, 5, "w: different between ranks that .* rank 2 differs from rank 3")
    assert merged(folder, "--trust-strategy")[0] == ENTRIES


def test_what_metadata_does_not_list_is_found_in_the_files(tmp_path):
    """A counter on every rank, and optimizer state that MindFormers forgets to describe."""
    tensors = ENTRIES | {
        "global_step": noise("global_step", "Int32", ()),
        "muon_m.w": noise("muon_m.w", "Float32", (8, 6)),
    }
    save = Save(
        tensors, LAYOUTS, 4, lambda name: name.startswith(("adam", "muon")), like={"muon_m.w": "w"}
    )
    save.write(tmp_path / "src")
    got, text = merged(tmp_path / "src")
    assert got == tensors
    assert "1 optimizer state is sharded like the parameter" in text
    assert "not in the description: muon_m.w (as w)" in text


def test_state_that_is_not_listed_and_fits_nothing_is_a_question(tmp_path):
    tensors = ENTRIES | {"adam_v.w": noise("adam_v.w", "Float32", (5, 6))}
    Save(tensors, LAYOUTS, 4).write(tmp_path / "src")
    refused(tmp_path / "src", 5, "adam_v.w: not in the description, and neither", "--unlisted")
    assert merged(tmp_path / "src", "--unlisted", "drop")[0] == ENTRIES
    assert merged(tmp_path / "src", "--unlisted", "first")[0] == tensors


def test_what_is_not_listed_and_differs_between_ranks_is_a_question(folder):
    for rank in range(4):
        path = iteration(folder) / f"model-000000{rank}-0000004.safetensors"
        seed = {"seed": entry_of(np.array([rank]), "Int64")}
        write_safetensors(path, read(path) | seed)
    refused(folder, 5, "seed: not in the description, and different between ranks", "--unlisted")
    assert merged(folder, "--unlisted", "first")[0]["seed"] == entry_of(np.array([0]), "Int64")


def test_files_of_another_save_in_the_same_folder_are_passed_over(folder):
    inside = iteration(folder)
    write_safetensors(inside / "model-0000000-0000009.safetensors", ENTRIES)
    got, text = merged(folder)
    assert got == ENTRIES
    assert "1 file of another save: ignored model-0000000-0000009.safetensors" in text


def test_numbers_of_parameters_for_those_of_ranks_are_refused(tmp_path):
    """Some of the files that are named exist, and hold the right name and shape."""
    source = tmp_path / "src"
    replace(SAVE, has_parameter_numbers=True).write(source)
    said = "metadata.json: numbers of parameters stand in place of ranks .* between 1.7 and 1.8"
    refused(source, 3, said, "-s STRATEGY --pattern '\\*model-{rank}-\\*.safetensors'")


def test_the_wrong_one_of_a_ranks_two_files_is_put_right(folder):
    def edit(metadata):
        for held in metadata["storage_data"].values():
            for place in held:
                place["file_name"] = place["file_name"].replace("model-", "opt-")

    change(iteration(folder), edit)
    got, text = merged(folder)
    assert got == ENTRIES
    assert "3 parameters listed in the wrong one of a rank's two files w, embed, norm" in text


def test_the_other_file_of_the_same_number_may_be_another_ranks(tmp_path):
    """Files 0 and 1 are those of ranks 2 and 3, so their numbers say nothing of ranks."""
    tensors = {"b": noise("b", "Float32", (4, 2)), "w": noise("w", "Float32", (8, 6))}
    late = OracleLayout((2,), ((0,), ()), 0, 2)
    save = Save(
        tensors, {"b": (late,), "w": (late,)}, 4, lambda name: name == "w", remove_redundancy=True
    )
    save.write(tmp_path / "src")
    assert merged(tmp_path / "src")[0] == tensors

    def edit(metadata):
        for number in range(2):
            (place,) = metadata["storage_data"][f"('w', ({number},))"]
            place["file_name"] = place["file_name"].replace("opt-", "model-")

    change(tmp_path / "src", edit)
    refused(
        tmp_path / "src",
        5,
        "0-0000002.safetensors and 1 more: lacks tensors that",
        r"1 parameter \(w\)",
    )


def test_a_rank_that_cannot_hold_a_slice_by_its_layout_is_refused(folder):
    def edit(metadata):
        storage = metadata["storage_data"]
        upper, lower = "('w', (0,))", "('w', (1,))"
        storage[upper], storage[lower] = storage[lower], storage[upper]

    change(iteration(folder), edit)
    refused(
        folder, 5, "w: metadata.json contradicts itself .*rank 2 .*model-0000002",
        "elements \\[0:4, 0:6\\] by storage_data, \\[4:8, 0:6\\] by the layout",
    )  # fmt: skip


# ----------------------------------------------------------------- slices that are counted wrongly

WIDE = {
    "q_down": noise("q_down", "Float32", (12, 4)),
    "norm": noise("norm", "BFloat16", (6,)),
}


@pytest.mark.parametrize(("fsdp", "tp"), [(2, 3), (3, 2), (6, 4), (2, 1), (1, 4)])
def test_slices_of_the_fsdp_mesh_are_placed_by_the_layout(fsdp, tp, tmp_path):
    """For 2 x 3 the ranks of the list are numbered rightly, and only the others are not."""
    save = FsdpSave(WIDE, fsdp, tp)
    save.write(tmp_path / "src")
    got, text = merged(tmp_path / "src")
    assert got == WIDE
    is_wrong = fsdp > 1 < tp
    assert ("storage_data numbers slices of 2 parameters wrongly" in text) == is_wrong
    run_well("verify", tmp_path / "src", "--deep")


@pytest.mark.parametrize(
    ("fsdp", "tp", "ranks", "lost"),
    [
        (2, 3, (0, 1), r"elements \[6:12, 0:4\] belong to rank 3; ranks 0, 1 saved the tensor"),
        (
            3,
            2,
            (2, 4, 5),
            r"elements \[0:4, 0:4\] belong to rank 0; ranks 2, 4, 5 saved the tensor",
        ),
    ],
)
def test_a_slice_that_no_rank_of_the_layout_saved_is_lost(fsdp, tp, ranks, lost, tmp_path):
    FsdpSave(WIDE, fsdp, tp).write(tmp_path / "src", {"q_down": ranks})
    told = "q_down: ranks that hold a slice by the layout did not save it"
    refused(tmp_path / "src", 5, told, lost)
    result = run("verify", tmp_path / "src")
    assert (result.exit_code, not mentions(message(result), told)) == (1, True)


def test_slices_of_all_ranks_of_a_layout_are_enough_without_redundancy(tmp_path):
    FsdpSave(WIDE, 2, 3).write(tmp_path / "src", dict.fromkeys(WIDE, (0, 3)))
    assert merged(tmp_path / "src")[0] == WIDE


def test_what_is_not_cut_may_be_saved_by_any_rank(tmp_path):
    save = FsdpSave(WIDE, 2, 3, uncut=frozenset({"norm"}))
    save.write(tmp_path / "src", {"q_down": (0, 3), "norm": (4,)})
    assert merged(tmp_path / "src")[0] == WIDE


def test_copies_of_another_stage_count_by_their_numbers(tmp_path):
    """The layout names the ranks of the first stage only; the second has equal slices."""
    second = ROWS._replace(first_rank=4)
    tensors = {"w": ENTRIES["w"]}
    Save(tensors, {"w": (ROWS, second)}, 8, remove_redundancy=True).write(tmp_path / "src")

    def edit(metadata):
        for number, rank in ((0, 4), (1, 7)):
            (place,) = metadata["storage_data"][f"('w', ({number},))"]
            place["storage_rank"] = rank

    change(tmp_path / "src", edit)
    got, text = merged(tmp_path / "src")
    assert got == tensors
    assert "wrongly" not in text


def test_a_rank_group_without_a_rank_of_the_layout_is_a_contradiction(folder):
    def edit(metadata):
        for place in metadata["storage_data"]["('w', (0,))"]:
            place["rank_group"] = [0, 3]

    change(iteration(folder), edit)
    told = "w: metadata.json contradicts itself"
    facts = "rank 1: elements \\[0:4, 0:6\\] by the layout, and not in the rank_group of that slice"
    refused(folder, 5, told, facts)


def test_a_rank_group_is_read_strictly(folder):
    def edit(metadata):
        metadata["storage_data"]["('w', (0,))"][0]["rank_group"] = ["0"]

    change(iteration(folder), edit)
    refused(
        folder,
        3,
        "storage_data: \\('w', \\(0,\\)\\): \\[0\\].rank_group\\[0\\]: expected int, got str",
    )


# ----------------------------------------------------------------- what is described and in no file

WEIGHTS = {name: entry for name, entry in ENTRIES.items() if not name.startswith("adam")}


@pytest.mark.parametrize("remove_redundancy", [False, True])
@pytest.mark.parametrize("prefix", ["my-opt-7b", None])
def test_an_optimizer_of_which_no_file_is_there_is_left_out(remove_redundancy, prefix, tmp_path):
    replace(SAVE, remove_redundancy=remove_redundancy, prefix=prefix).write(tmp_path / "src")
    _remove_optimizer(tmp_path / "src")
    got, text = merged(tmp_path / "src")
    assert got == WEIGHTS
    told = (
        "no file of optimizer state is there: 1 tensor is left out adam_m.w; metadata.json lists "
    )
    assert not mentions(text, told)
    refused(tmp_path / "src", 5, "no file of optimizer state is there", options=("--strict",))
    assert run("verify", tmp_path / "src").exit_code == 1


def _remove_optimizer(folder):
    for path in folder.glob("*opt-0*"):
        path.unlink()


def test_one_file_of_the_optimizer_makes_the_others_missing(folder):
    for rank in (0, 1, 3):
        (iteration(folder) / f"opt-000000{rank}-0000004.safetensors").unlink()
    refused(folder, 5, "opt-0000000-0000004.* and 2 more: file not found", r"1 parameter \(adam_m")


def test_a_damaged_file_of_the_optimizer_is_one_that_is_there(folder):
    _remove_optimizer(iteration(folder))
    (iteration(folder) / "opt-0000002-0000004.safetensors").write_bytes(b"")
    refused(folder, 3, "opt-0000002-0000004.safetensors")


def test_without_all_weights_a_missing_optimizer_is_an_error(folder):
    _remove_optimizer(iteration(folder))
    (iteration(folder) / "model-0000003-0000004.safetensors").unlink()
    refused(folder, 5, "opt-0000000-0000004.* and 4 more: file not found", r"\(adam_m.w\)")


def test_weights_that_are_listed_as_optimizer_state_are_not_left_out(folder):
    """MindFormers 2.0 lists weights of other stages in `opt` files; `model` files have them."""

    def edit(metadata):
        for key in ("('norm', (0,))", "('w', (0,))", "('w', (1,))"):
            for place in metadata["storage_data"][key]:
                place["file_name"] = place["file_name"].replace("model-", "opt-")

    change(iteration(folder), edit)
    _remove_optimizer(iteration(folder))
    got, text = merged(folder)
    assert got == WEIGHTS
    assert not mentions(text, "2 parameters listed in the wrong one", "1 tensor is left out")


def test_a_weight_that_some_file_has_is_no_state_that_was_not_saved(tmp_path):
    """Here the number of a file is not its rank's, so the other file is not known."""
    late = OracleLayout((2,), ((0,), ()), 0, 2)
    tensors = {"b": noise("b", "Float32", (4, 2)), "adam_m.b": noise("m", "Float32", (4, 2))}
    save = Save(tensors, {"b": (late,), "adam_m.b": (late,)}, 4, remove_redundancy=True)
    save.write(tmp_path / "src")

    def edit(metadata):
        for places in metadata["storage_data"].values():
            places[0]["file_name"] = places[0]["file_name"].replace("model-", "opt-")

    change(tmp_path / "src", edit)
    _remove_optimizer(tmp_path / "src")
    refused(tmp_path / "src", 5, "opt-0000000-.* and 1 more: file not found", r"1 parameter \(b\)")


GRADIENTS = {
    "accu_grads.w": noise("grads", "Float32", (8, 6)),
    "accu_grads.norm": noise("grads of norm", "Float32", (6,)),
}


def _write_with_gradients(folder, *, remove_redundancy):
    """Write a folder that describes accumulated gradients, and has them in `opt` files."""
    save = Save(
        ENTRIES | GRADIENTS,
        LAYOUTS | {"accu_grads.w": (ROWS,), "accu_grads.norm": (WHOLE,)},
        4,
        lambda name: name.startswith(("adam", "accu")),
        remove_redundancy=remove_redundancy,
    )
    save.write(folder)


def _drop(path, *names):
    write_safetensors(path, {name: e for name, e in read(path).items() if name not in names})


@pytest.mark.parametrize("remove_redundancy", [False, True])
def test_gradients_that_no_file_has_were_not_saved(remove_redundancy, tmp_path):
    _write_with_gradients(tmp_path / "src", remove_redundancy=remove_redundancy)
    assert merged(tmp_path / "src")[0] == ENTRIES | GRADIENTS
    for path in (tmp_path / "src").glob("opt-*"):
        _drop(path, *GRADIENTS)
    got, text = merged(tmp_path / "src", "--strict")
    assert got == ENTRIES
    assert not mentions(
        text, "2 parameters described, but in no file accu_grads.w, accu_grads.norm"
    )
    run_well("verify", tmp_path / "src", "--deep")


def test_gradients_of_which_some_were_saved_are_missing(tmp_path):
    _write_with_gradients(tmp_path / "src", remove_redundancy=False)
    for path in (tmp_path / "src").glob("opt-*"):
        _drop(path, "accu_grads.w")
    refused(tmp_path / "src", 5, "lacks tensors that metadata.json lists", r"\(accu_grads.w\)")


def test_gradients_of_a_file_that_is_gone_are_missing(tmp_path):
    _write_with_gradients(tmp_path / "src", remove_redundancy=True)
    for path in (tmp_path / "src").glob("opt-*"):
        _drop(path, *GRADIENTS)
    (tmp_path / "src" / "opt-0000000-0000004.safetensors").unlink()
    refused(tmp_path / "src", 5, "opt-0000000-0000004.safetensors: file not found", "accu_grads.w")


@pytest.mark.parametrize("names", [("w",), ("w", "adam_m.w", "norm")])
def test_a_stage_without_its_copy_of_a_shared_parameter_is_no_damage(names, tmp_path):
    second = {name: LAYOUTS[name][0]._replace(first_rank=4) for name in ENTRIES}
    both = {name: (*LAYOUTS[name], second[name]) for name in ENTRIES}
    Save(ENTRIES, both, 8).write(tmp_path / "src")
    for rank in range(4, 8):
        for path in (tmp_path / "src").glob(f"*-000000{rank}-0000008.safetensors"):
            _drop(path, *names)
    got, text = merged(tmp_path / "src", "--strict")
    assert got == ENTRIES
    told = f"{count(len(names), 'parameter', 'are')} listed for a stage that saved no copy "
    assert not mentions(text, f"{told}.*not on ranks 4-7: another stage has all slices")
    path = tmp_path / "src" / "model-0000001-0000008.safetensors"
    _drop(path, "w")
    got, text = merged(tmp_path / "src")
    assert got == ENTRIES
    assert not mentions(text, r"warning\[faulty_replica\]: .*model-0000001-0000008.safetensors")
    refused(tmp_path / "src", 5, "lacks tensors that", options=("--strict",))


def test_one_rank_of_a_stage_without_its_copy_is_damage(tmp_path):
    second = ROWS._replace(first_rank=4)
    Save({"w": ENTRIES["w"]}, {"w": (ROWS, second)}, 8).write(tmp_path / "src")
    _drop(tmp_path / "src" / "model-0000006-0000008.safetensors", "w")
    assert merged(tmp_path / "src")[0] == {"w": ENTRIES["w"]}
    refused(tmp_path / "src", 5, "model-0000006.*: lacks tensors that", options=("--strict",))


def _as_mindformers_reads(key):
    """Return a key of storage_data as MindFormers 2.1 writes it without redundancy."""
    name, number = key.strip("()").rsplit(", (", 1)
    return str((name.strip("'\" "), (int(number.strip(",")),)))


@pytest.mark.parametrize(
    "names", [('it\'s a "q"', "back\\slash", "plain"), ("tab\there", "ends in a quote'", "größe")]
)
def test_names_that_are_escaped_twice_are_recognised(names, tmp_path):
    tensors = {name: noise(name, "Float32", (8, 6)) for name in names}
    Save(tensors, dict.fromkeys(names, (ROWS,)), 4).write(tmp_path / "src")
    change(
        tmp_path / "src",
        lambda m: m.update(
            storage_data={_as_mindformers_reads(key): v for key, v in m["storage_data"].items()}
        ),
    )
    got, text = merged(tmp_path / "src")
    assert got == tensors
    assert "2 names escaped twice in storage_data" in text


def test_a_key_that_may_mean_two_names_is_refused(tmp_path):
    names = ["a\\b'", "a\\b"]
    Save(dict.fromkeys(names, ENTRIES["norm"]), dict.fromkeys(names, (WHOLE,)), 4).write(
        tmp_path / "src"
    )
    change(
        tmp_path / "src",
        lambda m: m["storage_data"].update(
            {_as_mindformers_reads(key): m["storage_data"].pop(key) for key in [*m["storage_data"]]}
        ),
    )
    refused(tmp_path / "src", 3, "storage_data: .*: not in state_dict_metadata")


# --------------------------------------------------------- statistics that each rank has of its own


def _write_with_statistic(folder, name, *, layouts=None):
    """Write a folder in which every rank has other values of a tensor; return those of rank 0."""
    own = {rank: noise(f"{name} {rank}", "Float32", (6,)) for rank in range(4)}
    save = Save(ENTRIES | {name: own[0]}, LAYOUTS | (layouts or {}), 4, uncut=frozenset({name}))
    save.write(folder)
    for rank, entry in own.items():
        path = folder / f"model-000000{rank}-0000004.safetensors"
        write_safetensors(path, read(path) | {name: entry})
    return own[0]


@pytest.mark.parametrize("name", ["layers.1.mlp.global_tokens_per_expert", "attn.max_logits_val"])
@pytest.mark.parametrize("has_layout", [True, False])
def test_a_statistic_of_every_rank_is_taken_from_the_lowest(name, has_layout, tmp_path):
    layouts = {name: (WHOLE,)} if has_layout else None
    lowest = _write_with_statistic(tmp_path / "src", name, layouts=layouts)
    for words in ((), ("--check-replicas",)):
        got, text = merged(tmp_path / "src", *words)
        assert got == ENTRIES | {name: lowest}
        told = rf"warning\[own_values\]: {name}: every rank has values of its own"
        assert not mentions(text, told)
        assert text.count("own_values") == 1
    refused(tmp_path / "src", 5, f"{name}: every rank has values", options=("--strict",))
    result = run_well("verify", tmp_path / "src", "--deep")
    assert not mentions(message(result), f"note: {name}: every rank has values of its own")


@pytest.mark.parametrize("name", ["mlp.router.expert_bias", "mlp.tid2eid", "tokens_per_expert.w"])
def test_other_replicas_have_to_be_equal(name, tmp_path):
    _write_with_statistic(tmp_path / "src", name)
    refused(tmp_path / "src", 5, f"{name}: different between ranks that should hold the same")
    assert run("verify", tmp_path / "src", "--deep").exit_code == 1


# ------------------------------------------------------------------------------ without metadata


def test_without_metadata_every_file_holds_whole_tensors(tmp_path):
    source = tmp_path / "iteration_00000004"
    single = {name: (OracleLayout((1,), ((),) * len(e.shape)),) for name, e in ENTRIES.items()}
    Save(ENTRIES, single, 1).write(source)
    (source / "metadata.json").unlink()
    assert merged(source)[0] == ENTRIES


def test_without_metadata_several_files_are_taken_at_their_word_with_a_note(tmp_path):
    tmp_path.joinpath("src").mkdir()
    for number, name in enumerate(["w", "norm"]):
        path = tmp_path / "src" / f"net-model-000000{number}-0000002.safetensors"
        write_safetensors(path, {name: ENTRIES[name]})
    got, text = merged(tmp_path / "src")
    assert got == {name: ENTRIES[name] for name in ("w", "norm")}
    assert "no metadata.json: every file is read as one of full tensors" in text
    path.unlink()
    refused(tmp_path / "src", 5, "1 of 2 model files found number 1 is missing")


def test_without_metadata_repeated_names_are_an_error(folder):
    (iteration(folder) / "metadata.json").unlink()
    files = "model-0000000-0000004.safetensors, model-0000001-0000004.safetensors and 2 more"
    told = "4 parameters in several files, and no metadata.json for slices"
    text = refused(folder, 5, told, "Try: copy metadata.json again, or -s STRATEGY --pattern")
    assert f"w ({files})" in text
    assert text.count("no metadata.json") == 1
    assert r"--pattern 'model-{rank}-0000004.safetensors'" in text


def test_what_an_error_says_of_lost_metadata_helps(folder, tmp_path):
    (iteration(folder) / "metadata.json").unlink()
    names = {"w": (ROWS,), "embed": (BOTH,), "norm": (WHOLE,)}
    layouts = {
        name: {
            "dev_matrix": [*of.device_matrix],
            "tensor_map": [axes[0] if axes else -1 for axes in of.tensor_map],
        }
        for name, (of,) in names.items()
    }
    (tmp_path / "s.json").write_text(json.dumps({"parallel_layout_item": layouts}))
    words = ["-s", tmp_path / "s.json", "--pattern", "model-{rank}-0000004.safetensors"]
    got, _ = merged(iteration(folder), *words)
    assert got == {name: ENTRIES[name] for name in names}


# -------------------------------------------------------------------------------------- bad input

BAD = {
    "a shape that the parts do not divide": (
        lambda m: m["state_dict_metadata"]["w"].update(axis_fragmentations=[3, 1]),
        "w: axis_fragmentations \\(3, 1\\) do not divide global_shape \\(8, 6\\)",
    ),
    "parts that the layout does not make": (
        lambda m: m["state_dict_metadata"]["w"]["layout"].update(tensor_map=[-1, 1]),
        "w: the layout makes \\(1, 2\\) slices, axis_fragmentations \\(2, 1\\)",
    ),
    "a device matrix without ranks": (
        lambda m: m["state_dict_metadata"]["w"]["layout"].update(rank_list=[0, 1]),
        "w: layout: 2 ranks do not fit the device matrix \\[2, 2\\]",
    ),
    "a rank that no cluster has": (
        lambda m: m["state_dict_metadata"]["w"]["layout"].update(rank_list=[0, 1, 2, 10**99]),
        "w: layout: rank 1000.*, expected less than 1048576",
    ),
    "a place of a rank that no cluster has": (
        lambda m: m["storage_data"]["('w', (0,))"][0].update(storage_rank=10**99),
        "storage_data: .*storage_rank 1000.* is not a rank below 1048576",
    ),
    "a tensor map of no axes": (
        lambda m: m["state_dict_metadata"]["w"]["layout"].update(tensor_map=["dp", -1]),
        "w: layout.tensor_map\\[0\\]: expected int . array, got str",
    ),
    "a device axis that is not there": (
        lambda m: m["state_dict_metadata"]["w"]["layout"].update(tensor_map=[7, -1]),
        "w: tensor map .* names device axis 7",
    ),
    "a slice that is not there": (
        lambda m: m["state_dict_metadata"]["w"]["chunk"].pop(),
        "w: chunk: expected the slices 0 to 1; wrong or missing: \\[1\\]",
    ),
    "offsets for slice numbers": (
        lambda m: m["state_dict_metadata"]["w"]["chunk"][1].update(global_offset=[4, 0]),
        "w: global_offset \\(4, 0\\) is not one slice number",
    ),
    "an unknown element type": (
        lambda m: m["state_dict_metadata"]["w"]["properties"].update(dtype="float7"),
        "w: unknown dtype 'float7'",
    ),
    "many axes": (
        lambda m: m["state_dict_metadata"]["w"].update(
            layout=None,
            global_shape=[8, 6, *[1] * 62],
            axis_fragmentations=[2, *[1] * 63],
            chunk=[{"global_offset": [n], "local_shape": [4, 6, *[1] * 62]} for n in range(2)],
        ),
        "w: 64 axes; 63 are the most",
    ),
    "no shape": (
        lambda m: m["state_dict_metadata"]["w"].pop("global_shape"),
        "w: .* missing required field global_shape",
    ),
    "a negative size": (
        lambda m: m["state_dict_metadata"]["w"].update(global_shape=[-8, 6]),
        "w: axis_fragmentations .* do not divide global_shape \\(-8, 6\\)",
    ),
    "a place outside": (
        lambda m: m["storage_data"]["('w', (0,))"][0].update(file_name="../a.safetensors"),
        "storage_data: .*: \\[0\\]: file_name '../a.safetensors' is not a file name",
    ),
    "a key that is code": (
        lambda m: m["storage_data"].update({"__import__('os')": []}),
        "storage_data: __import__\\('os'\\): not a name and a slice number",
    ),
    "a key of a tensor that is not there": (
        lambda m: m["storage_data"].update({"('x', (0,))": []}),
        "storage_data: \\('x', \\(0,\\)\\): not in state_dict_metadata",
    ),
    "a slice beyond the last": (
        lambda m: m["storage_data"].update({"('w', (2,))": []}),
        "w: storage_data: slice 2, expected 0 to 1",
    ),
    "no storage": (
        lambda m: m.pop("storage_data"),
        "expected the objects state_dict_metadata and storage",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_metadata_that_contradicts_itself_is_refused_by_name(folder, what):
    edit, pattern = BAD[what]
    change(iteration(folder), edit)
    refused(folder, 3, "metadata.json", pattern)


def test_all_that_is_wrong_with_metadata_is_told_at_once(folder):
    def edit(metadata):
        metadata["state_dict_metadata"]["w"].update(axis_fragmentations=[3, 1])
        metadata["state_dict_metadata"]["norm"]["properties"].update(dtype="float7")
        metadata["storage_data"]["junk"] = []

    change(iteration(folder), edit)
    told = ("w: axis_fragmentations", "norm: unknown dtype", "junk: not a name")
    assert refused(folder, 3, *told).count("error[") == 3


def test_files_that_are_not_what_metadata_says_are_named_all_at_once(folder):
    inside = iteration(folder)
    for rank, name, entry in [
        (1, "w", noise("w", "Float32", (3, 6))),
        (2, "norm", noise("norm", "Int32", (6,))),
    ]:
        path = inside / f"model-000000{rank}-0000004.safetensors"
        write_safetensors(path, read(path) | {name: entry})
    (inside / "opt-0000003-0000004.safetensors").unlink()
    refused(
        folder,
        5,
        "w, norm: a slice has another type or shape w: rank 1 "
        "\\(.*model-0000001.*\\) has Float32 \\(3, 6\\), expected Float32 \\(4, 6\\)",
        "opt-0000003-0000004.safetensors: file not found .* these slices of .*adam_m.w",
    )


def test_a_tensor_that_is_in_no_file_is_named(folder):
    inside = iteration(folder)
    for path in inside.glob("model-*"):
        write_safetensors(path, {n: e for n, e in read(path).items() if n != "norm"})
    refused(folder, 5, "model-0000000.* and 3 more: lacks tensors that metadata.json lists", "norm")
    change(inside, lambda m: m["storage_data"].pop("('norm', (0,))"))
    got, text = merged(folder)
    assert got == {name: entry for name, entry in ENTRIES.items() if name != "norm"}
    assert "1 parameter described, but in no file norm" in text


def test_a_damaged_file_is_damage_and_nothing_else(folder):
    path = iteration(folder) / "opt-0000003-0000004.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    text = refused(folder, 3, "opt-0000003-0000004.safetensors")
    assert "file not found" not in text
    result = run("inspect", folder)
    assert result.exit_code == 3
    assert "embed" in result.stdout


def test_metadata_of_another_kind_does_not_make_a_checkpoint(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "metadata.json").write_text('{"format": "pt"}')
    refused(tmp_path / "src", 5, "no rank folders")


def test_metadata_that_is_no_json_is_refused(folder):
    (iteration(folder) / "metadata.json").write_text('{"state_dict_metadata": ')
    refused(folder, 3, "metadata.json: not valid JSON")


def test_keys_are_read_as_python_writes_them():
    names = ["w", "it's", 'a "b"', 'it\'s "both"', "tab\there", "new\nline", "größe", "\u2028"]
    names += ["back\\slash", "\x00\x1f\x7f", "\U0001d11e"]
    for number, name in enumerate(names):
        assert parse_key(str((name, (number,)))) == (name, number)
    for text in ["('w', 0)", "('w', (0, 1))", "('w', (-1,))", "('w' 'x', (0,))", "(w, (0,))"]:
        with pytest.raises(ValueError, match="not a name and a slice number"):
            parse_key(text)
    for text in ["('\\q', (0,))", "('\\N{DIGIT ONE}', (0,))", "('\\xZZ', (0,))"]:
        with pytest.raises(ValueError, match="not a name and a slice number"):
            parse_key(text)
    with pytest.raises(ValueError, match="illegal Unicode character"):
        parse_key("('\\U00110000', (0,))")


# ------------------------------------------------------------------------------- the command line


def test_reshard_needs_no_strategy_of_the_source(folder, tmp_path):
    path = tmp_path / "new.ckpt"
    path.write_bytes(strategy(layout("w", (2,), (-1,), (0,)), layout("norm", (2,), (0,))))
    words = ("-d", path, "--format", "ckpt")
    run_well("reshard", folder, *words, "-o", tmp_path / "new")
    got = read_ranks(tmp_path / "new")
    full = ENTRIES["w"].array()
    assert got[1]["w"] == entry_of(full[:, 3:])
    assert got[1]["norm"] == entry_of(ENTRIES["norm"].array()[3:])
    run_well("split", folder, *words, "-o", tmp_path / "split")
    assert read_ranks(tmp_path / "split") == got


def test_inspect_shows_full_shapes_cuts_ranks_and_what_the_checkpoint_says(folder):
    result = run_well("inspect", folder, "--all")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "w 8 x 6 Float32 rows / 2 0,1 | 2,3" in lines
    assert "adam_m.w 8 x 6 Float32 rows / 4 0-3, one each" in lines
    assert "norm 6 Float32 no 0-3" in lines
    assert "global_batch_size 8" in result.stdout
    document = json.loads(run_well("inspect", folder, "--json").stdout)
    assert document["values"] == {key: str(value) for key, value in COMMON.items()}
    (w,) = (tensor for tensor in document["tensors"] if tensor["name"] == "w")
    assert w["slices"] == [
        {"start": [0, 0], "shape": [4, 6], "ranks": [0, 1]},
        {"start": [4, 0], "shape": [4, 6], "ranks": [2, 3]},
    ]
    assert (w["parts"], w["device_matrix"], w["ranks"]) == ([2, 1], None, [0, 1, 2, 3])


def test_a_damaged_common_json_is_passed_over(folder):
    (iteration(folder) / "common.json").write_text("{")
    got, text = merged(folder)
    assert got == ENTRIES
    assert "common.json cannot be read: ignored" in text


def test_a_strategy_is_not_taken_beside_a_description(folder, tmp_path):
    path = tmp_path / "s.ckpt"
    path.write_bytes(strategy(layout("w", (2,), (-1,), (0,))))
    words = ("-o", tmp_path / "m.h5")
    for result in (
        run("merge", folder, "-s", path, *words),
        run("inspect", folder, "-s", path),
        run("reshard", folder, "-s", path, "-d", path, "-o", tmp_path / "r"),
    ):
        assert result.exit_code == 5
        assert not mentions(message(result), "describes", "the same command without -s")
    result = run("merge", folder, "--replicated", *words)
    assert (result.exit_code, "the same command without --replicated" in message(result)) == (
        5,
        True,
    )


def test_no_input_is_written_over(folder):
    inside = iteration(folder)
    for name in ("metadata.json", "opt-0000002-0000004.safetensors"):
        words = ("-o", inside / name, "--overwrite", "--format", "ckpt")
        if name.endswith("json"):
            result = run("merge", folder, *words)
            assert (result.exit_code, "is an input of this run" in message(result)) == (5, True)
    result = run("merge", folder, "-o", inside / name, "--overwrite")
    assert (result.exit_code, "is an input of this run" in message(result)) == (5, True)
