"""Parse a site's node config: its table, and the runs it takes part in."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedapp.data.datasets import NAME
from fedapp.data.schema import Reader, Schema, check_encoding, read_schema
from fedapp.errors import ConfigError
from fedapp.home import read_toml
from fedapp.trees.grow import parse_interactions, parse_monotone

Value = bool | int | float | str
PAIR = re.compile(r"(\S+?)=(\'[^\']*\'|\"[^\"]*\"|\S+)")  # as in Flower
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
HEX = re.compile(r"[0-9a-f]{64}")
# Default limits, far above what ordinary runs need.
LIMITS = {
    "most-bins": 1024,
    "score-bins": 4096,
    "align-most-rows": 10_000_000,
    "most-columns": 100_000,
    "runs-per-day": 5,
}
# Smallest values that a site accepts; 0 accepts all.
FLOORS = {"min-child-rows": 0}
# All keys of a node config. Unknown ones are refused: a misspelled key could be the site's policy.
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
# Largest default of min-bin-rows at a site with min-rows, so that scores do not show single rows.
MIN_BIN_ROWS = 10
# Parties of a masked sum: default, and smallest value allowed.
LEAST_PARTIES, FEWEST_IN_SUMS = 3, 2
# Of draws-secret: minimum number of characters, and the word for draws as in a simulation.
SHORTEST_SECRET, NO_SECRET = 16, "none"


def table_settings(config: Mapping[str, Value], is_shared: bool = False) -> dict[str, Any]:
    """Settings of the table and its columns; a schema fills in those that are not set.

    With `is_shared`, the schema serves several tables.
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


def table_reader(config: Mapping[str, Value], schema_reader: Reader) -> Reader:
    """Apply settings over those of the schema; raises ConfigError if one breaks its rule."""
    decimal = str(config.get("decimal", ".")).strip()
    if decimal not in (".", ","):
        raise ConfigError(f"decimal must be a point or a comma, got {decimal!r}")
    encoding = str(config.get("encoding", "")) or schema_reader.encoding
    check_encoding(encoding)
    return replace(
        schema_reader,
        header=schema_reader.header and _is_true(config, "header", default=True),
        decimal=decimal if decimal != "." else schema_reader.decimal,
        encoding=encoding,
    )


def parse_node_config(text: str) -> dict[str, Value]:
    """Read a node config as ``flower-supernode --node-config`` does.

    `text` is ``name="bank" data="rows.csv"``, or the path of a TOML file with the same settings.
    """
    if text.endswith(".toml"):
        text = Path(text).read_text()
    else:
        text = "\n".join(f"{key} = {value}" for key, value in PAIR.findall(text))
    return read_toml(text, 'node config must be like name="bank" data="rows.csv"')


def check_keys(node: Mapping[str, Value]) -> None:
    """Refuse unknown keys; the ConfigError suggests a similar one."""
    for key in node:
        if key not in NODE_KEYS:
            matches = difflib.get_close_matches(key, NODE_KEYS, n=1)
            hint = f"; did you mean {matches[0]}?" if matches else ""
            raise ConfigError(f"{key} in the node config is not a setting{hint}")


def policy(node: Mapping[str, Value]) -> dict[str, Any]:
    """Settings that say which runs the site takes part in; never read from a run config.

    Raises ConfigError if a setting breaks its rule.
    """
    names = str(node.get("allow", "")).replace(",", " ").replace("_", "-").split()
    monotone = str(node.get("monotone-constraints", ""))
    interactions = str(node.get("interaction-constraints", ""))
    try:
        parse_monotone(monotone)
        parse_interactions(interactions)
    except ValueError as error:
        raise ConfigError(f"{error} in the node config") from None
    secret = str(node.get("draws-secret", ""))
    if "draws-secret" in node and len(secret) < SHORTEST_SECRET and secret != NO_SECRET:
        rule = f"must have {SHORTEST_SECRET} characters or more, or be {NO_SECRET} or absent"
        raise ConfigError(f"draws-secret {rule}, got {len(secret)}")
    least_parties = whole(node, "least-parties", 0)
    if "least-parties" in node and least_parties < FEWEST_IN_SUMS:
        raise ConfigError(f"least-parties must be >= {FEWEST_IN_SUMS}, got {least_parties}")
    # bank:a1b2...,shop:c3d4...
    trusted = str(node.get("trusted", "")).split(",")
    pins = [part.partition(":") for part in trusted if part.strip()]
    min_rows = whole(node, "min-rows", 0)
    run, total = (_not_negative(node, key) for key in ("run-epsilon", "total-epsilon"))
    return {
        "allowed": frozenset(names),
        "min_rows": min_rows,
        "min_bin_rows": whole(node, "min-bin-rows", min(min_rows, MIN_BIN_ROWS)),
        "least_bin_rows": whole(node, "least-bin-rows", 0),
        "limits": {key: whole(node, key, limit) for key, limit in LIMITS.items()},
        "floors": {key: whole(node, key, floor) for key, floor in FLOORS.items()},
        "least_parties": least_parties,
        "run_epsilon": run or total,
        "total_epsilon": total or run,
        "asks": _one_of("approve", str(node.get("approve", "all")), "ask", "all") == "ask",
        "encrypts_labels": _is_true(node, "encrypted-labels"),
        "allows_insecure": _is_true(node, "allow-insecure"),
        "bundles": _hex(node, "app", "hashes", "fedapp app hash"),
        "release_keys": _hex(node, "release-keys", "public keys", "fedapp app sign"),
        "trusted": dict(pinned_key(name.strip(), key, "trusted") for name, _, key in pins),
        "full_masks": _is_true(node, "full-masks"),
        "shares_categories": _is_true(node, "share-categories", default=True),
        "draws_secret": secret,
        "monotone_constraints": monotone,
        "interaction_constraints": interactions,
    }


def _hex(node: Mapping[str, Value], key: str, what: str, command: str) -> frozenset[str]:
    """Hashes or keys, separated by commas or blanks."""
    text = str(node.get(key, ""))
    values = text.replace(",", " ").split()
    if not all(HEX.fullmatch(one) for one in values):
        raise ConfigError(f"{key} must be {what} of 64 hex digits ({command}), got {text!r}")
    return frozenset(values)


def _one_of(key: str, text: str, *words: str) -> str:
    if text not in words:
        raise ConfigError(f"{key} must be {' or '.join(words)}, got {text!r}")
    return text


def whole(node: Mapping[str, Value], key: str, default: int) -> int:
    """Parse an integer >= 0; values of a node config may be text."""
    text = str(node.get(key, default))
    if not text.isdecimal():
        raise ConfigError(f"{key} must be a whole number >= 0, got {text!r}")
    return int(text)


def _not_negative(node: Mapping[str, Value], key: str) -> float:
    """Parse a finite number >= 0, by default 0; values of a node config may be text."""
    text = str(node.get(key, 0))
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise ConfigError(f"{key} must be a number >= 0, got {text!r}")
    return number


def _is_true(config: Mapping[str, Value], key: str, default: bool = False) -> bool:
    """Parse a boolean; values of a node config may be text."""
    value = config.get(key, default)
    if not isinstance(value, bool) and value not in ("true", "false"):
        raise ConfigError(f"{key} must be true or false, got {value!r}")
    return value in (True, "true")


def pinned_key(name: str, fingerprint: str, where: str) -> tuple[str, str]:
    """Check a site's name and the fingerprint of its key, as ``fedapp key`` prints it.

    Spaces and case in the fingerprint do not matter. `where` names the setting in the ConfigError.
    """
    digits = "".join(fingerprint.split()).lower()
    if not NAME.fullmatch(name) or not FINGERPRINT.fullmatch(digits):
        rule = "must be the name of a site and its fingerprint, 32 hex digits"
        raise ConfigError(f"{where} {rule}, got {name!r} and {fingerprint!r}")
    return name, " ".join(re.findall("....", digits))
