# SPDX-License-Identifier: Apache-2.0
"""What can be chosen about tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stratagem.errors import ConfigError

STYLES = (
    "colwise",
    "colwise_gather_output",
    "colwise_rep",
    "rowwise",
    "rowwise_split_input",
    "rowwise_rep",
    "embedding_rowwise",
    "embedding_colwise",
    "packed_colwise",
    "moe_tp_experts",
    "sequence_parallel",
    "replicated_with_grad_allreduce",
    "replicate",
)
"""Every style that a plan may name, in the words of Transformers."""


@dataclass(frozen=True)  # not @final: jsonargparse takes no default value of a final class
class TensorSettings:
    """How a model is cut.

    Args:
        plan: styles by layer pattern, over those that the model carries in `_tp_plan`. `replicate` takes a layer out.
            Allowed: `colwise`, `colwise_gather_output` (or `colwise_rep`), `rowwise`, `rowwise_split_input` (or
            `rowwise_rep`), `embedding_rowwise`, `embedding_colwise`, `packed_colwise` (a fused `[gate; up]`),
            `moe_tp_experts`, `sequence_parallel` (norms and dropout of the residual stream),
            `replicated_with_grad_allreduce`, `replicate`.
        sequence_parallel: cut what is between the blocks along the sequence. `auto`: where the plan names layers
            `sequence_parallel`, as `stratagem.models.GPT` does; `on` refuses a plan that does not; `off`.
        uneven: allow sizes that the ranks do not divide; the first ranks get one head, or feature, more. Vocabularies
            and layers whose output is put together may always be uneven.
        without_plan: of a model without a plan, `infer`: cut every linear layer and embedding that is cut rightly
            whatever stands around it, and say which; `refuse`.
        overlap: reduce large gradients of activations while the gradient of the weight is computed.
    """

    plan: Mapping[str, str] = field(default_factory=dict)
    sequence_parallel: Literal["auto", "on", "off"] = "auto"
    uneven: bool = False
    without_plan: Literal["infer", "refuse"] = "infer"
    overlap: bool = True

    def __post_init__(self) -> None:
        for pattern, style in self.plan.items():
            if style not in STYLES:
                raise ConfigError(
                    f"{pattern!r} has the style {style!r}", where="tensor.plan", allowed=", ".join(STYLES)
                )
