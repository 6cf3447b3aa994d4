"""Sums of a passive party that are not those of its rows end a SecureBoost run by its name."""

import numpy as np
import pytest

from clients.secureboost import passive
from clients.secureboost.passive import Passive
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.workers import Workers
from tests.tables import write_rows
from tests.tampering import refuses

SIDE, NOISE, VALUE, KIND = range(4)  # columns of party-2
SMALLER, LARGER = 0, 1  # which side of SIDE has more rows


@pytest.fixture
def made(vertical, tmp_path):
    """Settings of a run whose first split is by ``side``, and whose second ones by ``value``."""

    def make(**more):
        rng = np.random.default_rng(5)
        side, value = (rng.random(240) < 0.7).astype(int), rng.integers(0, 8, 240)
        columns = {"side": side, "noise": rng.integers(0, 8, 240), "value": value}
        columns["kind"] = rng.choice(list("uvwxyz"), 240)
        labels = (value > np.where(side, 0, 6)).astype(int)
        if more.get("objective") == "multi:softprob":
            labels += value > 6
        columns = {"a": rng.integers(0, 3, 240), **columns, "y": labels}
        data = write_rows(tmp_path / "rows.csv", columns)
        shared = {"data": str(data), "label": "y", "columns": "sizes:1,4", "valid_fraction": 0.0}
        return vertical(**{**shared, **more})

    return make


# Sums of other rows than those that move: the rows have other bins while they are summed


def labels_of(codes):
    return codes[:, VALUE] > np.where(codes[:, SIDE], 0, 6)


def by_label(codes, widths):
    codes[:, NOISE] = np.where(labels_of(codes), widths[NOISE] - 1, 0)


def missing_by_label(codes, widths):
    codes[labels_of(codes), NOISE] = widths[NOISE]


def category_by_label(codes, widths):
    codes[:, KIND] = labels_of(codes)


def of_children(side):
    """The bins of another column, which gains most in one of the children of the first split."""

    def lie(codes, widths):
        codes[:, NOISE] = codes[:, [NOISE, VALUE]][range(len(codes)), 1 * (codes[:, SIDE] == side)]

    return lie


ONE_TREE = {"objective": "multi:softprob", "multi_strategy": "multi_output_tree"}
LIES = {
    "in the last level": (by_label, NOISE, {"max_depth": 1}),
    "as missing rows": (missing_by_label, NOISE, {}),
    "of categories": (category_by_label, KIND, {}),
    "of the smaller child": (of_children(SMALLER), NOISE, {}),
    "of the larger child, by difference": (of_children(LARGER), NOISE, {}),
    "of a tree of all classes": (
        *(by_label, NOISE),
        {**ONE_TREE, "drop_columns": "kind", "columns": "sizes:1,3"},
    ),
    "of parallel trees": (by_label, NOISE, {"num_parallel_tree": 2, "subsample": 0.6}),
}


@pytest.mark.parametrize(("lie", "column", "more"), LIES.values(), ids=LIES)
def test_a_split_by_sums_of_other_rows_is_refused(made, monkeypatch, lie, column, more):
    sum_otherwise(monkeypatch, lie)
    rule = f"must be of rows with the sums that were claimed of column {column + 1} in round 1"
    refuses(f"^party-2.*: Partition.bits {rule}: other sums show labels$", made(**more))


def sum_otherwise(patch, lie):
    """Party-2 sums rows as if they had other bins."""
    honest = Passive.encrypted_sums

    def sums(party):
        true = party.codes
        if party.name == "party-2":
            party.codes = true.copy()
            lie(party.codes, party.cuts.widths)
        letter, party.codes = honest(party), true
        return letter

    patch.setattr(Passive, "encrypted_sums", sums)


# Sums that no rows have

UNIT = 1 << 53


def added(gradients, hessians):
    """Wraps the packing of sums: numbers are added to the bins of the root."""

    def wrap(honest):
        def pack(key, sums, layout, workers):
            ring, width = ring_of(key.n_squared), layout.field_bits
            numbers = [
                (gradients.get(bin_id, 0) << width) + hessians.get(bin_id, 0)
                for bin_id in range(len(sums))
            ]
            changes = ring.read(encrypt(key, numbers, Workers(1)))
            return honest(key, ring.multiply(sums, changes), layout, workers)

        return pack

    return wrap


# Bins 0 and 1 are of the first column, 2 to 9 of the second.
IMPOSSIBLE = {
    "a little more than the node": (added({2: 1}, {}), NOISE),
    "less than the node": (added({}, {0: -1}), SIDE),
    "gradients that only more rows have": (added({3: 90 * UNIT, 4: -90 * UNIT}, {}), NOISE),
}


@pytest.mark.parametrize(("wrap", "column"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_sums_that_no_rows_have_are_refused(made, monkeypatch, wrap, column):
    monkeypatch.setattr(passive, "pack_sums", wrap(passive.pack_sums))
    rule = f"must be sums that rows of the nodes can have, got others of column {column + 1}"
    refuses(f"^party-2.*: EncryptedSums.ciphertexts {rule} in round 1$", made(max_depth=1))
