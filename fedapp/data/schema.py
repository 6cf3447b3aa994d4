"""What a file's columns are for, and how it departs from a plain one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MISSING = ("", "NA", "N/A", "nan", "NaN", "null", "?")
# Words that other readers, as pandas, take for missing too, and that here are text.
MISSING_ELSEWHERE = ("#N/A", "#NA", "<NA>", "NULL", "None", "n/a")
PACKINGS = (".gz", ".bz2")
NO_NAME = "unnamed-"
MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Roles:
    """Columns that are not features; an empty name means that there is no such column.

    Parameters
    ----------
    base_margin : column of the margin that each row starts from.
    drop_unlabelled : whether rows without a label are dropped, and not refused.
    """

    label: str = ""
    id_column: str = ""
    weight: str = ""
    group: str = ""
    drop: tuple[str, ...] = ()
    base_margin: str = ""
    drop_unlabelled: bool = False

    def named(self) -> dict[str, str]:
        """Role and column of those that are set, without the dropped ones."""
        names = (self.label, self.id_column, self.weight, self.group, self.base_margin)
        roles = ("label", "id", "weight", "group", "base-margin")
        return {role: name for role, name in zip(roles, names, strict=True) if name}


NO_ROLES = Roles()


@dataclass(frozen=True, slots=True)
class Declared:
    """What a schema says of one column.

    Parameters
    ----------
    name : in the file.
    rename : in the run; empty leaves the name.
    type : number, category, ordinal, boolean or date; empty goes by the values.
    missing : values that mean that there is none, beside ``MISSING`` and the table's own.
    categories : names of a category, the dictionary common to all parties; of an ordinal the names
        from the lowest to the highest. Empty: the names found.
    codes : a value of the file and the name it stands for.
    """

    name: str
    rename: str = ""
    type: str = ""
    missing: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    codes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Reader:
    """How a file departs from one whose suffix and header line say it all.

    Parameters
    ----------
    format : "csv", "parquet" or "libsvm"; empty goes by the suffix.
    delimiter : one character, CSV alone; empty goes by the first lines. A blank is any run of them.
    skip_lines : lines before the header, or before the first row where there is none.
    columns : names for a CSV file without a header line.
    n_features : columns of a LIBSVM file; 0 means its highest index.
    header : whether a CSV file without `columns` names them in its first line; else they are f1,
        f2, ...
    decimal : what separates the fraction of a number in a CSV file, a point or a comma.
    encoding : of a CSV file, by a name that Python knows.
    missing : values that mean that there is none, beside ``MISSING``.
    declared : columns of which a schema says more.
    tolerant : whether declared columns may be absent, as those of another party's table.
    """

    format: str = ""
    delimiter: str = ""
    skip_lines: int = 0
    columns: tuple[str, ...] = ()
    n_features: int = 0
    header: bool = True
    decimal: str = "."
    encoding: str = "utf-8"
    missing: tuple[str, ...] = ()
    declared: tuple[Declared, ...] = ()
    tolerant: bool = False

    @property
    def has_header(self) -> bool:
        """Whether the first line of a CSV file holds names."""
        return self.header and not self.columns

    def of_column(self, name: str) -> Declared:
        """What is declared of a column, by its name in the file."""
        return next((one for one in self.declared if one.name == name), Declared(name))

    def of_feature(self, name: str) -> Declared:
        """What is declared of a column, by its name in the run."""
        found = (one for one in self.declared if (one.rename or one.name) == name)
        return next(found, Declared(name))

    def gives_categories(self, name: str) -> bool:
        """Whether the names of a column's categories are declared, by its name in the run."""
        declared = self.of_feature(name)
        return declared.type == "category" and bool(declared.categories)


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
