# SPDX-License-Identifier: Apache-2.0
"""The watch over forked ranks: start them, hear them, find the first cause of a failure, and leave no process behind.

    parent          start      tell(message)    wait                                        close
                      |            |             |                                            |
    rank 0..N-1     forked ---- waits ------- works ---- one Report through a pipe ---- ended, with all it started

What ends the watch before all ranks have returned:

    a rank raised, died or left   the others get `Patience.unaware` to notice by themselves, then they are killed; ranks
                                  that have reported a failure get `Patience.cleanup` for their hooks and teardown
    a rank returned               the others get `timeout` to return too, and never less than `Patience.return_`
    Ctrl-C                        it is passed on; a second one kills
    SIGTERM                       it is passed on

Note [the cause]: when one rank fails, all others fail a moment later because it is gone. The cause is the first failure
that does not merely say "a peer is gone". If there is none, a rank that had to be killed while the others complained
of silence is the cause, and the stack in which it hung is the explanation.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from types import FrameType
from typing import IO, Any, final

from stratagem.errors import RankError
from stratagem.strategy.rank_process import Rank, Report, readable


@final
@dataclass(frozen=True)
class Patience:
    """How long ranks may go on after something has gone wrong.

    Args:
        unaware: ranks that have not noticed.
        cleanup: ranks that have reported a failure and run their hooks and teardown.
        interrupted: all, after Ctrl-C.
        terminated: all, after SIGTERM.
        return_: ranks whose work is done on other ranks; rank 0 has results to write.
        stack: ranks that are asked where they hang.
    """

    unaware: timedelta = timedelta(seconds=3)
    cleanup: timedelta = timedelta(seconds=30)
    interrupted: timedelta = timedelta(seconds=10)
    terminated: timedelta = timedelta(seconds=30)
    return_: timedelta = timedelta(seconds=60)
    stack: timedelta = timedelta(seconds=1)


@final
@dataclass
class _Watched:
    """The parent's view of one rank."""

    number: int
    process: ForkProcess
    pipe: Connection
    stacks: IO[bytes]
    death: int = -1  # a descriptor that becomes readable when it dies
    report: Report | None = None
    exitcode: int | None = None
    ended: float = math.inf
    stack: str | None = None  # set if it was killed by the watch: where it was

    def look(self) -> None:
        """Take in what there is to know now."""
        ended = _exit_status(self.process)  # before the pipe: what an ended process wrote is then all there
        if self.report is None and not self.pipe.closed and self.pipe.poll():
            try:
                self.report = pickle.loads(self.pipe.recv_bytes())
            except (EOFError, OSError):
                self.pipe.close()
        if ended is not None and self.exitcode is None:
            self.exitcode, self.ended = ended, time.monotonic()

    @property
    def failed(self) -> bool:
        """Whether it raised, or is gone without having returned."""
        if self.report is not None:
            return self.report.kind != "returned"
        return self.exitcode is not None

    def written(self) -> str:
        """What faulthandler has written about it."""
        size = os.fstat(self.stacks.fileno()).st_size
        return os.pread(self.stacks.fileno(), size, 0).decode(errors="replace")

    def send(self, signum: int) -> None:
        """Send it a signal, if it is still there."""
        if self.exitcode is None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signum)


@final
@dataclass
class Supervisor:
    """Forks ranks of this process and watches them; used in the order `start`, `tell`, `wait`, `close`.

    Attributes:
        num_ranks: how many.
        timeout: how long ranks may go on after another has returned.
        patience: how long they may go on after something has gone wrong.
    """

    num_ranks: int
    timeout: timedelta
    patience: Patience = field(default_factory=Patience)
    _ranks: list[_Watched] = field(default_factory=list)
    _signals: list[int] = field(default_factory=list)
    _deadline: float = math.inf  # for ranks that have noticed nothing
    _wakeup: tuple[int, int] = (-1, -1)
    _handlers: dict[int, Any] = field(default_factory=dict)

    def start(self, body: Callable[[Rank, Any], None]) -> None:
        """Fork all ranks; each waits for `tell`, and then calls `body(rank, message)`."""
        self._wakeup = os.pipe()
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(signum) is not None:  # else it is not Python's, and could not be put back
                    self._handlers[signum] = signal.signal(signum, self._note)
        # Frozen, what the ranks inherit is left alone by their collectors, and so stays shared.
        thaw = gc.unfreeze if gc.get_freeze_count() == 0 else bool
        gc.freeze()
        try:
            for number in range(self.num_ranks):
                self._fork(number, body)
        finally:
            thaw()

    def _fork(self, number: int, body: Callable[[Rank, Any], None]) -> None:
        parent, context = os.getpid(), multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        stacks = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # closed in `close`; it has no name

        def main() -> None:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
            for rank in self._ranks:
                rank.pipe.close()
            Rank(number, theirs, stacks).main(body, parent)

        rank = _Watched(number, context.Process(target=main, name=f"rank {number}"), ours, stacks)
        self._ranks.append(rank)
        with warnings.catch_warnings():  # of threads in the parent: see Note [OpenMP and fork]
            warnings.simplefilter("ignore", DeprecationWarning)
            rank.process.start()
        theirs.close()
        assert rank.process.pid is not None
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            rank.death = os.pidfd_open(rank.process.pid)

    def tell(self, message: Any) -> None:
        """Send every rank the message it waits for."""
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has died already; `wait` will say how
                rank.pipe.send(message)

    def wait(self) -> None:
        """Wait until every rank has returned and ended.

        Raises:
            RankError: a rank failed.
            SystemExit: with 128 + signal, after Ctrl-C or SIGTERM.
        """
        while running := [rank for rank in self._ranks if rank.exitcode is None]:
            late = [rank for rank in running if self._due(rank) <= time.monotonic()]
            if late:
                self._kill(late)
                continue
            # Not the sentinel where it can be avoided: it stays open as long as what the rank itself has forked.
            signs: list[Any] = [rank.process.sentinel if rank.death < 0 else rank.death for rank in running]
            signs += [rank.pipe for rank in running if rank.report is None and not rank.pipe.closed]
            left = min(self._due(rank) for rank in running) - time.monotonic()
            connection.wait([*signs, self._wakeup[0]], None if math.isinf(left) else max(0.0, left))
            for rank in running:
                rank.look()
            self._heed_signals()
        if self._signals:
            raise SystemExit(128 + self._signals[0])
        if any(rank.failed or rank.stack is not None for rank in self._ranks):
            error = self._error()
            silent = [rank for rank in self._ranks if rank.report is None and rank.stack is None]
            error.dead = tuple(rank.number for rank in silent)
            raise error

    def kill(self, signum: int) -> None:
        """Send every living rank a signal."""
        for rank in self._ranks:
            rank.send(signum)

    def close(self) -> None:
        """End every process of the ranks and give back what was held."""
        for rank in self._ranks:
            if rank.process.pid is not None:
                rank.send(signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)  # what the rank itself started
        for rank in self._ranks:
            if rank.process.pid is not None:
                rank.process.join()
                rank.process.close()
            if rank.death >= 0:
                os.close(rank.death)
            rank.pipe.close()
            rank.stacks.close()
        self._ranks = []
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._handlers = {}
        for descriptor in self._wakeup:
            if descriptor >= 0:
                os.close(descriptor)
        self._wakeup = (-1, -1)

    # -- when it is enough -----------------------------------------------------------------------------------------

    def _due(self, rank: _Watched) -> float:
        """When `rank` will have had its time (`time.monotonic`)."""
        if self._signals:
            return self._deadline
        if rank.report is not None:  # it has only to end
            return rank.report.at + self.patience.cleanup.total_seconds()
        failures = [other for other in self._ranks if other.failed]
        if failures:
            first = min(other.report.at if other.report else other.ended for other in failures)
            return first + self.patience.unaware.total_seconds()
        returned = [other.report.at for other in self._ranks if other.report is not None]
        return min(returned, default=math.inf) + max(self.timeout, self.patience.return_).total_seconds()

    def _kill(self, late: list[_Watched]) -> None:
        """Ask ranks where they are, then kill them."""
        for rank in late:
            if rank.report is None and not self._signals:
                rank.send(signal.SIGUSR1)
        patience = time.monotonic() + self.patience.stack.total_seconds()
        for rank in late:
            text = ""
            while rank.report is None and not self._signals and time.monotonic() < patience:
                time.sleep(0.02)
                before, text = text, rank.written()
                if text and text == before:
                    break
            if rank.report is None or rank.report.kind != "returned":
                rank.stack = text
            rank.send(signal.SIGKILL)
            rank.process.join()
            rank.look()

    # -- signals ---------------------------------------------------------------------------------------------------

    def _note(self, signum: int, frame: FrameType | None) -> None:
        os.write(self._wakeup[1], bytes([signum]))

    def _heed_signals(self) -> None:
        while connection.wait([self._wakeup[0]], 0):
            for signum in os.read(self._wakeup[0], 64):
                again = signum in self._signals
                self._signals.append(signum)
                if again and signum == signal.SIGINT:
                    self._deadline = time.monotonic()
                    return
                patience = self.patience.interrupted if signum == signal.SIGINT else self.patience.terminated
                self._deadline = min(self._deadline, time.monotonic() + patience.total_seconds())
                self.kill(signum)

    # -- what to say -----------------------------------------------------------------------------------------------

    def _error(self) -> RankError:
        """The one error of the run: see Note [the cause]."""
        blamed: list[tuple[float, _Watched]] = []
        complaints: list[tuple[float, _Watched]] = []
        for rank in self._ranks:
            if rank.report is not None and rank.report.kind != "returned":
                (complaints if rank.report.consequence else blamed).append((rank.report.at, rank))
            elif rank.report is None and rank.stack is None:
                blamed.append((rank.ended, rank))
        hanging = [(0.0, rank) for rank in self._ranks if rank.report is None and rank.stack is not None]
        for suspects in (blamed, hanging, complaints):
            if suspects:
                rank = min(suspects, key=lambda suspect: suspect[0])[1]
                complaint = min(complaints, key=lambda suspect: suspect[0])[1] if complaints else None
                return self._describe(rank, complaint)
        slow = next(rank for rank in self._ranks if rank.stack is not None)
        return self._describe(slow, None)

    def _describe(self, rank: _Watched, complaint: _Watched | None) -> RankError:
        report = rank.report
        if report is not None:
            error = RankError(rank.number, self.num_ranks, report.summary, report.details, exitcode=report.exitcode)
            with contextlib.suppress(Exception):  # an exception whose class this process cannot build
                error.cause = pickle.loads(report.exception) if report.exception else None
            return error
        if rank.stack is not None:
            summary = "it hung and was killed"
            details = readable(rank.stack) or "(it did not say where: it did not answer SIGUSR1)"
            if complaint is not None and complaint.report is not None:
                summary += f"; rank {complaint.number} had given up waiting: {complaint.report.summary}"
            else:
                summary += ", long after another rank had returned"
            return RankError(rank.number, self.num_ranks, summary, details)
        assert rank.exitcode is not None
        return RankError(
            rank.number, self.num_ranks, _death(rank.exitcode), readable(rank.written()), exitcode=rank.exitcode
        )


def _exit_status(process: ForkProcess) -> int | None:
    """The exit code or minus the signal, None while it runs. Leaves it as a zombie, so that its group stays its own."""
    assert process.pid is not None
    try:
        found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # somebody else has collected it, through multiprocessing
        return process.exitcode
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _death(code: int) -> str:
    if code >= 0:
        return f"it exited with code {code} before its work was done"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"it was killed by {name}" + (" (out of memory?)" if code == -signal.SIGKILL else "")


@contextlib.contextmanager
def supervised(num_ranks: int, timeout: timedelta, patience: Patience | None = None) -> Iterator[Supervisor]:
    """A supervisor that is closed in the end."""
    supervisor = Supervisor(num_ranks, timeout, patience or Patience())
    try:
        yield supervisor
    finally:
        supervisor.close()
