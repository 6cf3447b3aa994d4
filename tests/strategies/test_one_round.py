"""One-round prediction: the interactive way's predictions, the passive parties asked once."""

import zlib
from functools import partial

import numpy as np
import pytest

import strategies.vertical
from fedapp.errors import PartyError
from fedapp.messages.vertical import OpenRequest
from fedapp.runs.local import run_local
from fedapp.trees.cells import compress, decompress
from tests.encrypted import inference, scored
from tests.federated import summary_of
from tests.forests import part_of
from tests.letters import letters_sent
from tests.tables import made_columns, write_rows
from tests.tampering import rewrite_letters
from tests.transcript import listen


@pytest.fixture
def train(divided):
    """A forest of 5 trees, and its settings."""
    return partial(divided, "federated-forest", federated_forest__max_depth=4)


def test_cells_go_to_the_active_party_only(train, settings):
    trained, made = train(parties=3, align="psi")
    _, app = listen(inference(settings, trained, strategy="one-round", align="psi"))
    letters = letters_sent(app)
    cells = {(one.sender, one.receiver) for one in letters if one.name == "Cells"}
    assert cells == {("party-2", "party-1"), ("party-3", "party-1")}
    for name in ("party-2", "party-3"):  # they travel compressed
        (sent,) = [one["cells"] for one in letters if (one.name, one.sender) == ("Cells", name)]
        n_splits = len(part_of(name, made.summary["model_id"])["lookup"]["columns"])
        assert 0 < len(sent) < 0.9 * 2 * n_splits * 300 / 8


# Boosted models

WAYS = {
    "three classes, three parties": {"objective": "multi:softprob", "parties": 3},
    "more than 64 leaves": {"max_depth": 7, "min_child_weight": 0.0, "num_boost_round": 2},
    "rounds lost by early stopping": {"num_boost_round": 12, "early_stopping_rounds": 3, "eta": 1},
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
    found = [scored(settings, trained, way) for way in ("one-round", "interactive")]
    assert len(found[0]) == 400
    np.testing.assert_array_equal(*found)


# Letters that do not fit


def none_open(cells):
    """Cells that no row may be in."""
    n_bytes = len(zlib.decompress(cells.tobytes()))
    return np.frombuffer(zlib.compress(bytes(n_bytes)), dtype=np.uint8)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (np.zeros_like, "Cells.cells .*must be compressed by zlib"),
        (lambda cells: cells[:0], r"party-2.*Cells.cells .*must be at least \d+, of 300 rows"),
        (none_open, "party-2.*Cells.cells must leave every row one leaf"),
    ],
)
def test_cells_that_do_not_fit_are_refused(train, settings, monkeypatch, change, match):
    trained, _ = train()
    rewrite_letters(monkeypatch, "Cells", "cells", change)
    with pytest.raises(PartyError, match=match):
        scored(settings, trained, "one-round")


@pytest.mark.by_default("federated-forest-*")
@pytest.mark.parametrize("strategy", ["one-round", "interactive", "eini"])
@pytest.mark.parametrize("kind", ["federated-forest", "secureboost"])
def test_a_server_cannot_make_another_party_the_one_that_learns(
    divided, settings, monkeypatch, strategy, kind
):
    trained, folder = divided(kind, parties=3)
    assert part_of("party-3", summary_of(folder)["model_id"])["active"] == "party-1"
    monkeypatch.setattr(
        strategies.vertical,
        "OpenRequest",
        lambda names, active, *rest, **more: OpenRequest(names, "party-2", *rest, **more),
    )
    rule = r"OpenRequest.active must be party-1, as in training, got party-2"
    with pytest.raises(PartyError, match=rule):
        scored(settings, trained, strategy)


# Cells


def test_bytes_of_something_else_are_no_cells_and_no_more_is_unpacked_than_is_wanted():
    for data in (b"", b"nonsense", compress(np.zeros((3, 2), np.uint8))):
        with pytest.raises(ValueError, match="cells must be"):
            decompress(data, 4, 9)
    assert decompress(compress(np.zeros((10**6, 2), np.uint8)), 4, 9).shape == (4, 2)
