# SPDX-License-Identifier: Apache-2.0
"""Where nothing can be renamed in one step (object stores, whatever fsspec opens): the manifest is the commit.

    s3://bucket/step=100.ckpt/
        rank-00000.bin      each rank writes its file on its own disk, and then sends it
        objects.pt
        manifest.json       sent last, as one object: without it there is no checkpoint

One that is replaced (`last.ckpt`) keeps its files until the new manifest is there: those of the new one go into a
folder of their own within, which its manifest names as `within`. A store that shows half an object under its name
while it is sent breaks this; the common ones do not.

This is the small version: every rank that loads fetches all files into a temporary folder first; none of the older
checkpoints is looked at when one is damaged; and what died on its way stays in the store, without a manifest, until a
checkpoint of that name is saved or removed.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, final

from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it has no annotations

from stratagem.checkpoint.commit import write_text
from stratagem.checkpoint.manifest import MANIFEST, METADATA, Manifest
from stratagem.errors import CheckpointError

_WITHIN = "within"


def is_remote(path: Any) -> bool:
    """Whether a path is none of this machine's file system.

    >>> is_remote("s3://bucket/a.ckpt"), is_remote("file:///a.ckpt"), is_remote("/a.ckpt")
    (True, False, False)
    """
    text = str(path)
    return "://" in text and not text.startswith(("file://", "local://"))


@final
class Upload:
    """A checkpoint on its way to a store. Each rank has one; rank 0's commits.

    Args:
        url: the folder that it will be.
        within: of rank 0's, for the other ranks; on rank 0 left out, and asked of the store.

    Attributes:
        folder: a temporary one on this machine, into which the rank writes.
        within: where the files go, relative to the url.

    Raises:
        CheckpointError: the store cannot be opened.
    """

    def __init__(self, url: str, within: str | None = None) -> None:
        self._url = url
        if within is None:
            within = f"{secrets.token_hex(4)}/" if is_checkpoint(url) else ""
        self.within = within
        self.folder = Path(tempfile.mkdtemp(prefix="stratagem-"))

    def send(self, name: str) -> None:
        """Sends one file of the folder.

        Raises:
            CheckpointError: with the store's reason.
        """
        with _told("sent", self._url):
            store, path = url_to_fs(self._url)
            store.makedirs(f"{path}/{self.within}".rstrip("/"), exist_ok=True)
            store.put_file(str(self.folder / name), f"{path}/{self.within}{name}")

    def commit(self, manifest: Manifest, at: Callable[[Literal["manifest", "renamed"], Path], None]) -> None:
        """Sends the manifest, when all else is there; what it replaces is gone afterwards. Rank 0 alone.

        Raises:
            CheckpointError: with the store's reason.
        """
        self.send(METADATA)
        about = {**manifest.about, _WITHIN: self.within}
        write_text(self.folder / MANIFEST, replace(manifest, about=about).to_json())
        at("manifest", self.folder)
        with _told("committed", self._url):
            store, path = url_to_fs(self._url)
            store.put_file(str(self.folder / MANIFEST), f"{path}/{MANIFEST}")
            at("renamed", self.folder)
            keep = {MANIFEST, *([self.within.rstrip("/")] if self.within else [METADATA, *manifest.files])}
            for found in store.ls(path, detail=False):
                if Path(found).name not in keep:
                    store.rm(found, recursive=True)

    def discard(self) -> None:
        """Gives it up: what was sent is no checkpoint, and stays until one of that name is saved or removed."""

    def close(self) -> None:
        """Removes the temporary folder; every rank calls it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def fetch(url: str, into: Path) -> None:
    """Fetches a committed checkpoint into a folder, which is one of this machine's then. Local.

    Raises:
        CheckpointError: there is none, or it cannot be fetched.
    """
    with _told("fetched", url):
        store, path = url_to_fs(url)
        if not store.exists(f"{path}/{MANIFEST}"):
            raise CheckpointError("there is no manifest, so this is no checkpoint", where=url, do="name another one")
        store.get_file(f"{path}/{MANIFEST}", str(into / MANIFEST))
        manifest = Manifest.from_json((into / MANIFEST).read_text(encoding="utf-8"), url)
        within = manifest.about.get(_WITHIN, "")
        for name in manifest.files:
            store.get_file(f"{path}/{within}{name}", str(into / name))


def is_checkpoint(url: str) -> bool:
    """Whether there is a manifest."""
    with _told("opened", url):
        store, path = url_to_fs(url)
        return bool(store.exists(f"{path}/{MANIFEST}"))


def remove(url: str) -> None:
    """Removes a checkpoint such that no half of it passes for one: first the manifest, then the files. Rank 0 alone."""
    with _told("removed", url):
        store, path = url_to_fs(url)
        if store.exists(f"{path}/{MANIFEST}"):
            store.rm_file(f"{path}/{MANIFEST}")
        if store.exists(path):
            store.rm(path, recursive=True)


@contextlib.contextmanager
def _told(what: str, url: str) -> Iterator[None]:
    """Stores raise what they like: it becomes an error that says what could not be done, and where."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise CheckpointError(f"the checkpoint cannot be {what}: {reason}", where=url) from error
