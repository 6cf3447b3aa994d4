"""Messages made from their declared forms: valid ones, and one for every way to break a rule."""

import re
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, NamedTuple

import numpy as np

from fedapp import messages
from fedapp.messages.fields import ITSELF, Form, Letter, Message, OneOf, Range, Reply, Request


def kinds():
    """Every class of messages that can be sent."""
    for module in iter_modules(messages.__path__):
        import_module(f"{messages.__name__}.{module.name}")
    waiting, seen = [Request, Reply, Letter], dict[str, type[Message]]()
    while waiting:
        for kind in waiting.pop().__subclasses__():
            waiting.append(kind)
            if kind.__module__.startswith(messages.__name__) and "forms" in vars(kind):
                seen[f"{kind.__module__}.{kind.__name__}"] = kind
    return [seen[name] for name in sorted(seen)]


def name_of(value):
    """Names of tests: of a message, and of what is changed."""
    if isinstance(value, type):
        return f"{value.__module__.rpartition('.')[2]}.{value.__name__}"
    return f"{value.field}-{value.rule}" if isinstance(value, Violation) else None


def example(kind, size=2):
    """Values of all fields that keep every rule; dimensions have this size."""
    values = {}
    for name, (base, form) in kind.forms.items():
        if isinstance(form, Form):
            values[name] = example_array(kind, form, size)
        elif isinstance(form, OneOf):
            values[name] = form.values[0]
        elif base is int:
            low, high = (form.low, form.high) if isinstance(form, Range) else (0, size)
            values[name] = size if name in kind.numbers else int(np.clip(size, low, high))
        elif base is float:
            values[name] = float(form.low) if form else 0.0
        elif base is bool:
            values[name] = True
        else:
            least = int(form.low) if isinstance(form, Range) else 0
            n_texts = size if isinstance(form, Range) and form.size else max(least, 1)
            values[name] = "a" * max(least, 1) if base is str else tuple("abcdefgh"[:n_texts])
            if isinstance(form, Range) and form.high < len(values[name]):
                values[name] = values[name][: int(form.high)]
    return values


def example_array(kind, form, size):
    """An array that keeps its form, with the sizes that its relations ask for."""
    shape = [length(one, size) for one in form.shape]
    low = max(0, form.low if form.low is not None else 0)
    rules = form.relations
    if "divides" in rules or "ends" in rules:
        ends = np.full(shape, size, form.dtype)  # all in the first part
        if "divides" in rules:
            ends[0] = 0
        return np.arange(shape[0]).astype(form.dtype) if "ascending" in rules else ends
    if "adds_up" in rules:
        return np.full(shape, 1, form.dtype)
    if "ascending" in rules:
        return np.arange(shape[0]).astype(form.dtype)
    return np.full(shape, low, form.dtype)


def length(dimension, size):
    """A dimension's size where named ones have ``size``."""
    if isinstance(dimension, int):
        return dimension
    return size + int(dimension.partition("+")[2] or 0)


class Violation(NamedTuple):
    """A field whose value breaks a rule, and what the error says."""

    field: str
    rule: str
    value: Any
    text: str


def violations(kind):
    """One for each declared rule of each field."""
    values = example(kind)
    for name, (base, form) in kind.forms.items():
        value = values[name]
        if isinstance(form, Form):
            yield from array_violations(kind, name, form, value)
            continue
        yield Violation(name, "type", None, "must be (a list of texts|\\w+), got NoneType")
        if base is float:
            yield Violation(name, "finite", np.nan, "must be finite, got nan")
        if base in (str, tuple):
            for rule, bad, text in BAD_TEXTS:
                yield Violation(name, rule, bad if base is str else (bad,), text)
        if isinstance(form, OneOf):
            other = "z" if base is str else -1
            yield Violation(name, "one_of", other, f"must be one of .*, got {other}")
        elif isinstance(form, Range):
            bounds = re.escape(f"must be {form.low} to {form.high}, got")
            if base in (int, float):
                yield Violation(name, "low", base(form.low - 1), bounds)
                if base(form.high * 2) <= 2**62:
                    yield Violation(name, "high", base(form.high * 2 + 1), bounds)
            else:
                empty = "" if base is str else ()
                if form.low:
                    yield Violation(name, "low", empty, rf"length {bounds} 0")
                if form.high < 1001:
                    many = int(form.high) + 1
                    long = "a" * many if base is str else ("a",) * many
                    yield Violation(name, "high", long, f"length {bounds} {many}")
                if form.size and form.low < 1:
                    yield Violation(name, "size", ("a",) * 3, r"must (be|have size) \d")


BAD_TEXTS = (
    ("unprintable", "\x1b[2J", "must have no control characters but tab and line feed"),
    ("long", "x" * 1001, "must be of at most 1000 letters, got 1001"),
)


def array_violations(kind, name, form, value):
    """One for each declared rule of an array."""
    other = "float32" if form.dtype != np.float32 else "float64"
    yield Violation(name, "dtype", value.astype(other), f"must be {form.dtype}, got {other}")
    yield Violation(name, "no array", 1, f"must be {form.dtype}, got int")
    n = len(form.shape)
    yield Violation(name, "ndim", value[None], f"must have {n} dimensions, got {n + 1}")
    dimensions = [str(one).partition("+")[0] for one in form.shape]
    for place, dimension in enumerate(form.shape):
        bound = dimensions[place] in kind.numbers or isinstance(dimension, int)
        if bound or is_repeated(kind, name, dimensions[place]):
            wider = np.repeat(value, 3, axis=place)
            yield Violation(name, f"size {place}", wider, r"must (have size|be) \d")
    info = np.finfo(form.dtype) if form.dtype.kind == "f" else np.iinfo(form.dtype)
    if form.dtype.kind == "f":
        yield Violation(name, "finite", np.full_like(value, np.inf), "must be finite")
    if form.low is not None and form.low > info.min:
        yield Violation(name, "low", np.full_like(value, form.low - 1), f"must be >= {form.low}")
    if form.high is not None and form.high < info.max:
        yield Violation(name, "high", np.full_like(value, form.high + 1), f"must be <= {form.high}")
    changes = {
        "divides": (value[::-1], r"must rise from 0 to \d"),
        "ends": (value + 1, r"must rise to \d"),
        "adds_up": (value + 1, r"must add up to \d"),
        "below": (value + 9, r"must be < \d+, got \d+"),
        "ascending": (np.r_[value[:1], value[:1], value[2:]], "must ascend"),
        "in_order": (np.arange(len(value))[::-1].astype(form.dtype), "must be in order"),
    }
    for rule, related in form.relations.items():
        # What only the receiver knows is not checked on arrival.
        if related == ITSELF or related in kind.forms or related in named_dimensions(kind):
            yield Violation(name, rule, *changes[rule])


def named_dimensions(kind):
    """The names of all dimensions of a message's arrays."""
    arrays = [form for _, form in kind.forms.values() if isinstance(form, Form)]
    return {str(one).partition("+")[0] for form in arrays for one in form.shape}


def is_repeated(kind, name, dimension):
    """Whether an earlier field, or another dimension, fixes a named dimension."""
    for other, (_, form) in kind.forms.items():
        if other == name:
            return False
        if isinstance(form, Range) and form.size == dimension:
            return True
        shape = form.shape if isinstance(form, Form) and not form.empty else ()
        if any(str(one).partition("+")[0] == dimension for one in shape):
            return True
    return False
