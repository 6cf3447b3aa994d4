"""The page of a description, and what its command prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.report.description import column_cells, description_page
from fedapp.report.plots import cell_shares
from fedapp.run_files import read_run
from tests.deploy_folders import invoke
from tests.pooled import write_rows

NAMES = ("<b>north</b>", "$south$")
SMALL = ("-c", "describe-columns.key-bits=512", "-c", "describe-columns.insecure-small-key=true")
pytestmark = pytest.mark.usefixtures("own_folder")


def rows(n_rows: int = 60) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "age": rng.integers(20, 70, n_rows),
        "income": rng.normal(size=n_rows).round(4),
        "town": rng.choice(NAMES, n_rows),
        "y": rng.integers(0, 2, n_rows),
    }


def described(tmp_path: Path, *more: str) -> tuple[Path, str]:
    write_rows(tmp_path / "rows.csv", rows())
    words = ("describe", "-c", "data=rows.csv", "--label", "y", "-c", "run-dir=one", *more)
    shown = invoke(cli, *words)
    return tmp_path / "one", shown


@pytest.mark.slow
def test_a_command_prints_columns_and_writes_a_page(tmp_path: Path) -> None:
    folder, shown = described(tmp_path, "-c", "parties=2")
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert {"age", "income", "town", "y"} <= set(lines)
    assert "report: one/report.html" in shown
    page = (folder / "report.html").read_text()
    for title in ("Columns", "The label", "Differences between sites"):
        assert f"<h2>{title}</h2>" in page
    assert "<b>north</b>" not in page
    assert "&lt;b&gt;north&lt;/b&gt;" in page
    assert page.count("<svg") == 2 + 1 + 3  # the label's, the index, and each column
    assert not (folder / "model.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("-c", "describe-rows.aggregation=secure"), "so it cannot warn of sites that differ in"),
        (("--vertical", "-c", "align=ordered", *SMALL), "party-1: "),
    ],
)
def test_a_page_without_counts_of_sites_says_so(
    tmp_path: Path, more: tuple[str, ...], text: str
) -> None:
    folder, _ = described(tmp_path, "-c", "parties=2", *more)
    page = description_page(read_run(folder))
    assert text in page
    assert ("<h2>Differences between sites</h2>" in page) == ("--vertical" not in more)


@pytest.mark.usefixtures("undrawn")
def test_a_table_of_categories_or_of_one_value_has_a_page(tmp_path: Path) -> None:
    table = {"town": rows()["town"], "same": np.ones(60), "none": [""] * 60, "y": rows()["y"]}
    write_rows(tmp_path / "odd.csv", table)
    invoke(cli, "describe", "--data", "odd.csv", "--label", "y", "-c", "run-dir=odd")
    document = json.loads((tmp_path / "odd" / "description.json").read_text())
    cells = [column_cells(one, document["rows"]) for one in document["columns"]]
    assert [line[:3] for line in cells] == [
        ["town", "0.0%", "2"],
        ["same", "0.0%", "1"],
        ["none", "100.0%", "0"],
        ["y", "0.0%", "2"],
    ]
    assert cells[1][3:] == ["1"] * 5
    assert cells[2][3:] == [""] * 5


@pytest.mark.slow
def test_what_trains_and_what_describes_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one that trains \(fedapp describe describes\), got "):
        invoke(cli, "run", "describe-rows")
    with pytest.raises(ConfigError, match=r"^log must be omitted to describe: .*, got mlflow"):
        invoke(cli, "describe", "-c", "log=mlflow")
    with pytest.raises(ConfigError, match=r"^eta must be omitted for describe-rows"):
        invoke(cli, "describe", "-c", "eta=0.1")


def test_many_categories_are_drawn_and_some_of_them_named() -> None:
    names = [f"town {number}" for number in range(300)]
    column = {"missing": 3, "counts": list(range(300)), "categories": names}
    (ax,) = cell_shares(column, names).axes
    labels = [each.get_text() for each in ax.get_xticklabels()]
    assert labels[:3] == ["missing", "town 15", "town 31"]
    assert len(labels) == 19
    assert len(ax.patches) == 301
    assert sum(bar.get_height() for bar in ax.patches) == pytest.approx(1)
