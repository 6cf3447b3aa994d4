"""Paths of rows in Fed-EINI: what structure and sums show of them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clients.eini import Active as Predictor
from clients.eini import Plan, open_entries, plan_of
from clients.inference import Predicting
from fedapp.arrays import Flags, Floats, Ints
from fedapp.audit.listening import ListeningApp, Transcript, trained
from fedapp.crypto.packing import PRECISION
from fedapp.crypto.paillier import decrypt
from fedapp.crypto.workers import shared_workers
from fedapp.data.datasets import read_source
from fedapp.messages.eini import Structure, Totals
from fedapp.runs.baselines import join_tables
from fedapp.runs.local import run_local
from fedapp.settings import Settings, load_settings
from fedapp.site.answer import Site
from simulations.attack import Attack, Outcome, Overrides
from simulations.attacks.vertical import ACTIVE, CREDIT, PASSIVE, SECUREBOOST
from simulations.study import write_rows

# eini_paths

MOST, ROWS = 2**18, 100


class Curious:
    """An active party that records sums and what it knows; the true ways only judge it."""

    def __init__(self) -> None:
        # Terms and sums are in multiples of the unit of the fixed-point numbers.
        self.sums = np.empty(0)
        self.terms: list[Ints] = []  # of each tree, shape (n_rows, n_entries)
        self.open: list[Flags] = []  # same shape: which entries its splits leave open to a row
        self.theirs: list[Flags] = []  # the same by the passive party's splits: the truth
        self.sizes: list[Ints] = []  # of each tree, shape (n_entries,): training rows
        self.slack = 0  # possible rounding error of a sum

    def note(self, transcript: Transcript) -> None:
        site = transcript.site
        if structure := transcript.mail.all(Structure).get(ACTIVE):
            passive = Predicting.load(site)
            self._lookup, self._structure = passive.party_part().lookup, structure
            self.theirs = open_entries(structure, self._lookup, passive.values)
        for _, letter in transcript.mail.each(Totals):
            self._take(site, letter)

    def _take(self, site: Site, letter: Totals) -> None:
        party = Predictor.load(site)
        plan, key = plan_of(party.active_part()), party.cipher.private_key
        plain = decrypt(key, letter.ciphertexts, shared_workers())
        unit, (layout,) = PRECISION - party.exponent, party.cipher.layouts
        sums = np.array(layout.unpack(plain, letter.n_rows), dtype=np.float64)[:, 0]
        self.sums = np.concatenate((self.sums, sums))
        self.slack = layout.n_rows
        self._plan, self.open = plan, _open_here(plan, party.values)
        self.terms = []
        for tree, is_open in zip(plan.shared, self.open, strict=True):
            # What the open entries of a tree would add to the sums of rows
            skeleton, terms = plan.skeletons[tree], np.zeros(is_open.shape)
            for column, entry in enumerate(skeleton.sources[skeleton.entries]):
                rows = is_open[:, column]
                values = party.values[rows]
                terms[rows, column] = plan.terms_below(tree, int(entry), values)[:, 0]
            self.terms.append(np.rint(np.ldexp(terms, unit)).astype(np.int64))

    def count(self, settings: Settings) -> None:
        """Count the training rows of each entry, as the active party saw in training."""
        table, _, active = join_tables(settings)
        values = table.values[table.split.train]
        mine = _open_here(self._plan, values[:, active])
        others = np.delete(values, np.arange(values.shape[1])[active], axis=1)
        theirs = open_entries(self._structure, self._lookup, others)
        self.sizes = [(a & b).sum(axis=0) for a, b in zip(mine, theirs, strict=True)]


def _open_here(plan: Plan, values: Floats) -> list[Flags]:
    """Entries of each tree that the active party's splits leave open to rows."""
    return [plan.open_entries(tree, values) for tree in plan.shared]


def the_way(options: Sequence[Ints], total: int, slack: int) -> list[int] | None:
    """Find the option of each list that together add up to ``total``.

    ``options`` are int64 arrays; a sum may be off by ``slack``. Returns indices of the options; an
    empty list if none or several combinations fit, None if those of half of the lists are more than
    ``MOST``.
    """
    halves: list[list[int]] = [[], []]
    sizes = [1, 1]
    for index in np.argsort([-len(terms) for terms in options], kind="stable").tolist():
        half = int(sizes[1] < sizes[0])
        halves[half].append(index)
        sizes[half] *= len(options[index])
    if max(sizes) > MOST:
        return None
    first, second = ([options[index] for index in half] for half in halves)
    left, right = _all_sums(first), _all_sums(second)
    order = np.argsort(left)
    missing = total - right
    starts = np.searchsorted(left[order], missing - slack, side="left")
    ends = np.searchsorted(left[order], missing + slack, side="right")
    if (ends - starts).sum() != 1:
        return []
    position = int(np.argmax(ends - starts))
    chosen = _places(halves[0], options, int(order[starts[position]]))
    chosen |= _places(halves[1], options, position)
    return [chosen[index] for index in range(len(options))]


def _places(lists: Sequence[int], options: Sequence[Ints], number: int) -> dict[int, int]:
    """Index of each list's option in entry ``number`` of ``_all_sums``, by the list's number."""
    chosen = {}
    for index in reversed(lists):
        number, chosen[index] = divmod(number, len(options[index]))
    return chosen


def _all_sums(options: Sequence[Ints]) -> Ints:
    """Sums of one option of each list; the last list varies fastest."""
    sums = np.zeros(1, dtype=np.int64)
    for terms in options:
        sums = np.add.outer(sums, terms).ravel()
    return sums


def predicted(overrides: Overrides, model: str, curious: Curious) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = read_source(overrides["data"])
        drawn = np.random.default_rng(overrides["seed"]).permutation(table.n_rows)[:ROWS]
        ids = [f"row-{row}" for row in drawn]
        path = write_rows(Path(folder) / "rows.parquet", table, drawn, labelled=False, ids=ids)
        settings = load_settings(
            {
                "strategy": "eini",
                "data": path,
                "id": "id",
                "model": model,
                "run-dir": f"{folder}/run",
                "eini.key-bits": 512,
                "eini.insecure-small-key": True,
                "eini.unguarded": True,
                **{name: overrides[name] for name in ("columns", "parties", "align", "seed")},
            }
        )
        listeners = [(name, curious.note) for name in (ACTIVE, PASSIVE)]
        run_local(settings, client_app=ListeningApp(listeners))


def attack_eini_paths(overrides: Overrides) -> Outcome:
    """Which way rows went through another's splits, from Fed-EINI's sums.

    The active party knows all leaf values, and which leaves its own splits leave open to a row. It
    decrypts only their sum, in 53 bits and more; finding the values that add up to it is a
    subset-sum problem. The attack adds up the values of each half of the trees in all combinations,
    sorts one list and looks up for each entry of the other what is missing (Horowitz and Sahni
    1974). That takes the square root of the number of combinations, up to 2^18 for a half. Rows
    with more are counted as unfinished, and as not found: other searches go further, and lattice
    methods were not tried.

    Success is the share of rows for which exactly one way through all trees gives the sum, and it
    is the true one. Chance is the share of rows that went, in every tree, the way of most training
    rows among those that the active party's splits leave open; it has seen these numbers.
    """
    settings, curious = {**SECUREBOOST, **overrides}, Curious()
    n_found = n_guessed = n_unfinished = 0
    with trained(load_settings(settings)) as run:
        predicted(settings, run.summary["model_id"], curious)
        curious.count(run.settings)
        for row, total in enumerate(curious.sums):
            # Entries that are open to the row, of each tree
            ids = [np.flatnonzero(is_open[row]) for is_open in curious.open]
            truth = [fits[row, of_tree] for fits, of_tree in zip(curious.theirs, ids, strict=True)]
            options = [term[row, of_tree] for term, of_tree in zip(curious.terms, ids, strict=True)]
            guess = [
                int(size[of_tree].argmax())
                for size, of_tree in zip(curious.sizes, ids, strict=True)
            ]
            way = the_way(options, int(total), curious.slack)
            n_unfinished += way is None
            n_found += _is_true(way, truth) if way else 0
            n_guessed += _is_true(guess, truth)
    success, chance, unfinished = (
        count / len(curious.sums) for count in (n_found, n_guessed, n_unfinished)
    )
    return Outcome(success, chance, run.score, unfinished)


def _is_true(way: Sequence[int], truth: Sequence[Flags]) -> bool:
    return all(is_true[option] for is_true, option in zip(truth, way, strict=True))


EINI_PATHS = Attack(
    holder="the active party of Fed-EINI, from the sums of leaves that it decrypts",
    measure="share of rows whose way through all trees is found; chance: the usual way",
    data={
        "spambase": {"data": "spambase", "columns": "sizes:37,20", "test-fraction": 0.5},
        "default-credit": CREDIT,
    },
    ways={f"{n} trees": {"num-boost-round": n} for n in (5, 10, 20, 40)},
    run=attack_eini_paths,
)
