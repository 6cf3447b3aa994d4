"""`--json`: standard output is one document of numbers and texts, and nothing else."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.commands.common import print_json
from fedapp.commands.data import data_app
from fedapp.commands.site import site_app
from fedapp.errors import ConfigError, WaitingError
from fedapp.messages.handshake import HelloRequest
from fedapp.site.register import admit
from fedapp.site.settings import site_config
from tests.plans import planned

pytestmark = pytest.mark.usefixtures("own_folder")

SHORT = ("-c", "num-boost-round=2", "-c", "max-depth=2", "-c", "parties=2")
ROWS = ("-c", "data=rows.csv", "-c", "label=y")
NODE = 'name = "bank"\ndata = "rows.csv"\nlabel = "y"\nallow = "pax"\n'
# A command, and the fields of its document.
COMMANDS = [
    (("run", "pax", *SHORT, *ROWS), {"folder", "summary"}),
    (("tune", "pax", "--runs", "1", *SHORT, *ROWS), {"folder", "summary", "trials"}),
    (("describe", *ROWS, "-c", "parties=2"), {"folder", "rows", "columns", "warnings"}),
    (("runs",), {"runs", "not_shown"}),
    (("data", "list"), {"data_sets"}),
    (("data", "describe", "rows.csv", "--label", "y"), {"rows", "features", "label", "refused"}),
    (("site", "check", "--site", "site.toml"), {"site", "rows", "methods", "spent_epsilon"}),
    (("site", "approve"), {"waiting"}),
]


def invoked(*words):
    """A command that succeeds, in this process."""
    app = {"data": data_app, "site": site_app}.get(words[0], cli)
    done = CliRunner().invoke(app, words if app is cli else words[1:])
    if done.exception:
        raise done.exception
    return done


def document(*words):
    """What a command with ``--json`` prints to standard output."""
    return json.loads(invoked(*words, "--json").stdout)


@pytest.mark.parametrize(("words", "fields"), COMMANDS, ids=[" ".join(w[:2]) for w, _ in COMMANDS])
def test_a_command_prints_one_document_and_the_next_one_its_table(write_table, words, fields):
    write_table()
    Path("site.toml").write_text(NODE)
    content = document(*words)
    assert fields <= set(content)
    assert all(re.fullmatch("[a-z][a-z_]*", name) for name in content)
    assert invoked("runs").stdout.startswith("run " if "folder" in content else "no runs in runs\n")


def test_a_run_and_its_predictions_have_the_scores_of_its_summary(write_table):
    table = str(write_table(c=range(40)))
    given = ("-c", f"data={table}", "-c", "label=y", "-c", "run-dir=runs/one")
    shown = document("run", "pax", *SHORT, *given)
    assert shown["summary"] == json.loads(Path("runs/one/summary.json").read_text())
    [listed] = document("runs")["runs"]
    assert listed["test_score"] == shown["summary"]["metrics"]["test"][listed["metric"]]
    assert listed["run"] == "runs/one"
    done = invoked("predict", "runs/one", "--data", table, "--output", "scores.csv", "--json")
    predicted = json.loads(done.stdout)
    assert (predicted["rows"], predicted["unmatched_rows"]) == (40, 0)
    assert 0 < predicted["scores"]["auc"] <= 1
    assert "40 rows written to scores.csv" in done.stderr


def test_runs_that_wait_are_listed_with_their_plan():
    node = {"name": "bank", "data": "rows.csv", "label": "y", "allow": "pax", "approve": "ask"}
    opening = replace(HelloRequest("binary:logistic", 0.2, 0.1, 42, False), **planned(("bank",)))
    with pytest.raises(WaitingError):
        admit(site_config(node, {}), "a" * 16, "pax", opening)
    [waiting] = document("site", "approve")["waiting"]
    assert (waiting["run"], waiting["site"], waiting["method"]) == ("a" * 16, "bank", "pax")
    assert waiting["plan"]["seed"] == 42
    with pytest.raises(ConfigError, match=r"^--json must be given without a run: .*, got aaaa"):
        invoked("site", "approve", "a" * 16, "--json")


def test_what_is_no_number_is_null(capsys):
    print_json("predict", scores={"auc": float("nan")}, output=Path("runs"))
    assert json.loads(capsys.readouterr().out) == {"scores": {"auc": None}, "output": "runs"}
