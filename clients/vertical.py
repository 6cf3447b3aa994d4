"""Read a party's columns, and say how large the table is."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from clients.hello import KEEP_DAYS, site_key, told_versions, weights_of
from fedapp.errors import ConfigError, DataError, ProtocolError
from fedapp.messages.vertical import VerticalHelloReply, VerticalHelloRequest
from fedapp.site.answer import MODEL_ID, Handler, Site
from fedapp.site.columns import read_columns, read_rows_to_predict, row_ids
from fedapp.site.mail import box_key
from fedapp.site.rows import fingerprint
from fedapp.site.store import drop_abandoned
from fedapp.site.table import Table
from fedapp.trees.parts import read_part

log = logging.getLogger("fedapp.site")


def hello(site: Site, request: VerticalHelloRequest) -> VerticalHelloReply:
    """Open a run at a site, or meet the server again after it was started anew."""
    drop_abandoned(site.store.folder.parent, KEEP_DAYS)
    try:
        return _introduction(site, request)
    except DataError as error:
        if site.config.simulated or site.config.shares_names:
            raise
        log.error("%s", error)
        hint = "; the site's own log says more" if error.outside != error.rule else ""
        raise DataError(error.outside + hint) from None


def _introduction(site: Site, request: VerticalHelloRequest) -> VerticalHelloReply:
    """Read the table, keep it where it is new, and say how large it is."""
    store, config = site.store, site.config
    table, active = _table(site, request)
    now = {"fingerprint": fingerprint({"all": table}, site_key(site.name))}
    if "hello" not in store.facts:
        ids = row_ids(table, config, request.needs_ids)
        if len(ids) > request.most_rows:
            rule = f"must be >= the rows of every party, {len(ids)} at {site.name}"
            raise ConfigError(f"align-most-rows {rule}, got {request.most_rows}")
        store["ids"], store["values"] = ids, table.values
        if table.labels is not None:
            store["labels"], store["weights"] = table.labels, weights_of(table)
        store.facts["columns"] = list(table.columns)
        store.facts["hello"] = {
            "n_table": table.n_rows,
            "n_columns": len(table.columns),
            "active": active,
            "simulated": config.simulated,
            "versions": told_versions(),
        }
    facts = {**store.facts["hello"], **now}
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}
    names = tuple(table.columns) if config.shares_names else ()
    return VerticalHelloReply(name=site.name, columns=names, box_key=box_key(site.name), **fields)  # type: ignore[arg-type]


def _table(site: Site, request: VerticalHelloRequest) -> tuple[Table, bool]:
    """The table to train on or to predict, and whether the party is the active one."""
    if not request.model:
        table = read_columns(site.config, request.seed)
        return table, table.labels is not None
    if not MODEL_ID.fullmatch(request.model):
        raise ProtocolError(site.name, "VerticalHelloRequest", "model", "must be 16 hex digits")
    part = read_part(site.store.folder.parent / request.model)
    site.store.facts["model"] = request.model
    return read_rows_to_predict(site.config, part["columns"]), bool(part.get("active", False))


HANDLERS: Mapping[type[VerticalHelloRequest], Handler] = {VerticalHelloRequest: hello}
