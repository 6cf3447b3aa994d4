"""LIBSVM files, of which only values that are not 0 are in memory, or on disk."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fedapp.data import large
from fedapp.data.csv_errors import opened
from fedapp.data.schema import Reader, Roles
from fedapp.data.scratch import is_large, stored

LIBSVM_LABEL = "label"
LIBSVM_QID = "qid"  # of the field qid:1; only where a role names it


def read_libsvm(path: Path, roles: Roles, reader: Reader) -> Any:
    """Columns of a LIBSVM file: labels, f1, f2, ..., and the queries where a role names them."""
    from sklearn.datasets import load_svmlight_file

    how = {"n_features": reader.n_features or None, "dtype": np.float32, "zero_based": False}

    def parsed() -> Iterator[Any]:
        is_first = True
        with opened(path) as stream:
            # Whole lines; of an empty file nothing, once.
            while (piece := stream.read(large.PIECE_BYTES) + stream.readline()) or is_first:
                matrix, *of_rows = load_svmlight_file(io.BytesIO(piece), **how, query_id=True)
                matrix = matrix.tocsc()
                arrays = matrix.data, matrix.indices, matrix.indptr, *of_rows
                yield pa.table({str(number): [array] for number, array in enumerate(arrays)})
                is_first = False

    tables = stored(parsed()) if large.is_long(path) else [*parsed()]
    parts = [[column[0].values.to_numpy() for column in table.columns] for table in tables]
    _, _, every_starts, *every = zip(*parts, strict=True)
    labels, queries = map(pa.chunked_array, every)
    n_features = max(map(len, every_starts)) - 1
    fields = [(roles.label or LIBSVM_LABEL, pa.float64())]
    fields += [(f"f{index}", pa.float32()) for index in range(1, n_features + 1)]
    if roles.qid == LIBSVM_QID and len(queries) == len(labels):
        fields.append((LIBSVM_QID, pa.int64()))

    def column(index: int) -> Any:
        if not 0 < index <= n_features:
            return queries if index else labels
        chunks = []
        for values, rows, starts, of_rows, _ in parts:
            chunk = np.zeros(len(of_rows), np.float32)
            start, end = starts[np.minimum([index - 1, index], len(starts) - 1)]
            chunk[rows[start:end]] += values[start:end]
            chunks.append(chunk)
        return pa.chunked_array(chunks)

    frame = large.LargeFrame(pa.schema(fields), len(labels), column)
    if is_large(len(labels), len(fields)):
        return frame
    return pa.Table.from_arrays([*map(column, range(len(fields)))], schema=frame.schema)
