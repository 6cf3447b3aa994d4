"""What all ways to predict share at a party: its part of the model, and the predictions' end."""

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
from fedapp.home import write_whole
from fedapp.messages.fields import Array
from fedapp.site.answer import Site
from fedapp.site.part_file import part_digest, read_part
from fedapp.trees.divided.lookup import Lookup, model_of, split_owners
from fedapp.trees.forest.model import BaggedForest
from fedapp.trees.model import Ensemble

log = logging.getLogger("fedapp.site")
OUTPUT = "predictions"
Model = Ensemble | BaggedForest
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """What every party keeps of a model; read once a step.

    Parameters
    ----------
    document : as it lies on the disk.
    lookup : the party's own splits.
    """

    document: Mapping[str, Any]
    lookup: Lookup


@dataclass(frozen=True, slots=True, eq=False)
class ActivePart(OwnPart):
    """What the active party keeps: structure and leaves too, and whose each split is.

    Parameters
    ----------
    model : without others' thresholds.
    owners : of each tree, by node; leaves too have one, which means nothing.
    records : of each tree, by node: number of the split in its owner's lookup.
    """

    model: Model
    owners: list[list[str]]
    records: list[Ints]

    def check(self, party: str, digest: Array) -> None:
        """Hold another party's part against the one the model was trained with.

        Raises
        ------
        DataError : it has changed.
        """
        if digest.tobytes().hex() != self.document["parts"].get(party):
            raise DataError("model must be the one this run was trained with", party)


def own_part(site: Site, model: str = "") -> OwnPart:
    """Any party's part of the model that is predicted with, or of another one by its id."""
    document = read_part(_folder(site, model))
    return OwnPart(document, Lookup.from_json(document))


def active_part(site: Site, model: str = "") -> ActivePart:
    """The active party's part; ``model`` as in ``own_part``.

    Raises
    ------
    DataError : a passive party of the model does not take part.
    """
    document = read_part(_folder(site, model))
    if missing := sorted(document["parts"].keys() - site.store.facts["peers"].keys()):
        raise DataError(f"parties must be those of the model, got none named {', '.join(missing)}")
    trees, records = model_of(document), [np.array(one) for one in document["splits"]]
    owners = split_owners(trees, document)
    return ActivePart(document, Lookup.from_json(document), trees, owners, records)


def own_digest(site: Site, model: str = "") -> Array:
    """Digest of the party's part, for a letter to the active party; uint8, shape (32,)."""
    return np.frombuffer(part_digest(_folder(site, model)), dtype=np.uint8)


def predictions_by_leaves(site: Site, part: ActivePart, leaves: npt.NDArray[np.int32]) -> Array:
    """Predictions of the rows by their leaves, int32, shape (n_trees, n_rows)."""
    if isinstance(part.model, Ensemble):
        return part.model.predictions(leaves, _base_margins(site))
    return part.model.predictions(leaves)


def predictions_by_sums(site: Site, part: ActivePart, sums: npt.NDArray[np.float64]) -> Array:
    """Predictions of the rows by the sums of their leaf terms, shape (n_rows, n_outputs)."""
    if isinstance(part.model, Ensemble):
        return part.model.predictions_of(sums, _base_margins(site))
    return part.model.predictions_of(sums)


def _base_margins(site: Site) -> Array | None:
    """The margins that rows start from, in the common order; None where the model has none."""
    return site.store.find("base_margins")


def write_rows(site: Site, part: ActivePart, predictions: Array, suffix: str) -> None:
    """Write a line for every row, in the order of the party's table; forget the rows.

    Beside it ``predictions.json``: ids of the party's rows that others do not have, and scores
    where the table has labels. None of it leaves the party.

    Parameters
    ----------
    predictions : shape (n_rows, n_outputs), rows in the common order.
    """
    store, model = site.store, part.model
    order = np.argsort(store["places"], kind="stable")
    named = named_predictions(model.classes, predictions.shape[1], predictions[order])
    name = site.config.id_column or "row"
    write_predictions(store.folder / f"{OUTPUT}{suffix}", name, store["ids"][order], named)
    unmatched = store["unmatched"].tolist()
    if unmatched and not site.config.simulated:
        told = unmatched_note(len(unmatched), len(unmatched) + len(order))
        log.warning("%s: %s has their ids", told, f"{OUTPUT}.json")
    scores, note = dict[str, float](), ""
    if "labels" in store:
        given = predictions, store["labels"], store["weights"], part.document.get("threshold")
        scores, note = prediction_scores(model.objective, model.classes, *given)
    known = {name: None if np.isnan(value) else value for name, value in scores.items()}
    found = {"rows": len(order), "not_matched": unmatched, "scores": known}
    text = json.dumps({**found, "note": note}, indent=1) + "\n"
    write_whole(store.folder / f"{OUTPUT}.json", text.encode())
    store.forget()


def _folder(site: Site, model: str) -> Path:
    """Where the party's part of a model lies."""
    return site.store.folder.parent / (model or str(site.store.facts["model"]))
