"""Draft a hand-written strategy, as far as the contents of a checkpoint show it.

Contents show which ranks hold the same; they do not show which tensor axes are sharded, nor that a
tensor is sharded at all.  So a line is written for a parameter that all ranks hold in full.  Every
other is an open question: a line without a value, which the reader of the file refuses, with the
possible values as comments below it.  Optimizer state that is distributed like its parameter needs
no line.  Samples of all tensors are read.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from itertools import permutations, product
from shlex import quote

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.contents import sample_ranks
from ckpttool.checkpoint.evidence import Evidence, answer
from ckpttool.checkpoint.presence import count_stages
from ckpttool.concurrency import InlineExecutor
from ckpttool.model.catalog import Catalog
from ckpttool.model.layout import Layout, divisors
from ckpttool.model.names import match_states
from ckpttool.model.slicing import RankGroups
from ckpttool.model.strategy import Rule, Strategy, escape_pattern
from ckpttool.operations.answer import Count, Document, Some
from ckpttool.planning.preflight import document_problem
from ckpttool.problems import Diagnostic, PlanError
from ckpttool.storage.files import write_document
from ckpttool.strategy_files.folders import KEY, YAML_SUFFIXES
from ckpttool.strategy_files.handwritten import VERSION, format_cut, quote_key
from ckpttool.wording import count, format_difference, format_shape, shorten

_OPEN = "# {} no value yet: take one from the comments below it, or write another."
_ORDER = "# In these the slices are in the order of their ranks, which contents do not show."


class StrategyDraft(Document, frozen=True):
    """The JSON document of strategy draft.

    Attributes
    ----------
    path
        The file that was written.
    ranks
        Number of ranks of all stages.
    stages
        Number of pipeline stages.
    replicated
        Number of parameters that all ranks hold in full.
    following
        Number of tensors of optimizer state that need no line.
    questions
        The lines that a person has to complete: the names or patterns of names.
    """

    path: str
    ranks: Some
    stages: Some
    replicated: Count
    following: Count
    questions: tuple[str, ...]


class _Held(Struct, frozen=True):
    """How the ranks of a stage hold a tensor; they are counted from the first rank of the stage."""

    groups: RankGroups  # ranks that hold the same
    shapes: tuple[tuple[int, ...], ...]  # of the slice of each group
    is_constant: bool  # one value everywhere, so that slices look like full tensors

    @property
    def is_in_full(self) -> bool:
        """Whether all ranks hold the same, which is the full tensor."""
        return len(self.groups) == 1 and not self.is_constant

    @property
    def facts(self) -> str:
        """The holdings of the ranks, for people."""
        return format_difference(self.groups) if len(self.groups) > 1 else "one value everywhere"

    def is_like(self, parameter: _Held | None) -> bool:
        """Return whether it may be a state that is distributed like its parameter."""
        if parameter is None or parameter.shapes[0] != self.shapes[0]:
            return False
        return self.is_constant or parameter.groups == self.groups


def draft_strategy(
    catalog: Catalog,
    path: str | os.PathLike[str],
    beside: Strategy | None = None,
    executor: Executor | None = None,
    *,
    overwrite: bool = False,
) -> StrategyDraft:
    """Write what contents show of the parameters that ``beside`` does not list.

    Raises
    ------
    CkptToolError
        The checkpoint needs no strategy, its contents cannot be read, or the output exists.
    OSError
        The output cannot be written.
    """
    path = os.fspath(path)
    if not catalog.needs_strategy:
        facts, hint = catalog.one_of_several, f"ckpttool inspect {quote(catalog.root)}"
        message = "the checkpoint needs no strategy"
        refusal = Diagnostic("options", message, hint=hint, facts=facts, where=catalog.root)
        raise PlanError([refusal])
    problem = document_problem(path, "-o", (), overwrite)
    if not path.endswith(YAML_SUFFIXES):
        problem = Diagnostic("destination", "a draft is YAML", hint="-o draft.yaml", where=path)
    if problem is not None:
        raise PlanError([problem])
    stage_ranks = (max((*catalog.files, *catalog.damaged)) + 1) // (n := count_stages(catalog))
    sizes = [f"ranks: {n * stage_ranks}", *([f"stages: {n}"] if n > 1 else [])]
    listed: Collection[str] = ()
    if beside is not None:
        n, stage_ranks, sizes, listed = beside.stages, beside.stage_ranks, [], beside.layouts
    rules = None if beside is None else beside.rules
    if rules is not None:
        listed = {*listed, *filter(rules.find, catalog.metas)}
    names = [name for name in catalog.metas if name not in listed]
    held = _find_held(catalog, names, stage_ranks, executor or InlineExecutor())
    following = {
        name
        for name, parameter in match_states(listed, catalog.metas).items()
        if name in held and (parameter in listed or held[name].is_like(held.get(parameter)))
    }
    if held.keys() <= following:
        message, hint = "nothing to draft: every parameter has a layout", "-s with it as it is"
        where = catalog.root if beside is None else beside.origin
        raise PlanError([Diagnostic("options", message, hint=hint, where=where)])
    lines, questions, replicated = [*sizes, "parameters:"], [], 0
    for pattern, of_names in _fold_alike(held, following):
        first = held[of_names[0]]
        if first.is_in_full:
            replicated += len(of_names)
            lines.append(f"  {quote_key(pattern)}: replicated")
            continue
        questions.append(pattern)
        shapes = shorten(map(format_shape, dict.fromkeys(first.shapes)), 3)
        lines.append(f"  {quote_key(pattern)}:  # {first.facts}; slices of {shapes}")
        lines += [f"    # {value}" for value in _values(first, stage_ranks)]
    top = [] if rules is None else [f"# These lines belong below the parameters of {rules.path}."]
    top += [_OPEN.format(count(len(questions), "line", "have")), _ORDER] if questions else []
    write_document(path, "\n".join((*top, f"{KEY}: {VERSION}", *lines, "")).encode())
    return StrategyDraft(path, n * stage_ranks, n, replicated, len(following), tuple(questions))


def _find_held(
    catalog: Catalog, names: Collection[str], stage_ranks: int, executor: Executor
) -> dict[str, _Held]:
    """Return how tensors are held, in the lowest stage that has them; none for single values."""
    held: dict[str, _Held] = {}
    sampled = answer(sample_ranks(catalog, names), executor, Evidence())
    for name, groups, is_constant in sampled:
        metas, stage = catalog.metas_of(name), min(map(min, groups)) // stage_ranks
        of_stage = [
            tuple(rank % stage_ranks for rank in group if rank // stage_ranks == stage)
            for group in groups
        ]
        in_stage = tuple(filter(None, of_stage))
        shapes = tuple(metas[group[0] + stage * stage_ranks].shape for group in in_stage)
        if not (len(in_stage) == 1 and catalog.metas[name].is_single):
            held[name] = _Held(in_stage, shapes, is_constant)
    return held


def _fold_alike(
    held: Mapping[str, _Held], without: Collection[str]
) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield patterns, each with names that are held alike; the first pattern of a name is its own.

    Names are alike up to their numbers.  A pattern with fewer dots cannot match what one with more
    dots is for, if it comes after it.
    """
    alike: dict[str, dict[_Held, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in held.keys() - without:
        pattern = re.sub(r"(?<![^.])\d+(?=\.)", "*", escape_pattern(name))
        alike[pattern][held[name]].append(name)
    folded: list[tuple[str, Sequence[str]]] = []
    for pattern, kinds in alike.items():
        for names in kinds.values():
            each = [(escape_pattern(name), [name]) for name in names]
            folded += [(pattern, names)] if len(kinds) == 1 else each
    yield from sorted(folded, key=lambda line: (-line[0].count("."), line[0].count("*"), line))


def _values(held: _Held, ranks: int) -> Iterator[str]:
    """Yield the values that fit what ranks hold, with the full shape that each would give."""
    shape = held.shapes[0]
    for layout in _fitting_layouts(ranks, len(shape), held.groups):
        cut = [axis for axis, axes in enumerate(layout.tensor_map) if axes]
        if len({*held.shapes}) > 1:  # of a manual split of axis 0, or of no slices
            if cut != [0] or len({shape[1:] for shape in held.shapes}) > 1:
                continue
            layout = replace(layout, rows=tuple(shape[0] for shape in held.shapes))
        full_shape = format_shape(layout.implied_shape(shape))
        outermost = (len(layout.device_matrix) - 1,)
        if not cut or (len(cut) == 1 and layout.tensor_map[cut[0]] == outermost):
            layout = replace(layout, tensor_map=layout.tensor_map[: sum(cut) + len(cut)])
            rule = Rule("", layout, True, (0,), "")
        else:
            rule = Rule("", layout, False, (0,), "")
        yield f"{format_cut(rule, 1)}  # full shape {full_shape}"


def _fitting_layouts(ranks: int, ndim: int, groups: RankGroups) -> Iterator[Layout]:
    """Yield the layouts that give equal slices to the ranks of each group, and to no others.

    At most two tensor axes are sharded.  The ranks that have a file are in ``groups``.

    Examples
    --------
    >>> fitting = _fitting_layouts(4, 2, ((0, 2), (1, 3)))
    >>> [(layout.device_matrix, layout.tensor_map) for layout in fitting]
    [((2, 2), ((0,), ())), ((2, 2), ((), (0,)))]
    """
    present = {rank for group in groups for rank in group}
    known: list[Layout] = []
    for candidate in _candidates(ranks, ndim, len(groups)):
        owners = (present.intersection(ranks) for ranks in candidate.slice_owners())
        if sorted(tuple(sorted(ranks)) for ranks in owners) == sorted(groups):
            if not any(map(candidate.has_same_slices, known)):
                yield candidate
            known.append(candidate)


def _candidates(ranks: int, ndim: int, slices: int) -> Iterator[Layout]:
    """Yield the layouts with one or two sharded axes; for one slice, with none."""
    if slices == 1:
        yield Layout((ranks,), ((),) * ndim)
    if slices == 1 or ranks % slices:
        return
    replicas = ranks // slices
    for outer, axis in product(divisors(replicas), range(ndim)):
        yield _shard(ndim, (outer, slices, replicas // outer), {axis: 1})
    for first, outer in product(divisors(slices)[1:-1], divisors(replicas)):
        for between in divisors(replicas // outer):
            sizes = (outer, first, between, slices // first, replicas // outer // between)
            for axis, other in permutations(range(ndim), 2):
                yield _shard(ndim, sizes, {axis: 1, other: 3})


def _shard(ndim: int, sizes: Sequence[int], cut: dict[int, int]) -> Layout:
    positions = [at for at, size in enumerate(sizes) if size > 1]
    device_axis = {at: len(positions) - 1 - i for i, at in enumerate(positions)}  # from the right
    axes = tuple((device_axis[cut[axis]],) if axis in cut else () for axis in range(ndim))
    return Layout(tuple(sizes[at] for at in positions), axes)
