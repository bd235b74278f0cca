# SPDX-License-Identifier: Apache-2.0
"""Text files to windows of tokens, and one clear line for each way they can be wrong."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from stratagem.data import ByteTokenizer, FileTokenizer, TextFiles, TokenDataset, load_tokenizer
from stratagem.errors import DataError


def _write(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (root / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
        (root / name.replace("__", "/")).write_text(text, encoding="utf-8")
    return root


def test_a_folder_is_read_in_the_order_of_relative_paths(tmp_path: Path) -> None:
    _write(tmp_path, z="last", b__zz="über", a="first")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("no")
    assert list(TextFiles.find(tmp_path).read()) == ["first", "über", "last"]
    assert list(TextFiles.find(tmp_path / "a").read()) == ["first"]
    assert list(TextFiles.find(f"{tmp_path}/**/z*").read()) == ["über", "last"]


def test_tokens_are_bytes_with_a_zero_after_each_document(tmp_path: Path) -> None:
    tokens = TextFiles.find(_write(tmp_path, a="hi", b="é")).tokens(ByteTokenizer())
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == [*b"hi", 0, *"é".encode(), 0]
    assert ByteTokenizer().decode([0xC3, 65]) == "\ufffdA"


def test_max_bytes_stops_the_stream_without_breaking_a_character(tmp_path: Path) -> None:
    _write(tmp_path, a="abc", b="éé", c="never")
    assert list(TextFiles.find(tmp_path, max_bytes=6).read()) == ["abc", "é"]
    assert list(TextFiles.find(tmp_path, max_bytes=3).read()) == ["abc"]


def test_without_a_path_the_text_is_the_standard_library() -> None:
    found = TextFiles.find(max_bytes=50_000)
    root = Path(sysconfig.get_path("stdlib"))
    assert root / "abc.py" in found.files
    assert not any({"site-packages", "test"} & set(file.relative_to(root).parts) for file in found.files)
    tokens = found.tokens(ByteTokenizer())
    assert 50_000 <= len(tokens) <= 50_000 + len(found.files)
    assert np.array_equal(tokens, TextFiles.find(max_bytes=50_000).tokens(ByteTokenizer()))


def test_what_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    bad = tmp_path / "bad"
    bad.mkdir()
    for path, message in (
        (tmp_path / "nowhere", "data.path: there is no folder or file .*nowhere"),
        (empty, "the folder .*empty has no files in it"),
        (f"{empty}/*.txt", r"no file matches .*\*\.txt"),
    ):
        with pytest.raises(DataError, match=message) as caught:
            TextFiles.find(path)
        assert "\n" not in str(caught.value)
    for raw, byte in ((b"good \xff bad", "byte 5 .0xff."), (b"ELF\0\xff", "byte 3 .0x00.")):
        (bad / "image.txt").write_bytes(raw)
        with pytest.raises(DataError, match=f"image.txt is not UTF-8 text: {byte}"):
            TextFiles.find(bad).tokens(ByteTokenizer())
    with pytest.raises(DataError, match="max_bytes"):
        TextFiles.find(bad, max_bytes=0)


def test_windows_are_inputs_and_the_same_shifted_by_one() -> None:
    data = TokenDataset(np.arange(11, dtype=np.uint8), seq_len=5)
    assert len(data) == 2
    assert data[1]["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert data[1]["labels"].tolist() == [6, 7, 8, 9, 10]
    batch = data[[1, 0]]
    assert batch["labels"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], torch.stack([data[1]["input_ids"], data[0]["input_ids"]]))


def test_split_keeps_every_window_once() -> None:
    data = TokenDataset(np.arange(21, dtype=np.uint8), seq_len=4)
    first, rest = data.split(3)
    assert (len(first), len(rest)) == (3, 2)
    windows = [d[i]["labels"].tolist() for d in (first, rest) for i in range(len(d))]
    assert windows == [data[i]["labels"].tolist() for i in range(5)]


def test_a_sequence_longer_than_the_data_is_refused() -> None:
    with pytest.raises(DataError, match=r"data.seq_len: .*10 tokens.*fit into 10 tokens.*Allowed: at most 9"):
        TokenDataset(np.zeros(10, np.uint8), seq_len=10)
    assert len(TokenDataset(np.zeros(10, np.uint8), seq_len=9)) == 1
    with pytest.raises(DataError, match="seq_len is 0"):
        TokenDataset(np.zeros(10, np.uint8), seq_len=0)


def _tokenizer_file(path: Path, num_words: int) -> Path:
    tokenizers = pytest.importorskip("tokenizers", reason="an extra")
    words = {f"w{number}": number + 1 for number in range(num_words)}
    model = tokenizers.models.WordLevel({"[UNK]": 0, **words, "</s>": num_words + 1}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(("num_words", "dtype"), [(10, np.uint8), (300, np.uint16), (70_000, np.int32)])
def test_a_tokenizer_file_is_used_and_tokens_are_as_narrow_as_they_can_be(
    tmp_path: Path, num_words: int, dtype: type
) -> None:
    tokenizer = load_tokenizer(_tokenizer_file(tmp_path / "t.json", num_words))
    tokens = TextFiles.find(_write(tmp_path / "text", a="w0 w9 what", b="w1")).tokens(tokenizer)
    assert tokens.dtype == dtype
    assert tokens.tolist() == [1, 10, 0, num_words + 1, 2, num_words + 1]
    assert (tokenizer.vocab_size, tokenizer.decode([1, 10])) == (num_words + 2, "w0 w9")


def test_a_bad_tokenizer_file_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers", reason="an extra")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"data.tokenizer: .*bad.json is not a tokenizer file"):
        FileTokenizer(tmp_path / "bad.json")
    with pytest.raises(DataError, match="there is no file"):
        FileTokenizer(tmp_path / "none.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"stratagem\[tokenizers\]"):
        FileTokenizer(tmp_path / "bad.json")
