"""The command that runs every bench: what it writes, and that it goes on where it was stopped."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from simulations import __main__ as every
from simulations import study
from simulations.bench import exchange, trees

LINE = {
    "bench": "pax_speed",
    "rows": 100,
    "by": ["method", "depth"],
    "lines": [
        {"method": "PAX", "depth": 4, "seconds": 1.5, "/ pooled": 3.0},
        {"method": "XGBoost", "depth": 4, "seconds": 0.5, "/ pooled": None},
    ],
    "versions": {"fedapp": "1"},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Words of the commands that were run; each prints a table and LINE."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[2:])
        is_bad = "serve" in command
        printed = "a table\n" + json.dumps(LINE) + "\n"
        return subprocess.CompletedProcess(command, is_bad, printed, "no port\n" if is_bad else "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(trees, "has_plugin", lambda: False)
    return commands


def test_each_bench_is_a_function_and_names_what_identifies_its_lines() -> None:
    modules = every.by_name(every.BENCH_MODULES)
    assert set(every.BENCHES) <= set(modules)
    for name, module in modules.items():
        function = getattr(importlib.import_module(f"simulations.bench.{module}"), f"{name}_main")
        source = inspect.getsource(function)
        assert ("lines=" in source) == ("by=[" in source), name
        assert '"lines":' not in source or name == "privacy", name


def test_a_figure_is_a_line_and_a_bench_a_table(tmp_path: Path, asked: list[list[str]]) -> None:
    every.bench_main(["--quick", "--only", "pax_speed", "--folder", str(tmp_path)])
    words = ["--repeats", "1", "--without-plugin"]
    assert asked == [["simulations", "bench", "pax_speed", *words]]
    run = {"bench": "pax_speed", "run": " ".join(words)}
    lines = (tmp_path / "pax_speed.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {**run, "of": "", "figure": "rows", "value": 100},
        {**run, "of": "method PAX, depth 4", "figure": "seconds", "value": 1.5},
        {**run, "of": "method PAX, depth 4", "figure": "/ pooled", "value": 3.0},
        {**run, "of": "method XGBoost, depth 4", "figure": "seconds", "value": 0.5},
    ]
    assert (tmp_path / "pax_speed.md").read_text().splitlines()[2:] == [
        "| run | method | depth | seconds | / pooled |",
        "| --- | --- | --- | --- | --- |",
        f"| {run['run']} | PAX | 4 | 1.5 | 3 |",
        f"| {run['run']} | XGBoost | 4 | 0.5 |  |",
    ]
    assert "a table" in (tmp_path / "pax_speed.txt").read_text()


def test_lines_of_one_run_are_told_apart() -> None:
    line = {"bench": "rows", "method": "psi", "rows": 10, "seconds": {"total": 2.0}, "auc": None}
    (found,) = every.figures("", line, every.BENCHES["rows"].by)
    assert found["of"] == "method psi, rows 10"
    assert (found["figure"], found["value"]) == ("seconds, total", 2.0)


def test_a_run_without_lines_is_a_column(asked: list[list[str]]) -> None:
    runs = [("--a", {"bench": "x", "seconds": {"train": 2}}), ("--b", {"seconds": {"train": 3}})]
    assert every.bench_table("x", runs).splitlines()[2:] == [
        "| figure | --a | --b |",
        "| --- | --- | --- |",
        "| seconds, train | 2 | 3 |",
    ]


def test_what_has_finished_is_not_run_again_and_a_failure_ends_in_status_1(
    tmp_path: Path, asked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--only", "serve", "pax_secure", "--folder", str(tmp_path)]
    for n_runs in (3, 4):  # two of pax_secure, once; serve, which fails, each time
        with pytest.raises(SystemExit, match=r"failed: serve; NAME\.txt says why"):
            every.bench_main(["--full", *words])
        assert len(asked) == n_runs
    assert "failed: no port" in capsys.readouterr().out
    assert not (tmp_path / "serve.jsonl").exists()
    with pytest.raises(SystemExit):
        every.bench_main(["--quick", *words])
    assert asked[5][2:4] == ["pax_secure", "--rows"]  # other words: run again


def test_a_line_tells_its_bench_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    study.print_line("x", ("numpy",), seconds=1.0)
    told = json.loads(capsys.readouterr().out)
    assert (told["bench"], told["seconds"], list(told["versions"])) == ("x", 1.0, ["numpy"])


def test_growth_is_the_exponent_of_the_number_of_parties() -> None:
    def line(method: str, n: int, seconds: float, n_bytes: int) -> exchange.Line:
        return exchange.Line(method, n, seconds, seconds, 1, 1, n_bytes, 0.5)

    lines = [line("a", 2, 1.0, 8), line("a", 4, 2.0, 32), line("b", 4, 7.0, 1)]
    found = [
        (each["growth of seconds"], each["growth of n_bytes"]) for each in exchange.grown(lines)
    ]
    assert found == [(None, None), (1.0, 2.0), (None, None)]
