"""Continue training from a finished divided model, as with XGBoost's ``xgb_model``.

Each party starts with its splits of that model, the active one with its trees too. Rows traverse it
as in interactive inference, and their leaf values are the initial margins. Record and round numbers
continue.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clients.dictionary import kept_categories
from clients.inference import ActivePart, active_part, own_digest, own_part
from clients.walking import leaves_reached
from fedapp.errors import ConfigError, DataError, ProtocolError
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import SetupRequest
from fedapp.site.answer import MODEL_ID, Site
from fedapp.site.store import Store
from fedapp.trees.divided import Lookup, categories_of
from fedapp.trees.model import Ensemble, stack_trees
from fedapp.trees.objective import LossParameters, n_outputs
from fedapp.trees.rounds import n_leaves

INIT_MODEL = "init_model"  # a fact: the model's id


def note_init_model(site: Site, request: SetupRequest) -> None:
    """Store the id of the initial model."""
    if request.init_model and not MODEL_ID.fullmatch(request.init_model):
        raise ProtocolError(site.name, "SetupRequest", INIT_MODEL, "must be 16 hex digits")
    site.store.facts[INIT_MODEL] = request.init_model


def begin_lookup(site: Site) -> npt.NDArray[np.uint8]:
    """Start with the party's splits of the initial model, if any; returns their digest."""
    store, model = site.store, site.store.facts[INIT_MODEL]
    if not model:
        store.put("lookup", Lookup.empty())
        return np.empty(0, dtype=np.uint8)
    part = own_part(site, model)
    if part.document["columns"] != list(store.facts["columns"]):
        n_columns, n_expected = len(store.facts["columns"]), len(part.document["columns"])
        rule = f"columns of init-model must be the table's {n_columns}, in their order"
        raise DataError(f"{rule}, got {n_expected}, or others", site.name)
    if categories_of(part.document) != kept_categories(store):
        rule = "categories of init-model must be those of the training rows, in the order that the "
        raise DataError(f"{rule}run draws: it takes the same table and seed", site.name)
    store.put("lookup", part.lookup)
    return own_digest(site, model)


def initial_part(site: Site) -> ActivePart:
    """The active party's part of the initial model."""
    return active_part(site, site.store.facts[INIT_MODEL])


def begin_trees_of(site: Site, request: SetupRequest, classes: tuple[str, ...]) -> Array:
    """Start with the trees of the initial model, checked to fit the run; returns its base score."""
    store, part = site.store, initial_part(site)
    model = part.model
    if not isinstance(model, Ensemble):
        raise ConfigError("init-model must be a boosted model, got a forest")
    parties = sorted(part.document["n_columns"])
    if parties != sorted(store.facts["peers"]):
        raise DataError(f"parties must be those of init-model ({', '.join(parties)})")
    margins = site.config.base_margin if "base_margins" in store else ""
    settings = {
        "objective": (request.objective, model.objective),
        "classes": (classes, model.classes),
        "parameters": (LossParameters.of(request), model.parameters),
        "base-margin": (margins, model.margin_column),
    }
    for field, (wanted, of_model) in settings.items():
        if wanted != of_model:
            # Without the values: class and column names stay at the party.
            raise ConfigError(f"{field} of init-model must be the run's at {site.name}")
    store["model.nodes"], store["model.offsets"] = stack_trees(model.trees)
    store["model.records"] = np.concatenate(part.records)
    width = n_outputs(model.objective, len(classes))
    store.facts["n_rounds"] = len(model.trees) // width
    store.facts["n_leaves"] = n_leaves(model.trees[-width:])
    return model.base_score


def add_leaves(store: Store, part: ActivePart) -> None:
    """Add the initial model's leaf values to the margins; drop the traversal's state."""
    leaves, margins = leaves_reached(store), np.array(store["margins"])
    for number, (tree, tree_leaves) in enumerate(zip(part.model.trees, leaves, strict=True)):
        margins[:, number % margins.shape[1]] += tree["value"][tree_leaves]
    store["margins"] = margins
    store.drop("nodes", "leaves")
    for name in ("asked", "done", "first_tree"):
        store.facts.pop(name, None)
