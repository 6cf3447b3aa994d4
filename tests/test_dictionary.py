"""Horizontal parties whose tables have categories go by one dictionary, or are told why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.data.categories import Categories
from fedapp.errors import DataError, ProtocolError
from fedapp.messages.dictionary import (
    MOST_LETTERS,
    dictionary_digest,
    pack_categories,
    unpack_categories,
)
from fedapp.messages.hello import HelloReply
from fedapp.run_folder import RunFolder
from simulations.local import run_local
from strategies.dictionary import alike_names, joint_dictionary
from tests.conftest import MakeSettings, MakeSites, WriteTable

TWO = (("blue", "red"), None)


def said(
    party: str,
    categories: Categories,
    given: tuple[int, ...] = (),
    shares: bool = True,
    columns: tuple[str, ...] = ("color", "size"),
) -> HelloReply:
    """What a party with this dictionary tells."""
    told: dict[str, Any] = pack_categories(categories)
    digests = tuple(
        dictionary_digest(names) if place in given else ""
        for place, names in enumerate(categories)
        if names
    )
    if not shares:
        told["categories"] = ()
    return HelloReply(
        *(party, 9, 0, 3, columns, ("0", "1"), 0.0, 0.0, False, "0" * 32, (), ()),
        **told,
        digests=digests,
    )


def joint(*replies: HelloReply) -> Categories:
    return joint_dictionary({reply.name: reply for reply in replies})


# What the server makes of it


def test_the_dictionary_is_the_union_of_all_names_sorted_by_text() -> None:
    other = (("Zebra", "blue", "éclair"), None)
    assert joint(said("a", TWO), said("b", other)) == (("Zebra", "blue", "red", "éclair"), None)
    assert joint(said("a", ()), said("b", ())) == ()


def test_a_column_without_a_value_at_one_party_is_of_any_type() -> None:
    assert joint(said("a", TWO), said("b", ((), None))) == TWO
    assert joint(said("a", TWO), said("b", (("red",), ()))) == TWO
    assert joint(said("a", ((), None)), said("b", ((), None))) == ()


def test_text_at_one_party_and_numbers_at_another_is_refused_by_column_and_party() -> None:
    rule = r"^column 'color' must be of one type at all parties, got text at b, numbers at a: "
    with pytest.raises(DataError, match=rule):
        joint(said("a", (None, ("s",))), said("b", TWO))
    with pytest.raises(DataError, match=r"^column 'color' must .* text at b, numbers at a"):
        joint(said("a", ()), said("b", TWO))


def test_names_that_a_schema_gives_are_the_dictionary_as_they_are() -> None:
    given = (("red", "green"), None)
    assert joint(said("a", given, given=(0,)), said("b", TWO)) == given
    assert joint(said("a", given, (0,), shares=False), said("b", given, (0,))) == given


def test_schemas_that_give_other_names_or_another_order_are_refused() -> None:
    rule = r"^b: categories of column 'color' must be the same in all schemas, in the same order, "
    with pytest.raises(DataError, match=rule + "got others than at a"):
        joint(said("a", TWO, (0,)), said("b", (("red", "blue"), None), (0,)))


def test_a_dictionary_whose_names_no_party_tells_is_refused() -> None:
    rule = r"^a: categories of column 'color' must be told by a party whose schema gives them"
    with pytest.raises(DataError, match=rule):
        joint(said("a", TWO, (0,), shares=False), said("b", (None, None)))


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
def test_counts_names_and_digests_that_do_not_fit_are_refused(
    change: dict[str, Any], rule: str
) -> None:
    with pytest.raises(ProtocolError, match=f"^a: .*{rule}"):
        joint(replace(said("a", TWO), **change), said("b", TWO))


def test_more_letters_than_a_message_holds_are_refused() -> None:
    names = tuple(f"{place:04}" + "x" * 996 for place in range(MOST_LETTERS // 1000 + 1))
    with pytest.raises(ValueError, match=r"categories must be .* letters together at most"):
        pack_categories((names,))


def test_packed_categories_come_back() -> None:
    known = (None, ("b", "a"), (), ("c",))
    told = pack_categories(known)
    assert unpack_categories(told["category_counts"], told["categories"], 4) == known


def test_another_spelling_at_one_party_is_noted_and_two_of_one_party_are_not() -> None:
    first, second = said("a", (("Self-emp", "x"), None)), said("b", (("self emp", "X", "x"), None))
    notes = alike_names({"a": first, "b": second}, first.columns)
    told = "categories of 'color' differ in spelling alone: 'Self-emp' (a) and 'self emp' (b)"
    assert notes == [told]


# Whole runs


@pytest.fixture
def colours(write_table: WriteTable) -> list[dict[str, object]]:
    """Node configs of two sites with other colours."""
    rng = np.random.default_rng(1)
    places = {"a": ["red", "blue", ""], "b": ["green", "red"]}
    return [
        {"name": name, "data": write_table(name, 60, place, color=rng.choice(words, 60))}
        for place, (name, words) in enumerate(places.items())
    ]


def trained(settings: MakeSettings, sites: list[Any], **more: object) -> RunFolder:
    given = {"parties": 2, "strategy": "fedavg-linear", "fedavg_linear__rounds": 2, **more}
    return run_local(settings(**given), sites)


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_of_sites_with_other_names_goes_by_the_union(
    colours: list[dict[str, object]], sites: MakeSites, settings: MakeSettings
) -> None:
    run = trained(settings, sites(*colours))
    model, summary = read(run.path / "model.json"), read(run.path / "summary.json")
    assert model["categories"] == [None, None, ["blue", "green", "red"]]
    assert model["inputs"] == ["a", "b", "color=blue", "color=green", "color=red"]
    assert summary["categories"] == {"color": {"names": 3, "unseen": {}}}


@pytest.mark.parametrize("strategy", ["bagging", "cyclic", "fedavg-linear", "fedxgbllr"])
def test_every_party_reads_the_same_table_as_one_that_has_all_rows(
    strategy: str,
    colours: list[dict[str, object]],
    sites: MakeSites,
    settings: MakeSettings,
) -> None:
    more = {"fedxgbllr__trees": 3, "fedxgbllr__rounds": 1, "fedxgbllr__epochs": 1}
    run = trained(settings, sites(*colours), strategy=strategy, **more)
    assert read(run.path / "model.json")["categories"][2] == ["blue", "green", "red"]
