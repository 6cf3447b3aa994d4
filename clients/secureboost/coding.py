"""Category codes and bins of a party's columns for one SecureBoost run.

The order of a table's codes is independent of the names, so bins reveal nothing of these. A
category in no training row has a code above all others and no bin; splits send it left, as
XGBoost's do. A category that first occurs in a table to predict is missing.
"""

from __future__ import annotations

import numpy as np

from clients.dictionary import keep_categories, kept_categories
from fedapp.histograms.bins import Cuts, Ints, with_categories, without_categories
from fedapp.histograms.sketch import quantile_cuts
from fedapp.site.store import Store
from fedapp.trees.sets import category_counts, recoded, trained_first

NO_CUTS = Cuts(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.float32))


def code_categories(store: Store) -> Ints:
    """Give training categories the lowest codes; returns their number per column, 0 if numeric."""
    local, values = kept_categories(store), np.asarray(store["values"])
    joint, counts = trained_first(local, values[: store.facts["n_train"]])
    if joint != local:
        store["values"] = recoded(values, local, joint)[0]
        keep_categories(store, joint)
    return counts


def keep_cuts(store: Store, max_bin: int, categories: Ints) -> Cuts:
    """Compute and store the cuts of the training rows; ``categories`` as above."""
    train = np.asarray(store["values"][: store.facts["n_train"]])
    values = without_categories(train, categories)
    # Unweighted: only the active party knows the weights.
    cuts = quantile_cuts(values, None, max_bin) if train.shape[1] else NO_CUTS
    cuts = with_categories(cuts, categories, categories)
    store["edges"], store["offsets"], store["minima"] = cuts.edges, cuts.offsets, cuts.minima
    store["set_widths"] = categories
    store["n_categories"] = category_counts(kept_categories(store), train.shape[1])
    return cuts
