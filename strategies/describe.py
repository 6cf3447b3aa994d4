"""Describing tables together before training: counts, quantiles, differences, leaks.

Parties with the same columns count the digits of their values (``fedapp.histograms.sketch``), then
rows by cell. Figures follow from the sums (``fedapp.metrics.tables``), and equal those of one table
in one place. Each party compares its rows with all; the server compares parties, if not masked.

Parties with different columns describe their own; the active party decrypts sums of its labels over
the cells of the others. Read ``fedapp.messages.describe``, this file, then ``clients.describe``.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, Literal

import numpy as np

from fedapp.conversation import Conversation, Saved, SavedModel, ask
from fedapp.data.schema import first, listed
from fedapp.errors import ConfigError, as_plain, as_protocol_error
from fedapp.histograms.bins import Cuts, with_categories
from fedapp.histograms.fixed_point import Whole
from fedapp.histograms.groups import cell_starts
from fedapp.histograms.sketch import BASE, N_DIGITS
from fedapp.messages import describe as messages
from fedapp.messages.fields import Request, check_fields, check_sizes
from fedapp.messages.secagg import EVERYONE
from fedapp.messages.vertical import SentReply
from fedapp.metrics import tables
from fedapp.run_files import without_nan
from fedapp.settings import Section, Settings
from fedapp.trees.categories import entries_of
from strategies import secagg
from strategies.common_table import WITHIN_WORDS
from strategies.handshake import Hellos
from strategies.horizontal import HorizontalStrategy
from strategies.method import LABEL_PRIVACY, OF_ROWS, SPLIT_SETTINGS, Outcome, TreeStrategy
from strategies.vertical import Hellos as VerticalHellos
from strategies.vertical import KeySettings, VerticalStrategy

DESCRIPTION = "description.json"
LABEL = "label"
WITHHELD = (
    "figures over labels are not shared by {}: share-label-figures is off in its node config, or "
    "the columns are too many for the rows"
)
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
    objectives = OF_ROWS
    reads = frozenset(("base-margin", "least-bin-rows"))
    may_lose = False
    section: RowsSettings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sums: secagg.PlainSums | secagg.MaskedSums = secagg.PlainSums()

    @classmethod
    def section_settings(cls, settings: Settings) -> RowsSettings:
        """``[describe-rows]``, checked."""
        if settings.min_parties:
            rule = f"must be 0 for {cls.method}, which needs the counts of all"
            raise ConfigError(f"min-parties {rule}, got {settings.min_parties}")
        return RowsSettings.of(settings)

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """Quantiles digit by digit, rows by cell, and what differs."""
        table = self.agree(parties, None)
        n_classes = len(table.classes)
        widths = np.append(table.category_counts, n_classes)
        bounds = secagg.row_bounds(parties)  # without weights
        roster = asdict(bounds)
        if self.sees_only_sums:
            roster, _, _ = yield from secagg.exchange_keys(parties)
            self.sums = secagg.MaskedSums(roster["names"])
        n_numbers = np.sum(widths == 0).item()
        opening = messages.OpenRequest(**self.terms(), **roster)
        (counts, _), _ = yield from self._ask(parties, opening, (n_numbers, BASE), (1,))
        descent = tables.new_descent(widths)
        descent.take(counts)
        while n_numbers and descent.digit < N_DIGITS:
            prefixes, offsets = descent.wanted()
            request = messages.CountRequest(descent.digit, prefixes, offsets)
            (counts,), _ = yield from self._ask(parties, request, (len(prefixes), BASE))
            descent.take(counts)
        cuts = with_categories(descent.cuts(), widths, widths)
        n_cells, cells = (
            len(cuts.edges) + len(widths),
            messages.CellsRequest(cuts.edges, cuts.offsets),
        )
        shapes = (n_cells,), (n_cells,), (n_cells, n_classes or 2)
        (counts, labelled, sums), by_party = yield from self._ask(parties, cells, *shapes)
        for party, of_party in by_party.items():
            self._check(party, of_party, cuts, n_classes > 0)
        yield from ask(parties.all(messages.CompareRequest(counts)), messages.CompareReply)
        names = *table.columns, self.settings.label or LABEL
        texts = *entries_of(table.categories, len(table.columns)), table.classes
        points, is_whole = descent.points(), descent.is_whole
        columns = tables.describe_columns(names, texts, counts, cuts, points, is_whole)
        columns[-1]["is_label"] = True
        _set_kinds(columns, table.kinds)
        features = labelled, sums, cuts.widths[:-1], widths[:-1] == 0
        for column, figures in zip(
            columns, tables.associations(features, n_classes, bounds), strict=False
        ):
            column["label"] = figures
        rows = {party: of_cells for party, (of_cells, *_) in by_party.items()}
        for text in tables.table_differences(
            [listed([name]) for name in table.columns], cuts, rows
        ):
            self.warn_once(as_plain(text))
        by_column = zip(
            *(tables.split_cells(of_party, cuts.widths) for of_party in rows.values()), strict=True
        )
        for column, of_parties in zip(columns, by_column, strict=False):
            total = np.sum(of_parties, axis=0)
            column["by_party"] = {
                party: {"counts": here.tolist(), "drift": tables.divergence(here, total - here)}
                for party, here in zip(rows, of_parties, strict=True)
            }
        return (yield from _described(self, columns))

    def _ask(
        self, parties: Hellos, request: Request, *shapes: tuple[int, ...]
    ) -> Conversation[tuple[list[Whole], dict[str, list[Whole]]]]:
        """Sums of arrays of these shapes over all parties, and in the clear those of each."""
        size, n_first = (
            sum(int(np.prod(shape)) for shape in some) for some in (shapes, shapes[:1])
        )

        def check(party: str, reply: messages.CountsReply) -> None:
            if party == EVERYONE:
                return
            check_sizes(party, reply, n_counts=size)
            n_rows, rows = parties[party].n_train, reply.counts[:n_first]
            fits = ((rows >= 0) & (rows <= n_rows)).all()
            check_fields(party, reply, ("counts", fits, f"must be of 0 to {n_rows} rows"))

        replies = yield from self.sums.ask(
            parties, request, secagg.Form.of(messages.CountsReply, (size,)), check
        )
        by_party = {
            party: secagg.arrays_of(reply.counts, shapes) for party, reply in replies.items()
        }
        sums = [np.sum(arrays, axis=0) for arrays in zip(*by_party.values(), strict=True)]
        by_party.pop(EVERYONE, None)
        return sums, by_party

    def _check(self, party: str, cells: list[Whole], cuts: Cuts, is_classes: bool) -> None:
        """Check that the cells of a party are of the same rows in every column."""
        (rows, labelled, labels), most = cells, self.parties[party].n_train
        by_column = np.add.reduceat(rows, cell_starts(cuts.widths)[:-1])
        with as_protocol_error(party, "CountsReply", "counts"):
            if is_classes and ((labels < 0).any() or (labels.sum(axis=1) > labelled).any()):
                raise ValueError("must be of no more labels than rows in each cell")
            if (by_column != by_column[0]).any() or by_column[0] > most:
                raise ValueError(f"must be of the same rows in every column, {most} at most")


class ColumnsSettings(KeySettings, Section):
    """``[describe-columns]`` of the run config."""

    table = "describe-columns"


class DescribeColumns(VerticalStrategy):
    """Describes the columns of parties with the same rows, and what they say about the label."""

    method = "describe-columns"
    section_class = ColumnsSettings
    objectives = OF_ROWS
    reads = SPLIT_SETTINGS | LABEL_PRIVACY | {"base-margin", "objective"}
    section: ColumnsSettings

    def conversation(self, parties: VerticalHellos, saved: Saved | None) -> Conversation[Outcome]:
        """Align the rows, encrypt labels in blocks, sum and decrypt."""
        mailbox, rows = yield from self.match_rows(parties)
        active, passive = mailbox.active, mailbox.passive
        fields = {"objective": self.settings.objective, **self.section.model_dump()}
        yield from mailbox.relay(messages.SetupRequest, parties, SentReply, **fields)
        finished = False
        while not finished:
            block = yield from mailbox.ask_active(messages.EncryptRequest, messages.EncryptReply)
            yield from mailbox.relay(messages.TakeRequest, passive, SentReply)
            finished = block.finished
        described = yield from mailbox.relay(messages.SumRequest, passive, messages.ColumnsReply)
        described |= yield from mailbox.relay(
            messages.FinishRequest, [active], messages.ColumnsReply
        )
        columns = list[dict[str, Any]]()
        for party in parties:
            columns += _columns_of(party, described[party], rows["train"])
            if party == active:
                columns[-1]["is_label"] = True
        features = [column for column in columns if "is_label" not in column]
        figures = described[active].associations
        if not len(figures):
            self.warn_once(WITHHELD.format(active))
        else:
            check_sizes(active, described[active], n_associated=len(features))
        for column, values in zip(features, figures.tolist(), strict=False):
            pairs = zip(messages.ASSOCIATIONS, values, strict=True)
            column["label"] = {name: figure for name, figure in pairs if not np.isnan(figure)}
        return (yield from _described(self, columns, active=active, matched_rows=rows))


def _columns_of(party: str, reply: messages.ColumnsReply, n_rows: int) -> list[dict[str, Any]]:
    numbers, n_columns = reply.n_categories, len(reply.n_categories)
    cuts = Cuts(reply.edges, reply.offsets, np.zeros(n_columns, dtype=np.float32), numbers)
    starts = cell_starts(cuts.widths)
    check_sizes(party, reply, n_cells=int(starts[-1]), n_percents=len(tables.PERCENTS))
    rules = {
        "counts": (np.add.reduceat(reply.counts, starts[:-1]) == n_rows).all(),
        "n_categories": ((cuts.widths == numbers) | (numbers == 0)).all(),
        "names": len(reply.names) in (0, n_columns),
        "kinds": len(reply.kinds) == len(reply.names),
        "categories": len(reply.categories) in (0, numbers.sum()),
    }
    rule = f"must be of {n_columns} columns of {n_rows} rows"
    check_fields(party, reply, *((field, fits, rule) for field, fits in rules.items()))
    names = reply.names or [f"column {number}" for number in range(1, n_columns + 1)]
    texts = iter(reply.categories)
    categories = [[*islice(texts, number)] for number in numbers.tolist()]
    points = [of_column[~np.isnan(of_column)] for of_column in reply.points]
    columns = tables.describe_columns(names, categories, reply.counts, cuts, points, reply.is_whole)
    _set_kinds(columns, reply.kinds)
    return [{"party": party, **column} for column in columns]


def _set_kinds(columns: Sequence[dict[str, Any]], kinds: Sequence[str]) -> None:
    for column, kind in zip(columns, kinds, strict=False):
        column["kind"] = kind.partition(":")[0]


def _described(
    strategy: TreeStrategy[Any], columns: Sequence[dict[str, Any]], **more: Any
) -> Conversation[Outcome]:
    """Warn about names and leaks, and write the description; returns the summary's part."""
    for column in columns:
        quoted = listed([column["name"]])
        name = f"column {quoted} of {column['party']}" if "party" in column else f"column {quoted}"
        agreed = f"categories of {quoted} differ only in spelling"
        is_shown = any(text.startswith(agreed) for text in strategy.warnings)
        near = near_names(column["categories"], not is_shown)
        if pairs := [f"{category!r} and {other!r}" for category, other in near]:
            text = f"{name} may have a category in two spellings: {first(pairs, 3)}"
            strategy.warn_once(as_plain(text))
        for text in tables.leaks(name, column):
            strategy.warn_once(as_plain(text))
    n_rows = columns[0]["missing"] + sum(columns[0]["counts"])
    document = {"rows": n_rows, "columns": columns}
    document |= {"warnings": strategy.warnings, "facts": strategy.facts}
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
