"""What passive parties read of labels by sums that are not those of their rows.

``described_labels`` is about ``describe --vertical``, ``forest_sums`` about Federated Forest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
from clients.vertical.growing import SplitList, Trees
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.rings import from_bytes_array, to_bytes_array
from fedapp.crypto.rings import product as product_of
from fedapp.crypto.sums import SumJob, pack_sums, pack_terms
from fedapp.crypto.workers import shared_workers
from fedapp.data.datasets import read_source
from fedapp.messages.describe import CellSums, ColumnsReply, FinishRequest, SumRequest
from fedapp.messages.federated_forest import ColumnSums
from fedapp.messages.federated_forest import SumRequest as ForestSumRequest
from fedapp.messages.fields import fields_of
from fedapp.metrics.tables import association, count_cells, readable_labels, rounded_figures
from fedapp.runs.local import site_contexts
from fedapp.site.mail import Letters, Mail
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.cart import DRAWN
from fedapp.trees.forest.encrypted import LeftClaims, Listing
from fedapp.trees.predict import rows_at
from simulations.attack import Change, misled, tabled
from simulations.attacks.vertical import FOREST
from simulations.study import Row

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
        encrypted, n_rows = party.encrypted, party.n_train
        key, layout = encrypted.public_key, encrypted.layouts[0]
        n_squared, of_rows = key.n_squared, from_bytes_array(np.concatenate(encrypted.blocks))
        ring = ring_of(n_squared)
        total, sums = product_of(ring, ring.take(of_rows)), list[mpz]()
        for rows in self.rows.tolist():
            powers = [powmod(of_rows[row], 1 << power, n_squared) for power, row in enumerate(rows)]
            inside = product_of(ring, ring.take(powers))
            sums += [mpz(1), inside, total * powmod(inside, -1, n_squared) % n_squared]
        cells, n_columns = [0, self.n_inside, n_rows - self.n_inside], len(self.rows)
        letter = CellSums(
            widths=np.full(n_columns, 3),
            is_number=np.ones(n_columns, np.uint8),
            counts=np.tile(cells, n_columns),
            ciphertexts=pack_sums(key, ring.take(sums), layout, shared_workers()),
        )
        counts, _ = count_cells(party.rows, party.summary.cuts)
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
    columns = "sharing; rows; columns; labels; tried; right; bound"
    lines = ({"data": data, **described_once(labels, n_columns, n_labels, how)} for how in sharing)
    yield from tabled(f"{data}, {n_labels} labels a column", columns, lines)


def described_once(labels: Ints, n_columns: int, n_labels: int, sharing: str) -> Row:
    """One description of two sites, and what the one without labels reads."""
    rng, n_rows, nodes, seen = np.random.default_rng(0), len(labels), list[Row](), dict[str, Any]()
    names = [f"c{column}" for column in range(n_columns)]
    ids = [f"r{row}" for row in range(n_rows)]
    columns = rng.integers(0, 2, (n_columns, n_rows))
    tables = {
        ACTIVE: {"id": ids, "age": rng.integers(0, 9, n_rows), "y": labels},
        PASSIVE: {"id": ids, **dict(zip(names, columns, strict=True))},
    }
    finish = Encrypting.finish

    def sum_cells(party: Summing, request: SumRequest, mail: Mail) -> tuple[ColumnsReply, Letters]:
        chosen = np.random.default_rng(1).permutation(party.n_train)[: n_columns * n_labels]
        attack = seen["attack"] = FalseCells(chosen.reshape(n_columns, n_labels))
        return attack.sum_cells(party, request, mail)

    def noted(
        party: Encrypting, request: FinishRequest, mail: Mail
    ) -> tuple[ColumnsReply, Letters]:
        seen["truth"] = party.rows[:, -1].copy()
        return finish(party, request, mail)

    changes: list[Change] = [
        patch.object(Summing, "sum_cells", sum_cells),
        patch.object(Encrypting, "finish", noted),
    ]
    if sharing == "exact":
        changes += [
            patch.object(clients_describe, "rounded_figures", lambda figures: figures),
            patch.object(Encrypting, "_shares_figures", lambda party, n: True),
        ]
    settings: Row = {"strategy": "describe-columns", "parties": 2, "objective": "binary:logistic"}
    with TemporaryDirectory() as folder:
        for name, of_site in tables.items():
            csv.write_csv(table(of_site), f"{folder}/{name}.csv")
            node: Row = {"name": name, "data": f"{folder}/{name}.csv", "id": "id"}
            node |= {"allow": "describe-columns", "allow-insecure": True, **OFTEN}
            nodes.append(node | ({"label": "y"} if name == ACTIVE else {}))
        if sharing == "rounded":
            nodes[0]["share-label-figures"] = True
        contexts = site_contexts(nodes)
        with misled({**settings, **SMALL_KEY}, *changes, contexts=contexts) as (run, error):
            if run is None:
                raise error or AssertionError
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
        if party.forest.trees.structure.level:
            return self.honest_sums(party, level)
        trees, n_train = party.forest.open_to(level)[0], party.n_train
        values = party.values[:n_train, self.column]
        below, drawn = values < np.quantile(values, QUANTILE), party.forest.counts > 0
        rng = np.random.default_rng(2)
        # A row that its tree draws once, so that one ciphertext is one row.
        self.rows = np.array(
            [rng.choice(np.flatnonzero(counts == 1)) for counts in party.forest.counts]
        )
        self.lefts = np.repeat(np.tile(below, (2, 1))[None], len(trees), axis=0)
        for tree, row in enumerate(self.rows):
            self.lefts[tree, :, row] = True, False
        key, (ciphertexts,) = party.encrypted.public_key, party.encrypted.blocks
        of_rows = from_bytes_array(ciphertexts[self.rows])
        inverses = [powmod(of_row, -1, key.n_squared) for of_row in of_rows]
        negatives = to_bytes_array(inverses, key.ciphertext_bytes)
        jobs, sizes, more = list[SumJob](), list[int](), self.n_times - 1
        for tree, row in enumerate(self.rows):
            (inside,) = np.nonzero(drawn[tree])
            counts = np.append(party.forest.counts[tree], np.ones(len(self.rows))).astype(np.uint8)
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
        blocks, layout = (ciphertexts, negatives), party.encrypted.layouts[0]
        sums = pack_terms(key, blocks, jobs, layout, shared_workers())
        return ColumnSums(level=0, **fields_of(party.listing, Listing), ciphertexts=sums)

    def made(self, trees: Trees, level: SplitList, splits: Lookup, values: Any) -> Trees:
        """Note which columns were chosen; send rows left as claimed if that is consistent."""
        after, local = self.honest_made(trees, level, splits, values), trees.local(level)
        if trees.structure.level or not trees.number:  # the active party is the first
            return after
        self.chosen = dict(zip(level.trees[local].tolist(), splits.columns.tolist(), strict=True))
        if self.is_consistent:
            rows, sizes = rows_at(trees.nodes, level.trees[local], level.nodes[local])
            by_tree = np.split(rows, np.cumsum(sizes)[:-1])  # all splits are of roots
            held = np.zeros(len(values) - self.lefts.shape[2], np.bool_)
            sides = [
                np.append(self.lefts[tree, column], held)[of_tree]
                for (tree, column), of_tree in zip(self.chosen.items(), by_tree, strict=True)
            ]
            bits = np.packbits(np.concatenate(sides))
            after = replace(after, sides={**after.sides, trees.party: bits})
        return after

    honest_sums = staticmethod(PaillierPassive.sum_columns)
    honest_made = staticmethod(Trees.made)


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
    config = {**FOREST, "data": data, "federated-forest.trees": trees}
    lines = (
        {"columns": columns, "checked": is_checked}
        | forest_once(
            config,
            FalseColumns(column, times if columns == "false" else 1, columns == "true"),
            is_checked,
        )
        for columns, is_checked in (("false", False), ("false", True), ("true", True))
    )
    columns = "columns; checked; trees; labels; right; ended"
    yield from tabled(f"{data}, {trees} trees", columns, lines)


def forest_once(config: Row, attack: FalseColumns, is_checked: bool) -> Row:
    """One forest, and what the passive party reads at its roots."""
    truth, send = np.empty(0), PaillierActive._send

    def noted(party: PaillierActive, letter: Any) -> Letters:
        nonlocal truth
        truth = party.forest.labels.targets.copy()
        return send(party, letter)

    changes: list[Change] = [
        patch.object(PaillierActive, "_send", noted),
        patch.object(PaillierPassive, "sum_columns", lambda *given: attack.sum_columns(*given)),
        patch.object(Trees, "made", lambda *given: attack.made(*given)),
    ]
    if not is_checked:
        changes.append(patch.object(LeftClaims, "first_false", lambda claims, lefts: None))
    with misled(config, *changes) as (_, error):
        ended = str(error or "")
    trees = np.array([*attack.chosen], np.int64)
    rows, more = attack.rows[trees], np.array([*attack.chosen.values()]) == 0
    below = attack.lefts[0, 0]
    is_frequent = truth == np.round(truth[below].mean())  # on the left
    right = int((is_frequent[rows] == more).sum())
    return {"trees": len(attack.rows), "labels": len(trees), "right": right, "ended": ended}
