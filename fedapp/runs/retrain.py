"""Erasure: a finished run again, as if its tables had never had some rows.

No tree of the earlier run is used again. One that these rows did not touch would have to follow
only from other rows, and none does: a table's number of rows decides which of them are held back
(``fedapp.data.partition``) or drawn, the base score is the mean of all labels, and cuts and names
of categories are of all rows too. So rows are left out where tables are read (``Roles.without``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.datasets import source_frame
from fedapp.data.read import read_ids
from fedapp.data.schema import Roles
from fedapp.data.table import ids_of
from fedapp.errors import ConfigError
from fedapp.home import display_path, home
from fedapp.report.summary import DEPLOYMENT, row_counts
from fedapp.run_folder import RunFolder
from fedapp.runs.predict import parts_of, trained_settings
from fedapp.runs.session import Training
from fedapp.runs.tables import party_configs
from fedapp.settings import Settings, load_settings
from fedapp.site.store import PART_FILE
from fedapp.superlinks import SIMULATED


def retraining(earlier: RunFolder, without: str, engine: str, run_dir: str) -> Training:
    """A run again, on its tables as they are, without rows that files of ids name; ConfigError."""
    path, is_simulated = earlier.path, engine in SIMULATED
    if not earlier.has_finished:
        raise ConfigError(f"run must have finished, got {path}")
    if (earlier.summary["engine"] == DEPLOYMENT) == is_simulated:
        where = "a SuperLink's name, whose sites have the rows" if is_simulated else "local"
        raise ConfigError(f"engine must be {where}, for {path}, got {engine}")
    settings = load_settings(trained_settings(path) | {"run-dir": run_dir, "resume": ""})
    if settings.init_model:
        rule = "must be empty, as that model may know the rows"
        way = "retrain its run, then begin one with the new init-model, and without"
        raise ConfigError(f"init-model {rule}, got {settings.init_model}: {way}")
    files = ",".join(filter(None, (settings.without, without)))
    rows, absent = _rows_of(settings, files) if files and is_simulated else ({}, 0)
    are_deleted = is_simulated and not any(rows.values())
    if without and are_deleted:
        rule = f"without must name rows of the tables, got {absent:,} ids of none"
        raise ConfigError(f"{rule}: omit it if they are deleted")
    # Rows that are deleted from the tables need no list of their ids.
    again = settings.model_copy(update={"without": "" if are_deleted else files})
    changed = {name: value for name, value in again.changed.items() if name != "strategy"}

    def facts(folder: RunFolder) -> dict[str, Any]:
        before, now = (sum(row_counts(run.summary).values()) for run in (earlier, folder))
        why = "none: each follows from all rows, by those held back, base score or cuts"
        again = {
            "run": display_path(path),
            "model_id": earlier.summary["model_id"],
            "rows_left_out": rows or {"all parties": before - now},
            "absent_ids": absent,
            "trees_kept": why,
            "digest": model_digest(folder),
            "earlier_digest": model_digest(earlier),
        }
        return {"retrained": again}

    return Training(settings.strategy, changed, engine, facts=facts)


def _rows_of(settings: Settings, files: str) -> tuple[dict[str, int], int]:
    """Number of rows that files of ids name, by party or common table, and of ids of no row."""
    rows, absent, present = dict[str, int](), set[str](), set[str]()
    for config in party_configs(settings.model_copy(update={"without": ""})):
        ids, role = read_ids(files, config.id_column), Roles(id_column=config.id_column)
        frame, _, text, reader = source_frame(config.data, role, config.reader)
        names = ids_of(frame, config.id_column, reader, text)
        where = Path(config.data).name if config.is_share else config.name
        rows[where] = int(np.isin(names, ids).sum())
        present.update(names.tolist())
        absent = absent.union(ids) - present
    return rows, len(absent)


def model_digest(folder: RunFolder) -> str:
    """SHA-256 of ``model.json``, or of a divided model's parts; empty if they are elsewhere."""
    divided = parts_of(folder.path)
    if divided is None:
        return hashlib.sha256((folder.path / "model.json").read_bytes()).hexdigest()
    return parts_digest((divided.active, *divided.passive), divided.model_id)


def parts_digest(parties: Iterable[str], model_id: str) -> str:
    """SHA-256 of the parts of a divided model; empty if they are elsewhere."""
    paths = [home() / "sites" / name / model_id / PART_FILE for name in sorted(parties)]
    if not all(path.is_file() for path in paths):
        return ""
    # Salt, and digests of parts with salt, differ each time.
    parts = [json.loads(path.read_text()) | {"salt": "", "digests": ""} for path in paths]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def remains(earlier: RunFolder, folder: RunFolder | None, engine: str) -> list[str]:
    """What still has the influence of the rows, each with the command that removes it."""
    if folder and model_digest(folder) == model_digest(earlier) != "":
        return []
    where, model = display_path(earlier.path), earlier.summary["model_id"]
    sites = home() if engine in SIMULATED else "the home of each site"
    lines = [f"the earlier run: rm -r {where}", f"its parties: rm -r {sites}/sites/*/{model}"]
    if engine not in SIMULATED and parts_of(earlier.path):
        way = f"fedapp federation activate {where} --engine {engine} --none"
        lines.append(f"standing scores: {way}")
    return [*lines, "other runs on these tables, and what was predicted: fedapp runs --all"]
