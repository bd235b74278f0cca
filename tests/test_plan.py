# SPDX-License-Identifier: Apache-2.0
"""Plans are read from modules as Transformers writes them."""

from __future__ import annotations

import pytest
from torch import nn

from stratagem.errors import PlanError
from stratagem.plan import Plan, matches


class Inner(nn.Module):
    _tp_plan = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)


class Outer(nn.Module):
    _tp_plan = {"layers.0.up": "packed_colwise"}
    _pp_plan = {"layers": (["hidden_states"], ["hidden_states"])}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inner(), Inner()])


def test_an_outer_module_overrides_an_inner_one() -> None:
    plan = Plan.read(Outer())
    assert plan.style_of("layers.0.up") == "packed_colwise"
    assert plan.style_of("layers.1.up") == "colwise"
    assert plan.style_of("layers") is None
    assert plan.pipeline == {"layers": (("hidden_states",), ("hidden_states",))}


def test_a_config_overrides_the_module() -> None:
    plan = Plan.read(Outer()).overridden_by(Plan({"layers.1.up": "rowwise"}))
    assert plan.style_of("layers.1.up") == "rowwise"
    assert plan.style_of("layers.1.down") == "rowwise"


def test_transformers_models_bring_theirs() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=32
    )
    plan = Plan.read(transformers.LlamaForCausalLM(config))
    assert plan.style_of("model.layers.1.self_attn.q_proj") == "colwise"
    assert plan.style_of("model.layers.1.mlp.down_proj") == "rowwise"


def test_a_star_is_one_part() -> None:
    assert matches("a.*.b", "a.3.b")
    assert not matches("a.*.b", "a.3.4.b")
    assert not matches("a.b", "axb")


def test_a_plan_that_is_no_mapping_is_refused() -> None:
    class Broken(nn.Module):
        _tp_plan = ["up"]

    with pytest.raises(PlanError, match="a mapping"):
        Plan.read(Broken())
