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


def invoke(words, app=cli):
    return CliRunner().invoke(app, words.split() if isinstance(words, str) else words)


# Settings


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
        ("pax", "xyzzy", ""),  # like none
    ],
)
def test_a_setting_by_another_librarys_name_is_told_by_ours(method, name, meant):
    with pytest.raises(ConfigError) as caught:
        load_settings({name: 1, "strategy": method})
    told = f"{name} is not a setting"
    assert str(caught.value) == told + (f"; did you mean {meant}?" if meant else "")


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
    rule = r"^eta must be given once, got 0\.1 and 0\.3$"
    with pytest.raises(ConfigError, match=rule):
        load_settings(parse_overrides(["eta=0.1", f"{name}=0.3"]))
    with pytest.raises(ConfigError, match=rule):
        settings_of("pax", {"eta": 0.1, "learning_rate": 0.3})


def test_a_name_that_begins_as_one_is_meant_by_it():
    known = ["ID", "SEX", "default.payment.next.month"]
    assert did_you_mean("defaults", known) == "; did you mean default.payment.next.month?"
    assert did_you_mean("def", known) == ""  # three letters begin many names


def test_every_alias_leads_to_a_setting_and_is_none():
    inner = {name.partition(".")[2] for name in defaults()}
    for name, meant in {**ALIASES, **SYNONYMS}.items():
        assert name not in defaults() or name == meant[-1]
        assert set(meant) <= inner | set(defaults())


# Methods

COLUMNS, EITHER = r"pax .* or secureboost .*", r"horizontal-forest .* or federated-forest .*"


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
        ("LightGBM", COLUMNS),
        ("gradient_boosting", COLUMNS),
        ("random_forest", EITHER),
        ("rf", EITHER),
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


# Words of a command

OPTIONS = "^settings must follow -c, got .*: write "
ANSWERS = {
    "run pax --label a --label b": "^label must be given once, got a and b",
    "compare pax --parties 2 -c parties=3": "^parties must be given once, got",
    "tune pax --space eta=0.2 --space learning_rate=0.3": "^--space must name eta once, got 0.2",
    "run pax data=loans.csv": OPTIONS + "-c data=loans.csv$",
    "run data=loans.csv pax": OPTIONS + "-c data=loans.csv$",
    ("compare", "pax", "bagging", "data=my loans.csv"): OPTIONS + "-c 'data=my loans.csv'$",
    "run pax --max-depth 3": OPTIONS + "-c max-depth=3$",
    "tune pax --max_depth=3 --space eta=0.1,0.2": OPTIONS + "-c max-depth=3$",
    "run pax --max-depth 3 --eta=0.1": OPTIONS + "-c max-depth=3 -c eta=0.1$",
    "run fedxgbllr --n-estimators 5": OPTIONS + "-c fedxgbllr.trees=5$",
    "run pax --score-test --label y": OPTIONS + "-c score-test=VALUE$",
    "run pax --target y": OPTIONS + "--label y$",
    "run pax --rounds=9 --max-dept 3": OPTIONS + "-c num-boost-round=9 -c max-depth=3$",
    "run pax loans.csv": ": write fedapp run pax --data loans.csv$",
    "run pax loans.csv --label default": ": write fedapp run pax --data loans.csv$",
    "run loans.csv": ": write fedapp run METHOD --data loans.csv$",
    "tune pax a.csv b.csv": ": write fedapp tune pax --data a.csv,b.csv$",
    "compare pax bagging loans.csv": ": write fedapp compare pax bagging --data loans.csv$",
    "describe loans.csv": ": write fedapp describe --data loans.csv$",
    "run pax bagging --label y": ": fedapp compare pax bagging compares them$",
    "settings bagger": "a method or a setting, got bagger; did you mean bagging.$",
}


@pytest.mark.parametrize("words", ANSWERS, ids=str)
def test_words_that_do_not_fit_are_answered_with_those_that_do(words):
    error = invoke(words if isinstance(words, str) else [*words]).exception
    assert isinstance(error, ConfigError)
    assert re.search(ANSWERS[words], str(error))


USAGE = "No such option|unexpected extra argument"
UNKNOWN = {
    "run pax --basline": USAGE,
    "run pax --x=1": USAGE,
    "run pax y=1": USAGE,
    "run pax --x loans.csv": USAGE,
    **dict.fromkeys(("run", "compare", "predict", "report"), "Show this message and exit"),
    **{
        words: rf"\Aerror: fedapp [\w ]+ is not a command.*; {way}\n\Z"
        for words, way in {
            "train pax": r"did you mean fedapp run METHOD\?",
            "Fit": r"did you mean fedapp run METHOD\?",
            "evaluate": r"did you mean fedapp report RUN or fedapp predict RUN --data FILE\?",
            "version": r"did you mean fedapp --version\?",
            "pax --data loans.csv": r"did you mean fedapp run pax\?",
            "rnu pax": r"did you mean fedapp run\?",
            "site chek": r"did you mean fedapp site check\?",
            "runs lst": r"did you mean fedapp runs list\?",
            "data describ": r"did you mean fedapp data describe\?",
            "xyzzy": "fedapp --help lists them",
        }.items()
    },
}


@pytest.mark.parametrize("words", UNKNOWN)
def test_unknown_or_missing_words_are_errors_of_usage(words):
    done = invoke(words)
    assert done.exit_code == 2
    assert re.search(UNKNOWN[words], done.output, re.DOTALL)


def test_every_command_of_other_tools_leads_to_one_of_ours():
    whole = typer.main.get_command(cli)
    for written in (each for way in COMMANDS.values() for each in way.split(" or ")):
        command = whole
        for word in (word for word in written.split()[1:] if word.islower()):
            options = [option for one in command.params for option in one.opts]
            if word not in ("--help", *options):
                command = command.commands[word]


def test_data_label_id_and_parties_are_short_for_settings_and_wrong_ones_are_named(write_table):
    data = ["--data", str(write_table())]
    for given, rule in (
        (["--parties", "3", "-c", "parties=2"], "parties must be given once, got 2 and 3"),
        ([*data, "-c", "data=other.csv"], "data must be given once, got other.csv and .*"),
        ([*data, "--label", "z"], "label column 'z' must be in .*"),
        (["--parties", "many"], "parties must be a whole number, got 'many'"),
        ([*data, "--label", "y", "--id", "z"], "id column 'z' must be in the table, .*"),
    ):
        error = invoke(["run", "pax", *given]).exception
        assert re.search(f"{rule}$", str(error)), error


def test_a_wrong_path_names_the_one_that_is_spelled_alike(own_folder, write_table):
    write_table("loans")
    Path("runs/first").mkdir(parents=True)
    for words, meant in {
        "run pax -c data=loan.csv --label y": "loans.csv",
        "describe loan.csv": "loans.csv",
        "predict runs/frist --data loans.csv --output x.csv": "runs/first",
        "predict first --data loans.csv --output x.csv": "runs/first",
        "export frist": "runs/first",
        "serve runs/fist": "runs/first",
        "report frst": "runs/first",
        "run pax -c resume=firts": "runs/first",
    }.items():
        error = invoke(words, data_app if words.startswith("describe") else cli).exception
        assert str(error).endswith(f"; did you mean {meant}?"), (words, error)


# Help


def test_help_lists_methods_ways_to_predict_and_arguments():
    for command in ("run", "compare"):
        shown = invoke([command, "--help"]).output
        assert all(f" {name} " in shown for name in TRAINING)
        assert not any(f" {name} " in shown for name in PREDICTING)
    shown = invoke("predict --help").output
    assert all(f" {name} " in shown.partition("Ways to predict")[2] for name in PREDICTING)
    assert re.search(r"run_dir +PATH +\S+", shown)
    assert "Folder of a run" in shown


def test_the_version_is_that_of_all_that_matters():
    number = r"\d+\.\d+(\.\d+)?"
    line = rf"fedapp {number}, flwr {number}, xgboost {number}, python 3\.\d+\.\d+\n"
    assert re.fullmatch(line, invoke("--version").output)


def test_the_settings_of_a_method_are_those_that_it_reads():
    listed = json.loads(invoke("settings pax --json").stdout)["settings"]
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
    words = invoke("settings").output.split()
    assert {name for name in defaults() if "." not in name} <= set(words)
    assert set(all_methods()) <= {word.strip(",") for word in words}


@pytest.mark.parametrize("method", TRAINING)
def test_the_settings_of_a_method_begin_with_the_common_ones(method):
    shown = invoke(["settings", method]).output
    names = [line.split()[0] for line in shown.splitlines() if re.match(r" [a-z]", line)]
    lines = [line.strip() for line in shown.splitlines()]
    common = [name for name in COMMON if name in names]
    assert names[1 : 1 + len(common)] == common
    assert {"data", "label", "parties", "seed"} < {*common}
    own = [f"Of {method}"] if any("." in name for name in names) else []
    headings = ["Common", *own, "A run of any method"]
    assert [line for line in lines if line in headings] == headings
    assert {*names[1:]} == {name for name, one in list_settings().items() if method in one.methods}


MEANT = {"learning-rate": "eta", "num_leaves": "max-leaves", "trees": "federated-forest.trees"}


@pytest.mark.parametrize("name", [*list(defaults())[::8], *MEANT])
def test_a_setting_is_explained_by_its_name(name):
    found = invoke(["settings", name, "--json"]).stdout
    settings = {one["name"]: one for one in json.loads(found)["settings"]}
    assert MEANT.get(name, name) in settings
    shown = invoke(["settings", name]).output
    for setting in settings.values():
        about = list_settings()[setting["name"]]
        assert f"{about.name}: {about.text}".replace("`", "") in shown
        assert f"  default  {in_words(about.default)}\n" in shown


def test_engines_say_what_they_cost_and_make_runs_through_flower(own_folder):
    done = invoke("run pax -cnum-boost-round=1 -crun-dir=run")
    assert done.exit_code == 0, done.output
    assert "engine local: the parties are simulated in this process" in done.output
    assert json.loads(Path("run/summary.json").read_text())["engine"] == "local"
    told = "whose start takes some 15 s; --engine local makes the same"
    assert told in describe_engine("simulation")
    recipe = (app_folder() / "Makefile").read_text().partition("\nfirst:")[2].partition("\n\n")[0]
    assert "fedapp run $(FIRST) --engine simulation" in recipe
