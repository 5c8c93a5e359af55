"""The checks of a checkpoint, in the order in which they run.

A check takes a `Checkpoint`, and what its contents show if it needs them.  It reads nothing, and
yields diagnostics.  How grave each of them is for a command stands in the table of codes,
`ckpttool.problems.CODES`.  The table here says what is checked, in which order, for whom and why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, Contents
from ckpttool.checkpoint.interpret import Files
from ckpttool.checkpoint.recorded import noted_other_strategy
from ckpttool.checks import headers, layout_samples, layouts, missing, readings, unlisted
from ckpttool.problems import Command, Diagnostic, join_clauses, severities
from ckpttool.wording import count

_EXAMINING: tuple[Command, ...] = ("inspect", "verify", "diff")
_DECIDING: tuple[Command, ...] = ("verify", "diff", "convert")
_CHOOSING: tuple[Command, ...] = ("verify", "inspect", "convert")
_LOOKING: tuple[Command, ...] = ("verify", "inspect")
_WITH_CASTS: tuple[Command, ...] = ("diff", "convert")
_VERIFY: tuple[Command, ...] = ("verify",)
_CONVERT: tuple[Command, ...] = ("convert",)
_ALL: tuple[Command, ...] = (*_EXAMINING, "convert")
_FILES: tuple[Files, ...] = ("full",)
_KEPT: tuple[Files, ...] = ("kept",)
_BOTH: tuple[Files, ...] = ("joined", "full")
_ANY: tuple[Files, ...] = (*_BOTH, *_KEPT)


Find: TypeAlias = Callable[..., Iterable[Diagnostic]]


class Check(Struct, frozen=True):
    """A line of the table.

    Attributes
    ----------
    find
        Yields what is wrong or worth knowing.
    why
        Why it is checked, and why in this place.
    commands
        The commands that run it.
    of
        How the files are taken that it is about; see `Checkpoint`.
    takes_contents
        Whether it takes the `Contents` beside the checkpoint.
    needs_contents
        Whether it explains contents.  They say nothing more of a checkpoint that headers refuse, or
        of a strategy that the user trusts.
    supersedes
        Checks that say the same with less detail, if every byte was read.
    """

    find: Find
    why: str
    commands: tuple[Command, ...] = _ALL
    of: tuple[Files, ...] = ("joined",)
    takes_contents: bool = False
    needs_contents: bool = False
    supersedes: tuple[Find, ...] = ()

    def run(self, checkpoint: Checkpoint, contents: Contents) -> Iterable[Diagnostic]:
        """Yield what the check finds."""
        return self.find(checkpoint, contents) if self.takes_contents else self.find(checkpoint)


def _with_contents(
    find: Find, why: str, commands: tuple[Command, ...] = _ALL, of: tuple[Files, ...] = ("joined",)
) -> Check:
    return Check(find, why, commands, of, takes_contents=True)


def _of_contents(find: Find, why: str) -> Check:
    return Check(find, why, takes_contents=True, needs_contents=True)


CHECKS = (
    Check(
        readings.check_files, "Files of several runs cause many problems below.", _LOOKING, _BOTH
    ),
    _with_contents(
        readings.check_damage,
        "A file that cannot be read causes many of the problems below.",
        _VERIFY,
        _BOTH,
    ),
    _with_contents(
        readings.check_checksums, "Changed bytes cause many of the problems below.", _VERIFY, _BOTH
    ),
    Check(missing.check_scan, "The scan chose the files that all other checks are about.", of=_ANY),
    Check(
        missing.check_missing_files,
        "Without a strategy, only a gap in the numbers shows a missing rank.",
        of=_FILES,
    ),
    Check(
        missing.check_kept_files,
        "convert writes the files that are there, and would skip missing ranks.",
        _CONVERT,
        _KEPT,
    ),
    Check(layouts.check_strategy, "The strategy decides how the files are joined."),
    _with_contents(
        unlisted.check_copies,
        "An index decides which copy is read, so the other copies are named.",
        _EXAMINING,
        _FILES,
    ),
    _with_contents(
        unlisted.check_ignored_copies,
        "A conversion writes one copy and leaves out the others.",
        _CONVERT,
        (*_FILES, *_KEPT),
    ),
    Check(
        layouts.check_options, "An option that cannot apply is a mistake in the command.", of=_BOTH
    ),
    Check(
        missing.check_choice,
        "A pattern that matches no tensor is a mistake in the command.",
        _CHOOSING,
        _ANY,
    ),
    Check(
        missing.check_casts,
        "A cast that matches no tensor is a mistake in the command.",
        _CHOOSING,
        _ANY,
    ),
    Check(missing.check_left_out, "Tensors that the user leaves out are not checked.", of=_ANY),
    Check(
        missing.check_counters,
        "A cast would round large counters, so they keep their type.",
        _WITH_CASTS,
        _ANY,
    ),
    Check(
        missing.check_scales, "A Float8 weight means nothing without its scale.", _WITH_CASTS, _ANY
    ),
    Check(missing.check_narrowed, "Weights in a wider type than most may need it.", _CONVERT, _ANY),
    Check(
        missing.check_lost_evidence,
        "Optimizer state can prove a hidden shard, and outputs without it cannot.",
        _CONVERT,
        _KEPT,
    ),
    Check(
        missing.check_renamed,
        "Other messages use the old names, so the new names are listed here.",
        _WITH_CASTS,
        _ANY,
    ),
    _with_contents(missing.check_ranks, "Files of another run explain why tensors are missing."),
    Check(layouts.check_fit, "Slices of wrong shapes cannot be joined, but are not missing."),
    Check(
        unlisted.check_odd_states, "Only the user knows whether a state of an odd shape is full."
    ),
    Check(
        unlisted.check_rank_slices,
        "MindSpore stores tensors that it did not merge as rank 0 had them.",
        _DECIDING,
        _FILES,
    ),
    Check(
        unlisted.check_perhaps_slices,
        "inspect writes nothing, so it only notes such tensors.",
        ("inspect",),
        _FILES,
    ),
    Check(
        unlisted.check_differing,
        "Wrong ranks also make tensors differ, so ranks are checked before.",
    ),
    Check(
        layouts.check_handwritten,
        "A person may write a wrong layout, and the shape of a state shows it.",
    ),
    _with_contents(missing.check_missing, "The checks above explain why slices are missing."),
    Check(
        unlisted.check_single_file, "A file of one rank looks like a full checkpoint.", of=_FILES
    ),
    Check(missing.check_unsaved, "A tensor that was never saved is not lost."),
    Check(missing.check_partly_held, "A tensor that some ranks lack is read from another rank."),
    _with_contents(missing.check_replaced, "Replicas replace ranks without a file."),
    Check(missing.check_own_values, "Values that only one rank has are in no replica."),
    Check(layouts.check_followed, "A strategy may omit state, which follows its parameter."),
    Check(layouts.check_guessed, "Some state is known by its name only, which may be wrong."),
    Check(layouts.check_stages, "Each stage is read from its own ranks only."),
    Check(missing.check_redundancy, "Saving without redundancy explains empty files."),
    Check(
        missing.check_empty,
        "Without a strategy, nothing says whether an empty file is right.",
        ("inspect",),
        _FILES,
    ),
    Check(unlisted.check_constant, "Slices of equal elements look like full tensors.", _WITH_CASTS),
    _with_contents(layouts.check_trusted, "A trusted strategy is not compared with contents."),
    _with_contents(
        layouts.check_no_evidence,
        "A tensor that cannot be read cannot show that a layout is wrong.",
    ),
    Check(
        layouts.check_states,
        "A state has the shape of its parameter, so their layouts must agree.",
        needs_contents=True,
    ),
    Check(
        layouts.check_misplaced,
        "If a stage holds mostly tensors of others, the strategy is wrong.",
        needs_contents=True,
    ),
    _of_contents(layouts.check_index, "An index beside the files lists the true full shapes."),
    _with_contents(
        layouts.check_hidden_shard,
        "Only the file of another rank would show such a shard; samples cannot.",
    ),
    _of_contents(
        layouts.check_corrections,
        "Contents may correct layouts, and all comparisons below use the result.",
    ),
    _of_contents(
        layout_samples.check_replicas,
        "Replicas must be equal; otherwise other comparisons mean little.",
    ),
    Check(
        readings.check_contents,
        "Every byte shows more than samples do.",
        ("verify", "convert"),
        _BOTH,
        takes_contents=True,
        supersedes=(layout_samples.check_replicas,),
    ),
    _of_contents(
        layout_samples.check_scrambled,
        "Scrambled slices have wrong elements, though their layout may be right.",
    ),
    _of_contents(
        layout_samples.check_shards, "Equal slices of a shard would make tensors too large."
    ),
    _of_contents(
        layout_samples.check_slices,
        "Other slices may be equal by chance, so the certain cases come first.",
    ),
    Check(
        unlisted.check_not_full,
        "Only a conversion writes full tensors, so only it needs them all.",
        _CONVERT,
        _BOTH,
    ),
    Check(
        headers.check_unjoined, "Without a strategy, only headers are compared.", _VERIFY, _FILES
    ),
    Check(
        headers.check_kept, "convert writes a file that was cut short as it is.", _CONVERT, _KEPT
    ),
    Check(
        headers.check_unlisted, "A conversion reads one rank, and the others may differ.", _VERIFY
    ),
    Check(
        missing.check_lacking,
        "A conversion reads a replica, so its result is right all the same.",
        ("verify", "convert"),
    ),
    Check(
        missing.check_lacking_names,
        "A conversion reads another rank, so only verify reports it.",
        _VERIFY,
    ),
    _with_contents(
        readings.check_unlisted_samples,
        "Two ranks are enough to show that a tensor differs.",
        _VERIFY,
    ),
    _with_contents(
        readings.check_manifest,
        "Files may change after their manifest was written.",
        _VERIFY,
        _BOTH,
    ),
    Check(
        missing.check_nothing,
        "All other checks say why nothing is there, so this comes last.",
        _VERIFY,
        _BOTH,
    ),
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
    contents: Contents,
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
    checkpoint, contents
        The checkpoint.  If the strategy does not fit it, only that is yielded.
    command
        The command.
    without
        Codes that do not count where contents show them.
    misfits
        Further problems of the strategy.
    """
    other = noted_other_strategy(checkpoint.strategy)
    hint = "" if other is None else other.hint
    of_checks = _find(checkpoint, contents, command, without, hint)
    diagnostics = [*(checkpoint.misfits or of_checks), *misfits]
    if other is None:
        yield from diagnostics
        return
    errors = severities("convert")
    following = [one for one in diagnostics if one.code in _OF_WRONG_STRATEGY]
    wrong = [one for one in following if errors[one.code] == "error" and one != other]
    if not wrong and other.code != "strategy":
        yield from diagnostics
        return
    facts = f"it does not fit: {wrong[0].message}" if wrong else ""
    if len(wrong) > 1:
        facts = f"{count(len(wrong), 'problem')} with it, the first: {wrong[0].message}"
    yield replace(other, code="strategy", facts=join_clauses(other.facts, facts))
    yield from (one for one in diagnostics if one not in following)


def _find(
    checkpoint: Checkpoint,
    contents: Contents,
    command: Command,
    without: Collection[str],
    other: str,
) -> Iterator[Diagnostic]:
    """Yield what the checks find; ``other`` is the hint with the strategy of the manifest."""
    steps = checkpoint.catalog.steps_of_other_runs
    is_closed = contents.is_refused or checkpoint.options.trust_strategy
    read_in_full = CHECKS if "contents" in contents.read else ()
    superseded = {find for check in read_in_full for find in check.supersedes}
    for check in CHECKS:
        is_for = command in check.commands and checkpoint.files in check.of
        if not is_for or check.find in superseded or (check.needs_contents and is_closed):
            continue
        for one in check.run(checkpoint, contents):
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


def is_refused(checkpoint: Checkpoint, command: Command) -> bool:
    """Return whether headers refuse a checkpoint, so that contents would only repeat it.

    inspect and conversions stop at any error.  verify and diff go on as far as they can.
    """
    errors = severities("convert")
    wrong = (
        one
        for check in CHECKS
        if not check.needs_contents and {*_DECIDING} <= {*check.commands}
        if check.find is not missing.check_unsaved  # contents of other tensors are not repeated
        if checkpoint.files in check.of
        for one in check.run(checkpoint, Contents())
        if errors[one.code] == "error"
    )
    if command in ("verify", "diff"):
        return any(one.code in ("strategy", "options") for one in wrong)
    return bool(checkpoint.damage) or any(True for _ in wrong)
