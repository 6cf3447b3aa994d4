"""FedXGBllr against its paper: quality, bytes and heads, beside pooled XGBoost.

Source: Ma et al. 2023, section 4: Table 2 (quality), Table 3 (bytes, Eq. 6), Table 4 (heads at 5
clients) and Table 5 (their sizes), with the settings of section 4.1, which are fedapp's defaults.
Table 1 counts only the rows of LIBSVM's training files, so their ``-test`` files are excluded here
too, and one file is split 0.75 : 0.25 at random.

The paper's errors for abalone seem to include training rows. Its centralized 1.3 is the error of
XGBoost, fitted to three quarters of the rows, on *all* rows (column "all rows"); on the other rows
it is 5.2. Its 3.6, 4.4, 4.9 rise with the clients, as errors on all rows do: the mean of their
ensembles has 3.5, 4.2, 4.6 with the parameters of Flower's hfedxgboost (alpha 5, gamma 5, subsample
0.8), and 2.3, 3.5, 4.1 with those used here; on test rows 4.5 to 4.8 for any number. No single
setting reproduced all four figures. hfedxgboost reports 5.5, 6.9, 7.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.datasets import find_dataset, read_source
from fedapp.run_folder import read_run
from fedapp.runs.baselines import baseline_rows
from fedapp.settings import Settings, load_settings
from fedapp.trees.losses import REGRESSION
from fedapp.trees.stacked import HeadShape, Kind
from simulations.paper import Paper, Tables
from simulations.study import OBJECTIVES, Row, averaged, boosted_scores, grouped

Cell = tuple[str, int, str, int]
HEADS, HEADS_CLIENTS = ("cnn", "cnn3", "fcnn"), 5
PAPER = {  # Table 2 by number of clients, 1 is centralized; accuracy in percent, or MSE
    "a9a": {1: 84.9, 2: 85.1, 5: 85.1, 10: 84.7},
    "cod-rna": {1: 93.9, 2: 97.0, 5: 96.5, 10: 95.8},
    "ijcnn1": {1: 96.3, 2: 96.3, 5: 96.0, 10: 95.3},
    "abalone": {1: 1.3, 2: 3.6, 5: 4.4, 10: 4.9},
    "space-ga": {1: 0.024, 2: 0.024, 5: 0.033, 10: 0.034},
}
PAPER_HEADS = {  # Table 4, in the order of HEADS
    "a9a": (85.1, 83.9, 82.8),
    "cod-rna": (96.5, 96.3, 94.7),
    "ijcnn1": (96.0, 95.1, 92.2),
    "abalone": (4.4, 4.4, 5.8),
    "space-ga": (0.033, 0.034, 0.044),
}
HEAD_MB = {2: 0.07, 5: 0.04, 10: 0.03}  # Table 5, "Total size"
PAPER_WEIGHTS: dict[tuple[Kind, int], int] = {  # Table 5, "Total params", by head and clients
    ("cnn", 2): 16193,
    ("cnn", 5): 6785,
    ("cnn", 10): 3905,
    ("cnn3", 5): 32257,
    ("fcnn", 5): 128513,
}
# Table 3, MB of SimFL; FedXGBllr has 6.0 for every set.
TABLE_3_CLIENTS = 10
N_TREES = 500  # of all clients together
CHANNELS = 64
SIMFL = {"a9a": 150.4, "cod-rna": 249.3, "ijcnn1": 218.4}

TEST_FRACTION, N_ROUNDS, FIRST_SEED = 0.25, 10, 42
POOLED = {"num-boost-round": 500, "max-depth": 8, "eta": 0.1}
USES = {"fit": "trees", "share": "trees", "average": "head"}  # of messages train.fedxgbllr_*
NOTES = """\
Rows: a tenth of the clients' rows chooses epochs and round (see strategies/fedxgbllr.py); the paper
trains on all of them for all epochs, and averages 5 draws.
Pooled: 500 trees of depth 8 on all rows but the test rows. The paper names no lambda, alpha, gamma.
Table 3: Eq. 6 with Table 5's head (of one output) and trees at 0 bytes, as the paper has it (6.0 at
10 clients); its 48 bytes for 500 trees cannot be their size."""
DRAWN = f"{{seeds}} seed(s) from {FIRST_SEED}"
STUDY = Paper(Path("runs/papers/fedxgbllr"), NOTES)


def settings_of(data: str, seed: int, more: Row) -> Settings:
    """Settings shared by the runs of a set, and ``more``."""
    how = {"objective": OBJECTIVES[find_dataset(data).task], "test-fraction": TEST_FRACTION}
    return load_settings({"data": data, "seed": seed, **how, **more})


def planned(
    sets: Sequence[str], clients: Sequence[int], seeds: Iterable[int]
) -> tuple[list[Cell], list[Cell]]:
    """Runs of Tables 2 and 3, and of Table 4: set, clients, head and seed."""
    second, fourth = list[Cell](), list[Cell]()
    for seed in seeds:
        for data in sets:
            second += [(data, n, "cnn", seed) for n in clients]
            fourth += [(data, HEADS_CLIENTS, head, seed) for head in HEADS]
    return second, fourth


def run_cell(data: str, clients: int, head: str, seed: int) -> Row:
    """Score, bytes and seconds of one run, unless it is finished."""
    config = {"strategy": "fedxgbllr", "parties": clients, "fedxgbllr.head": head}
    settings, name = settings_of(data, seed, config), f"{data}-{clients}-{head}"
    summary = STUDY.run(settings, name)
    row: Row = {"data": data, "clients": clients, "head": head, "seed": seed}
    row |= {"score": score(settings.objective, summary["metrics"]["test"])}
    row |= {"seconds": summary["seconds"]["train"]}
    return row | bytes_by_use(read_run(STUDY.folder / name / f"fedxgbllr-{seed}").ledger)


def score(objective: str, scores: Mapping[str, float]) -> float:
    """Accuracy in percent, or MSE."""
    return scores["rmse"] ** 2 if objective == REGRESSION else 100 * scores["accuracy"]


def bytes_by_use(ledger: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes both ways that carry trees, the head, and anything else."""
    totals = {"head": 0, "trees": 0, "other": 0}
    for line in ledger:
        totals[USES.get(line["type"].removeprefix("train.fedxgbllr_"), "other")] += line["bytes"]
    return {f"{use}_bytes": total for use, total in totals.items()}


def run_pooled(data: str, seed: int) -> Row:
    """XGBoost on all rows except the test rows: its score on these, and on all rows."""
    name, settings = f"{data}-pooled-{seed}", settings_of(data, seed, POOLED)
    (scores,) = STUDY.rows(name, settings, lambda: [pooled_scores(settings)])
    return {"data": data, "seed": seed, **scores}


def pooled_scores(settings: Settings) -> dict[str, float]:
    whole = settings.model_copy(update={"valid_fraction": 0.0, "asked_parties": 1})
    rows = baseline_rows(whole)[0]
    every = np.arange(len(rows.labels))
    scores = boosted_scores(settings, rows, test=rows.split.test, all=every)
    return {name: score(settings.objective, scores[name]) for name in scores}


def is_error(data: str) -> bool:
    """Whether less is better."""
    return find_dataset(data).task == "regression"


def beside_paper(data: str, n_clients: int, ours: float) -> str:
    """Points above the paper, or ratio of the MSE."""
    paper = PAPER.get(data, {}).get(n_clients)
    if paper is None:
        return ""
    return f"x {ours / paper:.2f}" if is_error(data) else f"{ours - paper:+.2f}"


def eq_6(n_clients: int) -> str:
    """MB by the paper's formula: the size of the head in Table 5, and nothing for trees."""
    size = HEAD_MB.get(n_clients)
    return f"{2 * n_clients * N_ROUNDS * size:.1f}" if size else ""


def written(data: str, value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if is_error(data) else f"{value:.2f}"


@STUDY.table(
    "table_2",
    f"Table 2: accuracy in %, or MSE; {DRAWN}",
    "data; clients; ours; paper; ours-paper; pooled; paper's; all rows; sec.=seconds:.0f",
)
def qualities(rows: Sequence[Row]) -> Iterator[Row]:
    """Scores beside the paper's and XGBoost's."""
    for row in averaged(rows, "data", "clients"):
        data, n_clients, ours = row["data"], row["clients"], row["score"]
        paper = PAPER.get(data, {})
        scores = {"ours": ours, "paper": paper.get(n_clients), "pooled": row["pooled test"]}
        scores |= {"paper's": paper.get(1), "all rows": row["pooled all"]}
        texts = {name: written(data, score) for name, score in scores.items()}
        yield {**row, **texts, "ours-paper": beside_paper(data, n_clients, ours)}


@STUDY.table(
    "table_2",
    "Table 3: MB both ways, all clients together",
    "data; clients; Eq. 6; SimFL; head:.2f; trees:.2f; other:.2f; all:.2f; per client:.2f",
)
def message_sizes(rows: Sequence[Row]) -> Iterator[Row]:
    """Measured bytes, beside the paper's formula."""
    for row in averaged(rows, "data", "clients"):
        sizes = {use: row[f"{use}_bytes"] / 1e6 for use in ("head", "trees", "other")}
        total = sum(sizes.values())
        n_clients = row["clients"]
        cells = {"all": total, "per client": total / n_clients, "Eq. 6": eq_6(n_clients)}
        cells["SimFL"] = SIMFL.get(row["data"]) if n_clients == TABLE_3_CLIENTS else None
        yield {**row, **sizes, **cells}


def weights_of(head: Kind, n_clients: int) -> int:
    """Number of a head's weights."""
    return HeadShape(head, n_clients, N_TREES // n_clients, 1, CHANNELS).n_weights


@STUDY.table(
    "table_4",
    f"Table 4: heads at {HEADS_CLIENTS} clients; {DRAWN}",
    "; ".join(["data", *(f"{head}; paper, {head}" for head in HEADS), "sec. of each"]),
)
def heads_together(rows: Sequence[Row]) -> Iterator[Row]:
    """The heads side by side, each with the paper's score."""
    for (data,), group in grouped(rows, "data").items():
        row, seconds = {"data": data}, []
        paper = PAPER_HEADS.get(data, (None,) * len(HEADS))
        for of_head, printed in zip(averaged(group, "head"), paper, strict=False):
            row |= {of_head["head"]: written(data, of_head["score"])}
            row |= {f"paper, {of_head['head']}": written(data, printed)}
            seconds.append(f"{of_head['seconds']:.0f}")
        yield {**row, "sec. of each": " / ".join(seconds)}


STUDY.table("table_5", "Table 5: weights of a head", "head; clients; ours; paper")(list)


@STUDY.command
def main(
    seeds: int = 1,
    sets: tuple[str, ...] = tuple(PAPER),
    clients: tuple[int, ...] = (2, 5, 10),
) -> Tables:
    """Tables 2 to 5.

    ``--seeds`` are draws to average over; ``--clients`` are those of Tables 2 and 3.
    """
    seeds_run = range(FIRST_SEED, FIRST_SEED + seeds)
    for name in sets:  # so that a missing file is noticed before the first run
        read_source(name)
    second, fourth = planned(sets, clients, seeds_run)
    lines = [run_cell(*cell) for cell in (*second, *fourth)]
    pooled = [run_pooled(name, seed) for name in sets for seed in seeds_run]
    beside = {
        (row["data"], row["seed"]): {f"pooled {name}": row[name] for name in ("test", "all")}
        for row in pooled
    }
    rows = [{**row, **beside[row["data"], row["seed"]]} for row in lines]
    yield "pooled", pooled
    yield "table_2", rows[: len(second)]
    yield "table_4", rows[len(second) :]
    heads = [
        {"head": head, "clients": n, "ours": weights_of(head, n), "paper": printed}
        for (head, n), printed in PAPER_WEIGHTS.items()
    ]
    yield "table_5", heads
