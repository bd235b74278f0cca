# SPDX-License-Identifier: Apache-2.0
"""Every strategy that a Trainer can be told to use, and whether it can run on this machine."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

from lightning.pytorch.strategies import StrategyRegistry

from stratagem.errors import UserError
from stratagem.registry import Entry, strategies
from stratagem.strategy.lightning_registry import lightning_conflict, lightning_names, lightning_obstacle


@final
@dataclass(frozen=True, kw_only=True)
class Row:
    """One name: what it is, where it comes from, and why it cannot run here (empty: it can)."""

    name: str
    what: str
    distribution: str
    version: str
    origin: str
    why_not: str = ""


def rows(*, load: bool = True) -> list[Row]:
    """Ours first, then other packages', then Lightning's own; each in alphabetical order.

    Args:
        load: import each plugin to see whether it can be; without it, only what is seen from outside is told.
    """
    plugins = sorted((_plugin(entry, load=load) for entry in strategies().values()), key=lambda row: row.origin)
    return [*plugins, *(_lightnings(name) for name in lightning_names())]


def _plugin(entry: Entry, *, load: bool) -> Row:
    why_not = lightning_conflict(entry) or entry.refusal
    what = ""
    if load and not why_not:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                found = entry.load()
        except UserError as error:
            why_not = f"{error.what}: {error.do}" if error.do else error.what
        except BaseException as error:  # a module that ends the interpreter must not end this table
            why_not = f"its import failed with {type(error).__name__}"
        else:
            what = _first_line(found.__doc__)
            needs = getattr(found, "unavailable", None)
            why_not = needs() if callable(needs) else ""
    return Row(
        name=entry.name,
        what=what or first_line_unimported(entry),
        distribution=entry.distribution,
        version=entry.version,
        origin="ours" if entry.distribution == "stratagem" else "plugin",
        why_not=why_not,
    )


def _lightnings(name: str) -> Row:
    data: dict[str, Any] = StrategyRegistry[name]
    kind = data["strategy"].__name__
    description = (
        data["description"] if data["description"] not in ("", kind) else _first_line(data["strategy"].__doc__)
    )
    return Row(
        name=name,
        what=description,
        distribution="lightning",
        version=version("lightning"),
        origin="lightning",
        why_not=lightning_obstacle(name),
    )


def first_line_unimported(entry: Entry) -> str:
    """The first line of the class docstring, read from the source file; empty where it cannot be found.

    Follows one `from .module import Class` of a package's `__init__`; imports nothing.
    """
    module, _, attribute = entry.value.partition(":")
    with contextlib.suppress(OSError, SyntaxError, ValueError, ImportError):
        for _ in range(3):
            source = _source(module)
            if source is None:
                return ""
            tree = ast.parse(source.read_text(encoding="utf-8"))
            for node in tree.body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == attribute:
                    return _first_line(ast.get_docstring(node))
            target = _imported_from(tree, attribute)
            if target is None:
                return ""
            package = module if source.name == "__init__.py" else module.rpartition(".")[0]
            module = importlib.util.resolve_name("." * target.level + (target.module or ""), package)
    return ""


def _imported_from(tree: ast.Module, attribute: str) -> ast.ImportFrom | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any(alias.name == attribute for alias in node.names):
            return node
    return None


def _source(module: str) -> Path | None:
    """The file of a module, without importing its parents."""
    parts = module.split(".")
    spec = importlib.util.find_spec(parts[0])
    for depth in range(1, len(parts)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), list(spec.submodule_search_locations))
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().split("\n")[0].strip()
