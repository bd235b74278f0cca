# SPDX-License-Identifier: Apache-2.0
"""A plan for a module that has none, of cuts that are right whatever stands around a layer.

    nn.Linear         by output features, which are put together again           `colwise_gather_output`
    nn.Embedding      by tokens                                                   `embedding_rowwise`
    nn.Sequential     two linear layers with functions of single features         `colwise`, `rowwise`
                      between them are a pair, and nothing is put together there

A layer whose weight somebody reads without calling the layer must stay whole: those of torch's own attention, and those
whose name the source of the user's classes reads the weight of (`self.head.weight`), outside of what sets a model up. A
weight that is read in a way that the source does not show is not found: give such a module a plan.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from stratagem.plan import Plan

_FEATURE_WISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity, nn.Softplus)
_SETTING_UP = ("__init__", "configure_optimizers", "configure_model", "init", "reset", "tie", "_init", "_reset")
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics")


def infer_plan(module: nn.Module, degree: int) -> Plan:
    """The plan for `degree` ranks: what has fewer features or tokens than ranks stays whole. Pure."""
    read = _read_weights(module)
    styles: dict[str, str] = {}
    for name, layer in module.named_modules():
        if not name or name.rpartition(".")[2] in read:
            continue
        if type(layer) is nn.Linear and layer.out_features >= degree:
            styles[name] = "colwise_gather_output"
        elif type(layer) is nn.Embedding and layer.num_embeddings >= degree and _is_ordinary(layer):
            styles[name] = "embedding_rowwise"
    for name, layer in module.named_modules():
        if type(layer) is nn.Sequential:
            for first, second, size in _pairs(name, layer):
                if size % degree == 0 and not {first.rpartition(".")[2], second.rpartition(".")[2]} & read:
                    styles.update({first: "colwise", second: "rowwise"})
    return replace(Plan(), tensor={name: styles[name] for name, _ in module.named_modules() if name in styles})


def _is_ordinary(layer: nn.Embedding) -> bool:
    return not (layer.max_norm or layer.scale_grad_by_freq or layer.sparse)


def _pairs(name: str, sequence: nn.Sequential) -> Iterator[tuple[str, str, int]]:
    """Two linear layers with nothing but functions of single features between them, and how many those are."""
    first: tuple[str, int] | None = None
    for key, layer in sequence.named_children():
        full = f"{name}.{key}" if name else key
        if type(layer) is nn.Linear:
            if first is not None:
                yield first[0], full, first[1]
                first = None
            else:
                first = full, layer.out_features
        elif type(layer) not in _FEATURE_WISE:
            first = None


def _read_weights(module: nn.Module) -> set[str]:
    """Names of attributes of whose weight or bias the source of the module's classes reads the value."""
    classes = {base for part in module.modules() for base in type(part).__mro__ if base is not object}
    found: set[str] = set()
    for each in classes:
        if each.__module__.partition(".")[0] in _LIBRARIES:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError):
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and not function.name.startswith(_SETTING_UP):
                found |= {
                    node.value.attr
                    for node in ast.walk(function)
                    if isinstance(node, ast.Attribute)
                    and node.attr in ("weight", "bias")
                    and isinstance(node.ctx, ast.Load)
                    and isinstance(node.value, ast.Attribute)
                }
    return found
