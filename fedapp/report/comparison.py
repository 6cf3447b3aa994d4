"""Several runs side by side: in tables, and as pages.

`comparison_page` compares any finished runs (``fedapp report``); `tradeoff_page` shows a
`Comparison`, all of whose lines are scored on the same rows (``fedapp compare``).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedapp.errors import DataError
from fedapp.metrics import AT_THRESHOLD, is_metric, larger_is_better
from fedapp.report import plots
from fedapp.report.certainty import score_text, span_text
from fedapp.report.page import arrow, figures, named, page, quiet, strong, table
from fedapp.report.plots import Drawing, compared_scores, near_range, ranking, tradeoff
from fedapp.report.summary import (
    COMMON,
    Run,
    Scores,
    defined,
    drawn_metrics,
    human_bytes,
    human_seconds,
    metric_of,
    row_counts,
    row_warnings,
    score_names,
)
from fedapp.report.template import elements
from fedapp.settings import Value, flatten

ONE_PLACE = (
    "pooled: all rows and columns in one place. A party's rows alone: trained on these. A party's "
    "columns alone: what the party that has the labels reaches without the others' columns."
)
N_ORDERS = 10  # of the training rows, for the range of pooled XGBoost's scores
TIES = (
    "less the best: mean and standard deviation of the differences to the best strategy, on the "
    "same seeds and folds; tie: the mean is within two standard errors of 0."
)
OFF_AXIS = " An arrow stands for a score beyond the axis, which is written beside its name."
MOST_ALONE = 4  # lines of parties alone; with more, their mean, best and worst are shown
CSV, LATEX = "comparison.csv", "comparison.tex"  # the table, beside the page
IN_LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {"↑": "$\\uparrow$", "↓": "$\\downarrow$", "±": "$\\pm$", "–": "--"}  # noqa: RUF001
)
# What a line costs: label and words of a figure, field of `Line`, and how a number is written.
COSTS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("bytes sent", "the bytes it sends", "n_bytes", human_bytes),
    ("train time", "its training time", "seconds", human_seconds),
    ("exchanges", "its exchanges, which cost seconds in a deployment", "exchanges", "{:g}".format),
)
Named = Mapping[str, Run]
Records = Sequence[Mapping[str, Any]]  # as of `Comparison.records`
# A run's location, and settings that the table of runs shows.
STATED = {"run-dir", "resume", "strategy", "data", "parties", "seed"}


def comparison_page(runs: Sequence[Run]) -> str:
    """HTML page of two runs or more; DataError if they differ in their objective."""
    objectives = sorted({run.summary["objective"] for run in runs})
    if len(objectives) > 1:
        raise DataError(f"runs must share one objective, got {', '.join(objectives)}")
    by_name = named_runs(runs)
    rounds = {name: run.rounds for name, run in by_name.items() if run.rounds}
    curves = {
        f"{arrow(metric)} by boosting round": compared_scores(rounds, metric)
        for metric in drawn_metrics(runs)
    }
    rocs = {name: (run.summary.get("curves") or {}).get("roc") for name, run in by_name.items()}
    drawn = {name: roc for name, roc in rocs.items() if roc and roc["fpr"]}
    roc_figures = {}
    if drawn:
        rates = plots.curves("roc", drawn, ("fpr", "tpr"), plots.RATES, legend_below=True)
        roc_figures["ROC curves"] = rates
    sections = {
        "Scores on test rows": _scores(by_name),
        "What is compared": _facts(by_name),
        "Cost": _costs(by_name),
        "Trade-offs": figures(_trade_offs(by_name)),
        "Training": figures(curves),
        "Predictions": figures(roc_figures),
        "Settings that differ": _differences(by_name),
    }
    data = " · ".join(dict.fromkeys(run.summary["data"] for run in runs))
    return page(f"{len(runs)} runs compared", data, sections, row_warnings(by_name))


def named_runs(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by the names of their folders, with a number where two agree."""
    folders = [run.path.resolve().name for run in runs]
    names = [
        f"{name} ({folders[: i + 1].count(name)})" if folders.count(name) > 1 else name
        for i, name in enumerate(folders)
    ]
    return dict(zip(names, runs, strict=True))


def _facts(runs: Named) -> str:
    rows = []
    for name, run in runs.items():
        counts = row_counts(run.summary)
        summary = run.summary
        n_train = counts.get("train", sum(party["rows"] for party in summary["parties"]))
        n_test = f"{counts['test']:,}" if "test" in counts else "not known"
        cells = n_test, f"{n_train:,}", f"{len(summary['parties'])}", f"{summary.get('seed', '')}"
        rows.append([named(name), named(summary["strategy"]), named(summary["data"]), *cells])
    header = ["run", "strategy", "data", "rows scored", "training rows", "parties", "seed"]
    return table(header, rows, n_texts=3)


def _scores(runs: Named) -> str:
    """Scores of each run and its pooled baseline; the best run of each column is bold."""
    tests: dict[str, Scores] = {
        n: run.summary["metrics"].get("test") or {} for n, run in runs.items()
    }
    names = [name for name in score_names(list(tests.values())) if name not in AT_THRESHOLD]
    best = {}  # the best value of each metric, as shown
    for name in filter(is_metric, names):
        scores = [score for each in tests.values() for score in defined(each, name)]
        if scores:
            best[name] = score_text(max(scores) if larger_is_better(name) else min(scores))
    rows = []
    for run_name, run in runs.items():
        texts = {name: score_text(tests[run_name].get(name)) for name in names}
        cells = [strong(text) if text == best.get(name) else text for name, text in texts.items()]
        rows.append([named(run_name), named(run.summary["strategy"]), *cells])
        pooled = (run.summary.get("baselines") or {}).get("pooled")
        if pooled:
            texts = {name: score_text(pooled.get(name)) for name in names}
            rows.append(["", named("pooled baseline"), *texts.values()])
    return table(["run", "strategy", *map(arrow, names)], rows, n_texts=2)


def _costs(runs: Named) -> str:
    rows = []
    for name, run in runs.items():
        summary = run.summary
        traffic = run.summary["bytes"]
        counts = (summary["trees"], summary["exchanges"])
        sizes = (human_bytes(traffic[way]) for way in ("to_parties", "to_server"))
        seconds = human_seconds(summary["seconds"]["total"])
        rows.append([named(name), *(f"{count:,}" for count in counts), *sizes, seconds])
    header = ["run", "trees", "exchanges", "to parties", "to server", "time"]
    return table(header, rows)


def _trade_offs(runs: Named) -> dict[str, Drawing]:
    """Scores of the early-stopping metric against costs; empty if fewer than two runs have it."""
    metric = metric_of(next(iter(runs.values())).summary)
    lines = []
    for name, run in runs.items():
        summary = run.summary
        pooled = (run.summary.get("baselines") or {}).get("pooled") or {}
        for score in defined(summary["metrics"].get("test") or {}, metric):
            seconds = summary["seconds"].get("train", summary["seconds"]["total"])
            costs = seconds, summary["exchanges"], sum(summary["bytes"].values())
            lines.append(Line(name, (score,), *costs))
        lines += [Line(f"{name}, pooled", (score,)) for score in defined(pooled, metric)]
    if sum(line.n_bytes is not None for line in lines) < 2:
        return {}
    lines.sort(key=lambda line: line.mean, reverse=larger_is_better(metric))
    return cost_figures(lines, metric, "run")


def _differences(runs: Named) -> str:
    """Settings that some run reads and that differ, in the first run's order."""
    unread = [run for run in runs.values() if run.summary.get("settings_read") is None]
    read = {key for run in runs.values() for key in run.summary.get("settings_read") or ()}
    flat = {name: flatten(run.config) for name, run in runs.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    shown = [key for key in keys if key not in STATED and (unread or key in read)]
    rows = [[key, *(str(each.get(key, "not set")) for each in flat.values())] for key in shown]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return quiet("None.")
    return table(["setting", *runs], differing, n_texts=1 + len(runs))


@dataclass(frozen=True, slots=True)
class Line:
    """One strategy or baseline over all seeds and folds."""

    name: str
    scores: tuple[float, ...]  # test scores by seed and fold, of the early-stopping metric
    # Means per run; None for a baseline, which sends nothing.
    seconds: float | None = None
    exchanges: float | None = None
    n_bytes: float | None = None  # both ways
    others: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # all test scores
    runs: tuple[str, ...] = ()  # names of the runs' folders, by seed and fold
    alone: str = ""  # what a party has alone, and the model; empty for all other lines

    @property
    def mean(self) -> float:
        """Mean score."""
        return float(np.mean(self.scores))

    @property
    def spread(self) -> float:
        """Standard deviation of the score over seeds and folds; nan for one run."""
        return float(np.std(self.scores, ddof=1)) if len(self.scores) > 1 else float("nan")


def best_first(lines: Iterable[Line], metric: str) -> tuple[Line, ...]:
    """Lines by mean score, those without a score last."""
    sign = -1 if larger_is_better(metric) else 1
    return tuple(sorted(lines, key=lambda line: (np.isnan(line.mean), sign * line.mean)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Strategies and baselines that are scored on the same rows."""

    metric: str
    lines: tuple[Line, ...]  # ordered by the metric, best first
    data: str
    objective: str
    engine: str
    seeds: tuple[int, ...]
    n_parties: int
    n_rows: Mapping[str, int]  # "train", "valid" and "test"
    methods: Mapping[str, tuple[str, ...]]  # by what their parties split: "rows" or "columns"
    changed: Mapping[str, Value]  # settings that are not defaults, except those above
    unread: Mapping[str, tuple[str, ...]]  # method -> changed settings that it does not read
    folds: int = 0  # 0: no cross-validation
    orders: tuple[float, float] | None = None  # range of pooled XGBoost's scores, see N_ORDERS
    # By method and baseline: how much its score is more, and the ends of the 95 % interval. Without
    # methods whose model is divided.
    differences: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    @property
    def folded(self) -> Comparison:
        """With mean, best and worst in place of more than ``MOST_ALONE`` parties' lines."""
        groups: dict[str, list[Line]] = {}
        for line in self.lines:
            groups.setdefault(line.alone, []).append(line)
        lines = groups.pop("", [])
        for alone, group in groups.items():
            if (n_parties := len(group)) <= MOST_ALONE:
                lines += group
                continue
            scores = {
                name: tuple(np.mean([line.others[name] for line in group], axis=0).tolist())
                for name in set.intersection(*(set(line.others) for line in group))
            }
            lines.append(Line(f"{alone}, mean of {n_parties}", scores[self.metric], others=scores))
            lines += [
                replace(line, name=f"{line.name}, {rank} of {n_parties}")
                for line, rank in ((group[0], "best"), (group[-1], "worst"))
            ]
        return replace(self, lines=best_first(lines, self.metric))

    @property
    def metrics(self) -> list[str]:
        """The watched score, and up to two others."""
        others = (name for name in COMMON if name in self.lines[0].others)
        return list(dict.fromkeys([self.metric, *others]))[:3]

    @property
    def records(self) -> list[dict[str, Any]]:
        """A record per line, best first: means, differences to the best strategy, costs."""
        best = next(line for line in self.lines if line.n_bytes is not None)
        records = []
        for line in self.lines:
            pairs = Line("", tuple(np.subtract(line.scores, best.scores).tolist()))
            error = pairs.spread / len(pairs.scores) ** 0.5
            # A tie: the mean difference is within two standard errors of 0.
            ties = None if np.isnan(error) else abs(pairs.mean) <= 2 * error
            others = {name: line.others.get(name, np.nan) for name in self.metrics[1:]}
            means = {name: float(np.mean(scores)) for name, scores in others.items()}
            records.append(
                {"strategy": line.name, self.metric: line.mean, "sd": line.spread, **means}
                | {"difference": pairs.mean, "difference_sd": pairs.spread}
                | {"ties": ties, "is_best": line is best}
                | {"seconds": line.seconds, "exchanges": line.exchanges, "bytes": line.n_bytes}
            )
        return records

    @property
    def facts(self) -> dict[str, str]:
        """What is compared, in words."""
        rows = self.n_rows
        seeds = ", ".join(map(str, self.seeds))
        if self.folds:
            seeds += f", each with {self.folds} folds that are held back in turn"
        is_several = len(self.seeds) > 1 or self.folds > 1
        over = "all these runs" if self.folds else "them"
        of_fold = " (in the first fold)" if self.folds else ""  # fold sizes differ by a row
        several = f"; ± is the standard deviation over {over}" if is_several else ""
        split = [
            f"some of the {what} ({', '.join(methods)})" for what, methods in self.methods.items()
        ]
        partly = {name for names in self.unread.values() for name in names}
        usual = "no others are changed for every method" if partly else "all defaults"
        facts = {
            "data": f"{self.data}, {self.objective}",
            "rows": f"{rows['test']:,} test rows{of_fold} score every line; "
            f"{rows['train']:,} train, {rows['valid']:,} validate",
            "parties": f"{self.n_parties}, each with {' or '.join(split)}",
            "seeds": seeds + several if several else f"{seeds} (one: no spread is known)",
            "engine": self.engine,
            "settings": self._named(set(self.changed) - partly) or usual,
        }
        low, high = map(score_text, self.orders or (0.0, 0.0))
        if low != high:
            facts["row orders"] = (
                f"pooled XGBoost scores {low} to {high} over {N_ORDERS} orders of the training "
                "rows of the first run, which its cuts follow; smaller differences say nothing"
            )
        for method, spans in self.differences.items():
            shown = list(spans.items())[: 1 + MOST_ALONE]
            facts[f"{method}, paired"] = (
                f"{self.metric} less "
                + "; ".join(f"{name} {span_text(span)}" for name, span in shown)
                + " (95 % interval of the difference on the same test rows)"
            )
        for method, unread in self.unread.items() if partly else ():
            read = self._named(partly - set(unread)) or "nothing more"
            not_read = f"; does not read {', '.join(unread)}" if unread else ""
            facts[method] = f"also reads {read}{not_read}"
        return facts

    def _named(self, names: Collection[str]) -> str:
        return ", ".join(f"{name}={self.changed[name]}" for name in self.changed if name in names)


def score_table(records: Records) -> Table:
    """The lines as a table for a terminal."""
    header, *rows = _cells(records)
    grid = Table(*header)
    for column in grid.columns[1:]:
        column.justify = "right"
    for name, *cells in rows:
        grid.add_row(escape(name), *cells)
    return grid


def score_html(records: Records) -> str:
    """The lines as a table of a page; the best one is bold."""
    header, best, *others = _cells(records)
    return table(header, [[strong(cell) for cell in best], *others])


def tradeoff_page(comparison: Comparison) -> str:
    """The comparison as HTML: tables, and figures of scores against costs."""
    comparison = comparison.folded
    facts = list(comparison.facts.items())
    ties = TIES if len(comparison.lines[0].scores) > 1 else ""
    run_rows = [
        [elements.link(run), *(score_text(line.others[n][place]) for n in comparison.metrics)]
        for line in comparison.lines
        for place, run in enumerate(line.runs)
    ]
    head = ["run", *map(arrow, comparison.metrics)]
    costs = cost_figures(comparison.lines, comparison.metric, "strategy")
    sections = {
        "Test scores and cost": score_html(comparison.records)
        + elements.files([CSV, LATEX])
        + quiet(ONE_PLACE)
        + quiet(ties),
        "Every run": table(head, run_rows) if run_rows else "",
        "What is compared": table(["", "of every line, or of a method"], facts, 2),
        "Trade-offs": figures(costs),
    }
    title = f"{sum(map(len, comparison.methods.values()))} strategies compared"
    return page(title, f"{comparison.data} · {comparison.n_rows['test']:,} test rows", sections)


def as_csv(comparison: Comparison) -> str:
    """All lines, also those that the page folds, with unrounded numbers."""
    buffer, records = io.StringIO(), comparison.records
    writer = csv.DictWriter(buffer, records[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return buffer.getvalue()


def as_latex(comparison: Comparison) -> str:
    """The page's table as a tabular."""
    cells = _cells(comparison.folded.records)
    columns = "r" * (len(cells[0]) - 1)
    header, *rows = (" & ".join(cell.translate(IN_LATEX) for cell in row) + r" \\" for row in cells)
    lines = (rf"\begin{{tabular}}{{l{columns}}}", header, r"\hline", *rows, r"\end{tabular}")
    return "\n".join(lines) + "\n"


def cost_figures(lines: Sequence[Line], metric: str, what: str) -> dict[str, Drawing]:
    """Figures of scores against costs, and a ranking, by caption; `what` names a line."""
    federated = [line for line in lines if line.n_bytes is not None]
    off_axis = OFF_AXIS if _has_far(federated) else ""
    points = [(line.name, line.mean, line.spread, line.n_bytes is None) for line in lines]
    several = any(len(line.scores) > 1 for line in lines)
    bars = ", with the standard deviation over the runs" if several else ""
    kinds = f"every {what}"
    if len(federated) < len(lines):
        kinds += " (dark) and of the baselines (pale)"
    all_off_axis = OFF_AXIS if _has_far(lines) else ""
    images = {}
    for cost, words, name, show in COSTS:
        spent = [(line.name, getattr(line, name) or 0.0, line.mean) for line in federated]
        caption = f"Test {arrow(metric)} of every {what} against {words}, on a logarithmic scale."
        images[caption + off_axis] = tradeoff(spent, cost, metric, show)
    caption = f"Test {arrow(metric)} of {kinds}, best first{bars}.{all_off_axis}"
    return images | {caption: ranking(points, metric)}


def _has_far(lines: Sequence[Line]) -> bool:
    means = [line.mean for line in lines if np.isfinite(line.mean)]
    low, high = near_range(means)
    return any(not low <= mean <= high for mean in means)


def _cells(records: Records) -> list[list[str]]:
    """The header of the table, and a row for each record; NaN may be None, as in JSON."""
    _, metric, _, *names = records[0]
    others = names[: names.index("difference")]
    is_several = any(defined(record, "sd") for record in records)
    pairs = ["less the best"] if is_several else []
    head = ["strategy", arrow(metric), "±", *pairs, *map(arrow, others)]
    rows = [[*head, "train", "exchanges", "bytes"]]
    for record in records:
        row = [record["strategy"], score_text(record[metric]), score_text(record["sd"])]
        if is_several:
            mark = " tie" if record["ties"] else ""
            difference = math.nan if record["difference"] is None else record["difference"]
            pair = f"{difference:+.4f} ± {score_text(record['difference_sd'])}{mark}"
            row.append("best" if record["is_best"] else pair)
        row += [score_text(record[name]) for name in others]
        costs = ["", "", ""]
        if record["bytes"] is not None:
            costs = [human_seconds(record["seconds"]), f"{record['exchanges']:g}"]
            costs.append(human_bytes(record["bytes"]))
        rows.append(row + costs)
    return rows
