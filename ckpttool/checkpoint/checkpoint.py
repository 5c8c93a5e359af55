"""A checkpoint with one record for each tensor: what checks, plans and screens work on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from shlex import quote
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from msgspec import Struct, field
from msgspec.structs import replace

from ckpttool.checkpoint.contents import ComparedCopies, EqualContents, IndexedTensors
from ckpttool.checkpoint.evidence import Evidence
from ckpttool.checkpoint.interpret import (
    Files,
    find_rank_slices,
    full_tensor,
    interpret,
    listed_names,
    records_of_files,
)
from ckpttool.checkpoint.presence import (
    PartlyHeld,
    Presence,
    find_missing,
    find_partly_held,
    is_deduplicated,
    is_rest_known,
    ranks_without_file,
    without_harmless,
)
from ckpttool.model.belonging import WEIGHT, Belonging, Belongings, find_belongings
from ckpttool.model.catalog import Catalog
from ckpttool.model.choices import TensorOptions, is_of_vocabulary
from ckpttool.model.names import ParameterOfState, map_of_component
from ckpttool.model.plan import OutputTensor, Term
from ckpttool.model.renames import Names, rename
from ckpttool.model.slicing import (
    BrokenTensor,
    FullTensor,
    LayoutSlicing,
    RankGroups,
    Tensor,
    Unlisted,
    Whole,
)
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import CutShortError, TensorMeta
from ckpttool.problems import COPY_AGAIN, CkptToolError, Diagnostic, FormatError
from ckpttool.typed import ManifestChoice, UnlistedChoice, require_choice, require_number
from ckpttool.wording import Brief, count, format_bytes, format_shape

if TYPE_CHECKING:
    from ckpttool.checkpoint.hidden_shards import InferredStrategy
    from ckpttool.checkpoint.samples import SampledTensor
    from ckpttool.checkpoint.scrambled_slices import ScrambledTensor

MOST_EXCLUDED = 2  # tensors that a hint leaves out by name

# Name to the ranks that hold each slice that is needed; other names are not needed.
NeededSlices: TypeAlias = Mapping[str, Collection[tuple[int, ...]]]
Reading = Literal["checksums", "contents", "unlisted", "manifest"]

# Each rank stores its own number in an emergency save.  It means nothing to other ranks.
# Source: MindSpore 2.10 train/callback/_train_fault_tolerance.py (_save_checkpoint_on_failure).
RANK_SPECIFIC_NAMES = frozenset({"cur_rank"})


class ResolveOptions(Struct, frozen=True):
    """Options that decide how a checkpoint is resolved to full tensors.

    Attributes
    ----------
    replicated
        Every rank holds full tensors.  A single file is a full checkpoint, whatever its name.
    unlisted
        How to take parameters that are not in the strategy and differ between ranks.  ``"rank"``
        gives target rank ``r`` the value of source rank ``r`` modulo the number of source ranks.
        ``"first"`` gives all ranks the value of the lowest rank.  ``"drop"`` leaves them out.  None
        makes them a problem.
    trust_strategy
        Skip the samples that show whether the strategy belongs to these files.
    optimizer_shard
        The hidden optimizer shard of tensors whose contents do not decide it.  It is a problem if
        contents show another.  1 is for none, also where the strategy lists one.
    check_replicas
        Compare all replicas byte for byte; any difference is a problem.
    strict
        Make every warning a problem.
    manifest
        How to compare the files with the manifest of their set.  ``"samples"``: sizes, headers and
        some hashes.  ``"all"``: all hashes (verify).  ``"ignore"``: not at all.
    tensors
        Which tensors are wanted, and in which element types.

    Examples
    --------
    >>> ResolveOptions(unlisted="first").strict
    False
    """

    replicated: bool = False
    unlisted: UnlistedChoice | None = None
    trust_strategy: bool = False
    optimizer_shard: int | None = None
    check_replicas: bool = False
    strict: bool = False
    manifest: ManifestChoice = "samples"
    tensors: TensorOptions = TensorOptions()

    def __post_init__(self) -> None:
        for name, choices in (
            ("unlisted", (None, *get_args(UnlistedChoice))),
            ("manifest", get_args(ManifestChoice)),
        ):
            require_choice(name, getattr(self, name), choices)
        require_number("optimizer_shard", self.optimizer_shard)


class Contents(Struct, frozen=True, kw_only=True):
    """Findings from the contents of a checkpoint, and the samples behind them."""

    is_refused: bool = False  # by headers, so that layouts were not checked against contents
    correction: InferredStrategy | None = None  # of shards that are hidden, or that were joined
    sampled: tuple[SampledTensor, ...] = ()
    sampled_copies: tuple[SampledTensor, ...] = ()  # of shared tensors, on all stages but the first
    differing_stages: tuple[tuple[FullTensor, FullTensor], ...] = ()
    scrambled: tuple[ScrambledTensor, ...] = ()
    indexes: Mapping[str, IndexedTensors] = {}  # those beside the files
    copies: ComparedCopies = ComparedCopies()  # of tensors that an index names in another file
    read: Mapping[Reading, Sequence[Diagnostic]] = {}  # what more than samples shows
    unread: CkptToolError | None = None  # it ended the reading
    no_evidence: Mapping[str, CkptToolError] = {}  # unwanted tensors that cannot be read
    evidence: Evidence = field(default_factory=Evidence)
    complete_step: str = ""  # the newest other step that is complete, if something is missing here

    @property
    def is_incomplete(self) -> bool:
        """Whether not all tensors are known, so that others would look like all of them."""
        return self.is_refused or self.unread is not None

    @property
    def readable_indexes(self) -> list[Mapping[str, TensorMeta]]:
        """The full tensors of each index beside the files that can be read."""
        return [index for index in self.indexes.values() if not isinstance(index, Exception)]

    def of_wanted(self, wanted: Collection[str]) -> Contents:
        """Return what contents show of the tensors that are wanted.

        Those of the others corrected the strategy before: states prove hidden optimizer shards.
        """
        correction = self.correction
        if correction is not None and correction.undecided.isdisjoint(wanted):
            correction = replace(correction, problems=())
        stages = self.differing_stages
        return replace(
            self,
            correction=correction,
            sampled=tuple(s for s in self.sampled if s.tensor.name in wanted),
            sampled_copies=tuple(s for s in self.sampled_copies if s.tensor.name in wanted),
            differing_stages=tuple(pair for pair in stages if pair[0].name in wanted),
            scrambled=tuple(s for s in self.scrambled if s.tensor.name in wanted),
        )


class Rearranged(Struct, frozen=True):
    """The work of a recipe on a checkpoint, beside the tensors with other axes.

    Attributes
    ----------
    source
        The checkpoint as files have it.
    called
        Old to new name of the tensors that keep their axes.
    dtypes
        The element types of tensors with other axes, by their names.
    copied
        The name of each copy that is written to that of what it copies: as stored, or as made.
    regrouped_by
        Names of the fusions of weights that each rank of the source fused for itself.
    scales
        The terms of the scales of Float8 weights, by the names of the records.
    confirmed
        Old names of the tensors of ``called`` whose full shapes the configuration gives.
    """

    source: Checkpoint
    called: Mapping[str, str]
    dtypes: Mapping[str, str]
    copied: Mapping[str, str] = {}
    regrouped_by: frozenset[str] = frozenset()
    scales: Mapping[str, Term] = {}
    confirmed: frozenset[str] = frozenset()


class Checkpoint(Brief, Struct, frozen=True, kw_only=True, dict=True):
    """A checkpoint, resolved to full tensors."""

    catalog: Catalog  # empty files that should hold tensors are among the damaged ones
    strategy: Strategy  # as contents correct it
    options: ResolveOptions = ResolveOptions()
    records: Iterable[Tensor] = ()  # one for each tensor, before the user's choices
    files: Files = "joined"
    needed: NeededSlices | None = None  # by wanted target ranks, where that makes a difference
    is_recorded: bool = False  # the manifest, if it counts, says that this strategy was used
    is_deduplicated: bool = False  # one rank of each replica group has its slice on disk
    misfits: tuple[Diagnostic, ...] = ()  # of names or shapes; ``records`` is then empty
    equal: EqualContents = EqualContents()
    counting: frozenset[str] = frozenset()  # single numbers whose values count something
    weight_block: tuple[int, int] | None = None  # rows and columns of Float8 that share a scale
    unfiltered: Checkpoint | None = None  # with all tensors, if the user does not want all
    rearranged: Rearranged | None = None  # as a recipe makes it

    def _texts(self) -> Iterator[str]:
        ranks = count(len(self.catalog.files), "file" if self.catalog.is_merged else "rank")
        yield f"{self.catalog.root}: {count(len(self.tensors), 'tensor')} of {ranks}"
        yield format_bytes(sum(t.meta.nbytes for t in self.tensors))

    def _rows(self) -> Iterator[Sequence[str]]:
        yield ("tensor", "dtype", "shape")
        for tensor in self.tensors:
            yield (str(tensor.name), tensor.meta.dtype, format_shape(tensor.meta.shape))

    @property
    def are_joined(self) -> bool:
        """Whether files of ranks are joined; else each file is read by itself."""
        return self.files == "joined"

    def with_strategy(self, strategy: Strategy, equal: EqualContents) -> Checkpoint:
        """Return the checkpoint as other layouts and contents make it."""
        known = self.records if strategy is self.strategy else ()
        return replace(
            self,
            strategy=strategy,
            equal=equal,
            records=interpret(self.catalog, strategy, equal.groups, known),
            is_deduplicated=is_deduplicated(self.catalog, strategy),
        )

    @property
    def chosen(self) -> Checkpoint:
        """The checkpoint as it would be if the files held only the tensors that the user wants."""
        if self.options.tensors.are_all_wanted or self.misfits:
            return self
        wanted = self.wanted
        catalog = without_harmless(
            self.catalog.with_only(wanted),
            self.strategy,
            wanted,
            are_named=self.options.tensors.are_named,
        )
        records = (tensor for tensor in self.records if tensor.name in wanted)
        return replace(
            self,
            catalog=catalog,
            records=tuple(records) if self.are_joined else records_of_files(catalog, self.files),
            unfiltered=self,
        )

    @property
    def whole(self) -> Checkpoint:
        """The checkpoint with all tensors, also those that the user does not want."""
        return self.unfiltered or self

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint as files have it, with their names and axes."""
        return self if self.rearranged is None else self.rearranged.source

    @cached_property
    def wanted(self) -> frozenset[str]:
        """The names that the user wants, of those in files and of those that are listed."""
        options, whole = self.options.tensors, self.whole
        if options.are_all_wanted:
            return frozenset(whole.names)
        return options.choose(whole.names, whole.belongings)

    @cached_property
    def new_names(self) -> Mapping[str, str]:
        """The names that change, wanted or not, with their new names."""
        if self.rearranged is not None:
            return {name: new for name, new in self.rearranged.called.items() if name != new}
        whole, rules = self.whole, self.options.tensors.renames
        return rename(rules, whole.names, whole.belongings) if rules else {}

    @cached_property
    def renamed(self) -> Mapping[str, str]:
        """The wanted names that change, with their new names."""
        return {name: new for name, new in self.new_names.items() if name in self.wanted}

    @cached_property
    def names(self) -> Names:
        """The names of the tensors in files with their shapes, and of those that are listed."""
        shapes = {name: meta.shape for name, meta in self.metas.items()}
        return Names(dict.fromkeys((*shapes, *self.listed, *self.lost)) | shapes)

    @cached_property
    def belongings(self) -> Belongings:
        """What the tensors belong to: one answer for all that choose, cast, average or rename."""
        if self.unfiltered is not None:
            return self.unfiltered.belongings
        names, metas = self.old_names
        if not self.options.tensors.called:
            states = None if self.lost else self.states
            return find_belongings(names, metas, self.counting, states)
        belongings = find_belongings(names, metas, {*map(self._called, self.counting)})
        new = {self._called(name): name for name in self.names}
        return {
            new[name]: replace(what, of=what.of and new.get(what.of, what.of))
            for name, what in belongings.items()
        }

    @property
    def old_names(self) -> tuple[Collection[str], Mapping[str, TensorMeta]]:
        """The listed names and the tensors, by the names that they have on disk."""
        lost = {name: meta for name, meta in self.lost.items() if meta is not None}
        names = dict.fromkeys((*self.listed, *self.lost)) if self.lost else self.listed
        metas = {**lost, **self.metas}
        if not self.options.tensors.called:
            return names, metas
        called = self._called
        return dict.fromkeys(map(called, names)), {
            called(name): meta for name, meta in metas.items()
        }

    def _called(self, name: str) -> str:
        return self.options.tensors.called.get(name, name)

    def belonging(self, name: str) -> Belonging:
        """Return to what a tensor belongs."""
        return self.belongings.get(name, WEIGHT)

    def owner_of(self, name: str) -> str:
        """Return the name of what a tensor belongs to, or copies; else its own."""
        name = name if self.rearranged is None else self.rearranged.copied.get(name, name)
        return self.belonging(name).of or name

    def is_of_vocabulary(self, name: str) -> bool:
        """Return whether a tensor, or its owner, has a row for each word, by its names."""
        owner = self.owner_of(name)
        return any(map(is_of_vocabulary, (owner, self.new_names.get(owner, owner))))

    @property
    def lost(self) -> Mapping[str, TensorMeta | None]:
        """The tensors that files that are cut short lost, as far as they are known."""
        errors = self.catalog.cut_short.values()
        return {name: meta for error in errors for name, meta in error.remains.lost.items()}

    @cached_property
    def metas(self) -> Mapping[str, TensorMeta]:
        """Name to full tensor, or to a slice of one that is incomplete."""
        joined = self.records if self.are_joined else ()
        return {**self.catalog.metas, **{t.name: t.meta for t in joined}}

    def wanted_dtype(self, meta: TensorMeta) -> str:
        """Return the element type in which the user wants a tensor."""
        options = self.options.tensors
        if self.rearranged is not None and meta.name in self.rearranged.dtypes:
            return self.rearranged.dtypes[meta.name]
        if (used := options.recipe) and (given := used.dtype_of(meta.name)):
            return given
        if not options.casts and not used:
            return meta.dtype
        what = self.belonging(meta.name)
        dtype = options.dtype_of(meta, what)
        return used.dtype or dtype if used and what.scale and dtype == meta.dtype else dtype

    @cached_property
    def scales(self) -> tuple[Mapping[str, Term], Sequence[Diagnostic]]:
        """The scales of Float8 weights that are cast, and what does not fit; see `find_scales`."""
        from ckpttool.checkpoint.scales import find_scales

        return find_scales(self) if self.rearranged is None else (self.rearranged.scales, ())

    def terms_of(self, tensor: FullTensor) -> tuple[Term, ...]:
        """Return the terms of a tensor in the wanted type; none for a scale that is multiplied."""
        scales = self.scales[0] if self.options.tensors.are_changed else {}
        if self.belonging(tensor.name).of in scales and self.belonging(tensor.name).role == "scale":
            return ()
        return (Term(tensor), *filter(None, [scales.get(tensor.name)]))

    def outputs(self) -> Iterator[OutputTensor]:
        """Yield the tensors that merge would write, if no rows change: named and cast as wanted."""
        for tensor in self.tensors:
            if terms := self.terms_of(tensor):
                output = OutputTensor.full(tensor, self.wanted_dtype(tensor.meta))
                name = self.renamed.get(tensor.name, tensor.name)
                yield replace(output, meta=replace(output.meta, name=name), terms=terms)

    @property
    def left_out(self) -> Mapping[str, int]:
        """The tensors that the user does not want, with their bytes: full, or in all files."""
        if self.rearranged is not None:
            return self.stored.left_out
        whole = self.unfiltered
        if whole is None:
            return {}
        metas = {name: meta for name, meta in whole.metas.items() if name not in self.wanted}
        if whole.are_joined:
            return {name: meta.nbytes for name, meta in metas.items()}
        of_files = {name: whole.catalog.metas_of(name).values() for name in metas}
        return {name: sum(meta.nbytes for meta in each) for name, each in of_files.items()}

    def limited(self, find_needed: Callable[[Checkpoint], NeededSlices] | None) -> Checkpoint:
        """Return the checkpoint with full tensors where all slices that are needed are there.

        ``find_needed`` returns these slices; None if all are.
        """
        if find_needed is None or not ranks_without_file(self.catalog, self.strategy):
            return self
        partial = tuple(
            _of_stages(tensor, tensor.stages) if isinstance(tensor, BrokenTensor) else tensor
            for tensor in self.records
        )
        needed = find_needed(replace(self, records=partial))
        limited = [_limit(t, needed.get(t.name, ())) for t in self.records]
        return replace(self, records=tuple(limited), needed=needed)

    @cached_property
    def tensors(self) -> tuple[FullTensor, ...]:
        """The full tensors, as the user chose: in the order of the files, the chosen ones last."""
        choice = self.options.unlisted
        undecided = {*chain(*self.differing.values()), *self.odd_shapes}
        if choice == "drop":
            undecided |= self.perhaps_slices.keys()
        full = [t for t in self.records if isinstance(t, FullTensor)]
        kept = [t for t in full if t.name not in undecided]
        by_name = {t.name: t for t in full}
        for groups, names in self.differing.items():
            if choice == "first":
                kept += map(by_name.__getitem__, names)
            elif choice == "rank":
                kept += (
                    full_tensor(self.catalog, name, by_name[name].known_by, rank, (rank % n, n))
                    for n in (self.cycle,)
                    for name in names
                    for rank in sorted(chain(*groups))
                )
        return tuple(kept)

    @property
    def cycle(self) -> int:
        """The number of ranks that take turns if each target rank takes the value of one rank."""
        return max(len(self.strategy.ranks), max(self.catalog.files, default=0) + 1)

    @cached_property
    def odd_shapes(self) -> Mapping[str, str]:
        """States without a layout that are neither slices nor full tensors, with their shapes."""
        return {
            tensor.name: tensor.known_by.odd_shapes
            for tensor in self.records
            if isinstance(tensor.known_by, Unlisted) and tensor.known_by.odd_shapes
        }

    @cached_property
    def perhaps_slices(self) -> Mapping[str, str]:
        """Tensors of a merged checkpoint that may be slices of rank 0; see `find_rank_slices`."""
        return {} if self.are_joined else find_rank_slices(self.catalog)

    @cached_property
    def differing(self) -> Mapping[RankGroups, Sequence[str]]:
        """Tensors without a layout on which the user decides, by the groups of equal ranks."""
        names_of: dict[RankGroups, list[str]] = {}
        decided = {*chain(*(part.names for part in self.partly_held if part.is_on_one_rank))}
        if self.options.unlisted is not None:
            decided |= self.odd_shapes.keys()
        for tensor in self.records if self.are_joined else ():
            if isinstance(tensor.known_by, Whole | Unlisted):
                groups = tensor.known_by.groups
                is_map = map_of_component(tensor.name) is not None
                is_partial = is_map and sum(map(len, groups)) < len(self.catalog.files)
                if len(groups) > 1 or is_partial or tensor.name in decided:
                    names_of.setdefault(groups, []).append(tensor.name)
        return names_of

    @cached_property
    def partly_held(self) -> tuple[PartlyHeld, ...]:
        """Tensors without a layout that only some ranks of a stage hold."""
        if self.unfiltered is not None:
            parts = (
                (part, self.wanted.intersection(part.names)) for part in self.whole.partly_held
            )
            return tuple(
                replace(part, names=tuple(sorted(names))) for part, names in parts if names
            )
        joined = self.records if self.are_joined else ()
        return find_partly_held(self.catalog, self.strategy, joined, self.is_deduplicated)

    @cached_property
    def presence(self) -> Presence:
        """The missing slices and files, and the files that replicas replace."""
        resolved = self.catalog, self.strategy, self.records, self.is_deduplicated
        return find_missing(*resolved, self.needed, self.wanted if self.unfiltered else None)

    @cached_property
    def states(self) -> ParameterOfState:
        """Name of an optimizer state to the name of its parameter, by names."""
        return self.catalog.match_states(self.listed)

    @property
    def listed(self) -> Collection[str]:
        """The names whose slices the strategy or the checkpoint itself lists."""
        return listed_names(self.catalog, self.strategy)

    def confirmed_by(self, indexes: Iterable[Mapping[str, TensorMeta]]) -> frozenset[str]:
        """Return the tensors whose full shapes more shows than the layouts of the strategy.

        It is the manifest, one of the ``indexes``, the strategy in JSON, the configuration of a
        recipe, or a parameter and a state: the strategy shards them differently, and both have one
        full shape.  If it shards both alike, both would be wrong in the same way.
        """
        shapes = {t.name: t.meta.shape for t in self.tensors}
        if self.is_recorded:
            return frozenset(shapes)
        layouts = self.strategy.layouts
        shown = {n for n in shapes if any(layout.full_shape for layout in layouts.get(n, ()))}
        shown |= frozenset() if self.rearranged is None else self.rearranged.confirmed
        for index in indexes:
            shown |= {name for name, meta in index.items() if shapes.get(name) == meta.shape}
        for pair in self.states.items():
            state, parameter = (layouts.get(name, ()) for name in pair)
            counts = {layout.slice_counts for layout in (*state[:1], *parameter[:1])}
            is_there = all(name in shapes for name in pair)
            if len(counts) == 2 and is_there and shapes[pair[0]] == shapes[pair[1]]:
                shown |= {*pair}
        return frozenset(shown)

    def find_unconfirmed(self, indexes: Iterable[Mapping[str, TensorMeta]]) -> Iterator[FullTensor]:
        """Yield the sharded tensors whose full shapes only the layouts show; see `confirmed_by`."""
        confirmed = self.confirmed_by(indexes)
        for tensor in self.tensors:
            if tensor.is_sharded_by_layout and tensor.name not in confirmed:
                yield tensor

    @property
    def listing(self) -> str:
        """The source of the layouts, for messages."""
        return "the strategy" if self.catalog.description is None else "the description"

    @property
    def damage(self) -> list[FormatError]:
        """The errors of damaged files that replicas do not replace."""
        replaced = self.presence.replaced if self.are_joined else {}
        return [error for rank, error in self.catalog.damaged.items() if not replaced.get(rank)]

    def with_remedy(self, error: FormatError, complete_step: str) -> FormatError:
        """Return the error of a damaged file with its hint: another step, or fewer tensors."""
        if complete_step:
            return error.with_hint(f"--step {complete_step}, which is complete by its headers")
        if not isinstance(error, CutShortError):
            return error
        if not all(isinstance(e, CutShortError) for e in self.damage):
            return error  # no choice of tensors helps
        whole, tensors = self.whole, self.options.tensors
        lost = whole.wanted.intersection(error.remains.lost)
        if tensors.shown_by not in ("", "--include"):
            return error  # the command takes no such choice
        no_weights = {name for name in whole.names if not whole.belonging(name).is_model}
        weights = sorted(lost - no_weights)
        words = [f"--exclude {quote(name)}" for name in weights]
        if len(weights) < len(lost):
            words.insert(0, "--weights-only")
        rest = whole.catalog.with_only(whole.wanted - no_weights)
        if not is_rest_known(rest, self.strategy, error):
            words = ["--include with the exact name of each tensor that is wanted"]
            error = error.with_hint("", "nothing shows which tensors followed")
        elif not lost and not tensors.are_all_wanted:
            words = ["the same command without --crc, which this file cannot pass"]
        if not words or len(weights) > MOST_EXCLUDED:
            return error
        return error.with_hint(f"{error.hint or COPY_AGAIN}, or {' '.join(words)}")


def _of_stages(broken: BrokenTensor, stages: Sequence[LayoutSlicing]) -> Tensor:
    if not stages:
        return broken
    first, *copies = stages
    meta = broken.meta.of_shape(first.shape)
    return FullTensor(meta, first, broken.known_by, tuple(copies), is_corrected=broken.is_corrected)


def _limit(tensor: Tensor, needed: Collection[tuple[int, ...]]) -> Tensor:
    """Return a tensor as the first stage holds it that has all slices that are needed of it.

    If no stage does, the gaps are those of the first stage that are needed.
    """
    if not isinstance(tensor, BrokenTensor):
        return tensor
    gaps = []
    for slicing in tensor.stages:
        missing = (each.owners for each in slicing.holdings() if not each.holders)
        gaps.append(tuple(owners for owners in missing if owners in needed))
        if not gaps[-1]:
            return _of_stages(tensor, [slicing])
    return replace(tensor, gaps=gaps[0]) if gaps else tensor
