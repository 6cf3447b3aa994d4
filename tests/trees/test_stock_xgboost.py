"""Stock XGBoost predicts encoded rows as fedapp does; explanations, and kinds of columns."""

import json
from dataclasses import replace

import numpy as np
import pyarrow.csv
import pytest
import xgboost

import fedapp
from strategies.common_table import joint_kinds
from tests.strategies.test_meeting import REPLY

pytestmark = pytest.mark.usefixtures("own_folder")
KINDS = {"a": "number", "b": "number", "member": "boolean", "since": "date", "town": "category"}


@pytest.fixture
def loans(write_table):
    """A table of numbers, yes and no, dates and names, with missing values."""
    rng, n_rows = np.random.default_rng(3), 120
    days = [f"20{10 + day % 9}-0{1 + day % 9}-1{day % 7}" for day in rng.permutation(n_rows)]
    given = {
        "member": rng.choice(["Yes", "no", "Y", ""], n_rows).tolist(),
        "since": ["NA" if row % 8 == 0 else day for row, day in enumerate(days)],
        "town": rng.choice(["Oslo", "None", "Bergen", "?"], n_rows).tolist(),
    }
    given["y"] = [
        int((member in ("Yes", "Y")) != (town == "Oslo") or rng.random() < 0.2)
        for member, town in zip(given["member"], given["town"], strict=True)
    ]
    return write_table("new-loans", n_rows=n_rows, **given)


@pytest.mark.by_default("pax", "additive")
@pytest.mark.parametrize("strategy", ["pax", "additive", "bagging", "secureboost"])
def test_encoded_rows_have_the_models_margins_in_stock_xgboost(strategy, loans):
    given = {"num_boost_round": 8, "max_depth": 4, "eta": 0.3}
    if strategy == "secureboost":
        given |= {"align": "ordered", "secureboost": {"key_bits": 512, "insecure_small_key": True}}
        given["allow_export"] = True
    if strategy == "additive":
        strategy, given["pax"] = "pax", {"additive": True, "pairs": 2}
    run = fedapp.run(strategy, data=str(loans), label="y", parties=2, **given)
    frame, booster = run.encode(str(loans)), run.to_xgboost()
    assert list(frame.columns) == list(booster.feature_names)
    theirs = booster.predict(xgboost.DMatrix(frame, enable_categorical=True), output_margin=True)
    shares = run.predict_proba(str(loans))
    ours = np.log(shares[:, 1] / shares[:, 0])
    np.testing.assert_allclose(theirs, ours, rtol=1e-5, atol=1e-6)
    found = json.loads((run.path / "columns.json").read_text())["columns"]
    assert {name: column["kind"] for name, column in found.items()} == KINDS
    assert sorted(found["town"]["names"]) == ["Bergen", "None", "Oslo"]
    assert {"member", "since", "town"} <= booster.get_score().keys()


def test_explanations_name_their_columns_and_classes(write_table):
    many = write_table("many", n_rows=60, y=["low", "mid", "high"] * 20)
    run = fedapp.run("pax", data=str(many), label="y", parties=2, num_boost_round=2)
    found = run.explain(str(many))
    assert found.shape == (60, 9)
    assert list(found["mid"].columns) == ["a", "b", "bias"]
    booster = run.to_xgboost()
    rows = xgboost.DMatrix(pyarrow.csv.read_csv(many).select(["a", "b"]))
    due = booster.predict(rows, output_margin=True)
    for place, name in enumerate(run.classes):
        np.testing.assert_allclose(found[name].sum(axis=1), due[:, place], atol=1e-5)


def test_a_model_of_parties_cannot_be_encoded_for(write_table):
    given = {"parties": 2, "align": "ordered", "federated_forest": {"trees": 2}}
    run = fedapp.run("federated-forest", data=str(write_table()), label="y", **given)
    with pytest.raises(
        fedapp.ConfigError, match=r"^encode must be of a whole model, got a divided one"
    ):
        run.encode(str(write_table()))


@pytest.mark.parametrize(
    ("kinds", "due"),
    [
        ([("date",), ("date",), ("",)], ("date",)),
        ([("boolean",), ("binary",)], ("boolean",)),
        ([("number",), ("binary",)], ("number",)),
        ([(), ("",)], ("number",)),
        *(
            ([("date",), (other,)], r"^column 'a' must be of one kind at all parties")
            for other in ("boolean", "number", "binary", "duration")
        ),
        ([("date", "date")], r"HelloReply\.kinds must be known ones, one a"),
    ],
)
def test_a_column_has_the_kind_of_all_parties_that_have_values(kinds, due):
    parties = {f"p{place}": replace(REPLY, kinds=each) for place, each in enumerate(kinds)}
    if isinstance(due, tuple):
        assert joint_kinds(parties) == due
    else:
        with pytest.raises(fedapp.FedappError, match=due):
            joint_kinds(parties)
