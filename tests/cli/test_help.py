"""``ckpttool help`` and ``ckpttool completion``, and the pages that they print."""

from __future__ import annotations

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter

import click
import pytest

import ckpttool
from ckpttool.cli import help as help_module
from ckpttool.cli.completion import SHELLS
from ckpttool.cli.main import COMMANDS, main
from ckpttool.cli.strategy import COMMANDS as STRATEGY_COMMANDS
from ckpttool.problems import CODES
from tests.support.commands import command_of, commands, message, run, run_well
from tests.support.pages import CHINESE, DOCS, blocks_of, name_of
from tests.support.terminals import on_terminal

PAGES = [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "development"]
CHANGELOG = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
TRANSLATED = [path for path in PAGES if CHINESE in path.parents]
TOPICS = [path for path in PAGES if path.name != "index.md" and path not in TRANSLATED]


def test_every_page_that_is_not_for_developers_is_a_topic():
    topics = help_module.read_topics()
    assert sorted(topics) == sorted(path.stem for path in TOPICS)
    listed = run_well("help").stdout
    for name, page in topics.items():
        assert re.search(
            rf"^  {name} +{re.escape(help_module.title_of(page))}$", listed, re.MULTILINE
        )
    assert max(map(len, listed.splitlines())) <= 80


def test_the_groups_of_topics_are_those_of_the_web_pages():
    text = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    nav = re.findall(r"^  - (\w+):\n((?:   .*\n?)+)", text[text.index("\nnav:") :], re.MULTILINE)
    groups = {name: sorted(re.findall(r"([\w-]+)\.md$", pages, re.M)) for name, pages in nav}
    groups["Start"].remove("index")
    del groups["Development"], groups["中文"]
    assert groups == {name: [*help_module.read_group(name)] for name in help_module.GROUPS}


@pytest.mark.parametrize("path", TOPICS, ids=lambda path: path.stem)
def test_a_topic_is_printed_as_its_page_in_a_pipe(path):
    assert path.read_text(encoding="utf-8") in run_well("help", path.stem).stdout


@pytest.mark.parametrize("code", CODES)
def test_the_entry_of_a_message_is_printed(code):
    printed = run_well("help", code).stdout
    assert f"### `{code}`\n\n**" in printed
    assert printed.count("**What to do.**") == 1


def test_every_option_has_an_entry_and_no_other():
    options = [
        one
        for of in (main, *commands().values())
        for one in of.params
        if isinstance(one, click.Option)
    ]
    flags = {flag for one in options for flag in one.opts}
    page = help_module.read_topics()["options"]
    entries = [name for names, _ in help_module.find_entries(page) for name in names]
    assert sorted(entries) == sorted(flags | {"-h", "--help"})


@pytest.mark.parametrize("name", ["-o", "--output", "output", "o"])
def test_an_option_is_found_by_every_name_with_and_without_dashes(name):
    assert "### `-o`, `--output`\n" in run_well("help", name).stdout


def test_the_strategy_that_the_entry_of_the_target_shows_is_one(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", run_well("help", "-d").stdout, re.DOTALL)
    (tmp_path / "four.yaml").write_text(text, encoding="utf-8")
    assert ckpttool.read_strategy([str(tmp_path / "four.yaml")]).ranks == range(4)


def test_a_code_and_an_option_of_one_name_are_both_printed():
    printed = run_well("help", "unlisted").stdout
    assert "### `unlisted`\n" in printed
    assert "### `--unlisted`\n" in printed


@pytest.mark.parametrize("name", [*commands(), "recipe", "strategy"])
def test_the_help_of_a_command_is_printed(name):
    words = name.split()
    assert run_well("help", *words).stdout.startswith(run_well(*words, "--help").stdout)


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_the_commands_and_options_in_the_text_of_a_page_exist(path):
    options = {name: {"-h", "--help", "--color"} for name in (*commands(), "recipe", "strategy")}
    for name, command in commands().items():
        options[name].update(*(one.opts for one in command.params))
    every = set().union(*options.values(), {"-V", "--version"})
    ours = ("ckpttool ", "-") if path.parent.name == "reference" else ("ckpttool ",)
    for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", path.read_text(encoding="utf-8")):
        words = shlex.split(span) if span.startswith(ours) else []
        known = every
        if words[:1] == ["ckpttool"] and words[1] not in ("-V", "--version", "COMMAND"):
            name = command_of(words[1:])
            assert name in options, span
            known = every if name == "help" else options[name]
        assert [one for one in words if re.match("--?[a-z]", one) and one not in known] == [], span


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("auto_trans_ckpt", "coming-from-mindspore"),
        ("iteration_00000003", "origins"),
        ("sliced_parameter", ""),
        ("a(b", ""),
    ],
)
def test_a_name_in_a_table_leads_to_the_page(name, page):
    result = run("help", name)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[1].strip() == f"Try: ckpttool help {page}".strip()


def test_on_a_terminal_a_page_is_laid_out(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "dumb")
    help_module.print_markdown("### `code`\n\n**Why.** " + "some words " * 10)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert "**" not in "".join(lines)


def test_on_a_terminal_a_link_is_a_command_and_a_picture_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    pages = "![A picture](pictures/a.svg)\n\n[Merge](../guides/merging.md#write-several-files), "
    help_module.print_markdown(
        pages + "[here](#here), [run](schema/run.json), [all](index.md), [web](https://a.b/c)"
    )
    printed = capsys.readouterr().out
    assert printed.strip() == "Merge (ckpttool help merging), here, run, all, web (https://a.b/c)"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_a_page_links_to_topics_only(path):
    links = re.findall(r"\]\(([^)#:]+)\.md(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    known = {*TOPICS, *TRANSLATED} | ({DOCS / "index.md"} if path.name == "README.md" else set())
    assert {(path.parent / f"{link}.md").resolve() for link in links} <= known


def test_without_utf8_a_terminal_gets_the_text_of_the_page(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(stream, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdout", stream)
    help_module.print_markdown("- **one**\n")
    stream.flush()
    assert stream.buffer.getvalue() == b"- **one**\n"


@pytest.mark.parametrize("words", [("--help",), ("merge", "--help")])
def test_headings_and_names_of_options_have_colours_on_a_terminal(words):
    shown, code = on_terminal(*words, raw=True)
    assert code == 0
    assert re.search("\x1b\\[1m(Commands|Source options)\x1b\\[0m:", shown)
    assert re.search("\x1b\\[36m(merge|-o, --output)", shown)
    assert "\x1b" not in run_well(*words).stdout


def test_a_page_goes_through_the_pager_of_a_terminal():
    shown, _ = on_terminal("help", "tutorial", PAGER="head -3")
    assert 1 < len(shown.splitlines()) <= 3


def test_what_the_group_names_as_a_topic_is_one():
    (topic,) = re.findall(r"such as ([\w-]+)$", run_well("--help").stdout, re.M)
    assert topic in help_module.read_topics()


@pytest.mark.parametrize(("group", "questions"), [("", COMMANDS), ("strategy", STRATEGY_COMMANDS)])
def test_a_group_shows_the_question_of_every_command(group, questions):
    printed = message(run_well(*group.split(), "--help"))
    for question in questions.values():
        assert "?" in question
        assert question.replace("  ", " ") in printed


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_version_has_a_short_option(flag):
    assert run_well(flag).stdout == run_well("--version").stdout


# ---------------------------------------------------------------------------------- Chinese


LOCALES = ("LC_ALL", "LC_MESSAGES", "LANG")
TITLE = "# 合并\n"


def test_each_translated_topic_is_listed_with_its_chinese_title(monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    listed = run_well("help").stdout
    assert "指南:" in listed
    translated = {path.stem.lower() for path in TRANSLATED}
    for path in TOPICS:
        (title,) = re.findall(rf"^  {path.stem} +(.+)$", listed, re.MULTILINE)
        assert title.isascii() == (path.stem not in translated or path.stem == "readme")


@pytest.mark.parametrize(
    ("title", "topic"),
    [
        ("校验", "verifying"),
        ("消息", "messages"),
        ("权重是谁保存的", "origins"),
        ("What no file can tell", "what-no-file-tells"),
    ],
)
def test_a_topic_is_found_by_its_title_in_both_languages(title, topic):
    assert run_well("help", *title.split()).stdout == run_well("help", topic).stdout


def test_a_title_of_several_topics_proposes_one(monkeypatch):
    assert "Try: ckpttool help " in message(run("help", "权重"))


@pytest.mark.parametrize("name", ["testing", "states"])
def test_a_page_for_developers_is_printed_but_not_listed(name):
    assert (DOCS / "development" / f"{name}.md").exists()
    assert run_well("help", name).stdout.startswith("# ")
    assert "  testing " not in run_well("help").stdout


@pytest.mark.parametrize(
    ("variables", "is_chinese"),
    [
        ({"LANG": "zh_CN.UTF-8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_TW.UTF-8"}, True),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "en_GB.UTF-8"}, False),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C.UTF-8"}, False),
        ({"LANG": "C", "LC_ALL": "zh_CN.GB18030"}, True),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, True),
        ({"LANG": "fr_FR.UTF-8"}, False),
        ({}, False),
    ],
)
def test_the_locale_of_messages_chooses_the_language(variables, is_chinese, monkeypatch):
    for name in LOCALES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert run_well("help", "merging").stdout.startswith(TITLE) == is_chinese


@pytest.mark.parametrize(
    ("encoding", "is_chinese"),
    [("utf-8", True), ("gb18030", True), ("gbk", True), ("ascii", False), ("latin-1", False)],
)
def test_a_stream_without_chinese_letters_gets_english(encoding, is_chinese, monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert help_module.read_topics()["merging"].startswith(TITLE) == is_chinese


@pytest.fixture
def chinese(monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")


@pytest.mark.parametrize("path", TRANSLATED, ids=name_of)
def test_a_chinese_page_takes_the_place_of_the_english_one(path, chinese):
    assert path.read_text(encoding="utf-8") in run_well("help", path.stem).stdout


def test_pages_without_a_translation_stay_english(chinese):
    topics = help_module.read_topics()
    assert {*topics} == {path.stem for path in TOPICS} | {"readme"}
    assert topics["casting"] == (DOCS / "guides" / "casting.md").read_text(encoding="utf-8")
    assert max(map(len, run_well("help").stdout.splitlines())) <= 80


@pytest.mark.parametrize("code", CODES)
def test_the_chinese_entry_of_a_message_is_printed(code, chinese):
    printed = run_well("help", code).stdout
    assert f"### `{code}`\n\n**" in printed
    assert printed.count("**原因：**") == printed.count("**处理方法：**") == 1


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize("path", TRANSLATED, ids=name_of)
def test_chinese_lines_fill_a_terminal_and_begin_with_no_closing_mark(path, columns):
    from rich.cells import cell_len

    code = {line for block in blocks_of(path) for line in block.text.splitlines()}
    shown, _ = on_terminal("help", path.stem, columns=columns, TERM="dumb", LC_ALL="zh_CN.UTF-8")
    lines = [line.rstrip() for line in shown.splitlines() if line.strip() not in code]
    assert max(map(cell_len, lines)) <= columns
    assert not [line for line in lines if line.lstrip(" •").startswith(tuple("，。；：！？、）"))]
    assert len([line for line in lines if cell_len(line) > columns - 4]) > 3
    assert help_module.BREAK not in shown
    text = help_module.PICTURE.sub("", path.read_text(encoding="utf-8"))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    assert Counter(re.findall("[一-鿿]", text)) <= Counter(re.findall("[一-鿿]", shown))


# ------------------------------------------------------------------------------- completion


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_is_printed(shell):
    printed = run_well("completion", shell).stdout
    assert f"_CKPTTOOL_COMPLETE={shell}_complete" in printed
    assert printed.count("ckpttool") > 2
    assert main.get_command(click.Context(main), "diff").get_short_help_str() == COMMANDS["diff"]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ckpttool mer", ["merge"]),
        ("ckpttool merge --max-", ["--max-shard-size", "--max-memory"]),
        ("ckpttool verify --ignore na", ["nan"]),
        ("ckpttool help mixed_e", ["mixed_encryption"]),
        ("ckpttool help compl", ["completion"]),
        ("ckpttool help strategy sh", ["show"]),
        ("ckpttool strategy sh", ["show"]),
        ("ckpttool strategy show --al", ["--all"]),
    ],
)
def test_bash_completes_a_word(tmp_path, line, expected):
    program = tmp_path / "ckpttool"
    program.write_text(f"#!{sys.executable}\nfrom ckpttool.__main__ import run\nrun()\n")
    program.chmod(0o755)
    (tmp_path / "script").write_text(run_well("completion", "bash").stdout)
    words = " ".join(f"'{word}'" for word in line.split())
    code = f"source ./script; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
    code += '_ckpttool_completion ckpttool; printf "%s\\n" "${COMPREPLY[@]}"'
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.split() == expected


def test_the_page_about_completion_names_every_shell():
    page = help_module.read_topics()["completion"]
    assert set(re.findall(r"ckpttool completion (\w+)", page)) == {*SHELLS}
    assert shutil.which("bash"), "the tests run bash"


WORDS = help_module.read_topics()["words"]
ROWS = [
    (word, words, text)
    for words, text in help_module.ROW.findall(WORDS)
    for word in re.findall(r"[^`, ][^`,]*", words)
]
TYPE_NOW = WORDS[WORDS.index("| word | type now |") :]


@pytest.mark.parametrize(("word", "words", "text"), ROWS, ids=[word for word, _, _ in ROWS])
def test_a_word_of_others_is_answered_with_its_row_and_its_page(word, words, text):
    topic = re.search(r"([\w-]+)[.]md", text)
    page = "\n" + help_module.read_topics()[topic[1]] if topic else ""
    meaning = re.sub(r"\[([^]]+)\]\([^)]*?([\w-]+)[.]md\)", r"\1 (`ckpttool help \2`)", text)
    assert run_well("help", *word.split()).stdout == f"{words}: {meaning}\n{page}"


def test_words_that_are_gone_stand_in_the_changelog_with_what_to_type_now():
    gone = help_module.ROW.findall(TYPE_NOW)
    assert len(gone) > 15
    for words, now in gone:
        (row,) = [text for removed, text in help_module.ROW.findall(CHANGELOG) if words in removed]
        assert row == now


def test_a_chinese_word_is_answered_in_a_chinese_locale(monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    answer = run_well("help", "合并保存").stdout
    assert answer.startswith("`integrated_save`, 合并保存: 默认为 `True`")
    assert "# 每张卡" in answer, answer[:400]
