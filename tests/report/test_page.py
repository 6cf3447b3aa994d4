"""The page of a run: what it shows of the model, and that it is what the run found."""

import html
import json
import re
import shutil
import tomllib
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import xgboost
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.records.document import load
from fedapp.report import write_report
from fedapp.report.page import _gains, attack_cards
from fedapp.report.summary import percent_text
from fedapp.report.tree import DEEPEST, first_tree, tree_html
from fedapp.run_files import Audit, Finding, Unmeasured
from fedapp.runs.tables import stacked_tables
from fedapp.settings import load_settings
from fedapp.trees.model import LEAF, Ensemble
from tests.federated import lines_of
from tests.strategies.test_settings_read import read_by
from tests.tables import csv_columns

MALICIOUS = "<script>alert(1)</script>"
FACTS = "How the tables were read"
SECTIONS = [
    "Scores",
    FACTS,
    "Predictions",
    "What the model rests on",
    "Training",
    "Traffic",
    "What was run",
]
FAST = {"num-boost-round": 4, "max-depth": 5, "max-bin": 32, "parties": 2}
SMALL_KEY = {
    "secureboost.key-bits": 512,
    "secureboost.insecure-small-key": True,
    "align": "ordered",
}


def run(path, strategy, *options, **settings):
    """A run by the command, in this process."""
    read = {name: value for name, value in FAST.items() if name in read_by(strategy)}
    given = [f"{name}={value}" for name, value in {**read, **settings}.items()]
    words = [word for pair in [*given, f"run-dir={path}"] for word in ("-c", pair)]
    done = CliRunner().invoke(cli, ["run", strategy, "--engine", "local", *options, *words])
    assert done.exit_code == 0, done.output
    return path


def page_of(path):
    return (path / "report.html").read_text(encoding="utf-8")


def summary_of(path):
    return json.loads((path / "summary.json").read_text())


def sections(page):
    """What stands under each heading, in the order of the page."""
    found = re.findall(
        r'<section id="[a-z-]+">\n<h2>(.*?)</h2>\n(.*?)\n</section>', page, flags=re.DOTALL
    )
    return dict(found)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("strategy", "settings", "absent"),
    [
        ("pax", {"data": "wine", "objective": "multi:softprob", "test-fraction": 0}, "Predictions"),
        ("pax", {"data": "diabetes", "objective": "reg:squarederror"}, FACTS),
        ("secureboost", {**SMALL_KEY, "num-boost-round": 1, "max-depth": 2}, "Predictions"),
    ],
    ids=["no test rows", "numbers", "parts"],
)
def test_a_page_has_no_section_without_content(tmp_path, strategy, settings, absent):
    page = page_of(run(tmp_path / "run", strategy, **settings))
    found = sections(page)
    assert list(found) == [name for name in SECTIONS if name != absent]
    assert all(re.sub(r"<[^>]+>|\s", "", body) for body in found.values())
    assert not re.search(r"<(table|ul|figure|p|dl|h3)[^>]*>\s*</\1>", page)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", page)
    rests_on = found["What the model rests on"]
    is_divided = strategy == "secureboost"
    assert ("The parts of the model are at the parties" in rests_on) == is_divided
    assert ('class="tree"' in rests_on) == (not is_divided)


def test_the_area_under_a_drawn_roc_curve_is_the_auc_of_the_scores(binary):
    summary, page = summary_of(binary), page_of(binary)
    curves, scores = ({"federated": of} for of in (summary["curves"], summary["metrics"]["test"]))
    baselines = summary["baselines"]
    for found, of in ((curves, baselines["curves"]), (scores, baselines)):
        found["pooled"] = of["pooled"]
        found |= {f"alone.{party}": one for party, one in of["alone"].items()}
    assert [*curves] == [*scores] == ["federated", "pooled", "alone.party-1", "alone.party-2"]
    for name, score in scores.items():
        area = np.trapezoid(curves[name]["roc"]["tpr"], curves[name]["roc"]["fpr"])
        assert abs(area - score["auc"]) <= max(summary["binning_errors"]["auc"], 1e-9)
        assert f"{name}, auc {score['auc']:.3f}" in page


def test_contributions_are_xgboosts_own_and_importance_is_beside_the_baselines(binary):
    summary = summary_of(binary)
    found = summary["contributions"]
    settings = load_settings(tomllib.loads((binary / "config.toml").read_text()))
    table, shares = stacked_tables(settings)
    test = np.concatenate([rows["test"] for rows in shares.values()])
    booster = xgboost.Booster(model_file=binary / "model.xgb.json")
    matrix = xgboost.DMatrix(table.values[test], feature_names=booster.feature_names)
    means = np.abs(booster.predict(matrix, pred_contribs=True)[:, :-1]).mean(axis=0)
    assert found["rows"] == len(test)
    assert found["mean"] == pytest.approx(dict(zip(table.columns, means, strict=True)), rel=1e-5)
    assert min(summary["baselines"]["importance"]["pooled"]["total_gain"].values()) > 0
    assert "beside the pooled baseline" in sections(page_of(binary))["What the model rests on"]


def test_a_drawn_tree_has_all_nodes_down_to_the_cut_and_its_names_are_texts(binary):
    model = load(binary / "model.json", Ensemble)
    drawn = tree_html(first_tree(replace(model, columns=(MALICIOUS,) * len(model.columns))))
    tree, level, n_nodes = model.trees[0], [0], Counter()
    for _ in range(DEEPEST + 1):
        lefts = [int(tree["left"][node]) for node in level]
        n_nodes.update("leaf" if left == LEAF else "split" for left in lefts)
        level = [left + side for left in lefts if left != LEAF for side in (0, 1)]
    assert Counter(re.findall(r'class="(split|leaf)\b', drawn)) == n_nodes
    assert n_nodes["split"] > 3
    assert "&lt;script" in drawn
    assert "<script" not in drawn


def test_a_list_of_contents_leads_to_every_section_of_a_light_page(binary):
    page = page_of(binary)
    assert list(sections(page)) == SECTIONS
    links = re.findall(r'<a href="#(.*?)">(.*?)</a>', page[: page.index("<section")])
    assert [head for _, head in links] == SECTIONS
    assert [place for place, _ in links] == re.findall(r'<section id="(.*?)">', page)
    assert len(page.encode()) < 500_000
    figures = re.findall(r"<svg[^>]*>", page)
    assert len(figures) > 10
    assert all('role="img"' in one and "aria-label=" in one for one in figures)  # a text of each
    assert "<img" not in page


READ = "feature column 'paid' has yes or no, read as 1 or 0"
UNLISTED = "feature column 'paid' has 4 values that are none of its categories, read as missing"


@pytest.mark.usefixtures("undrawn")
def test_how_tables_were_read_is_no_warning_and_a_coordinator_has_no_rows(binary, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(binary, copy)
    summary = {**summary_of(binary), "warnings": [UNLISTED], "facts": [READ]}
    summary |= {"engine": "deployment", "contributions": {}}
    (copy / "summary.json").write_text(json.dumps(summary))
    write_report(copy)
    page = page_of(copy)
    assert "SHAP summary: how far" not in page
    warned = html.unescape("".join(re.findall(r'<p class="warning">(.*?)</p>', page)))
    facts = html.unescape(sections(page)[FACTS])
    assert (READ in facts, READ in warned) == (True, False)
    assert (UNLISTED in facts, UNLISTED in warned) == (False, True)
    assert "objective: binary:logistic: the label has two values" in facts
    card = (copy / "model-card.md").read_text().partition("What the run warned of:")[2]
    warned, facts = card.split("How the tables were read:")
    assert UNLISTED.split("'")[-1] in warned
    assert READ.split("'")[-1] in facts


def test_scores_of_each_party_and_its_traffic_are_shown(binary):
    found = sections(page_of(binary))
    own = summary_of(binary)["metrics"]["by_party"]["party-2"]["test"]
    assert f'<td>party-2</td><td class="n">{own["auc"]:.4f}</td>' in found["Scores"]
    lines = lines_of(binary / "ledger.jsonl")
    names = {line[end] for line in lines for end in ("from", "to")}
    assert names == {"server", "party-1", "party-2"}
    assert "node " not in found["Traffic"].partition("Bytes by party")[2]


def test_gains_and_lift_follow_from_the_rows_called_positive():
    rates = {"tpr": [0, 0.5, 1.0, 1.0], "fpr": [0, 0.0, 0.5, 1.0]}  # 2 of 8 rows are positive
    gains = _gains({"pax": rates}, 0.25)["pax"]
    assert gains["called"] == pytest.approx([1 / 8, 5 / 8, 1.0])
    assert gains["found"] == pytest.approx([0.5, 1.0, 1.0])
    assert gains["lift"] == pytest.approx([4.0, 1.6, 1.0])


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_the_page_has_gains_lift_rows_by_class_and_missing_values(
    tmp_path, write_table, aggregation
):
    income = ["" if row % 4 == 0 else row % 7 for row in range(200)]
    data = write_table("gaps", 200, income=income)
    more = {"parties": 3, "pax.aggregation": aggregation}
    path = run(tmp_path / "run", "pax", data=data, label="y", **more)
    found, summary = sections(page_of(path)), summary_of(path)
    captions = re.findall("<figcaption>(.*?)</figcaption>", found["Predictions"])
    assert {"Gains", "Lift"} <= {caption.partition(" ")[0].strip(":,.") for caption in captions}
    assert '<td>income</td><td class="n">25%</td>' in found[FACTS]
    weights = summary["class_weights"]
    names = ["all parties"] if aggregation == "secure" else ["party-1", "party-2", "party-3"]
    assert list(weights) == names
    totals = [sum(each) for each in zip(*weights.values(), strict=True)]
    assert totals == [csv_columns(data)["y"].count(label) for label in "01"]
    counts = (f"{count:,.0f} ({percent_text(count / 200)})" for count in totals)
    cells = "".join(f'<td class="n">{count}</td>' for count in counts)
    assert aggregation == "secure" or f"<td>all</td>{cells}" in found[FACTS]


@pytest.mark.parametrize(
    ("success", "low", "high", "chance", "verdict"),
    [
        (0.619, 0.564, 0.664, 0.5, "above chance"),
        (0.0, 0.0, 0.006, 0.0, "no difference is shown"),
        (1.0, 0.9, 1.0, 0.9, "no difference is shown"),
        (0.3, 0.2, 0.4, 0.5, "no difference is shown"),
    ],
)
def test_the_card_of_an_attack_has_seat_numbers_bar_and_verdict(
    success, low, high, chance, verdict
):
    shares, texts = (success, low, high, chance), ("rows", "epsilon=1", "AUC 0.8 to 0.7")
    found = Finding("attack <0>", "the server", "share of rows", *shares, *texts)
    missing = Unmeasured("another attack", "a party", "there are no trees")
    cards = attack_cards(Audit("2026-01-02", 1.0, False, "the run", (found,), (missing,)))
    card, other = re.findall(r"<article.*?</article>", cards, re.DOTALL)
    text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", card)).split())
    assert text.startswith("attack <0> by the server")
    assert (
        f"{success:.3f} [{low:.3f}, {high:.3f}] against {chance:.3f} by chance: {verdict}" in text
    )
    assert ('class="attack above"' in card) == (verdict == "above chance")
    drawn = dict(re.findall(r'class="(reached|chance)" style="[a-z]+: ([\d.]+)%', card))
    assert drawn == {"reached": f"{100 * success:.2f}", "chance": f"{100 * chance:.2f}"}
    start, width = re.findall(r'"interval" style="left: ([\d.]+)%;\s+width: ([\d.]+)%', card)[0]
    assert (float(start), float(width)) == pytest.approx((100 * low, 100 * (high - low)), abs=0.01)
    assert "epsilon=1. Cost: AUC 0.8 to 0.7." in text
    assert "not measured: there are no trees" in other
    assert attack_cards(None) == ""


def test_a_run_draws_the_figures_of_its_report(binary):
    found = fedapp.load(binary)
    roc, page = found.plot_roc(), page_of(binary)
    labels = [line.get_label().partition(",")[0] for line in roc.axes[0].get_lines()[1:3]]
    assert labels == ["federated", "pooled"]
    assert found.plot_learning_curve().axes[0].get_ylabel() == "auc"
    assert roc._repr_png_().startswith(b"\x89PNG")  # as a notebook shows it
    names = "importance", "contributions", "precision_recall", "gains", "lift", "calibration"
    for name in names:
        figure = getattr(found, f"plot_{name}")()
        assert f">{figure.axes[0].get_xlabel()}</text>" in page
    rule = r"^plot_residuals must be of a run whose report has this figure, got one with .*roc"
    with pytest.raises(fedapp.ConfigError, match=rule):
        found.plot_residuals()
