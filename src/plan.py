# SPDX-License-Identifier: Apache-2.0
"""A plan: where a model may be cut, as data, in the words of Hugging Face Transformers.

A module says it in class or instance attributes, and so a Transformers model brings its plan with it:

    _tp_plan   {"blocks.*.attention.q": "colwise", ...}              tensor parallelism: a style per layer
    _ep_plan   {"blocks.*.experts": "grouped_gemm", ...}             expert parallelism: a style per layer
    _pp_plan   {"blocks": (["hidden_states"], ["hidden_states"])}    pipeline: what enters and leaves each part

Names are relative to the module that carries the attribute; `*` stands for one number or name. A config may add to a
plan or override parts of it. Nothing here cuts anything: the techniques read plans.

Example:
    >>> from torch import nn
    >>> class Inner(nn.Module):
    ...     _tp_plan = {"up": "colwise", "down": "rowwise"}
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
    >>> plan = Plan.read(nn.Sequential(Inner(), Inner()))
    >>> plan.tensor["1.down"], plan.style_of("0.up")
    ('rowwise', 'colwise')
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

from stratagem.errors import PlanError

Flow = tuple[tuple[str, ...], tuple[str, ...]]
"""Names of what enters and what leaves one part of a pipeline."""


@final
@dataclass(frozen=True)
class Plan:
    """Where one module may be cut; names are relative to that module.

    Args:
        tensor: style by layer pattern, for tensor parallelism.
        expert: style by layer pattern, for expert parallelism.
        pipeline: parts in order of execution, with what enters and leaves each.
    """

    tensor: Mapping[str, str] = field(default_factory=dict)
    expert: Mapping[str, str] = field(default_factory=dict)
    pipeline: Mapping[str, Flow] = field(default_factory=dict)

    @classmethod
    def read(cls, module: nn.Module) -> Plan:
        """The plan that a module and its submodules carry; an outer module's word on a name overrides an inner one's.

        Raises:
            PlanError: an attribute that is no mapping.
        """
        plan = cls()
        for prefix, part in reversed(list(module.named_modules())):
            carried = {key: _carried(part, key, prefix) for key in ("_tp_plan", "_ep_plan", "_pp_plan")}
            if any(carried.values()):
                flows = {name: _flow(name, flow) for name, flow in carried["_pp_plan"].items()}
                plan = plan.overridden_by(cls(carried["_tp_plan"], carried["_ep_plan"], flows))
        return plan

    def overridden_by(self, other: Plan) -> Plan:
        """This plan with another's entries added, which win where both name the same layers."""
        return Plan(
            {**self.tensor, **other.tensor}, {**self.expert, **other.expert}, {**self.pipeline, **other.pipeline}
        )

    def style_of(self, name: str) -> str | None:
        """The tensor-parallel style for a module or parameter name: exact entries first, then patterns in order."""
        if name in self.tensor:
            return self.tensor[name]
        return next((style for pattern, style in self.tensor.items() if matches(pattern, name)), None)


def matches(pattern: str, name: str) -> bool:
    """Whether a plan's pattern names this module: `*` stands for exactly one part between dots.

    Example:
        >>> matches("layers.*.q_proj", "layers.11.q_proj"), matches("layers.*", "layers.1.q_proj")
        (True, False)
    """
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _carried(part: nn.Module, key: str, prefix: str) -> dict[str, Any]:
    plan = getattr(part, key, None) or {}
    if not isinstance(plan, Mapping):
        raise PlanError(f"{key} is {plan!r}", where=prefix or type(part).__name__, allowed="a mapping of names")
    return {f"{prefix}.{name}" if prefix else name: value for name, value in plan.items()}


def _flow(name: str, flow: Sequence[Sequence[str]]) -> Flow:
    if len(flow) != 2:
        raise PlanError(f"{flow!r} for {name!r}", where="_pp_plan", allowed="a pair: what enters, what leaves")
    return tuple(flow[0]), tuple(flow[1])
