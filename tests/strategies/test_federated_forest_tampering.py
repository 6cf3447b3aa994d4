"""Federated Forest under Paillier: what is false is refused, what breaks is survived."""

from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import pytest

from clients.federated_forest import paillier
from clients.federated_forest.paillier import PaillierPassive
from fedapp.crypto.packing import integer_layout
from fedapp.crypto.rings import from_bytes_array, to_bytes_array
from fedapp.errors import ConfigError
from fedapp.home import home
from fedapp.messages import federated_forest as messages
from fedapp.messages.vertical import Partition
from fedapp.site.store import PART_FILE, Store
from strategies.federated_forest import FederatedForest
from tests.federated import summary_of
from tests.forests import encrypted_forest
from tests.network import run
from tests.stored import with_arrays
from tests.tables import made_columns, write_rows
from tests.tampering import keep_letters_back, refuses, rewrite_all_letters

NUMBERS = "reg:squarederror"


@pytest.fixture
def made(settings, tmp_path):
    """``made(objective, parties, **more)``: see ``forests.encrypted_forest``."""
    return encrypted_forest(settings, tmp_path)


# What is refused


def false_sums(patch, field, change):
    """Every passive party changes a field of what it has summed."""
    honest = PaillierPassive.sum_columns

    @wraps(honest)
    def changed(party, request):
        letter = honest(party, request)
        given = (party,) if field == "ciphertexts" else ()
        return replace(letter, **{field: change(getattr(letter, field), *given)})

    patch.setattr(PaillierPassive, "sum_columns", changed)


def plus(added):
    """Adds to the plaintext of the first ciphertext; given the bits of a sum."""

    def change(rows, party):
        n, changed = int.from_bytes(party.n.tobytes(), "big"), rows.copy()
        bits = paillier.PublicKey.from_array(party.n).bits
        layout = integer_layout(bits, party.n_train, party.n_fields, party.bits)
        value = int(from_bytes_array(rows[:1])[0]) * (1 + added(layout.slot_bits) * n) % n**2
        changed[0] = to_bytes_array([value], rows.shape[1])[0]
        return changed

    return change


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    "added",
    [
        lambda bits: 1,
        lambda bits: -1,
        lambda bits: 1 << bits,
        lambda bits: (1000 << bits) - 1000,  # from one bin to the next: the sum of both stays
        lambda bits: 1 << 250,
    ],
)
@pytest.mark.parametrize("objective", ["binary:logistic", NUMBERS])
def test_sums_that_rows_cannot_have_stop_the_run_by_the_partys_name(
    made, monkeypatch, objective, added
):
    false_sums(monkeypatch, "ciphertexts", plus(added))
    rule = "must add up to the labels of each node|sums must be|plaintexts must be 0 past"
    refuses(rf"^party-2.*: ColumnSums.ciphertexts .*({rule})", made(objective))


def test_sums_of_more_rows_than_a_bin_has_stop_the_run_by_the_partys_name(made, monkeypatch):
    def moved(sizes):
        return sizes + np.eye(len(sizes), dtype=sizes.dtype)[0] - np.eye(len(sizes))[1].astype("i4")

    false_sums(monkeypatch, "sizes", moved)
    match = "ColumnSums.ciphertexts must be sums that as many rows of the node can have"
    refuses(f"^party-2.*: {match}", made(own_bootstrap=False))


@pytest.mark.by_default("2-2")
@pytest.mark.parametrize("level", [0, 2])  # the first, and the last
@pytest.mark.parametrize("parties", [2, 3])
def test_rows_that_go_elsewhere_than_their_sums_stop_the_run_by_the_partys_name(
    made, monkeypatch, level, parties
):
    def elsewhere(sender, letters):
        changed = list[Any]()
        for receiver, letter in letters:
            if sender != "party-1" and isinstance(letter, Partition) and letter.level == level:
                letter = replace(letter, bits=np.append(~letter.bits[:1], letter.bits[1:]))
            changed.append((receiver, letter))
        return changed

    rewrite_all_letters(monkeypatch, elsewhere)
    rule = r"ColumnSums.ciphertexts must be of the rows sent left, those of column \d are not"
    refuses(f"^party-[23].*: {rule}", made(parties=parties))


def test_columns_past_the_last_one_stop_the_run_by_the_partys_name(made, monkeypatch):
    false_sums(monkeypatch, "columns", lambda columns: columns + 5)
    refuses(
        r"^party-2.*: PartKept.gains must be \d columns at least, got 3",
        made(own_max_features="all"),
    )


@pytest.mark.parametrize(
    ("receiver", "letter"), [("party-1", "ColumnSums"), ("party-2", "EncryptedLabels")]
)
def test_a_letter_that_the_server_keeps_back_stops_the_run_by_its_senders_name(
    made, monkeypatch, receiver, letter
):
    kept = {"party-1": messages.SplitRequest, "party-2": messages.SumRequest}[receiver]
    keep_letters_back(monkeypatch, kept, receiver)
    refuses(f"^party-[12].*: {letter}.letter must reach {receiver}", made())


def test_a_server_that_tells_other_splits_than_were_chosen_is_found_out(made, monkeypatch):
    honest = messages.SplitRequest
    monkeypatch.setattr(
        "strategies.federated_forest.SplitRequest",
        lambda **given: honest(**given | {"owners": 1 - given["owners"]}),
    )
    refuses("^party-1.*: SplitRequest.nodes must be the splits that this party has chosen", made())


def test_a_server_that_asks_for_improvements_is_refused(made, monkeypatch):
    monkeypatch.setattr(FederatedForest, "encrypted", False)
    refuses(
        "^party-1.*: LevelRequest.step must not come to the active party with paillier labels",
        made(),
    )
    monkeypatch.setattr(FederatedForest, "encrypted", True)
    match = "^party-2.*: SumRequest.step must not come to a passive party with encoded labels"
    refuses(match, made(own_labels="encoded"))


def test_labels_that_do_not_fit_under_the_key_are_refused(made, tmp_path):
    columns = {**made_columns("multi:softprob", n_rows=200), "y": np.arange(200) % 40}
    data = write_rows(tmp_path / "classes.csv", columns)
    match = r"party-1.*federated-forest.key-bits must be > \d+ for 40 outputs of 9 bits, got 256"
    refuses(match, made("multi:softprob", data=str(data)))


def test_a_small_key_is_refused_without_consent(made):
    match = "federated-forest.key-bits must be >= 2048 without federated-forest.insecure-small-key"
    with pytest.raises(ConfigError, match=match):
        FederatedForest.section_settings(made(own_insecure_small_key=False))


def test_the_key_is_forgotten_with_the_rows(made):
    summary = summary_of(run(made()))
    for party in ("party-1", "party-2"):
        site = home() / "sites" / party / summary["model_id"]
        assert (site / PART_FILE).exists()
        names = with_arrays(Store.open(site))
        assert "reply" in names
        gone = {"key", "targets", "labels", "row_weights", "ciphertexts", "values", "codes"}
        assert not names & gone
