"""``merge --virtual``: h5py and h5dump read what a merge writes, from the files of the ranks."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import h5py
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import ckpttool
from ckpttool.formats.hdf5 import SHARDS, VIRTUAL
from ckpttool.model.layout import Layout
from ckpttool.model.shown_extents import join_extents
from ckpttool.model.strategy import join_stages
from ckpttool.model.tensors import Extent, TensorMeta
from tests.strategies import examples, moves
from tests.support.checkpoints import cut, noise, write_ranks
from tests.support.commands import everything, message, refused, run, run_well
from tests.support.corpus import GOLDEN, a_third, conversions
from tests.support.programs import need
from tests.support.readers import read_hdf5

ROWS = join_stages({0: dict.fromkeys("we", Layout((2,), ((0,), ())))})
CASE = GOLDEN / "layout_multi_axis_optshard"


@pytest.fixture
def src(tmp_path):
    """A checkpoint of eight ranks: one tensor is cut into rows, one across its columns."""
    shutil.copytree(CASE / "src", tmp_path / "src")
    shutil.copy(CASE / "src_strategy.ckpt", tmp_path / "strategy.ckpt")
    return tmp_path / "src"


def show(src, *words):
    """Write the virtual file of a checkpoint beside it, and return its path."""
    out = src.parent / "virtual.h5"
    run_well("merge", src, "-s", src.parent / "strategy.ckpt", "-o", out, "--virtual", *words)
    return out


def read_shown(path):
    """The tensors of a virtual file as h5py reads them."""
    entries = read_hdf5(path)
    return {name: it for name, it in entries.items() if not name.startswith(f"{SHARDS}/")}


# ---------------------------------------------------------------------------------- what is shown


MERGES = {case.case: case for case in conversions("merge")}


@pytest.mark.parametrize("case", a_third(MERGES))
def test_h5py_reads_what_the_merge_writes(case, tmp_path):
    case = MERGES[case]
    words = ["merge", case.folder / case.source]
    words += ["-s", case.folder / case.src_strategy] if case.src_strategy else []
    merged = run(*words, "-o", tmp_path / "merged.h5")
    if merged.exit_code:
        assert run(*words, "-o", tmp_path / "virtual.h5", "--virtual").exit_code
        return
    run_well(*words, "-o", tmp_path / "virtual.h5", "--virtual")
    shown = read_shown(tmp_path / "virtual.h5")
    assert [*shown.items()] == [*read_hdf5(tmp_path / "merged.h5").items()]
    run_well("diff", tmp_path / "virtual.h5", tmp_path / "merged.h5")


@pytest.mark.filterwarnings("ignore::ckpttool.CkptToolWarning")  # a rank may hold nothing
@examples(60)
@given(moves(), st.sampled_from(["ckpt", "hdf5"]))
def test_any_layout_is_shown_and_read_back(new_folder, move, format):
    folder = new_folder()
    write_ranks(folder / "src", cut(move.entries, move.src), format)
    try:
        ckpttool.merge(folder / "src", move.src, folder / "merged.h5", virtual=True)
    except ckpttool.CkptToolError as error:
        assume("HDF5" in str(error))  # a name that it cannot hold beside another
        raise
    assert read_shown(folder / "merged.h5") == move.entries
    ckpttool.merge(folder / "merged.h5", None, folder / "copy.h5")
    assert read_hdf5(folder / "copy.h5") == move.entries


def test_h5dump_reads_it(src):
    need("h5dump")
    out = show(src)
    run_well("merge", src, "-s", src.parent / "strategy.ckpt", "-o", src.parent / "merged.h5")
    for name in ("w1", "w2", "adam_m.w1"):
        printed = [
            subprocess.run(
                ["h5dump", "-y", "-d", f"/{name}", path.name],
                cwd=src.parent,
                check=True,
                capture_output=True,
            ).stdout.split(b"\n", 1)[1]
            for path in (out, src.parent / "merged.h5")
        ]
        assert printed[0] == printed[1], name


def test_inspect_and_open_show_where_the_slices_lie(src):
    document = json.loads(run_well("inspect", show(src), "--json").stdout)
    direct = json.loads(
        run_well("inspect", src, "-s", src.parent / "strategy.ckpt", "--json").stdout
    )
    assert [it["name"] for it in document["tensors"]] == [it["name"] for it in direct["tensors"]]
    model = ckpttool.open(src.parent / "virtual.h5")
    with h5py.File(src.parent / "virtual.h5") as file:
        for name in ("w1", "w2"):
            assert (model[name][3:9] == file[name][3:9]).all()


def test_a_virtual_file_of_a_virtual_file_names_the_same_files(src):
    out = show(src)
    run_well("merge", out, "-o", src.parent / "again.h5", "--virtual")
    out.unlink()
    assert read_shown(src.parent / "again.h5").keys() >= {"w1", "w2"}


def test_what_has_no_bytes_is_of_no_further_rank(tmp_path):
    entries = {"w": noise("w", "Float32", (4, 2)), "e": noise("e", "Float32", (0, 2))}
    write_ranks(tmp_path / "src", cut(entries, ROWS), "ckpt")
    ckpttool.merge(tmp_path / "src", ROWS, tmp_path / "v.h5", virtual=True)
    assert len(ckpttool.scan(tmp_path / "v.h5").files) == 2
    assert "describes its slices itself" in message(run("convert", tmp_path / "v.h5", "-o", "c.h5"))


def test_paths_are_absolute(src, monkeypatch):
    monkeypatch.chdir(src.parent)
    run_well("merge", "src", "-s", "strategy.ckpt", "-o", "virtual.h5", "--virtual")
    monkeypatch.chdir("/")
    assert read_shown(src.parent / "virtual.h5")["w1"].shape == (32, 64)


# --------------------------------------------------------------------- sources that have changed


def change(path):
    os.utime(path, ns=(1, 1))


def cut_short(path):
    os.truncate(path, 100)


@pytest.mark.parametrize(
    ("damage", "what"),
    [(change, "have changed"), (cut_short, "have changed"), (Path.unlink, "gone")],
)
def test_files_that_changed_since_are_an_error(src, damage, what):
    out = show(src)
    (path,) = (src / "rank_3").glob("*.ckpt")
    damage(path)
    for words in (["inspect", out], ["verify", out], ["diff", out, out], ["merge", out, "-o", "x"]):
        result = run(*words)
        assert result.exit_code
        assert f"{what}: 1 of 8" in message(result)
        assert str(path) in everything(result)


def test_libhdf5_raises_where_a_file_is_gone_and_reads_zeros_where_one_is_short(src):
    """The reason for the stamps; libhdf5 1.14 and 2.0 do the same."""
    out = show(src)
    (path,) = (src / "rank_3").glob("*.ckpt")
    cut_short(path)
    with h5py.File(out) as file:
        assert (file["w1"][()] == 0).any()
    path.unlink()
    with h5py.File(out) as file, pytest.raises(OSError, match="external"):
        file["w1"][()]


# -------------------------------------------------------------------------------- how it is written


def test_it_is_read_only_and_small_and_has_no_manifest(src):
    mask = os.umask(0o027)
    out = show(src)
    os.umask(mask)
    assert stat.S_IMODE(out.stat().st_mode) == 0o440
    assert {path.name for path in src.parent.iterdir()} == {"src", "strategy.ckpt", out.name}
    assert "exists already" in message(
        run("merge", src, "-s", src.parent / "strategy.ckpt", "-o", out, "--virtual")
    )


def test_it_takes_the_place_of_a_merged_file_and_the_other_way(src):
    words = ("merge", src, "-s", src.parent / "strategy.ckpt", "-o", src.parent / "virtual.h5")
    run_well(*words)
    show(src, "--overwrite")
    run_well("verify", src.parent / "virtual.h5", "--deep")
    run_well(*words, "--overwrite")
    run_well("verify", src.parent / "virtual.h5", "--deep")
    assert read_hdf5(src.parent / "virtual.h5").keys() >= {"w1", "w2"}


def test_a_dry_run_names_its_size(src):
    dry = json.loads(show_dry(src))
    assert not (src.parent / "virtual.h5").exists()
    assert dry["dst_bytes"] == show(src).stat().st_size
    assert dry["dry_run"]["reads"]["data"]["nbytes"] == 0


def show_dry(src):
    out = src.parent / "virtual.h5"
    words = ("-s", src.parent / "strategy.ckpt", "-o", out, "--virtual", "--dry-run", "--json")
    return run_well("merge", src, *words).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dtype", "bf16"], "cannot show 2 tensors: other values than in the files"),
        (["--pad-vocab", "40", "--vocab", "w1"], "cannot show .* tensors?: "),
        (["--crc"], "omit --crc"),
        (["--part", "1/2"], "omit --part"),
        (["--max-shard-size", "1MB"], "Try: omit --max-shard-size"),
        (["--format", "ckpt"], "suffix"),
        (["--resume"], "omit --resume"),
    ],
)
def test_what_it_cannot_show_is_refused(src, words, said):
    strategy = src.parent / "strategy.ckpt"
    refused(src, 5, said, options=["-s", strategy, "--virtual", *words])


def test_encrypted_files_cannot_be_shown(tmp_path):
    shutil.copytree(GOLDEN / "encrypted_gcm" / "src", tmp_path / "src")
    strategy = GOLDEN / "encrypted_gcm" / "src_strategy.ckpt"
    key = tmp_path / "key"
    key.write_bytes(b"0123456789ABCDEF")
    words = ["-s", strategy, "--virtual", "--dec-key-file", key]
    refused(tmp_path / "src", 5, "in an encrypted file", options=words)


@pytest.mark.parametrize("segments", [[4, 20], [30], [8]])
def test_rows_in_parts_are_no_shards(segments):
    meta = TensorMeta("w", "Float32", (2, 3))
    of = [(str(number), Extent(0, nbytes)) for number, nbytes in enumerate(segments)]
    with pytest.raises(ValueError, match="rows in parts"):
        [*join_extents(meta, of)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "its list of files is damaged"),
        ('{"a": 1}', "its list of files is damaged"),
        ("{}", "it shows files that it does not list"),
    ],
)
def test_a_damaged_list_of_files_is_an_error(src, text, said):
    out = show(src)
    out.chmod(0o644)
    with h5py.File(out, "r+") as file:
        file.attrs[VIRTUAL] = text
    result = run("inspect", out)
    assert result.exit_code == 3
    assert said in message(result)
