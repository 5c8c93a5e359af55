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

from ckpttool.discovery.file_names import RankFile, Step, label_of, matches_step, run_of, step_of
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
    groups = _group_by_name(found, len(ranks))
    keys = [key for key in groups if wanted is None or matches_step(key, groups[key], wanted)]
    if not keys or (wanted is not None and wanted.isdecimal() and len(keys) > 1):
        shown = _by_step(keys or groups)
        names = list(dict.fromkeys(_display_name(key, groups[key]) for key in shown))
        have = shorten(names, 8)
        if keys:
            text = f"{src}: --step {wanted} is ambiguous: {have}"
            hint = f"give epoch and step, such as --step {names[-1]}"
            raise PlanError([Diagnostic("source", text, hint)])
        are = f"is only {have}" if len(groups) == 1 else f"are {have}"
        has_steps = any(map(step_of, groups))
        text = f"{src}: no file of step {wanted}; there {are}"
        text += "" if has_steps else ", of which no name tells a step"
        hint = "" if has_steps else "leave --step away"
        raise PlanError([Diagnostic("source", text, hint)])
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
        diagnostics.add(*_choice_notes(chosen, best, ranks, records))
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
    absent = [
        f"{key} is not in {format_ranks([rank for rank in ranks if rank not in groups[key]])}"
        for key in _by_step(keys)
    ]
    everywhere = [key for key in _by_step(groups) if len(groups[key]) == len(ranks)]
    text = f"{src}: {shorten(absent)}; "
    if everywhere:
        return Diagnostic("mixed_steps", f"{text}every rank has {shorten(everywhere)}")
    hint = "put back what is lacking, or move the folders of these ranks away: replicas stand in "
    hint += "for ranks that are missing, if there are any"
    return Diagnostic("mixed_steps", f"{text}no step is in every rank", hint)


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
    text = f"step {label_of(best)}, the newest that meta.json records and every rank has"
    if _step_order(best) != last:
        text = f"step {label_of(best)}, the newest that every rank has up to step {last.label}, "
        text += "which meta.json records"
    if len(chosen) > 1:
        yield Diagnostic("step", f"{text}, of {len(chosen)}")
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
        text = f"step {shorten(newer)}: newer than meta.json records, so unfinished or left from"
        yield Diagnostic("leftover", f"{text} another run; passed over (--step takes it)")
    if others:
        text = f"{shorten(others)}: of another run than meta.json records; passed over"
        yield Diagnostic("skipped", f"{text} (--step takes it)")


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
        named = shorten(path.name for path in files)
        of_ranks = format_ranks(sorted(chosen[rivals[0]]))
        text = f"{src}: several files for {of_ranks}, and nothing says which is meant: "
        hint = "choose with --pattern or --step, which takes a name, too"
        raise PlanError([Diagnostic("source", text + named, hint)])


def _choice_notes(
    chosen: Groups, best: str, ranks: Sequence[int], records: Mapping[int, _LastSave]
) -> Iterator[Diagnostic]:
    """Yield notes on the choice among several steps, and on records that contradict it."""
    newest = max(chosen, key=_step_order)
    if newest != best:
        without = format_ranks([rank for rank in ranks if rank not in chosen[newest]])
        text = f"step {label_of(best)}, the newest that every rank has "
        yield Diagnostic("older_step", f"{text}(step {label_of(newest)} is not in {without})")
    elif len(chosen) > 1:
        yield Diagnostic("step", f"step {label_of(best)}, the newest of {len(chosen)}")
    if records:
        last = min(record.step for record in records.values()).label
        text = f"step {label_of(best)}: meta.json records step {last}, which not every rank has"
        yield Diagnostic("leftover", text)


def _group_by_name(found: list[RankFile], count: int) -> Groups:
    """Group the files of all ranks that were saved together, by their common name.

    A number at the end of a name, or before its step, may be the rank (``checkpoint_3.h5``) or
    just part of the name; if a name is the same on every rank, it is part of the name.
    """
    groups: dict[str, dict[int, Path]] = {}
    plain: dict[str, dict[int, Path]] = {}
    problems = []
    for item in found:
        plain.setdefault(item.path.name, {})[item.rank] = item.path
    for item in found:
        shared = len(plain[item.path.name]) == count
        group = groups.setdefault(item.path.name if shared else item.key, {})
        if item.rank in group:
            problems.append(f"rank {item.rank}: two files, {group[item.rank]} and {item.path}")
        group[item.rank] = item.path
    if problems:
        raise PlanError(Diagnostic.each("source", problems))
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
        text = f"{format_ranks(tuple(broken))}: no record of the step saved last"
        diagnostics.add(Diagnostic("doubt", f"{text}: {next(iter(broken.values()))}"))
    return records


def _read_last_save(path: Path) -> _LastSave:
    """Return the record in a ``meta.json``; raise FormatError if it is broken."""
    entries = read_json_object(str(path), MAX_BYTES)
    epoch, step = (entries.get(key) for key in ("last_epoch", "last_step"))
    name = entries.get("last_ckpt_file")
    if not isinstance(name, str) or type(epoch) is not int or type(step) is not int:
        reason = "expected the numbers last_epoch and last_step and the name last_ckpt_file"
        raise FormatError(str(path), None, reason)
    recorded = step_of(name)
    if recorded is None or recorded[:2] != (epoch, step):
        raise FormatError(str(path), None, f"says step {epoch}_{step} and names the file {name}")
    return _LastSave(recorded, name)
