"""Rows scored by parties of a simulation over HTTP: as `fedapp predict` has them scored."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.data.table import Table
from fedapp.errors import ConfigError, DataError, PartyError
from fedapp.home import home
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.site.settings import SiteConfig
from fedapp.site.table import read_rows_to_predict
from tests.conftest import MakeSettings, WriteTable

pytest.importorskip("fastapi")

from fedapp.serve.scorer import open_scorer
from tests.test_serve import Client

SMALL = {"key_bits": 512, "insecure_small_key": True}
GIVEN: dict[str, dict[str, Any]] = {
    "secureboost": {f"secureboost__{name}": value for name, value in SMALL.items()},
    "federated-forest": {"federated_forest__trees": 3, "federated_forest__max_depth": 3},
}
OWNED = {"bank": ("a", "town"), "shop": ("b", "count")}
N_ROWS = 60
Train = Callable[[str], Path]


@pytest.fixture
def tables(write_table: WriteTable) -> dict[str, Path]:
    """A bank with the labels and a shop, each with a table of its own, some values missing."""
    rng = np.random.default_rng(3)
    bank = write_table("bank", N_ROWS, b=None, town=rng.choice(["Oslo", "Rome", ""], N_ROWS))
    counts = rng.choice(["1", "2", "30", ""], N_ROWS)
    shop = write_table("shop", N_ROWS, a=None, y=None, count=counts)
    return {"bank": bank, "shop": shop}


@pytest.fixture
def train(tables: dict[str, Path], settings: MakeSettings) -> Train:
    """``train(strategy)``: a run whose model's parts lie at the parties."""

    def make(strategy: str) -> Path:
        data = ",".join(f"{name}={path}" for name, path in tables.items())
        given = {"data": data, "parties": 2, "label": "y", "align": "ordered"}
        return run_local(settings(strategy=strategy, **given, **GIVEN[strategy])).path

    return make


@pytest.fixture
def client(train: Train) -> Client:
    """Of a boosted model."""
    return Client(train("secureboost"), most_rows=5, most_bytes=2000)


def rows_of(tables: dict[str, Path]) -> list[dict[str, Any]]:
    """The rows of the tables as a client writes them."""

    def value(name: str, text: str) -> Any:
        return (text if name == "town" else float(text)) if text else None

    read = {
        name: list(csv.DictReader(path.read_text().splitlines())) for name, path in tables.items()
    }
    return [
        {
            name: {column: value(column, read[name][row][column]) for column in OWNED[name]}
            for name in tables
        }
        for row in range(N_ROWS)
    ]


def predicted(run: Path, tables: dict[str, Path], inference: str, *more: str) -> dict[str, Any]:
    """What `fedapp predict` writes, by column."""
    data = ",".join(f"{name}={path}" for name, path in tables.items())
    output = str(run / "scores.parquet")
    asked = ["predict", str(run), "--data", data, "--output", output, "--inference", inference]
    assert CliRunner().invoke(cli, [*asked, *more], catch_exceptions=False).exit_code == 0
    return dict(parquet.read_table(output).drop_columns(["row"]).to_pydict())


@pytest.mark.parametrize(
    ("strategy", "inference"),
    [("secureboost", "interactive"), ("federated-forest", "one-round")],
)
def test_scores_are_those_that_parties_predict_and_nothing_of_them_stays(
    strategy: str, inference: str, train: Train, tables: dict[str, Path]
) -> None:
    run, rows = train(strategy), rows_of(tables)
    client, kept = Client(run), set(home().rglob("*"))
    status, found = client.predict({"rows": rows})
    assert (status, found["warnings"]) == (200, [])
    assert set(home().rglob("*")) - kept == {home() / "predictions"}
    assert client.ask("GET", "/health")[1] == {
        "status": "ok",
        "model": f"{strategy}, {run.name}",
        "parts_at": ["bank", "shop"],
        "inference": inference,
    }
    for name, column in predicted(run, tables, inference).items():
        assert [row["scores"][name] for row in found["rows"]] == column
        assert len(set(column)) > 1
    assert client.predict(rows[7]) == (200, {**found["rows"][7], "warnings": []})


def test_encrypted_scores_are_those_that_parties_predict(
    train: Train, tables: dict[str, Path]
) -> None:
    run, given = train("secureboost"), {**SMALL, "unguarded": True}
    more = {f"eini.{name.replace('_', '-')}": value for name, value in given.items()}
    scorer = open_scorer(run, "eini", more)
    told = [f"{name}={str(value).lower()}" for name, value in more.items()]
    expected = predicted(run, tables, "eini", *(word for one in told for word in ("-c", one)))
    found = [row["scores"] for row in scorer.answer(rows_of(tables))["rows"]]
    assert {name: [row[name] for row in found] for name in found[0]} == expected


def test_a_party_sees_its_own_values_alone(
    train: Train, tables: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dict[str, list[str]]()

    def read(config: SiteConfig, *asked: Any) -> Table:
        assert config.frame is not None
        seen[config.name] = config.frame().column_names
        return read_rows_to_predict(config, *asked)

    monkeypatch.setattr("clients.vertical.read_rows_to_predict", read)
    Client(train("secureboost")).predict(rows_of(tables)[0])
    assert seen == {name: list(columns) for name, columns in OWNED.items()}


def test_schema_and_openapi_list_the_columns_of_each_party(client: Client) -> None:
    _, schema = client.ask("GET", "/schema")
    kinds = {
        party["name"]: {column["name"]: column["kind"] for column in party["columns"]}
        for party in schema["parties"]
    }
    assert kinds == {
        "bank": {"a": "number", "town": "category"},
        "shop": {"b": "number", "count": "number"},
    }
    assert (schema["classes"], schema["scores"]) == (["0", "1"], ["probability_1"])
    assert set(schema["parties"][0]["columns"][1]["categories"]) == {"Oslo", "Rome"}
    _, described = client.ask("GET", "/openapi.json")
    one, _ = described["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]["oneOf"]
    assert one["required"] == ["bank", "shop"]
    assert one["properties"]["shop"]["required"] == ["b", "count"]
    _, page = client.ask("GET", "/docs")
    assert escape('{"bank": {"a": null, "town": null}, "shop": {"b": null, "count"') in page


@pytest.mark.parametrize(
    ("party", "change", "error", "column"),
    [
        (
            "shp",
            {"b": 1},
            "row 0 must name parties of the model (bank, shop), got 'shp'; did",
            None,
        ),
        ("shop", ..., "row 0 must name every party of the model (bank, shop), lacks 'shop'", None),
        ("shop", [1], "row 0 must have an object by column names for shop, got list", None),
        ("bank", {"b": 1}, "row 0 must have only columns of bank, got 'b'", "b"),
        ("bank", {"a": ...}, "row 0 must have all columns of bank (null: missing), lacks 'a'", "a"),
        ("bank", {"a": [1]}, "column 'a' of bank must be a number, true or false, a text", "a"),
        ("shop", {"b": "high"}, "shop: feature column 'b' must be numbers", None),
        ("shop", {"b": 1e300}, "shop: feature columns must be finite as float32", None),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_with_its_party(
    client: Client,
    tables: dict[str, Path],
    party: str,
    change: Any,
    error: str,
    column: str | None,
) -> None:
    row = rows_of(tables)[0]
    row[party] = {**row.get(party, {}), **change} if isinstance(change, dict) else change
    if isinstance(row[party], dict):
        row[party] = {name: value for name, value in row[party].items() if value is not ...}
    kept = set(home().rglob("*"))
    status, found = client.predict({name: one for name, one in row.items() if one is not ...})
    assert (status, found["party"], found["column"]) == (422, party, column)
    assert found["error"].startswith(error)
    assert set(home().rglob("*")) - kept <= {home() / "predictions"}


def test_requests_are_bounded(client: Client) -> None:
    assert client.predict({"rows": [{}] * 6})[0] == 413
    assert client.predict(b" " * 2001)[0] == 413


def test_an_unknown_category_counts_as_missing_and_is_told(
    client: Client, tables: dict[str, Path]
) -> None:
    row = rows_of(tables)[0]
    status, found = client.predict({**row, "bank": {**row["bank"], "town": "Paris"}})
    assert status == 200
    (warning,) = found["warnings"]
    assert warning.endswith("of 'town' are no category of the model, and count as missing")
    missing = client.predict({**row, "bank": {**row["bank"], "town": None}})[1]
    assert found["scores"] == missing["scores"]


def test_requests_at_once_wait_for_one_another_and_get_their_own_answers(
    client: Client, tables: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, running = rows_of(tables), list[str]()
    asked = [rows[:3], rows[3:8], rows[8:12]]
    one_by_one = [client.predict({"rows": each}) for each in asked]

    def run(settings: Settings, **given: Any) -> RunFolder:
        running.append(settings.run_dir)
        assert running == [settings.run_dir]
        folder = run_local(settings, **given)
        running.clear()
        return folder

    monkeypatch.setattr("fedapp.runs.local.run_local", run)
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda each: client.predict({"rows": each}), asked)) == one_by_one


def test_what_a_party_fails_at_is_no_fault_of_the_request(
    client: Client, tables: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*asked: Any) -> None:
        raise OSError

    monkeypatch.setattr("clients.vertical.read_rows_to_predict", fails)
    with pytest.raises(PartyError, match=r"OSError in query\.vertical"):
        client.predict(rows_of(tables)[0])


def test_what_cannot_be_served_is_refused_with_what_can_be_done(
    train: Train, tables: dict[str, Path]
) -> None:
    run = train("secureboost")
    with pytest.raises(ConfigError, match=r"^inference must be one of .* got 'fast'"):
        open_scorer(run, "fast")
    with pytest.raises(ConfigError, match=r"^inference must be interactive or eini for a boosted"):
        open_scorer(run, "one-round")
    with pytest.raises(ConfigError, match=r"^-c must set what interactive reads, got explain"):
        open_scorer(run, overrides={"explain": "1"})
    RunFolder(run).add_to_summary({"engine": "deployment"})
    rule = r"^run must be of engine local or simulation .* of engine deployment .* allow-export"
    with pytest.raises(ConfigError, match=rule):
        open_scorer(run)
    RunFolder(run).add_to_summary({"engine": "local"})
    shutil.rmtree(home() / "sites" / "shop")
    with pytest.raises(DataError, match=r"^shop: model must have a part at this party, got none"):
        open_scorer(run)


def test_a_whole_model_takes_no_way_to_predict(settings: MakeSettings) -> None:
    run = run_local(settings(strategy="pax", parties=2)).path
    with pytest.raises(
        ConfigError, match=r"^--inference must be omitted for a model that is whole"
    ):
        open_scorer(run, "interactive")
