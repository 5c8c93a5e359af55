"""The choice of one save of a checkpoint: a file for each rank, all of one run and of one step.

Names and records choose:

* Where all ranks have a record and all records name one step, the files that they name are the
  checkpoint.  Where they name several steps, it is the newest step that no record is older than, of
  the runs that the records name.
* Without records it is the newest step that every rank has.  If every rank has equally many files
  of this step, the highest counter is the newest.
* Equal names do not prove one run.  The choice is refused if a rank has a file of a later run than
  its record, if only some ranks have records, or if counters or numbers of files differ between
  ranks.  ``--step`` then names the step, or the file of each rank.
* ``--step`` is refused if it contradicts a record of the same step, or if only some ranks have
  several files of it: the files of the others may be of any of these runs.

Times choose and propose nothing, since a copy has other times.  They only warn.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.discovery.file_names import NUMBER, SaveName, Step, is_step
from ckpttool.discovery.leftovers import note_special_save
from ckpttool.discovery.saves import FoundStep, Run, SavedFile, SavedFiles
from ckpttool.formats.local import stat_file
from ckpttool.problems import (
    Diagnostic,
    Diagnostics,
    FormatError,
    PlanError,
    StepError,
    UnsupportedError,
)
from ckpttool.wording import format_ranks, parse_numbers, shorten

_BY_RANK = re.compile(r"[\d,\s-]+:[^/]+(/[\d,\s-]+:[^/]+)*")  # 0-3:net-1_2/4-7:net_1-1_2


class Chosen(Struct, frozen=True):
    """A file of one save for each rank.

    Attributes
    ----------
    files
        Rank to file.
    label
        The step, None if the names have none.
    absent
        Ranks that have files, and none of this save.
    of_run, of_other_runs
        Other steps that ``--step`` takes, the newest first: of the same run, with the path of each
        rank, and of other runs.  The latter are None if there are no files of other runs.
    """

    files: Mapping[int, Path]
    label: str | None
    absent: tuple[int, ...] = ()
    of_run: Mapping[str, Mapping[int, str]] = {}
    of_other_runs: tuple[str, ...] | None = None


def choose_save(found: SavedFiles, wanted: str | None, diagnostics: Diagnostics) -> Chosen:
    """Return one file for each rank, all of one save.

    Parameters
    ----------
    found
        The files of the ranks that count.
    wanted
        The step; None for the newest.
    diagnostics
        Gets notes and warnings on the choice.

    Raises
    ------
    StepError
        No step is on every rank, or nothing shows which files are of one run.
    PlanError
        No file is of the wanted step, or files of several steps are.
    """
    if wanted is None:
        files = _choose_newest(found, diagnostics)
    elif _BY_RANK.fullmatch(wanted):
        files = _choose_by_rank(found, wanted)
    else:
        files = _choose_named(found, wanted)
    save = files[0].save
    note_special_save(files[0].path.name, diagnostics)
    by_rank = {file.rank: file.path for file in files}
    return Chosen(
        by_rank,
        save.step.label if save.step else None,
        tuple(rank for rank in found.ranks if rank not in by_rank),
        *_other_steps(found, files),
    )


def _other_steps(
    found: SavedFiles, chosen: Sequence[SavedFile]
) -> tuple[Mapping[str, Mapping[int, str]], tuple[str, ...] | None]:
    """Return `Chosen.of_run` and `Chosen.of_other_runs`.

    Steps of other runs are those behind the chosen one in the order of proposals, so that one
    proposal after the other comes to an end.
    """
    runs = {file.run for file in chosen}
    of_run: dict[str, Mapping[int, str]] = {}
    before: list[str] = []
    behind: list[str] | None = None
    for name, files in _taken(found):
        if files == chosen:
            behind = []
        elif {file.run for file in files} <= runs:
            of_run[name] = {file.rank: str(file.path) for file in files}
        else:
            (before if behind is None else behind).append(name)
    has_others = any(file.run not in runs for file in found.files)
    return of_run, tuple(before if behind is None else behind) if has_others else None


# -------------------------------------------------------------------------------------- every step


def list_steps(
    found: SavedFiles,
    missing: Collection[int],
    chosen: Mapping[int, Path],
    broken: Mapping[Path, FormatError | None],
) -> Iterator[FoundStep]:
    """Yield each save, the oldest step first; of several runs of a step each.

    Parameters
    ----------
    found
        The files of the ranks that count.
    missing
        Ranks that count and have no file of any step.
    chosen
        The files that are read without ``--step``.
    broken
        Files whose headers cannot be read, with the error; None for a file without a tensor.
    """
    labels = Counter(save.step for save in found.saves)
    begun: dict[tuple[str, Step | None], dict[int, str]] = defaultdict(dict)
    for file in found.begun:
        begun[file.save.prefix, file.save.step][file.rank] = file.path.name
    for save, of_ranks in sorted(found.saves.items(), key=lambda one: (one[0].order, one[0])):
        runs: dict[tuple[SavedFile, ...], str] = {}
        if save.step is not None and labels[save.step] == 1:
            runs[tuple(_pick_named(found, save, save.step.label))] = save.step.label
        most = max(map(len, of_ranks.values()))
        files = next(files for files in of_ranks.values() if len(files) == most)
        for file in files:  # the same place among the counters of a rank is one run
            runs.setdefault(tuple(_pick_named(found, save, file.path.name)), file.path.name)
        unfinished = begun.pop((save.prefix, save.step), {})
        for picked, name in reversed(runs.items()):
            if not picked:  # the step is recorded, of files that are lost
                continue
            yield _describe_step(found, picked, name, missing, unfinished, chosen, broken)
    lacking = tuple(sorted({*found.ranks, *missing}))
    for (_, step), files_of in sorted(begun.items(), key=lambda one: (one[0][1] or (), one[0])):
        label = step.label if step is not None else None
        names = shorten(dict.fromkeys(files_of.values()), 1)
        reason = f"{format_ranks(sorted(files_of))}: unfinished, {names}"
        yield FoundStep(None, label, False, reason, (), lacking, 0, 0, False)


def _describe_step(
    found: SavedFiles,
    picked: Sequence[SavedFile],
    name: str,
    missing: Collection[int],
    unfinished: Collection[int],
    chosen: Mapping[int, Path],
    broken: Mapping[Path, FormatError | None],
) -> FoundStep:
    """Return what is known of the files of a save."""
    ranks = tuple(file.rank for file in picked)
    absent = tuple(sorted({*found.ranks, *missing} - {*ranks}))
    errors = {file.rank: broken[file.path] for file in picked if file.path in broken}
    lost: dict[str, list[int]] = defaultdict(list)
    for rank in absent:
        lost["unfinished" if rank in unfinished else "no file"].append(rank)
    for rank, error in errors.items():
        lost["a file without a tensor" if error is None else error.reason].append(rank)
    reasons = [f"{format_ranks(of)}: {text}" for text, of in lost.items()]
    # A file may be empty because it was saved without redundancy, which a strategy would show.
    may_be_whole = not absent and all(
        isinstance(error, UnsupportedError) if error is not None else not found.has_strategy
        for error in errors.values()
    )
    complete: bool | None = not lost
    if lost and found.covers({*ranks} - errors.keys()):
        complete, reasons = True, [*reasons, "others hold all slices"]
    elif lost and may_be_whole:
        complete = None
    late = [
        file
        for file in picked
        if (record := found.records.get(file.rank)) is not None
        and file.run == record.run
        and file.save.order > record.save.order
    ]
    step = picked[0].save.step
    one = FoundStep(
        name,
        None if step is None else step.label,
        complete,
        "; ".join(reasons),
        ranks,
        absent,
        len(picked),
        sum(stat_file(file.path).nbytes for file in picked),
        all(chosen.get(file.rank) == file.path for file in picked),
        tuple(rank for rank, error in errors.items() if error is not None),
    )
    if late:
        one = one.doubted(None, "newer than meta.json records")
    if problem := _contradiction(found, picked) or _ambiguity(found, picked):
        one = one.doubted(None, problem.message)
    return one


# --------------------------------------------------------------------------------- the newest step


def _choose_newest(found: SavedFiles, diagnostics: Diagnostics) -> list[SavedFile]:
    """Return the files of the newest step that every rank has."""
    picked = {save: _pick_recorded_runs(found, save) for save in found.saves}
    complete = [save for save in picked if len(picked[save]) == len(found.ranks)]
    if not complete:
        raise _refusal(found, _incomplete_problem(found, found.saves))
    recorded = [save for save in complete if _is_recorded(found, picked[save])]
    best = max(recorded or complete, key=lambda save: (save.order, save.prefix, save.suffix))
    files = picked[best]
    if problem := _mixed_runs(found, files):
        raise _refusal(found, problem)
    diagnostics.add(*(_record_notes if recorded else _choice_notes)(found, files))
    diagnostics.add(*_warn_of_times(found, files))
    return files


def _pick_recorded_runs(found: SavedFiles, save: SaveName) -> list[SavedFile]:
    files = []
    for rank, of_rank in found.saves[save].items():
        record = found.records.get(rank)
        files += [file for file in of_rank if record is None or file.run == record.run][:1]
    return files


def _is_recorded(found: SavedFiles, files: Iterable[SavedFile]) -> bool:
    return bool(found.records) and all(
        file.save.order <= found.records[file.rank].save.order
        for file in files
        if file.rank in found.records
    )


def _mixed_runs(found: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return why files of one step may be of several runs, or None.

    If they are recorded, files of other names are of other runs, and no rivals.
    """
    save = files[0].save
    later = [
        file
        for file in found.files
        if (record := found.records.get(file.rank)) is not None
        and file.series == record.series
        and file.counter > record.counter
    ]
    if later:
        first, ranks = later[0], sorted({file.rank for file in later})
        text = f"{format_ranks(ranks)}: files of a later run than meta.json records"
        facts = f"{first.path.name}; meta.json names {found.records[first.rank].path.name}"
        return _problem(found, text, facts, ranks)
    if all(map(found.is_recorded, files)):
        return None
    without = [rank for rank in found.ranks if rank not in found.records]
    if found.records and without:
        text = f"{format_ranks(without)}: no meta.json says which run saved {save.text}"
        return _problem(found, text, "the other ranks have one", without)
    if not _is_recorded(found, files) and (rivals := _rivals(found, files)):
        ranks = sorted({file.rank for file in rivals})
        of_rank = next(file for file in files if file.rank == rivals[0].rank)
        names = dict.fromkeys(
            file.path.name for file in (of_rank, *rivals) if file.rank == of_rank.rank
        )
        folders = "folder" if len(ranks) == 1 else "folders"
        text = f"several checkpoints in the {folders} of {format_ranks(ranks)}"
        return _problem(found, text, shorten(names, 3), ranks)
    return _uneven_numbers(found, save) or _unlike_counters(found, files)


def _rivals(found: SavedFiles, files: Sequence[SavedFile]) -> list[SavedFile]:
    """Return the files that may be newer than some of one step, though their steps are not.

    They have another prefix or suffix, no step, or a higher counter.
    """
    save, counters = files[0].save, {file.rank: file.counter for file in files}
    return [
        file
        for file in found.files
        if file.series != files[0].series
        or (file.save != save and (not file.save.step or file.counter > counters[file.rank]))
    ]


def _ambiguity(found: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return why the files of a step that was named may be of several runs, or None.

    If all ranks have one, the name is an answer to the question whether counters may differ.
    """
    is_complete = len(files) == len(found.ranks)
    if is_complete and all(map(found.is_recorded, files)):
        return None
    uneven = _uneven_numbers(found, files[0].save) or _unlike_runs(found, files)
    return uneven or (None if is_complete else _unlike_counters(found, files))


def _unlike_runs(found: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return the problem that some files are of the last run of their rank and others are not."""
    last = found.last_counters
    earlier = [
        file
        for file in files
        if (record := found.records.get(file.rank, file)).series == file.series
        and file.counter < max(record.counter, last[file.rank, file.series])
    ]
    if not earlier or len(earlier) == len(files):
        return None
    # A later run that was killed in its first save leaves the earlier one alike on all ranks.
    steps: dict[Run, set[Step]] = defaultdict(set)
    for file in found.files:
        steps[file.run].add(file.save.order)
    are_alike = len({frozenset(steps[file.run]) for file in files}) == 1
    repeated = (save for save in found.saves if (save.prefix, save.suffix) == files[0].series)
    if are_alike and not any(_uneven_numbers(found, save) for save in repeated):
        return None
    ranks = [file.rank for file in earlier]
    text = f"{format_ranks(ranks)}: a later run than that of {files[0].save.text} left files"
    return _problem(found, text, "the other ranks have none of a later run", ranks)


def _unlike_counters(found: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return the problem that files of a step, unfinished ones too, differ in counters, or None."""
    save = files[0].save
    begun = (file for file in found.begun if file.save._replace(suffix=save.suffix) == save)
    lowest = min(files, key=lambda file: file.counter)
    highest = max((*files, *begun), key=lambda file: file.counter)
    if highest.counter == lowest.counter:
        return None
    text = f"files of {save.text} may be of two runs"
    facts = "; ".join(f"rank {file.rank}: {file.path.name}" for file in (highest, lowest))
    return _problem(found, text, facts, sorted({highest.rank, lowest.rank}))


def _uneven_numbers(found: SavedFiles, save: SaveName) -> Diagnostic | None:
    """Return the problem that some ranks have more files of a step than others, or None."""
    folders = found.saves[save]
    most = max(len(files) for files in folders.values())
    fewer = [rank for rank in found.ranks if len(folders.get(rank, ())) < most]
    if not fewer or most == 1:  # a rank that lacks the step is read from replicas
        return None
    several = next(files for files in folders.values() if len(files) == most)
    text = f"{format_ranks(fewer)}: nothing shows which run saved {save.text}"
    names = shorten((file.path.name for file in several), 3)
    return _problem(found, text, f"rank {several[0].rank} has {names}", fewer)


def _problem(found: SavedFiles, text: str, facts: str, ranks: Sequence[int]) -> Diagnostic:
    return Diagnostic("mixed_runs", text, facts=facts, ranks=tuple(ranks), where=found.src)


def _incomplete_problem(found: SavedFiles, saves: Iterable[SaveName]) -> Diagnostic:
    """Return the problem that no wanted step is on every rank."""
    holding: dict[Step | SaveName, set[int]] = defaultdict(set)
    for save in found.saves:
        holding[save.step or save].update(found.saves[save])
    texts = [
        f"{save.text} is not on {format_ranks(absent)}"
        for save in sorted(saves, key=lambda save: (save.order, save), reverse=True)
        if (absent := [rank for rank in found.ranks if rank not in holding[save.step or save]])
    ]
    if not texts:  # each rank has files of a step, but not of one name, or of the recorded run
        names = {file.rank: file.path.name for file in found.files}
        text = "the files of all ranks are not of one run"
        return _problem(found, text, shorten(names.values(), 3), ())
    text, facts = texts[0], ""
    if len(texts) > 1:
        text, facts = "no step is on every rank", shorten(dict.fromkeys(texts), 3)
    return Diagnostic("mixed_steps", text, facts=facts, where=found.src)


# ---------------------------------------------------------------------------------- a step by name


def _choose_named(found: SavedFiles, name: str) -> list[SavedFile]:
    """Return the files that a step or the name of a file means."""
    saves = [save for save in found.saves if _matches(found, save, name)]
    if not saves or (NUMBER.fullmatch(name) and len({save.step for save in saves}) > 1):
        raise PlanError([_no_such_step(found, name, saves)])
    if len(saves) > 1:
        files = [min(found.saves[save].items())[1][0] for save in saves]
        text = f"several checkpoints of {saves[0].text}"
        names = shorten(dict.fromkeys(file.path.name for file in files), 3)
        raise _refusal(found, _problem(found, text, names, ()))
    picked = _pick_named(found, saves[0], name)
    of_others = [files[0] for files in found.saves[saves[0]].values()]  # if all files are of these
    if problem := _contradiction(found, picked or of_others) or _ambiguity(found, picked):
        raise _refusal(found, problem)
    if len(picked) < len(found.ranks) and not found.covers({file.rank for file in picked}):
        raise _refusal(found, _incomplete_problem(found, saves))
    return picked


def _matches(found: SavedFiles, save: SaveName, name: str) -> bool:
    files = (file for of_rank in found.saves[save].values() for file in of_rank)
    return is_step(save.step, name) or any(file.is_called(name) for file in files)


def _no_such_step(found: SavedFiles, name: str, saves: Sequence[SaveName]) -> Diagnostic:
    """Return the problem of a step that no save has, or of a number that several have."""
    shown = [
        save.step.label if save.step else min(found.saves[save].items())[1][0].path.name
        for save in sorted(saves or found.saves, key=lambda save: (save.order, save))
    ]
    facts = f"found {shorten(dict.fromkeys(shown), 3)}"
    text = f"step {name} is ambiguous" if saves else f"no file of step {name}"
    proposed = (one for one, _ in _taken(found) if one in shown)
    hint = f"--step {quote(next(proposed, shown[-1]))}"
    if not any(save.step for save in found.saves):
        facts, hint = f"{facts}; these names have no step", "omit --step"
    return Diagnostic("source", text, hint=hint, facts=facts, where=found.src)


def _pick_named(found: SavedFiles, save: SaveName, name: str) -> list[SavedFile]:
    """Return the file of each rank that ``--step name`` means.

    Of several files of a rank a step means the one of the recorded run, else the highest counter.
    If it is of the recorded run of some ranks, those that have it of other runs only have none.
    The name of a file means that one, and on other ranks the one at the same place among its
    counters.
    """
    folders = found.saves[save]
    named = {
        rank: (i - len(files), file)
        for rank, files in folders.items()
        for i, file in enumerate(files)
        if file.is_called(name)
    }
    if named:
        place = min(place for place, _ in named.values())
        return [
            named[rank][1] if rank in named else files[max(place, -len(files))]
            for rank, files in folders.items()
        ]
    of_runs = _pick_recorded_runs(found, save)
    if any(file.rank in found.records for file in of_runs):
        return of_runs
    # Where a record names another file of this save, that one is lost, and these are of other runs.
    return [
        files[0]
        for rank, files in folders.items()
        if (record := found.records.get(rank)) is None or record.save != save
    ]


def _contradiction(found: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return the problem that records name other files of the same step, or None."""
    wrong = [
        file
        for file in files
        if (record := found.records.get(file.rank)) is not None
        and record.save == file.save
        and record != file
    ]
    if not wrong:
        return None
    first, ranks = wrong[0], [file.rank for file in wrong]
    text = f"{format_ranks(ranks)}: meta.json names another file of {first.save.text}"
    facts = f"it names {found.records[first.rank].path.name}, and {first.path.name} was chosen"
    return _problem(found, text, facts, ranks)


def _choose_by_rank(found: SavedFiles, wanted: str) -> list[SavedFile]:
    """Return the files that ``RANKS:NAME/RANKS:NAME`` gives to the ranks, all of one step."""
    of_ranks: dict[int, list[SavedFile]] = defaultdict(list)
    for file in found.files:
        of_ranks[file.rank].append(file)
    chosen: dict[int, SavedFile] = {}
    problems = []
    for part in wanted.split("/"):
        numbers, name = part.split(":", 1)
        # The name of one rank's file means the files of equal names on the others.
        equal = {file.name for file in found.files if file.is_called(name)}
        without: dict[str, list[int]] = defaultdict(list)
        for rank in parse_numbers(numbers):
            named = [
                file
                for file in of_ranks[rank]
                if file.name in equal or is_step(file.save.step, name)
            ]
            if len(named) == 1 and rank not in chosen:
                chosen[rank] = named[0]
            else:
                without["several files" if named else "no file"].append(rank)
        for number, ranks in without.items():
            text = f"step {part}: {number} of {format_ranks(ranks)}"
            has = shorten((file.path.name for file in of_ranks[ranks[0]]), 3) or "none"
            facts = f"files of rank {ranks[0]}: {has}"
            hint = "the name of one file for each rank, such as 0-1:NAME/2-3:NAME"
            problems.append(Diagnostic("source", text, hint=hint, facts=facts, ranks=tuple(ranks)))
    files = [chosen[rank] for rank in sorted(chosen)]
    if problems:
        raise PlanError(problems)
    if len({file.save.step for file in files}) > 1:
        names = shorten(dict.fromkeys(file.path.name for file in files), 3)
        text = "the chosen files are of several steps"
        raise StepError([Diagnostic("mixed_steps", text, facts=names, where=found.src)])
    if problem := _contradiction(found, files):
        raise StepError([problem])
    others = [rank for rank in found.ranks if rank not in chosen]
    if others and not found.covers(chosen.keys()):
        text = f"no file was chosen for {format_ranks(others)}"
        facts = "no strategy says that the others hold all slices"
        hint = "name a file of these ranks, too: 0-1:NAME/2-3:NAME"
        raise StepError([Diagnostic("mixed_steps", text, hint=hint, facts=facts, where=found.src)])
    return files


# ----------------------------------------------------------------------------- proposals and notes


def _candidates(found: SavedFiles) -> list[_Candidate]:
    """Return the saves that every rank has, or ranks that hold all slices.

    The newest step of the last run, which has the highest counter, comes first.
    """
    labels = Counter(save.step for save in found.saves)
    candidates = []
    for save, folders in found.saves.items():
        name = min(folders.items())[1][0].path.name
        if save.step is not None and labels[save.step] == 1:
            name = save.step.label
        files = _pick_named(found, save, name)
        if len(files) == len(found.ranks) or found.covers({file.rank for file in files}):
            candidates.append(_Candidate(max(one.counter for one in files), name, files))
    return sorted(candidates, key=lambda one: (one.run, one.files[0].save.order), reverse=True)


class _Candidate(NamedTuple):
    """A save that may be chosen: the place of its run in their order, its name and files."""

    run: int
    name: str
    files: list[SavedFile]


def _taken(found: SavedFiles) -> Iterator[tuple[str, list[SavedFile]]]:
    for one in _candidates(found):
        if not (_contradiction(found, one.files) or _ambiguity(found, one.files)):
            yield one.name, one.files


def _proposals(found: SavedFiles) -> Iterator[tuple[str, list[SavedFile]]]:
    """Yield what ``--step`` takes, a file for each rank if need be, and its files.

    If the files of the last run are in doubt, no step of an earlier run is proposed, unless it is
    recorded.  None is proposed of several prefixes: nothing tells which one is the last.
    """
    candidates = _candidates(found)
    last = {one.files[0].series for one in candidates}
    if len(last) > 1:
        return
    is_any = False
    for run, name, files in candidates:
        is_earlier = run != candidates[0].run and not all(map(found.is_recorded, files))
        if _contradiction(found, files) or (is_earlier and not is_any):
            continue
        if _ambiguity(found, files):
            files = _pick_recorded(found, files)
            name = _name_by_rank(files)
        if files:
            is_any = True
            yield name, files


def _pick_recorded(found: SavedFiles, files: Iterable[SavedFile]) -> list[SavedFile]:
    recorded = [file for file in files if found.is_recorded(file)]
    is_one_run = len({file.counter for file in recorded}) == 1
    return recorded if is_one_run and found.covers({file.rank for file in recorded}) else []


def _time_of(file: SavedFile) -> int:
    return stat_file(file.path).mtime_ns


def _name_by_rank(files: Sequence[SavedFile]) -> str:
    at_ranks = groupby(enumerate(files), lambda one: (one[1].name, one[1].rank - one[0]))
    runs = [[file for _, file in equal] for _, equal in at_ranks]
    return "/".join(
        f"{equal[0].rank}{f'-{equal[-1].rank}' if equal[1:] else ''}:{equal[0].path.name}"
        for equal in runs
    )


def _refusal(found: SavedFiles, problem: Diagnostic) -> StepError:
    hint = f"copy the missing files; `ckpttool help {problem.code}` explains"
    if problem.code == "mixed_runs":
        hint = "name the file of each rank; `ckpttool help mixed_runs` shows how"
    if names := [f"--step {quote(name)}" for name, _ in islice(_proposals(found), 2)]:
        hint = names[0] if ":" in names[0] else ", or ".join(names)
    return StepError([replace(problem, hint=hint)])


def _record_notes(found: SavedFiles, files: Sequence[SavedFile]) -> Iterator[Diagnostic]:
    """Yield notes on a choice by records, and on skipped files."""
    best = files[0].save
    last = min(record.save.order for record in found.records.values())
    if len(found.saves) > 1:
        facts = f"the newest of {len(found.saves)} steps that meta.json records and every rank has"
        if best.order != last:
            facts += f"; meta.json records {last.label}"
        yield Diagnostic("step", f"{best.text} is read", facts=facts)
    runs = {file.run for file in files}
    newer = set()
    others: dict[SaveName, str] = {}
    for file in found.files:
        if file.run not in runs:
            others.setdefault(file.name, file.path.name)
        elif file.save.order > last:
            newer.add(file.save.order)
    if newer:
        labels = [step.label for step in sorted(newer)]
        text = f"step {shorten(labels, 3)} is newer than meta.json records: ignored"
        yield Diagnostic("leftover", text, hint=f"--step {labels[-1]}", facts="perhaps unfinished")
    if others:
        text = f"{shorten(others.values(), 3)}: of another run than meta.json records: ignored"
        hint = next((f"--step {quote(name)}" for name, of in _taken(found) if of != files), "")
        yield Diagnostic("skipped", text, hint=hint)


def _choice_notes(found: SavedFiles, files: Sequence[SavedFile]) -> Iterator[Diagnostic]:
    """Yield notes on the choice among several steps, and on records that contradict it."""
    best, newest = files[0].save, max(found.saves, key=lambda save: save.order)
    if newest.order > best.order:
        without = tuple(rank for rank in found.ranks if rank not in found.saves[newest])
        text = f"{best.text} is read, because not every rank has {newest.text}"
        hint = f"copy the missing files, or --step {best.order.label} if this step is meant"
        facts = f"{newest.text} is not on {format_ranks(without)}"
        if newest.order.label in (name for name, _ in _taken(found)):
            facts += ", and other ranks hold all slices"
            hint = f"--step {newest.order.label}, to read it from replicas"
        yield Diagnostic("older_step", text, hint=hint, facts=facts, ranks=without, where=found.src)
    elif len(found.saves) > 1:
        yield Diagnostic("step", f"{best.text} is read, the newest of {len(found.saves)}")
    chosen = {file.name for file in files}
    others = {
        file.name: file.path.name
        for file in reversed(found.files)
        if file.save == best and file.name not in chosen
    }
    if earlier := [*others.values()]:
        text = f"{shorten(earlier, 3)}: of an earlier run, by their counters: ignored"
        yield Diagnostic("skipped", text, hint=f"--step {quote(earlier[-1])}")
    if found.records:
        last = min(record.save.order for record in found.records.values()).label
        text = f"not every rank has step {last}, which meta.json records"
        yield Diagnostic("leftover", text, facts=f"{best.text} is read")


def _warn_of_times(found: SavedFiles, files: Sequence[SavedFile]) -> Iterator[Diagnostic]:
    """Yield a warning if an older step was written after a later step of another rank."""
    save = files[0].save
    later = [
        file
        for file in found.files
        if file.series == files[0].series and file.save.order > save.order
    ]
    if not later:
        return
    first = min(later, key=_time_of)
    after = [file for file in files if file.rank != first.rank and _time_of(file) > _time_of(first)]
    if after:
        ranks = tuple(file.rank for file in after)
        text = f"{format_ranks(ranks)}: {save.text} was written after a later step"
        facts = f"rank {first.rank} wrote {first.path.name} before"
        hint = "compare the dates; `ckpttool help mixed_times` explains"
        yield Diagnostic("mixed_times", text, hint=hint, facts=facts, ranks=ranks, where=found.src)
