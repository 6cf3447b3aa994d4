"""Margins of a party's rows, to which trees are added that have grown elsewhere too."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from clients.labels import CLASSES
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError, blaming
from fedapp.messages.fields import Array
from fedapp.messages.trees import Trees, arrays_of
from fedapp.site.answer import Site
from fedapp.site.store import Store
from fedapp.trees.model import Grown
from fedapp.trees.objective import n_outputs
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
    facts, message = site.store.facts, type(request).__name__
    with blaming(site.name, message, "trees"):
        grown = unpack_trees(arrays_of(request), widths)
    width = n_outputs(facts["objective"], len(facts[CLASSES]))
    if len(grown.trees) % width:
        rule = f"must be a multiple of {width}, got {len(grown.trees)}"
        raise ProtocolError(site.name, message, "trees", rule)
    return grown


def base_margins(store: Store, subset: str) -> Array | None:
    """The margins that the rows of a subset start from, float32, shape (n_rows,); None where they
    start from the base score."""
    return store.find(f"{subset}.base_margins")


class TellsBaseMargin(Protocol):
    """A request that says what margins rows start from."""

    @property
    def base_margin(self) -> Array: ...


def told_base_margin(site: Site, request: TellsBaseMargin) -> Array:
    """The margins that rows start from; float32, shape (n_outputs,).

    Raises
    ------
    ProtocolError : they are not one for every output of the run.
    """
    facts, found = site.store.facts, request.base_margin
    width = n_outputs(facts["objective"], len(facts[CLASSES]))
    if len(found) != width:
        rule = f"must be {width}, one an output, got {len(found)}"
        raise ProtocolError(site.name, type(request).__name__, "base_margin", rule)
    return found


def begin_margins(store: Store, base_margin: Array) -> None:
    """Margins before the first tree, for the rows that train and those that validate: their own
    base margins, where the table has them.

    Parameters
    ----------
    base_margin : see ``told_base_margin``.
    """
    for subset in WATCHED:
        if (own := base_margins(store, subset)) is not None:
            store[f"{subset}.margins"] = own[:, None]
            continue
        n_rows = len(store[f"{subset}.labels"])
        store[f"{subset}.margins"] = np.tile(base_margin, (n_rows, 1))
