"""What headers show to be wrong with a checkpoint, though it may stop no conversion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckpttool.errors import AuthenticityError, UnreadableError, UnsupportedError
from ckpttool.model.catalog import Catalog, RankCatalog, SelfDescribedCatalog
from ckpttool.model.diagnostics import Finding, Note
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import TensorMeta
from ckpttool.model.wording import format_ranks
from ckpttool.planning.optimizer_state import Owners, odd_shape
from ckpttool.planning.sources import disagreement, group_ranks
from ckpttool.planning.unlisted import find_partly_held


def is_told(note: Note) -> bool:
    """Whether a finding says what a note says; see `find_damage`, `find_gaps`, `check_unlisted`."""
    return bool(note.ranks) or note.kind in ("older_step", "unlisted")


def find_damage(catalog: Catalog, notes: Iterable[Note]) -> Iterator[Finding]:
    """Files that are damaged or cannot be read."""
    replaced = {rank: note.text for note in notes if note.kind == "replica" for rank in note.ranks}
    for rank, error in catalog.damaged.items():
        kind = "damaged"
        if isinstance(error, UnreadableError | UnsupportedError):
            kind = "unreadable" if isinstance(error, UnreadableError) else "unsupported"
        elif isinstance(error, AuthenticityError):
            kind = "checksum"
        if not isinstance(catalog, RankCatalog):  # then these are no ranks
            yield Finding(kind, str(error))
        else:
            yield Finding(kind, replaced.get(rank, f"rank {rank}: {error}"), ranks=(rank,))


def find_gaps(catalog: Catalog, notes: Iterable[Note]) -> Iterator[Finding]:
    """What a merge would only note: missing ranks that are replaced, a newer step in pieces."""
    for note in notes:
        if note.kind == "older_step":
            yield Finding("step", note.text, "warning")
        elif note.ranks and not set(note.ranks) & set(catalog.damaged):
            yield Finding("missing", note.text, "warning", ranks=note.ranks)


def check_types(catalog: Catalog, held: Mapping[int, TensorMeta]) -> Iterator[Finding]:
    """Ranks that have a name in several element types, or with several numbers of axes."""
    ranks = tuple(held)
    name = held[ranks[0]].name
    dtypes = group_ranks(ranks, lambda rank: held[rank].dtype)
    axes = group_ranks(ranks, lambda rank: len(held[rank].shape))
    if len(dtypes) > 1:
        text = disagreement(catalog, name, "element type", dtypes)
        yield Finding("dtype", text, tensor=name, ranks=ranks)
    elif len(axes) > 1:
        text = disagreement(catalog, name, "number of axes", axes)
        yield Finding("shape", text, tensor=name, ranks=ranks)


def check_unlisted(
    catalog: Catalog, strategy: Strategy, held: Mapping[int, TensorMeta], owners: Owners
) -> Iterator[Finding]:
    """What is wrong with the headers of a parameter that the strategy does not list."""
    ranks = tuple(held)
    meta = held[ranks[0]]
    is_described = isinstance(catalog, SelfDescribedCatalog)
    found = [*check_types(catalog, held)]
    shapes = group_ranks(ranks, lambda rank: held[rank].text or held[rank].shape)
    if not found and len(shapes) > 1:
        text = disagreement(catalog, meta.name, "text" if meta.text else "shape", shapes)
        if strategy.layouts or is_described:
            text += "; nothing says how it is cut"
            found = [Finding("unlisted", text, "warning", meta.name, ranks)]
        else:
            found = [Finding("shape", text, tensor=meta.name, ranks=ranks)]
    odd = None if is_described else odd_shape(catalog, strategy, meta, owners)
    if not found and odd is not None:
        found = [Finding("unlisted", odd, "warning", meta.name, ranks)]
    yield from found


def find_partial(catalog: Catalog, strategy: Strategy, is_deduplicated: bool) -> Iterator[Finding]:
    """Parameters that no strategy lists, and that only some ranks of their stage have."""
    for one in find_partly_held(catalog, strategy, is_deduplicated):
        kind, ranks = ("unlisted", one.ranks) if one.is_alone else ("lacking", one.missing)
        tensor = one.names[0] if len(one.names) == 1 else None
        yield Finding(kind, one.text, "warning", tensor, ranks)


def find_beginnings(catalog: Catalog) -> Iterator[Finding]:
    """Files that hold only the first of the tensors that another holds, in the same order."""
    held = group_ranks(
        tuple(catalog.files),
        lambda rank: tuple(tensor.meta for tensor in catalog.files[rank].header.values()),
    )
    for metas, ranks in held.items():
        longer = [
            others
            for more, others in held.items()
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
            yield Finding("lacking", text, "warning", ranks=ranks)
