"""The page of a description: figures of the parties' tables, and what differs between them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from fedapp.metrics.tables import NOTHING
from fedapp.report import plots
from fedapp.report.page import figures, folded, headed, named, page, quiet, table
from fedapp.report.summary import (
    human_bytes,
    human_seconds,
    percent_text,
    score_cells,
    times_text,
    verb,
    warning_lines,
)
from fedapp.report.template import elements
from fedapp.report.tree import MINUTES, time_text
from fedapp.run_files import json_object
from fedapp.run_folder import RunFolder

FILE = "description.json"
HEADER = ("column", "missing", "distinct", "1 %", "25 %", "median", "75 %", "99 %")
CATEGORY_HEADER = (
    "column",
    "missing",
    "categories",
    "the most frequent, and their share of all rows",
)
SHOWN = ("1", "25", "50", "75", "99")
MOST_NAMED = 5  # categories in a line
ABOUT_LABEL = {
    "explained": "share of the label's variance",
    "iv": "information value",
    "auc": "AUC",
    "correlation": "rank correlation",
}
YES_OR_NO = ["no", "yes"]  # in the order of their numbers
OF_NUMBERS = "is_whole", "quantiles", "edges"  # fields of a column of numbers
HALF_A_MINUTE = 0.5 / MINUTES
MOST_DAYS = 1e7  # from 1970 on, which NumPy shows as a date
MASKED = (
    "Under masks the coordinator sees no site's figures, so it cannot warn of sites that differ in "
    "a column, its unit or the label: each site logs how its rows differ from all others."
)
Fields = Mapping[str, Any]
# Title, header, rows, and how many columns are texts.
Lines = tuple[str, Sequence[str], list[list[str]], int]


def as_shown(column: Fields) -> Fields:
    """A column whose values are yes or no as one of categories; every other as it is."""
    n_cells = len(column["counts"])
    is_boolean = column.get("kind") == "boolean" and "quantiles" in column
    if not is_boolean or n_cells > len(YES_OR_NO):
        return column
    is_yes = n_cells == 1 and column["quantiles"]["50"] > 0
    names = YES_OR_NO[is_yes : is_yes + n_cells]
    rest = {name: value for name, value in column.items() if name not in OF_NUMBERS}
    return {**rest, "categories": names}


def column_tables(document: Fields) -> list[Lines]:
    """Columns of numbers, and those of categories: name, missing, distinct, and how they spread."""
    n_rows = document["rows"]
    numbers, categories = list[list[str]](), list[list[str]]()
    for column in map(as_shown, document["columns"]):
        n_used = sum(count > 0 for count in column["counts"])
        distinct = f"{n_used:,}" if column.get("is_whole", True) else "many"
        cells = [plots.plain(_label(column), 60), f"{column['missing'] / n_rows:.1%}", distinct]
        if "quantiles" in column:
            points = column["quantiles"]
            numbers.append([*cells, *(_value(column, points.get(percent)) for percent in SHOWN)])
            continue
        pairs = zip(column["counts"], _names(column), strict=True)
        best = sorted((pair for pair in pairs if pair[0]), key=lambda pair: -pair[0])
        texts = [f"{plots.plain(name, 16)} {count / n_rows:.0%}" for count, name in best]
        more = [f"{len(texts) - MOST_NAMED:,} more"] if len(texts) > MOST_NAMED else []
        categories.append([*cells, ", ".join([*texts[:MOST_NAMED], *more])])
    tables: list[Lines] = [("Numbers and dates", HEADER, numbers, 1)]
    tables.append(("Categories", CATEGORY_HEADER, categories, len(CATEGORY_HEADER)))
    return [lines for lines in tables if lines[2]]


def shares_note(document: Fields) -> str:
    """Of which rows all shares are."""
    n_rows = f"{document['rows']:,}"
    return f"shares are of all {n_rows} training rows of the parties, also those without a value"


def description_page(run: RunFolder) -> str:
    """The HTML page of one description."""
    summary, document = run.summary, json_object(run.path / FILE)
    columns, n_rows = [as_shown(column) for column in document["columns"]], document["rows"]
    parties = [party["name"] for party in summary["parties"]]
    tables = [
        headed(title, table(head, [[named(name, 48), *line] for name, *line in lines], n_texts))
        for title, head, lines, n_texts in column_tables(document)
    ]
    sections = {
        "Columns": Markup("").join(tables) + quiet(f"{shares_note(document).capitalize()}."),
        "How the tables were read": elements.listed(summary.get("facts", [])),
        "The label": _label_section(columns),
        "Differences between sites": _differences(columns)
        if "by_party" in columns[0]
        else quiet(MASKED if "party" not in columns[0] else ""),
    }
    numbers = {
        "parties": f"{len(parties)}",
        "training rows": f"{n_rows:,}",
        "columns": f"{len(columns) - 1:,}",
        "exchanges": f"{summary['exchanges']:,}",
        "traffic": human_bytes(sum(summary["bytes"].values())),
        "time": human_seconds(summary["seconds"]["total"]),
    }
    subtitle = f"{summary['strategy']} on {summary['data']} · engine {summary['engine']}"
    subtitle += f" · {verb(summary)} {times_text(summary)}"
    title = f"Tables of {', '.join(parties)}"
    return page(title, subtitle, sections, warning_lines(summary), numbers)


def _label_section(columns: Sequence[Fields]) -> str:
    tables = {_label(column): column["label"] for column in columns if column["label"]}
    shares = {name: about["explained"] or 0.0 for name, about in tables.items()}
    used = [key for key in ABOUT_LABEL if {about.get(key) for about in tables.values()} - {None}]
    names = sorted(shares, key=shares.__getitem__, reverse=True)
    rows = score_cells([([named(name)], tables[name]) for name in names], used, 3)[1]
    caption = "Share of the label's variance that a column's bins or categories explain"
    images = {caption: plots.column_bars("explained", shares, "share explained")} if tables else {}
    (label,) = (column for column in columns if column.get("is_label"))
    cells = {site: of_site["counts"] for site, of_site in label.get("by_party", {}).items()}
    cells = cells or {"all": [label["missing"], *label["counts"]]}
    by_site = [
        [named(site), *(percent_text(count / max(sum(counts), 1)) for count in counts)]
        for site, counts in cells.items()
    ]
    head = ["site", "missing", *(named(name, 16) for name in _names(label))]
    body = headed("Training rows by label", table(head, by_site)) + figures(images)
    if rows:
        every = table(["column", *(ABOUT_LABEL[key] for key in used)], rows)
        note = "An AUC or a share near 1 is a column that nearly is the label."
        body += folded("Every column in numbers", every) + quiet(note)
    return body


def _differences(columns: Sequence[Fields]) -> str:
    by_party = {_label(column): column["by_party"] for column in columns}
    drifts = {
        name: max(of_site["drift"] for of_site in sites.values())
        for name, sites in by_party.items()
    }
    worst = sorted(columns, key=lambda column: drifts[_label(column)], reverse=True)
    rows = [
        [named(name), *(f"{of_site['drift']:.3f}" for of_site in by_party[name].values())]
        for name in map(_label, worst)
    ]
    caption = "Population stability index: the site whose rows differ most from the others'"
    images = {caption: plots.column_bars("drift", drifts, "PSI; 0.25 is a large difference")}
    every = table(["column", *map(named, columns[0]["by_party"])], rows)
    return figures(images) + folded("The index of every column and site", every)


def _names(column: Fields) -> list[str]:
    """Names of a column's cells after that of missing values."""
    if "edges" in column:
        edges = [_value(column, edge) for edge in column["edges"]]
        return [f"to {edges[0]}", *(f"{edge} …" for edge in edges)] if edges else ["all"]
    numbered = [f"category {number + 1}" for number in range(len(column["counts"]))]
    return column["categories"] or numbered


def _label(column: Fields) -> str:
    return f"{column['party']}: {column['name']}" if "party" in column else str(column["name"])


def _value(column: Fields, value: float | None) -> str:
    """A value of a column of numbers as people write it: a date, a time of day, a number."""
    kind = column.get("kind")
    if value is None or kind not in ("date", "time") or abs(value) > MOST_DAYS:
        return _number(value)
    if kind == "date":
        return str(np.datetime64(math.floor(value + HALF_A_MINUTE), "D"))
    return time_text(value)


def _number(value: float | None) -> str:
    # A cut above 0 is at the smallest number.
    if value is None or abs(value) < NOTHING:
        return "" if value is None else "0"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:.4g}"
