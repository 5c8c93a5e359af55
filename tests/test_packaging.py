"""The package as users get it: a wheel with the pages of the guide, and the man page."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.commands import commands
from tests.support.programs import need

ROOT = Path(__file__).parents[1]
MAN_PAGE = ROOT / "man" / "ckpttool.1"
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "ckpttool", "docs", "man")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel that is built from the sdist, as on the way to an index."""
    folder = tmp_path_factory.mktemp("build")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        more = {"symlinks": True} if (ROOT / name).is_dir() else {}
        copy(ROOT / name, tree / name, **more)
    build(tree, "sdist", folder)
    (archive,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    build(unpacked, "wheel", folder)
    (found,) = folder.glob("*.whl")
    return found


def build(tree: Path, kind: str, out: Path) -> None:
    """Call the hook of the build backend, as pip does."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.interpreter
def test_the_wheel_has_the_pages_of_users_and_the_man_page(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    pages = {f"ckpttool/{path.relative_to(ROOT)}" for path in (ROOT / "docs").rglob("*.md")}
    of_users = {name for name in pages if "/development/" not in name}
    assert {name for name in names if name.endswith(".md")} == of_users
    assert [name for name in names if name.endswith("share/man/man1/ckpttool.1")]
    assert "ckpttool/operations/plot.html" in names


@pytest.mark.interpreter
def test_the_help_of_an_installed_package_is_printed(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = "import ckpttool, sys; print(ckpttool.__file__); from ckpttool.cli.main import main; "
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    for name in ("damaged", "messages", "--unlisted"):
        done = subprocess.run(
            [sys.executable, "-c", f"{code}main(['help', {name!r}])"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        place, text = done.stdout.split("\n", 1)
        assert place.startswith(str(tmp_path)), "the installed package and not the repository"
        assert text.startswith("#"), done.stderr


@pytest.mark.interpreter
def test_the_types_of_the_package_are_found_by_a_script_of_a_user(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "right.py").write_text(
        "import ckpttool\n"
        "reveal_type(ckpttool.open('a')['w'])\n"
        "reveal_type(ckpttool.RunOptions('threads:2').max_memory_bytes)\n"
    )
    (tmp_path / "wrong.py").write_text("import ckpttool\nckpttool.merge('a', 's', 'o', step=[1])\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", ".cache"]
    found = {}
    for name in ("right.py", "wrong.py"):
        done = subprocess.run([*command, name], cwd=tmp_path, capture_output=True, text=True)
        found[name] = done.returncode, re.sub(r"(ckpttool|builtins)\.([a-z]+\.)*", "", done.stdout)
    code, text = found["right.py"]
    assert code == 0, "a stale .venv? scripts/test installs the package again\n" + text
    assert 'right.py:2: note: Revealed type is "LazyTensor"' in text
    assert 'right.py:3: note: Revealed type is "int | None"' in text
    code, text = found["wrong.py"]
    assert code == 1
    assert 'Argument "step" to "merge"' in text


@pytest.mark.source
def test_the_man_page_is_current_and_has_every_command():
    made = runpy.run_path(str(ROOT / "scripts" / "make_man.py"))["make_page"]()
    assert MAN_PAGE.read_text(encoding="utf-8") == made, "run scripts/man"
    sections = re.findall(r"^\.Ss ckpttool (.+)$", made, re.MULTILINE)
    assert [one for one in sections if one != "strategy"] == [*commands()]


@pytest.mark.source
def test_the_man_page_is_free_of_mistakes():
    need("mandoc")
    done = subprocess.run(["mandoc", "-T", "lint", MAN_PAGE], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""
