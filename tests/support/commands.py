"""Runs the command line in this process, as a user would type it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.testing import CliRunner

from tests.support.checkpoints import write_holes
from tests.support.documents import check_document
from tests.support.readers import Entry, read

if TYPE_CHECKING:
    from click.testing import Result

LASTING = ("lock", "stamps.json")  # files of a record that stay when a set is finished
SUFFIXES = {"ckpt": ".ckpt", "safetensors": ".safetensors", "hdf5": ".h5"}


def commands() -> dict[str, click.Command]:
    from ckpttool.cli.groups import walk_commands
    from ckpttool.cli.main import main

    found = {words: context.command for words, context in walk_commands(click.Context(main))}
    return {words: one for words, one in found.items() if not isinstance(one, click.Group)}


def command_of(words: Sequence[str]) -> str:
    found = (" ".join(words[:2]), words[0])
    return next((one for one in found if one in commands()), words[0])


def run(*arguments: str | Path) -> Result:
    """Run ``ckpttool ARGUMENTS``; raise what escapes the program.

    What it prints with ``--json`` is one document that fits its schema.
    """
    from ckpttool.cli.main import main

    # Before click 8.2 the streams had to be asked for; since then they are always apart.
    apart = {"mix_stderr": False} if "mix_stderr" in signature(CliRunner).parameters else {}
    words = [str(argument) for argument in arguments]
    result = CliRunner(**apart).invoke(main, words, prog_name="ckpttool")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in everything(result)
    if "--json" in words and not {"-h", "--help"} & {*words}:
        check_document(command_of(words), result.stdout, result.exit_code)
    return result


def everything(result: Result) -> str:
    return result.stdout + result.stderr


def run_well(*arguments: str | Path) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, everything(result)
    return result


def message(result: Result) -> str:
    return " ".join(everything(result).split())


def merged(source: Path, *words: str | Path) -> tuple[dict[str, Entry], str]:
    out = source.parent / "merged.safetensors"
    result = run_well("merge", source, "-o", out, "--overwrite", *words)
    return read(out), message(result)


def refused(source: Path, code: int, *patterns: str, options: Sequence[str] = ()) -> str:
    out = source.parent / "never.h5"
    result = run("merge", source, "-o", out, *options)
    text = message(result)
    assert result.exit_code == code, text
    assert not mentions(text, *patterns), text
    assert not out.exists()
    return text


def verify_document(*words: str | Path) -> dict[str, Any]:
    result = run("verify", *words, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == (1 if document["findings"] else 0), everything(result)
    return document


def mentions(text: str, *patterns: str) -> list[str]:
    return [pattern for pattern in patterns if not re.search(pattern, text, re.IGNORECASE)]


def files_below(folder: Path, manifests: bool = False) -> list[str]:
    """Return the paths of all files below a folder, relative to it.

    What a finished set leaves beside its outputs is left out: the manifest, unless it is asked for,
    and the lock and stamps in the folder of its record.
    """
    paths = (path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir())
    files = (path for path in paths if not (_is_record(path.parent) and path.name in LASTING))
    found = sorted(map(str, files))
    return [name for name in found if manifests or not name.endswith("ckpttool.json")]


def _is_record(folder: Path) -> bool:
    return folder.name.startswith(".") and folder.name.endswith(".ckpttool")


def peak_mib(*arguments: str | Path) -> int:
    """Return the peak of memory of a command in a process of its own, in MiB."""
    code = (
        "import sys; from ckpttool.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return int(done.stdout.split()[-1]) >> 10


def stay_small(tmp_path: Path, *arguments: str) -> None:
    """Run a command on a tensor of 768 MiB, cut in two and each half stored twice, in 160 MiB."""
    for rank in range(4):
        path = tmp_path / "src" / f"rank_{rank}" / "net-1_1.ckpt"
        write_holes(path, (3 << 14, 2048))
        with path.open("r+b") as file:
            file.seek(-4096, 2)
            file.write(bytes([rank % 2 + 1]) * 4096)
    (tmp_path / "s.json").write_text(
        '{"parallel_layout_item": {"w": {"dev_matrix": [2, 2], "tensor_map": [-1, 0]}}}'
    )
    assert peak_mib(*arguments, "-s", tmp_path / "s.json", "-j", "4") < 160
    for path in (tmp_path / "src").rglob("*.ckpt"):
        path.unlink()
