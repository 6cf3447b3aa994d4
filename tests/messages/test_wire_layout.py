"""Messages survive the way through bytes, and bytes that are no message are refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedapp.errors import ProtocolError
from fedapp.messages import wire
from fedapp.messages.wire import Content, from_bytes, to_bytes

DTYPES = st.one_of(
    hnp.unsigned_integer_dtypes(endianness="?"),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.text(max_size=5), max_size=3),
)
SAMPLE = to_bytes(
    Content(
        "SampleReply",
        {"level": 3},
        {"codes": np.arange(5, dtype=np.uint8), "sums": np.ones((2, 3))},
    )
)


@st.composite
def contents(draw):
    names = draw(st.lists(st.text(max_size=5), max_size=6, unique=True))
    n_arrays = draw(st.integers(0, len(names)))
    arrays = {name: draw(ARRAYS) for name in names[:n_arrays]}
    return Content(draw(st.text()), {name: draw(SCALARS) for name in names[n_arrays:]}, arrays)


def framed(header, body=b""):
    return len(header).to_bytes(8, "little") + header + body


def with_header(body=b"", **changes):
    """A message whose header is changed."""
    header = {"name": "SampleReply", "scalars": {}, "arrays": [], **changes}
    text = json.dumps(header, separators=(",", ":"))
    return framed((text + " " * (-len(text) % 8)).encode(), body)


@given(contents())
def test_a_message_is_read_as_aligned_views_and_written_the_same_again(content):
    data = to_bytes(content)
    wire._read_shared.cache_clear()  # an equal message that came before would serve
    found = from_bytes(data, "bank")
    assert (found.name, found.scalars) == (content.name, content.scalars)
    kinds = [[type(value) for value in one.scalars.values()] for one in (found, content)]
    assert kinds[0] == kinds[1]
    assert found.arrays.keys() == content.arrays.keys()
    for name, array in content.arrays.items():
        there = found.arrays[name]
        assert (there.dtype.str, there.shape) == (array.dtype.str, array.shape)
        assert there.tobytes() == array.tobytes()
        assert there.flags.aligned
        assert not there.flags.writeable
        assert np.shares_memory(there, np.frombuffer(data, np.uint8)) or not there.size
    assert to_bytes(found) == data


def test_the_layout_is_the_length_the_header_and_raw_arrays():
    start = 8 + int.from_bytes(SAMPLE[:8], "little")
    assert json.loads(SAMPLE[8:start]) == {
        "name": "SampleReply",
        "scalars": {"level": 3},
        "arrays": [["sums", "<f8", [2, 3]], ["codes", "|u1", [5]]],
    }
    assert SAMPLE[start:] == np.ones(6).tobytes() + bytes(range(5))


# Damaged messages


def is_refused_or_another(data, n_bytes):
    """A message that is read has a layout of its own; returns the bytes of its arrays."""
    try:
        found = from_bytes(data, "bank")
    except ProtocolError:
        return n_bytes
    assert to_bytes(found) == data
    return sum(array.nbytes for array in found.arrays.values())


@given(st.binary(max_size=64), st.data())
def test_garbage_and_changed_bytes_are_refused_or_another_message(garbage, data):
    for damaged in (garbage, framed(garbage)):
        with pytest.raises(ProtocolError, match=r"^bank: message\.header must be "):
            from_bytes(damaged, "bank")
    places = st.integers(0, len(SAMPLE))
    start, stop = sorted((data.draw(places), data.draw(places)))
    if start < stop:
        with pytest.raises(ProtocolError, match=r"^bank: (message|SampleReply)\.\w+ must "):
            from_bytes(SAMPLE[:start], "bank")
    is_refused_or_another(SAMPLE[:start] + garbage[:16] + SAMPLE[stop:], 0)
    whole = bytearray(SAMPLE)
    whole[min(start, len(SAMPLE) - 1)] ^= data.draw(st.integers(1, 255))
    assert is_refused_or_another(bytes(whole), 53) == 53


OTHERS = "message.header must be fedapp's, got "
SPELLING, SCALAR = OTHERS + "another spelling", OTHERS + "a scalar of another type or range"
FORM, TYPES = OTHERS + "an array of another form", OTHERS + "values of other types"
HEADER, EMPTY = r"message\.header must be ", b'{"name":"A","scalars":{},"arrays":[]}'
REFUSED = [
    (SAMPLE + b"ab", r"SampleReply\.arrays must be the end, got 2 bytes after them$"),
    (SAMPLE[:-9], r"SampleReply\.sums must fill its shape, got 44 of 48 bytes$"),
    # A message has one layout
    *(
        (framed(header), SPELLING)
        for header in (
            EMPTY,  # not padded
            b'{"scalars":{},"name":"A","arrays":[]}   ',
            b'{"name":"A","name":"A","scalars":{},"arrays":[]}',
            b'{"name":"A","scalars":{"a":1.50},"arrays":[]}   ',
        )
    ),
    (with_header(arrays=[["a", "|u1", [0]], ["b", "<f8", [0]]]), OTHERS + "arrays in another ord"),
    # Headers of another form
    *(
        (framed(header), HEADER)
        for header in (
            *(b"", b"[]", b'{"name":"A","scalars":{}}', EMPTY + b" x"),
            b'{"name":"A","scalars":{},"arrays":[],"more":0}',
            b'{"name":"A","scalars":{"a":1,"a":2},"arrays":[]}',
            b'{"name":"A","scalars":{"a":NaN},"arrays":[]}',
            b'{"name":"A","scalars":{"a":1e999},"arrays":[]}',
            b'{"name":"\xff","scalars":{},"arrays":[]}',
            b"[" * 100_000,
            b'{"name":' + b"1" * 5000 + b"}",
        )
    ),
    # Values of another form
    *((with_header(**one), TYPES) for one in ({"name": 3}, {"scalars": []}, {"arrays": {}})),
    *((with_header(scalars={"a": value}), SCALAR) for value in (None, {}, [1], 2**63)),
    *(
        (with_header(arrays=[array]), FORM)
        for array in ("a", [1, "<f8", [0]], ["a", ["<f8"], [0]], ["a", "<f8", 0])
    ),
    *(
        (with_header(arrays=[["a", dtype, [0]]]), FORM)
        for dtype in ("|O", "|b1", "<U1", "<c8", "f8,f8", "float64")
    ),
    *(
        (with_header(arrays=[["a", "<f8", shape]]), FORM)
        for shape in ([-1], [True], [0.0], [2**63, 0], 9 * [1], 300 * [2**62], 50_000 * [1])
    ),
    (with_header(arrays=[["a", "<f8", [0]]] * 2), OTHERS + "a name twice"),
    (with_header(scalars={"a": 1}, arrays=[["a", "<f8", [0]]]), OTHERS + "a name twice"),
    # Shapes beyond all memory, or that numpy does not know
    *(
        (
            with_header(bytes(8), arrays=[["a", "<f8", shape]]),
            r"SampleReply\.a must fill its shape, got 8 of",
        )
        for shape in ([2**62, 2**62], [2**60, 2])
    ),
    (with_header(arrays=[["a", "|u1", [0, 2**62, 2**62]]]), r"SampleReply\.a must have a shape"),
]


@pytest.mark.parametrize(("data", "rule"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_message_has_is_refused(data, rule):
    with pytest.raises(ProtocolError, match=f"^bank: {rule}"):
        from_bytes(data, "bank")


ARRAY = r"A\.a must be whole numbers or floats of 1 to 8 bytes, got "
NUMBER = r"A\.a must be a finite number, a text or a "


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        *((np.array(values), ARRAY) for values in ([True], ["a"], [1j], [None])),
        (np.zeros(2, [("a", "u1")]), ARRAY),
        (np.array(["2020-01-01"], dtype="M8[s]"), ARRAY),
        *((value, NUMBER) for value in (np.nan, np.inf, 2**63, None, np.int64(1), {"b": 1}, [1])),
    ],
    ids=repr,
)
def test_a_value_of_another_kind_is_not_sent(value, rule):
    is_array = isinstance(value, np.ndarray)
    content = Content("A", {} if is_array else {"a": value}, {"a": value} if is_array else {})
    with pytest.raises(ProtocolError, match=f"^sender: {rule}"):
        to_bytes(content)
