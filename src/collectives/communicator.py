# SPDX-License-Identifier: Apache-2.0
"""The one door: every collective of a run passes through the `Communicator` of a mesh axis, and is counted there."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from stratagem.collectives import engine, objects
from stratagem.collectives.coalesce import coalesced
from stratagem.collectives.native import NativeCollectives
from stratagem.collectives.opening import Row, open_row
from stratagem.collectives.opening import Transport as Transport
from stratagem.collectives.ring import (
    Bounds,
    Collective,
    Schedule,
    broadcast_schedule,
    check_bounds,
    chunk_bounds,
    ring_schedule,
)
from stratagem.collectives.traffic import Traffic
from stratagem.collectives.transport import Link, LinkFault
from stratagem.collectives.wire import Op, Wire, WireFormat, wire_format
from stratagem.errors import CommunicationError

SmallOp = Literal["sum", "max", "min", "mean"]


@final
class Communicator:
    """The collectives of one axis, for one rank. Make it with `create`.

    Every method but `close` and `abort` is collective: all ranks of the axis call it, in the same order and with the
    same arguments, from one thread at a time. With one rank nothing happens, and no process group is needed.
    Tensors must be contiguous and lie on `device`; they are changed in place, without autograd. After an error
    the communicator refuses further use, with the same cause.

    Attributes:
        axis: the name of the mesh axis.
        ranks: the global ranks along the axis.
        rank: the place of this rank among them.
        size: how many they are.
        device: where the tensors lie.
        transport: "shared_memory", "p2p", "native", or "none" for one rank.
        traffic: the books, in which every call is entered.
    """

    def __init__(self, axis: str, row: Row, *, device: torch.device, traffic: Traffic) -> None:
        self.axis, self.device, self.traffic = axis, device, traffic
        self.ranks, self.rank, self.size, self.transport = row.ranks, row.index, len(row.ranks), row.transport
        self._group, self._link = row.group, row.link
        self._plans: dict[tuple[object, ...], _Plan] = {}
        self._formats: dict[tuple[object, ...], WireFormat] = {}
        self._busy = threading.Lock()
        self._cause: str | None = None

    @classmethod
    def create(
        cls,
        axis: str,
        ranks: Sequence[int] | Sequence[Sequence[int]],
        *,
        device: torch.device,
        transport: Transport = "auto",
        timeout: timedelta = timedelta(minutes=30),
        traffic: Traffic | None = None,
    ) -> Communicator:
        """Open the communicators of one axis: one for each row of ranks.

        Must be called by every rank of the world, for the axes in the same order and with the same arguments; the
        world's process group must be open unless all rows have one rank. Each rank gets the communicator of its row.

        Args:
            axis: the name of the axis, for messages and books.
            ranks: all rows of the axis, as lists of global ranks in ring order: `[[0, 1], [2, 3]]`. One flat list
                is one row. A rank in no row gets a row of its own, where every collective is a no-op.
            device: where the tensors will lie.
            transport: "shared_memory" (CPU tensors, one host), "p2p" (sends and receives; CUDA tensors pass through
                host memory, for comparison only), "native" (the backend's own collectives), or "auto": native on
                CUDA, and on CPU shared memory if all ranks of the row can, else p2p.
            timeout: how long to wait for a silent neighbour.
            traffic: the books to write; new ones by default.

        Raises:
            ValueError: rows overlap, or name ranks outside the world; a timeout of 0.
            CommunicationError: `transport` was "shared_memory" and a rank cannot.
        """
        row = open_row(axis, _rows(ranks), device=device, transport=transport, timeout=timeout)
        return cls(axis, row, device=device, traffic=Traffic() if traffic is None else traffic)

    def all_reduce(self, tensor: Tensor, *, op: Op = Op.SUM, wire: Wire = Wire.FULL) -> None:
        """`tensor` becomes the sum or mean over the axis, with the same bits on every rank.

        Sends `2 (n-1)/n` of the tensor's bytes (as they are on the wire) from each rank.

        Raises:
            ValueError: the tensor is not contiguous, or its dtype cannot be combined so.
            CommunicationError: a neighbour died, hung or spoke out of turn.
        """
        flat = self._flat(tensor)
        self._ring(Collective.ALL_REDUCE, flat, chunk_bounds(flat.numel(), self.size), op, wire)

    def reduce_scatter(
        self,
        tensor: Tensor,
        *,
        bounds: Sequence[tuple[int, int]] | None = None,
        op: Op = Op.SUM,
        wire: Wire = Wire.FULL,
    ) -> Tensor:
        """Slice `bounds[rank]` of `tensor` becomes the sum or mean over the axis. The rest is left unspecified.

        Sends `(n-1)/n` of the tensor's bytes from each rank (exactly: all but slice `rank`).

        Args:
            tensor: flattened if it has several dims.
            bounds: one slice per rank, which cover the tensor in order; may be uneven or empty. By default even.
            op: how to combine.
            wire: how values travel.

        Returns:
            The slice that holds the result: a view of `tensor`, `[bounds[rank][1] - bounds[rank][0]]`.

        Raises:
            ValueError: the tensor or the bounds do not fit.
            CommunicationError: a neighbour died, hung or spoke out of turn.
        """
        flat, bounds = self._slices(tensor, bounds)
        self._ring(Collective.REDUCE_SCATTER, flat, bounds, op, wire)
        return flat[slice(*bounds[self.rank])]

    def all_gather(
        self, tensor: Tensor, *, bounds: Sequence[tuple[int, int]] | None = None, wire: Wire = Wire.FULL
    ) -> None:
        """Each rank's own slice `bounds[rank]` of `tensor` arrives in the tensors of all.

        Sends `(n-1)/n` of the tensor's bytes from each rank (exactly: all but slice `rank + 1`). On a narrow wire the
        own slice is rounded too, so that all ranks hold the same bits. Any dtype. Arguments and errors: see
        `reduce_scatter`.
        """
        flat, bounds = self._slices(tensor, bounds)
        self._ring(Collective.ALL_GATHER, flat, bounds, None, wire)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """`tensor` of the rank at index `src` along the axis arrives in the tensors of all. Any dtype.

        Sends the tensor once from each rank but the last of the chain.
        """
        if not 0 <= src < self.size:
            raise ValueError(
                f"axis {self.axis!r}: src is {src}, allowed are indices along the axis, 0 to {self.size - 1}"
            )
        flat = self._flat(tensor)
        with self._door("broadcast") as link:
            if isinstance(link, NativeCollectives):
                self.traffic.add(self.axis, "broadcast", flat.nbytes)
                link.broadcast(flat, src)
            elif link is not None:
                bits = flat.view(torch.uint8)
                plan = self._plan("broadcast", Collective.BROADCAST, bits, ((src, bits.numel()),), None, Wire.FULL)
                self._run(link, plan, bits)

    def broadcast_tensors(self, tensors: Sequence[Tensor], src: int = 0) -> None:
        """Broadcast many tensors, of any dtypes and strides, in flat messages of a bounded size.

        The tensors must be the same in number, shapes and dtypes on all ranks. Sends each byte once.
        """
        if self.size > 1:
            for flat, scatter in coalesced(tensors):
                self.broadcast(flat, src)
                if self.rank != src:
                    scatter()

    def reduce_small(self, tensor: Tensor, op: SmallOp) -> None:
        """`tensor` becomes its sum, max, min or mean over the axis: for metrics, norms and flags.

        One gathering round of the ring, then everybody combines all values in rank order: the fewest steps, and the
        same bits everywhere. Sends `(n-1)` times the tensor. Halves are combined in float32. `mean` refuses integers.
        """
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"the mean of {tensor.dtype} is not an integer: convert it to float first")
        flat = self._flat(tensor)
        if self.size == 1:
            return
        everybody = flat.new_empty(self.size, flat.numel())
        everybody[self.rank] = flat
        step = flat.numel()
        bounds = tuple((r * step, (r + 1) * step) for r in range(self.size))
        self._ring(Collective.ALL_GATHER, everybody.view(-1), bounds, None, Wire.FULL, name="reduce_small")
        half = flat.dtype in (torch.float16, torch.bfloat16)
        values = everybody.float() if half and op in ("sum", "mean") else everybody
        flat.copy_(_REDUCE_SMALL[op](values))

    def gather_objects(self, obj: Any) -> list[Any]:
        """The objects of all ranks, in the order of the axis, on every rank. They are pickled."""
        return objects.gather(self, obj)

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        """The object of the rank at index `src` along the axis, on every rank. It is pickled."""
        return objects.broadcast(self, obj, src)

    def barrier(self) -> None:
        """Return when every rank of the axis has come here."""
        seen = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
        self._ring(Collective.ALL_GATHER, seen, chunk_bounds(self.size, self.size), None, Wire.FULL, name="barrier")
        if self.device.type != "cpu":
            seen.cpu()  # wait for the device, too

    def close(self) -> None:
        """Give everything back after success. Call it when no collective is running; twice is harmless."""
        if self._cause is None:
            self._cause = f"axis {self.axis!r}: this communicator is closed"
            if isinstance(self._link, Link):
                self._link.close()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def abort(self) -> None:
        """Give up, from any thread and without waiting for anybody. Whoever waits in a collective here wakes up with a
        `CommunicationError`, and so do the neighbours. The process group is left to whoever ends the world."""
        if self._cause is None:
            self._cause = f"axis {self.axis!r}: rank {self.ranks[self.rank]} aborted"
        if isinstance(self._link, Link):
            self._link.abort()
            if self._busy.acquire(timeout=0.2):  # whoever was in there has woken up and left
                self._link.close()
                self._busy.release()
        elif self._group is not None and hasattr(self._group, "abort"):
            self._group.abort()

    def _ring(
        self, collective: Collective, flat: Tensor, bounds: Bounds, op: Op | None, wire: Wire, name: str | None = None
    ) -> None:
        name = name or collective.value
        plan = self._plan(name, collective, flat, bounds, op, wire)
        with self._door(name) as link:
            if isinstance(link, NativeCollectives):
                self.traffic.add(self.axis, name, plan.num_bytes)
                self._native(link, collective, flat, bounds, op, wire)
            elif link is not None:
                self._run(link, plan, flat)

    def _plan(
        self, name: str, collective: Collective, flat: Tensor, bounds: Bounds, op: Op | None, wire: Wire
    ) -> _Plan:
        """Everything about a collective that does not depend on values. Kept: sizes come again at every step."""
        key = (name, bounds, flat.dtype, op, wire)
        plan = self._plans.get(key)
        if plan is None:
            fmt = wire_format(flat.dtype, op=op, wire=wire, n=self.size)
            fmt = self._formats.setdefault((flat.dtype, op, wire), fmt)  # one scratch for all sizes
            lanes, max_bytes = 1, 1 << 30
            if isinstance(self._link, Link):
                lanes, max_bytes = self._link.window - 1, self._link.max_bytes
            piece = fmt.piece_numel(max_bytes)
            if collective is Collective.BROADCAST:
                place = (self.rank - bounds[0][0]) % self.size
                schedule = broadcast_schedule(place, self.size, flat.numel(), piece=piece, lanes=lanes)
            else:
                schedule = ring_schedule(collective, self.rank, bounds, piece=piece, lanes=lanes)
            tag = 2 + zlib.crc32(repr(key).encode()) % 254  # ranks in different collectives hardly share it
            if len(self._plans) >= 1024:
                self._plans.clear()
            plan = self._plans[key] = _Plan(name, fmt, schedule, tag, sum(map(fmt.num_bytes, schedule.sent_sizes)))
        return plan

    def _run(self, link: Link, plan: _Plan, flat: Tensor) -> None:
        self.traffic.add(self.axis, plan.name, plan.num_bytes)
        staged = flat.cpu()  # itself on CPU
        engine.run(plan.schedule, staged, plan.fmt, link, tag=plan.tag)
        if staged is not flat:
            flat.copy_(staged)

    @staticmethod
    def _native(
        link: NativeCollectives, collective: Collective, flat: Tensor, bounds: Bounds, op: Op | None, wire: Wire
    ) -> None:
        if collective is Collective.ALL_GATHER:
            link.all_gather(flat, bounds, wire)
        elif collective is Collective.ALL_REDUCE:
            link.all_reduce(flat, op or Op.SUM, wire)
        else:
            link.reduce_scatter(flat, bounds, op or Op.SUM, wire)

    @contextmanager
    def _door(self, name: str) -> Iterator[Link | NativeCollectives | None]:
        """Let one collective at a time through; turn a fault into an error that names everything, and remember it."""
        if self._cause is not None:
            raise CommunicationError(self._cause)
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"axis {self.axis!r}, {name}: another thread is in a collective of this axis. The ranks would "
                "not agree on an order: run all collectives of an axis in one thread"
            )
        try:
            yield self._link
        except LinkFault as fault:
            raise self._fail(f"{name}: rank {self.ranks[self.rank]}: {fault.reason}", fault.origin) from fault
        except RuntimeError as error:
            if isinstance(self._link, NativeCollectives):
                raise self._fail(f"{name}: rank {self.ranks[self.rank]}: {error}") from error
            self._fail(f"{name}: rank {self.ranks[self.rank]}: {error}")
            raise
        except BaseException as error:
            self._fail(f"{name}: rank {self.ranks[self.rank]} stopped midway: {error!r}")
            raise
        finally:
            self._busy.release()

    def _fail(self, what: str, origin: str | None = None) -> CommunicationError:
        if self._cause is None:
            self._cause = f"axis {self.axis!r}, {what}"
        if isinstance(self._link, Link):
            self._link.fail(origin or self._cause)
            self._link.close()
        return CommunicationError(self._cause)

    def _flat(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != self.device.type:
            raise ValueError(f"axis {self.axis!r} works on {self.device}, but the tensor lies on {tensor.device}")
        if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"axis {self.axis!r}: collectives work in place and need a contiguous tensor, not shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}: pass a contiguous one and copy back"
            )
        return tensor.detach().view(-1)

    def _slices(self, tensor: Tensor, bounds: Sequence[tuple[int, int]] | None) -> tuple[Tensor, Bounds]:
        flat = self._flat(tensor)
        if bounds is None:
            return flat, chunk_bounds(flat.numel(), self.size)
        return flat, check_bounds(bounds, flat.numel(), self.size)


@final
@dataclass(frozen=True)
class _Plan:
    """A collective of one kind and size, ready to run. `num_bytes` is what this rank sends."""

    name: str
    fmt: WireFormat
    schedule: Schedule
    tag: int
    num_bytes: int


_REDUCE_SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values.sum(0),
    "mean": lambda values: values.mean(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


def _rows(ranks: Sequence[int] | Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    flat = tuple(rank for rank in ranks if isinstance(rank, int))
    return (flat,) if flat else tuple(tuple(row) for row in ranks if not isinstance(row, int) and row)
