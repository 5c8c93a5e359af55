"""Answers requests with a real MindSpore: ``python -m tests.e2e.interop.mindspore_side.server``.

A line of JSON on stdin is a list of requests to be done side by side, each ``{"do": name of an
operation, ...its arguments}``.  The line on stdout that answers it is a list of ``{"result": ...}``
or ``{"error": ...}``.  Every operation runs in a fork of this process: MindSpore is imported once,
but no operation sees the settings, groups or crashes of another.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

MOST_AT_ONCE = os.cpu_count() or 1


def start(request: dict, answers: Path) -> int:
    """Forks a child that writes its answer to a file; returns its process id."""
    child = os.fork()
    if child:
        return child
    os.dup2(2, 1)  # what MindSpore prints must not get between the answers
    os.chdir(tempfile.mkdtemp(dir=answers))  # it leaves logs and dumps where it is
    try:
        from tests.e2e.interop.mindspore_side import operations

        words = {key: value for key, value in request.items() if key != "do"}
        answer = {"result": getattr(operations, request["do"])(**words)}
    except BaseException as error:  # whatever it is, it is what MindSpore says
        traceback.print_exc()
        answer = {"error": f"{type(error).__name__}: {error}"}
    (answers / str(os.getpid())).write_text(json.dumps(answer), encoding="utf-8")
    sys.stderr.flush()
    os._exit(0)  # no clean-up: a device that is not there cannot be closed


def serve(requests: list[dict], answers: Path) -> list[dict]:
    """The answers to requests, in order."""
    places: dict[int, int] = {}  # process id -> place of its request
    found: list[dict] = [{} for _ in requests]
    waiting = list(enumerate(requests))
    while waiting or places:
        while waiting and len(places) < MOST_AT_ONCE:
            place, request = waiting.pop(0)
            places[start(request, answers)] = place
        child, status = os.wait()
        path = answers / str(child)
        if path.exists():
            found[places.pop(child)] = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
        else:
            found[places.pop(child)] = {"error": f"MindSpore died: status {status}"}
    return found


def say(document: object) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serves until stdin ends."""
    import mindspore

    from tests.e2e.interop.mindspore_side import pretended

    pretended.library()
    say({"result": mindspore.__version__})
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            say(serve(json.loads(line), Path(folder)))


if __name__ == "__main__":
    main()
