"""What was probably meant by a name that is nearly right, or that another library has."""

import inspect
import json
import re
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sklearn.ensemble
import typer
import xgboost
from typer.testing import CliRunner

import fedapp
from fedapp.arguments import parse_overrides, settings_of
from fedapp.commands import cli
from fedapp.errors import ConfigError, did_you_mean
from fedapp.known_names import (
    ALIASES,
    COMMANDS,
    SYNONYMS,
    UNSUPPORTED,
    VALUES,
    setting_hint,
    setting_of,
)
from fedapp.messages.methods import all_methods
from fedapp.metrics.names import EVAL_METRICS, check_metrics
from fedapp.settings import about_settings, defaults, load_settings
from fedapp.trees.objective import LOSSES
from strategies import PAX
from strategies.run import load_strategy

TRAINING = [name for name, method in all_methods().items() if method.trains]
PREDICTING = [name for name, method in all_methods().items() if method.predicts]


def invoke(words):
    return CliRunner().invoke(cli, words.split() if isinstance(words, str) else words)


# Settings


@pytest.mark.parametrize(
    ("method", "name", "meant"),
    [
        ("pax", "learning_rate", "eta"),
        ("fedxgbllr", "learning_rate", "fedxgbllr.eta"),
        ("fedavg-linear", "learning-rate", "fedavg-linear.learning-rate"),
        ("pax", "n_estimators", "num-boost-round"),
        ("federated-forest", "n_estimators", "federated-forest.trees"),
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


# Names of XGBoost, LightGBM and scikit-learn are never answered by a look-alike

# Names of LightGBM, and of XGBoost's boosters and objectives, one or two of each kind.
OTHERS = """
app auc_mu_weights bagging bagging_seed bin_construct_sample_cnt blacklist boosting_type cat_feature
cat_smooth categorical_column config contrib convert_model_language data_sample_strategy device_type
drop_rate enable_bundle early_stopping_min_delta early_stopping_round eval_at extra_seed fair_c
feature_fraction feature_fraction_bynode feature_pre_filter forcedbins_filename fp group_id
has_header header input_model is_save_binary is_training_metric is_unbalance label_gain lambda_l1
lambdarank_norm leaf_index linear_lambda local_port machines map_at max_bin_by_feature max_leaf
max_leaf_output mc metric min_data_in_bin min_data_in_leaf min_data_per_group min_gain_to_split
min_hessian model_out monotone_constraint monotone_constraining_method monotone_splits_penalty
multi_error_top_k name_pred neg_bagging nrounds num_classes num_grad_quant_bins num_iteration
num_leaves num_threads output_result parser_config_file path_smooth pred_early_stop random_seed
refit_decay_rate save_period shrinkage_rate sparse sub_row test train_data tree_learner
use_quantized_grad weight_column workers xgboost_dart_mode zero_as_missing aft_loss_distribution
boost_from_average debug_synchronize default_direction feature_selector disable_default_eval_metric
fail_on_invalid_gpu_id lambdarank_pair_method max_row_perbatch ndcg_exp_gain normalize_type
num_feature one_drop process_type quantile_alpha rate_drop sample_type seed_per_iteration skip_drop
tolerance top_k tweedie_variance_power updater_seq validate_parameters
"""
FUNCTIONS = {
    "xgboost": (xgboost.train, xgboost.XGBModel.__init__, xgboost.XGBRanker.fit),
    "scikit-learn": (
        sklearn.ensemble.HistGradientBoostingClassifier,
        sklearn.ensemble.GradientBoostingRegressor,
        sklearn.ensemble.RandomForestClassifier,
    ),
}
NO_PARAMETERS = {"self", "X", "kwargs"}


@pytest.mark.parametrize("library", [*FUNCTIONS, "others"])
@pytest.mark.parametrize("method", TRAINING)
def test_every_name_of_a_library_is_a_setting_or_answered_by_what_it_is(library, method):
    signatures = [inspect.signature(one).parameters for one in FUNCTIONS.get(library, ())]
    names = set().union(*signatures) or set(OTHERS.split())
    assert len(names) > 30
    for name in names - NO_PARAMETERS:
        kebab = name.replace("_", "-")
        if setting_of(name, defaults(), method) in defaults():
            continue
        hint = setting_hint(name, defaults(), method)
        meant = hint.removeprefix("; did you mean ").removesuffix("?")
        is_named = {meant.rpartition(".")[2]} <= {kebab, *ALIASES.get(kebab, ())}
        assert is_named or hint.startswith(": "), (name, hint)
        assert len({row[1:] for row in UNSUPPORTED if fnmatchcase(kebab, row[0])}) <= 1, name


def test_the_tables_name_settings_and_none_is_unsupported():
    inner = {name.rpartition(".")[2] for name in defaults()}
    for name, meant in {**ALIASES, **SYNONYMS}.items():
        assert name not in defaults() or name == meant[-1]
        assert set(meant) <= inner | set(defaults())
    for pattern, _, nearest in UNSUPPORTED:
        assert not [name for name in defaults() if fnmatchcase(name, pattern)]
        assert all(one in inner or one.startswith('"fedapp ') or " of " in one for one in nearest)
    metrics = {one for names in EVAL_METRICS.values() for one in names}
    for pattern, _, nearest in VALUES:
        assert set(nearest) - {"reg:pseudohubererror"} <= metrics | LOSSES.keys(), pattern


@pytest.mark.parametrize("value", ["my_predict.csv", "updater"])
def test_a_misspelled_setting_is_still_taken_for_it(value):
    for name in [name for name in defaults() if "." not in name and len(name) > 5]:
        for at in range(1, len(name)):
            misspelled = name[:at] + name[at + 1 :]
            if misspelled not in ALIASES:
                hint = setting_hint(misspelled, defaults(), "pax", value)
                assert hint.startswith("; did you mean "), misspelled


NONE = "{} is not a setting: "
FOREST = "federated-forest"
ANSWERS = [  # of PAX, unless a method is named
    ({"linear_tree": 8}, NONE + "linear trees are .*; nearest is max-depth"),
    ({"booster": "dart"}, NONE + "DART is not .*; nearest is subsample"),
    ({"booster": "gblinear"}, "booster .* gblinear is not supported, .* fedavg-linear"),
    ({"boosting_type": "rf"}, "boosting_type .* nearest is fedapp run federated-forest"),
    ({"num_leaves": 31}, r"num_leaves .*; did you mean max-leaves\?"),
    ({"device": "cuda"}, NONE + "trees are trained on CPUs"),
    ({"device": "cuda"}, r"device .*; did you mean fedxgbllr\.device\?", "fedxgbllr"),
    ({"min_child_samples": 5}, "min_child_samples .*; nearest is min-child-weight"),
    ({"min_child_samples": 5}, rf".*; did you mean {FOREST}\.min-samples-leaf\?", FOREST),
    ({"pax.max_leaves": 2}, r"pax\.max_leaves .*; did you mean max-leaves\?"),
    ({"pax.eta": 2}, r"pax\.eta is not a setting; did you mean eta\?"),
    ({"trees": 1}, r"trees is not a setting; did you mean num-boost-round\?"),
    ({"trees": 1}, rf"trees is not a setting; did you mean {FOREST}\.trees\?", FOREST),
    ({"pax.bin": 1}, r"pax\.bin is not a setting; did you mean pax\.bins\?"),
    ({"Label": 1}, r"Label is not a setting; did you mean label\?"),
    ({"xyzzy": 1}, "xyzzy is not a setting"),  # like none
    *(
        ({"objective": objective}, f"objective .*{answer}")
        for objective, answer in {
            "rank:map": ": this ranking .*; nearest is rank:ndcg",
            "lambdarank": r"; did you mean rank:ndcg\?",
            "reg:linear": r"; did you mean reg:squarederror\?",
            "binary:logitic": r"; did you mean binary:logistic\?",
        }.items()
    ),
    *(
        ({"objective": objective, "eval-metric": metric}, f"eval-metric .*, got {metric}{answer}")
        for objective, metric, answer in (
            ("reg:squarederror", "cox-nloglik", ": this metric .* not supported; nearest is rmse"),
            ("binary:logistic", "ndcg@5", r"; did you mean auc\?"),
            ("reg:squarederror", "rmsle", r"; did you mean rmse\?"),
        )
    ),
    (
        {"objective": "reg:quantileerror", "quantile_alpha": "0.1,0.5"},
        "quantile.alpha must be a number, got '0.1,0.5': .* so train a run for each",
    ),
]


@pytest.mark.parametrize("case", ANSWERS, ids=str)
def test_what_is_not_supported_comes_with_the_reason_and_the_nearest(case):
    given, answer, *method = case
    answer = answer.format(*given) if answer.startswith(NONE) else answer
    with pytest.raises(ConfigError, match=f"^{answer}$") as caught:
        load_settings({**given, "strategy": (*method, "pax")[0]})
    assert "\n" not in str(caught.value)


def test_the_answer_is_the_same_everywhere():
    reason = (
        "linear_tree is not a setting: linear trees are not supported, as a leaf is one number per "
        "class; nearest is "
    )
    refused = CliRunner().invoke(cli, ["run", "pax", "-c", "linear_tree=8"]).exception
    assert str(refused) == f"{reason}max-depth".replace("_", "-", 1)
    refused = CliRunner().invoke(cli, ["tune", "pax", "--space", "linear_tree=int:2:8"]).exception
    rule = "^space must name .*, got linear_tree: linear trees .* max-depth$"
    assert re.search(rule, str(refused))
    for call, error in (
        (partial(fedapp.run, "pax"), ConfigError),
        (PAX, ConfigError),
        (fedapp.PAXClassifier, TypeError),
        (fedapp.PAXClassifier().set_params, ValueError),
    ):
        with pytest.raises(error, match=f"^{reason}max_depth$"):
            call(linear_tree=8)
    with pytest.raises(TypeError, match=r"test_fraction: it follows from fit, or is in settings$"):
        fedapp.PAXRegressor(test_fraction=1)
    with pytest.raises(TypeError, match=r"got eta; did you mean learning_rate\?$"):
        fedapp.PAXRegressor(eta=1)


def test_every_objective_and_metric_of_xgboost_is_allowed_or_answered_by_what_it_is():
    rows = xgboost.DMatrix(np.ones((2, 1)), np.ones(2))
    with pytest.raises(xgboost.core.XGBoostError) as caught:
        xgboost.train({"objective": "none"}, rows, 1)
    objectives = set(re.findall(r"candidate: (\S+)", str(caught.value)))
    assert len(objectives) > 15
    for objective in objectives - LOSSES.keys():
        answer = f"'{objective}'(: .*; nearest is|; did you mean) ({'|'.join(LOSSES)})"
        with pytest.raises(ConfigError, match=answer):
            load_settings({"objective": objective})
        assert any(fnmatchcase(objective, row[0]) for row in VALUES)
    for metric in ("map", "ams", "cox-nloglik"):
        for objective in set(EVAL_METRICS) - {"custom"}:
            with pytest.raises(ValueError, match=f"got {metric}: .* is not supported"):
                check_metrics(objective, [metric])


# Methods


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("paxx", "pax"),
        ("FedXGBllr", "fedxgbllr"),
        ("horizontal_forst", "horizontal-forest"),
        ("hetero_secureboost", "secureboost"),
        ("FedXgbBagging", "bagging"),
        ("xgboost", r"pax \(for .*same columns.* or secureboost \(for .*same rows.*"),
        ("LightGBM", r"pax .* or secureboost .*"),
        ("random_forest", r"horizontal-forest .* or federated-forest .*"),
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
    ("compare", "pax", "bagging", "data=my loans.csv"): OPTIONS + "-c 'data=my loans.csv'$",
    "tune pax --max_depth=3 --space eta=0.1,0.2": OPTIONS + "-c max-depth=3$",
    "run pax --max-depth 3 --eta=0.1": OPTIONS + "-c max-depth=3 -c eta=0.1$",
    "run fedxgbllr --n-estimators 5": OPTIONS + "-c fedxgbllr.trees=5$",
    "run pax --target y": OPTIONS + "--label y$",
    "run pax --rounds=9 --max-dept 3": OPTIONS + "-c num-boost-round=9 -c max-depth=3$",
    "run pax loans.csv": ": write fedapp run pax --data loans.csv$",
    "run loans.csv": ": write fedapp run METHOD --data loans.csv$",
    "tune pax a.csv b.csv": ": write fedapp tune pax --data a.csv,b.csv$",
    "compare pax bagging loans.csv": ": write fedapp compare pax bagging --data loans.csv$",
    "run pax bagging --label y": ": fedapp compare pax bagging compares them$",
    "settings bagger": "a method .bagging, .*. or a setting, got bagger; did you mean bagging.$",
}


@pytest.mark.parametrize("words", ANSWERS, ids=str)
def test_words_that_do_not_fit_are_answered_with_those_that_do(words):
    error = invoke(words if isinstance(words, str) else [*words]).exception
    assert isinstance(error, ConfigError)
    assert re.search(ANSWERS[words], str(error))


USAGE = "No such option|unexpected extra argument"
UNKNOWN = {
    "run pax --basline": USAGE,
    "run pax y=1": USAGE,
    **dict.fromkeys(("run", "compare", "predict", "report"), "Show this message and exit"),
    **{
        words: rf"\Aerror: fedapp [\w ]+ is not a command.*; {way}\n\Z"
        for words, way in {
            "evaluate": r"did you mean fedapp report RUN or fedapp predict RUN --data FILE\?",
            "pax --data loans.csv": r"did you mean fedapp run pax\?",
            "rnu pax": r"did you mean fedapp run\?",
            "site chek": r"did you mean fedapp site check\?",
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


def test_a_wrong_path_names_the_one_that_is_spelled_alike(own_folder, write_table):
    write_table("loans")
    Path("runs/first").mkdir(parents=True)
    for words, meant in {
        "run pax -c data=loan.csv --label y": "loans.csv",
        "predict runs/frist --data loans.csv --output x.csv": "runs/first",
        "predict first --data loans.csv --output x.csv": "runs/first",
        "run pax -c resume=firts": "runs/first",
    }.items():
        error = invoke(words).exception
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


def test_the_settings_of_a_method_are_those_that_it_reads_and_versions_are_told():
    number = r"\d+\.\d+(\.\d+)?"
    line = rf"fedapp {number}, flwr {number}, xgboost {number}, python 3\.\d+\.\d+\n"
    assert re.fullmatch(line, invoke("--version").output)
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
