"""The jobs of merge, split and reshard: the formats and names of their outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpttool
from ckpttool.operations.jobs import choose_format
from tests.support.corpus import GOLDEN, SAMPLES
from tests.support.readers import read

SOURCE = SAMPLES / "files" / "crc.ckpt"
CASE = GOLDEN / "safetensors_pipeline"
SRC = [CASE / "src", "-s", CASE / "src_strategy.ckpt"]


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
    assert choose_format(path, ckpttool.OutputOptions(asked)) == chosen


@pytest.mark.parametrize(
    ("path", "how", "reason"),
    [
        (
            "m.ckpt",
            {"format": "hdf5"},
            r"is that of ckpt, but the format is hdf5\n.*m\.h5, or no --format",
        ),
        ("m.pth", {}, r"the suffix is not that of a format\n  Try: a name that ends in"),
        (
            "m.safetensors",
            {"max_shard_bytes": 1000},
            r"the name is that of a file\n  Try: -o .*/m$",
        ),
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
