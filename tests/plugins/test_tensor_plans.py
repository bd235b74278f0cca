# SPDX-License-Identifier: Apache-2.0
"""From plans to cuts, without processes: heads, shared key heads, tied weights, inferred plans, and refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from stratagem.errors import ConfigError, MeshError, PlanError
from stratagem.models.causal_lm import CausalLM
from stratagem.models.gpt import GPT, GPTConfig
from stratagem.plan import Plan
from stratagem.plugins.tensor import TensorParallelStrategy, TensorSettings
from stratagem.plugins.tensor.cuts import Cut, Cuts, plan_cuts
from stratagem.plugins.tensor.infer import infer_plan
from stratagem.plugins.tensor.technique import resolve

UNEVEN = TensorSettings(uneven=True)


def _gpt(**options: int | bool) -> GPT:
    sizes = {"vocab_size": 30, "num_layers": 1, "hidden_size": 24, "num_heads": 6, "num_kv_heads": 2, "ffn_size": 32}
    with torch.device("meta"):
        return GPT(GPTConfig(**{**sizes, **options}))


def _by_name(cuts: Cuts) -> dict[str, Cut]:
    return {cut.name.removeprefix("blocks.0."): cut for cut in cuts.layers}


def test_heads_are_kept_whole_and_key_heads_follow_their_queries() -> None:
    even = _by_name(resolve(_gpt(), 2))
    assert even["attention.q_proj"].spans == ((0, 12), (12, 24))
    assert (even["attention.k_proj"].kind, even["attention.k_proj"].spans) == ("column", ((0, 4), (4, 8)))
    assert even["ffn.up_proj"].spans == even["ffn.down_proj"].spans == ((0, 16), (16, 32))
    assert (even["embed_tokens"].kind, even["lm_head"].output) == ("vocab", "lazy")
    six = _by_name(resolve(_gpt(), 6, UNEVEN))
    assert (six["attention.k_proj"].kind, six["attention.k_proj"].spans) == ("shared", ((0, 4),) * 3 + ((4, 8),) * 3)
    assert six["ffn.up_proj"].spans[:3] == ((0, 6), (6, 12), (12, 17))
    assert resolve(_gpt(), 2).sequence
    assert not resolve(_gpt(), 2, TensorSettings(sequence_parallel="off")).sequence
    whole = resolve(_gpt(), 2).whole
    assert whole == ("blocks.0.attention_norm.weight", "blocks.0.ffn_norm.weight", "norm.weight")


def test_what_cannot_be_cut_is_refused_with_the_nearest_degrees() -> None:
    with pytest.raises(PlanError, match=r"blocks.0.attention.q_proj: 6 heads are not divided by 4 .*tp=2 or tp=6"):
        resolve(_gpt(ffn_size=24), 4)
    with pytest.raises(PlanError, match=r"ffn.gate_proj: 32 features are not divided by 3 ranks.*tp=2"):
        resolve(_gpt(num_kv_heads=6), 3)
    with pytest.raises(PlanError, match=r"6 heads cannot be cut over 7 ranks.*tp=6"):
        resolve(_gpt(), 7, UNEVEN)
    with pytest.raises(PlanError, match=r"read parts of 2 key heads"):
        resolve(_gpt(), 4, UNEVEN)
    with pytest.raises(PlanError, match="no layer is called 'head'"):
        resolve(_gpt(), 2, TensorSettings(plan={"head": "replicate"}))
    with pytest.raises(PlanError, match="is no linear layer"):
        plan_cuts(nn.Sequential(nn.LayerNorm(4)), Plan(tensor={"0": "colwise"}), 2)
    with pytest.raises(PlanError, match="with max_norm cannot be cut"):
        plan_cuts(nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), Plan(tensor={"0": "embedding_rowwise"}), 2)
    with pytest.raises(PlanError, match="the style 'mla_kv_a_proj' is not supported"):
        plan_cuts(nn.Sequential(nn.Linear(4, 2)), Plan(tensor={"0": "mla_kv_a_proj"}), 2)
    always = TensorSettings(sequence_parallel="on")
    fused = nn.ModuleDict({"qkv": nn.Linear(4, 24), "out": nn.Linear(8, 4)})
    fused.num_heads = 2
    with pytest.raises(PlanError, match=r"qkv: .*in an order that its name does not tell.*say packed_colwise"):
        plan_cuts(fused, Plan(tensor={"qkv": "colwise", "out": "rowwise"}), 2)
    with pytest.raises(PlanError, match="does not say which layers see a share"):
        plan_cuts(nn.Sequential(nn.Linear(4, 2)), Plan(tensor={"0": "colwise_rep"}), 2, always)
    with pytest.raises(PlanError, match="has no plan"):
        resolve(nn.Sequential(nn.Linear(4, 2)), 2, TensorSettings(without_plan="refuse"))
    with pytest.raises(ConfigError, match="colwise_gather_output"):
        TensorSettings(plan={"head": "columnwise"})
    with pytest.raises(ConfigError, match="1 or more"):
        TensorParallelStrategy(tp=0)
    with pytest.raises(MeshError, match="multiple of 3"):
        TensorParallelStrategy(tp=3).mesh_shape(4)


class Drops(nn.Module):
    """A feed-forward or an attention with dropout of which a plan says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 4)


def test_dropout_that_may_be_drawn_wrongly_is_refused() -> None:
    plan = Plan(tensor={"up": "colwise", "down": "rowwise"})
    with pytest.raises(PlanError, match=r"drop: .*dropout of 0.1 sees some features or all.*colwise: before the row"):
        plan_cuts(Drops(), plan, 2)
    cuts = plan_cuts(Drops(), Plan(tensor={**plan.tensor, "drop": "colwise"}), 2)
    assert [(cut.name, cut.kind) for cut in cuts.layers] == [("up", "column"), ("drop", "dropout"), ("down", "row")]
    attention = Drops()
    attention.drop.p, attention.num_heads, attention.attn_dropout = 0.0, 2, 0.1
    with pytest.raises(PlanError, match=r"its attn_dropout of 0.1 is drawn for each rank's heads alone"):
        plan_cuts(attention, plan, 2)


def test_nothing_starts_where_a_module_cannot_be_cut() -> None:
    """The refusal comes from the caller's process, before ranks are started or data is read."""
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=TensorParallelStrategy(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    module: LightningModule = CausalLM(GPT(GPTConfig(num_layers=1, hidden_size=24, num_heads=6, num_kv_heads=2)))
    with pytest.raises(PlanError, match="6 heads are not divided by 4 ranks"):
        trainer.fit(module, [{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}])


class Reads(nn.Module):
    """Reads one weight without calling the layer, and ties another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.pair = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Dropout(0.1), nn.Linear(4, 1))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.pair[:3](F.linear(self.embed(tokens), self.read.weight)))


def test_a_plan_is_inferred_of_what_is_right_anywhere() -> None:
    styles = dict(infer_plan(Reads(), 2).tensor)
    assert styles == {
        "embed": "embedding_rowwise",
        "head": "colwise_gather_output",
        "pair.0": "colwise",
        "pair.2": "rowwise",
    }
    assert dict(infer_plan(Reads(), 3).tensor) == {
        "embed": "embedding_rowwise",
        "head": "colwise_gather_output",
        "pair.0": "colwise_gather_output",
        "pair.2": "colwise_gather_output",
    }
    attention = nn.TransformerEncoderLayer(8, 2, 16)
    assert set(infer_plan(attention, 2).tensor) == {"linear1", "linear2"}


def test_a_tied_layer_that_the_plan_leaves_out_is_cut_along() -> None:
    cuts = _by_name(plan_cuts(Reads(), Plan(tensor={"head": "colwise_rep"}), 2))
    assert (cuts["head"].kind, cuts["embed"].kind, cuts["embed"].spans) == ("column", "vocab", ((0, 3), (3, 6)))
