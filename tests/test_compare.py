"""Strategies side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.config import Settings, load_settings
from fedapp.errors import ConfigError
from fedapp.report.tradeoff import score_table, tradeoff_page
from fedapp.run_folder import RunFolder
from fedapp.server_app import all_strategies
from fedapp.site.store import Store
from simulations.compare import POOLED, Comparison, compare
from simulations.engines import run_local
from strategies.inference import InferenceStrategy

SHORT: dict[str, Any] = {"num-boost-round": 2, "max-depth": 2, "max-bin": 16}


class Counted:
    """The local engine, and the runs it made."""

    def __init__(self) -> None:
        self.runs: list[str] = []

    def __call__(self, settings: Settings) -> RunFolder:
        self.runs.append(f"{settings.strategy}-{settings.seed}")
        return run_local(settings)


def compared(output: Path, engine: Counted, n_seeds: int = 2, **more: Any) -> Comparison:
    output.mkdir(exist_ok=True)
    return compare(["pax"], {**SHORT, **more}, n_seeds, output, engine)


def test_every_seed_is_a_run_and_a_line_is_their_mean(tmp_path: Path) -> None:
    engine = Counted()
    found = compared(tmp_path / "out", engine)
    assert engine.runs == ["pax-42", "pax-43"]
    summaries = [
        json.loads((tmp_path / "out" / name / "summary.json").read_text()) for name in engine.runs
    ]
    scores = [summary["metrics"]["test"]["auc"] for summary in summaries]
    pax = next(line for line in found.lines if line.name == "pax")
    assert pax.scores == tuple(scores)
    assert pax.mean == pytest.approx(np.mean(scores))
    assert pax.spread == pytest.approx(abs(scores[0] - scores[1]) / np.sqrt(2))
    assert pax.n_bytes == np.mean([sum(summary["bytes"].values()) for summary in summaries])


def test_the_baselines_stand_beside_and_the_best_is_first(tmp_path: Path) -> None:
    found = compared(tmp_path / "out", Counted(), n_seeds=1)
    names = {line.name for line in found.lines}
    assert names == {"pax", POOLED, "party-1 alone", "party-2 alone", "party-3 alone"}
    means = [line.mean for line in found.lines]
    assert means == sorted(means, reverse=True)


def test_a_smaller_error_is_the_better_one(tmp_path: Path) -> None:
    found = compared(
        tmp_path / "out", Counted(), n_seeds=1, data="diabetes", objective="reg:squarederror"
    )
    means = [line.mean for line in found.lines]
    assert found.metric == "rmse"
    assert means == sorted(means)


def test_a_finished_cell_is_not_run_again(tmp_path: Path) -> None:
    first = compared(tmp_path / "out", Counted(), n_seeds=1)
    engine = Counted()
    again = compared(tmp_path / "out", engine, n_seeds=2)
    assert engine.runs == ["pax-43"]
    line = next(line for line in again.lines if line.name == "pax")
    assert line.scores[0] == next(one for one in first.lines if one.name == "pax").scores[0]


def test_an_interrupted_cell_is_run_anew(tmp_path: Path) -> None:
    compared(tmp_path / "out", Counted(), n_seeds=1)
    (tmp_path / "out" / "pax-42" / "summary.json").unlink()
    engine = Counted()
    compared(tmp_path / "out", engine, n_seeds=1)
    assert engine.runs == ["pax-42"]


def test_cells_of_other_settings_are_not_taken_for_these(tmp_path: Path) -> None:
    compared(tmp_path / "out", Counted(), n_seeds=1)
    with pytest.raises(ConfigError, match=r"same settings, got another eta in pax-42: 0\.3"):
        compared(tmp_path / "out", Counted(), n_seeds=1, eta=0.1)


def test_there_is_at_least_one_seed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="seeds must be >= 1, got 0"):
        compared(tmp_path / "out", Counted(), n_seeds=0)


def test_the_page_and_the_table_hold_every_line(tmp_path: Path) -> None:
    found = compared(tmp_path / "out", Counted(), n_seeds=1)
    page = tradeoff_page(found.lines, found.metric, "breast-cancer", 1)
    for line in found.lines:
        assert line.name in page
        assert f"{line.mean:.4f}" in page
    assert page.count("<svg ") == 3
    assert score_table(found.lines, found.metric).row_count == len(found.lines)


# The rows that are scored


QUICK: dict[str, dict[str, Any]] = {
    "fedxgbllr": {"fedxgbllr.trees": 6, "fedxgbllr.rounds": 1, "fedxgbllr.epochs": 1},
    "fedavg-linear": {"fedavg-linear.rounds": 1},
    "secureboost": {"secureboost.key-bits": 512, "secureboost.insecure-small-key": True},
    "federated-forest": {"federated-forest.trees": 2, "federated-forest.max-depth": 2},
}
N_FIRST = 6  # columns that the first of five vertical parties has


Rows = set[tuple[float, ...]]


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> dict[Path, Rows]:
    """The first columns of the test rows that each site has; of vertical sites, the first has."""
    found: dict[Path, Rows] = {}
    commit = Store.commit

    def note(store: Store, *given: Any) -> None:
        is_first, is_split = store.folder.parent.name == "party-1", "n_test" in store.facts
        if "test.values" in store:
            rows = store["test.values"]
            found[store.folder] = set(map(tuple, rows[:, :N_FIRST].tolist()))
        elif is_first and is_split and "values" in store:
            rows = store["values"][-store.facts["n_test"] :]
            found[store.folder] = set(map(tuple, rows[:, :N_FIRST].tolist()))
        commit(store, *given)

    monkeypatch.setattr(Store, "commit", note)
    return found


def training_strategies() -> list[str]:
    found = all_strategies().items()
    return [name for name, strategy in found if not issubclass(strategy, InferenceStrategy)]


def test_every_method_holds_back_the_same_rows_of_a_table(
    tested: dict[Path, Rows], tmp_path: Path
) -> None:
    found = {}
    for number, strategy in enumerate(training_strategies()):
        parties = 5 if number % 2 else 3
        given = {**SHORT, **QUICK.get(strategy, {}), "strategy": strategy, "parties": parties}
        if strategy == "pax":
            given["partition"] = "dirichlet:0.5"
        run_local(load_settings({**given, "run-dir": str(tmp_path / str(number))}))
        found[strategy] = set.union(*tested.values())
        tested.clear()
    assert set(found) >= {"pax", "secureboost", "federated-forest"}
    expected = found["pax"]
    assert len(expected) == round(0.2 * 569)
    assert {name: rows for name, rows in found.items() if rows != expected} == {}
