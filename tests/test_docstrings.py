# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring runs.

The modules are found by name: doctests by path would import each file a second time, under a second name.
"""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import stratagem

_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_MODULES = ["stratagem", *(found.name for found in pkgutil.walk_packages(stratagem.__path__, "stratagem."))]


@pytest.mark.parametrize("name", [name for name in _MODULES if not name.endswith("__main__")])
def test_the_examples_are_true(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=_OPTIONS)
    assert result.failed == 0, capsys.readouterr().out


def test_examples_are_found_at_all() -> None:
    module = importlib.import_module("stratagem.measure.memory")
    assert doctest.testmod(module, optionflags=_OPTIONS).attempted >= 3
