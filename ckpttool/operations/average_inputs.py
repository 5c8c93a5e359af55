"""Load the inputs of an average: steps of one run or several checkpoints, and their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from shlex import quote

from msgspec.structs import replace

from ckpttool.concurrency import OpenCount, no_count
from ckpttool.discovery.file_names import label_of, step_of
from ckpttool.discovery.scan import Steps
from ckpttool.model.catalog import Catalog
from ckpttool.model.strategy import Strategy
from ckpttool.operations.load import (
    Attempts,
    AverageInput,
    Mean,
    Source,
    StrategySource,
    has_own_strategy,
    load,
    load_steps,
    read_strategy,
)
from ckpttool.planning.averaging import find_weights
from ckpttool.problems import CkptToolError, Diagnostic, Diagnostics, PlanError, raise_all
from ckpttool.wording import count, shorten

_KINDS = "step", "epoch", "label"  # of numbers in `Step`


def load_average(
    inputs: Sequence[Source], mean: Mean, replicated: bool, open_count: OpenCount = no_count
) -> list[AverageInput]:
    """Read the inputs of an average and their strategies, and raise all their problems at once.

    Parameters
    ----------
    inputs
        The checkpoints.  An input without a strategy gets the one in its manifest, else the shared
        one if it needs any, else one that lies with it.
    mean
        Their weights.
    replicated
        Whether every rank of an input without a strategy holds full tensors.
    open_count
        Shows how many headers were read.
    """
    weights, shared, steps = mean.weights, mean.shared, mean.steps
    if steps is not None:
        if len(inputs) != 1 or weights[0] is not None or inputs[0].options.step is not None:
            message = "the steps of a run are those of one folder, without step and weight"
            hint = "one input, or inputs one by one without --steps"
            raise PlanError([Diagnostic("options", message, hint=hint)])
        (run,) = inputs
        of_run = run._replace(strategy=run.strategy or shared)
        inputs = [
            run._replace(options=step.options) for step in select_steps(of_run, steps, open_count)
        ]
        weights = [None] * len(inputs)
    names = [
        source.src.root if isinstance(source.src, Catalog) else source.src for source in inputs
    ]
    attempt = Attempts()
    more = _propose_steps(inputs[0], open_count) if len(inputs) == 1 else ""
    find = partial(find_weights, normalize=mean.normalize, more=more)
    shares = attempt("weights", partial(find, weights, names))
    loaded = attempt(
        "inputs",
        partial(_load_inputs, inputs, shared, replicated=replicated, open_count=open_count),
    )
    raise_all(attempt.errors.values())
    assert shares is not None, "its error was raised"
    assert loaded is not None, "its error was raised"
    return [AverageInput(*source, weight) for source, weight in zip(loaded, shares, strict=True)]


def _load_inputs(
    inputs: Sequence[Source], shared: StrategySource, *, replicated: bool, open_count: OpenCount
) -> list[tuple[Catalog, Strategy | None]]:
    """Read the catalogs and the strategies of several inputs; see `load_average`."""
    attempt, sources, is_used = Attempts(), [], False
    common = attempt("-s", partial(read_strategy, shared)) if shared else None
    for number, source in enumerate(inputs, 1):
        is_shared = False
        if common is not None and source.strategy == ():
            is_shared = not has_own_strategy(source.src, but=common)
            source = source._replace(strategy=common if is_shared else ())
        call = partial(_load_input, source, find_strategy=not replicated, open_count=open_count)
        if loaded := attempt(f"input {number}", call):
            catalog, strategy, _ = loaded
            is_used |= is_shared and catalog.needs_strategy
            needs_none = is_shared and not catalog.needs_strategy
            sources.append((catalog, None if needs_none else strategy))
    if common is not None and not is_used and not attempt.errors:
        message, hint = "no input needs this strategy", "the same command without -s"
        raise PlanError([Diagnostic("options", message, hint=hint, where=common.origin)])
    raise_all(
        error if what == "-s" else error.on_side(what) for what, error in attempt.errors.items()
    )
    return sources


def _load_input(
    source: Source, *, find_strategy: bool, open_count: OpenCount
) -> tuple[Catalog, Strategy | None, Strategy | None]:
    """Load an input; a step must not be given for one without steps."""
    loaded = load(source, find_strategy=find_strategy, open_count=open_count)
    catalog, step = loaded[0], source.options.step
    has_step = catalog.step is not None or label_of(Path(catalog.root).name) is not None
    if step is not None and catalog.is_merged and not has_step:
        message, hint = f"one checkpoint without steps, not step {step}", "the input without a step"
        raise PlanError([Diagnostic("source", message, hint=hint, where=catalog.root)])
    return loaded


def select_steps(
    source: Source, numbers: Sequence[int | str], open_count: OpenCount
) -> list[Source]:
    """Return the checkpoint of each of some steps of a folder.

    Raises
    ------
    PlanError
        A number is that of no step, or of several; or the folder lacks steps.
    """
    diagnostics = Diagnostics()
    steps = load_steps(source, diagnostics, open_count=open_count)
    raise_all(diagnostics.failures)
    names = [step.name for step in steps.steps if step.name is not None]
    # Names have an epoch and a step, as 10_2; the numbers are either or both, and all of one kind.
    kinds = [*map(partial(_by_number, steps), _KINDS[:2] if isinstance(numbers, range) else _KINDS)]
    # A billion numbers may be wanted, so those that are there are looked up among them.
    of_number = max(kinds, key=lambda kind: sum(number in numbers for number in kind))
    wanted = [number for number in of_number if number in numbers]
    problems = []
    for number in wanted:
        if len(of_number[number]) > 1:
            message = f"{number} is the number of several steps"
            facts = shorten(of_number[number], 3)
            hint = "the inputs one by one, as RUN,step=STEP"
            problem = Diagnostic("missing_step", message, hint=hint, facts=facts, where=steps.path)
            problems.append(problem)
    if missing := len(numbers) - len(wanted):
        first = [*islice((number for number in numbers if number not in of_number), 3)]
        more = f" and {missing - 3} more" if missing > 3 else ""
        message = f"{count(missing, 'step')} not in the folder: {', '.join(map(str, first))}{more}"
        facts = f"it has {shorten(names, 6)}" if names else "it has no steps"
        hint = f"ckpttool inspect {quote(steps.path)} --steps"
        problem = Diagnostic("missing_step", message, hint=hint, facts=facts, where=steps.path)
        problems.append(problem)
    if problems:
        raise PlanError(problems)
    chosen = [of_number[number][0] for number in numbers]
    return [source._replace(options=replace(source.options, step=name)) for name in chosen]


def _propose_steps(source: Source, open_count: OpenCount) -> str:
    """Return what makes one input several: the last of its steps, or another input."""
    if isinstance(source.src, str) and source.options.step is None:
        with suppress(CkptToolError):  # which loading the input reports
            steps = load_steps(source, Diagnostics(), open_count=open_count)
            for kind in _KINDS:
                of_number = _by_number(steps, kind)
                numbers = [n for n, names in of_number.items() if len(names) == 1]
                if len(numbers) == len(of_number) > 1:
                    return f"--steps {','.join(map(str, numbers[-3:]))}"
    return "a second input"


def _by_number(steps: Steps, kind: str) -> Mapping[int | str, list[str]]:
    """Return what ``--step`` takes for each number of a kind, the oldest step first."""
    names: dict[int | str, list[str]] = {}
    for one in steps.steps:
        if one.name is not None:
            step = step_of(f"-{one.step}")
            number = str(one.step if step is None else getattr(step, kind))
            if step is not None or number.isdecimal():
                key = int(number) if number.isdecimal() else number
                names.setdefault(key, []).append(one.name)
    return names
