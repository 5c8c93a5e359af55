"""The choice of one save of a checkpoint: a file for each rank, all of one run and of one step.

`_names` says what ``--step`` takes for each save of `SavedFiles.saves`, and `_pick_named` which
file a name means on each rank.  `REASONS` is the table of why these files are not taken, and
`_proposals` says what is taken instead.  The newest step, a step by its name and the list of all
steps have no other rules.

* Where all ranks have a record and all records name one step, the files that they name are the
  checkpoint.  Where they name several steps, it is the newest step of the recorded runs that is not
  newer than the oldest record.
* Without records it is the newest step that every rank has.  If every rank has equally many files
  of this step, the highest counter is the newest.
* Equal names do not prove one run.  The choice is refused if a rank has a file of a later run than
  its record, or if only some ranks have records.  It is also refused if counters or numbers of
  files differ between ranks.  ``--step`` then names the step, or the file of each rank.
* ``--step`` is refused if it contradicts a record of the same step, or if only some ranks have
  several files of it: the files of the others may be of any of these runs.

Times choose and propose nothing, since a copy has other times.  They only warn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from shlex import quote
from typing import Literal, NamedTuple, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.discovery.file_names import NUMBER, SaveName, Step, is_step
from ckpttool.discovery.ignored import note_special_save
from ckpttool.discovery.saves import FoundStep, Run, SavedFile, SavedFiles
from ckpttool.formats.local import stat_file
from ckpttool.lazy import compile_late
from ckpttool.problems import (
    Diagnostic,
    Diagnostics,
    FormatError,
    PlanError,
    StepError,
    UnsupportedError,
)
from ckpttool.transaction.states import Record, find_unfinished_run
from ckpttool.wording import format_ranks, parse_numbers, shorten

_BY_RANK = compile_late(r"[\d,\s-]+:[^/]+(/[\d,\s-]+:[^/]+)*")  # 0-3:net-1_2/4-7:net_1-1_2


class Chosen(Struct, frozen=True):
    """A file of one save for each rank.

    ``absent`` ranks have files, but none of this save.  ``of_run`` and ``of_other_runs`` are other
    steps that ``--step`` takes, the newest first: of the same run, with the path of each rank, and
    of other runs; None without files of other runs.
    """

    files: Mapping[int, Path]
    label: str | None
    absent: tuple[int, ...] = ()
    of_run: Mapping[str, Mapping[int, str]] = {}
    of_other_runs: tuple[str, ...] | None = None


def choose_save(saved: SavedFiles, wanted: str | None, diagnostics: Diagnostics) -> Chosen:
    """Return one file for each rank that counts, all of the wanted save; None for the newest.

    StepError says that no step is on every rank, or that nothing shows which files are of one run;
    PlanError that no file is of the wanted step, or that files of several steps are.
    """
    if wanted is None:
        files = _choose_newest(saved, diagnostics)
    elif _BY_RANK.fullmatch(wanted):
        files = _choose_by_rank(saved, wanted)
    else:
        files = _choose_named(saved, wanted)
    step = files[0].save.step
    note_special_save(files[0].path.name, diagnostics)
    by_rank = {file.rank: file.path for file in files}
    absent = tuple(rank for rank in saved.ranks if rank not in by_rank)
    return Chosen(by_rank, step.label if step else None, absent, *_other_steps(saved, files))


def _other_steps(
    saved: SavedFiles, chosen: Sequence[SavedFile]
) -> tuple[Mapping[str, Mapping[int, str]], tuple[str, ...] | None]:
    """Return `Chosen.of_run` and `Chosen.of_other_runs`.

    Steps of other runs are those that are proposed after the chosen one.  So a user who takes one
    proposal after the other reaches an end.
    """
    runs = {file.run for file in chosen}
    of_run: dict[str, Mapping[int, str]] = {}
    before: list[str] = []
    behind: list[str] | None = None
    for name, files in _taken(saved):
        if files == chosen:
            behind = []
        elif {file.run for file in files} <= runs:
            of_run[name] = {file.rank: str(file.path) for file in files}
        else:
            (before if behind is None else behind).append(name)
    has_others = any(file.run not in runs for file in saved.files)
    return of_run, tuple(before if behind is None else behind) if has_others else None


# ------------------------------------------------------------------------------ the table of saves


class _Choice(NamedTuple):
    """A value of ``--step``, and the file of a save that it means on each rank."""

    name: str
    files: list[SavedFile]


def _names(saved: SavedFiles) -> dict[SaveName, list[str]]:
    """Return what ``--step`` takes for each save, the newest run first.

    The step is the name if one save has it; else, and of earlier runs, it is the name of a file.
    The same place among the counters of a rank is one run.
    """
    times = Counter(save.step for save in saved.saves)
    names: dict[SaveName, list[str]] = {}
    for save, of_ranks in saved.saves.items():
        names[save] = [file.path.name for file in max(of_ranks.values(), key=len)]
        if save.step is not None and times[save.step] == 1:
            names[save].insert(0, save.step.label)
    return names


def _pick_named(saved: SavedFiles, save: SaveName, name: str) -> list[SavedFile]:
    """Return the file of each rank that ``--step name`` means.

    On a rank with several files, a step means the file of the recorded run, else the highest
    counter.  If some ranks have the step in their recorded run, ranks that have it only in other
    runs get no file.  The name of a file means that file, and on other ranks the file at the same
    place among the counters.
    """
    of_ranks = saved.saves[save]
    places = {
        rank: i - len(files)
        for rank, files in of_ranks.items()
        for i, file in enumerate(files)
        if file.is_called(name)
    }
    if places:
        last = min(places.values())
        return [files[max(places.get(rank, last), -len(files))] for rank, files in of_ranks.items()]
    of_runs = _pick_recorded_runs(saved, save)
    if any(file.rank in saved.records for file in of_runs):
        return of_runs
    # Where a record names another file of this save, that one is lost, and these are of other runs.
    return [
        files[0]
        for rank, files in of_ranks.items()
        if (record := saved.records.get(rank)) is None or record.save != save
    ]


def _pick_recorded_runs(saved: SavedFiles, save: SaveName) -> list[SavedFile]:
    files = []
    for rank, of_rank in saved.saves[save].items():
        record = saved.records.get(rank)
        files += [file for file in of_rank if record is None or file.run == record.run][:1]
    return files


def _candidates(saved: SavedFiles) -> list[_Choice]:
    """Return the last run of the saves that every rank has, or ranks that hold all slices.

    The newest step of the last run, which has the highest counter, comes first.
    """
    newest = (
        _Choice(names[0], _pick_named(saved, save, names[0]))
        for save, names in _names(saved).items()
    )
    candidates = [choice for choice in newest if _is_enough(saved, choice.files)]
    return sorted(
        candidates, key=lambda choice: (_last_run(choice), choice.files[0].save.order), reverse=True
    )


def _last_run(choice: _Choice) -> int:
    return max(file.counter for file in choice.files)


def _is_enough(saved: SavedFiles, files: Collection[SavedFile]) -> bool:
    return len(files) == len(saved.ranks) or saved.covers({file.rank for file in files})


def _taken(saved: SavedFiles) -> Iterator[_Choice]:
    for choice in _candidates(saved):
        if not _why_not(saved, choice.files):
            yield choice


def _proposals(saved: SavedFiles) -> Iterator[str]:
    """Yield what ``--step`` takes, a file for each rank if need be.

    If the files of the last run are in doubt, no step of an earlier run is proposed, unless it is
    recorded.  With several prefixes nothing is proposed, since nothing shows which one is the last.
    """
    candidates = _candidates(saved)
    if len({choice.files[0].series for choice in candidates}) > 1:
        return
    is_any = False
    for choice in candidates:
        name, files = choice
        is_earlier = _last_run(choice) != _last_run(candidates[0])
        if _contradiction(saved, files) or (
            is_earlier and not is_any and not all(map(saved.is_recorded, files))
        ):
            continue
        if _why_not(saved, files):
            files = [file for file in files if saved.is_recorded(file)]
            is_one_run = len({file.counter for file in files}) == 1
            if not (is_one_run and saved.covers({file.rank for file in files})):
                continue
            name = _name_by_rank(files)
        is_any = True
        yield name


def _name_by_rank(files: Sequence[SavedFile]) -> str:
    at_ranks = groupby(enumerate(files), lambda item: (item[1].name, item[1].rank - item[0]))
    runs = [[file for _, file in equal] for _, equal in at_ranks]
    return "/".join(
        f"{equal[0].rank}{f'-{equal[-1].rank}' if equal[1:] else ''}:{equal[0].path.name}"
        for equal in runs
    )


# -------------------------------------------------------------------------------------- every step


def list_steps(
    saved: SavedFiles,
    missing: Collection[int],
    chosen: Mapping[int, Path],
    broken: Mapping[Path, FormatError | None],
) -> Iterator[FoundStep]:
    """Yield each save, the oldest step first; of several runs of a step each.

    ``missing`` ranks count and have no file of any step.  ``chosen`` has the files that are read
    without ``--step``, and ``broken`` those whose headers cannot be read, with the error; None for
    a file without a tensor.
    """
    begun: dict[tuple[str, Step | None], dict[int, str]] = defaultdict(dict)
    for file in saved.begun:
        begun[file.save.prefix, file.save.step][file.rank] = file.path.name
    for save, names in sorted(_names(saved).items(), key=lambda item: (item[0].order, item[0])):
        runs: dict[tuple[SavedFile, ...], str] = {}
        for name in names:
            runs.setdefault(tuple(_pick_named(saved, save, name)), name)
        unfinished = begun.pop((save.prefix, save.step), {})
        for files, name in reversed(runs.items()):
            if files:  # else the step is recorded, of files that are lost
                choice = _Choice(name, [*files])
                yield _describe_step(saved, choice, missing, unfinished, chosen, broken)
    lacking = tuple(sorted({*saved.ranks, *missing}))
    for (_, step), files_of in sorted(begun.items(), key=lambda item: (item[0][1] or (), item[0])):
        label = step.label if step is not None else None
        first = shorten(dict.fromkeys(files_of.values()), 1)
        reason = f"{format_ranks(sorted(files_of))}: unfinished, {first}"
        yield FoundStep(None, label, False, reason, (), lacking, 0, 0, False)


def _describe_step(
    saved: SavedFiles,
    choice: _Choice,
    missing: Collection[int],
    unfinished: Collection[int],
    chosen: Mapping[int, Path],
    broken: Mapping[Path, FormatError | None],
) -> FoundStep:
    name, files = choice
    ranks = tuple(file.rank for file in files)
    absent = tuple(sorted({*saved.ranks, *missing} - {*ranks}))
    errors = {file.rank: broken[file.path] for file in files if file.path in broken}
    lost: dict[str, list[int]] = defaultdict(list)
    for rank in absent:
        lost["unfinished" if rank in unfinished else "no file"].append(rank)
    for rank, error in errors.items():
        lost["a file without a tensor" if error is None else error.reason].append(rank)
    reasons = [f"{format_ranks(of)}: {reason}" for reason, of in lost.items()]
    # A file may be empty because it was saved without redundancy, which a strategy would show.
    may_be_whole = not absent and all(
        isinstance(error, UnsupportedError) if error is not None else saved.strategy is None
        for error in errors.values()
    )
    complete: bool | None = not lost
    if lost and saved.covers({*ranks} - errors.keys()):
        complete, reasons = True, [*reasons, "others hold all slices"]
    elif lost and may_be_whole:
        complete = None
    is_late = any(
        (record := saved.records.get(file.rank)) is not None
        and file.run == record.run
        and file.save.order > record.save.order
        for file in files
    )
    step = FoundStep(
        name,
        None if files[0].save.step is None else files[0].save.step.label,
        complete,
        "; ".join(reasons),
        ranks,
        absent,
        len(files),
        sum(stat_file(file.path).nbytes for file in files),
        all(chosen.get(file.rank) == file.path for file in files),
        tuple(rank for rank, error in errors.items() if error is not None),
    )
    if is_late:
        step = step.doubted(None, "newer than meta.json records")
    if saved.strategy is None and step.complete and len(saved.ranks) > 1:
        reason = f"only a strategy shows whether ranks follow {max(saved.ranks)}"
        step = step.doubted(None, reason)
    problem = _why_not(saved, files)
    return step if problem is None else step.doubted(None, problem.message)


# --------------------------------------------------------------------------------- the newest step


def _choose_newest(saved: SavedFiles, diagnostics: Diagnostics) -> list[SavedFile]:
    """Return the files of the newest step that every rank has."""
    of_runs = {save: _pick_recorded_runs(saved, save) for save in saved.saves}
    complete = [save for save, files in of_runs.items() if len(files) == len(saved.ranks)]
    if not complete:
        raise _refusal(saved, _incomplete_problem(saved, saved.saves))
    recorded = [save for save in complete if _are_recorded(saved, of_runs[save])]
    best = max(recorded or complete, key=lambda save: (save.order, save.prefix, save.suffix))
    files = of_runs[best]
    if problem := _why_not(saved, files, is_newest=True):
        raise _refusal(saved, problem)
    diagnostics.add(*(_record_notes if recorded else _choice_notes)(saved, files))
    diagnostics.add(*_warn_of_times(saved, files))
    return files


def _are_recorded(saved: SavedFiles, files: Iterable[SavedFile]) -> bool:
    return bool(saved.records) and all(
        file.save.order <= saved.records[file.rank].save.order
        for file in files
        if file.rank in saved.records
    )


# ---------------------------------------------------------------------------------- a step by name


def _choose_named(saved: SavedFiles, name: str) -> list[SavedFile]:
    """Return the files that a step or the name of a file means."""
    saves = [
        save
        for save, of_ranks in saved.saves.items()
        if is_step(save.step, name)
        or any(file.is_called(name) for files in of_ranks.values() for file in files)
    ]
    if not saves or (NUMBER.fullmatch(name) and len({save.step for save in saves}) > 1):
        raise PlanError([_no_such_step(saved, name, saves)])
    newest = [files[0] for files in saved.saves[saves[0]].values()]
    if len(saves) > 1:
        names = (min(saved.saves[save].items())[1][0].path.name for save in saves)
        message = f"several checkpoints of {saves[0].text}"
        raise _refusal(saved, _mixed_runs(saved, message, shorten(dict.fromkeys(names), 3)))
    files = _pick_named(saved, saves[0], name)
    if problem := _why_not(saved, files or newest):
        raise _refusal(saved, problem)
    if not _is_enough(saved, files):
        raise _refusal(saved, _incomplete_problem(saved, saves))
    return files


def _no_such_step(saved: SavedFiles, name: str, saves: Sequence[SaveName]) -> Diagnostic:
    """Return the problem of a step that no save has, or of a number that several have."""
    shown = [
        save.step.label if save.step else min(saved.saves[save].items())[1][0].path.name
        for save in sorted(saves or saved.saves, key=lambda save: (save.order, save))
    ]
    facts = f"found {shorten(dict.fromkeys(shown), 3)}"
    message = f"step {name} is ambiguous" if saves else f"no file of step {name}"
    proposed = (choice.name for choice in _taken(saved) if choice.name in shown)
    hint = f"--step {quote(next(proposed, shown[-1]))}"
    if not any(save.step for save in saved.saves):
        facts, hint = f"{facts}; these names have no step", "omit --step"
    return Diagnostic("source", message, hint=hint, facts=facts, where=saved.src)


def _choose_by_rank(saved: SavedFiles, wanted: str) -> list[SavedFile]:
    """Return the files that ``RANKS:NAME/RANKS:NAME`` gives to the ranks, all of one step."""
    of_ranks: dict[int, list[SavedFile]] = defaultdict(list)
    for file in saved.files:
        of_ranks[file.rank].append(file)
    hint = "the name of one file for each rank, such as 0-1:NAME/2-3:NAME"
    chosen: dict[int, SavedFile] = {}
    problems = []
    for part in wanted.split("/"):
        numbers, name = part.split(":", 1)
        # The name of one rank's file means the files of equal names on the others.
        equal = {file.name for file in saved.files if file.is_called(name)}
        without: dict[str, list[int]] = defaultdict(list)
        try:
            wanted_ranks = parse_numbers(numbers)
        except ValueError as error:
            message = f"step {part}: {error} is not a rank or a range of ranks"
            problems.append(Diagnostic("source", message, hint=hint))
            continue
        for rank in wanted_ranks:
            files = of_ranks[rank]
            named = [f for f in files if f.name in equal or is_step(f.save.step, name)]
            if len(named) == 1 and rank not in chosen:
                chosen[rank] = named[0]
            else:
                without["several files" if named else "no file"].append(rank)
        for number, ranks in without.items():
            message = f"step {part}: {number} of {format_ranks(ranks)}"
            names = shorten((file.path.name for file in of_ranks[ranks[0]]), 3)
            facts, absent = f"files of rank {ranks[0]}: {names or 'none'}", tuple(ranks)
            problems.append(Diagnostic("source", message, hint=hint, facts=facts, ranks=absent))
    files = [chosen[rank] for rank in sorted(chosen)]
    if problems:
        raise PlanError(problems)
    hint = facts = message = ""
    if len({file.save.step for file in files}) > 1:
        facts = shorten(dict.fromkeys(file.path.name for file in files), 3)
        message = "the chosen files are of several steps"
    elif problem := _contradiction(saved, files):
        raise StepError([problem])
    elif not _is_enough(saved, files):
        without_file = [rank for rank in saved.ranks if rank not in chosen]
        message = f"no file was chosen for {format_ranks(without_file)}"
        facts = "no strategy says that the others hold all slices"
        hint = "name a file of these ranks, too: 0-1:NAME/2-3:NAME"
    if message:
        problem = Diagnostic("mixed_steps", message, hint=hint, facts=facts, where=saved.src)
        raise StepError([problem])
    return files


# ------------------------------------------------------------------------ why files are not taken


def _mixed_runs(
    saved: SavedFiles, message: str, facts: str, ranks: Iterable[int] = ()
) -> Diagnostic:
    return Diagnostic("mixed_runs", message, facts=facts, ranks=tuple(ranks), where=saved.src)


def _contradiction(saved: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return the problem that records name other files of the same step."""
    wrong = [
        file
        for file in files
        if (record := saved.records.get(file.rank)) is not None
        and record.save == file.save
        and record != file
    ]
    if not wrong:
        return None
    first, ranks = wrong[0], [file.rank for file in wrong]
    message = f"{format_ranks(ranks)}: meta.json names another file of {first.save.text}"
    facts = f"it names {saved.records[first.rank].path.name}, and {first.path.name} was chosen"
    return _mixed_runs(saved, message, facts, ranks)


def _later_run(saved: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return the problem that ranks have files of a later run than their records."""
    later = [
        file
        for file in saved.files
        if (record := saved.records.get(file.rank)) is not None
        and file.series == record.series
        and file.counter > record.counter
    ]
    if not later:
        return None
    first, ranks = later[0], sorted({file.rank for file in later})
    message = f"{format_ranks(ranks)}: files of a later run than meta.json records"
    facts = f"{first.path.name}; meta.json names {saved.records[first.rank].path.name}"
    return _mixed_runs(saved, message, facts, ranks)


def _some_unrecorded(saved: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    without = [rank for rank in saved.ranks if rank not in saved.records]
    if not (saved.records and without):
        return None
    message = f"{format_ranks(without)}: no meta.json says which run saved {files[0].save.text}"
    return _mixed_runs(saved, message, "the other ranks have one", without)


def _rivals(saved: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return the problem that files of other names or counters may be newer than a step."""
    save, of_rank = files[0].save, {file.rank: file for file in files}
    rivals = [
        file
        for file in saved.files
        if file.series != files[0].series
        or (file.save != save and (not file.save.step or file.counter > of_rank[file.rank].counter))
    ]
    if not rivals or _are_recorded(saved, files):
        return None
    first, ranks = rivals[0].rank, sorted({file.rank for file in rivals})
    names = (file.path.name for file in (of_rank[first], *rivals) if file.rank == first)
    folders = "folder" if len(ranks) == 1 else "folders"
    message = f"several checkpoints in the {folders} of {format_ranks(ranks)}"
    return _mixed_runs(saved, message, shorten(dict.fromkeys(names), 3), ranks)


def _uneven_numbers(saved: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return the problem that some ranks have more files of a step than others."""
    save = files[0].save
    of_ranks = saved.saves[save]
    most = max(of_ranks.values(), key=len)
    fewer = [rank for rank in saved.ranks if len(of_ranks.get(rank, ())) < len(most)]
    if not fewer or len(most) == 1:  # a rank that lacks the step is read from replicas
        return None
    message = f"{format_ranks(fewer)}: nothing shows which run saved {save.text}"
    names = shorten((file.path.name for file in most), 3)
    return _mixed_runs(saved, message, f"rank {most[0].rank} has {names}", fewer)


def _unlike_runs(saved: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return the problem that some files are of the last run of their rank and others are not."""
    last = saved.last_counters
    earlier = [
        file
        for file in files
        if (record := saved.records.get(file.rank, file)).series == file.series
        and file.counter < max(record.counter, last[file.rank, file.series])
    ]
    if not earlier or len(earlier) == len(files):
        return None
    # A later run that was killed in its first save leaves the earlier one alike on all ranks.
    steps: dict[Run, set[Step]] = defaultdict(set)
    for file in saved.files:
        steps[file.run].add(file.save.order)
    are_alike = len({frozenset(steps[file.run]) for file in files}) == 1
    of_saves = (next(iter(of_ranks.values())) for of_ranks in saved.saves.values())
    repeated = (save for save in of_saves if save[0].series == files[0].series)
    if are_alike and not any(_uneven_numbers(saved, save) for save in repeated):
        return None
    ranks = [file.rank for file in earlier]
    message = f"{format_ranks(ranks)}: a later run than that of {files[0].save.text} left files"
    return _mixed_runs(saved, message, "the other ranks have none of a later run", ranks)


def _unlike_counters(saved: SavedFiles, files: Sequence[SavedFile]) -> Diagnostic | None:
    """Return the problem that files of a step, unfinished ones too, differ in counters."""
    save = files[0].save
    begun = (file for file in saved.begun if file.save._replace(suffix=save.suffix) == save)
    lowest = min(files, key=lambda file: file.counter)
    highest = max((*files, *begun), key=lambda file: file.counter)
    if highest.counter == lowest.counter:
        return None
    message = f"files of {save.text} may be of two runs"
    facts = "; ".join(f"rank {file.rank}: {file.path.name}" for file in (highest, lowest))
    return _mixed_runs(saved, message, facts, sorted({highest.rank, lowest.rank}))


# The newest step of all ranks; files that a name means on all ranks, or on some.
_Choosing: TypeAlias = Literal["newest", "named", "part"]


class Reason(Struct, frozen=True):
    """A reason not to take files: a function that finds it, and the choices for which it counts."""

    find: Callable[[SavedFiles, Sequence[SavedFile]], Diagnostic | None]
    choosing: tuple[_Choosing, ...]
    counts_if_recorded: bool = False  # even if the record of each rank names just these files


REASONS = (
    Reason(_contradiction, ("newest", "named", "part"), counts_if_recorded=True),
    Reason(_later_run, ("newest",), counts_if_recorded=True),
    Reason(_some_unrecorded, ("newest",)),
    Reason(_rivals, ("newest",)),
    Reason(_uneven_numbers, ("newest", "named", "part")),
    Reason(_unlike_runs, ("named", "part")),
    # A name for all ranks is an answer to the question whether counters may differ.
    Reason(_unlike_counters, ("newest", "part")),
)


def _why_not(
    saved: SavedFiles, files: Sequence[SavedFile], *, is_newest: bool = False
) -> Diagnostic | None:
    """Return the first of `REASONS` why files of one save are not taken, or None."""
    is_part = len(files) < len(saved.ranks)
    choosing: _Choosing = "newest" if is_newest else "part" if is_part else "named"
    is_recorded = not is_part and all(map(saved.is_recorded, files))
    reasons = (
        reason.find(saved, files)
        for reason in REASONS
        if choosing in reason.choosing and (reason.counts_if_recorded or not is_recorded)
    )
    return next(filter(None, reasons), None)


def _incomplete_problem(saved: SavedFiles, saves: Iterable[SaveName]) -> Diagnostic:
    """Return the problem that no wanted step is on every rank."""
    ranks_with: dict[Step | SaveName, set[int]] = defaultdict(set)
    for save in saved.saves:
        ranks_with[save.step or save].update(saved.saves[save])
    messages = [
        f"{save.text} is not on {format_ranks(absent)}"
        for save in sorted(saves, key=lambda save: (save.order, save), reverse=True)
        if (absent := [rank for rank in saved.ranks if rank not in ranks_with[save.step or save]])
    ]
    if not messages:  # each rank has files of a step, but not of one name, or of the recorded run
        names = {file.rank: file.path.name for file in saved.files}
        message = "the files of all ranks are not of one run"
        return _mixed_runs(saved, message, shorten(names.values(), 3))
    message, facts = messages[0], ""
    if len(messages) > 1:
        message, facts = "no step is on every rank", shorten(dict.fromkeys(messages), 3)
    return Diagnostic("mixed_steps", message, facts=facts, where=saved.src)


def _refusal(saved: SavedFiles, problem: Diagnostic) -> StepError:
    hint = f"copy the missing files; `ckpttool help {problem.code}` explains"
    if problem.code == "mixed_runs":
        hint = "name the file of each rank; `ckpttool help mixed_runs` shows how"
    if names := [f"--step {quote(name)}" for name in islice(_proposals(saved), 2)]:
        hint = names[0] if ":" in names[0] else ", or ".join(names)
    record = Record.of(Path(saved.src))
    if unfinished := find_unfinished_run(Path(saved.src)):
        hint = unfinished.hint
    elif record.replaced() or record.logs():  # the names are those of older outputs and new ones
        hint = f"ckpttool finalize {quote(saved.src)}"
    return StepError([replace(problem, hint=hint)])


# ------------------------------------------------------------------------------------------- notes


def _record_notes(saved: SavedFiles, files: Sequence[SavedFile]) -> Iterator[Diagnostic]:
    """Yield notes on a choice by records, and on skipped files."""
    best = files[0].save
    last = min(record.save.order for record in saved.records.values())
    if len(saved.saves) > 1:
        facts = f"the newest of {len(saved.saves)} steps that meta.json records and every rank has"
        if best.order != last:
            facts += f"; meta.json records {last.label}"
        yield Diagnostic("step", f"{best.text} is read", facts=facts)
    runs = {file.run for file in files}
    newer = {file.save.order for file in saved.files if file.run in runs}
    if labels := [step.label for step in sorted(newer) if step > last]:
        message = f"step {shorten(labels, 3)} is newer than meta.json records: ignored"
        hint = f"--step {labels[-1]}"
        yield Diagnostic("leftover", message, hint=hint, facts="perhaps unfinished")
    ignored: dict[SaveName, str] = {}
    for file in saved.files:
        if file.run not in runs:
            ignored.setdefault(file.name, file.path.name)
    if ignored:
        message = f"{shorten(ignored.values(), 3)}: of another run than meta.json records: ignored"
        names = (name for name, of_name in _taken(saved) if of_name != files)
        hint = next((f"--step {quote(name)}" for name in names), "")
        yield Diagnostic("skipped", message, hint=hint)


def _choice_notes(saved: SavedFiles, files: Sequence[SavedFile]) -> Iterator[Diagnostic]:
    """Yield notes on the choice among several steps, and on records that contradict it."""
    best, newest = files[0].save, max(saved.saves, key=lambda save: save.order)
    if newest.order > best.order:
        without = tuple(rank for rank in saved.ranks if rank not in saved.saves[newest])
        message = f"{best.text} is read, because not every rank has {newest.text}"
        hint = f"copy the missing files, or --step {best.order.label} if this step is meant"
        facts = f"{newest.text} is not on {format_ranks(without)}"
        if newest.order.label in (choice.name for choice in _taken(saved)):
            facts += ", and other ranks hold all slices"
            hint = f"--step {newest.order.label}, to read it from replicas"
        where = saved.src
        yield Diagnostic("older_step", message, hint=hint, facts=facts, ranks=without, where=where)
    elif len(saved.saves) > 1:
        yield Diagnostic("step", f"{best.text} is read, the newest of {len(saved.saves)}")
    chosen = {file.name for file in files}
    ignored = {
        file.name: file.path.name
        for file in reversed(saved.files)
        if file.save == best and file.name not in chosen
    }
    if earlier := [*ignored.values()]:
        message = f"{shorten(earlier, 3)}: of an earlier run, by their counters: ignored"
        yield Diagnostic("skipped", message, hint=f"--step {quote(earlier[-1])}")
    if saved.records:
        last = min(record.save.order for record in saved.records.values()).label
        message = f"not every rank has step {last}, which meta.json records"
        yield Diagnostic("leftover", message, facts=f"{best.text} is read")


def _warn_of_times(saved: SavedFiles, files: Sequence[SavedFile]) -> Iterator[Diagnostic]:
    """Yield a warning if an older step was written after a later step of another rank.

    Times count for a rank that wrote a still older step before.
    """

    def time_of(file: SavedFile) -> int:
        return stat_file(file.path).mtime_ns

    save = files[0].save
    in_series = [file for file in saved.files if file.series == files[0].series]
    later = [file for file in in_series if file.save.order > save.order]
    earlier = [file for file in in_series if file.save.order < save.order]
    if not later:
        return
    first = min(later, key=time_of)
    # A copy that does not keep times writes all files of a rank after those of another.
    in_order = {file.rank for file in earlier if time_of(file) < time_of(first)}
    others = (file for file in files if file.rank in in_order - {first.rank})
    after = [file for file in others if time_of(file) > time_of(first)]
    if after:
        ranks = tuple(file.rank for file in after)
        message = f"{format_ranks(ranks)}: {save.text} was written after a later step"
        facts = f"rank {first.rank} wrote {first.path.name} before"
        hint = "compare the dates; `ckpttool help mixed_times` explains"
        where = saved.src
        yield Diagnostic("mixed_times", message, hint=hint, facts=facts, ranks=ranks, where=where)
