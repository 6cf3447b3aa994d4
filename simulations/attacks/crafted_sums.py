"""What a passive party of SecureBoost reads of labels by sums, or sides, not of its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from clients.secureboost.passive import Passive
from clients.secureboost.round import Chosen, Claims
from clients.secureboost.target import Target
from clients.vertical import ciphertexts
from clients.vertical.growing import SplitList, Trees
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import PRECISION, Layout
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import PublicKey
from fedapp.crypto.rings import Residues
from fedapp.crypto.sums import pack_sums
from fedapp.crypto.workers import Workers
from fedapp.messages.secureboost import EncryptedGradients, EncryptedSums, Splits
from fedapp.run_files import RunFiles
from fedapp.runs.baselines import join_tables
from fedapp.settings import load_settings
from fedapp.site.mail import Letters
from fedapp.trees.categories import CategorySets
from fedapp.trees.divided import Lookup
from simulations.attack import misled, tabled
from simulations.attacks.vertical import ACTIVE, SECUREBOOST
from simulations.study import Row

Ints = npt.NDArray[np.int64]
Doubles = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
# All trees are stumps, so a round has one split; of categories trees are deep.
STUMPS: dict[str, Any] = {"data": "default-credit", "columns": "sizes:5,18", "max-depth": 1}
DEEP: dict[str, Any] = {"data": "adult", "columns": "sizes:6,8", "max-depth": 6}
DEEP |= {"min-child-weight": 0.0}
TABLE_ROWS = {"default-credit": 30_000, "adult": 48_842}
SHARE = 16  # of the rows: what a made-up sum adds, and how often it has the target


@dataclass(slots=True)
class Liar:
    """A passive party that makes up columns, or only their sums, so that the choice shows labels.

    ``labels`` are the truth, of which it knows on which side of a true split more are positive.
    """

    labels: Bools
    read: dict[int, bool] = field(default_factory=dict)  # labels by row
    asked: list[int] = field(default_factory=list)  # in this round
    lefts: Bools = field(default_factory=lambda: np.empty(0, bool))  # rows by a true split
    invented: Ints = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # columns that it makes up
    is_positive: bool = False  # whether more of these are than of others
    codes: Any = None  # its true columns
    values: Any = None

    def begin(self, party: Passive) -> None:
        """Make up what the round needs, before its first sums."""

    def sums(self, party: Passive, key: PublicKey, sums: Residues, layout: Layout) -> Residues:
        """Sums by bin in place of those of its columns."""
        return sums

    def learn(self, party: Passive, letter: Splits) -> None:
        """Read labels from a split of its columns."""

    def next(self, most: int) -> list[int]:
        """Rows to ask for in this round."""
        self.asked = [row for row in range(len(self.labels)) if row not in self.read][:most]
        return self.asked


@contextmanager
def unchecked(but: Collection[str] = ()) -> Iterator[None]:
    """An active party does not check sums, except by methods of these names."""
    with ExitStack() as stack:
        for kind, name in ((Claims, "check_sums"), (Chosen, "check_sides")):
            if name not in but:
                stack.enter_context(patch.object(kind, name, lambda *given: None))
        yield


class Numbers(Liar):
    """Two columns whose sums in a bin are (B, H) and (-B, H), plus K times those of a row.

    No rows have such sums. Which gains more is the sign of the row's gradient.
    """

    def sums(self, party: Passive, key: PublicKey, sums: Residues, layout: Layout) -> Residues:
        ring, target, n_rows = ring_of(key.n_squared), self.next(1), len(party.gradients.rows)
        place = int(np.searchsorted(party.gradients.rows, target[0]))
        (row,) = party._encrypted.between(place, place + 1)
        added = (n_rows // SHARE) << PRECISION
        pairs = [(sign * added << layout.field_bits) + added // 2 for sign in (1, -1)]
        times = ring.power(ring.read(row), n_rows // SHARE)
        changed_bins = ring.multiply(
            ring.read(encrypt(key, pairs, Workers(1))), np.repeat(times, 2, 0)
        )
        ends = np.cumsum(party.table.cuts.widths[party.gradients.columns])
        changed = ring.ones(len(sums))
        changed[ends[1] :], changed[[0, ends[0]]] = sums[ends[1] :], changed_bins
        return changed

    def learn(self, party: Passive, letter: Splits) -> None:
        if letter.columns[0] < 2:
            self.read[self.asked[0]] = bool(letter.columns[0])


class Rows(Liar):
    """Sums of made-up columns: a true split, with each subset of the targets on the left.

    Other targets are on the right. The one that gains most has the targets of one label. The split
    is the last that was chosen of its true columns, so the first round is honest.
    """

    moves = False  # whether its rows move by these columns, too

    def begin(self, party: Passive) -> None:
        if self.values is None:
            self.codes, self.values = party.table.codes, party.values
        if not len(self.lefts):
            return
        numeric = np.flatnonzero(~party.table.cuts.by_category & (party.table.cuts.widths > 1))
        self.invented = numeric[: 1 << (len(numeric).bit_length() - 1)]
        asked = self.next(len(self.invented).bit_length() - 1)
        codes, values = self.codes.copy(), self.values.copy()
        for subset, column in enumerate(self.invented):
            lefts = self.lefts.copy()
            lefts[asked] = [bool(subset >> number & 1) for number in range(len(asked))]
            codes[:, column] = ~lefts
            edge = party.table.cuts.edges[party.table.cuts.offsets[column]]
            values[: len(lefts), column] = np.where(lefts, edge - 1, edge)
        party.table = replace(party.table, codes=codes)
        if self.moves:
            party.values = values

    def learn(self, party: Passive, letter: Splits) -> None:
        if letter.columns[0] in self.invented:
            subset = int(np.flatnonzero(self.invented == letter.columns[0])[0])
            for number, row in enumerate(self.asked):
                self.read[row] = bool(subset >> number & 1) == self.is_positive
        else:
            bits = np.unpackbits(party.trees.sides[party.name])
            self.lefts = bits[: party.n_train].astype(bool)
            shares = (self.labels[self.lefts].mean(), self.labels[~self.lefts].mean())
            self.is_positive = shares[0] > shares[1]


class Columns(Rows):
    """The same, and its rows move by the made-up columns: no sum is false."""

    moves = True


class Categories(Liar):
    """Random categories in each round; a node's rows that have one of their own are read.

    Their owner's order of categories is random, and those of lowest weight go right.
    """

    def begin(self, party: Passive) -> None:
        column = int(np.argmax(party.table.cuts.widths * party.table.cuts.by_category))
        n_rows, width = party.n_train, int(party.table.cuts.widths[column])
        self.invented = np.array([column])
        codes, values = party.table.codes.copy(), party.values.copy()
        drawn = np.random.default_rng(len(self.read)).permutation(n_rows) % width
        codes[:, column], values[:n_rows, column] = drawn, drawn
        party.table, party.values = replace(party.table, codes=codes), values

    def learn(self, party: Passive, letter: Splits) -> None:
        of_invented = letter.columns == self.invented[0]
        local = party.trees.local(letter)
        widths = party.table.cuts.categories[letter.columns]
        sets = CategorySets(letter.set_bits, widths[widths > 0])
        numbers = np.cumsum(widths > 0) - 1
        for split, number in zip(local[of_invented], numbers[of_invented], strict=True):
            nodes = party.trees.nodes[letter.trees[split], : party.n_train]
            rows = np.flatnonzero(nodes == letter.nodes[split])
            codes, goes_right = party.table.codes[rows, self.invented[0]], sets.members(int(number))
            is_alone = np.bincount(codes, minlength=len(goes_right))[codes] == 1
            for row, code in zip(rows[is_alone], codes[is_alone], strict=True):
                self.read.setdefault(int(row), not goes_right[code])


LIES: dict[str, type[Liar]] = {
    "sums of no rows": Numbers,
    "sums of other rows": Rows,
    "made-up columns": Columns,
    "made-up categories": Categories,
}
# What the active party checks: that rows of the node can have the sums, and that those have them
# that are sent to a side.
CHECKS = {"nothing": (), "possible": ("check_sums",), "all": ("check_sums", "check_sides")}


def crafted_sums(
    lies: tuple[str, ...] = tuple(LIES), rows: int = 2000, rounds: int = 30, key_bits: int = 512
) -> Iterator[Row]:
    """Labels that a dishonest passive party of SecureBoost reads from what is chosen of its sums.

    The active party chooses the split of the largest gain, and its owner learns which of its
    columns that is. So a party makes up sums of which one or the other gains most, by the label of
    a row. ``python -m simulations attacks crafted_sums`` trains on ``--rows`` rows for ``--rounds``
    rounds, first without checks, then with each of ``CHECKS``. ``labels`` are read before the
    run ends, of which ``right`` are true; the party knows on which side of a true split positive
    labels are more frequent. No sum of columns that are made up with their rows is false, so
    ``fedapp.histograms.claimed.disclosed_labels`` is all that bounds them. A category of one row
    has a weight only with a ``min-child-weight`` below its hessian.
    """
    rows_of_lies = (
        {"lie": lie, "checked": checks, **lied(config_of(lie, rows, rounds, key_bits), lie, checks)}
        for lie in lies
        for checks in CHECKS
    )
    yield from tabled(f"{rows} rows", "lie; checked; rounds; labels; right; ended", rows_of_lies)


def config_of(lie: str, rows: int, rounds: int, key_bits: int) -> Row:
    """Settings of a run with a lie."""
    table = DEEP if lie == "made-up categories" else STUMPS
    config = {**SECUREBOOST, **table, "eta": 0.1, "num-boost-round": rounds}
    config |= {"test-fraction": 1 - rows / TABLE_ROWS[table["data"]]}
    return config | {"secureboost.key-bits": key_bits}


def lied(config: Row, lie: str, checks: str) -> Row:
    """Train with a liar; without those of the active party's checks that are not named."""
    table, _, _ = join_tables(load_settings(config))
    labels = table.labels[table.split.train] == 1
    liar, n_rounds = LIES[lie](labels), 0
    honest_begin, honest_sums = Passive._begin, Passive.encrypted_sums
    honest_take = Passive._take_splits

    def begin(party: Passive, letter: EncryptedGradients) -> None:
        nonlocal n_rounds
        n_rounds += 1
        honest_begin(party, letter)
        liar.begin(party)

    def sums(party: Passive, *wanted: Any) -> EncryptedSums:
        def packed(key: Any, of_bins: Any, layout: Any, workers: Workers) -> Any:
            return pack_sums(key, liar.sums(party, key, of_bins, layout), layout, workers)

        with patch.object(ciphertexts, "pack_sums", packed):
            return honest_sums(party, *wanted)

    def take(party: Passive, letter: Splits) -> Letters:
        letters = honest_take(party, letter)
        if len(letter.columns):
            liar.learn(party, letter)
        return letters

    with misled(
        config,
        patch("fedapp.kernels.n_cores", lambda: 1),
        patch.object(Passive, "_begin", begin),
        patch.object(Passive, "encrypted_sums", sums),
        patch.object(Passive, "_take_splits", take),
        unchecked(CHECKS[checks]),
    ) as (_, error):
        ended = str(error or "")
    right = sum(labels[row] == label for row, label in liar.read.items())
    return {"rounds": n_rounds, "labels": len(liar.read), "right": int(right), "ended": ended}


# held_out_sides


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
    scores, truth = scores_of_false_sides(config)
    lines = list[Row]()
    for digits in (16, 6, 4, 3):
        read = labels_of_scores(np.round(scores, digits), len(truth))
        right = int((read == truth[:rounds]).sum())
        line = {"data": data, "digits": digits, "labels": rounds}
        lines.append({**line, "right": max(right, rounds - right)})
    heading = f"{data}, {rounds} rounds, {len(truth)} validation rows"
    yield from tabled(heading, "digits; labels; right", lines)


def scores_of_false_sides(config: Row) -> tuple[Doubles, Ints]:
    """The AUC of each round, which sends one more validation row left, and the labels of all."""
    honest, score = Trees.made, Target.by_subset
    truth, valid, n_rounds = np.empty(0, np.int64), slice(0), 0

    def made(trees: Trees, level: SplitList, splits: Lookup, values: Any) -> Trees:
        nonlocal n_rounds
        after = honest(trees, level, splits, values)
        if trees.party == ACTIVE:
            return after
        sides = np.unpackbits(after.sides[trees.party], count=len(values)).astype(np.bool_)
        sides[valid] = False
        sides[valid.start + n_rounds] = True
        n_rounds += 1
        return replace(after, sides={**after.sides, trees.party: np.packbits(sides)})

    def noted(target: Target, margins: Any) -> Any:
        nonlocal truth, valid
        valid = target.n_rows.of("valid")
        truth = target.numbers[valid].astype(np.int64)
        return score(target, margins)

    changes = (patch.object(Trees, "made", made), patch.object(Target, "by_subset", noted))
    with misled(config, *changes) as (run, _):
        assert run is not None
        return np.array([line["valid"]["auc"] for line in RunFiles(run.path).rounds]), truth


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
