"""
Tune with Optuna, log in MLflow
===============================

``fedapp.tune`` searches for settings by the score of the validation rows, runs the best ones once
more, and only that run scores the test rows. ``log="mlflow"`` logs a run in MLflow. Both need
extras: ``pip install 'fedapp[tune,log]'``.
"""

import logging
import os
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt

import fedapp

folder = tempfile.TemporaryDirectory()

# %%
# Search
# ------
# The method has a default space, to which ``space`` adds: ``log:LOW:HIGH``, ``uniform:LOW:HIGH``,
# ``int:LOW:HIGH`` or a list of values. Settings that you give are not searched.

tuned = fedapp.tune(
    "pax",
    data="wine",
    search="optuna",
    runs=6,
    space={"eta": "log:0.03:0.5", "max_depth": "int:1:4"},
    num_boost_round=15,
    subsample=1.0,
    colsample_bytree=1.0,
    min_child_weight=1.0,
    reg_lambda=1.0,
    gamma=0.0,
    output=f"{folder.name}/search",
)
tuned.trials[["trial", "valid", "eta", "max-depth", "exchanges"]].round(4)

# %%
# Each point is a trial.

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
trials = tuned.trials
points = axis.scatter(trials["eta"], trials["valid"], 60, c=trials["max-depth"], cmap="viridis")
axis.set_xscale("log")
axis.set_xlabel("eta")
axis.set_ylabel("validation loss")
figure.colorbar(points, label="max-depth", ticks=[1, 2, 3, 4])
axis.spines[["top", "right"]].set_visible(False)

# %%
# The run with the best settings
# ------------------------------

print({name: tuned.best[name] for name in ("eta", "max-depth")})
print({name: round(score, 4) for name, score in tuned.run.summary["metrics"]["test"].items()})

# %%
# Log it in MLflow
# ----------------
# Where MLflow writes is MLflow's setting; here it is a folder that is deleted afterwards.

import mlflow

os.environ["MLFLOW_TRACKING_URI"] = Path(folder.name, "mlruns").as_uri()
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
logging.getLogger("mlflow").setLevel(logging.ERROR)

best = {name: tuned.best[name] for name in ("eta", "max-depth")}
run = fedapp.run(
    "pax",
    data="wine",
    num_boost_round=15,
    log="mlflow",
    run_dir=f"{folder.name}/logged",
    **{name.replace("-", "_"): value for name, value in best.items()},
)

# %%
# MLflow has the settings as parameters, the scores of each round and of the end, and the model.

logged = mlflow.search_runs(search_all_experiments=True).iloc[0]
shown = ("params.eta", "params.max-depth", "tags.fedapp", "metrics.final/test")
logged[logged.index.str.startswith(shown)].to_frame("logged")
