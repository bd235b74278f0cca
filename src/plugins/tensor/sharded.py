# SPDX-License-Identifier: Apache-2.0
"""A tensor of which every rank has a slice, and that behaves like the whole one: logits that are never put together.

To the user's code it has the whole shape. What the code does with it decides what is sent:

    F.cross_entropy, nn.CrossEntropyLoss        three numbers per place (`cross_entropy`)
    view, reshape, flatten, transpose, float,   nothing: the result is cut, too
      contiguous, detach, times 2.0, tanh,
      indexing of the other dims, ...
    everything else: argmax, softmax, max,      all of it, once (`(t-1)/t` of its bytes); the result is an ordinary
      torchmetrics, printing, pickling          tensor, equal on every rank, whose gradient comes back cut

Every rank of the axis must do the same with it, as with everything collective: a `print` on rank 0 alone would wait for
the others for ever.

Note [views]: what is written through a view is written. A view that is cut is one of `local`, whose memory an operation
in place writes to. For one that is not, a class's logits, the whole is put together and kept, with the wrapper, and the
view is one of that; if its version has changed when the wrapper is used next, this rank's slice of it is taken over.

Note [a wrapper]: it holds no memory but `local`. All that torch offers arrives at `__torch_function__` first, where
the wrapper is replaced, so autograd sees `local` and what was put together of it. What does not pass there, a user's
own autograd function, sees the wrapper, which is in the graph for its sake, and what it computes puts it together below
autograd (`__torch_dispatch__`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map
from typing_extensions import override

from stratagem.collectives import Communicator
from stratagem.plugins.tensor.cross_entropy import LossSettings, vocab_cross_entropy
from stratagem.plugins.tensor.functions import Span, gather_from, scatter_to

Handler = Callable[..., Any]


@final
class ShardedTensor(torch.Tensor):
    """See the module. Make it with `of`.

    Attributes:
        local: this rank's slice, with its place in autograd's graph.
        comm: of the axis.
        spans: every rank's span of the dim that is cut.
        dim_cut: which it is, from 0.
    """

    local: Tensor
    comm: Communicator
    spans: tuple[Span, ...]
    dim_cut: int
    kept: tuple[Tensor, int] | None = None
    """See Note [views]: all of it, and its version when `local` was last like it."""

    @classmethod
    def of(cls, local: Tensor, comm: Communicator, spans: Sequence[Span], dim: int = -1) -> ShardedTensor:
        """The whole of which `local` is this rank's slice along `dim`. Local."""
        dim = dim % local.dim()
        shape = list(local.shape)
        shape[dim] = spans[-1][1]
        found: ShardedTensor = _Wrap.apply(local, tuple(shape), spans[comm.rank], dim)
        found.local, found.comm, found.spans, found.dim_cut = local, comm, tuple(spans), dim
        return found

    def like(self, local: Tensor, dim: int | None = None) -> ShardedTensor:
        """Another one that is cut alike. Local."""
        return ShardedTensor.of(local, self.comm, self.spans, self.dim_cut if dim is None else dim)

    def whole(self) -> Tensor:
        """All of it, an ordinary tensor. Every rank of the axis calls it; sends `(t-1)/t` of its bytes."""
        return gather_from(self.local, self.comm, self.dim_cut, self.spans)

    def written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ShardedTensor:
        """After an operation in place, which sees all of it. Collective: it is put together and cut again."""
        whole = self.whole() if self.kept is None else self.kept[0]
        args, kwargs = tree_map(whole_of, (tuple(args), dict(kwargs)))
        func(whole, *args, **kwargs)
        self._take(whole)
        return self

    def _take(self, whole: Tensor) -> None:
        self.local.copy_(scatter_to(whole, self.comm, self.dim_cut, self.spans))
        self.kept = None if self.kept is None else (whole, whole._version)

    def viewed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A view that is not cut: see Note [views]. Collective: it is put together."""
        if self.kept is None or self.kept[0].requires_grad != self.local.requires_grad:
            with torch.set_grad_enabled(True):
                whole = self.whole()
            self.kept = whole, whole._version
        args, kwargs = tree_map(whole_of, (tuple(args), dict(kwargs)))
        return func(self.kept[0], *args, **kwargs)

    def refresh(self) -> None:
        """Takes over what was written through a view. Local."""
        if self.kept is not None and self.kept[0]._version != self.kept[1]:
            self._take(self.kept[0])

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Keeps it cut where the operation allows, puts it together where not."""
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FACTS:
                return func(*args, **kwargs)
            if getattr(func, "__name__", "") in _REFUSED or isinstance(kwargs.get("out"), ShardedTensor):
                raise NotImplementedError(
                    "logits are cut by tensor parallelism, of every rank is a slice; this would not reach them: "
                    "replicate their layer in tensor.plan"
                )
            tree_map(_refreshed, (tuple(args), dict(kwargs)))
            handler = _same if func in _DATA else _HANDLERS.get(getattr(func, "__name__", ""))
            first = args[0] if args else kwargs.get("input")
            if handler is not None and isinstance(first, ShardedTensor):
                found = NotImplemented
                with contextlib.suppress(_NotCut):
                    found = handler(func, *args, **kwargs)
                if found is not NotImplemented:
                    return found
            if isinstance(first, ShardedTensor) and _writes(func):
                return first.written(func, args[1:], kwargs)
            if isinstance(first, ShardedTensor) and args and getattr(func, "__name__", "") in _VIEWS:
                return first.viewed(func, args[1:], kwargs)
            args, kwargs = tree_map(whole_of, (tuple(args), dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub leaves `func` out
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What went past `__torch_function__`, where gradients would be lost."""
        if func.__name__.startswith(("detach", "alias")):
            return args[0].like(args[0].local.detach())
        args, kwargs = tree_map(whole_of, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


class _Wrap(Function):
    """From a slice to the wrapper; back, of the gradient of the whole, the slice. Local."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shape: tuple[int, ...], span: Span, dim: int) -> Tensor:
        ctx.place = dim, span[0], span[1] - span[0]
        return torch.Tensor._make_wrapper_subclass(ShardedTensor, shape, dtype=local.dtype, device=local.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.narrow(*ctx.place), None, None, None


class _NotCut(Exception):
    """The result would not be cut along the same dim."""


def _writes(func: Any) -> bool:
    """Whether an operation changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    )


def _refreshed(value: Any) -> Any:
    if isinstance(value, ShardedTensor):
        value.refresh()
    return value


def whole_of(value: Any) -> Any:
    """A tensor that is cut, put together; anything else as it is."""
    return value.whole() if isinstance(value, ShardedTensor) else value


_FACTS = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
}
"""What the wrapper answers by itself."""


def _same(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Element by element, without another tensor: `float`, `tanh`, `clone`."""
    if any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
        raise _NotCut
    if func in _DATA:
        func = Tensor.detach
    return x.like(func(x.local, *args, **kwargs))


def _scalar(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    """Element by element with a number, or with another one that is cut alike."""
    if len(args) != 1 or kwargs:
        raise _NotCut
    (other,) = args
    if isinstance(other, ShardedTensor):
        if (other.dim_cut, other.shape, other.spans) != (x.dim_cut, x.shape, x.spans):
            raise _NotCut
        return x.like(func(x.local, other.local))
    if isinstance(other, Tensor) and (other.dim() or other.requires_grad):
        raise _NotCut
    return x.like(func(x.local, other))


def _to(func: Any, x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(value, Tensor) for value in args):
        raise _NotCut
    local = x.local.to(*args, **kwargs)
    if local.device != x.local.device:
        raise _NotCut
    return x.like(local)


def _reshape(func: Any, x: ShardedTensor, *shape: Any, **kwargs: Any) -> Any:
    """To any shape that keeps the cut dim as the last one."""
    sizes = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size) else list(shape)
    whole = x.shape[-1]
    if kwargs or not sizes or x.dim_cut != x.ndim - 1 or not all(isinstance(size, int) for size in sizes):
        raise _NotCut
    if sizes[-1] == -1:
        known = 1
        for size in sizes[:-1]:
            known *= size
        sizes[-1] = x.numel() // known if known > 0 else 0
    if sizes[-1] != whole:
        raise _NotCut
    return x.like(x.local.reshape(*sizes[:-1], x.local.shape[-1]), len(sizes) - 1)


def _flatten(func: Any, x: ShardedTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    start, end = start_dim % x.ndim, end_dim % x.ndim
    if start <= x.dim_cut <= end and start != end:
        raise _NotCut
    local = x.local.flatten(start, end)
    return x.like(local, x.dim_cut - (end - start) if end < x.dim_cut else x.dim_cut)


def _transpose(func: Any, x: ShardedTensor, dim0: int, dim1: int) -> Any:
    first, second = dim0 % x.ndim, dim1 % x.ndim
    moved = {first: second, second: first}.get(x.dim_cut, x.dim_cut)
    return x.like(x.local.transpose(first, second), moved)


def _permute(func: Any, x: ShardedTensor, *dims: Any) -> Any:
    order = list(dims[0]) if len(dims) == 1 and isinstance(dims[0], tuple | list) else list(dims)
    order = [dim % x.ndim for dim in order]
    return x.like(x.local.permute(order), order.index(x.dim_cut))


def _unsqueeze(func: Any, x: ShardedTensor, dim: int) -> Any:
    place = dim % (x.ndim + 1)
    return x.like(x.local.unsqueeze(place), x.dim_cut + (place <= x.dim_cut))


def _getitem(func: Any, x: ShardedTensor, index: Any) -> Any:
    """Indexing that leaves the cut dim, the last one, alone."""
    items = index if isinstance(index, tuple) else (index,)
    if x.dim_cut != x.ndim - 1 or any(isinstance(item, ShardedTensor) for item in items):
        raise _NotCut
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        place = next(n for n, item in enumerate(items) if item is Ellipsis)
        after = items[place + 1 :]
        if after and not _is_all(after[-1]):
            raise _NotCut
        return x.like(x.local[index], -1)
    taken = sum(map(_consumed, items))
    if taken > x.ndim or (taken == x.ndim and not _is_all(items[-1])):
        raise _NotCut
    return x.like(x.local[index], -1)


def _consumed(item: Any) -> int:
    """Dims that an entry of an index stands for."""
    if item is None or isinstance(item, bool):
        return 0
    return item.dim() if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _is_all(item: Any) -> bool:
    return isinstance(item, slice) and item == slice(None)


def _cross_entropy(
    func: Any,
    x: ShardedTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    classes = 0 if x.ndim == 1 else 1
    given = x.shape[:classes] + x.shape[classes + 1 :]
    if (
        x.dim_cut != classes
        or target.is_floating_point()
        or target.shape != given
        or size_average is not None
        or reduce is not None
        or reduction not in ("none", "mean", "sum")
        or (weight is not None and weight.requires_grad)
    ):
        raise _NotCut  # torch says what is wrong, or computes what we do not
    settings = LossSettings(ignore_index, label_smoothing, reduction)
    logits = x.local.movedim(classes, -1)
    return vocab_cross_entropy(logits, target, x.comm, x.spans, weights=weight, settings=settings)


_DATA = {Tensor.data.__get__}  # type: ignore[attr-defined]
_REFUSED = {"retain_grad", "register_hook", "register_post_accumulate_grad_hook"}
"""What an operation would do with a tensor that is put together for it, and forgotten."""
_VIEWS = {
    *("__getitem__", "select", "narrow", "unbind", "split", "chunk", "tensor_split", "diagonal", "unfold", "squeeze"),
    *("view", "reshape", "flatten", "transpose", "permute", "unsqueeze", "movedim", "moveaxis", "swapaxes", "swapdims"),
    *("t", "ravel", "unflatten", "view_as", "reshape_as", "expand", "expand_as", "hsplit", "vsplit", "dsplit"),
    *("as_strided", "__iter__"),
}

_HANDLERS: dict[str, Handler] = {
    F.cross_entropy.__name__: _cross_entropy,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "transpose": _transpose,
    "swapaxes": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "__getitem__": _getitem,
    "to": _to,
    "mul": _scalar,
    "__mul__": _scalar,
    "__rmul__": _scalar,
    "multiply": _scalar,
    "div": _scalar,
    "true_divide": _scalar,
    "__truediv__": _scalar,
    "add": _scalar,
    "__add__": _scalar,
    "__radd__": _scalar,
    "sub": _scalar,
    "__sub__": _scalar,
    **dict.fromkeys(
        ("float", "double", "half", "bfloat16", "contiguous", "clone", "detach", "tanh", "sigmoid", "neg", "__neg__"),
        _same,
    ),
}
"""By the name of the operation, what it is on a tensor that is cut."""
