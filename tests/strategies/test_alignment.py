"""Alignment: the rows that all parties have, in one order, found without telling anyone an id."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from clients.vertical.opening import Secret, _shuffle
from fedapp.conversation import ask
from fedapp.crypto.psi import DST, mask_ids
from fedapp.crypto.sealed import fingerprint_of
from fedapp.data.partition import SUBSETS, split_rows
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import ProtocolError
from fedapp.home import home
from fedapp.messages import vertical as messages
from fedapp.messages.vertical import VerticalHelloReply, VerticalHelloRequest
from fedapp.messages.wire import Envelope, to_content
from fedapp.records.codec import codec_of
from fedapp.site.account import note
from fedapp.site.mail import box_key, seal_mail, write_letters
from fedapp.site.settings import site_config
from fedapp.site.store import Store
from fedapp.site.table import Holdout, common_order, split_common
from strategies.vertical import VerticalStrategy, align
from tests.federated import summary_of
from tests.letters import hash_messages, letters_sent, raw_of
from tests.network import run
from tests.plans import planned
from tests.pooled import Pooled, assert_xgboosts, in_order
from tests.sites import answer
from tests.tables import write_rows
from tests.tampering import refuses, rewrite_letters, set_last_bit
from tests.transcript import Listener

N_PEOPLE = 260
PEOPLE = [f"customer {number:03d}" for number in range(N_PEOPLE)]


def shuffled(ids, seed):
    return [ids[place] for place in np.random.default_rng(seed).permutation(len(ids))]


@pytest.fixture
def federation(tmp_path, sites):
    """``federation(bank=ids, shop=ids, ...)``: sites with two columns of these people each; the
    bank has the label. A person's values are the same wherever the row stands."""
    rng = np.random.default_rng(8)
    values = rng.normal(size=(N_PEOPLE, 6)).round(3)
    labels = (values.sum(axis=1) + rng.normal(size=N_PEOPLE) > 0).astype(int)

    def make(**ids):
        names = sorted({name for own in ids.values() for name in own}, key=str)
        people = {name: place for place, name in enumerate(names)}
        nodes = []
        for number, (party, own) in enumerate(ids.items()):
            rows = [people[name] for name in own]
            columns = {f"{party}-{k}": values[rows, 2 * number + k] for k in range(2)}
            label = {"y": labels[rows]} if party == "bank" else {}
            path = write_rows(tmp_path / f"{party}.csv", {"customer": own, **columns, **label})
            nodes.append({"name": party, "data": path, "id": "customer", "allow-export": True})
            nodes[-1]["label"] = "y" if label else ""
        return sites(*nodes)

    return make


@pytest.fixture
def vertical(vertical):
    """``vertical`` with rows matched by private set intersection."""
    return lambda **overrides: vertical(**{"align": "psi", **overrides})


def whole(settings, contexts):
    """The joined table of these sites."""
    nodes = sorted((dict(one.node_config) for one in contexts), key=lambda node: node["name"])
    tables = [
        load_table(Path(str(node["data"])), Roles(label=str(node["label"]), id_column="customer"))
        for node in nodes
    ]
    return Pooled(settings, in_order(tables))


def matched(folder):
    return sum(summary_of(folder)["matched_rows"].values())


# Which rows

NUMBERED = "id column [withheld] counts the rows of the table, so that rows are matched by their"
FEW_OF = "only {} rows are matched, fewer than half, of {} of bank, {} of shop"
# Ids of the bank and of the shop, and of what a run warns.
WARNED = {
    "numbers from 0": (range(60), range(60), [NUMBERED]),
    "numbers from 2": (range(2, 62), range(2, 62), []),
    "numbers in another order": (range(60), [*range(30, 60), *range(30)], [f"bank: {NUMBERED}"]),
    "49 of 100": (PEOPLE[:100], PEOPLE[51:151], [FEW_OF.format(49, 100, 100)]),
    "half of both": (PEOPLE[:100], PEOPLE[50:150], []),
}


@pytest.mark.parametrize(("bank", "shop", "told"), WARNED.values(), ids=WARNED)
def test_ids_that_number_rows_and_few_matched_rows_are_warned_of(
    vertical, federation, bank, shop, told
):
    folder = run(vertical(num_boost_round=1), federation(bank=bank, shop=shop))
    marks, warnings = ("are matched, fewer", "counts the rows"), summary_of(folder)["warnings"]
    found = [text for text in warnings if any(mark in text for mark in marks)]
    assert all(text.startswith(rule) for text, rule in zip(found, told, strict=True))


def test_a_model_of_partly_overlapping_tables_is_that_of_the_rows_all_have(vertical, federation):
    tables = {  # the active party is not the first by name
        "acme": shuffled(PEOPLE[50:], 1),
        "bank": shuffled(PEOPLE, 2),
        "shop": PEOPLE[:220],
    }
    contexts = federation(**tables)
    settings = vertical(parties=3, num_boost_round=3, max_depth=3)
    folder, joined = run(settings, contexts), whole(settings, contexts)
    assert matched(folder) == 170
    assert summary_of(folder)["parties"] == [
        {"name": name, "rows": len(tables[name])} for name in sorted(tables)
    ]
    assert_xgboosts(folder, joined)


def test_ids_may_be_any_text_in_any_form(vertical, federation):
    same = [f'"ü, 北京 {number}"' for number in range(40)]
    # The last two are one letter in two forms, and one number.
    bank = [*same, "7", "a", "b c", "\u00e9", "8.0"]
    shop = ["07", "A", "b  c", "e\u0301", "8", *same]
    assert matched(run(vertical(), federation(bank=bank, shop=shop))) == 42


# What is refused


ID = r"id column \[withheld\] must"
FEW = r"ids must have 2 rows in common at least, got {}: see .*; 7 and 007 differ$"


UNMATCHED = {
    "repeated": ([*PEOPLE[:60], *PEOPLE[:3], PEOPLE[0]], {}, f"{ID} be unique .*, got 7 "),
    "missing": ([*PEOPLE[:58], "", "NaN"], {}, f"{ID} have no missing values, got 2 of 60 rows"),
    "none": (range(60), {"id": ""}, r'id must name .* by, as in id="customer"$'),
    "another column": (PEOPLE[:60], {"id": "person"}, f"{ID} be in the table"),
    "more rows": (
        PEOPLE[:70],
        *({}, "align-most-rows must be >= the rows of every party, 70 at shop, got 64$"),
    ),
    "nobody in common": (PEOPLE[60:120], {}, FEW.format(0)),
    "one in common": (PEOPLE[59:120], {}, FEW.format(1)),
}


@pytest.mark.parametrize(("ids", "more", "rule"), UNMATCHED.values(), ids=UNMATCHED)
def test_ids_that_cannot_be_matched_are_refused_by_column_and_number(
    vertical, federation, ids, more, rule
):
    contexts = federation(bank=PEOPLE[:60], shop=ids)
    contexts[1].node_config.update(more)
    party = "bank" if "in common" in rule else "shop"
    refuses(rf"^{party} \(step \d\): {rule}", vertical(align_most_rows=64), contexts)


def test_ids_are_matched_without_spaces_around_and_whatever_their_type(
    vertical, federation, tmp_path
):
    people = [10**15 + 7 * place for place in range(60)]
    contexts = federation(bank=[f" {name} " for name in people], shop=people)
    path = tmp_path / "shop.csv"
    table = csv.read_csv(path).drop_columns("customer")
    numbers = pa.array([float(name) for name in people])
    parquet.write_table(table.append_column("customer", numbers), path.with_suffix(".parquet"))
    contexts[1].node_config["data"] = str(path.with_suffix(".parquet"))
    folder = run(vertical(), contexts)
    assert matched(folder) == 60
    note = "id column [withheld] has spaces around values, removed"
    assert any(note in fact for fact in summary_of(folder)["facts"])


def test_bits_of_rows_that_are_not_there_are_refused_by_the_senders_name(
    vertical, federation, monkeypatch
):
    contexts = federation(bank=PEOPLE[:60], shop=PEOPLE[:60])
    rewrite_letters(monkeypatch, "CommonRows", "common", set_last_bit)
    match = r"^bank \(step \d\): CommonRows\.common must be 0 past the 60 rows$"
    refuses(match, vertical(), contexts)


# Rows that are in order already


def test_rows_with_ids_may_stand_in_any_order(vertical, federation):
    contexts = federation(bank=PEOPLE[:90], shop=shuffled(PEOPLE[:90], 1))
    settings = vertical(align="ordered", num_boost_round=3, max_depth=3)
    assert_xgboosts(run(settings, contexts), whole(settings, contexts))


# What is told


def forms_of(ids, seed):
    """Ids, their points and hashes, as they must not leave a site."""
    texts, key = [one.encode() for one in ids], seed.to_bytes(8, "little")
    digests = [hashlib.new(name, text) for name in ("md5", "sha256", "blake2b") for text in texts]
    return [
        *texts,
        *(point.tobytes() for point in hash_messages(texts, DST)),
        *(hashlib.blake2b(text, key=key, digest_size=16).digest() for text in texts),
        *(digest.hexdigest().encode() for digest in digests),
        *(digest.digest()[:16] for digest in digests),
    ]


@pytest.mark.by_default("psi")
@pytest.mark.parametrize("align", ["psi", "ordered"])
def test_ids_are_in_no_message_and_no_letter_and_lists_cannot_be_compared(
    vertical, federation, align
):
    ids = [f"customer-{number * 7919 % 100003:05d}" for number in range(90)]
    tables = {"bank": ids[:80], "clinic": ids[:80], "shop": ids[:80]}
    if align == "psi":
        tables = {"bank": ids[:80], "clinic": ids[5:], "shop": shuffled(ids, 1)}
    runs = []
    for _ in range(2):
        app, settings = Listener(), vertical(parties=3, align=align, num_boost_round=1)
        folder, letters = run(settings, federation(**tables), app), letters_sent(app)
        seen = b"|".join(raw_of(message) for _, *pair in app.heard for message in pair)
        seen += b"|".join(letter.raw for letter in letters)
        assert not [one for one in forms_of(ids, settings.seed) if one in seen]
        lists = [letter for letter in letters if letter.name == "MaskedList"]
        runs.append({point.tobytes() for each in lists for point in each["points"]})
    if align == "ordered":
        return
    kinds = {line["step"]: line["type"] for line in folder.ledger}
    assert sum(kind.startswith("query.alignment") for kind in kinds.values()) == 3 + 2
    assert len(runs[0]) >= 3 * 80
    assert not runs[0] & runs[1]  # masked anew in every run
    for party in ("clinic", "shop"):  # only the active one sees a point twice
        own = [each["points"] for each in lists if party in (each.sender, each.receiver)]
        points = [point.tobytes() for each in own for point in each]
        assert len(points) > 3 * 80
        assert len(set(points)) == len(points)


# Whom a site trusts


def pinned(federation, **prints):
    """Three sites, of which the bank trusts these fingerprints alone."""
    contexts = federation(bank=PEOPLE[:150], clinic=PEOPLE[50:], shop=PEOPLE)
    trusted = ", ".join(f"{name}:{words}" for name, words in prints.items())
    contexts[0].node_config["trusted"] = trusted
    return contexts


def print_of(name):
    return fingerprint_of(box_key(name).tobytes())


def test_a_site_takes_part_with_those_whose_keys_it_trusts(vertical, federation):
    trusted = {name: print_of(name) for name in ("clinic", "shop")}
    assert matched(run(vertical(parties=3), pinned(federation, **trusted))) == 100


@pytest.mark.parametrize("prints", [["clinic"], ["clinic", "bank"]], ids=["none", "another"])
def test_a_site_refuses_a_key_that_it_does_not_trust(vertical, federation, prints):
    names = dict(zip(["clinic", "shop"], map(print_of, prints), strict=False))
    known, got = names.get("shop", "none is pinned"), print_of("shop")
    rule = rf"^shop .*: parcel\.key must be one bank trusts \({known}\), got {got}; if 'fedapp "
    refuses(rule, vertical(parties=3), pinned(federation, **names))


def test_a_run_that_is_opened_twice_is_refused(vertical, federation, monkeypatch):
    def twice(*given):
        yield from align(*given)
        return (yield from align(*given))

    monkeypatch.setattr("strategies.vertical.align", twice)
    refuses(
        r"OpenRequest\.message must come at most once by the plan that opened the run",
        vertical(parties=3),
        pinned(federation),
    )


def test_a_run_that_trains_cannot_pass_for_one_that_predicts(vertical, federation, monkeypatch):
    """The fewest rows hold for training alone: to name an old model later does not lift them."""
    contexts = federation(bank=PEOPLE[:60], shop=PEOPLE[:60])
    old = summary_of(run(vertical(), contexts))["model_id"]
    contexts[1].node_config["min-rows"] = "100"

    def greeted_again(parties, *given):
        again = replace(opened[0], model=old)
        yield from ask(parties.all(again), VerticalHelloReply)
        return (yield from align(parties, *given))

    opened, greeting = list[VerticalHelloRequest](), VerticalStrategy.greeting

    def noted(strategy):
        opened.append(greeting(strategy))
        return opened[0]

    monkeypatch.setattr(VerticalStrategy, "greeting", noted)
    monkeypatch.setattr("strategies.vertical.align", greeted_again)
    match = r"VerticalHelloRequest\.model must be '', as when the run was opened"
    refuses(rf"^(bank|shop) \(step 2\): {match}", vertical(), contexts)


@pytest.mark.parametrize(
    ("field", "change", "rule"),
    [
        ("names", lambda _: ("clinic", "mallory", "shop"), "names must be distinct and incl"),
        ("active", lambda _: "mallory", r"OpenRequest\.active must be among the names"),
        ("box_keys", lambda keys: keys[::-1], "key must be the one that the site sent, g"),
    ],
)
def test_an_opening_that_cannot_be_true_is_refused(
    vertical, federation, monkeypatch, field, change, rule
):
    opening = messages.OpenRequest

    def changed(*given, **named):
        request = opening(*given, **named)
        return replace(request, **{field: change(getattr(request, field))})

    monkeypatch.setattr("strategies.vertical.OpenRequest", changed)
    refuses(rule, vertical(parties=3), pinned(federation))


class Colluders:
    """A coordinator that talks to the clinic, and reads and writes in the name of the shop.

    Steps: 1 the greeting, 2 the opening, 3 a list for the clinic to mask.
    """

    MODEL, METHOD = "0123456789abcdef", "secureboost"

    def __init__(self, contexts):
        nodes = [{**one.node_config, "allow": self.METHOD} for one in contexts]
        configs = [site_config(node, {}) for node in nodes]
        self._configs = {config.name: config for config in configs}
        plan = planned(self._configs, aggregation="sealed")
        greeting = VerticalHelloRequest(True, 1000, 3, "", False, 0.2, **plan)
        hellos = [self.ask(name, greeting, 1) for name in self._configs]
        how = {"ordered": False, "test_fraction": 0.2, "valid_fraction": 0.0, "seed": 3}
        self.opening = messages.OpenRequest(
            tuple(self._configs),
            "bank",
            np.stack([one.arrays["box_key"] for one in hellos]),
            np.stack([one.arrays["run_key"] for one in hellos]),
            np.array([one.scalars["n_table"] for one in hellos]),
            **how,
        )
        for name in self._configs:
            self.ask(name, self.opening, 2)

    def ask(self, name, request, step, parcels=(), **more):
        envelope = Envelope(self.MODEL, step, method=self.METHOD, **more)
        content = to_content(request, name, parcels)
        return answer(self._configs[name], request.kind, envelope, content)

    def masked(self, ids, attempt, step=3):
        """The clinic's answer to a list of the shop's, after a step back to the opening."""
        store = Store.open(home() / "sites" / "shop" / self.MODEL)
        note(store, starts=tuple((one, 2) for one in range(1, attempt + 1)))
        points = mask_ids(ids, store.read("secret", codec_of(Secret)).scalar)
        letter = write_letters("shop", [("clinic", messages.MaskedList("shop", 1, points))])
        envelope = Envelope(self.MODEL, step, attempt=attempt, method=self.METHOD)
        parcels = [("shop", one) for _, one in seal_mail("shop", store, envelope, letter)]
        more = {"attempt": attempt, "checkpoint": 2}
        return self.ask("clinic", messages.MaskRequest(), step, parcels, **more)


def test_a_step_back_does_not_let_another_list_be_masked(federation):
    """Lists of the coordinator's choice would else be held against a party's ids one by one."""
    both = Colluders(federation(bank=PEOPLE[:20], clinic=PEOPLE[5:25], shop=PEOPLE[:20]))
    both.masked(PEOPLE[:20], attempt=0)
    rule = r"^clinic: MaskRequest.content must be what it was before the run was resumed; begin "
    for attempt in range(1, 6):
        with pytest.raises(ProtocolError, match=rule):
            both.masked(PEOPLE[20 * attempt :][:20], attempt)
    # To before the opening, which draws another scalar and is told the same.
    both.ask("clinic", both.opening, 3, attempt=6, checkpoint=1)
    both.masked(PEOPLE[:20], attempt=7)
    with pytest.raises(ProtocolError, match=rule):
        both.masked(PEOPLE[1:21], attempt=8)


# Which rows are held back


@pytest.mark.parametrize("is_share", [True, False])
def test_shared_rows_are_drawn_by_their_numbers_and_others_by_their_places_in_the_order(is_share):
    rows, holdout = np.arange(100), Holdout(0.3, 0.25, 7)
    split = split_common(rows, PEOPLE[:100], holdout, is_share)
    order, drawn = common_order(PEOPLE[:100], 7), split_rows(100, 0.3, 0.25, 7)
    for subset in SUBSETS:
        found, places = getattr(split, subset), getattr(drawn, subset)
        expected = places if is_share else np.sort(order[places])
        np.testing.assert_array_equal(np.sort(found), expected)
        assert (np.diff(np.argsort(order)[found]) > 0).all()


def test_the_order_of_a_list_is_drawn_by_the_operating_system(monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", None)
    orders = [_shuffle(1000) for _ in range(2)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(1000))
    assert not np.array_equal(*orders)
    drawn = b"".join(number.to_bytes(8, "little") for number in (1, 2, 3, 5, 5, 4))
    monkeypatch.setattr("clients.vertical.opening.secrets.token_bytes", lambda n: drawn[:n])
    assert _shuffle(3).tolist() == [2, 0, 1]  # the last 64 bits first, of equals the others
    assert _shuffle(0).tolist() == []
