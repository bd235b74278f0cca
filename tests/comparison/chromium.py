# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests: its DevTools protocol over two pipes, so that nothing listens on a port."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_COMMANDS, _ANSWERS = 3, 4  # the descriptors that Chromium reads commands from and writes answers to
# Chromium wants these two numbers, and in this process they may be taken: a small parent puts the pipes there.
_PARENT = f"""\
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(commands, {_COMMANDS}), os.dup2(answers, {_ANSWERS})
os.execv(sys.argv[3], sys.argv[3:])"""


def executable() -> str | None:
    """The browser of this machine, None where it has none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


@final
class Page:
    """One tab. Everything it complains about is collected in `complaints`, every address it asks for in `requests`."""

    def __init__(self, commands: int, answers: int, timeout_s: float) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._commands, self._answers, self._timeout_s = commands, answers, timeout_s
        self._pending = b""
        self._num_calls = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        self.call("Network.emulateNetworkConditions", offline=True, **offline)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol and its result."""
        self._num_calls += 1
        message = {"id": self._num_calls, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + self._timeout_s
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._num_calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer.get("method", ""), answer.get("params", {}))

    def open(self, path: Path, width: int, height: int = 900) -> None:
        """Load a file at this width of the window and wait until its script says that all is drawn."""
        self.resize(width, height)
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + self._timeout_s
        while self.evaluate("document.documentElement?.dataset.drawn") != "yes":
            assert time.monotonic() < deadline, f"not drawn in {self._timeout_s} s; complaints: {self.complaints}"
            time.sleep(0.02)

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window another size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it comes to."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._pending:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser said nothing for {self._timeout_s} s"
            piece = os.read(self._answers, 2**16)
            assert piece, "the browser ended"
            self._pending += piece
        message, _, self._pending = self._pending.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"])[:2000])
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in {"error", "warning", "assert"}:
            self.complaints.append(json.dumps(parameters["args"])[:2000])
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(parameters["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])


@contextlib.contextmanager
def browser(path: str, profile: Path, *, timeout_s: float = 60) -> Iterator[Page]:
    """Start the browser with a fresh profile and end it, whatever happens.

    Args:
        path: of its executable.
        profile: a folder for what it writes.
        timeout_s: how long one command may take.
    """
    commands_in, commands_out = os.pipe()
    answers_in, answers_out = os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    options += ["--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _PARENT, str(commands_in), str(answers_out), path, *options, "about:blank"],
        pass_fds=(commands_in, answers_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_in)
    os.close(answers_out)
    try:
        page = Page(commands_out, answers_in, timeout_s)
        yield page
        page._session = None
        page.call("Browser.close")
        process.wait(timeout=10)
    finally:
        os.close(commands_out)
        os.close(answers_in)
        if process.poll() is None:
            process.kill()
            process.wait()
