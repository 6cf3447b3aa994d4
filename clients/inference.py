"""Vertical inference at a party: its part of the model, and writing predictions."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.predictions import (
    named_predictions,
    prediction_scores,
    unmatched_note,
    write_predictions,
)
from fedapp.errors import DataError
from fedapp.home import write_atomically
from fedapp.messages.fields import Array
from fedapp.site.answer import Site
from fedapp.site.store import part_digest, read_part
from fedapp.trees.divided import Lookup, model_of, split_owners
from fedapp.trees.forest.model import BaggedForest
from fedapp.trees.model import Ensemble

log = logging.getLogger("fedapp.site")
OUTPUT = "predictions"
Model = Ensemble | BaggedForest
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """A party's part of a model; read once a step."""

    document: Mapping[str, Any]  # the file's content
    lookup: Lookup  # the party's splits


@dataclass(frozen=True, slots=True, eq=False)
class ActivePart(OwnPart):
    """The active party's part: also structure, leaves, and the owner of each split."""

    model: Model  # without others' thresholds
    owners: list[list[str]]  # by tree and node; meaningless at leaves
    records: list[Ints]  # by tree and node: number of the split in its owner's lookup

    def check(self, party: str, digest: Array) -> None:
        """Raise a DataError if another party's part is not the one the model was trained with."""
        if digest.tobytes().hex() != self.document["parts"].get(party):
            raise DataError("model must be the one this run was trained with", party)


def own_part(site: Site, model: str = "") -> OwnPart:
    """A party's part of the run's model, or of another one by its id."""
    document = read_part(_folder(site, model))
    return OwnPart(document, Lookup.from_json(document))


def active_part(site: Site, model: str = "") -> ActivePart:
    """As ``own_part``, at the active party; raises a DataError if a party does not take part."""
    document = read_part(_folder(site, model))
    if missing := sorted(document["parts"].keys() - site.store.facts["peers"].keys()):
        raise DataError(f"parties must be those of the model, got none named {', '.join(missing)}")
    trees, records = model_of(document), [np.array(one) for one in document["splits"]]
    owners = split_owners(trees, document)
    return ActivePart(document, Lookup.from_json(document), trees, owners, records)


def own_digest(site: Site, model: str = "") -> Array:
    """Digest of the party's part, for the active party; uint8, shape (32,)."""
    return np.frombuffer(part_digest(_folder(site, model)), dtype=np.uint8)


def predictions_by_leaves(site: Site, part: ActivePart, leaves: npt.NDArray[np.int32]) -> Array:
    """Predictions from leaves, int32, shape (n_trees, n_rows)."""
    if isinstance(part.model, Ensemble):
        return part.model.predictions(leaves, site.store.find("base_margins"))
    return part.model.predictions(leaves)


def predictions_by_sums(site: Site, part: ActivePart, sums: npt.NDArray[np.float64]) -> Array:
    """Predictions from sums of leaf terms, shape (n_rows, n_outputs)."""
    if isinstance(part.model, Ensemble):
        return part.model.predictions_of(sums, site.store.find("base_margins"))
    return part.model.predictions_of(sums)


def write_rows(site: Site, part: ActivePart, predictions: Array, suffix: str) -> None:
    """Write one prediction per row, in the order of the party's table; then drop the rows.

    ``predictions`` has shape (n_rows, n_outputs), in the common order. ``predictions.json`` has
    the unmatched ids, and scores where the table has labels. None of it leaves the party.
    """
    store, model = site.store, part.model
    order = np.argsort(store["places"], kind="stable")
    named = named_predictions(model.classes, predictions.shape[1], predictions[order])
    name = site.config.id_column or "row"
    write_predictions(store.folder / f"{OUTPUT}{suffix}", name, store["ids"][order], named)
    unmatched = store["unmatched"].tolist()
    if unmatched and not site.config.simulated:
        unmatched_text = unmatched_note(len(unmatched), len(unmatched) + len(order))
        log.warning("%s: %s has their ids", unmatched_text, f"{OUTPUT}.json")
    scores, note = dict[str, float](), ""
    if "labels" in store:
        scored_rows = predictions, store["labels"], store["weights"], part.document.get("threshold")
        scores, note = prediction_scores(model.objective, model.classes, *scored_rows)
    finite_scores = {name: None if np.isnan(value) else value for name, value in scores.items()}
    summary = {"rows": len(order), "not_matched": unmatched, "scores": finite_scores}
    text = json.dumps({**summary, "note": note}, indent=1) + "\n"
    write_atomically(store.folder / f"{OUTPUT}.json", text.encode())
    store.forget()


def _folder(site: Site, model: str) -> Path:
    return site.store.folder.parent / (model or str(site.store.facts["model"]))
