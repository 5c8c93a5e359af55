"""The checks of a checkpoint, in the order in which they run.

A check takes a `Checkpoint`, reads nothing, and yields diagnostics.  How grave each of them is for
a command stands in the table of codes, `ckpttool.problems.CODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import chain

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.checkpoint.interpret import Files
from ckpttool.checkpoint.recorded import noted_other_strategy
from ckpttool.checks import headers, layout_samples, layouts, missing, readings, unlisted
from ckpttool.problems import Command, Diagnostic, join_clauses, severities
from ckpttool.wording import count

_EXAMINING: tuple[Command, ...] = ("inspect", "verify", "diff")
_DECIDING: tuple[Command, ...] = ("verify", "diff", "convert")
_ALL: tuple[Command, ...] = (*_EXAMINING, "convert")
_FILES: tuple[Files, ...] = ("full",)
_KEPT: tuple[Files, ...] = ("kept",)
_BOTH: tuple[Files, ...] = ("joined", "full")
_ANY: tuple[Files, ...] = (*_BOTH, *_KEPT)


class Check(Struct, frozen=True):
    """A line of the table.

    Attributes
    ----------
    find
        Yields what is wrong or worth knowing.
    why
        Why it stands in this place.
    commands
        The commands that run it.
    of
        How the files are taken that it is about; see `Checkpoint`.
    needs_contents
        Whether it explains contents.  They say nothing more of a checkpoint that headers refuse, or
        of a strategy that the user trusts.
    supersedes
        Checks that say the same with less detail, if every byte was read.
    """

    find: Callable[[Checkpoint], Iterable[Diagnostic]]
    why: str
    commands: tuple[Command, ...] = _ALL
    of: tuple[Files, ...] = ("joined",)
    needs_contents: bool = False
    supersedes: tuple[Callable[[Checkpoint], Iterable[Diagnostic]], ...] = ()


def _of_contents(find: Callable[[Checkpoint], Iterable[Diagnostic]], why: str) -> Check:
    return Check(find, why, needs_contents=True)


CHECKS = (
    Check(
        readings.check_files,
        "what else is wrong may follow from these files",
        ("verify", "inspect"),
        _BOTH,
    ),
    Check(readings.check_damage, "the same of files that cannot be read", ("verify",), _BOTH),
    Check(readings.check_checksums, "the same of files whose bytes changed", ("verify",), _BOTH),
    Check(missing.check_scan, "which files were chosen explains all that follows", of=_ANY),
    Check(missing.check_missing_files, "files that are not there are not read", of=_FILES),
    Check(
        missing.check_kept_files, "the same for who writes each of them again", ("convert",), _KEPT
    ),
    Check(layouts.check_strategy, "how the strategy was read, before what it makes of the files"),
    Check(
        unlisted.check_copies,
        "which file of an index is read, before its tensors",
        _EXAMINING,
        _FILES,
    ),
    Check(
        unlisted.check_ignored_copies,
        "the same for who writes one copy anyway",
        ("convert",),
        (*_FILES, *_KEPT),
    ),
    Check(layouts.check_options, "an option that cannot apply changes all that follows", of=_BOTH),
    Check(
        missing.check_choice,
        "a pattern is an option, too",
        ("verify", "inspect", "convert"),
        _ANY,
    ),
    Check(
        missing.check_casts,
        "a pattern of a cast is an option, too",
        ("verify", "inspect", "convert"),
        _ANY,
    ),
    Check(missing.check_left_out, "what is not wanted is not judged", of=_ANY),
    Check(missing.check_counters, "what is not cast is no weight", ("diff", "convert"), _ANY),
    Check(missing.check_scales, "a number is only one with its scale", ("diff", "convert"), _ANY),
    Check(missing.check_narrowed, "a cast may narrow what was kept wide", ("convert",), _ANY),
    Check(
        missing.check_lost_evidence,
        "with it goes what contents would show later",
        ("convert",),
        _KEPT,
    ),
    Check(missing.check_renamed, "all messages have the old names", ("diff", "convert"), _ANY),
    Check(missing.check_ranks, "files of other ranks or another model explain what is missing"),
    Check(layouts.check_fit, "slices that make no tensor are there, and not missing"),
    Check(unlisted.check_odd_states, "its shape alone shows that the user has to decide"),
    Check(unlisted.check_rank_slices, "the same in a merged checkpoint", _DECIDING, _FILES),
    Check(unlisted.check_perhaps_slices, "the same for who only looks", ("inspect",), _FILES),
    Check(unlisted.check_differing, "wrong ranks make tensors differ, so it needs the right ones"),
    Check(layouts.check_handwritten, "a line of a person is compared with slices that fit it"),
    Check(missing.check_missing, "what explains a lost slice stands before it"),
    Check(unlisted.check_single_file, "nothing is missing, and yet it may be a slice", of=_FILES),
    Check(missing.check_unsaved, "what was never saved is not lost"),
    Check(missing.check_partly_held, "what some ranks lack is read from others"),
    Check(missing.check_replaced, "what whole ranks lack is read from others"),
    Check(missing.check_own_values, "values of single ranks have no replica"),
    Check(layouts.check_followed, "layouts that the strategy omits follow from slices"),
    Check(layouts.check_guessed, "some of these only a name shows"),
    Check(layouts.check_stages, "what one stage provides is not read from another"),
    Check(missing.check_redundancy, "how it was saved explains empty files"),
    Check(
        missing.check_empty,
        "without a strategy, nothing says what they hold",
        ("inspect",),
        _FILES,
    ),
    Check(unlisted.check_constant, "here contents show nothing", ("diff", "convert")),
    Check(layouts.check_trusted, "the user excludes all questions about the strategy"),
    Check(layouts.check_no_evidence, "what cannot be read shows nothing of the layouts"),
    _of_contents(layouts.check_states, "the strategy contradicts itself, as shapes show"),
    _of_contents(layouts.check_misplaced, "whole stages contradict it"),
    _of_contents(layouts.check_index, "an index beside the files contradicts it"),
    Check(layouts.check_hidden_shard, "a file that is not there would show what no sample shows"),
    _of_contents(layouts.check_corrections, "samples are compared with what contents correct"),
    _of_contents(layout_samples.check_replicas, "slices whose replicas differ show nothing else"),
    Check(
        readings.check_contents,
        "every byte says more than samples",
        ("verify", "convert"),
        _BOTH,
        supersedes=(layout_samples.check_replicas,),
    ),
    _of_contents(
        layout_samples.check_scrambled, "its elements are wrong, the layouts may be right"
    ),
    _of_contents(layout_samples.check_shards, "a shard that is not there makes tensors too large"),
    _of_contents(layout_samples.check_slices, "other equal slices may be equal by chance"),
    Check(
        unlisted.check_not_full,
        "only who writes full tensors needs all of them",
        ("convert",),
        _BOTH,
    ),
    Check(
        headers.check_unjoined,
        "what is not joined is compared by headers alone",
        ("verify",),
        _FILES,
    ),
    Check(headers.check_kept, "a file that was cut short stays so", ("convert",), _KEPT),
    Check(
        headers.check_unlisted, "a conversion reads one rank, and the others differ", ("verify",)
    ),
    Check(
        missing.check_lacking, "a replica is read, so the result is right", ("verify", "convert")
    ),
    Check(missing.check_lacking_names, "a conversion reads another rank", ("verify",)),
    Check(readings.check_unlisted_samples, "every byte says it of all ranks", ("verify",)),
    Check(readings.check_manifest, "what it lists may no longer be there", ("verify",), _BOTH),
    Check(missing.check_nothing, "all else says why there is nothing", ("verify",), _BOTH),
)


# The codes of what follows from the strategy of another set.
_OF_WRONG_STRATEGY = frozenset(
    (
        "strategy",
        "contradicted",
        "undecided_shard",
        "missing",
        "missing_rank",
        "missing_replica",
        "missing_own",
        "unlisted",
        "replica",
        "shape",
        "unsaved",
        "renamed",
        "hidden_shard",
        "equal_slices",
        "unlike_states",
        "inferred",
        "lacking",
        "absent",
        "partly_held",
        "deduplicated",
        "follows",
        "guessed",
        "no_pattern",
        "other_strategy",
    )
)


def run_checks(
    checkpoint: Checkpoint,
    command: Command,
    without: Collection[str] = (),
    misfits: Iterable[Diagnostic] = (),
) -> Iterator[Diagnostic]:
    """Yield what the checks of a command find, in the order of the table.

    If the manifest names another strategy, which shards otherwise, or the given one does not fit,
    only that is said: all else about the strategy follows from it.  Where a folder has files of
    other runs, another step is proposed in place of options that would hide it.

    Parameters
    ----------
    checkpoint
        The checkpoint.  If the strategy does not fit it, only that is yielded.
    command
        The command.
    without
        Codes that do not count where contents show them.
    misfits
        Further problems of the strategy.
    """
    other = noted_other_strategy(checkpoint.strategy)
    of_checks = _find(checkpoint, command, without, "" if other is None else other.hint)
    found = chain(checkpoint.misfits or of_checks, misfits)
    if other is None:
        yield from found
        return
    listed, errors = [*found], severities("convert")
    following = [one for one in listed if one.code in _OF_WRONG_STRATEGY]
    wrong = [one for one in following if errors[one.code] == "error" and one != other]
    if not wrong and other.code != "strategy":
        yield from listed
        return
    facts = f"it does not fit: {wrong[0].message}" if wrong else ""
    if len(wrong) > 1:
        facts = f"{count(len(wrong), 'problem')} with it, the first: {wrong[0].message}"
    yield replace(other, code="strategy", facts=join_clauses(other.facts, facts))
    yield from (one for one in listed if one not in following)


def _find(
    checkpoint: Checkpoint, command: Command, without: Collection[str], other: str
) -> Iterator[Diagnostic]:
    """Yield what the checks find; ``other`` is the hint with the strategy of the manifest."""
    steps = checkpoint.catalog.steps_of_other_runs
    for check in _checks_of(checkpoint, command):
        for one in check.find(checkpoint):
            if check.needs_contents and one.code in without:
                continue
            overrules = {"--trust-strategy", "--optimizer-shard"}.intersection(one.options)
            if overrules and other:
                yield replace(one, hint=other, options=())
            elif check.needs_contents and overrules and steps is not None:
                hint = f"--step {steps[0]}, of another run" if steps else ""
                hint = hint or "`ckpttool help mixed_runs`"
                yield replace(one, hint=hint, options=())
            else:
                yield one


def _checks_of(checkpoint: Checkpoint, command: Command) -> Iterator[Check]:
    is_closed = checkpoint.is_refused or checkpoint.options.trust_strategy
    superseded = {find for check in CHECKS for find in check.supersedes}
    for check in CHECKS:
        is_said = "contents" in checkpoint.read and check.find in superseded
        is_for = command in check.commands and checkpoint.files in check.of
        if is_for and not is_said and not (check.needs_contents and is_closed):
            yield check


def is_refused(checkpoint: Checkpoint, command: Command) -> bool:
    """Return whether headers refuse a checkpoint, so that contents would only repeat it.

    inspect and conversions stop at any error.  verify and diff go on as far as they can.
    """
    errors = severities("convert")
    found = (
        one
        for check in CHECKS
        if not check.needs_contents and {*_DECIDING} <= {*check.commands}
        if check.find is not missing.check_unsaved  # contents of other tensors are not repeated
        if checkpoint.files in check.of
        for one in check.find(checkpoint)
        if errors[one.code] == "error"
    )
    if command in ("verify", "diff"):
        return any(one.code in ("strategy", "options") for one in found)
    return bool(checkpoint.damage) or any(True for _ in found)
