# SPDX-License-Identifier: Apache-2.0
"""The formulas of the stages: bytes sent and bytes held, by arithmetic alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from stratagem.collectives import Communicator, Op, Wire, chunk_bounds
from stratagem.collectives.wire import wire_format
from stratagem.plugins.zero.bucket import Bucket
from stratagem.plugins.zero.lane import Lane
from stratagem.plugins.zero.settings import ZeroSettings


def parameter_wire(bucket: Bucket, settings: ZeroSettings) -> Wire:
    """How the parameters of a bucket travel: only floats can travel narrow."""
    return Wire(settings.parameter_wire) if bucket.cut.layout.dtype.is_floating_point else Wire.FULL


def wire_bytes(
    gathers: Iterable[tuple[Bucket, int]], lane: Lane, settings: ZeroSettings, *, num_reductions: int
) -> dict[str, float]:
    """Bytes that this rank sends per optimizer step, by axis. Local.

    Around a ring, a reduce-scatter sends every slice but the rank's own, and an all-gather every slice but the right
    neighbour's. With `partition: flat` slices are equal and both are `(N-1)/N` of the bucket; with `parameter` they are
    not, and ranks send different amounts, which are `(N-1)/N` in the mean.

    Args:
        gathers: every bucket, and how often per step its parameters are gathered.
        lane: over the axes.
        settings: for the wires.
        num_reductions: how often per step gradients are reduced.
    """
    n, r, rank = lane.shard.size, lane.replicate.size, lane.shard.rank
    shard = replicate = 0.0
    for bucket, num_gathers in gathers:
        dtype = bucket.cut.layout.dtype
        slices = [stop - start for start, stop in bucket.cut.bounds]
        others, passed_on = slices[:rank] + slices[rank + 1 :], slices[:]
        del passed_on[(rank + 1) % n]
        gathered = wire_format(dtype, op=None, wire=parameter_wire(bucket, settings), n=n)
        if bucket.is_trained or bucket.values is None:  # frozen ones that are elsewhere are fetched like any other
            shard += num_gathers * sum(map(gathered.num_bytes, passed_on))
        if not bucket.is_trained:
            continue
        reduced = wire_format(dtype, op=Op.MEAN, wire=Wire(settings.gradient_wire), n=n)
        shard += num_reductions * sum(map(reduced.num_bytes, others))
        replicate += num_reductions * reduced.num_bytes(slices[rank])
    found = {lane.shard.axis: shard}
    return found if r == 1 else {**found, lane.replicate.axis: 2 * (r - 1) / r * replicate}


def group_bytes(gathers: Iterable[tuple[Bucket, int]], group: Communicator) -> float:
    """Bytes that this rank sends per optimizer step to gather secondary shards within its group. Local.

    Args:
        gathers: every bucket, and how often per step it is gathered so.
        group: over the group.
    """
    total = 0
    for bucket, num_gathers in gathers:
        start, stop = chunk_bounds(bucket.numel, group.size)[(group.rank + 1) % group.size]
        total += num_gathers * (bucket.numel - (stop - start)) * bucket.cut.layout.dtype.itemsize
    return total


def held_bytes(parameters: Sequence[nn.Parameter], buckets: Sequence[Bucket], *, stage: int) -> dict[str, int]:
    """Bytes that this rank holds between backward and step, by kind. Local.

    Args:
        parameters: all of the module; those in no bucket are whole, with whole gradients.
        buckets: the others.
        stage: 1, 2 or 3.
    """
    in_buckets = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
    rest = [p for p in parameters if id(p) not in in_buckets]
    held = sum(p.numel() * p.dtype.itemsize for p in rest)
    gradients = sum(p.numel() * p.dtype.itemsize for p in rest if p.requires_grad)
    moment = 0
    for bucket in buckets:
        mine, layout = bucket.span[1] - bucket.span[0], bucket.cut.layout
        held += layout.num_bytes if bucket.values is not None else mine * layout.dtype.itemsize
        held += mine * bucket.state_dtype.itemsize if bucket.has_master else 0
        if bucket.is_trained:
            gradients += layout.num_bytes if stage == 1 else mine * bucket.state_dtype.itemsize
            gradients += mine * bucket.state_dtype.itemsize if stage == 1 and bucket.has_master else 0
            moment += mine * bucket.state_dtype.itemsize
    return {"parameters": held, "gradients": gradients, "optimizer": moment}
