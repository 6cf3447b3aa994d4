"""What all parties' tables have in common: columns, kinds, classes, and names of categories."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from fedapp.arrays import Ints
from fedapp.data.columns import ALIKE, agreed, check_kinds, in_words
from fedapp.data.labels import format_classes, merge_classes, number_written, positive_last
from fedapp.data.schema import first, listed
from fedapp.errors import ConfigError, DataError, ProtocolError, as_plain, as_protocol_error
from fedapp.messages import handshake as messages
from fedapp.settings import Settings
from fedapp.trees.categories import (
    MOST_CATEGORIES,
    Categories,
    category_counts,
    joint_categories,
    names_of,
)
from fedapp.trees.objective import check_base_margin, is_regression
from strategies.method import check_watched

DIGEST = re.compile(r"([0-9a-f]{64})?")
# Blanks and marks beside a letter within a name; A+ and A-, or 1-5 and 15, mean different things.
WITHIN_WORDS = re.compile(r"(?<=[^\W\d])[\s_.,-]+(?=\w)|(?<=\w)[\s_.,-]+(?=[^\W\d])|\s+$")
Names = tuple[str, ...]
Digests = dict[int, str]  # column index -> digest of the names that a schema lists


@dataclass(frozen=True, slots=True)
class CommonTable:
    """What the tables of all parties have in common."""

    columns: tuple[str, ...]
    categories: Categories  # names of each column's categories, in the order of their codes
    classes: tuple[str, ...]  # in the order of their ids; none for regression
    # Column -> party -> number of values that the dictionary lacks, which become missing.
    unseen: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    base_margin: str = ""  # column of the margins that rows start from
    n_valid: int = 0
    kinds: Names = ()  # of the columns, see ``fedapp.data.columns``
    scale_pos_weight: float = 0.0  # of ``balanced``, once the labels are summed

    @property
    def category_counts(self) -> Ints:
        """Categories of each column, 0 for one of numbers."""
        return category_counts(self.categories, len(self.columns))

    @property
    def n_coded_columns(self) -> int:
        """Columns in which parties count unseen values: all, or none without categories."""
        return len(self.categories)

    def coding(self) -> dict[str, Any]:
        """The fields of a ``JointCoding``."""
        return {"classes": self.classes, **messages.pack_categories(self.categories)}

    def coded(self, replies: Mapping[str, messages.LabelsReply]) -> CommonTable:
        """The same table with the numbers of values that the parties report as unseen."""
        unseen: dict[str, dict[str, int]] = {}
        for i, column in enumerate(self.columns[: self.n_coded_columns]):
            counts = {party: int(reply.unseen[i]) for party, reply in replies.items()}
            if any(counts.values()):
                unseen[column] = {party: count for party, count in counts.items() if count}
        return replace(self, unseen=unseen)


def common_table(
    parties: Mapping[str, messages.HelloReply], settings: Settings, saved: CommonTable | None = None
) -> CommonTable:
    """What the tables of all parties have in common; in a resumed run, as it was at the start."""
    check_same_columns({name: hello.columns for name, hello in parties.items()})
    n_valid = sum(hello.n_valid for hello in parties.values())
    check_watched(settings.watching(n_valid), n_valid)
    first, hello = next(iter(parties.items()))
    columns, base_margin = hello.columns, hello.base_margin
    for party, other in parties.items():
        if other.base_margin != base_margin:
            names = other.base_margin, base_margin
            got, expected = (f"the column {name!r}" if name else "none" for name in names)
            rule = f"base-margin must be that of {first} at all parties, {expected}, got {got}"
            remedy = "; a schema gives a column another name in the run" if all(names) else ""
            raise DataError(rule + remedy, party)
    if base_margin:
        try:
            check_base_margin(settings.objective)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if saved is not None:
        return saved
    classes = check_labels(parties, settings)
    kinds = joint_kinds(parties)
    joint = joint_dictionary(parties)
    return CommonTable(columns, joint, classes, {}, base_margin, n_valid, kinds)


def check_same_columns(columns: Mapping[str, Sequence[str]]) -> None:
    """Check that all parties have the same columns in the same order."""
    for party, names in columns.items():
        if len(set(names)) < len(names):
            raise DataError("columns must have different names", party)
    (first, expected), *others = columns.items()
    for party, names in others:
        missing_names, added_names = set(expected) - set(names), set(names) - set(expected)
        missing = [name for name in expected if name in missing_names]
        added = [name for name in names if name in added_names]
        if missing or added:
            faults = [f"{name!r} is missing" for name in missing[:3]]
            faults += [f"{name!r}, which {first} does not have" for name in added[:3]]
            way = (
                "drop-columns leaves columns out; for parties with other columns of the same rows "
            )
            way += "fedapp run --help lists methods"
            rule = f"columns must be those of {first}, got {', '.join(faults)}"
            raise DataError(f"{rule}: {way}", party)
        for number, (here, wanted) in enumerate(zip(names, expected, strict=True), start=1):
            if here != wanted:
                raise DataError(
                    f"columns must be in the order of {first}'s, "
                    f"got {here!r} as column {number} in place of {wanted!r}",
                    party,
                )


def classes_without_rows(parties: Mapping[str, messages.HelloReply]) -> tuple[str, ...]:
    """Classes that no training row of any party has."""
    trained = {
        name for hello in parties.values() for name in set(hello.classes) - set(hello.untrained)
    }
    untrained = merge_classes(hello.untrained for hello in parties.values())
    return tuple(name for name in untrained if name not in trained)


def parties_without_class(
    parties: Mapping[str, messages.HelloReply], classes: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Parties without a training row of a class, by class; omits classes that nobody trains."""
    nowhere = classes_without_rows(parties)
    lacking = {
        name: tuple(
            party
            for party, hello in parties.items()
            if name not in hello.classes or name in hello.untrained
        )
        for name in classes
        if name not in nowhere
    }
    return {name: parties_lacking for name, parties_lacking in lacking.items() if parties_lacking}


def check_labels(parties: Mapping[str, messages.HelloReply], settings: Settings) -> tuple[str, ...]:
    """Classes of all parties in the order of their ids; none for regression."""
    hellos = parties.values()
    if is_regression(settings.objective):
        if min(hello.label_low for hello in hellos) == max(hello.label_high for hello in hellos):
            raise DataError("label must not be the same in every row of every party")
        return ()
    classes = merge_classes(hello.classes for hello in hellos)
    if len(classes) < 2:
        raise DataError(
            f"label must not be the same in every row of every party, got only {classes[0]!r}"
        )
    if settings.objective == "binary:logistic" and len(classes) != 2:
        raise DataError(
            f"label must have 2 values for binary:logistic, the parties have {len(classes)}: "
            f"{', '.join(classes[:5])}; set objective=multi:softprob, or spell labels alike: "
            f"{format_classes({name: hello.classes for name, hello in parties.items()})}"
        )
    # Which of two classes counts as 1, if the run or a party says so.
    labels = {"the run": settings.positive_label}
    labels |= {name: hello.positive_label for name, hello in parties.items()}
    sources = {label: source for source, label in reversed(labels.items()) if label}
    if len(sources) > 1:
        got = ", ".join(f"{label!r} of {source}" for label, source in sources.items())
        raise DataError(f"positive-label must be the same wherever it is set, got {got}")
    return positive_last(classes, next(iter(sources), ""), settings.objective)


def joint_dictionary(parties: Mapping[str, messages.HelloReply]) -> Categories:
    """The category names of each column, in the order of their codes.

    Where a schema lists a column's names they are its dictionary; else it is the union of the
    parties' names, sorted by text.

    Raises
    ------
    DataError : a column is of another type at one party, schemas list different names, no party
        discloses the names that one lists, or there are too many.
    ProtocolError : a party's counts, names and digests do not fit together.
    """
    columns = next(iter(parties.values())).columns
    disclosed = {party: _disclosed(party, hello) for party, hello in parties.items()}
    if not any(disclosed.values()):
        return ()
    digests = {party: _digests(party, hello, disclosed[party]) for party, hello in parties.items()}
    listed_names = {
        index: _schema_names(index, columns[index], disclosed, digests)
        for index in sorted({index for by_column in digests.values() for index in by_column})
    }
    tables = {
        party: tuple(
            listed_names[index] if index in digests[party] else names_of(disclosed[party], index)
            for index in range(len(columns))
        )
        for party in parties
    }
    for index, column in enumerate(columns):
        if index in listed_names:  # as schemas say
            continue
        _check_spelling(column, {party: table[index] or () for party, table in tables.items()})
    union = joint_categories(tables.values())
    joint = tuple(listed_names.get(index, names or None) for index, names in enumerate(union))
    for column, names in zip(columns, joint, strict=True):
        if names and len(names) > MOST_CATEGORIES:
            rule = f"categories of column {listed([column])} must be {MOST_CATEGORIES:,} at most, "
            rule += f"the parties have {len(names):,}: drop-columns excludes it"
            raise DataError(rule)
    return joint if any(joint) else ()


def joint_kinds(parties: Mapping[str, messages.HelloReply]) -> Names:
    """The kind of each column, which must be that of all parties' values; see ``agreed``."""
    columns = next(iter(parties.values())).columns
    by_party = dict[str, Sequence[str]]()
    for party, hello in parties.items():
        counts = hello.category_counts.tolist() or [messages.NUMBERS] * len(columns)
        coded = ["category" if count > 0 else "" if count == 0 else "number" for count in counts]
        with as_protocol_error(party, "HelloReply", "kinds"):
            check_kinds(hello.kinds, len(columns))
            kinds = by_party[party] = hello.kinds or coded
            for kind, by_count in zip(kinds, coded, strict=False):
                if (kind == "category") != (by_count == "category"):
                    raise ValueError("kinds must be of categories where there are names")
    joint = []
    for column, entries in zip(columns, zip(*by_party.values(), strict=False), strict=False):
        if (of_all := agreed(entries)) is None:
            users = {kind: party for party, kind in zip(by_party, entries, strict=True) if kind}
            got = ", ".join(f"{in_words(kind)} at {party}" for kind, party in users.items())
            rule = f"column {listed([column])} must be of one kind at all parties, got {got}"
            raise DataError(f"{rule}: {ALIKE}")
        joint.append(of_all or "number")
    return tuple(joint)


def _check_spelling(column: str, names: Mapping[str, Sequence[str]]) -> None:
    """Check that parties do not write the number of a category differently, as 1 and 01."""
    for spellings in _spellings(names, number_written):
        got = " and ".join(f"{listed([name])} at {who[0]}" for name, who in spellings.items())
        rule = f"categories of column {listed([column])} must be written alike at all parties"
        way = "write them alike, map them by codes, or list them as categories in schemas"
        raise DataError(as_plain(f"{rule}, got {got}: {way}"))


def _spellings(
    names: Mapping[str, Iterable[str]], meaning: Callable[[str], object]
) -> Iterator[dict[str, list[str]]]:
    """Different spellings of one meaning, each with the parties that use it."""
    groups: dict[object, dict[str, list[str]]] = {}
    for party, of_party in names.items():
        for name in of_party:
            groups.setdefault(meaning(name), {}).setdefault(name, []).append(party)
    for common, spellings in groups.items():
        users = [party for parties in spellings.values() for party in parties]
        # A party that has both spellings means two different categories.
        if common not in (None, "") and len(spellings) > 1 and len({*users}) == len(users):
            yield spellings


def _disclosed(party: str, hello: messages.HelloReply) -> Categories:
    # With share-categories=false only digests of a schema's names come, no names.
    if not hello.categories:
        hello = replace(hello, category_counts=np.minimum(hello.category_counts, 0))
    return messages.read_categories(party, hello, len(hello.columns))


def _digests(party: str, hello: messages.HelloReply, disclosed: Categories) -> Digests:
    """The digests of a party, checked against the names that it discloses."""
    indices = np.flatnonzero(hello.category_counts > 0).tolist()
    fits = len(hello.digests) == len(indices) and all(map(DIGEST.fullmatch, hello.digests))
    digests = {index: text for index, text in zip(indices, hello.digests, strict=False) if text}
    if hello.categories:
        fits = fits and all(
            digest == messages.dictionary_digest(names_of(disclosed, index) or ())
            for index, digest in digests.items()
        )
    else:
        fits = fits and len(digests) == len(indices)
    if not fits:
        rule = "must be of the names that a schema gives, one a column with categories"
        raise ProtocolError(party, "HelloReply", "digests", rule)
    return digests


def _schema_names(
    index: int, column: str, disclosed: Mapping[str, Categories], digests: Mapping[str, Digests]
) -> Names:
    """The names of a column, from any party that discloses those of its schema."""
    (first, digest), *others = [
        (party, by_column[index]) for party, by_column in digests.items() if index in by_column
    ]
    for party, other in others:
        if other != digest:
            rule = "must be the same in all schemas, in the same order"
            got = f"got others than at {first}"
            raise DataError(f"categories of column {listed([column])} {rule}, {got}", party)
    for party in (first, *(party for party, _ in others)):
        if names := names_of(disclosed[party], index):
            return names
    rule = f"categories of column {listed([column])} must be sent by a party whose schema gives "
    rule += "them, got none but such with share-categories = false"
    raise DataError(rule, first)


def similar_names(parties: Mapping[str, messages.HelloReply], columns: Sequence[str]) -> list[str]:
    """Warnings about names that differ only in capitals, blanks or marks, or of which none fits."""
    tables = {party: _disclosed(party, hello) for party, hello in parties.items()}
    notes = []
    for index, column in enumerate(columns):
        names_by_party = {party: names_of(table, index) or () for party, table in tables.items()}
        users_of = [(party, {*names}) for party, names in names_by_party.items() if names]
        for (party, here), (neighbour, there) in pairwise(users_of):
            if not here & there:
                notes.append(
                    f"categories of {listed([column])}: {party} and {neighbour} share no name"
                )
        groups = _spellings(names_by_party, lambda name: WITHIN_WORDS.sub("", name.casefold()))
        pairs = [
            " and ".join(f"{listed([name])} ({who[0]})" for name, who in spellings.items())
            for spellings in groups
        ]
        if pairs:
            rule = f"categories of {listed([column])} differ only in spelling"
            notes.append(as_plain(f"{rule}: {first(pairs, 3)}"))
    return notes
