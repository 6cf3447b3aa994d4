"""The page of a run: what it shows of the model, and that it is what the run found."""

import html
import json
import re
import shutil
import tomllib
from html.parser import HTMLParser

import numpy as np
import pytest
import xgboost
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.records.document import load
from fedapp.report import write_report
from fedapp.report.certainty import percent_text
from fedapp.report.page import _gains
from fedapp.report.tree import DEEPEST, first_tree, tree_html
from fedapp.run_folder import RunFolder
from fedapp.runs.tables import stacked_tables
from fedapp.settings import load_settings
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.model import LEAF, Ensemble
from tests.strategies.test_settings_read import read_by

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
FOREST = {
    "federated-forest.trees": 3,
    "federated-forest.master-keeps-model": True,
    "align": "ordered",
    "share-column-names": True,
    "allow-export": True,
}
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """For runs that several tests look at; these too have a home of their own."""
    path = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(path / "home"))
        yield path


@pytest.fixture(scope="module")
def binary(folder):
    return run(folder / "binary", "pax", "--baselines")


@pytest.fixture(scope="module")
def forest(folder):
    return run(folder / "forest", "federated-forest", **FOREST)


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
def test_the_model_comes_first_then_training_traffic_and_settings(binary):
    assert list(sections(page_of(binary))) == SECTIONS


@pytest.mark.slow
@pytest.mark.by_default("linear", "parts")
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("strategy", "settings", "absent"),
    [
        ("pax", {"data": "wine", "objective": "multi:softprob"}, set()),
        ("pax", {"data": "diabetes", "objective": "reg:squarederror"}, {FACTS}),
        ("pax", {"test-fraction": 0}, {"Predictions"}),
        ("fedavg-linear", {"fedavg-linear.rounds": 3}, set()),
        ("secureboost", {**SMALL_KEY, "num-boost-round": 1, "max-depth": 2}, {"Predictions"}),
    ],
    ids=["classes", "numbers", "no test rows", "linear", "parts"],
)
def test_a_page_has_no_section_without_content(tmp_path, strategy, settings, absent):
    page = page_of(run(tmp_path / "run", strategy, **settings))
    found = sections(page)
    assert list(found) == [name for name in SECTIONS if name not in absent]
    assert all(re.sub(r"<[^>]+>|\s", "", body) for body in found.values())
    assert not re.search(r"<(table|ul|figure|p|dl|h3)[^>]*>\s*</\1>", page)
    assert "nan" not in re.sub(r"[a-z]nan|nan[a-z]", "", page)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_parts_that_stay_at_the_parties_are_said_to_give_no_tree(tmp_path):
    few = {**SMALL_KEY, "num-boost-round": 1, "max-depth": 1}
    found = sections(page_of(run(tmp_path / "run", "secureboost", **few)))
    assert 'class="tree"' not in found["What the model rests on"]
    assert "The parts of the model lie at the parties" in found["What the model rests on"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_coordinator_says_that_it_has_no_rows_to_explain(binary, tmp_path):
    copy = RunFolder(tmp_path / "copy")
    copy.path.mkdir()
    for file in binary.iterdir():
        (copy.path / file.name).write_bytes(file.read_bytes())
    facts = {**summary_of(binary), "engine": "deployment", "contributions": {}}
    copy.write_json("summary.json", facts)
    page = write_report(copy.path).read_text()
    assert "No SHAP summary: the coordinator has no rows." in page
    assert "SHAP summary: how far" not in page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["federated", "pooled", "alone.party-1", "alone.party-2"])
def test_the_area_under_a_drawn_roc_curve_is_the_auc_of_the_scores(binary, name):
    summary = summary_of(binary)
    curves, scores = summary["curves"], summary["metrics"]["test"]
    if name != "federated":
        kind, _, party = name.partition(".")
        curves, scores = summary["baselines"]["curves"][kind], summary["baselines"][kind]
        curves, scores = (curves[party], scores[party]) if party else (curves, scores)
    area = np.trapezoid(curves["roc"]["tpr"], curves["roc"]["fpr"])
    assert abs(area - scores["auc"]) <= max(summary["binning_errors"]["auc"], 1e-9)
    assert f"{name}, auc {scores['auc']:.3f}" in page_of(binary)


@pytest.mark.slow
def test_the_contributions_are_xgboosts_own(binary):
    found = summary_of(binary)["contributions"]
    settings = load_settings(tomllib.loads((binary / "config.toml").read_text()))
    table, shares = stacked_tables(settings)
    test = np.concatenate([rows["test"] for rows in shares.values()])
    booster = xgboost.Booster(model_file=binary / "model.xgb.json")
    matrix = xgboost.DMatrix(table.values[test], feature_names=booster.feature_names)
    means = np.abs(booster.predict(matrix, pred_contribs=True)[:, :-1]).mean(axis=0)
    assert found["rows"] == len(test)
    assert found["mean"] == pytest.approx(dict(zip(table.columns, means, strict=True)), rel=1e-5)


def test_importance_stands_beside_the_baselines(binary):
    pooled = summary_of(binary)["baselines"]["importance"]["pooled"]["total_gain"]
    assert pooled
    assert all(gain > 0 for gain in pooled.values())
    assert "beside the pooled baseline" in sections(page_of(binary))["What the model rests on"]


class Boxes(HTMLParser):
    """Classes of the boxes of a drawn tree, each with how deep it lies."""

    def __init__(self):
        super().__init__()
        self.depth, self.found = -1, []

    def handle_starttag(self, tag, attrs):
        self.depth += tag == "ul"
        kind = (dict(attrs).get("class") or "").split(" ")[0]
        if kind in ("split", "leaf"):
            self.found.append((self.depth, kind))

    def handle_endtag(self, tag):
        self.depth -= tag == "ul"


def nodes_of(tree):
    """(depth, split or leaf) of every node down to the cut."""
    found, level, depth = [], [0], 0
    while level and depth <= DEEPEST:
        lefts = [int(tree["left"][node]) for node in level]
        found += [(depth, "leaf" if left == LEAF else "split") for left in lefts]
        level = [left + side for left in lefts if left != LEAF for side in (0, 1)]
        depth += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["boosted", "forest"])
def test_a_drawn_tree_has_all_nodes_down_to_the_cut(kind, binary, forest):
    if kind == "boosted":
        model = load(binary / "model.json", Ensemble)
    else:
        model = load(forest / "model.json", BaggedForest)
    boxes = Boxes()
    boxes.feed(tree_html(first_tree(model)))
    assert sorted(boxes.found) == sorted(nodes_of(model.trees[0]))
    assert max(depth for depth, _ in boxes.found) >= 3


@pytest.mark.slow
def test_levels_of_a_forest_are_called_levels(forest):
    page = page_of(forest)
    assert "by level" in page
    assert "boosting round" not in page
    assert "training ended early" not in page


@pytest.mark.slow
def test_only_settings_that_the_method_reads_are_shown(forest):
    body = sections(page_of(forest))["What was run"]
    changed, usual = body.split("<details>")
    shown = re.findall(r"<td>([a-z.-]+)</td><td>", body)
    assert {"federated-forest.trees", "max-bin", "columns"} <= set(shown)
    assert set(shown) <= read_by("federated-forest")
    assert "<td>federated-forest.trees</td><td><strong>3</strong></td>" in changed
    assert "<strong>" not in usual
    assert "<td>federated-forest.criterion</td>" in usual


def test_a_list_of_contents_leads_to_every_section(binary):
    page = page_of(binary)
    links = re.findall(r'<a href="#(.*?)">(.*?)</a>', page[: page.index("<section")])
    assert [head for _, head in links] == SECTIONS
    assert [place for place, _ in links] == re.findall(r'<section id="(.*?)">', page)


READ = "feature column 'paid' has yes or no, read as 1 or 0"
UNLISTED = "feature column 'paid' has 4 values that are none of its categories, read as missing"


@pytest.mark.usefixtures("undrawn")
def test_how_tables_were_read_is_no_warning(binary, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(binary, copy)
    summary = {**summary_of(binary), "warnings": [UNLISTED], "facts": [READ]}
    (copy / "summary.json").write_text(json.dumps(summary))
    write_report(copy)
    page = page_of(copy)
    warned = html.unescape("".join(re.findall(r'<p class="warning">(.*?)</p>', page)))
    told = html.unescape(sections(page)[FACTS])
    assert (READ in told, READ in warned) == (True, False)
    assert (UNLISTED in told, UNLISTED in warned) == (False, True)
    assert "objective: binary:logistic: the label has two values" in told
    card = (copy / "model-card.md").read_text().partition("What the run warned of:")[2]
    warned, told = card.split("How the tables were read:")
    assert UNLISTED.split("'")[-1] in warned
    assert READ.split("'")[-1] in told


def test_scores_of_each_party_are_shown(binary):
    body = sections(page_of(binary))["Scores"]
    own = summary_of(binary)["metrics"]["by_party"]["party-2"]["test"]
    assert f'<td>party-2</td><td class="n">{own["auc"]:.4f}</td>' in body


@pytest.mark.slow
def test_columns_and_classes_with_markup_in_their_names_are_shown_as_texts(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(120, 2))
    names = ("0 no", MALICIOUS)
    rows = [f"{a:.3f},{b:.3f},{names[int(a + b > 0)]}" for a, b in values]
    file = tmp_path / "table.csv"
    file.write_text("\n".join([f"x,{MALICIOUS},label", *rows]) + "\n")
    page = page_of(run(tmp_path / "run", "pax", "--baselines", data=file, label="label"))
    assert "<script" not in page
    for text in ("One tree", "Predicted probability of class &lt;script", "true \\ predicted"):
        assert text in page
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 4


def test_lists_of_numbers_take_one_line_of_the_summary(binary):
    text = (binary / "summary.json").read_text()
    assert re.search(r'^ +"fpr": \[0\.0, .*, 1\.0\],?$', text, flags=re.MULTILINE)
    assert json.loads(text) == summary_of(binary)


@pytest.mark.slow
def test_a_page_of_many_columns_and_rounds_is_no_heavy_one(tmp_path):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(400, 23))
    table = np.column_stack([values, (values[:, 0] + rng.normal(size=400)) > 0]).astype(float)
    file = tmp_path / "table.csv"
    header = ",".join([*(f"a column with a long name {i}" for i in range(23)), "label"])
    np.savetxt(file, table, fmt="%.4f", delimiter=",", header=header, comments="")
    done = run(tmp_path / "run", "pax", data=file, label="label", **{"num-boost-round": 50})
    assert len(page_of(done).encode()) < 500_000


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_whole_model_of_equal_column_names_is_explained_and_held_against_its_baseline(tmp_path):
    rng = np.random.default_rng(2)
    values = rng.normal(size=(90, 2)).round(3)
    labels = (values.sum(axis=1) > 0).astype(int)
    for name, column, label in (("a", 0, True), ("b", 1, False)):
        lines = [f"id,size{',label' if label else ''}"]
        lines += [f"r{i},{values[i, column]}{f',{labels[i]}' if label else ''}" for i in range(90)]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    files = f"bank={tmp_path / 'a.csv'},shop={tmp_path / 'b.csv'}"
    shared = {"share-column-names": True, "allow-export": True, "id": "id", "label": "label"}
    few = {**SMALL_KEY, **shared, "num-boost-round": 1, "max-depth": 2}
    summary = summary_of(run(tmp_path / "run", "secureboost", "--baselines", data=files, **few))
    columns = {"bank.size", "shop.size"}
    assert set(summary["contributions"]["mean"]) == columns
    assert set(summary["baselines"]["importance"]["pooled"]["total_gain"]) == columns


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_warning_is_printed_once_after_the_result_and_before_the_reports_path(
    tmp_path, write_table
):
    data = write_table("flat", 60, flat=[1] * 60)
    more = [f"data={data}", "label=y", "parties=2", f"run-dir={tmp_path / 'run'}"]
    more += ["valid-fraction=0"]
    words = [word for pair in more for word in ("-c", pair)]
    done = CliRunner().invoke(cli, ["run", "pax", *words])
    warning = "has the same value in every row"
    assert done.exit_code == 0, done.output
    assert done.output.count(warning) == 1
    *_, warned, last = done.output.splitlines()
    assert warned == f"! feature column 'flat' {warning}"
    assert last.startswith("report: ")


def test_every_message_of_the_traffic_names_its_party(binary):
    lines = [json.loads(line) for line in (binary / "ledger.jsonl").read_text().splitlines()]
    names = {line[end] for line in lines for end in ("from", "to")}
    assert names == {"server", "party-1", "party-2"}
    assert "node " not in sections(page_of(binary))["Traffic"].partition("Bytes by party")[2]


def test_gains_and_lift_follow_from_the_rows_called_positive():
    rates = {"tpr": [0, 0.5, 1.0, 1.0], "fpr": [0, 0.0, 0.5, 1.0]}  # 2 of 8 rows are positive
    gains = _gains({"pax": rates}, 0.25)["pax"]
    assert gains["called"] == pytest.approx([1 / 8, 5 / 8, 1.0])
    assert gains["found"] == pytest.approx([0.5, 1.0, 1.0])
    assert gains["lift"] == pytest.approx([4.0, 1.6, 1.0])


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_page_has_gains_lift_rows_by_class_and_missing_values(tmp_path, write_table):
    income = ["" if row % 4 == 0 else row % 7 for row in range(200)]
    data = write_table("gaps", 200, income=income)
    path = run(tmp_path / "run", "pax", data=data, label="y")
    found, summary = sections(page_of(path)), summary_of(path)
    captions = re.findall("<figcaption>(.*?)</figcaption>", found["Predictions"])
    assert any(caption.startswith("Gains") for caption in captions)
    assert any(caption.startswith("Lift") for caption in captions)
    assert summary["missing"] == {"income": 0.25}
    assert '<td>income</td><td class="n">25%</td>' in found[FACTS]
    labels = [line.rsplit(",", 2)[1] for line in data.read_text().splitlines()[1:]]
    weights = summary["class_weights"]
    assert list(weights) == ["party-1", "party-2"]
    totals = [sum(each) for each in zip(*weights.values(), strict=True)]
    assert totals == [labels.count("0"), labels.count("1")]
    assert f"<td>all</td>{''.join(_cell(each, 200) for each in totals)}" in found[FACTS]


def _cell(count, n_rows):
    return f'<td class="n">{count:,.0f} ({percent_text(count / n_rows)})</td>'


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_rows_by_class_are_those_of_all_parties_where_only_sums_leave(tmp_path):
    secure = {"pax.aggregation": "secure", "parties": 3, "data": "wine", "num-boost-round": 1}
    path = run(tmp_path / "run", "pax", **secure)
    assert summary_of(path)["class_weights"] == {"all parties": [59, 71, 48]}
