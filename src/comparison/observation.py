# SPDX-License-Identifier: Apache-2.0
"""What is looked at in a rank: which samples a batch holds, what the parameters are, how large the gradient is.

    row_hashes       one number per sample, so that the same samples in any order, cut over any number of ranks and
                     micro-batches, have the same sum
    Sketcher         a few numbers per parameter whose differences tell how far two tensors are apart, without keeping
                     either: their norm, and inner products with fixed vectors of random signs

Note [random signs]: the inner product of a difference `d` with a vector of random signs has mean 0 and variance |d|^2,
so the root mean square over a few such vectors estimates |d|; with 8 of them within a factor of 2, nearly always. That
is enough to say in which step and in which parameter a run left another one, for a few bytes per parameter and step.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

_NUM_SIGNS = 8
_BLOCK = 65_537  # elements that share one row of signs
_MASK = 2**64 - 1

Words = NDArray[np.uint64]


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor of a batch, in a fixed order: mappings by key, sequences and objects by position.

    Example:
        >>> [tensor.item() for tensor in tensors_of({"b": torch.tensor(2), "a": [torch.tensor(1)]})]
        [1, 2]
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for key in sorted(batch, key=str):
            yield from tensors_of(batch[key])
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from tensors_of(part)


def num_rows(batch: Any) -> int:
    """Samples of a batch: the rows of its first tensor; 1 where it has none with rows."""
    return next((tensor.size(0) for tensor in tensors_of(batch) if tensor.dim() > 0), 1)


def batch_hash(batch: Any) -> int:
    """A number for the set of samples in a batch: the sum, modulo 2^64, of the hashes of its rows.

    Local. Tensors whose first dim is not the number of samples count as a part of every sample. Sparse and nested ones
    count by their values; what has no bytes to look at (of a foreign layout or class) counts as nothing, since a look
    at the data must not end a run.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> batch_hash(rows) == batch_hash(rows.flip(0)), batch_hash(rows) == batch_hash(rows.flip(1))
        (True, False)
        >>> batch_hash(rows) == (batch_hash(rows[:1]) + batch_hash(rows[1:])) % 2**64
        True
    """
    size = num_rows(batch)
    hashes: Words = np.zeros(size, dtype=np.uint64)
    for tensor in tensors_of(batch):
        with contextlib.suppress(Exception):  # of whatever a tensor's class raises
            hashes = _mixed(hashes * np.uint64(0x9E3779B97F4A7C15) + _tensor_hashes(tensor.detach(), size))
    return int(hashes.sum(dtype=np.uint64))


def _tensor_hashes(tensor: Tensor, size: int) -> Words:
    """One number per sample, or one for all where the tensor has not as many rows."""
    if tensor.is_nested:
        rows = [_row_hashes(row.reshape(1, -1))[0] for row in tensor.unbind()]
        found = np.array(rows, dtype=np.uint64)
        return found if len(found) == size else found.sum(keepdims=True, dtype=np.uint64)
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return _row_hashes(tensor if tensor.dim() > 0 and len(tensor) == size else tensor.reshape(1, -1))


def _row_hashes(rows: Tensor) -> Words:
    """One number per row [B]: its 8-byte words times fixed random odd numbers."""
    raw = rows.cpu().contiguous().reshape(len(rows), -1).view(torch.uint8).numpy()
    padded = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 8)))
    words = np.ascontiguousarray(padded).view(np.uint64)
    factors = _mixed(np.arange(1, words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    return _mixed((words * factors).sum(axis=1, dtype=np.uint64))


def _mixed(numbers: Words) -> Words:
    """Spreads every bit over all 64."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


@final
@dataclass(frozen=True)
class Sketch:
    """One parameter at one moment.

    Attributes:
        norm: its 2-norm, without the elements that are no finite number.
        products: its inner products with vectors of random signs, see Note [random signs]; likewise.
        numberless: which elements are nan or infinite (a causal mask has some), as one number; 0 where all are finite.
    """

    norm: float
    products: tuple[float, ...]
    numberless: int = 0

    def distance(self, other: Sketch) -> float:
        """About the 2-norm of the difference of the two tensors.

        Example:
            >>> sketcher, one = Sketcher(), torch.ones(1000)
            >>> first, second = (sketcher.sketch({"w": each})["w"] for each in (one, one + 0.01))
            >>> 0.1 < first.distance(second) / 0.01 / 1000**0.5 < 3
            True
        """
        if self.numberless != other.numberless:
            return math.inf
        squares = [(mine - its) ** 2 for mine, its in zip(self.products, other.products, strict=True)]
        found = math.sqrt(sum(squares) / len(squares)) if squares else abs(self.norm - other.norm)
        return found if math.isfinite(found) else math.inf


@final
class Sketcher:
    """Makes sketches with the same signs in every process; holds half a mebibyte of them, in float64 4 MiB."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(20_250_101)
        signs = torch.randint(0, 2, (_NUM_SIGNS, _BLOCK), generator=generator, dtype=torch.int8)
        self._signs = signs.double().mul_(2).sub_(1)
        self._flips = torch.randint(0, 2, (_NUM_SIGNS, 4096), generator=generator).double().mul_(2).sub_(1)

    @torch.no_grad()
    def sketch(self, state: Mapping[str, Any]) -> dict[str, Sketch]:
        """One sketch per floating-point tensor of a state dict. Local; reads each element once."""
        return {
            name: self._one(value)
            for name, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.layout == torch.strided
        }

    def _one(self, tensor: Tensor) -> Sketch:
        flat = tensor.detach().reshape(-1)
        products, square, numberless = torch.zeros(_NUM_SIGNS, dtype=torch.float64), 0.0, 0
        for number, start in enumerate(range(0, flat.numel(), _BLOCK)):
            block = flat[start : start + _BLOCK].to("cpu", torch.float64)
            own = float(block @ block)
            if not math.isfinite(own):
                kinds = (block.isnan() * 1 + block.isposinf() * 2 + block.isneginf() * 3).to(torch.uint8)
                numberless = zlib.crc32(kinds.numpy().tobytes(), zlib.crc32(str(start).encode(), numberless)) or 1
                block = torch.where(kinds == 0, block, 0.0)
                own = float(block @ block)
            square += own
            products += (self._signs[:, : block.numel()] @ block) * self._flips[:, number % self._flips.shape[1]]
        return Sketch(math.sqrt(square), tuple(products.tolist()), numberless)


@torch.no_grad()
def whole_gradient_norm(parameters: Iterable[nn.Parameter]) -> float | None:
    """The 2-norm, in float64, of the gradients of a rank that holds all of them whole; None where it holds none."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return None
    return math.sqrt(sum(float(gradient.detach().double().square().sum()) for gradient in gradients))


def random_state() -> int:
    """A number that changes when this process draws from torch's generator. Local."""
    return hash(torch.get_rng_state().numpy().tobytes())
