"""Noised sums that leave a site: how much noise they have, and what they cost."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy.stats import norm

from fedapp.crypto.masking import unmasked_sum
from fedapp.crypto.noise import budget_for
from fedapp.errors import ConfigError
from fedapp.messages.pax_secure import COUNTED_ROWS, PrivateOpenRequest
from tests.crypto.test_masks import Coordinator

BUDGET = budget_for(1.0, 1e-5, n_rounds=50, n_parties=3)
PROMISE = {"epsilon": BUDGET.epsilon, "delta": BUDGET.delta, "multiplier": BUDGET.multiplier}
TABLE, OTHERS = ("a", "b"), 2  # columns that are counted; sums beside the counts
UNITS = 2**22  # of a row


@pytest.fixture
def private(configs):
    """``private(model)``: the sites have answered a private run's opening, and no sum yet."""
    limits = {"run_epsilon": BUDGET.epsilon, "total_epsilon": BUDGET.epsilon}
    sites = {name: replace(config, **limits) for name, config in configs.items()}

    def make(model):
        opens = partial(PrivateOpenRequest, **PROMISE, n_rounds=BUDGET.n_rounds, clip=0.0)
        coordinator = Coordinator(sites, opens=opens, model=model, **PROMISE)
        coordinator.opening = replace(coordinator.opening, n_rows=COUNTED_ROWS)
        return coordinator

    return make


def test_sums_have_noise_of_the_variance_that_the_budget_asks_for(private):
    """No row is in most bins, so the median size of a count is that of the noise."""
    coordinator = private("a" * 16)
    masked = coordinator.masked(coordinator.opening, 3)
    counts = unmasked_sum(masked.values(), OTHERS + len(TABLE) * 256)[OTHERS:]
    deviation = BUDGET.deviation("counts", math.sqrt(len(TABLE)) * UNITS)
    assert 0.7 < np.median(np.abs(counts)) / (norm.ppf(0.75) * deviation) < 1.4


def test_the_first_noised_sum_is_charged_and_none_leaves_beyond_the_budget(private):
    """Two runs were opened before either had a sum, so only the sum itself can be refused."""
    first, second = private("a" * 16), private("b" * 16)
    first.ask(first.opening, 3)
    rule = r"^privacy\.epsilon must come to <= 1 in all runs on one table \(total-epsilon in the no"
    with pytest.raises(ConfigError, match=rule):
        second.ask(second.opening, 3)
    with pytest.raises(ConfigError, match=rule):
        private("c" * 16)
