"""PAX at a party with ``least-bin-rows``: no reported bin has fewer of its rows.

Rows of a node that has too few are summed as if they were in its sibling, and stay there; so a
node of few rows reports nothing in its round, not even its total. A row therefore has two
places: where it is summed (``TOLD``), and where it is, which leaves and the next splits use.

Limit: the next round's sums and scores depend on every leaf, however few rows it has. A server
that gives such a leaf a value of its own learns its rows, and two rounds that split next to
each other reveal the rows in between. Margins by where rows are summed would prevent this, but
change the model.
"""

from __future__ import annotations

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.histograms.build import build_all_histograms, slots_by_node
from fedapp.histograms.sketch import cell_starts, cells_of, group, merge_group_sums
from fedapp.messages.fields import Array
from fedapp.messages.pax import GrowRequest
from fedapp.site.answer import Site
from fedapp.site.store import Store

# Keys in a store: the node each row is summed in; (tree, node) of each open node; for each of
# these, the last cell of the group of each cell.
TOLD, OPEN, ENDS = "floor.nodes", "floor.open", "floor.ends"


def begin_round(site: Site, n_trees: int) -> None:
    """Sum all rows at the roots, or none in a round that has drawn too few."""
    store, least = site.store, site.config.least_bin_rows
    gradients = store["gradients"]
    store[TOLD] = np.zeros(gradients.shape[:2], dtype=np.int32)
    if _drawn(store).sum(axis=1).min() < least:
        store["gradients"] = np.zeros_like(gradients)
    roots = np.stack([np.arange(n_trees), np.zeros(n_trees)], axis=1).astype(np.int32)
    starts = cell_starts(np.diff(store["offsets"]))
    cells = np.arange(starts[-1], dtype=np.int64)
    counts = _counts(store, roots)
    store[OPEN] = roots
    store[ENDS] = np.stack([group(cells, each[None], starts, least) for each in counts])


def divide(site: Site, request: GrowRequest) -> None:
    """Sum rows of small nodes with those of their siblings, and group the cells of both."""
    store, least = site.store, site.config.least_bin_rows
    trees, lefts, parents = request.split_trees, request.split_lefts, request.split_nodes
    open_rows = {(int(tree), int(node)): row for row, (tree, node) in enumerate(store[OPEN])}
    summed_in, drawn = store[TOLD].copy(), _drawn(store)
    for tree, left in zip(trees.tolist(), lefts.tolist(), strict=True):
        tree_nodes = summed_in[tree]
        sides = [tree_nodes == left, tree_nodes == left + 1]
        sizes = [int(drawn[tree, side].sum()) for side in sides]
        if 0 < sizes[0] < least:
            tree_nodes[sides[0]] = left + 1
        elif 0 < sizes[1] < least:
            tree_nodes[sides[1]] = left
    store[TOLD] = summed_in
    starts, before, ends = cell_starts(np.diff(store["offsets"])), store[ENDS], []
    children = np.stack([np.tile(trees, 2), np.concatenate((lefts, lefts + 1))], axis=1)
    counts = _counts(store, children)
    for number, split in enumerate(zip(trees.tolist(), parents.tolist(), strict=True)):
        if split not in open_rows:
            rule = "must be nodes that were open"
            raise ProtocolError(site.name, "GrowRequest", "split_nodes", rule)
        both = counts[[number, number + len(trees)]]
        ends.append(group(before[open_rows[split]], both, starts, least))
    groups = np.array(ends, dtype=np.int64).reshape(-1, starts[-1])
    store[OPEN], store[ENDS] = children, np.concatenate((groups, groups))


def sum_nodes(store: Store, request: GrowRequest, terms: Array) -> tuple[Array, Array]:
    """Histograms of the wanted nodes, each group in its last bin."""
    # terms: (n_trees, n_rows, 2), what each row adds in each tree; (0, 0) leaves a row out
    columns, widths = request.columns.astype(np.int64), np.diff(store["offsets"])
    wanted = request.wanted_trees, request.wanted_nodes
    codes = store["codes"], store.facts["missing_code"], columns, widths[columns]
    summed_in = store[TOLD]
    histograms, missing = build_all_histograms(*codes, terms, summed_in, *wanted)
    open_rows = {(int(tree), int(node)): row for row, (tree, node) in enumerate(store[OPEN])}
    rows = [open_rows[pair] for pair in zip(*(each.tolist() for each in wanted), strict=True)]
    # Sums over all rows of each wanted node, as int64 or float64 like the histograms.
    kind = np.int64 if terms.dtype == np.int64 else np.float64
    sums = [np.empty((0, 2), kind)]
    for tree in np.unique(request.wanted_trees):
        nodes = request.wanted_nodes[request.wanted_trees == tree]
        slots = slots_by_node(summed_in[tree], nodes)[summed_in[tree]]
        sums.append(np.zeros((len(nodes), 2), dtype=kind))
        np.add.at(sums[-1], slots[slots >= 0], terms[tree][slots >= 0])
    totals = np.concatenate(sums)
    merge_group_sums(histograms, missing, totals, store[ENDS][rows], columns, cell_starts(widths))
    return histograms, missing


def _counts(store: Store, nodes: Array) -> Array:
    """Rows in each cell of some nodes: int64, shape (n_nodes, n_cells)."""
    widths = np.diff(store["offsets"])
    starts, order = cell_starts(widths), np.argsort(nodes[:, 0], kind="stable")
    counts = np.empty((len(nodes), int(starts[-1])), dtype=np.int64)
    if len(nodes):
        trees, node_ids = nodes[order].T.astype(np.int32)
        codes = store["codes"], store.facts["missing_code"], np.arange(len(widths)), widths
        histograms, missing = build_all_histograms(
            *codes, drawn_rows(store), store[TOLD], trees, node_ids
        )
        counts[order] = cells_of(histograms[..., 0], missing, starts)
    return counts


def drawn_rows(store: Store) -> Array:
    """1 for each drawn row and 0 for others, as terms: int64, (n_trees, n_rows, 2)."""
    drawn = _drawn(store).astype(np.int64)
    return np.stack([drawn, np.zeros_like(drawn)], axis=2)


def _drawn(store: Store) -> Array:
    return np.asarray(store["gradients"].any(axis=2))  # bool, (n_trees, n_rows)
