# SPDX-License-Identifier: Apache-2.0
"""Every implementation of tensor parallelism that is known to be wrong, planted once: the checks must see it.

Each is a function that spoils the right one, for one run; what is seen is the distance to one process, or the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.boxes import Boxed
from stratagem.placement import Placement
from stratagem.plugins.tensor import TensorParallel, TensorSettings, axis, cross_entropy, cuts, heads, layers, sharded
from stratagem.plugins.tensor.functions import reduce_from, scatter_sum
from stratagem.technique import Context
from tests.plugins import tensor_cases as cases

Patch = pytest.MonkeyPatch


class Biased(nn.Module):
    """A residual feed-forward with biases, between an embedding and a head of 29 tokens."""

    _tp_plan: ClassVar[dict[str, str]] = {
        "embed": "embedding_rowwise",
        "up": "colwise",
        "down": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(cases.VOCAB, 8), nn.Linear(8, cases.VOCAB)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        logits: Tensor = self.head(x + self.down(F.relu_(self.up(x))))
        return logits


def biased() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Biased().double()


def dropping() -> nn.Module:
    """A GPT with dropout."""
    return cases.gpt(dropout=0.3)


# -- what is planted -----------------------------------------------------------------------------------------------


def row_bias_on_every_rank(patch: Patch) -> None:
    right = axis._RowProduct.forward

    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, here: Any, dtype: Any) -> Tensor:
        out = right(ctx, x, weight, bias, here, dtype)
        return out if bias is None else out.add_(bias, alpha=here.size - 1)

    patch.setattr(axis._RowProduct, "forward", staticmethod(forward))


def norms_not_summed(patch: Patch) -> None:
    patch.setattr(TensorParallel, "_sum_gradient", lambda self, parameter: None)


def masks_of_each_ranks_own(patch: Patch) -> None:
    patch.setattr(layers.CutDropout, "forward", nn.Dropout.forward)


def shards_drawn_anew(patch: Patch) -> None:
    right = TensorParallel._place

    def place(self: TensorParallel, dims: Any) -> None:
        right(self, dims)
        for layer in self._layers:
            if isinstance(layer, layers.ColumnLinear):
                layer.weight.data.mul_(self._comm.size**0.5)

    patch.setattr(TensorParallel, "_place", place)


def key_heads_dealt_out_in_turn(patch: Patch) -> None:
    def keys(queries: int, count: int, head: int, parts: int, where: str, *, uneven: bool) -> heads.ColumnCut:
        return heads.ColumnCut(tuple((r % count * head, (r % count + 1) * head) for r in range(parts)), shared=True)

    patch.setattr(heads, "_keys", keys)


def whole_parameters_in_the_norm_twice(patch: Patch) -> None:
    right = Boxed.norm_parts

    def parts(self: Boxed, tensors: Iterable[Tensor]) -> list[tuple[Placement, Tensor]]:
        return [(replace(place, shard_axes=("tp",)), gradient) for place, gradient in right(self, tensors)]

    patch.setattr(Boxed, "norm_parts", parts)


def tokens_of_others_are_row_0(patch: Patch) -> None:
    def forward(self: layers.VocabEmbedding, tokens: Tensor) -> Tensor:
        here, (start, stop) = self.tensor_axis, self.spans[self.tensor_axis.rank]
        out = F.embedding((tokens - start).masked_fill((tokens < start) | (tokens >= stop), 0), self.weight)
        return scatter_sum(out, here.comm, 1, here.cut_sequence(out)) if here.sequence else reduce_from(out, here.comm)

    patch.setattr(layers.VocabEmbedding, "forward", forward)


def rest_of_the_vocabulary_dropped(patch: Patch) -> None:
    def even(size: int, parts: int, unit: int, where: str, **_: Any) -> tuple[tuple[int, int], ...]:
        each = size // unit // parts * unit
        return tuple((r * each, (r + 1) * each) for r in range(parts))

    patch.setattr(cuts, "even", even)


def rows_of_the_wrong_ranks(patch: Patch) -> None:
    right = Context.communicator

    def communicator(self: Context, *axes: str, **options: Any) -> Any:
        swapped = {"tp": "dp_replicate", "dp_replicate": "tp"}
        return right(self, *(swapped.get(name, name) for name in axes), **options)

    patch.setattr(Context, "communicator", communicator)


def loss_over_t(patch: Patch) -> None:
    right = cross_entropy.vocab_cross_entropy
    patch.setattr(sharded, "vocab_cross_entropy", lambda z, y, comm, *a, **k: right(z, y, comm, *a, **k) / comm.size)


def inputs_not_reduced(patch: Patch) -> None:
    patch.setattr(axis.Entry, "take", lambda self: self._total)


def targets_of_others_counted(patch: Patch) -> None:
    right = cross_entropy._CrossEntropy.forward

    def forward(ctx: Any, logits: Tensor, targets: Tensor, weights: Any, comm: Any, span: Any, *rest: Any) -> Tensor:
        return right(ctx, logits, targets.clamp(span[0], span[1] - 1), weights, comm, span, *rest)

    patch.setattr(cross_entropy._CrossEntropy, "forward", staticmethod(forward))


WRONG: list[tuple[Callable[[Patch], None], Callable[[], nn.Module], int]] = [
    (row_bias_on_every_rank, biased, 2),
    (norms_not_summed, cases.gpt, 2),
    (masks_of_each_ranks_own, dropping, -1),
    (shards_drawn_anew, cases.gpt, 2),
    (key_heads_dealt_out_in_turn, cases.gpt, -1),
    (whole_parameters_in_the_norm_twice, cases.gpt, 2),
    (tokens_of_others_are_row_0, cases.gpt, 2),
    (rest_of_the_vocabulary_dropped, biased, 2),
    (rows_of_the_wrong_ranks, cases.gpt, 2),
    (loss_over_t, cases.gpt, 2),
    (inputs_not_reduced, biased, 2),
    (targets_of_others_counted, biased, 2),
]
"""What is planted, in which model, and how long the rows of 4 ranks are."""


@pytest.mark.slow
@pytest.mark.ranks(4)
def test_wrong_implementations_are_seen() -> None:
    """Unspoilt, every one of these runs is that of one process; spoilt, it is far from it, or ends with an error."""
    expected = {make: cases.train(make) for make in (biased, cases.gpt, dropping)}
    for make, tp in dict.fromkeys((make, tp) for _, make, tp in WRONG):
        assert cases.distance(cases.train(make, cases.context(tp)), expected[make]) <= 1e-10, make
    for spoil, make, tp in WRONG:
        with pytest.MonkeyPatch.context() as patch:
            spoil(patch)
            try:
                found = cases.train(make, cases.context(tp))
                distance = cases.distance(found, expected[make])
            except (RuntimeError, IndexError, KeyError, AssertionError):
                continue
            assert distance > 1e-6, f"{spoil.__name__} is not seen: {distance}"


def _bytes(settings: TensorSettings) -> int:
    here, model = cases.context(), cases.gpt()
    TensorParallel(settings).apply(model, here)
    before = here.traffic.total().num_bytes
    cases.loss_of(model, *cases.tokens(0)).backward()
    sent = here.traffic.total().num_bytes - before
    here.close()
    return sent


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_wasteful_implementations_are_seen() -> None:
    """Right results at the price of more bytes: outputs put together after every column layer, gathered logits."""
    thrifty = _bytes(cases.WHOLE_SEQUENCES)
    names = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "ffn.gate_proj", "ffn.up_proj")
    gathered = {f"blocks.*.{name}": "colwise_rep" for name in names}
    gathered |= {"blocks.*.attention.o_proj": "rowwise_rep", "blocks.*.ffn.down_proj": "rowwise_rep"}
    assert _bytes(replace(cases.WHOLE_SEQUENCES, plan=gathered)) > 1.5 * thrifty
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sharded._HANDLERS, "cross_entropy")
        places = cases.GLOBAL_BATCH * cases.LENGTH
        more = _bytes(cases.WHOLE_SEQUENCES) - thrifty
        assert more >= places * 8 * (cases.VOCAB // 2 - 3)
