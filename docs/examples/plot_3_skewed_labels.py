"""
Labels that are skewed among parties
====================================

Five hospitals look for a disease. Rows are dealt out in two ways: at random, and so that most sick
patients are at two of the hospitals. Some methods suffer from the second; PAX under masks trains
the same model both times.
"""

import tempfile

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.datasets import make_classification

import fedapp

folder = tempfile.TemporaryDirectory()

# %%
# One table, dealt out twice
# --------------------------
# The test rows are the same 2,000 for all models; no party has them.

values, sick = make_classification(
    3500, 12, n_informative=8, n_redundant=2, class_sep=0.7, flip_y=0.08, random_state=4
)
columns = [f"x{each}" for each in range(12)]
table = pd.DataFrame(values, columns=columns).assign(sick=sick)
test, rest = table[:2000], table[2000:]

SHARES = {  # of the healthy and of the sick patients, to each hospital
    "alike": ([0.2] * 5, [0.2] * 5),
    "skewed": ([0.01, 0.01, 0.28, 0.3, 0.4], [0.45, 0.5, 0.02, 0.02, 0.01]),
}
rng = np.random.default_rng(0)
parties = {}
for split, shares in SHARES.items():
    numbers = np.empty(len(rest), int)
    for label, share in enumerate(shares):
        rows = np.flatnonzero(rest["sick"] == label)
        numbers[rows] = rng.choice(5, len(rows), p=share)
    parties[split] = [rest[numbers == number] for number in range(5)]
for split, tables in parties.items():
    print(
        f"sick, {split:6}", *(f"{each['sick'].sum()} of {len(each)}" for each in tables), sep="   "
    )

# %%
# Three methods on both
# ---------------------
# FedXGBllr gets fewer trees and epochs than by default, so that this page takes seconds.

boosting = {"num_boost_round": 12, "max_depth": 3, "early_stopping_rounds": 0}
boosting |= {"valid_fraction": 0}  # all rows train, whoever has them
network = {"trees": 30, "max_depth": 3, "rounds": 3, "epochs": 3}
METHODS = {
    "PAX": ("pax", boosting),
    "PAX under masks": ("pax", boosting | {"pax": {"aggregation": "secure"}}),
    "FedXGBllr": ("fedxgbllr", {"fedxgbllr": network}),
}


def auc(labels: pd.Series, scores: np.ndarray) -> float:
    """Share of pairs of a sick and a healthy patient that are in the right order."""
    ranks = pd.Series(scores).rank().to_numpy()
    n_sick = labels.sum()
    below = ranks[labels == 1].sum() - n_sick * (n_sick + 1) / 2
    return float(below / n_sick / (len(labels) - n_sick))


results = pd.DataFrame(index=list(METHODS), columns=list(SHARES), dtype=float)
for split, tables in parties.items():
    for name, (method, settings) in METHODS.items():
        place = f"{folder.name}/{split}-{name.replace(' ', '-')}"
        run = fedapp.run(
            method, data=tables, label="sick", test_fraction=0, run_dir=place, **settings
        )
        scores = run.predict_proba(test.drop(columns="sick"))[:, 1]
        results.loc[name, split] = auc(test["sick"], scores)
results.round(4)

# %%
# FedXGBllr weighs trees that each learned from one class, as bagging averages them. Plain PAX sums
# gradients, but takes its cuts from each party's bins. Under masks the cuts are the quantiles of
# all rows, so the split of the rows changes nothing.

figure, axis = plt.subplots(figsize=(7, 2.2), layout="constrained")
axis.hlines(results.index, results.min(axis=1), results.max(axis=1), colors="lightgray")
axis.scatter(results["alike"], results.index, 60, color="tab:blue", label="alike", zorder=2)
axis.scatter(results["skewed"], results.index, 40, color="tab:orange", label="skewed", zorder=3)
axis.invert_yaxis()
axis.set_xlabel("AUC of 2,000 test rows")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %%
# If you cannot know how rows differ between parties, train with ``pax.aggregation=secure``. The
# price is bytes, and time that grows with the square of the number of parties.
