"""Constraints of columns in SecureBoost: each owner's own, and those of all columns side by side.

The run config names columns, and an owner that shares its names tells which of its own are meant.
One that does not share them says in its node config what holds for them, among themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import ConfigError, DataError, ProtocolError, blaming
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import SetupRequest
from fedapp.site.answer import Site
from fedapp.trees.boosted.constraints import (
    check_without_categories,
    constraints_of,
    parse_interactions,
    parse_monotone,
)

Ints = npt.NDArray[np.int64]
Groups = tuple[frozenset[int], ...]
BOTH = "monotone-constraints and interaction-constraints"


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Constraints of the run config, by names of columns.

    Parameters
    ----------
    directions : by name, as in ``parse_monotone``.
    groups : of names, as in ``parse_interactions``.
    """

    directions: Mapping[str, int]
    groups: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, monotone: str, interactions: str) -> Wanted:
        """Of the texts of the settings.

        Raises
        ------
        ValueError : a text is not of its form.
        """
        return cls(parse_monotone(monotone), parse_interactions(interactions))

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once."""
        in_groups = (name for group in self.groups for name in group)
        return tuple(dict.fromkeys((*self.directions, *in_groups)))


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What an owner says of its columns, under its own numbers.

    Parameters
    ----------
    named : int64, shape (n_names,): its column of each name in the run config, -1 for none.
    directions : int8, shape (n_columns,), of its node config; empty where no column is held.
    groups : columns that may stand together on a path, of its node config.
    """

    named: Ints
    directions: npt.NDArray[np.int8]
    groups: Groups

    def fields(self) -> dict[str, Array]:
        """As the letter tells them."""
        members = [sorted(group) for group in self.groups]
        return {
            "named": self.named,
            "directions": self.directions,
            "group_columns": np.array([c for each in members for c in each], dtype=np.int64),
            "group_sizes": np.array([len(each) for each in members], dtype=np.int64),
        }


def wanted_of(site: Site, request: SetupRequest) -> Wanted:
    """Constraints of the run config.

    Raises
    ------
    ProtocolError : a text is not of its form.
    """
    texts = request.monotone_constraints, request.interaction_constraints
    with blaming(site.name, "SetupRequest", "monotone_constraints, interaction_constraints"):
        return Wanted.of(*texts)


def own_constraints(site: Site, wanted: Wanted) -> Held:
    """What holds for a site's own columns.

    Raises
    ------
    DataError : its node config names a column that it does not have.
    """
    config, columns = site.config, site.store.facts["columns"]
    # In a simulation the run config's author has all tables.
    is_shared = config.shares_names or config.simulated
    places = {name: place for place, name in enumerate(columns)} if is_shared else {}
    named = [places.get(name, -1) for name in wanted.names]
    try:
        directions, groups = constraints_of(
            config.monotone_constraints, config.interaction_constraints, columns
        )
    except ValueError as error:
        rule = f"{BOTH} in the node config must name columns of the site's table"
        raise DataError(rule, here=f"{error} in the node config") from None
    return Held(np.array(named, dtype=np.int64), directions, groups)


def told_constraints(party: str, letter: Any, n_names: int, n_columns: int) -> Held:
    """What another owner tells of its columns.

    Parameters
    ----------
    letter : has the fields of ``Held.fields``.

    Raises
    ------
    ProtocolError : they are not of so many columns, or of so many names.
    """
    sizes, members = letter.group_sizes, letter.group_columns
    told = letter.named[letter.named >= 0]
    rules = {
        "named": (
            len(letter.named) == n_names
            and bool((told < n_columns).all())
            and len(np.unique(told)) == len(told),
            f"must be {n_names} columns below {n_columns}, each once",
        ),
        "directions": (
            len(letter.directions) in (0, n_columns),
            f"must be one a column of {n_columns}, or none",
        ),
        "group_columns": (bool((members < n_columns).all()), f"must be < {n_columns}"),
        "group_sizes": (
            int(sizes.sum()) == len(members),
            f"must divide {len(members)} columns among the groups",
        ),
    }
    for field, (holds, rule) in rules.items():
        if not holds:
            raise ProtocolError(party, "ColumnBins", field, rule)
    ends = np.cumsum(sizes)[:-1]
    groups = tuple(frozenset(group.tolist()) for group in np.split(members, ends) if len(group))
    return Held(letter.named, letter.directions, groups)


def joint_constraints(
    wanted: Wanted, held: Mapping[str, Held], categorical: Mapping[str, list[bool]]
) -> tuple[list[int], list[list[int]]]:
    """Constraints of the columns of all parties side by side.

    Parameters
    ----------
    held : by party, in the order of their columns.
    categorical : which of a party's columns are of categories, one a column.

    Returns
    -------
    directions : one a column; none where no column is held.
    groups : columns that may stand together on a path.

    Raises
    ------
    ConfigError : a name is nobody's or of two, a column has two directions, or directions are
        beside columns of categories.
    """
    counts = [len(categorical[party]) for party in held]
    firsts = dict(zip(held, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
    places = _joint_places(wanted.names, held, firsts)
    directions, groups = [0] * sum(counts), list[list[int]]()
    for party, own in held.items():
        first = firsts[party]
        directions[first : first + len(own.directions)] = own.directions.tolist()
        groups += [sorted(first + column for column in group) for group in own.groups]
    for name, direction in wanted.directions.items():
        if directions[places[name]] not in (0, direction):
            rule = "must be what the node config of its owner says"
            raise ConfigError(f"monotone-constraints of {name} {rule}, got {direction}")
        directions[places[name]] = direction
    groups += [sorted({places[name] for name in group}) for group in wanted.groups]
    found = directions if any(directions) else []
    has_categories = any(any(flags) for flags in categorical.values())
    try:
        check_without_categories(found, has_categories)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return found, groups


def _joint_places(
    names: tuple[str, ...], held: Mapping[str, Held], firsts: Mapping[str, int]
) -> dict[str, int]:
    """The joint column of each name in the run config."""
    places: dict[str, int] = {}
    for name, *own in zip(names, *(each.named.tolist() for each in held.values()), strict=True):
        found = {party: column for party, column in zip(held, own, strict=True) if column >= 0}
        if len(found) != 1:
            owners = ", ".join(found) if found else "no party that shares its names"
            raise ConfigError(
                f"{BOTH} must name columns of one party that shares its names "
                f"(share-column-names), got {name} of {owners}; an owner that does not can name "
                "columns of its own in its node config"
            )
        ((party, column),) = found.items()
        places[name] = firsts[party] + column
    return places
