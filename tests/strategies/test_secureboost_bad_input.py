"""SecureBoost on tables, settings and constraints of columns that do not fit, or hardly."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from clients.secureboost.columns import ConfiguredConstraints, check_bins, joint_constraints
from fedapp.errors import ConfigError, PartyError, ProtocolError
from fedapp.messages.secureboost import ColumnBins
from fedapp.runs.local import run_local
from fedapp.trees.limits import Limits
from fedapp.trees.model import LEAF
from tests.federated import model_of, summary_of
from tests.network import run
from tests.tables import made_columns, write_rows
from tests.tampering import refuses

IDS = [f"customer {number}" for number in range(60)]
BINARY = "binary:logistic"
LABEL = r"^bank \(step \d+\): label"
N_TRAIN = 32  # a round of depth 4 discloses 16 sums, half as many


@pytest.fixture
def bank(write_table):
    """A site with labels."""
    return {"name": "bank", "data": write_table("bank", 60, id=IDS), "id": "id"}


@pytest.fixture
def shop(write_table):
    """``shop(**columns)``: a site with a column c, without labels; a column given replaces it."""

    def make(**columns):
        given = {"c": np.random.default_rng(4).normal(size=60), "id": IDS, **columns}
        path = write_table("shop", 60, **{"a": None, "b": None, "y": None, **given})
        return {"name": "shop", "data": path, "id": "id", "label": ""}

    return make


# Tables


# Of bank: columns, node config; of shop: columns; the objective, if not binary; the error.
REFUSED = {
    "no labels": ({}, {"label": ""}, {}, "", "^label must be a column at one party, got none$"),
    "no such label": (
        *({}, {"label": "z"}, {}, ""),
        r"^bank \(step 1\): label column \[withheld\] must be in the table",
    ),
    "labels twice": (
        *({}, {}, {"y": [0, 1] * 30}, ""),
        "^label must be a column at one party, got bank, shop$",
    ),
    "no column": (
        *({}, {}, {"c": None}, ""),
        r"^shop \(step 1\): table must have a feature column, got only \[withheld\];",
    ),
    **{
        f"one label, {objective}": (
            *({"y": [1] * 60}, {}, {}, objective),
            f"{LABEL} must not be the same in every training row$",
        )
        for objective in (BINARY, "multi:softprob", "reg:squarederror")
    },
    "three classes": (
        *({"y": [0, 1, 2] * 20}, {}, {}, ""),
        f"{LABEL} must have at most 2 different values for binary:logistic",
    ),
}


@pytest.mark.parametrize(
    ("columns", "node", "of_shop", "objective", "match"), REFUSED.values(), ids=REFUSED
)
def test_tables_of_which_no_model_can_be_are_refused_by_their_owner(
    vertical, sites, write_table, bank, shop, columns, node, of_shop, objective, match
):
    write_table("bank", 60, id=IDS, **columns)
    other = {**shop(**of_shop), **({"label": "y"} if "y" in of_shop else {})}
    refuses(match, vertical(objective=objective or BINARY), sites({**bank, **node}, other))


def test_a_round_may_draw_no_column_of_a_passive_party(vertical, tmp_path):
    data = write_rows(tmp_path / "made.csv", made_columns("binary:logistic", 120))
    given = {"label": "y", "colsample_bytree": 0.34, "num_boost_round": 8, "parties": 3}
    settings = vertical(data=str(data), columns="sizes:1,4,1", **given)
    drawn = [Limits(settings.seed, number).of_trees(0.34, 1, 6)[0] for number in range(8)]
    without = [not columns[5] for columns in drawn]
    assert 1 < sum(without) < 8
    for tree, columns in zip(model_of(run_local(settings)).trees, drawn, strict=True):
        assert len(tree) > 1
        assert columns[tree["column"][tree["left"] != LEAF]].all()


# Settings


KEYS = {  # settings, and the error
    "parties": ({"parties": 1}, "^parties must be >= 2, got 1$"),
    "no consent": (
        {"secureboost__insecure_small_key": False},
        "^secureboost.key-bits must be >= 2048 without secureboost.insecure-small-key, got 512",
    ),
    "too short": (
        {"secureboost__key_bits": 128},
        "^secureboost.key-bits must be >= 256, got 128$",
    ),
    "odd": (
        {"secureboost__key_bits": 513},
        r"^party-1 \(step \d+\): secureboost.key-bits must be even, got 513$",
    ),
}


@pytest.mark.parametrize(("given", "match"), KEYS.values(), ids=KEYS)
def test_parties_and_keys_that_do_not_do_are_refused(vertical, given, match):
    refuses(match, vertical(**given))


def test_early_stopping_without_validation_rows_is_refused(vertical, sites, bank, shop):
    with pytest.raises(ConfigError, match=r"^valid-fraction must be > 0 with early-stopping-rou"):
        vertical(early_stopping_rounds=2, valid_fraction=0.0)
    settings = vertical(early_stopping_rounds=2, valid_fraction=0.001)
    match = "^valid-fraction must leave validation rows for early-stopping-rounds, got 0.001$"
    refuses(match, settings, sites(bank, shop()))


@pytest.mark.parametrize(
    ("header", "cells", "node", "rule"),
    [
        ("secret,hidden", "1,name-{row}", {}, "feature columns of text must be categories, "),
        ("secret,hidden", "1,inf", {}, "feature columns must be finite as float32, got "),
        ("secret,secret", "1,2", {}, "column names must be distinct, got "),
        ("secret", "1", {"drop-columns": "secret"}, "table must have a feature column, got only "),
        ("secret", "1", {"drop-columns": "classified"}, "drop-columns must be columns of "),
        ("secret,hidden", "1,2", {"id": "classified"}, "id column "),
        ("secret,hidden", "1,", {"id": "hidden"}, "id column "),
        ("secret,hidden", "1,7", {"id": "hidden"}, "id column "),
        ("secret,hidden", "1,", {"label": "hidden"}, "label column "),
        ("secret,hidden", "1,-1", {"weight": "hidden"}, "weight column "),
    ],
)
def test_an_error_of_a_table_names_no_column_of_a_site_that_hides_them(
    settings, sites, write_table, tmp_path, caplog, header, cells, node, rule
):
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


# Warnings


@pytest.mark.parametrize(
    ("given", "labels", "n_rows", "warning"),
    [
        ({}, {}, N_TRAIN, "up to 16 sums of each bin, and half as many as the 32 rows are enough"),
        (
            {"objective": "multi:softprob", "max_depth": 3},
            {"y": [0, 1, 2, 1] * (N_TRAIN // 4)},
            N_TRAIN,
            "up to 8 sums a class of each bin",
        ),
        ({}, {}, N_TRAIN + 1, ""),
        ({"secureboost__first_trees": 1}, {}, N_TRAIN, ""),
    ],
)
def test_a_run_that_discloses_half_as_many_sums_as_rows_says_so(
    vertical, write_table, given, labels, n_rows, warning
):
    short = {"test_fraction": 0.0, "valid_fraction": 0.0, "num_boost_round": 1, "label": "y"}
    data = str(write_table(n_rows=n_rows, **labels))
    warnings = summary_of(run_local(vertical(data=data, **short, **{"max_depth": 4, **given})))
    found = warnings["warnings"]
    assert len(found) == bool(warning)
    for text in found:
        assert text.startswith("the active party may find the bin of nearly every training row")
        assert warning in text


# Constraints of columns: told by their owners, put together by the active party


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


@pytest.mark.parametrize(
    ("monotone", "owned", "text", "rule"),
    [
        ("z:1", {"a": held([0]), "b": held([0])}, "", "got z of a, b; an owner that does not"),
        ("z:1", {"a": held([0], [-1, 0]), "b": held([-1])}, "", "of z must match the node config"),
        ("", {"a": held([], [0, 1]), "b": held([])}, "b", "must be empty where a column has categ"),
    ],
)
def test_constraints_that_cannot_be_held_are_refused(monotone, owned, text, rule):
    letters = {
        name: replace(
            letter,
            widths=np.full({"a": 2, "b": 1}[name], 4),
            categorical=np.full(1, name == text, np.uint8),
        )
        for name, letter in owned.items()
    }
    with pytest.raises(ConfigError, match=rule):
        joint_constraints(wanted(monotone), letters)


def wanted(monotone):
    asked = SimpleNamespace(monotone_constraints=monotone, interaction_constraints="")
    return ConfiguredConstraints.of("bank", asked)


def letter(**changed):
    bins = {"widths": np.full(3, 4, dtype=np.int64), "categorical": np.zeros(3, dtype=np.uint8)}
    return replace(held([2, -1, 0], [0, 1, -1], {0, 2}, {1}), **{**bins, **changed})


def check(sent):
    check_bins("shop", sent, wanted("a:1,b:1,c:1"), 4, 3, "bank")


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


def test_an_owner_holds_its_columns_without_telling_their_names(vertical, sites, bank, shop):
    d = np.random.default_rng(5).normal(size=60)
    bank, shop = ({**table, "allow-export": "true"} for table in (bank, shop(d=d)))
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
    vertical, sites, bank, shop, given, node, rule
):
    with pytest.raises(PartyError, match=rule) as caught:
        run(vertical(**given), sites(bank, {**shop(), **node}))
    assert "secret" not in str(caught.value)
