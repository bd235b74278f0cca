# SPDX-License-Identifier: Apache-2.0
"""From gradients to my share of their mean, while backward still runs.

    backward   |--- head ---|--- block 2 ---|--- block 1 ---|- embed -|
    worker            |= bucket 1 =|= bucket 2 =|= bucket 3 =|= 4 =|
                                                                   ^ finish() waits for this rest alone

When a parameter's gradient is complete a hook moves it into its bucket. When the next bucket in line is full it is
handed to a thread, which reduce-scatters it: my slice of the mean lands in `owned`, the rest is worth nothing
afterwards. From then on the module's `.grad` is None; what counts is the `.grad` of the optimizer's pieces.

Stages 2 and 3 (`transient`) have memory for two buckets, one that fills and one that travels, whatever the model's
size.

Note [one order on all ranks]: ranks may produce gradients in different orders, but a ring pairs the i-th message of one
rank with the i-th of its neighbour. So buckets leave strictly in line; a full one waits its turn. Under control flow
that differs between ranks, stages 2 and 3 may therefore hold more than two. How stage 3 waits for the one that travels
is told in `pool`.

Note [unused parameters]: at the end of backward the buckets that never filled leave too, with zeros for what is
missing. One small integer vector then tells everyone which parameters any rank used: the piece of one that nobody used
keeps `.grad = None` (an optimizer must not decay its weight). The same vector carries which buffers changed.

Note [what is awaited]: what requires a gradient is decided when backward starts, not when the step does, since a step
may freeze or unfreeze layers. What required one at an earlier micro-batch of a window that piles up is due at the
window's end, even if it is frozen again by then; that is noted by `requires_grad`, which all ranks see alike, not by
what arrived.

Note [adding to what was reduced]: a further backward before the optimizer clears its gradients adds its mean to the
mean that is already owned. So several backward passes per step, and stage 2's accumulation, are right by construction.

Note [where gradients are]: after a backward the module's `.grad` is None on every rank, and the optimizer's tensors
hold the pieces. Clipping through the Trainer or `clip_gradients`, and `optimizer.zero_grad()`, work on those. What
works on `module.parameters()` instead finds nothing: `clip_grad_norm_(self.parameters())`, `module.zero_grad()`. To
look at a gradient, ask for `Zero.full_gradient`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from stratagem.collectives import Op, Wire
from stratagem.errors import ConfigError
from stratagem.plugins.zero.bucket import Bucket
from stratagem.plugins.zero.failed import AtEnd, drop_leftovers
from stratagem.plugins.zero.lane import Lane
from stratagem.plugins.zero.pool import PATIENCE, Pool
from stratagem.plugins.zero.settings import ZeroSettings
from stratagem.technique import ChangedBuffers


@final
class Gradients:
    """Reduces the gradients of buckets during backward.

    Args:
        lane: the communicators and the thread.
        settings: see `ZeroSettings`.
        transient: keep nothing but the owned slices (stages 2 and 3).
        fetches: backward meets other ranks in collectives of its own (stage 3), so it must not wait for reductions.
        buffers: of the module.
        names: of the parameters, by id, for messages.

    Attributes:
        on_finish: called at the end of every backward that was reduced.
    """

    def __init__(
        self,
        lane: Lane,
        settings: ZeroSettings,
        *,
        transient: bool,
        fetches: bool,
        buffers: ChangedBuffers,
        names: dict[int, str],
    ) -> None:
        self.on_finish: Callable[[], None] = lambda: None
        self._lane, self._settings, self._buffers, self._names = lane, settings, buffers, names
        self._pool = Pool(PATIENCE if fetches else None) if transient else None
        self.buckets: list[Bucket] = []
        self._handles: list[RemovableHandle] = []
        self._reduces, self._pending, self._started = True, False, False
        self._at_end = AtEnd()
        self._next = 0
        self._in_window = False
        self.num_reductions = 0
        """Backward passes that were reduced, since the start."""
        self._futures: list[Future[None]] = []

    @property
    def _piles_up(self) -> bool:
        """Whether a micro-batch's gradients stay whole until the window's end."""
        return self._pool is None or self._settings.accumulation == "whole"

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Hooks the parameters of further buckets, which leave after those that are known. Local."""
        for bucket in buckets:
            bucket.position = len(self.buckets)
            self.buckets.append(bucket)
        self._reset()

    def _prepare(self, bucket: Bucket) -> None:
        """Hooks parameters and makes memory, as soon as any of the bucket is trained: frozen ones cost nothing."""
        layout = bucket.cut.layout
        if bucket.owned is None:
            alias = self._pool is None and not bucket.has_master
            if not alias:
                length = bucket.span[1] - bucket.span[0]
                pinned = bucket.master_device.type == "cpu" and layout.device.type == "cuda"
                bucket.owned = torch.empty(
                    length, dtype=bucket.state_dtype, device=bucket.master_device, pin_memory=pinned
                )
            if self._pool is None:
                self._give_memory(bucket, torch.empty(layout.numel, dtype=layout.dtype, device=layout.device))
                if alias:
                    assert bucket.gradient is not None
                    bucket.owned = bucket.gradient[slice(*bucket.span)]
            elif len(layout.slots) > 1:
                self._pool.reserve(layout)
        for index, parameter in enumerate(bucket.parameters):
            if parameter.requires_grad and not bucket.hooked[index]:
                bucket.hooked[index] = True
                hook = partial(self._on_gradient, bucket, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    # -- arrivals --------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        """Nothing has arrived and nothing has left: see Note [what is awaited]."""
        self._next = 0
        self._futures = []
        self._pending = self._started = False
        self._at_end.forget()
        for bucket in self.buckets:
            bucket.arrived = [False] * len(bucket.parameters)
            bucket.awaited = [parameter.requires_grad for parameter in bucket.parameters]
            bucket.missing = sum(bucket.awaited)
            bucket.active = bucket.missing > 0 or any(bucket.due)
            if bucket.active:
                self._prepare(bucket)

    def _on_gradient(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        """Runs when a gradient is complete: into its bucket, and off with that if it fills the next in line."""
        self._forget_failed(parameter)
        if bucket.position < self._next:
            raise RuntimeError(
                f"the gradient of {self._name(bucket, index)!r} grew after its bucket had left: it receives gradients "
                "in several nested backward passes (reentrant checkpointing of a shared module). Set overlap: false, "
                "or checkpoint with use_reentrant=False."
            )
        if self._reduces and not self._pending:  # a plain loop that has not called `begin`
            self.begin()
        self._take_in(bucket, index)
        if not self._reduces:
            return
        self._pending = self._started = True
        if not self._at_end.is_asked_for:  # a plain loss.backward() ends here; a strategy calls finish() itself as well
            self._at_end.ask_for(self.finish)
        if bucket.awaited[index] and not bucket.arrived[index]:
            bucket.arrived[index] = True
            bucket.missing -= 1
            if self._settings.overlap:
                self._launch_full_buckets()

    def _take_in(self, bucket: Bucket, index: int) -> None:
        """Makes a parameter's gradient a view of its bucket; copies at the first micro-batch only."""
        parameter = bucket.parameters[index]
        gradient = parameter.grad
        if gradient is None or (bucket.dirty and gradient is bucket.gradient_views[index]):
            return
        if gradient.is_sparse:
            raise ConfigError(
                f"the gradient of {self._name(bucket, index)!r} is sparse, and ZeRO divides dense ones",
                where="model",
                do="build its embedding with sparse=False",
            )
        slot = bucket.cut.layout.slots[index]
        alone = self._pool is not None and len(bucket.parameters) == 1 and not bucket.dirty
        if alone and gradient.stride() == slot.stride and not gradient.requires_grad:
            bucket.dirty, bucket.gradient = True, gradient.as_strided((bucket.numel,), (1,))  # travels from where it is
            bucket.gradient_views = [gradient]
            return
        self._touch(bucket)
        view = bucket.gradient_views[index]
        view.copy_(gradient.detach())
        parameter.grad = view

    def _touch(self, bucket: Bucket) -> None:
        """The bucket's memory is about to be written: it must be there, and what it still holds be saved."""
        if bucket.dirty:
            return
        bucket.dirty = True
        if self._pool is not None:
            self._give_memory(bucket, self._pool.take(bucket.cut.layout))
        elif not bucket.has_master and bucket.holds_gradients():
            assert bucket.owned is not None
            bucket.forget_stale()
            bucket.kept = bucket.owned.clone()

    @staticmethod
    def _give_memory(bucket: Bucket, flat: Tensor) -> None:
        bucket.gradient = flat
        bucket.gradient_views = [slot.view(flat) for slot in bucket.cut.layout.slots]

    # -- reducing --------------------------------------------------------------------------------------------------

    def _launch_full_buckets(self) -> None:
        """See Note [one order on all ranks]."""
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._launch(self.buckets[self._next])
            self._next += 1

    def _launch(self, bucket: Bucket) -> None:
        """Hands a bucket to the thread, with zeros for what did not come; the module's gradients are gone then."""
        if not bucket.active:
            return
        bucket.arrived = [
            parameter.grad is not None for parameter in bucket.parameters
        ]  # now, or earlier in the window
        for index, arrived in enumerate(bucket.arrived):
            if arrived:
                self._take_in(bucket, index)
        self._touch(bucket)
        for parameter, view in zip(bucket.parameters, bucket.gradient_views, strict=True):
            if parameter.grad is None:
                view.zero_()
            parameter.grad = None
        flat, owned, kept = bucket.gradient, bucket.owned, bucket.kept
        assert flat is not None
        assert owned is not None
        adds = kept is None and bucket.holds_gradients()
        if adds:
            bucket.forget_stale()
        future = self._lane.submit(self._reduce, bucket, flat, owned, kept, adds)
        self._futures.append(future)
        bucket.dirty, bucket.kept = False, None
        if self._pool is not None:
            bucket.gradient, bucket.gradient_views = None, []
            self._pool.give_back(bucket.cut.layout, flat, after=future)

    def _reduce(self, bucket: Bucket, flat: Tensor, owned: Tensor, kept: Tensor | None, adds: bool) -> None:
        """In the thread: my slice of the mean, to where the optimizer finds it."""
        wire = Wire(self._settings.gradient_wire)
        mine = self._lane.shard.reduce_scatter(flat, bounds=bucket.cut.bounds, op=Op.MEAN, wire=wire)
        if self._lane.replicate.size > 1:
            self._lane.replicate.all_reduce(mine, op=Op.MEAN, wire=wire)
        if kept is not None:
            mine.add_(kept)
        elif adds:
            owned.add_(mine.to(owned.device))
        elif mine.data_ptr() != owned.data_ptr() or mine.dtype != owned.dtype:
            owned.copy_(mine)

    def begin(self) -> None:
        """A backward is about to run (or ought to). Local; until a gradient arrives it may be called again."""
        self._forget_failed()
        if not self._started:
            self._note_window()
            self._reset()
            self._pending = self._reduces

    def _forget_failed(self, arriving: Tensor | None = None) -> None:
        """See `failed`; waits for what a failed backward had sent."""
        if self._at_end.has_failed:
            for future in self._futures:
                future.result()
            drop_leftovers(self.buckets, arriving)
            if self._pool is not None:
                for bucket in self.buckets:
                    bucket.gradient, bucket.gradient_views = None, []
                self._pool.clear()
            self._reset()

    def _note_window(self) -> None:
        """See Note [what is awaited]."""
        if not self._reduces:
            for bucket in self.buckets:
                pairs = zip(bucket.due, bucket.parameters, strict=True)
                bucket.due = [was or parameter.requires_grad for was, parameter in pairs]

    def finish(self) -> None:
        """Reduces what is left, waits for all of it, and settles unused parameters and changed buffers.

        Collective over the data axes.
        """
        if not self._pending:
            return
        self._pending = False
        self.num_reductions += 1
        try:
            for bucket in self.buckets[self._next :]:
                self._check_promise(bucket)
                self._launch(bucket)
            self._next = len(self.buckets)
            flags = self._flags()
            if flags is not None:
                self._futures.append(self._lane.submit(self._lane.data.all_reduce, flags, op=Op.SUM, wire=Wire.FULL))
            for future in self._futures:
                future.result()
            self._settle(flags)
        finally:
            if self._pool is not None:
                self._pool.clear()
            for bucket in self.buckets:
                bucket.due = [False] * len(bucket.parameters)
            self._reset()
        self.on_finish()

    def _check_promise(self, bucket: Bucket) -> None:
        if self._settings.unused_parameters == "none" and bucket.active:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.requires_grad and parameter.grad is None:
                    raise ConfigError(
                        f"{self._name(bucket, index)!r} received no gradient in this backward",
                        where="zero.unused_parameters",
                        allowed="`none` only where every trainable parameter is used in every step",
                        do="set it to detect",
                    )

    def _flags(self) -> Tensor | None:
        """One integer per parameter (has it a gradient?) and module with buffers (did they change?), if any."""
        flags: list[bool] = []
        if self._settings.unused_parameters == "detect":
            flags += [arrived for bucket in self.buckets for arrived in bucket.arrived]
        if self._settings.broadcast_buffers and not self._in_window:
            flags += self._buffers.changed()
        return torch.tensor(flags, dtype=torch.int32, device=self._lane.data.device) if flags else None

    def _settle(self, flags: Tensor | None) -> None:
        """See Note [unused parameters]."""
        answers = [count > 0 for count in flags.tolist()] if flags is not None else []
        for bucket in self.buckets:
            used = bucket.arrived
            if self._settings.unused_parameters == "detect":
                used, answers = answers[: len(used)], answers[len(used) :]
            bucket.used = [was or is_now for was, is_now in zip(bucket.used, used, strict=True)]
            for index, owned in enumerate(bucket.owned_parameters):
                if owned is not None and used[index] and owned.grad is None and bucket.pieces[index].numel:
                    assert bucket.owned is not None
                    owned.grad = bucket.part(index, bucket.owned)
        if any(answers):
            with torch.no_grad():
                self._lane.submit(self._lane.data.broadcast_tensors, self._buffers.select(answers)).result()
            self._buffers.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients pile up and nothing is sent, unless they are divided per micro-batch. Local."""
        before = self._reduces, self._in_window
        self._reduces, self._in_window = not self._piles_up, True
        try:
            yield
            self._note_window()
        finally:
            self._reduces, self._in_window = before

    def clear(self, places: Iterable[tuple[Bucket, int]], *, set_to_none: bool) -> None:
        """Forgets what parameters of the module gathered; their optimizer has cleared its pieces. Local."""
        touched: dict[int, Bucket] = {}
        for bucket, index in places:
            parameter = bucket.parameters[index]
            if set_to_none:
                parameter.grad, bucket.used[index] = None, False
                touched[id(bucket)] = bucket
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
        for bucket in touched.values():
            if all(parameter.grad is None for parameter in bucket.parameters):
                bucket.dirty, bucket.kept = False, None
                if self._pool is not None:
                    bucket.gradient, bucket.gradient_views = None, []

    def _name(self, bucket: Bucket, index: int) -> str:
        return self._names.get(id(bucket.parameters[index]), "a parameter")

    def close(self) -> None:
        """Removes the hooks. Local."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.buckets = [], []
