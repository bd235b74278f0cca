# SPDX-License-Identifier: Apache-2.0
"""What Lightning says in every run and no user can do anything about, left out of the output of the command line.

Only in the command line, only while a run lasts, and only exactly these messages; a script that imports stratagem sees
all of them.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

LOG_LINES = (
    # Advertisements of two products.
    "💡 Tip: For seamless cloud",
    # That there is none, on a run that asked for none; "GPU available: True, used: False" stays.
    "GPU available: False, used: False",
    "TPU available: False, using: 0 TPU cores",
)
"""Beginnings of log messages that are left out."""

WARNINGS = (
    # Lightning 2.6 uses a name that torch 2.13 has deprecated; once per rank.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # Each run has a log folder of its own, so that this is true whenever a checkpoint of another run is read.
    r"The dirpath has changed from .* Only `best_model_path` will be reloaded",
)
"""Patterns of warnings that are left out."""

_LIGHTNING = ("lightning.pytorch", "lightning.fabric")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leaves those messages out, and begins each log message on a line of its own while a progress bar is drawn."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(_LIGHTNING)]
    handlers = [handler for logger in loggers for handler in logger.handlers]
    streams = {id(h): h.stream for h in handlers if isinstance(h, logging.StreamHandler)}
    with warnings.catch_warnings():
        for pattern in WARNINGS:
            warnings.filterwarnings("ignore", message=pattern)
        try:
            for filtered in (*loggers, *handlers):
                filtered.addFilter(_is_news)
            for handler in handlers:
                if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                    handler.setStream(_BesideTheBar())
            yield
        finally:
            for filtered in (*loggers, *handlers):
                filtered.removeFilter(_is_news)
            for handler in handlers:
                if isinstance(handler, logging.StreamHandler) and id(handler) in streams:
                    handler.setStream(streams[id(handler)])


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(LOG_LINES)


class _BesideTheBar:
    """Stderr, where text takes the place of the progress bar of this process, and the bar is drawn again below."""

    def write(self, text: str) -> None:
        if any(not bar.disable for bar in getattr(Tqdm, "_instances", ())):
            Tqdm.write(text, file=sys.stderr, end="")
        else:  # without tqdm's lock, which ranks inherit and may die with
            sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()
