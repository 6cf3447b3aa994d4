"""
Federated Forest and encrypted prediction
=========================================

A clinic has labels and some columns of its patients, a laboratory has other columns. They grow a
random forest together. Its model stays divided: each party keeps its part. Then they predict in
three ways that give the same probabilities, and differ in who learns what.

**Keys have 512 bits here, so that this page takes seconds. They protect nothing.** The default is
2,048 bits, and a site refuses fewer.
"""

import os
import tempfile
import time

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer

import fedapp

folder = tempfile.TemporaryDirectory()
os.environ["FEDAPP_HOME"] = f"{folder.name}/home"  # where each party keeps its part of the model

# %%
# Two tables
# ----------

data = load_breast_cancer(as_frame=True)
patients = data.data.assign(patient=[f"p{number}" for number in range(len(data.data))])
first = list(data.feature_names[:15])
clinic = patients[["patient", *first]].assign(benign=data.target)
laboratory = patients.drop(columns=first)
new = slice(549, 569)  # patients whom nobody trains on
tables = {"clinic": clinic[:549], "laboratory": laboratory[:549]}
print({name: table.shape for name, table in tables.items()})

# %%
# Grow the forest
# ---------------
# ``align="ordered"`` says that both tables have the same patients in the same order, which the
# parties check by a digest. By default they match ids by private set intersection.

run = fedapp.run(
    "federated-forest",
    data=tables,
    label="benign",
    id="patient",
    align="ordered",
    federated_forest={"trees": 8, "max_depth": 3},
    run_dir=f"{folder.name}/run",
)
summary = run.summary
print(f"test AUC {summary['metrics']['test']['auc']:.4f}, {summary['exchanges']} exchanges")

# %%
# Predict in three ways
# ---------------------
# *Interactive*: the clinic asks the laboratory at each of its splits. *One-round*: the laboratory
# sends which leaves its splits leave open. *Fed-EINI*: the clinic sends encrypted leaves, and
# decrypts their sum.

rows = {"clinic": clinic[new].drop(columns="benign"), "laboratory": laboratory[new]}
demo = {"key_bits": 512, "insecure_small_key": True, "unguarded": True}
learns = {
    "interactive": "which way rows go at the laboratory's splits",
    "one-round": "which leaves the laboratory leaves open",
    "eini": "the sum of leaves",
}
found, seconds = {}, {}
for way in learns:
    start = time.perf_counter()
    more = {"eini": demo} if way == "eini" else {}
    found[way] = run.predict_proba(rows, id="patient", inference=way, **more)[:, 1]
    seconds[way] = time.perf_counter() - start

largest = {way: np.abs(found[way] - found["interactive"]).max() for way in learns}
pd.DataFrame({"largest difference": largest, "what the clinic learns": learns})

# %%
# The predictions are equal up to rounding.

figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
axes[0].plot([0, 1], [0, 1], color="lightgray", linewidth=1)
axes[0].scatter(found["interactive"], found["eini"], 18)
axes[0].set_xlabel("interactive")
axes[0].set_ylabel("Fed-EINI")
axes[0].set_title("probability of benign", fontsize=10)
axes[1].barh(list(seconds), list(seconds.values()), color="gray")
axes[1].invert_yaxis()
axes[1].set_xlabel(f"seconds for {len(found['eini'])} rows, all parties in this process")
for axis in axes:
    axis.spines[["top", "right"]].set_visible(False)

# %%
# By default Fed-EINI refuses rows that could take few paths through the trees, as the sum would
# show the path. Eight small trees allow few paths, so this demo disables the check by
# ``unguarded``.
#
# Fed-EINI needs one encryption for each row and leaf: it is for few rows, or for sites that are far
# apart.
