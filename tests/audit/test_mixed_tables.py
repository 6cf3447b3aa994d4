"""Attacks on tables with gaps, yes and no, dates and names; which zeros are believed."""

import numpy as np
import pytest

from fedapp.audit import attacks, membership
from fedapp.audit.bins import Active
from fedapp.audit.listening import trained
from fedapp.audit.membership import ScoredRows
from fedapp.audit.pax_rows import MISSING, CuriousPAX, Level, Sender, senders_of, true_rows
from fedapp.audit.run import Auditing
from fedapp.audit.timberstrike import Leaves
from fedapp.errors import ConfigError
from fedapp.runs.local import run_local
from strategies.run import load_strategy
from tests.random_tables import RANKED, TIMES, random_labels
from tests.tables import write_rows

TOWNS = np.array(["Oslo", "Bergen", "Rome", "Turin"])
FIRST_DAY = np.datetime64("2002-11-09")
SMALL = {"key_bits": 512, "insecure_small_key": True}
FOREST = {"align": "ordered", "federated_forest__trees": 2}
FEW = {"trees": 2, "rounds": 1, "epochs": 1, "channels": 4, "max_depth": 2}
WAYS = {
    **{way: {} for way in ("pax", "bagging", "cyclic")},
    "pax, masked": {"pax__aggregation": "secure"},
    "fedxgbllr": {f"fedxgbllr__{name}": value for name, value in FEW.items()},
    "fedavg-linear": {"fedavg_linear__rounds": 2},
    "horizontal-forest": {"horizontal_forest__trees": 2},
    "secureboost": {"align": "ordered", **{f"secureboost__{key}": n for key, n in SMALL.items()}},
    "federated-forest": FOREST,
    "federated-forest, encrypted": {
        **FOREST,
        "federated_forest__labels": "paillier",
        **{f"federated_forest__{name}": value for name, value in SMALL.items()},
    },
}
SUMS, TREES = "rows rebuilt from sums", "values rebuilt from trees"
BINS, GUESSED = "bins solved from sums", "labels guessed from shared nodes, none known"
GROUPED, MEMBERS = "labels grouped by unsplit nodes", "membership (LiRA), AUC"
# Of two classes, the attacks that have figures or a reason that is none of the attack's faults.
FIGURES = {
    **{way: {SUMS, TREES, MEMBERS} for way in ("pax", "pax, masked")},
    **{way: {TREES, MEMBERS} for way in ("bagging", "cyclic", "fedxgbllr")},
    "secureboost": {BINS, GUESSED, MEMBERS},
    "federated-forest, encrypted": {GUESSED, MEMBERS},
}
OBJECTIVES = ("binary:logistic", "multi:softprob", "reg:squarederror", "count:poisson", *TIMES)
OBJECTIVES += (RANKED[0], "reg:absoluteerror", "binary:hinge")
SLOWEST = "fedxgbllr"
FAULTS = ("it failed", "it could not", "it did not find", "it gave no number")


def supports(way, objective):
    strategy = load_strategy(way.partition(",")[0])
    return objective in strategy.objectives


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    monkeypatch.setattr(attacks, "DRAWS", 10)
    monkeypatch.setattr(attacks, "SHADOWS", 8)
    monkeypatch.setattr("fedapp.audit.labels.FOLDS", 2)
    monkeypatch.setattr("fedapp.audit.labels.DRAWS", 2)


@pytest.fixture
def mixed(tmp_path):
    """``mixed(objective, recoded=False)``: a table with gaps, yes and no, names and dates, or the
    same with numbers for them."""

    def write(objective="binary:logistic", recoded=False, n_rows=110, n_towns=None):
        rng = np.random.default_rng(1)
        amount, gaps = rng.normal(size=n_rows).round(2), rng.random(n_rows) < 0.1
        n_towns = n_towns or len(TOWNS)
        owner, town = rng.integers(0, 2, n_rows), rng.integers(0, n_towns, n_rows)
        days = rng.integers(0, 900, n_rows)
        signal = 2 * amount + owner - 2 * (town == 1)
        if objective == "reg:absoluteerror":
            labels = signal
        elif objective == "binary:logistic":
            labels = (signal + rng.normal(size=n_rows) > 0).astype(int)
        else:
            labels = random_labels(objective, signal, rng)
        columns = {
            "amount": ["" if gap else number for gap, number in zip(gaps, amount, strict=True)],
            "owner": owner if recoded else np.array(["no", "yes"])[owner],
            "town": town if recoded else TOWNS[town],
            "since": 12000 + days if recoded else FIRST_DAY + days,
            "y": labels,
        }
        if objective in RANKED:
            columns["q"] = np.arange(n_rows) // 5
        path = tmp_path / f"{objective[:5]}-{recoded}-{n_rows}-{n_towns}.csv"
        return str(write_rows(path, columns))

    return write


@pytest.fixture
def audited(settings, mixed):
    """``audited(way, objective)``: the audit of a short run on a mixed table."""

    def audit(way, objective="binary:logistic", **more):
        return Auditing.of(run(way, objective, **more).path, quick=True).carry_out()

    def run(way, objective, **more):
        usual = {"qid": "q"} if objective in RANKED else {}
        rows = {"data": mixed(objective), "label": "y", "parties": 2, "max_bin": 64}
        method = {"strategy": way.partition(",")[0], "objective": objective, **WAYS[way]}
        return run_local(settings(**{**rows, **usual, **method, **more}))

    return audit


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("way", "objective"),
    [
        pytest.param(way, objective, marks=pytest.mark.slow if way == SLOWEST else ())
        for way in WAYS
        for objective in OBJECTIVES
        if supports(way, objective)
    ],
)
def test_every_attack_measures_on_a_mixed_table_or_says_what_it_is_for(audited, way, objective):
    found = audited(way, objective)
    assert [one for one in found.unmeasured if one.why.startswith(FAULTS)] == []
    for one in found.findings:
        assert 0 <= one.low <= one.success <= one.high <= 1, one
        assert 0 <= one.chance <= 1, one
    if objective == "binary:logistic":
        assert FIGURES.get(way, {MEMBERS}) <= {one.attack for one in found.findings}


ROWS = {"max_bin": 256, "max_depth": 4, "num_boost_round": 8, "label": "y", "strategy": "pax"}


@pytest.fixture
def heard(settings):
    """``heard(table)``: what the coordinator of a run of PAX has heard."""

    def hear(data, **more):
        how = settings(**{**ROWS, "data": data, "parties": 3, **more})
        coordinator = CuriousPAX.of_run(how)
        with trained(how, coordinator=coordinator):
            return coordinator

    return hear


def found_and_wrong(coordinator):
    """Training rows that are rebuilt, and how many rebuilt rows do not exist."""
    senders = senders_of(coordinator)
    truth = true_rows(coordinator, senders)
    rebuilt = {name: sender.rebuilt() for name, sender in senders.items()}
    found = {(*row, number) for number, name in enumerate(rebuilt) for row in rebuilt[name]}
    existing = {(*row, number) for number, name in enumerate(rebuilt) for row in truth[name]}
    return found & existing, len(found - existing)


def test_as_many_rows_are_rebuilt_as_of_the_same_table_in_numbers(heard, mixed):
    # By two names, splits are those by two numbers, so that trees and gradients are the same.
    (names, wrong), (numbers, _) = (
        found_and_wrong(heard(mixed(recoded=recoded, n_towns=2))) for recoded in (False, True)
    )
    assert len(names) == len(numbers) > 20
    assert wrong == 0
    assert any(MISSING in row for row in names)  # gaps hide no row


@pytest.mark.parametrize(
    "more",
    [
        {"pax__aggregation": "secure"},
        {"pax__aggregation": "secure", "least_bin_rows": 3},
        {"least_bin_rows": 3},
        {"scale_pos_weight": 3.0},
        {"num_parallel_tree": 2},
        {"subsample": 0.7},
    ],
    ids=lambda more: ", ".join(map(str, more.values())),
)
def test_no_way_to_sum_ends_in_an_error_or_in_rows_that_are_nobodys(heard, mixed, more):
    coordinator = heard(mixed(n_rows=60), **more)
    assert found_and_wrong(coordinator)[1] == 0
    assert all(sender.finds_planted() for sender in senders_of(coordinator).values())


def no_rows(sender):
    return set()


def flat(model, _):
    return ScoredRows(np.zeros(len(model.members)), model.members)


def other_weights(sender, *rows):
    """Sums that no attack by gradients can read."""
    for level in honest_sums(sender, *rows):
        yield Level(level.request, 2 * level.histograms, level.missing, 2 * level.roots)


honest_sums = Sender.sums_of


def cannot_train(settings):
    raise ConfigError("privacy.epsilon must be larger for so few rows")


BROKEN = {
    "rows": (
        "pax",
        SUMS,
        [(Sender, "rebuilt", no_rows), (Sender, "sums_of", other_weights)],
        FAULTS,
    ),
    "values": ("bagging", TREES, [(Leaves, "of", lambda *a, **k: 1 / 0)], FAULTS),
    "bins": ("secureboost", BINS, [(Active, "note", lambda *_: 1 / 0)], FAULTS),
    "members": (
        "bagging",
        "membership (LiRA)",
        [(attacks, "above_usual", flat), (membership, "above_usual", flat)],
        FAULTS,
    ),
    "shadow models": (
        "bagging",
        "membership (LiRA)",
        [(membership, "trained", cannot_train)],
        "a shadow model of half of the rows could not be trained (privacy.epsilon must be larger",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_attack_that_is_broken_has_measured_nothing_and_the_others_have(
    audited, monkeypatch, case
):
    way, name, patches, why = BROKEN[case]
    for owner, attribute, value in patches:
        monkeypatch.setattr(owner, attribute, value)
    audit = audited(way)
    assert name not in {one.attack for one in audit.findings}
    assert next(one.why for one in audit.unmeasured if one.attack == name).startswith(why)
    assert audit.findings
