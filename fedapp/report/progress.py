"""Training progress, from the rounds.jsonl that a run appends to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedapp.errors import DataError
from fedapp.report.summary import Scores, human_bytes, human_seconds, score_text

Round: TypeAlias = dict[str, Any]
Show: TypeAlias = Callable[[Round], None]

_POLL_SECONDS = 0.1
_SECOND_SCORES = ("logloss", "accuracy", "mae", "auc", "rmse")


def follow(
    rounds_path: Path,
    n_rounds: int,
    metric: str,
    console: Console,
    running: Callable[[], bool],
) -> None:
    """Show every round as it is written, until the run has ended and all are shown.

    A terminal gets one live line, anything else a plain line a round.

    Parameters
    ----------
    rounds_path : the run's rounds.jsonl; need not exist yet, its last line may be half written
    n_rounds : int, >= 1
        Rounds asked for.
    metric : name of the score to show first
    console : where to
    running : whether the run may still write

    Raises
    ------
    DataError : a finished line is no JSON object with a round's fields.
    """
    offset = 0
    with _live(n_rounds, metric, console) as show:
        while True:
            may_grow = running()  # asked before reading: an ended run has written its last line
            rounds, offset = _new_rounds(rounds_path, offset)
            for entry in rounds:
                show(entry)
            if not may_grow:
                return
            time.sleep(_POLL_SECONDS)


def _new_rounds(path: Path, offset: int) -> tuple[list[Round], int]:
    """Rounds on finished lines from byte offset on, and the offset behind the last of them."""
    if not path.exists():
        return [], offset
    with path.open("rb") as file:
        file.seek(offset)
        finished, newline, _ = file.read().rpartition(b"\n")
    lines = [line for line in finished.split(b"\n") if line.strip()]
    return [_round(line) for line in lines], offset + len(finished) + len(newline)


def _round(line: bytes) -> Round:
    try:
        entry = json.loads(line)
    except ValueError as error:  # no JSON, or no UTF-8
        raise DataError(f"a line of rounds.jsonl must be JSON, got {len(line)} bytes") from error
    if not isinstance(entry, dict):
        raise DataError(f"a line of rounds.jsonl must be an object, got {type(entry).__name__}")
    missing = {"round", "train", "valid", "exchanges", "bytes", "seconds"} - set(entry)
    if missing:
        raise DataError(f"a line of rounds.jsonl must have {', '.join(sorted(missing))}, got none")
    return entry


@contextmanager
def _live(n_rounds: int, metric: str, console: Console) -> Iterator[Show]:
    """A function that shows one round."""
    if not console.is_terminal:
        yield lambda entry: _print_plain(entry, n_rounds, metric, console)
        return
    # No spinner and no sizes: the line must fit 80 columns.
    columns = (
        TextColumn("round {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TextColumn("[bold]{task.fields[score]}", markup=True),
        TextColumn("[dim]{task.fields[exchanges]} exchanges", markup=True),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, expand=True) as progress:
        task = progress.add_task("", total=n_rounds, score="", exchanges=0)
        yield lambda entry: progress.update(
            task,
            completed=entry["round"],
            score=_score(entry, [metric]),
            exchanges=entry["exchanges"],
        )


def _print_plain(entry: Round, n_rounds: int, metric: str, console: Console) -> None:
    size = human_bytes(sum(entry["bytes"].values()))
    scores = _score(entry, [metric, *_SECOND_SCORES])
    parts = (
        f"round {entry['round']:>{len(str(n_rounds))}}/{n_rounds}",
        *([scores] if scores else []),
        f"exchanges {entry['exchanges']}",
        size,
        human_seconds(entry["seconds"]),
    )
    console.print("  ".join(parts), markup=False, highlight=False, soft_wrap=True)


def _score(entry: Mapping[str, Any], names: list[str]) -> str:
    """``valid auc 0.7781  logloss 0.4420``: the first two of names that the round has."""
    split = "valid" if entry["valid"] else "train"
    scores: Scores = entry[split]
    known = [name for name in dict.fromkeys(names) if name in scores][:2]
    texts = [f"{name} {score_text(scores[name])}" for name in known]
    return f"{split} {'  '.join(texts)}" if texts else ""
