# SPDX-License-Identifier: Apache-2.0
"""A bucket at run time: the memory of a few parameters and their gradients, and which part of it this rank owns.

    values      [ all parameters of the bucket ]        stages 1 and 2: always; stage 3: while they are needed
    share            [ my slice ]                       a view of `values` (stage 3: memory of its own)
    master           [ my slice ]                       float32, where the parameters are half precision
    gradient    [ all gradients of the bucket ]         stage 1: always; stages 2 and 3: from the first one to the
    owned            [ my slice ]                       reduction, which leaves this

What an optimizer gets for a parameter is an `OwnedParameter`: the piece of it that lies in my slice, a view of `share`
or `master`, so that a step changes the parameter without a copy. Its `.grad` is a view of `owned`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from stratagem.plugins.zero.partition import Cut, Piece, Span

_HALVES = (torch.float16, torch.bfloat16)


class OwnedParameter(nn.Parameter):
    """What an optimizer holds of one parameter on this rank: `[numel]`, or the parameter's shape where all is owned.

    One stands for every parameter, empty where nothing of it is owned, so that groups keep their length and order.
    `requires_grad` is that of the module's parameter, also when it is set, so that code that goes through an
    optimizer's groups to freeze parameters (Lightning's `toggle_optimizer`) freezes them on all ranks.
    """

    whole: nn.Parameter
    """The module's parameter."""

    @staticmethod
    def of(memory: Tensor, whole: nn.Parameter) -> OwnedParameter:
        """The piece of `whole` whose memory this is."""
        owned = OwnedParameter(memory, requires_grad=False)
        owned.whole = whole
        return owned

    @property
    def requires_grad(self) -> bool:
        """Whether the module's parameter is trained."""
        whole = self.__dict__.get("whole")
        return whole is not None and whole.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.whole.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> OwnedParameter:
        """As the tensor's own, for the module's parameter."""
        self.whole.requires_grad_(requires_grad)
        return self


@final
class Bucket:
    """The memory of one bucket on this rank; see the picture above. Nothing here communicates.

    Args:
        cut: the layout and its slices.
        rank: which slice is this rank's.
        parameters: those of the bucket's slots, in the same order.
        wants_master: keep a separate exact copy of the slice even if the parameters are not half precision.
        master_device: where masters, owned gradients and optimizer state live; with the parameters where left out.

    Attributes:
        pieces: per parameter, the part of it in this rank's slice.
        owned_parameters: per parameter, what the optimizer holds; None before an optimizer came.
        used: per parameter, whether any rank had a gradient for it since the optimizer last cleared it.
    """

    def __init__(
        self,
        cut: Cut,
        rank: int,
        parameters: Sequence[nn.Parameter],
        *,
        wants_master: bool = False,
        master_device: torch.device | None = None,
    ) -> None:
        self.cut, self.rank, self.parameters = cut, rank, tuple(parameters)
        self.pieces: tuple[Piece, ...] = tuple(cut.pieces(rank))
        self.span: Span = cut.bounds[rank]
        self.has_master = wants_master or cut.layout.dtype in _HALVES or master_device not in (None, cut.layout.device)
        self.master_device = master_device or cut.layout.device
        self.owned_parameters: list[OwnedParameter | None] = [None] * len(self.parameters)
        self.values: Tensor | None = None
        self.share: Tensor | None = None
        self.master: Tensor | None = None
        self.owned: Tensor | None = None
        self.gradient: Tensor | None = None
        self.gradient_views: list[Tensor] = []
        self.kept: Tensor | None = None
        self.used = [False] * len(self.parameters)
        # of one backward; kept by `Gradients`
        self.position, self.missing, self.active, self.dirty = 0, 0, True, False
        self.arrived = [False] * len(self.parameters)
        self.awaited = [False] * len(self.parameters)
        self.due = [False] * len(self.parameters)  # required a gradient earlier in a window that piles up
        self.hooked = [False] * len(self.parameters)

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return self.cut.layout.numel

    @property
    def is_trained(self) -> bool:
        """Whether any of the parameters requires a gradient."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype in which the optimizer works."""
        dtype = self.cut.layout.dtype
        return torch.float32 if self.has_master and dtype in _HALVES else dtype

    @torch.no_grad()
    def adopt_values(self, values: Tensor | None = None) -> None:
        """Moves the parameters into one flat memory, of which they become views; frees what they had."""
        layout = self.cut.layout
        flat = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device) if values is None else values
        for slot, parameter in zip(layout.slots, self.parameters, strict=True):
            view = slot.view(flat)
            if values is None:
                view.copy_(parameter.detach())
            parameter.data = view
        self.values = flat
        if self.share is None:
            self.share = flat[slice(*self.span)]

    @torch.no_grad()
    def divide(self, parts: Iterable[Tensor]) -> None:
        """Stage 3: keeps my slice of the parameters, whose whole values come one by one in the bucket's order."""
        layout = self.cut.layout
        self.share = torch.empty(self.span[1] - self.span[0], dtype=layout.dtype, device=layout.device)
        for index, whole in enumerate(parts):
            self.keep_part(index, whole)

    def keep_part(self, index: int, whole: Tensor) -> None:
        """Stage 3: takes my piece of a parameter's new whole value over."""
        piece = self.pieces[index]
        assert self.share is not None
        if piece.numel:
            flat = torch.empty(piece.whole_numel, dtype=whole.dtype, device=whole.device)
            replace(piece.slot, offset=0).view(flat).copy_(whole)
            offset = piece.slot.offset + piece.start - self.span[0]
            self.share[offset : offset + piece.numel].copy_(flat[piece.start : piece.stop])

    def unchanged(self) -> bool:
        """Whether every parameter still is where it was put."""
        if self.values is None:
            return True
        start, size = self.values.data_ptr(), self.values.element_size()
        pairs = zip(self.cut.layout.slots, self.parameters, strict=True)
        return all(p.data_ptr() == start + slot.offset * size or p.numel() == 0 for slot, p in pairs)

    @torch.no_grad()
    def own(self, index: int) -> OwnedParameter:
        """What an optimizer holds of parameter `index`; makes master memory when the first one is asked for."""
        if self.share is not None and self.has_master and self.master is None:
            pinned = self.master_device.type == "cpu" and self.share.device.type == "cuda"
            self.master = torch.empty(
                self.share.shape, dtype=self.state_dtype, device=self.master_device, pin_memory=pinned
            ).copy_(self.share)
        memory = self.master if self.has_master else self.share
        assert memory is not None
        owned = OwnedParameter.of(self.part(index, memory), self.parameters[index])
        self.owned_parameters[index] = owned
        return owned

    def part(self, index: int, memory: Tensor) -> Tensor:
        """Piece `index` of a slice `[numel of the slice]`: flat, or of the parameter's shape where it is whole."""
        piece = self.pieces[index]
        offset = piece.slot.offset + piece.start - self.span[0] if piece.numel else 0
        if piece.is_whole:
            return memory.as_strided(piece.slot.size, piece.slot.stride, memory.storage_offset() + offset)
        return memory[offset : offset + piece.numel]

    def publish(self) -> None:
        """Rounds the stepped masters into the parameters' memory."""
        if self.master is not None:
            assert self.share is not None
            self.share.copy_(self.master, non_blocking=True)

    def refresh(self) -> None:
        """Takes new values of the parameters over into the masters."""
        if self.master is not None:
            assert self.share is not None
            self.master.copy_(self.share)

    def refresh_piece(self, index: int) -> None:
        """As `refresh`, for one parameter."""
        if self.master is not None:
            assert self.share is not None
            self.part(index, self.master).copy_(self.part(index, self.share))

    def has_moved(self, index: int) -> bool:
        """Whether the master of a parameter is not what the parameter itself says."""
        if self.master is None or self.share is None:
            return False
        return not torch.equal(self.part(index, self.master), self.part(index, self.share).to(self.master))

    def holds_gradients(self) -> bool:
        """Whether the optimizer holds a gradient that a further backward must add to. Local."""
        return any(owned is not None and owned.grad is not None for owned in self.owned_parameters)

    def forget_stale(self) -> None:
        """Zeros where `owned` holds what was left of gradients that the optimizer has cleared."""
        assert self.owned is not None
        for index, owned in enumerate(self.owned_parameters):
            if owned is None or owned.grad is None:
                self.part(index, self.owned).zero_()

    def release_module(self) -> None:
        """Gives the parameters memory of their own again, as they had before; only where `values` are there."""
        if self.values is not None:
            for parameter in self.parameters:
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)
        self.values = self.share = self.master = self.gradient = self.owned = None
        self.gradient_views, self.owned_parameters = [], []

    def __repr__(self) -> str:
        return f"Bucket({len(self.parameters)} parameters, {self.numel} elements, mine {self.span})"
