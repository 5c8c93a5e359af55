"""Samples of the data checked against the strategy: whether it belongs to these files.

A strategy file holds no shapes, and MindSpore's is not always true: saved with
``optimizer_weight_shard_aggregated_save`` the slices are smaller than it says, and headers alone
cannot show it.  But then ranks that should hold equal slices hold different ones.

For each kind of layout the largest tensors are sampled, some pages of every rank's slice.  For
every other tensor with replicas some pages of the first and the last owner of one slice are read,
which differ whatever hides there: six pages for each tensor.

Slices that should differ and are equal may be so by chance.  If all ranks hold the same wherever
the strategy shards, every rank holds full tensors: MindSpore saves so unless it is told otherwise
(``integrated_save=True``).

The manifest of an output folder also tells for which ranks, and by which strategy, it was written.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from ckpttool.concurrency import wait_result
from ckpttool.errors import FormatError
from ckpttool.formats.local import read_file
from ckpttool.model.catalog import Catalog, RankCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.manifest import MANIFEST
from ckpttool.model.optimizer_names import GRADIENTS, parameter_of
from ckpttool.model.slicing import LayoutSlicing, Slicing, Source
from ckpttool.model.strategy import SelfDescribed, Sharding, Strategy
from ckpttool.model.tensors import StoredTensor
from ckpttool.model.wording import count, format_ranks, shorten
from ckpttool.planning.missing import is_deduplicated
from ckpttool.planning.replicas import other_stages
from ckpttool.planning.sources import group_ranks
from ckpttool.storage.sampling import Sample, sample_box, take_samples
from ckpttool.transaction.manifest import ManifestFile

TENSORS_PER_LAYOUT = 3

Held = Sequence[Mapping[int, StoredTensor]]  # of each slice, what each rank has


@dataclass(frozen=True, slots=True)
class SampledTensor:
    """A source with the samples of its slices, by slice and rank; one slice of it if a probe."""

    source: Source
    held: Held
    samples: Sequence[Mapping[int, Sample]]
    is_probe: bool

    @property
    def differing(self) -> tuple[int, ...]:
        """Ranks that should hold the same slice and do not; none if all agree."""
        return next((tuple(slice_) for slice_, _ in self._differing()), ())

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Of the ranks of `differing` that were looked at those that hold the same."""
        samples = next(samples for _, samples in self._differing())
        return tuple(group_ranks(tuple(samples), samples.__getitem__).values())

    def _differing(self) -> Iterator[tuple[Mapping[int, StoredTensor], Mapping[int, Sample]]]:
        for slice_, samples in zip(self.held, self.samples, strict=True):
            if len(set(samples.values())) > 1:
                yield slice_, samples


def sample_tensors(
    sources: Iterable[Source], by_hand: Mapping[str, str], executor: Executor
) -> list[SampledTensor]:
    """Sample all tensors that may tell something; every file is opened once."""
    chosen, others = _choose(sources, by_hand)
    held: list[Held] = [list(source.slicing.replicas()) for source in chosen]
    wanted: list[Held] = [*held]
    for source in others:
        slices = list(source.slicing.replicas())
        best = max(slices, key=len)  # the first of the largest
        held.append([best])
        wanted.append([_first_and_last(source, best)])
    samples = _sample((one for of in wanted for ranks in of for one in ranks.values()), executor)
    return [
        SampledTensor(
            source,
            slices,
            [{rank: samples[one] for rank, one in ranks.items()} for ranks in seen],
            is_probe=i >= len(chosen),
        )
        for i, (source, slices, seen) in enumerate(
            zip([*chosen, *others], held, wanted, strict=True)
        )
    ]


def _choose(
    sources: Iterable[Source], by_hand: Mapping[str, str]
) -> tuple[list[Source], list[Source]]:
    """The tensors to be looked at closely, and the others that have replicas.

    Closely: of each layout the tensors with the largest slices; small ones are often cut otherwise.
    And all of those by hand: a pattern matches more than one thinks.
    """
    by_layout: dict[Hashable, list[Source]] = defaultdict(list)
    chosen = []
    for source in sources:
        if not source.meta.nbytes:
            continue
        if source.meta.name in by_hand:
            chosen.append(source)
        elif source.has_layout:
            by_layout[source.slicing.distribution_key].append(source)
    others: list[Source] = []
    for group in by_layout.values():
        group.sort(key=_suitability)
        chosen += group[:TENSORS_PER_LAYOUT]
        others += [
            source
            for source in group[TENSORS_PER_LAYOUT:]
            if not source.meta.name.startswith(GRADIENTS) and _has_replicas(source)
        ]
    return chosen, others


def _suitability(source: Source) -> tuple[bool, int]:
    """Parameters before states, some of which are each rank's own sums; large before small."""
    return parameter_of(source.meta.name) is not None, -source.meta.nbytes


def _has_replicas(source: Source) -> bool:
    return any(len(ranks) > 1 for ranks in source.slicing.owners())


def _first_and_last(source: Source, ranks: Mapping[int, StoredTensor]) -> dict[int, StoredTensor]:
    """The first and the last owner of a slice; all, if some are missing: what is left may agree.

    Of the replicas at positions 0 to ``n - 1`` the first and the last hold different slices of any
    optimizer shard, since what divides ``n`` does not divide ``n - 1``.
    """
    if len(ranks) < max(map(len, source.slicing.owners())):
        return dict(ranks)
    return {rank: ranks[rank] for rank in (min(ranks), max(ranks))}


def _sample(tensors: Iterable[StoredTensor], executor: Executor) -> Mapping[StoredTensor, Sample]:
    """A sample of each tensor; every file is opened once."""
    by_path: dict[str, list[StoredTensor]] = defaultdict(list)
    for tensor in dict.fromkeys(tensors):
        by_path[tensor.file.path].append(tensor)
    futures = [(wanted, executor.submit(take_samples, wanted)) for wanted in by_path.values()]
    taken: dict[StoredTensor, Sample] = {}
    for wanted, future in futures:
        samples = wait_result(future)
        taken.update(zip(wanted, samples, strict=True))
    return taken


SKIPS_CHECK = ("--trust-strategy skips this check", ("--trust-strategy",))  # hint and option
LEAST_BYTES = 4096  # of slices; less may be the same as it was made by hand, a table of signs, say


def check_strategy(
    catalog: Catalog, sharding: Sharding, sources: Iterable[Source], executor: Executor
) -> list[Diagnostic]:
    """Problems and notes about layouts that the contents contradict.

    Replicas that differ are a problem: one of them would be taken, and nobody knows which.  So are
    parameters on which stages do not agree, and slices of an optimizer shard that are replicas: the
    full tensor would be too large.  Slices that should differ and are the same are a warning, as
    that may be by chance, and a problem if most of the sharded tensors that are sampled are so.

    All tensors whose layouts a person wrote are looked at closely.
    """
    by_hand = sharding.handwritten
    sources = list(sources)
    looked = sample_tensors(sources, by_hand, executor)
    differing: dict[tuple[str | None, tuple[int, ...]], list[SampledTensor]] = defaultdict(list)
    alike: dict[tuple[tuple[int, ...], ...], list[str]] = defaultdict(list)
    whole: list[str] = []
    for one in looked:
        name = one.source.meta.name
        by_rank = {rank: sample for of in one.samples for rank, sample in of.items()}
        if one.differing:
            place = by_hand.get(name) or by_hand.get(one.source.parameter or "")
            differing[place, one.differing].append(one)
        elif one.is_probe:
            continue
        elif _is_whole(one.source.slicing, by_rank):
            whole.append(name)
        elif groups := _alike(one, name in by_hand):
            are_all = groups == (tuple(sorted(by_rank)),)
            alike[() if are_all else groups].append(name)
    found = [_on_differing(catalog, place, those) for (place, _), those in differing.items()]
    if isinstance(sharding, SelfDescribed):
        return found
    shown = {one.source.meta.name: one for one in looked}
    found += [_on_whole(whole, shown[whole[0]])] if whole else []
    found += _stages_that_differ(catalog, sharding, sources, executor)
    names = alike.get((), [])
    if names and _are_all_alike(looked, by_hand):
        return [*found, _on_all_alike(names, shown[names[0]])]
    if contradicted := _contradicted(looked, alike, by_hand):
        return [*found, contradicted]
    notes = [_note(groups, names, by_hand) for groups, names in alike.items()]
    lost = [rank for rank in sharding.ranks if rank not in catalog.files]
    if lost and notes and not is_deduplicated(catalog, sharding):
        # Each may be by chance.  Together they say that these files are of another strategy.
        texts = [f"{format_ranks(lost)} not there, and {note.text}" for note in notes]
        notes = [Diagnostic("contradicted", text, *SKIPS_CHECK) for text in texts]
    return [*found, *notes]


def _is_whole(slicing: Slicing, held: Mapping[int, Sample]) -> bool:
    """Return whether a layout has an optimizer shard and all slices that it makes are equal.

    Tensors whose elements are all equal tell nothing, nor do slices of which others are missing.
    """
    if not isinstance(slicing, LayoutSlicing):
        return False  # boxes have no optimizer shard
    layout = slicing.layout
    if layout.optimizer_shard == 1 or len(held) < len(layout.ranks):
        return False
    bare = replace(layout, optimizer_shard=1)
    groups = [{held[rank] for rank in bare.owners(index)} for index in bare.slice_indices()]
    return all(len(samples) == 1 for samples in groups) and not any(
        sample.is_constant for samples in groups for sample in samples
    )


def _alike(one: SampledTensor, is_handwritten: bool) -> tuple[tuple[int, ...], ...]:
    """Ranks that should hold different slices and hold the same, group by group.

    Slices whose elements are all equal tell nothing, but by hand even those are looked at if all of
    them are the same.
    """
    ranks: dict[Sample, list[int]] = defaultdict(list)
    slices: dict[Sample, int] = defaultdict(int)
    for samples in one.samples:
        for sample in set(samples.values()):
            slices[sample] += 1
            ranks[sample] += samples
    are_all = is_handwritten and len(slices) == 1
    return tuple(
        tuple(sorted(ranks[sample]))
        for sample, number in slices.items()
        if number > 1 and (are_all or not sample.is_constant)
    )


def _are_all_alike(looked: Iterable[SampledTensor], by_hand: Mapping[str, str]) -> bool:
    """Whether all slices of each tensor are the same, wherever that tells anything.

    It tells nothing if all elements are equal, and what a person wrote is more than a strategy that
    may be of another run.
    """
    nbytes = 0
    for one in looked:
        held = {sample for of in one.samples for sample in of.values()}
        if one.is_probe or len(one.held) == 1 or all(sample.is_constant for sample in held):
            continue
        if len(held) > 1 or one.source.meta.name in by_hand:
            return False
        nbytes += one.source.meta.nbytes // len(one.held)
    return nbytes >= LEAST_BYTES


def _contradicted(
    looked: Iterable[SampledTensor],
    alike: Mapping[tuple[tuple[int, ...], ...], Sequence[str]],
    by_hand: Mapping[str, str],
) -> Diagnostic | None:
    """The problem of a strategy that most of the sampled tensors contradict, if they do.

    A tensor contradicts it if two slices that should differ are equal.  Constant tensors tell
    nothing, and a hand-written strategy is corrected by its author.
    """
    telling = {
        one.source.meta.name: one.source.meta.nbytes
        for one in looked
        if not one.is_probe
        and len(one.held) > 1
        and one.source.meta.name not in by_hand
        and not all(sample.is_constant for of in one.samples for sample in of.values())
    }
    groups = {name: groups for groups, names in alike.items() for name in names if name in telling}
    nbytes = sum(telling[name] for name in groups)
    if 2 * len(groups) <= len(telling) or nbytes < LEAST_BYTES:
        return None
    equal = next(iter(groups.values()))
    ranks = "; ".join(map(format_ranks, equal[:3])) or "all ranks"
    return Diagnostic(
        "contradicted",
        f"the strategy shards {count(len(telling), 'sampled tensor')} whose slices should differ, "
        f"and {len(groups)} have equal slices ({ranks}): {shorten(groups)}; is it the strategy of "
        "this run?",
        *SKIPS_CHECK,
    )


def _on_differing(
    catalog: Catalog, place: str | None, those: Sequence[SampledTensor]
) -> Diagnostic:
    """What is said of tensors whose replicas differ between the same ranks."""
    owners, groups = those[0].differing, those[0].groups
    text = f"{shorten(one.source.meta.name for one in those)}: {place or _told_by(catalog)} says "
    text += f"that {format_ranks(owners)} hold the same, and they differ "
    question, hint, options = _remedy(catalog, place, groups)
    text += f"({' | '.join(map(format_ranks, groups))}){question}"
    return Diagnostic("replica", text, hint, options, ranks=owners)


def _on_whole(names: Sequence[str], shown: SampledTensor) -> Diagnostic:
    text = f"{shorten(names)}: the strategy says that an optimizer shard cuts them, and the "
    text += f"ranks that should hold different slices hold the same ({_shapes(shown)}): is it "
    text += "the strategy of this run?"
    return Diagnostic("contradicted", text, *SKIPS_CHECK)


def _on_all_alike(names: Sequence[str], shown: SampledTensor) -> Diagnostic:
    text = f"{shorten(names)}: all ranks hold the same where the strategy cuts ({_shapes(shown)}), "
    text += "and nothing differs anywhere: they hold everything (integrated_save=True), so leave "
    text += "the strategy away: merge --replicated, or split --replicated"
    return Diagnostic("contradicted", text, *SKIPS_CHECK)


def _shapes(one: SampledTensor) -> str:
    held = next(tensor.meta.shape for ranks in one.held for tensor in ranks.values())
    return f"{one.source.meta.name}: slices of {held} would make {one.source.meta.shape}"


def _note(
    groups: tuple[tuple[int, ...], ...], names: Sequence[str], by_hand: Mapping[str, str]
) -> Diagnostic:
    """What is said of tensors whose slices are the same where they are cut; no groups mean all."""
    said = [name for name in names if name in by_hand]
    same = "; ".join(format_ranks(group) for group in groups[:3]) or "all ranks"
    more = "; and so on" if len(groups) > 3 else ""
    if said:
        named = shorten(f"{name} ({by_hand[name]})" for name in said)
        text = f"cut by hand, and {same}{more} hold the same; are they replicated?: {named}"
    else:
        text = f"{same}{more} hold the same where the strategy cuts; "
        text += (
            "is it the strategy of this run? give the one that they were saved with"
            if groups
            else "if they hold everything (integrated_save=True) use --replicated"
        )
        text += f": {shorten(names)}"
    return Diagnostic("equal_slices", text)


def _told_by(catalog: Catalog) -> str:
    if isinstance(catalog, SelfDescribedCatalog):
        return shorten(catalog.description.files, 2)
    return "the strategy"


def _remedy(
    catalog: Catalog, place: str | None, groups: Sequence[Sequence[int]]
) -> tuple[str, str, tuple[str, ...]]:
    """Return a question about replicas that differ, a hint, and the options that it names."""
    if place is not None:
        hint = "correct it, or take the lowest rank's with --trust-strategy"
        return "", hint, ("--trust-strategy",)
    damage = "is one damaged (`ckpttool verify --deep` shows which elements differ; move that "
    damage += "rank's file away and its replicas are read), "
    damage = damage if len(groups) == 2 else ""
    if isinstance(catalog, SelfDescribedCatalog):
        text = f"{damage}or are they not of one step?" if damage else "are they of one step?"
        return f": {text}", "merge and reshard take the lowest rank's with --trust-strategy", ()
    text = f": {damage}is it the strategy of this run, are they of one step, or does each rank "
    hint = "--trust-strategy takes the lowest rank's; if they are slices, saved with "
    hint += "optimizer_weight_shard_aggregated_save, say so with --optimizer-shard N"
    return f"{text}have its own?", hint, ("--trust-strategy", "--optimizer-shard")


def _stages_that_differ(
    catalog: Catalog, sharding: Sharding, sources: Sequence[Source], executor: Executor
) -> list[Diagnostic]:
    """Parameters that several stages hold, and of which samples differ; gradients are each its own.

    Read are three boxes of at most a page, from each stage.
    """
    pairs = [
        (mine, other)
        for mine, other in other_stages(catalog, sharding, sources)
        if mine.meta == other.meta and mine.meta.nbytes and not mine.meta.name.startswith(GRADIENTS)
    ]
    futures = [tuple(executor.submit(sample_box, source) for source in pair) for pair in pairs]
    differing: dict[tuple[range, range], list[str]] = defaultdict(list)
    for (mine, other), pair in zip(pairs, futures, strict=True):
        first, second = (wait_result(future) for future in pair)
        if first != second:
            differing[mine.layout.ranks, other.layout.ranks].append(mine.meta.name)
    return [
        Diagnostic(
            "replica",
            f"{shorten(names)}: the strategy says that the stages of {format_ranks(first)} and of "
            f"{format_ranks(second)} hold the same, and they differ: are they of one step, and is "
            "it the strategy of this run?",
            "--trust-strategy takes the lowest stage's",
            ("--trust-strategy",),
            ranks=(*first, *second),
        )
        for (first, second), names in differing.items()
    ]


def limit_to_written_ranks(
    catalog: Catalog, sharding: Sharding | None
) -> tuple[Catalog, list[Diagnostic]]:
    """Limit a catalog to the ranks that a set was written for, if not for all (--rank).

    Inspect and verify want no other ranks; a note says so.
    """
    asked, told = _written_ranks(catalog, sharding)
    if asked is None:
        return catalog, []
    others = format_ranks(sorted(_expected(catalog, sharding) - asked))
    text = f"{others}: not looked for, since {told}"
    assert isinstance(catalog, RankCatalog)
    return replace(catalog, expected_ranks=asked), [Diagnostic("part", text)]


def note_written_ranks(catalog: Catalog, sharding: Sharding) -> Catalog:
    """Add a note on the ranks that a set was written for, if not for all (--rank).

    Conversions want all ranks, and name what is missing.
    """
    asked, told = _written_ranks(catalog, sharding)
    if asked is None:
        return catalog
    return replace(catalog, diagnostics=(*catalog.diagnostics, Diagnostic("part", told)))


def _expected(catalog: Catalog, sharding: Sharding | None) -> set[int]:
    """Ranks that should have a file."""
    missing = catalog.missing_ranks if isinstance(catalog, RankCatalog) else ()
    return {*(sharding.ranks if isinstance(sharding, Strategy) else ()), *missing}


def _written_ranks(
    catalog: Catalog, sharding: Sharding | None
) -> tuple[frozenset[int] | None, str]:
    """The ranks that a set was written for, and how that is known; None if for all.

    Its manifest, which comes when the set is complete, lists these alone.  Of one that cannot be
    used `check_manifest` says so.
    """
    path = Path(catalog.root) / MANIFEST
    there = catalog.files.keys() | catalog.damaged.keys()
    expected = _expected(catalog, sharding)
    if not isinstance(catalog, RankCatalog) or catalog.expected_ranks is not None:
        return None, ""
    if expected <= there or not path.is_file():
        return None, ""
    try:
        outputs = ManifestFile.read(path).manifest().outputs
    except FormatError:
        return None, ""
    asked = frozenset({*there, *(output.rank for output in outputs)})
    if expected <= asked or any(Path(o.path).parent != Path(f"rank_{o.rank}") for o in outputs):
        return None, ""
    written = format_ranks([output.rank for output in outputs])
    return asked, f"{path} says that this was written for {written} alone (--rank)"


def strategy_notes(catalog: Catalog, strategy: Strategy) -> Iterator[Diagnostic]:
    """That the strategy is another than that by which a set was written, as its manifest tells.

    A manifest names the strategies of the target last.  Of one that cannot be used that is said.
    """
    path = Path(catalog.root) / MANIFEST
    if not strategy.files or not path.is_file():
        return
    given = {sha256(read_file(name)).hexdigest() for name in strategy.files}
    try:
        provenance = ManifestFile.read(path).head.provenance()
        recorded = provenance.strategies[-len(strategy.files) :]
        same = [recorded, provenance.dst_strategies]
        if recorded and given not in [{one.sha256 for one in files} for files in same]:
            text = f"{path} says that this was written by {recorded[-1].path}, and "
            text += f"{strategy.origin} is another file; if it does not say the same, what is read "
            text += "is wrong"
            yield Diagnostic("other_strategy", text)
    except FormatError as error:
        text = f"{error}; so it does not tell whether {strategy.origin} is what this was written by"
        yield Diagnostic("other_strategy", text)
