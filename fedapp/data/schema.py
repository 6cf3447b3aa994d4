"""A table's schema: a TOML file; and what it becomes, roles of columns and options for reading.

``fedapp data describe TABLE --schema FILE.toml`` writes one with what it has detected.
Public data sets are described likewise, with files and checksums, in ``registry.toml``.
"""

from __future__ import annotations

import codecs
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from fedapp.errors import ConfigError, rule_of
from fedapp.home import read_toml
from fedapp.trees.categories import MOST_CATEGORIES

MISSING = ("", "NA", "N/A", "nan", "NaN", "null", "?")
# Words that other readers, such as pandas, take as missing, but that are text here.
MISSING_ELSEWHERE = ("#N/A", "#NA", "<NA>", "NULL", "None", "n/a")
PACKED = ".gz"
NO_NAME = "unnamed-"
WHOLE_DECIMAL = re.compile(r"(-?\d+)\.0+", re.ASCII)  # 1 written as a decimal number
MOST_LISTED = 20
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "blank": " "}


@dataclass(frozen=True, slots=True)
class Roles:
    """Columns that are not features; an empty name means that there is no such column."""

    label: str = ""
    id_column: str = ""
    weight: str = ""
    partition: str = ""  # column of a natural partition
    drop: tuple[str, ...] = ()
    base_margin: str = ""  # column of initial margins
    drop_unlabelled: bool = False  # drop rows without a label instead of refusing the table
    without: tuple[str, ...] = ()  # ids of rows that are left out
    event: str = ""  # column that is 0 where the label is the time of no event
    qid: str = ""  # column of the queries whose rows are ranked
    group: str = ""  # column whose rows are in one subset, as a person's
    time: str = ""  # column of dates or numbers by which a run holds rows back

    def named(self) -> dict[str, str]:
        """Role and name of each column that has a role, except the dropped ones."""
        roles = {"label": self.label, "event": self.event, "qid": self.qid, "id": self.id_column}
        roles |= {"weight": self.weight, "partition": self.partition}
        roles |= {"base-margin": self.base_margin, "group": self.group, "test-from": self.time}
        return {role: name for role, name in roles.items() if name}

    def columns(self) -> list[tuple[str, str]]:
        """The same as pairs; an id of several columns has one for each."""
        pairs = self.named().items()
        return [(role, column) for role, name in pairs for column in columns_of_role(role, name)]


NO_ROLES = Roles()
# Names of columns; in ``registry.toml`` they are separated by blanks.
Words = Annotated[tuple[str, ...], BeforeValidator(str.split)]


def columns_of_role(role: str, name: str) -> tuple[str, ...]:
    """Columns of a role; the id may be several, separated by commas."""
    return id_columns(name) if role == "id" else (name,)


def id_columns(name: str) -> tuple[str, ...]:
    """Columns of an id, as in ``branch,customer``; none of an empty name."""
    return tuple(filter(None, map(str.strip, name.split(","))))


def joined_id(parts: Sequence[str]) -> str:
    """An id of several columns as one text: other parts give another text.

    Commas separate the parts; a backslash goes before a comma or a backslash of a part.
    """
    if len(parts) == 1:
        return parts[0]
    return ",".join(part.replace("\\", r"\\").replace(",", r"\,") for part in parts)


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
    aggregate: str = ""  # how values of rows that share an id become one; see ``data.columns``

    @property
    def aggregates_numbers(self) -> bool:
        """Whether values that become one must be numbers."""
        return self.aggregate in ("sum", "mean", "min", "max")


@dataclass(frozen=True, slots=True)
class Reader:
    """Options for reading a file whose suffix and header line do not say everything."""

    format: str = ""  # "csv", "parquet" or "libsvm"; empty infers it from the suffix
    delimiter: str = ""  # one character, CSV only; empty detects it; a blank is any run of blanks
    skip_lines: int = 0  # before the header or, without one, before the first row
    columns: Words = ()  # names for a CSV file without a header line
    n_features: int = 0  # columns of a LIBSVM file; 0 means its highest index
    # Whether the first line of a CSV file without `columns` has the names; if not, they are f1, f2,
    # ...
    header: bool = True
    decimal: str = "."  # "." or ",", CSV only
    encoding: str = "utf-8"  # of a CSV file, as Python names it
    missing: tuple[str, ...] = ()  # values that mean "missing", besides ``MISSING``
    declared: tuple[Declared, ...] = ()
    order_by: str = ""  # column that orders the rows of an id, for ``last``
    tolerant: bool = False  # whether declared columns may be absent, as in another party's table

    @property
    def has_header(self) -> bool:
        """Whether the first line of a CSV file has the names."""
        return self.header and not self.columns

    def of_column(self, name: str) -> Declared:
        """Declaration of a column, by its name in the file."""
        return next((column for column in self.declared if column.name == name), Declared(name))

    def of_feature(self, name: str) -> Declared:
        """Declaration of a column, by its name in the run."""
        matches = (column for column in self.declared if (column.rename or column.name) == name)
        return next(matches, Declared(name))

    @property
    def aggregates(self) -> bool:
        """Whether rows that share an id become one."""
        return any(column.aggregate for column in self.declared)

    def gives_categories(self, name: str) -> bool:
        """Whether the names of a column's categories are declared; by its name in the run."""
        declared = self.of_feature(name)
        return declared.type == "category" and bool(declared.categories)


PLAIN = Reader()


def plain_text(text: str) -> str:
    """A text without blanks around, in Unicode's form NFC; 1 for 1.0."""
    text = composed(text.strip())
    whole = WHOLE_DECIMAL.fullmatch(text)
    return whole[1] if whole else text


def composed(text: str) -> str:
    """A text in Unicode's form NFC, in which all texts are compared."""
    return unicodedata.normalize("NFC", text)


def with_names(names: Iterable[str]) -> list[str]:
    """Plain names of columns; those without one get a name, so that they can be dropped."""
    plain = (composed(name.strip()) for name in names)
    return [name or f"{NO_NAME}{number}" for number, name in enumerate(plain, start=1)]


def listed(names: Iterable[str], limit: int = MOST_LISTED) -> str:
    """Names in quotes, separated by commas; beyond the limit only their number."""
    return first([f"'{name}'" for name in names], limit)


def first(words: Sequence[str], limit: int = MOST_LISTED) -> str:
    """Words separated by commas; beyond the limit only their number."""
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


# A number in TOML is text here, as it would be in a table.
Text = Annotated[
    str, BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value)
]


# A list of names of columns is one text, separated by commas.
Names = Annotated[
    str, BeforeValidator(lambda names: ",".join(map(str, names)) if type(names) is list else names)
]


class Section(BaseModel):
    """Part of a schema; its fields are in kebab-case."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=lambda name: name.replace("_", "-"),
    )


class ColumnSection(Section):
    """One column, under its name in the file."""

    name: str = ""  # in the run; empty keeps the file's name
    # empty infers it from the values
    type: Literal["", "number", "category", "ordinal", "boolean", "date", "drop"] = ""
    missing: list[Text] = Field(default_factory=list)  # values that mean "missing"
    # Names common to all parties; other values count as missing.
    categories: Annotated[list[Text], Field(max_length=MOST_CATEGORIES)] = Field(
        default_factory=list
    )
    # names from the lowest to the highest; others count as missing
    order: Annotated[list[Text], Field(max_length=MOST_CATEGORIES)] = Field(default_factory=list)
    # the name that a value of the file stands for
    codes: dict[str, Text] = Field(default_factory=dict)
    # what becomes of the values of rows that share an id
    aggregate: Literal["", "count", "sum", "mean", "min", "max", "last"] = ""


class Schema(Section):
    """Format of a table, its columns with a role, and the types of its columns."""

    # of fields; empty detects it
    separator: Literal["", "comma", "semicolon", "tab", "bar", "blank"] = ""
    header: bool = True  # whether the first line has the names; if not, they are f1, f2, ...
    # of the columns, if the file has no line of names
    names: list[str] = Field(default_factory=list)
    skip_lines: Annotated[int, Field(ge=0)] = 0  # before the header, or the first row
    decimal: Literal[".", ","] = "."
    encoding: str = "utf-8"  # as Python names it
    missing: list[Text] = Field(default_factory=list)  # values that mean "missing" in every column
    label: str = ""  # these six by their names in the run
    id: Names = ""  # a list: of several columns
    weight: str = ""
    base_margin: str = ""
    event: str = ""
    qid: str = ""
    order_by: str = ""  # column of numbers or dates that says which row of an id is the last
    positive_label: str = ""  # of two classes, the one that counts as 1; empty takes the later
    missing_label: Literal["refuse", "drop"] = "refuse"  # what happens to rows without a label
    columns: dict[str, ColumnSection] = Field(default_factory=dict)

    def reader(self, tolerant: bool = False) -> Reader:
        """Options for reading the file; `tolerant` if it has only some of the schema's columns."""
        return Reader(
            delimiter=SEPARATORS.get(self.separator, ""),
            skip_lines=self.skip_lines,
            columns=tuple(self.names),
            header=self.header,
            decimal=self.decimal,
            encoding=self.encoding,
            missing=tuple(self.missing),
            declared=tuple(_declared(name, column) for name, column in self.columns.items()),
            order_by=self.order_by,
            tolerant=tolerant,
        )

    def roles(self) -> Roles:
        """Columns that are not features."""
        dropped = (
            column.name or name for name, column in self.columns.items() if column.type == "drop"
        )
        return Roles(
            self.label,
            self.id,
            self.weight,
            drop=tuple(dropped),
            base_margin=self.base_margin,
            drop_unlabelled=self.missing_label == "drop",
            event=self.event,
            qid=self.qid,
        )


def read_schema(path: Path) -> Schema:
    """Read and check a schema; raises ConfigError with the file, the field and its rule."""
    try:
        version = path.stat()
        return _read(path, version.st_mtime_ns, version.st_size)
    except OSError as error:
        rule = f"schema '{path}' must be a file that can be read"
        raise ConfigError(f"{rule}: {error.strerror}") from None


@lru_cache(32)  # one schema per site of a simulation
def _read(path: Path, *version: int) -> Schema:
    """Parse a schema; cached, as every message to a site needs it."""
    where = f"schema '{path}'"
    try:
        text = composed(path.read_text(encoding="utf-8"))
        schema = Schema.model_validate(read_toml(text, f"{where} must be TOML"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} must be TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{where}: {_broken(error)}") from None
    check_encoding(schema.encoding, f"{where}: ")
    if len(set(schema.names)) < len(schema.names):
        raise ConfigError(f"{where}: names must be distinct")
    renamed = [column.name or name for name, column in schema.columns.items()]
    if repeated := [name for name in renamed if renamed.count(name) > 1]:
        raise ConfigError(f"{where}: columns must have distinct names, got {repeated[0]!r} twice")
    for name, column in schema.columns.items():
        _check_column(column, f"{where}: columns.{name}")
    lasts = [name for name, column in schema.columns.items() if column.aggregate == "last"]
    if bool(lasts) != bool(schema.order_by):
        got = f"columns.{lasts[0]}.aggregate is last" if lasts else "no column has it"
        raise ConfigError(f'{where}: order-by must come with aggregate = "last", {got}')
    return schema


def check_encoding(name: str, where: str = "") -> None:
    """Check that Python knows the encoding; `where` starts the ConfigError."""
    try:
        codecs.lookup(name)
    except LookupError:
        rule = "encoding must be one that Python knows, as utf-8, latin-1 or cp1252"
        raise ConfigError(f"{where}{rule}, got {name!r}") from None


def _declared(name: str, column: ColumnSection) -> Declared:
    return Declared(
        name,
        column.name,
        # A count is a number, whatever it counts.
        "" if column.type == "drop" or column.aggregate == "count" else column.type,
        tuple(map(plain_text, column.missing)),
        tuple(map(plain_text, column.order if column.type == "ordinal" else column.categories)),
        tuple((plain_text(code), name) for code, name in column.codes.items()),
        column.aggregate,
    )


def _broken(error: ValidationError) -> str:
    """Describe the first rule that is broken."""
    first = error.errors()[0]
    field = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{field} is not a field of a schema"
    return f"{field} must be {rule_of(first['type'], first.get('ctx', {}))}, got {first['input']!r}"


def _check_column(column: ColumnSection, where: str) -> None:
    """Check that names are given only for types that have names, each once."""
    lists: Mapping[str, tuple[Any, str]] = {
        "order": (column.order, "ordinal"),
        "categories": (column.categories, "category"),
    }
    for field, (names, type) in lists.items():
        if names and column.type != type:
            raise ConfigError(f'{where}.{field} needs type = "{type}", got "{column.type}"')
        if len(set(map(plain_text, names))) < len(names):
            raise ConfigError(f"{where}.{field} must list every name once")
    if column.type == "drop" and column.aggregate:
        raise ConfigError(f'{where}.aggregate must be omitted with type = "drop"')
    if column.type == "ordinal" and len(column.order) < 2:
        raise ConfigError(f"{where}.order must name the values from the lowest to the highest")


def _airline(frame: Any) -> Any:
    """Keep flights that arrived, and add the label."""
    frame = frame.filter(pc.is_valid(frame["ArrDelay"]))
    minutes = frame["ArrDelay"].cast(pa.int64())
    return frame.append_column("delayed", pc.greater(minutes, 15).cast(pa.float64()))


def _clinics(frame: Any) -> Any:
    """Add the clinic of each patient, by thirds of the body mass index."""
    masses = frame["bmi"]
    low, high = pc.quantile(masses, [1 / 3, 2 / 3]).to_pylist()
    others = pc.if_else(pc.less_equal(masses, high), "medium", "heavy")
    return frame.append_column("clinic", pc.if_else(pc.less_equal(masses, low), "light", others))


PREPARED = {"airline": _airline, "clinics": _clinics}
Preparation = Annotated[Callable[[Any], Any], BeforeValidator(lambda name: PREPARED[name])]


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a data set."""

    name: str  # with .gz if it is stored packed
    sha256: str  # of the content, unpacked
    url: str = ""  # of the content, packed or not; empty if it is not public

    @property
    def names(self) -> tuple[str, ...]:
        """All names the file may have."""
        bare = self.name.removesuffix(PACKED)
        return tuple(dict.fromkeys((self.name, bare, bare + PACKED)))


@dataclass(frozen=True, slots=True)
class DataSet:
    """A table known by name."""

    task: str  # "binary", "multiclass" or "regression"
    shape: tuple[int, int]  # rows and features of the loaded table
    description: str  # what a row is, and how the columns were changed
    source: str  # publisher and licence
    files: tuple[DataFile, ...] = ()  # the first is the table; empty for scikit-learn's sets
    label: str = "label"
    drop: Words = ()  # columns that are not features
    reader: Reader = PLAIN
    prepare: Preparation | None = None  # from the file's pyarrow.Table to the table's
    bunch: str = ""  # scikit-learn's name, if it is another


_registry = Path(__file__).with_name("registry.toml").read_text(encoding="utf-8")
DATA_SETS = TypeAdapter(dict[str, DataSet], config=ConfigDict(extra="forbid"))
REGISTRY = DATA_SETS.validate_python(tomllib.loads(_registry))
