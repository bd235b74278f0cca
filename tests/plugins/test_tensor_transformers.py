# SPDX-License-Identifier: Apache-2.0
"""Models of Transformers, built small from their config classes and cut by the plans that they bring.

They compute norms and rotary angles in float32 whatever the precision. Cut, they round numbers that differ from those
of one process in the last bits of float64, so nearly always to the same float32; where a number lies between two, the
results differ by a rounding of float32. Their own loss is float32 altogether.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stratagem.models.hub import transformers_lm
from tests.plugins import tensor_cases as cases

_SIZES: dict[str, Any] = {
    "vocab_size": cases.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_KV = {name: value for name, value in _SIZES.items() if name != "num_key_value_heads"}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaConfig": _SIZES,
    "MistralConfig": {**_SIZES, "sliding_window": 4},
    "Qwen2Config": {**_SIZES, "tie_word_embeddings": True},
    "Qwen3Config": {**_SIZES, "head_dim": 8},
    "GemmaConfig": {**_SIZES, "head_dim": 16},
    "Gemma2Config": {**_SIZES, "head_dim": 8, "query_pre_attn_scalar": 8},
    "GPTNeoXConfig": {**_NO_KV, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "Phi3Config": {**_SIZES, "tie_word_embeddings": False},
    "Olmo2Config": _SIZES,
    "CohereConfig": {**_SIZES, "head_dim": 8},
    "Qwen3MoeConfig": {
        **_SIZES,
        "head_dim": 8,
        "moe_intermediate_size": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
    "MixtralConfig": {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = transformers_lm(name, ARCHITECTURES[name], seed=3)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.add_(noise, alpha=0.1)  # biases and norms are not what they are initialised to
    model.config._experts_implementation = "eager"  # the others have no float64
    return model.double()


def _own_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The model's own, which shifts the labels itself."""
    loss: Tensor = model(input_ids=inputs, labels=inputs).loss
    return loss


def _check(name: str, tp: int) -> dict[str, float]:
    def make() -> nn.Module:
        return _model(name)

    losses: dict[str, Callable[[nn.Module, Tensor, Tensor], Tensor]] = {"ours": cases.loss_of, "own": _own_loss}
    found = {}
    for kind, loss in losses.items():
        expected = cases.train(make, loss=loss)
        found[kind] = cases.distance(cases.train(make, cases.context(tp), loss=loss), expected)
    return found


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_of_transformers_is_that_of_one_process(name: str) -> None:
    """With a loss of the user's and with its own."""
    pytest.importorskip("transformers", reason="an extra")
    found = _check(name, -1)
    assert max(found.values()) <= 1e-6, found


@pytest.mark.exhaustive
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_of_transformers_with_fewer_key_heads_than_ranks(name: str) -> None:
    """Two ranks need the same key head."""
    pytest.importorskip("transformers", reason="an extra")
    found = _check(name, -1)
    assert max(found.values()) <= 1e-6, found
