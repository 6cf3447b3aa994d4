"""Names of categories that few rows have stay at their site, in messages and in files."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.handshake import category_fields, look
from clients.vertical.opening import look as look_vertical
from fedapp.data.partition import SUBSETS
from fedapp.data.predictions import read_columns_of
from fedapp.data.schema import Roles
from fedapp.data.table import Table
from fedapp.errors import DataError
from fedapp.home import home
from fedapp.messages.handshake import HelloRequest, unpack_categories
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.messages.wire import from_records, to_bytes
from fedapp.runs.local import run_local
from fedapp.runs.predict import load_model, predict_table
from fedapp.site.check import check_site
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.store import PART_FILE
from fedapp.site.table import notes_on_classes, read_columns
from fedapp.trees.categories import RARE, recoded, without_rare
from tests.serving import Client
from tests.transcript import Listener

SECRET = "fabry-disease"  # of one row
SHORT = {"fedxgbllr__trees": 3, "fedxgbllr__rounds": 1, "fedxgbllr__epochs": 1}


def illnesses(n_rows=250):
    """A column with two frequent categories, one of four rows, one of a single row, and gaps."""
    words = ["flu", "cold", "cold", "", "flu"] * (n_rows // 5)
    return ["measles"] * 4 + words[4:-1] + [SECRET]


@pytest.fixture
def clinics(write_table):
    """``clinics(**more)``: node configs of three sites; only that of the first has the secret."""

    def make(**more):
        columns = [illnesses(), ["flu", "cold"] * 125, ["flu", "gout"] * 125]
        return [
            {
                "name": name,
                "data": write_table(name, 250, seed=place, illness=column),
                "min-rows": 20,
                **more,
            }
            for place, (name, column) in enumerate(zip("abc", columns, strict=True))
        ]

    return make


@pytest.fixture
def overheard(settings, sites):
    """A run of sites with these node configs, and every message of it."""

    def run(nodes, strategy, **more):
        app, given = Listener(), {"parties": len(nodes), "strategy": strategy, **more}
        return run_local(settings(**given), sites(*nodes), client_app=app), app

    return run


def who_shows(text, run, app):
    """Kinds of messages and names of the run's files in which a text is."""
    messages = {
        kind
        for kind, *pair in app.heard
        for message in pair
        if text.encode() in to_bytes(from_records(message.content, "sender")[1])
    }
    files = (path for path in run.path.rglob("*") if path.is_file())
    return messages | {path.name for path in files if text.encode() in path.read_bytes()}


HORIZONTAL = [
    ("pax", {"pax__aggregation": "secure"}),
    ("pax", {}),
    ("bagging", {}),
    ("cyclic", {}),
    ("fedavg-linear", {"fedavg_linear__rounds": 1}),
    ("fedxgbllr", SHORT),
]


@pytest.mark.by_default("pax-*secure*", "bagging*", "fedxgbllr*", "fedavg-linear*")
@pytest.mark.parametrize(("strategy", "more"), HORIZONTAL, ids=str)
def test_a_category_of_one_row_is_in_no_message_and_in_no_file(strategy, more, clinics, overheard):
    masked = {"least-parties": 3} if "pax__aggregation" in more else {}
    policy = {"share-categories": 10, "min-rows": 50, **masked}
    held_out = {"valid_fraction": 0.0, "test_fraction": 0.2}
    run, app = overheard(clinics(**policy), strategy, **held_out, **more)
    assert who_shows(SECRET, run, app) == set()
    assert who_shows("measles", run, app) == set()
    assert {"query.hello", "model.json"} <= who_shows("gout", run, app)
    names = json.loads((run.path / "model.json").read_text())["categories"][2]
    assert names == [RARE, "cold", "flu", "gout"]


@pytest.mark.slow
def test_the_same_run_shows_it_where_the_site_shares_all_names(clinics, overheard):
    shown = who_shows(SECRET, *overheard(clinics(), "pax", pax__aggregation="secure"))
    assert {"query.hello", "train.pax_open", "model.json", "columns.json"} <= shown


# The names that a site sends


def table_of(codes, names, is_given):
    """A table of one column of categories."""
    values = np.array(codes, np.float32).reshape(-1, 1)
    given = frozenset(["c"] if is_given else [])
    return Table(("c",), values, categories=(tuple(names),), given=given, kinds=("category",))


@pytest.mark.slow
@given(
    st.lists(
        st.lists(st.sampled_from([np.nan, *range(6)]), min_size=2, max_size=30),
        min_size=3,
        max_size=3,
    ),
    st.integers(2, 8),
    st.booleans(),
)
def test_no_name_of_fewer_rows_is_sent_unless_the_schema_gives_it(rows, fewest, is_given):
    names = [f"n{place}" for place in range(6)]
    subsets = {
        name: table_of(codes, names, is_given) for name, codes in zip(SUBSETS, rows, strict=True)
    }
    config = SiteConfig("a", "a.csv", shares_categories=fewest)
    fields = category_fields(config, subsets)
    (sent,) = unpack_categories(fields["category_counts"], fields["categories"], 1)
    counts = {name: sum(codes.count(place) for codes in rows) for place, name in enumerate(names)}
    if is_given:
        assert sent == tuple(names)
        return
    frequent = [name for name in names if counts[name] >= fewest]
    assert sent == (*([RARE] if len(frequent) < 6 else []), *frequent)
    # The site codes its rows by what all sites send.
    for joint in (sent, ("n3", "other"), (RARE, "n3", "other")):
        place_of = {name: place for place, name in enumerate(joint)}
        for table in subsets.values():
            values, unseen = recoded(table.values, table.categories, (joint,))
            expected = [
                np.nan
                if np.isnan(code)
                else place_of.get(names[int(code)], place_of.get(RARE, np.nan))
                for code in table.values[:, 0]
            ]
            np.testing.assert_array_equal(values[:, 0], expected)
            n_missing = int(np.isnan(expected).sum() - np.isnan(table.values).sum())
            assert unseen.tolist() == [n_missing]


def test_a_name_may_leave_from_the_given_number_of_rows_on():
    codes = np.array([[0], [0], [1], [1], [1], [np.nan]], np.float32)
    two = (("one", "two"),)
    assert without_rare(two, [codes[:3], codes[3:]], 2) == two
    assert without_rare(two, [codes[:3], codes[3:]], 3) == ((RARE, "two"),)
    assert without_rare(two, [codes[:3], codes[3:]], 4) == ((RARE,),)
    assert without_rare((None, *two), [np.hstack([codes, codes])], 3, {1}) == (None, *two)


def test_a_table_with_the_word_for_few_rows_is_refused(write_table, tmp_path):
    (schema := tmp_path / "schema.toml").write_text(f'[columns.c.codes]\n1 = "{RARE}"\n2 = "b"\n')
    node = {"name": "a", "data": write_table(c=[1, 2] * 20), "label": "y", "schema": schema}
    node = {key: str(value) for key, value in node.items()}
    request = HelloRequest("binary:logistic", 0.2, 0.2, 0, False)
    rule = rf"^categories must not be '{RARE}', which is for those of few rows".replace("(", r"\(")
    with pytest.raises(DataError, match=rule.replace(")", r"\)")):
        look(site_config({**node, "share-categories": 3}, {}), request)
    assert RARE in look(site_config(node, {}), request)[0].categories


# A table that meets the model later


@pytest.mark.slow
@pytest.mark.by_default("fedavg-linear")
@pytest.mark.parametrize("strategy", ["pax", "fedavg-linear"])
def test_a_name_that_the_model_does_not_have_is_coded_as_one_of_few_rows(
    strategy, clinics, overheard, write_table, tmp_path
):
    deep = {"pax__bins": "equal", "max_depth": 6, "num_boost_round": 8}
    more = {"fedavg_linear__rounds": 1} if strategy == "fedavg-linear" else deep
    run, _ = overheard(clinics(**{"share-categories": 10}), strategy, **more)

    def scores(name):
        table = write_table("new", 20, seed=7, illness=["flu", name] * 10)
        found = predict_table(run.path, str(table), "", tmp_path / "new.csv")
        assert not found.warnings
        return (tmp_path / "new.csv").read_text().splitlines()

    assert scores(SECRET) == scores("measles") == scores("never seen") == scores(RARE.strip())
    assert scores(SECRET) != scores("cold")
    # As the rows that the model was trained on.
    model, _ = load_model(run.path / "model.json")
    table = write_table("few", 4, illness=[SECRET, "cold", "gout", ""])
    codes = read_columns_of(str(table), model.columns, Roles(), categories=model.categories)
    np.testing.assert_array_equal(codes.values[:, 2], [0, 1, 3, np.nan])
    client, row = Client(run.path), {"a": 0.5, "b": -0.5}
    names = (SECRET, "measles", "new", None)
    *of_few, missing = (client.score({"row": {**row, "illness": name}})[1] for name in names)
    assert of_few[0] == of_few[1] == of_few[2] != missing
    assert not of_few[0]["warnings"]
    if strategy == "pax":
        column = json.loads((run.path / "columns.json").read_text())["columns"]["illness"]
        expected = {"names": [RARE, "cold", "flu", "gout"], "others": RARE}
        assert column == {"kind": "category", **expected}


@pytest.mark.slow
def test_the_model_is_that_of_tables_in_which_one_word_replaces_the_rare_ones(
    clinics, overheard, tmp_path, monkeypatch
):
    models = []
    for policy in ({"share-categories": 10}, {}):
        # A register that knows the first tables would have the second run wait.
        monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / f"home-{len(policy)}"))
        nodes = clinics(**policy)
        if not policy:
            path = Path(str(nodes[0]["data"]))
            path.write_text(re.sub(f"measles|{SECRET}", RARE.strip(), path.read_text()))
        run, _ = overheard(nodes, "pax", max_depth=6, num_boost_round=8, pax__bins="equal")
        models.append(json.loads((run.path / "model.json").read_text()))
        models[-1]["categories"][2][0] = models[-1]["categories"][2][0].strip()
    assert models[0] == models[1]


# Parties with different columns


def split_columns(write_table, **more):
    """Node configs of a party with labels and one without, of which each has the secret."""
    return [
        {
            "name": name,
            "data": write_table(name, 250, **{name: illnesses(), **columns}),
            "label": "y" if name == "bank" else "",
            "allow-export": True,
            **more,
        }
        for name, columns in (("bank", {"b": None}), ("shop", {"a": None, "y": None}))
    ]


DIVIDED = [
    ("secureboost", {}),
    ("federated-forest", {"federated_forest__master_keeps_model": True}),
]


@pytest.mark.slow
@pytest.mark.by_default("10-secureboost*", "True-secureboost*")
@pytest.mark.parametrize(("strategy", "more"), DIVIDED, ids=str)
@pytest.mark.parametrize("rows", [10, True])
def test_a_part_that_may_leave_has_no_name_of_few_rows(
    rows, strategy, more, write_table, vertical, sites
):
    nodes = split_columns(write_table, **{"share-categories": rows})
    run = run_local(vertical(strategy=strategy, **more), sites(*nodes))
    written = (run.path / "model.json").read_text()
    names = json.loads(written)["categories"]
    both = [{*each} for each in names if each]
    assert both == [{RARE, "flu", "cold"} if rows == 10 else {SECRET, "measles", "flu", "cold"}] * 2
    files = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert any(SECRET.encode() in content for content in files) is (rows is True)


@pytest.mark.slow
def test_a_part_that_stays_keeps_all_names(write_table, vertical, sites):
    nodes = split_columns(write_table, **{"share-categories": 10, "allow-export": False})
    run = run_local(vertical(allow_export=False), sites(*nodes))
    summary = json.loads((run.path / "summary.json").read_text())
    for name in ("bank", "shop"):
        part = home() / "sites" / name / summary["model_id"] / PART_FILE
        assert SECRET in part.read_text()
    written = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in written)


def test_names_that_no_schema_gives_are_not_exported_by_a_site_that_shares_none(write_table):
    bank, _ = split_columns(write_table, **{"share-categories": False})
    config = site_config({key: str(value).lower() for key, value in bank.items()}, {})
    rule = "given by the schema where share-categories is false in the node config, got none for "
    with pytest.raises(DataError, match=rule + "'bank'"):
        read_columns(config, seed=0)
    assert SECRET in read_columns(replace(config, allows_export=False), seed=0).categories[1]


# Names of classes, which always leave


LABELS = ["yes", "no"] * 30 + ["perhaps"] * 4
NOTE = "1 of 3 classes have fewer than 10 rows (share-categories), and names of classes leave the "


@pytest.mark.parametrize(("limits", "leaves"), [({}, True), ({"least-parties": 3}, False)])
def test_a_class_of_few_rows_is_warned_of(limits, leaves, write_table, caplog):
    node = {"name": "a", "data": str(write_table(n_rows=64, y=LABELS)), "label": "y", **limits}
    config = site_config({**node, "share-categories": 10}, {})
    request = HelloRequest("multi:softprob", 0.2, 0.2, 0, False)
    reply, _ = look(config, request)
    assert any(note.startswith(NOTE) for note in reply.notes) is leaves
    assert [NOTE in line for line in caplog.messages] == [True]
    assert any(note.startswith(NOTE) for note in check_site(config, {}, (0.2, 0.2), 6).notes)
    caplog.clear()
    assert not look(replace(config, shares_categories=True), request)[0].notes
    assert not caplog.messages


def test_a_class_of_few_rows_is_warned_of_where_columns_differ(write_table, caplog):
    table = write_table(n_rows=64, y=LABELS, customer=range(64))
    node = {"name": "a", "data": str(table), "label": "y", "id": "customer"}
    config = site_config({**node, "share-categories": 10}, {})
    look_vertical(config, VerticalHelloRequest(True, 1000, 0, "", False))
    assert [NOTE in line for line in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("labels", "noted"), [([0.5, 1.5, 2.0], False), ([0, 1, 1], True), (["a", "b", "a"], True)]
)
def test_only_classes_are_counted(labels, noted):
    config = SiteConfig("a", "a.csv", shares_categories=10)
    assert bool(notes_on_classes(config, np.array(labels))) is noted
    assert not notes_on_classes(replace(config, shares_categories=True), np.array(labels))
    assert not notes_on_classes(config, None)


@pytest.mark.parametrize("shares", [True, False, 10])
def test_a_warning_quotes_no_category_of_a_site_that_withholds_names(shares, write_table, tmp_path):
    words = ["blue", "red"] * 19 + ["None", "#N/A"]
    (schema := tmp_path / "schema.toml").write_text("")
    node = {"name": "a", "data": write_table(c=words, customer=range(40)), "label": "y"}
    node = {key: str(value) for key, value in {**node, "id": "customer", "schema": schema}.items()}
    config = replace(site_config(node, {}), shares_categories=shares, shares_names=True)
    vertical_reply, *_ = look_vertical(config, VerticalHelloRequest(True, 1000, 0, "", False))
    texts = list(vertical_reply.notes)
    if shares is not False:
        texts += look(config, HelloRequest("binary:logistic", 0.2, 0.2, 0, False))[0].notes
    (quoted,) = {text for text in texts if "pandas takes for missing" in text}
    assert ("None" in quoted, "#N/A" in quoted, "[withheld]" in quoted) == (
        (True, True, False) if shares is True else (False, False, True)
    )
