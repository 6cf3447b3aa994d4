"""
Masks and epsilon: what the coordinator sees
============================================

Plain PAX sends the coordinator sums of each party, and from these it can rebuild rows. With
``pax.aggregation=secure`` it sees only sums over all parties. With ``privacy.epsilon`` these sums
also have noise, so that no single row decides what it sees. This page shows the first two, and
what the third costs in score.
"""

import tempfile

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from flwr.app import ArrayRecord, Context, RecordDict

import fedapp
from fedapp.client_app import SiteApp
from fedapp.messages.wire import from_records
from fedapp.runs.local import LocalGrid
from fedapp.strategies import PAX

folder = tempfile.TemporaryDirectory()
rng = np.random.default_rng(5)

# %%
# Three clinics
# -------------

N_ROWS = 15_000
values = pd.DataFrame(
    rng.normal(size=(N_ROWS, 5)), columns=["age", "bmi", "sugar", "dose", "pulse"]
)
risk = values["age"] + np.sin(2 * values["bmi"]) + (values["sugar"] > 0.5) - 0.5 * values["dose"]
table = values.assign(ill=(rng.random(N_ROWS) < 1 / (1 + np.exp(-2 * risk))).astype(int))
parts = np.array_split(np.arange(N_ROWS), 3)

# %%
# Read what a clinic sends
# ------------------------
# A Flower *mod* runs around each message of a party. This one keeps the replies.

replies = {}


def keep(message, context, call_next):
    """Keep a clinic's reply to each kind of message."""
    reply = call_next(message, context)
    kind, clinic = message.metadata.message_type, context.node_config["partition-id"]
    replies.setdefault((kind, clinic), from_records(reply.content, "clinic")[1].arrays)
    return reply


clinics = SiteApp(table=lambda number, _: table.iloc[parts[number]], label="ill", mods=[keep])


def train(strategy: PAX) -> None:
    """Train in this process, with a thread for each clinic."""
    contexts = [
        Context(0, number + 2, {"partition-id": number, "num-partitions": 3}, RecordDict(), {})
        for number in range(3)
    ]
    grid = LocalGrid(contexts, clinics)
    try:
        strategy.start(grid, initial_arrays=ArrayRecord())
    finally:
        grid.close()


for aggregation in ("plain", "secure"):
    replies.clear()
    train(PAX(num_boost_round=1, max_depth=2, aggregation=aggregation))
    steps = ("train.pax_grow",)
    grown = [arrays for (kind, _), arrays in sorted(replies.items()) if kind in steps]
    print(f"{aggregation}: what two clinics send of the first tree")
    for arrays in grown[:2]:
        name = "masked" if "masked" in arrays else "histograms"
        print(f"  {name:10}", *arrays[name].ravel()[:6].round(2))

# %%
# Plain sums are gradients and hessians of the rows in each bin. Masked sums look random to the
# coordinator: the masks cancel only when the sums of all clinics are added.
#
# The score for an epsilon
# ------------------------
# The smaller epsilon, the more noise. Private trees are drawn without looking at rows, and the
# budget is spent on their leaves and on the cuts. *Masks* is the same data without noise.

settings = {"label": "ill", "parties": 3, "max_depth": 4, "eta": 0.2, "num_boost_round": 50}
settings |= {"early_stopping_rounds": 0, "pax": {"aggregation": "secure"}}
scores = {}
for epsilon in (0, 1, 2, 4, 8):
    run = fedapp.run(
        "pax",
        data=table,
        privacy={"epsilon": epsilon},
        run_dir=f"{folder.name}/{epsilon}",
        **settings,
    )
    scores[epsilon or "masks"] = run.summary["metrics"]["test"]["auc"]
pd.Series(scores, name="test AUC").rename_axis("epsilon").round(4).to_frame()

# %%
# The scores of the private runs have noise as well: they are disclosed once, at the end.

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
epsilons = [each for each in scores if each != "masks"]
axis.plot(epsilons, [scores[each] for each in epsilons], "o-", label="with noise")
axis.axhline(scores["masks"], color="gray", linestyle="--", label="masks only")
axis.set_xscale("log", base=2)
axis.set_xticks(epsilons, [str(each) for each in epsilons])
axis.set_xlabel("epsilon (smaller: more private)")
axis.set_ylabel("test AUC")
axis.legend(frameon=False)
axis.spines[["top", "right"]].set_visible(False)
