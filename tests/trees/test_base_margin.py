"""Base margins: every row starts from a margin of its own, as XGBoost's ``base_margin``."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost
from pyarrow import csv as arrow_csv
from pyarrow import table as arrow_table
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.data.datasets import read_source
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError, PartyError
from fedapp.records.document import from_text, load, to_text
from fedapp.runs.baselines import run_baselines
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.settings import SiteConfig, table_settings
from fedapp.site.table import Holdout, read_subsets
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import transform
from fedapp.trees.predict import predict_margins
from strategies.run import check_read
from tests.claims import claims_table
from tests.encrypted import encrypted, inference, written
from tests.federated import lines_of, summary_of
from tests.letters import letters_sent, raw_of
from tests.letters import written as forms_of
from tests.pooled import Pooled, assert_xgboosts
from tests.tables import made_columns, write_rows
from tests.transcript import listen
from tests.trees.test_exactness import agreement, assert_exact, pooled_booster

CLAIMS = "log_exposure"
FEW = {"max_depth": 4, "max_bin": 64}


def priors(name, path, n_rows=2000):
    """A CSV of a real table with the margins m of a prior score: its first column, standardised."""
    source = read_source(name)
    assert source.labels is not None
    first = np.nan_to_num(source.values[:n_rows, 0].astype(np.float64))
    margins = (first - first.mean()) / first.std()
    columns = dict(zip(source.columns, source.values[:n_rows].T, strict=True))
    frame = arrow_table({**columns, "m": margins, "y": source.labels[:n_rows]})
    arrow_csv.write_csv(frame, path)
    return path


@pytest.fixture
def claims(settings, real_data, tmp_path):
    """``claims(...)``: a run over simulated counts of claims, each with its exposure."""
    data = claims_table(tmp_path / "claims.csv", "default-credit", "count:poisson", 2000)

    def make(**more):
        given = {"objective": "count:poisson", "num_boost_round": 4, **FEW, **more}
        return settings(data=str(data), label="y", base_margin=CLAIMS, **given)

    return make


@pytest.fixture
def made(settings, tmp_path):
    """Settings of a short run over a small table with margins m."""

    def make(**more):
        objective = more.get("objective", "binary:logistic")
        columns = made_columns(objective)
        margins = np.random.default_rng(5).normal(size=len(columns["y"])).round(3)
        data = write_rows(tmp_path / f"{objective[:5]}.csv", {**columns, "m": margins})
        given = {"num_boost_round": 2, "max_depth": 3, "max_bin": 64, "base_margin": "m"}
        return settings(data=str(data), label="y", **{"objective": objective, **given, **more})

    return make


def subset(settings, name):
    """Rows of the pooled table."""
    whole = SiteConfig("all", settings.data, "y", base_margin=settings.base_margin)
    holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
    return read_subsets(whole, holdout)[name]


def matrix_of(table):
    return xgboost.DMatrix(table.values, table.labels, base_margin=table.base_margins)


# The same trees


@pytest.mark.by_default("cyclic")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
def test_one_party_grows_xgboosts_trees_of_claims(claims, strategy):
    assert_exact(agreement(claims(strategy=strategy, parties=1)), 4)


@pytest.mark.by_default("default-credit-*-pax")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
@pytest.mark.parametrize(
    ("data", "objective"),
    [("default-credit", "binary:logistic"), ("abalone", "reg:squarederror")],
)
def test_one_party_grows_xgboosts_trees_of_real_rows(
    settings, real_data, tmp_path, strategy, data, objective
):
    path = priors(data, tmp_path / "rows.csv")
    more = {"objective": objective, "base_margin": "m", "num_boost_round": 3, **FEW}
    run = settings(strategy=strategy, data=str(path), label="y", parties=1, **more)
    assert_exact(agreement(run), 3)


@pytest.mark.by_default("reg:squarederror")
@pytest.mark.parametrize("objective", ["binary:logistic", "reg:squarederror"])
def test_three_parties_grow_the_pooled_trees(made, objective):
    assert_exact(agreement(made(objective=objective, parties=3, pax__bins="equal")), 2)


def test_columns_at_several_parties_grow_xgboosts_trees(vertical, claims):
    more = {"objective": "count:poisson", "num_boost_round": 2, "max_depth": 3, "max_bin": 16}
    run = vertical(data=claims().data, label="y", base_margin=CLAIMS, columns="random", **more)
    folder, whole = run_local(run), Pooled(run)
    assert_xgboosts(folder, whole)
    model = load(folder.path / "model.json", Ensemble)
    assert model.margin_column == CLAIMS
    assert whole.base_margins is not None
    ours = transform(model.objective, predict_margins(model, whole.values, whole.base_margins))
    matrix = xgboost.DMatrix(whole.values, base_margin=whole.base_margins)
    np.testing.assert_allclose(ours[:, 0], whole.booster().predict(matrix), rtol=1e-6)


# Scores, predictions and the export


@pytest.mark.slow
@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "cyclic"])
def test_scores_of_the_rounds_are_xgboosts(claims, strategy):
    run = claims(strategy=strategy, parties=1, valid_fraction=0.2, eval_metric="poisson-nloglik")
    folder, theirs = run_local(run), dict[str, Any]()
    evals = [(matrix_of(subset(run, "valid")), "valid")]
    booster = pooled_booster(run, evals=evals, evals_result=theirs, verbose_eval=False)
    name = "poisson-nloglik"
    ours = [line["valid"][name] for line in lines_of(folder.rounds)]
    assert summary_of(folder)["base_margin"] == CLAIMS
    test = subset(run, "test")
    means = booster.predict(matrix_of(test)).astype(np.float64)
    from scipy.special import gammaln

    exact = float(np.mean(gammaln(test.labels + 1) + means - np.log(means) * test.labels))
    assert summary_of(folder)["metrics"]["test"][name] == pytest.approx(exact, rel=1e-6)
    assert ours == pytest.approx(_valid_scores(booster, run), rel=1e-6)


def _valid_scores(booster, run):
    """Negative log likelihood of the validation rows after each round."""
    from scipy.special import gammaln

    rows, found = subset(run, "valid"), []
    for n_rounds in range(1, run.num_boost_round + 1):
        means = booster.predict(matrix_of(rows), iteration_range=(0, n_rounds)).astype(np.float64)
        losses = gammaln(rows.labels + 1) + means - np.log(means) * rows.labels
        found.append(float(losses.mean()))
    return found


@pytest.mark.slow
def test_a_whole_model_predicts_as_xgboost_does(claims, tmp_path):
    run = claims(parties=1)
    folder, booster = run_local(run), pooled_booster(run)
    rows = load_table(Path(run.data), Roles(label="y", base_margin=CLAIMS))
    theirs = booster.predict(matrix_of(rows))
    predict_table(folder.path, run.data, "", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        ours = [float(row["prediction"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    stock = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    assert stock.attr("base_margin") == CLAIMS
    names = list(rows.columns)
    matrix = xgboost.DMatrix(rows.values, base_margin=rows.base_margins, feature_names=names)
    np.testing.assert_allclose(stock.predict(matrix), theirs, rtol=1e-6)
    found = stock.predict(matrix, pred_contribs=True)
    margins = stock.predict(matrix, output_margin=True)
    np.testing.assert_allclose(found.sum(axis=1), margins, atol=1e-4)


@pytest.mark.slow
@pytest.mark.by_default("interactive")
@pytest.mark.parametrize("way", ["interactive", "eini"])
def test_parties_that_predict_together_start_from_the_active_ones_margins(
    vertical, settings, made, way
):
    more = {"num_boost_round": 3, "max_depth": 3, "base_margin": "m", "label": "y"}
    trained = vertical(data=made().data, objective="binary:logistic", allow_export=False, **more)
    folder, whole = run_local(trained), Pooled(trained)
    trained = trained.model_copy(update={"run_dir": str(folder.path)})
    run = inference if way == "interactive" else encrypted
    given = {"label": "y", "align": "ordered", "seed": trained.seed}
    found = written(summary_of(run_local(run(settings, trained, **given))))[:, 0]
    matrix = xgboost.DMatrix(whole.values, base_margin=whole.base_margins)
    np.testing.assert_allclose(found, whole.booster().predict(matrix), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_baselines_start_from_the_same_margins(claims):
    run = claims(parties=1)
    found, score = run_baselines(run), summary_of(run_local(run))["metrics"]["test"]
    for name in ("rmse", "mae"):
        assert found["pooled"][name] == pytest.approx(score[name], rel=1e-5)
    without = run_baselines(run.model_copy(update={"base_margin": "", "drop_columns": CLAIMS}))
    assert without["pooled"]["rmse"] != found["pooled"]["rmse"]


# What leaves a party


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
def test_margins_stay_at_a_party(made, strategy):
    run = made(strategy=strategy, parties=1, num_boost_round=1)
    _, app = listen(run)
    margins = subset(run, "train").base_margins
    assert_none_told(margins, b"".join(raw_of(reply) for _, _, reply in app.heard))


@pytest.mark.slow
def test_margins_stay_at_the_active_party(vertical, made):
    """Also where a run goes on from another's model, for which rows walk down its trees."""
    more = {"num_boost_round": 1, "max_depth": 2, "base_margin": "m", "label": "y"}
    first = run_local(vertical(data=made().data, objective="binary:logistic", **more))
    goes_on = {"data": made().data, "objective": "binary:logistic", "init_model": str(first.path)}
    run = vertical(**goes_on, **more)
    _, app = listen(run)
    letters, walked = letters_sent(app), [kind for kind, _, _ in app.heard if "walk" in kind]
    assert walked
    whole = Pooled(run)
    assert whole.base_margins is not None
    told = [raw_of(reply) for _, _, reply in app.heard] + [letter.raw for letter in letters]
    for order in (whole.train, np.arange(len(whole.labels))):
        assert_none_told(whole.base_margins[order], b"".join(told))
    found = {(letter.name, letter.sender) for letter in letters}
    assert ("Questions", "party-1") in found
    assert ("Answers", "party-2") in found
    assert ("Questions", "party-2") not in found


def assert_none_told(margins, told):
    """No four neighbouring margins of the first rows in bytes that were sent."""
    found = forms_of(margins[:16], 4)
    assert len(found) > 40
    assert not [one for one in found if one in told]


# Going on from a model


@pytest.mark.slow
def test_a_run_that_goes_on_ends_in_the_model_of_all_rounds_at_once(made):
    first = run_local(made(num_boost_round=2))
    second = run_local(made(num_boost_round=2, init_model=str(first.path)))
    once = run_local(made(num_boost_round=4))
    texts = [(folder.path / "model.json").read_text() for folder in (second, once)]
    assert texts[0] == texts[1]


def test_a_model_of_other_margins_is_not_gone_on_from(made):
    first = run_local(made(num_boost_round=1, base_margin="", drop_columns="m"))
    rule = "^base-margin of init-model must be the run's, 'm', got ''$"
    with pytest.raises(ConfigError, match=rule):
        run_local(made(num_boost_round=1, init_model=str(first.path)))


def test_the_name_of_the_column_stays_with_the_model(made):
    model = load(run_local(made()).path / "model.json", Ensemble)
    assert model.margin_column == "m"
    assert from_text(to_text(model), Ensemble).margin_column == "m"
    with pytest.raises(ValueError, match=r"^base_margins must be those of .* column, which is 'm'"):
        predict_margins(model, np.zeros((2, 6), np.float32))


# What is refused


@pytest.mark.parametrize(
    ("cells", "rule"),
    [
        (["", "inf", "1"], "finite in every row, got 2 of 3 rows, first in line 2$"),
        (["1", "low", "2"], "be numbers: 1 of 3 values of 'm' is not a number, first 'low'"),
    ],
)
def test_margins_that_are_none_are_refused(tmp_path, cells, rule):
    path = tmp_path / "rows.csv"
    path.write_text("a,m,y\n" + "".join(f"{n},{cell},{n}\n" for n, cell in enumerate(cells)))
    with pytest.raises(DataError, match=f"base-margin column ('m' )?must (be )?{rule}"):
        load_table(path, Roles(label="y", base_margin="m"))


def test_a_schema_names_the_column(tmp_path):
    (tmp_path / "rows.toml").write_text('base-margin = "m"\n')
    found = table_settings({"data": "rows.csv", "schema": str(tmp_path / "rows.toml")})
    assert found["base_margin"] == "m"


def test_several_classes_take_no_margins(made):
    rule = "^base-margin must be omitted for multi:softprob, .* a margin for every class"
    with pytest.raises(ConfigError, match=rule):
        made(objective="multi:softprob")


@pytest.mark.parametrize("strategy", ["fedxgbllr", "fedavg-linear", "federated-forest"])
def test_methods_that_take_no_margins_say_so(settings, strategy):
    readers = "bagging, cyclic, pax, secureboost"
    rule = f"^base-margin must be omitted for {strategy}, .*; read by {readers}"
    with pytest.raises(ConfigError, match=rule):
        check_read(settings(strategy=strategy, base_margin="m"))


def test_a_site_with_margins_takes_no_part_where_they_would_be_ignored(made, settings, sites):
    table = {"data": made().data, "label": "y", "base-margin": "m"}
    nodes = [{"name": name, **table} for name in ("bank", "shop")]
    run = settings(strategy="fedavg-linear", parties=2, objective="binary:logistic")
    rule = r"base-margin must be empty in the node config, or .* \(pax, .*\), got fedavg-linear"
    with pytest.raises(PartyError, match=rule):
        run_local(run, sites(*nodes))


def test_all_parties_have_the_column_or_none(made, settings, sites):
    table = {"data": made().data, "label": "y"}
    nodes = [
        {"name": "bank", **table, "base-margin": "m"},
        {"name": "shop", **table, "drop-columns": "m"},
    ]
    rule = "^shop: base-margin must be that of bank at all parties, the column 'm', got none$"
    with pytest.raises(DataError, match=rule):
        run_local(settings(parties=2, objective="binary:logistic"), sites(*nodes))


def test_margins_of_a_site_of_several_classes_are_refused(made, settings, sites):
    data = write_rows(Path(made().data), {**made_columns("multi:softprob"), "m": np.ones(400)})
    table = {"data": str(data), "label": "y", "base-margin": "m"}
    nodes = [{"name": name, **table} for name in ("bank", "shop")]
    with pytest.raises(ConfigError, match="base-margin must be omitted for multi:softprob"):
        run_local(settings(parties=2, objective="auto"), sites(*nodes))


@pytest.mark.slow
@pytest.mark.by_default("True")
@pytest.mark.parametrize("whole", [True, False])
def test_a_table_without_the_column_is_not_predicted(vertical, made, tmp_path, monkeypatch, whole):
    monkeypatch.chdir(tmp_path)
    more = {"num_boost_round": 1, "max_depth": 2, "base_margin": "m", "label": "y"}
    run = vertical(data=made().data, objective="binary:logistic", allow_export=whole, **more)
    folder = run_local(run)
    data = write_rows(tmp_path / "new.csv", made_columns("binary:logistic"))
    given = ["predict", str(folder.path), "--data", str(data), "--output", "out.csv"]
    result = CliRunner().invoke(cli, given)
    assert result.exit_code != 0
    assert "table must have the base-margin column 'm', as the model" in _text(result)


def _text(result):
    said = f"{result.output} {result.exception}"
    return " ".join(said.split())


def test_margins_beside_no_labels_are_refused(vertical, made, sites, tmp_path):
    columns = made_columns("binary:logistic")
    ids = [f"p{row}" for row in range(len(columns["y"]))]
    other = {"z": columns["a"], "m": np.ones(len(ids)), "id": ids}
    bank = write_rows(tmp_path / "bank.csv", {**columns, "id": ids})
    shop = write_rows(tmp_path / "shop.csv", other)
    nodes = [
        {"name": "bank", "data": str(bank), "id": "id", "label": "y"},
        {"name": "shop", "data": str(shop), "id": "id", "base-margin": "m", "label": ""},
    ]
    rule = r"base-margin column \[withheld\] must be in the table with the labels"
    with pytest.raises(PartyError, match=rule):
        run_local(vertical(), sites(*nodes))
