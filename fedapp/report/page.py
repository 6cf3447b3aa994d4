"""The report of a run, or of several side by side: one HTML file that needs no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedapp import metrics
from fedapp.config import flatten
from fedapp.errors import DataError
from fedapp.report import comparison, plots
from fedapp.report.markup import Strong, arrow, escaped, figures, folded, page, section, table
from fedapp.report.summary import (
    Run,
    drawn_metrics,
    human_bytes,
    human_seconds,
    read_run,
    score_names,
    score_rows,
    score_text,
    warning_lines,
)

DEPLOYMENT = "deployment"
# Settings of a table that is split among simulated parties; sites have tables of their own.
OF_SIMULATED_TABLES = {"data", "label", "id", "weight", "drop-columns", "partition", "columns"}


def write_report(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of one run, or one that compares several.

    Parameters
    ----------
    run_dirs : folders of finished runs, at least one
    output : the file to write; by default report.html in the folder of a single run,
        comparison.html in the current folder for several

    Returns
    -------
    The file written.

    Raises
    ------
    DataError : there is no run, a folder holds none, or the runs differ in their objective.
    """
    if not run_dirs:
        raise DataError("a report must have at least one run folder, got none")
    runs = [read_run(path) for path in run_dirs]
    alone = len(runs) == 1
    text = _run_page(runs[0]) if alone else comparison.comparison_page(runs)
    if output is None:
        output = runs[0].path / "report.html" if alone else Path("comparison.html")
    output.write_text(text, encoding="utf-8")
    return output


def _run_page(run: Run) -> str:
    summary = run.summary
    versions = ", ".join(f"{name} {v}" for name, v in summary.get("versions", {}).items())
    known = {"model": summary.get("model_id"), "engine": summary.get("engine")}
    known |= {"seed": summary.get("seed"), "versions": versions or None}
    parts = [
        _warnings(run),
        _key_numbers(summary),
        section("Result", _result(summary)),
        section("Training", figures(_training(run))),
        section("Model", _model(summary)),
        section("Traffic", _traffic(run.ledger)),
        section("What was run", _setup(run)),
    ]
    subtitle = " · ".join(f"{k} {v}" for k, v in known.items() if v is not None)
    return page(f"{summary['strategy']} on {summary['data']}", subtitle, parts)


def _warnings(run: Run) -> str:
    lines = warning_lines(run.summary)
    asked = run.rounds[-1].get("rounds", 0) if run.rounds else 0
    if run.rounds and run.rounds[-1]["round"] < asked:
        best = run.summary.get("best_round")
        scored = f"; the best was round {best}" if best is not None else ""
        done = run.rounds[-1]["round"]
        lines.append(f"training ended early, after {done} of {asked} rounds{scored}")
    return "\n".join(f'<p class="warning">{escaped(line)}</p>' for line in lines)


def _key_numbers(summary: Mapping[str, Any]) -> str:
    metric = metrics.default_metric(summary["objective"])
    test = summary["metrics"].get("test") or {}
    values = {f"test {metric}": score_text(test[metric])} if metric in test else {}
    values |= {"trees": f"{summary['trees']:,}", "exchanges": f"{summary['exchanges']:,}"}
    if summary.get("matched_rows"):
        values["rows matched"] = f"{sum(summary['matched_rows'].values()):,}"
    values |= {
        f"sent {way.replace('_', ' ')}": human_bytes(n) for way, n in summary["bytes"].items()
    }
    values |= {f"time, {name}": human_seconds(s) for name, s in summary["seconds"].items()}
    cells = (f"<div><dt>{escaped(k)}</dt><dd>{escaped(v)}</dd></div>" for k, v in values.items())
    return f"<dl>{''.join(cells)}</dl>"


def _result(summary: Mapping[str, Any]) -> str:
    rows = score_rows(summary)
    names = score_names([scores for _, _, scores in rows])
    cells = []
    for model, split, scores in rows:
        texts = [model, split, *(score_text(scores.get(name)) for name in names)]
        ours = (model, split) == ("federated", "test")
        cells.append([Strong(text) for text in texts] if ours else texts)
    note = (
        '<p class="quiet">pooled: trained on what all parties have, in one place. '
        "alone: on what that party has.</p>"
        if summary.get("baselines")
        else ""
    )
    return table(["model", "rows", *map(arrow, names)], cells, n_texts=2) + note


def _training(run: Run) -> dict[str, str]:
    if not run.rounds:
        return {}
    best = run.summary.get("best_round")
    images = {
        f"{arrow(name)} by boosting round": plots.scores_by_tree(run.rounds, name, best)
        for name in drawn_metrics([run])
    }
    images["Bytes sent in each round"] = plots.traffic_by_tree(run.rounds)
    images["Exchanges and seconds of each round"] = plots.effort_by_tree(run.rounds)
    return images


def _curves(summary: Mapping[str, Any]) -> dict[str, str]:
    curves = summary.get("curves") or {}
    images = {}
    if (curves.get("roc") or {}).get("fpr"):
        images["ROC curve"] = plots.roc({"federated": curves["roc"]})
    if curves.get("confusion"):
        images["Confusion matrix: rows of each true class by predicted class"] = plots.confusion(
            curves["confusion"]
        )
    if curves.get("residuals"):
        edges, counts = curves["residuals"]["edges"], curves["residuals"]["counts"]
        caption = "Residuals; the outer bars of the histogram hold all that lies beyond"
        images[caption] = plots.residuals(edges, counts)
    return images


def _model(summary: Mapping[str, Any]) -> str:
    """What the model predicts and what it rests on; the columns' full names are in a table."""
    importance = summary.get("importance") or {}
    gains, counts = importance.get("gain") or {}, importance.get("count") or {}
    if not gains:
        return figures(_curves(summary) | _learned(summary))
    ordered = sorted(gains, key=gains.__getitem__, reverse=True)
    shown = f"first 20 of {len(gains)}" if len(gains) > 20 else f"all {len(gains)} that it uses"
    images = _curves(summary) | {f"Gain by column, {shown}": plots.importance(gains)}
    if counts:
        images |= {f"Splits by column, {shown}": plots.importance(counts, "splits")}
    images |= _learned(summary)
    rows = [[name, f"{gains[name]:.6g}", f"{counts.get(name, 0):,}"] for name in ordered]
    columns = folded("Gain and splits of every column", table(["column", "gain", "splits"], rows))
    return figures(images) + columns


def _learned(summary: Mapping[str, Any]) -> dict[str, str]:
    """What a method says of its model beside scores."""
    images = {}
    if rates := summary.get("learning_rates"):
        caption = "Learned rate of each tree; Z is the mean of a party"
        images[caption] = plots.learning_rates(rates["trees"], rates["parties"])
    if purity := summary.get("leaf_purity"):
        caption = (
            "Share of the majority class among rows that end together: in the leaves, and in what "
            "each passive party can tell apart. It could guess labels no better than by this share"
        )
        images[caption] = plots.purity(purity)
    return images


def _traffic(ledger: Sequence[Mapping[str, Any]]) -> str:
    """A table of message types and a figure of parties, both summed from the ledger."""
    types: dict[str, list[int]] = {}
    parties: dict[str, list[int]] = {}
    for message in ledger:
        is_up, size = message["to"] == "server", message["bytes"]
        counts = types.setdefault(message["type"], [0, 0, 0])
        sizes = parties.setdefault(message["from"] if is_up else message["to"], [0, 0])
        counts[0] += 1
        counts[1 + is_up] += size
        sizes[is_up] += size
    if not types:
        return ""
    rows = [*sorted(types.items()), ("all", [sum(c) for c in zip(*types.values(), strict=True)])]
    cells = [[name, f"{n:,}", human_bytes(down), human_bytes(up)] for name, (n, down, up) in rows]
    cells[-1] = [Strong(cell) for cell in cells[-1]]
    by_party = {"Bytes by party": plots.traffic_by_party(dict(sorted(parties.items())))}
    return table(["message", "count", "to parties", "to server"], cells) + figures(by_party)


def _setup(run: Run) -> str:
    sizes = {party["name"]: party["rows"] for party in run.summary["parties"]}
    parties = [[name, f"{n_rows:,}"] for name, n_rows in sizes.items()]
    known = flatten(run.config)
    if run.summary.get("engine") == DEPLOYMENT:
        known = {name: value for name, value in known.items() if name not in OF_SIMULATED_TABLES}
    settings = [[name, str(value)] for name, value in known.items()]
    return table(["party", "rows"], parties) + table(["setting", "value"], settings, n_texts=2)
