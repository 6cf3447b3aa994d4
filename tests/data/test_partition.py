import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedapp.data.datasets import NAME
from fedapp.data.partition import LONGEST_NAME, partition_rows, split_rows, value_names
from fedapp.errors import ConfigError

ROWS = np.arange(0, 600, 2, dtype=np.int64)
LABELS = np.tile([0.0, 0.0, 1.0], 200)
GROUPS = np.array(["a"] * 300 + ["b"] * 160 + ["c"] * 100 + ["d"] * 40)


def deal(rule, n_parties=3, rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    return partition_rows(rule, rows, n_parties, rng, LABELS, GROUPS)


def sizes(parts):
    return [len(part) for part in parts]


@given(st.integers(1, 500), st.floats(0, 0.999), st.floats(0, 0.999), st.integers(0, 2**32))
@settings(max_examples=50, deadline=None)
def test_a_split_has_every_row_once_by_fractions_of_all_rows_and_of_the_rest(
    n_rows, test, valid, seed
):
    split = split_rows(n_rows, test, valid, seed)
    parts = (split.train, split.valid, split.test)
    assert sorted(np.concatenate(parts)) == list(range(n_rows))
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert len(split.train) >= 1
    assert np.array_equal(split_rows(n_rows, test, valid, seed).test, split.test)
    by_hand = split_rows(1000, 0.2, 0.25, seed)
    assert sizes((by_hand.test, by_hand.valid, by_hand.train)) == [200, 200, 600]
    assert not np.array_equal(split_rows(1000, 0.2, 0.25, seed + 1).test, by_hand.test)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(
            ((10, *fractions, 0), rf"{name}-fraction must be in \[0, 1\), got {bad}")
            for bad in (-0.1, float("nan"))
            for name, fractions in (("test", (bad, 0)), ("valid", (0, bad)))
        ),
        ((0, 0, 0, 0), "n_rows must be >= 1, got 0"),
    ],
)
def test_a_split_that_cannot_be_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        split_rows(*given)


@given(
    st.sampled_from(["iid", "dirichlet:0.5", "dirichlet:100", "sizes:0.5,0.3,0.2", "column:g"]),
    st.integers(100, 600),
    st.integers(0, 2**32),
)
@settings(max_examples=50, deadline=None)
def test_a_partition_is_disjoint_complete_and_drawn_by_its_seed(rule, n_rows, seed):
    rows = np.random.default_rng(seed).permutation(600)[:n_rows].astype(np.int64)
    parts = deal(rule, rows=rows, seed=seed)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.sort(rows))
    assert all(len(part) and np.all(np.diff(part) > 0) for part in parts)
    again = deal(rule, rows=rows, seed=seed)
    assert all(np.array_equal(*pair) for pair in zip(parts, again, strict=True))


@pytest.mark.parametrize(
    ("rule", "n_parties", "expected"),
    [
        ("iid", 7, [43, 43, 43, 43, 43, 43, 42]),
        ("sizes:0.91,0.086,0.004", 3, [273, 26, 1]),
        ("sizes:0.5,0.3,0.195", 3, [151, 90, 59]),
        ("sizes:200,65,13", 3, [200, 65, 13]),
    ],
)
def test_parts_have_their_sizes(rule, n_parties, expected):
    assert sizes(deal(rule, n_parties)) == expected


def test_a_small_alpha_skews_labels_also_of_numbers_and_leaves_each_party_a_tenth_of_its_share():
    skews = [
        np.ptp([LABELS[part].mean() for part in deal(f"dirichlet:{alpha}")])
        for alpha in (0.1, 1000)
    ]
    assert skews[0] > 0.3 > skews[1]
    labels, rows = np.random.default_rng(0).normal(size=1000), np.arange(1000)
    parts = partition_rows("dirichlet:0.1", rows, 3, np.random.default_rng(1), labels)
    assert sum(sizes(parts)) == 1000
    assert np.ptp([labels[part].mean() for part in parts]) > 0.3
    assert min(sizes(deal("dirichlet:0.2", 10))) >= 3


@pytest.mark.parametrize(
    ("rule", "n_parties", "homes"),
    [
        ("column:g", 4, ["a", "b", "c", "d"]),  # the most frequent first
        ("column", 2, ["a", "bcd"]),  # those beyond go to the party with the fewest rows
    ],
)
def test_groups_go_to_parties(rule, n_parties, homes):
    assert [{*GROUPS[part]} for part in deal(rule, n_parties)] == list(map(set, homes))


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["west", "east"], ["east", "west"]),
        (["3", "12", "0.5"], ["shop-0.5", "shop-12", "shop-3"]),
        (["Süd/West", "../x", "a, b", ""], ["Sud_West", "a_b", "shop-missing", "x"]),
        (["東京", "a b", "a/b", "a_b"], ["a_b", "a_b-2", "a_b-3", "party"]),
        (["y" * 99, "y" * 98], ["y" * 20, "y" * 20 + "-2"]),
    ],
)
def test_parties_have_names_like_their_values(values, names):
    assert list(value_names(values, "shop")) == names


@given(st.lists(st.text(max_size=30), min_size=1, max_size=30, unique=True), st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_names_of_values_are_distinct_names_of_parties(values, column):
    named = value_names(values, column)
    assert sorted(named.values()) == sorted(values)
    assert list(named) == sorted(named)
    assert all(NAME.fullmatch(name) and len(name) <= LONGEST_NAME + 3 for name in named)


@given(st.lists(st.sampled_from(["b x", "a", "7", "ä"]), min_size=4, max_size=40))
@settings(max_examples=30, deadline=None)
def test_each_party_has_the_rows_of_the_value_that_names_it_and_no_group_is_divided(values):
    groups, rng = np.array([*values, "a", "7"]), np.random.default_rng(0)
    named = value_names(np.unique(groups), "g")
    rows = np.arange(len(groups), dtype=np.int64)
    parts = partition_rows("column:g", rows, len(named), rng, None, groups)
    assert [{*groups[part].tolist()} for part in parts] == [{value} for value in named.values()]
    one, other = partition_rows("column:g", rows, 2, rng, None, groups)
    assert not {*groups[one].tolist()} & {*groups[other].tolist()}
    assert len(one) + len(other) == len(groups)


RULE = "partition must be "


@pytest.mark.parametrize(
    ("rule", "message", "n_parties"),
    [
        ("even", RULE + "one of iid, dirichlet:ALPHA, .*, got 'even'", 3),
        ("dirichlet", RULE + "dirichlet:ALPHA with a number ALPHA > 0, got 'dirichlet'", 3),
        ("dirichlet:nan", "ALPHA > 0, got 'dirichlet:nan'", 3),
        ("dirichlet:0.00001", "leave each of 3 parties 10 rows in one of 100 draws, got", 3),
        ("sizes:a,b,c", RULE + "sizes: and numbers with commas between them, got", 3),
        ("sizes:0.5,0.5", "one size for each of 3 parties, got 'sizes:0.5,0.5'", 3),
        ("sizes:2,-1,1", "finite sizes > 0, got", 3),
        ("sizes:0.5,0.3,0.1", "fractions that sum to 1, or whole numbers of rows, got", 3),
        ("sizes:200,100,1", "sum to at most 300 rows, got", 3),
        ("sizes:0.9989,0.001,0.0001", "leave every party at least one of 300 rows, got", 3),
        ("column", r"value for each of 5 parties \(it has 4\), got 'column'", 5),
        ("iid", r"must be in \[1, 300\] \(rows\), got 301", 301),
        ("dirichlet:1", "table without labels, got 'dirichlet:1'", 2),
        ("column:g", "table without a group column, got 'column:g'", 2),
    ],
)
def test_a_rule_that_cannot_be_met_is_refused(rule, message, n_parties):
    columns = () if "without" in message else (LABELS, GROUPS)
    with pytest.raises(ConfigError, match=message):
        partition_rows(rule, ROWS, n_parties, np.random.default_rng(0), *columns)
