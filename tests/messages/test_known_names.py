"""Names of XGBoost, LightGBM and scikit-learn: never answered by a look-alike."""

import inspect
import json
import re
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import pytest
import sklearn.ensemble
import xgboost
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.known_names import ALIASES, UNSUPPORTED, VALUES, setting_hint, setting_of
from fedapp.messages.methods import all_methods
from fedapp.metrics.names import EVAL_METRICS, check_metrics
from fedapp.settings import defaults, load_settings
from fedapp.trees.objective import LOSSES
from strategies import PAX

# LightGBM 4.7: parameters and aliases, as LGBM_DumpParamAliases lists them, and two of LGBMModel,
# but for those of XGBoost and scikit-learn.
LIGHTGBM = """
app application auc_mu_weights bagging bagging_by_query bagging_fraction bagging_fraction_seed
bagging_freq bagging_seed bin_construct_sample_cnt blacklist boost boosting boosting_type bundle
cat_column cat_feature cat_l2 cat_smooth categorical_column categorical_feature
cegb_penalty_feature_coupled cegb_penalty_feature_lazy cegb_penalty_split cegb_tradeoff config
config_file contrib convert_model convert_model_file convert_model_language data data_filename
data_random_seed data_sample_strategy data_seed deterministic device_type drop_rate drop_seed
early_stopping_min_delta early_stopping_round enable_bundle enable_sparse eval_at extra_seed
extra_tree extra_trees fair_c fc feature_contri feature_contrib feature_fraction
feature_fraction_bynode feature_fraction_seed feature_penalty feature_pre_filter first_metric_only
force_col_wise force_row_wise forced_splits forced_splits_file forced_splits_filename
forcedbins_filename forcedsplits_filename fp fs gpu_device_id gpu_device_id_list gpu_platform_id
gpu_use_dp group_column group_id has_header header hist_pool_size histogram_pool_size ignore_column
ignore_feature input_model is_enable_bundle is_enable_sparse is_pre_partition is_predict_contrib
is_predict_leaf_index is_predict_raw_score is_provide_training_metric is_save_binary
is_save_binary_file is_sparse is_training_metric is_unbalance l1_regularization label label_column
label_gain lambda_l1 lambda_l2 lambdarank_norm lambdarank_position_bias_regularization
lambdarank_truncation_level leaf_index linear_lambda linear_tree linear_trees local_listen_port
local_port machine_list machine_list_file machine_list_filename machines map_at map_eval_at
max_bin_by_feature max_drop max_leaf max_leaf_output max_tree_output mc mc_method mc_penalty metric
metric_freq metric_types metrics min_child_samples min_data min_data_in_bin min_data_in_leaf
min_data_per_group min_data_per_leaf min_gain_to_split min_hessian min_split_gain min_sum_hessian
min_sum_hessian_in_leaf min_sum_hessian_per_leaf mlist model_in model_input model_out model_output
monotone_constraining_method monotone_constraint monotone_constraints_method monotone_penalty
monotone_splits_penalty ms_penalty multi_error_top_k n_iter name_pred ndcg_at ndcg_eval_at
neg_bagging neg_bagging_fraction neg_sub_row neg_subsample nodes nrounds nthreads num_classes
num_gpu num_grad_quant_bins num_iteration num_iteration_predict num_iterations num_leaf num_leaves
num_machine num_machines num_round num_rounds num_thread num_threads num_tree objective_seed
objective_type other_rate output_freq output_model output_result parser_config_file path_smooth
poisson_max_delta_step port pos_bagging pos_bagging_fraction pos_sub_row pos_subsample pre_partition
precise_float_parser pred_early_stop pred_early_stop_freq pred_early_stop_margin pred_name
predict_contrib predict_disable_shape_check predict_leaf_index predict_name predict_raw_score
predict_rawscore predict_result prediction_name prediction_result quant_train_renew_leaf query
query_column query_id random_seed raw_score refit_decay_rate reg_sqrt save_binary save_period
saved_feature_importance_type shrinkage_rate sigmoid snapshot_freq sparse start_iteration_predict
stochastic_rounding sub_feature sub_feature_bynode sub_row subsample_for_bin subsample_freq task
task_type test test_data test_data_file time_out top_rate topk train train_data train_data_file
train_metric training_metric tree tree_learner tree_learner_type tree_type two_round
two_round_loading unbalance unbalanced_sets uniform_drop use_missing use_quantized_grad
use_two_round_loading valid valid_data valid_data_file valid_filenames weight weight_column workers
xgboost_dart_mode zero_as_missing
"""
# XGBoost's documented parameters that no booster's configuration has.
DOCUMENTED = """
colsample_bylevel verbosity validate_parameters disable_default_eval_metric eval_metric top_k
seed_per_iteration aft_loss_distribution quantile_alpha lambdarank_pair_method ndcg_exp_gain
"""
BOOSTERS = (
    *({"tree_method": one} for one in ("hist", "approx", "exact")),
    *({"booster": one} for one in ("dart", "gblinear")),
    *({"objective": one} for one in ("reg:tweedie", "count:poisson", "rank:ndcg", "survival:cox")),
    {"objective": "reg:quantileerror", "quantile_alpha": 0.5},
    {"objective": "multi:softmax", "num_class": 2},
)
ESTIMATORS = (
    *("HistGradientBoostingClassifier", "HistGradientBoostingRegressor"),
    *("GradientBoostingClassifier", "GradientBoostingRegressor"),
    *("RandomForestClassifier", "RandomForestRegressor"),
)
METRICS = "map pre ams cox-nloglik gamma-nloglik"
# Not parameters of training: tables, names of inner parts, and one of an objective's own.
OTHERS = {"self", "X", "kwargs", "name", "huber_slope"}


def leaves(document):
    """Keys of a nested document whose values are no documents."""
    if isinstance(document, list):
        for one in document:
            yield from leaves(one)
    elif isinstance(document, dict):
        for key, value in document.items():
            yield from leaves(value) if isinstance(value, dict | list) else (key,)


def of_xgboost():
    """Parameters of boosters and objectives, of train, and of the estimators and their fit."""
    rows = xgboost.DMatrix(np.arange(8.0).reshape(-1, 1), np.arange(8) % 2)
    names = set(DOCUMENTED.split())
    for parameters in BOOSTERS:
        trained = xgboost.train({"verbosity": 0, **parameters}, rows, 1)
        names |= set(leaves(json.loads(trained.save_config())))
    functions = [xgboost.train, xgboost.XGBModel.__init__]
    functions += [xgboost.XGBClassifier.fit, xgboost.XGBRegressor.fit, xgboost.XGBRanker.fit]
    return names.union(*(inspect.signature(one).parameters for one in functions)) - OTHERS


def of_scikit_learn():
    classes = [getattr(sklearn.ensemble, name) for name in ESTIMATORS]
    return set().union(*(inspect.signature(one).parameters for one in classes))


NAMES = {
    "xgboost": of_xgboost,
    "lightgbm": lambda: set(LIGHTGBM.split()),
    "scikit-learn": of_scikit_learn,
}
TRAINING = [name for name, method in all_methods().items() if method.trains]


@pytest.mark.parametrize("library", NAMES)
@pytest.mark.parametrize("method", TRAINING)
def test_every_name_of_a_library_is_a_setting_or_answered_by_what_it_is(library, method):
    names = NAMES[library]()
    assert len(names) > 30
    for name in names:
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
    ({"linear_tree": True}, NONE + "linear trees are not supported, .*"),
    ({"booster": "dart"}, NONE + "DART is not .*; nearest is subsample"),
    ({"booster": "gblinear"}, "booster .* gblinear is not supported, .* fedavg-linear"),
    ({"booster": "gbtree"}, NONE + "trees are as gbtree's, .*"),
    ({"rate_drop": 0.1}, NONE + "DART is not supported, .*"),
    ({"boosting_type": "rf"}, "boosting_type .* nearest is fedapp run federated-forest"),
    ({"tree_method": "exact"}, "tree_method .*: splits are at quantiles, .* max-bin"),
    ({"num_leaves": 31}, r"num_leaves .*; did you mean max-leaves\?"),
    ({"device": "cuda"}, NONE + "trees are trained on CPUs"),
    ({"device": "cuda"}, r"device .*; did you mean fedxgbllr\.device\?", "fedxgbllr"),
    ({"min_child_samples": 5}, "min_child_samples .*; nearest is min-child-weight"),
    ({"min_child_samples": 5}, rf".*; did you mean {FOREST}\.min-samples-leaf\?", FOREST),
    ({"max_samples": 5}, rf".*; nearest is {FOREST}\.bootstrap", FOREST),
    ({"sampling_method": 5}, r".*; nearest is secureboost\.goss", "secureboost"),
    ({"pax.max_leaves": 2}, r"pax\.max_leaves .*; did you mean max-leaves\?"),
    ({"pax.eta": 2}, r"pax\.eta is not a setting; did you mean eta\?"),
    ({"query": "search"}, r"query is not a setting; did you mean qid\?"),
    ({"groups": "patient"}, r"groups is not a setting; did you mean group\?"),
    ({"ndcg_exp_gain": False}, "ndcg_exp_gain .*defaults; nearest is objective"),
    *(
        ({"objective": objective}, f"objective .*{answer}")
        for objective, answer in {
            "rank:map": ": this ranking .*; nearest is rank:ndcg",
            "lambdarank": r"; did you mean rank:ndcg\?",
            "survival:weibull": "'survival:weibull': .*; nearest is survival:aft",
            "coxph": r"; did you mean survival:cox\?",
            "reg:linear": r"; did you mean reg:squarederror\?",
            "binary:logitic": r"; did you mean binary:logistic\?",
            "rmsle": r"; did you mean reg:squaredlogerror\?",
            "mphe": r"; did you mean reg:pseudohubererror\?",
        }.items()
    ),
    *(
        ({"objective": objective, "eval-metric": metric}, f"eval-metric .*, got {metric}: {answer}")
        for objective, metric, answer in (
            ("reg:squarederror", "cox-nloglik", "this metric .* not supported; nearest is rmse"),
            ("binary:logistic", "ndcg@5", "this metric is of rank:ndcg and .*; nearest is auc"),
            ("reg:squarederror", "rmsle", "this metric is of reg:squaredlogerror, .*; nearest .*"),
            ("reg:squarederror", "mphe", "this metric is of reg:pseudohubererror; nearest .*"),
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


def test_a_metric_of_other_objectives_is_answered_by_these():
    owners = {
        metric: {objective for objective, names in EVAL_METRICS.items() if metric in names}
        for metric in {name for names in EVAL_METRICS.values() for name in names}
    }
    for objective in EVAL_METRICS:
        for metric, of_metric in owners.items():
            if objective not in of_metric:
                with pytest.raises(ValueError, match=f"got {metric}: this metric is of ") as caught:
                    check_metrics(objective, [metric])
                named = str(caught.value).split(" is of ")[1].split(";")[0]
                assert {*re.findall(r"[a-z]+:[a-z]+", named)} <= of_metric


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
    other, follows = (
        "parameters must be the estimator's, got ",
        "it follows from fit, or is in settings",
    )
    for name, answer in {
        "lambda_l1": r"lambda_l1 is not a setting; did you mean reg_alpha\?",
        "eta": rf"{other}eta; did you mean learning_rate\?",
        "test_fraction": f"{other}test_fraction: {follows}",
        "scale_pos_weight": f"{other}scale_pos_weight: {follows}",
    }.items():
        with pytest.raises(TypeError, match=f"^{answer}$"):
            fedapp.PAXRegressor(**{name: 1})


def test_every_objective_and_metric_of_xgboost_is_allowed_or_answered_by_what_it_is():
    rows = xgboost.DMatrix(np.ones((2, 1)), np.ones(2))
    with pytest.raises(xgboost.core.XGBoostError) as caught:
        xgboost.train({"objective": "none"}, rows, 1)
    objectives = set(re.findall("candidate: (\\S+)", str(caught.value)))
    assert len(objectives) > 15
    for objective in objectives - LOSSES.keys():
        answer = f"'{objective}'(: .*; nearest is|; did you mean) ({'|'.join(LOSSES)})"
        with pytest.raises(ConfigError, match=answer):
            load_settings({"objective": objective})
        assert any(fnmatchcase(objective, row[0]) for row in VALUES)
    for metric in METRICS.split():
        for objective in set(EVAL_METRICS) - {"custom"}:
            with pytest.raises(ValueError, match=f"got {metric}: .* is not supported"):
                check_metrics(objective, [metric])
