"""Benches: small runs of each, what they compare before they time, and the command of all."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from fedapp.data.datasets import read_source
from fedapp.home import app_folder
from fedapp.messages.methods import all_methods
from simulations import __main__ as every
from simulations import batch, reference, study
from simulations.bench import encryption, exchange, faults, multi_output, pax, trees
from simulations.deployment import site_tables
from simulations.options import command
from simulations.passing import Scored
from simulations.study import growth, peak_bytes, pooled_forest


@pytest.fixture
def _short(monkeypatch):
    """Runs of a fraction of a second."""
    small = {"DATA": "breast-cancer", "COPIES": 2, "TREES": 10, "DEPTH": 3, "REPEATS": 1}
    for name, value in small.items():
        monkeypatch.setattr(trees, f"FOREST_{name}", value)
    monkeypatch.setattr(pax, "PRIVATE_DATA", {"breast-cancer": {}})
    for name, value in {"DATA": "breast-cancer", "COLUMNS": (15, 15), "N_TREES": 3}.items():
        monkeypatch.setattr(encryption, name, value)
    settings = {"strategy": "pax", "num-boost-round": 1, "max-depth": 2, "max-bin": 16}
    for name, value in {"DATA": "breast-cancer", "DEPTHS": (2,), "REPEATS": 1}.items():
        monkeypatch.setattr(pax, f"SPEED_{name}", value)
    monkeypatch.setattr(pax, "WORST_AUC_DIFFERENCE", 0.05)  # of 190 test rows
    monkeypatch.setattr(trees, "SPLIT", {"pax, share": trees.Table(300, 6, (2, 4), settings)})


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
        encryption.secureboost,
        "--key-bits 512 --checked-trees 1",
        lambda lines: (
            lines[-1]["nodes_as_xgboost"]["3 trees of depth 3"] > 20 and lines[-1]["repeats"] == 1
        ),
    ),
    (
        multi_output.multi_output,
        "--quick --classes 4 --key-bits 512",
        lambda lines: lines[-1]["strategy"] == "multi_output_tree" and lines[-1]["nodes"] > 20,
    ),
    (
        trees.parties,
        "--only 'pax, share'",
        lambda lines: [line.get("growth of bytes", 0) > 0.5 for line in lines] == [False, True],
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


def test_options_follow_from_a_signature(capsys):
    def bench(*names, rows=10, first=0, eta=0.5, quick=False, sets=("a",), output=Path("x")):
        return names, rows, first, eta, quick, sets, output

    assert command(bench, []) == ((), 10, 0, 0.5, False, ("a",), Path("x"))
    words = shlex.split("b c --rows 2 --first 0 --eta 1 --quick --sets d e --output y")
    found = command(bench, words)
    assert found == (("b", "c"), 2, 0, 1.0, True, ("d", "e"), Path("y"))
    for wrong in ("--rows 0", "--rows x", "--first -1"):
        with pytest.raises(SystemExit):
            command(bench, wrong.split())
    assert "argument --rows: must be a whole number >= 1, got 0" in capsys.readouterr().err


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


def test_a_table_has_an_empty_cell_for_what_a_row_lacks(capsys):
    rows = [{"data": "a", "auc": 0.51234, "bytes": 2_500_000}, {"data": "b", "auc": None}]
    study.show("scores", rows, "data; AUC=auc:.3f; MB=mb:.1f")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["scores"], ["data", "AUC", "MB"], ["a", "0.512", "2.5"], ["b"]]


def test_growth_is_an_exponent_of_figures_that_both_rows_have():
    before = {"rows": 10, "seconds": 1.0, "bytes": 5, "peak_bytes": {"bank": 7}}
    row = {"rows": 100, "seconds": 100.0, "bytes": 50, "peak_bytes": {"bank": 9}}
    found = growth(before, row, "rows", ("seconds", "bytes", "peak_bytes", "cpu"))
    assert found == {"growth of seconds": pytest.approx(2), "growth of bytes": pytest.approx(1)}
    assert growth({}, row, "rows", ("seconds",)) == {}


# Every bench


LINE = {"bench": "pax_speed", "rows": 100, "versions": {"fedapp": "1"}}


@pytest.fixture
def asked(monkeypatch):
    """Words of the commands that were run; each prints a table and LINE."""
    commands = []

    def run(words, **_):
        commands.append(words[2:])
        is_bad = "score" in words
        printed = "a table\n" + json.dumps(LINE) + "\n"
        return subprocess.CompletedProcess(words, is_bad, printed, "no port\n" if is_bad else "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_lines_of_a_bench_have_its_arguments(tmp_path, asked):
    batch.bench(quick=True, only=("pax_speed",), folder=str(tmp_path))
    words = ["--repeats", "1"]
    assert asked == [["simulations", "bench", "pax_speed", *words]]
    (line,) = (tmp_path / "pax_speed.jsonl").read_text().splitlines()
    assert json.loads(line) == {"run": " ".join(words), **LINE}
    assert "a table" in (tmp_path / "pax_speed.txt").read_text()


def test_what_has_finished_is_not_run_again_and_a_failure_ends_in_status_1(tmp_path, asked, capsys):
    only = ("score", "pax_secure")
    for n_runs in (3, 4):  # two of pax_secure, once; score, which fails, each time
        with pytest.raises(SystemExit, match=r"failed: score; NAME\.txt says why"):
            batch.bench(full=True, only=only, folder=str(tmp_path))
        assert len(asked) == n_runs
    assert "failed: no port" in capsys.readouterr().out
    assert not (tmp_path / "score.jsonl").exists()
    with pytest.raises(SystemExit):
        batch.bench(quick=True, only=only, folder=str(tmp_path))
    assert asked[5][2:4] == ["pax_secure", "--rows"]  # other words: run again


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "python -m simulations must be called with one of"),
        (["bench", "nothing"], "  papers pax fedxgbllr"),
        (["bench"], "bench must be called with --quick or --full, or with the name of one"),
        (["bench", "--quick", "--only", "x"], "only must be of pax_speed, "),
        (["reference"], "reference must be called with --write FILE or --check FILE"),
        (["bench", "rows", "--methods", "lasso"], "methods must be of secureboost, "),
        (["bench", "federated_forest", "--align", "x"], "align must be of ordered, psi, got 'x'"),
        (["bench", "rows", "--parties", "3"], "--parties and --columns must be 2 and 20 but for"),
    ],
)
def test_a_command_that_cannot_be_run_says_why(words, expected):
    with pytest.raises(SystemExit) as ended:
        every.main(words)
    assert expected in str(ended.value.code)


@pytest.mark.parametrize("name", ["", *batch.BENCHES])
def test_every_bench_describes_itself_and_its_options(name, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        every.main(["bench", *filter(None, [name]), "--help"])
    assert f"usage: python -m simulations bench {name}".strip() in capsys.readouterr().out


def test_help_shows_all_studies_and_defaults_as_they_are_typed(capsys):
    every.main(["--help"])
    shown = capsys.readouterr().out.split()
    assert {"reference", *(name for _, name in every.PLACES if name)} <= {*shown}
    usual = "by default 'pax, share' 'pax, equal' secureboost"
    rows = ("bench parties", usual), ("attacks", "--only"), ("attacks solved_bins", "--seeds")
    for words, option in rows:
        with pytest.raises(SystemExit):
            every.main([*words.split(), "--help"])
        out = " ".join(capsys.readouterr().out.split())
        assert option in out
        assert ("--only" in out) == (words != "attacks solved_bins")  # of which there is one


def test_a_line_tells_its_bench_commit_and_versions(capsys):
    study.print_line("x", seconds=1.0)
    told = json.loads(capsys.readouterr().out)
    assert (told["bench"], told["seconds"], list(told["versions"])) == ("x", 1.0, [*study.PACKAGES])
    assert told.items() >= {**study.provenance(), "load": told["load"]}.items()
    head = ["git", "-C", str(app_folder()), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    assert told["commit"].removesuffix("-dirty") == (commit or "unknown")


# Reference digests


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


def test_every_method_has_a_plan_and_every_way_to_predict():
    planned = {str(plan.settings["strategy"]) for plan in reference.PLANS.values()}
    planned |= {way for plan in reference.PLANS.values() for way in plan.inferences}
    assert planned == {
        name for name, method in all_methods().items() if method.trains or method.predicts
    }


def test_a_digest_leaves_out_what_a_run_draws_and_nothing_else(tmp_path):
    def digest(**document):
        (tmp_path / "part.json").write_text(json.dumps(document))
        return reference.digest_of(tmp_path / "part.json")

    assert digest(records=[1], salt="a") == digest(records=[1], salt="b")
    assert digest(records=[1]) != digest(records=[2])


# What the benches compare


def test_a_table_is_the_same_in_one_place_and_at_the_sites(tmp_path):
    whole = study.random_table(40, 20)
    for by_columns, n_columns, labelled in ((True, [12, 11], 1), (False, [22, 22], 2)):
        nodes = site_tables(tmp_path, whole, trees.ROWS_SITES, "label", by_columns)
        tables = [pq.read_table(nodes[name]["data"]) for name in trees.ROWS_SITES]
        assert [len(table.column_names) for table in tables] == n_columns
        assert sum(bool(node["label"]) for node in nodes.values()) == labelled
        for name in whole.column_names:
            parts = [table[name].to_numpy() for table in tables if name in table.column_names]
            joined = parts[0] if by_columns else np.concatenate(parts)
            np.testing.assert_array_equal(joined, whole[name].to_numpy())


def test_a_peak_is_that_of_the_largest_process_of_a_family():
    mine, gone = psutil.Process(), psutil.Process()
    gone._pid = 2**22 + 1  # no process has this number
    with trees.peaks_of(lambda: {"bank": [gone, mine], "insurer": [gone]}) as peaks:
        pass
    assert peak_bytes() / 2 < peaks["bank"] < 2 * peak_bytes()
    assert [*peaks] == ["bank"]


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


def test_scores_are_those_of_sklearn():
    found = Scored(np.array([[0.1], [3], [-2]], np.float32), np.array([0, 1, 0], np.float32))
    assert pax.test_score(found, True) == ("auc", 1.0)
    name, value = pax.test_score(found, False)
    assert (name, value) == ("rmse", pytest.approx(np.sqrt((0.01 + 4 + 4) / 3)))


# Faults


def test_the_first_line_that_names_a_fault_is_found_and_a_wrong_cause(tmp_path):
    scene = SimpleNamespace(output=tmp_path / "run.txt", log=lambda name: tmp_path / f"{name}.log")
    logs = [tmp_path / f"{name}.log" for name in (faults.COORDINATOR, *exchange.SITES)]
    for path in (scene.output, *logs):
        path.write_text("1T2Z ERROR bank before\n")
    witness = faults.Witness(scene, r"\bbank\b")
    with logs[1].open("a") as file:
        print("1T3Z INFO bank worker: quiet\n    bank: a line of a traceback", file=file)
        file.flush()
        witness.look()
        assert (witness.line, witness.seconds) == ("", None)
        print("1T4Z ERROR bank worker: no room\n1T5Z ERROR bank worker: later", file=file)
    with scene.output.open("a") as file:
        print(
            "bank's clock is 40 s ahead; Flower refuses a site whose clock is 5 s ahead", file=file
        )
        file.write("shop's clock is")  # a line of which the rest is not written yet
    witness.look()
    assert witness.seconds is not None
    assert "bank's clock is" in witness.wrong
    assert witness.line == witness.wrong
