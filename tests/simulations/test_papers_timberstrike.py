"""TimberStrike beside its authors' figures."""

import json

import numpy as np
import pytest

from fedapp.errors import DataError
from simulations.papers import timberstrike as study


@pytest.fixture
def code(tmp_path):
    """A folder like their code's: three clients' rows, and accuracies."""
    rng = np.random.default_rng(5)
    for client in range(study.CLIENTS):
        folder = tmp_path / study.ROWS / f"client_{client}" / "train"
        folder.mkdir(parents=True)
        values = rng.normal(size=(60, 4))
        np.save(folder / "x_train.npy", values)
        np.save(folder / "y_train.npy", (values[:, :1] > 0).astype(int))
    figures = tmp_path / study.FIGURES
    figures.parent.mkdir(parents=True)
    names = [name for _, names in study.SYSTEMS.values() for name in names]
    lines = [f"3,{name},{70 + place},,,60" for place, name in enumerate(names)]
    head = "Depth,System,Accuracy,Train F1,Train AUC,Baseline Accuracy"
    figures.write_text("\n".join([head, *lines]))
    return tmp_path


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """One depth and few rounds."""
    monkeypatch.setattr(study, "DEPTHS", (3,))
    monkeypatch.setattr(study, "ROUNDS", 10)


@pytest.mark.slow
def test_the_attack_stands_beside_the_authors_figures(code, tmp_path, monkeypatch):
    output = tmp_path / "out"
    systems = {name: study.SYSTEMS[name] for name in ("bagging", "pax")}
    monkeypatch.setattr(study, "SYSTEMS", systems)
    study.main(str(code), output=output)
    bagging, pax = json.loads((output / "tables.json").read_text())["rows"]
    assert (bagging["theirs"], bagging["their baseline"]) == ("70.0", 60)
    assert pax["theirs"] == "73.0 / 74.0"
    for row in (bagging, pax):
        assert row["bounds"] > row["bounds, a guess"]


def test_a_folder_without_their_rows_is_refused(tmp_path):
    with pytest.raises(DataError, match="must be a checkout"):
        study.main(str(tmp_path))


def test_the_victim_is_client_0_and_the_attacker_has_client_2s_rows(code, monkeypatch):
    seen = list[study.Target]()
    knowing = study.knowing
    monkeypatch.setattr(study, "knowing", lambda *each: seen.append(knowing(*each)) or seen[-1])
    clients = [study.rows_of(code / study.ROWS, client) for client in range(study.CLIENTS)]
    study.attacked(clients, "cyclic", 3)
    (target,) = seen
    truth, known = (np.sort(rows[:, 0]) for rows in (target.truth, target.known))
    np.testing.assert_allclose(truth, np.sort(clients[0]["x0"]), rtol=1e-6)
    np.testing.assert_allclose(known, np.sort(clients[2]["x0"]))
