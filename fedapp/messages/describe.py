"""Describing tables before training: counts by column, and what columns say about the label.

Reveals, in short:

- [strategy=describe-rows, aggregation=plain] The server learns of each party how many rows have
  each category, or are in each of up to 16 bins of a column, and the sum of their labels.
- [strategy=describe-rows, aggregation=secure] The server learns, over all parties only, how many
  rows have each category, or are in each of up to 16 bins of a column, and the sum of their labels.
- [strategy=describe-rows] A party learns the quantiles of all rows, and how many rows of all
  parties each cell has; with two parties, the rest is the other's.
- [strategy=describe-rows] A party or server that breaks the rules moves bins until they have single
  rows, and learns their labels, unless sites have ``least-bin-rows``.
- [strategy=describe-columns] The server learns the quantiles of each party's columns, and how many
  rows each cell has; names and kinds only where their owner shares them.
- [strategy=describe-columns] The label holder learns of every cell of the others' columns how many
  rows it has, and sums of their labels.
- [strategy=describe-columns] A label holder that breaks the rules reads from these sums in which
  cell of every column each of some dozens of rows is.
- [strategy=describe-columns] Where the label holder has ``share-label-figures``, a passive party
  that breaks the rules can read the labels of up to a tenth of the rows.
- No model is trained.

In full: as ``handshake``, and figures of the training rows; no model is trained.

[strategy=describe-rows] Between parties with the same columns (``describe-rows``), rows are counted
in the cells of each column: missing values, and its categories or up to 16 bins, which begin at
quantiles of all rows. Values are counted by their digits, as in ``pax``, at most 15 first ones of a
column further.

- The server learns of each party how many rows each cell has, and the sum of their labels (of
  several classes the rows of each; of measures also the sum of squares); and how many rows have
  the digits asked for: all digits of values in columns of at most 16 different ones; else, around
  quantiles, one digit more than several rows have in common.
- A party learns the quantiles of all rows, and how many rows of all parties each cell has. With two
  parties, the rest is the other's.
- A site with ``min-rows`` or ``least-bin-rows`` makes its values so coarse before it counts that
  each occurs in as many rows at least, whatever bins or runs ask. Where labels are summed, each
  value has as many rows of every class that it has; rows of a class of fewer are not described, and
  the server learns how many these are. Sums of measures are of groups only.
- Tables that differ between two runs are grouped differently; see ``handshake`` for what a site
  refuses then. So do other methods: differences to their sums may be of fewer rows.
- A party that breaks the rules moves the quantiles by false counts until bins have single rows of
  others, and solves the published figures for their labels, unless their sites have such a minimum.
- [aggregation=secure] With ``describe-rows.aggregation=secure`` the server learns sums over all
  parties (see ``secure``), and no difference between parties, which sites log.
- A server that breaks the rules chooses which first digits are resolved and where bins begin, and
  so learns, of a site without such minimum, all values that begin with these, and their labels.

[strategy=describe-columns] Between parties with different columns (``describe-columns``), over the
rows that all have:

- The server learns the number of each party's columns, which hold numbers, quantiles, how many rows
  each cell has, and of the label the same; names and kinds (such as dates) only where their
  owner shares names (``share-column-names``, ``share-categories``).
- With ``share-label-figures`` at the active party's site the server learns of each column what it
  says about the label, ``ASSOCIATIONS`` in hundredths, and otherwise nothing of it.
- The active party encrypts its labels, and learns of every cell of the others' columns, under
  numbers in place of names, how many rows it has, and the same sums of their labels.
- A passive party learns the objective, and half the number of classes, rounded up.
- A passive party that breaks the rules sends sums of rows that it chooses, and reads their labels
  in the figures of its columns: of exact figures several a column, and no check of counts and sums
  detects it. So figures leave only if those of all passive parties' columns have a bit for 10 rows
  at most: in a run the labels of up to a tenth of the rows can be read, in another run those of
  others. Sums that rows cannot have end the run by their sender's name, which discloses one label
  more.
- Cells have ``min-rows`` rows at least. An active party that breaks the rules encrypts other
  numbers: as powers of two of single rows, the sums list in which cell of every column each of some
  dozens of rows is (as many as a slot has bits). No minimum prevents it, so a site with
  ``least-bin-rows`` refuses these runs.
- [label-epsilon!=0] With ``label-epsilon`` at the active party's site, all this is of randomised
  labels, the same as in all other runs: see ``secureboost``.
"""

from __future__ import annotations

from typing import Annotated

from fedapp.messages import cuts
from fedapp.messages.fields import (
    AT_ANY_TIME,
    OWN_OR_SUMS,
    Array,
    Ciphertexts,
    Form,
    Letter,
    Objective,
    OnlyInTrials,
    Range,
    Reply,
    Request,
    message,
    request,
)
from fedapp.messages.handshake import Kinds, RunCoding
from fedapp.messages.methods import Method
from fedapp.messages.secagg import Roster

GROUPS = {
    "describe_rows": Method(
        "horizontal",
        {
            "": "each party's counts by column, and its labels' sums",
            "least-bin-rows": "each party's counts by column, of several rows",
            "least-parties": "counts by column over all parties",
            "least-parties least-bin-rows": "counts by column over all parties, of several rows",
        },
        title="Counts, quantiles, differences and warnings, of the same columns",
        describes=True,
        memory=None,
        holds_columns=True,
        takes_margins=True,
        merges_bins=True,
    ),
    "describe_columns": Method(
        "vertical",
        {"": "counts and quantiles of each column, and what it says about the label"},
        title="The same of different columns, with what each says about the label",
        describes=True,
        memory=None,
        holds_columns=True,
        takes_margins=True,
        hides_labels=True,
    ),
}
COUNTING = "counting values"
ASSOCIATIONS = ("explained", "iv", "auc", "correlation")  # see ``metrics.tables.association``


# The same columns


@request("query.describe_rows_open", COUNTING, leaves=OWN_OR_SUMS)
class OpenRequest(RunCoding, Roster, Request):
    """Code labels and categories; count values by their first digit.

    Counts: of ``digit_counts`` of the columns of numbers, the label last; and all rows. No measure
    exceeds 2 to the power ``largest``. Only a masked run has a roster.
    """


@request("query.describe_rows_count", COUNTING, leaves=OWN_OR_SUMS, times=3)
class CountRequest(cuts.Digits):
    """Count values by the next digit; see ``digit_counts``."""


@request("query.describe_rows_cells", COUNTING, leaves=OWN_OR_SUMS)
class CellsRequest(Request):
    """Count rows by cell, and sum their labels.

    Counts: rows of each cell of all columns, and of the label; the same of rows in which each value
    has enough rows of every class, and sums of their labels' terms.
    """

    edges: Annotated[Array, Form("float32", "n_edges", ascending="edge_offsets")]  # of ``Cuts``
    edge_offsets: Annotated[Array, Form("int64", "n_columns+1", divides="n_edges")]


@message
class CountsReply(Reply):
    """What a request counts, one after the other."""

    counts: Annotated[Array, Form("int64", "n_counts")]


@request("evaluate.describe_rows_compare", "comparing tables", leaves="nothing")
class CompareRequest(Request):
    """Compare the local rows with those of all parties, and end."""

    counts: Annotated[Array, Form("int64", "n_cells", low=0)]  # of all parties


@message
class CompareReply(Reply):
    """The differences are in the site's log."""


# Different columns


@request("query.describe_columns_setup", "binning the columns, drawing the key")
class SetupRequest(Request, letters=True):
    """Check the order of rows, and bin the columns; at the active party also draw the key."""

    objective: Objective
    key_bits: Annotated[int, Range(64, 2**13)]
    insecure_small_key: Annotated[bool, OnlyInTrials()]


@request("query.describe_columns_encrypt", "encrypting labels", times=AT_ANY_TIME)
class EncryptRequest(Request, letters=True):
    """To the active party: send the next block of labels."""


@message
class EncryptReply(Reply, letters=True):
    """Labels for the passive parties."""

    finished: bool


@request("query.describe_columns_take", "encrypting labels", times=AT_ANY_TIME)
class TakeRequest(Request, letters=True):
    """To a passive party: store a block of labels."""


@request("evaluate.describe_columns_sum", "summing encrypted labels")
class SumRequest(Request, letters=True):
    """To a passive party: describe the columns; send the active party sums, and end."""


@request("evaluate.describe_columns_finish", "decrypting sums")
class FinishRequest(Request, letters=True):
    """To the active party: describe the columns, say what those of all say about the label."""


@message
class ColumnsReply(Reply, letters=True):
    """A party's columns, at the active party with the label as the last."""

    names: Annotated[tuple[str, ...], Range(0, 10**6)]  # if shared
    kinds: Kinds  # with the names; of the label ""
    categories: Annotated[tuple[str, ...], Range(0, 2**20)]  # of the columns that have some, or ""
    n_categories: Annotated[Array, Form("int64", "n_columns", low=0)]  # 0: numbers
    offsets: Annotated[Array, Form("int64", "n_columns+1", divides="n_edges")]  # of ``Cuts``
    edges: Annotated[Array, Form("float32", "n_edges", ascending="offsets")]
    points: Annotated[Array, Form("float32", "n_columns", "n_percents", nan=True)]  # quantiles
    is_whole: Annotated[Array, Form("uint8", "n_columns", high=1)]  # 1: each bin has one value
    counts: Annotated[Array, Form("int64", "n_cells", low=0)]
    # At the active party ``ASSOCIATIONS`` of all parties' columns
    associations: Annotated[Array, Form("float64", "n_associated", 4, nan=True)]


@message
class LabelKey(Letter):
    """Active to passive: the run's key, and how labels are packed under it."""

    n: Annotated[Array, Form("uint8", "n_key_bytes")]  # big-endian
    n_pairs: Annotated[int, Range(1, 500)]  # of the terms of a label


@message
class LabelBlock(Letter):
    """Active to passive: encrypted labels of the next training rows."""

    ciphertexts: Annotated[Array, Form("uint8", "n_rows", "ciphertext_bytes")]


@message
class CellSums(Letter):
    """Passive to active: rows of each cell, and encrypted sums of their labels."""

    widths: Annotated[Array, Form("int64", "n_columns", low=1, high=65536)]  # cells of a column
    is_number: Annotated[Array, Form("uint8", "n_columns", high=1)]  # 1: of numbers
    counts: Annotated[Array, Form("int64", "n_cells", low=0)]
    ciphertexts: Ciphertexts
