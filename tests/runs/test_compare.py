"""Strategies side by side."""

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError
from fedapp.home import display_path, read_toml
from fedapp.report.comparison import (
    Comparison,
    Line,
    best_first,
    score_tables,
    tradeoff_page,
)
from fedapp.report.progress import QUIET
from fedapp.report.summary import fact_grid
from fedapp.run_folder import RunFolder, read_run
from fedapp.runs.compare import carry_out
from fedapp.runs.run_groups import Compared
from fedapp.runs.tables import natural_parties
from fedapp.settings import load_settings

SHORT = {"num-boost-round": 2, "max-depth": 2, "max-bin": 16}


def test_a_comparison_has_the_baselines_and_each_method_the_settings_that_it_reads(
    write_table, tmp_path
):
    given = {"max_depth": 2, "n_estimators": 2, "parties": 2, "max-bin": 16, "align": "ordered"}
    given |= {"data": str(write_table(n_rows=120)), "label": "y"}
    methods = ["pax", "federated-forest"]
    _, found = carry_out(methods, given, 1, "local", QUIET, tmp_path / "out")
    rows = {f"party-{number}'s rows alone, XGBoost" for number in (1, 2)}
    columns = {"party-1's columns alone, forest"}
    pooled = {"pooled XGBoost", "pooled forest (scikit-learn)"}
    assert {line.name for line in found.lines} == {*methods, *rows, *columns, *pooled}
    means = [line.mean for line in found.lines]
    assert means == sorted(means, reverse=True)
    assert found.methods == {"rows": ("pax",), "columns": ("federated-forest",)}
    assert found.n_rows == {"train": 86, "valid": 10, "test": 24}
    runs = {name: read_run(tmp_path / "out" / f"{name}-42") for name in methods}
    lines = {line.name: line for line in found.lines}
    for name, run in runs.items():
        assert lines[name].mean == run.summary["metrics"]["test"]["auc"]
        assert lines[name].n_bytes == sum(run.summary["bytes"].values())
    spans = found.differences["pax"]
    assert set(spans) == set(lines) - {"pax"}  # divided parts are all here
    for other, (value, low, high) in spans.items():
        assert low <= value <= high
        assert value == pytest.approx(lines["pax"].mean - lines[other].mean, abs=0.03)
    pax, forest = (run.settings for run in runs.values())
    assert (pax["max-depth"], pax["num-boost-round"], pax["align"]) == (2, 2, "psi")
    assert (forest["max-depth"], forest["align"]) == (6, "ordered")
    assert forest["num-boost-round"] == "auto"
    assert forest["federated-forest.trees"] == 2
    assert found.facts["settings"] == "label=y, max-bin=16"
    assert found.facts["pax"].startswith("also reads ")
    assert found.facts["pax"].endswith("; does not read align, federated-forest.trees")


def made(n_seeds=1, **more):
    """A comparison of two methods and their baselines."""
    scores = {"pax": 0.97, "secureboost": 0.96, "fedavg-linear": 0.2}
    lines = [Line(name, (score,) * n_seeds, 2.0, 30.0, 1e6) for name, score in scores.items()]
    lines += [Line("pooled XGBoost", (0.965,) * n_seeds)]
    given = {
        "metric": "auc",
        "lines": tuple(sorted(lines, key=lambda line: -line.mean)),
        "data": "rows.csv",
        "objective": "binary:logistic",
        "engine": "local",
        "seeds": tuple(range(42, 42 + n_seeds)),
        "n_parties": 3,
        "n_rows": {"train": 1409, "valid": 46, "test": 114},
        "methods": {"rows": ("pax", "fedavg-linear"), "columns": ("secureboost",)},
        "changed": {"eta": 0.1, "pax.bins": "equal"},
        "unread": {"pax": (), "secureboost": ("pax.bins",), "fedavg-linear": ("eta", "pax.bins")},
    }
    return Comparison(**{**given, **more})


def text_of(*tables):
    console = Console(width=200, file=io.StringIO())
    console.print(*tables)
    return console.file.getvalue()


def test_what_is_compared_stands_with_the_table_and_on_the_page():
    facts = {
        "data": "rows.csv, binary:logistic",
        "rows": "114 test rows score every line; 1,409 train, 46 validate",
        "parties": "3, each with some of the rows (pax, fedavg-linear) or some of the columns "
        "(secureboost)",
        "seeds": "42 (one: no spread is known)",
        "engine": "local",
        "settings": "no others are changed for every method",
        "pax": "also reads eta=0.1, pax.bins=equal",
        "secureboost": "also reads eta=0.1; does not read pax.bins",
        "fedavg-linear": "also reads nothing more; does not read eta, pax.bins",
    }
    assert made().facts == facts
    printed, page = text_of(fact_grid(made().facts)), tradeoff_page(made())
    for value in facts.values():
        assert value in printed
        assert value in page
    assert made(2).facts["seeds"] == "42, 43; ± is the standard deviation over them"
    assert made(changed={}, unread={}).facts["settings"] == "all defaults"
    assert Line("pax", (0.9, 0.7)).spread == pytest.approx(0.2 / np.sqrt(2))


@pytest.mark.parametrize("n_seeds", [2, 5])
def test_equal_methods_differ_in_one_comparison_of_twenty(n_seeds):
    draws = np.random.default_rng(n_seeds).normal(0.8, 0.01, (4000, 2, n_seeds))
    ties = []
    for of_methods in draws:
        scores = {f"m{at}": tuple(of_method.tolist()) for at, of_method in enumerate(of_methods)}
        lines = [Line(name, of_name, 2.0, 30.0, 1e6) for name, of_name in scores.items()]
        found = made(n_seeds, lines=best_first(lines, "auc"))
        ties += [each["ties"] for each in found.records if not each["is_best"]]
    assert 1 - np.mean(ties) == pytest.approx(0.05, abs=0.01)


COST = (2.0, 30.0, 1e6)
ALONE = "rows alone, XGBoost"
AHEAD_OF_ONE = (
    Line("pax", (0.9, 0.8, 0.7), *COST),
    Line("bagging", (0.89, 0.8, 0.69), *COST),
    Line("cyclic", (0.88, 0.77, 0.68), *COST),
    Line("pooled XGBoost", (0.7, 0.9, 0.8)),
)
OF_ONE_RUN = tuple(replace(line, scores=line.scores[:1]) for line in AHEAD_OF_ONE)
PARTIES = tuple(Line(f"p{n}'s {ALONE}", (0.8 - n / 100,), alone=ALONE) for n in range(3))
ROWS = {"pax": {"bagging": (0.01, 0.002, 0.018), "pooled XGBoost": (0.2, -0.1, 0.5)}}
BY_ROWS = ROWS["pax"] | {f"p{n}'s {ALONE}": (0.1, -0.1 if n else 0.05, 0.3) for n in range(3)}
# Lines, differences over test rows, the sentence, and texts of the table of differences.
SHOWN = {
    "several runs": (
        AHEAD_OF_ONE,
        ROWS,
        "By test auc, pax is ahead of cyclic by 0.0233 (0.0090 to 0.0377); no difference is shown "
        "between pax and bagging or pooled XGBoost (95 % intervals over 3 runs).",
        # 0.0067 < 4.303 * 0.0058 / sqrt(3) < 0.0233
        ("-0.0067  -0.0210 to +0.0077  -0.0180 to -0.0020", "-0.0233  -0.0377 to -0.0090  "),
    ),
    "one run, parties alone": (
        (*OF_ONE_RUN[:1], *PARTIES),
        {"pax": BY_ROWS},
        "By test auc, pax is ahead of p0's rows alone (XGBoost) by 0.1000 (0.0500 to 0.3000); no "
        "difference is shown between pax and 2 of 3 parties' rows alone (XGBoost) "
        "(95 % intervals over test rows, of one run).",
        ("-0.3000 to -0.0500",),
    ),
    "behind": (
        (Line("pooled XGBoost", (0.91, 0.92)), Line("pax", (0.90, 0.9101), *COST)),
        {},
        "By test auc, pax is behind pooled XGBoost by 0.0100 (0.0093 to 0.0106) (95 % intervals "
        "over 2 runs).",
        ("ahead",),
    ),
    "one run of divided models": (
        OF_ONE_RUN,
        {},
        "pax has the best test auc; of one run, no interval is known.",
        (),
    ),
}


@pytest.mark.parametrize("case", SHOWN.values(), ids=SHOWN)
def test_page_terminal_and_python_say_what_the_intervals_show(tmp_path, case):
    lines, differences, verdict, texts = case
    found = made(len(lines[0].scores), lines=lines, differences=differences)
    assert found.verdict == verdict
    page, tables = tradeoff_page(found), score_tables(found.records)
    assert verdict.replace("'", "&#39;") in page
    printed = text_of(*tables[1:])
    RunFolder(tmp_path).write_json("comparison.json", found.document)
    of_python = repr(Compared(tmp_path))
    assert verdict in of_python
    for text in texts:
        assert text in printed
        assert text in of_python
        assert all(part in page for part in text.split("  "))
    is_known = "no interval" not in verdict
    assert bool(printed.strip()) == is_known == ("95 % intervals. Over runs" in page)


def test_the_method_of_the_smallest_loss_is_ahead():
    losses = tuple(replace(line, scores=tuple(1 - x for x in line.scores)) for line in AHEAD_OF_ONE)
    verdict = made(3, metric="rmse", lines=losses).verdict
    assert verdict.startswith("By test rmse, pax is ahead of cyclic by 0.0233 (0.0090 to 0.0377); ")


def test_a_comparison_in_a_notebook_is_tables_without_markup_of_names(tmp_path):
    lines = (*made(2).lines, Line("<b>no score</b>", (float("nan"),) * 2))
    RunFolder(tmp_path).write_json("comparison.json", made(2, lines=lines).document)
    compared = Compared(tmp_path)
    assert repr(compared).startswith(f"Compared('{display_path(tmp_path)}')\n")
    html = compared._repr_html_()
    assert html.count("<tr>") == 1 + len(lines) + 1 + len(lines) - 2  # but the best and unscored
    assert "<td>&lt;b&gt;no score&lt;/b&gt;</td>" in html
    assert "less pax" in html


def with_alone(n_parties):
    """Two runs of a method, and the rows of parties alone, the first of which are best."""
    lines = [Line("pax", (0.95, 0.97), *COST, others={"auc": (0.95, 0.97), "logloss": (0.2, 0.3)})]
    for party in range(1, n_parties + 1):
        scores = 0.9 - party / 100, 0.8
        others = {"auc": scores, "logloss": (0.1 * party, 0.5)}
        others |= {"threshold": (0.4, 0.5)} if party > 1 else {}  # not every party chooses one
        lines.append(Line(f"p{party}'s {ALONE}", scores, others=others, alone=ALONE))
    return made(2, lines=lines)


def test_many_parties_alone_are_shown_as_mean_best_and_worst():
    folded = with_alone(6).folded
    mean, names = folded.lines[2], [line.name for line in folded.lines]
    alone = f"p1's {ALONE}, best of 6", f"{ALONE}, mean of 6", f"p6's {ALONE}, worst of 6"
    assert names == ["pax", *alone]
    assert mean.scores == pytest.approx((0.865, 0.8))
    assert mean.others["logloss"] == pytest.approx((0.35, 0.5))
    assert set(mean.others) == {"auc", "logloss"}
    for text in (tradeoff_page(with_alone(6)), text_of(*score_tables(folded.records))):
        assert "p3" not in text
        assert "mean of 6" in text
    assert len(with_alone(4).folded.lines) == 5


TWO = {"data": "a.csv,b.csv", "label": "y", "parties": 2}
LEFT_OVER = r"^partition must deal out all 409 rows that train, because bagging beside secureboost "
REFUSED = [  # words, settings, and the rule
    ("pax secureboost", TWO, "^data must be one table to split, because pax beside secureboost ca"),
    ("bagging secureboost", {"partition": "sizes:100,100,100"}, f"{LEFT_OVER}.*: 109 of them"),
    ("pax", {"test-fraction": 0.0}, r"^test-fraction must leave test rows .* got 0.0$"),
    ("pax bagging pax", {}, "^strategies must be named once each, got pax 2 times; --seeds 2 make"),
    ("pax eini", {}, "strategy must be one that trains"),
    ("pax --engine site", {}, "^--engine must be local or simulation to compare, got site"),
    ("pax --on spark", {}, "^on must be ray, with the local engine, or omitted, got spa"),
    ("pax --on ray --engine simulation", {}, "got ray with engine=simulation"),
    ("pax --folds 3", {"fold": 2}, "^fold must be omitted to compare: --folds runs all .*, got 2$"),
    ("pax --folds 3", {"init-model": "runs/x"}, "^init-model must be empty in a compar"),
    ("pax --seeds 0", {}, "^seeds must be >= 1, got 0"),
]


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(("words", "given", "rule"), REFUSED)
def test_what_cannot_be_compared_is_refused_before_anything_runs(words, given, rule, write_table):
    for name in "ab":
        write_table(name)
    pairs = [f"-c{name}={value}" for name, value in {**SHORT, **given}.items()]
    done = CliRunner().invoke(cli, ["compare", *words.split(), "--output", "out", *pairs])
    with pytest.raises(ConfigError, match=rule):
        raise done.exception
    assert not Path("out").exists()


@pytest.mark.usefixtures("own_folder")
def test_each_value_of_a_column_is_a_party_unless_their_number_is_set(write_table):
    path = str(write_table(n_rows=150, shop=[f"s{row % 5}" for row in range(150)], c=range(150)))
    words = ["run", "pax", "--json", "--data", path, "--label", "y", "-cpartition=column:shop"]
    words += ["-cnum-boost-round=1", "-cmax-depth=2", "-cvalid-fraction=0.2"]
    shown = CliRunner().invoke(cli, words)
    assert "5 parties, one for each value of 'shop'" in shown.stderr
    folder = Path(json.loads(shown.stdout)["folder"])
    summary = json.loads((folder / "summary.json").read_text())
    assert [party["name"] for party in summary["parties"]] == ["s0", "s1", "s2", "s3", "s4"]
    assert read_toml((folder / "config.toml").read_text(), "config")["parties"] == 5
    match = r"^parties must be set where column:c has over 100 values, got 150; parties=10 deals"
    given = {"data": path, "label": "y", "partition": "column:c"}
    with pytest.raises(ConfigError, match=match):
        natural_parties(load_settings(given))
    assert natural_parties(load_settings({**given, "parties": 7})) == 0  # it is set
