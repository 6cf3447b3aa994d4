"""What a person sees of a run: the summary, the progress and the page."""

import io
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from fedapp import metrics
from fedapp.commands import cli
from fedapp.errors import DataError
from fedapp.report import summary, write_report
from fedapp.run_folder import Checkpoints, RunFolder, RunState, read_run
from tests.deploy_folders import invoke

BINARY, MULTI, REGRESSION = metrics.OBJECTIVES[:3]
OBJECTIVES = {
    BINARY: (["auc", "logloss", "accuracy"], {"roc": {"fpr": [0, 0.2, 1], "tpr": [0, 0.7, 1]}}),
    MULTI: (["accuracy", "mlogloss"], {"confusion": [[5, 1], [2, 7]]}),
    REGRESSION: (["rmse", "mae", "r2"], {"residuals": {"edges": [-1, 0, 1], "counts": [3, 4]}}),
}
PRIVATE = {
    "epsilon": 2.0,
    "delta": 1e-5,
    "unit": "row",
    "leaf_noise": 1.0,
    "score_noise": 1.0,
    "noise_multiplier": 1.0,
    "not_covered": ["none"],
}
SMALL_KEY = "[secureboost]\ninsecure-small-key = true\nkey-bits = 512"
BY_PAILLIER = "[federated-forest]\nlabels = 'paillier'"
DASH = "\u2013"
MALICIOUS = '<script src="https://example.org/x.js">alert("$x^{$")</script>'


def round_line(number, names, n_rounds=5, **changes):
    scores = dict.fromkeys(names, 0.5 + 0.01234 * number)
    return {
        "round": number,
        "rounds": n_rounds,
        "trees": number,
        "leaves": 7,
        "train": scores,
        "valid": scores,
        "exchanges": 2 + 4 * number,
        "bytes": {"to_parties": 200_000, "to_server": 1_000_000},
        "seconds": 0.31,
    } | changes


def ledger_lines():
    down = {"from": "server", "seconds": 0.1}
    up = {"to": "server", "seconds": 0.2}
    return [
        {"step": 1, "type": "query.hello", "to": "party-1", "bytes": 10, **down},
        {"step": 1, "type": "query.hello", "from": "party-1", "bytes": 700, **up},
        {"step": 2, "type": "train.pax_grow", "to": "party-1", "bytes": 1500, **down},
        {"step": 2, "type": "train.pax_grow", "to": "party-2", "bytes": 1500, **down},
        {"step": 2, "type": "train.pax_grow", "from": "party-1", "bytes": 2_000_000, **up},
        {"step": 2, "type": "train.pax_grow", "from": "party-2", "bytes": 3_000_000, **up},
    ]


def summary_of(objective, **changes):
    names, curves = OBJECTIVES[objective]
    return {
        "strategy": "pax",
        "engine": "local",
        "data": "breast-cancer",
        "objective": objective,
        "seed": 42,
        "model_id": "8f3a2c",
        "parties": [{"name": "party-1", "rows": 1152}, {"name": "party-2", "rows": 88}],
        "left_out": [],
        "metrics": {
            "test": dict.fromkeys(names, 0.8123),
            "valid": dict.fromkeys(names, 0.7777),
            "train": dict.fromkeys(names, 0.9),
        },
        "curves": curves,
        "importance": {"gain": {"radius": 12.5, MALICIOUS: 3.25}, "count": {"radius": 4}},
        "exchanges": 22,
        "bytes": {"to_parties": 3010, "to_server": 5_000_700},
        "seconds": {"total": 3.2, "train": 1.1},
        "trees": 5,
        "best_round": None,
        "versions": {"fedapp": "0.2.0", "xgboost": "3.2.0"},
    } | changes


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def make_run(path, objective=BINARY, config="", **changes):
    path.mkdir(parents=True, exist_ok=True)
    settings = 'strategy = "pax"\neta = 0.1\n' + config + '\n[pax]\nbins = "share"\n'
    (path / "config.toml").write_text(settings, encoding="utf-8")
    (path / "summary.json").write_text(json.dumps(summary_of(objective, **changes)))
    names = OBJECTIVES[objective][0]
    write_lines(path / "rounds.jsonl", [round_line(i, names) for i in range(1, 6)])
    write_lines(path / "ledger.jsonl", ledger_lines())
    return path


def page_of(run_dir):
    return write_report(run_dir).read_text(encoding="utf-8")


def cells(page):
    """The text of every table row."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, flags=re.DOTALL)
    return [re.findall(r"<t[dh][^>]*>(?:<strong>)?(.*?)(?:</strong>)?</t", row) for row in rows]


# Reading


def test_a_field_that_the_summary_does_not_declare_is_not_written(tmp_path):
    folder = RunFolder(make_run(tmp_path / "run"))
    before = (folder.path / "summary.json").read_bytes()
    with pytest.raises(AssertionError, match="Summary declares every field"):
        folder.add_to_summary({"luck": 1})
    with pytest.raises(DataError, match=r"trees of summary.json must be a whole number, got str"):
        folder.add_to_summary({"trees": "five"})
    assert (folder.path / "summary.json").read_bytes() == before
    folder.add_to_summary({"trees": 6})
    assert (folder.summary["trees"], folder.summary["version"]) == (6, 1)


def test_a_score_that_noise_hides_is_a_dash_everywhere_and_is_named(tmp_path):
    hidden = {"test": {"rmse": None, "mae": 2.0, "r2": None}, "valid": {}, "train": {}}
    run = make_run(tmp_path / "run", REGRESSION, metrics=hidden, privacy=PRIVATE)
    shown = io.StringIO()
    summary.print_summary(read_run(run).summary, Console(file=shown, width=120))
    texts = shown.getvalue(), page_of(run), (run / "model-card.md").read_text()
    for text in texts:
        assert "not shown, as noise is larger: test rmse, test r2" in text
    row = ["test", "\N{EN DASH}", "2.0000", "\N{EN DASH}"]
    assert row in [re.split(r" +", line.strip())[1:] for line in texts[0].splitlines()]
    assert ["federated", *row] in cells(texts[1])
    assert f"| {' | '.join(row)} |" in texts[2]


def test_a_finished_training_is_not_lost_by_a_field_that_cannot_be_read(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_summary(summary_of(BINARY, best_round="five", warnings=["few rows"]))
    fault = "best_round of summary.json must be a whole number, got str"
    assert folder.summary["warnings"] == ["few rows", fault]
    assert "best_round" not in folder.summary
    with pytest.raises(DataError, match=r"^summary.json must have trees, got no such field$"):
        RunFolder(tmp_path / "no").write_summary(summary_of(BINARY, trees="five"))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rounds.jsonl", None, r"run folder must hold rounds.jsonl, got \w+"),
        ("config.toml", b"a = ", r"config.toml must be TOML: "),
        ("summary.json", b"{", r"summary.json must be JSON, got: "),
        ("summary.json", b"[]", r"summary.json must be an object, got list"),
        ("rounds.jsonl", b'\n{"round": "x"}', r"round of rounds.jsonl line 2 must be a whole num"),
        ("ledger.jsonl", b"\xff", r"ledger.jsonl must be UTF-8, got invalid start byte at 0"),
        ("", {"version": 2}, r"version of summary.json must be 1, got 2: another version of fed"),
        ("", {"objective": "rank:map"}, r"objective of summary.json must be one of .*, got rank"),
        ("", {"bytes": {"to_parties": 1}}, r"bytes of summary.json must be an object with to_ser"),
        ("", {"parties": [{"name": "a"}]}, r"summary.json must have parties.0.rows, got no such"),
    ],
)
def test_a_missing_or_malformed_file_is_refused(tmp_path, name, content, text):
    path = make_run(tmp_path / "run")
    if content is None:
        (path / name).unlink()
    elif name:
        (path / name).write_bytes(content)
    else:
        (path / "summary.json").write_text(json.dumps(summary_of(BINARY) | content))
    with pytest.raises(DataError, match=text):
        read_run(path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"must hold config.toml, got an empty folder"):
        read_run(tmp_path)


# Summary


def test_bytes_seconds_and_scores_read_easily():
    of_bytes = {999: "999 B", 99_960: "100 kB", 999_960: "1.0 MB", 5e15: "5000 TB"}
    of_seconds = {0.309: "0.31 s", 42.2: "42 s", 200: "3 min 20 s", 7500: "2 h 05 min"}
    of_scores = {0.81234: "0.8123", math.nan: DASH, None: DASH, 54321.6: "54321.6"}
    for write, texts in (
        (summary.human_bytes, of_bytes),
        (summary.human_seconds, of_seconds),
        (summary.score_text, of_scores),
    ):
        assert {value: write(value) for value in texts} == texts


def printed(facts, **kwargs):
    console = Console(file=io.StringIO(), width=100)
    summary.print_summary(facts, console, **kwargs)
    return console.file.getvalue()


def test_the_summary_tells_result_and_cost():
    baselines = {"pooled": {"auc": 0.9111, "logloss": None}, "alone": {"party-1": {"auc": 0.6543}}}
    left_out = [{"party": "bank[red]", "step": 17, "reason": "no answer within 60 s"}]
    more = {"baselines": baselines, "left_out": left_out, "best_round": 3, "warnings": ["few rows"]}
    text = printed(summary_of(BINARY, **more), path=Path("runs/one"))
    for part in (
        "! few rows",
        "pax on breast-cancer",
        "party-1 1,152, party-2 88",
        "5, of the best round, 3",
        "3.0 kB to parties, 5.0 MB to server",
        "3.20 s total, 1.10 s train",
        "bank[red] was excluded from step 17: no answer within 60 s",
        "runs/one",
    ):
        assert part in text
    rows = [line.split() for line in text.splitlines()]
    assert ["federated", "test", "0.8123", "0.8123", "0.8123"] in rows
    assert ["pooled", "test", "0.9111", DASH, DASH] in rows
    assert ["alone.party-1", "test", "0.6543", DASH, DASH] in rows


# Page


ALONE = {"pooled": {"auc": 0.9111}, "alone": {"party-2": {"auc": None}}}
LEFT = [{"party": "party-2", "step": 17, "reason": "no answer within 60 s"}]
ENDED = "Training ended early, after 5 of 50 rounds; the best was round 3."
# Changes of the summary and the settings; texts and rows of cells that a page has then, and lacks.
PAGES = {
    "what was run and sent": (
        {},
        "",
        [
            *("<h1>pax on breast-cancer</h1>", "seed 42 · versions fedapp 0.2.0, xgboost 3.2.0"),
            *(["party-1", "1,152"], ["eta", "0.1"], ["pax.bins", "share"]),
            ["query.hello", "2", "10 B", "700 B"],
            ["train.pax_grow", "4", "3.0 kB", "5.0 MB"],
            ["all", "6", "3.0 kB", "5.0 MB"],
        ],
        ['class="warning"'],
    ),
    "baselines, warnings, an early end": (
        {"baselines": ALONE, "warnings": ["only 16 bins <"], "left_out": LEFT, "best_round": 3},
        "",
        [
            *(["pooled", "test", "0.9111", DASH, DASH], ["alone.party-2", "test", *[DASH] * 3]),
            '<p class="warning">only 16 bins &lt;</p>',
            '<p class="warning">party-2 was excluded from step 17: no answer within 60 s</p>',
            f'<p class="quiet">{ENDED}</p>',
        ],
        ["only 16 bins <"],
    ),
    "a simulation": ({}, 'data = "breast-cancer"', [">data<"], []),
    "a deployment": ({"engine": "deployment"}, 'data = "breast-cancer"', [], [">data<"]),
}


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_run_has(tmp_path, name):
    changes, config, shown, hidden = PAGES[name]
    path = make_run(tmp_path / "run", config=config, **changes)
    lines = [round_line(i, OBJECTIVES[BINARY][0], 50) for i in range(1, 6)]
    write_lines(path / "rounds.jsonl", lines)
    page = page_of(path)
    rows = cells(page)
    assert [one for one in shown if one not in (page if isinstance(one, str) else rows)] == []
    assert [one for one in hidden if one in page] == []


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("strategy", "config", "changes", "alarms", "seen"),
    [
        ("pax", "", {}, ["No measure hides"], "each party&#39;s sums: most rows of a small table"),
        ("pax", "least-bin-rows = 5", {}, [], "each party&#39;s sums over bins of several rows"),
        ("pax", "[pax]\naggregation = 'secure'", {}, [], "the rest of a sum is the other&#39;s"),
        ("pax", "", {"privacy": PRIVATE}, [], "no more than epsilon 2 allows"),
        ("bagging", "", {}, ["No measure hides"], "each party&#39;s trees"),
        ("secureboost", "", {"active": "bank"}, [], "<strong>bank</strong>: which of its rows"),
        ("secureboost", "allow-export = true", {}, [], "and the whole model (allow-export)"),
        ("secureboost", SMALL_KEY, {}, ["A Paillier key of 512 bits"], "Who could see what"),
        ("federated-forest", "", {}, [], "codes of the labels: which rows share one"),
        ("federated-forest", BY_PAILLIER, {}, [], "from which it may find rows&#39; bins"),
    ],
)
def test_a_page_says_who_could_see_what_and_alarms_only_where_no_measure_is_in_force(
    tmp_path, strategy, config, changes, alarms, seen
):
    path = make_run(tmp_path / "run", strategy=strategy, **changes)
    (path / "config.toml").write_text(f'strategy = "{strategy}"\n{config}\n')
    page = page_of(path)
    found = re.findall(r'<p class="alarm">(.*?)</p>', page)
    assert len(found) == len(alarms)
    assert all(text.startswith(start) for text, start in zip(found, alarms, strict=True))
    assert seen in page


BETTER = (0.1, 0.01, 0.2)


@pytest.mark.parametrize(
    ("metric", "alone", "pooled", "text"),
    [
        ("auc", [BETTER], (0.0, -0.1, 0.1), "better than a alone; against pooled no"),
        ("logloss", [BETTER], (-0.2, -0.3, -0.1), "better than pooled; worse than a alone"),
        ("auc", [BETTER] * 3, (0, 0, 0), "better than a, b and c alone; equal to pooled."),
        ("auc", [(0.0, -0.1, 0.1)] * 7, (-0.2, -0.3, -0.1), "a, b, c, d, e and 2 more alone no"),
        ("auc", [(None,) * 3], (0.1, 0.0, 0.2), "rows: against pooled no difference is shown."),
        ("ks", [], None, ""),
    ],
)
def test_the_verdict_is_what_the_paired_intervals_show(metric, alone, pooled, text):
    spans = {name: {metric: span} for name, span in zip("abcdefg", alone, strict=False)}
    compared = {"alone": spans, "pooled": {metric: pooled} if pooled else {}}
    found = summary.verdict({"baselines": {"differences": compared}}, metric)
    assert text in found
    assert bool(found) == bool(text)


def test_names_from_outside_are_escaped_and_nothing_is_loaded(tmp_path):
    parties = [{"name": MALICIOUS, "rows": 3}]
    left_out = [{"party": MALICIOUS, "step": 1, "reason": MALICIOUS}]
    config = f"note = {json.dumps(MALICIOUS)}"
    changes = {"parties": parties, "left_out": left_out, "data": MALICIOUS}
    page = page_of(make_run(tmp_path / "run", config=config, **changes))
    assert "<script" not in page
    assert page.count("&lt;script src=&#34;https://example.org/x.js&#34;&gt;") >= 5
    parser, elements = HTMLParser(), []
    parser.handle_starttag = lambda tag, attributes: elements.append((tag, dict(attributes)))
    parser.feed(page)
    assert len(elements) > 100
    for tag, attributes in elements:
        assert tag not in {"script", "link", "img", "image", "iframe", "object", "use"} or (
            tag == "use" and attributes["xlink:href"].startswith("#")
        )
        assert not {"src", "onload", "onclick"} & {*attributes}
        assert attributes.get("href", "#").startswith("#")
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)", page))
    assert "@import" not in page


def test_a_forest_without_rounds_or_curves_has_a_page_too(tmp_path):
    path = make_run(tmp_path / "run", curves={}, importance={}, best_round=None)
    (path / "rounds.jsonl").write_text("")
    (path / "ledger.jsonl").write_text("")
    page = page_of(path)
    assert "<svg" not in page
    assert "<h2>Training</h2>" not in page
    assert ["federated", "test", "0.8123", "0.8123", "0.8123"] in cells(page)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_was_interrupted_has_a_page_of_its_rounds(tmp_path):
    path = make_run(tmp_path / "run")
    (path / "summary.json").unlink()
    with pytest.raises(DataError, match=r"must have finished a round, got none to report$"):
        write_report(path)
    Checkpoints(path).save(RunState("8f3a2c", rounds=5), RunState(""))
    output = tmp_path / "page.html"
    assert invoke(cli, "report", str(path), "--output", str(output)) == f"{output}\n"
    page = output.read_text(encoding="utf-8")
    assert f"the run has not finished; to resume: fedapp run pax -c resume={path}<" in page
    assert ("federated", "valid") in {tuple(line[:2]) for line in cells(page)}
    assert not (path / "report.html").exists()
    assert not (path / "model-card.md").exists()


def test_the_class_that_counts_as_positive_is_said_where_classes_have_names():
    facts = {**summary_of(BINARY), "classes": ["bad", "good"]}
    assert "bad, good; scores take good as positive" in printed(facts)
    assert "as positive" not in printed({**facts, "classes": ["0", "1"]})
    unnamed = {**facts, "classes": [], "positive_label": "bad"}
    assert "scores take bad as positive" in printed(unnamed)


TWO = "Two organisations together: "
PAIRS = f"{TWO}the model ranks a positive row above a negative one in 8"
NAMED = {"label": "default", "classes": ["no", "yes"], "intervals": {"auc": [0.794, 0.8301]}}
BASELINES = {"pooled": {"auc": 0.8149}, "alone": {"a": {"auc": 0.781}, "b": {"auc": 0.79}}}
NUMBERS = {"rmse": 6.0, "mae": 4.0, "r2": 0.64}


@pytest.mark.parametrize(
    ("objective", "changes", "text"),
    [
        (
            BINARY,
            {**NAMED, "baselines": BASELINES},
            f"{TWO}the model ranks a row with default = yes above one with no in 81 of 100 pairs "
            "(95 % interval 79 to 83); alone they reach 78 to 79; with all data in one place 81.",
        ),
        (
            BINARY,
            {"baselines": {"alone": {"bank": {"auc": 0.99}}}},
            f"{PAIRS}1.2 of 100 pairs; bank alone reaches 99.0.",
        ),
        (
            MULTI,
            {"label": "wine"},
            f"{TWO}the model names the right wine for 81 of 100 rows; always naming the most "
            "frequent class is right for 60.",
        ),
        (
            REGRESSION,
            {"label": "price", "metrics": {"test": NUMBERS}},
            f"{TWO}predictions of price are typically off by 6; always answering the mean is off "
            "by 10.",
        ),
        (
            REGRESSION,
            {"label": "price", "metrics": {"test": {"rmse": 0.0}}, "privacy": {"epsilon": 1.0}},
            f"{TWO}predictions of price are typically off by 0, by scores with noise.",
        ),
        (BINARY, {"metrics": {"test": {"auc": math.nan}}}, ""),
    ],
)
def test_the_headline_compares_with_what_everyone_knows(objective, changes, text):
    assert summary.headline(summary_of(objective, **changes)) == text


@pytest.mark.usefixtures("undrawn")
def test_headline_intervals_and_warnings_are_on_every_form_of_a_result(tmp_path):
    given = {"intervals": {"auc": [0.8, 0.825]}, "warnings": ["only 16 bins"]}
    path = make_run(tmp_path / "run", **given)
    page, sentence = page_of(path), summary.headline(summary_of(BINARY, **given))
    text, card = printed(read_run(path).summary, path=path), (path / "model-card.md").read_text()
    assert sentence in " ".join(text.split())
    assert sentence in card
    assert f'<p class="lead">{sentence}</p>' in page
    for one in (text, card, page):
        assert "95 % intervals, test: auc 0.8000 to 0.8250; over" in one
    assert all("DeLong" in one for one in (text, card, page))
    *_, warning, last = text.splitlines()
    assert warning == "! only 16 bins"
    assert last.startswith("report: ")
    assert last.endswith("report.html")


def test_a_small_threshold_has_digits_and_one_of_all_rows_is_not_proposed():
    scores = dict.fromkeys(metrics.AT_THRESHOLD, 0.5)
    chosen = {"threshold": {"value": 3.14e-5, "rows": "valid"}, "metrics": {"test": scores}}
    assert "threshold 3.1e-05, of the best F1 on" in printed({**summary_of(BINARY), **chosen})
    none = {"threshold": {}, "metrics": {"test": {**scores, "threshold": 0.0}}}
    text = printed({**summary_of(BINARY), **none})
    assert "no threshold is proposed: calling all rows positive has the best F1" in text
