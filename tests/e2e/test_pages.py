"""README and documentation keep their word: what they show runs, and what they link to is there.

Every block of code of a page runs, in order, in an empty folder with the files that the page names:

- ``sh``: line by line; ``# exit code N`` behind a command is what it has to end with;
- ``console``: the same, and what a terminal of 80 columns shows is compared with what is below.
  ``SNAPSHOT_UPDATE=1`` writes these lines;
- ``bash``: as one script; ``zsh`` and ``fish`` likewise, where that shell is installed;
- ``yaml``: a hand-written strategy; any block with a title is a file of that name;
- ``python``: all blocks of a page in one namespace.

Stand-ins take the place of what is not here: Slurm and Volcano (`tests.support.schedulers`), and
PyTorch's safetensors. Blocks for MindSpore run in ``tests/e2e/interop``.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import h5py
import pytest
import yaml

import ckpttool
from tests.support.commands import everything, run, run_well
from tests.support.examples import OF_TUTORIAL, lay_out, write_archive
from tests.support.executors import contents, environment
from tests.support.pages import (
    CHINESE,
    DOCS,
    FENCE,
    PAGES,
    ROOT,
    Block,
    anchor_of,
    blocks_of,
    name_of,
    needs_mindspore,
    prose_of,
)
from tests.support.programs import need
from tests.support.readers import read
from tests.support.schedulers import write_stand_ins
from tests.support.snapshots import UPDATE
from tests.support.terminals import on_terminal

README = ROOT / "README.md"
MAX_LINES = {"README.md": 150, "docs/tutorial.md": 100, "docs/guides": 100, "docs/concepts": 100}
MAX_LINES |= {f"docs/zh/{name.removeprefix('docs/')}": MAX_LINES[name] for name in [*MAX_LINES]}
DRAWINGS = ("", "json", "text")  # languages of blocks that nothing runs
TYPED = ("sh", "bash", "console", "zsh", "fish", "python")  # languages that name files to read
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)$", re.MULTILINE)  # of a console block
FIRST_LINES = 8  # of a page, which say where its folders come from
CALL = re.compile(r"ckpttool\.\w+\([^()]*\)")  # of Python
COLUMNS = 80  # of code, and of the terminal whose screens pages show

# What sets up environments, or takes minutes. CI runs these scripts, and tests/test_bench.py runs a
# small benchmark.
NOT_RUN = re.compile(r"(scripts/|\.ci/|\.venv/bin/|python scripts/|pip |pipx |uvx |export |git )")

# Folders of a page that have to be what one ordinary run writes.
SAME_AS_ONE_RUN = {
    "docs/guides/dask.md": ["on_dask"],
    "docs/guides/mpi.md": ["on_mpi", "on_slurm"],
    "docs/guides/slurm.md": ["array"],
    "docs/guides/volcano.md": ["parts"],
}
NEEDS = {
    "docs/guides/dask.md": [
        pytest.mark.dask,
        pytest.mark.xdist_group("dask"),
    ],
    "docs/guides/mpi.md": [
        pytest.mark.mpi,
        pytest.mark.xdist_group("mpi"),
        pytest.mark.skipif(shutil.which("mpiexec") is None, reason="mpiexec is not installed"),
    ],
    **{f"docs/guides/{name}.md": [pytest.mark.interpreter] for name in ("slurm", "volcano")},
    "docs/guides/pipelines.md": [pytest.mark.interpreter],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    lay_out(folder)
    return folder


@pytest.fixture
def shell(tmp_path, inputs, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    write_stand_ins(tmp_path / "bin")
    path = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    for name in ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM", "MCA_rmaps_base_oversubscribe"):
        monkeypatch.setenv(f"OMPI_{name}", "1")
    monkeypatch.chdir(work)

    def provide(page: Path) -> None:
        text = page.read_text(encoding="utf-8")
        if "chunked.h5" in text:  # a file of the reader's
            with h5py.File("chunked.h5", "w") as file:
                file.create_dataset("w", data=[1.0, 2.0], compression="lzf")
        if "help --examples .\n" in text:  # the page itself writes its files
            return
        for one in inputs.iterdir():
            if one.name not in text:
                continue
            if one.is_dir():
                shutil.copytree(one, one.name)
            else:
                shutil.copy(one, one.name)

    return provide


def commands_of(text: str) -> list[tuple[str, int]]:
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        command, _, code = line.partition("  # exit code ")
        command = command.partition("  # ")[0].strip()
        if command and not command.startswith("#"):
            found.append((command, int(code or 0)))
    return found


def run_line(command: str, code: int) -> str:
    """Run a command of a user; in this process if it is ours alone. What it prints."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
    if command.startswith("ckpttool ") and not re.search(r"[|<>$&;]", bare):
        result = run(*shlex.split(command)[1:])
        assert result.exit_code == code, everything(result)
        return everything(result)
    if NOT_RUN.match(command):
        return ""
    run_script(command, code)
    return ""


def run_script(text: str, code: int = 0) -> None:
    words = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr


def prepare_dask(text: str) -> str:
    """The script for Dask, which waits for the workers and kills what is left."""
    wait = "until [ $(cat log | grep -c 'Registered to') = 2 ]; do sleep 0.1; done"
    text = text.replace("sleep 5", wait)
    text = text.replace(" --no-nanny &", " --no-nanny 2>>log &").replace(
        "json &", "json 2>/dev/null &", 1
    )
    # A worker that stays would have the script wait for ever.
    until = "for i in $(seq 60); do jobs -r > left; test -s left || break; sleep 0.5; done"
    text = text.replace("\nwait\n", f"\n{until}; ! test -s left\n")
    assert "! test -s left" in text
    return f"trap 'kill -9 $(jobs -p) || true' EXIT\ntouch log\n{text}"


def screen_of(block: str) -> str:
    """A console block as it has to be: its commands, each with what it shows on a terminal."""
    lines = []
    for typed in COMMAND.findall(block):
        ((command, code),) = commands_of(typed)
        program, *words = shlex.split(command)
        assert program == "ckpttool"
        shown, ended = on_terminal(*words, columns=COLUMNS, TERM="dumb")  # without progress
        assert ended == code, shown
        shown = re.sub(r"\b\d+\.\d\d s\b", "0.06 s", shown)
        lines += [f"$ {typed}", *(line.rstrip() for line in shown.splitlines())]
    return "\n".join(lines) + "\n"


def run_block(block: Block, namespace: dict[str, object]) -> str:
    """Run a block, or write the file that it is; return what it has to be."""
    if block.title:
        Path(block.title).write_text(block.text, encoding="utf-8")
    elif block.language == "console":
        return screen_of(block.text)
    elif block.language == "sh":
        for command, code in commands_of(block.text):
            run_line(command, code)
    elif block.language == "bash":
        run_script(prepare_dask(block.text) if "dask scheduler" in block.text else block.text)
    elif block.language in ("zsh", "fish"):
        if shutil.which(block.language):
            before = "autoload -Uz compinit; compinit -u -D\n" if block.language == "zsh" else ""
            words = [block.language, "-c", before + block.text]
            subprocess.run(words, env=environment(), check=True)
    elif block.language == "yaml":
        Path("untitled.yaml").write_text(block.text, encoding="utf-8")
        ckpttool.read_strategy(["untitled.yaml"])
    elif block.language == "python":
        if not needs_mindspore(block):
            exec(compile(block.text, "a page", "exec"), namespace)
    else:
        assert block.language in DRAWINGS, f"nothing runs {block.language}"
        assert not re.match(r"(\$ )?ckpttool ", block.text), "nothing runs a command in a drawing"
    return block.text


@pytest.fixture
def torch(monkeypatch):
    package, module = ModuleType("safetensors"), ModuleType("safetensors.torch")
    module.load_file = lambda path: {
        name: entry.array() for name, entry in read(Path(path)).items()
    }
    monkeypatch.setitem(sys.modules, "safetensors", package)
    monkeypatch.setitem(sys.modules, "safetensors.torch", module)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=NEEDS.get(name_of(page), []))
        for page in PAGES
        if CHINESE not in page.parents  # they have the blocks of the English pages
    ],
)
def test_what_a_page_shows_runs(page, shell, torch):
    if "jq " in page.read_text(encoding="utf-8"):
        need("jq")
    for marker, package in (("dask", "distributed"), ("mpi", "mpi4py")):
        if page.name == f"{marker}.md":
            pytest.importorskip(package, reason=f"the extra ckpttool[{marker}] is not installed")
    shell(page)
    namespace: dict[str, object] = {}
    wrong = {}
    for block in blocks_of(page):
        screen = run_block(block, namespace)
        if screen != block.text:
            wrong[block.text] = screen
    if os.environ.get(UPDATE):
        text = page.read_text(encoding="utf-8")
        for old, new in wrong.items():
            text = text.replace(f"```console\n{old}```", f"```console\n{new}```")
        page.write_text(text, encoding="utf-8")
    else:
        assert list(wrong) == list(wrong.values()), f"{UPDATE}=1 writes the screens"
    for shell_of_page in sorted({block.language for block in blocks_of(page)} & {"zsh", "fish"}):
        need(shell_of_page)
    if folders := SAME_AS_ONE_RUN.get(name_of(page)):
        words = ["checkpoint/", "-s", "strategy.ckpt", "-d", "new_strategy.ckpt", "-o", "expected"]
        run_well("reshard", *words, "--format", "ckpt")
        for folder in folders:
            assert contents(Path(folder)) == contents(Path("expected"))
            manifests = [Path(one, "ckpttool.json").read_bytes() for one in (folder, "expected")]
            assert manifests[0] == manifests[1]


def test_every_block_for_mindspore_runs_beside_it():
    found = [(name_of(page), one) for page in PAGES for one in blocks_of(page)]
    texts = [block.text for _, block in found if needs_mindspore(block)]
    interop = (ROOT / "tests/e2e/interop/test_files.py").read_text(encoding="utf-8")
    words = [
        [argument.value for argument in call.args[1:] if isinstance(argument, ast.Constant)]
        for call in ast.walk(ast.parse(interop))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "python_block"
    ]
    assert len(texts) == 3
    for text in texts:
        assert any(all(word in text for word in some) for some in words)
    assert {name for name, block in found if needs_mindspore(block)} == {"docs/guides/loading.md"}


def headings_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {anchor_of(one) for one in headings}


@pytest.mark.source
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_images_of_a_page_are_there(page):
    text = prose_of(page)
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        assert path.is_file(), link
        assert not anchor or anchor in headings_of(path), link
        assert DOCS not in page.parents or DOCS in path.parents, f"{link} leads out of docs/"


@pytest.mark.source
def test_every_page_is_in_the_navigation_once():
    def leaves(node: object) -> list[str]:
        if isinstance(node, str):
            return [node]
        parts = node.values() if isinstance(node, dict) else node
        return [leaf for part in parts for leaf in leaves(part)]

    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = leaves(yaml.safe_load(text[text.index("\nnav:") :])["nav"])
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES if DOCS in page.parents]
    assert sorted(navigation) == sorted(pages)
    # Pages for users have names of their own, by which a command line may find them.
    names = [Path(page).stem for page in pages if not page.startswith(("development/", "zh/"))]
    assert len(names) == len({*names})


@pytest.mark.source
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_is_short_and_has_one_title(page):
    name = name_of(page)
    limits = [limit for start, limit in MAX_LINES.items() if name.startswith(start)]
    lines = page.read_text(encoding="utf-8").splitlines()
    assert all(len(lines) <= limit for limit in limits)
    assert len(re.findall(r"^# ", prose_of(page), re.MULTILINE)) == 1
    assert lines[0].startswith("# ")


@pytest.mark.source
def test_the_reference_of_the_command_line_is_what_help_prints(monkeypatch):
    from ckpttool.cli.groups import walk_commands
    from ckpttool.cli.main import main

    monkeypatch.setenv("COLUMNS", "80")
    page = DOCS / "reference" / "cli.md"
    names = [words for words, _ in walk_commands(click.Context(main))]
    parts = ["# Command line\n", f"```text\n{run_well('--help').stdout}```\n"]
    parts += [
        f"## ckpttool {one}\n\n```text\n{run_well(*one.split(), '--help').stdout}```\n"
        for one in names
    ]
    text = "\n".join(parts)
    if os.environ.get(UPDATE):
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text, f"{UPDATE}=1 writes the page"


@pytest.mark.source
def test_the_reference_of_python_has_every_public_name():
    text = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: ckpttool\.(\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(set(ckpttool.__all__) - {"__version__"})


def test_a_call_inside_of_a_sentence_has_the_arguments_of_its_function():
    spans = [span for page in PAGES for span in prose_of(page).split("`")[1::2]]
    calls = [ast.parse(span).body[0].value for span in spans if CALL.fullmatch(span)]
    for call in calls:
        given = [ast.literal_eval(value) for value in call.args if isinstance(value, ast.Constant)]
        if ... not in given:
            function = getattr(ckpttool, call.func.attr)
            named = dict.fromkeys(keyword.arg for keyword in call.keywords)
            inspect.signature(function).bind(*call.args, **named)
    assert len(calls) > 5


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_says_in_its_first_lines_where_its_folders_come_from(page, inputs):
    code = "\n".join(
        "".join(COMMAND.findall(one.text)) if one.language == "console" else one.text
        for one in blocks_of(page)
        if one.language in TYPED
    )
    made = {one.title for one in blocks_of(page)}
    words = {*re.findall(r"[\w.-]+", re.sub(r"\S+://\S*|-o \S+", "", code))}
    names = {one.name for one in inputs.iterdir()} - {*OF_TUTORIAL} - made
    start = page.read_text(encoding="utf-8").splitlines()[:FIRST_LINES]
    is_said = "help --examples" in " ".join(start)
    assert is_said or not names & words, names & words


def test_the_package_has_the_folders_that_the_pages_name(tmp_path, inputs):
    if os.environ.get(UPDATE):
        write_archive(inputs)
    for name in ("here", "a b/c"):
        run_well("help", "--examples", tmp_path / name)
        assert contents(tmp_path / name) == contents(inputs), f"{UPDATE}=1 writes the archive"
    assert run("help", "--examples", tmp_path / "here").exit_code == 2


@pytest.mark.source
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_of_a_page_is_not_wider_than_its_column(page):
    if page.name == "cli.md":
        return  # `--help` prints the same
    texts = [block.text for block in blocks_of(page) if block.language != "json"]  # long strings
    assert not [line for text in texts for line in text.splitlines() if len(line) > COLUMNS]


@pytest.mark.source
def test_every_fence_of_a_page_is_closed():
    for page in PAGES:
        assert "```" not in FENCE.sub("", page.read_text(encoding="utf-8")), name_of(page)
