"""The functions of ``import ckpttool``: a checkpoint in a notebook or a script, in one line each.

A checkpoint is a path or the result of `ckpttool.scan`.  A strategy is its files or the result of
`ckpttool.read_strategy`.  The keywords are the options of the command line.  A value is an object
of Python or the text of the command line (``part="1/2"``).  Warnings of the command line are
`CkptToolWarning` here; ``-W error`` makes them errors before anything is written, as ``--strict``
does.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import ResolveOptions
from ckpttool.concurrency import OnCount, OpenCount, OpenProgress, add_up, no_count
from ckpttool.discovery.scan import CheckpointFiles, SourceOptions
from ckpttool.execution.executors import RunOptions, is_cluster, open_engine
from ckpttool.keywords import (
    OF_ROWS,
    AllKeywords,
    AuditedKeywords,
    AverageKeywords,
    ConvertKeywords,
    InspectKeywords,
    MergeKeywords,
    Path,
    ReadKeywords,
    ReshardKeywords,
    SourceKeywords,
    declared,
)
from ckpttool.model.catalog import Catalog
from ckpttool.model.choices import TensorOptions
from ckpttool.model.joining import join_alike
from ckpttool.model.renames import Rename, parse_renames
from ckpttool.operations import plans
from ckpttool.operations.answer import Document, Json
from ckpttool.operations.audit import AuditOptions, load_audited
from ckpttool.operations.conversion import Conversion
from ckpttool.operations.explanation import Explanation
from ckpttool.operations.explanation import explain as explain_catalog
from ckpttool.operations.inspected import Answered, InspectedSteps, document_of_steps
from ckpttool.operations.inspection import inspect_catalog, inspect_other
from ckpttool.operations.jobs import Order, Verb
from ckpttool.operations.load import (
    AverageInput,
    Mean,
    Source,
    load,
    load_sides,
    load_steps,
)
from ckpttool.operations.look import Subject
from ckpttool.operations.open import DTypes, Framework, OpenCheckpoint
from ckpttool.operations.run import Watch
from ckpttool.operations.run import convert as run_order
from ckpttool.operations.strategies import RanksToFetch
from ckpttool.operations.tensor_diff import Difference
from ckpttool.operations.tensor_diff import diff as compare
from ckpttool.operations.verification import Verification
from ckpttool.operations.verification import verify as find_problems
from ckpttool.planning.needs import Needs
from ckpttool.problems import (
    CkptToolWarning,
    Diagnostic,
    Diagnostics,
    SeverityOf,
    raise_all,
    severities,
)
from ckpttool.storage.compare import CompareOptions, Tolerance
from ckpttool.strategy_files.reader import Layouts
from ckpttool.transaction.resume import OutputOptions
from ckpttool.typed import (
    PARSERS,
    NotInTarget,
    TypedError,
    parse_steps,
    read_key,
    require_choice,
    require_rank,
)
from ckpttool.wording import format_numbers, format_ranks, nearest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckpttool.model.adapters import Adapter
    from ckpttool.model.recipes import UsedRecipe

Checkpoint: TypeAlias = CheckpointFiles  # what `scan` takes, or returns
Weighted: TypeAlias = tuple[Checkpoint, float] | tuple[Checkpoint, float, Layouts | None]
Averaged: TypeAlias = (
    Checkpoint | Mapping[Path, float] | Sequence[Checkpoint | Weighted | AverageInput]
)
Progress: TypeAlias = bool | Callable[[str, int, int], None] | None
T = TypeVar("T", bound=Struct)

_WORDS = {"strategy", "target", "out", "rank", "progress", "dry_run", "b_strategy", "tolerance"}

_KINDS = {name: keyword.kind for name, (keyword, _) in declared(AllKeywords).items()}

_OF_OUTPUTS = ("rename", *OF_ROWS, "on_overflow")  # without effect on reading

BAR_SECONDS = 1  # a shorter phase shows no bar


def open(
    src: Checkpoint,
    strategy: Layouts | None = None,
    *,
    target: Layouts | None = None,
    rank: int | None = None,
    not_in_target: NotInTarget | None = None,
    dtypes: DTypes = "float32",
    framework: Framework = "np",
    **options: Unpack[ReadKeywords],
) -> OpenCheckpoint:
    """Open a checkpoint like one file: a mapping of names to tensors, read where they are indexed.

    Headers are read at once, and contents where they decide; nothing is written.

    Parameters
    ----------
    src
        The checkpoint: a path, or what `scan` returns.
    strategy
        Its strategy files, or what `read_strategy` returns; None for the one that lies with the
        checkpoint, and for a checkpoint that holds full tensors or describes itself.
    target, rank
        The strategy of a target, and one of its ranks.  The tensors are then the slices that
        reshard, or split, would write for this rank.
    not_in_target
        What becomes of parameters that the target does not list; see `OutputOptions`.
    dtypes
        How bfloat16 and float8 are read: as ``"float32"``, which holds them exactly, or as the
        types of the package ``"ml_dtypes"``.
    framework
        What indexing returns: arrays of NumPy, or with ``"pt"`` tensors of PyTorch, in its own
        bfloat16 and float8, as ``safetensors.safe_open`` does.
    options
        Fields of `SourceOptions`, `ResolveOptions` and `TensorOptions`.

    Warns
    -----
    CkptToolWarning
        What the command line prints as a warning.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error.
    ValueError
        Only one of ``target`` and ``rank`` is given, or ``not_in_target`` without them.
    IndexError
        The target lacks this rank.
    ImportError
        The package ml_dtypes, or PyTorch, is not installed.

    Examples
    --------
    See "Python" in the guides (docs/guides/from-python.md).
    """
    if (target is None) != (rank is None):
        raise ValueError("target= and rank= go together: the slices of one rank of a target")
    if target is None and not_in_target is not None:
        raise ValueError("not_in_target= is about a target, and there is none")
    rank = None if rank is None else require_rank("rank", rank)
    require_choice("dtypes", dtypes, get_args(DTypes))
    if dtypes == "ml_dtypes":
        import ml_dtypes  # noqa: F401, to fail here if it is not installed
    require_choice("framework", framework, get_args(Framework))
    if framework == "pt":
        import torch  # noqa: F401, to fail here if it is not installed
    given = _Keywords("open", options)
    resolving = given.take(ResolveOptions)
    source = given.source(src, strategy)
    given.end()
    is_found = not resolving.replicated
    catalog, of_src, of_dst = load(source, target or (), find_strategy=is_found)
    if of_dst is not None and rank not in of_dst.ranks:
        raise IndexError(f"rank={rank}: the target has {format_ranks(of_dst.ranks)}")
    with open_engine("threads") as executor:
        plan, diagnostics = plans.plan_reading(
            *(catalog, of_src, of_dst, rank, resolving, executor, not_in_target)
        ).require()
    _warn(diagnostics, diagnostics.severity_of)
    (output,) = plan.outputs([rank or 0])
    overflows = resolving.tensors.on_overflow == "inf"
    ranks = "" if catalog.is_merged else format_numbers(catalog.files)
    files = "" if of_src is None else ", ".join(of_src.files)
    said = {"step": catalog.step, "ranks": ranks, "strategy": files}
    attrs = {**{key: text for key, text in said.items() if text}, **catalog.common_attrs}
    return OpenCheckpoint(catalog.root, output.tensors, attrs, dtypes, overflows, framework)


def merge(
    src: Checkpoint,
    strategy: Layouts | None,
    out: Path,
    *,
    dry_run: bool = False,
    progress: Progress = None,
    **options: Unpack[MergeKeywords],
) -> Conversion:
    """Write the full tensors of all ranks into one file.

    Parameters
    ----------
    src, strategy
        As for `open`.
    out
        The output file; a folder with ``max_shard_bytes``.
    dry_run
        Write nothing, and return an `Estimate`: what the run would answer, read, write and take.
    progress
        True for a bar, False for none, or a function.  It takes the name of a phase, what is done
        and the total.  The default is a bar in a terminal and in a notebook.
    options
        Fields of `SourceOptions`, `ResolveOptions`, `TensorOptions`, `OutputOptions` and
        `RunOptions`.

    Warns
    -----
    CkptToolWarning
        What the command line prints as a warning, before anything is written.

    Raises
    ------
    FormatError, StrategyError, PlanError
        All problems, in one error; nothing was written.
    ExecutionError, VerifyError, EngineError
        As `execute` does.
    """
    return _convert("merge", options, [(src, strategy)], None, out, progress, dry_run=dry_run)


def split(
    src: Checkpoint,
    target: Layouts,
    out: Path,
    *,
    dry_run: bool = False,
    progress: Progress = None,
    **options: Unpack[ReshardKeywords],
) -> Conversion:
    """Write the files of all ranks of a strategy, ``out/rank_R/``, from a merged checkpoint.

    Parameters
    ----------
    src
        The checkpoint: a path, or what `scan` returns.
    target
        The strategy files of the outputs, or what `read_strategy` returns.
    out
        The output folder.
    dry_run, progress, options
        As for `merge`.

    Raises
    ------
    CkptToolError
        As `merge` does.
    """
    return _convert("split", options, [(src, None)], target, out, progress, dry_run=dry_run)


def reshard(
    src: Checkpoint,
    strategy: Layouts | None,
    target: Layouts,
    out: Path,
    *,
    dry_run: bool = False,
    progress: Progress = None,
    **options: Unpack[ReshardKeywords],
) -> Conversion:
    """Write the files of the ranks of another strategy, ``out/rank_R/``.

    Parameters
    ----------
    src, strategy
        As for `open`.
    target, out
        As for `split`.
    dry_run, progress, options
        As for `merge`.

    Raises
    ------
    CkptToolError
        As `merge` does.
    """
    return _convert("reshard", options, [(src, strategy)], target, out, progress, dry_run=dry_run)


def convert(
    src: Checkpoint,
    out: Path,
    *,
    dry_run: bool = False,
    progress: Progress = None,
    **options: Unpack[ConvertKeywords],
) -> Conversion:
    """Write each file of a checkpoint again, in another format; no strategy is needed.

    Parameters
    ----------
    src
        The checkpoint: a path, or what `scan` returns.
    out
        The output file, or the output folder for files of ranks and for numbered files.
    dry_run, progress, options
        As for `merge`; the default format of a folder is that of ``src``.

    Raises
    ------
    CkptToolError
        As `merge` does.
    """
    return _convert("convert", options, [(src, None)], None, out, progress, dry_run=dry_run)


def average(
    inputs: Averaged,
    out: Path,
    *,
    strategy: Layouts | None = None,
    target: Layouts | None = None,
    steps: Sequence[int | str] | str | None = None,
    normalize: bool | None = False,
    dry_run: bool = False,
    progress: Progress = None,
    **options: Unpack[AverageKeywords],
) -> Conversion:
    """Write the weighted mean of several checkpoints.

    Weights of the model in floating point are averaged.  All else is that of the last input.

    Parameters
    ----------
    inputs
        The checkpoints: paths, or what `scan` returns.  Or pairs of one and its weight, or triples
        of one, its weight and its strategy, or an `AverageInput` with the same; or a mapping of
        paths to weights.  With ``steps`` one folder.
    out
        The output file; the output folder with ``target``.
    strategy
        The strategy of all inputs that have none of their own.
    target
        The strategy of the outputs, which are then files of ranks.
    steps
        The steps of the folder, as a range, a list (of numbers, or as in names: ``"1_8000"``) or
        ``"8000..10000:500"``.
    normalize
        Divide the weights by their sum.  With None they may be any numbers:
        ``average({"a": 1, "b": -1}, out, normalize=None)`` writes a difference.
    dry_run, progress, options
        As for `merge`; with ``target`` as for `reshard`.

    Raises
    ------
    CkptToolError
        As `merge` does.  `VerifyError` also for a number that is NaN or infinite.
    """
    checkpoints = [*_averaged(inputs)]
    mean = Mean(
        [weight for _, weight, _ in checkpoints],
        strategy or (),
        parse_steps(steps) if isinstance(steps, str) else steps,
        normalize,
    )
    sources = [(src, of_src) for src, _, of_src in checkpoints]
    return _convert("average", options, sources, target, out, progress, dry_run=dry_run, mean=mean)


def _averaged(inputs: Averaged) -> Iterator[tuple[Checkpoint, float | None, Layouts | None]]:
    """Yield the checkpoint, the weight and the strategy of each input."""
    if isinstance(inputs, str | os.PathLike | Catalog):
        yield inputs, None, None
        return
    for item in inputs.items() if isinstance(inputs, Mapping) else inputs:
        if isinstance(item, AverageInput):
            yield item.catalog, item.weight, item.strategy
        elif isinstance(item, tuple):
            src, weight, *strategy = item
            yield src, float(weight), next(iter(strategy), None)
        else:
            yield item, None, None


def inspect(
    src: Checkpoint,
    strategy: Layouts | None = None,
    *,
    crc: bool = False,
    every_tensor: bool = False,
    ignore_manifest: bool = False,
    progress: Progress = None,
    **options: Unpack[InspectKeywords],
) -> Answered:
    """Say what a checkpoint or a strategy is; errors are in the answer, ``problems``.

    Parameters
    ----------
    src, strategy
        As for `open`; ``src`` may also be the files of a strategy.
    crc
        Verify checksums.
    every_tensor
        Sample all tensors without a layout, however many there are.
    ignore_manifest
        Do not compare the files with the manifest of their set.
    progress
        As for `merge`.
    options
        Fields of `SourceOptions` and `TensorOptions`.

    Warns
    -----
    CkptToolWarning
        What the command line prints as a warning.

    Raises
    ------
    CkptToolError
        Nothing can be said of it.
    """
    given = _Keywords("inspect", options)
    source = given.source(src, strategy)
    comparing: Literal["ignore", "samples"] = "ignore" if ignore_manifest else "samples"
    resolving = ResolveOptions(tensors=given.take(TensorOptions, _OF_OUTPUTS), manifest=comparing)
    given.end()
    if resolving.tensors.casts and resolving.tensors.recipe is None:
        raise ValueError("dtype= is the type of what recipe= makes, which is not given")
    diagnostics = Diagnostics("inspect")
    answer: Answered | None = None
    if isinstance(source.src, str):
        answer = inspect_other(source.src, diagnostics)
    if answer is None:
        shown = _counts(progress)
        loaded = load(source, command="inspect", diagnostics=diagnostics, open_count=shown)
        catalog, of_src, _ = loaded
        answer = inspect_catalog(
            catalog,
            of_src,
            diagnostics,
            crc=crc,
            every_tensor=every_tensor,
            options=resolving,
        )
    _warn(diagnostics, diagnostics.severity_of)
    return answer


def verify(
    src: Checkpoint,
    strategy: Layouts | None = None,
    *,
    deep: bool = False,
    crc: bool = False,
    ignore: str | Collection[str] = (),
    progress: Progress = None,
    **options: Unpack[AuditedKeywords],
) -> Verification:
    """Find what is wrong with a checkpoint; it is in the answer, ``findings``.

    Parameters
    ----------
    src, strategy
        As for `open`.
    deep
        Read the data, and verify checksums and manifest hashes where these exist.
    crc
        Verify checksums, and report files without one.
    ignore
        Codes of warnings that are treated as notes, or one of them.
    progress
        As for `merge`.
    options
        Fields of `SourceOptions`, `ResolveOptions` and `TensorOptions`; ``like`` is a reference,
        whose tensors are expected.

    Raises
    ------
    CkptToolError
        It cannot be verified, or the reference is incomplete itself.
    """
    given = _Keywords("verify", options)
    resolving = given.take(ResolveOptions, _OF_OUTPUTS)
    source = given.source(src, strategy)
    paths = given.take(AuditOptions)
    given.end()
    if resolving.tensors.casts and not resolving.tensors.recipe and paths == AuditOptions():
        raise ValueError("dtype= needs recipe=, like=, config= or card=, which are not given")
    is_found = not resolving.replicated
    catalog, of_src, audit = load_audited(
        source, paths, find_strategy=is_found, open_count=_counts(progress)
    )
    with open_engine("threads") as executor:
        return find_problems(
            Subject(catalog, of_src, resolving),
            deep=deep,
            crc=crc,
            ignore=ignore,
            audit=audit,
            executor=executor,
            open_progress=_bytes(progress),
        )


def diff(
    a: Checkpoint,
    b: Checkpoint,
    strategy: Layouts | None = None,
    b_strategy: Layouts | None = None,
    *,
    tolerance: Tolerance | None = None,
    stats: bool = False,
    progress: Progress = None,
    **options: Unpack[ReadKeywords],
) -> Difference:
    """Compare two checkpoints tensor by tensor, whatever their layouts and formats are.

    Parameters
    ----------
    a, b
        The checkpoints: paths, or what `scan` returns.
    strategy
        The strategy of A, and of B unless ``b_strategy`` is given; as for `open`.
    b_strategy
        The strategy of B, if it is another one.
    tolerance
        Which numbers are equal; by default bytes are compared.
    stats
        Whether the answer has ``changes``: how much each tensor changed, the largest change first.
    progress
        As for `merge`.
    options
        Fields of `SourceOptions` and `ResolveOptions`, for both; ``unlisted`` is ``"rank"`` by
        default.  For a step of its own a side is given as `scan` returns it.

    Warns
    -----
    CkptToolWarning
        What the command line prints as a warning.

    Raises
    ------
    CkptToolError
        They cannot be compared.
    """
    if not isinstance(tolerance, Tolerance | None):
        raise TypeError(f"tolerance={tolerance!r}, expected a Tolerance, as Tolerance(atol=1e-3)")
    given = _Keywords("diff", {"unlisted": "rank", **options})
    resolving = given.take(ResolveOptions, OF_ROWS)
    of_files = given.take(SourceOptions)
    given.end()
    sides = load_sides(
        Source.of(a, strategy or (), of_files),
        Source.of(b, b_strategy or (), of_files),
        replicated=resolving.replicated,
        open_count=_counts(progress),
    )
    with open_engine("threads") as executor:
        difference = compare(
            *sides,
            resolving,
            compare=CompareOptions(tolerance, wants_statistics=stats),
            executor=executor,
            open_progress=_bytes(progress),
        )
    _warn((*difference.findings, *difference.notes), severities("diff"))
    return difference


def explain(
    src: Checkpoint,
    strategy: Layouts | None = None,
    *,
    target: Layouts | None = None,
    rank: int | None = None,
    progress: Progress = None,
    **options: Unpack[ReadKeywords],
) -> Explanation:
    """Say what the ranks of a checkpoint hold, or those of a target would; ``found`` has errors.

    Parameters
    ----------
    src, strategy
        As for `open`.
    target
        The strategy of a target, whose ranks are explained in place of those of the source.
    rank
        Explain only this rank.
    progress
        As for `merge`.
    options
        Fields of `SourceOptions`, `ResolveOptions` and `TensorOptions`; ``include`` says which
        tensors are explained.

    Warns
    -----
    CkptToolWarning
        What the command line prints as a warning.

    Raises
    ------
    CkptToolError
        The checkpoint or the target cannot be explained, or lacks this rank.
    """
    rank = None if rank is None else require_rank("rank", rank)
    given = _Keywords("explain", options)
    resolving = given.take(ResolveOptions, ("recipe", "dtype"))  # it explains what the files have
    wanted = replace(resolving.tensors, shown_by="--include")  # the others are not "left out"
    resolving = replace(resolving, tensors=wanted)
    source = given.source(src, strategy)
    given.end()
    catalog, of_src, of_dst = load(
        source,
        target or (),
        find_strategy=not resolving.replicated,
        open_count=_counts(progress),
    )
    with open_engine("threads") as executor:
        answer = explain_catalog(
            *(catalog, of_src, of_dst),
            rank=rank,
            options=resolving,
            executor=executor,
        )
    _warn(answer.notes, answer.notes.severity_of)
    return answer


def steps(
    src: Path,
    strategy: Layouts | None = None,
    *,
    progress: Progress = None,
    **options: Unpack[SourceKeywords],
) -> InspectedSteps:
    """Return the steps of a training folder, complete or not, the oldest first.

    Parameters
    ----------
    src
        The folder.
    strategy
        As for `open`; only its ranks count.
    progress
        As for `merge`.
    options
        Fields of `SourceOptions`, without ``step``.

    Warns
    -----
    CkptToolWarning
        What the command line prints as a warning.

    Raises
    ------
    CkptToolError
        The folder, or the strategy, cannot be read.
    """
    given, diagnostics = _Keywords("steps", options), Diagnostics("inspect")
    source = Source.of(src, strategy or (), given.take(SourceOptions))
    given.end()
    answer = load_steps(source, diagnostics, open_count=_counts(progress))
    raise_all(diagnostics.failures)
    _warn(diagnostics, diagnostics.severity_of)
    return document_of_steps(answer, diagnostics)


def to_dict(answer: Document | Needs) -> Json:
    """Return an answer as the document that ``--json`` prints."""
    return (RanksToFetch.of(answer) if isinstance(answer, Needs) else answer).to_dict()


def _convert(
    verb: Verb,
    options: Mapping[str, object],
    checkpoints: Sequence[tuple[Checkpoint, Layouts | None]],
    target: Layouts | None,
    out: Path,
    progress: Progress,
    *,
    dry_run: bool,
    mean: Mean | None = None,
) -> Conversion:
    """Run, or estimate, a conversion."""
    given = _Keywords(verb, options)
    resolving = given.take(ResolveOptions, ("lora",) if verb == "average" else ())
    run = given.take(RunOptions)
    output = given.take(OutputOptions)
    scanning = given.take(SourceOptions)
    given.end()
    order = Order(
        verb,
        [
            _for_workers(Source.of(src, strategy or (), scanning), run.engine)
            for src, strategy in checkpoints
        ],
        *(_for_engine(out, run.engine), target or (), resolving, output, mean),
    )
    column = severities("convert", strict=resolving.strict)
    watch = Watch(_counts(progress), _bytes(progress), partial(_warn, severity_of=column))
    return run_order(order, run, watch, "counted" if dry_run else "written")


class _Keywords:
    """The keywords of a call, from which the objects of options are made."""

    def __init__(self, function: str, given: Mapping[str, object]) -> None:
        self.function = function
        reverse = bool(given.get("reverse"))
        self._left = {name: _value(name, value, reverse) for name, value in given.items()}
        self._names: set[str] = set()

    def take(self, options: type[T], without: Collection[str] = ()) -> T:
        """Return an object of options with the keywords that are fields of it or of its parts.

        ``without`` names fields without an effect in this call, which refuses them as keywords.
        """
        taken: dict[str, object] = {}
        unset = options()
        for name in options.__struct_fields__:
            default = getattr(unset, name)
            if isinstance(default, Struct):
                taken[name] = self.take(type(default), without)
            elif name not in without:
                self._names.add(name)
                if name in self._left:
                    taken[name] = self._left.pop(name)
                if name == "rename":
                    self._names |= {"rename_file", "reverse"}
                    if self._left.pop("reverse", False) and "rename_file" not in self._left:
                        raise ValueError("reverse=True, and rename_file= names no file of rules")
                    rules = parse_renames(taken.get("rename", ()))
                    taken["rename"] = (*rules, *self._left.pop("rename_file", ()))
                if name == "recipe":
                    self._names.add("hf_config")
                    taken["recipe"] = _recipe_of(taken.get(name), self._left.pop("hf_config", None))
                if name == "lora":
                    taken["lora"] = _adapters_of(taken.get(name, ()))
        return options(**taken)

    def source(self, src: Checkpoint, strategy: Layouts | None) -> Source:
        """Return a checkpoint and how it is scanned; a catalog was scanned before."""
        return Source.of(src, strategy or (), self.take(SourceOptions))

    def end(self) -> None:
        """Raise `TypeError` if a keyword is left."""
        for name in self._left:
            message = f"{self.function}() got an unexpected keyword argument {name!r}"
            near = nearest(name, self._names | _WORDS)
            raise TypeError(f"{message}; near: {near}" if near else message)


def _value(name: str, given: object, reverse: bool) -> Any:
    """Return the value of a keyword; text is parsed as on the command line.

    The text may be a secret key instead of a path, so errors do not repeat it.
    """
    try:
        if name == "step" and isinstance(given, int):
            return str(given)
        if name == "key" and isinstance(given, str | os.PathLike):
            with pathlib.Path(given).open("rb") as file:
                return read_key(file)
        if name == "rename_file":
            return _rules_of(given, reverse)
        parse = PARSERS.get(_KINDS.get(name, ""))
        if parse is not None and isinstance(given, str | os.PathLike):
            return parse(os.fspath(given))
        return given
    except TypedError as error:
        raise ValueError(f"{name}: {error}") from None
    except OSError as error:
        raise ValueError(f"{name}: the file cannot be read ({error.strerror})") from None


def _recipe_of(recipe: object, folder: object) -> UsedRecipe | None:
    from ckpttool.model.recipes import UsedRecipe
    from ckpttool.strategy_files.recipe_files import read_recipe

    if recipe is None and folder is not None:
        raise ValueError("hf_config= is the model of recipe=, which is not given")
    if recipe is None or isinstance(recipe, UsedRecipe):
        return recipe
    if not isinstance(recipe, str | os.PathLike):
        raise ValueError(f"recipe={recipe!r}, expected a name such as 'qwen3' or a path")
    if not isinstance(folder, str | os.PathLike | None):
        raise ValueError(f"hf_config={folder!r}, expected the path of a folder")
    return read_recipe(os.fspath(recipe), folder)


def _adapters_of(given: object) -> tuple[Adapter, ...]:
    from ckpttool.discovery.adapter_files import read_adapter
    from ckpttool.model.adapters import Adapter

    each: Sequence[Any] = given if isinstance(given, list | tuple) else [given]
    if not all(isinstance(it, Adapter | str | os.PathLike) for it in each):
        raise ValueError(f"lora={given!r}, expected a path such as 'adapter/' or 'adapter/:2'")
    read = (it if isinstance(it, Adapter) else read_adapter(os.fspath(it)) for it in each)
    return tuple(read)


def _rules_of(files: object, reverse: bool) -> tuple[Rename, ...]:
    from ckpttool.strategy_files.rename_files import read_renames

    paths = files if isinstance(files, list | tuple) else [files]
    if not all(isinstance(path, str | os.PathLike) for path in paths):
        raise ValueError(f"rename_file={files!r}, expected paths of YAML files")
    return tuple(chain.from_iterable(map(read_renames, paths, repeat(reverse))))


def _for_workers(source: Source, engine: str) -> Source:
    """Return a checkpoint; its path is absolute if workers on other hosts read it."""
    if isinstance(source.src, Catalog):
        return source
    return source._replace(src=_for_engine(source.src, engine))


def _for_engine(path: Path, engine: str) -> str:
    return str(pathlib.Path.cwd() / path) if is_cluster(engine) else os.fspath(path)


def _warn(diagnostics: Iterable[Diagnostic], severity_of: SeverityOf) -> None:
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("ckpttool."):
        frame, level = frame.f_back, level + 1
    wanted = (diagnostic for diagnostic in diagnostics if severity_of[diagnostic.code] == "warning")
    for diagnostic in join_alike(wanted, "to_dict"):
        warnings.warn(str(diagnostic), CkptToolWarning, stacklevel=level)


def _counts(progress: Progress) -> OpenCount:
    """Return what shows the phases of a call: a bar, a function of the caller, or nothing."""
    if callable(progress):
        return lambda phase: nullcontext(partial(progress, phase))
    is_seen = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not (is_seen if progress is None else progress):
        return no_count

    return _bar


def _bytes(progress: Progress) -> OpenProgress:
    return add_up(_counts(progress), "reading")


@contextmanager
def _bar(phase: str) -> Iterator[OnCount]:
    """Show per cent in one line of a terminal."""
    due = time.monotonic() + BAR_SECONDS
    shown = ""

    def update(done: int, total: int) -> None:
        nonlocal due, shown
        if total and (now := time.monotonic()) >= due:
            due, shown = now + BAR_SECONDS, f"{phase}: {100 * done // total}%"
            sys.stderr.write(f"\r{shown}")
            sys.stderr.flush()

    yield update
    if shown:
        sys.stderr.write(f"\r{' ' * len(shown)}\r")
