"""Find problems in headers, also those that do not prevent a conversion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ckpttool.model.catalog import Catalog
from ckpttool.model.names import ParameterOfState
from ckpttool.model.strategy import Replicated, Sharding
from ckpttool.model.tensors import TensorMeta
from ckpttool.planning.optimizer_state import odd_state_shapes
from ckpttool.planning.sources import disagreement, group_ranks
from ckpttool.planning.unlisted import find_partly_held, odd_state_problems
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, format_ranks, shorten


def find_damage(catalog: Catalog, found: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
    """Yield files that cannot be read, unless ``found`` lists them as damaged replicas."""
    replaced = {rank for one in found if one.code == "damaged_replica" for rank in one.ranks}
    for error in catalog.damaged.values():
        if error.rank not in replaced:
            yield from error.diagnostics


def check_types(catalog: Catalog, metas: Mapping[int, TensorMeta]) -> Iterator[Diagnostic]:
    """Yield a problem if ranks disagree on the element type or the number of axes of a name."""
    ranks = tuple(metas)
    name = metas[ranks[0]].name
    dtypes = group_ranks(ranks, lambda rank: metas[rank].dtype)
    axes = group_ranks(ranks, lambda rank: len(metas[rank].shape))
    if len(dtypes) > 1:
        yield disagreement("dtype", catalog, name, "element type", dtypes)
    elif len(axes) > 1:
        yield disagreement("shape", catalog, name, "number of axes", axes)


def check_unlisted(
    catalog: Catalog, sharding: Sharding, metas: Mapping[int, TensorMeta], owners: ParameterOfState
) -> Iterator[Diagnostic]:
    """Yield a problem of a parameter that the strategy does not list, if it has one."""
    ranks = tuple(metas)
    meta = metas[ranks[0]]
    found = [*check_types(catalog, metas)]
    shapes = group_ranks(ranks, lambda rank: metas[rank].text or metas[rank].shape)
    if not found and len(shapes) > 1:
        code, what = "shape", "text" if meta.text else "shape"
        if not isinstance(sharding, Replicated):
            code, what = "unlisted", f"{what}, which no strategy describes,"
        found = [disagreement(code, catalog, meta.name, what, shapes)]
    odd = odd_state_shapes(catalog, sharding, meta, owners)
    if not found and odd is not None:
        problems = odd_state_problems({meta.name: odd}, "the strategy")
        found = [replace(problem, ranks=ranks) for problem in problems]
    yield from found


def check_partly_held(
    catalog: Catalog, sharding: Sharding, is_deduplicated: bool
) -> Iterator[Diagnostic]:
    """Yield unlisted parameters that only some ranks of their stage have."""
    for one in find_partly_held(catalog, sharding, is_deduplicated):
        code = "unlisted" if one.is_on_one_rank else "lacking"
        yield from one.diagnostics(code)


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
            files = [catalog.files[rank] for rank in ranks]
            text = f"only the first {count(len(metas), 'tensor')} of what other ranks hold"
            facts = f"{shorten((file.path for file in files), 1)}; "
            facts += f"{format_ranks(longer[0])}: {len(catalog.files[longer[0][0]].header)} tensors"
            if not metas:
                text = f"no tensor in {files[0].nbytes} bytes, and other ranks hold some"
            yield Diagnostic(
                "lacking",
                f"{format_ranks(ranks)}: {text}",
                hint="-s STRATEGY, which shows whether replicas hold the others",
                facts=facts,
                ranks=ranks,
                path=files[0].path if len(files) == 1 else None,
            )
