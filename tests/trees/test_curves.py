"""Curves of additive models: exact sums, as SHAP has them; edited, they are a model again."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.errors import ConfigError, DataError
from fedapp.records.document import from_document, to_document
from fedapp.trees.curves import LOWEST, Curve, contributions, curves_of, intercepts_of
from fedapp.trees.edited import Curves, model_of_curves
from fedapp.trees.model import Edit, Ensemble
from fedapp.trees.predict import find_leaves, predict_margins

pytestmark = pytest.mark.usefixtures("own_folder")
MODELS = {"columns": ("y", 0), "pairs": ("y", 3), "classes": ("three", 1)}
EDIT = Edit("Dr. A", "2026-01-02T03:04:05+00:00", "m")


A = Curve("a", (0,), 0, (np.float32([0, 2]),), (False,), np.array([1, -1, 3, 2.0]), np.ones(4))
TOWN = np.array([0.1, 0.2, 0.3, 0.15, 0.15, 0.1])
TOWN = Curve("town", (1,), 0, (np.arange(5, dtype=np.float32),), (True,), np.arange(6.0), TOWN)
HAND_MADE = Ensemble(
    *("binary:logistic", np.float32([0.5]), ("a", "town"), ("0", "1"), ()),
    categories=(None, tuple("ABCDE")),
)
HAND_MADE = Curves("m", HAND_MADE, np.array([0.25]), (A, TOWN))


@pytest.fixture
def table(write_table):
    """Rows with missing values and categories; what `a` and `town` say of y is no sum."""
    rng = np.random.default_rng(5)
    town, a = rng.choice([*"ABCDE", ""], 160), rng.normal(size=160).round(1)
    y = ((town < "C") * a + a + rng.normal(0, 0.5, 160) > 0).astype(int)
    three = y + rng.integers(0, 2, 160)
    a = [value if value > -1 else "" for value in a]
    return write_table(n_rows=160, a=a, town=town, y=y, three=three)


def train(table, kind="columns", **more):
    label, pairs = MODELS[kind]
    given = {"parties": 2, "num_boost_round": 6, "max_depth": 3, "eta": 0.5, "max_bin": 16}
    dropped = {"y": "three", "three": "y"}[label]
    given |= {"pax": {"additive": True, "pairs": pairs}, "drop_columns": dropped, **more}
    return fedapp.run("pax", data=table, label=label, **given)


def rows_around(curves, n_columns):
    """Rows of all edges, their neighbours, the ends of float32, missing and unknown values."""
    ends = [LOWEST, -LOWEST, np.nan, -1, 3.5, 99]
    values = [np.array(ends, np.float32) for _ in range(n_columns)]
    for curve in curves:
        for column, edges in zip(curve.columns, curve.edges, strict=True):
            near = np.nextafter(edges, np.float32(-np.inf))
            values[column] = np.union1d(values[column], [*edges, *near]).astype(np.float32)
    return np.array([*product(*(np.random.default_rng(0).permutation(v)[:20] for v in values))])


def margins_of(model, curves, rows):
    added = contributions(curves, rows)
    outputs = np.array([curve.output for curve in curves])
    return intercepts_of(model) + added @ (outputs[:, None] == np.arange(model.n_outputs))


@pytest.mark.parametrize("kind", MODELS)
def test_intercept_and_curves_are_the_margin_and_a_model_again(table, kind):
    run = train(table, kind)
    curves = curves_of(run.model)
    assert {len(curve.columns) for curve in curves} == {1, 1 + (kind != "columns")}
    rows = rows_around(curves, len(run.model.columns))
    expected = predict_margins(run.model, rows)
    assert np.allclose(margins_of(run.model, curves, rows), expected, atol=2e-6)
    document = to_document(Curves.of(run.model, "m"))
    again = model_of_curves(from_document(json.loads(json.dumps(document)), Curves), EDIT)
    assert (again.edits, run.model.edits) == ((EDIT,), ())
    assert np.allclose(predict_margins(again, rows), expected, atol=2e-6)
    assert np.allclose(intercepts_of(again), intercepts_of(run.model), atol=2e-6)
    for ours, theirs in zip(curves_of(again), curves, strict=True):
        assert np.allclose(ours.values, theirs.values, atol=1e-6)
        assert all(map(np.array_equal, ours.edges, theirs.edges))
        assert np.allclose(ours.weights, np.nan_to_num(theirs.weights), atol=1e-5)
    shap = np.asarray(run.explain(table))
    if kind == "columns":  # of pairs SHAP gives each column a half
        ours = contributions(curves, run._rows(str(table), "").table.values)
        assert np.allclose(shap[:, :-1][:, [c.columns[0] for c in curves]], ours, atol=1e-6)
        assert np.allclose(shap[:, -1], intercepts_of(run.model), atol=1e-6)


def test_weights_are_shares_of_the_first_trees_leaves(table):
    model = train(table).model
    curve = curves_of(model)[0]
    tree = next(tree for tree in model.trees if len(tree) > 1 and tree["column"][0] == 0)
    leaves = np.zeros(len(rows := np.append(LOWEST, curve.edges[0])), np.int32)
    find_leaves(tree, rows[:, None], leaves)
    shares = np.where(tree["left"] < 0, tree["hessian"], 0) / tree["hessian"][0]
    assert np.allclose(np.bincount(leaves, curve.weights[:-1], len(tree)), shares)
    assert np.isnan(curve.weights[-1])
    of_missing = curves_of(model_of_curves(HAND_MADE, EDIT))[1]
    assert np.allclose(of_missing.weights, TOWN.weights)
    assert np.allclose(of_missing.values, TOWN.values)  # as it was written


def test_a_frame_has_a_line_a_place_and_the_spread_over_runs(table):
    runs = [train(table, "pairs", seed=seed, valid_fraction=0.3) for seed in (1, 2)]
    frame = runs[0].curves(*runs[1:])
    alone = [run.curves() for run in runs]
    assert set(frame["column"]) == {curve.name for run in runs for curve in curves_of(run.model)}
    a = frame[(frame["column"] == "a") & frame["category"].isna()]
    assert (a["to"].iloc[:-1].to_numpy() == a["from"].iloc[1:].to_numpy()).all()
    of_runs = []
    for each in alone:
        each = each[(each["column"] == "a") & each["category"].isna()]
        at = np.searchsorted(each["from"], a["from"], side="right") - 1
        of_runs.append(each["margin"].to_numpy()[at])
    assert a["margin"].tolist() == of_runs[0].tolist()
    assert np.allclose(a[["low", "high"]].T, np.quantile(of_runs, (0.05, 0.95), axis=0))
    assert a["weight"].sum() == pytest.approx(1)
    pair = frame[frame["column"] == "a & town"]
    assert set(pair["category_2"]) == {*"ABCDE", " (missing)"}
    with pytest.raises(ConfigError, match="the same columns, categories and classes"):
        runs[0].curves(train(table, drop_columns="three,b"))
    with pytest.raises(ConfigError, match=r"split one column or two, .* to have curves, got one"):
        train(table, pax={}, max_depth=5).curves()


@pytest.mark.parametrize(
    ("place", "change", "error"),
    [
        ("columns", [7], r"curves\[1\].columns must be one or two of 0 to 1, ascending: fedapp ex"),
        ("name", "ab", r"curves\[1\].name must be 'town', of its columns"),
        ("output", 1, r"curves\[1\].output must be 0 to 0"),
        ("is_coded", [False], r"curves\[1\].is_coded must be true for categories"),
        ("edges", [[0, 1]], r"curves\[1\].edges must be 0 to 4, all codes"),
        ("values", [[0.0] * 5], r"curves\[1\].values must be of shape \(6,\)"),
        ("values", [[0.0] * 5 + [float("inf")]], r"curves\[1\].values\[0\] must be finite or null"),
        ("values", [[0.0] * 5 + [None]], r"curves\[1\].values must be numbers from .* not null"),
        ("values", [[0.0], [1.0, 2.0]], "must be rows of one length"),
        ("weights", [[-1] * 6], r"curves\[1\].weights must be >= 0 or null"),
    ],
)
def test_edited_curves_that_break_a_rule_are_refused_by_their_place(place, change, error):
    document = json.loads(json.dumps(to_document(HAND_MADE)))
    document["curves"][1][place] = change
    with pytest.raises(DataError, match=error):
        from_document(document, Curves)


def test_a_model_of_edited_curves_says_so_wherever_it_is_used(table):
    path = train(table).path

    def command(*words):
        return CliRunner().invoke(cli, [*map(str, words)])

    done = command("export", path, "--to", "curves")
    assert done.exit_code == 0, done.output
    document = json.loads((path / "curves.json").read_text())
    document["curves"][0]["values"][0][-1] += 1  # of missing values
    Path("new.json").write_text(json.dumps(document))
    how = "export", path, "--edited", "new.json", "--output", "edited", "--edited-by"
    for name in (" ", "a" * 101, "a\nb"):
        assert "--edited-by must name who answers" in str(command(*how, name).exception)
    done = command(*how, "Dr. <A>")
    assert done.exit_code == 0, done.output
    runs = fedapp.load(path), fedapp.load("edited")
    before = runs[0].predict(table, output_margin=True)
    with pytest.warns(UserWarning, match=r"the curves of model \w+ were edited by Dr. <A> on 20"):
        change = runs[1].predict(table, output_margin=True) - before
    is_missing = np.isnan(runs[0]._rows(str(table), "").table.values[:, 0])
    assert np.allclose(change, is_missing, atol=1e-5)
    assert "edited by Dr. <A> on" in runs[1].summary["warnings"][-1]  # which the report has
    assert "edited by Dr. &lt;A> on" in Path("edited", "model-card.md").read_text()
    done = command("predict", "edited", "--data", table, "--output", "out.csv")
    assert "were edited by Dr. <A> on 20" in done.output
    assert "output must be a new or an empty folder" in str(command(*how, "B").exception)
    Path("new.json").write_text(json.dumps({**document, "model_id": "another"}))
    assert "must be of this run, with only" in str(command(*how[:5], "no", how[-1], "B").exception)
    assert not Path("no").exists()
