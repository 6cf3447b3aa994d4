"""SecureBoost: XGBoost's own trees over columns of several parties, under encryption."""

from types import SimpleNamespace

import numpy as np
import pytest
import xgboost

from clients.secureboost.round import draw_rows
from fedapp.data.read import read_frame
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError
from fedapp.runs.local import run_local
from fedapp.trees.model import LEAF
from fedapp.trees.predict import predict_margins
from fedapp.trees.rounds import Sampling
from fedapp.trees.sets import NO_SET, category_counts
from fedapp.trees.xgboost import typed_columns
from strategies.secureboost import SecureBoost
from tests.federated import lines_of, model_of
from tests.pooled import Pooled, assert_xgboosts, splits_of
from tests.tables import claims, made_columns, write_rows
from tests.texts import adult, kddcup
from tests.trees.test_exactness import PENALTIES

CLAIMS = {  # objectives of claims, and their settings
    "count:poisson": {},
    "reg:gamma": {},
    "reg:tweedie": {"tweedie_variance_power": 1.3},
    "reg:logistic": {"max_delta_step": 0.3},
    "reg:squaredlogerror": {},
    "reg:pseudohubererror": {"huber_slope": 0.5},
    "binary:hinge": {},
}


@pytest.fixture
def made(vertical, tmp_path):
    """``vertical`` with a small table of an objective, which may have weights."""

    def make(objective="binary:logistic", parties=2, **more):
        columns = made_columns("reg:squarederror" if objective in CLAIMS else objective)
        if objective in CLAIMS:
            values = np.stack([columns[name] for name in "abcdef"], axis=1)
            columns["y"] = claims(objective, values)
        if "weight" in more:
            rng = np.random.default_rng(7)
            columns["w"] = rng.choice([0.0, 0.5, 1.0, 2.5], len(columns["y"]))
        data = write_rows(tmp_path / "made.csv", columns)
        given = {"num_boost_round": 3, "max_depth": 3, "max_bin": 16, **more}
        return vertical(data=str(data), label="y", objective=objective, parties=parties, **given)

    return make


# The same trees

EXACT = {
    "classes of three parties": ("multi:softprob", {"parties": 3}),
    "penalties": ("binary:logistic", PENALTIES),
    "weights": ("multi:softprob", {"weight": "w"}),
    "positive rows": ("binary:logistic", {"scale_pos_weight": 3.0}),
    "steps": ("multi:softprob", {"max_delta_step": 0.4, "alpha": 0.2}),
    "constraints": (
        "reg:squarederror",
        {"monotone_constraints": "a:1,b:-1", "interaction_constraints": "[a,b,c,f],[d,e]"},
    ),
    **{objective: (objective, more) for objective, more in CLAIMS.items()},
}


@pytest.mark.by_default(
    "classes of three parties", "penalties", "weights", "constraints", "reg:tweedie", "binary:hinge"
)
@pytest.mark.parametrize(("objective", "more"), EXACT.values(), ids=EXACT)
def test_the_joined_model_is_xgboosts_on_the_joined_table(made, objective, more):
    run = made(objective, **more)
    assert_xgboosts(run_local(run), Pooled(run))


@pytest.mark.by_default("adult-*")
@pytest.mark.parametrize(
    ("write", "label", "objective", "n_rows", "parties"),
    [
        (adult, "income", "binary:logistic", 800, 3),
        (kddcup, "label", "multi:softprob", 400, 2),
    ],
)
def test_columns_of_text_are_split_as_by_xgboost(
    vertical, real_data, tmp_path, write, label, objective, n_rows, parties
):
    given = {"data": str(write(tmp_path, real_data, n_rows)), "label": label, "parties": parties}
    given |= {"num_boost_round": 2, "max_depth": 3, "max_bin": 8, "max_cat_to_onehot": 10}
    run = vertical(objective=objective, columns="random", seed=1, **given)
    folder, whole = run_local(run), Pooled(run)
    assert_xgboosts(folder, whole)
    model = model_of(folder)
    splits = splits_of(model)
    owners = whole.owners(splits["column"])
    assert (owners[splits["set"] != NO_SET] > 0).any()  # some at passive parties
    matrix = xgboost.DMatrix(
        whole.values, **typed_columns(category_counts(model.categories, len(model.columns)))
    )
    theirs = whole.booster().predict(matrix, output_margin=True)
    margins = predict_margins(model, whole.values).reshape(theirs.shape)
    np.testing.assert_allclose(margins, theirs, rtol=1e-6, atol=1e-6)


def test_the_joined_model_is_xgboosts_on_files_of_two_parties(real_data, vertical):
    files = ",".join(str(real_data / f"student-hetero-{part}.csv") for part in ("guest", "host"))
    more = {"label": "y", "id": "id", "objective": "reg:squarederror", "align": "psi"}
    run = vertical(data=files, num_boost_round=4, max_depth=4, **more)
    assert_xgboosts(run_local(run), Pooled(run))


def test_first_trees_of_the_active_party_alone_and_later_ones_are_xgboosts(made):
    run = made(secureboost__first_trees=1)
    whole, folder = Pooled(run), run_local(run)
    is_local = whole.owners(np.arange(6)) == 0
    alone = np.where(is_local, whole.values, np.float32(np.nan))
    first = xgboost.train(whole.parameters, whole.matrix(alone), 1)
    later = xgboost.train(whole.parameters, whole.matrix(whole.values), 2, xgb_model=first)
    assert_xgboosts(folder, whole, later)
    split = [tree["column"][tree["left"] != LEAF] for tree in model_of(folder).trees]
    assert [bool(whole.owners(columns).any()) for columns in split] == [False, True, True]
    steps = {line["step"] for line in lines_of(folder.ledger) if line["type"].endswith("_sum")}
    assert len(steps) == 2 * 3  # of the levels of later trees


# Rows and columns that are drawn


def test_a_tree_splits_none_but_the_columns_drawn_for_it(made):
    run = made("multi:softprob", colsample_bytree=0.5)
    model = model_of(run_local(run))
    drawn = [Sampling(run.seed, 0.5).columns(round_id, 3, 6) for round_id in range(3)]
    for tree, allowed in zip(model.trees, np.concatenate(drawn), strict=True):
        columns = tree["column"][tree["left"] != LEAF]
        assert len(columns)
        assert allowed[columns].all()


def test_a_round_counts_none_but_the_rows_drawn_for_it(made):
    # Hessians are 1, so that the root's is the number of rows; of 288 about half are drawn.
    drawn, by_goss = (
        [
            float(tree["hessian"][0])
            for tree in model_of(run_local(made("reg:squarederror", **more))).trees
        ]
        for more in ({"subsample": 0.5}, {"secureboost__goss": True})
    )
    assert all(count.is_integer() and 115 < count < 173 for count in drawn)
    assert len(set(drawn)) == 3
    assert by_goss == [57 + 28 * 8] * 3  # 57 count once and 28 count 8 times


def test_goss_keeps_large_gradients_and_makes_up_for_the_others_it_leaves_out():
    boost = SimpleNamespace(
        num_parallel_tree=1, subsample=1.0, goss=True, top_rate=0.2, other_rate=0.1
    )
    rng = np.random.default_rng(1)
    pairs = rng.normal(size=(1000, 3, 2)).astype(np.float32)
    drawn = draw_rows(pairs.copy(), boost, rng)
    sizes = np.abs(pairs[..., 0]).sum(axis=1)
    top = sizes >= np.sort(sizes)[-200]
    rest = ~top & (drawn != 0).any(axis=(1, 2))
    assert np.array_equal(drawn[top], pairs[top])
    assert rest.sum() == 100
    # Ke et al. 2017, Algorithm 2: the sampled others stand for all of them, by (1 - a) / b.
    np.testing.assert_allclose(drawn[rest], pairs[rest] * 8, rtol=1e-6)


def first_rows(source, n_rows, target, drop=""):
    """The first rows of a table, as CSV."""
    from pyarrow import csv

    frame = read_frame(source, Roles()).slice(0, n_rows)
    csv.write_csv(frame.drop_columns([drop]) if drop else frame, target)
    return str(target)


CREDIT = ("give-me-some-credit.csv.gz", "SeriousDlqin2yrs", "unnamed-1")
DEFAULT = ("default-credit.csv.gz", "default.payment.next.month", "ID")


def test_rounds_grown_alone_are_no_more_than_early_stopping_waits_for(made):
    more = {"secureboost__first_trees": 4, "early_stopping_rounds": 3, "valid_fraction": 0.3}
    rule = "^secureboost.first-trees must be at most early-stopping-rounds where that is set, got 4"
    with pytest.raises(ConfigError, match=rule):
        SecureBoost.section_settings(made(**more))
