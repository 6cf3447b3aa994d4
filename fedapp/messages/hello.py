"""The opening of every run.

Reveals: the server learns each party's name, its numbers of rows, its column names in order, which
columns hold numbers, yes or no, dates, categories or no value, the names of the categories that are
in the party's table or that its schema gives, the names of its classes and which of them no
training row has (classification) or the range of its labels (regression; where the run leaves the
objective open, both for at most 20 whole numbers), which of two classes counts as 1 where the party
says so, the name of the column of base margins if it has one (its values stay at the party), a
fingerprint of its table that means something to that party alone, the versions it runs, and what is
odd about the table: how many rows have no label and are dropped, with the name of the label column,
which features have one value or none, number the rows or are rounded as float32, which features
alone have an AUC above 0.99 for the labels of its training rows, and that AUC, how many rows share
their id with another, whether ids have spaces around, and the name of that column, which are
written as dates, as yes and no, with spaces around or with points that set off thousands, which are
marked as categories of numbers, which have names such as NULL that may mean no value, and these
names, how many values are none of those that a schema gives or equal a number that it takes for
missing and are written otherwise, and what separates the fields of the file. A site with
``share-categories = false`` tells no name of a category, but how many its schema gives to each
column and a digest of them, which whoever guesses all of them can confirm. Where only sums over all
parties may leave a site (``rounded``), it tells the range of its labels away from 0 to powers of
two, and nothing that is odd about its table; its numbers of rows it does tell, and which classes
none of them has. A party learns the objective, the fractions or the fold held back, the seed, and
the run's plan (see ``plan``); the names come with ``labels``. Where parties have the same columns
in different orders, every party is asked again and learns the order of the first party's. Where
sums are masked, parties that were sent different ones produce noise.
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
    """Open a run with its plan: read the table and say what it looks like."""

    kind: ClassVar[str] = "query.hello"
    doing: ClassVar[str] = "reading the tables"
    leaves: ClassVar[str] = "nothing"
    objective: Annotated[str, Range(1, 64)]
    test_fraction: Annotated[float, Range(0, 1)]
    valid_fraction: Annotated[float, Range(0, 1)]
    seed: Annotated[int, Range(0, 2**63 - 1)]
    rounded: bool  # tell the range of the labels to powers of two, and nothing odd of the table
    fold: Annotated[int, Range(0, MOST_FOLDS)] = 0  # that tests, from 1; 0: test_fraction decides
    folds: Annotated[int, Range(0, MOST_FOLDS)] = 0
    score_test: bool = True  # else the rows that test are held back, and nothing is told of them
    columns: Annotated[tuple[str, ...], Range(0, 10**6)] = ()  # their order; empty: the table's own


@dataclass(frozen=True, slots=True, eq=False)
class HelloReply(Introduction):
    """A party's table, from the outside."""

    name: Annotated[str, Range(1, 64)]
    n_train: Annotated[int, Range(1, 2**40)]
    n_valid: Annotated[int, Range(0, 2**40)]
    n_test: Annotated[int, Range(0, 2**40)]
    columns: Annotated[tuple[str, ...], Range(1, 10**6)]
    classes: Annotated[tuple[str, ...], Range(0, 1000)]  # sorted; empty for regression
    positive_label: Annotated[str, Range(0, 10**4)]  # that counts as 1, of two; empty: not said
    base_margin: Annotated[str, Range(0, 10**4)]  # column that rows start from; empty: none
    label_low: float  # smallest and largest label; 0 for classification, unless the run asks
    label_high: float
    simulated: bool  # the table is a share of the one that the run config names
    fingerprint: Annotated[str, Range(32, 32)]  # hex
    versions: Annotated[tuple[str, ...], Range(0, 20)]  # "fedapp 0.1.0", "xgboost 3.2.0", ...
    notes: Annotated[tuple[str, ...], Range(0, 100)]  # oddities of the table, in words
    category_counts: Counts
    categories: Names  # in the order of their codes; none where the site keeps them to itself
    untrained: Annotated[tuple[str, ...], Range(0, 1000)]  # classes that no training row has
    digests: Names  # a column with categories: of the names if its schema gives them, else empty
    since: Annotated[int, Range(0, 2**40)] = 0  # the last step that the party had answered
    merges_bins: bool = False  # of fewer rows than its node config has it, in every node
    kinds: Kinds = ()

    @property
    def n_rows(self) -> int:
        """Training rows."""
        return self.n_train
