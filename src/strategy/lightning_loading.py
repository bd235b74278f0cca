# SPDX-License-Identifier: Apache-2.0
"""Our folders through Lightning's own doors, so that whoever reads a checkpoint need not know who wrote it.

    MyModule.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    Trainer(strategy="ddp").fit(module, ckpt_path="runs/step=100.ckpt")

Lightning opens checkpoints as files in two places, in both by a function that the module has imported as `pl_load`.
Each is replaced by one that reads a folder with our manifest, whole, and hands everything else to the function that was
there. A Lightning that has no such name is left as it is: then `stratagem convert` makes a file of a folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, final

_DOORS = ("lightning.pytorch.core.saving", "lightning.fabric.plugins.io.torch_io")
_NAME = "pl_load"


@final
class FolderLoader:
    """Lightning's function, which reads our folders as well.

    Args:
        theirs: that function.
    """

    def __init__(self, theirs: Callable[..., Any]) -> None:
        self.theirs = theirs

    def __call__(self, path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        """The checkpoint; see `read_whole` for a folder.

        Raises:
            CheckpointError: a folder of ours is damaged.
        """
        from stratagem.strategy.opening import is_ours, read_whole  # only who reads a checkpoint needs what reads it

        if is_ours(path_or_url):
            return read_whole(path_or_url, *args, **kwargs)
        return self.theirs(path_or_url, *args, **kwargs)


def open_doors() -> None:
    """Replaces the functions; calling it again changes nothing."""
    for name in _DOORS:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        theirs = getattr(module, _NAME, None)
        if callable(theirs) and not isinstance(theirs, FolderLoader):
            setattr(module, _NAME, FolderLoader(theirs))
