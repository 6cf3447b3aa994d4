"""Here the pages of runs are looked at."""

import pytest


@pytest.fixture(autouse=True)
def _pages():
    """Runs have their pages."""


@pytest.fixture(scope="session")
def binary(tmp_path_factory):
    """A run with baselines at which many tests look."""
    from tests.report.test_page import run

    path = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(path / "home"))
        return run(path / "run", "pax", "--baselines")
