# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in stores that cannot rename: the manifest comes last, and is the commit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.core import saving

from stratagem.checkpoint import remote
from stratagem.checkpoint.manifest import MANIFEST, METADATA, OBJECTS, rank_file
from stratagem.checkpoint.remote import Upload
from stratagem.errors import CheckpointError
from stratagem.strategy import FaultTolerantCheckpointIO
from stratagem.testing import run_ranks
from tests.checkpoint.test_crash import joined, state_of


class Bucket(LocalFileSystem):
    """A store that all ranks reach, and that is none of the local file system as far as anybody can tell."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("bucket://")))


fsspec.register_implementation("bucket", Bucket, clobber=True)


@pytest.fixture(autouse=True)
def nothing_temporary_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    assert list((tmp_path / "temporary").glob("stratagem-*")) == []


def value_in(url: str) -> float:
    found = FaultTolerantCheckpointIO().load_checkpoint(url)
    return float(found["state_dict"]["w"].unique()) + found["global_step"]


def state(step: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((3,), float(step))}, "global_step": step}


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_saved_replaced_and_removed_in_memory(async_save: bool) -> None:
    io, url = FaultTolerantCheckpointIO(async_save), "memory://runs/last.ckpt"
    store = fsspec.filesystem("memory")
    for step in (1, 2, 3):
        io.save_checkpoint(state(step), url)
        io.settle()
        assert value_in(url) == 2 * step
        assert float(saving.pl_load(url)["state_dict"]["w"][0]) == step
        assert len(store.find("/runs/last.ckpt")) == 4, "what was replaced is gone"
    io.remove_checkpoint(url)
    assert not store.exists("/runs/last.ckpt")
    with pytest.raises(CheckpointError, match="there is no manifest"):
        io.open_checkpoint(url)
    torch.save(state(7), store.open("memory://runs/plain.ckpt", "wb"))


@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replaced"])
def test_without_its_manifest_it_is_none_and_what_was_there_stays(
    replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"bucket://{tmp_path}/a"
    if replaces:
        FaultTolerantCheckpointIO().save_checkpoint(state(1), url)

    def dies(upload: Upload, *_: Any) -> None:
        upload.send(METADATA)
        raise OSError(5, "the line is cut")

    with monkeypatch.context() as cut:
        cut.setattr(Upload, "commit", dies)
        with pytest.raises(CheckpointError, match="the line is cut"):
            FaultTolerantCheckpointIO().save_checkpoint(state(2), url)
    assert remote.is_checkpoint(url) == replaces
    if replaces:
        assert value_in(url) == 2.0
    FaultTolerantCheckpointIO().save_checkpoint(state(3), url)
    assert value_in(url) == 6.0
    names = {path.name for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert names == {MANIFEST, METADATA, OBJECTS, rank_file(0)}


def test_what_is_damaged_in_a_store_is_refused(tmp_path: Path) -> None:
    FaultTolerantCheckpointIO().save_checkpoint(state(1), f"bucket://{tmp_path}/a")
    (tmp_path / "a" / OBJECTS).unlink()
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        FaultTolerantCheckpointIO().load_checkpoint(f"bucket://{tmp_path}/a")
    (tmp_path / "a" / OBJECTS).write_bytes(b"something else")
    with pytest.raises(CheckpointError, match=r"damaged: objects.pt has 14 bytes"):
        saving.pl_load(f"bucket://{tmp_path}/a")
    with pytest.raises(CheckpointError, match="keep_last: only in local folders"):
        FaultTolerantCheckpointIO(keep_last=1).save_checkpoint(state(2), f"bucket://{tmp_path}/b")


def through_a_bucket(folder: Path) -> float:
    """Two ranks save, and each loads all."""
    io = FaultTolerantCheckpointIO(async_save=True)
    joined(io)
    for step in (1, 2):
        io.save_checkpoint(state_of(step), f"bucket://{folder}/a")
    io.settle()
    loaded = io.load_checkpoint(f"bucket://{folder}/a")
    io.leave()
    return float(loaded["state_dict"]["cut"].unique())


def test_ranks_send_their_own_files(tmp_path: Path) -> None:
    assert run_ranks(2, through_a_bucket, {"folder": tmp_path}) == [2.0, 2.0]


def test_file_urls_are_local(tmp_path: Path) -> None:
    io = FaultTolerantCheckpointIO()
    io.save_checkpoint(state(1), f"file://{tmp_path}/a")
    assert io.load_checkpoint(f"file://{tmp_path}/a")["global_step"] == 1
    assert (tmp_path / "a" / MANIFEST).is_file()
    assert float(saving.pl_load(f"file://{tmp_path}/a")["state_dict"]["w"][0]) == 1
