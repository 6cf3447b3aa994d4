"""What crosses the wire in a run, message by message, and what a run leaves behind."""

from dataclasses import fields, is_dataclass, replace

import numpy as np

from fedapp.client_app import SiteApp
from fedapp.home import home
from fedapp.messages.fields import Reply, Request
from fedapp.messages.vertical import Parcels
from fedapp.messages.wire import CONTENT, ENVELOPE, from_records
from fedapp.runs.local import LocalGrid, simulated_contexts
from fedapp.site.mail import Session, session_secret
from fedapp.site.store import Store
from strategies.run import train
from tests.federated import summary_of

# How a run of vertical parties opens, without and with psi.
ORDERED = {
    *("query.greet", "query.vertical_hello"),
    *(f"query.alignment_{step}" for step in ("open", "match", "order")),
}
ALIGNED = {*ORDERED, "query.alignment_mask"}
HEAD = {"format", "model-id", "step", "checkpoint", "attempt", "gap", "method"}


class Listener(SiteApp):
    """Sites of which every message is kept, going in and coming out, and every private key of a run
    while it is on the sites' disks.

    Parameters
    ----------
    sites : the app that answers; may have faults.
    """

    def __init__(self, sites=None):
        super().__init__()
        self.heard = []
        self.sessions = {}
        self._sites = sites or SiteApp()

    def __call__(self, message, context):
        reply = self._sites(message, context)
        self.heard.append((message.metadata.message_type, message, reply))
        if message.metadata.message_type.endswith("vertical_hello") and not reply.has_error():
            envelope, hello = from_records(reply.content, "sender")
            name = str(hello.scalars["name"])
            store = Store.open(home() / "sites" / name / envelope.model_id)
            self.sessions[name] = store.get(Session).private_key
        return reply

    def store(self, name):
        """What a site kept of the last run, with its private key of the run."""
        envelope, _ = from_records(self.heard[-1][1].content, "server")
        store = Store.open(home() / "sites" / name / envelope.model_id)
        store.put(replace(store.get(Session), private_key=self.sessions[name]))
        return store

    def secret(self, receiver, sender):
        """What two parties shared in the last run."""
        envelope, _ = from_records(self.heard[-1][1].content, "server")
        return session_secret(receiver, self.store(receiver), envelope, sender)

    def of_kind(self, name):
        """Requests and replies whose message type ends like this; errors are excluded."""
        return [
            (request, reply)
            for kind, request, reply in self.heard
            if kind.endswith(name) and not reply.has_error()
        ]


def listen(run, contexts=None):
    app = Listener()
    grid = LocalGrid(contexts or simulated_contexts(run), app)
    try:
        return train(grid, run), app
    finally:
        grid.close()


def arrays_of(message):
    return dict(from_records(message.content, "sender")[1].arrays)


def scalars_of(message):
    return dict(from_records(message.content, "sender")[1].scalars)


def masked_in(app):
    """What replies hold under masks."""
    told = [arrays_of(reply) for _, _, reply in app.heard]
    return [one["masked"] for one in told if "masked" in one]


def check_declared(app, kinds):
    """Messages of all these kinds were sent, with the fields of their classes and nothing else."""
    requests = {one.kind: one for one in declared(Request) if hasattr(one, "kind")}
    replies = list(declared(Reply))
    assert {kind for kind, _, _ in app.heard} == kinds
    for kind, *pair in app.heard:
        contents = [from_records(message.content, "sender")[1] for message in pair]
        named = [one for one in replies if one.wire_name == contents[1].name]
        own = [one for one in named if one.__module__ == requests[kind].__module__]
        for message, content, classes in zip(
            pair, contents, ([requests[kind]], own or named), strict=True
        ):
            in_envelope = CONTENT in message.content.config_records[ENVELOPE]
            assert set(message.content) == ({ENVELOPE} if in_envelope else {ENVELOPE, CONTENT})
            assert set(message.content.config_records[ENVELOPE]) - {CONTENT} == HEAD
            assert content.name in {one.wire_name for one in classes}
            names = {*content.scalars, *content.arrays}
            assert names in [set(names_of(one)) for one in classes], content.name


def declared(kind):
    """All classes of messages below one, but for what others only build on."""
    for one in kind.__subclasses__():
        yield from declared(one)
        # with slots a dataclass is another class than the one that it is made of
        if is_dataclass(one) and "wire_name" in vars(one):
            yield one


def names_of(kind):
    """The fields of a message, those of its parcels too."""
    beside = fields(Parcels) if kind.carries_letters else ()
    return [field.name for field in (*fields(kind), *beside)]


def check_no_rows(app, summary):
    """No reply has an array as long as some party's rows."""
    n_rows = {party["rows"] for party in summary["parties"]}
    for kind, _, reply in app.heard:
        for name, array in arrays_of(reply).items():
            assert not n_rows & set(array.shape), (kind, name)


def predicted_rows(folder):
    """Predictions of a divided model as the active party has them."""
    summary = summary_of(folder)
    path = home() / "sites" / summary["active"] / summary["model_id"] / "predictions.csv"
    lines = path.read_text().splitlines()[1:]
    return np.array([list(map(float, line.split(",")[1:])) for line in lines])
