"""SecureBoost's ciphertexts: what leaves a passive party is fresh, what is false is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.secureboost import active as secureboost_active
from clients.secureboost import passive as secureboost_passive
from clients.secureboost.active import Active
from clients.secureboost.passive import Passive
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import grouped_layouts
from fedapp.crypto.paillier import encrypt, generate_key
from fedapp.crypto.workers import Workers
from fedapp.messages.fields import Letter
from fedapp.messages.vertical import Parcel
from fedapp.settings import Settings
from fedapp.site.mail import HEAD
from strategies.vertical import Mailbox
from tests.letters import Opened, letters_sent
from tests.network import run
from tests.pooled import made_columns, write_rows
from tests.tampering import FALSE, refuses
from tests.transcript import Listener, summary_of

MakeSettings = Callable[..., Settings]


@pytest.fixture
def made(vertical: MakeSettings, tmp_path: Path) -> MakeSettings:
    def make(objective: str = "binary:logistic", **more: Any) -> Settings:
        columns = made_columns(objective, n_rows=150)
        columns["f"] = np.random.default_rng(2).permutation(150) / 7  # each row has its own bin
        data = write_rows(tmp_path / "made.csv", columns)
        return vertical(data=str(data), label="y", objective=objective, **more)

    return make


# Fresh ciphertexts


def ciphertexts(letters: list[Opened], name: str) -> list[bytes]:
    return [row.tobytes() for one in letters if one.name == name for row in one["ciphertexts"]]


@pytest.mark.parametrize(
    ("objective", "bits", "n_slots"), [("multi:softprob", 256, 1), ("binary:logistic", 512, 4)]
)
def test_no_ciphertext_leaves_a_passive_party_that_came_in_or_has_left_before(
    made: MakeSettings, objective: str, bits: int, n_slots: int
) -> None:
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


# False ciphertexts


def under_another_key(ciphertexts: Any) -> Any:
    key = generate_key(512, insecure_small_key=True)
    return encrypt(key, list(range(len(ciphertexts))), Workers(1))


@pytest.mark.parametrize(("change", "rule"), FALSE.values(), ids=FALSE)
def test_false_sums_of_a_passive_party_stop_the_run_by_its_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], rule: str
) -> None:
    honest = Passive.encrypted_sums

    def false(*given: Any) -> Letter:
        letter = honest(*given)
        return replace(letter, ciphertexts=change(letter.ciphertexts))

    monkeypatch.setattr(Passive, "encrypted_sums", false)
    refuses(f"^party-2.*: EncryptedSums.ciphertexts .*{rule}", made())


@pytest.mark.parametrize(("change", "rule"), FALSE.values(), ids=FALSE)
def test_false_gradients_of_the_active_party_stop_the_run_by_its_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], rule: str
) -> None:
    honest = secureboost_active.encrypted
    monkeypatch.setattr(secureboost_active, "encrypted", lambda *given: change(honest(*given)))
    refuses(rf"^party-1.*: EncryptedGradients.ciphertexts .*{rule}", made())


@pytest.mark.parametrize("change", [lambda own: np.repeat(own, 2), lambda own: own[::-1]])
def test_columns_that_are_not_each_once_and_in_order_are_summed_by_nobody(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> None:
    honest = Active._encrypt

    def other(party: Active, pairs: Any, columns: dict[str, Any]) -> Any:
        return honest(party, pairs, {name: change(local) for name, local in columns.items()})

    monkeypatch.setattr(Active, "_encrypt", other)
    refuses(r"^party-1.*: EncryptedGradients.columns must be < \d+ and ascending", made())


def test_sums_under_another_key_stop_the_run_by_the_partys_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = secureboost_passive.pack_sums
    monkeypatch.setattr(
        secureboost_passive, "pack_sums", lambda *given: under_another_key(honest(*given))
    )
    refuses("^party-2.*: EncryptedSums.ciphertexts ((sums|plaintexts) )?must", made())


def test_sums_that_were_sent_before_stop_the_run_by_the_partys_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, sent = Passive.encrypted_sums, list[Letter]()

    def replayed(*given: Any) -> Letter:
        sent.append(honest(*given))
        return sent[0]

    monkeypatch.setattr(Passive, "encrypted_sums", replayed)
    refuses("^party-2.*: EncryptedSums.level must be the one being split", made())


def test_sums_of_rows_that_are_too_many_stop_the_run_by_the_partys_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = secureboost_passive.sum_rows

    def inflated(key: Any, *given: Any) -> Any:
        return ring_of(key.n_squared).squares(honest(key, *given), 40)

    monkeypatch.setattr(secureboost_passive, "sum_rows", inflated)
    refuses("^party-2.*: EncryptedSums.ciphertexts .*must be", made())


def test_a_count_of_other_columns_stops_the_run_by_the_partys_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Passive.encrypted_sums

    def narrower(*given: Any) -> Letter:
        letter = honest(*given)
        return replace(letter, missing=letter.missing[:, :-1].copy())

    monkeypatch.setattr(Passive, "encrypted_sums", narrower)
    refuses(r"^party-2.*: EncryptedSums.missing must be of shape \(1, 3\), got \(1, 2\)", made())


@pytest.mark.parametrize(
    ("n", "rule"),
    [
        (2**511 + 2**510, "must be the product of two large primes"),
        (2**512 - 569, "must be the product of two large primes"),  # a prime
        (2**521 - 1, "must be 512 bits, got 66 bytes"),
        (2**510 + 1, "must be 512 bits, got 511"),
    ],
)
def test_a_false_public_key_stops_the_run_by_the_active_partys_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch, n: int, rule: str
) -> None:
    honest, digits = secureboost_active.PublicKey, n.to_bytes((n.bit_length() + 7) // 8, "big")
    monkeypatch.setattr(
        secureboost_active,
        "PublicKey",
        lambda _, *rest: honest(np.frombuffer(digits, np.uint8), *rest),
    )
    refuses(f"^party-1.*: PublicKey.n {rule}", made())


def shorter(message: str, field: str) -> Callable[..., Any]:
    """A class of letters that leaves the last of a field out."""
    honest = getattr(secureboost_passive, message)

    def make(*given: Any, **more: Any) -> Letter:
        letter = honest(*given, **more)
        return replace(letter, **{field: getattr(letter, field)[:-1]})

    return make


def test_too_few_names_stop_the_run_by_the_partys_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secureboost_passive, "Records", shorter("Records", "names"))
    refuses("^party-2.*: Records.names must be 3, got 2$", made())
    monkeypatch.setattr(secureboost_passive, "ColumnBins", shorter("ColumnBins", "names"))
    match = "^party-2.*: ColumnBins.names must be 3 or none, got 2$"
    refuses(match, made(share_column_names=True))


def test_too_few_thresholds_stop_the_run_by_the_partys_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = secureboost_passive.Records
    monkeypatch.setattr(
        secureboost_passive,
        "Records",
        lambda a, b, c, d, *rest, **more: honest(
            *(one[:-1] for one in (a, b, c, d)), *rest, **more
        ),
    )
    refuses(r"^party-2.*: Records.thresholds must be \d+ at least, got \d+$", made())


# A server that meddles with parcels


def meddle(
    patch: pytest.MonkeyPatch,
    receiver: str,
    change: Callable[[list[list[Parcel]]], list[Parcel]],
) -> None:
    """The server changes what a party gets; it knows all that it has carried to it so far."""
    honest, carried = Mailbox.take, list[list[Parcel]]()

    def take(self: Mailbox, party: str) -> list[Parcel]:
        parcels = honest(self, party)
        if party != receiver:
            return parcels
        carried.append(parcels)
        return change(carried)

    patch.setattr(Mailbox, "take", take)


def last(change: Callable[[str, bytes], Parcel]) -> Callable[[list[list[Parcel]]], list[Parcel]]:
    """Changes one parcel when there are sums to carry, at the fifth request or later."""

    def changed(carried: list[list[Parcel]]) -> list[Parcel]:
        *others, (peer, content) = carried[-1] or [("", b"")]
        if len(carried) < 4 or not peer:
            return carried[-1]
        return [*others, change(peer, content)]

    return changed


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


SEALED = "must be sealed by party-. for party-. in this run"
MEDDLED: dict[str, tuple[Callable[[str, bytes], Parcel], str]] = {
    "a bit of the letter": (lambda peer, all: (peer, flipped(all, len(all) // 2)), SEALED),
    "a bit of the tag": (lambda peer, all: (peer, flipped(all, len(all) - 1)), SEALED),
    "a bit of the step": (lambda peer, all: (peer, flipped(all, HEAD.size - 1)), SEALED),
    "cut short": (lambda peer, all: (peer, all[:-1]), SEALED),
    "almost nothing": (lambda peer, all: (peer, all[:5]), SEALED),
    "nothing": (lambda peer, all: (peer, b""), SEALED),
    "more": (lambda peer, all: (peer, all + b"\0"), SEALED),
    "noise": (lambda peer, all: (peer, bytes(range(256))), SEALED),
}


@pytest.mark.each_value_once
@pytest.mark.parametrize("receiver", ["party-1", "party-2"])
@pytest.mark.parametrize(("change", "rule"), MEDDLED.values(), ids=MEDDLED)
def test_a_parcel_that_the_server_changed_is_refused(
    made: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    receiver: str,
    change: Callable[[str, bytes], Parcel],
    rule: str,
) -> None:
    meddle(monkeypatch, receiver, last(change))
    sender = {"party-1": "party-2", "party-2": "party-1"}[receiver]
    refuses(rf"^{sender}.*: parcel\.(content {rule}|step must be)", made())


def test_a_parcel_under_another_partys_name_is_refused(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"party-2": "party-3", "party-3": "party-2"}
    meddle(monkeypatch, "party-1", last(lambda peer, content: (other[peer], content)))
    refuses(rf"^party-[23].*: parcel.content {SEALED}", made(parties=3))


@pytest.mark.parametrize("name", ["nobody", "party-1"])
def test_a_parcel_from_nobody_else_of_the_run_is_refused(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    meddle(monkeypatch, "party-1", last(lambda peer, content: (name, content)))
    refuses(f"^{name}.*: parcel.sender must be another party of the run", made())


@pytest.mark.parametrize("receiver", ["party-1", "party-2"])
def test_a_parcel_that_the_server_brings_twice_is_refused(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch, receiver: str
) -> None:
    def again(carried: list[list[Parcel]]) -> list[Parcel]:
        earlier = [parcel for parcels in carried[:-1] for parcel in parcels]
        return carried[-1] + (earlier[-1:] if len(carried) > 3 else [])

    meddle(monkeypatch, receiver, again)
    refuses("^party-[12].*: parcel.step must be a new one, got one seen before", made())


@pytest.mark.parametrize("receiver", ["party-1", "party-2"])
def test_a_parcel_that_the_server_doubles_is_refused(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch, receiver: str
) -> None:
    meddle(monkeypatch, receiver, lambda carried: carried[-1] + carried[-1][-1:])
    refuses("^party-[12].*: parcel.step must be a new one, got one seen before", made())


def test_a_parcel_that_the_server_keeps_back_stops_the_run_by_its_senders_name(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    meddle(monkeypatch, "party-1", lambda carried: carried[-1] if len(carried) < 4 else [])
    refuses("^party-2.*: EncryptedSums.letter must reach party-1", made())


def test_a_parcel_of_one_party_is_of_no_use_to_another(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: dict[str, list[Parcel]] = {}
    honest = Mailbox.take

    def take(self: Mailbox, party: str) -> list[Parcel]:
        carried[party] = honest(self, party)
        if party == "party-3" and any(peer == "party-1" for peer, _ in carried["party-2"]):
            return carried["party-2"]
        return carried[party]

    monkeypatch.setattr(Mailbox, "take", take)
    refuses(rf"^party-1.*: parcel.content {SEALED}", made(parties=3))


def test_a_site_does_not_read_what_was_sealed_for_it_in_another_run(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = list[list[Parcel]]()
    with pytest.MonkeyPatch.context() as patch:
        meddle(patch, "party-2", lambda carried: first.append(carried[-1]) or carried[-1])
        run(made())
    meddle(monkeypatch, "party-2", lambda carried: first[len(carried) - 1])
    refuses(rf"^party-1.*: parcel.content {SEALED}", made())
