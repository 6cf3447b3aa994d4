"""What a file's columns are for, and how it departs from a plain one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MISSING = ("", "NA", "N/A", "nan", "NaN", "null", "?")
PACKINGS = (".gz", ".bz2")
NO_NAME = "unnamed-"
MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Roles:
    """Columns that are not features; an empty name means that there is no such column."""

    label: str = ""
    id_column: str = ""
    weight: str = ""
    group: str = ""
    drop: tuple[str, ...] = ()

    def named(self) -> dict[str, str]:
        """Role and column of those that are set, without the dropped ones."""
        names = (self.label, self.id_column, self.weight, self.group)
        roles = ("label", "id", "weight", "group")
        return {role: name for role, name in zip(roles, names, strict=True) if name}


NO_ROLES = Roles()


@dataclass(frozen=True, slots=True)
class Reader:
    """How a file departs from one whose suffix and header line say it all.

    Parameters
    ----------
    format : "csv", "parquet" or "libsvm"; empty goes by the suffix.
    delimiter : one character, CSV alone; empty goes by the header line.
    skip_lines : lines before the header, or before the first row where `columns` are given.
    columns : names for a CSV file without a header line.
    n_features : columns of a LIBSVM file; 0 means its highest index.
    """

    format: str = ""
    delimiter: str = ""
    skip_lines: int = 0
    columns: tuple[str, ...] = ()
    n_features: int = 0


PLAIN = Reader()


def with_names(names: Iterable[str]) -> list[str]:
    """Names of columns; one without gets one, so that it can be dropped."""
    return [name or f"{NO_NAME}{place}" for place, name in enumerate(names, start=1)]


def listed(names: Iterable[str], limit: int = MOST_LISTED) -> str:
    """Names in quotes with commas; past the limit only how many more there are."""
    return first([f"'{name}'" for name in names], limit)


def first(words: Sequence[str], limit: int = MOST_LISTED) -> str:
    """Words with commas; past the limit only how many more there are."""
    rest = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + rest
