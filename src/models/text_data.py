# SPDX-License-Identifier: Apache-2.0
"""`TextData`: any text files as batches for `CausalLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from typing_extensions import override

from stratagem.data import TextFiles, TokenDataset, Tokenizer, load_tokenizer
from stratagem.errors import UserError
from stratagem.models.data_module import OrderedDataModule

_STANDARD_LIBRARY_BYTES = 4_000_000  # enough for small models, read in a moment


@final
class TextData(OrderedDataModule):
    """Text files as windows of tokens, in an order that does not depend on the number of ranks.

    Batches are dictionaries of int64 `input_ids` and `labels` [B, T]. The last windows are held out for validation,
    test and predict, at least one of them.

    Args:
        path: a folder, a file or a glob of text files; None for the source of the Python standard library.
        seq_len: T, tokens per sequence.
        global_batch: sequences per optimizer step, over all ranks and accumulated micro-batches.
        num_workers: worker processes of the training loader; 0 is right for data that is in memory, as here.
        shuffle_seed: seeds the order of every epoch; None for the order of the text.
        validation_fraction: share of the windows to hold out.
        tokenizer: a JSON file of the `tokenizers` library; None for bytes, a vocabulary of 256.
        max_bytes: use so much of the text; None for all of it, and of the standard library for the first 4 MB.

    Raises:
        DataError: missing, empty or unreadable files, or too little text for one step; says which and where.
    """

    def __init__(
        self,
        path: str | None = None,
        seq_len: int = 128,
        global_batch: int = 16,
        num_workers: int = 0,
        shuffle_seed: int | None = 0,
        validation_fraction: float = 0.05,
        tokenizer: str | None = None,
        max_bytes: int | None = None,
    ) -> None:
        super().__init__(global_batch, num_workers, shuffle_seed)
        self.path = path
        self.seq_len = seq_len
        self.validation_fraction = validation_fraction
        self.tokenizer_path = tokenizer
        self.max_bytes = max_bytes
        self._tokenizer: Tokenizer | None = None
        self._split: tuple[TokenDataset, TokenDataset] | None = None

    @classmethod
    def preflight(cls, init_args: Mapping[str, Any]) -> list[UserError]:
        """Whether the text is there, is text and is enough, seen before any process starts.

        Reads the first mebibyte; all of the text only where that much does not do.
        """
        full = dict(init_args)
        limit = full.get("max_bytes")
        problems: list[UserError] = []
        for max_bytes in dict.fromkeys((min(limit or 2**20, 2**20), limit)):
            try:
                cls(**{**full, "max_bytes": max_bytes}).setup()
            except UserError as error:
                problems = [error]
            else:
                return []
        return problems

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_path)
        return self._tokenizer

    @property
    @override
    def train_data(self) -> TokenDataset:
        """The windows to train on."""
        assert self._split is not None, "setup was not called"
        return self._split[0]

    @property
    @override
    def validation_data(self) -> TokenDataset:
        """The windows held out."""
        assert self._split is not None, "setup was not called"
        return self._split[1]

    @override
    def setup(self, stage: str | None = None) -> None:
        """Reads the files, once; every rank reads all of them."""
        if self._split is None:
            max_bytes = _STANDARD_LIBRARY_BYTES if self.path is None and self.max_bytes is None else self.max_bytes
            tokens = TextFiles.find(self.path, max_bytes=max_bytes).tokens(self.tokenizer)
            windows = TokenDataset(tokens, seq_len=self.seq_len)
            self._split = windows.split(self._held_out(len(windows), self.validation_fraction))
