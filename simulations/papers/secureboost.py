"""SecureBoost against its paper: alignment, scaling, leaf purity, Completely SecureBoost.

Source: Cheng et al. 2019 (arXiv:1901.08755), "Experiments": Table 1, Figures 4 and 5, Tables 2 and
3, with its settings: two parties with half of the columns each, 2/3 of the rows to train, depth 3,
subsample 0.8, eta 0.3, Paillier with 512 bits, which is insecure today (fedapp's default is 2048).
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet
import xgboost
from scipy.stats import wilcoxon
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.metrics import log_loss
from sklearn.metrics.cluster import contingency_matrix

from fedapp import metrics
from fedapp.arrays import Ints
from fedapp.data.datasets import read_source
from fedapp.run_folder import read_run
from fedapp.runs.baselines import Pooled, join_tables
from fedapp.settings import Settings, load_settings
from simulations.paper import Paper, Tables, span_of
from simulations.study import Row, averaged, console, temporary_run, write_rows
from strategies.secureboost import SecureBoostSettings

Matrix = npt.NDArray[np.float32]

CREDITS = {"Credit 1": "give-me-some-credit", "Credit 2": "default-credit"}
SEED, KEY_BITS, TREES, DEPTH = 42, 512, 25, 3
ETA, SUBSAMPLE, MAX_BIN = 0.3, 0.8, 32
COMMON = {
    "strategy": "secureboost",
    "parties": 2,
    "columns": "even",
    "align": "ordered",
    "allow-export": True,
    "test-fraction": 1 / 3,
    "valid-fraction": 0.0,
    "seed": SEED,
    "max-depth": DEPTH,
    "subsample": SUBSAMPLE,
    "eta": ETA,
    "max-bin": MAX_BIN,
    "secureboost.key-bits": KEY_BITS,
    "secureboost.insecure-small-key": True,
}
METHODS = {"SecureBoost": 0, "Completely SecureBoost": 1}  # trees of only the active party
METRICS = ("accuracy", "auc", "f1")

# Table 1, ids a party.
N_IDS, MANY_IDS = (1000, 10_000, 100_000), 1_000_000
# Figure 5; the paper goes on to 5000 columns.
DEPTHS, N_COLUMNS, N_ROWS = range(3, 9), (50, 500, 1000), (5000, 10000, 0)  # 0: all
# Not timed: the first tree, which includes the run's set-up, and the last, which no encryption
# follows.
STAGES = 7

SHOWN_STAGES = (1, 5, 10, 15, 20, 25)  # of Figure 4

NOTES = """\
The paper's numbers: of its tables and figures none is at hand; its text names two, 16 minutes for
1M ids a side, and a purity slightly above 0.6 of the second trees of Completely SecureBoost.
Table 1: the whole exchange of two parties, half of the smaller one's ids in common. The paper's
algorithm is another one (Liang and Chawathe 2004), its machine an i5-7200U.
Figure 5: seconds of a boosting stage, at both parties in turn on the same cores, max-bin 32; the
paper names no bins. Columns are products of up to three of the table's; of the rows, 2/3 train.
Table 2: "seen" as the passive party tells rows apart, "larger" the share of that class.
Purity as in the paper's formula: it is never below the share of the larger class, so 0.6
cannot be meant on these rows. Nor does it fall much from the first tree to the second, as the
paper says it does. Trees begin at the mean label, as XGBoost's do, where the paper has some
0 < a < 1.
Figure 4: mean log loss; XGBoost and GBDT (scikit-learn's) on the joined columns, depth 3, eta 0.3
and subsample 0.8 too. XGBoost draws other rows than SecureBoost from the same seed.
Table 3: on test rows; F1 at a threshold of 0.5, which after one tree no row passes from the mean
label. "First tree": the same model after one tree."""
STUDY = Paper(Path("runs/papers/secureboost"), NOTES)


# Table 1


def write_ids(folder: Path, sizes: Sequence[int]) -> str:
    """Write two tables that share half of the smaller one's ids; return the setting ``data``."""
    first, second = sizes
    start = first - min(sizes) // 2
    paths = [folder / "a.parquet", folder / "b.parquet"]
    for path, begin, n_ids in zip(paths, (0, start), (first, second), strict=True):
        ids = [f"person-{number:09d}" for number in range(begin, begin + n_ids)]
        values = np.arange(n_ids, dtype=np.float32) % 7  # row numbers would be warned of
        table = {"id": ids, f"value_{path.stem}": values}
        label = {"label": np.arange(n_ids) % 2} if begin == 0 else {}
        pa.parquet.write_table(pa.table({**table, **label}), path)
    return ",".join(map(str, paths))


def alignment(n_first: int, n_second: int) -> list[Row]:
    """A row with seconds and bytes from the first message of the alignment to the last."""
    sizes = (n_first, n_second)
    with tempfile.TemporaryDirectory() as folder:
        table = {"data": write_ids(Path(folder), sizes), "id": "id", "label": "label"}
        config = {**COMMON, **table, "align": "psi", "num-boost-round": 1, "max-depth": 1}
        with temporary_run(load_settings(config)) as run:
            common = sum(run.summary["matched_rows"].values())
            ledger = read_run(run.path).ledger
    messages = [line for line in ledger if ".alignment_" in line["type"]]
    return [{"ids": sizes, "common": common, **span_of(messages)}]


@STUDY.table("table_1", "Table 1: seconds", "ids of A; ids of B; seconds:.2f", 0)
def by_sizes(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        yield {**row, **dict(zip(("ids of A", "ids of B"), row["ids"], strict=True))}


# Figure 5


def product_columns(values: Matrix, n_columns: int) -> Matrix:
    """The table's columns, then products of two, then of three, until there are enough."""
    columns = range(values.shape[1])
    factors = (itertools.combinations_with_replacement(columns, n) for n in (1, 2, 3))
    chosen = itertools.islice(itertools.chain.from_iterable(factors), n_columns)
    return np.stack(
        [values[:, list(factors_of_column)].prod(axis=1) for factors_of_column in chosen], axis=1
    )


def stage(part: str, value: int, n_stages: int) -> Row:
    """Seconds of one boosting stage at one point."""
    folder = f"{part}-{value}-{n_stages}"
    config: Row = {"data": CREDITS["Credit 2"], "num-boost-round": n_stages}
    path = STUDY.folder / f"{part}-{value}.parquet"
    if part == "depth":
        config |= {"max-depth": value}
    else:
        config |= {"data": str(path), "label": "y"}
        table = read_source(CREDITS["Credit 2"])
        order = np.random.default_rng(SEED).permutation(table.n_rows)
        rows = np.sort(order[: value if part == "rows" else None])
        n_columns = value if part == "columns" else table.values.shape[1]
        names = tuple(f"x{number}" for number in range(n_columns))
        table = replace(table, columns=names, values=product_columns(table.values, n_columns))
        write_rows(path, table, rows)
    summary = STUDY.run(load_settings({**COMMON, **config}), folder, f"{part} {value}")
    path.unlink(missing_ok=True)
    rounds = read_run(STUDY.folder / folder / f"secureboost-{SEED}").rounds[1:-1]
    seconds = [round_record["seconds"] for round_record in rounds]
    sizes = [sum(round_record["bytes"].values()) for round_record in rounds]
    record = {"part": part, "value": value, "stages": len(seconds)}
    record |= {"seconds": statistics.median(seconds), "bytes": statistics.median(sizes)}
    return {**record, "train_rows": summary["matched_rows"]["train"]}


# Figure 4


def stage_losses(trained_model: Path, seed: int) -> list[Row]:
    """Mean log loss after each stage: SecureBoost's model, and others on the joined columns."""
    rows, _, _ = join_tables(credit_settings("Credit 2", TREES, seed))
    booster = read_booster(trained_model)
    labels = rows.labels[rows.split.train]
    gbdt = GradientBoostingClassifier(
        n_estimators=TREES,
        max_depth=DEPTH,
        learning_rate=ETA,
        subsample=SUBSAMPLE,
        random_state=seed,
    )
    # GBDT takes no missing values; the set has none.
    gbdt.fit(rows.values[rows.split.train], labels)
    xgb = xgboost.train(
        {"objective": "binary:logistic", "max_depth": DEPTH, "eta": ETA, "max_bin": MAX_BIN}
        | {"subsample": SUBSAMPLE, "seed": seed, "tree_method": "hist"},
        xgboost.DMatrix(rows.values[rows.split.train], labels),
        TREES,
    )
    results = []
    for part in ("train", "test"):
        row_ids = getattr(rows.split, part)
        values, truth = rows.values[row_ids], rows.labels[row_ids]
        staged = [shares[:, 1] for shares in gbdt.staged_predict_proba(values)]
        matrix = xgboost.DMatrix(values)
        for stage in range(1, TREES + 1):
            row: Row = {"part": part, "stage": stage, "seed": seed}
            for name, model in {"SecureBoost": booster, "XGBoost": xgb}.items():
                shares = model.predict(matrix, iteration_range=(0, stage))
                row[name] = float(log_loss(truth, shares.astype(np.float64)))
            results.append(row | {"GBDT": float(log_loss(truth, staged[stage - 1]))})
    return results


@STUDY.table(
    "figure_4",
    "Figure 4: log loss after a stage, Credit 2",
    "part; stage; SecureBoost:.4f; XGBoost:.4f; GBDT:.4f",
    2,
)
def some_stages(rows: Sequence[Row]) -> list[Row]:
    return [row for row in averaged(rows, "part", "stage") if row["stage"] in SHOWN_STAGES]


# Tables 2 and 3


def credit_settings(credit: str, n_trees: int, seed: int, method: str = "SecureBoost") -> Settings:
    config = {"data": CREDITS[credit], "num-boost-round": n_trees, "seed": seed}
    return load_settings({**COMMON, **config, "secureboost.first-trees": METHODS[method]})


def read_booster(path: Path) -> xgboost.Booster:
    """A model for matrices without column names."""
    booster = xgboost.Booster()
    booster.load_model(path)
    booster.feature_names = None
    return booster


def scores_of(booster: xgboost.Booster, rows: Pooled, n_trees: int) -> dict[str, float]:
    test = rows.split.test
    matrix = xgboost.DMatrix(rows.values[test])
    margins = booster.predict(matrix, output_margin=True, iteration_range=(0, n_trees))
    column = margins.reshape(-1, 1).astype(np.float32)
    scores = metrics.pooled("binary:logistic", column, rows.labels[test], rows.weights[test])
    return {name: scores[name] for name in METRICS}


def purity(labels: Ints, nodes: Ints) -> float:
    """Share of the larger class in a row's node: the sum of n_i / n * p_i of the paper."""
    return float(contingency_matrix(labels, nodes).max(axis=0).sum() / len(labels))


def last_seen(leaves: Ints, tree: Row, active: slice, max_depth: int) -> Ints:
    """Where the passive party sees each row of a tree, given as XGBoost's document.

    It sees all splits but those of the last level by ``active``, the columns of the active party.
    """
    parents, depths = tree["parents"], [0]
    for parent in parents[1:]:  # a parent has a smaller number than its children
        depths.append(depths[parent] + 1)
    hidden = {
        node: parents[node]
        for node, depth in enumerate(depths)
        if depth == max_depth and active.start <= tree["split_indices"][parents[node]] < active.stop
    }
    return np.array([hidden.get(leaf, leaf) for leaf in leaves.tolist()])


def purities(model: Path, rows: Pooled, active: slice, settings: Settings) -> Row:
    """Purity of the first and the second tree on the training rows.

    Of the leaves, and ("seen") of the nodes where the passive party sees the rows, which it
    does not in trees of only the active party.
    """
    labels = rows.labels[rows.split.train].astype(np.int64)
    matrix = xgboost.DMatrix(rows.values[rows.split.train])
    leaves = read_booster(model).predict(matrix, pred_leaf=True, iteration_range=(0, 2)).astype(int)
    trees = json.loads(model.read_text())["learner"]["gradient_booster"]["model"]["trees"]
    n_hidden = SecureBoostSettings.of(settings).first_trees
    record: Row = {"purity": [], "seen": []}
    for number, nodes in enumerate(leaves.T):
        record["purity"].append(purity(labels, nodes))
        seen = last_seen(nodes, trees[number], active, settings.max_depth)
        record["seen"].append(purity(labels, seen if number >= n_hidden else np.zeros_like(nodes)))
    return record | {"larger_class": float(max(labels.mean(), 1 - labels.mean()))}


def trained(credit: str, method: str, n_trees: int, seed: int) -> Row:
    """Train one method on one set: purity of two trees, scores of the first and of all."""
    settings = credit_settings(credit, n_trees, seed, method)
    folder = f"{CREDITS[credit]}-{METHODS[method]}-{n_trees}"
    summary = STUDY.run(settings, folder, f"{credit}, {method}")
    model = STUDY.folder / folder / f"secureboost-{seed}" / "model.xgb.json"
    booster = read_booster(model)
    rows, _, active = join_tables(settings)
    record: Row = {"credit": credit, "method": method, "seed": seed}
    record |= purities(model, rows, active, settings)
    record |= {"first_tree": scores_of(booster, rows, 1)}
    record |= {"all_trees": scores_of(booster, rows, n_trees)}
    record |= {"seconds": summary["seconds"]["train"], "model": str(model)}
    return record


@STUDY.table(
    "tables_2_and_3",
    "Wilcoxon's test, SecureBoost less Completely SecureBoost",
    "score; pairs; difference:+.5f; p:.2f",
)
def rank_tests(rows: Sequence[Row]) -> list[Row]:
    """Wilcoxon's signed-rank test of both methods, for each score."""
    tests = []
    for name in METRICS:
        scores = [
            [row["all_trees"][name] for row in rows if row["method"] == method]
            for method in METHODS
        ]
        differences = np.subtract(scores[0], scores[1])
        p = float(wilcoxon(differences).pvalue) if differences.any() else 1.0
        tests.append({"score": name, "pairs": len(differences), "p": p})
        tests[-1]["difference"] = float(differences.mean())
    return tests


@STUDY.table(
    "tables_2_and_3",
    "Table 2: leaf purity on the training rows, first and second tree",
    "data=credit; method; purity 1:.4f; purity 2:.4f; seen 1:.4f; seen 2:.4f; "
    "larger=larger_class:.4f",
    2,
)
def by_tree(rows: Sequence[Row]) -> list[Row]:
    """Mean purities of the first and the second tree."""
    parts = ("purity", "seen")
    trees = [{f"{part} {n + 1}": row[part][n] for part in parts for n in (0, 1)} for row in rows]
    purities = [{**row, **of_trees} for row, of_trees in zip(rows, trees, strict=True)]
    return averaged(purities, "credit", "method")


@STUDY.table(
    "tables_2_and_3",
    f"Table 3: test scores, {TREES} trees",
    "data=credit; trees; method; accuracy:.4f; AUC=auc:.4f; F1=f1:.4f; sec.=seconds:.0f",
    3,
)
def by_trees(rows: Sequence[Row]) -> list[Row]:
    """Mean scores over the seeds after the first tree and after all."""
    texts = {"first_tree": "first tree", "all_trees": "all trees"}
    cells = [{**row, **row[part], "trees": texts[part]} for row in rows for part in texts]
    return averaged(cells, "credit", "trees", "method")


STUDY.table(
    "figure_5",
    f"Figure 5: a boosting stage on Credit 2, {KEY_BITS}-bit key",
    "part; value; rows to train=train_rows; sec. a stage=seconds:.2f; MB a stage=mb:.1f",
)(list)


@STUDY.command
def main(million: bool = False, seeds: int = 1) -> Tables:
    """Tables 1 to 3, Figures 4 and 5.

    ``--million`` adds a million ids a side to Table 1; ``--seeds`` are draws of Tables 2 and 3 and
    Figure 4.
    """
    console.print(f"Keys of {KEY_BITS} bits, as the paper's: insecure, only for these figures")
    # Read now, so that a missing file is noticed before the first run.
    *_, n_rows = (read_source(data).n_rows for data in CREDITS.values())  # of Credit 2
    psi, first = load_settings({**COMMON, "align": "psi"}), list[Row]()
    for pair in (*itertools.product(N_IDS, N_IDS), *[(MANY_IDS, MANY_IDS)] * million):
        name = "alignment-{}-{}".format(*pair)
        first += STUDY.rows(name, psi, partial(alignment, *pair))
    yield "table_1", first
    points = [("depth", depth) for depth in DEPTHS] + [("columns", n) for n in N_COLUMNS]
    points += [("rows", n or n_rows) for n in N_ROWS]
    yield "figure_5", [stage(*point, STAGES) for point in points]
    runs = [
        trained(credit, method, TREES, SEED + draw)
        for draw in range(seeds)
        for credit in CREDITS
        for method in METHODS
    ]
    losses = [
        row
        for run in runs
        if (run["credit"], run["method"]) == ("Credit 2", "SecureBoost")
        for row in stage_losses(Path(run["model"]), run["seed"])
    ]
    yield "figure_4", losses
    yield "tables_2_and_3", runs
