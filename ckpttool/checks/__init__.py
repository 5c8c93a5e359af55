"""The checks of a checkpoint, in the order in which they run.

A check takes a `Checkpoint`, reads nothing, and yields diagnostics.  How grave each of them is for
a command stands in the table of codes, `ckpttool.problems.CODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.checks import headers, layouts, presence, samples, unlisted
from ckpttool.problems import Command, Diagnostic, severities

_EXAMINING: tuple[Command, ...] = ("inspect", "verify", "diff")
_DECIDING: tuple[Command, ...] = ("verify", "diff", "convert")
_ALL: tuple[Command, ...] = (*_EXAMINING, "convert")


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the table.

    Attributes
    ----------
    find
        Yields what is wrong or worth knowing.
    why
        Why it stands in this place.
    commands
        The commands that run it.
    needs_contents
        Whether it compares the strategy with contents or with other layouts.  That says nothing
        more of a checkpoint that headers refuse, and not what a user wants who trusts the strategy.
    """

    find: Callable[[Checkpoint], Iterable[Diagnostic]]
    why: str
    commands: tuple[Command, ...] = _ALL
    needs_contents: bool = False


CHECKS = (
    Check(presence.check_scan, "what the scan chose and skipped explains all that follows"),
    Check(layouts.check_strategy, "how the strategy was read, before what it makes of the files"),
    Check(unlisted.check_copies, "which file of an index is read, before its tensors", _EXAMINING),
    Check(unlisted.check_ignored_copies, "likewise", ("convert",)),
    Check(layouts.check_options, "an option that cannot apply changes all that follows"),
    Check(presence.check_ranks, "files of other ranks or another model explain what is missing"),
    Check(layouts.check_fit, "slices that make no tensor are not missing"),
    Check(unlisted.check_odd_states, "the user decides on it before on what differs"),
    Check(unlisted.check_rank_slices, "likewise, in a merged checkpoint", _DECIDING),
    Check(unlisted.check_perhaps_slices, "likewise, for who only looks", ("inspect",)),
    Check(unlisted.check_differing, "only if the ranks are right: wrong ranks make tensors differ"),
    Check(layouts.check_handwritten, "a line of a person, once the slices fit it"),
    Check(presence.check_missing, "lost slices, after what explains them"),
    Check(presence.check_own_values, "lost values of single ranks, which the user asked for"),
    Check(unlisted.check_single_file, "a file may be one of several although nothing is missing"),
    Check(presence.check_unsaved, "what was never saved, beside what is lost"),
    Check(presence.check_partly_held, "names that some ranks lack, and where they are read"),
    Check(presence.check_replaced, "ranks that replicas replace: nothing is lost"),
    Check(layouts.check_followed, "layouts that the strategy omits, now that slices are known"),
    Check(layouts.check_guessed, "of these the ones that only a name shows"),
    Check(layouts.check_stages, "slices that are not read, since another stage has them"),
    Check(presence.check_redundancy, "how it was saved, which explains empty files"),
    Check(presence.check_empty, "likewise, if no strategy says what they hold", ("inspect",)),
    Check(
        unlisted.check_constant, "contents from here on: these show nothing", ("diff", "convert")
    ),
    Check(layouts.check_trusted, "the user excludes all that follows of the strategy"),
    Check(layouts.check_states, "the strategy against itself, by shapes", needs_contents=True),
    Check(layouts.check_misplaced, "the strategy against whole stages", needs_contents=True),
    Check(layouts.check_index, "the strategy against an index beside it", needs_contents=True),
    Check(
        layouts.check_corrections,
        "shards that contents prove or leave open; samples are "
        "compared with the strategy that they correct",
        needs_contents=True,
    ),
    Check(
        samples.check_replicas,
        "replicas that differ, before slices: these differ too",
        needs_contents=True,
    ),
    Check(samples.check_shards, "slices of a shard that are equal", needs_contents=True),
    Check(
        samples.check_slices, "other equal slices, which may be so by chance", needs_contents=True
    ),
    Check(presence.check_read_instead, "files that lack what is read elsewhere", ("convert",)),
    Check(unlisted.check_not_full, "a source that is not the whole model", ("convert",)),
    Check(headers.check_unjoined, "files of ranks that nothing joins", ("verify",)),
    Check(headers.check_unlisted, "headers that ranks should share", ("verify",)),
    Check(presence.check_lacking, "slices that one rank lacks and another has", ("verify",)),
    Check(presence.check_lacking_names, "names that one rank lacks", ("verify",)),
)


def run_checks(
    checkpoint: Checkpoint, command: Command, superseded: Collection[str] = ()
) -> Iterator[Diagnostic]:
    """Yield what the checks of a command find, in the order of the table.

    ``superseded`` are the codes that samples find and another reading finds with more detail.

    Options that overrule contents would hide that files and strategy are of two runs.  Where a
    folder has files of other runs, another step is proposed instead.
    """
    if checkpoint.misfits:
        yield from checkpoint.misfits
        return
    steps = checkpoint.catalog.steps_of_other_runs
    for check in _checks_of(checkpoint, command):
        for one in check.find(checkpoint):
            if check.needs_contents and one.code in superseded:
                continue
            overrules = {"--trust-strategy", "--optimizer-shard"}.intersection(one.options)
            if check.needs_contents and overrules and steps is not None:
                hint = f"--step {steps[0]}, of another run" if steps else ""
                hint = hint or "`ckpttool help mixed_runs`"
                yield replace(one, hint=hint, options=())
            else:
                yield one


def _checks_of(checkpoint: Checkpoint, command: Command) -> Iterator[Check]:
    is_closed = checkpoint.is_refused or checkpoint.options.trust_strategy
    for check in CHECKS:
        if command in check.commands and not (check.needs_contents and is_closed):
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
        for one in check.find(checkpoint)
        if errors[one.code] == "error"
    )
    if command in ("verify", "diff"):
        return any(one.code in ("strategy", "options") for one in found)
    return bool(checkpoint.damage) or any(True for _ in found)
