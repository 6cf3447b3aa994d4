"""Messages of a run, kept with what their receiver knew: each can be changed and answered again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fedapp.messages.fields import Reply, Request
from fedapp.messages.wire import Content, from_content, to_content
from fedapp.records.journal import Stored
from fedapp.settings import load_settings
from fedapp.site import answer
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.site.sums import Sums
from tests.network import run
from tests.tables import write_rows


@dataclass(frozen=True)
class Moment:
    """A request that came to a party, with the letters beside it.

    Parameters
    ----------
    facts, records, arrays : of the party's store before the request.
    letters : sender and content of each.
    reply : what was answered.
    sent : letters to other parties.
    """

    handler: Handler
    config: SiteConfig
    role: str
    last: str
    values: Mapping[str, Stored]
    request: Request
    letters: tuple[tuple[str, Content], ...]
    reply: Reply
    sent: Letters

    def answer(self, folder, message, changes):
        """What the party answers where fields of the request, or of letters of a class, differ."""
        store = Store(folder, role=self.role, last=self.last, _values=dict(self.values))
        site = Site(self.config, store)
        kind, carries = type(self.request), self.request.carries_letters
        content = to_content(self.request, self.config.name)
        told = [content, *(letter for _, letter in self.letters)]
        assert message in {one.name for one in told}
        request = from_content(kind, changed(content, message, changes), self.config.name)
        letters = [(sender, changed(one, message, changes)) for sender, one in self.letters]
        return self.handler(site, request, *([Mail(self.config.name, letters)] if carries else []))


def changed(content, message, changes):
    """A message of a class with other fields, any other message as it is."""
    if content.name != message:
        return content
    arrays, scalars = dict(content.arrays), dict(content.scalars)
    for name, change in changes.items():
        fields = arrays if name in arrays else scalars
        fields[name] = change(fields[name])
    return Content(content.name, scalars, arrays)


def changed_reply(reply, changes):
    """A reply with other fields, as the server reads it."""
    kind = type(reply)
    content = changed(to_content(reply, "a party"), kind.__name__, changes)
    return from_content(kind, content, "a party")


class Listener:
    """Keeps moments of a run.

    Parameters
    ----------
    patch : puts the listener between the sites and their handlers.
    """

    def __init__(self, patch):
        self.moments = []
        self.model = ""  # as the server writes it
        honest = answer.find_handler

        def find_handler(kind, party):
            request, handler = honest(kind, party)
            return request, self._listening(handler)

        patch.setattr(answer, "find_handler", find_handler)

    def _listening(self, handler):
        def heard(site, request, *mails):
            store = site.store
            state = store.role, store.last, dict(store._values)
            letters = tuple(pair for mail in mails for pair in mail._letters)
            found = handler(site, request, *mails)
            left = found.reply(*found.arrays) if isinstance(found, Sums) else found
            reply, sent = left if isinstance(left, tuple) else (left, [])
            given = site.config, *state, request, letters, reply, sent
            self.moments.append(Moment(handler, *given))
            return found

        return heard

    def first(self, message, has):
        """Of a class of requests, letters or replies, the first that has something in a field."""
        for moment in self.moments:
            request = to_content(moment.request, "listener")
            reply = to_content(moment.reply, "listener")
            for content in (request, reply, *(letter for _, letter in moment.letters)):
                if content.name == message and len({**content.scalars, **content.arrays}[has]):
                    return replace(moment)
        raise AssertionError(f"no {message} has {has}")


WIDTHS = {"few": 3, "some": 5, "many": 11}  # categories of the columns of text
RUNS = {
    "pax": {},
    "bagging": {},
    "cyclic": {},
    "fedavg-linear": {"fedavg-linear.rounds": 2},
    "fedxgbllr": {"fedxgbllr.rounds": 2, "fedxgbllr.trees": 3, "fedxgbllr.channels": 4},
    "describe-rows": {},
    "describe-columns": {
        "describe-columns.key-bits": 256,
        "describe-columns.insecure-small-key": True,
    },
    "secureboost": {"secureboost.key-bits": 256, "secureboost.insecure-small-key": True},
    "federated-forest": {
        "federated-forest.labels": "paillier",
        "federated-forest.key-bits": 256,
        "federated-forest.insecure-small-key": True,
        "federated-forest.trees": 3,
        "federated-forest.max-depth": 3,
        "federated-forest.max-features": "all",
        "federated-forest.master-keeps-model": True,
    },
}


def text_columns(n_rows=160):
    """Numbers a and b, text, some of it with missing values, and a label that follows them all."""
    rng = np.random.default_rng(6)
    a, b = rng.integers(0, 9, (2, n_rows))
    codes = {name: rng.integers(0, width, n_rows) for name, width in WIDTHS.items()}
    signal = a % 3 + 3 * np.isin(codes["many"], [1, 4, 8, 9]) + 2 * (codes["few"] == 1)
    signal = signal + np.isin(codes["some"], [0, 3]) + rng.normal(size=n_rows)
    text = {name: np.char.add(name, known.astype(str)) for name, known in codes.items()}
    for name in ("few", "some"):
        text[name] = np.where(rng.random(n_rows) < 0.1, "", text[name])
    return {**text, "a": a, "b": b, "y": (signal > np.median(signal)).astype(int)}


def text_settings(folder, method):
    """A short run of two parties on ``text_columns``."""
    given = {"data": str(write_rows(folder / "text.csv", text_columns())), "label": "y"}
    given |= {"strategy": method, "parties": 2, "run-dir": str(folder / method)}
    given |= {"num-boost-round": 2, "max-depth": 3, "max-bin": 8, "allow-export": True}
    # The passive party has many, a and b.
    given |= {"columns": "sizes:2,3", "align": "ordered", "drop-columns": ""}
    return load_settings({**given, "objective": "binary:logistic", **RUNS[method]})


def listen(folder, method):
    """What the parties of a run of a method received."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        listener = Listener(patch)
        trained = run(text_settings(folder, method))
    if (path := trained.path / "model.json").exists():
        listener.model = path.read_text()
    return listener
