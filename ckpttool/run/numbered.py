"""A merged checkpoint in numbered files: names, indexes, and what is in the way.

The indexes are the last to be written and, if they are to be replaced, the first to be removed: at
no time does one speak of files that are not all of one run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.formats import format_of_suffix
from ckpttool.formats.unified import (
    PART_ATTRS,
    index_names,
    index_text,
    is_index_name,
    part_name,
)
from ckpttool.model.notes import Note
from ckpttool.model.parts import cut_into_parts
from ckpttool.model.plan import Document, Plan, Target
from ckpttool.model.strategy import shorten


@dataclass(frozen=True, slots=True)
class Numbered:
    """An output of `ckpttool.run.prepare.plan_merge`.

    Attributes
    ----------
    folder, format
        Where the files go, and their format.
    limit
        Bytes of tensors in each, at most.
    attrs
        What else the headers say.
    """

    folder: str
    format: str
    limit: int
    attrs: Mapping[str, str]

    @property
    def documents(self) -> list[str]:
        """The index files."""
        return [str(Path(self.folder, name)) for name in index_names(self.format)]

    def target(self) -> Target:
        """A target of one file, as long as nobody knows how many there will be."""
        attrs = {**PART_ATTRS, **self.attrs}
        return Target(self.format, {0: self._path(None, 0)}, attrs=attrs, is_numbered=True)

    def complete(self, plan: Plan) -> Plan:
        """The plan for that one file, spread over numbered ones with their indexes."""
        plan = cut_into_parts(plan, self.limit, self._path)
        files = {meta.name: Path(output.path).name for output in plan for meta in output.metas}
        metas = [transfer.source.meta for transfer in plan.transfers]
        text = index_text(files, sum(meta.nbytes for meta in metas))
        documents = tuple(Document(path, text.encode()) for path in self.documents)
        large = [meta.name for meta in metas if meta.nbytes > self.limit]
        more = "larger than --max-shard-size by themselves, and written whole all the same"
        notes = (*plan.notes, Note("part", f"{more}: {shorten(large)}")) if large else plan.notes
        return replace(plan, documents=documents, notes=notes)

    def problems(self, plan: Plan) -> Iterator[str]:
        """A message if there are files that a loader might take for parts of this checkpoint."""
        folder = Path(self.folder)
        ours = {Path(path).name for path in (*plan.target.paths.values(), *self.documents)}
        stale = [
            path.name
            for path in (sorted(folder.iterdir()) if folder.is_dir() else [])
            if path.name not in ours
            and (format_of_suffix(path.name) == self.format or is_index_name(path.name))
        ]
        if stale:
            yield (
                f"{folder}: {shorten(stale, 3)}: of another checkpoint, and a loader might mix it "
                "with this one; move it away or write to another folder"
            )

    def _path(self, number: int | None, count: int) -> str:
        return str(Path(self.folder, part_name(number, count, self.format)))
