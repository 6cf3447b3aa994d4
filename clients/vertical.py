"""Read a party's columns, and say how large the table is."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.dictionary import keep_categories
from clients.hello import site_key, told_versions, weights_of
from fedapp.data.labels import auto_objective, class_names
from fedapp.data.notes import notes_on_leaks, notes_on_numbered_ids
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError, ProtocolError
from fedapp.home import home
from fedapp.messages.methods import method_of
from fedapp.messages.vertical import VerticalHelloReply, VerticalHelloRequest
from fedapp.site.answer import METHOD, MODEL_ID, Handler, Site
from fedapp.site.columns import read_columns, read_rows_to_predict, row_ids
from fedapp.site.config import SiteConfig
from fedapp.site.likeness import check_range, quantiles, unlike_columns
from fedapp.site.mail import begin_session, box_key, note_greeting, run_key
from fedapp.site.part_file import read_part
from fedapp.site.plan import keep_plan
from fedapp.site.rows import fingerprint
from fedapp.site.stores import KEEP_DAYS, drop_abandoned
from fedapp.trees.divided.lookup import categories_of, quantiles_of
from fedapp.trees.objective import AUTO

log = logging.getLogger("fedapp.site")
# What a run begun stays with: the table may be another by now, which its fingerprint tells.
KEPT = ("n_table", "n_columns", "active", "objective", "n_unlike", "simulated", "versions", "notes")


def hello(site: Site, request: VerticalHelloRequest) -> VerticalHelloReply:
    """Open a run at a site, or meet the server again after it was started anew."""
    drop_abandoned(site.store.folder.parent, KEEP_DAYS)
    keep_plan(site.config, site.store, request)
    try:
        return _introduction(site, request)
    except DataError as error:
        if site.config.simulated:
            raise
        log.error("%s", error)
        raise error.for_others(site.config.shares_names) from None


def _introduction(site: Site, request: VerticalHelloRequest) -> VerticalHelloReply:
    """Read the table, keep it where it is new, and say how large it is."""
    store = site.store
    if "hello" in store.facts and request.model != store.facts.get("model", ""):
        rule = "must be that of the run's first, whatever the server's start"
        raise ProtocolError(site.name, "VerticalHelloRequest", "model", rule)
    method = method_of(store.facts[METHOD])
    if method is None or bool(request.model) == method.trains:
        rule = "must name a model to predict, and none to train"
        raise ProtocolError(site.name, "VerticalHelloRequest", "model", rule)
    reply, table, ids = look(site.config, request)
    if "hello" not in store.facts:
        note_greeting(store, request)
        begin_session(store)
        if request.model:
            store.facts["model"] = request.model
        store["ids"], store["values"] = ids, table.values
        if table.labels is not None:
            store["labels"], store["weights"] = table.labels, weights_of(table)
        if table.base_margins is not None:
            store["base_margins"] = table.base_margins
        if not request.model:
            store["quantiles"] = quantiles(table.values)
        store.facts["columns"], store.facts["kinds"] = list(table.columns), list(table.kinds)
        keep_categories(store, table.categories)
        store.facts["hello"] = {name: getattr(reply, name) for name in KEPT}
    kept: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in store.facts["hello"].items()
    }
    return replace(reply, run_key=run_key(store), since=store.answered, **kept)


def look(
    config: SiteConfig, request: VerticalHelloRequest
) -> tuple[VerticalHelloReply, Table, npt.NDArray[np.str_]]:
    """Read a site's table and hold it to the rules of a run; nothing is kept.

    Returns
    -------
    What the site says of it, with no key of the run yet, the table, and the ids of its rows.

    Raises
    ------
    DataError, ConfigError : there is no such table, or it breaks a rule.
    """
    table, active, n_unlike = _table(config, request)
    ids = row_ids(table, config, request.needs_ids)
    most = min(request.most_rows, config.limits["align-most-rows"])
    if len(ids) > most:
        rule = f"must be >= the rows of every party, {len(ids)} at {config.name}"
        raise ConfigError(f"align-most-rows {rule}, got {most}")
    shares_names = config.shares_names or config.simulated
    notes, suggested = table.notes, ""
    if request.asks_objective and table.labels is not None:
        suggested = auto_objective([class_names(table.labels, AUTO)])[0]
    for leak in () if config.simulated or request.model else notes_on_leaks(table):
        log.warning("%s: %s", config.name, leak.told(shares_names=True))  # labels stay here
    if table.ids is not None and request.needs_ids and not config.is_share:
        notes += tuple(notes_on_numbered_ids(config.id_column, table.ids))
    reply = VerticalHelloReply(
        name=config.name,
        n_table=table.n_rows,
        n_columns=len(table.columns),
        columns=table.columns if config.shares_names else (),
        active=active,
        objective=suggested,
        n_unlike=n_unlike,
        box_key=box_key(config.name),
        run_key=np.zeros(32, dtype=np.uint8),
        simulated=config.simulated,
        fingerprint=fingerprint({"all": table}, site_key(config.name)),
        versions=tuple(told_versions()),
        notes=tuple(note.told(shares_names) for note in notes),
    )
    return reply, table, ids


def _table(config: SiteConfig, request: VerticalHelloRequest) -> tuple[Table, bool, int]:
    """The table, whether the party is the active one, and how many columns differ from training."""
    if not request.model:
        table = read_columns(config, request.seed)
        return table, table.labels is not None, 0
    if not MODEL_ID.fullmatch(request.model):
        raise ProtocolError(config.name, "VerticalHelloRequest", "model", "must be 16 hex digits")
    part = read_part(home() / "sites" / config.name / request.model)
    active = bool(part.get("active", False))
    of_model = part["columns"], categories_of(part), active, part.get("base_margin", "")
    table = read_rows_to_predict(config, *of_model)
    return table, active, _n_unlike(config, quantiles_of(part), table)


def _n_unlike(config: SiteConfig, trained: npt.NDArray[np.float32], table: Table) -> int:
    """How many columns have values unlike those trained on, where most have; named in the log."""
    if not len(trained):
        return 0
    check_range(trained, table.values)
    found = unlike_columns(trained, table.values)
    if found and not config.simulated:
        names = ", ".join(table.columns[place] for place in found)
        log.warning("the table to predict has values unlike those trained on in: %s", names)
    return len(found)


HANDLERS: Mapping[type[VerticalHelloRequest], Handler] = {VerticalHelloRequest: hello}
