# SPDX-License-Identifier: Apache-2.0
"""What the contract trains: each case a module, its data and what the technique must be able to do for it.

Everything is deterministic and none of it draws random numbers while it trains, so that one process and many see the
same; a case is data, and its factories are functions of a module, so that it travels to the ranks by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import LightningTransformer, Transformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from typing_extensions import override

from stratagem.models.causal_lm import CausalLM
from stratagem.models.gpt import GPT, GPTConfig
from stratagem.models.hub import transformers_lm
from stratagem.models.optim import OptimizerSettings
from stratagem.models.vision import ImageClassifier, TinyConvNet, synthetic_images
from stratagem.testing.contract import modules

_SGD = OptimizerSettings(name="sgd", lr=0.1, weight_decay=0.1, momentum=0.9, warmup_steps=1, schedule="cosine")


@final
@dataclass(frozen=True)
class Case:
    """One module and its data.

    Args:
        name: the test's id.
        module: builds the module; torch's random state is seeded before.
        data: builds a dataset of so many samples; the same on every rank.
        clip: a norm that the gradients of this module exceed.
        global_batch: samples per step over all ranks; divides by 1, 2, 3 and 4.
        needs: capabilities, by their names in `Subject`, without which the case cannot be trained.
        float32_inside: parts of the module compute in float32 whatever the precision: held to what `ddp` reaches.
        requires_package: a package without which the case is skipped.
    """

    name: str
    module: Callable[[], LightningModule]
    data: Callable[[int], Dataset[Any]]
    clip: float
    global_batch: int = 12
    needs: tuple[str, ...] = ()
    float32_inside: bool = False
    requires_package: str = ""

    @property
    def is_manual(self) -> bool:
        """Whether the module steps its optimizers itself, so that Lightning neither clips nor accumulates."""
        return "manual_optimization" in self.needs

    @property
    def is_available(self) -> bool:
        """Whether the package that it needs is there."""
        return not self.requires_package or importlib.util.find_spec(self.requires_package) is not None


class _Tokens(Dataset[dict[str, Tensor]]):
    """Sequences of a learnable walk over `vocab` tokens, as `input_ids` and `labels` `[T]`."""

    def __init__(self, num_samples: int, vocab: int = 32, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(5)
        steps = torch.randint(0, 4, (num_samples, length + 1), generator=generator)
        self.walk = steps.cumsum(1) % vocab

    def __len__(self) -> int:
        return len(self.walk)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.walk[index, :-1], "labels": self.walk[index, 1:]}


class _Rows(Dataset[Tensor]):
    """Normal rows of a shape, on a scale that grows from sample to sample, so that no two ranks have like gradients."""

    def __init__(self, num_samples: int, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(6)
        rows = torch.randn(num_samples, *shape, generator=generator, dtype=torch.float64)
        scale = torch.linspace(0.5, 2.0, num_samples, dtype=torch.float64).view(-1, *[1] * len(shape))
        self.rows = rows * scale

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index].to(torch.get_default_dtype())


def tokens(num_samples: int) -> Dataset[Any]:
    """Token sequences."""
    return _Tokens(num_samples)


def token_pairs(num_samples: int) -> Dataset[Any]:
    """Token sequences as pairs of input and target."""
    walk = _Tokens(num_samples).walk
    return TensorDataset(walk[:, :-1], walk[:, 1:])


def rows_of_8(num_samples: int) -> Dataset[Any]:
    """Rows `[8]`."""
    return _Rows(num_samples, (8,))


def rows_of_32(num_samples: int) -> Dataset[Any]:
    """Rows `[32]`."""
    return _Rows(num_samples, (32,))


def rows_of_2_by_8(num_samples: int) -> Dataset[Any]:
    """Rows `[2, 8]`."""
    return _Rows(num_samples, (2, 8))


def sided_rows(num_samples: int) -> Dataset[Any]:
    """Rows `[8]` whose first feature, the branch they take, is equal throughout some global batches and splits others.

    So there are batches in which no rank, some ranks and all ranks take a branch.
    """
    data = _Rows(num_samples, (8,))
    batch = torch.arange(num_samples) // 12
    place = torch.arange(num_samples) % 12
    data.rows[:, 0] = torch.where(batch % 3 == 0, 1.0, torch.where((batch % 3 == 1) & (place < 6), 1.0, -1.0))
    return data


def labelled_rows(num_samples: int) -> Dataset[Any]:
    """Pairs of a row `[8]` far from 0 and a label."""
    rows = _Rows(num_samples, (8,)).rows + 30.0
    return TensorDataset(rows.to(torch.get_default_dtype()), torch.arange(num_samples) % 3)


def images(num_samples: int) -> Dataset[Any]:
    """Pairs of an image and a label."""
    return TensorDataset(*synthetic_images(num_samples, image_size=8, num_classes=4, noise=1.0))


def gpt(tied: bool) -> LightningModule:
    """A GPT of this package."""
    config = GPTConfig(
        vocab_size=32, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, max_seq_len=16, tie_embeddings=tied
    )
    return CausalLM(GPT(config), _SGD)


def tied_gpt() -> LightningModule:
    """A GPT whose head is its embedding."""
    return gpt(True)


def untied_gpt() -> LightningModule:
    """A GPT with a head of its own."""
    return gpt(False)


def llama() -> LightningModule:
    """A small Llama of Transformers."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return CausalLM(transformers_lm("LlamaConfig", {"vocab_size": 32, "num_key_value_heads": 2, **sizes}), _SGD)


def gpt2() -> LightningModule:
    """A small GPT-2 of Transformers, without dropout; its head is tied."""
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    return CausalLM(transformers_lm("GPT2Config", {**sizes, **special, **quiet}), _SGD)


def classifier() -> LightningModule:
    """The image classifier of this package."""
    return ImageClassifier(TinyConvNet(4, width=4), 4, OptimizerSettings(name="sgd", lr=0.1, momentum=0.9))


def averaged_normalised() -> LightningModule:
    """Batch normalisation whose running statistics are plain means."""
    return modules.Normalised(momentum=None)


class DemoTransformer(LightningTransformer):
    """Lightning's demo: small, without its download, and without dropout, which no two processes would draw alike."""

    def __init__(self) -> None:
        super().__init__(vocab_size=32)
        self.model = Transformer(vocab_size=32, ninp=16, nhid=24, nlayers=1)
        for part in self.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(part, nn.MultiheadAttention):
                part.dropout = 0.0

    @override
    def prepare_data(self) -> None:
        """Nothing to download."""


CASES: tuple[Case, ...] = (
    Case("gpt_tied", tied_gpt, tokens, clip=0.3),
    Case("gpt_untied", untied_gpt, tokens, clip=0.3),
    Case("images_sync_batchnorm", classifier, images, clip=0.3, needs=("sync_batchnorm",)),
    Case("rows_sync_batchnorm", modules.Normalised, labelled_rows, clip=0.2, needs=("sync_batchnorm",)),
    Case("averaged_sync_batchnorm", averaged_normalised, labelled_rows, clip=0.2, needs=("sync_batchnorm",)),
    Case("llama", llama, tokens, clip=0.3, float32_inside=True, requires_package="transformers"),
    Case("gpt2", gpt2, tokens, clip=0.3, float32_inside=True, requires_package="transformers"),
    Case("boring", BoringModel, rows_of_32, clip=0.5),
    Case("manual_boring", ManualOptimBoringModel, rows_of_32, clip=0.5, needs=("manual_optimization",)),
    Case("demo_transformer", DemoTransformer, token_pairs, clip=0.3),
    Case("router", modules.Router, sided_rows, clip=0.5, needs=("unused_parameters",)),
    Case("adversaries", modules.Adversaries, rows_of_2_by_8, clip=0.05, needs=("manual_optimization",)),
    Case("groups_and_schedule", modules.GroupedOptimizer, rows_of_8, clip=0.2),
)
"""Every case of the parity suite."""
