"""
SecureBoost and its explanations
================================

A bank and an insurer share customers. The bank has the label and some columns, the insurer has
other columns. **SecureBoost** builds the trees that XGBoost builds on the joined table; gradients
travel under Paillier encryption.
"""

import os
import tempfile

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedapp

folder = tempfile.TemporaryDirectory()
os.environ["FEDAPP_HOME"] = f"{folder.name}/home"  # where each party keeps its part of the model
rng = np.random.default_rng(11)

# %%
# Two tables
# ----------
# The insurer lacks some customers, and its rows are in another order.

N_ROWS = 600
customer = np.array([f"c{number}" for number in range(N_ROWS)])
income, debt = rng.gamma(4, 1000, N_ROWS).round(), rng.gamma(2, 900, N_ROWS).round()
claims, years = rng.poisson(1.2, N_ROWS), rng.integers(0, 25, N_ROWS)
risk = 2 * np.tanh(debt / income - 0.5) + 0.8 * claims - 0.08 * years - 0.6
default = (rng.random(N_ROWS) < 1 / (1 + np.exp(-2 * risk))).astype(int)
bank = pd.DataFrame({"customer": customer, "income": income, "debt": debt, "default": default})
insurer = pd.DataFrame({"customer": customer, "claims": claims, "years": years})
insurer = insurer.sample(550, random_state=1)
tables = {"bank": bank, "insurer": insurer}
insurer.head(3)

# %%
# Align and train
# ---------------
# Customers are matched by private set intersection: no id leaves a party. ``allow_export`` lets the
# parts of the model leave the parties, so that it can be compared with XGBoost's here. Keys have
# 1,024 bits so that this page takes seconds; sites refuse fewer than 2,048, the default.

run = fedapp.run(
    "secureboost",
    data=tables,
    label="default",
    id="customer",
    num_boost_round=5,
    max_depth=3,
    max_bin=32,
    allow_export=True,
    baselines=True,
    secureboost={"key_bits": 1024, "insecure_small_key": True},
    run_dir=f"{folder.name}/run",
)
summary = run.summary
equal, nodes = summary["baselines"]["same_nodes"]
print(f"{sum(summary['matched_rows'].values())} customers in both tables")
print(f"{equal} of {nodes} nodes equal XGBoost's on the joined table")

# %%
# What the insurer adds
# ---------------------

scores = {"SecureBoost": summary["metrics"]["test"]["auc"]}
scores["XGBoost, joined table"] = summary["baselines"]["pooled"]["auc"]
scores["XGBoost, only the bank's columns"] = summary["baselines"]["alone"]["bank"]["auc"]
pd.Series(scores, name="test AUC").round(4).to_frame()

# %%
# Explain rows
# ------------
# As the parties allow the export, the run has the whole model, and SHAP values need no other
# party. A row's values sum to its margin.

joined = bank.merge(insurer, on="customer")
shap = run.explain(joined)
shap.insert(0, "customer", joined["customer"])
shap.head(3).round(3)

# %%
# Three customers with a low, a medium and a high risk. Bars to the right raise the risk.

margins = shap.drop(columns="customer").sum(axis=1).sort_values()
chosen = [margins.index[20], margins.index[len(margins) // 2], margins.index[-20]]
names = ["income", "debt", "claims", "years"]
figure, axes = plt.subplots(1, 3, figsize=(9, 2.4), sharex=True, sharey=True, layout="constrained")
for axis, row in zip(axes, chosen, strict=True):
    column_of = {name.split(".")[-1]: name for name in shap.columns}
    parts = [shap.loc[row, column_of[name]] for name in names]
    labels = [f"{name} = {joined.loc[row, name]:g}" for name in names]
    axis.barh(names, parts, color=["tab:red" if part > 0 else "tab:blue" for part in parts])
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_title(f"{joined.loc[row, 'customer']}: margin {margins[row]:.2f}", fontsize=10)
    axis.spines[["top", "right", "left"]].set_visible(False)
    print(joined.loc[row, "customer"], *labels)
axes[0].invert_yaxis()
axes[1].set_xlabel("SHAP value")

# %%
# Without ``allow_export`` the model stays divided. ``run.explain(tables, ["c1", "c2"])`` then lets
# the parties explain rows together: each party gets what it may see.
