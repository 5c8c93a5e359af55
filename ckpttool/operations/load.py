"""Load what a person names: a checkpoint, its strategy and that of a target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from ckpttool.concurrency import OpenCount, no_count
from ckpttool.discovery.scan import (
    CheckpointFiles,
    RankFiles,
    SourceOptions,
    Steps,
    find,
    find_steps,
    list_rank_steps,
    locate,
    read_ranks,
)
from ckpttool.model.catalog import Catalog
from ckpttool.model.strategy import Strategy
from ckpttool.problems import (
    CkptToolError,
    Command,
    Diagnostic,
    Diagnostics,
    PlanError,
    StepError,
    raise_all,
)
from ckpttool.wording import shorten

if TYPE_CHECKING:
    from ckpttool.strategy_files.reader import Layouts
    from ckpttool.transaction.set_strategy import RecordedSet

StrategySource: TypeAlias = "Layouts"  # none of several files for no strategy
T = TypeVar("T")
S = TypeVar("S", bound="Catalog | RankFiles")


class Attempts:
    """Calls whose errors are reported together: a bad strategy with a bad checkpoint.

    ``errors`` has the error of each call that failed, by what it was for.
    """

    def __init__(self) -> None:
        self.errors: dict[str, CkptToolError] = {}

    def __call__(self, what: str, call: Callable[[], T]) -> T | None:
        """Return the result of ``call``, or None if it fails."""
        try:
            return call()
        except CkptToolError as error:
            self.errors[what] = error
            return None


def read_strategy(paths: Layouts) -> Strategy:
    """Read a strategy from its files; one that was read is returned as it is."""
    # Imported late, since most single files that are inspected have no strategy.
    from ckpttool.strategy_files import reader

    return reader.read_strategy(paths)


class Source(NamedTuple):
    """A checkpoint, its strategy and how it is scanned, as a person names them.

    ``default`` has the files of the strategy of ranks that neither a person nor a manifest names.
    """

    src: str | Catalog
    strategy: StrategySource | None = ()  # () to find one, None for none
    options: SourceOptions = SourceOptions()
    default: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        src: CheckpointFiles,
        strategy: StrategySource | None = (),
        options: SourceOptions = SourceOptions(),
    ) -> Source:
        """Return a source of all that callers in Python name; see `locate`."""
        src, options = locate(src, options)
        return cls(src, strategy, options)


class AverageInput(NamedTuple):
    """A checkpoint to average, its layouts as for `ckpttool.open`, and its weight."""

    catalog: Catalog
    strategy: Strategy | None
    weight: float


class Mean(Struct, frozen=True):
    """The weights of an average, as a person gives them."""

    weights: Sequence[float | None]
    shared: StrategySource = ()
    steps: Sequence[int | str] | None = None
    normalize: bool | None = False  # None for a sum, whose weights are any numbers


Loaded: TypeAlias = tuple[Catalog, Strategy | None, Strategy | None]  # and that of the target
LoadedSides: TypeAlias = tuple[Catalog, Catalog, Strategy | None, Strategy | None]


def load(
    source: Source,
    target: StrategySource = (),
    *,
    find_strategy: bool = True,
    command: Command = "convert",
    diagnostics: Diagnostics | None = None,
    open_count: OpenCount = no_count,
) -> Loaded:
    """Read the catalog and the strategies, and raise all their problems at once."""
    (src, strategy, options, default), attempt = source, Attempts()
    used: list[Diagnostic] = []
    files: Catalog | RankFiles | None
    if isinstance(src, Catalog):
        files = src
    else:
        files = attempt("SRC", partial(find, src, options, command=command))
    if find_strategy and strategy == () and files is not None:
        files, strategy, used = _find_strategy(files, default)
    elif strategy and files is not None:  # who names one asks for no others
        files = replace(files, diagnostics=_without_strategy_files(files))
    given = {"-s": strategy, "-d": target}
    read_src, read_dst = (
        attempt(option, partial(read_strategy, layouts)) if layouts else None
        for option, layouts in given.items()
    )
    catalog: Catalog | None
    if isinstance(files, RankFiles):
        with open_count("reading headers") as on_scan:
            read = partial(read_ranks, files, read_src, command=command, on_progress=on_scan)
            catalog = attempt("SRC", read)
    else:
        catalog = files
    if isinstance(attempt.errors.get("SRC"), StepError) and "-s" in attempt.errors:
        del attempt.errors["SRC"]  # the choice of a step depends on the strategy
    errors = [attempt.errors[what] for what in ("SRC", *given) if what in attempt.errors]
    if catalog is None:
        raise_all(errors)
    elif diagnostics is not None:
        diagnostics.failures += errors
    elif errors:
        raise_all([*catalog.damaged.values(), *errors])
    assert catalog is not None, "its error was raised"
    if find_strategy and src is not catalog and not strategy and catalog.needs_strategy:
        from ckpttool.strategy_files.near import note_near  # late, as most name their strategy

        used += note_near(catalog)
    if used:
        catalog = replace(catalog, diagnostics=(*catalog.diagnostics, *used))
    return catalog, read_src, read_dst


def _without_strategy_files(files: Catalog | RankFiles) -> tuple[Diagnostic, ...]:
    return tuple(note for note in files.diagnostics if note.code != "strategy_file")


def _find_strategy(
    found: S, default: Sequence[str] = ()
) -> tuple[S, StrategySource, list[Diagnostic]]:
    """Return the strategy of the files of ranks that a person did not name, and what to say of it.

    The strategy in the manifest comes first, then the default of the environment, then one that
    lies with the files.  In the first two cases, notes on other strategies are dropped.
    """
    if isinstance(found, Catalog) and not found.needs_strategy:
        return found, found.strategy_files, []
    recorded = _recorded(found.root)
    noted = _without_strategy_files(found)
    if recorded is not None and recorded.written is not None:
        note = Diagnostic("strategy_file", f"layouts from {recorded.written.origin}")
        return replace(found, diagnostics=noted), recorded.written, [note]
    if recorded is not None and (by_manifest := recorded.find_files()):
        facts = f"{recorded.manifest.path} has its SHA-256"
        note = Diagnostic("strategy_file", f"strategy from {shorten(by_manifest, 1)}", facts=facts)
        return replace(found, diagnostics=noted), by_manifest, [note]
    if recorded is not None and recorded.provenance.has_unknown_names:
        problem = recorded.unknown_names(recorded.provenance.renamed, "-s with the new names only")
        return replace(found, diagnostics=noted), (), [replace(problem, code="strategy_file")]
    files = default or found.strategy_files
    if files:
        note = Diagnostic("strategy_file", f"strategy from {shorten(files, 1)}")
        return (replace(found, diagnostics=noted) if default else found), files, [note]
    if recorded is None or recorded.named is None:
        return found, (), []
    message = f"written for {recorded.named}, which was not found"
    facts = recorded.named.why_not_found
    return found, (), [Diagnostic("strategy_file", message, facts=facts, where=found.root)]


def load_steps(
    source: Source, diagnostics: Diagnostics, *, open_count: OpenCount = no_count
) -> Steps:
    """Read which steps a folder has; its own strategy says which ranks count, or the given one.

    ``diagnostics`` gets what was noted, and the errors of the strategy, which then does not count.

    Raises
    ------
    PlanError, FormatError
        The folder cannot be read, or it needs no strategy and has one.
    """
    src, strategy, options, default = source
    assert isinstance(src, str), "a catalog is of one step"
    steps_or_files = find_steps(src, options)
    if isinstance(steps_or_files, Steps):
        if strategy != ():
            message = "these steps describe themselves, so no strategy applies"
            hint = "the same command without -s"
            raise PlanError([Diagnostic("options", message, hint=hint, where=src)])
        diagnostics.add(*steps_or_files.diagnostics)
        return steps_or_files
    if not strategy:
        steps_or_files, strategy, used = _find_strategy(steps_or_files, default)
        diagnostics.add(*used)
    attempt = Attempts()
    parsed = attempt("-s", partial(read_strategy, strategy)) if strategy else None
    diagnostics.failures += attempt.errors.values()
    with open_count("reading headers") as on_scan:
        steps = list_rank_steps(steps_or_files, parsed, on_progress=on_scan)
    diagnostics.add(*steps.diagnostics)
    return steps


def load_sides(
    a: Source,
    b: Source,
    *,
    replicated: bool = False,
    open_count: OpenCount = no_count,
) -> LoadedSides:
    """Read the catalogs and strategies of two sides, and raise all their problems at once.

    B gets the strategy of A if neither the user nor a manifest names one, unless its ranks hold
    full tensors.  Single files and checkpoints that describe themselves need no strategy.
    """
    attempt = Attempts()
    catalogs: list[Catalog] = []
    strategies: list[Strategy | None] = []
    is_borrowed = bool(a.strategy) and not (replicated or b.strategy or has_own_strategy(b.src))
    if is_borrowed:
        b = b._replace(strategy=a.strategy)
    for side, source in (("A", a), ("B", b)):
        call = partial(
            load,
            source,
            find_strategy=not replicated,
            open_count=open_count,
        )
        if loaded := attempt(side, call):
            catalog, strategy, _ = loaded
            is_of_a = source.strategy is a.strategy
            strategies.append(None if is_of_a and not catalog.needs_strategy else strategy)
            catalogs.append(catalog)
    raise_all(error.on_side(side) for side, error in attempt.errors.items())
    (of_a, of_b) = strategies
    if is_borrowed and of_a is not None and of_b is not None:
        of_b = of_a  # the same object says that it was borrowed
    return catalogs[0], catalogs[1], of_a, of_b


def has_own_strategy(src: str | Catalog, but: Strategy | None = None) -> bool:
    """Return whether a manifest has the layouts of a checkpoint, or names a strategy that is there.

    ``but`` is a strategy that does not count, whose files are compared with the recorded one.
    """
    recorded = _recorded(src.root if isinstance(src, Catalog) else src)
    if recorded is None or not (recorded.written or recorded.find_files()):
        return False
    return but is None or recorded.named is None or not recorded.named.is_of(but.files)


def _recorded(folder: str) -> RecordedSet | None:
    # Imported late, as most checkpoints have no manifest.
    from ckpttool.transaction.set_strategy import read_recorded

    return read_recorded(folder)
