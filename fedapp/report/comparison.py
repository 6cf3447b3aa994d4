"""What ``fedapp compare`` finds: strategies and baselines scored on the same rows.

A `Comparison` has the numbers, `score_tables` prints them, and `tradeoff_page` is their page.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from rich.table import Table

from fedapp.metrics import larger_is_better, mean_interval
from fedapp.report.page import arrow, figures, page, quiet, strong, table
from fedapp.report.plots import Drawing, tradeoff
from fedapp.report.summary import (
    COMMON,
    COST_NAMES,
    cost_cells,
    defined,
    enumerated,
    human_bytes,
    human_seconds,
    score_cells,
    score_text,
    terminal_table,
)
from fedapp.report.template import elements
from fedapp.settings import Value

ONE_PLACE = (
    "pooled: all rows and columns in one place. A party's rows alone: trained on these. A party's "
    "columns alone: what the party that has the labels reaches without the others' columns."
)
N_ORDERS = 10  # of the training rows, for the range of pooled XGBoost's scores
INTERVALS = (
    "95 % intervals. Over runs: Student's, of the mean difference on the same seeds and folds. "
    "Over test rows: of the difference on the same rows, if others had been drawn; of unweighted "
    "rows and models here only. What is shown follows from the runs, or a single run's rows."
)
NO_ENDS = (math.nan, math.nan)
BEHIND, AHEAD, NO_DIFFERENCE = "behind", "ahead", "no difference"
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
    # By method and line: how much its score is more, and the ends of the 95 % interval over test
    # rows. Without methods whose model is divided.
    differences: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)

    @property
    def folded(self) -> Comparison:
        """With mean, best and worst in place of more than ``MOST_ALONE`` parties' lines."""
        groups: dict[str, list[Line]] = {}
        renamed: dict[str, str] = {}
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
            for line, rank in ((group[0], "best"), (group[-1], "worst")):
                renamed[line.name] = f"{line.name}, {rank} of {n_parties}"
                lines.append(replace(line, name=renamed[line.name]))
        differences = {
            method: {renamed.get(name, name): span for name, span in spans.items()}
            for method, spans in self.differences.items()
        }
        return replace(self, lines=best_first(lines, self.metric), differences=differences)

    @property
    def best(self) -> Line:
        """The best method."""
        return next(line for line in self.lines if line.n_bytes is not None)

    @property
    def metrics(self) -> list[str]:
        """The watched score, and up to two others."""
        others = (name for name in COMMON if name in self.lines[0].others)
        return list(dict.fromkeys([self.metric, *others]))[:3]

    @property
    def records(self) -> list[dict[str, Any]]:
        """A record per line, best first: means, differences to the best strategy, costs."""
        best, nothing = self.best, (math.nan,) * 3
        of_rows = self.differences.get(best.name, {})
        records = []
        for line in self.lines:
            pairs = Line("", tuple(np.subtract(line.scores, best.scores).tolist()))
            low, high = mean_interval(np.array(pairs.scores))
            _, rows_high, rows_low = (-end for end in of_rows.get(line.name, nothing))
            ends = (rows_low, rows_high) if np.isnan(low) else (low, high)
            ties = None if np.isnan(ends).any() else ends[0] <= 0 <= ends[1]
            others = {name: line.others.get(name, np.nan) for name in self.metrics[1:]}
            means = {name: float(np.mean(scores)) for name, scores in others.items()}
            records.append(
                {"strategy": line.name, self.metric: line.mean, "sd": line.spread, **means}
                | {"difference": pairs.mean, "difference_sd": pairs.spread}
                | {"runs_low": low, "runs_high": high}
                | {"rows_low": rows_low, "rows_high": rows_high}
                | {"ties": ties, "is_best": line is best}
                | {"seconds": line.seconds, "exchanges": line.exchanges, "bytes": line.n_bytes}
            )
        return records

    @property
    def document(self) -> dict[str, Any]:
        """All of it, as in ``comparison.json``."""
        return asdict(self) | {"verdict": self.verdict, "table": self.records}

    @property
    def verdict(self) -> str:
        """What is shown of the best method beside the other lines, in a sentence."""
        name, n_runs = self.best.name, len(self.best.scores)
        n_alone = Counter(line.alone for line in self.lines)
        pairs = sorted(
            zip(self.lines, self.records, strict=True),
            key=lambda pair: (bool(pair[0].alone), pair[0].n_bytes is None),
        )
        groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}  # parties alone are one
        for line, record in pairs:
            if result := shown(record, self.metric):
                groups.setdefault((result, line.alone or line.name), []).append(record)
        others: dict[str, list[str]] = {BEHIND: [], AHEAD: [], NO_DIFFERENCE: []}
        for (result, group), records in groups.items():
            other, by = records[0]["strategy"], [abs(record["difference"]) for record in records]
            low, high = sorted(map(abs, _ends(records[0])))
            gap = f"{score_text(by[0])} ({score_text(low)} to {score_text(high)})"
            if (n := n_alone[group]) and len(by) > 1:
                other = f"{'all' if len(by) == n else f'{len(by)} of'} {n} parties' {group}"
                gap = f"{score_text(min(by))} to {score_text(max(by))}"
            other = f"{' ('.join(other.rsplit(', ', 1))})" if n else other
            others[result].append(other if result == NO_DIFFERENCE else f"{other} by {gap}")
        words = {
            BEHIND: f"{name} is ahead of {{}}",
            AHEAD: f"{name} is behind {{}}",
            NO_DIFFERENCE: f"no difference is shown between {name} and {{}}",
        }
        clauses = [
            words[result].format(enumerated(names, "or" if result == NO_DIFFERENCE else "and"))
            for result, names in others.items()
            if names
        ]
        if not clauses:
            return f"{name} has the best test {self.metric}; of one run, no interval is known."
        over = f"over {n_runs} runs" if n_runs > 1 else "over test rows, of one run"
        return f"By test {self.metric}, {'; '.join(clauses)} (95 % intervals {over})."

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
        for method, unread in self.unread.items() if partly else ():
            read = self._named(partly - set(unread)) or "nothing more"
            not_read = f"; does not read {', '.join(unread)}" if unread else ""
            facts[method] = f"also reads {read}{not_read}"
        return facts

    def _named(self, names: Collection[str]) -> str:
        return ", ".join(f"{name}={self.changed[name]}" for name in self.changed if name in names)


def shown(record: Mapping[str, Any], metric: str) -> str:
    """What the interval shows of a line beside the best method: empty of that, or without one."""
    if record["ties"] is None or record["is_best"]:
        return ""
    if record["ties"]:
        return NO_DIFFERENCE
    return AHEAD if (record["difference"] > 0) == larger_is_better(metric) else BEHIND


def _ends(record: Mapping[str, Any]) -> list[float]:
    """The interval that decides, see ``INTERVALS``."""
    kind = "runs" if defined(record, "runs_low") else "rows"
    return [record[f"{kind}_low"], record[f"{kind}_high"]]


def score_tables(records: Records) -> list[Table | str]:
    """For a terminal the lines, then their differences to the best method if any is known."""
    header, *rows = _cells(records)
    scores = terminal_table(header, rows, bold=0)
    header, *rows = _differences(records)
    return [scores, "", terminal_table(header, rows, 2)] if rows else [scores]


def score_html(records: Records) -> str:
    """The lines as a table of a page; the best one is bold."""
    header, best, *others = _cells(records)
    return table(header, [[strong(cell) for cell in best], *others])


def difference_html(records: Records) -> str:
    """Differences to the best method as a table of a page; empty if no interval is known."""
    header, *rows = _differences(records)
    return table(header, rows, 2) + quiet(INTERVALS) if rows else ""


def _differences(records: Records) -> list[list[str]]:
    """The header, and a row for each line with an interval."""
    metric = list(records[0])[1]
    best = next(record["strategy"] for record in records if record["is_best"])
    kinds = {"runs": "over runs", "rows": "over test rows"}
    kinds = {k: head for k, head in kinds.items() if any(defined(r, f"{k}_low") for r in records)}
    rows = [["", "shown", f"{arrow(metric)} less {best}", *kinds.values()]]
    for record in records:
        if result := shown(record, metric):
            spans = [
                f"{record[f'{kind}_low']:+.4f} to {record[f'{kind}_high']:+.4f}"
                if defined(record, f"{kind}_low")
                else score_text(None)
                for kind in kinds
            ]
            rows.append([record["strategy"], result, f"{record['difference']:+.4f}", *spans])
    return rows


def tradeoff_page(comparison: Comparison) -> str:
    """The comparison as HTML: tables, and figures of scores against costs."""
    whole, comparison = comparison, comparison.folded
    facts = list(comparison.facts.items())
    run_rows = [
        ([elements.link(run)], {name: scores[index] for name, scores in line.others.items()})
        for line in comparison.lines
        for index, run in enumerate(line.runs)
    ]
    names, runs = score_cells(run_rows, comparison.metrics)
    head = ["run", *map(arrow, names)]
    records = comparison.records
    sections = {
        "Differences to the best method": difference_html(records),
        "Test scores and cost": score_html(records) + quiet(ONE_PLACE),
        "Every run": table(head, runs) if runs else "",
        "What is compared": table(["", "of every line, or of a method"], facts, 2),
        "Trade-offs": figures(cost_figures(comparison)),
    }
    title = f"{sum(map(len, comparison.methods.values()))} strategies compared"
    subtitle = f"{comparison.data} · {comparison.n_rows['test']:,} test rows"
    return page(title, subtitle, sections, lead=whole.verdict)


def cost_figures(comparison: Comparison) -> dict[str, Drawing]:
    """Figures of scores against costs, by caption."""
    lines, metric, best = comparison.lines, comparison.metric, comparison.best
    federated = [line for line in lines if line.n_bytes is not None]
    ends = {
        record["strategy"]: tuple(best.mean + np.array(_ends(record), dtype=float))
        if shown(record, metric)
        else NO_ENDS
        for record in comparison.records
    }
    bars = ""
    if any(ends[line.name] != NO_ENDS for line in federated):
        bars = f" Bars: 95 % interval of the difference to {best.name}."
    images = {}
    for cost, words, name, show in COSTS:
        spent = [
            (line.name, getattr(line, name) or 0.0, line.mean, ends[line.name])
            for line in federated
        ]
        caption = f"Test {arrow(metric)} of every strategy against {words}, on a logarithmic scale."
        images[caption + bars] = tradeoff(spent, cost, metric, show)
    return images


def _cells(records: Records) -> list[list[str]]:
    """The header of the table, and a row for each record; NaN may be None, as in JSON."""
    _, metric, _, *names = records[0]
    others = names[: names.index("difference")]
    head = ["strategy", arrow(metric), "±", *map(arrow, others)]
    rows = [[*head, *COST_NAMES]]
    names = [metric, "sd", *others]
    _, cells = score_cells([([record["strategy"]], record) for record in records], names)
    for record, row in zip(records, cells, strict=True):
        rows.append(row + cost_cells(record))
    return rows
