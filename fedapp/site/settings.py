"""A site's settings and policy: from its node config, or from the run config in simulation.

A node config names the site's table and says which runs the site takes part in. ``check_*`` compare
a run's method, requests and numbers of rows with that policy.
"""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.datasets import (
    NAME,
    NAME_RULE,
    as_arrow,
    by_party,
    file_of_party,
    party_name,
    party_sources,
)
from fedapp.data.schema import PLAIN, Reader, Roles, Schema, check_encoding, read_schema
from fedapp.errors import ConfigError, DataError
from fedapp.home import read_toml
from fedapp.messages.fields import Request, method_of, senders_of
from fedapp.messages.handshake import Plan
from fedapp.trees.constraints import parse_interactions, parse_monotone

log = logging.getLogger("fedapp.site")

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
# All keys of a node config. Unknown ones are refused: a misspelled key could be the site's policy.
NODE_KEYS = (
    *("name", "data", "label", "id", "weight", "drop-columns", "predict-data"),
    *("schema", "header", "decimal", "encoding", "positive-label"),
    *("base-margin", "missing-label"),
    *("share-column-names", "share-categories", "allow-export", "trusted", "allow", "min-rows"),
    *("encrypted-labels", "allow-insecure", "app", "full-masks", "least-parties"),
    *("min-bin-rows", "least-bin-rows", "release-keys", *LIMITS),
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
BOOSTED = "pax, bagging, cyclic, secureboost"
SUBSET_NAMES = {"train": "training", "valid": "validation", "test": "test"}


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


@dataclass(frozen=True, slots=True)
class SiteConfig:
    """A party's name, where its rows come from, and which runs it takes part in."""

    name: str  # unique in the federation; also the name of a folder
    data: str  # a file (or, in simulation, any name the run config may have)
    label: str = ""  # this column and the next two are not features; empty if there is none
    id_column: str = ""
    weight: str = ""
    dropped: tuple[str, ...] = ()  # further columns that are not features
    positive_label: str = ""  # of two classes the one that counts as 1; empty: the later
    reader: Reader = PLAIN  # options for reading the table
    # whether the run config names the tables of all parties, on one machine
    simulated: bool = False
    partition: str = ""  # rule that splits a simulated table; empty if each party has a table
    share: int = 0  # this party's share of a simulated table
    n_shares: int = 1
    columns: str = ""  # rule that splits the columns of a simulated table (vertical)
    shares_names: bool = False  # whether others may learn the column names (vertical)
    # Whether others may learn the category names (horizontal); if not, the site's schema must list
    # them.
    shares_categories: bool = True
    # whether its part of a model may leave it, to be joined with others
    allows_export: bool = False
    predict_data: str = ""  # table to predict; empty: that of ``data``
    # Fingerprints of the keys of other parties, by name.
    trusted: Mapping[str, str] = field(default_factory=dict, hash=False)
    # methods whose runs it takes part in; all in a simulation
    allowed: frozenset[str] = frozenset()
    min_rows: int = 0  # smallest number of its rows to train, validate or test on
    min_bin_rows: int = 0  # smallest number of rows per bin in what it discloses of its scores
    least_bin_rows: int = 0  # the same for gradients; in a simulation, from the run config
    # Largest and smallest values it accepts in a message, by node config key.
    limits: Mapping[str, int] = field(default_factory=LIMITS.copy, hash=False)
    # Smallest number of parties in a sum that includes its rows; it then takes part in no run that
    # discloses more. 0: in any run, and ``fewest_parties`` applies.
    least_parties: int = 0
    asks: bool = False  # whether a run waits until a person at the site has approved it
    # Largest epsilon of one run; the site then takes part in no horizontal run without one. 0: in
    # any.
    run_epsilon: float = 0.0
    total_epsilon: float = 0.0  # largest epsilon of all private runs on the table; 0: no limit
    encrypts_labels: bool = False  # whether its labels may leave it only encrypted, not in codes
    allows_insecure: bool = False  # whether a run may use small keys, or weaken Fed-EINI's guard
    # hashes of accepted app bundles; empty: the installed one
    bundles: frozenset[str] = frozenset()
    # bundles signed by these public keys are accepted too
    release_keys: frozenset[str] = frozenset()
    # its Paillier keys encrypt with uniform masks, see fedapp.crypto.paillier
    full_masks: bool = False
    monotone_constraints: str = ""  # of its columns (vertical)
    interaction_constraints: str = ""  # of its columns (vertical)
    base_margin: str = ""  # column of initial margins
    drops_unlabelled: bool = False  # whether rows without a label are dropped instead of refused
    # Returns a simulated party's rows as a pyarrow.Table; None: they are in ``data``.
    frame: Callable[[], Any] | None = field(default=None, compare=False, repr=False)
    # Mixed into the draws of its rows; empty: the site draws one; NO_SECRET: draws as in a
    # simulation.
    draws_secret: str = field(default="", repr=False)

    @property
    def roles(self) -> Roles:
        """Columns that are not features."""
        named = self.label, self.id_column, self.weight, self.group
        return Roles(*named, self.dropped, self.base_margin, self.drops_unlabelled)

    @property
    def group(self) -> str:
        """Column of a natural partition; empty for other partitions."""
        rule, _, column = self.partition.partition(":")
        return column if rule == "column" else ""

    @property
    def fewest_parties(self) -> int:
        """Smallest number of parties in a masked sum; a simulation needs no secrecy, so 1."""
        return 1 if self.simulated else self.least_parties or LEAST_PARTIES

    @property
    def draws_openly(self) -> bool:
        """Whether rows are drawn only by numbers of the run, which the coordinator knows."""
        return self.simulated or self.draws_secret == NO_SECRET

    @property
    def is_share(self) -> bool:
        """Whether the table is a share of a larger one."""
        return bool(self.partition)


def site_config(node: Mapping[str, Value], run: Mapping[str, Value]) -> SiteConfig:
    """Read a site's settings from its node config or, in simulation, from the run config.

    `node` is the SuperNode's ``--node-config``; in simulation it has ``partition-id`` and
    ``num-partitions``. A site whose node config names a table ignores `run`.
    """
    if "data" in node:
        check_keys(node)
        name = str(node.get("name", ""))
        if not NAME.fullmatch(name):
            raise ConfigError(f"name in the node config must be {NAME_RULE}, got {name!r}")
        settings = table_settings(node)
        if Path(settings["data"]).exists():
            # The register counts runs by path, so a table must have only one.
            settings["data"] = str(Path(settings["data"]).resolve())
        return SiteConfig(name, **settings, **policy(node))
    if "partition-id" not in node:
        raise ConfigError('data in the node config must name a table, as in data="rows.csv"')
    return _simulated(int(node["partition-id"]), int(node["num-partitions"]), run)


def config_in_memory(
    node: Mapping[str, Value],
    run: Mapping[str, Value],
    table: Callable[[int, int], Any],
    columns: Mapping[str, str],
) -> SiteConfig:
    """Settings of a simulated party whose table a function returns; see ``SiteApp``."""
    share, n_shares = int(node["partition-id"]), int(node["num-partitions"])
    return SiteConfig(
        party_name(share, n_shares),
        **table_settings({"data": "", **columns}),
        simulated=True,
        share=share,
        n_shares=n_shares,
        least_bin_rows=whole(run, "least-bin-rows", 0),
        frame=lambda: as_arrow(table(share, n_shares)),
    )


def _simulated(share: int, n_shares: int, run: Mapping[str, Value]) -> SiteConfig:
    """Settings of a simulated party: with a table of its name, or a share of the only one."""
    sources, files = party_sources(str(run["data"]), n_shares), str(run.get("schema", ""))
    schemas = by_party(files)
    if unknown := sorted(set(schemas) - {"", *sources}):
        raise ConfigError(f"schema must name parties that data names, got {unknown[0]!r}")
    if sources:
        name = list(sources)[share]
        party_files = {"data": sources[name], "schema": file_of_party(files, name)}
        settings = table_settings({**run, **party_files}, is_shared="" in schemas)
    else:
        name, settings = party_name(share, n_shares), table_settings(run)
        settings |= {"partition": str(run["partition"]), "columns": str(run["columns"])}
    settings |= {"share": share, "n_shares": n_shares}
    settings |= {"least_bin_rows": whole(run, "least-bin-rows", 0)}
    return SiteConfig(name, simulated=True, **settings)


def group_of(kind: str) -> str:
    """The group of a message kind, ``<category>.<group>[_<name>]``."""
    action = kind.partition(".")[2]
    return action.rpartition("_")[0] or action


def check_policy(config: SiteConfig, kind: str, method: str) -> None:
    """Check that the site allows the run's method, and that the method sends such messages.

    A server that declares one method and runs another can use only the messages both share. A
    method must not ignore a setting of the node config that protects the site.
    """
    shared_by = senders_of(group_of(kind))
    owner = group_of(kind).replace("_", "-")
    wanted = {method} if shared_by else {method, owner}
    if not config.simulated and (refused := wanted - config.allowed):
        way = f"set allow in the node config of {config.name}, or see fedapp site init --policy"
        allowed = ", ".join(sorted(config.allowed)) or f"none: {way}"
        got = ", ".join(sorted(refused))
        raise ConfigError(f"strategy must be one that the site allows ({allowed}), got {got}")
    declared = method_of(method)
    sends = declared and declared.family in shared_by if shared_by else method == owner
    if not sends:
        senders = " or ".join(sorted(shared_by)) if shared_by else owner
        raise ConfigError(f"strategy must be {senders} to send {kind}, got {method}")
    if declared and not declared.trains:
        return
    if (config.monotone_constraints or config.interaction_constraints) and not (
        declared and declared.holds_columns
    ):
        rule = "must be empty in the node config, or strategy one that reads them there"
        raise ConfigError(
            f"monotone-constraints and interaction-constraints {rule} (secureboost), got {method}"
        )
    if config.least_bin_rows and not (declared and declared.merges_bins):
        rule = "must be 0 in the node config, or strategy one that merges bins (pax)"
        raise ConfigError(f"least-bin-rows {rule}, got {method}")
    if config.base_margin and not (declared and declared.takes_margins):
        rule = "must be empty in the node config, or strategy one that reads it there"
        way = "the column may be a feature, or excluded with drop-columns"
        raise ConfigError(f"base-margin {rule} ({BOOSTED}), got {method}; {way}")


def check_request(config: SiteConfig, request: Request) -> None:
    """Check that the coordinator's settings do not disable a protection of the site."""
    if config.simulated:
        return
    for name, rule in request.for_trials.items():
        if not config.allows_insecure and rule.covers(value := getattr(request, name)):
            setting, got = name.replace("_", "-"), str(value).lower()
            raise ConfigError(
                f"{setting} must be {rule.safe}, or allow-insecure true in the node config, "
                f"got {got}"
            )
    for name, limit in request.limits.items():
        if (value := getattr(request, name)) > config.limits[limit.setting]:
            setting, most = name.replace("_", "-"), config.limits[limit.setting]
            raise ConfigError(
                f"{setting} must be <= {most} ({limit.setting} in the node config of "
                f"{config.name}), got {value}"
            )


def check_leaving(config: SiteConfig, method: str, request: Request) -> None:
    """Check that a site that discloses only (noised) sums takes part in no other run."""
    declared = method_of(method)
    if declared is None or declared.family != "horizontal":
        return
    plain = isinstance(request, Plan) and request.aggregation != "secure"
    if config.least_parties and (plain or request.leaves == "own"):
        raise ConfigError(
            f"aggregation must be secure for {config.name}, whose node config has least-parties "
            f"({config.least_parties}): its sums may leave it only added to those of others; "
            f"got {method} without"
        )
    if config.least_parties and isinstance(request, Plan):
        check_parties(config, request.parties)
    most, got = f"{config.run_epsilon:g}", f"{method} without"
    fits = request.leaves not in ("own", "sums")
    if isinstance(request, Plan):
        fits, got = 0 < request.epsilon <= config.run_epsilon, f"{request.epsilon:g}"
    if config.run_epsilon and not fits:
        raise ConfigError(
            f"privacy.epsilon must be > 0 and <= {most} for {config.name}, whose node config has "
            f"run-epsilon ({most}): what it discloses of its rows has noise; got {got}"
        )


def check_parties(config: SiteConfig, names: Sequence[str]) -> None:
    """Check that a sum over these parties hides the site's part; raises ConfigError."""
    fewest = config.fewest_parties
    if len(set(names)) < fewest:
        rule = f"must be >= {fewest} (least-parties of {config.name})"
        way = "; least-parties=2 lets two sum, where whoever sees the sum and one of them sees both"
        raise ConfigError(f"parties {rule}, got {len(set(names))}{way if fewest > 2 else ''}")
    if len(set(names)) == FEWEST_IN_SUMS and not config.simulated:
        log.warning(
            "sums over two parties: together, the coordinator and the other party know this site's"
        )


def check_threshold(config: SiteConfig, n_parties: int, threshold: int) -> None:
    """Check that sums over the remaining parties hide the site's part when a party is lost.

    A coordinator that reports different losses to different parties gets sums over at least
    2 ``threshold`` - ``n_parties`` of them (see ``fedapp.site.sums``). 0: no party may be lost.
    """
    if not threshold:
        return
    if not config.simulated and not config.least_parties:
        rule = f"must be 0 with aggregation=secure, or least-parties set by {config.name}"
        raise ConfigError(f"min-parties {rule} in its node config, got {threshold}")
    fewest = -(-(n_parties + config.fewest_parties) // 2)
    if not fewest <= threshold <= n_parties:
        rule = f"must be {fewest} to {n_parties} of {n_parties} parties, or 0, for {config.name}"
        least = f"least-parties is {config.fewest_parties} there"
        raise ConfigError(f"min-parties {rule} with aggregation=secure ({least}), got {threshold}")


def check_subsets(fewest: int, n_rows: Mapping[str, int], rule: str) -> None:
    """Check that no subset has so few rows that its sums reveal single rows.

    Validation and test rows may also be none. `rule`, the text of the DataError, has places for the
    fewest rows, the subset and its rows.
    """
    for subset, count in n_rows.items():
        if count < fewest and (count or subset == "train"):
            way = "" if subset == "train" else f"; {subset}-fraction=0 holds none back"
            raise DataError(rule.format(fewest, SUBSET_NAMES[subset], count) + way)


def check_sample_size(config: SiteConfig, n_rows: int, n_drawn: int) -> int:
    """Number of training rows that a round draws: all, if it would leave out too few.

    Sums over few rows reveal them, and so does the difference of sums with and without a few.
    `n_rows` have a weight, the run's settings draw `n_drawn` of them. Raises ConfigError if that is
    below ``min_rows``.
    """
    if n_drawn < config.min_rows:
        raise ConfigError(
            f"subsample (or secureboost.goss) must draw at least {config.min_rows} training rows a "
            f"round (min-rows of {config.name}), got {n_drawn}; a larger share draws more"
        )
    return n_rows if _leaves_few(config, n_rows - n_drawn) else n_drawn


def check_share(config: SiteConfig, weights: npt.NDArray[Any], share: float) -> float:
    """Share of the rows that XGBoost draws: 1 if a round may leave out too few.

    XGBoost draws each row with this probability. The bound, four standard deviations above the
    mean, is exceeded in 1 of 30,000 rounds. Raises ConfigError as ``check_sample_size``.
    """
    n_rows = int(np.count_nonzero(weights))
    n_drawn = int(share * n_rows)
    check_sample_size(config, n_rows, n_drawn)
    most = n_drawn + 4 * math.sqrt(n_drawn * (1 - share))
    return 1.0 if _leaves_few(config, n_rows - most) else share


def _leaves_few(config: SiteConfig, n_left: float) -> bool:
    """Whether the rows left out of a round are so few that sums would reveal them."""
    return n_left < (max(config.min_rows, config.least_bin_rows) or -math.inf)
