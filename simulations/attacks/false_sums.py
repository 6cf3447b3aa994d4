"""What passive parties read of labels by sums, or sides of rows, that are not those of their rows.

``described_labels`` is about ``describe --vertical``, ``forest_sums`` about Federated Forest,
``held_out_sides`` about the scores of SecureBoost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from gmpy2 import mpz, powmod
from pyarrow import csv, table

from clients import describe as clients_describe
from clients.describe import Encrypting, Summing
from clients.federated_forest.paillier import PaillierActive, PaillierPassive
from clients.secureboost.active import Active as SecureBoostActive
from clients.secureboost.passive import Passive as SecureBoostPassive
from clients.vertical.growing import SplitList
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.paillier_keys import PublicKey
from fedapp.crypto.sums import SumJob, pack_sums, pack_terms
from fedapp.crypto.workers import shared_workers
from fedapp.data.datasets import read_source
from fedapp.errors import FedappError
from fedapp.messages.describe import CellSums, ColumnsReply, FinishRequest, SumRequest
from fedapp.messages.federated_forest import ColumnSums
from fedapp.messages.federated_forest import SumRequest as ForestSumRequest
from fedapp.messages.fields import fields_of
from fedapp.messages.vertical import Partition
from fedapp.metrics.tables import association, count_cells, readable_labels, rounded_figures
from fedapp.runs.local import run_local, site_contexts
from fedapp.settings import load_settings
from fedapp.site.mail import Letters, Mail
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.cart import DRAWN
from fedapp.trees.forest.claims import LeftClaims
from fedapp.trees.forest.encrypted import Listing
from fedapp.trees.predict import slots_of
from simulations.attacks.vertical import FOREST, SECUREBOOST
from simulations.study import Row, show

Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
SMALL_KEY = {"describe-columns.key-bits": 512, "describe-columns.insecure-small-key": True}
OFTEN = {"runs-per-day": 10**6, "align-ids-per-day": 10**9}  # the study runs more than once a day
ACTIVE, PASSIVE = "bank", "shop"
QUANTILE = 0.65


@dataclass(frozen=True, slots=True)
class FalseCells:
    """A passive party whose columns have a cell of rows of its choice, row ``i`` counted 2^i times.

    Parameters
    ----------
    rows : (n_columns, n), the rows whose labels are read.
    """

    rows: Ints

    @property
    def n_inside(self) -> int:
        """Rows that the cell claims to have."""
        return int(2 ** self.rows.shape[1]) - 1

    def sum_cells(
        self, party: Summing, request: SumRequest, mail: Mail
    ) -> tuple[ColumnsReply, Letters]:
        """In place of the party's handler: sums that add up, of rows that no column has."""
        key, n_rows = PublicKey.from_array(party.n), party.n_train
        n_squared, n_bytes = key.n_squared, key.ciphertext_bytes
        of_rows = [
            mpz(int.from_bytes(row.tobytes(), "big")) for row in np.concatenate(party.blocks)
        ]
        total, sums = mpz(1), list[Any]()
        for of_row in of_rows:
            total = total * of_row % n_squared
        for rows in self.rows.tolist():
            inside = mpz(1)
            for power, row in enumerate(rows):
                inside = inside * powmod(of_rows[row], 1 << power, n_squared) % n_squared
            sums += [mpz(1), inside, total * powmod(inside, -1, n_squared) % n_squared]
        texts = b"".join(int(one).to_bytes(n_bytes, "big") for one in sums)
        residues = ring_of(n_squared).read(np.frombuffer(texts, np.uint8).reshape(-1, n_bytes))
        cells, n_columns = [0, self.n_inside, n_rows - self.n_inside], len(self.rows)
        letter = CellSums(
            widths=np.full(n_columns, 3),
            is_number=np.ones(n_columns, np.uint8),
            counts=np.tile(cells, n_columns),
            ciphertexts=pack_sums(key, residues, party.layout(), shared_workers()),
        )
        counts, _ = count_cells(party.rows, party.cuts)
        reply = ColumnsReply(**party.described(counts), associations=np.empty((0, 4)))
        party.end()
        return reply, [(party.active, letter)]

    def read(self, figures: Sequence[Row], classes: Sequence[int], is_rounded: bool) -> Doubles:
        """Labels that fit the published figures; NaN where several do."""
        labels, n_inside = np.full(self.rows.shape, np.nan), self.n_inside
        bits = np.array([*product((0, 1), repeat=self.rows.shape[1])])
        positives = bits @ (1 << np.arange(bits.shape[1]))
        shown = list[Row]()
        for inside in positives.tolist():
            outside = classes[1] - inside
            negatives = n_inside - inside
            sums = [[0, 0], [negatives, inside], [classes[0] - negatives, outside]]
            cells = np.array([0, n_inside, sum(classes) - n_inside])
            figure = association(cells, np.array(sums, np.float64), True, True)
            shown.append(rounded_figures(figure) if is_rounded else figure)
        for of_column, published in zip(labels, figures, strict=True):
            fits = bits[[about == published for about in shown]]
            if len(fits):
                is_certain = (fits == fits[0]).all(axis=0)
                of_column[is_certain] = fits[0, is_certain]
        return labels


def described_labels(
    data: str = "breast-cancer",
    n_columns: int = 10,
    n_labels: int = 4,
    sharing: tuple[str, ...] = ("exact", "off", "rounded"),
    max_rows: int = 20_000,
) -> Iterator[Row]:
    """Labels that a passive party reads from a published description, by sums of no column.

    In each of its ``--n-columns`` columns it claims a cell of ``--n-labels`` rows, the first
    counted once, the next twice, and so on, and a cell of the rest. What the column says about the
    label then is a number of which each label is a binary digit. Sums and counts add up, so the
    label holder cannot detect it.

    ``python -m simulations attacks described_labels`` does so with figures that are ``exact``, that
    the label holder does not share (``off``), and that it shares ``rounded``, if they are few
    enough. ``labels`` of ``tried`` are read for certain, all of them ``right``; ``bound`` is what
    ``fedapp site check`` shows.
    """
    source = read_source(data)
    labels = np.asarray(source.labels)[:max_rows]
    labels = (labels == np.unique(labels)[-1]).astype(np.int64)
    lines = list[Row]()
    for how in sharing:
        lines.append({"data": data, **described_once(labels, n_columns, n_labels, how)})
        yield lines[-1]
    columns = "sharing; rows; columns; labels; tried; right; bound"
    show(f"{data}, {n_labels} labels a column", lines, columns)


def described_once(labels: Ints, n_columns: int, n_labels: int, sharing: str) -> Row:
    """One description of two sites, and what the one without labels reads."""
    rng, n_rows = np.random.default_rng(0), len(labels)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        names = [f"c{column}" for column in range(n_columns)]
        ids = [f"r{row}" for row in range(n_rows)]
        columns = rng.integers(0, 2, (n_columns, n_rows))
        tables = {
            ACTIVE: {"id": ids, "age": rng.integers(0, 9, n_rows), "y": labels},
            PASSIVE: {"id": ids, **dict(zip(names, columns, strict=True))},
        }
        nodes = list[Row]()
        for name, of_site in tables.items():
            csv.write_csv(table(of_site), folder / f"{name}.csv")
            node: Row = {"name": name, "data": f"{folder}/{name}.csv", "id": "id"}
            node |= {"allow": "describe-columns", "allow-insecure": True, **OFTEN}
            nodes.append(node | ({"label": "y"} if name == ACTIVE else {}))
        if sharing == "rounded":
            nodes[0]["share-label-figures"] = True
        seen = dict[str, Any]()

        def sum_cells(
            party: Summing, request: SumRequest, mail: Mail
        ) -> tuple[ColumnsReply, Letters]:
            chosen = np.random.default_rng(1).permutation(party.n_train)[: n_columns * n_labels]
            attack = seen["attack"] = FalseCells(chosen.reshape(n_columns, n_labels))
            return attack.sum_cells(party, request, mail)

        finish = Encrypting.finish

        def noted(
            party: Encrypting, request: FinishRequest, mail: Mail
        ) -> tuple[ColumnsReply, Letters]:
            seen["truth"] = party.rows[:, -1].copy()
            return finish(party, request, mail)

        stack.enter_context(patch.object(Summing, "sum_cells", sum_cells))
        stack.enter_context(patch.object(Encrypting, "finish", noted))
        if sharing == "exact":
            exact = partial(patch.object, clients_describe)
            stack.enter_context(exact("rounded_figures", lambda figures: figures))
            always = patch.object(Encrypting, "_shares_figures", lambda party, n: True)
            stack.enter_context(always)
        settings = {"strategy": "describe-columns", "parties": 2, "objective": "binary:logistic"}
        settings |= {"run-dir": f"{folder}/run", **SMALL_KEY}
        run = run_local(load_settings(settings), site_contexts(nodes))
        document = json.loads((run.path / "description.json").read_text())
    figures = [about["label"] for about in document["columns"] if about["party"] == PASSIVE]
    (classes,) = (about["counts"] for about in document["columns"] if about.get("is_label"))
    attack, truth = seen["attack"], seen["truth"]
    read = attack.read(figures, classes, sharing != "exact")
    is_read, n_train = ~np.isnan(read), len(truth)
    return {
        "sharing": sharing,
        "rows": n_train,
        "columns": n_columns,
        "tried": read.size,
        "labels": int(is_read.sum()),
        "right": int((read == truth[attack.rows])[is_read].sum()),
        "bound": readable_labels(n_train) if sharing == "rounded" else 0,
    }


class FalseColumns:
    """A passive party of a forest that claims two columns a root, to read a label by the choice.

    Rows below a high quantile of one of its columns go left by both, more or less one row whose
    label it wants: ``n_times`` in its sums. If that label is the more frequent one on the left,
    more of it is the better split; otherwise less.
    """

    def __init__(self, column: int, n_times: int, is_consistent: bool) -> None:
        self.column, self.n_times, self.is_consistent = column, n_times, is_consistent
        self.rows = np.empty(0, np.int64)  # of each tree, whose label is read
        self.lefts = np.empty((0, 2, 0), np.bool_)  # of each tree and column
        self.chosen: dict[int, int] = {}  # column by tree

    def sum_columns(self, party: PaillierPassive, level: ForestSumRequest) -> ColumnSums:
        """Of the roots as described, of other nodes as they are."""
        if party.structure.level:
            return self.honest_sums(party, level)
        trees, n_train = party.open_to(level)[0], party.n_train
        values = party.values[:n_train, self.column]
        below, drawn = values < np.quantile(values, QUANTILE), party.counts > 0
        rng = np.random.default_rng(2)
        # A row that its tree draws once, so that one ciphertext is one row.
        self.rows = np.array([rng.choice(np.flatnonzero(counts == 1)) for counts in party.counts])
        self.lefts = np.repeat(np.tile(below, (2, 1))[None], len(trees), axis=0)
        for tree, row in enumerate(self.rows):
            self.lefts[tree, :, row] = True, False
        key = PublicKey.from_array(party.n)
        n_bytes, n_squared = key.ciphertext_bytes, key.n_squared
        taken = [
            powmod(mpz(int.from_bytes(party.ciphertexts[row].tobytes(), "big")), -1, n_squared)
            for row in self.rows
        ]
        texts = b"".join(int(one).to_bytes(n_bytes, "big") for one in taken)
        negatives = np.frombuffer(texts, np.uint8).reshape(-1, n_bytes)
        jobs, sizes, more = list[SumJob](), list[int](), self.n_times - 1
        for tree, row in enumerate(self.rows):
            (inside,) = np.nonzero(drawn[tree])
            counts = np.append(party.counts[tree], np.ones(len(self.rows))).astype(np.uint8)
            rows, places = list[Any](), list[Any]()
            for column, to_left in enumerate((True, False)):
                sides = 2 * column + ~self.lefts[tree, column, inside]
                here, there = 2 * column + (not to_left), 2 * column + to_left
                rows += [*inside, *[row] * more, *[n_train + tree] * more]
                places += [*sides, *[here] * more, *[there] * more]
                n_left = int(self.lefts[tree, column, inside].sum()) + more * (1 - 2 * column)
                sizes += [n_left, len(inside) - n_left]
            terms = np.array(rows, np.int32), np.array(places, np.int32)
            jobs.append(SumJob(*terms, counts, 4))
        n_trees, ones = len(trees), np.ones(2 * len(trees), np.int64)
        nothing, columns = ones.astype(np.uint8) * 0, np.tile([0, 1], n_trees)
        party.listing = Listing(
            np.full(n_trees, DRAWN),
            np.full(n_trees, 2),
            columns,
            2 * ones,
            nothing,
            nothing,
            np.array(sizes, np.int32),
        )
        party.bounds = np.zeros((2, 4 * n_trees), np.int32)
        sums = pack_terms(
            key,
            np.concatenate((party.ciphertexts, negatives)),
            jobs,
            party._layout(key),
            shared_workers(),
        )
        return ColumnSums(level=0, **fields_of(party.listing, Listing), ciphertexts=sums)

    def make(self, party: PaillierPassive, level: SplitList, splits: Lookup) -> Partition:
        """Note which columns were chosen; send rows left as claimed if that is consistent."""
        partition = self.honest_make(party, level, splits)
        if party.structure.level:
            return partition
        local = party.local_indices(level)
        self.chosen = dict(zip(level.trees[local].tolist(), splits.columns.tolist(), strict=True))
        if self.is_consistent:
            slots, _ = slots_of(party.nodes, level.trees[local], level.nodes[local])
            held = np.zeros(len(party.values) - party.n_train, np.bool_)
            sides = [
                np.append(self.lefts[tree, column], held)[slots[tree] >= 0]
                for tree, column in self.chosen.items()
            ]
            party.sides = {**party.sides, party.name: np.packbits(np.concatenate(sides))}
        return party.local_partition()

    honest_sums = staticmethod(PaillierPassive.sum_columns)
    honest_make = staticmethod(PaillierPassive.make)


def forest_sums(
    data: str = "breast-cancer", column: int = 7, trees: int = 20, times: int = 5
) -> Iterator[Row]:
    """Labels that a passive party of Federated Forest reads by which of two columns is chosen.

    For the root of each tree it claims two columns like ``--column``, of which one is the better
    split if a row has the one label, and the other if it has the other.

    ``python -m simulations attacks forest_sums`` does so with a row that counts ``--times`` in its
    sums, without and with the active party's check of what is then sent left; and last with columns
    that do send the row left and right, as a table could have them. At the roots of ``trees`` trees
    ``labels`` are read, ``right`` of them; ``ended`` is the error that ends the run.
    """
    lines = list[Row]()
    for columns, is_checked in (("false", False), ("false", True), ("true", True)):
        config = {**FOREST, "data": data, "federated-forest.trees": trees}
        attack = FalseColumns(column, times if columns == "false" else 1, columns == "true")
        lines.append({"columns": columns, "checked": is_checked})
        lines[-1] |= forest_once(config, attack, is_checked)
        yield lines[-1]
    show(f"{data}, {trees} trees", lines, "columns; checked; trees; labels; right; ended")


def forest_once(config: Row, attack: FalseColumns, is_checked: bool) -> Row:
    """One forest, and what the passive party reads at its roots."""
    truth, ended = np.empty(0), ""
    send = PaillierActive._send

    def noted(party: PaillierActive, letter: Any) -> Letters:
        nonlocal truth
        truth = party.targets.copy()
        return send(party, letter)

    def sum_columns(party: PaillierPassive, level: ForestSumRequest) -> ColumnSums:
        return attack.sum_columns(party, level)

    def make(party: PaillierPassive, level: SplitList, splits: Lookup) -> Partition:
        return attack.make(party, level, splits)

    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        stack.enter_context(patch.object(PaillierActive, "_send", noted))
        stack.enter_context(patch.object(PaillierPassive, "sum_columns", sum_columns))
        stack.enter_context(patch.object(PaillierPassive, "make", make))
        if not is_checked:
            stack.enter_context(patch.object(LeftClaims, "first_false", lambda claims, lefts: None))
        try:
            run_local(load_settings({**config, "run-dir": f"{folder}/run"}))
        except FedappError as error:
            ended = str(error)
    trees = np.array([*attack.chosen], np.int64)
    rows, more = attack.rows[trees], np.array([*attack.chosen.values()]) == 0
    below = attack.lefts[0, 0]
    is_frequent = truth == np.round(truth[below].mean())  # on the left
    right = int((is_frequent[rows] == more).sum())
    return {"trees": len(attack.rows), "labels": len(trees), "right": right, "ended": ended}


def held_out_sides(data: str = "breast-cancer", rounds: int = 10) -> Iterator[Row]:
    """Labels of validation rows that a passive party of SecureBoost reads from published scores.

    In trees of one split it sends all validation rows right but for one, another one each round.
    The others are tied, so that the AUC after the round shows whether the row is positive.

    ``python -m simulations attacks held_out_sides`` does so with scores as they are, and rounded to
    6, 4 and 3 digits. ``labels`` are read, ``right`` of them, up to a swap of the two labels, which
    one known label settles.
    """
    config: Row = {**SECUREBOOST, "data": data, "columns": "sizes:1,29", "max-depth": 1}
    config |= {"valid-fraction": 0.2, "num-boost-round": rounds, "eval-metric": "auc"}
    scores, rows, truth = scores_of_false_sides(config)
    lines = list[Row]()
    for digits in (16, 6, 4, 3):
        read = labels_of_scores(np.round(scores, digits), len(truth))
        right = int((read == truth[rows]).sum())
        right = max(right, len(rows) - right)
        lines.append({"data": data, "digits": digits, "labels": len(rows), "right": right})
        yield lines[-1]
    show(f"{data}, {rounds} rounds, {len(truth)} validation rows", lines, "digits; labels; right")


def scores_of_false_sides(config: Row) -> tuple[Doubles, Ints, Ints]:
    """The AUC of each round, the validation row sent left in it, and the labels of all of them."""
    honest, score = SecureBoostPassive.make, SecureBoostActive._rows_to_score
    truth, n_rounds = np.empty(0, np.int64), 0

    def make(party: SecureBoostPassive, level: SplitList, splits: Lookup) -> Partition:
        nonlocal n_rounds
        honest(party, level, splits)
        n_rows = len(party.nodes[0])
        sides = np.unpackbits(party.sides[party.name], count=n_rows).astype(np.bool_)
        valid = party.rows_of("valid")
        sides[valid] = False
        sides[valid.start + n_rounds] = True
        n_rounds += 1
        party.sides = {**party.sides, party.name: np.packbits(sides)}
        return party.local_partition()

    def noted(party: SecureBoostActive, margins: Any) -> Any:
        nonlocal truth
        truth = party.numbers[party.rows_of("valid")].astype(np.int64)
        return score(party, margins)

    with (
        TemporaryDirectory() as folder,
        patch.object(SecureBoostPassive, "make", make),
        patch.object(SecureBoostActive, "_rows_to_score", noted),
    ):
        run = run_local(load_settings({**config, "run-dir": f"{folder}/run"}))
        lines = run.files.rounds
    aucs = np.array([line["valid"]["auc"] for line in lines])
    return aucs, np.arange(n_rounds), truth


def labels_of_scores(aucs: Doubles, n_rows: int) -> Ints:
    """Labels of the rows sent left one by one, by the AUC after each; those before stay further.

    How many rows are positive, and whether left is lower, is what fits all rounds best.
    """
    best, read = np.inf, np.zeros(len(aucs), np.int64)
    for n_positive, sign in product(range(1, n_rows), (-1, 1)):
        error, labels = 0.0, list[int]()
        for shown in aucs.tolist():
            fits = [abs(shown - auc_of([*labels, one], n_positive, n_rows, sign)) for one in (0, 1)]
            labels.append(int(np.argmin(fits)))
            error += min(fits)
        if error < best:
            best, read = error, np.array(labels)
    return read


def auc_of(moved: Sequence[int], n_positive: int, n_rows: int, sign: int) -> float:
    """AUC where some rows are below (or above) all others, each more than those after it."""
    n_negative, labels = n_rows - n_positive, np.array(moved)
    tied = n_positive - labels.sum(), n_negative - (1 - labels).sum()
    if min(tied) < 0:
        return np.inf
    wins = 0.5 * tied[0] * tied[1]
    if sign < 0:  # a positive row below all negative ones wins against none but those before it
        wins += (tied[0] * (1 - labels)).sum()
        wins += (labels * (np.cumsum(1 - labels))).sum()
    else:
        wins += (tied[1] * labels).sum()
        wins += ((1 - labels) * np.cumsum(labels)).sum()
    return float(wins / (n_positive * n_negative))
