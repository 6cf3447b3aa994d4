"""The matching of rows: attacks from the seat of a party, all refused, and left joins."""

import logging
from functools import wraps

import numpy as np
import pytest

from clients.vertical.opening import Opening, _digest
from clients.vertical.party import Aligned
from fedapp.errors import ConfigError, PartyError
from fedapp.messages import secureboost
from fedapp.messages.vertical import (
    ABSENT,
    CommonRows,
    MaskedList,
    MatchReply,
    OpenRequest,
    OrderDigest,
)
from fedapp.records.document import to_text
from fedapp.runs.local import run_local
from fedapp.runs.predict import load_model, predict
from fedapp.site.mail import Letters
from fedapp.site.table import secret_order
from strategies.run import load_strategy
from tests.encrypted import EINI, SMALL_KEY
from tests.federated import summary_of
from tests.forests import joined, pooled
from tests.letters import letters_sent
from tests.network import run
from tests.pooled import Pooled, assert_xgboosts
from tests.tables import write_rows
from tests.tampering import keep_letters_back, refuses, rewrite_all_letters, rewrite_letters
from tests.transcript import listen, predicted_rows

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
        return MatchReply(counts, *party.n_rows), letters

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


def test_a_method_that_does_not_compare_the_order_of_rows_cannot_end(psi, federation, monkeypatch):
    monkeypatch.setattr(Aligned, "check_order", lambda party, mail: None)
    with pytest.raises(PartyError, match="AssertionError"):
        run(psi(num_boost_round=1), federation(bank=ids(0, 80), shop=ids(0, 80)))


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


# join=left: rows of the party with the labels that others lack stay, their values missing


N_PEOPLE = 300
# Of the people 0 to 299, those that each party has. One row of the bank nobody else has.
ALL_BUT_ONE = {"bank": (0, 240), "shop": (1, 300)}
TWO = {"bank": (0, 240), "shop": (100, 300)}
THREE = {"bank": (0, 240), "clinic": (40, 280), "shop": (130, 300)}


@pytest.fixture
def left(settings, tmp_path):
    """``left(bank=(0, 240), shop=(100, 300))``: settings of a run on tables of these people, whose
    rows are in some order; the first party has the label."""
    rng = np.random.default_rng(5)
    values = rng.integers(0, 60, size=(N_PEOPLE, 6)).astype(float)
    values[rng.random(values.shape) < 0.05] = np.nan
    signal = np.nan_to_num(values).sum(axis=1) - 170 + 20 * rng.normal(size=N_PEOPLE)
    labels = (signal > 0).astype(int)

    def make(people, suffix="", **more):
        files = {}
        for number, (party, (first, last)) in enumerate(people.items()):
            rows = np.random.default_rng(number).permutation(np.arange(first, last))
            columns = {f"{party}-{k}": values[rows, 2 * number + k] for k in range(2)}
            label = {} if number else {"y": labels[rows]}
            ids = [f"{row:03d}{suffix if row < 50 else ''}" for row in rows]
            path = tmp_path / f"{party}{suffix}-{first}.csv"
            files[party] = write_rows(path, {"id": ids, **columns, **label})
        given = {"strategy": "secureboost", "data": ",".join(map(str, files.values()))}
        given |= {"parties": len(people), "label": "y", "id": "id", "join": "left", **SMALL_KEY}
        given |= {"num_boost_round": 3, "max_depth": 3, "allow_export": True, "max_bin": 32}
        return settings(**given | more)

    return make


@pytest.mark.by_default("interactive-*")
@pytest.mark.parametrize(
    ("way", "people"), [("one-round", ALL_BUT_ONE), ("eini", TWO), ("interactive", THREE)]
)
def test_a_model_is_that_of_the_left_joined_table_and_predicts_its_rows(left, way, people):
    trained = left(people)
    folder, whole = run_local(trained), Pooled(trained)
    assert len(whole.values) == 240
    assert np.isnan(whole.values[:, 2:]).all(axis=1).any()
    assert_xgboosts(folder, whole)
    assert sum(folder.summary["matched_rows"].values()) == 240
    if people is THREE:  # rows that all have, and those that the party with the labels has too
        assert folder.summary["matching"] == {
            "party-1": {"rows": 240, "matched": 110},
            "party-2": {"rows": 240, "matched": 200},
            "party-3": {"rows": 170, "matched": 110},
        }
    own = EINI if way == "eini" else {}
    how = {"strategy": way, "model": folder.summary["model_id"], **own}
    predicted = run_local(left(people, **how))
    due = predict(load_model(folder.path / "model.json"), whole.values)
    assert np.allclose(predicted_rows(predicted), due, rtol=0, atol=1e-6)
    assert predicted.summary["matched_rows"] == {"predicted": 240}


def test_a_forest_is_that_of_the_left_joined_table(left):
    section = {"trees": 4, "max_depth": 3, "insecure_small_key": True}
    more = {f"federated_forest__{name}": value for name, value in section.items()}
    given = left(THREE, strategy="federated-forest", allow_export=False, **more)
    assert to_text(joined(run_local(given))) == to_text(pooled(given)[0])


def nodes_of(given, names):
    """Node configs of sites with the tables of a simulated run."""
    files = zip(names, given.data.split(","), strict=True)
    labels = ["y", *[""] * (len(names) - 1)]
    nodes = [{"name": name, "data": path, "id": "id"} for name, path in files]
    more = {"allow-export": True, "share-column-names": True}
    return [{**node, "label": y, **more} for node, y in zip(nodes, labels, strict=True)]


@pytest.mark.parametrize(("fewest", "rule"), [(140, ""), (141, "141 training rows in common at")])
def test_rows_that_a_site_lacks_are_not_among_its_fewest(left, sites, fewest, rule):
    given = left(TWO, valid_fraction=0.0, test_fraction=0.0, num_boost_round=1)
    nodes = nodes_of(given, ["bank", "shop"])
    nodes[1]["min-rows"] = fewest
    if rule:
        rule = rf"^shop \(step \d\): ids must have {rule} least .*, got 140$"
        refuses(rule, given, sites(*nodes))
    else:
        assert run(given, sites(*nodes)).path.exists()


# What others learn


def places_of(given):
    """What each passive party gets of the matching."""
    app = listen(given)[1]
    letters = [letter for letter in letters_sent(app) if letter.name == "CommonRows"]
    assert all(not len(letter["common"]) for letter in letters)
    return {letter.receiver: letter["places"] for letter in letters}


def test_where_rows_without_partner_are_does_not_follow_from_ids(left):
    """Nobody who guesses an id can compare where it would be with where such rows are."""
    ids = np.array([f"{number:03d}" for number in range(200)])
    values = np.random.default_rng(1).normal(size=(200, 2)).astype(np.float32)
    labels = np.arange(200.0) % 2
    order = secret_order(ids, values, labels, 7)
    assert sorted(order.tolist()) == list(range(200))
    turned = np.random.default_rng(2).permutation(200)
    again = secret_order(ids[turned], values[turned], labels[turned], 7)
    assert ids[turned][again].tolist() == ids[order].tolist()
    flipped = labels.copy()
    flipped[3] = 1 - flipped[3]
    for other in (secret_order(ids, values, flipped, 7), secret_order(ids, values + 1, labels, 7)):
        assert (other == order).mean() < 0.1


def test_a_passive_party_gets_its_own_rows_and_a_count_of_others_whatever_their_ids(left):
    """Rows 0 to 39 are the bank's only; with other ids others get as many entries."""
    first, second = (places_of(left(THREE, suffix, num_boost_round=1)) for suffix in ("", "x"))
    for party, n_rows, n_matched in (("party-2", 240, 200), ("party-3", 170, 110)):
        assert (second[party] == ABSENT).sum() == 240 - n_matched
        assert len(first[party]) == 240
        present = first[party][first[party] != ABSENT]
        assert len(present) == len(set(present.tolist())) == n_matched
        assert present.max() < n_rows


# What is refused


def test_other_ways_to_match_and_to_predict_are_refused(settings):
    standing = {"strategy": "standing", "model": "0" * 16, "standing__service": "s"}
    for more, rule in (
        ({"align": "ordered"}, r"align=ordered.*, got left$"),
        (standing, r"standing, which needs rows that all parties have, got left$"),
    ):
        given = settings(**{"strategy": "secureboost", "join": "left", "parties": 2, **more})
        with pytest.raises(ConfigError, match=rf"^join must be inner with {rule}"):
            load_strategy(given.strategy)(given)


@pytest.mark.parametrize(
    "change",
    [
        lambda entries: entries[:-1],
        lambda entries: np.append(entries, np.int32(ABSENT)),
        lambda entries: np.full_like(entries, entries.max()),
        lambda entries: np.where(entries == entries.max(), np.int32(200), entries),
    ],
    ids=["short", "long", "twice", "beyond the list"],
)
def test_entries_that_cannot_be_are_refused_by_the_senders_name(left, monkeypatch, change):
    rewrite_letters(monkeypatch, "CommonRows", "places", change)
    rule = r"CommonRows\.places must be of the 240 rows of party-1, each of the list at most once$"
    refuses(rf"^party-1 \(step \d\): {rule}", left(TWO))


def test_entries_whose_ids_the_active_party_does_not_know_are_refused(left, monkeypatch):
    """It cannot let rows be used that it does not have."""

    def claim(entries):
        free = np.setdiff1d(np.arange(200, dtype=np.int32), entries)
        entries = entries.copy()
        entries[np.flatnonzero(entries == ABSENT)[0]] = free[0]
        return entries

    rewrite_letters(monkeypatch, "CommonRows", "places", claim)
    rule = r"CommonRows\.digest must be of the ids of party-2: ids must be those of party-1"
    refuses(rf"^party-1 \(step \d\): {rule}", left(TWO))


def test_tables_without_a_common_row_are_refused(left):
    apart = {"bank": (0, 240), "clinic": (40, 280), "shop": (240, 300)}
    refuses(r"ids must have 2 rows in common at least, got 0: see that", left(apart))


def test_a_server_cannot_join_otherwise_than_the_plan_says(left, sites, monkeypatch):
    given = left(TWO, join="inner")
    contexts = sites(*nodes_of(given, ["bank", "shop"]))
    monkeypatch.setattr(
        "strategies.vertical.OpenRequest",
        lambda *values, **more: OpenRequest(*values, **{**more, "join": "left"}),
    )
    refuses(r"^(bank|shop) \(step 2\): OpenRequest\.join must be inner", given, contexts)
