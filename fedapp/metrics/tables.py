"""Figures of tables, from counts of rows that parties add up.

Each column is a line of *cells*: missing values, then its bins in order, or its categories (see
``histograms.groups``). Of each cell two things are counted: rows, and the *terms* of their labels
(one per class; of measures the label and its square). All figures follow from the sums of these
over the parties, so one table in one place has the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Floats, Ints
from fedapp.histograms.bins import Cuts, digitise, with_categories
from fedapp.histograms.fixed_point import Bounds, Whole, from_fixed, to_fixed
from fedapp.histograms.groups import cell_starts, group
from fedapp.histograms.sketch import N_DIGITS, Descent, digit_counts

# Where columns of numbers are cut, in percent of the rows that have a value.
PERCENTS = (1, 5, 10, 20, 25, 30, 40, 50, 60, 70, 75, 80, 90, 95, 99)
MOST_BINS = len(PERCENTS) + 1
LARGE_DRIFT, LABEL_DRIFT = 0.25, 0.1  # population stability index: the usual marks
CHANCE = 3.0  # times the index that equal tables of such sizes have on average
OTHER_UNIT = 50.0  # ratio of spreads or medians
NOTHING = 1e-37  # what is below counts as 0: cuts above a 0 are the smallest number
MOST_NAMED = 5  # parties in a warning
LEAK_AUC, LEAK_EXPLAINED = 0.99, 0.9
ROWS_A_CELL = 20  # fewer on average show no association
# Figures over labels that leave a site are hundredths in these ranges.
RANGES = {"explained": (0, 1), "iv": (0, 2), "auc": (0.5, 1), "correlation": (-1, 1)}
OF_CLASSES, OF_MEASURES = ("explained",), ("explained", "correlation")  # of two classes all
ROWS_A_BIT = 10  # for each bit of such figures


def in_groups(values: Floats, widths: Ints, least: int, classes: Ints | None = None) -> Floats:
    """The values, so coarse that each occurs in ``least`` rows of every class that it occurs in.

    Neighbouring numbers become the ``least``-th lowest of their group; too few missing values join
    the lowest group, and categories of too few rows the missing values.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing.
    widths : number of categories of each column, 0 for numbers.
    classes : int64, (n_rows,), each of ``least`` rows or more; by default all rows are of one.
    """
    coarse = values.copy()
    nodes = np.zeros(len(values), dtype=np.int64) if classes is None else classes
    for index, width in enumerate(widths.tolist() if least > 1 and len(values) else ()):
        column = coarse[:, index]
        points, cells = np.unique(column, return_inverse=True)  # a missing value is the last
        is_missing, points = np.isnan(column), points[~np.isnan(points)]
        cells = np.where(is_missing, 0, cells + 1)
        counts = np.zeros((nodes.max() + 1, len(points) + 1), dtype=np.int64)
        np.add.at(counts, (nodes, cells), 1)
        rows = counts.sum(axis=0)
        below = np.cumsum(rows) - rows[0]
        if width:
            joined = np.any((counts > 0) & (counts < least), axis=0)
            joined[0] = True
            for cell in np.argsort(rows, kind="stable").tolist():
                pool = counts[:, joined].sum(axis=1)
                if not ((pool > 0) & (pool < least)).any():
                    break
                joined[cell] = True
            column[joined[cells]] = np.nan
        elif below[-1] < least:
            column[:] = np.nan
        else:
            starts = np.array([0, len(rows)])
            ends = np.asarray(group(np.arange(len(rows)), counts, starts, least))
            firsts = np.searchsorted(ends, ends)  # the first cell of each cell's group
            before = below[np.maximum(firsts - 1, 0)]
            # Missing values and few lowest ones become a value of the next group.
            chosen = np.where(ends, np.searchsorted(below, before + least), 0)
            column[:] = np.append(np.float32(np.nan), points)[chosen][cells]
    return coarse


def label_terms(labels: Floats, n_classes: int, bounds: Bounds) -> Whole:
    """Terms of each row's label, int64, shape (n_rows, n_terms); zeros for a missing one."""
    if n_classes:
        one_hot: Whole = (labels[:, None] == np.arange(n_classes)).astype(np.int64)
        return one_hot
    present = np.nan_to_num(labels).astype(np.float64)
    return to_fixed(np.stack([present, present**2], axis=1), term_exponents(0, bounds))


def term_exponents(n_classes: int, bounds: Bounds) -> Ints:
    """Fractional bits of the terms of a label."""
    of_measures = [bounds.exponent(bounds.largest), bounds.exponent(2 * bounds.largest)]
    return np.array([0] * n_classes or of_measures, dtype=np.int64)


def cells_of_rows(values: Floats, cuts: Cuts) -> npt.NDArray[np.uint16]:
    """In which cell of each column each row is; shape (n_rows, n_columns)."""
    codes, missing_code = digitise(values, cuts)
    return np.where(codes == missing_code, 0, codes.astype(np.uint16) + 1).astype(np.uint16)


def count_cells(values: Floats, cuts: Cuts, terms: Whole | None = None) -> tuple[Ints, Whole]:
    """Rows of each cell, (n_cells,), and sums of their labels' terms, (n_cells, n_terms)."""
    terms = np.empty((len(values), 0), dtype=np.int64) if terms is None else terms
    starts = cell_starts(cuts.widths)
    counts = np.zeros(starts[-1], dtype=np.int64)
    sums = np.zeros((len(counts), terms.shape[1]), dtype=np.int64)
    for cells in (cells_of_rows(values, cuts) + starts[:-1]).T:
        counts += np.bincount(cells, minlength=len(counts))
        np.add.at(sums, cells, terms)
    return counts, sums


def describe_columns(
    names: Sequence[str],
    categories: Sequence[Sequence[str] | None],
    counts: Ints,
    cuts: Cuts,
    points: Sequence[Floats],
    is_whole: npt.NDArray[Any],
) -> list[dict[str, Any]]:
    """Figures of columns: rows by cell; of numbers also values at ``PERCENTS``, and cuts."""
    columns = list[dict[str, Any]]()
    per_column = split_cells(counts, cuts.widths), column_edges(cuts), points, is_whole.tolist()
    for name, texts, cells, edges, values, whole in zip(
        names, categories, *per_column, strict=True
    ):
        column = {"name": name, "categories": [*(texts or ())], "missing": int(cells[0])}
        columns.append(column | {"counts": cells[1:].tolist(), "label": {}})
        if len(edges):
            quantiles = dict(zip(map(str, PERCENTS), _short(values), strict=False))
            shown = {"quantiles": quantiles, "edges": _short(edges[:-1])}
            columns[-1] |= {"is_whole": bool(whole), **shown}
    return columns


def column_edges(cuts: Cuts) -> list[Floats]:
    """Upper edges of the bins of each column; none of categories."""
    edges = (cuts.column(column) for column in range(cuts.n_columns))
    pairs = zip(edges, cuts.by_category, strict=True)
    return [of_column[: 0 if has_categories else None] for of_column, has_categories in pairs]


def associations(
    columns: tuple[Ints, Whole, Ints, npt.NDArray[np.bool_]], n_classes: int, bounds: Bounds
) -> Iterator[dict[str, float | None]]:
    """What columns say about the label: of their rows by cell, sums of labels in units that the
    bounds determine, numbers of bins, and which are of numbers."""
    counts, sums, widths, is_number = columns
    reals = split_cells(from_fixed(sums, term_exponents(n_classes, bounds)), widths)
    columns_of_both = zip(split_cells(counts, widths), reals, is_number.tolist(), strict=True)
    for column_counts, column_sums, has_numbers in columns_of_both:
        yield association(column_counts, column_sums, has_numbers, n_classes > 0)


def association(
    counts: Ints, sums: Doubles, is_number: bool, is_classes: bool
) -> dict[str, float | None]:
    """What a column's cells say about the label.

    ``explained`` is the share of the label's variance between cells, of all classes together. Of
    two classes ``iv`` is the information value and ``auc`` that of the cells' rates.
    ``correlation`` is that of the label with ranks (ties within a bin), over rows with a value.
    """
    is_two, filled = is_classes and sums.shape[1] == 2, counts > 0
    labels, squares = (sums, sums) if is_classes else (sums[:, :1], sums[:, 1:])
    mean = (labels.sum(axis=0) ** 2 / max(counts.sum(), 1)).sum()
    between = (labels[filled] ** 2 / counts[filled, None]).sum() - mean
    figures = {"explained": _ratio(between, squares.sum() - mean)}
    if is_two:
        order = np.argsort(sums[filled, 1] / counts[filled], kind="stable")
        negatives, positives = sums[filled][order].T
        below = np.cumsum(negatives) - negatives / 2
        figures["iv"] = divergence(sums[:, 1], sums[:, 0])
        figures["auc"] = _ratio((positives * below).sum(), negatives.sum() * positives.sum())
    if is_number and (is_two or not is_classes):
        present, label = counts[1:], sums[1:, 1 if is_two else 0]
        ranks = np.cumsum(present) - present / 2
        total = max(present.sum(), 1)
        ranks -= (present * ranks).sum() / total
        variances = (present * ranks**2).sum() * (sums[1:, 1].sum() - label.sum() ** 2 / total)
        figures["correlation"] = _ratio((label * ranks).sum(), np.sqrt(max(variances, 0.0)))
    return figures


def rounded_figures(figures: dict[str, float | None]) -> dict[str, float | None]:
    """Figures of an association as hundredths in their ranges."""
    rounded = figures.copy()
    for name, (low, high) in RANGES.items():
        if (figure := figures.get(name)) is not None:
            rounded[name] = round(min(max(figure, low), high), 2) + 0.0  # no -0.0
    return rounded


def figure_bits(n_classes: int) -> int:
    """Bits of a column's rounded figures, each of which may be missing."""
    names = {0: OF_MEASURES, 2: (*RANGES,)}.get(n_classes, OF_CLASSES)
    numbers = (100 * (high - low) + 2 for low, high in (RANGES[name] for name in names))
    return math.ceil(sum(map(math.log2, numbers)))


def readable_labels(n_rows: int) -> int:
    """Labels of two classes that figures of other parties' columns can disclose, at most.

    A party that sends sums of its choice decides what its columns' figures encode.
    """
    return n_rows // ROWS_A_BIT


def _ratio(above: Any, below: Any) -> float | None:
    return round(float(above / below), 6) if below > 0 else None


def divergence(counts: npt.NDArray[Any], others: npt.NDArray[Any]) -> float:
    """Sum of (p - q) ln(p / q) over cells: of two tables the population stability index, of two
    classes the information value. Half a row is added to every cell that either has."""
    filled = (counts > 0) | (others > 0)
    p, q = (cells[filled] + 0.5 for cells in (counts, others))
    p, q = p / p.sum(), q / q.sum()
    return round(float(((p - q) * np.log(p / q)).sum()), 6)


def differences(
    name: str, cells: Mapping[str, Ints], edges: Floats, mark: float = LARGE_DRIFT
) -> Iterator[str]:
    """Warnings about a column whose cells differ between parties that have values of it."""
    counts = {party: counted for party, counted in cells.items() if counted[1:].any()}
    total = np.sum([*counts.values()], axis=0)
    drifts = dict[str, float]()
    for party, here in counts.items():
        if (others := total - here).any():
            drift = divergence(here, others)
            chance = (total > 0).sum() * (1 / here.sum() + 1 / others.sum())
            drifts |= {party: drift} if drift > max(mark, CHANCE * chance) else {}
    if drifts:
        worst = sorted(drifts, key=drifts.__getitem__, reverse=True)[:MOST_NAMED]
        texts = [f"{party} (PSI {drifts[party]:.2f})" for party in worst]
        yield f"{name} is distributed differently at {', '.join(texts)}"
    scales = {party: _spread_and_median(here, edges) for party, here in counts.items()}
    # A median near 0 says nothing of the unit, unless most rows have the same value.
    is_median = not any(spread > NOTHING for spread, _ in scales.values())
    values = {party: both[is_median] for party, both in scales.items() if both[is_median] > NOTHING}
    low, high = (choose(values, key=values.__getitem__, default="") for choose in (min, max))
    if low and values[high] > OTHER_UNIT * values[low]:
        power = 10.0 ** round(np.log10(values[high] / values[low]))
        figure = "median" if is_median else "spread"
        ends = f"{values[high]:.5g} at {high}, {values[low]:.5g} at {low}"
        yield f"{name} has a {figure} that differs {power:,.0f}-fold ({ends}): is it in one unit?"


def table_differences(
    names: Sequence[str], cuts: Cuts, counts: Mapping[str, Ints]
) -> Iterator[str]:
    """Warnings about columns of these names, and the label, which is the last; counts by party."""
    cells = {party: split_cells(of_party, cuts.widths) for party, of_party in counts.items()}
    marks = [*((f"column {name}", LARGE_DRIFT) for name in names), ("the label", LABEL_DRIFT)]
    for index, ((name, mark), edges) in enumerate(zip(marks, column_edges(cuts), strict=True)):
        yield from differences(name, {party: cells[party][index] for party in cells}, edges, mark)


def _spread_and_median(counts: Ints, edges: Floats) -> tuple[float, float]:
    """Interquartile range and absolute median by bins; 0 where bins do not show them."""
    if len(edges) < 2:
        return 0.0, 0.0
    below = np.cumsum(counts[1:])
    bins = np.searchsorted(below, below[-1] * np.array((0.25, 0.5, 0.75)), side="right")
    low, middle, high = edges[np.clip(bins - 1, 0, len(edges) - 2)].astype(np.float64)
    return float(high - low), abs(float(middle))


def leaks(name: str, column: dict[str, Any]) -> Iterator[str]:
    """A warning about a column, as ``describe_columns`` describes it, that nearly is the label."""
    counts, figures = [column["missing"], *column["counts"]], column["label"] or {}
    if sum(counts) < ROWS_A_CELL * sum(count > 0 for count in counts):
        return
    auc, explained = figures.get("auc") or 0.0, figures.get("explained") or 0.0
    if auc > LEAK_AUC or explained > LEAK_EXPLAINED:
        text = f"AUC {auc:.4f}" if auc > LEAK_AUC else f"explains {explained:.0%} of its variance"
        yield f"{name} alone nearly is the label ({text}): is it known before the label?"


def split_cells(counts: npt.NDArray[Any], widths: Ints) -> list[npt.NDArray[Any]]:
    """Cells of each column, given its number of bins."""
    return [counts[start:end] for start, end in pairwise(cell_starts(widths).tolist())]


def _short(values: Floats) -> list[float]:
    return [float(str(value)) for value in values]  # the fewest digits that it can be read from


def cut(values: Floats, widths: Ints) -> tuple[Cuts, list[Floats], npt.NDArray[np.bool_]]:
    """Cuts of one table, values at ``PERCENTS`` of its columns of numbers, and which are whole."""
    descent, ones = new_descent(widths), np.ones(len(values), dtype=np.int64)
    while descent.digit < N_DIGITS:
        descent.take(digit_counts(values, ones, *descent.wanted(), descent.digit))
    return with_categories(descent.cuts(), widths, widths), descent.points(), descent.is_whole


def new_descent(widths: Ints) -> Descent:
    """The search for quantiles; a value that begins like no other is not resolved further."""
    return Descent(widths == 0, MOST_BINS, lightest=1, percents=PERCENTS)
