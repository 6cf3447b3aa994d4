"""What parties of SecureBoost find out about each other."""

import numpy as np
import pytest
from scipy.special import expit

from clients.secureboost import active
from fedapp.audit.bins import solved
from fedapp.audit.labels import embedded
from fedapp.messages.fields import Array
from fedapp.runs.local import run_local
from simulations.attacks import crafted, eini_paths, vertical
from tests.federated import lines_of

SMALL = {"data": "breast-cancer", "columns": "sizes:25,5", "test-fraction": 0.8, "max-bin": 8}
SMALL |= {"secureboost.key-bits": 384, "num-boost-round": 2, "max-depth": 3, "seed": 1}
ALONE = {"secureboost.first-trees": 2}


@pytest.mark.slow
def test_rows_that_share_nodes_tell_labels_and_none_where_no_round_is_shared(monkeypatch):
    monkeypatch.setattr("fedapp.audit.labels.FOLDS", 2)
    monkeypatch.setattr("fedapp.audit.labels.DRAWS", 2)
    found = vertical.attack_shared_nodes({**SMALL, "columns": "sizes:28,2"})
    assert found.success > found.chance + 0.1
    alone = vertical.attack_shared_nodes({**SMALL, "columns": "sizes:28,2", **ALONE})
    assert (alone.success, alone.chance) == (0.5, found.chance)


def test_rows_in_the_same_nodes_are_embedded_alike():
    nodes = np.array([[1, 1, 2, 2, 3, 3], [5, 5, 6, 6, 6, 6]], dtype=np.int32)
    found = embedded([nodes[:1], nodes[1:]])
    assert np.allclose(found[::2], found[1::2])
    assert not np.allclose(found[0], found[2])


def test_sums_tell_bins_of_rows_and_none_where_no_round_is_shared():
    found = vertical.attack_solved_bins(SMALL)
    assert found.success > found.chance + 0.1
    alone = vertical.attack_solved_bins({**SMALL, **ALONE})
    assert alone.success == alone.chance == found.chance


def test_bins_are_solved_for_where_sums_are_as_many_as_rows():
    rng = np.random.default_rng(3)
    # Of the second column the third bin is that of missing values.
    widths, codes = np.array([3, 2]), rng.integers(0, 3, size=(40, 2))
    coefficients = rng.normal(size=(40, 40))
    coefficients[1] = 0.25
    columns = zip(codes.T, widths.tolist(), strict=True)
    members = np.hstack([own[:, None] == np.arange(width) for own, width in columns])
    found = solved(coefficients, coefficients @ members, widths)
    assert np.array_equal(found, codes)


def test_equations_that_say_the_same_again_do_not_mislead():
    """Sums are rounded: of equal equations the difference is noise, and is dropped."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 4, size=60)
    coefficients = rng.normal(size=(10, 60))
    coefficients[1::2] = rng.uniform(0.1, 1, size=(5, 60))
    coefficients[1] = 0.25
    sums = coefficients @ (codes[:, None] == np.arange(4))
    again = np.concatenate([coefficients, coefficients + 1e-12 * rng.normal(size=(10, 60))])
    noise = 1e-10 * rng.normal(size=(20, 4))
    once = solved(coefficients, sums, np.array([4]))[:, 0]
    twice = solved(again, np.concatenate([sums, sums]) + noise, np.array([4]))[:, 0]
    assert float(np.mean(once == codes)) > 0.5
    assert float(np.mean(once == twice)) > 0.9


@pytest.mark.slow
def test_rows_written_into_gradients_are_read_in_every_column():
    found = crafted.attack_reverse_sums(SMALL)
    assert found.success == 1.0
    assert found.chance < 0.6
    # Two rounds have turns for 176 rows, more than there are.
    first = crafted.attack_reverse_sums({**SMALL, "num-boost-round": 1})
    assert found.chance == first.chance < first.success < 1.0


def test_the_way_of_a_row_is_found_where_one_alone_gives_the_sum():
    rng = np.random.default_rng(5)
    options = [rng.integers(-(2**50), 2**50, size=n) for n in (3, 1, 4, 2, 5)]
    chosen = [2, 0, 3, 1, 0]
    total = sum(int(each[one]) for each, one in zip(options, chosen, strict=True))
    assert eini_paths.the_way(options, total + 1, slack=1) == chosen
    assert eini_paths.the_way(options, total + 2, slack=1) == []
    assert eini_paths.the_way(options, total, slack=1, most=11) is None
    options[4][1] = options[4][0]
    assert eini_paths.the_way(options, total, slack=1) == []


@pytest.mark.slow
def test_sums_of_leaves_tell_the_ways_of_rows():
    found = eini_paths.attack_eini_paths({**SMALL, "num-boost-round": 4})
    assert found.success > 0.9
    assert found.unfinished == 0.0
    assert 0.0 < found.chance < 0.7


@pytest.mark.slow
def test_rows_whose_search_is_not_finished_are_told(monkeypatch):
    monkeypatch.setattr(eini_paths.the_way, "__defaults__", (1,))
    found = eini_paths.attack_eini_paths({**SMALL, "num-boost-round": 2})
    assert 0.0 < found.unfinished <= 1.0 - found.success


def labels_from_losses(losses, draws):
    """Labels, up to a swap, of the rows that draws are of, where trees have one leaf, of eta 0.3.

    A loss is that of a margin, which tells how many of a round's rows are of class 1: an equation.
    """
    n_rows, fits = len(draws[0]), []
    for ones in range(1, n_rows):
        share, counts, error = ones / n_rows, list[int](), 0.0
        margin = np.log(share / (1 - share))
        for loss, drawn in zip(losses, draws, strict=True):
            n_drawn, mean = drawn.sum(), expit(margin)
            sums = n_drawn * mean - np.arange(n_drawn + 1), n_drawn * mean * (1 - mean)
            margins = margin - 0.3 * sums[0] / (sums[1] + 1)
            found = -share * np.log(expit(margins)) - (1 - share) * np.log(expit(-margins))
            best = int(np.argmin(np.abs(found - loss)))
            counts.append(best)
            margin, error = margins[best], max(error, abs(found[best] - loss))
        fits.append((error, counts))
    solved = np.linalg.lstsq(np.array(draws, dtype=float), np.array(min(fits)[1]), rcond=None)
    return [float(label) for label in np.round(solved[0])]


@pytest.mark.slow
def test_losses_and_a_seed_do_not_tell_labels(vertical, sites, write_table, monkeypatch):
    """A coordinator that knew which rows a round draws would solve for every label."""
    n_rows, n_rounds, labels = 20, 30, list[Array]()
    honest = active.Active._new_round

    def seen(*given):
        labels.append(given[0].numbers)
        return honest(*given)

    monkeypatch.setattr(active.Active, "_new_round", seen)
    ids = range(n_rows)
    contexts = sites(
        {"name": "bank", "data": write_table("bank", n_rows, id=ids), "id": "id"},
        {"name": "shop", "data": write_table("shop", n_rows, y=None, id=ids), "id": "id"},
    )
    contexts[1].node_config["label"] = ""
    run = vertical(
        num_boost_round=n_rounds,
        gamma=1e9,
        subsample=0.5,
        eta=0.3,
        test_fraction=0.0,
        valid_fraction=0.0,
        allow_export=False,
    )
    lines = lines_of(run_local(run, contexts).rounds)
    draws = [
        np.random.default_rng([run.seed, round_id, 1]).random(n_rows) < 0.5
        for round_id in range(n_rounds)
    ]
    found = labels_from_losses([line["train"]["logloss"] for line in lines], draws)
    assert found not in (labels[0].tolist(), (1 - labels[0]).tolist())
