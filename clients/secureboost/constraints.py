"""Column constraints in SecureBoost: each party's, and the joint ones.

The run config names columns; a party that shares its column names sends which of them are its. A
party that does not share them sets constraints among its columns in its node config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import SetupRequest
from fedapp.site.answer import Site
from fedapp.trees.grow import (
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
    """Constraints of the run config, by column name."""

    directions: Mapping[str, int]  # as in ``parse_monotone``
    groups: tuple[tuple[str, ...], ...]  # as in ``parse_interactions``

    @classmethod
    def of(cls, monotone: str, interactions: str) -> Wanted:
        """Parse the settings; raises a ValueError."""
        return cls(parse_monotone(monotone), parse_interactions(interactions))

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once."""
        in_groups = (name for group in self.groups for name in group)
        return tuple(dict.fromkeys((*self.directions, *in_groups)))


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Constraints of one party's columns, by its column numbers."""

    named: Ints  # (n_names,): its column of each name in the run config, -1 for none
    directions: npt.NDArray[np.int8]  # (n_columns,), of its node config; or empty
    groups: Groups  # columns that may occur together on a path, of its node config

    def fields(self) -> dict[str, Array]:
        """Fields of a ``ColumnBins``."""
        members = [sorted(group) for group in self.groups]
        return {
            "named": self.named,
            "directions": self.directions,
            "group_columns": np.array(
                [column for group in members for column in group], dtype=np.int64
            ),
            "group_sizes": np.array([len(group) for group in members], dtype=np.int64),
        }


def wanted_of(site: Site, request: SetupRequest) -> Wanted:
    """Constraints of the run config; raises a ProtocolError."""
    with as_protocol_error(
        site.name, "SetupRequest", "monotone_constraints, interaction_constraints"
    ):
        return Wanted.of(request.monotone_constraints, request.interaction_constraints)


def own_constraints(site: Site, wanted: Wanted) -> Held:
    """Constraints of a site's columns; raises a DataError for a name it does not have."""
    config, columns = site.config, site.store.facts["columns"]
    # In a simulation, whoever writes the run config has all tables.
    is_shared = config.shares_names or config.simulated
    column_ids = {name: column for column, name in enumerate(columns)} if is_shared else {}
    named = [column_ids.get(name, -1) for name in wanted.names]
    try:
        directions, groups = constraints_of(
            config.monotone_constraints, config.interaction_constraints, columns
        )
    except ValueError as error:
        rule = f"{BOTH} in the node config must name columns of the site's table"
        raise DataError(rule, here=f"{error} in the node config") from None
    return Held(np.array(named, dtype=np.int64), directions, groups)


def told_constraints(party: str, letter: Any, n_names: int, n_columns: int) -> Held:
    """Constraints that another party has sent; raises a ProtocolError if they do not fit."""
    sizes, members = letter.group_sizes, letter.group_columns
    named = letter.named[letter.named >= 0]
    rules = {
        "named": (
            len(letter.named) == n_names
            and bool((named < n_columns).all())
            and len(np.unique(named)) == len(named),
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
    """Constraints of the joint columns, in the order of ``held``: directions, or none; groups."""
    counts = [len(categorical[party]) for party in held]
    firsts = dict(zip(held, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
    joint_ids = _joint_ids(wanted.names, held, firsts)
    directions, groups = [0] * sum(counts), list[list[int]]()
    for party, of_party in held.items():
        first = firsts[party]
        directions[first : first + len(of_party.directions)] = of_party.directions.tolist()
        groups += [sorted(first + column for column in group) for group in of_party.groups]
    for name, direction in wanted.directions.items():
        if directions[joint_ids[name]] not in (0, direction):
            rule = "must match the node config of its owner"
            raise ConfigError(f"monotone-constraints of {name} {rule}, got {direction}")
        directions[joint_ids[name]] = direction
    groups += [sorted({joint_ids[name] for name in group}) for group in wanted.groups]
    set_directions = directions if any(directions) else []
    has_categories = any(any(flags) for flags in categorical.values())
    try:
        check_without_categories(set_directions, has_categories)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return set_directions, groups


def _joint_ids(
    names: tuple[str, ...], held: Mapping[str, Held], firsts: Mapping[str, int]
) -> dict[str, int]:
    joint_ids: dict[str, int] = {}
    for name, *columns in zip(names, *(each.named.tolist() for each in held.values()), strict=True):
        by_party = {
            party: column for party, column in zip(held, columns, strict=True) if column >= 0
        }
        if len(by_party) != 1:
            owners = ", ".join(by_party) if by_party else "no party that shares its names"
            raise ConfigError(
                f"{BOTH} must name columns of one party that shares its names "
                f"(share-column-names), got {name} of {owners}; an owner that does not can "
                "constrain its columns in its node config"
            )
        ((party, column),) = by_party.items()
        joint_ids[name] = firsts[party] + column
    return joint_ids
