# SPDX-License-Identifier: Apache-2.0
"""Which parameters stage 3 fetches together, found in the module's own structure. Pure.

    model                          block
      embed     Embedding            by itself: it owns parameters
      layers    ModuleList
        0       Block                whole: the child of a list
        1       Block                whole
      norm      LayerNorm            too small to be worth a message: stays whole on every rank
      head      Linear               by itself

The child of a ModuleList, ModuleDict or Sequential is one block, unless it holds so much of the model (a backbone
within a Sequential, say) that its own lists are the better blocks. Every other parameter goes with the module that owns
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from torch import nn

from stratagem.technique import unique

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LARGEST_SHARE = 0.25
"""Of the model's elements; a child of a list that holds more and has lists of its own is taken apart."""


@final
@dataclass(frozen=True, eq=False)
class Block:
    """Parameters that are fetched together, while `module` runs.

    Args:
        name: of the module.
        module: whose forward needs them.
        parameters: each in one block only.
        is_whole: whether it was made of everything below `module`, not of what `module` itself owns.
    """

    name: str
    module: nn.Module
    parameters: tuple[nn.Parameter, ...]
    is_whole: bool

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters)


def find_blocks(module: nn.Module) -> tuple[Block, ...]:
    """The blocks of a module, in the order of its modules; each parameter lies in one.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
        >>> [block.name for block in find_blocks(model)]
        ['0', '1.0', '1.1']
    """
    total = sum(parameter.numel() for parameter in unique(module.parameters()))
    taken: set[int] = set()
    blocks = []
    for name, owner, whole in _owners("", module, total):
        found = unique(p for p in owner.parameters(recurse=whole) if id(p) not in taken)
        taken.update(id(p) for p in found)
        if found:
            blocks.append(Block(name, owner, tuple(found), whole))
    return tuple(blocks)


def _owners(prefix: str, module: nn.Module, total: int) -> Iterator[tuple[str, nn.Module, bool]]:
    """Modules that get a block, and whether it takes what lies below them too."""
    if any(parameter is not None for parameter in module._parameters.values()):
        yield prefix, module, False
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(module, _LISTS) and not isinstance(child, _LISTS) and not _too_much(child, total):
            yield path, child, True
        else:
            yield from _owners(path, child, total)


def _too_much(child: nn.Module, total: int) -> bool:
    numel = sum(parameter.numel() for parameter in unique(child.parameters()))
    has_lists = any(isinstance(each, _LISTS) and len(each) > 1 for each in child.modules())
    return has_lists and numel > _LARGEST_SHARE * total
