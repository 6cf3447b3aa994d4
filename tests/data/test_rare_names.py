"""Names of categories that few rows have stay at their site, in messages and in files."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.handshake import category_fields, look
from clients.vertical.opening import look as look_vertical
from fedapp.data.partition import SUBSETS
from fedapp.data.table import Table
from fedapp.errors import DataError
from fedapp.home import home
from fedapp.messages.handshake import HelloRequest, unpack_categories
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.messages.wire import from_records, to_bytes
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.check import check_site
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.store import PART_FILE
from fedapp.site.table import read_columns
from fedapp.trees.categories import RARE, recoded, without_rare
from tests.federated import summary_of
from tests.serving import Client
from tests.transcript import Listener

SECRET = "fabry-disease"  # of one row
TEN = {"share-categories": 10}
LINEAR = {"fedavg_linear__rounds": 1}
HELLO = HelloRequest("binary:logistic", 0.2, 0.2, 0, False)


def illnesses(n_rows=250):
    """A column with two frequent categories, one of four rows, one of a single row, and gaps."""
    words = ["flu", "cold", "cold", "", "flu"] * (n_rows // 5)
    return ["measles"] * 4 + words[4:-1] + [SECRET]


@pytest.fixture
def overheard(settings, sites, write_table):
    """``overheard(strategy, policy)``: a run of three sites of which only the first has the secret,
    and every message of it."""

    def run(strategy, policy, **more):
        columns = illnesses(), ["flu", "cold"] * 125, ["flu", "gout"] * 125
        nodes = [
            {"name": name, "data": write_table(name, 250, seed=place, illness=column)}
            for place, (name, column) in enumerate(zip("abc", columns, strict=True))
        ]
        app, given = Listener(), {"parties": 3, "strategy": strategy, **more}
        contexts = sites(*({**node, "min-rows": 20, **policy} for node in nodes))
        return run_local(settings(**given), contexts, client_app=app), app

    return run


def who_shows(text, run, app):
    """Kinds of messages and names of the run's files in which a text is."""
    messages = {
        kind
        for kind, *pair in app.heard
        for message in pair
        if text.encode() in to_bytes(from_records(message.content, "sender")[1])
    }
    return messages | {path.name for path in files_with(text, run)}


def files_with(text, run):
    files = (path for path in run.path.rglob("*") if path.is_file())
    return [path for path in files if text.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("strategy", "more"),
    [
        ("pax", {"pax__aggregation": "secure"}),
        ("bagging", {}),
        ("fedavg-linear", LINEAR),
        ("fedxgbllr", {f"fedxgbllr__{name}": 1 for name in ("trees", "rounds", "epochs")}),
    ],
    ids=str,
)
def test_a_category_of_one_row_is_in_no_message_and_in_no_file(strategy, more, overheard):
    masked = {"least-parties": 3} if "pax__aggregation" in more else {}
    held_out = {"valid_fraction": 0.0, "test_fraction": 0.2}
    run, app = overheard(strategy, {**TEN, "min-rows": 50, **masked}, **held_out, **more)
    assert who_shows(SECRET, run, app) == who_shows("measles", run, app) == set()
    assert {"query.hello", "model.json"} <= who_shows("gout", run, app)
    names = json.loads((run.path / "model.json").read_text())["categories"][2]
    assert names == [RARE, "cold", "flu", "gout"]
    if strategy == "pax":
        column = json.loads((run.path / "columns.json").read_text())["columns"]["illness"]
        assert column == {"kind": "category", "names": names, "others": RARE}


# The names that a site sends


def table_of(codes, names, is_given):
    """A table of one column of categories."""
    values = np.array(codes, np.float32).reshape(-1, 1)
    given = frozenset(["c"] if is_given else [])
    return Table(("c",), values, categories=(tuple(names),), given=given, kinds=("category",))


CODES = st.lists(st.sampled_from([np.nan, *range(6)]), min_size=2, max_size=30)


@given(st.tuples(CODES, CODES, CODES), st.integers(2, 8), st.booleans())
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
    two, subsets = (("one", "two"),), [codes[:3], codes[3:]]
    due = {2: two, 3: ((RARE, "two"),), 4: ((RARE,),)}
    assert {fewest: without_rare(two, subsets, fewest) for fewest in due} == due
    assert without_rare((None, *two), [np.hstack([codes, codes])], 3, {1}) == (None, *two)


def test_a_table_with_the_word_for_few_rows_is_refused(write_table, tmp_path):
    (schema := tmp_path / "schema.toml").write_text(f'[columns.c.codes]\n1 = "{RARE}"\n2 = "b"\n')
    node = {"name": "a", "data": write_table(c=[1, 2] * 20), "label": "y", "schema": schema}
    node = {key: str(value) for key, value in node.items()}
    rule = re.escape(f"categories must not be '{RARE}', which is for those of few rows")
    with pytest.raises(DataError, match=f"^{rule}"):
        look(site_config({**node, "share-categories": 3}, {}), HELLO)
    assert RARE in look(site_config(node, {}), HELLO)[0].categories


# A table that meets the model later


def test_a_name_that_the_model_does_not_have_is_coded_as_one_of_few_rows(
    overheard, write_table, tmp_path
):
    run, _ = overheard("fedavg-linear", TEN, **LINEAR)

    def scores(name):
        table = write_table("new", 20, seed=7, illness=["flu", name] * 10)
        assert not predict_table(run.path, str(table), "", tmp_path / "out.csv").warnings
        return (tmp_path / "out.csv").read_text().splitlines()

    assert scores(SECRET) == scores("measles") == scores("never seen") == scores(RARE.strip())
    assert scores(SECRET) != scores("cold")
    client, row = Client(run.path), {"a": 0.5, "b": -0.5}
    names = (SECRET, "measles", "new", None)
    *of_few, missing = (client.score({"row": {**row, "illness": name}})[1] for name in names)
    assert of_few[0] == of_few[1] == of_few[2] != missing
    assert not of_few[0]["warnings"]


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


@pytest.mark.by_default("10-secureboost*", "True-secureboost*")
@pytest.mark.parametrize(
    ("strategy", "more"),
    [("secureboost", {}), ("federated-forest", {"federated_forest__master_keeps_model": True})],
    ids=str,
)
@pytest.mark.parametrize("rows", [10, True])
def test_a_part_that_may_leave_has_no_name_of_few_rows_and_one_that_stays_all(
    rows, strategy, more, write_table, vertical, sites
):
    nodes = split_columns(write_table, **{"share-categories": rows})
    run = run_local(vertical(strategy=strategy, **more), sites(*nodes))
    names = json.loads((run.path / "model.json").read_text())["categories"]
    both = [{*each} for each in names if each]
    assert both == [{RARE, "flu", "cold"} if rows == 10 else {SECRET, "measles", "flu", "cold"}] * 2
    assert bool(files_with(SECRET, run)) is (rows is True)
    if (strategy, rows) == ("secureboost", 10):
        nodes = [{**node, "allow-export": False} for node in nodes]
        run = run_local(vertical(allow_export=False), sites(*nodes))
        for name in ("bank", "shop"):
            part = home() / "sites" / name / summary_of(run)["model_id"] / PART_FILE
            assert SECRET in part.read_text()
        assert not files_with(SECRET, run)


def test_names_that_no_schema_gives_are_not_exported_by_a_site_that_shares_none(write_table):
    bank, _ = split_columns(write_table, **{"share-categories": False})
    config = site_config({key: str(value).lower() for key, value in bank.items()}, {})
    rule = "given by the schema where share-categories is false in the node config, got none for "
    with pytest.raises(DataError, match=rule + "'bank'"):
        read_columns(config, seed=0)


# Names of classes, which always leave


LABELS = ["yes", "no"] * 30 + ["perhaps"] * 4
NOTE = "1 of 3 classes have fewer than 10 rows (share-categories), and names of classes leave the "
VERTICAL_HELLO = VerticalHelloRequest(True, 1000, 0, "", False)


@pytest.mark.parametrize(("limits", "leaves"), [({}, True), ({"least-parties": 3}, False)])
def test_a_class_of_few_rows_is_warned_of(limits, leaves, write_table, caplog):
    table = str(write_table(n_rows=64, y=LABELS, i=[f"c{n}" for n in range(64)]))
    node = {"name": "a", "data": table, "label": "y", "id": "i", **TEN}
    config = site_config({**node, **limits}, {})
    request = HelloRequest("multi:softprob", 0.2, 0.2, 0, False)
    reply, _ = look(config, request)
    assert any(note.startswith(NOTE) for note in reply.notes) is leaves
    assert sum(NOTE in line for line in caplog.messages) == 1
    bare = site_config({**node, **limits, "id": "", "drop-columns": "i"}, {})
    assert any(note.startswith(NOTE) for note in check_site(bare, {}, (0.2, 0.2), 6).notes)
    caplog.clear()
    assert not look(replace(config, shares_categories=True), request)[0].notes
    assert not any(NOTE in line for line in caplog.messages)
    look_vertical(site_config(node, {}), VERTICAL_HELLO)
    assert sum(NOTE in line for line in caplog.messages) == 1


@pytest.mark.parametrize("shares", [True, False, 10])
def test_a_warning_quotes_no_category_of_a_site_that_withholds_names(shares, write_table, tmp_path):
    words = ["blue", "red"] * 19 + ["None", "#N/A"]
    (schema := tmp_path / "schema.toml").write_text("")
    node = {"name": "a", "data": write_table(c=words, customer=range(40)), "label": "y"}
    node = {key: str(value) for key, value in {**node, "id": "customer", "schema": schema}.items()}
    config = replace(site_config(node, {}), shares_categories=shares, shares_names=True)
    texts = list(look_vertical(config, VERTICAL_HELLO)[0].notes)
    if shares is not False:
        texts += look(config, HELLO)[0].notes
    (quoted,) = {text for text in texts if "pandas takes for missing" in text}
    assert ("None" in quoted, "#N/A" in quoted, "[withheld]" in quoted) == (
        (True, True, False) if shares is True else (False, False, True)
    )
