"""Roles of a table's columns, and options for reading its file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MISSING = ("", "NA", "N/A", "nan", "NaN", "null", "?")
# Words that other readers, such as pandas, take as missing, but that are text here.
MISSING_ELSEWHERE = ("#N/A", "#NA", "<NA>", "NULL", "None", "n/a")
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
    base_margin: str = ""  # column of initial margins
    drop_unlabelled: bool = False  # drop rows without a label instead of refusing the table

    def named(self) -> dict[str, str]:
        """Role and name of each column that has a role, except the dropped ones."""
        names = (self.label, self.id_column, self.weight, self.group, self.base_margin)
        roles = ("label", "id", "weight", "group", "base-margin")
        return {role: name for role, name in zip(roles, names, strict=True) if name}


NO_ROLES = Roles()


@dataclass(frozen=True, slots=True)
class Declared:
    """What a schema declares about one column."""

    name: str  # in the file
    rename: str = ""  # in the run; empty keeps the name
    type: str = ""  # number, category, ordinal, boolean or date; empty infers it from the values
    missing: tuple[str, ...] = ()  # values that mean "missing", besides ``MISSING`` and the table's
    # Of a category, the names common to all parties; of an ordinal, the names from the lowest to
    # the highest. Empty: the names that occur.
    categories: tuple[str, ...] = ()
    # pairs of a value in the file and the name it stands for
    codes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Reader:
    """Options for reading a file whose suffix and header line do not say everything."""

    format: str = ""  # "csv", "parquet" or "libsvm"; empty infers it from the suffix
    delimiter: str = ""  # one character, CSV only; empty detects it; a blank is any run of blanks
    skip_lines: int = 0  # before the header or, without one, before the first row
    columns: tuple[str, ...] = ()  # names for a CSV file without a header line
    n_features: int = 0  # columns of a LIBSVM file; 0 means its highest index
    # Whether the first line of a CSV file without `columns` has the names; if not, they are f1, f2,
    # ...
    header: bool = True
    decimal: str = "."  # "." or ",", CSV only
    encoding: str = "utf-8"  # of a CSV file, as Python names it
    missing: tuple[str, ...] = ()  # values that mean "missing", besides ``MISSING``
    declared: tuple[Declared, ...] = ()
    tolerant: bool = False  # whether declared columns may be absent, as in another party's table

    @property
    def has_header(self) -> bool:
        """Whether the first line of a CSV file has the names."""
        return self.header and not self.columns

    def of_column(self, name: str) -> Declared:
        """Declaration of a column, by its name in the file."""
        return next((one for one in self.declared if one.name == name), Declared(name))

    def of_feature(self, name: str) -> Declared:
        """Declaration of a column, by its name in the run."""
        matches = (one for one in self.declared if (one.rename or one.name) == name)
        return next(matches, Declared(name))

    def gives_categories(self, name: str) -> bool:
        """Whether the names of a column's categories are declared; by its name in the run."""
        declared = self.of_feature(name)
        return declared.type == "category" and bool(declared.categories)


PLAIN = Reader()


def with_names(names: Iterable[str]) -> list[str]:
    """Name columns without a name, so that they can be dropped."""
    return [name or f"{NO_NAME}{place}" for place, name in enumerate(names, start=1)]


def listed(names: Iterable[str], limit: int = MOST_LISTED) -> str:
    """Names in quotes, separated by commas; beyond the limit only their number."""
    return first([f"'{name}'" for name in names], limit)


def first(words: Sequence[str], limit: int = MOST_LISTED) -> str:
    """Words separated by commas; beyond the limit only their number."""
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more
