"""The page that sets several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedapp.config import flatten
from fedapp.errors import DataError
from fedapp.metrics import BETTER
from fedapp.report import curve_plots, plots
from fedapp.report.markup import Strong, arrow, figures, page, section, table
from fedapp.report.summary import (
    Run,
    Scores,
    drawn_metrics,
    human_bytes,
    human_seconds,
    score_names,
    score_text,
)

Named = Mapping[str, Run]


def comparison_page(runs: Sequence[Run]) -> str:
    """HTML page of two runs or more.

    Raises
    ------
    DataError : the runs differ in their objective.
    """
    objectives = sorted({run.summary["objective"] for run in runs})
    if len(objectives) > 1:
        raise DataError(f"runs must share one objective, got {', '.join(objectives)}")
    named = dict(zip(_names(runs), runs, strict=True))
    parts = [
        section("Scores on test rows", _scores(named)),
        section("Cost", _costs(named)),
        section("Training", figures(_curves(named))),
        section("Predictions", figures(_rocs(named))),
        section("Settings that differ", _differences(named)),
    ]
    data = " · ".join(dict.fromkeys(run.summary["data"] for run in runs))
    return page(f"{len(runs)} runs compared", data, parts)


def _names(runs: Sequence[Run]) -> list[str]:
    """A short name for each run: its folder's, with a number where two agree."""
    folders = [run.path.resolve().name for run in runs]
    return [
        f"{name} ({folders[: i + 1].count(name)})" if folders.count(name) > 1 else name
        for i, name in enumerate(folders)
    ]


def _scores(named: Named) -> str:
    """Each run's scores, the best of a column in bold, with its pooled baseline below it."""
    tests: dict[str, Scores] = {
        n: run.summary["metrics"].get("test") or {} for n, run in named.items()
    }
    names = score_names(list(tests.values()))
    best = {name: _best(name, list(tests.values())) for name in names}
    rows = []
    for run_name, run in named.items():
        texts = {name: score_text(tests[run_name].get(name)) for name in names}
        cells = [Strong(text) if text == best[name] else text for name, text in texts.items()]
        rows.append([run_name, run.summary["strategy"], run.summary["data"], *cells])
        pooled = (run.summary.get("baselines") or {}).get("pooled")
        if pooled:
            texts = {name: score_text(pooled.get(name)) for name in names}
            rows.append(["", "pooled baseline", "", *texts.values()])
    return table(["run", "strategy", "data", *map(arrow, names)], rows, n_texts=3)


def _best(metric: str, scores: Sequence[Scores]) -> str:
    """The best value of a metric, as shown; empty where there is none."""
    values = [each.get(metric) for each in scores]
    known = [value for value in values if value is not None and not math.isnan(value)]
    if metric not in BETTER or not known:
        return ""
    return score_text(max(known) if BETTER[metric] else min(known))


def _costs(named: Named) -> str:
    rows = []
    for name, run in named.items():
        summary, traffic = run.summary, run.summary["bytes"]
        counts = (len(summary["parties"]), summary["trees"], summary["exchanges"])
        sizes = (human_bytes(traffic[way]) for way in ("to_parties", "to_server"))
        seconds = human_seconds(summary["seconds"]["total"])
        rows.append([name, *(f"{count:,}" for count in counts), *sizes, seconds])
    header = ["run", "parties", "trees", "exchanges", "to parties", "to server", "time"]
    return table(header, rows)


def _curves(named: Named) -> dict[str, str]:
    rounds = {name: run.rounds for name, run in named.items() if run.rounds}
    return {
        f"{arrow(metric)} by boosting round": plots.compared_scores(rounds, metric)
        for metric in drawn_metrics(list(named.values()))
    }


def _rocs(named: Named) -> dict[str, str]:
    rocs = {name: (run.summary.get("curves") or {}).get("roc") for name, run in named.items()}
    drawn = {name: roc for name, roc in rocs.items() if roc and roc["fpr"]}
    return {"ROC curves": curve_plots.roc(drawn)} if drawn else {}


def _differences(named: Named) -> str:
    """Settings that are not the same in every run, in the order of the first run's."""
    flat = {name: flatten(run.config) for name, run in named.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    rows = [[key, *(str(each.get(key, "not set")) for each in flat.values())] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if not differing:
        return "<p>None.</p>"
    return table(["setting", *named], differing, n_texts=1 + len(named))
