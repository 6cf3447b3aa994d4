"""Weights of rows whose columns lie at several parties: whose they are, and what they weight."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import DataError, PartyError
from fedapp.runs.local import run_local
from fedapp.site.settings import site_config
from fedapp.site.table import read_columns
from tests.federated import model_bytes

N_ROWS = 80
IDS = [f"p{row}" for row in range(N_ROWS)]
WEIGHTS = [1 + row % 4 for row in range(N_ROWS)]


@pytest.fixture
def files(write_table):
    """``files(bank=..., insurer=...)``: a table of each, with these weights where there are any;
    the bank has the labels."""

    def make(bank=None, insurer=None):
        c = np.random.default_rng(4).normal(size=N_ROWS).round(3)
        others = {"a": None, "b": None, "y": None, "c": c}
        return {
            "bank": write_table("bank", N_ROWS, id=IDS, w=bank),
            "insurer": write_table("insurer", N_ROWS, id=IDS, w=insurer, **others),
        }

    return make


@pytest.fixture
def weighted(vertical):
    """``weighted(files, ...)``: a run of a round on these tables with the weights w."""

    def make(files, **more):
        data = ",".join(f"{party}={path}" for party, path in files.items())
        given = {"label": "y", "id": "id", "weight": "w", "num_boost_round": 1}
        return vertical(data=data, **given, **more)

    return make


def test_weights_without_labels_are_refused_by_name_at_home_alone(weighted, vertical, sites, files):
    rule = r"weight column {} must be in the table with the labels"
    with pytest.raises(PartyError, match=r"^insurer .*" + rule.format("'w'")) as refused:
        run_local(weighted(files(insurer=WEIGHTS)))
    assert re.search(r"party that has the labels; .*drop-columns=w", str(refused.value))
    tables = files(bank=WEIGHTS, insurer=WEIGHTS)
    bank, insurer = ({"name": name, "data": path, "id": "id"} for name, path in tables.items())
    insurer["weight"] = "w"
    nodes = {**bank, "weight": "w"}, {**insurer, "label": ""}
    with pytest.raises(PartyError, match=r"^insurer .*" + rule.format(r"\[withheld\]")):
        run_local(vertical(), sites(*nodes))
    insurer["data"] = str(insurer["data"])
    with pytest.raises(DataError, match=rule.format("'w'")):
        read_columns(site_config(insurer, {}), seed=0)
    kept = read_columns(site_config({**insurer, "drop-columns": "w"}, {}), seed=0)
    assert (kept.columns, kept.weights) == (("c",), None)


def test_weights_of_the_party_without_labels_may_be_dropped(weighted, files):
    """Those beside the labels count all the same."""
    alone = run_local(weighted(files(bank=WEIGHTS)))
    both = run_local(weighted(files(bank=WEIGHTS, insurer=WEIGHTS), drop_columns="w"))
    assert model_bytes(alone) == model_bytes(both)


# Rows to predict


@pytest.fixture
def predicted(weighted, files, monkeypatch, tmp_path):
    """``predicted(whole, bank=..., insurer=...)``: what the command says of tables with these
    weights, under a model that was trained with all of them at the bank; and the exact log loss."""
    monkeypatch.chdir(tmp_path)

    def make(whole, **weights):
        shares = {"allow_export": whole, "share_column_names": whole}
        folder = run_local(weighted(files(bank=WEIGHTS), **shares))
        tables = files(**weights)
        data = ",".join(f"{party}={path}" for party, path in tables.items())
        given = ["predict", str(folder.path), "--data", data, "--id", "id", "--output", "out.csv"]
        result = CliRunner().invoke(cli, given)
        assert result.exit_code == 0, result.output
        with Path("out.csv").open() as file, tables["bank"].open() as rows:
            p = [float(row["probability_1"]) for row in csv.DictReader(file)]
            truth = [int(row["y"]) for row in csv.DictReader(rows)]
        weighs = None if "unweighted" in result.output else WEIGHTS
        return result.output, f"{log_loss(truth, p, sample_weight=weighs):.4f}"

    return make


def test_weights_of_another_table_than_the_labels_weight_the_scores(predicted):
    text, exact = predicted(True, insurer=WEIGHTS)
    assert "unweighted" not in text
    assert exact in text


@pytest.mark.by_default("in parts")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in parts"])
def test_scores_without_weights_are_told_as_such_and_why(predicted, whole):
    text, exact = predicted(whole, bank=["", "", *WEIGHTS[2:]])
    name = "'w'" if whole else r"\S+"
    assert re.search(rf"unweighted: weight column {name} has no value in 2 of 80 rows", text)
    assert exact in text
    text, exact = predicted(whole)
    assert re.search(rf"unweighted: weight column {name} is none of the table", text)
    assert exact in text


NO_SPLIT = (
    "no tree of the first boosting round has a split, so rows are predicted alike; where weights "
    "are small, scale them or set min-child-weight below 1"
)


@pytest.mark.by_default("pax-*", "secureboost-1e-06")
@pytest.mark.parametrize("weight", [1e-6, 1.0])
@pytest.mark.parametrize("method", ["pax", "bagging", "cyclic", "secureboost"])
def test_weights_so_small_that_no_tree_splits_are_warned_of(
    settings, vertical, write_table, method, weight
):
    make = vertical if method == "secureboost" else settings
    given = {"label": "y", "weight": "w", "min_child_weight": 1.0, "parties": 2}
    data = str(write_table(n_rows=200, w=[weight] * 200))
    folder = run_local(make(strategy=method, data=data, **given))
    assert (NO_SPLIT in folder.summary["warnings"]) == (weight < 1)
