from collections import Counter

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
def test_a_split_has_every_row_once(n_rows, test, valid, seed):
    split = split_rows(n_rows, test, valid, seed)
    parts = (split.train, split.valid, split.test)
    assert sorted(np.concatenate(parts)) == list(range(n_rows))
    assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
    assert len(split.train) >= 1


def test_fractions_are_of_all_rows_and_of_the_rest():
    split = split_rows(1000, 0.2, 0.25, 0)
    assert (len(split.test), len(split.valid), len(split.train)) == (200, 200, 600)


def test_a_split_is_drawn_by_its_seed():
    same, again, other = (split_rows(100, 0.2, 0.2, seed).test for seed in (1, 1, 2))
    assert np.array_equal(same, again)
    assert not np.array_equal(same, other)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ConfigError, match=rf"test-fraction must be in \[0, 1\), got {fraction}"):
        split_rows(10, fraction, 0, 0)
    with pytest.raises(ConfigError, match=rf"valid-fraction must be in \[0, 1\), got {fraction}"):
        split_rows(10, 0, fraction, 0)


def test_a_split_of_no_rows_is_refused():
    with pytest.raises(ConfigError, match="n_rows must be >= 1, got 0"):
        split_rows(0, 0, 0, 0)


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


def test_iid_parties_have_equal_numbers_of_rows():
    assert sizes(deal("iid")) == [100, 100, 100]
    assert sizes(deal("iid", 7)) == [43, 43, 43, 43, 43, 43, 42]


def test_a_small_alpha_skews_labels_more_than_a_large_one():
    def spread(rule):
        return float(np.ptp([LABELS[part].mean() for part in deal(rule)]))

    assert spread("dirichlet:0.1") > 0.3 > spread("dirichlet:1000")


def test_dirichlet_deals_float_labels_by_quantile_bins():
    labels = np.random.default_rng(0).normal(size=1000)
    rows = np.arange(1000, dtype=np.int64)
    parts = partition_rows("dirichlet:0.1", rows, 3, np.random.default_rng(1), labels)
    means = [labels[part].mean() for part in parts]
    assert sum(sizes(parts)) == 1000
    assert np.ptp(means) > 0.3


def test_dirichlet_leaves_every_party_a_tenth_of_its_share():
    assert min(sizes(deal("dirichlet:0.2", 10))) >= 3


def test_sizes_are_fractions_or_numbers_of_rows():
    assert sizes(deal("sizes:0.91,0.086,0.004")) == [273, 26, 1]
    assert sizes(deal("sizes:0.5,0.3,0.195")) == [151, 90, 59]
    assert sizes(deal("sizes:200,65,13")) == [200, 65, 13]
    assert sizes(deal("sizes:1", 1)) == [300]


def test_groups_go_to_parties_the_most_frequent_first():
    parts = deal("column:g", 4)
    assert [set(GROUPS[part].tolist()) for part in parts] == [{"a"}, {"b"}, {"c"}, {"d"}]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["Nord", "Ost"], ["Nord", "Ost"]),
        (["west", "east"], ["east", "west"]),
        (["3", "12", "0.5"], ["shop-0.5", "shop-12", "shop-3"]),
        (["Süd/West", "../x", "a, b", ""], ["Sud_West", "a_b", "shop-missing", "x"]),
        (["東京", "a b", "a/b", "a_b"], ["a_b", "a_b-2", "a_b-3", "party"]),
        (["[red]x[/]", "[2J"], ["red_x", "shop-2J"]),
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
def test_each_party_has_the_rows_of_the_value_that_names_it(values):
    groups = np.array(values)
    named = value_names(np.unique(groups), "g")
    parts = deal_groups(groups, len(named))
    assert [{*groups[part].tolist()} for part in parts] == [{value} for value in named.values()]


def test_groups_beyond_the_parties_go_to_the_party_with_the_fewest_rows():
    parts = deal("column", 2)
    assert [set(GROUPS[part].tolist()) for part in parts] == [{"a"}, {"b", "c", "d"}]


def deal_groups(groups, n_parties):
    rows = np.arange(len(groups), dtype=np.int64)
    return partition_rows("column:g", rows, n_parties, np.random.default_rng(0), None, groups)


@given(st.lists(st.sampled_from("abcdefgh"), min_size=20, max_size=80), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_a_group_is_never_divided(values, n_parties):
    groups = np.array([*values, "a", "b", "c"])
    rows = np.arange(len(groups), dtype=np.int64)
    parts = partition_rows("column", rows, n_parties, np.random.default_rng(0), None, groups)
    homes = Counter(value for part in parts for value in set(groups[part].tolist()))
    assert set(homes.values()) == {1}
    assert sum(sizes(parts)) == len(rows)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("even", "partition must be one of iid, dirichlet:ALPHA, .*, got 'even'"),
        ("iid:2", "partition must be one of .*, got 'iid:2'"),
        ("column:", "partition must be one of .*, got 'column:'"),
        ("dirichlet", "partition must be dirichlet:ALPHA with a number ALPHA > 0, got 'dirichlet'"),
        ("dirichlet:0", "ALPHA > 0, got 'dirichlet:0'"),
        ("dirichlet:nan", "ALPHA > 0, got 'dirichlet:nan'"),
        ("dirichlet:0.00001", "leave each of 3 parties 10 rows in one of 100 draws, got"),
        ("sizes:a,b,c", "partition must be sizes: and numbers with commas between them, got"),
        ("sizes:0.5,0.5", "one size for each of 3 parties, got 'sizes:0.5,0.5'"),
        ("sizes:2,-1,1", "finite sizes > 0, got"),
        ("sizes:0.5,0.3,0.1", "fractions that sum to 1, or whole numbers of rows, got"),
        ("sizes:200,100,1", "sum to at most 300 rows, got"),
        ("sizes:0.9989,0.001,0.0001", "leave every party at least one of 300 rows, got"),
    ],
)
def test_a_rule_that_cannot_be_met_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        deal(rule)


def test_fewer_groups_than_parties_are_refused():
    with pytest.raises(
        ConfigError, match=r"value for each of 5 parties \(it has 4\), got 'column'"
    ):
        deal("column", 5)


def test_rules_need_the_column_they_go_by():
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match="table without labels, got 'dirichlet:1'"):
        partition_rows("dirichlet:1", ROWS, 2, rng)
    with pytest.raises(ConfigError, match="table without a group column, got 'column:g'"):
        partition_rows("column:g", ROWS, 2, rng)


@pytest.mark.parametrize("n_parties", [0, 301])
def test_parties_without_rows_are_refused(n_parties):
    with pytest.raises(ConfigError, match=rf"must be in \[1, 300\] \(rows\), got {n_parties}"):
        deal("iid", n_parties)
