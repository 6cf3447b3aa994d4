"""One-round prediction: the classical way's predictions, the passive parties asked once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.errors import PartyError
from fedapp.messages import inference as messages
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.trees.divided import compress, decompress, leaves_of, reachable_leaves
from tests.conftest import MakeSettings
from tests.forests import joined
from tests.letters import letters_sent
from tests.pooled import made_columns, write_rows
from tests.tampering import rewrite_letters
from tests.trained import TrainOnce
from tests.transcript import ALIGNED, check_declared, listen, summary_of

Train = Callable[..., tuple[Settings, RunFolder]]
KINDS = {
    **ALIGNED,
    "evaluate.one_round_walk": (messages.LeafSetsRequest, messages.LeafSetsReply),
    "evaluate.one_round_intersect": (messages.IntersectRequest, messages.IntersectReply),
}


@pytest.fixture
def train(settings: MakeSettings, tmp_path: Path, trained_once: TrainOnce) -> Train:
    """A forest of 5 trees, and its settings."""

    def make(objective: str = "binary:logistic", **more: Any) -> tuple[Settings, RunFolder]:
        data = tmp_path / f"{objective[:5]}.csv"
        if not data.exists():
            write_rows(data, made_columns(objective, n_rows=301))
        given = {"strategy": "federated-forest", "data": str(data), "label": "y", "parties": 2}
        given |= {"federated_forest__trees": 5, "federated_forest__max_depth": 4}
        run = settings(**given | {"objective": objective, "align": "ordered", **more})
        return run, trained_once(run)

    return make


def prediction(make: MakeSettings, trained: Settings, **more: Any) -> Settings:
    """Settings of a run that predicts the rows the model was trained on."""
    model = summary_of(RunFolder(Path(trained.run_dir)))["model_id"]
    given = {"strategy": "one-round", "data": trained.data, "parties": trained.parties}
    return make(**given | {"model": model, "align": "ordered", **more})


def test_messages_have_their_declared_fields_and_leaf_sets_go_to_the_active_party_alone(
    train: Train, settings: MakeSettings
) -> None:
    trained, _ = train(parties=3, align="psi")
    folder, app = listen(prediction(settings, trained, align="psi"))
    check_declared(app, KINDS)
    letters = letters_sent(app)
    sets = {(one.sender, one.receiver) for one in letters if one.name == "LeafSets"}
    assert sets == {("party-2", "party-1"), ("party-3", "party-1")}
    assert summary_of(folder)["matched_rows"] == {"predicted": 301}


def test_leaf_sets_travel_compressed(train: Train, settings: MakeSettings) -> None:
    trained, folder = train(federated_forest__trees=50)
    n_leaves = sum((tree["left"] < 0).sum() for tree in joined(folder).trees)
    _, app = listen(prediction(settings, trained))
    letters = letters_sent(app)
    (sets,) = [one["sets"] for one in letters if one.name == "LeafSets"]
    assert len(sets) < 0.8 * n_leaves * 301 / 8


def test_a_boosted_model_is_refused_because_passive_parties_do_not_know_its_structure(
    vertical: MakeSettings, settings: MakeSettings, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "rows.csv", made_columns("binary:logistic", n_rows=80))
    run = vertical(data=str(data), label="y", num_boost_round=1, secureboost__key_bits=256)
    run_local(run)
    with pytest.raises(PartyError, match=r"party-2.*model must be a forest for one-round"):
        run_local(prediction(settings, run))


@pytest.mark.parametrize(
    ("field", "change", "match"),
    [
        ("ends", lambda ends: ends[:-1], "LeafSets.ends must rise to"),
        ("ends", lambda ends: ends + 1, "LeafSets.ends must rise to"),
        ("sets", lambda sets: np.zeros_like(sets), r"LeafSets.sets .*must be compressed by zlib"),
    ],
)
def test_leaf_sets_that_do_not_fit_are_refused(
    train: Train,
    settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    change: Callable[[Any], Any],
    match: str,
) -> None:
    trained, _ = train()
    rewrite_letters(monkeypatch, "LeafSets", field, change)
    with pytest.raises(PartyError, match=match):
        run_local(prediction(settings, trained))


# Leaf sets

LEFTS = np.array([1, 3, 5, -1, -1, -1, -1], dtype=np.int32)


@examples(deadline=None)  # the first call compiles
@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_a_rows_leaf_is_the_one_that_all_parties_leave_open(
    n_rows: int, seed: int, n_parties: int
) -> None:
    # Proposition 1 of the paper, over random splits of random owners.
    rng = np.random.default_rng(seed)
    sides, owners = rng.random((3, n_rows)) < 0.5, rng.integers(0, n_parties, 3)
    found = None
    for party in range(n_parties):
        own = {node: np.packbits(sides[node]) for node in range(3) if owners[node] == party}
        sets = reachable_leaves(LEFTS, own, n_rows)
        again = decompress(compress(sets), 4, n_rows)
        found = again if found is None else found & again
    assert found is not None
    inner = np.where(sides[0], 1, 2)
    side = sides[inner, np.arange(n_rows)]
    expected = LEFTS[inner] + ~side
    np.testing.assert_array_equal(leaves_of(found, LEFTS, n_rows), expected)


def test_a_row_in_two_leaves_or_none_is_refused() -> None:
    sets = reachable_leaves(LEFTS, {}, 9)
    with pytest.raises(ValueError, match="must leave every row in one leaf"):
        leaves_of(sets, LEFTS, 9)
    with pytest.raises(ValueError, match="must leave every row in one leaf"):
        leaves_of(sets * 0, LEFTS, 9)


@pytest.mark.parametrize("data", [b"", b"nonsense", compress(np.zeros((5, 2), np.uint8))])
def test_bytes_of_something_else_are_no_sets(data: bytes) -> None:
    with pytest.raises(ValueError, match="sets must be"):
        decompress(data, 4, 9)
