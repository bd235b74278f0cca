# SPDX-License-Identifier: Apache-2.0
"""What the ZeRO stages share: what one process holds, divided over the data ranks, with the same results.

    stage   parameters   gradients   optimizer state   bytes per parameter   bytes sent per step,
                                                       (float32 Adam)        times those of the parameters
    1       whole        whole       1/N               8 + 8/N               2 (N-1)/N
    2       whole        1/N         1/N               4 + 12/N              2 (N-1)/N
    3       1/N          1/N         1/N               16/N                  3 (N-1)/N

One optimizer step of stages 1 and 2 sends gradients once (reduce-scatter, during backward) and parameters once
(all-gather, after the step): together what DDP's all-reduce sends.

Half precision parameters have float32 masters, of which each rank holds its share: the optimizer steps those, and they
are rounded into the parameters. That is 4/N bytes more per parameter for masters and 4/N for their gradients.

Who owns what is decided in `attach`, when the optimizers are known: parameters of different optimizers share no bucket,
so that each optimizer's step sends its own parameters only; parameter groups do share, since pieces are per parameter.

A parameter that requires a gradient but is in no optimizer stays whole, and its gradient local. A frozen one that is in
an optimizer has a bucket, which costs nothing before it is unfrozen. One that is added to an optimizer later
(`add_param_group`) is taken over before the next backward.
"""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from stratagem.collectives import Wire
from stratagem.errors import ConfigError
from stratagem.placement import Placement
from stratagem.plugins.zero.bucket import Bucket, OwnedParameter
from stratagem.plugins.zero.gradients import Gradients
from stratagem.plugins.zero.lane import SHARD_AXES, Lane
from stratagem.plugins.zero.late import LateGather
from stratagem.plugins.zero.optimizer import OwnedOptimizer, share_overflow
from stratagem.plugins.zero.partition import cut, pack_by_key
from stratagem.plugins.zero.predictions import held_bytes, parameter_wire, wire_bytes
from stratagem.plugins.zero.saving import Saving
from stratagem.plugins.zero.separable import check_separable
from stratagem.plugins.zero.settings import ZeroSettings
from stratagem.plugins.zero.state import gather_gradient
from stratagem.technique import ChangedBuffers, Context, check_same_structure, state_placements, unique


class Zero(Saving, ABC):
    """What the stages share.

    Args:
        settings: see `ZeroSettings`.
    """

    axis: ClassVar[str] = "dp_shard"
    stage: ClassVar[int]
    """1, 2 or 3."""

    def __init__(self, settings: ZeroSettings = ZeroSettings()) -> None:
        self.settings = settings
        self.agree_on_overflow = False  # tell each other of infinities, so that a loss scaler skips on all ranks
        self._optimizers: list[OwnedOptimizer] = []
        self._buckets: list[Bucket] = []
        self._lanes: list[Lane] = []
        self._late: LateGather | None = None
        self._reduced, self._window = 0, 1
        """Reductions until the last optimizer step, and between the last two."""

    # -- start -----------------------------------------------------------------------------------------------------

    @override
    def apply(self, module: nn.Module, context: Context) -> None:
        """Gives all ranks rank 0's parameters and buffers, and states placements.

        Collective over the data axes. Moves the model once, from rank 0 of each row.

        Raises:
            ConfigError: the ranks built different modules; names the first difference.
        """
        self.module, self.context = module, context
        self.names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._known = set(self.names)
        self._lane = Lane(context, "gradients")
        self._lanes = [self._lane]
        self._loads = [0] * self._lane.shard.size
        sizes = context.shape.sizes
        self._shard_axes = tuple(axis for axis in SHARD_AXES if sizes[axis] > 1)
        data_axes = tuple(axis for axis in ("dp_replicate", *SHARD_AXES) if sizes[axis] > 1)
        state_placements(module, context, data_axes or (self.axis,))
        check_same_structure(module, self._lane.data)
        self._equalise(module)
        self._gradients = Gradients(
            self._lane,
            self.settings,
            transient=self.stage > 1,
            fetches=self.stage > 2,
            buffers=ChangedBuffers(module),
            names=self.names,
        )
        self._gradients.on_finish = self._on_finish
        if self.settings.offload == "cpu" and context.device.type == "cpu":
            warnings.warn("zero.offload: cpu changes nothing, since the model is on the CPU already", stacklevel=2)
        if self.settings.secondary_shard and self.stage < 3:
            warnings.warn("zero.secondary_shard changes nothing before stage 3: parameters are whole", stacklevel=2)

    @torch.no_grad()
    def _equalise(self, module: nn.Module) -> None:
        self._lane.data.broadcast_tensors([*unique(module.parameters()), *unique(module.buffers())])

    @override
    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Divides the parameters of the optimizers, and gives the optimizers this rank's pieces of them. Local.

        Raises:
            ConfigError: an optimizer cannot be divided so; a parameter is not of the module, or in two optimizers.
        """
        if self._lane.shard.size > 1:
            for optimizer in optimizers:
                check_separable(optimizer, self.settings.partition)
        self._optimizers = [OwnedOptimizer(o, on_step=self._after_step, on_clear=self._after_clear) for o in optimizers]
        self._take_over()
        if self.settings.gather == "forward" and self.stage < 3 and self._lane.shard.size > 1:
            self._late = LateGather(self.module)

    def _take_over(self) -> None:
        """Takes over every parameter that is in an optimizer and was not before; nothing happens if there is none."""
        strangers = [(number, p) for number, o in enumerate(self._optimizers) for p in o.strangers()]
        if not strangers:
            return
        for number, parameter in strangers:
            if id(parameter) not in self.names:
                raise ConfigError(
                    f"optimizer {number} holds a parameter of shape {tuple(parameter.shape)} that the module had not "
                    "when the run was set up",
                    where="the optimizers",
                    allowed="parameters of the module",
                    do="create parameters in __init__ or configure_model, and keep them",
                )
        self._divide([(number, p) for number, p in strangers if not self._is_divided(p)])
        places = {id(p): (bucket, index) for bucket in self._buckets for index, p in enumerate(bucket.parameters)}
        for optimizer in self._optimizers:
            optimizer.take_over(places)

    def _is_divided(self, parameter: nn.Parameter) -> bool:
        return any(mine is parameter for bucket in self._buckets for mine in bucket.parameters)

    def _divide(self, strangers: Sequence[tuple[int, nn.Parameter]]) -> None:
        """Packs, cuts and adopts parameters, given with the number of their optimizer."""
        keys = [(number, parameter.requires_grad) for number, parameter in strangers]
        self._make_buckets([parameter for _, parameter in strangers], keys)

    def _make_buckets(
        self, parameters: Sequence[nn.Parameter], keys: Sequence[Any], *, divided: bool = False
    ) -> list[Bucket]:
        """Buckets of parameters with equal keys; `divided` if their values are, too."""
        cap = int(self.settings.bucket_mib * 2**20)
        first = int(self.settings.first_bucket_mib * 2**20)
        if self.stage > 1:
            cap, first = max(cap // 2, 1), max(first // 2, 1)
        # A small first bucket leaves early; one in every block of stage 3 would only be one more message each.
        layouts = pack_by_key(parameters, keys, cap_bytes=cap, first_cap_bytes=None if divided else first)
        shard = self._lane.shard
        rounds = Wire(self.settings.parameter_wire) is not Wire.FULL
        device = torch.device("cpu") if self.settings.offload == "cpu" else None
        buckets = [
            Bucket(
                each,
                shard.rank,
                [parameters[slot.index] for slot in each.layout.slots],
                wants_master=rounds and each.layout.dtype.is_floating_point and not divided,
                master_device=device,
            )
            for each in cut(layouts, shard.size, how=self.settings.partition, loads=self._loads)
        ]
        for bucket in buckets:
            self._adopt_values(bucket, divided=divided)
        self._buckets += buckets
        self._announce(buckets)
        return buckets

    def _adopt_values(self, bucket: Bucket, *, divided: bool) -> None:
        assert not divided, "only stage 3 divides parameters"
        bucket.adopt_values()

    def _announce(self, buckets: Sequence[Bucket]) -> None:
        """Has the gradients of new buckets reduced from here on."""
        self._gradients.adopt(buckets)

    # -- one step --------------------------------------------------------------------------------------------------

    @override
    def begin(self) -> None:
        """A backward is about to run (or ought to). Local, unless parameters were added to an optimizer.

        Raises:
            ConfigError: a parameter was replaced, moved or added since the run was set up.
        """
        self._settle()
        self._take_over()
        self._check_unchanged()
        self._gradients.begin()

    def _check_unchanged(self) -> None:
        for bucket in self._buckets:
            if not bucket.unchanged():
                names = ", ".join(self.names.get(id(p), "?") for p in bucket.parameters[:5])
                raise ConfigError(
                    f"the memory of one of {names} was exchanged after the run was set up",
                    where="the module",
                    do="change parameters in place (`with torch.no_grad(): p.copy_(...)`), on every rank alike",
                )
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in self._known and parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name!r} was added or replaced after the run was set up",
                    where="the module",
                    do="create parameters in __init__ or configure_model",
                )

    @override
    def finish(self) -> None:
        """Waits until this rank's share of every gradient is reduced. Collective over the data axes."""
        self._gradients.finish()

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients pile up whole (stage 1, or `accumulation: whole`), or, reduced, in the owned slices."""
        with self._gradients.no_sync():
            yield

    def _on_finish(self) -> None:
        """The gradients of a backward are reduced."""
        if self.agree_on_overflow and self._lane.data.size > 1:
            self._lane.submit(share_overflow, self._optimizers, self._lane.data).result()

    @torch.no_grad()
    def _after_step(self, optimizer: OwnedOptimizer) -> None:
        """Sends every rank the slices that the others have stepped. Collective over the shard axes."""
        self._settle()
        reduced = self._gradients.num_reductions
        self._window, self._reduced = max(reduced - self._reduced, 1), reduced
        used = {id(bucket) for bucket, index in optimizer.places.values() if bucket.used[index]}
        stepped = [bucket for bucket in optimizer.buckets[::-1] if id(bucket) in used]  # first needed, first gathered
        futures = []
        for bucket in stepped:
            bucket.publish()
            if bucket.values is not None:
                futures.append(
                    self._lane.submit(
                        self._lane.shard.all_gather,
                        bucket.values,
                        bounds=bucket.cut.bounds,
                        wire=parameter_wire(bucket, self.settings),
                    )
                )
        if self._late is not None:
            self._late.add([bucket for bucket in stepped if bucket.values is not None], futures)
        else:
            for future in futures:
                future.result()
        torch.autograd.graph.increment_version([parameter for bucket in stepped for parameter in bucket.parameters])

    def _after_clear(self, optimizer: OwnedOptimizer, set_to_none: bool) -> None:
        self._gradients.clear(optimizer.places.values(), set_to_none=set_to_none)

    # -- where everything is ---------------------------------------------------------------------------------------

    def _place(self, tensor: Tensor) -> tuple[Bucket, int] | None:
        found = (optimizer.places.get(id(tensor)) for optimizer in self._optimizers)
        return next((place for place in found if place is not None), None)

    @override
    def placement_of(self, parameter: Tensor) -> Placement | None:
        """Of a piece: that of its parameter, cut to the span of elements that the piece holds. Local."""
        if not isinstance(parameter, OwnedParameter):
            return super().placement_of(parameter)
        place = self._place(parameter)
        whole = self.context.placements.get(self.names.get(id(parameter.whole), ""))
        if place is None or whole is None:
            return whole
        piece = place[0].pieces[place[1]]
        return replace(whole, flat=(piece.start, piece.stop), shard_axes=self._sharded(whole))

    def _sharded(self, placement: Placement) -> tuple[str, ...]:
        return (*(axis for axis in placement.shard_axes if axis not in self._shard_axes), *self._shard_axes)

    @override
    def norm_parts(self, tensors: Iterable[Tensor]) -> list[tuple[Placement, Tensor]]:
        """As the base class's, with a zero per set of shard axes, since a rank may own no gradient at all. Local."""
        found = list(tensors)
        wholes = (self.context.placements.get(self.names.get(id(getattr(t, "whole", t)), "")) for t in found)
        axes = dict.fromkeys(self._sharded(whole) for whole in wholes if whole is not None)
        dtype = reduce(torch.promote_types, (t.dtype for t in found), torch.float32)  # the norm's, on every rank alike
        zero = torch.zeros(1, dtype=dtype, device=self.context.device)
        return [(Placement("", (1,), shard_axes=each), zero) for each in axes] + super().norm_parts(found)

    def full_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The reduced gradient of one of the module's parameters, whole, on every rank; None if it has none.

        Collective over the shard axes; sends the gradient once around.
        """
        for bucket in self._buckets:
            for index, mine in enumerate(bucket.parameters):
                if mine is parameter:
                    return self._lane.submit(gather_gradient, bucket, index, self._lane.shard).result()
        return None

    # -- predictions -----------------------------------------------------------------------------------------------

    @override
    def wire_bytes_per_step(self) -> Mapping[str, float]:
        """`(N-1)/N` of the gradient bytes and `(N-1)/N` of the parameter bytes over the shard axes (stage 3: parameters
        twice); over `dp_replicate`, of R groups, `2 (R-1)/R` of this rank's share of the gradients. Gradients count
        once per reduction of the last optimizer step: see `ZeroSettings.accumulation`."""
        gathers = [(bucket, self._gathers_per_step(bucket)) for bucket in self._buckets]
        return wire_bytes(gathers, self._lane, self.settings, num_reductions=self._window)

    def _gathers_per_step(self, bucket: Bucket) -> int:
        return 1

    @override
    def held_bytes(self) -> Mapping[str, int]:
        """Parameters and gradients by the table above, between backward and step; masters count as parameters.

        `optimizer` is one moment of the optimizer's state, of which Adam has two.
        """
        return held_bytes(unique(self.module.parameters()), self._buckets, stage=self.stage)

    # -- end -------------------------------------------------------------------------------------------------------

    @override
    def close(self) -> None:
        """Gives the module plain parameters and the optimizers plain groups (without state), and ends the threads.

        Local in stages 1 and 2.
        """
        self._restore_module()
        self._end()

    @override
    def abort(self) -> None:
        """As `close`, but first wakes the threads if they wait for a peer. Local."""
        for lane in self._lanes:
            lane.abort()
        self._end()

    def _restore_module(self) -> None:
        """Makes the parameters whole and final."""
        self._settle()

    def _settle(self) -> None:
        """Waits for parameters that are still on their way."""
        if self._late is not None:
            self._late.wait()

    def _end(self) -> None:
        self._gradients.close()
        if self._late is not None:
            self._late.close()
            self._late = None
        for optimizer in self._optimizers:
            optimizer.restore()
        for bucket in self._buckets:
            bucket.release_module()
        self._optimizers, self._buckets = [], []
        for lane in self._lanes:
            lane.close()
        self._lanes = []
