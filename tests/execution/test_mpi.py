"""A real ``mpiexec`` with one process that is the run, and two that are its workers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import files_below, message, run, run_well
from tests.support.executors import (
    FORMATS,
    complete_outputs,
    contents,
    environment,
    finish,
    reshard_words,
    split_words,
    start,
    wait_until,
    write_source,
)
from tests.support.manifests import UNFINISHED

pytest.importorskip("mpi4py", reason="the extra ckpttool[mpi] is not installed")
pytestmark = [
    pytest.mark.mpi,
    pytest.mark.xdist_group("mpi"),
    pytest.mark.skipif(shutil.which("mpiexec") is None, reason="mpiexec is not installed"),
]


@pytest.fixture(scope="module")
def mpiexec():
    version = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, check=True)
    is_open_mpi = "Open" in version.stdout
    words = ["mpiexec", *(["--oversubscribe"] if is_open_mpi else []), "-n", "3", sys.executable]
    return [*words, "-m", "mpi4py.futures", "-m", "ckpttool"]


def start_mpi(*words):
    settings = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Open MPI 4.1 joins equal messages of ranks; at MPI_Abort that may leave mpiexec hanging.
        "OMPI_MCA_orte_base_help_aggregate": "0",
    }
    return start(*words, "--engine", "mpi", env=environment(**settings))


def finish_mpi(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a job; return its exit code and messages.

    Debian's mpiexec (Open MPI 4.1.4, PMIx 4.2.2) may crash in its own shutdown after MPI_Abort,
    about once in 400 jobs.  The code of the job is then in what it said before.
    """
    code, errors = finish(process)
    if code == -signal.SIGSEGV and "PMIx_server_finalize" in errors:
        aborted = re.search(r"MPI_ABORT was invoked .*?with errorcode (\d+)", errors, re.DOTALL)
        assert aborted, errors
        code = int(aborted[1])
    return code, errors


@pytest.mark.parametrize("output_format", FORMATS)
def test_mpi_writes_the_same_bytes(tmp_path, mpiexec, output_format):
    run_well(*reshard_words(tmp_path / "here", output_format))
    code, errors = finish_mpi(
        start_mpi(*mpiexec, *reshard_words(tmp_path / "there", output_format))
    )
    assert code == 0, errors
    assert contents(tmp_path / "there") == contents(tmp_path / "here")


def test_an_error_of_a_run_with_mpi_has_its_exit_code(tmp_path, mpiexec):
    words = reshard_words(tmp_path / "out", "ckpt")
    run_well(*words)
    code, errors = finish_mpi(start_mpi(*mpiexec, *words))
    assert code == 5
    assert (
        f"error[destination]: {tmp_path / 'out'} is already complete\n  Try: --resume acc" in errors
    )
    assert "Traceback" not in errors


def test_a_worker_that_does_not_see_what_the_run_sees_is_named(tmp_path, mpiexec):
    source = write_source(tmp_path / "src", ranks=3, rank_bytes=64)
    script = tmp_path / "script.py"
    script.write_text(
        "from ckpttool.execution import cluster\n"
        "from mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 2:\n"
        "    cluster.PAUSES = (0.0,)\n"
        "    cluster.identify_file = cluster.StoredFile\n"
        "if __name__ == '__main__':\n"
        "    from ckpttool.cli.main import main\n"
        "    main()\n"
    )
    command = [*mpiexec[: mpiexec.index("ckpttool") - 1], script]
    code, errors = finish_mpi(start_mpi(*command, *split_words(source, tmp_path / "out")))
    assert code == 5
    assert "(MPI rank 2): workers do not see " in errors
    assert errors.count("worker on ") == 1
    assert not (tmp_path / "out").exists()


def test_what_has_the_key_in_an_mpi_job_writes_no_core_dump(tmp_path, mpiexec):
    script = tmp_path / "script.py"
    script.write_text(
        "from ckpttool import open_engine\n"
        "from ckpttool.secret import Secret\n"
        "from tests.support.executors import NO_DUMP, dump_state\n"
        "if __name__ == '__main__':\n"
        "    with open_engine('mpi') as executor:\n"
        "        answers = executor.run_on_each(dump_state, Secret(bytes(16))).values()\n"
        "    assert [*answers, dump_state()] == [NO_DUMP] * 3, answers\n"
    )
    code, errors = finish_mpi(start_mpi(*mpiexec[: mpiexec.index("ckpttool") - 1], script))
    assert code == 0, errors


@pytest.fixture
def busy_run(tmp_path, mpiexec):
    source = write_source(tmp_path / "src", ranks=16, rank_bytes=8 << 20)
    out = tmp_path / "out"
    process = start_mpi(*mpiexec, *split_words(source, out))
    wait_until(lambda: complete_outputs(out), "an output")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    yield process, sorted(map(int, children)), out, source
    process.kill()
    process.communicate()


def test_a_signal_ends_a_run_with_mpi_and_leaves_whole_files_only(busy_run):
    process, pids, out, _ = busy_run
    os.kill(pids[0], signal.SIGTERM)
    code, errors = finish_mpi(process)
    assert code == 143
    assert "error[stopped]: ended by SIGTERM\n  nothing was left half-written" in errors
    assert {*complete_outputs(out), *UNFINISHED} == {*files_below(out)}


def test_a_worker_that_dies_ends_all_and_the_next_run_cleans_up(busy_run, tmp_path, mpiexec):
    process, pids, out, source = busy_run
    os.kill(pids[-1], signal.SIGKILL)
    code, _ = finish_mpi(process)
    assert code != 0
    run_well(*split_words(source, tmp_path / "expected"))
    expected = contents(tmp_path / "expected")
    assert {name: expected[name] for name in complete_outputs(out)}.items() <= contents(out).items()
    again = [*mpiexec, *split_words(source, out), "--overwrite"]
    code, errors = finish_mpi(start_mpi(*again))
    assert code == 0, errors
    assert contents(out) == expected


def test_mpi_that_was_not_started_by_mpiexec_is_told_of(tmp_path):
    result = run(*reshard_words(tmp_path / "out", "ckpt"), "--engine", "mpi")
    assert result.exit_code == 8
    assert message(result) == (
        "error[no_engine]: engine mpi: not started as an MPI job "
        "Try: mpiexec -n N python -m mpi4py.futures -m ckpttool ..."
    )
