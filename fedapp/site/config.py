"""Which table a site has: from its own node config, or its share of a simulated federation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedapp.errors import ConfigError

Value = bool | int | float | str
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FINGERPRINT = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """A party's name and where its rows come from.

    Parameters
    ----------
    name : unique in the federation; also the name of a folder.
    data : a file (or, in simulation, any name the run config may have).
    label, id_column, weight : columns that are no features; empty where there is none.
    dropped : further columns that are no features.
    partition : rule by which a simulated table is split; empty where the site has its own.
    part, n_parts : which share of a simulated table is this party's.
    columns : rule by which the columns of a simulated table are split, between vertical parties.
    shares_names : whether others may learn the names of the columns, between vertical parties.
    allows_export : whether this party's part of a model may leave it, to be joined with the others.
    predict_data : table to predict; that of ``data`` where there is no other.
    trusted : fingerprints of the keys of other vertical parties, by name; empty trusts any.
    """

    name: str
    data: str
    label: str = ""
    id_column: str = ""
    weight: str = ""
    dropped: tuple[str, ...] = ()
    partition: str = ""
    part: int = 0
    n_parts: int = 1
    columns: str = ""
    shares_names: bool = False
    allows_export: bool = False
    predict_data: str = ""
    trusted: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def group(self) -> str:
        """The column a natural partition goes by, if it does."""
        rule, _, column = self.partition.partition(":")
        return column if rule == "column" else ""

    def without_part(self) -> SiteConfig:
        """The same table without whose share it is."""
        return replace(self, name="", part=0)

    @property
    def simulated(self) -> bool:
        """Whether the table is a share of a larger one."""
        return bool(self.partition)


def site_config(node: Mapping[str, Value], run: Mapping[str, Value]) -> SiteConfig:
    """Read a site's own table from its node config, or its share from the run config in simulation.

    Parameters
    ----------
    node : the SuperNode's ``--node-config``; in simulation ``partition-id`` and ``num-partitions``.
    run : the run config. A site with a table of its own takes nothing from it.

    Raises
    ------
    ConfigError : the node config names no table, or no usable name.
    """
    if "data" in node:
        name = str(node.get("name", ""))
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"name in the node config must be letters, digits, '.', '_' or '-', got {name!r}"
            )
        return SiteConfig(name, **_table(node))
    if "partition-id" not in node:
        raise ConfigError('data in the node config must name a table, as in data="rows.csv"')
    part, n_parts = int(node["partition-id"]), int(node["num-partitions"])
    return SiteConfig(
        party_name(part, n_parts),
        partition=str(run["partition"]),
        columns=str(run["columns"]),
        part=part,
        n_parts=n_parts,
        **_table(run),
    )


def party_name(part: int, n_parts: int) -> str:
    """Name of a simulated party; names sort as their numbers do."""
    return f"party-{part + 1:0{len(str(n_parts))}d}"


def _table(config: Mapping[str, Value]) -> dict[str, Any]:
    """The settings that name a table and its columns."""
    dropped = str(config.get("drop-columns", "")).split(",")
    return {
        "data": str(config["data"]),
        "label": str(config.get("label", "")),
        "id_column": str(config.get("id", "")),
        "weight": str(config.get("weight", "")),
        "dropped": tuple(name.strip() for name in dropped if name.strip()),
        "shares_names": _is_true(config.get("share-column-names", False)),
        "allows_export": _is_true(config.get("allow-export", False)),
        "predict_data": str(config.get("predict-data", "")),
        "trusted": _trusted(str(config.get("trusted", ""))),
    }


def _is_true(value: Value) -> bool:
    """A switch; a node config's values may be texts."""
    return value is True or str(value).lower() == "true"


def _trusted(text: str) -> dict[str, str]:
    """``bank:a1b2...,shop:c3d4...`` by name; blanks in a fingerprint do not matter.

    Raises
    ------
    ConfigError : a part is no name and fingerprint.
    """
    parts = [part.partition(":") for part in text.replace(" ", "").split(",") if part]
    for name, _, fingerprint in parts:
        if not NAME.fullmatch(name) or not FINGERPRINT.fullmatch(fingerprint):
            raise ConfigError(
                f"trusted must be NAME:FINGERPRINT, with commas between, got {text!r}"
            )
    return {name: fingerprint for name, _, fingerprint in parts}
