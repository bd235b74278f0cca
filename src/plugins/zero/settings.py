# SPDX-License-Identifier: Apache-2.0
"""What can be chosen about the ZeRO stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stratagem.errors import ConfigError


@dataclass(frozen=True)  # not @final: jsonargparse takes no default value of a final class
class ZeroSettings:
    """How a ZeRO stage divides, packs and sends.

    What clips gradients by the module's parameters finds none: see the package's docstring.

    Args:
        bucket_mib: memory for gradients on their way. Stage 1 keeps all gradients, in buckets of at most this size.
            Stages 2 and 3 fill half of it while the other half travels; a gradient larger than half of it travels from
            where autograd put it.
        first_bucket_mib: cap of the first bucket, small so that communication starts early.
        partition: where a bucket is cut. `flat`: at any element, evenly, for optimizers that treat each element for
            itself (SGD, Adam, ...). `parameter`: between parameters, as evenly as these allow, for optimizers that need
            whole matrices (Muon, Adafactor, Shampoo, ...); those are refused by `flat`.
        accumulation: what stages 2 and 3 do with the gradients of a micro-batch. `partition`: reduce them at once, so
            that only a share is ever kept, at the wire's cost of one reduction per micro-batch. `whole`: pile them up
            whole, as stage 1 does, and reduce once per optimizer step.
        unused_parameters: `detect` allows parameters without gradient, on some ranks or on all; `none` promises that
            every trainable parameter gets one in every backward, saves a small message, and refuses when that is not
            so.
        broadcast_buffers: after each step give all ranks rank 0's values of the buffers that changed.
        overlap: send during backward; `false` waits for its end, for modules whose parameters receive gradients in
            several nested backward passes.
        gradient_wire: how gradients travel; each hop adds in float32 whatever the wire. Per float32 value `full` sends
            4 bytes, `bf16` 2, `int8` 1.016 and `int4` 0.516 (a code and its share of a block's scale, one per 256).
            Each of the N hops around the ring errs by at most `1/254` (int8) or `1/14` (int4) of the largest magnitude
            in a block, so a mean by at most that much of the mean of the ranks' largest.
        parameter_wire: how parameters travel, with the same bytes, and rounded once. A narrow one rounds what every
            rank computes with, while owners keep the exact values and step those (as ZeRO++ does for weights): 4 more
            bytes per owned parameter.
        gather: when stages 1 and 2 wait for the parameters that others have stepped. `step`: before the optimizer's
            step returns. `forward`: when a module's forward, or anybody else, looks at them, so that they travel while
            the next forward runs; do not read parameters that you keep in variables of your own in between.
        offload: `cpu` keeps masters and optimizer state in pinned host memory when the model is on CUDA; without effect
            on a model that is on the CPU already.
        persistence_threshold: stage 3 keeps modules with at most this many elements whole on every rank.
        prefetch: how many blocks stage 3 fetches ahead.
        secondary_shard: stage 3, on G of the N ranks that divide a replica (the ranks of one machine): what forward has
            fetched from all of them is kept, divided over runs of G neighbours, until the end of backward, which
            fetches from those alone (hpZ of ZeRO++). Of every parameter byte a rank then sends `(N-1)/N` along the
            whole axis and `(G-1)/G` within its run, in the place of `2 (N-1)/N` along the axis, for `1/G` of the
            parameters' memory. G divides N; 0: no such shard.
        restore_parameters: whether stage 3 gives every rank the whole model at the end of a run, as code after `fit`
            expects; set it to false for a model that no rank can hold, and use its checkpoint.
        max_live_mib: stage 3 fetches nothing ahead while so many MiB of fetched parameters are alive.
    """

    bucket_mib: float = 25.0
    first_bucket_mib: float = 1.0
    partition: Literal["flat", "parameter"] = "flat"
    accumulation: Literal["partition", "whole"] = "partition"
    unused_parameters: Literal["detect", "none"] = "detect"
    broadcast_buffers: bool = True
    overlap: bool = True
    gradient_wire: Literal["full", "bf16", "int8", "int4"] = "full"
    parameter_wire: Literal["full", "bf16", "int8"] = "full"
    gather: Literal["step", "forward"] = "step"
    offload: Literal["none", "cpu"] = "none"
    persistence_threshold: int = 1024
    prefetch: int = 1
    secondary_shard: int = 0
    max_live_mib: float = 1024.0
    restore_parameters: bool = True

    def __post_init__(self) -> None:
        for name in ("bucket_mib", "first_bucket_mib", "max_live_mib"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", where=f"zero.{name}", allowed="numbers above 0")
        for name in ("persistence_threshold", "prefetch"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", where=f"zero.{name}", allowed="0 or more")
        if self.secondary_shard < 0:
            raise ConfigError(
                f"secondary_shard is {self.secondary_shard}",
                where="zero.secondary_shard",
                allowed="0 for none, or a number of ranks",
            )
