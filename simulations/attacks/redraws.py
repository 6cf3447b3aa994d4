"""What two runs of a site with ``label-epsilon`` show of a row's label, beyond either of them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from clients.federated_forest.party import EncodedPassive
from fedapp.audit.listening import ListeningApp, Transcript
from fedapp.messages.federated_forest import Labels
from fedapp.runs.local import run_local, site_contexts
from fedapp.settings import load_settings
from fedapp.site.settings import parse_node_config
from simulations.bench.sites import Sites

N_ROWS, N_RARE, N_CHANGED = 3000, 60, 60
RUN: dict[str, Any] = {"strategy": "federated-forest", "parties": 2, "test-fraction": 0.0}
RUN |= {"valid-fraction": 0.0, "federated-forest.trees": 1, "objective": "multi:softprob"}
EVERYONE, NOT_RARE = slice(None), slice(N_RARE, None)


def label_redraws(
    epsilons: tuple[float, ...] = (1.0, 2.0), seed: int = 0
) -> Iterator[dict[str, Any]]:
    """How many labels two runs of a Federated Forest disclose in spite of ``label-epsilon``.

    The label holder has 3,000 rows of classes a and b, 60 of them of class c, and sends its
    randomised labels to a passive party (``federated-forest.labels=encoded``), which matches rows.

    - ``classes``: in the second run the passive party matches no row of class c, as it has rows of
      that kind apart. If the draw follows the classes of the matched rows, a row stays a or b more
      often: one that was drawn a at first and is b then, or the reverse, is certain.
    - ``changed``: the label holder corrects 60 labels between the runs. A row that is drawn in
      another way then is seen to be one of them.

    Yields the rows of which that is certain, and how many of them rightly.
    """
    for epsilon in epsilons:
        for name in ("classes", "changed"):
            with tempfile.TemporaryDirectory() as folder:
                with mock.patch.dict(os.environ, {"FEDAPP_HOME": f"{folder}/home"}):
                    outcome = _two_runs(name, epsilon, seed, folder)
                yield {"runs": name, "epsilon": epsilon, **outcome}


def _two_runs(name: str, epsilon: float, seed: int, folder: str) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    labels = np.where(rng.random(N_ROWS) < 0.3, "b", "a")
    labels[:N_RARE] = "c"
    ids = np.array([f"c{row}" for row in range(N_ROWS)])
    values = rng.normal(size=(2, N_ROWS)).round(3)
    bank = {"id": ids, "income": values[0], "y": labels}
    shop = {"id": ids, "visits": values[1]}
    sites = Sites(Path(folder) / "sites", {"bank": pa.table(bank), "shop": pa.table(shop)}, "y")
    sites.configure("bank", {"label-epsilon": epsilon})
    first, truth = _drawn(sites), labels
    matched = NOT_RARE if name == "classes" else EVERYONE
    if name == "classes":
        sites.write_table("shop", pa.table({of: cells[matched] for of, cells in shop.items()}))
    else:
        changed = rng.permutation(np.arange(N_RARE, N_ROWS))[:N_CHANGED]
        truth = labels.copy()
        truth[changed] = np.where(labels[changed] == "a", "b", "a")
        sites.write_table("bank", pa.table({**bank, "y": truth}))
    second = _drawn(sites)
    # A row that was drawn c at first may have become a or b by the words that it had before.
    certain = [
        row for row, now in second.items() if first[row] != now and "c" not in first[row] + now
    ]
    places = np.array([row.removeprefix("c") for row in certain], int)
    right = truth[places] != labels[places]
    if name == "classes":
        right = truth[places] == np.array([second[row] for row in certain], "U1")
    return {"certain": len(certain), "right": int(right.sum()), "of": len(second)}


def _drawn(sites: Sites) -> dict[str, str]:
    """The label of each row that the passive party receives, by id."""
    received: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []

    def note(transcript: Transcript) -> None:
        for _, letter in transcript.mail.each(Labels):
            party = EncodedPassive.load(transcript.site)
            codes = letter.codes.astype(int)  # in an order of their own: a is the most frequent
            names = np.array(list("abc"))[np.argsort(np.argsort(-np.bincount(codes)))]
            received.append((party.ids[: party.n_train], names[codes]))

    contexts = site_contexts(parse_node_config(str(sites.config(name))) for name in sites.names)
    path = tempfile.mkdtemp(dir=sites.folder)
    settings = load_settings({**RUN, "run-dir": f"{path}/run"})
    run_local(settings, contexts, client_app=ListeningApp([("shop", note)]))
    ((ids, names),) = received
    return dict(zip(ids.tolist(), names.tolist(), strict=True))
