"""Margins of a party's rows under a model whose trees also grow elsewhere."""

from __future__ import annotations

import numpy as np

from clients.labels import run_outputs
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.fields import Array
from fedapp.messages.trees import Trees, arrays_of
from fedapp.site.answer import Site
from fedapp.site.store import Store
from fedapp.trees.model import Grown, unpack_trees
from fedapp.trees.sets import Ints


def told_trees(site: Site, request: Trees, widths: Ints) -> Grown:
    """Trees of a request, checked; ``widths``: categories of each column, 0 if numeric."""
    message, width = type(request).__name__, run_outputs(site.store)
    with as_protocol_error(site.name, message, "trees"):
        grown = unpack_trees(arrays_of(request), widths)
    if len(grown.trees) % width:
        rule = f"must be a multiple of {width}, got {len(grown.trees)}"
        raise ProtocolError(site.name, message, "trees", rule)
    return grown


def base_margins(store: Store, subset: str) -> Array | None:
    """Initial margins of a subset, float32, shape (n_rows,); None: the base score."""
    return store.find(f"{subset}.base_margins")


def check_outputs(site: Site, request: object, field: str) -> None:
    """Check that a field of a request has one value per output."""
    width, n_values = run_outputs(site.store), len(getattr(request, field))
    if n_values != width:
        rule = f"must be {width}, one an output, got {n_values}"
        raise ProtocolError(site.name, type(request).__name__, field, rule)


def begin_margins(store: Store, base_margin: Array) -> None:
    """Margins before the first tree: the table's base margins, else the run's ``base_margin``."""
    for subset in WATCHED:
        if (margins := base_margins(store, subset)) is not None:
            store[f"{subset}.margins"] = margins[:, None]
            continue
        store[f"{subset}.margins"] = np.tile(base_margin, (len(store[f"{subset}.labels"]), 1))
