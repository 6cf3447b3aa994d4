"""Read a party's columns, and say how large the table is."""

from __future__ import annotations

from collections.abc import Mapping

from clients.hello import KEEP_DAYS, site_key, versions, weights_of
from fedapp.errors import ConfigError
from fedapp.messages.vertical import VerticalHelloReply, VerticalHelloRequest
from fedapp.site.answer import Handler, Site
from fedapp.site.columns import read_columns, row_ids
from fedapp.site.mail import box_key
from fedapp.site.rows import fingerprint
from fedapp.site.store import drop_abandoned


def hello(site: Site, request: VerticalHelloRequest) -> VerticalHelloReply:
    """Open a run at a site, or meet the server again after it was started anew."""
    store, config = site.store, site.config
    drop_abandoned(store.folder.parent, KEEP_DAYS)
    table = read_columns(config, request.seed)
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
            "active": table.labels is not None,
            "simulated": config.simulated,
            "versions": versions(),
        }
    facts = {**store.facts["hello"], **now}
    fields = {key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()}
    names = tuple(table.columns) if config.shares_names else ()
    return VerticalHelloReply(name=site.name, columns=names, box_key=box_key(store), **fields)  # type: ignore[arg-type]


HANDLERS: Mapping[type[VerticalHelloRequest], Handler] = {VerticalHelloRequest: hello}
