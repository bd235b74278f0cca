# SPDX-License-Identifier: Apache-2.0
"""Modules and one training loop that the tests of tensor parallelism share; the loop knows no technique."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.boxes import Boxed
from stratagem.mesh import MeshShape
from stratagem.models.gpt import GPT, GPTConfig
from stratagem.placement import clip_by_norm, global_norm
from stratagem.plugins.ring_ddp import RingDDP
from stratagem.plugins.tensor import TensorParallel, TensorSettings
from stratagem.technique import Context

STEPS, CLIP, VOCAB = 3, 0.1, 29
GLOBAL_BATCH, LENGTH = 4, 7
WHOLE_SEQUENCES = TensorSettings(sequence_parallel="off")


def context(tp: int = -1, **options: object) -> Context:
    """Ranks of the gang in rows of `tp`, or in one."""
    size = dist.get_world_size()
    shape = MeshShape.fit(size, fill="tp") if tp == -1 else MeshShape.fit(size, tp=tp)
    return Context(shape, dist.get_rank(), torch.device("cpu"), timeout=timedelta(seconds=20), **options)


def gpt(*, tied: bool = True, kv_heads: int = 2, dropout: float = 0.0, heads: int = 4, **options: object) -> nn.Module:
    """A GPT whose vocabulary no number of ranks divides; the same on every rank, in float64."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=VOCAB,
        num_layers=2,
        hidden_size=8 * heads,
        num_heads=heads,
        num_kv_heads=kv_heads,
        ffn_size=24,
        max_seq_len=16,
        tie_embeddings=tied,
        dropout=dropout,
        **options,
    )
    model = GPT(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise, alpha=0.1)  # no two alike, and no gradient near 0
    return model.double()


def tokens(step: int, share: tuple[int, int] = (0, 1)) -> tuple[Tensor, Tensor]:
    """Token numbers and labels `[B, T]` of a data rank, out of `(number, count)`."""
    walk = torch.randint(0, VOCAB, (GLOBAL_BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(100 + step))
    rank, size = share
    rows = walk[rank * GLOBAL_BATCH // size : (rank + 1) * GLOBAL_BATCH // size]
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """As any training step writes it."""
    output = model(inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass
class Outcome:
    """What a run did: losses, norms before clipping, and the whole state at the end."""

    losses: list[float]
    norms: list[float]
    state: dict[str, Tensor]


def train(
    make: Callable[[], nn.Module],
    here: Context | None = None,
    settings: TensorSettings = TensorSettings(),  # noqa: B008  # frozen
    *,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = loss_of,
    steps: int = STEPS,
) -> Outcome:
    """SGD with momentum, weight decay and clipping; without `here` one process on the whole batch."""
    model = make()
    technique, data = TensorParallel(settings), Boxed(RingDDP(), "tp")
    share = (0, 1)
    if here is not None:
        technique.apply(model, here)
        data.apply(model, here)
        share = here.shape.data_rank(here.rank), here.shape.data_size
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)
    if here is not None:
        data.attach([optimizer])
    torch.manual_seed(7)
    found = Outcome([], [], {})
    for step in range(steps):
        value = loss(model, *tokens(step, share))
        value.backward()
        mean = value.detach().clone()
        if here is None:
            found.norms.append(float(nn.utils.clip_grad_norm_(parameters, CLIP)))
        else:
            data.finish()
            here.reduce(mean, ("dp_replicate",), "mean")
            parts = data.norm_parts(parameters)
            norm = global_norm(parts, here.reduce)
            clip_by_norm([gradient for _, gradient in parts], norm, CLIP)
            found.norms.append(float(norm))
        found.losses.append(float(mean))
        optimizer.step()
        optimizer.zero_grad()
    if here is not None:
        data.close()
        technique.close()
    found.state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if here is not None:
        here.close()
    return found


def distance(found: Outcome, expected: Outcome) -> float:
    """The largest relative difference of anything."""
    worst = 0.0
    for mine, theirs in ((found.losses, expected.losses), (found.norms, expected.norms)):
        worst = max([worst, *(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))])
    for name, value in expected.state.items():
        worst = max(worst, float((found.state[name] - value).abs().max() / value.abs().max()))
    assert min(expected.norms) > CLIP, "clipping that never happens checks nothing"
    return worst
