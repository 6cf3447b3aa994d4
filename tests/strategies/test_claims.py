"""Sums that a dishonest party of a plain PAX run sends, and what tells a site of a bad model."""

import logging
from dataclasses import replace
from functools import wraps
from types import SimpleNamespace

import numpy as np
import pytest

from clients import pax as party
from clients.handshake import Coded
from clients.scoring import warn_if_worse
from fedapp.histograms.bins import Cuts
from fedapp.messages.pax import GrowRequest, SketchRequest
from fedapp.report.summary import worse_than_alone
from fedapp.runs.local import run_local
from fedapp.trees.categories import NO_SET, NO_SETS
from fedapp.trees.histogram_checks import HistogramChecks
from fedapp.trees.losses import LossParameters
from fedapp.trees.structure import ROUTE
from tests.federated import summary_of
from tests.network import run
from tests.tampering import refuses

LIAR = "party-2"


@pytest.fixture
def lie(monkeypatch):
    """``lie(change)``: party-2 changes sums before it sends them."""
    honest = party.HANDLERS[GrowRequest]

    def make(change):
        def grow(site, request):
            sent = honest(site, request)
            if site.name != LIAR:
                return sent
            reply = sent.reply(*sent.arrays)
            names = "histograms", "missing", "root_sums"
            sums = {field: getattr(reply, field).copy() for field in names}
            change(sums, request)
            return replace(reply, **sums)

        monkeypatch.setitem(party.HANDLERS, GrowRequest, grow)

    return make


def times(factor, *fields, part=0, level=0):
    """Gradients (part 0) or hessians (1) of these fields, from a level on."""

    def change(sums, request):
        for field in fields if request.level >= level else ():
            sums[field][..., part] *= factor

    return change


ALL = "histograms", "root_sums"


def into_one_bin(sums, request):
    """Hessians of all 16 bins of a column in the one that has the fewest."""
    if request.level:
        own = sums["histograms"][:, :16, 1]
        fewest = own.sum(axis=0).argmin()
        whole = own.sum(axis=1)
        own[:] = 0
        own[:, fewest] = whole


def no_value(sums, request):
    """Rows without a value, which the sketch does not know."""
    sums["histograms"][:, :16] = 0
    sums["missing"][:, 0] = 100


def swallow_parents(sums, request):
    """A gradient so large that the parent minus it is minus it."""
    if request.level:
        sums["histograms"][0, 0, 0] = 1e200


HISTOGRAMS = "^party-2: GrowReply.histograms must have"
WEIGHT = HISTOGRAMS + " gradients and hessians that the weight of its rows allows, .* level {}$"
TOTAL = HISTOGRAMS + " the same total in every column, rows without a value included, .* level {}$"
CHILDREN = HISTOGRAMS + " children that add up to their parents, got others at level {}$"
LIES = {  # of an objective, if not of classes: what is changed, and the rule
    "gradients": ("", times(-20, *ALL), WEIGHT.format(0)),
    "hessians": ("", times(1.5, *ALL, part=1), WEIGHT.format(0)),
    "roots": ("", times(0.5, "root_sums"), TOTAL.format(0)),
    "bins": ("", times(0.5, "histograms", part=1), TOTAL.format(0)),
    "rows without a value": ("", no_value, TOTAL.format(0)),
    "bins below": ("", times(0.5, "histograms", level=1), TOTAL.format(1)),
    "one bin": ("", into_one_bin, CHILDREN.format(1)),
    "a difference": ("reg:squarederror", swallow_parents, CHILDREN.format(1)),
    "gradients of classes": ("multi:softprob", times(-20, *ALL), WEIGHT.format(0)),
    "hessians of classes": ("multi:softprob", times(4, *ALL, part=1), WEIGHT.format(0)),
    "counts of rows": ("reg:squarederror", times(20, *ALL, part=1), WEIGHT.format(0)),
}


@pytest.mark.parametrize(("objective", "change", "expected"), LIES.values(), ids=LIES)
def test_sums_that_no_rows_have_end_the_run_by_name(
    settings, made, lie, objective, change, expected
):
    lie(change)
    binary = settings(data="breast-cancer", parties=3, max_bin=48, max_depth=3)
    refuses(expected, made("pax", objective, parties=3) if objective else binary)


def test_a_total_beyond_all_numbers_in_one_tree_hides_no_lie_in_another():
    cuts = Cuts(np.tile(np.float32([0, 1]), 2), np.array([0, 2, 4]), np.full(2, -1, np.float32))
    weights = np.array([5.0, 3, 6, 4, 10])  # of the bins of two columns, and of all rows
    losses = LossParameters(1.0, 0.7, 1.5)
    checks = HistogramChecks(cuts, np.arange(4), weights, False, "reg:squarederror", losses)
    trees, missing = np.arange(2, dtype=np.int32), np.array([[2, 0], [1, 0]], np.int32)
    sums, routes = np.zeros((2, 4, 2)), np.zeros(2, ROUTE)
    sums[..., 1] = weights[:-1]
    sums[0, :2, 0] = 1.7e308
    routes["tree"], routes["left"], routes["column"], routes["set"] = trees, 1, trees, NO_SET
    routes["threshold"], routes["default_left"] = [1, 0], 1

    def check(level, routes, histograms, missing):
        nodes = np.full(2, level, np.int32)
        asked = {"columns": trees, "wanted_trees": trees, "wanted_nodes": nodes, "level": level}
        sent = {"missing": missing, "root_sums": np.array([[0.0, 10], [0, 10]])}
        sent |= {"histograms": histograms, "train_sums": np.array([0, 0, 1.0])}
        checks.check(SimpleNamespace(**asked), SimpleNamespace(**sent), routes, NO_SETS)

    check(0, routes[:0], sums, missing[[0, 0]])
    sums[1, :, 1] = 2, 1, 0, 4  # the right child's rows, as the left one's
    with pytest.raises(ValueError, match="must have the same total in every column"):
        check(1, routes, sums, missing)


def test_bins_that_weigh_more_than_all_rows_end_the_run_by_name(settings, lie, monkeypatch):
    """Else their gradients may be as large."""
    honest = party.HANDLERS[SketchRequest]

    def sketch(site, request):
        reply = honest(site, request)
        return replace(reply, masses=reply.masses * 20) if site.name == LIAR else reply

    monkeypatch.setitem(party.HANDLERS, SketchRequest, sketch)
    lie(times(-20, *ALL))
    rule = r"^party-2: SketchReply.masses must be those of the rows, which weigh \d+ in all$"
    refuses(rule, settings(data="breast-cancer", parties=3, max_bin=48, max_depth=3))


def test_the_party_is_left_out_where_others_may_go_on(settings, lie):
    lie(times(-20, *ALL))
    more = {"parties": 3, "min_parties": 2, "num_boost_round": 10}
    found = summary_of(run_local(settings(data="breast-cancer", **more)))
    assert [gone["party"] for gone in found["left_out"]] == [LIAR]
    assert found["metrics"]["test"]["auc"] > 0.95


def test_a_party_that_merges_bins_is_held_to_totals(settings, lie):
    given = {"data": "breast-cancer", "parties": 3, "least_bin_rows": 5, "max_depth": 3}
    run_local(settings(**given))
    lie(times(0.5, "histograms", level=1, part=1))
    run_local(settings(**given))  # in all columns alike: nothing to compare with
    lie(lambda sums, request: sums["histograms"][:, :4].__imul__(0.5))
    refuses(TOTAL.format(0), settings(**given))


# What tells a site of sums that keep the rules


@pytest.fixture
def flipped(monkeypatch):
    """Sites whose training labels are turned round: their sums are those of rows."""
    names = set()
    honest = Coded.code

    @wraps(honest)
    def code(self, request):
        found = honest(self, request)
        if self.name in names:
            self.labels = {**self.labels, "train": 1 - self.labels["train"]}
        return found

    monkeypatch.setattr(Coded, "code", code)
    return names


def warned(caplog):
    return sum("the federated model's mean squared error" in text for text in caplog.messages)


def test_a_site_whose_training_rows_are_of_one_class_is_warned_too(caplog):
    ones = np.ones(20, np.float32)
    rows = np.arange(40, dtype=np.float32).reshape(20, 2), ones, ones
    with caplog.at_level(logging.WARNING, "fedapp.site"):
        warn_if_worse("binary:logistic", -ones[:, None], rows, rows, ())
    assert warned(caplog) == 1


@pytest.mark.by_default("more1")
@pytest.mark.parametrize("more", [{}, {"pax__aggregation": "secure"}, {"strategy": "bagging"}])
def test_a_site_is_warned_of_a_model_worse_than_its_rows_give(
    settings, sites, write_table, flipped, caplog, more
):
    tables = [
        {"name": name, "data": write_table(name, 300, seed), "allow": "pax,bagging"}
        for seed, name in enumerate(("bank", "insurer", "shop"))
    ]
    given = {"strategy": "pax", "parties": 3, "num_boost_round": 20, "max_bin": 90, **more}
    counts = []
    for liars in (set(), {"insurer", "shop"}):
        flipped |= liars
        caplog.clear()
        with caplog.at_level(logging.WARNING, "fedapp.site"):
            found = run(settings(**given), sites(*tables))
        counts.append(warned(caplog))
        assert not any("mean squared error" in text for text in summary_of(found)["warnings"])
    assert counts[0] == 0
    assert counts[1] >= 1


def test_a_simulation_compares_nothing_at_its_sites(settings, caplog):
    run_local(settings(data="breast-cancer", parties=3, num_boost_round=1, eta=0.001))
    assert not warned(caplog)


STUMP = {"strategy": "federated-forest", "federated_forest__trees": 1}
STUMP |= {"federated_forest__max_depth": 1}


@pytest.mark.by_default("more1")
@pytest.mark.parametrize("more", [{"num_boost_round": 1, "eta": 0.001}, STUMP])
def test_the_party_with_the_labels_is_warned(vertical, settings, sites, write_table, caplog, more):
    shown = np.random.default_rng(3).normal(size=400).round(2)
    bank = write_table("bank", 400, a=shown, y=(np.abs(shown) > 0.7).astype(int))
    shop = write_table("shop", 400, a=None, b=None, y=None, c=range(400))
    usual = {"allow": "secureboost,federated-forest", "allow-export": True}
    nodes = {"name": "bank", "data": bank}, {"name": "shop", "data": shop, "label": ""}
    contexts = sites(*(node | usual for node in nodes))
    given = {"parties": 2, "align": "ordered", "objective": "binary:logistic"}
    run((settings if "strategy" in more else vertical)(**given, **more), contexts)
    assert warned(caplog) == 1


def test_baselines_warn_of_a_party_that_does_better_alone():
    summary = {"objective": "binary:logistic", "rows": {"test": 100}}
    summary["metrics"] = {"test": {"auc": 0.8}}
    alone = {"a": {"auc": 0.89}, "b": {"auc": 0.91}, "c": {"auc": None}, "d": {}}
    (line,) = worse_than_alone(summary, alone)
    assert line.startswith("test auc is 0.8000, and 0.9100 of b alone: its rows may be of another")
    numbers = {**summary, "objective": "reg:squarederror", "metrics": {"test": {"rmse": 11.5}}}
    assert len(worse_than_alone(numbers, {"a": {"rmse": 10.0}, "b": {"rmse": 11}})) == 1
    assert not worse_than_alone({**summary, "metrics": {"test": {}}}, alone)
