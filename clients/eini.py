"""Fed-EINI at a party: encrypted weights at the active one, selection in turn at the others.

Source: Chen et al. 2021 (arXiv:2105.09540), Algorithm 1. Departures, needed for security:

- An entry that a passive party rejects becomes a fresh encryption of 0, and one that it selects is
  rerandomised, so nobody who sees a vector before and after can tell which is which.
- The last party's sums are rerandomised too, and several rows share a ciphertext.
- A subtree without a passive split is one entry; the active party adds trees without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clients.inference import (
    ActivePart,
    Part,
    active_part,
    explain_open,
    explain_scores,
    part_digest_array,
    predictions_by_sums,
    read_party_part,
    write_rows,
)
from clients.vertical import check_order, draw_key
from fedapp.crypto.packing import SumLayout
from fedapp.crypto.paillier import (
    PrivateKey,
    PublicKey,
    check_ciphertexts,
    decrypt,
    encrypt,
    read_public_key,
)
from fedapp.crypto.sums import pack_sums, select_ciphertexts, sum_rows
from fedapp.crypto.workers import shared_workers
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.messages.eini import Elements, Ready, StepReply, StepRequest, Structure, Totals
from fedapp.messages.fields import Array, Request
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store
from fedapp.trees.divided import Skeleton, candidates, skeleton
from fedapp.trees.model import LEAF, check_trees

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
BATCH_BYTES = 2**26  # 64 MiB of ciphertexts
UNGUARDED = "; eini.unguarded=true predicts all the same"  # ends the guards' errors
NO_RECORD = -1  # record of a node that the receiver does not split


def step(site: Site, request: StepRequest, mail: Mail) -> tuple[StepReply, Letters]:
    """One step of the protocol, by role."""
    if site.store.facts["active"] == site.name:
        return active_step(site, request, mail)
    return _passive_step(site, request, mail)


def _passive_step(site: Site, request: StepRequest, mail: Mail) -> tuple[StepReply, Letters]:
    """Eq. 12 and 13: select entries by local splits, in every batch received."""
    store = site.store
    parties, active = chain(store), store.facts["active"]
    letters: Letters = []
    if structure := mail.only(Structure, active):
        part = read_party_part(site)
        _keep_structure(site, part, structure, request)
        if not request.unguarded:
            # Too few distinct paths through the local splits would reveal the columns' values.
            local, least = store["records"], request.least_possibilities
            local = local[local != NO_RECORD]
            if len(local) and part.lookup.n_ways(local, store["values"]) < least:
                raise DataError(
                    f"columns of this party must have {least:g} ways through its splits "
                    f"(eini.least-possibilities), got fewer{UNGUARDED}"
                )
        if "explained" in store.facts and "trees" not in part.document:
            explain_open(site, part, _trees(site))
        letters.append((active, Ready(part_digest_array(site))))
    for sender, elements in mail.each(Elements):
        position = parties.index(site.name)
        if sender != (parties[position - 1] if position else active):
            raise ProtocolError(sender, "Elements", "sender", "must be the party before this one")
        receiver = parties[position + 1] if position + 1 < len(parties) else active
        letters.append((receiver, _choose(site, sender, elements)))
        store.facts["next_row"] = elements.first_row + elements.n_rows
    if not store.finished and store.facts.get("next_row") == len(store["ids"]):
        store.forget()
    return StepReply(finished=False, n_trees=0, n_entries=0, n_batches=0), letters


def _keep_structure(site: Site, part: Part, letter: Structure, request: StepRequest) -> None:
    store, active = site.store, site.store.facts["active"]
    local = letter.records[letter.records >= 0]
    fits = len(letter.ends) == letter.n_terms and "n" not in store
    # Each split occurs once in a model.
    is_unique = len(np.unique(local)) == len(local)
    if not (fits and is_unique and (local < len(part.lookup.columns)).all()):
        raise ProtocolError(active, "Structure", "lefts", "must be trees of this model, sent once")
    with as_protocol_error(active, "Structure", "lefts"):
        check_trees(letter.lefts, np.concatenate(([0], letter.ends)))
    with as_protocol_error(active, "Structure", "n"):
        insecure = request.insecure_small_key
        key = read_public_key(letter.n, request.key_bits, insecure_small_key=insecure)
        SumLayout(key.bits, letter.n_terms, letter.n_outputs, 0)
    store["n"], store["ends"] = letter.n, letter.ends
    store["lefts"], store["records"] = letter.lefts, letter.records
    store.facts |= {"layout": [letter.n_terms, letter.n_outputs], "next_row": 0}


def _choose(site: Site, sender: str, letter: Elements) -> Elements | Totals:
    """Select the entries of one batch; the last party sums them."""
    store = site.store
    if "n" not in store:
        raise ProtocolError(sender, "Elements", "letter", "must come after the structure")
    key = PublicKey.from_array(store["n"])
    n_rows, end = len(store["ids"]), letter.first_row + letter.n_rows
    if letter.first_row != store.facts["next_row"]:
        raise ProtocolError(sender, "Elements", "first_row", "must be the next batch's")
    if end > n_rows:
        raise ProtocolError(sender, "Elements", "n_rows", f"must end by row {n_rows}")
    # Entries of all trees that local splits leave open; bool, shape (n_rows, n_entries).
    lookup, values = read_party_part(site).lookup, store["values"][letter.first_row : end]
    entries = []
    for lefts, records in _trees(site):
        local = np.flatnonzero(records != NO_RECORD).tolist()
        sides = {node: lookup.sides(records[node], values) for node in local}
        entries.append(candidates(lefts, sides, len(values)))
    chosen, n_sent = np.concatenate(entries, axis=1), len(letter.ciphertexts)
    if n_sent != chosen.size:
        rule = f"must be {chosen.shape[1]} for each of {letter.n_rows} rows, got {n_sent}"
        raise ProtocolError(sender, "Elements", "ciphertexts", rule)
    with as_protocol_error(sender, "Elements", "ciphertexts"):
        check_ciphertexts(key, letter.ciphertexts)
    if site.name == chain(store)[-1]:
        return _totals(site, letter, key, chosen)
    selected = select_ciphertexts(key, letter.ciphertexts, chosen.ravel(), shared_workers())
    return Elements(letter.first_row, letter.n_rows, selected)


def _totals(site: Site, letter: Elements, key: PublicKey, chosen: Bools) -> Totals:
    """Eq. 13 at the last party: sum each row's selected entries, several rows per ciphertext."""
    n_terms, n_outputs = site.store.facts["layout"]
    layout, workers = SumLayout(key.bits, n_terms, n_outputs, 0), shared_workers()
    rows = np.repeat(np.arange(letter.n_rows, dtype=np.int32), chosen.shape[1])
    slots = np.where(chosen.ravel(), rows, -1).astype(np.int32)
    codes, offsets = np.zeros((len(rows), 1), dtype=np.uint8), np.array([0, 1])
    sums = sum_rows(key, letter.ciphertexts, codes, offsets, slots, letter.n_rows, workers)
    return Totals(letter.first_row, letter.n_rows, pack_sums(key, sums, layout, workers))


def _trees(site: Site) -> list[tuple[Array, Array]]:
    """Left children of each tree's nodes, and the records of local splits."""
    store = site.store
    ends = store["ends"][:-1]
    lefts, records = np.split(store["lefts"], ends), np.split(store["records"], ends)
    return list(zip(lefts, records, strict=True))


# Source: Chen et al. 2021 (arXiv:2105.09540), Algorithm 1, Eq. 7 to 10 and 14. A boosted model's
# leaf weights add up to margins; a forest's leaf values (class shares, or numbers) to n_trees times
# their mean. All outputs of a leaf share one ciphertext.
@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The trees to predict, collapsed to what passive parties split."""

    part: ActivePart
    skeletons: list[Skeleton]  # one per tree
    shared: list[int]  # trees with a passive split; the active party adds the others

    @property
    def n_entries(self) -> int:
        """Ciphertexts per row."""
        return sum(len(self.skeletons[tree].entries) for tree in self.shared)

    def local_sides(self, site: Site, tree: int, values: Array) -> dict[int, Bools]:
        """Which rows each local split of a skeleton sends left, by its node."""
        pruned = self.skeletons[tree]
        owners, records = self.part.owners[tree], self.part.records[tree]
        return {
            index: self.part.lookup.sides(records[node], values)
            for index, (left, node) in enumerate(zip(pruned.lefts, pruned.sources, strict=True))
            if left != LEAF and owners[node] == site.name
        }

    def terms_below(self, tree: int, start: int, values: Array) -> Floats:
        """Leaf terms that rows reach from a node with only local splits below it."""
        lefts, records = self.part.model.trees[tree]["left"], self.part.records[tree]
        nodes = np.full(len(values), start)
        while len(inner := np.unique(nodes[lefts[nodes] != LEAF])):
            for node in inner:
                rows = np.flatnonzero(nodes == node)
                nodes[rows] = lefts[node] + ~self.part.lookup.sides(records[node], values, rows)
        terms: Floats = self.part.model.leaf_terms(tree)[nodes]
        return terms


def plan_of(site: Site) -> Plan:
    """Plan of a run's model."""
    part = active_part(site)
    skeletons = []
    for tree, owners in zip(part.model.trees, part.owners, strict=True):
        is_passive = np.array([name != site.name for name in owners]) & (tree["left"] != LEAF)
        skeletons.append(skeleton(tree["left"], is_passive))
    shared = [number for number, pruned in enumerate(skeletons) if len(pruned.lefts) > 1]
    return Plan(part, skeletons, shared)


def chain(store: Store) -> list[str]:
    """Passive parties, in the order in which they select."""
    return [name for name in store.facts["peers"] if name != store.facts["active"]]


def active_step(site: Site, request: StepRequest, mail: Mail) -> tuple[StepReply, Letters]:
    """Start, or decrypt sums that are back; send the next batch; write the predictions."""
    store, plan = site.store, plan_of(site)
    letters: Letters = []
    if "n_sent" not in store.facts:
        check_order(site, mail)
        letters = _begin(site, request, plan)
    else:
        store.facts["n_steps"] += 1
        for name, letter in mail.all(Ready).items():
            plan.part.check(name, letter.part)
            site.store.facts.setdefault("ready", []).append(name)
        _take_totals(site, mail)
        # A batch takes one step at each passive party, and one to return.
        facts, passive = site.store.facts, chain(site.store)
        n_due = max(0, facts["n_steps"] - len(passive)) * facts["batch_rows"]
        if facts["n_back"] < min(n_due, facts["n_sent"]):
            raise ProtocolError(passive[-1], "Totals", "letter", f"must reach {site.name} by now")
    batch = _next_batch(site, plan)
    if batch is not None:
        letters.append((chain(store)[0], batch))
    finished = store.facts["n_back"] == len(store["ids"])
    reply = StepReply(
        finished=finished,
        n_trees=len(plan.skeletons),
        n_entries=plan.n_entries,
        n_batches=store.facts["n_batches"],
    )
    if finished:
        predictions = predictions_by_sums(site, plan.part, store["sums"])
        explain_scores(site, plan.part, predictions)
        write_rows(site, plan.part, predictions, request.suffix)
    return reply, letters


def _begin(site: Site, request: StepRequest, plan: Plan) -> Letters:
    """Check the guard, draw a key, send the structure."""
    store = site.store
    store.facts |= {"n_steps": 0, "n_batches": 0, "n_sent": 0, "n_back": 0}
    # Trees without a passive split are summed here.
    model, values = plan.part.model, store["values"]
    sums = np.zeros((len(values), model.n_outputs))
    for tree in sorted(set(range(len(plan.skeletons))) - set(plan.shared)):
        sums += plan.terms_below(tree, 0, values)
    store["sums"] = sums
    if not plan.shared:
        store.facts["n_back"] = store.facts["n_sent"] = len(store["ids"])
        return []
    if not request.unguarded:
        _guard_structure(site, plan, request.least_possibilities)
    # The key is for this inference only, and must hold the largest sum.
    largest = max(np.abs(model.leaf_terms(tree)).max() for tree in plan.shared)
    layout = [len(plan.shared), model.n_outputs, int(np.frexp(largest)[1])]
    key = draw_key(site, request, "eini", lambda public: SumLayout(public.bits, *layout))
    store["key"], store.facts["layout"] = key.to_array(), layout
    batch_bytes = plan.n_entries * key.public.ciphertext_bytes
    store.facts["batch_rows"] = max(1, request.batch_rows or BATCH_BYTES // batch_bytes)
    letters: Letters = []
    for name in chain(store):
        lefts, records = [], []
        for tree in plan.shared:
            pruned, owners = plan.skeletons[tree], np.array(plan.part.owners[tree])
            is_theirs = (owners[pruned.sources] == name) & (pruned.lefts != LEAF)
            lefts.append(pruned.lefts)
            records.append(np.where(is_theirs, plan.part.records[tree][pruned.sources], NO_RECORD))
        structure = Structure(
            key.public.to_array(),
            len(plan.shared),
            model.n_outputs,
            np.cumsum([len(left) for left in lefts], dtype=np.int64),
            np.concatenate(lefts),
            np.concatenate(records).astype(np.int64),
        )
        letters.append((name, structure))
    return letters


def _guard_structure(site: Site, plan: Plan, least: float) -> None:
    """Raise a DataError if predictions would reveal a party's splits."""
    values, n_single = site.store["values"], 0
    possibilities = np.zeros(len(values))
    for tree in plan.shared:
        inner = np.flatnonzero(plan.part.model.trees[tree]["left"] != LEAF)
        n_single += len({plan.part.owners[tree][node] for node in inner}) == 1
        open_entries = candidates(
            plan.skeletons[tree].lefts, plan.local_sides(site, tree, values), len(values)
        )
        possibilities += np.log(open_entries.sum(axis=1))
    if n_single:
        raise DataError(
            f"trees must have splits of two parties, got {n_single} with all splits at one, which "
            f"then knows where every row ends{UNGUARDED}"
        )
    n_few = int((possibilities < np.log(least) - 1e-9).sum())
    if n_few:
        raise DataError(
            f"rows must have {least:g} ways through the trees that the active party's splits "
            f"leave open (eini.least-possibilities), got {n_few} of {len(values)} with fewer"
            f"{UNGUARDED}"
        )


def _next_batch(site: Site, plan: Plan) -> Elements | None:
    """Eq. 10: encrypted terms of the candidates of the next rows, zeros for the rest."""
    store, facts = site.store, site.store.facts
    first, n_rows = facts["n_sent"], len(store["ids"])
    if first == n_rows:
        return None
    last = min(first + facts["batch_rows"], n_rows)
    values, columns = store["values"][first:last], []
    for tree in plan.shared:
        pruned = plan.skeletons[tree]
        open_entries = candidates(pruned.lefts, plan.local_sides(site, tree, values), last - first)
        for entry, is_open in zip(pruned.sources[pruned.entries], open_entries.T, strict=True):
            terms = np.zeros((last - first, plan.part.model.n_outputs))
            terms[is_open] = plan.terms_below(tree, int(entry), values[is_open])
            columns.append(terms)
    elements = np.stack(columns, axis=1).reshape(-1, plan.part.model.n_outputs)
    key = PrivateKey.from_array(store["key"])
    plaintexts = SumLayout(key.public.bits, *facts["layout"]).pack(elements)
    facts["n_sent"], facts["n_batches"] = last, facts["n_batches"] + 1
    return Elements(first, last - first, encrypt(key, plaintexts, shared_workers()))


def _take_totals(site: Site, mail: Mail) -> None:
    """Eq. 14: decrypt the sums that are back."""
    store, parties = site.store, chain(site.store)
    for sender, letter in mail.each(Totals):
        first, n_rows = store.facts["n_back"], len(store["ids"])
        if set(store.facts.get("ready", [])) != set(parties):
            raise ProtocolError(sender, "Totals", "part", "must come after every party is ready")
        if sender != parties[-1] or letter.first_row != first:
            raise ProtocolError(sender, "Totals", "first_row", "must be the next batch's")
        end = min(first + store.facts["batch_rows"], n_rows)
        if letter.n_rows != end - first:
            raise ProtocolError(sender, "Totals", "n_rows", f"must be {end - first}")
        key = PrivateKey.from_array(store["key"])
        layout = SumLayout(key.public.bits, *store.facts["layout"])
        with as_protocol_error(sender, "Totals", "ciphertexts"):
            check_ciphertexts(key.public, letter.ciphertexts)
            plain = decrypt(key, letter.ciphertexts, shared_workers())
            terms = layout.unpack(plain, letter.n_rows)
        sums = np.array(store["sums"])
        sums[first:end] += terms
        store["sums"], store.facts["n_back"] = sums, end


HANDLERS: Mapping[type[Request], Handler] = {StepRequest: step}
