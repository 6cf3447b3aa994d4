"""PAX at a party: sketch the table once, then route rows and sum gradients, level by level.

Source: Ong et al. 2020, Algorithm 1, lines 7 and 12 to 16. Departure: the paper sends the model
in each round; here the party keeps its margins, and receives only new splits and leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import cast

import numpy as np

from clients.handshake import keep_coding, loss_parameters, run_outputs, stored_categories
from clients.pax_secure import count, open_sums, take_cuts, whole_terms
from clients.scoring import begin_margins, check_outputs, read_trees, score_fields
from fedapp.data.partition import WATCHED
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.histograms.bins import digitise, with_categories
from fedapp.histograms.build import build_all_histograms, slots_by_node
from fedapp.histograms.sketch import (
    cell_starts,
    cells_of,
    group,
    merge_group_sums,
    merge_sketch_bins,
    sketch_and_code,
    sketch_cuts,
    used_categories,
)
from fedapp.messages.fields import Array, Reply, Request, check_sizes
from fedapp.messages.pax import (
    CountRequest,
    GrowReply,
    GrowRequest,
    GrowSumsRequest,
    InitReply,
    InitRequest,
    OpenRequest,
    SketchReply,
    SketchRequest,
)
from fedapp.site.answer import Handler, Site
from fedapp.site.settings import check_sample_size
from fedapp.site.store import Store
from fedapp.site.sums import Sums, adder_of, leaving
from fedapp.trees.grow import (
    ROUTE,
    children_of,
    each_once_among,
    roots_of,
    route_codes,
    route_values,
)
from fedapp.trees.objective import Objective, gradients
from fedapp.trees.predict import add_trees
from fedapp.trees.sets import CategorySets, category_counts, set_numbers

# Keys in a store with ``least-bin-rows``: the node each row is summed in; (tree, node) of each open
# node; for each of these, the last cell of the group of each cell.
SUMMED_IN, OPEN, ENDS = "floor.nodes", "floor.open", "floor.ends"
# Scores are sent once a round, at level 0.
NO_SCORES: dict[str, Array] = {
    "train_sums": np.empty(0),
    "train_scores": np.empty((0, 0)),
    "valid_sums": np.empty(0),
    "valid_scores": np.empty((0, 0)),
}


def sketch(site: Site, request: SketchRequest) -> SketchReply:
    """Summarise the columns, and replace each value by the number of its bin."""
    store, coded = site.store, keep_coding(site, request)
    values, weights = store["train.values"], store["train.weights"]
    categories = category_counts(stored_categories(store), values.shape[1])
    summary, codes, missing_code = sketch_and_code(values, weights, request.n_bins, categories)
    if least := site.config.least_bin_rows:
        summary, values = merge_sketch_bins(summary, values, weights, least)
    full = summary.with_categories(categories)
    if least or categories.any():
        cuts = with_categories(sketch_cuts(full), categories, used_categories([full], categories))
        codes, missing_code = digitise(values, cuts)
    store["codes"], store.facts["missing_code"] = codes, missing_code
    store["representatives"], store["offsets"] = full.representatives, full.offsets
    store["set_widths"] = categories
    store.drop("train.values")
    return SketchReply(
        representatives=summary.representatives,
        masses=summary.masses,
        offsets=summary.offsets,
        maxima=summary.maxima,
        **coded,
    )


def grow(site: Site, request: GrowRequest) -> Reply | Sums:
    """Route the rows by the last splits, start a round at level 0, sum the wanted nodes."""
    if isinstance(request, GrowSumsRequest) and len(request.edges):
        take_cuts(site, request)
    store = site.store
    _check(site, request)
    if "train.margins" not in store:
        _begin(store, request.base_margin)
    _route(site, request)
    # Every row, where it is now, needs a leaf value.
    sizes = np.diff(request.leaf_offsets)
    for subset in WATCHED if len(request.leaf_values) else ():
        if (store[f"{subset}.nodes"].max(axis=1, initial=0) >= sizes).any():
            raise ProtocolError(site.name, "GrowRequest", "leaf_values", "must be one a node")
    scores = NO_SCORES
    if request.level == 0:
        scores = _start_round(site, request)
    sum_rows = sum_nodes if site.config.least_bin_rows else _sum_nodes
    if site.config.least_bin_rows and request.level == 0:
        begin_round(site, request.n_trees)
    histograms, missing = sum_rows(store, request, store["gradients"])
    root_sums = np.empty((0, 2))
    if request.level == 0:
        root_sums = store["gradients"].sum(axis=1, dtype=histograms.dtype)
    sums = {"histograms": histograms, "missing": missing, "root_sums": root_sums}
    # A level's sums are parts of those of the level above.
    return leaving(request, GrowReply, sums | scores, follows=request.level > 0)


def begin_from(site: Site, request: InitRequest) -> InitReply:
    """Start from the margins of a finished model; training rows are predicted by their bins."""
    store = site.store
    if "train.margins" in store:
        raise ProtocolError(site.name, "InitRequest", "trees", "must come before the first round")
    widths = np.asarray(store["set_widths"])  # missing before the sketch
    initial = read_trees(site, request, widths)
    check_outputs(site, request, "base_margin")
    _begin(store, request.base_margin)
    if "train.values" in store:
        values = store["train.values"]
    else:  # binned, so each value's representative
        codes, offsets = store["codes"], store["offsets"]
        values = np.full(codes.shape, np.nan, dtype=np.float32)
        for column, (begin, end) in enumerate(pairwise(offsets)):
            present = codes[:, column] != store.facts["missing_code"]
            values[present, column] = store["representatives"][begin:end][codes[present, column]]
    rows = {"train": values, "valid": store["valid.values"]}
    for subset in WATCHED:
        margins = store[f"{subset}.margins"]
        store[f"{subset}.margins"] = add_trees(margins, initial.trees, rows[subset], initial.sets)
    return InitReply()


def _begin(store: Store, base_margin: Array) -> None:
    begin_margins(store, base_margin)
    for subset in WATCHED:
        n_rows = len(store[f"{subset}.labels"])
        store[f"{subset}.nodes"] = np.zeros((len(base_margin), n_rows), dtype=np.int32)


def _route(site: Site, request: GrowRequest) -> None:
    """Route training rows by their bins, validation rows by their values."""
    store = site.store
    n_splits = len(request.split_trees)
    routes = np.empty(n_splits, dtype=ROUTE)
    routes["tree"], routes["node"] = request.split_trees, request.split_nodes
    routes["left"], routes["column"] = request.split_lefts, request.split_columns
    routes["threshold"] = request.split_thresholds
    routes["default_left"] = request.split_defaults
    widths = store["set_widths"][routes["column"]]
    routes["set"] = set_numbers(widths)
    with as_protocol_error(site.name, "GrowRequest", "split_sets"):
        sets = CategorySets(request.split_sets, widths[widths > 0])
    if not n_splits:
        return
    representatives, offsets = store["representatives"], store["offsets"]
    # The lowest bin that goes right, for each split.
    first_right = np.array(
        [
            np.searchsorted(representatives[offsets[f] : offsets[f + 1]], threshold, side="left")
            for f, threshold in zip(routes["column"], routes["threshold"], strict=True)
        ],
        dtype=np.int64,
    )
    missing_code = store.facts["missing_code"]
    by_codes = routes, first_right, store["codes"], missing_code, sets
    store["train.nodes"] = route_codes(store["train.nodes"], *by_codes)
    if site.config.least_bin_rows and request.level:
        store[SUMMED_IN] = route_codes(store[SUMMED_IN], *by_codes)
        divide(site, request)
    if len(store["valid.values"]):
        store["valid.nodes"] = route_values(
            store["valid.nodes"], routes, store["valid.values"], sets
        )


def _start_round(site: Site, request: GrowRequest) -> dict[str, Array]:
    """Add the last leaf values, score, and compute gradients of the drawn rows."""
    store = site.store
    objective = cast(Objective, store.facts["objective"])
    scores, adder = dict[str, Array](), adder_of(store, request)
    for subset in WATCHED:
        margins, nodes = store[f"{subset}.margins"], store[f"{subset}.nodes"]
        if len(request.leaf_values):
            starts = request.leaf_offsets[:-1, None]
            margins = margins + request.leaf_values[starts + nodes].T
            store[f"{subset}.margins"] = margins
        store[f"{subset}.nodes"] = np.zeros_like(nodes)
        settings = objective, margins, request.score_bins, float(request.base_margin[0])
        scores |= score_fields(site, subset, *settings, adder=adder)
    margins, labels, weights = (store[f"train.{name}"] for name in ("margins", "labels", "weights"))
    pairs = gradients(objective, margins, labels, weights, loss_parameters(store))
    if request.subsample < 1:
        # Each row with probability subsample, as in XGBoost; rows of weight 0 are not counted.
        share = request.subsample
        drawn: Array = site.random(request.seed, request.round_id, share).random(len(pairs)) < share
        weighted = pairs.any(axis=(1, 2))
        n_rows, n_drawn = int(np.sum(weighted)), int(np.sum(weighted & drawn))
        if check_sample_size(site.config, n_rows, n_drawn) > n_drawn:
            drawn[:] = True
        pairs[~drawn] = 0
    # pairs: (n_rows, n_trees, 2); the store keeps (n_trees, n_rows, 2)
    rows = np.ascontiguousarray(pairs.transpose(1, 0, 2))
    store["gradients"] = rows if request.leaves == "own" else whole_terms(store, rows)
    return scores


def _sum_nodes(store: Store, request: GrowRequest, terms: Array) -> tuple[Array, Array]:
    columns = request.columns.astype(np.int64)
    return build_all_histograms(
        store["codes"],
        store.facts["missing_code"],
        columns,
        np.diff(store["offsets"])[columns],
        terms,
        store["train.nodes"],
        request.wanted_trees,
        request.wanted_nodes,
    )


def _check(site: Site, request: GrowRequest) -> None:
    """Check the request against the party's table, so that no index is out of range."""
    store = site.store
    n_columns = len(store["offsets"]) - 1
    width = run_outputs(store)
    # Nodes that may be split: the roots, then both children of every split.
    level, n_open = store.facts.get("open", (-1, 0))
    n_splits = len(request.split_trees)
    at_root = request.level == 0
    store.facts["open"] = request.level, width if at_root else 2 * n_splits
    open_nodes = roots_of(request.n_trees)
    if request.level:
        open_nodes = children_of(request.split_trees, request.split_lefts)
    wanted = request.wanted_trees, request.wanted_nodes
    check_sizes(site.name, request, n_trees=width, n_columns=n_columns)
    rules = {
        "base_margin": (len(request.base_margin) == width, f"must be {width}, one an output"),
        "level": (at_root or request.level == level + 1, f"must be 0 or {level + 1}"),
        "split_nodes": (n_splits <= n_open, f"must be {n_open} at most"),
        "wanted_nodes": (
            len(request.wanted_nodes) > 0 and each_once_among(wanted, open_nodes),
            "must be roots, or children of the splits, once, and one at least",
        ),
    }
    for field, (holds, rule) in rules.items():
        if not np.all(holds):
            raise ProtocolError(site.name, "GrowRequest", field, rule)


# With ``least-bin-rows`` no reported bin has fewer of the party's rows: small nodes are summed with
# their siblings, and a column's cells (missing values, then its bins) are merged to groups.


# Rows of a node that has too few are summed as if they were in its sibling, and stay there; so a
# node of few rows reports nothing in its round, not even its total. A row therefore has two
# places: where it is summed (``SUMMED_IN``), and where it is, which leaves and the next splits use.
#
# Limit: the next round's sums and scores depend on every leaf, however few rows it has. A server
# that gives such a leaf a value of its own learns its rows, and two rounds that split next to
# each other reveal the rows in between. Margins by where rows are summed would prevent this, but
# change the model.
def begin_round(site: Site, n_trees: int) -> None:
    """Sum all rows at the roots, or none in a round that has drawn too few."""
    store, least = site.store, site.config.least_bin_rows
    gradients = store["gradients"]
    store[SUMMED_IN] = np.zeros(gradients.shape[:2], dtype=np.int32)
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
    summed_in, drawn = store[SUMMED_IN].copy(), _drawn(store)
    for tree, left in zip(trees.tolist(), lefts.tolist(), strict=True):
        tree_nodes = summed_in[tree]
        sides = [tree_nodes == left, tree_nodes == left + 1]
        sizes = [int(drawn[tree, side].sum()) for side in sides]
        if 0 < sizes[0] < least:
            tree_nodes[sides[0]] = left + 1
        elif 0 < sizes[1] < least:
            tree_nodes[sides[1]] = left
    store[SUMMED_IN] = summed_in
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
    summed_in = store[SUMMED_IN]
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
            *codes, drawn_rows(store), store[SUMMED_IN], trees, node_ids
        )
        counts[order] = cells_of(histograms[..., 0], missing, starts)
    return counts


def drawn_rows(store: Store) -> Array:
    """1 for each drawn row and 0 for others, as terms: int64, (n_trees, n_rows, 2)."""
    drawn = _drawn(store).astype(np.int64)
    return np.stack([drawn, np.zeros_like(drawn)], axis=2)


def _drawn(store: Store) -> Array:
    return np.asarray(store["gradients"].any(axis=2))  # bool, (n_trees, n_rows)


HANDLERS: Mapping[type[Request], Handler] = {
    SketchRequest: sketch,
    OpenRequest: open_sums,
    CountRequest: count,
    InitRequest: begin_from,
    GrowRequest: grow,
    GrowSumsRequest: grow,
}
