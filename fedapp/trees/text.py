"""The text format of models of any kind.

Every ``model.json`` is one line of JSON: format, kind (not for a boosted model), objective, base
score (if the kind has one), names of columns and classes, and the content of the kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from fedapp.data.categories import Categories
from fedapp.errors import DataError, as_plain
from fedapp.trees.objective import Objective, check_classes
from fedapp.trees.sets import CategorySets

FORMAT = 1
# Half the size of the largest message. Parsed, the file takes about ten times the memory.
MOST_BYTES = 2**30
_BEGINS = re.compile(r'\{"format":\d+,"kind":"([^"]*)"')
M = TypeVar("M")
# Raised for JSON of an unexpected form, or nested too deeply.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Described(Protocol):
    """A model of any kind."""

    @property
    def objective(self) -> Objective: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def classes(self) -> tuple[str, ...]: ...


class Opening(NamedTuple):
    """The fields that every kind of model begins with."""

    objective: Objective
    columns: tuple[str, ...]
    classes: tuple[str, ...]


def write_model(
    kind: str,
    model: Described,
    content: Mapping[str, Any],
    base_score: npt.NDArray[np.float32] | None = None,
    ensure_ascii: bool = True,
) -> str:
    """The model as text; deterministic.

    ``kind`` is empty for a boosted model; floats in ``content`` come from ``exact``. A base score
    of one output is written as a number, else as a list.
    """
    scores = [] if base_score is None else [exact(score) for score in base_score]
    document = {
        "format": FORMAT,
        **({"kind": kind} if kind else {}),
        "objective": model.objective,
        **({"base_score": scores[0] if len(scores) == 1 else scores} if scores else {}),
        "columns": list(model.columns),
        "classes": list(model.classes),
        **content,
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=ensure_ascii) + "\n"


def read_model(text: str, kind: str, build: Callable[[Opening, dict[str, Any]], M]) -> M:
    """Undo ``write_model`` by ``build(header, document)``; DataError for any other text."""
    try:
        document = json.loads(text)
        identity = document["format"], document.get("kind", ""), document["objective"]
        if identity[:2] != (FORMAT, kind) or identity[2] not in get_args(Objective):
            raise ValueError("format {}, kind {!r}, objective {}".format(*identity))
        names = (_names(document, key) for key in ("columns", "classes"))
        header = Opening(cast(Objective, identity[2]), *names)
        check_classes(header.objective, len(header.classes))
        return build(header, document)
    except UNREADABLE as error:
        got = as_plain(repr(error))
        raise DataError(f"model must be JSON of fedapp's format {FORMAT}, got {got}") from error


def _names(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts."""
    names = document[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be a list of texts")
    return tuple(names)


def written_categories(categories: Categories, sets: CategorySets) -> dict[str, Any]:
    """JSON fields for categories: names by column, and the codes each split sends right."""
    if not categories:
        return {}
    names = [None if column_names is None else list(column_names) for column_names in categories]
    return {"categories": names, "sets": sets.codes()}


def read_categories(document: Mapping[str, Any], n_columns: int) -> Categories:
    """Undo ``written_categories``: names by column. Raises ValueError for any other form."""
    categories = document.get("categories", [])
    if not isinstance(categories, list) or len(categories) not in {0, n_columns}:
        raise ValueError(f"categories must be {n_columns}, one a column")
    for names in (names for names in categories if names is not None):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("categories must be lists of texts")
        if len(set(names)) < len(names):
            raise ValueError("categories must differ within a column")
    return tuple(None if names is None else tuple(names) for names in categories)


def exact(value: Any) -> Any:
    """A JSON number that reads back to the same bits."""
    return float(str(value)) if isinstance(value, np.floating) else value.item()


def kind_of(text: str) -> str:
    """Kind of a model's text, by its beginning."""
    begins = _BEGINS.match(text)
    return begins[1] if begins else ""


def json_of(text: str) -> dict[str, Any]:
    """A model's text, parsed; DataError if it is not JSON, or nested too deeply."""
    try:
        document: dict[str, Any] = json.loads(text)
    except UNREADABLE as error:
        raise DataError(f"model must be JSON, got {as_plain(repr(error))}") from None
    return document


def model_text(path: Path) -> str:
    """Text of a ``model.json`` of any kind; DataError if it is missing or too large."""
    if not path.is_file():
        raise DataError(f"model must be a file, got {path}")
    if (n_bytes := path.stat().st_size) > MOST_BYTES:
        raise DataError(f"model must be a file of <= {MOST_BYTES:,} bytes, got {n_bytes:,}: {path}")
    return path.read_text()
