"""What comes from outside is held against what a run can need before it is used."""

import json
from dataclasses import replace

import numpy as np
import pytest

from clients.secureboost import passive
from fedapp.errors import PartyError
from fedapp.messages.fedxgbllr import FitRequest, ShareRequest
from fedapp.messages.local_boosting import BagRequest, TurnRequest
from fedapp.messages.pax import GrowRequest
from fedapp.messages.scoring import EvaluateRequest
from fedapp.records.document import from_text, to_text
from fedapp.trees.model import NODE, Ensemble
from fedapp.trees.predict import predict_margins
from strategies.flower import FlowerStrategy
from tests.network import run
from tests.tampering import refuses, rewrite_letters


def asks(monkeypatch, request, change, skip=0):
    """Have the server send other requests of a class than the strategy made, after so many."""
    honest, seen = FlowerStrategy._laid_out, [0]

    def laid_out(self, party, sent, known):
        if isinstance(sent, request):
            seen[0] += 1
            if seen[0] > skip:
                return honest(self, party, change(sent), {})
        return honest(self, party, sent, known)

    monkeypatch.setattr(FlowerStrategy, "_laid_out", laid_out)


@pytest.fixture
def pax(settings):
    return settings(parties=1, data="breast-cancer")


def document(**changes):
    def change(sent):
        found = {**json.loads(sent.model.tobytes()), **changes}
        text = json.dumps(found, separators=(",", ":")).encode()
        return replace(sent, model=np.frombuffer(text, dtype=np.uint8))

    return change


@pytest.mark.parametrize(
    "changes",
    [
        {"columns": [""] * 100_000},
        {"columns": [f"c{number}" for number in range(29)]},
        {"classes": ["yes", "no"]},
        {"objective": "reg:squarederror", "classes": []},
        {"base_score": 1.0},
        {"base_score": float("nan")},
        {"columns": 7},
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_model_of_other_columns_classes_or_objective_is_refused(pax, monkeypatch, changes):
    """A tree that splits at a column the table does not have would read foreign memory."""
    asks(monkeypatch, EvaluateRequest, document(**changes))
    with pytest.raises(PartyError, match=r"^party-1 .*EvaluateRequest.model must "):
        run(pax)


def test_values_of_too_few_columns_are_not_walked():
    tree = np.zeros(3, dtype=NODE)
    tree["left"], tree["column"] = [1, -1, -1], [4, 0, 0]
    model = Ensemble("reg:squarederror", np.zeros(1, np.float32), tuple("abcde"), (), (tree,))
    with pytest.raises(ValueError, match="values must have 5 columns, got 4"):
        predict_margins(model, np.zeros((2, 4), dtype=np.float32))
    again = from_text(to_text(model), Ensemble)
    assert predict_margins(again, np.ones((2, 5), dtype=np.float32)).shape == (2, 1)


def small(array):
    """The first two entries, or none beyond 2 of offsets."""
    return array[:2] if array.dtype.kind == "f" else np.minimum(array, 2)


def always(*numbers, dtype=np.int32):
    return lambda _: np.array(numbers, dtype)


def wanted(nodes):
    return {"wanted_nodes": lambda _: nodes, "wanted_trees": lambda _: nodes * 0}


WANTED = "wanted_nodes must be roots, or children of the splits, once, and one at least"
SPLITS = [name for name in GrowRequest.__dataclass_fields__ if name.startswith("split_")]
LEVELS = {
    "level": (1, {"level": lambda level: 5}, "level must be 0 or 1"),
    "trees": (0, {"n_trees": lambda n: 7}, "n_trees must be 1, got 7"),
    "wanted": (0, wanted(np.arange(5000, dtype=np.int32)), WANTED),
    "none": (1, wanted(np.zeros(0, dtype=np.int32)), WANTED),
    "columns": (0, {"columns": always(*[0] * 100_000)}, "columns must ascend"),
    "margins": (
        0,
        {"base_margin": always(0, 0, dtype=np.float32)},
        r"base_margin must have size 1 \(n_outputs\) in dimension 1, got 2",
    ),
    "margin": (0, {"base_margin": lambda each: each * np.inf}, "base_margin must be finite"),
    "splits": (
        1,
        dict.fromkeys(SPLITS, lambda array: np.repeat(array, 5000)),
        "split_nodes must be 1 at most",
    ),
    "leaves": (2, {"leaf_values": small, "leaf_offsets": small}, "leaf_values must be one a node"),
    "sets": (
        1,
        {"split_sets": always(0, 0, 0, dtype=np.uint8)},
        "split_sets sets must be 0 bytes, got 3",
    ),
}


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_is_as_large_as_the_last_one_allows(pax, monkeypatch, name):
    skip, changes, rule = LEVELS[name]

    def grown(sent):
        return replace(sent, **{key: new(getattr(sent, key)) for key, new in changes.items()})

    asks(monkeypatch, GrowRequest, grown, skip)
    refuses(rf"^party-1\b.*: GrowRequest.{rule}$", pax)


@pytest.mark.parametrize(
    ("strategy", "request_of", "field"),
    [
        ("bagging", BagRequest, "base_margin"),
        ("cyclic", TurnRequest, "base_margin"),
        ("fedxgbllr", FitRequest, "base_score"),
        ("fedxgbllr", ShareRequest, "base_score"),
    ],
)
def test_rows_start_from_a_margin_for_every_output(
    settings, monkeypatch, strategy, request_of, field
):
    run = settings(strategy=strategy, data="wine", objective="multi:softprob", num_boost_round=1)
    asks(monkeypatch, request_of, lambda sent: replace(sent, **{field: getattr(sent, field)[:2]}))
    rule = r"must have size 3 \(n_outputs\) in dimension 1, got 2"
    refuses(rf"{request_of.__name__}.{field} {rule}$", run)


def test_bins_of_others_are_as_many_as_the_run_can_need(vertical, monkeypatch):
    rewrite_letters(monkeypatch, "ColumnBins", "widths", lambda _: np.array([33]))
    rule = r"must be <= 32 \(max-bin\), of 100000 columns at most \(most-columns\)"
    refuses(rf"ColumnBins.widths {rule}$", vertical(align="ordered"))


@pytest.mark.parametrize(
    ("n_columns", "width", "is_text"), [(60_000, 32, 0), (100, 65_535, 1)], ids=["numbers", "texts"]
)
def test_bins_of_another_are_no_more_than_fit_into_memory(
    vertical, monkeypatch, n_columns, width, is_text
):
    widths, flags = np.full(n_columns, width), np.full(n_columns, is_text, dtype=np.uint8)
    rewrite_letters(monkeypatch, "ColumnBins", "widths", lambda _: widths)
    honest = passive.column_bins
    monkeypatch.setattr(
        passive, "column_bins", lambda *given: replace(honest(*given), categorical=flags)
    )
    rule = r"must add up to <= 1600000 \(16 x most-columns of party-1\), got "
    rule += rf"{n_columns * width}; lower max-bin"
    refuses(rf"party-2\b.*: ColumnBins.widths {rule}$", vertical(align="ordered"))
