"""A Ray cluster: two of Ray's nodes on this machine."""

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from clients import shards
from fedapp import cluster
from fedapp.crypto import paillier, sums
from fedapp.errors import ClusterError, ConfigError, FedappError
from fedapp.home import home
from fedapp.report.progress import QUIET
from fedapp.run_folder import CHECKPOINT
from fedapp.runs import session
from fedapp.runs.compare import carry_out
from fedapp.runs.flower import free_ports, run_simulation
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.runs.run_groups import BEST, read_trials
from fedapp.runs.tune import Tuning
from simulations.ray_nodes import started
from tests.federated import model_bytes
from tests.network import resumed
from tests.ray_nodes import end, number_and_process


@pytest.mark.slow
def test_what_two_nodes_make_is_what_one_process_makes(
    settings, write_table, tmp_path, monkeypatch, two_nodes
):
    """Parties of a run, runs of a comparison, and trials of a search."""
    monkeypatch.chdir(tmp_path)
    data = str(write_table(n_rows=80).relative_to(tmp_path))
    given = {"data": data, "label": "y", "num-boost-round": 2}
    run = settings(data=data, label="y", parties=4, num_boost_round=2)
    expected = model_bytes(run_local(run))
    cells = ["pax", "bagging"], {**given, "max-depth": 2}, 2
    carry_out(*cells, "local", QUIET, tmp_path / "here")

    def search(on):
        how = {"runs": 3, "output": tmp_path / f"search{on}", "on": on}
        folder = Tuning("pax", given, {"max-depth": "int:1:4"}, **how).carry_out()
        assert not list(folder.path.glob("trial-*"))
        trials = [replace(trial, seconds=0.0) for trial in read_trials(folder.path)]
        return trials, (folder.path / BEST / "model.json").read_bytes()

    searched = search("")
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    folder = run_simulation(run.model_copy(update={"run_dir": str(tmp_path / "run")}))
    assert model_bytes(folder) == expected
    with monkeypatch.context() as patch:
        patch.setattr(session, "carry_out", pytest.fail)
        carry_out(*cells, "local", QUIET, there := tmp_path / "there", "ray")
    models = sorted(path.relative_to("here") for path in Path("here").rglob("model.json"))
    assert len(models) == 4
    for model in models:
        assert (there / model).read_bytes() == (tmp_path / "here" / model).read_bytes()
    assert search("ray") == searched


@pytest.mark.slow
def test_a_node_without_what_a_run_needs_is_named(tmp_path, monkeypatch, two_nodes):
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    with cluster.connected() as ray:
        cluster.check_nodes(ray, [home(), tmp_path], [])
        absent = tmp_path / "absent.csv"
        rule = rf"^Ray's node [0-9.]+ \(\w+\) must see {absent} of this machine; put "
        with pytest.raises(ConfigError, match=rule):
            cluster.check_nodes(ray, [home()], [absent])
        monkeypatch.setattr(cluster, "versions", lambda _: {"numpy": "0.1"})
        with pytest.raises(ConfigError, match=r"must have numpy 0\.1, got [0-9.]+$"):
            cluster.check_nodes(ray, [home()], [])


def test_an_address_where_no_cluster_answers_is_refused(monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    rule = f"^RAY_ADDRESS must be a Ray cluster .* is a node, got 127.0.0.1:{port}: .*; ray start "
    with pytest.raises(ConfigError, match=rule), cluster.connected():
        pass


@pytest.fixture
def workers(two_nodes, monkeypatch):
    """The workers of a cluster, to which every call goes that is not done at once."""
    monkeypatch.setattr(cluster, "PROBE_SECONDS", 0)
    monkeypatch.setattr(cluster, "TASK_SECONDS", 0.01)
    workers = cluster.workers_at(two_nodes)
    yield workers
    workers.close()


def test_calls_are_shared_with_two_nodes_in_order_with_errors_and_dead_processes(workers, tmp_path):
    mark = tmp_path / "killed"

    def processes(*numbers):
        calls = [(number, os.getpid(), mark) for number in numbers]
        shared = workers.run(number_and_process, calls)
        assert tuple(number for number, _ in shared) == numbers
        return {process for _, process in shared}

    assert any(len(processes(*range(0, -24, -1))) == 3 for _ in range(60))
    with pytest.raises(ValueError, match=r"^number must not be 1, got 1$"):
        processes(*range(-12, 2))
    assert any(processes(0, 0, 0, 2) and mark.exists() for _ in range(60))
    assert processes() == set()


def test_secureboost_on_two_nodes_is_secureboost_here(vertical, monkeypatch, two_nodes, workers):
    """This process waits until the others have work, else it may do a function's calls alone."""
    given = {"data": "breast-cancer", "max_depth": 2, "num_boost_round": 1}
    expected = model_bytes(run_local(vertical(**given)))
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    lent, packed, work = defaultdict(Event), workers._packed, cluster._Queue.work
    monkeypatch.setattr(cluster._Queue, "work", lambda shared: lent[shared].wait() and work(shared))

    def noted(shared, indices):
        lent[shared].set()
        return packed(shared, indices)

    monkeypatch.setattr(workers, "_packed", noted)
    monkeypatch.setattr(sums, "FEWEST_ROWS", 32)
    assert model_bytes(run_local(vertical(**given))) == expected
    functions = {paillier._encrypt, paillier._decrypt, sums._sum_rows_of, sums._pack}
    assert functions <= {shared.function for shared in lent if lent[shared].is_set()}


@pytest.mark.slow
def test_a_node_lost_in_the_middle_of_a_tree_changes_nothing(vertical, monkeypatch):
    monkeypatch.setattr(cluster, "PROBE_SECONDS", 0)
    monkeypatch.setattr(sums, "FEWEST_ROWS", 32)
    expected = model_bytes(run_local(vertical(data="breast-cancer")))
    with started() as (address, (_, node)):
        workers = cluster.workers_at(address)
        packed = workers._packed

        def noted(shared, indices):
            sent = packed(shared, indices)
            if shared.function is sums._sum_rows_of and node.poll() is None:
                end(node)
            return sent

        monkeypatch.setattr(workers, "_packed", noted)
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert model_bytes(run_local(vertical(data="breast-cancer"))) == expected
        assert node.poll() is not None
        workers.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["secureboost", "shards"])
def test_a_run_whose_cluster_loses_its_head_fails_at_once_and_is_resumed(made, monkeypatch, kind):
    """The process lives, though Ray ends all that are part of the cluster."""
    more = {"num_boost_round": 4}
    owner, asked = (shards.Shards, "sums"), shards.Shards.sums
    if kind == "secureboost":
        more["strategy"] = kind
        owner, asked = (cluster.RayWorkers, "_packed"), cluster.RayWorkers._packed
    expected = model_bytes(run_local(made(**more)))
    monkeypatch.setattr(cluster, "PROBE_SECONDS", 0)
    monkeypatch.setattr(shards, "FEWEST_CODES", 0)
    run = made(**more)
    with started() as (address, (head, _)):
        workers = cluster.workers_at(address)

        def lost(*given):
            if (Path(run.run_dir) / CHECKPOINT).exists() and head.poll() is None:
                end(head)
                assert workers._is_left.wait(15)
            return asked(*given)

        monkeypatch.setattr(*owner, lost)
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(FedappError, match=r"workers must be a Ray cluster .* resumes the run$"):
            run_local(run)
        monkeypatch.delenv("RAY_ADDRESS")
        assert model_bytes(run_local(resumed(run), simulated_contexts(run))) == expected


def test_a_site_is_warned_of_a_network_that_could_read_its_keys(settings, three, workers):
    """The second node has the address of another machine."""
    folder = run_local(settings(num_boost_round=1), three(bank={"workers": workers.address}))
    warnings = [text for text in folder.summary["warnings"] if "RAY_USE_TLS=1" in text]
    assert len(warnings) == 1
    assert warnings[0].startswith("bank: keys and gradients go to the site's Ray cluster in clear")


def test_a_site_without_its_cluster_takes_part_in_nothing(settings, three, caplog):
    """Its log has the address, which does not leave it."""
    (port,) = free_ports(1)
    rule = "must be a Ray cluster of which this machine is a node, or ray://HOST:10001"
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(FedappError) as refused:
            run_local(settings(), three(bank={"workers": address}))
        assert str(refused.value).endswith(ClusterError.outside)
        assert f"workers {rule}, got {address}: ConnectionRefused" in caplog.text
