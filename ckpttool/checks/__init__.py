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
from ckpttool.checkpoint.from_manifest import noted_other_strategy
from ckpttool.checkpoint.interpret import Files
from ckpttool.checks import full_reads, headers, layout_samples, layouts, missing, unlisted
from ckpttool.problems import Command, Diagnostic, join_clauses, severities
from ckpttool.wording import count

_EXAMINING: tuple[Command, ...] = ("inspect", "verify", "diff")
_DECIDING: tuple[Command, ...] = ("verify", "diff", "convert")
_CHOOSING: tuple[Command, ...] = ("verify", "inspect", "convert")
_LOOKING: tuple[Command, ...] = ("verify", "inspect")
_CASTING: tuple[Command, ...] = ("diff", "convert")
_VERIFY: tuple[Command, ...] = ("verify",)
_CONVERT: tuple[Command, ...] = ("convert",)
_INSPECT: tuple[Command, ...] = ("inspect",)
_READING: tuple[Command, ...] = ("verify", "convert")
_ALL: tuple[Command, ...] = (*_EXAMINING, "convert")
_FILES: tuple[Files, ...] = ("full",)
_KEPT: tuple[Files, ...] = ("kept",)
_BOTH: tuple[Files, ...] = ("joined", "full")
_ANY: tuple[Files, ...] = (*_BOTH, *_KEPT)


Find: TypeAlias = Callable[..., Iterable[Diagnostic]]


class Check(Struct, frozen=True):
    """A row of the table: the check, why it runs here, its commands, and the kinds of files."""

    find: Find  # yields what is wrong or worth knowing
    why: str
    commands: tuple[Command, ...] = _ALL
    of: tuple[Files, ...] = ("joined",)  # how the files are taken that it is about
    takes_contents: bool = False
    # It explains contents.  They say nothing more of a checkpoint that headers refuse, or of a
    # strategy that the user trusts.
    needs_contents: bool = False

    def run(self, checkpoint: Checkpoint, contents: Contents) -> Iterable[Diagnostic]:
        """Yield what the check finds."""
        return self.find(checkpoint, contents) if self.takes_contents else self.find(checkpoint)


def _contents(
    find: Find, why: str, commands: tuple[Command, ...] = _ALL, of: tuple[Files, ...] = ("joined",)
) -> Check:
    return Check(find, why, commands, of, takes_contents=True)


def _samples(find: Find, why: str) -> Check:
    return Check(find, why, takes_contents=True, needs_contents=True)


CHECKS = (
    Check(full_reads.check_files, "Files of several runs cause problems below.", _LOOKING, _BOTH),
    _contents(full_reads.check_damage, "Damaged files cause problems below.", _VERIFY, _BOTH),
    _contents(full_reads.check_checksums, "Changed bytes cause problems below.", _VERIFY, _BOTH),
    Check(missing.check_scan, "The scan chose the files that all other checks are about.", of=_ANY),
    Check(missing.check_missing_files, "Only gaps in the numbers show missing files.", of=_FILES),
    Check(missing.check_kept_files, "convert writes only files that are there.", _CONVERT, _KEPT),
    Check(layouts.check_strategy, "The strategy decides how the files are joined."),
    _contents(unlisted.check_copies, "The index decides which copy is read.", _EXAMINING, _FILES),
    _contents(unlisted.check_ignored_copies, "Only one copy is written.", _CONVERT, _FILES + _KEPT),
    Check(layouts.check_options, "An option that cannot apply is a mistake.", of=_BOTH),
    Check(missing.check_choice, "A pattern that matches nothing is a mistake.", _CHOOSING, _ANY),
    Check(missing.check_casts, "A cast that matches nothing is a mistake.", _CHOOSING, _ANY),
    Check(missing.check_left_out, "Tensors that the user leaves out are not checked.", of=_ANY),
    Check(missing.check_counters, "A cast would round large counters.", of=_ANY),
    Check(missing.check_scales, "Float8 numbers mean nothing without their scale.", of=_ANY),
    Check(missing.check_narrowed, "Weights in a wider type than most may need it.", _CONVERT, _ANY),
    Check(missing.check_lost_evidence, "Only state shows a hidden shard.", _CONVERT, _KEPT),
    Check(missing.check_renamed, "All other messages use the old names.", _CASTING, _ANY),
    _contents(missing.check_ranks, "Files of another run explain why tensors are missing."),
    Check(layouts.check_fit, "Slices with wrong shapes cannot be joined, but are not missing."),
    Check(unlisted.check_odd_states, "Only the user knows whether a state of odd shape is full."),
    Check(unlisted.check_rank_slices, "MindSpore did not merge these tensors.", _DECIDING, _FILES),
    Check(unlisted.check_perhaps_slices, "MindSpore did not merge these.", _INSPECT, _FILES),
    Check(unlisted.check_differing, "Wrong ranks make tensors differ, so ranks are checked first."),
    Check(layouts.check_handwritten, "A person may have written a wrong layout."),
    _contents(layouts.check_odd_shapes, "Only sizes that other tensors have show a wrong axis."),
    _contents(missing.check_missing, "The checks above explain why slices are missing."),
    Check(unlisted.check_single_file, "One file may be one rank of several.", of=_FILES),
    Check(missing.check_unsaved, "A tensor that was never saved is not lost."),
    Check(missing.check_partly_held, "A tensor that some ranks lack is read from another rank."),
    _contents(missing.check_replaced, "The slices of missing ranks are read from replicas."),
    Check(missing.check_own_values, "Values that only one rank has are in no replica."),
    Check(layouts.check_followed, "State that the strategy omits is sharded like its parameter."),
    Check(layouts.check_guessed, "Only a name says that this is state, and it may be wrong."),
    Check(layouts.check_stages, "Each stage is read from its own ranks only."),
    Check(missing.check_redundancy, "Files may be empty if they were saved without redundancy."),
    Check(missing.check_empty, "Nothing says what an empty file should hold.", _INSPECT, _FILES),
    Check(unlisted.check_constant, "Slices of equal elements look like full tensors.", _CASTING),
    _contents(layouts.check_trusted, "A trusted strategy is not compared with contents."),
    _contents(layouts.check_no_evidence, "Tensors that cannot be read could show a wrong layout."),
    Check(layouts.check_states, "A state has the shape of its parameter.", needs_contents=True),
    Check(layouts.check_misplaced, "Each stage holds its own tensors.", needs_contents=True),
    _samples(layouts.check_index, "An index beside the files lists the true full shapes."),
    _contents(layouts.check_hidden_shard, "Only the file of another rank would show such a shard."),
    _samples(layouts.check_corrections, "Samples are compared with the corrected layouts."),
    _samples(layout_samples.check_replicas, "If replicas differ, other comparisons mean little."),
    _contents(full_reads.check_contents, "Every byte shows more than samples.", _READING, _BOTH),
    _samples(
        layout_samples.check_scrambled, "The elements are wrong, but the layout may be right."
    ),
    _samples(layout_samples.check_shards, "Equal slices of a shard make the tensor too large."),
    _samples(layout_samples.check_slices, "Other slices may be equal by chance."),
    Check(unlisted.check_not_full, "Only a conversion needs full tensors.", _CONVERT, _BOTH),
    Check(headers.check_unjoined, "Only headers of separate files are compared.", _VERIFY, _FILES),
    Check(headers.check_kept, "convert keeps a file that was cut short as it is.", _CONVERT, _KEPT),
    Check(headers.check_unlisted, "A conversion reads one rank, and others may differ.", _VERIFY),
    Check(missing.check_lacking, "A replica is read, so the result is right.", _READING),
    Check(missing.check_lacking_names, "A conversion reads another rank in silence.", _VERIFY),
    _contents(full_reads.check_unlisted_samples, "Two ranks show that tensors differ.", _VERIFY),
    _contents(full_reads.check_manifest, "The files may have changed since.", _VERIFY, _BOTH),
    Check(missing.check_nothing, "The checks above say why nothing is there.", _VERIFY, _BOTH),
)


# The codes of what follows from the strategy of another set.
_OF_WRONG_STRATEGY = frozenset(
    (
        *("strategy", "contradicted", "other_strategy", "shape", "replica", "equal_slices"),
        "odd_shape",
        *("undecided_shard", "hidden_shard", "inferred", "unlike_states", "follows", "guessed"),
        *("missing", "missing_rank", "missing_replica", "missing_own", "lacking", "partly_held"),
        *("unsaved", "absent", "renamed", "unlisted", "deduplicated", "no_pattern"),
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

    If the strategy has other numbers of ranks or stages, only that is reported.  The same holds if
    the manifest names another strategy, and this one shards otherwise or the given one does not
    fit: all else about the strategy follows from it.  Where a folder has files of other runs,
    another step is proposed in place of options that would hide it.  The codes ``without`` do not
    count where contents show them; ``misfits`` are further problems.
    """
    other = noted_other_strategy(checkpoint.strategy)
    hint = "" if other is None else other.hint
    of_checks = _find(checkpoint, contents, command, without, hint)
    diagnostics = [*(checkpoint.misfits or of_checks), *misfits]
    errors = severities("convert")
    if other is None:
        codes = {p.code for p in diagnostics if errors[p.code] == "error" or p.code == "lacking"}
        is_for = command != "inspect" and not contents.complete_step
        problem = missing.find_miscount(checkpoint, codes) if codes and is_for else None
        if problem is not None:
            yield problem
            diagnostics = [p for p in diagnostics if p.code not in _OF_WRONG_STRATEGY]
        yield from diagnostics
        return
    following = [problem for problem in diagnostics if problem.code in _OF_WRONG_STRATEGY]
    wrong = [
        problem for problem in following if errors[problem.code] == "error" and problem != other
    ]
    if not wrong and other.code != "strategy":
        yield from diagnostics
        return
    facts = f"it does not fit: {wrong[0].message}" if wrong else ""
    if len(wrong) > 1:
        facts = f"{count(len(wrong), 'problem')} with it, the first: {wrong[0].message}"
    yield replace(other, code="strategy", facts=join_clauses(other.facts, facts))
    yield from (problem for problem in diagnostics if problem not in following)


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
    for check in CHECKS:
        is_for = command in check.commands and checkpoint.files in check.of
        if not is_for or (check.needs_contents and is_closed):
            continue
        for diagnostic in check.run(checkpoint, contents):
            if check.needs_contents and diagnostic.code in without:
                continue
            overrules = {"--trust-strategy", "--optimizer-shard"}.intersection(diagnostic.options)
            if overrules and other:
                yield replace(diagnostic, hint=other, options=())
            elif check.needs_contents and overrules and steps is not None:
                hint = f"--step {steps[0]}, of another run" if steps else ""
                hint = hint or "`ckpttool help mixed_runs`"
                yield replace(diagnostic, hint=hint, options=())
            else:
                yield diagnostic


def is_refused(checkpoint: Checkpoint, command: Command) -> bool:
    """Return whether headers refuse a checkpoint, so that contents would only repeat it.

    inspect and conversions stop at any error.  verify and diff go on as far as they can.
    """
    errors = severities("convert")
    wrong = (
        problem
        for check in CHECKS
        if not check.needs_contents and {*_DECIDING} <= {*check.commands}
        # Contents of other tensors are not repeated; a cast has nothing to do with them.
        if check.find not in (missing.check_unsaved, missing.check_scales)
        if checkpoint.files in check.of
        for problem in check.run(checkpoint, Contents())
        if errors[problem.code] == "error"
    )
    if command in ("verify", "diff"):
        return any(problem.code in ("strategy", "options") for problem in wrong)
    return bool(checkpoint.damage) or any(True for _ in wrong)
