"""Reports of runs: progress during training, summary, figures, HTML page and model card.

The room reads run folders and writes pages. It knows nothing of training, messages or commands.
Read ``summary`` first: the other files show what it reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from fedapp.errors import DataError
from fedapp.home import check_output, display_path, replacing, write_atomically
from fedapp.run_files import LeftOut, Summary
from fedapp.run_folder import RunFolder, existing_folder, read_run
from fedapp.settings import defaults


def summary_so_far(run: RunFolder) -> Summary:
    """A run's scores of the last round, and costs so far; DataError without a checkpoint."""
    if (state := run.saved_state) is None or not run.rounds:
        raise DataError(f"{run.path}: run must have finished a round, got none to report")
    settings: dict[str, Any] = {**defaults(), **run.settings}
    last = run.rounds[-1]
    resume = f"fedapp run {settings['strategy']} -c resume={display_path(run.path)}"
    return {
        "strategy": settings["strategy"],
        "data": settings["data"],
        "objective": settings["objective"],
        "seed": settings["seed"],
        "model_id": state.model_id,
        "parties": [],
        "left_out": [cast(LeftOut, gone) for gone in state.left_out],
        "warnings": [f"the run has not finished; to resume: {resume}", *state.warnings],
        "facts": list(state.facts),
        "metrics": {"train": last["train"], "valid": last["valid"], "by_party": {}},
        "trees": last.get("trees", 0),
        "exchanges": state.exchanges,
        "bytes": dict(zip(("to_parties", "to_server"), state.bytes, strict=True)),
        "seconds": dict(zip(("total", "train"), state.seconds, strict=True)),
        "started": run.started,
    }


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write a run's page, and its model card once it has finished; returns the page's path.

    `output` defaults to report.html in the run's folder.

    Raises
    ------
    DataError : the folder is not a run's, or of one that has not finished a round.
    """
    from fedapp.report.card import CARD, model_card  # matplotlib takes a second to import
    from fedapp.report.description import FILE, description_page
    from fedapp.report.page import run_page
    from fedapp.report.template import HTML

    run = RunFolder(existing_folder(run_dir))
    if output:
        check_output(output, HTML)
    if is_unfinished := run.has_begun and not run.has_finished:
        run.summary = summary_so_far(run)
    else:
        run = read_run(run_dir)
    if (run_dir / FILE).is_file():
        text = description_page(run)
    else:
        text = run_page(run)
        if not is_unfinished:
            write_atomically(run_dir / CARD, model_card(run).encode())
    path = output or run_dir / "report.html"
    with replacing(path) as file:
        file.write(text.encode())
    return path
