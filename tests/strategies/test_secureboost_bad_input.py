"""SecureBoost on tables and settings that do not fit, or hardly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from fedapp.errors import ConfigError, DataError, FedappError, PartyError
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.trees.model import LEAF, load_model
from fedapp.trees.rounds import Sampling
from tests.network import die, resumed, run
from tests.pooled import made_columns, write_rows
from tests.transcript import summary_of

MakeSettings = Callable[..., Settings]
WriteTable = Callable[..., Path]
MakeSites = Callable[..., list[Context]]
IDS = [f"customer {number}" for number in range(60)]


def refuses(
    error: type[FedappError], match: str, settings: Settings, contexts: list[Context] | None = None
) -> None:
    """Holds that a run stops with this error, and leaves no model but the reason."""
    with pytest.raises(error, match=match) as caught:
        run(settings, contexts)
    folder = Path(settings.run_dir)
    assert not (folder / "model.json").exists()
    failure = json.loads((folder / "failure.json").read_text())
    assert failure == {"error": type(caught.value).__name__, "message": str(caught.value)}


@pytest.fixture
def bank(write_table: WriteTable) -> dict[str, Any]:
    """A site with labels."""
    return {"name": "bank", "data": write_table("bank", 60, id=IDS), "id": "id"}


@pytest.fixture
def shop(write_table: WriteTable) -> Callable[..., dict[str, Any]]:
    """``shop(**columns)``: a site with a column c, without labels; a column given replaces it."""

    def make(**columns: Any) -> dict[str, Any]:
        given = {"c": np.random.default_rng(4).normal(size=60), "id": IDS, **columns}
        path = write_table("shop", 60, **{"a": None, "b": None, "y": None, **given})
        return {"name": "shop", "data": path, "id": "id", "label": ""}

    return make


# Roles


def test_a_run_without_labels_anywhere_is_refused(
    vertical: MakeSettings, sites: MakeSites, bank: Any, shop: Any
) -> None:
    contexts = sites({**bank, "label": ""}, shop())
    refuses(DataError, "^label must be a column at one party, got none$", vertical(), contexts)


def test_a_run_with_labels_at_two_parties_is_refused_by_their_names(
    vertical: MakeSettings, sites: MakeSites, bank: Any, write_table: WriteTable
) -> None:
    other = {**bank, "name": "shop", "data": write_table("other", 60, id=IDS)}
    match = "^label must be a column at one party, got bank, shop$"
    refuses(DataError, match, vertical(), sites(bank, other))


def test_a_party_whose_label_column_is_missing_is_named(
    vertical: MakeSettings, sites: MakeSites, bank: Any, shop: Any
) -> None:
    match = r"^bank \(step 1\): label column \[withheld\] must be in the table"
    refuses(PartyError, match, vertical(), sites({**bank, "label": "z"}, shop()))


def test_one_party_alone_is_refused(vertical: MakeSettings) -> None:
    refuses(ConfigError, "^parties must be >= 2, got 1$", vertical(parties=1))


def test_a_party_without_a_column_is_refused(
    vertical: MakeSettings, sites: MakeSites, bank: Any, shop: Any
) -> None:
    match = r"^shop \(step 1\): table must have a feature column, got only \[withheld\];"
    refuses(PartyError, match, vertical(), sites(bank, shop(c=None)))


# Tables


def test_a_run_does_not_go_on_with_a_table_that_has_changed(
    vertical: MakeSettings, sites: MakeSites, bank: Any, shop: Any
) -> None:
    settings, contexts = vertical(), sites(bank, shop())
    die(settings, contexts, dies_before_sending=10)
    shop(c=range(60))
    with pytest.raises(
        PartyError, match=r"^shop \(step \d+\): has another table than when the run"
    ):
        run(resumed(settings), contexts)


@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
def test_labels_that_are_all_the_same_are_refused(
    vertical: MakeSettings,
    sites: MakeSites,
    bank: Any,
    shop: Any,
    write_table: WriteTable,
    objective: str,
) -> None:
    write_table("bank", 60, id=IDS, y=[1] * 60)
    match = r"^bank \(step \d+\): label must not be the same in every training row$"
    refuses(PartyError, match, vertical(objective=objective), sites(bank, shop()))


def test_more_classes_than_the_objective_takes_are_refused(
    vertical: MakeSettings, sites: MakeSites, bank: Any, shop: Any, write_table: WriteTable
) -> None:
    write_table("bank", 60, id=IDS, y=[0, 1, 2] * 20)
    match = r"^bank \(step \d+\): label must have at most 2 different values for binary:logistic"
    refuses(PartyError, match, vertical(), sites(bank, shop()))


@pytest.mark.parametrize("constant", [[3.5] * 60, [""] * 60], ids=["constant", "missing"])
def test_a_passive_party_without_a_useful_split_adds_none(
    vertical: MakeSettings, sites: MakeSites, bank: Any, shop: Any, constant: list[Any]
) -> None:
    contexts = sites({**bank, "allow-export": True}, {**shop(c=constant), "allow-export": True})
    folder = run(vertical(max_depth=3), contexts)
    model = load_model(folder.path / "model.json")
    columns = np.concatenate([tree["column"][tree["left"] != LEAF] for tree in model.trees])
    assert model.columns == ("a", "b", "c")
    assert len(columns)
    assert 2 not in columns
    purity = summary_of(folder)["leaf_purity"]
    # A passive party sees which rows the others' splits have parted, but for the last level's.
    assert purity["shop"] < purity["leaves"]


@pytest.mark.parametrize("parties", [2, 3])
def test_a_round_may_draw_no_column_of_a_passive_party(
    vertical: MakeSettings, tmp_path: Path, parties: int
) -> None:
    data = write_rows(tmp_path / "made.csv", made_columns("binary:logistic"))
    given = {"label": "y", "colsample_bytree": 0.34, "num_boost_round": 8, "parties": parties}
    settings = vertical(
        data=str(data), columns={2: "sizes:5,1", 3: "sizes:1,4,1"}[parties], **given
    )
    drawn = [Sampling(settings.seed, 0.34).columns(number, 1, 6)[0] for number in range(8)]
    without = [not columns[5] for columns in drawn]
    assert 1 < sum(without) < 8
    folder = run_local(settings)
    model = load_model(folder.path / "model.json")
    for tree, columns in zip(model.trees, drawn, strict=True):
        assert len(tree) > 1
        assert columns[tree["column"][tree["left"] != LEAF]].all()


# Settings


def test_a_small_key_is_refused_unless_it_is_asked_for(vertical: MakeSettings) -> None:
    rule = "must be >= 2048 without secureboost.insecure-small-key, got 512"
    with pytest.raises(ConfigError, match=f"^secureboost.key-bits {rule}$"):
        run(vertical(secureboost__insecure_small_key=False))


def test_a_key_that_could_not_hold_a_row_is_refused(vertical: MakeSettings) -> None:
    with pytest.raises(ConfigError, match=r"^secureboost.key-bits must be >= 256, got 128$"):
        run(vertical(secureboost__key_bits=128))


def test_an_odd_number_of_bits_is_refused_by_name(vertical: MakeSettings) -> None:
    match = r"^party-1 \(step \d+\): secureboost.key-bits must be even, got 513$"
    refuses(PartyError, match, vertical(secureboost__key_bits=513))


def test_early_stopping_without_validation_rows_is_refused(
    vertical: MakeSettings, sites: MakeSites, bank: Any, shop: Any
) -> None:
    with pytest.raises(ConfigError, match=r"^valid-fraction must be > 0 with early-stopping-rou"):
        vertical(early_stopping_rounds=2, valid_fraction=0.0)
    settings = vertical(early_stopping_rounds=2, valid_fraction=0.001)
    match = "^valid-fraction must leave validation rows for early-stopping-rounds, got 0.001$"
    refuses(ConfigError, match, settings, sites(bank, shop()))


@pytest.mark.parametrize(
    ("header", "cells", "node", "rule"),
    [
        ("secret,hidden", "1,name-{row}", {}, "feature columns of text must be categories, "),
        ("secret,hidden", "1,inf", {}, "feature columns must be finite as float32, got "),
        ("secret,secret", "1,2", {}, "column names must be distinct, got "),
        ("secret", "1", {"drop-columns": "secret"}, "table must have a feature column, got only "),
        (
            "secret,hidden",
            "1,2",
            {"drop-columns": "classified"},
            "drop-columns must be columns of ",
        ),
        ("secret,hidden", "1,2", {"id": "classified"}, "id column "),
        ("secret,hidden", "1,", {"id": "hidden"}, "id column "),
        ("secret,hidden", "1,7", {"id": "hidden"}, "id column "),
        ("secret,hidden", "1,", {"label": "hidden"}, "label column "),
        ("secret,hidden", "1,-1", {"weight": "hidden"}, "weight column "),
    ],
)
def test_an_error_of_a_table_names_no_column_of_a_site_that_hides_them(
    settings: MakeSettings,
    sites: MakeSites,
    write_table: WriteTable,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    header: str,
    cells: str,
    node: dict[str, str],
    rule: str,
) -> None:
    table = tmp_path / "shop.csv"
    table.write_text("\n".join([header, *(cells.format(row=row) for row in range(40))]) + "\n")
    contexts = sites(
        {"name": "bank", "data": write_table("bank")},
        {"name": "shop", "data": table, "label": "", **node},
    )
    given = settings(strategy="secureboost", parties=2, align="ordered")
    with pytest.raises(PartyError, match=r"^shop .*; the site's own log says more$") as caught:
        run_local(given, contexts)
    assert rule in str(caught.value)
    for name in ("secret", "hidden", "classified"):
        assert name not in str(caught.value)
    assert any(name in caplog.text for name in ("secret", "hidden", "classified"))
