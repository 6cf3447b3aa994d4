"""Describing tables at a party: count rows by cell, and sum their labels.

Parties with the same columns first count digits of values, so that all cut at quantiles of all
rows; parties with different columns cut at their own, and sum labels that they cannot read.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from clients.secagg import Masked
from clients.vertical.party import Aligned, Bytes, Floats, Ints, draw_key
from fedapp.crypto.packing import PAIR, PairLayout
from fedapp.crypto.paillier import check_ciphertexts, encrypt
from fedapp.crypto.paillier_keys import PrivateKey, PublicKey, read_public_key
from fedapp.crypto.sums import pack_sums, read_jobs, sum_rows
from fedapp.crypto.workers import shared_workers
from fedapp.data.schema import listed
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.histograms.bins import Cuts, digitise, with_categories
from fedapp.histograms.fixed_point import SPARE_BITS, Bounds, Whole, from_fixed, power_above
from fedapp.histograms.groups import cell_starts
from fedapp.histograms.sketch import LARGEST, digit_counts
from fedapp.messages.describe import (
    ASSOCIATIONS,
    BLOCK_BYTES,
    CellsRequest,
    CellSums,
    CellSumsRequest,
    ColumnsReply,
    CompareReply,
    CompareRequest,
    CountRequest,
    CountsReply,
    CountSumsRequest,
    EncryptReply,
    EncryptRequest,
    FinishReply,
    FinishRequest,
    LabelBlock,
    LabelKey,
    OpenRequest,
    OpenSumsRequest,
    SetupRequest,
    SumRequest,
    TakeRequest,
)
from fedapp.messages.fields import Array, Reply, check_sizes
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.vertical import MatchRequest, OrderRequest, SentReply
from fedapp.metrics.tables import (
    LABEL_DRIFT,
    LARGE_DRIFT,
    MOST_BINS,
    association,
    count_cells,
    cut,
    differences,
    in_groups,
    label_terms,
    split_cells,
    term_exponents,
)
from fedapp.records.codec import IN_FILE
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, handlers, role
from fedapp.site.settings import SiteConfig
from fedapp.site.sums import Sums, is_masked
from fedapp.trees.categories import RARE, Categories, entries_of
from fedapp.trees.objective import check_objective, is_regression
from fedapp.trees.sets import category_counts

log = logging.getLogger("fedapp.site")
MOST_BITS = 64 - SPARE_BITS  # of a sum


def least_rows(config: SiteConfig) -> int:
    """The fewest rows of the site that a figure may be about."""
    return max(config.min_rows, config.least_bin_rows)


# The same columns


@role
class Counting(Masked):
    """A party that counts its training rows; their labels are the last column."""

    title = "a party that describes its rows"
    order = Order(
        {
            HelloRequest: {OpenRequest, OpenSumsRequest},
            OpenRequest: {CountRequest, CellsRequest},
            CountRequest: {CountRequest, CellsRequest},
            CellsRequest: {CompareRequest},
            OpenSumsRequest: {CountSumsRequest, CellSumsRequest},
            CountSumsRequest: {CountSumsRequest, CellSumsRequest},
            CellSumsRequest: {CompareRequest},
        }
    )
    widths: Ints  # categories of each column, 0 of numbers
    rows: Floats  # (n_rows, n_columns), as coarse as they are counted
    label_rows: Floats  # coarser, as their labels are summed
    terms: Whole  # (n_rows, n_terms): of their labels
    n_digits: int = 0  # that have been counted
    cuts: Cuts
    counts: Ints  # rows of each cell

    def open(self, request: OpenRequest) -> Reply | Sums:
        """Code labels and categories; count values by their first digit."""
        return self._open(request)

    def open_sums(self, request: OpenSumsRequest) -> Reply | Sums:
        """The same, and join the run: now only sums leave the site."""
        return self._open(request)

    def _open(self, request: OpenRequest | OpenSumsRequest) -> Reply | Sums:
        self.code(request)
        labels, n_classes = self.labels["train"], len(self.classes)
        power = 0 if n_classes else power_above(float(np.abs(labels).max(initial=0)))
        if power > request.largest or len(labels) > request.n_rows:
            rule = f"must be >= {power}, and n_rows >= {len(labels)}, those of {self.name}"
            raise ProtocolError(self.name, type(request).__name__, "largest", rule)
        if isinstance(request, OpenSumsRequest):
            self.join(request, request)
        self.widths = np.append(self.category_counts, n_classes)
        rows = np.column_stack([self.values["train"], labels]).astype(np.float32)
        classes = labels.astype(np.int64) if n_classes else None
        if classes is not None:  # rows of a class of too few are not described
            frequent = np.bincount(classes)[classes] >= least_rows(self.config)
            rows, classes = rows[frequent], classes[frequent]
        self.rows = in_groups(rows, self.widths, least_rows(self.config))
        self.label_rows = in_groups(self.rows, self.widths, least_rows(self.config), classes)
        bounds = Bounds(request.n_rows, 0, request.largest)
        self.terms = label_terms(self.rows[:, -1], n_classes, bounds)
        is_number = np.append(0, np.cumsum(self.widths == 0))
        prefixes = np.zeros(is_number[-1], dtype=np.uint32)
        # A table without numbers would send nothing but for its number of rows.
        n_rows = np.array([len(labels)], dtype=np.int64)
        return self._leave([self._digits(prefixes, is_number, 0), n_rows])

    def count(self, request: CountRequest) -> Reply | Sums:
        """Count values by the next digit."""
        message, numbers = type(request).__name__, np.diff(request.offsets)
        check_sizes(self.name, request, n_columns=len(self.widths))
        if (numbers > np.where(self.widths > 0, 0, MOST_BINS)).any():
            rule = f"must give a column of numbers {MOST_BINS} at most, and one of categories none"
            raise ProtocolError(self.name, message, "offsets", rule)
        if request.digit != self.n_digits:
            rule = f"must be {self.n_digits}, got {request.digit}: each is counted once"
            raise ProtocolError(self.name, message, "digit", rule)
        return self._leave([self._digits(request.prefixes, request.offsets, request.digit)])

    def count_sums(self, request: CountSumsRequest) -> Reply | Sums:
        """The same, under masks."""
        return self.count(request)

    def _digits(self, prefixes: Array, offsets: Array, digit: int) -> Whole:
        self.n_digits = digit + 1
        ones = np.ones(len(self.rows), dtype=np.int64)
        return digit_counts(self.rows, ones, prefixes, offsets, digit)

    def count_cells(self, request: CellsRequest) -> Reply | Sums:
        """Count rows by cell, and sum their labels."""
        offsets, widths = request.edge_offsets, np.diff(request.edge_offsets)
        check_sizes(self.name, request, n_columns=len(self.widths))
        most = np.where(self.widths > 0, self.widths, MOST_BINS)
        if ((widths < 1) | (widths > most) | ((self.widths > 0) & (widths < most))).any():
            rule = f"must give a column of numbers 1 to {MOST_BINS} bins, and one of categories all"
            raise ProtocolError(self.name, type(request).__name__, "edge_offsets", rule)
        minima = np.full(len(widths), -np.float32(LARGEST), dtype=np.float32)
        self.cuts = with_categories(Cuts(request.edges, offsets, minima), self.widths, self.widths)
        labelled, sums = count_cells(self.label_rows, self.cuts, self.terms)
        self.counts = labelled
        if least_rows(self.config) > 1:  # else both are the same
            self.counts, _ = count_cells(self.rows, self.cuts, self.terms)
        return self._leave([self.counts, labelled, sums])

    def sum_cells(self, request: CellSumsRequest) -> Reply | Sums:
        """The same, under masks."""
        return self.count_cells(request)

    def _leave(self, arrays: list[Whole]) -> Reply | Sums:
        if is_masked(self.site.store):
            return Sums(arrays, follows=True)
        return CountsReply(np.concatenate([array.ravel() for array in arrays]))

    def compare(self, request: CompareRequest) -> CompareReply:
        """Log where this party's rows differ from those of the others, and end."""
        check_sizes(self.name, request, n_cells=len(self.counts))
        names = *(f"column {listed([column])}" for column in self.columns), "the label"
        pair = self.counts, np.maximum(request.counts - self.counts, 0)
        by_column = zip(*(split_cells(each, self.cuts.widths) for each in pair), strict=True)
        for place, cells in enumerate(() if self.config.simulated else by_column):
            edges = self.cuts.column(place)[: 0 if self.widths[place] else None]
            mark = LABEL_DRIFT if place == len(self.columns) else LARGE_DRIFT
            here = dict(zip((self.name, "the others"), cells, strict=True))
            for text in differences(names[place], here, edges, mark):
                log.warning("%s", text)
        self.end()
        return CompareReply()


# Different columns


@role
class Described(Aligned):
    """A party whose columns are cut at their own quantiles; the active one's label is the last."""

    settings: SetupRequest
    widths: Ints  # categories of each column, 0 of numbers
    names: tuple[str, ...]  # of the columns, if they are shared
    category_names: Annotated[Categories, IN_FILE]
    rows: Floats  # (n_train, n_columns), as coarse as they leave
    cuts: Cuts
    points: Floats  # (n_columns, n_percents)
    is_whole: npt.NDArray[np.bool_]

    def accept(self, settings: SetupRequest, mail: Mail) -> None:
        """Check the settings and the order of the rows."""
        with as_protocol_error(self.name, "SetupRequest", "objective"):
            check_objective(settings.objective)
        self.settings = settings
        self.check_order(mail)

    def cut_columns(self, label: Floats | None = None, classes: tuple[str, ...] = ()) -> None:
        """Cut the columns of the training rows, and those of a label."""
        rows, config = np.asarray(self.values[: self.n_train]), self.config
        names, entries = self.columns, entries_of(self.categories, len(self.columns))
        if label is not None:
            rows = np.column_stack([rows, label])
            names, entries = (*names, "label"), (*entries, classes or None)
        self.widths = category_counts(entries, len(names))
        self.rows = in_groups(rows.astype(np.float32), self.widths, least_rows(config))
        self.cuts, points, self.is_whole = cut(self.rows, self.widths)
        self.points = np.full((len(names), MOST_BINS - 1), np.nan, dtype=np.float32)
        for row, of_column in zip(self.points, points, strict=True):
            row[: len(of_column)] = of_column
        is_shared = config.shares_names or config.simulated
        self.names = names if is_shared else ()
        self.category_names = entries if is_shared and config.shares_categories else ()

    def described(self, counts: Ints) -> dict[str, Any]:
        """Fields of ``Columns``, given the rows of each cell."""
        fewest, names = self.config.fewest_named, list[str]()
        by_column = split_cells(counts, self.cuts.widths)
        for entry, cells in zip(self.category_names, by_column, strict=False):
            pairs = zip(entry or (), cells[1:].tolist(), strict=False)
            names += [name if count >= fewest else RARE for name, count in pairs]
        return {
            "names": self.names,
            "categories": tuple(names),
            "n_categories": self.widths,
            "offsets": self.cuts.offsets,
            "edges": self.cuts.edges,
            "points": self.points,
            "is_whole": self.is_whole.astype(np.uint8),
            "counts": counts,
        }

    def layout(self, key_bits: int, n_pairs: int) -> PairLayout:
        """How terms of labels are packed: slots no wider than the sums need."""
        is_measure = is_regression(self.settings.objective)
        precision = MOST_BITS - power_above(self.n_train) if is_measure else 1
        return PairLayout(key_bits, self.n_train, n_pairs, precision)


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
    n_classes: int
    largest: int
    terms: Whole  # (n_train, n_terms): of the labels
    key: Bytes  # the private one
    n_sent: int = 0  # labels that were encrypted

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, cut the columns, code the labels, draw and test the key."""
        self.accept(request, mail)
        classes, numbers = self.number_labels(request.objective)
        label, self.labels, self.n_classes = numbers[: self.n_train], None, len(classes)
        self.cut_columns(label, classes)
        self.largest = power_above(float(np.abs(label).max(initial=0)))
        self.terms = label_terms(self.rows[:, -1], self.n_classes, self._bounds)
        n_pairs = self._pairs.shape[1]
        key = draw_key(
            self.site, request, "describe-columns", lambda one: self.layout(one.bits, n_pairs)
        )
        self.key = key.to_array()
        letter = LabelKey(key.public.to_array(), n_pairs)
        return SentReply(), [(name, letter) for name in self.others]

    @property
    def _bounds(self) -> Bounds:
        return Bounds(self.n_train, 0, self.largest)

    @property
    def _pairs(self) -> Whole:
        """The terms, (n_train, n_pairs, 2), an odd number with zeros beside the last."""
        padded = np.pad(self.terms, ((0, 0), (0, self.terms.shape[1] % PAIR)))
        return padded.reshape(len(padded), -1, PAIR)

    def send_block(self, request: EncryptRequest, mail: Mail) -> tuple[EncryptReply, Letters]:
        """Encrypt the next labels."""
        key, pairs = PrivateKey.from_array(self.key), self._pairs
        most = max(1, BLOCK_BYTES // (key.public.ciphertext_bytes * len(self.others)))
        block = pairs[self.n_sent : self.n_sent + most]
        if not len(block):
            rule = "must come once a block of labels, got one more"
            raise ProtocolError(self.name, "EncryptRequest", "step", rule)
        self.n_sent += len(block)
        plaintexts = self.layout(key.public.bits, pairs.shape[1]).pack(block)
        letter = LabelBlock(encrypt(key, plaintexts, shared_workers()))
        finished = self.n_sent == len(pairs)
        return EncryptReply(finished), [(name, letter) for name in self.others]

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
        """Decrypt the others' sums; say what all columns say about the label."""
        associated = list[list[float | None]]()
        for name in self.peers:
            if name == self.name:
                counts, sums = count_cells(self.rows, self.cuts, self.terms)
                cells = split_cells(counts, self.cuts.widths), split_cells(sums, self.cuts.widths)
                numbers = self.widths[:-1] == 0
            else:
                letter = mail.one(CellSums, name)
                of_cells = self._sums(name, letter)
                widths = letter.widths - 1
                cells = split_cells(letter.counts, widths), split_cells(of_cells, widths)
                numbers = letter.is_number == 1
            for one, of_labels, is_number in zip(*cells, numbers.tolist(), strict=False):
                reals = from_fixed(of_labels, term_exponents(self.n_classes, self._bounds))
                figures = association(one, reals, is_number, self.n_classes > 0)
                associated.append([figures.get(each) for each in ASSOCIATIONS])
        reply = FinishReply(
            **self.described(counts),
            associations=np.array(associated, dtype=np.float64).reshape(-1, len(ASSOCIATIONS)),
        )
        self.end()
        return reply, []

    def _sums(self, name: str, letter: CellSums) -> Whole:
        """Sums of a party's cells, decrypted and checked against its counts."""
        if len(letter.widths) > (most := self.config.limits["most-columns"]):
            rule = f"must be <= {most} (most-columns of {self.name}), got {len(letter.widths)}"
            raise ProtocolError(name, "CellSums", "widths", rule)
        ends = np.cumsum(letter.widths)
        fits = len(ends) and len(letter.counts) == ends[-1]
        if not fits or (np.add.reduceat(letter.counts, ends - letter.widths) != self.n_train).any():
            rule = f"must be of the {self.n_train} rows in every column"
            raise ProtocolError(name, "CellSums", "counts", rule)
        key = PrivateKey.from_array(self.key)
        layout = self.layout(key.public.bits, self._pairs.shape[1])
        jobs = [(layout, np.ones(len(letter.counts), dtype=np.bool_))]
        with as_protocol_error(name, "CellSums", "ciphertexts"):
            (fields,) = read_jobs(key, letter.ciphertexts, jobs, shared_workers())
            sums = np.array(fields, dtype=np.int64)[:, : self.terms.shape[1]]
            if self.n_classes and (sums.sum(axis=1) > letter.counts).any():
                raise ValueError("sums must be of at most the rows that each cell has")
        return sums


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
    label_key: LabelKey | None = None
    blocks: tuple[Bytes, ...] = ()

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, and cut the columns."""
        self.accept(request, mail)
        self.cut_columns()
        return SentReply(), []

    def take(self, request: TakeRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check and store a block of labels, the first with the key."""
        if self.label_key is None:
            self.label_key = mail.one(LabelKey, self.active)
        letter = mail.one(LabelBlock, self.active)
        n_left = self.n_train - sum(map(len, self.blocks))
        if not 0 < len(letter.ciphertexts) <= n_left:
            rule = f"must be of 1 to {n_left} more rows, got {len(letter.ciphertexts)}"
            raise ProtocolError(self.active, "LabelBlock", "ciphertexts", rule)
        with as_protocol_error(self.active, "LabelBlock", "ciphertexts"):
            check_ciphertexts(self._key(self.label_key), letter.ciphertexts)
        self.blocks = (*self.blocks, letter.ciphertexts)
        return SentReply(), []

    def _key(self, letter: LabelKey) -> PublicKey:
        insecure = self.settings.insecure_small_key
        with as_protocol_error(self.active, "LabelKey", "n"):
            read_public_key(letter.n, self.settings.key_bits, insecure_small_key=insecure)
            key = PublicKey.from_array(letter.n)
            self.layout(key.bits, letter.n_pairs)
        is_two = self.settings.objective == "binary:logistic"
        if letter.n_pairs > 1 and (is_two or is_regression(self.settings.objective)):
            rule = f"must be 1 for {self.settings.objective}, got {letter.n_pairs}"
            raise ProtocolError(self.active, "LabelKey", "n_pairs", rule)
        return key

    def sum_cells(self, request: SumRequest, mail: Mail) -> tuple[ColumnsReply, Letters]:
        """Describe the columns; sum encrypted labels by cell, and end."""
        letter, n_taken = self.label_key, sum(map(len, self.blocks))
        if letter is None or n_taken != self.n_train:
            rule = f"must follow the labels of {self.n_train} rows, got {n_taken}"
            raise ProtocolError(self.name, "SumRequest", "step", rule)
        key, starts = PublicKey.from_array(letter.n), cell_starts(self.cuts.widths)
        codes, missing_code = digitise(self.rows, self.cuts)
        cells = np.where(codes == missing_code, 0, codes.astype(np.uint16) + 1).astype(np.uint16)
        counts, _ = count_cells(self.rows, self.cuts, np.empty((len(self.rows), 0), np.int64))
        nodes, workers = np.zeros(self.n_train, dtype=np.int32), shared_workers()
        ciphertexts = np.concatenate(self.blocks)
        sums = sum_rows(key, ciphertexts, cells, starts, nodes, 1, workers)
        layout = self.layout(key.bits, letter.n_pairs)
        sent = CellSums(
            widths=self.cuts.widths + 1,
            is_number=(self.widths == 0).astype(np.uint8),
            counts=counts,
            ciphertexts=pack_sums(key, sums, layout, workers),
        )
        reply = ColumnsReply(**self.described(counts))
        self.end()
        return reply, [(self.active, sent)]


HANDLERS = handlers(Counting, Encrypting, Summing)
