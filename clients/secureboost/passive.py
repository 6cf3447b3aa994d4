"""SecureBoost at a passive party: sum ciphertexts it cannot read, split its columns.

Source: Cheng et al. 2019, Algorithm 1. All the party keeps of the model is the lookup table of its
splits: record id -> column, threshold, default side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from clients.handshake import stored_categories
from clients.inference import answers, part_digest_array, read_party_part
from clients.secureboost.shared import (
    INIT_MODEL,
    SET_UP,
    SPLIT,
    SUMMED,
    TAKING,
    apply_local_splits,
    code_categories,
    keep_cuts,
    load_initial_lookup,
    local_constraints,
    nodes_after,
    parse_constraints,
)
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import PairLayout, grouped_layouts
from fedapp.crypto.paillier import PublicKey as Key
from fedapp.crypto.paillier import check_ciphertexts, read_public_key
from fedapp.crypto.sums import pack_sums, sum_rows
from fedapp.crypto.workers import shared_workers
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import Ints, digitise
from fedapp.histograms.build import slots_by_node, sum_jobs
from fedapp.histograms.sketch import cell_starts, group
from fedapp.messages.fields import Array
from fedapp.messages.handshake import pack_categories
from fedapp.messages.inference import Answers, Questions
from fedapp.messages.secureboost import (
    AnswerRequest,
    ColumnBins,
    EncryptedGradients,
    EncryptedSums,
    HandOverRequest,
    MoreGradients,
    Partition,
    PartitionRequest,
    PartKept,
    PublicKey,
    Records,
    SetupRequest,
    Splits,
    SumRequest,
    TakeRequest,
)
from fedapp.messages.vertical import SentReply
from fedapp.site.answer import Site, enter, phase_of
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, part_digest, sent_bits, write_part
from fedapp.trees.divided import Lookup
from fedapp.trees.grow import children_of, each_once_among
from fedapp.trees.predict import pack_bits
from fedapp.trees.sets import CategorySets

# Of a round's encrypted gradients, stored block by block: names in a store and its facts.
BLOCKS, ENDS, WANTED = "ciphertexts", "block_ends", "n_ciphertexts"
# Keys in a store: (tree, node) of each open node; the last cell of the group of each of its cells.
OPEN, FLOOR_ENDS = "floor.open", "floor.ends"


def setup(site: Site, request: SetupRequest) -> tuple[SentReply, Letters]:
    """Code the categories, and bin the columns of the training rows."""
    store, active = site.store, site.store.facts["active"]
    categories = code_categories(store)
    cuts = keep_cuts(store, request.max_bin, categories)
    train = np.asarray(store["values"][: store.facts["n_train"]])
    codes, missing_code = digitise(train, cuts)
    is_missing = codes == missing_code
    kind = np.uint8 if int(cuts.widths.max(initial=0)) < 256 else np.uint16
    # A missing value's bin is one more, the column's last.
    store["codes"] = np.where(is_missing, cuts.widths, codes).astype(kind)
    store.facts["key"] = request.key_bits, request.insecure_small_key
    store.facts["max_depth"] = request.max_depth
    part = load_initial_lookup(site)
    letter = ColumnBins(
        widths=cuts.widths,
        categorical=(categories > 0).astype(np.uint8),
        names=tuple(store.facts["columns"]) if site.config.shares_names else (),
        allows_export=site.config.allows_export,
        merges_bins=site.config.least_bin_rows > 0,
        part=part,
        **local_constraints(site, parse_constraints(site, request)).fields(),
    )
    return SentReply(), [(active, letter)]


def answer(site: Site, request: AnswerRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Sides of the rows asked about, by this party's splits of the initial model."""
    store, active = site.store, site.store.facts["active"]
    _meet(store, mail)
    questions = mail.only(Questions, active)
    if questions is None:
        return SentReply(), []
    if not store.facts[INIT_MODEL]:
        raise ProtocolError(active, "Questions", "records", "must be of init-model, got none")
    part = read_party_part(site, store.facts[INIT_MODEL])
    bits, _ = answers(site, part, questions)
    return SentReply(), [(active, Answers(part_digest_array(site, store.facts[INIT_MODEL]), bits))]


def take(site: Site, request: TakeRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Start a round with the first block of its gradients, or store another block."""
    store, active = site.store, site.store.facts["active"]
    if phase_of(store) == SET_UP:
        _meet(store, mail)
    if phase_of(store) != TAKING:
        _begin(site, mail.one(EncryptedGradients, active))
    elif more := mail.only(MoreGradients, active):
        _go_on(store, more)
    return SentReply(), []


def sum_nodes(site: Site, request: SumRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Algorithm 1: start the round if it is new, else apply the last level's splits; sum."""
    store, active, phase = site.store, site.store.facts["active"], phase_of(site.store)
    letters: Letters = []
    if phase in (SET_UP, TAKING) or mail.only(EncryptedGradients, active):
        take(site, TakeRequest(), mail)
        n_received, wanted = store.facts[ENDS][-1], store.facts[WANTED]
        if n_received != wanted:
            rule = f"must be {wanted}, got {n_received}"
            raise ProtocolError(active, "EncryptedGradients", "ciphertexts", rule)
    else:
        if phase == SUMMED:
            letters = _take_splits(site, mail.one(Splits, active))
        # Sides come from the active party, this one, and the other passive ones.
        splits = store.record(Splits, "splits")
        sources = [(active, splits.bits_of, splits.bits)]
        local = np.flatnonzero(splits.columns >= 0)
        if len(local):
            sources.append((site.name, local, store["own_bits"]))
        for sender, letter in mail.all(Partition).items():
            if letter.level != store.facts["level"]:
                raise ProtocolError(sender, "Partition", "level", "must be the one being split")
            sources.append((sender, letter.bits_of, letter.bits))
        split = splits.trees, splits.nodes, splits.lefts
        store["nodes"] = nodes_after(store["nodes"], *split, sources)
        if site.config.least_bin_rows:
            divide(site, splits)
    letters.append((active, _encrypted_sums(site)))
    return SentReply(), letters


def partition(site: Site, request: PartitionRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Make the splits won; after the last level, a party may have won none."""
    splits = mail.only(Splits, site.store.facts["active"])
    enter(site.store, SUMMED if splits is None else SPLIT)
    return SentReply(), [] if splits is None else _take_splits(site, splits)


def hand_over(site: Site, request: HandOverRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Store the lookup table, drop the rows; send the table if the site allows it."""
    store, names = site.store, tuple(site.store.facts["columns"])
    lookup = store.record(Lookup, "lookup")
    categories = stored_categories(store)
    write_part(store.folder, lookup.to_json(names, store["quantiles"], categories))
    active, digest = store.facts["active"], np.frombuffer(part_digest(store.folder), np.uint8)
    letters: Letters = [(active, PartKept(digest))]
    if site.config.allows_export:
        kinds = tuple(store.facts["kinds"])
        splits = lookup.columns, lookup.thresholds, lookup.defaults, lookup.widths, lookup.set_bits
        letters.append((active, Records(*splits, names, kinds, **pack_categories(categories))))
    store.forget()
    return SentReply(), letters


def _meet(store: Store, mail: Mail) -> None:
    # The key comes with whatever message is the first.
    letter = mail.only(PublicKey, store.facts["active"])
    if letter is None and "n" in store:
        return
    letter, n_rows = mail.one(PublicKey, store.facts["active"]), store.facts["n_train"]
    if letter.most_rows != n_rows:
        raise DataError(f"rows must be {n_rows}, as aligned, got {letter.most_rows}")
    if "n" in store:
        raise ProtocolError(store.facts["active"], "PublicKey", "letter", "must come once")
    bits, insecure = store.facts["key"]
    with as_protocol_error(store.facts["active"], "PublicKey", "n"):
        read_public_key(letter.n, bits, insecure_small_key=insecure)
        grouped_layouts(bits, n_rows, letter.n_outputs, letter.precision)
    store["n"] = letter.n
    store.facts["packing"] = [n_rows, letter.n_outputs, letter.precision]


def _key(store: Store) -> Key:
    return Key.from_array(store["n"])


def _layouts(store: Store) -> tuple[PairLayout, ...]:
    return grouped_layouts(_key(store).bits, *store.facts["packing"])


def _begin(site: Site, letter: EncryptedGradients) -> None:
    store, active = site.store, site.store.facts["active"]
    layouts, n_train = _layouts(store), store.facts["n_train"]
    bits = sent_bits(active, "EncryptedGradients", "drawn", letter.drawn, [n_train])
    drawn = np.flatnonzero(bits[0])
    n_columns = len(store["offsets"]) - 1
    if (letter.columns >= n_columns).any() or (np.diff(letter.columns) < 1).any():
        rule = f"must be < {n_columns} and ascending, each once"
        raise ProtocolError(active, "EncryptedGradients", "columns", rule)
    store.drop(BLOCKS)
    n_wanted = len(drawn) * len(layouts) if len(letter.columns) else 0
    store.facts[ENDS], store.facts[WANTED] = [0], n_wanted
    keep_block(store, _key(store), letter)
    store["drawn"], store["columns"] = drawn, letter.columns
    n_outputs, n_all = store.facts["packing"][1], len(store["values"])
    store["nodes"] = np.zeros((n_outputs, n_all), dtype=np.int32)
    store.facts["round"], store.facts["level"] = letter.round_id, 0
    roots = np.arange(n_outputs, dtype=np.int32)
    store["wanted.trees"], store["wanted.nodes"] = roots, np.zeros_like(roots)
    if site.config.least_bin_rows:
        begin_round(site, n_outputs)


def _go_on(store: Store, letter: MoreGradients) -> None:
    expected = store.facts["round"], store.facts[ENDS][-1]
    if (letter.round_id, letter.start) != expected:
        rule = f"must be {expected[1]}, the first of round {expected[0]} that is missing"
        raise ProtocolError(store.facts["active"], "MoreGradients", "start", rule)
    keep_block(store, _key(store), letter)


def _take_splits(site: Site, letter: Splits) -> Letters:
    """Store a level's splits; make the local ones, and send their sides to the others."""
    store, active = site.store, site.store.facts["active"]
    _check_splits(site, letter)
    store.facts["level"] = letter.level
    store.put("splits", letter)
    store["wanted.trees"], store["wanted.nodes"] = letter.wanted_trees, letter.wanted_nodes
    local = np.flatnonzero(letter.columns >= 0)
    if not len(local):
        return []
    widths = np.asarray(store["set_widths"])[letter.columns[local]]
    with as_protocol_error(active, "Splits", "set_bits"):
        sets = CategorySets(letter.set_bits, widths[widths > 0])
    if site.config.least_bin_rows:
        letter, sets = between_groups(site, letter, local, sets)
    sides, records = apply_local_splits(
        store,
        letter.trees[local],
        letter.nodes[local],
        letter.columns[local],
        letter.first_rights[local],
        letter.defaults[local],
        sets,
    )
    bits, level = pack_bits(sides), letter.level
    store["own_bits"] = bits
    letters: Letters = [(active, Partition(level, local, records, bits))]
    if len(letter.wanted_nodes):
        nothing = np.empty(0, dtype=np.int64)
        others = [name for name in site.others if name != active]
        letters += [(name, Partition(level, local, nothing, bits)) for name in others]
    return letters


def _check_splits(site: Site, letter: Splits) -> None:
    store, active = site.store, site.store.facts["active"]
    offsets, columns = store["offsets"], letter.columns
    n_trees, widths = len(store["nodes"]), np.diff(offsets)
    local = columns >= 0
    fits = bool((letter.trees < n_trees).all() and (letter.wanted_trees < n_trees).all())
    fits = fits and bool((columns < len(widths)).all())
    fits = fits and bool((letter.first_rights[local] <= widths[columns[local]]).all())
    fits = fits and bool((letter.bits_of < len(columns)).all())
    # Each node of the last level splits once at most, and each wanted node is a new one.
    level = store.facts["level"] + 1
    n_open = n_trees if level == 1 else 2 * len(store["splits.trees"])
    wanted = letter.wanted_trees, letter.wanted_nodes
    fits = fits and len(letter.trees) <= n_open
    fits = fits and each_once_among(wanted, children_of(letter.trees, letter.lefts))
    if not fits or letter.level != level or level > store.facts["max_depth"]:
        raise ProtocolError(active, "Splits", "columns", "must be of this party and this level")


def _encrypted_sums(site: Site) -> EncryptedSums:
    """Sums of the wanted nodes, job by job; see ``fedapp.histograms.build.sum_jobs``."""
    store, key, level = site.store, _key(site.store), site.store.facts["level"]
    trees, nodes = store["wanted.trees"], store["wanted.nodes"]
    drawn, columns = store["drawn"], store["columns"]
    widths = np.diff(store["offsets"])[columns]
    offsets = np.concatenate(([0], np.cumsum(widths + 1)))  # with the bins of missing values
    codes = np.ascontiguousarray(store["codes"][drawn][:, columns])
    tree_codes = dict.fromkeys(trees.tolist(), codes)
    if site.config.least_bin_rows:
        tree_codes = {tree: grouped_codes(store, tree, columns) for tree in tree_codes}
    inside = store["nodes"][:, drawn]  # (n_trees, n_drawn)
    # Bins of missing values are counted in the clear, so their encrypted sums are not sent.
    present = np.ones(offsets[-1], dtype=bool)
    present[offsets[1:] - 1] = False
    workers, layouts, products = shared_workers(), _layouts(store), ring_of(key.n_squared)
    packed = [np.empty((0, key.ciphertext_bytes), dtype=np.uint8)]
    for layout_id, tree, wanted in sum_jobs(layouts, level, trees, nodes) if len(columns) else ():
        slots = slots_by_node(inside[tree], wanted)[inside[tree]]  # -1: in no wanted node
        # Ciphertexts are stored layout by layout. Their product encrypts the sum.
        sums, first = products.ones(len(wanted) * int(offsets[-1])), 0
        for block in blocks_of(store, layout_id * len(slots), (layout_id + 1) * len(slots)):
            part = slice(first, first + len(block))
            terms = key, block, tree_codes[tree][part], offsets, slots[part], len(wanted)
            sums = products.multiply(sums, sum_rows(*terms, workers))
            first += len(block)
        present_sums = sums[np.tile(present, len(wanted))]
        packed.append(pack_sums(key, present_sums, layouts[layout_id], workers))
    missing = np.zeros((len(nodes), len(columns)), dtype=np.int32)
    for tree, codes_of_tree in tree_codes.items():
        # Rows with a missing value, by node and column.
        counts = np.zeros((int((trees == tree).sum()), len(columns)), dtype=np.int32)
        rows, absent = np.nonzero(codes_of_tree == widths)
        slots = slots_by_node(inside[tree], nodes[trees == tree])[inside[tree][rows]]
        np.add.at(counts, (slots[slots >= 0], absent[slots >= 0]), 1)
        missing[trees == tree] = counts
    return EncryptedSums(store.facts["round"], level, missing, np.concatenate(packed))


# Each block is a file of the site's state, so no array holds all of them.
def keep_block(store: Store, key: Key, letter: EncryptedGradients | MoreGradients) -> None:
    """Check a block and store it."""
    active, kind = store.facts["active"], type(letter).__name__
    ends, wanted = store.facts[ENDS], store.facts[WANTED]
    n_left = wanted - ends[-1]
    if len(letter.ciphertexts) > n_left:
        rule = f"must be {n_left} at most, of {wanted}, got {len(letter.ciphertexts)}"
        raise ProtocolError(active, kind, "ciphertexts", rule)
    with as_protocol_error(active, kind, "ciphertexts"):
        check_ciphertexts(key, letter.ciphertexts)
    store[f"{BLOCKS}.{len(ends) - 1}"] = letter.ciphertexts
    store.facts[ENDS] = [*ends, ends[-1] + len(letter.ciphertexts)]


def blocks_of(store: Store, first: int, last: int) -> Iterator[Array]:
    """Ciphertexts ``first`` to ``last`` of the round, block by block."""
    for number, (start, end) in enumerate(pairwise(store.facts[ENDS])):
        low, high = max(first, start), min(last, end)
        if low < high:
            yield store[f"{BLOCKS}.{number}"][low - start : high - start]


# With ``least-bin-rows`` no reported bin has fewer drawn rows: a column's cells (missing values,
# then its bins) are merged to groups.


# In each node, neighbouring bins of a column are merged until every group has at least that many of
# the round's drawn rows, or none (see ``fedapp.histograms.sketch``). A group is summed in its last
# bin, and splits go between groups, so a side's sums are of exactly the rows that go there. Missing
# values go where their group goes.
#
# Both children of a node have the same groups, each a union of groups of their parent. So where one
# child has too few rows, whoever made the split, each column is a single group in both children,
# and this party offers no split of them.
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
        families.append((children, store[FLOOR_ENDS][_open_row(site, tree, node)]))
    _group(site, families)


def _group(site: Site, families: list[tuple[Array, Ints]]) -> None:
    """Group the cells of nodes; siblings share groups, which are unions of their parent's."""
    store, least, starts = site.store, site.config.least_bin_rows, _starts(site.store)
    cells, ends, nodes = _cells(store, np.arange(len(starts) - 1)), [], []
    for children, before in families:
        pairs = children.tolist()
        counts = np.stack([_counts(store, cells, tree, node, starts) for tree, node in pairs])
        ends += [group(before, counts, starts, least)] * len(children)
        nodes.append(children)
    store[OPEN] = np.concatenate([*nodes, np.empty((0, 2), dtype=np.int64)])
    store[FLOOR_ENDS] = np.array(ends, dtype=np.int64).reshape(-1, int(starts[-1]))


def grouped_codes(store: Store, tree: int, columns: Ints) -> Array:
    """Bin in which each drawn row is summed, in its node of a tree; shape (n_drawn, n_columns)."""
    starts, cells, codes = _starts(store), _cells(store, columns), store["codes"]
    widths, inside = np.diff(starts)[columns] - 1, store["nodes"][tree, store["drawn"]]
    occupied, index = np.unique(inside, return_inverse=True)
    open_rows = {node: row for row, (of, node) in enumerate(store[OPEN].tolist()) if of == tree}
    rows = np.array([open_rows.get(node, -1) for node in occupied.tolist()], dtype=np.int64)[index]
    last_cells = (
        np.where(rows[:, None] < 0, cells, store[FLOOR_ENDS][rows[:, None], cells])
        - starts[columns]
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
        group_ends = store[FLOOR_ENDS][_open_row(site, tree, node)][first:end] - first
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


def _cells(store: Store, columns: Ints) -> Ints:
    """Cell of each drawn row in some columns; int64, shape (n_drawn, n_columns)."""
    starts, codes = _starts(store), store["codes"][store["drawn"]][:, columns].astype(np.int64)
    is_missing = codes == np.diff(starts)[columns] - 1
    cells: Ints = starts[columns] + np.where(is_missing, 0, codes + 1)
    return cells


def _counts(store: Store, cells: Ints, tree: int, node: int, starts: Ints) -> Ints:
    inside = store["nodes"][tree, store["drawn"]] == node
    return np.bincount(cells[inside].ravel(), minlength=int(starts[-1])).astype(np.int64)


def _open_row(site: Site, tree: int, node: int) -> int:
    rows = np.flatnonzero((site.store[OPEN] == (tree, node)).all(axis=1))
    if not len(rows):
        active = site.store.facts["active"]
        raise ProtocolError(active, "Splits", "nodes", "must be nodes that were open")
    return int(rows[0])
