"""Stand-ins for commands of clusters: as much of them as the documentation uses.

Those of schedulers run the tasks of a job as processes of this host, with the variables that the
scheduler sets:

- ``sbatch`` (Slurm): each index of an array, one after the other, before it returns;
- ``srun`` (Slurm): a job of MPI, which it hands to ``mpiexec``;
- ``kubectl`` (a Volcano job): all replicas of each task at once; a container that fails is started
  again, as `restartPolicy: OnFailure` says.

Those of object stores copy files; the bucket is a folder of the same name:

- ``rclone copy --files-from FILE REMOTE:BUCKET FOLDER``;
- ``obsutil cp obs://BUCKET/KEY PATH``.

`write_stand_ins` makes them commands of these names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

NAMES = ("sbatch", "srun", "kubectl", "rclone", "obsutil")
ROOT = Path(__file__).parents[2]
MAX_STARTS = 5  # of a container that fails


def write_stand_ins(folder: Path) -> None:
    """Write a command for each stand-in."""
    folder.mkdir()
    for name in NAMES:
        script = folder / name
        script.write_text(
            f"#!/bin/sh\n"
            f'PYTHONPATH={ROOT} exec {sys.executable} -m tests.support.schedulers {name} "$@"\n',
            encoding="utf-8",
        )
        script.chmod(0o755)


def sbatch(words: Sequence[str]) -> int:
    """Run the tasks of an array job; without an array, the script once."""
    script = Path(words[-1])
    array = re.search(r"^#SBATCH --array=(\d+)-(\d+)$", script.read_text(), re.MULTILINE)
    tasks = range(int(array[1]), int(array[2]) + 1) if array else [0]
    for task in tasks:
        of_array = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_COUNT": str(len(tasks))}
        variables = of_array if array else {}
        done = subprocess.run(["bash", "-e", script], env={**os.environ, **variables}, check=False)
        if done.returncode:
            return done.returncode
    if "--parsable" in words:
        sys.stdout.write("4711\n")
    return 0


def srun(words: Sequence[str]) -> int:
    assert words[0] == "-n"
    return subprocess.run(["mpiexec", *words], check=False).returncode


def rclone(words: Sequence[str]) -> int:
    copy, flag, listed, source, folder = words
    assert (copy, flag) == ("copy", "--files-from")
    for name in Path(listed).read_text(encoding="utf-8").splitlines():
        _copy(Path(source.partition(":")[2], name), Path(folder, name))
    return 0


def obsutil(words: Sequence[str]) -> int:
    cp, source, path = words
    assert cp == "cp"
    _copy(Path(source.removeprefix("obs://")), Path(path))
    return 0


def _copy(source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, path)


def kubectl(words: Sequence[str]) -> int:
    """Run the containers of a Volcano job, ``create -f FILE``, to their end."""
    assert words[:2] == ["create", "-f"]
    job = yaml.safe_load(Path(words[2]).read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("batch.volcano.sh/v1alpha1", "Job")
    waiting = []
    for task in job["spec"]["tasks"]:
        pod = task["template"]["spec"]
        assert pod["restartPolicy"] == "OnFailure"
        (container,) = pod["containers"]
        command = [*container["command"], *container["args"]]
        waiting += [(command, {"VC_TASK_INDEX": str(index)}) for index in range(task["replicas"])]
    for _ in range(MAX_STARTS):
        started = [subprocess.Popen(one, env={**os.environ, **more}) for one, more in waiting]
        codes = [process.wait() for process in started]
        waiting = [one for one, code in zip(waiting, codes, strict=True) if code]
    return 1 if waiting else 0


if __name__ == "__main__":
    stand_ins = {one.__name__: one for one in (sbatch, srun, kubectl, rclone, obsutil)}
    sys.exit(stand_ins[sys.argv[1]](sys.argv[2:]))
