"""The opening of a run over the columns of several parties; alignment of rows; sealed parcels.

Alignment: the parties find the rows that all of them have, and bring them into one order. Source of
the intersection: De Cristofaro and Tsudik 2010, "Practical Private Set Intersection Protocols with
Linear Complexity", section 4, in its form over a group of prime order (ECDH), for two and more
parties.

Parcels carry letters from party to party, which the server cannot open. They travel beside the
fields of a message declared with ``letters=True``, one after the other, with the names of the
peers: the sender of each in a request, the receiver in a reply.

Reveals, in short:

- The server learns numbers of rows and columns, how many rows all have, and warnings; names of
  columns only with ``share-column-names``.
- [align=psi, join=inner] No id leaves a party. The label holder learns which of its rows any other
  party has, a passive party which of its rows all parties have.
- [align=psi, join=left] No id leaves a party. The label holder learns which of its rows any other
  party has, a passive party which of its rows the label holder has.
- [align=psi] A party may invent ids, and learns which of them others have; ``align-most-ratio`` and
  ``align-ids-per-day`` limit it.

In full: what a table looks like from the outside, the run's plan, and which rows are common. No ids
and no hashes of ids leave a party.

By the opening:

- The server learns each party's name, its numbers of rows and columns, and the versions of its
  packages. Where a method copies a table that memory has no room for, it learns how much the site
  has free.
- The server learns whether a party has the labels and, where the run leaves the objective open,
  which one they suggest.
- The server learns a fingerprint of the table that only the party itself can interpret.
- The server learns two public keys of each party, one the same in every run and one of this run.
- The server learns warnings about rows: how many have no label and are dropped, and that ids have
  spaces around or count the rows; and, where a schema aggregates rows by id, how many there were.
- The server learns warnings about features: some have one value or none, number the rows
  or are rounded as float32; are written as dates, as yes and no or with spaces around; are marked
  as categories of numbers, or look like numbers with marks; have names such as NULL that may mean
  no value, or numbers with a unit, with such a value and how many rows have one (only where names
  of columns and of categories are shared).
- The server learns how many values are not in the schema, or equal a number that the schema treats
  as missing but are written differently; and what separates the fields of the file.
- [family=inference] Of a table to predict, the server learns in how many columns the values are
  unlike those trained on, how many values are categories that the model does not know, and whether
  some rows or all lack a weight.
- The server learns the names of columns only where their owner shares them
  (``share-column-names``).
- A party learns whether names are shared, the run's plan, and the names, numbers of
  rows and public keys of the others.

By the alignment:

- The server learns how many rows each party has and how many rows all have in common; with
  ``join=left``, how many each passive party has in common with the active one.
- A passive party learns how many rows the parties have whose lists it masks.
- The active party is the only one to see lists under the masks of all. It learns for every subset
  of the parties how many rows they have in common, and which of its rows any other party has.
- A party masks one list of each other party in a run.
- A model is used only for the party that had the labels when it was trained, whose name is in every
  part: a server cannot make another party the one that learns of predictions.
- A site limits how many ids of others are matched with its rows in 24 hours, over all runs
  (``align-ids-per-day``).
- A passive party learns which of its rows all parties have. It does not learn who has the others.
- [join=left] With ``join=left`` it learns which of its rows the active party has, whoever else has
  them, and how many rows the active party has beside these for training, validation and test, which
  is the size of its table less the common rows. It gets no id, point or digest of such a row, and
  where they are among its rows follows from a digest of the active party's whole table: only who
  has all its ids, values and labels could compare the places with a guess. To predict, they are at
  random.
- [join=left] With ``join=left`` all rows that a passive party lacks go the same way at each of its
  splits, so the others, who learn which rows went where, may see which rows of the active party it
  lacks.
- Every party sends every other a digest of the ids of the common rows (with ``join=left`` the
  active party and each passive one, of those that these two have), and answers nothing about them
  before it has all. So no row is used whose id some party does not know, whatever bits the active
  party sends: it cannot compute a digest of ids that it does not have. Where rows are matched, the
  digests reveal nothing more: a passive party sends its own only after the active one has shown
  that it knows the ids, to parties whose lists have them too.
- Where rows are ranked (a ``qid`` column), or are held back by ``group`` or ``test-from``, the
  active party sends the subset of each row: a passive party learns that rows of two subsets are
  not of one query or group, and of ``test-from``, which of its rows have a time before it, of
  ``folds`` and ``valid-from`` between which times.
- [group!=none] The server learns the name of the column of ``group`` only where the active party
  shares names.
- A party may invent ids, such as all telephone numbers, and learns which of them the others have.
  Nothing stops that; ``align-most-ratio``, ``align-most-rows`` and ``runs-per-day`` limit it, and a
  site warns in its log where few of another party's ids match.
- [align=ordered] With ``align=ordered`` a party learns whether its ids are the active party's, and
  how many rows the others have. The active party's digest is sent before the others show that they
  know the ids: of a table of one or two rows, whose ids can be guessed, it confirms a guess.
- [trains=true] With the scores of test rows the server gets their 95 % intervals, which tell how
  the losses of these rows spread. Accuracy, precision and recall of two classes show the share of
  each.
- Letters between parties are sealed under keys that are bound to all of ``OpenRequest`` and of the
  request before it: two parties that received different requests cannot read each other's letters.
- A thief of a site's disk can read a run's letters to and from the site only during the run;
  afterwards the keys are deleted, as far as the disk erases what is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import numpy as np

from fedapp.errors import as_protocol_error
from fedapp.messages import handshake
from fedapp.messages.fields import (
    Array,
    Form,
    Introduction,
    Letter,
    Message,
    Range,
    Reply,
    Request,
    check_fields,
    message,
    part,
    request,
)
from fedapp.trees.categories import Categories, CategorySets, category_counts
from fedapp.trees.divided import Lookup

INNER, LEFT = "inner", "left"  # rows that all parties have, or all of the active party's
ABSENT = -1
Join = Annotated[str, Range(1, 16)]
Places = Annotated[Array, Form("int32", "n_splits", low=0)]
Owners = Annotated[Array, Form("int64", "n_splits", low=0)]  # numbers of parties, by name


def block_rows(ciphertext_bytes: int, n_receivers: int) -> int:
    """Most ciphertexts that each of ``n_receivers`` parties receives in one message."""
    return max(1, BLOCK_BYTES // (ciphertext_bytes * max(1, n_receivers)))


@part
class RoundScores:
    """Part of a message: scores of the model so far; empty for a subset without rows."""

    score_names: Annotated[tuple[str, ...], Range(0, 20)]
    train_scores: Annotated[Array, Form("float64", "n_train_scores", nan=True)]
    valid_scores: Annotated[Array, Form("float64", "n_valid_scores", nan=True)]


@part
class FinalScores(RoundScores):
    """Part of a message: scores of the finished model, and importance of the columns named."""

    test_scores: Annotated[Array, Form("float64", "n_test_scores", nan=True)]
    # Of some of the test scores, 95 % over samples of as many rows: lower and upper end.
    interval_names: Annotated[tuple[str, ...], Range(0, 20)]
    intervals: Annotated[Array, Form("float64", "n_intervals", 2)]
    column_names: Annotated[tuple[str, ...], Range(0, 10**6)]
    column_gains: Annotated[Array, Form("float64", "n_named", low=0)]  # of all splits of each
    column_counts: Annotated[Array, Form("int64", "n_named", low=0)]


@part
class LevelSplits:
    """Part of a message: splits of a level, by tree and node, without thresholds.

    All parties number the children alike: see ``fedapp.trees.structure``.
    """

    trees: Places
    nodes: Places
    owners: Owners


@part
class SplitTable:
    """Part of a message: splits of the sender, as in ``fedapp.trees.divided``, and its columns."""

    columns: Annotated[Array, Form("int64", "n_records", low=0)]
    thresholds: Annotated[Array, Form("float32", "n_records")]
    defaults: Annotated[Array, Form("uint8", "n_records", high=1)]  # 1: missing goes left
    widths: Annotated[Array, Form("int64", "n_records", low=0)]  # categories; 0: a threshold
    set_bits: Annotated[Array, Form("uint8", "n_set_bytes")]  # categories that go right
    names: Annotated[tuple[str, ...], Range(0, 10**6)]
    kinds: handshake.Kinds
    category_counts: handshake.Counts
    categories: handshake.Names
    few: handshake.Few


def read_splits(
    party: str, message: SplitTable, n_columns: int, rule: str
) -> tuple[Lookup, Categories]:
    """A party's splits and the categories of its columns, checked against each other.

    Raises a ProtocolError, with this rule for ``widths``.
    """
    categories = handshake.read_categories(party, message, n_columns)
    columns, widths = message.columns, message.widths
    fits = len(widths) == len(columns) and bool((columns < n_columns).all())
    fits = fits and (widths == category_counts(categories, n_columns)[columns]).all()
    check_fields(party, message, ("widths", fits, rule))
    with as_protocol_error(party, type(message).__name__, "set_bits"):
        sets = CategorySets(message.set_bits, widths[widths > 0])
    return Lookup(columns, message.thresholds, message.defaults, widths, sets.bits), categories


@request("query.vertical_hello", "reading the tables", leaves="nothing")
class VerticalHelloRequest(handshake.HeldBack, handshake.Plan, Request):
    """Open a run with its plan: read the table and report its size."""

    needs_ids: bool
    most_rows: Annotated[int, Range(1, 2**40)]  # of any party's table; all sites hold lists to it
    seed: Annotated[int, Range(0, 2**63 - 1)]
    # To predict with, which selects columns; empty to train.
    model: Annotated[str, Range(0, 16)]
    asks_objective: bool  # whether to report which objective the labels suggest
    test_fraction: Annotated[float, Range(0, 1)] = 0.0
    valid_fraction: Annotated[float, Range(0, 1)] = 0.0
    least_rows_per_name: Annotated[int, Range(0, 10**9)] = 0  # of a category; 0: as the site says
    join: Join = INNER
    refreshes: bool = False  # whether the rows are those that the standing version does not have


@message
class VerticalHelloReply(Introduction):
    """A description of a party's table; columns in ``notes`` are named as in ``columns``."""

    n_table: Annotated[int, Range(1, 2**40)]
    n_columns: Annotated[int, Range(0, 10**6)]
    columns: Annotated[tuple[str, ...], Range(0, 10**6)]  # empty where they are not shared
    active: bool  # has the labels
    objective: Annotated[str, Range(0, 64)]  # that the labels suggest, if asked; empty if passive
    n_unlike: Annotated[int, Range(0, 10**6)]  # columns unlike those trained on
    box_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; the same in every run
    run_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; of this run only
    n_read: Annotated[int, Range(0, 2**40)] = 0  # rows that were aggregated to these; 0: none

    @property
    def n_rows(self) -> int:
        """Rows of the table."""
        return self.n_table


Points = Annotated[Array, Form("uint8", "n_points", 32)]  # of ristretto255


@request("query.alignment_open", "aligning the rows")
class OpenRequest(handshake.HeldBack, Request):
    """Start the alignment with the names and keys of all parties."""

    names: Annotated[tuple[str, ...], Range(2, 1000)]  # of all parties, in order
    active: Annotated[str, Range(1, 64)]
    box_keys: Annotated[Array, Form("uint8", "n_parties", 32)]
    run_keys: Annotated[Array, Form("uint8", "n_parties", 32)]
    n_rows: Annotated[Array, Form("int64", "n_parties", low=1)]  # of their tables
    ordered: bool
    test_fraction: Annotated[float, Range(0, 1)]
    valid_fraction: Annotated[float, Range(0, 1)]
    seed: Annotated[int, Range(0, 2**63 - 1)]
    join: Join = INNER


@request("query.alignment_mask", "aligning the rows", times=("parties",))
class MaskRequest(Request, letters=True):
    """To a passive party: mask lists once more and pass them on."""


@request("query.alignment_match", "aligning the rows")
class MatchRequest(Request, letters=True):
    """To the active party: find the common rows."""


@request("query.alignment_order", "aligning the rows")
class OrderRequest(Request, letters=True):
    """To a passive party: keep the common rows, in the common order."""


@message
class Partition(Letter):
    """Which rows go left, from the party that made some of a level's splits.

    A bit a row of the nodes: the splits in their order, rows ascending.
    """

    level: Annotated[int, Range(0, 1000)]
    bits: Annotated[Array, Form("uint8", "n_bytes")]


@message
class MatchReply(Reply, letters=True):
    """Parcels for the passive parties, and how many rows there are."""

    # Of each party's table, in the order of their names: rows that all have or, with join=left,
    # those that the active party has too (its own: that all have). None without score_test.
    n_matched: Annotated[Array, Form("int64", "n_parties", low=0)]
    n_train: Annotated[int, Range(0, 2**40)]
    n_valid: Annotated[int, Range(0, 2**40)]
    n_test: Annotated[int, Range(0, 2**40)]


@message
class MaskedList(Letter):
    """A party's ids as points, under the masks of all parties that have had the list."""

    owner: Annotated[str, Range(1, 64)]
    n_masks: Annotated[int, Range(1, 1000)]
    points: Points


@message
class CommonRows(Letter):
    """Active to passive: which entries of the receiver's list are used."""

    common: Annotated[Array, Form("uint8", "n_common_bytes")]  # bits; none with ordered or left
    # With join=left, of each row in the common order: its place in the receiver's list, or ABSENT.
    places: Annotated[Array, Form("int32", "n_places", low=ABSENT)]
    key: Annotated[Array, Form("uint8", 32)]  # of the digests of the order
    digest: Annotated[Array, Form("uint8", 32)]  # the sender's, see OrderDigest
    # Where the active party draws, of rows in the common order: 0 trains, 1 validates, 2 tests, 3
    # is not used.
    subsets: Annotated[Array, Form("uint8", "n_ranked_rows", high=3)]


@message
class OrderDigest(Letter):
    """Passive to all others: keyed digest of the ids in the common order and of the sender's name.

    Only who knows all these ids can compute it, and nobody can turn another party's into its own.
    """

    digest: Annotated[Array, Form("uint8", 32)]


@message
class Parcels(Message):
    """Parcels, each with its peer; one peer may have several."""

    peers: Annotated[tuple[str, ...], Range(0, 10**5)]
    parcel_ends: Annotated[Array, Form("int64", "n_parcels", low=0, ends="n_bytes")]
    parcels: Annotated[Array, Form("uint8", "n_bytes")]


@message
class SentReply(Reply, letters=True):
    """Parcels for others, and nothing for the server."""


Parcel = tuple[str, bytes]  # peer, sealed content


def pack_parcels(parcels: Iterable[Parcel]) -> Parcels:
    """Concatenate parcels."""
    pairs = list(parcels)
    return Parcels(
        tuple(peer for peer, _ in pairs),
        np.cumsum([len(content) for _, content in pairs], dtype=np.int64),
        np.frombuffer(b"".join(content for _, content in pairs), dtype=np.uint8),
    )


def unpack_parcels(packed: Parcels) -> list[Parcel]:
    """Inverse of ``pack_parcels``."""
    ends = packed.parcel_ends.tolist()
    starts = [0, *ends[:-1]]
    content = packed.parcels.tobytes()
    return [
        (peer, content[start:end])
        for peer, start, end in zip(packed.peers, starts, ends, strict=False)
    ]


# Of ciphertexts in one message, for all its receivers. A party and the server have some five copies
# of a message in memory at once, as it is sealed, laid out and opened.
BLOCK_BYTES = 2**25

GROUPS = {
    "vertical": frozenset({"vertical", "inference"}),
    "alignment": frozenset({"vertical", "inference"}),
}
