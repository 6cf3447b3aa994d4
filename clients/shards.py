"""Codes of a party's rows at the processes of its site's Ray cluster, a shard of rows each.

Terms of a bin are added in the order of the rows, as in one process: each shard continues the sums
of the one before, for a block of columns after another, so all work at once, each at another block.

::

    shard 0   block 0   block 1   block 2
    shard 1             block 0   block 1   block 2

A shard has nothing but codes: nodes and gradients come with a call. If a process or node dies, all
shards are made again, and the call is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedapp.arrays import Ints
from fedapp.cluster import RETRIES, RayWorkers
from fedapp.crypto.workers import shared_workers
from fedapp.data.scratch import batches, empty
from fedapp.histograms.bins import Codes
from fedapp.histograms.build import HistogramSums, build_all_histograms, joined
from fedapp.histograms.fixed_point import Whole
from fedapp.messages.fields import Array
from fedapp.trees.categories import CategorySets
from fedapp.trees.forest.summed import CellLayout, sum_cells
from fedapp.trees.predict import Nodes
from fedapp.trees.structure import NodeList, Routes, route_rows

FEWEST_CODES = 2**26  # a smaller table stays in this process
BLOCKS = 2  # of columns, for each shard
Put = Callable[[Array], Any]  # gives the cluster an array


class Shard:
    """Some rows; a process of the cluster, which answers one call after the other."""

    def __init__(self, shape: tuple[int, ...], kind: str, missing_code: int) -> None:
        self.codes: Codes = empty(shape, kind)
        self.missing_code = missing_code

    def fill(self, first: int, codes: Codes) -> None:
        """Write the codes of rows from one on."""
        self.codes[first : first + len(codes)] = codes

    def routed(self, routes: Routes, sets: CategorySets, firsts: Ints, nodes: Nodes) -> Nodes:
        """Nodes of these rows after some splits."""
        return route_rows(nodes, routes, self.codes, sets, firsts, self.missing_code)

    def sums(self, so_far: HistogramSums | None, wanted: NodeList, *asked: Any) -> HistogramSums:
        """Histograms of the rows up to these, which continue those of the rows before."""
        every: Any = *asked, *wanted, so_far
        return build_all_histograms(self.codes, self.missing_code, *every)

    def cells(self, layout: CellLayout, wanted: NodeList, terms: Whole, *rows: Any) -> Whole:
        """Sums of these rows by cell; ``rows`` are draws and nodes, and terms a row a sum."""
        every: Any = layout, np.ascontiguousarray(terms.T), *rows, wanted
        return sum_cells(self.codes, self.missing_code, *every)


class Shards:
    """The shards of some codes, which end with this object."""

    def __init__(self, workers: RayWorkers, codes: Codes, missing_code: int) -> None:
        self._workers, self._codes, self._missing_code = workers, codes, missing_code
        self._job, self._actors = "", list[tuple[slice, Any]]()

    def routed(self, nodes: Nodes, *how: Any) -> Nodes:
        """As a shard's, of all rows."""
        moved: Nodes = empty(nodes.shape, np.int32)
        return np.concatenate(self._each("routed", how, nodes), axis=1, out=moved)

    def cells(self, layout: CellLayout, wanted: NodeList, terms: Whole, *rows: Any) -> Whole:
        """As a shard's, of all rows, but for ``terms``, shape (n_rows, n_sums)."""
        sums: Whole = np.sum(self._each("cells", (layout, wanted), terms.T, *rows), axis=0)
        return sums

    def sums(
        self, columns: Ints, widths: Ints, wanted: NodeList, terms: Array, nodes: Nodes
    ) -> HistogramSums:
        """As a shard's, of all rows."""

        def begin(put: Put) -> list[Any]:
            n_blocks = min(len(columns), BLOCKS * len(self._actors))
            rows = [(put(terms[:, some]), put(nodes[:, some])) for some, _ in self._actors]
            last = list[Any]()
            for block in np.array_split(np.arange(len(columns)), n_blocks):
                so_far, asked = None, (wanted, columns[block], widths[block])
                for (_, actor), of_shard in zip(self._actors, rows, strict=True):
                    so_far = actor.sums.remote(so_far, *asked, *of_shard)
                last.append(so_far)
            return last

        return joined(self._done(begin), axis=1)

    def _each(self, name: str, how: tuple[Any, ...], *arrays: Array) -> list[Any]:
        """What every shard answers; arrays have a column a row."""
        return self._done(
            lambda put: [
                getattr(actor, name).remote(*how, *(put(array[:, rows]) for array in arrays))
                for rows, actor in self._actors
            ]
        )

    def _done(self, begin: Callable[[Put], list[Any]]) -> list[Any]:
        """Results of calls; what began them begins them again if a process or node has died."""
        with self._workers.using() as ray:
            job = ray.get_runtime_context().get_job_id()
            for attempt in range(RETRIES + 1):
                try:
                    if attempt or self._job != job:
                        self._make(ray)
                        self._job = job
                    results: list[Any] = ray.get(begin(self._workers.reference))
                    return results
                except ray.exceptions.RayError as error:
                    cause = getattr(error, "cause", None) or error
                    if attempt == RETRIES or not isinstance(cause, ray.exceptions.RayError):
                        raise cause from None
        raise AssertionError

    def _make(self, ray: Any) -> None:
        """One shard at each node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        ends = np.linspace(0, len(self._codes), len(nodes) + 1).astype(int).tolist()
        self._actors = []
        for node, first, last in zip(nodes, ends, ends[1:], strict=False):
            codes, there = self._codes[first:last], NodeAffinitySchedulingStrategy(node, soft=True)
            shard = ray.remote(num_cpus=0, scheduling_strategy=there)(Shard)
            actor = shard.remote(codes.shape, codes.dtype.str, self._missing_code)
            for some in batches(len(codes), codes.itemsize * codes.shape[1]):
                ray.get(actor.fill.remote(some.start, codes[some]))
            self._actors.append((slice(first, last), actor))


def shards_of(codes: Codes, missing_code: int, made: list[Shards]) -> Shards | None:
    """The shards of codes, made once; None where these stay in this process."""
    workers = shared_workers()
    if not isinstance(workers, RayWorkers) or codes.size < FEWEST_CODES:
        return None
    if not made:
        made.append(Shards(workers, codes, missing_code))
    return made[0]
