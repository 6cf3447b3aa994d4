"""Describing tables at a party: count rows by cell, and sum their labels, read or encrypted."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from clients.secagg import Masked
from clients.vertical.ciphertexts import Cipher, EncryptedRows
from clients.vertical.party import Aligned
from fedapp.arrays import Floats, Ints
from fedapp.crypto.packing import PAIR, Layout
from fedapp.data.schema import listed
from fedapp.errors import as_protocol_error
from fedapp.histograms.bins import Cuts, with_categories
from fedapp.histograms.fixed_point import SPARE_BITS, Bounds, Whole, power_above
from fedapp.histograms.groups import cell_starts
from fedapp.histograms.sketch import LARGEST_FLOAT, digit_counts
from fedapp.messages.describe import (
    ASSOCIATIONS,
    CellsRequest,
    CellSums,
    ColumnsReply,
    CompareReply,
    CompareRequest,
    CountRequest,
    CountsReply,
    EncryptReply,
    EncryptRequest,
    FinishRequest,
    LabelBlock,
    LabelKey,
    OpenRequest,
    SetupRequest,
    SumRequest,
    TakeRequest,
)
from fedapp.messages.fields import Array, check_fields, check_sizes
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.vertical import MatchRequest, OrderRequest, SentReply, block_rows
from fedapp.metrics.tables import (
    MOST_BINS,
    PERCENTS,
    associations,
    cells_of_rows,
    count_cells,
    cut,
    figure_bits,
    in_groups,
    label_terms,
    new_descent,
    readable_labels,
    rounded_figures,
    split_cells,
    table_differences,
)
from fedapp.records.codec import IN_FILE
from fedapp.site.account import is_masked
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, handlers, role
from fedapp.site.sums import Sums
from fedapp.trees.categories import RARE, Categories, category_counts, entries_of
from fedapp.trees.objective import check_objective, is_regression

log = logging.getLogger("fedapp.site")


# The same columns


@role
class Counting(Masked):
    """A party that counts its training rows; their labels are the last column."""

    title = "a party that describes its rows"
    order = Order(
        {
            HelloRequest: {OpenRequest},
            OpenRequest: {CountRequest, CellsRequest},
            CountRequest: {CountRequest, CellsRequest},
            CellsRequest: {CompareRequest},
        }
    )
    widths: Ints  # categories of each column, 0 of numbers
    rows: Floats  # (n_rows, n_columns), as coarse as they are counted
    label_rows: Floats  # coarser, as their labels are summed
    terms: Whole  # (n_rows, n_terms): of their labels
    n_digits: int = 0  # that have been counted
    cuts: Cuts
    counts: Ints  # rows of each cell

    def open(self, request: OpenRequest) -> Sums:
        """Code labels and categories; count values by their first digit."""
        self.code(request)
        labels, n_classes = self.labels["train"], len(self.classes)
        least, n_rows = self.config.fewest_counted, np.array([len(labels)], dtype=np.int64)
        power = 0 if n_classes else power_above(float(np.abs(labels).max(initial=0)))
        covers = power <= request.largest and len(labels) <= request.n_rows
        rule = f"must be >= {power}, and n_rows >= {len(labels)}, those of {self.name}"
        check_fields(self.name, request, ("largest", covers, rule))
        if is_masked(self.site.store):
            self.join(request)
        self.widths = np.append(self.category_counts, n_classes)
        classes = labels.astype(np.int64) if n_classes else np.zeros(len(labels), dtype=np.int64)
        frequent = np.bincount(classes)[classes] >= least  # other classes are not described
        rows = np.column_stack([self.values["train"], labels]).astype(np.float32)[frequent]
        self.rows = in_groups(rows, self.widths, least)
        self.label_rows = in_groups(self.rows, self.widths, least, classes[frequent])
        bounds = Bounds(request.n_rows, 0, request.largest)
        self.terms = label_terms(self.rows[:, -1], n_classes, bounds)
        # A table without numbers would send nothing but for its number of rows.
        return counted(self._digits(*new_descent(self.widths).wanted(), 0), n_rows)

    def count(self, request: CountRequest) -> Sums:
        """Count values by the next digit."""
        check_sizes(self.name, request, n_columns=len(self.widths))
        are_few = np.diff(request.offsets) <= np.where(self.widths > 0, 0, MOST_BINS)
        rule = f"must give a column of numbers {MOST_BINS} at most, and one of categories none"
        once = f"must be {self.n_digits}, got {request.digit}: each is counted once"
        check_fields(
            self.name,
            request,
            ("offsets", are_few.all(), rule),
            ("digit", request.digit == self.n_digits, once),
        )
        return counted(self._digits(request.prefixes, request.offsets, request.digit))

    def _digits(self, prefixes: Array, offsets: Array, digit: int) -> Whole:
        self.n_digits = digit + 1
        ones = np.ones(len(self.rows), dtype=np.int64)
        return digit_counts(self.rows, ones, prefixes, offsets, digit)

    def count_cells(self, request: CellsRequest) -> Sums:
        """Count rows by cell, and sum their labels."""
        offsets, widths = request.edge_offsets, np.diff(request.edge_offsets)
        check_sizes(self.name, request, n_columns=len(self.widths))
        most = np.where(self.widths > 0, self.widths, MOST_BINS)
        fits = (widths >= np.maximum(self.widths, 1)).all() and (widths <= most).all()
        rule = f"must give a column of numbers 1 to {MOST_BINS} bins, and one of categories all"
        check_fields(self.name, request, ("edge_offsets", fits, rule))
        minima = np.full(len(widths), -np.float32(LARGEST_FLOAT), dtype=np.float32)
        self.cuts = with_categories(Cuts(request.edges, offsets, minima), self.widths, self.widths)
        labelled, sums = count_cells(self.label_rows, self.cuts, self.terms)
        self.counts, _ = count_cells(self.rows, self.cuts)
        return counted(self.counts, labelled, sums)

    def compare(self, request: CompareRequest) -> CompareReply:
        """Log where this party's rows differ from those of the others, and end."""
        check_sizes(self.name, request, n_cells=len(self.counts))
        others = np.maximum(request.counts - self.counts, 0)
        by_party = {self.name: self.counts, "the others": others}
        names = [listed([column]) for column in self.columns]
        for text in () if self.config.simulated else table_differences(names, self.cuts, by_party):
            log.warning("%s", text)
        self.end()
        return CompareReply()


def counted(*arrays: Whole) -> Sums:
    """What a request counts, one array after the other."""
    counts = np.concatenate([array.ravel() for array in arrays])
    return Sums([counts], CountsReply, follows=True)


# Different columns


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """How the values of columns are distributed."""

    cuts: Cuts
    points: Floats  # (n_columns, n_percents)
    is_whole: npt.NDArray[np.bool_]


@role
class Described(Aligned):
    """A party whose columns are cut at their own quantiles; the active one's label is the last."""

    settings: SetupRequest
    widths: Ints  # categories of each column, 0 of numbers
    names: tuple[str, ...]  # of the columns, if they are shared
    shown_kinds: tuple[str, ...]  # with the names; of the label ""
    category_names: Annotated[Categories, IN_FILE]
    rows: Floats  # (n_train, n_columns), as coarse as they leave
    summary: Summary

    def begin(self, settings: SetupRequest, mail: Mail) -> None:
        """Check the settings and the order of the rows, and cut the columns of training rows."""
        with as_protocol_error(self.name, "SetupRequest", "objective"):
            check_objective(settings.objective)
        self.settings = settings
        self.check_order(mail)
        rows, config = np.asarray(self.values[: self.n_train]), self.config
        names, entries = self.columns, entries_of(self.categories, len(self.columns))
        if self.is_active:
            classes, labels = self.number_labels(settings.objective)
            rows, self.labels = np.column_stack([rows, labels[: self.n_train]]), None
            names, entries = (*names, "label"), (*entries, classes or None)
        self.widths = category_counts(entries, len(names))
        self.rows = in_groups(rows.astype(np.float32), self.widths, config.fewest_counted)
        cuts, percentiles, is_whole = cut(self.rows, self.widths)
        points = np.full((len(names), len(PERCENTS)), np.nan, dtype=np.float32)
        for row, of_column in zip(points, percentiles, strict=True):
            row[: len(of_column)] = of_column
        self.summary = Summary(cuts, points, is_whole)
        is_shared = config.shares_names or config.simulated
        self.names = names if is_shared else ()
        self.shown_kinds = (*self.kinds, *[""] * self.is_active) if is_shared else ()
        self.category_names = entries if is_shared and config.shares_categories else ()

    def described(self, counts: Ints) -> dict[str, Any]:
        """Fields of a ``ColumnsReply``, given the rows of each cell."""
        fewest, names = self.config.fewest_named, list[str]()
        by_column = split_cells(counts, self.summary.cuts.widths)
        for entry, cells in zip(self.category_names, by_column, strict=False):
            pairs = zip(entry or (), cells[1:].tolist(), strict=False)
            names += [name if count >= fewest else RARE for name, count in pairs]
        return {
            "names": self.names,
            "kinds": self.shown_kinds,
            "categories": tuple(names),
            "n_categories": self.widths,
            "offsets": self.summary.cuts.offsets,
            "edges": self.summary.cuts.edges,
            "points": self.summary.points,
            "is_whole": self.summary.is_whole.astype(np.uint8),
            "counts": counts,
        }

    def layout(self, n_pairs: int) -> Layout:
        """How pairs of a label's terms are packed: slots no wider than the sums need."""
        most_bits = 64 - SPARE_BITS - power_above(self.n_train)
        precision = most_bits if is_regression(self.settings.objective) else 1
        return Layout(self.settings.key_bits, self.n_train, n_pairs, precision)


@role
class Encrypting(Described):
    """The active party."""

    title = "the party with the labels"
    order = Order(
        {
            MatchRequest: {SetupRequest},
            SetupRequest: {EncryptRequest},
            EncryptRequest: {EncryptRequest, FinishRequest},
        }
    )
    bounds: Bounds  # of the labels
    terms: Whole  # (n_train, n_terms): of the labels
    cipher: Cipher
    n_sent: int = 0  # labels that were encrypted

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, cut the columns, code the labels, draw and test the key."""
        self.begin(request, mail)
        labels = self.rows[:, -1]
        largest = float(np.nan_to_num(np.abs(labels)).max(initial=0))
        self.bounds = Bounds(self.n_train, 0, power_above(largest))
        self.terms = label_terms(labels, int(self.widths[-1]), self.bounds)
        n_pairs = -(-self.terms.shape[1] // PAIR)
        self.cipher = Cipher.drawn(self, request, lambda _: (self.layout(n_pairs),))
        letter = LabelKey(self.cipher.public_key.to_array(), n_pairs)
        return SentReply(), self.to_others(letter)

    def send_block(self, request: EncryptRequest, mail: Mail) -> tuple[EncryptReply, Letters]:
        """Encrypt the next labels."""
        width = self.cipher.public_key.ciphertext_bytes
        first, last = self.n_sent, self.n_sent + block_rows(width, len(self.others))
        block = self.terms[first:last]
        rule = "must come once a block of labels, got one more"
        check_fields(self.name, request, ("step", len(block), rule))
        self.n_sent += len(block)
        # With an odd number of terms the last has zeros beside it.
        pairs = np.pad(block, ((0, 0), (0, block.shape[1] % PAIR)))
        letter = LabelBlock(self.cipher.encrypted(pairs.reshape(len(block), -1, PAIR)))
        return EncryptReply(self.n_sent == self.n_train), self.to_others(letter)

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[ColumnsReply, Letters]:
        """Decrypt the others' sums; say what all columns say about the label."""
        cuts = self.summary.cuts
        counts, sums = count_cells(self.rows, cuts, self.terms)
        local = counts, sums, cuts.widths[:-1], self.widths[:-1] == 0
        of_parties = {name: self._sums(name, mail.one(CellSums, name)) for name in self.others}
        n_others = sum(len(widths) for _, _, widths, _ in of_parties.values())
        of_parties[self.name] = local
        figures = list[list[float | None]]()
        for name in self.peers if self._shares_figures(n_others) else ():
            for of_column in associations(of_parties[name], int(self.widths[-1]), self.bounds):
                leaving = of_column if self.config.simulated else rounded_figures(of_column)
                figures.append([leaving.get(name) for name in ASSOCIATIONS])
        values = np.array(figures, dtype=np.float64).reshape(-1, len(ASSOCIATIONS))
        self.end()
        return ColumnsReply(**self.described(counts), associations=values), []

    def _shares_figures(self, n_columns: int) -> bool:
        """Whether figures over labels may leave, given the number of the others' columns.

        A passive party can have sent any sums, so figures encode what it wants to know.
        """
        if self.config.simulated or not self.config.shares_label_figures:
            return self.config.simulated
        n_bits = n_columns * figure_bits(int(self.widths[-1]))
        most = readable_labels(self.n_train)
        if n_bits > most:
            log.warning(
                "figures over labels stay here: those of %d columns of other parties have %d bits, "
                "for %d rows at most %d",
                *(n_columns, n_bits, self.n_train, most),
            )
        return n_bits <= most

    def _sums(self, name: str, letter: CellSums) -> tuple[Ints, Whole, Ints, Array]:
        """Rows of a party's cells, sums of their labels, decrypted and checked, and its columns."""
        most, got = self.config.most_columns, len(letter.widths)
        rule = f"must be <= {most} (most-columns of {self.name}), got {got}"
        check_fields(name, letter, ("widths", got <= most, rule))
        ends, n_train = np.cumsum(letter.widths), self.n_train
        fits = len(ends) and len(letter.counts) == ends[-1]
        fits = fits and (np.add.reduceat(letter.counts, ends - letter.widths) == n_train).all()
        check_fields(
            name, letter, ("counts", fits, f"must be of the {n_train} rows in every column")
        )
        (fields,) = self.cipher.read(name, letter, [(0, np.ones_like(letter.counts, bool))])
        sums = np.array(fields, dtype=np.int64)[:, : self.terms.shape[1]]
        with as_protocol_error(name, "CellSums", "ciphertexts"):
            is_classes = self.widths[-1] > 0
            if is_classes and ((sums < 0).any() or (sums.sum(axis=1) > letter.counts).any()):
                raise ValueError("sums must be of at most the rows that each cell has")
            if (np.add.reduceat(sums, ends - letter.widths) != self.terms.sum(axis=0)).any():
                raise ValueError("sums must add up to all labels in every column")
        return letter.counts, sums, letter.widths - 1, letter.is_number == 1


@role
class Summing(Described):
    """A passive party."""

    title = "a party without labels"
    order = Order(
        {
            OrderRequest: {SetupRequest},
            SetupRequest: {TakeRequest},
            TakeRequest: {TakeRequest, SumRequest},
        }
    )
    encrypted: EncryptedRows  # the labels

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, and cut the columns."""
        self.begin(request, mail)
        return SentReply(), []

    def take(self, request: TakeRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check and store a block of labels, the first with the key."""
        if self.follows(SetupRequest):
            key, objective = mail.one(LabelKey, self.active), self.settings.objective
            self.encrypted = EncryptedRows.none(
                self, key, self.settings, lambda _: (self.layout(key.n_pairs),)
            )
            is_one = objective == "binary:logistic" or is_regression(objective)
            rule = f"must be 1 for {objective}, got {key.n_pairs}"
            check_fields(self.active, key, ("n_pairs", key.n_pairs <= 1 or not is_one, rule))
        letter = mail.one(LabelBlock, self.active)
        n_left, got = self.n_train - len(self.encrypted), len(letter.ciphertexts)
        rule = f"must be of 1 to {n_left} more rows, got {got}"
        check_fields(self.active, letter, ("ciphertexts", 0 < got <= n_left, rule))
        self.encrypted = self.encrypted.plus(self.active, letter)
        return SentReply(), []

    def sum_cells(self, request: SumRequest, mail: Mail) -> tuple[ColumnsReply, Letters]:
        """Describe the columns; sum encrypted labels by cell, and end."""
        n_train, got = self.n_train, len(self.encrypted)
        rule = f"must follow the labels of {n_train} rows, got {got}"
        check_fields(self.name, request, ("step", got == n_train, rule))
        cuts = self.summary.cuts
        counts, _ = count_cells(self.rows, cuts)
        cells, starts = cells_of_rows(self.rows, cuts), cell_starts(cuts.widths)
        sent = CellSums(
            widths=cuts.widths + 1,
            is_number=(self.widths == 0).astype(np.uint8),
            counts=counts,
            ciphertexts=self.encrypted.sums(cells, starts, np.zeros(n_train, np.int32), 1),
        )
        nothing = np.empty((0, len(ASSOCIATIONS)))
        reply = ColumnsReply(**self.described(counts), associations=nothing)
        self.end()
        return reply, [(self.active, sent)]


HANDLERS = handlers(Counting, Encrypting, Summing)
