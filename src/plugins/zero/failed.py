# SPDX-License-Identifier: Apache-2.0
"""What a backward that ended in an error has left, and how the next one starts without it.

Autograd forgets what it was to call at a backward's end when that ends in an error. That is how the next one notices:
nobody holds the callback any more. What the failed one left is dropped, if it can be told from the rest. What it has
added to gradients of earlier passes cannot be taken out again, and in a plain loop a gradient may have been added to
what it left before anybody could look; then the caller is told to clear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import final
from weakref import ref

from torch import Tensor
from torch.autograd import Variable

from stratagem.plugins.zero.bucket import Bucket


@final
class AtEnd:
    """A call at the end of the backward that runs, and whether that backward still does."""

    def __init__(self) -> None:
        self._call: ref[Callable[[], None]] | None = None

    @property
    def is_asked_for(self) -> bool:
        """Whether a call was asked for and not yet taken back."""
        return self._call is not None

    @property
    def has_failed(self) -> bool:
        """Whether the backward that was to call has ended without it."""
        return self._call is not None and self._call() is None

    def ask_for(self, function: Callable[[], None]) -> None:
        """Has `function` called at the end of the backward that runs now; within a backward only."""
        call = partial(function)  # that autograd alone holds
        self._call = ref(call)
        Variable._execution_engine.queue_callback(call)

    def forget(self) -> None:
        """The call has come, or is of no interest any more."""
        self._call = None


def drop_leftovers(buckets: Sequence[Bucket], arriving: Tensor | None) -> None:
    """Drops the module's gradients that a failed backward left. Local; nothing is on its way any more.

    Args:
        buckets: all of them.
        arriving: the parameter whose gradient the next backward has just completed, if it runs already; that one stays.

    Raises:
        RuntimeError: what was left cannot be told from other gradients, and these are not cleared yet.
    """
    fresh, in_window = arriving, any(any(bucket.due) for bucket in buckets)
    for bucket in buckets:
        for index, view in enumerate(bucket.gradient_views if bucket.dirty else []):
            parameter = bucket.parameters[index]
            if parameter is arriving and parameter.grad is view:
                fresh = None  # added to what was left
    parameters = [p for bucket in buckets for p in bucket.parameters if p is not fresh]
    is_mixed = fresh is not arriving or (in_window and any(p.grad is not None for p in parameters))
    if is_mixed or any(bucket.holds_gradients() for bucket in buckets):
        raise RuntimeError(
            "an earlier backward failed, and what it left is mixed with gradients of other passes. Call zero_grad() of "
            "every optimizer (with set_to_none=True), on every rank, before the next backward."
        )
    for parameter in parameters:
        parameter.grad = None
    for bucket in buckets:
        bucket.dirty, bucket.kept = False, None
        bucket.due = [False] * len(bucket.parameters)
