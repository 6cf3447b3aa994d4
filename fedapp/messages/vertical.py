"""The opening of a run between parties that have different columns of the same rows.

Reveals: what a table looks like from the outside, and the run's plan.

- The server learns each party's name, its numbers of rows and columns, and the versions of its
  packages.
- The server learns whether a party has the labels and, where the run leaves the objective open,
  which one they suggest.
- The server learns a fingerprint of the table that only the party itself can interpret.
- The server learns two public keys of each party, one the same in every run and one of this run.
- The server learns warnings about rows: how many have no label and are dropped, and that ids have
  spaces around or count the rows.
- The server learns warnings about features: some have one value or none, number the rows
  or are rounded as float32; are written as dates, as yes and no, with spaces around or with
  thousands separators; are marked as categories of numbers; have names such as NULL that may mean
  no value.
- The server learns how many values are not in the schema, or equal a number that the schema treats
  as missing but are written differently; and what separates the fields of the file.
- Of a table to predict, the server learns in how many columns the values are unlike those trained
  on, how many values are categories that the model does not know, and whether some rows or all lack
  a weight.
- The server learns the names of columns only where their owner shares them
  (``share-column-names``).
- A party learns whether names are shared, the run's plan (see ``plan``), and the names, numbers of
  rows and public keys of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import MOST_FOLDS, Array, Form, Introduction, Range, Request
from fedapp.messages.plan import Plan

GROUPS = {"vertical": frozenset({"vertical", "inference"})}


@dataclass(frozen=True, eq=False)
class RoundScores:
    """Part of a message: scores of the model so far; empty for a subset without rows."""

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
    """Open a run with its plan: read the table and report its size."""

    kind: ClassVar[str] = "query.vertical_hello"
    doing: ClassVar[str] = "reading the tables"
    needs_ids: bool
    most_rows: Annotated[int, Range(1, 2**40)]
    seed: Annotated[int, Range(0, 2**63 - 1)]
    model: Annotated[str, Range(0, 16)]  # to predict with, which selects columns; empty to train
    asks_objective: bool  # whether to report which objective the labels suggest
    test_fraction: Annotated[float, Range(0, 1)] = 0.0
    valid_fraction: Annotated[float, Range(0, 1)] = 0.0
    fold: Annotated[int, Range(0, MOST_FOLDS)] = 0  # test fold, from 1; 0: use test_fraction
    folds: Annotated[int, Range(0, MOST_FOLDS)] = 0


@dataclass(frozen=True, slots=True, eq=False)
class VerticalHelloReply(Introduction):
    """A description of a party's table."""

    name: Annotated[str, Range(1, 64)]
    n_table: Annotated[int, Range(1, 2**40)]
    n_columns: Annotated[int, Range(0, 10**6)]
    columns: Annotated[tuple[str, ...], Range(0, 10**6)]  # empty where they are not shared
    active: bool  # has the labels
    objective: Annotated[str, Range(0, 64)]  # that the labels suggest, if asked; empty if passive
    n_unlike: Annotated[int, Range(0, 10**6)]  # columns unlike those trained on
    box_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; the same in every run
    run_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; of this run only
    simulated: bool
    fingerprint: Annotated[str, Range(32, 32)]  # hex
    versions: Annotated[tuple[str, ...], Range(0, 20)]
    notes: Annotated[tuple[str, ...], Range(0, 100)]  # warnings; names as in columns
    since: Annotated[int, Range(0, 2**40)] = 0  # the last step that the party answered

    @property
    def n_rows(self) -> int:
        """Rows of the table."""
        return self.n_table
