"""Constraints of columns in SecureBoost: told by their owners, put together by the active party."""

from dataclasses import replace

import numpy as np
import pytest

from clients.secureboost.joint import ConfiguredConstraints, check_bins, joint_constraints
from fedapp.errors import ConfigError, PartyError, ProtocolError
from fedapp.messages.secureboost import ColumnBins
from fedapp.trees.model import LEAF
from tests.federated import model_of
from tests.network import run


def held(named, directions=[], *groups):  # noqa: B006
    return ColumnBins(
        widths=np.empty(0, dtype=np.int64),
        categorical=np.empty(0, dtype=np.uint8),
        names=(),
        allows_export=False,
        part=np.empty(0, dtype=np.uint8),
        n_records=0,
        named=np.array(named, dtype=np.int64),
        directions=np.array(directions, dtype=np.int8),
        group_columns=np.array([one for group in groups for one in sorted(group)], dtype=np.int64),
        group_sizes=np.array([len(group) for group in groups], dtype=np.int64),
    )


# Put together


def joined(monotone, interactions, owned, text=()):
    wanted, widths = ConfiguredConstraints.of(monotone, interactions), {"a": 2, "b": 1}
    letters = {
        name: replace(
            letter, widths=np.full(widths[name], 4), categorical=np.full(1, name in text, np.uint8)
        )
        for name, letter in owned.items()
    }
    directions, groups = joint_constraints(wanted, letters)
    return directions.tolist(), groups


@pytest.mark.parametrize(
    ("monotone", "owned", "rule"),
    [
        ("z:1", {"a": held([-1]), "b": held([-1])}, "got z of no party that shares its names"),
        ("z:1", {"a": held([0]), "b": held([0])}, "got z of a, b; an owner that does not"),
        ("z:1", {"a": held([0], [-1, 0]), "b": held([-1])}, "of z must match the node config"),
    ],
)
def test_names_that_cannot_be_held_are_refused(monotone, owned, rule):
    with pytest.raises(ConfigError, match=rule):
        joined(monotone, "", owned)


def test_directions_beside_anybodys_categories_are_refused():
    owned = {"a": held([], [0, 1]), "b": held([])}
    with pytest.raises(ConfigError, match="must be empty where a column has categories"):
        joined("", "", owned, ("b",))
    free = {"a": held([], [], {0, 1}), "b": held([])}
    assert joined("", "", free, ("b",)) == ([], ((0, 1),))


# Told


def letter(**changed):
    bins = {"widths": np.full(3, 4, dtype=np.int64), "categorical": np.zeros(3, dtype=np.uint8)}
    return replace(held([2, -1, 0], [0, 1, -1], {0, 2}, {1}), **{**bins, **changed})


def check(sent):
    check_bins("shop", sent, ConfiguredConstraints.of("a:1,b:1,c:1", ""), 4, 3, "bank")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("named", [2, -1]),
        ("named", [3, -1, 0]),
        ("named", [0, -1, 0]),
        ("directions", [1, 1]),
        ("group_columns", [0, 2, 3]),
        ("group_sizes", [2, 2]),
    ],
)
def test_what_does_not_fit_the_partys_columns_is_refused(field, value):
    check(letter())
    changed = np.array(value, dtype=getattr(letter(), field).dtype)
    with pytest.raises(ProtocolError, match=rf"^shop: ColumnBins.{field} must"):
        check(letter(**{field: changed}))


# Node configs


@pytest.fixture
def tables(write_table):
    """Bank has a, b and labels, shop has c and d of the same rows."""
    ids = [f"customer {number}" for number in range(90)]
    c, d = np.random.default_rng(4).normal(size=(2, 90))
    shop = write_table("shop", 90, id=ids, a=None, b=None, y=None, c=c, d=d)
    bank = {"name": "bank", "data": write_table("bank", 90, id=ids), "id": "id"}
    return bank, {"name": "shop", "data": shop, "id": "id", "label": ""}


def test_an_owner_holds_its_columns_without_telling_their_names(vertical, sites, tables):
    bank, shop = ({**table, "allow-export": "true"} for table in tables)
    short = {"num_boost_round": 3, "max_depth": 3, "max_bin": 8}
    own = {"monotone-constraints": "c:-1", "interaction-constraints": "[c],[d]"}
    contexts = sites({**bank, "interaction-constraints": "[a,b]"}, {**shop, **own})
    hidden = model_of(run(vertical(**short), contexts))
    said = {"monotone_constraints": "c:-1", "interaction_constraints": "[a,b],[c],[d]"}
    shared = sites(*({**table, "share-column-names": "true"} for table in (bank, shop)))
    named = model_of(run(vertical(**short, **said), shared))
    assert [tree.tolist() for tree in hidden.trees] == [tree.tolist() for tree in named.trees]
    for tree in hidden.trees:
        split = tree["column"][tree["left"] != LEAF]
        assert set(split) in ({0}, {1}, {0, 1}, {2}, {3})
    free = model_of(run(vertical(**short), sites(bank, shop)))
    assert [tree.tolist() for tree in hidden.trees] != [tree.tolist() for tree in free.trees]


@pytest.mark.parametrize(
    ("given", "node", "rule"),
    [
        ({"monotone_constraints": "c:1"}, {}, "^bank .*: .* got c of no party"),
        ({}, {"monotone-constraints": "secret:1"}, r"^shop \(step \d+\): .* must name columns"),
    ],
)
def test_an_owner_that_hides_its_names_does_not_confirm_one(
    vertical, sites, tables, given, node, rule
):
    bank, shop = tables
    with pytest.raises(PartyError, match=rule) as caught:
        run(vertical(**given), sites(bank, {**shop, **node}))
    assert "secret" not in str(caught.value)
