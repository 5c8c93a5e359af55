"""A dry run says what the run then does: the same tasks, reads, sizes and notes, and nothing else.

The reads of a run are counted where the system is called, for the files of the source.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import ckpttool
from ckpttool.execution import execute as execute_module
from ckpttool.execution import task_costs as estimate_module
from ckpttool.execution.copy import CopyOptions
from ckpttool.execution.schedule import Batch
from ckpttool.formats import get_format
from ckpttool.model.layout import Layout
from ckpttool.model.plan import Plan
from ckpttool.model.tensors import TensorMeta
from ckpttool.operations import run as conversion_module
from ckpttool.storage.files import PARTIAL, write_header
from ckpttool.system import peak_bytes
from tests.e2e.test_golden import CASES, KINDS, command_of, formats_of
from tests.planning.test_lora import LAYOUTS, pair, some, write_adapter
from tests.planning.test_lora import named as adapter_of
from tests.support import corpus
from tests.support.checkpoints import cut, noise, strategy_of, write_holes, write_ranks
from tests.support.commands import SUFFIXES, message, run, run_well
from tests.support.programs import need

CONVERSIONS = {
    f"{conversion.case}-{conversion.kind}": conversion
    for conversion in corpus.conversions(*KINDS)
    if conversion.case in CASES
}


pytestmark = pytest.mark.usefixtures("golden")


def count_one_by_one(monkeypatch):
    alone = property(lambda plan: tuple((rank,) for rank in plan.target.paths))
    monkeypatch.setattr(Plan, "alike", alone)
    find_pattern = estimate_module.find_pattern

    def find(*given):
        return find_pattern(*given)._replace(key=object())

    monkeypatch.setattr(estimate_module, "find_pattern", find)


class Watch:
    """The reads of an execution, by file, and the tasks of a run and of a dry run."""

    def __init__(self, monkeypatch):
        self.reads = Counter()
        self.nbytes = Counter()
        self.filled = []
        self.listed = []
        self.fails_on = None
        self._is_active = False
        for name, size in (("preadv", lambda part: len(part[0])), ("pread", int)):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name), size))
        execute, fill = conversion_module.execute, execute_module.fill
        tasks = Batch.tasks

        def watched(*given, **options):
            with self._active():
                return execute(*given, **options)

        def filled(task):
            if self.fails_on is not None and self.fails_on in task.units[0].tensor.file.path:
                raise OSError(errno.EIO, os.strerror(errno.EIO), task.units[0].tensor.file.path)
            self.filled.append(named(task))
            return fill(task)

        def listed(batch, *given):
            for task in tasks(batch, *given):
                if not self._is_active:
                    self.listed.append(named(task))
                yield task

        monkeypatch.setattr(conversion_module, "execute", watched)
        monkeypatch.setattr(execute_module, "fill", filled)
        monkeypatch.setattr(Batch, "tasks", listed)
        count_one_by_one(monkeypatch)

    def clear(self):
        for counted in (self.reads, self.nbytes, self.filled, self.listed):
            counted.clear()

    @contextmanager
    def _active(self):
        self._is_active = True
        try:
            yield
        finally:
            self._is_active = False

    def _counted(self, call, size):
        def counted(fd, what, *at):
            path = str(Path(f"/proc/self/fd/{fd}").readlink()) if self._is_active else PARTIAL
            if PARTIAL not in path and "/out/" not in path and "memfd:" not in path:
                self.reads[path] += 1
                self.nbytes[path] += size(what)
            return call(fd, what, *at)

        return counted


def named(task):
    """What a task does, in values that do not depend on the files that are open."""
    return (
        task.band_bytes,
        task.wants_crc,
        task.wants_read,
        [
            (
                unit.tensor.file.path,
                unit.tensor.meta,
                unit.tensor.extents,
                unit.cut.number,
                unit.region,
                [
                    (piece.rank, piece.src, piece.tensor)
                    for piece in unit.output.pieces(unit.region)
                ],
            )
            for unit in task.units
        ],
    )


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


def dry(words):
    return json.loads(run_well(*words, "-n", "--json").stdout)


def assert_as_said(watch, words):
    """Do a dry run and the run, and compare them."""
    words = [*words, "--engine", "inline"]
    said = dry(words)
    assert watch.filled == []
    done = json.loads(run_well(*words, "--json").stdout)
    assert [task for task in watch.filled if task not in watch.listed] == []
    assert watch.filled == watch.listed
    takes = said.pop("dry_run")
    assert takes["tasks"] == len(watch.filled)
    data = takes["reads"]["data"]
    assert (data["requests"], data["nbytes"]) == (watch.reads.total(), watch.nbytes.total())
    written = sum(output["nbytes"] for output in done["outputs"] if not output["kept"])
    assert takes["writes"]["headers"] + takes["writes"]["data"] == written
    assert sum(disk["need"] for disk in takes["disks"]) == written
    said["seconds"] = done["seconds"] = 0
    assert said.pop("command").split() == [*done.pop("command").split()[:-1], "-n", "--json"]
    cast, of_run = (document.pop("cast", {}) for document in (said, done))
    assert cast == {key: of_run[key] for key in cast}  # only the run knows what is lost
    assert said == done
    return takes


@pytest.mark.parametrize("name", corpus.a_third(CONVERSIONS, 1))
def test_a_run_does_what_the_dry_run_said(watch, name):
    conversion = CONVERSIONS[name]
    Path("out").mkdir()
    assert_as_said(watch, command_of(conversion, formats_of(conversion)[0]).split())


LAYOUT = '{"parallel_layout_item": {"w": {"dev_matrix": [%d], "tensor_map": [%s]}}}'
MIB = 1 << 20


def large(ranks, columns, shape=(4096, 2048)):
    sizes = (shape[0], shape[1] // ranks) if columns else (shape[0] // ranks, shape[1])
    for rank in range(ranks):
        write_holes(Path(f"src/rank_{rank}/net.ckpt"), sizes)
    return ["src", "-s", strategy(f"{ranks}.json", ranks, columns)]


def strategy(name, ranks, columns):
    Path(name).write_text(LAYOUT % (ranks, "-1, 0" if columns else "0, -1"))
    return name


@pytest.mark.parametrize(
    ("src", "dst"), [((4, True), (2, False)), ((4, False), (8, True)), ((2, False), (64, True))]
)
def test_tensors_larger_than_a_task_are_read_as_said(watch, src, dst):
    words = ["reshard", *large(*src), "-d", strategy("d.json", *dst), "-o", "out"]
    takes = assert_as_said(watch, words)
    assert takes["writes"]["data"] == 32 * MIB
    assert takes["reads"]["data"]["nbytes"] == 32 * MIB + takes["reads"]["over_read"]


@pytest.mark.parametrize("options", ["", "--dtype fp16"])
def test_gaps_that_are_read_are_said(watch, options):
    words = ["reshard", *large(2, False), "-d", strategy("d.json", 64, True), "--rank", "5"]
    reads = assert_as_said(watch, [*words, "-o", "out", *options.split()])["reads"]
    assert reads["over_read"] == reads["data"]["nbytes"] - MIB // 2 > 30 * MIB


def small(dst=True, format="ckpt"):
    """Write two tensors over four ranks, and a target of eight; the words of a reshard."""
    ranks = cut(
        {name: noise(name, "Float32", (64, 32)) for name in "wv"},
        strategy_of({"w": Layout((4,), ((0,), ())), "v": Layout((4,), ((), (0,)))}),
    )
    write_ranks(Path("src"), ranks, format)
    layouts = {"w": Layout((4,), ((0,), ())), "v": Layout((4,), ((), (0,)))}
    ckpttool.write_strategy(strategy_of(layouts), "s.ckpt")
    layouts = {"w": Layout((2, 4), ((1,), ())), "v": Layout((2, 4), ((), (0,)), 2)}
    ckpttool.write_strategy(strategy_of(layouts), "d.ckpt")
    return ["src", "-s", "s.ckpt", *(["-d", "d.ckpt"] if dst else [])]


@pytest.mark.parametrize(
    "options",
    [
        "--rank 1,5",
        "--part 2/3",
        "--write-strategy new.ckpt",
        "--format ckpt --crc",
        "--check-replicas --strict",
        "--not-in-target drop",
        "--dtype bf16",
        "--dtype bf16:w --on-overflow inf --part 1/3",
    ],
)
def test_options_decide_as_in_the_run(watch, options):
    assert_as_said(watch, ["reshard", *small(), "-o", "out", *options.split()])


@pytest.mark.parametrize("band_bytes", [1 << 8, 17 << 18])
@pytest.mark.parametrize("options", ["--pad-vocab 72 --pad-with mean --vocab w.*", "--lora ad:2"])
def test_means_and_products_are_read_as_said(watch, monkeypatch, options, band_bytes):
    sizes = {"band_bytes": band_bytes, "task_bytes": 4 * band_bytes}
    monkeypatch.setattr("ckpttool.execution.memory.CopyOptions", partial(CopyOptions, **sizes))
    monkeypatch.setattr("ckpttool.model.manifest.UNIT_BYTES", 2 * band_bytes)
    weights = {f"{name}.weight": some(name, (64, 32)) for name in "wv"}
    for name, layout in (("s", "rows"), ("d", "both")):
        items = dict.fromkeys(weights, LAYOUTS[layout])
        Path(f"{name}.json").write_text(json.dumps({"parallel_layout_item": items}))
    write_ranks(Path("src"), cut(weights, ckpttool.read_strategy("s.json")), "ckpt")
    write_adapter(Path("ad"), adapter_of("w", *pair("w", (64, 32), 3)))
    words = ["reshard", "src", "-s", "s.json", "-d", "d.json", "-o", "out", "--format", "ckpt"]
    assert_as_said(watch, [*words, *options.split()])


def test_a_part_without_outputs_takes_nothing(watch):
    words = ["merge", *small(dst=False), "-o", "out/m.ckpt", "--part", "2/2"]
    assert assert_as_said(watch, words)["tasks"] == 0
    assert "would write part 2/2: nothing" in message(run_well(*words, "-n", "--overwrite"))


def test_a_budget_of_memory_decides_as_in_the_run(watch):
    budget = f"{(peak_bytes() >> 20) + 100}MiB"
    assert_as_said(watch, ["reshard", *small(), "-o", "out", "--max-memory", budget])


def test_numbered_files_are_said(watch):
    words = ["merge", *small(dst=False), "-o", "out", "--max-shard-size", "9KB"]
    takes = assert_as_said(watch, words)
    indexes = sum(path.stat().st_size for path in Path("out").glob("*.index.json"))
    assert takes["writes"]["documents"] >= indexes > 0


@pytest.mark.parametrize("options", ["", "--rank 1,3", "--part 1/2", "--weights-only --dtype bf16"])
@pytest.mark.parametrize("format", ["ckpt", "safetensors", "hdf5"])
def test_files_that_are_converted_are_said(watch, options, format):
    small(dst=False)
    words = ["convert", "src", "-o", "out", "--format", format, *options.split()]
    takes = assert_as_said(watch, words)
    assert all(
        [source["ranks"]] == [two["ranks"] for two in source["needs"]]
        for source in takes["sources"]
    )


def test_a_resumed_run_keeps_what_the_dry_run_said(watch):
    words = ["reshard", *small(), "-o", "out", "--resume"]
    watch.fails_on = "rank_5"
    assert run(*words, "--engine", "inline").exit_code == 6
    watch.fails_on = None
    watch.clear()
    takes = assert_as_said(watch, words)
    assert sorted(rank for source in takes["sources"] for rank in source["ranks"]) == [5, 6, 7]
    watch.clear()
    assert assert_as_said(watch, words)["tasks"] == 0  # all is there


def test_ranks_that_are_not_needed_may_be_absent(watch):
    words = small()
    halves = {"w": Layout((2,), ((0,), ())), "v": Layout((2,), ((), (0,)))}
    ckpttool.write_strategy(strategy_of(halves), "d.ckpt", overwrite=True)
    for rank in (0, 1):
        shutil.rmtree(f"src/rank_{rank}")
    takes = assert_as_said(watch, ["reshard", *words, "--rank", "1", "-o", "out"])
    assert [need["ranks"] for source in takes["sources"] for need in source["needs"]] == [[2, 3]]


def assert_same_counts(folded, single):
    for document in (folded, single):  # threads that read headers compare with those that are there
        del document["memory"], document["disks"][0]["free"], document["reads"]["headers"]
    assert folded == single


@pytest.mark.parametrize("name", corpus.a_third(CONVERSIONS, 2))
def test_what_is_multiplied_is_what_is_counted_one_by_one(monkeypatch, name):
    conversion = CONVERSIONS[name]
    words = command_of(conversion, formats_of(conversion)[0]).split()
    folded = dry(words)["dry_run"]
    count_one_by_one(monkeypatch)
    assert_same_counts(folded, dry(words)["dry_run"])


def write_wide(*meshes, gap):
    """Write a model over the ranks of the first mesh, all holes; the words of a reshard.

    A rank of the middle lacks the bias, which its replicas have, and has a header of its own.
    """
    layouts = [
        {
            **{f"{i}.rows": Layout((dp, mp), ((0,), ()), dp) for i in range(3)},
            **{f"{i}.columns": Layout((dp, mp), ((), (0,)), dp) for i in range(3)},
            "bias": Layout((dp, mp), ((0,),)),
            "norm": Layout((dp, mp), ((),)),
        }
        for dp, mp in meshes
    ]
    shapes = dict.fromkeys(layouts[0], (96, 48 * gap)) | {"bias": (96,), "norm": (7,)}
    for rank in range(math.prod(meshes[0])):
        metas = [
            TensorMeta(name, "Float32", layout.slice_shape(rank, shapes[name]))
            for name, layout in layouts[0].items()
            if (rank, name) != (math.prod(meshes[0]) - 1, "bias")
        ]
        path = Path(f"src/rank_{rank}/net.ckpt")
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            write_header(file.fileno(), get_format("ckpt").index(metas))
    for name, strategy_layouts in zip(("s.ckpt", "d.ckpt"), layouts, strict=True):
        ckpttool.write_strategy(strategy_of(strategy_layouts), name)
    return ["reshard", "src", "-s", "s.ckpt", "-d", "d.ckpt", "-o", "out"]


@pytest.mark.parametrize("gap", [1, 4096])
@pytest.mark.parametrize(
    "meshes", [((24, 2), (16, 2)), ((4, 2), (2, 4)), ((2, 4), (8, 2)), ((8, 2), (1, 1))]
)
@pytest.mark.parametrize("options", ["", "--dtype fp16", "--rank 0"])
def test_ranks_of_a_kind_are_counted_once(monkeypatch, meshes, gap, options):
    words = [*write_wide(*meshes, gap=gap), *options.split()]
    walked = []
    tasks = Batch.tasks

    def walk(batch, *given):
        walked.append(batch)
        return tasks(batch, *given)

    monkeypatch.setattr(Batch, "tasks", walk)
    folded, once = dry(words)["dry_run"], len(walked)
    count_one_by_one(monkeypatch)
    assert_same_counts(folded, dry(words)["dry_run"])
    assert once < len(walked) // 3 or max(meshes) < (24, 2) or gap > 1 or "--rank" in options


def test_a_cluster_is_not_needed_and_the_memory_is_that_of_a_worker(tmp_path):
    words = ["reshard", *small(), "-o", tmp_path / "out", "--engine", "dask:tcp://nowhere:8786"]
    assert dry(words)["dry_run"]["memory"]["engine"] == "dask:tcp://nowhere:8786"
    assert "for each worker of dask:tcp://nowhere:8786" in message(run_well(*words, "-n"))


CHANGES = "creat,mkdir,mkdirat,rename,renameat,renameat2,unlink,unlinkat,rmdir,link,linkat,symlink"
CHANGES += ",symlinkat,truncate,ftruncate,fallocate,chmod,fchmod,fchmodat,chown,fchown,utimensat"
CHANGES += ",pwrite64,pwritev,pwritev2"


def times_of(folder):
    paths = [folder.parent, folder, *folder.rglob("*")]
    return {path: (path.stat().st_mtime_ns, path.stat().st_ctime_ns) for path in paths}


def whole_calls(trace):
    """The calls that strace has seen, those joined that a call of another thread cut in two."""
    begun = {}
    for line in trace.read_text().splitlines():
        thread, _, call = line.partition(" ")
        if call.endswith("<unfinished ...>"):
            begun[thread] = call.removesuffix("<unfinished ...>")
        elif resumed := re.match(r"<\.\.\. \w+ resumed>", call.lstrip()):
            yield f"{thread} {begun.pop(thread, '')}{call.lstrip()[resumed.end() :]}"
        else:
            yield line


@pytest.mark.parametrize("state", ["absent", "stopped", "complete"])
@pytest.mark.parametrize("format", SUFFIXES)
def test_a_dry_run_changes_nothing(tmp_path, watch, format, state):
    need("strace")
    words = ["reshard", *small(), "-o", "data/out", "--format", format, "--resume"]
    Path("data").mkdir()
    if state == "stopped":
        watch.fails_on = "rank_5"
    if state != "absent":
        run(*words, "--engine", "inline")
    trace = tmp_path / "calls"
    traced = ["strace", "-f", "-y", "-o", trace, "-e", f"trace=open,openat,flock,{CHANGES}"]
    program = [sys.executable, "-B", "-m", "ckpttool", *words, "-n", "-q"]
    trace.touch()
    before = times_of(tmp_path / "data")
    subprocess.run([*map(str, traced), *program], check=True)
    assert times_of(tmp_path / "data") == before
    calls = [line for line in whole_calls(trace) if "ENOSYS" not in line]
    assert [line for line in calls if "openat(" in line]
    writing = ("O_CREAT", "O_WRONLY", "O_RDWR", "O_TRUNC", "O_TMPFILE", "LOCK_EX")
    changing = tuple(f"{name}(" for name in CHANGES.split(","))
    changes = [
        line
        for line in calls
        if any(word in line for word in (*writing, *changing))
        and "/dev/" not in line
        and "memfd:" not in line
    ]
    assert changes == []


READ = re.compile(r"(?:read|readv|pread64|preadv2?)\(\d+<(?P<path>[^>]+)>.* = (?P<nbytes>\d+)$")


@pytest.mark.parametrize("format", SUFFIXES)
def test_all_reads_of_the_source_are_said(tmp_path, format):
    need("strace")
    small(format=format)
    words = ["reshard", "src", "-s", "s.ckpt", "-d", "d.ckpt", "-o", "out", "--format", "ckpt"]
    words += ["-j", "2"]
    reads = dry(words)["dry_run"]["reads"]
    traced = [
        "strace",
        "-ff",
        "-yy",
        "-o",
        "calls",
        "-e",
        "trace=read,readv,pread64,preadv,preadv2",
    ]
    program = [sys.executable, "-B", "-m", "ckpttool", *words, "-q"]
    subprocess.run([*traced, *program], check=True)
    texts = (path.read_text(errors="replace") for path in Path().glob("calls.*"))
    lines = (line for calls_of_thread in texts for line in calls_of_thread.splitlines())
    asked = (line for line in lines if "RWF_NOWAIT" not in line)  # which asks what memory has
    calls = [match for line in asked if (match := READ.search(line))]
    sizes = [int(match["nbytes"]) for match in calls if str(tmp_path / "src") in match["path"]]
    for key, total in (("requests", len(sizes)), ("nbytes", sum(sizes))):
        assert sum(reads[kind][key] for kind in ("headers", "samples", "data")) == total
