"""Figures of reports: what they name, and whether a page can hold several."""

import re
from xml.etree import ElementTree

import numpy as np

from fedapp.report import plots
from fedapp.report.page import confusion_table
from fedapp.report.tree import rule_text


def test_names_are_texts_that_are_drawn_without_a_warning_even_where_no_font_can():
    script = "<script>alert(1)</script>" * 3
    names = {"身份": "身份", "a$^{$b": "a$^{$b", "line\nbreak\x00": "line break", "&amp;": "&amp;"}
    names |= {"x" * 500: "x" * 31 + "…", script: script[:31] + "…"}
    svg = plots.importance(dict.fromkeys(names, 1.0), "gain").to_svg()
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    assert {*names.values()} <= {"".join(text.itertext()) for text in texts}
    assert "<script" not in svg


def test_undefined_scores_and_residuals_of_no_rows_are_drawn():
    rounds = [{"round": number, "train": {"auc": None}, "valid": {}} for number in range(1, 4)]
    none = {"edges": np.linspace(-1, 1, 1001).tolist(), "counts": [0.0] * 1000}
    for figure in (
        plots.scores_by_round(rounds, "auc", None, "round"),
        plots.residuals({"federated": none}),
    ):
        assert figure.to_svg().startswith("<svg")


def test_a_figure_shares_no_id_with_another():
    first, second = (plots.importance({"a": 1.0, name: 2.0}, "gain").to_svg() for name in "bc")
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r"url\(#([^)]+)", first)) <= ids[0]


def test_importance_is_drawn_as_shares_of_the_models_own_gain():
    (axes,) = plots.importance({"a": 3.0, "b": 1.0}, "gain", {"a": 10.0, "c": 30.0}).axes
    assert axes.get_xlabel() == "gain, as a share of its sum"
    widths = {bars.get_label(): [bar.get_width() for bar in bars] for bars in axes.containers}
    assert widths == {"federated": [0.75, 0.25], "pooled": [0.25, 0.0]}


def test_a_confusion_table_shades_within_the_true_class_and_names_classes():
    html = confusion_table([[3, 1], [0, 4]], ["<no>", "y" * 30], "caption")
    assert re.findall(r">([\d,]+)</td>", html) == ["3", "1", "0", "4"]
    assert re.findall(r"--(\w+)\) (\d+)%", html) == [
        ("blue", "38"),
        ("vermilion", "12"),
        ("blue", "50"),
    ]
    assert html.count("&lt;no&gt;") == 2
    assert html.count(f'<span title="{"y" * 30}">{"y" * 11}…</span>') == 2


def test_a_rule_of_a_tree_is_in_the_words_of_its_column():
    for threshold, kind, text in (
        (1.0, "boolean", "= no"),
        (0.5, "boolean", "= no"),
        (0.0, "boolean", "< 0"),  # separates missing values
        (17166.0, "date", "< 2016-12-31"),
        (17165.5, "date", "< 2016-12-30 12:00"),  # also true of whole days
        (0.520833, "time", "< 12:30"),
        (3e38, "time", "< 3e+38"),
        (3e38, "date", "< 3e+38"),
        (2.5, "duration", "< 2.5 days"),
        (0.123456, "number", "< 0.12346"),
        (0.123456, "", "< 0.12346"),
    ):
        assert rule_text(threshold, kind) == text


def test_a_bar_of_an_interval_is_at_its_models_name_and_blue_where_it_excludes_0():
    models = {"federated": (0.8, 0.7, 0.9), "pooled": (0.7,), "a alone": (0.6, 0.5, 0.7)}
    less = {"pooled": (0.0, 0.0, 0.0), "a alone": (0.2, 0.1, 0.3)}
    left, right = plots.intervals(models, less, "auc").axes
    for ax, spans in ((left, models), (right, less)):
        dots = [line for line in ax.lines if line.get_marker() == "o"]
        points = {int(dot.get_ydata()[0]): dot.get_xdata()[0] for dot in dots}
        assert {name: points[place] for place, name in enumerate(models) if name in spans} == {
            name: span[0] for name, span in spans.items()
        }
    assert [label.get_text() for label in left.get_yticklabels()] == list(models)
    assert [dot.get_color() == plots.BLUE for dot in dots] == [False, False, True]
