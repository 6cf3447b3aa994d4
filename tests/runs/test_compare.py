"""Strategies side by side."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError, StoppedError
from fedapp.home import display_path, read_toml
from fedapp.messages.fields import Array
from fedapp.messages.methods import all_methods
from fedapp.records.codec import codec_of
from fedapp.report.comparison import (
    Comparison,
    Line,
    best_first,
    difference_table,
    score_table,
    tradeoff_page,
)
from fedapp.report.plots import near_range, tradeoff
from fedapp.report.summary import fact_grid
from fedapp.run_files import read_run
from fedapp.run_folder import RunFolder, Silent
from fedapp.runs.baselines import run_baselines
from fedapp.runs.compare import compare, same_rows
from fedapp.runs.local import run_local
from fedapp.runs.run_groups import Compared
from fedapp.runs.series import default_folder
from fedapp.runs.tables import natural_parties
from fedapp.settings import flatten, load_settings
from fedapp.site.store import Store

SHORT = {"num-boost-round": 2, "max-depth": 2, "max-bin": 16}


class Counted:
    """The local engine, and the runs it made."""

    def __init__(self):
        self.runs = []

    def __call__(self, settings):
        self.runs.append(f"{settings.strategy}-{settings.seed}")
        return run_local(settings)


def compared(output, engine, n_seeds=2, **more):
    return compare(["pax"], {**SHORT, **more}, n_seeds, output, engine)


@pytest.mark.slow
def test_every_seed_is_a_run_and_a_line_is_their_mean(tmp_path):
    engine = Counted()
    found = compared(tmp_path / "out", engine)
    assert engine.runs == ["pax-42", "pax-43"]
    summaries = [
        json.loads((tmp_path / "out" / name / "summary.json").read_text()) for name in engine.runs
    ]
    scores = [summary["metrics"]["test"]["auc"] for summary in summaries]
    pax = next(line for line in found.lines if line.name == "pax")
    assert pax.scores == tuple(scores)
    assert pax.mean == pytest.approx(np.mean(scores))
    assert pax.spread == pytest.approx(abs(scores[0] - scores[1]) / np.sqrt(2))
    assert pax.n_bytes == np.mean([sum(summary["bytes"].values()) for summary in summaries])


def test_the_baselines_stand_beside_and_the_best_is_first(tmp_path):
    found = compared(tmp_path / "out", Counted(), n_seeds=1)
    names = {line.name for line in found.lines}
    alone = {f"party-{number}'s rows alone, XGBoost" for number in (1, 2, 3)}
    assert names == {"pax", "pooled XGBoost", *alone}
    means = [line.mean for line in found.lines]
    assert means == sorted(means, reverse=True)


@pytest.mark.slow
def test_a_smaller_error_is_the_better_one(tmp_path):
    found = compared(
        tmp_path / "out", Counted(), n_seeds=1, data="diabetes", objective="reg:squarederror"
    )
    means = [line.mean for line in found.lines]
    assert found.metric == "rmse"
    assert means == sorted(means)


@pytest.mark.slow
def test_a_finished_cell_is_not_run_again(tmp_path):
    first = compared(tmp_path / "out", Counted(), n_seeds=1)
    engine = Counted()
    again = compared(tmp_path / "out", engine, n_seeds=2)
    assert engine.runs == ["pax-43"]
    line = next(line for line in again.lines if line.name == "pax")
    assert line.scores[0] == next(one for one in first.lines if one.name == "pax").scores[0]


@pytest.mark.slow
def test_an_interrupted_cell_is_run_anew(tmp_path):
    compared(tmp_path / "out", Counted(), n_seeds=1)
    (tmp_path / "out" / "pax-42" / "summary.json").unlink()
    engine = Counted()
    compared(tmp_path / "out", engine, n_seeds=1)
    assert engine.runs == ["pax-42"]


@pytest.mark.slow
def test_a_cell_that_was_stopped_after_a_round_goes_on_to_the_same_model(tmp_path, monkeypatch):
    compared(tmp_path / "whole", Counted(), n_seeds=1, eta=0.1)

    def stopped(settings):
        return run_local(settings, on_round=lambda line: False)

    output, engine = tmp_path / "out", Counted()
    with pytest.raises(StoppedError):
        compare(["pax"], {**SHORT, "eta": 0.1}, 1, output, stopped)
    told = []
    watcher = Silent()
    monkeypatch.setattr(watcher, "tell", told.append)
    compare(["pax"], {**SHORT, "eta": 0.1}, 1, output, engine, watcher=watcher)
    assert told[:2] == ["pax-42: goes on", "pax-42: done"]
    models = [tmp_path / name / "pax-42" / "model.json" for name in ("whole", "out")]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.slow
def test_a_cell_made_before_a_setting_existed_is_taken_where_that_has_its_default(tmp_path):
    output, engine = tmp_path / "out", Counted()
    compared(output, Counted(), n_seeds=1)
    for path in (output / "pax-42" / "made-from.json", output / "compared.json"):
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line for line in lines if "gamma" not in line))
    compared(output, engine, n_seeds=1)
    assert not engine.runs
    with pytest.raises(ConfigError, match=r"^gamma must be 0\.0 as in "):
        compared(output, engine, n_seeds=1, gamma=1.0)


@pytest.mark.slow
def test_a_cell_that_another_process_writes_or_that_is_no_runs_stays(tmp_path):
    output, engine = tmp_path / "out", Counted()
    compared(output, engine, n_seeds=1)
    cell = output / "pax-42"
    (cell / "summary.json").unlink()
    rule = f"^run folder must be free, got one that another process writes: {cell}$"
    with RunFolder(cell).written(), pytest.raises(ConfigError, match=rule):
        compared(output, engine, n_seeds=1)
    (cell / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"^run folder must have a config\.toml, got "):
        compared(output, engine, n_seeds=1)
    assert (cell / "model.json").exists()
    assert engine.runs == ["pax-42"]


@pytest.mark.slow
def test_runs_of_other_settings_are_not_taken_for_these(tmp_path):
    output = tmp_path / "out"
    compared(output, Counted(), n_seeds=1)
    match = f"^eta must be 'auto' as in {output}, got 0.1; delete that folder, or name another$"
    with pytest.raises(ConfigError, match=match):
        compared(output, Counted(), n_seeds=1, eta=0.1)
    with pytest.raises(ConfigError, match=f"^engine must be 'local' as in {output}, got 'simula"):
        compare(["pax"], SHORT, 1, output, Counted(), "simulation")
    (output / "compared.json").unlink()
    match = (
        f"^eta must be 'auto' as in {output}/pax-42, got 0.1; delete that folder, or name another$"
    )
    with pytest.raises(ConfigError, match=match):
        compared(output, Counted(), n_seeds=1, eta=0.1)


def test_a_folder_follows_from_table_settings_and_engine(write_table):
    def folder(engine="local", **more):
        return str(default_folder(load_settings({**SHORT, **more}), engine))

    path = str(write_table("My rows!"))
    first, own = folder(), folder(data=path, label="y")
    assert first.startswith("runs/compare-breast-cancer-")
    assert own.startswith("runs/compare-My-rows--")
    assert folder(strategy="bagging", seed=7) == first
    write_table("My rows!", seed=1)
    others = {folder(engine="simulation"), folder(eta=0.1), folder(data="wine"), folder(parties=2)}
    assert len({first, own, folder(data=path, label="y"), *others}) == 7


def test_a_method_that_is_named_twice_is_refused_with_the_way_to_more_runs(tmp_path):
    match = r"^strategies must be named once each, got pax 2 times; --seeds 2 makes 2 runs of every"
    with pytest.raises(ConfigError, match=match):
        compare(["pax", "bagging", "pax"], SHORT, 1, tmp_path / "out", Counted())
    assert not (tmp_path / "out").exists()


# The table and the page


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_spread_over_one_seed_is_a_dash():
    assert np.isnan(Line("pax", (0.9,)).spread)
    one, several = text_of(score_table(made().records)), text_of(score_table(made(2).records))
    assert "0.0000" not in one
    assert one.count("–") == 4  # noqa: RUF001
    assert several.count("0.0000") == 4
    assert "0.0000" not in tradeoff_page(made())


@pytest.mark.slow
def test_the_page_and_the_table_hold_every_line(tmp_path):
    found = compared(tmp_path / "out", Counted(), n_seeds=1)
    page = tradeoff_page(found)
    for line in found.lines:
        assert line.name.replace("'", "&#39;") in page
        assert f"{line.mean:.4f}" in page
    assert page.count("<svg ") == page.count('role="img" aria-label="Test auc') == 4
    assert score_table(found.records).row_count == len(found.lines)


@pytest.mark.parametrize("n_seeds", [2, 3, 5, 10])
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
    "a loss": (
        tuple(replace(line, scores=tuple(1 - x for x in line.scores)) for line in AHEAD_OF_ONE),
        {},
        "By test rmse, pax is ahead of cyclic by 0.0233 (0.0090 to 0.0377); no difference is "
        "shown between pax and bagging or pooled XGBoost (95 % intervals over 3 runs).",
        ("+0.0233  +0.0090 to +0.0377",),
    ),
    "one run": (
        OF_ONE_RUN,
        ROWS,
        "By test auc, pax is ahead of bagging by 0.0100 (0.0020 to 0.0180); no difference is shown "
        "between pax and pooled XGBoost (95 % intervals over test rows, of one run).",
        ("-0.0100  -0.0180 to -0.0020", "-0.5000 to +0.1000"),
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
    metric = "rmse" if "rmse" in verdict else "auc"
    found = made(len(lines[0].scores), metric=metric, lines=lines, differences=differences)
    assert found.verdict == verdict
    page, differences = tradeoff_page(found), difference_table(found.records)
    assert verdict.replace("'", "&#39;") in page
    printed = text_of(*filter(None, [differences]))
    RunFolder(tmp_path).write_json("comparison.json", found.document)
    of_python = repr(Compared(tmp_path))
    assert verdict in of_python
    for text in texts:
        assert text in printed
        assert text in of_python
        assert all(part in page for part in text.split("  "))
    assert bool(printed.strip()) == ("no interval" not in verdict) == ("95 % intervals:" in page)


@pytest.mark.parametrize("n_seeds", [1, 2])
def test_a_comparison_in_python_shows_the_table_of_the_command(tmp_path, n_seeds):
    lines = (*made(n_seeds).lines, Line("<b>no score</b>", (float("nan"),) * n_seeds))
    comparison = made(n_seeds, lines=lines)
    RunFolder(tmp_path).write_json("comparison.json", comparison.document)
    compared = Compared(tmp_path)
    first, *rest = repr(compared).splitlines()
    assert first == f"Compared('{display_path(tmp_path)}')"
    shown = [comparison.verdict, score_table(comparison.records)]
    if (differences := difference_table(comparison.records)) is not None:
        shown += ["", differences]
    assert "\n".join(rest) == text_of(*shown).rstrip()
    html = compared._repr_html_()
    n_differences = 1 + len(lines) - 2 if n_seeds > 1 else 0  # without the best and an unscored one
    assert html.count("<tr>") == 1 + len(lines) + n_differences
    assert "<td>&lt;b&gt;no score&lt;/b&gt;</td>" in html
    assert ("less pax" in html) == (n_seeds > 1)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_comparison_has_the_page_of_every_run_and_more_than_one_score(tmp_path):
    settings = [f"-c{name}={value}" for name, value in SHORT.items()]
    words = ["compare", "pax", "bagging", "--seeds", "2", "--output", str(tmp_path / "out")]
    done = CliRunner().invoke(cli, [*words, *settings])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "out" / "comparison.html").read_text()
    links = re.findall(r'<a href="([^#"]+/report.html)">(.*?)</a>', page)
    assert {name for _, name in links} == {"pax-42", "pax-43", "bagging-42", "bagging-43"}
    for link, name in links:
        own = (tmp_path / "out" / link).read_text()
        assert f"<title>{name.partition('-')[0]} on breast-cancer" in own
    summary = json.loads((tmp_path / "out" / "pax-43" / "summary.json").read_text())
    own = summary["metrics"]["test"]
    shown = [f'<td class="n">{own[name]:.4f}</td>' for name in ("auc", "logloss", "accuracy")]
    assert "".join(shown) in page
    for name in ("auc ↑", "logloss ↓", "accuracy ↑"):
        assert name in done.output


def with_alone(n_parties):
    """Two runs of a method, and the rows of parties alone, the first of which are best."""
    alone = [
        Line(
            f"p{party}'s rows alone, XGBoost",
            (0.9 - party / 100, 0.8),
            others={
                "auc": (0.9 - party / 100, 0.8),
                "logloss": (0.1 * party, 0.5),
                **({"threshold": (0.4, 0.5)} if party > 1 else {}),  # not every party chooses one
            },
            alone="rows alone, XGBoost",
        )
        for party in range(1, n_parties + 1)
    ]
    scores = {"auc": (0.95, 0.97), "logloss": (0.2, 0.3)}
    return made(2, lines=(Line("pax", (0.95, 0.97), 2.0, 30.0, 1e6, others=scores), *alone))


@pytest.mark.slow
def test_many_parties_alone_are_shown_as_mean_best_and_worst():
    names = [line.name for line in with_alone(6).folded.lines]
    best, worst = "p1's rows alone, XGBoost, best of 6", "p6's rows alone, XGBoost, worst of 6"
    assert names == ["pax", best, "rows alone, XGBoost, mean of 6", worst]
    mean = with_alone(6).folded.lines[2]
    assert mean.scores == pytest.approx((0.865, 0.8))
    assert mean.others["logloss"] == pytest.approx((0.35, 0.5))
    assert set(mean.others) == {"auc", "logloss"}
    for text in (tradeoff_page(with_alone(6)), text_of(score_table(with_alone(6).folded.records))):
        assert "p3" not in text
        assert "mean of 6" in text
    assert with_alone(4).folded.lines == with_alone(4).lines


def test_a_score_far_from_all_others_does_not_set_the_axis():
    near = [0.95, 0.96, 0.97, 0.98]
    assert near_range([*near, 0.2]) == near_range([0.2, *near]) == (0.95, 0.98)
    assert near_range([*near, 30.0]) == (0.95, 0.98)
    assert near_range([*near, 0.9]) == (0.9, 0.98)
    assert near_range([0.2, 0.95, 0.96]) == (0.2, 0.96)  # of three none is far from all others
    assert near_range([0.9] * 4 + [0.2]) == (0.2, 0.9)  # no range to be far from
    assert near_range([]) == (0.0, 1.0)


@pytest.mark.slow
def test_a_score_beyond_the_axis_is_written_beside_its_name():
    scores = {"a": 0.95, "b": 0.96, "c": 0.97, "d": 0.2}
    points = [(name, 1.0, score, (0.9, 1.0)) for name, score in scores.items()]
    drawn = tradeoff(points, "bytes", "auc", str).to_svg()
    assert ">d: 0.2000<" in drawn
    assert ">c<" in drawn
    assert "beyond the axis" in tradeoff_page(made())
    assert "beyond the axis" not in tradeoff_page(made(lines=made().lines[:3]))


# The rows that are scored


QUICK = {
    "fedxgbllr": {
        "fedxgbllr.trees": 6,
        "fedxgbllr.rounds": 1,
        "fedxgbllr.epochs": 1,
        "fedxgbllr.channels": 4,
    },
    "fedavg-linear": {"fedavg-linear.rounds": 1},
    "secureboost": {
        "secureboost.key-bits": 512,
        "secureboost.insecure-small-key": True,
        "align": "ordered",
    },
    "federated-forest": {
        "federated-forest.trees": 2,
        "federated-forest.max-depth": 2,
        "align": "ordered",
    },
}
N_FIRST = 6  # columns that the first of five vertical parties has


Rows = set[tuple[float, ...]]


@pytest.fixture
def tested(monkeypatch):
    """The first columns of the test rows that each site has; of vertical sites, the first has."""
    found = {}
    commit = Store.commit

    def note(store, *given):
        is_first, is_split = store.folder.parent.name == "party-1", "n_test" in store
        values = store.read("values", codec_of(Array)) if "values" in store else {}
        rows = None
        if isinstance(values, dict):
            rows = values.get("test")
        elif is_first and is_split:
            rows = values[-store.read("n_test", codec_of(int)) :]
        if rows is not None:
            found[store.folder] = set(map(tuple, rows[:, :N_FIRST].tolist()))
        commit(store, *given)

    monkeypatch.setattr(Store, "commit", note)
    return found


def training_strategies():
    return [name for name, method in all_methods().items() if method.trains]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [
        ("pax", "cyclic", "secureboost", "federated-forest"),
        pytest.param(training_strategies(), marks=pytest.mark.slow),
    ],
)
def test_every_method_holds_back_the_same_rows_of_a_table(tested, tmp_path, strategies):
    found = {}
    for number, strategy in enumerate(strategies):
        parties = 5 if number % 2 else 3
        given = {**SHORT, **QUICK.get(strategy, {}), "strategy": strategy, "parties": parties}
        if strategy == "pax":
            given["partition"] = "dirichlet:0.5"
        run_local(load_settings({**given, "run-dir": str(tmp_path / str(number))}))
        found[strategy] = set.union(*tested.values())
        tested.clear()
    assert set(found) >= {"pax", "secureboost", "federated-forest"}
    expected = found["pax"]
    assert len(expected) == round(0.2 * 569)
    assert {name: rows for name, rows in found.items() if rows != expected} == {}


def test_the_pooled_model_is_one_number_whatever_the_parties_have():
    for data, objective in (("breast-cancer", "binary:logistic"), ("diabetes", "reg:squarederror")):
        given = {**SHORT, "data": data, "objective": objective, "subsample": 0.7}
        by_rows, by_columns = (
            run_baselines(load_settings({**given, "strategy": strategy}))["pooled"]
            for strategy in ("pax", "secureboost")
        )
        # The others are of a histogram between parties that have rows.
        exact = {"logloss", "accuracy", "rmse", "mae"} & set(by_rows)
        assert len(exact) == 2
        assert all(by_rows[name] == pytest.approx(by_columns[name], rel=1e-12) for name in exact)


@pytest.mark.slow
def test_methods_of_all_kinds_have_their_own_baselines(tmp_path):
    methods = ["pax", "secureboost", "federated-forest"]
    given = {**SHORT, **QUICK["secureboost"], **QUICK["federated-forest"], "parties": 2}
    found = compare(methods, given, 1, tmp_path / "out", run_local)
    scores = {line.name: line.scores for line in found.lines}
    rows = {f"party-{number}'s rows alone, XGBoost" for number in (1, 2)}
    columns = {f"party-1's columns alone, {model}" for model in ("XGBoost", "forest")}
    pooled = {"pooled XGBoost", "pooled forest (scikit-learn)"}
    assert set(scores) == {*methods, *rows, *columns, *pooled}
    assert scores["secureboost"] == pytest.approx(scores["pooled XGBoost"], abs=1e-9)
    assert found.methods == {"rows": ("pax",), "columns": ("secureboost", "federated-forest")}
    assert found.n_rows == {"train": 409, "valid": 46, "test": 114}
    assert found.unread["pax"] == tuple(name for name in found.changed if name not in SHORT)
    assert "max-depth" in found.unread["federated-forest"]
    assert set(found.changed) == set(given) - {"parties"}


@pytest.mark.slow
def test_a_method_runs_with_the_settings_that_it_reads_alone(tmp_path):
    given = {"max_depth": 2, "n_estimators": 2, "parties": 2, "max-bin": 16, "align": "ordered"}
    found = compare(["pax", "federated-forest"], given, 1, tmp_path / "out", run_local)
    cells = {
        name: flatten(read_run(tmp_path / "out" / f"{name}-42").config)
        for name in ("pax", "federated-forest")
    }
    pax, forest = (cells[name] for name in ("pax", "federated-forest"))
    assert (pax["max-depth"], pax["num-boost-round"], pax["align"]) == (2, 2, "psi")
    assert (forest["max-depth"], forest["align"]) == (6, "ordered")
    assert forest["num-boost-round"] == "auto"
    assert forest["federated-forest.trees"] == 2
    assert found.facts["settings"] == "max-bin=16"
    not_read = "align, federated-forest.trees"
    assert found.facts["pax"].startswith("also reads ")
    assert found.facts["pax"].endswith(f"; does not read {not_read}")


def test_methods_that_cannot_be_scored_on_the_same_rows_are_refused(tmp_path, write_table):
    def refused(match, *methods, **more):
        engine = Counted()
        with pytest.raises(ConfigError, match=match):
            compare(methods, {**SHORT, **more}, 1, tmp_path / "out", engine)
        assert engine.runs == []

    files = ",".join(str(write_table(name)) for name in "ab")
    match = r"^data must be one table to split, because pax beside secureboost cannot hold back the"
    refused(match, "pax", "secureboost", data=files, label="y", parties=2)
    match = r"^partition must deal out all 409 rows that train, because bagging beside secureboost "
    sizes = "sizes:100,100,100"
    refused(f"{match}.*got '{sizes}': 109 of them", "bagging", "secureboost", partition=sizes)
    refused(r"^test-fraction must leave test rows .* got 0.0$", "pax", **{"test-fraction": 0.0})


def test_parties_by_a_column_hold_back_the_same_rows(tmp_path, write_table):
    path = write_table(n_rows=90, shop=[f"s{row % 3}" for row in range(90)], c=range(90))
    more = {"data": str(path), "label": "y", "partition": "column:shop"}
    runs = [load_settings({**SHORT, **more, "strategy": name}) for name in ("pax", "secureboost")]
    assert same_rows(runs) == {"train": 65, "valid": 7, "test": 18}


@pytest.mark.by_default("run pax")
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("command", ["run pax", "compare pax", "tune pax"])
def test_each_value_of_a_column_is_a_party(command, write_table):
    path = write_table(n_rows=150, shop=[f"s{row % 5}" for row in range(150)])
    words = [*command.split(), "--json", "--data", str(path), "--label", "y"]
    words += [
        "-cpartition=column:shop",
        "-cnum-boost-round=1",
        "-cmax-depth=2",
        "-cvalid-fraction=0.2",
    ]
    if "tune" in command:
        words += ["--runs", "1"]
    shown = CliRunner().invoke(cli, words)
    assert "5 parties, one for each value of 'shop'" in shown.stderr
    folder = Path(json.loads(shown.stdout)["folder"])
    summary = json.loads(next(folder.rglob("summary.json")).read_text())
    assert [party["name"] for party in summary["parties"]] == ["s0", "s1", "s2", "s3", "s4"]
    assert read_toml(next(folder.rglob("config.toml")).read_text(), "config")["parties"] == 5


def test_the_number_of_parties_follows_a_column_unless_it_is_set(write_table):
    path = write_table(n_rows=120, shop=[f"s{row % 4}" for row in range(120)], c=range(120))
    given = {"data": str(path), "label": "y"}

    def natural(**more):
        return natural_parties(load_settings({**given, **more}))

    assert natural(partition="column:shop") == 4
    assert natural(partition="column:shop", parties=2) == 0  # it is set
    assert natural() == 0
    match = r"^parties must be set where column:c has over 100 values, got 120; parties=10 deals"
    with pytest.raises(ConfigError, match=match):
        natural(partition="column:c")
    assert natural(partition="column:c", parties=7) == 0


@pytest.mark.slow
def test_ways_to_predict_and_superlinks_are_not_compared():
    runner = CliRunner()
    for words, match in (
        (["pax", "eini"], "strategy must be one that trains"),
        (["pax", "--engine", "site"], "--engine must be local or simulation to compare, got site"),
        (
            ["pax", "--on", "spark"],
            "on must be ray, with the local engine, or omitted, got spark",
        ),
        (["pax", "--on", "ray", "--engine", "simulation"], "got ray with engine=simulation"),
    ):
        found = runner.invoke(cli, ["compare", *words])
        assert isinstance(found.exception, ConfigError)
        assert match in str(found.exception)
