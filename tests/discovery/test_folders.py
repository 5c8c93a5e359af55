"""Folders of every kind, and what is found in them, as ``folders.txt`` says.

A case has a title, files, and scans with their results.  ``{0-3}`` stands for these ranks, the
same everywhere in a word; ``{a,b}`` for each of these words.  ``PATH/`` is a folder, and
``PATH=KIND`` no checkpoint but a strategy, damage, or as a meta.json the record of a save; with
``whole`` it holds the tensor ``w``.
``@SECONDS PATH`` sets the time of a file.  A line ``> OPTIONS`` is a scan of the folder, or of a
path in it.  ``SNAPSHOT_UPDATE=1`` writes the results.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from itertools import product
from pathlib import Path

import pytest

from ckpttool.discovery import siblings
from ckpttool.discovery.scan import SourceOptions, scan
from ckpttool.problems import CkptToolError
from ckpttool.wording import format_ranks
from tests.support.checkpoints import write_file
from tests.support.corpus import GOLDEN
from tests.support.file_bytes import record
from tests.support.readers import Entry
from tests.support.scans import found
from tests.support.transcripts import check_case, read_cases

TEXT = Path(__file__).with_name("folders.txt")
CASES = read_cases(TEXT)
SECONDS = 10**9  # when a file was written, unless a line says when: times tell saves apart
STRATEGY = GOLDEN / "reshard_8_to_4" / "src_strategy.ckpt"


def expand(word):
    """The words that a word with braces stands for."""
    braces = list(dict.fromkeys(re.findall(r"\{[^}]*\}", word)))
    for chosen in product(*map(values_of, braces)):
        chosen_word = word
        for brace, value in zip(braces, chosen, strict=True):
            chosen_word = chosen_word.replace(brace, value)
        yield chosen_word


def values_of(brace):
    """The values of ``{0-3}``, ``{00-03}``, or ``{a,b}``."""
    values = []
    for part in brace.strip("{}").split(","):
        ends = re.fullmatch(r"(\d+)-(\d+)", part)
        numbers = range(int(ends[1]), int(ends[2]) + 1) if ends else ()
        values += [f"{number:0{len(ends[1])}}" for number in numbers] if ends else [part]
    return values


def write(root, word):
    """Write a file or folder; the name of a file is that of its only tensor."""
    name, _, content = word.partition("=")
    path = root / name
    (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
    if name.endswith("meta.json") and content:
        epoch, step = re.findall(r"-(\d+)_(\d+)\.", content)[0]
        saved = {"last_epoch": int(epoch), "last_step": int(step), "last_ckpt_file": content}
        path.write_text(json.dumps(saved))
    elif content == "strategy":
        shutil.copy(STRATEGY, path)
    elif not name.endswith("/"):
        tensor = "w" if content == "whole" else name
        path.write_bytes(b"\xff" if content == "damage" else record(tensor))
    if path.is_file():
        os.utime(path, (SECONDS, SECONDS))


def lay(root, line):
    """Write the files of a line, or set the time of those that are there: ``@SECONDS FILE``."""
    seconds, *paths = line.split() if line.startswith("@") else ["", *line.split()]
    for path in (path for word in paths for path in expand(word)):
        if seconds:
            os.utime(root / path, (int(seconds[1:]), int(seconds[1:])))
        else:
            write(root, path)


def describe(root, words):
    """What a scan finds: files by rank, ranks that lack them, step, and notes; or its problems."""
    at = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    try:
        catalog = scan(str(root.joinpath(*at)), SourceOptions(**options))
    except CkptToolError as error:
        for problem in error.diagnostics:
            yield from f"refused, {problem.code}: {problem.text}".splitlines()
        return
    names = {rank: next(iter(file.tensors)) for rank, file in catalog.files.items()}
    if names:
        yield ", ".join(f"{rank}: {name}".replace(" ", "") for rank, name in names.items())
    for what, ranks in (("missing", catalog.missing_ranks), ("damaged", [*catalog.damaged])):
        if ranks:
            yield f"{what} {format_ranks(ranks)}"
    if catalog.step:
        yield f"step {catalog.step}"
    if catalog.strategy_files:
        yield f"strategy {', '.join(catalog.strategy_files)}"
    for problem in catalog.diagnostics:
        yield from f"{problem.code}: {problem.text}".splitlines()


@pytest.mark.parametrize("title", CASES)
def test_what_lies_in_a_folder_is_found(title, tmp_path):
    root = tmp_path / "run"
    root.mkdir()

    def act(line):
        if line.startswith(">"):
            for answer in describe(root, shlex.split(line[1:])):
                yield answer.replace(str(root), "RUN").replace(str(tmp_path), "UP")
            return
        lay(root, line)

    check_case(TEXT, title, act)


def test_a_missing_folder_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        scan(str(tmp_path / "none"))


@pytest.mark.parametrize("name", ["card{}/net.ckpt", "part{}.h5"])
@pytest.mark.parametrize("is_written", [False, True])
def test_a_file_that_a_training_writes_beside_another_says_nothing_of_it(
    tmp_path, monkeypatch, name, is_written
):
    folder = tmp_path / "a" / "folder" / "below"  # folders of tests have numbers, as those of ranks
    paths = [folder / name.format(number) for number in (0, 1)]
    suffix = {".ckpt": "ckpt", ".h5": "hdf5"}[paths[0].suffix]
    for path, value in zip(paths, (b"\x01", b"\x02"), strict=True):
        write_file(path, {"w": Entry("Float32", (2,), 8 * value)}, suffix)

    def read_and_write(names, *options):
        for index in read_indexes(names, *options):
            if is_written and index.path == str(paths[1]):
                with paths[1].open("ab") as file:
                    file.write(b"more")
            yield index

    read_indexes = siblings.read_indexes
    monkeypatch.setattr(siblings, "read_indexes", read_and_write)
    assert bool(scan(str(paths[0])).one_of_several) != is_written


@pytest.mark.parametrize(
    ("name", "ranks_of_a_host"),
    [
        ("LOG{rank}/ckpt_{rank}/net-3_5.ckpt", 1),
        ("node-{host}/rank_{rank}/net-3_5.ckpt", 4),
        ("node_{host}/device{rank}/ckpt_{rank}/net-3_5.ckpt", 4),
        ("10.0.{host}.7/rank_{rank}/net_rank_{rank}-3_5.ckpt", 2),
        ("gpu-{host}/output/checkpoint/rank_{rank}/net-3_5.ckpt", 3),
        ("worker{host}/proc{local}/ckpt_{rank}/net-3_5.ckpt", 2),
        ("pod-{host}/net_rank_{rank}-3_5.ckpt", 5),
        ("card{rank}/net-3_5.ckpt", 1),
        ("host{host}/net_{rank}-3_5.ckpt", 2),
        ("gpu-{host}/w{rank:03}.ckpt", 4),
        ("process_{rank:02}/saved/x_{rank}.ckpt", 1),
        ("{rank}/x.ckpt", 1),
        ("rank_{rank}/ckpt/net-3_5.ckpt", 1),
        ("rank_{rank}/out/code-13B7_{rank}_1-3_5.ckpt", 1),
    ],
)
def test_folders_of_different_ranks_are_one_checkpoint(make_run, name, ranks_of_a_host):
    names = [
        name.format(rank=r, host=r // ranks_of_a_host, local=r % ranks_of_a_host)
        for r in range(ranks_of_a_host * 12)
    ]
    assert found(make_run(*names, "log/train.txt")) == dict(enumerate(names))
