"""The page of a description, and what its command prints."""

import json

import numpy as np
import pytest

from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.report.description import column_tables
from tests.deploy_folders import invoke
from tests.tables import write_rows

pytestmark = pytest.mark.usefixtures("own_folder")


BY_COLUMNS = (
    *("--vertical", "-c", "align=ordered"),
    *("-c", "describe-columns.key-bits=512", "-c", "describe-columns.insecure-small-key=true"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ((), "<h2>Differences between sites</h2>"),
        (("-c", "describe-rows.aggregation=secure"), "so it cannot warn of sites that differ in"),
        (BY_COLUMNS, "party-1: "),
    ],
    ids=["plain", "secure", "vertical"],
)
def test_a_command_prints_columns_and_writes_a_page(tmp_path, more, shown):
    rng, names = np.random.default_rng(0), ("<b>north</b>", "$south$")
    columns = {"income": rng.normal(size=60).round(4), "town": rng.choice(names, 60)}
    columns |= {"same": np.ones(60), "none": [""] * 60, "y": rng.integers(0, 2, 60)}
    words = ("--data", str(write_rows(tmp_path / "rows.csv", columns)), "--label", "y")
    printed = invoke(cli, "describe", *words, "-c", "parties=2", "-c", "run-dir=one", *more)
    assert "report: one/report.html" in printed
    page = (tmp_path / "one" / "report.html").read_text()
    assert shown in page
    assert ("<h2>Differences between sites</h2>" in page) == (more is not BY_COLUMNS)
    assert not (tmp_path / "one" / "model.json").exists()
    if not more:
        assert {*columns} <= {line.split()[0] for line in printed.splitlines() if line.strip()}
        assert {"<h2>Columns</h2>", "<h2>The label</h2>"} <= {*page.splitlines()}
        assert "<b>north</b>" not in page
        assert "&lt;b&gt;north&lt;/b&gt;" in page
        assert page.count("<svg") == 2  # what explains the label, the index
        document = json.loads((tmp_path / "one" / "description.json").read_text())
        (_, _, (_, *numbers), _), _ = column_tables(document)
        assert numbers == [["same", "0.0%", "1", *["1"] * 5], ["none", "100.0%", "0", *[""] * 5]]


# A column's values, repeated; the table it is in, and its cells there.
KINDS = {
    "number": ([1.5, 2.5], 0, "0.0% 2 1.5 1.5 2.5 2.5 2.5"),
    "date": (["2024-02-28", "2024-02-29", ""], 0, "33.3% 2 2024-02-28 2024-02-28"),
    "time": (["00:05", "23:50"], 0, "0.0% 2 00:05 00:05 23:50 23:50 23:50"),
    "yes-no": (["yes", "no", "yes", ""], 1, "25.0% 2 yes 50%, no 25%"),
    "always": (["yes", ""], 1, "50.0% 1 yes 50%"),
    "never": (["no"], 1, "0.0% 1 no 100%"),
    "town": ([*"aaaaaabbbbcc"], 1, "0.0% 3 a 50%, b 33%, c 17%"),
    "letters": (
        [*"aaaaaaaabbbbbbccccdddeef"],
        1,
        "0.0% 6 a 33%, b 25%, c 17%, d 12%, e 8%, 1 more",
    ),
}


SMALL = {"align": "ordered", "describe-columns.key-bits": 512}
SMALL |= {"describe-columns.insecure-small-key": "true"}
COLUMNS = "--vertical", "--parties=2", *(f"-c{name}={value}" for name, value in SMALL.items())


@pytest.mark.parametrize(("ways", "label"), [(["--parties=1"], "y"), (COLUMNS, "label")])
def test_every_kind_is_shown_as_people_write_it_with_shares_of_all_training_rows(
    tmp_path, ways, label
):
    table = {name: values * (240 // len(values)) for name, (values, *_) in KINDS.items()}
    write_rows(tmp_path / "kinds.csv", {**table, "y": ["in", "out"] * 120})
    words = (*ways, "-c", "test-fraction=0", "-c", "valid-fraction=0", "-c", "run-dir=k")
    shown = invoke(cli, "describe", "--data", "kinds.csv", "--label", "y", *words)
    assert "shares are of all 240 training rows" in " ".join(shown.split())
    tables = column_tables(json.loads((tmp_path / "k" / "description.json").read_text()))
    assert [title for title, *_ in tables] == ["Numbers and dates", "Categories"]
    lines = [
        {name.rpartition(": ")[2]: " ".join(cells) for name, *cells in rows}
        for _, _, rows, _ in tables
    ]
    for name, (_, where, cells) in KINDS.items():
        assert lines[where][name].startswith(cells), name
    assert lines[1][label] == "0.0% 2 in 50%, out 50%"
    page = (tmp_path / "k" / "report.html").read_text()
    for _, _, rows, _ in tables:
        for cells in rows:
            assert all(f">{cell}</td>" in page for cell in cells), cells


def test_what_trains_and_what_describes_are_told_apart():
    with pytest.raises(ConfigError, match=r"one that trains \(fedapp describe describes\), got "):
        invoke(cli, "run", "describe-rows")
    with pytest.raises(ConfigError, match=r"^log must be omitted to describe: .*, got mlflow"):
        invoke(cli, "describe", "-c", "log=mlflow")
