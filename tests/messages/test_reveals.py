"""Reveals by settings: conditions are of settings that exist, and hide only what does not hold."""

import importlib
import re
from itertools import zip_longest
from typing import get_args

import pytest

from fedapp.commands.run import list_settings
from fedapp.messages.methods import Family, all_methods, modules_of_method
from fedapp.messages.reveals import facts_of, in_full, in_short, paragraphs_of, revealed

MODULES = dict.fromkeys(module for method in all_methods() for module in modules_of_method(method))
# Beside settings: names, and the values that they have; of the number of parties any.
FACTS = {"family": get_args(Family), "trains": ("true", "false"), "parties": ()}
EVERY = [(module, paragraph) for module in MODULES for paragraph in paragraphs_of(module)]
SHORT = {paragraph.text for _, paragraph in EVERY if paragraph.is_short and paragraph.is_item}
LONGEST = 156  # characters of a sentence: two lines of a terminal of 80
BINARY = {"objective": "binary:logistic", "parties": 3, "min-parties": 0, "epsilon": 0.0}
MASKED = {**BINARY, "aggregation": "secure"}
VERTICAL = {"parties": 2, "align": "psi", "join": "inner", "label-epsilon": 0.0}


@pytest.fixture(scope="module")
def settings():
    """Settings by their names without a section, of all methods that have one of the name."""
    by_name = {}
    for name, one in list_settings().items():
        by_name.setdefault(name.rpartition(".")[2], []).append(one)
    return by_name


def is_value(text, setting):
    """Whether a text is a value of a setting, or is none where it may be empty."""
    if setting.name == "strategy":
        return text in all_methods()
    if setting.values in ("true or false", "text"):
        return text in {"true or false": ("true", "false"), "text": ("none",)}[setting.values]
    is_number = "number" in setting.values and text.replace(".", "", 1).isdigit()
    return is_number or text in re.findall("`(.+?)`", setting.values)


@pytest.mark.parametrize("condition", dict.fromkeys(c for _, p in EVERY for c in p.conditions))
def test_a_condition_is_of_a_setting_and_its_values(condition, settings):
    for value in condition.values:
        if condition.name in FACTS:
            assert value in FACTS[condition.name] or value.isdigit()
        else:
            assert any(is_value(value, one) for one in settings[condition.name])


def alternatives(conditions):
    """Facts by which all conditions hold, then for each one those by which it does not."""
    true = {c.name: c.values[0] if c.is_equal else "another" for c in conditions}
    yield true
    for c in conditions:
        yield {**true, c.name: "another" if c.is_equal else c.values[0]}


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_each_paragraph_is_shown_by_some_settings_and_no_list_without_an_item_or_its_head(module):
    for paragraph in paragraphs_of(module):
        for number, facts in enumerate(alternatives(paragraph.conditions)):
            shown = revealed(module, facts)
            assert (paragraph.text in texts(shown)) == (number == 0)
            for one, following in zip_longest(shown, shown[1:]):
                assert not one.is_head or (following and following.is_item)


def texts(paragraphs):
    return "\n".join(paragraph.text for paragraph in paragraphs)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_what_is_not_known_hides_nothing_and_is_named(module):
    for paragraph, one in zip(paragraphs_of(module), revealed(module, {}), strict=True):
        assert one.text.endswith(paragraph.text)
        assert all(condition.name in one.text for condition in paragraph.conditions)


@pytest.mark.parametrize("method", all_methods())
def test_every_method_has_sentences_in_short_that_fit_two_lines(method):
    shown = revealed(modules_of_method(method)[0], facts_of(method, {}))
    assert [paragraph.text for paragraph in shown if paragraph.is_short and paragraph.is_item]
    assert not [text for text in SHORT if len(text.replace("``", "")) > LONGEST]


@pytest.mark.parametrize(
    ("method", "settings", "shown", "hidden"),
    [
        ("pax", MASKED, "only sums over all parties", "can rebuild most rows"),
        ("pax", BINARY, "can rebuild most rows", "only sums over all parties"),
        ("pax", MASKED | {"epsilon": 1.0}, "bounded by the epsilon", "may be of one row:"),
        ("pax", MASKED | {"parties": 2}, "With two parties", "claim that a party is lost"),
        ("pax", MASKED | {"min-parties": 2}, "claim that a party is lost", "With two parties"),
        ("bagging", BINARY, "each party's trees, unencrypted", "random to anyone"),
        ("secureboost", VERTICAL, "No id leaves a party", "whole model, in which"),
        ("describe-rows", BINARY, "No model is trained", "whole model, in which"),
    ],
)
def test_sentences_are_those_of_the_settings(method, settings, shown, hidden):
    text = "\n".join(in_short(method, facts_of(method, settings)))
    assert shown in text
    assert hidden not in text


@pytest.mark.parametrize(
    ("name", "method", "settings", "shown", "hidden"),
    [
        ("pax", "pax", MASKED, "breaks the rules gives a value to one leaf", "of each party"),
        ("pax", "pax", BINARY, "breaks the rules gives a value to one leaf", "Rows are counted by"),
        ("handshake", "secureboost", VERTICAL, "the server learns each party's name", "labels"),
        ("secagg", "pax", MASKED, "Runs add up", "inventing"),
        ("secagg", "pax", BINARY, "", "sum"),
        ("pax_secure", "pax", MASKED, "", "noise"),
    ],
)
def test_the_rest_is_what_holds(name, method, settings, shown, hidden):
    module = importlib.import_module(f"fedapp.messages.{name}")
    text = in_full(module, facts_of(method, settings))
    assert shown.lower() in text.lower()
    assert hidden not in text
