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

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, TypeVar, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from stratagem.checkpoint.parts import Part
from stratagem.checkpoint.tree import whole
from stratagem.collectives import Communicator, Traffic
from stratagem.collectives.communicator import Transport
from stratagem.errors import ConfigError
from stratagem.mesh import MeshShape
from stratagem.placement import Placement

_T = TypeVar("_T", bound=Tensor)


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
        idle: this rank's batch is a filler, there only to keep step: what it computes counts for nothing.
    """

    shape: MeshShape
    rank: int
    device: torch.device
    transport: Transport = "auto"
    timeout: timedelta = timedelta(minutes=30)
    traffic: Traffic = field(default_factory=Traffic)
    placements: dict[str, Placement] = field(default_factory=dict)
    idle: bool = False
    _communicators: dict[tuple[str, str], Communicator] = field(default_factory=dict)

    def communicator(self, *axes: str, lane: str = "main", group: int | None = None) -> Communicator:
        """The communicator of this rank's row along the axes, opened at the first request.

        Opening is collective: every rank of the world must make the first request for the same axes in the same order.

        Args:
            axes: mesh axes, flattened into one row; those of size 1 make no difference.
            lane: a communicator carries one collective at a time, so a background thread asks for a lane of its own.
            group: cut the row into runs of so many neighbours, of which this rank's one is meant; divides the row.
        """
        wanted = tuple(axis for axis in self.shape.sizes if axis in axes and self.shape.sizes[axis] > 1) or axes[:1]
        row = "+".join(axes if axes == ("ep",) else wanted)
        name = row if group is None else f"{row}/{group}"
        if (name, lane) not in self._communicators:
            rows = self.shape.rows(*row.split("+"))
            if group is not None:
                rows = tuple(each[k : k + group] for each in rows for k in range(0, len(each), group))
            self._communicators[name, lane] = Communicator.create(
                name,
                rows,
                device=self.device,
                transport=self.transport,
                timeout=self.timeout,
                traffic=self.traffic,
            )
        return self._communicators[name, lane]

    def reduce(self, tensor: Tensor, axes: tuple[str, ...], op: str) -> None:
        """Reduces a small tensor in place over axes, by `sum`, `max`, `min` or `mean`. All ranks along them call it."""
        self.communicator(*axes).reduce_small(tensor, op)  # type: ignore[arg-type]  # checked there

    def close(self) -> None:
        """Closes every communicator. All ranks call it, after the last collective."""
        for communicator in self._communicators.values():
            communicator.close()
        self._communicators.clear()

    def abort(self) -> None:
        """Tears every communicator down without waiting for a peer; threads blocked in one wake with an error."""
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

    @abstractmethod
    def close(self) -> None:
        """Removes hooks and ends threads; called once, after the last step."""

    def abort(self) -> None:
        """As `close`, on the failing path: must not wait for a peer."""
        self.close()


class DataTechnique(Technique):
    """A technique that owns the gradients between backward and the optimizer.

    Where it divides the module or the optimizer's state over ranks, it says how to put them together again, so that a
    checkpoint always shows what one process would have. The defaults are those of whole replicas.
    """

    context: Context
    """Set by `apply`."""

    module: nn.Module
    """Set by `apply`: what was given to it."""

    names: dict[int, str]
    """Set by `apply`: names in the unparallelised module by `id` of the parameter."""

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

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Takes over the optimizers, once, after `apply` and before the first step; may replace the tensors in their
        `param_groups` (never the groups, which schedulers hold on to). All ranks call it."""

    def placement_of(self, parameter: Tensor) -> Placement | None:
        """Where a tensor of an optimizer's `param_groups` lives; None for one that is not of the module. Local."""
        return self.context.placements.get(self.names.get(id(parameter), ""))

    def norm_parts(self, tensors: Iterable[Tensor]) -> list[tuple[Placement, Tensor]]:
        """The gradients of an optimizer's tensors, placed, for `global_norm`. Local.

        Every rank must find the same sets of shard axes among them, or the ranks would not meet in the norm: a
        technique that leaves a rank without any gradient adds a zero.
        """
        found = [(self.placement_of(t) or Placement("", tuple(t.shape)), t.grad) for t in tensors]
        return [(placement, gradient) for placement, gradient in found if gradient is not None]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state as one process would have it, whole, on rank 0 at least. All ranks call it."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """The inverse of `optimizer_state`; every rank has the whole state, or `Stored`s to read what it needs from.
        All ranks call it."""
        optimizer.load_state_dict(whole(state))

    def optimizer_parts(self, optimizer: Optimizer) -> dict[str, Any]:
        """As `optimizer_state`, with a `Part` for each tensor of which this rank holds only a part; what is no `Part`
        is equal on all ranks of the world. All ranks call it, and nothing large is sent."""
        return optimizer.state_dict()

    def module_parts(self, module: nn.Module) -> dict[str, Any]:
        """As `module_state`, with `Part`s as in `optimizer_parts`. All ranks call it, and nothing large is sent."""
        return self.buffers_of_first(module, module.state_dict())

    def buffers_of_first(self, module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        """The state with rank 0's buffers alone: within a window ranks have their own, and in the end all get rank 0's.

        Local.
        """
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for name, value in state.items():
            is_plain = type(value) is Tensor and value.layout is torch.strided and not value.is_quantized
            if is_plain and name not in parameters and value.numel() > 1:
                mine = self.context.rank == 0
                state[name] = Part.whole(value) if mine else Part(tuple(value.shape), value.dtype, (), ())
        return state

    def window_gradients(self) -> tuple[dict[str, Tensor], dict[str, Part]]:
        """Gradients of a window that is not over, by name: this rank's own, and its parts of those that are reduced.

        Local. Both are given back to `resume_window`, so that a checkpoint may be taken between two micro-batches.
        """
        named = self.module.named_parameters()
        return {name: parameter.grad for name, parameter in named if parameter.grad is not None}, {}

    def resume_window(self, own: Mapping[str, Tensor], reduced: Mapping[str, Any]) -> None:
        """Goes on from gradients of a window that was interrupted. Local.

        Args:
            own: by name; this rank's, or on another number of ranks the mean over those that there were.
            reduced: by name, `Stored`; already averaged.
        """
        for name, parameter in self.module.named_parameters():
            gradient = own.get(name)
            if name in reduced:  # averaged over ranks that all have it, it stays what it is
                averaged = whole(reduced[name])
                gradient = averaged if gradient is None else gradient + averaged
            if gradient is not None:
                parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)

    def module_state(self, module: nn.Module) -> dict[str, Any]:
        """The module's state as one process would have it, whole, on rank 0 at least. All ranks call it."""
        return module.state_dict()

    def load_module_state(self, module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """The inverse of `module_state`; every rank holds the whole state. All ranks call it."""
        module.load_state_dict(state, strict=strict)

    @abstractmethod
    def wire_bytes_per_step(self) -> Mapping[str, float]:
        """The formula: bytes this rank sends for gradients per optimizer step, by axis. Local arithmetic."""

    @abstractmethod
    def held_bytes(self) -> Mapping[str, int]:
        """The formula: bytes this rank holds, by kind (`parameters`, `gradients`), without the optimizer's state."""


@final
class ChangedBuffers:
    """Tells which modules' buffers changed since they were last sent, so that constant ones (rotary tables) never are.

    A buffer changed if it is another tensor or another version of it; one that was written through `.data` or by a
    kernel that counts no version is found by its values, on CPU and up to `compared_numel` elements (a copy is kept to
    compare with). A module's buffers go together: batch norm's kernel counts no version, but the module its batches.

    Args:
        module: with all modules below it, also those that get buffers later.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> watch = ChangedBuffers(norm)
        >>> watch.changed()
        [False]
        >>> _ = norm(torch.randn(3, 2))
        >>> watch.changed()
        [True]
    """

    compared_numel: ClassVar[int] = 2**18

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.settle()

    def changed(self) -> list[bool]:
        """Per module with buffers, in the same order on every rank: did one of them change? Local."""
        self._owners = [m for m in self._module.modules() if m._buffers]
        return [not self._is_as_before(owner) for owner in self._owners]

    def select(self, wanted: Sequence[bool]) -> list[Tensor]:
        """The buffers of the modules that `wanted`, one answer per entry of `changed`, names. Local."""
        pairs = zip(self._owners, wanted, strict=True)
        return unique(b for owner, is_wanted in pairs if is_wanted for b in owner._buffers.values() if b is not None)

    def settle(self) -> None:
        """From here on, changes count from now. Local."""
        self._owners = [m for m in self._module.modules() if m._buffers]
        self._marks = {id(owner): [self._mark(b) for b in _held(owner)] for owner in self._owners}

    def _mark(self, buffer: Tensor) -> tuple[int, int, Tensor | None]:
        compared = buffer.device.type == "cpu" and buffer.numel() <= self.compared_numel and not buffer.is_sparse
        return id(buffer), buffer._version, buffer.detach().clone() if compared else None

    def _is_as_before(self, owner: nn.Module) -> bool:
        buffers, marks = _held(owner), self._marks.get(id(owner), ())
        return len(buffers) == len(marks) and all(
            (id(b), b._version) == (known, version) and (copy is None or torch.equal(b, copy))
            for b, (known, version, copy) in zip(buffers, marks, strict=True)
        )


def _held(owner: nn.Module) -> list[Tensor]:
    return [buffer for buffer in owner._buffers.values() if buffer is not None]


def unique(tensors: Iterable[_T]) -> list[_T]:
    """Each tensor once, in order: tied parameters count once.

    Example:
        >>> weight = torch.zeros(1)
        >>> len(unique([weight, weight]))
        1
    """
    return list({id(tensor): tensor for tensor in tensors}.values())


def state_placements(module: nn.Module, context: Context, axes: tuple[str, ...]) -> None:
    """A placement for every parameter that no earlier technique has placed; tied names become aliases."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ConfigError(
                f"{name!r} has no shape yet, so ranks cannot agree on it",
                where="model",
                do="run one batch through the lazy modules first, or give them their sizes",
            )
        if name not in context.placements:
            aliases = tuple(other for other in names[id(parameter)] if other != name)
            context.placements[name] = Placement(name, tuple(parameter.shape), reduce_axes=axes, aliases=aliases)


def check_same_structure(module: nn.Module, comm: Communicator) -> None:
    """Collective: every rank must have built the same module, or gradients would meet the wrong partners."""
    listing = [f"{n} {tuple(t.shape)} {t.dtype}" for n, t in (*module.named_parameters(), *module.named_buffers())]
    digests = comm.gather_objects(hashlib.sha256("\n".join(listing).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    listings = comm.gather_objects(listing)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    longest = max(len(listings[0]), len(listings[other]))
    rows = [(mine + ["nothing"] * longest)[:longest] for mine in (listings[0], listings[other])]
    first, second = next((a, b) for a, b in zip(*rows, strict=True) if a != b)
    raise ConfigError(
        f"the ranks built different modules: {first!r} on rank 0 of {comm.axis}, {second!r} on rank {other}",
        where="model",
        do="build the same module on every rank",
    )
