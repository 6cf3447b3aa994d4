"""A site's settings and policy: from its node config, or from the run config in simulation.

A node config names the site's table and says which runs the site takes part in; `SiteConfig` has
its keys, from which the sample ``site.toml`` and the documents' table are made. ``check_*`` compare
a run's method, requests and numbers of rows with that policy.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field, replace
from ipaddress import IPv6Address
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from fedapp.data.datasets import (
    NAME,
    NAME_RULE,
    as_arrow,
    by_party,
    file_of_party,
    party_name,
    party_sources,
)
from fedapp.data.partition import Holdout
from fedapp.data.read import read_ids
from fedapp.data.schema import PLAIN, Reader, Roles, Schema, check_encoding, composed, read_schema
from fedapp.errors import ConfigError, did_you_mean, listed
from fedapp.home import read_toml
from fedapp.process import ray_address
from fedapp.sections import declared
from fedapp.settings import check
from fedapp.trees.limits import parse_interactions, parse_monotone

log = logging.getLogger("fedapp.site")

Value = bool | int | float | str
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
HEX = re.compile(r"[0-9a-f]{64}")
FILES = "data", "predict-data", "schema", "without"  # keys that name files
ADDRESS = re.compile(r"(?:([A-Za-z0-9_.-]+)|\[([0-9A-Fa-f:.]+)\]):([0-9]{1,5})")
# Largest default of min-bin-rows at a site with min-rows, so that scores do not show single rows.
MIN_BIN_ROWS = 10
# Parties of a masked sum: default, and smallest value allowed.
LEAST_PARTIES, FEWEST_IN_SUMS = 3, 2
# Of draws-secret: minimum number of characters, and the word for draws as in a simulation.
NAMING = "least-rows-per-name"  # of a run
SHORTEST_SECRET, NO_SECRET = 16, "none"
WORKERS_RULE = "auto, HOST:PORT or ray://HOST:PORT"
BOOSTED = "pax, bagging, cyclic, secureboost"
SUBSET_NAMES = {"train": "training", "valid": "validation", "test": "test"}
MOST_COLUMNS = 100_000
BINS_A_COLUMN = 16  # on average, of most-columns: 26 MB of sums in a node with the usual 100,000
# Keys of the table and its columns, which in a simulation are settings of the run.
OF_TABLE = frozenset(
    (
        *("data", "label", "id", "weight", "base-margin", "missing-label", "drop-columns"),
        *("event", "qid", "group", "positive-label", "schema", "header", "decimal", "encoding"),
        *("without", "predict-data", "share-column-names", "allow-export", "least-bin-rows"),
        *("label-epsilon", "label-range"),
    )
)


def key(name: str, example: Value | None = None, default: str = "") -> Any:
    """A key of the node config; `example` is for ``site.toml``, `default` for documents."""
    examples = None if example is None else [example]
    return Field(alias=name, examples=examples, json_schema_extra={"default": default})


def _words(text: object) -> object:
    """The words of a text, separated by commas or blanks."""
    return text.replace(",", " ").split() if isinstance(text, str) else text


def _columns(text: object) -> object:
    return listed(composed(text)) if isinstance(text, str) else text


def _methods(text: object) -> object:
    return _words(text.replace("_", "-") if isinstance(text, str) else text)


def _either(rule: str, on: str) -> BeforeValidator:
    """Read one of two words as a boolean; `on` is true."""

    def read(word: object) -> bool:
        if isinstance(word, bool) or word in rule.split(" or "):
            return word in (True, on)
        raise ValueError(rule)

    return BeforeValidator(read)


def _shared_names(word: object) -> object:
    """Read the setting of `SiteConfig.shares_categories`."""
    if isinstance(word, bool) or word in ("true", "false"):
        return word in (True, "true")
    if re.fullmatch("[1-9][0-9]{0,9}", text := str(word)) and (n_rows := int(text)) > 1:
        return n_rows
    raise ValueError("true or false, or a whole number >= 2")


def _must(be: str, fits: Callable[[Any], bool]) -> AfterValidator:
    def checked(value: Any) -> Any:
        if not fits(value):
            raise ValueError(be)
        return value

    return AfterValidator(checked)


def is_address(text: str) -> bool:
    """Whether a text is HOST:PORT, the host a name or an address of IPv4, or of IPv6 in []."""
    if not (match := ADDRESS.fullmatch(text)):
        return False
    with suppress(ValueError):
        return bool(match[1] or IPv6Address(match[2])) and 0 < int(match[3]) < 2**16
    return False


def is_cluster(text: str) -> bool:
    """Whether a text may name a Ray cluster."""
    return text in ("", "auto") or is_address(text.removeprefix("ray://"))


def _are_hex(values: frozenset[str]) -> bool:
    return all(map(HEX.fullmatch, values))


def _pins(text: object) -> object:
    """Names and fingerprints, as in ``bank:a1b2...,shop:c3d4...``."""
    if not isinstance(text, str):
        return text
    pins = [part.partition(":") for part in listed(text)]
    return dict(pinned_key(name.strip(), digits, "trusted") for name, _, digits in pins)


def _check_secret(secret: str) -> str:
    if secret and len(secret) < SHORTEST_SECRET and secret != NO_SECRET:
        rule = f"must have {SHORTEST_SECRET} characters or more, or be {NO_SECRET} or absent"
        raise ConfigError(f"draws-secret {rule}, got {len(secret)}")
    return secret


def _check_range(text: str) -> str:
    if text:
        label_bounds(text)
    return text


def label_bounds(text: str) -> tuple[float, float]:
    """Lowest and highest label of a ``label-range``; raises ConfigError."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = math.inf, math.inf
    if not -math.inf < low < high < math.inf:
        raise ConfigError(f"label-range must be low,high, as 0,100, got {text or 'none'}")
    return low, high


def _constraints(parse: Callable[[str], object]) -> AfterValidator:
    def check_all(text: str) -> str:
        try:
            parse(text)
        except ValueError as error:
            raise ConfigError(f"{error} in the node config") from None
        return text

    return AfterValidator(check_all)


Text = Annotated[str, BeforeValidator(str)]
Name = Annotated[Text, AfterValidator(composed)]  # a column may be called 54
Switch = Annotated[bool, _either("true or false", "true")]
Whole = Annotated[int, Field(ge=0)]
FewestParties = Annotated[
    int, _must(f">= {FEWEST_IN_SUMS}", lambda n: n == 0 or n >= FEWEST_IN_SUMS)
]
Address = Annotated[str, _must("HOST:PORT", lambda text: not text or is_address(text))]
Epsilon = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Hashes = Annotated[frozenset[str], BeforeValidator(_words)]
FORM = ConfigDict(
    alias_generator=lambda name: name.replace("_", "-"),
    populate_by_name=True,
    arbitrary_types_allowed=True,
    use_attribute_docstrings=True,
)


@dataclass(frozen=True, slots=True, config=FORM)
class SiteConfig:
    """A party's name, where its rows come from, and which runs it takes part in.

    Fields with a docstring are keys of the node config.
    """

    name: str
    """The site's name, unique in the federation."""
    data: Text
    """The site's table."""
    label: Name = ""
    """Column of labels; without one a site is a passive party."""
    id_column: Annotated[Name, key("id")] = ""
    """Column that names the rows, or several, separated by commas."""
    weight: Name = ""
    """Column of sample weights."""
    event: Name = ""
    """Column that is 1 where the label is the time of an event, 0 where it was censored then."""
    qid: Name = ""
    """Column that names the query of each row, for `rank:ndcg` and `rank:pairwise`."""
    group: Name = ""
    """Column whose rows are in one subset, as a patient's visits; by default the repeated id."""
    base_margin: Name = ""
    """Column of the margin that each row starts from, beside the label."""
    drops_unlabelled: Annotated[
        bool, _either("refuse or drop", "drop"), key("missing-label", default="refuse")
    ] = False
    """`drop`: rows without a label are dropped, and a run learns their number."""
    dropped: Annotated[tuple[str, ...], BeforeValidator(_columns), key("drop-columns")] = ()
    """Further columns that are not features, separated by commas."""
    without: Annotated[Text, key("without", "/data/erased.csv")] = ""
    """Files of ids, separated by commas, whose rows no run trains on."""
    schema: Annotated[Text, key("schema", "/data/loans.toml")] = ""
    """How the table is written, and what its columns are: a TOML file."""
    header: Switch = True
    """Whether the first line of a CSV file names the columns."""
    decimal: Literal[".", ","] = "."
    """Decimal point or comma of a CSV file."""
    encoding: Annotated[str, key("encoding", default="utf-8")] = ""
    """Encoding of a CSV file."""
    positive_label: Annotated[Name, key("positive-label", default="the later class")] = ""
    """Of two classes, the one that counts as 1; sites with the same columns must agree."""
    predict_data: Annotated[Text, key("predict-data", "new.csv", "data")] = ""
    """The rows to predict: a table, or a database's URL, as in `postgresql+psycopg://host/db`."""
    predict_query: Annotated[
        str, key("predict-query", "SELECT id, age FROM customers WHERE id IN :ids")
    ] = ""
    """Of a database: the query of rows by their ids."""
    predict_ids: Annotated[str, key("predict-ids", "SELECT id FROM customers")] = ""
    """Of a database: the query of all ids."""
    allowed: Annotated[
        frozenset[str], BeforeValidator(_methods), key("allow", "pax,secureboost,interactive")
    ] = frozenset()
    """Methods, also of prediction, whose runs the site takes part in; without it none."""
    min_rows: Annotated[Whole, key("min-rows", 100)] = 0
    """The fewest rows to train, validate and test on, that a round draws, or that a description
    counts."""
    min_bin_rows: Annotated[Whole, key("min-bin-rows", default="min-rows, at most 10")] = 0
    """Bins of scores, and steps of a calibration, with fewer rows are merged before they leave."""
    least_bin_rows: Annotated[Whole, key("least-bin-rows", 5)] = 0
    """PAX, descriptions: bins with fewer rows are merged before anything leaves."""
    least_parties: Annotated[FewestParties, key("least-parties", 3)] = 0
    """Fewest sites that a sum must cover; rows leave only in such sums (`aggregation=secure`)."""
    run_epsilon: Annotated[Epsilon, key("run-epsilon", 1)] = 0.0
    """The largest `privacy.epsilon` of a run; a run without one is refused."""
    total_epsilon: Annotated[Epsilon, key("total-epsilon", 1, "run-epsilon")] = 0.0
    """The largest epsilon of all private runs on the table together."""
    asks: Annotated[bool, _either("ask or all", "ask"), key("approve", "ask", "all")] = False
    """`ask`: a run waits until somebody at the site runs `fedapp site approve`."""
    runs_per_day: Whole = 5
    """The most runs that may begin on the table in a day; each fold is one."""
    most_rounds: Whole = 10_000
    """The most rounds that a run may have, with those that may begin again."""
    most_trees: Whole = 10_000
    """The most trees of a forest, or that a run has the site grow in a round."""
    most_epochs: Whole = 1000
    """The most epochs that a run has the site train in a round."""
    most_seconds: Whole = 3600
    """The longest that the site works for a request; 0: as long as it takes."""
    most_bins: Whole = 1024
    """The largest `max-bin`, or bins of PAX, that a run may ask for."""
    score_bins: Whole = 4096
    """The most bins of scores that a run may ask for."""
    align_most_rows: Whole = 10_000_000
    """The most rows of a party's list that this site masks, one list a party and run."""
    align_ids_per_day: Annotated[
        Whole, key("align-ids-per-day", default="20 a row of the table")
    ] = 0
    """The most ids of other parties that may be matched with the table in 24 hours."""
    align_most_ratio: Annotated[int, Field(ge=1)] = 20
    """The most rows of a party's list, for each row of this site's table."""
    predict_min_rows: Annotated[Whole, key("predict-min-rows", 100)] = 0
    """The fewest rows of this site that a run may predict."""
    workers: Annotated[
        str, _must(WORKERS_RULE, is_cluster), key("workers", "auto", "this machine's cores")
    ] = ""
    """The site's own Ray cluster: `auto` (that of this machine), `HOST:6379`, `ray://HOST:10001`.
    Keys and gradients go there."""
    log_days: Whole = 0
    """Days after which lines of the site's log are removed, and three more; 0: never."""
    standing_address: Annotated[Address, key("standing-address", "bank.org:9443")] = ""
    """Where `fedapp serve --site` answers the other sites."""
    standing_port: Annotated[int, Field(ge=1, le=65535), key("standing-port", 8091)] = 8090
    """Where it answers callers, on the loopback."""
    standing_rows_per_second: Whole = 1000
    """The most rows a second about which each other site may ask it; 0: any number."""
    standing_rows_per_day: Annotated[Whole, key("standing-rows-per-day", 1000)] = 0
    """The most different rows in 24 hours about which each may ask it; 0: any number."""
    standing_least_rows: Annotated[Whole, key("standing-least-rows", 10)] = 0
    """The fewest different rows of a request."""
    standing_purposes: Annotated[
        tuple[str, ...], BeforeValidator(_columns), key("standing-purposes", "credit,fraud")
    ] = ()
    """What requests may be for, separated by commas; without it anything."""
    standing_nightly: Annotated[
        Literal["none", "named", "all"], key("standing-nightly", "named")
    ] = "none"
    """Which rows' cells may be sent ahead: `named` by the party with the labels, or `all`."""
    standing_days: Annotated[Whole, key("standing-days", 1)] = 1
    """Days after which cells that were sent ahead are stale."""
    most_columns: Whole = MOST_COLUMNS
    """The most columns that another party may bring into this site's model."""
    shares_names: Annotated[Switch, key("share-column-names", True)] = False
    """Whether parties with different columns may learn the names of this site's."""
    shares_categories: Annotated[
        bool | int, BeforeValidator(_shared_names), key("share-categories", 10)
    ] = True
    """Whether others learn the names of categories: `true`, or a number n for those of n rows or
    more, the rest being one category; `false`: the site's schema must give all."""
    shares_risks: Annotated[Switch, key("share-risk-sums", False)] = True
    """PAX with `survival:cox`: whether sums of hazard ratios by bin of times may leave."""
    allows_export: Annotated[Switch, key("allow-export", True)] = False
    """Whether this site's part of a divided model may leave it."""
    monotone_constraints: Annotated[
        str, _constraints(parse_monotone), key("monotone-constraints", "age:1")
    ] = ""
    """SecureBoost: constraints of this site's columns, whose names stay here."""
    interaction_constraints: Annotated[str, _constraints(parse_interactions)] = ""
    """SecureBoost: which of this site's columns may meet in a tree."""
    label_epsilon: Annotated[Epsilon, key("label-epsilon", 2)] = 0.0
    """With different columns: labels are randomised once by this epsilon before anything is
    computed of them; 0: they are used as they are."""
    label_range: Annotated[str, AfterValidator(_check_range), key("label-range", "0,100")] = ""
    """`low,high` of labels that are measures, to which `label-epsilon` clips them."""
    shares_label_figures: Annotated[Switch, key("share-label-figures", True)] = False
    """Descriptions of different columns: whether rounded figures of what these say about this
    site's labels may leave."""
    encrypts_labels: Annotated[Switch, key("encrypted-labels", True)] = False
    """Whether labels may leave the site only encrypted."""
    allows_insecure: Annotated[Switch, key("allow-insecure", True)] = False
    """For trials: whether a run may use small keys, or weaken the guard of Fed-EINI."""
    trusted: Annotated[
        Mapping[str, str], BeforeValidator(_pins), key("trusted", "NAME:FINGERPRINT")
    ] = field(default_factory=dict, hash=False)
    """Keys of other sites, beside those of `fedapp site trust`."""
    bundles: Annotated[
        Hashes,
        _must("hashes of 64 hex digits (fedapp site hash)", _are_hex),
        key("app", "HASH,HASH", "the installed fedapp's"),
    ] = frozenset()
    """Hashes of the app bundles that the site answers (`fedapp site hash`)."""
    release_keys: Annotated[
        Hashes,
        _must("public keys of 64 hex digits (python -m fedapp.site.bundle sign)", _are_hex),
        key("release-keys", "KEY"),
    ] = frozenset()
    """Public keys; app bundles that one of them has signed are answered too."""
    full_masks: Annotated[Switch, key("full-masks", True)] = False
    """Paillier: uniform masks at three times the cost, which rest on one assumption less."""
    draws_secret: Annotated[
        str, AfterValidator(_check_secret), key("draws-secret", "TEXT", "drawn by the site")
    ] = field(default="", repr=False)
    """Draws the site's rows; set it only so that another run draws the same. `none`: openly."""

    time: str = ""  # column by which the run holds rows back
    reader: Reader = PLAIN  # options for reading the table
    # whether the run config names the tables of all parties, on one machine
    simulated: bool = False
    partition: str = ""  # rule that splits a simulated table; empty if each party has a table
    share: int = 0  # this party's share of a simulated table
    n_shares: int = 1
    columns: str = ""  # rule that splits the columns of a simulated table (vertical)
    # Returns a simulated party's rows as a pyarrow.Table; None: they are in ``data``.
    frame: Callable[[], Any] | None = field(default=None, compare=False, repr=False)

    @property
    def fewest_named(self) -> int:
        """Fewest rows of a category whose name may leave; 0 if the setting has no number."""
        return 0 if isinstance(self.shares_categories, bool) else self.shares_categories

    @property
    def fewest_counted(self) -> int:
        """Fewest rows that a draw leaves out, or that a figure of a description is of."""
        return max(self.min_rows, self.least_bin_rows)

    def naming(self, fewest: int) -> SiteConfig:
        """The config of a run that asks for this number of rows of a category's name, or 0."""
        if self.shares_categories is False or fewest <= max(self.fewest_named, 1):
            return self
        return replace(self, shares_categories=fewest)

    def splitting(self, holdout: Holdout) -> SiteConfig:
        """The config with the columns by which a run splits rows."""
        return replace(self, group=self.group or holdout.group, time=holdout.time_column)

    @property
    def roles(self) -> Roles:
        """Columns that are not features."""
        return Roles(
            label=self.label,
            id_column=self.id_column,
            weight=self.weight,
            partition=self.partition_column,
            drop=self.dropped,
            base_margin=self.base_margin,
            drop_unlabelled=self.drops_unlabelled,
            without=read_ids(self.without, self.id_column),
            event=self.event,
            qid=self.qid,
            group=self.group,
            time=self.time,
        )

    @property
    def partition_column(self) -> str:
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


# Field of each key of a node config. Unknown keys are refused: one could be the site's policy.
NODE_KEYS = {about.name: name for name, about in declared(SiteConfig).items()}


def read_node_config(path: Path) -> dict[str, Value]:
    """Read a node config, a TOML file."""
    return read_toml(path.read_bytes(), f'node config {path} must be TOML, like name = "bank"')


def paths_in(node: Mapping[str, Value]) -> list[str]:
    """The files that a node config names, as it names them."""
    return [path for key in FILES for path in listed(str(node.get(key, "")))]


def pinned_key(name: str, fingerprint: str, where: str) -> tuple[str, str]:
    """Check a site's name and the fingerprint of its key, as ``fedapp site key`` prints it.

    Spaces and case in the fingerprint do not matter. `where` names the setting in the ConfigError.
    """
    digits = "".join(fingerprint.split()).lower()
    if not NAME.fullmatch(name) or not FINGERPRINT.fullmatch(digits):
        rule = "must be the name of a site and its fingerprint, 32 hex digits"
        raise ConfigError(f"{where} {rule}, got {name!r} and {fingerprint!r}")
    return name, " ".join(re.findall("....", digits))


def table_settings(config: Mapping[str, Value], is_shared: bool = False) -> dict[str, Any]:
    """Fields of the table and its columns; a schema fills in those that are not set.

    With `is_shared`, the schema serves several tables.
    """
    of_table = {key: config[key] for key in config if key in OF_TABLE}
    site = check(SiteConfig, {"name": "", **of_table})
    schema = read_schema(Path(site.schema)) if site.schema else Schema()
    reader = schema.reader(is_shared)
    roles = schema.roles()
    encoding = site.encoding or reader.encoding
    check_encoding(encoding)
    of_file = replace(
        reader,
        header=reader.header and site.header,
        decimal=site.decimal if site.decimal != "." else reader.decimal,
        encoding=encoding,
    )
    columns = ("label", "id_column", "weight", "base_margin", "event", "qid")
    return {
        **{NODE_KEYS[key]: getattr(site, NODE_KEYS[key]) for key in OF_TABLE},
        **{name: getattr(site, name) or getattr(roles, name) for name in columns},
        "drops_unlabelled": site.drops_unlabelled or roles.drop_unlabelled,
        "dropped": tuple(dict.fromkeys((*roles.drop, *site.dropped))),
        "positive_label": site.positive_label or schema.positive_label,
        "reader": of_file,
    }


def name_of(node: Mapping[str, Value]) -> str:
    """Name of the site with a node config; ConfigError if it has none."""
    name = str(node.get("name", ""))
    if not NAME.fullmatch(name):
        raise ConfigError(f"name in the node config must be {NAME_RULE}, got {name!r}")
    return name


def site_config(node: Mapping[str, Value], run: Mapping[str, Value]) -> SiteConfig:
    """Read a site's settings from its node config or, in simulation, from the run config.

    `node` is the SuperNode's ``--node-config``; in simulation it has ``partition-id`` and
    ``num-partitions``. A site whose node config names a table ignores `run`.
    """
    if "data" not in node:
        if "partition-id" not in node:
            raise ConfigError('data in the node config must name a table, as in data="rows.csv"')
        return _simulated(int(node["partition-id"]), int(node["num-partitions"]), run)
    keys = {key: node[key] for key in node if key not in ("partition-id", "num-partitions")}
    for key in keys:
        if key not in NODE_KEYS:
            hint = did_you_mean(key, NODE_KEYS)
            raise ConfigError(f"{key} in the node config is not a setting{hint}")
    # Their defaults stand for an absent key: written down, they would look like a choice.
    for key, rule in (("least-parties", f">= {FEWEST_IN_SUMS}"), ("draws-secret", "a secret")):
        if str(node.get(key)) in ("0", ""):
            raise ConfigError(f"{key} must be {rule} or absent, got {node[key]!r}")
    name = name_of(node)
    site = replace(check(SiteConfig, {**keys, "name": name}), **table_settings(node))
    path = Path(site.data)
    return replace(
        site,
        # The register counts runs by path, so a table must have only one.
        data=str(path.resolve()) if path.exists() else site.data,
        min_bin_rows=int(node.get("min-bin-rows", min(site.min_rows, MIN_BIN_ROWS))),
        run_epsilon=site.run_epsilon or site.total_epsilon,
        total_epsilon=site.total_epsilon or site.run_epsilon,
    )


def config_in_memory(
    node: Mapping[str, Value],
    run: Mapping[str, Value],
    table: Callable[[int, int], Any],
    columns: Mapping[str, str],
) -> SiteConfig:
    """Settings of a simulated party whose table a function returns; see ``SiteApp``."""
    share, n_shares = int(node["partition-id"]), int(node["num-partitions"])
    names = ("least-bin-rows", "label-epsilon", "label-range")
    of_run = {name: run[name] for name in names if name in run}
    site = SiteConfig(
        party_name(share, n_shares),
        **table_settings({"data": "", **of_run, **columns}),
        simulated=True,
        share=share,
        n_shares=n_shares,
        frame=lambda: as_arrow(table(share, n_shares)),
    )
    return site.naming(int(run.get(NAMING, 0)))


def _simulated(share: int, n_shares: int, run: Mapping[str, Value]) -> SiteConfig:
    """Settings of a simulated party: with a table of its name, or a share of the only one."""
    sources = party_sources(str(run["data"]), n_shares)
    files = str(run.get("schema", ""))
    schemas = by_party(files)
    if unknown := sorted(set(schemas) - {"", *sources}):
        raise ConfigError(f"schema must name parties that data names, got {unknown[0]!r}")
    if sources:
        name = list(sources)[share]
        party_files = {"data": sources[name], "schema": file_of_party(files, name)}
        settings = table_settings({**run, **party_files}, is_shared="" in schemas)
    else:
        name = party_name(share, n_shares)
        settings = table_settings(run)
        settings |= {"partition": str(run["partition"]), "columns": str(run["columns"])}
    settings |= {"share": share, "n_shares": n_shares}
    settings |= {"time": str(run.get("test-from", "")).partition(":")[0]}
    settings |= {"workers": ray_address()}
    return SiteConfig(name, simulated=True, **settings).naming(int(run.get(NAMING, 0)))
