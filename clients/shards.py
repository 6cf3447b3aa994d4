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

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from fedapp.cluster import RETRIES, RayWorkers
from fedapp.crypto.workers import shared_workers
from fedapp.data.scratch import batches, empty
from fedapp.errors import ConfigError
from fedapp.histograms.bins import Codes, Ints
from fedapp.histograms.build import HistogramSums, build_all_histograms, joined
from fedapp.histograms.fixed_point import Whole
from fedapp.messages.fields import Array
from fedapp.trees.categories import CategorySets
from fedapp.trees.forest.summed import CellLayout, sum_cells
from fedapp.trees.predict import Nodes
from fedapp.trees.structure import NodeList, Routes, route_rows

FEWEST_CODES = 2**26  # a smaller table stays in this process
BLOCKS = 2  # of columns, for each shard
WAIT_SECONDS = 1.0  # for results, before the cluster is asked whether it is there


class Shard:
    """Some rows; a process of the cluster, which answers one call after the other."""

    def __init__(self, shape: tuple[int, ...], kind: str, missing_code: int) -> None:
        self.codes: Codes = empty(shape, kind)
        self.missing_code = missing_code

    def fill(self, first: int, codes: Codes) -> None:
        """Write the codes of rows from one on."""
        self.codes[first : first + len(codes)] = codes

    def routed(self, nodes: Nodes, routes: Routes, sets: CategorySets, firsts: Ints) -> Nodes:
        """As ``Binned.routed``."""
        return route_rows(nodes, routes, self.codes, sets, firsts, self.missing_code)

    def sums(
        self,
        so_far: HistogramSums | None,
        columns: Ints,
        widths: Ints,
        wanted: NodeList,
        terms: Array,
        nodes: Nodes,
    ) -> HistogramSums:
        """As ``Binned.sums``: those of the shards before, continued."""
        asked = columns, widths, terms, nodes, *wanted
        return build_all_histograms(self.codes, self.missing_code, *asked, so_far=so_far)

    def cells(
        self, layout: CellLayout, wanted: NodeList, terms: Whole, draws: Array, nodes: Nodes
    ) -> Whole:
        """As ``Binned.cells``, of these rows."""
        return sum_cells(self.codes, self.missing_code, layout, terms, draws, nodes, wanted)


class Shards:
    """The shards of some codes, which end with this object."""

    def __init__(self, workers: RayWorkers, codes: Codes, missing_code: int) -> None:
        self._workers, self._codes, self._missing_code = workers, codes, missing_code
        self._job, self._actors = "", list[tuple[slice, Any]]()

    def routed(self, nodes: Nodes, *how: Any) -> Nodes:
        """As ``Binned.routed``; ``how`` as for a shard."""

        def begin(put: Callable[[Array], Any]) -> list[Any]:
            return [actor.routed.remote(put(nodes[:, rows]), *how) for rows, actor in self._actors]

        moved: Nodes = empty(nodes.shape, np.int32)
        for (rows, _), part in zip(self._actors, self._done(begin), strict=True):
            moved[:, rows] = part
        return moved

    def sums(
        self, columns: Ints, widths: Ints, terms: Array, nodes: Nodes, wanted: NodeList
    ) -> HistogramSums:
        """As ``Binned.sums``."""

        def begin(put: Callable[[Array], Any]) -> list[Any]:
            n_blocks = min(len(columns), BLOCKS * len(self._actors))
            parts = [
                (actor, put(terms[:, rows]), put(nodes[:, rows])) for rows, actor in self._actors
            ]
            last = list[Any]()
            for block in np.array_split(np.arange(len(columns)), n_blocks):
                so_far = None
                for actor, *of_rows in parts:
                    asked = columns[block], widths[block], wanted
                    so_far = actor.sums.remote(so_far, *asked, *of_rows)
                last.append(so_far)
            return last

        return joined(self._done(begin), axis=1)

    def cells(
        self, layout: CellLayout, terms: Whole, draws: Array, nodes: Nodes, wanted: NodeList
    ) -> Whole:
        """As ``Binned.cells``."""

        def begin(put: Callable[[Array], Any]) -> list[Any]:
            return [
                actor.cells.remote(
                    layout, wanted, put(terms[rows]), put(draws[:, rows]), put(nodes[:, rows])
                )
                for rows, actor in self._actors
            ]

        sums: Whole = np.sum(self._done(begin), axis=0)
        return sums

    def _done(self, begin: Callable[[Callable[[Array], Any]], list[Any]]) -> list[Any]:
        """Results of calls; what began them begins them again if a process or node has died."""
        ray: Any = self._workers.connected()
        job, last = ray.get_runtime_context().get_job_id(), ""
        for attempt in range(RETRIES + 1):
            try:
                if attempt or self._job != job:
                    self._make(ray)
                    self._job = job
                return self._results(ray, begin(self._workers.reference))
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", error)
                if not isinstance(cause, ray.exceptions.RayError):
                    raise cause from None
                last = type(cause).__name__
        rule = "workers must be a Ray cluster whose nodes and processes stay alive"
        raise ConfigError(f"{rule}, got {last} {RETRIES + 1} times")

    def _make(self, ray: Any) -> None:
        """One shard at each node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [
            node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")
        ]
        ends = np.linspace(0, len(self._codes), len(nodes) + 1).astype(int).tolist()
        shape, kind = self._codes.shape, self._codes.dtype.str
        self._actors = []
        for node, first, last in zip(nodes, ends, ends[1:], strict=False):
            there = NodeAffinitySchedulingStrategy(node, soft=True)
            shard = ray.remote(num_cpus=0, scheduling_strategy=there)(Shard)
            actor = shard.remote((last - first, *shape[1:]), kind, self._missing_code)
            codes = self._codes[first:last]
            for some in batches(len(codes), codes.itemsize * max(1, shape[1])):
                self._results(ray, [actor.fill.remote(some.start, codes[some])])
            self._actors.append((slice(first, last), actor))

    def _results(self, ray: Any, calls: list[Any]) -> list[Any]:
        """Results of calls, in order; a ConfigError if the cluster is away."""
        answered = time.monotonic()
        while ray.wait(calls, num_returns=len(calls), timeout=WAIT_SECONDS)[1]:
            answered = self._workers.last_answer(answered)
        results: list[Any] = ray.get(calls)
        return results


def shards_of(codes: Codes, missing_code: int, before: Shards | None) -> Shards | None:
    """The shards of codes, or those made before; None where they stay in this process."""
    workers = shared_workers()
    if not isinstance(workers, RayWorkers) or codes.size < FEWEST_CODES:
        return None
    return before or Shards(workers, codes, missing_code)
