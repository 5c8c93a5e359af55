"""The options of checkpoints, outputs and runs, each declared once.

A field is a keyword of the functions in `ckpttool.api` and, with its `Option`, an option of the
command line.  Its type is for callers in Python; the `Option` has the flag, the help, and what a
text may be.  `ckpttool.cli.options` makes the options of click from it, and `ckpttool.api` reads
texts as the command line does.  Both make the records that go down to where they act, such as
`ckpttool.transaction.resume.OutputOptions`: a field of these has the name of its keyword.

Annotations are evaluated here, so that no command imports the rooms of these records for its
``--help``; the types of these rooms are therefore quoted.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypedDict, Union, get_args

from msgspec import Struct

from ckpttool.formats import FORMATS
from ckpttool.typed import (
    PREFIX,
    ManifestChoice,
    NotInTarget,
    OnOverflow,
    PadWith,
    UnlistedChoice,
)
from ckpttool.wording import any_of

if TYPE_CHECKING:
    from ckpttool.model.renames import Rename
    from ckpttool.secret import Secret

Path: TypeAlias = str | os.PathLike[str]


class Option(Struct, frozen=True):
    """The option of the command line for a keyword.

    Attributes
    ----------
    help
        The text of ``--help``, two lines at most.
    flag
        The first name of the option; "" for that of the keyword.
    kind
        What a text must be, of `ckpttool.cli.params.KINDS`; "" for a flag, a choice or any text.
    choices
        The words that are values.
    metavar
        The word for the value in ``--help``; "" for that of the kind, else the keyword.
    default
        The default that ``--help`` shows; None for what the help says.
    value
        The value of a flag; "" for True.
    aliases
        Other names, which ``--help`` shows in the text.
    is_repeatable
        Whether the option may be given several times.
    is_safety
        Whether it is one of the safety options, whatever its group.
    """

    help: str
    flag: str = ""
    kind: str = ""
    choices: Sequence[str] = ()
    metavar: str = ""
    default: str | None = None
    value: str = ""
    aliases: Sequence[str] = ()
    is_repeatable: bool = False
    is_safety: bool = False


def declared(group: type) -> Mapping[str, tuple[Option, bool]]:
    """Return the option of each keyword, and whether its value is True or False.

    Examples
    --------
    >>> {name: option.flag for name, (option, is_flag) in declared(RunKeywords).items()}
    {'engine': '', 'max_memory_bytes': '--max-memory'}
    """
    hints = group.__annotations__.items()
    return {name: (hint.__metadata__[0], hint.__origin__ is bool) for name, hint in hints}


def names_of(*keywords: type) -> tuple[str, ...]:
    """Return the names of keywords, in their order."""
    return tuple(name for keyword_class in keywords for name in keyword_class.__annotations__)


# Keywords that some functions take without the others of their group.
Strict = Annotated[bool, Option("Refuse to go on after any warning.", is_safety=True)]
Manifest = Annotated[
    ManifestChoice,
    Option(
        "Do not compare the files with the manifest of their set.",
        "--ignore-manifest",
        value="ignore",
        is_safety=True,
    ),
]
Overwrite = Annotated[
    bool, Option("Replace outputs that exist.", aliases=("--force",), is_safety=True)
]
Ranks = Annotated[
    Collection[int] | str | None,
    Option("Write only these target ranks, such as 0,3-7.", "--rank", "ranks"),
]


class SourceKeywords(TypedDict, total=False):
    """Options that find and read a checkpoint."""

    step: Annotated[
        str | int | None,
        Option("Step to read (10_1), or a file name.  [default: the newest that every rank has]"),
    ]
    pattern: Annotated[
        str | None,
        Option(
            "Where the files of ranks are below SRC, such as 'node{rank}/*.ckpt'.", kind="pattern"
        ),
    ]
    files: Annotated[
        Path | Sequence[Path] | None,
        Option("LIST names the files of ranks 0, 1, 2 ... below SRC, one a line.", kind="list"),
    ]
    key: Annotated[  # the key itself, or the path of a file with it
        Union[bytes, "Secret", Path, None],
        Option(
            "File with the key of encrypted files; - is standard input.", "--dec-key-file", "key"
        ),
    ]


class ChoiceKeywords(TypedDict, total=False):
    """Options that choose tensors."""

    include: Annotated[
        str | Collection[str],
        Option(
            "Only tensors whose names match PATTERN, a glob or re:REGEX; repeat it for more.",
            kind="names",
            is_repeatable=True,
        ),
    ]
    exclude: Annotated[
        str | Collection[str],
        Option(
            "No tensors whose names match PATTERN; repeat it for more.",
            kind="names",
            is_repeatable=True,
        ),
    ]
    weights_only: Annotated[
        bool, Option("No optimizer state, gradients, master copies or counters.")
    ]


class ExportKeywords(ChoiceKeywords, total=False):
    """Options that choose tensors, and say what is made of them, written or not."""

    recipe: Annotated[
        str | None,
        Option(
            "Write the names and axes of another framework: NAME or FILE, with :KEY=VALUE,...",
            metavar="NAME",
        ),
    ]
    hf_config: Annotated[
        Path | None,
        Option(
            "Folder with the config.json of the model, from which --recipe has its sizes.",
            kind="model folder",
            metavar="DIR",
        ),
    ]
    dtype: Annotated[
        str | Collection[str],
        Option(
            "Cast the weights to fp32, fp16 or bf16; bf16:PATTERN casts what matches.  Repeatable.",
            kind="type",
            is_repeatable=True,
        ),
    ]


class TensorKeywords(ExportKeywords, total=False):
    """Options that choose tensors, and say what is written of them."""

    rename: Annotated[
        Mapping[str, str] | Collection[Union[str, "Rename"]],
        Option(
            "Rename what matches OLD, a glob or re:REGEX; state follows.  Repeatable.",
            kind="rename",
            is_repeatable=True,
        ),
    ]
    rename_file: Annotated[
        Path | Sequence[Path],
        Option(
            "A YAML file with such rules; to-pytorch and to-mindspore come with ckpttool.",
            kind="rename file",
            is_repeatable=True,
        ),
    ]
    reverse: Annotated[bool, Option("Use the files of rules the other way, NEW to OLD.")]
    fused: Annotated[
        str | Collection[str],
        Option(
            "Regroup what each rank fused for itself: linear_fc1=2 or w_qkv=q:8,k:2,v:2.",
            kind="parts",
            metavar="NAME=PARTS",
            is_repeatable=True,
        ),
    ]
    pad_vocab: Annotated[
        str | int | None,
        Option("Rows of embedding and head: N or multiple:K.", kind="rows"),
    ]
    cut_vocab: Annotated[
        str | int | None, Option("Keep the first N rows of embedding and head.", kind="n")
    ]
    pad_with: Annotated[
        PadWith,
        Option(
            "What the rows that --pad-vocab adds are: zero, or the mean of the others.",
            choices=get_args(PadWith),
            metavar="HOW",
            default="zero",
        ),
    ]
    vocab: Annotated[
        str | Collection[str],
        Option(
            "Names of embedding and head, if they are unusual.",
            kind="names",
            is_repeatable=True,
        ),
    ]
    lora: Annotated[
        Path | Sequence[Path],
        Option(
            "Add SCALE x B A to the weights: a file, or the folder of PEFT with its scale.",
            kind="adapter",
            metavar="ADAPTER[:SCALE]",
            is_repeatable=True,
        ),
    ]
    on_overflow: Annotated[
        OnOverflow,
        Option(
            "What becomes of numbers too large for their new type: error or inf.",
            choices=get_args(OnOverflow),
            metavar="HOW",
            default="error",
        ),
    ]


OF_ROWS = ("fused", "pad_vocab", "cut_vocab", "pad_with", "vocab", "lora")  # of outputs only


class ResolveKeywords(TypedDict, total=False):
    """Options that resolve a checkpoint to full tensors."""

    replicated: Annotated[
        bool, Option("Every rank holds all tensors in full, so there is no strategy.")
    ]
    unlisted: Annotated[
        UnlistedChoice | None,
        Option(
            "Unlisted parameters that differ between ranks: rank, first or drop.  "
            "[default: an error]",
            choices=get_args(UnlistedChoice),
            metavar="HOW",
        ),
    ]
    trust_strategy: Annotated[
        bool, Option("Do not compare the strategy with samples of the contents.")
    ]
    optimizer_shard: Annotated[
        int | None,
        Option(
            "Size of an optimizer shard that the strategy hides; 1 for none, even if listed.",
            kind="n",
        ),
    ]
    strict: Strict
    check_replicas: Annotated[
        bool,
        Option("Compare all replicas byte for byte before anything is written.", is_safety=True),
    ]
    manifest: Manifest


class NameKeywords(TypedDict, total=False):
    """Options that name the files of ranks."""

    name: Annotated[
        str | None,
        Option(
            "Name the output files, such as '{model}_rank_{rank}-{step}' (its fields).", "", "name"
        ),
    ]
    mindformers: Annotated[
        bool, Option("Write the meta.json of each rank, from which MindFormers 1.x resumes.")
    ]


class RankKeywords(NameKeywords, total=False):
    """Options of outputs for ranks."""

    prefix: Annotated[
        str, Option("Name the output files PREFIX<rank>.", kind="prefix", default=PREFIX)
    ]
    ranks: Ranks
    not_in_target: Annotated[
        NotInTarget,
        Option(
            "What becomes of parameters outside the target strategy: follow, full or drop.  "
            "[default: follow]",
            choices=get_args(NotInTarget),
            metavar="HOW",
        ),
    ]
    strategy_path: Annotated[
        Path | None,
        Option(
            "Write the strategy of the output to FILE, too.",
            "--write-strategy",
            "new strategy",
            metavar="FILE",
        ),
    ]


class ShardKeywords(TypedDict, total=False):
    """Options of outputs with full tensors."""

    max_shard_bytes: Annotated[
        int | str | None,
        Option(
            "Write a folder of numbered files of at most SIZE (5GB, or 5G for 5GiB).",
            "--max-shard-size",
            "size",
        ),
    ]


class VirtualKeywords(TypedDict, total=False):
    """Options of outputs that show tensors without storing them."""

    virtual: Annotated[
        bool,
        Option("Write no tensor: an HDF5 file that shows those in the files of SRC."),
    ]


class WriteKeywords(TypedDict, total=False):
    """Options of all outputs: their format, and what replaces or resumes existing ones."""

    format: Annotated[
        str | None,
        Option(f"{any_of(FORMATS)}.", choices=(*FORMATS,)),
    ]
    crc: Annotated[
        bool,
        Option(
            "Verify the checksums of SRC before writing, and store one in every output.",
            is_safety=True,
        ),
    ]
    part: Annotated[
        tuple[int, int] | str | None,
        Option("Write only the K-th of N parts; finalize completes the set.", kind="k/n"),
    ]
    overwrite: Overwrite
    resume: Annotated[
        bool,
        Option(
            "Keep the outputs that this command has completed before; write the rest.",
            is_safety=True,
        ),
    ]
    wait_seconds: Annotated[
        float | str | None,
        Option(
            "Wait so long (90s, 10m, 1h) for a run that writes there, then go on as --resume.",
            "--wait",
            "time",
            is_safety=True,
        ),
    ]
    no_locks: Annotated[
        bool,
        Option(
            "On a file system without locks: the run that left its plan has ended.", is_safety=True
        ),
    ]


class RunKeywords(TypedDict, total=False):
    """The engine of a run, and its limit of memory."""

    engine: Annotated[
        str,
        Option(
            "threads[:N], processes[:N], dask:ADDRESS, dask:FILE or mpi.  [default: threads]",
            kind="engine",
        ),
    ]
    max_memory_bytes: Annotated[
        int | str | None,
        Option(
            "Most memory (200MiB, or 200M; 200MB is of 1000); on a cluster, of each worker.",
            "--max-memory",
            "size",
        ),
    ]


class InspectKeywords(SourceKeywords, ExportKeywords, total=False):
    """The options of ``inspect``."""


class VerifyKeywords(InspectKeywords, ResolveKeywords, total=False):
    """The options of ``verify`` that all readers share."""


class AuditKeywords(TypedDict, total=False):
    """Options that name what a checkpoint is compared with."""

    like: Annotated[
        Path | None,
        Option(
            "Expect the tensors of REF: a checkpoint, headers or an index alone.",
            kind="reference",
            metavar="REF",
            is_safety=True,
        ),
    ]
    config: Annotated[
        Path | None,
        Option(
            "Expect the layers, experts, heads and words that config.json tells of.",
            kind="config",
            metavar="PATH",
            is_safety=True,
        ),
    ]
    card: Annotated[
        Path | None,
        Option(
            "Write a card, FILE and a page beside it: the SHA-256 of each full tensor.",
            kind="card",
            metavar="FILE",
        ),
    ]


class AuditedKeywords(VerifyKeywords, AuditKeywords, total=False):
    """The options of ``verify``."""

    overwrite: Overwrite


class ReadKeywords(VerifyKeywords, TensorKeywords, total=False):
    """The options of all that read a checkpoint for its tensors."""


class ConvertKeywords(
    SourceKeywords,
    TensorKeywords,
    NameKeywords,
    ShardKeywords,
    WriteKeywords,
    RunKeywords,
    total=False,
):
    """The options of ``convert``."""

    strict: Strict
    manifest: Manifest
    ranks: Ranks


class MergeKeywords(
    ReadKeywords, ShardKeywords, VirtualKeywords, WriteKeywords, RunKeywords, total=False
):
    """The options of ``merge``."""


class ReshardKeywords(ReadKeywords, RankKeywords, WriteKeywords, RunKeywords, total=False):
    """The options of ``split`` and ``reshard``."""


class AverageKeywords(MergeKeywords, RankKeywords, total=False):
    """The options of ``average``."""


class AllKeywords(AverageKeywords, AuditKeywords, total=False):
    """The options of all commands."""
