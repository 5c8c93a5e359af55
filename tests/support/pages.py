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
    return page.relative_to(ROOT).as_posix()


def prose_of(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def blocks_of(page: Path) -> Iterator[Block]:
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        yield Block(match[1], match[2] or "", match[3])


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")


def python_block(page: Path, *words: str) -> str:
    blocks = [block.text for block in blocks_of(page) if block.language == "python"]
    (text,) = (text for text in blocks if all(word in text for word in words))
    return text


def needs_mindspore(block: Block) -> bool:
    code = re.sub(r"^#.*$", "", block.text, flags=re.MULTILINE)
    return block.language == "python" and re.search(r"\bms\.", code) is not None
