"""An example of every error, with its attributes, its message and its exit code."""

from ckpttool.model.joining import join_alike
from ckpttool.problems import (
    AuthenticityError,
    BusyError,
    ChecksumError,
    CkptToolError,
    Diagnostic,
    EngineError,
    ExecutionError,
    ForeignError,
    FormatError,
    LibraryError,
    NoStrategyError,
    PlanError,
    RulesError,
    SourceHashError,
    SourceValueError,
    StepError,
    StrategyError,
    SystemUnfitError,
    UnfinishedError,
    UnreadableError,
    UnsupportedError,
    VerifyError,
)


def texts_of(error: CkptToolError) -> tuple[str, ...]:
    """Return the text of each problem of an error, as people read it."""
    return tuple(one.text for one in join_alike(error.diagnostics))


FORMAT = FormatError("rank_3/a.ckpt", 118, "dims [4, 2] need 32 bytes, tensor_content has 24")


STRATEGY = StrategyError("s.ckpt", "no parameter layouts in it")


LOST = (Diagnostic("missing", "lost", tensor="w"), Diagnostic("missing", "gone", tensor="b"))
NO_STRATEGY = Diagnostic("no_strategy", "8 ranks and no strategy", where="run")
BUSY = Diagnostic("busy", "another run is writing it", where="out")
MIXED = Diagnostic("mixed_steps", "a-9_1 is not in rank 1", where="run")
UNFINISHED = Diagnostic("nothing_complete", "a run has not ended here", where="out")


PLAN = PlanError(LOST)


EXAMPLES = [
    (CkptToolError("plain"), {}, "plain", 70),
    (
        SystemUnfitError("fcntl"),
        {"module": "fcntl"},
        "this Python has no module fcntl; on Windows run ckpttool in WSL",
        8,
    ),
    (
        FORMAT,
        {"path": "rank_3/a.ckpt", "offset": 118, "reason": FORMAT.reason},
        "rank_3/a.ckpt: byte 118: dims [4, 2] need 32 bytes, tensor_content has 24",
        3,
    ),
    (
        FormatError("a.h5", None, "no HDF5"),
        {"path": "a.h5", "offset": None, "reason": "no HDF5"},
        "a.h5: no HDF5",
        3,
    ),
    (
        ChecksumError("a.ckpt", None, "the checksum differs"),
        {"path": "a.ckpt", "offset": None, "reason": "the checksum differs"},
        "a.ckpt: the checksum differs",
        3,
    ),
    (
        AuthenticityError("a.ckpt", 0, "the wrong key"),
        {"path": "a.ckpt", "offset": 0, "reason": "the wrong key"},
        "a.ckpt: byte 0: the wrong key",
        3,
    ),
    (
        ForeignError("a.ckpt", None, "a text file"),
        {"path": "a.ckpt", "offset": None, "reason": "a text file"},
        "a.ckpt: a text file",
        3,
    ),
    (
        UnsupportedError("a.ckpt", 0, "encrypted"),
        {"path": "a.ckpt", "offset": 0, "reason": "encrypted"},
        "a.ckpt: byte 0: encrypted",
        3,
    ),
    (
        STRATEGY,
        {"where": "s.ckpt", "reason": "no parameter layouts in it"},
        "s.ckpt: no parameter layouts in it",
        4,
    ),
    (
        RulesError("n.yaml, line 2", "x: no mapping"),
        {"where": "n.yaml, line 2", "reason": "x: no mapping"},
        "n.yaml, line 2: x: no mapping",
        4,
    ),
    (
        UnreadableError("rank_3/a.ckpt", None, "Permission denied"),
        {"path": "rank_3/a.ckpt", "offset": None, "reason": "Permission denied"},
        "rank_3/a.ckpt: Permission denied",
        3,
    ),
    (
        PLAN,
        {"diagnostics": LOST},
        "w: lost\nb: gone",
        5,
    ),
    (
        EngineError("dask:node7:8786", "no worker is left"),
        {"engine": "dask:node7:8786", "reason": "no worker is left"},
        "engine dask:node7:8786: no worker is left",
        8,
    ),
    (
        LibraryError("a.ckpt", 0, "encrypted, and cryptography is needed"),
        {"path": "a.ckpt", "offset": 0, "reason": "encrypted, and cryptography is needed"},
        "a.ckpt: byte 0: encrypted, and cryptography is needed",
        8,
    ),
    (
        BusyError([BUSY]),
        {"diagnostics": (BUSY,)},
        "out: another run is writing it",
        9,
    ),
    (
        NoStrategyError([NO_STRATEGY]),
        {"diagnostics": (NO_STRATEGY,)},
        "run: 8 ranks and no strategy",
        2,
    ),
    (
        StepError([MIXED]),
        {"diagnostics": (MIXED,)},
        "run: a-9_1 is not in rank 1",
        5,
    ),
    (
        UnfinishedError([UNFINISHED]),
        {"diagnostics": (UNFINISHED,)},
        "out: a run has not ended here",
        5,
    ),
    (
        ExecutionError("out/rank_1/a.h5", "the disk is full", ["out/rank_0/a.h5"]),
        {
            "output": "out/rank_1/a.h5",
            "cause": "the disk is full",
            "committed": ("out/rank_0/a.h5",),
        },
        (
            "out/rank_1/a.h5: not written: the disk is full; complete: out/rank_0/a.h5; "
            "the same command with --resume"
        ),
        6,
    ),
    (
        ExecutionError("a.h5", "no space"),
        {"output": "a.h5", "cause": "no space", "committed": ()},
        "a.h5: not written: no space",
        6,
    ),
    (
        VerifyError("a.h5", ["w differs", "b is missing"]),
        {"path": "a.h5", "problems": ("w differs", "b is missing")},
        "a.h5: w differs\na.h5: b is missing",
        7,
    ),
    (
        SourceValueError("a.ckpt", ["w: NaN"]),
        {"path": "a.ckpt", "problems": ("w: NaN",)},
        "a.ckpt: w: NaN",
        7,
    ),
    (
        SourceHashError("a.ckpt", ["w: changed"]),
        {"path": "a.ckpt", "problems": ("w: changed",)},
        "a.ckpt: w: changed",
        7,
    ),
]
