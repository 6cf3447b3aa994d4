"""Here the pages of runs are looked at."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _pages() -> None:
    """Runs have their pages."""
