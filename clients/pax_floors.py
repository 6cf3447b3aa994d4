"""PAX at a party that tells of no bin with fewer of its rows than its ``least-bin-rows``.

Rows of a node with too few of them are told as if they were in its sibling, and as if they stayed
there; so in its round a node of few rows tells nothing, not even its total. Where rows are told,
and where they are, are two things: leaves and the next splits go by where they are.

So the next round's sums and scores, over all rows, follow from a leaf of few rows as from others: a
server that gives it alone a value learns its rows, and two rounds that split next to each other
tell of the rows in between. Margins by where rows are told would end this, and change the model.
"""

from __future__ import annotations

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.histograms.build import build_all_histograms, slots_by_node
from fedapp.histograms.floor import cell_starts, cells_of, gather, group
from fedapp.messages.fields import Array
from fedapp.messages.pax import GrowRequest
from fedapp.site.answer import Site
from fedapp.site.store import Store

# Where each row is told, in a store; tree and node of each open node; and the groups of its cells.
TOLD, OPEN, ENDS = "floor.nodes", "floor.open", "floor.ends"


def begin_round(site: Site, n_trees: int) -> None:
    """All rows are told at the roots; none of a round that has drawn too few."""
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
    store[ENDS] = np.stack([group(cells, own[None], starts, least) for own in counts])


def divide(site: Site, request: GrowRequest) -> None:
    """Tell rows of small nodes with those of their siblings, and group the cells of both.

    Raises
    ------
    ProtocolError : a node was split that was not open.
    """
    store, least = site.store, site.config.least_bin_rows
    trees, lefts, parents = request.split_trees, request.split_lefts, request.split_nodes
    known = {(int(tree), int(node)): row for row, (tree, node) in enumerate(store[OPEN])}
    told, drawn = store[TOLD].copy(), _drawn(store)
    for tree, left in zip(trees.tolist(), lefts.tolist(), strict=True):
        own = told[tree]
        sides = [own == left, own == left + 1]
        sizes = [int(drawn[tree, side].sum()) for side in sides]
        if 0 < sizes[0] < least:
            own[sides[0]] = left + 1
        elif 0 < sizes[1] < least:
            own[sides[1]] = left
    store[TOLD] = told
    starts, before, ends = cell_starts(np.diff(store["offsets"])), store[ENDS], []
    children = np.stack([np.tile(trees, 2), np.concatenate((lefts, lefts + 1))], axis=1)
    counts = _counts(store, children)
    for number, split in enumerate(zip(trees.tolist(), parents.tolist(), strict=True)):
        if split not in known:
            rule = "must be nodes that were open"
            raise ProtocolError(site.name, "GrowRequest", "split_nodes", rule)
        both = counts[[number, number + len(trees)]]
        ends.append(group(before[known[split]], both, starts, least))
    found = np.array(ends, dtype=np.int64).reshape(-1, starts[-1])
    store[OPEN], store[ENDS] = children, np.concatenate((found, found))


def sum_nodes(store: Store, request: GrowRequest, terms: Array) -> tuple[Array, Array]:
    """Histograms of the wanted nodes, trees in turn, each group in its last bin.

    Parameters
    ----------
    terms : what each row adds in each tree, shape (n_trees, n_rows, 2); (0, 0) leaves a row out.
    """
    columns, widths = request.columns.astype(np.int64), np.diff(store["offsets"])
    wanted = request.wanted_trees, request.wanted_nodes
    codes = store["codes"], store.facts["missing_code"], columns, widths[columns]
    histograms, missing = build_all_histograms(*codes, terms, store[TOLD], *wanted)
    known = {(int(tree), int(node)): row for row, (tree, node) in enumerate(store[OPEN])}
    rows = [known[pair] for pair in zip(*(one.tolist() for one in wanted), strict=True)]
    totals = _totals(store, request, terms)
    gather(histograms, missing, totals, store[ENDS][rows], columns, cell_starts(widths))
    return histograms, missing


def _totals(store: Store, request: GrowRequest, terms: Array) -> Array:
    """Sums over all rows of each wanted node."""
    told, kind = store[TOLD], np.int64 if terms.dtype == np.int64 else np.float64
    found = [np.empty((0, 2), kind)]
    for tree in np.unique(request.wanted_trees):
        wanted = request.wanted_nodes[request.wanted_trees == tree]
        slots = slots_by_node(told[tree], wanted)[told[tree]]
        totals = np.zeros((len(wanted), 2), dtype=kind)
        np.add.at(totals, slots[slots >= 0], terms[tree][slots >= 0])
        found.append(totals)
    return np.concatenate(found)


def _counts(store: Store, nodes: Array) -> Array:
    """Rows in each cell of some nodes: int64, shape (n_nodes, n_cells)."""
    widths = np.diff(store["offsets"])
    starts, order = cell_starts(widths), np.argsort(nodes[:, 0], kind="stable")
    counts = np.empty((len(nodes), int(starts[-1])), dtype=np.int64)
    if len(nodes):
        trees, own = nodes[order].T.astype(np.int32)
        codes = store["codes"], store.facts["missing_code"], np.arange(len(widths)), widths
        histograms, missing = build_all_histograms(
            *codes, drawn_rows(store), store[TOLD], trees, own
        )
        counts[order] = cells_of(histograms[..., 0], missing, starts)
    return counts


def drawn_rows(store: Store) -> Array:
    """Rows that count in each tree, as terms of sums: 1 and 0, int64, (n_trees, n_rows, 2)."""
    drawn = _drawn(store).astype(np.int64)
    return np.stack([drawn, np.zeros_like(drawn)], axis=2)


def _drawn(store: Store) -> Array:
    """Rows that count in each tree: bool, shape (n_trees, n_rows)."""
    return np.asarray(store["gradients"].any(axis=2))
