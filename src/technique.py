# SPDX-License-Identifier: Apache-2.0
"""A technique: what is done to a model along one axis, in plain torch.

A technique rewrites modules and states placements; it never reduces a gradient of another technique's axis, computes a
norm or writes a checkpoint. Techniques do not know each other. They meet in the `Context`: a later one reads the
placements that an earlier one stated.

    Technique          applied once, in `setup`: tensor, expert, context, pipeline parallelism
    DataTechnique      also owns the gradients between backward and the optimizer: ring DDP, the ZeRO stages

Life of a data technique, per optimizer step:

    begin()                        a forward pass starts
    (hooks fire during backward)   gradients arrive, buckets leave
    finish()                       backward is over: every gradient is reduced, or an error is raised
    no_sync()                      inside it, gradients pile up locally and nothing is sent
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from stratagem.collectives import Communicator, Traffic
from stratagem.mesh import MeshShape
from stratagem.placement import Placement


@final
@dataclass
class Context:
    """What one rank knows about the run: its place in the mesh, its communicators, and where every parameter lives.

    Args:
        shape: the mesh.
        rank: this process's rank in it.
        device: where this rank computes.
        transport: how CPU ranks talk: `auto`, `shared_memory`, `p2p`, or `native` for the backend's own collectives.
        timeout: how long a rank waits for another one before it gives up.
        traffic: counts every call and byte, per axis.
        placements: by parameter name in the unparallelised module.
    """

    shape: MeshShape
    rank: int
    device: torch.device
    transport: str = "auto"
    timeout: timedelta = timedelta(minutes=30)
    traffic: Traffic = field(default_factory=Traffic)
    placements: dict[str, Placement] = field(default_factory=dict)
    _communicators: dict[tuple[str, ...], Communicator] = field(default_factory=dict)

    def communicator(self, *axes: str) -> Communicator:
        """The communicator of this rank's row along the axes, opened at the first request.

        Opening is collective: every rank of the world must make the first request for the same axes in the same order.
        """
        axes = tuple(axis for axis in self.shape.sizes if axis in axes) if axes != ("ep",) else axes
        if axes not in self._communicators:
            self._communicators[axes] = Communicator.create(
                "+".join(axes),
                self.shape.rows(*axes),
                device=self.device,
                transport=self.transport,  # type: ignore[arg-type]  # checked there
                timeout=self.timeout,
                traffic=self.traffic,
            )
        return self._communicators[axes]

    def reduce(self, tensor: Tensor, axes: tuple[str, ...], op: str) -> None:
        """Reduces a small tensor in place over axes, by `sum`, `max`, `min` or `mean`. All ranks along them call it."""
        self.communicator(*axes).reduce_small(tensor, op)  # type: ignore[arg-type]

    def close(self) -> None:
        """Closes every communicator. All ranks call it, after the last collective."""
        for communicator in self._communicators.values():
            communicator.close()
        self._communicators.clear()

    def abort(self) -> None:
        """Tears every communicator down without waiting for any peer; threads blocked in one of them wake with an error."""
        for communicator in self._communicators.values():
            communicator.abort()
        self._communicators.clear()


class Technique(ABC):
    """What is done to a model along one axis."""

    axis: ClassVar[str]
    """The mesh axis this technique lives on."""

    @abstractmethod
    def apply(self, module: nn.Module, context: Context) -> None:
        """Rewrites the module in place and states placements in `context`.

        Every rank of the mesh calls it, in the strategy's order of techniques.

        Raises:
            PlanError: the module cannot be cut so; with the reason, the layer and the nearest legal degree.
        """

    def close(self) -> None:
        """Removes hooks and ends threads; called once, after the last step."""

    def abort(self) -> None:
        """As `close`, on the failing path: must not wait for a peer."""
        self.close()


class DataTechnique(Technique):
    """A technique that owns the gradients between backward and the optimizer."""

    @abstractmethod
    def begin(self) -> None:
        """A forward pass starts whose backward will be reduced, unless it lies within `no_sync`."""

    @abstractmethod
    def finish(self) -> None:
        """Waits until every gradient of the last backward is reduced; calling it again does nothing.

        Called at the end of every backward, and by the strategy where no backward ran on this rank, so that ranks
        whose control flow differs still meet.

        Raises:
            CommunicationError: a peer died or hung.
        """

    @contextmanager
    @abstractmethod
    def no_sync(self) -> Iterator[None]:
        """Within it gradients are accumulated locally and nothing is sent. Local."""

    @abstractmethod
    def wire_bytes_per_step(self) -> Mapping[str, float]:
        """The formula: bytes this rank sends for gradients per optimizer step, by axis. Local arithmetic on placements."""

    @abstractmethod
    def held_bytes(self) -> Mapping[str, int]:
        """The formula: bytes this rank holds, by kind (`parameters`, `gradients`, ...), without the optimizer's state."""
