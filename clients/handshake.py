"""Handshake of a horizontal run at a party: describe its table, then code it as the run does.

The reply to the greeting has columns, classes and category names. The server returns the joint
classes and dictionary, by which labels and categories of all subsets are recoded.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Floats, Ints
from fedapp.data.labels import (
    Labels,
    class_ids,
    class_names,
    is_few,
    notes_on_queries,
    numbers_of,
    objective_of,
    untrained_classes,
)
from fedapp.data.partition import Holdout
from fedapp.data.schema import listed
from fedapp.data.scratch import copied
from fedapp.data.table import Table, notes_on_leaks
from fedapp.errors import ConfigError, DataError, as_plain, as_protocol_error, without_folders
from fedapp.histograms.fixed_point import power_above
from fedapp.home import home, secret_at
from fedapp.messages.fields import LONGEST, UNPRINTABLE, Array, check_fields, fields_of
from fedapp.messages.handshake import (
    MOST_FALL_BACKS,
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
from fedapp.messages.wire import from_bytes, from_content, to_bytes, to_content
from fedapp.metrics import check_metrics
from fedapp.process import FALL_BACKS, versions
from fedapp.records.codec import IN_FILE
from fedapp.site.account import account_of
from fedapp.site.answer import Handlers, Site
from fedapp.site.mail import note_greeting
from fedapp.site.policy import check_delta, check_memory, check_subsets
from fedapp.site.roles import Order, Role, handlers, role
from fedapp.site.settings import SiteConfig
from fedapp.site.store import KEEP_DAYS, drop_abandoned
from fedapp.site.table import (
    check_given,
    fingerprint,
    notes_on_classes,
    read_subsets,
    texts_for_others,
)
from fedapp.site.trust import site_fingerprint
from fedapp.trees.categories import (
    Categories,
    as_categories,
    category_counts,
    entries_of,
    names_of,
    recoded,
    without_rare,
)
from fedapp.trees.losses import LossParameters, Objective
from fedapp.trees.objective import (
    AUTO,
    check_classes,
    check_custom_is_set,
    check_objective,
    is_ranking,
    label_sums,
    n_outputs,
)
from fedapp.trees.ranking import N_GRADES

log = logging.getLogger("fedapp.site")

Floats64 = npt.NDArray[np.float64]
FEWEST_ROWS = 2


@role
class Coded(Role):
    """What the handshake of a horizontal run leaves; roles of its methods extend it.

    Rows are by subset: train, valid, test. Before they are coded, labels and values are as in a
    ``Table``; afterwards all parties' codes mean the same.
    """

    introduction: bytes = b""  # the HelloReply that opened the run
    columns: tuple[str, ...]
    digests: tuple[str, ...]  # of the dictionaries that the site's schema gives
    asked_objective: str
    table_labels: Mapping[str, Labels] = {}  # until they are coded
    values: Mapping[str, Floats]  # (n_rows, n_columns); NaN is missing
    weights: Mapping[str, Floats]
    base_margins: Mapping[str, Floats] = {}  # empty if the table has none
    local_categories: Annotated[Categories, IN_FILE]  # that code the values before
    # Of the run
    is_coded: bool = False
    objective: Objective
    classes: tuple[str, ...]
    eval_metrics: tuple[str, ...]
    loss: LossParameters
    categories: Annotated[Categories, IN_FILE]  # of all parties
    labels: Mapping[str, Floats]  # class ids, or numbers

    @property
    def n_outputs(self) -> int:
        """Number of margins per row."""
        return n_outputs(self.objective, len(self.classes))

    @property
    def category_counts(self) -> Ints:
        """Categories of each column, 0 if numeric."""
        return category_counts(self.categories, len(self.columns))

    def code(self, request: RunCoding) -> dict[str, Any]:
        """Code labels and categories as all parties do; returns the fields of a ``LabelsReply``."""
        objective = self.asked_objective
        with as_protocol_error(self.name, type(request).__name__, "classes"):
            if objective == AUTO:
                if not request.classes and numbers_of(self.table_labels["train"]) is None:
                    raise ValueError("classes must be those of text labels, got none")
                objective = objective_of(len(request.classes))
            self.objective = cast(Objective, objective)
            check_classes(self.objective, len(request.classes))
            self.loss = LossParameters.of(request)
            check_metrics(self.objective, request.eval_metrics, self.loss)
        self.is_coded = True
        self.classes = request.classes
        self.eval_metrics = request.eval_metrics
        self.labels, sums = code_labels(
            self.table_labels, self.weights["train"], self.objective, request.classes, self.loss
        )
        self.table_labels = {}
        return {**sums, "unseen": self._recode(request)}

    def _recode(self, request: JointCoding) -> Array:
        """Recode all subsets by the joint dictionary.

        Returns int64, shape (n_columns,): values per column that it lacks, which become missing;
        empty if no column has categories.
        """
        n_columns = len(self.columns)
        local = self.local_categories
        joint = read_categories(self.name, request, n_columns)
        unseen = np.zeros(n_columns if joint else 0, dtype=np.int64)
        with as_protocol_error(self.name, type(request).__name__, "categories"):
            coded = [column for column, names in enumerate(local) if names]
            for column, digest in zip(coded, self.digests, strict=True):
                if digest and names_of(joint, column) != local[column]:
                    raise ValueError("categories must be those that the site's schema gives")
            values = {}
            for subset, before in self.values.items():
                values[subset], n_unseen = recoded(before, local, joint, self.columns, copied)
                unseen += n_unseen[: len(unseen)]
        self.values = values
        self.categories = joint
        self.local_categories = ()
        return unseen


@role
class Opening(Coded):
    """A horizontal party from the greeting to the common coding."""

    order = Order({HelloRequest: {LabelsRequest}}, any_time={HelloRequest})

    def hello(self, request: HelloRequest) -> HelloReply:
        """Open a run at a site, or answer the handshake again after the server restarted."""
        drop_abandoned(self.folder.parent, KEEP_DAYS)
        # Until rows are coded, a request with an order of the columns opens the run again.
        if self.introduction and (not request.columns or self.is_coded):
            # The server compares the fingerprint with that of the run's start.
            subsets = _subsets(self.config, replace(request, columns=self.columns))
            opened = from_content(HelloReply, from_bytes(self.introduction, self.name), self.name)
            current = fingerprint(subsets, site_key(self.name))
            return replace(opened, fingerprint=current, since=self.site.store.answered)
        reply, subsets = look(self.config, request)
        n_rows = sum(table.n_rows for table in subsets.values())
        method = account_of(self.site.store).method
        check_memory(self.config, method, request, n_rows, len(reply.columns))
        self.values = {name: table.values for name, table in subsets.items()}
        self.weights = {name: weights_of(table) for name, table in subsets.items()}
        margins = {name: table.base_margins for name, table in subsets.items()}
        self.base_margins = {name: each for name, each in margins.items() if each is not None}
        labels = {name: table.labels for name, table in subsets.items()}
        self.table_labels = {name: each for name, each in labels.items() if each is not None}
        self.local_categories = local_categories(subsets)
        self.columns, self.digests = reply.columns, reply.digests
        note_greeting(self.site.store, request)
        self.asked_objective = request.objective
        self.introduction = to_bytes(to_content(reply, self.name))
        return reply

    def code_labels(self, request: LabelsRequest) -> LabelsReply:
        """Code labels and categories of all subsets, and sum the labels of the training rows."""
        return LabelsReply(**self.code(request))


def greet(site: Site, request: GreetRequest) -> GreetReply:
    """Name of the party, fingerprint of its key, and what slows it, before a run opens."""
    if site.config.simulated:
        return GreetReply(site.name, "")
    lines = os.environ.get(FALL_BACKS, "").splitlines()[:MOST_FALL_BACKS]
    fall_backs = tuple(as_plain(without_folders(line), 1000) for line in lines)
    return GreetReply(site.name, site_fingerprint(site.name), fall_backs)


def look(config: SiteConfig, request: HelloRequest) -> tuple[HelloReply, dict[str, Table]]:
    """Read a site's table and check it against the rules of a run; nothing is stored."""
    config = config.naming(request.least_rows_per_name)
    with as_protocol_error(config.name, "HelloRequest", "objective"):
        check_objective(request.objective, AUTO)
        check_custom_is_set(request.objective)
    subsets = _subsets(config, request)
    if not subsets["train"].columns:
        raise DataError("table must have a feature column, got only labels and ids")
    n_rows = {name: table.n_rows for name, table in subsets.items()}
    rule = "table must have at least {} {} rows, got {}"
    check_subsets(FEWEST_ROWS, {"train": n_rows["train"]}, rule)
    check_subsets(config.min_rows, n_rows, rule + f" (min-rows of {config.name})")
    if request.epsilon and not config.simulated:  # there the server compares all rows
        check_delta(config, request.delta, n_rows["train"])
    labels = _labels(subsets)
    # A site that only sums may leave rounds its label range whatever the request asks.
    rounded = request.rounded or config.least_parties > 0
    classes = class_names(labels, request.objective)
    limits = config.least_parties or config.run_epsilon
    numbers = numbers_of(labels)
    if limits and classes and numbers is not None and not is_few(np.unique(numbers)):
        rule = f"must be for numbers at {config.name}, whose classes would be its labels"
        way = "; a schema may make the label a text"
        raise ConfigError(
            f"objective {rule} (least-parties, run-epsilon), got {request.objective}{way}"
        )
    # A simulation notes leaks of the whole table instead.
    leaks = () if config.simulated else notes_on_leaks(subsets["train"])
    few = notes_on_classes(config, labels) if classes else []
    if subsets["train"].is_ranked:
        few = notes_on_queries(cast(Labels, subsets["train"].labels))
    every = (*subsets["train"].notes, *leaks, *few)
    logs_all = rounded and not config.simulated  # as a site that permits only sums
    for note in every if logs_all else few:
        log.warning("%s: %s", config.name, note.text(shares_names=True))
    low, high = _label_range(numbers, classes, request.objective, rounded)
    reply = HelloReply(
        name=config.name,
        n_train=n_rows["train"],
        n_valid=n_rows["valid"],
        n_test=n_rows["test"],
        columns=subsets["train"].columns,
        classes=classes,
        untrained=untrained_classes(classes, _labels({"train": subsets["train"]})),
        positive_label=config.positive_label,
        base_margin=config.base_margin,
        label_low=low,
        label_high=high,
        simulated=config.simulated,
        fingerprint=fingerprint(subsets, site_key(config.name)),
        versions=tuple(relevant_versions()),
        **texts_for_others(config, () if logs_all else every),
        **category_fields(config, subsets, rounded or request.epsilon > 0),
        merges_bins=config.least_bin_rows > 0,
        together=subsets["train"].together,
    )
    return reply, subsets


def _subsets(config: SiteConfig, request: HelloRequest) -> dict[str, Table]:
    subsets = read_subsets(config, Holdout(**fields_of(request, Holdout)))
    site_columns = subsets["train"].columns
    order = request.columns or site_columns
    are_same = sorted(order) == sorted(site_columns)
    check_fields(config.name, request, ("columns", are_same, "must be the site's, in any order"))
    return {name: table.in_order(order) for name, table in subsets.items()}


def _label_range(
    numbers: Floats64 | None, classes: Sequence[str], objective: str, rounded: bool
) -> tuple[float, float]:
    """Smallest and largest label of a regression; ``rounded`` widens to powers of two."""
    low = high = 0.0
    if is_ranking(objective):  # whatever the labels are, of which the numbers are codes
        return 0.0, N_GRADES - 1.0
    if numbers is not None and (not classes or objective == AUTO):
        low = float(numbers.min())
        high = float(numbers.max())
    if rounded:
        low = -math.ldexp(1.0, power_above(-low)) if low < 0 else 0.0
        high = math.ldexp(1.0, power_above(high)) if high > 0 else 0.0
    return low, high


def _labels(subsets: Mapping[str, Table]) -> Labels:
    labels = [table.labels for table in subsets.values() if table.labels is not None]
    if not labels:
        raise DataError('label must name the label column, as in label="y"; got none')
    return cast(Labels, np.concatenate(labels))


def weights_of(table: Table) -> Floats:
    """Sample weights; 1 where the table has none."""
    return np.ones(table.n_rows, dtype=np.float32) if table.weights is None else table.weights


def site_key(name: str) -> bytes:
    """The site's secret key for fingerprints, drawn once."""
    return secret_at(home() / "sites" / name / "fingerprint.key", lambda: secrets.token_bytes(32))


def relevant_versions() -> list[str]:
    """Relevant packages with their versions."""
    return [f"{name} {number}" for name, number in versions().items()]


def code_labels(
    labels: Mapping[str, Labels],
    weights: Floats,
    objective: Objective,
    classes: Sequence[str],
    loss: LossParameters,
) -> tuple[dict[str, Floats], dict[str, Any]]:
    """Labels by subset as class ids or numbers, and sums over training rows with their `weights`.

    The sums are fields of a ``LabelsReply``. Raises DataError for a label that is no class.
    """
    coded = {subset: class_ids(of_rows, classes) for subset, of_rows in labels.items()}
    sums = label_sums(objective, coded["train"], weights, len(classes), loss)
    return coded, {"label_sums": sums, "weight_sum": float(weights.sum(dtype=np.float64))}


def category_fields(
    config: SiteConfig, subsets: Mapping[str, Table], is_private: bool = False
) -> dict[str, Any]:
    """Category fields of a ``HelloReply``; raises a DataError if names may not be sent.

    Where only sums may leave (``is_private``) no kind says that all numbers are 0 or 1, which a
    single row decides.
    """
    local = local_categories(subsets)
    table = subsets["train"]
    for column, names in zip(table.columns, local, strict=False):
        if any(len(name) > LONGEST or UNPRINTABLE.search(name) for name in names or ()):
            rule = f"categories of feature column {{}} must have {LONGEST} letters at most, and no "
            rule += "control characters"
            raise DataError.naming(rule, listed([column]))
    agreed = {column_id for column_id, name in enumerate(table.columns) if name in table.given}
    shared = local
    try:
        if config.fewest_named:
            values = [subset.values for subset in subsets.values()]
            shared = without_rare(local, values, config.fewest_named, agreed)
        fields = pack_categories(shared)
    except ValueError as error:
        raise DataError(f"{error}; drop-columns excludes a column") from error
    # A column without any value has no kind; a table of numbers only reports none.
    entries = entries_of(local, len(table.kinds))
    without = {"binary": "number"} if is_private else {}
    kinds = tuple(
        "" if names == () else without.get(kind, kind)
        for kind, names in zip(table.kinds, entries, strict=True)
    )
    fields["kinds"] = kinds if {*kinds} - {"number"} else ()
    fields["digests"] = tuple(
        dictionary_digest(names) if name in table.given else ""
        for name, names in zip(table.columns, local, strict=False)
        if names
    )
    check_given(config, table, local)
    return fields if config.shares_categories else fields | {"categories": ()}


def local_categories(subsets: Mapping[str, Table]) -> Categories:
    """The site's dictionary; an entry is empty if no row of any subset has a value."""
    table = subsets["train"]
    has_values = np.zeros(len(table.columns), dtype=bool)
    for subset in subsets.values():
        has_values |= [not np.isnan(column).all() for column in subset.values.T]
    entries = entries_of(table.categories, len(table.columns))
    return as_categories(
        names if names or has_value else ()
        for names, has_value in zip(entries, has_values, strict=True)
    )


HANDLERS: Handlers = {**handlers(Opening), GreetRequest: greet}
