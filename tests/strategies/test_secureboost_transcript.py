"""SecureBoost: what the server, a passive party and the active party see, and nothing else."""

import json
import zlib
from dataclasses import dataclass

import numpy as np
import pytest

from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.home import home
from fedapp.records.document import FORMAT, from_document
from fedapp.run_folder import RunFolder
from fedapp.settings import load_settings
from fedapp.site.mail import HEAD
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import base_margin, base_score, gradients
from tests.federated import summary_of
from tests.letters import Opened, letters_sent, parcels_of, raw_of, texts_of, written
from tests.network import run
from tests.pooled import Pooled, in_order
from tests.sites import site_contexts
from tests.tables import write_rows
from tests.transcript import Listener

PARTIES = ("bank", "clinic", "shop")
COLUMNS = {
    "bank": ("income at bank", "debt at bank"),
    "clinic": ("pulse at clinic", "weight at clinic"),
    "shop": ("visits at shop", "basket at shop"),
}
N_ROWS = 240


@dataclass(frozen=True)
class Recorded:
    """A run of three sites, all of its messages, and what was true."""

    folder: RunFolder
    app: Listener
    letters: list[Opened]
    whole: Pooled
    parts: dict  # of the model, by party

    @property
    def model(self):
        return from_document({"format": FORMAT, **self.parts["bank"]["model"]}, Ensemble)

    def secrets_of_the_labels(self):
        """Labels, the first round's gradients, and leaf weights, as they may be written."""
        whole, objective = self.whole, "binary:logistic"
        order = np.concatenate((whole.train, whole.order[~np.isin(whole.order, whole.train)]))
        found = written(whole.labels[order], 16) | written(whole.labels, 16)
        labels, weights = whole.labels[whole.train], whole.weights[whole.train]
        mean = base_score(objective, labels.sum(keepdims=True), len(labels))
        margins = np.tile(base_margin(objective, mean), (len(labels), 1))
        pairs = gradients(objective, margins, labels, weights)
        for column in (pairs[:, 0, 0], pairs[:, 0, 1], pairs[:, 0].ravel()):
            found |= written(column, 4)
        for tree in self.model.trees:
            leaves = tree["value"][tree["value"] != 0]
            found |= written(leaves, 2) | texts_of(leaves)
            found |= {np.float64(leaf).tobytes() for leaf in leaves}
            assert len(leaves) > 2
        return found

    def thresholds(self, party):
        """A party's thresholds, as they may be written."""
        values = np.float32(self.parts[party]["lookup"]["thresholds"]).tolist()
        assert len(values) > 1
        return (
            written(np.array(values, dtype=np.float32), 2)
            | texts_of(values)
            | {np.float64(value).tobytes() for value in values}
        )

    def values(self, party):
        """Runs of a party's values in either order of the rows."""
        table = self.whole.tables[PARTIES.index(party)]
        orders = np.arange(len(table.values)), self.whole.train
        columns = [column[order] for order in orders for column in table.values.T]
        return set().union(*(written(column, 4) for column in columns))


def record(home_folder, patch, **more):
    """Three sites of which the bank has the label."""
    patch.setenv("FEDAPP_HOME", str(home_folder / "home"))
    rng = np.random.default_rng(11)
    values = rng.normal(size=(N_ROWS, 6)) * 1000
    labels = (values @ [1, -1, 1, 1, -1, 1] + rng.normal(size=N_ROWS) * 500 > 0).astype(int)
    ids = [f"customer-{number:05d}" for number in rng.permutation(99999)[:N_ROWS]]
    nodes, tables = [], []
    for place, (name, columns) in enumerate(COLUMNS.items()):
        own = dict(zip(columns, values.T[2 * place : 2 * place + 2], strict=True))
        given = {"id": ids, **own, **({} if place else {"y": labels})}
        path = write_rows(home_folder / f"{name}.csv", given)
        label = "" if place else "y"
        nodes.append({"name": name, "data": path, "id": "id", "label": label, **more})
        tables.append(load_table(path, Roles(label=label, id_column="id")))
    settings = load_settings(
        {
            "strategy": "secureboost",
            "objective": "binary:logistic",
            "secureboost.key-bits": 512,
            "secureboost.insecure-small-key": True,
            "num-boost-round": 3,
            "max-depth": 3,
            "max-bin": 32,
            "run-dir": str(home_folder / "run"),
        }
    )
    app = Listener()
    folder = run(settings, site_contexts(*nodes), app)
    model_id = summary_of(folder)["model_id"]
    parts = {
        name: json.loads((home() / "sites" / name / model_id / "part.json").read_text())
        for name in PARTIES
    }
    letters = letters_sent(app)
    return Recorded(folder, app, letters, Pooled(settings, in_order(tables)), parts)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        yield record(tmp_path_factory.mktemp("transcript"), patch)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The same run where all parties share names and allow the export."""
    with pytest.MonkeyPatch.context() as patch:
        more = {"share-column-names": True, "allow-export": True}
        yield record(tmp_path_factory.mktemp("shared"), patch, **more)


def assert_none_in(secrets, seen):
    assert len(secrets) > 1
    assert not [secret for secret in secrets if secret in seen]


def seen_by(recorded, name):
    """All messages for the server; for a party the letters that it got."""
    if name == "server":
        return b"|".join(raw_of(one) for _, *pair in recorded.app.heard for one in pair)
    return b"|".join(letter.raw for letter in recorded.letters if letter.receiver == name)


@pytest.mark.parametrize("name", ["server", "clinic", "shop"])
def test_the_server_and_passive_parties_see_nothing_that_follows_from_the_labels(recorded, name):
    assert_none_in(recorded.secrets_of_the_labels(), seen_by(recorded, name))


@pytest.mark.by_default("server", "bank", "clinic")
@pytest.mark.parametrize("name", ["server", *PARTIES])
def test_nobody_sees_an_id_or_a_name_value_or_threshold_of_a_party(recorded, name):
    secrets = {row_id.encode() for row_id in recorded.whole.tables[0].ids.tolist()}
    for other in [party for party in PARTIES if party != name]:
        secrets |= {column.encode() for column in COLUMNS[other]}
        secrets |= recorded.thresholds(other) | recorded.values(other)
    assert_none_in(secrets, seen_by(recorded, name))


def test_parcels_look_like_noise_to_the_server(recorded):
    parcels = [parcel for _, _, reply in recorded.app.heard for _, parcel in parcels_of(reply)]
    sealed = b"".join(parcel[HEAD.size :] for parcel in parcels)
    counts = np.bincount(np.frombuffer(sealed, np.uint8), minlength=256)
    expected = len(sealed) / 256
    # 255 degrees of freedom: mean 255, standard deviation 22.6.
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * 22.6
    assert len(zlib.compress(sealed)) > len(sealed)


def test_the_search_finds_what_is_shown_on_purpose(shared):
    seen = seen_by(shared, "server")
    for names in COLUMNS.values():
        assert all(name.encode() in seen for name in names)
    leaves = texts_of(float(leaf) for tree in shared.model.trees for leaf in tree["value"])
    assert any(leaf in seen for leaf in leaves)
    raw = b"".join(letter.raw for letter in shared.letters)
    assert any(threshold in raw for threshold in shared.thresholds("shop"))


# Of whom: what they may send, by receiver.
ALLOWED = {
    "bank": {
        "passive": {"CommonRows", "PublicKey", "EncryptedGradients", "Splits", "Partition"},
    },
    "passive": {
        "passive": {"OrderDigest", "Partition"},
        "bank": {"OrderDigest", "ColumnBins", "EncryptedSums", "Partition", "PartKept"},
    },
}


def test_letters_are_of_the_allowed_classes(recorded, shared):
    for run_of, more in ((recorded, set()), (shared, {"Records"})):
        got = {}
        for letter in run_of.letters:
            sender, receiver = (
                "bank" if name == "bank" else "passive" for name in (letter.sender, letter.receiver)
            )
            got.setdefault(sender, {}).setdefault(receiver, set()).add(letter.name)
        found = {
            sender: {receiver: names - {"MaskedList"} for receiver, names in by_receiver.items()}
            for sender, by_receiver in got.items()
        }
        found["passive"]["bank"] -= more
        assert found == ALLOWED
        assert more <= got["passive"]["bank"]


def test_a_party_is_told_of_its_own_splits_alone_by_column(recorded):
    told = {"clinic": 0, "shop": 0}
    for letter in recorded.letters:
        if letter.name != "Splits":
            continue
        is_local = letter["owners"] == PARTIES.index(letter.receiver)
        told[letter.receiver] += int(is_local.sum())
        assert len(letter["columns"]) == is_local.sum()
        if not len(letter["wanted_nodes"]):
            # In the last level a party is told of no other's splits.
            assert is_local.all()
    assert told == {name: len(recorded.parts[name]["lookup"]["columns"]) for name in told}


def test_rows_of_the_last_level_go_to_the_active_party_only(recorded):
    partitions = [letter for letter in recorded.letters if letter.name == "Partition"]
    levels = {
        name: {one["level"] for one in partitions if one.receiver == name} for name in PARTIES
    }
    assert levels == {"bank": {0, 1, 2}, "clinic": {0, 1}, "shop": {0, 1}}


def test_the_active_party_sees_names_and_thresholds_where_they_are_shared(shared):
    seen = seen_by(shared, "bank")
    assert all(name.encode() in seen for name in COLUMNS["shop"])
    for party in ("clinic", "shop"):
        assert_none_in(shared.thresholds("bank"), seen_by(shared, party))
