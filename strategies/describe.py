"""Describing tables together before training: counts, quantiles, differences, leaks.

Parties with the same columns count the digits of their values (``fedapp.histograms.sketch``), then
rows by cell. In the clear each party's counts reach the server, which compares them; under masks
only sums do, and each party compares its own rows with all. Either way the figures follow from the
sums (``fedapp.metrics.tables``), and equal those of one table in one place.

Parties with different columns describe their own; the active party decrypts sums of its labels over
the cells of the others. Read ``fedapp.messages.describe``, this file, then ``clients.describe``.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from fedapp.conversation import Conversation, Saved, SavedModel, ask
from fedapp.data.schema import first, listed
from fedapp.errors import ConfigError, ProtocolError, as_plain
from fedapp.histograms.bins import Floats, with_categories
from fedapp.histograms.fixed_point import Whole, from_fixed
from fedapp.histograms.groups import cell_starts
from fedapp.histograms.sketch import BASE, N_DIGITS
from fedapp.messages.describe import (
    ASSOCIATIONS,
    CellsRequest,
    CellSumsRequest,
    Columns,
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
    OpenRequest,
    OpenSumsRequest,
    SetupRequest,
    SumRequest,
    TakeRequest,
)
from fedapp.messages.fields import Request
from fedapp.messages.vertical import SentReply
from fedapp.metrics.tables import (
    LABEL_DRIFT,
    LARGE_DRIFT,
    PERCENTS,
    association,
    describe_column,
    differences,
    divergence,
    leaks,
    new_descent,
    split_cells,
    term_exponents,
)
from fedapp.run_folder import without_nan
from fedapp.settings import Section, Settings
from fedapp.trees.categories import entries_of
from strategies.common_table import WITHIN_WORDS
from strategies.handshake import Hellos
from strategies.horizontal import HorizontalStrategy
from strategies.method import BASE_MARGIN, LABEL_PRIVACY, SPLIT_SETTINGS, Summary, TreeStrategy
from strategies.secagg import MaskedSums, exchange_keys, row_bounds
from strategies.vertical import Hellos as VerticalHellos
from strategies.vertical import VerticalStrategy, check_key_bits

DESCRIPTION = "description.json"
NO_EDGES = np.empty(0, dtype=np.float32)  # of categories
LABEL = "label"
LONG_NAME = 6  # letters from which one other letter is rather a slip
SLIPS = 1000  # names of a column that are compared letter by letter


class RowsSettings(Section):
    """``[describe-rows]`` of the run config."""

    table = "describe-rows"

    aggregation: Literal["plain", "secure"]
    """`secure`: the coordinator sees only counts over all parties, under masks."""


class DescribeRows(HorizontalStrategy):
    """Describes the training rows of parties with the same columns."""

    method = "describe-rows"
    section_class = RowsSettings
    reads = BASE_MARGIN | {"least-bin-rows"}
    may_lose = False
    section: RowsSettings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sees_only_sums = self.section.aggregation == "secure"
        self.masked: MaskedSums | None = None

    @classmethod
    def section_settings(cls, settings: Settings) -> RowsSettings:
        """``[describe-rows]``, checked."""
        if settings.min_parties:
            rule = f"must be 0 for {cls.method}, which needs the counts of all"
            raise ConfigError(f"min-parties {rule}, got {settings.min_parties}")
        return RowsSettings.of(settings)

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        """Nothing is trained."""
        return 0

    def plan(self) -> dict[str, Any]:
        return {**super().plan(), "aggregation": self.section.aggregation}

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Summary]:
        """Quantiles digit by digit, rows by cell, and what differs."""
        table = self.agree(parties, None)
        n_classes = len(table.classes)
        widths = np.append(table.category_counts, n_classes)
        opening: dict[str, Any] = self.terms()
        bounds = row_bounds(parties)  # without weights
        if self.sees_only_sums:
            roster, _, _ = yield from exchange_keys(parties)
            self.masked = MaskedSums(roster["names"])
            opening |= roster
        else:
            opening |= {"n_rows": bounds.n_rows, "largest": bounds.largest}
        is_number, n_terms = widths == 0, n_classes or 2
        shapes: list[tuple[int, ...]] = [(int(is_number.sum()), BASE), (1,)]
        first = yield from self._ask(parties, (OpenRequest, OpenSumsRequest), shapes, **opening)
        descent = new_descent(widths)
        descent.take(first[0][0])
        while is_number.any() and descent.digit < N_DIGITS:
            prefixes, offsets = descent.wanted()
            fields: dict[str, Any] = {"prefixes": prefixes, "offsets": offsets}
            fields["digit"] = descent.digit
            asking = (CountRequest, CountSumsRequest), [(len(prefixes), BASE)]
            (counts,), _ = yield from self._ask(parties, *asking, **fields)
            descent.take(counts)
        cuts = with_categories(descent.cuts(), widths, widths)
        n_cells = len(cuts.edges) + len(widths)
        shapes = [(n_cells,), (n_cells,), (n_cells, n_terms)]
        fields = {"edges": cuts.edges, "edge_offsets": cuts.offsets}
        kinds = CellsRequest, CellSumsRequest
        (counts, labelled, sums), by_party = yield from self._ask(parties, kinds, shapes, **fields)
        for party, (_, rows, labels) in by_party.items():
            if n_classes and ((labels < 0).any() or (labels.sum(axis=1) > rows).any()):
                rule = "must be of no more labels than rows in each cell"
                raise ProtocolError(party, "CountsReply", "counts", rule)
        yield from ask(parties.all(CompareRequest(counts)), CompareReply)
        reals = from_fixed(sums, term_exponents(n_classes, bounds))
        edges = [NO_EDGES if width else cuts.column(i) for i, width in enumerate(widths.tolist())]
        cells, points = split_cells(counts, cuts.widths), descent.points()
        names = *table.columns, self.settings.label or LABEL
        categories = [*(entries_of(table.categories, len(table.columns))), table.classes or None]
        facts = zip(names, categories, strict=True)
        columns = [
            {"name": name, "categories": list(texts or ()), **describe_column(*each)}
            for (name, texts), *each in zip(
                facts, cells, points, edges, descent.is_whole.tolist(), strict=True
            )
        ]
        of_labels = [split_cells(each, cuts.widths) for each in (labelled, reals)]
        for column, number, rows, labels in zip(columns, is_number, *of_labels, strict=True):
            column["label"] = association(rows, labels, bool(number), n_classes > 0)
        columns[-1] |= {"label": {}, "is_label": True}
        counted = {name: split_cells(one, cuts.widths) for name, (one, *_) in by_party.items()}
        self._compare(columns, counted, edges) if counted else None
        return (yield from _described(self, columns, int(cells[0].sum())))

    def _ask(
        self,
        parties: Hellos,
        kinds: tuple[type[Request], type[Request]],
        shapes: Sequence[tuple[int, ...]],
        **fields: Any,
    ) -> Conversation[tuple[list[Whole], dict[str, list[Whole]]]]:
        """Sums of arrays of these shapes over all parties, and in the clear those of each."""
        if self.masked is not None:
            sums = yield from self.masked.ask(parties, kinds[1](**fields), *shapes, may_fail=0)
            return sums, {}
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])

        def check(party: str, reply: CountsReply) -> None:
            n_rows, rows = parties[party].n_train, reply.counts[: ends[0]]
            if len(reply.counts) != ends[-1] or ((rows < 0) | (rows > n_rows)).any():
                rule = f"must be {ends[-1]}, of 0 to {n_rows} rows, got {len(reply.counts)}"
                raise ProtocolError(party, "CountsReply", "counts", rule)

        replies = yield from ask(parties.all(kinds[0](**fields)), CountsReply, check)
        by_party = {
            party: [
                part.reshape(shape)
                for part, shape in zip(np.split(reply.counts, ends[:-1]), shapes, strict=True)
            ]
            for party, reply in replies.items()
        }
        return [np.sum(arrays, axis=0) for arrays in zip(*by_party.values(), strict=True)], by_party

    def _compare(
        self,
        columns: Sequence[dict[str, Any]],
        by_party: Mapping[str, Sequence[Whole]],
        edges: Sequence[Floats],
    ) -> None:
        """Compare the parties' rows; add their counts, in cells of each column, to the columns."""
        for place, column in enumerate(columns):
            cells = {party: of_party[place] for party, of_party in by_party.items()}
            for party, here in cells.items():
                n_rows = self.parties[party].n_train
                if not by_party[party][0].sum() == here.sum() <= n_rows:
                    rule = f"must be of the same rows in every column, {n_rows} at most"
                    raise ProtocolError(party, "CountsReply", "counts", rule)
            total = np.sum([*cells.values()], axis=0)
            column["by_party"] = {
                party: {"counts": here.tolist(), "drift": divergence(here, total - here)}
                for party, here in cells.items()
            }
            is_label = place == len(columns) - 1
            name = "the label" if is_label else f"column {listed([column['name']])}"
            mark = LABEL_DRIFT if is_label else LARGE_DRIFT
            for text in differences(name, cells, edges[place], mark):
                self.warn_once(as_plain(text))


class ColumnsSettings(Section):
    """``[describe-columns]`` of the run config."""

    table = "describe-columns"

    key_bits: Annotated[int, Field(ge=256, le=8192)]
    """Bits of Paillier's modulus."""
    insecure_small_key: bool
    """Whether fewer than 2048 bits are allowed, for trials."""


class DescribeColumns(VerticalStrategy):
    """Describes the columns of parties with the same rows, and what they say about the label."""

    method = "describe-columns"
    section_class = ColumnsSettings
    reads = BASE_MARGIN | SPLIT_SETTINGS | LABEL_PRIVACY | {"objective"}
    section: ColumnsSettings

    @classmethod
    def section_settings(cls, settings: Settings) -> ColumnsSettings:
        """``[describe-columns]``, checked."""
        section = ColumnsSettings.of(settings)
        check_key_bits(section.key_bits, section.insecure_small_key, cls.method)
        return section

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        """Nothing is trained."""
        return 0

    def conversation(self, parties: VerticalHellos, saved: Saved | None) -> Conversation[Summary]:
        """Align the rows, encrypt labels in blocks, sum and decrypt."""
        mailbox, rows = yield from self.match_rows(parties)
        active, passive = mailbox.active, mailbox.passive
        fields = {"objective": self.settings.objective, **self.section.model_dump()}
        yield from mailbox.relay(SetupRequest, parties, SentReply, **fields)
        finished = False
        while not finished:
            replies = yield from mailbox.relay(EncryptRequest, [active], EncryptReply)
            yield from mailbox.relay(TakeRequest, passive, SentReply)
            finished = replies[active].finished
        described: dict[str, Columns] = {}
        described |= yield from mailbox.relay(SumRequest, passive, ColumnsReply)
        finishing = mailbox.relay(FinishRequest, [active], FinishReply)
        last = (yield from finishing)[active]
        described[active] = last
        columns = list[dict[str, Any]]()
        for party in parties:
            columns += _columns_of(party, described[party], rows["train"], party == active)
        features = [one for one in columns if "is_label" not in one]
        if len(last.associations) != len(features):
            rule = f"must be {len(features)}, got {len(last.associations)}"
            raise ProtocolError(active, "FinishReply", "associations", rule)
        for column, values in zip(features, without_nan(last.associations.tolist()), strict=True):
            figures = dict(zip(ASSOCIATIONS, values, strict=True))
            column["label"] = {name: one for name, one in figures.items() if one is not None}
        more = {"active": active, "matched_rows": rows}
        return (yield from _described(self, columns, rows["train"], **more))


def _columns_of(
    party: str, reply: Columns, n_rows: int, has_label: bool
) -> Iterator[dict[str, Any]]:
    """A party's columns, checked; the last is the label where it has one."""
    widths, n_columns = np.diff(reply.offsets), len(reply.n_categories)
    names = iter(reply.categories)
    starts = cell_starts(widths)
    rules = {
        "counts": len(reply.counts) == starts[-1]
        and bool((np.add.reduceat(reply.counts, starts[:-1]) == n_rows).all()),
        "n_categories": bool(((widths == reply.n_categories) | (reply.n_categories == 0)).all()),
        "names": len(reply.names) in (0, n_columns),
        "categories": len(reply.categories) in (0, reply.n_categories.sum()),
        "points": reply.points.shape[1] == len(PERCENTS),
    }
    for field, fits in rules.items():
        if not fits:
            rule = f"must be of {n_columns} columns of {n_rows} rows"
            raise ProtocolError(party, type(reply).__name__, field, rule)
    for place, cells in enumerate(split_cells(reply.counts, widths)):
        n_names = int(reply.n_categories[place])
        edges = reply.edges[reply.offsets[place] : reply.offsets[place + 1]]
        points, whole = reply.points[place], bool(reply.is_whole[place])
        edges = NO_EDGES if n_names else edges
        yield {
            "party": party,
            "name": reply.names[place] if reply.names else f"column {place + 1}",
            "categories": list(islice(names, n_names)),
            **describe_column(cells, points[~np.isnan(points)], edges, whole),
            "label": {},
            **({"is_label": True} if has_label and place == n_columns - 1 else {}),
        }


def _described(
    strategy: TreeStrategy[Any], columns: Sequence[dict[str, Any]], n_rows: int, **more: Any
) -> Conversation[Summary]:
    """Warn about names and leaks, and write the description; returns the summary's part."""
    for column in columns:
        whose = f" of {column['party']}" if "party" in column else ""
        name = f"column {listed([column['name']])}{whose}"
        agreed = f"categories of {listed([column['name']])} differ only in spelling"
        is_shown = any(text.startswith(agreed) for text in strategy.warnings)
        near = near_names(column["categories"], not is_shown)
        pairs = [f"{one!r} and {other!r}" for one, other in near]
        texts = [f"{name} may have a category in two spellings: {first(pairs, 3)}"] if pairs else []
        for text in (*texts, *leaks(name, column)):
            strategy.warn_once(as_plain(text))
    document = {"rows": n_rows, "columns": columns, "warnings": strategy.warnings}
    yield SavedModel({DESCRIPTION: json.dumps(without_nan(document), indent=1) + "\n"})
    return {"metrics": {}, "trees": 0, "importance": {}, "best_round": None, **more}


def near_names(names: Iterable[str], with_spelling: bool = True) -> list[tuple[str, str]]:
    """Pairs of names that differ in one letter of many or, ``with_spelling``, in spelling only."""
    spelt: dict[str, str] = {}
    pairs = list[tuple[str, str]]()
    for name in names:
        letters = WITHIN_WORDS.sub("", unicodedata.normalize("NFKC", name).casefold()).strip()
        if (other := spelt.setdefault(letters, name)) != name and with_spelling:
            pairs.append((other, name))
    without: dict[str, str] = {}  # one letter, at which place -> name
    long_names = [word for word in spelt if len(word) >= LONG_NAME and word.isalpha()]
    for letters in long_names if len(long_names) <= SLIPS else ():
        # Equal without a letter of each, or of one: one letter changed, or one too many.
        forms = {letters, *(letters[:i] + letters[i + 1 :] for i in range(len(letters)))}
        others = {without[form] for form in forms if form in without} - {letters}
        pairs += [(spelt[other], spelt[letters]) for other in sorted(others)]
        without |= dict.fromkeys(forms, letters)
    return pairs


STRATEGIES = {DescribeRows.method: DescribeRows, DescribeColumns.method: DescribeColumns}
