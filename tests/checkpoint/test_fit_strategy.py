"""Strategies are fitted to names and shapes: what only these decide."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.model.layout import Layout
from ckpttool.problems import PlanError
from ckpttool.strategy_files.reader import read_strategy
from tests.support.checkpoints import (
    ROWS,
    catalog_of,
    catalog_on_disk,
    cut,
    noise,
    strategy_of,
    write_ranks,
)
from tests.support.commands import mentions, message, run, run_well
from tests.support.file_bytes import layout, strategy
from tests.support.readers import read, read_ranks

# ------------------------------------------------------------ param_split_shape without offsets

FULL = {"table": (12, 4), "fc.weight": (8, 6), "norm": (6,)}


def dynamic(folder, table, fc, norm):
    """Write a strategy of the dynamic graph: 2 slices on 4 ranks, shapes where rows would be."""
    folder.mkdir(exist_ok=True)
    path = folder / "strategy.ckpt"
    items = (
        layout("table", (2, 2, 1), (1, 0), split=table),
        layout("fc.weight", (2, 1, 2), (1, 0), split=fc),
        layout("norm", (4, 1), (0,), split=norm),
    )
    path.write_bytes(strategy(*items))
    return path


LAYOUTS = strategy_of(
    {
        "table": Layout((2, 2, 1), ((1,), (0,))),
        "fc.weight": Layout((2, 1, 2), ((1,), (0,))),
        "norm": Layout((4, 1), ((0,),)),
    }
)


@pytest.fixture
def full():
    """The full tensors, and the momentum of one."""
    shapes = {**FULL, "adam_m.fc.weight": FULL["fc.weight"]}
    return {name: noise(name, "Float32", shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "shapes", [((6, 4), (8, 3), (6,)), ((12, 4), (8, 6), (6,))], ids=["of a slice", "of the whole"]
)
def test_a_split_shape_that_is_a_shape_says_nothing(shapes, full, tmp_path):
    given = dynamic(tmp_path / "s", *shapes)
    src = write_ranks(tmp_path / "src", cut(full, LAYOUTS), "ckpt")
    run_well("merge", src, "-s", given, "-o", tmp_path / "full.safetensors")
    assert read(tmp_path / "full.safetensors") == full
    run_well("split", tmp_path / "full.safetensors", "-d", given, "-o", tmp_path / "new")
    assert read_ranks(tmp_path / "new") == cut(full, LAYOUTS)
    assert run_well("verify", src, "-s", given, "--deep").exit_code == 0


@pytest.mark.parametrize("rows", [(7, 5), (4, 8)])
def test_a_split_shape_that_slices_have_as_rows_is_a_manual_split(rows, tmp_path):
    uneven = strategy_of({"t": replace(ROWS, rows=rows)})
    full = {name: noise(name, "Float32", (12, 4)) for name in ("t", "adam_m.t")}
    given = tmp_path / "strategy.ckpt"
    given.write_bytes(strategy(layout("t", (2, 2), (1, -1), split=rows)))
    src = write_ranks(tmp_path / "src", cut(full, uneven), "ckpt")
    run_well("merge", src, "-s", given, "-o", tmp_path / "full.ckpt")
    assert read(tmp_path / "full.ckpt") == full
    run_well("split", tmp_path / "full.ckpt", "-d", given, "-o", tmp_path / "new")
    assert read_ranks(tmp_path / "new") == cut(full, uneven)


@pytest.mark.parametrize("split", [(4, 6), (8, 6), (2, 6), (3, 7)])
@pytest.mark.parametrize("shard", [2, -1, 0])
def test_a_shape_before_the_optimizer_shard_or_of_hidden_shards_says_nothing(
    split, shard, tmp_path
):
    cut_by = strategy_of(dict.fromkeys(("t", "adam_m.t"), Layout((2, 2), ((1,), ()), 2)))
    full = {name: noise(name, "Float32", (8, 6)) for name in cut_by.layouts}
    items = (layout(name, (2, 2), (1, -1), split=split, size=shard) for name in full)
    given = tmp_path / "strategy.ckpt"
    given.write_bytes(strategy(*items))
    src = write_ranks(tmp_path / "src", cut(full, cut_by), "ckpt")
    hidden = [] if shard else ["--optimizer-shard", "2"]
    run_well("merge", src, "-s", given, *hidden, "-o", tmp_path / "full.ckpt")
    assert read(tmp_path / "full.ckpt") == full
    if shard:
        run_well("split", tmp_path / "full.ckpt", "-d", given, "-o", tmp_path / "new")
        assert read_ranks(tmp_path / "new") == cut(full, cut_by)


def test_a_split_shape_that_is_neither_is_an_error_that_shows_it(full, tmp_path):
    given = dynamic(tmp_path / "s", (7, 4, 2), (8, 3), (6,))
    src = write_ranks(tmp_path / "src", cut(full, LAYOUTS), "ckpt")
    out = tmp_path / "full.ckpt"
    for words in (["merge", src, "-s", given], ["verify", src, "-s", given]):
        result = run(*words, *(["-o", out] if words[0] == "merge" else []))
        said = (
            r"table: param_split_shape is neither its shape nor the rows of its slices",
            r"it is \[7, 4, 2\], and the shape \(6, 4\)",
            "Try: the strategy of this run",
        )
        assert result.exit_code == 5
        assert not mentions(message(result), *said)
    run_well("merge", src, "-s", dynamic(tmp_path / "s", (6, 4), (8, 3), (6,)), "-o", out)
    result = run(
        "split", out, "-d", dynamic(tmp_path / "s", (7, 4, 2), (8, 3), (6,)), "-o", src / "n"
    )
    assert result.exit_code == 5
    assert not mentions(message(result), r"table: param_split_shape .* and the shape \(12, 4\)")


def test_slices_that_differ_by_other_rows_are_named():
    given = strategy_of({"w": replace(ROWS, split_shape=(7, 5))})
    catalog = catalog_of({0: {"w": (7, 3)}, 1: {"w": (7, 3)}, 2: {"w": (4, 3)}, 3: {"w": (4, 3)}})
    said = r"manual split of \[7, 5\] rows; rank 2 .* has \(4, 3\), expected \(5, 3\)"
    with pytest.raises(PlanError, match=said):
        ckpttool.resolve(catalog, given)


def test_a_split_shape_is_written_as_it_was_read(tmp_path):
    given = dynamic(tmp_path, (6, 4), (8, 3), (6,))
    ckpttool.write_strategy(read_strategy(str(given)), str(tmp_path / "new.ckpt"))
    assert read_strategy(str(tmp_path / "new.ckpt")).layouts == read_strategy(str(given)).layouts


# ----------------------------------------------------------------- names that differ by one prefix

NETWORK = {"layers.0.w": (8, 6), "layers.1.w": (8, 6), "layers.1.norm.w": (8,), "norm.w": (8,)}


def listed(start: str = "") -> bytes:
    """Return a strategy of two slices of rows on four ranks, its names with a prefix."""
    names = {f"{start}{name}": shape for name, shape in NETWORK.items()}
    names |= {f"adam_m.{start}{name}": shape for name, shape in NETWORK.items()}
    items = (layout(n, (2, 2), (1, -1) if shape[1:] else (1,)) for n, shape in names.items())
    return strategy(*items)


def held(folder, start: str = ""):
    """Write the files of these ranks, names with a prefix; return them and the full tensors."""
    full = {f"{start}{name}": noise(name, "Int32", shape) for name, shape in NETWORK.items()}
    full |= {f"adam_m.{start}{n}": noise("m" + n, "Int32", shape) for n, shape in NETWORK.items()}
    full["global_step"] = noise("global_step", "Int32", (1,))
    (folder / "own.ckpt").write_bytes(listed(start))
    parts = cut(full, read_strategy(str(folder / "own.ckpt")))
    return write_ranks(folder / "src", parts, "ckpt"), full, parts


@pytest.mark.parametrize(
    ("of_files", "of_strategy", "said"),
    [
        ("network.", "", r"names in the strategy lack network\.; read as those of"),
        ("", "network.", r"names in the strategy begin with network\.; read as those of"),
        (
            "_backbone.model.",
            "",
            r"names in the strategy lack _backbone\.model\.; read as those of",
        ),
        ("net.backbone.", "net.", None),
    ],
)
def test_names_that_differ_by_one_prefix_are_read_with_a_note(
    of_files, of_strategy, said, tmp_path
):
    src, full, parts = held(tmp_path, of_files)
    given = tmp_path / "given.ckpt"
    given.write_bytes(listed(of_strategy))
    out = tmp_path / "full.safetensors"
    result = run("merge", src, "-s", given, "-o", out)
    if said is None:
        assert result.exit_code == 5
        assert "no parameter in common" in message(result)
        return
    assert result.exit_code == 0
    assert read(out) == full
    assert not mentions(message(result), f"note: {said} the files")
    assert not mentions(message(run_well("verify", src, "-s", given, "--deep")), said)
    assert not mentions(message(run_well("inspect", src, "-s", given)), said)
    result = run_well("split", out, "-d", given, "-o", tmp_path / "new")
    assert read_ranks(tmp_path / "new") == parts
    assert not mentions(message(result), f"note: {said} {out}")


def test_a_prefix_that_is_not_the_only_one_is_not_guessed(tmp_path):
    given = strategy_of(dict.fromkeys(("layers.0.w", "layers.1.w"), ROWS))
    names = [f"{side}.{name}" for side in ("encoder", "decoder") for name in given.layouts]
    full = {name: noise(name, "Int32", (8, 3)) for name in names}
    catalog = catalog_on_disk(tmp_path, dict.fromkeys(range(4), full))
    with pytest.raises(PlanError, match="no parameter in common"):
        ckpttool.resolve(catalog, given)


@pytest.mark.parametrize("state", ["adam_m.", "moments.", "exp_avg_sq."])
def test_a_state_without_its_weight_is_not_the_weight(tmp_path, state):
    given = strategy_of(dict.fromkeys(("w", f"{state}w"), ROWS))
    names = {f"{state}w": noise("m", "Int32", (8, 3))}
    catalog = catalog_on_disk(tmp_path, cut(names, given))
    with pytest.raises(PlanError, match="1 weight is in the strategy and in no file"):
        ckpttool.resolve(catalog, given)


def test_patterns_without_the_prefix_of_all_names_are_told_first(tmp_path):
    src, full, _ = held(tmp_path, "network.")
    hand = tmp_path / "hand.yaml"
    lines = (
        f"  {state}{{0}}{name}: {{{{axis: 0, parts: 2}}}}\n"
        for state in ("", "adam_m.")
        for name in ("layers.*", "norm.*")
    )
    text = "ckpttool_strategy: 1\nranks: 4\nparameters:\n" + "".join(lines)
    hand.write_text(text.format(""))
    result = run("merge", src, "-s", hand, "-o", tmp_path / "full.safetensors")
    first = r"^error\[strategy\]: \S+: the names in the files begin with network\., which the pat"
    assert result.exit_code == 5
    assert not mentions(message(result), first, r'Try: "network\.layers\.\*" and so on')
    hand.write_text(text.format("network."))
    run_well("merge", src, "-s", hand, "-o", tmp_path / "full.safetensors")
    assert read(tmp_path / "full.safetensors") == full
