"""Options that commands share, and the values that they become.

The key of encrypted files comes from a file or standard input only.  Others on the machine could
read an argument or a variable of the environment, and shells keep them in histories.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import click

from ckpttool.cli import params
from ckpttool.cli.params import Existing, RankList, Size, WholeNumber
from ckpttool.errors import PlanError
from ckpttool.formats.reading import why_not_a_path
from ckpttool.model.tensors import Secret, forbid_core_dumps

SIZES = (16, 24, 32)  # of every key that MindSpore takes
HEX = b"hex:"  # no key of that many digits behind it has one of these sizes
MAX_FILE_BYTES = 1024  # a larger file does not hold a key


def parse_key(data: bytes) -> Secret | None:
    r"""Return the key that a file holds, or None.

    The file holds the bytes that MindSpore took, or ``hex:`` and their digits.  One line end after
    it is ignored.

    Examples
    --------
    >>> parse_key(b"0123456789abcdef\n").reveal()
    b'0123456789abcdef'
    >>> len(parse_key(b"hex:" + b"5A" * 32))
    32
    >>> parse_key(b"too short")
    """
    for end in (b"", b"\n", b"\r\n"):
        key = data.removesuffix(end)
        if not data.endswith(end):
            continue
        if len(key) not in SIZES and key.startswith(HEX):
            try:
                key = bytes.fromhex(key.removeprefix(HEX).decode("ascii"))
            except ValueError:
                continue
        if len(key) in SIZES:
            return Secret(key)
    return None


def read_key(ctx: click.Context, param: click.Parameter, value: str | None) -> Secret | None:
    """Read the key; messages never repeat the argument, which may be the key itself."""
    if value is None:
        return None
    if why_not_a_path(value) is not None:
        raise click.BadParameter("a URL, not a path: copy the file to this host", ctx, param)
    forbid_core_dumps()
    try:
        with click.open_file(value, "rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
            if data is None:  # a read that would block
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}); it names a file that holds the key"
        raise click.BadParameter(reason, ctx, param) from None
    key = parse_key(data) if len(data) <= MAX_FILE_BYTES else None
    if key is None:
        sizes = f"{len(data)} bytes" if len(data) <= MAX_FILE_BYTES else "too many bytes"
        reason = f"the file holds {sizes}; keys have 16, 24 or 32, or are spelled hex:00ff..."
        raise click.BadParameter(reason, ctx, param)
    return key


Decorator = Callable[[Callable[..., object]], Callable[..., object]]
DEBUG = "ckpttool.debug"  # key in click's meta: whether a traceback is wanted
JOBS = "ckpttool.jobs"  # key in click's meta: what -j says
ANSWERS = "ckpttool.answers"  # key in click's meta: whether exit code 1 is no error
STOPPER = "ckpttool.stopper"  # key in click's meta: what turns signals into exceptions

FORMAT_CHOICE = click.Choice(["hdf5", "ckpt", "safetensors"])  # formats.FORMAT_NAMES, unimported
EXISTING = Existing()


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[DEBUG] = value


source = click.argument("src", type=EXISTING)


def _strategy(letter: str, side: str, of: str, required: bool) -> Decorator:
    return click.option(
        f"-{letter}",
        f"--{side}-strategy",
        f"{side}_strategy",
        type=EXISTING,
        multiple=True,
        required=required,
        metavar="FILE",
        help=f"Strategy file of the {of}, or a hand-written one (.yaml).  For several pipeline "
        "stages, repeat the option, or name a folder.",
    )


src_strategy = _strategy("s", "src", "source", required=False)
dst_strategy = _strategy("d", "dst", "target", required=True)
step = click.option(
    "--step",
    metavar="STEP",
    help="Step to take, as in the file names: 10_1.  [default: the newest that every rank has]",
)
pattern = click.option(
    "--pattern",
    metavar="PATTERN",
    help="Where the rank files are below SRC, such as 'node{rank}/CKP_1-4_32.ckpt'.",
)
dec_key_file = click.option(
    "--dec-key-file",
    "key",
    metavar="FILE",
    callback=read_key,
    help="File with the key of encrypted files, - for standard input: its 16, 24 or 32 bytes, or "
    "hex: and its digits.",
)
crc = click.option(
    "--crc",
    is_flag=True,
    help="Verify the checksum of every source file that has one, before anything is written, and "
    "store one in every output.",
)
verify_crc = click.option(
    "--crc",
    is_flag=True,
    help="Verify the checksum of every file that has one, and the tags of encrypted ones; reads "
    "them whole.",
)
out_folder = click.option(
    "-o",
    "--output",
    "folder",
    type=params.OutputFolder(),
    required=True,
    metavar="DIR",
    help="Folder for rank_0/, rank_1/, ...",
)
format = click.option(
    "--format",
    "format",
    type=FORMAT_CHOICE,
    default="hdf5",
    show_default=True,
    help="Format of the output.",
)


def _check_prefix(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if "/" in value or "\0" in value:
        raise click.BadParameter("it begins a file name, so no / can be in it")
    return value


prefix = click.option(
    "--prefix",
    default="checkpoint_",
    show_default=True,
    callback=_check_prefix,
    help="Output files are PREFIX<rank>.",
)
ranks = click.option(
    "--rank", "ranks", type=RankList(), metavar="RANKS", help="Only these target ranks: 0,3-7."
)
unlisted = click.option(
    "--unlisted",
    type=click.Choice(["rank", "first", "drop"]),
    help="What to do with a parameter that is not in the source strategy and differs between "
    "ranks.  rank: target rank r takes that of source rank r modulo source ranks; first: all take "
    "the lowest rank's; drop: leave it out.  It decides also on a tensor in hyper_param that may "
    "be one rank's slice.  [default: an error]",
)
not_in_target = click.option(
    "--not-in-target",
    type=click.Choice(["follow", "full", "drop"]),
    default="follow",
    show_default=True,
    help="What to do with a parameter that is not in the target strategy.  follow: cut optimizer "
    "state like its parameter, write the rest in full to every rank; full: write all in full; "
    "drop: leave out all but single values.",
)
trust_strategy = click.option(
    "--trust-strategy",
    is_flag=True,
    help="Skip the samples of contents that show whether the strategy belongs to these files.",
)
optimizer_shard = click.option(
    "--optimizer-shard",
    type=WholeNumber(min=1),
    metavar="N",
    help="An optimizer shard that the strategy hides: decides where contents do not tell or fit "
    "several ways; 1 for none.  It is an error if they show another.  [default: an error]",
)
max_shard_size = click.option(
    "--max-shard-size",
    "max_part_bytes",
    type=Size(),
    metavar="SIZE",
    help="Write a folder OUT of numbered files with at most SIZE of tensors each (5GB, 500MB, "
    "2GiB), and the indexes by which MindSpore and Hugging Face load it.",
)
replicated = click.option(
    "--replicated",
    is_flag=True,
    help="Every rank holds all tensors in full (data parallel, integrated_save=True); contents are "
    "compared.  If SRC is one rank's file, that file holds them.  Not with -s.",
)
strict = click.option(
    "--strict",
    is_flag=True,
    help="Refuse on every warning: replicas that replace a missing or damaged rank, layouts that "
    "are corrected, a strategy in doubt.",
)
check_replicas = click.option(
    "--check-replicas",
    is_flag=True,
    help="Before anything is written, compare all replicas of all slices byte for byte.",
)
limit = click.option(
    "--limit",
    type=WholeNumber(min=0),
    metavar="N",
    help="List at most N of what was found.  [default: 50; with --json all]",
)


max_memory = click.option(
    "--max-memory",
    type=Size(),
    metavar="SIZE",
    help="Most memory to take, 200MiB: of all processes on this host, or of each worker of a "
    "cluster.  [default: about 50 MB and 8 MiB for each worker]",
)


def _keep_jobs(ctx: click.Context, param: click.Parameter, value: int | None) -> None:
    ctx.meta[JOBS] = value


def _choose_engine(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
    """Return the engine that -j or --engine names."""
    from ckpttool.execution.executors import read_word

    jobs = ctx.meta[JOBS]
    try:
        read_word(value or "threads")
        read_word(f"threads:{jobs or 1}")
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if jobs is None:
        return value or "threads"
    if value not in (None, "threads", f"threads:{jobs}"):
        raise click.UsageError(f"-j {jobs} is short for --engine threads:{jobs}, not {value}.")
    return f"threads:{jobs}"


def engine(command: Callable[..., object]) -> Callable[..., object]:
    """Add the options -j and --engine; the command receives one word, ``engine``."""
    jobs = click.option(
        "-j",
        "--jobs",
        type=WholeNumber(min=1),
        metavar="N",
        expose_value=False,
        is_eager=True,
        callback=_keep_jobs,
        help="Threads: short for --engine threads:N.",
    )
    word = click.option(
        "--engine",
        metavar="ENGINE",
        callback=_choose_engine,
        help="Who does the work: threads[:N], processes[:N], a Dask cluster (dask:ADDRESS, "
        "dask:SCHEDULER_FILE), or mpi.  [default: threads, one for each processor, at most 8]",
    )
    return jobs(word(command))


part = click.option(
    "--part",
    type=params.PartOf(),
    metavar="K/N",
    help="Write only the K-th of N parts of the output files, about equal in size, as in a job "
    "array; ckpttool finalize looks whether all are there.",
)
write_strategy = click.option(
    "--write-strategy",
    "strategy_path",
    type=params.StrategyName(),
    metavar="FILE",
    help="Write the strategy of the output, too, for MindSpore's own tools: how it is cut, all "
    "stages in one protobuf file.",
)
resume = click.option(
    "--resume",
    is_flag=True,
    help="Go on where the same command was interrupted: outputs that it left complete are kept. "
    "What has changed since (source, strategy, options) is an error.",
)
overwrite = click.option(
    "--overwrite", is_flag=True, help="Replace outputs that exist; files of other names stay."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
quiet = click.option("-q", "--quiet", is_flag=True, help="No notes and no progress on stderr.")
debug = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_set_debug,
    help="Print a traceback with an error.",
)


def check_source(src_strategy: tuple[str, ...], replicated: bool) -> None:
    """Refuse --replicated together with a strategy."""
    if replicated and src_strategy:
        raise click.UsageError("--replicated and -s exclude each other.")


def answer_by_exit_code() -> None:
    """Reserve exit code 1 for the answer of verify and diff; errors that have it get 3."""
    click.get_current_context().meta[ANSWERS] = True


def as_shared(engine: str, *paths: str) -> list[str]:
    """Return paths as the workers of an engine need them: absolute ones on a cluster."""
    from ckpttool.execution.executors import is_cluster

    here = f"{Path.cwd()}/" if is_cluster(engine) else ""
    return [path if path.startswith("/") else here + path for path in paths]


def output_format(path: str, format: str | None, is_folder: bool = False) -> str:
    """Resolve the output format from --format or the suffix of the file."""
    from ckpttool.planning.preflight import choose_format

    if path == "-":
        raise click.UsageError("A checkpoint does not go to standard output; name a file.")
    try:
        return choose_format(path, format, is_folder)
    except PlanError as error:
        raise click.UsageError(f"{error}.") from error


def check_crc(crc: bool, format: str) -> None:
    """Refuse --crc for HDF5, which has no place for a checksum."""
    if crc and format == "hdf5":
        raise click.UsageError(
            "HDF5 has no place for MindSpore's checksum: with --crc write --format ckpt or "
            "safetensors, or verify the source by itself with inspect --crc."
        )
