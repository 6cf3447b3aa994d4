"""The report of a run, or a comparison of several, as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedapp.errors import DataError
from fedapp.home import open_private, write_atomically
from fedapp.report import comparison, model, plots
from fedapp.report.card import CARD, model_card
from fedapp.report.markup import (
    Name,
    Strong,
    arrow,
    escaped,
    figures,
    folded,
    page,
    quiet,
    section,
    table,
)
from fedapp.report.scored_rows import DEPLOYMENT, row_warnings
from fedapp.report.summary import (
    Run,
    drawn_metrics,
    fact_lines,
    human_bytes,
    human_seconds,
    metric_of,
    read_run,
    resolved_facts,
    score_text,
    warning_lines,
)
from fedapp.settings import defaults, flatten

LEVEL = "level"
HEADED = {"strategy", "run-dir", "resume"}  # in the page's title, or its location
# Settings of the table that a simulation splits among parties; sites bring their tables.
OF_SIMULATED_TABLES = {"data", "label", "id", "weight", "drop-columns", "partition", "columns"}


def write_report(run_dirs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page and model card of one run, or a page that compares several; returns its path.

    `output` defaults to report.html in the folder of a single run, or to comparison.html in the
    current folder.

    Raises
    ------
    DataError : there is no run, a folder is not a run's, or the runs differ in their objective.
    """
    if not run_dirs:
        raise DataError("a report must have at least one run folder, got none")
    runs = [read_run(path) for path in run_dirs]
    is_single = len(runs) == 1
    text = _run_page(runs[0]) if is_single else comparison.comparison_page(runs)
    if output is None:
        output = runs[0].path / "report.html" if is_single else Path("comparison.html")
    if is_single:
        write_atomically(runs[0].path / CARD, model_card(runs[0]).encode())
    with open_private(output, "w") as file:
        file.write(text)
    return output


def compared_warnings(run_dirs: Sequence[Path]) -> list[str]:
    """Why the scores of several runs are not comparable; DataError for an invalid folder."""
    return row_warnings(comparison.named_runs([read_run(path) for path in run_dirs]))


def _run_page(run: Run) -> str:
    summary = run.summary
    versions = ", ".join(f"{name} {v}" for name, v in summary.get("versions", {}).items())
    facts = {"model": summary.get("model_id"), "engine": summary.get("engine")}
    facts |= {"seed": summary.get("seed"), "versions": versions or None}
    lines = warning_lines(run.summary)
    n_rounds = run.rounds[-1].get("rounds", 0) if run.rounds else 0
    # A forest's rounds are levels; it stops when no node can be split, which is not early.
    if run.rounds and run.rounds[-1]["round"] < n_rounds and _round_name(run.summary) != LEVEL:
        best = run.summary.get("best_round")
        scored = f"; the best was round {best}" if best is not None else ""
        done = run.rounds[-1]["round"]
        lines.append(f"training ended early, after {done} of {n_rounds} rounds{scored}")
    chosen = [f"{k}: {v}" for k, v in resolved_facts(summary).items() if k != "boosting"]
    read = "".join(f"<li>{escaped(line)}</li>" for line in (*chosen, *fact_lines(summary)))
    sections = [
        "\n".join(f'<p class="warning">{escaped(line)}</p>' for line in lines),
        _key_numbers(summary),
        section("Scores", model.scores(summary)),
        section("How the tables were read", f"<ul>{read}</ul>" if read else ""),
        section("Predictions", model.predictions(summary)),
        section("What the model rests on", model.foundations(run)),
        section("Training", figures(_training(run))),
        section("Traffic", _traffic(run.ledger)),
        section("What was run", _setup(run)),
    ]
    subtitle = " · ".join(f"{k} {v}" for k, v in facts.items() if v is not None)
    return page(f"{summary['strategy']} on {summary['data']}", subtitle, sections)


def _key_numbers(summary: Mapping[str, Any]) -> str:
    metric = metric_of(summary)
    test = summary["metrics"].get("test") or {}
    values = {f"test {metric}": score_text(test[metric])} if metric in test else {}
    if summary["trees"]:
        values["trees"] = f"{summary['trees']:,}"
    values["exchanges"] = f"{summary['exchanges']:,}"
    if summary.get("matched_rows"):
        values["rows matched"] = f"{sum(summary['matched_rows'].values()):,}"
    values |= {
        f"sent {way.replace('_', ' ')}": human_bytes(n) for way, n in summary["bytes"].items()
    }
    values |= {f"time, {name}": human_seconds(s) for name, s in summary["seconds"].items()}
    cells = (f"<div><dt>{escaped(k)}</dt><dd>{escaped(v)}</dd></div>" for k, v in values.items())
    return f"<dl>{''.join(cells)}</dl>"


def _training(run: Run) -> dict[str, str]:
    if not run.rounds:
        return {}
    name, best = _round_name(run.summary), run.summary.get("best_round")
    images = {
        f"{arrow(metric)} by {name}": plots.scores_by_round(run.rounds, metric, best, name)
        for metric in drawn_metrics([run])
    }
    images[f"Bytes sent in each {name}"] = plots.traffic_by_round(run.rounds, name)
    images[f"Exchanges and seconds of each {name}"] = plots.effort_by_round(run.rounds, name)
    return images


def _round_name(summary: Mapping[str, Any]) -> str:
    return str(summary.get("round_name", plots.ROUND))


def _traffic(ledger: Sequence[Mapping[str, Any]]) -> str:
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
    parties = [[Name(party["name"]), f"{party['rows']:,}"] for party in run.summary["parties"]]
    head, usual = ["setting", "value"], defaults()
    read, in_deployment = run.summary.get("settings_read"), run.summary.get("engine") == DEPLOYMENT
    changed, unchanged = [], []
    for name, value in flatten(run.config).items():
        is_read = read is None or name in read
        is_elsewhere = name in HEADED or (in_deployment and name in OF_SIMULATED_TABLES)
        if value == "" or not is_read or is_elsewhere:
            continue
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if value != usual.get(name):
            changed.append((name, Strong(text)))
        else:
            unchanged.append((name, text))
    unchanged_title = "The other settings that this method reads, at their defaults"
    boosting = resolved_facts(run.summary).get("boosting")
    return (
        (quiet(f"Boosting: {boosting}.") if boosting else "")
        + (table(head, changed, n_texts=2) if changed else quiet("All settings are the defaults."))
        + (folded(unchanged_title, table(head, unchanged, n_texts=2)) if unchanged else "")
        + table(["party", "rows"], parties)
    )
