# SPDX-License-Identifier: Apache-2.0
"""Installed packages that are not: metadata folders on `sys.path`, which is all that entry points are read from."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch,
    site: Path,
    distribution: str,
    *,
    strategies: Mapping[str, str] | None = None,
    techniques: Mapping[str, str] | None = None,
    modules: Mapping[str, str] | None = None,
    requires: tuple[str, ...] = (),
) -> None:
    """Make `distribution` 1.0 look installed in `site` for the rest of the test.

    Args:
        monkeypatch: undoes the change of `sys.path` and of `sys.modules`.
        site: an empty folder, made if missing; several packages may share it.
        distribution: name of the package.
        strategies: registered name to entry-point value.
        techniques: the same for the other group.
        modules: module name to source text.
        requires: lines of `Requires-Dist`.
    """
    info = site / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n{needs}")
    groups = {"stratagem.strategies": strategies or {}, "stratagem.techniques": techniques or {}}
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for name, source in (modules or {}).items():
        (site / f"{name}.py").write_text(source)
        monkeypatch.setitem(sys.modules, name, None)  # remembered as absent, so that undoing forgets the import
        monkeypatch.delitem(sys.modules, name)
    if str(site) not in sys.path:
        monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
