"""The page of a checkpoint: what it says of ranks and slices is true, and it is small."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256

import numpy as np
import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.operations import plot
from ckpttool.operations.inspection import inspect_catalog
from tests.oracle import take
from tests.support.checkpoints import (
    ROWS,
    SHARDED,
    WHOLE,
    catalog_of,
    cut,
    noise,
    oracle,
    slice_catalog,
    strategy_of,
    write_indexed,
    write_ranks,
)
from tests.support.corpus import GOLDEN, case_names, expected, oracle_layouts, source_ranks
from tests.support.in_memory import checkpoint_in_memory
from tests.support.pictures import (
    boxes_of,
    distribution_of,
    draw_checkpoint,
    held_boxes,
    inspection_of,
    read_page,
    read_runs,
)

CASES = [
    name
    for name in case_names()
    if any(one["src_strategy"] for one in expected(name)["conversions"].values())
]


def page_of(source, strategy=None):
    read = None if strategy is None else ckpttool.read_strategy(str(strategy))
    catalog = ckpttool.scan(str(source), command="inspect")
    return read_page(plot.draw(inspect_catalog(catalog, read).parts, {}))


def elements(shape, boxes):
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found = [numbers[tuple(slice(*span) for span in box)].ravel() for box in boxes]
    return sorted(np.concatenate(found)) if found else []


def assert_true(data, name, layouts):
    how = distribution_of(data, name)
    held, shape = held_boxes(how), tuple(how["shape"])
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert held.keys() == {rank for layout in layouts for rank in layout.ranks}
    for layout in layouts:
        for rank in layout.ranks:
            assert elements(shape, held[rank]) == sorted(take(numbers, layout, rank).ravel())


# ----------------------------------------------------------------------------------- what it says


@pytest.mark.parametrize("case", CASES)
def test_every_rank_holds_what_the_oracle_says(case):
    strategy = next(
        one["src_strategy"] for one in expected(case)["conversions"].values() if one["src_strategy"]
    )
    data = page_of(GOLDEN / case / "src", GOLDEN / case / strategy)
    layouts = oracle_layouts(case, "src")
    names = layouts.keys() & {name for held in source_ranks(case).values() for name in held}
    assert names
    for name in names:
        assert_true(data, name, layouts[name])


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (Layout((2, 2), ((0,), (1,))), (4, 6)),
        (Layout((2, 2), ((1,), ()), 2), (8, 3)),
        (Layout((2, 2, 2), ((), (2, 0), (1,))), (3, 8, 2)),
        (Layout((2, 2), ((), (), (), (0,))), (1, 2, 3, 4)),
        (Layout((4,), ()), ()),
        (Layout((2,), ((0,), ()), rows=(2, 6)), (8, 2)),
        (Layout((2,), ((0,), ()), fields=3), (12, 2)),
        (Layout((2,), ((0,),)), (0,)),
    ],
)
def test_every_layout_is_drawn_as_the_oracle_slices(layout, shape):
    strategy = strategy_of({"w": layout})
    catalog = slice_catalog(strategy, {"w": shape})
    assert_true(draw_checkpoint(checkpoint_in_memory(catalog, strategy)), "w", [oracle(layout)])


def test_a_tensor_of_several_stages_shows_all_its_ranks():
    strategy = strategy_of({"w": ROWS}, {"w": replace(ROWS, first_rank=4)})
    catalog = slice_catalog(strategy, {"w": (4, 2)})
    data = draw_checkpoint(checkpoint_in_memory(catalog, strategy))
    assert distribution_of(data, "w")["owners"] == ["0,1,4,5", "2,3,6,7"]
    assert [one["ranks"] for one in data["stages"]] == ["0-3", "4-7"]


def test_a_hidden_optimizer_shard_is_drawn_as_contents_show_it():
    case = "optshard_size2_adam_8_to_4"
    data = page_of(GOLDEN / case / "src", GOLDEN / case / "src_strategy.ckpt")
    shards = {one.get("sharded", "") for one in data["distributions"]}
    assert any("opt / 2" in text for text in shards), shards


def test_tensors_with_one_distribution_share_it():
    strategy = strategy_of({f"layers.{i}.w": SHARDED for i in range(50)})
    shapes = dict.fromkeys(strategy.layouts, (8, 4))
    data = draw_checkpoint(checkpoint_in_memory(slice_catalog(strategy, shapes), strategy))
    assert len(data["distributions"]) == 1
    assert [(row["name"], row["tensors"]) for row in data["rows"]] == [("layers.{0-49}.w", "0-49")]


def test_a_checkpoint_that_describes_itself_is_drawn_without_a_strategy():
    for name in ("ms_two_axes", "newtorch_ragged"):
        folder = GOLDEN / "hyper_parallel" / name / "ckpt"
        found = inspect_catalog(ckpttool.scan(str(folder), command="inspect")).parts
        data = read_page(plot.draw(found, {}))
        for entry in found.summary.entries:
            how = distribution_of(data, entry.name)
            assert how["kind"] == "slices"
            assert how["known"] == "described by the checkpoint"
            everything = [box for boxes in boxes_of(how) for box in boxes]
            assert elements(entry.shape, everything) == [*range(np.prod(entry.shape, dtype=int))]


# ------------------------------------------------------------------- what is missing or not known


def without(catalog, *ranks):
    files = {rank: file for rank, file in catalog.files.items() if rank not in ranks}
    return replace(catalog, files=files, missing_ranks=ranks)


def test_a_missing_rank_is_absent_and_its_replica_is_not():
    strategy = strategy_of({"w": ROWS})
    catalog = without(slice_catalog(strategy, {"w": (4, 2)}), 1)
    data = draw_checkpoint(checkpoint_in_memory(catalog, strategy))
    how = distribution_of(data, "w")
    assert (how["kind"], how["owners"], how["absent"]) == ("slices", ["0,1", "2,3"], "1")
    assert data["missing"] == "1"


def test_a_stage_that_lacks_slices_of_a_shared_tensor_shows_those_that_it_has():
    strategy = strategy_of({"w": ROWS}, {"w": replace(ROWS, first_rank=4)})
    catalog = without(slice_catalog(strategy, {"w": (4, 2)}), 6, 7)
    how = distribution_of(draw_checkpoint(checkpoint_in_memory(catalog, strategy)), "w")
    assert (how["owners"], how["absent"]) == (["0,1,4,5", "2,3,6,7"], "6,7")


def test_a_slice_that_nobody_has_is_drawn_as_lost():
    strategy = strategy_of({"w": ROWS, "b": WHOLE})
    catalog = without(slice_catalog(strategy, {"w": (4, 2), "b": (4, 2)}), 2, 3)
    data = draw_checkpoint(checkpoint_in_memory(catalog, strategy))
    how = distribution_of(data, "w")
    assert (how["kind"], how["owners"], how["absent"]) == ("broken", ["0,1", "2,3"], "2,3")
    assert how["shape"] == [4, 2]
    assert boxes_of(how) == [[((0, 2), (0, 2))], [((2, 4), (0, 2))]]
    assert distribution_of(data, "b")["kind"] == "slices"
    assert [one[:3] for one in data["tensors"]] == [["w", "Float32", 32], ["b", "Float32", 32]]


def test_a_tensor_whose_shapes_contradict_each_other_has_no_slices():
    strategy = strategy_of({"w": ROWS})
    catalog = catalog_of({0: {"w": (2, 2)}, 1: {"w": (2, 2)}, 2: {"w": (3, 2)}, 3: {"w": (2, 2)}})
    how = distribution_of(draw_checkpoint(checkpoint_in_memory(catalog, strategy)), "w")
    assert (how["kind"], how["shape"], how["owners"]) == ("unjoined", None, ["0-3"])
    assert not how["same"]


def test_a_tensor_in_no_file_is_lost_on_all_its_ranks():
    strategy = strategy_of({"w": ROWS})
    catalog = catalog_of({rank: {"b": (2,)} for rank in range(4)})
    checkpoint = checkpoint_in_memory(catalog, strategy)
    found = inspection_of(checkpoint)
    found = replace(found, completeness=replace(found.completeness, missing_tensors=("w",)))
    how = distribution_of(read_page(plot.draw(found, {})), "w")
    assert (how["kind"], how["owners"], how["absent"]) == ("unjoined", ["0-3"], "0-3")


def test_a_checkpoint_without_redundancy_says_that_each_slice_is_saved_once():
    case = GOLDEN / "safetensors_remove_redundancy"
    data = page_of(case / "src", case / "src_strategy.ckpt")
    once = [one for one in data["distributions"] if one["once"] and one["absent"]]
    assert once
    for one in once:
        absent = set(read_runs(one["absent"]))
        assert all(len(set(read_runs(ranks)) - absent) == 1 for ranks in one["owners"])


def test_ranks_that_hold_the_same_are_shown_without_a_strategy(tmp_path):
    same, mine = noise("a", "Float32", (4,)), [noise(letter, "Float32", (4,)) for letter in "xyx"]
    ranks = {rank: {"same": same, "w": one} for rank, one in enumerate(mine)}
    data = page_of(write_ranks(tmp_path / "src", ranks, "ckpt"))
    same, other = distribution_of(data, "same"), distribution_of(data, "w")
    assert (same["kind"], same["owners"]) == ("stored", ["0-2"])
    assert same["equality"] == "all bytes are equal on these ranks"
    assert same["same"]
    assert (other["owners"], other["equality"]) == (["0,2", "1"], "different between ranks")


def test_a_tensor_that_is_not_in_the_strategy_is_called_so():
    case = GOLDEN / "params_outside_strategy"
    data = page_of(case / "src", case / "src_strategy.ckpt")
    known = {one["known"] for one in data["distributions"] if one["kind"] == "values"}
    assert known == {"not in the strategy"}


def test_what_merge_would_report_is_on_the_page_as_grave_as_it_is_for_merge(tmp_path):
    full = {"w": noise("w", "Float32", (8, 4)), "b": noise("b", "Float32", (4, 4))}
    strategy = replace(strategy_of({"w": ROWS, "b": WHOLE}), files=())
    ranks = cut(full, strategy)
    for rank, entries in ranks.items():
        entries["rng"] = noise(f"rng{rank}", "Float32", (4,))
    ranks[3]["b"] = noise("other", "Float32", (4, 4))
    catalog = ckpttool.scan(str(write_ranks(tmp_path / "src", ranks, "ckpt")), command="inspect")
    found = inspect_catalog(catalog, strategy, contents="all").parts
    assert not found.found.errors
    data = read_page(plot.draw(found, {}))
    errors = [text for severity, (text, *_) in data["notes"] if severity == "error"]
    assert any("b: different between ranks that should hold the same" in text for text in errors)
    assert any("rng: not in the strategy, and different between" in text for text in errors)
    assert {"b", "rng"} <= data["problems"].keys()


def test_a_merged_checkpoint_shows_files_and_not_ranks(tmp_path):
    files = {f"part_{i}.safetensors": {f"w{i}": noise("w", "Float32", (4,))} for i in (0, 1)}
    data = page_of(write_indexed(tmp_path / "merged", files))
    assert (data["word"], data["stages"][0]["ranks"]) == ("file", "0,1")
    for name, file in (("w0", "0"), ("w1", "1")):
        how = distribution_of(data, name)
        assert (how["known"], how["owners"]) == ("a full tensor", [file])


# ------------------------------------------------------------------------------- what it is made of

EVIL = "</script><img src=x onerror=\"document.title='evil'\">{{data}}{{title}}\u2028\x1b[31m&amp;"


def test_a_name_cannot_end_the_data(tmp_path):
    ranks = {rank: {EVIL: noise("w", "Float32", (4,))} for rank in (0, 1)}
    folder = write_ranks(tmp_path / "<b>run</b>", ranks, "ckpt")
    found = inspect_catalog(ckpttool.scan(str(folder), command="inspect")).parts
    page = plot.draw(found, {"contents": [EVIL]})
    assert "<img" not in page
    assert page.count("</script>") == plot.TEMPLATE.read_text("utf-8").count("</script>")
    assert "<b>" not in page
    assert page.isascii()
    assert read_page(page)["tensors"][0][0] == EVIL.replace("\u2028", r"\u2028").replace(
        "\x1b", r"\x1b"
    )


def test_the_policy_allows_the_script_of_the_page_and_nothing_else():
    page = plot.draw(inspection_of(checkpoint_in_memory(catalog_of({0: {"w": (4,)}}), None)), {})
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in re.sub(r"http-equiv", "", page)


@pytest.mark.big
def test_a_thousand_ranks_and_six_hundred_tensors_are_less_than_a_megabyte():
    matrix, stages = (8, 8), []
    for stage in range(16):
        shards = {"shard": Layout(matrix, ((0,), ()), 8, 64 * stage)}
        shards |= {"columns": Layout(matrix, ((), (0,)), 1, 64 * stage)}
        shards |= {"norm": Layout(matrix, ((),), 1, 64 * stage)}
        stages.append(
            {f"layers.{13 * stage + i}.{n}": one for i in range(13) for n, one in shards.items()}
        )
    strategy = strategy_of(*stages)
    shapes = {name: (4096,) if name.endswith("norm") else (4096, 64) for name in strategy.layouts}
    catalog = slice_catalog(strategy, shapes)
    found = inspection_of(checkpoint_in_memory(catalog, strategy))
    assert (len(catalog.files), len(found.summary.entries)) == (1024, 624)
    assert len(plot.draw(found, {})) < 500_000
