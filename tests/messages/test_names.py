"""What was probably meant by a name that is nearly right."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedapp.arguments import parse_overrides, settings_of
from fedapp.commands import cli
from fedapp.commands.data import data_app
from fedapp.commands.run import COMMON, in_words, list_settings
from fedapp.errors import ConfigError, did_you_mean
from fedapp.home import app_folder
from fedapp.known_names import ALIASES, COMMANDS, SYNONYMS
from fedapp.messages.methods import all_methods
from fedapp.runs.engines import describe_engine
from fedapp.settings import about_settings, defaults, load_settings
from strategies.run import load_strategy

TRAINING = [name for name, method in all_methods().items() if method.trains]
PREDICTING = [name for name, method in all_methods().items() if method.predicts]


@pytest.mark.parametrize(
    ("method", "name", "meant"),
    [
        ("pax", "trees", "num-boost-round"),
        ("federated-forest", "trees", "federated-forest.trees"),
        ("federated-forest", "max-feature", "federated-forest.max-features"),
        ("pax", "bins", "pax.bins"),
        ("pax", "pax.bin", "pax.bins"),
        ("pax", "random_state", "seed"),
        ("pax", "Label", "label"),
        ("secureboost", "top-rat", "secureboost.top-rate"),
    ],
)
def test_a_setting_by_another_librarys_name_is_told_by_ours(method, name, meant):
    with pytest.raises(ConfigError) as caught:
        load_settings({name: 1, "strategy": method})
    assert str(caught.value) == f"{name} is not a setting; did you mean {meant}?"


@pytest.mark.parametrize(
    ("method", "name", "meant"),
    [
        ("pax", "learning_rate", "eta"),
        ("fedxgbllr", "learning_rate", "fedxgbllr.eta"),
        ("fedavg-linear", "learning-rate", "fedavg-linear.learning-rate"),
        ("pax", "n_estimators", "num-boost-round"),
        ("federated-forest", "n_estimators", "federated-forest.trees"),
        ("pax", "reg_lambda", "lambda"),
        ("pax", "reg_alpha", "alpha"),
        ("pax", "min_split_loss", "gamma"),
        ("pax", "max_depth", "max-depth"),
        ("federated-forest", "federated_forest.max_depth", "federated-forest.max-depth"),
    ],
)
def test_an_exact_synonym_is_taken_for_the_setting(method, name, meant):
    value = 0.7 if meant.endswith("eta") else 7
    given = parse_overrides([f"{name}={value}"])
    assert load_settings({**given, "strategy": method}).changed == (
        {meant: value} if method == "pax" else {"strategy": method, meant: value}
    )


@pytest.mark.parametrize("name", ["eta", "learning_rate"])
def test_a_setting_given_twice_is_refused(name):
    with pytest.raises(ConfigError, match=r"^eta must be given once, got 0\.1 and 0\.3$"):
        load_settings(parse_overrides(["eta=0.1", f"{name}=0.3"]))
    with pytest.raises(ConfigError, match=r"^eta must be given once, got 0\.1 and 0\.3$"):
        settings_of("pax", {"eta": 0.1, "learning_rate" if name == "eta" else name: 0.3})


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["run", "pax", "--label", "a", "--label", "b"], "label must be given once, got a and b"),
        (
            ["compare", "pax", "--parties", "2", "-c", "parties=3"],
            "parties must be given once, got",
        ),
        (
            ["tune", "pax", "--space", "eta=0.2", "--space", "learning_rate=0.3"],
            r"--space must name eta once, got 0\.2 and 0\.3",
        ),
    ],
)
def test_a_short_option_or_a_space_given_twice_is_refused(words, rule):
    error = CliRunner().invoke(cli, words).exception
    assert isinstance(error, ConfigError)
    assert re.match(rule, str(error))


def test_a_name_that_begins_as_one_is_meant_by_it():
    known = ["ID", "SEX", "default.payment.next.month"]
    assert did_you_mean("defaults", known) == "; did you mean default.payment.next.month?"
    assert did_you_mean("def", known) == ""  # three letters begin many names


def test_a_name_that_is_like_none_gets_no_advice():
    with pytest.raises(ConfigError, match=r"^xyzzy is not a setting$"):
        load_settings({"xyzzy": 1, "strategy": "pax"})


def test_every_alias_leads_to_a_setting_and_is_none():
    inner = {name.partition(".")[2] for name in defaults()}
    for name, meant in {**ALIASES, **SYNONYMS}.items():
        assert name not in defaults() or name == meant[-1]
        assert set(meant) <= inner | set(defaults())


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("paxx", "pax"),
        ("FedXGBllr", "fedxgbllr"),
        ("horizontal_forst", "horizontal-forest"),
        ("secure-boost", "secureboost"),
        ("sbt", "secureboost"),
        ("hetero_secureboost", "secureboost"),
        ("homo-sbt", "pax"),
        ("FedXgbBagging", "bagging"),
        ("fedxgb", "fedxgbllr"),
        ("logistic", "fedavg-linear"),
        ("xgboost", r"pax \(for .*same columns.* or secureboost \(for .*same rows.*"),
        ("LightGBM", r"pax .* or secureboost .*"),
        ("gradient_boosting", r"pax .* or secureboost .*"),
        ("random_forest", r"horizontal-forest .* or federated-forest .*"),
        ("rf", r"horizontal-forest .* or federated-forest .*"),
    ],
)
def test_a_method_is_helped_and_no_way_to_predict_is_offered(name, meant):
    with pytest.raises(ConfigError, match=rf"; did you mean {meant}\?$") as caught:
        load_strategy(name)
    assert not any(re.search(rf"\b{way}\b", str(caught.value)) for way in PREDICTING)


@pytest.mark.parametrize("data", ["loans.csv", "breast-cancer"])
def test_a_table_in_place_of_a_method_is_called_a_table(data):
    with pytest.raises(ConfigError, match=r": a table is the setting data$"):
        load_strategy(data)


@pytest.mark.parametrize("command", ["run", "compare"])
def test_help_lists_the_methods_that_train(command):
    shown = CliRunner().invoke(cli, [command, "--help"]).output
    assert all(f" {name} " in shown for name in TRAINING)
    assert not any(f" {name} " in shown for name in PREDICTING)


def test_help_of_predictions_lists_the_ways():
    shown = CliRunner().invoke(cli, ["predict", "--help"]).output
    listed = shown.partition("Ways to predict")[2]
    assert all(f" {name} " in listed for name in PREDICTING)


def test_help_says_what_an_argument_is():
    shown = CliRunner().invoke(cli, ["predict", "--help"]).output
    assert re.search(r"run_dir +PATH +\S+", shown)
    assert "Folder of a run" in shown


def test_the_version_is_that_of_all_that_matters():
    shown = CliRunner().invoke(cli, ["--version"]).output
    number = r"\d+\.\d+(\.\d+)?"
    line = rf"fedapp {number}, flwr {number}, xgboost {number}, python 3\.\d+\.\d+\n"
    assert re.fullmatch(line, shown)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "compare", "tune"])
def test_data_label_id_and_parties_are_short_for_settings(command, write_table):
    data = ["--data", str(write_table()), "--id", "a"]
    refused = [
        (["--parties", "3", "-c", "parties=2"], "parties must be given once, got 2 and 3"),
        ([*data, "-c", "data=other.csv"], "data must be given once, got other.csv and .*"),
        ([*data, "-c", f"data={data[1]}", "--label", "z"], "label column 'z' must be in .*"),
        (["--parties", "many"], "parties must be a whole number, got 'many'"),
        (["--label", "z", *data], "label column 'z' must be in the table, .*"),
        (["--label", "y", "--id", "z"], "id column 'z' must be in the table, .*"),
    ]
    for given, rule in refused:
        words = [command, "pax", *given, *(data[:2] if "--id" in given[2:3] else [])]
        error = CliRunner().invoke(cli, words).exception
        assert re.search(f"{rule}$", str(error)), error


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (["run", "pax", "data=loans.csv"], "-c data=loans.csv"),
        (["run", "data=loans.csv", "pax"], "-c data=loans.csv"),
        (["compare", "pax", "bagging", "data=my loans.csv"], "-c 'data=my loans.csv'"),
        (["run", "pax", "--max-depth", "3"], "-c max-depth=3"),
        (["tune", "pax", "--max_depth=3", "--space", "eta=0.1,0.2"], "-c max-depth=3"),
        (["run", "pax", "--max-depth", "3", "--eta=0.1"], "-c max-depth=3 -c eta=0.1"),
        (["run", "fedxgbllr", "--n-estimators", "5"], "-c fedxgbllr.trees=5"),
        (["run", "pax", "--score-test", "--label", "y"], "-c score-test=VALUE"),
        (["run", "pax", "--target", "y"], "--label y"),
        (["run", "pax", "--rounds=9", "--max-dept", "3"], "-c num-boost-round=9 -c max-depth=3"),
    ],
)
def test_a_setting_without_its_option_is_answered_with_the_option(words, way):
    error = CliRunner().invoke(cli, words).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("settings must follow -c, got ")
    assert str(error).endswith(f": write {way}")


@pytest.mark.parametrize("words", [["--basline"], ["--x=1"], ["y=1"], ["--x", "loans.csv"]])
def test_other_unknown_words_are_errors_of_usage(words):
    done = CliRunner().invoke(cli, ["run", "pax", *words])
    assert done.exit_code == 2
    assert "No such option" in done.output or "unexpected extra argument" in done.output


@pytest.mark.parametrize(
    ("words", "way"),
    [
        ("run pax loans.csv", "write fedapp run pax --data loans.csv"),
        ("run pax loans.csv --label default", "write fedapp run pax --data loans.csv"),
        ("run loans.csv", "write fedapp run METHOD --data loans.csv"),
        ("tune pax a.csv b.csv", "write fedapp tune pax --data a.csv,b.csv"),
        ("compare pax bagging loans.csv", "write fedapp compare pax bagging --data loans.csv"),
        ("describe loans.csv", "write fedapp describe --data loans.csv"),
        ("run pax bagging --label y", "fedapp compare pax bagging compares them"),
    ],
)
def test_a_table_or_a_second_method_among_the_arguments_gets_the_command(words, way):
    error = CliRunner().invoke(cli, words.split()).exception
    assert isinstance(error, ConfigError)
    assert str(error).endswith(f": {way}")


@pytest.mark.parametrize(
    ("words", "way"),
    [
        ("train pax", "; did you mean fedapp run METHOD?"),
        ("Fit", "; did you mean fedapp run METHOD?"),
        ("evaluate", "; did you mean fedapp report RUN or fedapp predict RUN --data FILE?"),
        ("version", "; did you mean fedapp --version?"),
        ("pax --data loans.csv", "; did you mean fedapp run pax?"),
        ("rnu pax", "; did you mean fedapp run?"),
        ("site chek", "; did you mean fedapp site check?"),
        ("runs lst", "; did you mean fedapp runs list?"),
        ("data describ", "; did you mean fedapp data describe?"),
        ("xyzzy", "; fedapp --help lists them"),
    ],
)
def test_an_unknown_command_is_answered_with_one(words, way):
    done = CliRunner().invoke(cli, words.split())
    assert done.exit_code == 2
    assert re.match(r"error: fedapp [\w ]+ is not a command", done.output)
    assert done.output.endswith(f"{way}\n")


@pytest.mark.parametrize("command", ["run", "compare", "predict", "report"])
def test_a_command_without_its_arguments_shows_its_help(command):
    done = CliRunner().invoke(cli, [command])
    assert done.exit_code == 2
    assert "Show this message and exit" in done.output


def test_every_command_of_other_tools_leads_to_one_of_ours():
    for way in COMMANDS.values():
        for written in way.split(" or "):
            command = typer.main.get_command(cli)
            for word in (word for word in written.split()[1:] if word.islower()):
                options = [option for one in command.params for option in one.opts]
                if word not in ("--help", *options):
                    command = command.commands[word]


@pytest.mark.slow
def test_the_settings_of_a_method_are_those_that_it_reads():
    listed = json.loads(CliRunner().invoke(cli, ["settings", "pax", "--json"]).stdout)["settings"]
    names = {one["name"] for one in listed}
    assert {"max-depth", "pax.bins", "privacy.epsilon", "partition"} <= names
    assert not {"columns", "bagging.local-rounds", "federated-forest.trees"} & names
    assert next(one for one in listed if one["name"] == "seed") == {
        "name": "seed",
        "default": defaults()["seed"],
        "values": "whole number >= 0, < 2^63",
        "text": about_settings()["seed"].text,
        "methods": sorted(all_methods()),
    }


@pytest.mark.slow
def test_the_settings_of_all_methods_come_with_a_list_of_these():
    done = CliRunner().invoke(cli, ["settings"])
    words = done.output.split()
    assert {name for name in defaults() if "." not in name} <= set(words)
    assert set(all_methods()) <= {word.strip(",") for word in words}
    error = CliRunner().invoke(cli, ["settings", "bagger"]).exception
    assert str(error).endswith("a method or a setting, got bagger; did you mean bagging?")


@pytest.mark.parametrize("method", TRAINING)
def test_the_settings_of_a_method_begin_with_the_common_ones(method):
    shown = CliRunner().invoke(cli, ["settings", method]).output
    names = [line.split()[0] for line in shown.splitlines() if re.match(r" [a-z]", line)]
    lines = [line.strip() for line in shown.splitlines()]
    common = [name for name in COMMON if name in names]
    assert names[1 : 1 + len(common)] == common
    assert {"data", "label", "parties", "seed"} < {*common}
    own = [f"Of {method}"] if any("." in name for name in names) else []
    headings = ["Common", *own, "A run of any method"]
    assert [line for line in lines if line in headings] == headings
    assert {*names[1:]} == {name for name, one in list_settings().items() if method in one.methods}


@pytest.mark.parametrize("name", [*defaults(), "learning-rate", "num_leaves", "trees"])
def test_each_setting_is_explained_by_its_name(name):
    found = CliRunner().invoke(cli, ["settings", name, "--json"]).stdout
    settings = {one["name"]: one for one in json.loads(found)["settings"]}
    meant = {"learning-rate": "eta", "num_leaves": "max-leaves", "trees": "federated-forest.trees"}
    assert meant.get(name, name) in settings
    shown = CliRunner().invoke(cli, ["settings", name]).output
    for setting in settings.values():
        about = list_settings()[setting["name"]]
        assert f"{about.name}: {about.text}".replace("`", "") in shown
        assert f"  default  {in_words(about.default)}\n" in shown


@pytest.mark.slow
def test_a_wrong_path_names_the_one_that_is_spelled_alike(tmp_path, monkeypatch, write_table):
    monkeypatch.chdir(tmp_path)
    write_table("loans")
    (tmp_path / "runs" / "first").mkdir(parents=True)
    wrong = [
        (["run", "pax", "-c", "data=loan.csv", "--label", "y"], "loans.csv"),
        (["describe", "loan.csv"], "loans.csv"),
        (["predict", "runs/frist", "--data", "loans.csv", "--output", "x.csv"], "runs/first"),
        (["predict", "first", "--data", "loans.csv", "--output", "x.csv"], "runs/first"),
        (["export", "frist"], "runs/first"),
        (["serve", "runs/fist"], "runs/first"),
        (["report", "frst"], "runs/first"),
        (["run", "pax", "-c", "resume=firts"], "runs/first"),
    ]
    for words, meant in wrong:
        app = data_app if words[0] == "describe" else cli
        error = CliRunner().invoke(app, words).exception
        assert str(error).endswith(f"; did you mean {meant}?"), (words, error)


@pytest.mark.slow
def test_the_local_engine_is_the_default_and_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["-cnum-boost-round=1", "-crun-dir=run"]
    done = CliRunner().invoke(cli, ["run", "pax", *given])
    assert done.exit_code == 0, done.output
    assert "engine local: the parties are simulated in this process" in done.output
    assert json.loads(Path("run/summary.json").read_text())["engine"] == "local"


def test_the_line_of_flowers_engine_says_what_it_costs():
    assert "whose start takes some 15 s; --engine local makes the same" in describe_engine(
        "simulation"
    )


def test_make_runs_through_flower():
    recipe = (app_folder() / "Makefile").read_text().partition("\nfirst:")[2].partition("\n\n")[0]
    assert "fedapp run $(FIRST) --engine simulation" in recipe
