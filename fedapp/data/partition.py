"""Split rows into training, validation and test rows, and deal rows or columns out to parties."""

from __future__ import annotations

import hashlib
import itertools
import re
import string
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fedapp.data.convert import as_dates, day_number, is_date
from fedapp.errors import ConfigError, DataError, listed

Rows = npt.NDArray[np.int64]
Texts = npt.NDArray[np.str_]

RULES = ("iid", "dirichlet:ALPHA", "sizes:A,B,...", "column:NAME")
LONGEST_NAME = 20  # of a party that a value names
OTHER_LETTERS = re.compile(r"[^A-Za-z0-9._-]+")
DRAWS = 100
DIGEST_BYTES = 16
SUBSETS = ("train", "valid", "test")
LEFT_OUT = len(SUBSETS)  # in place of a subset's number, of rows that are not used
WATCHED = ("train", "valid")  # scored in every round
HELD_OUT = ("valid", "test")
# A float label with more distinct values than this is cut into bins of equal size.
MAX_CLASSES = 20
N_LABEL_BINS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """Disjoint row numbers of one table by use: int64, one axis; `train` is not empty."""

    train: Rows
    valid: Rows
    test: Rows


@dataclass(frozen=True, slots=True)
class Holdout:
    """Which rows are held back from training."""

    test_fraction: float  # of all rows, in [0, 1); ignored with folds
    valid_fraction: float  # of the rows that are not for test, in [0, 1)
    seed: int  # >= 0; the same seed draws the same rows
    fold: int = 0  # the fold that tests, in [1, folds]; 0 without folds
    folds: int = 0  # number of folds of equal size; 0: none
    score_test: bool = True  # whether test rows are scored; if not, they are dropped
    group: str = ""  # column whose rows are in one subset; empty: the id's, where ids repeat
    test_from: str = ""  # COLUMN:DATE or COLUMN:NUMBER, with folds one each, separated by commas
    valid_from: str = ""  # the same; empty: validation rows are drawn

    @classmethod
    def of(cls, opening: Mapping[str, Any]) -> Self:
        """That of a run's opening, by the names of its fields."""
        names = {field.name for field in fields(cls)} & {*opening}
        return cls(**{name: opening[name] for name in names})

    @property
    def time_column(self) -> str:
        """The column by which rows are held back; empty: they are drawn."""
        return self.test_from.partition(":")[0]

    @property
    def holds_back(self) -> bool:
        """Whether there should be test rows, and they are scored."""
        return self.score_test and bool(self.folds or self.test_from or self.test_fraction)

    def check(self) -> None:
        """Check that the fold is one, and that times have their form; raises ConfigError."""
        check_fold(self.fold, self.folds)
        check_times(self.test_from, self.valid_from, self.folds)

    def in_words(self) -> dict[str, str]:
        """Which rows test and which validate."""
        column, first = self.time_column, max(self.fold, 1) - 1
        test, *until = listed(self.test_from.partition(":")[2])[first:][:2] or [""]
        held = f"fold {self.fold} of {self.folds}" if self.folds else str(self.test_fraction)
        times = f"those of {column} from {test} on" + "".join(f", before {time}" for time in until)
        valid = f"{self.valid_fraction} of the others"
        if self.valid_from:
            start = listed(self.valid_from.partition(":")[2])[first]
            valid = f"those of {column} from {start} on, before the test rows"
        elif test:
            valid = (
                f"{self.valid_fraction} of those before the test rows, drawn with seed {self.seed}"
            )
        return {
            "test": times if test else f"{held}, drawn with seed {self.seed}",
            "validation": valid,
        }

    def split(self, n_rows: int) -> Split:
        """Draw the test rows of a table, by fraction or fold, then validation rows from the others.

        Raises ConfigError if a fraction, a fold or the number of rows breaks its rule.
        """
        if self.folds:
            check_fold(self.fold, self.folds)
            if n_rows < self.folds:
                rule = f"folds must be at most the {n_rows} rows of a table"
                raise ConfigError(f"{rule}, got {self.folds}")
            _check_fraction("valid-fraction", self.valid_fraction)
            parts = np.array_split(_shuffled(n_rows, self.seed), self.folds)
            test = parts.pop(self.fold - 1)
            split = _split(test, np.concatenate(parts), self.valid_fraction)
        else:
            split = split_rows(n_rows, self.test_fraction, self.valid_fraction, self.seed)
        return split if self.score_test else replace(split, test=split.test[:0])

    def split_groups(self, groups: Texts, is_whole: bool) -> Split:
        """Draw groups, whose rows are all in one subset.

        Parties with tables of their own draw by a digest of the group's name, so that a group is in
        the same subset at all of them; their numbers of groups are then those of chance. Where one
        table is split (``is_whole``), they are exact.
        """
        names, group_ids = np.unique(groups, return_inverse=True)
        if len(names) < self.folds:
            rule = f"must be at most the {len(names)} groups of rows that are held back together"
            raise ConfigError(f"folds {rule}, got {self.folds}")
        split = self.split(len(names)) if is_whole else self._drawn_by_name(names)
        if not len(split.train):
            rule = f"must have training rows, got none, of {len(names)} groups of rows"
            raise DataError(f"table {rule}: another seed or fewer test rows may leave some")
        return Split(*(np.flatnonzero(np.isin(group_ids, getattr(split, of))) for of in SUBSETS))

    def _drawn_by_name(self, names: Texts) -> Split:
        seed = self.seed.to_bytes(8, "little")
        digests = (keyed_digests(names.tolist(), seed + use) for use in (b"test", b"valid"))
        # Each name has two numbers in [0, 1), of 53 bits.
        of_test, of_valid = ((bits[:, 0] >> np.uint64(11)) * 2.0**-53 for bits in digests)
        if self.folds:
            check_fold(self.fold, self.folds)
            is_test = (of_test * self.folds).astype(np.int64) == self.fold - 1
        else:
            is_test = of_test < self.test_fraction
        is_valid = ~is_test & (of_valid < self.valid_fraction)
        rows = np.arange(len(names), dtype=np.int64)
        split = Split(rows[~is_test & ~is_valid], rows[is_valid], rows[is_test])
        return split if self.score_test else replace(split, test=rows[:0])

    def split_times(
        self, times: npt.NDArray[Any], groups: Texts | None, keeps_groups: bool, is_whole: bool
    ) -> Split:
        """Hold back rows from a time on; of folds, each has the next rows, and all before train.

        Validation rows are drawn from those before, if they have no time of their own. With
        ``keeps_groups`` rows are left out that come later, of groups that came earlier.
        """
        self.check()
        starts = _times_of("test-from", self.test_from, times)
        first = max(self.fold, 1) - 1
        later = times >= starts[first]
        test = np.flatnonzero(later & (times < starts[first + 1]) if starts[first + 1 :] else later)
        before = np.flatnonzero(~later)
        if not len(before):
            rule = f"must leave training rows, which come before, got none at {self.test_from}"
            raise DataError(f"test-from {rule}: name a later time")
        if self.valid_from:
            start = _times_of("valid-from", self.valid_from, times)[first]
            if not start < starts[first]:
                rule = f"must be before test-from ({self.test_from})"
                raise ConfigError(f"valid-from {rule}, got {self.valid_from}")
            is_valid = times[before] >= start
            train, valid = before[~is_valid], before[is_valid]
            if not len(train):
                rule = f"must leave training rows, which come before, got none at {self.valid_from}"
                raise DataError(f"valid-from {rule}: name a later time")
        else:
            others = replace(self, test_fraction=0.0, fold=0, folds=0)
            split = others.split(len(before))
            if groups is not None:
                split = others.split_groups(groups[before], is_whole)
            train, valid = before[split.train], before[split.valid]
        if keeps_groups and groups is not None:
            test = test[~np.isin(groups[test], groups[before])]
            valid = valid[~np.isin(groups[valid], groups[train])]
        return Split(train, valid, test if self.score_test else test[:0])


def split_numbered(rows: Rows, numbers: npt.NDArray[np.uint8]) -> Split:
    """Split rows by the number of each one's subset, in their order."""
    return Split(*(rows[numbers[rows] == number] for number in range(len(SUBSETS))))


def split_queries(rows: Rows, queries: Rows, holdout: Holdout) -> Split:
    """Split rows of these queries, which are drawn whole: fractions and folds are of queries."""
    numbers, query_ids = np.unique(queries, return_inverse=True)
    split = holdout.split(len(numbers))
    return Split(*(rows[np.isin(query_ids, getattr(split, subset))] for subset in SUBSETS))


def check_fold(fold: int, folds: int) -> None:
    """Check that `fold` is one of `folds`, or that both are 0; raises ConfigError."""
    if folds == 1:
        raise ConfigError("folds must be 0 (none) or >= 2, got 1")
    if not (1 <= fold <= folds or fold == folds == 0):
        rule = f"must be in [1, {folds}] with folds={folds}" if folds else "must be 0 without folds"
        raise ConfigError(f"fold {rule}, got {fold}; fedapp compare --folds runs all of them")


def split_rows(n_rows: int, test_fraction: float, valid_fraction: float, seed: int) -> Split:
    """Draw test rows from all rows, then validation rows from the others.

    Parameters
    ----------
    test_fraction : of all rows, in [0, 1).
    valid_fraction : of the rows that are not for test, in [0, 1).
    seed : >= 0; the same seed draws the same rows.

    Returns
    -------
    Split : sorted; counts are rounded, but at least one row trains.
    """
    _check_fraction("test-fraction", test_fraction)
    _check_fraction("valid-fraction", valid_fraction)
    if n_rows < 1:
        raise ConfigError(f"n_rows must be >= 1, got {n_rows}")
    n_test = min(round(n_rows * test_fraction), n_rows - 1)
    rows = _shuffled(n_rows, seed)
    return _split(rows[:n_test], rows[n_test:], valid_fraction)


def check_times(test_from: str, valid_from: str, folds: int) -> None:
    """Check that each is COLUMN:TIME of one column, with folds a time each; raises ConfigError."""
    for name, text in (("test-from", test_from), ("valid-from", valid_from)):
        column, _, times = text.partition(":")
        if not text:
            continue
        if not column or not times:
            raise ConfigError(f"{name} must be COLUMN:TIME, as in booked:2024-07-01, got {text}")
        if (n_times := len(listed(times))) != max(folds, 1):
            rule = f"must have {folds or 1} times, one a fold" if folds else "must have one time"
            raise ConfigError(f"{name} {rule} (booked:2023-07-01,2024-07-01), got {n_times}")
        if column != test_from.partition(":")[0]:
            rule = "must be of the column of test-from" if test_from else "must come with test-from"
            raise ConfigError(f"{name} {rule}, got {text}")


def _times_of(name: str, text: str, times: npt.NDArray[Any]) -> list[Any]:
    """The times of a setting, in the form of the column's; raises ConfigError."""
    column, _, written = text.partition(":")
    is_dates = times.dtype.kind == "M"
    parsed = list[Any]()
    for time in listed(written):
        try:
            day = day_number(time) if is_dates and is_date(time) else np.nan
            parsed.append(as_dates(np.array(day)) if is_dates else float(time))
        except ValueError:
            parsed.append(np.nan)
        if np.isnan(parsed[-1]):
            wanted = "a date, as 2024-07-01 or 2024-07-01T12:00+02:00" if is_dates else "a number"
            raise ConfigError(f"{name} must be {wanted}, as column '{column}' is, got {time}")
    if any(second <= first for first, second in itertools.pairwise(parsed)):
        raise ConfigError(f"{name} must be times that increase, got {written}")
    return parsed


def keyed_digests(names: Iterable[str], key: bytes) -> npt.NDArray[np.uint64]:
    """Digests of names under a key of any length, each as two numbers: shape (n_names, 2)."""
    key = key if len(key) <= hashlib.blake2b.MAX_KEY_SIZE else hashlib.blake2b(key).digest()
    keyed = hashlib.blake2b(key=key, digest_size=DIGEST_BYTES)
    digests = bytearray()
    for name in names:
        digest = keyed.copy()  # hashing the key again would take half of the time
        digest.update(name.encode())
        digests += digest.digest()
    return np.frombuffer(digests, dtype=">u8").reshape(-1, 2)


def _check_fraction(name: str, fraction: float) -> None:
    if not 0 <= fraction < 1:
        raise ConfigError(f"{name} must be in [0, 1), got {fraction}")


def _shuffled(n_rows: int, seed: int) -> Rows:
    return np.random.default_rng(seed).permutation(np.arange(n_rows, dtype=np.int64))


def _split(test: Rows, others: Rows, valid_fraction: float) -> Split:
    """The first of the other rows validate; at least one trains."""
    n_valid = min(round(len(others) * valid_fraction), len(others) - 1)
    valid, train = np.split(others, [n_valid])
    return Split(np.sort(train), np.sort(valid), np.sort(test))


def partition_rows(
    rule: str,
    rows: Rows,
    n_parties: int,
    rng: np.random.Generator,
    labels: npt.NDArray[Any] | None = None,
    groups: npt.NDArray[np.str_] | None = None,
) -> tuple[Rows, ...]:
    """Deal rows of one table out to parties; raises ConfigError if that is impossible.

    Parameters
    ----------
    rule : how rows are dealt.
        "iid": at random, in equal numbers.
        "dirichlet:0.3": label skew; each class is split by shares drawn from Dirichlet(0.3). A
        float label with more than 20 distinct values is first cut into 10 quantile bins.
        "sizes:0.9,0.1": at random, by fractions that sum to 1; "sizes:2721,265": by numbers of
        rows, unused rows are dropped.
        "column" or "column:NAME": all rows of a group go to one party; groups are taken from the
        most frequent on, each by the party with the fewest rows so far; one each, in the order of
        :func:`value_names`, if there are as many.
    rows : int64, shape (n,): indices into the table.
    n_parties : in [1, n].
    labels, groups : shape (n_rows,): of the whole table; required by "dirichlet" and "column".

    Returns
    -------
    tuple of n_parties int64 arrays : each sorted, none empty, disjoint.
    """
    if not 1 <= n_parties <= len(rows):
        raise ConfigError(f"number of parties must be in [1, {len(rows)}] (rows), got {n_parties}")
    name, colon, argument = rule.partition(":")
    if name == "iid" and not colon:
        shares: Sequence[Rows] = np.array_split(rng.permutation(rows), n_parties)
    elif name == "dirichlet":
        shares = _dirichlet(rule, argument, rows, n_parties, rng, labels)
    elif name == "sizes":
        shares = _cut(rng.permutation(rows), _counts(rule, argument, len(rows), n_parties))
    elif name == "column" and bool(colon) == bool(argument):
        shares = _natural(rule, rows, n_parties, groups)
    else:
        raise _broken(f"be one of {', '.join(RULES)}", rule)
    return tuple(np.sort(share) for share in shares)


def partition_columns(
    rule: str, n_columns: int, n_parties: int, rng: np.random.Generator
) -> tuple[Rows, ...]:
    """Deal the columns of one table out to parties; raises ConfigError if that is impossible.

    Parameters
    ----------
    rule : "even": adjacent columns, in equal numbers; "random": at random, in equal numbers;
        "sizes:13,10": adjacent columns, in these numbers.

    Returns
    -------
    tuple of n_parties int64 arrays : each sorted, none empty, all columns once.
    """
    columns = np.arange(n_columns, dtype=np.int64)
    if n_columns < n_parties:
        raise ConfigError(f"parties must be at most the {n_columns} columns, got {n_parties}")
    name, _, argument = rule.partition(":")
    if rule == "even":
        return tuple(np.array_split(columns, n_parties))
    if rule == "random":
        shares = np.array_split(rng.permutation(columns), n_parties)
        return tuple(np.sort(share) for share in shares)
    sizes = argument.split(",")
    if name != "sizes" or not all(size.strip().isdigit() and int(size) for size in sizes):
        raise ConfigError(f"columns must be one of even, random, sizes:A,B,..., got '{rule}'")
    counts = [int(size) for size in sizes]
    if len(counts) != n_parties or sum(counts) != n_columns:
        whole = f"{n_parties} sizes that sum to {n_columns}"
        raise ConfigError(f"columns must have {whole}, got '{rule}'")
    return tuple(np.split(columns, np.cumsum(counts)[:-1]))


def _broken(rule: str, value: str) -> ConfigError:
    return ConfigError(f"partition must {rule}, got '{value}'")


def _cut(rows: Rows, counts: Rows) -> list[Rows]:
    """Split into consecutive pieces of these lengths; surplus rows are dropped."""
    return np.split(rows, np.cumsum(counts))[: len(counts)]


def _shares(fractions: npt.NDArray[np.float64], n_rows: int) -> Rows:
    """Round fractions of n_rows to whole numbers that sum to n_rows."""
    # Differences of rounded cumulative sums: rounding errors do not add up.
    edges = np.rint(np.cumsum(fractions) / fractions.sum() * n_rows)
    shares: Rows = np.diff(edges, prepend=0).astype(np.int64)
    return shares


def _dirichlet(
    rule: str,
    argument: str,
    rows: Rows,
    n_parties: int,
    rng: np.random.Generator,
    labels: npt.NDArray[Any] | None,
) -> list[Rows]:
    """Draw until every party has min(10, a tenth of its fair share) rows."""
    try:
        alpha = float(argument)
    except ValueError:
        alpha = np.nan
    if not 0 < alpha < np.inf:
        raise _broken("be dirichlet:ALPHA with a number ALPHA > 0", rule)
    if labels is None:
        raise _broken("be iid, sizes or column for a table without labels", rule)
    classes = _classes(labels[rows])
    least = min(10.0, len(rows) / n_parties / 10)
    for _ in range(DRAWS):
        pieces: list[list[Rows]] = [[] for _ in range(n_parties)]
        for label_class in range(classes.max() + 1):
            members = rng.permutation(rows[classes == label_class])
            counts = _shares(rng.dirichlet(np.full(n_parties, alpha)), len(members))
            for party, piece in enumerate(_cut(members, counts)):
                pieces[party].append(piece)
        shares = [np.concatenate(party_pieces) for party_pieces in pieces]
        if min(map(len, shares)) >= least:
            return shares
    raise _broken(f"leave each of {n_parties} parties {least:g} rows in one of {DRAWS} draws", rule)


def _classes(labels: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Class of each label: its distinct value, or its quantile bin if there are too many."""
    values, classes = np.unique(labels, return_inverse=True)
    if len(values) <= MAX_CLASSES or not np.issubdtype(labels.dtype, np.floating):
        return classes
    edges = np.quantile(labels, np.linspace(0, 1, N_LABEL_BINS + 1)[1:-1])
    return np.searchsorted(edges, labels, side="right")


def _counts(rule: str, argument: str, n_rows: int, n_parties: int) -> Rows:
    try:
        sizes = np.array([float(size) for size in argument.split(",")])
    except ValueError:
        raise _broken("be sizes: and numbers with commas between them", rule) from None
    if len(sizes) != n_parties:
        raise _broken(f"have one size for each of {n_parties} parties", rule)
    if not np.all((sizes > 0) & np.isfinite(sizes)):
        raise _broken("have finite sizes > 0", rule)
    if abs(sizes.sum() - 1) <= 0.01:
        counts = _shares(sizes, n_rows)
    elif not np.all(sizes == np.rint(sizes)):
        raise _broken("have fractions that sum to 1, or whole numbers of rows", rule)
    elif sizes.sum() > n_rows:
        raise _broken(f"have sizes that sum to at most {n_rows} rows", rule)
    else:
        counts = sizes.astype(np.int64)
    if counts.min() < 1:
        raise _broken(f"leave every party at least one of {n_rows} rows", rule)
    return counts


def _natural(
    rule: str, rows: Rows, n_parties: int, groups: npt.NDArray[np.str_] | None
) -> list[Rows]:
    if groups is None:
        raise _broken("be iid, dirichlet or sizes for a table without a group column", rule)
    values, group_ids, counts = np.unique(groups[rows], return_inverse=True, return_counts=True)
    if len(values) < n_parties:
        needed = f"name a column with a value for each of {n_parties} parties"
        raise _broken(f"{needed} (it has {len(values)})", rule)
    if len(values) == n_parties:
        column = rule.partition(":")[2]
        return [rows[groups[rows] == value] for value in value_names(values, column).values()]
    loads = np.zeros(n_parties, np.int64)
    parties = np.empty(len(values), np.int64)
    # Greedy: the next most frequent group goes to the party with the fewest rows.
    for value_id in np.argsort(-counts, kind="stable"):
        parties[value_id] = loads.argmin()
        loads[parties[value_id]] += counts[value_id]
    return [rows[parties[group_ids] == party] for party in range(n_parties)]


def value_names(values: Sequence[str] | Texts, column: str) -> dict[str, str]:
    """The distinct values of a column by names for parties, sorted; a number follows the column's.

    Names have the letters that names of sites may have, and LONGEST_NAME at most.
    """
    named = dict[str, str]()
    for value in map(str, values):
        text = value.lstrip(string.punctuation + string.whitespace)
        text = text if text[:1].isalpha() else f"{column}-{text or 'missing'}"
        letters = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
        begin = OTHER_LETTERS.sub("_", letters)[:LONGEST_NAME].strip("._-") or "party"
        repeats = (f"{begin}-{number}" for number in itertools.count(2))
        name = begin if begin not in named else next(name for name in repeats if name not in named)
        named[name] = value
    return dict(sorted(named.items()))
