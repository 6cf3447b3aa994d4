"""Flower's mods, lifespans and functions around the handlers, and tables that are in memory."""

import logging
from collections import Counter

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.mod import message_size_mod
from ray import cloudpickle

from fedapp.client_app import SiteApp, app
from fedapp.errors import ConfigError, PartyError
from fedapp.messages.methods import message_kinds
from fedapp.messages.wire import REFUSED
from fedapp.runs.local import run_local, site_contexts
from fedapp.site.answer import find_handler
from fedapp.site.store import LiveStores
from tests.federated import model_bytes


class Counting:
    """A mod that counts the messages it sees, by kind."""

    def __init__(self):
        self.seen = Counter[str]()

    def __call__(self, message, context, call_next):
        self.seen[message.metadata.message_type] += 1
        return call_next(message, context)


def rows(share, n_shares):
    """A table of two columns, a label that follows them and ids."""
    a, b = np.random.default_rng(share).normal(size=(2, 40)).round(3)
    return {"a": a, "b": b, "y": (a + b > 0).astype(int)}


def test_every_kind_has_a_handler():
    kinds = message_kinds()
    assert "train.pax_grow" in kinds
    for kind in kinds:
        assert find_handler(kind, "bank")[0].kind == kind


# Mods and functions


def test_mods_see_every_message_and_a_kinds_mods_only_its_own(settings, caplog):
    plain, every, grow = run_local(settings()), Counting(), Counting()
    of_kinds = {"train.pax_grow": [grow], "train.pax_sketch": [message_size_mod]}
    app = SiteApp(stores=LiveStores(), mods=[every], kind_mods=of_kinds)
    with caplog.at_level(logging.INFO, "flwr"):
        folder = run_local(settings(), client_app=app)
    assert every.seen.total() == folder.summary["exchanges"] * 3
    assert grow.seen == {"train.pax_grow": every.seen["train.pax_grow"]}
    texts = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert texts.count("Incoming message size") == texts.count("Outgoing message size") == 3
    assert model_bytes(folder) == model_bytes(plain)


def test_of_an_error_in_a_mod_the_coordinator_gets_its_kind_only(settings):
    def broken(message, context, call_next):
        raise ValueError("a row")

    with pytest.raises(PartyError, match=r"ValueError in query\.greet") as raised:
        run_local(settings(), client_app=SiteApp(stores=LiveStores(), mods=[broken]))
    assert "a row" not in str(raised.value)


def message_of(kind):
    context = Context(0, 2, {"partition-id": 0, "num-partitions": 1}, RecordDict(), {})
    message = Message(RecordDict(), dst_node_id=2, message_type=kind)
    message.metadata.__dict__["_message_id"] = "1"
    return message, context


def test_functions_for_other_kinds_and_a_lifespan_are_called():
    app, called = SiteApp(table=rows, label="y"), list[str]()

    @app.query("mine")
    def mine(message, context):
        called.append("mine")
        return Message(RecordDict(), reply_to=message)

    @app.lifespan()
    def lifespan(context):
        called.append("begins")
        yield
        called.append("ends")

    message, context = message_of("query.mine")
    assert not app(message, context).has_error()
    assert called == ["begins", "mine", "ends"]


def test_a_simulations_process_keeps_the_app_between_messages_and_copies_a_users(monkeypatch):
    assert cloudpickle.loads(cloudpickle.dumps(app)) is app
    users = SiteApp(mods=[message_size_mod], table=pd.DataFrame, label="y")
    copy = cloudpickle.loads(cloudpickle.dumps(users))
    assert copy is not users
    assert (copy._table, copy._columns) == (pd.DataFrame, {"label": "y", "id": ""})
    own = SiteApp()
    monkeypatch.setattr("fedapp.client_app.app", own)
    own.train("extra")(lambda message, context: message)
    assert "train.extra" in cloudpickle.loads(cloudpickle.dumps(own))._registered_funcs


def test_a_kind_without_a_function_is_refused():
    reply = SiteApp(table=rows, label="y")(*message_of("train.pax_grown"))
    text = "party-1: message.kind must be known, got 'train.pax_grown'"
    assert (reply.error.code, reply.error.reason) == (REFUSED, text)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (
            {"kind_mods": {"train.pax_grown": []}},
            r"kind_mods must .*'train\.pax_grown'; did you mean train\.p",
        ),
        ({"label": "y"}, "label and id must come with table, got 'y' without$"),
    ],
)
def test_what_would_be_ignored_is_refused(given, rule):
    with pytest.raises(ConfigError, match=f"^{rule}"):
        SiteApp(**given)


# Tables in memory


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pa.table])
def test_a_table_in_memory_trains_the_model_of_its_file(settings, tmp_path, kind):
    for share in range(2):
        pd.DataFrame(rows(share, 2)).to_parquet(tmp_path / f"{share}.parquet")
    data = ",".join(str(tmp_path / f"{share}.parquet") for share in range(2))
    of_files = run_local(settings(parties=2, data=data, label="y"))
    app = SiteApp(stores=LiveStores(), table=lambda *place: kind(rows(*place)), label="y")
    in_memory = run_local(settings(parties=2), client_app=app)
    assert model_bytes(of_files) == model_bytes(in_memory)


def test_tables_in_memory_of_different_columns_train_secureboost(vertical):
    def columns(share, n_shares):
        table = rows(0, 1)
        ids = {"row": [f"r{place}" for place in range(40)]}
        return {"a": table["a"], "y": table["y"], **ids} if not share else {"b": table["b"], **ids}

    app = SiteApp(stores=LiveStores(), table=columns, label="y", id="row")
    folder = run_local(vertical(align="psi"), client_app=app)
    assert folder.summary["metrics"]["train"]["auc"] > 0.9


def test_a_site_with_data_of_its_own_has_no_table_in_memory(settings, write_table):
    def refuse(share, n_shares):
        raise AssertionError("the site has its own table")

    nodes = [
        {"name": name, "data": str(write_table(name, 40, seed)), "label": "y", "allow": "pax"}
        for seed, name in enumerate(("bank", "shop"))
    ]
    app = SiteApp(stores=LiveStores(), table=refuse, label="y")
    folder = run_local(settings(parties=2), site_contexts(nodes), client_app=app)
    assert [party["name"] for party in folder.summary["parties"]] == ["bank", "shop"]
