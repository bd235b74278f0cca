# SPDX-License-Identifier: Apache-2.0
"""What every test shares: it must leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from stratagem.testing.leaks import no_leaks

pytest_plugins = ["pytester"]

settings.register_profile("untimed", deadline=None)  # a busy machine makes no example wrong
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    """Fail the test that leaves threads, processes, variables, handlers or a process group behind."""
    with no_leaks():
        yield
