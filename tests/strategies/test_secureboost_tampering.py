"""SecureBoost's ciphertexts: what leaves a passive party is fresh, what is false is refused."""

import itertools
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest

from clients.secureboost import active
from clients.secureboost.passive import Passive
from fedapp.crypto.packing import grouped_layouts
from fedapp.messages.secureboost import EncryptedGradients
from fedapp.trees.queue import Queue
from strategies.vertical import Mailbox
from tests.federated import summary_of
from tests.letters import ciphertexts, letters_sent
from tests.network import run
from tests.tables import made_columns, write_rows
from tests.tampering import refuses, rewrite_all_letters
from tests.transcript import Listener


@pytest.fixture
def made(vertical, tmp_path):
    def make(objective="binary:logistic", **more):
        columns = made_columns(objective, 150)
        columns["f"] = np.random.default_rng(2).permutation(150) / 7  # each row has its own bin
        data = write_rows(tmp_path / "made.csv", columns)
        return vertical(data=str(data), label="y", objective=objective, **more)

    return make


# Fresh ciphertexts


@pytest.mark.parametrize(
    ("objective", "bits", "n_slots"),
    [
        ("binary:logistic", 512, 4),
        pytest.param("multi:softprob", 256, 1, marks=pytest.mark.slow),
    ],
)
def test_no_ciphertext_leaves_a_passive_party_that_came_in_or_has_left_before(
    made, objective, bits, n_slots
):
    app, settings = Listener(), made(objective, max_bin=256, secureboost__key_bits=bits)
    summary = summary_of(run(settings, app=app))
    n_train = summary["matched_rows"]["train"]
    layout = grouped_layouts(bits, n_train, 3 if n_slots == 1 else 1)[0]
    letters = letters_sent(app)
    widths = next(one for one in letters if one.name == "ColumnBins")["widths"]
    came, left = ciphertexts(letters, "EncryptedGradients"), ciphertexts(letters, "EncryptedSums")
    # With one sum a ciphertext, a bin of one row would leave as the very ciphertext that came.
    assert layout.n_slots == n_slots
    assert widths[-1] == n_train
    assert len(left) > len(came) / n_slots > 100 / n_slots
    assert not set(came) & set(left)
    assert len(set(left)) == len(left)
    assert min(int.from_bytes(one, "big") for one in left) > 1


# An active party that asks for more than a round is to tell it, at sites with limits of their own


def without_columns(sender, letters):
    """Gradients as of a round for which none of the receiver's columns is drawn."""
    empty = {"columns": np.empty(0, np.int64), "ciphertexts": np.empty((0, 128), np.uint8)}
    return [
        (name, replace(each, **empty) if isinstance(each, EncryptedGradients) else each)
        for name, each in letters
    ]


@pytest.fixture
def pair(vertical, sites, write_table):
    """Settings of a run of depth 2 over 120 rows, and a passive site with ``min-rows=100``."""

    def make(**more):
        ids = range(120)
        nodes = (
            {"name": "bank", "data": write_table("bank", 120, id=ids), "id": "id"},
            {
                "name": "shop",
                "data": write_table("shop", 120, y=None, id=ids),
                "id": "id",
                "label": "",
                "min-rows": 100,
            },
        )
        held = {"test_fraction": 0.0, "valid_fraction": 0.0, "allow_export": False}
        return vertical(**held, **more), sites(*nodes)

    return make


@pytest.mark.parametrize(("n_drawn", "has_columns"), [(1, True), (99, False)])
def test_a_round_that_draws_fewer_rows_than_a_passive_site_allows_is_refused(
    pair, monkeypatch, n_drawn, has_columns
):
    honest = active.gradients
    monkeypatch.setattr(
        active,
        "gradients",
        lambda *given: honest(*given) * (np.arange(120) < n_drawn)[:, None, None].astype("f4"),
    )
    if not has_columns:
        rewrite_all_letters(monkeypatch, without_columns)
    rule = f"must be at least 100 rows \\(min-rows of shop\\), got {n_drawn}; draw more"
    refuses(f"^bank.*: EncryptedGradients.drawn {rule}", *pair())


def test_a_round_that_draws_enough_rows_is_answered(pair):
    run(*pair(subsample=0.97))


@pytest.fixture
def summed(monkeypatch):
    """Levels of which a passive party has summed nodes."""
    sums, levels = Passive.encrypted_sums, []

    def noted(party):
        levels.append(party.structure.level)
        return sums(party)

    monkeypatch.setattr(Passive, "encrypted_sums", noted)
    return levels


def test_nodes_below_the_last_level_are_not_summed(pair, monkeypatch, summed):
    """The active party grows one level more than the passive one was set up for."""
    honest = Passive.setup

    @wraps(honest)
    def shallow(party, request, mail):
        return honest(party, replace(request, max_depth=request.max_depth - 1), mail)

    monkeypatch.setattr(Passive, "setup", shallow)
    refuses("^bank.*: Splits.columns must be of this party and this level", *pair(max_depth=3))
    assert summed == [0, 1]


def test_more_splits_in_a_level_than_leaves_allow_are_refused(made, monkeypatch, summed):
    """The active party splits every node, whatever the plan's ``max-leaves``."""
    every = Queue.chosen
    monkeypatch.setattr(Queue, "chosen", lambda queue, *tree: every(Queue(), *tree))
    deep = {"objective": "reg:squarederror", "max_depth": 6}
    refuses(
        "^party-1.*: Splits.columns must be of this party and this level",
        made(**deep, max_leaves=6),
    )
    assert summed == [0, 1, 2, 3]  # below, six nodes or more are split


# A server that meddles with parcels


OTHER = {"party-2": "party-3", "party-3": "party-2"}
MEDDLED = {  # what the active party gets for a parcel
    "a bit of the tag": lambda peer, content: (peer, content[:-1] + bytes([content[-1] ^ 1])),
    "almost nothing": lambda peer, content: (peer, content[:5]),
    "under another party's name": lambda peer, content: (OTHER[peer], content),
}


@pytest.mark.parametrize("change", MEDDLED.values(), ids=MEDDLED)
def test_a_parcel_that_the_server_changed_is_refused(made, monkeypatch, change):
    """Once there are sums to carry; tests/site/test_mail.py has what comes twice."""
    honest, n_before = Mailbox.take, itertools.count()

    def take(self, party):
        parcels = honest(self, party)
        if party != "party-1" or next(n_before) < 3 or not parcels:
            return parcels
        return [*parcels[:-1], change(*parcels[-1])]

    monkeypatch.setattr(Mailbox, "take", take)
    rule = "content must be sealed by party-. for party-. in this run|step must be"
    refuses(rf"^party-[23].*: parcel\.({rule})", made(parties=3))
