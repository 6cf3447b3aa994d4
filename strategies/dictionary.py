"""The joint dictionary of horizontal parties: what the codes of each column stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedapp.data.categories import MOST_CATEGORIES, Categories, joint_categories, names_of
from fedapp.data.schema import first, listed
from fedapp.data.typed import ENCODINGS
from fedapp.errors import DataError, ProtocolError, as_plain
from fedapp.messages.dictionary import dictionary_digest, read_categories
from fedapp.messages.hello import HelloReply

DIGEST = re.compile(r"([0-9a-f]{64})?")
Names = tuple[str, ...]
Given = dict[int, str]  # digests of the names that a schema gives, by the place of their column


def joint_dictionary(parties: Mapping[str, HelloReply]) -> Categories:
    """The names of each column, in the order of their codes.

    Names that a schema gives are the dictionary of their column as they are; else it is the union
    of what the parties have, sorted by text.

    Parameters
    ----------
    parties : who have the same columns.

    Raises
    ------
    DataError : a column is of another type at one party, schemas give different names, no party
        tells the names that one gives, or there are too many.
    ProtocolError : a party's counts, names and digests do not fit together.
    """
    columns = next(iter(parties.values())).columns
    own = {party: _own(party, hello) for party, hello in parties.items()}
    if not any(own.values()):
        return ()
    given = {party: _given(party, hello, own[party]) for party, hello in parties.items()}
    names = {
        place: _given_names(place, columns[place], own, given)
        for place in sorted({place for each in given.values() for place in each})
    }
    known = {
        party: tuple(
            names[place] if place in given[party] else names_of(own[party], place)
            for place in range(len(columns))
        )
        for party in parties
    }
    for place, column in enumerate(columns):
        _check_type(column, {party: each[place] for party, each in known.items()})
    union = joint_categories(known.values())
    found = tuple(names.get(place, one or None) for place, one in enumerate(union))
    _check_sizes(columns, found)
    return found if any(found) else ()


def joint_kinds(parties: Mapping[str, HelloReply]) -> Names:
    """The kind of each column; of one that holds numbers at some parties, that of the others.

    Raises
    ------
    DataError : the others have more than one.
    ProtocolError : a party's kinds are not those of its columns.
    """
    columns, told = next(iter(parties.values())).columns, []
    for party, hello in parties.items():
        told.append(hello.kinds or ("number",) * len(columns))
        if len(told[-1]) != len(columns) or {*told[-1]} - {"", *ENCODINGS}:
            rule = f"must be known kinds, one a column of {len(columns)}"
            raise ProtocolError(party, "HelloReply", "kinds", rule)
    kinds = [sorted({*each} - {"", "number"}) or ["number"] for each in zip(*told, strict=True)]
    for column, found in zip(columns, kinds, strict=True):
        if len(found) > 1:
            rule = f"column {listed([column])} must be of one type at all parties, got "
            raise DataError(rule + f"{first(found)}: the schema of a table says its type")
    return tuple(found[0] for found in kinds)


def _own(party: str, hello: HelloReply) -> Categories:
    """What a party tells; no names of a column whose names it keeps to itself."""
    if not hello.categories:
        hello = replace(hello, category_counts=np.minimum(hello.category_counts, 0))
    return read_categories(party, hello, len(hello.columns))


def _given(party: str, hello: HelloReply, own: Categories) -> Given:
    """The digests of a party, held against the names that it tells."""
    places = np.flatnonzero(hello.category_counts > 0).tolist()
    digests, is_told = hello.digests, bool(hello.categories)
    fits = len(digests) == len(places) and all(map(DIGEST.fullmatch, digests))
    found = {place: digest for place, digest in zip(places, digests, strict=False) if digest}
    fits = fits and (is_told or len(found) == len(places))
    if is_told:
        fits = fits and all(
            digest == dictionary_digest(names_of(own, place) or ())
            for place, digest in found.items()
        )
    if not fits:
        rule = "must be of the names that a schema gives, one a column with categories"
        raise ProtocolError(party, "HelloReply", "digests", rule)
    return found


def _given_names(
    place: int, column: str, own: Mapping[str, Categories], given: Mapping[str, Given]
) -> Names:
    """The names that schemas give to a column."""
    (first, digest), *others = [
        (party, each[place]) for party, each in given.items() if place in each
    ]
    for party, other in others:
        if other != digest:
            rule = (
                f"categories of column {listed([column])} must be the same in all schemas, in the "
            )
            rule += f"same order, got others than at {first}"
            raise DataError(rule, party)
    for party in (first, *(party for party, _ in others)):
        if names := names_of(own[party], place):
            return names
    rule = f"categories of column {listed([column])} must be told by a party whose schema gives "
    rule += "them, got none but such with share-categories = false"
    raise DataError(rule, first)


def _check_type(column: str, entries: Mapping[str, Names | None]) -> None:
    """Hold that a column has one type; without a value in any row it has any."""
    texts = [party for party, names in entries.items() if names]
    numbers = [party for party, names in entries.items() if names is None]
    if texts and numbers:
        rule = f"column {listed([column])} must be of one type at all parties, got text at "
        rule += f"{texts[0]}, numbers at {numbers[0]}: the schema of either can say which it is"
        raise DataError(rule)


def alike_names(parties: Mapping[str, HelloReply], columns: Sequence[str]) -> list[str]:
    """Notes on names of parties that differ in spelling alone: in capitals, blanks or marks."""
    tables = {party: _own(party, hello) for party, hello in parties.items()}
    notes = []
    for place, column in enumerate(columns):
        found: dict[str, dict[str, list[str]]] = {}  # parties by name, by what is left of the name
        for party, own in tables.items():
            for name in names_of(own, place) or ():
                found.setdefault(_letters(name), {}).setdefault(name, []).append(party)
        pairs = [
            " and ".join(f"{listed([name])} ({owners[0]})" for name, owners in alike.items())
            for plain, alike in found.items()
            if plain and len(alike) > 1 and _differ([*alike.values()])
        ]
        if pairs:
            notes.append(
                as_plain(
                    f"categories of {listed([column])} differ in spelling alone: {first(pairs, 3)}"
                )
            )
    return notes


def _differ(owners: Sequence[Sequence[str]]) -> bool:
    """Whether no party is among the owners of two names."""
    each = [party for parties in owners for party in parties]
    return len(set(each)) == len(each)


def _letters(name: str) -> str:
    """A name without what is easily spelled otherwise."""
    return "".join(letter for letter in name.casefold() if letter.isalnum())


def _check_sizes(columns: Sequence[str], joint: Categories) -> None:
    for column, names in zip(columns, joint, strict=True):
        if names and len(names) > MOST_CATEGORIES:
            rule = f"categories of column {listed([column])} must be {MOST_CATEGORIES:,} at most, "
            rule += f"the parties have {len(names):,}: drop-columns excludes it"
            raise DataError(rule)
