"""Which tables the setting ``data`` names, and whose they are."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence

from fedapp.data.names import NAME, NAME_RULE, party_name
from fedapp.errors import ConfigError


def party_sources(data: str, n_parties: int) -> dict[str, str]:
    """The table of each party, by name and in the order of the names.

    Parameters
    ----------
    data : ``bank=a.csv,insurer=b.csv``, or ``a.csv,b.csv`` for party-1 and party-2; an entry is
        whatever ``read_source`` takes. One entry without a name is one table to be split.
    n_parties : >= 1.

    Returns
    -------
    dict : empty where there is one table to be split.

    Raises
    ------
    ConfigError : an entry is empty, names are broken, repeated or given to some entries only, or
        there is not one entry for each party.
    """
    entries = [entry.strip() for entry in data.split(",")]
    named = [_name_and_source(entry) for entry in entries]
    if len(entries) == 1 and named[0][0] is None:
        return {}
    _check_entries(data, named)
    if len(entries) != n_parties:
        rule = f"data must be one table to split, or a table for each of parties={n_parties}"
        raise ConfigError(f"{rule}, got {len(entries)}: set parties={len(entries)}")
    if named[0][0] is None:
        return {party_name(share, n_parties): source for share, (_, source) in enumerate(named)}
    return dict(sorted((name, source) for name, source in named if name is not None))


def by_party(files: str) -> dict[str, str]:
    """``bank=a.toml,insurer=b.toml`` by party; by an empty name where one file is for all."""
    named = [_name_and_source(entry.strip()) for entry in files.split(",")]
    if any(name is None for name, _ in named):
        return {"": files} if files else {}
    return {name: file for name, file in named if name is not None}


def own_file(files: str, party: str) -> str:
    """The file of a party; empty where it has none."""
    found = by_party(files)
    return found.get(party, found.get("", ""))


def sources_to_predict(data: str, parties: Collection[str], may_be_one: bool) -> dict[str, str]:
    """The table of each party of a model, in the order of the names.

    Parameters
    ----------
    data : ``bank=a.csv,insurer=b.csv``; in which order tables stand says nothing of whose they are,
        so that several must have names.
    parties : of the model.
    may_be_one : whether one table without a name will do, which has all columns.

    Returns
    -------
    dict : empty where there is one table.

    Raises
    ------
    ConfigError : a table has no name, a party no table, or a name is not the model's.
    """
    entries = [_name_and_source(entry.strip()) for entry in data.split(",")]
    names = [name for name, _ in entries if name is not None]
    if not names and len(entries) == 1 and may_be_one:
        return {}
    example = ",".join(f"{name}=TABLE" for name in sorted(parties))
    if not names:
        raise ConfigError(f"--data must say which table is whose, as in {example}, got {data!r}")
    sources, known = party_sources(data, len(entries)), ", ".join(sorted(parties))
    for name in names:
        if name not in parties:
            raise ConfigError(f"--data must name parties of the model ({known}), got {name!r}")
    if missing := sorted(set(parties) - set(names)):
        rule = f"--data must name a table for every party of the model ({known})"
        raise ConfigError(f"{rule}, got none for {', '.join(missing)}")
    repeated = [name for name, count in Counter(sources.values()).items() if count > 1]
    if repeated:
        owners = " and ".join(name for name, source in sources.items() if source == repeated[0])
        rule = "--data must name a table of its own for every party"
        raise ConfigError(f"{rule}, got {repeated[0]} for {owners}")
    return sources


def _name_and_source(entry: str) -> tuple[str | None, str]:
    """``bank=a.csv`` as two; without a name where there is none, as in ``folder/a=b.csv``."""
    name, equals, source = entry.partition("=")
    if not equals or os.sep in name:
        return None, entry
    return name.strip(), source.strip()


def _check_entries(data: str, named: Sequence[tuple[str | None, str]]) -> None:
    """Hold that every entry is a table, and that all have names of their own or none has."""
    example = "as in data=bank=a.csv,insurer=b.csv"
    if not all(source for _, source in named):
        raise ConfigError(f"data must name a table between any two commas, got {data!r}")
    names = [name for name, _ in named if name is not None]
    if names and len(names) < len(named):
        bare = next(source for name, source in named if name is None)
        raise ConfigError(f"data must name all parties or none, {example}; got {bare!r} unnamed")
    broken = [name for name in names if not NAME.fullmatch(name)]
    if broken:
        rule = f"data must give parties names of {NAME_RULE} that begin with a letter or digit"
        raise ConfigError(f"{rule}, {example}; got {broken[0]!r}")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        rule = "data must give every party a name of its own"
        raise ConfigError(f"{rule}, {example}; got {repeated[0]!r} more than once")
