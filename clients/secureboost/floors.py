"""SecureBoost at a passive party with ``least-bin-rows``: no reported bin has fewer drawn rows.

In each node, neighbouring bins of a column are merged until every group has at least that many of
the round's drawn rows, or none (see ``fedapp.histograms.sketch``). A group is summed in its last
bin, and splits go between groups, so a side's sums are of exactly the rows that go there. Missing
values go where their group goes.

Both children of a node have the same groups, each a union of groups of their parent. So where one
child has too few rows, whoever made the split, each column is a single group in both children,
and this party offers no split of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.histograms.bins import Ints
from fedapp.histograms.sketch import Cells, cell_starts, group
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import Splits
from fedapp.site.answer import Site
from fedapp.site.store import Store
from fedapp.trees.sets import CategorySets

# Keys in a store: (tree, node) of each open node; the last cell of the group of each of its cells.
OPEN, ENDS = "floor.open", "floor.ends"


def begin_round(site: Site, n_trees: int) -> None:
    """Group the cells of the roots."""
    store = site.store
    roots = np.stack([np.arange(n_trees), np.zeros(n_trees)], axis=1).astype(np.int64)
    starts = _starts(store)
    cells = np.arange(starts[-1], dtype=np.int64)
    _group(site, [(roots[[tree]], cells) for tree in range(n_trees)])


def divide(site: Site, splits: Splits) -> None:
    """Group the cells of the children of a level's splits, once their rows have moved."""
    store = site.store
    families = []
    for tree, node, left in zip(splits.trees, splits.nodes, splits.lefts, strict=True):
        children = np.array([[tree, left], [tree, left + 1]], dtype=np.int64)
        families.append((children, store[ENDS][_open_row(site, tree, node)]))
    _group(site, families)


def _group(site: Site, families: list[tuple[Array, Cells]]) -> None:
    """Group the cells of nodes; siblings share groups, which are unions of their parent's."""
    store, least, starts = site.store, site.config.least_bin_rows, _starts(site.store)
    cells, ends, nodes = _cells(store, np.arange(len(starts) - 1)), [], []
    for children, before in families:
        pairs = children.tolist()
        counts = np.stack([_counts(store, cells, tree, node, starts) for tree, node in pairs])
        ends += [group(before, counts, starts, least)] * len(children)
        nodes.append(children)
    store[OPEN] = np.concatenate([*nodes, np.empty((0, 2), dtype=np.int64)])
    store[ENDS] = np.array(ends, dtype=np.int64).reshape(-1, int(starts[-1]))


def told_codes(store: Store, tree: int, columns: Ints) -> Array:
    """Bin in which each drawn row is summed, in its node of a tree; shape (n_drawn, n_columns)."""
    starts, cells, codes = _starts(store), _cells(store, columns), store["codes"]
    widths, inside = np.diff(starts)[columns] - 1, store["nodes"][tree, store["drawn"]]
    occupied, index = np.unique(inside, return_inverse=True)
    open_rows = {node: row for row, (of, node) in enumerate(store[OPEN].tolist()) if of == tree}
    rows = np.array([open_rows.get(node, -1) for node in occupied.tolist()], dtype=np.int64)[index]
    last_cells = (
        np.where(rows[:, None] < 0, cells, store[ENDS][rows[:, None], cells]) - starts[columns]
    )
    # Cell 0, missing values, is a column's last bin.
    return np.where(last_cells == 0, widths, last_cells - 1).astype(codes.dtype)


def between_groups(
    site: Site, splits: Splits, local: Ints, sets: CategorySets
) -> tuple[Splits, CategorySets]:
    """Move local splits so that whole groups go to one side; ``sets`` of those by categories."""
    store, starts, least = site.store, _starts(site.store), site.config.least_bin_rows
    rights, defaults = splits.first_rights.copy(), splits.defaults.copy()
    members, active = list[Array](), store.facts["active"]
    for index in local.tolist():
        tree, node, column = (int(getattr(splits, n)[index]) for n in ("trees", "nodes", "columns"))
        first, end = starts[column : column + 2]
        group_ends = store[ENDS][_open_row(site, tree, node)][first:end] - first
        if store["set_widths"][column]:
            is_right = np.append(not defaults[index], sets.members(len(members)))[group_ends]
            members.append(is_right[1:])
        else:
            is_right = np.append(not defaults[index], np.arange(end - first - 1) >= rights[index])
            is_right = is_right[group_ends]
            rights[index] = np.count_nonzero(~is_right[1:])
        defaults[index] = not is_right[0]
        cells = _cells(store, np.array([column]))
        counts = _counts(store, cells - first, tree, node, np.array([0, end - first]))
        if min(counts[is_right].sum(), counts[~is_right].sum()) < least:
            rule = f"must leave {least} rows on each side (least-bin-rows of {site.name})"
            raise ProtocolError(active, "Splits", "columns", rule)
    return replace(splits, first_rights=rights, defaults=defaults), CategorySets.of(members)


def _starts(store: Store) -> Ints:
    # A column's cells: missing values, then its bins.
    return cell_starts(np.diff(store["offsets"]))


def _cells(store: Store, columns: Ints) -> Cells:
    """Cell of each drawn row in some columns; int64, shape (n_drawn, n_columns)."""
    starts, codes = _starts(store), store["codes"][store["drawn"]][:, columns].astype(np.int64)
    is_missing = codes == np.diff(starts)[columns] - 1
    cells: Cells = starts[columns] + np.where(is_missing, 0, codes + 1)
    return cells


def _counts(store: Store, cells: Cells, tree: int, node: int, starts: Ints) -> Cells:
    inside = store["nodes"][tree, store["drawn"]] == node
    return np.bincount(cells[inside].ravel(), minlength=int(starts[-1])).astype(np.int64)


def _open_row(site: Site, tree: int, node: int) -> int:
    rows = np.flatnonzero((site.store[OPEN] == (tree, node)).all(axis=1))
    if not len(rows):
        active = site.store.facts["active"]
        raise ProtocolError(active, "Splits", "nodes", "must be nodes that were open")
    return int(rows[0])
