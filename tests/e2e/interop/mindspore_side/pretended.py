"""A cluster that is not there: MindSpore compiles for any rank of it, on a machine with a CPU.

`join` registers the device target of ``pretended.cc`` in this process and tells MindSpore that it
is one rank of so many.  With ``MS_DEV_PRECOMPILE_ONLY`` set, compilation then runs through the
whole front end (layouts, slices of the parameters, strategy file) and ends before kernels.
"""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("pretended.cc")
TARGET = "Ascend"  # a target that the front end cuts parameters for; CPU is not


def library() -> Path:
    """The compiled ``pretended.cc``, made on first use in the virtual environment."""
    import mindspore

    package = Path(mindspore.__file__).parent
    built = Path(sys.prefix) / "interop" / "pretended.so"
    if built.exists() and built.stat().st_mtime > SOURCE.stat().st_mtime:
        return built
    built.parent.mkdir(exist_ok=True)
    headers = package / "include" / "mindspore" / "ccsrc"
    partial = built.with_suffix(f".{os.getpid()}")
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-D_GLIBCXX_USE_CXX11_ABI=0"]
    command += [f"-I{headers}", f"-I{headers / 'include'}", str(SOURCE), "-o", str(partial)]
    command += [f"-L{package / 'lib'}", "-lmindspore_core", "-lmindspore_common"]
    subprocess.run([*command, f"-Wl,-rpath,{package / 'lib'}"], check=True)
    partial.replace(built)
    return built


def join(ranks: int, rank: int) -> None:
    """Makes this process rank ``rank`` of ``ranks``; once, before any network is built."""
    import mindspore
    from mindspore import context
    from mindspore.communication import _comm_helper, management
    from mindspore.context import ms_ctx_param

    shim = ctypes.CDLL(str(library()))
    shim.pretend(TARGET.encode(), ranks, rank)
    for module in (_comm_helper, management):
        module._get_size_helper = lambda group: shim.group_size(group.encode())
        module._get_rank_helper = lambda group: shim.group_place(group.encode())
    logging.disable(logging.CRITICAL)  # that the target has no driver
    context._context().set_param(ms_ctx_param.device_target, TARGET)
    mindspore.set_context(mode=mindspore.GRAPH_MODE)
    logging.disable(logging.NOTSET)
