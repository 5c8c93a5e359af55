"""``ckpttool verify``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import documents, options, workflow
from ckpttool.cli.progress import show_progress
from ckpttool.model.diagnostics import severities

if TYPE_CHECKING:
    from ckpttool.model.catalog import Catalog
    from ckpttool.model.tensors import Secret


@click.command(
    help="""\b
    ckpttool verify checkpoint/ -s strategy.ckpt --deep

    Find what is wrong with a checkpoint: files that are damaged, slices that nobody has, types and
    shapes that do not agree, ranks of different steps; with --deep also replicas that differ, NaN,
    Inf and weights that are all zero.  SRC is a folder of rank folders, or one file.  Exit code 0
    if nothing is wrong, 1 if something is, 2 and more if it could not be verified.
    """,
)
@options.source
@options.src_strategy
@options.replicated
@click.option("--deep", is_flag=True, help="Read all data, too, not only the headers.")
@click.option(
    "--ignore",
    multiple=True,
    type=click.Choice(
        [code for code, severity in severities("verify").items() if severity == "warning"]
    ),
    help="Warnings of this kind are no findings, only notes; may be given again.",
)
@options.step
@options.pattern
@options.dec_key_file
@options.verify_crc
@options.engine
@options.limit
@options.as_json
@options.quiet
@options.debug
def verify(
    src: str,
    src_strategy: tuple[str, ...],
    replicated: bool,
    deep: bool,
    ignore: tuple[str, ...],
    step: str | None,
    pattern: str | None,
    key: Secret | None,
    crc: bool,
    engine: str,
    limit: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Find what is wrong with a checkpoint."""
    options.answer_by_exit_code()
    options.check_source(src_strategy, replicated)
    (src,) = options.as_shared(engine, src)
    catalog, strategy, _ = workflow.load(
        src, pattern, step, src_strategy, key=key, find_strategy=not replicated, scan=_scan
    )
    with ckpttool.open_engine(engine) as executor:
        found = ckpttool.verify(
            catalog,
            strategy,
            replicated=replicated,
            deep=deep,
            crc=crc,
            ignore=ignore,
            executor=executor,
            open_progress=lambda total: show_progress("reading", total, quiet or as_json),
        )
    documents.print_report(found, deep, crc, limit, as_json, quiet)
    if found.findings:
        click.get_current_context().exit(1)


def _scan(
    src: str,
    pattern: str | None,
    step: str | None,
    *,
    key: Secret | None,
    on_progress: Callable[[int, int], None],
) -> Catalog:
    from ckpttool.verification.verify import scan_to_verify

    return scan_to_verify(src, pattern, step, key=key, on_progress=on_progress)
