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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from fedapp.data.datasets import dataset_names, source_frame
from fedapp.report.page import arrow, figures, page, quiet, strong, table
from fedapp.report.plots import Drawing, add_legend_below, line_style, new_canvas, new_pens, plain
from fedapp.report.summary import human_bytes, human_seconds, score_text
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import run_and_load, run_baselines
from fedapp.settings import Settings, load_settings
from simulations.study import (
    Row,
    all_made,
    averaged,
    check_names,
    console,
    costs,
    grouped,
    mean_of,
    run_and_tidy,
    series,
    show,
    write_tables,
)

POOLED, ALONE = "pooled", "alone"
GOOD = 0.005  # of AUC below the best; the seed changes a score by as much


@dataclass(frozen=True, slots=True)
class Verdict:
    """The recommendation for one scenario."""

    data: str
    name: str
    parties: int
    best: str
    score: float  # mean of the best method
    pooled: float
    alone: float
    good: tuple[str, ...]  # methods within 0.005 of the best, including the best
    fewest_exchanges: str  # the cheapest of these
    exchanges: float
    fewest_bytes: str
    n_bytes: float

    @property
    def text(self) -> str:
        """The verdict in one line."""
        return (
            f"{self.data}, {self.name}, {self.parties} parties: {self.best} {self.score:.4f} "
            f"(pooled {self.pooled:.4f}, alone {self.alone:.4f}); within {GOOD:g}: "
            f"{', '.join(self.good)}; of these fewest exchanges {self.fewest_exchanges} "
            f"({self.exchanges:g}), fewest bytes {self.fewest_bytes} ({human_bytes(self.n_bytes)})"
        )


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One verdict for each scenario, in order of appearance.

    ``rows`` have data, name, parties, method and score; those of federated methods also exchanges
    and bytes. Seeds are averaged.
    """
    answers = []
    for place, group in grouped(rows, "data", "name", "parties").items():
        groups = {str(method): each for (method,), each in grouped(group, "method").items()}
        scores = {method: mean_of(each, "score") for method, each in groups.items()}
        pooled, alone = scores.pop(POOLED), scores.pop(ALONE)
        best = max(scores, key=scores.__getitem__)
        good = [method for method in scores if scores[method] >= scores[best] - GOOD]
        cheapest = list[Any]()
        for name in ("exchanges", "bytes"):
            means = {method: mean_of(groups[method], name) for method in good}
            least = min(means, key=means.__getitem__)
            cheapest += [least, means[least]]
        head = (*place, best, scores[best], pooled, alone, tuple(good))
        answers.append(Verdict(*head, *cheapest))
    return answers


# The page of ``noniid``: scores, costs and plots of all methods, and which one to choose.

LEVEL = 6  # longest category name that fits without rotation
COSTS: dict[str, Callable[[float], str]] = {
    "exchanges": "{:g}".format,
    "bytes": human_bytes,
    "seconds": human_seconds,
}


def benchmark_page(
    rows: Sequence[Row], methods: Sequence[str], answers: Sequence[Verdict], notes: Sequence[str]
) -> str:
    """The page, as HTML.

    ``rows`` include those of the baselines; ``methods`` are the federated ones, in order.
    """
    sets = dict.fromkeys(str(row["data"]) for row in rows)
    sections = {
        "Which method should I take?": _answers(answers),
        "Test scores": _scores(rows, methods) + quiet(" ".join(notes)),
        "Costs": _costs(rows, methods),
    }
    for data in sets:
        of_data = [row for row in rows if row["data"] == data]
        sections[f"{data}, plots"] = figures(_figures(of_data, methods))
    return page("Uneven parties: which method to take", " · ".join(sets), sections)


def _answers(answers: Sequence[Verdict]) -> str:
    header = ["data", "rows", "parties", "best", arrow("auc"), "pooled", "alone", "as good"]
    header += ["fewest exchanges of these", "fewest bytes of these"]
    lines_of = [
        [
            *(answer.data, answer.name, str(answer.parties), answer.best),
            *(score_text(value) for value in (answer.score, answer.pooled, answer.alone)),
            ", ".join(name for name in answer.good if name != answer.best) or "none",
            f"{answer.fewest_exchanges} ({answer.exchanges:g})",
            f"{answer.fewest_bytes} ({human_bytes(answer.n_bytes)})",
        ]
        for answer in answers
    ]
    return table(header, lines_of, n_texts=len(header))


def _scores(rows: Sequence[Row], methods: Sequence[str]) -> str:
    names = [*methods, POOLED, ALONE]
    lines_of = []
    for (data, name, parties), group in grouped(rows, "data", "name", "parties").items():
        of_method = grouped(group, "method")
        means = {each: mean_of(of_method[(each,)], "score") for each in names}
        best = max(means[each] for each in methods)
        cells = [
            strong(score_text(mean)) if mean == best and each in methods else score_text(mean)
            for each, mean in means.items()
        ]
        lines_of.append([data, name, str(parties), *cells])
    return table(["data", "rows", "parties", *names], lines_of, n_texts=2)


def _costs(rows: Sequence[Row], methods: Sequence[str]) -> str:
    lines_of = []
    federated = [row for row in rows if row["method"] in methods]
    for place, group in grouped(federated, "data", "name", "parties", "method").items():
        spent = [in_words(mean_of(group, name)) for name, in_words in COSTS.items()]
        lines_of.append([*map(str, place), *spent])
    return table(["data", "rows", "parties", "method", *COSTS], lines_of, n_texts=4)


def _figures(rows: Sequence[Row], methods: Sequence[str]) -> dict[str, Drawing]:
    """Scores by how unlike the parties are; scores and costs by the number of parties."""
    by_count = [row for row in rows if row["partition"] == "iid"]
    usual = max(row["parties"] for row in rows if row["partition"] != "iid")
    by_skew = [row for row in rows if row["partition"] != "iid" or row["parties"] == usual]
    both = [*methods, POOLED, ALONE]
    drawn = {
        f"Test {arrow('auc')} by how the rows are dealt out to {usual} parties": _lines(
            by_skew, "name", both, ("rows of the parties", "auc")
        ),
        f"Test {arrow('auc')} by the number of parties, rows by chance": _lines(
            by_count, "parties", both, ("parties", "auc")
        ),
    }
    for cost, in_words in COSTS.items():
        drawn[f"{cost.capitalize()} by the number of parties, on a logarithmic scale"] = _lines(
            by_count, "parties", methods, ("parties", cost), in_words
        )
    return drawn


def _lines(
    rows: Sequence[Row],
    across: str,
    methods: Sequence[str],
    labels: tuple[str, str],
    in_words: Callable[[float], str] | None = None,
) -> Drawing:
    """A line a method: means over the seeds, by category.

    ``labels`` are of the axes; ``in_words`` formats a value on a logarithmic scale.
    """
    from matplotlib.ticker import NullFormatter

    field = "score" if in_words is None else labels[1]
    categories = [place for (place,) in grouped(rows, across)]
    if across == "parties":
        categories.sort()
    groups, (figure, ax) = grouped(rows, "method", across), new_canvas(across)
    for method, (color, dash) in zip(methods, new_pens(), strict=False):
        means = [mean_of(groups[method, place], field) for place in categories]
        style = {"color": color, "label": plain(method), **line_style(means)}
        ax.plot(range(len(categories)), means, dash, **style)
    names = [plain(str(place)) for place in categories]
    ax.set_xticks(range(len(names)), names, parse_math=False)
    if max(map(len, names)) > LEVEL:
        for text in ax.get_xticklabels():
            text.set(rotation=30, ha="right", rotation_mode="anchor")
    ax.set(xlabel=labels[0], ylabel=labels[1])
    if in_words:
        to_text = in_words
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: to_text(value))
        ax.yaxis.set_minor_formatter(NullFormatter())
    add_legend_below(figure)
    return figure


# What the defaults give on every data set at hand, beside 50 rounds at XGBoost's own eta.

FIXED: Row = {"num-boost-round": 50, "eta": 0.3, "early-stopping-rounds": 0, "pax.bins": "share"}
SETS = [name for name in dataset_names() if not name.endswith("-test")]
ROWS, SEEDS = 20_000, (42, 1, 2)


def defaults(
    data: tuple[str, ...] = tuple(SETS),
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
    for name in data:
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
N_PARTIES, COUNTS, QUICK_PARTIES, QUICK_COUNTS = 5, (2, 5, 10, 30, 100), 3, (2, 3)
ALPHAS, QUICK_ALPHAS = (1.0, 0.3, 0.1), (0.3,)
IID, HALVED = "by chance", "sizes halved"
FIRST_SEED, QUICK_ROUNDS = 42, 5
TEST = 0.5  # of the rows, so that their draw rarely changes a difference by 0.005
QUICK: Row = {"fedxgbllr.rounds": 2, "fedxgbllr.epochs": 2, "fedxgbllr.trees": 10}
QUICK |= {"fedavg-linear.rounds": QUICK_ROUNDS}
OUTPUT = Path("runs/benchmarks/noniid")
CUT = f"""\
--quick: 1 seed, {QUICK_ROUNDS} rounds, {QUICK_PARTIES} parties and fewer ways to deal rows out; \
FedXGBllr with {QUICK["fedxgbllr.trees"]} trees a party. So it shows what runs, not what is good."""
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


def skews(data: str, quick: bool) -> list[Scenario]:
    """Scenarios that differ in how unlike the parties are."""
    n = QUICK_PARTIES if quick else N_PARTIES
    column = NATURAL[data]
    return [
        Scenario(data, IID, "iid", n),
        *(
            Scenario(data, f"dirichlet {alpha:g}", f"dirichlet:{alpha:g}", n)
            for alpha in (QUICK_ALPHAS if quick else ALPHAS)
        ),
        Scenario(data, HALVED, halved(n), n),
        Scenario(data, f"by {column.lower()}", f"column:{column}", n),
    ]


def counts(data: str, quick: bool, most: int) -> list[Scenario]:
    """Random splits among more and more parties."""
    numbers = [n for n in (QUICK_COUNTS if quick else COUNTS) if n <= most]
    return [Scenario(data, IID, "iid", n) for n in numbers]


def settings_of(scenario: Scenario, method: str, seed: int, quick: bool) -> Settings:
    """Settings of one run."""
    table: Row = {"data": scenario.data, "partition": scenario.partition, "test-fraction": TEST}
    table |= {"parties": scenario.parties}
    if own_steps := OWN_STEPS.get(METHODS[method]["strategy"]):
        steps = own_steps[scenario.steps]
    else:
        steps = BOOSTED[scenario.steps] | ({"num-boost-round": QUICK_ROUNDS} if quick else {})
    cut = QUICK if quick else {}
    return load_settings({"seed": seed, **table, **steps, **cut, **METHODS[method]})


def run_cell(scenario: Scenario, method: str, seed: int, quick: bool, output: Path) -> list[Row]:
    """Score and costs of one run, unless it is finished."""
    settings = settings_of(scenario, method, seed, quick)
    name = f"{method.replace(', ', '-').replace(' ', '-')}-{scenario.steps}"
    folder = output / scenario.folder / name
    where = f"{scenario.data}, {scenario.name}, {scenario.parties} parties, {method}"
    summary = series(folder, where).run(settings, run_and_tidy)
    row: Row = {**asdict(scenario), "method": method, "seed": seed}
    return [row | {"score": summary["metrics"]["test"]["auc"], **costs(summary)}]


def run_beside(scenario: Scenario, seed: int, quick: bool, output: Path) -> list[Row]:
    """Scores of XGBoost on all rows, and the mean of those on each party's rows."""
    settings = settings_of(scenario, "pax", seed, quick)

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


def run_all(
    scenarios: Sequence[Scenario], seeds: Sequence[int], quick: bool, on: str, output: Path
) -> list[Row]:
    parts: list[Callable[[], list[Row]]] = []
    for seed in seeds:  # the outer loop, so that an interrupted command has complete seeds
        for scenario in dict.fromkeys(scenarios):
            parts.append(partial(run_beside, scenario, seed, quick, output))
            parts += [partial(run_cell, scenario, each, seed, quick, output) for each in METHODS]
    return all_made(parts, on, output)


def show_scores(rows: Sequence[Row], heading: str) -> None:
    """Print scores and costs of each method on each scenario, with the baselines below."""
    order = [*METHODS, POOLED, ALONE]
    shown = [
        row
        for scenario in grouped(rows, "data", "name", "parties").values()
        for row in sorted(averaged(scenario, "method"), key=lambda row: order.index(row["method"]))
    ]
    columns = "data; rows=name; parties; method; AUC=score:.4f; exchanges:.0f; MB=mb:.1f"
    show(heading, shown, f"{columns}; sec.=seconds:.1f", 2)


def main(
    quick: bool = False,
    seeds: int = 1,
    data: str = "default-credit",
    steps: str = SMALL,
    most: int = COUNTS[-1],
    on: str = "",
    output: Path = OUTPUT,
) -> None:
    """Run all, print scores and costs, and write them as JSON and as a page with plots.

    ``--quick`` takes minutes and says what is cut; ``--seeds`` are draws to average over;
    ``--steps`` of boosting are small or large ones; ``--most`` limits the parties. Finished runs in
    ``--output`` are not run again; ``--on ray`` runs them in the cluster of RAY_ADDRESS.
    """
    start = time.monotonic()
    sets = [name.strip() for name in data.split(",")]
    check_names("data", sets, NATURAL)
    check_names("steps", [steps], BOOSTED)
    if quick:
        console.print(CUT)
    drawn = range(FIRST_SEED, FIRST_SEED + (1 if quick else seeds))
    scenarios = [one for name in sets for one in (*skews(name, quick), *counts(name, quick, most))]
    scenarios = [replace(one, steps=steps) for one in scenarios]
    folder = output / ("quick" if quick else "full")
    folder.mkdir(parents=True, exist_ok=True)
    rows = run_all(scenarios, drawn, quick, on, folder)
    how = f"{steps} steps{', --quick' if quick else ''}"
    heading = f"Seeds: {', '.join(map(str, drawn))}; {how}."
    show_scores(rows, heading)
    answers = verdicts(rows)
    for each in answers:
        console.print(each.text, soft_wrap=True)
    page = benchmark_page(rows, list(METHODS), answers, [heading, *NOTES.splitlines()])
    results = folder / f"steps-{steps}"
    results.mkdir(exist_ok=True)
    RunFolder(results).write("noniid.html", page)
    tables: Row = {"rows": rows, "verdicts": [asdict(each) for each in answers], "notes": NOTES}
    write_tables(results, "noniid", start, tables, folder)
