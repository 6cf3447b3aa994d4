"""Margins that rows start from, XGBoost's ``base_margin``, and weights of rows at several parties.

That trees are XGBoost's is in ``test_exactness``, that runs continue in ``test_warm_start``.
"""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
import xgboost
from sklearn.metrics import log_loss
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError, PartyError
from fedapp.runs.baselines import baseline_rows, run_baselines
from fedapp.runs.local import run_local
from fedapp.site.settings import site_config, table_settings
from fedapp.site.table import read_columns
from fedapp.trees.predict import predict_margins
from tests.encrypted import encrypted, inference, written
from tests.federated import model_bytes, model_of, summary_of
from tests.letters import letters_sent, raw_of
from tests.letters import written as forms_of
from tests.pooled import Pooled, assert_xgboosts
from tests.random_tables import differences
from tests.tables import made_columns, write_rows
from tests.transcript import listen

BINARY, CLASSES = "binary:logistic", "multi:softprob"


@pytest.fixture
def with_margins(made, vertical):
    """``with_margins(strategy, objective, **more)``: a short run over a table with margins m."""

    def make(strategy="pax", objective=BINARY, **more):
        columns = made_columns(objective)
        columns["m"] = np.random.default_rng(5).normal(size=400).round(3)
        given = {"base_margin": "m", "max_bin": 64, **more}
        return made(strategy, objective, columns=columns, **given)

    return make


def test_scores_and_baselines_start_from_the_margins(with_margins):
    run = with_margins(parties=1)
    folder = run_local(run)
    assert differences(run, folder) == []
    assert summary_of(folder)["base_margin"] == "m"
    score = summary_of(folder)["metrics"]["test"]["logloss"]
    assert run_baselines(run)["pooled"]["logloss"] == pytest.approx(score, rel=1e-5)
    without = run.model_copy(update={"base_margin": "", "drop_columns": "m"})
    assert run_baselines(without)["pooled"]["logloss"] != pytest.approx(score, rel=1e-3)


@pytest.mark.by_default("interactive")
@pytest.mark.parametrize("way", ["interactive", "eini"])
def test_columns_at_several_parties_grow_xgboosts_trees_and_predict_together(
    settings, with_margins, way
):
    given = {"num_boost_round": 3, "max_bin": 16}
    assert_xgboosts(run_local(run := with_margins("secureboost", **given)), Pooled(run))
    trained = with_margins("secureboost", **given, allow_export=False)
    whole = Pooled(trained)
    run_local(trained)
    run = inference if way == "interactive" else encrypted
    asked = {"label": "y", "align": "ordered", "seed": trained.seed}
    found = written(summary_of(run_local(run(settings, trained, **asked))))[:, 0]
    matrix = xgboost.DMatrix(whole.values, base_margin=whole.base_margins)
    np.testing.assert_allclose(found, whole.booster().predict(matrix), rtol=0, atol=1e-6)


# What leaves a party


def assert_none_told(margins, told):
    """No four neighbouring margins of the first rows in bytes that were sent."""
    found = forms_of(margins[:16], 4)
    assert len(found) > 40
    assert not [one for one in found if one in b"".join(told)]


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
def test_margins_stay_at_a_party(with_margins, strategy):
    run = with_margins(strategy, parties=1, num_boost_round=1)
    rows, (_, app) = baseline_rows(run)[0], listen(run)
    margins = rows.base_margins[rows.split.train]
    assert_none_told(margins, [raw_of(reply) for _, _, reply in app.heard])


def test_margins_stay_at_the_active_party(with_margins):
    """Also where a run goes on from another's model, for which rows walk down its trees."""
    more = {"num_boost_round": 1, "max_depth": 2, "max_bin": 16}
    first = run_local(with_margins("secureboost", **more))
    run = with_margins("secureboost", init_model=str(first.path), **more)
    _, app = listen(run)
    letters, whole = letters_sent(app), Pooled(run)
    assert any("walk" in kind for kind, _, _ in app.heard)
    told = [raw_of(reply) for _, _, reply in app.heard] + [letter.raw for letter in letters]
    for order in (whole.train, np.arange(len(whole.labels))):
        assert_none_told(whole.base_margins[order], told)
    found = {(letter.name, letter.sender) for letter in letters}
    assert {("Questions", "party-1"), ("Answers", "party-2")} <= found
    assert ("Questions", "party-2") not in found


def test_the_name_of_the_column_stays_with_the_model(with_margins):
    model = model_of(run_local(with_margins()))
    assert model.margin_column == "m"
    with pytest.raises(ValueError, match=r"^base_margins must be those of .* column, which is 'm'"):
        predict_margins(model, np.zeros((2, 6), np.float32))


# What is refused


def test_margins_that_are_none_are_refused(tmp_path):
    columns = {"a": [0, 1, 2], "m": ["1", "low", "2"], "y": [0, 1, 2]}
    rule = "base-margin column must be numbers: 1 of 3 values of 'm' is not a number, first 'low'"
    with pytest.raises(DataError, match=rule):
        load_table(write_rows(tmp_path / "rows.csv", columns), Roles(label="y", base_margin="m"))


def test_a_schema_names_the_column(tmp_path):
    (tmp_path / "rows.toml").write_text('base-margin = "m"\n')
    found = table_settings({"data": "rows.csv", "schema": str(tmp_path / "rows.toml")})
    assert found["base_margin"] == "m"


def test_several_classes_take_no_margins(with_margins):
    rule = "^base-margin must be omitted for multi:softprob, .* a margin for every class"
    with pytest.raises(ConfigError, match=rule):
        with_margins(objective=CLASSES)


MARGINS, NONE = {"base-margin": "m"}, {"drop-columns": "m"}


AT_SOME = "^shop: base-margin must be that of bank at all parties, the column 'm', got none$"
OF_CLASSES = "base-margin must be omitted for multi:softprob"


@pytest.mark.parametrize(
    ("how", "of_shop", "error", "rule"),
    [
        ({"objective": BINARY}, NONE, DataError, AT_SOME),
        ({"objective": "auto"}, MARGINS, ConfigError, OF_CLASSES),
    ],
    ids=["at some", "of classes"],
)
def test_sites_with_margins_that_do_not_fit_a_run_are_refused(
    settings, sites, tmp_path, how, of_shop, error, rule
):
    columns = made_columns(CLASSES if how["objective"] == "auto" else BINARY)
    data = write_rows(tmp_path / "rows.csv", {**columns, "m": np.ones(400)})
    bank, shop = ({"name": name, "data": data} for name in ("bank", "shop"))
    with pytest.raises(error, match=rule):
        run_local(settings(parties=2, **how), sites(bank | MARGINS, shop | of_shop))


@pytest.mark.by_default("True")
@pytest.mark.parametrize("whole", [True, False])
def test_a_table_without_the_column_is_not_predicted(with_margins, tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    more = {"num_boost_round": 1, "max_depth": 2, "max_bin": 16, "allow_export": whole}
    folder = run_local(with_margins("secureboost", **more))
    data = write_rows(tmp_path / "new.csv", made_columns(BINARY))
    with pytest.raises(DataError, match="table must have the base-margin column 'm', as the mod"):
        fedapp.load(folder.path).predict(data)


# Weights of rows whose columns lie at several parties


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


@pytest.mark.parametrize("role", ["weight", "base-margin"])
def test_a_role_beside_no_labels_is_refused_by_name_at_home_alone(files, role):
    insurer = {"name": "insurer", "data": str(files(insurer=WEIGHTS)["insurer"]), "id": "id"}
    insurer |= {"label": "", role: "w"}
    rule = rf"{role} column {{}} must be in the table with the labels"
    with pytest.raises(DataError, match=rule.format("'w'")) as refused:
        read_columns(site_config(insurer, {}), seed=0)
    assert re.search(rule.format(r"\[withheld\]"), refused.value.outside)
    kept = read_columns(site_config({**insurer, "drop-columns": "w"}, {}), seed=0)
    assert (kept.columns, kept.weights, kept.base_margins) == (("c",), None, None)


def test_weights_of_the_party_without_labels_may_be_dropped(weighted, files):
    """Those beside the labels count all the same."""
    rule = "^insurer .*weight column 'w' must .* party that has the labels; .*drop-columns=w"
    with pytest.raises(PartyError, match=rule):
        run_local(weighted(files(insurer=WEIGHTS)))
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
