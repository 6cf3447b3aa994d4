"""What a run was kept secret with is nowhere on a site's disk once the run has ended."""

import base64
import os
import secrets
from functools import wraps

import numpy as np
import pytest

from clients.vertical import ciphertexts
from fedapp.home import home
from fedapp.records.journal import Journal
from fedapp.runs.local import run_local
from fedapp.site import mail, sums
from fedapp.site.database import ROWS_KEY
from fedapp.site.store import STATE, Store
from tests.federated import summary_of
from tests.network import run
from tests.tables import write_rows

NAMES = ("bank", "clinic", "insurer", "shop")
# A site has these for good: who it is, which rows it draws, by what it knows its table again.
LASTING = {"identity.key", "draws.key", "fingerprint.key"}
SHORTEST = 32  # bytes; what is drawn shorter goes out in the clear, such as salt and run ids
LONGEST_NUMBER = 512  # bytes that are also looked for as a decimal number
SECURE = {"strategy": "pax", "pax__aggregation": "secure", "parties": 4}


def small_key(method):
    name = method.replace("-", "_")
    return {"strategy": method, f"{name}__key_bits": 512, f"{name}__insecure_small_key": True}


HORIZONTAL = {
    "pax-min-parties": {**SECURE, "min_parties": 3},
    "pax-private": {**SECURE, "privacy__epsilon": 20.0},
    "bagging": {"strategy": "bagging", "parties": 4, "subsample": 0.7},
}
FOREST = {"strategy": "federated-forest", "federated_forest__trees": 3}
PAILLIER = {"federated_forest__labels": "paillier", **small_key("federated-forest")}
VERTICAL = {
    "secureboost": small_key("secureboost"),
    "forest": FOREST,
    "forest-paillier": {**FOREST, **PAILLIER},
}
PREDICTIONS = {
    "interactive": {"strategy": "interactive"},
    "one-round": {"strategy": "one-round"},
    "eini": {**small_key("eini"), "eini__unguarded": True},
}
RUNS = [*HORIZONTAL, *VERTICAL, *PREDICTIONS]


# What draws secrets, or derives them.
DRAWS = (
    *((os, "urandom"), (secrets, "token_bytes"), (secrets, "randbits"), (secrets, "randbelow")),
    *((mail, "new_private_key"), (mail, "agree"), (ciphertexts, "generate_key")),
    *((sums, "new_secret"), (sums, "seed_of"), (sums, "derived_key")),
)


class Drawn:
    """All secrets that were drawn or derived in this process, each as bytes."""

    def __init__(self, monkeypatch):
        self.all = set()
        for module, name in DRAWS:
            monkeypatch.setattr(module, name, self._noting(getattr(module, name)))

    def _noting(self, draw):
        @wraps(draw)
        def noting(*given, **more):
            found = draw(*given, **more)
            for one in (found.p, found.q) if hasattr(found, "q") else (found,):
                self.add(one if isinstance(one, bytes) else int(one))
            return found

        return noting

    def add(self, secret):
        if isinstance(secret, int):
            secret = secret.to_bytes(-(-secret.bit_length() // 8), "big")
        if len(secret) >= SHORTEST:
            self.all.add(secret)

    def written_in(self, folder):
        """Files that have one of them, in whatever form it may be written there."""
        forms = {form for secret in self.all for form in forms_of(secret)}
        files = ((path.name, path.read_bytes()) for path in folder.rglob("*") if path.is_file())
        return {name for name, content in files if any(form in content for form in forms)}


def forms_of(secret):
    """A secret as bytes, hex digits, base64, a decimal number, and a list of numbers."""
    for one in (secret, secret[::-1]):
        yield from (one, one.hex().encode(), base64.b64encode(one).rstrip(b"="))
        if len(one) <= LONGEST_NUMBER:
            yield str(int.from_bytes(one, "big")).encode()
    yield ", ".join(map(str, secret)).encode()
    yield ",".join(map(str, secret)).encode()


@pytest.fixture
def drawn(monkeypatch):
    return Drawn(monkeypatch)


@pytest.fixture
def begin(settings, sites, tmp_path):
    """``begin(name, model)``: settings of a run of this name, and the sites that it is for."""

    def make(name, **model):
        how = {**HORIZONTAL, **VERTICAL, **PREDICTIONS}[name]
        is_horizontal, rng, nodes = name in HORIZONTAL, np.random.default_rng(3), []
        for number, party in enumerate(NAMES if is_horizontal else NAMES[:3]):
            values = rng.normal(size=(60, 2)).round(3)
            columns = {"a": values[:, 0], "b": values[:, 1]}
            if not is_horizontal:
                columns = {f"{party}-{key}": values for key, values in columns.items()}
                columns["customer"] = [f"customer {one}" for one in rng.permutation(80)[:60]]
            has_label = is_horizontal or not number
            columns |= {"y": (values.sum(axis=1) > 0).astype(int)} if has_label else {}
            path = write_rows(tmp_path / f"{party}-{is_horizontal}.csv", columns)
            node = {"name": party, "data": path, "allow": how["strategy"]}
            node |= {"label": "y" * has_label, "id": "" if is_horizontal else "customer"}
            nodes.append(node | ({"least-parties": 2} if how.get("min_parties") else {}))
        common = {"data": "their.own", "label": "y", "max_bin": 8, "align": "psi", **how}
        return settings(**{**common, "parties": len(nodes), **model}), sites(*nodes)

    return make


def folders_of(folder):
    """Where each site has its state of a run."""
    model, parties = summary_of(folder)["model_id"], summary_of(folder)["parties"]
    return {one["name"]: home() / "sites" / one["name"] / model for one in parties}


@pytest.mark.by_default("pax-private", "forest")
@pytest.mark.parametrize("name", RUNS)
def test_no_secret_of_a_run_outlives_it(drawn, begin, tmp_path, name):
    model = {}
    if name in PREDICTIONS:
        kind = "secureboost" if name == "interactive" else "forest"
        model = {"model": summary_of(run(*begin(kind)))["model_id"]}
    folder = run(*begin(name, **model))
    # The home's key of the hashes of rows is for good, and in every register too.
    drawn.all.remove((home() / ROWS_KEY).read_bytes())
    assert len(drawn.all) >= (len(NAMES) if name in HORIZONTAL else 3)
    assert drawn.written_in(home()) <= LASTING
    assert drawn.written_in(tmp_path) <= LASTING
    for path in folders_of(folder).values():
        assert Store.open(path).finished
        assert drawn.written_in(path) == set()


def test_what_is_looked_for_is_there_while_a_run_is_not_over(drawn, begin, monkeypatch):
    """Else the test above could look in the wrong places."""
    monkeypatch.setattr(Journal, "end", Journal.append)
    folders = folders_of(run_local(*begin("pax-private")))
    for path in folders.values():
        assert drawn.written_in(path) == {STATE}
