"""``ckpttool split``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, workflow
from ckpttool.cli.workflow import convert

if TYPE_CHECKING:
    from ckpttool.model.plan import NotInTarget
    from ckpttool.model.tensors import Secret
    from ckpttool.planning.unlisted import Unlisted


@click.command(
    help="""\b
    ckpttool split merged.h5 -d strategy.ckpt -o sliced/ --format ckpt

    Cut an undivided checkpoint for the ranks of a strategy: DIR/rank_R/PREFIXR.ckpt (.h5,
    .safetensors) for every rank R.  SRC is one file, a folder with an index
    (param_name_map.json, model.safetensors.index.json), or a folder with rank_0/ alone in it;
    with --replicated also rank folders that each hold everything, and one rank's file of them.
    """,
)
@options.source
@options.out_folder
@options.dst_strategy
@options.step
@options.pattern
@options.dec_key_file
@options.replicated
@options.unlisted
@options.strict
@options.not_in_target
@options.format
@options.prefix
@options.ranks
@options.write_strategy
@options.crc
@options.part
@options.engine
@options.max_memory
@options.overwrite
@options.resume
@options.as_json
@options.quiet
@options.debug
def split(
    src: str,
    folder: str,
    dst_strategy: tuple[str, ...],
    step: str | None,
    pattern: str | None,
    key: Secret | None,
    replicated: bool,
    unlisted: Unlisted | None,
    strict: bool,
    not_in_target: NotInTarget,
    format: str,
    prefix: str,
    ranks: tuple[int, ...] | None,
    strategy_path: str | None,
    crc: bool,
    part: tuple[int, int] | None,
    engine: str,
    max_memory: int | None,
    overwrite: bool,
    resume: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Cut an undivided checkpoint for the ranks of a strategy."""
    options.check_crc(crc, format)
    src, folder = options.as_shared(engine, src, folder)
    catalog, _, target = workflow.load(
        src, pattern, step, (), dst_strategy, key=key, find_strategy=False
    )
    assert target is not None, "click requires -d"
    convert(
        lambda executor, open_progress: ckpttool.plan_split(
            catalog,
            target,
            folder,
            format,
            prefix=prefix,
            ranks=ranks,
            replicated=replicated,
            unlisted=unlisted,
            strict=strict,
            not_in_target=not_in_target,
            crc=crc,
            overwrite=overwrite,
            resume=resume,
            executor=executor,
            part=part,
            open_progress=open_progress,
            strategy_path=strategy_path,
        ),
        engine,
        max_memory,
        as_json,
        quiet,
    )
