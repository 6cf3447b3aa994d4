"""Here the pages of runs are looked at."""

import pytest


@pytest.fixture(autouse=True)
def _pages():
    """Runs have their pages."""
