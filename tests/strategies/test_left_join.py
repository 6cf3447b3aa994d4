"""join=left: rows of the party with the labels that others lack stay, their values missing."""

import numpy as np
import pytest

from fedapp.errors import ConfigError
from fedapp.messages.vertical import ABSENT, OpenRequest
from fedapp.records.document import load, to_text
from fedapp.runs.local import run_local
from fedapp.runs.predict import load_model, predict_table
from fedapp.site.table import common_order, secret_order
from fedapp.trees.model import Ensemble
from strategies.run import load_strategy
from tests.federated import summary_of
from tests.forests import joined, pooled
from tests.letters import letters_sent
from tests.network import run
from tests.pooled import Pooled, assert_xgboosts
from tests.tables import write_rows
from tests.tampering import refuses, rewrite_letters
from tests.transcript import listen, predicted_rows

N_PEOPLE = 300
SMALL_KEY = {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True}
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


@pytest.mark.slow
@pytest.mark.by_default("three")
@pytest.mark.parametrize("people", [ALL_BUT_ONE, TWO, THREE], ids=["one row", "two", "three"])
def test_a_model_is_that_of_the_left_joined_table(left, people):
    given = left(people, num_boost_round=4)
    folder, whole = run_local(given), Pooled(given)
    assert len(whole.values) == 240
    assert np.isnan(whole.values[:, 2:]).all(axis=1).any()
    assert_xgboosts(folder, whole)
    assert sum(summary_of(folder)["matched_rows"].values()) == 240


@pytest.mark.slow
@pytest.mark.by_default("own0")
@pytest.mark.parametrize("own", [{}, {"labels": "paillier", "key_bits": 256}])
def test_a_forest_is_that_of_the_left_joined_table(left, own):
    section = {"trees": 4, "max_depth": 3, "insecure_small_key": True, **own}
    more = {f"federated_forest__{name}": value for name, value in section.items()}
    given = left(THREE, strategy="federated-forest", allow_export=False, **more)
    folder = run_local(given)
    assert to_text(joined(folder)) == to_text(pooled(given)[0])


def nodes_of(given, names):
    """Node configs of sites with the tables of a simulated run."""
    files = zip(names, given.data.split(","), strict=True)
    labels = ["y", *[""] * (len(names) - 1)]
    nodes = [{"name": name, "data": path, "id": "id"} for name, path in files]
    more = {"allow-export": True, "share-column-names": True}
    return [{**node, "label": y, **more} for node, y in zip(nodes, labels, strict=True)]


@pytest.mark.slow
def test_sites_grow_the_trees_of_a_simulation(left, sites):
    given = left(THREE)
    contexts = sites(*nodes_of(given, ["bank", "clinic", "shop"]))
    models = [run_local(given), run(left(THREE), contexts)]
    first, second = (load(folder.path / "model.json", Ensemble) for folder in models)
    for tree, other in zip(first.trees, second.trees, strict=True):
        assert tree.tobytes() == other.tobytes()


@pytest.mark.slow
def test_rows_that_a_site_lacks_are_not_among_its_fewest(left, sites):
    given = left(TWO, valid_fraction=0.0, test_fraction=0.0)
    nodes = nodes_of(given, ["bank", "shop"])
    for fewest, refused in ((140, False), (141, True)):
        nodes[1]["min-rows"] = fewest
        settings = left(TWO, valid_fraction=0.0, test_fraction=0.0, num_boost_round=1)
        if refused:
            rule = r"ids must have 141 training rows in common at least .*, got 140$"
            refuses(rf"^shop \(step \d\): {rule}", settings, sites(*nodes))
        else:
            assert run(settings, sites(*nodes)).path.exists()


@pytest.mark.slow
def test_rates_are_of_each_partys_rows(left):
    summary = summary_of(run_local(left(THREE, num_boost_round=1)))
    assert summary["matching"] == {
        # Those that all have, and those that the party with the labels has too.
        "party-1": {"rows": 240, "matched": 110},
        "party-2": {"rows": 240, "matched": 200},
        "party-3": {"rows": 170, "matched": 110},
    }
    inner = summary_of(run_local(left(THREE, num_boost_round=1, join="inner")))
    assert {name: one["matched"] for name, one in inner["matching"].items()} == dict.fromkeys(
        ("party-1", "party-2", "party-3"), 110
    )


@pytest.mark.slow
@pytest.mark.by_default("interactive")
@pytest.mark.parametrize("strategy", ["interactive", "one-round", "eini"])
def test_every_row_of_the_active_party_is_predicted(left, strategy):
    trained = left(THREE)
    folder, whole = run_local(trained), Pooled(trained)
    more = {"eini__key_bits": 512, "eini__insecure_small_key": True, "eini__unguarded": True}
    how = {"strategy": strategy, "model": summary_of(folder)["model_id"]}
    predicted = run_local(left(THREE, **how, **more if strategy == "eini" else {}))
    model, predict = load_model(folder.path / "model.json")
    due = predict(model, whole.values, None)
    assert np.allclose(predicted_rows(predicted), due, rtol=0, atol=1e-6)
    assert summary_of(predicted)["matched_rows"] == {"predicted": 240}


@pytest.mark.slow
def test_a_whole_model_predicts_rows_that_others_lack(left, tmp_path):
    trained = left(TWO)
    folder, whole = run_local(trained), Pooled(trained)
    names = ["party-1", "party-2"]
    data = ",".join(map("=".join, zip(names, trained.data.split(","), strict=True)))
    result = predict_table(folder.path, data, "id", tmp_path / "out.csv")
    assert (result.n_rows, list(result.unmatched)) == (240, [])
    lines = (tmp_path / "out.csv").read_text().splitlines()[1:]
    found = np.array([float(line.split(",")[1]) for line in lines])
    model, predict = load_model(folder.path / "model.json")
    due = predict(model, whole.values, None)
    assert np.allclose(found, due[:, 0], rtol=0, atol=1e-7)


# What others learn


def places_of(given):
    """What each passive party gets of the matching."""
    app = listen(given)[1]
    letters = [letter for letter in letters_sent(app) if letter.name == "CommonRows"]
    assert all(not len(letter["common"]) for letter in letters)
    return {letter.receiver: letter["places"] for letter in letters}


@pytest.mark.slow
def test_a_passive_party_gets_its_own_rows_and_a_count_of_others(left):
    places = places_of(left(THREE, num_boost_round=1))
    for party, n_rows, n_matched in (("party-2", 240, 200), ("party-3", 170, 110)):
        entries = places[party]
        assert len(entries) == 240
        present = entries[entries != ABSENT]
        assert len(present) == len(set(present.tolist())) == n_matched
        assert present.max() < n_rows


def test_where_rows_without_partner_are_does_not_follow_from_ids(left):
    """Nobody who guesses an id can compare where it would be with where such rows are."""
    ids = np.array([f"{number:03d}" for number in range(200)])
    values = np.random.default_rng(1).normal(size=(200, 2)).astype(np.float32)
    labels = np.arange(200.0) % 2
    order = secret_order(ids, values, labels, 7)
    assert sorted(order.tolist()) == list(range(200))
    assert order.tolist() == secret_order(ids, values, labels, 7).tolist()
    turned = np.random.default_rng(2).permutation(200)
    again = secret_order(ids[turned], values[turned], labels[turned], 7)
    assert ids[turned][again].tolist() == ids[order].tolist()
    flipped = labels.copy()
    flipped[3] = 1 - flipped[3]
    others = [
        secret_order(ids, values, flipped, 7),
        secret_order(ids, values + 1, labels, 7),
        secret_order(ids, values, labels, 8),
        common_order(ids.tolist(), 7),
    ]
    for other in others:
        assert (other == order).mean() < 0.1


@pytest.mark.slow
def test_other_ids_of_rows_without_partner_change_no_count(left):
    """Rows 0 to 49 are the bank's only; with other ids the shop gets as many entries, and the same
    of its rows."""
    first, second = (places_of(left(TWO, suffix, num_boost_round=1)) for suffix in ("", "x"))
    for party, entries in first.items():
        assert (entries == ABSENT).sum() == (second[party] == ABSENT).sum() == 100


# What is refused


def test_other_ways_to_match_and_to_predict_are_refused(settings):
    cases = [
        ({"align": "ordered"}, r"^join must be inner with align=ordered.*, got left$"),
        (
            {"strategy": "standing", "model": "0" * 16, "standing__service": "s"},
            r"^join must be inner with standing, which needs rows that all parties have, got left$",
        ),
    ]
    for more, rule in cases:
        given = settings(**{"strategy": "secureboost", "join": "left", "parties": 2, **more})
        with pytest.raises(ConfigError, match=rule):
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
