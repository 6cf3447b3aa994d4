"""Which tables the setting ``data`` names, and the party of each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Sequence

from fedapp.data.names import NAME, NAME_RULE, party_name
from fedapp.errors import ConfigError


def party_sources(data: str, n_parties: int) -> dict[str, str]:
    """Table of each party, by name and sorted by name; empty if there is one table to split.

    `data` is ``bank=a.csv,insurer=b.csv``, or ``a.csv,b.csv`` for party-1 and party-2; an entry is
    anything ``read_source`` reads. One entry without a name is one table to split. Raises
    ConfigError if an entry is empty, names are invalid, repeated or given to only some entries, or
    the number of entries is not `n_parties`.
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
    """Parse ``bank=a.toml,insurer=b.toml``; one file for all parties is under the empty name."""
    named = [_name_and_source(entry.strip()) for entry in files.split(",")]
    if any(name is None for name, _ in named):
        return {"": files} if files else {}
    return {name: file for name, file in named if name is not None}


def own_file(files: str, party: str) -> str:
    """The file of a party; empty if it has none."""
    by_name = by_party(files)
    return by_name.get(party, by_name.get("", ""))


def sources_to_predict(data: str, parties: Collection[str], may_be_one: bool) -> dict[str, str]:
    """Table of each party of a model, sorted by name; empty if there is one table.

    `data` is ``bank=a.csv,insurer=b.csv``; several tables must have names, as their order does not
    say whose they are. One table without a name must have all columns (`may_be_one`). Raises
    ConfigError if a table has no name, a party no table, or a name is not the model's.
    """
    entries = [_name_and_source(entry.strip()) for entry in data.split(",")]
    names = [name for name, _ in entries if name is not None]
    if not names and len(entries) == 1 and may_be_one:
        return {}
    example = ",".join(f"{name}=TABLE" for name in sorted(parties))
    if not names:
        raise ConfigError(f"--data must say which table is whose, as in {example}, got {data!r}")
    sources, allowed = party_sources(data, len(entries)), ", ".join(sorted(parties))
    for name in names:
        if name not in parties:
            raise ConfigError(f"--data must name parties of the model ({allowed}), got {name!r}")
    if missing := sorted(set(parties) - set(names)):
        rule = f"--data must name a table for every party of the model ({allowed})"
        raise ConfigError(f"{rule}, got none for {', '.join(missing)}")
    repeated = [name for name, count in Counter(sources.values()).items() if count > 1]
    if repeated:
        owners = " and ".join(name for name, source in sources.items() if source == repeated[0])
        rule = "--data must name a different table for every party"
        raise ConfigError(f"{rule}, got {repeated[0]} for {owners}")
    return sources


def _name_and_source(entry: str) -> tuple[str | None, str]:
    """Split ``bank=a.csv``; None as the name if there is none, as in ``folder/a=b.csv``."""
    name, equals, source = entry.partition("=")
    if not equals or os.sep in name:
        return None, entry
    return name.strip(), source.strip()


def _check_entries(data: str, named: Sequence[tuple[str | None, str]]) -> None:
    """Check that no entry is empty, and that all have distinct names or none has."""
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
        rule = "data must give every party a different name"
        raise ConfigError(f"{rule}, {example}; got {repeated[0]!r} more than once")
