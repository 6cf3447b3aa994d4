"""Fed-EINI at a party: encrypted weights at the active one, selection in turn at the others.

Source: Chen et al. 2021 (arXiv:2105.09540), Algorithm 1. Departures, needed for security:

- An entry that a passive party rejects becomes a fresh encryption of 0, and one that it selects is
  rerandomised, so nobody who sees a vector before and after can tell which is which.
- The last party's sums are rerandomised too, and several rows share a ciphertext.
- A subtree without a passive split is one entry; the active party adds trees without one.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from clients.eini.active import NOT_OWN, UNGUARDED, active_step, chain
from clients.explain import explain_open
from clients.inference import OwnPart, own_digest, own_part
from fedapp.crypto.packing import SumLayout
from fedapp.crypto.paillier import PublicKey, check_ciphertexts, read_public_key
from fedapp.crypto.sums import pack_sums, select_ciphertexts, sum_rows
from fedapp.crypto.workers import shared_workers
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.messages.eini import Elements, Ready, StepReply, StepRequest, Structure, Totals
from fedapp.messages.fields import Array, Request
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store
from fedapp.trees.divided import candidates
from fedapp.trees.model import check_trees

Bools = npt.NDArray[np.bool_]


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
        part = own_part(site)
        _keep_structure(site, part, structure, request)
        if not request.unguarded:
            _guard(store, part, request.least_possibilities)
        if "explained" in store.facts and "trees" not in part.document:
            explain_open(site, part, _trees(site))
        letters.append((active, Ready(own_digest(site))))
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


def _keep_structure(site: Site, part: OwnPart, letter: Structure, request: StepRequest) -> None:
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


def _guard(store: Store, part: OwnPart, least: float) -> None:
    # Too few distinct paths through the local splits would reveal the columns' values.
    local = store["records"][store["records"] != NOT_OWN]
    if len(local) and part.lookup.n_ways(local, store["values"]) < least:
        raise DataError(
            f"columns of this party must have {least:g} ways through its splits "
            f"(eini.least-possibilities), got fewer{UNGUARDED}"
        )


def _choose(site: Site, sender: str, letter: Elements) -> Elements | Totals:
    """Select the entries of one batch; the last party sums them."""
    store = site.store
    if "n" not in store:
        raise ProtocolError(sender, "Elements", "letter", "must come after the structure")
    key = PublicKey.from_array(store["n"])
    n_rows, end = len(site.store["ids"]), letter.first_row + letter.n_rows
    if letter.first_row != site.store.facts["next_row"]:
        raise ProtocolError(sender, "Elements", "first_row", "must be the next batch's")
    if end > n_rows:
        raise ProtocolError(sender, "Elements", "n_rows", f"must end by row {n_rows}")
    chosen, n_sent = _open_entries(site, slice(letter.first_row, end)), len(letter.ciphertexts)
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


def _open_entries(site: Site, rows: slice) -> Bools:
    """Entries of all trees left open by local splits; bool, shape (n_rows, n_entries)."""
    lookup, values = own_part(site).lookup, site.store["values"][rows]
    open_entries = []
    for lefts, records in _trees(site):
        local = np.flatnonzero(records != NOT_OWN).tolist()
        sides = {node: lookup.sides(records[node], values) for node in local}
        open_entries.append(candidates(lefts, sides, len(values)))
    return np.concatenate(open_entries, axis=1)


HANDLERS: Mapping[type[Request], Handler] = {StepRequest: step}
