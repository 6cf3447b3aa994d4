"""
A strategy in your own ServerApp
================================

Every method is a Flower strategy. Here PAX runs in a ServerApp and a ClientApp that this page
writes, with tables that the ClientApp makes. The same two apps run under ``flwr run``: see the
folder ``simulations/examples/pax``.
"""

import tempfile

import matplotlib.pyplot as plt
import pandas as pd
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_breast_cancer

from fedapp.client_app import SiteApp
from fedapp.runs.local import LocalGrid
from fedapp.strategies import PAX

folder = tempfile.TemporaryDirectory()
data = load_breast_cancer(as_frame=True).frame
N_PARTIES = 3

# %%
# The ClientApp
# -------------
# ``table`` returns the rows of one party. It is called with the party's number and the number of
# parties, as Flower's simulation gives them to each node.


def patients(hospital: int, n_hospitals: int) -> pd.DataFrame:
    """Rows of one hospital: every ``n_hospitals``-th."""
    return data.iloc[hospital::n_hospitals]


client = SiteApp(table=patients, label="target")

# %%
# The ServerApp
# -------------
# Arguments are settings with underscores; those of the method's section come without it: ``bins``
# is ``pax.bins``. ``start`` returns Flower's ``Result``: the model's bytes and the scores of each
# round.

server = ServerApp()
results = []


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and keep the result."""
    strategy = PAX(num_boost_round=context.run_config["rounds"], eta=0.3, bins="equal")
    results.append(strategy.start(grid, initial_arrays=ArrayRecord()))


# %%
# Run both
# --------
# ``LocalGrid`` is a Flower grid in this process: a thread for each party.

contexts = [
    Context(0, number + 2, {"partition-id": number, "num-partitions": N_PARTIES}, RecordDict(), {})
    for number in range(N_PARTIES)
]
grid = LocalGrid(contexts, client)
try:
    server(grid, Context(0, 0, {}, RecordDict(), {"rounds": 20}))
finally:
    grid.close()

(result,) = results
scores = pd.DataFrame([dict(each) for each in result.evaluate_metrics_clientapp.values()])
scores.tail(3)

# %%
# Scores of each round
# --------------------

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for name in ("train_logloss", "valid_logloss"):
    if name in scores:
        line = scores[name].dropna()
        axis.plot(line.index, line, label=name.replace("_logloss", " rows"))
axis.set_xlabel("round")
axis.set_ylabel("log loss")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)

# %%
# The model
# ---------

model = result.arrays["model"].numpy().tobytes()
print(f"{len(model):,} bytes of model.json")
