"""The comparisons of verify with what a checkpoint should be: reference, configuration and card.

A reference is a checkpoint of any kind, or only a part of one: headers (files that were cut behind
them), an index with names, or a card.  An incomplete reference proves nothing, so it is an error
before any data is read.  The comparison is that of diff.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from itertools import chain
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint, ResolveOptions
from ckpttool.checks.missing import find_nothing
from ckpttool.concurrency import OpenCount, OpenProgress, no_count, no_progress
from ckpttool.discovery.scan import SourceOptions
from ckpttool.formats.local import is_file, is_folder
from ckpttool.formats.weight_index import (
    MAX_INDEX_BYTES,
    SINGLE_FILE,
    is_index_name,
    read_index_file,
)
from ckpttool.model.belonging import find_belongings
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import CASTABLE, WORDS_OF_CASTS
from ckpttool.model.plan import OutputTensor
from ckpttool.model.slicing import FullTensor
from ckpttool.model.strategy import Strategy
from ckpttool.model.tensors import CutShortError
from ckpttool.operations.load import Attempts, Loaded, Source, has_own_strategy, load
from ckpttool.operations.look import Sight, resolve
from ckpttool.operations.tensor_diff import (
    Kind,
    Metas,
    TensorDifference,
    compare_headers,
    compare_names,
    differing_values,
    fold_alike,
)
from ckpttool.problems import Diagnostic, FormatError, PlanError, raise_all
from ckpttool.storage.compare import TensorDelta, compare_tensors
from ckpttool.wording import count, format_shape

if TYPE_CHECKING:
    from ckpttool.operations.card import Card
    from ckpttool.operations.model_config import Config

REFERENCE = "reference"  # the side of its problems
_SAYS: Mapping[Kind, str] = {  # the gravest first
    "only in B": "are missing",
    "only in A": "are not in the reference",
    "dtype": "have another type",
    "shape": "have another shape",
    "text": "have another text",
    "values": "have other values",
}


class Reference(Struct, frozen=True):
    """The tensors that a checkpoint should have.

    Attributes
    ----------
    path
        Where they are from.
    metas
        Name to full tensor; None if only the name is known.
    catalog, strategy
        The checkpoint whose values can be compared; None without values.
    digests
        Name to SHA-256 of the values, of a card.
    """

    path: str
    metas: Metas
    catalog: Catalog | None = None
    strategy: Strategy | None = None
    digests: Mapping[str, str] = {}

    def proves(self, deep: bool) -> str:
        """Return what of the tensors is compared."""
        if deep and (self.catalog is not None or self.digests):
            return "names, shapes, types and values"
        return "names" if None in self.metas.values() else "names, shapes and types"


class AuditOptions(Struct, frozen=True):
    """Options that name what a checkpoint is compared with.

    Attributes
    ----------
    like
        A reference: a checkpoint, its headers or its index alone.
    config
        The ``config.json`` of the model.
    card
        Where to write a card, and a page beside it.
    overwrite
        Whether to replace a card.
    """

    like: str | os.PathLike[str] | None = None
    config: str | os.PathLike[str] | None = None
    card: str | os.PathLike[str] | None = None
    overwrite: bool = False


class Audit(Struct, frozen=True):
    """What a checkpoint is compared with; None for nothing."""

    like: Reference | None = None
    config: Config | None = None
    card: str | None = None


def load_audited(
    source: Source,
    options: AuditOptions = AuditOptions(),
    *,
    find_strategy: bool = True,
    open_count: OpenCount = no_count,
) -> tuple[Catalog, Strategy | None, Audit]:
    """Read a checkpoint and its reference for `verify`, and raise all their problems at once."""
    attempt = Attempts()
    loaded = attempt(
        "",
        partial(load, source, find_strategy=find_strategy, command="verify", open_count=open_count),
    )
    reference = None
    if options.like is not None:
        like = partial(_read_reference, os.fspath(options.like), source)
        reference = attempt(REFERENCE, like)
    config = None
    if options.config is not None:
        config = attempt("config", partial(_load_config, os.fspath(options.config)))
    if options != AuditOptions() and loaded and find_strategy:
        attempt("full", partial(_require_full, loaded))
    card = None if options.card is None else os.fspath(options.card)
    if card is not None:
        attempt("card", partial(_require_free, card, loaded, options.overwrite))
    errors = attempt.errors.items()
    raise_all(error.on_side(what) if what == REFERENCE else error for what, error in errors)
    assert loaded is not None, "its error was raised"
    catalog, strategy, _ = loaded
    if catalog.is_merged and strategy and reference and reference.strategy:
        strategy = strategy if strategy.files != reference.strategy.files else None
    config = _config_beside(catalog) if config is None and catalog.is_merged else config
    return catalog, strategy, Audit(reference, config, card)


def _config_beside(catalog: Catalog) -> Config | None:
    """Read the configuration of a model of Hugging Face; None if that of a folder is another's."""
    from ckpttool.strategy_files.config_files import find_config

    name, beside = Path(catalog.root).name, find_config(catalog.root)
    is_model = is_folder(catalog.root) or name == SINGLE_FILE or is_index_name(name)
    if not beside or not is_model:
        return None
    return Attempts()("", partial(_load_config, beside, is_typed=False))


def _require_free(path: str, loaded: Loaded | None, overwrite: bool) -> None:
    from ckpttool.operations.card import destination_problems  # late, as most write none

    inputs = loaded[0].paths if loaded else ()
    if problems := [*destination_problems(path, inputs, overwrite)]:
        raise PlanError(problems)


def _load_config(path: str, is_typed: bool = True) -> Config:
    from ckpttool.operations.model_config import load_config  # late, as most have none

    return load_config(path, is_typed)


def _require_full(loaded: Loaded, hint: str = "-s STRATEGY") -> None:
    catalog, strategy, _ = loaded
    if catalog.needs_strategy and not strategy and len(catalog.files) > 1:
        message = "only full tensors are compared with what is expected"
        facts = f"{count(len(catalog.files), 'rank')} without a strategy"
        raise PlanError([Diagnostic("options", message, hint, (), facts, where=catalog.root)])


def _read_reference(path: str, beside: Source) -> Reference:
    """Read a reference; one of ranks borrows the strategy of SRC, unless it knows its own."""
    if is_index_name(Path(path).name) and is_file(path):
        index = read_index_file(path)
        files = {*index.files.values()}
        if files and not any(is_file(Path(path).parent / file) for file in files):
            return Reference(path, dict.fromkeys(index.files))
    elif Path(path).suffix == ".json" and is_file(path):
        from ckpttool.formats.strict_json import read_json_object
        from ckpttool.operations.card import card_of
        from ckpttool.strategy_files.config_files import CONFIG

        if Path(path).name == CONFIG:
            message, hint = "a configuration is no reference", f"--config {quote(path)}"
            raise PlanError([Diagnostic("options", message, hint, where=path)])
        document = read_json_object(path, MAX_INDEX_BYTES)
        if "weight_map" in document:  # an index of another name, such as that of .bin files
            return Reference(path, dict.fromkeys(read_index_file(path).files))
        contents = card_of(path, document).contents
        metas: Metas = {it.name: it.meta for it in contents}
        return Reference(path, metas, digests={it.name: it.sha256 for it in contents})
    borrowed = () if has_own_strategy(path) else beside.strategy or ()
    source = Source(path, borrowed, SourceOptions(key=beside.options.key))
    catalog, strategy, _ = loaded = load(source, command="verify")
    if not catalog.is_merged:
        card = f"`ckpttool verify {quote(path)} -s STRATEGY --card ref.json`, then --like ref.json"
        _require_full(loaded, f"-s STRATEGY, or {card}")
        checkpoint = resolve(catalog, strategy, ResolveOptions(unlisted="first"))
        metas = {tensor.name: tensor.meta for tensor in checkpoint.tensors}
        return Reference(path, metas, catalog, strategy)
    lost = [error.remains.lost for error in catalog.cut_short.values()]
    problems = (*catalog.errors("verify"), *find_nothing(catalog))
    if catalog.documents and not catalog.files:
        hint = f"--like {quote(catalog.documents[0].path)}, which has the names"
        problems = tuple(replace(problem, hint=hint) for problem in problems)
    errors = filter(_hides_tensors, catalog.damaged.values())
    raise_all((*errors, *([PlanError(problems)] if problems else [])))
    metas = {**catalog.with_remains().metas, **dict(chain(*(each.items() for each in lost)))}
    return Reference(path, metas, None if catalog.damaged else catalog)


def _hides_tensors(error: FormatError) -> bool:
    """Return whether a damaged file has tensors whose names or shapes are not known."""
    if not isinstance(error, CutShortError):
        return True
    return not error.remains.are_all_known or None in error.remains.lost.values()


def read_values(audit: Audit, executor: Executor) -> Mapping[str, FullTensor]:
    """Return the tensors of the reference whose values can be compared, by name."""
    if audit.like is None or audit.like.catalog is None:
        return {}
    options = ResolveOptions(unlisted="first")
    checkpoint = resolve(audit.like.catalog, audit.like.strategy, options, executor)
    return {it.name: it for it in checkpoint.tensors if it.meta.text is None}


def audit_checkpoint(
    audit: Audit,
    sight: Sight,
    reference: Mapping[str, FullTensor],
    deltas: dict[str, TensorDelta],
    deep: bool,
    executor: Executor,
    open_progress: OpenProgress,
) -> tuple[tuple[TensorDifference, ...] | None, Card | None]:
    """Return how a checkpoint differs from a reference, and its card; None if not wanted.

    The checkpoint is as the options make it: with a recipe the model that merge would write.
    ``sight.found`` gets what is wrong.  ``deep`` compares values, too, with those of
    ``reference``, and a card has hashes.  ``deltas`` says how some differ, and gets the others.
    No tensor of a checkpoint with errors is hashed or made.  A checkpoint without a file that can
    be read is not compared.
    """
    like, checkpoint, found = audit.like, sight.checkpoint, sight.found
    assert checkpoint is not None, "else there is an error"
    is_wrong, is_made = bool(found.errors), sight.source.options.tensors.are_changed
    if is_wrong and (is_made or not checkpoint.catalog.files):
        return None, None  # which is said
    is_read = is_made or audit.card or (deep and like)
    outputs = {it.meta.name: it for it in checkpoint.outputs()} if is_read else {}
    here = {name: it.meta for name, it in outputs.items()} if is_made else _metas_of(checkpoint)
    if audit.config is not None:
        from ckpttool.operations.model_config import compare_config  # late, as most have none

        is_of_made = is_made and audit.config.is_typed  # what lies beside the files is of these
        metas = here if is_of_made else _metas_of(checkpoint.stored.whole)
        found.add(*compare_config(audit.config, metas))
    digests: Mapping[str, str] = {}
    if not is_wrong and (audit.card or (deep and like and like.digests)):
        from ckpttool.operations.card import hash_tensors

        digests = hash_tensors([*outputs.values()], executor, open_progress)
    differences: list[TensorDifference] = []
    if like is not None:
        there = _wanted_of(like, checkpoint)
        differences += compare_headers(here, there)
        pairs = {
            name: (output, OutputTensor.full(reference[name]))
            for name, output in outputs.items()
            if name not in deltas and name in reference and reference[name].meta == output.meta
        }
        nbytes = 2 * sum(output.meta.nbytes for output, _ in pairs.values())
        with (open_progress if pairs else no_progress)(nbytes, "comparing") as on_progress:
            for name, stats in compare_tensors(pairs.items(), executor, None, on_progress):
                (deltas[name],) = stats.differences
        differences += differing_values(here, deltas)
        if deep and not like.catalog and (is_wrong or not like.digests):
            message = "values are not compared with the reference"
            facts = "this checkpoint has errors" if is_wrong else f"{like.path} has no values"
            found.add(Diagnostic("doubt", message, facts=facts))
        elif deep and like.digests:
            unlike = {it.name for it in differences}
            others = [n for n in there if n not in unlike and digests.get(n) != like.digests[n]]
            differences += (TensorDifference(n, None, "values", None, None) for n in others)
        found.add(*compare_names(here, there))
        has_values = deep and like.catalog is not None
        found.add(*_unlike(differences, {**here, **there}, like.path, has_values))
    card = None
    if audit.card is not None and found.errors:
        message = "no card is written of a checkpoint with errors"
        found.add(Diagnostic("doubt", message, where=audit.card))
    elif audit.card is not None:
        from ckpttool.operations.card import describe

        command = join((*_words(sight), *_words_of_sizes(sight, audit), "--card", audit.card))
        metas_of_card = (it.meta for it in outputs.values())
        card = describe(checkpoint.catalog, metas_of_card, digests, command)
    return None if like is None else tuple(differences), card


def _words(sight: Sight) -> Iterator[str]:
    """Yield the command line that verifies these tensors."""
    assert sight.checkpoint is not None, "it was examined"
    step, options = sight.catalog.step, sight.source.options
    yield from ("ckpttool", "verify", sight.catalog.root)
    yield from chain(*(("-s", file) for file in sight.checkpoint.strategy.files))
    yield from ("--step", step) if step else ()
    yield from options.tensors.words
    yield from ("--replicated",) if options.replicated else ()


def _words_of_sizes(sight: Sight, audit: Audit) -> Iterator[str]:
    """Yield the option with the sizes of a recipe, which are those of the other side."""
    from ckpttool.strategy_files.config_files import find_config

    recipe, root = sight.source.options.tensors.recipe, sight.catalog.root
    if recipe is None or recipe.folder or find_config(root):
        return
    if audit.like is not None and (beside := find_config(audit.like.path)):
        yield from ("--hf-config", os.fspath(Path(beside).parent))
    elif audit.config is not None:
        yield from ("--config", audit.config.path)


def _metas_of(checkpoint: Checkpoint) -> Metas:
    if checkpoint.are_joined:
        records = checkpoint.records
        return {t.name: t.meta if isinstance(t, FullTensor) else None for t in records}
    lost = {name: it for name, it in checkpoint.lost.items() if name in checkpoint.wanted}
    return {**lost, **checkpoint.metas}


def _wanted_of(like: Reference, checkpoint: Checkpoint) -> Metas:
    options = checkpoint.stored.options.tensors
    if checkpoint.rearranged is not None:  # of other names
        options = replace(options, include=(), exclude=())
    if options.are_all_wanted:
        return like.metas
    known = {name: meta for name, meta in like.metas.items() if meta is not None}
    wanted = options.choose(like.metas, find_belongings(like.metas, known))
    return {name: meta for name, meta in like.metas.items() if name in wanted}


def _unlike(
    differences: Iterable[TensorDifference], names: Iterable[str], like: str, deep: bool = False
) -> Iterator[Diagnostic]:
    """Yield what differs from a reference; ``deep`` compares its values, too."""
    named: dict[str, Diagnostic] = {}
    for tensor in sorted(differences, key=lambda tensor: [*_SAYS].index(tensor.kind)):
        kind, facts, hint = tensor.kind, f"the reference is {like}", ""
        if tensor.a is not None and tensor.b is not None and kind in ("dtype", "shape"):
            a, b = tensor.a, tensor.b
            parts = ((a.dtype, b.dtype), (format_shape(a.shape), format_shape(b.shape)))
            unlike = zip(*(pair for pair in parts if pair[0] != pair[1]), strict=True)
            facts = ", expected ".join(map(" ".join, unlike))
            can_cast = a.dtype in CASTABLE and a.shape == b.shape
            word = WORDS_OF_CASTS.get(b.dtype) if can_cast else None
            if deep and kind == "dtype":
                facts += "; values are not compared"
                hint = f"--dtype {word}" if word else ""
        named[tensor.name] = Diagnostic("unlike", _SAYS[kind], hint, facts=facts)
    return fold_alike(named, names)
