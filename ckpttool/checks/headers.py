"""Headers that contradict each other without preventing a conversion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.checkpoint.interpret import disagreement, group_ranks
from ckpttool.checkpoint.presence import has_redundancy_mark
from ckpttool.checks.unlisted import odd_state_problem
from ckpttool.model.catalog import Catalog
from ckpttool.model.slicing import Unlisted
from ckpttool.model.tensors import TensorMeta
from ckpttool.problems import Diagnostic
from ckpttool.wording import count, format_ranks, shorten


def check_unjoined(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield a note if files of ranks are verified by themselves, and where these disagree."""
    catalog = checkpoint.catalog
    if not catalog.is_merged:
        message = "without a strategy every rank is verified by itself"
        facts = "not known: whether slices fit together and replicas are equal"
        hint = "-s STRATEGY, or --replicated if every rank holds the whole model"
        yield Diagnostic("doubt", message, hint=hint, facts=facts)
        for name in catalog.metas:
            yield from _check_types(catalog, catalog.metas_of(name))
    yield from _truncated_files(catalog)


def check_kept(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the files of ranks that will hold nothing, and those that look cut short.

    Only a strategy says what they should hold.
    """
    catalog, chosen = checkpoint.whole.catalog, checkpoint.catalog.files
    if catalog.is_merged:
        return
    empty = [r for r, file in catalog.files.items() if file.tensors and not chosen[r].tensors]
    if empty and checkpoint.catalog.metas:
        message = f"{format_ranks(empty)}: no tensor is chosen, so the files hold none"
        yield Diagnostic("empty", message, ranks=tuple(empty))
    if not has_redundancy_mark(catalog):
        hint = f"ckpttool verify {quote(catalog.root)} -s STRATEGY, which shows it"
        yield from (replace(problem, hint=hint) for problem in _truncated_files(catalog))


def check_unlisted(checkpoint: Checkpoint) -> Iterator[Diagnostic]:
    """Yield the tensors without a layout whose headers differ between ranks."""
    catalog = checkpoint.catalog
    for tensor in checkpoint.tensors:
        if tensor.has_layout:
            continue
        metas = catalog.metas_of(tensor.name)
        problems = [*_check_types(catalog, metas)]
        shapes = group_ranks(tuple(metas), lambda rank: metas[rank].text or metas[rank].shape)  # noqa: B023
        if not problems and len(shapes) > 1:
            code, what = "shape", "text" if tensor.meta.text else "shape"
            if isinstance(tensor.known_by, Unlisted):
                code, what = "unlisted", f"{what}, which no strategy describes,"
            problems = [disagreement(code, catalog, tensor.name, what, shapes)]
        if not problems and isinstance(tensor.known_by, Unlisted) and tensor.known_by.odd_shapes:
            problem = odd_state_problem(checkpoint, tensor.name, tensor.known_by.odd_shapes)
            problems = [replace(problem, ranks=tuple(metas))]
        yield from problems


def _check_types(catalog: Catalog, metas: Mapping[int, TensorMeta]) -> Iterator[Diagnostic]:
    ranks = tuple(metas)
    name = metas[ranks[0]].name
    dtypes = group_ranks(ranks, lambda rank: metas[rank].dtype)
    axes = group_ranks(ranks, lambda rank: len(metas[rank].shape))
    if len(dtypes) > 1:
        yield disagreement("dtype", catalog, name, "element type", dtypes)
    elif len(axes) > 1:
        yield disagreement("shape", catalog, name, "number of axes", axes)


def _truncated_files(catalog: Catalog) -> Iterator[Diagnostic]:
    """Yield files whose tensors are only the first tensors of another file."""
    headers = group_ranks(
        tuple(catalog.whole_files),
        lambda rank: tuple(tensor.meta for tensor in catalog.files[rank].header.values()),
    )
    for metas, ranks in headers.items():
        longer = [
            longer_ranks
            for more, longer_ranks in headers.items()
            if len(more) > len(metas) and more[: len(metas)] == metas
        ]
        if longer:
            files = [catalog.files[rank] for rank in ranks]
            message = f"only the first {count(len(metas), 'tensor')} of what other ranks hold"
            facts = f"{shorten((file.path for file in files), 1)}; "
            facts += f"{format_ranks(longer[0])}: {len(catalog.files[longer[0][0]].header)} tensors"
            if not metas:
                message = f"no tensor in {files[0].nbytes} bytes, and other ranks hold some"
            yield Diagnostic(
                "lacking",
                f"{format_ranks(ranks)}: {message}",
                hint="-s STRATEGY, which shows whether replicas hold the others",
                facts=facts,
                ranks=ranks,
                path=files[0].path if len(files) == 1 else None,
            )
