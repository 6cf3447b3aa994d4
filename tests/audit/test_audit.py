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
from tests.forests import move_thresholds

SUMS, TREES, BINS = "rows rebuilt from sums", "values rebuilt from trees", "bins solved from sums"
GUESSED, GROUPED = "labels guessed from shared nodes", "labels grouped by unsplit nodes"
NONE, SOME = f"{GUESSED}, none known", f"{GUESSED}, 40 known"
MEMBERS = {"membership (LiRA), at 1% false alarms", "membership (LiRA), AUC"}
PAX = {"parties": 3, "max_bin": 128, "max_depth": 3, "num_boost_round": 4}
KEY = {"key_bits": 512, "insecure_small_key": True}
DIVIDED = {"parties": 2, "align": "ordered"}
BOOSTED = {**DIVIDED, **{f"secureboost__{name}": value for name, value in KEY.items()}}
FOREST = {**DIVIDED, "federated_forest__trees": 4}
ENCRYPTED = {**FOREST, "federated_forest__labels": "paillier", "max_bin": 8}
ENCRYPTED |= {f"federated_forest__{name}": value for name, value in KEY.items()}
MASKED = {**PAX, "pax__aggregation": "secure"}
FEW = {"trees": 3, "rounds": 2, "epochs": 1, "channels": 4, "max_depth": 2}
SLOWEST = "fedxgbllr"
# Settings of each way, and the attacks that have figures.
WAYS = {
    "pax": ("pax", PAX, {SUMS, TREES}),
    "pax, masked": ("pax", MASKED, {SUMS, TREES}),
    "pax, private": ("pax", {**MASKED, "privacy__epsilon": 20.0}, {TREES}),
    "bagging": ("bagging", {"parties": 2}, {TREES}),
    "cyclic": ("cyclic", {"parties": 2}, {TREES}),
    "fedxgbllr": (
        "fedxgbllr",
        {"parties": 2, **{f"fedxgbllr__{name}": value for name, value in FEW.items()}},
        {TREES},
    ),
    "linear": ("fedavg-linear", {"parties": 2, "fedavg_linear__rounds": 2}, set()),
    "secureboost": ("secureboost", BOOSTED, {BINS, NONE, SOME}),
    "secureboost, private": ("secureboost", {**BOOSTED, "label_epsilon": 1.0}, {BINS, NONE, SOME}),
    "forest, encoded": ("federated-forest", FOREST, set()),
    "forest, encrypted": ("federated-forest", ENCRYPTED, {GROUPED, NONE, SOME}),
}


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    monkeypatch.setattr("fedapp.audit.attacks.DRAWS", 20)
    monkeypatch.setattr("fedapp.audit.attacks.SHADOWS", 8)
    monkeypatch.setattr("fedapp.audit.labels.FOLDS", 2)
    monkeypatch.setattr("fedapp.audit.labels.DRAWS", 2)


@pytest.fixture
def train(settings, trained_once):
    """``train(way, **more)``: a short run on breast-cancer, trained for the first that asks."""

    def run(way, **more):
        strategy, usual, _ = WAYS[way]
        return trained_once(settings(strategy=strategy, data="breast-cancer", **{**usual, **more}))

    return run


def audited(run):
    return Auditing.of(run.path, quick=True).carry_out()


def figures(run):
    return {finding.attack: finding for finding in audited(run).findings}


def files():
    return {str(path) for path in home().rglob("*")}


@pytest.mark.slow
@pytest.mark.by_default("bagging", "linear", "secureboost", "forest, encoded")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way == SLOWEST else way for way in WAYS]
)
def test_an_audit_of_each_method_gives_figures_and_leaves_nothing_at_the_sites(train, way):
    run = train(way)
    before = files()
    found = audited(run)
    assert files() == before
    assert {one.attack for one in found.findings} == WAYS[way][2] | MEMBERS
    for one in found.findings:
        assert 0 <= one.low <= one.success <= one.high <= 1, one
        assert 0 <= one.chance <= 1
        assert all((one.seat, one.measure, one.interval, one.lowered_by, one.cost))
    assert read_audit(run.path) == found
    assert read_run(run.path).audit == found
    card = (run.path / "model-card.md").read_text()
    for text in ("## What attacks found", "lower bound", found.date):
        assert text in card


@pytest.mark.slow
def test_rows_are_rebuilt_unless_bins_have_a_minimum_of_rows(train):
    plain, masked = figures(train("pax")), figures(train("pax, masked"))
    assert plain[SUMS].low > 0.01 > plain[SUMS].chance
    assert masked[SUMS].success < plain[SUMS].success
    assert plain[TREES].low > plain[TREES].chance
    merged = figures(train("pax", least_bin_rows=5))[SUMS]
    assert merged.success == merged.chance == 0.0
    assert 0 < merged.high < 0.02  # exact, where a bootstrap would say 0
    (missing,) = audited(train("pax, private")).unmeasured
    assert (missing.attack, missing.why) == (
        SUMS,
        "with privacy.epsilon no party sends sums by bin",
    )


@pytest.mark.slow
def test_bins_are_solved_and_labels_grouped_unless_labels_are_randomised(train):
    assert (bins := figures(train("secureboost"))[BINS]).low > bins.chance + 0.05
    plain, private = (
        figures(train("forest, encrypted", federated_forest__trees=10, **more))[GROUPED]
        for more in ({}, {"label_epsilon": 1.0})
    )
    assert plain.low > 0.6
    assert private.success < plain.success
    assert private.low <= 0.5


@pytest.mark.slow
def test_members_are_recognised_in_a_model_that_has_learned_its_rows(train):
    learned = train("bagging", num_boost_round=20, max_depth=6)
    assert figures(learned)["membership (LiRA), AUC"].low > 0.5


def test_the_smaller_cluster_is_guessed_to_be_the_rarer_class():
    rows = np.array([[-0.1, 0.0], [-0.2, 0.1], [-0.1, 0.0], [2.0, 0.0]])
    assert unguided(rows, rarer=1).argmax() == unguided(rows, rarer=0).argmin() == 3


@pytest.mark.slow
def test_shadow_models_that_cannot_be_trained_are_named(train, monkeypatch):
    def fail(settings):
        raise ConfigError("privacy.epsilon must be larger for so few rows")

    run = train("bagging")
    monkeypatch.setattr("fedapp.audit.membership.trained", fail)
    (missing,) = audited(run).unmeasured
    assert missing.attack == "membership (LiRA)"
    assert missing.why == (
        "a shadow model of half of the rows could not be trained "
        "(privacy.epsilon must be larger for so few rows)"
    )


# What an audit refuses


def test_a_changed_table_is_refused(settings, write_table):
    data = write_table(n_rows=60)
    run = run_local(settings(strategy="pax", data=str(data), label="y", parties=2))
    write_table(n_rows=60, seed=1)
    with pytest.raises(DataError, match=r"^run must give the same model when it is trained again"):
        audited(run)
    assert not (run.path / AUDIT).exists()


@pytest.mark.slow
def test_a_changed_part_of_a_model_is_refused(train):
    run = train("secureboost")
    move_thresholds(home() / "sites" / "party-2" / run.summary["model_id"])
    with pytest.raises(DataError, match="run must give the same model"):
        audited(run)


@pytest.mark.slow
def test_a_model_without_its_parts_is_refused(train):
    run = train("secureboost")
    forget_model(run.summary["model_id"])
    with pytest.raises(DataError, match="run must have the parts of its model on this machine"):
        audited(run)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"engine": "deployment"}, r"run must be simulated, .* --site site\.toml"),
        ({"strategy": "interactive"}, "run must be one that trains, got one of interactive"),
    ],
)
def test_runs_that_cannot_be_audited_are_refused(train, fields, error):
    run = train("bagging")
    run.add_to_summary(fields)
    with pytest.raises(ConfigError, match=error):
        Auditing.of(run.path)


def test_a_damaged_audit_is_named(train):
    run = train("bagging")
    (run.path / AUDIT).write_text('{"format": 3, "kind": "audit"}')
    with pytest.raises(DataError, match=r"audit\.json must be as fedapp audit wrote it"):
        read_run(run.path)


# One site's own rows


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
def test_a_site_cannot_audit_a_part_of_a_model(train, tmp_path):
    with pytest.raises(ConfigError, match="run must have a whole model, which --site can score"):
        at_site(train("secureboost").path, 'name="bank" data="rows.csv"')


# The command


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


def test_more_models_are_trained_without_quick(train):
    run = train("pax")
    quick, whole = (Auditing.of(run.path, quick) for quick in (True, False))
    assert quick.seconds < whole.seconds
    with pytest.raises(FedappError, match="--quick must be omitted with --site"):
        CliRunner().invoke(
            cli,
            ["audit", str(run.path), "--quick", "--site", str(run.path)],
            catch_exceptions=False,
        )
