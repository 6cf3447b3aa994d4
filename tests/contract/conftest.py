"""Runs of each method: made for a test, or once for all tests that only look at them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fedapp.crypto.noise import Budget
from fedapp.home import home
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.settings import Settings, load_settings
from fedapp.site import sums
from strategies.run import load_strategy
from tests.contract.methods import METHODS, ROUNDS
from tests.federated import summary_of, train_once
from tests.network import run
from tests.tables import made_columns, write_rows
from tests.transcript import Listener

N_ROWS = 120
NUMBERS = "reg:squarederror"


@dataclass(frozen=True)
class Recorded:
    """A run in which nothing happens, with all its messages.

    Parameters
    ----------
    sites : files that the parties have afterwards, by their paths below the sites' home.
    """

    settings: Settings
    folder: RunFolder
    app: Listener
    result: object
    summary: dict[str, Any]
    rounds: list[dict[str, Any]]
    sites: dict[str, bytes]

    @property
    def steps(self):
        """What was asked at each step."""
        return {line["step"]: line["type"] for line in self.folder.ledger}

    @property
    def last_step(self):
        """The last step but one at which party-2 was asked."""
        asked = {line["step"] for line in self.folder.ledger if line["to"] == "party-2"}
        return sorted(asked)[-2]


@pytest.fixture(autouse=True)
def _silent(monkeypatch):
    """Noise is 0 and nobody expects any, so that private runs can be compared."""
    monkeypatch.setattr(sums, "discrete_gaussian", lambda v, n, _: np.zeros(n, np.int64))
    monkeypatch.setattr(Budget, "deviation", lambda *_: 0.0)


def settings_of(method, folder, trained_once, objective, **more):
    """A short run of a method into a new folder; what it predicts with is trained first."""
    data = folder / f"{objective[:5]}.csv"
    if not data.exists():
        write_rows(data, made_columns(objective, N_ROWS))
    parties, depth = more.pop("parties", 3), more.pop("depth", 2)
    n_runs = len(list(folder.glob("run-*")))
    (run_dir := folder / f"run-{n_runs + 1}").mkdir()
    given = {"data": str(data), "parties": parties, "run_dir": str(run_dir)}
    if method.trained:
        trainer = METHODS[method.trained]
        usual = {"columns": "random", "parties": parties, "depth": depth}
        trained = settings_of(trainer, folder, trained_once, objective, **usual)
        trained = trained.model_copy(update={"run_dir": str(folder / "trained")})
        if not (folder / "trained").exists():
            trained_once(trained)
        model = summary_of(RunFolder(folder / "trained"))["model_id"]
        given |= {"model": model, "align": "ordered", "columns": "random"}
        depth = None
    else:
        given |= {"label": "y", "objective": objective}
    unchanged = load_settings({"strategy": method.strategy})
    read = load_strategy(method.strategy).settings_read(unchanged)
    if "num-boost-round" in read:
        given |= {"num_boost_round": ROUNDS, "eta": 0.3, "max_bin": 16}
    given |= {"early_stopping_rounds": 0} if "early-stopping-rounds" in read else {}
    given |= {method.depth: depth} if method.depth and depth else {}
    given |= {**method.settings, **more}
    if objective != "reg:squarederror":  # whose gradients alone have no bound
        given.pop("privacy__clip", None)
    values = {name.replace("__", ".").replace("_", "-"): one for name, one in given.items()}
    return load_settings({"strategy": method.strategy, **values})


@pytest.fixture
def made(tmp_path, trained_once):
    """``made(name, objective, **overrides)``: settings of a short run of a method."""

    def make(name, objective=NUMBERS, **more):
        return settings_of(METHODS[name], tmp_path, trained_once, objective, **more)

    return make


@pytest.fixture
def trained(made, trained_once):
    """``trained(name, objective)``: settings and folder of a short run, trained for the first test
    that asks; one that predicts is run at once, at the sites of its model."""

    def train(name, objective):
        settings = made(name, objective)
        return settings, (run_local if METHODS[name].trained else trained_once)(settings)

    return train


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """``recorded(name)``: a method's run of three parties, made for the first test that asks."""
    runs = {}

    def record(name):
        if name not in runs:
            method, folder = METHODS[name], tmp_path_factory.mktemp("recorded")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FEDAPP_HOME", str(folder / "home"))
                once = train_once(folder / "once")
                settings, app = settings_of(method, folder, once, NUMBERS), Listener()
                done = run(settings, app=app)
                files = [path for path in (home() / "sites").rglob("*") if path.is_file()]
                runs[name] = Recorded(
                    settings,
                    done,
                    app,
                    method.result(done),
                    summary_of(done),
                    done.rounds if done.rounds_file.exists() else [],
                    {str(path.relative_to(home() / "sites")): path.read_bytes() for path in files},
                )
        return runs[name]

    return record
