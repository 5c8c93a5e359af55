"""MindFormers' "Checkpoint 2.0": what it wrote, whatever it may write, and keys and names.

What is said of such folders is in ``e2e/saves/checkpoint2.txt``.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import ckpttool
from ckpttool.discovery.checkpoint2 import parse_key
from ckpttool.execution.execute import execute
from ckpttool.wording import count
from tests.oracle import OracleLayout
from tests.strategies import examples, moves
from tests.support.checkpoint2 import Save, change, slice_number
from tests.support.checkpoints import noise, oracle
from tests.support.commands import merged, message, refused, run_well
from tests.support.corpus import GOLDEN
from tests.support.errors import texts_of
from tests.support.plans import check_conversions, plan_merge
from tests.support.readers import entry_of, read

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
            oracle(replace(layouts[0], optimizer_shard=1, first_rank=layout.first_rank))
            for layout in layouts
        )
        for name, layouts in move.src.layouts.items()
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
    dst = replace(
        move.dst,
        layouts={n: layouts for n, layouts in move.dst.layouts.items() if n in save.entries},
    )
    check_conversions(folder, save.entries, dst, "safetensors")


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
            plan_merge(
                catalog, None, str(folder / "m.ckpt"), output_options=ckpttool.OutputOptions("ckpt")
            )
        (problem,) = (text for text in texts_of(caught.value) if f"{lost}: file not found" in text)
        assert f"no other file has these slices of {count(len(gone), 'parameter')} (" in problem
        assert sum(name in problem for name in gone) >= min(len(gone), 3)
    elif save.ranks > 1 and not any(
        name.startswith(("unlisted", "adam")) for name in save.entries.keys() - save.layouts.keys()
    ):  # what the description lacks, a person has to decide
        execute(
            *plan_merge(
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
    output = message(run_well("merge", source, "-o", out))
    with np.load(source / "expected.npz") as full:
        assert read(out) == {name: entry_of(full[name]) for name in full}
    assert ("3 parameters listed in the wrong one of a rank's two files" in output) == (
        "own" in name
    )


@pytest.mark.parametrize("name", WRITTEN)
def test_the_writer_of_these_tests_writes_what_mindformers_does(name, tmp_path):
    source = GOLDEN / "mindformers" / name
    with np.load(source / "expected.npz") as full:
        save = golden_save(full, has_rank_groups=not name.startswith("1.8"))
    save.write(tmp_path)
    (theirs,) = (path for path in source.iterdir() if path.is_dir())
    assert json.loads((tmp_path / "metadata.json").read_text()) == json.loads(
        (theirs / "metadata.json").read_text()
    )
    files = {path.name for path in theirs.glob("*.safetensors")}
    assert files == {path.name for path in tmp_path.glob("*.safetensors")}
    for file in files:
        assert read(theirs / file) == read(tmp_path / file)


# ------------------------------------------------------------------------------------ the names


def _as_mindformers_reads(key):
    """Return a key of storage_data as MindFormers 2.1 writes it without redundancy."""
    name, number = key.strip("()").rsplit(", (", 1)
    return str((name.strip("'\" "), (int(number.strip(",")),)))


@pytest.mark.parametrize(
    "names", [('it\'s a "q"', "back\\slash", "plain"), ("tab\there", "ends in a quote'", "größe")]
)
def test_names_that_are_escaped_twice_are_recognised(names, tmp_path):
    rows = OracleLayout((2, 2), ((1,), ()))
    tensors = {name: noise(name, "Float32", (8, 6)) for name in names}
    Save(tensors, dict.fromkeys(names, (rows,)), 4).write(tmp_path / "src")
    change(
        tmp_path / "src",
        lambda m: m.update(
            storage_data={_as_mindformers_reads(key): v for key, v in m["storage_data"].items()}
        ),
    )
    got, output = merged(tmp_path / "src")
    assert got == tensors
    assert "2 names escaped twice in storage_data" in output


def test_a_key_that_may_mean_two_names_is_refused(tmp_path):
    names = ["a\\b'", "a\\b"]
    layouts = dict.fromkeys(names, (OracleLayout((4,), ((),)),))
    Save(dict.fromkeys(names, noise("norm", "Float32", (6,))), layouts, 4).write(tmp_path / "src")
    change(
        tmp_path / "src",
        lambda m: m["storage_data"].update(
            {_as_mindformers_reads(key): m["storage_data"].pop(key) for key in [*m["storage_data"]]}
        ),
    )
    refused(tmp_path / "src", 3, "storage_data: .*: not in state_dict_metadata")


def test_keys_are_read_as_python_writes_them():
    names = ["w", "it's", 'a "b"', 'it\'s "both"', "tab\there", "new\nline", "größe", "\u2028"]
    names += ["back\\slash", "\x00\x1f\x7f", "\U0001d11e"]
    for number, name in enumerate(names):
        assert parse_key(str((name, (number,)))) == (name, number)
    for key in ["('w', 0)", "('w', (0, 1))", "('w', (-1,))", "('w' 'x', (0,))", "(w, (0,))"]:
        with pytest.raises(ValueError, match="not a name and a slice number"):
            parse_key(key)
    for key in ["('\\q', (0,))", "('\\N{DIGIT ONE}', (0,))", "('\\xZZ', (0,))"]:
        with pytest.raises(ValueError, match="not a name and a slice number"):
            parse_key(key)
    with pytest.raises(ValueError, match="illegal Unicode character"):
        parse_key("('\\U00110000', (0,))")
