# SPDX-License-Identifier: Apache-2.0
"""The shape of the project is what `pyproject.toml` says it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest

import stratagem

_ROOT = Path(__file__).resolve().parents[1]
_SRC = _ROOT / "src"
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())
_SOURCES = sorted(_SRC.rglob("*.py"))
_PACKAGES = sorted(".".join(["stratagem", *path.parent.relative_to(_SRC).parts]) for path in _SRC.rglob("__init__.py"))
_MAX_FILE_LINES = 400
_MAX_FUNCTION_LINES = 60


def _name(path: Path) -> str:
    return str(path.relative_to(_ROOT))


def test_every_package_is_listed() -> None:
    """A package that is missing from the list works in an editable install and is absent from the wheel."""
    listed = _PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(listed) == _PACKAGES
    assert len(set(listed)) == len(listed)


def test_declared_entry_points_are_the_installed_ones() -> None:
    project = _PROJECT["project"]
    declared = {
        (group, name, value) for group, points in project["entry-points"].items() for name, value in points.items()
    }
    declared |= {("console_scripts", name, value) for name, value in project["scripts"].items()}
    installed = {(point.group, point.name, point.value) for point in distribution("stratagem").entry_points}
    assert installed == declared, "run `pip install -e .`"


def test_every_entry_point_loads() -> None:
    for point in distribution("stratagem").entry_points:
        assert point.load() is not None, point


def test_the_layers_hold() -> None:
    # The console script sits beside the interpreter; the module form does not exist.
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    if not Path(command[0]).exists():
        pytest.skip("import-linter is not installed; it is part of the extra `dev`")
    result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", _SOURCES, ids=_name)
def test_files_and_functions_are_short_enough_to_read(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= _MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno + 1 <= _MAX_FUNCTION_LINES, f"{node.name}, line {node.lineno}"


@pytest.mark.parametrize("path", [*_SOURCES, *sorted((_ROOT / "tests").rglob("*.py"))], ids=_name)
def test_every_file_names_its_licence_first(path: Path) -> None:
    text = path.read_text()
    assert not text or text.startswith("# SPDX-License-Identifier: Apache-2.0\n")


def test_the_package_has_one_name_only() -> None:
    """A second import as `src` would make a second registry and a second class of every name."""
    result = subprocess.run([sys.executable, "-c", "import src"], cwd=_ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert "ImportError" in result.stderr
    assert "'stratagem', not 'src'" in result.stderr


def _public() -> Iterator[tuple[str, str]]:
    for module in ["stratagem", *(found.name for found in pkgutil.walk_packages(stratagem.__path__, "stratagem."))]:
        if not module.endswith("__main__"):
            for name in getattr(importlib.import_module(module), "__all__", ()):
                yield module, name


@pytest.mark.parametrize(("module", "name"), list(_public()))
def test_every_public_name_exists_and_is_explained(module: str, name: str) -> None:
    value = getattr(importlib.import_module(module), name)
    if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value):
        doc = inspect.getdoc(value) if not inspect.isclass(value) else value.__dict__.get("__doc__")
        assert doc, f"{module}.{name} has no docstring"
        assert not doc.startswith(f"{getattr(value, '__name__', '')}("), (
            "the docstring that dataclasses make up says nothing"
        )
