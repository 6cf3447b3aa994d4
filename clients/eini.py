"""Fed-EINI at a party: encrypted weights at the active one, selection in turn at the others.

Source: Chen et al. 2021 (arXiv:2105.09540), Algorithm 1. Departures, needed for security:

- An entry that a passive party rejects becomes a fresh encryption of 0, and one that it selects is
  rerandomised, so nobody who sees a vector before and after can tell which is which.
- The last party's sums are rerandomised too, and several rows share a ciphertext.
- A subtree without a passive split is one entry; the active party adds trees without one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clients.inference import Predicting
from clients.vertical.ciphertexts import Cipher, EncryptedRows, of_numbers
from fedapp.arrays import Doubles, Flags
from fedapp.crypto.packing import PRECISION
from fedapp.crypto.sums import select_ciphertexts
from fedapp.crypto.workers import shared_workers
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.messages.eini import Elements, Ready, StepReply, StepRequest, Structure, Totals
from fedapp.messages.fields import Array, check_fields, check_sizes
from fedapp.messages.vertical import MatchRequest, OrderRequest
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, handlers, role
from fedapp.trees.divided import (
    ActivePart,
    ForestPart,
    Lookup,
    Nesting,
    Part,
    Skeleton,
    candidates,
    skeleton,
)
from fedapp.trees.model import LEAF, Ensemble, check_trees

BATCH_BYTES = 2**26  # 64 MiB of ciphertexts
UNGUARDED = "; eini.unguarded=true predicts all the same"  # ends the guards' errors
NO_RECORD = -1  # record of a node that the receiver does not split


@role
class Passive(Predicting):
    """State of a passive party: it selects entries by its splits, in turn with the others."""

    title = "a passive party"
    order = Order(
        {OrderRequest: {StepRequest}, StepRequest: {StepRequest}}, after_end={StepRequest}
    )
    structure: Structure | None = None  # of the trees, with the records of local splits
    encrypted: EncryptedRows  # none yet, of the rows' entries under the structure's key
    next_row: int = 0  # first one of the next batch

    def step(self, request: StepRequest, mail: Mail) -> tuple[StepReply, Letters]:
        """Eq. 12 and 13: select entries by local splits, in every batch received."""
        active, parties, letters = self.active, self.passive, Letters()
        if self.follows(OrderRequest):
            self.check_order(mail)
        if structure := mail.only(Structure, active):
            part = self.party_part()
            self._keep_structure(part, structure, request)
            if not request.unguarded:
                # Too few distinct paths through the local splits would reveal the columns' values.
                local, least = structure.records, request.least_possibilities
                local = local[local != NO_RECORD]
                if len(local) and part.lookup.n_ways(local, self.values) < least:
                    rule = f"columns of this party must have {least:g} ways through its splits "
                    raise DataError(f"{rule}(eini.least-possibilities), got fewer{UNGUARDED}")
            if self.explained is not None and not isinstance(part, ForestPart):
                self.explain_open(part, _trees(structure))
            letters.append((active, Ready(self.part_digest())))
        place, rule = parties.index(self.name), "must be the party before this one"
        before, _, receiver = [active, *parties, active][place : place + 3]
        for sender, elements in mail.each(Elements):
            check_fields(sender, elements, ("sender", sender == before, rule))
            letters.append((receiver, self._choose(sender, elements)))
            self.next_row = elements.first_row + elements.n_rows
        # The others may still have steps to do.
        is_open = not self.site.store.finished and self.structure is not None
        if is_open and self.next_row == len(self.ids):
            self.end()
        return StepReply(False, 0, 0, 0), letters

    def _keep_structure(self, part: Part, letter: Structure, request: StepRequest) -> None:
        active, local = self.active, letter.records[letter.records >= 0]
        # Each split occurs once in a model.
        n_records, is_unique = len(part.lookup.columns), len(np.unique(local)) == len(local)
        fits = self.structure is None and is_unique and bool((local < n_records).all())
        check_fields(active, letter, ("lefts", fits, "must be trees of this model, sent once"))
        with as_protocol_error(active, "Structure", "lefts"):
            check_trees(letter.lefts, np.concatenate(([0], letter.ends)))
        # With a tree for each split, weights of powers of two would show every side of every row.
        is_whole = part.nesting.is_of_whole_trees(Nesting.of(_trees(letter), n_records), local)
        rule = f"must be those of whole trees, nested as when {self.name} trained them"
        check_fields(active, letter, ("records", is_whole, rule))
        layouts_of = of_numbers(letter.n_terms, letter.n_outputs)
        self.encrypted = EncryptedRows.none(self, letter, request, layouts_of)
        self.structure = letter

    def _choose(self, sender: str, letter: Elements) -> Elements | Totals:
        """Select the entries of one batch; the last party sums them."""
        n_rows, end = len(self.ids), letter.first_row + letter.n_rows
        check_fields(
            sender,
            letter,
            ("letter", self.structure is not None, "must come after the structure"),
            ("first_row", letter.first_row == self.next_row, "must be the next batch's"),
            ("n_rows", end <= n_rows, f"must end by row {n_rows}"),
        )
        assert self.structure is not None
        lookup, values = self.party_part().lookup, self.values[letter.first_row : end]
        chosen = np.concatenate(open_entries(self.structure, lookup, values), axis=1)
        check_sizes(sender, letter, n_ciphertexts=chosen.size)
        received, is_chosen = self.encrypted.plus(sender, letter), chosen.ravel()
        if self.name != self.passive[-1]:
            key, workers = self.encrypted.public_key, shared_workers()
            selected = select_ciphertexts(key, letter.ciphertexts, is_chosen, workers)
            return Elements(letter.first_row, letter.n_rows, selected)
        # Eq. 13 at the last party: sum each row's entries, several rows per ciphertext.
        rows = np.repeat(np.arange(letter.n_rows, dtype=np.int32), chosen.shape[1])
        slots = np.where(is_chosen, rows, -1).astype(np.int32)
        codes, offsets = np.zeros((len(rows), 1), dtype=np.uint8), np.array([0, 1])
        sums = received.sums(codes, offsets, slots, letter.n_rows)
        return Totals(letter.first_row, letter.n_rows, sums)


def _trees(letter: Structure) -> list[tuple[Array, Array]]:
    """Left children of each tree's nodes, and the records of local splits."""
    lefts, records = (np.split(array, letter.ends[:-1]) for array in (letter.lefts, letter.records))
    return list(zip(lefts, records, strict=True))


def open_entries(letter: Structure, lookup: Lookup, values: Array) -> list[Flags]:
    """Entries of each tree that a passive party's splits leave open, (n_rows, n_entries)."""
    entries = []
    for lefts, records in _trees(letter):
        local = np.flatnonzero(records != NO_RECORD).tolist()
        sides = {node: lookup.sides(records[node], values) for node in local}
        entries.append(candidates(lefts, sides, len(values)))
    return entries


# Eq. 7 to 10, 14. A boosted model's leaf weights add up to margins; a forest's leaf values (class
# shares, or numbers) to n_trees times their mean. All outputs of a leaf share one ciphertext.
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

    def open_entries(self, tree: int, values: Array) -> Flags:
        """Which of a tree's entries local splits leave open to rows, (n_rows, n_entries)."""
        pruned = self.skeletons[tree]
        owners, records = self.part.owners(tree), self.part.records[tree]
        sides = {
            index: self.part.lookup.sides(records[node], values)
            for index, (left, node) in enumerate(zip(pruned.lefts, pruned.sources, strict=True))
            if left != LEAF and owners[node] == self.part.name
        }
        return candidates(pruned.lefts, sides, len(values))

    def terms_below(self, tree: int, start: int, values: Array) -> Doubles:
        """Leaf terms that rows reach from a node with only local splits below it."""
        lefts, records = self.part.model.trees[tree]["left"], self.part.records[tree]
        nodes = np.full(len(values), start)
        while len(inner := np.unique(nodes[lefts[nodes] != LEAF])):
            for node in inner:
                rows = np.flatnonzero(nodes == node)
                nodes[rows] = lefts[node] + ~self.part.lookup.sides(records[node], values, rows)
        terms: Doubles = self.part.model.leaf_terms(tree)[nodes]
        return terms

    def open_terms(self, tree: int, values: Array) -> tuple[Doubles, Flags]:
        """Terms of a tree's entries, 0 where local splits close them, and which are open.

        Shapes (n_rows, n_entries, n_outputs) and (n_rows, n_entries).
        """
        pruned, is_open = self.skeletons[tree], self.open_entries(tree, values)
        terms = np.zeros((*is_open.shape, self.part.model.n_outputs))
        for entry, node in enumerate(pruned.sources[pruned.entries].tolist()):
            rows = is_open[:, entry]
            terms[rows, entry] = self.terms_below(tree, node, values[rows])
        return terms, is_open

    def bounds(self, values: Array) -> tuple[Doubles, Doubles]:
        """Least and largest sum of the terms that are open to each row, over the shared trees."""
        low = high = np.zeros((len(values), self.part.model.n_outputs))
        for tree in self.shared:
            terms, is_open = self.open_terms(tree, values)
            low = low + np.where(is_open[..., None], terms, np.inf).min(axis=1)
            high = high + np.where(is_open[..., None], terms, -np.inf).max(axis=1)
        return low, high


def plan_of(part: ActivePart) -> Plan:
    """Plan of a run's model."""
    skeletons = []
    for number, tree in enumerate(part.model.trees):
        is_passive = (np.array(part.owners(number)) != part.name) & (tree["left"] != LEAF)
        skeletons.append(skeleton(tree["left"], is_passive))
    shared = [number for number, pruned in enumerate(skeletons) if len(pruned.lefts) > 1]
    return Plan(part, skeletons, shared)


@role
class Active(Predicting):
    """State of the active party: it encrypts what its splits leave open, and decrypts sums."""

    title = "the active party"
    order = Order({MatchRequest: {StepRequest}, StepRequest: {StepRequest}})
    cipher: Cipher  # of a key for this inference only
    exponent: int  # terms of a row are encrypted as multiples of 2**(exponent - PRECISION)
    batch_rows: int
    sums: Doubles  # (n_rows, n_outputs): of the trees summed here, and of the rows that are back
    ready: tuple[str, ...] = ()  # parties that have the structure
    n_steps: int = 0
    n_sent: int = 0  # rows whose batches are sent, and back
    n_back: int = 0

    def step(self, request: StepRequest, mail: Mail) -> tuple[StepReply, Letters]:
        """Start, or decrypt sums that are back; send the next batch; write the predictions."""
        plan, passive, letters = plan_of(self.active_part()), self.passive, Letters()
        if self.follows(MatchRequest):
            self.check_order(mail)
            letters = self._begin(request, plan)
        else:
            self.n_steps += 1
            for name, letter in mail.all(Ready).items():
                plan.part.check(name, letter.part)
                self.ready = (*self.ready, name)
            self._take_totals(plan, mail)
            # A batch takes one step at each passive party, and one to return.
            n_due = max(0, self.n_steps - len(passive)) * self.batch_rows
            is_back = self.n_back >= min(n_due, self.n_sent)
            check_fields(passive[-1], Totals, ("letter", is_back, f"must reach {self.name} by now"))
        batch = self._next_batch(plan)
        if batch is not None:
            letters.append((passive[0], batch))
        finished = self.n_back == len(self.ids)
        n_batches = -(-self.n_sent // self.batch_rows) if plan.shared else 0
        reply = StepReply(finished, len(plan.skeletons), plan.n_entries, n_batches)
        if finished:
            model = plan.part.model
            margins = (self.base_margins,) if isinstance(model, Ensemble) else ()
            predictions = model.predictions_of(self.sums, *margins)
            self.explain_scores(plan.part, predictions)
            self.write_rows(plan.part, predictions, request.suffix)
        return reply, letters

    def _begin(self, request: StepRequest, plan: Plan) -> Letters:
        """Check the guard, draw a key, send the structure."""
        # Trees without a passive split are summed here.
        model, values = plan.part.model, self.values
        sums = np.zeros((len(values), model.n_outputs))
        for tree in sorted(set(range(len(plan.skeletons))) - set(plan.shared)):
            sums += plan.terms_below(tree, 0, values)
        self.sums = sums
        if not plan.shared:
            self.n_back = self.n_sent = len(self.ids)
            return []
        if not request.unguarded:
            self._guard_structure(plan, request.least_possibilities)
        # The key is for this inference only, and must hold the largest sum.
        largest = max(np.abs(model.leaf_terms(tree)).max() for tree in plan.shared)
        self.cipher = Cipher.drawn(self, request, of_numbers(len(plan.shared), model.n_outputs))
        self.exponent = int(np.frexp(largest)[1])
        batch_bytes = plan.n_entries * self.cipher.public_key.ciphertext_bytes
        self.batch_rows = max(1, request.batch_rows or BATCH_BYTES // batch_bytes)
        letters: Letters = []
        for name in self.passive:
            lefts, records = [], []
            for tree in plan.shared:
                pruned, owners = plan.skeletons[tree], np.array(plan.part.owners(tree))
                is_theirs = (owners[pruned.sources] == name) & (pruned.lefts != LEAF)
                lefts.append(pruned.lefts)
                of_tree = plan.part.records[tree][pruned.sources]
                records.append(np.where(is_theirs, of_tree, NO_RECORD))
            structure = Structure(
                self.cipher.public_key.to_array(),
                len(plan.shared),
                model.n_outputs,
                np.cumsum([len(left) for left in lefts], dtype=np.int64),
                np.concatenate(lefts),
                np.concatenate(records).astype(np.int64),
            )
            letters.append((name, structure))
        return letters

    def _guard_structure(self, plan: Plan, least: float) -> None:
        """Raise a DataError if predictions would reveal a party's splits."""
        values, n_single = self.values, 0
        possibilities = np.zeros(len(values))
        for tree in plan.shared:
            inner = plan.part.model.trees[tree]["left"] != LEAF
            n_single += len(np.unique(np.array(plan.part.owners(tree))[inner])) == 1
            possibilities += np.log(plan.open_entries(tree, values).sum(axis=1))
        if n_single:
            rule = f"trees must have splits of two parties, got {n_single} with all splits at one, "
            raise DataError(f"{rule}which then knows where every row ends{UNGUARDED}")
        n_few = int((possibilities < np.log(least) - 1e-9).sum())
        if n_few:
            raise DataError(
                f"rows must have {least:g} ways through the trees that the active party's splits "
                f"leave open (eini.least-possibilities), got {n_few} of {len(values)} with fewer"
                f"{UNGUARDED}"
            )

    def _next_batch(self, plan: Plan) -> Elements | None:
        """Eq. 10: encrypted terms of the candidates of the next rows, zeros for the rest."""
        first, n_rows = self.n_sent, len(self.ids)
        if first == n_rows:
            return None
        last = min(first + self.batch_rows, n_rows)
        values = self.values[first:last]
        terms = [plan.open_terms(tree, values)[0] for tree in plan.shared]
        elements = np.concatenate(terms, axis=1).reshape(-1, plan.part.model.n_outputs)
        multiples = np.rint(np.ldexp(elements, PRECISION - self.exponent)).astype(np.int64)
        self.n_sent = last
        return Elements(first, last - first, self.cipher.encrypted(multiples))

    def _take_totals(self, plan: Plan, mail: Mail) -> None:
        """Eq. 14: decrypt the sums that are back; each must be one that the row can have."""
        parties = self.passive
        for sender, letter in mail.each(Totals):
            first, n_rows = self.n_back, len(self.ids)
            end = min(first + self.batch_rows, n_rows)
            is_next = sender == parties[-1] and letter.first_row == first
            check_fields(
                sender,
                letter,
                ("part", {*self.ready} == {*parties}, "must come after every party is ready"),
                ("first_row", is_next, "must be the next batch's"),
                ("n_rows", letter.n_rows == end - first, f"must be {end - first}"),
            )
            (fields,) = self.cipher.read(sender, letter, [(0, np.ones(letter.n_rows, dtype=bool))])
            terms = np.ldexp(np.array(fields, dtype=np.float64), self.exponent - PRECISION)
            low, high = plan.bounds(self.values[first:end])
            # Terms are rounded when they are packed, sums of up to n_terms of them as float64.
            slack = len(plan.shared) ** 2 * 2.0 ** (self.exponent - PRECISION + 1)
            n_beyond = int(((terms < low - slack) | (terms > high + slack)).any(axis=1).sum())
            if n_beyond:
                rule = "must be sums of leaves that this party's splits leave open to each row, "
                rule += (
                    f"got {n_beyond} of {letter.n_rows} rows beyond: {sender} or a party before it "
                )
                raise ProtocolError(sender, "Totals", "ciphertexts", f"{rule}has changed them")
            sums = np.array(self.sums)
            sums[first:end] += terms
            self.sums, self.n_back = sums, end


HANDLERS = handlers(Active, Passive)
