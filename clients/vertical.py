"""Vertical handshake at a party: read its columns, report the table's size."""

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
from fedapp.data.table import Table, notes_on_leaks, notes_on_numbered_ids
from fedapp.errors import ConfigError, DataError, ProtocolError
from fedapp.home import home
from fedapp.messages.fields import method_of
from fedapp.messages.vertical import VerticalHelloReply, VerticalHelloRequest
from fedapp.site.answer import METHOD, MODEL_ID, Handler, Site
from fedapp.site.mail import begin_session, box_key, note_greeting, run_key
from fedapp.site.plan import keep_plan
from fedapp.site.settings import SiteConfig
from fedapp.site.store import KEEP_DAYS, drop_abandoned, read_part
from fedapp.site.table import (
    check_range,
    fingerprint,
    quantiles,
    read_columns,
    read_rows_to_predict,
    row_ids,
    unlike_columns,
)
from fedapp.trees.divided import categories_of, quantiles_of
from fedapp.trees.objective import AUTO

log = logging.getLogger("fedapp.site")
# Fixed for a run. The table may change later, which its fingerprint shows.
FIXED = (
    "n_table",
    "n_columns",
    "active",
    "objective",
    "n_unlike",
    "simulated",
    "versions",
    "notes",
)


def hello(site: Site, request: VerticalHelloRequest) -> VerticalHelloReply:
    """Open a run at a site, or answer the handshake again after the server restarted."""
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
    store = site.store
    if "hello" in store.facts and request.model != store.facts.get("model", ""):
        rule = "must be that of the run's first request"
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
        store.facts["hello"] = {name: getattr(reply, name) for name in FIXED}
    fixed: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in store.facts["hello"].items()
    }
    return replace(reply, run_key=run_key(store), since=store.answered, **fixed)


def look(
    config: SiteConfig, request: VerticalHelloRequest
) -> tuple[VerticalHelloReply, Table, npt.NDArray[np.str_]]:
    """Read a site's table and check it against the rules of a run; nothing is stored."""
    table, active, n_unlike = _table(config, request)
    ids = row_ids(table, config, request.needs_ids)
    max_rows = min(request.most_rows, config.limits["align-most-rows"])
    if len(ids) > max_rows:
        rule = f"must be >= the rows of every party, {len(ids)} at {config.name}"
        raise ConfigError(f"align-most-rows {rule}, got {max_rows}")
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
        run_key=np.zeros(32, dtype=np.uint8),  # drawn when the run is stored
        simulated=config.simulated,
        fingerprint=fingerprint({"all": table}, site_key(config.name)),
        versions=tuple(told_versions()),
        notes=tuple(note.told(shares_names) for note in notes),
    )
    return reply, table, ids


def _table(config: SiteConfig, request: VerticalHelloRequest) -> tuple[Table, bool, int]:
    """The table, whether the party is active, and how many columns have drifted since training."""
    if not request.model:
        table = read_columns(config, request.seed)
        return table, table.labels is not None, 0
    if not MODEL_ID.fullmatch(request.model):
        raise ProtocolError(config.name, "VerticalHelloRequest", "model", "must be 16 hex digits")
    part = read_part(home() / "sites" / config.name / request.model)
    active = bool(part.get("active", False))
    model_columns = part["columns"], categories_of(part), active, part.get("base_margin", "")
    table = read_rows_to_predict(config, *model_columns)
    trained = quantiles_of(part)
    unlike: list[int] = []
    if len(trained):
        check_range(trained, table.values)
        unlike = unlike_columns(trained, table.values)
    if unlike and not config.simulated:
        names = ", ".join(table.columns[column] for column in unlike)
        log.warning("the table to predict has values unlike those trained on in: %s", names)
    return table, active, len(unlike)


HANDLERS: Mapping[type[VerticalHelloRequest], Handler] = {VerticalHelloRequest: hello}
