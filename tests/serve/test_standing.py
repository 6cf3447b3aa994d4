"""Standing scores between the sites' own processes: their bits, versions, limits of a day."""

import asyncio
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
pytest.importorskip("prometheus_client")

from clients.standing import Agreeing  # noqa: E402
from clients.vertical.opening import Opening  # noqa: E402
from fedapp.errors import PartyError  # noqa: E402
from fedapp.kernels import kernel  # noqa: E402
from fedapp.serve import peers, versions  # noqa: E402
from fedapp.serve.http import RefusedError  # noqa: E402
from fedapp.serve.joint import Joint  # noqa: E402
from fedapp.site.certificates import YEARS, own_certificate  # noqa: E402
from fedapp.site.settings import SiteConfig, is_address  # noqa: E402
from fedapp.site.standing import (  # noqa: E402
    REACHED,
    TLS,
    certificate,
    current,
    folder_of,
    switch,
    unreached,
)
from fedapp.trees import cells  # noqa: E402
from fedapp.trees import model as ensemble  # noqa: E402
from strategies.standing import AWAY, NO_PROCESS  # noqa: E402
from tests.serve.standing import (  # noqa: E402
    FEW,
    Threads,
    bits,
    ids,
    logged,
    nightly,
    scored,
    sites_in,
    tables,
    until,
)

# Scores

MODELS = {
    "two classes": ((), {}),
    "three classes, three parties": (("multi:softprob", 3), {"objective": "multi:softprob"}),
    "more than 64 leaves": (
        ("binary:logistic", 2, 400),
        {"max-depth": 8, "min-child-weight": 0.0, "num-boost-round": 2},
    ),
    "a forest": ((), {"strategy": "federated-forest", "federated-forest.trees": 5}),
}


@pytest.mark.by_default("three classes, three parties", "a forest")
@pytest.mark.parametrize(("of_tables", "settings"), MODELS.values(), ids=MODELS)
def test_scores_have_the_bits_of_interactive_prediction(stand, of_tables, settings):
    sites, threads, model = stand(*of_tables, **settings)
    expected = bits(sites.predicted(model))
    assert len(expected) > 100
    assert scored(threads, list(expected)) == expected
    name = next(iter(expected))
    assert tuple(threads.score(name)[1]["scores"].values()) == expected[name]
    # The same by what is sent ahead, which asks nobody.
    for site in sites.names[1:]:
        sites.configure(site, {"standing-nightly": "all"})
    assert nightly(threads, all=True)[1]["rows"] == len(expected)
    asked = [len(logged(site)) for site in sites.names[1:]]
    assert scored(threads, list(expected), way="nightly") == expected
    assert [len(logged(site)) for site in sites.names[1:]] == asked


def test_a_version_answers_once_its_kernels_are_compiled(stand, monkeypatch):
    _, threads, _ = stand()
    kernels = [(cells, "_open"), (cells, "_walk"), (ensemble, "_add_leaves")]
    fresh = [kernel(getattr(module, name).py_func) for module, name in kernels]
    for (module, name), again in zip(kernels, fresh, strict=True):
        monkeypatch.setattr(module, name, again)
    threads.restart("insurer")
    threads.restart("bank")
    until(lambda: threads.client.get("/health").json()["status"] == "ok")
    loaded = [list(each.signatures) for each in fresh]
    assert all(loaded)
    scored(threads, ids())
    assert threads.score(ids()[0])[0] == 200
    assert [list(each.signatures) for each in fresh] == loaded


# Versions


def test_processes_follow_versions_from_the_first_to_none(tmp_path, monkeypatch):
    monkeypatch.setattr("clients.standing.REACHED_SECONDS", 0.0)
    sites = sites_in(tmp_path)
    model, threads = sites.train(**FEW), Threads(sites)
    for name in sites.names:
        certificate(name)
    pinned = [folder_of(name) / "tls.pem" for name in sites.names]
    threads.start()
    try:
        assert threads.score("c1")[0] == 503
        sites.activate(model)
        until(lambda: threads.score(ids()[0])[0] == 200)
        first, before = current("bank")[0], ids()

        # Another activation: ids are numbered anew, certificates that end soon are renewed, and
        # requests are answered by the version before until the new one is loaded.
        load, may_load = versions.Version.load, threading.Event()

        def slow(config, version):
            assert version == first or may_load.wait(20)
            return load(config, version)

        with monkeypatch.context() as patch:
            patch.setattr(versions.Version, "load", slow)
            patch.setattr("fedapp.site.standing.days_left", lambda path, now: 1.0)
            old = [path.read_bytes() for path in pinned]
            with monkeypatch.context() as failing:
                failing.setattr("clients.standing.numbered", None)
                with pytest.raises(PartyError):
                    sites.activate(model)
            assert [path.read_bytes() for path in pinned] == old
            sites.activate(model)
            assert not [path for path in pinned if path.read_bytes() in old]
            for _ in range(3):
                status, reply = threads.score(before[0])
                assert (status, reply["version"]) == (200, first)
            may_load.set()
            until(lambda: threads.score(before[0])[1]["version"] == current("bank")[0] != first)
        assert ids() == ids("insurer")
        assert set(ids()) == set(before)
        # So that a coordinator that has ids cannot compute whose row a log names.
        assert np.mean(np.array(ids()) != before) > 0.9

        # New ids come after those that were matched, which stay.
        before, more = ids(), tables("binary:logistic", 2, 260)
        for name, table in more.items():
            sites.write_table(name, table)
        sites.activate(model, refresh=True)
        after = ids()
        assert after[: len(before)] == before
        assert len(after) > len(before)
        assert after == ids("insurer")
        expected = bits(sites.predicted(model))
        new = after[len(before) :]
        until(lambda: threads.score(new[0])[0] == 200)
        assert scored(threads, new) == {name: expected[name] for name in new}
        sites.activate(model, refresh=True)  # nothing new that both have
        assert ids() == after
        for name, table in more.items():
            has = pa.array(name in set(after) for name in table["id"].to_pylist())
            sites.write_table(name, table.filter(has))
        with pytest.raises(PartyError, match="ids must have new ones to be matched, got none"):
            sites.activate(model, refresh=True)

        sites.activate(model, none=True)
        assert threads.score(after[0])[0] == 503
        assert not [*folder_of("insurer").glob("*/agreed.json")]
    finally:
        threads.close()


def test_an_activation_keeps_cells_until_others_are_sent_and_asks_who_is_reached(
    stand, monkeypatch
):
    sites, threads, model = stand(node={"standing-nightly": "all"})
    assert nightly(threads, all=True)[0] == 200
    sites.configure("insurer", {"standing-nightly": "named"})  # so it is asked by name again
    first, names, fetch, may_fetch = current("bank")[0], ids(), Joint.fetch, threading.Event()

    async def held(self, *ids):
        while not may_fetch.is_set():
            await asyncio.sleep(0.01)
        return await fetch(self, *ids)

    monkeypatch.setattr(Joint, "fetch", held)
    threads.restart("insurer")
    assert sites.activate(model).summary["unreached"] == []
    until(lambda: threads.score(names[0], way="live")[1].get("version") == current("bank")[0])
    before = scored(threads, names, way="nightly")
    assert threads.score(names[0], way="nightly")[1]["version"] == first
    assert threads.client.get("/health").json()["nightly"] == "ok"
    may_fetch.set()
    until(lambda: threads.score(names[0], way="nightly")[1]["version"] == current("bank")[0])
    assert scored(threads, names, way="nightly") == before

    def once_asked(site, version, seconds):
        until(lambda: name == "bank" or (folder_of(site) / version / REACHED).exists())
        return unreached(site, version, 0.0)

    monkeypatch.setattr("clients.standing.unreached", once_asked)
    for name, text in {"insurer": AWAY, "bank": NO_PROCESS}.items():
        threads.stop(name)
        summary = sites.activate(model).summary
        assert summary["unreached"] == [name]
        assert text.format(active="bank", names=name) in summary["warnings"]


@pytest.mark.slow
def test_activations_that_end_halfway_leave_the_version_that_answers(stand, monkeypatch):
    sites, threads, model = stand()
    name, before, switched = ids()[0], current("bank")[0], Agreeing.switch_version

    @wraps(switched)
    def halfway(self, request):
        if self.name == "bank":
            raise OSError("no power")
        return switched(self, request)

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(Agreeing, "switch_version", halfway)
            with pytest.raises(PartyError, match="bank"):
                sites.activate(model)
        assert current("insurer")[1] == before
        status, reply = threads.score(name)
        assert (status, reply["version"]) == (200, before)
    until(lambda: threads.client.get("/health").json()["status"] == "ok")
    sites.activate(model)
    assert threads.score(name)[1]["version"] == current("bank")[0] != before
    assert len([*folder_of("insurer").glob("*/agreed.json")]) == 2


def test_a_refresh_of_other_rows_than_those_of_now_is_refused(tmp_path, monkeypatch):
    sites = sites_in(tmp_path)
    model = sites.train(**FEW)
    sites.activate(model)
    version, match, once = current("bank")[0], Opening.match, threading.Lock()
    for name, table in tables("binary:logistic", 2, 260).items():
        sites.write_table(name, table)

    @wraps(match)
    def after_another(self, request, mail):
        if self.name == "bank" and once.acquire(blocking=False):
            sites.activate(model, refresh=True)
        return match(self, request, mail)

    monkeypatch.setattr(Opening, "match", after_another)
    with pytest.raises(PartyError, match="got some that another activation has matched meanwhile"):
        sites.activate(model, refresh=True)
    assert len(set(ids())) == len(ids())
    switch("insurer", version)
    with pytest.raises(PartyError, match=r"Address\.refreshed must be .*: activate without it"):
        sites.activate(model, refresh=True)


# Addresses and certificates


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"certificate": "none"}, "must be one certificate in PEM, and nothing else, got: "),
        ({"certificate": "two"}, "must be one certificate in PEM, and nothing else, got more"),
        ({"certificate": "one"}, "must be of one party"),
        ({"address": "insurer.org"}, "must be HOST:PORT, got 'insurer.org'"),
        ({}, "standing-address must be set in the node config"),
    ],
)
def test_addresses_that_would_stop_a_site_are_refused_before_they_are_stored(
    tmp_path, monkeypatch, change, rule
):
    sites = sites_in(tmp_path, **({} if change else {"standing-address": ""}))
    model, bank = sites.train(**FEW), certificate("bank")

    prepare = Agreeing.prepare

    @wraps(prepare)
    def prepared(self, request, mail):
        reply, letters = prepare(self, request, mail)
        if self.name == "insurer":
            content = self.address.certificate.tobytes()
            contents = {"none": b"none", "one": bank, "two": content + bank}
            content = contents.get(change.get("certificate", ""), content)
            address = change.get("address", self.address.address)
            certificate = np.frombuffer(content, np.uint8)
            self.address = replace(self.address, address=address, certificate=certificate)
            letters = self.to_others(self.address)
        return reply, letters

    monkeypatch.setattr(Agreeing, "prepare", prepared)
    with pytest.raises(PartyError, match=rule):
        sites.activate(model)
    assert current("bank") == ("", "")


def test_a_certificate_that_ends_soon_is_renewed_though_the_clock_is_not_believed(monkeypatch):
    today, path = datetime.now(UTC), folder_of("bank") / TLS
    pair = own_certificate("bank", today - timedelta(days=365 * YEARS - 10))
    path.parent.mkdir(parents=True)
    path.write_bytes(pair.secret + pair.public)
    lagging = SimpleNamespace(shown=(today - timedelta(days=60)).timestamp())
    monkeypatch.setattr("fedapp.site.standing.read_clock", lambda home: lagging)
    assert certificate("bank", renews=True) != pair.public
    assert certificate("bank") == pair.public


def test_an_address_has_a_host_and_a_port():
    for text in ("a.org:1", "[::1]:9", "1.2.3.4:65535"):
        assert is_address(text)
        httpx.URL(f"https://{text}")
    for text in ("a:0", "a:65536", "[:]:1", "a b:1", "a@b:1", "a?b:1", "%%:1", "a/b:1"):
        assert not is_address(text)


# Limits of a second and of a day


@given(st.lists(st.tuples(st.floats(0, 0.6), st.integers(1, 6)), max_size=30))
def test_no_second_has_more_rows_than_allowed(gaps):
    allowance, now, answered = peers.Allowance(), 0.0, list[tuple[float, int]]()
    config = SiteConfig("insurer", "rows.csv", standing_rows_per_second=6)
    for gap, n_rows in gaps:
        now += gap
        in_second = sum(rows for when, rows in answered if when > now - 1)
        try:
            allowance.check_second(config, "bank", n_rows, now)
        except RefusedError:
            assert in_second + n_rows > 6
        else:
            assert in_second + n_rows <= 6
            answered.append((now, n_rows))


def test_different_rows_of_a_day_are_counted_over_requests_nights_processes_and_versions(stand):
    sites, threads, model = stand(node={"standing-rows-per-day": 6, "standing-nightly": "all"})
    names = ids()
    rule = "insurer: rows must be <= 6 (standing-rows-per-day in the node config of insurer), got "
    assert threads.score(names[:7]) == (429, {"error": f"{rule}7 of bank"})
    assert nightly(threads, all=True)[0] == 200  # only standing-nightly limits all rows
    assert threads.score(names[:4])[0] == 200
    for _ in range(3):  # the same rows again disclose nothing new
        assert threads.score(names[:4])[0] == 200
    assert nightly(threads, ids=names[:7])[0] == 429
    assert nightly(threads, ids=names[:5])[0] == 200
    threads.restart("insurer")
    threads.restart("bank")  # which asks, and starts again whatever its limit
    assert threads.score(names[5:7], way="live")[0] == 429  # five were asked about before
    assert threads.score(names[:6], way="live")[0] == 200
    assert threads.score(names[6], way="live")[0] == 429
    assert threads.score(names[4], way="nightly")[0] == 200  # stored
    sites.activate(model)  # another version, which numbers the rows otherwise
    until(lambda: threads.score(names[0])[1].get("version") == current("bank")[0])
    assert threads.score(names[6])[0] == 429
    assert threads.score(names[:6])[0] == 200
