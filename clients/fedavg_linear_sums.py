"""A linear model's inputs at a party whose sums leave it added to those of all others alone."""

from __future__ import annotations

import numpy as np

from clients.dictionary import kept_categories
from clients.labels import keep_coding
from clients.secure import join, label_sums
from fedapp.errors import DataError, ProtocolError
from fedapp.linear import LinearModel
from fedapp.linear_sums import (
    count_powers,
    largest_powers,
    of_inputs,
    sum_squares,
    sum_values,
    whole_model,
    whole_weight,
)
from fedapp.messages.fedavg_linear import (
    AverageSumsRequest,
    MeansRequest,
    OpenRequest,
    SpreadsRequest,
)
from fedapp.messages.fields import Array
from fedapp.site.answer import Site
from fedapp.site.masks import Sums, bounds_of
from fedapp.site.store import Store
from fedapp.trees.sets import category_counts

# In a store: the powers of two that the inputs come up to; among its facts: means have been told.
POWERS, MEANS_TOLD = "powers", "means_told"


def open_sums(site: Site, request: OpenRequest) -> Sums:
    """Meet the others, code labels and categories; sums of labels, sizes of values."""
    coded, store = keep_coding(site, request), site.store
    bounds = join(site, request, request)
    rows = store["train.values"], store["train.weights"]
    counts = count_powers(*rows, _is_number(store))
    return Sums([label_sums(store, bounds), coded["unseen"], counts])


def means(site: Site, request: MeansRequest) -> Sums:
    """Sums of the inputs."""
    store, is_number = site.store, _is_number(site.store)
    rows = store["train.values"], store["train.weights"]
    if POWERS in store:
        raise ProtocolError(site.name, "MeansRequest", POWERS, "must be told once")
    if len(request.powers) != len(is_number):
        rule = f"must be {len(is_number)}, got {len(request.powers)}"
        raise ProtocolError(site.name, "MeansRequest", POWERS, rule)
    if (request.powers < largest_powers(count_powers(*rows, is_number), is_number)).any():
        rule = f"must be no less than those of {site.name}"
        raise ProtocolError(site.name, "MeansRequest", POWERS, rule)
    categories = kept_categories(store)
    store[POWERS] = powers = of_inputs(request.powers, categories)
    return Sums([sum_values(*rows, categories, powers, bounds_of(store))], follows=True)


def spreads(site: Site, request: SpreadsRequest) -> Sums:
    """Sums of the inputs' squared deviations from the means of all rows."""
    store = site.store
    powers = np.asarray(store[POWERS])
    if MEANS_TOLD in store.facts:
        raise ProtocolError(site.name, "SpreadsRequest", "means", "must be told once")
    if request.means.shape != powers.shape:
        rule = f"must be {len(powers)}, got {len(request.means)}"
        raise ProtocolError(site.name, "SpreadsRequest", "means", rule)
    if (np.abs(request.means) > np.ldexp(1.0, powers)).any():
        rule = "must be within the largest values"
        raise ProtocolError(site.name, "SpreadsRequest", "means", rule)
    store.facts[MEANS_TOLD] = True
    rows = store["train.values"], store["train.weights"], kept_categories(store)
    return Sums([sum_squares(*rows, request.means, powers, bounds_of(store))], follows=True)


def model_sums(site: Site, request: AverageSumsRequest, model: LinearModel) -> list[Array]:
    """A model that the party has trained on, by its share of all parties' weight, and its own.

    Raises
    ------
    ProtocolError : the party's weight is beyond that of all.
    DataError : the model is beyond what holds for all.
    """
    bounds = bounds_of(site.store)
    weight = whole_weight(site.store["train.weights"], bounds)
    most = request.weight_power + bounds.exponent(0)
    if most < 0 or weight > 2**most:
        rule = f"must be no less than that of {site.name}"
        raise ProtocolError(site.name, "AverageSumsRequest", "weight_power", rule)
    theta, rest = np.vstack((model.weights, model.bias)), (model.objective, bounds)
    try:
        whole = whole_model(theta, weight, request.weight_power, *rest)
    except ValueError as error:
        way = (
            "a smaller fedavg-linear.learning-rate, a larger fedavg-linear.l2 or "
            "fedavg-linear.aggregation=plain may help"
        )
        raise DataError(f"{error}; {way}", site.name) from None
    return [np.array([weight]), whole]


def _is_number(store: Store) -> Array:
    """Whether each column is one of numbers; bool, shape (n_columns,)."""
    counts = category_counts(kept_categories(store), store["train.values"].shape[1])
    found: Array = counts == 0
    return found
