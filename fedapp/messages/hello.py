"""The opening of every horizontal run.

Reveals: what a table looks like from the outside, and the run's plan.

- The server learns each party's name, its numbers of rows, and the versions of its packages.
- The server learns the column names in order, and which columns hold numbers, yes or no, dates,
  categories or no value.
- The server learns the names of the categories that are in the party's table or that its schema
  gives. A site with ``share-categories = false`` sends no name of a category, but how many its
  schema gives to each column and a digest of them; anyone who guesses all of them can confirm the
  guess.
- For classification the server learns the names of the classes and which of them no training row
  has; for regression the range of the labels. Where the run leaves the objective open it learns
  both, for at most 20 whole numbers. It learns which of two classes counts as 1 if the party
  specifies it.
- The server learns the name of the column of base margins if there is one; its values stay at the
  party.
- The server learns a fingerprint of the table that only the party itself can interpret.
- The server learns warnings about the table's rows: how many have no label and are dropped, with
  the name of the label column; how many share their id with another; whether ids have spaces
  around, and the name of that column.
- The server learns warnings about columns: which features have one value or none, number the rows
  or are rounded as float32; which single features have an AUC above 0.99 for the labels of the
  training rows, and that AUC; which are written as dates, as yes and no, with spaces around or with
  thousands separators; which are marked as categories of numbers.
- The server learns warnings about values: which columns have names such as NULL that may mean no
  value, and these names; how many values are not in the schema, or equal a number that the schema
  treats as missing but are written differently; and what separates the fields of the file.
- Where only sums over all parties may leave a site (``rounded``), it sends the range of its labels
  rounded away from 0 to powers of two, and no warnings. It still sends its numbers of rows, and
  which classes none of them has.
- A party learns the objective, the fractions or the test fold, the seed, and the run's plan (see
  ``plan``); the names come with ``labels``.
- Where parties have the same columns in different orders, every party is asked again and learns the
  order of the first party's.
- Where sums are masked, parties that received different openings produce noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.dictionary import Counts, Kinds, Names
from fedapp.messages.fields import MOST_FOLDS, Introduction, Range, Request
from fedapp.messages.plan import Plan

GROUPS = {"hello": frozenset({"horizontal"})}


@dataclass(frozen=True, slots=True)
class HelloRequest(Plan, Request):
    """Open a run with its plan: read the table and describe it."""

    kind: ClassVar[str] = "query.hello"
    doing: ClassVar[str] = "reading the tables"
    leaves: ClassVar[str] = "nothing"
    objective: Annotated[str, Range(1, 64)]
    test_fraction: Annotated[float, Range(0, 1)]
    valid_fraction: Annotated[float, Range(0, 1)]
    seed: Annotated[int, Range(0, 2**63 - 1)]
    rounded: bool  # send the range of the labels to powers of two, and no warnings
    fold: Annotated[int, Range(0, MOST_FOLDS)] = 0  # test fold, from 1; 0: use test_fraction
    folds: Annotated[int, Range(0, MOST_FOLDS)] = 0
    score_test: bool = True  # False: test rows are left out, and nothing about them is sent
    columns: Annotated[tuple[str, ...], Range(0, 10**6)] = ()  # their order; empty: the table's


@dataclass(frozen=True, slots=True, eq=False)
class HelloReply(Introduction):
    """A description of a party's table."""

    name: Annotated[str, Range(1, 64)]
    n_train: Annotated[int, Range(1, 2**40)]
    n_valid: Annotated[int, Range(0, 2**40)]
    n_test: Annotated[int, Range(0, 2**40)]
    columns: Annotated[tuple[str, ...], Range(1, 10**6)]
    classes: Annotated[tuple[str, ...], Range(0, 1000)]  # sorted; empty for regression
    positive_label: Annotated[str, Range(0, 10**4)]  # counts as 1, of two; empty: not given
    base_margin: Annotated[str, Range(0, 10**4)]  # column that rows start from; empty: none
    label_low: float  # smallest and largest label; 0 for classification, unless the run asks
    label_high: float
    simulated: bool  # the table is a share of the one that the run config names
    fingerprint: Annotated[str, Range(32, 32)]  # hex
    versions: Annotated[tuple[str, ...], Range(0, 20)]  # "fedapp 0.1.0", "xgboost 3.2.0", ...
    notes: Annotated[tuple[str, ...], Range(0, 100)]  # warnings about the table, in words
    category_counts: Counts
    categories: Names  # in the order of their codes; empty if the site does not share them
    untrained: Annotated[tuple[str, ...], Range(0, 1000)]  # classes that no training row has
    digests: Names  # a column with categories: of the names if its schema gives them, else empty
    since: Annotated[int, Range(0, 2**40)] = 0  # the last step that the party answered
    merges_bins: bool = False  # bins below its node config's number of rows, in every node
    kinds: Kinds = ()

    @property
    def n_rows(self) -> int:
        """Training rows."""
        return self.n_train
