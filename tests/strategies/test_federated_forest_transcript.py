"""Federated Forest under Paillier: what the server, a passive party and the active party see."""

from dataclasses import fields

import numpy as np
import pytest

from clients.federated_forest import paillier
from fedapp.messages import federated_forest as messages
from fedapp.messages import vertical
from fedapp.settings import load_settings
from fedapp.trees.forest.label_codes import RowFields, number_codes
from strategies.federated_forest import WARNINGS
from tests.federated import summary_of
from tests.forests import encrypted_forest, parts_of
from tests.letters import ciphertexts, letters_sent, raw_of, texts_of, written
from tests.network import run
from tests.pooled import Pooled
from tests.tables import made_columns, write_rows
from tests.transcript import listen

NUMBERS = "reg:squarederror"


@pytest.fixture
def made(settings, tmp_path):
    """``made(objective, parties, **more)``: see ``forests.encrypted_forest``."""
    return encrypted_forest(settings, tmp_path)


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """Three parties, numbers as labels, weights; in one column each row has a bin of its own: the
    settings of a run, its folder, what each party keeps, the requests and the letters."""
    folder = tmp_path_factory.mktemp("heard")
    rng = np.random.default_rng(2)
    columns = made_columns(NUMBERS, n_rows=160)
    columns["f"], columns["w"] = rng.permutation(160) / 7, rng.exponential(size=160).round(4)
    columns["w"][:10] = 0
    data = write_rows(folder / "unique.csv", columns)

    def settings(**given):
        named = {name.replace("__", ".").replace("_", "-"): one for name, one in given.items()}
        return load_settings({"run-dir": str(folder / "run"), **named})

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        given = {"data": str(data), "weight": "w", "max_bin": 256}
        run_settings = encrypted_forest(settings, folder)(NUMBERS, 3, **given)
        done, app = listen(run_settings)
        requests = [raw_of(request) for _, request, _ in app.heard]
        return run_settings, done, parts_of(done), requests, letters_sent(app)


# What crosses the wire


def test_every_ciphertext_on_the_wire_is_fresh(heard):
    settings, folder, _, _, letters = heard
    came, left = ciphertexts(letters, "EncryptedLabels"), ciphertexts(letters, "ColumnSums")
    n_weighted = int((Pooled(settings).weights[Pooled(settings).train] > 0).sum())
    assert len(came) == 2 * n_weighted < 2 * summary_of(folder)["matched_rows"]["train"]
    assert len(left) > len(came)
    sizes = np.concatenate([one["sizes"] for one in letters if one.name == "ColumnSums"])
    assert (sizes == 1).sum() > 100  # such a sum could leave as the very ciphertext that came in
    assert len(set(came + left)) == len(came + left)
    assert min(int.from_bytes(one, "big") for one in came + left) > 1


TO_PASSIVE = {"EncryptedLabels", "Won", "Partition", "CommonRows", "OrderDigest"}
TO_ACTIVE = {"ColumnSums", "Partition", "PartKept", "OrderDigest"}
LETTERS = {
    letter.__name__: letter
    for letter in (
        *(messages.EncryptedLabels, messages.ColumnSums, messages.Won),
        *(vertical.Partition, messages.PartKept),
    )
}


def secrets_of_the_labels(run_settings):
    """Labels, their codes, weights and what is encrypted, as they may be written."""
    whole = Pooled(run_settings)
    labels, weights = whole.labels[whole.train], whole.weights[whole.train].astype(np.float64)
    codes = number_codes(labels)[0]
    columns = labels, codes, weights, *RowFields.of(codes, weights, 0).numbers.T
    return set[bytes]().union(*(runs_of(column, 4) for column in columns))


def runs_of(values, n_run):
    """Numbers as they may be written, in runs or as text; not in types that cannot hold them."""
    with np.errstate(invalid="ignore"):
        return written(values, n_run) | texts_of(np.asarray(values).tolist())


def test_a_passive_party_gets_no_label_no_code_and_no_weight(heard):
    settings, _, _, requests, letters = heard
    secrets = secrets_of_the_labels(settings)
    for party in ("party-2", "party-3"):
        mine = [one for one in letters if one.receiver == party]
        assert {one.name for one in mine} <= TO_PASSIVE
        seen = b"|".join([*(one.raw for one in mine), *requests])
        assert not [secret for secret in secrets if secret in seen]
    for one in letters:
        if one.name in LETTERS:
            names = {*one.content.scalars, *one.content.arrays}
            assert names == {field.name for field in fields(LETTERS[one.name])}


def test_the_active_party_sees_no_threshold_and_no_value_of_another(heard):
    *_, parts, _, letters = heard
    mine = [one for one in letters if one.receiver == "party-1"]
    assert {one.name for one in mine} <= TO_ACTIVE
    seen = b"|".join(one.raw for one in mine)
    for part in parts[1:]:
        secrets = runs_of(part["lookup"]["thresholds"], 2)
        assert len(secrets) > 4
        assert not [secret for secret in secrets if secret in seen]


def test_a_party_is_told_of_its_own_splits_alone_and_of_no_rows_in_the_last_level(heard):
    *_, parts, _, letters = heard
    for party, part in zip(("party-2", "party-3"), parts[1:], strict=True):
        won = [one for one in letters if one.name == "Won" and one.receiver == party]
        assert {one.sender for one in won} == {"party-1"}
        assert sum(len(one["listed"]) for one in won) == len(part["lookup"]["columns"]) > 0
    assert_levels(letters)


def assert_levels(letters):
    """Which rows a party sends left in the last level, only the active party is told."""
    told = [one for one in letters if one.name == "Partition"]
    assert {one["level"] for one in told if one.receiver == "party-1"} == {0, 1, 2}
    assert {one["level"] for one in told if one.receiver != "party-1"} == {0, 1}


def test_the_search_finds_codes_where_they_are_sent(made):
    settings = made(NUMBERS, 3, own_labels="encoded")
    _, app = listen(settings)
    letters = letters_sent(app)
    assert_levels(letters)
    raw = b"".join(one.raw for one in letters)
    assert any(secret in raw for secret in secrets_of_the_labels(settings))


def improvements_of(patch):
    """Improvements that are compared from now on, as they may be written.

    Those of few binary digits, such as 1/4, are left out: a score may have the same value.
    """
    found, honest = set[bytes](), paillier.winners

    def noted(offers):
        for offer in offers:
            values = (value for value in offer.improvements if value > 0 and value * 2**16 % 1)
            found.update(value.tobytes() for value in values)
        return honest(offers)

    patch.setattr(paillier, "winners", noted)
    patch.setattr("strategies.federated_forest.winners", noted)
    return found


@pytest.mark.each_value_once
@pytest.mark.parametrize("labels", ["paillier", "encoded"])
@pytest.mark.parametrize("parties", [2, 3])
def test_the_server_sees_improvements_of_encoded_labels_alone(made, monkeypatch, labels, parties):
    found = improvements_of(monkeypatch)
    _, app = listen(made(parties=parties, own_labels=labels))
    seen = b"|".join(raw_of(message) for _, *pair in app.heard for message in pair)
    assert len(found) > 20
    assert any(value in seen for value in found) == (labels == "encoded")


@pytest.mark.parametrize("labels", WARNINGS)
def test_the_run_warns_of_what_its_form_of_labels_tells(made, labels):
    first, few = summary_of(run(made(own_labels=labels)))["warnings"]
    assert first == WARNINGS[labels]
    assert "of the rarer class" in few
