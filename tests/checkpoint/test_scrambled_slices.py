"""Slices that MindSpore wrote with safetensors 0.8: scrambled ones, and harmless ones like them."""

from collections import Counter

import numpy as np
import pytest

import ckpttool
from ckpttool.checkpoint.evidence import answer
from ckpttool.checkpoint.scrambled_slices import find_scrambled
from ckpttool.model.layout import Layout
from ckpttool.model.strategy import join_stages
from ckpttool.operations.look import Subject
from ckpttool.operations.verification import verify
from ckpttool.storage.sampling import sample
from tests.support.checkpoints import catalog_on_disk, cut, write_file, write_ranks
from tests.support.commands import everything, run, run_well
from tests.support.evidence import Recorder
from tests.support.readers import entry_of, read

COLUMNS = Layout((2,), ((), (0,)))
COLUMNS_OF_3 = Layout((3,), ((), (0,)))
COLUMNS_OF_4 = Layout((4,), ((), (0,)))
COLUMNS_OF_4_OF_W = join_stages({0: {"w": COLUMNS_OF_4}})


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def scramble(full, layout, buffers=1):
    """Cut a tensor as MindSpore does with safetensors 0.8: bytes from the first element on.

    If it was in several ``buffers``, slice ``i`` is cut from number ``i % buffers``, which has
    every so many columns of slices.
    """
    held = {}
    for rank in layout.ranks:
        region, memory = layout.region(rank, full.shape), full
        at = np.ravel_multi_index(region.start, full.shape)
        if buffers > 1:
            parts = np.split(full, layout.slice_counts[-1], axis=-1)
            memory = np.concatenate(parts[rank % buffers :: buffers], axis=-1)
            at = rank // buffers * parts[0].shape[-1]
        data = np.ascontiguousarray(memory).reshape(-1)[at : at + region.size]
        held[rank] = {"w": entry_of(data.reshape(region.shape))}
    return held


def verified(folder, held, layout, format="safetensors", **options):
    """Return the diagnostics of scrambled slices that verify finds."""
    strategy = join_stages({0: dict.fromkeys(held[0], layout)})
    subject = Subject(catalog_on_disk(folder, held, format), strategy)
    found = verify(subject, **options).findings
    return [one for one in found if one.code == "scrambled_slices"]


@pytest.mark.parametrize(
    ("layout", "shape", "ranks"),
    [
        (COLUMNS, (4, 4), (0, 1)),
        (COLUMNS_OF_4, (300, 64), (0, 1)),
        (Layout((2, 4), ((1,), (0,))), (16, 32), (0, 1)),
        (Layout((2, 4), ((0,), (1,))), (16, 32), (0, 4)),
        (Layout((2, 4), ((), (0,))), (16, 32), (0, 1)),  # two replicas
        (Layout((4, 2), ((), (0,)), 4), (16, 32), (0, 1)),  # an optimizer shard
        (Layout((2, 2, 2), ((), (1, 0))), (16, 32), (0, 1)),
        (Layout((2, 2, 2), ((2,), (1,), (0,))), (8, 12, 16), (0, 1)),
        (Layout((2, 4), ((), (0,), ())), (8, 12, 16), (0, 1)),
        (Layout((2, 2, 2), ((), (1,), (), (0,))), (3, 4, 5, 6), (0, 1)),
        (COLUMNS, (2, 12), (0, 1)),  # they have one row in common
    ],
)
def test_scrambled_slices_are_found_on_any_axis_but_the_first(tmp_path, layout, shape, ranks):
    (found,) = verified(tmp_path, scramble(random(*shape), layout), layout)
    assert found.ranks == ranks
    assert found.tensor == "w"


@pytest.mark.parametrize("buffers", [2, 4])
def test_slices_of_tensors_that_were_joined_of_some_slices_are_found(tmp_path, buffers):
    layout = Layout((8,), ((), (0,)))
    (found,) = verified(tmp_path, scramble(random(16, 32), layout, buffers), layout)
    assert found.ranks == (0, buffers)


def by_columns(folder, ranks):
    """Write the strategy of as many ranks with columns of ``w``."""
    path = folder / "s.yaml"
    path.write_text(f"ckpttool_strategy: 1\nranks: {ranks}\nparameters:\n  w: {{axis: 1}}\n")
    return path


def touched(rows):
    full = np.zeros((40, 8), np.float32)
    full[rows] = random(len(rows), 8)
    return full


def with_row(full, row, values):
    full[row] = values
    return full


PLACE, DEPTH = np.arange(64, dtype=np.float32)[:, None], np.arange(16, dtype=np.float32)
HARMLESS = {
    "noise": (random(64, 16), COLUMNS_OF_4),
    "one row": (random(1, 64), COLUMNS_OF_4),
    "one row of places": (random(1, 196, 768), Layout((2,), ((), (), (0,)))),
    "equal rows": (np.tile(random(16), (64, 1)), COLUMNS_OF_4),
    "equal rows but the last": (with_row(np.tile(random(4), (64, 4)), -1, 7), COLUMNS_OF_4),
    "equal slices": (np.tile(random(64, 4), 4), COLUMNS_OF_4),
    "equal rows and slices": (np.tile(random(4), (64, 4)), COLUMNS_OF_4),
    "equal rows, two of four slices equal": (
        np.tile(np.concatenate([random(4), random(4), random(8, seed=1)]), (64, 1)),
        COLUMNS_OF_4,
    ),
    "moment of an embedding": (touched([3, 17]), COLUMNS),
    "moment of an embedding, first row": (touched([0]), COLUMNS),
    "moment of an embedding, last row": (touched([39]), COLUMNS),
    "causal mask": (np.tril(np.ones((16, 16), np.float32)), COLUMNS_OF_4),
    "identity": (np.eye(16, dtype=np.float32), COLUMNS_OF_4),
    "Hankel matrix of two values": ((PLACE + DEPTH[:4] > 30).astype(np.float32), COLUMNS_OF_4),
    "Hankel matrix of three values": ((PLACE[:7] + DEPTH[:2]) // 3 % 3, COLUMNS),
    "zeros": (np.zeros((64, 16), np.float32), COLUMNS_OF_4),
    "numbers in order": (np.arange(1024, dtype=np.int32).reshape(64, 16), COLUMNS_OF_4),
    "places by row": (PLACE + 0 * DEPTH, COLUMNS_OF_4),
    "places by column": (0 * PLACE + DEPTH, COLUMNS_OF_4),
    "distances": (PLACE - DEPTH, COLUMNS_OF_4),
    "distances, a column on each rank": (PLACE - DEPTH[:4], COLUMNS_OF_4),
    "sines": (np.sin(PLACE * 10000 ** (-DEPTH / 16)), COLUMNS_OF_4),
    "rotary angles, twice": (np.cos(np.tile(PLACE * 10000 ** (-DEPTH[:8] / 8), 2)), COLUMNS),
    "a period of two slices": (np.resize(random(8), (64, 12)), COLUMNS_OF_3),
    "a period of three slices": (np.resize(random(12), (64, 16)), COLUMNS_OF_4),
    "a kernel": (random(8, 8, 3, 3), Layout((2,), ((), (0,), (), ()))),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_tensors_give_no_alarm(tmp_path, name):
    full, layout = HARMLESS[name]
    held = cut({"w": entry_of(full)}, join_stages({0: {"w": layout}}))
    assert verified(tmp_path, held, layout) == []


@pytest.mark.parametrize(
    ("full", "alarms"),
    [
        (random(2, 12), 1),  # six elements in common
        (random(2, 10), 0),  # five
        (np.int32([[9, 9, 0, 1], [2, 3, 0, 2], [5, 5, 5, 5], [5, 5, 5, 5]]), 1),  # four values
        (np.int32([[9, 9, 0, 1], [2, 0, 1, 2], [5, 5, 5, 5], [5, 5, 5, 5]]), 0),  # three
        (np.int8(np.arange(40 * 8).reshape(40, 8) ** 2 % 13 % 4 + 1), 1),
        (np.int8(np.arange(40 * 8).reshape(40, 8) ** 2 % 13 % 3 + 1), 0),
    ],
)
def test_few_elements_or_values_in_common_show_nothing(tmp_path, full, alarms):
    assert len(verified(tmp_path, scramble(full, COLUMNS), COLUMNS)) == alarms


@pytest.mark.parametrize("element", [2100, 9000])
def test_one_element_that_no_sample_shows_disproves_it(tmp_path, element):
    held = scramble(random(256, 128), COLUMNS)
    assert len(verified(tmp_path / "scrambled", held, COLUMNS)) == 1
    slice_of_1 = held[1]["w"].array().copy()
    slice_of_1.flat[element] += 1
    held[1]["w"] = entry_of(slice_of_1)
    assert verified(tmp_path / "other", held, COLUMNS) == []


@pytest.mark.parametrize("format", ["ckpt", "hdf5"])
def test_only_safetensors_files_have_scrambled_slices(tmp_path, format):
    held = scramble(random(16, 8), COLUMNS)
    assert verified(tmp_path, held, COLUMNS, format) == []


@pytest.mark.parametrize("layout", [COLUMNS, COLUMNS_OF_4])
def test_three_tensors_of_each_shape_are_sampled_and_nothing_else_is_read(tmp_path, layout):
    shapes = {f"w{number}": (16 + number // 5, 8) for number in range(10)}
    tensors = {name: entry_of(random(*shape)) for name, shape in shapes.items()}
    strategy = join_stages({0: dict.fromkeys(tensors, layout)})
    catalog = catalog_on_disk(tmp_path, cut(tensors, strategy), "safetensors")
    recorder = Recorder()
    answer(find_scrambled(catalog, ckpttool.resolve(catalog, strategy).tensors), recorder)
    assert {read for read, _ in recorder.read} == {sample}
    names = Counter(part.meta.name for _, part in recorder.read)
    # Each slice without its last row, and without its first.
    assert names == dict.fromkeys(["w0", "w1", "w2", "w5", "w6", "w7"], 2 * len(layout.ranks))


@pytest.fixture
def scrambled(tmp_path):
    """The folder of two ranks as MindSpore wrote it, and its strategy."""
    write_ranks(tmp_path / "src", scramble(random(16, 8), COLUMNS), "safetensors")
    return tmp_path / "src", "-s", by_columns(tmp_path, 2)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("merge SRC -s S -o OUT.safetensors", 5),
        ("reshard SRC -s S -d S -o OUT --format ckpt", 5),
        ("diff SRC SRC -s S", 5),
        ("verify SRC -s S", 1),
        ("verify SRC -s S --deep", 1),
        ("inspect SRC -s S", 0),
    ],
)
def test_scrambled_slices_stop_every_command_that_joins_them(scrambled, tmp_path, words, code):
    places = {"SRC": scrambled[0], "S": scrambled[2]}
    result = run(
        *(places.get(word, word.replace("OUT", f"{tmp_path}/out")) for word in words.split())
    )
    assert result.exit_code == code
    severity = "error" if code == 5 else "warning"
    text = " ".join(everything(result).split())
    assert f"{severity}[scrambled_slices]: " in text
    assert "w: slices are scrambled, as MindSpore 2.10 writes them with safetensors 0.8" in text
    assert "safetensors 0.7 or as .ckpt" in text
    assert not [*tmp_path.glob("out*")]


def test_open_refuses_scrambled_slices_unless_the_strategy_is_trusted(scrambled):
    source, _, strategy = scrambled
    with pytest.raises(ckpttool.CkptToolError, match="slices are scrambled"):
        ckpttool.open(source, strategy)
    opened = ckpttool.open(source, strategy, trust_strategy=True)
    assert opened["w"][...].shape == (16, 8)


def test_who_trusts_the_strategy_or_ignores_the_code_goes_on(scrambled, tmp_path):
    run_well("merge", *scrambled, "-o", tmp_path / "m.ckpt", "--trust-strategy")
    assert read(tmp_path / "m.ckpt")["w"].shape == (16, 8)
    run_well("diff", scrambled[0], tmp_path / "m.ckpt", *scrambled[1:], "--trust-strategy")
    run_well("verify", *scrambled, "--ignore", "scrambled_slices")


@pytest.mark.parametrize("rows", [16, 64])
def test_slices_that_ckpttool_wrote_are_taken_as_they_are(tmp_path, rows):
    """A Hankel matrix with a column on each rank is what scrambled slices would be."""
    full = entry_of(np.arange(rows)[:, None] + np.arange(4, dtype=np.int32)[None])
    assert len(verified(tmp_path / "a", cut({"w": full}, COLUMNS_OF_4_OF_W), COLUMNS_OF_4)) == 1
    write_file(tmp_path / "m.ckpt", {"w": full}, "ckpt")
    split, strategy = tmp_path / "split", by_columns(tmp_path, 4)
    run_well(
        *("split", tmp_path / "m.ckpt", "-d", strategy),
        *("-o", split, "--format", "safetensors"),
    )
    run_well("verify", split, "-s", strategy)
    result = run("merge", split, "-s", strategy, "-o", tmp_path / "n.ckpt")
    assert result.exit_code == 0
    assert read(tmp_path / "n.ckpt")["w"] == full
