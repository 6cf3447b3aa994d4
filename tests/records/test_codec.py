"""What is taken apart is put together again, for every declared type."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

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


class Both(NamedTuple):
    values: tuple[int, ...]
    number: int = 0


NOTHING, UNIT = Both(()), np.float32(0.1)


@dataclass(frozen=True, slots=True)
class Outer:
    one: Inner
    names: Annotated[tuple[tuple[str, ...] | None, ...], IN_FILE]
    maybe: Inner | None = None
    pair: tuple[int, str] = (0, "")
    many: Mapping[str, tuple[Inner, ...]] = field(default_factory=dict)
    number: float | int | None = None
    both: Both = NOTHING
    columns: tuple[frozenset[int], ...] = ()
    unit: np.float32 = UNIT
    letters: tuple[Annotated[bytes, IN_FILE], ...] = ()


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
    st.builds(Both, st.lists(st.integers(), max_size=3).map(tuple), st.integers()),
    st.lists(st.frozensets(st.integers()), max_size=2).map(tuple),
    st.floats(allow_nan=False, width=32).map(np.float32),
    st.lists(st.binary(max_size=9), max_size=2).map(tuple),
)


@given(outer)
def test_a_record_comes_back(record):
    codec, arrays = codec_of(Outer), []
    tree = json.loads(json.dumps(codec.encode(record, arrays)))
    assert codec.decode(tree, arrays) == record
    assert len(arrays) == 1 + len(record.letters)  # what is marked as of a file


def test_arrays_are_beside_the_tree():
    codec, arrays = codec_of(Mapping[str, tuple[Array, ...] | None]), []
    one, other = np.zeros((0, 2), "U3"), np.ones(2)
    tree = codec.encode({"a": (one, other, one), "b": None}, arrays)
    assert json.loads(json.dumps(tree)) == {"a": [0, 1, 2], "b": None}
    back = codec.decode(tree, arrays)
    assert back["a"][0] is one
    assert (back["a"][1] is other, back["b"]) == (True, None)


@pytest.mark.parametrize(
    "hint",
    [dict[str, int], list[int], Any, object, int | Doubles, Inner | Outer, Mapping[int, str], set],
)
def test_another_type_is_refused(hint):
    with pytest.raises(TypeError, match=r"^(type of a record's field|union) must be "):
        codec_of(hint)
    assert codec_of(Mapping[str, Outer]) is codec_of(Mapping[str, Outer])
