"""Models as documents: one line of JSON whose fields have names.

::

    {"format": 3, "kind": "linear", "objective": "reg:logistic", "columns": ["age"], ...}

A model is a dataclass with a ``KIND``. Its fields are written under their names, in their order; a
field that has its default is left out. Types are those of ``records.codec``. A number is finite,
an integer within its dtype, bytes are hex digits, and an array is nested lists. Annotations declare
more::

    scales: Annotated[npt.NDArray[np.float64], "n_inputs", "> 0"]     a dimension, and a range
    quantiles: Annotated[npt.NDArray[np.float32], "n", "m", None]     null is NaN
    tree: Annotated[npt.NDArray[Any], NODE, ("left", "column")]       fields of a structured dtype,
                                                                      then those that may have rows
    sets: Annotated[CategorySets, CategorySets.codes, CategorySets.of_codes]

A dimension is the name of a property of the dataclass, or "" for any size. A pair of functions
converts a value to the type of the second one's argument, and back.

Everything declared is checked on reading. ``completed`` of a kind then checks what its fields must
be together, and adds what follows from them. Documents of other formats are refused.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from reprlib import repr as brief
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from fedapp.errors import DataError, as_plain
from fedapp.process import versions
from fedapp.records.codec import UNIONS, Array, hints_of, once, origin_of, unless_none

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FORMAT = 3
# Half the size of the largest message. Parsed, the file takes about ten times the memory.
MOST_BYTES = 2**30
# Raised for JSON of an unexpected form, or nested too deeply.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_BEGINS = re.compile(r'\{"format":\s*\d+,\s*"kind":\s*"([^"]*)"')
_HEX = re.compile("([0-9a-f]{2})*")
_RANGE = re.compile(r"([<>]=?) (\S+)")
_SIGNS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
# What lists of an array's dtype have, by its kind, and in words.
_ITEMS: dict[str, tuple[set[type], type, str]] = {
    "b": ({bool}, np.bool_, "true or false"),
    "f": ({int, float}, np.float64, "finite"),
    "i": ({int}, np.int64, "whole numbers"),
    "u": ({int}, np.int64, "whole numbers >= 0"),
}
Json = Any
Fields = dict[str, Json]


class Kind(Protocol):
    """A model of any kind; a dataclass."""

    KIND: ClassVar[str]


K = TypeVar("K", bound=Kind)


def to_text(model: Kind) -> str:
    """The model's document; deterministic."""
    return json.dumps(to_document(model), separators=(",", ":"), allow_nan=False) + "\n"


def to_document(model: Kind) -> Fields:
    """The model's document, before it is text."""
    return {"format": FORMAT, **form_of(type(model)).write(model)}


def from_text(text: str, *kinds: type[K]) -> K:
    """Read what ``to_text`` wrote of one of some kinds; raises DataError for any other text."""
    return from_document(json_of(text), *kinds)


def from_document(document: Json, *kinds: type[K]) -> K:
    """Undo ``to_document``; raises DataError for any other value."""
    try:
        version = _object(document, "model", {"format"})["format"]
        _whole(version, "format")
        if version != FORMAT:
            rule = f"format must be {FORMAT} for fedapp {versions(['fedapp'])['fedapp']}"
            way = "a newer fedapp may read it" if version > FORMAT else "train the model again"
            raise ValueError(f"{rule}, got {version}: {way}")
        content = {name: value for name, value in document.items() if name != "format"}
        model: K = _of_kinds(kinds).read(content, "")
    except UNREADABLE as error:
        reason = str(error) if type(error) is ValueError else repr(error)
        rule = f"model must be JSON of fedapp's format {FORMAT}"
        raise DataError(as_plain(f"{rule}, got another: {reason}")) from error
    return model


def load(path: Path, *kinds: type[K]) -> K:
    """Read a model's file; raises DataError if it is missing, or another."""
    return from_text(model_text(path), *kinds)


def kind_of(text: str) -> str:
    """Kind of a model's text by its beginning; empty if that has none."""
    begins = _BEGINS.match(text)
    return begins[1] if begins else ""


def json_of(text: str) -> Json:
    """A model's text, parsed; DataError if it is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except UNREADABLE as error:
        raise DataError(f"model must be JSON, got {as_plain(repr(error))}") from None


def model_text(path: Path) -> str:
    """Text of a model's file; DataError if it is missing or too large."""
    return model_bytes(path).decode()


def model_bytes(path: Path) -> bytes:
    """Content of a model's file; DataError if it is missing or too large."""
    if not path.is_file():
        raise DataError(f"model must be a file, got {path}")
    if (n_bytes := path.stat().st_size) > MOST_BYTES:
        raise DataError(f"model must be a file of <= {MOST_BYTES:,} bytes, got {n_bytes:,}: {path}")
    return path.read_bytes()


NAMED = "model"  # kind of a text that only names a model


def name_of_model(model_id: str) -> str:
    """Text of a run that predicts: which model it uses."""
    named = {"format": FORMAT, "kind": NAMED, "id": model_id}
    return json.dumps(named, separators=(",", ":")) + "\n"


# The forms of declared types


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one type are written and read.

    ``read`` raises ValueError with the path, its second argument, and the broken rule.
    """

    write: Callable[[Any], Json]
    read: Callable[[Json, str], Any]


@once
def form_of(hint: Any) -> Form:
    """The form of a type; raises TypeError for one that no document may have."""
    rules: Sequence[Any] = ()
    if get_origin(hint) is Annotated:
        hint, *rules = get_args(hint)
    if pair := [rule for rule in rules if callable(rule)]:
        return _converted(*pair)
    origin, args = origin_of(hint), get_args(hint)
    if origin is np.ndarray:
        if rules and isinstance(rules[0], np.dtype):
            return _table(*rules)
        return _array(np.dtype(*(get_args(args[-1]) or args[-1:])), rules)
    if hint in (int, float, np.float32):
        some = _array(np.dtype(hint), rules, ndim=0)
        return Form(
            lambda value: some.write(np.array([value]))[0],
            lambda tree, path: hint(some.read(tree, path)),
        )
    if hint in (str, bool):
        rule = "a text" if hint is str else "true or false"
        return _checked(lambda value: type(value) is hint, rule)
    if origin is Literal:
        return _checked(lambda value: value in args, f"one of {', '.join(args)}")
    if hint is bytes:
        return Form(bytes.hex, lambda tree, path: bytes.fromhex(_digits(tree, path)))
    if origin in UNIONS:
        inner = _of_kinds([arg for arg in args if arg is not NoneType])
        may_be_none = NoneType in args
        return Form(unless_none(inner.write), unless_none(inner.read)) if may_be_none else inner
    if origin is tuple and args[1:] == (...,):
        return _list(form_of(args[0]))
    if origin is Mapping and args[0] is str:
        return _mapping(form_of(args[1]))
    if is_dataclass(hint) and isinstance(hint, type):
        return _record(hint)
    raise TypeError(f"type of a document's field must be one that has a form, got {hint}")


def _dimensions(rules: Sequence[Any]) -> list[str]:
    return [rule for rule in rules if isinstance(rule, str) and not _RANGE.fullmatch(rule)]


def _broken(path: str, rule: str, got: Json) -> ValueError:
    return ValueError(f"{path} must be {rule}, got {brief(got)}")


def _checked(is_valid: Callable[[Json], bool], rule: str) -> Form:
    def read(tree: Json, path: str) -> Any:
        if not is_valid(tree):
            raise _broken(path, rule, tree)
        return tree

    return Form(lambda value: value, read)


_digits = _checked(
    lambda value: bool(type(value) is str and _HEX.fullmatch(value)), "hex digits"
).read
_whole = _checked(lambda value: type(value) is int, "a whole number").read
_items = _checked(lambda value: type(value) is list, "a list").read


def _object(
    tree: Json, path: str, required: Collection[str], allowed: Collection[str] | None = None
) -> Fields:
    if type(tree) is not dict:
        raise _broken(path, "an object", tree)
    if missing := [name for name in required if name not in tree]:
        raise ValueError(f"{path} must have {', '.join(missing)}")
    if allowed is not None and (others := [name for name in tree if name not in allowed]):
        raise ValueError(f"{path} must have no other fields, got {brief(others)}")
    return tree


def _array(dtype: np.dtype[Any], rules: Sequence[Any], ndim: int = 1) -> Form:
    types, wide, rule = _ITEMS[dtype.kind]
    texts = [text for text in rules if isinstance(text, str)]
    may_be_missing = None in rules
    ndim = max(ndim, len(_dimensions(rules)))
    if may_be_missing:
        types, rule = {*types, NoneType}, f"{rule} or null"

    def write(value: Any) -> Json:
        if value.ndim > 1:
            return [write(row) for row in value]
        if dtype.kind != "f":
            return value.tolist()
        # The shortest digits that read back to the same bits.
        numbers = value.tolist() if dtype == np.float64 else [*map(float, map(str, value))]
        return [None if n != n else n for n in numbers] if may_be_missing else numbers

    def read(tree: Json, path: str) -> Any:
        flat = [tree]
        for _ in range(ndim):
            flat = [item for row in flat for item in _items(row, path)]
        if not types.issuperset(map(type, flat)):
            raise _broken(path, rule, tree)
        lists: Any = np.zeros((0,) * ndim) if tree == [] else tree
        wide_values: Array = np.array(lists, dtype=wide)
        with np.errstate(over="ignore"):
            values = wide_values.astype(dtype)
        if dtype.kind in "iu" and not np.array_equal(values, wide_values):
            raise _broken(path, f"{rule} of {dtype}", tree)
        if dtype.kind == "f" and np.isfinite(values).sum() != len(flat) - flat.count(None):
            raise _broken(path, rule, tree)
        for sign, bound in (text.groups() for text in map(_RANGE.fullmatch, texts) if text):
            if not _SIGNS[sign](values, float(bound)).all():
                raise _broken(path, f"{sign} {bound}", tree)
        return values

    return Form(write, read)


def _table(dtype: np.dtype[Any], names: Sequence[str], vectors: Collection[str] = ()) -> Form:
    columns = {name: _array(dtype[name], ()) for name in names}
    rows = {name: _array(dtype[name], (), ndim=2) for name in vectors}

    def read(tree: Json, path: str) -> Any:
        lists = _object(tree, path, names, names)
        has_rows = {name for name in vectors if list in map(type, _items(lists[name], path)[:1])}
        values = {
            name: (rows if name in has_rows else columns)[name].read(lists[name], f"{path}.{name}")
            for name in names
        }
        if len({len(value) for value in values.values()}) != 1:
            raise ValueError(f"{path} must have lists of one length")
        shapes = {name: values[name].shape[1:] for name in has_rows}
        kinds = [(name, dtype[name], shapes.get(name, ())) for name in dtype.names or ()]
        table = np.zeros(len(values[names[0]]), dtype=kinds)
        for name, column in values.items():
            table[name] = column
        return table

    return Form(lambda value: {name: columns[name].write(value[name]) for name in names}, read)


def _list(form: Form) -> Form:
    def read(tree: Json, path: str) -> Any:
        numbered = enumerate(_items(tree, path))
        return tuple(form.read(item, f"{path}[{number}]") for number, item in numbered)

    return Form(lambda value: [form.write(item) for item in value], read)


def _mapping(form: Form) -> Form:
    def read(tree: Json, path: str) -> Any:
        named = _object(tree, path, ()).items()
        return {name: form.read(item, f"{path}.{name}") for name, item in named}

    return Form(lambda value: {name: form.write(item) for name, item in value.items()}, read)


def _converted(write: Callable[[Any], Any], read: Callable[[Any], Any]) -> Form:
    hints = get_type_hints(read, include_extras=True)
    inner = form_of(next(hint for name, hint in hints.items() if name != "return"))
    return Form(
        lambda value: inner.write(write(value)), lambda tree, path: read(inner.read(tree, path))
    )


def _of_kinds(kinds: Sequence[Any]) -> Form:
    """One type, or several that have a ``KIND``."""
    if len(kinds) == 1:
        return form_of(kinds[0])
    forms = {kind.KIND: _record(kind) for kind in kinds}

    def read(tree: Json, path: str) -> Any:
        kind = _object(tree, path or "model", {"kind"})["kind"]
        if kind not in forms:
            raise _broken("kind", f"one of {', '.join(forms)}", kind)
        return forms[kind].read(tree, path)

    return Form(lambda value: _record(type(value)).write(value), read)


@once
def _record(kind: type[DataclassInstance]) -> Form:
    hints = hints_of(kind)
    forms = {name: form_of(hint) for name, hint in hints.items()}
    defaults = {
        field.name: forms[field.name].write(field.default)
        for field in fields(kind)
        if field.default is not MISSING
    }
    shapes = {name: _dimensions(getattr(hint, "__metadata__", ())) for name, hint in hints.items()}
    header = {"kind": kind.KIND} if hasattr(kind, "KIND") else {}
    required = [*header, *(name for name in forms if name not in defaults)]

    def write(value: Any) -> Json:
        trees = {name: form.write(getattr(value, name)) for name, form in forms.items()}
        is_default = {name for name, tree in defaults.items() if trees[name] == tree}
        return header | {name: tree for name, tree in trees.items() if name not in is_default}

    def read(tree: Json, path: str) -> Any:
        trees = _object(tree, path or "model", required, {*header, *forms})
        if header and trees["kind"] != header["kind"]:
            raise _broken("kind", repr(header["kind"]), trees["kind"])
        before = f"{path}." if path else ""
        named = {name: form for name, form in forms.items() if name in trees}
        values = {name: form.read(trees[name], before + name) for name, form in named.items()}
        value: Any = kind(**values)
        for name, dimensions in shapes.items():
            got = getattr(value, name).shape if dimensions else ()
            sizes = zip(dimensions, got, strict=True)
            due = tuple(operator.attrgetter(of)(value) if of else size for of, size in sizes)
            if got != due:
                raise ValueError(f"{before}{name} must be of shape {due}, got {got}")
        return value.completed() if hasattr(value, "completed") else value

    return Form(write, read)
