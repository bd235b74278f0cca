# SPDX-License-Identifier: Apache-2.0
"""Text files as one deterministic stream of tokens, cut into windows.

Files are taken in the order of their relative paths, so the stream is the same on every machine and rank. Without a
path the text is the Python standard library's own source: always there, and large enough to learn something from.

Tokens are bytes unless a tokenizer file is given. Byte 0 ends each document: text has none, so the vocabulary is 256.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from stratagem.errors import DataError

Tokens = npt.NDArray[np.generic]


class Tokenizer(Protocol):
    """Text to token numbers and back."""

    @property
    def vocab_size(self) -> int:
        """Token numbers are below this."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """The token put after every document, if there is one."""
        ...

    def encode(self, text: str) -> list[int] | Tokens:
        """The tokens of a text, without an end-of-document token."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Readable text; what is no text becomes a replacement character."""
        ...


@final
class ByteTokenizer:
    """UTF-8 bytes as tokens.

    >>> ByteTokenizer().decode(list(ByteTokenizer().encode("for x in y:")))
    'for x in y:'
    """

    vocab_size: int = 256
    end_of_document: int | None = 0

    def encode(self, text: str) -> Tokens:
        """The bytes of `text` as a uint8 array."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, tokens: list[int]) -> str:
        """Text of bytes; broken sequences become U+FFFD."""
        return bytes(tokens).decode("utf-8", errors="replace")


@final
class FileTokenizer:
    """A tokenizer of the `tokenizers` library, read from its JSON file.

    Args:
        path: the JSON file.

    Raises:
        DataError: the library is not installed, or the file is missing or not a tokenizer.
    """

    _END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

    def __init__(self, path: str | Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(
                "reading a tokenizer file needs the package 'tokenizers', which is not installed",
                where="data.tokenizer",
                do='pip install "stratagem[tokenizers]"',
            ) from error
        if not Path(path).is_file():
            raise DataError(f"there is no file {path}", where="data.tokenizer", allowed="a tokenizer JSON file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"{path} is not a tokenizer file ({error})",
                where="data.tokenizer",
                allowed="JSON as written by `tokenizers`",
            ) from error
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        ends = [self._tokenizer.token_to_id(name) for name in self._END_NAMES]
        self.end_of_document: int | None = next((token for token in ends if token is not None), None)

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`, no special ones added."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return tokens

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special ones left out."""
        return str(self._tokenizer.decode(tokens))


@final
@dataclass(frozen=True)
class TextFiles:
    """The text files of a corpus, in their fixed order.

    Args:
        files: what to read, in this order.
        max_bytes: stop after so many bytes of text; None for all.
        skip_unreadable: pass over files that are not UTF-8 text, instead of refusing them.
    """

    files: tuple[Path, ...]
    max_bytes: int | None = None
    skip_unreadable: bool = False

    @classmethod
    def find(cls, path: str | Path | None = None, *, max_bytes: int | None = None) -> TextFiles:
        """The files of a folder and its sub-folders (no hidden ones), of a glob such as `a/**/*.txt`, or one file.

        Args:
            path: folder, file or glob; None for the source of the Python standard library.
            max_bytes: stop after so many bytes of text.

        Raises:
            DataError: nothing is there.
        """
        if max_bytes is not None and max_bytes < 1:
            raise DataError(f"max_bytes is {max_bytes}", where="data.max_bytes", allowed="1 or more, or null for all")
        if path is None:
            return cls(tuple(_standard_library()), max_bytes, skip_unreadable=True)
        text = str(path)
        if any(mark in text for mark in "*?["):
            found = sorted(Path(name) for name in glob.glob(text, recursive=True) if Path(name).is_file())
            if not found:
                raise DataError(
                    f"no file matches {text}", where="data.path", do="mend the glob, or name a folder or file"
                )
            return cls(tuple(found), max_bytes)
        root = Path(path)
        if root.is_file():
            return cls((root,), max_bytes)
        if not root.is_dir():
            raise DataError(
                f"there is no folder or file {root}", where="data.path", do="mend the path, or leave it out"
            )
        found = sorted(_visible_files(root), key=lambda file: file.relative_to(root).as_posix())
        if not found:
            raise DataError(f"the folder {root} has no files in it", where="data.path", do="put text files there")
        return cls(tuple(found), max_bytes)

    def read(self) -> Iterator[str]:
        """Yields the documents one after the other.

        Raises:
            DataError: a file is not UTF-8 text; names the file and the byte.
        """
        left = self.max_bytes
        for file in self.files:
            if left is not None and left <= 0:
                return
            raw = file.read_bytes()
            fault = _first_fault(raw)
            if fault is not None:
                if self.skip_unreadable:
                    continue
                raise DataError(
                    f"{file} is not UTF-8 text: byte {fault} (0x{raw[fault]:02x}) cannot be read",
                    where="data.path",
                    do="take the file away, or name the text files by a glob such as 'folder/**/*.txt'",
                )
            if left is not None:
                raw, left = raw[:left], left - len(raw)
            yield raw.decode("utf-8", errors="ignore")  # only a cut at max_bytes can leave half a character

    def tokens(self, tokenizer: Tokenizer) -> Tokens:
        """All documents as one array [number of tokens], each followed by the end-of-document token where there is one.

        The dtype is the narrowest of uint8, uint16 and int32 that holds the vocabulary.
        """
        dtype = _narrowest(tokenizer.vocab_size)
        end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
        parts: list[Tokens] = []
        for document in self.read():
            parts += [np.asarray(tokenizer.encode(document), dtype), np.asarray(end, dtype)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype)


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """The tokenizer of a `tokenizers` JSON file, or the byte tokenizer for None."""
    return ByteTokenizer() if path is None else FileTokenizer(path)


def _standard_library() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    # Installed packages are no part of it; test folders hold files that are broken on purpose.
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        files += [Path(folder) / name for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"{root} holds no Python source", where="data.path", do="name a folder of text files")
    yield from sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _visible_files(root: Path) -> Iterator[Path]:
    for file in root.rglob("*"):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(root).parts):
            yield file


def _first_fault(raw: bytes) -> int | None:
    """Where `raw` stops being text: a byte that is no UTF-8, or a zero byte."""
    zero = raw.find(b"\0")
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start if zero < 0 else min(zero, error.start)
    return None if zero < 0 else zero


def _narrowest(vocab_size: int) -> np.dtype[Any]:
    for dtype in (np.uint8, np.uint16):
        if vocab_size <= np.iinfo(dtype).max + 1:
            return np.dtype(dtype)
    return np.dtype(np.int32)
