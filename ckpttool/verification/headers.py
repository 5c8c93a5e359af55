"""Find problems in headers, also those that do not prevent a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ckpttool.model.catalog import Catalog
from ckpttool.model.diagnostics import Diagnostic, diagnose
from ckpttool.model.strategy import Replicated, Sharding
from ckpttool.model.tensors import TensorMeta
from ckpttool.model.wording import format_ranks
from ckpttool.planning.optimizer_state import ParameterOfState, state_shape_message
from ckpttool.planning.sources import disagreement_message, group_ranks
from ckpttool.planning.unlisted import STATE_HINT, find_partly_held


def find_damage(catalog: Catalog, found: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Yield files that cannot be read, unless ``found`` lists them as damaged replicas."""
    replaced = {rank for one in found if one.code == "damaged_replica" for rank in one.ranks}
    for error in catalog.damaged.values():
        if error.rank not in replaced:
            yield from diagnose(error)


def check_types(catalog: Catalog, metas: Mapping[int, TensorMeta]) -> Iterator[Diagnostic]:
    """Yield a problem if ranks disagree on the element type or the number of axes of a name."""
    ranks = tuple(metas)
    name = metas[ranks[0]].name
    dtypes = group_ranks(ranks, lambda rank: metas[rank].dtype)
    axes = group_ranks(ranks, lambda rank: len(metas[rank].shape))
    if len(dtypes) > 1:
        text = disagreement_message(catalog, name, "element type", dtypes)
        yield Diagnostic("dtype", text, tensor=name, ranks=ranks)
    elif len(axes) > 1:
        text = disagreement_message(catalog, name, "number of axes", axes)
        yield Diagnostic("shape", text, tensor=name, ranks=ranks)


def check_unlisted(
    catalog: Catalog, sharding: Sharding, metas: Mapping[int, TensorMeta], owners: ParameterOfState
) -> Iterator[Diagnostic]:
    """Yield a problem of a parameter that the strategy does not list, if it has one."""
    ranks = tuple(metas)
    meta = metas[ranks[0]]
    found = [*check_types(catalog, metas)]
    shapes = group_ranks(ranks, lambda rank: metas[rank].text or metas[rank].shape)
    if not found and len(shapes) > 1:
        text = disagreement_message(catalog, meta.name, "text" if meta.text else "shape", shapes)
        if not isinstance(sharding, Replicated):
            text += "; nothing says how it is cut"
            found = [Diagnostic("unlisted", text, tensor=meta.name, ranks=ranks)]
        else:
            found = [Diagnostic("shape", text, tensor=meta.name, ranks=ranks)]
    mismatch = state_shape_message(catalog, sharding, meta, owners)
    if not found and mismatch is not None:
        hinted = Diagnostic("unlisted", mismatch, STATE_HINT, ("--unlisted",))
        found = [replace(hinted, tensor=meta.name, ranks=ranks)]
    yield from found


def check_partly_held(
    catalog: Catalog, sharding: Sharding, is_deduplicated: bool
) -> Iterator[Diagnostic]:
    """Yield unlisted parameters that only some ranks of their stage have."""
    for one in find_partly_held(catalog, sharding, is_deduplicated):
        code, ranks = ("unlisted", one.ranks) if one.is_on_one_rank else ("lacking", one.missing)
        tensor = one.names[0] if len(one.names) == 1 else None
        yield Diagnostic(code, one.message, tensor=tensor, ranks=ranks)


def find_truncated_files(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield files whose tensors are only the first tensors of another file."""
    headers = group_ranks(
        tuple(catalog.files),
        lambda rank: tuple(tensor.meta for tensor in catalog.files[rank].header.values()),
    )
    for metas, ranks in headers.items():
        longer = [
            others
            for more, others in headers.items()
            if len(more) > len(metas) and more[: len(metas)] == metas
        ]
        if longer:
            text = f"{format_ranks(ranks)} ({catalog.files[ranks[0]].path}): "
            if metas:
                text += f"only the first {len(metas)} of the tensors that "
                text += f"{format_ranks(longer[0])} {'has' if len(longer[0]) == 1 else 'have'}"
            else:
                text += f"nothing in {'it' if len(ranks) == 1 else 'them'} "
                text += f"({catalog.files[ranks[0]].nbytes} bytes)"
            text += ": cut short, or saved without redundancy (a strategy, -s, tells)"
            yield Diagnostic("lacking", text, ranks=ranks)
