"""Names that people know from other tools, as XGBoost and scikit-learn, and what they are here.

A name is accepted (``SYNONYMS``), called something else (``ALIASES``), or not supported, for a
reason. Only a name in none of these is compared with the spelling of settings: a known name is
never taken for one that merely looks like it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from fedapp.errors import did_you_mean, nearest

# Exact synonyms, accepted as the setting: a setting of the method first, or else a general one.
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "learning-rate": ("eta", "learning-rate"),
    "n-estimators": ("trees", "num-boost-round"),
    "reg-lambda": ("lambda",),
    "reg-alpha": ("alpha",),
    "min-split-loss": ("gamma",),
}
# A row: why names are not supported, or nothing if they mean the same | our settings, of which the
# first that the method has, or else all methods have, is named; or a command | patterns of the
# names, some with a value.
_NAMES = """
| learning-rate eta | learning-rate shrinkage shrinkage-rate step-size lr eta
| trees rounds num-boost-round | boosting-rounds iterations max-iter n-estimators n-iter n-rounds
  n-trees nrounds num-boost-round num-boost-rounds num-iteration num-iterations num-round num-rounds
  num-tree num-trees rounds trees
| l2 lambda | reg-lambda lambda-l2 l2-regularization l2 lambda
| alpha | reg-alpha lambda-l1 l1-regularization l1
| gamma | min-split-loss min-split-gain min-gain-to-split
| min-samples-leaf | min-samples-leaf min-data-in-leaf min-data-per-leaf min-data min-child-samples
  min-child-rows
| min-child-weight | min-sum-hessian-in-leaf min-sum-hessian-per-leaf min-sum-hessian min-hessian
| max-delta-step | max-tree-output max-leaf-output poisson-max-delta-step
| subsample | bagging-fraction bagging row-sample sub-row
| colsample-bytree | colsample feature-fraction sub-feature
| max-features colsample-bynode | max-features feature-fraction-bynode sub-feature-bynode
| bins max-bin | max-bins bins n-bins num-bins
| monotone-constraints | monotonic-cst monotone-constraint mc
| interaction-constraints | interaction-cst
| early-stopping-rounds | early-stopping early-stopping-round n-iter-no-change
| seed | random-state random-seed rng-state
| data | dtrain train-data train-data-file train data-filename
| header | has-header
| group | groups
| qid | group-column group-id query query-column query-id
| event | censored status event-column censoring
| quantile-alpha | quantile
| label | target target-column label-column y
| weight | sample-weight weight-column
| drop-columns | ignore-column ignore-feature blacklist
| base-margin | init-score
| init-model | xgb-model input-model model-input model-in
| test-fraction | test-size test-share
| valid-fraction | validation-fraction valid-size
| parties | clients n-clients num-clients n-parties sites num-machines num-machine
| objective | loss loss-function objective-type application app obj
| eval-metric | metric metrics metric-types custom-metric scoring
| max-leaves | max-leaf-nodes num-leaves num-leaf max-leaf
splits are at quantiles, as with tree_method=hist | max-bin | tree-method *updater*
DART is not supported, as it rescales earlier trees, of which parties keep only the sum | subsample
  | boost*=dart rate-drop drop-rate skip-drop one-drop max-drop uniform-drop drop-seed *dart-mode
  sample-type normalize-type
gblinear is not supported, as boosting here is by trees | "fedapp run fedavg-linear" |
  booster=gblinear feature-selector tolerance
linear trees are not supported, as a leaf is one number per class | max-depth | linear-*
a random forest is a method of its own | "fedapp run federated-forest" | boost*=rf
only secureboost draws rows by their gradients | goss subsample | boost*=goss goss top-rate
  other-rate data-sample-strategy sampling-method
trees are as gbtree's, and the method decides how parties train them | | booster boosting
  boosting-type boost tree-learner* tree-type tree
thresholds are the best ones, never random | colsample-bynode | extra-trees extra-tree extra-seed
nodes are limited by sums of hessians, not by rows | min-samples-leaf min-child-weight |
  min-samples-leaf min-data-*leaf min-data min-child-samples min-child-rows min-samples-split
no share of the weights limits leaves | min-samples-leaf min-child-weight | min-weight-fraction-leaf
the least gain limits splits | min-impurity-decrease gamma | min-impurity-decrease ccp-alpha
the objective defines gains | objective | criterion
each tree draws anew from all rows | bootstrap subsample | bootstrap max-samples bagging-freq
  subsample-freq bagging-by-query pos-bagging* pos-sub* neg-bagging* neg-sub*
held-back rows are scored, not undrawn ones | valid-fraction | oob-score
one seed is for all draws, and runs repeat exactly | seed | bagging-*seed feature-fraction-seed
  data-*seed objective-seed seed-per-iteration deterministic
kinds of columns are those of the values, or a schema's | schema | enable-categorical categorical-*
  cat-feature cat-column feature-types
categories are ordered without smoothing | max-cat-threshold | cat-l2 cat-smooth min-data-per-group
empty fields, and values that a schema lists, are missing | schema | missing use-missing
  zero-as-missing default-direction
the number of threads follows from table and machine | | n-jobs nthread* num-thread*
trees are trained on CPUs | | device* gpu-* num-gpu predictor fail-on-invalid-gpu-id
speed, memory and printed lines have no settings | | verbos* silent metric-freq output-freq
  force-???-wise hist*-pool-size *bundle *sparse* max-cached-hist-node *two-round* *pre-partition
  precise-float-parser feature-pre-filter opt-dense-col max-row-perbatch debug-synchronize
  validate-parameters
the base score follows from all labels | base-margin | base-score boost-from-average init
it follows from the labels and the columns | | num-class* num-target num-feature
pairs, gains and normalization of ranking are XGBoost's defaults | objective | lambdarank-*
  label-gain ndcg-exp-gain
the metric names how many ranks count, as ndcg@5 | eval-metric | eval-at ndcg-*at map-*at
held-back rows are of the table's queries | valid-fraction | eval-group eval-qid
its loss is not supported | objective | expectile-alpha fair-c sigmoid reg-sqrt
a factor weights positive rows, a column any rows | scale-pos-weight | class-weight *unbalance*
held-back rows are a share or a fold | valid-fraction | valid valid-data* evals valid-file*
  *eval-set
held-back rows are a share or a fold | test-fraction | test test-data*
every round is scored, in rounds.jsonl | eval-metric | evals-result *train*-metric maximize
  disable-default-eval-metric multi-error-top-k auc-mu-weights
any better score of the first metric counts | early-stopping-rounds | tol *-min-delta first-metric*
a run adds trees to a saved model | init-model | warm-start process-type refresh-leaf refit-*
a run saves its state after each round | resume | snapshot-freq save-period
files are in the run's folder | run-dir | output-model model-out* *save-binary* *importance-type
it is no part of a training run | "fedapp predict" | *predict* *raw-score *leaf-index contrib pred-*
  output-result name-pred
it is no part of a training run | "fedapp export" | convert-model*
each setting follows its own -c | | config* task task-type parser-config-file params
a Python function sees each round | "on_round of fedapp.run" | callbacks
Flower connects the parties | parties | machine* workers nodes mlist time-out local-*port port
each column has quantiles of all parties' rows | bins max-bin | max-bin-by-feature min-data-in-bin
  bin-construct-sample-cnt subsample-for-bin forcedbins-filename sketch-*
gradients are not rounded to a few bins | max-bin | use-quantized-grad num-grad-quant-bins
  stochastic-rounding quant-train-renew-leaf
columns have no costs or forced splits | interaction-constraints | feature-contri* fc fp
  feature-penalty forced*splits* fs cegb-*
all columns are candidates of a split | colsample-bytree | top-k topk
leaves are not smoothed | lambda | path-smooth
constraints are kept as in XGBoost, without penalty | monotone-constraints | mc-method *s-penalty
  monotone-*-method monotone-penalty mc-penalty
"""
# Values of objective and eval-metric.
_VALUES = """
| reg:squarederror rmse | reg:linear regression regression_l2 l2 mean_squared_error mse l2_root
  root_mean_squared_error squared_error rmse
| binary:logistic logloss mlogloss | binary logistic log_loss logloss deviance binary_logloss
| multi:softprob mlogloss logloss | multiclass softmax multinomial multi_logloss mlogloss
| reg:logistic logloss | cross_entropy xentropy
| count:poisson poisson-nloglik | poisson
| reg:gamma gamma-deviance | gamma
| reg:tweedie | tweedie
| error merror | error merror binary_error multi_error
| reg:squaredlogerror rmsle rmse | rmsle msle mean_squared_log_error
| reg:pseudohubererror mphe rmse | mphe
| aucpr | average_precision pr_auc
| auc | roc_auc
runs predict probabilities, of which the largest is the class | multi:softprob | multi:softmax
  multiclassova multiclass_ova ova ovr
runs predict probabilities, not margins | binary:logistic | binary:logitraw
this loss is not supported | binary:logistic logloss | exponential *entropy_lambda xentlambda
this loss is not supported | reg:pseudohubererror reg:squarederror rmse | huber fair expectile mape
  mean_absolute_percentage_error reg:expectileerror
| rank:ndcg | lambdarank
this ranking is not supported | rank:ndcg ndcg auc rmse | rank* xe* map pre
| auc rmse mlogloss | ndcg
this model of survival is not supported | survival:aft aft-nloglik rmse | survival:*
  interval-regression-accuracy
this metric is not supported | c-index rmse auc mlogloss | cox-*
| survival:cox | cox coxph
| survival:aft aft-nloglik | aft
| c-index | concordance_index c_index concordance
| mae | eval-metric=quantile
| reg:absoluteerror mae | absolute_error regression_l1 l1 mean_absolute_error mae
| reg:quantileerror mae | quantile
this metric is not supported | auc mlogloss gamma-deviance rmse | ams auc_mu gamma-nloglik
"""
# Commands of other tools.
_COMMANDS = """
| "fedapp run METHOD" | train fit
| "fedapp report RUN or fedapp predict RUN --data FILE" | score evaluate eval test metrics
| "fedapp predict RUN --data FILE" | inference infer
| "fedapp compare METHOD METHOD" | cv benchmark
| "fedapp tune METHOD" | search optimize hpo
| "fedapp report RUN" | show plot open explain importance
| "fedapp runs" | list ls
| "fedapp export RUN" | save convert
| "fedapp site init or fedapp federation init" | init start new
| "fedapp site" | check approve
| "fedapp run --help" | methods strategies
| "fedapp settings" | config parameters params
| "fedapp data list" | datasets
| "fedapp --help" | help
| "fedapp --version" | version
"""
# Names of methods elsewhere; of several, those of each family of parties.
_METHODS = """
| fedavg-linear | *logistic* *linear* *regression lr glm fedavg *logreg fedprox
| bagging | *bagging
| cyclic | *cyclic *sequential
| fedxgbllr | fedxgb
| horizontal-forest federated-forest | *forest* rf extra-trees ert
| secureboost | hetero* sbt *secure-boost* vertical* vfl
| pax | homo* horizontal* hfl
| pax secureboost | *xgb* gb* *boost* *gbm* *gbdt* hist* *tree* cart
"""
Row = tuple[str, str, tuple[str, ...]]  # a pattern, the reason, and the nearest


def _rows(text: str) -> list[Row]:
    """The rows of a table, one for each pattern."""
    rows = [row.split("|") for row in text.strip().replace("\n  ", " ").split("\n")]
    return [
        (pattern, reason.strip(), (near.strip(),) if '"' in near else tuple(near.split()))
        for reason, near, patterns in rows
        for pattern in patterns.split()
    ]


SPELLED_ALIKE = 0.85  # a name that is nearer to one of ours than this is ours
ALIASES = {name: nearest for name, reason, nearest in _rows(_NAMES) if not reason}
UNSUPPORTED = [row for row in _rows(_NAMES) if row[1]]
VALUES = _rows(_VALUES)
COMMANDS = {name: near.strip('"') for name, _, (near,) in _rows(_COMMANDS)}
METHODS = _rows(_METHODS)


def command_hint(name: str, path: str, known: Collection[str], methods: Collection[str]) -> str:
    """What does here what another tool's command does, or ``did_you_mean``.

    ``known`` are the commands that follow ``path``.
    """
    written = name.lower().lstrip("-").replace("_", "-")
    is_first = " " not in path
    if is_first and written in methods:
        return f"; did you mean {path} run {written}?"
    if is_first and written in COMMANDS:
        return f"; did you mean {COMMANDS[written]}?"
    meant = nearest(written, known)
    return f"; did you mean {path} {meant}?" if meant else f"; {path} --help lists them"


def method_hint(name: str, parties: Mapping[str, str]) -> str:
    """Which method a name of another tool means here, or ``did_you_mean``.

    ``parties`` are the methods, each with what its parties share.
    """
    written = name.strip().lower().replace("_", "-")
    if misspelled := nearest(written, parties, least=SPELLED_ALIKE):
        return f"; did you mean {misspelled}?"
    for pattern, _, ways in METHODS:
        if fnmatchcase(written, pattern):
            shown = [f"{way} (for {parties[way]})" for way in ways]
            return f"; did you mean {' or '.join(shown if ways[1:] else ways)}?"
    return did_you_mean(name, parties)


def setting_of(name: str, known: Collection[str], method: str = "") -> str:
    """The setting that a name or an exact synonym refers to; else the name itself."""
    kebab = name.strip().replace("_", "-")
    meant = SYNONYMS.get(kebab, ()) if kebab not in known else ()
    candidates = (*(f"{method}.{synonym}" for synonym in meant), *meant)
    settings = [setting for setting in candidates if setting in known]
    return settings[0] if settings else kebab if kebab in known else name.strip()


def alias(kebab: str, known: Collection[str], method: str) -> str:
    """The setting that other libraries or methods call so; empty if there is none."""
    return _first((kebab, *ALIASES.get(kebab, ())), known, method)


def meaning(kebab: str, known: Collection[str], method: str, value: object = "") -> str:
    """What a name of other libraries or methods means here, as the end of a text; or nothing."""
    if meant := alias(kebab, known, method):
        return f"; did you mean {meant}?"
    return _hint(UNSUPPORTED, (f"{kebab}={str(value).lower()}", kebab), known, method)


def setting_hint(name: str, known: Collection[str], method: str = "", value: object = "") -> str:
    """What an unknown name means here, or which setting was probably meant, or an empty text.

    ``known`` are all settings, with the method's name before its settings:
    ``federated-forest.trees``.
    """
    section, _, kebab = name.strip().lower().replace("_", "-").rpartition(".")
    method = section or method
    if hint := meaning(kebab, known, method, value):
        return hint
    if owners := [setting for setting in known if setting.partition(".")[2] == kebab]:
        return f"; did you mean {' or '.join(owners)}?"
    if section:
        return did_you_mean(name, [setting for setting in known if "." in setting])
    of_method = [setting for setting in known if setting.partition(".")[0] in (setting, method)]
    return did_you_mean(name, of_method, f"{method}.") or did_you_mean(name, known)


def value_hint(setting: str, value: object, allowed: Collection[str]) -> str:
    """The same for a value of ``objective`` or ``eval-metric``, up to an @."""
    if setting == "quantile-alpha" and "." in str(value) and "," in str(value):
        return ": a model predicts one quantile, so train a run for each"
    if setting not in ("objective", "eval-metric"):
        return ""
    kind = str(value).strip().lower().partition("@")[0]
    return _hint(VALUES, (f"{setting}={kind}", kind), allowed) or did_you_mean(kind, allowed)


def _hint(rows: list[Row], asked: tuple[str, str], known: Collection[str], method: str = "") -> str:
    """The reason and the nearest by the first row for a name with its value, or else by itself."""
    for name in asked:
        for pattern, why, ways in rows:
            if ("=" in name) == ("=" in pattern) and fnmatchcase(name, pattern):
                meant = ways[0].strip('"') if '"' in "".join(ways) else _first(ways, known, method)
                if why:
                    return f": {why}; nearest is {meant}" if meant else f": {why}"
                return f"; did you mean {meant}?" if meant else ""
    return ""


def _first(names: Collection[str], known: Collection[str], method: str) -> str:
    """The first setting, of the method or else of all, among names; empty if there is none."""
    settings = (setting for name in names for setting in (f"{method}.{name}", name))
    return next((setting for setting in settings if setting in known), "")
