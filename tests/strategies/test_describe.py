"""Descriptions of rows, by sums over sites of the same columns, and of columns of the same rows, by
labels that stay encrypted."""

import json
import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from clients import describe as clients_describe
from clients.vertical import ciphertexts
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.workers import Workers
from fedapp.errors import ConfigError, FedappError, PartyError
from fedapp.histograms.fixed_point import Bounds
from fedapp.home import home
from fedapp.messages import vertical
from fedapp.messages.describe import CellsRequest, CountRequest
from fedapp.messages.fields import fields_of
from fedapp.metrics.tables import (
    association,
    count_cells,
    cut,
    differences,
    divergence,
    in_groups,
    label_terms,
    split_cells,
)
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.site.labels import drawn_labels
from fedapp.site.policy import check_policy
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from simulations.deployment import settings_of
from strategies.describe import DescribeColumns, DescribeRows, near_names
from tests.deployed import same_columns, started
from tests.federated import summary_of
from tests.network import fails_from
from tests.network import run as run_on_network
from tests.stored import with_arrays
from tests.tables import deal_columns, made_columns
from tests.tampering import rewrite_letters
from tests.transcript import ORDERED, check_declared, check_no_rows, listen, masked_in

OBJECTIVES = ("binary:logistic", "multi:softprob", "reg:squarederror")
SECURE = {"describe_rows__aggregation": "secure"}
LEAST = 7
SEEDS = pytest.mark.parametrize("seed", range(12))


@pytest.fixture
def by_rows(made):
    """``by_rows(objective, **overrides)``: a description of rows with missing values and names."""

    def make(objective="binary:logistic", labels=None, **more):
        columns, rng = made_columns(objective), np.random.default_rng(1)
        columns["y"] = columns["y"] if labels is None else labels
        columns["c"] = rng.choice(["oslo", "rome", "bonn"], 400, p=(0.6, 0.39, 0.01))
        columns["d"] = np.exp(rng.normal(size=400)).round(5)
        return made("describe-rows", objective, columns=columns, **{"parties": 3, **more})

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
def test_a_description_is_that_of_all_rows_in_one_place_bit_for_bit(by_rows, objective):
    pooled = figures_of(run_local(by_rows(objective, parties=1)))
    assert len(pooled) == 7
    for parties in (2, 3, 5):
        for more in ({}, SECURE):
            assert figures_of(run_local(by_rows(objective, parties=parties, **more))) == pooled


def test_figures_are_numpys_of_the_training_rows(by_rows):
    run = by_rows(test_fraction=0.0, valid_fraction=0.0)
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


@SEEDS
def test_associations_are_those_of_the_rows(seed):
    values, widths, labels = tables(seed)
    cuts, _, _ = cut(values, widths)
    counts, sums = count_cells(values, cuts, label_terms(labels, 2, Bounds(len(labels))))
    by_column = [split_cells(array, cuts.widths) for array in (counts, sums)]
    for place, (cells, of_labels, width) in enumerate(zip(*by_column, widths, strict=True)):
        figures = association(cells, of_labels.astype(float), not width, True)
        column = values[:, place]
        codes = np.searchsorted(cuts.column(place)[:-1], column, "right")
        codes = np.where(np.isnan(column), -1, codes)
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


# Floors


@pytest.mark.parametrize("least", [2, 5, 12])
@SEEDS
def test_where_labels_are_summed_every_value_has_enough_rows_of_each_class(seed, least):
    values, widths, _ = tables(seed)
    classes = np.random.default_rng(seed).integers(0, 3, len(values)) % 2
    frequent = np.bincount(classes)[classes] >= least
    values, classes = values[frequent], classes[frequent]
    rows = in_groups(values, widths, least)
    coarse = in_groups(rows, widths, least, classes)
    for fine, column in zip(rows.T, coarse.T, strict=True):
        _, cells = np.unique(column, return_inverse=True)
        for one in np.unique(classes):
            counts = np.bincount(cells[classes == one])
            assert not ((counts > 0) & (counts < least)).any()
        # Groups are made of whole ones, so that differences are of groups too.
        _, fine = np.unique(fine, return_inverse=True)
        assert len({*zip(fine, cells, strict=True)}) == len(np.unique(fine))


@pytest.mark.parametrize("more", [{}, SECURE])
def test_no_count_is_of_fewer_rows_than_the_site_allows(by_rows, monkeypatch, more):
    """Whatever bins and digits are asked for: a site's rows are coarse before they are counted, and
    rows of a class that has fewer are not."""
    sent = list[Any]()
    counted = clients_describe.counted

    def count_and_note(*arrays):
        sent.append([each.copy() for each in arrays])
        return counted(*arrays)

    monkeypatch.setattr(clients_describe, "counted", count_and_note)
    labels = np.arange(400) % 2
    labels[::50] = 2
    run_local(by_rows("multi:softprob", labels, least_bin_rows=LEAST, **more))
    assert len(sent) == 3 * 5
    for counts in (each for arrays in sent for each in arrays):
        assert not ((counts > 0) & (counts < LEAST)).any()


# What leaves


def test_messages_are_those_declared_and_have_no_rows(by_rows):
    hello = {"query.greet", "query.hello"}
    folder, app = listen(by_rows())
    steps = {f"query.describe_rows_{one}" for one in ("open", "count", "cells")}
    steps |= {"evaluate.describe_rows_compare"}
    check_declared(app, hello | steps)
    check_no_rows(app, summary_of(folder))
    assert summary_of(folder)["exchanges"] == 8
    folder, app = listen(by_rows(**SECURE))
    check_declared(app, hello | steps | {"query.secure_keys"})
    vectors = np.concatenate(masked_in(app))
    assert abs(np.mean(vectors / 2.0**64) - 0.5) < 0.02  # as of uniform numbers
    assert not [one for one in document_of(folder)["columns"] if "by_party" in one]


def change(monkeypatch, kind, **fields):
    """A server that sends requests of a kind with other fields."""
    ask = DescribeRows._ask

    def asks(self, parties, request, *shapes):
        if isinstance(request, kind):
            sent = fields_of(request)
            request = replace(request, **{name: one(sent) for name, one in fields.items()})
            if "prefixes" in sent:
                shapes = [(len(request.prefixes), 256)]
        return (yield from ask(self, parties, request, *shapes))

    monkeypatch.setattr(DescribeRows, "_ask", asks)


MANY = {
    "prefixes": lambda sent: np.tile(
        np.arange(20, dtype=np.uint32) + 120, len(sent["offsets"]) - 1
    ),
    "offsets": lambda sent: np.arange(len(sent["offsets"])) * 20,
}
FINE = {
    "edges": lambda _: np.tile(np.arange(40, dtype=np.float32), 7),
    "edge_offsets": lambda _: np.arange(8) * 40,
}


@pytest.mark.parametrize(
    ("kind", "fields", "refused"),
    [
        (CountRequest, MANY, "offsets must give a column of numbers 16 at most, and one of categ"),
        (CountRequest, {"digit": lambda _: 3}, "digit must be 1, got 3: each is counted once"),
        (CellsRequest, FINE, "edge_offsets must give a column of numbers 1 to 16 bins"),
    ],
)
def test_a_server_that_asks_for_more_is_refused(by_rows, monkeypatch, kind, fields, refused):
    change(monkeypatch, kind, **fields)
    with pytest.raises(FedappError, match=rf"{kind.__name__}\.{refused}"):
        run_local(by_rows())


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda n, y: (n * 50, y), r"party-1: CountsReply\.counts must be of 0 to 96 rows"),
        (lambda n, y: (np.maximum(n, 1), y), r"must be of the same rows in every column, 96 at"),
        (lambda n, y: (n, y + 1), r"must be of no more labels than rows in each cell"),
        (lambda n, y: (n, -y), r"must be of no more labels than rows in each cell"),
    ],
)
def test_false_counts_are_refused(by_rows, monkeypatch, change, refused):
    monkeypatch.setattr(clients_describe, "count_cells", lambda *a: change(*count_cells(*a)))
    with pytest.raises(FedappError, match=refused):
        run_local(by_rows())


# Sites

DIFFERENCES = (
    "column 'a' has a spread that differs 1,000-fold (",
    "column 'a' is distributed differently at shop (PSI ",
    "column 'b' is distributed differently at shop (PSI ",
)
OF_ALL = (
    "column 'town' may have a category in two spellings: 'Trondheim' and 'Trondhiem'",
    "column 'paid' alone nearly is the label (AUC 1.0000): is it known before the label?",
)


@pytest.mark.parametrize("masked", [False, True])
def test_differences_are_warned_about_and_under_masks_each_site_logs_its_own(
    settings, sites, write_table, caplog, masked
):
    """Of the shop a is in another unit, and b has few values; town is spelled in two ways."""
    rng, nodes = np.random.default_rng(4), []
    for name, unit, shift in (("bank", 1000.0, 0.0), ("insurer", 1000.0, 0.0), ("shop", 1.0, 2.0)):
        labels = (rng.random(400) < 0.3).astype(int)
        columns = {
            "a": (unit * np.exp(rng.normal(size=400))).round(4),
            "b": (rng.normal(size=400) + shift).round(3),
            "town": rng.choice(["Trondhiem" if name == "bank" else "Trondheim", "Bergen"], 400),
            "paid": np.where(labels, rng.integers(1, 90, 400), 0),
            "y": labels,
        }
        trusting = {"allow": "describe-rows", "least-parties": 3} if masked else {}
        nodes.append({"name": name, "data": write_table(name, **columns), **trusting})
    run = settings(strategy="describe-rows", parties=3, **(SECURE if masked else {}))
    with caplog.at_level(logging.WARNING, "fedapp.site"):
        folder = run_local(run, sites(*nodes))
    warnings = "\n".join(folder.summary["warnings"])
    for text in (*DIFFERENCES, *OF_ALL):
        assert (text in warnings) == (not masked or text in OF_ALL), text
        assert text in (caplog.text if masked and text in DIFFERENCES else warnings)
    assert "at the others" in caplog.text or not masked
    assert "column 'b' has" not in warnings
    assert "the label is" not in warnings
    if not masked:
        by_party = document_of(folder)["columns"][1]["by_party"]
        assert by_party["shop"]["drift"] > by_party["bank"]["drift"] > 0


def test_a_description_needs_all_parties(by_rows):
    with pytest.raises(ConfigError, match="min-parties must be 0 for describe-rows, which needs"):
        DescribeRows.check_settings(by_rows(min_parties=2))


@pytest.mark.slow
def test_three_real_sites_are_described_as_simulated_ones(tmp_path, settings):
    run_dir, nodes = tmp_path / "described", same_columns(tmp_path)
    given = {"test-fraction": 0.0, "valid-fraction": 0.0, "parties": 3, "run-dir": run_dir}
    with started(tmp_path) as deployment:
        deployment.fedapp("describe", "--engine", "federation", *settings_of(given))
    assert (run_dir / "report.html").is_file()
    data = ",".join(f"{name}={node['data']}" for name, node in nodes.items())
    whole = {"parties": 3, "test_fraction": 0.0, "valid_fraction": 0.0, "objective": "auto"}
    run = settings(strategy="describe-rows", data=data, id="id", label="y", **whole)
    unnamed = {"name": "", "categories": []}
    real, simulated = RunFolder(run_dir), run_local(run)
    assert [one | unnamed for one in figures_of(real)] == [
        one | unnamed for one in figures_of(simulated)
    ]


# Names and differences


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        (("Oslo", "oslo ", "Bergen"), [("Oslo", "oslo ")]),
        (("\ufb01nance", "finance"), [("\ufb01nance", "finance")]),  # a ligature
        (("Trondheim", "Trondhiem"), [("Trondheim", "Trondhiem")]),
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


@pytest.mark.parametrize("kind", ["normal", "lognormal", "t", "rare"])
@SEEDS
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


# Columns of the same rows

SMALL = {"describe_columns__key_bits": 512, "describe_columns__insecure_small_key": True}
N_ROWS = 300


def columns_of(objective):
    columns = made_columns(objective, N_ROWS)
    columns["c"] = np.random.default_rng(1).choice(["oslo", "rome", "bonn"], N_ROWS)
    return columns


@pytest.fixture
def by_columns(made):
    """``by_columns(objective, **overrides)``: a description of columns split among parties."""

    def make(objective="binary:logistic", **more):
        usual = {"parties": 3, "align": "ordered", "share_column_names": True, **SMALL}
        columns = columns_of(objective)
        return made("describe-columns", objective, columns=columns, **{**usual, **more})

    return make


def by_name(folder):
    """Columns without their owners; categories in the order of their names, as owners draw it."""
    columns = {}
    for column in document_of(folder)["columns"]:
        one = {name: column[name] for name in column if name not in ("party", "by_party")}
        if one["categories"]:
            pairs = sorted(zip(one["categories"], one["counts"], strict=True))
            one |= {"categories": [], "counts": pairs}
        one["kind"] = one.get("kind") or "number"  # not sent of labels, nor of numbers alone
        columns["label" if one.get("is_label") else one["name"]] = {**one, "name": ""}
    return columns


# Figures


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_columns_are_described_as_in_one_place_bit_for_bit(by_columns, settings, objective):
    usual = {"data": by_columns(objective).data, "label": "y", "objective": objective}
    pooled = by_name(run_local(settings(strategy="describe-rows", parties=1, **usual)))
    assert len(pooled) == 7
    for parties in (2, 3, 5):
        assert by_name(run_local(by_columns(objective, parties=parties))) == pooled


def test_labels_that_come_in_blocks_give_the_same(by_columns, monkeypatch):
    whole = run_local(by_columns("multi:softprob"))
    monkeypatch.setattr(vertical, "BLOCK_BYTES", 2**14)  # 64 labels for each of two
    blocks = run_local(by_columns("multi:softprob"))
    assert document_of(blocks) == document_of(whole)
    assert summary_of(blocks)["exchanges"] == summary_of(whole)["exchanges"] + 2 * 3


def test_randomised_labels_are_described(by_columns):
    plain = by_name(run_local(by_columns()))["label"]["counts"]
    folder = run_local(by_columns(label_epsilon=1.0))
    counts = by_name(folder)["label"]["counts"]
    config = SiteConfig("party-1", "", simulated=True, label_epsilon=1.0)
    labels = columns_of("binary:logistic")["y"].astype(np.float32)
    drawn = drawn_labels(config, labels, [str(row) for row in range(N_ROWS)])
    assert counts != plain
    assert sum(count for _, count in counts) == sum(count for _, count in plain)
    assert abs(counts[1][1] / sum(c for _, c in counts) - drawn.mean()) < 0.05
    assert any("all labels are randomised" in text for text in summary_of(folder)["warnings"])


# What leaves


def test_names_leave_only_where_their_owner_shares_them(by_columns):
    folder, app = listen(by_columns(share_column_names=False))
    check_no_rows(app, summary_of(folder))
    sums = {f"query.describe_columns_{one}" for one in ("setup", "encrypt", "take")}
    sums |= {f"evaluate.describe_columns_{one}" for one in ("sum", "finish")}
    check_declared(app, ORDERED | sums)


def of_sites(sites, tmp_path, **more):
    columns = {"id": [f"c{row}" for row in range(N_ROWS)], **columns_of("binary:logistic")}
    tables = deal_columns(columns, tmp_path, {"bank": ["id", *"aby"], "shop": ["id", *"cdef"]})
    bank, shop = ({"name": name, "data": tables[name], "id": "id"} for name in tables)
    return sites(bank, {**shop, "label": "", **more})


def at_sites(settings):
    return settings(strategy="describe-columns", parties=2, objective="auto", **SMALL)


@pytest.mark.parametrize(
    ("n_columns", "is_shared", "leaves"),
    [(1, False, False), (1, True, True), (2, True, False)],
    ids=["off", "shared", "too many columns"],
)
def test_figures_over_labels_leave_only_if_shared_rounded_and_few(
    settings, sites, tmp_path, caplog, n_columns, is_shared, leaves
):
    n_rows, rng = 420, np.random.default_rng(3)  # of which 302 train: 30 bits, and a column has 28
    labels, ids = rng.integers(0, 2, n_rows), np.arange(n_rows)
    columns = {f"c{one}": labels + rng.normal(size=n_rows) for one in range(n_columns)}
    every = {"id": ids, "a": rng.random(n_rows), "y": labels, **columns}
    shares = {"bank": ("id", "a", "y"), "shop": ("id", *columns)}
    tables = deal_columns(every, tmp_path, shares)
    bank, shop = ({"name": name, "data": tables[name], "id": "id"} for name in shares)
    bank, shop = {**bank, "share-label-figures": is_shared}, {**shop, "label": ""}
    folder = run_local(at_sites(settings), sites(bank, shop))
    figures = [one["label"] for one in document_of(folder)["columns"] if not one.get("is_label")]
    says = [
        text for text in summary_of(folder)["warnings"] if "figures over labels are not" in text
    ]
    assert [bool(one) for one in figures] == [leaves] * (1 + n_columns)
    assert len(says) == (not leaves)
    if leaves:
        assert set(figures[1]) == {"explained", "iv", "auc", "correlation"}
        assert all(figure == round(figure, 2) for one in figures for figure in one.values())
        assert figures[1]["auc"] > 0.6
    is_logged = "those of 2 columns of other parties have 56 bits, for 302 rows at most 30"
    assert (is_logged in caplog.text) == (n_columns == 2)


def test_sites_share_no_names_unless_they_say_so(settings, sites, tmp_path):
    columns = document_of(run_local(at_sites(settings), of_sites(sites, tmp_path)))["columns"]
    assert [one["name"] for one in columns] == [
        *("column 1", "column 2", "column 3"),
        *("column 1", "column 2", "column 3", "column 4"),
    ]
    assert all(one["categories"] == [] for one in columns)
    assert columns[2]["is_label"]
    more = {"share-column-names": True, "share-categories": 60}
    folder = run_local(at_sites(settings), of_sites(sites, tmp_path, **more))
    columns = document_of(folder)["columns"]
    assert [one["name"] for one in columns[3:]] == ["c", "d", "e", "f"]
    counts = dict(zip(columns[3]["categories"], columns[3]["counts"], strict=False))
    assert {name for name, count in counts.items() if name != " (rare)"} <= {"oslo", "rome", "bonn"}
    assert all(count >= 60 for name, count in counts.items() if name != " (rare)")


def test_no_cell_has_fewer_rows_than_the_site_allows(settings, sites, tmp_path):
    contexts = of_sites(sites, tmp_path, **{"min-rows": 20})
    for column in document_of(run_local(at_sites(settings), contexts))["columns"]:
        counts = np.array([column["missing"], *column["counts"]])
        if column["party"] == "shop":
            assert not ((counts > 0) & (counts < 20)).any()


def test_a_site_that_merges_bins_refuses(settings, sites, tmp_path):
    more = {"least-bin-rows": 5}
    with pytest.raises(FedappError, match=r"least-bin-rows must be 0 in the node config, or"):
        run_local(at_sites(settings), of_sites(sites, tmp_path, **more))
    config = SiteConfig("bank", "rows.csv", allowed=frozenset({"describe-columns"}))
    check_policy(config, "query.describe_columns_setup", "describe-columns")


def test_a_small_key_is_for_trials_only(by_columns):
    with pytest.raises(ConfigError, match=r"describe-columns.key-bits must be >= 2048 without"):
        DescribeColumns.check_settings(by_columns(describe_columns__insecure_small_key=False))


# Parties that break the rules


@pytest.mark.parametrize(
    ("letter", "change", "refused"),
    [
        (
            "CellSums",
            ("counts", lambda counts: counts + 1),
            r"counts must be of the \d+ rows in ev",
        ),
        (
            "CellSums",
            ("ciphertexts", lambda rows: rows[:-1]),
            r"ciphertexts.* must be \d+, got \d+",
        ),
        ("LabelKey", ("n_pairs", lambda n: n + 1), "n_pairs must be 1 for binary:logistic, got 2"),
    ],
)
def test_letters_that_do_not_fit_are_refused_by_name(
    by_columns, monkeypatch, letter, change, refused
):
    rewrite_letters(monkeypatch, letter, *change)
    sender = "party-1" if letter == "LabelKey" else "party-2"
    with pytest.raises(FedappError, match=rf"^{sender} .step \d+.: {letter}\.{refused}"):
        run_local(by_columns(parties=2))


def test_sums_that_leave_out_a_row_are_refused(by_columns, monkeypatch):
    honest = ciphertexts.sum_rows

    def without_first(key, rows, cells, starts, nodes, *rest):
        return honest(key, rows, cells, starts, np.where(np.arange(len(nodes)), nodes, -1), *rest)

    monkeypatch.setattr(ciphertexts, "sum_rows", without_first)
    refused = r"^party-2 .*CellSums.ciphertexts sums must add up to all labels in every column"
    with pytest.raises(FedappError, match=refused):
        run_local(by_columns(parties=2))


def test_false_sums_below_none_are_refused(by_columns, monkeypatch):
    """Sums that add up, of which one cell has fewer labels of a class than none."""
    honest = ciphertexts.pack_sums

    def moved(key, sums, layout, workers):
        numbers = np.zeros(len(sums), dtype=object)
        # Five of three rows of a class change in the second cell, and change back in the fourth.
        numbers[1] = 5 - (5 << layout.field_bits)
        numbers[3] = -numbers[1]
        changes = encrypt(key, numbers.tolist(), Workers(1))
        ring = ring_of(key.n_squared)
        return honest(key, ring.multiply(sums, ring.read(changes)), layout, workers)

    monkeypatch.setattr(ciphertexts, "pack_sums", moved)
    refused = r"^party-2 .*CellSums.ciphertexts sums must be of at most the rows that each cell has"
    with pytest.raises(FedappError, match=refused):
        run_local(by_columns(parties=2))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("counts", lambda counts: counts + 1),
        ("names", lambda names: names[:-1]),
        ("kinds", lambda kinds: kinds[:-1]),
        ("points", lambda points: points[:, :3]),
        ("n_categories", lambda numbers: numbers + 1),
    ],
)
def test_columns_that_do_not_fit_their_counts_are_refused_by_name(
    by_columns, monkeypatch, field, change
):
    described = clients_describe.Described.described

    def falsified(self, counts):
        fields = described(self, counts)
        return {**fields, field: change(fields[field])} if self.name == "party-2" else fields

    monkeypatch.setattr(clients_describe.Described, "described", falsified)
    with pytest.raises(FedappError, match=rf"^party-2.*ColumnsReply\.{field} must (be of|have)"):
        run_local(by_columns())


@pytest.mark.parametrize("how", ["by_rows", "by_columns"])
def test_sites_forget_their_rows_and_a_failing_party_ends_the_run(request, how):
    made = request.getfixturevalue(how)
    folder = run_local(made())
    for party in ("party-1", "party-2", "party-3"):
        store = Store.open(home() / "sites" / party / summary_of(folder)["model_id"])
        assert store.finished
        assert with_arrays(store) <= {"reply", "ended"}
    with pytest.raises(PartyError, match=r"^party-2 \(step [4-9]\): broke$"):
        run_on_network(made(), app=fails_from(4))
