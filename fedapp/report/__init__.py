"""Reports of runs: progress during training, summary, figures, HTML page and model card.

The room reads run folders and writes pages. It knows nothing of training, messages or commands.
Read ``summary`` first: the other files show what it reads.
"""

from __future__ import annotations

from pathlib import Path

from fedapp.home import open_private, write_atomically


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write a run's page, and its model card; returns the page's path.

    `output` defaults to report.html in the run's folder.

    Raises
    ------
    DataError : the folder is not a run's.
    """
    from fedapp.report.card import CARD, model_card  # matplotlib takes a second to import
    from fedapp.report.description import FILE, description_page
    from fedapp.report.page import run_page
    from fedapp.run_files import read_run

    run = read_run(run_dir)
    if (run_dir / FILE).is_file():
        text = description_page(run)
    else:
        text = run_page(run)
        write_atomically(run_dir / CARD, model_card(run).encode())
    with open_private(output or run_dir / "report.html", "w") as file:
        file.write(text)
    return output or run_dir / "report.html"
