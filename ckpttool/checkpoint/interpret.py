"""The step from the files of a checkpoint to one record for each tensor.

A tensor in the strategy has the layout that it lists.  Optimizer state that the strategy omits has
the layout of its parameter.  Any other tensor is full if all ranks hold the same bytes; if they
differ, the user has to choose.  A checkpoint that describes itself has boxes in place of layouts.
The files of a merged checkpoint hold full tensors, and so does every file that is read by itself.

All of this follows from headers, a strategy and the evidence of contents.  Nothing here reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.optimizer_state import (
    correct_layouts,
    followed_layouts,
    odd_state_shapes,
)
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout, ambiguity, fold_layout
from ckpttool.model.names import ParameterOfState, map_component_names, map_of_component, parse_name
from ckpttool.model.slicing import (
    BrokenTensor,
    Follows,
    FullTensor,
    KnownBy,
    LayoutSlicing,
    Listed,
    Own,
    RankGroups,
    Tensor,
    Unlisted,
    Whole,
    follow,
    unlike_state_shapes,
    why_not_sliced,
)
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import Diagnostic
from ckpttool.wording import format_ranks, shorten

_T = TypeVar("_T", bound=Hashable)
_LISTED = Listed()  # one object for all tensors

# How files are taken: joined, or each by itself: as one of full tensors, or as one of tensors that
# stay in a file of their own.
Files = Literal["joined", "full", "kept"]
ContentGroups = Mapping[str, RankGroups]  # name to the groups of ranks with equal contents


def interpret(
    catalog: Catalog, strategy: Strategy, contents: ContentGroups, known: Iterable[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Return a record for each tensor of the ranks, in the order of the files.

    ``contents`` groups ranks by equal contents, of the tensors that `decided_by_contents`.  Records
    that are ``known`` stay for all other tensors.
    """
    states = catalog.match_states(listed_names(catalog, strategy))
    ranks = _Ranks(catalog, strategy, states, contents, catalog.find_kinds())
    before = {tensor.name: tensor for tensor in known}
    return tuple(
        before[name]
        if name in before and contents.keys().isdisjoint(_components(name))
        else ranks.tensor(name, ranks_of)
        for name, ranks_of in catalog.holders.items()
    )


def _components(name: str) -> tuple[str, ...]:
    tag = map_of_component(name)
    return (name,) if tag is None else map_component_names(tag)


class EachFile(Struct, frozen=True):
    """A record for each tensor of each file, which holds it in full.

    Each pass makes them again: the files of a thousand ranks hold a million tensors.
    """

    catalog: Catalog

    def __iter__(self) -> Iterator[FullTensor]:
        for rank, file in self.catalog.files.items():
            for name in file.header:
                yield full_tensor(self.catalog, name, Whole(((rank,),)), rank)


def records_of_files(catalog: Catalog, files: Files) -> Iterable[FullTensor]:
    """Return a record for each tensor of files that are not joined.

    Where files keep their tensors there is one for each tensor of each distinct header.
    """
    if files != "kept" or catalog.is_merged:
        return EachFile(catalog)
    ranks_of: dict[tuple[TensorMeta, ...], list[int]] = {}
    for ranks, header in catalog.headers.items():
        metas = tuple(tensor.meta for tensor in header.values())
        ranks_of.setdefault(metas, []).extend(ranks)
    return tuple(
        full_tensor(catalog, meta.name, Own(tuple(sorted(ranks))), min(ranks))
        for metas, ranks in ranks_of.items()
        for meta in metas
    )


def full_tensor(
    catalog: Catalog,
    name: str,
    known_by: KnownBy,
    rank: int,
    only_for: tuple[int, int] | None = None,
) -> FullTensor:
    """Return the record of a tensor that the file of ``rank`` holds in full."""
    meta = catalog.files[rank].header[name].meta
    layout = Layout.unsharded(len(meta.shape), 1, rank)
    slicing = LayoutSlicing(layout, meta.shape, name, catalog.files_with(name))
    return FullTensor(meta, slicing, known_by, only_for=only_for)


def listed_names(catalog: Catalog, strategy: Strategy) -> Collection[str]:
    """Return the names whose slices the strategy or the checkpoint itself describes."""
    return strategy.layouts.keys() if catalog.description is None else catalog.description.tensors


def decided_by_contents(catalog: Catalog, tensors: Iterable[Tensor]) -> dict[str, str | None]:
    """Return the tensors without a layout whose headers are equal on several ranks.

    Each has the parameter whose state it is by name and shape, unless contents contradict it; or
    None.  States of MindSpore's optimizers are left out, since their names identify them.
    """
    decided: dict[str, str | None] = {}
    for tensor in tensors:
        parameter = tensor.known_by.parameter if isinstance(tensor.known_by, Follows) else None
        if parameter is None and not isinstance(tensor.known_by, Whole | Unlisted):
            continue
        if parameter is not None and parse_name(tensor.name).parameter is not None:
            continue
        if tensor.meta.text is None and len(catalog.holders[tensor.name]) > 1:
            headers = (header for header in catalog.headers.values() if tensor.name in header)
            if len({header[tensor.name].meta for header in headers}) == 1:
                decided[tensor.name] = parameter
    return decided


class _Stage(Struct, frozen=True):
    """The result of joining the slices of a stage: a full shape, or None, and missing slices."""

    layout: Layout
    shape: tuple[int, ...] | None = None
    gaps: tuple[tuple[int, ...], ...] = ()


class _Case(Struct, frozen=True):
    """The layouts of a tensor: the same for all tensors of its kind with an equal listing."""

    layouts: tuple[Layout, ...] = ()  # none of a tensor that is neither listed nor a state
    is_corrected: bool = False  # slices show others than the strategy lists
    stages: tuple[_Stage, ...] = ()
    problem: Diagnostic | None = None  # why slices make nothing


class _Ranks(Struct, frozen=True):
    """The files of ranks, and what says how they fit together; see `interpret`."""

    catalog: Catalog
    strategy: Strategy
    states: ParameterOfState
    contents: ContentGroups
    kinds: Mapping[str, Hashable]
    cases: dict[Hashable, _Case] = {}  # thousands of tensors have few

    def tensor(self, name: str, ranks: Sequence[int]) -> Tensor:
        """Return the record of a tensor that some ranks hold."""
        return (
            self._described(name, ranks) or self._laid_out(name, ranks) or self._full(name, ranks)
        )

    def _described(self, name: str, ranks: Sequence[int]) -> Tensor | None:
        """Return a tensor that the checkpoint describes, or a state of one."""
        description = self.catalog.description
        if description is None:
            return None
        if name in description.tensors:
            return description.tensors[name]
        tensors = {rank: self.catalog.files[rank].tensors[name] for rank in ranks}
        if name in description.broken:
            return BrokenTensor(tensors[ranks[0]].meta, _LISTED)
        parameter = self._described_parameter(name)
        state = None if parameter is None else follow(parameter, name, tensors)
        if state is None or self._is_contradicted(name, state.slicing.owners()):
            return None
        return state

    def _described_parameter(self, name: str) -> FullTensor | None:
        if self.catalog.description is None or parse_name(name).reduced_axis is not None:
            return None
        return self.catalog.description.tensors.get(self.states.get(name, ""))

    def _laid_out(self, name: str, with_it: Sequence[int]) -> Tensor | None:
        """Return a tensor that the strategy lists, or a state of one."""
        key = self._listing(name), self._listing(self.states.get(name, "")), parse_name(name).prefix
        case = self.cases.get(key)
        if case is None:
            case = self._find_case(name, with_it)
            if case.problem is None:  # which names the tensor
                self.cases[key] = case
        if name in self.strategy.layouts:
            return self._join(name, case, _LISTED)
        owners = (ranks for layout in case.layouts for ranks in layout.slice_owners())
        if not case.layouts or self._is_contradicted(name, owners):
            return None
        return self._join(name, case, Follows(self.states[name]))

    def _listing(self, name: str) -> Hashable:
        layouts = self.strategy.layouts.get(name, ())
        full_shapes = tuple(layout.full_shape for layout in layouts)  # no part of a layout's key
        is_handwritten = name in self.strategy.handwritten
        return self.kinds.get(name), layouts, full_shapes, is_handwritten

    def _find_case(self, name: str, ranks: Sequence[int]) -> _Case:
        """Return how a tensor is laid out."""
        catalog, strategy, states = self.catalog, self.strategy, self.states
        of_name = strategy.layouts.get(name, ())
        layouts = followed_layouts(catalog, strategy, name, ranks, states)
        if of_name:
            layouts = correct_layouts(catalog, strategy, name, states)
        case = _Case(layouts, is_corrected=bool(of_name) and layouts != of_name)
        metas = catalog.metas_of(name)
        if layouts and len({meta.dtype for meta in metas.values()}) > 1:
            dtypes = group_by_meta(metas, lambda meta: meta.dtype)
            problem = disagreement("dtype", catalog, name, "element type", dtypes)
            return replace(case, problem=problem)
        stages = []
        for layout in layouts:
            slices = {rank: meta for rank, meta in metas.items() if rank in layout.ranks}
            joined = infer_full_tensor(catalog, layout, slices) if slices else None
            if isinstance(joined, Diagnostic):
                return replace(case, problem=joined)
            stage = _Stage(layout)
            if joined is not None:
                folded, full = joined
                stage = _Stage(folded, full.shape, folded.gaps(tuple(slices)))
            stages.append(stage)
        return replace(case, stages=tuple(stages))

    def _join(self, name: str, case: _Case, known_by: KnownBy) -> Tensor:
        """Return the tensor that its slices make, of the lowest stage that holds all of it."""
        catalog, meta, is_corrected = self.catalog, self.catalog.metas[name], case.is_corrected
        broken = partial(BrokenTensor, meta, known_by, is_corrected=is_corrected)
        if case.problem is not None:
            return broken(problem=case.problem)
        complete: list[LayoutSlicing] = []
        gapped: list[LayoutSlicing] = []
        files = catalog.files_with(name)
        for stage in case.stages:
            if stage.shape is not None:
                slicing = LayoutSlicing(stage.layout, stage.shape, name, files)
                (gapped if stage.gaps else complete).append(slicing)
        if not complete:
            gaps = next((stage.gaps for stage in case.stages if stage.gaps), ())
            gaps = gaps or (tuple(case.layouts[0].ranks),)
            return broken(gaps=gaps, stages=tuple(gapped))
        slicing, *copies = complete
        if any(copy.shape != slicing.shape for copy in copies):
            return broken(problem=_stage_shapes_problem(name, complete))
        full = meta.of_shape(slicing.shape)
        return FullTensor(full, slicing, known_by, tuple(copies), tuple(gapped), is_corrected)

    def _is_contradicted(self, name: str, slice_owners: Iterable[Sequence[int]]) -> bool:
        """Return whether contents show that a tensor is not an optimizer state.

        ``slice_owners`` are the ranks that hold each slice of the state.  Owners of one slice hold
        equal contents.  If all owners of several slices do, the tensor is a parameter that every
        rank holds in full.  A prefix of MindSpore's optimizers needs no such proof.
        """
        if parse_name(name).parameter is not None:
            return False
        groups = self.contents.get(name, ())
        group_of_rank = {rank: number for number, group in enumerate(groups) for rank in group}
        groups_by_slice = [
            groups_held
            for ranks in slice_owners
            if (groups_held := {group_of_rank[r] for r in ranks if r in group_of_rank})
        ]
        if any(len(groups_held) > 1 for groups_held in groups_by_slice):
            return True
        return len(groups) == 1 and len(groups_by_slice) > 1

    def _full(self, name: str, ranks: Sequence[int]) -> FullTensor:
        groups = self._group_equal(name, ranks)
        known_by: KnownBy = Unlisted(groups, self._odd_shapes(name, ranks[0]))
        if not self.strategy.layouts and self.catalog.description is None:
            known_by = Whole(groups)
        return full_tensor(self.catalog, name, known_by, ranks[0])

    def _group_equal(self, name: str, ranks: Sequence[int]) -> RankGroups:
        """Group ranks by equal headers and known equal contents, of a whole map parameter."""
        names = _components(name)

        def content(rank: int) -> tuple[object, ...]:
            tensors = [self.catalog.files[rank].header.get(component) for component in names]
            groups = [self.contents.get(component, ()) for component in names]
            own_groups = [
                next((group for group in of_component if rank in group), None)
                for of_component in groups
            ]
            return (*(tensor and tensor.meta for tensor in tensors), *own_groups)

        return tuple(group_ranks(ranks, content).values())

    def _odd_shapes(self, name: str, rank: int) -> str:
        meta = self.catalog.files[rank].header[name].meta
        if self.catalog.description is None:
            return odd_state_shapes(self.catalog, self.strategy, meta, self.states) or ""
        parameter = self._described_parameter(name)
        if parameter is None or parse_name(name).parameter is None:
            return ""
        return unlike_state_shapes(parameter, meta) or ""


def find_rank_slices(catalog: Catalog) -> dict[str, str]:
    """Describe the common tensors of a merged checkpoint that may be slices of rank 0.

    MindSpore stores as common tensors what it did not merge: tensors that the strategy does not
    list, ``accu_grads.*`` and parameters that were not chosen.  Tensors that an index names are
    full, and so are tensors with one element or no axes.  A state is full if it has the shape of
    its parameter, and suspected otherwise, even with one element.
    """
    metas, states = catalog.metas, catalog.match_states()
    perhaps = {}
    for name, is_named in catalog.common_tensors.items():
        if name not in metas:  # its file is cut short, and not read
            continue
        meta, parameter = metas[name], metas[states.get(name, name)]
        if parameter.shape != meta.shape:
            parameter = metas.get(parse_name(name).same_shape_parameter or name, meta)
        if is_named or not meta.shape:
            continue
        if parameter.name not in catalog.common_tensors:
            if meta.shape != parameter.shape:
                perhaps[name] = f"{name} {meta.shape}, of {parameter.name} {parameter.shape}"
        elif math.prod(meta.shape) != 1:
            perhaps[name] = f"{name} {meta.shape}"
    return perhaps


# --------------------------------------------------------------------------- slices of one layout


def infer_full_tensor(
    catalog: Catalog, layout: Layout, metas: Mapping[int, TensorMeta]
) -> tuple[Layout, TensorMeta] | Diagnostic:
    """Infer the full tensor from the slices of a stage, and fold its layout if it is expanded.

    ``metas`` has the slices of the ranks that hold one, at least one, ascending.  It is a problem
    if the slices do not fit the layout.
    """
    ranks = list(metas)
    shapes = group_by_meta(metas, lambda meta: meta.shape)
    name = metas[ranks[0]].name
    if len(shapes) > 1 and layout.has_equal_slices:
        return disagreement("shape", catalog, name, "slice shape", shapes)
    slice_shape = metas[ranks[0]].shape
    ways = fold_layout(layout, len(slice_shape), lambda way: way.fills(slice_shape))
    if len(ways) > 1:
        message = "the JSON strategy fits several full shapes"
        hint = "add its protobuf form or a hand-written one (-s MORE.yaml)"
        facts = ambiguity(layout, ways)
        return Diagnostic("shape", message, hint=hint, facts=facts, tensor=name, ranks=tuple(ranks))
    layout = ways[0] if ways else layout
    # A slice of a manual split may have a wrong number of axes.  The full shape follows from
    # another slice, so that the message below names the wrong one.
    ndim = len(layout.tensor_map)
    meta = next((metas[rank] for rank in ranks if len(metas[rank].shape) == ndim), metas[ranks[0]])
    full_meta = meta
    if len(meta.shape) == ndim:
        full_meta = meta.of_shape(layout.implied_shape(meta.shape))
    reason = layout.why_not(full_meta.shape) or why_not_sliced(meta, layout)
    if reason is not None:
        facts = f"{format_ranks(ranks)} hold slices of {meta.shape}; {reason}"
        return _unfit_slices(name, facts, ranks)
    wrong = {
        rank: f"rank {rank} ({catalog.files[rank].path}) has {metas[rank].shape}, expected {shape}"
        for rank in (() if layout.has_equal_slices else ranks)
        if metas[rank].shape != (shape := layout.slice_shape(rank, full_meta.shape))
    }
    if wrong:
        facts = f"manual split of {list(layout.rows)} rows; {shorten(wrong.values(), 3)}"
        return _unfit_slices(name, facts, list(wrong))
    return layout, full_meta


def _unfit_slices(name: str, facts: str, ranks: Sequence[int]) -> Diagnostic:
    message = "the slices do not fit the strategy"
    hint = "the strategy of this run; `ckpttool help shape` explains"
    return Diagnostic("shape", message, hint=hint, facts=facts, tensor=name, ranks=tuple(ranks))


def disagreement(
    code: str, catalog: Catalog, name: str, what: str, groups: Mapping[_T, tuple[int, ...]]
) -> Diagnostic:
    """Return the problem of ranks that disagree on ``what`` a tensor is, the largest group last."""
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), -item[1][0]))
    parts = [
        f"{format_ranks(ranks)} ({catalog.files[ranks[0]].path}) {_has(ranks)} {value}"
        for value, ranks in ordered[:-1]
    ]
    value, most = ordered[-1]
    return Diagnostic(
        code,
        f"the {what} differs between ranks",
        hint=f"put back the files of one run and step; `ckpttool help {code}` explains",
        facts=f"{shorten(parts, 2)}; {format_ranks(most)} {_has(most)} {value}",
        tensor=name,
        ranks=tuple(sorted(rank for ranks in groups.values() for rank in ranks)),
    )


def _has(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def group_by_meta(
    metas: Mapping[int, TensorMeta], key: Callable[[TensorMeta], _T]
) -> dict[_T, tuple[int, ...]]:
    """Group ranks by the ``key`` of their tensors, as `group_ranks` does.

    Ranks with equal headers share one object.  The key is computed for the few different objects,
    not for each of many ranks.
    """
    distinct = dict(zip(map(id, metas.values()), metas.values(), strict=True))
    keys = {identity: key(meta) for identity, meta in distinct.items()}
    if len(set(keys.values())) == 1:
        return {next(iter(keys.values())): tuple(metas)}
    return group_ranks(tuple(metas), lambda rank: keys[id(metas[rank])])


def group_ranks(ranks: Sequence[int], key: Callable[[int], _T]) -> dict[_T, tuple[int, ...]]:
    """Group ranks by ``key``, in the order of the first rank of each group."""
    groups: dict[_T, list[int]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return {value: tuple(members) for value, members in groups.items()}


def _stage_shapes_problem(name: str, complete: Iterable[LayoutSlicing]) -> Diagnostic:
    """Return the problem of a tensor whose full shapes in several stages differ."""
    ranks_of_shape: dict[tuple[int, ...], list[int]] = {}
    for slicing in complete:
        ranks_of_shape.setdefault(slicing.shape, []).extend(slicing.layout.ranks)
    parts = [f"{shape} in {format_ranks(ranks)}" for shape, ranks in ranks_of_shape.items()]
    return Diagnostic(
        "shape",
        "the full shape differs between stages",
        hint="the strategy of this run; `ckpttool help shape` explains",
        facts="; ".join(parts),
        tensor=name,
        ranks=tuple(sorted(rank for ranks in ranks_of_shape.values() for rank in ranks)),
    )
