"""The curves of an additive model as people see them: in the report, the model card and figures."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

import fedapp
from fedapp.report import curves, write_report
from fedapp.trees.curves import Axis, Curve, curves_of
from fedapp.trees.model import Edit
from fedapp.trees.predict import predict_margins
from tests.report.test_page import page_of
from tests.report.test_report import PRIVATE

BRIEF = {"num_boost_round": 4, "max_depth": 2, "max_bin": 16}


@pytest.fixture(scope="module")
def additive(tmp_path_factory):
    """Runs of three classes on numbers, names and missing values: with a pair, and without."""
    folder = tmp_path_factory.mktemp("curves")
    rng = np.random.default_rng(7)
    kinds = np.array(["red", "green", "<b>"])[rng.integers(3, size=300)]
    sizes = rng.normal(size=300).round(2)
    labels = np.where((kinds == "red") ^ (sizes > 0), "x", np.where(sizes > 1, "y", "z"))
    cells = np.where(np.arange(300) % 5, sizes.astype(str), "")
    lines = [",".join(row) for row in zip(kinds, cells, labels, strict=True)]
    table = folder / "table.csv"
    table.write_text("\n".join(["kind,size,label", *lines]) + "\n")
    both = {"data": table, "label": "label", "early_stopping_rounds": 0, **BRIEF}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        return [
            fedapp.run("pax", run_dir=folder / f"{n}", pax={"additive": True, "pairs": n}, **both)
            for n in (1, 0)
        ]


def test_a_line_shows_how_far_a_value_moves_margins_on_the_scale_of_all_columns(additive):
    run, figures = additive[1], additive[1].plot_curves()
    curve = next(curve for curve in curves_of(run.model) if curve.name == "size")
    points = curve.axes[0].points[:-1]
    rows = np.zeros((len(points), 2), np.float32)
    rows[:, curve.axes[0].column] = points
    shown = figures["size"].axes[0].patches[1].get_data()[0]
    moved = predict_margins(run.model, rows)[:, 0]
    assert np.ptp(moved) > 0
    assert shown - shown[0] == pytest.approx(moved - moved[0], abs=1e-5)
    assert figures["size"].axes[0].get_ylim() == figures["kind"].axes[0].get_ylim()
    cuts = [float(text.get_text()) for text in figures["size"].axes[0].get_xticklabels()]
    at = figures["size"].axes[0].get_xticks().astype(int)
    assert cuts == pytest.approx(points[at], rel=0.01)


def test_a_band_is_that_of_the_frame_of_curves(additive):
    first, other = additive
    frame = first.curves(other)
    rows = frame[(frame.column == "size") & (frame["class"] == "x") & frame["from"].notna()]
    band, _, low = first.plot_curves(other)["size"].axes[0].patches[2].get_data()
    assert band == pytest.approx(rows.high)
    assert low == pytest.approx(rows.low)


def test_categories_classes_missing_values_and_pairs_are_drawn(additive):
    figures = additive[0].plot_curves()
    assert {*figures} == {"kind", "size", "kind & size"}
    bars, line = figures["kind"].axes[0], figures["size"].axes[0]
    assert {text.get_text() for text in bars.get_xticklabels()} == {"red", "green", "<b>"}
    kind = next(curve for curve in curves_of(additive[0].model) if curve.name == "kind")
    heights = sorted(bar.get_height() for bar in bars.patches[1:])
    assert heights == pytest.approx(sorted(kind.values[:, :-1].ravel()))
    assert [text.get_text() for text in bars.get_legend().get_texts()] == ["x", "y", "z"]
    assert sum(mark.get_marker() == "D" for mark in line.get_lines()) == 3
    assert len(figures["kind & size"].axes) == 2  # and its colours


@pytest.mark.parametrize(
    ("kind", "edges", "texts", "rotation"),
    [
        ("boolean", [1], ["no", "yes"], 0),
        ("date", [0, 31], ["1970-01-01", "1970-02-01"], 90),
        ("number", [0, 31], ["0", "31"], 0),
    ],
)
def test_ticks_are_in_the_words_of_the_table_and_do_not_touch(
    additive, kind, edges, texts, rotation
):
    model = replace(additive[1].model, kinds=(kind, kind))
    axis, values = Axis("a", 0, np.array(edges, np.float32)), np.eye(3, len(edges) + 2)
    curve = Curve((axis,), values, values[0])
    (figure,) = curves.figures_of(model, [(curve, values, values)])
    labels = figure.axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == texts
    assert {label.get_rotation() for label in labels} == {rotation}


def test_the_report_and_the_card_have_a_section_of_curves(additive, binary, tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "_MOST_DRAWN", 2)
    folder = shutil.copytree(additive[0].path, tmp_path / "run")
    page = write_report(folder).read_text().partition('id="curves"')[2].partition("</section>")[0]
    assert page.count("<figure>") == 2
    assert "1 columns and pairs that add less are not drawn" in page
    assert "to the margin of each class." in page
    card = (folder / "model-card.md").read_text().partition("## Curves")[2].partition("\n## ")[0]
    assert "The model is a sum: every row starts from " in card
    assert {"kind", "size"} == set(re.findall(r"^\| (\w+), class [xyz] \| \d", card, re.MULTILINE))
    assert 'id="curves"' not in page_of(binary)


def test_what_epsilon_was_spent_on_and_who_edited_is_stated(additive):
    edited = replace(additive[0].model, edits=(Edit("Berg", "2026-01-02", "8f"),))
    text = curves.about(edited, {"privacy": PRIVATE})
    assert "Edited: the curves of model 8f were edited by Berg on 2026-01-02;" in text
    assert "editing them costs no further budget. Of epsilon 2 the mean label took 2%" in text
    assert "the cuts 40%, the curves 58%" in text


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([0, 1, 5, 6], "rises"),
        ([3, 2, 2, 0], "falls"),
        ([0, 4, 4, 0], "rises and falls"),
        ([0, 5, 4.9, 6], "rises"),
    ],
)
def test_where_a_curve_leads_is_in_words(values, words):
    axis = Axis("a", 0, np.arange(3, dtype=np.float32))
    curve = Curve((axis,), np.array([[*values, 9.0]]), np.full(5, 0.25))
    assert curves.direction(curve, 0) == words
