"""Figures of reports: what they name, and whether a page can hold several."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np

from fedapp.report import plots
from fedapp.report.page import confusion_table


def texts(svg: str) -> list[str]:
    """The texts of a drawing, as they are shown."""
    words = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return ["".join([each.text or "", *(part.tail or "" for part in each)]) for each in words]


def titles(svg: str) -> list[str]:
    """What is shown of a text when one points at it."""
    return [str(each.text) for each in ElementTree.fromstring(svg).findall(".//{*}text/{*}title")]


def rounds_of(**scores: object) -> list[dict]:
    return [{"round": i, "train": {}, "valid": {}} | scores for i in range(1, 4)]


def test_undefined_scores_leave_a_gap_in_the_curve():
    rounds = rounds_of(train={"auc": None})
    assert plots.scores_by_round(rounds, "auc").startswith("<svg")
    assert plots.compared_scores({"_a": rounds, "$b^{$": rounds}, "auc").startswith("<svg")


def test_names_no_font_can_draw_are_drawn_without_a_warning():
    gains = {"身份": 3.0, "a$^{$b": 2.0, "line\nbreak\x00": 1.0, "x" * 500: 0.0}
    names = texts(plots.importance(gains))
    assert {"身份", "a$^{$b", "line break", "x" * 31 + "…"} <= set(names)


def test_a_figure_takes_the_colours_of_its_page_and_shares_no_id_with_another():
    first, second = (plots.importance({"a": 1.0, name: 2.0}) for name in "bc")
    assert "fill: var(--blue)" in first
    assert not re.findall("(?:fill|stroke|color)[:= ]+#", first)
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r"url\(#([^)]+)", first)) <= ids[0]


def test_a_cut_name_has_the_whole_as_its_title():
    names = ["a" * 40 + str(i) for i in range(3)]
    for svg in (plots.importance(dict.fromkeys(names, 1.0)), plots.column_bars({names[0]: 1}, "")):
        shown = [text for text in texts(svg) if text.startswith("aa")]
        assert shown == ["a" * 31 + "…"] * len(shown)
        assert titles(svg) == names[: len(shown)]


def test_names_with_markup_are_texts_in_a_figure():
    svg = plots.column_bars({"<script>alert(1)</script>" * 3: 1.0, "&amp;": 2.0}, "size")
    assert "&amp;" in texts(svg)
    assert titles(svg) == ["<script>alert(1)</script>" * 3]
    assert "<script" not in svg


def test_residuals_without_rows_are_drawn():
    edges = np.linspace(-1, 1, 1001).tolist()
    of_model = {"federated": {"edges": edges, "counts": [0.0] * 1000}}
    assert plots.residuals(of_model).startswith("<svg")


def test_importance_is_drawn_as_shares_of_the_models_own_gain():
    svg = plots.importance({"a": 3.0, "b": 1.0}, {"a": 10.0, "c": 30.0})
    assert {"federated", "pooled", "share of the total gain"} <= set(texts(svg))
    widths = bar_widths(svg)
    assert widths["blue"] == [0.75, 0.25]
    assert widths["orange"] == [0.25, 0.0]


def bar_widths(svg: str) -> dict[str, list[float]]:
    """Widths of the bars by colour, as parts of 0.75 of the longest one."""
    found: dict[str, list[float]] = {}
    for path in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"):
        color = re.search(r"fill: var\(--(blue|orange)\)", path.get("style") or "")
        if color and path.get("clip-path"):
            xs = [float(x) for x in re.findall(r"[ML] (\S+)", path.get("d") or "")]
            found.setdefault(color[1], []).append(max(xs) - min(xs))
    longest = max(max(widths) for widths in found.values())
    return {c: [round(0.75 * w / longest, 6) for w in widths] for c, widths in found.items()}


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


def test_of_many_classes_the_pairs_that_are_confused_most_are_listed():
    counts = np.eye(40) * 5
    counts[7, 9], counts[1, 2] = 3, 4
    html = confusion_table(counts.tolist(), [f"c{i}" for i in range(40)], "Test rows")
    rows = re.findall(r"<tr><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td><td class=\"n\">(.*?)</td>", html)
    assert rows == [("c1", "c2", "4"), ("c7", "c9", "3")]
    assert "of 40 classes" in html
    assert confusion_table(np.eye(40).tolist(), [str(i) for i in range(40)], "") == ""
