# SPDX-License-Identifier: Apache-2.0
"""stratagem: parallel training strategies as PyTorch Lightning plugins.

Importing this package makes every registered name known to Lightning, and lets Lightning read our checkpoints, which
are folders: after `import stratagem`, `Trainer(strategy="ring_ddp")` works, and
`LightningModule.load_from_checkpoint` takes what it has saved. No plugin is imported before a Trainer names it.
"""

if __name__ != "stratagem":  # `import src` would make a second registry and a second class of every name
    raise ImportError(f"this package is 'stratagem', not {__name__!r}: run `pip install -e .` and import stratagem")

from stratagem.strategy.lightning_loading import open_doors
from stratagem.strategy.lightning_registry import register_strategies

__version__ = "0.1.0"
__all__ = ["__version__", "register_strategies"]

register_strategies()
open_doors()
