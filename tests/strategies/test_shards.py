"""Codes at a Ray cluster: a run there, and what it does when a shard dies."""

from clients import shards
from fedapp.runs.local import run_local
from tests.federated import model_bytes

MORE = {
    "drawn": {"subsample": 0.7},
    "masked": {"pax__aggregation": "secure"},
    "forest": {"strategy": "horizontal-forest", "horizontal_forest__trees": 3},
}


def test_shards(made, monkeypatch, two_nodes):
    models = [model_bytes(run_local(made(**more))) for more in MORE.values()]
    monkeypatch.setattr(shards, "FEWEST_CODES", 0)
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    assert [model_bytes(run_local(made(**more))) for more in MORE.values()] == models
