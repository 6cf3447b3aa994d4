"""What is taken apart is put together again, for every declared type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.records.codec import IN_FILE, Array, codec_of

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Inner:
    values: tuple[float, ...]
    key: bytes = b""
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True, slots=True)
class Outer:
    one: Inner
    names: Annotated[tuple[tuple[str, ...] | None, ...], IN_FILE]
    maybe: Inner | None = None
    pair: tuple[int, str] = (0, "")
    many: Mapping[str, tuple[Inner, ...]] = field(default_factory=dict)
    number: float | int | None = None


texts = st.text(st.characters(codec="utf-8"), max_size=5)
inner = st.builds(
    Inner, st.lists(st.floats(allow_nan=False), max_size=3).map(tuple), st.binary(max_size=9)
)
outer = st.builds(
    Outer,
    inner,
    st.lists(st.none() | st.lists(texts, max_size=3).map(tuple), max_size=3).map(tuple),
    st.none() | inner,
    st.tuples(st.integers(), texts),
    st.dictionaries(texts, st.lists(inner, max_size=2).map(tuple), max_size=3),
    st.none() | st.integers() | st.floats(allow_nan=False),
)


@given(outer)
def test_a_record_comes_back(record: Outer) -> None:
    codec, arrays = codec_of(Outer), list[Array]()
    tree = json.loads(json.dumps(codec.encode(record, arrays)))
    assert codec.decode(tree, arrays) == record
    assert len(arrays) == 1  # what is marked as of a file


@pytest.mark.parametrize("kind", ["f4", "i8", "?", "U3", "i4,f8"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)])
def test_arrays_are_beside_the_tree(kind: str, shape: tuple[int, ...]) -> None:
    codec, arrays = codec_of(Mapping[str, tuple[Array, ...] | None]), list[Array]()
    one, other = np.zeros(shape, kind), np.ones(2)
    tree = codec.encode({"a": (one, other, one), "b": None}, arrays)
    assert json.loads(json.dumps(tree)) == {"a": [0, 1, 2], "b": None}
    back = codec.decode(tree, arrays)
    assert back["a"][0] is one
    assert back["a"][1] is other
    assert back["b"] is None


@pytest.mark.parametrize(
    "hint",
    [dict[str, int], list[int], object, int | Doubles, Inner | Outer, Mapping[int, str], set[int]],
)
def test_another_type_is_refused(hint: Any) -> None:
    with pytest.raises(TypeError, match=r"^(type of a record's field|union) must be "):
        codec_of(hint)


def test_what_a_type_needs_is_worked_out_once() -> None:
    assert codec_of(Mapping[str, Outer]) is codec_of(Mapping[str, Outer])
