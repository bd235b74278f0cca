# SPDX-License-Identifier: Apache-2.0
"""What every strategy lets one choose about the run itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from stratagem.errors import ConfigError
from stratagem.strategy.launcher import LauncherName


@dataclass(frozen=True)  # not @final: jsonargparse takes no default value of a final class
class RunSettings:
    """What every strategy lets one choose about the run itself.

    Args:
        timeout: how long a rank waits for another one before the run ends with an error.
        transport: how ranks talk. `auto`: shared memory between CPU ranks of one host, sends and receives between
            hosts, the backend's own collectives on CUDA. `shared_memory`, `p2p`, `native`: that one.
        launcher: how ranks are started. `auto`: forked from the warm parent where that is safe, else by a fresh start
            of the script; ranks that torchrun, SLURM or MPI started are taken as they are. `warm`, `subprocess`: that
            one.
        batch_size: what a DataLoader's `batch_size` means: `per_rank` (as in Lightning) or `global` (it is divided over
            the data ranks, so that one config gives the same steps on any number of ranks).
        backend: torch.distributed backend; Gloo on CPU and NCCL on CUDA where left out.
    """

    timeout: timedelta = timedelta(minutes=30)
    transport: Literal["auto", "shared_memory", "p2p", "native"] = "auto"
    launcher: LauncherName = "auto"
    batch_size: Literal["per_rank", "global"] = "per_rank"
    backend: str | None = None

    def __post_init__(self) -> None:
        if self.timeout <= timedelta(0):
            raise ConfigError(f"timeout is {self.timeout}", where="run.timeout", allowed="longer than nothing")
