"""What labels decide, an open objective and a balanced weight: the model is as if it were said."""

from contextlib import nullcontext

import numpy as np
import pytest

from fedapp.conversation import ask
from fedapp.crypto.noise import Budget
from fedapp.data.labels import AUTO, auto_objective, check_spelling, class_names
from fedapp.errors import ConfigError, DataError, PartyError
from fedapp.messages.scoring import BalanceReply, BalanceRequest
from fedapp.runs.baselines import baseline_rows, run_baselines
from fedapp.runs.local import run_local
from fedapp.runs.tables import check_tables
from fedapp.settings import load_settings
from fedapp.site import sums
from strategies.horizontal import HorizontalStrategy
from tests.federated import model_bytes

BOOSTED = {"num-boost-round": 2, "max-depth": 2, "max-bin": 8}
SMALL_KEY = {"key-bits": 512, "insecure-small-key": True}
METHODS = {
    "pax": BOOSTED,
    "bagging": BOOSTED,
    "cyclic": BOOSTED,
    "fedxgbllr": {"fedxgbllr": {"trees": 6, "max-depth": 2, "rounds": 1, "epochs": 1}},
    "fedavg-linear": {"fedavg-linear": {"rounds": 2}},
    "secureboost": {**BOOSTED, "parties": 2, "secureboost": SMALL_KEY},
    "federated-forest": {"parties": 2, "federated-forest": {**SMALL_KEY, "trees": 2}},
}


@pytest.mark.parametrize(
    ("labels", "objective"),
    [
        ([["a", "b"]], "binary:logistic"),
        ([["a"], ["b"], ["c"]], "multi:softprob"),
        ([[0.0, 1.0], [1.0]], "binary:logistic"),
        ([[0.5, 1.5], [2.5, 1.5]], "reg:squarederror"),
        ([list(range(20))], "multi:softprob"),
        ([list(range(21))], "reg:squarederror"),
        ([list(range(15)), list(range(10, 25))], "reg:squarederror"),
    ],
)
def test_the_labels_of_all_parties_choose(labels, objective):
    found = [class_names(np.array(own), AUTO) for own in labels]
    assert auto_objective(found)[0] == objective


LACKING = "no value in common"
SPELLED = "only in case or spaces"


@pytest.mark.parametrize(
    ("labels", "fault"),
    [
        ([["no", "yes"], ["0", "1"]], LACKING + r": 'no', 'yes' at A; '0', '1' at B"),
        ([["no", "yes"], ["no", "yes"], ["0", "1"]], "'no', 'yes' at B; '0', '1' at C"),
        ([["a"], ["b"]], LACKING + ".*set objective=binary:logistic"),
        ([["NO", "YES"], ["no", "yes"]], SPELLED + ", or as 1 and 01: 'NO', 'YES' at A"),
        ([["01", "1", "2"], ["1.50", "01", "02"]], SPELLED + ", or as 1 and 01"),
        ([["up to  1", "more"], ["up to 1", "more"]], SPELLED),
        ([["0", "1"], ["1", "2"]], "overlap only in part: '0', '1' at A; '1', '2' at B"),
        # Parties may lack classes of others.
        ([["a", "b"], ["a", "b", "c"]], ""),
        ([["a", "b", "c"], ["b", "c", "d"]], ""),
        ([["A", "a"], ["a"]], ""),
    ],
)
def test_classes_that_parties_spell_differently_are_refused(labels, fault):
    rule = f"^label must be spelled alike at all parties.*{fault}"
    with pytest.raises(DataError, match=rule) if fault else nullcontext():
        check_spelling(dict(zip("ABCD", labels, strict=False)), is_open=True)


def test_an_explicit_objective_takes_classes_that_differ_but_for_their_case(write_table, settings):
    def run(first, second, **more):
        tables = write_table("x", y=first * 20), write_table("z", seed=1, y=second * 20)
        data = ",".join(map(str, tables))
        given = settings(data=data, label="y", parties=2, num_boost_round=1, **more)
        run_local(given)

    with pytest.raises(DataError, match="no value in common: 'no', 'yes' at party-1; '0', '1' at"):
        run(["no", "yes"], [0, 1], objective=AUTO)
    run(["no", "yes"], [0, 1], objective="multi:softprob")
    with pytest.raises(DataError, match=r"differ only in case or spaces, .* in a schema$"):
        run(["no", "yes"], ["NO", "YES"], objective="multi:softprob")
    with pytest.raises(DataError, match=r"the parties have 4: .*'no', 'yes' at party-1; '0', '1'"):
        run(["no", "yes"], [0, 1], objective="binary:logistic")


def test_shares_of_one_table_may_have_any_classes(write_table, settings):
    classes = ["a"] * 20 + ["A"] * 20
    table = write_table(y=classes, site=classes)
    given = {"data": str(table), "label": "y", "partition": "column:site", "parties": 2}
    assert run_local(settings(objective=AUTO, **given)).summary["objective"] == "binary:logistic"


def test_text_and_numbers_as_labels_do_not_fit_together():
    with pytest.raises(DataError, match="label must be of one type at all parties"):
        auto_objective([("a", "b"), ()])


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        ([*(f"{i}.5" for i in range(150)), "n/a"], "numbers and other text: 1 of 151.*'n/a'.*miss"),
        ([f"9,{i:02d}" for i in range(150)], "numbers with commas: .*decimal=,"),
        ([f"9,{i:03d}" for i in range(150)], "numbers with commas: .*; remove the marks that set"),
        (["0", "1", *["NULL"] * 8], "numbers and other text"),
        ([*["0"] * 8, "none", "some"], "numbers and other text"),
        ([f"{i}%" for i in range(150)], "150 different texts in 150 rows"),
        (["<=50K", ">50K"], ""),  # names of classes may look like numbers in part
        (["1", "low", "high"], ""),
    ],
)
def test_text_that_may_be_meant_as_numbers_is_no_class_unless_said(labels, found):
    rule = f"objective=auto, got {found}.*set objective=multi:soft"
    with pytest.raises(DataError, match=rule) if found else nullcontext() as caught:
        assert class_names(np.array(labels), AUTO) == tuple(sorted(set(labels)))
    if found:  # which others get without a value
        assert not any(f"'{label}'" in str(caught.value.for_others(True)) for label in labels)
    assert class_names(np.array(labels), "multi:softprob") == tuple(sorted(set(labels)))


def test_a_regression_says_what_to_do_about_text():
    with pytest.raises(DataError, match=r"1 of 2 that are none, as 'n/a'; .*missing-label=drop"):
        class_names(np.array(["1.5", "n/a"]), "reg:squarederror")
    for written, way in (("9,25", "set decimal=,"), ("9,250", "remove the marks that set off th")):
        with pytest.raises(DataError, match=f"as '{written}'; {way}"):
            class_names(np.array([written]), "reg:squarederror")


@pytest.mark.by_default("pax-wine-*", "fedavg-linear-*")
@pytest.mark.parametrize(
    ("method", "data", "objective"),
    [
        ("pax", "breast-cancer", "binary:logistic"),
        ("pax", "diabetes", "reg:squarederror"),
        *((method, "wine", "multi:softprob") for method in METHODS),
    ],
)
def test_a_chosen_objective_trains_the_same_model(method, data, objective):
    given = {"strategy": method, "data": data, **METHODS[method]}
    settings = [load_settings({**given, "objective": said}) for said in (AUTO, objective)]
    check_tables(settings[0])
    chosen, explicit = (run_local(each).summary for each in settings)
    assert chosen["objective"] == explicit["objective"] == objective
    assert chosen["metrics"] == explicit["metrics"]
    assert "label" in chosen["objective_reason"]
    assert "objective_reason" not in explicit


def test_baselines_follow_the_chosen_objective():
    settings = load_settings({"data": "wine", "objective": AUTO, **BOOSTED})
    said = settings.model_copy(update={"objective": "multi:softprob"})
    assert run_baselines(settings)["pooled"] == run_baselines(said)["pooled"]


def test_a_criterion_that_does_not_fit_the_chosen_objective_is_refused():
    own = {**METHODS["federated-forest"]["federated-forest"], "criterion": "variance"}
    settings = load_settings(
        {"strategy": "federated-forest", "objective": AUTO, "parties": 2, "federated-forest": own}
    )
    with pytest.raises(ConfigError, match="criterion must be gini or entropy"):
        run_local(settings)


# scale-pos-weight=balanced

SECURE = {"strategy": "pax", "pax__aggregation": "secure"}
WAYS = {
    "plain": {"strategy": "pax"},
    "secure": SECURE,
    "private": {**SECURE, "privacy__epsilon": 1000.0, "max_depth": 1},
    "bagging": {"strategy": "bagging", "parties": 2},
    "cyclic": {"strategy": "cyclic", "parties": 2},
    "secureboost": {"parties": 2},
}


@pytest.fixture
def rare(settings, vertical, write_table):
    """Settings of a run on weighted rows of which few are positive."""
    rng = np.random.default_rng(5)
    labels = (rng.random(160) < 0.2).astype(int)
    table = write_table(n_rows=160, y=labels, w=rng.integers(1, 9, 160) / 4, seed=3)

    def make(way="plain", **more):
        given = {"data": str(table), "label": "y", "weight": "w", **WAYS[way], **more}
        return (vertical if way == "secureboost" else settings)(**given)

    return make


@pytest.mark.by_default("secure")
@pytest.mark.parametrize("way", WAYS)
def test_a_balanced_run_has_the_model_of_its_number(rare, way, monkeypatch):
    monkeypatch.setattr(sums, "discrete_gaussian", lambda v, n, _: np.zeros(n, np.int64))
    monkeypatch.setattr(Budget, "deviation", lambda *_: 0.0)
    balanced = run_local(rare(way, scale_pos_weight="balanced"))
    rows, _ = baseline_rows(rare(way))
    labels, weights = (each[rows.split.train] for each in (rows.labels, rows.weights))
    number = balanced.summary["boosting"]["scale_pos_weight"]
    assert number == pytest.approx(weights[labels == 0].sum() / weights[labels == 1].sum())
    assert number > 2
    said = run_local(rare(way, scale_pos_weight=number))
    assert model_bytes(balanced) == model_bytes(said)
    assert balanced.summary["metrics"] == said.summary["metrics"]
    plain = run_local(rare(way))
    assert model_bytes(balanced) != model_bytes(plain)
    assert plain.summary["boosting"]["scale_pos_weight"] == 1


@pytest.mark.parametrize("way", ["plain", "secureboost"])
def test_each_baseline_balances_its_own_rows(rare, way):
    pooled, alone = baseline_rows(rare(way))
    found = run_baselines(rare(way, scale_pos_weight="balanced"))
    for name, rows in [("pooled", pooled), *alone.items()]:
        labels, weights = (each[rows.split.train] for each in (rows.labels, rows.weights))
        number = float(weights[labels == 0].sum() / weights[labels == 1].sum())
        said = run_baselines(rare(way, scale_pos_weight=number))
        whose = [each if name == "pooled" else each["alone"] for each in (found, said)]
        assert whose[0][name] == whose[1][name]


def test_a_party_takes_the_weight_of_positive_rows_once(rare, monkeypatch):
    def balance(strategy, parties, replies):
        yield from ask(parties.all(BalanceRequest(2.0)), BalanceReply)

    monkeypatch.setattr(HorizontalStrategy, "balance", balance)
    with pytest.raises(PartyError, match=r"BalanceRequest.scale_pos_weight must be sent once, "):
        run_local(rare(scale_pos_weight=3.0))


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"scale_pos_weight": "x"}, "a number or 'balanced', got"),
        ({"objective": "reg:gamma"}, "1 for reg:g.*, got balanced"),
        ({"init_model": "runs/first"}, "a number with init-model"),
    ],
)
def test_balanced_is_refused_where_it_means_nothing(rare, more, rule):
    with pytest.raises(ConfigError, match=f"^scale-pos-weight must be {rule}"):
        rare(**{"scale_pos_weight": "balanced", **more})
    assert rare(scale_pos_weight="2.5").scale_pos_weight == 2.5
