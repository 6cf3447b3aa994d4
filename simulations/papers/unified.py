"""UniFed's vertical scenarios with tree models, beside the scores it reports of other frameworks.

Source: Liu et al. 2022 (arXiv:2207.10308), Table 7, and its leaderboard: two parties with the
columns of FATE's example files, 64 trees of depth 6, 64 bins, learning rate 0.05
(``paper_experiments/*.gbdt.json`` of its toolkit). SecureBoost grows XGBoost's trees, so its score
is compared with XGBoost's on the joined table. An interrupted run resumes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fedapp import metrics
from fedapp.data.datasets import NOT_PUBLIC, locate
from fedapp.data.schema import DataFile
from fedapp.errors import ConfigError, DataError, listed
from fedapp.runs.baselines import join_tables, train_boosted
from fedapp.settings import Settings, load_settings
from fedapp.trees.objective import REGRESSION
from simulations.study import Row, console, costs, new_grid, run_and_tidy, series, write_tables

TREES, DEPTH, BINS, ETA, KEY_BITS, SEED = 64, 6, 64, 0.05, 2048, 42
QUICK_TREES, QUICK_BITS = 4, 512
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

    @property
    def subset(self) -> str:
        """Rows of the reported score."""
        return "test" if self.test_fraction else "train"

    @property
    def metric(self) -> str:
        return "mse" if self.objective == REGRESSION else "auc"

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


BINARY, MOTOR = "binary:logistic", _pair("motor", "csv")
SCENARIOS = (
    Scenario("breast_vertical", BINARY, 1.0, files=_pair("breast", "csv")),
    Scenario(
        "motor_vertical", REGRESSION, 3.64e-3, "", _pair("motor", "csv"), "motor_speed", "idx"
    ),
    Scenario("student_vertical", REGRESSION, 3.26, files=_pair("student", "csv")),
    Scenario("default_credit_vertical", BINARY, 0.8199, files=_pair("default-credit", "csv.gz")),
    Scenario("give_credit_vertical", BINARY, 0.8679, "give-me-some-credit", test_fraction=HELD_OUT),
)
FRAMEWORKS = {  # default_credit_vertical, 64 trees: seconds, AUC, GiB, bits of the Paillier key
    "FedTree": (489, 0.817, 0.39, "512"),
    "FATE": (2800, 0.820, None, "1024, its default"),
    "Fedlearner": (9810, 0.819, 1.36, "not known"),
}
OUTPUT = Path("runs/benchmarks/unified")
NOTES = f"""\
Rows: UniFed scores breast, motor, student and default_credit on the rows it trains on. FATE has one
file a party of each; UniFed's adapter of Fedlearner writes these rows a second time as its test
file, for all sets but give_credit. XGBoost says the same: "pooled" is its score on these rows, and
"held out" its score on a fifth that it was not trained on, which is what a bank would see.
give_credit: UniFed's files are not at hand; the table's first and last five columns, in its order,
and a fifth of its rows drawn to test stand in.
Seconds: training, both parties and the server on the cores of one machine; alignment and the
reading of tables are not in it. UniFed's are of its own machines and of smaller keys: FedTree's
sources generate {FRAMEWORKS["FedTree"][3]} bits. Compare orders of magnitude, no more.
Settings that it leaves to the frameworks differ: lambda is 1 here as in FedTree, 0.1 in FATE's and
Fedlearner's; gamma is 0, in FedTree 1. vehicle_scale and dvisits are not at hand."""


def settings_of(scenario: Scenario, trees: int, key_bits: int) -> Settings:
    """Settings of one run."""
    config: Row = {**scenario.data(), "objective": scenario.objective, "num-boost-round": trees}
    config |= {"test-fraction": scenario.test_fraction, "secureboost.key-bits": key_bits}
    config |= {"secureboost.insecure-small-key": key_bits < KEY_BITS}
    return load_settings({**COMMON, **config})


def pooled_scores(settings: Settings) -> dict[str, float]:
    """Scores of XGBoost on the joined table: the run's train and test rows, and a held-out fifth.

    ``held_out`` is of a model that was not trained on these rows; ``test`` is absent without test
    rows.
    """
    scores = _pooled(settings)
    if "test" in scores:
        return {**scores, "held_out": scores["test"]}
    other = _pooled(settings.model_copy(update={"test_fraction": HELD_OUT}))
    return {**scores, "held_out": other["test"]}


def _pooled(settings: Settings) -> dict[str, float]:
    rows = join_tables(settings)[0].in_table_order()
    trained, scores = train_boosted(settings, rows), {}
    for subset in ("train", "test"):
        if len(row_ids := getattr(rows.split, subset)):
            predictions = trained.margins(row_ids), rows.labels[row_ids], rows.weights[row_ids]
            scores[subset] = score(
                settings.objective, metrics.pooled(settings.objective, *predictions)
            )
    return scores


def score(objective: str, scores: Mapping[str, float]) -> float:
    """AUC, or mean squared error."""
    return scores["rmse"] ** 2 if objective == REGRESSION else scores["auc"]


def run_scenario(scenario: Scenario, trees: int, key_bits: int, output: Path) -> Row:
    """Scores and costs of one scenario, unless it is finished."""
    settings = settings_of(scenario, trees, key_bits)
    runs = series(output / f"{scenario.name}-{trees}-{key_bits}", scenario.name)
    summary = runs.run(settings, run_and_tidy)
    pooled = pooled_scores(settings)
    record: Row = {"scenario": scenario.name, "trees": summary["trees"], "key_bits": key_bits}
    record |= {"rows": summary["matched_rows"]["train"], "metric": scenario.metric}
    record |= {"subset": scenario.subset}
    record |= {"score": score(scenario.objective, summary["metrics"][scenario.subset])}
    record |= {"pooled": pooled[scenario.subset], "held_out": pooled["held_out"]}
    record |= {"reported": scenario.reported, **costs(summary)}
    return record


def show(rows: Sequence[Row]) -> None:
    names = ["scenario", "score", "rows", "trees", "bits", "ours", "pooled", "UniFed", "held out"]
    names += ["sec.", "MB", "exchanges"]
    grid = new_grid(f"UniFed, trees of depth {DEPTH}, {BINS} bins, eta {ETA:g}", names, 2)
    for row in rows:
        scores = (f"{row[name]:.4g}" for name in ("score", "pooled", "reported", "held_out"))
        spent = f"{row['seconds']:.0f}", f"{row['bytes'] / 1e6:.0f}", str(row["exchanges"])
        facts = row["scenario"], row["metric"], row["subset"], str(row["trees"])
        grid.add_row(*facts, str(row["key_bits"]), *scores, *spent)
    console.print(grid)
    grid = new_grid("UniFed's default_credit_vertical", ["", "sec.", "AUC", "GiB", "bits"], 1)
    for name, (seconds, auc, size, bits) in FRAMEWORKS.items():
        grid.add_row(name, str(seconds), f"{auc:.3f}", "" if size is None else f"{size:g}", bits)
    console.print(grid)


def row_check(scenarios: Sequence[Scenario], trees: int) -> list[Row]:
    """Print UniFed's scores beside XGBoost's on rows that it was trained on, and on others."""
    names = ["scenario", "score", "UniFed", "training rows", "held out"]
    grid = new_grid(f"Which rows UniFed's scores are of; XGBoost, {trees} trees", names, 2)
    rows = []
    for scenario in scenarios:
        scores = pooled_scores(settings_of(scenario, trees, KEY_BITS))
        rows.append({"scenario": scenario.name, "reported": scenario.reported, **scores})
        texts = scenario.reported, scores["train"], scores["held_out"]
        grid.add_row(scenario.name, scenario.metric, *(f"{one:.4g}" for one in texts))
    console.print(grid)
    return rows


def chosen(names: str) -> list[Scenario]:
    """Scenarios by their names, separated by commas; all if there is none."""
    by_name = {one.name: one for one in SCENARIOS}
    asked = listed(names)
    for name in asked:
        if name not in by_name:
            raise ConfigError(f"scenarios must be of {', '.join(by_name)}, got {name!r}")
    return [by_name[name] for name in asked] or list(SCENARIOS)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Few trees, a small key.")] = False,
    trees: Annotated[int, typer.Option(min=0, help=f"0: {TREES}.")] = 0,
    key_bits: Annotated[int, typer.Option(help="Below 2048 it hides nothing; 0: 2048.")] = 0,
    scenarios: Annotated[str, typer.Option(help="Names, with commas; none: all.")] = "",
    rows_only: Annotated[
        bool, typer.Option("--rows-only", help="Only XGBoost: which rows scores are of.")
    ] = False,
    output: Annotated[Path, typer.Option(help="Finished runs in it are not run again.")] = OUTPUT,
) -> None:
    """Run the scenarios, print scores and costs beside UniFed's, and write them as JSON."""
    start = time.monotonic()
    trees = trees or (QUICK_TREES if quick else TREES)
    key_bits = key_bits or (QUICK_BITS if quick else KEY_BITS)
    selected = chosen(scenarios)
    for scenario in selected:  # so that a missing file is noticed before the first run
        settings_of(scenario, trees, key_bits)
    if rows_only:
        row_check(selected, trees)
        return
    if key_bits < KEY_BITS:
        console.print(f"Keys of {key_bits} bits: insecure, only for these figures")
    output.mkdir(parents=True, exist_ok=True)
    rows = [run_scenario(scenario, trees, key_bits, output) for scenario in selected]
    show(rows)
    console.print(NOTES)
    tables: Row = {"rows": rows, "frameworks": FRAMEWORKS, "notes": NOTES}
    write_tables(output, "unified", start, ["gmpy2", "xgboost"], tables)
