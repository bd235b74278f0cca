# SPDX-License-Identifier: Apache-2.0
"""Data in a fixed order: the global batch of step k is the same for every number of ranks, and the position is state.

`order` is the arithmetic, `sampler` gives it to torch loaders, `loader` counts what was delivered, `text` and `windows`
make token streams of text files. Plain torch; nothing here knows Lightning.
"""

from stratagem.data.loader import OrderedLoader
from stratagem.data.order import BatchOrder, EvalOrder, derive_seed, epoch_order
from stratagem.data.sampler import OrderedBatchSampler, ordered_batch_sampler
from stratagem.data.text import ByteTokenizer, FileTokenizer, TextFiles, Tokenizer, load_tokenizer
from stratagem.data.windows import TokenDataset

__all__ = [
    "BatchOrder",
    "ByteTokenizer",
    "EvalOrder",
    "FileTokenizer",
    "OrderedBatchSampler",
    "OrderedLoader",
    "TextFiles",
    "TokenDataset",
    "Tokenizer",
    "derive_seed",
    "epoch_order",
    "load_tokenizer",
    "ordered_batch_sampler",
]
