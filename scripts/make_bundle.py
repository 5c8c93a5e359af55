"""Make one archive of ckpttool and its dependencies, for machines without a package index.

The archive has the wheels, and how to install them.  Without options it is for this machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ckpttool import __version__

ROOT = Path(__file__).parents[1]
LEGACY = {"2_17": "manylinux2014", "2_12": "manylinux2010", "2_5": "manylinux1"}
OLDEST = {"aarch64": 17, "x86_64": 5}  # minor version of the first glibc of manylinux


ALIASES = {"arm64": "aarch64", "amd64": "x86_64"}  # of Docker and macOS -> of wheels
OLDEST_PYTHON = 10  # as in pyproject.toml


class BundleError(Exception):
    """No such bundle can be made."""


def tags_of(machine: str, glibc: str) -> list[str]:
    """Return the platform tags of the wheels that run on a machine with a glibc, newest first.

    Examples
    --------
    >>> tags_of("aarch64", "2.18")
    ['manylinux_2_18_aarch64', 'manylinux_2_17_aarch64', 'manylinux2014_aarch64']
    """
    newest = int(glibc.removeprefix("2."))
    tags = []
    for minor in range(newest, OLDEST.get(machine, 17) - 1, -1):
        tags.append(f"manylinux_2_{minor}_{machine}")
        if legacy := LEGACY.get(f"2_{minor}"):
            tags.append(f"{legacy}_{machine}")
    if not tags:
        raise BundleError(f"no wheels are made for {machine} with glibc {glibc}")
    return tags


def refuse_foreign(names: Iterable[str], python: str, tags: Sequence[str]) -> None:
    """Raise `BundleError` if a wheel is not for this Python or does not have one of these tags."""
    version = int(python.removeprefix("3."))
    fit = {f"cp3{minor}-abi3" for minor in range(2, version + 1)} | {f"cp3{version}-cp3{version}"}
    fit |= {"py3-none", "py2.py3-none"}
    for name in names:
        found = re.fullmatch(r".+-([^-]+-[^-]+)-([^-]+)\.whl", name)
        if found is None or found[1] not in fit or not {*found[2].split(".")} & {*tags, "any"}:
            raise BundleError(f"{name} is not for Python {python} and {tags[0]}")


def run(*words: str | Path) -> None:
    """Run a program; raise `BundleError` with what it printed if it fails."""
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).splitlines()
        raise BundleError("\n".join(lines[-2:]))


def make_bundle(options: argparse.Namespace, folder: Path) -> list[str]:
    """Fill a folder with the wheels and the program; return the lines that install them."""
    tags = tags_of(options.platform, options.glibc)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder)
    (ours,) = folder.glob("ckpttool-*.whl")
    wanted = "ckpttool" + (f"[{options.extras}]" if options.extras else "")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    download += ["--dest", str(folder), "--python-version", options.python]
    download += ["--implementation=cp", *(f"--platform={tag}" for tag in tags)]
    run(*download, str(ours) + wanted.removeprefix("ckpttool"))
    refuse_foreign((path.name for path in folder.glob("*.whl")), options.python, tags)
    python, before = f"python{options.python}", []
    if options.with_python is not None:
        packed = folder / options.with_python.name
        packed.write_bytes(options.with_python.read_bytes())
        before = [f"tar xf {folder.name}/{packed.name}"]
        python = "python/bin/python3"
    return [
        f"tar xf {folder.name}.tar",
        *before,
        f"{python} -m venv ckpttool-venv",
        f"ckpttool-venv/bin/pip install --no-index --find-links {folder.name} '{wanted}'",
    ]


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    parser = argparse.ArgumentParser("scripts/bundle", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--python", default=here, metavar="3.N", help=f"version of Python there [{here}]")
    machine = platform.machine()
    text = f"machine there: aarch64 (or arm64), x86_64 [{machine}]"
    add("--platform", default=machine, type=lambda word: ALIASES.get(word, word), help=text)
    add("--glibc", default="2.17", metavar="2.N", help="oldest glibc there (ldd --version) [2.17]")
    add("--extras", default="crypto", help="extras: crypto,dask,mpi; '' for none [crypto]")
    text = "archive of a relocatable Python that goes into the bundle"
    add("--with-python", type=Path, metavar="FILE", help=text)
    add("-o", "--output", type=Path, default=ROOT / "dist", metavar="FOLDER", help="folder [dist]")
    options = parser.parse_args(words)
    for value, form in ((options.python, r"3\.\d+"), (options.glibc, r"2\.\d+")):
        if not re.fullmatch(form, value):
            parser.error(f"{value} is not a version such as 3.11 or 2.17")
    if int(options.python.removeprefix("3.")) < OLDEST_PYTHON:
        parser.error(f"Python 3.{OLDEST_PYTHON} is the oldest; --with-python brings one along")
    return options


def main() -> None:
    """Make the archive, and print how to install it."""
    options = read_options()
    with TemporaryDirectory() as scratch:
        name = f"ckpttool-{__version__}-python{options.python}-{options.platform}"
        folder = Path(scratch, name)
        folder.mkdir()
        try:
            lines = make_bundle(options, folder)
        except BundleError as error:
            sys.exit(f"{error}\nTry: another --python, or the --glibc of the machine, such as 2.28")
        (folder / "INSTALL.txt").write_text("\n".join(["Type:", *lines, ""]))
        options.output.mkdir(parents=True, exist_ok=True)
        archive = options.output / f"{name}.tar"
        with tarfile.open(archive, "w") as tar:
            tar.add(folder, name)
    size = archive.stat().st_size / 1e6
    print(f"Wrote {os.path.relpath(archive)} ({size:.0f} MB). Install it there:")
    print(*(f"  {line}" for line in lines), sep="\n")


if __name__ == "__main__":
    main()
