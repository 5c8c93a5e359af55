"""A run that is killed at any moment is continued to the bytes of one that nobody disturbed.

``CKPTTOOL_KILLS=50 pytest -s tests/crash/test_kills.py`` does so 50 times for each format and
engine, with up to two more kills of the runs that continue it, and shows how far each had come.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest

from tests.support.commands import files_below
from tests.support.executors import (
    COMMAND,
    FORMATS,
    contents,
    environment,
    everything_in,
    finish,
    start,
    wait_until,
    write_source,
)
from tests.support.manifests import LOG, MANIFEST

pytestmark = pytest.mark.crash

RANKS, RANK_BYTES = 8, 6 << 20
KILLS = int(os.environ.get("CKPTTOOL_KILLS", "0"))


def split_words(source, folder, output_format, engine):
    words = ["split", source / "m.ckpt", "-d", source / "s.json", "-o", folder]
    return [*COMMAND, *map(str, words), "--format", output_format, "--engine", engine]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    # Deep in it: the numbers of two processes that test side by side look like those of ranks.
    (deep := folder / "of" / "both").mkdir(parents=True)
    source = write_source(deep / "source", RANKS, RANK_BYTES)
    known = {}

    def look(output_format, engine):
        if (output_format, engine) not in known:
            out = source.parent / output_format / engine
            process = start(*split_words(source, out, output_format, engine))
            wait_until((out / LOG).exists, "the run")
            began = time.monotonic()
            assert finish(process)[0] == 0
            known[output_format, engine] = everything_in(out), time.monotonic() - began
        return source, *known[output_format, engine]

    return look


def place_of(source, name):
    return source.parent / "killed" / name


def run_and_kill(words, out, lines, seconds):
    """Start a run, and kill it so many seconds after its log has so many lines."""
    env = environment()
    process = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, manifest = out / LOG, out / MANIFEST

    def is_time():
        try:
            return log.read_bytes().count(b"\n") >= lines
        except FileNotFoundError:
            return manifest.exists() or process.poll() is not None

    wait_until(is_time, "the run")
    time.sleep(seconds)
    process.kill()
    process.wait()


@pytest.mark.parametrize("output_format", FORMATS)
@pytest.mark.parametrize(("engine", "few"), [("threads:2", 5), ("processes:2", 2)])
def test_a_run_that_is_killed_is_continued_to_the_same_bytes(
    undisturbed, output_format, engine, few
):
    source, expected, seconds = undisturbed(output_format, engine)
    moments = random.Random(f"{output_format} {engine}")
    states = []
    for number in range(KILLS or few):
        out = place_of(source, f"{output_format}-{engine}-{number}")
        words = split_words(source, out, output_format, engine)
        for more in ([], *[["--resume"]] * moments.randrange(3)):  # and what continues it, too
            lines, later = moments.randrange(2 * RANKS + 2), moments.uniform(0, seconds / RANKS)
            run_and_kill([*words, *more], out, lines, later)
            left = contents(out)
            whole = {name for name in left if name in expected}
            assert {name: left[name] for name in whole} == {name: expected[name] for name in whole}
            assert (out / MANIFEST).exists() <= (len(whole) == RANKS)
            states.append(len(whole))
        code, errors = finish(start(*words, "--resume"))
        assert code == 0, errors
        assert everything_in(out) == expected
        for name in files_below(out):
            (out / name).unlink()
    sys.stdout.write(f"{output_format} {engine}: complete when killed: {sorted(states)}\n")


def test_a_run_that_is_killed_and_begun_anew_leaves_nothing_behind(undisturbed):
    source, expected, seconds = undisturbed("ckpt", "threads:2")
    out = place_of(source, "anew")
    words = split_words(source, out, "ckpt", "threads:2")
    run_and_kill(words, out, RANKS, seconds / RANKS)
    more = ["--overwrite"] if (out / MANIFEST).exists() else []
    code, errors = finish(start(*words, *more))
    assert code == 0, errors
    assert everything_in(out) == expected
