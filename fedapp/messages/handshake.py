"""The opening of a run: names and plan; in a horizontal run tables, labels and categories.

Reveals, in short:

- [family=horizontal] The server learns names and kinds of columns, names of classes and, unless the
  site withholds them, of categories, and numbers of rows.
- [family=horizontal, aggregation=plain] It learns warnings about columns, such as a value far from
  all others, and the sums of each party's labels.
- [family=horizontal] Every party learns the names of all categories and classes, but not whose they
  are.

[family=horizontal] In full: what a table looks like from the outside, sums of its labels, and the
run's plan.

``greet`` asks for names before a run opens, so that its plan can name the parties. It reveals
nothing of the table; a site need not have approved the run.

- The server learns each party's name.
- The server learns the fingerprint of the party's public key, which is the same in every run.
- The server learns the site's time, which Flower sends with each of its messages.
- Where patches of the site's Flower are off, the server learns its version, and which they are.

The plan is part of ``hello`` and ``vertical``. People at a site approve the whole opening; secrets
of pairs, and so masks and letters, depend on it. A site compares every later request and letter
with it, answers each kind of request as often as it allows, and after a step back of the server
only what it was asked before (``fedapp.site.account``).

- Each party learns the settings of the plan, and the names and fingerprints of all parties.

[family=horizontal] ``hello`` opens every horizontal run.

- The server learns each party's name, its numbers of rows, and the versions of its packages. Where
  a method copies a table that memory has no room for, it learns how much the site has free.
- The server learns the column names in order, and which columns hold numbers, only the numbers 0
  and 1 (not where only sums may leave a site), yes or no, dates, times, durations,
  categories or no value; of an ordinal also a digest of its names.
- The server learns the names of the categories that are in the party's table or that its schema
  gives. A site with ``share-categories = n`` sends only names that n rows or more of all its
  subsets have, or that its schema gives, and whether a column has others; their rows are of one
  category, ``(rare)``. A run with ``least-rows-per-name`` may ask for more than n. A site with
  ``share-categories = false`` sends no name of a category, but how many its schema gives to each
  column and a digest of them; anyone who guesses all of them can confirm the guess.
- For classification the server learns the names of the classes and which of them no training row
  has; for regression the range of the labels. Where the run leaves the objective open it learns
  both, for at most 20 whole numbers. It learns which of two classes counts as 1 if the party
  specifies it.
- The server learns the name of the column of base margins if there is one; its values stay at the
  party.
- The server learns a fingerprint of the table that only the party itself can interpret.
- The server learns the name of the column whose rows a party keeps in one subset. Who knows the
  seed and an id, or the name of a group, knows which subset its rows would be in, not whether the
  party has any.
- [aggregation=plain] The server learns warnings about the table's rows: how many have no label and
  are dropped, with the name of the label column; how many share their id with another, and how many
  test rows do with a training row; whether ids have spaces around, how many begin with zeros, and
  the name of that column; how many classes have fewer rows than ``share-categories``.
- [aggregation=plain] The server learns warnings about columns: which features have one value or
  none, number the rows or are rounded as float32; which single features have an AUC above 0.99 for
  the labels of the training rows, and that AUC; which are written as dates, as yes and no or with
  spaces around; which are marked as categories of numbers, or look like numbers with marks; in
  which float32 moves times of day; which have a value of 10 rows or more far from all others, or
  numbers with a unit, with such a value and how many rows have one (not from a site that withholds
  names of categories).
- [aggregation=plain] The server learns warnings about values: which columns have names such as NULL
  that may mean no value, and these names (neither from a site that withholds names of categories);
  how many values are such words and became missing, by word; how many values are not in the schema,
  or equal a number that the schema treats as missing but are written differently; and what
  separates the fields of the file.
- [objective=rank:ndcg|rank:pairwise] Where rows are ranked, it learns how many queries have one
  row, or one label in all rows; the range of the labels is always 0 to 31.
- [aggregation=secure] Where only sums over all parties may leave a site (``rounded``), it sends the
  range of its labels rounded away from 0 to powers of two, and no warnings. It still sends its
  numbers of rows, and which classes none of them has.
- The server chooses the times of ``test-from`` and ``valid-from``, and learns how many rows a party
  has before and after; the site's ``min-rows`` applies to these subsets.
- A party learns the objective, the fractions or the test fold, the seed, and the run's plan; the
  names come with ``labels``.
- Where parties have the same columns in different orders, every party is asked again and learns the
  order of the first party's.
- [aggregation=secure] Where sums are masked, parties that received different openings produce
  noise.

[family=horizontal] ``labels`` gives labels and categories numbers that mean the same at all
parties, and sums labels.

- [aggregation=plain] The server learns the weighted sum of each party's training labels (0 and 1
  for two classes; with ``multi:softprob`` the weight of the training rows of each class; of times
  the weight of those of events; of ranked rows sums of gradients and hessians before the first
  tree), the sum of its weights, and how many of its values of each column are not in the common
  dictionary.
- A party learns the classes of all parties, and the names of all categories, but not whose they
  are; with two parties, names that it does not have are the other's.
- The server chooses the dictionary. One that guesses a name that a site withholds can put it there,
  and learn from later sums how many rows have it.
- Where trees start from the mean label, or from the shares of the classes, a party learns these of
  the rows of all parties.
- Weights by class follow from the scores too (see ``scoring``), and no minimum of a site's applies
  to either: a class of a single row is sent as such.
- Two runs that hold out different rows differ by the classes of the rows in which they differ. So a
  site's first run on a table fixes the fractions, the seed, the fold, the group and the times, and
  a run with others starts only if a person at the site approves it. So does a run on a table that
  differs by few rows from that of an earlier run.
- Where a run waits for approval, the server learns why: which settings or parties an earlier run
  had, or by how many rows its table differed, and the id of that run.
- The server chooses the objective. With ``multi:softprob`` of numeric labels it learns by ``hello``
  every value that occurs, and here how many training rows have each. A site with ``least-parties``
  or ``run-epsilon`` refuses that, unless they are at most 20 whole numbers.
- The server chooses where each output starts (``base_margin`` of later requests). What other
  numbers would reveal to it, leaf values of its choice reveal too.
- [aggregation=secure] Under masks (see ``secure``) the server learns the weighted sum of labels,
  the sum of weights and the values that are not in the dictionary over all parties. A class that
  only one party has is that party's, and with two parties each can subtract its sums from the total
  to get the other's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from fedapp.errors import as_protocol_error
from fedapp.messages.fields import (
    MOST_FOLDS,
    Array,
    Form,
    Introduction,
    LossFields,
    Objective,
    Range,
    Reply,
    Request,
    SiteLimit,
    check_fields,
    check_sizes,
    message,
    part,
    request,
)
from fedapp.trees.categories import MOST_CATEGORIES, Categories
from fedapp.trees.shown import NOT_COUNTED, WHAT

# Names of categories: of each column in turn, how many and which.
NUMBERS = -1  # in place of a number of categories
MOST_NAMES = 2**20  # of all columns together
MOST_LETTERS = 2**24  # of all names together
MOST_FALL_BACKS = 16  # texts
MOST_RESTARTS = 2  # of a run in the clear

Counts = Annotated[Array, Form("int32", "n_coded_columns", low=NUMBERS, high=MOST_CATEGORIES)]
"""Categories of each column, -1 for numbers, 0 where no row has a value; empty: all numbers."""
Names = Annotated[tuple[str, ...], Range(0, MOST_NAMES)]
Few = Annotated[Array, Form("int64", len(WHAT), low=NOT_COUNTED)]
ColumnName = Annotated[str, Range(0, 10**4)]
Times = Annotated[str, Range(0, 10**5)]  # COLUMN:TIME, of folds a time each, separated by commas
Kinds = Annotated[tuple[str, ...], Range(0, 10**6)]
"""Of each column, by the words of a schema; "" where no row has a value; empty: all numbers."""


@part
class JointCoding:
    """Part of a message: the meaning of codes of labels and categories at all parties."""

    classes: Annotated[tuple[str, ...], Range(0, 1000)]  # of all parties, in the order of their ids
    category_counts: Counts
    categories: Names  # of all parties, in the order of their codes


def pack_categories(categories: Categories) -> dict[str, Any]:
    """Message fields of the names; an entry without names is a column without values."""
    counts = [NUMBERS if names is None else len(names) for names in categories]
    all_names = tuple(name for names in categories for name in names or ())
    _check_sizes(counts, all_names)
    return {"category_counts": np.array(counts, dtype=np.int32), "categories": all_names}


def unpack_categories(counts: Array, names: Sequence[str], n_columns: int) -> Categories:
    """Inverse of ``pack_categories``; names must be distinct in a column."""
    sizes = np.maximum(counts, 0).tolist()
    if len(counts) not in (0, n_columns):
        raise ValueError(f"category_counts must be one a column of {n_columns}, got {len(counts)}")
    if sum(sizes) != len(names):
        raise ValueError(f"categories must be {sum(sizes)}, got {len(names)}")
    _check_sizes(sizes, names)
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    categories = tuple(
        None if count == NUMBERS else tuple(names[end - size : end])
        for count, size, end in zip(counts.tolist(), sizes, ends, strict=True)
    )
    if any(len(set(column)) < len(column) for column in categories if column):
        raise ValueError("categories must be distinct in a column")
    return categories


def dictionary_digest(names: Sequence[str]) -> str:
    """Digest of the names of one column in their order; 64 hex digits.

    It has no key, so that parties can compare theirs: anyone who guesses the names can confirm
    them.
    """
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()


def read_categories(party: str, message: Any, n_columns: int) -> Categories:
    """``unpack_categories`` of a message's fields; a ProtocolError names the party."""
    with as_protocol_error(party, type(message).__name__, "categories"):
        return unpack_categories(message.category_counts, message.categories, n_columns)


def _check_sizes(counts: Sequence[int], names: Sequence[str]) -> None:
    if max(counts, default=0) > MOST_CATEGORIES:
        raise ValueError(f"categories must be {MOST_CATEGORIES:,} a column at most")
    if len(names) > MOST_NAMES or sum(map(len, names)) > MOST_LETTERS:
        rule = f"{MOST_NAMES:,} names of {MOST_LETTERS:,} letters together at most"
        raise ValueError(f"categories must be {rule}, got {len(names):,}")


# Weights of a class are summed in float32, where rounding may at most double each.
CLASS_ROUNDING = 1.0


@part
class RunCoding(JointCoding, LossFields):
    """Part of a message: settings that are the same at all parties for the whole run."""


@request("query.labels", "reading the labels")
class LabelsRequest(RunCoding, Request):
    """Replace the names of classes and categories by ids, and sum the labels."""


@message
class LabelsReply(Reply):
    """Sums over the party's training rows, and how many values the dictionary lacks."""

    # Weighted sums of the labels (0 and 1 for two classes); for softmax weights of the classes; for
    # times the weight of events;
    # for objectives with a Newton step, of gradients (with the opposite sign) and hessians at 0.
    label_sums: Annotated[Array, Form("float64", "n_label_sums")]
    weight_sum: Annotated[float, Range(0, 1e38)]
    unseen: Annotated[Array, Form("int64", "n_coded_columns", low=0)]  # values that became missing


def check_coded(
    party: str, reply: LabelsReply, n_classes: int, n_label_sums: int, n_coded_columns: int
) -> None:
    """Check sums and counts against the classes (0 for regression) and columns of the run.

    ``n_coded_columns`` is 0 if no column has categories.
    """
    check_sizes(party, reply, n_coded_columns=n_coded_columns, n_label_sums=n_label_sums)
    sums = reply.label_sums
    highest = reply.weight_sum * (1 + (1e-6 if n_label_sums == 1 else CLASS_ROUNDING))
    fits = not n_classes or ((sums >= 0) & (sums <= highest)).all()
    check_fields(party, reply, ("label_sums", fits, f"must be 0 to {reply.weight_sum:g}"))


@request("query.greet", "meeting the parties", leaves="nothing", is_step=False)
class GreetRequest(Request):
    """Ask for the party's name. Not a step of a run: a site stores nothing."""


@message
class GreetReply(Reply):
    """A party's name, the fingerprint that ``fedapp site key`` prints, and what slows it."""

    name: Annotated[str, Range(1, 64)]
    fingerprint: Annotated[str, Range(0, 64)]  # empty if simulated
    # Patches of Flower that are off.
    fall_backs: Annotated[tuple[str, ...], Range(0, MOST_FALL_BACKS)] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Part of a message: what a run may request; 0 where the method has no such setting.

    Fields of later requests with the same name have the same value.
    """

    aggregation: Annotated[str, Range(0, 16)] = "plain"  # secure: only sums leave; sealed: letters
    threshold: Annotated[int, Range(0, 1000)] = 0  # parties of a sum, if some are lost; 0: all
    epsilon: Annotated[float, Range(0, 1e6)] = 0.0  # 0: no noise
    delta: Annotated[float, Range(0, 1)] = 0.0
    multiplier: Annotated[float, Range(0, 1e9)] = 0.0  # of the noise; see fedapp.crypto.noise
    rounds: Annotated[int, Range(0, 10**6), SiteLimit("most-rounds")] = 0  # boosting or averaging
    # Rounds that begin again without a lost party; at most MOST_RESTARTS at a site.
    restarts: Annotated[int, Range(0, 10**4)] = 0
    epochs: Annotated[int, Range(0, 10**6), SiteLimit("most-epochs")] = 0  # of a round at a site
    # Of a forest, or that a party grows in a round.
    trees: Annotated[int, Range(0, 10**5), SiteLimit("most-trees")] = 0
    max_depth: Annotated[int, Range(0, 1000)] = 0
    levels: Annotated[int, Range(0, 1000)] = 0  # that are split, as depth and leaves allow
    max_leaves: Annotated[int, Range(0, 10**6)] = 0  # 0: no limit
    subsample: Annotated[float, Range(0, 1)] = 1.0
    goss: bool = False
    bootstrap: bool = False  # whether trees of a forest draw their rows
    additive: bool = False  # each tree splits one column
    pairs: Annotated[int, Range(0, 100)] = 0  # of columns that have trees too, in an additive run
    labels: Annotated[str, Range(0, 16)] = ""  # encoded or paillier, in a forest
    max_bin: Annotated[int, Range(0, 65535), SiteLimit("most-bins")] = 0
    parties: Annotated[tuple[str, ...], Range(0, 1000)] = ()  # names, in order
    fingerprints: Annotated[tuple[str, ...], Range(0, 1000)] = ()  # of their keys; "" if simulated


@dataclass(frozen=True, eq=False, kw_only=True)
class HeldBack:
    """Part of a message: which rows are held back, beside their shares and seed."""

    fold: Annotated[int, Range(0, MOST_FOLDS)] = 0  # test fold, from 1; 0: use test_fraction
    folds: Annotated[int, Range(0, MOST_FOLDS)] = 0
    score_test: bool = True  # False: test rows are left out, and nothing about them is sent
    group: ColumnName = ""  # whose rows are in one subset; empty: as the site says
    test_from: Times = ""  # COLUMN:TIME; empty: test rows are drawn
    valid_from: Times = ""


@request("query.hello", "reading the tables", leaves="nothing")
class HelloRequest(HeldBack, Plan, Request):
    """Open a run with its plan: read the table and describe it."""

    objective: Objective
    test_fraction: Annotated[float, Range(0, 1)]
    valid_fraction: Annotated[float, Range(0, 1)]
    seed: Annotated[int, Range(0, 2**63 - 1)]
    rounded: bool  # send the range of the labels to powers of two, and no warnings
    columns: Annotated[tuple[str, ...], Range(0, 10**6)] = ()  # their order; empty: the table's
    least_rows_per_name: Annotated[int, Range(0, 10**9)] = 0  # of a category; 0: as the site says


@message
class HelloReply(Introduction):
    """A description of a party's table."""

    n_train: Annotated[int, Range(1, 2**40)]
    n_valid: Annotated[int, Range(0, 2**40)]
    n_test: Annotated[int, Range(0, 2**40)]
    columns: Annotated[tuple[str, ...], Range(1, 10**6)]
    classes: Annotated[tuple[str, ...], Range(0, 1000)]  # sorted; empty for regression
    positive_label: Annotated[str, Range(0, 10**4)]  # counts as 1, of two; empty: not given
    base_margin: Annotated[str, Range(0, 10**4)]  # column that rows start from; empty: none
    label_low: float  # smallest and largest label; 0 for classification, unless the run asks
    label_high: float
    category_counts: Counts
    categories: Names  # in the order of their codes; empty if the site does not share them
    untrained: Annotated[tuple[str, ...], Range(0, 1000)]  # classes that no training row has
    digests: Names  # a column with categories: of the names if its schema gives them, else empty
    merges_bins: bool = False  # bins below its node config's number of rows, in every node
    kinds: Kinds = ()

    @property
    def n_rows(self) -> int:
        """Training rows."""
        return self.n_train


GROUPS = {
    "hello": frozenset({"horizontal"}),
    "labels": frozenset({"horizontal"}),
    "greet": frozenset({"horizontal", "vertical", "inference"}),
}
