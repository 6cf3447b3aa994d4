"""The label column of a frame: names of classes, or numbers where all are."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fedapp.data.places import is_number, quoted
from fedapp.data.schema import Declared, Reader, listed
from fedapp.data.typed import (
    POINTS_WAY,
    THOUSANDS,
    as_texts,
    goes_by_text,
    has_thousands_alone,
    holds_numbers,
    is_text,
    with_point,
)
from fedapp.errors import DataError


def label_values(
    column: Any, reader: Reader, declared: Declared, is_written: bool
) -> tuple[Any, Any]:
    """The field and the values of labels: names or, where a file writes text, numbers if all are.

    Parameters
    ----------
    column : pyarrow.ChunkedArray.
    reader, declared : what a schema says of the table and of the label.
    is_written : whether the file writes all values as text.

    Raises
    ------
    DataError : numbers have decimal points where a schema says commas.
    """
    name, decimal = declared.rename or declared.name, reader.decimal
    is_parsed = is_written or goes_by_text(column.type, declared)
    if not is_parsed and not (reader.missing and is_text(column.type)):
        return name, column
    texts, _ = as_texts(column, declared, reader.missing, decimal)
    if declared.type == "category" or not is_parsed:
        return name, texts
    if decimal != "." and not holds_numbers(column.type):
        values = pc.unique(texts).drop_null().to_pylist()
        others = [value for value in values if not is_number(value, decimal)]
        if not others:
            metadata = {THOUSANDS: b""} if has_thousands_alone(values) else None
            field = pa.field(name, pa.float64(), metadata=metadata)
            return field, with_point(texts, decimal).cast(pa.float64())
        if all(map(is_number, others)) and not all(value.endswith(".") for value in values):
            rule = "label column {} must have decimal commas (decimal=,), got decimal points"
            here = f"{rule.format(listed([name]))}, as {quoted(others[0])}: {POINTS_WAY}"
            raise DataError.naming(f"{rule}: {POINTS_WAY}", listed([name]), here=here)
        return name, _parsed(texts)
    return name, _parsed(texts)


def _parsed(texts: Any) -> Any:
    """Text as float64 where every value is a number or a boolean; else as it is."""
    # "1." and "2." are names of classes, "1." and "2.5" are numbers.
    if pc.all(pc.ends_with(texts, pattern=".")).as_py():
        return texts
    for type in (pa.float64(), pa.bool_()):
        try:
            return texts.cast(type).cast(pa.float64())
        except pa.ArrowInvalid:
            continue
    return texts
