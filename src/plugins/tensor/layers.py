# SPDX-License-Identifier: Apache-2.0
"""The layers that stand in the place of `nn.Linear` and `nn.Embedding`.

A layer stays the object that it was and an instance of the class that it was: it is given a subclass, in whose forward
only this rank's part of the weight is used. Names of modules and parameters stay, `isinstance(layer, nn.Linear)` stays
true, whoever holds a reference holds the cut layer; and a subclass of the user's, an embedding that scales its output,
keeps its forward and finds ours where it calls `super().forward`.

    ColumnLinear      weight [O/t, I]   bias [O/t]    input whole, output this rank's features
    SharedColumn      weight [O, I]     bias [O]      as above; ranks need rows in common, so each keeps all of them
    RowLinear         weight [O, I/t]   bias [O]      input this rank's features, output whole
    VocabEmbedding    weight [V/t, D]                 looks up the tokens that it has, zeros for the others, summed
    WideEmbedding     weight [V, D/t]                 looks up this rank's features of every token, put together
    CutDropout                                        this rank's slice of one process's mask
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from stratagem.plugins.tensor.axis import SEQUENCE_DIM, TensorAxis, column_product, row_product
from stratagem.plugins.tensor.functions import Span, gather_from, reduce_from, scatter_sum, scatter_to
from stratagem.plugins.tensor.sharded import ShardedTensor, whole_of

Output = Literal["cut", "whole", "lazy"]
"""What a column layer returns: its own features; all of them; or a tensor that is put together when somebody asks."""


class CutLayer(nn.Module, ABC):
    """What the layers have in common. Made by `install`, never built."""

    tensor_axis: TensorAxis
    plain_class: type[nn.Module]
    spans: tuple[Span, ...]
    """Every rank's span of the dim that is cut."""

    @abstractmethod
    def _prepare(self, **options: Any) -> None:
        """Keeps the options."""


def install(module: nn.Module, kind: type[CutLayer], axis: TensorAxis, along: Sequence[Span], **options: Any) -> None:
    """Gives a module its cut subclass. The caller cuts the parameters. Local.

    Args:
        module: a linear layer or an embedding.
        kind: one of the classes of this file.
        axis: the tensor-parallel axis.
        along: every rank's span of the dim that is cut.
        options: of the kind.
    """
    plain = type(module)
    is_plain = plain in (nn.Linear, nn.Embedding, nn.Dropout)
    module.__class__ = kind if is_plain else type(plain.__name__, (plain, kind), {})
    assert isinstance(module, CutLayer)
    module.tensor_axis, module.plain_class, module.spans = axis, plain, tuple(along)
    module._prepare(**options)


def uninstall(module: nn.Module) -> None:
    """Gives a module its own class back. The caller makes the parameters whole. Local."""
    if isinstance(module, CutLayer):
        plain = module.plain_class
        for name in ("tensor_axis", "plain_class", "spans", *getattr(module, "_option_names", ())):
            module.__dict__.pop(name, None)
        module.__dict__.pop("_option_names", None)
        cast(nn.Module, module).__class__ = plain


class _Optional(CutLayer):
    """Keeps options as attributes and remembers their names."""

    @override
    def _prepare(self, **options: Any) -> None:
        self.__dict__["_option_names"] = tuple(options)
        self.__dict__.update(options)


class ColumnLinear(_Optional, nn.Linear):
    """A linear layer of which this rank has some output features: `[..., I]` to `[..., O/t]`, or to `[..., O]`.

    Every rank of the axis calls it. Bytes: see `axis.column_product`; `output="whole"` sends `(t-1)/t` of the output's
    bytes besides, `"lazy"` only where somebody needs all of it.
    """

    output: Output

    @override
    def forward(self, input: Tensor) -> Tensor:
        """This rank's output features, or all."""
        out = column_product(whole_of(input), self.weight, self.bias, self.tensor_axis)
        if self.output == "lazy":
            return ShardedTensor.of(out, self.tensor_axis.comm, self.spans)
        if self.output == "whole":
            return gather_from(out, self.tensor_axis.comm, -1, self.spans)
        return out


class SharedColumn(_Optional, nn.Linear):
    """A linear layer whose output features are needed on several ranks: key and value heads fewer than ranks.

    Each rank keeps all rows and computes those of its span, so spans may overlap; the gradients of the rows are summed
    over the axis by whoever installs it.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        """`[..., I]` to this rank's span of `[..., O]`."""
        rows = slice(*self.spans[self.tensor_axis.rank])
        bias = None if self.bias is None else self.bias[rows]
        return column_product(whole_of(input), self.weight[rows], bias, self.tensor_axis)


class RowLinear(_Optional, nn.Linear):
    """A linear layer of which this rank has some input features: `[..., I/t]` to `[..., O]`.

    Every rank of the axis calls it. Bytes: see `axis.row_product`; `splits` is for an input that is whole.
    """

    splits: bool

    @override
    def forward(self, input: Tensor) -> Tensor:
        """The whole output, or under sequence parallelism this rank's share of the sequence."""
        if self.splits:
            input = scatter_to(whole_of(input), self.tensor_axis.comm, -1, self.spans)
        return row_product(whole_of(input), self.weight, self.bias, self.tensor_axis)


class VocabEmbedding(_Optional, nn.Embedding):
    """An embedding of which this rank has some tokens: int64 `[...]` to `[..., D]`.

    Every rank of the axis calls it. Sends `2 (t-1)/t` of the output's bytes forward and nothing backward; under
    sequence parallelism the output is `[B, T/t, D]` and each direction sends `(t-1)/t`.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Tokens of other ranks are zeros here, and come with the sum."""
        check_range(input, self.spans[-1][1])
        axis, (start, stop) = self.tensor_axis, self.spans[self.tensor_axis.rank]
        elsewhere = (input < start) | (input >= stop)
        padding = self.padding_idx
        mine = padding - start if padding is not None and start <= padding < stop else None
        out = F.embedding((input - start).masked_fill(elsewhere, 0), self.weight, mine)
        out = out.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if axis.sequence:
            return scatter_sum(out, axis.comm, SEQUENCE_DIM, axis.cut_sequence(out))
        return reduce_from(out, axis.comm)


class WideEmbedding(_Optional, nn.Embedding):
    """An embedding of which this rank has some features of every token: int64 `[...]` to `[..., D]`.

    Every rank of the axis calls it. Sends `(t-1)/t` of the output's bytes forward and nothing backward.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        """All features, or under sequence parallelism those of this rank's share of the sequence."""
        axis = self.tensor_axis
        out = gather_from(F.embedding(input, self.weight, self.padding_idx), axis.comm, -1, self.spans)
        if axis.sequence:
            return scatter_to(out, axis.comm, SEQUENCE_DIM, axis.cut_sequence(out))
        return out


class CutDropout(_Optional, nn.Dropout):
    """Dropout of this rank's slice along a dim, with the mask that one process would draw.

    Every rank draws the mask of the whole from torch's random state, which ranks of the axis have in common, and uses
    its slice. So masks do not depend on t, nor does what is drawn next. Nothing is sent.
    """

    dim: int
    """`SEQUENCE_DIM`: the input is a share of the sequence that was cut last. -1: it is the span of the features."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """As `nn.Dropout`."""
        if not self.training or self.p == 0.0:
            return input
        axis = self.tensor_axis
        along = axis.shares_of(input) if self.dim == SEQUENCE_DIM else self.spans
        shape = list(input.shape)
        shape[self.dim] = along[-1][1]
        mask = F.dropout(input.new_ones(()).expand(shape).contiguous(), self.p)
        start, stop = along[axis.rank]
        return input * mask.narrow(self.dim, start, stop - start)


def why_not(layer: nn.Module, plain: type[nn.Module]) -> str | None:
    """Why a layer's product would not be ours though it is a `plain` one; None where it is. Local.

    A cut subclass comes after the user's class and before the plain one: a forward that does not call
    `super().forward` never arrives there, and would multiply with a part of the weight as if it were all of it.
    """
    for name in ("weight", "bias"):
        if layer._parameters.get(name) is None and getattr(layer, name, None) is not None:
            return f"its {name} is computed, of other parameters: it is none that can be cut"
    owners = [each for each in type(layer).__mro__ if issubclass(each, plain) and each is not plain]
    found = [vars(each)["forward"] for each in owners if "forward" in vars(each)]
    if "forward" not in vars(layer) and all("super" in _names_in(forward) for forward in found):
        return None
    return "it has a forward of its own, which does not call `super().forward`"


def _names_in(function: Any) -> tuple[str, ...]:
    """Global names that a function uses."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_names


def check_range(tokens: Tensor, size: int) -> None:
    """Token numbers from 0 to `size - 1`: a number that no rank has would be zeros everywhere, without a word. Local.

    Raises:
        IndexError: as torch's embedding.
    """
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = torch.aminmax(tokens)
        if low < 0 or high >= size:
            raise IndexError(f"index out of range: token numbers from {int(low)} to {int(high)}, of {size} tokens")
