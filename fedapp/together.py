"""Joint prediction with a divided model; the active party writes the predictions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedapp.data.datasets import party_sources, sources_to_predict
from fedapp.data.predictions import check_suffix
from fedapp.engines import SIMULATED, check_engine
from fedapp.errors import ConfigError
from fedapp.home import home, open_private
from fedapp.housekeeping import predictions_folder
from fedapp.messages.fields import all_methods
from fedapp.predict import Predicted, trained_settings
from fedapp.run_folder import RunFolder, Watcher
from fedapp.session import carry_out, check_tables, passing, run_dir_of
from fedapp.settings import Settings, load_settings, settings_named

# Settings that a prediction takes from the training run; the second only for simulated parties.
TRAINED = ("parties", "columns", "align", "align-most-rows", "seed")
OF_SIMULATED = ("label", "weight", "schema", "header", "decimal", "encoding")


@dataclass(frozen=True, slots=True)
class Together:
    """Result of a joint prediction."""

    predicted: Predicted | None  # None if it is on another machine
    explained: Mapping[str, Mapping[str, Any]]  # explanations by party; may be empty


def settings_to_predict(
    run_dir: Path, parts: Mapping[str, Any], overrides: Mapping[str, Any], output: str, engine: str
) -> Settings:
    """Settings of a run that predicts with the divided model of another run.

    Parameters
    ----------
    parts : parties of the model, see ``fedapp.predict.parts_of``.
    overrides : settings by their names; ``strategy`` is the way to predict.
    output : file to write; empty if the active party chooses it.
    """
    from fedapp.server_app import check_read, load_strategy

    methods = [name for name, method in all_methods().items() if not method.trains]
    if overrides["strategy"] not in methods:
        got = overrides["strategy"]
        raise ConfigError(f"inference must be one of {', '.join(methods)}, got {got!r}")
    if output:
        check_suffix(Path(output))
    trained = trained_settings(run_dir)
    names = list(TRAINED)
    if engine in SIMULATED:
        names += OF_SIMULATED
        parties = {parts["active"], *parts["passive"]}
        shared = not party_sources(trained["data"], trained["parties"])
        sources_to_predict(overrides["data"], parties, may_be_one=shared)
    overrides = settings_named(overrides)
    values = {name: trained[name] for name in names} | {"model": parts["model_id"], **overrides}
    if output:
        values["output"] = Path(output).suffix
    settings = load_settings(values)
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
    """Run a joint prediction; a note on a FedappError names the run's folder, which is kept."""
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
    summary = folder.summary
    sites, active = home() / "sites", parts["active"]
    site = sites / active / summary["model_id"]
    with open_private(output, "wb") as file:
        file.write((site / f"predictions{settings.output}").read_bytes())
    facts = json.loads((site / "predictions.json").read_text())
    explained = {}
    if settings.explain:
        for party in (active, *parts["passive"]):
            path = sites / party / summary["model_id"] / "explanation.json"
            explained[party] = json.loads(path.read_text())
    rows = facts["rows"], facts["not_matched"], summary["tables"]
    predicted = Predicted(*rows, facts["scores"], facts["note"], summary["warnings"])
    return Together(predicted, explained)
