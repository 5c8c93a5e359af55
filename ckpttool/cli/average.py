"""``ckpttool average``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ckpttool.cli import options
from ckpttool.cli.params import INPUT, STEPS, excluding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpttool.checkpoint.checkpoint import ResolveOptions
    from ckpttool.cli.options import ReportOptions, Side
    from ckpttool.execution.executors import RunOptions
    from ckpttool.transaction.resume import OutputOptions


class Inputs(NamedTuple):
    """The inputs on the command line, and their weights."""

    sides: Sequence[Side]
    weights: Sequence[float | None]
    shared: tuple[str, ...]
    steps: Sequence[int | str] | None
    normalize: bool | None


def _build(**values: Any) -> Inputs:
    of_all = {name: values[name] for name in ("pattern", "key")}
    sides = [
        options.make_side(input.path, input.strategy, step=input.step, **of_all)
        for input in values["inputs"]
    ]
    weights = [input.weight for input in values["inputs"]]
    if values["normalize"] and values["is_sum"]:
        raise excluding("--sum", "--normalize")
    normalize = None if values["is_sum"] else values["normalize"]
    return Inputs(sides, weights, values["shared"], values["steps"], normalize)


def _argument(name: str, heading: str) -> options.Decorator:
    return click.argument(name, nargs=-1, required=True, type=INPUT, metavar="INPUT...")


inputs = options.OptionGroup(
    options.SOURCE,
    "inputs",
    _build,
    {
        "inputs": _argument,
        "shared": options.strategy("inputs that name none", "-s"),
        "steps": options.option(
            "Average these steps of one folder: 1,3,4 or FIRST..LAST:STRIDE.", type=STEPS
        ),
        "normalize": options.flag("Divide the weights by their sum, which need not be 1."),
        "is_sum": options.flag("Add the inputs: A:1 B:-1 is a difference.", "--sum"),
        "pattern": options.source_options.parameters["pattern"],
        "key": options.source_options.parameters["key"],
    },
)


@click.command(
    cls=options.GroupedCommand,
    help="""\b
    ckpttool average runs/a:0.25 runs/b:0.75 \\
        -s strategy.ckpt -o mean.h5

    Write the weighted mean of several checkpoints under any layouts and formats.  INPUT is
    PATH[,strategy=FILE][,step=STEP][:WEIGHT]; without weights all count the same.  What is no
    weight of the model, such as optimizer state, is that of the last input.
    """,
)
@inputs()
@options.resolve_options(*(options.resolve_options.parameters.keys() - {"lora"}))
@options.output_path(
    "path", "Output file; with -d, or --max-shard-size, a folder.", "mean.h5", "OUT"
)
@options.strategy("the target, to write rank files", "-d")("dst_strategy", options.OUTPUT)
@options.output_options(
    format=options.format_of_output("by the suffix of OUT; hdf5 without one"),
)
@options.run_options()
@options.report_options(dry_run=options.DRY_RUN, verbose=options.VERBOSE)
def average(
    inputs: Inputs,
    resolve: ResolveOptions,
    path: str,
    dst_strategy: tuple[str, ...],
    output: OutputOptions,
    run: RunOptions,
    report: ReportOptions,
) -> None:
    """Write the weighted mean of several checkpoints."""
    from ckpttool.cli import workflow
    from ckpttool.operations.jobs import Order
    from ckpttool.operations.load import Mean

    if not dst_strategy:
        options.require_flag("-d", options.OF_RANKS)
    elif output.max_shard_bytes is not None:
        raise excluding("--max-shard-size", "-d")
    mean = Mean(inputs.weights, inputs.shared, inputs.steps, inputs.normalize)
    sources = [side.source for side in inputs.sides]
    order = Order("average", sources, path, dst_strategy, resolve, output, mean)
    workflow.run_order(order, run, report)
