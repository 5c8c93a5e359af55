"""A headless Chromium, driven by its DevTools protocol: pages are opened, clicked and looked at.

Every wait has a limit, so a browser that hangs fails one test and not the whole run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

SECONDS = 60  # of any wait; under load the start alone takes some
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (  # the sandbox needs what root and most containers lack; the pages are ours
    *("--headless=new", "--remote-debugging-port=0", "--no-first-run", "--disable-gpu"),
    *(
        "--no-sandbox",
        "--disable-extensions",
        "--disable-background-networking",
        "--disable-dev-shm-usage",
    ),
)


def find_program() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """A page of the browser.

    ``events`` has what the browser reported, such as requests and errors of scripts.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._calls = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        self._calls += 1
        self._socket.send(json.dumps({"id": self._calls, "method": method, "params": params}))
        while (answer := self._receive()).get("id") != self._calls:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._socket.recv(timeout=SECONDS))
        if "method" in message:
            self.events.append(message)
        return message

    def open(self, path: Path) -> None:
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.named("Page.loadEventFired"):
            self._receive()

    def named(self, method: str) -> list[dict[str, Any]]:
        return [one["params"] for one in self.events if one["method"] == method]

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def texts(self, selector: str) -> list[str]:
        nodes = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return [*self.evaluate(f"{nodes}.map((one) => one.innerText)")]

    def click(self, selector: str) -> None:
        found = json.dumps(selector)
        self.evaluate(f"document.querySelector({found}).scrollIntoView({{block: 'center'}})")
        box = f"document.querySelector({found}).getBoundingClientRect().toJSON()"
        at = self.evaluate(box)
        where = {"x": at["x"] + min(at["width"] / 2, 40), "y": at["y"] + min(at["height"] / 2, 12)}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **where, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

    def write(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def shoot(self, path: Path) -> None:
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """Start Chromium with a profile in a folder, and yield its only page."""
    program = find_program()
    assert program is not None, "no Chromium is installed"
    command = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    log = folder / "log"
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors) as process:
        try:
            port = _wait_for_port(process, folder / "DevToolsActivePort", log)
            with connect(_find_page(port), max_size=None, open_timeout=SECONDS) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            try:
                process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_for_port(process: subprocess.Popen[bytes], path: Path, log: Path) -> int:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        if path.exists() and (lines := path.read_text().split()):
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not start:\n{log.read_text()[-2000:]}")


def _find_page(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=SECONDS) as answer:
        targets = json.load(answer)
    return next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
