"""The page that compares several runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedapp.errors import DataError
from fedapp.metrics import AT_THRESHOLD, is_metric, larger_is_better
from fedapp.report import curve_plots
from fedapp.report.comparison_plots import compared_scores
from fedapp.report.markup import Name, Strong, arrow, escaped, figures, page, section, table
from fedapp.report.scored_rows import row_warnings
from fedapp.report.summary import (
    Run,
    Scores,
    drawn_metrics,
    human_bytes,
    human_seconds,
    metric_of,
    row_counts,
    score_names,
    score_text,
)
from fedapp.report.tradeoff import Line, cost_figures
from fedapp.settings import flatten

Named = Mapping[str, Run]
# A run's location, and settings that the table of runs shows.
STATED = {"run-dir", "resume", "strategy", "data", "parties", "seed"}


def comparison_page(runs: Sequence[Run]) -> str:
    """HTML page of two runs or more; DataError if they differ in their objective."""
    objectives = sorted({run.summary["objective"] for run in runs})
    if len(objectives) > 1:
        raise DataError(f"runs must share one objective, got {', '.join(objectives)}")
    named = named_runs(runs)
    warnings = [f'<p class="warning">{escaped(line)}</p>' for line in row_warnings(named)]
    rounds = {name: run.rounds for name, run in named.items() if run.rounds}
    curves = {
        f"{arrow(metric)} by boosting round": compared_scores(rounds, metric)
        for metric in drawn_metrics(runs)
    }
    rocs = {name: (run.summary.get("curves") or {}).get("roc") for name, run in named.items()}
    drawn = {name: roc for name, roc in rocs.items() if roc and roc["fpr"]}
    roc_figures = {"ROC curves": curve_plots.roc(drawn, legend_below=True)} if drawn else {}
    sections = [
        *warnings,
        section("Scores on test rows", _scores(named)),
        section("What is compared", _facts(named)),
        section("Cost", _costs(named)),
        section("Trade-offs", figures(_trade_offs(named))),
        section("Training", figures(curves)),
        section("Predictions", figures(roc_figures)),
        section("Settings that differ", _differences(named)),
    ]
    data = " · ".join(dict.fromkeys(run.summary["data"] for run in runs))
    return page(f"{len(runs)} runs compared", data, sections)


def named_runs(runs: Sequence[Run]) -> dict[str, Run]:
    """Runs by the names of their folders, with a number where two agree."""
    folders = [run.path.resolve().name for run in runs]
    names = [
        f"{name} ({folders[: i + 1].count(name)})" if folders.count(name) > 1 else name
        for i, name in enumerate(folders)
    ]
    return dict(zip(names, runs, strict=True))


def _facts(named: Named) -> str:
    rows = []
    for name, run in named.items():
        counts, summary = row_counts(run.summary), run.summary
        n_train = counts.get("train", sum(party["rows"] for party in summary["parties"]))
        n_test = f"{counts['test']:,}" if "test" in counts else "not known"
        cells = n_test, f"{n_train:,}", f"{len(summary['parties'])}", f"{summary.get('seed', '')}"
        rows.append([Name(name), Name(summary["strategy"]), Name(summary["data"]), *cells])
    header = ["run", "strategy", "data", "rows scored", "training rows", "parties", "seed"]
    return table(header, rows, n_texts=3)


def _scores(named: Named) -> str:
    """Scores of each run and its pooled baseline; the best run of each column is bold."""
    tests: dict[str, Scores] = {
        n: run.summary["metrics"].get("test") or {} for n, run in named.items()
    }
    names = [name for name in score_names(list(tests.values())) if name not in AT_THRESHOLD]
    best = {}  # the best value of each metric, as shown
    for name in filter(is_metric, names):
        defined = [score for each in tests.values() if (score := _known(each, name)) is not None]
        if defined:
            best[name] = score_text(max(defined) if larger_is_better(name) else min(defined))
    rows = []
    for run_name, run in named.items():
        texts = {name: score_text(tests[run_name].get(name)) for name in names}
        cells = [Strong(text) if text == best.get(name) else text for name, text in texts.items()]
        rows.append([Name(run_name), Name(run.summary["strategy"]), *cells])
        pooled = (run.summary.get("baselines") or {}).get("pooled")
        if pooled:
            texts = {name: score_text(pooled.get(name)) for name in names}
            rows.append(["", Name("pooled baseline"), *texts.values()])
    return table(["run", "strategy", *map(arrow, names)], rows, n_texts=2)


def _costs(named: Named) -> str:
    rows = []
    for name, run in named.items():
        summary, traffic = run.summary, run.summary["bytes"]
        counts = (summary["trees"], summary["exchanges"])
        sizes = (human_bytes(traffic[way]) for way in ("to_parties", "to_server"))
        seconds = human_seconds(summary["seconds"]["total"])
        rows.append([Name(name), *(f"{count:,}" for count in counts), *sizes, seconds])
    header = ["run", "trees", "exchanges", "to parties", "to server", "time"]
    return table(header, rows)


def _trade_offs(named: Named) -> dict[str, str]:
    """Scores of the early-stopping metric against costs; empty if fewer than two runs have it."""
    metric = metric_of(next(iter(named.values())).summary)
    lines = []
    for name, run in named.items():
        summary, pooled = run.summary, (run.summary.get("baselines") or {}).get("pooled") or {}
        if (score := _known(summary["metrics"].get("test") or {}, metric)) is not None:
            seconds = summary["seconds"].get("train", summary["seconds"]["total"])
            costs = seconds, summary["exchanges"], sum(summary["bytes"].values())
            lines.append(Line(name, (score,), *costs))
        if (score := _known(pooled, metric)) is not None:
            lines.append(Line(f"{name}, pooled", (score,)))
    if sum(line.n_bytes is not None for line in lines) < 2:
        return {}
    lines.sort(key=lambda line: line.mean, reverse=larger_is_better(metric))
    return cost_figures(lines, metric, "run")


def _known(scores: Scores, metric: str) -> float | None:
    """A score, or None if it is absent or undefined."""
    value = scores.get(metric)
    return None if value is None or math.isnan(value) else value


def _differences(named: Named) -> str:
    """Settings that some run reads and that differ, in the first run's order."""
    unread = [run for run in named.values() if run.summary.get("settings_read") is None]
    read = {key for run in named.values() for key in run.summary.get("settings_read") or ()}
    flat = {name: flatten(run.config) for name, run in named.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    shown = [key for key in keys if key not in STATED and (unread or key in read)]
    rows = [[key, *(str(each.get(key, "not set")) for each in flat.values())] for key in shown]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "<p>None.</p>"
    return table(["setting", *named], differing, n_texts=1 + len(named))
