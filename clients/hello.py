"""Read the table, hold rows back, say what it looks like."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from clients.dictionary import JOINT, keep_own, own_categories, told_categories
from fedapp.crypto.fixed_point import power_above
from fedapp.data.labels import Labels, class_names, is_few, untrained_classes
from fedapp.data.notes import notes_on_leaks
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError, ProtocolError, blaming
from fedapp.home import home, secret_at
from fedapp.messages.fields import fields_of
from fedapp.messages.hello import HelloReply, HelloRequest
from fedapp.packages import versions
from fedapp.site.answer import Handler, Site
from fedapp.site.config import SiteConfig
from fedapp.site.mail import note_greeting
from fedapp.site.plan import keep_plan
from fedapp.site.policy import check_subsets
from fedapp.site.rows import fingerprint, read_subsets
from fedapp.site.stores import KEEP_DAYS, drop_abandoned
from fedapp.trees.objective import AUTO, check_held, check_objective

log = logging.getLogger("fedapp.site")

FEWEST_ROWS = 2
COUNTS = "category_counts"  # an array, so none of a store's facts


def hello(site: Site, request: HelloRequest) -> HelloReply:
    """Open a run at a site, or meet the server again after it was started anew.

    The server opens a run again with an order of the columns, before anything else is asked.
    """
    drop_abandoned(site.store.folder.parent, KEEP_DAYS)
    keep_plan(site.config, site.store, request)
    columns = tuple(site.store.facts.get("hello", {}).get("columns", ()))
    if columns and (not request.columns or JOINT in site.store):
        # The server holds the fingerprint against the one the run began with.
        subsets = _subsets(site.config, replace(request, columns=columns))
        now = {
            "fingerprint": fingerprint(subsets, site_key(site.name)),
            COUNTS: told_categories(site.config, subsets)[COUNTS],
        }
        return replace(
            _reply(site.name, site.store.facts["hello"] | now), since=site.store.answered
        )
    reply, subsets = look(site.config, request)
    for name, table in subsets.items():
        site.store[f"{name}.values"] = table.values
        site.store[f"{name}.weights"] = weights_of(table)
        if table.base_margins is not None:
            site.store[f"{name}.base_margins"] = table.base_margins
        if table.labels is not None:
            site.store[f"{name}.labels"] = table.labels
    keep_own(site.store, own_categories(subsets))
    told = fields_of(reply)
    note_greeting(site.store, request)
    site.store.facts["objective"] = request.objective
    site.store.facts["hello"] = {
        key: value for key, value in told.items() if key not in ("name", "since", COUNTS)
    }
    return reply


def look(config: SiteConfig, request: HelloRequest) -> tuple[HelloReply, dict[str, Table]]:
    """Read a site's table and hold it to the rules of a run; nothing is kept.

    Returns
    -------
    What the site says of it, and its subsets.

    Raises
    ------
    DataError, ConfigError : there is no such table, or it breaks a rule.
    ProtocolError : there is no such objective.
    """
    with blaming(config.name, "HelloRequest", "objective"):
        check_objective(request.objective, AUTO)
        check_held(request.objective)
    subsets = _subsets(config, request)
    n_rows = {name: table.n_rows for name, table in subsets.items()}
    rule = "table must have at least {} {} rows, got {}"
    check_subsets(FEWEST_ROWS, {"train": n_rows["train"]}, rule)
    check_subsets(config.min_rows, n_rows, rule + f" (min-rows of {config.name})")
    labels = _labels(subsets)
    # A site whose rows may leave it in sums alone does not go by what it is asked.
    rounded = request.rounded or config.least_parties > 0
    classes = class_names(labels, request.objective)
    limits = config.least_parties or config.run_epsilon
    if limits and classes and labels.dtype.kind != "U" and not is_few(np.unique(labels)):
        rule = f"must be for numbers at {config.name}, whose classes would be its labels"
        way = "; a schema may make the label a text"
        raise ConfigError(
            f"objective {rule} (least-parties, run-epsilon), got {request.objective}{way}"
        )
    told = {
        **{f"n_{name}": n_rows[name] for name in SUBSETS},
        "columns": subsets["train"].columns,
        "classes": classes,
        "untrained": untrained_classes(classes, _labels({"train": subsets["train"]})),
        "positive_label": config.positive_label,
        "base_margin": config.base_margin,
        **_label_range(labels, classes, request.objective, rounded),
        "simulated": config.simulated,
        "fingerprint": fingerprint(subsets, site_key(config.name)),
        "versions": tuple(told_versions()),
        "notes": _notes(config, subsets["train"], rounded),
        **told_categories(config, subsets),
        "merges_bins": config.least_bin_rows > 0,
    }
    return _reply(config.name, told), subsets


def _subsets(config: SiteConfig, request: HelloRequest) -> dict[str, Table]:
    """The site's rows, with the columns in the order of the run."""
    subsets = read_subsets(config, Holdout(**fields_of(request, Holdout)))
    own = subsets["train"].columns
    if request.columns and sorted(request.columns) != sorted(own):
        rule = "must be the site's, in any order"
        raise ProtocolError(config.name, "HelloRequest", "columns", rule)
    return {name: one.in_order(request.columns or own) for name, one in subsets.items()}


def _notes(config: SiteConfig, table: Table, rounded: bool) -> tuple[str, ...]:
    """Warnings of the table; only for the log of a site that only sums may leave."""
    leaks = () if config.simulated else notes_on_leaks(table)  # else noted of the whole table
    notes = tuple(note.told(shares_names=True) for note in (*table.notes, *leaks))
    if config.simulated or not rounded:
        return notes
    for note in notes:
        log.warning("%s: %s", config.name, note)
    return ()


def _label_range(
    labels: Labels, classes: Sequence[str], objective: str, rounded: bool
) -> dict[str, float]:
    """The least and largest label of a regression, rounded to powers of two where asked."""
    is_told = not classes or (objective == AUTO and labels.dtype.kind != "U")
    found = (float(labels.min()), float(labels.max())) if is_told else (0.0, 0.0)
    if rounded:
        low, high = min(found[0], 0.0), max(found[1], 0.0)
        found = (
            -math.ldexp(1.0, power_above(-low)) if low else 0.0,
            math.ldexp(1.0, power_above(high)) if high else 0.0,
        )
    return dict(zip(("label_low", "label_high"), found, strict=True))


def _labels(subsets: Mapping[str, Table]) -> Labels:
    """All labels of the site, checked to be there."""
    found = [table.labels for table in subsets.values() if table.labels is not None]
    if not found:
        raise DataError('label must name the label column, as in label="y"; got none')
    return cast(Labels, np.concatenate(found))


def weights_of(table: Table) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Sample weights; 1 where the table has none."""
    return np.ones(table.n_rows, dtype=np.float32) if table.weights is None else table.weights


def _reply(name: str, facts: Mapping[str, object]) -> HelloReply:
    """The reply that was worked out when the table was read."""
    fields = {
        key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()
    }
    return HelloReply(name=name, **fields)  # type: ignore[arg-type]


def site_key(name: str) -> bytes:
    """The site's secret for fingerprints, drawn once."""
    return secret_at(home() / "sites" / name / "fingerprint.key", lambda: secrets.token_bytes(32))


def told_versions() -> list[str]:
    """Packages that matter and their versions."""
    return [f"{name} {number}" for name, number in versions().items()]


HANDLERS: Mapping[type[HelloRequest], Handler] = {HelloRequest: hello}
