"""Messages survive Flower's own serialisation; other forms and bytes are refused."""

import json
import re
from dataclasses import fields
from itertools import product
from typing import Annotated

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedapp.errors import ProtocolError
from fedapp.messages import wire
from fedapp.messages.fields import (
    Array,
    Form,
    Range,
    Reply,
    Request,
    check_sizes,
    message,
    request,
)
from fedapp.messages.wire import (
    RAW,
    Content,
    Envelope,
    from_bytes,
    from_content,
    from_records,
    n_bytes,
    to_bytes,
    to_content,
    to_records,
)
from tests.messages.declared import example, kinds, name_of

ENVELOPE = Envelope("0123456789abcdef", step=3, checkpoint=2, attempt=1)


@message
class Sample(Reply):
    """One field of every kind."""

    sums: Annotated[Array, Form("float64", "n_nodes", "n_bins", 2)]
    counts: Annotated[Array, Form("int32", "n_nodes", low=0, high=100)]
    offsets: Annotated[Array, Form("int64", "n_offsets")]
    maxima: Annotated[Array, Form("float32", "n_columns", low=-9, high=9, nan=True)]
    bits: Annotated[Array, Form("uint8", "n_bytes")]
    level: Annotated[int, Range(0, 64)]
    share: Annotated[float, Range(0, 1)]
    mean: float
    last: bool
    name: Annotated[str, Range(1, 8)]
    classes: Annotated[tuple[str, ...], Range(0, 3)]


@message
class Related(Reply):
    """One array of every relation."""

    size: int
    offsets: Annotated[Array, Form("int64", "n_offsets", divides="size")]
    ends: Annotated[Array, Form("int64", "n_ends", ends="size")]
    sizes: Annotated[Array, Form("int64", "n_sizes", adds_up="size")]
    places: Annotated[Array, Form("int64", "n_places", below="size")]
    columns: Annotated[Array, Form("int64", "n_drawn", ascending=True)]
    order: Annotated[Array, Form("int64", "n_ordered", in_order=True)]


@request("train.other")
class OtherRequest(Request):
    """A message without an array."""

    level: int


def sample(**changes):
    values = {
        "sums": np.arange(12, dtype=np.float64).reshape(2, 3, 2),
        "counts": np.array([0, 100], dtype=np.int32),
        "offsets": np.array([0, -5], dtype=np.int64),
        "maxima": np.array([1.5, np.nan], dtype=np.float32),
        "bits": np.frombuffer(b"\x00\xff", dtype=np.uint8),
        "level": 64,
        "share": 0.25,
        "mean": -1e300,
        "last": True,
        "name": "bank",
        "classes": ("no", "yes"),
    }
    return Sample(**{**values, **changes})


def through_objects(records):
    """As a SuperLink stores and delivers a message: a tree of deflated objects."""
    contents = {key: part.deflate() for key, part in get_all_nested_objects(records).items()}
    found = inflate_object_from_contents(records.object_id, contents)
    assert isinstance(found, RecordDict)
    return found


def through_proto(records):
    """As a protobuf message."""
    proto = recorddict_to_proto(records)
    return recorddict_from_proto(type(proto).FromString(proto.SerializeToString()))


def assert_same(found, sent):
    assert type(found) is type(sent)
    for field in fields(sent):
        there, here = getattr(found, field.name), getattr(sent, field.name)
        if isinstance(here, np.ndarray):
            assert there.dtype == here.dtype
            assert there.shape == here.shape
            assert there.tobytes() == here.tobytes()
        else:
            assert (type(there), there) == (type(here), here)


def sent_records(message, as_array):
    """Records of a message, its content an array or with the envelope."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "MOST_WITH_ENVELOPE", -1 if as_array else 2**20)
        return to_records(to_bytes(to_content(message, "bank")), ENVELOPE)


NO_ROWS = {"offsets": np.empty(0, "i8"), "bits": np.empty(0, "u1"), "classes": (), "name": "\t\né"}


@pytest.mark.parametrize("sent", [{}, NO_ROWS], ids=["full", "empty"])
@pytest.mark.parametrize(("wire", "as_array"), [(through_objects, False), (through_proto, True)])
def test_a_message_survives_the_wire(wire, as_array, sent):
    sent = sample(**sent)
    records = sent_records(sent, as_array)
    envelope, content = from_records(wire(records), "bank")
    assert envelope == ENVELOPE
    assert_same(from_content(Sample, content, "bank"), sent)
    assert n_bytes(wire(records)) == n_bytes(records)


@pytest.mark.parametrize("kind", kinds(), ids=name_of)
def test_a_message_that_keeps_its_rules_arrives_and_sizes_that_its_receiver_knows_are_checked(kind):
    message = kind(**example(kind))
    sent = to_content(message, "bank")
    assert_same(from_content(kind, from_bytes(to_bytes(sent), "bank"), "bank"), message)
    arrays = [form for _, form in kind.forms.values() if isinstance(form, Form)]
    for dimension in {one for form in arrays for one in form.shape if isinstance(one, str)}:
        name = dimension.partition("+")[0]
        check_sizes("bank", message, **{name: 2})
        with pytest.raises(ProtocolError, match=re.escape(f"bank: {kind.__name__}.")):
            check_sizes("bank", message, **{name: 3})


def test_an_array_in_another_memory_order_arrives_in_c_order():
    sums = np.asfortranarray(np.arange(12, dtype=np.float64).reshape(2, 3, 2))
    records = to_records(to_bytes(to_content(sample(sums=sums), "bank")), ENVELOPE)
    found = from_content(Sample, from_records(records, "bank")[1], "bank")
    assert found.sums.tolist() == sums.tolist()


CONTROLS = "must have no control characters .*"
BROKEN = {
    "byte order": ({"sums": np.zeros((2, 3, 2), ">f8")}, "sums must be float64, got >f8"),
    "dtype": ({"counts": np.zeros(2, "i8")}, "counts must be int32, got int64"),
    "dimensions": ({"counts": np.zeros((1, 2), "i4")}, "counts must have 1 dimensions, got 2"),
    "low": ({"counts": np.int32([0, -1])}, "counts must be >= 0, got -1"),
    "high": ({"counts": np.int32([0, 101])}, "counts must be <= 100, got 101"),
    "low number": ({"level": -1}, "level must be 0 to 64, got -1"),
    "high number": ({"share": 1.5}, "share must be 0 to 1, got 1.5"),
    "no text": ({"name": ""}, "name length must be 1 to 8, got 0"),
    "long text": ({"classes": ("x" * 1001,)}, "classes must be of at most 1000 letters, got 1001"),
    "many texts": ({"classes": (*"abcd",)}, "classes length must be 0 to 3, got 4"),
    "none": ({"classes": None}, "classes must be a list of texts, got NoneType"),
    "list for array": ({"counts": [0, 1]}, "counts must be int32, got list"),
    "fixed size": ({"sums": np.zeros((2, 3, 3))}, "sums must have size 2 in dimension 3, got 3"),
    "named size": (
        {"counts": np.zeros(3, np.int32)},
        r"counts must have size 2 \(n_nodes\) in dimension 1, got 3",
    ),
    "NaN": ({"sums": np.full((2, 3, 2), np.nan)}, "sums must be finite"),
    "inf beside NaN": ({"maxima": np.array([np.nan, -np.inf], "f4")}, "maxima must be finite"),
    "low beside NaN": (
        {"maxima": np.array([np.nan, -10], "f4")},
        "maxima must be >= -9, got -10.0",
    ),
    "bool for int": ({"level": True}, "level must be int, got bool"),
    "int for float": ({"share": 1}, "share must be float, got int"),
    "bytes for text": ({"name": b"bank"}, "name must be str, got bytes"),
    "infinite without range": ({"mean": float("-inf")}, "mean must be finite, got -inf"),
    "numbers": ({"classes": (1, 2)}, "classes must be a list of texts, got another element in it"),
    "text for list": ({"classes": "ab"}, "classes must be a list of texts, got str"),
    "backwards": ({"classes": ("a", "\u202eb")}, f"classes {CONTROLS}"),
    "half a character": ({"classes": ("\ud800",)}, f"classes {CONTROLS}"),
}


RELATED = {
    "size": 2,
    "offsets": np.array([0, 2]),
    "ends": np.array([1, 2]),
    "sizes": np.array([1, 1]),
    **dict.fromkeys(("places", "columns", "order"), np.array([0, 1])),
}
UNRELATED = [
    ("offsets", [1, 2], "must rise from 0 to 2"),
    ("offsets", [0, 1], "must rise from 0 to 2"),
    ("ends", [2, 1], "must rise to 2"),
    ("sizes", [1, 2], "must add up to 2"),
    ("places", [0, 2], "must be < 2, got 2"),
    ("columns", [1, 1], "must ascend"),
    ("order", [1, 0], "must be in order"),
]


def arrived(message, changes):
    """A message whose fields are changed on its way, as its receiver reads it."""
    sent = to_content(message, "bank")
    scalars, arrays = (
        {key: changes.get(key, value) for key, value in given.items()}
        for given in (sent.scalars, sent.arrays)
    )
    return from_content(type(message), Content(sent.name, scalars, arrays), "bank")


@pytest.mark.parametrize(
    ("message", "changes", "rule"),
    [
        *((sample(), *case) for case in BROKEN.values()),
        *((Related(**RELATED), {of: np.array(to)}, f"{of} {rule}") for of, to, rule in UNRELATED),
    ],
    ids=[*BROKEN, *(f"{of} {to}" for of, to, _ in UNRELATED)],
)
def test_a_message_that_breaks_its_form_is_refused_on_arrival(message, changes, rule):
    with pytest.raises(ProtocolError, match=rf"^bank: \w+\.{rule}$"):
        arrived(message, changes)


def test_an_ending_that_leads_to_another_folder_is_refused_on_arrival():
    named = [kind for kind in kinds() if "suffix" in kind.forms]
    assert len(named) == 3
    for kind in named:
        rule = r"suffix must be one of \.csv, \.parquet, got \.\./x$"
        with pytest.raises(ProtocolError, match=rule):
            arrived(kind(**example(kind)), {"suffix": "../x"})


def test_a_request_is_refused_that_does_not_declare_its_round():
    """Else it works in simulations, and every real site misreads it."""
    members = {"__annotations__": {"round_id": int}, "__module__": __name__}
    rule = r"^StepRequest\.round_id must be declared RoundId, as sites read it, or have"
    with pytest.raises(TypeError, match=rule):
        request("train.trial_step")(type("StepRequest", (Request,), members))


def test_a_message_that_breaks_its_form_does_not_leave_and_is_named():
    with pytest.raises(ProtocolError, match="level") as caught:
        to_content(sample(level=-1), "bank")
    error = caught.value
    assert (error.party, error.message, error.field) == ("bank", "Sample", "level")


SENT = to_content(sample(), "bank")


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (Content("Sample", {}, SENT.arrays), "classes must be present"),
        (Content("Sample", {**SENT.scalars, "y": [1]}, SENT.arrays), "y must be absent"),
        (to_content(OtherRequest(level=1), "bank"), "class must be this one, got OtherRequest"),
    ],
)
def test_other_fields_and_another_class_are_refused(content, rule):
    with pytest.raises(ProtocolError, match=rf"^bank: Sample.{rule}$"):
        from_content(Sample, content, "bank")


def other_format(records):
    records["envelope"]["format"] = 1
    del records["envelope"]["content"]  # of which another format may know nothing


def other_array(**changes):
    array = {"dtype": "|u1", "shape": (8,), "stype": RAW, "data": bytes(8), **changes}
    return ArrayRecord({"content": FlowerArray(**array)})


FEDAPPS, MORE = "records must be fedapp's, .*", "records must be fedapp's, .*more records or arrays"


@pytest.mark.parametrize(
    ("as_array", "change", "rule"),
    [
        (False, other_format, "format must be 3, got 1; update fedapp"),
        (True, lambda records: records.pop("envelope"), FEDAPPS + "KeyErr"),
        (True, lambda records: records.pop("content"), FEDAPPS + "KeyErr"),
        (False, lambda records: records.update(more=ConfigRecord({"labels": [1]})), MORE),
        (True, lambda records: records.update(more=ArrayRecord()), MORE),
        (True, lambda records: records["envelope"].update(content=b"more"), MORE),
        (True, lambda records: records["content"].update(more=records["content"]["content"]), MORE),
        *(
            (False, lambda records, it=it: records["envelope"].update(content=it), "of another typ")
            for it in ("text", 1, [b"bytes"])
        ),
        *(
            (
                False,
                lambda records, it=it: records["envelope"].update({it[0]: it[1]}),
                FEDAPPS + "is no whole number >= 0",
            )
            for it in product(("step", "checkpoint", "attempt"), (-1, 1.0, True, "1"))
        ),
        *(
            (
                True,
                lambda records, it=it: records.update(content=other_array(**it)),
                FEDAPPS + "an array of ",
            )
            for it in (
                *({"shape": shape} for shape in ((7,), (8, 1), (-8,), (2**64,))),
                *({"dtype": dtype} for dtype in ("|O", "uint8")),
                *({"data": bytes(7)}, {"stype": "numpy.ndarray"}),
            )
        ),
    ],
)
def test_records_of_another_app_are_refused(as_array, change, rule):
    records = sent_records(sample(), as_array)
    change(records)
    with pytest.raises(ProtocolError, match=rf"^bank: message.*{rule}"):
        from_records(records, "bank")


@pytest.mark.parametrize(("n_rows", "n_objects"), [(0, 2), (2**16, 2), (2**17, 5)])
def test_a_message_is_few_objects_of_flower_however_many_arrays_it_has(n_rows, n_objects):
    message = sample(offsets=np.zeros(n_rows, dtype=np.int64))
    records = to_records(to_bytes(to_content(message, "bank")), ENVELOPE)
    assert len(get_all_nested_objects(records)) == n_objects


@pytest.mark.parametrize("as_array", [False, True])
def test_a_size_is_that_of_the_content_and_the_envelope_and_a_header_takes_little(as_array):
    content = to_bytes(SENT)
    assert n_bytes(sent_records(sample(), as_array)) == len(content) + 5 * 8 + len(
        ENVELOPE.model_id
    )
    of_arrays = 12 * 8 + 2 * 4 + 2 * 8 + 2 * 4 + 2
    assert of_arrays < len(content) < of_arrays + 300
    assert n_bytes(RecordDict({"c": ConfigRecord({}), "a": ArrayRecord()})) == 0


# Bytes of messages

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
        *((value, NUMBER) for value in (np.nan, 2**63, None, np.int64(1), [1])),
    ],
    ids=repr,
)
def test_a_value_of_another_kind_is_not_sent(value, rule):
    is_array = isinstance(value, np.ndarray)
    content = Content("A", {} if is_array else {"a": value}, {"a": value} if is_array else {})
    with pytest.raises(ProtocolError, match=f"^sender: {rule}"):
        to_bytes(content)
