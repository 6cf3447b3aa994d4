"""Names of a site's categories: what it tells of them, and the codes of all parties' names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedapp.data.categories import Categories, as_categories, entries_of, names_of, recoded
from fedapp.data.partition import SUBSETS
from fedapp.data.schema import listed
from fedapp.data.table import Table
from fedapp.errors import DataError, blaming
from fedapp.messages.dictionary import (
    JointCoding,
    dictionary_digest,
    pack_categories,
    read_categories,
)
from fedapp.messages.fields import Array
from fedapp.site.answer import Site
from fedapp.site.config import SiteConfig
from fedapp.site.store import Store
from fedapp.wire.content import LONGEST, UNPRINTABLE

OWN, JOINT = "own_categories", "categories"  # JSON, in bytes: an array file is written once


def told_categories(config: SiteConfig, subsets: Mapping[str, Table]) -> dict[str, Any]:
    """The fields of a ``HelloReply`` that tell of categories.

    Raises
    ------
    DataError : a name cannot be told, there are too many, or the site keeps names to itself that no
        schema gives.
    """
    own, table = own_categories(subsets), subsets["train"]
    _check_names(table.columns, own)
    try:
        told = pack_categories(own)
    except ValueError as error:
        raise DataError(f"{error}; drop-columns excludes a column") from error
    told["kinds"] = own_kinds(table, own)
    coded = {name: names for name, names in zip(table.columns, own, strict=False) if names}
    told["digests"] = tuple(
        dictionary_digest(names) if name in table.given else "" for name, names in coded.items()
    )
    if config.shares_categories:
        return told
    if found := [name for name in coded if name not in table.given]:
        rule = (
            "categories of feature columns must be given by the schema where share-categories is "
        )
        rule += "false in the node config, got none for {}"
        raise DataError.naming(rule, listed(found))
    return told | {"categories": ()}


def own_categories(subsets: Mapping[str, Table]) -> Categories:
    """The site's dictionary; an entry without names where no row of any subset has a value."""
    table = subsets["train"]
    has_values = np.zeros(len(table.columns), dtype=bool)
    for each in subsets.values():
        has_values |= ~np.isnan(each.values).all(axis=0)
    known = entries_of(table.categories, len(table.columns))
    return as_categories(
        names if names or there else () for names, there in zip(known, has_values, strict=True)
    )


def own_kinds(table: Table, own: Categories) -> tuple[str, ...]:
    """The site's ``Kinds``."""
    entries = entries_of(own, len(table.kinds))
    kinds = zip(table.kinds, entries, strict=True)
    found = tuple("" if names == () else kind for kind, names in kinds)
    return found if {*found} - {"number"} else ()


def _check_names(columns: Sequence[str], categories: Categories) -> None:
    """Hold that names may stand in a message."""
    for column, names in zip(columns, categories, strict=False):
        if any(len(name) > LONGEST or UNPRINTABLE.search(name) for name in names or ()):
            rule = f"categories of feature column {{}} must have {LONGEST} letters at most, and no "
            rule += "control characters"
            raise DataError.naming(rule, listed([column]))


def keep_own(store: Store, own: Categories) -> None:
    """Keep the dictionary that the values are coded by, until there is a joint one."""
    store[OWN] = _as_bytes(own)


def keep_categories(store: Store, categories: Categories) -> None:
    """Keep the dictionary that the values are coded by to the end of the run."""
    store[JOINT] = _as_bytes(categories)


def kept_categories(store: Store) -> Categories:
    """The dictionary of a run: joint between horizontal parties, else the site's own."""
    return _from_bytes(store[JOINT])


def recode(site: Site, request: JointCoding) -> Array:
    """Put the codes of the joint dictionary in place of the own ones, in all subsets.

    Returns
    -------
    int64, shape (n_columns,): values of each column that the joint dictionary lacks, and that are
    missing from now on; empty where no column has categories.

    Raises
    ------
    ProtocolError : the dictionary is that of another table, or not the one that a schema gives.
    """
    store, message = site.store, type(request).__name__
    columns = store.facts["hello"]["columns"]
    n_columns = len(columns)
    joint, own = read_categories(site.name, request, n_columns), _from_bytes(store[OWN])
    digests = store.facts["hello"]["digests"]
    unseen = np.zeros(n_columns if joint else 0, dtype=np.int64)
    with blaming(site.name, message, "categories"):
        coded = [place for place, names in enumerate(own) if names]
        for place, digest in zip(coded, digests, strict=True):
            if digest and names_of(joint, place) != own[place]:
                raise ValueError("categories must be those that the site's schema gives")
        for subset in SUBSETS:
            given = store[f"{subset}.values"]
            values, n_unseen = recoded(given, own, joint, columns)
            if values is not given:
                store[f"{subset}.values"] = values
            unseen += n_unseen[: len(unseen)]
    store.drop(OWN)
    keep_categories(store, joint)
    return unseen


def _as_bytes(categories: Categories) -> Array:
    return np.frombuffer(json.dumps(categories).encode(), dtype=np.uint8)


def _from_bytes(text: Array) -> Categories:
    return tuple(None if one is None else tuple(one) for one in json.loads(text.tobytes()))
