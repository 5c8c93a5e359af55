"""Inspect, merge, split and reshard MindSpore distributed checkpoints, without MindSpore.

One line each::

    import ckpttool

    ckpttool.open("checkpoint/", "strategy.ckpt")["lm_head.weight"][0]  # reads one row
    ckpttool.inspect("checkpoint/", "strategy.ckpt")
    ckpttool.merge("checkpoint/", "strategy.ckpt", "merged.h5")
    ckpttool.split("merged.h5", "new_strategy.ckpt", "split/")
    ckpttool.reshard("checkpoint/", "strategy.ckpt", "new_strategy.ckpt", "new/")
    ckpttool.convert("checkpoint/", "converted/", format="safetensors")
    ckpttool.verify("merged.h5", deep=True)
    ckpttool.diff("checkpoint/", "merged.h5", "strategy.ckpt")

A checkpoint is a path, or what `scan` returns; a strategy its files, or what `read_strategy`
returns.  What they are made of is public as well: `scan`, `resolve`, `open_engine`, `execute`.
"""

from __future__ import annotations

from importlib import import_module

from ckpttool._version import __version__ as __version__

TYPE_CHECKING = False  # an import of typing would delay the signal handlers of `ckpttool.__main__`
if TYPE_CHECKING:  # an alias makes a name public
    from ckpttool.api import average as average
    from ckpttool.api import convert as convert
    from ckpttool.api import diff as diff
    from ckpttool.api import explain as explain
    from ckpttool.api import inspect as inspect
    from ckpttool.api import merge as merge
    from ckpttool.api import open as open
    from ckpttool.api import reshard as reshard
    from ckpttool.api import split as split
    from ckpttool.api import steps as steps
    from ckpttool.api import to_dict as to_dict
    from ckpttool.api import verify as verify
    from ckpttool.checkpoint.checkpoint import ResolveOptions as ResolveOptions
    from ckpttool.discovery.scan import SourceOptions as SourceOptions
    from ckpttool.discovery.scan import scan as scan
    from ckpttool.execution.copy import CopyOptions as CopyOptions
    from ckpttool.execution.execute import execute as execute
    from ckpttool.execution.executors import RunOptions as RunOptions
    from ckpttool.execution.executors import open_engine as open_engine
    from ckpttool.execution.memory import fit_memory as fit_memory
    from ckpttool.formats import read_index as read_index
    from ckpttool.operations.load import AverageInput as AverageInput
    from ckpttool.operations.look import resolve as resolve
    from ckpttool.operations.open import OpenCheckpoint as OpenCheckpoint
    from ckpttool.operations.strategies import convert_strategy as convert_strategy
    from ckpttool.operations.strategies import files_to_fetch as files_to_fetch
    from ckpttool.operations.strategies import merge_strategies as merge_strategies
    from ckpttool.operations.strategy_check import check_strategies as check_strategies
    from ckpttool.operations.strategy_diff import diff_strategies as diff_strategies
    from ckpttool.operations.values import read_values as read_values
    from ckpttool.planning.needs import find_needs as find_needs
    from ckpttool.problems import BusyError as BusyError
    from ckpttool.problems import CkptToolError as CkptToolError
    from ckpttool.problems import CkptToolWarning as CkptToolWarning
    from ckpttool.problems import CombinedError as CombinedError
    from ckpttool.problems import Diagnostic as Diagnostic
    from ckpttool.problems import Diagnostics as Diagnostics
    from ckpttool.problems import EngineError as EngineError
    from ckpttool.problems import ExecutionError as ExecutionError
    from ckpttool.problems import FormatError as FormatError
    from ckpttool.problems import PlanError as PlanError
    from ckpttool.problems import StrategyError as StrategyError
    from ckpttool.problems import UnsupportedError as UnsupportedError
    from ckpttool.problems import VerifyError as VerifyError
    from ckpttool.storage.compare import Tolerance as Tolerance
    from ckpttool.strategy_files.reader import read_strategy as read_strategy
    from ckpttool.strategy_files.writer import write_strategy as write_strategy
    from ckpttool.transaction.finishing import finalize as finalize
    from ckpttool.transaction.resume import OutputOptions as OutputOptions
    from ckpttool.transaction.sealed_files import Manifest as Manifest


# The public names of each module.  A name is imported on first use: a command without arrays
# (--help, --version, completion) does not wait for numpy and h5py.
_NAMES = {
    "api": "average convert diff explain inspect merge open reshard split steps to_dict verify",
    "checkpoint.checkpoint": "ResolveOptions",
    "discovery.scan": "SourceOptions scan",
    "execution.copy": "CopyOptions",
    "execution.execute": "execute",
    "execution.executors": "RunOptions open_engine",
    "execution.memory": "fit_memory",
    "formats": "read_index",
    "operations.load": "AverageInput",
    "operations.look": "resolve",
    "operations.open": "OpenCheckpoint",
    "operations.strategies": "convert_strategy files_to_fetch merge_strategies",
    "operations.strategy_check": "check_strategies",
    "operations.strategy_diff": "diff_strategies",
    "operations.values": "read_values",
    "planning.needs": "find_needs",
    "problems": "BusyError CkptToolError CkptToolWarning CombinedError Diagnostic Diagnostics "
    "EngineError ExecutionError FormatError PlanError StrategyError UnsupportedError VerifyError",
    "storage.compare": "Tolerance",
    "strategy_files.reader": "read_strategy",
    "strategy_files.writer": "write_strategy",
    "transaction.finishing": "finalize",
    "transaction.resume": "OutputOptions",
    "transaction.sealed_files": "Manifest",
}
_MODULES = {name: f"ckpttool.{module}" for module in _NAMES for name in _NAMES[module].split()}

__all__ = ["__version__", *_MODULES]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The error is of a public class, which has to be there for ``except``.
    if _MODULES[name] != "ckpttool.problems" and (missing := missing_module()):
        from ckpttool.problems import SystemUnfitError

        raise SystemUnfitError(missing)
    return getattr(import_module(_MODULES[name]), name)


def missing_module() -> str:
    """Return a module that the package needs and Windows lacks, because files are locked; or ""."""
    for name in ("fcntl", "resource"):
        try:
            import_module(name)
        except ModuleNotFoundError:
            return name
    return ""
