# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer of today's kind, written with no word of parallelism in it.

Pre-norm blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward, RMSNorm, no biases. Where
the model may be cut is said as data, in the attributes `_tp_plan` and `_pp_plan`, in the words of Transformers.

Shape suffixes:
    B: sequences      T: tokens of a sequence     V: vocabulary        D: hidden_size
    H: query heads    K: key and value heads      E: size of a head    F: ffn_size

Note [initial values]: one seed is taken from torch's CPU generator when a GPT is built. The values of each module
depend on that seed and the module's name alone. So a model built on the meta device and given memory later, as a whole
or only in the parts that a rank owns, has the values that it would have had if built directly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from stratagem.data import derive_seed
from stratagem.errors import ConfigError
from stratagem.models.sampling import generate


@final
@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT.

    Args:
        vocab_size: tokens that exist; 256 for bytes.
        num_layers: blocks.
        hidden_size: width of the residual stream.
        num_heads: query heads; they divide `hidden_size` into heads of even size.
        num_kv_heads: key and value heads, a divisor of `num_heads`; None for as many (multi-head attention).
        ffn_size: inner width of the feed-forward; None for 8/3 of `hidden_size`, rounded up to a multiple of 32, which
            has about the parameters of a plain feed-forward of 4 times the width.
        max_seq_len: longest sequence.
        rope_theta: base of the rotary wavelengths.
        norm_eps: added to the mean square in RMSNorm.
        tie_embeddings: the output head uses the weight of the token embedding.
        dropout: probability in the residual branches while training.
        recompute: keep only each block's input for backward and compute the rest again.

    Raises:
        ConfigError: sizes that do not fit each other.

    >>> GPTConfig(hidden_size=192).ffn
    512
    """

    vocab_size: int = 256
    num_layers: int = 4
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int | None = None
    ffn_size: int | None = None
    max_seq_len: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    dropout: float = 0.0
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "hidden_size", "num_heads", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", where=f"config.{name}", allowed="1 or more")
        if self.hidden_size % (2 * self.num_heads):
            raise ConfigError(
                f"hidden_size {self.hidden_size} is not cut by num_heads {self.num_heads} into heads of an even size",
                where="config.hidden_size",
                allowed=f"multiples of {2 * self.num_heads}",
            )
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ConfigError(
                f"num_kv_heads {self.kv_heads} does not divide num_heads {self.num_heads}",
                where="config.num_kv_heads",
                allowed=", ".join(str(n) for n in range(1, self.num_heads + 1) if self.num_heads % n == 0),
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout is {self.dropout}", where="config.dropout", allowed="from 0.0 to below 1.0")
        if self.ffn < 1:
            raise ConfigError(f"ffn_size is {self.ffn_size}", where="config.ffn_size", allowed="1 or more, or null")

    @property
    def head_size(self) -> int:
        """E."""
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """K."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn(self) -> int:
        """F."""
        return math.ceil(8 * self.hidden_size / 3 / 32) * 32 if self.ffn_size is None else self.ffn_size


@final
class Rotary(nn.Module):
    """Rotary positions: pair (e, e + E/2) of a head is turned by the angle position * theta**(-2e/E).

    The score of a query and a key then depends on their distance alone. The tables are computed in each forward, in
    float64, so there is no buffer that a meta-device build could leave empty.
    """

    def __init__(self, head_size: int, theta: float) -> None:
        super().__init__()
        self.head_size, self.theta = head_size, theta

    @override
    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [..., 1, T, E/2] in `dtype` of integer positions [..., T]; the 1 is for the heads."""
        exponents = torch.arange(0, self.head_size, 2, device=positions.device, dtype=torch.float64) / self.head_size
        angles = positions.to(torch.float64)[..., None, :, None] * self.theta**-exponents
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair of a head by its position's angle; shape and dtype stay."""
    first, second = x_BHTE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


@final
class Attention(nn.Module):
    """Causal grouped-query attention: H / K query heads share one key and value head.

    The numbers of heads are read off the projections' outputs, not off the config: the module stays right when each
    projection holds only some of the heads.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        kv_size = config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    @override
    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        q_BHTE = rotate(self._heads(self.q_proj(x_BTD)), *rope)
        k_BKTE = rotate(self._heads(self.k_proj(x_BTD)), *rope)
        v_BKTE = self._heads(self.v_proj(x_BTD))
        grouped = q_BHTE.shape[1] != k_BKTE.shape[1]
        o_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.o_proj(o_BHTE.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


@final
class SwiGLU(nn.Module):
    """Feed-forward down(silu(gate(x)) * up(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden_size, bias=False)

    @override
    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))
        return out


@final
class Block(nn.Module):
    """Attention, then feed-forward, each normed before and added to the residual stream after."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    @override
    def forward(self, x_BTD: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, D] to [B, T, D]."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), rope))
        out: Tensor = x_BTD + self.dropout(self.ffn(self.ffn_norm(x_BTD)))
        return out


@final
class GPT(nn.Module):
    """The transformer: token numbers in, logits out.

    Built under `torch.device("meta")` it takes no memory; `to_empty(device=...)` and `init_weights()` then make it what
    a direct build under the same seed would have been, see Note [initial values].

    Args:
        config: its sizes.

    >>> model = GPT(GPTConfig(num_layers=1, hidden_size=16, num_heads=2))
    >>> model(torch.zeros(2, 5, dtype=torch.int64)).shape
    torch.Size([2, 5, 256])
    """

    _tp_plan: ClassVar[dict[str, str]] = {
        "embed_tokens": "embedding_rowwise",
        "blocks.*.attention_norm": "sequence_parallel",
        "blocks.*.attention.q_proj": "colwise",
        "blocks.*.attention.k_proj": "colwise",
        "blocks.*.attention.v_proj": "colwise",
        "blocks.*.attention.o_proj": "rowwise",
        "blocks.*.ffn_norm": "sequence_parallel",
        "blocks.*.ffn.gate_proj": "colwise",
        "blocks.*.ffn.up_proj": "colwise",
        "blocks.*.ffn.down_proj": "rowwise",
        "blocks.*.dropout": "sequence_parallel",
        "norm": "sequence_parallel",
        "lm_head": "colwise_gather_output",
    }
    _pp_plan: ClassVar[dict[str, tuple[list[str], list[str]]]] = {
        "embed_tokens": (["input_ids"], ["hidden_states"]),
        "blocks": (["hidden_states", "rope"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
        "lm_head": (["hidden_states"], ["logits"]),
    }
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.init_seed = int(torch.randint(2**62, (), device="cpu", dtype=torch.int64))
        device = torch.get_default_device()
        with torch.device("meta"):  # the values that torch's modules would draw for themselves are never used
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.rotary = Rotary(config.head_size, config.rope_theta)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights()

    @override
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits of each next token.

        Args:
            input_ids: int64 token numbers [B, T].
            position_ids: place of each token in its sequence, [T] or [B, T]; None for 0, 1, 2, ...

        Returns:
            [B, T, V], in the dtype of the parameters or of autocast.

        Raises:
            ConfigError: the sequence is longer than `max_seq_len`.
        """
        num_tokens = input_ids.shape[1]
        if num_tokens > self.config.max_seq_len:
            raise ConfigError(
                f"a sequence of {num_tokens} tokens is too long for this model",
                where="data.seq_len",
                allowed=f"at most max_seq_len = {self.config.max_seq_len}",
            )
        if position_ids is None:
            position_ids = torch.arange(num_tokens, device=input_ids.device)
        x_BTD = self.embed_tokens(input_ids)
        rope = self.rotary(position_ids, x_BTD.dtype)
        for block in self.blocks:
            if self.config.recompute and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, rope, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, rope)
        logits_BTV: Tensor = self.lm_head(self.norm(x_BTD))
        return logits_BTV

    def tie_weights(self) -> None:
        """Makes head and embedding share one parameter, if the config says so; `to_empty` parts them."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self, names: Iterable[str] | None = None) -> None:
        """Fills modules that have memory with their initial values, one module at a time.

        Weights are normal with deviation 0.02, divided by sqrt(2 * num_layers) where a block adds to the residual
        stream; norms are 1.

        Args:
            names: the modules to fill, as in `named_modules`; None for all.
        """
        self.tie_weights()
        modules = dict(self.named_modules())
        for name in modules if names is None else names:
            module = modules[name]
            if isinstance(module, nn.RMSNorm):
                module.weight.fill_(1.0)
            elif isinstance(module, nn.Linear | nn.Embedding) and not (module is self.lm_head and self._is_tied()):
                scale = math.sqrt(2 * self.config.num_layers) if name.endswith(("o_proj", "down_proj")) else 1.0
                generator = torch.Generator(device="cpu").manual_seed(derive_seed(self.init_seed, name))
                # Drawn on the CPU and in float32, so that the values depend on neither device nor dtype.
                values = torch.empty(module.weight.shape, dtype=torch.float32, device="cpu")
                module.weight.copy_(values.normal_(0.0, 0.02 / scale, generator=generator))

    def generate(
        self,
        prompt_BT: Tensor,
        num_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The prompt [B, T] and `num_tokens` sampled tokens, [B, T + num_tokens]; see `sampling.generate`."""
        return generate(
            self,
            prompt_BT,
            num_tokens,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
            max_context=self.config.max_seq_len,
        )

    def _is_tied(self) -> bool:
        return self.lm_head.weight is self.embed_tokens.weight
