"""How parties meet: by name, and with what is odd about their tables."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from fedapp.clock import clock_text
from fedapp.config import Settings, flatten
from fedapp.conversation import Parties
from fedapp.data.names import NAME, NAME_RULE
from fedapp.data.notes import is_plain
from fedapp.data.sources import party_sources
from fedapp.errors import LONGEST, ConfigError, DataError, PartyError, ProtocolError
from fedapp.messages.fields import Introduction
from fedapp.messages.greet import GreetReply
from fedapp.run_state import RunState
from fedapp.site.config import site_config
from fedapp.site.rows import fingerprint, read_table

I = TypeVar("I", bound=Introduction | GreetReply)  # noqa: E741
# Engines of simulations by their grids; their nodes are all made within moments.
ENGINES = {"LocalGrid": "local", "InMemoryGrid": "simulation"}
SETTLED = 0.3  # seconds without another node of a simulation until no more will come


def site_names() -> dict[str, str]:
    """Names of the sites that this coordinator has registered, by what a run calls their nodes."""
    from fedapp.deploy.folders import registered_sites

    sites = registered_sites(Path(os.environ.get("FLWR_HOME", "")))
    return {f"node {node}": name for node, name in sites.items()}


class Nodes(Protocol):
    """What of Flower's Grid is needed to find the nodes."""

    def get_node_ids(self) -> Iterable[int]: ...


def find_nodes(
    grid: Nodes, parties: int, n_lost: int, deadline: float, wait: Callable[[str], None]
) -> list[int]:
    """Wait for as many nodes as parties are expected, in a simulation for all that it makes.

    Parameters
    ----------
    parties : expected; 0: as many as this coordinator has registered, else all that are connected.
    n_lost : of them that need not come back.
    deadline : seconds.
    wait : called with what is waited for.

    Raises
    ------
    ConfigError : there are fewer, or more than ``parties``.
    """
    wanted = (parties or len(site_names()) or 1) - n_lost
    is_simulated, since = type(grid).__name__ in ENGINES, time.monotonic()
    end, nodes = since + deadline, list[int]()
    wait(told := f"waiting for {wanted} parties")
    while True:
        before, nodes = nodes, sorted(grid.get_node_ids())
        since = since if len(nodes) == len(before) else time.monotonic()
        is_settled = bool(nodes) and time.monotonic() - since > SETTLED
        if len(nodes) >= wanted and (parties or is_settled or not is_simulated):
            break
        here = {f"node {node}" for node in nodes}
        absent = ", ".join(name for node, name in site_names().items() if node not in here)
        if absent and told != (told := f"waiting for {absent}"):
            wait(told)
        if is_simulated and is_settled:
            way = f"set parties=0, or --federation-config 'num-supernodes={wanted}'"
            rule = f"must be {len(nodes)}, as many as there are simulated SuperNodes"
            raise ConfigError(f"parties {rule}, got {wanted}; {way}")
        if time.monotonic() > end:
            waited = f"within {deadline:g} s (start-deadline)"
            raise ConfigError(f"parties must be {wanted}, got {len(nodes)} {waited}")
        time.sleep(0.05 if is_simulated else 0.2)
    if parties and len(nodes) > parties:
        rule = f"must be the number of nodes, {len(nodes)}, or 0, which takes all"
        raise ConfigError(f"parties {rule}, got {parties}")
    return nodes


def clock_warnings(ahead: Mapping[str, float]) -> list[str]:
    """Names the parties whose clocks differ from the coordinator's, by the seconds ahead of it."""
    texts = (clock_text(f"{name}'s", by, "the coordinator's") for name, by in ahead.items())
    return [text for text in texts if text]


def meet(replies: Iterable[I]) -> Parties[I]:
    """The parties by name.

    Raises
    ------
    DataError : two parties have the same name.
    """
    members: dict[str, I] = {}
    for reply in replies:
        if reply.name in members:
            raise DataError(
                "name must be unique in the federation, two parties have it", reply.name
            )
        members[reply.name] = reply
    return Parties(members)


def check_texts(replies: Iterable[Introduction | GreetReply]) -> None:
    """Hold what parties say of themselves to what a terminal shows as it is.

    Raises
    ------
    ProtocolError : a name or a note is none that may be printed.
    """
    for reply in replies:
        message = type(reply).__name__
        if not NAME.fullmatch(reply.name):
            raise ProtocolError(ascii(reply.name), message, "name", f"must be {NAME_RULE}")
        notes = reply.notes if isinstance(reply, Introduction) else ()
        if not all(is_plain(note) for note in notes):
            rule = f"must be printable, each {LONGEST} letters at most"
            raise ProtocolError(reply.name, message, "notes", rule)


def check_greeted(replies: Mapping[str, Introduction], met: Mapping[str, GreetReply]) -> None:
    """Check that parties, by Flower node, have the names of the plan."""
    for label, reply in replies.items():
        if reply.name != (due := met[label].name):
            rule = f"must be {due}, as it was when the party was greeted, got {reply.name}"
            raise ProtocolError(due, type(reply).__name__, "name", rule)


def check_tables(parties: Mapping[str, Introduction], state: RunState) -> None:
    """Hold that a resumed run meets the tables it began with.

    Raises
    ------
    PartyError : a party is missing, or has another table.
    """
    for name, before in state.fingerprints.items():
        if name not in parties and not state.has_lost(name):
            raise PartyError(name, state.step, "is missing from the resumed run")
        if name in parties and parties[name].fingerprint != before:
            raise PartyError(name, state.step, "has another table than when the run began")


def check_steps(parties: Mapping[str, Introduction], asked: Mapping[str, int], step: int) -> None:
    """Hold that every party goes on from where it was when the run was saved.

    Parameters
    ----------
    asked : step at which each party had last been asked by then.
    step : of the checkpoint.

    Raises
    ------
    PartyError : a party has an older or a later state, as from a copy of its disk.
    """
    for name, hello in parties.items():
        if hello.since not in (0, asked.get(name, 0)):
            raise PartyError(
                name,
                step,
                f"must go on from step {asked.get(name, 0)}, its state is of step {hello.since}: "
                "restore the state it had, or train anew",
            )


def shared_rows(settings: Settings) -> list[str]:
    """Warnings of simulated parties that share rows or ids; tables of sites cannot be compared."""
    names, run = party_sources(settings.data, settings.parties), flatten(settings.as_config())
    tables, owners, found = dict[str, str](), dict[str, str](), list[str]()
    for share, name in enumerate(names):
        config = site_config({"partition-id": share, "num-partitions": len(names)}, run)
        table = read_table(config)
        if (other := tables.setdefault(fingerprint({"": table}, b""), name)) != name:
            way = "give every party its own table, or rows count twice"
            found.append(f"{other} and {name} have the same rows ({names[name]}): {way}")
            continue
        ids = [] if table.ids is None else np.unique(table.ids).tolist()
        for other, count in Counter(owners[one] for one in ids if one in owners).items():
            way = "remove rows that are in both tables, or the id if it only numbers rows"
            found.append(f"{other} and {name} share {count:,} ids of '{config.id_column}': {way}")
        owners = dict.fromkeys(ids, name) | owners
    return found


def oddities(parties: Mapping[str, Introduction]) -> list[str]:
    """What the parties' notes say of their tables, and whose; once what all say alike, as shares of
    one table do."""
    said: dict[str, list[str]] = {}
    for name, hello in parties.items():
        for note in hello.notes:
            said.setdefault(note, []).append(name)
    return [
        note if len(names) == len(parties) else f"{', '.join(names)}: {note}"
        for note, names in said.items()
    ]
