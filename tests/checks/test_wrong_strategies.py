"""A wrong strategy is refused or warned about; `scripts/sweep_strategies.py` tries all of them."""

import json
import re
import shutil

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from scripts.sweep_strategies import sweep
from tests.support.checkpoints import ROWS, WHOLE, catalog_on_disk, cut, noise, write_ranks
from tests.support.commands import mentions, message, run, run_well
from tests.support.corpus import GOLDEN
from tests.support.plans import plan_merge, plan_reshard
from tests.support.readers import zeros

COLUMNS = Layout((2, 2), ((), (1,)))
BOTH = Layout((2, 2), ((1,), (0,)))


def plan(folder, true, claimed, shape=(32, 32), is_constant=False, **options):
    """Merge what ``true`` layouts cut, by those that are claimed."""
    entries = {
        name: zeros(shape) if is_constant else noise(name, "Float32", shape) for name in true
    }
    ranks = cut(entries, join_stages({0: true}))
    catalog = catalog_on_disk(folder / "src", ranks)
    strategy = join_stages({0: claimed})
    resolve_options = ckpttool.ResolveOptions(**options)
    return plan_merge(catalog, strategy, str(folder / "m.ckpt"), resolve_options)[0]


def test_verify_finds_them_by_headers_alone(tmp_path):
    case = GOLDEN / "moe_ep4_mp2"
    strategy = ckpttool.read_strategy([str(case / "src_strategy.ckpt")])
    name = next(name for name in strategy.layouts if f"adam_m.{name}" in strategy.layouts)
    layouts = {n: of[0] for n, of in strategy.layouts.items()}
    layouts[name] = Layout(layouts[name].device_matrix, ((),) * len(layouts[name].tensor_map))
    ckpttool.write_strategy(join_stages({0: layouts}), str(tmp_path / "s.ckpt"))
    result = run("verify", case / "src", "-s", tmp_path / "s.ckpt")
    assert result.exit_code == 1
    assert f"different full shapes {name} " in message(result)


def test_strict_refuses_on_every_warning(tmp_path):
    true = {"a": COLUMNS, "b": ROWS, "c": ROWS}
    with pytest.raises(ckpttool.PlanError, match=r"a: slices .* are equal \(strict\)"):
        plan(tmp_path, true, {**true, "a": BOTH}, strict=True)
    plan(tmp_path, true, true, strict=True)


def test_merge_and_reshard_show_the_largest_sharded_tensors(tmp_path):
    case = GOLDEN / "moe_ep4_mp2"
    words = ["-s", case / "dst_strategy.ckpt", "-o", tmp_path / "o", "--overwrite"]
    for command in (["merge"], ["reshard", "-d", case / "dst_strategy.ckpt"]):
        document = json.loads(run_well(*command, case / "src", *words, "--json").stdout)
        shown = {one["name"]: one for one in document["largest_sharded"]}
        assert shown["ffn.mapping.weight"] == {
            "name": "ffn.mapping.weight",
            "dtype": "Float32",
            "shape": [4, 16, 64],  # (8, 16, 32) was meant: this is what a person sees
            "slice_shape": [2, 16, 16],
            "device_matrix": [2, 4],
            "tensor_map": [[1], [], [0]],
            "optimizer_shard": 1,
        }
        assert "4 x 16 x 64 (3" in run_well(*command, case / "src", *words).stdout
        if command[0] == "reshard":  # nothing was written that a person could check
            kept = run_well(*command, case / "src", *words[:-1], "--resume").stdout
            assert "full shapes" not in kept
        shutil.rmtree(tmp_path / "o") if command[0] == "reshard" else (tmp_path / "o").unlink()
        for manifest in tmp_path.glob("o.*"):
            manifest.unlink()


@pytest.mark.parametrize("place", ["src", "."])
def test_full_shapes_of_an_index_beside_the_source_are_compared(tmp_path, place):
    case = GOLDEN / "moe_ep4_mp2"
    shutil.copytree(case / "src", tmp_path / "src")
    right = ["-s", case / "src_strategy.ckpt"]
    run_well("merge", case / "src", *right, "-o", tmp_path / "parts", "--max-shard-size", "1GB")
    for path in (tmp_path / "parts").iterdir():
        if path.name != "ckpttool.json" and path.is_file():
            shutil.copy(path, tmp_path / place)
    words = ["merge", tmp_path / "src", "--pattern", "rank_{rank}/*.ckpt", "-o", tmp_path / "m.h5"]
    run_well(*words, *right)
    result = run(*words, "-s", case / "dst_strategy.ckpt", "--overwrite")
    assert result.exit_code == 5
    said = r"the strategy makes other full shapes than \S*param_name_map.json lists "
    said += r"ffn.mapping.weight \(4, 16, 64\), in the index \(8, 16, 32\)"
    assert not mentions(message(result), said)


def test_full_shapes_of_the_target_strategy_are_compared(tmp_path):
    true = {"w": ROWS}
    entries = {"w": noise("w", "Float32", (32, 32))}
    catalog = ckpttool.scan(
        str(write_ranks(tmp_path / "src", cut(entries, join_stages({0: true})), "ckpt"))
    )
    target = join_stages({0: {"w": replace(WHOLE, full_shape=(32, 32))}})
    folder = str(tmp_path / "out")
    plan_reshard(catalog, join_stages({0: true}), target, folder)
    said = r"the strategy lists full shape \(32, 32\), the slices form \(16, 64\)"
    with pytest.raises(ckpttool.PlanError, match=said):
        plan_reshard(catalog, join_stages({0: {"w": COLUMNS}}), target, folder)


SAMPLE = [
    "moe_ep4_mp2",  # both axes sharded, experts
    "moe_ep8_to_4_optshard",
    "layout_multi_axis",
    "tp_conv_4d",
    "pipeline_shared_embedding",
    "tp_strategy_16_to_8",  # no optimizer state: much is open
]


@pytest.mark.parametrize(
    "case",
    [*SAMPLE[:2], *(pytest.param(case, marks=pytest.mark.exhaustive) for case in SAMPLE[2:])],
)
def test_no_wrong_strategy_makes_other_tensors_without_a_warning(case, capsys):
    counts = sweep(GOLDEN, [case])
    assert not capsys.readouterr().out  # which names what went wrong
    assert counts["edit refused"]
    with_states = case != "tp_strategy_16_to_8"
    assert with_states or counts["edit open"]
    assert not with_states or not counts["edit open"]


def test_an_expanded_layout_is_compared_as_it_is_folded(tmp_path):
    """The strategy by hand says of one parameter what JSON says of its states in another way."""
    case = GOLDEN / "json_multi_axis"
    document = json.loads((case / "src_strategy.json").read_bytes())
    del document["parallel_layout_item"]["w1"]
    (tmp_path / "s.json").write_text(json.dumps(document), encoding="utf-8")
    results = []
    for axes in ("[-1, [1, 0]]", "[-1, [0, 1]]", "[[1, 0], -1]"):
        text = "ckpttool_strategy: 1\nparameters:\n  w1: {device_matrix: [2, 2, 2], tensor_map: "
        (tmp_path / "more.yaml").write_text(f"{text}{axes}}}\n", encoding="utf-8")
        words = ["-s", tmp_path / "s.json", "-s", tmp_path / "more.yaml", "--overwrite"]
        results.append(run("merge", case / "src", *words, "-o", tmp_path / "m.h5"))
    said = re.compile("optimizer state (differently|different full shapes)")
    assert [result.exit_code for result in results] == [0, 0, 5]
    assert [bool(said.search(message(one))) for one in results] == [False, True, True]
    assert "w1 (128, 16) and adam_m.w1 (32, 64)" in message(results[2])
