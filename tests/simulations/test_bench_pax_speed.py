"""The benchmark beside XGBoost's federated plugin."""

from __future__ import annotations

import pytest
import xgboost

from simulations.bench import trees


def test_without_the_federated_plugin_the_benchmark_times_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(folder: object) -> tuple[str, str]:
        raise AssertionError("the table must not be read")

    monkeypatch.setattr(trees, "write_speed_table", read)
    monkeypatch.setattr(xgboost, "build_info", lambda: {"USE_FEDERATED": False})
    with pytest.raises(SystemExit, match=r"federated plugin.* pip install xgboost==3\.2\.0"):
        trees.pax_speed_main([])
