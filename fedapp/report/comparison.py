"""What ``fedapp compare`` finds: strategies and baselines scored on the same rows.

A `Comparison` has the numbers; `score_table` prints them, and `tradeoff_page` is their page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from rich.table import Table

from fedapp.metrics import larger_is_better
from fedapp.report.certainty import score_text, span_text
from fedapp.report.page import arrow, figures, page, quiet, strong, table
from fedapp.report.plots import Drawing, near_range, ranking, tradeoff
from fedapp.report.summary import (
    COMMON,
    COST_NAMES,
    cost_cells,
    defined,
    human_bytes,
    human_seconds,
    score_cells,
    terminal_table,
)
from fedapp.report.template import elements
from fedapp.settings import Value

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
# What a line costs: label and words of a figure, field of `Line`, and how a number is written.
COSTS: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("bytes sent", "the bytes it sends", "n_bytes", human_bytes),
    ("train time", "its training time", "seconds", human_seconds),
    ("exchanges", "its exchanges, which cost seconds in a deployment", "exchanges", "{:g}".format),
)
Records = Sequence[Mapping[str, Any]]  # as of `Comparison.records`


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
                for name in group[0].others
                if all(name in line.others for line in group)
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
    return terminal_table(header, rows, bold=0)


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
        ([elements.link(run)], {name: scores[index] for name, scores in line.others.items()})
        for line in comparison.lines
        for index, run in enumerate(line.runs)
    ]
    names, runs = score_cells(run_rows, comparison.metrics)
    head = ["run", *map(arrow, names)]
    costs = cost_figures(comparison.lines, comparison.metric)
    sections = {
        "Test scores and cost": score_html(comparison.records) + quiet(ONE_PLACE) + quiet(ties),
        "Every run": table(head, runs) if runs else "",
        "What is compared": table(["", "of every line, or of a method"], facts, 2),
        "Trade-offs": figures(costs),
    }
    title = f"{sum(map(len, comparison.methods.values()))} strategies compared"
    return page(title, f"{comparison.data} · {comparison.n_rows['test']:,} test rows", sections)


def cost_figures(lines: Sequence[Line], metric: str) -> dict[str, Drawing]:
    """Figures of scores against costs, and a ranking, by caption."""
    federated = [line for line in lines if line.n_bytes is not None]
    off_axis = OFF_AXIS if _has_far(federated) else ""
    points = [(line.name, line.mean, line.spread, line.n_bytes is None) for line in lines]
    several = any(len(line.scores) > 1 for line in lines)
    bars = ", with the standard deviation over the runs" if several else ""
    kinds = "every strategy"
    if len(federated) < len(lines):
        kinds += " (dark) and of the baselines (pale)"
    all_off_axis = OFF_AXIS if _has_far(lines) else ""
    images = {}
    for cost, words, name, show in COSTS:
        spent = [(line.name, getattr(line, name) or 0.0, line.mean) for line in federated]
        caption = f"Test {arrow(metric)} of every strategy against {words}, on a logarithmic scale."
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
    rows = [[*head, *COST_NAMES]]
    names = [metric, "sd", *others]
    _, cells = score_cells([([record["strategy"]], record) for record in records], names)
    for record, row in zip(records, cells, strict=True):
        if is_several:
            mark = " tie" if record["ties"] else ""
            difference = math.nan if record["difference"] is None else record["difference"]
            pair = f"{difference:+.4f} ± {score_text(record['difference_sd'])}{mark}"
            row.insert(3, "best" if record["is_best"] else pair)
        rows.append(row + cost_cells(record))
    return rows
