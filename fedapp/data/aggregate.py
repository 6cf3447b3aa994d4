"""Rows that share an id as one row, by the rules of a schema.

A sum is rounded once (``math.fsum``), so it depends on neither the order of the rows nor the
machine. Missing values are passed over; an id without any value has none, and a count of 0.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from fedapp.data.convert import DAYS, KINDS, Converted, as_numbers, holds_numbers
from fedapp.data.schema import Reader, listed
from fedapp.errors import DataError

Ints = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
ADDED = ("number", "boolean")  # kinds of which there are sums and means
# Kinds that a rule takes; ``last`` and ``count`` take any.
TAKES: dict[str, tuple[str, ...]] = dict.fromkeys(("sum", "mean"), ADDED)
TAKES |= dict.fromkeys(("min", "max"), (*ADDED, *DAYS, "ordinal"))
LARGEST = float(np.finfo(np.float32).max)
RULE_WAY = 'as aggregate = "sum" (or count, mean, min, max, last) of a column'


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows of a table by their ids."""

    ids: npt.NDArray[np.str_]  # each once, in the order of their first rows
    rows: Ints  # all rows, those of an id one after the other; the last is its last event
    starts: Ints  # where those of each id begin in ``rows``

    @classmethod
    def of(cls, ids: npt.NDArray[np.str_], times: Numbers | None) -> Groups:
        """Group rows by id; `times` order those of an id, and the table where they are equal."""
        _, firsts, numbers = np.unique(ids, return_index=True, return_inverse=True)
        ranks = np.argsort(np.argsort(firsts))  # of each id by its first row
        rows = np.lexsort((times, ranks[numbers]) if times is not None else (ranks[numbers],))
        counts = np.bincount(ranks[numbers], minlength=len(firsts))
        return cls(ids[np.sort(firsts)], rows, np.cumsum(counts) - counts)

    @property
    def repeat(self) -> bool:
        """Whether some rows share their id."""
        return len(self.ids) < len(self.rows)

    def reduced(self, read: Converted) -> Converted:
        """A column that was read, one value an id; raises DataError if its rule does not fit."""
        column, rule = read.column, read.column.declared.aggregate or "last"
        if rule == "count":
            present = pc.invert(pc.is_null(read.numbers, nan_is_null=True)).cast(pa.float64())
            counts = self._reduced(np.add, np.asarray(present.to_numpy()))
            return Converted(pa.chunked_array([counts]), replace(column, kind="number", names=None))
        kind = column.kind
        if kind in ("label", "name"):
            kind = "number" if holds_numbers(read.numbers.type) else "category"
        if kind not in TAKES.get(rule, (kind,)):
            takes = " or ".join(KINDS[name][0] for name in TAKES[rule])
            rule = f'column {{}} must be {takes} for aggregate = "{rule}", got {KINDS[kind][0]}'
            raise DataError.naming(f"{rule}: last and count take any", f"'{column.name}'")
        if rule == "last":
            lasts = self.rows[np.append(self.starts[1:], len(self.rows)) - 1]
            return read._replace(numbers=read.numbers.take(pa.array(lasts)))
        values = as_numbers(read.numbers)
        if rule in ("min", "max"):
            extremes = self._reduced(np.fmin if rule == "min" else np.fmax, values)
            return read._replace(numbers=pa.chunked_array([extremes]))
        column = replace(column, kind="number") if kind == "boolean" else column
        sums = self._sums(values)
        if rule == "mean":
            present = self._reduced(np.add, (~np.isnan(values)).astype(np.float64))
            sums = sums / np.maximum(present, 1)
        return read._replace(numbers=pa.chunked_array([sums]), column=column)

    def _reduced(self, operation: np.ufunc, values: Numbers) -> Numbers:
        return np.asarray(operation.reduceat(values[self.rows], self.starts), dtype=np.float64)

    def _sums(self, values: Numbers) -> Numbers:
        """Sums of the values, NaN of none; infinite if a value is so as float32."""
        is_value, is_large = ~np.isnan(values), np.abs(values) > LARGEST
        addends = np.where(is_value & ~is_large, values, 0.0)[self.rows].tolist()
        ends = np.append(self.starts[1:], len(addends)).tolist()
        spans = zip(self.starts.tolist(), ends, strict=True)
        sums = np.array([math.fsum(addends[start:end]) for start, end in spans])
        sums[self._reduced(np.maximum, is_large.astype(np.float64)) > 0] = np.inf
        sums[self._reduced(np.maximum, is_value.astype(np.float64)) == 0] = np.nan
        return sums


def check_rules(groups: Groups, names: Collection[str], reader: Reader) -> None:
    """Check that each of these columns has a rule, if rows share their ids."""
    without = [name for name in names if not reader.of_feature(name).aggregate]
    if groups.repeat and without:
        rule = "columns {} must have a rule of the schema where rows share their id, "
        way = f'{RULE_WAY}, or be dropped by type = "drop"'
        raise DataError.naming(rule + way, listed(without))
