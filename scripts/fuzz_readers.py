"""Coverage-guided fuzzing of the readers; started by scripts/fuzz, which sets up what it needs.

    python scripts/fuzz_readers.py ckpt -max_total_time=60 .fuzz/ckpt

A reader is given a file of any bytes.  It has to refuse it with an error of ckpttool, or to give an
index of which every extent lies inside the file.  Anything else (another exception, a hang, memory
without bounds) ends the run, and the input that did it is kept.

libhdf5 runs in another process, where coverage cannot be seen, so an input for it is no file but
changes of a good one: an offset of two bytes and a byte that is flipped there, again and again.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from zlib import crc32

import atheris

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

with atheris.instrument_imports(include=["ckpttool"]):
    from ckpttool.discovery.checkpoint2 import read_metadata
    from ckpttool.discovery.hyper_parallel import read_metadata as read_hyper_metadata
    from ckpttool.formats.ckpt import Ckpt
    from ckpttool.formats.foreign import identify_foreign, read_rank_table
    from ckpttool.formats.hdf5 import Hdf5
    from ckpttool.formats.safetensors import Safetensors
    from ckpttool.formats.sandbox import Sandbox
    from ckpttool.formats.weight_index import read_index_file
    from ckpttool.model.tensors import FileIndex, StoredFile, TensorMeta
    from ckpttool.problems import CkptToolError, Diagnostics, FormatError
    from ckpttool.storage.files import write_header
    from ckpttool.strategy_files.handwritten import read_handwritten
    from ckpttool.strategy_files.reader import read_strategy
    from ckpttool.transaction.log import Log
    from ckpttool.transaction.sealed_files import ManifestFile
    from ckpttool.transaction.states import FinishedStamps, RecordedPlan
    from tests.support.hyper_parallel import HyperSave
    from tests.support.readers import Entry

SMALL = [
    TensorMeta("a/w", "Float32", (2, 3)),
    TensorMeta("b", "BFloat16", (4,)),
    TensorMeta("s", "str", (), "text"),
    TensorMeta("q", "Int4", (3,)),
]
SPARE_BYTES = 512 << 20  # for a target with limited memory
SEED_BYTES = 20_000  # larger files teach a fuzzer nothing that small ones do not


def _index(read: Callable[[StoredFile], FileIndex]) -> Callable[[str, int], None]:
    def target(path: str, size: int) -> None:
        try:
            index = read(StoredFile(path))
        except FormatError as error:
            problem = str(error)
        else:
            _check(index, size)
            return
        assert problem.startswith(path), problem

    return target


def _check(index: FileIndex, size: int) -> None:
    for name, tensor in index.tensors.items():
        held = sum(extent.nbytes for extent in tensor.extents)
        assert tensor.meta.name == name
        assert tensor.meta.text is not None or held == tensor.meta.nbytes
        for extent in tensor.extents:
            assert 0 <= extent.offset <= extent.offset + extent.nbytes <= size


def _strategy(path: str, size: int) -> None:
    try:
        strategy = read_strategy([path])
    except CkptToolError:
        return
    for layouts in strategy.layouts.values():
        for layout in layouts:
            assert layout.ranks.stop <= strategy.ranks.stop


def _document(read: Callable[[str], object]) -> Callable[[str, int], None]:
    def target(path: str, size: int) -> None:
        with contextlib.suppress(CkptToolError):
            read(path)

    return target


def _limited(target: Callable[[str, int], None]) -> Callable[[str, int], None]:
    """Let a target take little memory, as the process does that reads such files in a command."""

    def limited(path: str, size: int) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, before[1]))
        try:
            with contextlib.suppress(MemoryError):
                target(path, size)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    return limited


def _sealed(read: Callable[[Path], object]) -> Callable[[str], None]:
    """Read it as it is, and with the checksum that it should have: a fuzzer finds none."""

    def sealed(path: str) -> None:
        with contextlib.suppress(CkptToolError):
            read(Path(path))
        lines = Path(path).read_bytes()
        digest = sha256(lines).hexdigest()
        Path(path).write_bytes(lines + b'], "sha256": "' + digest.encode() + b'"}\n')
        read(Path(path))

    return sealed


def _manifest(path: Path) -> None:
    for _ in ManifestFile.read(path).outputs():
        pass


def _read_log(path: Path) -> None:
    for output in Log.read(path).outputs.values():
        output.read_entry()


def _log(path: str) -> None:
    """Do the same with a log, line by line."""
    with contextlib.suppress(CkptToolError):
        _read_log(Path(path))
    lines = Path(path).read_bytes().split(b"\n")[:-1]
    Path(path).write_bytes(b"".join(b"%b %08x\n" % (line, crc32(line)) for line in lines))
    _read_log(Path(path))


ORIGIN = b"""{"schema": 1, "ckpttool": "0.2", "plan": "p", "step": null, "inputs": [{"path": "a",
"nbytes": 1, "mtime_ns": 2, "ctime_ns": 3, "inode": 4}], "options": {"crc": "--crc"},
"strategies":
[{"path": "s", "nbytes": 1, "sha256": ""}]""".replace(b"\n", b" ")
OUTPUT = b"""{"rank": 0, "path": "r/a", "format": "ckpt", "nbytes": 9, "tensors":
[{"name": "w", "dtype": "Int8", "shape": [4], "sha256": ["ab"]}]}""".replace(b"\n", b" ")
STAMP = b'"nbytes": 9, "mtime_ns": 2, "ctime_ns": 3, "inode": 4'
DEVICE = b'{"device_id": "0", "device_ip": "10.0.0.1", "rank_id": "0"}'
SERVERS = b'{"version": "1.0", "server_count": "1", "server_list": [{"server_id": "a", "device": ['
GROUPS = b'{"group_count": "1", "group_list": [{"device_num": "1", "instance_list": [{"devices": ['
SEEDS = {
    "rank_table": SERVERS + DEVICE + b']}], "status": "completed"}',
    "rank_table groups": GROUPS + DEVICE + b'], "rank_id": "0", "server_id": "a"}]}]}',
    "manifest": ORIGIN + b', "outputs": [\n' + OUTPUT + b"\n",
    "plan": ORIGIN
    + b', "by": [{"process": 1, "host": "h", "time": "t"}], "documents": [{"path": "i.json", '
    + b'"kind": "index", "data": "e30="}], "outputs": [\n{"rank": 0, "path": "r/a"}\n',
    "stamps": ORIGIN + b', "outputs": [\n{"path": "r/a", ' + STAMP + b"}\n",
    "log": b'{"run": "anew", "process": 1, "host": "h", "time": "t"}\n'
    + OUTPUT
    + b'\n{"stamp": "r/a", '
    + STAMP
    + b'}\n{"done": true}\n',
}

TARGETS: dict[str, tuple[Callable[[str, int], None], str]] = {
    "ckpt": (_index(Ckpt().read_index), "**/*.ckpt"),
    "safetensors": (_index(Safetensors().read_index), "**/*.safetensors"),
    "hdf5": (_index(Sandbox().read_index), "**/*.h5"),
    "strategy": (_strategy, "**/*strategy*.ckpt"),
    "json": (_strategy, "**/*.json"),
    "by_hand": (_document(lambda path: read_handwritten(path, None)), "**/*.json"),
    "foreign": (_document(identify_foreign), "**/*.pb"),
    "hyper_parallel": (
        _limited(_document(lambda path: read_hyper_metadata(StoredFile(path)))),
        "**/*.metadata",
    ),
    "index": (_document(read_index_file), "**/*map.json"),
    "log": (_document(_log), "**/*.log"),
    "manifest": (_document(_sealed(_manifest)), "**/ckpttool.json"),
    "mindformers": (
        _document(lambda path: read_metadata(path, Diagnostics())),
        "**/metadata.json",
    ),
    "plan": (_document(_sealed(RecordedPlan.read)), "**/plan.json"),
    "rank_table": (_document(read_rank_table), "**/rank_table*.json"),
    "stamps": (_document(_sealed(FinishedStamps.read)), "**/stamps.json"),
}


def seed(name: str, corpus: Path) -> None:
    """Put small files of the golden corpus where the fuzzer begins."""
    corpus.mkdir(parents=True, exist_ok=True)
    for key, data in SEEDS.items():
        if key.partition(" ")[0] == name:
            (corpus / f"seed {key}").write_bytes(data)
    if name == "hyper_parallel":
        entries = {"w": Entry("Float32", (4, 2), bytes(32))}
        boxes = {"w": {((0, 0), (2, 2)): [0], ((2, 0), (2, 2)): [1]}}
        with tempfile.TemporaryDirectory() as folder:
            HyperSave(entries, boxes, objects=("step",)).write(Path(folder))
            (corpus / "seed").write_bytes(Path(folder, ".metadata").read_bytes())
    files = sorted((ROOT / "tests" / "golden").glob(TARGETS[name][1]))
    for i, path in enumerate(path for path in files if path.stat().st_size <= SEED_BYTES):
        copy = corpus / f"seed-{i}"
        if not copy.exists():
            copy.write_bytes(path.read_bytes())


def _changed(good: bytes, changes: bytes) -> bytes:
    data = bytearray(good)
    for high, low, mask in zip(changes[::3], changes[1::3], changes[2::3], strict=False):
        data[(high << 8 | low) % len(data)] ^= mask
    return bytes(data)


def main() -> None:
    """Fuzz the target that the first argument names; the rest is for libFuzzer."""
    name = sys.argv.pop(1)
    target = TARGETS[name][0]
    seed(name, Path(sys.argv[-1]))
    folder = tempfile.mkdtemp()  # libFuzzer ends the process; scripts/fuzz removes what is left
    path = Path(folder, "input")
    with Path(folder, "good.h5").open("w+b") as file:
        write_header(file.fileno(), Hdf5().index(SMALL))
    good = Path(folder, "good.h5").read_bytes()

    def once(data: bytes) -> None:
        data = _changed(good, data) if name == "hdf5" else data
        path.write_bytes(data)
        target(str(path), len(data))

    atheris.Setup(sys.argv, once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
