"""Margins of a party's rows, to which trees are added that have grown elsewhere too."""

from __future__ import annotations

import numpy as np

from clients.labels import run_outputs
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError, blaming
from fedapp.messages.fields import Array
from fedapp.messages.trees import Trees, arrays_of
from fedapp.site.answer import Site
from fedapp.site.store import Store
from fedapp.trees.model import Grown
from fedapp.trees.packed import unpack_trees
from fedapp.trees.sets import Ints


def told_trees(site: Site, request: Trees, widths: Ints) -> Grown:
    """The trees of a request.

    Parameters
    ----------
    widths : int64, shape (n_columns,): categories of each column, 0 for one of numbers.

    Raises
    ------
    ProtocolError : they are none of the party's table, or not one for every output of the run.
    """
    message, width = type(request).__name__, run_outputs(site.store)
    with blaming(site.name, message, "trees"):
        grown = unpack_trees(arrays_of(request), widths)
    if len(grown.trees) % width:
        rule = f"must be a multiple of {width}, got {len(grown.trees)}"
        raise ProtocolError(site.name, message, "trees", rule)
    return grown


def base_margins(store: Store, subset: str) -> Array | None:
    """The margins that the rows of a subset start from, float32, shape (n_rows,); None where they
    start from the base score."""
    return store.find(f"{subset}.base_margins")


def check_outputs(site: Site, request: object, field: str) -> None:
    """Hold that a field has a value for every output of the run.

    Raises
    ------
    ProtocolError : it has not.
    """
    width, n_values = run_outputs(site.store), len(getattr(request, field))
    if n_values != width:
        rule = f"must be {width}, one an output, got {n_values}"
        raise ProtocolError(site.name, type(request).__name__, field, rule)


def begin_margins(store: Store, base_margin: Array) -> None:
    """Margins before the first tree, for the rows that train and those that validate: their own
    base margins, where the table has them.

    Parameters
    ----------
    base_margin : float32, shape (n_outputs,).
    """
    for subset in WATCHED:
        if (own := base_margins(store, subset)) is not None:
            store[f"{subset}.margins"] = own[:, None]
            continue
        n_rows = len(store[f"{subset}.labels"])
        store[f"{subset}.margins"] = np.tile(base_margin, (n_rows, 1))
