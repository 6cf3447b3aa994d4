"""What is odd about a table, but no error: worth a warning before a model is trained on it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedapp.data.categories import Categories, names_of
from fedapp.data.schema import MISSING_ELSEWHERE, first, listed
from fedapp.errors import LONGEST, WITHHELD, as_plain

if TYPE_CHECKING:
    from fedapp.data.table import Table

EXACT = 2**24  # up to here float32 has every whole number
FEWEST_ROWS = 10  # with less, whole numbers in a row are no surprise, nor is a high AUC
LEAK_AUC = 0.99  # breast-cancer's best column has 0.975
MOST_RANKED = 100_000  # rows of which an AUC is taken
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Note:
    """One oddity.

    Parameters
    ----------
    rule : what was found, with ``{}`` for the columns.
    columns : their names, as they are told; empty where it is about none.
    """

    rule: str
    columns: str = ""

    def told(self, shares_names: bool) -> str:
        """In words, as ``is_plain`` wants them; without names of columns unless others may learn
        them."""
        text = self.rule.replace("{}", self.columns if shares_names else WITHHELD)
        return as_plain(text)


def is_plain(text: str) -> bool:
    """Whether a text can be printed on a terminal as it is, and is no longer than a note."""
    return text.isprintable() and len(text) <= LONGEST


def notes_on_features(
    columns: Sequence[str],
    values: Floats,
    exact: Callable[[str], npt.NDArray[np.float64]],
    categories: Categories = (),
) -> list[Note]:
    """Features that cannot help a model, or that are not what they seem.

    Parameters
    ----------
    columns : names.
    values : shape (n_rows, n_columns); NaN is missing.
    exact : a column of numbers by its name, before it became float32.
    categories : of the columns; codes are not looked at as numbers.
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
    numbered = [
        name
        for name, least, most in numbers
        if _may_number_rows(least, most, len(values)) and numbers_rows(exact(name))
    ]
    found = [
        (empty, "no value in any row"),
        (constant, "the same value in every row"),
        ([name for name in wide if _is_rounded(exact(name))], ROUNDED),
        (numbered, "the numbers of the rows, which say nothing of other rows: see drop-columns"),
    ]
    return [note_on(names, what) for names, what in found if names]


def notes_on_leaks(table: Table) -> list[Note]:
    """Features that alone have an AUC above 0.99 for two classes; categories, of 10 rows or more on
    average, are ranked by their labels, missing values are the largest or the smallest."""
    step = 1 + table.n_rows // MOST_RANKED
    classes, labels = np.unique([] if table.labels is None else table.labels, return_inverse=True)
    is_second, found = labels[::step] == 1, list[str]()
    if len(classes) != 2 or min(is_second.sum(), (~is_second).sum()) < FEWEST_ROWS:
        return []
    for place, name in enumerate(table.columns):
        known, groups = np.unique(table.values[::step, place], return_inverse=True)
        seconds, sizes = (np.bincount(groups, one).astype(float) for one in (is_second, None))
        order, firsts = np.arange(len(known)), sizes - seconds
        if names_of(table.categories, place) is not None:
            if sizes.mean() < FEWEST_ROWS:
                continue
            order = np.argsort(seconds / sizes)
        orders = np.stack([order, np.roll(order, int(np.isnan(known[-1])))])  # NaN is the last
        below = np.cumsum(firsts[orders], axis=1) - firsts[orders] / 2
        aucs = (seconds[orders] * below).sum(axis=1) / (seconds.sum() * firsts.sum())
        if (auc := max(aucs.max(), 1 - aucs.min())) > LEAK_AUC:
            found.append(f"'{name}' ({auc:.4f})")
    rule = f"features that alone have an AUC above {LEAK_AUC} for the label: {{}}; if they are "
    rule += "known only after the label, exclude them with drop-columns"
    return [Note(rule, first(found))] if found else []


FACT = re.compile(r"is read as one|, read as (?!missing)|, removed$|are removed: |are dropped befo")
"""In a note that says how a table was read, and warns of nothing."""

ROUNDED = f"whole numbers beyond {EXACT:,} (2^24) that become others as float32"


def note_on_ids(name: str, ids: npt.NDArray[np.str_]) -> list[Note]:
    """Ids of more than one row."""
    n_repeated = sum(count for count in Counter(ids.tolist()).values() if count > 1)
    if not n_repeated:
        return []
    what = f"{n_repeated:,} of {len(ids):,} rows that share their id with another"
    return [Note(f"id column {{}} has {what}", f"'{name}'")]


def notes_on_numbered_ids(name: str, ids: npt.NDArray[np.str_]) -> list[Note]:
    """Ids that count the rows from 0 or 1, in order."""
    counts = np.arange(len(ids)) + (ids[0] == "1")
    if len(ids) < FEWEST_ROWS or not np.array_equal(ids, counts.astype(str)):
        return []
    rule = "id column {} counts the rows of the table, so that rows are matched by their position: "
    return [Note(f"{rule}name a column that identifies them, if it is a row number", f"'{name}'")]


def note_on_unlabelled(name: str, n_unlabelled: int, n_rows: int, what: str) -> list[Note]:
    """Rows without a label.

    Parameters
    ----------
    name : of the label column.
    what : becomes of them.
    """
    if not n_unlabelled:
        return []
    found = f"{n_unlabelled:,} of {n_rows:,} rows have no label in {{}}"
    return [Note(f"{found} and {what}", f"'{name}'")]


def notes_on_missing_words(columns: Mapping[str, Collection[str]], what: str) -> list[Note]:
    """Words among the names of columns of text that may mean that there is no value.

    Parameters
    ----------
    columns : the names in each.
    what : begins the note, with ``{}`` for the columns.
    """
    words = {
        name: [word for word in MISSING_ELSEWHERE if word in names]
        for name, names in columns.items()
    }
    told = [f"'{name}' ({', '.join(found)})" for name, found in words.items() if found]
    if not told:
        return []
    rule = f"{what} words that pandas takes for missing, read as names: where they mean no value, "
    return [Note(f"{rule}list them in a schema as missing", first(told))]


def numbers_rows(numbers: npt.NDArray[np.float64]) -> bool:
    """Whether a column holds distinct consecutive whole numbers, in whatever order."""
    if len(numbers) < FEWEST_ROWS or np.isnan(numbers).any():
        return False
    ordered = np.sort(numbers)
    return bool(ordered[0] == np.floor(ordered[0]) and (np.diff(ordered) == 1).all())


def _may_number_rows(low: float, high: float, n_rows: int) -> bool:
    """Whether the span of a column is that of its row numbers, as far as float32 can tell."""
    slack = 2 * float(np.spacing(np.float32(max(abs(low), abs(high)))))
    return n_rows >= FEWEST_ROWS and abs(high - low - (n_rows - 1)) <= slack


def _is_rounded(numbers: npt.NDArray[np.float64]) -> bool:
    """Whether float32 changes a whole number."""
    large = numbers[np.abs(numbers) > EXACT]
    return bool(((large == np.floor(large)) & (large.astype(np.float32) != large)).any())


def note_on(names: Sequence[str], what: str) -> Note:
    """That feature columns have something."""
    one = len(names) == 1
    columns, has = ("feature column", "has") if one else ("feature columns", "have")
    return Note(f"{columns} {{}} {has} {what}", listed(names))
