"""``ckpttool diff``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import click

import ckpttool
from ckpttool.cli import documents, options, workflow
from ckpttool.cli.params import Number
from ckpttool.cli.progress import show_progress
from ckpttool.errors import CkptToolError, raise_all, with_side
from ckpttool.model.catalog import RankCatalog

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.strategy import Strategy
    from ckpttool.model.tensors import Secret
    from ckpttool.planning.unlisted import Unlisted


@click.command(
    help="""\b
    ckpttool diff checkpoint/ merged.h5 -s strategy.ckpt

    Compare two checkpoints, tensor by tensor, whatever their layouts and formats are.  A and B are
    folders of rank folders, or single files.  Of replicas the lowest rank's is compared, and of the
    others samples are looked at; verify --deep compares all of them.  Exit code 0 if A and B are
    equal, 1 if they or replicas differ, 2 and more if they could not be compared.
    """,
)
@click.argument("a", type=options.EXISTING)
@click.argument("b", type=options.EXISTING)
@click.option(
    "-s",
    "--strategy",
    "a_strategy",
    type=options.EXISTING,
    multiple=True,
    metavar="FILE",
    help="Strategy file of A, and of B if it has no other (see --replicated); a single file needs "
    "none.  Again, or a folder, for several pipeline stages.",
)
@click.option(
    "--b-strategy",
    type=options.EXISTING,
    multiple=True,
    metavar="FILE",
    help="Strategy file of B, if it is not that of A.",
)
@click.option(
    "--replicated",
    is_flag=True,
    help="A folder without a strategy of its own (-s of A, --b-strategy of B) holds everything on "
    "every rank.",
)
@click.option(
    "--atol",
    type=Number(),
    metavar="X",
    help="Compare numbers, not bytes: |a - b| <= ATOL + RTOL * |b| is equal, and so are NaN and "
    "NaN.  [default: 0]",
)
@click.option("--rtol", type=Number(), metavar="X", help="See --atol.  [default: 0]")
@click.option(
    "--unlisted",
    type=click.Choice(["rank", "first", "drop"]),
    default="rank",
    show_default=True,
    help="A parameter that is not in the strategy and differs between ranks: compared rank by "
    "rank, or only the lowest rank's, or not at all.",
)
@options.trust_strategy
@options.optimizer_shard
@options.step
@click.option("--b-step", metavar="STEP", help="Step of B, if it is not that of A.")
@options.pattern
@click.option("--b-pattern", metavar="PATTERN", help="Pattern of B, if it is not that of A.")
@options.dec_key_file
@options.engine
@options.limit
@options.as_json
@options.quiet
@options.debug
def diff(
    a: str,
    b: str,
    a_strategy: tuple[str, ...],
    b_strategy: tuple[str, ...],
    replicated: bool,
    atol: float | None,
    rtol: float | None,
    unlisted: Unlisted,
    trust_strategy: bool,
    optimizer_shard: int | None,
    step: str | None,
    b_step: str | None,
    pattern: str | None,
    b_pattern: str | None,
    key: Secret | None,
    engine: str,
    limit: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare two checkpoints, tensor by tensor."""
    options.answer_by_exit_code()
    a, b = options.as_shared(engine, a, b)
    sides = _load(
        _Side(a, a_strategy, pattern, step),
        _Side(b, b_strategy, b_pattern or pattern, b_step or step),
        key,
        replicated,
    )
    tolerance = None
    if atol is not None or rtol is not None:
        tolerance = ckpttool.Tolerance(atol or 0.0, rtol or 0.0)
    with ckpttool.open_engine(engine) as executor:
        found = ckpttool.diff(
            *sides,
            replicated=replicated,
            unlisted=unlisted,
            trust_strategy=trust_strategy,
            optimizer_shard=optimizer_shard,
            tolerance=tolerance,
            executor=executor,
            open_progress=lambda total: show_progress("comparing", total, quiet or as_json),
        )
    documents.print_comparison(a, b, found, tolerance, limit, as_json, quiet)
    if not found.is_equal:
        click.get_current_context().exit(1)


class _Side(NamedTuple):
    """The options of one side of a comparison."""

    path: str
    strategy: tuple[str, ...]
    pattern: str | None
    step: str | None


def _load(
    a: _Side, b: _Side, key: Secret | None, replicated: bool
) -> tuple[Catalog, Catalog, Strategy | None, Strategy | None]:
    """Read catalogs and strategies of both sides, and raise all their problems at once.

    B takes the strategy of A if it has no strategy of its own, unless its ranks hold full tensors.
    Single files and checkpoints that describe themselves need no strategy.
    """
    errors: list[CkptToolError] = []
    catalogs: list[Catalog] = []
    strategies: list[Strategy | None] = []
    for side, (path, own, pattern, step) in (("A", a), ("B", b)):
        given = own if replicated else own or a.strategy
        read = partial(
            workflow.load, path, pattern, step, given, key=key, find_strategy=not replicated
        )
        found: list[CkptToolError] = []
        loaded = workflow.attempt(read, found)
        errors += [with_side(error, side) for error in found]
        if loaded is not None:
            catalog, strategy, _ = loaded
            needs_none = not isinstance(catalog, RankCatalog)
            strategies.append(None if given is a.strategy and needs_none else strategy)
            catalogs.append(catalog)
    raise_all(errors)
    return catalogs[0], catalogs[1], strategies[0], strategies[1]
