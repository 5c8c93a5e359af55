"""An output on its way: what has come back from workers for it, and what is still to come."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from ckpttool.model.plan import OutputFile
from ckpttool.run.attempts import Attempt, RemoteFile
from ckpttool.run.fill import Filled
from ckpttool.run.partial import PartialFile
from ckpttool.storage.checksum import Summed

Done: TypeAlias = int | Filled | Attempt  # of a call: a checksum, stretches, a whole file


@dataclass(slots=True, eq=False)
class Job:
    """An output on its way."""

    output: OutputFile
    file: PartialFile | RemoteFile
    open_tasks: int = 0
    is_submitted: bool = False
    checksum: Future[Done] | None = None  # on its way, once all tasks are done
    hashes: dict[str, dict[int, str]] = field(default_factory=dict)  # by tensor and unit
    sums: list[Summed] = field(default_factory=list)

    def accept(self, done: Filled | Attempt) -> None:
        """Take what a call has done, which may be for others, too."""
        if isinstance(done, Attempt):
            assert isinstance(self.file, RemoteFile), "only workers of a cluster make attempts"
            self.file.attempt = done
            path, done = done.path, done.filled
        else:
            assert isinstance(self.file, PartialFile), "those that fill are on this host"
            path = self.file.index.path
        for one in done.hashes:
            if one.path == path:
                self.hashes.setdefault(one.name, {})[one.unit] = one.sha256
        self.sums += (one for one in done.sums if one.path == path)
