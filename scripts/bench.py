"""Measures ckpttool against `cp -r` on checkpoints that it makes: time and memory.

    python scripts/bench.py --sizes 1,4,8 --rounds 5 --work /fast/disk --json bench.json

In every round each case is run once, in turn, so that a machine that is slow for a while is slow
for all of them.  Seconds are medians of the rounds, ratios are medians of the ratios of each round.
`cp` leaves its output in memory; ckpttool has it on disk when it ends.  So there are two ratios:
`ratio` is command against command, `+ sync` counts for both the time until all of it is on disk.
Both are for each byte that is written; `per read` is for each byte of the sources that is needed.
With `--other PYTHON` the ckpttool of that Python runs each case too, in turn; `other` is the
time of this one against that one's.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import click

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # measured is the code beside this script, installed or not

from benchmark.cases import (  # noqa: E402
    AVERAGED,
    EXPORTED,
    Case,
    beside_other,
    prepare_averages,
    prepare_casts,
    prepare_copies,
    prepare_exports,
    prepare_index,
    prepare_many,
    prepare_ranks,
    prepare_start,
    prepare_two,
    prepare_virtual,
)
from benchmark.model import Mesh, make_model  # noqa: E402
from benchmark.plot import label, plot  # noqa: E402
from benchmark.report import (  # noqa: E402
    Summary,
    document,
    machine,
    readme_lines,
    summarize,
    table,
)
from benchmark.stopwatch import Run, can_drop_caches, measure  # noqa: E402

GIB = 1 << 30
DTYPES = {"float32": "Float32", "bfloat16": "BFloat16"}
START_ROUNDS = 15  # the start of a program is short, and so its time is uncertain
GROUPS = ("copy", "cast", "average", "export", "virtual", "start", "index", "many", "ranks")


class Bench:
    """Everything that was measured so far."""

    def __init__(self, cold: bool, other: str | None) -> None:
        self.cold = cold
        self.other = other
        self.runs: list[Run] = []
        self.summaries: list[Summary] = []

    def run(self, cases: list[Case], size: str, rounds: int) -> None:
        """Measure cases in turn, and print what came out."""
        runs = []
        if self.other is not None:
            cases = [*beside_other(cases, self.other)]
        for round in range(rounds):
            for case in cases:
                click.echo(f"{size} {case.name}, {round + 1}/{rounds}".lstrip(), err=True)
                runs.append(measure(case, size, round, cold=self.cold))
        summaries = summarize(runs, cases)
        self.runs += runs
        self.summaries += summaries
        click.echo("\n".join(table(summaries)))


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        return tuple(sorted(float(part) for part in value.split(",")))
    except ValueError as error:
        raise click.BadParameter("numbers with commas between, such as 0.25,1,4") from error


def _words(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    return value.split(",")


def _program(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    return value and str(Path(shutil.which(value) or value).absolute())


@click.command(help=(__doc__ or "").replace("\n    python", "\n\b\n    python"))
@click.option("--sizes", default="1", callback=_numbers, help="GiB of the model.  [default: 1]")
@click.option("--rounds", default=3, show_default=True, help="How often each case is run.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True)
@click.option("--tp", default=8, show_default=True, help="Tensor parallel ranks of the source.")
@click.option("--dp", default=1, show_default=True, help="Data parallel ranks.")
@click.option("--pp", default=1, show_default=True, help="Pipeline stages.")
@click.option("--optimizer-shard", is_flag=True, help="Data parallel ranks share slices out.")
@click.option("--moments", is_flag=True, help="With the two moments of Adam, in float32.")
@click.option(
    "--axis",
    type=click.Choice(["0", "last", "mixed"]),
    default="0",
    show_default=True,
    help="Axis of the matrices that the source cuts.",
)
@click.option(
    "--groups",
    default=",".join(GROUPS),
    show_default=True,
    callback=_words,
    help="What to measure.",
)
@click.option(
    "--index-ranks",
    default=1024,
    show_default=True,
    help="Ranks whose headers are read: 64, 128, ... 1024.",
)
@click.option("--index-tensors", default=600, show_default=True, help="Tensors of each.")
@click.option(
    "--many-tensors", default=100_000, show_default=True, help="Tensors of the merge of small ones."
)
@click.option(
    "--many-outputs", default=1024, show_default=True, help="Ranks of the reshard to many files."
)
@click.option(
    "--ranks",
    default="256,1024,4096,16384",
    show_default=True,
    callback=_numbers,
    help="Ranks whose headers are made: multiples of 32.",
)
@click.option("--ranks-tensors", default=2000, show_default=True, help="Tensors of each.")
@click.option("--warm", is_flag=True, help="Do not empty the page cache before each run.")
@click.option(
    "--other",
    metavar="PYTHON",
    callback=_program,
    help="A Python with another ckpttool, which runs each case in turn with this one.",
)
@click.option(
    "--mindspore",
    metavar="PYTHON",
    callback=_program,
    help="A Python with MindSpore, to compare with.",
)
@click.option(
    "--mergekit",
    metavar="PYTHON",
    callback=_program,
    help="A Python with mergekit, to compare the average of two models with.",
)
@click.option(
    "--work", type=click.Path(file_okay=False), help="Folder for the files.  [default: temporary]"
)
@click.option("--keep", is_flag=True, help="Leave the checkpoints in the folder.")
@click.option("--json", "json_path", metavar="FILE", help="Write everything that was measured.")
@click.option("--svg", "svg_path", metavar="FILE", help="Draw time and memory against size.")
@click.option("--markdown", is_flag=True, help="Print all medians once more, as for a README.")
def main(
    sizes: tuple[float, ...],
    rounds: int,
    dtype: str,
    tp: int,
    dp: int,
    pp: int,
    optimizer_shard: bool,
    moments: bool,
    axis: str,
    groups: list[str],
    index_ranks: int,
    index_tensors: int,
    many_tensors: int,
    many_outputs: int,
    ranks: tuple[float, ...],
    ranks_tensors: int,
    warm: bool,
    other: str | None,
    mindspore: str | None,
    mergekit: str | None,
    work: str | None,
    keep: bool,
    json_path: str | None,
    svg_path: str | None,
    markdown: bool,
) -> None:
    """Measure, print, and write the report."""
    if not set(groups) <= set(GROUPS):
        raise click.UsageError(f"--groups are some of {','.join(GROUPS)}.")
    if work is not None:
        Path(work).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ckpttool-bench-", dir=work)).absolute()
    bench = Bench(not warm and can_drop_caches(), other)
    facts = {**machine(folder), "page_cache": "emptied before each run" if bench.cold else "kept"}
    click.echo("\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in facts.items()))
    try:
        if "copy" in groups:
            mesh = Mesh(tp, dp, pp, axis, optimizer_shard)
            for size in sizes:
                model = make_model(int(size * GIB), DTYPES[dtype], moments)
                _check_space(folder, 4 * model.nbytes * (dp if not optimizer_shard else 1))
                cases = prepare_copies(folder / label(size), model, mesh, mindspore)
                bench.run(cases, label(size), rounds)
                if not keep:
                    shutil.rmtree(folder / label(size))
        if "cast" in groups:
            for size in sizes:
                model = make_model(int(size * GIB), DTYPES[dtype], moments=True)
                _check_space(folder, 3 * model.nbytes)
                cases = prepare_casts(folder, model, Mesh(tp, axis=axis))
                bench.run(cases, label(size), rounds)
                shutil.rmtree(folder / "cast")
        if "average" in groups:
            for size in sizes:
                model = make_model(int(size * GIB), DTYPES[dtype], moments=True)
                _check_space(folder, (AVERAGED + 1) * model.nbytes)
                cases = prepare_averages(folder, model, Mesh(tp, axis=axis))
                bench.run(cases, label(size), rounds)
                shutil.rmtree(folder / "average")
        if "average" in groups and mergekit is not None:
            for size in sizes:
                _check_space(folder, int(4 * size * GIB))
                cases = prepare_two(folder, int(size * GIB), mergekit)
                bench.run(cases, label(size), rounds)
                shutil.rmtree(folder / "two")
        if "export" in groups:
            for size in sizes:
                _check_space(folder, int(4 * size * GIB))
                for name in EXPORTED:
                    cases = prepare_exports(folder, name, int(size * GIB), Mesh(tp))
                    bench.run(cases, label(size), rounds)
                    shutil.rmtree(folder / "export")
        if "virtual" in groups:
            for size in sizes:
                model = make_model(int(size * GIB), DTYPES[dtype], moments)
                _check_space(folder, 5 * model.nbytes)
                bench.run(prepare_virtual(folder / "virtual", model, tp), label(size), rounds)
                shutil.rmtree(folder / "virtual")
        if "start" in groups:
            bench.run(prepare_start(folder), "", max(rounds, START_ROUNDS))
        if "index" in groups:
            _check_space(folder, 4096 * index_ranks * index_tensors)  # a block for each header
            bench.run(prepare_index(folder, index_ranks, index_tensors), "", rounds)
        if "many" in groups:
            bench.run(prepare_many(folder, many_tensors, many_outputs), "", rounds)
        for number in map(int, ranks) if "ranks" in groups else ():
            _check_space(folder, number * ranks_tensors * 128)
            bench.run(prepare_ranks(folder, number, ranks_tensors), "", rounds)
            if not keep:
                shutil.rmtree(folder / f"ranks_{number}")
    finally:
        if not keep:
            shutil.rmtree(folder)
    if markdown:
        click.echo("\n".join(readme_lines(facts, bench.summaries)))
    _report(bench, facts, sizes, json_path, svg_path)


def _check_space(folder: Path, nbytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise click.ClickException(f"{folder}: about {nbytes} bytes are needed, {free} are free")


def _report(
    bench: Bench,
    facts: dict[str, str | int],
    sizes: tuple[float, ...],
    json_path: str | None,
    svg_path: str | None,
) -> None:
    """Write the files that were asked for; a case that failed ends the program with 1."""
    if json_path is not None:
        about: dict[str, object] = {
            "command": shlex.join(["scripts/bench.py", *sys.argv[1:]]),
            "machine": facts,
        }
        text = json.dumps(document(about, bench.runs, bench.summaries), indent=1)
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    if svg_path is not None:
        written = [one for one in bench.summaries if one.nbytes and not one.error]
        Path(svg_path).write_text(plot(written, sizes), encoding="utf-8")
    ours = (one for one in bench.summaries if "MindSpore" not in one.case)
    failed = [one for one in ours if one.error and not one.case.endswith(", other")]
    if failed:
        raise click.ClickException(f"failed: {', '.join(one.case for one in failed)}")


if __name__ == "__main__":
    main()
