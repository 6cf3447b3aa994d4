"""
PAX beside pooled XGBoost
=========================

Three lenders record the same columns about different customers. They train **PAX**, which grows
one boosted model from sums of gradients, and compare it with two others:

* *pooled*: XGBoost on all rows in one place, which the lenders may not do;
* *local*: XGBoost on the rows of one lender, which each can do today.
"""

import tempfile

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedapp

folder = tempfile.TemporaryDirectory()

# %%
# Three tables
# ------------
# A large lender, a medium one and a small one. The data is made here, so that we know what there
# is to learn: the risk of a default depends on how income, debt and age act together.

rng = np.random.default_rng(7)


def loans(n_rows: int) -> pd.DataFrame:
    """Loans of one lender."""
    income, debt = rng.gamma(4, 1000, n_rows), rng.gamma(2, 800, n_rows)
    age, late = rng.uniform(18, 75, n_rows), rng.poisson(0.8, n_rows)
    risk = 2 * np.tanh(debt / income - 0.6) + 0.7 * late * (age < 40) + np.sin(age / 8) - 1.2
    default = rng.random(n_rows) < 1 / (1 + np.exp(-1.5 * risk))
    columns = {"income": income, "debt": debt, "age": age, "late": late}
    return pd.DataFrame(columns | {"default": default.astype(int)})


tables = {"north": loans(2400), "west": loans(900), "south": loans(300)}
for name, table in tables.items():
    print(f"{name:6} {len(table):5} rows, {table['default'].mean():.0%} defaults")

# %%
# Train
# -----
# The parties run in this process; they send the messages that they would send from three sites.
# ``baselines=True`` also trains the pooled and the local models, and scores all models on the same
# test rows.

run = fedapp.run(
    "pax",
    data=tables,
    label="default",
    num_boost_round=40,
    max_depth=4,
    baselines=True,
    run_dir=f"{folder.name}/run",
)
summary = run.summary
scores = {"PAX": summary["metrics"]["test"]["auc"], "pooled": summary["baselines"]["pooled"]["auc"]}
scores |= {f"local: {name}": each["auc"] for name, each in summary["baselines"]["alone"].items()}
pd.Series(scores, name="test AUC").round(4).to_frame()

# %%
# PAX scores like pooled XGBoost. What a lender gains is the distance from its local model: little
# for the large lender, much for the small one.

figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
colors = ["tab:blue", "tab:cyan", "gray", "gray", "gray"]
axis.hlines(list(scores), min(scores.values()), list(scores.values()), colors="lightgray")
axis.scatter(list(scores.values()), list(scores), 60, color=colors)
axis.invert_yaxis()
axis.set_xlabel("test AUC")
axis.spines[["top", "right"]].set_visible(False)

# %%
# What it cost
# ------------
# An *exchange* is one request to the parties and their replies. Between sites each takes 0.2 to 1
# second, so the number of exchanges decides how long a run takes.

sent = sum(summary["bytes"].values()) / 1e6
print(f"{summary['trees']} trees, {summary['exchanges']} exchanges, {sent:.1f} MB")

# %%
# The model is an XGBoost model.

booster = run.to_xgboost()
print(type(booster), booster.num_boosted_rounds(), "trees")
