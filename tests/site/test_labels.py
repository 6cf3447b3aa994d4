"""Draws of a site's labels: over any runs that it admits, what two histories of labels show."""

import itertools
import logging
import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from fedapp.crypto import noise as crypto
from fedapp.data.schema import Declared, Reader
from fedapp.errors import ConfigError, DataError
from fedapp.home import home
from fedapp.site.labels import drawn_labels
from fedapp.site.settings import SiteConfig

EPSILON = 1.0
SITE = SiteConfig("bank", "rows.csv", "y", id_column="id", label_epsilon=EPSILON)
RATED = replace(SITE, label_range="0,8")
ALL = 2.0**64
NEGLIGIBLE = 1e-9  # probability: of noise there are n bits only
# The second run, beside one like the first, and whether the site answers it.
SECOND = {
    "the same": ({}, True),
    "another epsilon": ({"label_epsilon": 2.0}, False),
    "another label column": ({"label": "z"}, False),
    "another id column": ({"id_column": "name"}, False),
    "classes are measures": ({"label_range": "0,2"}, False),
}


class Words:
    """Outcomes of a row's words, one a row: of its label in the first run, and of another label.

    ``first`` and ``other`` have shape (n_rows, n_words), ``chances`` (n_rows,) their probability.
    """

    def __init__(self, first, other, chances):
        self.first, self.other, self.chances = first, other, chances
        self.label = None  # of the first run, as it is drawn by

    def __call__(self, ids, labels, _, n_words):
        rows = np.array([int(name) for name in ids]) % len(self.first)
        self.label = labels[0] if self.label is None else self.label
        is_first = np.array([label == self.label for label in labels])
        return np.where(is_first[:, None], self.first[rows], self.other[rows])[:, :n_words]


def outcomes(words, first, second, histories, others):  # fmt: skip
    """Probability of both runs' draws of a row, for each history of its label.

    Both tables have rows with ``others``, so that their classes do not depend on the row.
    """
    results = []
    for history in histories:
        for path in (home() / "sites" / "bank").glob("labels.*"):
            path.unlink()
        drawn, words.label = [], None
        for config, label, rest in zip((first, second), history, others, strict=True):
            n_rows = len(words.chances)
            labels = np.array([label] * n_rows + list(rest), np.float64)
            ids = [str(row) for row in range(len(labels))]
            drawn.append(drawn_labels(config, labels, ids)[:n_rows].tolist())
        chances = defaultdict(float)
        for pair, chance in zip(zip(*drawn, strict=True), words.chances.tolist(), strict=True):
            chances[pair] += chance
        results.append(dict(chances))
    return results


def greatest_ratio(results):
    """Of any two histories, over all pairs of draws."""
    ratios = [
        chance / other.get(pair, 0.0) if other.get(pair) else math.inf
        for one, other in itertools.permutations(results, 2)
        for pair, chance in one.items()
        if chance > NEGLIGIBLE
    ]
    return max(ratios)


@pytest.fixture
def class_words(monkeypatch):
    stays = [math.exp(EPSILON) / (math.exp(EPSILON) + k - 1) for k in (3, 2)]
    # In each of the cells between the thresholds a word that is even, and one that is odd.
    below = [0, *(int(share * ALL) for share in stays)]
    cells = [(word, odd) for word in below for odd in (0, 1)]
    chances = np.repeat(np.diff([0, *stays, 1]), 2) / 2
    pairs = np.array(list(itertools.product(range(len(cells)), repeat=2)))
    first, other = np.array(cells, np.uint64)[pairs.T]
    words = Words(first, other, chances[pairs].prod(axis=1))
    monkeypatch.setattr(crypto, "_words", words)
    return words


@pytest.mark.parametrize("name", SECOND)
def test_two_runs_tell_no_more_of_classes_than_one(class_words, name):
    changes, answers = SECOND[name]
    second, histories = replace(SITE, **changes), list(itertools.product((0, 1, 2), repeat=2))
    if not answers:
        with pytest.raises(
            DataError, match=r"must be that by which labels of bank were drawn, .*, got"
        ):
            outcomes(class_words, SITE, second, histories, ((0, 1, 2), (0, 1, 2)))
        return
    results = outcomes(class_words, SITE, second, histories, ((0, 1, 2), (0, 1, 2)))
    assert greatest_ratio(results) == pytest.approx(math.exp(EPSILON), rel=1e-6)
    assert all(sum(result.values()) == pytest.approx(1) for result in results)


def test_a_table_of_fewer_classes_is_drawn_by_all_and_one_of_more_is_refused(class_words):
    histories = list(itertools.product((0, 1), repeat=2))
    results = outcomes(class_words, SITE, SITE, histories, ((0, 1, 2), (0, 1)))
    assert greatest_ratio(results) <= math.exp(EPSILON) * (1 + 1e-6)
    rule = "label must have the classes by which labels of bank were drawn, 0, 1, got also 2: two"
    with pytest.raises(DataError, match=rule) as caught:
        outcomes(class_words, SITE, SITE, histories, ((0, 1), (0, 1, 2)))
    assert "got others" in str(caught.value.for_others(True))
    codes = (("gone", "2"),)
    listed = replace(SITE, reader=Reader(declared=(Declared("y", codes=codes),)))
    results = outcomes(class_words, listed, listed, histories, ((0, 1), (0, 1, 2)))
    assert greatest_ratio(results) <= math.exp(EPSILON) * (1 + 1e-6)


def test_two_runs_tell_no_more_of_measures_than_one(monkeypatch):
    monkeypatch.setattr(crypto, "STEPS", 4)
    monkeypatch.setattr(crypto, "TAIL", 16.0)
    rate, n_bits = EPSILON / 4, 6  # TAIL / rate = 2^6
    odds = np.exp(-rate * 2.0 ** np.arange(n_bits))
    odds = np.tile(odds / (1 + odds), 2)
    bits = np.array(list(itertools.product((0, 1), repeat=len(odds))))
    drawn = np.where(bits == 1, np.uint64(0), np.uint64(2**64 - 1))
    words = Words(
        drawn, np.roll(drawn, 7, axis=0), np.where(bits == 1, odds, 1 - odds).prod(axis=1)
    )
    monkeypatch.setattr(crypto, "_words", words)
    monkeypatch.setitem(globals(), "NEGLIGIBLE", 1e-5)
    histories = [(0.0, 0.0), (0.0, 8.0), (8.0, 8.0), (8.0, 2.0)]
    results = outcomes(words, RATED, RATED, histories, ((), ()))
    assert greatest_ratio(results) == pytest.approx(math.exp(EPSILON), rel=1e-3)
    for bounds in ("0,9", "1,8", ""):
        with pytest.raises(DataError, match="label-range must be that by which labels of bank we"):
            outcomes(words, RATED, replace(RATED, label_range=bounds), histories, ((), ()))


def test_a_label_that_has_changed_stays_as_drawn_and_only_the_site_learns_it(caplog):
    ids = [f"c{row}" for row in range(500)]
    labels = np.arange(500) % 3.0
    first = drawn_labels(SITE, labels, ids)
    assert (first != labels).mean() > 0.2
    assert (home() / "sites" / "bank" / "labels.bin").stat().st_mode & 0o777 == 0o600
    order = np.random.default_rng(3).permutation(500)
    with caplog.at_level(logging.WARNING, "fedapp.site"):
        again = drawn_labels(SITE, labels[order], [ids[row] for row in order])
        assert not caplog.records
        changed = drawn_labels(SITE, np.where(labels == 0, 1.0, labels), [*ids[:499], "new"])
    np.testing.assert_array_equal(again, first[order])
    np.testing.assert_array_equal(changed[:499], first[:499])
    assert "bank: 167 labels have changed since they were drawn, and stay as drawn" in caplog.text


def test_texts_are_drawn_as_texts():
    labels = np.array(["no", "perhaps", "yes"] * 50)
    drawn = drawn_labels(SITE, labels, [str(row) for row in range(150)])
    assert {*drawn.tolist()} == {"no", "perhaps", "yes"}
    assert 0.2 < (drawn != labels).mean() < 0.7


@pytest.mark.parametrize("role", ["event", "qid"])
def test_times_and_ranks_are_never_drawn(role):
    rule = "label-epsilon must be 0 in the node config of bank, whose labels are times or ranks"
    with pytest.raises(ConfigError, match=rule):
        drawn_labels(replace(SITE, **{role: "other"}), np.ones(3), ["a", "b", "c"])


def test_measures_are_not_drawn_without_their_range():
    labels = np.arange(100) / 7
    with pytest.raises(ConfigError, match=r"^label-range must be low,high, as 0,100, got none$"):
        drawn_labels(SITE, labels, [str(row) for row in range(100)])
