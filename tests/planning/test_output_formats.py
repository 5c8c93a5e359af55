"""What an output is: its format, as asked for and as its name promises."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import ckpttool
from ckpttool.planning.plans import choose_format
from tests.support.commands import message, run, run_well
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.readers import read

SOURCE = SAMPLES / "files" / "crc.ckpt"


@pytest.mark.parametrize("name", ["m.ckpt", "m.safetensors", "m.h5"])
def test_a_file_has_the_format_that_its_ending_promises(name, tmp_path):
    path = str(tmp_path / name)
    ckpttool.execute(*ckpttool.plan_merge(ckpttool.scan(str(SOURCE)), None, path))
    read_back = ckpttool.scan(path)
    assert read_back.files[0].format == {"h5": "hdf5"}.get(name[2:], name[2:])
    assert read(Path(path)).keys() == read(SOURCE).keys()


@pytest.mark.parametrize(
    ("path", "asked", "chosen"),
    [
        ("m.ckpt", "ckpt", "ckpt"),
        ("m", None, "hdf5"),
        ("m", "safetensors", "safetensors"),
        ("step_1.5", None, "hdf5"),
        ("m.weights", "hdf5", "hdf5"),
    ],
)
def test_what_is_asked_for_counts_where_the_name_promises_nothing(path, asked, chosen):
    assert choose_format(path, asked) == chosen


@pytest.mark.parametrize(
    ("path", "how", "reason"),
    [
        ("m.ckpt", {"format": "hdf5"}, "ends like ckpt, but --format says hdf5"),
        ("m.pth", {}, "no format has this ending"),
        ("m.safetensors", {"max_shard_bytes": 1000}, "ends like a file"),
    ],
)
def test_a_name_that_promises_another_format_is_refused(path, how, reason, tmp_path):
    with pytest.raises(ckpttool.PlanError, match=reason):
        ckpttool.plan_merge(
            ckpttool.scan(str(SOURCE)),
            None,
            str(tmp_path / path),
            output_options=ckpttool.OutputOptions(**how),
        )
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("in.ckpt", "in.ckpt: is an input of this run; write somewhere else"),
        ("link.ckpt", "link.ckpt: is an input of this run; write somewhere else"),
        ("pipe.ckpt", "pipe.ckpt: is a device or a pipe; name a file to be written"),
        ("folder.ckpt", "folder.ckpt: is a folder; name the file to be written"),
    ],
)
def test_what_overwrite_would_not_replace_is_not_said_to_be_replaced(
    output, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copy(SOURCE, "in.ckpt")
    Path("in.ckpt.ckpttool.json").touch()
    Path("link.ckpt").symlink_to("in.ckpt")
    Path("folder.ckpt").mkdir()
    os.mkfifo("pipe.ckpt")
    result = run("merge", "in.ckpt", "-o", output)
    assert (result.exit_code, result.stderr) == (5, f"ckpttool: {said}\n")


def test_outputs_that_are_all_inputs_are_told_together_and_before_what_exists(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(GOLDEN / "reshard_8_to_4" / "src", "src")
    strategies = [GOLDEN / "reshard_8_to_4" / f"{side}_strategy.ckpt" for side in ("src", "dst")]
    words = ["-s", strategies[0], "-d", strategies[1], "--format", "ckpt"]
    run_well("reshard", "src", *words, "-o", "new")
    result = run("reshard", "new", "-s", strategies[1], *words[2:], "-o", "new")
    start = "4 outputs are inputs of this run (new/rank_0/checkpoint_0.ckpt, "
    assert start in message(result)
    assert message(result).count("write somewhere else") == 1
    assert "--overwrite" not in message(result)


def test_what_is_wrong_is_told_before_that_an_output_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = GOLDEN / "reshard_8_to_4"
    words = ["reshard", case / "src", "-s", case / "src_strategy.ckpt"]
    words += ["-d", case / "dst_strategy.ckpt", "-o", "out"]
    run_well(*words)
    Path("out/rank_1/checkpoint_1.h5").write_text("changed")
    result = run(*words, "--resume")
    first, second, third = result.stderr.splitlines()
    assert first == "ckpttool: 2 problems:"
    assert "out/rank_1/checkpoint_1.h5: not what out/ckpttool.json says was written" in second
    assert "4 outputs exist already" in third
