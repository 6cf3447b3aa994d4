"""Code a site's labels and categories by the classes and dictionary of the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.dictionary import recode
from fedapp.data.labels import (
    class_ids,
    note_on_untrained,
    number_labels,
    objective_of,
    untrained_classes,
)
from fedapp.data.partition import SUBSETS
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.handshake import LabelsReply, LabelsRequest, RunCoding
from fedapp.metrics import check_metrics
from fedapp.site.answer import Handler, Site
from fedapp.site.store import Store
from fedapp.trees.objective import (
    AUTO,
    LossParameters,
    Objective,
    check_classes,
    label_sums,
    n_outputs,
)

log = logging.getLogger("fedapp.site")
# Facts of a store: the run's classes, extra metrics, parameters of the loss.
CLASSES, METRICS, PARAMETERS = "classes", "eval_metrics", "loss_parameters"


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


HANDLERS: Mapping[type[LabelsRequest], Handler] = {LabelsRequest: labels}
