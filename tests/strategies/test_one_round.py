"""One-round prediction: the classical way's predictions, the passive parties asked once."""

import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

import strategies.vertical
from fedapp.errors import PartyError
from fedapp.messages import inference as messages
from fedapp.messages.vertical import OpenRequest
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.trees.cells import Crossing, cells_of_rows, compress, decompress, open_cells, share_open
from fedapp.trees.divided import Lookup, Nesting
from fedapp.trees.model import LEAF
from tests.federated import summary_of
from tests.forests import part_of
from tests.letters import letters_sent
from tests.strategies.test_interactive import written
from tests.tables import made_columns, write_rows
from tests.tampering import rewrite_letters
from tests.transcript import ALIGNED, check_declared, listen

KINDS = {
    **ALIGNED,
    "evaluate.one_round_walk": (messages.CellsRequest, messages.CellsReply),
    "evaluate.one_round_intersect": (messages.IntersectRequest, messages.IntersectReply),
}


@pytest.fixture
def train(settings, tmp_path, trained_once):
    """A forest of 5 trees, and its settings."""

    def make(objective="binary:logistic", **more):
        data = tmp_path / f"{objective[:5]}.csv"
        if not data.exists():
            write_rows(data, made_columns(objective, n_rows=301))
        given = {"strategy": "federated-forest", "data": str(data), "label": "y", "parties": 2}
        given |= {"federated_forest__trees": 5, "federated_forest__max_depth": 4}
        run = settings(**given | {"objective": objective, "align": "ordered", **more})
        return run, trained_once(run)

    return make


def prediction(make, trained, **more):
    """Settings of a run that predicts the rows the model was trained on."""
    model = summary_of(RunFolder(Path(trained.run_dir)))["model_id"]
    given = {"strategy": "one-round", "data": trained.data, "parties": trained.parties}
    return make(**given | {"model": model, "align": "ordered", **more})


def test_messages_have_their_declared_fields_and_cells_go_to_the_active_party_only(train, settings):
    trained, _ = train(parties=3, align="psi")
    folder, app = listen(prediction(settings, trained, align="psi"))
    check_declared(app, KINDS)
    letters = letters_sent(app)
    cells = {(one.sender, one.receiver) for one in letters if one.name == "Cells"}
    assert cells == {("party-2", "party-1"), ("party-3", "party-1")}
    assert summary_of(folder)["matched_rows"] == {"predicted": 301}


@pytest.mark.slow
def test_cells_travel_compressed(train, settings):
    trained, folder = train(federated_forest__trees=50)
    n_splits = len(part_of("party-2", summary_of(folder)["model_id"])["lookup"]["columns"])
    _, app = listen(prediction(settings, trained))
    (cells,) = [one["cells"] for one in letters_sent(app) if one.name == "Cells"]
    assert len(cells) < 0.6 * 2 * n_splits * 301 / 8


# Boosted models

WAYS = {
    "two classes": {},
    "three classes, three parties": {"objective": "multi:softprob", "parties": 3},
    "more than 64 leaves": {"max_depth": 7, "min_child_weight": 0.0, "num_boost_round": 2},
    "rounds lost by early stopping": {
        "num_boost_round": 12,
        "early_stopping_rounds": 3,
        "eta": 1.0,
    },
    "numbers": {"objective": "reg:squarederror", "secureboost__first_trees": 1},
}


@pytest.mark.by_default("three classes, three parties")
@pytest.mark.parametrize("given", WAYS.values(), ids=WAYS)
def test_scores_of_a_boosted_model_have_the_bits_of_interactive_inference(
    vertical, settings, tmp_path, given
):
    more = {"objective": "binary:logistic", "max_depth": 3, "num_boost_round": 3, **given}
    columns = made_columns(more["objective"], n_rows=400)
    columns["town"] = np.random.default_rng(0).choice(["Oslo", "Rome", "Bern", ""], 400)
    data = write_rows(tmp_path / "rows.csv", columns)
    trained = vertical(data=str(data), label="y", **more)
    run_local(trained)
    found = [
        written(summary_of(run_local(prediction(settings, trained, strategy=way))))
        for way in ("one-round", "interactive")
    ]
    assert len(found[0]) == 400
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
def test_an_initial_models_trees_are_scored_too(vertical, settings, tmp_path):
    data = write_rows(tmp_path / "rows.csv", made_columns("binary:logistic", n_rows=200))
    given = {"data": str(data), "label": "y", "objective": "binary:logistic", "num_boost_round": 2}
    first = run_local(vertical(**given, max_depth=3))
    more = {"init_model": str(first.path), "scale_pos_weight": 1.0, "num_boost_round": 4}
    trained = vertical(**{**given, **more}, max_depth=2)
    run_local(trained)
    found = [
        written(summary_of(run_local(prediction(settings, trained, strategy=way))))
        for way in ("one-round", "interactive")
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "low", "high"),
    [("higgs-11k.csv.gz", 0.35, 0.5), ("default-credit.csv.gz", 0.65, 0.8)],
)
def test_cells_show_fewer_sides_than_bits_of_splits(
    vertical, settings, real_data, table, low, high
):
    """Sides of rows at the passive party's splits that the active party learns."""
    label = {"h": "label", "d": "default.payment.next.month"}[table[0]]
    trained = vertical(data=str(real_data / table), label=label, max_depth=4, num_boost_round=10)
    folder = run_local(trained)
    shown = {}
    n_splits = len(part_of("party-2", summary_of(folder)["model_id"])["lookup"]["columns"])
    for way in ("one-round", "interactive"):
        predicted, app = listen(prediction(settings, trained, strategy=way))
        n_rows = summary_of(predicted)["matched_rows"]["predicted"]
        letters = letters_sent(app)
        asked = sum(int(one["sizes"].sum()) for one in letters if one.name == "Questions")
        for letter in letters:
            if letter.name == "Cells":
                cells = decompress(letter["cells"].tobytes(), 2 * n_splits, n_rows)
                asked = round(share_open(cells, n_rows) * n_splits * n_rows)
        shown[way] = asked / (n_splits * n_rows)
    assert shown["interactive"] < shown["one-round"]
    assert low < shown["one-round"] < high


# Letters that do not fit


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda cells: np.zeros_like(cells), "Cells.cells .*must be compressed by zlib"),
        (lambda cells: cells[:0], r"party-2.*Cells.cells .*must be at least \d+, of 301 rows"),
        (lambda cells: none_open(cells), "party-2.*Cells.cells must leave every row one leaf"),
    ],
)
def test_cells_that_do_not_fit_are_refused(train, settings, monkeypatch, change, match):
    trained, _ = train()
    rewrite_letters(monkeypatch, "Cells", "cells", change)
    with pytest.raises(PartyError, match=match):
        run_local(prediction(settings, trained))


def none_open(cells):
    """Cells that no row may be in."""
    n_bytes = len(zlib.decompress(cells.tobytes()))
    return np.frombuffer(zlib.compress(bytes(n_bytes)), dtype=np.uint8)


@pytest.mark.slow
@pytest.mark.by_default("forest-*")
@pytest.mark.parametrize("strategy", ["one-round", "interactive", "eini"])
@pytest.mark.parametrize("kind", ["forest", "boosted"])
def test_a_server_cannot_make_another_party_the_one_that_learns(
    train, vertical, settings, monkeypatch, strategy, kind
):
    trained, folder = train(parties=3)
    if kind == "boosted":
        few = {"num_boost_round": 2, "max_depth": 2, "label": "y", "parties": 3}
        trained = vertical(data=trained.data, **few)
        folder = run_local(trained)
    assert part_of("party-3", summary_of(folder)["model_id"])["active"] == "party-1"
    monkeypatch.setattr(
        strategies.vertical,
        "OpenRequest",
        lambda names, active, *rest, **more: OpenRequest(names, "party-2", *rest, **more),
    )
    rule = r"OpenRequest.active must be party-1, as in training, got party-2"
    with pytest.raises(PartyError, match=rule):
        run_local(prediction(settings, trained, strategy=strategy))


# Cells


@pytest.mark.slow
@examples(deadline=None)  # the first call compiles
@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_rows_leaf_is_the_one_that_all_parties_leave_open(n_rows, seed, n_parties):
    # Proposition 1 of the paper, over random trees whose splits have random owners.
    rng = np.random.default_rng(seed)
    trees, values = [grown(rng) for _ in range(3)], rng.random((n_rows, 15)).astype(np.float32)
    names = [f"party-{number}" for number in range(n_parties)]
    owners = [rng.integers(0, n_parties, len(tree)) for tree in trees]
    records = [np.full(len(tree), -1) for tree in trees]
    cells, columns = {}, {name: [] for name in names}
    for tree, of_tree, numbers in zip(trees, owners, records, strict=True):
        for place, node in enumerate(np.flatnonzero(tree != LEAF).tolist()):
            numbers[node] = len(columns[names[of_tree[node]]])
            columns[names[of_tree[node]]].append(place)
    part = Divided(names, trees, owners, records, len(columns[names[0]]))
    crossing = Crossing.of(part)
    for name in names:
        n_records = len(columns[name])
        zeros, halves = np.zeros(n_records, np.int64), np.full(n_records, 0.5, np.float32)
        cuts = np.array(columns[name], np.int64), halves, zeros.astype(np.uint8), zeros
        lookup = Lookup(*cuts, np.empty(0, np.uint8))
        opened = open_cells(Nesting.of(part.trees_of(name), n_records), lookup, values)
        cells[name] = crossing.read(name, compress(opened), n_rows)
        np.testing.assert_array_equal(cells[name], opened)
        if n_records:  # one bit that is another: no party's cells
            altered = opened.copy()
            altered[rng.integers(len(opened)), rng.integers(n_rows) // 8] ^= 128
            with pytest.raises(ValueError, match="must leave every row one leaf of each tree"):
                crossing.read(name, compress(altered), n_rows)
    expected = np.zeros((len(trees), n_rows), dtype=np.int32)
    for tree, ends in zip(trees, expected, strict=True):
        for place, node in enumerate(np.flatnonzero(tree != LEAF)):
            here = ends == node
            ends[here] = tree[node] + (values[here, place] >= 0.5)
    np.testing.assert_array_equal(crossing.leaves(cells, n_rows), expected)
    rows = rng.integers(0, n_rows, 9)
    some = {name: cells_of_rows(opened, rows) for name, opened in cells.items()}
    np.testing.assert_array_equal(crossing.leaves(some, 9), expected[:, rows])


def grown(rng):
    """Left children of a random tree."""
    lefts = [LEAF]
    for node in range(15):
        if node < len(lefts) and (node == 0 or rng.random() < 0.7):
            lefts[node] = len(lefts)
            lefts += [LEAF, LEAF]
    return np.array(lefts, dtype=np.int32)


class Divided:
    """What `Crossing` reads of an active party's part."""

    def __init__(self, names, trees, owners, records, n):
        self.name, self.digests = names[0], dict.fromkeys(names[1:], b"")
        self.model = SimpleNamespace(trees=[{"left": tree} for tree in trees])
        self.lookup = SimpleNamespace(n_records=n)
        self._places = {name: place for place, name in enumerate(names)}
        self._trees = list(zip(trees, owners, records, strict=True))

    def trees_of(self, party):
        place = self._places[party]
        return [(tree, np.where(of == place, numbers, -1)) for tree, of, numbers in self._trees]


@pytest.mark.parametrize("data", [b"", b"nonsense", compress(np.zeros((3, 2), np.uint8))])
def test_bytes_of_something_else_are_no_cells(data):
    with pytest.raises(ValueError, match="cells must be"):
        decompress(data, 4, 9)


def test_no_more_is_unpacked_than_is_wanted():
    cells = decompress(compress(np.zeros((10**6, 2), np.uint8)), 4, 9)
    assert cells.shape == (4, 2)
