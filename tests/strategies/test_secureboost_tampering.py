"""SecureBoost's ciphertexts: what leaves a passive party is fresh, what is false is refused."""

from dataclasses import replace

import numpy as np
import pytest

from clients.secureboost import active, passive, start
from clients.secureboost.active import Active
from clients.secureboost.passive import Passive
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import grouped_layouts
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import generate_key
from fedapp.crypto.workers import Workers
from fedapp.messages.fields import Letter
from fedapp.messages.secureboost import EncryptedGradients
from fedapp.messages.vertical import Parcel
from fedapp.site.mail import HEAD
from fedapp.trees.queue import Queue
from strategies.vertical import Mailbox
from tests.federated import summary_of
from tests.letters import letters_sent
from tests.network import run
from tests.tables import made_columns, write_rows
from tests.tampering import FALSE, refuses, rewrite_all_letters, rewrite_letters
from tests.transcript import Listener


@pytest.fixture
def made(vertical, tmp_path):
    def make(objective="binary:logistic", **more):
        columns = made_columns(objective, n_rows=150)
        columns["f"] = np.random.default_rng(2).permutation(150) / 7  # each row has its own bin
        data = write_rows(tmp_path / "made.csv", columns)
        return vertical(data=str(data), label="y", objective=objective, **more)

    return make


# Fresh ciphertexts


def ciphertexts(letters, name):
    return [row.tobytes() for one in letters if one.name == name for row in one["ciphertexts"]]


@pytest.mark.by_default("binary:*")
@pytest.mark.parametrize(
    ("objective", "bits", "n_slots"), [("multi:softprob", 256, 1), ("binary:logistic", 512, 4)]
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


# What a party makes falsely


def changed(field, change):
    """Wraps what makes a letter: a field of it is another."""

    def wrap(honest):
        def make(*given, **more):
            letter = honest(*given, **more)
            return replace(letter, **{field: change(getattr(letter, field))})

        return make

    return wrap


def returning(change):
    """Wraps a function whose result is another."""
    return lambda honest: lambda *given: change(honest(*given))


def under_another_key(ciphertexts):
    key = generate_key(512, insecure_small_key=True)
    return encrypt(key, list(range(len(ciphertexts))), Workers(1))


def of_columns(change):
    """Wraps the start of a round: columns that others are to sum are others."""
    return lambda honest: (
        lambda party, pairs, columns: honest(
            party, pairs, {name: change(local) for name, local in columns.items()}
        )
    )


def too_many_rows(honest):
    return lambda key, *given: ring_of(key.n_squared).squares(honest(key, *given), 40)


def sent_before(honest):
    sent = list[Letter]()
    return lambda *given: sent.append(honest(*given)) or sent[0]


def without_last_split(honest):
    def make(party):
        letter, names = honest(party), ("columns", "thresholds", "defaults", "widths")
        return replace(letter, **{name: getattr(letter, name)[:-1] for name in names})

    return make


def public_key(n):
    digits = np.frombuffer(n.to_bytes((n.bit_length() + 7) // 8, "big"), np.uint8)
    return start, "PublicKey", lambda honest: lambda _, *rest: honest(digits, *rest)


SUMS, ROWS = (Passive, "encrypted_sums"), (active, "encrypted")
NOT_PRIMES = "party-1.*: PublicKey.n must be the product of two large primes"
NOT_COLUMNS = r"party-1.*: EncryptedGradients.columns must be < \d+ and ascending"
MADE_FALSELY = {
    **{
        f"sums, {how}": (
            *SUMS,
            changed("ciphertexts", change),
            f"party-2.*: EncryptedSums.ciphertexts .*{rule}",
        )
        for how, (change, rule) in FALSE.items()
    },
    **{
        f"gradients, {how}": (
            *ROWS,
            returning(change),
            f"party-1.*: EncryptedGradients.ciphertexts .*{rule}",
        )
        for how, (change, rule) in FALSE.items()
    },
    "sums under another key": (
        *(passive, "pack_sums", returning(under_another_key)),
        "party-2.*: EncryptedSums.ciphertexts ((sums|plaintexts) )?must",
    ),
    "sums that were sent before": (
        *SUMS,
        sent_before,
        "party-2.*: EncryptedSums.level must be the one being split",
    ),
    "sums of too many rows": (
        *(passive, "sum_rows", too_many_rows),
        "party-2.*: EncryptedSums.ciphertexts .*must be",
    ),
    "counts of other columns": (
        *(*SUMS, changed("missing", lambda counts: counts[:, :-1].copy())),
        r"party-2.*: EncryptedSums.missing must be of shape \(1, 3\), got \(1, 2\)",
    ),
    "columns twice": (
        Active,
        "_encrypt",
        of_columns(lambda local: np.repeat(local, 2)),
        NOT_COLUMNS,
    ),
    "columns in disorder": (Active, "_encrypt", of_columns(lambda local: local[::-1]), NOT_COLUMNS),
    "a key of small primes": (*public_key(2**511 + 2**510), NOT_PRIMES),
    "a prime as key": (*public_key(2**512 - 569), NOT_PRIMES),
    "a long key": (
        *public_key(2**521 - 1),
        "party-1.*: PublicKey.n must be 512 bits, got 66 bytes",
    ),
    "a short key": (
        *public_key(2**510 + 1),
        "party-1.*: PublicKey.n must be 512 bits, got 511",
    ),
    "too few names of columns": (
        *(Passive, "column_bins", changed("names", lambda names: names[:-1])),
        "party-2.*: ColumnBins.names must be 3 or none, got 2$",
    ),
    "too few names of splits": (
        *(Passive, "table_records", changed("names", lambda names: names[:-1])),
        "party-2.*: Records.names must be 3, got 2$",
    ),
    "too few splits": (
        *(Passive, "table_records", without_last_split),
        r"party-2.*: Records.thresholds must be \d+ at least, got \d+$",
    ),
}


@pytest.mark.by_default(
    "sums, one too few",
    "gradients, truncated",
    "sums under another key",
    "sums that were sent before",
    "sums of too many rows",
    "counts of other columns",
    "columns twice",
    "a key of small primes",
    "a short key",
    "too few names of columns",
)
@pytest.mark.parametrize(
    ("owner", "name", "wrap", "match"), MADE_FALSELY.values(), ids=MADE_FALSELY
)
def test_what_a_party_makes_falsely_stops_the_run_by_its_name(
    made, monkeypatch, owner, name, wrap, match
):
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    refuses(f"^{match}", made(share_column_names=name == "column_bins"))


# An active party that asks for more than a round is to tell it, at sites with limits of their own

WIDE = {"precision": (62, "must be 53, got 62"), "n_outputs": (3, "must be 1, got 3")}


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


@pytest.mark.by_default("True-1", "False-99")
@pytest.mark.parametrize("n_drawn", [1, 99])
@pytest.mark.parametrize("has_columns", [True, False])
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


@pytest.mark.by_default("binary:logistic")
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob"])
def test_a_round_that_draws_enough_rows_is_answered(pair, objective):
    run(*pair(objective=objective, subsample=0.97))


@pytest.mark.parametrize("field", WIDE)
def test_slots_wider_than_the_run_needs_are_refused(pair, monkeypatch, field):
    value, rule = WIDE[field]
    rewrite_letters(monkeypatch, "PublicKey", field, lambda _: value)
    refuses(f"^bank.*: PublicKey.{field} {rule}", *pair())


def test_nodes_below_the_last_level_are_not_summed(pair, monkeypatch):
    """The active party grows one level more than the passive one was set up for."""
    honest, sums, levels = Passive.setup, Passive.encrypted_sums, list[int]()

    def shallow(party, request, mail):
        return honest(party, replace(request, max_depth=request.max_depth - 1), mail)

    def noted(party):
        levels.append(party.structure.level)
        return sums(party)

    monkeypatch.setattr(Passive, "setup", shallow)
    monkeypatch.setattr(Passive, "encrypted_sums", noted)
    refuses("^bank.*: Splits.columns must be of this party and this level", *pair(max_depth=3))
    assert levels == [0, 1]


OF_THE_LEVEL = "columns must be of this party and this level"
OPEN = "nodes must be open, in order, and of parties of the run"
SPLITS = {
    "of a later level": ("level", lambda level: level + 1, OF_THE_LEVEL),
    "of nodes that are not open": ("nodes", lambda nodes: nodes + 7, OPEN),
    "twice": ("trees", lambda trees: trees + 1, OPEN),
    "of no party": ("owners", lambda owners: owners + 2, OPEN),
    "of another party": ("owners", lambda owners: 1 - owners, OF_THE_LEVEL),
    "of columns that there are not": ("columns", lambda columns: columns + 9, OF_THE_LEVEL),
    "of bins that there are not": ("first_rights", lambda bins: bins + 999, OF_THE_LEVEL),
    "for sums of old nodes": ("wanted_nodes", lambda nodes: nodes * 0, OF_THE_LEVEL),
}


@pytest.mark.parametrize(("field", "change", "rule"), SPLITS.values(), ids=SPLITS)
def test_false_splits_are_refused_before_they_are_made(made, monkeypatch, field, change, rule):
    rewrite_letters(monkeypatch, "Splits", field, change)
    refuses(f"^party-1.*: Splits.{rule}", made(max_depth=3))


def test_more_splits_in_a_level_than_leaves_allow_are_refused(made, monkeypatch):
    """The active party splits every node, whatever the plan's ``max-leaves``."""
    every, sums, levels = Queue.chosen, Passive.encrypted_sums, list[int]()

    def noted(party):
        levels.append(party.structure.level)
        return sums(party)

    monkeypatch.setattr(Queue, "chosen", lambda queue, *tree: every(Queue(), *tree))
    monkeypatch.setattr(Passive, "encrypted_sums", noted)
    deep = {"objective": "reg:squarederror", "max_depth": 6}
    refuses(f"^party-1.*: Splits.{OF_THE_LEVEL}", made(**deep, max_leaves=6))
    assert levels == [0, 1, 2, 3]  # below, six nodes or more are split


# A server that meddles with parcels


def meddle(patch, receiver, change):
    """The server changes what a party gets; it knows all that it has carried to it so far."""
    honest, carried = Mailbox.take, list[list[Parcel]]()

    def take(self, party):
        parcels = honest(self, party)
        if party != receiver:
            return parcels
        carried.append(parcels)
        return change(carried)

    patch.setattr(Mailbox, "take", take)


def last(change):
    """Changes one parcel when there are sums to carry, at the fifth request or later."""

    def changed(carried):
        *others, (peer, content) = carried[-1] or [("", b"")]
        if len(carried) < 4 or not peer:
            return carried[-1]
        return [*others, change(peer, content)]

    return changed


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def again(carried):
    earlier = [parcel for parcels in carried[:-1] for parcel in parcels]
    return carried[-1] + (earlier[-1:] if len(carried) > 3 else [])


OTHER = {"party-2": "party-3", "party-3": "party-2"}
SEALED = "must be sealed by party-. for party-. in this run"
NOT_SEALED = rf"^{{sender}}.*: parcel\.(content {SEALED}|step must be)"
TWICE = "^party-[12].*: parcel.step must be a new one, got one seen before"
NOBODY = ".*: parcel.sender must be another party of the run"
BOTH = ("party-1", "party-2")  # receivers
MEDDLED = {
    "a bit of the letter": (
        *(last(lambda peer, all: (peer, flipped(all, len(all) // 2))), BOTH, NOT_SEALED),
    ),
    "a bit of the tag": (
        *(last(lambda peer, all: (peer, flipped(all, len(all) - 1))), BOTH, NOT_SEALED),
    ),
    "a bit of the step": (
        *(last(lambda peer, all: (peer, flipped(all, HEAD.size - 1))), BOTH, NOT_SEALED),
    ),
    "cut short": (last(lambda peer, all: (peer, all[:-1])), BOTH, NOT_SEALED),
    "almost nothing": (last(lambda peer, all: (peer, all[:5])), BOTH, NOT_SEALED),
    "nothing": (last(lambda peer, all: (peer, b"")), BOTH, NOT_SEALED),
    "more": (last(lambda peer, all: (peer, all + b"\0")), BOTH, NOT_SEALED),
    "noise": (last(lambda peer, all: (peer, bytes(range(256)))), BOTH, NOT_SEALED),
    "from nobody": (last(lambda _, all: ("nobody", all)), ("party-1",), f"^nobody{NOBODY}"),
    "from itself": (last(lambda _, all: ("party-1", all)), ("party-1",), f"^party-1{NOBODY}"),
    "an earlier one again": (again, BOTH, TWICE),
    "twice at once": (lambda carried: carried[-1] + carried[-1][-1:], BOTH, TWICE),
    "kept back": (
        lambda carried: carried[-1] if len(carried) < 4 else [],
        ("party-1",),
        "^party-2.*: EncryptedSums.letter must reach party-1",
    ),
}


@pytest.mark.by_default(
    "a bit of the tag, party-2",
    "cut short, party-2",
    "more, party-1",
    "from nobody, party-1",
    "an earlier one again, party-2",
    "twice at once, party-1",
    "kept back, party-1",
)
@pytest.mark.parametrize(
    ("change", "receiver", "match"),
    [
        pytest.param(
            *(change, receiver, match),
            id=f"{name}, {receiver}",
            # of what is not sealed one receiver each by default, in turn
            marks=() if match != NOT_SEALED or number % 2 == place else pytest.mark.slow,
        )
        for number, (name, (change, receivers, match)) in enumerate(MEDDLED.items())
        for place, receiver in enumerate(receivers)
    ],
)
def test_a_parcel_that_the_server_changed_is_refused(made, monkeypatch, change, receiver, match):
    meddle(monkeypatch, receiver, change)
    sender = {"party-1": "party-2", "party-2": "party-1"}[receiver]
    refuses(match.replace("{sender}", sender), made())


def test_a_parcel_under_another_partys_name_is_refused(made, monkeypatch):
    meddle(monkeypatch, "party-1", last(lambda peer, content: (OTHER[peer], content)))
    refuses(rf"^party-[23].*: parcel.content {SEALED}", made(parties=3))


def test_a_parcel_of_one_party_is_of_no_use_to_another(made, monkeypatch):
    carried = {}
    honest = Mailbox.take

    def take(self, party):
        carried[party] = honest(self, party)
        if party == "party-3" and any(peer == "party-1" for peer, _ in carried["party-2"]):
            return carried["party-2"]
        return carried[party]

    monkeypatch.setattr(Mailbox, "take", take)
    refuses(rf"^party-1.*: parcel.content {SEALED}", made(parties=3))


def test_a_site_does_not_read_what_was_sealed_for_it_in_another_run(made, monkeypatch):
    first = list[list[Parcel]]()
    with pytest.MonkeyPatch.context() as patch:
        meddle(patch, "party-2", lambda carried: first.append(carried[-1]) or carried[-1])
        run(made())
    meddle(monkeypatch, "party-2", lambda carried: first[len(carried) - 1])
    refuses(rf"^party-1.*: parcel.content {SEALED}", made())
