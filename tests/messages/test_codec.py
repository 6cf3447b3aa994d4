"""Messages survive Flower's own serialisation, and a message that breaks its form is refused."""

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
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedapp.errors import ProtocolError
from fedapp.messages import wire
from fedapp.messages.fields import Array, Form, Range, Reply, Request, message, request
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
    maxima: Annotated[Array, Form("float32", "n_columns", low=-9, high=9, nan=True)]
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
    gaps = st.floats(-9, 9, width=32) | st.just(np.nan)
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


@pytest.mark.parametrize(("wire", "as_array"), [(through_objects, False), (through_proto, True)])
@examples(max_examples=40, deadline=None)
@given(sent=samples())
def test_a_message_survives_the_wire(wire, as_array, sent):
    records = sent_records(sent, as_array)
    envelope, content = from_records(wire(records), "bank")
    assert envelope == ENVELOPE
    assert_same(from_content(Sample, content, "bank"), sent)
    assert n_bytes(wire(records)) == n_bytes(records)


def test_an_array_in_another_memory_order_arrives_in_c_order():
    sums = np.asfortranarray(np.arange(12, dtype=np.float64).reshape(2, 3, 2))
    records = to_records(to_content(sample(sums=sums), "bank"), ENVELOPE)
    found = from_content(Sample, from_records(records, "bank")[1], "bank")
    assert found.sums.tolist() == sums.tolist()


# What ``test_declared`` does not change in every message.
CONTROLS = "must have no control characters .*"
BROKEN = {
    "byte order": ({"sums": np.zeros((2, 3, 2), ">f8")}, "sums must be float64, got >f8"),
    "object dtype": ({"sums": np.zeros((2, 3, 2), object)}, "sums must be float64, got object"),
    "list for array": ({"counts": [0, 1]}, "counts must be int32, got list"),
    "fixed size": ({"sums": np.zeros((2, 3, 3))}, "sums must have size 2 in dimension 3, got 3"),
    **{
        f"named size {size}": (
            {"counts": np.zeros(size, np.int32)},
            f"counts must have size 2 \\(n_nodes\\) in dimension 1, got {size}",
        )
        for size in (0, 3)
    },
    "NaN": ({"sums": np.full((2, 3, 2), np.nan)}, "sums must be finite"),
    "inf beside NaN": ({"maxima": np.array([np.nan, -np.inf], "f4")}, "maxima must be finite"),
    "low beside NaN": (
        {"maxima": np.array([np.nan, -10], "f4")},
        "maxima must be >= -9, got -10.0",
    ),
    "high beside NaN": ({"maxima": np.array([np.nan, 10], "f4")}, "maxima must be <= 9, got 10.0"),
    "bool for int": ({"level": True}, "level must be int, got bool"),
    "float for int": ({"level": 1.0}, "level must be int, got float"),
    "int for float": ({"share": 1}, "share must be float, got int"),
    "int for bool": ({"last": 1}, "last must be bool, got int"),
    "bytes for text": ({"name": b"bank"}, "name must be str, got bytes"),
    "infinite without range": ({"mean": float("-inf")}, "mean must be finite, got -inf"),
    "numbers": ({"classes": (1, 2)}, "classes must be a list of texts, got another element in it"),
    "text for list": ({"classes": "ab"}, "classes must be a list of texts, got str"),
    "backwards": ({"classes": ("a", "\u202eb")}, f"classes {CONTROLS}"),
    "half a character": ({"classes": ("\ud800",)}, f"classes {CONTROLS}"),
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
        (True, lambda records: records.update(more=ConfigRecord({"labels": [1]})), MORE),
        (False, lambda records: records.update(more=ArrayRecord()), MORE),
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
                *({"shape": shape} for shape in ((7,), (9,), (8, 1), (), (-8,), (2**64,))),
                *({"dtype": dtype} for dtype in ("|O", "<f8", "uint8")),
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
    records = to_records(to_content(message, "bank"), ENVELOPE)
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
