"""Opening of any run: its nodes, their names, warnings about their tables, the initial model."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from fedapp.conversation import Parties
from fedapp.data.datasets import NAME, NAME_RULE, party_sources
from fedapp.data.notes import is_plain
from fedapp.errors import LONGEST, ConfigError, DataError, PartyError, as_plain, did_you_mean_path
from fedapp.home import RUNS
from fedapp.messages.fields import Introduction, check_fields
from fedapp.messages.handshake import GreetReply, HelloReply
from fedapp.run_folder import RunFolder, RunState
from fedapp.sections import flatten
from fedapp.settings import Settings
from fedapp.site.settings import site_config
from fedapp.site.table import fingerprint, read_table
from fedapp.trees.model import Ensemble
from fedapp.trees.xgboost import is_xgboost
from strategies.delivery import SILENT_AFTER

Hellos = Parties[HelloReply]
I = TypeVar("I", bound=Introduction | GreetReply)  # noqa: E741
# Engines of simulations by their grids; their nodes are all made within moments.
ENGINES = {"LocalGrid": "local", "InMemoryGrid": "simulation"}
QUIET_SECONDS = 0.3  # seconds without a new node after which a simulation is complete
LONGEST_LINE = 1000  # characters about a party's Flower
EXPLAINED_AFTER = 10.0  # seconds after which sites that are not connected are said to have a cause


def site_names() -> dict[str, str]:
    """Names of this coordinator's registered sites, by the label of their node."""
    sites = registered_sites(Path(os.environ.get("FLWR_HOME", "")))
    return {f"node {node}": name for node, name in sites.items()}


def shown_names(parties: Sequence[str], nodes: Iterable[int]) -> list[str]:
    """Parties by the names that people know; at last the number of nodes that have none yet."""
    sites, unnamed = site_names(), {f"node {node}" for node in nodes}
    names = [sites.get(party, party) for party in parties if party in sites or party not in unnamed]
    if n_others := len(parties) - len(names):
        others = f"{n_others} {'party' if n_others == 1 else 'parties'}"
        names.append(f"{others} without a name yet" if names else others)
    return names


def registered_sites(flower_home: Path, kind: str = "node") -> dict[str, str]:
    """Names of the sites that ``register-sites.sh`` has registered, by node id."""
    nodes = sorted((flower_home.parent / "sites").glob(f"*.{kind}"))
    return {path.read_text().strip(): path.name.partition(f".{kind}")[0] for path in nodes}


def removed_nodes() -> set[int]:
    """Nodes of the sites that this coordinator has removed, whose keys stay refused."""
    flower_home = Path(os.environ.get("FLWR_HOME", ""))
    return set(map(int, registered_sites(flower_home, "node.removed")))


class Nodes(Protocol):
    """The part of Flower's Grid that finds nodes."""

    def get_node_ids(self) -> Iterable[int]: ...


def find_nodes(
    grid: Nodes, parties: int, n_lost: int, deadline: float, wait: Callable[[str], None]
) -> list[int]:
    """Wait ``deadline`` seconds for ``parties - n_lost`` nodes, in a simulation for all of them.

    With 0 parties it waits for those that this coordinator has registered, else for any node.
    ``wait`` shows the user a text.
    """
    named = parties or len(site_names())
    wanted = (named or 1) - n_lost
    engine = ENGINES.get(type(grid).__name__)
    is_simulated = engine is not None
    start = last_change = time.monotonic()
    nodes = list[int]()
    number = f"{wanted} {'party' if wanted == 1 else 'parties'}" if named else "the parties"
    wait(text := f"waiting for {number}")
    while True:
        asked = time.monotonic()
        before, nodes = nodes, sorted(grid.get_node_ids())
        if (silent := time.monotonic() - asked) > SILENT_AFTER:
            start += silent  # of the SuperLink, in which no site can connect
        last_change = last_change if len(nodes) == len(before) else time.monotonic()
        is_stable = bool(nodes) and time.monotonic() - last_change > QUIET_SECONDS
        # Only Flower's simulation starts its nodes one after the other.
        if len(nodes) >= wanted and (parties or is_stable or engine != "simulation"):
            break
        present = {f"node {node}" for node in nodes}
        absent = ", ".join(name for node, name in site_names().items() if node not in present)
        if absent and time.monotonic() > start + EXPLAINED_AFTER:
            absent += ", not connected: the site's own log says why"
        if absent and text != (text := f"waiting for {absent}"):
            wait(text)
        if is_simulated and is_stable:
            remedy = f"set parties=0, or --federation-config 'num-supernodes={wanted}'"
            rule = f"must be {len(nodes)}, as many as there are simulated SuperNodes"
            raise ConfigError(f"parties {rule}, got {wanted}; {remedy}")
        if time.monotonic() > start + deadline:
            waited = f"within {deadline:g} s (start-deadline)"
            got = f"{len(nodes)} {waited}" + (f"; waited for {absent}" if absent else "")
            raise ConfigError(f"parties must be {wanted}, got {got}")
        time.sleep(0.05 if is_simulated else 0.2)
    if parties and len(nodes) > parties:
        rule = f"must be the number of nodes, {len(nodes)}, or 0, which takes all"
        raise ConfigError(f"parties {rule}, got {parties}")
    return nodes


def parties_by_name(replies: Iterable[I]) -> Parties[I]:
    """The parties by name; refuses a name that two parties have."""
    members: dict[str, I] = {}
    for reply in replies:
        if reply.name in members:
            raise DataError(
                "name must be unique in the federation, two parties have it", reply.name
            )
        members[reply.name] = reply
    return Parties(members)


def check_texts(replies: Iterable[Introduction | GreetReply]) -> None:
    """Check that the parties' names and notes are safe to print."""
    for reply in replies:
        is_name = NAME.fullmatch(reply.name)
        check_fields(ascii(reply.name), reply, ("name", is_name, f"must be {NAME_RULE}"))
        rule = f"must be printable, each {LONGEST} letters at most"
        for field in ("notes", "facts") if isinstance(reply, Introduction) else ():
            are_plain = all(map(is_plain, getattr(reply, field)))
            check_fields(reply.name, reply, (field, are_plain, rule))


def check_tables(parties: Mapping[str, Introduction], state: RunState) -> None:
    """Check that a resumed run meets the tables it began with."""
    for name, before in state.fingerprints.items():
        if name not in parties and not state.has_lost(name):
            raise PartyError(name, state.step, "is missing from the resumed run")
        if name in parties and parties[name].fingerprint != before:
            raise PartyError(name, state.step, "has another table than when the run began")


def check_steps(parties: Mapping[str, Introduction], asked: Mapping[str, int], step: int) -> None:
    """Check that every party resumes from the state it had at the checkpoint ``step``.

    A party with an older or a later state, as from a copy of its disk, is refused. ``asked`` has
    the step at which each party had last been asked.
    """
    for name, hello in parties.items():
        if hello.since not in (0, asked.get(name, 0)):
            raise PartyError(
                name,
                step,
                f"must resume from step {asked.get(name, 0)}, its state is of step {hello.since}: "
                "restore the state it had, or train again",
            )


def shared_rows(settings: Settings) -> list[str]:
    """Warnings about simulated parties that share rows or ids; sites cannot be compared."""
    names = party_sources(settings.data, settings.parties)
    run = flatten(settings.as_config())
    tables = dict[str, str]()
    owners = dict[str, str]()
    warnings = list[str]()
    for share, name in enumerate(names):
        config = site_config({"partition-id": share, "num-partitions": len(names)}, run)
        table = read_table(config)
        if (other := tables.setdefault(fingerprint({"": table}, b""), name)) != name:
            remedy = "give every party its own table, or rows count twice"
            warnings.append(f"{other} and {name} have the same rows ({names[name]}): {remedy}")
            continue
        by_group = config.group == config.id_column
        ids = [] if table.ids is None or by_group else np.unique(table.ids).tolist()
        for other, count in Counter(owners[row_id] for row_id in ids if row_id in owners).items():
            remedy = "remove rows that are in both tables, or the id if it only numbers rows; if "
            remedy += "both have rows of a person, name it as group too"
            warnings.append(
                f"{other} and {name} share {count:,} ids of '{config.id_column}': {remedy}"
            )
        owners = dict.fromkeys(ids, name) | owners
    return warnings


def slow_parties(replies: Iterable[GreetReply]) -> list[str]:
    """A line about each party whose Flower lacks patches: its text, made fit for a terminal."""
    slow = (reply for reply in replies if reply.fall_backs)
    return [
        f"{reply.name}: {as_plain('; '.join(reply.fall_backs), LONGEST_LINE)}" for reply in slow
    ]


def common_notes(notes: Mapping[str, Sequence[str]]) -> list[str]:
    """The parties' notes, with the parties they apply to; shared ones once."""
    parties_by_note: dict[str, list[str]] = {}
    for name, texts in notes.items():
        for note in texts:
            parties_by_note.setdefault(note, []).append(name)
    return [
        note if len(names) == len(notes) else f"{', '.join(names)}: {note}"
        for note, names in parties_by_note.items()
    ]


# The rounds of the new run are numbered after those of the model, so that rows and columns are
# drawn as in one run of all rounds; the base score stays the model's.
@dataclass(frozen=True, slots=True)
class InitialModel:
    """Size of the model that a run continues, as ``xgb_model`` of XGBoost; 0 without one."""

    n_rounds: int = 0
    n_trees: int = 0

    @classmethod
    def with_model(cls, model: Ensemble, trees_a_round: int) -> InitialModel:
        """All rounds of a model; its trees must be whole rounds."""
        n_rounds, n_over = divmod(len(model.trees), trees_a_round)
        if n_over or not n_rounds:
            rule = f"must have whole rounds of {trees_a_round} trees"
            raise ConfigError(f"init-model {rule}, got {len(model.trees)} trees")
        return cls(n_rounds, len(model.trees))

    def facts(self, settings: Settings) -> dict[str, Any]:
        """The summary's part; empty without an initial model."""
        if not self.n_rounds:
            return {}
        model = {"path": settings.init_model, "rounds": self.n_rounds, "trees": self.n_trees}
        return {"init_model": model}


def init_model_id(settings: Settings) -> str:
    """Id of the divided initial model; empty without one. Refuses a run of another method."""
    if not settings.init_model:
        return ""
    folder = Path(settings.init_model)
    if folder.is_file() and is_xgboost(folder.read_bytes()):
        rule = f"must be the folder of a run of {settings.strategy}, got a model of XGBoost"
        way = "no model in one piece can be divided among parties; pax, bagging and cyclic take it"
        raise ConfigError(f"init-model {rule}: {way}")
    run = RunFolder(folder if folder.is_dir() else folder.parent)
    if not run.has_finished:
        rule = "must be the folder of a finished run"
        raise ConfigError(f"init-model {rule}, got {folder}{did_you_mean_path(folder, RUNS)}")
    if (method := run.summary["strategy"]) != settings.strategy:
        rule = f"must be a run of {settings.strategy}, whose model is divided among the parties"
        raise ConfigError(f"init-model {rule}, got one of {method}")
    return run.model_id
