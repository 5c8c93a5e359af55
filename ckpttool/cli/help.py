"""``ckpttool help``: the pages of the guide, without a network.

They are the Markdown files in ``docs/``, which the package contains (in the repository, by a link).
A page is a topic by the name of its file.  An entry is a part of a page whose heading has nothing
but names in code spans: the code of a message, or the names of an option.  Where the locale says
Chinese, a page in ``docs/zh/`` takes the place of the English page with the same path.
"""

from __future__ import annotations

import os
import re
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options
from ckpttool.cli.groups import walk_commands
from ckpttool.cli.params import UsageProblem
from ckpttool.cli.tables import echo, has_utf8
from ckpttool.formats.local import list_folder, list_readable, read_file
from ckpttool.lazy import compile_late
from ckpttool.wording import nearest

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.markdown import Markdown

PAGES = Path(ckpttool.__file__).parent / "docs"
EXAMPLES = PAGES.parent / "examples.tar.xz"  # the folders that the pages name
# The folder of each group of topics.  Other pages are for developers; index.md is for the web.
GROUPS = {"Start": ".", "Guides": "guides", "Concepts": "concepts", "Reference": "reference"}
INDEX = "index"
DEVELOPERS = "development"  # the folder of pages that a checkout has, and no list
CHINESE = "zh"  # the folder of translated pages, and how the name of a Chinese locale begins
CHINESE_GROUPS = {"Start": "入门", "Guides": "指南", "Concepts": "概念", "Reference": "参考"}
LEAD = (
    "`ckpttool help NAME` prints a topic, or what the code of a message (damaged), an option "
    "(--unlisted) or a command (merge) means."
)
CHINESE_LEAD = (
    "`ckpttool help NAME` 显示一个主题，或解释消息代码 (damaged)、选项 (--unlisted)、命令 (merge)。"
)
GLOSSARY = "glossary"  # the topic with the words of PyTorch, Megatron and DeepSpeed
WORDS = "words"  # the topic with the words of MindSpore and of others, in tables
MAX_WIDTH = 100  # columns; longer lines are hard to read
ROW = compile_late(
    r"^\| ([^|]+) \| (.+) \|$(?!\n\|--)", re.MULTILINE
)  # of a table with two columns
HEADING = compile_late(r"^(#+) (.*)", re.MULTILINE)
PICTURE = compile_late(r"!\[[^]]*\]\([^)]*\)\n*")
LINK = compile_late(r"\[([^]]*)\]\((?!https?:)([^#)]*)(?:#[^)]*)?\)")  # to another file or in one
# Where a line of Chinese may end: behind every letter and mark, unless a closing mark comes next.
# rich ends lines at spaces only.  BREAK is a space for Python, takes no column, and is not printed.
LINE_END = compile_late(r"(?<=[一-鿿，。；：！？、）])(?=[\w`(（])|(?<=[\w`)])(?=[一-鿿（])")
BREAK = "\x1f"


def read_topics() -> Mapping[str, str]:
    """Return the text of each page by its name, in the order of the groups and sorted in these."""
    return {name: page for group in GROUPS for name, page in read_group(group).items()}


def read_group(group: str) -> Mapping[str, str]:
    """Return the text of each page of a group by its name, sorted."""
    pages = list_folder(PAGES / GROUPS[group])
    pages += _translated(GROUPS[group]) if is_chinese() else []
    paths = {path.stem.lower(): path for path in pages}
    names = sorted(name for name, path in paths.items() if path.suffix == ".md" and name != INDEX)
    return {name: read_file(paths[name]).decode("utf-8") for name in names}


def is_chinese() -> bool:
    """Return whether the locale of messages is a Chinese one, whose letters stdout takes."""
    names = (os.environ.get(name) for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    if not next(filter(None, names), "").startswith(CHINESE):
        return False
    try:
        "中".encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def find_entries(page: str) -> Iterator[tuple[Sequence[str], str]]:
    r"""Yield the names and the text of each entry of a page.

    Examples
    --------
    >>> page = "# Page\n\n### `code`\n\nText.\n\n### `-o`, `--output`\n\nMore.\n\n## End\n"
    >>> [(names, text[-6:]) for names, text in find_entries(page)]
    [(['code'], 'Text.\n'), (['-o', '--output'], 'More.\n')]
    """
    headings = list(HEADING.finditer(page))
    ends = [*(heading.start() for heading in headings[1:]), len(page)]
    for heading, end in zip(headings, ends, strict=True):
        if re.fullmatch(r"`[\w-]+`(, `[\w-]+`)*", heading[2]):
            yield re.findall(r"[\w-]+", heading[2]), page[heading.start() : end].rstrip() + "\n"


def find_word(word: str) -> tuple[str, str] | None:
    """Return the words of a row on the page `WORDS` that has a word, and what it says of them."""
    for words, meaning in ROW.findall(read_topics()[WORDS]):
        if word.lower() in words.replace("`", "").lower().split(", "):
            return words, meaning
    return None


def name_here(word: str) -> str:
    """Return what the page `WORDS` says of a word, as it is typed if that is one option; or ""."""
    _, meaning = find_word(word) or ("", "")
    return meaning.strip("`") if meaning.startswith("`-") and " " not in meaning else meaning


def is_in_glossary(words: str) -> bool:
    """Return whether the page `GLOSSARY` has words: ``device_mesh`` as ``DeviceMesh`` there."""
    spelled = "[ _-]?".join(map(re.escape, re.split("[ _-]", words)))
    return re.search(rf"\b{spelled}s?\b", read_topics()[GLOSSARY], re.IGNORECASE) is not None


def find_row(name: str) -> str:
    """Return the first page with a row of a table about a name, such as one of MindSpore; or ""."""
    row = re.compile(rf"^\| [^|]*`{re.escape(name)}\b[^|]* \|", re.MULTILINE)
    return next((topic for topic, page in read_topics().items() if row.search(page)), "")


def find_titles(title: str) -> list[str]:
    """Return the topics with a title, in English or Chinese; else those that have it in theirs.

    Only Chinese titles are compared in part, as they are written without spaces.
    """
    chinese, topics = _chinese_titles(), read_topics()
    titles = {n: (title_of(page).lower(), chinese.get(n, "")) for n, page in topics.items()}
    same = [name for name, both in titles.items() if title in both]
    return same or [n for n, (_, full) in titles.items() if title in full and not title.isascii()]


def _chinese_titles() -> Mapping[str, str]:
    pages = [path for folder in GROUPS.values() for path in _translated(folder)]
    return {path.stem.lower(): title_of(read_file(path).decode("utf-8")) for path in pages}


def _translated(folder: str) -> list[Path]:
    return [path for path in list_readable(PAGES / CHINESE / folder) if path.suffix == ".md"]


def title_of(page: str) -> str:
    """Return the first heading of a page."""
    heading = HEADING.search(page)
    return "" if heading is None else heading[2]


def print_markdown(markdown: str) -> None:
    """Print a page: laid out on a terminal, as it is in a pipe or in a locale without UTF-8."""
    if not sys.stdout.isatty() or not has_utf8(sys.stdout):
        echo(markdown.rstrip("\n"))
        return
    from shutil import get_terminal_size

    from rich.console import Console
    from rich.theme import Theme

    size = get_terminal_size()
    plain = Theme({"markdown.code": "bold", "markdown.code_block": "bold"})  # no background
    console = Console(width=min(size.columns, MAX_WIDTH), height=size.lines, theme=plain)
    markdown = LINE_END.sub(BREAK, LINK.sub(_name_topic, PICTURE.sub("", markdown)))
    with console.capture() as printed:
        console.print(_lay_out(markdown))
    os.environ.setdefault("LESS", "-FRX")  # as git: none for a page that fits on the screen
    click.echo_via_pager(printed.get().replace(BREAK, ""))


def _lay_out(page: str) -> Markdown:
    """Return a page whose tables fold what is too wide for a cell, where rich would omit a letter.

    rich takes the space off the end of a line by the number of letters, not of columns.
    """
    from rich import markdown
    from rich.syntax import Syntax
    from rich.table import Table

    class Block(markdown.CodeBlock):
        """Code without a margin, since a screen is as wide as the terminal."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            code = str(self.text).rstrip()
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, padding=(1, 0))

    class Page(markdown.Markdown):
        elements = {**markdown.Markdown.elements, "fence": Block, "code_block": Block}  # noqa: RUF012

    if hasattr(markdown, "TableElement"):  # older versions leave tables as they are

        class FoldedTable(markdown.TableElement):
            def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
                for table in super().__rich_console__(console, options):
                    for column in table.columns if isinstance(table, Table) else ():
                        column.overflow = "fold"
                    yield table

        Page.elements = {**Page.elements, "table_open": FoldedTable}
    return Page(page, code_theme="ansi_dark", hyperlinks=False)


def _name_topic(link: re.Match[str]) -> str:
    label, path = link[1], Path(link[2])
    is_topic = path.suffix == ".md" and path.stem != INDEX
    return f"{label} (`ckpttool help {path.stem}`)" if is_topic else label


def names_of(group: click.Context) -> list[str]:
    """Return every name that has a page, an entry or a command, sorted."""
    topics = read_topics()
    entries = {
        name for page in topics.values() for names, _ in find_entries(page) for name in names
    }
    return sorted({*topics, *entries, *(words for words, _ in walk_commands(group))})


def complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names that begin with what was typed."""
    assert ctx.parent is not None, "help is a command of a group"
    before = "".join(f"{word} " for word in ctx.params.get("name") or ())
    matching = (name for name in names_of(ctx.parent) if name.startswith(before + incomplete))
    return [rest for name in matching if " " not in (rest := name.removeprefix(before))]


@click.command(
    cls=options.GroupedCommand,
    context_settings={"ignore_unknown_options": True},  # `ckpttool help --unlisted`
    help="""\b
    ckpttool help damaged

    Print what NAME means: a topic of the guide, the code of a message (damaged), an option
    (--unlisted) or a command.  Without NAME, list the topics.  Needs no network.
    Pages that are translated are Chinese where LC_ALL, LC_MESSAGES or LANG says zh.
    """,
)
@click.argument("name", nargs=-1, metavar="[NAME]", shell_complete=complete_name)
@options.option(
    "Write the folders that the pages name into DIR, which is new or empty.",
    "--examples",
    type=click.Path(path_type=Path),
    metavar="DIR",
)("examples", options.OUTPUT)
def help(name: tuple[str, ...], examples: Path | None) -> None:
    """Print a page of the guide, an entry of one, or the help of a command."""
    group = click.get_current_context().parent
    assert group is not None, "help is a command of a group"
    words = " ".join(name)  # those of a command may be several: strategy show
    if examples is not None:
        write_examples(examples)
    elif not words:
        print_topics()
    elif (row := find_word(words)) is not None:
        print_word(*row)
    elif not print_all_about(words.lower(), group):
        near = GLOSSARY if is_in_glossary(words) else nearest(words.lower(), names_of(group))
        near = near or find_row(words)
        near = near or next(iter(find_titles(words)), "")
        raise UsageProblem(f"no page about {words!r}", f"ckpttool help {near}".rstrip())


def write_examples(folder: Path) -> None:
    """Write the folders that the pages name."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = f"{folder} is there already, and is not an empty folder"
        raise UsageProblem(message, "--examples NEW")
    with tarfile.open(EXAMPLES) as archive:
        for member in archive:
            content = archive.extractfile(member)
            assert content is not None, "the archive has files only"
            path = folder / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
    echo(f"Wrote {', '.join(sorted(path.name for path in folder.iterdir()))}")


def print_word(words: str, meaning: str) -> None:
    """Print what words of others are here, and the first page that is named."""
    page = re.search(r"\]\([^)]*?([\w-]+)[.]md\)", meaning)
    texts = [
        f"{words}: {LINK.sub(_name_topic, meaning)}\n",
        *([read_topics()[page[1]]] if page else ()),
    ]
    print_markdown("\n".join(texts))


def print_topics() -> None:
    """Print the name and the title of each page, in groups."""
    formatter = click.get_current_context().make_formatter()
    formatter.write_text(CHINESE_LEAD if is_chinese() else LEAD)
    for group in GROUPS:
        with formatter.section(CHINESE_GROUPS[group] if is_chinese() else group):
            formatter.write_dl([(name, title_of(page)) for name, page in read_group(group).items()])
    echo(formatter.getvalue().rstrip("\n"))


def print_all_about(name: str, group: click.Context) -> bool:
    """Print the help of a command, entries and the page of this name; return whether any exist."""
    topics = read_topics()
    entries = [entry for page in topics.values() for entry in find_entries(page)]
    texts = [
        entry for names, entry in entries if name in (*names, *(word.lstrip("-") for word in names))
    ]
    texts += [topics[name]] if name in topics else []
    command = dict(walk_commands(group)).get(name)
    if command is not None:
        with command:
            echo(f"{command.get_help()}\n")
    if command is None and not texts:
        titles = find_titles(name)
        texts += [topics[titles[0]]] if len(titles) == 1 else []
        of_developers = {path.stem: path for path in list_readable(PAGES / DEVELOPERS)}
        texts += [read_file(of_developers[name]).decode("utf-8")] if name in of_developers else []
    if texts:
        print_markdown("\n".join(texts))
    return command is not None or bool(texts)
