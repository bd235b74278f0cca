# SPDX-License-Identifier: Apache-2.0
"""Ring DDP's engine: gradients leave in buckets, around the ring, while backward still runs.

    backward   |--- head ---|--- block 2 ---|--- block 1 ---|- embed -|
    ring              |== bucket 1 ==|== bucket 2 ==|== bucket 3 ==|= 4 =|
                                                                     ^ finish() waits for this rest alone

Every parameter has a hook that runs when its gradient is complete: it moves the gradient into its bucket's memory (from
then on `.grad` is a view of it) and, when that fills the next bucket in line, hands the bucket to a background thread,
which drives the ring. Autograd and the ring both work outside the interpreter lock.

Note [one order on all ranks]: ranks may produce gradients in different orders, but a ring pairs the i-th message of one
rank with the i-th of its neighbour. So buckets leave strictly in the order of their layout; a full one waits its turn.

Note [unused parameters]: at the end of backward the buckets that never filled leave too, with zeros for what is
missing. One small integer vector then tells everyone which parameters any rank used: those that nobody used keep `.grad
= None` (an optimizer must not decay their weight), those that only others used receive the average. The same vector
carries which buffers changed, so that constant ones (rotary tables) are never sent.

Note [gradients that are kept]: a `.grad` that was taken out before `zero_grad` (gradient surgery compares several) must
not change when the next backward fills the same bucket. If its view is referenced from elsewhere, the bucket gets fresh
memory; gradients of the old one are copied over as they come.

Note [averaging again is harmless]: a second backward before the optimizer steps adds local gradients to averaged ones
and averages the sum: mean(a + g_r) = a + mean(g_r), since `a` is the same on all ranks. So several backward passes per
step, and a backward that ends in parts, are right without any bookkeeping.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from stratagem.buckets import BucketLayout, Slot, pack
from stratagem.collectives import Communicator, Op, Wire, Worker
from stratagem.collectives.wire import wire_format
from stratagem.errors import ConfigError
from stratagem.technique import ChangedBuffers, Context, DataTechnique, check_same_structure, state_placements, unique


@dataclass(frozen=True)  # not @final: jsonargparse takes no default value of a final class
class RingDDPSettings:
    """How ring DDP packs and sends gradients.

    Args:
        bucket_mib: a bucket closes before it would exceed this many MiB; larger parameters travel alone.
        first_bucket_mib: cap of the first bucket, small so that the ring starts early.
        wire: what travels: `full` (the gradients' own dtype), `bf16` (half the bytes of float32; every hop adds
            in float32), or `int8` (block-quantised, about a quarter).
        unused_parameters: `detect` allows parameters without gradient, on some ranks or on all; `none` promises that
            every trainable parameter gets one in every backward, saves a small message, and refuses when that is not
            so.
        broadcast_buffers: after each step give all ranks rank 0's values of the buffers that changed (as DDP does
            before the next forward).
        overlap: send during backward; `false` waits for its end, for modules whose parameters receive gradients in
            several nested backward passes.
    """

    bucket_mib: float = 25.0
    first_bucket_mib: float = 1.0
    wire: Literal["full", "bf16", "int8"] = "full"
    unused_parameters: Literal["detect", "none"] = "detect"
    broadcast_buffers: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("bucket_mib", "first_bucket_mib"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", where=f"ring.{name}", allowed="numbers above 0")
        if self.wire not in set(Wire):
            raise ConfigError(f"wire is {self.wire!r}", where="ring.wire", allowed=", ".join(Wire))


_OWN_REFERENCES = 3
"""Of a view that only this engine holds: the list of views, a local name, and `getrefcount`'s argument."""


@dataclass
class _Bucket:
    """A bucket at run time: its layout, its memory, and how many gradients it still waits for."""

    layout: BucketLayout
    flat: Tensor
    missing: int = 0
    active: bool = True


@final
class RingDDP(DataTechnique):
    """Replicas of the whole model; gradients averaged around a ring during backward.

    Wire: each rank sends `2 (N-1)/N` times the bytes of its gradients per optimizer step, to its right neighbour only,
    however many micro-batches are accumulated. Memory: one gradient buffer, shared with `.grad`. Source: Baidu's
    ring all-reduce (Patarasuk and Yuan, 2009); bucketing and overlap as in PyTorch DDP (arXiv 2006.15704).

    Args:
        settings: see `RingDDPSettings`.
    """

    axis: ClassVar[str] = "dp_replicate"

    def __init__(self, settings: RingDDPSettings = RingDDPSettings()) -> None:
        self.settings = settings
        self._buckets: list[_Bucket] = []
        self._parameters: list[nn.Parameter] = []
        self._trained_names: list[str] = []
        self._in_window: list[bool] = []
        self._handles: list[RemovableHandle] = []
        self._syncing, self._pending, self._callback_queued = True, False, False
        self._worker: Worker | None = None

    @override
    def apply(self, module: nn.Module, context: Context) -> None:
        """Gives all ranks rank 0's parameters and buffers, states placements, and hooks the parameters.

        Collective over the data axes. Moves the model once, from rank 0 of each row.

        Raises:
            ConfigError: the ranks built different modules; names the first difference.
        """
        axes = tuple(axis for axis in ("dp_replicate", "dp_shard", "cp") if context.shape.sizes[axis] > 1)
        self._axes = axes or (self.axis,)
        self.module, self.context = module, context
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._comm: Communicator = context.communicator(*self._axes, lane="gradients")
        self._device = context.device
        state_placements(module, context, self._axes)
        if self._comm.size == 1:
            return
        check_same_structure(module, self._comm)
        with torch.no_grad():
            self._comm.broadcast_tensors([*unique(module.parameters()), *unique(module.buffers())])
        self._worker = Worker(name=f"ring-{self._comm.axis}")
        self._buffers = ChangedBuffers(module)
        self._hook_new_parameters()

    # -- hooks and layout ------------------------------------------------------------------------------------------

    def _hook_new_parameters(self) -> None:
        """Packs and hooks every parameter that requires a gradient or once did; nothing happens if none is new."""
        known = {id(parameter) for parameter in self._parameters}
        found = list(self.module.named_parameters())
        if not any(parameter.requires_grad and id(parameter) not in known for _, parameter in found):
            return
        trained = [(name, p) for name, p in found if p.requires_grad or id(p) in known]
        due = {id(p) for p, is_due in zip(self._parameters, self._in_window, strict=True) if is_due}
        self._trained_names = [name for name, _ in trained]
        self._parameters = [parameter for _, parameter in trained]
        layouts = pack(
            self._parameters,
            cap_bytes=int(self.settings.bucket_mib * 2**20),
            first_cap_bytes=int(self.settings.first_bucket_mib * 2**20),
        )
        self._buckets = [
            _Bucket(layout, torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)) for layout in layouts
        ]
        self._slots: dict[int, tuple[int, Slot]] = {
            slot.index: (number, slot) for number, layout in enumerate(layouts) for slot in layout.slots
        }
        self._views = [self._slots[i][1].view(self._buckets[self._slots[i][0]].flat) for i in range(len(trained))]
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._handles += [  # on new ones only: one that is frozen right now cannot be hooked, and keeps its hook
            parameter.register_post_accumulate_grad_hook(self._on_gradient)
            for parameter in self._parameters
            if id(parameter) not in known
        ]
        self._in_window = [id(parameter) in due for parameter in self._parameters]
        self._reset()

    def _reset(self) -> None:
        """Nothing has arrived and nothing has left; what is awaited is what requires a gradient now."""
        self._next = 0
        self._arrived = [False] * len(self._parameters)
        self._awaited = [parameter.requires_grad for parameter in self._parameters]
        self._futures: list[Future[object]] = []
        self._pending = self._callback_queued = self._started = False
        for bucket in self._buckets:
            bucket.missing = sum(self._awaited[slot.index] for slot in bucket.layout.slots)
            bucket.active = bucket.missing > 0 or any(self._in_window[slot.index] for slot in bucket.layout.slots)

    def _on_gradient(self, parameter: Tensor) -> None:
        """Runs when a gradient is complete: into its bucket, and off with that if it fills the next in line."""
        index = self._index[id(parameter)]
        self._adopt(index)
        if not self._syncing:
            return
        self._pending = self._started = True
        if not self._callback_queued:  # a plain loss.backward() ends here; a strategy calls finish() itself as well
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self.finish)
        number = self._slots[index][0]
        if number < self._next:
            raise RuntimeError(
                f"the gradient of {self._trained_names[index]!r} grew after its bucket had left. Either it receives "
                "gradients in several nested backward passes (reentrant checkpointing of a shared module): set "
                "overlap: false, or checkpoint with use_reentrant=False. Or its requires_grad changed during backward."
            )
        if self._arrived[index] or not self._awaited[index]:
            return
        self._arrived[index] = True
        self._buckets[number].missing -= 1
        if self.settings.overlap:
            self._launch_full_buckets()

    def _adopt(self, index: int) -> None:
        """Makes a parameter's gradient a view of its bucket; copies at the first micro-batch only."""
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.grad
        if gradient is view or gradient is None:
            return
        if gradient.is_sparse:
            raise ConfigError(
                f"the gradient of {self._trained_names[index]!r} is sparse, and ring DDP sends dense ones",
                where="model",
                do="build its embedding with sparse=False",
            )
        if gradient.data_ptr() != view.data_ptr():
            if sys.getrefcount(view) > _OWN_REFERENCES:
                view = self._renewed(index)
            view.copy_(gradient.detach())
        parameter.grad = view

    def _renewed(self, index: int) -> Tensor:
        """Fresh memory for a bucket of which somebody still holds a gradient: see Note [gradients that are kept]."""
        bucket = self._buckets[self._slots[index][0]]
        bucket.flat = torch.empty_like(bucket.flat)
        for slot in bucket.layout.slots:
            self._views[slot.index] = slot.view(bucket.flat)
        return self._views[index]

    # -- sending ---------------------------------------------------------------------------------------------------

    def _launch_full_buckets(self) -> None:
        """See Note [one order on all ranks]."""
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._launch(self._buckets[self._next])
            self._next += 1

    def _launch(self, bucket: _Bucket) -> None:
        if bucket.active:
            self._fill_gaps(bucket)
            self._submit(bucket.flat, Op.MEAN, Wire(self.settings.wire))

    def _submit(self, tensor: Tensor, op: Op, wire: Wire) -> None:
        assert self._worker is not None
        if tensor.device.type != "cuda":
            self._futures.append(self._worker.submit(self._comm.all_reduce, tensor, op=op, wire=wire))
            return
        computed = torch.cuda.Event()
        computed.record()

        def on_side_stream() -> object:
            with torch.cuda.stream(side := torch.cuda.Stream()):
                side.wait_event(computed)
                self._comm.all_reduce(tensor, op=op, wire=wire)
            side.synchronize()
            return None

        self._futures.append(self._worker.submit(on_side_stream))

    @override
    def begin(self) -> None:
        """A backward is about to run (or ought to). Local."""
        if self._comm.size == 1:
            return
        self._hook_new_parameters()
        if not self._started:  # until a gradient arrives, what requires one may change
            self._reset()
            self._pending = self._syncing
            self._note_window()

    @override
    def finish(self) -> None:
        """Sends what is left, waits for all of it, and settles unused parameters and changed buffers.

        Collective over the data axes.
        """
        if not self._pending:
            return
        self._pending = False
        try:
            for number in range(self._next, len(self._buckets)):
                self._launch(self._buckets[number])
            self._next = len(self._buckets)
            flags = self._flags()
            if flags is not None:
                self._submit(flags, Op.SUM, Wire.FULL)
            for future in self._futures:
                future.result()
            if flags is not None:
                self._settle(flags)
        finally:
            self._in_window = [False] * len(self._parameters)
            self._reset()

    def _note_window(self) -> None:
        """Remembers what requires a gradient: it is due at the window's end, even if it is frozen again by then."""
        for index, parameter in enumerate(self._parameters):
            self._in_window[index] = self._in_window[index] or parameter.requires_grad

    def _fill_gaps(self, bucket: _Bucket) -> None:
        """Zeros for gradients that did not come; gradients that came by another way than backward are taken in."""
        for slot in bucket.layout.slots:
            if self._parameters[slot.index].grad is None:
                if self.settings.unused_parameters == "none" and self._parameters[slot.index].requires_grad:
                    raise ConfigError(
                        f"{self._trained_names[slot.index]!r} received no gradient in this backward",
                        where="ring.unused_parameters",
                        allowed="`none` only where every trainable parameter is used in every step",
                        do="set it to detect",
                    )
                self._views[slot.index].zero_()
            else:
                self._adopt(slot.index)

    def _flags(self) -> Tensor | None:
        """One integer per parameter (has it a gradient?) and per module with buffers (did they change?)."""
        flags: list[bool] = []
        if self.settings.unused_parameters == "detect":
            flags += [parameter.grad is not None for parameter in self._parameters]
        if self.settings.broadcast_buffers:
            flags += self._buffers.changed()
        return torch.tensor(flags, dtype=torch.int32, device=self._device) if flags else None

    def _settle(self, flags: Tensor) -> None:
        """See Note [unused parameters]."""
        anywhere = [count > 0 for count in flags.tolist()]
        if self.settings.unused_parameters == "detect":
            used, anywhere = anywhere[: len(self._parameters)], anywhere[len(self._parameters) :]
            for index, is_used in enumerate(used):
                if is_used and self._parameters[index].grad is None:
                    self._parameters[index].grad = self._views[index]
        if any(anywhere):
            assert self._worker is not None
            with torch.no_grad():
                self._worker.submit(self._comm.broadcast_tensors, self._buffers.select(anywhere)).result()
            self._buffers.settle()

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients pile up in the buckets and nothing is sent. Local."""
        self._note_window()
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    # -- predictions -----------------------------------------------------------------------------------------------

    @override
    def wire_bytes_per_step(self) -> Mapping[str, float]:
        """`2 (N-1)/N` times the gradient bytes on the wire; see `Wire` for the narrower ones."""
        n = self._comm.size
        trained = [p for p in unique(self.module.parameters()) if p.requires_grad]
        formats = {p.dtype: wire_format(p.dtype, op=Op.MEAN, wire=Wire(self.settings.wire), n=n) for p in trained}
        payload = sum(formats[p.dtype].num_bytes(p.numel()) for p in trained)
        return {self._comm.axis: 2 * (n - 1) / n * payload}

    @override
    def held_bytes(self) -> Mapping[str, int]:
        """Parameters, and as much again for gradients: replicas divide nothing."""
        parameters = unique(self.module.parameters())
        return {
            "parameters": sum(p.numel() * p.dtype.itemsize for p in parameters),
            "gradients": sum(p.numel() * p.dtype.itemsize for p in parameters if p.requires_grad),
        }

    @override
    def close(self) -> None:
        """Removes the hooks and ends the thread. Local."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._buckets, self._parameters, self._views = [], [], [], []
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    @override
    def abort(self) -> None:
        """As `close`, but first wakes the thread if it waits for a peer."""
        self._comm.abort()
        self.close()
