"""
Categories that some parties have never seen
============================================

Text columns are features as they are: the parties agree on the names of all categories, and the
trees split on them as XGBoost does. Here three car dealers predict prices. Only one of them sells
pick-ups, and only one sells electric cars.
"""

import tempfile
import warnings

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import fedapp

folder = tempfile.TemporaryDirectory()
rng = np.random.default_rng(3)

# %%
# Three dealers
# -------------

PRICES = {"small": 9, "estate": 17, "van": 22, "pick-up": 31, "electric": 38}
SOLD = {
    "city": ["small", "estate", "electric"],
    "coast": ["small", "estate", "van"],
    "farm": ["small", "estate", "van", "pick-up"],
}


def cars(kinds: list[str], n_rows: int) -> pd.DataFrame:
    """Cars of these kinds; the price falls with the age."""
    kind, age = rng.choice(kinds, n_rows), rng.uniform(0, 12, n_rows)
    fuel = np.where(kind == "electric", "none", rng.choice(["petrol", "diesel"], n_rows))
    price = np.array([PRICES[each] for each in kind]) * np.exp(-age / 9)
    price = price + 1.5 * (fuel == "diesel") + rng.normal(0, 0.8, n_rows)
    return pd.DataFrame({"kind": kind, "fuel": fuel, "age": age, "price": price})


tables = {name: cars(kinds, 700) for name, kinds in SOLD.items()}
counts = {name: table["kind"].value_counts() for name, table in tables.items()}
pd.DataFrame(counts).reindex(list(PRICES)).fillna(0).astype(int)

# %%
# Train together, and each dealer on its rows
# -------------------------------------------
# One party alone trains the model of XGBoost.

settings = {"label": "price", "num_boost_round": 25, "eta": 0.3, "max_depth": 4}
models = {"PAX": fedapp.run("pax", data=tables, run_dir=f"{folder.name}/pax", **settings)}
for name, table in tables.items():
    models[f"local: {name}"] = fedapp.run(
        "pax", data={name: table}, run_dir=f"{folder.name}/{name}", **settings
    )

# %%
# Score new cars, by kind
# -----------------------
# ``predict`` takes a table with text as it is. A category that the model has never seen counts as
# missing, with a warning: the local model of a dealer that never sold an electric car predicts some
# other car's price.

warnings.filterwarnings("ignore", message=".*are no category of the model")
new = cars(list(PRICES), 3000)


def error(model: fedapp.Run, kind: str) -> float:
    """Root mean squared error on the new cars of a kind."""
    rows = new[new["kind"] == kind]
    return float(np.sqrt(np.mean((model.predict(rows) - rows["price"]) ** 2)))


errors = pd.DataFrame(
    {name: [error(model, kind) for kind in PRICES] for name, model in models.items()},
    index=list(PRICES),
)
errors.round(2)

# %%
# One model knows all kinds, though no dealer sells them all.

figure, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
for (name, column), marker in zip(errors.items(), "o^sD", strict=True):
    color = "tab:blue" if name == "PAX" else "gray"
    axis.plot(column, list(PRICES), marker, color=color, label=name, alpha=0.9)
axis.set_xlabel("root mean squared error (thousands)")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %%
# What others learn
# -----------------
# The names of categories are shared: the coordinator and all parties learn that some dealer sells
# pick-ups. Sites that may not disclose names agree on a schema beforehand. ``encode`` gives the
# rows that stock XGBoost takes, with all categories that the model has.

rows = models["PAX"].encode(new.head(3))
print(list(rows["kind"].cat.categories))
rows
