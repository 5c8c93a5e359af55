"""``ckpttool merge``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

import ckpttool
from ckpttool.cli import options, workflow
from ckpttool.cli.params import PathName
from ckpttool.cli.workflow import convert

if TYPE_CHECKING:
    from ckpttool.model.tensors import Secret
    from ckpttool.planning.unlisted import Unlisted


@click.command(
    help="""\b
    ckpttool merge checkpoint/ -s strategy.ckpt -o merged.h5

    Merge the files of all ranks into one file that holds every parameter undivided.  SRC is a
    folder of rank folders, or one that describes itself (MindFormers' Checkpoint 2.0) and needs
    no -s, or the output folder of a MindFormers run, whose strategies are found without -s; or
    one file or a folder with an index (param_name_map.json, model.safetensors.index.json), which
    is then converted to another format.
    """,
)
@options.source
@click.option(
    "-o",
    "--output",
    "path",
    type=PathName(),
    required=True,
    metavar="OUT",
    help="Output file; a folder with --max-shard-size.",
)
@options.src_strategy
@options.step
@options.pattern
@options.dec_key_file
@options.replicated
@options.unlisted
@options.trust_strategy
@options.optimizer_shard
@options.strict
@options.check_replicas
@click.option(
    "--format",
    type=options.FORMAT_CHOICE,
    help="Format of the output.  [default: by the ending of OUT, else hdf5]",
)
@options.max_shard_size
@options.crc
@options.part
@options.engine
@options.max_memory
@options.overwrite
@options.resume
@options.as_json
@options.quiet
@options.debug
def merge(
    src: str,
    path: str,
    src_strategy: tuple[str, ...],
    step: str | None,
    pattern: str | None,
    key: Secret | None,
    replicated: bool,
    unlisted: Unlisted | None,
    trust_strategy: bool,
    optimizer_shard: int | None,
    strict: bool,
    check_replicas: bool,
    format: str | None,
    max_part_bytes: int | None,
    crc: bool,
    part: tuple[int, int] | None,
    engine: str,
    max_memory: int | None,
    overwrite: bool,
    resume: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Merge the files of all ranks into one."""
    options.check_source(src_strategy, replicated)
    chosen = options.output_format(path, format, is_folder=max_part_bytes is not None)
    options.check_crc(crc, chosen)
    src, path = options.as_shared(engine, src, path)
    catalog, strategy, _ = workflow.load(
        src, pattern, step, src_strategy, key=key, find_strategy=not replicated
    )
    convert(
        lambda executor, open_progress: ckpttool.plan_merge(
            catalog,
            strategy,
            path,
            chosen,
            replicated=replicated,
            unlisted=unlisted,
            trust_strategy=trust_strategy,
            optimizer_shard=optimizer_shard,
            max_part_bytes=max_part_bytes,
            strict=strict,
            check_replicas=check_replicas,
            crc=crc,
            overwrite=overwrite,
            resume=resume,
            executor=executor,
            part=part,
            open_progress=open_progress,
        ),
        engine,
        max_memory,
        as_json,
        quiet,
    )
