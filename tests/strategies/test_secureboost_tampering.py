"""SecureBoost's ciphertexts: what leaves is fresh, what is false is refused, also in blocks."""

import itertools
from dataclasses import replace
from functools import wraps

import numpy as np
import pytest

from clients.secureboost import model as boosted_model
from clients.secureboost.active import Active
from clients.secureboost.passive import Passive
from clients.vertical.ciphertexts import Cipher
from fedapp.crypto.packing import grouped_layouts
from fedapp.messages import secureboost as messages
from fedapp.messages import vertical
from fedapp.messages.secureboost import EncryptedGradients
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.trees.grow import Queue
from strategies.vertical import Mailbox
from tests.contract.methods import METHODS
from tests.federated import model_bytes, summary_of
from tests.letters import ciphertexts, letters_sent
from tests.network import die, fails_from, resumed, run
from tests.tables import made_columns, write_rows
from tests.tampering import FALSE, keep_letters_back, refuses, rewrite_all_letters
from tests.transcript import Listener, check_declared, check_no_rows


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
    honest = boosted_model.gradients
    monkeypatch.setattr(
        boosted_model,
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

    def noted(party, *wanted):
        levels.append(party.trees.structure.level)
        return sums(party, *wanted)

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


# Gradients that fill more than one message


KEY_BITS = 256
CIPHERTEXT_BYTES = KEY_BITS // 4
BLOCK_ROWS = 41  # of a single receiver; does not divide the rows
TRAIN = "train.secureboost_"


@pytest.fixture
def small_blocks(monkeypatch):
    """Messages that carry few ciphertexts."""
    monkeypatch.setattr(vertical, "BLOCK_BYTES", BLOCK_ROWS * CIPHERTEXT_BYTES)


@pytest.fixture
def in_blocks(made):
    usual = {"secureboost__key_bits": KEY_BITS, "max_bin": 8}
    return lambda objective="binary:logistic", **more: made(objective, **{**usual, **more})


def steps_of(folder, kind):
    """Exchanges of a run in which somebody is asked this."""
    lines = folder.ledger
    return sorted({line["step"] for line in lines if line["type"] == TRAIN + kind})


@pytest.mark.by_default("multi:*")
@pytest.mark.parametrize(
    ("objective", "parties", "more"),
    [
        ("binary:logistic", 2, {}),
        ("multi:softprob", 3, {}),
        ("reg:squarederror", 3, {"subsample": 0.8, "colsample_bytree": 0.5}),
    ],
)
def test_gradients_in_several_messages_make_the_same_model(
    in_blocks, monkeypatch, objective, parties, more
):
    """A block takes one exchange, and shows the server nothing more."""
    whole = run_local(in_blocks(objective, parties=parties, **more))
    assert not steps_of(whole, "encrypt")
    monkeypatch.setattr(vertical, "BLOCK_BYTES", BLOCK_ROWS * CIPHERTEXT_BYTES)
    app = Listener()
    folder = run(in_blocks(objective, parties=parties, **more), app=app)
    assert model_bytes(folder) == model_bytes(whole)
    asked = steps_of(folder, "encrypt")
    assert len(asked) > 2
    assert asked == steps_of(folder, "take")  # one is made as another is kept
    check_declared(app, METHODS["secureboost"].kinds | {f"{TRAIN}encrypt", f"{TRAIN}take"})
    check_no_rows(app, summary_of(folder))
    letters = letters_sent(app)
    got = {one.name for one in letters if one.receiver == "party-2"}
    assert got - {"CommonRows", "OrderDigest", "Partition"} == {
        *("PublicKey", "EncryptedGradients", "MoreGradients", "Splits")
    }


# What goes wrong in between


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encrypt", "sum"])
def test_a_server_that_dies_between_blocks_goes_on_to_the_same_model(in_blocks, small_blocks, kind):
    whole = run(in_blocks())
    steps, settings = steps_of(whole, kind), in_blocks()
    contexts = simulated_contexts(settings)
    die(settings, contexts, dies_before_reading=steps[1])  # in the first round
    die(resumed(settings), contexts, dies_before_sending=steps[-1])
    assert model_bytes(run(resumed(settings), contexts)) == model_bytes(whole)


# What is false


@pytest.mark.parametrize(
    ("request_class", "first", "match"),
    [
        (messages.TakeRequest, 1, "MoreGradients.start must be 41, the first of round 0 that is"),
        (messages.SumRequest, 0, r"EncryptedGradients.ciphertexts must be \d+, got 82$"),
    ],
)
def test_a_server_that_keeps_a_block_back_stops_the_run(
    in_blocks, small_blocks, monkeypatch, request_class, first, match
):
    keep_letters_back(monkeypatch, request_class, "party-2", first=first)
    refuses(f"^party-1.*: {match}", in_blocks())


@pytest.mark.by_default("too large", "one too few")
@pytest.mark.parametrize(("change", "rule"), FALSE.values(), ids=FALSE)
def test_false_gradients_of_a_later_block_stop_the_run_by_the_active_partys_name(
    in_blocks, small_blocks, monkeypatch, change, rule
):
    honest = Cipher.encrypted

    def false(cipher, fields, start, stop):
        found = honest(cipher, fields, start, stop)
        return change(found) if stop == len(fields) else found

    monkeypatch.setattr(Cipher, "encrypted", false)
    refuses(rf"^party-1.*: (More|Encrypted)Gradients.ciphertexts .*{rule}", in_blocks())


def test_a_block_of_another_round_stops_the_run(in_blocks, small_blocks, monkeypatch):
    honest = Active.send_on

    def of_next(*given):
        reply, letters = honest(*given)
        return reply, [(name, replace(one, round_id=one.round_id + 1)) for name, one in letters]

    monkeypatch.setattr(Active, "send_on", of_next)
    refuses("^party-1.*: MoreGradients.start must be 41, the first of round 0 that is", in_blocks())


def test_no_run_goes_on_without_the_active_party(in_blocks, monkeypatch):
    monkeypatch.setattr("tests.network.NODE", 2)
    app = fails_from(9, reason="party-1: broke")
    refuses(r"^party-1 \(step \d+\): broke$", in_blocks(parties=3, min_parties=2), app=app)
