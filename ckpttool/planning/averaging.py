"""Plan a weighted mean: the transfers of several plans become the terms of one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from ckpttool.checkpoint.checkpoint import Checkpoint
from ckpttool.checks.missing import find_shared_problems
from ckpttool.formats.base import PROVENANCE
from ckpttool.model.belonging import WEIGHT
from ckpttool.model.catalog import Catalog
from ckpttool.model.dtypes import CASTABLE, INEXACT
from ckpttool.model.plan import Plan, Term, Transfer
from ckpttool.problems import Diagnostic, Diagnostics, PlanError
from ckpttool.wording import count, format_shape, shorten

TOLERANCE = 1e-9  # by which the sum of weights may differ from 1
_CHOOSE = "--include and --exclude with patterns of what all inputs have"


Planned: TypeAlias = tuple[Checkpoint | None, Plan | None]


def find_weights(
    given: Sequence[float | None],
    names: Sequence[str],
    *,
    normalize: bool | None,
    more: str = "a second input",
) -> tuple[float, ...]:
    """Return the weights of inputs: equal ones if none is given, with a sum of 1.

    ``normalize`` divides them by their sum.  If it is None, they are those of a sum: 1 if none is
    given, else any numbers.  ``more`` says what may go with a single input.

    Raises
    ------
    PlanError
        There are fewer than two inputs, or only some have a weight; a weight is not a positive
        number, or those of a mean do not add up to 1.

    Examples
    --------
    >>> find_weights([None, None], ["a", "b"], normalize=False)
    (0.5, 0.5)
    >>> find_weights([1.0, 3.0], ["a", "b"], normalize=True)
    (0.25, 0.75)
    """
    is_sum = normalize is None

    def problems() -> Iterator[Diagnostic]:
        if len(given) < 2:
            message = f"an average needs two inputs or more, and {len(given)} was given"
            yield Diagnostic("options", message, hint=more)
        is_right = True
        without = [name for name, weight in zip(names, given, strict=True) if weight is None]
        if 0 < len(without) < len(given):
            message = f"only some inputs have a weight, {shorten(without, 3)} has none"
            yield Diagnostic("options", message, hint="a weight for each input, or for none")
        for name, weight in zip(names, given, strict=True):
            if weight is None or (math.isfinite(weight) and (is_sum or weight > 0)):
                continue
            is_right = False
            message = f"the weight {weight:g} is not {'finite' if is_sum else 'positive'}"
            hint = (
                "--sum, or a number greater than 0" if -math.inf < weight < 0 else "another number"
            )
            yield Diagnostic("options", message, hint=hint, where=name)
        if is_sum or not is_right:
            return
        known = [weight for weight in given if weight is not None and math.isfinite(weight)]
        total = sum(known)  # Inf if it overflows, where math.fsum raises an error
        if len(known) == len(given) and math.isinf(total):
            message = "the sum of the weights is too large for Float64"
            yield Diagnostic("options", message, hint="other weights")
        elif len(known) == len(given) and not normalize and abs(total - 1) > TOLERANCE:
            message = f"the sum of the weights is {math.fsum(known):.12g}, expected 1"
            yield Diagnostic("options", message, hint="--normalize, --sum, or other weights")

    if refusals := [*problems()]:
        raise PlanError(refusals)
    equal = 1.0 if is_sum else 1.0 / len(given)
    known = [equal if weight is None else weight for weight in given]
    total = math.fsum(known) if normalize else 1.0
    return tuple(weight / total for weight in known)


def average(
    planned: Sequence[Planned], weights: Sequence[float], diagnostics: Diagnostics
) -> Plan | None:
    """Return the plan of a weighted mean.

    Returns
    -------
    Plan or None
        The plan of the last input, with means of its weights; None if something is wrong.
    """
    checkpoints = [checkpoint for checkpoint, _ in planned if checkpoint is not None]
    if len(checkpoints) < len(planned):
        return None
    last = checkpoints[-1]
    wrong = [*find_shared_problems(checkpoints), *_differences(checkpoints), *_without_mean(last)]
    diagnostics.add(*wrong)
    plans = [plan for _, plan in planned if plan is not None]
    if wrong or len(plans) < len(planned):
        return None
    of_inputs = [{(of.name, of.source.only_for): of for of in plan.transfers} for plan in plans]
    roles = [
        {checkpoint.renamed.get(name, name): what for name, what in checkpoint.belongings.items()}
        for checkpoint in checkpoints
    ]
    transfers, counters = [], list[str]()
    for key, transfer in of_inputs[-1].items():
        whats = [role.get(transfer.name, WEIGHT) for role in roles]
        if any(what.role == "counter" for what in whats):
            counters.append(transfer.name)
        is_trained = all(what.is_trained for what in whats)
        if not (is_trained and transfer.source.meta.dtype in CASTABLE):
            term = replace(transfer.terms[0], input=len(plans) - 1)
            transfers.append(replace(transfer, terms=(term,)))
        elif all(key in of_input for of_input in of_inputs):
            transfers.append(_mean(transfer, [of_input[key] for of_input in of_inputs], weights))
        else:
            message = "it differs between the ranks of some inputs only"
            hint = "--unlisted first or drop"
            diagnostics.add(Diagnostic("unlike_inputs", message, hint=hint, tensor=transfer.name))
    if diagnostics.has_errors:
        return None
    if counters:
        message = f"counters, as in the last input: {shorten(counters, 3)}"
        diagnostics.add(Diagnostic("counter", message))
    return replace(
        plans[-1],
        inputs=tuple(checkpoint.catalog for checkpoint in checkpoints),
        weights=tuple(weights),
        transfers=tuple(transfers),
        confirmed=frozenset.intersection(*(plan.confirmed for plan in plans)),
        strategies=tuple(dict.fromkeys(name for plan in plans for name in plan.strategies)),
        listed={path: entry for plan in plans for path, entry in plan.listed.items()},
        provenance=_provenance(plans, weights),
    )


def _mean(last: Transfer, transfers: Sequence[Transfer], weights: Sequence[float]) -> Transfer:
    terms = (
        Term(transfer.source, weight, number)
        for number, (transfer, weight) in enumerate(zip(transfers, weights, strict=True))
    )
    return replace(last, terms=tuple(terms))


def _without_mean(last: Checkpoint) -> Iterator[Diagnostic]:
    for tensor in last.tensors:
        meta, what = tensor.meta, last.belonging(tensor.name)
        if what.is_trained and meta.dtype in INEXACT and meta.dtype not in CASTABLE:
            message, hint = f"{meta.dtype} cannot be averaged", "--exclude with these tensors"
            yield Diagnostic("unlike_inputs", message, hint=hint, tensor=meta.name)


def label(catalog: Catalog) -> str:
    """Return the name of an input, with its step if it has one."""
    return f"{catalog.root} at step {catalog.step}" if catalog.step else catalog.root


def _differences(checkpoints: Sequence[Checkpoint]) -> Iterator[Diagnostic]:
    """Yield how names, element types and full shapes differ from those of the last input."""
    labels = [label(checkpoint.catalog) for checkpoint in checkpoints]
    names = [{of.renamed.get(name, name) for name in of.metas} for of in checkpoints]
    full = [
        {checkpoint.renamed.get(it.name, it.name): it.meta for it in checkpoint.tensors}
        for checkpoint in checkpoints
    ]
    of_weights = "" if checkpoints[-1].options.tensors.weights_only else "--weights-only, or "
    for number in range(len(checkpoints) - 1):
        sides = ((number, -1), (-1, number))
        hint = f"{of_weights}{_CHOOSE}"
        if len(names[number] - names[-1]) == len(names[-1] - names[number]):
            hint += "; `ckpttool help unlike_inputs` explains"  # perhaps only names differ
        for having, lacking in sides:
            if only := sorted(names[having] - names[lacking]):
                message = f"{count(len(only), 'tensor')} only in {labels[having]}"
                facts = f"{shorten(only, 3)}; not in {labels[lacking]}"
                yield Diagnostic("unlike_inputs", message, hint=hint, facts=facts)
        for name, meta in full[-1].items():
            other = full[number].get(name)
            if other is None:
                continue
            shapes = [format_shape(of.header_shape) for of in (other, meta)]
            hint = "inputs of one model, or --exclude with these tensors"
            one, last = checkpoints[number], checkpoints[-1]
            if one.wanted_dtype(other) != last.wanted_dtype(meta):
                facts = f"{other.dtype} in {labels[number]}, {meta.dtype} in {labels[-1]}"
                message = "inputs of different types"
                is_cast = {other.dtype, meta.dtype} <= CASTABLE
                if is_cast and last.belonging(meta.name).is_trained:
                    hint = "--dtype fp32, to which both are cast"
                yield Diagnostic("unlike_inputs", message, hint=hint, facts=facts, tensor=name)
            if shapes[0] != shapes[1]:
                facts = f"{shapes[0]} in {labels[number]}, {shapes[1]} in {labels[-1]}"
                message = "inputs of different shapes"
                yield Diagnostic("unlike_inputs", message, hint=hint, facts=facts, tensor=name)


def _provenance(plans: Sequence[Plan], weights: Sequence[float]) -> dict[str, str]:
    """Return the attributes that say how the outputs are made; see `Plan.provenance`.

    They are those of the last input, and the name, the step and the weight of each.
    """
    attrs, key = dict(plans[-1].provenance), f"{PROVENANCE}src_strategy"
    if len({plan.provenance.get(key) for plan in plans}) > 1:
        attrs.pop(key, None)
    texts = []
    for plan, weight in zip(plans, weights, strict=True):
        (catalog,) = plan.checkpoints
        name = Path(os.path.abspath(catalog.root)).name  # noqa: PTH100, it resolves ".."
        texts.append(f"{name}{f' at {catalog.step}' if catalog.step else ''}: {weight!r}")
    attrs[f"{PROVENANCE}average"] = ", ".join(texts)
    return attrs
