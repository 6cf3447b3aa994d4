"""The runs that are attacked: two parties with different columns, small keys and few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simulations.attacks.heard import Heard

ACTIVE, PASSIVE = "party-1", "party-2"
VERTICAL: dict[str, Any] = {"objective": "binary:logistic", "parties": 2, "align": "ordered"}
VERTICAL |= {"valid-fraction": 0.0, "eta": 0.3}
SECUREBOOST = {
    **VERTICAL,
    "strategy": "secureboost",
    "num-boost-round": 10,
    "max-depth": 4,
    "max-bin": 32,
    "secureboost.key-bits": 512,
    "secureboost.insecure-small-key": True,
}
CREDIT: dict[str, Any] = {"data": "default-credit", "columns": "sizes:12,11", "test-fraction": 0.95}
IONOSPHERE: dict[str, Any] = {"data": "ionosphere", "columns": "sizes:17,17"}
BINNED = {"ionosphere": IONOSPHERE, "default-credit": CREDIT}


def true_bins(heard: Heard) -> npt.NDArray[np.int64] | None:
    """True bins of the passive party's training rows, int64, shape (n_rows, n_columns).

    A missing value has the bin after the last. None unless the message is to that party and it has
    bins. Attacks are judged by these bins and do not use them.
    """
    store = heard.site.store
    if heard.site.name != PASSIVE or "codes" not in store:
        return None
    return np.asarray(store["codes"]).astype(np.int64)
