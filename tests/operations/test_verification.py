"""``verify``: every kind of trouble is found, named and located, and what is ordinary is not."""

import json
import struct

import numpy as np
import pytest

from ckpttool.model.layout import Layout
from ckpttool.model.slicing import LayoutSlicing
from ckpttool.storage.numbers import decode
from tests.support.checkpoints import cut, strategy_of, write_file, write_ranks
from tests.support.commands import run, stay_small
from tests.support.readers import Entry, entry_of
from tests.support.reports import check, ranks_of, the_finding, verify, whole


def numbers(shape, values, fill=1.0):
    array = np.full(shape, fill, "<f4")
    for place, value in values.items():
        array[place] = value
    return entry_of(array)


# ------------------------------------------------------------------------------- what is ordinary


@pytest.mark.parametrize("format", ["ckpt", "safetensors", "hdf5"])
@pytest.mark.parametrize("deep", [False, True])
def test_nothing_is_wrong_with_a_whole_checkpoint(tmp_path, format, deep):
    report = check(tmp_path, ranks_of(whole()), format=format, deep=deep)
    assert not report.findings
    assert not report.notes
    assert (report.ranks, report.tensors) == ((0, 1, 2, 3), 4)


# ----------------------------------------------------------------------------------- from the data


def test_to_locate_nan_in_every_slice_takes_no_look_at_all_the_others(tmp_path, monkeypatch):
    ranks = 32
    strategy = strategy_of({"w": Layout((ranks,), ((0,),))})
    entries = {"w": numbers((ranks,), {rank: float("nan") for rank in range(ranks)})}
    write_ranks(tmp_path, cut(entries, strategy), "ckpt")
    looks = []
    find_slice = LayoutSlicing.find_slice
    monkeypatch.setattr(
        LayoutSlicing,
        "find_slice",
        lambda mine, index: looks.append(index) or find_slice(mine, index),
    )
    (finding,) = verify(tmp_path, strategy, deep=True).findings
    assert (finding.code, finding.count, finding.first) == ("nan", ranks, (0,))
    assert len(looks) < 10 * ranks


@pytest.mark.parametrize(
    ("dtype", "word", "kind"),
    [
        ("Float16", b"\x01\x7c", "nan"),
        ("Float16", b"\x00\xfc", "infinite"),
        ("BFloat16", b"\x81\xff", "nan"),
        ("BFloat16", b"\x80\x7f", "infinite"),
        ("Float32", b"\x01\x00\x80\x7f", "nan"),  # signals
        ("Float64", b"\0\0\0\0\0\0\xf0\xff", "infinite"),
        ("Float8E4M3FN", b"\xff", "nan"),
        ("Float8E5M2", b"\x7d", "nan"),
        ("Float8E5M2", b"\xfc", "infinite"),
        ("HiFloat8", b"\x80", "nan"),
        ("HiFloat8", b"\xef", "infinite"),
        ("Complex64", struct.pack("<ff", 1, float("nan")), "nan"),
        ("Complex128", struct.pack("<dd", float("inf"), 0), "infinite"),
    ],
)
def test_every_type_has_its_own_nan_and_infinity(tmp_path, dtype, word, kind):
    one = {1: b"\x38", 2: b"\x00\x3c", 4: b"\0\0\x80\x3f", 8: bytes(8), 16: bytes(16)}[len(word)]
    data = one * 5 + word + one * 6
    assert np.isfinite(decode(np.frombuffer(one, np.uint8), dtype)).all()
    write_file(tmp_path / "m.ckpt", {"w": Entry(dtype, (3, 4), data)}, "ckpt")
    found = the_finding(verify(str(tmp_path / "m.ckpt"), deep=True), kind, "warning")
    assert (found.tensor, found.count, found.first) == ("w", 1, (1, 1))


@pytest.mark.parametrize("dtype", ["Int64", "UInt8", "Bool", "Int4", "random_op"])
def test_bits_of_integers_are_never_nan(tmp_path, dtype):
    entry = Entry(dtype, (2, 4), b"\xff" * (64 if dtype == "Int64" else 8))
    write_file(tmp_path / "m.ckpt", {"w": entry}, "ckpt")
    assert not verify(str(tmp_path / "m.ckpt"), deep=True).findings


# ------------------------------------------------------------------------------ the command line


def test_a_long_list_is_cut_and_says_so(tmp_path):
    entries = {f"w{i:02}": numbers((2,), {0: float("inf")}) for i in range(60)}
    entries["v"] = numbers((2,), {0: float("nan")})
    write_file(tmp_path / "m.ckpt", entries, "ckpt")
    text = run("verify", tmp_path / "m.ckpt", "--deep", "--limit", "1").stdout
    assert text.splitlines()[1:] == [
        "warning[infinite]: elements are infinite: 60 tensors",
        "  w00, w01, w02 and 57 more; 1 of 2 elements; rank 0; first at (0,); --json lists each",
        "and 1 more (--limit N shows N, --json all)",
    ]
    text = run("verify", tmp_path / "m.ckpt", "--deep", "--limit", "0").stdout
    assert text.splitlines()[0].startswith(
        f"warning: {tmp_path}/m.ckpt: 2 warnings (1 file, 61 tensors"
    )
    assert text.splitlines()[1] == "and 2 more (--limit N shows N, --json all)"
    document = json.loads(run("verify", tmp_path / "m.ckpt", "--deep", "--json").stdout)
    assert [one["tensor"] for one in document["findings"]] == [*entries]


def test_names_with_escape_sequences_are_not_printed_raw(tmp_path):
    write_file(tmp_path / "m.ckpt", {"a\x1b[2J": numbers((2,), {0: float("nan")})}, "ckpt")
    result = run("verify", tmp_path / "m.ckpt", "--deep")
    assert "\x1b" not in result.output
    assert r"a\x1b[2J: elements are NaN" in result.stdout


@pytest.mark.big
def test_memory_of_a_deep_look_does_not_grow_with_the_tensor(tmp_path):
    stay_small(tmp_path, "verify", str(tmp_path / "src"), "--deep")
