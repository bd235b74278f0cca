# SPDX-License-Identifier: Apache-2.0
"""A plan for a module that has none, of cuts that are right whatever stands around a layer.

    nn.Linear         by output features, which are put together again           `colwise_gather_output`
    nn.Embedding      by tokens                                                   `embedding_rowwise`
    nn.Sequential     two linear layers with functions of single features         `colwise`, `rowwise`
                      between them are a pair, and nothing is put together there

A layer whose weight somebody reads without calling the layer must stay whole: those of torch's own attention, and those
whose name the source of the user's classes reads the weight of (`self.head.weight`), outside of what sets a model up;
and those whose product is not that of their weight alone. A sequence that the source does more with than call it or a
constant slice of it (`self.net[:-1](x)`, `for layer in self.net`) has no pair that is parted there. What is read in a
way that the source does not show, under another name or by a hook, is not found: give such a module a plan.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from stratagem.plan import Plan
from stratagem.plugins.tensor.layers import why_not

_FEATURE_WISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity, nn.Softplus)
_SETTING_UP = ("__init__", "configure_optimizers", "configure_model", "init", "reset", "tie", "_init", "_reset")
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics")


def infer_plan(module: nn.Module, degree: int) -> Plan:
    """The plan for `degree` ranks: what has fewer features or tokens than ranks stays whole. Pure."""
    functions = _functions(module)
    read, parts = _read_weights(functions), _taken_parts(functions)
    styles: dict[str, str] = {}
    for name, layer in module.named_modules():
        if not name or name.rpartition(".")[2] in read:
            continue
        if type(layer) in (nn.Linear, nn.Embedding) and why_not(layer, type(layer)) is not None:
            continue
        if type(layer) is nn.Linear and layer.out_features >= degree:
            styles[name] = "colwise_gather_output"
        elif type(layer) is nn.Embedding and layer.num_embeddings >= degree and _is_ordinary(layer):
            styles[name] = "embedding_rowwise"
    for name, layer in module.named_modules():
        if type(layer) is nn.Sequential:
            for first, second, size in _pairs(name, layer, parts.get(name.rpartition(".")[2], [])):
                if size % degree == 0 and first in styles and second in styles:
                    styles.update({first: "colwise", second: "rowwise"})
    return replace(Plan(), tensor={name: styles[name] for name, _ in module.named_modules() if name in styles})


def _is_ordinary(layer: nn.Embedding) -> bool:
    return not (layer.max_norm or layer.scale_grad_by_freq or layer.sparse)


def _pairs(name: str, sequence: nn.Sequential, parts: list[slice | None]) -> Iterator[tuple[str, str, int]]:
    """Two linear layers with nothing but functions of single features between them, and how many those are.

    `parts` are those that the code takes of the sequence, None for one that is not known: a pair is never parted.
    """
    if None in parts:
        return
    places = range(len(sequence))
    taken = [places[part] for part in parts if part is not None]
    first: tuple[str, int, int] | None = None
    for place, (key, layer) in enumerate(sequence.named_children()):
        full = f"{name}.{key}" if name else key
        if type(layer) is nn.Linear:
            if first is not None and all((first[2] in part) == (place in part) for part in taken):
                yield first[0], full, first[1]
                first = None
            else:
                first = full, layer.out_features, place
        elif type(layer) not in _FEATURE_WISE:
            first = None


def _functions(module: nn.Module) -> list[ast.FunctionDef]:
    """The functions of the user's classes that a module consists of, but those that set it up."""
    classes = {base for part in module.modules() for base in type(part).__mro__ if base is not object}
    found: list[ast.FunctionDef] = []
    for each in classes:
        if each.__module__.partition(".")[0] in _LIBRARIES:
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError):
            continue
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        found += [function for function in functions if not function.name.startswith(_SETTING_UP)]
    return found


def _read_weights(functions: list[ast.FunctionDef]) -> set[str]:
    """Names of attributes of whose weight or bias somebody reads the value."""
    return {
        node.value.attr
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and node.attr in ("weight", "bias")
        and isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Attribute)
    }


def _taken_parts(functions: list[ast.FunctionDef]) -> dict[str, list[slice | None]]:
    """By name of an attribute, the parts that are taken of it: a slice, None where it is not a constant one."""
    found: dict[str, list[slice | None]] = defaultdict(list)
    for function in functions:
        above = {id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(function):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)):
                continue
            used, part = above.get(id(node)), None
            if isinstance(used, ast.Call) and used.func is node:
                continue
            if isinstance(used, ast.Subscript):
                called = above.get(id(used))
                part = _constant_slice(used.slice) if isinstance(called, ast.Call) and called.func is used else None
            found[node.attr].append(part)
    return found


def _constant_slice(index: ast.expr) -> slice | None:
    if not isinstance(index, ast.Slice):
        return None
    try:
        return slice(*(None if n is None else ast.literal_eval(n) for n in (index.lower, index.upper, index.step)))
    except ValueError:
        return None
