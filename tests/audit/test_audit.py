"""An audit of a run: figures of every method, in its folder, report and card; what it refuses."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedapp.audit.labels import unguided
from fedapp.audit.run import Auditing, at_site
from fedapp.commands import cli
from fedapp.errors import ConfigError, DataError, FedappError
from fedapp.findings import AUDIT, read_audit
from fedapp.home import home
from fedapp.run_files import read_run
from fedapp.runs.clean import forget_model
from fedapp.runs.local import run_local
from tests.deploy_folders import invoke
from tests.forests import move_thresholds

SUMS, TREES, BINS = "rows rebuilt from sums", "values rebuilt from trees", "bins solved from sums"
GUESSED, GROUPED = "labels guessed from shared nodes", "labels grouped by unsplit nodes"
NONE, SOME = f"{GUESSED}, none known", f"{GUESSED}, 40 known"
MEMBERS = {"membership (LiRA), at 1% false alarms", "membership (LiRA), AUC"}
PAX = {"parties": 3, "max_bin": 128, "max_depth": 3, "num_boost_round": 4}
MASKED = {**PAX, "pax__aggregation": "secure"}
BOOSTED = {"parties": 2, "align": "ordered", "secureboost__key_bits": 512}
BOOSTED["secureboost__insecure_small_key"] = True
ENCRYPTED = {
    "parties": 2,
    "align": "ordered",
    "max_bin": 8,
    "federated_forest__trees": 10,
    "federated_forest__labels": "paillier",
    "federated_forest__key_bits": 512,
    "federated_forest__insecure_small_key": True,
}
# Settings of each way, and the attacks that have figures.
# Settings of each way, the attacks that have figures, and the figures that must be so.
WAYS = {
    "pax": (
        "pax",
        PAX,
        {SUMS, TREES},
        lambda of: of[SUMS].low > 0.01 > of[SUMS].chance and of[TREES].low > of[TREES].chance,
    ),
    "pax, masked": ("pax", MASKED, {SUMS, TREES}, lambda of: True),
    # The interval of no row is exact, where a bootstrap would say 0.
    "pax, merged bins": (
        "pax",
        {**PAX, "least_bin_rows": 5},
        {SUMS, TREES},
        lambda of: of[SUMS].success == of[SUMS].chance == 0.0 < of[SUMS].high < 0.02,
    ),
    "pax, private": ("pax", {**MASKED, "privacy__epsilon": 20.0}, {TREES}, lambda of: True),
    "bagging": (
        "bagging",
        {"parties": 2, "num_boost_round": 20, "max_depth": 6},
        {TREES},
        lambda of: of["membership (LiRA), AUC"].low > 0.5,
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
    monkeypatch.setattr("fedapp.audit.attacks.DRAWS", 20)
    monkeypatch.setattr("fedapp.audit.attacks.SHADOWS", 8)
    monkeypatch.setattr("fedapp.audit.labels.FOLDS", 2)
    monkeypatch.setattr("fedapp.audit.labels.DRAWS", 2)


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
        assert 0 <= one.low <= one.success <= one.high <= 1, one
        assert 0 <= one.chance <= 1
        assert all((one.seat, one.measure, one.interval, one.lowered_by, one.cost))
    assert fits(figures)
    if way == "pax, masked":
        plain = next(one for one in audited(train("pax")).findings if one.attack == SUMS)
        assert figures[SUMS].success < plain.success
    if way == "pax, private":
        (missing,) = audit.unmeasured
        why = "with privacy.epsilon no party sends sums by bin"
        assert (missing.attack, missing.why) == (SUMS, why)
    assert read_audit(run.path) == read_run(run.path).audit == audit
    card = (run.path / "model-card.md").read_text()
    for text in ("## What attacks found", "lower bound", audit.date):
        assert text in card


def test_the_smaller_cluster_is_guessed_to_be_the_rarer_class():
    rows = np.array([[-0.1, 0.0], [-0.2, 0.1], [-0.1, 0.0], [2.0, 0.0]])
    assert unguided(rows, rarer=1).argmax() == unguided(rows, rarer=0).argmin() == 3


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
        at_site(run.path, 'name="bank" data="rows.csv"')
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
    found = at_site(run.path, str(node))
    (finding,) = found.findings
    assert finding.attack == "membership (threshold)"
    assert finding.measure == "AUC of 65 training and 18 other rows"
    assert finding.low > finding.chance
    assert "bank" in finding.seat
    assert [one.seat for one in found.unmeasured] == ["every other seat"]


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
