"""Parties that predict together, with a model whose parts they have; written at the active one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.config import Settings, load_settings, settings_named
from fedapp.data.predictions import check_suffix
from fedapp.data.sources import party_sources, sources_to_predict
from fedapp.engines import SIMULATED, check_engine
from fedapp.errors import ConfigError
from fedapp.home import home, open_private
from fedapp.housekeeping import predictions_folder
from fedapp.messages.methods import all_methods
from fedapp.predict import Predicted, trained_settings
from fedapp.run_folder import RunFolder
from fedapp.session import carry_out, check_tables, passing, run_dir_of
from fedapp.watch import Watcher

# What a run that predicts has of the one that has trained, and what only simulated parties need.
TRAINED = ("parties", "columns", "align", "align-most-rows", "seed")
OF_SIMULATED = ("label", "weight", "schema", "header", "decimal", "encoding")


@dataclass(frozen=True, slots=True)
class Together:
    """What parties have predicted.

    Parameters
    ----------
    predicted : None where it lies on other machines.
    explained : what each party says of rows to explain, by its name; empty where there are none.
    """

    predicted: Predicted | None
    explained: Mapping[str, Mapping[str, Any]]


def settings_to_predict(
    run_dir: Path, parts: Mapping[str, Any], overrides: Mapping[str, Any], output: str, engine: str
) -> Settings:
    """Settings of a run that predicts.

    Parameters
    ----------
    run_dir : of the run that has trained.
    parts : where the parts of its model lie.
    overrides : settings by their names; ``strategy`` is the way to predict.
    output : file to be written; empty where the active party chooses it.

    Raises
    ------
    ConfigError : there is no such way, or the tables are not the parties'.
    """
    from fedapp.server_app import check_read, load_strategy

    known = [name for name, method in all_methods().items() if not method.trains]
    if overrides["strategy"] not in known:
        got = overrides["strategy"]
        raise ConfigError(f"inference must be one of {', '.join(known)}, got {got!r}")
    if output:
        check_suffix(Path(output))
    trained = trained_settings(run_dir)
    names = list(TRAINED)
    if engine in SIMULATED:
        names += OF_SIMULATED
        parties = {parts["active"], *parts["passive"]}
        shared = not party_sources(trained["data"], trained["parties"])
        sources_to_predict(overrides["data"], parties, may_be_one=shared)
    given = {name: trained[name] for name in names}
    overrides = settings_named(overrides)
    given |= {"model": parts["model_id"], **overrides}
    if output:
        given["output"] = Path(output).suffix
    settings = load_settings(given)
    if settings.log:
        rule = "must be empty to predict (fedapp run logs a model that it trains)"
        raise ConfigError(f"log {rule}, got {settings.log}")
    load_strategy(settings.strategy).own_settings(settings)
    check_read(settings, overrides)
    check_engine(engine)
    return settings


def predict_together(
    settings: Settings, parts: Mapping[str, Any], output: str, engine: str, watcher: Watcher
) -> Together:
    """Have the parties predict.

    Parameters
    ----------
    settings : as ``settings_to_predict`` makes them.

    Raises
    ------
    FedappError : they cannot; a note on it says where the run's folder is kept.
    """
    check_tables(settings, engine, watcher)
    place = run_dir_of(settings, engine, predictions_folder())
    with passing(place, stays=bool(settings.run_dir)):
        run = settings.model_copy(update={"run_dir": place})
        folder = carry_out(run, engine, watcher)
        if folder is None or engine not in SIMULATED:
            return Together(None, {})
        return _collected(folder, parts, settings, Path(output))


def _collected(
    folder: RunFolder, parts: Mapping[str, Any], settings: Settings, output: Path
) -> Together:
    """Take what simulated parties have written."""
    summary = folder.summary
    sites, active = home() / "sites", parts["active"]
    site = sites / active / summary["model_id"]
    with open_private(Path(output), "wb") as file:
        file.write((site / f"predictions{settings.output}").read_bytes())
    found = json.loads((site / "predictions.json").read_text())
    explained = {}
    if settings.explain:
        for party in (active, *parts["passive"]):
            path = sites / party / summary["model_id"] / "explanation.json"
            explained[party] = json.loads(path.read_text())
    return Together(
        Predicted(
            found["rows"],
            found["not_matched"],
            summary["tables"],
            found["scores"],
            found["note"],
            summary["warnings"],
        ),
        explained,
    )
