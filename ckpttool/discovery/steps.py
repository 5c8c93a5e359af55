"""The choice of one step of a checkpoint: a file for each rank, all saved together.

MindFormers records the last save of a rank in ``meta.json`` in the rank's folder: an object with
``last_epoch`` and ``last_step`` (numbers) and ``last_ckpt_file`` (a name that ends in the same
step).  It is replaced when a save is complete.  So a step is recorded if no rank's record is older.

Source
------
MindFormers ``core/callback/callback.py`` (``record_last_ckpt_to_json``), ``tools/resume_ckpt.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpttool.discovery.file_names import (
    RankFile,
    Step,
    label_of,
    matches_step,
    read_names,
    run_of,
    step_of,
)
from ckpttool.discovery.leftovers import note_special_save
from ckpttool.errors import FormatError, PlanError, StepError
from ckpttool.formats.local import is_file
from ckpttool.formats.strict_json import read_json_object
from ckpttool.model.diagnostics import Diagnostic, Diagnostics
from ckpttool.model.wording import format_ranks, shorten

MAX_BYTES = 1 << 16  # of meta.json: three short entries; what is larger is something else

Groups = Mapping[str, Mapping[int, Path]]  # common part of the names -> rank -> file


def choose_step(
    src: str, found: list[RankFile], wanted: str | None, diagnostics: Diagnostics
) -> tuple[Mapping[int, Path], str | None]:
    """Return one file for each rank, all of one step, and the step's label.

    The step is ``wanted``, or else the newest that every rank has.  If MindFormers has recorded
    steps, it is the newest recorded one.
    """
    ranks = sorted({item.rank for item in found})
    groups = _group_by_name(found)
    keys = [key for key in groups if wanted is None or matches_step(key, groups[key], wanted)]
    if not keys or (wanted is not None and wanted.isdecimal() and len(keys) > 1):
        shown = _by_step(keys or groups)
        names = list(dict.fromkeys(_display_name(key, groups[key]) for key in shown))
        facts = f"found {shorten(names, 3)}"
        text = f"--step {wanted} is ambiguous" if keys else f"no file of step {wanted}"
        hint = f"--step {names[-1]}"
        if not any(map(step_of, groups)):
            facts, hint = f"{facts}; these names have no step", "omit --step"
        raise PlanError([Diagnostic("source", text, hint, facts=facts, where=src)])
    complete = [key for key in keys if len(groups[key]) == len(ranks)]
    if not complete:
        raise StepError([_incomplete_problem(src, groups, keys, ranks)])
    chosen = {key: groups[key] for key in keys}
    records = _read_last_saves(found, diagnostics) if wanted is None else {}
    recorded = [key for key in complete if _is_recorded(groups[key], records)]
    best = max(recorded or complete, key=_step_order)
    if recorded:
        diagnostics.add(*_record_notes(chosen, best, records))
    else:
        _check_rivals(src, chosen, best)
        diagnostics.add(*_choice_notes(src, chosen, best, ranks, records))
    note_special_save(best, diagnostics)
    return groups[best], label_of(best)


def _display_name(key: str, files: Mapping[int, Path]) -> str:
    """Return the step in a name, or else the name of the lowest rank's file."""
    return label_of(key) or files[min(files)].name


def _step_order(key: str) -> Step:
    """Return the step in a name for comparison; names without a step come first."""
    return step_of(key) or Step(-1, -1, False)


def _by_step(keys: Iterable[str]) -> list[str]:
    """Return the keys of groups in the order of their steps, which are compared as numbers."""
    return sorted(keys, key=lambda key: (_step_order(key), key))


def _incomplete_problem(
    src: str, groups: Groups, keys: Sequence[str], ranks: Sequence[int]
) -> Diagnostic:
    """Return the problem that no wanted step is on every rank."""
    steps = _by_step(keys)
    absent = [
        f"{'step ' if step_of(key) else ''}{_display_name(key, groups[key])} is not on "
        f"{format_ranks([rank for rank in ranks if rank not in groups[key]])}"
        for key in reversed(steps)
    ]
    text, facts = absent[0], ""
    if len(absent) > 1:
        text, facts = "no step is on every rank", shorten(absent, 3)
    everywhere = [key for key in _by_step(groups) if len(groups[key]) == len(ranks)]
    hint = "copy the missing files; `ckpttool help mixed_steps` explains"
    if everywhere:
        hint = f"--step {_display_name(everywhere[-1], groups[everywhere[-1]])}"
    return Diagnostic("mixed_steps", text, hint, facts=facts, where=src)


def _is_recorded(files: Mapping[int, Path], records: Mapping[int, _LastSave]) -> bool:
    """Return whether every rank with a record recorded these files, or later ones of the run."""
    return bool(records) and all(
        record.is_of_run(files[rank]) and _step_order(files[rank].name) <= record.step
        for rank, record in records.items()
    )


def _record_notes(
    chosen: Groups, best: str, records: Mapping[int, _LastSave]
) -> Iterator[Diagnostic]:
    """Yield notes on the choice by records, and on skipped files."""
    last = min(record.step for record in records.values())
    if len(chosen) > 1:
        facts = f"the newest of {len(chosen)} steps that meta.json records and every rank has"
        if _step_order(best) != last:
            facts += f"; meta.json records {last.label}"
        yield Diagnostic("step", f"step {label_of(best)} is read", facts=facts)
    series = {rank: (run_of(path.name), path.suffix) for rank, path in chosen[best].items()}
    newer = []
    others = []
    for key in _by_step(chosen):
        files = chosen[key]
        if any((run_of(path.name), path.suffix) != series[rank] for rank, path in files.items()):
            others.append(files[min(files)].name)
        elif _step_order(key) > last:
            newer.append(str(label_of(key)))
    if newer:
        text = f"step {shorten(newer, 3)} is newer than meta.json records: ignored"
        yield Diagnostic("leftover", text, f"--step {newer[-1]}", facts="perhaps unfinished")
    if others:
        text = f"{shorten(others, 3)}: of another run than meta.json records: ignored"
        yield Diagnostic("skipped", text, f"--step {others[-1]}")


def _check_rivals(src: str, chosen: Groups, best: str) -> None:
    """Raise PlanError if files of several runs or of equal steps are candidates."""
    has_nameless = any(step_of(key) is None for key in chosen)
    rivals = [
        key
        for key in chosen
        if key != best
        and (has_nameless or _step_order(key) == _step_order(best) or run_of(key) != run_of(best))
    ]
    if rivals:
        first = min(chosen[rivals[0]])  # other rivals may lack this rank
        files = (
            chosen[key].get(first, next(iter(chosen[key].values()))) for key in (best, *rivals)
        )
        names = [path.name for path in files]
        ranks = tuple(sorted(chosen[rivals[0]]))
        folders = "folder" if len(ranks) == 1 else "folders"
        text = f"several checkpoints in the {folders} of {format_ranks(ranks)}"
        hint = f"--step {names[0]}, or another of these names"
        facts = shorten(names, 3)
        raise PlanError([Diagnostic("source", text, hint, (), facts, ranks=ranks, where=src)])


def _choice_notes(
    src: str, chosen: Groups, best: str, ranks: Sequence[int], records: Mapping[int, _LastSave]
) -> Iterator[Diagnostic]:
    """Yield notes on the choice among several steps, and on records that contradict it."""
    newest = max(chosen, key=_step_order)
    if newest != best:
        without = tuple(rank for rank in ranks if rank not in chosen[newest])
        step, incomplete = label_of(best), label_of(newest)
        text = f"step {step} is read, because step {incomplete} is incomplete"
        hint = f"copy the missing files, or --step {step} if this step is meant"
        facts = f"step {incomplete} is not on {format_ranks(without)}"
        yield Diagnostic("older_step", text, hint, facts=facts, ranks=without, where=src)
    elif len(chosen) > 1:
        yield Diagnostic("step", f"step {label_of(best)} is read, the newest of {len(chosen)}")
    if records:
        last = min(record.step for record in records.values()).label
        text = f"not every rank has step {last}, which meta.json records"
        yield Diagnostic("leftover", text, facts=f"step {label_of(best)} is read")


def _group_by_name(found: list[RankFile]) -> Groups:
    """Group the files of all ranks that were saved together, by their common name."""
    groups: dict[str, dict[int, Path]] = {}
    twice: dict[int, str] = {}
    for item, name in zip(found, read_names(found), strict=True):
        group = groups.setdefault(name.key, {})
        if item.rank in group:
            twice.setdefault(item.rank, f"{group[item.rank]} and {item.path}")
        group[item.rank] = item.path
    if twice:
        ranks, facts = tuple(sorted(twice)), twice[min(twice)]
        text = f"two files of one step for {format_ranks(ranks)}"
        hint = "a --pattern that matches one file of each rank"
        raise PlanError([Diagnostic("source", text, hint, (), facts, ranks=ranks)])
    return groups


@dataclass(frozen=True, slots=True)
class _LastSave:
    """The last save of one rank: its step and the name of its file."""

    step: Step
    name: str

    def is_of_run(self, path: Path) -> bool:
        """Return whether the same training run saved a file of this rank, in the same format."""
        return (run_of(path.name), path.suffix) == (
            run_of(self.name),
            Path(self.name).suffix,
        )


def _read_last_saves(
    found: Iterable[RankFile], diagnostics: Diagnostics
) -> Mapping[int, _LastSave]:
    """Return rank to record; broken records are left out, with a note."""
    records = {}
    broken: dict[int, FormatError] = {}
    for rank, folder in sorted({(item.rank, item.path.parent) for item in found}):
        path = folder / "meta.json"
        if not is_file(path):
            continue
        try:
            records[rank] = _read_last_save(path)
        except FormatError as error:
            broken[rank] = error
    if broken:
        ranks, (first, *_) = tuple(broken), broken.values()
        text = f"{format_ranks(ranks)}: meta.json does not say which step was saved last"
        facts = f"{first.path}: {first.reason}"
        diagnostics.add(Diagnostic("doubt", text, facts=facts, ranks=ranks, path=first.path))
    return records


def _read_last_save(path: Path) -> _LastSave:
    """Return the record in a ``meta.json``; raise FormatError if it is broken."""
    entries = read_json_object(str(path), MAX_BYTES)
    epoch, step = (entries.get(key) for key in ("last_epoch", "last_step"))
    name = entries.get("last_ckpt_file")
    if not isinstance(name, str) or type(epoch) is not int or type(step) is not int:
        reason = "expected the numbers last_epoch, last_step and the name last_ckpt_file"
        raise FormatError(str(path), None, reason)
    recorded = step_of(name)
    if recorded is None or recorded[:2] != (epoch, step):
        raise FormatError(str(path), None, f"lists step {epoch}_{step} and the file {name}")
    return _LastSave(recorded, name)
