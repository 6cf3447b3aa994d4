"""What a tool is told of a run, and what a tool is to fedapp."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedapp.config import Value
from fedapp.report.card import CARD
from fedapp.report.summary import score_rows
from fedapp.run_folder import RunFolder
from fedapp.watch import RoundInfo

# Files of a run that go with it, where they are there.
FILES = ("model.json", "model.xgb.json", "columns.json", "report.html", CARD, "summary.json")


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run before it begins.

    Parameters
    ----------
    path : of its folder.
    params : the settings that its method reads, by their names.
    tags : method, number of parties, engine, version and folder, each as ``fedapp.NAME``.
    """

    path: Path
    params: Mapping[str, Value]
    tags: Mapping[str, str]


class Logger(Protocol):
    """A run in a tool, opened when it is made."""

    run_id: str
    """What the tool calls the run, by which a resumed one is found again."""
    place: str
    """Where it is, for people; without passwords."""

    def __init__(self, run: LoggedRun, run_id: str) -> None:
        """Open a run with its parameters and tags, or the one of this name."""

    def round(self, info: RoundInfo) -> None:
        """Log a finished round."""

    def end(self, folder: RunFolder) -> None:
        """Log what a finished run has found, and close it."""

    def fail(self, is_stopped: bool) -> None:
        """Close a run without a model: one that was stopped, or that failed."""


def without_password(text: str) -> str:
    """A text whose addresses name no user and no password."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def round_values(info: RoundInfo) -> dict[str, float]:
    """Numbers of a round: ``train/auc``, ``valid/auc``, ``bytes/to_server``, ``exchanges`` ...;
    bytes and seconds are of the round, exchanges since the run began."""
    given: dict[str, Any] = {
        "trees": info["trees"],
        "leaves": info["leaves"],
        "exchanges": info["exchanges"],
        "seconds": info["seconds"],
        **{f"train/{name}": value for name, value in info["train"].items()},
        **{f"valid/{name}": value for name, value in info["valid"].items()},
        **{f"bytes/{name}": value for name, value in info["bytes"].items()},
    }
    return _finite(given)


def final_values(summary: Mapping[str, Any]) -> dict[str, float]:
    """Scores of the finished model, as ``final/test/auc``, those of baselines as
    ``pooled/test/auc``; and what the run took as a whole."""
    given: dict[str, Any] = {}
    for model, of, scores in score_rows(dict(summary)):
        head = "final" if model == "federated" else model
        given |= {f"{head}/{of}/{name}": value for name, value in scores.items()}
    given |= {f"final/seconds/{name}": value for name, value in summary["seconds"].items()}
    given |= {f"final/bytes/{name}": value for name, value in summary["bytes"].items()}
    return _finite({**given, "final/exchanges": summary["exchanges"]})


def _finite(given: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers."""
    numbers = {name: float(value) for name, value in given.items() if value is not None}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def final_tags(summary: Mapping[str, Any]) -> dict[str, str]:
    """What is known of a run at its end only."""
    found = {
        "objective": summary["objective"],
        "model_id": summary["model_id"],
        "party_names": ", ".join(party["name"] for party in summary["parties"]),
    }
    return {f"fedapp.{name}": str(value) for name, value in found.items()}


def files_of(folder: RunFolder) -> Iterator[Path]:
    """The files that go with a run."""
    for name in FILES:
        if (path := folder.path / name).is_file():
            yield path
