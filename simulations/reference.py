"""Digests of what every method computes: two commits that compute the same have the same ones."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fedapp.home import home
from fedapp.runs.local import run_local
from fedapp.runs.predict import parts_of, predict_table
from fedapp.settings import Settings, load_settings
from fedapp.site.store import PART_FILE
from simulations.study import check_names

DIGEST_BYTES = 16
RANDOM_FIELDS = {"model_id", "salt", "digests"}  # of salted files
BOOSTED = {"num-boost-round": 4, "eta": 0.3, "max-depth": 4, "max-bin": 32}
SMALL_KEY = {"key-bits": 512, "insecure-small-key": True}
HEAD = {"trees": 30, "max-depth": 3, "rounds": 2, "epochs": 3}


@dataclass(frozen=True, slots=True)
class Plan:
    """A training with settings other than the defaults, and ways to predict by a divided model."""

    settings: Mapping[str, Any]
    inferences: Sequence[str] = ()


def _boosted(strategy: str, **more: Any) -> dict[str, Any]:
    return {"strategy": strategy, **BOOSTED, **more}


def _secureboost(parties: int) -> dict[str, Any]:
    return _boosted("secureboost", parties=parties, secureboost=SMALL_KEY)


def _forest(**more: Any) -> dict[str, Any]:
    forest = {**SMALL_KEY, "max-depth": 4, **more}
    return {"strategy": "federated-forest", "parties": 2, "federated-forest": forest}


PLANS: Mapping[str, Plan] = {
    "pax": Plan(_boosted("pax", **{"subsample": 0.8, "colsample-bytree": 0.8})),
    "pax, classes": Plan(_boosted("pax", data="wine", objective="multi:softprob")),
    "pax, regression": Plan(_boosted("pax", data="diabetes", objective="reg:squarederror")),
    "fedxgbllr": Plan({"strategy": "fedxgbllr", "fedxgbllr": HEAD}),
    "bagging": Plan(_boosted("bagging")),
    "cyclic": Plan(_boosted("cyclic")),
    "fedavg-linear": Plan({"strategy": "fedavg-linear", "fedavg-linear": {"rounds": 4}}),
    "secureboost": Plan(_secureboost(parties=2), ("interactive", "one-round", "eini")),
    "secureboost, 3 parties": Plan(_secureboost(parties=3), ("interactive", "one-round")),
    "horizontal-forest": Plan(
        {"strategy": "horizontal-forest", "horizontal-forest": {"trees": 6, "max-depth": 4}}
    ),
    "federated-forest, encoded": Plan(_forest(trees=6), ("interactive", "one-round", "eini")),
    "federated-forest, paillier": Plan(_forest(trees=3, labels="paillier"), ("one-round",)),
}


def reference(only: tuple[str, ...] = tuple(PLANS), write: str = "", check: str = "") -> None:
    """What every method computes, as digests: two commits that compute the same have the same ones.

    ``python -m simulations reference --write FILE`` trains every method in this process, with
    a fixed seed, on built-in tables and with small keys, and predicts in every way. ``--check
    FILE`` repeats this, prints what differs, and exits with status 1 if anything does.

    Digests are valid for one machine and one set of library versions. They exclude the sizes of
    messages, which may change, and the names and salts that a run draws at random.
    """
    check_names("only", only, PLANS)
    if bool(write) == bool(check):
        raise SystemExit("reference must be called with --write FILE or --check FILE")
    results = {}
    for name in only:
        for key, value in computed(name):
            print(f"{key}: {value}", flush=True)
            results[key] = value
    if write:
        Path(write).write_text(json.dumps(results, indent=2) + "\n")
        return
    digests = json.loads(Path(check).read_text())
    expected = {key: digests[key] for key in digests if key.partition(":")[0] in only}
    if mismatches := differences(expected, results):
        raise SystemExit("\n".join(mismatches))
    print(f"{len(results)} as in {check}")


def differences(expected: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """One line for each value that differs."""
    return [
        f"{what} must be {expected.get(what)}, got {results.get(what)}"
        for what in sorted({*expected, *results})
        if expected.get(what) != results.get(what)
    ]


def computed(name: str) -> Iterator[tuple[str, Any]]:
    """Execute a plan; yield what was computed, and its digest or number."""
    plan = PLANS[name]
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, FEDAPP_HOME=folder):
        settings = load_settings({**plan.settings, "run-dir": f"{folder}/run"})
        run = run_local(settings)
        for what, digest in digests_of(run.path).items():
            yield f"{name}: {what}", digest
        yield f"{name}: exchanges", run.summary["exchanges"]
        if not (parts := parts_of(run.path)):
            predict_table(run.path, settings.data, "", run.path / "predictions.csv")
            yield f"{name}: predictions", digest_of(run.path / "predictions.csv")
            return
        for inference in plan.inferences:
            yield from _predicted_together(name, settings, parts.model_id, inference)


def _predicted_together(
    name: str, trained: Settings, model_id: str, inference: str
) -> Iterator[tuple[str, Any]]:
    config = {key: getattr(trained, key) for key in ("data", "parties", "columns", "align", "seed")}
    config |= {"model": model_id, "strategy": inference, "eini": {**SMALL_KEY, "unguarded": True}}
    run = run_local(load_settings({**config, "run-dir": f"{trained.run_dir}-{inference}"}))
    summary = run.summary
    site = home() / "sites" / summary["active"] / summary["model_id"]
    yield f"{name}: exchanges, {inference}", summary["exchanges"]
    yield f"{name}: predictions, {inference}", digest_of(site / "predictions.csv")


def digests_of(run_dir: Path) -> dict[str, str]:
    """Digests of a run's model, and of the parts of a divided one."""
    digests = {"model": digest_of(run_dir / "model.json")}
    if parts := parts_of(run_dir):
        for party in (parts.active, *parts.passive):
            part = home() / "sites" / party / parts.model_id / PART_FILE
            digests[f"part of {party}"] = digest_of(part)
    return digests


def digest_of(path: Path) -> str:
    """Digest of a file; of a JSON object, without what the run drew at random."""
    content = path.read_bytes()
    if path.suffix == ".json":
        fields = {
            key: value for key, value in json.loads(content).items() if key not in RANDOM_FIELDS
        }
        content = json.dumps(fields, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()
