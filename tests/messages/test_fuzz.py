"""What nobody honest sends ends in an answer or an error of fedapp's, by whatever field it differs.

Requests, letters and replies of runs are changed by their declared forms: values that keep the form
of the field, so that they reach handlers and strategies, and values at its edges.
"""

import traceback
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import fields
from importlib import import_module
from itertools import count
from threading import Lock

import numpy as np
import pytest
from flwr.app import Message

from fedapp.client_app import SiteApp
from fedapp.crypto.sealed import seal
from fedapp.errors import FedappError
from fedapp.home import home
from fedapp.messages.fields import OneOf, Range
from fedapp.messages.methods import modules_of_method
from fedapp.messages.vertical import Parcels
from fedapp.messages.wire import (
    FAILED,
    Content,
    from_bytes,
    from_content,
    from_records,
    parcels_of,
    to_bytes,
    to_content,
    to_records,
    with_parcels,
)
from fedapp.site.answer import answered, find_handler
from fedapp.site.mail import HEAD as HEAD_OF_PARCEL
from fedapp.site.mail import _open, session_secret
from fedapp.site.store import LiveStores, Store, Stores
from strategies.flower import FlowerStrategy
from tests.contract.conftest import settings_of
from tests.contract.methods import METHODS
from tests.moments import text_settings
from tests.network import run

# Fields that set how much work a run is: any value is honest.
WORK = {
    *("epochs", "n_rounds", "trees", "key_bits", "channels", "round_id", "max_depth", "batch_rows")
}


def other_value(rng, form, value):
    """Another value of a field, most of them such as its form allows."""

    def one_of(values):
        return values[rng.integers(len(values))]

    if isinstance(value, np.ndarray):
        return other_array(rng, form, value)
    if isinstance(value, bool):
        return not value
    if isinstance(form, OneOf):
        return one_of(form.values)
    if isinstance(value, int | float):
        low, high = (form.low, form.high) if isinstance(form, Range) else (-(2**31), 2**31)
        return type(value)(one_of([low, high, value - 1, value + 1, 0, 1, min(high, 1000)]))
    if isinstance(value, str):
        return one_of([value[:-1], f"{value}x", "", "../x", "0" * 16])
    texts = list(value)
    return one_of([[], texts[:-1], texts[::-1], texts * 2, [*texts, "new"]])


def other_array(rng, form, value):
    """An array with some values changed, or with other rows."""
    rows = np.arange(len(value))
    choices = [rows, rows, rows, rows[:-1], rows[:0], rows[::-1], np.repeat(rows, 2)]
    changed = np.ascontiguousarray(value[choices[rng.integers(len(choices))]])
    info = np.finfo(form.dtype) if form.dtype.kind == "f" else np.iinfo(form.dtype)
    low = info.min if form.low is None else form.low
    high = info.max if form.high is None else form.high
    edges = [low, high, low + 1, 0, 1, min(high, 7), min(high, 2**31 - 1)]
    for _ in range(rng.integers(4) if changed.size else 0):
        edge = np.clip(edges[rng.integers(len(edges))], info.min, info.max)
        changed.flat[rng.integers(changed.size)] = np.asarray(edge).astype(form.dtype)
    return changed


class Forgetting(Store):
    """A state that no answer changes."""

    def commit(self, *given, **how):
        pass


class Forgetful(Stores):
    """Answers from the states of other stores, which stay as they are."""

    def __init__(self, stores):
        super().__init__()
        self._stores, self.locked = stores, stores.locked

    def open(self, folder, lasting):
        store = self._stores.open(folder, lasting)
        return Forgetting(*(getattr(store, field.name) for field in fields(Store)))

    def ended(self, folder):
        pass


class Damaging(SiteApp):
    """Sites that get damaged messages before each one, and one that counts; all are answered, or
    refused by an error of fedapp's.

    A letter is damaged as its sender may write it: it is sealed again.

    Parameters
    ----------
    rng : draws what is damaged.
    n_each : damaged messages before each one, whose answers nobody gets.
    last : number of the message that is damaged, or its reply, and with which the run goes on.
    """

    def __init__(self, rng, n_each, last):
        super().__init__(stores=LiveStores())
        self._rng, self.n_each, self._last = rng, n_each, last
        self._lock, self._forgetful = Lock(), Forgetful(self.stores)
        self.n_messages, self.damaged = 0, Counter[str]()
        self.foreign = list[str]()  # what was damaged when an exception was raised, and which
        self._about = ""

    def __call__(self, message, context):
        with self._lock:  # else the draws depend on the order of threads
            return self._answered(message, context)

    def _answered(self, message, context):
        envelope, content = from_records(message.content, "server")
        kind, config = message.metadata.message_type, self._config_of(context)
        self.n_messages += 1
        request, _ = find_handler(kind, config.name)
        is_rare = kind.startswith("query.") and self._rng.random() < 0.8
        for _ in range(0 if is_rare else self.n_each):
            if damaged := self._other(config, request, envelope, content):
                with suppress(FedappError), self.watched(kind):
                    answered(config, kind, envelope, damaged, self._forgetful)
        is_last = self.n_messages == self._last
        in_reply = is_last and self._rng.random() < 0.5
        if is_last and not in_reply:
            content = self._other(config, request, envelope, content) or content
        reply = super().__call__(
            Message(to_records(to_bytes(content), envelope), message.metadata.dst_node_id, kind),
            context,
        )
        if reply.has_error() and reply.error.code == FAILED:
            self.foreign.append(f"after {self._about}: {reply.error.reason}")
        if in_reply and not reply.has_error():
            told = from_records(reply.content, config.name)[1]
            if damaged := self.with_other_field(told, kind_of(told, envelope, request)):
                reply = Message(to_records(to_bytes(damaged), envelope), reply_to=message)
        reply.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
        return reply

    @contextmanager
    def watched(self, where):
        """Note an exception that is not fedapp's."""
        try:
            yield
        except FedappError:
            raise
        except Exception:
            self.foreign.append(f"{where}, {self._about}: {traceback.format_exc()}")

    def _other(self, config, request, envelope, content):
        """A message with another field, or a letter that has one or is missing."""
        parcels = parcels_of(content)
        if not parcels or self._rng.random() < 0.2:
            return self.with_other_field(content, request)
        store = self.stores.open(home() / "sites" / config.name / envelope.model_id, False)
        number = int(self._rng.integers(len(parcels)))
        sender, parcel = parcels.pop(number)
        address, whole = _open(config.name, store, envelope, sender, parcel)
        letter = from_bytes(whole, sender)
        if self._rng.random() < 0.9:
            other = self.with_other_field(letter, kind_of(letter, envelope, request))
            if other is None:
                return None
            secret = session_secret(config.name, store, envelope, sender)
            sealed = seal(secret, address, to_bytes(other))
            parcels.insert(number, (sender, parcel[: HEAD_OF_PARCEL.size] + sealed))
        else:
            self._about = f"{letter.name} is missing"
            self.damaged[letter.name] += 1
        return with_parcels(content, parcels)

    def with_other_field(self, content, kind):
        """A message with another value in one of its fields, which is counted; None if it has
        none."""
        names = sorted(kind.forms.keys() - WORK) if kind else []
        if not names:
            return None
        name = names[self._rng.integers(len(names))]
        scalars, arrays = dict(content.scalars), dict(content.arrays)
        values = arrays if name in arrays else scalars
        before = values[name]
        values[name] = other_value(self._rng, kind.forms[name][1], before)
        self._about = f"{kind.__module__}.{content.name}.{name}: {before} -> {values[name]}"
        self.damaged[content.name] += 1
        return Content(content.name, scalars, arrays)


@contextmanager
def reading_damaged(app):
    """Have the strategy read damaged replies before each one, and forget them."""
    honest = FlowerStrategy._read

    def read(strategy, message, party):
        reply, parcels = honest(strategy, message, party)
        for _ in range(app.n_each):
            if other := app.with_other_field(to_content(reply, party), type(reply)):
                with suppress(FedappError), app.watched("at the server"):
                    damaged = from_content(type(reply), other, party)
                    if strategy.pending.check:
                        strategy.pending.check(party, damaged)
        return reply, parcels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlowerStrategy, "_read", read)
        yield


def kind_of(content, envelope, request):
    """The class of a letter or reply that goes with a request."""
    modules = [import_module(request.__module__), *modules_of_method(envelope.method)]
    named = (one for module in modules for one in vars(module).values())
    kinds = (one for one in named if getattr(one, "wire_name", "") == content.name)
    names = {*content.scalars, *content.arrays} - {*Parcels.forms}
    return next(one for one in kinds if names == {*one.forms})


FUZZED = [*METHODS, "describe-rows", "describe-columns"]
SEALED = ("secureboost", "federated-forest, paillier", "eini", "describe-columns")


def settings_for(name, folder, once):
    """Settings of a short run."""
    (place := folder / f"{len(list(folder.iterdir()))}").mkdir(parents=True)
    if name in METHODS:
        return settings_of(METHODS[name], place, once, "binary:logistic", depth=2)
    return text_settings(place, name)


def fuzz(name, folder, once, n_damaged):
    """Damage messages of runs of a method, each with other draws; how many of each class."""
    damaged, last, n_messages = Counter[str](), 10**6, 0
    for seed in count():
        app = Damaging(np.random.default_rng(seed), n_each=2, last=last)
        settings = settings_for(name, folder, once)
        with suppress(FedappError), app.watched(f"run {seed} of {name}"), reading_damaged(app):
            run(settings, app=app)
        assert not app.foreign, "\n".join(app.foreign)
        damaged += app.damaged
        if damaged.total() >= n_damaged:
            return damaged
        n_messages = n_messages or app.n_messages
        last = int(np.random.default_rng(seed).integers(1, n_messages + 1))
    raise AssertionError


@pytest.mark.by_default("pax", *SEALED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FUZZED)
def test_damaged_messages_and_letters_end_in_an_answer_or_a_named_error(
    tmp_path, trained_once, name
):
    n_damaged = 80 if name in ("pax", *SEALED) else 1000
    assert fuzz(name, tmp_path, trained_once, n_damaged).total() >= n_damaged
