"""Changes to messages and model files that nobody honest makes, for ``simulations.bench.fuzz``."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, RecordDict

from fedapp.errors import FedappError
from fedapp.messages.fields import Array
from fedapp.messages.wire import Content, Envelope, from_bytes, to_bytes

# Fields that set how much work a run is: any value is honest.
WORK = frozenset({"epochs", "n_rounds", "trees", "key_bits", "channels", "round_id", "max_depth"})
MOST_ROWS, MOST_CELLS = 50_000, 2**21  # of a changed array
NESTED = "nested"  # stands for lists in lists


def change_content(content: Content, rng: random.Random) -> Content:
    """Change one to three fields, or remove or add one."""
    scalars, arrays = dict(content.scalars), dict(content.arrays)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        names = sorted((scalars.keys() | arrays.keys()) - WORK)
        if not names:
            break
        name = rng.choice(names)
        if rng.random() < 0.02:
            scalars.pop(name, arrays.pop(name, None))
        elif name in arrays:
            arrays[name] = change_array(arrays[name], rng)
        elif name in scalars:
            scalars[name] = change_scalar(scalars[name], rng)
    if rng.random() < 0.02:
        scalars["more"] = 1
    return Content(content.name, scalars, arrays)


def change_scalar(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.05:
        return rng.choice([True, 0, 1.5, "", ["a"], "x" * 2000])
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        edges = [0, 1, -1, 2, value + 1, value - 1, 2**31, 2**63 - 1, -(2**63), 64, 1000, 65535]
        return max(-(2**63), min(2**63 - 1, rng.choice(edges)))
    if isinstance(value, float):
        return rng.choice([0.0, -1.0, 1.0, 0.5, 1e-300, 1e300, -1e300, value * 2, 1e38])
    if isinstance(value, str):
        return rng.choice(["", value + "x", value[:-1], "\x1b[2J", "a" * 64, "\ud800", "../x", "é"])
    texts = list(value)
    return rng.choice([[], texts[:-1], texts + texts, texts[::-1], ["x"] * 1001, [*texts, "new"]])


def change_array(array: Array, rng: random.Random) -> Array:
    """Change values, length, shape or type."""
    draw, copy = rng.random(), np.array(array)
    max_rows = min(MOST_ROWS, MOST_CELLS // max(1, math.prod(copy.shape[1:])))
    if draw < 0.55 and copy.size:
        n_changed = rng.choice((1, 1, 2, copy.size))
        indices = [rng.randrange(copy.size) for _ in range(min(n_changed, 1000))]
        for index in indices:
            copy.flat[index] = _edge(copy.dtype, rng)
        return copy
    if draw < 0.85 and copy.ndim:
        rows = list(range(len(copy)))
        lengths = [rows[:-1], rows[:1], [], rows + rows[-1:], rows[::-1], rows * 3]
        lengths.append((rows * (1 + max_rows // max(len(rows), 1)))[:max_rows])
        changed = copy[np.array(rng.choice(lengths), dtype=np.int64)]
        return np.ascontiguousarray(changed)
    if draw < 0.93:
        size = min(max_rows, rng.choice((0, 1, 7, 5000)))
        shape = (size, *copy.shape[1:]) if copy.ndim else ()
        return np.full(shape, _edge(copy.dtype, rng), dtype=copy.dtype)
    if draw < 0.97:
        return copy.reshape(-1, 1)
    return copy.astype(rng.choice(["uint8", "int32", "int64", "float32", "float64"]))


def _edge(dtype: np.dtype[Any], rng: random.Random) -> Any:
    if dtype.kind == "f":
        largest = np.finfo(dtype).max
        return rng.choice([0, -1, 1, np.nan, np.inf, -np.inf, largest, -largest, 1e-30, 0.5])
    info = np.iinfo(dtype)
    edges = [0, 1, 2, 3, 7, 31, 64, 255, 1000, 65535, 65536, 2**31 - 1, info.max, info.min, -1]
    return max(info.min, min(info.max, rng.choice(edges)))


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, cut out or duplicate some bytes, or cut off the end."""
    copy = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        position = rng.randrange(len(copy)) if copy else 0
        draw = rng.random()
        if draw < 0.6 and copy:
            copy[position] = rng.choice(
                [0, 255, 48, 57, 34, copy[position] ^ (1 << rng.randrange(8))]
            )
        elif draw < 0.75:
            del copy[position : position + rng.choice((1, 8, 100))]
        elif draw < 0.9:
            copy[position:position] = copy[position : position + rng.choice((1, 8, 100))]
        else:
            del copy[position:]
    return bytes(copy)


def change_message(content: Content, rng: random.Random) -> Content:
    """A changed message as it arrives; raises the errors of its parser."""
    if rng.random() < 0.2:
        return from_bytes(change_bytes(to_bytes(content), rng), "fuzz")
    changed = change_content(content, rng)
    with suppress(FedappError):  # an invalid message that cannot be written stays as it is
        return from_bytes(to_bytes(changed), "fuzz")
    return changed


def change_records(records: RecordDict, rng: random.Random) -> RecordDict:
    """Change the envelope or an array, or remove or add a record."""
    for _ in range(rng.choice((1, 1, 2))):
        configs, arrays = list(records.config_records), list(records.array_records)
        draw = rng.random()
        if draw < 0.6 and configs:
            head = records.config_records[rng.choice(configs)]
            name = rng.choice(list(head)) if head else "new"
            values: list[Any] = [0, -1, 2**63 - 1, 1.5, True, "", "x" * 2000]
            values += [b"", b"\xff" * 9, [1, 2], ["a"]]
            value = head.get(name)
            if isinstance(value, bytes) and rng.random() < 0.8:
                head[name] = change_bytes(value, rng)
            else:
                head[name] = rng.choice(values)
        elif draw < 0.8:
            shape = rng.choice([(), (0,), (3,), (-1,), (2**40,), (1, 3)])
            dtype = rng.choice(["|u1", "<f8", "object", ""])
            stype = rng.choice(["fedapp.raw", "numpy"])
            array = FlowerArray(dtype=dtype, shape=shape, stype=stype, data=b"abc")
            name = rng.choice(["content", "envelope", "more"])
            records[name] = ArrayRecord({rng.choice(["content", "more"]): array})
        elif configs + arrays:
            del records[rng.choice(configs + arrays)]
    return records


def change_envelope(envelope: Envelope, rng: random.Random) -> Envelope:
    """Change one field, in 5 % of the calls."""
    if rng.random() > 0.05:
        return envelope
    name = rng.choice(["step", "checkpoint", "attempt", "gap", "method", "model_id"])
    value = rng.choice([0, 1, 2, envelope.step + 1, 2**62])
    other: dict[str, Any] = {name: {"method": "pax", "model_id": "0" * 16}.get(name, value)}
    return replace(envelope, **other)


def change_document(text: str, rng: random.Random) -> str:
    """Change some values of a JSON document."""
    if rng.random() < 0.3:
        return change_bytes(text.encode(), rng).decode(errors="replace")
    document = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        node: Any = document
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if not isinstance(node[key], dict | list) or rng.random() < 0.15:
                node[key] = _other(node[key], rng)
                break
            node = node[key]
    return json.dumps(document).replace(f'"{NESTED}"', "[" * 5000 + "]" * 5000)


def _other(value: Any, rng: random.Random) -> Any:
    edges: list[Any] = [None, True, "", "x", -1, 0, 1, 2, 10**6, 2**31, 2**63, 10**30, 1e300]
    edges += [NESTED, {}, []]
    edges += [float("nan"), float("inf"), -0.5, [""] * 10_000, value]
    if isinstance(value, list):
        edges += [value[:-1], value + value, value[::-1]]
    return rng.choice(edges)
