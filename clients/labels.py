"""Turn a site's labels into numbers, and sum them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedapp.data.labels import class_ids
from fedapp.data.partition import SUBSETS
from fedapp.messages.labels import LabelsReply, LabelsRequest
from fedapp.site.answer import Handler, Site
from fedapp.site.store import Store


def labels(site: Site, request: LabelsRequest) -> LabelsReply:
    """Code the labels of all subsets, and sum those of the training rows."""
    label_sum, weight_sum = code_labels(site.store, request.classes)
    return LabelsReply(label_sum=label_sum, weight_sum=weight_sum)


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
