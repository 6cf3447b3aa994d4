"""Attacks on the matching of rows, from the seat of a party that breaks the rules; all refused."""

import logging
from functools import wraps

import numpy as np
import pytest

from clients.vertical.opening import Opening, _digest
from fedapp.messages import secureboost
from fedapp.messages.vertical import CommonRows, MaskedList, MatchReply, OrderDigest
from fedapp.site.mail import Letters
from tests.federated import summary_of
from tests.network import run
from tests.tables import write_rows
from tests.tampering import keep_letters_back, refuses, rewrite_all_letters, rewrite_letters

NOT_KNOWN = (
    r"^bank \(step \d+\): CommonRows\.digest must be of the ids of shop: ids must be those of "
    r"bank, in the same order$"
)


@pytest.fixture
def federation(tmp_path, sites):
    """``federation(bank=ids, shop=ids)``: sites with two columns each; the bank has the label."""

    def make(**ids):
        rng, nodes = np.random.default_rng(3), []
        for party, names in ids.items():
            columns = {f"{party}-{k}": rng.normal(size=len(names)).round(3) for k in range(2)}
            label = {"y": np.arange(len(names)) % 2} if party == "bank" else {}
            table = {"customer": names, **columns, **label}
            path = write_rows(tmp_path / f"{party}.csv", table)
            nodes.append({"name": party, "data": path, "id": "customer"})
            nodes[-1]["label"] = "y" if label else ""
        return sites(*nodes)

    return make


@pytest.fixture
def psi(vertical):
    """A SecureBoost run that matches rows."""
    return lambda **more: vertical(**{"align": "psi", "allow_export": False, **more})


def ids(first, last):
    return [f"customer {number:05d}" for number in range(first, last)]


def invent_bits(monkeypatch, wanted):
    """Have the active party say, of some rows of every list, that all parties have them."""

    @wraps(Opening.match)
    def match(party, request, mail):
        sizes = {each.owner: len(each.points) for _, each in mail.each(MaskedList)}
        key, letters = np.arange(32, dtype=np.uint8), Letters()
        n_rows = len(np.arange(max(sizes.values()))[wanted])
        party._keep(np.arange(n_rows))
        party.digests = dict.fromkeys(party.passive, _digest(party.ids, key))
        for name in party.passive:
            bits = np.zeros(sizes[name], dtype=bool)
            bits[wanted] = True
            proof, none = party.order_proof(party.name, name), np.empty(0, np.uint8)
            letter = CommonRows(np.packbits(bits), none.astype(np.int32), key, proof, none)
            letters.append((name, letter))
        counts = np.full(len(sizes), n_rows)
        return MatchReply(counts, party.n_train, party.n_valid, party.n_test), letters

    monkeypatch.setattr(Opening, "match", match)


def test_rows_of_a_table_that_shares_no_id_are_not_answered(psi, federation, monkeypatch):
    contexts = federation(bank=ids(0, 400), shop=ids(1000, 1400))
    for context in contexts:
        context.node_config["min-rows"] = 50
    invent_bits(monkeypatch, slice(None))
    refuses(NOT_KNOWN, psi(num_boost_round=1, valid_fraction=0.0), contexts)


@pytest.mark.by_default("interactive")
@pytest.mark.parametrize("strategy", ["interactive", "eini"])
def test_one_chosen_row_is_not_answered_in_a_prediction(psi, federation, monkeypatch, strategy):
    contexts = federation(bank=ids(0, 100), shop=ids(0, 100))
    model = summary_of(run(psi(), contexts))["model_id"]
    others = federation(bank=ids(0, 100), shop=ids(1000, 1100))
    invent_bits(monkeypatch, slice(7, 8))
    refuses(NOT_KNOWN, psi(strategy=strategy, model=model), others)


@pytest.mark.parametrize("strategy", ["secureboost", "federated-forest"])
def test_a_passive_party_cannot_echo_the_digest_of_another(psi, federation, monkeypatch, strategy):
    contexts = federation(bank=ids(0, 80), clinic=ids(0, 80), shop=ids(0, 80))
    seen = list[np.ndarray]()

    def echo(sender, letters):
        seen.extend(each.digest for _, each in letters if isinstance(each, CommonRows))
        own = dict(letters)
        if sender == "clinic" and isinstance(own.get("shop"), OrderDigest):
            own["shop"] = OrderDigest(seen[0])
        return list(own.items())

    rewrite_all_letters(monkeypatch, echo)
    rule = r"^clinic \(step \d+\): OrderDigest\.digest must be of the ids of shop: ids must be"
    refuses(rule, psi(strategy=strategy, parties=3), contexts)


def test_a_passive_party_answers_nothing_without_the_digests_of_all(psi, federation, monkeypatch):
    contexts = federation(bank=ids(0, 80), clinic=ids(0, 80), shop=ids(0, 80))
    keep_letters_back(monkeypatch, secureboost.SetupRequest, "shop")
    rule = r"^clinic \(step \d+\): OrderDigest\.letter must reach shop$"
    refuses(rule, psi(parties=3), contexts)


# Lists of invented ids


def test_a_list_beyond_the_ratio_of_the_site_is_not_matched(psi, federation):
    contexts = federation(bank=range(600_000, 620_000), shop=range(610_000, 610_300))
    rule = r"^shop \(step 2\): rows of bank must be <= {} rows, align-most-ratio of shop\), got {}$"
    refuses(rule.format(r"6000 \(20 x 300", 20_000), psi(), contexts)
    contexts = federation(bank=ids(0, 120), shop=ids(0, 60))
    contexts[1].node_config["align-most-ratio"] = 2
    run(psi(num_boost_round=1), contexts)
    contexts[1].node_config["align-most-ratio"] = 1
    refuses(rule.format(r"60 \(1 x 60", 120), psi(), contexts)


def test_a_few_rows_are_predicted_with_a_large_table_but_not_for_it(psi, federation):
    """The ratio holds at whoever is asked: the active party scores the rows that it wants to."""
    model = summary_of(run(psi(), federation(bank=ids(0, 100), shop=ids(0, 100))))["model_id"]
    few = psi(strategy="interactive", model=model)
    contexts = federation(bank=ids(0, 2), shop=ids(0, 100))
    assert summary_of(run(few, contexts))["matched_rows"] == {"predicted": 2}
    contexts[1].node_config["predict-min-rows"] = 3
    rule = (
        r"^shop \(step \d\): ids must have 3 rows in common at least \(predict-min-rows of shop\)"
    )
    refuses(rf"{rule}, got 2$", psi(strategy="interactive", model=model), contexts)


def test_no_list_is_larger_than_the_opening_says(psi, federation, monkeypatch):
    contexts = federation(bank=ids(0, 80), shop=ids(0, 80))
    rewrite_letters(monkeypatch, "MaskedList", "points", lambda points: np.repeat(points, 2, 0))
    rule = r"MaskedList\.points must be 80, as the opening has it of bank, got 160$"
    refuses(rf"^bank \(step \d\): {rule}", psi(), contexts)


def test_every_site_holds_all_lists_to_the_largest_that_the_opening_names(
    psi, federation, monkeypatch
):
    """What a person approves is what a party may bring, whatever that party lets itself bring."""
    contexts = federation(bank=ids(0, 80), shop=ids(0, 70))

    # The bank does not keep to it itself.
    def lax(*given, **how):
        return min(*given, **how) if how else 10**6

    check = Opening._check_sizes
    monkeypatch.setattr("clients.vertical.opening.min", lax, raising=False)
    monkeypatch.setattr(
        Opening, "_check_sizes", lambda party: check(party) if party.name == "shop" else None
    )
    rule = r"rows of bank must be <= 70 \(most_rows of the run's opening\), got 80$"
    refuses(rf"^shop \(step 2\): {rule}", psi(align_most_rows=70), contexts)


@pytest.mark.parametrize(("n_common", "warned"), [(9, True), (10, False)])
def test_the_site_that_is_asked_warns_of_a_list_of_which_few_ids_match(
    psi, federation, caplog, n_common, warned
):
    contexts = federation(bank=ids(0, 100), shop=ids(100 - n_common, 140))
    with caplog.at_level(logging.WARNING, "fedapp.site"):
        run(psi(num_boost_round=1), contexts)
    told = [one.getMessage() for one in caplog.records if one.name == "fedapp.site"]
    rule = f"100 ids of bank were matched with {40 + n_common} rows of shop, and only {n_common} "
    assert any(text.startswith(rule) for text in told) == warned
