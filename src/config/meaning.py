# SPDX-License-Identifier: Apache-2.0
"""What types cannot say: a strategy nobody registered, more devices than there are, a file that is missing.

These checks look at values that are well-formed and would fail only once the run has begun.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry

from stratagem.config.sources import Settings
from stratagem.config.structure import Structure
from stratagem.errors import UserError
from stratagem.registry import near, strategies, unknown
from stratagem.strategy.lightning_registry import lightning_conflict, lightning_names, lightning_obstacle, names_to_show

_CUDA = ("gpu", "cuda")
_CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")


def check(structure: Structure) -> None:
    """Add every fault of meaning to the structure's errors."""
    settings = structure.settings
    trainer = settings.values.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    if "model" not in settings.values and not settings.unread:
        structure.fault(("model",), "the run names no model", do="add --config configs/gpt_tiny.yaml, or --model CLASS")
    _strategy(structure, trainer.get("strategy"))
    accelerator = trainer.get("accelerator", "auto")
    known = {"auto", "gpu", *AcceleratorRegistry.available_accelerators()}
    if isinstance(accelerator, str) and accelerator not in known:
        close = near(accelerator, known)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        path = ("trainer", "accelerator")
        structure.fault(path, f"no accelerator is called {accelerator!r}{hint}", allowed=", ".join(sorted(known)))
    elif "devices" in trainer and isinstance(accelerator, str):
        _devices(structure, trainer["devices"], accelerator)
    if isinstance(trainer.get("num_nodes", 1), int) and trainer.get("num_nodes", 1) < 1:
        structure.fault(("trainer", "num_nodes"), f"got {trainer['num_nodes']}", allowed="1 or more")
    _checkpoint(structure, settings.values.get("ckpt_path"))


def num_cpu_ranks(settings: Settings) -> int:
    """How many processes the run will have on this machine if it runs on CPU, else 0; 1 where it does not say."""
    trainer = settings.values.get("trainer")
    trainer = trainer if isinstance(trainer, dict) else {}
    accelerator, devices = trainer.get("accelerator", "auto"), trainer.get("devices", "auto")
    if accelerator != "cpu" and (accelerator != "auto" or torch.cuda.is_available()):
        return 0
    return int(devices) if str(devices).isdigit() else 1


def _strategy(structure: Structure, strategy: Any) -> None:
    if not isinstance(strategy, str):
        return
    path = ("trainer", "strategy")
    ours = strategies()
    entry = ours.get(strategy.lower()) or ours.get(strategy)
    conflict = lightning_conflict(entry) if entry else ""
    if entry is not None and not conflict:
        try:
            entry.load()
        except UserError as error:
            structure.fault(path, f"{error.where}: {error.what}", allowed=error.allowed, do=error.do)
        return
    names = {"auto", *lightning_names()}
    if strategy.lower() in names:
        if strategy.lower() != "auto" and (reason := lightning_obstacle(strategy.lower())):
            what, _, do = reason.partition(": ")
            structure.fault(path, f"{strategy} cannot run here: it {what}", do=do)
        return
    classes = {entry.value.rpartition(":")[2] for entry in ours.values()}
    if "." in strategy or strategy in classes:
        structure.open_class(path, strategy)
        return
    stranger = unknown(strategy, {"auto", *names_to_show()}, kind="strategy")
    structure.fault(path, stranger.what, allowed=stranger.allowed)


def _devices(structure: Structure, devices: Any, accelerator: str) -> None:
    path = ("trainer", "devices")
    on_cuda = accelerator in _CUDA or (accelerator == "auto" and torch.cuda.is_available())
    if not on_cuda and accelerator not in ("auto", "cpu"):
        return  # other accelerators count for themselves
    available = torch.cuda.device_count() if on_cuda else 0
    text = str(devices).strip()
    words = devices if isinstance(devices, list) else text.split(",") if "," in text else None
    if on_cuda and not available:
        structure.fault(("trainer", "accelerator"), "there is no CUDA device here", allowed="cpu")
        return
    if text == "auto" or (on_cuda and text == "-1"):
        return
    allowed = f"1 to {available}, -1 or auto, or a list of indices" if on_cuda else "auto, or 1 or more processes"
    if words is not None:
        indices = [str(word).strip() for word in words if str(word).strip()]
        wrong = [word for word in indices if not word.isdigit() or (on_cuda and int(word) >= available)]
        if wrong or not indices or not on_cuda:
            structure.fault(path, f"got {devices!r}", allowed=allowed)
    elif not text.isdigit() or int(text) < 1 or isinstance(devices, bool):
        structure.fault(path, f"got {devices!r}", allowed=allowed, do="write devices: 2")
    elif on_cuda and int(text) > available:
        structure.fault(path, f"asks for {text} CUDA devices, and {available} are here", allowed=allowed)


def _checkpoint(structure: Structure, checkpoint: Any) -> None:
    if isinstance(checkpoint, str) and checkpoint not in _CHECKPOINT_WORDS and "://" not in checkpoint:
        path = Path(checkpoint).expanduser()
        if not path.exists():
            others = [str(found) for found in path.parent.glob("*.ckpt")][:5] if path.parent.is_dir() else []
            allowed = ", ".join(["the path of a checkpoint", *others, *_CHECKPOINT_WORDS])
            structure.fault(("ckpt_path",), f"there is no checkpoint {checkpoint}", allowed=allowed)
