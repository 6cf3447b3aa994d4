"""What a dishonest party, server or table sends to Fed-EINI, and that the run ends by its name."""

import json
from dataclasses import replace

import numpy as np
import pytest

from clients import eini as client
from fedapp.client_app import SiteApp
from fedapp.errors import ConfigError, PartyError
from fedapp.home import home
from fedapp.messages import eini
from fedapp.runs.local import run_local
from fedapp.site.store import PART_FILE, part_digest, read_part, write_part
from fedapp.trees.divided import PARTS
from strategies.eini import Eini
from tests.encrypted import SMALL, encrypted
from tests.federated import summary_of
from tests.forests import move_thresholds, without_salt
from tests.network import run
from tests.strategies.test_interactive import inference, written
from tests.tampering import FALSE, keep_letters_back, refuses, rewrite_all_letters, rewrite_letters
from tests.transcript import arrays_of, rewrite

# What is refused


def test_a_part_of_another_model_is_refused(train, settings):
    trained, folder = train()
    path = home() / "sites" / "party-2" / summary_of(folder)["model_id"] / PART_FILE
    move_thresholds(path.parent)
    with pytest.raises(PartyError, match="party-2: model must be the one this run was trained"):
        run_local(encrypted(settings, trained))


def parcels_in(message):
    """The bytes of all parcels of a message."""
    return arrays_of(message)["parcels"]


class Tampering(SiteApp):
    """A relay that changes the parcels of one party's messages from a step on."""

    def __init__(self, change, node):
        super().__init__()
        self._change, self._node = change, node
        self.last = None

    def __call__(self, message, context):
        is_step = message.metadata.message_type.endswith("eini_step")
        if is_step and context.node_id == self._node and len(parcels := parcels_in(message)):
            rewrite(message, parcels=self._change(parcels.copy()))
        return super().__call__(message, context)


@pytest.mark.parametrize("node", [2, 3])
def test_a_parcel_with_one_bit_flipped_is_refused(train, settings, node):
    trained, _ = train()

    def flip(data):
        data[len(data) // 2] ^= 1
        return data

    with pytest.raises(
        PartyError, match=r"parcel.content must be sealed by party-. for party-. in this run"
    ):
        run(encrypted(settings, trained), app=Tampering(flip, node))


def test_a_parcel_that_comes_again_is_refused(train, settings):
    trained, _ = train()

    class Replaying(Tampering):
        def __call__(self, message, context):
            is_step = message.metadata.message_type.endswith("eini_step")
            if is_step and context.node_id == self._node and len(parcels_in(message)):
                if self.last is None:
                    self.last = message.content
                else:
                    message.content = self.last
                    message.content.config_records["envelope"]["step"] += 1
            return SiteApp.__call__(self, message, context)

    with pytest.raises(PartyError, match=r"parcel\.step must be a new one, got one seen before"):
        run(
            encrypted(settings, trained, eini__batch_rows=30),
            app=Replaying(lambda data: data, 3),
        )


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
    with pytest.raises(
        PartyError, match=r"party-2.*: Structure\.letter must come only from party-1"
    ):
        run(encrypted(settings, trained))


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    "sent",
    [
        lambda letter: [letter, letter],
        lambda letter: [replace(letter, records=np.minimum(letter.records, 0))],
    ],
    ids=["twice", "one split everywhere"],
)
def test_a_structure_that_comes_twice_or_has_a_split_twice_is_refused(
    train, settings, monkeypatch, sent
):
    trained, _ = train()
    keep = client.Passive._keep_structure

    def keep_all(party, part, letter, asked):
        for each in sent(letter):
            keep(party, part, each, asked)

    monkeypatch.setattr(client.Passive, "_keep_structure", keep_all)
    with pytest.raises(
        PartyError, match=r"Structure\.lefts must be trees of this model, sent once"
    ):
        run(encrypted(settings, trained))


def test_a_batch_that_is_not_the_next_one_is_refused(train, settings, monkeypatch):
    trained, _ = train()
    choose = client.Passive._choose

    def choose_first(party, sender, letter):
        return choose(party, sender, replace(letter, first_row=0))

    monkeypatch.setattr(client.Passive, "_choose", choose_first)
    with pytest.raises(PartyError, match=r"Elements\.first_row must be the next batch's"):
        run(encrypted(settings, trained, eini__batch_rows=30))


@pytest.mark.slow
def test_a_site_refuses_a_small_key_and_no_guard_unless_its_node_config_allows_them(
    settings, sites, write_table
):
    shop = {"a": None, "b": None, "y": None, "c": range(40)}
    contexts = sites(
        {"name": "bank", "data": write_table("bank")},
        {"name": "shop", "data": write_table("shop", **shop), "label": ""},
    )
    given = {"parties": 2, "align": "ordered", "num_boost_round": 2, "max_depth": 2}
    small = {f"secureboost__{name}": value for name, value in SMALL.items()}
    trained = run(settings(strategy="secureboost", **given, **small), contexts)
    for context in contexts:
        context.node_config["allow-insecure"] = "false"
    rule = r"^bank \(step \d+\): {}, or allow-insecure true in the node config, got"
    with pytest.raises(PartyError, match=rule.format("insecure-small-key must be false")):
        run(settings(strategy="secureboost", **given, **small), contexts)
    given = {"strategy": "eini", "parties": 2, "align": "ordered", "eini__key_bits": 2048}
    given["model"] = summary_of(trained)["model_id"]
    with pytest.raises(PartyError, match=rule.format("unguarded must be false")):
        run(settings(**given, eini__unguarded=True), contexts)
    with pytest.raises(PartyError, match=rule.format("least-possibilities must be >= 1000")):
        run(settings(**given, eini__least_possibilities=999.0), contexts)


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


@pytest.mark.slow
@pytest.mark.by_default("first-*", "last-*")
@pytest.mark.parametrize("strategy", ["secureboost"], indirect=True)
@pytest.mark.parametrize("place", range(3), ids=["active", "first", "last"])
def test_a_run_ends_when_the_server_keeps_letters_back(train, settings, monkeypatch, place):
    trained, _ = train(parties=3)
    keep_letters_back(monkeypatch, eini.StepRequest, f"party-{place + 1}", first=1)
    rule = r"^party-3 .*: Totals\.letter must reach party-1 by now$"
    refuses(rule, encrypted(settings, trained))


@pytest.mark.parametrize("strategy", ["secureboost"], indirect=True)
def test_a_batch_that_comes_before_the_structure_is_refused(train, settings, monkeypatch):
    trained, _ = train()
    begin = client.Active._begin

    def begin_without(*given):
        begin(*given)
        return []

    monkeypatch.setattr(client.Active, "_begin", begin_without)
    rule = r"^party-1 .*: Elements\.letter must come after the structure$"
    refuses(rule, encrypted(settings, trained))


@pytest.mark.by_default("zero-*", "too large-*", "one too few-*")
@pytest.mark.parametrize("strategy", ["secureboost"], indirect=True)
@pytest.mark.parametrize("change", FALSE)
def test_false_sums_of_the_last_party_are_refused(train, settings, monkeypatch, change):
    trained, _ = train()
    how, rule = FALSE[change]
    rewrite_letters(monkeypatch, "Totals", "ciphertexts", how)
    refuses(rf"^party-2 .*: Totals\.ciphertexts .*{rule}", encrypted(settings, trained))


@pytest.mark.slow
@pytest.mark.by_default("eini")
@pytest.mark.parametrize("inference", ["interactive", "one-round", "eini"])
def test_a_model_without_one_of_its_parties_is_refused(settings, sites, write_table, inference):
    tables = {
        "bank": {"b": None},
        "shop": {"a": None, "b": None, "y": None, "c": range(40)},
        "clinic": {"a": None, "y": None},
    }
    contexts = sites(
        *({"name": name, "data": write_table(name, **table)} for name, table in tables.items())
    )
    for context in contexts[1:]:
        context.node_config["label"] = ""
    given = {"align": "ordered", "federated_forest__trees": 2, "federated_forest__max_depth": 2}
    trained = run(settings(strategy="federated-forest", parties=3, **given), contexts)
    model = summary_of(trained)["model_id"]
    small = {f"eini__{name}": value for name, value in {**SMALL, "unguarded": True}.items()}
    few = settings(strategy=inference, model=model, parties=2, align="ordered", **small)
    rule = r"^bank .*: parties must be those of the model, got none named clinic$"
    with pytest.raises(PartyError, match=rule):
        run(few, contexts[:2])


@pytest.mark.slow
def test_another_number_of_elements_is_refused(train, settings, monkeypatch):
    trained, _ = train(parties=3)
    real = client.select_ciphertexts
    monkeypatch.setattr(client, "select_ciphertexts", lambda *given: real(*given)[:-1])
    with pytest.raises(
        PartyError, match=r"party-2 .*: Elements.ciphertexts must be \d+ for each of"
    ):
        run_local(encrypted(settings, trained))


def test_a_small_key_is_refused(settings):
    given = {"strategy": "eini", "model": "0" * 16, "eini__key_bits": 512}
    with pytest.raises(ConfigError, match=r"^eini.key-bits must be >= 2048 without eini.insecure"):
        Eini.section_settings(settings(**given))
    with pytest.raises(ConfigError, match="model must be the id of a trained model"):
        Eini.section_settings(settings(strategy="eini"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["federated-forest"], indirect=True)
def test_a_key_too_small_for_the_classes_of_a_leaf_is_refused(train, settings):
    small = {"federated_forest__trees": 2, "federated_forest__max_depth": 2, "columns": "even"}
    trained, _ = train("multi:softprob", data="digits", label="", **small)
    match = r"eini.key-bits must be > 5[56]0 for 10 outputs of 5[56] bits, got 512"
    with pytest.raises(PartyError, match=match):
        run_local(encrypted(settings, trained))
    found = written(summary_of(run_local(encrypted(settings, trained, eini__key_bits=562))))
    plain = inference(settings, trained, align="ordered", columns=trained.columns)
    expected = written(summary_of(run_local(plain)))
    assert found.shape == (1797, 10)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
