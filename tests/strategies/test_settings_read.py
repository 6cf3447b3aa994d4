"""Which settings a method says that it reads."""

import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.runs.compare import settings_of_all
from fedapp.runs.tune import Tuning
from fedapp.settings import defaults, load_settings
from strategies.run import all_strategies, check_read


def read_by(strategy):
    settings = load_settings({"strategy": strategy})
    return set(all_strategies()[strategy].settings_read(settings))


def test_every_setting_is_read_by_some_method_and_every_one_read_is_a_setting():
    assert set().union(*map(read_by, all_strategies())) == set(defaults())


@pytest.mark.parametrize("strategy", all_strategies())
def test_a_method_reads_its_own_section_and_no_other(strategy):
    sections = (strategy, *all_strategies()[strategy].sections)
    own = {name for name in defaults() if name.partition(".")[0] in sections and "." in name}
    assert {name for name in read_by(strategy) if "." in name} == own


@pytest.mark.by_default("run-*", "tune-pax-secureboost*")
@pytest.mark.parametrize(
    ("method", "given", "rule"),
    [
        ("federated-forest", "max-depth=6", "got 6; did you mean federated-forest.max-depth?"),
        ("fedavg-linear", "n_estimators=3", "got 3; did you mean fedavg-linear.rounds?"),
        ("pax", "fedxgbllr.max-depth=3", "got 3; did you mean max-depth?"),
        ("pax", "secureboost.key-bits=2048", "got 2048; read by secureboost"),
        ("secureboost", "partition=iid", "got 'iid'; read by bagging, cyclic, fedavg-linear"),
        ("federated-forest", "preset=xgboost", "got 'xgboost'; read by bagging, cyclic, "),
    ],
)
@pytest.mark.parametrize("command", ["run", "tune"])
def test_a_setting_that_the_method_does_not_read_is_refused(
    command, method, given, rule, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, [command, method, "-c", given])
    assert done.exit_code
    found = str(done.exception)
    assert f" must be omitted for {method}, which does not read it, {rule}" in found
    assert not list(tmp_path.iterdir())


def test_python_refuses_it_too():
    match = r"^max_depth must .* did you mean federated_forest=\{'max_depth': ...\}\?$"
    with pytest.raises(fedapp.ConfigError, match=match):
        fedapp.run("federated-forest", max_depth=6)
    with pytest.raises(fedapp.ConfigError, match="eta must be omitted for federated-forest"):
        Tuning("federated-forest", {"eta": 0.3}).carry_out()


def test_a_run_that_flower_starts_is_held_to_what_differs_from_the_defaults():
    check_read(load_settings({**defaults(), "strategy": "federated-forest"}))
    with pytest.raises(fedapp.ConfigError, match=r"^max-depth must be omitted for feder"):
        check_read(load_settings({**defaults(), "strategy": "federated-forest", "max-depth": 2}))


def test_one_method_of_a_comparison_must_read_a_setting():
    settings_of_all(["pax", "federated-forest"], {"max-depth": 2, "n_estimators": 3})
    with pytest.raises(fedapp.ConfigError, match=r"^align must be omitted for pax, .* 'ordered'; "):
        settings_of_all(["pax", "bagging"], {"align": "ordered"})
