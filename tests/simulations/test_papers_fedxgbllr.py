"""The tables of the FedXGBllr paper."""

import json
from typing import Any

import pytest

from fedapp.data.datasets import find_dataset
from fedapp.runs.baselines import run_baselines
from fedapp.settings import load_settings
from simulations.papers import fedxgbllr as paper

SHORT = {"trees": 4, "max-depth": 3, "rounds": 2, "epochs": 2, "channels": 8}


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a second."""

    def settings_of(data: str, seed: int, more: dict[str, Any]) -> Any:
        own = {f"fedxgbllr.{name}": value for name, value in SHORT.items()}
        given = {"objective": "binary:logistic", "test-fraction": 0.25, **own, **more}
        return load_settings({"data": data, "seed": seed, **given})

    monkeypatch.setattr(paper, "settings_of", settings_of)
    monkeypatch.setattr(paper, "POOLED", {"num-boost-round": 4, "max-depth": 3})


def test_the_settings_are_the_papers():
    settings = paper.settings_of("breast-cancer", 42, {"strategy": "fedxgbllr"})
    own = settings.sections["fedxgbllr"]
    assert (own["max-depth"], own["eta"], own["rounds"], own["epochs"]) == (8, 0.1, 10, 100)
    assert (own["batch-size"], own["learning-rate"], own["channels"]) == (64, 0.001, 64)
    assert settings.test_fraction == 0.25


def test_every_set_of_the_paper_is_in_the_registry_with_its_head_figures():
    assert list(paper.PAPER) == list(paper.PAPER_HEADS)
    for name in paper.PAPER:
        assert find_dataset(name).task in ("binary", "regression")
        # Table 4's first column repeats Table 2's 5 clients.
        assert paper.PAPER_HEADS[name][0] == paper.PAPER[name][paper.HEADS_CLIENTS]


def test_heads_have_the_papers_numbers_of_weights():
    for (head, n_clients), printed in paper.PAPER_WEIGHTS.items():
        assert paper.weights_of(head, n_clients) == printed, (head, n_clients)


def test_every_set_has_each_number_of_clients_and_each_head():
    second, fourth = paper.planned(["a", "b"], [2, 5], [1, 2])
    assert [cell[:2] for cell in second[:4]] == [*(("a", 2), ("a", 5), ("b", 2), ("b", 5))]
    assert [head for _, _, head, _ in fourth[:3]] == list(paper.HEADS)
    assert (len(second), len(fourth)) == (8, 12)


@pytest.mark.parametrize(
    ("data", "n_clients", "ours", "shown"),
    [
        ("a9a", 2, 84.1, "-1.00"),
        ("a9a", 5, 85.2, "+0.10"),
        ("abalone", 2, 4.1, "x 1.14"),
        ("abalone", 3, 4.0, ""),
        ("breast-cancer", 2, 90.0, ""),
    ],
)
def test_a_score_is_held_against_the_paper(data, n_clients, ours, shown):
    assert paper.beside_paper(data, n_clients, ours) == shown


def test_equation_6_gives_the_papers_6_megabytes_at_10_clients():
    assert [paper.eq_6(n_clients) for n_clients in (2, 5, 10, 3)] == ["2.8", "4.0", "6.0", ""]


def test_errors_are_squared_and_accuracies_percents():
    assert paper.score("reg:squarederror", {"rmse": 3.0}) == 9.0
    assert paper.score("multi:softprob", {"accuracy": 0.5}) == 50.0


def test_bytes_are_sorted_by_what_they_carry():
    kinds = ("query.hello", "train.fedxgbllr_fit", "train.fedxgbllr_share")
    kinds += ("train.fedxgbllr_average", "evaluate.fedxgbllr_final")
    ledger = [{"type": kind, "bytes": 10**place} for place, kind in enumerate(kinds)]
    assert paper.bytes_by_use(ledger) == {
        "head_bytes": 1000,
        "trees_bytes": 110,
        "other_bytes": 10001,
    }


@pytest.mark.usefixtures("_short")
def test_pooled_xgboost_is_that_of_the_baselines():
    settings = paper.settings_of("breast-cancer", 42, paper.POOLED)
    found = paper.pooled_scores(settings)
    # Without rows held back, as the paper's.
    whole = settings.model_copy(update={"valid_fraction": 0.0, "asked_parties": 1})
    assert found["test"] == pytest.approx(100 * run_baselines(whole)["pooled"]["accuracy"])
    assert found["all"] > found["test"]


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
def test_all_tables_are_written_and_finished_runs_are_not_run_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper, "HEADS", ("cnn", "fcnn"))
    output = tmp_path / "out"
    paper.main(sets=("breast-cancer",), clients=(2,), output=output)
    first = json.loads((output / "tables.json").read_text())
    assert [row["clients"] for row in first["table_2"]] == [2]
    assert [row["head"] for row in first["table_4"]] == ["cnn", "fcnn"]
    assert all(50 < row["score"] <= 100 for row in first["table_2"] + first["table_4"])
    assert first["versions"].keys() >= {"fedapp", "xgboost"}
    assert not list((tmp_path / "home" / "sites").glob("*/*/model.json"))

    monkeypatch.setattr(paper, "run_and_tidy", None)
    capsys.readouterr()
    paper.main(sets=("breast-cancer",), clients=(2,), output=output)
    again = json.loads((output / "tables.json").read_text())
    assert again["table_2"] == first["table_2"]
    assert capsys.readouterr().out.count("finished before") == 3
