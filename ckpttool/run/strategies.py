"""Strategy files that are written: by themselves, or with the outputs of a plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.errors import PlanError, StrategyError
from ckpttool.formats.reading import is_there
from ckpttool.formats.strategy_writer import encode_strategy, name_problem
from ckpttool.model.catalog import MergedCatalog
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.outcome import outcome
from ckpttool.model.plan import Document, Plan
from ckpttool.model.strategy import Strategy
from ckpttool.run.partial import is_within, write_document


def write_strategy(strategy: Strategy, path: str, *, overwrite: bool = False) -> None:
    """Write a strategy as a file of MindSpore's (protobuf), whole or not at all.

    Layouts are written as they are: those that a JSON file gives of an expanded tensor stay so.

    Parameters
    ----------
    strategy
        Of one written by hand what `Strategy.resolve` gives.
    path
        The file; its folder is made if it is not there.
    overwrite
        Whether it may replace another file.

    Raises
    ------
    StrategyError
        The file must not be called so, or MindSpore's form cannot say this.
    PlanError
        The file exists.
    OSError
        It cannot be written.
    """
    reason = name_problem(path)
    if reason is not None:
        raise StrategyError(path, reason)
    data = encode_strategy(strategy)
    if is_there(path) and not overwrite:
        raise PlanError([f"{path} exists already; overwrite=True replaces it"])
    write_document(path, data)


@dataclass(frozen=True, slots=True)
class Told:
    """The strategy of rank files, written with them.

    Attributes
    ----------
    path
        Where it goes.
    is_part
        Whether the run is one of several, and `commit` the one that writes it.
    """

    path: str
    is_part: bool

    @property
    def documents(self) -> list[str]:
        """The strategy file."""
        return [self.path]

    def complete(self, plan: Plan) -> Plan:
        """The plan that writes the strategy of its outputs, too.

        Raises
        ------
        StrategyError
            MindSpore's form cannot say it.
        """
        assert plan.target.strategy is not None, "rank files are cut by one"
        data = encode_strategy(outcome(plan, plan.target.strategy))
        return replace(plan, documents=(*plan.documents, Document(self.path, data, "strategy")))

    def problems(self, plan: Plan) -> Iterator[str]:
        """Messages for what keeps the strategy from getting its name.

        Whether something is there already is the matter of `ckpttool.run.places`.
        """
        reason = name_problem(self.path)
        if reason is not None:
            yield f"{self.path}: {reason}"
        folder, name = Path(plan.target.output_folder), Path(self.path).name
        parent = Path(self.path).parent.resolve()
        ranks = [*plan.target.paths.values()]
        if not isinstance(plan.catalog, MergedCatalog):
            ranks += [path for file in plan.catalog.files.values() for path in file.paths]
        if parent in {folder.resolve() for folder in {Path(path).parent for path in ranks}}:
            yield (
                f"{self.path}: among the files of ranks, where it would be taken for a checkpoint; "
                f"write it to {folder} or elsewhere"
            )
        if parent == folder.resolve() and name.startswith((MANIFEST, ".ckpttool-part-")):
            yield f"{self.path}: is a name that ckpttool itself uses there; choose another"
        inside = os.path.relpath(self.path, folder)  # as a record of a part has it
        if self.is_part and (inside.startswith("../") or not is_within(folder, inside)):
            yield (
                f"{self.path}: with --part it is `ckpttool commit` that writes it, and that writes "
                f"below {folder} only; name a file there"
            )
