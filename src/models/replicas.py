# SPDX-License-Identifier: Apache-2.0
"""Which part of the data this process reads: the one thing that data modules and callbacks ask a strategy."""

from __future__ import annotations

import lightning.pytorch as pl


def data_replicas(trainer: pl.Trainer | None) -> tuple[int, int]:
    """(number of data ranks, this one's number), by `strategy.distributed_sampler_kwargs`; (1, 0) without it.

    Ranks that differ only in a tensor, pipeline or context axis have the same number: they read the same samples.
    Lightning's own distributed strategies have the attribute too. Not collective.
    """
    kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) if trainer is not None else None
    return (int(kwargs["num_replicas"]), int(kwargs["rank"])) if kwargs else (1, 0)
