"""Fed-EINI: the predictions of the interactive way, in one encrypted round."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from flwr.app import Context, Message
from typer.testing import CliRunner

from clients import eini as client
from clients import eini_active
from fedapp.cli import cli
from fedapp.client_app import SiteApp
from fedapp.config import Settings
from fedapp.crypto.keys import PrivateKey, PublicKey, generate_key
from fedapp.crypto.paillier import decrypt, encrypt
from fedapp.crypto.sealed import Address, unseal
from fedapp.crypto.sums import choose
from fedapp.crypto.workers import Workers
from fedapp.errors import ConfigError, PartyError
from fedapp.home import home
from fedapp.messages import eini
from fedapp.messages.parcels import Parcels, pack_parcels
from fedapp.run_folder import RunFolder
from fedapp.site import mail
from fedapp.site.answer import Site
from fedapp.trees.candidates import are_trees, candidates, skeleton
from fedapp.trees.parts import PART, Lookup, part_digest, read_part, write_part
from fedapp.wire.codec import from_records, put_together
from simulations.engines import run_local, run_simulation
from strategies.eini import Eini
from tests.deployed import write_csv
from tests.forests import without_salt
from tests.network import run
from tests.tampering import FALSE, refuses, rewrite_letters
from tests.test_exactness import made_table
from tests.test_interactive import inference, written
from tests.test_secureboost import CREDIT, DEFAULT, first_rows
from tests.transcript import ORDERED, check_declared, listen, summary_of

MakeSettings = Callable[..., Settings]
Trained = tuple[Settings, RunFolder]
Train = Callable[..., Trained]
SMALL = {"key_bits": 512, "insecure_small_key": True}
KINDS = {
    **ORDERED,
    "evaluate.eini_step": (eini.StepRequest, eini.StepReply),
}


@pytest.fixture(params=["secureboost", "federated-forest"])
def strategy(request: pytest.FixtureRequest) -> str:
    """Both kinds of models, for the tests of ``train``."""
    return str(request.param)


@pytest.fixture
def train(settings: MakeSettings, strategy: str, tmp_path: Path) -> Train:
    """A trained model of 6 trees of depth 3, and its settings."""

    def make(objective: str = "binary:logistic", **more: Any) -> Trained:
        data = tmp_path / f"{objective[:5]}.csv"
        if not data.exists():
            made_table(data, objective, n_values=40, n_rows=120)
        given = {"data": str(data), "label": "y", "objective": objective, "parties": 2}
        given |= {"max_depth": 3, "num_boost_round": 6, "align": "ordered", "columns": "random"}
        given |= {f"secureboost__{name}": value for name, value in SMALL.items()}
        given |= {"federated_forest__trees": 6, "federated_forest__max_depth": 3}
        trained = settings(strategy=strategy, **{**given, **more})
        return trained, run_local(trained)

    return make


def encrypted(settings: MakeSettings, trained: Settings, **more: Any) -> Settings:
    """Settings of an encrypted prediction of the rows the model was trained on."""
    given = {f"eini__{name}": value for name, value in {**SMALL, "unguarded": True}.items()}
    plain = {"align": "ordered", "columns": trained.columns, **given, **more}
    return inference(settings, trained, **plain).model_copy(update={"strategy": "eini"})


class Letters:
    """Every letter that a run's sites open, with its receiver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[tuple[str, str, Any]] = []
        real = mail.read_mail

        def read(site: Site, request: Parcels) -> mail.Mail:
            found = real(site, request)
            for sender, content in found._letters:
                self.opened.append((sender, site.name, content))
            return found

        for module in (client, eini_active):
            monkeypatch.setattr(module, "read_mail", read)

    def ciphertexts(self, sender: str, receiver: str) -> list[bytes]:
        return [
            row.tobytes()
            for origin, end, content in self.opened
            if (origin, end) == (sender, receiver) and "ciphertexts" in content.arrays
            for row in content.arrays["ciphertexts"]
        ]


# The predictions


@pytest.mark.parametrize(
    ("objective", "parties"),
    [
        ("binary:logistic", 2),
        ("binary:logistic", 3),
        ("binary:logistic", 4),
        ("multi:softprob", 3),
        ("reg:squarederror", 2),
    ],
)
def test_predictions_are_those_of_the_interactive_way(
    train: Train, settings: MakeSettings, objective: str, parties: int
) -> None:
    trained, _ = train(objective, parties=parties)
    plain = inference(settings, trained, align="ordered")
    interactive = written(summary_of(run_local(plain)))
    summary = summary_of(run_local(encrypted(settings, trained, eini__batch_rows=50)))
    np.testing.assert_allclose(written(summary), interactive, rtol=0, atol=1e-9)
    assert summary["batches"] == 3
    # hello, three to align; the first step of all, one more a party and a batch
    assert summary["exchanges"] == 4 + parties + summary["batches"]


@pytest.mark.parametrize("source", [CREDIT, DEFAULT], ids=["give-me-some-credit", "default-credit"])
@pytest.mark.parametrize(
    ("strategy", "parties"),
    [("secureboost", 2), ("secureboost", 3), ("secureboost", 4), ("federated-forest", 3)],
    indirect=["strategy"],
)
def test_predictions_of_real_rows_are_those_of_the_interactive_way(
    real_data: Path, train: Train, settings: MakeSettings, tmp_path: Path, source: Any, parties: int
) -> None:
    name, label, numbers = source
    data = first_rows(real_data / name, 200, tmp_path / "rows.csv", drop=numbers)
    trained, _ = train(data=data, label=label, parties=parties, max_depth=4)
    plain = inference(settings, trained, align="ordered", columns=trained.columns)
    interactive = written(summary_of(run_local(plain)))
    assert len(np.unique(interactive)) > 30
    summary = summary_of(run_local(encrypted(settings, trained)))
    assert summary["entries"] > 10
    np.testing.assert_allclose(written(summary), interactive, rtol=0, atol=1e-9)


@pytest.mark.parametrize("strategy", ["secureboost"], indirect=True)
def test_simulation_predicts_like_the_local_engine(
    train: Train, settings: MakeSettings, tmp_path: Path
) -> None:
    trained, _ = train(parties=3)
    local = written(summary_of(run_local(encrypted(settings, trained))))
    simulated = encrypted(settings, trained, run_dir=str(tmp_path / "simulated"))
    summary = summary_of(run_simulation(simulated))
    assert summary["entries"] > 0
    np.testing.assert_array_equal(written(summary), local)


def test_a_skeleton_keeps_what_passive_parties_split() -> None:
    #        0
    #      1   2        1 is passive, 2 and 0 are the active party's
    #     3 4 5 6
    lefts = np.array([1, 3, 5, -1, -1, -1, -1], dtype=np.int32)
    is_passive = np.array([False, True, False, False, False, False, False])
    found = skeleton(lefts, is_passive)
    assert found.lefts.tolist() == [1, 3, -1, -1, -1]
    assert found.sources.tolist() == [0, 1, 2, 3, 4]
    sides = {1: np.array([True, False])}
    assert candidates(found.lefts, sides, 2).tolist() == [[True, True, False], [True, False, True]]
    own = {0: np.array([True, False])}
    assert candidates(found.lefts, own, 2).tolist() == [[False, True, True], [True, False, False]]


# What crosses the wire


def test_messages_hold_what_their_module_lists(train: Train, settings: MakeSettings) -> None:
    trained, _ = train(parties=3)
    _, app = listen(encrypted(settings, trained))
    check_declared(app, KINDS)


def test_no_ciphertext_comes_twice_or_unchanged(
    train: Train, settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, _ = train(parties=3)
    letters = Letters(monkeypatch)
    run_local(encrypted(settings, trained))
    first = letters.ciphertexts("party-1", "party-2")
    second = letters.ciphertexts("party-2", "party-3")
    sums = letters.ciphertexts("party-3", "party-1")
    every = [*first, *second, *sums]
    assert len(first) == len(second) > 1000
    assert 0 < len(sums) < len(first)
    assert len(set(every)) == len(every)
    assert not any(int.from_bytes(each, "big") in (0, 1) for each in every)


def test_the_sum_of_a_row_does_not_repeat_under_the_same_key(
    train: Train, settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, _ = train()
    real, found = client._totals, list[tuple[bytes, ...]]()

    def totals_twice(site: Site, letter: eini.Elements, key: PublicKey, chosen: Any) -> Any:
        letters = [real(site, letter, key, chosen) for _ in range(2)]
        found.extend(tuple(map(bytes, each.ciphertexts)) for each in letters)
        return letters[0]

    monkeypatch.setattr(client, "_totals", totals_twice)
    run_local(encrypted(settings, trained, eini__batch_rows=50))
    assert len(found) == 2 * 3
    every = [sums for letter in found for sums in letter]
    assert len(set(every)) == len(every) > 6


def test_what_is_not_chosen_becomes_a_fresh_zero() -> None:
    key, workers = generate_key(256, insecure_small_key=True), Workers(1)
    rows = encrypt(key, [5, 6, 7], workers)
    once, again = (
        choose(key.public, rows, np.array([True, False, True]), workers) for _ in range(2)
    )
    assert decrypt(key, once, workers) == [5, 0, 7]
    found = {row.tobytes() for row in np.concatenate((rows, once, again))}
    assert len(found) == 9


def test_the_active_party_cannot_open_what_passive_parties_send_each_other(
    train: Train, settings: MakeSettings
) -> None:
    trained, _ = train(parties=3)
    _, app = listen(encrypted(settings, trained))
    own = mail.identity("party-1")
    n_tried = 0
    for request, _ in app.of_kind("eini_step"):
        if request.metadata.dst_node_id != 4:  # party-3
            continue
        envelope, content = from_records(request.content, "party-3")
        message = put_together(eini.StepRequest, content, "party-3")
        for sender, parcel in mail.unpack_parcels(message):
            step = int.from_bytes(parcel[: mail.STEP_BYTES], "little")
            address = Address(envelope.model_id, sender, "party-3", step)
            origin = mail.box_key(sender).tobytes()
            receiver = mail.identity("party-3")
            assert unseal(receiver, origin, address, parcel[mail.STEP_BYTES :])
            for peer in ("party-2", "party-3") if sender == "party-2" else ():
                n_tried += 1
                public = mail.box_key(peer).tobytes()
                with pytest.raises(ValueError, match="parcel must be sealed for this address"):
                    unseal(own, public, address, parcel[mail.STEP_BYTES :])
    assert n_tried


# The guard


def test_rows_with_few_ways_through_the_trees_are_refused(
    train: Train, settings: MakeSettings
) -> None:
    trained, _ = train(data="breast-cancer", label="", num_boost_round=4, max_depth=3)
    match = r"rows must have 1e\+06 ways through .*, got 569 of 569 .* eini.unguarded=true predicts"
    with pytest.raises(PartyError, match=match):
        run_local(
            encrypted(
                settings, trained, eini__unguarded=False, eini__least_possibilities=1_000_000.0
            )
        )


def test_trees_of_one_passive_party_are_refused(train: Train, settings: MakeSettings) -> None:
    trained, _ = train(data="breast-cancer", label="", columns="sizes:1,29", num_boost_round=3)
    match = r"trees must have splits of two parties, got \d with all splits at one"
    with pytest.raises(PartyError, match=match):
        run_local(encrypted(settings, trained, eini__unguarded=False))


def test_a_model_of_many_ways_passes_the_guard(train: Train, settings: MakeSettings) -> None:
    trained, _ = train(data="breast-cancer", label="", num_boost_round=4, max_depth=3)
    guarded = encrypted(settings, trained, eini__unguarded=False, eini__least_possibilities=2.0)
    assert len(written(summary_of(run_local(guarded)))) == 569


@pytest.mark.parametrize(
    ("splits", "missing", "ways"),
    [
        ([(0, 1.0, 0)], False, 2),
        ([(0, 1.0, 0)], True, 2),  # a missing value goes as a large one
        ([(0, 1.0, 0), (0, 1.0, 0)], True, 2),
        ([(0, 1.0, 0), (0, 1.0, 1)], True, 3),
        ([(0, 1.0, 0), (0, 2.0, 0)], True, 3),
        ([(0, 1.0, 1), (0, 2.0, 0)], False, 3),
        ([(0, 1.0, 1), (0, 2.0, 0)], True, 4),
        ([(0, 1.0, 0), (1, 1.0, 0), (1, 5.0, 0)], False, 6),
    ],
)
def test_ways_through_splits_are_the_answers_that_some_values_give(
    splits: list[tuple[int, float, int]], missing: bool, ways: int
) -> None:
    columns, thresholds, defaults = map(np.array, zip(*splits, strict=True))
    lookup = Lookup(columns, thresholds.astype(np.float32), defaults.astype(np.uint8))
    values = np.array([[0, 0], [np.nan if missing else 1, 3]], dtype=np.float32)
    records = np.arange(len(splits))
    assert lookup.n_ways(records, values) == ways
    # By trying values around every threshold.
    tried = [-1.0, 1.0, 1.5, 2.0, 3.0, 5.0, 6.0, *([np.nan] if missing else [])]
    grid = np.array(list(itertools.product(tried, [-1, 1, 3, 5])), dtype=np.float32)
    assert len({tuple(lookup.sides(records, grid, row)) for row in range(len(grid))}) == ways


def test_columns_whose_values_have_few_ways_through_their_splits_are_refused(
    train: Train, settings: MakeSettings, tmp_path: Path
) -> None:
    # One column of 0 and 1 at the passive party: many trees, each with two ways, but the same two.
    rng = np.random.default_rng(3)
    columns = rng.normal(size=(3, 120)).round(2)
    flag = rng.integers(0, 2, 120)
    label = (columns.sum(axis=0) + 2 * flag > 1).astype(int)
    data = write_csv(
        tmp_path / "flag.csv", dict(zip("abcfy", [*columns, flag, label], strict=True))
    )
    trained, _ = train(data=data, columns="sizes:3,1", max_depth=3)
    given = {"eini__unguarded": False, "eini__least_possibilities": 3.0}
    match = r"party-2 .*own columns must have 3 ways through the own splits .*, got fewer; eini.ung"
    with pytest.raises(PartyError, match=match):
        run_local(encrypted(settings, trained, **given))
    given["eini__least_possibilities"] = 2.0
    assert len(written(summary_of(run_local(encrypted(settings, trained, **given))))) == 120


# What is refused


def test_a_part_of_another_model_is_refused(train: Train, settings: MakeSettings) -> None:
    trained, folder = train()
    path = home() / "sites" / "party-2" / summary_of(folder)["model_id"] / PART
    part = json.loads(path.read_text())
    part["records"][0][1] += 1.0
    path.write_text(json.dumps(part) + "\n")
    with pytest.raises(PartyError, match="party-2: model must be the one this run was trained"):
        run_local(encrypted(settings, trained))


class Tampering(SiteApp):
    """A relay that changes the parcels of one party's messages from a step on."""

    def __init__(self, change: Callable[[np.ndarray], np.ndarray], node: int) -> None:
        super().__init__()
        self._change, self._node = change, node
        self.last: Any = None

    def __call__(self, message: Message, context: Context) -> Message:
        arrays = message.content.array_records["arrays"]
        is_step = message.metadata.message_type.endswith("eini_step")
        if is_step and context.node_id == self._node and len(arrays["parcels"].data):
            bits = np.frombuffer(arrays["parcels"].data, dtype=np.uint8)
            arrays["parcels"].data = self._change(bits.copy()).tobytes()
        return super().__call__(message, context)


@pytest.mark.parametrize("node", [2, 3])
def test_a_parcel_with_one_bit_flipped_is_refused(
    train: Train, settings: MakeSettings, node: int
) -> None:
    trained, _ = train()

    def flip(data: np.ndarray) -> np.ndarray:
        data[len(data) // 2] ^= 1
        return data

    with pytest.raises(PartyError, match=r"parcel.content parcel must be sealed for this address"):
        run(encrypted(settings, trained), app=Tampering(flip, node))


def test_a_parcel_that_comes_again_is_refused(train: Train, settings: MakeSettings) -> None:
    trained, _ = train()

    class Replaying(Tampering):
        def __call__(self, message: Message, context: Context) -> Message:
            arrays = message.content.array_records["arrays"]
            is_step = message.metadata.message_type.endswith("eini_step")
            if is_step and context.node_id == self._node:
                if self.last is not None and len(arrays["parcels"].data):
                    message.content = self.last
                    message.content.config_records["envelope"]["step"] += 1  # type: ignore[operator]
                elif len(arrays["parcels"].data):
                    self.last = message.content
            return SiteApp.__call__(self, message, context)

    with pytest.raises(PartyError, match=r"parcel\.step must be a new one, got one seen before"):
        run(
            encrypted(settings, trained, eini__batch_rows=30),
            app=Replaying(lambda data: data, 3),
        )


def test_a_structure_that_another_passive_party_sends_is_refused(
    train: Train, settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, _ = train(parties=3)
    keep, write, seen = client._keep_structure, client.write_mail, []

    def keep_and_remember(site: Site, letter: eini.Structure, asked: eini.StepRequest) -> None:
        if site.name == "party-2":
            seen.append(letter)
        keep(site, letter, asked)

    def write_more(site: Site, letters: Any) -> dict[str, Any]:
        forged = [("party-3", letter) for letter in seen] if site.name == "party-2" else []
        return write(site, [*letters, *forged])

    monkeypatch.setattr(client, "_keep_structure", keep_and_remember)
    monkeypatch.setattr(client, "write_mail", write_more)
    with pytest.raises(
        PartyError, match=r"party-2.*: Structure\.letter must come from party-1 alone"
    ):
        run(encrypted(settings, trained))


@pytest.mark.parametrize(
    "sent",
    [
        lambda letter: [letter, letter],
        lambda letter: [replace(letter, records=np.minimum(letter.records, 0))],
    ],
    ids=["twice", "one split everywhere"],
)
def test_a_structure_that_comes_twice_or_has_a_split_twice_is_refused(
    train: Train,
    settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    sent: Callable[[eini.Structure], list[eini.Structure]],
) -> None:
    trained, _ = train()
    keep = client._keep_structure

    def keep_all(site: Site, letter: eini.Structure, asked: eini.StepRequest) -> None:
        for each in sent(letter):
            keep(site, each, asked)

    monkeypatch.setattr(client, "_keep_structure", keep_all)
    with pytest.raises(
        PartyError, match=r"Structure\.lefts must be trees of this model, sent once"
    ):
        run(encrypted(settings, trained))


def test_a_batch_that_is_not_the_next_one_is_refused(
    train: Train, settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, _ = train()
    choose = client._choose

    def choose_first(site: Site, sender: str, letter: eini.Elements) -> Any:
        return choose(site, sender, replace(letter, first_row=0))

    monkeypatch.setattr(client, "_choose", choose_first)
    with pytest.raises(PartyError, match=r"Elements\.first_row must be the next batch's"):
        run(encrypted(settings, trained, eini__batch_rows=30))


def test_a_site_refuses_a_small_key_and_no_guard_unless_its_node_config_allows_them(
    settings: MakeSettings, sites: Callable[..., Any], write_table: Callable[..., Path]
) -> None:
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


def test_the_digest_of_a_part_says_nothing_of_what_is_in_it(train: Train) -> None:
    _, folder = train()
    model = summary_of(folder)["model_id"]
    site = home() / "sites" / "party-2" / model
    first = part_digest(site)
    document = read_part(site)
    assert len(document["salt"]) == 64
    write_part(site, document)
    assert without_salt(read_part(site)) == without_salt(document)
    assert part_digest(site) != first


@pytest.mark.parametrize("strategy", ["secureboost"], indirect=True)
@pytest.mark.parametrize("place", range(3), ids=["active", "first", "last"])
def test_a_run_ends_when_the_server_keeps_letters_back(
    train: Train, settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    trained, _ = train(parties=3)
    requests = itertools.count()

    def without_parcels(**given: Any) -> eini.StepRequest:
        exchange, receiver = divmod(next(requests), 3)
        kept = pack_parcels([]) if exchange and receiver == place else {}
        return eini.StepRequest(**given | kept)

    monkeypatch.setattr("strategies.eini.StepRequest", without_parcels)
    rule = r"^party-3 .*: Totals\.letter must reach party-1 by now$"
    refuses(rule, encrypted(settings, trained))


@pytest.mark.parametrize("strategy", ["secureboost"], indirect=True)
def test_a_batch_that_comes_before_the_structure_is_refused(
    train: Train, settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, _ = train()
    begin = eini_active._begin

    def begin_without(*given: Any) -> Any:
        begin(*given)
        return []

    monkeypatch.setattr(eini_active, "_begin", begin_without)
    rule = r"^party-1 .*: Elements\.letter must come after the structure$"
    refuses(rule, encrypted(settings, trained))


@pytest.mark.parametrize("strategy", ["secureboost"], indirect=True)
@pytest.mark.parametrize("change", FALSE)
def test_false_sums_of_the_last_party_are_refused(
    train: Train, settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    trained, _ = train()
    how, rule = FALSE[change]
    rewrite_letters(monkeypatch, "clients.eini", "Totals", "ciphertexts", how)
    refuses(rf"^party-2 .*: Totals\.ciphertexts .*{rule}", encrypted(settings, trained))


@pytest.mark.parametrize("inference", ["interactive", "one-round", "eini"])
def test_a_model_without_one_of_its_parties_is_refused(
    settings: MakeSettings,
    sites: Callable[..., Any],
    write_table: Callable[..., Path],
    inference: str,
) -> None:
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


def test_another_number_of_elements_is_refused(
    train: Train, settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, _ = train(parties=3)
    real = client.choose
    monkeypatch.setattr(client, "choose", lambda *given: real(*given)[:-1])
    with pytest.raises(
        PartyError, match=r"party-2 .*: Elements.ciphertexts must be \d+ for each of"
    ):
        run_local(encrypted(settings, trained))


def test_a_small_key_is_refused(settings: MakeSettings) -> None:
    given = {"strategy": "eini", "model": "0" * 16, "eini__key_bits": 512}
    with pytest.raises(ConfigError, match=r"^eini.key-bits must be >= 2048 without eini.insecure"):
        Eini.own_settings(settings(**given))
    with pytest.raises(ConfigError, match="model must be the id of a trained model"):
        Eini.own_settings(settings(strategy="eini"))


@pytest.mark.parametrize("strategy", ["federated-forest"], indirect=True)
def test_a_key_too_small_for_the_classes_of_a_leaf_is_refused(
    train: Train, settings: MakeSettings
) -> None:
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


@pytest.mark.parametrize(
    "lefts",
    [
        [1, -1],  # no right child
        [1, 0, -1],  # a child before its parent
        [-1, -1],  # two roots
        [1, 1, -1, -1],  # a node of two parents
        [3, -1, -1, -1, -1],  # nodes of no parent
    ],
)
def test_nodes_that_are_no_tree_are_told_from_a_tree(lefts: list[int]) -> None:
    tree = [1, -1, 3, -1, -1]
    assert are_trees(np.array([*tree, -1, *tree]), np.array([5, 6, 11]))
    assert not are_trees(np.array(lefts), np.array([len(lefts)]))
    assert not are_trees(np.array([*tree, *lefts]), np.array([5, 5 + len(lefts)]))
    assert not are_trees(np.array(tree), np.array([4]))
    assert not are_trees(np.array(tree), np.array([0, 5]))


def test_keys_come_back_from_their_arrays() -> None:
    key = generate_key(256, insecure_small_key=True)
    assert PrivateKey.from_array(key.to_array()) == key
    assert PublicKey.from_array(key.public.to_array()) == key.public
    assert key.public.to_array().shape == (32,)


def test_the_command_predicts_under_encryption(
    train: Train, settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained, folder = train()
    small = [
        f"-ceini.{name.replace('_', '-')}={str(value).lower()}" for name, value in SMALL.items()
    ]
    arguments = ["predict", str(folder.path), "--data", trained.data, "--output", "out.parquet"]
    result = CliRunner().invoke(
        cli, [*arguments, "--inference", "eini", "-ceini.unguarded=true", *small]
    )
    assert result.exit_code == 0, result.output
    assert "120 rows written to out.parquet" in result.output
    table = pq.read_table("out.parquet")
    assert table.column_names[0] == "row"
    found = np.column_stack([table[name].to_numpy() for name in table.column_names[1:]])
    ran = summary_of(RunFolder(next(Path("runs").glob("*-eini"))))
    place = home() / "sites" / "party-1" / ran["model_id"] / "predictions.parquet"
    assert pq.read_table(place) == table
    interactive = inference(settings, trained, align="ordered")
    expected = written(summary_of(run_local(interactive)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
