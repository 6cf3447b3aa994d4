"""The search for settings: by validation rows, and as if never interrupted."""

from collections import Counter
from pathlib import Path

import pytest

import fedapp
from fedapp.errors import ConfigError
from fedapp.messages.methods import all_methods
from fedapp.runs.run_groups import STUDY, settings_of_trial
from fedapp.runs.tune import DEFAULT_SPACE, new_study, new_trial, space_of
from fedapp.settings import load_settings
from fedapp.site.store import Store

SHORT = {"num_boost_round": 2, "max_depth": 2, "max_bin": 16, "parties": 2}
pytestmark = pytest.mark.usefixtures("own_folder")


def space(strategy="pax", given=None, **asked):
    settings = load_settings({**(given or {}), "strategy": strategy})
    return space_of(settings, given or {}, {k.replace("_", "-"): v for k, v in asked.items()})


def test_each_method_has_settings_to_search_by_default():
    methods = [name for name, method in all_methods().items() if method.trains]
    found = {name: set(space(name)) for name in methods}
    assert all(found.values())
    assert set().union(*found.values()) == set(DEFAULT_SPACE)
    assert found["pax"] - set(space(given={"eta": 0.1})) == {"eta"}


def test_draws_reach_the_ends_of_their_domain():
    study = new_study(larger_is_better=True)
    domain = space(max_depth="int:3:8", **{"pax.bins": "share,equal"})
    trials = [new_trial(study, "random", domain, seed, 1) for seed in range(150)]
    for name, values in {"max-depth": {*range(3, 9)}, "pax.bins": {"share", "equal"}}.items():
        assert {settings_of_trial(trial)[name] for trial in trials} == values


@pytest.mark.parametrize("kind", ["random", "optuna"])
def test_a_draw_follows_from_seed_and_trials(kind, tmp_path, monkeypatch):
    """Also where studies are opened again, as after an interruption, and trials die."""
    found = space(**{"pax.bins": "share,equal"})

    def draws(seed, folder=None):
        study, drawn = new_study(True, folder), []
        for number in range(1, 13):
            if folder:
                if number % 4 == 0:
                    new_trial(study, kind, found, seed, number)  # of a process that died
                study = new_study(True, folder)
            trial = new_trial(study, kind, found, seed, number)
            drawn.append(settings_of_trial(trial))
            study.tell(trial, float(drawn[-1]["eta"]) + number % 2)
        return drawn

    (tmp_path / STUDY).write_text('{"op_code": 6, "wor')  # of a line that was not written whole
    (tmp_path / f"{STUDY}.lock").symlink_to(STUDY)  # of a process that was killed as it wrote
    monkeypatch.delattr("optuna.storages.journal._file.time.sleep")  # nobody waits for it
    first = draws(3)
    assert draws(3, tmp_path) == first
    assert draws(4) != first
    assert len({str(one) for one in first}) == 12


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (
            {"eat": "log:0.1:1"},
            r"^space must name settings that pax reads .* got eat; did you mean",
        ),
        ({"seed": "int:1:5"}, r"^space must name settings .* decide on no rows, got seed"),
        ({"eta": "log:0:1"}, r"^space of eta must have 0 < LOW < HIGH, got 'log:0:1'$"),
        ({"eta": ""}, r"^space of eta must be log:LOW:HIGH, .* got ''$"),
        ({"max-bin": "8,16"}, r"^space must not name a setting that is given too, got max-bin$"),
        ({"subsample": "uniform:0.5:2"}, r"^subsample must be <= 1.0, got 2.0$"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(asked, match):
    with pytest.raises(ConfigError, match=match):
        space_of(load_settings({"strategy": "pax"}), {"max-bin": 16}, asked)


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


def test_baselines_have_the_trials_of_the_search(write_table):
    given = {"data": write_table(n_rows=120), "label": "y", **SHORT, "parties": 1}
    found = fedapp.tune("pax", runs=2, baselines=True, subsample=1.0, colsample_bytree=1.0, **given)
    tuned = found.summary["baselines"]
    # One party's trees are XGBoost's, so every trial has the same score.
    for one in (tuned["pooled"], tuned["alone"]["party-1"]):
        assert one["settings"].items() <= found.best.items()
        assert one["valid"] == pytest.approx(found.summary["valid"])
        assert one["test"] == pytest.approx(found.summary["test"])


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"valid_fraction": 0.0}, "^valid_fraction must be > 0 to tune by the validation rows"),
        ({"score_test": False}, "^score_test must be omitted to tune"),
        ({"run_dir": "x"}, "^run_dir must be omitted to tune: --output names the folder, got x$"),
        ({"engine": "site"}, "^engine must be local, simulation"),
        ({"search": "grid"}, "^search must be one of random, optuna, got 'grid'$"),
        ({"search": "optuna"}, r"^optuna must be installed to search \(pip install 'fedapp\[tune"),
        ({"on": "spark"}, "^on must be ray, with the local engine, or omitted, got spark"),
        ({"on": "ray", "search": "optuna"}, "^on must be omitted with search=optuna, where a tri"),
        ({"exchanges": 9}, "^exchanges must be omitted, as runs= limits a search, got 9$"),
    ],
)
def test_what_does_not_go_with_a_search_is_refused(more, match, monkeypatch):
    if more == {"search": "optuna"}:
        monkeypatch.setattr("fedapp.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=match):
        fedapp.tune("pax", **{**SHORT, **more})
    assert not Path("runs").exists()
