"""Strategy files: MindSpore's own, and protobuf and JSON spelled by hand."""

import json
import os
import shutil
from pathlib import Path

import h5py
import pytest

from ckpttool.model.layout import Layout
from ckpttool.problems import CombinedError, StrategyError
from ckpttool.strategy_files import reader
from ckpttool.strategy_files.reader import glance, read_strategy
from tests.support.checkpoints import with_names
from tests.support.corpus import GOLDEN, SAMPLES, case_names, expected
from tests.support.file_bytes import layout, message, number, operator, packed, strategy
from tests.support.in_memory import find


@pytest.fixture
def write(tmp_path):
    """A function that writes bytes, or an object as JSON, and returns the path."""

    def written(content, name="s.ckpt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        path.write_bytes(data)
        return str(path)

    return written


@pytest.fixture
def read(write):
    return lambda content: read_strategy(
        [write(content, "s.ckpt" if isinstance(content, bytes) else "s.json")]
    )


def layout_of(read, *items, name="w"):
    (layout,) = read(strategy(*items)).layouts[name]
    return layout


# ------------------------------------------------------------------------ MindSpore's own


def strategies():
    for case in case_names():
        for side in expected(case)["strategies"]:
            yield pytest.param(case, side, id=f"{case}-{side}")


@pytest.mark.parametrize(("case", "side"), list(strategies()))
def test_golden_strategies_are_read_as_recorded(case, side):
    recorded = expected(case)["strategies"][side]
    path = next((GOLDEN / case).glob(f"{side}_strategy.*"))
    strategy = read_strategy([str(path)])
    assert (strategy.stages, len(strategy.ranks)) == (len(recorded["stages"]), recorded["devices"])
    assert set(strategy.layouts) == {
        name for stage in recorded["stages"].values() for name in stage
    }
    for stage, entries in recorded["stages"].items():
        for name, entry in entries.items():
            at = strategy.stages_of(name).index(int(stage))
            layout = strategy.layouts[name][at]
            assert layout.device_matrix == tuple(entry["dev_matrix"])
            assert layout.first_rank == int(stage) * strategy.stage_ranks
            size = entry["opt_size"]
            assert layout.optimizer_shard == {0: 1, -1: layout.replicas}.get(size, size)
            assert layout.rows == tuple(entry.get("param_split_shape", ()))
            if case != "json_multi_axis":  # its maps are of expanded tensors
                assert layout.tensor_map == tuple(map(tuple, entry["axes"]))


@pytest.mark.parametrize("run", ["mp2_dp4", "mp2_dp4_opt_all", "multiaxis", "opt_aggregated"])
def test_all_files_of_one_stage_together_are_the_file_of_any_rank(run):
    folder = SAMPLES / run / "strategy"
    strategy = read_strategy([str(folder / "strategy_5.ckpt")])
    assert read_strategy([str(folder)]).layouts == strategy.layouts
    assert strategy.stages == 1


def test_a_folder_of_outputs_is_read_without_its_manifest(tmp_path):
    shutil.copy(SAMPLES / "pp2" / "strategy" / "merged.ckpt", tmp_path / "strategy.ckpt")
    (tmp_path / "ckpttool.json").write_text("{}")
    (tmp_path / "merged.h5.ckpttool.json").write_text("{}")
    strategy = read_strategy([str(tmp_path / "strategy.ckpt")])
    assert read_strategy([str(tmp_path)]).layouts == strategy.layouts


@pytest.mark.parametrize("run", ["pp2", "pp2_opt", "pp2_shared"])
def test_files_of_all_stages_are_the_merged_file(run):
    folder = SAMPLES / run / "strategy"
    merged = read_strategy([str(folder / "merged.ckpt")])
    assert (merged.stages, merged.stage_ranks) == (2, 4)
    for names in (
        ["strategy_0.ckpt", "strategy_4.ckpt"],
        ["strategy_7.ckpt", "strategy_2.ckpt"],
        ["strategy_0.ckpt", "strategy_4.json"],
        ["strategy_0.json", "strategy_4.json"],
        ["merged.json"],
        ["merged.ckpt", "strategy_4.ckpt"],
        ["."],
    ):
        strategy = read_strategy([str(folder / name) for name in names])
        assert strategy.layouts == merged.layouts, names


def test_full_shapes_come_from_json_even_if_protobuf_is_there():
    folder = SAMPLES / "pp2" / "strategy"
    assert all(
        layout.full_shape is None
        for layouts in read_strategy([str(folder / "merged.ckpt")]).layouts.values()
        for layout in layouts
    )
    for names in (["merged.json"], ["merged.ckpt", "merged.json"], ["."]):
        strategy = read_strategy([str(folder / name) for name in names])
        assert all(layout.full_shape for layouts in strategy.layouts.values() for layout in layouts)


def test_the_files_of_some_stages_are_not_enough():
    folder = SAMPLES / "pp2" / "strategy"
    with pytest.raises(
        StrategyError, match=r"layouts of stage 1 but not of stage 0; the strategy files of all"
    ):
        read_strategy([str(folder / "strategy_4.ckpt")])


# Slices that MindSpore's compiler makes where "None" stands beside device axes; full tensors have
# 16 rows and 8 columns, or 16 elements.
BESIDE = {
    "after": (8, 4),
    "after_and_none": (8, 8),
    "before": (8, 4),
    "between": (4, 4),
    "both": (8, 4),
    "columns": (8, 4),
    "many": (4, 8),
    "only": (16, 4),
    "two_behind": (4, 8),
    "vector_after": (8,),
    "vector_before": (8,),
    "vector_whole": (16,),
    "whole": (16, 8),
}


@pytest.mark.parametrize("suffixes", [(".ckpt",), (".json",), (".ckpt", ".json")])
def test_none_beside_device_axes_makes_the_slices_that_mindspore_makes(suffixes):
    folder = SAMPLES / "none_beside_axes"
    strategy = read_strategy([str(folder / f"strategy_0{suffix}") for suffix in suffixes])
    found, problems, _ = find(with_names(BESIDE, range(8)), strategy)
    assert not problems
    assert found.keys() == BESIDE.keys()
    for name, (source,) in found.items():
        assert source.meta.shape == (16, 8)[: len(BESIDE[name])]
        assert source.layout.slice_shape(0, source.meta.shape) == BESIDE[name]


def test_a_strategy_without_the_optimizer_fields_is_read():
    path = GOLDEN / "broken_inputs" / "strategy_without_opt_fields" / "src_strategy.ckpt"
    strategy = read_strategy([str(path)])
    assert {
        layout.optimizer_shard for layouts in strategy.layouts.values() for layout in layouts
    } == {1}


# ------------------------------------------------------------------------ protobuf by hand


@pytest.mark.parametrize(
    ("maps", "tensor_map"),
    [
        ([(1, 0)], ((1,), (0,))),
        ([(-1, 0, -1)], ((), (0,), ())),
        ([(1, 0), (-1,)], ((1, 0), ())),
        ([(1,), (2, 0)], ((1,), (2, 0))),
        ([(2, 0), ()], ((2, 0),)),  # one tensor axis; the empty message tells it from two
        ([(2, -1), (1,)], ((2,), (1,))),  # "None" beside device axes shards nothing
        ([(-1, 2), (-1, -1)], ((2,), ())),
        ([(-1, 2, -1, 0), ()], ((2, 0),)),
        ([()], ()),
        ([(), ()], ()),
        ([], ()),
    ],
)
@pytest.mark.parametrize("numbers", [number, packed])
def test_tensor_maps_are_read(read, maps, tensor_map, numbers):
    found = layout_of(read, layout("w", (2, 2, 2), *maps, numbers=numbers))
    assert found == Layout((2, 2, 2), tensor_map)


@pytest.mark.parametrize(("size", "shard"), [(0, 1), (1, 1), (-1, 4), (2, 2), (4, 4), (None, 1)])
def test_optimizer_shards_are_read(read, size, shard):
    found = layout_of(read, layout("w", (2, 2, 2), (1, -1), size=size))
    assert found.optimizer_shard == shard


def test_a_scalar_is_not_cut_by_an_optimizer_shard_over_all(read):
    assert layout_of(read, layout("w", (4,), (), size=-1)).optimizer_shard == 1


def test_a_device_axis_of_one_rank_is_read(read):
    assert layout_of(read, layout("w", (2, 2, 2, 1), (2, 1))).slice_counts == (2, 2)


def test_unknown_fields_are_skipped(read):
    junk = number(15, 7) + message(16, b"junk")
    item = message(3, junk, layout("w", (2,), (0,))[2:], junk)
    assert layout_of(read, junk, item, operator(0), junk) == Layout((2,), ((0,),))


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (layout("w", (2, 2), (2, -1)), r"w: tensor map .* names device axis 2; .* 0 to 1"),
        (layout("w", (2, 2), (-2, -1)), "names device axis -2"),
        (layout("w", (2, 2), (0, 0)), "uses device axis 0 twice"),
        (layout("w", (2, 2), (1, 0), (1,)), "uses device axis 1 twice"),
        (layout("w", (2, 2), (-2, 0), (1,)), "names device axis -2"),
        (layout("w", (2, 0), (0,)), "has an axis below 1"),
        (layout("w", (-2, 2), (0,)), "has an axis below 1"),
        (layout("w", (2, 2), (0, -1), size=3), "optimizer shard of 3 does not divide the rep"),
        (layout("w", (2, 2), (0, -1), size=4), "optimizer shard of 4 does not divide the rep"),
        (layout("w", (2, 2), (0, -1), size=-2), "opt_weight_shard_size -2, expected -1 or more"),
        (layout("w", (4,), (), size=2), "optimizer shard of 2 on a 0-d tensor"),
        (
            layout("w", (2,), (0,), split=(6, 4, 1), starts=(0, 6, 10)),
            r"split of \[6, 4, 1\] rows, expected 2",
        ),
        (
            layout("w", (2,), (0,), split=(6, 4), starts=(0, 6), field=3),
            r"field-sliced \(3 fields\) and sharded along",
        ),
        (
            layout("w", (2,), (0,), split=(6, 4), starts=(0, 5)),
            r"\[6, 4\] rows with indices_offset \[0, 5\], expected \[0, 6\]",
        ),
        (layout("w", (2,), (0,), split=(6, -4)), r"param_split_shape \[6, -4\], expected 0 or"),
        (layout("w", (2,), (0,), field=-1), "field -1, expected 0 or more"),
        (layout("w", (2**40,), (0,)), "at most 64 and 1048576$"),
        (layout("w", (2,), (-1,) * 65), "at most 64 and 1048576$"),
        (layout("w", (1,) * 65, (0,)), "at most 64 and 1048576$"),
        (layout("w", (2,), *[()] * 65), "at most 64 and 1048576$"),
        (layout("w", (2,), (0,)) + layout("w", (2,), (0,)), "w: listed twice"),
        (message(3, message(2, b"")), "a layout without a parameter name"),
        (number(3, 5), "field 3 is not a message"),
        (message(3, message(1, b"w"), number(2, 5)), "field 2 is not a message"),
        (message(3, message(1, b"\xff")), "not UTF-8"),
        (
            message(3, message(1, b"w"), message(2, packed(5, 1))),
            "byte 11: damaged, or of another format; ",
        ),
        (
            message(3, message(1, b"w"), message(2, message(7))),
            "byte 11: damaged, or of another format; ",
        ),
        (message(2, message(2, message(1, b"ab"))), "byte 8: damaged, or of another format; "),
        (operator(1000) + layout("w", (2,), (0,)), "operators of stage 1000, expected 0 to 999$"),
        (operator(-1) + layout("w", (2,), (0,)), "operators of stage -1, expected"),
        (operator(0), "no parameter layouts in it"),
        (b"", "no parameter layouts in it"),
        (
            layout("w", (2,), (0,)) + layout("v", (4,), (0,)),
            "are for different numbers of ranks; 2 ranks: w; 4 ranks: v$",
        ),
    ],
)
def test_layouts_that_make_no_sense_are_errors(read, item, reason):
    with pytest.raises(StrategyError, match=reason):
        read(strategy(item))


def test_all_impossible_layouts_of_a_file_are_named(write):
    path = write(strategy(layout("v", (2,), (5,)), layout("w", (2,), (7,))))
    with pytest.raises(CombinedError, match=r"v: tensor map .*\n.*w: tensor map") as caught:
        read_strategy([path])
    assert caught.value.exit_code == 4


# ------------------------------------------------------------------------ stages


def stage(number, *names, ranks=2):
    return strategy(operator(number), *(layout(name, (ranks,), (0,)) for name in names))


def test_stages_have_their_ranks_one_after_another(write):
    paths = [write(stage(1, "b", "w"), "1.ckpt"), write(stage(0, "a", "w"), "0.ckpt")]
    strategy = read_strategy(paths)
    assert [one.first_rank for one in strategy.layouts["w"]] == [0, 2]
    assert [one.first_rank for one in strategy.layouts["b"]] == [2]
    assert strategy.files == tuple(paths)


def test_a_merged_file_is_known_by_its_names(read):
    found = read(strategy(operator(0), layout("0-w", (2,), (0,)), layout("1-w-x", (2,), (-1,))))
    assert {name: one[0].first_rank for name, one in found.layouts.items()} == {"w": 0, "w-x": 2}


@pytest.mark.parametrize(
    ("stages", "names"),
    [
        ([0], ["a-b", "c-d"]),  # dashes, but no numbers before them
        ([0], ["0-a", "w"]),  # not all names begin with a number
        ([0], ["1-a", "2-b"]),  # none begins with the stage of the operators
        ([0], ["1234-a"]),  # no stage has such a number
        ([0], ["²-a", "٣-b"]),  # digits of other scripts
        ([0], ["0-", "-0"]),
    ],
)
def test_names_with_dashes_are_no_stages(read, stages, names):
    items = [*map(operator, stages), *(layout(name, (2,), (0,)) for name in names)]
    found = read(strategy(*items))
    assert (set(found.layouts), found.stages) == (set(names), 1)


def test_names_with_dashes_survive_in_a_merged_file(read):
    found = read(strategy(layout("0-1-w", (2,), (0,)), layout("1-0-w", (2,), (0,))))
    assert {name: one[0].first_rank for name, one in found.layouts.items()} == {"1-w": 0, "0-w": 2}


@pytest.mark.parametrize("path", sorted((SAMPLES / "merged_again").iterdir()), ids=lambda p: p.name)
def test_a_merged_file_that_mindspore_merged_again_is_what_it_was_before(path, tmp_path):
    run = "pp2" if path.name.startswith("pp2") else "mp2_dp4"
    folder = SAMPLES / run / "strategy"
    once = read_strategy([str(folder)])
    strategy = read_strategy([str(path)])
    assert (strategy.layouts, strategy.stages, strategy.notes) == (once.layouts, once.stages, ())
    shutil.copytree(folder, tmp_path / "strategy")
    shutil.copy(path, tmp_path / "strategy" / f"merged_ckpt_strategy{path.suffix}")
    assert read_strategy([str(tmp_path / "strategy")]).layouts == once.layouts


def merged(*names, stages=(0, 1)):
    return strategy(*map(operator, stages), *(layout(name, (2,), (0,)) for name in names))


@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["0-0-a", "0-1-b"], {"a": 0, "b": 2}),  # nothing but the merged file lay there
        (["1-0-a", "1-1-b", "0-a"], {"a": 0, "b": 2}),
        (["0-0-0-a", "0-0-1-b", "0-1-b"], {"a": 0, "b": 2}),
        (
            ["0-0-a", "0-1-b", "1-c"],
            {"0-a": 0, "1-b": 0, "c": 2},
        ),  # another stage 1: no merged file
        (["0-0-a", "0-2-b", "1-c"], {"0-a": 0, "2-b": 0, "c": 2}),  # no stage 1 in it
        (["0-1-a", "1-b"], {"1-a": 0, "b": 2}),
    ],
)
def test_only_a_whole_merged_file_within_another_is_unfolded(read, names, plain):
    found = read(merged(*names))
    assert {name: one[0].first_rank for name, one in found.layouts.items()} == plain
    assert not found.notes


def test_a_merged_file_that_lacks_a_stage_says_which(read):
    with pytest.raises(StrategyError, match="layouts of stage 1 but not of stage 0"):
        read(strategy(layout("1-w", (2,), (0,))))
    with pytest.raises(StrategyError, match="layouts of stages 0, 3 but not of stages 1, 2"):
        read(strategy(layout("0-w", (2,), (0,)), layout("3-w", (2,), (0,))))


def test_operators_of_several_stages_need_merged_names(read):
    with pytest.raises(StrategyError, match="operators of stages 0, 1, but the names of"):
        read(strategy(operator(0), operator(1), layout("w", (2,), (0,))))


def test_stages_of_different_sizes_are_an_error(write):
    paths = [write(stage(0, "a"), "0.ckpt"), write(stage(1, "b", ranks=4), "1.ckpt")]
    with pytest.raises(StrategyError, match="2 ranks: stage 0 a; 4 ranks: stage 1 b"):
        read_strategy(paths)


def test_two_files_of_a_stage_must_agree(write):
    one = write(stage(0, "w"), "a.ckpt")
    other = write(strategy(operator(0), layout("w", (2,), (-1,))), "b.ckpt")
    with pytest.raises(
        StrategyError, match=r"b\.ckpt: stage 0 has other layouts in .*a\.ckpt; 1 parameter: w; "
    ):
        read_strategy([one, other])
    more = write(stage(0, "v", "w"), "c.ckpt")
    with pytest.raises(
        StrategyError, match=r"stage 0 has other parameters in .*; in one file only: v; "
    ):
        read_strategy([one, more])
    assert read_strategy([one, one]).layouts == read_strategy([one]).layouts


# ------------------------------------------------------------------------ folders, wrong files


def test_only_strategy_files_of_a_folder_are_read(write, tmp_path):
    write(stage(0, "w"), "s/a.ckpt")
    write(b"merged", "s/merge_succeed.txt")
    (tmp_path / "s" / "folder.ckpt").mkdir()
    assert set(read_strategy([str(tmp_path / "s")]).layouts) == {"w"}


def test_a_folder_without_strategy_files_is_an_error(tmp_path):
    with pytest.raises(StrategyError, match=r"no strategy file \(\.ckpt or \.json\) in it"):
        read_strategy([str(tmp_path)])


def test_every_bad_file_of_a_folder_is_named(write, tmp_path):
    write(b"", "s/a.ckpt")
    write(b"\xff", "s/b.ckpt")
    write(stage(0, "w"), "s/c.ckpt")
    with pytest.raises(
        CombinedError, match=r"a\.ckpt: .*empty \(0 bytes\);.*\n.*b\.ckpt: not a strategy f"
    ):
        read_strategy([str(tmp_path / "s")])


def test_a_missing_file_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_strategy([str(tmp_path / "none.ckpt")])


@pytest.mark.parametrize(
    ("source", "name", "reason"),
    [
        (
            "samples/files/plain.ckpt",
            "s.ckpt",
            r"^[^:]*: a checkpoint \(ckpt\), not a strategy file; the strategy file of the",
        ),
        (
            "samples/files/dtypes.safetensors",
            "s.ckpt",
            r": a checkpoint \(safetensors\), not a strategy file; ",
        ),
        (
            "samples/mp2_dp4/strategy/strategy_0.json",
            "s.ckpt",
            "JSON with another suffix; a copy whose name ends in .json",
        ),
        ("samples/mp2_dp4/strategy/strategy_0.ckpt", "s.json", "not valid JSON"),
        ("samples/files/dtypes.safetensors", "s.json", "not valid JSON"),
        ("samples/files/net-graph.meta", "s.ckpt", ": a graph .*, not a strategy file"),
        ("samples/files/group_info.pb", "s.ckpt", ": group information, not a strategy"),
        ("broken_inputs/strategy_garbage/src_strategy.ckpt", "s.ckpt", "not a strategy file"),
    ],
)
def test_files_of_other_kinds_are_told_to_be_so(source, name, reason, tmp_path):
    shutil.copy(GOLDEN / source, tmp_path / name)
    with pytest.raises(StrategyError, match=reason):
        read_strategy([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"version": "1.0", "server_list": []}', ": a rank table, not a strategy file; "),
        (
            '{"parallel_strategy_item": {"x": {"stage": 0}}}',
            "in it, only operators; the strategy file",
        ),
        ("{}", ": a JSON document, not a strategy file; the strategy file"),
    ],
)
def test_json_without_layouts_is_told_what_it_is(write, text, reason):
    with pytest.raises(StrategyError, match=reason):
        read_strategy([write(text.encode(), "s.json")])


def test_an_hdf5_checkpoint_is_told_to_be_one(tmp_path):
    with h5py.File(tmp_path / "s.ckpt", "w") as file:
        file["w"] = [1.0]
    with pytest.raises(StrategyError, match=r": a checkpoint \(hdf5\), not a strategy file; "):
        read_strategy([str(tmp_path / "s.ckpt")])


# -------------------------------------------------------------------------------- what it costs


def test_equal_files_of_ranks_are_understood_once(write, tmp_path, monkeypatch):
    understood = []
    parse = reader._read_protobuf
    monkeypatch.setattr(
        reader, "_read_protobuf", lambda path, _: understood.append(path) or parse(path, None)
    )
    for rank in range(8):
        write(strategy(operator(rank // 4), layout("w", (4,), (0, -1))), f"f/s_rank_{rank}.ckpt")
    found = read_strategy(str(tmp_path / "f"))
    assert [Path(path).name for path in understood] == ["s_rank_0.ckpt", "s_rank_4.ckpt"]
    assert [Path(path).name for path in found.files] == [f"s_rank_{rank}.ckpt" for rank in range(8)]
    assert found.stages_of("w") == (0, 1)
    write(strategy(operator(1), layout("w", (4,), (-1, 0))), "f/s_rank_7.ckpt")
    with pytest.raises(StrategyError, match=r"s_rank_7.*stage 1 has other layouts in .*: w;"):
        read_strategy(str(tmp_path / "f"))


def test_a_layout_that_many_parameters_have_is_read_once(write, monkeypatch):
    read = []
    one = reader._read_layout
    monkeypatch.setattr(reader, "_read_layout", lambda *given: read.append(given) or one(*given))
    maps = [(0, -1), (-1, 0)] * 50
    path = write(strategy(*(layout(f"w{i}", (4,), axes) for i, axes in enumerate(maps))))
    found = read_strategy(path)
    assert [found.layouts[f"w{i}"][0].tensor_map for i in range(2)] == [((0,), ()), ((), (0,))]
    assert found.layouts["w0"] == found.layouts["w98"]
    assert len(read) == 2


def test_a_layout_in_several_messages_adds_up(read):
    matrix, axes = (message(2, message(n, number(1, v))) for n, v in ((1, 4), (2, 0)))
    item = message(3, message(1, b"w"), matrix, axes)
    assert layout_of(read, item) == Layout((4,), ((0,),))


@pytest.mark.parametrize("suffix", [".ckpt", ".json"])
@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"", ": a file of more than 100000000 bytes, not a strategy file; "),
        (b"\x08" + bytes(7) + b"{}", r": a checkpoint \(safetensors\), not a strategy file; "),
    ],
)
def test_a_file_too_large_for_a_strategy_is_not_read(tmp_path, suffix, head, reason):
    path = tmp_path / f"s{suffix}"
    path.write_bytes(head)
    os.truncate(path, 1 << 40)  # a hole: to read all of it would take hours
    with pytest.raises(StrategyError, match=reason):
        read_strategy(str(path))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "s.ckpt")
    with pytest.raises(
        StrategyError, match=r": not a file; a strategy is read twice, .*; the pipe saved"
    ):
        read_strategy(str(tmp_path / "s.ckpt"))


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("*/*strategy*.*")), ids=lambda path: "/".join(path.parts[-2:])
)
def test_a_glance_counts_the_ranks_of_all_stages(path):
    first, whole = glance(str(path)), read_strategy(str(path))
    assert first is not None
    assert first.ranks == len(whole.ranks)
    assert {*first.names} <= whole.layouts.keys()


@pytest.mark.parametrize("path", ["PROVENANCE.md", "json_strategy/expected.json"])
def test_a_glance_at_other_files_shows_nothing(path):
    assert glance(str(GOLDEN / path)) is None
