"""The package as users get it: a wheel with the pages of the guide, and the man page."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.commands import commands
from tests.support.programs import need

ROOT = Path(__file__).parents[1]
MAN_PAGE = ROOT / "man" / "ckpttool.1"
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "ckpttool", "docs", "man")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
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
    assert {"ckpttool/operations/plot.html", "ckpttool/examples.tar.xz"} <= {*names}


@pytest.mark.interpreter
def test_the_page_of_an_index_has_no_link_that_leads_nowhere(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name).decode()
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= {*text.splitlines()}
    assert "# ckpttool\n\nInspect, merge" in text
    assert [link for link in re.findall(r"\]\(([^)]*)", text) if "://" not in link] == []


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


@pytest.fixture(scope="module")
def bundle():
    return runpy.run_path(str(ROOT / "scripts" / "make_bundle.py"))


@pytest.mark.parametrize(
    ("python", "machine", "glibc", "tags", "fits"),
    [
        ("3.11", "aarch64", "2.17", "cp311-cp311-manylinux_2_17_aarch64", True),
        ("3.11", "aarch64", "2.17", "cp311-cp311-manylinux2014_aarch64.any_other", True),
        ("3.12", "x86_64", "2.28", "cp311-abi3-manylinux_2_28_x86_64", True),
        ("3.10", "x86_64", "2.17", "cp310-cp310-manylinux1_x86_64", True),
        ("3.10", "aarch64", "2.17", "py3-none-any", True),
        ("3.13", "riscv64", "2.39", "cp313-cp313-manylinux_2_39_riscv64", True),
        ("3.11", "aarch64", "2.17", "cp311-cp311-manylinux_2_28_aarch64", False),
        ("3.11", "aarch64", "2.17", "cp311-cp311-manylinux_2_17_x86_64", False),
        ("3.11", "aarch64", "2.17", "cp310-cp310-manylinux_2_17_aarch64", False),
        ("3.11", "x86_64", "2.17", "cp312-abi3-manylinux2014_x86_64", False),
        ("3.11", "x86_64", "2.17", "cp311-cp311-macosx_11_0_arm64", False),
        ("3.11", "x86_64", "2.17", "cp311-cp311-musllinux_1_2_x86_64", False),
    ],
)
def test_a_bundle_has_wheels_for_its_python_machine_and_glibc_only(
    bundle, python, machine, glibc, tags, fits
):
    known = bundle["tags_of"](machine, glibc)
    with nullcontext() if fits else pytest.raises(bundle["BundleError"], match=r"^numpy-2"):
        bundle["refuse_foreign"]([f"numpy-2.2.6-{tags}.whl"], python, known)


def test_a_bundle_for_a_glibc_that_no_wheel_is_made_for_is_refused(bundle):
    with pytest.raises(bundle["BundleError"], match=r"aarch64 with glibc 2\.12"):
        bundle["tags_of"]("aarch64", "2.12")


@pytest.mark.parametrize(("word", "tag"), [("arm64", "aarch64"), ("amd64", "x86_64")])
def test_platforms_in_the_words_of_docker_are_those_of_wheels(bundle, word, tag):
    assert bundle["read_options"](["--platform", word]).platform == tag


@pytest.mark.parametrize("version", ["3.9", "3.6", "2.7", "3.11.4", "python3"])
def test_a_bundle_for_another_python_is_refused_before_anything_is_downloaded(bundle, version):
    with pytest.raises(SystemExit) as stopped:
        bundle["read_options"](["--python", version])
    assert stopped.value.code == 2
    oldest = re.search(r'requires-python = ">=3.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert bundle["OLDEST_PYTHON"] == int(oldest[1])


@pytest.mark.parametrize("with_python", [False, True])
def test_a_bundle_says_how_it_is_installed(bundle, tmp_path, monkeypatch, with_python):
    def run(*words):
        if "build" in words:
            (Path(words[-1]) / "ckpttool-0.1.0-py3-none-any.whl").touch()
        else:
            assert str(words[-1]).endswith("ckpttool-0.1.0-py3-none-any.whl[crypto,mpi]")
            folder = Path(words[words.index("--dest") + 1])
            (folder / "numpy-2-cp312-cp312-manylinux_2_17_aarch64.whl").touch()

    (tmp_path / "cpython.tar.gz").write_bytes(b"python")
    words = ["--python", "3.12", "--platform", "aarch64", "--extras", "crypto,mpi"]
    words += ["--with-python", str(tmp_path / "cpython.tar.gz")] if with_python else []
    main = bundle["make_bundle"]
    monkeypatch.setitem(main.__globals__, "run", run)
    folder = tmp_path / "name"
    folder.mkdir()
    lines = main(bundle["read_options"](words), folder)
    python = "python/bin/python3" if with_python else "python3.12"
    install = "ckpttool-venv/bin/pip install --no-index --find-links name 'ckpttool[crypto,mpi]'"
    assert lines[-2:] == [f"{python} -m venv ckpttool-venv", install]
    assert ("tar xf name/cpython.tar.gz" in lines) == with_python
    assert (folder / "cpython.tar.gz").exists() == with_python


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
    assert [one for one in sections if one not in ("recipe", "strategy")] == [*commands()]


@pytest.mark.source
def test_the_man_page_is_free_of_mistakes():
    need("mandoc")
    done = subprocess.run(["mandoc", "-T", "lint", MAN_PAGE], capture_output=True, text=True)
    assert done.stdout + done.stderr == ""
