"""The benchmark beside XGBoost's federated plugin."""

from __future__ import annotations

import pytest
import xgboost

from simulations.bench import pax_speed


def test_without_the_federated_plugin_the_benchmark_times_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(folder: object) -> tuple[str, str]:
        raise AssertionError("the table must not be read")

    monkeypatch.setattr(pax_speed, "write_table", read)
    monkeypatch.setattr(xgboost, "build_info", lambda: {"USE_FEDERATED": False})
    with pytest.raises(SystemExit, match=r"federated plugin.* pip install xgboost==3\.2\.0"):
        pax_speed.main([])
