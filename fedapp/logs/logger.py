"""The interface of a tool that logs runs, and the values that are logged."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedapp.report.card import CARD
from fedapp.report.summary import score_rows
from fedapp.run_folder import RoundInfo, RunFolder
from fedapp.settings import Value

FILES = ("model.json", "model.xgb.json", "columns.json", "report.html", CARD, "summary.json")


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run before it starts."""

    path: Path  # its folder
    params: Mapping[str, Value]  # the settings that its method reads
    tags: Mapping[str, str]  # method, number of parties, engine, version and folder, as fedapp.NAME


class Logger(Protocol):
    """A run in a tool, opened on construction."""

    run_id: str  # assigned by the tool; identifies a resumed run
    place: str  # where it is, for people; without passwords

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        """Open a new run with its parameters and tags, or the run `run_id` if not empty."""

    def round(self, info: RoundInfo) -> None:
        """Log a finished round."""

    def end(self, folder: RunFolder) -> None:
        """Log the results of a finished run, and close it."""

    def fail(self, is_stopped: bool) -> None:
        """Close a run without a model: stopped or failed."""


def without_password(text: str) -> str:
    """Remove user names and passwords from URLs in a text."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def round_values(info: RoundInfo) -> dict[str, float]:
    """Numbers of a round: ``train/auc``, ``bytes/to_server``, ``exchanges`` (total so far) ..."""
    values: dict[str, Any] = {
        "trees": info["trees"],
        "leaves": info["leaves"],
        "exchanges": info["exchanges"],
        "seconds": info["seconds"],
        **{f"train/{name}": value for name, value in info["train"].items()},
        **{f"valid/{name}": value for name, value in info["valid"].items()},
        **{f"bytes/{name}": value for name, value in info["bytes"].items()},
    }
    return _finite(values)


def final_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """Final scores (``final/test/auc``), baselines (``pooled/test/auc``), and total costs."""
    values: dict[str, Any] = {}
    for model, split, scores in score_rows(dict(summary)):
        head = "final" if model == "federated" else model
        values |= {f"{head}/{split}/{name}": value for name, value in scores.items()}
    values |= {f"final/seconds/{name}": value for name, value in summary["seconds"].items()}
    values |= {f"final/bytes/{name}": value for name, value in summary["bytes"].items()}
    return _finite({**values, "final/exchanges": summary["exchanges"]})


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: float(value) for name, value in values.items() if value is not None}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def final_tags(summary: Mapping[str, Any]) -> dict[str, str]:
    """Tags that are known only at a run's end."""
    tags = {
        "objective": summary["objective"],
        "model_id": summary["model_id"],
        "party_names": ", ".join(party["name"] for party in summary["parties"]),
    }
    return {f"fedapp.{name}": str(value) for name, value in tags.items()}


def files_of(folder: RunFolder) -> Iterator[Path]:
    """The run's files that are uploaded, if they exist."""
    for name in FILES:
        if (path := folder.path / name).is_file():
            yield path
