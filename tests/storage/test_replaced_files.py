"""A path that leads elsewhere in the middle of a run: what is opened is held against the plan."""

from __future__ import annotations

import os
import pickle
import shutil
from concurrent.futures import Executor
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool import formats
from ckpttool.concurrency import InlineExecutor
from ckpttool.execution import cluster
from ckpttool.execution.cluster import RemoteFile, write_file
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.execute import execute
from ckpttool.execution.executors import open_engine
from ckpttool.execution.schedule import Batch
from ckpttool.formats import read_index
from ckpttool.formats.encryption import find_forged
from ckpttool.formats.header_cache import HeaderCache
from ckpttool.formats.weight_index import index_text
from ckpttool.model.plan import OutputTensor
from ckpttool.model.tensors import FileStamp
from ckpttool.problems import CkptToolError, PlanError
from ckpttool.storage import files
from ckpttool.storage.checksums import compute_checksum
from ckpttool.storage.compare import compare_tensors
from ckpttool.storage.files import PartialFile
from ckpttool.storage.sampling import digest, hash_units, nearness, take_samples
from tests.support.checkpoints import noise, write_ranks
from tests.support.checkpoints import write_file as write_checkpoint
from tests.support.corpus import GOLDEN
from tests.support.plans import plan_merge
from tests.support.readers import Entry, read_ranks

CASE = GOLDEN / "tutorial_8_to_8_retrain"
OTHER = "the path leads to another file than when its header was read"


class Link:
    """A link to one of two folders that hold files of the same names, sizes and times."""

    def __init__(self, folder: Path, format: str = "ckpt") -> None:
        ranks = read_ranks(CASE / "src")
        others = {
            rank: {name: noise(f"{name}!", *entry[:2]) for name, entry in entries.items()}
            for rank, entries in ranks.items()
        }
        self.path = folder / "link"
        for name, entries in (("a", ranks), ("b", others)):
            for path in write_ranks(folder / name, entries, format).rglob("net.*"):
                os.utime(path, ns=(10**18, 10**18))
        self.to("a")

    def to(self, name: str) -> None:
        self.path.unlink(missing_ok=True)
        self.path.symlink_to(name)

    def catalog(self):
        return ckpttool.scan(str(self.path))


class Flipping(Executor):
    """Has the link lead elsewhere while a call is carried out, and back behind it."""

    def __init__(self, inner: Executor, link: Link) -> None:
        self.inner, self.link = inner, link

    def submit(self, function, /, *arguments, **words):
        self.link.to("b")
        future = self.inner.submit(function, *arguments, **words)
        future.exception()
        self.link.to("a")
        return future


@pytest.fixture
def link(tmp_path):
    return Link(tmp_path)


def merge_plan(link, tmp_path):
    strategy = ckpttool.read_strategy([str(CASE / "src_strategy.ckpt")])
    return plan_merge(link.catalog(), strategy, str(tmp_path / "out.ckpt"))


@pytest.mark.parametrize("engine", ["inline", "threads:2", "processes:2"])
@pytest.mark.parametrize("format", ["ckpt", "safetensors", "hdf5"])
def test_a_link_that_leads_elsewhere_and_back_ends_the_run(engine, format, tmp_path):
    link = Link(tmp_path, format)
    plan, destination = merge_plan(link, tmp_path)
    with open_engine(engine) as executor, pytest.raises(ckpttool.ExecutionError, match=OTHER):
        execute(plan, destination, Flipping(executor, link))
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out.ckpt")]
    with open_engine(engine) as executor:
        execute(plan, destination, executor)


def test_a_worker_on_another_host_finds_it_too(link, tmp_path):
    plan, _ = merge_plan(link, tmp_path)
    (output,) = plan
    remote = RemoteFile(output)
    task = pickle.loads(pickle.dumps(remote.task(Batch((output,), CopyOptions()))))
    link.to("b")
    with pytest.raises(CkptToolError, match=OTHER):
        write_file(task)
    link.to("a")
    remote.attempt = write_file(task).attempt
    remote.seal(HeaderCache())
    remote.rename()


def test_a_folder_that_is_renamed_is_found(tmp_path):
    link = Link(tmp_path)
    plan, destination = merge_plan(link, tmp_path)
    (tmp_path / "a" / "rank_3").rename(tmp_path / "a" / "old")
    shutil.copytree(tmp_path / "b" / "rank_3", tmp_path / "a" / "rank_3")
    with pytest.raises(PlanError, match=r"link/rank_3/net.ckpt: replaced since its"):
        execute(plan, destination)


def tensor_of(link):
    return link.catalog().files[3].tensors["layer1.weight"]


READERS = {
    "samples": lambda tensor: take_samples([tensor]),
    "digest": lambda tensor: digest(tensor),
    "hashes": hash_units,
    "nearness": lambda tensor: nearness((tensor, tensor)),
    "comparison": lambda tensor: list(
        compare_tensors([(0, [OutputTensor.copy_of(tensor)])], InlineExecutor())
    ),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_every_reader_of_contents_finds_it(read, link):
    tensor = tensor_of(link)
    read(tensor)
    link.to("b")
    with pytest.raises(PlanError, match=OTHER):
        read(tensor)


@pytest.mark.parametrize("case", ["crc_check", "safetensors_crc"])
def test_checksums_are_of_the_file_that_is_meant(case, tmp_path):
    paths = [next((GOLDEN / case / "src" / f"rank_{rank}").iterdir()) for rank in (0, 1)]
    path = tmp_path / paths[0].name
    path.symlink_to(paths[0])
    index = read_index(str(path))
    assert str(compute_checksum(index)) == index.attrs["crc_num"]
    path.unlink()
    path.symlink_to(paths[1])
    with pytest.raises(PlanError, match=OTHER):
        compute_checksum(index)


def test_tags_are_of_the_file_that_is_meant(tmp_path):
    folder = GOLDEN / "encrypted_gcm" / "src"
    paths = [next((folder / f"rank_{rank}").iterdir()) for rank in (0, 1)]
    index = read_index(str(paths[0]), b"0123456789ABCDEF")
    shutil.copy(paths[0], tmp_path / "net.ckpt")
    with pytest.raises(PlanError, match=OTHER):
        find_forged(replace(index.file, path=str(tmp_path / "net.ckpt")), index.cipher, 0, 1)


@pytest.mark.parametrize("format", ["ckpt", "safetensors", "hdf5"])
def test_the_stamp_is_that_of_the_file_whose_header_was_read(format, tmp_path, monkeypatch):
    link = Link(tmp_path, format)
    path = next(link.path.glob("rank_3/*"))
    known = formats._find_format

    def find(name):
        found = known(name)
        link.to("b")
        return found

    monkeypatch.setattr(formats, "_find_format", find)
    index = read_index(str(path))
    there = next((tmp_path / "b").glob("rank_3/*")).stat()
    stamp = FileStamp(there.st_size, there.st_mtime_ns, there.st_ctime_ns, there.st_ino)
    assert index.file.stamp == stamp
    assert {tensor.file.stamp for tensor in index.tensors.values()} == {stamp}


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mindformers/2.0.0_balanced/iteration_00000003", "metadata.json"),
        ("hyper_parallel/ms_two_axes/ckpt", ".metadata"),
        (None, "param_name_map.json"),
    ],
)
def test_metadata_and_indexes_that_change_after_the_scan_are_named(case, name, tmp_path):
    folder = tmp_path / "src"
    if case is None:
        entries = {"w": Entry("Float32", (2,), bytes(8))}
        write_checkpoint(folder / "part0.safetensors", entries, "safetensors")
        (folder / name).write_text(index_text({"w": "part0.safetensors"}, 8))
    else:
        shutil.copytree(GOLDEN / case, folder)
    plan, destination = plan_merge(ckpttool.scan(str(folder)), None, str(tmp_path / "m.h5"))
    document = folder / name
    document.write_bytes(document.read_bytes())
    with pytest.raises(PlanError, match=f"src/{name}: changed since its header was read"):
        execute(plan, destination)


class Planting(Executor):
    """Plants a file before a worker's call of that name."""

    def __init__(self, inner: Executor, name: str, plant) -> None:
        self.inner, self.name, self.plant = inner, name, plant

    def submit(self, function, /, *arguments, **words):
        if function.func.__name__ == self.name:
            self.plant()
        return self.inner.submit(function, *arguments, **words)


def planted_after(real, plant):
    def call(*arguments):
        made = real(*arguments)
        plant()
        return made

    return call


def planted_before(real, plant):
    return lambda *arguments: (plant(), real(*arguments))[1]


@pytest.mark.parametrize("kind", [os.symlink, os.link])
@pytest.mark.parametrize("engine", ["inline", "threads:2", "processes:2"])
@pytest.mark.parametrize(
    ("moment", "format"),
    [
        *product(
            ["claim", "fill", "seal", "verify_header", "rename"], ["ckpt", "safetensors", "hdf5"]
        ),
        ("compute_checksum", "ckpt"),  # HDF5 has no place for one
        ("compute_checksum", "safetensors"),
    ],
)
def test_a_file_planted_under_a_temporary_name_is_not_written(
    moment, format, engine, kind, tmp_path, monkeypatch
):
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs" * 100_000)
    before = theirs.stat()
    out = tmp_path / f"out{formats.suffix_of(format)}"
    partial = tmp_path / f"{out.name}.partial"

    def plant():
        if partial.exists():  # and not only that of the plan
            partial.unlink()
            kind(theirs, partial)

    if moment == "claim":
        monkeypatch.setattr(files, "claim", planted_after(files.claim, plant))
    elif moment == "verify_header":
        monkeypatch.setattr(files, "verify_header", planted_before(files.verify_header, plant))
    elif moment == "seal":
        kind_of = type(formats.get_format(format))
        monkeypatch.setattr(kind_of, "seal", planted_before(kind_of.seal, plant))
    elif moment == "rename":
        rename = planted_before(PartialFile.rename, plant)
        monkeypatch.setattr(PartialFile, "rename", rename)
    options = ckpttool.OutputOptions(crc=format != "hdf5")
    plan, destination = plan_merge(
        ckpttool.scan(str(CASE / "src")),
        ckpttool.read_strategy([str(CASE / "src_strategy.ckpt")]),
        str(out),
        output_options=options,
    )
    with open_engine(engine) as executor, pytest.raises(ckpttool.ExecutionError) as caught:
        execute(plan, destination, Planting(executor, moment, plant))
    said = "a link or another file has taken the place"
    if moment in ("seal", "rename"):
        said = "another run is writing"
    assert said in str(caught.value)
    assert theirs.read_bytes() == b"theirs" * 100_000
    assert theirs.stat().st_mtime_ns == before.st_mtime_ns
    assert not out.exists()
    assert partial.samefile(theirs)  # not ours to remove


@pytest.mark.parametrize("kind", [os.symlink, os.link])
def test_a_file_planted_under_the_name_of_an_attempt_is_not_written(
    kind, link, tmp_path, monkeypatch
):
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs" * 100_000)

    def fill(task):
        path = Path(task.units[0].tensor.file.path)
        path.unlink()
        kind(theirs, path)
        return real(task)

    real = cluster.fill
    monkeypatch.setattr(cluster, "fill", fill)
    plan, _ = merge_plan(link, tmp_path)
    (output,) = plan
    remote = RemoteFile(output)
    with pytest.raises(CkptToolError, match="a link or another file has taken the place"):
        write_file(remote.task(Batch((output,), CopyOptions())))
    remote.discard()
    assert theirs.read_bytes() == b"theirs" * 100_000


@pytest.mark.parametrize("kind", [os.symlink, os.link])
def test_a_file_planted_for_the_manifest_is_neither_written_nor_renamed(
    kind, link, tmp_path, monkeypatch
):
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")

    def claim(path):
        fd = real(path)
        if path.name == "out.ckpt.ckpttool.json.partial":
            path.unlink()
            kind(theirs, path)
        return fd

    real = files.claim
    monkeypatch.setattr(files, "claim", claim)
    with pytest.raises(ckpttool.ExecutionError, match="another run is writing this output"):
        execute(*merge_plan(link, tmp_path))
    assert theirs.read_bytes() == b"theirs"
    assert not (tmp_path / "out.ckpt.ckpttool.json").exists()
