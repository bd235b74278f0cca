# SPDX-License-Identifier: Apache-2.0
"""A stream of tokens, cut into windows for next-token prediction."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from stratagem.data.text import Tokens
from stratagem.errors import DataError


@final
class TokenDataset(Dataset[dict[str, Tensor]]):
    """Window i is the tokens i*T to i*T+T as inputs, and the same shifted by one as labels.

    Args:
        tokens: array [number of tokens] of any integer dtype; kept as it is and converted window by window.
        seq_len: T, tokens per window.

    Raises:
        DataError: not even one window fits.

    >>> data = TokenDataset(np.arange(10, dtype=np.uint8), seq_len=3)
    >>> len(data), data[1]["input_ids"].tolist(), data[1]["labels"].tolist()
    (3, [3, 4, 5], [4, 5, 6])
    >>> data[[0, 2]]["input_ids"].tolist()
    [[0, 1, 2], [6, 7, 8]]
    """

    def __init__(self, tokens: Tokens, *, seq_len: int) -> None:
        if seq_len < 1:
            raise DataError(f"seq_len is {seq_len}", where="data.seq_len", allowed="1 or more")
        if len(tokens) <= seq_len:
            raise DataError(
                f"a sequence of {seq_len} tokens and its label do not fit into {len(tokens)} tokens of data",
                where="data.seq_len",
                allowed=f"at most {len(tokens) - 1}" if len(tokens) > 1 else "",
                do="shorten the sequence or give more text",
            )
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    @override
    def __getitem__(self, index: int | list[int]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64, [T] for one index and [B, T] for a list of B."""
        starts = np.asarray(index, dtype=np.int64)[..., None] * self.seq_len
        rows = torch.from_numpy(self.tokens[starts + np.arange(self.seq_len + 1)].astype(np.int64))
        return {"input_ids": rows[..., :-1].contiguous(), "labels": rows[..., 1:].contiguous()}

    def split(self, num_first: int) -> tuple[TokenDataset, TokenDataset]:
        """The first `num_first` windows and the rest. One token is in both: last label here, first input there."""
        assert 0 < num_first < len(self), f"{num_first} of {len(self)} windows"
        edge = num_first * self.seq_len
        return (
            TokenDataset(self.tokens[: edge + 1], seq_len=self.seq_len),
            TokenDataset(self.tokens[edge:], seq_len=self.seq_len),
        )
