"""The page of ``noniid``: scores, costs and plots of all methods, and which one to choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fedapp.report.page import Strong, arrow, escaped, figures, page, section, table
from fedapp.report.summary import human_bytes, human_seconds, score_text
from simulations.benchmarks.lines import lines
from simulations.benchmarks.verdict import ALONE, POOLED, Verdict
from simulations.papers.tables import Row, grouped, mean_of

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
    quiet_notes = f'<p class="quiet">{escaped(" ".join(notes))}</p>'
    sections = [
        section("Which method should I take?", _answers(answers)),
        section("Test scores", _scores(rows, methods) + quiet_notes),
        section("Costs", _costs(rows, methods)),
    ]
    for data in sets:
        of_data = [row for row in rows if row["data"] == data]
        sections.append(section(f"{data}, plots", figures(_figures(of_data, methods))))
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
            Strong(score_text(mean)) if mean == best and each in methods else score_text(mean)
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


def _figures(rows: Sequence[Row], methods: Sequence[str]) -> dict[str, str]:
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
) -> str:
    """Means over the seeds, a line a method."""
    field = "score" if in_words is None else labels[1]
    categories = [place for (place,) in grouped(rows, across)]
    if across == "parties":
        categories.sort()
    groups = grouped(rows, "method", across)
    values = {
        method: [mean_of(groups[method, place], field) for place in categories]
        for method in methods
    }
    return lines(values, list(map(str, categories)), labels, in_words)
