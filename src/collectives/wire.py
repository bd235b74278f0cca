# SPDX-License-Identifier: Apache-2.0
"""How values look on the wire: in full, in half the width, or as blocks of int8 or int4.

A wire format turns a piece of the tensor into a message and back, and does the ring's one sum. Whatever the format,
a sum is formed in float32 or wider at every hop (integers in their own type); only the message is narrow.

Note [averaging once]
    `Op.MEAN` costs no pass of its own: each rank's contribution is scaled by 1/n where it first enters a message or a
    sum. So partial sums never grow beyond the largest contribution, and float16 gradients do not overflow.

Note [bit-equal ranks]
    Whoever finishes a piece sends it, and takes for itself the value that the message stands for, rounded as the
    others will see it. Passing on copies bits. So all ranks end with the same bits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from enum import StrEnum
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override


@final
class Op(StrEnum):
    """How contributions are combined. MEAN divides once, inside the hops; it is refused for integers."""

    SUM = "sum"
    MEAN = "mean"


@final
class Wire(StrEnum):
    """How values travel.

    FULL: in the tensor's own dtype; exact but for the order of the sum.
    BF16: 2 bytes per value, rounded to nearest at each hop: each hop adds at most 2**-9 of the partial sum's magnitude.
    INT8: 1 byte per value and a float32 scale per block of 256 (1.016 bytes per value). Each hop adds at most 1/254 of
        the largest magnitude in the block, so a sum over n ranks is off by at most `n/254 * sum over ranks of
        max |x|` within the block (a mean by `1/n` of it). A block that holds an infinity or a NaN arrives as NaN.
    INT4: half a byte per value and a float32 scale per block of 256 (0.516 bytes per value). As INT8, with 1/14 in the
        place of 1/254.

    Measured, the root mean square error of a reduce-scatter's mean of normal values, as a part of that mean's own:

        ranks      2       4       8      16
        INT8    0.5 %   0.9 %   1.3 %   1.9 %       it grows with the hops, since each hop rounds a partial sum again
        INT4      9 %    16 %    24 %    35 %
    """

    FULL = "full"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"


BLOCK = 256
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = (torch.float16, torch.bfloat16)
_SUMMABLE = (
    *_FLOATS,
    torch.complex64,
    torch.complex128,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


class WireFormat(ABC):
    """Turns pieces into messages and sums them. `mine` is always the rank's own piece of the flat tensor, 1-D.

    Attributes:
        dtype: of the message.
        is_raw: whether a message is the bits of a piece, so that it can be sent and received in place.
    """

    dtype: torch.dtype
    is_raw: bool

    @abstractmethod
    def message_numel(self, numel: int) -> int:
        """How many values of `dtype` the message of `numel` elements has."""

    @abstractmethod
    def piece_numel(self, max_bytes: int) -> int:
        """How many elements fit into a message of `max_bytes`."""

    @abstractmethod
    def contribute(self, mine: Tensor, out: Tensor) -> None:
        """Write the scaled contribution `mine` to the message `out`, which may be `mine` itself (not used again)."""

    @abstractmethod
    def add_to_message(self, got: Tensor, mine: Tensor, out: Tensor) -> None:
        """Write the sum of the message `got` and the scaled contribution `mine` to the message `out`."""

    @abstractmethod
    def add_to_mine(self, got: Tensor, mine: Tensor) -> None:
        """Make `mine` the sum of the message `got` and the scaled contribution `mine`."""

    @abstractmethod
    def publish(self, mine: Tensor, out: Tensor) -> None:
        """Write the finished `mine` to the message `out`, and make `mine` what the message stands for."""

    @abstractmethod
    def keep(self, got: Tensor, mine: Tensor) -> None:
        """Make `mine` what the message `got` stands for."""

    def num_bytes(self, numel: int) -> int:
        """The payload bytes of a message of `numel` elements."""
        return self.message_numel(numel) * self.dtype.itemsize


@final
class FullFormat(WireFormat):
    """The message is the piece: sums go straight from the incoming memory to the outgoing one."""

    is_raw = True

    def __init__(self, dtype: torch.dtype, scale: float) -> None:
        self.dtype = dtype
        self.scale = scale

    @override
    def message_numel(self, numel: int) -> int:
        return numel

    @override
    def piece_numel(self, max_bytes: int) -> int:
        return max_bytes // self.dtype.itemsize

    @override
    def contribute(self, mine: Tensor, out: Tensor) -> None:
        if self.scale != 1:
            torch.mul(mine, self.scale, out=out)
        elif out is not mine:
            out.copy_(mine)

    @override
    def add_to_message(self, got: Tensor, mine: Tensor, out: Tensor) -> None:
        if self.scale == 1:
            torch.add(got, mine, out=out)
        elif self.dtype in _HALVES and math.frexp(self.scale)[0] != 0.5:
            # torch rounds `alpha` to the tensor's dtype: harmless for a power of two, an error of its own for 1/3.
            out.copy_(torch.add(got.float(), mine.float(), alpha=self.scale))
        else:
            torch.add(got, mine, alpha=self.scale, out=out)

    @override
    def add_to_mine(self, got: Tensor, mine: Tensor) -> None:
        self.add_to_message(got, mine, mine)

    @override
    def publish(self, mine: Tensor, out: Tensor) -> None:
        if out is not mine:
            out.copy_(mine)

    @override
    def keep(self, got: Tensor, mine: Tensor) -> None:
        mine.copy_(got)


class NarrowFormat(WireFormat):
    """What the narrow formats share: the sum is formed in a wide scratch, then encoded."""

    is_raw = False

    def __init__(self, tensor_dtype: torch.dtype, scale: float) -> None:
        self.scale = scale
        self._wide = torch.float64 if tensor_dtype is torch.float64 else torch.float32
        self._scratch = torch.empty(0, dtype=self._wide)

    @abstractmethod
    def encode(self, wide: Tensor, out: Tensor) -> None:
        """Write `wide` to the message `out`. May use the scratch (where `wide` may already lie)."""

    @abstractmethod
    def decode(self, got: Tensor, wide: Tensor) -> None:
        """Write what the message `got` stands for to `wide`."""

    @final
    @override
    def contribute(self, mine: Tensor, out: Tensor) -> None:
        wide = self._widened(mine)
        self.encode(wide if self.scale == 1 else torch.mul(wide, self.scale, out=self._scratch_like(mine)), out)

    @final
    @override
    def add_to_message(self, got: Tensor, mine: Tensor, out: Tensor) -> None:
        wide = self._scratch_like(mine)
        self.decode(got, wide)
        self.encode(wide.add_(mine, alpha=self.scale), out)

    @final
    @override
    def add_to_mine(self, got: Tensor, mine: Tensor) -> None:
        wide = self._scratch_like(mine)
        self.decode(got, wide)
        if mine.dtype is self._wide:
            torch.add(wide, mine, alpha=self.scale, out=mine)
        else:
            mine.copy_(wide.add_(mine, alpha=self.scale))

    @final
    @override
    def publish(self, mine: Tensor, out: Tensor) -> None:
        self.encode(self._widened(mine), out)
        self.keep(out, mine)

    @final
    @override
    def keep(self, got: Tensor, mine: Tensor) -> None:
        if mine.dtype is self._wide:
            self.decode(got, mine)
        else:
            wide = self._scratch_like(mine)
            self.decode(got, wide)
            mine.copy_(wide)

    def _widened(self, mine: Tensor) -> Tensor:
        return mine if mine.dtype is self._wide else self._scratch_like(mine).copy_(mine)

    def _scratch_like(self, mine: Tensor) -> Tensor:
        if self._scratch.numel() < mine.numel():
            self._scratch = torch.empty(mine.numel(), dtype=self._wide)
        return self._scratch[: mine.numel()]


@final
class HalfFormat(NarrowFormat):
    """`Wire.BF16`: a bfloat16 per value."""

    dtype = torch.bfloat16

    @override
    def message_numel(self, numel: int) -> int:
        return numel

    @override
    def piece_numel(self, max_bytes: int) -> int:
        return max_bytes // 2

    @override
    def encode(self, wide: Tensor, out: Tensor) -> None:
        out.copy_(wide)

    @override
    def decode(self, got: Tensor, wide: Tensor) -> None:
        wide.copy_(got)


class BlockFormat(NarrowFormat):
    """The float32 scales of all blocks, then the codes, whole numbers from `-levels` to `levels`.

    The last block may be short.
    """

    dtype = torch.uint8
    levels: ClassVar[int]

    @abstractmethod
    def codes_numel(self, numel: int) -> int:
        """Bytes that the codes of so many values take."""

    @abstractmethod
    def store(self, rounded: Tensor, codes: Tensor) -> None:
        """Write whole numbers to the bytes `codes`; NaNs may become anything, as their block's scale is NaN."""

    @abstractmethod
    def load(self, codes: Tensor, wide: Tensor) -> None:
        """Write the whole numbers of the bytes `codes` to `wide`."""

    @final
    @override
    def message_numel(self, numel: int) -> int:
        return 4 * -(-numel // BLOCK) + self.codes_numel(numel)

    @final
    @override
    def piece_numel(self, max_bytes: int) -> int:
        return max_bytes // (self.codes_numel(BLOCK) + 4) * BLOCK

    @final
    @override
    def encode(self, wide: Tensor, out: Tensor) -> None:
        quotients = self._scratch_like(wide)
        for values, scales, quotient in self._blocks(wide, out, quotients):
            largest = torch.maximum(values.amax(1, keepdim=True), values.amin(1, keepdim=True).neg_())
            largest.add_(largest * 0)  # an infinity becomes a NaN
            # The floor keeps zeros from 0/0, whose conversion to a whole number is undefined; a NaN passes through it.
            scales.copy_(largest.div_(self.levels).clamp_min_(torch.finfo(torch.float32).tiny))
            torch.div(values, scales, out=quotient).round_()
        self.store(quotients, out[4 * -(-wide.numel() // BLOCK) :])

    @final
    @override
    def decode(self, got: Tensor, wide: Tensor) -> None:
        self.load(got[4 * -(-wide.numel() // BLOCK) :], wide)
        for values, scales, _ in self._blocks(wide, got, wide):
            values.mul_(scales)

    @staticmethod
    def _blocks(wide: Tensor, message: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Views `[blocks, BLOCK]` of `wide`, `[blocks, 1]` of the scales, `[blocks, BLOCK]` of `other`.

        Two of each, where the last block is short.
        """
        numel = wide.numel()
        scales = message[: 4 * -(-numel // BLOCK)].view(torch.float32).unsqueeze(1)
        whole = numel // BLOCK * BLOCK
        blocks = []
        if whole:
            blocks.append((wide[:whole].view(-1, BLOCK), scales[: whole // BLOCK], other[:whole].view(-1, BLOCK)))
        if whole < numel:
            blocks.append((wide[None, whole:numel], scales[-1:], other[None, whole:numel]))
        return blocks


@final
class ByteFormat(BlockFormat):
    """`Wire.INT8`: a byte per value."""

    levels = 127

    @override
    def codes_numel(self, numel: int) -> int:
        return numel

    @override
    def store(self, rounded: Tensor, codes: Tensor) -> None:
        codes.view(torch.int8).copy_(rounded)

    @override
    def load(self, codes: Tensor, wide: Tensor) -> None:
        wide.copy_(codes.view(torch.int8))


@final
class NibbleFormat(BlockFormat):
    """`Wire.INT4`: two values per byte, the first in the low half; 8 more than the code, so that none is negative."""

    levels = 7

    @override
    def codes_numel(self, numel: int) -> int:
        return -(-numel // 2)

    @override
    def store(self, rounded: Tensor, codes: Tensor) -> None:
        pairs = len(rounded) // 2
        nibbles = rounded.to(torch.int8).add_(8).view(torch.uint8).bitwise_and_(15)
        torch.bitwise_or(nibbles[: 2 * pairs : 2], nibbles[1::2] * 16, out=codes[:pairs])
        codes[pairs:].copy_(nibbles[2 * pairs :])

    @override
    def load(self, codes: Tensor, wide: Tensor) -> None:
        wide[::2].copy_(codes & 15)
        wide[1::2].copy_(codes[: len(wide) // 2] >> 4)
        wide.sub_(8)


def wire_format(dtype: torch.dtype, *, op: Op | None, wire: Wire, n: int) -> WireFormat:
    """The format for a tensor of `dtype`; `op` is None where nothing is summed.

    Raises:
        ValueError: the dtype cannot be summed, averaged or narrowed like this.
    """
    if op is not None and dtype not in _SUMMABLE:
        raise ValueError(f"a tensor of {dtype} cannot be summed over ranks: convert it to one of {_names(_SUMMABLE)}")
    if op is Op.MEAN and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"the mean of {dtype} is not an integer: use Op.SUM, or convert the tensor to float first")
    if wire is not Wire.FULL and dtype not in _FLOATS:
        raise ValueError(f"wire {wire.value!r} carries only {_names(_FLOATS)}, not {dtype}: use Wire.FULL")
    scale = 1 / n if op is Op.MEAN else 1
    if wire in (Wire.INT8, Wire.INT4):
        return ByteFormat(dtype, scale) if wire is Wire.INT8 else NibbleFormat(dtype, scale)
    if wire is Wire.BF16 and dtype not in _HALVES:  # a half is no wider than the wire
        return HalfFormat(dtype, scale)
    return FullFormat(dtype, scale)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
