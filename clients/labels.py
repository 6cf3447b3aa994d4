"""Turn a site's labels into numbers, and sum them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fedapp.data.labels import class_ids
from fedapp.data.partition import SUBSETS
from fedapp.errors import ProtocolError, blaming
from fedapp.messages.labels import LabelsReply, LabelsRequest
from fedapp.site.answer import Handler, Site
from fedapp.site.store import Store
from fedapp.trees.objective import check_classes

CLASSES = "classes"  # of the run, in a store's facts


def labels(site: Site, request: LabelsRequest) -> LabelsReply:
    """Code the labels of all subsets, and sum those of the training rows."""
    label_sum, weight_sum = keep_classes(site, request)
    return LabelsReply(label_sum=label_sum, weight_sum=weight_sum)


class TellsClasses(Protocol):
    """A request that names the classes of the run."""

    @property
    def classes(self) -> tuple[str, ...]: ...


def keep_classes(site: Site, request: TellsClasses) -> tuple[float, float]:
    """Code the labels by the classes of the run, which stay the same to its end.

    Raises
    ------
    ProtocolError : no run of this objective has so many classes, or they were told before.
    """
    facts = site.store.facts
    if CLASSES in facts:
        raise ProtocolError(site.name, type(request).__name__, CLASSES, "must be told once")
    with blaming(site.name, type(request).__name__, CLASSES):
        check_classes(facts["objective"], len(request.classes))
    facts[CLASSES] = list(request.classes)
    return code_labels(site.store, request.classes)


def code_labels(store: Store | dict[str, Any], classes: Sequence[str]) -> tuple[float, float]:
    """Keep class ids in place of the labels; returns the weighted sum of the training labels.

    Returns
    -------
    Weighted sum of the labels, and sum of the weights.
    """
    for subset in SUBSETS:
        store[f"{subset}.labels"] = class_ids(store[f"{subset}.labels"], classes)
    coded = store["train.labels"].astype(np.float64)
    weights = store["train.weights"]
    return float(coded @ weights), float(weights.sum(dtype=np.float64))


HANDLERS: Mapping[type[LabelsRequest], Handler] = {LabelsRequest: labels}
