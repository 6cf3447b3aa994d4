"""Audits of runs: figures of every method, also of tables with gaps, dates and names; refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.audit import attacks, membership
from fedapp.audit.listening import trained
from fedapp.audit.membership import ScoredRows
from fedapp.audit.pax_rows import MISSING, CuriousPAX, Level, Sender, senders_of, true_rows
from fedapp.audit.run import Auditing, at_site
from fedapp.audit.timberstrike import Leaves
from fedapp.audit.vertical import Active, unguided
from fedapp.commands import cli
from fedapp.errors import ConfigError, DataError, FedappError
from fedapp.home import home
from fedapp.run_files import AUDIT
from fedapp.run_folder import read_run
from fedapp.runs.clean import forget_model
from fedapp.runs.local import run_local
from strategies.run import load_strategy
from tests.deploy_folders import invoke
from tests.forests import move_thresholds
from tests.random_tables import RANKED, TIMES, random_labels
from tests.tables import write_rows

SUMS, TREES, BINS = "rows rebuilt from sums", "values rebuilt from trees", "bins solved from sums"
GUESSED, GROUPED = "labels guessed from shared nodes", "labels grouped by unsplit nodes"
NONE, SOME = f"{GUESSED}, none known", f"{GUESSED}, 40 known"
AUC = "membership (LiRA), AUC"
MEMBERS = {"membership (LiRA), at 1% false alarms", AUC}
PAX = {"parties": 3, "max_bin": 128, "max_depth": 3, "num_boost_round": 4}
MASKED = {**PAX, "pax__aggregation": "secure"}
BOOSTED = {
    "parties": 2,
    "align": "ordered",
    "secureboost__key_bits": 512,
    "secureboost__insecure_small_key": True,
}
ENCRYPTED = {
    "parties": 2,
    "align": "ordered",
    "max_bin": 8,
    "federated_forest__trees": 10,
    "federated_forest__labels": "paillier",
    "federated_forest__key_bits": 512,
    "federated_forest__insecure_small_key": True,
}
# Settings of each way, the attacks that have figures, and the figures that must be so.
WAYS = {
    "pax": (
        "pax",
        PAX,
        {SUMS, TREES},
        lambda of: of[SUMS].low > 0.01 > of[SUMS].chance and of[TREES].low > of[TREES].chance,
    ),
    "pax, private": ("pax", {**MASKED, "privacy__epsilon": 20.0}, {TREES}, lambda of: True),
    "bagging": (
        "bagging",
        {"parties": 2, "num_boost_round": 20, "max_depth": 6},
        {TREES},
        lambda of: of[AUC].low > 0.5,
    ),
    "secureboost": (
        "secureboost",
        BOOSTED,
        {BINS, NONE, SOME},
        lambda of: of[BINS].low > of[BINS].chance + 0.05,
    ),
    "forest, encrypted": (
        "federated-forest",
        ENCRYPTED,
        {GROUPED, NONE, SOME},
        lambda of: of[GROUPED].low > 0.6,
    ),
    "forest, private": (
        "federated-forest",
        {**ENCRYPTED, "label_epsilon": 1.0},
        {GROUPED, NONE, SOME},
        lambda of: of[GROUPED].low <= 0.5,
    ),
}


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    monkeypatch.setattr("fedapp.audit.attacks.DRAWS", 40)
    monkeypatch.setattr("fedapp.audit.attacks.SHADOWS", 8)
    monkeypatch.setattr("fedapp.audit.vertical.FOLDS", 2)
    monkeypatch.setattr("fedapp.audit.vertical.DRAWS", 2)


@pytest.fixture
def train(settings, trained_once):
    """``train(way)``: a short run on breast-cancer, trained for the first that asks."""

    def run(way):
        strategy, how, *_ = WAYS[way]
        return trained_once(settings(strategy=strategy, data="breast-cancer", **how))

    return run


def audited(run):
    return Auditing.of(run.path, quick=True).carry_out()


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_an_audit_finds_what_it_must_and_leaves_nothing_at_the_sites(train, way):
    run, (*_, attacks, fits) = train(way), WAYS[way]
    before = {str(path) for path in home().rglob("*")}
    audit = audited(run)
    assert {str(path) for path in home().rglob("*")} == before
    figures = {finding.attack: finding for finding in audit.findings}
    assert figures.keys() == attacks | MEMBERS
    for one in audit.findings:
        assert all((one.seat, one.measure, one.interval, one.lowered_by, one.cost))
    assert fits(figures)
    if way == "pax, private":
        (missing,) = audit.unmeasured
        why = "with privacy.epsilon no party sends sums by bin"
        assert (missing.attack, missing.why) == (SUMS, why)
    assert read_run(run.path).audit == audit
    card = (run.path / "model-card.md").read_text()
    for text in ("## What attacks found", "lower bound", audit.date):
        assert text in card


@pytest.fixture
def boosted(settings, write_table):
    """``boosted(**more)``: settings of a run on few rows."""
    data = str(write_table(n_rows=60))
    return lambda **more: settings(**{"data": data, "label": "y", "parties": 2, **more})


def test_runs_that_cannot_be_audited_are_refused(boosted, write_table):
    run = run_local(boosted(strategy="pax"))
    quick, whole = (Auditing.of(run.path, quick) for quick in (True, False))
    assert quick.seconds < whole.seconds
    with pytest.raises(FedappError, match="--quick must be omitted with --site"):
        invoke(cli, "audit", str(run.path), "--quick", "--site", str(run.path))
    (run.path / AUDIT).write_text('{"format": 3, "kind": "audit"}')
    with pytest.raises(DataError, match=r"audit\.json must be as fedapp audit wrote it"):
        read_run(run.path)
    (run.path / AUDIT).unlink()
    write_table(n_rows=60, seed=1)
    with pytest.raises(DataError, match=r"^run must give the same model when it is trained again"):
        audited(run)
    assert not (run.path / AUDIT).exists()
    for fields, rule in (
        ({"strategy": "interactive"}, "run must be one that trains, got one of interactive"),
        ({"engine": "deployment"}, r"run must be simulated, .* --site site\.toml"),
    ):
        run.add_to_summary(fields)
        with pytest.raises(ConfigError, match=rule):
            Auditing.of(run.path)


def test_a_divided_model_is_audited_only_with_its_parts_as_they_were(boosted):
    run = run_local(boosted(strategy="secureboost", **BOOSTED))
    with pytest.raises(ConfigError, match="run must have a whole model, which --site can score"):
        at_site(run.path, Path("site.toml"))
    move_thresholds(home() / "sites" / "party-2" / run.summary["model_id"])
    with pytest.raises(DataError, match="run must give the same model"):
        audited(run)
    forget_model(run.summary["model_id"])
    with pytest.raises(DataError, match="run must have the parts of its model on this machine"):
        audited(run)


@pytest.mark.slow
def test_a_site_audits_its_own_rows(settings, sites, write_table, tmp_path):
    tables = {name: write_table(name, 90, seed) for seed, name in enumerate(("bank", "shop"))}
    contexts = sites(*({"name": name, "data": path} for name, path in tables.items()))
    how = settings(strategy="pax", parties=2, num_boost_round=20, max_depth=6, max_bin=256)
    run = run_local(how, contexts)
    run.add_to_summary({"engine": "deployment"})
    node = tmp_path / "site.toml"
    node.write_text(f'name = "bank"\ndata = "{tables["bank"]}"\nlabel = "y"\n')
    found = at_site(run.path, node)
    (finding,) = found.findings
    assert finding.attack == "membership (threshold)"
    assert finding.measure == "AUC of 65 training and 18 other rows"
    assert finding.success > finding.chance
    assert "bank" in finding.seat
    assert [one.seat for one in found.unmeasured] == ["every other seat"]


def test_a_site_believes_chance_only_if_rows_learnt_by_heart_are_found(
    boosted, write_table, tmp_path, monkeypatch
):
    run, table = run_local(boosted(strategy="pax")), write_table("others", seed=3)
    node = tmp_path / "site.toml"
    node.write_text(f'name = "bank"\ndata = "{table}"\nlabel = "y"\n')
    (finding,) = at_site(run.path, node).findings
    assert finding.low <= finding.chance
    monkeypatch.setattr("fedapp.audit.run.certainty", lambda shown, *_: np.zeros(len(shown)))
    audit = at_site(run.path, node)
    assert audit.findings == ()
    assert audit.unmeasured[0].why.startswith(FAULTS)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_command_says_how_long_it_takes_and_prints_what_it_found(train):
    run = train("pax")
    done = CliRunner().invoke(cli, ["audit", str(run.path), "--quick"])
    assert done.exit_code == 0, done.output
    before, _, after = done.output.partition("in all")
    assert f"{SUMS}, coordinator: " in before
    assert "about " in before
    assert "lower bound" in after
    assert "What attacks found" in (run.path / "report.html").read_text()
    assert CliRunner().invoke(cli, ["documents", str(run.path)]).exit_code == 0
    threats = (run.path / "documents" / "threat-model.md").read_text()
    assert f"| {SUMS} | coordinator |" in threats.partition("## Measured attacks")[2]
    as_json = CliRunner().invoke(cli, ["audit", str(run.path), "--quick", "--json"])
    document = json.loads(as_json.stdout)
    assert document["quick"] is True
    assert {one["attack"] for one in document["findings"]} == {SUMS, TREES} | MEMBERS


TOWNS = np.array(["Oslo", "Bergen", "Rome", "Turin"])
FIRST_DAY = np.datetime64("2002-11-09")
FEW = {"trees": 2, "rounds": 1, "epochs": 1, "channels": 4, "max_depth": 2}
MIXED = {
    **{way: {} for way in ("pax", "bagging", "cyclic")},
    "pax, masked": {"pax__aggregation": "secure"},
    "pax, additive": {"pax__additive": True},
    "fedxgbllr": {f"fedxgbllr__{name}": value for name, value in FEW.items()},
    "fedavg-linear": {"fedavg_linear__rounds": 2},
    "horizontal-forest": {"horizontal_forest__trees": 2},
    "secureboost": BOOSTED,
    "federated-forest": {"align": "ordered", "federated_forest__trees": 2},
    "federated-forest, encrypted": {**ENCRYPTED, "federated_forest__trees": 2},
}
# Of two classes, the attacks that have figures or a reason that is none of the attack's faults.
FIGURES = {
    **{way: {SUMS, TREES, AUC} for way in ("pax", "pax, masked", "pax, additive")},
    **{way: {TREES, AUC} for way in ("bagging", "cyclic", "fedxgbllr")},
    "secureboost": {BINS, NONE, AUC},
    "federated-forest, encrypted": {NONE, AUC},
}
OBJECTIVES = ("binary:logistic", "multi:softprob", "reg:squarederror", "count:poisson", *TIMES)
OBJECTIVES += (RANKED[0], "reg:absoluteerror", "binary:hinge")
SLOWEST = "fedxgbllr"
FAULTS = ("it failed", "it could not", "it did not find", "it gave no number")


def supports(way, objective):
    strategy = load_strategy(way.partition(",")[0])
    return objective in strategy.objectives


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
def audit_of(settings, mixed):
    """``audit_of(way, objective)``: the audit of a short run on a mixed table."""

    def audit(way, objective="binary:logistic", **more):
        return Auditing.of(run(way, objective, **more).path, quick=True).carry_out()

    def run(way, objective, **more):
        usual = {"qid": "q"} if objective in RANKED else {}
        rows = {"data": mixed(objective), "label": "y", "parties": 2, "max_bin": 64}
        method = {"strategy": way.partition(",")[0], "objective": objective, **MIXED[way]}
        return run_local(settings(**{**rows, **usual, **method, **more}))

    return audit


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("way", "objective"),
    [
        pytest.param(way, objective, marks=pytest.mark.slow if way == SLOWEST else ())
        for way in MIXED
        for objective in OBJECTIVES
        if supports(way, objective)
    ],
)
def test_every_attack_measures_on_a_mixed_table_or_says_what_it_is_for(audit_of, way, objective):
    found = audit_of(way, objective)
    assert [one for one in found.unmeasured if one.why.startswith(FAULTS)] == []
    for one in found.findings:
        assert 0 <= one.low <= one.success <= one.high <= 1, one
        assert 0 <= one.chance <= 1, one
    if objective == "binary:logistic":
        assert FIGURES.get(way, {AUC}) <= {one.attack for one in found.findings}


OF_NUMBERS = {"max_bin": 256, "max_depth": 4, "num_boost_round": 8, "label": "y", "strategy": "pax"}


@pytest.fixture
def heard(settings):
    """``heard(table)``: what the coordinator of a run of PAX has heard."""

    def hear(data, **more):
        how = settings(**{**OF_NUMBERS, "data": data, "parties": 3, **more})
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


def test_labels_that_leak_but_for_a_swap_are_guessed():
    labels, rng = np.array([0, 1, 1, 1] * 20), np.random.default_rng(0)
    for sign in (1, -1):
        embedding = np.column_stack([sign * labels + 0.1 * rng.normal(size=80), np.zeros(80)])
        assert attacks.of_auc(labels, unguided(embedding, labels))[0] > 0.95


def no_rows(sender):
    return set()


def flat(model, _):
    return ScoredRows(np.zeros(len(model.members)), model.members)


def test_a_partys_rows_have_the_sums_of_its_curves(heard, mixed):
    """Rows that are known are taken from the sums of each round, whose margins have all trees."""
    coordinator = heard(mixed(), pax__additive=True, pax__pairs=1, num_boost_round=5, max_depth=2)
    senders = senders_of(coordinator)
    for name, rows in true_rows(coordinator, senders).items():
        levels = senders[name].levels
        assert [level.request.level for level in levels] == [0, 0, 0, 0, 1, 0, 1]
        for level, again in zip(levels, senders[name].sums_of(rows), strict=True):
            np.testing.assert_allclose(again.histograms, level.histograms, atol=1e-5)
            np.testing.assert_array_equal(again.missing, level.missing)


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
    audit_of, monkeypatch, case
):
    way, name, patches, why = BROKEN[case]
    for owner, attribute, value in patches:
        monkeypatch.setattr(owner, attribute, value)
    audit = audit_of(way)
    assert name not in {one.attack for one in audit.findings}
    assert next(one.why for one in audit.unmeasured if one.attack == name).startswith(why)
    assert audit.findings
