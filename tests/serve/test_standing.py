"""Scores of a divided model in one round between the sites' own processes."""

import json
import re
import ssl
import threading
import time
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from typer.testing import CliRunner

pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")
parser = pytest.importorskip("prometheus_client.parser")

from fedapp.commands.site import site_app  # noqa: E402
from fedapp.crypto.certificates import own_certificate  # noqa: E402
from fedapp.errors import DataError, PartyError  # noqa: E402
from fedapp.home import home  # noqa: E402
from fedapp.serve import joint  # noqa: E402
from fedapp.site.log import LOG  # noqa: E402
from fedapp.site.standing import current, folder_of, ids_of  # noqa: E402
from fedapp.trees import cells as cells_of_trees  # noqa: E402
from simulations.bench.sites import SERVICE  # noqa: E402
from tests.serve.standing import (  # noqa: E402
    FEW,
    as_the_bank,
    bits,
    logged,
    scored,
    sites_in,
    tables,
)

# Scores

MODELS = {
    "two classes": ((), {}),
    "three classes, three parties": (("multi:softprob", 3), {"objective": "multi:softprob"}),
    "more than 64 leaves": (
        ("binary:logistic", 2, 400),
        {"max-depth": 8, "min-child-weight": 0.0, "num-boost-round": 2},
    ),
    "rounds lost by early stopping": (
        (),
        {"num-boost-round": 12, "early-stopping-rounds": 3, "eta": 1.0, "valid-fraction": 0.3},
    ),
    "numbers": (("reg:squarederror",), {"objective": "reg:squarederror"}),
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
    assert threads.client.post("/nightly", json={"all": True}).json()["rows"] == len(expected)
    asked = [len(logged(site)) for site in sites.names[1:]]
    assert scored(threads, list(expected), way="nightly") == expected
    assert [len(logged(site)) for site in sites.names[1:]] == asked


@pytest.mark.slow
def test_a_score_says_how_it_came_about(stand):
    _sites, threads, _ = stand()
    name = ids_of("bank", current("bank")[0])[3]
    _, reply = threads.score(str(name), purpose="credit")
    assert reply["model"] == SERVICE
    assert reply["version"] == current("bank")[0]
    assert (reply["way"], reply["parties"]) == ("live", ["bank", "insurer"])
    ours, theirs = logged("bank")[-1], logged("insurer")[-1]
    assert ours["request"] == theirs["request"] == reply["request"]
    assert ours["purpose"] == theirs["purpose"] == "credit"
    assert theirs["peer"] == "bank"
    assert theirs["rows"] == [[3, 3]]  # a pseudonym
    assert not [line for line in logged("insurer") if str(name) in json.dumps(line)]


@pytest.mark.slow
def test_the_coordinator_cannot_compute_pseudonyms(stand):
    sites, _, model = stand()
    first, ids = current("bank")[0], ids_of("bank", current("bank")[0])
    np.testing.assert_array_equal(ids, ids_of("insurer", first))
    sites.activate(model)
    again = ids_of("bank", current("bank")[0])
    assert set(again) == set(ids)
    assert (again != ids).mean() > 0.9


@pytest.mark.slow
def test_a_site_sees_beforehand_what_its_cells_show(stand):
    sites, threads, model = stand()

    def shown_at(site):
        command = ["check", "--site", str(sites.config(site)), "--json"]
        return json.loads(CliRunner().invoke(site_app, command).output)["cells_show"]

    ids = [str(name) for name in ids_of("bank", current("bank")[0])]
    sent = []
    with pytest.MonkeyPatch.context() as patch:
        read = joint.Joint._read
        patch.setattr(joint.Joint, "_read", lambda *args: sent.append(read(*args)) or sent[-1])
        scored(threads, ids)
    # That of all its rows, of which these are nearly all.
    (cells,) = sent
    assert shown_at("insurer")[model] == pytest.approx(
        cells_of_trees.share_open(cells, len(ids)), abs=0.03
    )
    assert shown_at("bank") == {}


# Versions


@pytest.mark.slow
def test_a_refresh_matches_new_ids_and_leaves_the_others_as_they_are(stand):
    sites, threads, model = stand()
    before = ids_of("bank", current("bank")[0])
    more = tables("binary:logistic", 2, 260)
    for name, table in more.items():
        sites.write_table(name, table)
    sites.activate(model, refresh=True)
    after = ids_of("bank", current("bank")[0])
    np.testing.assert_array_equal(after[: len(before)], before)
    assert len(after) > len(before)
    np.testing.assert_array_equal(after, ids_of("insurer", current("insurer")[0]))
    expected = bits(sites.predicted(model))
    new = [str(name) for name in after[len(before) :]]
    assert scored(threads, new) == {name: expected[name] for name in new}
    sites.activate(model, refresh=True)  # nothing new that both have
    np.testing.assert_array_equal(ids_of("bank", current("bank")[0]), after)
    common = [
        pa.array(name in set(after) for name in table["id"].to_pylist()) for table in more.values()
    ]
    for (name, table), mask in zip(more.items(), common, strict=True):
        sites.write_table(name, table.filter(mask))
    with pytest.raises(PartyError, match="ids must have new ones to be matched, got none"):
        sites.activate(model, refresh=True)


@pytest.mark.slow
def test_an_older_model_is_active_again_and_none_ends(stand):
    sites, threads, first = stand()
    second = sites.train(**FEW, eta=0.9)
    ids = [str(name) for name in ids_of("bank", current("bank")[0])]
    for model in (second, first):
        sites.activate(model)
        expected = bits(sites.predicted(model))
        assert scored(threads, ids) == {name: expected[name] for name in ids}
    sites.activate(first, none=True)
    assert threads.score(ids[0])[0] == 503
    assert not [*folder_of("insurer").glob("*/agreed.json")]


@pytest.mark.slow
def test_requests_that_name_the_version_before_are_answered_after_a_switch(stand):
    sites, threads, model = stand()
    before = threads.site["bank"].current
    expected, names = bits(sites.predicted(model)), ids_of("bank", before)
    failures = []
    ending = threading.Event()

    def ask():
        while not ending.is_set():
            status, reply = threads.score(str(names[5]))
            if status != 200 or tuple(reply["scores"].values()) != expected[names[5]]:
                failures.append(reply)

    asking = threading.Thread(target=ask)
    asking.start()
    sites.activate(model)
    time.sleep(0.3)
    ending.set()
    asking.join()
    assert not failures
    assert before != current("bank")[0]


@pytest.mark.slow
def test_a_site_without_an_address_takes_part_in_no_activation(tmp_path):
    sites = sites_in(tmp_path, **{"standing-address": ""})
    model = sites.train(**FEW)
    with pytest.raises(PartyError, match="standing-address must be set in the node config"):
        sites.activate(model)


# Features


@pytest.mark.slow
def test_a_table_that_changes_is_read_again(stand):
    sites, threads, model = stand()
    ids = [str(name) for name in ids_of("bank", current("bank")[0])]
    before = scored(threads, ids)
    changed = tables("binary:logistic", 2, 200)
    rng = np.random.default_rng(0)
    for name, table in changed.items():
        column = next(c for c in table.column_names if c in "abcdef")
        place = table.column_names.index(column)
        sites.write_table(name, table.set_column(place, column, [rng.permutation(table[column])]))
    deadline = time.monotonic() + 20
    while scored(threads, ids) == before and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1.5)  # both sites
    expected = bits(sites.predicted(model))
    assert scored(threads, ids) == {name: expected[name] for name in ids}


@pytest.mark.slow
def test_rows_that_have_left_the_table_have_no_score(stand):
    sites, threads, _ = stand()
    ids = [str(name) for name in ids_of("bank", current("bank")[0])]
    table = tables("binary:logistic", 2, 200)["insurer"]
    stays = [name != ids[0] for name in table["id"].to_pylist()]
    sites.write_table("insurer", table.filter(stays))
    deadline = time.monotonic() + 20
    while (answer := threads.score(ids[0]))[0] == 200 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert answer[0] == 422
    assert "insurer: rows must be in the table that the site has now" in answer[1]["error"]
    assert threads.score(ids[1])[0] == 200
    sites.table("insurer").write_text("no table\n")
    while (answer := threads.score(ids[1]))[0] == 200 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert answer[0] == 502
    assert "insurer: version does not answer: " in answer[1]["error"]


# Limits

LIMITS = {
    "standing-rows-per-second": (2, 5, 429, r"rows must be <= 2 \(standing-rows-per-second in the"),
    "standing-rows-per-day": (6, 7, 429, r"rows must be <= 6 \(standing-rows-per-day in the node"),
    "standing-least-rows": (4, 3, 422, r"rows must be >= 4 different ones \(standing-least-rows"),
    "standing-purposes": ("credit,fraud", 1, 422, "purpose must be one of credit, fraud"),
}


@pytest.mark.by_default("standing-rows-per-day")
@pytest.mark.parametrize("setting", LIMITS)
def test_a_limit_of_the_other_site_binds(stand, setting):
    sites, threads, _ = stand()
    value, n_rows, due, rule = LIMITS[setting]
    sites.configure("insurer", {setting: value})
    ids = [str(name) for name in ids_of("bank", current("bank")[0])]
    status, reply = threads.score(ids[:n_rows])
    assert status == due
    assert re.match(f"insurer: {rule}", reply["error"])
    assert logged("insurer")[-1]["outcome"].startswith("refused: ")
    more = {"purpose": "fraud"} if setting == "standing-purposes" else {}
    n_fit = 4 if setting == "standing-least-rows" else 1
    assert threads.score(ids[:n_fit], **more)[0] == 200


@pytest.mark.slow
def test_different_rows_of_a_day_are_counted_over_requests_and_processes(stand):
    sites, threads, model = stand(node={"standing-rows-per-day": 4})
    ids = [str(name) for name in ids_of("bank", current("bank")[0])]
    for _ in range(9):  # the same row again tells nothing new
        assert threads.score(ids[:3])[0] == 200
    threads.restart("insurer")
    assert threads.score(ids[:4])[0] == 200
    assert threads.score(ids[4])[0] == 429
    # Nor does another version, which numbers the rows otherwise.
    sites.activate(model)
    assert threads.score(ids[4])[0] == 429
    assert threads.score(ids[:4])[0] == 200


@pytest.mark.slow
def test_rows_sent_ahead_of_all_do_not_count_for_the_day(stand):
    _sites, threads, _ = stand(node={"standing-rows-per-day": 4, "standing-nightly": "all"})
    ids = [str(name) for name in ids_of("bank", current("bank")[0])]
    assert threads.client.post("/nightly", json={"all": True}).status_code == 200
    assert threads.score(ids[:3])[0] == 200
    threads.restart("insurer")
    assert threads.score(ids[:4])[0] == 200
    assert threads.score(ids[:5])[0] == 429


@pytest.mark.slow
def test_cells_are_sent_ahead_as_the_site_permits(stand):
    sites, threads, _ = stand()
    ids = [str(name) for name in ids_of("bank", current("bank")[0])]

    def fetch(**body):
        reply = threads.client.post("/nightly", json=body)
        return reply.status_code, reply.json()

    assert fetch(all=True)[0] == 403
    sites.configure("insurer", {"standing-nightly": "named", "standing-rows-per-day": 20})
    status, reply = fetch(all=True)
    assert (status, "standing-nightly must be all" in reply["error"]) == (403, True)
    assert fetch(ids=ids[:21])[0] == 429
    assert fetch(ids=ids[:20])[1]["rows"] == 20
    assert threads.score(ids[:20], way="nightly")[1]["way"] == "nightly"
    status, reply = threads.score(ids[20], way="nightly")
    assert (status, reply["error"][:16]) == (404, "way must be live")
    # They survive the process, and end after the days that the sender has set.
    threads.restart("bank")
    assert threads.score(ids[3], way="nightly")[0] == 200
    sites.configure("insurer", {"standing-days": 0})
    assert fetch(ids=ids[:20])[0] == 200
    assert threads.score(ids[3], way="nightly")[0] == 404


# Faults


@pytest.mark.slow
def test_a_party_that_is_gone_is_named_at_once_and_last_nights_cells_serve(stand):
    sites, threads, model = stand(node={"standing-nightly": "all"})
    expected = bits(sites.predicted(model))
    ids = list(expected)
    assert threads.score(ids[0])[0] == 200
    threads.stop("insurer")
    began = time.perf_counter()
    status, reply = threads.score(ids[0])
    assert time.perf_counter() - began < 0.5
    assert status == 504
    address = threads.site["bank"].versions[current("bank")[0]].agreed.peers["insurer"].address
    assert reply["error"].startswith(f"insurer must answer at {address}, got: ")
    health = threads.client.get("/health")
    assert health.status_code == 503
    assert health.json()["parties"]["insurer"].startswith("must answer at")
    assert threads.client.get("/v2/health/ready").status_code in (400, 503)
    threads.start("insurer")
    assert threads.score(ids[0])[0] == 200
    assert threads.client.get("/health").json()["parties"] == {"insurer": "answers"}
    threads.client.post("/nightly", json={"all": True})
    threads.stop("insurer")
    _, reply = threads.score(ids[0])
    assert tuple(reply["scores"].values()) == expected[ids[0]]
    assert reply["way"] == "nightly"
    assert 0 <= reply["age_seconds"] < 60
    assert reply["away"].startswith("insurer must answer at")
    status, reply = threads.score(ids[0], way="live")  # nothing older instead
    assert (status, reply["error"][:26]) == (504, "insurer must answer at " + address[:3])


@pytest.mark.slow
def test_a_party_that_hangs_is_named_in_time(stand, monkeypatch):
    monkeypatch.setattr(joint, "LIVE_SECONDS", 2.0)
    _, threads, _ = stand()
    name = str(ids_of("bank", current("bank")[0])[0])
    slow = threading.Event()

    async def hang(self, version):
        import asyncio

        while not slow.is_set():
            await asyncio.sleep(0.05)

    monkeypatch.setattr(type(threads.site["insurer"]), "refreshed", hang)
    # The bank's own site has the same class: it must not hang.
    monkeypatch.setattr(threads.site["bank"], "refreshed", _nothing)
    began = time.perf_counter()
    status, reply = threads.score(name)
    slow.set()
    assert time.perf_counter() - began < 4
    assert (status, reply["error"][:7]) == (504, "insurer")
    assert "within 2 s, got nothing" in reply["error"]


async def _nothing(version=""):
    pass


ALTERED = {
    "zeros": lambda data: cells_of_trees.compress(np.zeros((10**4, 1), np.uint8)),
    "ones": lambda data: cells_of_trees.compress(np.full((10**4, 1), 255, np.uint8)),
    "nothing": lambda data: b"",
    "other bytes": lambda data: b"{}",
    "half": lambda data: data[: len(data) // 2],
}


def test_cells_that_contradict_each_other_give_no_score(stand, monkeypatch):
    _, threads, _ = stand()
    name = str(ids_of("bank", current("bank")[0])[0])
    for change in ALTERED.values():
        packed = partial(lambda change, cells: change(cells_of_trees.compress(cells)), change)
        monkeypatch.setattr("fedapp.serve.peers.compress", packed)
        status, reply = threads.score(name)
        assert status == 502
        assert reply["error"].startswith("insurer: cells must")


def test_another_part_of_the_model_gives_no_score(stand):
    _sites, threads, model = stand()
    name = str(ids_of("bank", current("bank")[0])[0])
    path = home() / "sites" / "insurer" / model / "part.json"
    path.write_text(path.read_text().replace("]", "] ", 1))
    threads.restart("insurer")
    status, reply = threads.score(name)
    assert status == 502
    assert reply["error"].startswith("insurer: part of the model must be the one")


@pytest.mark.slow
def test_a_process_that_starts_has_the_certificate_that_peers_know(stand, monkeypatch):
    sites, threads, model = stand()
    name = str(ids_of("bank", current("bank")[0])[0])
    monkeypatch.setattr("fedapp.site.standing.days_left", lambda path: 1.0)
    threads.restart("insurer")
    assert threads.score(name)[0] == 200
    before = (folder_of("insurer") / "tls.pem").read_bytes()
    sites.activate(model)  # renews it
    assert (folder_of("insurer") / "tls.pem").read_bytes() != before
    deadline = time.monotonic() + 6
    while threads.score(name)[0] != 200 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert threads.score(name)[0] == 200


def test_a_stranger_gets_no_connection(stand, tmp_path):
    sites, _threads, _ = stand()
    pair = own_certificate("bank")  # the name alone proves nothing
    (tmp_path / "tls.pem").write_bytes(pair.secret + pair.public)
    for certificate in (tmp_path / "tls.pem", None):
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate:
            context.load_cert_chain(certificate)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"https://127.0.0.1:{sites.peer_ports['insurer']}/alive", verify=context)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = st.fixed_dictionaries(
    {}, optional={"rows": JSON, "purpose": JSON, "request": JSON, "all": JSON}
)


def test_malformed_requests_are_refused_each_with_a_line(stand):
    _, threads, _ = stand()
    n_rows = len(ids_of("bank", current("bank")[0]))
    with as_the_bank(threads) as asked:

        @examples(max_examples=10, deadline=None)
        @given(FIELDS.map(lambda fields: json.dumps(fields).encode()) | st.binary(max_size=60))
        def ask(body):
            reply = asked(body)
            (line,) = logged("insurer")[count[0] :]
            count[0] += 1
            assert line["outcome"].startswith("answered" if reply.status_code == 200 else "refused")
            if reply.status_code == 200:
                document = json.loads(body)
                assert all(type(row) is int and 0 <= row < n_rows for row in document["rows"])
                assert document["rows"]
                assert isinstance(document["purpose"], str)
            else:
                assert reply.status_code == 422
                assert " must be " in reply.json()["error"]

        count = [len(logged("insurer"))]
        ask()
        for rows in ([n_rows], [-1], [0.5], ["0"], [True], [], [0] * 10_001, "0", None):
            body = json.dumps({"rows": rows, "purpose": "", "request": ""}).encode()
            reply = asked(body)
            assert reply.status_code == 422
            assert reply.json()["error"].startswith("rows must be 1 to 10000 numbers of rows")


def test_the_passive_party_has_no_scores_and_says_who_has(stand):
    sites, _threads, _ = stand()
    reply = httpx.post(f"{sites.url('insurer')}/score", json={"id": "c1"})
    assert reply.status_code == 404
    assert "scores are at bank, which has the labels" in reply.json()["error"]
    health = httpx.get(f"{sites.url('insurer')}/health")
    about = health.json()
    assert (health.status_code, about["status"], about["parties"]) == (200, "ok", {})
    assert about["rows"] == len(ids_of("insurer", current("insurer")[0]))
    sites.configure("insurer", {"allow": "secureboost"})
    assert httpx.get(f"{sites.url('insurer')}/health").status_code == 503


@pytest.mark.slow
def test_metrics_count_rows_and_name_no_one(stand):
    _sites, threads, _ = stand()
    ids = [str(name) for name in ids_of("bank", current("bank")[0])[:5]]
    before = threads.client.get("/metrics").text
    threads.score(ids)
    text = threads.client.get("/metrics").text

    def value(shown, name, **labels):
        families = parser.text_string_to_metric_families(shown)
        samples = (sample for family in families for sample in family.samples)
        return sum(s.value for s in samples if (s.name, s.labels) == (name, labels))

    name = "fedapp_scored_rows_total"
    assert value(text, name, way="live") - value(before, name, way="live") == 5
    assert value(text, "fedapp_peer_up", peer="insurer") == 1
    assert value(text, "fedapp_score_seconds_count") > value(before, "fedapp_score_seconds_count")
    assert not [one for one in ids if one in text]


# The log


def test_scores_are_in_the_sites_log_and_shown(stand, tmp_path):
    _, threads, _ = stand()
    ids = [str(name) for name in ids_of("bank", current("bank")[0])[:3]]
    scored(threads, ids, purpose="care")
    threads.stop()
    folder = tmp_path / "bank"
    folder.mkdir()
    (folder / "site.toml").write_text('name = "bank"\ndata = "rows.csv"\n')
    (folder / "home").symlink_to(home())
    shown = CliRunner().invoke(site_app, ["log", "--site", str(folder), "--event", "score"])
    assert shown.exit_code == 0
    (line, end) = shown.output.splitlines()
    assert json.loads(line)["purpose"] == "care"
    assert "lines, each as it was written, signed to line" in end
    path = home() / "sites" / "bank" / LOG
    path.write_bytes(path.read_bytes().replace(b"care", b"cure"))
    error = CliRunner().invoke(site_app, ["log", "--site", str(folder)]).exception
    assert isinstance(error, DataError)
    assert "must have every line as it was written, got: line" in str(error)
