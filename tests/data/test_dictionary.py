"""Horizontal parties whose tables have categories go by one dictionary, or are told why not."""

import json
from dataclasses import replace

import numpy as np
import pytest

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
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.settings import site_config
from fedapp.trees.linear import LinearModel
from strategies.common_table import common_table, joint_dictionary, joint_kinds, similar_names
from tests.federated import model_of, summary_of

TWO, GIVEN_TWO = (("blue", "red"), None), (("red", "green"), None)


def said(party, dictionary, /, given=(), shares=True, **changes):
    """What a party with this dictionary tells."""
    told = pack_categories(dictionary)
    digests = tuple(
        dictionary_digest(names) if place in given else ""
        for place, names in enumerate(dictionary)
        if names
    )
    if not shares:
        told["categories"] = ()
    reply = HelloReply(
        *(9, 0, 3, ("color", "size"), ("0", "1"), "", "", 0.0, 0.0, ()),
        name=party,
        simulated=False,
        fingerprint="0" * 32,
        notes=(),
        **told,
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
    "no value at both": (said("a", ((), None)), said("b", ((), None)), ()),
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
    told = pack_categories(known)
    assert unpack_categories(told["category_counts"], told["categories"], 4) == known
    names = tuple(f"{place:04}" + "x" * 996 for place in range(MOST_LETTERS // 1000 + 1))
    with pytest.raises(ValueError, match=r"categories must be .* letters together at most"):
        pack_categories((names,))


def test_another_spelling_at_one_party_is_noted_and_two_of_one_party_are_not():
    first, second = said("a", (("Self-emp", "x"), None)), said("b", (("self emp", "X", "x"), None))
    told = "categories of 'color' differ only in spelling: 'Self-emp' (a) and 'self emp' (b)"
    assert similar_names({"a": first, "b": second}, first.columns) == [told]


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
    if strategy != "bagging":
        return
    # Names may look like numbers; numbers are no names.
    numbers = write_table("numbers", n_rows=30, color=range(30))
    assert predicted(run, numbers, output)[1] == [f"30 {rule}"]
    texts = write_table("text", n_rows=30, a=["x", "y"] * 15, color=["red"] * 30)
    with pytest.raises(DataError, match=r"feature column 'a' must be numbers.*, as in the mo"):
        predicted(run, texts, output)


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
    told = "b: 40 values of 'color' are not among its categories, and count as missing"
    assert told in summary_of(run)["warnings"]
    rule = "categories of feature columns must be given by the schema where share-categories is fal"
    with pytest.raises(PartyError, match=rule):
        of_colours(second={"share-categories": "false"})


def test_a_site_that_keeps_its_names_tells_none_and_refuses_an_unknown_objective(
    write_table, schema
):
    table = str(write_table(color=["red", "green"] * 20))
    config = site_config({"name": "b", "data": table, "label": "y", **schema}, {})
    request = HelloRequest("binary:logistic", 0.2, 0.2, 0, False)
    told, _ = look(replace(config, shares_categories=False), request)
    assert (told.categories, told.digests) == ((), (dictionary_digest(("red", "blue")),))
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
