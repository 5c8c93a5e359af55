"""The Chinese pages say what the English ones do: a page that one side lacks a part of is named.

A page in ``docs/zh/`` has the path of its English twin in ``docs/``; that of README.md is
``docs/zh/README.md``.  Text is free.  The same are: headings and their levels, blocks of code,
paragraphs, items, tables, links, images, names in code spans and numbers of every section.
``SNAPSHOT_UPDATE=1`` copies changed blocks of code; the rest is for a translator.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.pages import CHINESE, DOCS, FENCE, ROOT, anchor_of, blocks_of, name_of
from tests.support.snapshots import UPDATE

pytestmark = pytest.mark.source
TRANSLATED = sorted(CHINESE.rglob("*.md"))
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")
TO_THE_TWIN = ("中文", "English")  # the texts of links from one language to the other
SEVERITY = {"级别：": "Severity: ", "；": "; ", "：": ": ", "、": ", ", "不报告": "not reported"}
WANTED = {
    *("README.md", "docs/tutorial.md", "docs/reference/messages.md"),
    *(
        f"docs/guides/{name}.md"
        for name in (
            *("merging", "resharding", "verifying", "finding-files", "origins"),
            *("coming-from-mindspore", "mindformers", "start-stage-2", "hand-written-strategies"),
            *("sharding", "audit"),
        )
    ),
}


class Section(NamedTuple):
    """A heading, and what is below it up to the next one."""

    level: int
    title: str
    text: str  # without blocks of code


def english_of(page: Path) -> Path:
    relative = page.relative_to(CHINESE)
    return ROOT / relative if relative == Path("README.md") else DOCS / relative


def chinese_of(page: Path) -> Path:
    return next((one for one in TRANSLATED if english_of(one) == page), page)


def sections_of(page: Path) -> list[Section]:
    text = FENCE.sub("@code\n", page.read_text(encoding="utf-8"))
    parts = re.split(r"^(#+) (.*)$", text, flags=re.MULTILINE)[1:]
    return [Section(len(parts[i]), parts[i + 1], parts[i + 2]) for i in range(0, len(parts), 3)]


def parts_of(section: Section) -> list[str]:
    """What a section is made of, in order: paragraphs, lists and tables with their sizes, code."""
    found = []
    for part in re.split(r"\n\s*\n", section.text.strip()):
        items = len(re.findall(r"^(?:- |\d+\. )", part, re.MULTILINE))
        cells = [line.replace(r"\|", "").count("|") for line in part.splitlines()]
        kind = "code" if part == "@code" else "picture" if part.startswith("![") else "paragraph"
        kind = f"table of {len(cells)} lines, {max(cells)} bars" if part.startswith("|") else kind
        found.append(f"{items} items" if items else kind)
    joined = []  # a list may have blank lines between its items
    for one in found:
        if joined and one.endswith("items") and joined[-1].endswith("items"):
            one = f"{int(one.split()[0]) + int(joined.pop().split()[0])} items"
        joined.append(one)
    return joined


def target_of(link: str, page: Path) -> tuple[str, int] | None:
    if "://" in link:
        return link, 0
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    anchors = [anchor_of(one.title) for one in sections_of(target)] if anchor else []
    english = english_of(target) if CHINESE in target.parents else target
    return name_of(english), 1 + anchors.index(anchor) if anchor else 0


def links_of(section: Section, page: Path) -> list[tuple[str, int]]:
    found = [match[3] for match in LINK.finditer(section.text) if match[2] not in TO_THE_TWIN]
    return sorted(target_of(link, page) for link in found)


def spans_of(section: Section) -> set[str]:
    return {" ".join(one.split()) for one in re.findall(r"`([^`]+)`", section.text + section.title)}


def numbers_of(section: Section) -> set[str]:
    text = LINK.sub(r"\2", re.sub(r"`[^`]+`", "", section.text))
    return set(re.findall(r"(?<![\w.])\d[\d.,]*\d|(?<![\w.,])\d(?![\d.,]*\d)", text))


def drift_of(chinese: Path, english: Path) -> list[str]:
    """What a translator has to look at, in words."""
    here, there = sections_of(chinese), sections_of(english)
    if [one.level for one in here] != [one.level for one in there]:
        return [f"headings differ from here on: {first_unlike(here, there)}"]
    found = []
    if [*blocks_of(chinese)] != [*blocks_of(english)]:
        found.append(f"blocks of code differ: {UPDATE}=1 copies them, if there are as many")
    for ours, theirs in zip(here, there, strict=True):
        place = f"'{ours.title}' ('{theirs.title}')"
        outside = {one for one, _ in links_of(theirs, english) if is_outside(one, chinese)}
        for what, one, other in (
            ("parts", parts_of(ours), parts_of(theirs)),
            (
                "links",
                links_of(ours, chinese),
                [link for link in links_of(theirs, english) if link[0] not in outside],
            ),
            ("code spans", spans_of(ours), spans_of(theirs) | outside),
            ("numbers", numbers_of(ours), numbers_of(ours) | numbers_of(theirs)),
            ("severities", [severity_of(ours)], [severity_of(theirs)]),
        ):
            if one != other:
                lacks, more = Counter(other) - Counter(one), Counter(one) - Counter(other)
                found.append(f"{place}: {what}: lacks {[*lacks]}, has {[*more]} instead")
    return found


def first_unlike(here: list[Section], there: list[Section]) -> str:
    for ours, theirs in zip_longest(here, there):
        titles = {one.title for one in (ours, theirs) if one and one.title.startswith("`")}
        if ours is None or theirs is None or ours.level != theirs.level or len(titles) == 2:
            return f"{ours and ours.title!r}, in English {theirs and theirs.title!r}"
    return ""


def copy_blocks(chinese: Path, english: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (chinese, english)]
    here, there = ([match[0] for match in FENCE.finditer(page)] for page in pages)
    if len(here) == len(there):
        blocks = iter(there)
        chinese.write_text(FENCE.sub(lambda _: next(blocks), pages[0]), encoding="utf-8")


def is_outside(name: str, chinese: Path) -> bool:
    return "://" not in name and not name.startswith("docs/") and DOCS in chinese.parents


def severity_of(section: Section) -> str:
    text = " ".join(section.text.split())
    for chinese, english in SEVERITY.items():
        text = text.replace(chinese, english) if "级别：" in section.text else text
    found = re.search(r"Severity: ([a-z,:; ]+?)(?=[.。]| \*\*)", text)
    return found[1] if found else ""


def test_the_pages_that_people_begin_with_are_translated():
    assert {name_of(english_of(page)) for page in TRANSLATED} >= WANTED


@pytest.mark.parametrize("chinese", TRANSLATED, ids=name_of)
def test_a_page_has_what_its_english_twin_has(chinese):
    if os.environ.get(UPDATE):
        copy_blocks(chinese, english_of(chinese))
    drift = drift_of(chinese, english_of(chinese))
    assert not drift, f"translate in {name_of(chinese)}:\n" + "\n".join(drift)


@pytest.mark.parametrize("folder", [DOCS, CHINESE])
def test_the_severity_of_every_message_is_read(folder):
    page = folder / "reference" / "messages.md"
    messages = [one for one in sections_of(page) if one.level == 3]
    assert len(messages) > 80
    assert [one.title for one in messages if not severity_of(one)] == []


@pytest.mark.parametrize("chinese", TRANSLATED, ids=name_of)
def test_a_page_is_chinese(chinese):
    for section in sections_of(chinese):
        for part in re.split(r"\n\s*\n", section.text.strip()):
            words = re.sub(r"`[^`]+`|\(.*?\)|[^A-Za-z\u4e00-\u9fff]+", " ", LINK.sub(r"\2", part))
            is_short = len(words.split()) < 6
            assert is_short or part == "@code" or re.search("[\u4e00-\u9fff]", words), part


def test_each_readme_links_to_the_other_in_its_first_lines():
    for page, other in ((ROOT / "README.md", "中文"), (CHINESE / "README.md", "English")):
        head = "\n".join(page.read_text(encoding="utf-8").splitlines()[:5])
        assert f"[{other}](" in head


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("## Load it", "## One more\n\nText.\n\n## Load it", "headings"),
        ("## Load it", "### Load it", "headings"),
        ("--deep\nOK", "--deeper\nOK", "blocks of code"),
        ("`--deep` reads all", "`--deep` or `--crc` reads all", "lacks ['--crc']"),
        ("holds each parameter", "holds each 99 parameter", "lacks ['99']"),
        ("(guides/slurm.md)", "(guides/dask.md)", "links"),
        ("(guides/finding-files.md)", "(guides/finding-files.md#steps)", "links"),
        ("- You trained", "- New.\n- You trained", "parts"),
        ("(pictures/inspect.svg)", "(pictures/layout.png)", "links"),
        ("No merged file is made on the way.", "\nNo merged file is made.", "parts"),
    ],
)
def test_a_change_of_an_english_page_is_named(old, new, named, monkeypatch):
    chinese = CHINESE / "tutorial.md"
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    assert text.count(old) == 1
    changed = DOCS / "changed.md"
    read = Path.read_text

    def read_changed(path, **words):
        return text.replace(old, new) if path == changed else read(path, **words)

    monkeypatch.setattr(Path, "read_text", read_changed)
    assert named in " ".join(drift_of(chinese, changed))
