"""Sets and dictionaries of categories that a message falsifies are refused where they arrive."""

from functools import cache

import numpy as np
import pytest

from fedapp.errors import ProtocolError
from fedapp.messages.cuts import check_sketch
from fedapp.messages.vertical import read_splits
from strategies.federated_forest import OF_CATEGORIES
from strategies.local_boosting import check_report
from tests.moments import WIDTHS, changed_reply, listen


@pytest.fixture(scope="module")
def heard(tmp_path_factory):
    """``heard(method)``: what the parties of a run received; a run for the first who asks."""
    folder = tmp_path_factory.mktemp("heard")
    return cache(lambda method: listen(folder, method))


def last_bit(bits):
    """Bits with the last one set, which is past the categories of every column here."""
    found = bits.copy()
    found[-1] |= 1
    return found


FALSE_SETS = {
    "a byte fewer": (lambda bits: bits[:-1], r"sets must be \d+ bytes, got \d+"),
    "a byte more": (lambda bits: np.append(bits, bits[-1:]), r"sets must be \d+ bytes, got \d+"),
    "no sets": (lambda bits: bits[:0], r"sets must be \d+ bytes, got 0"),
    "a bit past all": (last_bit, "sets must contain only categories of the column"),
}
TOLD_SETS = [  # method, message, field, and the field that an error names
    ("pax", "GrowRequest", "split_sets", "split_sets"),
    ("bagging", "BagRequest", "sets", "trees"),
    ("secureboost", "Splits", "set_bits", "set_bits"),
    ("secureboost", "Records", "set_bits", "set_bits"),
    ("federated-forest", "Won", "set_bits", "set_bits"),
]


def refuses(folder, moment, message, changes, rule):
    """Hold that a party answers a falsified message with this error, and the true one without."""
    with pytest.raises(ProtocolError, match=rf"^party-[12]: {message}\.{rule}"):
        moment.answer(folder, message, changes)
    moment.answer(folder, message, {})


@pytest.mark.parametrize(("change", "rule"), FALSE_SETS.values(), ids=FALSE_SETS)
@pytest.mark.parametrize(
    ("method", "message", "field", "named"), TOLD_SETS, ids=[".".join(o[1:3]) for o in TOLD_SETS]
)
def test_sets_that_are_none_of_their_columns_are_refused_by_a_party(
    heard, tmp_path, method, message, field, named, change, rule
):
    moment = heard(method).first(message, field)
    refuses(tmp_path, moment, message, {field: change}, f"{named} {rule}")


@pytest.mark.parametrize(("change", "rule"), FALSE_SETS.values(), ids=FALSE_SETS)
def test_sets_that_are_none_of_their_columns_are_refused_by_the_server(heard, change, rule):
    reply = heard("bagging").first("BagReply", "sets").reply
    widths = np.array([*WIDTHS.values(), 0, 0])
    with pytest.raises(ProtocolError, match=rf"^a party: BagReply\.(trees|sets) {rule}"):
        check_report("a party", changed_reply(reply, {"sets": change}), 1, widths, 3)
    check_report("a party", reply, 1, widths, 3)


def other(text):
    """Names of which the first is another, or stands twice."""
    return lambda names: (text or names[1], *names[1:])


def of_number(widths):
    """The first column of categories told as one of numbers."""
    found = widths.copy()
    found[np.flatnonzero(found > 0)[0]] = 0
    return found


def every_bin(bits):
    """All bins of columns of 11."""
    return np.resize(np.array([0xFF, 0xE0], dtype=np.uint8), len(bits))


def next_column(columns):
    """The passive party's own columns, each the next one."""
    return np.where(columns < 0, columns, (columns + 1) % 3)


FITS = "must be of the party's columns and their categories"
FALSE_FIELDS = [
    ("pax", "GrowRequest", {"split_columns": lambda c: c * 0 + 3}, "split_sets sets must be 0"),
    ("pax", "GrowRequest", {"split_columns": lambda c: c * 0 + 9}, "split_columns must be < 5"),
    ("secureboost", "Splits", {"set_bits": np.copy, "columns": next_column}, "set_bits sets must"),
    ("secureboost", "Splits", {"columns": lambda c: c + 3}, "columns must be of this party"),
    (
        "secureboost",
        "ColumnBins",
        {"categorical": lambda c: c[:-1]},
        "categorical must be 3, got 2",
    ),
    ("secureboost", "ColumnBins", {"categorical": lambda c: c * 0}, r"widths must be <= 8 \(max-b"),
    ("secureboost", "Records", {"widths": of_number}, f"widths {FITS}"),
    ("secureboost", "Records", {"widths": lambda w: w[:-1]}, f"widths {FITS}"),
    ("secureboost", "Records", {"columns": lambda c: c * 0 + 1}, f"widths {FITS}"),
    ("secureboost", "Records", {"category_counts": lambda c: -1 - c * 0}, "categories must be 0"),
    ("secureboost", "Records", {"category_counts": lambda c: c[:-1]}, "categories category_counts"),
    (
        "secureboost",
        "Records",
        {"categories": lambda n: n[:-1]},
        r"categories must be \d+, got \d+",
    ),
    ("secureboost", "Records", {"categories": other("")}, "categories must be distinct"),
    (
        "secureboost",
        "Records",
        {"category_counts": lambda c: c + (c == 11), "categories": lambda n: (*n, "new")},
        f"widths {FITS}",
    ),
    ("federated-forest", "Won", {"listed": np.flip}, "(listed|set_bits)"),
    ("federated-forest", "Won", {"set_bits": np.zeros_like}, "set_bits must leave bins on"),
    ("federated-forest", "Won", {"set_bits": every_bin}, "set_bits must leave bins on"),
    ("pax", "SketchRequest", {"categories": lambda n: n[:-1]}, r"categories must be \d+, got \d+"),
    ("pax", "SketchRequest", {"categories": other("")}, "categories must be distinct in a column"),
    ("pax", "SketchRequest", {"category_counts": lambda c: c[:-1]}, "categories category_counts m"),
    ("bagging", "LabelsRequest", {"categories": lambda n: n[1:]}, r"categories must be \d+, got"),
]


@pytest.mark.parametrize(
    ("method", "message", "changes", "rule"),
    FALSE_FIELDS,
    ids=[f"{one[1]}.{','.join(one[2])}: {one[3]}" for one in FALSE_FIELDS],
)
def test_what_does_not_fit_its_sets_or_names_is_refused_by_a_party(
    heard, tmp_path, method, message, changes, rule
):
    moment = heard(method).first(message, next(iter(changes)))
    refuses(tmp_path, moment, message, changes, rule)


TOLD_SERVER = [
    ("pax", "SketchReply", {"maxima": lambda m: m + 11}, "maxima must be codes of the categories"),
    ("pax", "SketchReply", {"maxima": lambda m: m + 0.5}, "maxima must be codes of the categories"),
    ("pax", "SketchReply", {"offsets": lambda o: np.append(o[1:], o[-1])}, "offsets must give a"),
    ("pax", "SketchReply", {"unseen": lambda u: u[:-1]}, r"unseen must have size 5 .* got 4"),
    (
        "federated-forest",
        "PartitionReply",
        {"widths": of_number},
        "widths must be those of the cat",
    ),
    ("federated-forest", "PartitionReply", {"columns": lambda c: c + 3}, "widths must be those of"),
    (
        "federated-forest",
        "PartitionReply",
        {"set_bits": last_bit},
        "set_bits sets must contain only cat",
    ),
    ("federated-forest", "PartitionReply", {"set_bits": lambda b: b[1:]}, "set_bits sets must be"),
    (
        "federated-forest",
        "PartitionReply",
        {"categories": other("")},
        "categories must be distinct",
    ),
    (
        "federated-forest",
        "PartitionReply",
        {"categories": lambda n: n[1:]},
        "categories must be 11",
    ),
]


def check_told(message, reply):
    """What the server holds of a reply to the columns and categories of the run."""
    if message == "PartitionReply":
        read_splits("a party", reply, 3, OF_CATEGORIES)
    else:
        check_sketch("a party", reply, np.array([*WIDTHS.values(), 0, 0]), 2, 1, 8, 5)


@pytest.mark.parametrize(
    ("method", "message", "changes", "rule"),
    TOLD_SERVER,
    ids=[f"{one[1]}.{','.join(one[2])}: {one[3]}" for one in TOLD_SERVER],
)
def test_what_does_not_fit_its_sets_or_names_is_refused_by_the_server(
    heard, method, message, changes, rule
):
    has = "set_bits" if message == "PartitionReply" else "unseen"
    reply = heard(method).first(message, has).reply
    with pytest.raises(ProtocolError, match=rf"^a party: {message}\.{rule}"):
        check_told(message, changed_reply(reply, changes))
    check_told(message, reply)
