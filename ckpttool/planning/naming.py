"""Names of rank files (``--name``), and the ``meta.json`` with which MindFormers resumes.

MindFormers 1.x saves ``rank_R/{prefix}_rank_R-{epoch}_{step}.ckpt`` (or ``.safetensors``) and, in
the folder of each rank, ``meta.json``: the object ``{"last_epoch": 3, "last_step": 10,
"last_ckpt_file": "llama_rank_0-3_10.ckpt"}``.  With ``resume_training: True`` it takes the least
epoch and step of all these objects.  It puts the number of each rank behind ``_rank_`` in that
name, and wants the file of this name on every rank.

Sources: MindFormers 1.3.2 to 2.1.0, ``core/callback/callback.py`` (``record_last_ckpt_to_json``),
``tools/resume_ckpt.py`` (``get_info_from_meta``, ``get_resume_ckpt_list``), ``tools/utils.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shlex import quote

from msgspec.structs import replace

from ckpttool.discovery.file_names import RankFile, base_of, label_of, read_names
from ckpttool.formats import format_of_suffix, suffix_of
from ckpttool.formats.base import PROVENANCE
from ckpttool.lazy import compile_late
from ckpttool.model.catalog import Catalog
from ckpttool.model.plan import Document, Plan
from ckpttool.problems import Diagnostic, Diagnostics, PlanError
from ckpttool.transaction.resume import OutputOptions
from ckpttool.wording import shorten

OF_MINDFORMERS = "{model}_rank_{rank}-{step}"
META = "meta.json"
MINDFORMERS_FORMATS = ("ckpt", "safetensors")
_RANK = compile_late(r"_rank_(\d+)")
_STEP = compile_late(r".+-(\d+)_(\d+)\.(?:ckpt|safetensors)")


def name_files(
    catalog: Catalog, ranks: Iterable[int], format: str, options: OutputOptions
) -> Mapping[int, str]:
    """Return the file name of each rank.

    Raises
    ------
    PlanError
        The source lacks a field of the name, or the names mean something else to their readers.
    """
    suffix = suffix_of(format)
    template = options.name or (OF_MINDFORMERS if options.mindformers else None)
    if template is None:
        return {rank: f"{options.prefix}{rank}{suffix}" for rank in ranks}
    fields = {"model": _model_of(catalog), "step": _step_of(catalog)}
    problems: list[Diagnostic] = []
    if unknown := [n for n, value in fields.items() if not value and f"{{{n}}}" in template]:
        said = template.replace("{model}", fields["model"] or "llama")
        said = said.replace("{step}", fields["step"] or "1_1000")
        message = f"the source does not tell {shorten((f'{{{name}}}' for name in unknown), 3)}"
        hint = f"--name {quote(said)}, if these are the values"
        problems.append(Diagnostic("options", message, hint=hint, where=catalog.root))
    if (by_name := format_of_suffix(template)) is not None:
        message = f"the name ends like a file of {by_name}; the format adds the suffix"
        hint = f"--name {quote(template.rpartition('.')[0])}"
        problems.append(Diagnostic("options", message, hint=hint))
    names = {rank: template.format(**fields, rank=rank) + suffix for rank in ranks}
    if len(steps := dict.fromkeys(map(label_of, names.values()))) > 1:
        message = "the names would say that the ranks are of different steps"
        facts = shorten(map(str, steps), 3)
        hint = f"--name '{OF_MINDFORMERS}'"
        problems.append(Diagnostic("options", message, hint=hint, facts=facts))
    if options.mindformers and format not in MINDFORMERS_FORMATS:
        hint = " or ".join(f"--format {format}" for format in MINDFORMERS_FORMATS)
        problems.append(Diagnostic("options", f"MindFormers does not read {format}", hint=hint))
    if options.mindformers and not problems:
        problems = list(_problems_of_mindformers(names))
    if problems:
        raise PlanError(problems)
    return names


def _model_of(catalog: Catalog) -> str:
    """Return what the names of the source begin with; "" if they do not share one name."""
    if catalog.is_merged:
        paths = {file.path for file in catalog.files.values()}
        return "" if len(paths) != 1 or catalog.documents else base_of(Path(*paths).name)
    if catalog.description is not None or not catalog.files:
        return ""
    paths_of = {rank: Path(file.path) for rank, file in catalog.files.items()}
    patterns = read_names([RankFile(rank, path, path.name) for rank, path in paths_of.items()])
    models = {re.sub(r"(?:[_-]rank)?[_-]?\{rank\}$", "", pattern.prefix) for pattern in patterns}
    (model, *more) = models
    return "" if more or "{" in model else model


def _step_of(catalog: Catalog) -> str:
    kept = catalog.common_attrs if catalog.files else {}
    names = {Path(file.path).name for file in catalog.files.values()}
    of_name = label_of(*names) if len(names) == 1 else None
    return catalog.step or kept.get(f"{PROVENANCE}step") or of_name or ""


def _problems_of_mindformers(names: Mapping[int, str]) -> Iterator[Diagnostic]:
    """Yield why MindFormers would not find the files by these names."""
    first, name = next(iter(names.items()))
    numbers = {rank: _RANK.search(name) for rank, name in names.items()}
    is_right = all(n is not None and int(n[1]) == rank for rank, n in numbers.items())
    renamed = (name.replace(f"_rank_{first}", f"_rank_{rank}") for rank in names)
    if not is_right or [*renamed] != [*names.values()] or not _STEP.fullmatch(name):
        message = "MindFormers does not find files by these names"
        facts = f"expected PREFIX_rank_{first}-EPOCH_STEP{Path(name).suffix}, found {name}"
        hint = f"--name '{OF_MINDFORMERS}', or with numbers: --name 'llama_rank_{{rank}}-1_1000'"
        yield Diagnostic("options", message, hint=hint, facts=facts)


class ResumeRecords:
    """The ``meta.json`` of each rank, which are written with rank files."""

    def __init__(self, paths: Mapping[int, str]) -> None:
        self._paths = paths

    @property
    def documents(self) -> list[str]:
        """The files."""
        return [str(Path(path).with_name(META)) for path in self._paths.values()]

    def complete(self, plan: Plan, diagnostics: Diagnostics) -> Plan | None:
        """Return the plan with these documents."""
        return replace(plan, documents=(*plan.documents, *self._written()))

    def _written(self) -> Iterator[Document]:
        for path in map(Path, self._paths.values()):
            step = _STEP.fullmatch(path.name)
            assert step is not None, "such names are refused"
            epoch, last = map(int, step.groups())
            entries = {"last_epoch": epoch, "last_step": last, "last_ckpt_file": path.name}
            yield Document(str(path.with_name(META)), json.dumps(entries).encode(), META)

    def problems(self, plan: Plan) -> Iterator[Diagnostic]:
        """Yield nothing: the names were checked, and `preflight` looks for files in the way."""
        yield from ()
