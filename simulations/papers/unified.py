"""UniFed's vertical scenarios with tree models, beside the scores it reports of other frameworks.

Source: Liu et al. 2022 (arXiv:2207.10308), Table 7, and its leaderboard: two parties with the
columns of FATE's example files, 64 trees of depth 6, 64 bins, learning rate 0.05
(``paper_experiments/*.gbdt.json`` of its toolkit). SecureBoost grows XGBoost's trees, so its score
is compared with XGBoost's on the joined table. An interrupted run resumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedapp.data.datasets import NOT_PUBLIC, locate
from fedapp.data.schema import DataFile
from fedapp.errors import DataError
from fedapp.runs.baselines import join_tables
from fedapp.settings import Settings, load_settings
from fedapp.trees.losses import REGRESSION
from simulations.paper import Paper, Tables
from simulations.study import Row, boosted_scores, check_names, costs

TREES, DEPTH, BINS, ETA, KEY_BITS, SEED = 64, 6, 64, 0.05, 2048, 42
HELD_OUT = 0.2
COMMON: Row = {"strategy": "secureboost", "parties": 2, "seed": SEED, "valid-fraction": 0.0}
COMMON |= {"max-depth": DEPTH, "max-bin": BINS, "eta": ETA, "allow-export": True}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One of UniFed's vertical scenarios."""

    name: str
    objective: str
    reported: float  # best score of a tree model on UniFed's leaderboard: AUC, or MSE
    source: str = ""  # the table that is split in halves; empty if there are files
    files: tuple[str, ...] = ()  # of the active and of the passive party
    label: str = "y"
    id: str = "id"
    test_fraction: float = 0.0  # 0 if the reported score is of the training rows

    def data(self) -> Row:
        """Settings that name the tables."""
        if self.source:
            return {"data": self.source}
        active, passive = (_path(name) for name in self.files)
        tables = f"active={active},passive={passive}"
        return {"data": tables, "label": self.label, "id": self.id}


def _path(name: str) -> Path:
    path = locate(DataFile(name, ""))
    if path is None:
        raise DataError(f"'{name}' must be in $FEDAPP_DATA, got no such file; {NOT_PUBLIC}")
    return path


def _pair(name: str, suffix: str) -> tuple[str, ...]:
    return tuple(f"{name}-hetero-{party}.{suffix}" for party in ("guest", "host"))


BINARY = "binary:logistic"
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("breast_vertical", BINARY, 1.0, files=_pair("breast", "csv")),
        Scenario(
            "motor_vertical", REGRESSION, 3.64e-3, "", _pair("motor", "csv"), "motor_speed", "idx"
        ),
        Scenario("student_vertical", REGRESSION, 3.26, files=_pair("student", "csv")),
        Scenario(
            "default_credit_vertical", BINARY, 0.8199, files=_pair("default-credit", "csv.gz")
        ),
        Scenario(
            "give_credit_vertical", BINARY, 0.8679, "give-me-some-credit", test_fraction=HELD_OUT
        ),
    )
}
NOTES = """\
Rows: UniFed scores breast, motor, student and default_credit on the rows it trains on. FATE has one
file a party of each; UniFed's adapter of Fedlearner writes these rows a second time as its test
file, for all sets but give_credit. XGBoost says the same: "pooled" is its score on these rows, and
"held out" its score on a fifth that it was not trained on, which is what a bank would see.
give_credit: UniFed's files are not at hand; the table's first and last five columns, in its order,
and a fifth of its rows drawn to test stand in.
Seconds: training, both parties and the server on the cores of one machine; alignment and the
reading of tables are not in it. UniFed's are of its own machines and of smaller keys: FedTree's
sources generate 512 bits. Compare orders of magnitude, no more.
Settings that it leaves to the frameworks differ: lambda is 1 here as in FedTree, 0.1 in FATE's and
Fedlearner's; gamma is 0, in FedTree 1. vehicle_scale and dvisits are not at hand."""
STUDY = Paper(Path("runs/benchmarks/unified"), NOTES)


def settings_of(scenario: Scenario) -> Settings:
    """Settings of one run."""
    config: Row = {**scenario.data(), "objective": scenario.objective, "num-boost-round": TREES}
    config |= {"test-fraction": scenario.test_fraction, "secureboost.key-bits": KEY_BITS}
    return load_settings({**COMMON, **config})


def pooled_scores(settings: Settings) -> dict[str, float]:
    """Scores of XGBoost on the joined table: the run's train and test rows, and a held-out fifth.

    ``held_out`` is of a model that was not trained on these rows; ``test`` is absent without test
    rows.
    """
    scores = other = _pooled(settings)
    if "test" not in scores:
        other = _pooled(settings.model_copy(update={"test_fraction": HELD_OUT}))
    return {**scores, "held_out": other["test"]}


def _pooled(settings: Settings) -> dict[str, float]:
    rows = join_tables(settings)[0].in_table_order()
    scores = boosted_scores(settings, rows, train=rows.split.train, test=rows.split.test)
    return {subset: score(settings.objective, scores[subset]) for subset in scores}


def score(objective: str, scores: Mapping[str, float]) -> float:
    """AUC, or mean squared error."""
    return scores["rmse"] ** 2 if objective == REGRESSION else scores["auc"]


def run_scenario(scenario: Scenario, rows_only: bool) -> Row:
    """Scores of XGBoost, and those and costs of SecureBoost unless only rows are compared."""
    settings = settings_of(scenario)
    pooled, subset = pooled_scores(settings), "test" if scenario.test_fraction else "train"
    metric = "mse" if scenario.objective == REGRESSION else "auc"
    row: Row = {"scenario": scenario.name, "metric": metric, "subset": subset}
    row |= {"reported": scenario.reported, "pooled": pooled[subset]}
    row |= {name: pooled[name] for name in ("train", "held_out")}
    if rows_only:
        return row
    folder = f"{scenario.name}-{TREES}-{KEY_BITS}"
    summary = STUDY.run(settings, folder, scenario.name)
    row |= {"trees": summary["trees"], "key_bits": KEY_BITS}
    row |= {"rows": summary["matched_rows"]["train"]}
    row |= {"score": score(scenario.objective, summary["metrics"][subset])}
    return row | costs(summary)


STUDY.table(
    "rows",
    f"UniFed, trees of depth {DEPTH}, eta {ETA:g}",
    "scenario; score=metric; rows=subset; trees; bits=key_bits; ours=score:.4g; pooled:.4g; "
    "UniFed=reported:.4g; training rows=train:.4g; held out=held_out:.4g; sec.=seconds:.0f; "
    "MB=mb:.0f; exchanges",
    2,
)(list)


@STUDY.command
def main(scenarios: tuple[str, ...] = tuple(SCENARIOS), rows_only: bool = False) -> Tables:
    """Scores and costs of the scenarios, beside UniFed's.

    ``--rows-only`` asks XGBoost only, which rows scores are of.
    """
    check_names("scenarios", scenarios, SCENARIOS)
    for name in scenarios:  # so that a missing file is noticed before the first run
        settings_of(SCENARIOS[name])
    yield "rows", [run_scenario(SCENARIOS[name], rows_only) for name in scenarios]
