"""Tensors that nothing lists: problems, decisions of the user and notes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from shlex import quote

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import RANK_SPECIFIC_NAMES, Checkpoint, Contents
from ckpttool.checks.missing import check_ranks, find_unsaved_weights, partly_held_problems
from ckpttool.model.names import map_of_component
from ckpttool.model.slicing import RankGroups, Whole
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, format_difference, format_ranks, shorten

_CHOICES = "--unlisted first (the lowest rank's), rank (each its own) or drop"
_EXPLAINED = "`ckpttool help unlisted` explains"
_DECIDE = f"--unlisted first, rank or drop; {_EXPLAINED}"

DifferingNames = Mapping[RankGroups, Sequence[str]]  # names that differ between these groups


def check_odd_states(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problem of each state without a layout that is neither a slice nor full."""
    differing = {*chain(*checkpoint.differing.values())}
    for name, shapes in checkpoint.odd_shapes.items():
        if name not in differing:
            yield odd_state_problem(checkpoint, name, shapes)


def odd_state_problem(checkpoint: Checkpoint, name: str, shapes: str) -> Diagnostic:
    """Return the problem of a state that is neither a slice nor a full tensor."""
    message = f"not in {checkpoint.listing}, and neither a slice nor a full tensor"
    hint = f"--unlisted first takes it in full, --unlisted drop leaves it out; {_EXPLAINED}"
    facts = f"shapes: {shapes}"
    return Diagnostic(
        "unlisted", message, hint=hint, options=("--unlisted",), facts=facts, tensor=name
    )


def check_differing(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problems of tensors that differ between ranks, or what the user chose.

    Missing ranks and the strategy of a different run make tensors differ, so nothing is a problem
    unless the checkpoint is complete.
    """
    choice, differing = checkpoint.options.unlisted, checkpoint.differing
    if choice is not None:
        yield from _decided(checkpoint, differing, choice)
    elif differing and not [*check_ranks(checkpoint, Contents())]:
        of_ranks, undecided = _split(differing, RANK_SPECIFIC_NAMES)
        yield from _decided(checkpoint, of_ranks, "drop")
        yield from _problems(checkpoint, undecided)


def _split(
    differing: DifferingNames, chosen: Collection[str]
) -> tuple[DifferingNames, DifferingNames]:
    selected: dict[RankGroups, list[str]] = {}
    rest: dict[RankGroups, list[str]] = {}
    for groups, names in differing.items():
        for name in names:
            (selected if name in chosen else rest).setdefault(groups, []).append(name)
    return selected, rest


def _decided(
    checkpoint: Checkpoint, differing: DifferingNames, choice: str
) -> Iterator[Diagnostic]:
    """Yield a note on the user's choice for each tensor."""
    for groups, names in differing.items():
        ranks = sorted(chain(*groups))
        message = {
            "drop": "dropped",
            "first": f"taken from rank {ranks[0]}",
            "rank": f"target rank r takes that of source rank r modulo {checkpoint.cycle}",
        }[choice]
        code = "dropped" if choice == "drop" else "decided"
        only = "only on " if len(groups) == 1 else ""
        facts = f"not in {checkpoint.listing}; {only}{format_difference(groups)}"
        yield from (Diagnostic(code, message, facts=facts, tensor=name) for name in names)


def _problems(checkpoint: Checkpoint, differing: DifferingNames) -> Iterator[Diagnostic]:
    """Yield the problems of tensors that differ between ranks; one of all that should be full."""
    statistics, differing = _split(differing, checkpoint.equal.running_statistics)
    if statistics:
        ranks = {rank for groups in statistics for rank in chain(*groups)}
        yield running_statistics_problem([*chain(*statistics.values())], sorted(ranks))
    whole = {tensor.name for tensor in checkpoint.records if isinstance(tensor.known_by, Whole)}
    of_whole, differing = _split(differing, whole)
    if of_whole:
        number = count(sum(map(len, of_whole.values())), "parameter", "differ")
        ways = [f"{names[0]}: {format_difference(groups)}" for groups, names in of_whole.items()]
        message = f"not every rank holds the full model: {number} between ranks"
        hint, facts = f"-s STRATEGY if they are slices; {_EXPLAINED}", "; ".join(ways[:3])
        root = checkpoint.catalog.root
        yield Diagnostic("unlisted", message, hint=hint, facts=facts, where=root)
    choices = f"{_CHOICES}; {_EXPLAINED}"
    if checkpoint.catalog.description is None:
        choices = f"-s MORE.yaml if they are slices, or {_DECIDE}"
    if find_unsaved_weights(checkpoint):
        choices = "-s STRATEGY with these names; `ckpttool help renamed` explains"
    on_one_rank = {
        name: partial
        for partial in checkpoint.partly_held
        if partial.is_on_one_rank
        for name in partial.names
    }
    for groups, names in differing.items():
        for partial in dict.fromkeys(on_one_rank[name] for name in names if name in on_one_rank):
            hint = f"move the file away if it is damaged, or {_DECIDE}"
            for problem in partly_held_problems(checkpoint.catalog, partial, code="unlisted"):
                yield replace(problem, hint=hint, options=("--unlisted",))
        maps = dict.fromkeys(tag for name in names if (tag := map_of_component(name)) is not None)
        if maps:
            what = "map parameters that cannot be joined"
            yield from _differing_problems(maps, what, groups, f"{_CHOICES}; {_EXPLAINED}")
        tensors = [
            name for name in names if map_of_component(name) is None and name not in on_one_rank
        ]
        what = f"not in {checkpoint.listing}"
        yield from _differing_problems(tensors, what, groups, choices)


def _differing_problems(
    names: Iterable[str], what: str, groups: RankGroups, hint: str
) -> Iterator[Diagnostic]:
    """Yield the problem of each parameter that differs between ranks in one way."""
    is_split = len(groups) > 1
    difference = "different between ranks" if is_split else f"only on {format_ranks(groups[0])}"
    problem = Diagnostic(
        "unlisted",
        f"{what}, and {difference}",
        hint=hint,
        options=("--unlisted",),
        facts=format_difference(groups) if is_split else "",
        ranks=tuple(sorted(chain(*groups))),
    )
    return (replace(problem, tensor=name) for name in names)


def running_statistics_problem(names: Sequence[str], ranks: Sequence[int]) -> Diagnostic:
    """Return the problem of running statistics that differ between ranks, with the choices."""
    statistics = count(len(names), "running statistic", "differ")
    return Diagnostic(
        "unlisted",
        f"{statistics} between {format_ranks(ranks)}",
        hint=f"{_CHOICES}; {_EXPLAINED}",
        options=("--unlisted",),
        facts=f"{shorten(names, 3)}; each device has its own in data parallel (BatchNorm)",
        ranks=tuple(ranks),
    )


def check_constant(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on tensors with equal elements: slices of these look like full tensors."""
    constant = checkpoint.equal.constant if checkpoint.strategy.layouts else ()
    if constant:
        number = count(len(constant), "parameter")
        message = f"{number} not in the strategy, with equal elements on all ranks: read in full"
        hint = "a hand-written strategy if they are slices; `ckpttool help doubt` explains"
        yield Diagnostic("doubt", message, hint=hint, facts=shorten(constant, 3))


# ------------------------------------------------------------------------- merged checkpoints


def check_single_file(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a warning if a source is the file of one rank of several."""
    catalog = checkpoint.catalog
    if catalog.is_merged and catalog.one_of_several:
        message = "the file of one rank of several, so its tensors may be slices"
        hint, facts = "the folder of all ranks as SRC", catalog.one_of_several
        yield Diagnostic("one_of_several", message, hint=hint, facts=facts, where=catalog.root)


def check_not_full(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problem of a source that is not a full checkpoint, and what to do."""
    catalog = checkpoint.catalog
    if (not checkpoint.are_joined or catalog.is_merged) and catalog.one_of_several:
        message = "the file of one rank of several, so its tensors may be slices"
        hint = "the folder of all ranks as SRC (merge, reshard), or --replicated if this file "
        hint, facts = f"{hint}holds the full model", catalog.one_of_several
        yield Diagnostic("strategy", message, hint=hint, facts=facts, where=catalog.root)


def check_perhaps_slices(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note on tensors that may be slices of rank 0."""
    if slices := checkpoint.perhaps_slices.values():
        message = f"not in the index, so perhaps slices of rank 0: {', '.join(slices)}"
        yield Diagnostic("doubt", message)


def check_rank_slices(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the problem of tensors that may be slices of rank 0, or what the user chose."""
    slices = checkpoint.perhaps_slices
    if not slices:
        return
    number = f"{count(len(slices), 'tensor')} without an entry in the index"
    facts, where = shorten(slices.values(), 3), checkpoint.catalog.root
    if checkpoint.options.unlisted == "drop":
        yield Diagnostic("dropped", f"{number} are dropped", facts=facts, where=where)
    elif checkpoint.options.unlisted == "first":
        yield Diagnostic("decided", f"{number} are taken in full", facts=facts, where=where)
    else:
        message = f"{number} may be slices of rank 0"
        hint = f"--unlisted first takes them in full, --unlisted drop leaves them out; {_EXPLAINED}"
        options = ("--unlisted",)
        yield Diagnostic("unlisted", message, hint=hint, options=options, facts=facts, where=where)


def check_copies(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield a diagnostic for each file with copies of tensors that an index names elsewhere."""
    root, copies = checkpoint.catalog.root, contents.copies
    hint = f"ckpttool merge {quote(root)} -o NEW --max-shard-size 10GB"
    for which, tensors_of in (("other", copies.differing), ("equal", copies.equal)):
        message = f"{which} copies of tensors that the index names in another file: ignored"
        for path, tensors in tensors_of.items():
            names = shorten((tensor.meta.name for tensor in tensors), 3)
            files = shorten(sorted({tensor.file.path for tensor in tensors}), 3)
            facts = f"{count(len(tensors), 'tensor')} ({names}), read from {files}"
            note = Diagnostic("skipped", message, facts=facts, where=path)
            is_equal = which == "equal"
            yield note if is_equal else replace(note, code="overlay", hint=hint, path=path)


def check_ignored_copies(checkpoint: Checkpoint, contents: Contents) -> Iterator[Diagnostic]:
    """Yield the same for a conversion, which writes one copy of each itself."""
    return (replace(note, hint="") for note in check_copies(checkpoint, contents))
