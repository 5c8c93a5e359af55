"""A small conversion as a user types it, and the states in which its folder is found."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from threading import Event, Thread, current_thread
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

import ckpttool
from ckpttool.execution import execute as execute_module
from ckpttool.execution.copy import fill
from tests.support.checkpoints import noise, write_file
from tests.support.commands import SUFFIXES, run, run_well
from tests.support.executors import wait_until, with_options
from tests.support.manifests import MANIFEST
from tests.support.plans import plan_split

if TYPE_CHECKING:
    from click.testing import Result

RECORD = ".ckpttool"
RANKS = range(4)
WANTED: dict[tuple[str, str, str], dict[int, bytes]] = {}  # a run always writes the same bytes


def machine(name: str) -> os.uname_result:
    """This machine under another name."""
    system, _, *more = os.uname()
    return os.uname_result((system, name, *more))


class SmallSet:
    """Four outputs of one checkpoint: ``split``, ``reshard``, or ``merge`` as "numbered" or "file".

    Checkpoints of other names have other contents, in files of the same names and sizes.
    """

    def __init__(
        self, folder: Path, name: str = "a", command: str = "split", output_format: str = "ckpt"
    ) -> None:
        self.folder, self.command, self.output_format = folder, command, output_format
        self.source, self.strategy = folder / name / "m.ckpt", folder / "s.json"
        self.out, self.stem = folder / "out", "m"  # of a single file
        self.prefix = "checkpoint_"
        if not self.source.exists():
            entries = {f"w{n}": noise(f"{name}{n}", "Int8", (400,)) for n in RANKS}
            write_file(self.source, entries, "ckpt")
            item = {"dev_matrix": [len(RANKS)], "tensor_map": [0]}
            layouts = {"parallel_layout_item": dict.fromkeys(entries, item)}
            self.strategy.write_text(json.dumps(layouts))

    @property
    def target(self) -> Path:
        return self.out / f"{self.stem}{self._suffix}" if self.command == "file" else self.out

    @property
    def manifest(self) -> Path:
        name = f"{self.target.name}.{MANIFEST}" if self.command == "file" else MANIFEST
        return self.out / name

    @property
    def record(self) -> Path:
        name = f".{self.target.name}.ckpttool" if self.command == "file" else RECORD
        return self.out / name

    @property
    def outputs(self) -> list[Path]:
        if self.command == "file":
            return [self.target]
        if self.command in ("split", "reshard"):
            names = [f"rank_{rank}/{self.prefix}{rank}{self._suffix}" for rank in RANKS]
        else:
            names = [f"model-{n + 1:05}-of-{len(RANKS):05}{self._suffix}" for n in RANKS]
        return [self.out / name for name in names]

    @property
    def _suffix(self) -> str:
        return SUFFIXES[self.output_format]

    def words(self, *more: str | Path) -> list[str]:
        """Return the command line with more options, or with other values of those that it has."""
        words: list[str | Path] = ["-o", self.target, "-j", "1"]
        if self.command in ("split", "reshard"):
            words += ["-d", self.strategy]
            words += [] if self.prefix == "checkpoint_" else ["--prefix", self.prefix]
        if self.command != "file":
            words += ["--format", self.output_format]
        if self.command == "numbered":
            words += ["--max-shard-size", "400B"]
        if self.command == "reshard":
            words = ["reshard", self._ranks(), "-s", self.strategy, *words]
        else:
            words = ["split" if self.command == "split" else "merge", self.source, *words]
        return with_options(words, *more)

    def _ranks(self) -> Path:
        folder = self.source.parent / "ranks"
        if not folder.exists():
            run_well("split", self.source, "-o", folder, "-d", self.strategy)
        return folder

    def run(self, *more: str | Path) -> Result:
        return run(*self.words(*more))

    def run_well(self, *more: str | Path) -> Result:
        return run_well(*self.words(*more))

    def stop(self, *more: str | Path, output: int = 2) -> None:
        """Leave what a run leaves that is killed while it fills this output."""
        path = self.outputs[output]
        part = more[more.index("--part") + 1] if "--part" in more else "1/1"
        number, parts = map(int, part.split("/"))
        before = range(number - 1, output, parts)  # those of the part
        record: dict[Path, bytes] = {}

        def fail() -> None:
            self.wait_for(*before)
            record.update((one, one.read_bytes()) for one in self.record.iterdir())
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with while_filling(path, fail):
            assert self.run(*more).exit_code == 6
        if not self.record.exists():  # a run that fails removes it, if nothing is complete
            self.record.mkdir(parents=True)
            for one, data in record.items():
                one.write_bytes(data)
        Path(path).parent.mkdir(exist_ok=True)
        Path(f"{path}.partial").write_bytes(b"half of an output")

    def stop_inside(self) -> None:
        """Leave what a run leaves that is killed when a log tells of half of output 2."""
        partial, filled = Path(f"{self.outputs[2]}.partial"), []
        schedule = execute_module.schedule

        def fake(task):
            if task.units[0].tensor.file.path == str(partial):
                if len(filled) == len(RANKS) // 2:
                    filled.append(partial.read_bytes())
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                filled.append(task)
            return fill(task)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(execute_module, "MIN_GROUP_BYTES", 1)
            patch.setattr(execute_module, "fill", fake)
            patch.setattr(
                execute_module,
                "schedule",
                lambda plan, ranks, options, **how: schedule(
                    plan, ranks, replace(options, task_bytes=1), **how
                ),
            )
            words = self.words("--engine", "inline")
            del words[(at := words.index("-j")) : at + 2]
            assert run(*words).exit_code == 6
        partial.parent.mkdir(exist_ok=True)
        partial.write_bytes(filled[-1])

    def wait_for(self, *outputs: int) -> None:
        """Wait until the run has noted that these outputs are there."""
        names = [self.outputs[n].relative_to(self.out) for n in outputs]
        lines = [f'{{"path": "{name}", ' for name in names]

        def is_noted() -> bool:
            texts = (path.read_text() for path in self.record.glob("*.log"))
            text = "".join(one.rpartition('{"process": ')[2] for one in texts)
            return all(line in text for line in lines)

        wait_until(is_noted, f"{names} in a log")

    def read(self) -> dict[int, bytes]:
        return {n: path.read_bytes() for n, path in enumerate(self.outputs) if path.is_file()}

    def wanted(self) -> dict[int, bytes]:
        name = self.source.parent.name
        key = (name, self.command, self.output_format)
        if key not in WANTED:
            clean = SmallSet(self.folder / "wanted", *key)
            clean.run_well()
            WANTED[key] = clean.read()
            rmtree(clean.folder)
        return WANTED[key]


def in_parts(small: SmallSet, *more: str) -> None:
    for part in ("1/2", "2/2"):
        small.run_well("--part", part, *more)


def then(*acts: Callable[[SmallSet], object]) -> Callable[[SmallSet], None]:
    def act(small: SmallSet) -> None:
        for each in acts:
            each(small)

    return act


def to_output(act: Callable[[Path], object]) -> Callable[[SmallSet], object]:
    return lambda small: act(small.outputs[0])


def to_outputs(act: Callable[[Path], object]) -> Callable[[SmallSet], object]:
    return lambda small: [act(path) for path in small.outputs]


def in_record(name: str, act: Callable[[Path], object]) -> Callable[[SmallSet], object]:
    return lambda small: act(small.record / name)


def without_record(small: SmallSet) -> None:
    rmtree(small.record)


@contextmanager
def while_filling(path: Path, act: Callable[[], object]) -> Iterator[list[object]]:
    """Call a function once, before this output is filled; yield the list of what it returned."""
    seen: list[object] = []

    def fake(task):
        if not seen and task.units[0].tensor.file.path == f"{path}.partial":
            seen.append(act())
        return fill(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute_module, "fill", fake)
        yield seen


@contextmanager
def filled_outputs(broken: Path | None = None) -> Iterator[list[str]]:
    """Yield the list of the outputs' names that are filled, in this order; one may fail."""
    names: list[str] = []

    def fake(task):
        name = Path(task.units[0].tensor.file.path).name.removesuffix(".partial")
        if broken is not None and name == broken.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        names.append(name) if name not in names else None
        return fill(task)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute_module, "fill", fake)
        yield names


class Other:
    """A whole run of another host, in a thread; it waits when it has written two outputs."""

    def __init__(self, small: SmallSet) -> None:
        self.small, self.error = small, None
        self._stands, self._may_end = Event(), Event()
        self._thread = Thread(target=self._run)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        host, fill = os.uname(), execute_module.fill
        other = machine("node7")
        monkeypatch.setattr(os, "uname", lambda: other if self.is_this() else host)
        monkeypatch.setattr(
            execute_module,
            "fill",
            lambda task: (self.is_this() and self._pause(task), fill(task))[1],
        )

    def is_this(self) -> bool:
        return current_thread() is self._thread

    def start(self) -> None:
        self._thread.start()
        assert self._stands.wait(60)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            execute_split(self.small)
        except ckpttool.CkptToolError as error:
            self.error = error
        finally:
            self._stands.set()

    def _pause(self, task) -> None:
        if task.units[0].tensor.file.path.startswith(str(self.small.outputs[2])):
            self._stands.set()
            assert self._may_end.wait(60)


def execute_split(small: SmallSet) -> None:
    source, strategy = ckpttool.scan(str(small.source)), [str(small.strategy)]
    options = ckpttool.OutputOptions("ckpt")
    plan = plan_split(
        source, ckpttool.read_strategy(strategy), str(small.out), output_options=options
    )
    ckpttool.execute(*plan)
