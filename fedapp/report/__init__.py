"""Reports of runs: progress during training, summary, figures, HTML page and model card.

The room reads run folders and writes pages. It knows nothing of training, messages or commands.
Read ``summary`` first: the other files show what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedapp.errors import DataError
from fedapp.home import open_private, write_atomically


def write_report(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page and model card of one run, or a page that compares several; returns its path.

    `output` defaults to report.html in the folder of a single run, or to comparison.html in the
    current folder.

    Raises
    ------
    DataError : there is no run, a folder is not a run's, or the runs differ in their objective.
    """
    from fedapp.report.card import CARD, model_card  # matplotlib takes a second to import
    from fedapp.report.comparison import comparison_page
    from fedapp.report.description import FILE, description_page
    from fedapp.report.page import run_page
    from fedapp.report.summary import read_run

    if not run_dirs:
        raise DataError("a report must have at least one run folder, got none")
    runs = [read_run(path) for path in run_dirs]
    is_single = len(runs) == 1
    describes = [run for run in runs if (run.path / FILE).is_file()]
    if describes and not is_single:
        raise DataError(f"runs to compare must have models, got a description: {runs[0].path}")
    write_page = description_page if describes else run_page
    text = write_page(runs[0]) if is_single else comparison_page(runs)
    if output is None:
        output = runs[0].path / "report.html" if is_single else Path("comparison.html")
    if is_single and not describes:
        write_atomically(runs[0].path / CARD, model_card(runs[0]).encode())
    with open_private(output, "w") as file:
        file.write(text)
    return output


def compared_warnings(run_dirs: Sequence[Path]) -> list[str]:
    """Why the scores of several runs are not comparable; DataError for an invalid folder."""
    from fedapp.report.comparison import named_runs
    from fedapp.report.summary import read_run, row_warnings

    return row_warnings(named_runs([read_run(path) for path in run_dirs]))
