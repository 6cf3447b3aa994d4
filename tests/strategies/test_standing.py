"""Activation: what the coordinator sees of it, what the parties agree on, and what is refused."""

import json
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest

from fedapp.errors import ConfigError, DataError, PartyError
from fedapp.home import home
from fedapp.report.progress import Silent
from fedapp.runs.local import site_contexts
from fedapp.runs.session import activate
from fedapp.settings import load_settings
from fedapp.site.settings import read_node_config
from fedapp.site.standing import Agreed, current, folder_of, ids_of
from simulations.bench.sites import SERVICE
from strategies.run import all_strategies
from tests.federated import summary_of
from tests.letters import letters_sent, raw_of
from tests.serve.standing import sites_in
from tests.tampering import rewrite_letters
from tests.transcript import ALIGNED, check_declared, listen

FEW = {"num-boost-round": 2, "max-depth": 2, "early-stopping-rounds": 0}


@pytest.fixture
def sites(tmp_path):
    return sites_in(tmp_path, "binary:logistic", 3)


def test_the_coordinator_sees_sizes_and_the_services_name_and_files_are_their_owners(sites):
    given = {"strategy": "standing", "model": sites.train(**FEW), "parties": 3}
    given |= {"standing.service": SERVICE, "run-dir": str(sites.folder / "heard")}
    contexts = site_contexts(read_node_config(sites.config(name)) for name in sites.names)
    folder, app = listen(load_settings(given), contexts)
    summary = summary_of(folder)
    check_declared(
        app, ALIGNED | {f"evaluate.standing_{step}" for step in ("prepare", "store", "switch")}
    )
    assert (summary["service"], summary["standing_rows"]) == (
        SERVICE,
        len(ids_of("bank", current("bank")[0])),
    )
    agreed = {name: Agreed.read(name, current(name)[0]) for name in sites.names}
    told = b"".join(raw_of(message) for _, *pair in app.heard for message in pair)
    for name, one in agreed.items():
        assert set(one.peers) == {*sites.names} - {name}
        for peer in one.peers.values():
            assert peer.address.encode() not in told
            assert peer.certificate.splitlines()[1].encode() not in told
    letters = [one for one in letters_sent(app) if one.name == "Address"]
    assert {(one.sender, one.receiver) for one in letters} == {*permutations(sites.names, 2)}
    for path in (home() / "sites").glob("*/standing/**/*"):
        assert not path.stat().st_mode & 0o077, path


def test_a_version_that_not_all_have_or_allow_is_used_by_none(sites, monkeypatch):
    model = sites.train(**FEW)
    sites.activate(model)
    before = current("bank")
    with pytest.raises(DataError, match="version must be one that bank has stored, got none"):
        Agreed.read("bank", "none")
    with monkeypatch.context() as patch:
        rewrite_letters(patch, "Address", "part", np.zeros_like)
        with pytest.raises(PartyError, match="model must be the one this run was trained with"):
            sites.activate(model)
    assert {current(name) for name in sites.names} == {before}
    (folder_of("shop") / "current").write_text(json.dumps({"version": "", "before": ""}))
    with pytest.raises(PartyError, match=r"Address.refreshed must be .*: activate without it"):
        sites.activate(model, refresh=True)
    sites.configure("shop", {"allow": "secureboost,interactive"})
    with pytest.raises(PartyError, match=r"shop .*strategy must be one that the site allows"):
        sites.activate(model)


@pytest.mark.slow
def test_all_parties_number_the_same_rows_alike_in_an_order_of_their_own_draws(sites, monkeypatch):
    model = sites.train(**FEW)
    orders = []
    # Even if all parties but one draw what the coordinator knows.
    draw = iter([b"0" * 32, b"0" * 32, b"1" * 32, b"0" * 32, b"0" * 32, b"2" * 32])
    drawn = SimpleNamespace(token_bytes=lambda n_bytes: next(draw))
    monkeypatch.setattr("clients.standing.secrets", drawn)
    for _ in range(2):
        sites.activate(model)
        version = current("bank")[0]
        ids = [ids_of(name, version) for name in sites.names]
        np.testing.assert_array_equal(ids[0], ids[1])
        np.testing.assert_array_equal(ids[0], ids[2])
        orders.append(ids[0])
    assert set(orders[0]) == set(orders[1])
    assert (orders[0] != orders[1]).mean() > 0.9


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({}, "standing.service must be letters, digits"),
        ({"service": "a b"}, "standing.service must be letters, digits"),
        ({"service": "a", "refresh": True, "none": True}, "standing.refresh must be false to end"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, given, rule):
    named = {f"standing.{name}": value for name, value in given.items()}
    run = settings(strategy="standing", model="0" * 16, **named)
    with pytest.raises(ConfigError, match=f"^{rule}"):
        all_strategies()["standing"].section_settings(run)


def test_an_activation_needs_sites_of_a_superlink(tmp_path):
    with pytest.raises(ConfigError, match="engine must be a SuperLink's name, whose sites have"):
        activate(tmp_path, None, {}, {"standing.service": "a"}, "local", Silent())
