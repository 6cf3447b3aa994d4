"""Warnings about a table, to be read before a model is trained on it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedapp.data.schema import MISSING_ELSEWHERE, first, listed
from fedapp.errors import LONGEST, WITHHELD, as_plain
from fedapp.trees.sets import Categories, names_of

if TYPE_CHECKING:
    from fedapp.data.table import Table

EXACT = 2**24  # float32 represents every whole number up to here
FEWEST_ROWS = 10  # with fewer, consecutive whole numbers or a high AUC occur by chance
LEAK_AUC = 0.99  # breast-cancer's best column has 0.975
MOST_RANKED = 100_000  # rows used for an AUC
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Note:
    """One warning."""

    rule: str  # text, with ``{}`` for the columns
    columns: str = ""  # their names; empty if it is about none

    def told(self, shares_names: bool) -> str:
        """The text as plain printable characters; column names only with `shares_names`."""
        text = self.rule.replace("{}", self.columns if shares_names else WITHHELD)
        return as_plain(text)


def is_plain(text: str) -> bool:
    """Whether a text is printable and no longer than a note may be."""
    return text.isprintable() and len(text) <= LONGEST


def notes_on_features(
    columns: Sequence[str],
    values: Floats,
    exact: Callable[[str], npt.NDArray[np.float64]],
    categories: Categories = (),
) -> list[Note]:
    """Note features that cannot help a model, or that look like something else.

    `values` has shape (n_rows, n_columns); `exact` returns a column by name, before its conversion
    to float32. Category codes are not checked as numbers.
    """
    if len(values) < 2:
        return []
    low, high = np.fmin.reduce(values, axis=0), np.fmax.reduce(values, axis=0)
    spans = [
        (name, float(least), float(most))
        for name, least, most in zip(columns, low, high, strict=True)
    ]
    empty = [name for name, least, _ in spans if np.isnan(least)]
    constant = [name for name, least, most in spans if least == most]
    numbers = [span for at, span in enumerate(spans) if names_of(categories, at) is None]
    wide = [name for name, least, most in numbers if max(-least, most) >= EXACT]
    # The span of float32 values shows cheaply which columns may number the rows.
    n_rows = len(values)
    numbered = [
        name
        for name, least, most in numbers
        if n_rows >= FEWEST_ROWS
        and abs(most - least - (n_rows - 1)) <= 2 * float(np.spacing(np.float32(max(-least, most))))
        and numbers_rows(exact(name))
    ]
    groups = [
        (empty, "no value in any row"),
        (constant, "the same value in every row"),
        ([name for name in wide if _is_rounded(exact(name))], ROUNDED),
        (numbered, "the numbers of the rows, of no use for other rows: see drop-columns"),
    ]
    return [note_on(names, what) for names, what in groups if names]


def notes_on_leaks(table: Table) -> list[Note]:
    """Note features that alone have an AUC above 0.99 for two classes.

    Missing values rank as the largest or the smallest. Categories are ranked by the share of their
    rows in the second class, if they have 10 rows or more on average.
    """
    step = 1 + table.n_rows // MOST_RANKED
    classes, labels = np.unique([] if table.labels is None else table.labels, return_inverse=True)
    is_second, leaks = labels[::step] == 1, list[str]()
    if len(classes) != 2 or min(is_second.sum(), (~is_second).sum()) < FEWEST_ROWS:
        return []
    for place, name in enumerate(table.columns):
        distinct, groups = np.unique(table.values[::step, place], return_inverse=True)
        seconds, sizes = (np.bincount(groups, one).astype(float) for one in (is_second, None))
        order, firsts = np.arange(len(distinct)), sizes - seconds
        if names_of(table.categories, place) is not None:
            if sizes.mean() < FEWEST_ROWS:
                continue
            order = np.argsort(seconds / sizes)
        orders = np.stack([order, np.roll(order, int(np.isnan(distinct[-1])))])  # NaN is the last
        # Mann-Whitney: pairs with the row of the second class ranked higher; ties count half.
        below = np.cumsum(firsts[orders], axis=1) - firsts[orders] / 2
        aucs = (seconds[orders] * below).sum(axis=1) / (seconds.sum() * firsts.sum())
        if (auc := max(aucs.max(), 1 - aucs.min())) > LEAK_AUC:
            leaks.append(f"'{name}' ({auc:.4f})")
    rule = f"features that alone have an AUC above {LEAK_AUC} for the label: {{}}; if they are "
    rule += "known only after the label, exclude them with drop-columns"
    return [Note(rule, first(leaks))] if leaks else []


FACT = re.compile(r"is read as one|, read as (?!missing)|, removed$|are removed: |are dropped befo")
"""Matches a note that describes a conversion and is not a warning."""

ROUNDED = f"whole numbers beyond {EXACT:,} (2^24) that become others as float32"


def note_on_ids(name: str, ids: npt.NDArray[np.str_]) -> list[Note]:
    """Note ids of more than one row."""
    n_repeated = sum(count for count in Counter(ids.tolist()).values() if count > 1)
    if not n_repeated:
        return []
    what = f"{n_repeated:,} of {len(ids):,} rows that share their id with another"
    return [Note(f"id column {{}} has {what}", f"'{name}'")]


def notes_on_numbered_ids(name: str, ids: npt.NDArray[np.str_]) -> list[Note]:
    """Note ids that count the rows from 0 or 1, in order."""
    counts = np.arange(len(ids)) + (ids[0] == "1")
    if len(ids) < FEWEST_ROWS or not np.array_equal(ids, counts.astype(str)):
        return []
    rule = "id column {} counts the rows of the table, so that rows are matched by their position: "
    return [Note(f"{rule}name a column that identifies them, if it is a row number", f"'{name}'")]


def note_on_unlabelled(name: str, n_unlabelled: int, n_rows: int, what: str) -> list[Note]:
    """Note rows without a label; `what` says what becomes of them."""
    if not n_unlabelled:
        return []
    count = f"{n_unlabelled:,} of {n_rows:,} rows have no label in {{}}"
    return [Note(f"{count} and {what}", f"'{name}'")]


def notes_on_missing_words(columns: Mapping[str, Collection[str]], what: str) -> list[Note]:
    """Note category names that other readers take as missing.

    `columns` maps to the names in each; `what` starts the note, with ``{}`` for the columns.
    """
    words = {
        name: [word for word in MISSING_ELSEWHERE if word in names]
        for name, names in columns.items()
    }
    shown = [f"'{name}' ({', '.join(matches)})" for name, matches in words.items() if matches]
    if not shown:
        return []
    rule = f"{what} words that pandas takes for missing, read as names: where they mean no value, "
    return [Note(f"{rule}list them in a schema as missing", first(shown))]


def numbers_rows(numbers: npt.NDArray[np.float64]) -> bool:
    """Whether the values are distinct consecutive whole numbers, in any order."""
    if len(numbers) < FEWEST_ROWS or np.isnan(numbers).any():
        return False
    ordered = np.sort(numbers)
    return bool(ordered[0] == np.floor(ordered[0]) and (np.diff(ordered) == 1).all())


def _is_rounded(numbers: npt.NDArray[np.float64]) -> bool:
    """Whether conversion to float32 changes a whole number."""
    large = numbers[np.abs(numbers) > EXACT]
    return bool(((large == np.floor(large)) & (large.astype(np.float32) != large)).any())


def note_on(names: Sequence[str], what: str) -> Note:
    """Note about feature columns, which have `what`."""
    one = len(names) == 1
    columns, has = ("feature column", "has") if one else ("feature columns", "have")
    return Note(f"{columns} {{}} {has} {what}", listed(names))
