"""The page of ``inspect --plot``: how the command writes it, and what a browser shows of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from shutil import copytree

import pytest
from msgspec.structs import replace

from ckpttool.model.strategy import Strategy
from ckpttool.operations import plot
from tests.support.browser import PROGRAMS, Page, find_program, open_browser
from tests.support.checkpoints import (
    ROWS,
    noise,
    slice_catalog,
    strategy_of,
    write_ranks,
)
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN, case_names
from tests.support.described import layout_of
from tests.support.in_memory import checkpoint_in_memory
from tests.support.pictures import inspection_of, read_page
from tests.support.programs import need
from tests.support.transcripts import check_case, read_cases

CASE = GOLDEN / "reshard_8_to_4"
SOURCE = (CASE / "src", "-s", CASE / "src_strategy.ckpt")
CASES = Path(__file__).with_name("plot.txt")
EVIL = "</script><img src=x onerror=\"document.title='evil'\">"


# ----------------------------------------------------------------------------------- the command


def test_the_command_writes_one_page_and_says_so(tmp_path):
    path = tmp_path / "new" / "layout.html"
    screen = run_well("inspect", *SOURCE, "--plot", path).stdout
    assert re.search(rf"\nWrote {path} \(\d+\.\d KiB\), which a browser opens without", screen)
    assert [*path.parent.iterdir()] == [path]
    labels = dict(read_page(path.read_text())["facts"])
    assert labels["contents"][0].startswith("8 ranks, step 2_10, ckpt, 189.8 KiB")


def test_the_document_is_the_same_with_a_page(tmp_path):
    path = tmp_path / "layout.html"
    with_page = run_well("inspect", *SOURCE, "--json", "--plot", path).stdout
    assert with_page == run_well("inspect", *SOURCE, "--json").stdout
    assert path.exists()
    refused = json.loads(run("inspect", *SOURCE, "--json", "--plot", path).stdout)
    assert [problem["code"] for problem in refused["problems"]] == ["destination"]
    assert refused["summary"]["complete"]


def test_a_full_disk_leaves_no_half_page(tmp_path, monkeypatch):
    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ckpttool.storage.files.os.fsync", fail)
    failed = run("inspect", *SOURCE, "-q", "--plot", tmp_path / "layout.html")
    assert failed.exit_code == 6
    assert "not written: No space left on device" in message(failed)
    assert not [*tmp_path.iterdir()]


def test_lost_slices_are_drawn_and_the_exit_code_is_that_of_inspect(tmp_path):
    ranks = {rank: {"w": noise("w", "Float32", (2, 2))} for rank in (0, 1)}
    folder = write_ranks(tmp_path / "src", ranks, "ckpt")
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
    if find_program() is None:
        need(PROGRAMS[0])
    with open_browser(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture
def page(browser):
    browser.prefer("light")
    browser.resize(1400, 1000)
    yield browser
    wrong = browser.named("Runtime.exceptionThrown") + browser.named("Log.entryAdded")
    assert not wrong, "errors of the script, or what its policy refuses"
    requests = {event["request"]["url"] for event in browser.named("Network.requestWillBeSent")}
    assert all(url.startswith("file:") and url.endswith(".html") for url in requests), requests


def show(page: Page, folder: Path, strategy, shapes, lost=()) -> None:
    catalog = slice_catalog(strategy, shapes)
    for rank in lost:
        del catalog.files[rank]
    inspection = inspection_of(checkpoint_in_memory(type(catalog)("run", catalog.files), strategy))
    path = folder / "layout.html"
    path.write_text(plot.draw(inspection, {"contents": ["made up"]}), encoding="utf-8")
    page.open(path)


def cell(rank: int) -> str:
    return f'[data-rank="{rank}"]'


def tensor(page: Page, name: str) -> str:
    names = page.texts("#list .pick .name")
    numbers = page.evaluate(
        "[...document.querySelectorAll('#list .pick')].map((one) => one.dataset.tensor)"
    )
    return f'#list [data-tensor="{numbers[names.index(name)]}"]'


def read_shown(words: list[str]) -> tuple[Strategy, dict[str, tuple[int, ...]]]:
    """Read layouts, stage by stage: ``NAME(SHAPE)=LAYOUT ... / ...``."""
    stages, shapes = [{}], {}
    for word in words:
        if word == "/":
            stages.append({})
            continue
        name, shape, layout = re.fullmatch(r"(\S+)\(([\d,]+)\)=(\S+)", word).groups()
        ranks = sum(of[0].ranks.stop for of in map(list, map(dict.values, stages[:-1])))
        stages[-1][name] = replace(layout_of(layout), first_rank=ranks)
        shapes[name] = tuple(map(int, shape.split(",")))
    return strategy_of(*stages), shapes


def act_on(page: Page, folder: Path, line: str) -> Iterator[str]:
    """Do what a line of ``plot.txt`` says."""
    verb, _, rest = line.partition(" ")
    kind, _, name = rest.partition(" ")
    selector = {"tensor": lambda: tensor(page, name), "rank": lambda: cell(int(name))}
    if verb == "show":
        words = [word for word in rest.split() if not word.startswith("lost=")]
        lost = [int(rank) for rank in rest.partition("lost=")[2].split(",") if rank]
        show(page, folder, *read_shown(words), lost)
    elif verb == "draw":
        for rank in rest.split():
            copytree(CASE / "src" / f"rank_{rank}", folder / "src" / f"rank_{rank}")
        run("inspect", folder / "src", *SOURCE[1:], "--plot", folder / "layout.html")
        page.open(folder / "layout.html")
    elif verb == "click":
        page.click(selector.get(kind, lambda: rest)())
    elif verb == "press":
        page.press(kind, int(name))
    elif verb == "write":
        page.write(rest)
    elif verb == "eval":
        yield json.dumps(page.evaluate(rest))
    else:
        for content in page.texts(line.removeprefix("? ")):
            yield content.replace(str(folder), "HERE").replace("\n", " / ").replace("\t", " | ")


@pytest.mark.browser
@pytest.mark.parametrize("title", read_cases(CASES))
def test_what_the_page_shows_is_what_was_agreed(page, tmp_path, title):
    check_case(CASES, title, partial(act_on, page, tmp_path))


@pytest.mark.browser
def test_names_are_shown_and_not_run(page, tmp_path):
    names = [EVIL, "<b>bold</b>", "constructor", "__proto__", "toString"]
    show(page, tmp_path, strategy_of(dict.fromkeys(names, ROWS)), dict.fromkeys(names, (8, 6)))
    assert sorted(page.texts("#list .name")) == sorted(names)
    page.click(cell(1))
    assert sorted(page.texts("#rank tbody .link")) == sorted(names)
    for name in names:
        page.click(tensor(page, name))
        assert page.text("#tensor h2") == name
    assert page.evaluate("document.title") == "run - layout"
    assert page.evaluate("document.querySelectorAll('img, b b, i').length") == 0


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
