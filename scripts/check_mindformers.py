"""Asks MindFormers' own functions which file each rank would resume from.

    pip download --no-deps mindformers==2.1.0    # and 1.3.2, 1.6.0, 1.7.0, 1.8.0, 1.9.0
    ckpttool reshard ... -o stage2 --format ckpt --mindformers
    python scripts/check_mindformers.py WHEEL stage2 [WHEEL FOLDER ...]

Needs Python 3.10 to 3.12 with ``mindspore==2.10.0 numpy==1.26.4 safetensors==0.5.3``. MindFormers
itself needs devices and much more, so only its modules ``tools.utils``, ``tools.resume_ckpt``,
``utils.file_utils`` and, from 1.6 on, ``utils.resume_ckpt_utils`` are imported; what these ask of
the rest (the rank, barriers, the trainer) is answered here. ``load_checkpoint: FOLDER`` and
``resume_training: True`` lead to the functions that are called. Ends with 1 unless every rank finds
a file of its own folder, and all files are of one step.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path

RANK = [0]


def pretend(package: Path, output: str) -> types.ModuleType:
    """Import the look-up functions, with answers for what they ask of the rest."""

    def stub(name: str, path: str | None = None, **answers: object) -> None:
        module = types.ModuleType(f"mindformers{name}")
        module.__dict__.update(answers)
        if path is not None:
            module.__path__ = [str(package / path)]
        sys.modules[module.__name__] = module

    def last_by_time(folder: str, ckpt_format: str = "ckpt") -> None:
        raise AssertionError(f"the newest file of {folder} was asked for: meta.json was not taken")

    for name in ("tools", "utils"):
        stub(f".{name}", name)
    stub("", "")
    stub(".trainer", "trainer")
    logger = logging.getLogger("mindformers")
    stub(".tools.logger", logger=logger)
    stub(
        ".trainer.utils",
        get_last_checkpoint=last_by_time,
        is_hyper_param_existed_in_sf_dir=lambda folder, ckpt_format: False,
    )
    stub(".utils.parallel_utils", barrier_world=lambda text: None)
    tools = importlib.import_module("mindformers.tools.utils")
    for name, answer in (
        ("get_real_rank", lambda: RANK[0]),
        ("get_output_root_path", lambda: output),
        ("barrier_world", lambda *text: None),
    ):
        setattr(tools, name, answer)
    try:
        files = importlib.import_module("mindformers.utils.file_utils")
        files.is_publicly_accessible_path = lambda path: True
    except ModuleNotFoundError:  # 1.3
        tools.is_publicly_accessible_path = lambda path: True
    try:
        return importlib.import_module("mindformers.utils.resume_ckpt_utils")
    except ModuleNotFoundError:  # 1.3
        return importlib.import_module("mindformers.tools.resume_ckpt")


def look_up(package: Path, folder: str) -> list[str]:
    """Return the file that each rank would resume from, in the order of ranks."""
    ranks = len([*Path(folder).glob("rank_*")])
    suffix = "ckpt" if list(Path(folder).glob("rank_0/*.ckpt")) else "safetensors"
    found = []
    with tempfile.TemporaryDirectory() as output:
        functions = pretend(package, output)
        for rank in range(ranks):  # rank 0 writes what the others read
            RANK[0] = rank
            function = functions.get_resume_checkpoint
            has_formats = "ckpt_format" in inspect.signature(function).parameters  # not in 1.3
            path = function(folder, True, **({"ckpt_format": suffix} if has_formats else {}))
            found.append(path if "/" in path else f"{folder}/rank_{rank}/{path}")
    return found


def main() -> None:
    """Look up the files of each folder with the functions of the wheel before it."""
    words = sys.argv[1:]
    if len(words) > 2:  # each wheel needs a process of its own
        codes = [
            subprocess.run([sys.executable, __file__, *pair], check=False).returncode
            for pair in zip(words[::2], words[1::2], strict=True)
        ]
        sys.exit(max(codes))
    wheel, folder = words
    with tempfile.TemporaryDirectory() as package:
        zipfile.ZipFile(wheel).extractall(package)
        sys.path.insert(0, package)
        found = look_up(Path(package, "mindformers"), folder.rstrip("/"))
    steps = {path.rpartition("-")[2] for path in found}
    is_right = len(steps) == 1 and all(
        Path(path).is_file() and re.search(r"_rank_(\d+)", Path(path).name)[1] == str(rank)
        for rank, path in enumerate(found)
    )
    print(f"{Path(wheel).name}: {'right' if is_right else 'WRONG'}: {', '.join(found)}")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
