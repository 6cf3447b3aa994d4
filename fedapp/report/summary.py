"""A run's folder in words.

The terminal's summary, the facts and scores of every page, and the table of a search.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedapp.data.schema import first
from fedapp.errors import as_plain
from fedapp.home import display_path
from fedapp.messages.methods import method_of
from fedapp.metrics import AT_THRESHOLD, larger_is_better, watched_metric
from fedapp.metrics.names import UNCALIBRATED
from fedapp.run_files import GAIN, TOTAL_GAIN, Scores, Summary, importance_kind
from fedapp.run_folder import RunFolder
from fedapp.settings import Value, defaults
from fedapp.terminal import one_line

ScoreRow: TypeAlias = tuple[Sequence[str], Scores]  # what a row is of, and its scores

OURS = "federated", "test"  # the row that a table of scores stresses
DEPLOYMENT = "deployment"  # engine whose sites bring their tables
LONGEST = 40  # characters of a name in a sentence
COUNTED = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
PLAIN = ("auc", "accuracy", "rmse")  # scores that a sentence for everyone can state
COST_NAMES = ("train", "exchanges", "bytes")  # names of the last columns of a table of runs
MOST_BASELINES = 5  # in a line
BETTER, WORSE, EQUAL = "better than {}", "worse than {}", "equal to {}"
UNDECIDED = "against {} no difference is shown"
Span = Sequence[float]  # a difference, and the ends of its interval
COMMON = ("logloss", "mlogloss", "accuracy", "rmse", "mae")  # shown beside the watched score


def print_warning(console: Console, text: str) -> None:
    """Print a line after a yellow mark, without interpreting markup."""
    console.print(f"[yellow]![/] {escape(one_line(text))}", highlight=False, soft_wrap=True)


def print_summary(summary: Summary, console: Console, path: Path | None = None) -> None:
    """Print a run's results and costs; `path` is its folder, whose report is named last."""
    console.print()
    strategy, data = escape(summary["strategy"]), escape(summary["data"])
    console.rule(f"[bold]{strategy}[/] on [bold]{data}[/]", style="dim")
    if sentence := headline(summary):
        lines = one_line(sentence), one_line(verdict(summary, metric_of(summary)))
        shown = f"[bold]{escape(lines[0])}[/]", escape(lines[1])
        console.print("\n".join(filter(None, shown)) + "\n", highlight=False)
    console.print(_facts(summary, path))
    console.print()
    console.print(score_table(score_rows(summary)))
    facts = [*score_notes(summary), *summary.get("facts", [])]
    print_notes(console, facts, warning_lines(summary))
    if path is not None and (page := path / "report.html").is_file():
        console.print(f"report: {escape(display_path(page))}", highlight=False, soft_wrap=True)


def print_notes(console: Console, facts: Iterable[str], warnings: Iterable[str]) -> None:
    """Print how tables were read, and warnings after their mark."""
    for line in facts:
        console.print(escape(one_line(line)), style="dim", highlight=False, soft_wrap=True)
    for line in warnings:
        print_warning(console, line)


def headline(summary: Summary) -> str:
    """The result in a sentence for everyone, beside baselines; empty without test scores."""
    test, baselines = summary["metrics"].get("test") or {}, summary.get("baselines") or {}
    metric = next((name for name in PLAIN if defined(test, name)), "")
    if not metric:
        return ""
    parties = baselines.get("alone") or {}
    alone = [score for scores in parties.values() for score in defined(scores, metric)]
    pooled = defined(baselines.get("pooled") or {}, metric)
    ends = (summary.get("intervals") or {}).get(metric) or []
    span = [end for end in ends if end is not None]
    # Near 100 of 100, whole numbers would be equal.
    digits = 1 if max([test[metric], *alone, *pooled]) > 0.985 else 0

    def shown(*values: float) -> str:
        if metric == "rmse":
            texts = [f"{value:,.4g}" for value in values]
        else:
            texts = [f"{100 * value:.{digits}f}" for value in values]
        return " to ".join(dict.fromkeys(texts))

    clauses = [_claim(summary, metric, shown(test[metric]))]
    clauses[0] += f" (95 % interval {shown(*span)})" if span else ""
    clauses[0] += ", by scores with noise" if summary.get("privacy") else ""
    counts = [sum(row) for row in (summary.get("curves") or {}).get("confusion") or []]
    if metric == "accuracy" and any(counts):
        most = shown(max(counts) / sum(counts))
        clauses.append(f"always naming the most frequent class is right for {most}")
    for r2 in defined(test, "r2"):  # compares with the mean of the test rows
        mean = test[metric] / max(1 - r2, 1e-12) ** 0.5
        clauses.append(f"always answering the mean is off by {shown(mean)}")
    if alone:
        who = "alone they reach" if len(parties) > 1 else f"{next(iter(parties))} alone reaches"
        clauses.append(f"{who} {shown(*sorted({min(alone), max(alone)}))}")
    clauses += [f"with all data in one place {shown(*pooled)}"] if pooled else []
    n_parties = len(summary["parties"])
    number = COUNTED[n_parties] if n_parties < len(COUNTED) else f"{n_parties:,}"
    together = "organisation" if n_parties == 1 else "organisations together"
    return f"{number} {together}: {'; '.join(clauses)}."


def _claim(summary: Summary, metric: str, result: str) -> str:
    """What the model does, for ``headline``, with the names of label and classes if recorded."""
    names = [summary.get("label") or "", *(summary.get("classes") or ())]
    label, *classes = (as_plain(str(name), LONGEST) for name in names)
    if metric == "rmse":
        return f"predictions of {label or 'the label'} are typically off by {result}"
    if metric == "accuracy":
        return f"the model names the right {label or 'class'} for {result} of 100 rows"
    sides = "positive row above a negative one"
    if len(classes) == 2:
        kind, preposition = (f"with {label} =", "with") if label else ("of class", "of")
        sides = f"row {kind} {classes[1]} above one {preposition} {classes[0]}"
    return f"the model ranks a {sides} in {result} of 100 pairs"


def defined(scores: Scores, metric: str) -> list[float]:
    """The score, unless it is absent or undefined."""
    value = scores.get(metric)
    return [] if value is None or math.isnan(value) else [value]


def score_rows(summary: Summary) -> list[ScoreRow]:
    """Of a model and a subset of rows: the test rows first, with every baseline."""
    splits = summary["metrics"]
    baselines = by_baseline(summary.get("baselines"), "alone.{}")
    rows: list[ScoreRow] = [(OURS, splits.get("test") or {})]
    rows += [((name, "test"), scores) for name, scores in baselines.items()]
    rows += [(("federated", split), splits.get(split) or {}) for split in ("valid", "train")]
    return [row for row in rows if row[1]]


def score_names(scores: Iterable[Scores]) -> list[str]:
    """Names of all scores, in order of first appearance."""
    return list(dict.fromkeys(name for by_name in scores for name in by_name))


def score_cells(
    rows: Sequence[ScoreRow], names: Sequence[str] = (), digits: int = 4
) -> tuple[Sequence[str], list[list[str]]]:
    """Names of the scores, by default all, and each row's texts and scores, of any table."""
    names = names or score_names(scores for _, scores in rows)
    return names, [
        [*texts, *(score_text(scores.get(name), digits) for name in names)]
        for texts, scores in rows
    ]


def main_names(rows: Sequence[ScoreRow]) -> list[str]:
    """Names of all scores that are not at a chosen threshold."""
    return [n for n in score_names(scores for _, scores in rows) if n not in AT_THRESHOLD]


# What is known of the scores: sampling intervals, differences to baselines, binning


def compared_with(summary: Mapping[str, Any], metric: str) -> dict[str, Span]:
    """Differences of the run's score to those of the pooled model and of each party alone."""
    every = by_baseline((summary.get("baselines") or {}).get("differences"))
    spans = {name: of_metric.get(metric) or [None] for name, of_metric in every.items()}
    return {name: span for name, span in spans.items() if None not in span}


def by_baseline(of: Mapping[str, Any] | None, form: str = "{} alone") -> dict[str, Any]:
    """What is of the pooled model and of each party alone, by the names of the models."""
    every = of or {}
    alone = {form.format(name): values for name, values in (every.get("alone") or {}).items()}
    return {"pooled": every.get("pooled") or {}, **alone}


def verdict(summary: Mapping[str, Any], metric: str) -> str:
    """Which baselines the model is better than, by the differences whose interval excludes 0."""
    outcomes = BETTER, WORSE, EQUAL, UNDECIDED
    clauses: dict[tuple[int, str], list[str]] = {}
    if not (spans := compared_with(summary, metric)):
        return ""
    sign = 1 if larger_is_better(metric) else -1
    for name in sorted(spans, key="pooled".__eq__):  # last
        ends = sorted(sign * end for end in spans[name][1:])
        outcome = 2 if not any(ends) else 0 if ends[0] > 0 else 1 if ends[1] < 0 else 3
        party, _, alone = name.rpartition(" ")
        clauses.setdefault((outcome, alone if party else ""), []).append(party or name)
    texts = []
    for (outcome, alone), names in sorted(clauses.items(), key=lambda clause: clause[0][0]):
        shown = [as_plain(name, LONGEST) for name in names]
        is_long = len(shown) > MOST_BASELINES
        text = first(shown, MOST_BASELINES) if is_long else enumerated(shown)
        texts.append(outcomes[outcome].format(f"{text} {alone}".strip()))
    return f"By {metric} on the same test rows: {'; '.join(texts)}."


def enumerated(names: Sequence[str], word: str = "and") -> str:
    """Names in a sentence: ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def certainty_notes(summary: Mapping[str, Any], watched: str) -> list[str]:
    """Intervals of a run's scores and of their differences to baselines, and errors of binning.

    Of the ``watched`` score also the differences to parties alone.
    """
    lines = []
    if spans := summary.get("intervals"):
        ends = (f"{name} {' to '.join(map(score_text, span))}" for name, span in spans.items())
        lines.append(
            f"95 % intervals, test: {', '.join(ends)}; over samples of as many rows, auc by "
            "DeLong's method, shares of rows by Wilson's, others by bootstrap. Models are scored "
            "on the same rows, so their differences are known better"
        )
    compared = (summary.get("baselines") or {}).get("differences") or {}
    for metric in compared.get("pooled") or ():
        texts = [
            f"{name} {span_text(span)}"
            for name, span in compared_with(summary, metric).items()
            if metric == watched or name == "pooled"
        ]
        less = f"test {metric} less that of a baseline, with 95 % intervals"
        lines.append(f"{less}: {first(texts, MOST_BASELINES)}")
    errors = summary.get("binning_errors") or {}
    if texts := [f"{name} {_rounded_up(error)}" for name, error in errors.items() if error]:
        lines.append(f"scores from bins are this near those of rows: {', '.join(texts)}")
    return lines


def _rounded_up(value: float) -> str:
    """A bound to two significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step) * step:.2g}"


def score_notes(summary: Summary) -> list[str]:
    """How to read the scores: nodes equal to the pooled model's, the threshold, weights."""
    lines, chosen = [], summary.get("threshold")
    if same := (summary.get("baselines") or {}).get("same_nodes"):
        lines.append(
            f"trees: XGBoost's on the joined table, {same[0]:,} of {same[1]:,} nodes equal"
        )
    lines += certainty_notes(summary, metric_of(summary))
    if not chosen and summary["metrics"].get("test", {}).get("threshold") == 0:
        lines.append("no threshold is proposed: calling all rows positive has the best F1")
    if chosen:
        rows = {"valid": "validation", "train": "training"}[chosen["rows"]]
        subset = "test" if summary["metrics"].get("test") else chosen["rows"]
        scores = f"{subset} {at_threshold(summary['metrics'][subset])}"
        value = threshold_text(chosen["value"])
        lines.append(
            f"too few {rows} rows of a class to choose a threshold: use 0.5, not {value} of the "
            "best F1"
            if chosen.get("few")
            else f"threshold {value}, of the best F1 on the {rows} rows; scores at it: {scores}. "
            "accuracy, f1, precision and recall are at 0.5"
        )
    if summary.get("privacy"):
        held_out = {name: summary["metrics"].get(name) or {} for name in ("test", "valid")}
        lost = [f"{s} {name}" for s, of in held_out.items() for name in of if not defined(of, name)]
        lines += [f"not shown, as noise is larger: {', '.join(lost)}"] if lost else []
    if weight := summary.get("weight"):
        lines.append(f"scores are weighted by the column {weight!r}, as training is")
    return lines


def threshold_text(value: float | None) -> str:
    """A probability to four decimals, or to two digits where these would be zeros."""
    return f"{value:.2g}" if value and value < 0.001 else score_text(value)


def at_threshold(scores: Scores) -> str:
    """F1, precision and recall at the run's threshold, in words."""
    names = {name.partition("_")[0]: name for name in AT_THRESHOLD[1:]}
    return ", ".join(f"{short} {score_text(scores.get(name))}" for short, name in names.items())


def scores_by_party(summary: Summary) -> tuple[str, dict[str, Scores]]:
    """The subset of rows (test, else valid, else train), and scores on it by party if sent."""
    metrics = summary["metrics"]
    subset = next((name for name in ("test", "valid", "train") if metrics.get(name)), "test")
    parties = metrics.get("by_party") or {}
    return subset, {name: scores[subset] for name, scores in parties.items() if scores.get(subset)}


def row_counts(summary: Summary) -> dict[str, int]:
    """Rows that train, validate and test over all parties; empty if not recorded."""
    return dict(summary.get("matched_rows") or summary.get("rows") or {})


def metric_of(summary: Summary) -> str:
    """The score that early stopping follows, or would."""
    return watched_metric(summary["objective"], summary.get("eval_metrics") or ())


def drawn_metrics(run: RunFolder) -> list[str]:
    """The two metrics to draw by round: the objective's, then its loss or the next."""
    first = metric_of(run.summary)
    defined = {
        name
        for entry in run.rounds
        for split in ("valid", "train")
        for name, value in entry[split].items()
        if value is not None and not math.isnan(value)
    }
    order = (first, *COMMON, "r2", *sorted(defined))
    return [name for name in dict.fromkeys(order) if name in defined][:2]


def warning_lines(summary: Summary) -> list[str]:
    """The run's warnings and excluded parties."""
    excluded = [
        f"{entry['party']} was excluded from step {entry['step']}: {entry['reason']}"
        for entry in summary.get("left_out", [])
    ]
    return [*summary.get("warnings", []), *excluded]


def read_settings(run: RunFolder) -> Iterator[tuple[str, Value, bool]]:
    """Settings that the run has read, with a value, and whether that is the default."""
    read, usual = run.summary.get("settings_read"), defaults()
    for name, value in run.settings.items():
        if (read is None or name in read) and value != "":
            yield name, value, value == usual.get(name)


def value_text(value: Value) -> str:
    """A setting's value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def resolved_facts(summary: Summary) -> dict[str, str]:
    """What the run chose by itself: objective, classes, matched rows, boosting."""
    facts = {}
    if why := summary.get("objective_reason"):
        facts["objective"] = f"{summary['objective']}: {why}"
    classes: Sequence[str] = summary.get("classes") or ()
    if len(classes) == 2 and tuple(classes) != ("0", "1"):
        facts["classes"] = f"{', '.join(classes)}; scores take {classes[1]} as positive"
    elif (positive := summary.get("positive_label")) and not classes:
        facts["classes"] = f"scores take {positive} as positive"
    if again := summary.get("retrained"):
        rows = ", ".join(f"{name} {n:,}" for name, n in again["rows_left_out"].items())
        facts["retrains"] = (
            f"{again['run']}, without rows: {rows}; ids of none: {again['absent_ids']}"
        )
        facts["trees kept"] = again["trees_kept"]
        same = ", the earlier model's" if again["digest"] == again["earlier_digest"] else ""
        facts["digest"] = (again["digest"] or "none, as the sites have the parts") + same
    if summary.get("matched_rows"):
        matched = summary["matched_rows"]
        facts["matched"] = ", ".join(f"{n:,} {subset}" for subset, n in matched.items())
    facts |= split_facts(summary)
    if rates := matching_rates(summary):
        facts["match rate"] = "; ".join(rates)
    if how := summary.get("boosting"):
        n_rounds, patience = how["num_boost_round"], how["early_stopping_rounds"]
        n_valid = row_counts(summary).get("valid", 0)
        watched = f" of {n_valid:,} validation rows" if n_valid else ""
        stops = f"after {patience} rounds without a better score{watched}" if patience else "off"
        facts["boosting"] = f"{n_rounds} rounds, eta {how['eta']:g}, early stopping {stops}"
        if (scale := how.get("scale_pos_weight", 1)) != 1:
            facts["boosting"] += f", scale-pos-weight {scale:g}"
        if (weight := how.get("min_child_weight", 1)) != 1:
            facts["boosting"] += f", min-child-weight {weight:g}"
    if curve := summary.get("calibration"):
        test = summary["metrics"].get("test") or {}
        losses = [score_text(test.get(name)) for name in (UNCALIBRATED, "logloss")]
        facts["calibration"] = (
            f"{curve['method']}, by {curve['rows']:,} validation rows: test logloss {losses[1]}, "
            f"without it {losses[0]}; exports and SHAP values are without it"
        )
    return facts


def split_facts(summary: Summary) -> dict[str, str]:
    """Which rows test and validate, where groups or times decide."""
    split = dict(summary.get("split") or {})
    by_column = dict[str, list[str]]()
    for party, column in split.pop("together", {}).items():
        by_column.setdefault(column, []).append(party)
    if not by_column and not split.get("test", "").startswith("those"):
        return {}
    groups = "; ".join(
        f"those of one {column} are in one subset"
        + f" at {', '.join(names)}" * (len(names) < len(summary["parties"]))
        for column, names in by_column.items()
    )
    facts = {f"{name} rows": text for name, text in split.items()}
    return facts | ({"rows together": groups} if groups else {})


def matching_rates(summary: Summary) -> list[str]:
    """How many rows of each vertical party were matched, and how many were aggregated to these."""
    lines = []
    for party, counts in (summary.get("matching") or {}).items():
        n_matched, n_rows = counts["matched"], counts["rows"]
        rate = f"{party} {n_matched:,} of {n_rows:,} ({percent_text(n_matched / n_rows)})"
        lines.append(rate + (f", aggregated from {counts['read']:,}" if "read" in counts else ""))
    return lines


def worse_than_alone(summary: Summary, alone: Mapping[str, Scores]) -> list[str]:
    """A warning for each party whose rows alone train a better model."""
    name, lines = metric_of(summary), []
    # 1 / sqrt(n) is twice the largest standard error of a share of n rows, and a part of a loss.
    least = 1 / math.sqrt(row_counts(summary).get("test") or 1)
    for party, scores in alone.items():
        federated, local = summary["metrics"]["test"].get(name), scores.get(name)
        if federated is None or local is None:
            continue
        sign = 1 if larger_is_better(name) else -1
        if sign * (local - federated) > (least if sign > 0 else least * abs(local)):
            lines.append(
                f"test {name} is {score_text(federated)}, and {score_text(local)} of {party} "
                "alone: its rows may be of another kind than the others', or a party may have sent "
                "sums that are not of its rows"
            )
    return lines


def score_text(value: float | None, digits: int = 4) -> str:
    """A score to `digits` decimals, or significant digits from 100 on; undefined is a dash."""
    if value is None or math.isnan(value):
        return "–"  # noqa: RUF001
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.{digits + 2}g}"


def span_text(span: Sequence[float]) -> str:
    """A difference and the ends of its interval: ``+0.0012 (-0.0003 to +0.0027)``."""
    value, low, high = span
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"


def percent_text(share: float) -> str:
    """A share in per cent: ``33%``, ``6.2%``."""
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def human_bytes(n: float) -> str:
    """Bytes in decimal units: ``512 B``, ``1.2 MB``, ``340 GB``."""
    if n < 999.5:
        return f"{n:.0f} B"
    size, unit = n / 1000.0, "kB"
    for larger in ("MB", "GB", "TB"):
        if size >= 999.5:
            size, unit = size / 1000.0, larger
    return f"{size:.1f} {unit}" if size < 99.95 else f"{size:.0f} {unit}"


def importance_text(summary: Summary) -> str:
    """Which importance is shown: the heading of every plot and table of it."""
    kind = importance_kind(summary["strategy"])
    about = {
        GAIN: "mean gain of the splits by a column",
        TOTAL_GAIN: "total gain of the splits by a column",
    }
    return f"Importance: {about[kind]} ({kind} in XGBoost)"


def verb(summary: Summary) -> str:
    """What a run has done: ``trained``, or ``ran`` if it predicts or describes."""
    method = method_of(summary["strategy"])
    return "trained" if method is None or method.trains else "ran"


def times_text(summary: Summary) -> str:
    """When a run began and ended: ``2026-11-28 11:20 to 11:25 UTC``."""
    first, last = (
        f"{datetime.fromisoformat(time).astimezone(UTC):%Y-%m-%d %H:%M}" if time else ""
        for time in (summary.get("started"), summary.get("ended"))
    )
    if first == last != "":
        return f"{first} UTC"
    if first and last:
        return f"{first} to {last[11:] if first[:10] == last[:10] else last} UTC"
    if first or last:
        return f"{'since' if first else 'until'} {first or last} UTC"
    return "not recorded"


def human_seconds(seconds: float) -> str:
    """Seconds as ``0.31 s``, ``42 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if seconds < 99.5:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {seconds_left:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _facts(summary: Summary, path: Path | None) -> Table:
    traffic, seconds, parties = summary["bytes"], summary["seconds"], summary["parties"]
    rows = ", ".join(f"{party['name']} {party['rows']:,}" for party in parties)
    best = summary.get("best_round")
    facts = {"parties": f"{len(parties)} (rows: {rows})"} | resolved_facts(summary)
    facts |= {
        "trees": f"{summary['trees']}" + (f", of the best round, {best}" if best else ""),
        "exchanges": f"{summary['exchanges']:,}",
        "traffic": f"{human_bytes(traffic['to_parties'])} to parties, "
        f"{human_bytes(traffic['to_server'])} to server",
        "time": ", ".join(f"{human_seconds(s)} {name}" for name, s in seconds.items()),
    }
    if privacy := summary.get("privacy"):
        promised = f"epsilon {privacy['epsilon']:g}, delta {privacy['delta']:g}"
        facts["privacy"] = f"{promised} for each row; scores have noise"
    if path is not None:
        facts["run"] = display_path(path)
    return fact_grid(facts)


def fact_grid(facts: Mapping[str, str]) -> Table:
    """Names and values as a grid for a terminal."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(name, escape(value))
    return grid


def terminal_table(
    head: Iterable[str], rows: Iterable[Sequence[str]], n_texts: int = 1, bold: int | None = None
) -> Table:
    """Cells as a table for a terminal: first `n_texts` columns of texts, then numbers.

    The row with number `bold` stands out.
    """
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for number, name in enumerate(head):
        table.add_column(
            escape(name), justify="left" if number < n_texts else "right", overflow="fold"
        )
    for number, cells in enumerate(rows):
        table.add_row(*map(escape, cells), style="bold" if number == bold else None)
    return table


def score_table(rows: Sequence[ScoreRow]) -> Table:
    """One line per model and subset of rows."""
    names, cells = score_cells(rows, main_names(rows))
    ours = next((number for number, row in enumerate(rows) if row[0] == OURS), None)
    return terminal_table(["model", "rows", *names], cells, 2, ours)


def cost_cells(record: Mapping[str, Any]) -> list[str]:
    """The cells below ``COST_NAMES``; empty for a baseline, which sends nothing."""
    if record["bytes"] is None:
        return [""] * len(COST_NAMES)
    seconds, n_bytes = human_seconds(record["seconds"]), human_bytes(record["bytes"])
    return [seconds, f"{record['exchanges']:,g}", n_bytes]
