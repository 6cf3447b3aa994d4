"""Joint dictionary of horizontal parties: what the category codes of each column mean."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedapp.data.columns import ENCODINGS
from fedapp.data.schema import first, listed
from fedapp.errors import DataError, ProtocolError, as_plain
from fedapp.messages.handshake import HelloReply, dictionary_digest, read_categories
from fedapp.trees.sets import MOST_CATEGORIES, Categories, joint_categories, names_of

DIGEST = re.compile(r"([0-9a-f]{64})?")
Names = tuple[str, ...]
Digests = dict[int, str]  # column index -> digest of the names that a schema lists


def joint_dictionary(parties: Mapping[str, HelloReply]) -> Categories:
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
        place: _schema_names(place, columns[place], disclosed, digests)
        for place in sorted({place for by_place in digests.values() for place in by_place})
    }
    tables = {
        party: tuple(
            listed_names[place] if place in digests[party] else names_of(disclosed[party], place)
            for place in range(len(columns))
        )
        for party in parties
    }
    for place, column in enumerate(columns):
        # A column without a value in any row of a party, (), fits both types.
        texts = [party for party, table in tables.items() if table[place]]
        numbers = [party for party, table in tables.items() if table[place] is None]
        if texts and numbers:
            rule = f"column {listed([column])} must be of one type at all parties, got text at "
            rule += f"{texts[0]}, numbers at {numbers[0]}: the schema of either can say which it is"
            raise DataError(rule)
    union = joint_categories(tables.values())
    joint = tuple(listed_names.get(place, names or None) for place, names in enumerate(union))
    for column, names in zip(columns, joint, strict=True):
        if names and len(names) > MOST_CATEGORIES:
            rule = f"categories of column {listed([column])} must be {MOST_CATEGORIES:,} at most, "
            rule += f"the parties have {len(names):,}: drop-columns excludes it"
            raise DataError(rule)
    return joint if any(joint) else ()


def joint_kinds(parties: Mapping[str, HelloReply]) -> Names:
    """The kind of each column; for a column of numbers at some parties, the kind at the others."""
    columns, by_party = next(iter(parties.values())).columns, []
    for party, hello in parties.items():
        kinds = hello.kinds or ("number",) * len(columns)
        if len(kinds) != len(columns) or {*kinds} - {"", *ENCODINGS}:
            rule = f"must be known kinds, one a column of {len(columns)}"
            raise ProtocolError(party, "HelloReply", "kinds", rule)
        by_party.append(kinds)
    joint = []
    for column, entries in zip(columns, zip(*by_party, strict=True), strict=True):
        others = sorted({*entries} - {"", "number"})
        if len(others) > 1:
            rule = f"column {listed([column])} must be of one type at all parties, got "
            raise DataError(rule + f"{first(others)}: the schema of a table says its type")
        joint.append(others[0] if others else "number")
    return tuple(joint)


def _disclosed(party: str, hello: HelloReply) -> Categories:
    # With share-categories=false only digests of a schema's names come, no names.
    if not hello.categories:
        hello = replace(hello, category_counts=np.minimum(hello.category_counts, 0))
    return read_categories(party, hello, len(hello.columns))


def _digests(party: str, hello: HelloReply, disclosed: Categories) -> Digests:
    """The digests of a party, checked against the names that it discloses."""
    places = np.flatnonzero(hello.category_counts > 0).tolist()
    fits = len(hello.digests) == len(places) and all(map(DIGEST.fullmatch, hello.digests))
    digests = {place: text for place, text in zip(places, hello.digests, strict=False) if text}
    if hello.categories:
        fits = fits and all(
            digest == dictionary_digest(names_of(disclosed, place) or ())
            for place, digest in digests.items()
        )
    else:
        fits = fits and len(digests) == len(places)
    if not fits:
        rule = "must be of the names that a schema gives, one a column with categories"
        raise ProtocolError(party, "HelloReply", "digests", rule)
    return digests


def _schema_names(
    place: int, column: str, disclosed: Mapping[str, Categories], digests: Mapping[str, Digests]
) -> Names:
    """The names of a column, from any party that discloses those of its schema."""
    (first, digest), *others = [
        (party, by_place[place]) for party, by_place in digests.items() if place in by_place
    ]
    for party, other in others:
        if other != digest:
            rule = "must be the same in all schemas, in the same order"
            got = f"got others than at {first}"
            raise DataError(f"categories of column {listed([column])} {rule}, {got}", party)
    for party in (first, *(party for party, _ in others)):
        if names := names_of(disclosed[party], place):
            return names
    rule = f"categories of column {listed([column])} must be sent by a party whose schema gives "
    rule += "them, got none but such with share-categories = false"
    raise DataError(rule, first)


def alike_names(parties: Mapping[str, HelloReply], columns: Sequence[str]) -> list[str]:
    """Warnings about names that differ only in capitals, blanks or punctuation between parties."""
    tables = {party: _disclosed(party, hello) for party, hello in parties.items()}
    notes = []
    for place, column in enumerate(columns):
        # Letters and digits of a name -> its spellings -> the parties that use them.
        spellings: dict[str, dict[str, list[str]]] = {}
        for party, table in tables.items():
            for name in names_of(table, place) or ():
                letters = "".join(letter for letter in name.casefold() if letter.isalnum())
                spellings.setdefault(letters, {}).setdefault(name, []).append(party)
        pairs = []
        for letters, users in spellings.items():
            everyone = [party for parties_of in users.values() for party in parties_of]
            # A party that has both spellings means two different categories.
            if letters and len(users) > 1 and len(set(everyone)) == len(everyone):
                texts = [f"{listed([name])} ({users[name][0]})" for name in users]
                pairs.append(" and ".join(texts))
        if pairs:
            rule = f"categories of {listed([column])} differ only in spelling"
            notes.append(as_plain(f"{rule}: {first(pairs, 3)}"))
    return notes
