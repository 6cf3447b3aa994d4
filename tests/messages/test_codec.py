"""Messages survive Flower's own serialisation, and a message that breaks its form is refused."""

from dataclasses import fields
from typing import Annotated

import numpy as np
import pytest
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedapp.errors import ProtocolError
from fedapp.messages import wire
from fedapp.messages.fields import Array, Form, Range, Reply, Request, message, request
from fedapp.messages.handshake import HelloReply
from fedapp.messages.wire import (
    RAW,
    Content,
    Envelope,
    from_content,
    from_records,
    n_bytes,
    to_bytes,
    to_content,
    to_records,
)

LETTERS = st.one_of(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cf", "Zl", "Zp")),
    st.sampled_from("\t\n"),
)
ENVELOPE = Envelope("0123456789abcdef", step=3, checkpoint=2, attempt=1)


@message
class Sample(Reply):
    """One field of every kind."""

    sums: Annotated[Array, Form("float64", "n_nodes", "n_bins", 2)]
    counts: Annotated[Array, Form("int32", "n_nodes", low=0, high=100)]
    offsets: Annotated[Array, Form("int64", "n_offsets")]
    maxima: Annotated[Array, Form("float32", "n_columns", nan=True)]
    bits: Annotated[Array, Form("uint8", "n_bytes")]
    level: Annotated[int, Range(0, 64)]
    share: Annotated[float, Range(0, 1)]
    mean: float
    last: bool
    name: Annotated[str, Range(1, 8)]
    classes: Annotated[tuple[str, ...], Range(0, 3)]


@request("train.other")
class OtherRequest(Request):
    """A message without an array."""

    level: int


@message
class GapsReply(Reply):
    """An array that has a range and may have gaps."""

    values: Annotated[Array, Form("float32", "n_rows", low=0, high=1, nan=True)]


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


@st.composite
def samples(draw):
    """Messages that keep every rule, empty arrays among them."""
    size = st.integers(0, 4)
    n_nodes, n_bins = draw(size), draw(size)
    finite = st.floats(allow_nan=False, allow_infinity=False)
    gaps = st.floats(width=32, allow_nan=True, allow_infinity=False)
    return Sample(
        sums=draw(arrays(np.float64, (n_nodes, n_bins, 2), elements=finite)),
        counts=draw(arrays(np.int32, n_nodes, elements=st.integers(0, 100))),
        offsets=draw(arrays(np.int64, size)),
        maxima=draw(arrays(np.float32, size, elements=gaps)),
        bits=draw(arrays(np.uint8, size)),
        level=draw(st.integers(0, 64)),
        share=draw(st.floats(0, 1)),
        mean=draw(finite),
        last=draw(st.booleans()),
        name=draw(st.text(LETTERS, min_size=1, max_size=8)),
        classes=tuple(draw(st.lists(st.text(LETTERS), max_size=3))),
    )


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
        return to_records(to_content(message, "bank"), ENVELOPE)


@pytest.mark.by_default("through_objects-False", "through_proto-True")
@pytest.mark.parametrize("as_array", [False, True])
@pytest.mark.parametrize("wire", [through_objects, through_proto])
@examples(max_examples=40, deadline=None)
@given(sent=samples())
def test_a_message_survives_the_wire(wire, as_array, sent):
    records = sent_records(sent, as_array)
    envelope, content = from_records(wire(records), "bank")
    assert envelope == ENVELOPE
    assert_same(from_content(Sample, content, "bank"), sent)


@pytest.mark.parametrize("wire", [through_objects, through_proto])
def test_a_message_without_arrays_survives_the_wire(wire):
    sent = HelloReply(
        name="bank",
        n_train=2**40,
        n_valid=0,
        n_test=0,
        columns=("größe", "b"),
        classes=(),
        notes=("feature column 'b' is empty",),
        positive_label="",
        base_margin="m",
        label_low=-0.0,
        label_high=5e-324,
        simulated=False,
        fingerprint="0" * 32,
        versions=("fedapp 0.2.0",),
        category_counts=np.array([3, -1], np.int32),
        categories=("a", "b", "ç"),
        untrained=("a",),
        digests=("",),
    )
    records = wire(to_records(to_content(sent, "bank"), ENVELOPE))
    assert_same(from_content(HelloReply, from_records(records, "bank")[1], "bank"), sent)


def test_an_array_in_another_memory_order_arrives_in_c_order():
    sums = np.asfortranarray(np.arange(12, dtype=np.float64).reshape(2, 3, 2))
    records = to_records(to_content(sample(sums=sums), "bank"), ENVELOPE)
    found = from_content(Sample, from_records(records, "bank")[1], "bank")
    assert found.sums.tolist() == sums.tolist()


BROKEN = {
    "dtype": ({"sums": np.zeros((2, 3, 2), np.float32)}, "sums must be float64, got float32"),
    "byte order": ({"sums": np.zeros((2, 3, 2), ">f8")}, "sums must be float64, got >f8"),
    "object dtype": ({"sums": np.zeros((2, 3, 2), object)}, "sums must be float64, got object"),
    "no array": ({"counts": [0, 1]}, "counts must be int32, got list"),
    "ndim": ({"sums": np.zeros((2, 3))}, "sums must have 3 dimensions, got 2"),
    "fixed size": ({"sums": np.zeros((2, 3, 3))}, "sums must have size 2 in dimension 3, got 3"),
    "named size": (
        {"counts": np.zeros(3, np.int32)},
        "counts must have size 2 \\(n_nodes\\) in dimension 1, got 3",
    ),
    "named size of an empty array": (
        {"counts": np.zeros(0, np.int32)},
        "counts must have size 2 \\(n_nodes\\) in dimension 1, got 0",
    ),
    "NaN": ({"sums": np.full((2, 3, 2), np.nan)}, "sums must be finite"),
    "inf": ({"sums": np.full((2, 3, 2), np.inf)}, "sums must be finite"),
    "inf beside NaN": (
        {"maxima": np.array([np.nan, -np.inf], np.float32)},
        "maxima must be finite",
    ),
    "low": ({"counts": np.array([5, -1], np.int32)}, "counts must be >= 0, got -1"),
    "high": ({"counts": np.array([101, 5], np.int32)}, "counts must be <= 100, got 101"),
    "low number": ({"level": -1}, "level must be 0 to 64, got -1"),
    "high number": ({"level": 65}, "level must be 0 to 64, got 65"),
    "bool for int": ({"level": True}, "level must be int, got bool"),
    "float for int": ({"level": 1.0}, "level must be int, got float"),
    "int for float": ({"share": 1}, "share must be float, got int"),
    "int for bool": ({"last": 1}, "last must be bool, got int"),
    "bytes for text": ({"name": b"bank"}, "name must be str, got bytes"),
    "NaN number": ({"share": float("nan")}, "share must be finite, got nan"),
    "infinite number without range": ({"mean": float("-inf")}, "mean must be finite, got -inf"),
    "text too long": ({"name": "x" * 9}, "name length must be 1 to 8, got 9"),
    "empty text": ({"name": ""}, "name length must be 1 to 8, got 0"),
    "list too long": ({"classes": ("a", "b", "c", "d")}, "classes length must be 0 to 3, got 4"),
    "list of numbers": (
        {"classes": (1, 2)},
        "classes must be a list of texts, got another element in it",
    ),
    "terminal's words": ({"name": "\x1b[2J"}, "name must have no control characters but tab .*"),
    "backwards": ({"classes": ("a", "\u202eb")}, "classes must have no control characters .*"),
    "half a character": ({"classes": ("\ud800",)}, "classes must have no control characters .*"),
    "long text in a list": (
        {"classes": ("a", "x" * 1001)},
        "classes must be of at most 1000 letters, got 1001",
    ),
    "text for list": ({"classes": "ab"}, "classes must be a list of texts, got str"),
}


@pytest.mark.parametrize(("changes", "rule"), BROKEN.values(), ids=BROKEN)
def test_a_message_that_breaks_its_form_is_refused_on_arrival(changes, rule):
    sent = to_content(sample(), "bank")
    content = Content(
        "Sample",
        {key: changes.get(key, value) for key, value in sent.scalars.items()},
        {key: changes.get(key, value) for key, value in sent.arrays.items()},
    )
    with pytest.raises(ProtocolError, match=f"^bank: Sample.{rule}$"):
        from_content(Sample, content, "bank")


def test_a_message_that_breaks_its_form_does_not_leave_and_is_named():
    with pytest.raises(ProtocolError, match="level") as caught:
        to_content(sample(level=-1), "bank")
    error = caught.value
    assert (error.party, error.message, error.field) == ("bank", "Sample", "level")


@pytest.mark.parametrize(
    ("value", "rule"), [(-1, "values must be >= 0.* got -1"), (2, "values must be <= 1.* got 2")]
)
def test_a_range_holds_beside_missing_values(value, rule):
    with pytest.raises(ProtocolError, match=f"^bank: GapsReply.{rule}"):
        to_content(GapsReply(np.array([np.nan, value], dtype=np.float32)), "bank")


def test_a_missing_field_is_named():
    sent = to_content(sample(), "bank")
    scalars = {key: value for key, value in sent.scalars.items() if key != "level"}
    with pytest.raises(ProtocolError, match=r"^bank: Sample.level must be present$"):
        from_content(Sample, Content("Sample", scalars, sent.arrays), "bank")


def test_a_field_too_many_is_named():
    sent = to_content(sample(), "bank")
    content = Content("Sample", {**sent.scalars, "labels": [1, 0]}, sent.arrays)
    with pytest.raises(ProtocolError, match=r"^bank: Sample.labels must be absent$"):
        from_content(Sample, content, "bank")


def test_another_class_is_refused():
    content = to_content(OtherRequest(level=1), "bank")
    with pytest.raises(
        ProtocolError, match=r"^bank: Sample.class must be this one, got OtherRequest$"
    ):
        from_content(Sample, content, "bank")


def test_another_wire_format_is_refused():
    records = to_records(to_content(sample(), "bank"), ENVELOPE)
    records.config_records["envelope"]["format"] = 1
    del records.config_records["envelope"]["content"]  # of which another format may know nothing
    with pytest.raises(
        ProtocolError, match=r"^bank: message.format must be 3, got 1; update fedapp"
    ):
        from_records(records, "bank")


MORE = "more records or arrays"


@pytest.mark.parametrize(
    ("as_array", "change", "rule"),
    [
        (True, lambda records: records.pop("envelope"), "KeyErr"),
        (True, lambda records: records.pop("content"), "KeyErr"),
        (False, lambda records: records.update(more=ConfigRecord({"labels": [1]})), MORE),
        (True, lambda records: records.update(more=ConfigRecord({"labels": [1]})), MORE),
        (False, lambda records: records.update(more=ArrayRecord()), MORE),
        (True, lambda records: records.update(more=ArrayRecord()), MORE),
        (True, lambda records: records["envelope"].update(content=b"more"), MORE),
        (True, lambda records: records["content"].update(more=records["content"]["content"]), MORE),
        *(
            (False, lambda records, it=it: records["envelope"].update(content=it), "of another typ")
            for it in ("text", 1, [b"bytes"])
        ),
    ],
)
def test_records_of_another_app_are_refused(as_array, change, rule):
    records = sent_records(sample(), as_array)
    change(records)
    with pytest.raises(ProtocolError, match=rf"^bank: message.records must be fedapp's, .*{rule}"):
        from_records(records, "bank")


@pytest.mark.parametrize("key", ["step", "checkpoint", "attempt"])
@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_an_envelope_has_whole_numbers(key, value):
    records = to_records(to_content(sample(), "bank"), ENVELOPE)
    records.config_records["envelope"][key] = value
    with pytest.raises(ProtocolError, match=r"^bank: message.records .* is no whole number >= 0"):
        from_records(records, "bank")


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (7,)},
        {"shape": (9,)},
        {"shape": (8, 1)},
        {"shape": ()},
        {"shape": (-8,)},
        {"shape": (2**64,)},
        {"data": bytes(7)},
        {"dtype": "|O"},
        {"dtype": "<f8"},
        {"dtype": "uint8"},
        {"stype": "numpy.ndarray"},
    ],
    ids=str,
)
def test_the_one_array_is_raw_bytes(changes):
    array = {"dtype": "|u1", "shape": (8,), "stype": RAW, "data": bytes(8), **changes}
    records = sent_records(OtherRequest(level=1), as_array=True)
    records["content"] = ArrayRecord({"content": FlowerArray(**array)})
    with pytest.raises(
        ProtocolError, match=r"^bank: message.records must be fedapp's, got .*an array of "
    ):
        from_records(records, "bank")


@pytest.mark.parametrize(("n_rows", "n_objects"), [(0, 2), (2**16, 2), (2**17, 5)])
def test_a_message_is_few_objects_of_flower_however_many_arrays_it_has(n_rows, n_objects):
    message = sample(offsets=np.zeros(n_rows, dtype=np.int64))
    records = to_records(to_content(message, "bank"), ENVELOPE)
    assert len(get_all_nested_objects(records)) == n_objects


def test_arrays_that_arrived_are_views_of_the_bytes_that_came():
    records = through_objects(to_records(to_content(sample(), "bank"), ENVELOPE))
    data = records.config_records["envelope"]["content"]
    assert isinstance(data, bytes)
    wire._read_shared.cache_clear()  # an equal message that came before would serve
    found = from_content(Sample, from_records(records, "bank")[1], "bank")
    for array in (found.sums, found.counts, found.offsets, found.maxima, found.bits):
        assert np.shares_memory(array, np.frombuffer(data, dtype=np.uint8))


@pytest.mark.parametrize("as_array", [False, True])
def test_a_size_is_that_of_the_content_and_the_envelope(as_array):
    records = sent_records(sample(), as_array)
    content = to_bytes(to_content(sample(), "bank"))
    assert n_bytes(records) == len(content) + 5 * 8 + len("0123456789abcdef")


def test_the_header_of_a_message_takes_little():
    arrays = 12 * 8 + 2 * 4 + 2 * 8 + 2 * 4 + 2
    assert arrays < len(to_bytes(to_content(sample(), "bank"))) < arrays + 300


def test_a_size_is_the_same_after_the_wire():
    records = to_records(to_content(sample(), "bank"), ENVELOPE)
    assert n_bytes(through_objects(records)) == n_bytes(records)


def test_an_empty_record_has_no_bytes():
    assert n_bytes(RecordDict({"c": ConfigRecord({}), "a": ArrayRecord()})) == 0
