"""Fed-EINI at a party: encrypted weights at the active one, selection in turn at the others.

Source: Chen et al. 2021 (arXiv:2105.09540), Algorithm 1. Departures, which make it sound:

- What a passive party does not choose becomes a fresh encryption of 0, and what it chooses gets a
  fresh mask, so that nobody who sees a vector before and after can tell which is which.
- The last party's sums carry a fresh mask too, and several rows share a ciphertext.
- Subtrees without a passive split are one entry; trees without one are added by the active party.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gmpy2 import mpz

from clients.alignment import check_order
from clients.interactive import model_folder
from fedapp.crypto.keys import PrivateKey, PublicKey, check_public_key, generate_key
from fedapp.crypto.packing import SumLayout
from fedapp.crypto.paillier import check_ciphertexts, decrypt, encrypt
from fedapp.crypto.sums import choose, pack_sums, self_test, sum_rows
from fedapp.crypto.workers import n_cores, shared_workers
from fedapp.data.predictions import named_predictions, write_predictions
from fedapp.errors import ConfigError, DataError, ProtocolError
from fedapp.messages.eini import Elements, Ready, StepReply, StepRequest, Structure, Totals
from fedapp.messages.fields import Array, Letter, Request
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Mail, read_mail, write_mail
from fedapp.site.store import Store
from fedapp.trees.candidates import LEAF, Skeleton, candidates, skeleton
from fedapp.trees.model import Ensemble, Tree, from_json
from fedapp.trees.objective import exact_predictions
from fedapp.trees.partition import goes_left
from fedapp.trees.parts import Lookup, model_of, part_digest, read_part, split_owners

BATCH_BYTES = 2**26
Letters = list[tuple[str, Letter]]


def step(site: Site, request: StepRequest) -> StepReply:
    """The own step on what has come."""
    is_active = site.store.facts["active"] == site.name
    return _active_step(site, request) if is_active else _passive_step(site, request)


# The active party


def _active_step(site: Site, request: StepRequest) -> StepReply:
    """Begin, or take sums that are back; send the next batch; write the end."""
    store, mail = site.store, read_mail(site, request)
    letters: Letters = []
    if "skeletons" not in store.facts:
        check_order(site, mail)
        letters = _begin(site, request)
    else:
        _check_parts(site, mail)
        _take_totals(site, mail)
    batch = _next_batch(site)
    if batch is not None:
        letters.append((_chain(store)[0], batch))
    finished = store.facts["n_back"] == len(store["ids"])
    if finished:
        _write(site, request.suffix)
    facts = store.facts
    reply = StepReply(
        **write_mail(site, letters),
        finished=finished,
        n_trees=facts["n_trees"],
        n_entries=facts["n_entries"],
        n_batches=facts["n_batches"],
    )
    if finished:
        store.forget()
    return reply


def _begin(site: Site, request: StepRequest) -> Letters:
    """Collapse the trees, hold them against the guard, draw a key, tell the others."""
    store = site.store
    part = read_part(model_folder(store))
    model = model_of(part)
    if not isinstance(model, Ensemble):
        raise DataError("model must be a boosted one for eini; a forest is predicted by one-round")
    owners = split_owners(model, part)
    found = [
        _skeleton(tree, names, site.name) for tree, names in zip(model.trees, owners, strict=True)
    ]
    open_trees = [number for number, each in enumerate(found) if len(each.lefts) > 1]
    store.facts["skeletons"] = open_trees
    store.facts |= {"n_trees": len(model.trees), "n_batches": 0, "n_sent": 0, "n_back": 0}
    store.facts["n_entries"] = sum(len(found[number].entries) for number in open_trees)
    _add_own_trees(site, model, part, set(range(len(found))) - set(open_trees))
    if not open_trees:
        store.facts["n_back"] = store.facts["n_sent"] = len(store["ids"])
        return []
    if not request.unguarded:
        _guard(site, model, part, owners, request.least_possibilities)
    key = _draw_key(site, request, model, len(open_trees))
    modulus = int(key.public.n).to_bytes((key.public.bits + 7) // 8, "big")
    rows = request.batch_rows or BATCH_BYTES // (
        store.facts["n_entries"] * key.public.ciphertext_bytes
    )
    store.facts["batch_rows"] = max(1, rows)
    letters: Letters = []
    for name in _chain(store):
        records = [
            np.where(
                [owners[n][node] == name for node in found[n].sources],
                np.array(part["splits"][n])[found[n].sources],
                LEAF,
            )
            for n in open_trees
        ]
        lefts = [found[n].lefts for n in open_trees]
        own = [np.where(left == LEAF, LEAF, r) for left, r in zip(lefts, records, strict=True)]
        structure = Structure(
            np.frombuffer(modulus, np.uint8),
            len(open_trees),
            model.n_outputs,
            np.cumsum([len(left) for left in lefts], dtype=np.int64),
            np.concatenate(lefts),
            np.concatenate(own).astype(np.int64),
        )
        letters.append((name, structure))
    return letters


def _skeleton(tree: Tree, owners: list[str], active: str) -> Skeleton:
    is_passive = np.array([name != active for name in owners]) & (tree["left"] != LEAF)
    return skeleton(tree["left"], is_passive)


def _draw_key(site: Site, request: StepRequest, model: Ensemble, n_terms: int) -> PrivateKey:
    """A key for this inference alone, tried out, and how weights lie in its plaintexts."""
    store = site.store
    weights = np.concatenate([tree["value"] for tree in model.trees])
    exponent = int(np.frexp(np.abs(weights).max(initial=0).astype(np.float64))[1])
    try:
        key = generate_key(request.key_bits, insecure_small_key=request.insecure_small_key)
        SumLayout(key.public.bits, n_terms, model.n_outputs, exponent)
    except ValueError as error:
        raise ConfigError(f"eini.{error}") from error
    self_test(key)
    store["key"] = np.frombuffer(f"{key.p} {key.q}".encode(), dtype=np.uint8)
    store.facts["layout"] = [n_terms, model.n_outputs, exponent]
    return key


def _key(store: Store) -> PrivateKey:
    p, q = store["key"].tobytes().decode().split()
    return PrivateKey(mpz(p), mpz(q))


def _guard(
    site: Site, model: Ensemble, part: Mapping[str, Any], owners: list[list[str]], least: float
) -> None:
    """Refuse what gives a party's splits away.

    Raises
    ------
    DataError : a tree is all one passive party's, or a row's sum has too few possible sources.
    """
    store, n_rows = site.store, len(site.store["ids"])
    alone = 0
    possibilities = np.zeros(n_rows)
    for number in store.facts["skeletons"]:
        tree = model.trees[number]
        names = {owners[number][node] for node in np.flatnonzero(tree["left"] != LEAF)}
        alone += len(names) == 1
        found = _skeleton(tree, owners[number], site.name)
        sides = _own_sides(site, part, number, found, owners[number])
        possibilities += np.log(candidates(found.lefts, sides, n_rows).sum(axis=1))
    rule = "; eini.unguarded=true predicts all the same"
    if alone:
        raise DataError(
            f"trees must have splits of two parties, got {alone} with all splits at one, which "
            f"then knows where every row ends{rule}"
        )
    n_few = int((possibilities < np.log(least) - 1e-9).sum())
    if n_few:
        raise DataError(
            f"rows must have {least:g} ways through the trees that the active party's own splits "
            f"leave open (eini.least-possibilities), got {n_few} of {n_rows} with fewer{rule}"
        )


def _own_sides(
    site: Site,
    part: Mapping[str, Any],
    number: int,
    found: Skeleton,
    owners: list[str],
    rows: slice = slice(None),
) -> dict[int, npt.NDArray[np.bool_]]:
    """Which rows the party's own splits of a skeleton send left, by its node."""
    lookup, values = Lookup.from_json(part), site.store["values"][rows]
    sides = {}
    for place, (left, node) in enumerate(zip(found.lefts, found.sources, strict=True)):
        if left != LEAF and owners[node] == site.name:
            record = part["splits"][number][node]
            sides[place] = _side(lookup, record, values)
    return sides


def _side(lookup: Lookup, record: int, values: Array) -> npt.NDArray[np.bool_]:
    column, is_left = int(lookup.columns[record]), bool(lookup.defaults[record])
    return goes_left(values[:, column], lookup.thresholds[record], is_left)


def _weights_below(
    tree: Tree, start: int, lookup: Lookup, records: list[int], values: Array
) -> npt.NDArray[np.float64]:
    """Weight of the leaf each row reaches from a node below which all splits are the party's."""
    nodes = np.full(len(values), start)
    while True:
        inner = np.unique(nodes[tree["left"][nodes] != LEAF])
        if not len(inner):
            weights: npt.NDArray[np.float64] = tree["value"][nodes].astype(np.float64)
            return weights
        for node in inner:
            rows = np.flatnonzero(nodes == node)
            sides = _side(lookup, records[node], values[rows])
            left = int(tree["left"][node])
            nodes[rows] = np.where(sides, left, left + 1)


def _add_own_trees(site: Site, model: Ensemble, part: Mapping[str, Any], numbers: set[int]) -> None:
    """Margins of the trees that no passive party splits."""
    store, lookup = site.store, Lookup.from_json(part)
    margins = np.full((len(store["ids"]), model.n_outputs), float(model.base_margin))
    for number in sorted(numbers):
        tree, records = model.trees[number], part["splits"][number]
        found = _weights_below(tree, 0, lookup, records, store["values"])
        margins[:, number % model.n_outputs] += found
    store["margins"] = margins


def _next_batch(site: Site) -> Elements | None:
    """Eq. 10: encrypted weights of the candidates of some rows, and zeros."""
    store = site.store
    first, n_rows = store.facts["n_sent"], len(store["ids"])
    if first == n_rows:
        return None
    last = min(first + store.facts["batch_rows"], n_rows)
    rows = slice(first, last)
    part = read_part(model_folder(store))
    model = from_json(part["model"])
    owners, lookup, values = (
        split_owners(model, part),
        Lookup.from_json(part),
        store["values"][rows],
    )
    key = _key(store)
    n_terms, n_outputs, exponent = store.facts["layout"]
    layout = SumLayout(key.public.bits, n_terms, n_outputs, exponent)
    columns = []
    for number in store.facts["skeletons"]:
        tree, records = model.trees[number], part["splits"][number]
        found = _skeleton(tree, owners[number], site.name)
        sides = _own_sides(site, part, number, found, owners[number], rows)
        mine = candidates(found.lefts, sides, last - first)
        for place, entry in enumerate(found.entries):
            weights = _weights_below(tree, int(found.sources[entry]), lookup, records, values)
            column = np.zeros((last - first, n_outputs))
            column[:, number % n_outputs] = np.where(mine[:, place], weights, 0)
            columns.append(column)
    elements = np.stack(columns, axis=1).reshape(-1, n_outputs)
    ciphertexts = encrypt(key, layout.pack(elements), shared_workers(n_cores()))
    store.facts["n_sent"], store.facts["n_batches"] = last, store.facts["n_batches"] + 1
    return Elements(first, last - first, ciphertexts)


def _check_parts(site: Site, mail: Mail) -> None:
    """Hold the others' parts of the model against those this one was trained with."""
    parts = read_part(model_folder(site.store))["parts"]
    for name, letter in mail.all(Ready).items():
        if letter.part.tobytes().hex() != parts.get(name):
            raise DataError("model must be the one this run was trained with", name)
        site.store.facts.setdefault("ready", []).append(name)


def _take_totals(site: Site, mail: Mail) -> None:
    """Decrypt the sums that are back."""
    store, last = site.store, _chain(site.store)[-1]
    for sender, letter in mail.each(Totals):
        if set(store.facts.get("ready", [])) != set(_chain(store)):
            raise ProtocolError(sender, "Totals", "part", "must come after every party is ready")
        if sender != last or letter.first_row != store.facts["n_back"]:
            raise ProtocolError(sender, "Totals", "first_row", "must be the next batch's")
        key = _key(store)
        n_terms, n_outputs, exponent = store.facts["layout"]
        layout = SumLayout(key.public.bits, n_terms, n_outputs, exponent)
        end = min(letter.first_row + store.facts["batch_rows"], len(store["ids"]))
        if letter.n_rows != end - letter.first_row:
            raise ProtocolError(sender, "Totals", "n_rows", f"must be {end - letter.first_row}")
        try:
            check_ciphertexts(key.public, letter.ciphertexts)
            plain = decrypt(key, letter.ciphertexts, shared_workers(n_cores()))
            sums = layout.unpack(plain, letter.n_rows)
        except ValueError as error:
            raise ProtocolError(sender, "Totals", "ciphertexts", str(error)) from error
        margins = np.array(store["margins"])
        margins[letter.first_row : end] += sums
        store["margins"] = margins
        store.facts["n_back"] = end


def _write(site: Site, suffix: str) -> None:
    """A line for every row, in the order of the party's table."""
    store = site.store
    model = from_json(read_part(model_folder(store))["model"])
    order = np.argsort(store["places"], kind="stable")
    predictions = exact_predictions(model.objective, store["margins"][order])
    named = named_predictions(model.classes, model.n_outputs, predictions)
    name = site.config.id_column or "row"
    write_predictions(store.folder / f"predictions{suffix}", name, store["ids"][order], named)


def _chain(store: Store) -> list[str]:
    """Passive parties in the order in which they choose."""
    return [name for name in store.facts["peers"] if name != store.facts["active"]]


# A passive party


def _passive_step(site: Site, request: StepRequest) -> StepReply:
    """Eq. 12 and 13: keep the entries that the own splits leave, of every batch that has come."""
    store, mail = site.store, read_mail(site, request)
    chain, active = _chain(store), store.facts["active"]
    letters: Letters = []
    for structure in mail.all(Structure).values():
        _keep_structure(site, structure, request.insecure_small_key)
        digest = np.frombuffer(part_digest(model_folder(store)), dtype=np.uint8)
        letters.append((active, Ready(digest)))
    for sender, elements in mail.each(Elements):
        place = chain.index(site.name)
        if sender != (chain[place - 1] if place else active):
            raise ProtocolError(sender, "Elements", "sender", "must be the party before this one")
        receiver = chain[place + 1] if place + 1 < len(chain) else active
        letters.append((receiver, _choose(site, sender, elements)))
    return StepReply(
        **write_mail(site, letters), finished=False, n_trees=0, n_entries=0, n_batches=0
    )


def _keep_structure(site: Site, letter: Structure, insecure: bool) -> None:
    """Keep key and structure, once they fit together."""
    store, active = site.store, site.store.facts["active"]
    lookup = Lookup.from_json(read_part(model_folder(store)))
    sizes = np.diff(letter.ends, prepend=0)
    fits = (
        letter.ends[-1] == len(letter.lefts) and (sizes > 0).all() and len(sizes) == letter.n_terms
    )
    for lefts in np.split(letter.lefts, letter.ends[:-1]) if fits else ():
        own = np.arange(len(lefts))
        inner = lefts != LEAF
        fits = fits and bool(((lefts > own) & (lefts + 1 < len(lefts)))[inner].all())
        children = np.sort(np.concatenate((lefts[inner], lefts[inner] + 1)))
        fits = fits and np.array_equal(children, np.arange(1, len(lefts)))
    if not fits or (letter.records >= len(lookup.columns)).any():
        raise ProtocolError(active, "Structure", "lefts", "must be trees of this model")
    try:
        key = PublicKey(mpz(int.from_bytes(letter.n.tobytes(), "big")))
        check_public_key(key, insecure_small_key=insecure)
        SumLayout(key.bits, letter.n_terms, letter.n_outputs, 0)
    except ValueError as error:
        raise ProtocolError(active, "Structure", "n", str(error)) from error
    store["n"], store["ends"] = letter.n, letter.ends
    store["lefts"], store["records"] = letter.lefts, letter.records
    store.facts["layout"] = [letter.n_terms, letter.n_outputs]


def _choose(site: Site, sender: str, letter: Elements) -> Elements | Totals:
    """Fresh masks for what is chosen and fresh zeros for the rest; the last party adds up."""
    store = site.store
    key = PublicKey(mpz(int.from_bytes(store["n"].tobytes(), "big")))
    end = letter.first_row + letter.n_rows
    if end > len(store["ids"]):
        raise ProtocolError(sender, "Elements", "n_rows", f"must end by row {len(store['ids'])}")
    chosen = _own_candidates(site, slice(letter.first_row, end))
    if len(letter.ciphertexts) != chosen.size:
        rule = f"must be {chosen.shape[1]} for each of {letter.n_rows} rows"
        raise ProtocolError(
            sender, "Elements", "ciphertexts", f"{rule}, got {len(letter.ciphertexts)}"
        )
    try:
        check_ciphertexts(key, letter.ciphertexts)
    except ValueError as error:
        raise ProtocolError(sender, "Elements", "ciphertexts", str(error)) from error
    workers = shared_workers(n_cores())
    if site.name != _chain(store)[-1]:
        kept = choose(key, letter.ciphertexts, chosen.ravel(), workers)
        return Elements(letter.first_row, letter.n_rows, kept)
    n_terms, n_outputs = store.facts["layout"]
    layout = SumLayout(key.bits, n_terms, n_outputs, 0)
    rows = np.repeat(np.arange(letter.n_rows, dtype=np.int32), chosen.shape[1])
    slots = np.where(chosen.ravel(), rows, -1).astype(np.int32)
    codes, offsets = np.zeros((len(rows), 1), dtype=np.uint8), np.array([0, 1])
    sums = sum_rows(key, letter.ciphertexts, codes, offsets, slots, letter.n_rows, workers)
    return Totals(letter.first_row, letter.n_rows, pack_sums(key, sums, layout, workers))


def _own_candidates(site: Site, rows: slice) -> npt.NDArray[np.bool_]:
    """Entries of all trees that the own splits leave; bool, shape (n_rows, n_entries)."""
    store = site.store
    lookup, values = Lookup.from_json(read_part(model_folder(store))), store["values"][rows]
    found, ends = [], store["ends"]
    splits = zip(
        np.split(store["lefts"], ends[:-1]), np.split(store["records"], ends[:-1]), strict=True
    )
    for lefts, records in splits:
        sides = {
            int(node): _side(lookup, int(records[node]), values)
            for node in np.flatnonzero(records != LEAF)
        }
        found.append(candidates(lefts, sides, len(values)))
    return np.concatenate(found, axis=1)


HANDLERS: Mapping[type[Request], Handler] = {StepRequest: step}
