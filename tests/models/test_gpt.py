# SPDX-License-Identifier: Apache-2.0
"""The transformer: its parts against their definitions, and its values wherever they are made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stratagem.errors import ConfigError
from stratagem.models.gpt import GPT, Attention, GPTConfig, Rotary, SwiGLU, rotate

SMALL = GPTConfig(vocab_size=50, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, max_seq_len=16)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    """Float64 and a fixed seed, so that equal means equal."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def _tokens(*shape: int) -> Tensor:
    return torch.randint(SMALL.vocab_size, shape)


def test_no_token_sees_a_later_one() -> None:
    model, tokens = GPT(SMALL), _tokens(2, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab_size
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert all((before[:, place] != after[:, place]).any() for place in range(7, 12)), "and every later one sees it"


def test_grouped_query_attention_is_multi_head_attention_with_repeated_heads() -> None:
    grouped = Attention(SMALL)
    full = Attention(dataclasses.replace(SMALL, num_kv_heads=None))
    weights = dict(grouped.state_dict())
    for name in ("k_proj.weight", "v_proj.weight"):
        heads = weights[name].unflatten(0, (2, SMALL.head_size))
        weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(weights)
    rope = Rotary(SMALL.head_size, 100.0)(torch.arange(6), torch.float64)
    x = torch.randn(2, 6, 32)
    torch.testing.assert_close(grouped(x, rope), full(x, rope), rtol=1e-12, atol=1e-14)


def test_attention_is_softmax_of_scaled_scores() -> None:
    attention, x = Attention(SMALL), torch.randn(1, 5, 32)
    rope = Rotary(SMALL.head_size, SMALL.rope_theta)(torch.arange(5), torch.float64)
    heads = []
    for head in range(4):
        rows, shared = slice(head * 8, head * 8 + 8), slice(head // 2 * 8, head // 2 * 8 + 8)
        q = rotate((x @ attention.q_proj.weight[rows].T)[:, None], *rope)[:, 0]
        k = rotate((x @ attention.k_proj.weight[shared].T)[:, None], *rope)[:, 0]
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
        heads.append(scores.softmax(-1) @ (x @ attention.v_proj.weight[shared].T))
    expected = torch.cat(heads, -1) @ attention.o_proj.weight.T
    torch.testing.assert_close(attention(x, rope), expected, rtol=1e-11, atol=1e-13)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    rotary = Rotary(8, 10_000.0)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(query_place: int, key_place: int) -> float:
        turned = [rotate(x, *rotary(torch.tensor([place]), x.dtype)) for x, place in ((q, query_place), (k, key_place))]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), rel=1e-9)
    assert score(9, 4) != pytest.approx(score(9, 5), rel=1e-6)
    assert score(3, 3) == pytest.approx(float((q * k).sum()), rel=1e-9)


def test_explicit_positions_are_the_default_ones() -> None:
    model, tokens = GPT(SMALL), _tokens(2, 9)
    assert torch.equal(model(tokens), model(tokens, torch.arange(9)))
    assert torch.equal(model(tokens), model(tokens, torch.arange(9).expand(2, 9)))
    shifted = model(tokens, torch.arange(9) + 100)
    torch.testing.assert_close(model(tokens), shifted, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(model(tokens), model(tokens, torch.arange(9) * 2), rtol=1e-4)


@pytest.mark.parametrize(("hidden", "ffn"), [(192, 512), (128, 352), (96, 256), (36, 96)])
def test_swiglu_has_the_parameters_of_a_plain_feed_forward_rounded_up_to_32(hidden: int, ffn: int) -> None:
    config = GPTConfig(hidden_size=hidden, num_heads=2)
    count = sum(parameter.numel() for parameter in SwiGLU(config).parameters())
    assert config.ffn == ffn
    assert ffn % 32 == 0
    assert 0 <= count - 8 * hidden**2 < 3 * 32 * hidden
    assert GPTConfig(ffn_size=100).ffn == 100
    layer, x = SwiGLU(config), torch.randn(3, hidden)
    gate, up, down = layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight
    torch.testing.assert_close(layer(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)


def test_a_tied_weight_gets_both_gradients() -> None:
    tied, parted = GPT(SMALL), GPT(dataclasses.replace(SMALL, tie_embeddings=False))
    parted.load_state_dict(tied.state_dict())
    tokens = _tokens(2, 8)
    for model in (tied, parted):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    assert tied.lm_head.weight is tied.embed_tokens.weight
    assert len(list(parted.parameters())) == len(list(tied.parameters())) + 1
    both = parted.lm_head.weight.grad + parted.embed_tokens.weight.grad
    torch.testing.assert_close(tied.embed_tokens.weight.grad, both, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recompute_changes_no_bit(dropout: float) -> None:
    config = dataclasses.replace(SMALL, dropout=dropout)
    plain, again = GPT(config), GPT(dataclasses.replace(config, recompute=True))
    again.load_state_dict(plain.state_dict())
    tokens, losses = _tokens(2, 8), []
    for model in (plain, again):
        torch.manual_seed(7)
        losses.append(F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))
        losses[-1].backward()
    assert torch.equal(*losses)
    for (name, one), other in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name


def test_recompute_runs_each_block_twice() -> None:
    model, calls = GPT(dataclasses.replace(SMALL, recompute=True)), []
    model.blocks[0].ffn.register_forward_pre_hook(lambda *_: calls.append(1))
    model(_tokens(1, 4)).sum().backward()
    assert len(calls) == 2
    with torch.no_grad():
        model(_tokens(1, 4))
    assert len(calls) == 3


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_a_model_built_on_meta_has_the_values_of_a_direct_build(tie_embeddings: bool) -> None:
    config = dataclasses.replace(SMALL, tie_embeddings=tie_embeddings)
    torch.manual_seed(3)
    direct = GPT(config)
    after_direct = torch.rand(())
    torch.manual_seed(3)
    with torch.device("meta"):
        late = GPT(config)
    after_meta = torch.rand(())
    assert torch.equal(after_direct, after_meta), "both leave the same random state"
    assert all(parameter.is_meta for parameter in late.parameters())
    assert not list(late.buffers()), "no buffer that to_empty would leave without values"
    late.to_empty(device="cpu")
    for parameter in late.parameters():
        parameter.data.fill_(math.nan)
    late.init_weights()
    assert [name for name, _ in late.named_parameters()] == [name for name, _ in direct.named_parameters()]
    for (name, one), other in zip(direct.named_parameters(), late.parameters(), strict=True):
        assert torch.equal(one, other), name
    tokens = _tokens(1, 4)
    assert torch.equal(direct(tokens), late(tokens))
    torch.manual_seed(4)
    assert not torch.equal(GPT(config).blocks[0].ffn.up_proj.weight, direct.blocks[0].ffn.up_proj.weight)


def test_a_part_of_the_model_can_be_given_its_values_alone() -> None:
    torch.manual_seed(3)
    direct = GPT(SMALL)
    torch.manual_seed(3)
    with torch.device("meta"):
        late = GPT(SMALL)
    late.blocks[1].to_empty(device="cpu")
    late.init_weights(name for name, _ in late.named_modules() if name.startswith("blocks.1."))
    for (name, one), other in zip(direct.blocks[1].named_parameters(), late.blocks[1].parameters(), strict=True):
        assert torch.equal(one, other), name
    assert late.blocks[0].ffn.up_proj.weight.is_meta


def test_initial_values_are_small_and_smaller_where_a_block_ends() -> None:
    config = GPTConfig(num_layers=8, hidden_size=128, num_heads=4)
    model = GPT(config)
    block = model.blocks[3]
    assert block.attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.ffn.down_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    loss = F.cross_entropy(model(torch.randint(256, (4, 32))).flatten(0, 1), torch.randint(256, (128,)))
    assert loss.item() == pytest.approx(math.log(256), rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_computes_in_the_dtype_of_its_parameters(dtype: torch.dtype) -> None:
    logits = GPT(SMALL).to(dtype)(_tokens(2, 4))
    assert logits.dtype == dtype
    assert logits.shape == (2, 4, 50)
    torch.set_default_dtype(dtype)
    assert {parameter.dtype for parameter in GPT(SMALL).parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_precision_starts_from_the_same_values(dtype: torch.dtype) -> None:
    models = []
    for built_in in (torch.float32, dtype):
        torch.manual_seed(1)
        torch.set_default_dtype(built_in)
        models.append(GPT(SMALL))
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one.to(dtype), other), name


def test_no_two_modules_start_from_the_same_values() -> None:
    first, second = GPT(SMALL).blocks
    assert not torch.equal(first.attention.q_proj.weight, second.attention.q_proj.weight)
    assert not torch.equal(first.ffn.gate_proj.weight, first.ffn.up_proj.weight)


def test_with_the_weights_of_a_llama_it_is_that_llama() -> None:
    transformers = pytest.importorskip("transformers", reason="an extra")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=SMALL.norm_eps,
        rope_theta=SMALL.rope_theta,
        initializer_range=0.3,
    )
    llama, ours = transformers.LlamaForCausalLM(config), GPT(dataclasses.replace(SMALL, tie_embeddings=False))
    parts = {
        "blocks": "model.layers",
        "embed_tokens": "model.embed_tokens",
        "attention.": "self_attn.",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "ffn.": "mlp.",
    }

    def theirs(name: str) -> str:
        for mine, other in parts.items():
            name = name.replace(mine, other)
        return name.replace("norm.", "model.norm.", 1) if name.startswith("norm.") else name

    weights = llama.state_dict()
    ours.load_state_dict({name: weights[theirs(name)] for name in ours.state_dict()})
    tokens = _tokens(2, 16)
    # Transformers computes norms and rotary angles in float32, whatever the model's dtype.
    torch.testing.assert_close(ours(tokens), llama(tokens).logits, rtol=1e-5, atol=1e-5)


def test_plans_name_every_layer_that_can_be_cut_and_no_other() -> None:
    model = GPT(SMALL)
    names = {name.replace(".0.", ".*."): module for name, module in model.named_modules() if ".1." not in name}
    layers = {name for name, module in names.items() if isinstance(module, nn.Linear | nn.Embedding)}
    stream = {name for name, module in names.items() if isinstance(module, nn.RMSNorm | nn.Dropout)}
    assert {name for name, style in GPT._tp_plan.items() if style == "sequence_parallel"} == stream
    assert set(GPT._tp_plan) == layers | stream
    children = {name for name, child in model.named_children() if list(child.parameters())}
    assert list(GPT._pp_plan) == [name for name, _ in model.named_children() if name in children]
    tensor_parallel = pytest.importorskip("transformers.integrations.tensor_parallel", reason="an extra")
    assert set(GPT._tp_plan.values()) <= set(tensor_parallel.ALL_PARALLEL_STYLES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden_size": 30}, "config.hidden_size: .*Allowed: multiples of 8"),
        ({"num_kv_heads": 3}, "config.num_kv_heads: .*Allowed: 1, 2, 4"),
        ({"num_kv_heads": 0}, "config.num_kv_heads"),
        ({"num_layers": 0}, "config.num_layers"),
        ({"dropout": 1.0}, "config.dropout"),
        ({"ffn_size": 0}, "config.ffn_size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(SMALL, **options)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"17 tokens.*at most max_seq_len = 16"):
        GPT(SMALL)(_tokens(1, 17))


def test_generate_is_repeatable_and_goes_on_beyond_the_longest_sequence() -> None:
    model = GPT(SMALL)
    outputs = [
        model.generate(_tokens(1, 1) * 0, 30, top_k=5, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    ]
    assert outputs[0].shape == (1, 31)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    greedy = model.generate(_tokens(2, 3), 4, temperature=0)
    assert torch.equal(greedy[:, -1], model(greedy[:, :-1])[:, -1].argmax(-1))
    assert model.training, "the mode is put back"
    one = model.generate(_tokens(1, 3), 6, top_k=1)
    assert torch.equal(one, model.generate(one[:, :3], 6, temperature=0))
    with pytest.raises(ConfigError, match="prompt"):
        model.generate(_tokens(1, 0), 1)
