"""Handshake of a horizontal run at a party: describe its table, then code it as the run does.

The reply to the greeting has columns, classes and category names. The server returns the joint
classes and dictionary, by which labels and categories of all subsets are recoded.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from fedapp.data.labels import (
    Labels,
    class_ids,
    class_names,
    is_few,
    note_on_untrained,
    number_labels,
    objective_of,
    untrained_classes,
)
from fedapp.data.partition import SUBSETS, Holdout
from fedapp.data.schema import listed
from fedapp.data.table import Table, notes_on_leaks
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.histograms.fixed_point import power_above
from fedapp.home import home, secret_at
from fedapp.messages.fields import LONGEST, UNPRINTABLE, Array, Request, fields_of
from fedapp.messages.handshake import (
    GreetReply,
    GreetRequest,
    HelloReply,
    HelloRequest,
    JointCoding,
    LabelsReply,
    LabelsRequest,
    RunCoding,
    dictionary_digest,
    pack_categories,
    read_categories,
)
from fedapp.metrics import check_metrics
from fedapp.process import versions
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import note_greeting
from fedapp.site.settings import SiteConfig, check_subsets
from fedapp.site.store import KEEP_DAYS, Store, drop_abandoned
from fedapp.site.table import fingerprint, read_subsets
from fedapp.site.trust import keep_plan, site_fingerprint
from fedapp.trees.categories import Categories, as_categories, entries_of, names_of, recoded
from fedapp.trees.objective import (
    AUTO,
    LossParameters,
    Objective,
    check_classes,
    check_custom_is_set,
    check_objective,
    label_sums,
    n_outputs,
)

log = logging.getLogger("fedapp.site")

FEWEST_ROWS = 2
COUNTS = "category_counts"  # an array, which facts of a store cannot hold
# Facts of a store: the run's classes, extra metrics, parameters of the loss.
CLASSES, METRICS, PARAMETERS = "classes", "eval_metrics", "loss_parameters"
# In a store, the site's and the joint dictionary as JSON in bytes: an array file is written once.
LOCAL, JOINT = "own_categories", "categories"


def greet(site: Site, request: GreetRequest) -> GreetReply:
    """Name of the party and fingerprint of its key, before a run opens."""
    return GreetReply(site.name, "" if site.config.simulated else site_fingerprint(site.name))


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
            COUNTS: category_fields(site.config, subsets)[COUNTS],
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
    site.store[LOCAL] = _as_bytes(local_categories(subsets))  # until there is a joint dictionary
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
    # A simulation notes leaks of the whole table instead.
    leaks = () if config.simulated else notes_on_leaks(subsets["train"])
    notes = tuple(note.text(shares_names=True) for note in (*subsets["train"].notes, *leaks))
    if rounded and not config.simulated:  # a site that permits only sums logs them
        for note in notes:
            log.warning("%s: %s", config.name, note)
        notes = ()
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
        "versions": tuple(relevant_versions()),
        "notes": notes,
        **category_fields(config, subsets),
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


def _label_range(
    labels: Labels, classes: Sequence[str], objective: str, rounded: bool
) -> dict[str, float]:
    """Smallest and largest label of a regression; ``rounded`` widens to powers of two."""
    low = high = 0.0
    if not classes or (objective == AUTO and labels.dtype.kind != "U"):
        low, high = float(labels.min()), float(labels.max())
    if rounded:
        low = -math.ldexp(1.0, power_above(-low)) if low < 0 else 0.0
        high = math.ldexp(1.0, power_above(high)) if high > 0 else 0.0
    return {"label_low": low, "label_high": high}


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


def relevant_versions() -> list[str]:
    """Relevant packages with their versions."""
    return [f"{name} {number}" for name, number in versions().items()]


def labels(site: Site, request: LabelsRequest) -> LabelsReply:
    """Code labels and categories of all subsets, and sum the labels of the training rows."""
    return LabelsReply(**keep_coding(site, request))


def keep_coding(site: Site, request: RunCoding) -> dict[str, Any]:
    """Code labels and categories, once a run; returns the fields of a ``LabelsReply``."""
    facts = site.store.facts
    if CLASSES in facts:
        raise ProtocolError(site.name, type(request).__name__, CLASSES, "must be sent once")
    with as_protocol_error(site.name, type(request).__name__, CLASSES):
        if facts["objective"] == AUTO:
            if not request.classes and site.store["train.labels"].dtype.kind == "U":
                raise ValueError("classes must be those of text labels, got none")
            facts["objective"] = objective_of(len(request.classes))
        check_classes(facts["objective"], len(request.classes))
        check_metrics(facts["objective"], request.eval_metrics)
    facts[CLASSES], facts[METRICS] = list(request.classes), list(request.eval_metrics)
    facts[PARAMETERS] = asdict(LossParameters.of(request))
    sums, weight_sum = code_labels(site.store, facts["objective"], request.classes)
    return {"label_sums": sums, "weight_sum": weight_sum, "unseen": recode(site, request)}


def run_outputs(store: Store) -> int:
    """Number of margins per row."""
    return n_outputs(store.facts["objective"], len(store.facts[CLASSES]))


def loss_parameters(store: Store) -> LossParameters:
    """Loss parameters of the run; set with its classes."""
    return LossParameters(**store.facts[PARAMETERS])


def code_labels(
    store: Store | dict[str, Any], objective: Objective, classes: Sequence[str]
) -> tuple[npt.NDArray[np.float64], float]:
    """Replace labels by class ids; returns ``label_sums`` and weight sum of the training rows."""
    for subset in SUBSETS:
        store[f"{subset}.labels"] = class_ids(store[f"{subset}.labels"], classes)
    rows = store["train.labels"], store["train.weights"]
    return label_sums(objective, *rows, len(classes)), float(rows[1].sum(dtype=np.float64))


def number_rows(site: Site, objective: str) -> tuple[tuple[str, ...], npt.NDArray[np.float32]]:
    """Class names and labels as float32, at the active party; logs classes no training row has."""
    store, n_train = site.store, site.store.facts["n_train"]
    labels, positive = store["labels"], site.config.positive_label
    classes, numbers = number_labels(labels, objective, n_train, positive)
    if untrained := untrained_classes(classes, labels[:n_train]):
        log.warning("%s", note_on_untrained(untrained))
    return classes, numbers


def category_fields(config: SiteConfig, subsets: Mapping[str, Table]) -> dict[str, Any]:
    """Category fields of a ``HelloReply``; raises a DataError if names may not be sent."""
    local, table = local_categories(subsets), subsets["train"]
    for column, names in zip(table.columns, local, strict=False):
        if any(len(name) > LONGEST or UNPRINTABLE.search(name) for name in names or ()):
            rule = f"categories of feature column {{}} must have {LONGEST} letters at most, and no "
            rule += "control characters"
            raise DataError.naming(rule, listed([column]))
    try:
        fields = pack_categories(local)
    except ValueError as error:
        raise DataError(f"{error}; drop-columns excludes a column") from error
    # A column without any value has no kind; a table of numbers only reports none.
    entries = entries_of(local, len(table.kinds))
    kinds = tuple(
        "" if names == () else kind for kind, names in zip(table.kinds, entries, strict=True)
    )
    fields["kinds"] = kinds if {*kinds} - {"number"} else ()
    coded = {name: names for name, names in zip(table.columns, local, strict=False) if names}
    fields["digests"] = tuple(
        dictionary_digest(names) if name in table.given else "" for name, names in coded.items()
    )
    if config.shares_categories:
        return fields
    if unshared := [name for name in coded if name not in table.given]:
        rule = "categories of feature columns must be given by the schema where share-categories "
        rule += "is false in the node config, got none for {}"
        raise DataError.naming(rule, listed(unshared))
    return fields | {"categories": ()}


def local_categories(subsets: Mapping[str, Table]) -> Categories:
    """The site's dictionary; an entry is empty if no row of any subset has a value."""
    table = subsets["train"]
    has_values = np.zeros(len(table.columns), dtype=bool)
    for each in subsets.values():
        has_values |= ~np.isnan(each.values).all(axis=0)
    entries = entries_of(table.categories, len(table.columns))
    return as_categories(
        names if names or has_value else ()
        for names, has_value in zip(entries, has_values, strict=True)
    )


def store_categories(store: Store, categories: Categories) -> None:
    """Store the dictionary that codes the values to the end of the run."""
    store[JOINT] = _as_bytes(categories)


def stored_categories(store: Store) -> Categories:
    """Dictionary of a run: joint for horizontal parties, else the site's."""
    return _from_bytes(store[JOINT])


def recode(site: Site, request: JointCoding) -> Array:
    """Recode all subsets by the joint dictionary.

    Returns int64, shape (n_columns,): values per column that it lacks, which become missing; empty
    if no column has categories.
    """
    store, message = site.store, type(request).__name__
    columns = store.facts["hello"]["columns"]
    n_columns = len(columns)
    joint, local = read_categories(site.name, request, n_columns), _from_bytes(store[LOCAL])
    digests = store.facts["hello"]["digests"]
    unseen = np.zeros(n_columns if joint else 0, dtype=np.int64)
    with as_protocol_error(site.name, message, "categories"):
        coded = [column for column, names in enumerate(local) if names]
        for column, digest in zip(coded, digests, strict=True):
            if digest and names_of(joint, column) != local[column]:
                raise ValueError("categories must be those that the site's schema gives")
        for subset in SUBSETS:
            old_values = store[f"{subset}.values"]
            values, n_unseen = recoded(old_values, local, joint, columns)
            if values is not old_values:
                store[f"{subset}.values"] = values
            unseen += n_unseen[: len(unseen)]
    store.drop(LOCAL)
    store_categories(store, joint)
    return unseen


def _as_bytes(categories: Categories) -> Array:
    return np.frombuffer(json.dumps(categories).encode(), dtype=np.uint8)


def _from_bytes(text: Array) -> Categories:
    return tuple(None if names is None else tuple(names) for names in json.loads(text.tobytes()))


HANDLERS: Mapping[type[Request], Handler] = {
    HelloRequest: hello,
    LabelsRequest: labels,
    GreetRequest: greet,
}
