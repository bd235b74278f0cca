# SPDX-License-Identifier: Apache-2.0
"""A lane: communicators of their own and a thread that runs their collectives, while this one computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar, final

import torch

from stratagem.collectives import Communicator, Worker
from stratagem.technique import Context

_P = ParamSpec("_P")
_R = TypeVar("_R")

SHARD_AXES = ("dp_shard", "cp")
"""Mesh axes over which ZeRO divides, flattened into one row."""


@final
class Lane:
    """The communicators of one kind of traffic, and a thread that runs what is submitted, in order.

    Opening is collective over the world.

    Args:
        context: the run.
        name: kinds of traffic that may run at the same time need lanes of different names.
        group: also open a communicator over runs of so many neighbours along the shard axes.

    Attributes:
        shard: along the axes over which ZeRO divides.
        replicate: between the groups that divide one replica each.
        data: both, flattened: every rank that has a gradient to average.
        group: of this rank's run of neighbours; None where none was asked for.
    """

    def __init__(self, context: Context, name: str, *, group: int | None = None) -> None:
        self.shard: Communicator = context.communicator(*SHARD_AXES, lane=name)
        self.replicate: Communicator = context.communicator("dp_replicate", lane=name)
        self.data: Communicator = context.communicator("dp_replicate", *SHARD_AXES, lane=name)
        self.group: Communicator | None = None
        if group is not None:
            self.group = context.communicator(*SHARD_AXES, lane=name, group=group)
        self._worker = Worker(name=f"zero-{name}")
        self._on_cuda = context.device.type == "cuda"

    def submit(self, fn: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Runs `fn` after everything submitted before it, and after what the caller's CUDA stream was told so far.

        When the future is done the device is done, too.
        """
        if not self._on_cuda:
            return self._worker.submit(fn, *args, **kwargs)
        computed = torch.cuda.Event()
        computed.record()

        def on_side_stream() -> _R:
            with torch.cuda.stream(side := torch.cuda.Stream()):
                side.wait_event(computed)
                result = fn(*args, **kwargs)
            side.synchronize()
            return result

        return self._worker.submit(on_side_stream)

    def close(self) -> None:
        """Ends the thread after what is queued. Local."""
        self._worker.close()

    def abort(self) -> None:
        """Wakes the thread if it waits for a peer, and ends it. Local."""
        for communicator in (self.shard, self.replicate, self.data, self.group):
            if communicator is not None:
                communicator.abort()
        self._worker.close()
