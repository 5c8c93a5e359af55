"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
CHINESE = DOCS / "zh"  # tests/e2e/test_chinese.py holds its pages to the English ones
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A block of code."""

    language: str
    title: str  # the name of a file that holds it, or ""
    text: str


def name_of(page: Path) -> str:
    """Return the path of a page below the repository, which is its name in tests."""
    return page.relative_to(ROOT).as_posix()


def prose_of(page: Path) -> str:
    """Return the text of a page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        yield Block(match[1], match[2] or "", match[3])


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading, as GitHub and `mkdocs.yml` make it."""
    return re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")


def python_block(page: Path, *words: str) -> str:
    """Return the one Python block of a page that has all these words in it."""
    blocks = [block.text for block in blocks_of(page) if block.language == "python"]
    (text,) = (text for text in blocks if all(word in text for word in words))
    return text


def needs_mindspore(block: Block) -> bool:
    """Return whether a Python block runs with MindSpore only; `tests/e2e/interop` runs these."""
    code = re.sub(r"^#.*$", "", block.text, flags=re.MULTILINE)
    return block.language == "python" and re.search(r"\bms\.", code) is not None
