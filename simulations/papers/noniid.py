"""Which horizontal method to choose: parties with uneven rows, and 2 to 100 parties.

Every method runs on the same rows for every way to split them: randomly; by label, with shares from
a Dirichlet distribution (Hsu et al. 2019, arXiv:1909.06335, and Li et al. 2022, arXiv:2102.02079,
use 0.1 to 1); each party with half as many rows as the previous one; by a column of the table, so
that parties differ like branches. References are XGBoost on all rows in one place and on each
party's rows. Finished runs are not repeated.

XGBoost's defaults take large steps and overfit such a table, while FedXGBllr's trees take small
ones. So that steps do not decide, all methods take small ones here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np

from fedapp.runs.baselines import run_baselines
from fedapp.settings import Settings, load_settings
from simulations.paper import Paper, Tables
from simulations.study import Row, averaged, check_names, costs, grouped

POOLED, ALONE = "pooled", "alone"

# Small steps: XGBoost's own overfit.
BOOSTED: Row = {"preset": "xgboost", "eta": 0.1, "max-depth": 4, "num-boost-round": 100}
METHODS: dict[str, Row] = {
    "pax": {**BOOSTED, "strategy": "pax", "pax.bins": "share"},
    # With "share", a party with a tenth of the rows has a tenth of the bins.
    "pax, equal bins": {**BOOSTED, "strategy": "pax", "pax.bins": "equal", "max-bin": 64},
    "pax, secure": {**BOOSTED, "strategy": "pax", "pax.aggregation": "secure"},
    "fedxgbllr": {"strategy": "fedxgbllr", "fedxgbllr.max-depth": 4},  # whose eta is 0.1
    "bagging": {**BOOSTED, "strategy": "bagging"},
    "cyclic": {**BOOSTED, "strategy": "cyclic"},
    "fedavg-linear": {"strategy": "fedavg-linear"},
}
NATURAL = {"default-credit": "EDUCATION", "adult": "occupation"}  # column that splits the rows
N_PARTIES, COUNTS = 5, (2, 5, 10, 30, 100)
ALPHAS = (1.0, 0.3, 0.1)
IID, HALVED = "by chance", "sizes halved"
FIRST_SEED = 42
TEST = 0.5  # of the rows, so that their draw rarely changes a difference by 0.005
NOTES = """\
AUC on the same half of the rows for every line of a set; of the others a tenth validates. 100 trees
of depth 4 and eta 0.1; FedXGBllr has 500 among all parties. "equal bins" is pax.bins=equal with
max-bin=64; "secure" is pax.aggregation=secure, whose cuts are those of all rows. Pooled, and alone,
which is the mean over the parties: by XGBoost with the same steps.
Seconds: of training, all parties on the cores of one machine, in this process. Bytes: both ways,
all parties together. An exchange takes 0.2 to 1 s between organisations.
Rows by a column: its values are at one party each; the column itself is no feature then."""
STUDY = Paper(Path("runs/benchmarks/noniid"), NOTES)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to split the rows of a set."""

    data: str  # name of a set with two classes
    name: str  # of the way, for people
    partition: str  # the setting
    parties: int

    @property
    def folder(self) -> str:
        """Folder of its runs."""
        kind = self.partition.partition(":")[0] if self.name == HALVED else self.partition
        return f"{self.data}-{kind.replace(':', '-')}-{self.parties}"


def scenarios(data: str, most: int) -> list[Scenario]:
    """Parties that are more and more unlike, then more and more of them by chance."""
    column, sizes = NATURAL[data], 0.5 ** np.arange(N_PARTIES)
    partitions = {
        IID: "iid",
        **{f"dirichlet {alpha:g}": f"dirichlet:{alpha:g}" for alpha in ALPHAS},
        # Each party has half as many rows as the previous one.
        HALVED: "sizes:" + ",".join(f"{size:.9f}" for size in sizes / sizes.sum()),
        f"by {column.lower()}": f"column:{column}",
    }
    unlike = [Scenario(data, name, how, N_PARTIES) for name, how in partitions.items()]
    return [*unlike, *(Scenario(data, IID, "iid", n) for n in COUNTS if n <= most)]


def settings_of(scenario: Scenario, method: str, seed: int) -> Settings:
    """Settings of one run."""
    table: Row = {"data": scenario.data, "partition": scenario.partition, "test-fraction": TEST}
    return load_settings({"seed": seed, **table, "parties": scenario.parties, **METHODS[method]})


def run_cell(scenario: Scenario, method: str, seed: int) -> Row:
    """Score and costs of one run, unless it is finished."""
    folder = f"{scenario.folder}/{method.replace(', ', '-').replace(' ', '-')}"
    where = f"{scenario.data}, {scenario.name}, {scenario.parties} parties, {method}"
    summary = STUDY.run(settings_of(scenario, method, seed), folder, where)
    row: Row = {**asdict(scenario), "method": method, "seed": seed}
    return row | {"score": summary["metrics"]["test"]["auc"], **costs(summary)}


def run_beside(scenario: Scenario, seed: int) -> list[Row]:
    """Scores of XGBoost on all rows, and the mean of those on each party's rows."""
    settings = settings_of(scenario, "pax", seed)

    def baselines() -> list[Row]:
        scores = run_baselines(settings)
        return [{"pooled": scores["pooled"], "alone": scores["alone"]}]

    where = f"{scenario.data}, {scenario.name}, {scenario.parties} parties"
    (cached,) = STUDY.rows(f"{scenario.folder}/baselines-{seed}", settings, baselines, where)
    alone = float(np.mean([scores["auc"] for scores in cached["alone"].values()]))
    row = {**asdict(scenario), "seed": seed}
    return [
        {**row, "method": POOLED, "score": cached["pooled"]["auc"]},
        {**row, "method": ALONE, "score": alone},
    ]


@STUDY.table(
    "rows",
    f"{{seeds}} seed(s) from {FIRST_SEED}",
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
def main(seeds: int = 1, data: tuple[str, ...] = ("default-credit",), most: int = 100) -> Tables:
    """Scores and costs of all.

    ``--seeds`` are draws to average over; ``--most`` limits the parties.
    """
    check_names("data", data, NATURAL)
    rows = list[Row]()
    ways = dict.fromkeys(scenario for name in data for scenario in scenarios(name, most))
    # Seeds are the outer loop, so that an interrupted command has complete ones.
    for seed, scenario in product(range(FIRST_SEED, FIRST_SEED + seeds), ways):
        rows += run_beside(scenario, seed)
        rows += [run_cell(scenario, method, seed) for method in METHODS]
    yield "rows", rows
