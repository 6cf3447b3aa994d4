"""What comes from outside is held against what a run can need before it is used."""

import json
from dataclasses import replace

import numpy as np
import pytest

from clients.secureboost.passive import Passive
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
        {"columns": [f"c{number}" for number in range(31)]},
        {"columns": [""] * 100_000},
        {"columns": [f"c{number}" for number in range(29)]},
        {"classes": ["yes", "no"]},
        {"objective": "multi:softprob"},
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


def grown(**changes):
    return lambda sent: replace(
        sent, **{name: change(getattr(sent, name)) for name, change in changes.items()}
    )


@pytest.mark.parametrize(
    ("skip", "changes", "rule"),
    [
        (1, {"level": lambda level: 5}, "level must be 0 or 1"),
        (0, {"n_trees": lambda n: 7}, "n_trees must be 1, got 7"),
        (
            0,
            {
                "wanted_nodes": lambda _: np.arange(5000, dtype=np.int32),
                "wanted_trees": lambda _: np.zeros(5000, np.int32),
            },
            "wanted_nodes must be roots, or children of the splits, once, and one at least",
        ),
        (
            1,
            {
                "wanted_nodes": lambda _: np.zeros(0, dtype=np.int32),
                "wanted_trees": lambda _: np.zeros(0, np.int32),
            },
            "wanted_nodes must be roots, or children of the splits, once, and one at least",
        ),
        (
            0,
            {"columns": lambda _: np.zeros(100_000, np.int32)},
            "columns must ascend",
        ),
        (
            0,
            {"base_margin": lambda _: np.zeros(2, np.float32)},
            "base_margin must be 1, one an output",
        ),
        (0, {"base_margin": lambda margins: margins * np.inf}, "base_margin must be finite"),
        (
            1,
            {
                name: (lambda array: np.repeat(array, 5000))
                for name in GrowRequest.__dataclass_fields__
                if name.startswith("split_")
            },
            "split_nodes must be 1 at most",
        ),
        (
            2,
            {
                "leaf_values": lambda values: values[:2],
                "leaf_offsets": lambda offsets: np.minimum(offsets, 2),
            },
            "leaf_values must be one a node",
        ),
        (
            1,
            {"split_sets": lambda _: np.zeros(3, np.uint8)},
            "split_sets sets must be 0 bytes, got 3",
        ),
    ],
    ids=[
        "level",
        "trees",
        "wanted",
        "none",
        "columns",
        "margins",
        "margin",
        "splits",
        "leaves",
        "sets",
    ],
)
def test_a_level_is_as_large_as_the_last_one_allows(pax, monkeypatch, skip, changes, rule):
    asks(monkeypatch, GrowRequest, grown(**changes), skip)
    refuses(rf"^party-1\b.*: GrowRequest.{rule}$", pax)


STARTS = [
    ("bagging", BagRequest, "base_margin"),
    ("cyclic", TurnRequest, "base_margin"),
    ("fedxgbllr", FitRequest, "base_score"),
    ("fedxgbllr", ShareRequest, "base_score"),
]


@pytest.mark.parametrize(("strategy", "request_of", "field"), STARTS)
def test_rows_start_from_a_margin_for_every_output(
    settings, monkeypatch, strategy, request_of, field
):
    run = settings(strategy=strategy, data="wine", objective="multi:softprob", num_boost_round=1)
    asks(monkeypatch, request_of, lambda sent: replace(sent, **{field: getattr(sent, field)[:2]}))
    rule = r"must (be 3, one an output|have size 3 \(n_outputs\) in dimension 1), got 2"
    refuses(rf"{request_of.__name__}.{field} {rule}$", run)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [[33], [1, 2] * 60_000])
def test_bins_of_others_are_as_many_as_the_run_can_need(vertical, monkeypatch, widths):
    rewrite_letters(monkeypatch, "ColumnBins", "widths", lambda _: np.array(widths, dtype=np.int64))
    rule = r"must be <= 32 \(max-bin\), of 100000 columns at most \(most-columns\)"
    refuses(rf"ColumnBins.widths {rule}$", vertical(align="ordered"))


@pytest.mark.parametrize("categorical", [0, 1])
def test_bins_of_another_are_no_more_than_fit_into_memory(vertical, monkeypatch, categorical):
    n_columns, width = (60_000, 32) if not categorical else (100, 65_535)
    widths = np.full(n_columns, width, dtype=np.int64)
    rewrite_letters(monkeypatch, "ColumnBins", "widths", lambda _: widths)
    flags = np.full(n_columns, categorical, dtype=np.uint8)
    honest = Passive.column_bins
    monkeypatch.setattr(
        Passive, "column_bins", lambda *given: replace(honest(*given), categorical=flags)
    )
    rule = r"must add up to <= 1600000 \(16 x most-columns of party-1\), got "
    rule += rf"{n_columns * width}; lower max-bin"
    refuses(rf"party-2\b.*: ColumnBins.widths {rule}$", vertical(align="ordered"))
