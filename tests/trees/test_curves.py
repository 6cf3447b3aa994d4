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
from fedapp.records.document import to_document
from fedapp.runs.run import edited_model
from fedapp.trees.curves import LOWEST, curves_of, intercepts_of
from fedapp.trees.edited import Curves
from fedapp.trees.model import LEAF, NODE, Edit, Ensemble
from fedapp.trees.predict import find_leaves, predict_margins

pytestmark = pytest.mark.usefixtures("own_folder")
MODELS = {"columns": ("y", 0), "pairs": ("y", 3), "classes": ("three", 1)}
EDIT = Edit("Dr. A", "2026-01-02T03:04:05+00:00", "m")


def stump(column):
    leaves = [(LEAF, 0, 0, 0, False, 0, 2, value, value, -1) for value in (1, 3)]
    return np.array([(1, -1, column, 2, True, 0, 4, 0, 0, -1), *leaves], NODE)


HAND_MADE = Ensemble(
    *("binary:logistic", np.float32([0.5]), ("a", "b"), ("0", "1"), (stump(0), stump(1)))
)


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
    for axis in (axis for curve in curves for axis in curve.axes):
        points = axis.points[1:-1]
        near = np.nextafter(points, np.float32(-np.inf))
        values[axis.column] = np.union1d(values[axis.column], [*points, *near]).astype(np.float32)
    return np.array([*product(*(np.random.default_rng(0).permutation(v)[:20] for v in values))])


@pytest.mark.parametrize("kind", MODELS)
def test_intercept_and_curves_are_the_margin_and_a_model_again(table, kind):
    run = train(table, kind)
    curves = curves_of(run.model)
    assert {len(curve.axes) for curve in curves} == {1, 1 + (kind != "columns")}
    rows = rows_around(curves, len(run.model.columns))
    expected = predict_margins(run.model, rows)
    sums = intercepts_of(run.model) + sum(curve.of(rows) for curve in curves)
    assert np.allclose(sums, expected, atol=2e-6)
    document = to_document(Curves.of(run.model, "m"))
    # What a curve gets more, the intercepts get less: curves stay as they were written.
    first = document["curves"][0]
    first["values"] = [[value + 1 for value in of_output] for of_output in first["values"]]
    document["intercepts"] = [value - 1 for value in document["intercepts"]]
    again = edited_model(run.model, json.dumps(document), EDIT)
    assert (again.edits, run.model.edits) == ((EDIT,), ())
    assert np.allclose(predict_margins(again, rows), expected, atol=3e-6)
    assert np.allclose(intercepts_of(again), document["intercepts"], atol=2e-6)
    for curve, ours, theirs in zip(curves_of(again), document["curves"], curves, strict=True):
        assert np.allclose(curve.values, ours["values"], atol=1e-6)
        assert [axis.sides() for axis in curve.axes] == [axis.sides() for axis in theirs.axes]
        assert np.allclose(curve.weights, np.nan_to_num(theirs.weights), atol=1e-5)
    shap = np.asarray(run.explain(table))
    if kind == "columns":  # of pairs SHAP gives each column a half
        for curve in curves:
            ours = curve.of(run._rows(str(table), "").table.values)[:, 0]
            assert np.allclose(shap[:, curve.axes[0].column], ours, atol=1e-6)
        assert np.allclose(shap[:, -1], intercepts_of(run.model), atol=1e-6)


def test_weights_are_shares_of_the_first_trees_leaves(table):
    model = train(table).model
    curve = curves_of(model)[0]
    tree = next(tree for tree in model.trees if len(tree) > 1 and tree["column"][0] == 0)
    (leaves,) = find_leaves([tree], curve.axes[0].points[:-1, None])
    shares = np.where(tree["left"] < 0, tree["hessian"], 0) / tree["hessian"][0]
    assert np.allclose(np.bincount(leaves, curve.weights[:-1], len(tree)), shares)
    assert np.isnan(curve.weights[-1])


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


RULE = "curves must be of this run, with only intercepts and values edited"


@pytest.mark.parametrize(
    ("place", "change", "error"),
    [
        ("values", [[0.0] * 2], r"curves\[1\].values must be of shape \(1, 3\), got \(1, 2\)"),
        ("values", [[0.0, 0.0, float("inf")]], r"curves\[1\].values must be finite"),
        ("values", [[0.0, 0.0, None]], r"curves\[1\].values must be finite"),
        ("values", [[0.0, 0.0, 1e37]], r"curves\[1\].values must be <= 1.3"),
        ("values", [[0.0] * 3] * 2, RULE),
        ("weights", [1.0] * 3, RULE),
        ("axes", [{"name": "b", "column": 0, "edges": [2.0]}], RULE),
        ("axes", [{"name": "b", "column": 1, "edges": [2.5]}], RULE),
        ("curves", [], RULE),
        ("intercepts", [0.0, 0.0], RULE),
    ],
)
def test_edited_curves_that_break_a_rule_are_refused(place, change, error):
    document = to_document(Curves.of(HAND_MADE, "m"))
    (document if place in document else document["curves"][1])[place] = change
    with pytest.raises((DataError, ConfigError), match=error):
        edited_model(HAND_MADE, json.dumps(document), EDIT)


def test_a_model_of_edited_curves_says_so_wherever_it_is_used(table):
    path = train(table).path

    def command(*words):
        return CliRunner().invoke(cli, [*map(str, words)])

    for _ in range(2):
        done = command("export", path, "--to", "curves")
        assert done.exit_code == 0, done.output
    document = json.loads((path / "curves.json").read_text())
    document["curves"][0]["values"][0][-1] += 1  # of missing values
    (path / "curves.json").write_text(json.dumps(document))
    edited = "output must be a new file, or unedited curves that fedapp wrote, got "
    assert edited in str(command("export", path, "--to", "curves").exception)
    (path / "curves.json").rename("new.json")
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
    inside = command(*how[:5], path / "edited", how[-1], "B")
    assert "output must be outside of the run's folder, got" in str(inside.exception)
    assert "output must be a new or an empty folder" in str(command(*how, "B").exception)
    Path("new.json").write_text(json.dumps({**document, "model_id": "another"}))
    assert RULE in str(command(*how[:5], "no", how[-1], "B").exception)
    assert not Path("no").exists()
