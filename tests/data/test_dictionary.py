"""Horizontal parties whose tables have categories go by one dictionary, or are told why not."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xgboost

from clients.handshake import look
from fedapp.errors import DataError, PartyError, ProtocolError
from fedapp.messages.handshake import (
    MOST_LETTERS,
    HelloReply,
    HelloRequest,
    dictionary_digest,
    pack_categories,
    unpack_categories,
)
from fedapp.records.document import load
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.settings import site_config
from fedapp.trees.linear import LinearModel
from strategies.common_table import common_table, joint_dictionary, joint_kinds, similar_names

TWO = (("blue", "red"), None)


def said(party, categories, given=(), shares=True, columns=("color", "size")):
    """What a party with this dictionary tells."""
    told = pack_categories(categories)
    digests = tuple(
        dictionary_digest(names) if place in given else ""
        for place, names in enumerate(categories)
        if names
    )
    if not shares:
        told["categories"] = ()
    return HelloReply(
        *(9, 0, 3, columns, ("0", "1"), "", "", 0.0, 0.0, ()),
        name=party,
        simulated=False,
        fingerprint="0" * 32,
        notes=(),
        **told,
        untrained=(),
        digests=digests,
    )


def joint(*replies):
    parties = {reply.name: reply for reply in replies}
    joint_kinds(parties)
    return joint_dictionary(parties)


# What the server makes of it


GIVEN_TWO = (("red", "green"), None)
JOINT = {
    "the union, sorted by text": (
        said("a", TWO),
        said("b", (("Zebra", "blue", "éclair"), None)),
        (("Zebra", "blue", "red", "éclair"), None),
    ),
    "no categories": (said("a", ()), said("b", ()), ()),
    "no value at one party": (said("a", TWO), said("b", ((), None)), TWO),
    "no value of a number either": (said("a", TWO), said("b", (("red",), ())), TWO),
    "no value at both": (said("a", ((), None)), said("b", ((), None)), ()),
    "as a schema gives them": (said("a", GIVEN_TWO, (0,)), said("b", TWO), GIVEN_TWO),
    "as both schemas give them": (
        said("a", GIVEN_TWO, (0,), shares=False),
        said("b", GIVEN_TWO, (0,)),
        GIVEN_TWO,
    ),
}


@pytest.mark.parametrize(("one", "other", "expected"), JOINT.values(), ids=JOINT)
def test_the_dictionary_has_the_names_of_both_parties(one, other, expected):
    assert joint(one, other) == expected


IS_MIXED = r"column 'color' must be of one kind at all parties, got numbers at a, names of categor"
NOT_JOINT = {
    "numbers at one party": (
        said("a", (None, ("s",))),
        said("b", TWO),
        IS_MIXED + "ies at b: write it alike everywhere, or let the schema of a table say its type",
    ),
    "numbers alone at one party": (said("a", ()), said("b", TWO), IS_MIXED),
    "schemas with another order": (
        said("a", TWO, (0,)),
        said("b", (("red", "blue"), None), (0,)),
        "b: categories of column 'color' must be the same in all schemas, in the same order, got "
        "others than at a",
    ),
    "names that no party sends": (
        said("a", TWO, (0,), shares=False),
        said("b", ((), None)),
        "a: categories of column 'color' must be sent by a party whose schema gives them",
    ),
}


@pytest.mark.parametrize(("one", "other", "rule"), NOT_JOINT.values(), ids=NOT_JOINT)
def test_columns_that_have_no_dictionary_are_refused_by_column_and_party(one, other, rule):
    with pytest.raises(DataError, match=f"^{rule}"):
        joint(one, other)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"digests": ()}, r"HelloReply\.digests must be of the names that a schema gives"),
        ({"digests": ("0" * 64,)}, r"HelloReply\.digests must be of the names"),
        ({"digests": ("red",)}, r"HelloReply\.digests must be of the names"),
        ({"categories": ("red", "red")}, r"categories must be distinct in a column"),
        ({"categories": ("red",)}, r"categories must be 2, got 1"),
        ({"category_counts": np.int32([2])}, r"category_counts must be one a column of 2, got 1"),
    ],
)
def test_counts_names_and_digests_that_do_not_fit_are_refused(change, rule):
    with pytest.raises(ProtocolError, match=f"^a: .*{rule}"):
        joint(replace(said("a", TWO), **change), said("b", TWO))


def test_more_letters_than_a_message_holds_are_refused():
    names = tuple(f"{place:04}" + "x" * 996 for place in range(MOST_LETTERS // 1000 + 1))
    with pytest.raises(ValueError, match=r"categories must be .* letters together at most"):
        pack_categories((names,))


def test_packed_categories_come_back():
    known = (None, ("b", "a"), (), ("c",))
    told = pack_categories(known)
    assert unpack_categories(told["category_counts"], told["categories"], 4) == known


def test_another_spelling_at_one_party_is_noted_and_two_of_one_party_are_not():
    first, second = said("a", (("Self-emp", "x"), None)), said("b", (("self emp", "X", "x"), None))
    notes = similar_names({"a": first, "b": second}, first.columns)
    told = "categories of 'color' differ only in spelling: 'Self-emp' (a) and 'self emp' (b)"
    assert notes == [told]


def test_a_resumed_run_keeps_the_dictionary_whoever_is_left(settings):
    parties = {"a": said("a", TWO), "b": said("b", (("green", "red"), None))}
    run = settings(strategy="bagging", parties=2)
    table = common_table(parties, run)
    assert table.categories == (("blue", "green", "red"), None)
    assert common_table({"a": parties["a"]}, run, table) == table
    assert common_table({"a": parties["a"]}, run).categories == TWO


# Whole runs


@pytest.fixture
def colours(write_table):
    """Node configs of two sites with other colours."""
    rng = np.random.default_rng(1)
    places = {"a": ["red", "blue", ""], "b": ["green", "red"]}
    return [
        {"name": name, "data": write_table(name, 60, place, color=rng.choice(words, 60))}
        for place, (name, words) in enumerate(places.items())
    ]


def trained(settings, sites, **more):
    given = {"parties": 2, "strategy": "fedavg-linear", "fedavg_linear__rounds": 2, **more}
    return run_local(settings(**given), sites)


@pytest.fixture
def of_colours(colours, sites, settings):
    """``of_colours(strategy, **more)``: a run of the two sites with other colours."""
    return lambda strategy, **more: trained(settings, sites(*colours), strategy=strategy, **more)


def read(path):
    return json.loads(path.read_text())


def test_a_run_of_sites_with_other_names_goes_by_the_union(colours, sites, settings):
    run = trained(settings, sites(*colours))
    model, summary = load(run.path / "model.json", LinearModel), read(run.path / "summary.json")
    assert model.categories == (None, None, ("blue", "green", "red"))
    assert [*model.inputs] == ["a", "b", "color=blue", "color=green", "color=red"]
    assert summary["categories"] == {"color": {"names": 3, "unseen": {}}}


# A table to predict


def predicted(run, data, output):
    """Predictions of a table, and what is said of it."""
    found = predict_table(run.path, str(data), "", output)
    lines = output.read_text().splitlines()[1:]
    return [float(line.split(",")[1]) for line in lines], list(found.warnings)


@pytest.mark.parametrize("strategy", ["bagging", "fedavg-linear", "fedxgbllr", "pax"])
def test_a_table_to_predict_is_read_by_its_names_and_unseen_ones_are_missing(
    strategy, of_colours, write_table, tmp_path
):
    more = {"fedxgbllr__trees": 3, "fedxgbllr__rounds": 1, "fedxgbllr__epochs": 1}
    run = of_colours(strategy, **more)
    assert read(run.path / "model.json")["categories"][2] == ["blue", "green", "red"]
    given = {"n_rows": 30, "seed": 9}
    words = ["red", "green", "pink"] * 10
    known = write_table("known", **given, color=[w.replace("pink", "") for w in words])
    found, notes = predicted(run, write_table("new", **given, color=words), tmp_path / "scores.csv")
    assert notes == ["10 values of 'color' are no category of the model, and count as missing"]
    assert predicted(run, known, tmp_path / "known-scores.csv") == (found, [])
    assert len(set(found)) > 2


def test_numbers_in_place_of_categories_are_refused_and_names_that_look_like_them_are_not(
    of_colours, write_table, tmp_path
):
    run = of_colours("bagging")
    table = write_table("new", n_rows=30, color=range(30))
    notes = predicted(run, table, tmp_path / "out.csv")[1]
    assert notes == ["30 values of 'color' are no category of the model, and count as missing"]
    with pytest.raises(DataError, match=r"feature column 'a' must be numbers.*, as in the mo"):
        predicted(
            run,
            write_table("text", n_rows=30, a=["x", "y"] * 15, color=["red"] * 30),
            tmp_path / "out.csv",
        )


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["bagging", "cyclic", "pax"])
def test_stock_xgboost_predicts_alike_with_the_names_beside_its_model(
    strategy, of_colours, write_table, tmp_path
):
    run = of_colours(strategy)
    words = ["red", "green", "pink", "", "blue"] * 6
    table = write_table("new", n_rows=30, seed=4, color=words)
    names = read(run.path / "columns.json")["columns"]["color"]["names"]
    assert names == read(run.path / "model.json")["categories"][2] == ["blue", "green", "red"]
    codes = [names.index(word) if word in names else np.nan for word in words]
    rows = [line.split(",")[:2] for line in table.read_text().splitlines()[1:]]
    values = np.column_stack((np.array(rows, np.float32), codes)).astype(np.float32)
    booster = xgboost.Booster(model_file=run.path / "model.xgb.json")
    types = {"feature_names": booster.feature_names, "feature_types": booster.feature_types}
    ours = predicted(run, table, tmp_path / "out.csv")[0]
    theirs = booster.predict(xgboost.DMatrix(values, **types, enable_categorical=True))
    np.testing.assert_allclose(theirs, ours, atol=1e-6)


# A site that keeps its names to itself


GIVEN = """
[columns.color]
type = "category"
categories = ["red", "blue"]
"""


@pytest.fixture
def schema(tmp_path):
    """A schema that gives two colours."""
    path = tmp_path / "schema.toml"
    path.write_text(GIVEN)
    return path


def test_a_site_that_keeps_its_names_goes_by_those_that_its_schema_gives(
    colours, sites, settings, schema
):
    first, second = ({**node, "schema": str(schema)} for node in colours)
    run = trained(settings, sites(first, {**second, "share-categories": "false"}))
    assert read(run.path / "model.json")["categories"][2] == ["red", "blue"]


def test_a_site_that_keeps_its_names_must_have_a_schema_that_gives_them(colours, sites, settings):
    first, second = colours
    rule = "categories of feature columns must be given by the schema where share-categories is fal"
    with pytest.raises(PartyError, match=rule):
        trained(settings, sites(first, {**second, "share-categories": "false"}))


def test_what_the_given_names_lack_counts_as_missing_and_stands_in_the_summary(
    colours, sites, settings, schema
):
    first, second = colours
    run = trained(settings, sites({**first, "schema": str(schema)}, second))
    n_green = Path(str(second["data"])).read_text().count("green")
    summary = read(run.path / "summary.json")
    assert summary["categories"] == {"color": {"names": 2, "unseen": {"b": n_green}}}
    told = f"b: {n_green} values of 'color' are not among its categories, and count as missing"
    assert told in summary["warnings"]


def test_a_site_that_keeps_its_names_tells_none(colours, schema):
    node = {**colours[1], "label": "y", "schema": str(schema)}
    config = site_config({key: str(value) for key, value in node.items()}, {})
    request = HelloRequest("binary:logistic", 0.2, 0.2, 0, False)
    told, _ = look(replace(config, shares_categories=False), request)
    assert (told.categories, told.digests) == ((), (dictionary_digest(("red", "blue")),))
    assert look(config, request)[0].categories == ("red", "blue")


def test_an_objective_that_there_is_not_is_refused(colours):
    node = {key: str(value) for key, value in {**colours[1], "label": "y"}.items()}
    with pytest.raises(ProtocolError, match=r"^b: HelloRequest\.objective must be one of binary:"):
        look(site_config(node, {}), HelloRequest("reg:none", 0.2, 0.2, 0, False))


def test_a_dictionary_of_another_table_is_refused_by_the_site(colours, sites, settings):
    def tampered(*_):
        return (None, ("red",), None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.common_table.joint_dictionary", tampered)
        with pytest.raises(PartyError, match="feature column 'b' must be categories, as at the ot"):
            trained(settings, sites(*colours))
