"""The text of a model, of any kind: how it begins, how it is written and read.

Every ``model.json`` is one line of JSON: format, kind (but for a boosted model), objective, base
score (where the kind has one), names of columns and classes, and then what the kind consists of.
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
# Of a model's file: half of what a message can carry. Parsed, it takes some ten times as much.
MOST_BYTES = 2**30
_BEGINS = re.compile(r'\{"format":\d+,"kind":"([^"]*)"')
M = TypeVar("M")
# What JSON raises that is of another form than its reader's, or nested without end.
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
    """What every kind says first."""

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
    """The model as text; the same model always gives the same text.

    Parameters
    ----------
    kind : empty for a boosted model.
    content : what JSON can hold; floats by ``exact``.
    base_score : a number in the text where the model has one output, else a list.
    """
    told = [] if base_score is None else [exact(score) for score in base_score]
    document = {
        "format": FORMAT,
        **({"kind": kind} if kind else {}),
        "objective": model.objective,
        **({"base_score": told[0] if len(told) == 1 else told} if told else {}),
        "columns": list(model.columns),
        "classes": list(model.classes),
        **content,
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=ensure_ascii) + "\n"


def read_model(text: str, kind: str, build: Callable[[Opening, dict[str, Any]], M]) -> M:
    """Read a model that ``write_model`` wrote.

    Parameters
    ----------
    build : from what every kind says first, and the whole document.

    Raises
    ------
    DataError : the text is no model of this kind and format.
    """
    try:
        document = json.loads(text)
        found = document["format"], document.get("kind", ""), document["objective"]
        if found[:2] != (FORMAT, kind) or found[2] not in get_args(Objective):
            raise ValueError("format {}, kind {!r}, objective {}".format(*found))
        names = (_names(document, key) for key in ("columns", "classes"))
        said = Opening(cast(Objective, found[2]), *names)
        check_classes(said.objective, len(said.classes))
        return build(said, document)
    except UNREADABLE as error:
        got = as_plain(repr(error))
        raise DataError(f"model must be JSON of fedapp's format {FORMAT}, got {got}") from error


def _names(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts."""
    found = document[key]
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(f"{key} must be a list of texts")
    return tuple(found)


def written_categories(categories: Categories, sets: CategorySets) -> dict[str, Any]:
    """What a model's text says of categories: the names of each column, and the codes that each
    categorical split sends right; nothing where all columns hold numbers."""
    if not categories:
        return {}
    names = [None if of_column is None else list(of_column) for of_column in categories]
    return {"categories": names, "sets": sets.codes()}


def read_categories(document: Mapping[str, Any], n_columns: int) -> Categories:
    """Names of the categories of each column, as ``written_categories`` says them.

    Raises
    ------
    ValueError : not one entry a column, or names that are none, or one name twice.
    """
    found = document.get("categories", [])
    if not isinstance(found, list) or len(found) not in {0, n_columns}:
        raise ValueError(f"categories must be {n_columns}, one a column")
    for names in (names for names in found if names is not None):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("categories must be lists of texts")
        if len(set(names)) < len(names):
            raise ValueError("categories must differ within a column")
    return tuple(None if names is None else tuple(names) for names in found)


def exact(value: Any) -> Any:
    """A JSON number that reads back to the same bits."""
    return float(str(value)) if isinstance(value, np.floating) else value.item()


def kind_of(text: str) -> str:
    """Kind of model that a ``model.json`` holds, by how it begins."""
    begins = _BEGINS.match(text)
    return begins[1] if begins else ""


def json_of(text: str) -> dict[str, Any]:
    """A model's text, parsed; a DataError where it is no JSON, or nested too deeply."""
    try:
        found: dict[str, Any] = json.loads(text)
    except UNREADABLE as error:
        raise DataError(f"model must be JSON, got {as_plain(repr(error))}") from None
    return found


def model_text(path: Path) -> str:
    """Text of a ``model.json``, of any kind.

    Raises
    ------
    DataError : there is no such file, or it is too large to be a model.
    """
    if not path.is_file():
        raise DataError(f"model must be a file, got {path}")
    if (n_bytes := path.stat().st_size) > MOST_BYTES:
        raise DataError(f"model must be a file of <= {MOST_BYTES:,} bytes, got {n_bytes:,}: {path}")
    return path.read_text()
