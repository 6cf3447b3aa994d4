"""Sums of gradients whose bins have so many of a site's rows, or none."""

import numpy as np
import pytest

from clients import pax
from fedapp.histograms.bins import digitise
from fedapp.histograms.groups import cell_starts, group, merge_sketch_bins
from fedapp.histograms.sketch import sketch_and_code, sketch_cuts
from tests.federated import model_of
from tests.tables import made_columns
from tests.transcript import arrays_of, listen, scalars_of

RNG = np.random.default_rng(3)
LEAST = 5


@pytest.fixture
def made(made):
    """Squared errors, whose hessians count rows."""
    columns = {name: one[:160] for name, one in made_columns("reg:squarederror").items()}
    columns["c"] = RNG.choice(["oslo", "rome", "bonn", "york", "lima"], 160)
    given = {"objective": "reg:squarederror", "max_depth": 4, "parties": 2, "max_bin": 64}
    return lambda **more: made(**{"columns": columns, **given, **more})


# Groups


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([0, 5, 0, 9], [0, 1, 2, 3]),
        ([4, 1, 0, 5], [1, 1, 2, 3]),
        ([6, 4, 0, 0], [3, 3, 3, 3]),
    ],
)
def test_groups_have_so_many_rows_or_none(counts, expected):
    found = group(np.arange(4), np.array([counts]), np.array([0, 4]), LEAST)
    assert found.tolist() == expected


def test_a_sketch_has_so_many_rows_a_bin_and_no_smallest_or_largest_value():
    values = RNG.normal(size=(97, 3)).astype(np.float32)
    values[4:, 1] = np.nan
    weights = np.ones(97, np.float32)
    merged, kept = merge_sketch_bins(
        sketch_and_code(values, weights, 64)[0], values, weights, LEAST
    )
    assert np.diff(merged.offsets)[1] == 0 < np.diff(merged.offsets)[0] <= 19
    assert np.isnan(kept[:, 1]).all()
    codes, _ = digitise(kept, sketch_cuts(merged))
    for column in (0, 2):
        assert np.bincount(codes[:, column]).min() >= LEAST
        points, _ = merged.column(column)
        assert (values[:, column] <= points[0]).sum() == LEAST
        assert (values[:, column] >= merged.maxima[column]).sum() >= LEAST


# Runs


def is_few(counts):
    return bool(((counts > 0) & (counts < LEAST)).any())


@pytest.mark.by_default("secure")
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_every_bin_that_is_told_or_follows_has_so_many_rows_or_none(made, monkeypatch, aggregation):
    told = []
    sum_nodes = pax.Party.sum_nodes

    def looked_at(self, asked):
        histograms, missing = sum_nodes(self, asked)
        assert self.binned
        assert self.floor
        starts = cell_starts(self.binned.widths)
        # The other child of each split follows from its parent and its sibling.
        all_counts = self.cell_counts(self.floor.nodes, self.floor.open_nodes)
        for ends, counts in zip(self.floor.ends, all_counts, strict=True):
            told.append(is_few(np.bincount(ends, counts, starts[-1])))
        unit = max(float(self.gradients[..., 1].max()), 1.0)  # the hessian of a row
        told.append(is_few(np.rint(histograms[..., 1] / unit)) or is_few(missing))
        return histograms, missing

    monkeypatch.setattr(pax.Party, "sum_nodes", looked_at)
    settings = made(least_bin_rows=LEAST, num_boost_round=3, pax__aggregation=aggregation)
    folder, app = listen(settings)
    assert len(told) > 50
    assert not any(told)
    for _, reply in app.of_kind("pax_sketch"):
        assert (arrays_of(reply)["masses"] >= LEAST).all()
    assert all(len(tree) > 3 for tree in model_of(folder).trees)
    assert np.isfinite(folder.summary["metrics"]["test"]["rmse"])


@pytest.mark.parametrize("floor", [0, LEAST])
def test_both_children_are_asked_for_where_a_party_merges_bins(made, floor):
    """Those of the larger one do not follow: its parent was told in other groups."""
    _, app = listen(made(least_bin_rows=floor))
    asked = [message for message, _ in app.of_kind("pax_grow")]
    below = [arrays_of(message) for message in asked if scalars_of(message)["level"]]
    assert len(below) > 3
    for one in below:
        children = len(one["wanted_nodes"]) // (2 if floor else 1)
        assert children == len(one["split_lefts"])


def test_a_nodes_sums_are_those_told_of_it(made):
    """Not those that its parent was split into, between bins that rows were not told in."""
    folder, app = listen(made(least_bin_rows=LEAST, parties=1, num_boost_round=1))
    (tree,) = model_of(folder).trees
    n_held = 0
    for message, reply in app.of_kind("pax_grow"):
        told, nodes = arrays_of(reply), arrays_of(message)["wanted_nodes"]
        for node, histogram, missing in zip(
            nodes, told["histograms"], told["missing"], strict=True
        ):
            # The hessian of a row is 1; each column tells of all rows, as one has no missing ones.
            n_rows = (histogram[:, 1].sum() + missing.sum()) / len(missing)
            n_held += n_rows > 0
            assert not n_rows or tree["hessian"][node] == n_rows
    assert n_held > 5


def test_a_party_of_fewer_rows_tells_nothing_of_its_gradients(made):
    _, app = listen(made(least_bin_rows=20, partition="sizes:0.9,0.1"))
    small = [
        arrays_of(reply)
        for message, reply in app.of_kind("pax_grow")
        if message.metadata.dst_node_id == 3
    ]
    assert small
    assert not any(one[name].any() for one in small for name in ("histograms", "root_sums"))


@pytest.mark.parametrize(("least", "n_counts"), [(0, 4), (LEAST, 1)])
def test_rows_that_a_round_does_not_draw_are_as_many_or_none(made, least, n_counts):
    """Else they are told by how much a round of all rows differs from one without them."""
    more = {"subsample": 0.99, "num_boost_round": 20, "parties": 1, "max_depth": 1}
    _, app = listen(made(least_bin_rows=least, **more))
    told = [arrays_of(reply)["root_sums"] for _, reply in app.of_kind("pax_grow")]
    assert len({float(sums[0, 1]) for sums in told if len(sums)}) == n_counts
