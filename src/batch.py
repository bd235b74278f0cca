# SPDX-License-Identifier: Apache-2.0
"""The global batch: one equation, `global_batch = micro_batch * accumulate * data_ranks`, solved for what is missing.

The global batch belongs to the experiment, the rest to the machine: whoever changes the number of ranks keeps the
global batch, and the micro-batch or the accumulation gives way.

Example:
    >>> BatchPlan.solve(data_ranks=4, global_batch=64, micro_batch=4)
    BatchPlan(micro_batch=4, accumulate=4, data_ranks=4)
    >>> BatchPlan.solve(data_ranks=2, micro_batch=8).global_batch
    16
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from stratagem.errors import ConfigError


@final
@dataclass(frozen=True)
class BatchPlan:
    """How a global batch is cut.

    Args:
        micro_batch: samples that one rank puts through the model at once.
        accumulate: micro-batches per rank and optimizer step.
        data_ranks: ranks that read different samples.
    """

    micro_batch: int
    accumulate: int
    data_ranks: int

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.micro_batch * self.accumulate * self.data_ranks

    @classmethod
    def solve(
        cls,
        *,
        data_ranks: int,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        accumulate: int | None = None,
    ) -> BatchPlan:
        """Solves for what is left out; what cannot be known is 1 accumulation.

        Args:
            data_ranks: ranks that read different samples.
            global_batch: samples per optimizer step over all ranks.
            micro_batch: samples per rank and forward pass.
            accumulate: micro-batches per optimizer step.

        Raises:
            ConfigError: nothing to solve from, or numbers that do not divide; the message has the nearest ones that do.
        """
        for name, value in (("global_batch", global_batch), ("micro_batch", micro_batch), ("accumulate", accumulate)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}", where=f"data.{name}", allowed="whole numbers from 1")
        if global_batch is None:
            if micro_batch is None:
                raise ConfigError("neither global_batch nor micro_batch is given", where="data", do="give one of them")
            return cls(micro_batch, accumulate or 1, data_ranks)
        if micro_batch is None:
            accumulate = accumulate or 1
            unit = accumulate * data_ranks
            if global_batch % unit:
                raise _indivisible(
                    global_batch, unit, f"{accumulate} accumulated micro-batches on {data_ranks} data ranks"
                )
            return cls(global_batch // unit, accumulate, data_ranks)
        unit = micro_batch * data_ranks
        if global_batch % unit:
            raise _indivisible(global_batch, unit, f"micro-batches of {micro_batch} on {data_ranks} data ranks")
        solved = global_batch // unit
        if accumulate is not None and accumulate != solved:
            raise ConfigError(
                f"a global batch of {global_batch} in micro-batches of {micro_batch} on {data_ranks} data ranks takes "
                f"{solved} accumulated micro-batches, not {accumulate}",
                where="trainer.accumulate_grad_batches",
                allowed=str(solved),
                do="change it, or leave one of the three numbers out",
            )
        return cls(micro_batch, solved, data_ranks)


def _indivisible(global_batch: int, unit: int, cut: str) -> ConfigError:
    below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
    nearest = f"{below} or {above}" if below else str(above)
    return ConfigError(
        f"a global batch of {global_batch} cannot be cut into {cut}",
        where="data.global_batch",
        allowed=f"multiples of {unit}, for instance {nearest}",
        do="change it, trainer.accumulate_grad_batches or trainer.devices",
    )
