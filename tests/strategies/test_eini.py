"""Fed-EINI: interactive predictions in one encrypted round, and who breaks its rules."""

import itertools
import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from clients import eini as client
from clients.vertical.ciphertexts import EncryptedRows
from fedapp.crypto.paillier import decrypt, encrypt
from fedapp.crypto.paillier_keys import generate_key
from fedapp.crypto.sums import select_ciphertexts
from fedapp.crypto.workers import Workers
from fedapp.errors import ConfigError, PartyError
from fedapp.home import home
from fedapp.messages import eini
from fedapp.runs.local import run_local
from fedapp.site.store import PART_FILE, part_digest, read_part, write_part
from fedapp.trees.divided import PARTS, Lookup
from strategies.eini import Eini
from tests.encrypted import EINI, KINDS_OF_MODELS, encrypted, scored, written
from tests.federated import summary_of
from tests.forests import without_salt
from tests.letters import letters_sent
from tests.network import run
from tests.tables import deal_columns, made_columns, write_rows
from tests.tampering import FALSE, keep_letters_back, refuses, rewrite_all_letters, rewrite_letters
from tests.transcript import listen

# The predictions


@pytest.mark.by_default("binary:logistic-2-*")
@pytest.mark.each_value_once
@pytest.mark.parametrize("strategy", KINDS_OF_MODELS, indirect=True)
@pytest.mark.parametrize(
    ("objective", "parties"),
    [("binary:logistic", 2), ("multi:softprob", 4), ("reg:squarederror", 3)],
)
def test_predictions_are_those_of_the_interactive_way(train, settings, objective, parties):
    trained, _ = train(objective, parties=parties, num_boost_round=4)
    interactive = scored(settings, trained)
    summary = run_local(encrypted(settings, trained, eini__batch_rows=25)).summary
    np.testing.assert_allclose(written(summary), interactive, rtol=0, atol=1e-9)
    assert summary["batches"] == 3
    # hello, three to align; the first step of all, one more a party and a batch
    assert summary["exchanges"] == 5 + parties + summary["batches"]


# What crosses the wire


def test_no_ciphertext_comes_twice_or_unchanged(train, settings):
    trained, _ = train(parties=3)
    _, app = listen(encrypted(settings, trained))
    sent = {1: [], 2: [], 3: []}
    for letter in letters_sent(app):
        if "ciphertexts" in letter.content.arrays:
            sent[int(letter.sender[-1])] += [row.tobytes() for row in letter["ciphertexts"]]
    first, second, sums = sent.values()  # each party's to the next one
    every = [*first, *second, *sums]
    assert len(first) == len(second) > 1000
    assert 0 < len(sums) < len(first)
    assert len(set(every)) == len(every)
    assert not any(int.from_bytes(each, "big") in (0, 1) for each in every)


def test_the_sum_of_a_row_does_not_repeat_under_the_same_key(train, settings, monkeypatch):
    trained, _ = train()
    real, found = EncryptedRows.sums, list[tuple[bytes, ...]]()

    def sums_twice(*given):
        twice = [real(*given) for _ in range(2)]
        found.extend(tuple(map(bytes, each)) for each in twice)
        return twice[0]

    monkeypatch.setattr(EncryptedRows, "sums", sums_twice)
    run_local(encrypted(settings, trained, eini__batch_rows=25))
    assert len(found) == 2 * 3
    every = [sums for letter in found for sums in letter]
    assert len(set(every)) == len(every) > 6


def test_what_is_not_chosen_becomes_a_fresh_zero():
    key, workers = generate_key(256, insecure_small_key=True), Workers(1)
    rows = encrypt(key, [5, 6, 7], workers)
    once, again = (
        select_ciphertexts(key.public, rows, np.array([True, False, True]), workers)
        for _ in range(2)
    )
    assert decrypt(key, once, workers) == [5, 0, 7]
    found = {row.tobytes() for row in np.concatenate((rows, once, again))}
    assert len(found) == 9


# The guard


def flagged(path):
    """One column of 0 and 1 at the passive party: many trees, each with two ways, but the same."""
    rng = np.random.default_rng(3)
    columns, flag = rng.normal(size=(3, 120)).round(2), rng.integers(0, 2, 120)
    label = (columns.sum(axis=0) + 2 * flag > 1).astype(int)
    return str(write_rows(path, dict(zip("abcfy", [*columns, flag, label], strict=True))))


SKEWED = {"data": "breast-cancer", "label": "", "columns": "sizes:1,29"}


@pytest.mark.parametrize(
    ("trees", "least", "rule"),
    [
        ({}, 1e6, r"rows must have 1e\+06 ways through .*, got 120 of 120 .* eini.unguar"),
        (SKEWED, 2.0, r"trees must have splits of two parties, got \d with all"),
        (
            {"columns": "sizes:3,1"},
            3.0,
            "party-2 .*columns of this party must have 3 ways .*, got f",
        ),
        ({"columns": "sizes:3,1"}, 2.0, ""),
    ],
)
def test_rows_columns_and_trees_with_few_ways_are_refused(
    train, settings, tmp_path, trees, least, rule
):
    trained, _ = train(**{"data": flagged(tmp_path / "flag.csv"), **trees})
    guarded = {"eini__unguarded": False, "eini__least_possibilities": least}
    with pytest.raises(PartyError, match=rule) if rule else nullcontext():
        assert len(scored(settings, trained, "eini", **guarded)) == 120


@pytest.mark.parametrize(
    ("splits", "missing", "ways"),
    [
        ([(0, 1.0, 0)], False, 2),
        ([(0, 1.0, 0)], True, 2),  # a missing value goes as a large one
        ([(0, 1.0, 0), (0, 1.0, 1)], True, 3),
        ([(0, 1.0, 1), (0, 2.0, 0)], True, 4),
        ([(0, 1.0, 0), (1, 1.0, 0), (1, 5.0, 0)], False, 6),
    ],
)
def test_ways_through_splits_are_the_answers_that_some_values_give(splits, missing, ways):
    columns, thresholds, defaults = map(np.array, zip(*splits, strict=True))
    cuts = columns, thresholds.astype(np.float32), defaults.astype(np.uint8)
    lookup = Lookup(*cuts, np.zeros_like(columns), np.empty(0, np.uint8))  # no categories
    values = np.array([[0, 0], [np.nan if missing else 1, 3]], dtype=np.float32)
    records = np.arange(len(splits))
    assert lookup.n_ways(records, values) == ways
    # By trying values around every threshold.
    tried = [-1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 6.0, *([np.nan] if missing else [])]
    grid = np.array(list(itertools.product(tried, [-1, 1, 3, 5])), dtype=np.float32)
    assert len({tuple(lookup.sides(records, grid, row)) for row in range(len(grid))}) == ways


# What is refused


def test_a_structure_that_another_passive_party_sends_is_refused(train, settings, monkeypatch):
    trained, _ = train(parties=3)
    keep, seen = client.Passive._keep_structure, list[eini.Structure]()

    def keep_and_remember(party, part, letter, asked):
        if party.name == "party-2":
            seen.append(letter)
        keep(party, part, letter, asked)

    def write_more(sender, letters):
        # Beside a letter of its own: after its last one it has no key to seal any.
        lies = sender == "party-2" and letters
        return [*letters, *(("party-3", letter) for letter in seen if lies)]

    monkeypatch.setattr(client.Passive, "_keep_structure", keep_and_remember)
    rewrite_all_letters(monkeypatch, write_more)
    rule = r"party-2.*: Structure\.letter must come only from party-1"
    refuses(rule, encrypted(settings, trained))


def again(keep):
    return lambda *given: [keep(*given) for _ in range(2)]


def without_letters(begin):
    return lambda *given: begin(*given)[:0]


def with_other(field, change):
    def wrap(read):
        def changed(party, about, letter, *asked):
            other = replace(letter, **{field: change(getattr(letter, field))})
            return read(party, about, other, *asked)

        return changed

    return wrap


OF_MODEL = r"Structure\.lefts must be trees of this model, sent once"
ONE_SPLIT = with_other("records", lambda records: np.minimum(records, 0))
NEXT, FEWER_SENT = with_other("first_row", lambda _: 0), with_other("ciphertexts", lambda c: c[:-1])


@pytest.mark.parametrize(
    ("role", "method", "fault", "rule"),
    [
        (client.Passive, "_keep_structure", again, OF_MODEL),
        (client.Passive, "_keep_structure", ONE_SPLIT, OF_MODEL),
        (client.Passive, "_choose", NEXT, r"Elements\.first_row must be the next batch's"),
        (client.Passive, "_choose", FEWER_SENT, r"Elements\.ciphertexts must have size \d+"),
        (client.Active, "_begin", without_letters, r"Elements\.letter must come after the st"),
    ],
)
def test_structures_and_batches_that_do_not_fit_are_refused(
    train, settings, monkeypatch, role, method, fault, rule
):
    trained, _ = train()
    monkeypatch.setattr(role, method, fault(getattr(role, method)))
    refuses(rule, encrypted(settings, trained, eini__batch_rows=30))


def test_a_site_refuses_a_small_key_no_guard_and_too_few_parties(settings, sites, tmp_path):
    shares = {"bank": "aby", "shop": "cd", "clinic": "ef"}
    tables = deal_columns(made_columns("binary:logistic", 60), tmp_path, shares)
    labels = {"bank": "y", "shop": "", "clinic": ""}
    contexts = sites(*({"name": n, "data": tables[n], "label": labels[n]} for n in tables))
    given = {"align": "ordered", "federated_forest__trees": 2, "federated_forest__max_depth": 2}
    trained = run(settings(strategy="federated-forest", parties=3, **given), contexts)
    how = {"strategy": "eini", "model": trained.summary["model_id"], "align": "ordered"}
    rule = r"^bank .*: parties must be those of the model, got none named clinic$"
    with pytest.raises(PartyError, match=rule):
        run(settings(**how, **EINI, parties=2), contexts[:2])
    for context in contexts:
        context.node_config["allow-insecure"] = "false"
    rule = r"^bank \(step \d+\): {} must be {}, or allow-insecure true in the node config, got"
    few = {**EINI, "eini__key_bits": 2048, "eini__insecure_small_key": False}
    few |= {"eini__unguarded": False, "eini__least_possibilities": 999.0}
    for more, words in (
        (EINI, ("insecure-small-key", "false")),
        (few, ("least-possibilities", ">= 1000")),
    ):
        with pytest.raises(PartyError, match=rule.format(*words)):
            run(settings(**how, **more, parties=3), contexts)


def test_the_digest_of_a_part_says_nothing_of_what_is_in_it(train):
    _, folder = train()
    model = summary_of(folder)["model_id"]
    site = home() / "sites" / "party-2" / model
    first = part_digest(site)
    document = json.loads((site / PART_FILE).read_text())
    assert len(document["salt"]) == 64
    write_part(site, read_part(site, *PARTS))
    assert without_salt(json.loads((site / PART_FILE).read_text())) == without_salt(document)
    assert part_digest(site) != first


@pytest.mark.by_default("last-*")
@pytest.mark.parametrize("strategy", ["secureboost"], indirect=True)
@pytest.mark.parametrize("place", range(3), ids=["active", "first", "last"])
def test_a_run_ends_when_the_server_keeps_letters_back(train, settings, monkeypatch, place):
    trained, _ = train(parties=3)
    keep_letters_back(monkeypatch, eini.StepRequest, f"party-{place + 1}", first=1)
    rule = r"^party-3 .*: Totals\.letter must reach party-1 by now$"
    refuses(rule, encrypted(settings, trained))


@pytest.mark.by_default("zero-*", "too large-*", "one too few-*")
@pytest.mark.parametrize("strategy", ["secureboost"], indirect=True)
@pytest.mark.parametrize("change", FALSE)
def test_false_sums_of_the_last_party_are_refused(train, settings, monkeypatch, change):
    trained, _ = train()
    how, rule = FALSE[change]
    rewrite_letters(monkeypatch, "Totals", "ciphertexts", how)
    refuses(rf"^party-2 .*: Totals\.ciphertexts .*{rule}", encrypted(settings, trained))


def test_a_small_key_is_refused(settings):
    given = {"strategy": "eini", "model": "0" * 16, "eini__key_bits": 512}
    with pytest.raises(ConfigError, match=r"^eini.key-bits must be >= 2048 without eini.insecure"):
        Eini.section_settings(settings(**given))


@pytest.mark.parametrize("strategy", ["federated-forest"], indirect=True)
def test_a_key_too_small_for_the_classes_of_a_leaf_is_refused(train, settings):
    small = {"federated_forest__trees": 2, "federated_forest__max_depth": 2, "columns": "even"}
    trained, _ = train("multi:softprob", data="digits", label="", **small)
    match = r"eini.key-bits must be > 5[56]0 for 10 outputs of 5[56] bits, got 512"
    with pytest.raises(PartyError, match=match):
        run_local(encrypted(settings, trained))
