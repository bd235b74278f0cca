# SPDX-License-Identifier: Apache-2.0
"""A contender as the comparing process sees it: a process that it has forked, and a socket to each of its ranks.

    comparing process --fork--> contender's process --fork--> ranks 0..N-1
            |                        | one Report, when it has ended        |
            '------------------------'--------------------------------------' turns, and what they have shown

A contender that dies, hangs or raises is a process that has ended, with its words; nobody else is concerned. Every
process dies with the one that forked it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import IO, Any, final

from stratagem.comparison.protocol import Observed, Paused, Ready, Timed, Turn
from stratagem.strategy.rank_process import Rank, Report, readable

_LONGEST = 104  # bytes of a socket's path, the least of all systems
_TO_END = 40.0  # seconds: what hooks and teardown may take, of this process and of the ranks that it waits for


@final
class Running:
    """One contender's process: `start`, `await_ready`, `turn` as often as wanted, `stop`; and `close`, always.

    Args:
        name: of the contender.
        folder: takes its socket, what it prints, and its final parameters.
        patience: how long it may be silent in its turn.

    Attributes:
        ready: what its ranks said before their first step, by rank.
        observed: what they saw, in the order of arrival.
        timed: what they measured, per turn.
        startup_s: from the fork until the last rank was ready.
        error: why it ended before its time; empty as long as it did not.
    """

    def __init__(self, name: str, folder: Path, patience: timedelta) -> None:
        self.name, self._patience = name, patience.total_seconds()
        folder.mkdir()
        self.final, self.output, self.address = folder / "final.pt", folder / "output.txt", _address(folder)
        self.ready: dict[int, Ready] = {}
        self.observed: list[Observed] = []
        self.timed: list[list[Timed]] = []
        self.startup_s: float | None = None
        self.error = ""
        self._has_final = self._ended = False
        self._began = 0.0
        self._ranks: dict[int, Connection] = {}
        self._strangers: list[Connection] = []
        self._paused: set[int] = set()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(self.address)
        self._server.listen(256)
        self._process: ForkProcess | None = None
        self._pipe: Connection | None = None
        self._stacks: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed in `close`

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self, body: Callable[[], None], others: Iterable[Running]) -> None:
        """Fork the process.

        Args:
            body: its work.
            others: contenders that run already; the new process lets go of their sockets.
        """
        parent, context = os.getpid(), multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        strangers = [each for other in others for each in other._held()]

        def main() -> None:
            for each in [*strangers, self._server]:
                each.close()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _print_into(self.output)
            Rank(0, theirs, self._stacks).main(lambda rank, message: body(), parent)

        self._pipe, self._process = ours, context.Process(target=main, name=self.name)
        self._began = time.monotonic()
        with warnings.catch_warnings():  # of threads in this process; see `stratagem.strategy.fork_safety`
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()
        ours.send(None)

    def await_ready(self) -> bool:
        """Wait until all of its ranks stand before their first step; returns whether they do."""
        if self._collect(lambda: bool(self.ready) and len(self.ready) == self._num_ranks()):
            self.startup_s = max(ready.at for ready in self.ready.values()) - self._began
        return self.alive

    def turn(self, turn: Turn) -> bool:
        """Let every rank take a turn, and wait for its end; returns whether all came to it."""
        self.begin(turn)
        return self.await_end()

    def begin(self, turn: Turn) -> None:
        """Let every rank take a turn."""
        self._paused.clear()
        if self.alive:
            if turn.kind == "time":
                self.timed.append([])
            self._tell(turn)

    def await_end(self) -> bool:
        """Wait for the end of the turn that was begun; returns whether all ranks came to it."""
        return self.alive and self._collect(lambda: len(self._paused) == self._num_ranks())

    def stop(self) -> None:
        """Let the training end as trainings do, and wait for it; what goes wrong now is an error too."""
        self.begin_stop()
        self.await_stop()

    def begin_stop(self) -> None:
        """Let the training end as trainings do; several may do so at once."""
        if self.alive:
            self._tell(Turn("stop"))

    def await_stop(self) -> None:
        """Wait for the end that was begun; what goes wrong now is an error too."""
        if self.alive:
            self._patience = min(self._patience, _TO_END)
            self._collect(lambda: False)

    @property
    def alive(self) -> bool:
        """Whether it can take a turn."""
        return not self._ended

    @property
    def has_final(self) -> bool:
        """Whether its final parameters lie in `final`."""
        return self._has_final

    def let_go(self) -> None:
        """Close the sockets: a rank that waits for its turn, or speaks, then ends by itself with all it started."""
        for each in self._ranks.values():
            each.close()

    def close(self, patience: float = 0.0) -> None:
        """End every process and give back what was held.

        Args:
            patience: seconds for processes to end by themselves, after `let_go`.
        """
        if self._process is not None and self._process.pid is not None:
            if not self._ended:
                self._process.join(patience)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
            self._process.close()
            self._process = None
        for each in self._held():
            each.close()
        self._stacks.close()

    def _held(self) -> list[Any]:
        pipes = [self._pipe] if self._pipe is not None else []
        return [self._server, *pipes, *self._ranks.values(), *self._strangers]

    # -- talk ------------------------------------------------------------------------------------------------------

    def _num_ranks(self) -> int:
        return next((ready.num_ranks for ready in self.ready.values()), 1)

    def _tell(self, turn: Turn) -> None:
        for each in self._ranks.values():
            with contextlib.suppress(OSError):  # it has died; its process will say how
                each.send(turn)

    def _collect(self, done: Callable[[], bool]) -> bool:
        """Take in messages until `done`, or until the process has ended; returns whether it was the first."""
        assert self._pipe is not None
        assert self._process is not None
        heard = time.monotonic()
        while not done():
            left = heard + self._patience - time.monotonic()
            if left <= 0:
                self._give_up(f"it was silent for {self._patience:.0f} s in its turn, and was ended")
                return False
            talking = [*self._ranks.values(), *self._strangers]
            signs = wait([self._server, self._pipe, self._process.sentinel, *talking], left)
            for sign in signs:
                if sign is self._server:
                    self._strangers.append(Connection(self._server.accept()[0].detach()))
                elif isinstance(sign, Connection) and sign is not self._pipe:
                    self._hear(sign)
            if self._pipe in signs or self._process.sentinel in signs:
                self._end()
                return done()
            heard = time.monotonic() if signs else heard
        return True

    def _hear(self, pipe: Connection) -> None:
        try:
            message = pipe.recv()
        except (EOFError, OSError):  # the rank has ended; the process will say why
            self._ranks = {rank: each for rank, each in self._ranks.items() if each is not pipe}
            self._strangers = [each for each in self._strangers if each is not pipe]
            pipe.close()
            return
        if isinstance(message, Ready):
            self._strangers.remove(pipe)
            self._ranks[message.rank], self.ready[message.rank] = pipe, message
        elif isinstance(message, Observed):
            self.observed.append(message)
        elif isinstance(message, Timed):
            self.timed[-1].append(message)
        elif isinstance(message, Paused):
            self._paused.add(message.rank)
            self._has_final |= bool(message.file)

    def _end(self) -> None:
        """The process has said its last word, or died without."""
        assert self._pipe is not None
        assert self._process is not None
        self._ended = True
        report: Report | None = None
        with contextlib.suppress(EOFError, OSError):
            if self._pipe.poll():
                report = pickle.loads(self._pipe.recv_bytes())
        for pipe in list(self._ranks.values()):
            with contextlib.suppress(OSError):
                while not pipe.closed and pipe.poll():
                    self._hear(pipe)
        self._process.join(_TO_END if report is not None else None)
        if report is None:
            code = self._process.exitcode or 0
            self.error = _death(code)
            stack = readable(os.pread(self._stacks.fileno(), 1 << 20, 0).decode(errors="replace"))
            self.error += f"\n{stack}" if stack else ""
        elif report.kind != "returned":
            self.error = report.summary.removeprefix("stratagem.errors.").removeprefix("RankError: ")
            if not report.summary.startswith("stratagem.errors."):
                self.error += f"\n\n{report.details.strip()}"

    def _give_up(self, why: str) -> None:
        assert self._process is not None
        self.error, self._ended = why, True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            assert self._process.pid is not None
            os.killpg(self._process.pid, signal.SIGKILL)


def _address(folder: Path) -> str:
    """Of a socket in this folder; where its path is longer than a socket's may be, a name that is no file."""
    path = str(folder / "s")
    return path if len(os.fsencode(path)) < _LONGEST else f"\0stratagem-{uuid.uuid4().hex}"


def _print_into(file: Path) -> None:
    """What the contender prints goes into a file: the terminal belongs to the comparison."""
    sys.stdout.flush()
    sys.stderr.flush()
    with file.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _death(code: int) -> str:
    if code >= 0:
        return f"its process left with code {code} before its work was done"
    name = re.sub(r"^Signals\.", "", str(signal.Signals(-code).name))
    return f"its process was killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")
