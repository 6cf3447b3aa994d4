"""
Censored times
==============

Three hospitals follow patients after a diagnosis. Some die, which is an *event*; others are alive
when the follow-up ends, so that their time is *censored*. **PAX** trains an accelerated failure
time model of both, which is XGBoost's ``survival:aft``, and predicts times.
"""

import tempfile

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedapp

folder = tempfile.TemporaryDirectory()

# %%
# The hazard is made here: it doubles with each stage and falls to a third under treatment. A
# hospital that began later follows its patients for fewer years.

rng = np.random.default_rng(3)


def patients(n_rows: int, follow_up: float) -> pd.DataFrame:
    """Patients of one hospital."""
    stage, treated = rng.integers(1, 5, n_rows), rng.integers(0, 2, n_rows)
    arms, others = np.where(treated == 1, 1 / 3, 1), np.exp(rng.normal(0, 0.3, n_rows))
    years = rng.exponential(10 / (2.0**stage * arms * others))
    columns = {"stage": stage, "treated": treated, "age": rng.integers(40, 85, n_rows)}
    seen = {"years": np.minimum(years, follow_up), "died": (years < follow_up).astype(int)}
    return pd.DataFrame(columns | seen)


tables = {"north": patients(900, 5), "west": patients(600, 3), "south": patients(300, 2)}

# %%
# ``event`` names the column that says which times are those of events. The *c-index* is the share
# of pairs of patients whose order the model predicts: 0.5 is by chance. Parties add up counts of
# rows by time and prediction, so it is Harrell's within a bound that the report prints.

options = {"label": "years", "event": "died", "objective": "survival:aft", "max_depth": 3}
how = {"aft_loss_distribution": "extreme", "num_boost_round": 60}
run = fedapp.run("pax", data=tables, **options, **how, run_dir=f"{folder.name}/run")
print({name: round(score, 3) for name, score in run.summary["metrics"]["test"].items()})

# %%
# A predicted time for each stage, with and without treatment.

grid = pd.DataFrame({"stage": [1, 2, 3, 4] * 2, "treated": [0] * 4 + [1] * 4, "age": 60})
years = np.asarray(run.predict(grid)).reshape(2, 4)
plt.figure(figsize=(5, 3))
for label, line in zip(("untreated", "treated"), years, strict=True):
    plt.plot([1, 2, 3, 4], line, marker="o", label=label)
plt.xlabel("stage")
plt.ylabel("predicted years")
_ = plt.legend()
