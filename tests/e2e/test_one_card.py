"""The folder that ``ModelCheckpoint`` writes on one card: a file for each step, and no ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoints import noise, write_file
from tests.support.commands import message, run, run_well
from tests.support.readers import Entry, read

STEPS = {
    step: {"w": noise(f"w of {step}", "Float32", (3, 4)), "b": noise("b", "Float32", (3,))}
    for step in ("1_2", "2_2", "3_2")
}


@pytest.fixture
def src(tmp_path) -> Path:
    for step, tensors in STEPS.items():
        write_file(tmp_path / "ckpt" / f"net-{step}.ckpt", tensors, "ckpt")
    return tmp_path / "ckpt"


@pytest.mark.parametrize("command", ["merge", "convert"])
@pytest.mark.parametrize(("words", "step"), [((), "3_2"), (("--step", "2_2"), "2_2")])
def test_the_newest_or_the_named_step_is_the_model(src, command, words, step):
    out = src.parent / "out.ckpt"
    result = run_well(command, src, *words, "-o", out)
    assert read(out) == STEPS[step]
    assert ("step 3_2 is read, the newest of 3" in message(result)) == (not words)


def test_all_steps_are_listed(src):
    steps = json.loads(run_well("inspect", src, "--steps", "--json").stdout)["steps"]
    assert [(one["step"], one["complete"]) for one in steps] == [(step, True) for step in STEPS]


def test_steps_are_averaged(src):
    out = src.parent / "out.ckpt"
    run_well("average", src, "--steps", "1..3:2", "-o", out)
    first, last = (np.frombuffer(STEPS[step]["w"].data, "<f4") for step in ("1_2", "3_2"))
    mean = ((first.astype("f8") + last) / 2).astype("<f4")
    assert read(out)["w"] == Entry("Float32", (3, 4), mean.tobytes())


def test_inspect_and_verify_take_the_newest(src):
    assert "1 file, step 3_2" in message(run_well("inspect", src))
    assert message(run_well("verify", src, "--deep")).startswith("OK")


def test_a_damaged_newest_step_is_not_replaced_in_silence(src):
    (src / "net-3_2.ckpt").write_bytes(b"\xff")
    out = src.parent / "out.ckpt"
    result = run("merge", src, "-o", out)
    assert result.exit_code == 3
    assert "--step 2_2" in message(result)
    assert not out.exists()


def test_files_of_other_tensors_are_no_steps(src):
    write_file(src / "net-4_2.ckpt", {"other": noise("other", "Float32", (2,))}, "ckpt")
    result = run("merge", src, "-o", src.parent / "out.ckpt")
    assert result.exit_code == 5
    assert "names differ in the step, but the files hold other tensors" in message(result)
