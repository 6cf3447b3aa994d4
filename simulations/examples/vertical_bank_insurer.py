"""A bank and an insurer train one model on the customers that they share."""

# %% [markdown]
# # A bank and an insurer
#
# The bank knows who repaid and how accounts develop. The insurer knows other facts about some of
# the same customers. Neither may share rows. They find their common customers by private set
# intersection and train SecureBoost: the trees that XGBoost would build on the joined table.
#
# **Keys are small here (512 bits), so that this notebook takes seconds.** They protect nothing. The
# default is 2048 bits, and a site refuses less unless its settings allow it.
#
# With `FEDAPP_DATA` set, the rows are those of `default-credit`; otherwise those of scikit-learn's
# `breast-cancer`, whose columns represent those of a bank and an insurer. `NOTEBOOK_OUTPUT` names a
# folder for the pictures, `NOTEBOOK_ROUNDS` the boosting rounds.

# %%
import os
import tempfile
from pathlib import Path

OUTPUT = Path(os.environ.get("NOTEBOOK_OUTPUT") or tempfile.mkdtemp(prefix="fedapp-"))
# Each party keeps its part of the model below this folder, as a real site would.
os.environ.setdefault("FEDAPP_HOME", str(OUTPUT / "home"))

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402

import fedapp  # noqa: E402
from fedapp.data.datasets import load_dataset  # noqa: E402
from fedapp.messages import secureboost  # noqa: E402

ROUNDS = int(os.environ.get("NOTEBOOK_ROUNDS", "8"))
DATA = "default-credit" if os.environ.get("FEDAPP_DATA") else "breast-cancer"
MOST_ROWS = 2000
SMALL_KEY = {"key_bits": 512, "insecure_small_key": True}
SEED = 1

# %% [markdown]
# ## Who has what
#
# Both have a column `customer`. The insurer lacks one customer in ten, has some that the bank
# lacks, and its rows are in another order. Only the bank has the label.

# %%
table = load_dataset(DATA)
assert table.labels is not None
rng = np.random.default_rng(SEED)
rows = rng.permutation(table.n_rows)[:MOST_ROWS]
at_bank, at_insurer = rows[: int(0.95 * len(rows))], rng.permutation(rows[int(0.1 * len(rows)) :])
half = len(table.columns) // 2


def part(row_ids: np.ndarray, columns: slice) -> dict[str, object]:
    """Some columns of some customers."""
    values = table.values[row_ids, columns].T
    names = table.columns[columns]
    return {"customer": [f"c{row}" for row in row_ids], **dict(zip(names, values, strict=True))}


bank = pa.table({**part(at_bank, slice(half)), "default": table.labels[at_bank].astype(int)})
insurer = pa.table(part(at_insurer, slice(half, None)))
for name, frame in {"bank": bank, "insurer": insurer}.items():
    print(f"{name:8} {frame.num_rows} customers, {frame.num_columns - 1} columns")

# %% [markdown]
# ## Align and train
#
# No id leaves a party, not even hashed: each id becomes a point on a curve, blinded with secrets of
# both parties. Then the bank sends encrypted gradients, and the insurer replies with encrypted
# sums.

# %%
run = fedapp.run(
    "secureboost",
    data={"bank": bank, "insurer": insurer},
    label="default",
    id="customer",
    num_boost_round=ROUNDS,
    max_depth=3,
    max_bin=32,
    baselines=True,
    secureboost=SMALL_KEY,
    run_dir=OUTPUT / "run",
)
summary = run.summary
print("rows that both have:", summary["matched_rows"])
print(f"{summary['exchanges']} exchanges, {sum(summary['bytes'].values()) / 1e6:.1f} MB")

# %% [markdown]
# ## What it is worth to the bank
#
# With the same cuts, XGBoost on the joined table builds the same trees. With few bins, as the 32
# here, XGBoost's cuts depend on the order of the rows, which alignment changes: scores may differ
# slightly either way (with `max_bin=256` there is no such difference on tables of this size). The
# difference to the score of only the bank's columns is what the insurer adds.

# %%
lines = {"SecureBoost": summary["metrics"]["test"]["auc"]}
lines["XGBoost, joined table"] = summary["baselines"]["pooled"]["auc"]
for name, scores in summary["baselines"]["alone"].items():
    lines[f"XGBoost, {name}'s columns"] = scores["auc"]
for line, auc in lines.items():
    print(f"{line:24} test AUC {auc:.4f}")

# %% [markdown]
# ## What each learns
#
# The documentation of the messages says who learns what; tests check it. Watch how pure the trees'
# leaves are: whoever sees which rows share a leaf may guess labels from it. With
# `secureboost={"first_trees": 1}` the first tree is built only from the bank's columns, and nobody
# else sees it; later trees reveal nearly as much (`python -m simulations attacks shared_nodes`).

# %%
print((secureboost.__doc__ or "").strip())

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
left.hlines(list(lines), min(lines.values()), list(lines.values()), colors="#dddddd")
left.scatter(list(lines.values()), list(lines), 60, color=["#0072b2", "#56b4e9", "#888888"])
left.invert_yaxis()
left.set_xlabel("test AUC")
for (view, purity), color in zip(
    summary["leaf_purity"].items(), ("#0072b2", "#e69f00", "#009e73"), strict=False
):
    right.plot(np.arange(1, len(purity) + 1), purity, "o-", ms=4, color=color, label=view)
right.set_xlabel("tree")
right.set_ylabel("leaf purity, as seen by")
right.legend(frameon=False)
figure.savefig(OUTPUT / "vertical.png", dpi=120)

# %% [markdown]
# ## Predict together
#
# The model is divided: the bank has the leaf values and its splits, the insurer its splits. There
# are two ways to predict. Interactively, the bank asks the insurer at each of the insurer's splits.
# With Fed-EINI it sends encrypted leaves, the insurer keeps those that its columns leave open, and
# the bank decrypts a sum: it does not learn which way a customer went at the insurer's splits.
#
# Fed-EINI refuses rows with so few paths through the trees that the sum would reveal the path. A
# few small trees, as here, allow few paths; `unguarded` disables this check, which is for trials.

# %%
both = np.intersect1d(at_bank, at_insurer)[:40]
new = {
    "bank": bank.filter(pa.array(np.isin(at_bank, both))).drop_columns("default"),
    "insurer": insurer.filter(pa.array(np.isin(at_insurer, both))),
}
asked = run.predict_proba(new, id="customer")[:, 1]
sealed = run.predict_proba(
    new, id="customer", inference="eini", eini={**SMALL_KEY, "unguarded": True}
)[:, 1]
print("interactive:", asked[:4].round(4))
print("Fed-EINI:   ", sealed[:4].round(4))
print("largest difference:", np.abs(asked - sealed).max())

figure, axis = plt.subplots(figsize=(3.6, 3.4), layout="constrained")
axis.plot([0, 1], [0, 1], color="#aaaaaa", lw=1)
axis.scatter(asked, sealed, 14, color="#0072b2")
axis.set_xlabel("asked split by split")
axis.set_ylabel("encrypted (Fed-EINI)")
figure.savefig(OUTPUT / "predictions.png", dpi=120)
print("pictures:", *sorted(path.name for path in OUTPUT.glob("*.png")))
