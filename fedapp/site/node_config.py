"""What a node config says of a site: its table, and which runs it takes part in."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedapp.data.names import NAME
from fedapp.data.schema import Reader
from fedapp.data.schema_file import Schema, check_encoding, read_schema
from fedapp.errors import ConfigError
from fedapp.toml import read_toml
from fedapp.trees.boosted.constraints import parse_interactions, parse_monotone

Value = bool | int | float | str
PAIR = re.compile(r"(\S+?)=(\'[^\']*\'|\"[^\"]*\"|\S+)")  # Flower's own
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
HEX = re.compile(r"[0-9a-f]{64}")
# A site's own limits, far above what ordinary runs ask for.
LIMITS = {
    "most-bins": 1024,
    "score-bins": 4096,
    "align-most-rows": 10_000_000,
    "most-columns": 100_000,
    "runs-per-day": 5,
}
# Smallest values that it takes; 0 takes all.
FLOORS = {"min-child-rows": 0}
# What a node config may say. A word misspelled is refused: it could be the site's policy.
NODE_KEYS = (
    *("name", "data", "label", "id", "weight", "drop-columns", "predict-data"),
    *("schema", "header", "decimal", "encoding", "positive-label"),
    *("base-margin", "missing-label"),
    *("share-column-names", "share-categories", "allow-export", "trusted", "allow", "min-rows"),
    *("encrypted-labels", "allow-insecure", "app", "full-masks", "least-parties"),
    *("min-bin-rows", "least-bin-rows", "release-keys", *FLOORS, *LIMITS),
    *("monotone-constraints", "interaction-constraints"),
    *("approve", "run-epsilon", "total-epsilon", "draws-secret"),
    *("partition-id", "num-partitions"),
)
# Where a site has min-rows, single rows do not show in its scores either.
MIN_BIN_ROWS = 10
# Parties of a masked sum: where a node config says nothing, and the fewest it may say.
LEAST_PARTIES, FEWEST_IN_SUMS = 3, 2
# Of draws-secret: characters, and the word for draws as in a simulation.
SHORTEST_SECRET, NO_SECRET = 16, "none"


def table_settings(config: Mapping[str, Value], is_shared: bool = False) -> dict[str, Any]:
    """The settings that name a table and its columns, and what its schema says where they do not.

    Parameters
    ----------
    is_shared : whether they are those of several tables.
    """
    file = str(config.get("schema", ""))
    schema = read_schema(Path(file)) if file else Schema()
    roles, dropped = schema.roles(), str(config.get("drop-columns", "")).split(",")
    unlabelled = str(config.get("missing-label", "")) or "refuse"
    return {
        "data": str(config["data"]),
        "label": str(config.get("label", "")) or roles.label,
        "id_column": str(config.get("id", "")) or roles.id_column,
        "weight": str(config.get("weight", "")) or roles.weight,
        "base_margin": str(config.get("base-margin", "")) or roles.base_margin,
        "drops_unlabelled": _one_of("missing-label", unlabelled, "refuse", "drop") == "drop"
        or roles.drop_unlabelled,
        "dropped": tuple(
            dict.fromkeys((*roles.drop, *(name.strip() for name in dropped if name.strip())))
        ),
        "positive_label": str(config.get("positive-label", "")) or schema.positive_label,
        "reader": table_reader(config, schema.reader(is_shared)),
        "shares_names": _is_true(config, "share-column-names"),
        "allows_export": _is_true(config, "allow-export"),
        "predict_data": str(config.get("predict-data", "")),
    }


def table_reader(config: Mapping[str, Value], said: Reader) -> Reader:
    """What the schema says, and the settings that say otherwise.

    Raises
    ------
    ConfigError : a setting breaks its rule.
    """
    decimal = str(config.get("decimal", ".")).strip()
    if decimal not in (".", ","):
        raise ConfigError(f"decimal must be a point or a comma, got {decimal!r}")
    encoding = str(config.get("encoding", "")) or said.encoding
    check_encoding(encoding)
    return replace(
        said,
        header=said.header and _is_true(config, "header", default=True),
        decimal=decimal if decimal != "." else said.decimal,
        encoding=encoding,
    )


def parse_node_config(text: str) -> dict[str, Value]:
    """Read a node config as ``flower-supernode --node-config`` takes it.

    Parameters
    ----------
    text : ``name="bank" data="rows.csv"``, or the path of a TOML file that says the same.

    Raises
    ------
    ConfigError : it is neither.
    """
    if text.endswith(".toml"):
        text = Path(text).read_text()
    else:
        text = "\n".join(f"{key} = {value}" for key, value in PAIR.findall(text))
    return read_toml(text, 'node config must be like name="bank" data="rows.csv"')


def check_keys(node: Mapping[str, Value]) -> None:
    """Refuse what no node config has.

    Raises
    ------
    ConfigError : names the key, and one that is spelled alike.
    """
    for key in node:
        if key not in NODE_KEYS:
            alike = difflib.get_close_matches(key, NODE_KEYS, n=1)
            hint = f"; did you mean {alike[0]}?" if alike else ""
            raise ConfigError(f"{key} in the node config is not a setting{hint}")


def policy(node: Mapping[str, Value]) -> dict[str, Any]:
    """Which runs the site takes part in; its own affair, so never in a run config.

    Raises
    ------
    ConfigError : a limit is no whole number, approve is another word, or an app bundle is named by
        no hash.
    """
    names = str(node.get("allow", "")).replace(",", " ").replace("_", "-").split()
    min_rows = whole(node, "min-rows", 0)
    run, total = (_not_negative(node, key) for key in ("run-epsilon", "total-epsilon"))
    return {
        "allowed": frozenset(names),
        "min_rows": min_rows,
        "min_bin_rows": whole(node, "min-bin-rows", min(min_rows, MIN_BIN_ROWS)),
        "least_bin_rows": whole(node, "least-bin-rows", 0),
        "limits": {key: whole(node, key, limit) for key, limit in LIMITS.items()},
        "floors": {key: whole(node, key, floor) for key, floor in FLOORS.items()},
        "least_parties": _least_parties(node),
        "run_epsilon": run or total,
        "total_epsilon": total or run,
        "asks": _one_of("approve", str(node.get("approve", "all")), "ask", "all") == "ask",
        "encrypts_labels": _is_true(node, "encrypted-labels"),
        "allows_insecure": _is_true(node, "allow-insecure"),
        "bundles": _hex(node, "app", "hashes", "fedapp app hash"),
        "release_keys": _hex(node, "release-keys", "public keys", "fedapp app sign"),
        "trusted": _trusted(str(node.get("trusted", ""))),
        "full_masks": _is_true(node, "full-masks"),
        "shares_categories": _is_true(node, "share-categories", default=True),
        "draws_secret": _draws_secret(node),
        **_constraints(node),
    }


def _constraints(node: Mapping[str, Value]) -> dict[str, str]:
    """Constraints of columns, as texts of their form."""
    monotone = str(node.get("monotone-constraints", ""))
    interactions = str(node.get("interaction-constraints", ""))
    try:
        parse_monotone(monotone)
        parse_interactions(interactions)
    except ValueError as error:
        raise ConfigError(f"{error} in the node config") from None
    return {"monotone_constraints": monotone, "interaction_constraints": interactions}


def _draws_secret(node: Mapping[str, Value]) -> str:
    """A text that cannot be guessed, or NO_SECRET; empty where nothing is said."""
    found = str(node.get("draws-secret", ""))
    if "draws-secret" in node and len(found) < SHORTEST_SECRET and found != NO_SECRET:
        rule = f"must have {SHORTEST_SECRET} characters or more, or be {NO_SECRET} or absent"
        raise ConfigError(f"draws-secret {rule}, got {len(found)}")
    return found


def _hex(node: Mapping[str, Value], key: str, what: str, command: str) -> frozenset[str]:
    """Hashes or keys, separated by commas or blanks."""
    text = str(node.get(key, ""))
    found = text.replace(",", " ").split()
    if not all(HEX.fullmatch(one) for one in found):
        raise ConfigError(f"{key} must be {what} of 64 hex digits ({command}), got {text!r}")
    return frozenset(found)


def _one_of(key: str, text: str, *words: str) -> str:
    """One of two words."""
    if text not in words:
        raise ConfigError(f"{key} must be {' or '.join(words)}, got {text!r}")
    return text


def whole(node: Mapping[str, Value], key: str, default: int) -> int:
    """A whole number; a node config's values may be texts."""
    found = str(node.get(key, default))
    if not found.isdecimal():
        raise ConfigError(f"{key} must be a whole number >= 0, got {found!r}")
    return int(found)


def _not_negative(node: Mapping[str, Value], key: str) -> float:
    """A number, 0 where nothing is said; a node config's values may be texts."""
    found = str(node.get(key, 0))
    try:
        number = float(found)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ConfigError(f"{key} must be a number >= 0, got {found!r}")
    return number


def _least_parties(node: Mapping[str, Value]) -> int:
    """Parties of a sum; 0 where nothing is said."""
    found = whole(node, "least-parties", 0)
    if "least-parties" in node and found < FEWEST_IN_SUMS:
        raise ConfigError(f"least-parties must be >= {FEWEST_IN_SUMS}, got {found}")
    return found


def _is_true(config: Mapping[str, Value], key: str, default: bool = False) -> bool:
    """A switch, true or false; a node config's values may be texts."""
    value = config.get(key, default)
    if not isinstance(value, bool) and value not in ("true", "false"):
        raise ConfigError(f"{key} must be true or false, got {value!r}")
    return value in (True, "true")


def _trusted(text: str) -> dict[str, str]:
    """``bank:a1b2...,shop:c3d4...`` by name."""
    parts = [part.partition(":") for part in text.split(",") if part.strip()]
    return dict(pinned_key(name.strip(), key, "trusted") for name, _, key in parts)


def pinned_key(name: str, fingerprint: str, where: str) -> tuple[str, str]:
    """A site's name and the fingerprint of its key, as ``fedapp key`` prints it.

    Parameters
    ----------
    fingerprint : 32 hex digits; blanks and capitals do not matter.
    where : they were written.

    Raises
    ------
    ConfigError : they are none.
    """
    digits = "".join(fingerprint.split()).lower()
    if not NAME.fullmatch(name) or not FINGERPRINT.fullmatch(digits):
        rule = "must be the name of a site and its fingerprint, 32 hex digits"
        raise ConfigError(f"{where} {rule}, got {name!r} and {fingerprint!r}")
    return name, " ".join(re.findall("....", digits))
