"""Which table a site has: from its own node config, or its share of a simulated federation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedapp.data.names import NAME, NAME_RULE, party_name
from fedapp.data.schema import PLAIN, Reader, Roles
from fedapp.data.sources import by_party, own_file, party_sources
from fedapp.errors import ConfigError
from fedapp.frames import as_arrow
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
    """A party's name and where its rows come from.

    Parameters
    ----------
    name : unique in the federation; also the name of a folder.
    data : a file (or, in simulation, any name the run config may have).
    label, id_column, weight, base_margin : columns that are not features; empty where there is
        none.
    dropped : further columns that are not features.
    positive_label : of two classes the one that counts as 1; empty takes the later.
    drops_unlabelled : whether rows without a label are dropped, and not refused.
    frame : gives a simulated party's rows as a pyarrow.Table; None: they are those of ``data``.
    reader : how the table is read, by its schema and the settings of the same names.
    simulated : whether the run config names the tables of all parties, which are on one machine.
    partition : rule by which one simulated table is split; empty where the party has its own.
    share, n_shares : which share of a simulated table is this party's.
    columns : rule by which the columns of a simulated table are split, between vertical parties.
    shares_names : whether others may learn the names of the columns, between vertical parties.
    shares_categories : whether others may learn the names of the categories, between horizontal
        parties; without it the site's schema must give them.
    allows_export : whether this party's part of a model may leave it, to be joined with the others.
    predict_data : table to predict; that of ``data`` where there is no other.
    trusted : fingerprints of the keys of other vertical parties, by name.
    allowed : methods whose runs this party takes part in; a simulated one takes part in all.
    min_rows : the fewest of its rows that a run may train, validate or test on.
    min_bin_rows : the fewest rows of a bin in what it tells of its scores.
    least_bin_rows : the fewest rows of a bin in what it tells of its gradients; in a simulation as
        the run config says.
    limits : largest values that it takes in a message, by their keys in the node config.
    floors : smallest values that it takes in a message, by their keys in the node config.
    least_parties : the fewest parties that a sum is over which its own are part of; it then takes
        part in no run that tells more of its rows. 0: in any, and ``fewest_parties`` holds.
    asks : whether a run waits until a person at the site has approved it.
    run_epsilon : most that one run may promise for each row; the site then takes part in no run of
        parties with the same columns that promises none. 0: in any.
    total_epsilon : most that all private runs on the table may come to. 0: they are only noted.
    encrypts_labels : whether its labels may leave it under encryption alone, not in codes.
    allows_insecure : whether a run may use small keys, or weaken the guard of Fed-EINI.
    bundles : hashes of the app bundles whose runs it answers; empty for that of the installed one.
    release_keys : public keys, which have signed other bundles that it answers.
    full_masks : whether its own Paillier keys encrypt with uniform masks, see fedapp.crypto.masks.
    monotone_constraints, interaction_constraints : of its own columns, between vertical parties.
    draws_secret : mixed into the draws of its rows; empty for one that the site draws itself,
        NO_SECRET for draws as in a simulation.
    """

    name: str
    data: str
    label: str = ""
    id_column: str = ""
    weight: str = ""
    dropped: tuple[str, ...] = ()
    positive_label: str = ""
    reader: Reader = PLAIN
    simulated: bool = False
    partition: str = ""
    share: int = 0
    n_shares: int = 1
    columns: str = ""
    shares_names: bool = False
    shares_categories: bool = True
    allows_export: bool = False
    predict_data: str = ""
    trusted: Mapping[str, str] = field(default_factory=dict, hash=False)
    allowed: frozenset[str] = frozenset()
    min_rows: int = 0
    min_bin_rows: int = 0
    least_bin_rows: int = 0
    limits: Mapping[str, int] = field(default_factory=LIMITS.copy, hash=False)
    floors: Mapping[str, int] = field(default_factory=FLOORS.copy, hash=False)
    least_parties: int = 0
    asks: bool = False
    run_epsilon: float = 0.0
    total_epsilon: float = 0.0
    encrypts_labels: bool = False
    allows_insecure: bool = False
    bundles: frozenset[str] = frozenset()
    release_keys: frozenset[str] = frozenset()
    full_masks: bool = False
    monotone_constraints: str = ""
    interaction_constraints: str = ""
    base_margin: str = ""
    drops_unlabelled: bool = False
    frame: Callable[[], Any] | None = field(default=None, compare=False, repr=False)
    draws_secret: str = field(default="", repr=False)

    @property
    def roles(self) -> Roles:
        """Columns that are not features."""
        named = self.label, self.id_column, self.weight, self.group
        return Roles(*named, self.dropped, self.base_margin, self.drops_unlabelled)

    @property
    def group(self) -> str:
        """The column a natural partition goes by, if it does."""
        rule, _, column = self.partition.partition(":")
        return column if rule == "column" else ""

    @property
    def fewest_parties(self) -> int:
        """Of masked sums; in a simulation, which hides nothing from itself, any number."""
        return 1 if self.simulated else self.least_parties or LEAST_PARTIES

    @property
    def draws_openly(self) -> bool:
        """Whether rows are drawn by the numbers of a run alone, which the coordinator knows."""
        return self.simulated or self.draws_secret == NO_SECRET

    @property
    def is_share(self) -> bool:
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
    ConfigError : the node config names no table, no usable name, or breaks a rule.
    """
    if "data" in node:
        check_keys(node)
        name = str(node.get("name", ""))
        if not NAME.fullmatch(name):
            raise ConfigError(f"name in the node config must be {NAME_RULE}, got {name!r}")
        given = table_settings(node)
        if Path(given["data"]).exists():
            # The register counts runs by path, so a table has one path, however it is spelled.
            given["data"] = str(Path(given["data"]).resolve())
        return SiteConfig(name, **given, **policy(node))
    if "partition-id" not in node:
        raise ConfigError('data in the node config must name a table, as in data="rows.csv"')
    return _simulated(int(node["partition-id"]), int(node["num-partitions"]), run)


def config_in_memory(
    node: Mapping[str, Value],
    run: Mapping[str, Value],
    table: Callable[[int, int], Any],
    columns: Mapping[str, str],
) -> SiteConfig:
    """One of the parties of a simulation whose tables a function gives; see ``SiteApp``."""
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
    """One of the parties of a simulation: with a table of its own, or a share of the only one."""
    sources, files = party_sources(str(run["data"]), n_shares), str(run.get("schema", ""))
    schemas = by_party(files)
    if unknown := sorted(set(schemas) - {"", *sources}):
        raise ConfigError(f"schema must name parties that data names, got {unknown[0]!r}")
    if sources:
        name = list(sources)[share]
        own = {"data": sources[name], "schema": own_file(files, name)}
        given = table_settings({**run, **own}, is_shared="" in schemas)
    else:
        name, given = party_name(share, n_shares), table_settings(run)
        given |= {"partition": str(run["partition"]), "columns": str(run["columns"])}
    given |= {"share": share, "n_shares": n_shares}
    given |= {"least_bin_rows": whole(run, "least-bin-rows", 0)}
    return SiteConfig(name, simulated=True, **given)
