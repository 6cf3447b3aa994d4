"""Messages made from their declared forms."""

from importlib import import_module
from pkgutil import iter_modules

import numpy as np

from fedapp import messages
from fedapp.messages.fields import Form, Letter, Message, OneOf, Range, Reply, Request


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


def name_of(kind):
    return f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}"


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
            least = max(int(form.low) if isinstance(form, Range) else 0, 1)
            values[name] = "a" * least if base is str else tuple("abcdefgh"[:least])
            if isinstance(form, Range) and form.high < len(values[name]):
                values[name] = values[name][: int(form.high)]
    return values


def example_array(kind, form, size):
    """An array that keeps its form, with the sizes that its relations ask for."""
    shape = [
        one if isinstance(one, int) else size + int(one.partition("+")[2] or 0)
        for one in form.shape
    ]
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
