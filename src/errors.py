# SPDX-License-Identifier: Apache-2.0
"""Every error a user can meet, in one small tree.

A message says four things: what is wrong, where, which values are allowed, and what to do. `UserError` builds
it from exactly those, so that no error forgets one; the command line prints the message alone, without a traceback.

Example:
    >>> raise ConfigError("devices is 0", where="trainer.devices", allowed="1 or more", do="set trainer.devices: 2")
    Traceback (most recent call last):
    ...
    stratagem.errors.ConfigError: trainer.devices: devices is 0. Allowed: 1 or more. To mend it: set trainer.devices: 2.
"""

from __future__ import annotations


class UserError(ValueError):
    """Something the user wrote or installed is wrong, and the user can mend it.

    Args:
        what: the fault, as a clause without a full stop.
        where: the config key, file or entry point at fault.
        allowed: which values would be right.
        do: the next thing to do.
    """

    def __init__(self, what: str, *, where: str = "", allowed: str = "", do: str = "") -> None:
        parts = [f"{where}: {what}" if where else what]
        if allowed:
            parts.append(f"Allowed: {allowed}")
        if do:
            parts.append(f"To mend it: {do}")
        super().__init__(". ".join(part.rstrip(".") for part in parts) + ".")
        self.what, self.where, self.allowed, self.do = what, where, allowed, do

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by fields: a rank's error travels to the process that reports it."""
        return _rebuild, (type(self), self.what, self.where, self.allowed, self.do)


class ConfigError(UserError):
    """A value or key of the configuration is not allowed."""


class MeshError(UserError):
    """The axes do not fit the devices."""


class PlanError(UserError):
    """A plan does not fit the module."""


class DataError(UserError):
    """The data cannot serve the run: missing, empty, not text, too short."""


class PluginError(UserError):
    """A plugin is unknown, claimed twice, or cannot be imported."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, read or fitted to this run."""


class CommunicationError(RuntimeError):
    """A peer died, hung or spoke out of turn; the message names the axis, the operation and the rank."""


class GuardError(RuntimeError):
    """The guard of a run has ended it, on every rank; `HangError` and `DriftError` are worth a new attempt."""


class HangError(GuardError):
    """This rank stood still; the message names its phase, its line and the collective it waits in."""


class DriftError(GuardError):
    """What must be equal on several ranks is not; the message names it and the odd ranks. A checkpoint taken since the
    last comparison may hold it."""


class DivergedError(GuardError):
    """Loss or gradient are beyond what the policy allows. The same data on the same weights would do it again."""


class RankError(RuntimeError):
    """A rank failed, and with it the run; raised by the process that started the ranks.

    Args:
        rank: the rank that failed first, of `num_ranks`.
        num_ranks: how many there were.
        summary: the cause in one line.
        details: that rank's own traceback, or the stack in which it hung.
        exitcode: its exit code, or minus the signal that ended it; None if it raised or hung.

    The attribute `cause` holds what it raised, where that could travel here, and `dead` all ranks whose process was
    gone without a word when the run ended: killed or crashed, not those that were killed because they hung.

    Example:
        >>> raise RankError(1, 4, "killed by SIGKILL (out of memory?)", exitcode=-9)
        Traceback (most recent call last):
        ...
        stratagem.errors.RankError: rank 1 of 4: killed by SIGKILL (out of memory?)
    """

    def __init__(
        self, rank: int, num_ranks: int, summary: str, details: str = "", *, exitcode: int | None = None
    ) -> None:
        text = f"rank {rank} of {num_ranks}: {summary}"
        super().__init__(f"{text}\n\n{details.rstrip()}" if details.strip() else text)
        self.rank, self.num_ranks = rank, num_ranks
        self.summary, self.details, self.exitcode = summary, details, exitcode
        self.cause: BaseException | None = None
        self.dead: tuple[int, ...] = ()


def _rebuild(cls: type[UserError], what: str, where: str, allowed: str, do: str) -> UserError:
    return cls(what, where=where, allowed=allowed, do=do)
