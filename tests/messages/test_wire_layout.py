"""Messages survive the way through bytes, and bytes that are no message are refused."""

import json
import tracemalloc

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


@st.composite
def contents(draw):
    names = draw(st.lists(st.text(max_size=5), max_size=6, unique=True))
    n_arrays = draw(st.integers(0, len(names)))
    arrays = {name: draw(ARRAYS) for name in names[:n_arrays]}
    return Content(draw(st.text()), {name: draw(SCALARS) for name in names[n_arrays:]}, arrays)


def sample():
    arrays = {"codes": np.arange(5, dtype=np.uint8), "sums": np.ones((2, 3))}
    return Content("SampleReply", {"level": 3}, arrays)


def with_header(body=b"", **changes):
    """A message whose header is changed."""
    header = {"name": "SampleReply", "scalars": {}, "arrays": [], **changes}
    text = json.dumps(header, separators=(",", ":"))
    return framed((text + " " * (-len(text) % 8)).encode(), body)


def framed(header, body=b""):
    return len(header).to_bytes(8, "little") + header + body


@pytest.mark.slow
@given(contents())
def test_a_message_survives_the_way_through_bytes(content):
    found = from_bytes(to_bytes(content), "bank")
    assert found.name == content.name
    assert found.scalars == content.scalars
    assert {k: type(v) for k, v in found.scalars.items()} == {
        k: type(v) for k, v in content.scalars.items()
    }
    assert found.arrays.keys() == content.arrays.keys()
    for name, array in content.arrays.items():
        assert found.arrays[name].dtype.str == array.dtype.str
        assert found.arrays[name].shape == array.shape
        assert found.arrays[name].tobytes() == array.tobytes()


@pytest.mark.slow
@given(contents())
def test_what_is_read_is_written_the_same_again(content):
    data = to_bytes(content)
    assert to_bytes(from_bytes(data, "bank")) == data


@pytest.mark.slow
@given(contents())
def test_arrays_are_aligned_read_only_views(content):
    data = to_bytes(content)
    whole = np.frombuffer(data, np.uint8)
    wire._read_shared.cache_clear()  # an equal message that came before would serve
    for array in from_bytes(data, "bank").arrays.values():
        assert array.flags.aligned
        assert not array.flags.writeable
        assert np.shares_memory(array, whole) or not array.size


def test_the_layout_is_the_length_the_header_and_raw_arrays():
    data = to_bytes(sample())
    start = 8 + int.from_bytes(data[:8], "little")
    assert json.loads(data[8:start]) == {
        "name": "SampleReply",
        "scalars": {"level": 3},
        "arrays": [["sums", "<f8", [2, 3]], ["codes", "|u1", [5]]],
    }
    assert data[start:] == np.ones(6).tobytes() + bytes(range(5))


@pytest.mark.parametrize("size", range(len(to_bytes(sample()))))
def test_every_truncated_message_is_refused(size):
    with pytest.raises(ProtocolError, match=r"^bank: (message|SampleReply)\.\w+ must "):
        from_bytes(to_bytes(sample())[:size], "bank")


def test_bytes_after_the_arrays_are_refused():
    with pytest.raises(
        ProtocolError, match=r"^bank: SampleReply\.arrays must be the end, got 2 bytes after them$"
    ):
        from_bytes(to_bytes(sample()) + b"ab", "bank")


def test_an_array_that_does_not_fill_its_shape_is_refused():
    with pytest.raises(
        ProtocolError, match=r"^bank: SampleReply\.sums must fill its shape, got 44 of 48 bytes$"
    ):
        from_bytes(to_bytes(sample())[:-9], "bank")


@given(st.binary(max_size=64))
def test_garbage_is_refused(data):
    with pytest.raises(ProtocolError, match=r"^bank: message\.header must be "):
        from_bytes(data, "bank")


@given(st.binary(max_size=64))
def test_a_garbled_header_is_refused(header):
    with pytest.raises(ProtocolError, match=r"^bank: message\.header must be "):
        from_bytes(framed(header), "bank")


@given(st.data())
def test_a_changed_byte_is_refused_or_gives_another_message(data):
    whole = bytearray(to_bytes(sample()))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    try:
        found = from_bytes(bytes(whole), "bank")
    except ProtocolError:
        return
    assert sum(array.nbytes for array in found.arrays.values()) == 53
    assert to_bytes(found) == bytes(whole)


@pytest.mark.slow
@given(st.data())
def test_bytes_put_in_or_cut_out_are_refused_or_give_another_message(data):
    whole = to_bytes(sample())
    places = st.integers(0, len(whole))
    start, stop = sorted((data.draw(places), data.draw(places)))
    changed = whole[:start] + data.draw(st.binary(max_size=16)) + whole[stop:]
    try:
        found = from_bytes(changed, "bank")
    except ProtocolError:
        return
    assert to_bytes(found) == changed


HEADERS = st.fixed_dictionaries(
    {
        "name": st.text(max_size=3),
        "scalars": st.dictionaries(st.text(max_size=3), SCALARS, max_size=2),
        "arrays": st.lists(
            st.tuples(
                st.text(max_size=3),
                st.sampled_from(["<f8", ">f8", "<i4", "<f2", "|u1", "|b1", "|O", "<c8", "f8"]),
                st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**31, 2**62, 2**63]), max_size=4),
            ),
            max_size=3,
        ),
    }
)


@pytest.mark.slow
@given(HEADERS, st.binary(max_size=64))
def test_any_layout_is_refused_or_fills_the_message(header, body):
    data = with_header(body, **header)
    try:
        found = from_bytes(data, "bank")
    except ProtocolError:
        return
    assert sum(array.nbytes for array in found.arrays.values()) == len(body)
    assert to_bytes(found) == data


@pytest.mark.parametrize(
    ("header", "found"),
    [
        (b'{"name":"A","scalars":{},"arrays":[]}', "another spelling"),  # not padded
        (b'{"name":"A","scalars":{},"arrays":[]}' + b" " * 11, "another spelling"),
        (b'{"name": "A","scalars":{},"arrays":[]}  ', "another spelling"),
        (b'{"scalars":{},"name":"A","arrays":[]}   ', "another spelling"),
        (b'{"name":"A","name":"A","scalars":{},"arrays":[]}', "another spelling"),
        (b'{"name":"\\u0041","scalars":{},"arrays":[]}', "another spelling"),
        (b'{"name":"A","scalars":{"a":1.50},"arrays":[]}   ', "another spelling"),
        (
            b'{"name":"A","scalars":{},"arrays":[["a","|u1",[0]],["b","<f8",[0]]]} ',
            "arrays in another order",
        ),
    ],
    ids=lambda text: text.decode() if isinstance(text, bytes) else "",
)
def test_a_message_has_one_layout(header, found):
    with pytest.raises(ProtocolError, match=f"^bank: message.header must be fedapp's, got {found}"):
        from_bytes(framed(header), "bank")


def test_to_read_a_message_takes_no_memory_beyond_it():
    data = to_bytes(Content("A", {}, {"a": np.zeros(10**6), "b": np.zeros(10**6, np.uint8)}))
    tracemalloc.start()
    try:
        found = from_bytes(data, "bank")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.arrays["a"].nbytes == 8 * 10**6
    assert peak < 10**5


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"name":"A","scalars":{}}',
        b'{"name":"A","scalars":{},"arrays":[],"more":0}',
        b'{"name":"A","name":"B","scalars":{},"arrays":[]}',
        b'{"name":"A","scalars":{"a":1,"a":2},"arrays":[]}',
        b'{"name":"A","scalars":{"a":NaN},"arrays":[]}',
        b'{"name":"A","scalars":{"a":1e999},"arrays":[]}',
        b'{"name":"A","scalars":{},"arrays":[]} x',
        b'{"name":"\xff","scalars":{},"arrays":[]}',
        b"[" * 100_000,
        b'{"name":' + b"1" * 5000 + b"}",
    ],
    ids=lambda header: header[:50].decode("latin1"),
)
def test_a_header_of_another_form_is_refused(header):
    with pytest.raises(ProtocolError, match=r"^bank: message\.header must be "):
        from_bytes(framed(header), "bank")


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"name": 3}, "values of other types"),
        ({"scalars": []}, "values of other types"),
        ({"arrays": {}}, "values of other types"),
        ({"scalars": {"a": None}}, "a scalar of another type or range"),
        ({"scalars": {"a": {}}}, "a scalar of another type or range"),
        ({"scalars": {"a": [1]}}, "a scalar of another type or range"),
        ({"scalars": {"a": 2**63}}, "a scalar of another type or range"),
        ({"arrays": ["a"]}, "an array of another form"),
        ({"arrays": [["a", "<f8"]]}, "an array of another form"),
        ({"arrays": [[1, "<f8", [0]]]}, "an array of another form"),
        ({"arrays": [["a", "|O", [0]]]}, "an array of another form"),
        ({"arrays": [["a", "|b1", [0]]]}, "an array of another form"),
        ({"arrays": [["a", "<U1", [0]]]}, "an array of another form"),
        ({"arrays": [["a", "|V8", [0]]]}, "an array of another form"),
        ({"arrays": [["a", "<M8[s]", [0]]]}, "an array of another form"),
        ({"arrays": [["a", "<c8", [0]]]}, "an array of another form"),
        ({"arrays": [["a", "f8,f8", [0]]]}, "an array of another form"),
        ({"arrays": [["a", "float64", [0]]]}, "an array of another form"),
        ({"arrays": [["a", ["<f8"], [0]]]}, "an array of another form"),
        ({"arrays": [["a", "<f8", 0]]}, "an array of another form"),
        ({"arrays": [["a", "<f8", [-1]]]}, "an array of another form"),
        ({"arrays": [["a", "<f8", [True]]]}, "an array of another form"),
        ({"arrays": [["a", "<f8", [0.0]]]}, "an array of another form"),
        ({"arrays": [["a", "<f8", [2**63, 0]]]}, "an array of another form"),
        ({"arrays": [["a", "<f8", [0]], ["a", "<f8", [0]]]}, "a name twice"),
        ({"scalars": {"a": 1}, "arrays": [["a", "<f8", [0]]]}, "a name twice"),
    ],
    ids=str,
)
def test_what_no_message_has_is_refused(changes, found):
    with pytest.raises(ProtocolError, match=f"^bank: message.header must be fedapp's, got {found}"):
        from_bytes(with_header(**changes), "bank")


@pytest.mark.parametrize("shape", [[2**62, 2**62], [2**60, 2]], ids=str)
def test_a_shape_beyond_all_memory_is_refused(shape):
    with pytest.raises(ProtocolError, match=r"^bank: SampleReply\.a must fill its shape, got 8 of"):
        from_bytes(with_header(bytes(8), arrays=[["a", "<f8", shape]]), "bank")


def test_a_shape_that_numpy_does_not_know_is_refused():
    with pytest.raises(ProtocolError, match=r"^bank: SampleReply\.a must have a shape, got "):
        from_bytes(with_header(b"", arrays=[["a", "|u1", [0, 2**62, 2**62]]]), "bank")


@pytest.mark.parametrize(
    "shape", [9 * [1], 300 * [2**62], 50_000 * [1]], ids=["nine", "huge", "very many"]
)
def test_more_dimensions_than_any_message_has_are_refused_before_they_are_multiplied(shape):
    with pytest.raises(ProtocolError, match="must be fedapp's, got an array of another form"):
        from_bytes(with_header(b"\0", arrays=[["a", "|u1", shape]]), "bank")
    assert from_bytes(with_header(b"\0", arrays=[["a", "|u1", 8 * [1]]]), "bank")


@pytest.mark.parametrize(
    "array",
    [
        np.array([True]),
        np.array(["a"]),
        np.array([1j]),
        np.array([None]),
        np.zeros(2, [("a", "u1")]),
        np.array(["2020-01-01"], dtype="M8[s]"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_an_array_of_another_kind_is_not_sent(array):
    with pytest.raises(
        ProtocolError, match=r"^sender: A\.a must be whole numbers or floats of 1 to 8 bytes, got "
    ):
        to_bytes(Content("A", {}, {"a": array}))


@pytest.mark.parametrize(
    "value", [np.nan, np.inf, 2**63, None, np.int64(1), {"b": 1}, [1]], ids=str
)
def test_a_scalar_of_another_kind_is_not_sent(value):
    with pytest.raises(ProtocolError, match=r"^sender: A\.a must be a finite number, a text or a "):
        to_bytes(Content("A", {"a": value}, {}))
