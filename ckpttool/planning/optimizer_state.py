"""Optimizer state: whose layout it has, where the strategy omits it or is wrong.

A state is called ``<prefix>.<parameter>`` and has the full shape of its parameter.  Names and
shapes show it, whatever the prefix is: an unlisted name is a state if its slices have the shape of
the parameter's slices on every rank.  Slices never lie: where they have that shape they are sharded
like the parameter's, whatever the strategy says.

Accumulated gradients (``accu_grads.*``) differ.  MindSpore copies the entry of the parameter with
its optimizer shard, and shards the gradients by it only under ``gradient_accumulation_shard``.
Where the source's strategy claims a shard that its slices do not have, the same setting holds for
the target; else the target's strategy is believed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ckpttool.model.catalog import Catalog
from ckpttool.model.diagnostics import Diagnostic
from ckpttool.model.layout import Layout, fold_layout
from ckpttool.model.optimizer_names import (
    GRADIENTS,
    STATISTICS,
    parameter_of,
    reduced_from,
    without_axis,
)
from ckpttool.model.slicing import Source
from ckpttool.model.strategy import Sharding, Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.model.wording import count, shorten

Owners = Mapping[str, str]  # the parameter of each state


def find_owners(listed: Collection[str], metas: Mapping[str, TensorMeta]) -> dict[str, str]:
    """Return the parameter of every optimizer state, as far as names tell.

    A name is that of a state if a prefix of one word stands before the name of another parameter,
    and the prefix is that of an optimizer.  It is that of a module if anything else has it: next to
    ``decoder.norm`` the name ``decoder.embedding`` is not that of a state of ``embedding``, unless
    there is a ``decoder.decoder.norm``.  An optimizer may keep single values besides.  The prefixes
    of MindSpore's optimizers are modules only if the strategy says so, since the parameters of
    their states may be gone.

    Parameters
    ----------
    listed
        Names that the strategy lists.
    metas
        What the checkpoint holds, by name.

    Examples
    --------
    >>> w = TensorMeta("w", "Float32", (4, 3))
    >>> find_owners(["w", "b"], {"w": w, "b": w, "mine.w": w, "mine.b": w})
    {'mine.w': 'w', 'mine.b': 'b'}
    """
    names = dict.fromkeys((*listed, *metas))
    found: dict[str, str] = {}
    modules: set[str] = set()  # and those that are so for certain:
    listed_modules: set[str] = set()
    for name in names:
        prefix, _, base = name.partition(".")
        known = owner_of(name)
        if known in names:
            found[name] = known
        elif base in names and base and prefix.isidentifier():
            found[name] = base
        elif f"{prefix}.{name}" in names:
            continue  # a parameter of a module that is called like the prefix of its state
        elif name in listed:
            listed_modules.add(prefix)
        elif math.prod(metas[name].shape) != 1:
            modules.add(prefix)
    modules |= listed_modules
    owners = {}
    for name, base in found.items():
        prefix = name.removesuffix(base).removesuffix(".")
        if prefix not in (modules if owner_of(name) is None else listed_modules):
            owners[name] = base
    for name, base in owners.items():
        while base not in listed and base in owners:  # state of a state that is not listed
            base = owners[base]
        owners[name] = base
    return owners


def owners_of_full(listed: Collection[str], metas: Mapping[str, TensorMeta]) -> dict[str, str]:
    """Return the parameter of every state, by names as `find_owners` and by full shapes.

    A state of none of MindSpore's optimizers has the shape of its parameter, if both are known.
    """
    return {
        name: base
        for name, base in find_owners(listed, metas).items()
        if owner_of(name) is not None
        or name not in metas
        or base not in metas
        or metas[name].shape == metas[base].shape
    }


def follows_in_full(name: str, owners: Owners, metas: Mapping[str, TensorMeta]) -> bool:
    """Whether a state has the full shape that its parameter tells."""
    base = owners.get(name, "")
    return base in metas and metas[name].shape == _reduced(name, metas[base].shape)


def state_layouts(sharding: Sharding, name: str, owners: Owners) -> tuple[Layout, ...]:
    """The layouts that ``name`` has if it is state of a listed parameter; none if it is not.

    They are the parameter's, with an axis less for statistics of rows and columns.
    """
    base, reduced = owners.get(name), reduced_from(name)
    layouts = () if base is None else sharding.layouts.get(base, ())
    if reduced is None:
        return layouts
    found = [without_axis(layout, reduced[1]) for layout in layouts]
    return () if None in found else tuple(layout for layout in found if layout is not None)


def followed_parameter(
    catalog: Catalog, sharding: Sharding, name: str, ranks: Sequence[int], owners: Owners
) -> str | None:
    """The parameter whose layouts an unlisted ``name`` has, since it is state of it.

    That is so if every slice, on each of ``ranks``, has the shape of the parameter's slices in the
    same stage.  Which rank holds the parameter does not matter: without redundancy it may be
    another.
    """
    base = owners.get(name)
    if base is None or name in sharding.layouts or not state_layouts(sharding, name, owners):
        return None
    shapes: dict[int, tuple[int, ...]] = {}
    for layout in sharding.layouts[base]:
        for rank, shape in _slice_shapes(catalog, base, layout).items():
            shapes[rank] = _reduced(name, shape)
    if all(shapes.get(rank) == catalog.files[rank].header[name].meta.shape for rank in ranks):
        return base
    return None


def borrow_rows(layouts: tuple[Layout, ...], twins: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """The layouts of a state, with the manual split of its parameter's layouts ``twins``.

    MindSpore writes the split with the parameter's entry alone.
    """
    if not any(twin.rows for twin in twins):
        return layouts
    rows = {(twin.ranks, twin.device_matrix, twin.tensor_map): twin.rows for twin in twins}
    return tuple(
        layout
        if not layout.is_even
        else replace(
            layout, rows=rows.get((layout.ranks, layout.device_matrix, layout.tensor_map), ())
        )
        for layout in layouts
    )


def target_layouts(sharding: Sharding, name: str, owners: Owners) -> tuple[Layout, ...]:
    """The layouts that a listed parameter has in a target.

    Those of states are corrected by their parameters, see `true_layouts`.
    """
    own, of_state = sharding.layouts[name], state_layouts(sharding, name, owners)
    is_statistic = name.startswith(STATISTICS) and name not in sharding.handwritten
    base = owners.get(name, name)
    is_cut = any(layout.optimizer_shard > 1 for layout in sharding.layouts.get(base, ()))
    if of_state and is_statistic and is_cut:
        return of_state  # whose shard their own entries lack
    return borrow_rows(own, of_state)


def true_layouts(
    catalog: Catalog, sharding: Sharding, name: str, owners: Owners
) -> tuple[Layout, ...]:
    """The layouts of a listed parameter, corrected by what its slices and its parameter tell.

    If the strategy gives the full shape and the slices are too small for it by a number of
    replicas, they are cut by an optimizer shard that the strategy hides.

    A state has its parameter's full shape, so its slices tell how it is cut.  MindSpore's entries
    of states are wrong in three ways: those of a manually split embedding lack the split; those of
    ``accu_grads`` have the parameter's optimizer shard, which cuts these only under
    ``gradient_accumulation_shard``; those of AdaFactor's statistics do not have it, and are cut.
    Of a state that is none of MindSpore's only the split is corrected.

    What a person wrote is not corrected, and no tensor map is: see `find_unlike_states`.
    """
    layouts = sharding.layouts[name]
    if name in sharding.handwritten:
        return layouts
    shaped = tuple(_shard_by_full_shape(catalog, name, layout) for layout in layouts)
    twins = state_layouts(sharding, name, owners)
    if shaped != layouts or not twins:
        return shaped
    split = borrow_rows(layouts, twins)
    if any(layout.rows for layout in (*split, *twins)):
        for tried in (split, _without_shard(split), twins):
            if any(layout.rows for layout in tried) and _have_rows(catalog, name, tried):
                return tried
    if owner_of(name) is None:
        return shaped
    shapes = _shapes(catalog, sharding, name, owners[name])
    truth = next((full for _, full in shapes if full is not None), None)
    own = {one.ranks: one for one in layouts}
    by_stage = {
        twin.ranks: twin
        for twin in twins
        if not twin.rows
        and twin.ranks in own
        and (reduced_from(name) is not None or _shard_alike(twin, own[twin.ranks]))
    }
    return tuple(
        next(
            (
                tried
                for tried in (one, bare, by_stage.get(one.ranks, one))
                if truth is not None and _full_shape(catalog, name, tried) == truth
            ),
            one,
        )
        for one, bare in zip(layouts, _without_shard(layouts), strict=True)
    )


def _shard_by_full_shape(catalog: Catalog, name: str, layout: Layout) -> Layout:
    """The layout with the optimizer shard that makes its slices fill the full shape, if one does.

    The strategy says 0 and the slices are cut with ``optimizer_weight_shard_aggregated_save``.
    """
    full, implied = layout.full_shape, _full_shape(catalog, name, layout)
    piece = _slice_shape(catalog, name, layout)
    if full and piece and len(piece) < len(full):
        return _shard_of_expanded(layout, piece)
    if not full or not implied or not implied[0] or layout.rows or layout.optimizer_shard > 1:
        return layout
    shard, rest = divmod(full[0], implied[0])
    if rest or shard < 2 or full[1:] != implied[1:] or layout.replicas % shard:
        return layout
    return replace(layout, optimizer_shard=shard)


def _shard_of_expanded(layout: Layout, piece: tuple[int, ...]) -> Layout:
    """The same of an expanded layout, to be folded later; as it is unless just one shard fits."""
    if layout.optimizer_shard > 1 or not layout.is_even:
        return layout
    cuts = [
        replace(layout, optimizer_shard=shard)
        for shard in range(1, layout.replicas + 1)
        if layout.replicas % shard == 0
    ]
    fitting = [cut for cut in cuts if fold_layout(cut, len(piece), lambda way: way.fills(piece))]
    return fitting[0] if len(fitting) == 1 else layout


def odd_shape(catalog: Catalog, sharding: Sharding, meta: TensorMeta, owners: Owners) -> str | None:
    """Why an unlisted state is not taken as it is: it is no slice of its parameter, nor whole.

    Only a prefix of MindSpore's shows that it is state all the same.
    """
    if math.prod(meta.shape) == 1 or owner_of(meta.name) is None:
        return None
    if not state_layouts(sharding, meta.name, owners):
        return None
    for piece, full in _shapes(catalog, sharding, meta.name, owners[meta.name]):
        if full is not None and len(full) == len(meta.shape) and full != meta.shape:
            return (
                f"{meta.name}: not in the strategy, and its shape {meta.shape} is neither that of "
                f"a slice of {owners[meta.name]} {piece} nor of all of it {full}; take it as "
                "it is with --unlisted first, or leave it out with --unlisted drop"
            )
    return None


def find_unlike_states(catalog: Catalog, strategy: Strategy) -> Iterator[Diagnostic]:
    """Yield the differences between the layouts of a parameter and of its optimizer state.

    One of the two is wrong, since a state has the full shape of its parameter.  A manual split
    stands with the parameter alone, and the entries of gradients and of AdaFactor's statistics are
    known to have other optimizer shards (`true_layouts`).  It is an error where the slices have one
    shape, so that the two full shapes differ, and a warning elsewhere: which rank holds which slice
    is then the question, and headers do not answer it.  It is a warning, too, if the state is of
    none of MindSpore's optimizers, since names may deceive.
    """
    impossible, unlike = [], []
    metas = catalog.metas
    listed = dict.fromkeys(name for name in strategy.layouts if name in metas)
    for name, base in owners_of_full(listed, metas).items():
        if name not in listed or base not in listed or reduced_from(name) is not None:
            continue
        by_stage = {layout.ranks: layout for layout in strategy.layouts[base]}
        for state in strategy.layouts[name]:
            own = by_stage.get(state.ranks, state)
            full = None if own == state else _unlike_shapes(catalog, base, own, name, state)
            if full is None:
                continue
            if full[0] != full[1] and owner_of(name) is not None:
                impossible.append(f"{base} {full[0]} and {name} {full[1]}")
            else:
                unlike.append(f"{base} and {name}")
            break
    text = "the strategy shards a parameter and its optimizer state differently"
    if impossible:
        yield Diagnostic(
            "contradicted",
            f"{text}, so that their full shapes differ: {shorten(impossible, 3)}; is it the "
            "strategy of this run?",
            "--trust-strategy skips this check",
            ("--trust-strategy",),
        )
    if unlike:
        pairs = shorten(unlike, 3)
        yield Diagnostic("unlike_states", f"{text}: {pairs}; is it the strategy of this run?")


def _unlike_shapes(
    catalog: Catalog, base: str, own: Layout, name: str, state: Layout
) -> tuple[tuple[int, ...], ...] | None:
    """The full shapes that a parameter's layout and its state's make; None if these are alike.

    They are the same if the slices do not have one shape, since nothing follows from them then.
    """
    piece, other = _slice_shape(catalog, base, own), _slice_shape(catalog, name, state)
    stored, stored_state = _as_stored(own, piece), _as_stored(state, other)
    if piece is None or stored is None or stored_state is None or not own.has_boxes:
        return None  # where they are joined it is told what is wrong
    are_alike = _shard_alike(stored, stored_state)
    is_known = name.startswith((GRADIENTS, *STATISTICS))
    if are_alike and (piece != other or own.optimizer_shard == state.optimizer_shard or is_known):
        return None
    if piece != other:
        return piece, piece
    shards = (own.optimizer_shard, state.optimizer_shard) if are_alike else (1, 1)
    return tuple(
        replace(layout, optimizer_shard=shard, rows=()).implied_shape(piece)
        for layout, shard in zip((stored, stored_state), shards, strict=True)
    )


@lru_cache(maxsize=4096)  # a thousand parameters have few layouts
def _shard_alike(a: Layout, b: Layout) -> bool:
    """Whether two layouts of a stage are equal but for optimizer shard and manual split."""
    bare = (replace(layout, optimizer_shard=1, rows=()) for layout in (a, b))
    return next(bare).cuts_like(next(bare))


def _as_stored(layout: Layout, piece: tuple[int, ...] | None) -> Layout | None:
    """The layout for slices of this shape, folded if it was expanded; None if it is for others."""
    if piece is None:
        return None
    if len(piece) < len(layout.tensor_map):
        ways = fold_layout(layout, len(piece), lambda way: way.fills(piece))
        return ways[0] if len(ways) == 1 else None
    return layout if len(piece) == len(layout.tensor_map) else None


def odd_full_shape(meta: TensorMeta, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """What is odd about the full shape of a state, given those of all parameters, if anything.

    Only a prefix of MindSpore's shows that it is state all the same.
    """
    base = owner_of(meta.name)
    if base is None or base not in shapes or math.prod(meta.shape) == 1:
        return None
    expected = _reduced(meta.name, shapes[base])
    return None if meta.shape == expected else f"{meta.name} {meta.shape}, expected {expected}"


def owner_of(name: str) -> str | None:
    """The parameter that ``name`` would be state of, by the prefixes of MindSpore's optimizers.

    It may be of the parameter's shape or a statistic.  Other states see `find_owners`.
    """
    reduced = reduced_from(name)
    return parameter_of(name) if reduced is None else reduced[0]


def _reduced(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that ``name`` has as state of a parameter of ``shape``."""
    reduced = reduced_from(name)
    if reduced is None or len(shape) < 2:
        return shape
    lost = range(len(shape))[reduced[1]]
    return tuple(size for axis, size in enumerate(shape) if axis != lost)


def _shapes(
    catalog: Catalog, sharding: Sharding, name: str, base: str
) -> Iterator[tuple[tuple[int, ...] | None, tuple[int, ...] | None]]:
    """Slice shape and full shape that a state must have, as its parameter tells, for each stage."""
    for layout in sharding.layouts[base]:
        piece, full = _slice_shape(catalog, base, layout), _full_shape(catalog, base, layout)
        if piece is None or full is None:
            yield None, None
        else:
            yield _reduced(name, piece), _reduced(name, full)


def _without_shard(layouts: tuple[Layout, ...]) -> tuple[Layout, ...]:
    return tuple(replace(layout, optimizer_shard=1) for layout in layouts)


def _have_rows(catalog: Catalog, name: str, layouts: tuple[Layout, ...]) -> bool:
    """Whether all slices of ``name`` have the shapes of a manual split."""
    for layout in layouts:
        expected = _slice_shapes(catalog, name, layout)
        for rank, file in catalog.files.items():
            if rank in layout.ranks and name in file.header:
                shape = file.header[name].meta.shape
                if shape != expected.get(rank):
                    return False
    return True


def _slice_shapes(catalog: Catalog, name: str, layout: Layout) -> dict[int, tuple[int, ...]]:
    """The shape of each rank's slice in the stage of ``layout``, as the lowest rank's implies."""
    shape = _slice_shape(catalog, name, layout)
    if shape is None:
        return {}
    if layout.has_equal_slices:
        return dict.fromkeys(layout.ranks, shape)
    full = _full_shape(catalog, name, layout)
    if full is None or layout.why_not(full) is not None:
        return {}
    return {rank: layout.slice_shape(rank, full) for rank in layout.ranks}


def _slice_shape(catalog: Catalog, name: str, layout: Layout) -> tuple[int, ...] | None:
    """The shape of the lowest rank's slice in the stage of ``layout``; None if no rank has one."""
    for rank in layout.ranks:
        file = catalog.files.get(rank)
        if file is not None and name in file.header:
            return file.header[name].meta.shape
    return None


def _full_shape(catalog: Catalog, name: str, layout: Layout) -> tuple[int, ...] | None:
    shape = _slice_shape(catalog, name, layout)
    if shape is None or len(shape) != len(layout.tensor_map):
        return None
    return layout.implied_shape(shape)


@dataclass(slots=True)
class Gradients:
    """What was decided: names of those that a shard is claimed for, left uncut or believed."""

    left: list[str] = field(default_factory=list)
    believed: list[str] = field(default_factory=list)

    def drop_unproven_shard(
        self, source: Source, sharding: Sharding, layouts: tuple[Layout, ...]
    ) -> tuple[Layout, ...]:
        """The target's layouts of a source, without a shard that its slices do not have.

        Parameters
        ----------
        source
            As it was found.
        sharding
            How the source is sharded.
        layouts
            What the target's says.
        """
        name = source.meta.name
        is_claimed = any(layout.optimizer_shard > 1 for layout in layouts)
        if not name.startswith(GRADIENTS) or not is_claimed:
            return layouts
        claimed = sharding.layouts.get(name, ())
        if not any(layout.optimizer_shard > 1 for layout in claimed):
            self.believed.append(name)
            return layouts
        if source.layout.optimizer_shard > 1:
            return layouts
        self.left.append(name)
        return tuple(replace(layout, optimizer_shard=1) for layout in layouts)

    def notes(self) -> Iterator[Diagnostic]:
        """What is to be said of the decisions."""
        if self.left:
            text = "not cut by the optimizer shard that the target strategy claims, as those of "
            text += "the source are not by theirs"
            yield Diagnostic("corrected", f"{text}: {_named(self.left)}")
        if self.believed:
            text = "cut by an optimizer shard, as the target strategy claims, though MindSpore "
            text += "does so only under gradient_accumulation_shard"
            yield Diagnostic("doubt", f"{text}: {_named(self.believed)}")


def _named(names: list[str]) -> str:
    return f"{count(len(names), 'gradient')}: {shorten(names)}"
