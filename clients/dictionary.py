"""Category names of a site: what it reports of them, and recoding by the joint dictionary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedapp.data.partition import SUBSETS
from fedapp.data.schema import listed
from fedapp.data.table import Table
from fedapp.errors import DataError, as_protocol_error
from fedapp.messages.fields import Array
from fedapp.messages.handshake import (
    JointCoding,
    dictionary_digest,
    pack_categories,
    read_categories,
)
from fedapp.messages.wire import LONGEST, UNPRINTABLE
from fedapp.site.answer import Site
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.trees.sets import Categories, as_categories, entries_of, names_of, recoded

OWN, JOINT = "own_categories", "categories"  # JSON, in bytes: an array file is written once


def told_categories(config: SiteConfig, subsets: Mapping[str, Table]) -> dict[str, Any]:
    """Category fields of a ``HelloReply``; raises a DataError if names may not be sent."""
    local, table = own_categories(subsets), subsets["train"]
    for column, names in zip(table.columns, local, strict=False):
        if any(len(name) > LONGEST or UNPRINTABLE.search(name) for name in names or ()):
            rule = f"categories of feature column {{}} must have {LONGEST} letters at most, and no "
            rule += "control characters"
            raise DataError.naming(rule, listed([column]))
    try:
        fields = pack_categories(local)
    except ValueError as error:
        raise DataError(f"{error}; drop-columns excludes a column") from error
    # A column without any value has no kind; a table of numbers only reports none.
    entries = entries_of(local, len(table.kinds))
    kinds = tuple(
        "" if names == () else kind for kind, names in zip(table.kinds, entries, strict=True)
    )
    fields["kinds"] = kinds if {*kinds} - {"number"} else ()
    coded = {name: names for name, names in zip(table.columns, local, strict=False) if names}
    fields["digests"] = tuple(
        dictionary_digest(names) if name in table.given else "" for name, names in coded.items()
    )
    if config.shares_categories:
        return fields
    if unshared := [name for name in coded if name not in table.given]:
        rule = (
            "categories of feature columns must be given by the schema where share-categories is "
        )
        rule += "false in the node config, got none for {}"
        raise DataError.naming(rule, listed(unshared))
    return fields | {"categories": ()}


def own_categories(subsets: Mapping[str, Table]) -> Categories:
    """The site's dictionary; an entry is empty if no row of any subset has a value."""
    table = subsets["train"]
    has_values = np.zeros(len(table.columns), dtype=bool)
    for each in subsets.values():
        has_values |= ~np.isnan(each.values).all(axis=0)
    entries = entries_of(table.categories, len(table.columns))
    return as_categories(
        names if names or has_value else ()
        for names, has_value in zip(entries, has_values, strict=True)
    )


def keep_own(store: Store, categories: Categories) -> None:
    """Store the local dictionary, which codes the values until there is a joint one."""
    store[OWN] = _as_bytes(categories)


def keep_categories(store: Store, categories: Categories) -> None:
    """Store the dictionary that codes the values to the end of the run."""
    store[JOINT] = _as_bytes(categories)


def kept_categories(store: Store) -> Categories:
    """Dictionary of a run: joint for horizontal parties, else the site's."""
    return _from_bytes(store[JOINT])


def recode(site: Site, request: JointCoding) -> Array:
    """Recode all subsets by the joint dictionary.

    Returns int64, shape (n_columns,): values per column that it lacks, which become missing; empty
    if no column has categories.
    """
    store, message = site.store, type(request).__name__
    columns = store.facts["hello"]["columns"]
    n_columns = len(columns)
    joint, local = read_categories(site.name, request, n_columns), _from_bytes(store[OWN])
    digests = store.facts["hello"]["digests"]
    unseen = np.zeros(n_columns if joint else 0, dtype=np.int64)
    with as_protocol_error(site.name, message, "categories"):
        coded = [column for column, names in enumerate(local) if names]
        for column, digest in zip(coded, digests, strict=True):
            if digest and names_of(joint, column) != local[column]:
                raise ValueError("categories must be those that the site's schema gives")
        for subset in SUBSETS:
            old_values = store[f"{subset}.values"]
            values, n_unseen = recoded(old_values, local, joint, columns)
            if values is not old_values:
                store[f"{subset}.values"] = values
            unseen += n_unseen[: len(unseen)]
    store.drop(OWN)
    keep_categories(store, joint)
    return unseen


def _as_bytes(categories: Categories) -> Array:
    return np.frombuffer(json.dumps(categories).encode(), dtype=np.uint8)


def _from_bytes(text: Array) -> Categories:
    return tuple(None if names is None else tuple(names) for names in json.loads(text.tobytes()))
