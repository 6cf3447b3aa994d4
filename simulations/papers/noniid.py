"""Which horizontal method to choose: parties with uneven rows, and 2 to 100 parties.

Every method runs on the same rows for every way to split them: randomly; by label, with shares from
a Dirichlet distribution (Hsu et al. 2019, arXiv:1909.06335, and Li et al. 2022, arXiv:2102.02079,
use 0.1 to 1); each party with half as many rows as the previous one; by a column of the table, so
that parties differ like branches. References are XGBoost on all rows in one place and on each
party's rows. Finished runs are not repeated.

XGBoost's defaults take large steps and overfit such a table, while FedXGBllr's trees take small
ones. So that steps do not decide, all methods take small ones here; ``--steps large`` runs them
with their defaults.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from fedapp.data.datasets import dataset_names, source_frame
from fedapp.runs.baselines import run_baselines
from fedapp.settings import Settings, load_settings
from simulations.paper import Paper, Tables, all_made, run_and_tidy, series
from simulations.passing import run_and_load
from simulations.study import Row, averaged, check_names, costs, grouped, mean_of

POOLED, ALONE = "pooled", "alone"

# What the defaults give on every data set at hand, beside 50 rounds at XGBoost's own eta.

FIXED: Row = {"num-boost-round": 50, "eta": 0.3, "early-stopping-rounds": 0, "pax.bins": "share"}
SETS = [name for name in dataset_names() if not name.endswith("-test")]
ROWS = 20_000
SEEDS = (42, 1, 2)


def defaults(
    data: tuple[str, ...] = (),
    rows: int = ROWS,
    parties: int = 1,
    seeds: tuple[int, ...] = SEEDS,
) -> Iterator[Row]:
    """What the defaults give on every data set at hand, beside 50 rounds at XGBoost's own eta.

    ``python -m simulations papers defaults`` prints a JSON line a set: the test score with 50
    rounds, eta 0.3 and no early stopping (``fixed``) and with the defaults, each averaged over the
    seeds. At most ``--rows`` are drawn from a larger set. The default is XGBoost on all rows, which
    equals PAX with one party; ``--parties 3`` trains PAX.
    """
    for name in data or SETS:
        line: Row = {"data": name, "parties": parties}
        with tempfile.TemporaryDirectory() as folder:
            table = write_sample(name, rows, Path(folder)) | {"parties": parties}
            for kind, how in (("fixed", FIXED), ("defaults", {})):
                all_scores = [scores({**table, **how, "seed": seed}) for seed in seeds]
                line[kind] = {key: round(mean_of(all_scores, key), 4) for key in all_scores[0]}
        yield line


def write_sample(data: str, most: int, folder: Path) -> Row:
    """Draw at most ``most`` rows of a set; the settings of their table."""
    frame, roles, *_ = source_frame(data)
    rows = np.random.default_rng(0).permutation(frame.num_rows)[:most]
    pq.write_table(frame.take(np.sort(rows)), folder / "rows.parquet")
    table = {"data": str(folder / "rows.parquet"), "label": roles.label}
    return {**table, "drop-columns": ",".join(roles.drop)}


def scores(settings: Row) -> Row:
    """The first two test scores, and the costs of a federated run."""
    if settings["parties"] == 1:
        test_scores, costs = run_baselines(load_settings(settings))["pooled"], {}
    else:
        summary = run_and_load(settings)[2]
        test_scores = summary["metrics"]["test"]
        costs = {name: summary[name] for name in ("trees", "exchanges")}
    return dict(list(test_scores.items())[:2]) | costs


METHODS: dict[str, Row] = {
    "pax": {"strategy": "pax", "pax.bins": "share"},
    # With "share", a party with a tenth of the rows has a tenth of the bins.
    "pax, equal bins": {"strategy": "pax", "pax.bins": "equal", "max-bin": 64},
    "pax, secure": {"strategy": "pax", "pax.aggregation": "secure"},
    "fedxgbllr": {"strategy": "fedxgbllr"},
    "bagging": {"strategy": "bagging"},
    "cyclic": {"strategy": "cyclic"},
    "fedavg-linear": {"strategy": "fedavg-linear"},
}
LARGE, SMALL = "large", "small"
BOOSTED: dict[str, Row] = {
    LARGE: {"preset": "xgboost", "max-depth": 6, "num-boost-round": 50},
    SMALL: {"preset": "xgboost", "eta": 0.1, "max-depth": 4, "num-boost-round": 100},
}
# Strategies whose steps are other settings. FedXGBllr's trees have an eta of 0.1 anyway.
OWN_STEPS: dict[str, dict[str, Row]] = {
    "fedxgbllr": {LARGE: {}, SMALL: {"fedxgbllr.max-depth": 4}},
    "fedavg-linear": {LARGE: {}, SMALL: {}},
}
NATURAL = {"default-credit": "EDUCATION", "adult": "occupation"}  # column that splits the rows
N_PARTIES, COUNTS = 5, (2, 5, 10, 30, 100)
ALPHAS = (1.0, 0.3, 0.1)
IID, HALVED = "by chance", "sizes halved"
FIRST_SEED = 42
TEST = 0.5  # of the rows, so that their draw rarely changes a difference by 0.005
OUTPUT = Path("runs/benchmarks/noniid")
NOTES = """\
AUC on the same half of the rows for every line of a set; of the others a tenth validates. Default
settings but for the steps. Small steps: 100 trees of depth 4 and eta 0.1, large ones: 50 of depth 6
and eta 0.3, the defaults. FedXGBllr has 500 trees among all parties, of eta 0.1, and of depth 4, or
8 where steps are large. "equal bins" is pax.bins=equal with max-bin=64; "secure" is
pax.aggregation=secure, whose cuts are those of all rows. Pooled, and alone, which is the mean over
the parties: by XGBoost with the same steps.
Seconds: of training, all parties on the cores of one machine, in this process. Bytes: both ways,
all parties together. An exchange takes 0.2 to 1 s between organisations.
Rows by a column: its values are at one party each; the column itself is no feature then."""
STUDY = Paper(NOTES, file="steps-{steps}/tables.json")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to split the rows of a set."""

    data: str  # name of a set with two classes
    name: str  # of the way, for people
    partition: str  # the setting
    parties: int
    steps: str = SMALL

    @property
    def folder(self) -> str:
        """Folder of its runs, for all steps."""
        kind = self.partition.partition(":")[0] if self.name == HALVED else self.partition
        return f"{self.data}-{kind.replace(':', '-')}-{self.parties}"


def halved(n_parties: int) -> str:
    """Setting ``partition`` in which each party has half as many rows as the previous one."""
    sizes = 0.5 ** np.arange(n_parties)
    return "sizes:" + ",".join(f"{size:.9f}" for size in sizes / sizes.sum())


def skews(data: str) -> list[Scenario]:
    """Scenarios that differ in how unlike the parties are."""
    n, column = N_PARTIES, NATURAL[data]
    return [
        Scenario(data, IID, "iid", n),
        *(Scenario(data, f"dirichlet {alpha:g}", f"dirichlet:{alpha:g}", n) for alpha in ALPHAS),
        Scenario(data, HALVED, halved(n), n),
        Scenario(data, f"by {column.lower()}", f"column:{column}", n),
    ]


def counts(data: str, most: int) -> list[Scenario]:
    """Random splits among more and more parties."""
    return [Scenario(data, IID, "iid", n) for n in COUNTS if n <= most]


def settings_of(scenario: Scenario, method: str, seed: int) -> Settings:
    """Settings of one run."""
    table: Row = {"data": scenario.data, "partition": scenario.partition, "test-fraction": TEST}
    table |= {"parties": scenario.parties}
    if own_steps := OWN_STEPS.get(METHODS[method]["strategy"]):
        steps = own_steps[scenario.steps]
    else:
        steps = BOOSTED[scenario.steps]
    return load_settings({"seed": seed, **table, **steps, **METHODS[method]})


def run_cell(scenario: Scenario, method: str, seed: int, output: Path) -> list[Row]:
    """Score and costs of one run, unless it is finished."""
    settings = settings_of(scenario, method, seed)
    name = f"{method.replace(', ', '-').replace(' ', '-')}-{scenario.steps}"
    folder = output / scenario.folder / name
    where = f"{scenario.data}, {scenario.name}, {scenario.parties} parties, {method}"
    summary = series(folder, where).run(settings, run_and_tidy)
    row: Row = {**asdict(scenario), "method": method, "seed": seed}
    return [row | {"score": summary["metrics"]["test"]["auc"], **costs(summary)}]


def run_beside(scenario: Scenario, seed: int, output: Path) -> list[Row]:
    """Scores of XGBoost on all rows, and the mean of those on each party's rows."""
    settings = settings_of(scenario, "pax", seed)

    def baselines() -> list[Row]:
        scores = run_baselines(settings)
        return [{"pooled": scores["pooled"], "alone": scores["alone"]}]

    where = f"{scenario.data}, {scenario.name}, {scenario.parties} parties"
    runs = series(output / scenario.folder, where)
    (cached,) = runs.rows(f"baselines-{scenario.steps}-{seed}", settings, baselines)
    alone = float(np.mean([scores["auc"] for scores in cached["alone"].values()]))
    row = {**asdict(scenario), "seed": seed}
    return [
        {**row, "method": POOLED, "score": cached["pooled"]["auc"]},
        {**row, "method": ALONE, "score": alone},
    ]


@STUDY.table(
    "rows",
    f"{{seeds}} seed(s) from {FIRST_SEED}; {{steps}} steps",
    "data; rows=name; parties; method; AUC=score:.4f; exchanges:.0f; MB=mb:.1f; sec.=seconds:.1f",
    2,
)
def by_scenario(rows: Sequence[Row]) -> list[Row]:
    """Means of each method on each scenario, with the baselines below."""
    order = [*METHODS, POOLED, ALONE]
    return [
        row
        for scenario in grouped(rows, "data", "name", "parties").values()
        for row in sorted(averaged(scenario, "method"), key=lambda row: order.index(row["method"]))
    ]


@STUDY.command
def main(
    seeds: int = 1,
    data: tuple[str, ...] = ("default-credit",),
    steps: str = "small",
    most: int = 100,
    on: str = "",
    output: Path = OUTPUT,
) -> Tables:
    """Run all, print scores and costs, and write them as JSON.

    ``--seeds`` are draws to average over; ``--steps`` of boosting are small or large ones;
    ``--most`` limits the parties. Finished runs in ``--output`` are not run again; ``--on ray``
    runs them in the cluster of RAY_ADDRESS.
    """
    check_names("data", data, NATURAL)
    check_names("steps", [steps], BOOSTED)
    scenarios = [scenario for name in data for scenario in (*skews(name), *counts(name, most))]
    parts: list[Callable[[], list[Row]]] = []
    for draw in range(seeds):  # the outer loop, so that an interrupted command has complete seeds
        for scenario in dict.fromkeys(scenarios):
            scenario, seed = replace(scenario, steps=steps), FIRST_SEED + draw
            parts.append(partial(run_beside, scenario, seed, output))
            parts += [partial(run_cell, scenario, method, seed, output) for method in METHODS]
    yield "rows", all_made(parts, on, output)
