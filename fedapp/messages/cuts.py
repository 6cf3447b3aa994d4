"""Parts of messages by which parties agree on the cuts of their columns, and move rows by them.

``CountOrder`` and ``Digits`` are requests without a kind: their handler answers every method's.

A method that has them says what they reveal.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedapp.messages.fields import (
    MOST_NODES,
    Array,
    Form,
    OneOf,
    PlanLimit,
    Range,
    Request,
    SiteLimit,
    check_fields,
    check_sizes,
    message,
    part,
)
from fedapp.messages.handshake import LabelsReply, RunCoding, check_coded
from fedapp.messages.secagg import Roster

MASS_ROUNDING = 1e-5  # of the float32 masses of a column's bins


@part
class SketchOrder(RunCoding):
    """Part of a message: encode labels and categories, and summarise the columns."""

    # Most bins a column.
    n_bins: Annotated[int, Range(2, 65535), SiteLimit("most-bins"), PlanLimit("max_bin")]


@message
class SketchReply(LabelsReply):
    """Representatives of the bins of each column of numbers, columns one after the other."""

    representatives: Annotated[Array, Form("float32", "n_bins", ascending="offsets")]
    masses: Annotated[Array, Form("float32", "n_bins", low=0)]  # sample weights
    offsets: Annotated[Array, Form("int64", "n_columns+1", divides="n_bins")]
    maxima: Annotated[Array, Form("float32", "n_columns", nan=True)]  # of categories: codes


@part
class CountOrder(RunCoding, Roster, Request):
    """A request for ``sums`` that starts with the roster, and encodes labels and categories.

    Of the labels by output, of the weights, of values the dictionary lacks by column, of rows by
    category, and ``digit_counts`` of all columns of numbers.
    """

    count_bytes: Annotated[int, OneOf((2, 4, 8))]  # that counts of weights fit in


@part
class Digits(Request):
    """A request: count values of some first digits by the next; each digit once a run."""

    digit: Annotated[int, Range(1, 3)]
    prefixes: Annotated[Array, Form("uint32", "n_prefixes", ascending="offsets")]
    offsets: Annotated[Array, Form("int64", "n_columns+1", divides="n_prefixes")]


@part
class SplitRows:
    """Part of a message: the last splits, by which rows move."""

    split_trees: Annotated[Array, Form("int32", "n_splits", low=0, below="n_trees")]
    split_nodes: Annotated[Array, Form("int32", "n_splits", low=0)]
    # The right child follows the left one.
    split_lefts: Annotated[Array, Form("int32", "n_splits", low=1, high=MOST_NODES)]
    split_columns: Annotated[Array, Form("int32", "n_splits", low=0, below="n_columns")]
    split_thresholds: Annotated[Array, Form("float32", "n_splits")]
    # 1: missing goes left
    split_defaults: Annotated[Array, Form("uint8", "n_splits", low=0, high=1)]
    # Bits of the categories that go right, of the splits by categories, each in whole bytes.
    split_sets: Annotated[Array, Form("uint8", "n_set_bytes")]


def check_sketch(
    party: str,
    reply: SketchReply,
    categories: Array,
    n_classes: int,
    n_label_sums: int,
    n_bins: int,
    n_coded_columns: int = 0,
) -> None:
    """Check a sketch against the columns and classes of the run, and the requested bins.

    ``categories`` has the number of each column, 0 for one of numbers.
    """
    offsets, points, n_columns = reply.offsets, reply.representatives, len(categories)
    check_sizes(party, reply, n_columns=n_columns)
    widths = np.diff(offsets)
    codes, limits = reply.maxima[categories > 0], categories[categories > 0]
    is_code = (codes >= 0) & (codes < limits) & (codes == np.floor(codes))
    # Both are float32 sums of the same weights, but rounded differently.
    masses = np.bincount(np.repeat(np.arange(n_columns), widths), reply.masses)
    fits = masses <= reply.weight_sum * (1 + MASS_ROUNDING)
    is_largest = points[offsets[1:][widths > 0] - 1] <= reply.maxima[widths > 0]
    few = f"must give a column {n_bins} bins at most, and none of categories"
    weight = f"must be those of the rows, which weigh {reply.weight_sum:g} in all"
    check_fields(
        party,
        SketchReply,
        ("offsets", (widths <= np.where(categories > 0, 0, n_bins)).all(), few),
        ("maxima", (is_code | np.isnan(codes)).all(), "must be codes of the categories"),
        ("masses", fits.all(), weight),
        ("maxima", is_largest.all(), "must be the largest values"),
    )
    check_coded(party, reply, n_classes, n_label_sums, n_coded_columns)
