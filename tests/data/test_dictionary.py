"""Categories: parties go by one dictionary, and names of few rows stay at their site."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clients.handshake import category_fields, look
from clients.vertical.opening import look as look_vertical
from fedapp.data.labels import number_written
from fedapp.data.partition import SUBSETS
from fedapp.data.table import Table
from fedapp.errors import DataError, PartyError, ProtocolError
from fedapp.home import home
from fedapp.messages.handshake import (
    MOST_LETTERS,
    HelloReply,
    HelloRequest,
    dictionary_digest,
    pack_categories,
    unpack_categories,
)
from fedapp.messages.vertical import VerticalHelloRequest
from fedapp.messages.wire import from_records, to_bytes
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.check import check_site
from fedapp.site.settings import SiteConfig, site_config
from fedapp.site.store import PART_FILE
from fedapp.site.table import read_columns
from fedapp.trees.categories import RARE, recoded, without_rare
from fedapp.trees.linear import LinearModel
from strategies.common_table import common_table, joint_dictionary, joint_kinds, similar_names
from tests.federated import model_of, summary_of
from tests.serving import Client
from tests.transcript import Listener

TWO, GIVEN_TWO = (("blue", "red"), None), (("red", "green"), None)


def said(party, dictionary, /, given=(), shares=True, **changes):
    """What a party with this dictionary tells."""
    packed = pack_categories(dictionary)
    digests = tuple(
        dictionary_digest(names) if place in given else ""
        for place, names in enumerate(dictionary)
        if names
    )
    if not shares:
        packed["categories"] = ()
    reply = HelloReply(
        *(9, 0, 3, ("color", "size"), ("0", "1"), "", "", 0.0, 0.0),
        name=party,
        versions=(),
        simulated=False,
        fingerprint="0" * 32,
        notes=(),
        **packed,
        untrained=(),
        digests=digests,
    )
    return replace(reply, **changes)


def joint(*replies):
    parties = {reply.name: reply for reply in replies}
    joint_kinds(parties)
    return joint_dictionary(parties)


# What the server makes of it

JOINT = {
    "the union, sorted by text": (
        said("a", TWO),
        said("b", (("Zebra", "blue", "éclair"), None)),
        (("Zebra", "blue", "red", "éclair"), None),
    ),
    "no categories": (said("a", ()), said("b", ()), ()),
    "no value at one party": (said("a", TWO), said("b", ((), None)), TWO),
    "as a schema gives them": (said("a", GIVEN_TWO, (0,)), said("b", TWO), GIVEN_TWO),
    "as both schemas give them": (
        said("a", GIVEN_TWO, (0,), shares=False),
        said("b", GIVEN_TWO, (0,)),
        GIVEN_TWO,
    ),
}
IS_MIXED = r"column 'color' must be of one kind at all parties, got numbers at a, names of categor"
NO_DIGESTS = r"a: HelloReply\.digests must be of the names that a schema gives"
TOLD_TWO = said("b", TWO)
NOT_JOINT = {  # what a tells, the error, and what b tells, if not TOLD_TWO
    "numbers at one party": (
        said("a", (None, ("s",))),
        IS_MIXED + "ies at b: write it alike everywhere, or let the schema of a table say its type",
    ),
    "schemas with another order": (
        said("a", TWO, (0,)),
        "b: categories of column 'color' must be the same in all schemas, in the same order, got "
        "others than at a",
        said("b", (("red", "blue"), None), (0,)),
    ),
    "names that no party sends": (
        said("a", TWO, (0,), shares=False),
        "a: categories of column 'color' must be sent by a party whose schema gives them",
        said("b", ((), None)),
    ),
    "a digest of others": (said("a", TWO, digests=("0" * 64,)), NO_DIGESTS),
    "a name twice": (
        said("a", TWO, categories=("red", "red")),
        "a: .*must be distinct in a column",
    ),
    "a name too few": (said("a", TWO, categories=("red",)), "a: .*categories must be 2, got 1"),
    "a count too few": (
        said("a", TWO, category_counts=np.int32([2])),
        "a: .*category_counts must be one a column of 2, got 1",
    ),
}


@pytest.mark.parametrize(("one", "other", "expected"), JOINT.values(), ids=JOINT)
def test_the_dictionary_has_the_names_of_both_parties(one, other, expected):
    assert joint(one, other) == expected


@pytest.mark.parametrize("case", NOT_JOINT)
def test_what_has_no_dictionary_or_does_not_fit_is_refused_by_party(case):
    one, rule, *other = NOT_JOINT[case]
    with pytest.raises((DataError, ProtocolError), match=f"^{rule}"):
        joint(one, *(other or [TOLD_TWO]))


def test_packed_categories_come_back_and_have_few_letters():
    known = (None, ("b", "a"), (), ("c",))
    packed = pack_categories(known)
    assert unpack_categories(packed["category_counts"], packed["categories"], 4) == known
    names = tuple(f"{place:04}" + "x" * 996 for place in range(MOST_LETTERS // 1000 + 1))
    with pytest.raises(ValueError, match=r"categories must be .* letters together at most"):
        pack_categories((names,))


def test_numbers_however_written_are_one_and_no_party_can_choose_their_hashes():
    for names in (("1.50", "15e-1", "+1.5", "0001.5"), ("0", "-0.0", "0e9"), ("1,000", "1e3")):
        assert len({number_written(name) for name in names}) == 1
    assert number_written("1") != number_written("-1") != number_written("10")
    # As numbers they would all have hash 0, which makes a dictionary of them quadratic.
    names = [str(k * (2**61 - 1)) for k in range(1, 100)]
    assert len({hash(number_written(name)) for name in names}) == len(names)


def test_another_spelling_at_one_party_is_noted_and_two_of_one_party_are_not():
    first, second = said("a", (("Self-emp", "x"), None)), said("b", (("self emp", "X", "x"), None))
    warning = "categories of 'color' differ only in spelling: 'Self-emp' (a) and 'self emp' (b)"
    assert similar_names({"a": first, "b": second}, first.columns) == [warning]


def test_a_resumed_run_keeps_the_dictionary_whoever_is_left(settings):
    parties = {"a": said("a", TWO), "b": said("b", (("green", "red"), None))}
    run = settings(strategy="bagging", parties=2)
    table = common_table(parties, run)
    assert table.categories == (("blue", "green", "red"), None)
    assert common_table({"a": parties["a"]}, run, table) == table
    assert common_table({"a": parties["a"]}, run).categories == TWO


# Whole runs


@pytest.fixture
def of_colours(write_table, sites, settings):
    """``of_colours(strategy, first={...}, second={...})``: a run of two sites with other colours,
    and what more their node configs say."""
    rng = np.random.default_rng(1)
    places = {"a": ["red", "blue", ""], "b": ["green", "green", "red"]}
    nodes = [
        {"name": name, "data": write_table(name, 60, place, color=rng.permutation(words * 20))}
        for place, (name, words) in enumerate(places.items())
    ]

    def run(strategy="fedavg-linear", first=(), second=(), **more):
        given = {"parties": 2, "fedavg_linear__rounds": 2, "fedxgbllr__trees": 3}
        given |= {"fedxgbllr__rounds": 1, "fedxgbllr__epochs": 1, **more}
        contexts = sites({**nodes[0], **dict(first)}, {**nodes[1], **dict(second)})
        return run_local(settings(strategy=strategy, **given), contexts)

    return run


def categories_of(run):
    return json.loads((run.path / "model.json").read_text())["categories"][2]


def predicted(run, data, output):
    """Predictions of a table, and what is said of it."""
    found = predict_table(run.path, str(data), "", output)
    lines = output.read_text().splitlines()[1:]
    return [float(line.split(",")[1]) for line in lines], list(found.warnings)


@pytest.mark.by_default("bagging", "fedavg-linear", "pax")
@pytest.mark.parametrize("strategy", ["bagging", "fedavg-linear", "fedxgbllr", "pax"])
def test_a_run_goes_by_the_union_and_unseen_names_of_a_table_to_predict_are_missing(
    strategy, of_colours, write_table, tmp_path
):
    run = of_colours(strategy)
    assert categories_of(run) == ["blue", "green", "red"]
    assert summary_of(run)["categories"] == {"color": {"names": 3, "unseen": {}}}
    if strategy == "fedavg-linear":
        inputs = ["a", "b", "color=blue", "color=green", "color=red"]
        assert [*model_of(run, LinearModel).inputs] == inputs
    output, given = tmp_path / "out.csv", {"n_rows": 30, "seed": 9}
    words = ["red", "green", "pink"] * 10
    known = write_table("known", **given, color=[w.replace("pink", "") for w in words])
    found, notes = predicted(run, write_table("new", **given, color=words), output)
    rule = "values of 'color' are no category of the model, and count as missing"
    assert notes == [f"10 {rule}"]
    assert predicted(run, known, output) == (found, [])
    assert len(set(found)) > 2


# A site that keeps its names to itself


@pytest.fixture
def schema(tmp_path):
    """A schema that gives two colours."""
    path = tmp_path / "schema.toml"
    path.write_text('[columns.color]\ntype = "category"\ncategories = ["red", "blue"]\n')
    return {"schema": str(path)}


def test_a_site_that_keeps_its_names_goes_by_those_that_its_schema_gives(of_colours, schema):
    run = of_colours(first=schema, second=schema | {"share-categories": "false"})
    assert categories_of(run) == ["red", "blue"]
    run = of_colours(first=schema)  # what the given names lack counts as missing
    assert summary_of(run)["categories"] == {"color": {"names": 2, "unseen": {"b": 40}}}
    warning = "b: 40 values of 'color' are not among its categories, and count as missing"
    assert warning in summary_of(run)["warnings"]
    rule = "categories of feature columns must be given by the schema where share-categories is fal"
    with pytest.raises(PartyError, match=rule):
        of_colours(second={"share-categories": "false"})


def test_a_site_that_keeps_its_names_tells_none_and_refuses_an_unknown_objective(
    write_table, schema
):
    table = str(write_table(color=["red", "green"] * 20))
    config = site_config({"name": "b", "data": table, "label": "y", **schema}, {})
    request = HelloRequest("binary:logistic", 0.2, 0.2, 0, False)
    reply, _ = look(replace(config, shares_categories=False), request)
    assert (reply.categories, reply.digests) == ((), (dictionary_digest(("red", "blue")),))
    assert look(config, request)[0].categories == ("red", "blue")
    with pytest.raises(ProtocolError, match=r"^b: HelloRequest\.objective must be one of binary:"):
        look(config, replace(request, objective="reg:none"))


@pytest.mark.parametrize(
    ("tampered", "is_given", "rule"),
    [
        ((None, ("red",), None), False, "feature column 'b' must be categories, as at the ot"),
        (
            (None, None, ("blue", "red")),
            True,
            "categories must be those that the site's schema giv",
        ),
    ],
)
def test_a_dictionary_of_another_table_is_refused_by_the_site(
    of_colours, schema, monkeypatch, tampered, is_given, rule
):
    monkeypatch.setattr("strategies.common_table.joint_dictionary", lambda *_: tampered)
    with pytest.raises((PartyError, ProtocolError), match=rule):
        of_colours(first=schema if is_given else {})


# Names that few rows have stay at their site, in messages and in files

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
