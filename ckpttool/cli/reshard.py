"""``ckpttool reshard``."""

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
    ckpttool reshard checkpoint/ -s strategy.ckpt -d new_strategy.ckpt -o new/ --format ckpt

    Cut a checkpoint anew for another strategy, from any number of ranks to any other:
    DIR/rank_R/PREFIXR.ckpt (.h5, .safetensors) for every rank R.  No merged file is made on the
    way.  Of the output folder of a MindFormers run the strategies are found without -s; a
    checkpoint that describes itself (MindFormers' Checkpoint 2.0) needs none.
    """,
)
@options.source
@options.out_folder
@options.src_strategy
@options.dst_strategy
@options.step
@options.pattern
@options.dec_key_file
@options.unlisted
@options.not_in_target
@options.trust_strategy
@options.optimizer_shard
@options.strict
@options.check_replicas
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
def reshard(
    src: str,
    folder: str,
    src_strategy: tuple[str, ...],
    dst_strategy: tuple[str, ...],
    step: str | None,
    pattern: str | None,
    key: Secret | None,
    unlisted: Unlisted | None,
    not_in_target: NotInTarget,
    trust_strategy: bool,
    optimizer_shard: int | None,
    strict: bool,
    check_replicas: bool,
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
    """Cut a checkpoint anew for another strategy."""
    options.check_crc(crc, format)
    src, folder = options.as_shared(engine, src, folder)
    catalog, strategy, target = workflow.load(
        src, pattern, step, src_strategy, dst_strategy, key=key
    )
    assert target is not None, "click requires -d"
    convert(
        lambda executor, open_progress: ckpttool.plan_reshard(
            catalog,
            strategy,
            target,
            folder,
            format,
            prefix=prefix,
            ranks=ranks,
            unlisted=unlisted,
            not_in_target=not_in_target,
            trust_strategy=trust_strategy,
            optimizer_shard=optimizer_shard,
            strict=strict,
            check_replicas=check_replicas,
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
