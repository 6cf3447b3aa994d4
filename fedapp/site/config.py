"""A site's settings: from its node config, or from the run config in simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedapp.data.datasets import NAME, NAME_RULE, by_party, file_of_party, party_name, party_sources
from fedapp.data.frames import as_arrow
from fedapp.data.schema import PLAIN, Reader, Roles
from fedapp.errors import ConfigError
from fedapp.site.node_config import (
    FLOORS,
    LEAST_PARTIES,
    LIMITS,
    NO_SECRET,
    Value,
    check_keys,
    policy,
    table_settings,
    whole,
)


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
    partition: str = ""  # rule that splits a simulated table; empty if the party has its own
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
    floors: Mapping[str, int] = field(default_factory=FLOORS.copy, hash=False)
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
    """Settings of a simulated party: with its own table, or a share of the only one."""
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
