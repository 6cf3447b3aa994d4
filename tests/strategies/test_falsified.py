"""Fields of messages that are false are refused where they arrive, by the name of the sender."""

from functools import cache

import numpy as np
import pytest

from fedapp.client_app import SiteApp
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.paillier_keys import generate_key
from fedapp.crypto.workers import Workers
from fedapp.errors import FedappError, ProtocolError
from fedapp.messages.cuts import check_sketch
from fedapp.messages.vertical import read_splits
from fedapp.messages.wire import from_records, to_bytes, to_records
from fedapp.trees.forest.cart import NO_RANK
from strategies.federated_forest import OF_CATEGORIES
from strategies.local_boosting import check_report
from tests.moments import WIDTHS, changed, changed_reply, listen
from tests.network import run
from tests.tampering import FALSE, rewrite_letters
from tests.tampering import refuses as run_is_refused


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


def other(text):
    """Names of which the first is another, or stands twice."""
    return lambda names: (text or names[1], *names[1:])


def of_number(widths):
    """The first column of categories told as one of numbers."""
    found = widths.copy()
    found[np.flatnonzero(found > 0)[0]] = 0
    return found


def shorter(array):
    return array[:-1]


def digits(n):
    """A number as a public key is sent."""
    return lambda _: np.frombuffer(n.to_bytes((n.bit_length() + 7) // 8, "big"), np.uint8)


def under_another_key(ciphertexts):
    key = generate_key(256, insecure_small_key=True)
    return encrypt(key, list(range(len(ciphertexts))), Workers(1))


CIPHERTEXTS = [
    ({"ciphertexts": change}, f"ciphertexts .*{rule}") for change, rule in FALSE.values()
]
OTHER_KEY = ({"ciphertexts": under_another_key}, "ciphertexts ((sums|plaintexts) )?must")
KEYS = [
    ({"n": digits(2**255 + 2**254)}, "n must be the product of two large primes"),
    ({"n": digits(2**256 - 189)}, "n must be the product of two large primes"),  # a prime
    ({"n": digits(2**254 + 1)}, "n must be 256 bits, got 255"),
]
OF_LEVEL = "columns must be of this party and this level"
OPEN = "nodes must be open, in order, and of parties of the run"
OF_ROWS = "must be sums that rows of the nodes can have, got others of column"
WIDTHS_FIT = "widths must be of the party's columns and their categories"
WON = "listed must be the party's splits of this level"
OF_NODES = "columns must be of 3 open nodes"
FALSE_FIELDS = {  # by the run of a method and a message: fields that are changed, and the error
    ("pax", "GrowRequest"): [
        ({"split_columns": lambda c: c * 0 + 3}, "split_sets sets must be 0"),
    ],
    ("secureboost", "PublicKey"): [
        *KEYS,
        ({"precision": lambda _: 62}, "precision must be 53, got 62"),
    ],
    ("secureboost", "EncryptedGradients"): [
        *CIPHERTEXTS,
        ({"columns": lambda c: np.repeat(c, 2)}, r"columns must be < \d+ and ascending"),
    ],
    ("secureboost", "EncryptedSums"): [
        *(*CIPHERTEXTS, OTHER_KEY),
        ({"level": lambda level: level + 1}, "level must be the one being split"),
        ({"missing": lambda m: m + np.int32(1)}, f"ciphertexts {OF_ROWS}"),
        (
            {"missing": lambda m: m[:, :-1].copy()},
            r"missing must have size 3 \(n_col",
        ),
    ],
    ("secureboost", "Splits"): [
        ({"columns": lambda c: c + 3}, OF_LEVEL),
        ({"level": lambda level: level + 1}, OF_LEVEL),
        ({"nodes": lambda nodes: nodes + 7}, OPEN),
        ({"owners": lambda owners: owners + 2}, OPEN),
        ({"first_rights": lambda bins: bins + 999}, OF_LEVEL),
        ({"wanted_nodes": lambda nodes: nodes * 0}, OF_LEVEL),
    ],
    ("secureboost", "ColumnBins"): [
        ({"names": lambda _: ("many", "a")}, "names must be 3 or none, got 2"),
        ({"categorical": shorter}, "categorical must be 3, got 2"),
        ({"categorical": lambda c: c * 0}, r"widths must be <= 8 \(max-b"),
    ],
    ("secureboost", "Records"): [
        ({"names": shorter}, "names must be 3, got 2$"),
        (
            dict.fromkeys(("columns", "thresholds", "defaults", "widths"), shorter),
            r"thresholds must be \d+ at least, got \d+$",
        ),
        ({"widths": of_number}, WIDTHS_FIT),
        ({"widths": shorter}, WIDTHS_FIT),
        ({"columns": lambda c: c * 0 + 1}, WIDTHS_FIT),
        ({"category_counts": lambda c: -1 - c * 0}, "categories must be 0"),
    ],
    ("federated-forest", "EncryptedLabels"): [*KEYS, *CIPHERTEXTS],
    ("federated-forest", "ColumnSums"): [
        *(*CIPHERTEXTS, OTHER_KEY),
        ({"level": lambda level: level + 1}, "level must be the one being split"),
        ({"sizes": lambda sizes: sizes + 1}, "sizes must add up to the rows"),
        ({"sizes": shorter}, OF_NODES),
        ({"n_bins": lambda n_bins: n_bins + 2**62}, OF_NODES),
        ({"ranks": lambda ranks: ranks * 0 + NO_RANK}, OF_NODES),
        ({"columns": lambda columns: columns + 2**62}, "columns must be <="),
    ],
    ("federated-forest", "Partition"): [
        ({"bits": shorter}, r"bits must be \d+ bytes, got"),
        ({"level": lambda level: level + 1}, "level must be the one being split"),
    ],
    ("federated-forest", "Won"): [
        ({"listed": np.flip}, "(listed|set_bits)"),
        ({"level": lambda level: level + 1}, WON),
        (dict.fromkeys(("listed", "cuts", "defaults"), shorter), WON),
        ({"cuts": lambda cuts: np.full_like(cuts, 2**63 - 1)}, WON),
        ({"set_bits": np.zeros_like}, "set_bits must leave bins on"),
    ],
    ("federated-forest", "SetupRequest"): [
        ({"criterion": lambda _: "gin"}, "criterion must be one of"),
    ],
    ("fedxgbllr", "ShareRequest"): [
        ({"unit": lambda _: 1e-320}, "unit must be 1e-37 to"),
        ({"base_score": np.ones_like}, "base_score must be between 0 and 1"),
    ],
    ("pax", "SketchRequest"): [
        ({"categories": shorter}, r"categories must be \d+, got \d+"),
        ({"categories": other("")}, "categories must be distinct in a column"),
        ({"category_counts": shorter}, "categories category_counts m"),
    ],
    ("bagging", "LabelsRequest"): [
        ({"categories": lambda n: n[1:]}, r"categories must be \d+, got"),
    ],
    # What the server reads
    ("bagging", "BagReply"): [
        ({"sets": change}, f"(trees|sets) {rule}") for change, rule in FALSE_SETS.values()
    ],
    ("pax", "SketchReply"): [
        ({"maxima": lambda m: m + 11}, "maxima must be codes of the categories"),
        ({"offsets": lambda o: np.append(o[1:], o[-1])}, "offsets must give a"),
        ({"unseen": shorter}, r"unseen must have size 5 .* got 4"),
    ],
    ("federated-forest", "PartitionReply"): [
        ({"widths": of_number}, "widths must be those of the cat"),
        ({"columns": lambda c: c + 3}, "widths must be those of"),
        ({"set_bits": last_bit}, "set_bits sets must contain only cat"),
    ],
}
# The field that the first message of a class must have something in, if not the first one changed.
HAS = {
    "PublicKey": "n",
    "EncryptedSums": "ciphertexts",
    "Splits": "columns",
    "ColumnBins": "widths",
    "ColumnSums": "ciphertexts",
    "Partition": "bits",
    "Won": "listed",
    "ShareRequest": "base_score",
    "SketchReply": "unseen",
    "PartitionReply": "set_bits",
}
FIELDS = [
    pytest.param(
        *named, *falsified, id=f"{named[0]} {named[1]}.{','.join(falsified[0])}: {falsified[1]}"
    )
    for named, fields in FALSE_FIELDS.items()
    for falsified in fields
]


def check_told(message, reply):
    """What the server holds of a reply to the columns and categories of the run."""
    widths = np.array([*WIDTHS.values(), 0, 0])
    if message == "PartitionReply":
        read_splits("a party", reply, 3, OF_CATEGORIES)
    elif message == "BagReply":
        check_report("a party", reply, 1, widths, 3)
    else:
        check_sketch("a party", reply, widths, 2, 1, 8, 5)


@pytest.mark.parametrize(("method", "message", "changes", "rule"), FIELDS)
def test_a_false_field_is_refused_where_it_arrives(heard, tmp_path, method, message, changes, rule):
    moment = heard(method).first(message, HAS.get(message, next(iter(changes))))
    if message.endswith("Reply"):
        with pytest.raises(ProtocolError, match=rf"^a party: {message}\.{rule}"):
            check_told(message, changed_reply(moment.reply, changes))
        check_told(message, moment.reply)
    else:
        refuses(tmp_path, moment, message, changes, rule)


# In a run

BINARY, NUMBERS = "binary:logistic", "reg:squarederror"
RUNS = {
    "secureboost": {},
    "federated-forest": {"align": "ordered", "federated_forest__trees": 2},
    "fedavg-linear": {"fedavg_linear__rounds": 1},
    "fedxgbllr": {"fedxgbllr__trees": 2, "fedxgbllr__rounds": 1, "fedxgbllr__channels": 2},
}


class Rewriting(SiteApp):
    """Sites whose requests of a kind arrive with other fields, or whose replies do.

    Parameters
    ----------
    kind : how the kind of the message ends.
    changes : of fields of the message of a class.
    """

    def __init__(self, kind, name, changes):
        super().__init__()
        self._kind, self._name, self._changes = kind, name, changes

    def __call__(self, message, context):
        is_it = message.metadata.message_type.endswith(self._kind)
        if is_it:
            self._rewrite(message)
        reply = super().__call__(message, context)
        if is_it and not reply.has_error():
            self._rewrite(reply)
        return reply

    def _rewrite(self, message):
        envelope, content = from_records(message.content, "sender")
        data = to_bytes(changed(content, self._name, self._changes))
        message.content = to_records(data, envelope)


def all_are(value):
    """Every number of an array has this value."""
    return lambda array: np.full_like(array, value)


# Of a method and objective: kind and class of a message, its fields' changes, and the error.
VALUES = {
    "a model of other bytes": (
        *("secureboost", BINARY, "_finish", "FinishReply", {"model": all_are(255)}),
        "^party-1: FinishReply.model .*can't decode byte",
    ),
    "means past all columns": (
        *("fedavg-linear", BINARY, "_moments", "MomentsReply", {"means": all_are(1e308)}),
        "^party-1: MomentsReply.means must be within float32",
    ),
    "means past all rows": (
        *("fedavg-linear", NUMBERS, "_average", "AverageRequest"),
        {"means": all_are(1e308), "scales": all_are(1e-300)},
        "^party-1: gradients must be finite",
    ),
    "a head past float32": (
        *("fedxgbllr", NUMBERS, "_average", "AverageRequest", {"weights": all_are(3e38)}),
        "^party-1.*: message.model margins must be finite",
    ),
    "rates past all": (
        *("fedxgbllr", BINARY, "_final", "FinalReply", {"rates": all_are(1e308)}),
        r"^party-1: FinalReply.rates must be within 1e\+100",
    ),
}


@pytest.mark.by_default("secureboost-*", "fedavg-linear-*", "fedxgbllr-a *")
@pytest.mark.parametrize(
    ("strategy", "objective", "kind", "name", "changes", "match"),
    VALUES.values(),
    ids=[f"{row[0]}-{name}" for name, row in VALUES.items()],
)
def test_values_that_nobody_honest_sends_end_the_run_by_a_named_error(
    made, strategy, objective, kind, name, changes, match
):
    settings = made(strategy, objective, 60, parties=2, **RUNS[strategy])
    with pytest.raises(FedappError, match=match):
        run(settings, app=Rewriting(kind, name, changes))


def test_codes_of_labels_past_all_are_refused_by_their_receiver(made, monkeypatch):
    rewrite_letters(monkeypatch, "Labels", "codes", all_are(1e300))
    settings = made("federated-forest", NUMBERS, 60, parties=2, **RUNS["federated-forest"])
    run_is_refused("^party-1.*: Labels.codes must be", settings)
