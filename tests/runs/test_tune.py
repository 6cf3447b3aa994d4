"""The search for settings: by validation rows, and as if never interrupted."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.runs.run_groups import read_trials
from fedapp.runs.search_space import (
    DEFAULT_SPACE,
    STUDY,
    new_study,
    new_trial,
    settings_of_trial,
    space_of,
)
from fedapp.runs.tune import Tuning, _training
from fedapp.runs.tuned_baselines import baseline_space
from fedapp.settings import load_settings
from fedapp.site.store import Store
from tests.runs.test_compare import QUICK, training_strategies

SHORT = {"num_boost_round": 2, "max_depth": 2, "max_bin": 16, "parties": 2}
pytestmark = pytest.mark.usefixtures("own_folder")


def space(strategy="pax", given=None, **asked):
    settings = load_settings({**(given or {}), "strategy": strategy})
    return space_of(settings, given or {}, {k.replace("_", "-"): v for k, v in asked.items()})


# Spaces


def test_each_method_has_settings_to_search_by_default():
    found = {name: set(space(name)) for name in training_strategies()}
    assert all(found.values())
    assert set().union(*found.values()) == set(DEFAULT_SPACE)
    assert found["federated-forest"] == {
        f"federated-forest.{name}" for name in ("max-depth", "min-samples-leaf", "max-features")
    }


def test_a_setting_that_is_given_is_not_searched():
    assert "eta" in space()
    assert "eta" not in space(given={"eta": 0.1})


@pytest.mark.slow
@pytest.mark.by_default("log*", "int*", "1,2")
@pytest.mark.parametrize("text", ["log:0.01:0.5", "uniform:0:1", "int:3:8", "share,equal", "1,2"])
def test_draws_lie_in_their_domain_and_reach_its_ends(text):
    name = {"share,equal": "pax.bins", "int:3:8": "max-depth"}.get(text, "alpha")
    domain = space(**{name: text})
    study = new_study(larger_is_better=True)
    trials = [new_trial(study, "random", domain, seed, 1) for seed in range(300)]
    values = [settings_of_trial(trial)[name] for trial in trials]
    if ":" not in text or text.startswith("int"):
        expected = set(range(3, 9)) if text.startswith("int") else set(domain[name].choices)
        assert set(values) == expected
        return
    low, high = domain[name].low, domain[name].high
    assert low <= min(values) < max(values) <= high
    shares = np.array(values) / high
    if text.startswith("log"):
        shares = np.log(np.array(values) / low) / np.log(high / low)
    assert abs(np.mean(shares) - 0.5) < 0.06  # 3.5 deviations
    assert (min(shares), 1 - max(shares)) < (0.03, 0.03)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (
            {"eat": "log:0.1:1"},
            r"^space must name settings that pax reads .* got eat; did you mean",
        ),
        ({"seed": "int:1:5"}, r"^space must name settings .* decide on no rows, got seed"),
        ({"test-fraction": "0.1,0.2"}, r"^space must name .* got test-fraction"),
        ({"eta": "log:0:1"}, r"^space of eta must have 0 < LOW < HIGH, got 'log:0:1'$"),
        ({"eta": "uniform:2:1"}, r"^space of eta must have LOW < HIGH, got 'uniform:2:1'$"),
        ({"eta": "log:a:1"}, r"^space of eta must be log:LOW:HIGH, .* got 'log:a:1'$"),
        ({"eta": ""}, r"^space of eta must be log:LOW:HIGH, .* got ''$"),
        ({"subsample": "uniform:0.5:2"}, r"^subsample must be <= 1.0, got 2.0$"),
        (
            {"pax.bins": "share,alike"},
            r"^pax.bins must be one of 'auto', 'share' or 'equal', got 'alike'$",
        ),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(asked, match):
    with pytest.raises(ConfigError, match=match):
        space_of(load_settings({"strategy": "pax"}), {}, asked)


def test_a_setting_both_given_and_searched_is_refused():
    with pytest.raises(ConfigError, match=r"^space must not name a setting that is given too"):
        space(given={"eta": 0.1}, eta="log:0.1:1")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_a_draw_follows_from_seed_and_trials(kind):
    found = space(**{"pax.bins": "share,equal"})

    def draws(seed):
        (folder := Path(f"{seed}-{len(list(Path().iterdir()))}")).mkdir()
        drawn = []
        for number in range(1, 15):
            study = new_study(True, folder)  # a study of its own, as after an interruption
            if number % 4 == 0:
                new_trial(study, kind, found, seed, number)  # of a process that died
                study = new_study(True, folder)
            trial = new_trial(study, kind, found, seed, number)
            drawn.append(settings_of_trial(trial))
            study.tell(trial, float(drawn[-1]["eta"]) + number % 2)
        return drawn

    def uninterrupted(seed):
        study, drawn = new_study(True), []
        for number in range(1, 15):
            trial = new_trial(study, kind, found, seed, number)
            drawn.append(settings_of_trial(trial))
            study.tell(trial, float(drawn[-1]["eta"]) + number % 2)
        return drawn

    first = draws(3)
    assert uninterrupted(3) == first
    assert draws(4) != first
    assert len({str(one) for one in first}) == 14


@pytest.mark.slow
def test_optuna_learns_from_the_trials():
    found = space(eta="log:0.001:1")
    study, off = new_study(larger_is_better=False), []
    for number in range(1, 41):
        trial = new_trial(study, "optuna", found, 0, number)
        off.append(abs(np.log(trial.params["eta"] / 0.03)))
        study.tell(trial, off[-1])
    assert np.mean(off[-10:]) < 0.5 * np.mean(off[:10])


# Searches


@pytest.mark.slow
def test_the_best_of_the_trials_is_run_with_its_test_scores(write_table):
    path = write_table(n_rows=120)
    given = {"data": path, "label": "y", "valid_fraction": 0.3, **SHORT}
    found = fedapp.tune("pax", runs=3, space={"eta": [0.1, 0.3, 0.9], "gamma": "int:0:3"}, **given)
    trials = read_trials(found.path)
    assert [one.number for one in trials] == [1, 2, 3]
    assert found.summary["valid"] == max(one.score for one in trials)
    assert {"eta", "gamma", "lambda"} <= set(found.best)
    assert "max-depth" not in trials[0].settings  # it was given
    again = fedapp.run(
        "pax",
        **{
            **given,
            **{
                n.replace("-", "_"): v
                for n, v in found.best.items()
                if n not in ("data", "label", "lambda")
            },
            "reg_lambda": found.best["lambda"],
        },
    )
    assert (again.path / "model.json").read_text() == (found.run.path / "model.json").read_text()
    metrics = found.run.summary["metrics"]
    assert metrics["valid"]["auc"] == found.summary["valid"]
    assert metrics["test"]["auc"] == found.summary["test"]["auc"]
    assert not list(found.path.glob("trial-*"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_trials_do_not_look_at_test_rows(strategy, write_table, monkeypatch):
    path = write_table(n_rows=100)
    kept = []  # rows that validate and test, by run

    def note(settings, *more):
        folder = carry_out(settings, *more)
        summary = folder.summary
        rows = summary.get("matched_rows") or summary["rows"]
        kept.append((rows["valid"], rows["test"]))
        assert bool(summary["metrics"]["test"]) == (rows["test"] > 0)
        return folder

    from fedapp.runs import session

    carry_out = session.carry_out
    monkeypatch.setattr(session, "carry_out", note)
    more = QUICK.get(strategy, {})
    given = {"data": str(path), "label": "y", "num-boost-round": 1, "max-bin": 8, "parties": 2}
    Tuning(strategy, {**given, **more}, runs=2).carry_out()
    assert kept == [(8, 0), (8, 0), (8, 20)]


def test_rows_that_are_not_scored_are_not_kept_either(write_table, monkeypatch):
    kept = {}
    written = Store.write

    def note(store, name, codec, value):
        if name == "values":
            kept.update({id(rows): (subset, rows) for subset, rows in value.items()})
        written(store, name, codec, value)

    monkeypatch.setattr(Store, "write", note)
    fedapp.run("pax", data=write_table(n_rows=50), label="y", score_test=False, **SHORT)
    n_rows = Counter[str]()
    for subset, rows in kept.values():
        n_rows[subset] += len(rows)
    assert (n_rows["train"], n_rows["valid"], n_rows["test"]) == (36, 4, 0)


def _watched(on_round, *words, **how):
    settings = _training(*words, **how)
    return replace(settings, on_round=on_round)


@pytest.mark.slow
def test_an_interrupted_search_goes_on_as_if_it_had_not_been(write_table, monkeypatch):
    given = {"data": write_table(n_rows=80), "label": "y", **SHORT}
    whole = fedapp.tune("pax", runs=3, output="whole", **given)
    rounds = 0

    def interrupted(info):
        nonlocal rounds
        rounds += 1
        if rounds == 3:  # the first of the second trial
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("fedapp.runs.tune._training", partial(_watched, interrupted))
        with pytest.raises(KeyboardInterrupt):
            fedapp.tune("pax", runs=3, output="parts", **given)
    with (Path("parts") / STUDY).open("a") as file:
        file.write('{"op_code": 6, "wor')  # what is left of a line that was not written whole
    parts = fedapp.tune("pax", runs=3, output="parts", **given)

    def told(found):
        return [(one.number, one.settings, one.score) for one in read_trials(found.path)]

    assert told(parts) == told(whole)
    assert parts.best == whole.best
    assert not list(parts.path.glob("trial-*"))


@pytest.mark.slow
def test_other_settings_or_another_space_are_not_taken_for_these(write_table):
    given = {"data": write_table(n_rows=60), "label": "y", "output": "out", **SHORT}
    fedapp.tune("pax", runs=1, **given)
    for changed, match in (
        (
            {"seed": 1},
            "^seed must be 42 as in .*out, got 1; delete that folder, or name another$",
        ),
        ({"max_bin": 8}, "^max_bin must be 16 as in .*out, got 8"),
        ({"space": {"eta": [0.1]}}, "^space must be "),
        ({"search": "optuna"}, "^search must be 'random' as in "),
    ):
        with pytest.raises(ConfigError, match=match):
            fedapp.tune("pax", runs=1, **{**given, **changed})


@pytest.mark.slow
def test_a_finished_search_is_shown_and_not_gone_on_with(write_table):
    given = {"data": write_table(n_rows=60), "label": "y", **SHORT}
    first = fedapp.tune("pax", runs=1, **given)
    again = fedapp.tune("pax", runs=3, **given)  # the folder follows from table and settings
    assert again.path == first.path
    assert len(read_trials(again.path)) == 1


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"valid_fraction": 0.0}, "^valid_fraction must be > 0 to tune by the validation rows"),
        ({"score_test": False}, "^score_test must be omitted to tune"),
        ({"run_dir": "x"}, "^run_dir must be omitted to tune: --output names the folder, got x$"),
        ({"engine": "site"}, "^engine must be local, simulation"),
        ({"search": "grid"}, "^search must be one of random, optuna, got 'grid'$"),
        ({"on": "spark"}, "^on must be ray, with the local engine, or omitted, got spark"),
        (
            {"on": "ray", "search": "optuna"},
            "^on must be omitted with search=optuna, where a trial",
        ),
        ({"runs": 0}, "^runs must be >= 1, got 0$"),
        ({"exchanges": 9}, "^exchanges must be omitted, as runs= limits a search, got 9$"),
        ({"bytes": 9}, "^bytes must be omitted, as runs= limits a search, got 9$"),
    ],
)
def test_what_does_not_go_with_a_search_is_refused(more, match):
    with pytest.raises(ConfigError, match=match):
        fedapp.tune("pax", **{**SHORT, **more})
    assert not Path("runs").exists()


def test_without_optuna_its_search_is_refused_before_anything_runs(monkeypatch):
    monkeypatch.setattr("fedapp.errors.find_spec", lambda name: None)
    rule = r"^optuna must be installed to search \(pip install 'fedapp\[tune\]'\), got "
    with pytest.raises(ConfigError, match=rule):
        fedapp.tune("pax", search="optuna", **SHORT)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_frame_is_searched_on_and_not_kept(write_table):
    frame = pytest.importorskip("pandas").read_csv(write_table(n_rows=60))
    found = fedapp.tune("pax", data=frame, label="y", runs=1, **SHORT)
    assert found.run.summary["data"] == "frame"
    assert not list(found.path.rglob("*.parquet"))


@pytest.mark.slow
def test_the_command_prints_the_trials_best_first_and_how_to_repeat_the_best(write_table):
    words = ["tune", "pax", "-c", f"data={write_table(n_rows=100)}", "-c", "label=y"]
    words += ["-c", "num-boost-round=1", "-c", "parties=2", "-c", "valid-fraction=0.3"]
    words += ["--space", "max-depth=int:1:3", "--runs", "3", "--output", "out"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    trials = sorted(read_trials(Path("out")), key=lambda one: -(one.score or 0))
    lines = [line.split() for line in done.output.splitlines()]
    shown = [line[0] for line in lines if len(line) > 5 and line[0].isdigit()]
    assert shown == [str(one.number) for one in trials]
    found = json.loads(Path("out", "tune.json").read_text())
    assert f"-c max-depth={found['settings']['max-depth']}" in done.output
    assert f"auc {found['test']['auc']:.4f}" in done.output
    assert "fedapp run pax -c data=" in done.output


@pytest.mark.slow
def test_baselines_have_the_trials_of_the_search(write_table):
    given = {"data": write_table(n_rows=120), "label": "y", **SHORT, "parties": 1}
    found = fedapp.tune("pax", runs=3, baselines=True, subsample=1.0, colsample_bytree=1.0, **given)
    tuned = found.summary["baselines"]
    # One party's trees are XGBoost's, so every trial has the same score.
    for one in (tuned["pooled"], tuned["alone"]["party-1"]):
        assert one["settings"].items() <= found.best.items()
        assert one["valid"] == pytest.approx(found.summary["valid"])
        assert one["test"] == pytest.approx(found.summary["test"])


@pytest.mark.parametrize(
    ("strategy", "names"),
    [("fedxgbllr", {"eta", "max-depth", "lambda"}), ("federated-forest", set[str]())],
)
def test_baselines_search_what_they_read(strategy, names):
    given = {"subsample": 0.9}
    first = load_settings({"strategy": strategy, **given})
    searched = set(baseline_space(first, given, space(strategy, given)))
    assert searched >= names
    assert "subsample" not in searched
    has_sections = any("." in name for name in searched)
    assert has_sections == (strategy == "federated-forest")
