"""Descriptions of tables of the same columns: figures of all rows, from sums."""

import csv
import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings as tries
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from clients import describe as clients_describe
from fedapp.errors import ConfigError, FedappError, PartyError
from fedapp.histograms.fixed_point import Bounds, from_fixed
from fedapp.home import home
from fedapp.messages.describe import CellsRequest, CountRequest
from fedapp.metrics.tables import (
    MOST_BINS,
    PERCENTS,
    association,
    count_cells,
    cut,
    differences,
    divergence,
    in_groups,
    label_terms,
    split_cells,
    term_exponents,
)
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.policy import check_policy
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from simulations.deployment import settings_of
from strategies.describe import DescribeRows, near_names
from strategies.run import check_read
from tests.deployed import same_columns, same_rows, started, use_tables
from tests.federated import summary_of
from tests.network import fails_from
from tests.network import run as run_on_network
from tests.stored import with_arrays
from tests.tables import made_columns, write_rows
from tests.transcript import check_declared, check_no_rows, listen, masked_in

OBJECTIVES = ("binary:logistic", "multi:softprob", "reg:squarederror")
SECURE = {"describe_rows__aggregation": "secure"}
LEAST = 7


@pytest.fixture
def made(settings, tmp_path):
    """``made(objective, **overrides)``: a description of rows with missing values and names."""

    def make(objective="binary:logistic", **more):
        data = tmp_path / f"{objective[:5]}.csv"
        if not data.exists():
            columns = made_columns(objective)
            rng = np.random.default_rng(1)
            columns["c"] = rng.choice(["oslo", "rome", "bonn"], 400, p=(0.6, 0.39, 0.01))
            columns["d"] = np.exp(rng.normal(size=400)).round(5)
            write_rows(data, columns)
        usual = {"strategy": "describe-rows", "data": str(data), "label": "y", "parties": 3}
        return settings(**{**usual, "objective": objective, **more})

    return make


def document_of(folder):
    return json.loads((folder.path / "description.json").read_text())


def figures_of(folder):
    """What does not depend on who has which rows."""
    columns = document_of(folder)["columns"]
    return [{name: one[name] for name in one if name != "by_party"} for one in columns]


# Figures


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_description_is_that_of_all_rows_in_one_place_bit_for_bit(made, objective):
    pooled = figures_of(run_local(made(objective, parties=1)))
    assert len(pooled) == 7
    for parties in (2, 3, 5):
        for more in ({}, SECURE):
            assert figures_of(run_local(made(objective, parties=parties, **more))) == pooled


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, SECURE])
def test_flowers_simulation_describes_the_same(made, simulate, more):
    local = run_local(made(**more))
    folder = simulate(made(**more))
    assert document_of(folder)["columns"] == document_of(local)["columns"]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_figures_are_numpys_of_the_training_rows(made, objective):
    run = made(objective, test_fraction=0.0, valid_fraction=0.0)
    by_name = {one["name"]: one for one in figures_of(run_local(run))}
    lines = [line.split(",") for line in Path(run.data).read_text().splitlines()]
    for place, name in enumerate(lines[0]):
        texts = np.array([line[place] for line in lines[1:]])
        column = by_name[name]
        assert column["missing"] == (texts == "").sum()
        if column["categories"]:
            counts = [(texts == one).sum() for one in column["categories"]]
            assert column["counts"] == counts
            continue
        values = np.sort(texts[texts != ""].astype(np.float32))
        edges = [-np.inf, *column["edges"], np.inf]
        for percent, value in column["quantiles"].items():
            exact = values[len(values) * int(percent) // 100]
            assert value == pytest.approx(exact, rel=2**-6), (name, percent)
        pairs = pairwise(np.array(edges, np.float32).tolist())
        inside = [((values >= low) & (values < high)).sum() for low, high in pairs]
        assert inside == column["counts"]


def tables(seed):
    """Values, widths of categories, and labels, all at random."""
    rng = np.random.default_rng(seed)
    n_rows, n_columns = int(rng.integers(1, 300)), int(rng.integers(1, 5))
    widths = rng.choice([0, 0, 3], n_columns)
    values = rng.normal(size=(n_rows, n_columns)) * 10.0 ** rng.integers(-3, 6, n_columns)
    values = np.where(rng.random(n_columns) < 0.5, values.round(), values)
    values = np.where(widths, rng.integers(0, 3, values.shape), values)
    values[rng.random(values.shape) < rng.choice([0, 0.3, 0.99])] = np.nan
    return values.astype(np.float32), widths, rng.integers(0, 2, n_rows).astype(np.float32)


@pytest.mark.slow
@drawn(st.integers(0, 10**6))
@tries(max_examples=150, deadline=None)
def test_quantiles_and_cells_are_those_of_sorted_values(seed):
    values, widths, labels = tables(seed)
    cuts, points, whole = cut(values, widths)
    counts, sums = count_cells(values, cuts, label_terms(labels, 2, Bounds(len(labels))))
    cells = split_cells(counts, cuts.widths)
    np.testing.assert_array_equal(sums.sum(axis=1), counts)
    for place, of_column in enumerate(cells):
        present = np.sort(values[:, place][~np.isnan(values[:, place])])
        assert of_column[0] == len(values) - len(present)
        assert of_column.sum() == len(values)
        if widths[place]:
            np.testing.assert_array_equal(
                of_column[1:], np.bincount(present.astype(int), minlength=3)
            )
            continue
        assert len(of_column) - 1 <= MOST_BINS
        assert whole[place] == (len(np.unique(present)) <= MOST_BINS)
        if len(present):
            exact = present[len(present) * np.array(PERCENTS) // 100]
            if whole[place]:
                np.testing.assert_array_equal(points[place], exact)
            # a value that begins like no other is known by its first digits only
            lows = np.sort(present)[np.searchsorted(present, points[place])]
            assert (np.searchsorted(present, lows) <= np.searchsorted(present, exact)).all()
        else:
            assert not len(points[place])


@pytest.mark.slow
@drawn(st.integers(0, 10**6))
@tries(max_examples=100, deadline=None)
def test_associations_are_those_of_the_rows(seed):
    values, widths, labels = tables(seed)
    cuts, _, _ = cut(values, widths)
    counts, sums = count_cells(values, cuts, label_terms(labels, 2, Bounds(len(labels))))
    per_column = zip(
        split_cells(counts, cuts.widths), split_cells(sums, cuts.widths), widths, strict=True
    )
    for place, (cells, of_labels, width) in enumerate(per_column):
        figures = association(cells, of_labels.astype(float), not width, True)
        column = values[:, place]
        codes = np.where(
            np.isnan(column), -1, np.searchsorted(cuts.column(place)[:-1], column, "right")
        )
        rates = np.array([labels[codes == code].mean() for code in codes])
        if 0 < labels.sum() < len(labels):
            assert figures["auc"] == pytest.approx(roc_auc_score(labels, rates), abs=2e-6)
            explained = rates.var() / labels.var()
            assert figures["explained"] == pytest.approx(explained, abs=2e-6)
        else:
            assert figures["explained"] is figures["auc"] is None
        present = codes >= 0
        if not width and len(np.unique(codes[present])) > 1 and 0 < labels[present].mean() < 1:
            ranks = np.array([(codes[present] < one).sum() for one in codes[present]])
            ranks = ranks + np.array([(codes[present] == one).sum() for one in codes[present]]) / 2
            expected = np.corrcoef(ranks, labels[present])[0, 1]
            assert figures["correlation"] == pytest.approx(expected, abs=2e-6)


def test_an_information_value_and_a_stability_index_are_one_formula():
    good, bad = np.array([10, 20, 30]), np.array([30, 20, 10])
    p, q = (good + 0.5) / 61.5, (bad + 0.5) / 61.5
    assert divergence(good, bad) == pytest.approx(((p - q) * np.log(p / q)).sum(), abs=1e-6)
    assert divergence(good, good) == 0


def test_sums_of_measures_are_exact_in_any_order():
    labels = np.array([1.5, -2.25, 1e3, 3e-5], dtype=np.float32)
    bounds = Bounds(4, 0, 10)
    whole = label_terms(labels, 0, bounds)
    sums = from_fixed(whole.sum(axis=0), term_exponents(0, bounds))
    np.testing.assert_allclose(sums, [labels.sum(dtype=float), (labels.astype(float) ** 2).sum()])
    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        np.testing.assert_array_equal(whole[order].sum(axis=0), whole.sum(axis=0))


# Floors


@pytest.mark.slow
@drawn(st.integers(0, 10**6), st.integers(2, 40))
@tries(max_examples=100, deadline=None)
def test_every_value_is_of_a_group_of_rows(seed, least):
    values, widths, _ = tables(seed)
    coarse = in_groups(values, widths, least)
    for place in range(values.shape[1]):
        column = np.where(np.isnan(coarse[:, place]), np.inf, coarse[:, place])
        shown, counts = np.unique(column, return_counts=True)
        assert counts.min() >= min(least, len(values)) or (shown == np.inf).all()
        present = np.sort(values[~np.isnan(values[:, place]), place])
        if not widths[place] and len(present) >= least:  # no group begins before the next
            assert np.isin(shown[shown < np.inf], present[least - 1 :]).all()
        if not widths[place]:  # the order stays
            both = ~np.isnan(values[:, place]) & (column != np.inf)
            order = np.argsort(values[both, place], kind="stable")
            assert (np.diff(column[both][order]) >= 0).all()
    np.testing.assert_array_equal(in_groups(values, widths, 0), values)


@pytest.mark.slow
@drawn(st.integers(0, 10**6), st.integers(2, 12))
@tries(max_examples=100, deadline=None)
def test_where_labels_are_summed_every_value_has_enough_rows_of_each_class(seed, least):
    values, widths, _ = tables(seed)
    classes = np.random.default_rng(seed).integers(0, 3, len(values)) % 2
    frequent = np.bincount(classes)[classes] >= least
    values, classes = values[frequent], classes[frequent]
    rows = in_groups(values, widths, least)
    coarse = in_groups(rows, widths, least, classes)
    for place in range(values.shape[1]):
        _, cells = np.unique(coarse[:, place], return_inverse=True)
        for one in np.unique(classes):
            counts = np.bincount(cells[classes == one])
            assert not ((counts > 0) & (counts < least)).any()
        # Groups are made of whole ones, so that differences are of groups too.
        _, fine = np.unique(rows[:, place], return_inverse=True)
        pairs = np.unique(np.stack([fine, cells]), axis=1)
        assert pairs.shape[1] == len(np.unique(fine))


@pytest.mark.parametrize("more", [{}, SECURE])
def test_no_count_is_of_fewer_rows_than_the_site_allows(made, monkeypatch, more):
    """Whatever bins and digits are asked for: a site's rows are coarse before they are counted."""
    sent = list[Any]()
    leave = clients_describe.Counting._leave

    def leave_and_note(self, arrays):
        sent.append([each.copy() for each in arrays])
        return leave(self, arrays)

    monkeypatch.setattr(clients_describe.Counting, "_leave", leave_and_note)
    run_local(made(least_bin_rows=LEAST, **more))
    assert len(sent) == 3 * 5
    for counts in (each for arrays in sent for each in arrays):
        assert not ((counts > 0) & (counts < LEAST)).any()


def test_bins_that_differ_by_one_row_differ_by_a_group(made):
    """A server that asks twice, in two runs, with edges beside each value of a column."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(200, 1)).astype(np.float32)
    labels = rng.integers(0, 2, 200).astype(np.float32)
    terms, widths = label_terms(labels, 2, Bounds(200)), np.array([0])
    coarse, seen = in_groups(values, widths, LEAST), set()
    for edge in np.sort(values[:, 0]):
        below = (coarse[:, 0] < edge).sum()
        seen.add(int(below))
        assert below == 0 or below >= LEAST
    steps = np.diff(sorted(seen))
    assert steps.min() >= LEAST
    assert len(terms) == 200
    without = {int((values[:, 0] < edge).sum()) for edge in values[:, 0]}
    assert np.diff(sorted(without)).min() == 1  # of a site without a minimum it succeeds


# What leaves


def test_messages_are_those_declared_and_have_no_rows(made):
    hello = {"query.greet", "query.hello"}
    folder, app = listen(made())
    steps = {f"query.describe_rows_{one}" for one in ("open", "count", "cells")}
    check_declared(app, hello | steps | {"evaluate.describe_rows_compare"})
    check_no_rows(app, summary_of(folder))
    assert summary_of(folder)["exchanges"] == 8
    folder, app = listen(made(**SECURE))
    steps = {f"query.describe_rows_{one}sums" for one in ("open", "count", "cell")}
    steps |= {"query.secure_keys", "evaluate.describe_rows_compare"}
    check_declared(app, hello | steps)
    vectors = np.concatenate(masked_in(app))
    assert abs(np.mean(vectors / 2.0**64) - 0.5) < 0.02  # as of uniform numbers
    assert not [one for one in document_of(folder)["columns"] if "by_party" in one]


@pytest.mark.parametrize("fault", [{"loses_reply": True}, {"repeats_replies": True}])
def test_lost_and_repeated_messages_change_nothing(made, fault):
    faults = {name: (lambda step, n: step > 1 and n == 0) for name in fault if "loses" in name}
    again = run_on_network(made(resend_after=0.05), **(faults or fault))
    assert figures_of(again) == figures_of(run_local(made()))


def test_sites_forget_their_rows_and_a_failing_party_ends_the_run(made):
    folder = run_local(made())
    for party in ("party-1", "party-2", "party-3"):
        store = Store.open(home() / "sites" / party / summary_of(folder)["model_id"])
        assert store.finished
        assert with_arrays(store) <= {"reply", "ended"}
    with pytest.raises(PartyError, match=r"^party-2 \(step [4-9]\): broke$"):
        run_on_network(made(), app=fails_from(4))


def change(monkeypatch, kind, **fields):
    """A server that sends requests of a kind with other fields."""
    ask = DescribeRows._ask

    def asks(self, parties, kinds, shapes, **sent):
        if kinds[0] is kind:
            sent |= {name: one(sent) for name, one in fields.items()}
            if "prefixes" in sent:
                shapes = [(len(sent["prefixes"]), 256)]
        return (yield from ask(self, parties, kinds, shapes, **sent))

    monkeypatch.setattr(DescribeRows, "_ask", asks)


def all_prefixes(sent):
    n_columns = len(sent["offsets"]) - 1
    return np.tile(np.arange(20, dtype=np.uint32) + 120, n_columns)


@pytest.mark.parametrize(
    ("kind", "fields", "refused"),
    [
        (
            CountRequest,
            {
                "prefixes": all_prefixes,
                "offsets": lambda sent: np.arange(len(sent["offsets"])) * 20,
            },
            "CountRequest.offsets must give a column of numbers 16 at most, and one of categories",
        ),
        (
            CountRequest,
            {"digit": lambda sent: 3},
            "CountRequest.digit must be 1, got 3: each is counted once",
        ),
        (
            CellsRequest,
            {
                "edges": lambda sent: np.tile(np.arange(40, dtype=np.float32), 7),
                "edge_offsets": lambda sent: np.arange(8) * 40,
            },
            "CellsRequest.edge_offsets must give a column of numbers 1 to 16 bins",
        ),
    ],
)
def test_a_server_that_asks_for_more_is_refused(made, monkeypatch, kind, fields, refused):
    change(monkeypatch, kind, **fields)
    with pytest.raises(FedappError, match=refused.replace(".", r"\.?.*")):
        run_local(made())


def test_a_run_that_describes_may_not_have_a_model_scored():
    """Messages of a family that its methods share: a server's model would be bins of its choice."""
    config = SiteConfig("bank", "rows.csv", allowed=frozenset({"describe-rows", "pax"}))
    for kind in ("evaluate.scoring_scores", "train.scoring_balance"):
        check_policy(config, kind, "pax")
        with pytest.raises(ConfigError, match=r"^strategy must be one that trains to send "):
            check_policy(config, kind, "describe-rows")
    check_policy(config, "query.describe_rows_open", "describe-rows")


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda n, y: (n * 50, y), r"party-1: CountsReply\.counts must be \d+, of 0 to 96 rows"),
        (lambda n, y: (np.maximum(n, 1), y), r"must be of the same rows in every column, 96 at"),
        (lambda n, y: (n[:-1], y), r"CountsReply\.counts must be \d+, of 0 to 96 rows, got "),
        (lambda n, y: (n, y + 1), r"must be of no more labels than rows in each cell"),
        (lambda n, y: (n, -y), r"must be of no more labels than rows in each cell"),
    ],
)
def test_false_counts_are_refused(made, monkeypatch, change, refused):
    monkeypatch.setattr(clients_describe, "count_cells", lambda *a: change(*count_cells(*a)))
    with pytest.raises(FedappError, match=refused):
        run_local(made())


# Sites


def three_tables(write_table):
    """Of the shop a is in another unit, and b has few values; town is spelled in several ways."""
    rng = np.random.default_rng(4)
    nodes = {}
    for place, (name, unit, shift) in enumerate(
        (("bank", 1000.0, 0.0), ("insurer", 1000.0, 0.0), ("shop", 1.0, 2.0))
    ):
        labels = (rng.random(400) < 0.3).astype(int)
        towns = ("Trondheim", "Bergen") if place else ("Trondhiem", "Bergen")
        columns = {
            "a": (unit * np.exp(rng.normal(size=400))).round(4),
            "b": (rng.normal(size=400) + shift).round(3),
            "town": rng.choice(towns, 400),
            "paid": np.where(labels, rng.integers(1, 90, 400), 0),
            "y": labels,
        }
        nodes[name] = {"name": name, "data": write_table(name, **columns)}
    return nodes


def test_differences_between_sites_are_warned_about(settings, sites, write_table):
    nodes = three_tables(write_table)
    run = settings(strategy="describe-rows", parties=3)
    summary = summary_of(folder := run_local(run, sites(*nodes.values())))
    warnings = "\n".join(summary["warnings"])
    for text in (
        "column 'a' has a spread that differs 1,000-fold (",
        "column 'a' is distributed differently at shop (PSI ",
        "column 'b' is distributed differently at shop (PSI ",
        "column 'town' may have a category in two spellings: 'Trondheim' and 'Trondhiem'",
        "column 'paid' alone nearly is the label (AUC 1.0000): is it known before the label?",
    ):
        assert text in warnings, text
    assert "column 'b' has" not in warnings
    assert "the label is" not in warnings
    by_party = document_of(folder)["columns"][1]["by_party"]
    assert by_party["shop"]["drift"] > by_party["bank"]["drift"] > 0


def test_under_masks_each_site_logs_its_own_differences(settings, sites, write_table, caplog):
    nodes = three_tables(write_table)
    trusting = {"allow": "describe-rows", "least-parties": 3}
    contexts = sites(*({**node, **trusting} for node in nodes.values()))
    run = settings(strategy="describe-rows", parties=3, **SECURE)
    with caplog.at_level(logging.WARNING, "fedapp.site"):
        folder = run_local(run, contexts)
    assert not [
        one for one in summary_of(folder)["warnings"] if "differ" in one and "town" not in one
    ]
    logged = caplog.text
    assert "column 'b' is distributed differently at shop (PSI" in logged
    assert "column 'a' has a spread that differs 1,000-fold (" in logged
    assert "at the others" in logged


def test_a_site_that_allows_only_sums_takes_part_under_masks_only(settings, three):
    with pytest.raises(FedappError, match=r"aggregation must be secure for bank"):
        run_local(settings(strategy="describe-rows", parties=3), three(bank={"least-parties": 3}))
    run = settings(strategy="describe-rows", parties=3, **SECURE)
    folder = run_local(run, three(bank={"least-parties": 3}))
    assert sum(figures_of(folder)[0]["counts"]) == 87
    with pytest.raises(FedappError, match=r"privacy.epsilon must be > 0 and <= 1 for shop"):
        run_local(
            settings(strategy="describe-rows", parties=3, **SECURE),
            three(shop={"run-epsilon": 1, "least-parties": 3}),
        )


@pytest.mark.parametrize(
    ("node", "refused"),
    [
        ({"allow": "pax"}, "strategy must be one that the site allows"),
        ({"min-rows": 50}, "table must have at least 50 training rows, got 29"),
        ({"runs-per-day": 0}, "runs-per-day"),
    ],
)
def test_a_sites_policy_is_that_of_any_run(settings, three, node, refused):
    with pytest.raises(FedappError, match=refused):
        run_local(settings(strategy="describe-rows", parties=3), three(bank=node))


def test_settings_that_a_description_cannot_have_are_refused(made):
    with pytest.raises(ConfigError, match="min-parties must be 0 for describe-rows, which needs"):
        DescribeRows.check_settings(made(min_parties=2))
    private = made(privacy__epsilon=1.0)
    with pytest.raises(ConfigError, match=r"privacy\.epsilon must be omitted for describe-rows"):
        check_read(private, {"privacy.epsilon"})
    with pytest.raises(ConfigError, match="eta must be omitted for describe-rows"):
        check_read(load_settings({"strategy": "describe-rows", "eta": 0.5}), {"eta"})


@pytest.mark.slow
def test_three_real_sites_are_described_as_one_table(tmp_path, settings):
    """By the command: the same columns in the clear and under masks, then the same rows."""
    nodes = same_columns(tmp_path)
    whole = {"test-fraction": 0.0, "valid-fraction": 0.0, "parties": 3}

    def described(deployment, *more, **given):
        run_dir = tmp_path / f"described-{len(list(tmp_path.glob('described-*')))}"
        pairs = settings_of({**whole, **given, "run-dir": run_dir})
        deployment.fedapp("describe", "--engine", "federation", *more, *pairs)
        assert (run_dir / "report.html").is_file()
        return RunFolder(run_dir)

    def pooled(tables, label):
        rows = [row for table in tables for row in table]
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        data = write_rows(tmp_path / f"{label}.csv", columns)
        given = {"data": str(data), "label": label, "id": "id", "parties": 1}
        alone = {name.replace("-", "_"): value for name, value in {**whole, **given}.items()}
        return run_local(settings(strategy="describe-rows", objective="auto", **alone))

    def read(node):
        with Path(node["data"]).open() as file:
            return list(csv.DictReader(file))

    with started(tmp_path) as deployment:
        expected = figures_of(pooled([read(node) for node in nodes.values()], "y"))
        for more in ({}, {"describe-rows.aggregation": "secure"}):
            figures = figures_of(described(deployment, **more))
            assert [{**one, "name": ""} for one in figures] == [
                {**one, "name": ""} for one in expected
            ]
        use_tables(deployment, nodes := same_rows(tmp_path))
        small = {"describe-columns.key-bits": 512, "describe-columns.insecure-small-key": "true"}
        columns = figures_of(described(deployment, "--vertical", **small))
        by_id = {}
        for node in nodes.values():
            for row in read(node):
                by_id.setdefault(row["id"], {}).update(row)
        joined = figures_of(pooled([[*by_id.values()]], "outcome"))
        names = ("a", "outcome", "b", "c")  # by party, the label after the bank's
        by_name = {one["name"]: one for one in joined}
        for name, one in zip(names, columns, strict=True):
            unnamed = {"name": "", "categories": []}
            assert {**one, **unnamed, "party": ""} == {**by_name[name], **unnamed, "party": ""}


# Names and differences


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        (("Oslo", "oslo ", "Bergen"), [("Oslo", "oslo ")]),
        (("\ufb01nance", "finance"), [("\ufb01nance", "finance")]),  # a ligature
        (("Trondheim", "Trondhiem"), [("Trondheim", "Trondhiem")]),
        (("Trondheim", "Tronheim"), [("Trondheim", "Tronheim")]),
        (("Anna", "Anne", "A+", "A-", "2019-01", "2019-02"), []),  # short, or of digits
    ],
)
def test_names_in_two_spellings_are_paired(names, pairs):
    assert near_names(names) == pairs
    assert near_names(names[:1]) == []


def parties_cells(values, *scales):
    """Cells of a column that parties have in other units each, and the column's edges."""
    parts = [part * np.float32(unit) for part, unit in zip(values, scales, strict=True)]
    column = np.concatenate(parts)[:, None].astype(np.float32)
    cuts, _, _ = cut(column, np.array([0]))
    nothing = np.empty((len(parts[0]), 0), np.int64)
    cells = (count_cells(part[:, None].astype(np.float32), cuts, nothing)[0] for part in parts)
    return dict(zip(("bank", "insurer", "shop"), cells, strict=False)), cuts.edges


@pytest.mark.slow
@drawn(st.integers(0, 10**6), st.sampled_from(["normal", "lognormal", "t", "rare"]))
@tries(max_examples=100, deadline=None)
def test_equal_tables_do_not_differ_by_chance(seed, kind):
    rng = np.random.default_rng(seed)
    shape = (3, int(rng.integers(20, 2000)))
    draw = {
        "normal": lambda: rng.normal(size=shape),
        "lognormal": lambda: np.exp(rng.normal(size=shape)),
        "t": lambda: rng.standard_t(2, shape),
        "rare": lambda: rng.poisson(0.2, shape),
    }
    values = draw[kind]()
    assert list(differences("column 'a'", *parties_cells(values, 1, 1, 1))) == []


@pytest.mark.parametrize("power", [2, 3, 6])
@pytest.mark.parametrize("kind", ["normal", "lognormal", "shifted"])
def test_another_unit_at_one_party_is_found(kind, power):
    values = np.random.default_rng(1).normal(size=(3, 500))
    values = {"normal": values, "lognormal": np.exp(values), "shifted": values + 20}[kind]
    cells, edges = parties_cells(values, 1, 1, 10.0**-power)
    texts = list(differences("column 'a'", cells, edges))
    assert "column 'a' is distributed differently at shop (PSI " in texts[0]
    fold = f"column 'a' has a spread that differs {10**power:,}-fold ("
    assert texts[1].startswith(fold), texts
    assert "at shop): is it in one unit?" in texts[1]
