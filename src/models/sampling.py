# SPDX-License-Identifier: Apache-2.0
"""Text out of any causal language model, token after token, without a cache: simple, and good for short samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stratagem.errors import ConfigError


def logits_of(output: Any) -> Tensor:
    """The logits of a model's output: the tensor itself, or the `.logits` of the objects that Transformers return."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_BT: Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    max_context: int | None = None,
) -> Tensor:
    """Samples `num_tokens` tokens after a prompt.

    Where the model's forward is collective, every rank has to call this, with equal arguments and equal generators.

    Args:
        model: gives logits [B, T, V], or an object with such `.logits`, for token numbers [B, T].
        prompt_BT: int64 [B, T], at least one token.
        num_tokens: how many to add.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: sample among the k likeliest only.
        generator: on the CPU; None for torch's own.
        max_context: the model sees the last so many tokens.

    Returns:
        int64 [B, T + num_tokens].
    """
    if prompt_BT.ndim != 2 or prompt_BT.shape[1] < 1:
        raise ConfigError(f"a prompt of shape {tuple(prompt_BT.shape)}", where="prompt", allowed="[B, T] with T >= 1")
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ConfigError(f"temperature {temperature}, top_k {top_k}", where="sampling", allowed="0 or more, 1 or more")
    was_training = model.training
    model.eval()
    try:
        tokens_BT = prompt_BT
        for _ in range(num_tokens):
            context_BT = tokens_BT if max_context is None else tokens_BT[:, -max_context:]
            last_BV = logits_of(model(context_BT))[:, -1].float()
            tokens_BT = torch.cat((tokens_BT, _pick(last_BV, temperature, top_k, generator)), dim=1)
        return tokens_BT
    finally:
        model.train(was_training)


def _pick(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        kth_B1 = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, float("-inf"))
    # Drawn on the CPU: the same tokens on every device, and from a generator that every rank can seed alike.
    picked = torch.multinomial((logits_BV / temperature).softmax(dim=-1).cpu(), 1, generator=generator)
    return picked.to(logits_BV.device)
