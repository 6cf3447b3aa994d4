"""Benches: small runs, what they compare before they time, the command of all; example apps."""

import importlib
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from clients import shards
from fedapp import cluster
from fedapp.data.datasets import read_source
from fedapp.messages.methods import all_methods
from fedapp.runs.flower import superlink
from fedapp.runs.local import LocalGrid
from fedapp.site.certificates import days_left
from simulations import __main__ as every
from simulations import reference, study
from simulations.bench import cluster as clusters
from simulations.bench import faults, faults_of_runs, pax, trees
from simulations.study import command, pooled_forest
from tests.deploy_folders import init_federation


@pytest.fixture
def _short(monkeypatch):
    """Runs of a fraction of a second."""
    small = {"DATA": "breast-cancer", "COPIES": 2, "TREES": 10, "DEPTH": 3, "REPEATS": 1}
    for name, value in small.items():
        monkeypatch.setattr(trees, f"FOREST_{name}", value)
    monkeypatch.setattr(pax, "PRIVATE_DATA", {"breast-cancer": {}})
    for name, value in {"DATA": "breast-cancer", "COLUMNS": (15, 15), "TREES": 3}.items():
        monkeypatch.setattr(trees, f"BOOSTED_{name}", value)
    settings = {"strategy": "pax", "num-boost-round": 1, "max-depth": 2, "max-bin": 16}
    for name, value in {"DATA": "breast-cancer", "DEPTHS": (2,), "REPEATS": 1}.items():
        monkeypatch.setattr(pax, f"SPEED_{name}", value)
    monkeypatch.setattr(pax, "WORST_AUC_DIFFERENCE", 0.05)  # of 190 test rows
    monkeypatch.setattr(trees, "SPLIT", {"pax, share": (300, 6, (2, 4), settings)})


# Arguments of a small run, and what its lines say.
RUNS = [
    (
        pax.pax_secure,
        "--rows 300 --columns 5 --parties 2 --trees 3 --repeats 1",
        lambda lines: lines[-1]["sums"] == "secure" and lines[-1]["ratio of bytes_a_tree"] > 1,
    ),
    (
        pax.pax_speed,
        "--repeats 1",
        lambda lines: (
            [line["method"] for line in lines] == ["XGBoost, pooled", "PAX, share", "PAX, equal"]
            and all(line["same_nodes"] > 20 and line["auc"] > 0.9 for line in lines)
            and min(line["ratio of seconds"] for line in lines[1:]) > 0
        ),
    ),
    (
        pax.pax_floor,
        "--data breast-cancer --aggregation plain --rounds 1 --parties 2",
        lambda lines: lines[-1]["least_bin_rows"] == 20 and 0.5 < lines[-1]["auc"] < 1,
    ),
    (
        pax.privacy,
        "--data breast-cancer --epsilons 8 --seeds 2 --rounds 2 --depth 2",
        lambda lines: (
            [line["epsilon"] for line in lines] == [0, 8, 1000]
            and lines[-1]["deviation"] is not None
        ),
    ),
    (
        trees.federated_forest,
        "--max-bin 64 --align psi",
        lambda lines: lines[-1]["nodes_as_pooled"] > 50 and lines[-1]["rows"] == 2 * 569,
    ),
    (
        trees.secureboost,
        "--key-bits 512 --checked-trees 1",
        lambda lines: (
            lines[-1]["nodes_as_xgboost"]["3 trees of depth 3"] > 20 and lines[-1]["repeats"] == 1
        ),
    ),
    (
        trees.parties,
        "--only 'pax, share'",
        lambda lines: [line.get("growth of bytes", 0) > 0.5 for line in lines] == [False, True],
    ),
    (
        clusters.site_cluster,
        "--vertical-rows 200 --pax-rows 2000 --key-bits 512 --repeats 1",
        lambda lines: (
            [line["place"] for line in lines[:3]] == ["this machine", "a Ray node", "two Ray nodes"]
            and len(lines) == 9
            and all(0 < line["spread"] < 1 and line["cpu_seconds"] > 0 for line in lines)
        ),
    ),
    (
        clusters.site_rows,
        "--rows 2000 4000 --columns 4 --trees 1 --like 100000000",
        lambda lines: (
            [line["stage"] for line in lines[:4]] == ["read", "sketch", "rounds", "predict"]
            and [line["rows"] for line in lines[::4]] == [2000, 4000, 10**8]
        ),
    ),
]


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize(
    ("bench", "words", "holds"), RUNS, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_small_run_measures_what_its_reference_confirms(bench, words, holds, tmp_path):
    lines = command(bench, shlex.split(words))
    lines = lines.lines() if isinstance(lines, study.Bench) else lines
    found = list(lines) if isinstance(lines, Iterator) else [lines]
    json.dumps(found)
    assert holds(found), found
    assert not list((tmp_path / "home" / "sites").glob("*/*/"))


def test_a_bench_compares_first_and_has_medians_and_their_ratios():
    calls = []
    seconds = iter([99, 99, 1, 9, 2, 3, 8, 4])

    def measure(method):
        calls.append(method)
        return {"seconds": next(seconds), "auc": 0.5, "cpu_seconds": None}

    theirs, ours = study.Bench(
        reference=lambda: {"nodes": len(calls)},
        cases=[{"method": "theirs"}, {"method": "ours"}],
        measure=measure,
        repeats=3,
        base={"method": "theirs"},
    ).lines()
    assert calls == ["theirs", "ours"] * 4
    assert (theirs["nodes"], theirs["seconds"], "ratio of seconds" in theirs) == (0, 2, False)
    assert (ours["seconds"], ours["ratio of seconds"], ours["repeats"]) == (4, 2, 3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "python -m simulations must be called with one of"),
        (["bench", "nothing"], "  papers pax fedxgbllr"),
        (["reference"], "reference must be called with --write FILE or --check FILE"),
        (["bench", "rows", "--methods", "lasso"], "methods must be of secureboost, "),
        (
            ["bench", "site_rows", "--rows", "9" * 15],
            "rows must be few enough for the disk of TMPD",
        ),
        (["bench", "rows", "--parties", "3"], "--parties and --columns must be 2 and 20 but for"),
    ],
)
def test_a_command_that_cannot_be_run_says_why(words, expected):
    with pytest.raises(SystemExit) as ended:
        every.main(words)
    assert expected in str(ended.value.code)


def test_a_command_ends_with_its_line_and_another_digest_is_named(tmp_path, capsys):
    path = tmp_path / "reference.json"
    every.main(["reference", "--only", "cyclic", "--write", str(path)])
    last = capsys.readouterr().err.splitlines()[-1]
    form = r"Date: \d{4}-\d\d-\d\d. Commit: \S+. Machine: \d+ cores, load \S+ to \S+ \(.* s, .*\)."
    assert re.fullmatch(form, last)
    written = json.loads(path.read_text())
    assert {*written} == {f"cyclic: {what}" for what in ("model", "exchanges", "predictions")}
    assert reference.differences(written, written) == []
    model = written.pop("cyclic: model")
    assert reference.differences({"cyclic: model": model, **written}, written) == [
        f"cyclic: model must be {model}, got None"
    ]
    path.write_text(json.dumps({**written, "cyclic: model": "0" * 32}))
    rule = f"^cyclic: model must be {'0' * 32}, got {model}$"
    with pytest.raises(SystemExit, match=rule):
        command(reference.reference, ["--only", "cyclic", "--check", str(path)])


def test_every_fault_can_be_passed_to_the_process_whose_deployment_it_disturbs():
    assert {fault.method for fault in faults.FAULTS} == {*faults.LANES}
    for fault in faults.FAULTS:
        assert pickle.loads(pickle.dumps(fault)).name == fault.name
        assert fault.method == faults.STANDING or fault.phase in faults_of_runs.PHASES


def test_certificates_are_expired_until_they_are_renewed(tmp_path):
    folder, _ = init_federation(tmp_path)
    is_ours = {"kill": lambda *_: None, "wait_until_listening": lambda: None}
    with ExitStack() as undo:
        faults_of_runs.expired(SimpleNamespace(coordinator=folder, **is_ours), undo)
        assert days_left(folder / "server.crt") <= 0
    assert days_left(folder / "server.crt") > 365


def test_every_method_has_a_plan_and_every_way_to_predict():
    planned = {str(plan.settings["strategy"]) for plan in reference.PLANS.values()}
    planned |= {way for plan in reference.PLANS.values() for way in plan.inferences}
    assert planned == {
        name for name, method in all_methods().items() if method.trains or method.predicts
    }


@pytest.mark.slow  # by default: SecureBoost, in tests/runs/test_cluster.py
@pytest.mark.parametrize("plan", reference.PLANS)
def test_every_method_computes_at_two_ray_nodes_what_it_computes_here(plan, two_nodes, monkeypatch):
    expected = dict(reference.computed(plan))
    monkeypatch.setenv("RAY_ADDRESS", two_nodes)
    monkeypatch.setattr(cluster, "PROBE_SECONDS", 0)
    monkeypatch.setattr(shards, "FEWEST_CODES", 0)
    assert dict(reference.computed(plan)) == expected


def test_the_forest_is_that_of_the_joined_table_and_another_is_refused(tmp_path):
    values = np.random.default_rng(0).normal(size=(80, 3)).astype(np.float32)
    labels, ones = (values[:, 0] > values[:, 1]).astype(np.float32), np.ones(80, np.float32)
    path = tmp_path / "rows.parquet"
    study.write_rows(path, read_source("breast-cancer"), np.arange(80))
    settings = trees.forest_settings(path, trees.EXACT, "ordered", keeps_model=True)
    pooled, _, _ = pooled_forest(settings, ("a", "b", "c"), values, labels, ones)
    assert trees.check_same(pooled, pooled) == sum(map(len, pooled.trees)) > len(pooled.trees)
    for changed in ("threshold", "left"):
        grown = [tree.copy() for tree in pooled.trees]
        grown[4][changed][0] += 1
        rule = "trees must be those of the joined table, got another tree 4"
        with pytest.raises(ValueError, match=rule):
            trees.check_same(pooled, replace(pooled, trees=tuple(grown)))
    others = *pooled.values[:-1], pooled.values[-1] + 0.5
    with pytest.raises(ValueError, match=f"got another tree {len(others) - 1}"):
        trees.check_same(pooled, replace(pooled, values=others))


# Example apps

EXAMPLES = Path(__file__).parents[2] / "simulations" / "examples"
APPS = {"pax": 3, "secureboost": 2}


@pytest.mark.parametrize("name", ["pax", pytest.param("secureboost", marks=pytest.mark.slow)])
def test_an_example_trains_on_its_own_tables(name, capsys):
    app, n_parties = importlib.import_module(f"simulations.examples.{name}.app"), APPS[name]
    nodes = ({"partition-id": each, "num-partitions": n_parties} for each in range(n_parties))
    contexts = [
        Context(run_id=0, node_id=number, node_config=node, state=RecordDict(), run_config={})
        for number, node in enumerate(nodes, start=2)
    ]
    grid = LocalGrid(contexts, app.client)
    run = Context(0, 0, {}, RecordDict(), {"rounds": 2})
    try:
        app.server(grid, run)
    finally:
        grid.close()
    printed = capsys.readouterr().out
    assert "'round': 2" in printed
    assert "'test_auc': 0.9" in printed


@pytest.mark.slow
@pytest.mark.parametrize("name", APPS)
def test_flwr_run_takes_an_examples_folder(name, tmp_path):
    with superlink() as link:
        lines = f'[superlink.here]\naddress = "{link.host}"\ninsecure = true\n'
        (tmp_path / "config.toml").write_text(lines)
        flwr = str(Path(sys.executable).with_name("flwr"))
        words = [flwr, "run", str(EXAMPLES / name), "here", "--stream"]
        words += ["--run-config", "rounds=2", "--federation-config", "num-supernodes=2"]
        environment = {**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"}
        ran = subprocess.run(
            words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert "'test_auc': 0.9" in ran.stdout + ran.stderr, ran.stdout + ran.stderr


@pytest.mark.slow
def test_memory_of_a_site_does_not_grow_with_its_rows():
    sizes = 1_200_000, 3_600_000
    few, many = (
        {line["stage"]: line["anonymous_bytes"] for line in clusters.memory_of(n_rows, 3, 1, 0.005)}
        for n_rows in sizes
    )
    # Of XGBoost's sketch there is a column at a time in memory, about 20 bytes a row.
    growth = {stage: (many[stage] - few[stage]) / (sizes[1] - sizes[0]) for stage in few}
    assert growth.pop("sketch") < 35
    assert max(growth.values()) < 6, growth
