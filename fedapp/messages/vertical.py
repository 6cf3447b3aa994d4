"""The opening of a run between parties that have different columns of the same rows.

Reveals: the server learns each party's name, its numbers of rows and columns, whether it has the
labels and, where the run leaves the objective open, which one they suggest, a fingerprint of its
table that means something to that party alone, two public keys, one the same in every run and one
of this run, the versions it runs, and what is odd about the table: how many rows have no label and
are dropped, that ids have spaces around or count the rows, that some features have one value or
none, number the rows or are rounded as float32, which are written as dates, as yes and no, with
spaces around or with points that set off thousands, which are marked as categories of numbers,
which have names such as NULL that may mean no value, how many values are none of those that a
schema gives or equal a number that it takes for missing and are written otherwise, and what
separates the fields of the file; of a table to predict in how many columns its values are unlike
those trained on, how many values are categories that the model does not know, and whether some rows
or all lack a weight; the names of its columns only where its owner shares them
(``share-column-names``). A party learns whether names are shared, the run's plan (see ``plan``),
and the names, numbers of rows and public keys of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import MOST_FOLDS, Array, Form, Introduction, Range, Request
from fedapp.messages.plan import Plan

GROUPS = {"vertical": frozenset({"vertical", "inference"})}


@dataclass(frozen=True, eq=False)
class RoundScores:
    """Part of a message: scores of the model as it is; no values for a subset without rows."""

    __slots__ = ()
    score_names: Annotated[tuple[str, ...], Range(0, 20)]
    train_scores: Annotated[Array, Form("float64", "n_train_scores", nan=True)]
    valid_scores: Annotated[Array, Form("float64", "n_valid_scores", nan=True)]


@dataclass(frozen=True, eq=False)
class FinalScores(RoundScores):
    """Part of a message: scores of the finished model, and importance of the columns named."""

    __slots__ = ()
    test_scores: Annotated[Array, Form("float64", "n_test_scores", nan=True)]
    column_names: Annotated[tuple[str, ...], Range(0, 10**6)]
    column_gains: Annotated[Array, Form("float64", "n_named", low=0)]  # of all splits of each
    column_counts: Annotated[Array, Form("int64", "n_named", low=0)]


@dataclass(frozen=True, slots=True)
class VerticalHelloRequest(Plan, Request):
    """Open a run with its plan: read the table and say how large it is."""

    kind: ClassVar[str] = "query.vertical_hello"
    doing: ClassVar[str] = "reading the tables"
    needs_ids: bool
    most_rows: Annotated[int, Range(1, 2**40)]
    seed: Annotated[int, Range(0, 2**63 - 1)]
    model: Annotated[str, Range(0, 16)]  # whose columns are wanted, to predict; empty to train
    asks_objective: bool  # what the labels are like is to be told
    test_fraction: Annotated[float, Range(0, 1)] = 0.0
    valid_fraction: Annotated[float, Range(0, 1)] = 0.0
    fold: Annotated[int, Range(0, MOST_FOLDS)] = 0  # that tests, from 1; 0: test_fraction decides
    folds: Annotated[int, Range(0, MOST_FOLDS)] = 0


@dataclass(frozen=True, slots=True, eq=False)
class VerticalHelloReply(Introduction):
    """A party's table, from the outside."""

    name: Annotated[str, Range(1, 64)]
    n_table: Annotated[int, Range(1, 2**40)]
    n_columns: Annotated[int, Range(0, 10**6)]
    columns: Annotated[tuple[str, ...], Range(0, 10**6)]  # empty where they are not shared
    active: bool  # has the labels
    objective: Annotated[str, Range(0, 64)]  # that the labels suggest, if asked; empty if passive
    n_unlike: Annotated[int, Range(0, 10**6)]  # columns to predict unlike those trained on
    box_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; the same in every run
    run_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; of this run alone
    simulated: bool
    fingerprint: Annotated[str, Range(32, 32)]  # hex
    versions: Annotated[tuple[str, ...], Range(0, 20)]
    notes: Annotated[tuple[str, ...], Range(0, 100)]  # oddities of the table; names as in columns
    since: Annotated[int, Range(0, 2**40)] = 0  # the last step that the party had answered

    @property
    def n_rows(self) -> int:
        """Rows of the table."""
        return self.n_table
