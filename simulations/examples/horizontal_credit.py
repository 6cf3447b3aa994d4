"""Three lenders train one model without pooling their rows."""

# %% [markdown]
# # Three lenders, one model
#
# Three lenders record the same columns about different customers. They train PAX, a boosted model
# that grows from sums of gradients, and compare it with two others: XGBoost on all rows in one
# place, which is not allowed, and XGBoost on each lender's rows, which is what they can do today.
#
# With `FEDAPP_DATA` set, the table is `default-credit` (card holders; 1 is default next month).
# Otherwise it is scikit-learn's `breast-cancer`, which is always available: other columns, same
# code. `NOTEBOOK_OUTPUT` names a folder for the pictures, `NOTEBOOK_ROUNDS` the boosting rounds.

# %%
import os
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pyarrow as pa

import fedapp
from fedapp.data.datasets import load_dataset

OUTPUT = Path(os.environ.get("NOTEBOOK_OUTPUT") or tempfile.mkdtemp(prefix="fedapp-"))
ROUNDS = int(os.environ.get("NOTEBOOK_ROUNDS", "25"))
DATA = "default-credit" if os.environ.get("FEDAPP_DATA") else "breast-cancer"
MOST_ROWS = 6000
SHARES = {"north": 0.6, "west": 0.3, "south": 0.1}
SEED = 1

# %% [markdown]
# ## Who has which rows
#
# A large lender, a medium one and a small one. Each has a data frame; pandas and polars frames
# work as well.

# %%
table = load_dataset(DATA)
assert table.labels is not None
order = np.random.default_rng(SEED).permutation(table.n_rows)[:MOST_ROWS]
cuts = np.round(np.cumsum(list(SHARES.values()))[:-1] * len(order)).astype(int)
frames = {}
for name, rows in zip(SHARES, np.split(order, cuts), strict=True):
    columns = dict(zip(table.columns, table.values[rows].T, strict=True))
    frames[name] = pa.table({**columns, "default": table.labels[rows].astype(int)})
for name, frame in frames.items():
    share = np.mean(frame["default"].to_numpy())
    print(f"{name:6} {frame.num_rows:5} rows, {share:.1%} of label 1")

# %% [markdown]
# ## Train
#
# The parties run in this process; the messages are those of a deployment. `baselines=True` also
# trains the models to compare with, and scores all of them on the same test rows.

# %%
settings: dict[str, Any] = {"label": "default", "num_boost_round": ROUNDS, "max_depth": 4}
settings["eta"] = 0.15
together = fedapp.run("pax", data=frames, baselines=True, run_dir=OUTPUT / "together", **settings)
alone = {
    name: fedapp.run("pax", data={name: frame}, run_dir=OUTPUT / name, **settings)
    for name, frame in frames.items()
}
summary = together.summary
print(f"{summary['exchanges']} exchanges, {sum(summary['bytes'].values()) / 1e6:.1f} MB")

# %% [markdown]
# ## What it is worth
#
# Every score is on the test rows of all parties. With few rows the order may change with the seed:
# `fedapp run pax --folds 5` shows how much.

# %%
lines = {"PAX, together": summary["metrics"]["test"]["auc"]}
lines["XGBoost, pooled"] = summary["baselines"]["pooled"]["auc"]
for name, scores in summary["baselines"]["alone"].items():
    lines[f"XGBoost, {name} alone"] = scores["auc"]
for line, auc in lines.items():
    print(f"{line:22} test AUC {auc:.4f}")

figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
colors = ["#0072b2", "#56b4e9", *["#888888"] * len(frames)]
axis.hlines(list(lines), min(lines.values()), list(lines.values()), colors="#dddddd")
axis.scatter(list(lines.values()), list(lines), 60, color=colors)
axis.invert_yaxis()
axis.set_xlabel("test AUC")
figure.savefig(OUTPUT / "scores.png", dpi=120)

# %% [markdown]
# ## Round by round
#
# PAX is scored on the validation rows of all lenders, a single lender on its own few: look at where
# a curve turns up, not at which is lowest. `run.rounds` is a pandas DataFrame if pandas is
# installed, else a list of records.


# %%
def curve(run: fedapp.Run, score: str) -> list[float]:
    """A score after each round."""
    rounds = run.rounds
    return [record[score] for record in rounds] if isinstance(rounds, list) else list(rounds[score])


figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
rounds = np.arange(1, ROUNDS + 1)
axis.plot(rounds, curve(together, "valid_logloss"), color="#0072b2", label="PAX, together")
axis.plot(rounds, curve(together, "train_logloss"), ":", color="#0072b2", label="its training rows")
for (name, run), color in zip(alone.items(), ("#e69f00", "#009e73", "#cc79a7"), strict=True):
    axis.plot(rounds, curve(run, "valid_logloss"), color=color, label=f"{name} alone")
axis.set_xlabel("round")
axis.set_ylabel("log loss on validation rows")
axis.legend(frameon=False)
figure.savefig(OUTPUT / "rounds.png", dpi=120)

# %% [markdown]
# ## Which columns matter, and whether the probabilities are calibrated
#
# Importance is the total gain of all splits on a column. In the calibration plot a point is a group
# of test rows with similar predictions; on the diagonal, the share of label 1 is as predicted.

# %%
gains = dict(sorted(summary["importance"]["total_gain"].items(), key=lambda item: -item[1])[:10])
calibration = summary["curves"]["calibration"]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
left.barh(list(gains), list(gains.values()), color="#0072b2")
left.invert_yaxis()
left.set_xlabel("total gain")
right.plot([0, 1], [0, 1], color="#aaaaaa", lw=1)
sizes = np.array(calibration["rows"], float)
right.plot(calibration["predicted"], calibration["observed"], color="#0072b2", lw=1)
right.scatter(
    calibration["predicted"],
    calibration["observed"],
    8 + 150 * sizes / sizes.max(),
    color="#0072b2",
)
right.set_xlabel("predicted probability")
right.set_ylabel("share of label 1")
figure.savefig(OUTPUT / "model.png", dpi=120)

# %% [markdown]
# ## Use it
#
# The model is an XGBoost model: stock XGBoost loads it, and `explain` computes its SHAP values. The
# report is one self-contained HTML page.
#
# Here PAX sends the coordinator the sums of each lender, from which rows can be rebuilt; with
# `pax={"aggregation": "secure"}` the coordinator sees only sums over all lenders. Read
# `docs/explanation/threat-model.md` before you use either on real rows.

# %%
new = frames["south"].drop_columns("default")
print("probabilities:", together.predict_proba(new)[:3, 1].round(3))
print("SHAP values:", together.explain(new).shape)
print("trees in XGBoost:", together.to_xgboost().num_boosted_rounds())
print("report:", together.report())
print("pictures:", *sorted(path.name for path in OUTPUT.glob("*.png")))
