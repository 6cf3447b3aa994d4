"""Horizontal handshake at a party: read the table, hold rows back, describe it."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from clients.dictionary import JOINT, keep_own, own_categories, told_categories
from fedapp.data.labels import Labels, class_names, is_few, untrained_classes
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.data.table import Table, notes_on_leaks
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.histograms.fixed_point import power_above
from fedapp.home import home, secret_at
from fedapp.messages.fields import fields_of
from fedapp.messages.handshake import HelloReply, HelloRequest
from fedapp.packages import versions
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import note_greeting
from fedapp.site.plan import keep_plan
from fedapp.site.settings import SiteConfig, check_subsets
from fedapp.site.store import KEEP_DAYS, drop_abandoned
from fedapp.site.table import fingerprint, read_subsets
from fedapp.trees.objective import AUTO, check_custom_is_set, check_objective

log = logging.getLogger("fedapp.site")

FEWEST_ROWS = 2
COUNTS = "category_counts"  # an array, which facts of a store cannot hold


def hello(site: Site, request: HelloRequest) -> HelloReply:
    """Open a run at a site, or answer the handshake again after the server restarted."""
    drop_abandoned(site.store.folder.parent, KEEP_DAYS)
    keep_plan(site.config, site.store, request)
    run_columns = tuple(site.store.facts.get("hello", {}).get("columns", ()))
    # Until joint categories are stored, a request with an order of the columns opens the run again.
    if run_columns and (not request.columns or JOINT in site.store):
        # The server compares the fingerprint with that of the run's start.
        subsets = _subsets(site.config, replace(request, columns=run_columns))
        current = {
            "fingerprint": fingerprint(subsets, site_key(site.name)),
            COUNTS: told_categories(site.config, subsets)[COUNTS],
        }
        return replace(
            _reply(site.name, site.store.facts["hello"] | current), since=site.store.answered
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
    fields = fields_of(reply)
    note_greeting(site.store, request)
    site.store.facts["objective"] = request.objective
    site.store.facts["hello"] = {
        key: value for key, value in fields.items() if key not in ("name", "since", COUNTS)
    }
    return reply


def look(config: SiteConfig, request: HelloRequest) -> tuple[HelloReply, dict[str, Table]]:
    """Read a site's table and check it against the rules of a run; nothing is stored."""
    with as_protocol_error(config.name, "HelloRequest", "objective"):
        check_objective(request.objective, AUTO)
        check_custom_is_set(request.objective)
    subsets = _subsets(config, request)
    n_rows = {name: table.n_rows for name, table in subsets.items()}
    rule = "table must have at least {} {} rows, got {}"
    check_subsets(FEWEST_ROWS, {"train": n_rows["train"]}, rule)
    check_subsets(config.min_rows, n_rows, rule + f" (min-rows of {config.name})")
    labels = _labels(subsets)
    # A site that only sums may leave rounds its label range whatever the request asks.
    rounded = request.rounded or config.least_parties > 0
    classes = class_names(labels, request.objective)
    limits = config.least_parties or config.run_epsilon
    if limits and classes and labels.dtype.kind != "U" and not is_few(np.unique(labels)):
        rule = f"must be for numbers at {config.name}, whose classes would be its labels"
        way = "; a schema may make the label a text"
        raise ConfigError(
            f"objective {rule} (least-parties, run-epsilon), got {request.objective}{way}"
        )
    facts = {
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
    return _reply(config.name, facts), subsets


def _subsets(config: SiteConfig, request: HelloRequest) -> dict[str, Table]:
    subsets = read_subsets(config, Holdout(**fields_of(request, Holdout)))
    site_columns = subsets["train"].columns
    if request.columns and sorted(request.columns) != sorted(site_columns):
        rule = "must be the site's, in any order"
        raise ProtocolError(config.name, "HelloRequest", "columns", rule)
    order = request.columns or site_columns
    return {name: table.in_order(order) for name, table in subsets.items()}


def _notes(config: SiteConfig, table: Table, rounded: bool) -> tuple[str, ...]:
    """Warnings about the table; only logged where a site permits only sums."""
    # A simulation notes leaks of the whole table instead.
    leaks = () if config.simulated else notes_on_leaks(table)
    notes = tuple(note.told(shares_names=True) for note in (*table.notes, *leaks))
    if config.simulated or not rounded:
        return notes
    for note in notes:
        log.warning("%s: %s", config.name, note)
    return ()


def _label_range(
    labels: Labels, classes: Sequence[str], objective: str, rounded: bool
) -> dict[str, float]:
    """Smallest and largest label of a regression; ``rounded`` widens to powers of two."""
    discloses_range = not classes or (objective == AUTO and labels.dtype.kind != "U")
    bounds = (float(labels.min()), float(labels.max())) if discloses_range else (0.0, 0.0)
    if rounded:
        low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
        bounds = (
            -math.ldexp(1.0, power_above(-low)) if low else 0.0,
            math.ldexp(1.0, power_above(high)) if high else 0.0,
        )
    return dict(zip(("label_low", "label_high"), bounds, strict=True))


def _labels(subsets: Mapping[str, Table]) -> Labels:
    labels = [table.labels for table in subsets.values() if table.labels is not None]
    if not labels:
        raise DataError('label must name the label column, as in label="y"; got none')
    return cast(Labels, np.concatenate(labels))


def weights_of(table: Table) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Sample weights; 1 where the table has none."""
    return np.ones(table.n_rows, dtype=np.float32) if table.weights is None else table.weights


def _reply(name: str, facts: Mapping[str, object]) -> HelloReply:
    # Sequences come back from the store as lists.
    fields = {
        key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()
    }
    return HelloReply(name=name, **fields)  # type: ignore[arg-type]


def site_key(name: str) -> bytes:
    """The site's secret key for fingerprints, drawn once."""
    return secret_at(home() / "sites" / name / "fingerprint.key", lambda: secrets.token_bytes(32))


def told_versions() -> list[str]:
    """Relevant packages with their versions."""
    return [f"{name} {number}" for name, number in versions().items()]


HANDLERS: Mapping[type[HelloRequest], Handler] = {HelloRequest: hello}
