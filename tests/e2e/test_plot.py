"""The page of ``inspect --plot``: how the command writes it, and what a browser shows of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from shutil import copytree

import pytest

from ckpttool.model.layout import Layout
from ckpttool.operations import plot
from tests.support.browser import PROGRAMS, Page, find_program, open_browser
from tests.support.checkpoints import (
    ROWS,
    SHARDED,
    WHOLE,
    noise,
    slice_catalog,
    strategy_of,
    write_ranks,
)
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN, case_names
from tests.support.in_memory import checkpoint_in_memory
from tests.support.pictures import inspection_of, read_page
from tests.support.programs import need

CASE = GOLDEN / "reshard_8_to_4"
SOURCE = (CASE / "src", "-s", CASE / "src_strategy.ckpt")
EVIL = "</script><img src=x onerror=\"document.title='evil'\">"


# ----------------------------------------------------------------------------------- the command


def test_the_command_writes_one_page_and_says_so(tmp_path):
    path = tmp_path / "new" / "layout.html"
    text = run_well("inspect", *SOURCE, "--plot", path).stdout
    assert re.search(rf"\nWrote {path} \(\d+\.\d KiB\), which a browser opens without", text)
    assert [*path.parent.iterdir()] == [path]
    labels = dict(read_page(path.read_text())["facts"])
    assert labels["contents"][0].startswith("8 ranks, step 2_10, ckpt, 189.8 KiB")


def test_the_document_is_the_same_with_a_page(tmp_path):
    path = tmp_path / "layout.html"
    with_page = run_well("inspect", *SOURCE, "--json", "--plot", path).stdout
    assert with_page == run_well("inspect", *SOURCE, "--json").stdout
    assert path.exists()
    refused = json.loads(run("inspect", *SOURCE, "--json", "--plot", path).stdout)
    assert [one["code"] for one in refused["problems"]] == ["destination"]
    assert refused["summary"]["complete"]


def test_a_page_that_exists_is_replaced_only_if_that_is_wanted(tmp_path):
    path = tmp_path / "layout.html"
    path.write_text("mine")
    refused = run("inspect", *SOURCE, "-q", "--plot", path)
    assert refused.exit_code == 5
    assert message(refused).startswith(f"error[destination]: {path} exists already")
    assert "--overwrite, or --plot with another path" in message(refused)
    assert path.read_text() == "mine"
    run_well("inspect", *SOURCE, "-q", "--plot", path, "--overwrite")
    assert path.read_text().startswith("<!doctype html>")


def test_a_checkpoint_is_not_replaced_by_its_picture(tmp_path):
    held = {rank: {"w": noise("w", "Float32", (4,))} for rank in (0, 1)}
    folder = write_ranks(tmp_path / "src", held, "ckpt")
    read = folder / "rank_0" / "net.ckpt"
    path = tmp_path / "layout.html"
    path.hardlink_to(read)
    before = read.read_bytes()
    refused = run("inspect", folder, "-q", "--plot", path, "--overwrite")
    assert f"{path} is an input of this run" in message(refused)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["layout.png", "layout.svg", "net.ckpt"])
def test_a_page_has_the_name_of_a_page(tmp_path, name):
    refused = run("inspect", *SOURCE, "-q", "--plot", tmp_path / name)
    assert refused.exit_code == 2
    assert "does not end in .html" in message(refused)
    assert f"Try: --plot {(tmp_path / name).with_suffix('.html')}" in message(refused)
    assert not [*tmp_path.iterdir()]
    run_well("inspect", *SOURCE, "-q", "--plot", tmp_path / "layout.HTM")


@pytest.mark.parametrize("place", ["folder", "folder/", "file/layout.html"])
def test_a_place_where_no_page_can_be_is_refused(tmp_path, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    refused = run("inspect", *SOURCE, "-q", "--plot", f"{tmp_path}/{place}")
    assert refused.exit_code == 5
    assert message(refused).startswith("error[destination]: ")
    assert "Try: --plot with " in message(refused)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_full_disk_leaves_no_half_page(tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ckpttool.storage.files.os.fsync", fail)
    failed = run("inspect", *SOURCE, "-q", "--plot", tmp_path / "layout.html")
    assert failed.exit_code == 6
    assert "not written: No space left on device" in message(failed)
    assert not [*tmp_path.iterdir()]


def test_a_strategy_that_does_not_fit_makes_no_picture(tmp_path):
    other = GOLDEN / "reshard_8_to_6" / "src_strategy.ckpt"
    path = tmp_path / "layout.html"
    refused = run("inspect", CASE / "src", "-s", other, "-q", "--plot", path)
    assert refused.exit_code == 5
    assert "error[strategy]: " in refused.stderr
    assert f"error[not_written]: {path}: no picture: the strategy does not fit" in refused.stderr
    assert not path.exists()


def test_a_strategy_alone_has_no_picture(tmp_path):
    refused = run("inspect", CASE / "src_strategy.ckpt", "--plot", tmp_path / "layout.html")
    assert refused.exit_code == 2
    assert "options for checkpoints only: --plot" in message(refused)


def test_overwrite_without_a_page_is_a_mistake():
    refused = run("inspect", *SOURCE, "--overwrite")
    assert refused.exit_code == 2
    assert "--overwrite without --plot" in message(refused)


def test_lost_slices_are_drawn_and_the_exit_code_is_that_of_inspect(tmp_path):
    held = {rank: {"w": noise("w", "Float32", (2, 2))} for rank in (0, 1)}
    folder = write_ranks(tmp_path / "src", held, "ckpt")
    strategy = tmp_path / "rows.yaml"
    rule = "ckpttool_strategy: 1\nranks: 4\nparameters:\n  w: {axis: 0}\n"
    strategy.write_text(rule)
    path = tmp_path / "layout.html"
    code = run("inspect", folder, "-s", strategy).exit_code
    assert code == 5
    assert run("inspect", folder, "-s", strategy, "-q", "--plot", path).exit_code == code
    (how,) = read_page(path.read_text())["distributions"]
    assert (how["kind"], how["absent"]) == ("broken", "2,3")


# ----------------------------------------------------------------------------------- the browser

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A page of a headless Chromium."""
    if find_program() is None:
        need(PROGRAMS[0])
    with open_browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(browser):
    """The same page as it is at first: light, of usual size."""
    browser.prefer("light")
    browser.resize(1400, 1000)
    yield browser
    wrong = browser.named("Runtime.exceptionThrown") + browser.named("Log.entryAdded")
    assert not wrong, "errors of the script, or what its policy refuses"
    requests = {one["request"]["url"] for one in browser.named("Network.requestWillBeSent")}
    assert all(url.startswith("file:") and url.endswith(".html") for url in requests), requests


def show(page: Page, folder: Path, strategy, shapes, lost=()) -> None:
    """Open the page of a checkpoint that is in memory only."""
    catalog = slice_catalog(strategy, shapes)
    for rank in lost:
        del catalog.files[rank]
    found = inspection_of(checkpoint_in_memory(type(catalog)("run", catalog.files), strategy))
    path = folder / "layout.html"
    path.write_text(plot.draw(found, {"contents": ["made up"]}), encoding="utf-8")
    page.open(path)


LAYERS = {f"layers.{number}.w": ROWS for number in range(3)} | {"norm": WHOLE, "s": SHARDED}
SHAPES = dict.fromkeys(LAYERS, (8, 6))


def cell(rank: int) -> str:
    """The selector of the cell of a rank."""
    return f'[data-rank="{rank}"]'


def tensor(page: Page, name: str) -> str:
    """The selector of a tensor in the list."""
    names = page.texts("#list .pick .name")
    numbers = page.evaluate(
        "[...document.querySelectorAll('#list .pick')].map((one) => one.dataset.tensor)"
    )
    return f'#list [data-tensor="{numbers[names.index(name)]}"]'


@pytest.mark.browser
def test_a_click_on_a_tensor_shows_which_rank_holds_which_slice(page, tmp_path):
    show(page, tmp_path, strategy_of(LAYERS), SHAPES)
    page.click(tensor(page, "s"))
    assert page.text("#shown") == "s"
    assert page.texts("#stages .cell") == [
        *("0\n[0:2, :]", "1\n[2:4, :]", "2\n[4:6, :]", "3\n[6:8, :]"),
    ]
    assert page.text("#tensor h2") == "s"
    assert page.texts("#tensor tbody tr") == [
        f"[{2 * i}:{2 * i + 2}, 0:6]\t48 B\trank {i}" for i in range(4)
    ]
    page.click(tensor(page, "layers.{0-2}.w"))
    assert page.text("#shown") == "layers.0.w"
    assert page.texts("#stages .cell") == [
        *("0\n[0:4, :]", "1\n[0:4, :]\nreplica of 0"),
        *("2\n[4:8, :]", "3\n[4:8, :]\nreplica of 2"),
    ]
    colours = [
        page.evaluate(f"getComputedStyle(document.querySelector('{cell(r)}')).backgroundColor")
        for r in range(4)
    ]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    hatched = page.evaluate(
        "[...document.querySelectorAll('#stages .cell')]"
        ".map((one) => getComputedStyle(one).backgroundImage !== 'none')"
    )
    assert hatched == [False, True, False, True]
    assert page.texts("#tensor .map .piece") == ["[0:4, :]\nranks 0, 1", "[4:8, :]\nranks 2, 3"]


@pytest.mark.browser
def test_a_click_on_a_rank_shows_what_it_holds(page, tmp_path):
    show(page, tmp_path, strategy_of(LAYERS), SHAPES)
    assert page.evaluate("document.querySelector('#rank').hidden")
    page.click(cell(3))
    assert page.text("#rank h2") == "Rank 3 stage 0"
    assert "(1, 1) in the device matrix (2, 2)" in page.text("#rank dl")
    assert page.texts("#rank tbody tr") == [
        "layers.{0-2}.w\t[4:8, :]\t8 x 6\t288 B\t2",
        "norm\tfull\t8 x 6\t192 B\t0-2",
        "s\t[6:8, :]\t8 x 6\t48 B\t-",
    ]
    page.click("#rank tbody .link")
    assert page.text("#shown") == "layers.0.w"
    page.click("#rank .close")
    assert page.evaluate("document.querySelector('#rank').hidden")


@pytest.mark.browser
def test_a_search_finds_names_within_folded_rows(page, tmp_path):
    show(page, tmp_path, strategy_of(LAYERS), SHAPES)
    assert page.texts("#list .name") == ["layers.{0-2}.w", "norm", "s"]
    page.click("#search")
    page.write("ayers.1")
    assert page.texts("#list .name") == ["layers.{0-2}.w", "layers.1.w"]
    assert page.text("#count") == "1 of 5 tensors"
    page.click(tensor(page, "layers.1.w"))
    assert page.text("#shown") == "layers.1.w"
    page.click("#search")
    page.write("nothing of this name")
    assert page.texts("#list .name") == []
    assert page.text("#count") == "0 of 5 tensors"


@pytest.mark.browser
def test_a_folded_row_is_unfolded_and_folded_by_a_click(page, tmp_path):
    show(page, tmp_path, strategy_of(LAYERS), SHAPES)
    page.click("#list .fold")
    names = [f"layers.{number}.w" for number in range(3)]
    assert page.texts("#list .name") == ["layers.{0-2}.w", *names, "norm", "s"]
    page.click(tensor(page, "layers.2.w"))
    assert page.text("#shown") == "layers.2.w"
    page.click("#list .fold")
    assert page.texts("#list .name") == ["layers.{0-2}.w", "norm", "s"]


@pytest.mark.browser
def test_the_keyboard_is_enough(page, tmp_path):
    show(page, tmp_path, strategy_of(LAYERS), SHAPES)
    page.press("/", 191)
    assert page.evaluate("document.activeElement.id") == "search"
    page.evaluate(f"document.querySelector('{cell(0)}').focus()")
    for key, code in (("ArrowRight", 39), ("ArrowDown", 40)):
        page.press(key, code)
    assert page.evaluate("document.activeElement.dataset.rank") == "3"
    page.evaluate("document.activeElement.click()")
    assert page.text("#rank h2").startswith("Rank 3")
    assert page.evaluate("document.activeElement.dataset.rank") == "3", "the focus stays"
    page.press("Escape", 27)
    assert page.evaluate("document.querySelector('#rank').hidden")
    assert page.text("#shown") == ""
    unreachable = page.evaluate(
        "[...document.querySelectorAll('.cell, .pick, .fold')].filter((one) => one.tabIndex < 0)"
    )
    assert not unreachable
    label = page.evaluate(f"document.querySelector('{cell(2)}').ariaLabel")
    assert label.startswith("rank 2, ")


@pytest.mark.browser
def test_dark_and_light_are_as_the_system_has_them(page, tmp_path):
    show(page, tmp_path, strategy_of(LAYERS), SHAPES)
    colour = "getComputedStyle(document.body).{}.match(/\\d+/g).map(Number)"
    for scheme, is_dark in (("light", False), ("dark", True)):
        page.prefer(scheme)
        back, text = (page.evaluate(colour.format(one)) for one in ("backgroundColor", "color"))
        assert (sum(back) < sum(text)) is is_dark


@pytest.mark.browser
def test_names_are_shown_and_not_run(page, tmp_path):
    strategy = strategy_of({EVIL: ROWS, "<b>bold</b>": WHOLE})
    show(page, tmp_path, strategy, {EVIL: (8, 6), "<b>bold</b>": (4,) * 2})
    assert page.texts("#list .name") == [EVIL, "<b>bold</b>"]
    page.click(cell(1))
    assert page.texts("#rank tbody .link") == [EVIL, "<b>bold</b>"]
    assert page.text("#tensor h2") == EVIL
    assert page.evaluate("document.title") == "run - layout"
    assert page.evaluate("document.querySelectorAll('img, b b, i').length") == 0


@pytest.mark.browser
def test_a_name_of_javascript_is_a_name_like_others(page, tmp_path):
    names = ("constructor", "__proto__", "toString")
    show(page, tmp_path, strategy_of(dict.fromkeys(names, ROWS)), dict.fromkeys(names, (8, 6)))
    for name in names:
        page.click(tensor(page, name))
        assert page.text("#tensor h2") == name


@pytest.mark.browser
@pytest.mark.parametrize("with_strategy", [True, False])
def test_every_golden_checkpoint_is_drawn_and_every_row_and_rank_opens(
    page, tmp_path, with_strategy
):
    path, drawn = tmp_path / "layout.html", 0
    for case in case_names():
        strategy = GOLDEN / case / "src_strategy.ckpt"
        if with_strategy and not strategy.exists():
            continue
        words = ("-s", strategy) if with_strategy else ()
        run("inspect", GOLDEN / case / "src", *words, "-q", "--plot", path, "--overwrite")
        if not path.exists():
            continue
        page.open(path)
        page.evaluate("document.querySelectorAll('.fold').forEach((one) => one.click())")
        for kind in (".pick", ".cell"):
            number = page.evaluate(f"document.querySelectorAll('{kind}').length")
            assert number, case
            each = f"document.querySelectorAll('{kind}')[i].click()"
            page.evaluate(f"for (let i = 0; i < {min(number, 10)}; i++) {each}")
        assert not page.named("Runtime.exceptionThrown"), case
        assert "undefined" not in page.text("body"), case
        assert "NaN" not in page.text("body"), case
        path.unlink()
        drawn += 1
    assert drawn > 40


@pytest.mark.browser
def test_what_is_missing_is_shown_as_missing(page, tmp_path):
    show(page, tmp_path, strategy_of(LAYERS), SHAPES, lost=(1,))
    page.click(tensor(page, "norm"))
    assert page.texts("#stages .cell")[1] == "1\nfull\nno file; rank 0 has it"
    page.click(tensor(page, "s"))
    assert page.texts("#stages .cell")[1] == "1\n[2:4, :]\nlost: no file"
    assert page.texts("#tensor tbody tr")[1].split("\t")[2:] == ["nobody", "1"]
    page.click(cell(1))
    assert "This rank has no file. It should hold:" in page.text("#rank")
    assert [row.split("\t")[-1] for row in page.texts("#rank tbody tr")] == [
        *("nobody has it", "no file; rank 0 has it", "no file; rank 0 has it")
    ]


@pytest.mark.browser
def test_a_lost_slice_says_who_has_the_others_and_who_should(page, tmp_path):
    for rank in (0, 4):
        copytree(CASE / "src" / f"rank_{rank}", tmp_path / "src" / f"rank_{rank}")
    path = tmp_path / "layout.html"
    assert run("inspect", tmp_path / "src", *SOURCE[1:], "--plot", path).exit_code == 5
    page.open(path)
    page.click(tensor(page, "lm_head.weight"))
    assert page.texts("#tensor .map .piece") == [
        "[0:16, :]\nranks 0, 4; missing on ranks 2, 6",
        "[16:32, :]\nnobody; missing on ranks 1, 3, 5, 7",
    ]
    first, second, *_ = page.text("#tensor p.wrong").split("\n")
    assert first == "lm_head.weight: some slices are on no rank"
    assert second.startswith("ranks 1-7/2: no checkpoint file")


@pytest.mark.browser
def test_a_single_rank_is_never_left_out(page, tmp_path):
    sharded = Layout((4, 2), ((0,), ()))
    show(page, tmp_path, strategy_of({"w": sharded}), {"w": (4, 2)})
    assert [text.split("\n")[1] for text in page.texts("#tensor .map .piece")] == [
        *("ranks 0, 2, 4, 6", "ranks 1, 3, 5, 7")
    ]
    sharded = Layout((5, 2), ((0,), ()))
    show(page, tmp_path, strategy_of({"w": sharded}), {"w": (4, 2)}, lost=(4,))
    first, _ = (text.split("\n")[1] for text in page.texts("#tensor .map .piece"))
    assert first == "ranks 0, 2, 6, 8; missing on rank 4"


@pytest.mark.browser
def test_thousands_of_ranks_become_blocks_in_which_each_rank_is_found(page, tmp_path):
    matrix = (1024, 4)
    layouts = {"w": Layout(matrix, ((0,),)), "each": Layout(matrix, ((0,),), 1024)}
    show(page, tmp_path, strategy_of(layouts), dict.fromkeys(layouts, (8192,)))
    page.click(tensor(page, "w"))
    blocks = page.texts("#stages .block")
    assert len(blocks) == 4
    assert blocks[1] == "1, 5, ... 4093\n[2048:4096]\n1,024 ranks, replicas"
    page.click('[data-block="1"]')
    page.click('[data-block="1"]')
    assert page.text(cell(1)) == "1\n[2048:4096]"
    assert page.text(cell(5)) == "5\n[2048:4096]\nreplica of 1"
    page.click(cell(5))
    assert page.text("#rank h2") == "Rank 5 stage 0"
    page.click(tensor(page, "each"))
    assert len(page.texts("#stages .block")) == 64
    assert page.texts("#stages .block")[0].endswith("64 slices\n64 ranks")


@pytest.mark.browser
@pytest.mark.parametrize(
    ("matrix", "shown"),
    [
        ((4, 2), "ranks 0, 2, 4, 6"),
        ((5, 2), "ranks 0, 2, ... 8"),
        ((4, 2, 2), "ranks 0, 1, 4 and 5 more"),
    ],
)
def test_what_a_text_leaves_out_is_more_than_one_rank(page, tmp_path, matrix, shown):
    layout = Layout(matrix, ((len(matrix) - 2,), ()))
    show(page, tmp_path, strategy_of({"w": layout}), {"w": (8, 6)})
    page.click(tensor(page, "w"))
    assert page.texts("#tensor .map .piece")[0].split("\n")[1] == shown


@pytest.mark.browser
def test_stages_have_grids_of_their_own(page, tmp_path):
    stages = ({"a": ROWS}, {"b": Layout((2, 2), ((1,), ()), first_rank=4)})
    show(page, tmp_path, strategy_of(*stages), {"a": (4, 2), "b": (4, 2)})
    assert page.texts("#stages h3") == [
        *("Stage 0 ranks 0-3, device matrix (2, 2)", "Stage 1 ranks 4-7: none of it"),
    ]
    page.click(tensor(page, "b"))
    assert page.text(cell(7)) == "7\n[2:4, :]\nreplica of 6"


@pytest.mark.browser
def test_the_page_of_the_command_is_the_page_that_was_tested(page, tmp_path):
    path = tmp_path / "layout.html"
    run_well("inspect", *SOURCE, "--plot", path, "-q")
    page.open(path)
    assert page.text("h1") == str(CASE / "src")
    assert "step 2_10" in page.text("#facts")
    page.click(tensor(page, "lm_head.weight"))
    assert page.texts("#stages .cell")[3] == "3\n[16:32, :]\nreplica of 1"
