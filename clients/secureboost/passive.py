"""SecureBoost at a passive party: sum ciphertexts it cannot read, split its columns.

Source: Cheng et al. 2019, Algorithm 1. All the party keeps of the model is the lookup table of its
splits: record id -> column, threshold, default side.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from fedapp.histograms.bins import digitise
from fedapp.histograms.build import slots_by_node, sum_jobs
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
        _begin(store, mail.one(EncryptedGradients, active))
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


def _begin(store: Store, letter: EncryptedGradients) -> None:
    active = store.facts["active"]
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
            terms = key, block, codes[part], offsets, slots[part], len(wanted)
            sums = products.multiply(sums, sum_rows(*terms, workers))
            first += len(block)
        present_sums = sums[np.tile(present, len(wanted))]
        packed.append(pack_sums(key, present_sums, layouts[layout_id], workers))
    missing = np.zeros((len(nodes), len(columns)), dtype=np.int32)
    rows, absent = np.nonzero(codes == widths)
    for tree in np.unique(trees):
        # Rows with a missing value, by node and column.
        counts = np.zeros((int((trees == tree).sum()), len(columns)), dtype=np.int32)
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
