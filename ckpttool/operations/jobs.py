"""The jobs of merge, split, reshard, convert and average: sources, target and outputs.

An `Order` is what a person names, and `load_job` reads it.  A `Job` is the result for the stages
that all five share: the sources, how each is read, and the target.  The commands differ only in the
table `SOURCES` and in the function of convert.  These functions read only what an order names, and
write nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.checkpoint.from_manifest import read_kept
from ckpttool.checkpoint.presence import REDUNDANCY_KEY
from ckpttool.checkpoint.resolve import FindNeeded, one_file_error
from ckpttool.concurrency import OpenCount
from ckpttool.discovery.rank_folders import list_paths
from ckpttool.formats import FORMATS, format_of_suffix, get_format, suffix_of
from ckpttool.formats.local import is_file, is_folder, list_readable, read_file, url_problem
from ckpttool.formats.strict_json import read_json_object
from ckpttool.formats.weight_index import INDEX_OF_PARTS, SINGLE_FILE
from ckpttool.lazy import compile_late
from ckpttool.model.catalog import Catalog
from ckpttool.model.choices import TensorOptions
from ckpttool.model.plan import Document, Kept, Target
from ckpttool.model.strategy import Strategy
from ckpttool.operations.load import (
    Attempts,
    AverageInput,
    Mean,
    Source,
    StrategySource,
    load,
    read_strategy,
)
from ckpttool.operations.look import Subject
from ckpttool.planning.naming import name_files
from ckpttool.planning.preflight import format_option
from ckpttool.planning.targets import numbered_target
from ckpttool.problems import Diagnostic, PlanError, raise_all
from ckpttool.transaction.resume import OutputOptions
from ckpttool.wording import any_of, format_numbers, format_ranks, shorten

if TYPE_CHECKING:
    from ckpttool.model.recipes import UsedRecipe

Verb: TypeAlias = Literal["merge", "split", "reshard", "convert", "average"]
# Files beside the weights of a model: its configuration, its tokenizer, its code.
MODEL_FILE = compile_late(
    r"(\w+_)?config\.json|tokenizer.*\.(json|model)|(sentencepiece|spiece|\w+)(\.bpe)?\.model(\.v\d)?|"
    r"(vocab|merges)\.(json|txt)|(special_tokens_map|added_tokens)\.json|chat_template\..*|"
    r".*\.tiktoken|(configuration|modeling|tokenization|image_processing|processing)_\w+\.py|LICENSE.*"
)
_OF_TARGET = ("prefix", "not_in_target", "strategy_path")  # options of rank files
_OF_NAMES = ("name", "mindformers")
_OF_CONVERT = ("strict", "manifest", "tensors")  # of `ResolveOptions`


class Order(Struct, frozen=True):
    """A request of a person: sources, a target, where the outputs go, and options.

    Attributes
    ----------
    path
        The output file, or the folder of the outputs.
    target
        The strategy of the outputs, or its files.
    mean
        The weights of the sources; None for one source.
    """

    command: Verb
    sources: Sequence[Source]
    path: str
    target: StrategySource | None = ()
    resolve: ResolveOptions = ResolveOptions()
    output: OutputOptions = OutputOptions()
    mean: Mean | None = None


class Job(Struct, frozen=True):
    """The sources of a run, and its target.

    Attributes
    ----------
    sources
        The files, and how each is read.
    weights
        The weights of the sources in their mean; empty for one source.
    target, output
        What is made, and how the outputs are written.
    kept
        What the manifest of files that are written again says of names.
    """

    sources: Sequence[Subject]
    target: Target
    output: OutputOptions
    weights: Sequence[float] = ()
    kept: Kept = Kept()

    @property
    def catalogs(self) -> Sequence[Catalog]:
        """The files that are read."""
        return [source.catalog for source in self.sources]


def load_job(order: Order, open_count: OpenCount) -> Job:
    """Read the catalogs and strategies that an order names, and raise all their problems at once.

    Raises
    ------
    FormatError, StrategyError, PlanError
        What cannot be read, or what the command does not take.
    ValueError
        An option does not apply to the command.
    """
    inputs, strategy = _load_inputs(order, open_count)
    if strategy is None:
        catalogs = [source.catalog for source in inputs]
        is_model = _becomes_model(order.resolve.tensors.recipe, catalogs)
        if order.command == "convert" and not catalogs[0].is_merged:
            is_model = None  # which is refused
        if is_model or order.command != "convert" or not _is_folder(catalogs[0], order.output):
            order = replace(order, path=_path_like(catalogs, order.path, order.output, is_model))
    if order.command == "convert":
        return _convert(order, inputs[0].catalog)
    if strategy is not None:
        target = rank_files(strategy, order.path, order.output, inputs[-1].catalog)
    elif order.command in ("split", "reshard"):
        raise TypeError(f"{order.command} needs target=, the strategy of the outputs")
    else:
        order.output.refuse(*_OF_TARGET, *_OF_NAMES, "ranks")
        format = choose_format(order.path, order.output)
        is_numbered = order.output.max_shard_bytes is not None
        target = _full_tensors(order.path, format, order.output, is_numbered)
        target = _with_model_files(target, order.resolve.tensors, catalogs[-1], is_model)
    sources = [SOURCES[order.command](order, source) for source in inputs]
    weights = [source.weight for source in inputs] if order.mean is not None else ()
    return Job(sources, target, order.output, weights)


def _load_inputs(
    order: Order, open_count: OpenCount
) -> tuple[Sequence[AverageInput], Strategy | None]:
    is_replicated = order.resolve.replicated
    if order.mean is None:
        (source,) = order.sources
        find_strategy = order.command in ("merge", "reshard") and not is_replicated
        catalog, strategy, target = load(
            source, order.target or (), find_strategy=find_strategy, open_count=open_count
        )
        return [AverageInput(catalog, strategy, 1)], target
    from ckpttool.operations.average_inputs import load_average

    attempt, target = Attempts(), None
    if order.target:
        target = attempt("-d", partial(read_strategy, order.target))
    read = partial(load_average, order.sources, order.mean, is_replicated, open_count)
    inputs = attempt("inputs", read)
    raise_all(attempt.errors.values())
    assert inputs is not None, "its error was raised"
    return inputs, target


def slices_of_ranks(
    target: Target, options: OutputOptions, tensors: TensorOptions
) -> FindNeeded | None:
    """Return what finds the slices that the ranks of a target take; None if all are needed."""
    if options.ranks is None or tensors.are_rearranged:
        return None
    from ckpttool.planning.needs import needed_slices

    return partial(needed_slices, target=target, options=options)


def _path_like(
    catalogs: Sequence[Catalog], path: str, options: OutputOptions, is_model: bool | None
) -> str:
    """Return the path of full tensors: in a folder, as every source is one of Hugging Face.

    Such a folder has one ``model.safetensors``, or parts and their index.  A suffix or another
    format makes it one file.  ``is_model`` says whether a recipe makes a model of Hugging Face.
    """
    are_alike = all(map(_is_of_hugging_face, catalogs))
    is_one = options.format in (None, "safetensors") and options.max_shard_bytes is None
    is_named_so = is_one and format_of_suffix(path) is None
    is_folder_of_model = are_alike if is_model is None else is_model
    return str(Path(path, SINGLE_FILE)) if is_folder_of_model and is_named_so else path


def _becomes_model(recipe: UsedRecipe | None, catalogs: Sequence[Catalog]) -> bool | None:
    """Return whether a recipe makes a model of Hugging Face, in its folder; None without one."""
    if recipe is None or not recipe.folder:
        return None if recipe is None else False
    with suppress(LookupError, ValueError):  # what the recipe lacks is said when it is used
        return recipe.side_of(chain(*(catalog.metas for catalog in catalogs))) == 0
    return False


def _with_model_files(
    target: Target, tensors: TensorOptions, catalog: Catalog, is_model: bool | None
) -> Target:
    """Return the target with the small files of a model: of the recipe, else of the source.

    ``is_model`` says whether a recipe makes a model of Hugging Face; None without a recipe.
    """
    is_folder = target.is_numbered or Path(next(iter(target.paths.values()))).name == SINGLE_FILE
    folder = tensors.recipe.folder if tensors.recipe is not None else _home_of(catalog)
    is_loaded = is_folder and target.format == "safetensors" and is_model is not False
    if not is_loaded or not is_file(Path(folder, "config.json")):
        return target
    kept = []
    for path in sorted(list_readable(Path(folder))):
        if MODEL_FILE.fullmatch(path.name) and is_file(path):
            is_config = path.name == "config.json"
            data = _as_written(path, tensors) if is_config else read_file(os.fspath(path))
            kept.append(Document(str(Path(target.output_folder, path.name)), data, "model file"))
    return replace(target, model_files=tuple(kept))


def _home_of(catalog: Catalog) -> str:
    """Return the folder of a checkpoint, which is a folder, an index or a file in it."""
    root = catalog.root
    return root if is_folder(root) else os.path.dirname(root)  # noqa: PTH120 - "" is a folder, too


def _as_written(path: Path, tensors: TensorOptions) -> bytes:
    """Return a configuration with the element type and the rows of the vocabulary that are written.

    It has the sizes that were typed with the recipe, and nothing of scales of Float8 weights,
    which are not written.
    """
    from ckpttool.strategy_files.config_files import MAX_CONFIG_BYTES  # most outputs have none

    said = read_json_object(os.fspath(path), MAX_CONFIG_BYTES)
    values = dict(said)
    cast = next((cast.dtype for cast in tensors.casts if cast.pattern is None), None)
    if tensors.recipe is not None:
        values |= {key: it for key, it in tensors.recipe.given.items() if key in values}
    if tensors.recipe is not None or cast is not None:
        values.pop("quantization_config", None)
    if cast is not None:
        values |= {key: cast.lower() for key in ("dtype", "torch_dtype") if key in values}
    if isinstance(rows := values.get("vocab_size"), int):
        values["vocab_size"] = tensors.rows_for(rows) or rows
    if values == said:
        return read_file(os.fspath(path))
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def _is_of_hugging_face(catalog: Catalog) -> bool:
    if catalog.indexes:
        return INDEX_OF_PARTS in (Path(path).name for path in catalog.indexes)
    return is_folder(catalog.root) and list_paths(catalog) == [str(Path(catalog.root, SINGLE_FILE))]


def choose_format(path: str, options: OutputOptions) -> str:
    """Return the format of an output file: the given one, else that of its suffix, else HDF5.

    With ``max_shard_bytes`` the path is a folder of numbered files, by default of safetensors.

    Raises
    ------
    PlanError
        The suffix is that of another format, or of none.
    """
    _refuse_url(path)
    format, by_name = options.wanted_format, format_of_suffix(path)
    if options.max_shard_bytes is not None and not options.virtual:
        if by_name is not None:
            message = "numbered files go into a folder, and the name is that of a file"
            hint = f"-o {quote(path.removesuffix(Path(path).suffix))}"
            raise PlanError([Diagnostic("options", message, hint=hint, where=path)])
        return format or "safetensors"
    if format is not None and by_name not in (None, format):
        message = f"the suffix is that of {by_name}, but the format is {format}"
        hint = f"{format_option(path, format)}, or no --format"
        raise PlanError([Diagnostic("options", message, hint=hint, where=path)])
    if format is None and by_name is None and re.search(r"\.[A-Za-z]\w*$", Path(path).name):
        message = "the suffix is not that of a format"
        hint = f"a name that ends in {any_of(map(suffix_of, FORMATS))}, or --format"
        raise PlanError([Diagnostic("options", message, hint=hint, where=path)])
    return format or by_name or "hdf5"


def refuse_file_name(folder: str, options: OutputOptions) -> None:
    """Raise `PlanError` if the folder of rank folders has the name of a file."""
    if (by_name := format_of_suffix(folder)) is not None:
        message = "a folder of rank folders is written, and the name is that of a file"
        hint = f"-o {quote(folder.removesuffix(Path(folder).suffix))}"
        hint = hint if by_name == options.format else f"--format {by_name} {hint}"
        raise PlanError([Diagnostic("options", message, hint=hint, where=folder)])


def rank_files(strategy: Strategy, folder: str, options: OutputOptions, catalog: Catalog) -> Target:
    """Return the target that writes a file for each rank of a strategy, or for some of them.

    Raises
    ------
    PlanError
        The folder is a URL, or has the suffix of a file; or see `name_files`.
    ValueError
        An option applies to merged checkpoints only.
    """
    options.refuse("max_shard_bytes", "virtual")
    _refuse_url(folder)
    refuse_file_name(folder, options)
    format = options.wanted_format or "hdf5"
    ranks = strategy.ranks if options.ranks is None else sorted(options.ranks)
    names = name_files(catalog, ranks, format, options)
    paths = {rank: str(Path(folder, f"rank_{rank}", name)) for rank, name in names.items()}
    return Target(
        format,
        paths,
        ranks=len(strategy.ranks),
        strategy=strategy,
        attrs=header_attrs(options.crc, format, folder),
    )


def _refuse_url(path: str) -> None:
    if (problem := url_problem(path)) is not None:
        what, hint = problem
        raise PlanError([Diagnostic("destination", what, hint=hint, where=path)])


def header_attrs(crc: bool, format: str, path: str) -> dict[str, str]:
    """Return the attributes of every output's header: an empty checksum with ``crc``.

    Raises
    ------
    PlanError
        The format cannot store one; no checksum of the source has been computed yet.
    """
    attrs = {"crc_num": ""} if crc else {}
    if refused := [*get_format(format).refusals((), attrs)]:
        able = (name for name in FORMATS if get_format(name).has_checksum)
        hint = ", or ".join(format_option(path, name) for name in able)
        raise PlanError([replace(reason, hint=hint) for reason in refused])
    return attrs


def _full_tensors(path: str, format: str, options: OutputOptions, is_numbered: bool) -> Target:
    if options.virtual:
        unfit = {
            "-o with the suffix .h5": format != "hdf5",
            "omit --max-shard-size": is_numbered,
            "omit --crc": options.crc,
            "omit --part": options.part is not None,
            "omit --resume, or --overwrite in place of it": options.resume,
        }
        if any(unfit.values()):
            message = "--virtual shows the tensors as they lie, in one HDF5 file"
            hint = ", ".join(remedy for remedy, is_so in unfit.items() if is_so)
            raise PlanError([Diagnostic("options", message, hint=hint, where=path)])
        return Target(format, {0: path}, is_virtual=True)
    attrs = header_attrs(options.crc, format, path)
    if format == "safetensors":
        attrs["format"] = "pt"  # all loaders accept this mark; see `ckpttool.formats.safetensors`
    if is_numbered:
        return numbered_target(path, format, attrs)
    return Target(format, {0: path}, attrs=attrs)


def split_source(catalog: Catalog, options: ResolveOptions) -> Subject:
    """Return the source of a split, with its refusal if it is not one full checkpoint."""
    is_full = not (options.replicated or catalog.description is not None)
    refusal = _several_ranks_error(catalog) if is_full else None
    return Subject(catalog, None, options, refusal, files="full" if is_full else "joined")


def _several_ranks_error(catalog: Catalog) -> PlanError | None:
    found = sorted({*catalog.files, *catalog.damaged})
    if catalog.is_merged or len(found) < 2:
        return None
    message = f"split takes one merged checkpoint, found {format_ranks(found)}"
    hint = "`ckpttool reshard`, or --replicated if every rank holds the whole model"
    ranks = tuple(found)
    return PlanError([Diagnostic("strategy", message, hint=hint, ranks=ranks, where=catalog.root)])


def reshard_source(
    catalog: Catalog, strategy: Strategy | None, options: ResolveOptions, split: str = ""
) -> Subject:
    """Return the source of a reshard, with its refusal if it is merged.

    ``split`` is the command that does it if every rank holds the full model.
    """
    is_unknown = strategy is None and catalog.description is None and not options.replicated
    refusal = one_file_error(catalog) if is_unknown and catalog.is_merged else None
    return Subject(catalog, strategy, options, refusal, replicas=split or "--replicated")


def _reshard_source(order: Order, source: AverageInput) -> Subject:
    catalog, strategy, _ = source
    target = order.target.files if isinstance(order.target, Strategy) else order.target
    files = [*map(os.fspath, target)] if isinstance(target, tuple) and target else ["STRATEGY"]
    words = ["split", catalog.root, "--replicated", *chain(*(("-d", file) for file in files))]
    split = f"ckpttool {join([*words, '-o', order.path])}"
    return reshard_source(catalog, strategy, order.resolve, split)


def _average_source(order: Order, source: AverageInput) -> Subject:
    catalog, strategy, _ = source
    is_of_ranks = strategy is None and bool(catalog.needs_strategy or catalog.one_of_several)
    is_replicated = order.resolve.replicated and is_of_ranks
    tensors = replace(order.resolve.tensors, is_shared=True)
    options = replace(order.resolve, replicated=is_replicated, tensors=tensors)
    if order.target and catalog.is_merged and catalog.description is None:
        return split_source(catalog, options)
    return Subject(catalog, strategy, options)


SOURCES: Mapping[Verb, Callable[[Order, AverageInput], Subject]] = {
    "merge": lambda order, of: Subject(of.catalog, of.strategy, order.resolve),
    "split": lambda order, of: split_source(of.catalog, order.resolve),
    "reshard": _reshard_source,
    "average": _average_source,
}


def _convert(order: Order, catalog: Catalog) -> Job:
    path, output, options = order.path, order.output, order.resolve
    if not (output.crc or options.tensors.are_all_wanted):
        catalog = catalog.with_remains()
    names, unset = ResolveOptions.__struct_fields__, ResolveOptions()
    changed = [n for n in names if getattr(options, n) != getattr(unset, n)]
    if unused := [name for name in changed if name not in _OF_CONVERT]:
        raise ValueError(f"{', '.join(unused)}: not an option of convert, which joins nothing")
    output.refuse(*_OF_TARGET)
    _refuse_url(path)
    if catalog.is_merged and (named := [name for name in _OF_NAMES if getattr(output, name)]):
        message, hint = "a merged checkpoint has no ranks", f"the same command without --{named[0]}"
        raise PlanError([Diagnostic("options", message, hint=hint, where=catalog.root)])
    kept, unknown = Kept(), None
    if catalog.needs_strategy:
        kept, unknown = read_kept(catalog, options.manifest == "ignore")
    refusal = _described_error(catalog) or unknown
    is_renamed = bool(options.tensors.renames) and kept.strategy is None
    noted = [*_note_strategies(catalog, is_renamed), *_conversion_problems(catalog, path, output)]
    is_folder = _is_folder(catalog, output)
    is_whole = output.ranks is None and output.max_shard_bytes is None
    has_keys = any(file.cipher is not None for file in catalog.files.values())
    is_same = options.tensors == TensorOptions() and not (output.crc or has_keys)
    if is_folder and output.wanted_format is None and is_whole and is_same:
        format_of_source = _format_of(catalog)
        message = f"the format is that of the source, {format_of_source}"
        hint = f"--format {any_of(name for name in FORMATS if name != format_of_source)}"
        noted.append(Diagnostic("same_format", message, hint=hint, where=catalog.root))
    catalog = replace(catalog, diagnostics=tuple(noted))
    if output.ranks is not None:
        catalog = _limited_to(catalog, output.ranks)
    wanted = output.wanted_format
    format = wanted or _format_of(catalog) if is_folder else choose_format(path, output)
    if catalog.is_merged:
        outputs = _full_tensors(path, format, output, is_folder)
        is_model = _becomes_model(options.tensors.recipe, [catalog])
        outputs = _with_model_files(outputs, options.tensors, catalog, is_model)
    else:
        outputs = _again(catalog, path, format, output, kept)
    source = Subject(catalog, None, options, refusal, files="kept")
    return Job([source], outputs, output, kept=kept)


def _is_folder(catalog: Catalog, options: OutputOptions) -> bool:
    is_one_file = catalog.is_merged and not catalog.documents
    return not is_one_file or options.max_shard_bytes is not None


def _described_error(catalog: Catalog) -> PlanError | None:
    if catalog.description is None:
        return None
    src = quote(catalog.root)
    message = "the checkpoint describes its slices itself, which files of ranks cannot"
    hint = f"ckpttool merge {src} -o OUT, or reshard {src} -d STRATEGY -o DIR"
    facts = f"see {shorten(catalog.description.files, 2)}"
    return PlanError([Diagnostic("source", message, hint=hint, facts=facts, where=catalog.root)])


def _note_strategies(catalog: Catalog, is_renamed: bool) -> Iterator[Diagnostic]:
    """Yield the diagnostics of a scan, and that the strategies beside the files are not copied."""
    strategies = [*catalog.strategy_files]
    if catalog.needs_strategy and not strategies:
        from ckpttool.strategy_files.near import find_near  # late, as most have them beside

        strategies = [near.path for near in find_near(catalog.root) if near.steps == 0]
    yield from (note for note in catalog.diagnostics if note.code != "strategy_file")
    if strategies:
        message = f"{shorten(strategies, 1)}: a strategy, which is not copied"
        yield Diagnostic("strategy_file", message, facts="it is that of the output, too")
    if is_renamed and catalog.needs_strategy:
        message = "strategies have the old names, and the manifest of the output both"
        yield Diagnostic(
            "new_names", message, facts="so they fit as long as it lies with the files"
        )


def _conversion_problems(
    catalog: Catalog, path: str, options: OutputOptions
) -> Iterator[Diagnostic]:
    """Yield why files cannot be written again as the options say, and what is not copied."""
    src, is_merged = quote(catalog.root), catalog.is_merged
    if options.max_shard_bytes is not None and not is_merged:
        message, hint = "files of ranks cannot be numbered", f"ckpttool merge {src} -s STRATEGY ..."
        yield Diagnostic("options", message, hint=hint, where=catalog.root)
    there = {*catalog.files, *catalog.damaged}
    absent = sorted({*(options.ranks or ())} - there - {*catalog.missing_ranks})
    if options.ranks is not None and is_merged:
        message, hint = "a merged checkpoint has no ranks", "the same command without --rank"
        yield Diagnostic("options", message, hint=hint, where=catalog.root)
    elif absent:
        message = f"{format_ranks(absent)}: not in the source"
        hint = f"--rank {format_numbers(there, separator=',')}"
        yield Diagnostic("options", message, hint=hint, ranks=tuple(absent), where=catalog.root)
    if not _is_folder(catalog, options):
        return
    if format_of_suffix(path) is not None and catalog.description is None:
        message = "a folder is written, as the source is one, and the name is that of a file"
        more = "" if is_merged else "-s STRATEGY "
        hint = f"-o {Path(path).with_suffix('')}, or ckpttool merge {src} {more}-o {path}"
        yield Diagnostic("options", message, hint=hint, where=path)
    formats = {file.format for file in catalog.files.values()}
    if options.format is None and len(formats) > 1:
        message, facts = "the files have several formats", any_of(sorted(formats))
        yield Diagnostic("options", message, hint="--format", facts=facts, where=catalog.root)


def _format_of(catalog: Catalog) -> str:
    return next((file.format for file in catalog.files.values()), "hdf5")


def _limited_to(catalog: Catalog, ranks: Collection[int]) -> Catalog:
    return replace(
        catalog,
        files={rank: file for rank, file in catalog.files.items() if rank in ranks},
        damaged={rank: error for rank, error in catalog.damaged.items() if rank in ranks},
        expected_ranks=frozenset(ranks),
    )


def _again(
    catalog: Catalog, folder: str, format: str, options: OutputOptions, kept: Kept
) -> Target:
    """Return the target that writes each file of ranks again, under the same name below a folder.

    The marks that all headers have stay, where the format keeps them.  So does the strategy that a
    manifest names.
    """
    if options.name or options.mindformers:
        of_ranks = name_files(catalog, catalog.files, format, options)
        names = {rank: f"rank_{rank}/{name}" for rank, name in of_ranks.items()}
    else:
        there = {rank: os.path.relpath(it.path, catalog.root) for rank, it in catalog.files.items()}
        names = {rank: _name_in(name, format) for rank, name in there.items()}
    paths = {rank: str(Path(folder, name)) for rank, name in names.items()}
    common = catalog.common_attrs if catalog.files else {}
    attrs = {key: common[key] for key in ("format", REDUNDANCY_KEY) if key in common}
    ranks = max(catalog.files, default=0) + 1
    return Target(
        format,
        paths,
        ranks=ranks,
        strategy=Strategy.without_layouts(ranks, kept.files),
        attrs={**attrs, **header_attrs(options.crc, format, folder)},
        folder=folder,
    )


def _name_in(path: str, format: str) -> str:
    """Return the name of a file in another format.

    Examples
    --------
    >>> _name_in("rank_0/net-1_10.ckpt", "safetensors"), _name_in("rank_0/net-1.10", "ckpt")
    ('rank_0/net-1_10.safetensors', 'rank_0/net-1.10.ckpt')
    """
    stem = path if format_of_suffix(path) is None else path.removesuffix(Path(path).suffix)
    return stem + suffix_of(format)
