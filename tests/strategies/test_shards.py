"""Codes in shards: sums and nodes are those of all rows, also at a Ray cluster that loses some."""

import numpy as np
import pytest

from clients.shards import Shard, Shards
from fedapp.cluster import RayWorkers
from fedapp.histograms.build import build_all_histograms
from fedapp.runs.local import run_local
from fedapp.trees.categories import NO_SETS
from fedapp.trees.forest.summed import CellLayout, sum_cells
from fedapp.trees.structure import ROUTE, route_rows
from simulations.ray_nodes import started
from tests.federated import model_bytes

RNG = np.random.default_rng(7)
N_ROWS, WIDTHS, MISSING = 500, np.array([5, 3, 4]), 255
CODES = RNG.integers(0, WIDTHS, (N_ROWS, 3)).astype(np.uint8)
CODES[RNG.random(CODES.shape) < 0.1] = MISSING
TERMS = RNG.normal(size=(2, N_ROWS, 2)).astype(np.float32)
NODES = RNG.integers(0, 3, (2, N_ROWS)).astype(np.int32)
WANTED = np.array([0, 0, 1], np.int32), np.array([2, 0, 1], np.int32)
COLUMNS = np.array([2, 0])
ROUTES = np.array([(0, 2, 3, 1, 0, True, -1), (1, 1, 3, 2, 0, False, -1)], dtype=ROUTE)
HOW = ROUTES, NO_SETS, np.array([1, 2])
LAYOUT = CellLayout(np.array([[0, 1], [2, 0], [1, 2]], np.int32), WIDTHS)
WEIGHTS, DRAWS = RNG.integers(1, 9, (N_ROWS, 2)), RNG.integers(0, 3, (2, N_ROWS)).astype(np.uint8)

SUMS = build_all_histograms(CODES, MISSING, COLUMNS, WIDTHS[COLUMNS], TERMS, NODES, *WANTED)
MOVED = route_rows(NODES, ROUTES, CODES, *HOW[1:], MISSING)
CELLS = sum_cells(CODES, MISSING, LAYOUT, WEIGHTS, DRAWS, NODES, WANTED)


def same(*pairs):
    return all(one.tobytes() == other.tobytes() for one, other in zip(*pairs, strict=True))


def test_a_shard_continues_the_sums_of_the_one_before():
    so_far, moved, cells = None, [], []
    for rows in np.array_split(np.arange(N_ROWS), 3):
        shard = Shard(CODES[rows].shape, "u1", MISSING)
        shard.fill(0, CODES[rows[:50]])
        shard.fill(50, CODES[rows[50:]])
        terms, nodes = TERMS[:, rows], NODES[:, rows]
        so_far = shard.sums(so_far, WANTED, COLUMNS, WIDTHS[COLUMNS], terms, nodes)
        moved.append(shard.routed(*HOW, nodes))
        cells.append(shard.cells(LAYOUT, WANTED, WEIGHTS[rows].T, DRAWS[:, rows], nodes))
    assert same(so_far, SUMS)
    assert same([np.concatenate(moved, axis=1), sum(cells)], [MOVED, CELLS])


@pytest.mark.slow
def test_shards_that_die_are_made_again():
    import ray

    with started() as (address, nodes):
        workers = RayWorkers(address)
        shards = Shards(workers, CODES, MISSING)

        def check():
            assert same(shards.sums(COLUMNS, WIDTHS[COLUMNS], WANTED, TERMS, NODES), SUMS)
            cells = shards.cells(LAYOUT, WANTED, WEIGHTS, DRAWS, NODES)
            assert same([shards.routed(NODES, *HOW), cells], [MOVED, CELLS])
            return [rows.stop - rows.start for rows, _ in shards._actors]

        try:
            assert check() == [N_ROWS // 2] * 2
            ray.kill(shards._actors[0][1])
            assert check() == [N_ROWS // 2] * 2
            nodes[1].kill()
            assert sum(check()) == N_ROWS
            with pytest.raises(ValueError, match="could not broadcast input array"):
                shards._done(lambda _: [shards._actors[0][1].fill.remote(0, CODES[:, :2])])
        finally:
            workers.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"subsample": 0.7},
        {"pax__aggregation": "secure"},
        {"strategy": "horizontal-forest", "horizontal_forest__trees": 3},
    ],
    ids=["plain", "masked", "forest"],
)
def test_a_run_with_shards_at_two_nodes_gives_the_model_of_one_process(
    made, monkeypatch, two_nodes, more
):
    expected = model_bytes(run_local(made(**more)))
    calls, done = list[int](), Shards._done
    monkeypatch.setattr(Shards, "_done", lambda *given: calls.append(1) or done(*given))
    monkeypatch.setattr("clients.shards.FEWEST_CODES", 0)
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    assert model_bytes(run_local(made(**more))) == expected
    assert calls
