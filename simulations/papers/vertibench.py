"""Vertical methods over VertiBench's splits of columns: scores must not change, costs do.

Source: Wu, Hou and He 2024 (arXiv:2307.02040). Four parties, the first of which has the labels;
alpha sets how unevenly columns are split by importance, beta how correlated parties are. Both
methods grow the same trees as on one table, so every score is compared with the pooled model's.
Only the order of columns can change a score: of two splits with equal gain, the first is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from operator import neg, pos
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from fedapp.data.datasets import find_dataset, read_source
from fedapp.data.table import Table
from fedapp.runs.baselines import run_baselines
from fedapp.settings import Settings, load_settings
from simulations.paper import Paper, Tables
from simulations.study import OBJECTIVES, Row, costs, write_rows

DATA = ("default-credit", "give-me-some-credit", "waveform")
ALPHAS, BETAS = (0.1, 1.0, 10.0, 100.0), (0.0, 0.3, 0.6, 1.0)
N_PARTIES, ROWS, SEED = 4, 4000, 42
KEY_BITS, TREES, DEPTH, BINS = 2048, 10, 4, 32
COMMON: Row = {"parties": N_PARTIES, "align": "ordered", "label": "y", "seed": SEED}
COMMON |= {"valid-fraction": 0.0, "max-bin": BINS, "eta": 0.3}
FOREST_TREES, FOREST_DEPTH = 32, 8
METHODS: dict[str, Row] = {
    "SecureBoost": {"strategy": "secureboost", "max-depth": DEPTH},
    # All columns in every node: a draw would depend on the order of the columns.
    "Federated Forest": {
        "strategy": "federated-forest",
        "federated-forest.trees": FOREST_TREES,
        "federated-forest.max-depth": FOREST_DEPTH,
        "federated-forest.max-features": "all",
    },
}
SCORES = {"binary": "auc", "multiclass": "accuracy"}
KINDS = {"importance": "alpha", "correlation": "beta"}
NOTES = f"""\
At most {ROWS:,} rows of each set, a fifth of which tests; {TREES} rounds, {KEY_BITS}-bit keys.
{N_PARTIES} parties. SecureBoost: trees of depth {DEPTH}, {BINS} bins. Federated Forest:
{FOREST_TREES} trees of depth {FOREST_DEPTH}, coded labels, all columns in every node. Pooled:
XGBoost, or scikit-learn's forest, whose draws of rows are its own, on the joined table. Where
two columns split equally well, their order decides, for XGBoost too: the joined table has the same
order. alpha
small: one party has nearly all columns. beta 0: columns that are correlated are at one party, 1:
spread. Splits follow the published definitions of VertiBench; its package is not needed. letter and
covtype are not at hand."""
STUDY = Paper(Path("runs/benchmarks/vertibench"), NOTES)


def drawn_table(data: str, n_rows: int) -> Table:
    """Draw ``n_rows`` rows of a set, in the order of the set."""
    whole = read_source(data)
    rows = np.random.default_rng(SEED).permutation(whole.n_rows)[:n_rows]
    return whole.take(np.sort(rows))


def split_of(kind: str, value: float, table: Table) -> Split:
    """Columns of each party; ``value`` is alpha, or beta."""
    rng = np.random.default_rng(SEED)
    if kind == "importance":
        return importance_split(len(table.columns), N_PARTIES, value, rng)
    return correlation_split(rank_correlations(table.values), N_PARTIES, value, rng)


def settings_of(task: str, method: str, path: str, columns: str) -> Settings:
    """Settings of one run."""
    config: Row = {"data": path, "columns": columns, **METHODS[method]}
    config |= {"objective": OBJECTIVES[task]}
    config |= {"num-boost-round": TREES, "secureboost.key-bits": KEY_BITS}
    return load_settings({**COMMON, **config})


def run_point(data: str, kind: str, value: float, whole: Table) -> list[Row]:
    """Scores and costs of both methods on one split, unless they are finished."""
    split, point = split_of(kind, value, whole), f"{data}-{KINDS[kind]}-{value:g}"
    # Columns party by party, and the setting that splits them in this order.
    order = [column for party in split for column in party]
    columns = "sizes:" + ",".join(str(len(party)) for party in split)
    names = tuple(whole.columns[column] for column in order)
    ordered = replace(whole, columns=names, values=np.ascontiguousarray(whole.values[:, order]))
    path, task = STUDY.folder / f"{point}.parquet", find_dataset(data).task
    rows, what, metric = [], f"{data}, {KINDS[kind]} {value:g}", SCORES[task]
    written = write_rows(path, ordered, np.arange(ordered.n_rows))
    for method in METHODS:
        settings = settings_of(task, method, written, columns)
        summary = STUDY.run(settings, point, what)
        name = f"{point}/pooled-{settings.strategy}"
        (pooled,) = STUDY.rows(name, settings, partial(pooled_scores, settings), what)
        rows.append(
            {
                "data": data,
                "kind": kind,
                "value": value,
                "method": method,
                "columns": [len(party) for party in split],
                "metric": metric,
                "score": summary["metrics"]["test"][metric],
                "pooled": pooled[metric],
                **costs(summary),
            }
        )
    path.unlink()
    return rows


def pooled_scores(settings: Settings) -> list[Row]:
    return [run_baselines(settings)["pooled"]]


@STUDY.table(
    "rows",
    "VertiBench",
    "data; method; split; columns; metric; score:.6f; pooled:.6f; "
    "sec.=seconds:.1f; MB=mb:.1f; exchanges",
    5,
)
def by_split(rows: Sequence[Row]) -> Iterator[Row]:
    """Every run, with its split in words."""
    for row in rows:
        split = f"{KINDS[row['kind']]} {row['value']:g}"
        yield {**row, "split": split, "columns": "/".join(map(str, row["columns"]))}


@STUDY.command
def main(data: tuple[str, ...] = DATA) -> Tables:
    """Scores and costs of both methods on all splits; ``--data`` are sets with classes."""
    tables = {name: drawn_table(name, ROWS) for name in data}
    points = [("importance", alpha) for alpha in ALPHAS]
    points += [("correlation", beta) for beta in BETAS]
    cells = (run_point(name, *point, tables[name]) for name in data for point in points)
    yield "rows", [row for rows in cells for row in rows]


# VertiBench's two ways to split columns among parties: by importance and by correlation.

Array = npt.NDArray[np.float64]
Split = tuple[tuple[int, ...], ...]  # columns of each party, ascending
STARTS = 4  # random starts of a search


def importance_split(
    n_columns: int, n_parties: int, alpha: float, rng: np.random.Generator
) -> Split:
    """Split columns by shares from a symmetric Dirichlet distribution; each party has at least one.

    Parameters
    ----------
    n_columns : >= n_parties.
    alpha : > 0; if small, one party has nearly all columns, and with them the important ones.
    """
    first = rng.choice(n_columns, n_parties, replace=False)  # one column for each party
    parties = rng.choice(n_parties, n_columns, p=_shares(alpha, n_parties, rng))
    parties[first] = np.arange(n_parties)
    return _by_party(parties, n_parties)


def _shares(alpha: float, n: int, rng: np.random.Generator) -> Array:
    """Draw Dirichlet shares by their logarithms, which avoids 0 / 0 with a small alpha."""
    logs = np.log(rng.gamma(alpha + 1, size=n)) + np.log(rng.random(n)) / alpha
    shares = np.exp(logs - logs.max())
    normalised: Array = shares / shares.sum()
    return normalised


def _by_party(parties: npt.NDArray[np.int64], n_parties: int) -> Split:
    return tuple(tuple(np.flatnonzero(parties == party).tolist()) for party in range(n_parties))


def rank_correlations(values: npt.NDArray[np.float32]) -> Array:
    """Spearman's correlations of all columns; 0 for a constant one; missing values rank first."""
    filled = np.nan_to_num(values, nan=-np.inf, neginf=-np.inf, posinf=np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlations = np.corrcoef(rankdata(filled, axis=0), rowvar=False)
    return np.where(np.isfinite(correlations), correlations, 0.0)


def partial_correlation(block: Array) -> float:
    """Pcor of two parties, in [0, 1]: how unequal the singular values of their correlations are.

    ``block`` has a row for each column of the first party, and a column for each of the second.
    """
    values = np.linalg.svd(block, compute_uv=False)
    if len(values) < 2:
        return 0.0
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def inter_correlation(correlations: Array, split: Split) -> float:
    """Icor: mean over pairs of parties of Pcor between them, minus the mean Pcor within parties."""
    within = [partial_correlation(correlations[np.ix_(party, party)]) for party in split]
    between = [
        partial_correlation(correlations[np.ix_(party, other)])
        for party, other in combinations(split, 2)
    ]
    return float(np.mean(between) - np.mean(within))


def correlation_split(
    correlations: Array, n_parties: int, beta: float, rng: np.random.Generator
) -> Split:
    """Split columns in equal numbers, with an Icor of ``beta`` between the least and the largest.

    Parameters
    ----------
    correlations : shape (n_columns, n_columns), n_columns >= n_parties.
    beta : in [0, 1]; 0: correlated columns are at one party, 1: spread over all.
    """
    # Of the smallest and the largest Icor that the search finds.
    least, most = (
        inter_correlation(correlations, _search(correlations, n_parties, loss, rng))
        for loss in (pos, neg)
    )
    target = beta * most + (1 - beta) * least
    return _search(correlations, n_parties, lambda icor: abs(icor - target), rng)


def _search(
    correlations: Array, n_parties: int, loss: Callable[[float], float], rng: np.random.Generator
) -> Split:
    optima = [_descend(correlations, n_parties, loss, rng) for _ in range(STARTS)]
    return min(optima, key=lambda optimum: optimum[0])[1]


def _descend(
    correlations: Array, n_parties: int, loss: Callable[[float], float], rng: np.random.Generator
) -> tuple[float, Split]:
    n_columns = len(correlations)
    parties = rng.permutation(np.arange(n_columns) % n_parties)

    def current_loss() -> float:
        return loss(inter_correlation(correlations, _by_party(parties, n_parties)))

    best, is_better = current_loss(), True
    while is_better:
        is_better = False
        for first, other in combinations(range(n_columns), 2):
            if parties[first] == parties[other]:
                continue
            parties[[first, other]] = parties[[other, first]]
            if (new_loss := current_loss()) < best - 1e-12:
                best, is_better = new_loss, True
            else:
                parties[[first, other]] = parties[[other, first]]
    return best, _by_party(parties, n_parties)
