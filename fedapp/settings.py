"""The settings of a run: frozen and checked, from a run config or from Python.

Defaults are in ``[tool.flwr.app.config]`` of pyproject.toml only; types and rules are here. Nested
tables are sections of single methods, which the methods check.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    TypeAdapter,
    ValidationError,
    WrapValidator,
    model_validator,
)

from fedapp.data.datasets import party_sources
from fedapp.data.partition import Holdout
from fedapp.data.schema import composed
from fedapp.errors import ConfigError, listed
from fedapp.home import app_folder
from fedapp.known_names import setting_hint, setting_of
from fedapp.messages.fields import MOST_DEPTH, MOST_FOLDS, MOST_LEAVES, MOST_LEVELS, fields_of
from fedapp.metrics.names import UNCALIBRATED, check_metrics, objective_metrics, watched_metric
from fedapp.sections import About, declared, flatten, method_sections
from fedapp.sections import Section as Section
from fedapp.sections import Value as Value
from fedapp.sections import check as check
from fedapp.trees.calibration import Calibration
from fedapp.trees.categories import MOST_CATEGORIES, auto_child_weight
from fedapp.trees.custom import CUSTOM
from fedapp.trees.limits import (
    GrowPolicy,
    MultiStrategy,
    n_levels,
    parse_interactions,
    parse_monotone,
    parse_weights,
)
from fedapp.trees.losses import LossParameters, Objective
from fedapp.trees.objective import AUTO, check_settings

Share = Annotated[float, Field(gt=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
NotNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]

SIMULATED_PARTIES = 3  # if one table is split on this machine
ALIGN = {"rows": "ordered"}  # synonyms
POISSON_DELTA_STEP = 0.7  # XGBoost's default
# The values of ``auto`` were measured (simulations/papers/methods.md). With fewer validation
# rows than FEWEST_WATCHED early stopping costs more than it gains.
ETA = 0.1
FIXED_ROUNDS = 100
MOST_ROUNDS = 300
PATIENCE = 20
FEWEST_WATCHED = 100
# With privacy.epsilon: the budget is shared by the rounds, so more rounds need more noise in each.
PRIVATE_ETA, PRIVATE_ROUNDS = 0.3, 50
# With pax.additive: eta is shared by the trees of a round, which are small unless it is said how.
CURVES_ETA = 0.5
CURVES_SIZE: Mapping[str, Value] = {"grow-policy": "lossguide", "max-leaves": 3}
# Replace ``auto``; all other defaults are XGBoost's already.
PRESETS: Mapping[str, Mapping[str, Value]] = {
    "xgboost": {
        "eta": 0.3,
        "num-boost-round": 100,
        "early-stopping-rounds": 0,
        "min-child-weight": 1.0,
    }
}


def _as_number(value: Any) -> Any:
    """Convert a text to a number where it is one."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


Auto = Literal["auto"]
AsNumber = BeforeValidator(_as_number)
# A column's name may be a number.
Name = Annotated[
    str,
    BeforeValidator(lambda name: str(name) if type(name) is int else name),
    AfterValidator(composed),
]


def _or_auto(value: object, check_known: Callable[[object], Objective]) -> Objective:
    """Accept ``auto``, which is resolved once the parties have described their labels."""
    return cast(Objective, value) if value == AUTO else check_known(value)


class RunSettings(Section):
    """A run of any method."""

    strategy: str
    """The method."""
    asked_parties: Annotated[int, Field(ge=0, alias="parties")]
    """Number of parties; 0: all nodes of Flower, and simulated ones by the tables, or by the values
    of `partition=column:NAME`, or 3 of one table."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Of all random draws of the run; rows are drawn before a table is split."""
    run_dir: str
    """New folder for the run; by default one in `runs`."""
    resume: str
    """Folder of an interrupted run, which ends in the same model."""
    log: Literal["", "mlflow"]
    """Tool that also logs the run: mlflow."""
    start_deadline: Seconds
    """Seconds to wait for the parties to connect, and for approvals."""
    exchange_deadline: Seconds
    """Seconds to wait for a party's answer."""
    resend_after: Seconds
    """Seconds after which a message without an answer is sent again."""


class TableSettings(Section):
    """The tables; a deployed site has its own in its node config."""

    data: Annotated[str, Field(min_length=1)]
    """A data set or file, split among the parties, or one each: `bank=a.csv,shop=b.csv`."""
    label: Name
    """Column of labels."""
    event: Name
    """Column that is 1 where the label is the time of an event, 0 where it was censored then."""
    qid: Name
    """Column that names the query of each row, for `rank:ndcg` and `rank:pairwise`."""
    positive_label: Name
    """Of two classes the one that counts as 1; by default the later, by number or else by text."""
    id: Name
    """Column that names the rows, or several, separated by commas."""
    weight: Name
    """Column of weights of rows, also in scores."""
    drop_columns: Name
    """Columns that are not features, separated by commas."""
    missing_label: Literal["refuse", "drop"]
    """What becomes of rows without a label: refuse the table, or drop them before any split."""
    without: str
    """Files of ids, separated by commas, whose rows are left out; `fedapp runs retrain` sets it."""
    schema_file: Annotated[str, Field(alias="schema")]
    """How the table is written; `fedapp data describe TABLE --schema FILE.toml` writes one."""
    header: bool
    """Whether the first line of a CSV file names the columns."""
    decimal: Literal[".", ","]
    """Decimal point or comma of a CSV file."""
    encoding: str
    """Encoding of a CSV file; by default that of the schema, else utf-8."""


class SplitSettings(Section):
    """Rows that are held back from training."""

    test_fraction: Fraction
    """Share of the rows held out as test rows."""
    valid_fraction: Fraction
    """Share of the other rows held out as validation rows, scored in every round."""
    fold: Annotated[int, Field(ge=0, le=MOST_FOLDS)]
    """Which of the `folds` is held out as test rows, from 1."""
    folds: Annotated[int, Field(ge=0, le=MOST_FOLDS)]
    """Cross-validation in place of `test-fraction`: each row is dealt to one fold."""
    group: Name
    """Column whose rows are in one subset, as a patient's visits; by default the repeated id."""
    test_from: Name
    """Test rows by time, `COLUMN:2024-07-01`; with `folds` a time each, separated by commas."""
    valid_from: Name
    """Validation rows by time, before the test rows; by default `valid-fraction` of these."""
    score_test: bool
    """Whether the test rows are scored at the end, or not looked at."""
    least_rows_per_name: Annotated[int, Field(ge=0, le=10**9)]
    """Fewest rows of a party that a category's name needs, else it is one of the rare ones."""


class HorizontalSettings(Section):
    """Parties with the same columns of different rows."""

    partition: str
    """How a table's rows are split: `iid`, `dirichlet:0.3`, `sizes:0.9,0.1` or `column:NAME`."""
    min_parties: Annotated[int, Field(ge=0)]
    """Fewest parties with which a run continues after losses; 0: all are needed."""


class VerticalSettings(Section):
    """Parties with different columns of the same rows."""

    columns: str
    """How a simulated table's columns are split: `even`, `random` or `sizes:13,10`."""
    align: Annotated[Literal["psi", "ordered"], BeforeValidator(lambda way: ALIGN.get(way, way))]
    """How rows are matched: `psi`, or `ordered` (`rows`): all tables have the same ids in order."""
    join: Literal["inner", "left"]
    """`left`: rows of the party with the labels that others lack stay, their values missing."""
    align_most_rows: Annotated[int, Field(ge=1, le=2**40)]
    """Most rows of a party; a larger table is refused."""
    share_column_names: bool
    """Whether simulated parties may learn the column names of others."""


class PartSettings(Section):
    """Settings that some methods read."""

    objective: Annotated[Objective, WrapValidator(_or_auto)]
    """Loss by XGBoost's name, or `auto`: by the labels of all parties."""
    allow_export: bool
    """Whether a simulated party's part of a divided model may leave it."""
    init_model: str
    """Folder or `model.json` of a finished run, to which this run adds rounds."""
    base_margin: Name
    """Column of the margin that each row starts from, as the logarithm of an exposure."""
    calibration: Calibration
    """Of probabilities of two classes, by the validation rows: `none`, `platt` or `isotonic`."""
    least_bin_rows: Annotated[int, Field(ge=0)]
    """Fewest rows of a bin in what a simulated party discloses of gradients."""
    label_epsilon: NotNegative
    """Vertical: a simulated party's labels are randomised by this epsilon; 0: as they are."""
    label_range: str
    """Vertical: `low,high` of labels that are measures, to which `label-epsilon` clips them."""


class InferenceSettings(Section):
    """Predictions with a model that is divided among parties; `fedapp predict` sets them."""

    model: Annotated[str, Field(pattern="^([0-9a-f]{16})?$")]
    """Id of the model."""
    output: Literal[".csv", ".parquet"]
    """Form of the predictions."""
    explain: str
    """Ids of up to 100 rows to explain, separated by commas; the coordinator learns them."""


class TreeSettings(Section):
    """Trees, as in XGBoost."""

    max_depth: Annotated[int, Field(ge=0, le=MOST_DEPTH)]
    """Largest depth of a tree; 0: no limit, with `max-leaves`."""
    asked_eta: Annotated[Annotated[float, Field(gt=0)] | Auto, AsNumber, Field(alias="eta")]
    """Learning rate: factor of each tree's leaves; `auto`: 0.1, with `privacy.epsilon` 0.3, with
    `pax.additive` 0.5."""
    reg_lambda: Annotated[NotNegative, Field(alias="lambda")]
    """L2 regularization of leaf weights."""
    reg_alpha: Annotated[NotNegative, Field(alias="alpha")]
    """L1 regularization of leaf weights."""
    gamma: NotNegative
    """Least gain (loss reduction) of a split."""
    asked_child_weight: Annotated[NotNegative | Auto, AsNumber, Field(alias="min-child-weight")]
    """Least sum of hessians on either side of a split; `auto`: 1, and 5 where a column has 100
    categories or more."""
    asked_delta_step: Annotated[NotNegative | Auto, AsNumber, Field(alias="max-delta-step")]
    """Largest step of a leaf, 0: any; `auto`: 0, for `count:poisson` 0.7."""
    subsample: Share
    """Share of the rows drawn for each tree."""
    colsample_bytree: Share
    """Share of the columns drawn for each tree."""
    colsample_bylevel: Share
    """Share of the columns drawn for each level."""
    colsample_bynode: Share
    """Share of the columns drawn for each node."""
    max_bin: Annotated[int, Field(ge=2, le=65535)]
    """Most bins of a column."""
    tweedie_variance_power: Annotated[float, Field(gt=1, lt=2)]
    """Of `reg:tweedie`."""
    huber_slope: Annotated[float, Field(gt=0, le=1e18)]
    """Of `reg:pseudohubererror`: errors beyond it count linearly."""
    aft_loss_distribution: Literal["normal", "logistic", "extreme"]
    """Of `survival:aft`: of the logarithm of times."""
    aft_loss_distribution_scale: Annotated[float, Field(gt=0, le=1e18)]
    """Its scale."""
    quantile_alpha: Annotated[float, Field(gt=0, lt=1)]
    """Of `reg:quantileerror`: the share of labels below the prediction."""
    max_cat_to_onehot: Annotated[int, Field(ge=1, le=MOST_CATEGORIES)]
    """A column of fewer categories is split one from the rest."""
    max_cat_threshold: Annotated[int, Field(ge=1, le=MOST_CATEGORIES)]
    """Of more categories, how many from either end of their order are cut."""


class BoostingSettings(TreeSettings):
    """Boosting, as in XGBoost."""

    asked_rounds: Annotated[
        Annotated[int, Field(ge=1, le=10**6)] | Auto, AsNumber, Field(alias="num-boost-round")
    ]
    """Boosting rounds; `auto`: 300 with early stopping, else 100, with `privacy.epsilon` 50."""
    asked_patience: Annotated[
        Annotated[int, Field(ge=0)] | Auto, AsNumber, Field(alias="early-stopping-rounds")
    ]
    """Rounds without a better validation score before training stops; 0: never; `auto`: 20 with
    100 validation rows or more, 0 where a run cannot stop early."""
    eval_metric: str
    """Metrics, separated by commas; early stopping watches the first, without any the loss."""
    asked_scale_pos_weight: Annotated[
        Annotated[float, Field(gt=0, le=1e38)] | Literal["balanced"],
        AsNumber,
        Field(alias="scale-pos-weight"),
    ]
    """Factor of the weight of positive rows, for `binary:logistic`; `balanced`: the weight of all
    parties' negative training rows over that of their positive ones."""
    preset: Literal["", "xgboost"]
    """`xgboost`: its defaults for what is `auto` (eta 0.3, 100 rounds, no early stopping)."""


class GrowthSettings(Section):
    """Order and number of splits, as in XGBoost."""

    grow_policy: GrowPolicy
    """Which node is split next: `depthwise`, level by level, or `lossguide`, the largest gain."""
    max_leaves: Annotated[int, Field(ge=0, le=MOST_LEAVES)]
    """Most leaves of a tree; 0: no limit."""
    num_parallel_tree: Annotated[int, Field(ge=1, le=1000)]
    """Trees of a round for each class, a boosted random forest."""
    multi_strategy: MultiStrategy
    """Of several classes: a tree for each, or one for all, with a vector in each leaf."""
    feature_weights: str
    """Chances of columns where colsample settings draw them, 1 by default: `age:2,income:0.5`."""


class ConstraintSettings(Section):
    """Constraints of trees, as in XGBoost."""

    monotone_constraints: str
    """-1 or 1 by column: `age:1,income:-1`."""
    interaction_constraints: str
    """Columns that may meet in a tree: `[age,income],[income,sex]`."""


class Settings(
    GrowthSettings,
    ConstraintSettings,
    BoostingSettings,
    InferenceSettings,
    PartSettings,
    VerticalSettings,
    HorizontalSettings,
    SplitSettings,
    TableSettings,
    RunSettings,
):
    """Settings of all strategies; ``sections`` has the methods' tables, unchecked."""

    sections: Mapping[str, Mapping[str, Any]]

    @model_validator(mode="after")
    def _fits_together(self) -> Settings:
        if self.early_stopping_rounds and not self.valid_fraction:
            raise ValueError("valid-fraction must be > 0 with early-stopping-rounds, got 0.0")
        if self.calibration != "none" and not self.valid_fraction:
            raise ValueError("valid-fraction must be > 0 with calibration, got 0.0")
        self.holdout.check()
        for name, time in (("test", self.test_from), ("valid", self.valid_from)):
            fraction = getattr(self, f"{name}_fraction")
            if time and fraction != defaults()[f"{name}-fraction"]:
                rule = f"must be omitted with {name}-from"
                raise ValueError(f"{name}-fraction {rule}, got {fraction}")
        if not self.max_depth and not 0 < self.max_leaves <= MOST_LEVELS + 1:
            rule = f"must be >= 1, or 0 (no limit) with max-leaves from 1 to {MOST_LEVELS + 1}"
            raise ValueError(f"max-depth {rule}, got 0 with max-leaves={self.max_leaves}")
        if self.folds and self.test_fraction != defaults()["test-fraction"]:
            rule = "must be omitted with folds, of which one is held back"
            raise ValueError(f"test-fraction {rule}, got {self.test_fraction}")
        if self.init_model and not self.scale_pos_weight:
            rule = "must be a number with init-model, as in the summary of the run it continues"
            raise ValueError(f"scale-pos-weight {rule}, got balanced")
        if self.asked_parties and self.min_parties > self.parties:
            rule = f"must be <= parties ({self.parties}), got {self.min_parties}"
            raise ValueError(f"min-parties {rule}")
        party_sources(self.data, self.parties)
        self.check_objective()
        shares = self.colsample_bytree, self.colsample_bylevel, self.colsample_bynode
        if parse_weights(self.feature_weights) and min(shares) == 1:
            rule = "must be omitted where no colsample-bytree, -bylevel or -bynode draws columns"
            raise ValueError(f"feature-weights {rule}, got {self.feature_weights}")
        parse_monotone(self.monotone_constraints)
        parse_interactions(self.interaction_constraints)
        return self

    def check_objective(self) -> None:
        """Raise ValueError if a setting or a metric does not fit the objective."""
        check_settings(self.objective, self)
        if self.objective == AUTO:
            return
        check_metrics(self.objective, self.eval_metrics, LossParameters.of(self))

    def with_parties(self, n_parties: int) -> Settings:
        """Fill in the number of parties; raise ConfigError if a setting does not fit it."""
        return load_settings({**self.as_config(), "parties": n_parties})

    def settled(self, objective: Objective) -> Settings:
        """Fill in the objective chosen by the labels; ConfigError if a setting does not fit it."""
        settings = self.model_copy(update={"objective": objective})
        try:
            settings.check_objective()
        except ValueError as error:
            raise ConfigError(f"{error}; objective=auto chose it by the labels") from None
        return settings

    @property
    def parties(self) -> int:
        """Number of parties; if it is not set, that of a simulation on this machine."""
        if self.asked_parties:
            return self.asked_parties
        return len(party_sources(self.data, self.data.count(",") + 1)) or SIMULATED_PARTIES

    @property
    def early_stopping_rounds(self) -> int:
        """Rounds without a better validation score before training stops; 0 never stops."""
        if self.asked_patience != "auto":
            return self.asked_patience
        # ``auto`` is 0 without validation rows, and where a setting of the method excludes it.
        section = self.sections.get(self.strategy, {})
        is_off = (
            not self.valid_fraction
            or "rounds" in section  # of averaging instead of boosting
            or self._is_private
            or (section.get("aggregation") == "secure" and self.min_parties > 0)
            or section.get("first-trees", 0) not in range(PATIENCE + 1)
            or (self.objective == CUSTOM and not self.eval_metrics)
        )
        return 0 if is_off else PATIENCE

    @property
    def _is_private(self) -> bool:
        section = self.sections.get(self.strategy, {})
        return section.get("aggregation") == "secure" and self.sections["privacy"]["epsilon"] != 0

    def watching(self, n_valid: int) -> Settings:
        """Switch ``auto`` early stopping off if there are too few validation rows."""
        is_off = self.asked_patience == "auto" and n_valid < FEWEST_WATCHED
        return self.model_copy(update={"asked_patience": 0}) if is_off else self

    @property
    def num_boost_round(self) -> int:
        """Most boosting rounds; ``auto`` is lower without early stopping, or with noise."""
        fixed = PRIVATE_ROUNDS if self._is_private else FIXED_ROUNDS
        default = MOST_ROUNDS if self.early_stopping_rounds else fixed
        return default if self.asked_rounds == "auto" else self.asked_rounds

    @property
    def eta(self) -> float:
        """Learning rate."""
        of_curves = self.sections.get(self.strategy, {}).get("additive")
        default = PRIVATE_ETA if self._is_private else CURVES_ETA if of_curves else ETA
        return default if self.asked_eta == "auto" else self.asked_eta

    @property
    def max_delta_step(self) -> float:
        """Largest absolute leaf value; ``auto`` is XGBoost's default."""
        default = POISSON_DELTA_STEP if self.objective == "count:poisson" else 0.0
        return default if self.asked_delta_step == "auto" else self.asked_delta_step

    @property
    def min_child_weight(self) -> float:
        """Least sum of hessians of a child; ``auto`` is that of columns of few categories."""
        default = auto_child_weight(())
        return default if self.asked_child_weight == "auto" else self.asked_child_weight

    def splitting(self, category_counts: Iterable[int]) -> Settings:
        """Resolve ``auto`` min-child-weight by the number of categories of each column."""
        if self.asked_child_weight != "auto":
            return self
        return self.model_copy(update={"asked_child_weight": auto_child_weight(category_counts)})

    @property
    def n_levels(self) -> int:
        """Most levels of a tree that are split."""
        return n_levels(self.max_depth, self.max_leaves)

    @property
    def n_sums(self) -> int:
        """Most sums of a bin in a round: gradients and hessians, of one child of each pair."""
        every = 1 << self.n_levels
        return min(every, self.n_levels * self.max_leaves) if self.max_leaves else every

    @property
    def scale_pos_weight(self) -> float:
        """Factor of the weight of positive rows; 0: ``balanced``, which their labels resolve."""
        scale = self.asked_scale_pos_weight
        return 0.0 if scale == "balanced" else scale

    @property
    def eval_metrics(self) -> tuple[str, ...]:
        """Metrics of every round, beside the objective's default scores."""
        return listed(self.eval_metric) or objective_metrics(
            self.objective, LossParameters.of(self)
        )

    @property
    def scored_metrics(self) -> tuple[str, ...]:
        """``eval_metrics``, with a calibration also the loss without it."""
        more = (UNCALIBRATED,) if self.calibration != "none" else ()
        return (*dict.fromkeys((*self.eval_metrics, *more)),)

    @property
    def watched_metric(self) -> str:
        """The metric that early stopping, searches and comparisons look at."""
        return watched_metric(self.objective, self.eval_metrics)

    @property
    def holdout(self) -> Holdout:
        """The rule by which rows are held back from training."""
        return Holdout(**fields_of(self, Holdout))

    @property
    def partition_column(self) -> str:
        """The column of a natural partition (``partition=column:NAME``), else empty."""
        rule, _, column = self.partition.partition(":")
        return column if rule == "column" else ""

    def as_config(self) -> dict[str, Any]:
        """The settings as they are written in TOML."""
        flat = self.model_dump(by_alias=True)
        sections = flat.pop("sections")
        return {**flat, **{name: dict(values) for name, values in sections.items()}}

    @property
    def changed(self) -> dict[str, Value]:
        """Settings that differ from their defaults, by their names."""
        flat = flatten(self.as_config())
        return {name: value for name, value in flat.items() if value != defaults()[name]}


@cache
def defaults() -> Mapping[str, Value]:
    """Every setting with its default, nested names joined by a dot."""
    with (app_folder() / "pyproject.toml").open("rb") as file:
        return flatten(tomllib.load(file)["tool"]["flwr"]["app"]["config"])


def load_settings(overrides: Mapping[str, Any]) -> Settings:
    """Override the defaults, and check the settings; raises ConfigError, also if two are alike."""
    named = settings_named(overrides, str(overrides.get("strategy", "")))
    preset = PRESETS.get(str(named.get("preset")), {})
    merged = {**defaults(), **named}
    merged |= {name: value for name, value in preset.items() if merged[name] == AUTO}
    merged |= {
        name: _typed(merged[name], usual) for name, usual in defaults().items() if "." in name
    }
    of_curves = merged["pax.additive"] is True and not merged["privacy.epsilon"]
    if of_curves and not named.keys() & {*CURVES_SIZE, "max-depth"}:
        merged |= CURVES_SIZE
    sections: dict[str, dict[str, Value]] = {}
    for name in [name for name in merged if "." in name]:
        section, _, key = name.partition(".")
        sections.setdefault(section, {})[key] = merged.pop(name)
    return check(Settings, {**merged, "sections": sections})


def _typed(value: Value, usual: Value) -> Value:
    """A text as a value of the default's type; if it is none, its section refuses it."""
    if isinstance(usual, str) or not isinstance(value, str):
        return value
    try:
        return TypeAdapter(type(usual)).validate_python(value)
    except ValidationError:
        return value


def settings_named(given: Mapping[str, Any], method: str = "") -> dict[str, Value]:
    """Settings by full names, a synonym first the method's; ConfigError for unknown and twice."""
    named: dict[str, Value] = {}
    for name, value in flatten(given).items():
        setting = setting_of(name, defaults(), method)
        if setting in named:
            raise ConfigError(f"{setting} must be given once, got {named[setting]} and {value}")
        named[setting] = value
    check_names(named, method)
    return named


def check_names(named: Mapping[str, Any], method: str = "") -> None:
    """Raise ConfigError for an unknown setting, with a hint to the nearest one of the method."""
    for name, value in named.items():
        if name not in defaults():
            hint = setting_hint(name, defaults(), method, value)
            raise ConfigError(f"{name} is not a setting{hint}")


def about_settings() -> dict[str, About]:
    """Every setting of the general sections and of the imported methods', by its full name."""
    about = {setting.name: setting for setting in declared(Settings).values()}
    for table, section in method_sections().items():
        about |= {f"{table}.{setting.name}": setting for setting in declared(section).values()}
    return about
